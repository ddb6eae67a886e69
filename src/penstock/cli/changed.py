"""The changes that a run's settings make to its model once it is built."""

from torch import nn

from penstock.config import TrainConfig
from penstock.hf.heads import most_heads, split_attention
from penstock.hf.lora import with_adapters
from penstock.hf.tiles import blocks_without_tiles, tiled_mlps


def changed(model: nn.Module, config: TrainConfig) -> nn.Module:
    """The module to train: with adapters, feed-forward parts in tiles and attention in pieces, where the settings ask
    for them.

    Raises:
        ConfigError: as ``with_adapters`` and ``split_attention``.
        ModelError: as ``tiled_mlps`` and ``split_attention``.
    """
    if config.lora is not None:
        model = with_adapters(model, config.lora)
    if config.mlp_tile is not None:
        model = tiled_mlps(model, config.mlp_tile)
    return model if config.attention_heads is None else split_attention(model, config.attention_heads)


def left_whole(model: nn.Module, config: TrainConfig) -> str | None:
    """A line on the blocks whose feed-forward parts stay whole although the settings ask for tiles; None: there are
    none."""
    names = () if config.mlp_tile is None else blocks_without_tiles(model)
    if not names:
        return None
    listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    return (
        f"mlp_tile={config.mlp_tile}: blocks without a feed-forward part that can be tiled, as those with experts, "
        f"stay whole: {listed}"
    )


def without_effect(model: nn.Module, config: TrainConfig, sequences: int) -> list[str]:
    """Lines on settings with which all blocks, or some, compute as they would without them. ``sequences``: in a
    micro-batch."""
    tokens, heads = sequences * config.data.sequence_length // config.cp, most_heads(model)
    found = [words] if (words := left_whole(model, config)) is not None else []
    if config.mlp_tile is not None and config.mlp_tile >= tokens:
        found.append(f"mlp_tile={config.mlp_tile} has no effect: a micro-batch has at most {tokens} tokens")
    if config.attention_heads is not None and config.attention_heads >= heads:
        found.append(f"attention_heads={config.attention_heads} has no effect: there are at most {heads} query heads")
    return found


_LISTED = 4
"""Blocks that are named."""
