"""Penstock: trains language models that do not fit in memory, streaming their state between SSD, host and device."""

from typing import TYPE_CHECKING, Any

from penstock.config import Budget
from penstock.errors import BudgetError, ConfigError, ModelError, NonFiniteError, ScheduleError, StoreError
from penstock.schedule.op import Schedule

if TYPE_CHECKING:
    from penstock.engine import Engine
    from penstock.optim.spec import SGD, Adam, AdamW, Lion, Override
    from penstock.plan.ask import plan
    from penstock.run.stats import StepStats
    from penstock.wrapping import wrap

_WITH_TORCH = {
    "Engine": "penstock.engine",
    "wrap": "penstock.wrapping",
    **dict.fromkeys(("SGD", "Adam", "AdamW", "Lion", "Override"), "penstock.optim.spec"),
    "StepStats": "penstock.run.stats",
}
"""Name -> module. ``plan`` is not among them: the package ``penstock.plan`` can be called."""

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Budget",
    "BudgetError",
    "ConfigError",
    "Engine",
    "Lion",
    "ModelError",
    "NonFiniteError",
    "Override",
    "Schedule",
    "ScheduleError",
    "StepStats",
    "StoreError",
    "plan",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for: schedules and plans do without."""
    from importlib import import_module

    if name == "plan":
        return import_module("penstock.plan")
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_WITH_TORCH[name]), name)
