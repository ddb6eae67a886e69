"""The changes that a run's settings make to its model once it is built."""

from torch import nn

from penstock.config import TrainConfig
from penstock.hf.lora import with_adapters
from penstock.hf.tiles import tiled_mlps


def changed(model: nn.Module, config: TrainConfig) -> nn.Module:
    """The module to train: with adapters, and feed-forward parts in tiles, where the settings ask for them.

    Raises:
        ConfigError: as ``with_adapters``.
        ModelError: as ``tiled_mlps``.
    """
    if config.lora is not None:
        model = with_adapters(model, config.lora)
    return model if config.mlp_tile is None else tiled_mlps(model, config.mlp_tile)
