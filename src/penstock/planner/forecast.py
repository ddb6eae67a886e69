"""A plan's forecast: time, bottleneck, bytes on every link, memory of every tier, life of the drives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.config import Tier, format_size
from penstock.hardware.drives import rated_bytes
from penstock.planner.bounds import StepBound, limits_of
from penstock.planner.endurance import DAY
from penstock.planner.phase_costs import PhaseCosts
from penstock.planner.phase_memory import beyond, peaks_outside_steps
from penstock.planner.phases import AHEAD, HOME
from penstock.planner.search import Choice
from penstock.planner.task import Task
from penstock.schedule.ir.lanes import STREAM_LANES, Lane
from penstock.schedule.place import Depths
from penstock.shape.model import ModelProfile


@dataclass(frozen=True, kw_only=True)
class LaneForecast:
    """One lane of a step. ``work``: seconds of its ops alone; ``busy``: seconds in which it does something."""

    nbytes: int
    work: float
    busy: float


@dataclass(frozen=True, kw_only=True)
class Wear:
    """Bytes that a step writes that is run once, and how long the drives last, with repeated steps and commits of state
    in memory. ``days``: of training without a break; ``steps``: in them."""

    written_bytes: int
    per_parameter: float
    tbw: float | None
    """terabytes that each drive is rated for; None: not known"""
    days: float | None
    steps: float | None


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """The time and the writes of a whole run. ``written``: bytes on the drives of a rank, repeated steps and commits of
    state in memory counted, snapshots not. ``life``: the share of what they are rated for; None: nobody says what that
    is."""

    steps: int
    tokens: int
    seconds: float
    written: float
    life: float | None

    @property
    def days(self) -> float:
        return self.seconds / DAY


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A chosen plan and what follows from it. Seconds, bytes, tokens per second.

    ``micro_batch_size``: sequences in a micro-batch. What is said of lanes, memory and disk is of one rank.
    """

    task: Task
    choice: Choice
    micro_batch_size: int

    @property
    def profile(self) -> ModelProfile:
        """Of the model, in such micro-batches."""
        return self.task.profile(self.micro_batch_size)

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all ranks."""
        return self.task.size * self.profile.tokens * self.micro_batches

    @property
    def parameters(self) -> int:
        return self.profile.parameters

    @property
    def micro_batches(self) -> int:
        return self.choice.request.micro_batches

    @property
    def step_seconds(self) -> float:
        """Seconds of a step that is run once."""
        return self.choice.seconds

    @property
    def repeats(self) -> float:
        """The share of steps that is expected to be run twice."""
        return self.choice.repeats

    @property
    def gradients_wait(self) -> bool:
        """True if any gradient waits, for the norm or for the next step's forward."""
        settings, groups = self.choice.plan.settings, self.choice.plan.program.groups
        return settings.delay > 0 or any(group.trainable and settings.waits(group.index) for group in groups)

    @property
    def blocks_on_device(self) -> tuple[str, ...]:
        """Blocks whose optimizer state lives on the device and steps there, in order: their names."""
        place, stages = self.choice.plan.settings.place, self.choice.request.program.stages
        blocks = (stage for stage in stages if stage.kind == "call" and stage.gradients)
        return tuple(block.name for block in blocks if all(place.state[g] == "device" for g in block.gradients))

    @property
    def tokens_per_second(self) -> float:
        """Steps that are run twice counted."""
        return self.tokens / self.choice.expected_seconds

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s that the device's maker states for the plan's precision, of all ranks; None: the profile has none."""
        peak = self.task.machine.device.peak.get(self.task.precision)
        return None if peak is None else self.task.size * peak

    @property
    def product_flops(self) -> float:
        """FLOP/s of a large matrix product in the plan's precision, of all ranks."""
        return self.task.size * self.task.machine.device.flops[self.task.precision]

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: ``model_flops`` over the maker's peak; None: the profile has none."""
        return None if self.peak_flops is None else self.model_flops / self.peak_flops

    @property
    def of_product(self) -> float:
        """``model_flops`` over what the device does in a large matrix product."""
        return self.model_flops / self.product_flops

    @property
    def model_flops(self) -> float:
        """FLOP/s of the model, of all ranks, counted as a run counts them: op by op, none of what is computed a second
        time. Of experts those that a token goes to, and none of an embedding, which is looked up."""
        flop = self.profile.model_flops * self.task.size * self.micro_batches
        return flop / self.choice.expected_seconds

    @cached_property
    def lanes(self) -> Mapping[Lane, LaneForecast]:
        """Lanes with anything to do."""
        simulation = self.choice.simulation
        nbytes, work, busy = simulation.bytes_per_lane(), simulation.work(0), simulation.busy(0)
        return {
            lane: LaneForecast(nbytes=nbytes.get(lane, 0), work=work[lane], busy=busy[lane])
            for lane in STREAM_LANES
            if work.get(lane)
        }

    @property
    def bottleneck(self) -> Lane:
        """The lane with the most work."""
        return max(self.lanes, key=lambda lane: self.lanes[lane].work)

    @property
    def limit_seconds(self) -> float:
        """The bottleneck's work: no order of the same ops is faster."""
        return self.choice.simulation.lower_bound

    @cached_property
    def phases(self) -> Mapping[str, tuple[Lane, float]]:
        """Phase -> the lane that bounds it, and its seconds with what other lanes take from it."""
        question, plan = self.choice.question, self.choice.plan
        costs = question.costs_of(self.choice.request)
        loads = PhaseCosts(self.choice.request, plan.settings, costs)
        own = loads.of(plan.settings.place)
        own[1] += own[HOME]  # which may fall into any phase up to the epilogue
        reads, held = (
            own[AHEAD].sum(),
            StepBound.of(costs, plan.settings, disk=self.choice.request.bottom == "disk").ahead,
        )
        ahead = min(held / reads, 1.0) if reads else 0.0
        own[0] += (1 - ahead) * own[AHEAD]
        own[AHEAD - 1] += ahead * own[AHEAD]  # in the last phase of the step before
        shared = own @ limits_of(costs, Depths())[: len(STREAM_LANES)].T * (own > 0)
        return {
            phase: (STREAM_LANES[int(np.argmax(row))], float(row.max()))
            for phase, row in zip(loads.probes.phases.names, shared[:AHEAD], strict=True)
        }

    # ---- memory

    @cached_property
    def memory(self) -> Mapping[str, Mapping[Tier, int]]:
        """The most bytes of each tier while training, and in the phases outside of steps (``phase_memory``).

        Training: what the plan's pools and fixed memory take, which is reserved.
        """
        plan, task = self.choice.plan, self.task
        train: dict[Tier, int] = {"device": plan.device_bytes, "host": plan.host_bytes, "disk": self.disk_bytes}
        outside = peaks_outside_steps(
            plan.program,
            plan.settings.form,
            plan.settings.place,
            step=train,
            disk=self.choice.request.bottom == "disk",
            host_bytes=task.budget.host_bytes,
            slots=task.budget.slots,
            scratch=self.scratch_bytes,
            cut=task.parts(task.ranks),
        )
        return {"train": train} | {str(phase): sizes for phase, sizes in outside.items()}

    @property
    def beyond_machine(self) -> str | None:
        """The phase, or the step, that takes more memory than the machine has, in words; None: none does. A processor
        computes in host memory, which has to do for both tiers."""
        machine = self.task.machine
        why = next(filter(None, (beyond(self.memory, {tier: size}) for tier, size in machine.memory.items())), None)
        both = {phase: sizes["device"] + sizes["host"] for phase, sizes in self.memory.items()}
        most = max(both, key=lambda phase: both[phase])
        if why is not None or machine.device.kind != "cpu" or both[most] <= machine.device.memory:
            return why
        return (
            f"{most} takes {format_size(both[most])} of device and host memory together, and the machine has "
            f"{format_size(machine.device.memory)} for both: lower budget.device or budget.host"
        )

    @cached_property
    def simulated_peak(self) -> Mapping[Tier, int]:
        """The worst moment of a step: all that is reserved, and the activations that are alive then."""
        return self.choice.simulation.peak(0)

    @property
    def scratch_bytes(self) -> int:
        """Bytes on disk for saved activations and gradients that wait there."""
        return self.choice.request.scratch_bytes(self.choice.plan.settings)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk in all: room for all weights and state, and scratch space."""
        return self.choice.request.space_bytes(self.choice.plan.settings)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one saved snapshot: all weights and state."""
        return self.choice.plan.snapshot_bytes

    @property
    def export_bytes(self) -> int | None:
        """Bytes of the weights as ``penstock export`` writes those of a new model; None: not all of it is trained, so
        that an export is of the adapters alone."""
        groups = self.choice.request.program.groups
        if any(group.frozen for group in groups):
            return None
        return self.parameters * self.choice.request.form.weight_bytes

    @property
    def kept_snapshots(self) -> int | None:
        """Bytes that the run's own folder takes while a snapshot replaces the one before: a run without a disk keeps
        its state that way. None: it has a disk, or keeps nothing."""
        budget = self.task.budget
        return None if budget.disk_paths or budget.durability == "none" else 2 * self.snapshot_bytes

    @property
    def written_per_day(self) -> float:
        """Bytes that a rank writes in a day of training without a break, commits of state in memory counted."""
        return self.choice.question.written_per_day(self.choice.plan, self.choice.seconds)

    @property
    def wear(self) -> Wear:
        """The wear of the drives, snapshots not counted."""
        written = self.lanes["write"].nbytes if "write" in self.lanes else 0
        drives = self.task.machine.drives
        rated = rated_bytes(drives)
        days = None if rated is None or not self.written_per_day else rated / self.written_per_day
        return Wear(
            written_bytes=written,
            per_parameter=self.task.size * written / self.parameters,
            tbw=None if rated is None else min(d.tbw * d.directories for d in drives if d.tbw is not None),
            steps=None if days is None else days * DAY / self.choice.expected_seconds,
            days=days,
        )

    def steps_for(self, tokens: int) -> int:
        """Steps that train on at least so many tokens."""
        return math.ceil(tokens / self.tokens)

    def whole_run(self, steps: int) -> WholeRun:
        """Training without a break; evaluations and the way to the first step are not counted."""
        seconds = steps * self.choice.expected_seconds
        written = self.written_per_day * seconds / DAY
        rated = rated_bytes(self.task.machine.drives)
        life = None if rated is None else written / rated
        return WholeRun(steps=steps, tokens=steps * self.tokens, seconds=seconds, written=written, life=life)
