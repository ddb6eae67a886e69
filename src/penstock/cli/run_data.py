"""The data of a run as it begins or goes on, also before the folder is its own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.cli.model import RunModel
from penstock.cli.showing.display import Display
from penstock.cli.split import Cut, check_fits
from penstock.config import TrainConfig
from penstock.data.opening import Data, for_model, open_data
from penstock.data.stream import Prepared
from penstock.errors import ConfigError
from penstock.hardware.machine import DeviceKind
from penstock.ranks.group import Ranks


def data_in(
    folder: Path, config: TrainConfig, display: Display, model: RunModel, position: Mapping[str, Any] | None = None
) -> Data:
    """The data of a run, prepared in its ``folder``. ``position``: as of ``open_data``.

    Raises:
        ConfigError: they cannot be trained on, or not by this model; or they have changed since the run began.
    """
    with display.working("Reading the data"):
        own, seed = model.tokenizer, config.seed
        found = open_data(config.data, folder, seed=seed, own=own, position=position, say=display.say)
        return for_model(found, model.model)


def in_steps(config: TrainConfig, data: Data) -> TrainConfig:
    """The settings with the steps that their epochs come to, if it was epochs that they gave.

    Raises:
        ConfigError: how long an epoch is is not known.
    """
    if config.epochs is None:
        return config
    if not isinstance(data.train, Prepared):
        raise ConfigError(f"epochs={config.epochs}: the length of an epoch of streamed data is not known: give steps")
    sequences = len(data.train.epoch(0))
    steps = max(round(config.epochs * sequences / config.sequences_per_step), 1)
    return replace(config, steps=steps, epochs=None)


def look_ahead(
    config: TrainConfig, display: Display, model: RunModel, cut: Cut, kind: DeviceKind, ranks: Ranks, folder: Path
) -> None:
    """Refuse what can be of a run that is to begin in the place of another one, while that is there, and make its data
    in ``folder``, from which they are taken over as it begins. ``kind``: of the device that computes.

    Raises:
        BudgetError: a step does not fit, as far as the model's shape tells.
        ConfigError: as ``data_in`` and ``in_steps``.
    """
    check_fits(config, cut, kind, ranks.size, ranks.hosts)
    in_steps(config, data_in(folder, config, display, model))
