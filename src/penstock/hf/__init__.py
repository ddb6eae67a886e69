"""Hugging Face: its models in and out, and its libraries' own training loops on the engine.
``tiled_loss`` is of the room ``loss``.

    models/             a folder's shards stream into a run's store, and out of it into another folder
    trainer             a transformers.Trainer whose steps, evaluation and checkpoints the engine carries out
    evaluation          its evaluation
    checkpoint          what the engine puts into a Trainer's checkpoints
    trl_trainer         the same for TRL's trainers, whose losses keep books
    trl_trainers        these: SFTTrainer, RewardTrainer, DPOTrainer and KTOTrainer
    reference           the reference that their losses compare a model with
    training_arguments  what becomes of each of the Trainer's arguments
    engine_arguments    what a Trainer has to be told about the engine
    tiles               the feed-forward parts of a model's blocks, some tokens at a time
    heads               their attention, some heads at a time

Importing the package itself imports neither torch nor transformers. May import: ``errors``, ``files``, ``documents``,
``compat``, ``config``, ``schedule``, ``hardware``, ``loss``, ``tape``, ``store``, ``optim``, ``data``, ``state``,
``ranks``, ``engine``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.hf.checkpoint import last_checkpoint
    from penstock.hf.engine_arguments import EngineArguments
    from penstock.hf.heads import split_attention
    from penstock.hf.models.exporting import export
    from penstock.hf.models.loading import Loaded, load
    from penstock.hf.tiles import tiled_mlps
    from penstock.hf.trainer import EngineMixin, Trainer
    from penstock.hf.trl_trainers import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
    from penstock.loss.tiled import tiled_loss

_WHERE = {
    **dict.fromkeys(("DPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer"), "penstock.hf.trl_trainers"),
    "EngineArguments": "penstock.hf.engine_arguments",
    "EngineMixin": "penstock.hf.trainer",
    "Loaded": "penstock.hf.models.loading",
    "Trainer": "penstock.hf.trainer",
    "export": "penstock.hf.models.exporting",
    "last_checkpoint": "penstock.hf.checkpoint",
    "load": "penstock.hf.models.loading",
    "split_attention": "penstock.hf.heads",
    "tiled_loss": "penstock.loss.tiled",
    "tiled_mlps": "penstock.hf.tiles",
}

__all__ = [
    "DPOTrainer",
    "EngineArguments",
    "EngineMixin",
    "KTOTrainer",
    "Loaded",
    "RewardTrainer",
    "SFTTrainer",
    "Trainer",
    "export",
    "last_checkpoint",
    "load",
    "split_attention",
    "tiled_loss",
    "tiled_mlps",
]


def __getattr__(name: str) -> Any:
    """Import what needs a library only when it is asked for."""
    from importlib import import_module

    if name not in _WHERE:
        raise AttributeError(f"module 'penstock.hf' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
