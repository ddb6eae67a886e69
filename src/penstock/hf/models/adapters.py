"""Models with adapters (LoRA, by peft) on their way out: the adapter alone, or merged into its weights."""

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from penstock import files
from penstock.compat import marks
from penstock.compat.peft import base_name, has_adapter, is_plain, is_product
from penstock.errors import ModelError
from penstock.hf.models.shell import cast, first_names
from penstock.state.values import Place, Values
from penstock.tape.guard import names_of_state

_NAME = "default"
"""peft's name of an adapter where none is given."""


def has_adapters(model: Any) -> bool:
    """True if a model is one that peft has put adapters into."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: Any) -> Path | None:
    """The folder that the weights below a model's adapters came from, by peft's account; None: it names none."""
    named = {config.base_model_name_or_path for config in model.peft_config.values()} - {None}
    return Path(named.pop()) if named else None


def check_adapters(model: Any) -> None:
    """Refuse adapters that could not be saved once they are trained; a model without any is right.

    Raises:
        ModelError: which these are, and what to do.
    """
    if not hasattr(model, "peft_config"):
        return
    if not has_adapters(model):
        raise ModelError(
            "adapters that were put into a model by add_adapter cannot be saved: call peft.get_peft_model(model, "
            "config) instead, and give what it returns"
        )
    kinds = [config.peft_type.value for config in model.peft_config.values() if config.is_prompt_learning]
    if kinds:
        raise ModelError(
            f"{kinds[0]}: peft computes what it saves of such adapters by the model's own weights, which are the "
            "engine's: train low-rank adapters (peft.LoraConfig)"
        )
    if list(model.peft_config) != [_NAME]:
        raise ModelError(
            f"the model's adapters are called {', '.join(model.peft_config)}, and one that is called {_NAME!r} can be "
            "saved: call peft.get_peft_model(model, config) without adapter_name, and merge any others before"
        )


def save_adapter(folder: Path, model: Any, values: Values, dtypes: Mapping[str, torch.dtype]) -> None:
    """Write adapter_model.safetensors and adapter_config.json into ``folder``, as ``PeftModel.save_pretrained`` does.

    ``dtypes``: of parameters, by name; of others: fp32. What is saved of such a model is in memory for this.

    Raises:
        ModelError: as ``check_adapters``; or a value is too large for its dtype.
    """
    check_adapters(model)
    with names_of_state(model):  # peft asks parts of the model for the names in theirs
        state = {name: _value(values, own, dtypes) for name, own in _saved(model, values).items()}
        model.save_pretrained(folder, state_dict=state)
    _sort_sets(folder / "adapter_config.json", vars(model.peft_config[_NAME]))


def _value(values: Values, name: str, dtypes: Mapping[str, torch.dtype]) -> torch.Tensor:
    if name in values.buffers:
        return values.buffers[name]
    return cast(values.parameter(name), dtypes.get(name, torch.float32), name)


def _saved(model: Any, values: Values) -> dict[str, str]:
    """The names in a model's ``state_dict`` of all that is trained, and of what peft saves beside it, which is found by
    its choice among placeholders. With the name that each value has: tied ones have several."""
    from peft import get_peft_model_state_dict

    own, state = first_names(model), model.state_dict()
    with warnings.catch_warnings(action="ignore"):  # said again when it saves
        kept = {id(value) for value in get_peft_model_state_dict(model, state_dict=state).values()}
    wanted = {name for name, value in state.items() if id(value) in kept}
    trained = {name for name, place in values.parameters.items() if place.trainable}
    wanted |= {name for name, first_name in own.items() if first_name in trained}
    return {name: own.get(name, name) for name in state if name in wanted}


def _sort_sets(file: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings that are sets in order: peft writes them as they come, which is another order in each process.

    ``settings``: what ``file`` was written from.
    """
    body = json.loads(file.read_text(encoding="utf-8"))
    ordered = {key: sorted(value) for key, value in settings.items() if isinstance(value, set) and key in body}
    files.replace(file, json.dumps(body | ordered, indent=2, sort_keys=True), private=False)


class Merged(Values):
    """The values of the model without adapters, into whose weights they are merged: W + scaling · B A, in fp32.

    One weight's product is in memory at a time. What peft calls ``modules_to_save`` takes the place of the originals.
    """

    def __init__(self, values: Values, model: Any) -> None:
        """Raises:
        ModelError: an adapter of a kind that is not merged here, or of one of several weights that are one; several
            that are active, or one that is merged already.
        """
        self._values, self.base = values, base_of(model)
        active = list(model.active_adapters)
        if len(active) != 1:
            raise _not_merged(f"{' and '.join(active) or 'no adapter'}, of which one has to be active,")
        (self._adapter,) = active
        config = model.peft_config[self._adapter]
        if config.peft_type.value != "LORA" or config.trainable_token_indices:
            kind = "trainable tokens" if config.peft_type.value == "LORA" else config.peft_type.value
            raise _not_merged(f"an adapter of this kind ({kind})")
        self._name_of: dict[str, str] = {}
        copies = f".modules_to_save.{self._adapter}."
        for name in sorted(values.parameters, key=lambda name: copies in name):  # last: they take the originals' place
            others = ".modules_to_save." in name and copies not in name
            if not others and (base := base_name(name)) is not None:
                self._name_of[base] = name
        self.parameters: dict[str, Place] = {b: values.parameters[name] for b, name in self._name_of.items()}
        self.buffers = {base_name(name) or name: buffer for name, buffer in values.buffers.items()}
        self._layers = dict(self._adapted(model))
        self._check_alone(model, {base for base, name in self._name_of.items() if copies in name})
        self._made: tuple[str, torch.Tensor] | None = None

    def _check_alone(self, model: Any, copied: set[str]) -> None:
        """Refuse adapters, or copies, of weights that the model without adapters has under other names as well."""
        names: dict[int, dict[str, None]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if (base := base_name(name)) is not None:
                names.setdefault(id(parameter), {})[base] = None
        for tied in names.values():
            trained = [base for base in tied if base in self._layers or base in copied]
            if len(tied) > 1 and trained:
                raise ModelError(
                    f"{trained[0]} is trained, and {' and '.join(tied)} are one in the model without adapters (tied "
                    "weights), so it cannot be merged: export the adapter instead, without --merge (merge=True)"
                )

    def _adapted(self, model: Any) -> Iterator[tuple[str, tuple[str, Any]]]:
        """(name of a weight before peft, (path of the layer, layer)) of each that has an adapter."""
        for path, layer in model.named_modules():
            if not marks.has_adapters(layer) or not has_adapter(layer, self._adapter):
                continue
            if layer.merged:
                raise _not_merged(f"{path}: an adapter that is merged already (merge_adapter)")
            special = not is_product(layer, self._adapter)
            if not is_plain(layer) or special:
                kind = f"{type(layer).__name__}{', DoRA, a bias or another variant' * special}"
                raise _not_merged(f"{path}: an adapter of this kind ({kind})")
            name = base_name(f"{path}.weight")
            assert name is not None
            yield name, (path, layer)

    def read(self, name: str, start: int, flat: torch.Tensor) -> None:
        """See ``Values.read``."""
        self._values.read(self._name_of[name], start, flat)
        if name in self._layers:
            flat += self._delta(name).view(-1)[start : start + flat.numel()]

    def _delta(self, name: str) -> torch.Tensor:
        """The product that peft would add to a weight."""
        if self._made is None or self._made[0] != name:
            self._made = None  # two of them need not be in memory
            path, layer = self._layers[name]
            kind = "lora_A" if self._adapter in layer.lora_A else "lora_embedding_A"
            end = "" if kind == "lora_embedding_A" else ".weight"
            a = self._values.parameter(f"{path}.{kind}.{self._adapter}{end}")
            b = self._values.parameter(f"{path}.{kind[:-1]}B.{self._adapter}{end}")
            product = b @ a
            turned = kind == "lora_embedding_A" or layer.fan_in_fan_out
            self._made = (name, (product.T if turned else product).contiguous() * layer.scaling[self._adapter])
        return self._made[1]


def _not_merged(what: str) -> ModelError:
    return ModelError(f"{what} is not merged here: export the adapter, and merge it with peft (merge_and_unload)")
