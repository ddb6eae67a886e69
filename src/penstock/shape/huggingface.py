"""A model by its Hugging Face configuration: by formula where one is exact, else by a dry run on the meta device."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import check_parts
from penstock.documents.text import MalformedError, parse_json, read_bounded
from penstock.errors import ConfigError
from penstock.hardware.machine import DeviceKind
from penstock.schedule.place import FP32, Format
from penstock.shape import decoders, meta
from penstock.shape.meta import Change
from penstock.shape.model import ModelProfile
from penstock.shape.shipped import CONFIGS, shipped_name
from penstock.shape.transformer import Transformer

if TYPE_CHECKING:
    from torch import nn

_LAYERS = ("num_hidden_layers", "n_layer")
_POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """A causal language model. A ``ModelShape``.

    ``kind``: of the device that it is planned for, as kernels differ in what they keep. ``loss_tile``: tokens whose
    logits are alive at a time in the loss; None: all. ``change``: what is done to the model once it is built, such as
    adapters; there is no formula then.
    """

    name: str
    config: Mapping[str, Any]
    kind: DeviceKind = "cuda"
    loss_tile: int | None = None
    change: Change | None = None
    cp: int = 1
    """ranks that share each sequence, of which the profile is of one"""
    splits: bool = False
    """True if a dry run is to say what backwards in two parts take; formulas do in any case"""

    def profile(self, micro_batch_size: int, sequence_length: int, form: Format) -> ModelProfile:
        """See ``ModelShape.profile``. Weights of 2 bytes are bf16.

        Raises:
            ConfigError: the configuration is none that Hugging Face knows, or its positions are fewer than asked for.
            ModelError: the model cannot be run without values.
        """
        longest = next((n for key in _POSITIONS if isinstance(n := self.config.get(key), int)), sequence_length)
        if sequence_length > longest:
            raise ConfigError(
                f"sequence_length={sequence_length}: {self.name} takes at most {longest} tokens at a time. Lower it, "
                "or plan for a model with more positions"
            )
        by_name = form.whole is not None and (form.whole.splits or form.whole.elementwise)
        if not (self.change or by_name or self.cp > 1):
            formula = decoders.from_config(self.config, name=self.name)
            if formula is not None and self._holds(formula, sequence_length, form):
                found = formula.profile(micro_batch_size, sequence_length, form, loss_tile=self.loss_tile)
                if self.loss_tile is None or _knows_most(formula, found, self.loss_tile, form):
                    return found
        return self._run.profile(micro_batch_size, sequence_length, form)

    def build(self) -> "nn.Module":
        """The model itself, without memory, and with its change.

        Raises:
            ConfigError, ModelError: as ``profile``.
        """
        from penstock.tape.dry import build_on_meta

        return build_on_meta(self._run.build)

    def with_layers(self, layers: int) -> "HuggingFaceModel":
        """This model with another number of layers.

        Raises:
            ConfigError: its configuration does not say how many it has.
        """
        key = next((key for key in _LAYERS if key in self.config), None)
        if key is None:
            raise ConfigError(
                f"{self.name}: its configuration has no {_LAYERS[0]}, so that the number of layers cannot be changed"
            )
        return replace(self, config={**self.config, key: layers})

    @cached_property
    def _run(self) -> meta.MetaModel:
        return meta.from_config(
            self.config,
            name=self.name,
            kind=self.kind,
            loss_tile=self.loss_tile,
            change=self.change,
            cp=self.cp,
            splits=self.splits,
        )

    def _holds(self, formula: Transformer, sequence_length: int, form: Format) -> bool:
        """True if the formulas are right to the byte for this model and device, but for a loss in tiles."""
        # On GPUs torch has no fused kernel for grouped queries in fp32.
        fused = self.kind == "cpu" or form.weight_bytes != FP32 or formula.kv_heads == formula.heads
        return fused and formula.is_usual and sequence_length <= formula.window


def _knows_most(formula: Transformer, profile: ModelProfile, tile: int, form: Format) -> bool:
    """True if the formula has the moment at which an epilogue holds most. Llama's has all that there are; of the others
    only the one at which a tile of logits is alive, and not how the hidden states go through the norm."""
    states, most = profile.tokens * formula.hidden * form.weight_bytes, profile.program.stages[-1].forward_peak
    if formula.gated:
        return True
    if form.weight_bytes != FP32:
        return most >= 14 * states
    return most >= 6 * states and min(tile, profile.tokens) * formula.vocabulary * FP32 >= states


def model_shape(
    source: str | Path | Mapping[str, Any],
    *,
    kind: DeviceKind = "cuda",
    loss_tile: int | None = None,
) -> HuggingFaceModel:
    """A model from a configuration, from a ``config.json`` or the folder that it is in, or by a name that ships, also
    under the name that it has on the hub, which is not asked.

    Raises:
        ConfigError: there is none; says what was looked for.
    """
    if isinstance(source, Mapping):
        config = _typed(source, "the model's configuration")
        return HuggingFaceModel(name=config["model_type"], config=config, kind=kind, loss_tile=loss_tile)
    path, is_path = Path(source), isinstance(source, Path) or source.endswith(".json") or "/" in source
    shipped = shipped_name(str(source))
    if str(source) in CONFIGS or not (path.exists() or (is_path and shipped is None)):
        if shipped is None:
            near = difflib.get_close_matches(str(source), CONFIGS, n=1)
            raise ConfigError(
                f"no model {str(source)!r} ships with penstock"
                + (f": did you mean {near[0]}?" if near else ".")
                + f" Known: {', '.join(CONFIGS)}. Any other model: give its Hugging Face configuration"
            )
        return HuggingFaceModel(name=shipped, config=CONFIGS[shipped], kind=kind, loss_tile=loss_tile)
    file = (path / "config.json" if path.is_dir() else path).resolve()
    name = file.parent.name if file.name == "config.json" else file.stem
    return HuggingFaceModel(name=name, config=_read(file), kind=kind, loss_tile=loss_tile)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        config = parse_json(read_bounded(file), finite=False)
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot read this model configuration: {error.strerror}: give a config.json or the folder that it "
            f"is in, or a model that ships with penstock: {', '.join(CONFIGS)}"
        ) from error
    except MalformedError as error:
        raise ConfigError(f"{file}: this model configuration is not JSON ({error})") from error
    return _typed(config, f"{file}")


def _typed(config: object, where: str) -> Mapping[str, Any]:
    if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{where}: this is no model configuration of Hugging Face: it has no model_type")
    check_parts(config, where)
    return config
