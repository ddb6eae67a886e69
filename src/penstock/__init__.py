"""Penstock: trains language models that do not fit in memory, streaming their state between SSD, host and device."""

from penstock.config import Budget
from penstock.engine import Engine, StepStats, wrap
from penstock.errors import BudgetError, ConfigError, ModelError, NonFiniteError, ScheduleError, StoreError
from penstock.optim.spec import SGD, Adam, AdamW, Lion, Override
from penstock.schedule.op import Schedule

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
    "wrap",
]
