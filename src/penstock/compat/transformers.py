"""Private names of transformers: loading and saving, and the steps of its Trainer's loop.

transformers documents ``from_pretrained`` and ``save_pretrained``, which hold a model whole. What is here is what the
two are made of, so that values can be streamed by the same rules.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)
from transformers.dynamic_module_utils import custom_object_save, get_class_from_dynamic_module
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils.chat_template_utils import render_jinja_template
from transformers.utils.loading_report import LoadStateDictInfo

__all__ = [
    "PrefixChange",
    "WeightConverter",
    "WeightRenaming",
    "apply_converters",
    "apply_renamings",
    "custom_object_save",
    "dot_natural_key",
    "get_class_from_dynamic_module",
    "get_model_conversion_mapping",
    "remove_tied_weights_from_state_dict",
    "rename_source_key",
]
# get_model_conversion_mapping, WeightConverter, WeightRenaming, PrefixChange, apply_*, rename_source_key,
#   dot_natural_key: the rules by which a checkpoint's names and layouts become a model's, and back. Without: only those
#   models could be loaded and exported that are stored as they compute.
# remove_tied_weights_from_state_dict: what ``save_pretrained`` leaves out. Without: tied weights would be there twice.
# custom_object_save, get_class_from_dynamic_module: code that comes with a model. Without: no such models.

# ---- loading and saving


def key_report(model: Any, missing: Iterable[str], unexpected: Iterable[str]) -> tuple[set[str], set[str]]:
    """The missing and the unexpected names of a checkpoint that the model's class does not say are right.

    Without: tied weights, and names that a class ignores, would be errors.
    """
    info = LoadStateDictInfo(
        missing_keys=set(missing),
        unexpected_keys=set(unexpected),
        mismatched_keys=set(),
        conversion_errors={},
        error_msgs=[],
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(info)
    return set(info.missing_keys), set(info.unexpected_keys)


def rules_of(model: Any) -> list[Any] | None:
    """The rules that a model was loaded by; None: it was not loaded. Without: it would be saved under other names."""
    return getattr(model, "_weight_conversions", None)


def set_rules(model: Any, rules: Iterable[Any]) -> None:
    """Note the rules that a model was loaded by, as ``from_pretrained`` does.

    Without: ``save_pretrained`` would take those of a model that was built from nothing, and could write other names
    than the model's folder has.
    """
    model._weight_conversions = list(rules)


def patterns_of(rule: Any) -> tuple[list[str], list[str]]:
    """The patterns that a rule was made with, of the names it takes and of those it makes.

    Without: a run could not keep the rules of its model, which are objects without a text.
    """
    return list(rule._original_source_patterns), list(rule._original_target_patterns)


def dtype_plan(model: Any, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """The dtypes of parameters that a model's class keeps in another one than its weights', by patterns of names.

    Without: routers and norms that are kept in fp32 would be written in 16 bits.
    """
    return cast(Mapping[str, torch.dtype], model._get_dtype_plan(dtype))


def left_out_of_files(model: Any) -> Iterable[str]:
    """The names that a model's class does not save. Without: other tools would find names that they do not know."""
    return model._keys_to_ignore_on_save or ()


def maker_of(cls: Any) -> Callable[..., Any]:
    """The function that makes a model of a configuration: an auto class's, or the private one of a model's own class.

    Without: a class that no auto class knows could not be built.
    """
    return cast(Callable[..., Any], cls.from_config if hasattr(cls, "from_config") else cls._from_config)


# ---- packed documents


class ReachedError(Exception):
    """A model asks which tokens belong together. Without: as ``noticed``, which raises it."""


@contextmanager
def noticed() -> Iterator[None]:
    """Inside, ``ReachedError`` is raised where masks for packed documents begin, by a function in the place of
    ``masking_utils.find_packed_sequence_indices``.

    Without: it could not be told which models keep packed documents apart.
    """

    def reached(*_: Any, **__: Any) -> NoReturn:
        raise ReachedError

    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = reached
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


# ---- attention


def implementation(model: Any) -> str | None:
    """The name of a model's implementation of attention.

    Without: ranks that share a sequence could neither call it inside of theirs, nor give it back.
    """
    return cast("str | None", model.config._attn_implementation)


def stand_in(model: Any, attend: Callable[..., Any], mask: Callable[..., Any]) -> str | None:
    """Register an attention function and a function for its masks under a new name, which the model then has. Returns
    the name; None: the model's class calls attention in its own way.

    Without: the library would only warn of such a class, whose tokens would then attend to their rank's span alone.
    """
    can = getattr(model, "_can_set_attn_implementation", None)
    if can is None or not can():
        return None
    name = f"penstock_{next(_numbers)}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)
    return name


def take_back(model: Any, name: str, before: str | None) -> None:
    """Give a model the implementation that it had, and forget the functions that were registered for it.

    Without: those of each model that was ever wrapped would stay, and the model with them.
    """
    model.set_attn_implementation(before)
    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)


def attention_of(name: str, module: nn.Module) -> Callable[..., Any] | None:
    """The attention function of a name for a module; that of ``eager`` is the one in the file of the module's class.

    Without: ranks that share a sequence could not compute attention by the implementation that the model has.
    """
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return cast("Callable[..., Any] | None", AttentionInterface._global_mapping.get(name, eager))


def mask_of(name: str) -> Callable[..., Any]:
    """The function that makes masks for the attention of a name.

    Without: ranks that share a sequence would have the library's masks of their own spans, and none of all its tokens.
    """
    return cast("Callable[..., Any]", AttentionMaskInterface._global_mapping[name])


def of_documents(mask_function: Callable[..., Any], positions: torch.Tensor) -> Callable[..., Any] | None:
    """A mask's function that keeps packed documents apart, as the library makes it of the ``positions`` [b, T] of their
    tokens; None: there is one document in each row.

    Without: ranks that share a sequence would have to refuse packed documents.
    """
    found = masking_utils.find_packed_sequence_indices(positions)
    if found is None:
        return None
    own = masking_utils.remap_positions_for_packed_sequence(mask_function, positions)
    return masking_utils.and_masks(masking_utils.packed_sequence_mask_function(found), own)


_numbers = itertools.count(1)


# ---- chats


def marked_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, tools: Any, chat_template: str | None = None
) -> tuple[str, list[tuple[int, int]]]:
    """A chat's text by a template with ``{% generation %}``, and what that marks: of each stretch its first character,
    and the one behind its last. ``chat_template`` None: the tokenizer's own.

    Without: the template's marks would be had as a mask of tokens alone, which leaves out all but the first token of a
    last character, and takes a stretch whose last character is in no token to go on to the end of the chat.
    """
    said = [{key: value for key, value in message.items() if value is not None} for message in messages]
    template = tokenizer.get_chat_template(chat_template, tools=tools)
    how = {"chat_template": template, "return_assistant_tokens_mask": True}
    rendered: Any = render_jinja_template([said], tools, **how, **tokenizer.special_tokens_map)
    (text,), (where,) = rendered
    return text, where


# ---- the Trainer

if TYPE_CHECKING:
    _Mixed = transformers.Trainer
else:
    _Mixed = object


REPLACED = (
    *("_clip_grad_norm", "_get_grad_norm", "_save", "_save_optimizer_and_scheduler", "_load_from_checkpoint"),
    *("_load_optimizer_and_scheduler", "_load_best_model", "_move_model_to_device"),
)
"""Steps of the loop that ``TrainerSteps`` takes without the library's own. Without: those of a class behind it would
be left out, and nobody would say so."""


class TrainerSteps(_Mixed):
    """The private steps of a ``transformers.Trainer``'s loop, each handed to a method that says what it is to do.

    Without them: the library would clip, save, load and move weights that it does not have, and placeholders with them.
    """

    # ---- to be defined

    norm_of_step: Callable[[], float]
    """The norm of the gradients of the step that the loop is about to finish."""
    begin_checkpoint: Callable[[Path], None]
    """A checkpoint is about to be written into a folder, which may have an earlier one."""
    write_model: Callable[[Path], None]
    """Write the model and what belongs to it into a folder."""
    save_whole: Callable[[Path], None]
    """Write what training goes on from, beside the model, into a checkpoint's folder."""
    flush_checkpoint: Callable[[Path], None]
    """Make durable what this process has written into a checkpoint's folder."""
    wait_for_all: Callable[[], None]
    """Return when all processes have come here."""
    look_at: Callable[[Path], None]
    """A checkpoint is to be resumed; its model is to be looked at now, and ``load_state`` comes later."""
    load_state: Callable[[Path], None]
    """Take over what ``save_whole`` wrote."""
    load_best: Callable[[], None]
    """Training is over: take over the best checkpoint."""
    is_in_forward: Callable[[], bool]
    """True within a forward of a micro-batch."""
    items_of_evaluation: Callable[[], Any]
    """``items_of`` the micro-batch that is evaluated now."""

    # ---- the library's own, by its names

    def prepared(self, inputs: Any) -> Any:
        """A batch as the library hands it to ``compute_loss``, of the type that the collator gave it."""
        return self._prepare_inputs(inputs)

    def items_of(self, micro_batches: list[Any]) -> Any:
        """The items that losses of micro-batches are divided by, of all processes; None: they are not counted."""
        return super()._get_num_items_in_batch(micro_batches, self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return torch.tensor(self.norm_of_step())

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.norm_of_step()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The library's own, which writes the loop's state last, and then removes old checkpoints. Without: it would
        write over an earlier checkpoint file by file, so that a kill would leave what looks like a whole one and is of
        two runs; and a power cut would leave no checkpoint at all, the old ones gone and the new one not yet written.
        """
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self.begin_checkpoint(folder)
        state = self.state

        def save_to_json(path: str) -> None:
            type(state).save_to_json(state, path)
            self.flush_checkpoint(Path(path).parent)

        vars(state)["save_to_json"] = save_to_json
        try:
            super()._save_checkpoint(model, trial)
        finally:
            del vars(state)["save_to_json"]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.save_whole(Path(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.look_at(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.load_state(Path(checkpoint))

    def _load_best_model(self) -> None:
        self.load_best()

    def _save_rng_state(self, output_dir: str) -> None:
        """The library's own, of all processes. Without: the file that says that a checkpoint is complete could be there
        before a process has written its part."""
        super()._save_rng_state(output_dir)
        self.flush_checkpoint(Path(output_dir))
        self.wait_for_all()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """The library's own, outside of forwards. Without: it would gather within one, in evaluation."""
        return self.items_of_evaluation() if self.is_in_forward() else self.items_of(batch_samples)

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        self.write_model(Path(str(self.args.output_dir if output_dir is None else output_dir)))

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """No autocast: the engine computes in the precision that was asked for."""
        return super()._build_accelerator_args(**kwargs) | {"mixed_precision": "no"}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the model stays where it is until the engine takes its state over."""
