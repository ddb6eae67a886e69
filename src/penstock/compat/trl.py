"""Private names of TRL: where its trainers keep books and compute a reference's log probabilities; and what of several
processes their figures are made of."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_trainer import SFTTrainer

__all__ = ["Bookkeeping", "Books", "DPOTrainer", "KTOTrainer", "ReferenceSteps", "RewardTrainer", "SFTTrainer"]
# The trainers: from the modules that have them, as ``trl`` imports lazily, which type checkers do not follow. Without:
#   the same classes, as of ``trl``.

Metrics = dict[str, defaultdict[str, list[float]]]


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A tensor that ``compute_loss`` would gather from all processes, on the CPU, as this one has it. ``counted``:
    accelerate drops what is more than an epoch's examples, of what is gathered for metrics."""

    value: torch.Tensor
    counted: bool


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Metrics of one micro-batch of several processes, by their names, and the tokens that it has trained on; None: it
    was evaluated."""

    metrics: Mapping[str, float]
    tokens: int | None


Values = Iterator[torch.Tensor]
FiguresOf = Callable[[Values, bool, bool], Figures]
"""The figures of what ``compute_loss`` gathers, flat, in its order: of training or not, with a router's loss or not."""


def _total(values: Values) -> float:
    return float(next(values).sum())


def _mean(values: Values) -> float:
    return float(next(values).float().mean())


def _share(values: Values) -> float:
    """One sum divided by the next."""
    total, count = _total(values), _total(values)
    return total / count if count else 0.0


# TRL 1.16's order, in which its ``compute_loss`` gathers. Where a version gathers more or less it is refused.
def of_sft(values: Values, training: bool, balanced: bool) -> Figures:
    """Figures of ``SFTTrainer``: it gathers the labels, the sum of their entropies, those that were predicted."""
    labels, entropy, predicted = _total(values), _total(values), _total(values)
    tokens = int(_total(values)) if training else None
    metrics = {
        "entropy": entropy / labels if labels else 0.0,
        "mean_token_accuracy": predicted / labels if labels else 0.0,
    }
    return Figures(metrics=metrics | ({"aux_loss": _mean(values)} if balanced else {}), tokens=tokens)


def of_dpo(values: Values, training: bool, balanced: bool) -> Figures:
    """Figures of ``DPOTrainer``."""
    metrics = {"aux_loss": _mean(values)} if balanced else {}
    metrics["entropy"] = _share(values)
    tokens = int(_total(values)) if training else None
    metrics |= {name: _share(values) for name in ("logits/chosen", "logits/rejected", "mean_token_accuracy")}
    rewards = (f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins"))
    metrics |= {name: _mean(values) for name in (*rewards, "logps/chosen", "logps/rejected")}
    return Figures(metrics=metrics, tokens=tokens)


def of_reward(values: Values, training: bool, balanced: bool) -> Figures:
    """Figures of ``RewardTrainer``, which knows no router's loss."""
    tokens = int(_total(values)) if training else None
    rewards = next(values).float()
    metrics = {"min_reward": rewards.min(), "mean_reward": rewards.mean(), "max_reward": rewards.max()}
    found = {name: float(value) for name, value in metrics.items()}
    return Figures(metrics=found | {"accuracy": _mean(values), "margin": _mean(values)}, tokens=tokens)


def _empty() -> Metrics:
    return {"train": defaultdict(list), "eval": defaultdict(list)}


@dataclass(kw_only=True)
class Books:
    """The notes that ``compute_loss`` makes beside the loss: entropy, accuracy of tokens and the like, and tokens
    trained on. ``gathered``: what it would have gathered from all processes to make them of.
    """

    metrics: Metrics = field(default_factory=_empty)
    tokens: int = 0
    gathered: list[Gathered] = field(default_factory=list)

    def note(self, value: Any, *, counted: bool) -> bool:
        """Keep what ``compute_loss`` gathers. False: it is something that TRL's own does not gather."""
        if isinstance(value, torch.Tensor):
            self.gathered.append(Gathered(value=value.detach().to("cpu", copy=True), counted=counted))
        return isinstance(value, torch.Tensor)

    def add_span(self, other: "Books") -> None:
        """Count what those of another span of the same sequences have counted, too."""
        self.gathered = [
            Gathered(value=own.value + theirs.value, counted=own.counted)
            for own, theirs in zip(self.gathered, other.gathered, strict=True)
        ]

    def count_tokens(self, batch: Mapping[str, Any]) -> None:
        """Count the tokens of a whole batch as ``SFTTrainer`` does in training, in the place of those of its spans and
        padding."""
        mask, positions = batch.get("attention_mask"), batch.get("position_ids")
        if mask is not None:
            self.gathered[3] = Gathered(value=mask.sum().cpu(), counted=True)
        elif positions is not None:
            self.gathered[3] = Gathered(value=torch.tensor(positions.size(1)), counted=True)

    def of_processes(
        self, mode: str, rows: Sequence[Sequence[Gathered]], counted: int | None, figures: FiguresOf
    ) -> bool:
        """Make the notes of one micro-batch those of several: of what each of their processes has gathered. False: it
        has gathered something else than TRL does. ``counted``: the number of values that count; None: all."""
        if len({len(row) for row in rows}) > 1:
            return False
        values = iter([_column(column, counted) for column in zip(*rows, strict=True)])
        try:
            found = figures(values, mode == "train", "aux_loss" in self.metrics[mode])
        except StopIteration:
            return False
        if next(values, None) is not None:
            return False
        for name, value in found.metrics.items():
            self.metrics[mode][name] = [value]
        if found.tokens is not None:
            self.tokens = found.tokens
        return True


def _column(column: Sequence[Gathered], counted: int | None) -> torch.Tensor:
    values = torch.cat([one.value.reshape(-1) for one in column])
    return values[:counted] if column[0].counted else values


class Bookkeeping:
    """Sends the books of TRL's trainers, which are attributes of their own, to ``books``.

    Without: forwards that take turns, or are run again, would count in each other's books.
    """

    @property
    def books(self) -> Books:
        """The books to write to now."""
        raise NotImplementedError

    @property
    def _metrics(self) -> Metrics:
        return self.books.metrics

    @_metrics.setter
    def _metrics(self, metrics: Metrics) -> None:
        self.books.metrics = metrics

    @property
    def _total_train_tokens(self) -> int:
        return self.books.tokens

    @_total_train_tokens.setter
    def _total_train_tokens(self, tokens: int) -> None:
        self.books.tokens = tokens


class ReferenceSteps:
    """Sends what TRL has a reference say of a data set, before the first step, to ``with_reference``.

    Without: TRL keeps it beside the data, or where data are in memory alone in a temporary folder, which is gone when a
    run goes on, and has no model then any more that could say it; nor do several processes find it there.
    """

    if TYPE_CHECKING:

        def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any: ...

    def with_reference(self, dataset: Any, model_hash: str, name: str, batch_size: int) -> Any:
        """The data set with columns for what the reference says. ``model_hash``: the reference's. ``name``: the data
        set's."""
        raise NotImplementedError

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        model_hash: Any = self._precompute_model_hash  # type: ignore[attr-defined]
        return self.with_reference(dataset, model_hash, name, batch_size)


@contextmanager
def hashed_by(cls: type, own: Callable[[nn.Module], str]) -> Iterator[None]:
    """Inside, the module of a class of TRL's hashes models by ``own``, in the place of its ``hash_module``. Without: a
    model on the meta device, which has no values to hash, could not be a reference."""
    module: Any = sys.modules[next(base.__module__ for base in cls.__mro__ if base.__module__.startswith("trl."))]
    theirs, module.hash_module = module.hash_module, own
    try:
        yield
    finally:
        module.hash_module = theirs
