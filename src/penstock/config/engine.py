"""Settings of an engine, the same in the file, in flags, in ``wrap`` and in other libraries' loops.

A new setting of engines is one field here, with its row in the table and its check. The file and Python write two of
them in words of their own, a schedule's file and a schedule: their classes say which.
"""

from dataclasses import dataclass

from penstock.config.budget import Budget
from penstock.config.step import StepConfig, StreamConfig, check_delay, check_not_compiled, check_recompute
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineConfig(StreamConfig):
    """Settings of an engine, whoever's loop it trains in.

    | field | meaning |
    |---|---|
    | ``budget`` | memory per tier, and the directories of the disk tier |
    | ``schedule`` | ``vertical`` (block by block), ``horizontal`` (micro-batch by micro-batch), or one of your own (a
    file; in Python a ``penstock.Schedule``), which is checked; of a pipeline ``vertical``, or with forwards and
    backwards in turn ``1f1b`` (each rank's blocks in one piece), ``interleaved-1f1b`` (in loops, as ``vertical``) or
    ``zero-bubble`` (in one piece, with backwards in two parts) |
    | ``plan`` | what is planned for; None: nothing is predicted, and state is placed by a fixed order of preference |
    | ``replan`` | whether the plan follows the machine: when steps show that its drives, links or processors are not as
    was measured, the plan is made again for what they are, and changed between two steps. Changes no result; None:
    where there is a plan, no schedule of your own and no pipeline |
    | ``compile`` | whether blocks are compiled by ``torch.compile``, all of a class at once; a text names its backend.
    Each shape of micro-batch is compiled for itself, so give few. Changes results (compiled code rounds differently),
    but not with the schedule. Plans count the memory that blocks take without it |
    """

    budget: Budget
    schedule: object = "vertical"
    plan: object = "auto"
    replan: bool | None = None
    compile: bool | str = False

    @property
    def has_own_schedule(self) -> bool:
        """True if the schedule is no order that the planner makes."""
        return not isinstance(self.schedule, str)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.budget.check_units()
        self.check_with(self.budget)
        check_not_compiled(self.schedule, self.compile)
        check_recompute(self.recompute, self.schedule, self.compile)
        if self.replan and self.plan is None:
            raise ConfigError("replan has no effect with plan=None (null), which predicts nothing: leave one out")
        if not self.has_own_schedule:
            check_delay(self.delay, delays=self.schedule == "vertical")
            return
        for key, value in (("replan", self.replan or None), ("delay", self.delay), ("speculate", self.speculate)):
            if value is not None:
                raise ConfigError(
                    f"{key} has no effect with a schedule of your own, which says it itself: leave one out"
                )


@dataclass(frozen=True, kw_only=True)
class RunConfig(EngineConfig, StepConfig):
    """Settings of an engine, with those that a library's own loop says itself.

    | field | meaning |
    |---|---|
    | ``device`` | a torch device; None: the accelerator if there is one, else ``cpu`` |
    | ``seed`` | of all that is random |
    """

    device: object = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)


def check_seed(seed: int) -> None:
    """Raises:
    ConfigError: it is negative.
    """
    if seed < 0:
        raise ConfigError(f"seed={seed}: must be at least 0")
