"""Models with adapters (LoRA, by peft) on their way out: the adapter alone, or merged into its weights."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from penstock import files
from penstock.compat.peft import base_name, is_adapted, is_plain, names_embeddings
from penstock.errors import ModelError
from penstock.state.values import Place, Values
from penstock.tape.guard import names_of_state


def has_adapters(model: Any) -> bool:
    """True if a model is one that peft has put adapters into."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def save_adapter(folder: Path, model: Any, values: Values, dtype: torch.dtype | None) -> None:
    """Write adapter_model.safetensors and adapter_config.json into ``folder``, as ``PeftModel.save_pretrained`` does.

    ``dtype``: of the weights; None: fp32. What is trained of such a model is small, and is in memory for this.
    """
    wanted = {name for name, place in values.parameters.items() if place.trainable} | set(_embeddings(model))
    trained = {name: values.parameter(name) for name in values.parameters if name in wanted}
    with names_of_state(model):  # peft asks parts of the model for the names in theirs
        model.save_pretrained(folder, state_dict={name: t.to(dtype or torch.float32) for name, t in trained.items()})
    _sort_sets(folder / "adapter_config.json", vars(model.peft_config[model.active_adapter]))


def _sort_sets(file: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings that are sets in order: peft writes them as they come, which is another order in each process.

    ``settings``: what ``file`` was written from.
    """
    body = json.loads(file.read_text(encoding="utf-8"))
    ordered = {key: sorted(value) for key, value in settings.items() if isinstance(value, set) and key in body}
    files.replace(file, json.dumps(body | ordered, indent=2, sort_keys=True), private=False)


def _embeddings(model: Any) -> Iterator[str]:
    """Names of the embedding and the head where one of them has an adapter: peft saves them whole then."""
    asked = getattr(model.peft_config[model.active_adapter], "target_modules", None) or ()
    if names_embeddings(asked):
        modules = (model.get_input_embeddings(), model.get_output_embeddings())
        own = {id(parameter) for module in modules if module is not None for parameter in module.parameters()}
        yield from (name for name, parameter in model.named_parameters() if id(parameter) in own)


class Merged(Values):
    """The values of the model without adapters, into whose weights they are merged: W + scaling · B A, in fp32.

    One weight's product is in memory at a time. What peft calls ``modules_to_save`` takes the place of the originals.
    """

    def __init__(self, values: Values, model: Any) -> None:
        """Raises:
        ModelError: an adapter of a kind that is not merged here.
        """
        self._values = values
        self._adapter = model.active_adapter
        self._name_of: dict[str, str] = {}
        copies = f".modules_to_save.{self._adapter}."
        for name in sorted(values.parameters, key=lambda name: copies in name):  # last: they take the originals' place
            if (base := base_name(name)) is not None:
                self._name_of[base] = name
        self.parameters: dict[str, Place] = {b: values.parameters[name] for b, name in self._name_of.items()}
        self.buffers = {base_name(name) or name: buffer for name, buffer in values.buffers.items()}
        self._layers = dict(self._adapted(model))
        self._made: tuple[str, torch.Tensor] | None = None

    def _adapted(self, model: Any) -> Iterator[tuple[str, tuple[str, Any]]]:
        """(name of a weight before peft, (path of the layer, layer)) of each that has an adapter."""
        for path, layer in model.named_modules():
            if not is_adapted(layer):
                continue
            special = any(layer.use_dora.values()) or any(layer.lora_bias.values())
            if not is_plain(layer) or special:
                raise ModelError(
                    f"{path}: an adapter of this kind ({type(layer).__name__}{', DoRA or with bias' * special}) is not "
                    "merged here: export the adapter, and merge it with peft (merge_and_unload)"
                )
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
