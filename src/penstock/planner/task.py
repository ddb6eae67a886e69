"""The model to be trained, the machine and the budget: the input of a plan, before batch sizes are chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.config import Budget, Family, OptimizerName, Precision, StepConfig, Tier, fields_of, format_size
from penstock.config.optimizer import MomentsConfig, Orthogonal
from penstock.errors import ConfigError
from penstock.hardware.machine import Machine
from penstock.planner.question import Question
from penstock.planner.request import Request
from penstock.planner.update_mode import check_update_mode, expected_repeats, no_speculation
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import BOUNCE, Format
from penstock.shape.model import ModelProfile, ModelShape, stage_times


def rate_name_of(optimizer: OptimizerName, moment_count: int, precision: Precision) -> str:
    """Key of a machine's optimizer rates; Nesterov's momentum takes as long as the other, and what Muon does on the
    host as long for each byte as AdamW."""
    kind = "momentum" if optimizer == "sgd" and moment_count else optimizer
    return f"{'adamw' if kind == 'muon' else kind}.{precision}"


MOST_OPS = 80_000
"""Ops of the largest schedule that is planned: it takes some 3 s to build and simulate."""

TOKEN_BYTES = 2 * 8
"""int64 token and label"""

OWN_SHARE = {"cuda": (0.95, 0.9), "cpu": (0.25, 0.5)}
"""Shares of device and host memory that a budget takes if none is given; a CPU's two are the same memory. Of a device
whose profile tells what is free on it, it takes that."""


@dataclass(frozen=True, kw_only=True)
class Task(StepConfig, MomentsConfig):
    """A model, a machine, a budget, and what is asked of a step.

    ``precision``: the one that counts. ``families``: schedules that may be chosen. ``disk_free``: bytes on disk that
    may be used. ``ranks``: that share the model's state, or each of several ``copies`` of it, and are on so many
    ``hosts``, as many on each; machine, budget, disk and micro-batches are those of one of them.
    """

    shape: ModelShape
    machine: Machine
    budget: Budget
    sequence_length: int
    precision: Precision
    optimizer: OptimizerName
    moment_count: int
    """number of moments that the optimizer has"""
    whole: Orthogonal | None = None
    """the way in which updates of matrices are made orthogonal (muon)"""
    families: tuple[Family, ...]
    disk_free: int
    ranks: int = 1
    copies: int = 1
    hosts: int = 1
    profiles: dict[int, ModelProfile] = field(default_factory=dict, compare=False, repr=False)
    """those made so far, by sequences in a micro-batch"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_with(self.budget)
        self.machine.host_rate(self.rate_name)  # which refuses a profile without it
        check_update_mode(self, self.budget, wait=self.needs_norm, delays="vertical" in self.families)
        if self.budget.disk_paths and not self.machine.drives:
            raise ConfigError(f"the profile of {self.machine.name} has no drives, but a directory on disk is given")

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.ranks * self.copies

    @property
    def form(self) -> Format:
        return Format.of(self.precision, self.moment_count, self.moments, self.whole)

    @property
    def may_speculate(self) -> bool:
        """True if anything could, if it is not forbidden."""
        return no_speculation(self.budget, wait=self.needs_norm) is None

    @property
    def rate_name(self) -> str:
        """As ``rate_name_of``."""
        return rate_name_of(self.optimizer, self.moment_count, self.precision)

    @property
    def name_of_bits(self) -> str:
        """The name of the optimizer in the machine's profile, where that says whose bits differ."""
        return f"{self.rate_name}.{self.moments}" if self.is_compact else self.rate_name

    def profile(self, micro_batch_size: int) -> ModelProfile:
        """The model's profile for micro-batches of so many sequences."""
        if micro_batch_size not in self.profiles:
            found = self.shape.profile(micro_batch_size, self.sequence_length, self.form)
            self.profiles[micro_batch_size] = found
        return self.profiles[micro_batch_size]

    def question(self, micro_batch_size: int, micro_batches: int) -> Question:
        """The question for one way to cut a batch into micro-batches.

        Raises:
            ConfigError: the machine has no rate for the precision, or the model does not take such micro-batches.
        """
        profile = self.profile(micro_batch_size)
        request = Request(
            program=Mesh(data=self.parts(self.ranks)).everyone().part(profile.program),
            budget=self.step_budget,
            form=self.form,
            micro_batches=micro_batches,
            wait=self.needs_norm,
            **fields_of(self),
            family=self.families[0],
            ranks=self.ranks,
            copies=self.copies,
            hosts=self.hosts,
            inputs=micro_batches * profile.tokens * TOKEN_BYTES,
            accelerated=self.machine.device.kind != "cpu",
        )
        return Question(
            request=request,
            machine=self.machine,
            times=stage_times(profile, self.machine, self.precision),
            optimizer=self.rate_name,
            families=self.families,
            repeats=expected_repeats(self),
            disk_free=self.disk_free,
            most_ops=MOST_OPS,
            room=self.room,
        )

    @property
    def room(self) -> Mapping[Tier, int]:
        """Bytes of memory that phases outside of steps may take: the machine's, or a budget that is larger."""
        return {tier: max(size, self.machine.memory[tier]) for tier, size in self.budget.memory.items()}

    @property
    def given(self) -> Mapping[Tier, int]:
        """Bytes of each tier that a plan may use."""
        return {**self.budget.memory, "disk": self.disk_free}

    @property
    def step_budget(self) -> Budget:
        """The budget, with room in host memory for the buffer through which a snapshot goes."""
        most = self.room["host"] - BOUNCE
        return self.budget if self.budget.host_bytes <= most else replace(self.budget, host=max(most, 1))


def own_budget(machine: Machine, *, device: str | float | None, host: str | float | None) -> Budget:
    """A budget from what a machine has: its drives, what is free on its device, and else the shares ``OWN_SHARE`` of
    memory that are not given.

    Raises:
        ConfigError: more is given than there is.
    """
    shares, free = OWN_SHARE[machine.device.kind], machine.device.room
    if free is None:
        free = int(machine.device.memory * shares[0])
    budget = Budget(
        device=free if device is None else device,
        host=int(machine.host.memory * shares[1]) if host is None else host,
        disk=[drive.path for drive in machine.drives] or None,
    )
    for tier, there in machine.memory.items():
        if (given := budget.memory[tier]) > there:
            raise ConfigError(
                f"{tier}={format_size(given)}: {machine.name} has {format_size(there)} of {tier} memory. To see what "
                "more would do, change the machine's profile"
            )
    return budget
