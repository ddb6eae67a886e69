"""Update modes, by which a step comes to its numbers when they need the global gradient norm, and what each asks for.

- *Waiting*: every gradient stays where it is, in host memory or on disk, until the norm is known; then the optimizer.
- *Speculating*: a group whose whole state is on disk in two slots steps at once, into the slots that nothing names yet.
  A step whose norm is over the limit is dropped and run again, with the factor known. Where fp16 overflows, a step is
  dropped and not run again.
- *Delaying*: a share of the steps is taken in the next step's forward (the delay ratio), with or without a norm.
"""

from penstock.config import Budget, StepConfig, StreamConfig
from penstock.config.step import check_delay
from penstock.errors import ConfigError
from penstock.hardware.drives import together
from penstock.hardware.machine import Machine
from penstock.planner.plan import Plan
from penstock.schedule.place import Settings
from penstock.schedule.program import Program

REPEATS = 0.05
"""The share of steps that is expected to be clipped, and so to be run twice if it speculates, where nothing has been
measured. Clipping is rare after the first hundred steps: SuperOffload (arXiv 2509.21271) reports 0.12% of the steps
1,000 to 80,000. The first steps are clipped most often, and this leaves room for them."""

DELAYS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""delay ratios that are weighed; what lies between them and beyond is found in steps of ``DELAY_STEP``"""
DELAY_STEP = 0.05


def no_speculation(budget: Budget, *, wait: bool) -> str | None:
    """The reason that no group can step before the norm is known, and what to do; None: one can, with state on disk."""
    if not wait:
        return "no step needs the norm of its gradients: there is neither clip_grad_norm nor fp16. Leave it out"
    if not budget.disk_paths:
        return "a step that may be dropped goes beside the state on disk, and there is no disk: give budget.disk"
    if budget.slots == 1:
        return "with budget.slots=1 a step overwrites the only copy of the state: use budget.slots=2"
    if budget.durability == "interval":
        return "between two commits a step overwrites what the one before has left: use durability 'step'"
    if budget.state not in (None, "disk"):
        return f"budget.state={budget.state!r} leaves no group's state on disk: drop the pin"
    return None


def check_update_mode(asked: StreamConfig, budget: Budget, *, wait: bool, delays: bool) -> None:
    """Refuse what is asked for and cannot be. ``delays``: the schedule may be one that can delay steps.

    Raises:
        ConfigError: ``speculate=True`` where nothing can; a delay with another schedule than the vertical one.
    """
    if asked.speculate and (why := no_speculation(budget, wait=wait)) is not None:
        raise ConfigError(f"speculate=True cannot be: {why}")
    check_delay(asked.delay, delays=delays)


def expected_repeats(config: StepConfig) -> float:
    """The share of steps that are expected to be run again, if they speculate. One that overflows in fp16 is dropped,
    and not run again.
    """
    return 0.0 if config.clip_grad_norm is None else REPEATS


def steps_early(program: Program, settings: Settings) -> bool:
    """True if any group steps before the norm is known, so that a step whose norm is over the limit is run again."""
    early = settings.wait and settings.delay < 1
    return early and any(group.trainable and not settings.waits(group.index) for group in program.groups)


def seconds_back(plan: Plan, machine: Machine) -> float:
    """Seconds in which what a plan's step has changed is taken back, if it is dropped: read from the drives, and then
    copied, one piece after the other, and nothing else runs."""
    nbytes = plan.taken_back_bytes
    return nbytes / together(machine.drives).read + nbytes / machine.host.copy if nbytes else 0.0


def expected_seconds(seconds: float, repeats: float, back: float) -> float:
    """Seconds of a step on average, of which a run takes ``seconds``, where a share of the steps, ``repeats``, is run
    twice: before that it is taken back in ``back`` seconds."""
    return seconds * (1 + repeats) + repeats * back
