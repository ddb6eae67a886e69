"""Errors that a user can act on. Each message says what was asked, what is the case, and what to do."""


class ConfigError(ValueError):
    """A setting is unknown, impossible, or has no effect in this configuration."""


class BudgetError(ValueError):
    """The run does not fit in the memory or the disk that it was given."""


class ModelError(ValueError):
    """The model or its inputs cannot be run block by block, with the reason."""


class ScheduleError(ValueError):
    """A schedule breaks a rule: the op that breaks it is named."""


class StoreError(OSError):
    """The disk tier cannot be used as asked: missing, locked, foreign, damaged or full."""


class NonFiniteError(ArithmeticError):
    """A loss or a gradient is infinite or NaN; names the step and the micro-batch."""
