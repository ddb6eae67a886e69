"""Settings that a run keeps: of its model, its data and its optimizer."""

import json
from dataclasses import replace
from typing import Any

from penstock.cli.settings import plain
from penstock.config import TrainConfig
from penstock.engine.device import kind_of, resolve_device
from penstock.errors import ConfigError


def check_same_data(config: TrainConfig, before: TrainConfig) -> None:
    """A resumed run goes on with the model that it has, where it was in its text: what decides these must be as it was.
    Documents may be in another place: whoever opens the data compares their contents.

    Raises:
        ConfigError: something is not as it was ``before``.
    """
    before = replace(before, model=replace(before.model, trust_remote_code=config.model.trust_remote_code))
    config = replace(config, data=config.data.placed_as(before.data))
    for key in ("model", "lora", "data", "sequences_per_step", "micro_batch_size", "seed"):
        if getattr(before, key) != getattr(config, key):
            name = "batch" if key == "sequences_per_step" else key
            name, was, now = _first_difference(plain(before)[name], plain(config)[name], name)
            raise ConfigError(
                f"run={config.run!r} was started with {name}={_shown(was)}, not {_shown(now)}: a resumed run must be "
                "the same model and see the same text, cut in the same way. Put it back, or start another run"
            )

    kind = kind_of(resolve_device(config.device))
    for name, was, now in (
        ("optimizer.name", before.optimizer.name, config.optimizer.name),
        ("precision", before.precision, config.precision_on(kind)),
    ):
        if was is not None and was != now:
            raise ConfigError(
                f"run={config.run!r} was started with {name}={_shown(was)}, not {_shown(now)}: its state is that "
                "optimizer's, in that precision. Put it back, or start another run"
            )


def _first_difference(was: Any, now: Any, name: str) -> tuple[str, Any, Any]:
    """The first setting within ``name`` that is not what it was, and what it was and is."""
    inner: list[tuple[str, Any, Any]] = []
    if isinstance(was, dict) and isinstance(now, dict):
        inner = [(f"{name}.{key}", was.get(key), now.get(key)) for key in {**was, **now}]
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        inner = [(f"{name}[{place}]", *both) for place, both in enumerate(zip(was, now, strict=True))]
    return next((_first_difference(w, n, key) for key, w, n in inner if w != n), (name, was, now))


def _shown(value: Any) -> str:
    """A setting's value as a file would have it."""
    return repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
