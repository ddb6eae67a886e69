"""A model's profile by running it on the meta device: exact, of any model, in the time that its Python takes.

torch and transformers are imported when a profile is asked for, and not before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from penstock.errors import ConfigError
from penstock.hardware.machine import DeviceKind
from penstock.schedule.collection import no_collection
from penstock.schedule.place import FP32, Format
from penstock.schedule.program import ELEMENTWISE, EXACT, OF_BLOCK, GroupSpec, Program, Stage
from penstock.schedule.work import BothWays
from penstock.shape.model import ModelProfile

if TYPE_CHECKING:
    import torch
    from torch import nn

    from penstock.tape.dry import DryRun
    from penstock.tape.suspended import LossFn

MicroBatchSpec = Callable[[int, int], Mapping[str, Any]]
"""From (sequences, tokens each) to a micro-batch: a mapping of tensors, on the CPU or on the meta device."""


Change = Callable[["nn.Module"], "nn.Module"]


@dataclass(frozen=True, kw_only=True)
class MetaModel:
    """A model that ``build`` makes, run on the meta device as ``kind`` of device would run it. A ``ModelShape``.

    ``repeats``: the forward is a loop over its blocks, so that equal ones need to be run only once. ``loss_fn``: as for
    ``penstock.wrap``. Weights of 2 bytes are bf16. ``cp``: ranks that share each sequence, of which this is one; the
    model is one of transformers. ``splits``: as of ``Tape``.
    """

    name: str
    build: Callable[[], "nn.Module"]
    micro_batch: MicroBatchSpec
    loss_fn: "LossFn | None" = None
    kind: DeviceKind = "cuda"
    repeats: bool = False
    cp: int = 1
    splits: bool = False

    @no_collection()  # torch and transformers are a million objects without a cycle
    def profile(self, micro_batch_size: int, sequence_length: int, form: Format) -> ModelProfile:
        """See ``ModelShape.profile``."""
        import torch

        from penstock.tape import dry

        model, names, parameters = self._built
        span = -(-sequence_length // self.cp)
        micro_batch = self.micro_batch(micro_batch_size, span)
        found = dry.dry_run(
            model,
            micro_batch if self.cp == 1 else _of_span(micro_batch),
            dtype=torch.float32 if form.weight_bytes == FP32 else torch.bfloat16,
            kind=self.kind,
            loss_fn=self.loss_fn,
            form=form,
            cp=self.cp,
            splits=self.splits,
        )
        whole = (found.groups, found.stages, found.work) if names is None else _lengthen(found, names)
        if whole is None:
            return self._unshortened.profile(micro_batch_size, sequence_length, form)
        groups, stages, work = whole
        return ModelProfile(
            program=Program(groups=groups, stages=stages),
            work=work,
            tokens=micro_batch_size * span,
            parameters=parameters,
        )

    @cached_property
    def _built(self) -> tuple["nn.Module", tuple[str, ...] | None, int]:
        """The model, the names of all its blocks where some are left out, and the parameters of all."""
        from penstock.tape import dry

        model = dry.build_on_meta(self.build)
        parameters = sum(p.numel() for p in model.parameters())
        return model, dry.shorten(model) if self.repeats else None, parameters

    @cached_property
    def _unshortened(self) -> "MetaModel":
        return replace(self, repeats=False)


_KINDS = (ELEMENTWISE + EXACT, ELEMENTWISE, EXACT, "")
"""The endings that may follow a block's name in the names of its groups."""


def _lengthen(
    short: "DryRun", names: tuple[str, ...]
) -> tuple[tuple[GroupSpec, ...], tuple[Stage, ...], tuple[BothWays, ...]] | None:
    """The run of a model with all blocks ``names``, from the run with the first, the second and the last of them.

    None where the run was not: prologue, three calls, epilogue, each call reading its own groups, which come last, as
    many as of the others, and leaving nothing to any but the next (logits of routers go to the loss, which depends on
    how many there are).
    """
    calls = short.stages[1:-1]
    if [s.kind for s in calls] != ["call"] * 3 or any(s.kept for s in calls):
        return None
    each = len(calls[0].forward_reads)
    own = len(short.groups) - 2 * each  # the first of the second block's groups
    if any(s.forward_reads != tuple(range(own + (i - 1) * each, own + i * each)) for i, s in enumerate(calls)):
        return None
    more = len(names) - 3

    def moved(groups: tuple[int, ...], by: int) -> tuple[int, ...]:
        """Ends stay, the second block's groups are copied, and the last block's are behind all copies."""
        return tuple(g + each * (0 if g < own else by if g < own + each else more) for g in groups)

    def renamed(group: GroupSpec, by: int, name: str) -> GroupSpec:
        kind = next(end for end in _KINDS if group.name.endswith(end))
        return replace(group, index=group.index + each * by, name=f"{OF_BLOCK}{name}{kind}")

    def stage_of(stage: Stage, by: int, name: str) -> Stage:
        return replace(
            stage,
            index=stage.index + by,
            name=name,
            forward_reads=moved(stage.forward_reads, by),
            backward_reads=moved(stage.backward_reads, by),
            gradients=moved(stage.gradients, by),
        )

    first, second, last = calls
    copies = range(more + 1)
    stages = (
        short.stages[0],
        first,
        *(stage_of(second, i, names[1 + i]) for i in copies),
        stage_of(last, more, names[-1]),
        stage_of(short.stages[-1], more, short.stages[-1].name),
    )
    groups = (
        *short.groups[:own],
        *(renamed(group, i, names[1 + i]) for i in copies for group in short.groups[own : own + each]),
        *(renamed(group, more, names[-1]) for group in short.groups[own + each :]),
    )
    own_work = short.work
    return groups, stages, (*own_work[:2], *([own_work[2]] * (more + 1)), *own_work[3:])


def from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    kind: DeviceKind = "cuda",
    loss_tile: int | None = None,
    change: "Change | None" = None,
    cp: int = 1,
    splits: bool = False,
) -> MetaModel:
    """A causal language model of a Hugging Face configuration (``config.json``, ``model.config`` in settings).

    Raises (when profiled):
        ConfigError: Hugging Face cannot build it.
        ModelError: it cannot be run without values.
    """
    vocabulary = config.get("vocab_size")
    return MetaModel(
        name=name,
        build=(lambda: _build(config)) if change is None else (lambda: change(_build(config))),
        micro_batch=lambda rows, length: _tokens(rows, length, vocabulary),
        loss_fn=None if loss_tile is None else _tiled(loss_tile),
        kind=kind,
        repeats=True,
        cp=cp,
        splits=splits,
    )


def _tiled(tile: int) -> "LossFn":
    """The loss in tiles, which imports torch, once a model is run."""

    def loss_fn(model: "nn.Module", micro_batch: Mapping[str, Any]) -> "torch.Tensor":
        from penstock.loss.tiled import tiled_loss

        return tiled_loss(tile)(model, micro_batch)

    return loss_fn


def _build(config: Mapping[str, Any]) -> "nn.Module":
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    settings = {k: v for k, v in config.items() if k != "model_type"}
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"model.config.model_type={kind!r} is not a type that the installed transformers knows")
    build = cast(Any, AutoModelForCausalLM).from_config  # transformers leaves it without types
    try:
        model: nn.Module = build(AutoConfig.for_model(str(kind), **settings | {"use_cache": False}))
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.config: Hugging Face cannot build this {kind} model: {reason[:400]}") from error
    return model


def _tokens(rows: int, length: int, vocabulary: int | None) -> Mapping[str, Any]:
    """Token ids and labels; which ones they are changes nothing but must be possible."""
    import torch

    tokens = torch.arange(rows * length).remainder(vocabulary or 2).view(rows, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _of_span(micro_batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A micro-batch with what the engine adds for ranks that share each sequence."""
    import torch

    ids = micro_batch["input_ids"]
    places = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    more = {"position_ids": places, "attention_mask": torch.ones_like(ids), "shift_labels": ids.clone()}
    return {**micro_batch, **more, "num_items_in_batch": torch.tensor(ids.numel())}
