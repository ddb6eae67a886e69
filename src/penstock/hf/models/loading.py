"""``load``: a Hugging Face model without memory, and where its values come from when the engine asks for them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.compat.transformers import key_report, set_rules
from penstock.engine import start
from penstock.errors import ConfigError, ModelError
from penstock.hf.models import mapping, shell
from penstock.hf.models.folder import CONFIG, GENERATION, resolve, some, weight_files
from penstock.hf.models.shards import Stored, check_index, equal, read_headers, read_into, read_whole

_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_FEW = 8  # names that are all said


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model whose parameters have no memory, and what came with it.

    ``weights``: for ``penstock.wrap(model, weights=...)``. ``folder``: where its files are, those of its tokenizer too.
    ``dtype``: the one that its weights are in. ``config``: as the folder has it. ``rules``: of transformers, by which
    names and layouts of the files became those of the model.
    """

    model: nn.Module
    weights: "FolderWeights"
    folder: Path
    dtype: torch.dtype
    config: Any
    rules: tuple[Any, ...] = field(repr=False)


def load(
    name: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    model_class: Any = None,
    new_head: bool = False,
    **changes: Any,
) -> Loaded:
    """A model's class, configuration and shards; no value is read, except of tied weights that are stored twice.

    Args:
        name: a folder as ``save_pretrained`` writes it, or a name on the hub.
        revision: on the hub: a branch, a tag or a commit.
        trust_remote_code: run the Python code that the folder brings, if it does.
        model_class: a class of transformers; None: the one that the configuration names, else the causal language
            model of its type.
        new_head: the folder is of a model with another head, or none. Outside of the base model, what it has no values
            of the model initialises, and what the model has no place for is left.
        changes: fields of the configuration that are to be others than the folder's, such as ``num_labels=1``.

    Raises:
        ConfigError: files are missing, damaged, pickled or quantised; or transformers does not know the model.
        ModelError: tensors are missing, of another shape, or have no place in the model.
        StoreError: a file cannot be read.
    """
    folder = resolve(name, revision=revision, trust_remote_code=trust_remote_code, weights=True)
    config = shell.config_of(folder, trust_remote_code=trust_remote_code)
    _refuse_quantised(folder, config)
    for key, value in changes.items():
        if not hasattr(config, key):
            raise ConfigError(f"{key}={value!r}: the configuration of a {config.model_type} has no such field")
        try:
            setattr(config, key, value)
        except shell.REFUSED as error:
            raise ConfigError(f"{key}={value!r}: transformers does not take that: {shell.short(error)}") from error
    if changes.get("dtype") not in (None, "auto") and shell.dtype_of(config) is None:
        raise ConfigError(f"dtype={changes['dtype']!r}: torch has none of that name; give one as torch.bfloat16 is")
    files, index = weight_files(folder)
    stored = read_headers(files)
    if index is not None:
        check_index(stored, index, folder)
    cls = model_class or shell.class_of(config, folder, trust_remote_code=trust_remote_code)
    model = shell.build(config, cls)
    weights = FolderWeights(model, stored, folder, new_head=new_head)
    dtype = shell.dtype_of(config) or next(
        (t.dtype for t in stored.values() if t.dtype.is_floating_point), torch.float32
    )
    if dtype not in _TRAINABLE:
        raise ConfigError(
            f"{folder / CONFIG}: dtype is {shell.dtype_name(dtype)}, and its files are not: write the one that they "
            "are in"
        )
    _like_loaded(model, folder, dtype, weights)
    where = f"the weights in {folder} (loaded.weights, of what penstock.hf.load has returned)"
    start.expect_weights(model, weights, where)
    return Loaded(model=model, weights=weights, folder=folder, dtype=dtype, config=config, rules=weights.rules)


def _like_loaded(model: Any, folder: Path, dtype: torch.dtype, weights: "FolderWeights") -> None:
    """Leave the traces on a model that ``from_pretrained`` does, by which it is saved and generates."""
    set_rules(model, weights.rules)
    for part in shell.parts(model.config):
        part.dtype = dtype
    model.config.name_or_path = model.name_or_path = str(folder)
    if model.can_generate() and (folder / GENERATION).is_file():
        try:
            model.generation_config = type(model.generation_config).from_pretrained(folder)
        except shell.REFUSED as error:
            raise ConfigError(f"{folder / GENERATION}: transformers cannot read it: {shell.short(error)}") from error


def _refuse_quantised(folder: Path, config: Any) -> None:
    for part in shell.parts(config):
        how = getattr(part, "quantization_config", None)
        if how is None:
            continue
        kind = how.get("quant_method") if isinstance(how, Mapping) else getattr(how, "quant_method", None)
        raise ConfigError(
            f"{folder}: its weights are quantised ({kind}), and training changes weights by less than such a format "
            "can hold: give the folder of the model that it was made from, or dequantise it with transformers "
            "(model.dequantize(), then save_pretrained) and give that one"
        )


class FolderWeights:
    """The values of a model in a folder of safetensors files, read one parameter at a time. A ``WeightSource``.

    A tensor that the model has as it is stored needs ``PIECE`` bytes to be read. One that is converted (experts that
    are stored one by one) needs all that its conversion takes and gives: that of one parameter of one block.
    """

    def __init__(self, model: Any, stored: Mapping[str, Stored], folder: Path, *, new_head: bool = False) -> None:
        """``new_head``, and errors: as of ``load``."""
        self._new_head = new_head
        self._model = model
        self._stored = stored
        self._folder = folder
        on_meta = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in stored.items()}
        found = mapping.inwards(model, on_meta)
        self.rules = found.used
        self._step_of = {target: step for step in found.steps for target in step.targets}
        self._alias: dict[str, str] = {}  # every name of a value -> the one that a step makes
        self._made: dict[str, torch.Tensor] = {}  # by the last conversion, and not asked for yet
        state = model.state_dict()
        self._check_shapes(state)
        self._check_names(state, found.unknown)
        for names in _same(model, state):
            self._adopt(names)

    def _check_shapes(self, state: Mapping[str, torch.Tensor]) -> None:
        for target, step in self._step_of.items():
            made, wanted = step.targets[target], state.get(target)
            if wanted is None:
                continue
            source = self._stored[step.sources[0][0]]
            if made.shape != wanted.shape:
                rule = "" if step.copies else ", or transformers' rule for such names does not fit this configuration"
                raise ModelError(
                    f"{source.file}: {source.name} makes {target} of shape {list(made.shape)}, and by its "
                    f"configuration the model has {list(wanted.shape)} there: the folder's files are of two "
                    f"models{rule}"
                )
            kinds = _TRAINABLE if wanted.is_floating_point() else (wanted.dtype,)
            if made.dtype not in kinds:
                raise ConfigError(
                    f"{source.file}: {source.name} is {shell.dtype_name(made.dtype)}, and the model's {target} is "
                    f"{shell.dtype_name(wanted.dtype)}: if it is quantised, dequantise the model with transformers "
                    "first"
                )

    def _check_names(self, state: Mapping[str, torch.Tensor], unknown: Iterable[str]) -> None:
        """Refuse missing and unknown names, but for those that transformers takes for right, such as tied weights."""
        # A conversion may make more than the model has (a branch that a configuration switches off).
        surplus = {target for target in self._step_of if target not in state}
        missing, unexpected = key_report(self._model, self._missing(state), {*unknown, *surplus})
        lacking = {name for name in missing if self._part(name) is None}
        prefix = self._model.base_model_prefix
        if self._new_head:
            if not (prefix and hasattr(self._model, prefix)):
                raise ConfigError(
                    f"new_head=True: a {type(self._model).__name__} has no base model that could be the folder's: give "
                    "a model_class that has one, and a head"
                )
            if not lacking and not unexpected:
                raise ConfigError(
                    f"{self._folder}: new_head=True would have no effect, as it has all of a "
                    f"{type(self._model).__name__}: leave it out"
                )
            missing, unexpected = missing - lacking, {name for name in unexpected if self._has_part(name)}
        if missing:
            raise ModelError(
                f"{self._folder}: {len(missing)} of the model's {len(state)} tensors are not in its files: "
                f"{_names(missing)}. Is it a folder of {type(self._model).__name__}? {self._other_type()}Give one that "
                "has all of them" + (", or new_head=True, and the model initialises these" * (lacking == missing))
            )
        if unexpected:
            raise ModelError(
                f"{self._folder}: its files have {len(unexpected)} tensors that {type(self._model).__name__} "
                f"has no place for: {_names(unexpected)}. Give the folder of one model, with its own "
                "config.json"
            )

    def _part(self, name: str) -> str | None:
        """The part of the base model that a parameter is of, such as ``model.layers``; None: it is of a head."""
        base, _, rest = name.partition(".")
        return f"{base}.{rest.partition('.')[0]}." if base == self._model.base_model_prefix else None

    def _has_part(self, name: str) -> bool:
        """True if a name is of a part of the base that the model has."""
        part = self._part(name)
        return part is not None and any(own.startswith(part) for own in self._model.state_dict())

    def _other_type(self) -> str:
        """Advice where the rules for names are those of another type of model than the class's own; else empty."""
        cls, given = type(self._model), self._model.config.model_type
        own = getattr(cls.config_class, "model_type", given)
        return f"Names are read by the rules of {given!r}: try model_type {own!r} in {CONFIG}. " if own != given else ""

    def _missing(self, state: Mapping[str, torch.Tensor]) -> set[str]:
        return {
            name
            for names in _same(self._model, state)
            if not any(alias in self._step_of for alias in names)
            for name in names
        }

    def _adopt(self, names: tuple[str, ...]) -> None:
        """Let a value be found under all of its names.

        Raises:
            ModelError: the files have it under two of them, with different values.
        """
        own = [name for name in names if name in self._step_of]
        for other in own[1:]:
            if not self._equal(own[0], other):
                raise ModelError(
                    f"{self._folder}: its files have {own[0]} and {other} with different values, and by its "
                    "configuration they are one (tie_word_embeddings): set that to false in its config.json if they "
                    "are meant to be two"
                )
        if own:
            self._alias |= dict.fromkeys(names, own[0])

    def _equal(self, one: str, other: str) -> bool:
        """True if the files have the same values under two names. In pieces, as this is the largest array of most."""
        steps = [self._step_of[name] for name in (one, other)]
        if all(step.copies for step in steps):
            return equal(*(self._stored[step.sources[0][0]] for step in steps))
        return torch.equal(self._value(one), self._value(other))

    def __contains__(self, name: str) -> bool:
        """True if there are values for a parameter or a persistent buffer; the others are the model's to initialise."""
        return name in self._alias

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Fill ``out``, of the parameter's (or buffer's) shape, contiguous, in fp32 (or the buffer's dtype).

        Raises:
            ModelError: a value is infinite or NaN; names the tensor.
            StoreError: a file cannot be read, or has changed.
        """
        name = self._alias[name]
        step = self._step_of[name]
        if step.copies:
            read_into(self._stored[step.sources[0][0]], out)
        else:
            out.copy_(self._value(name))

    def _value(self, name: str) -> torch.Tensor:
        step = self._step_of[name]
        if name not in self._made:
            self._made = step.convert(self._model, lambda source: read_whole(self._stored[source]))
        return self._made.pop(name)


def _same(model: Any, state: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """All names of each value of a model: tied ones have several."""
    names: dict[str, list[str]] = {}
    for name, first in shell.first_names(model).items():
        if name in state:
            names.setdefault(first, []).append(name)
    return [tuple(group) for group in names.values()]


def _names(names: Iterable[str]) -> str:
    """Names, if they are few; else with the numbers of layers and experts left out: mostly, it is all layers alike."""
    exact = sorted(names)
    return ", ".join(exact) if len(exact) <= _FEW else some(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in exact}))
