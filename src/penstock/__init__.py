"""Penstock: trains language models that do not fit in memory, streaming their state between SSD, host and device."""

from typing import TYPE_CHECKING, Any

from penstock.config import Budget, Endurance
from penstock.config.optimizer import SGD, Adam, AdamW, Lion, Muon, Override, Split
from penstock.errors import BudgetError, ConfigError, ModelError, NonFiniteError, RankError, ScheduleError, StoreError
from penstock.ranks import parent as parent  # noted at once: what is imported later takes seconds
from penstock.schedule.ir.ops import Schedule

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.wrap import wrap
    from penstock.planner.ask import plan
    from penstock.ranks.start import torchrun_mesh
    from penstock.state.stats import StepStats

_LAZY = {
    "Engine": "penstock.engine.engine",
    "wrap": "penstock.engine.wrap",
    "StepStats": "penstock.state.stats",
    "plan": "penstock.planner.ask",
    "torchrun_mesh": "penstock.ranks.start",
}
"""Name -> module that has it."""

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Budget",
    "BudgetError",
    "ConfigError",
    "Endurance",
    "Engine",
    "Lion",
    "ModelError",
    "Muon",
    "NonFiniteError",
    "Override",
    "RankError",
    "Schedule",
    "ScheduleError",
    "Split",
    "StepStats",
    "StoreError",
    "plan",
    "torchrun_mesh",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for: schedules and plans do without."""
    from importlib import import_module

    if name not in _LAZY:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
