"""A plan: a schedule with the settings that it was built from, and the memory that it may use."""

from dataclasses import dataclass
from functools import cached_property

from penstock.schedule.check.late import late_chunks
from penstock.schedule.ir.ops import Schedule, chunk_of, graphs_kept
from penstock.schedule.place import FP32, Settings
from penstock.schedule.program import Program


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A schedule with what it was built from, and the memory it may use per tier (bytes)."""

    program: Program
    settings: Settings
    schedule: Schedule

    @cached_property
    def snapshot_bytes(self) -> int:
        """Weights and optimizer state of the whole model, wherever they are at home: what one slot holds."""
        form = self.settings.form
        return sum(group.numel * form.weight_bytes + form.state_bytes(group) for group in self.program.groups)

    @cached_property
    def state_bytes(self) -> int:
        """Weights, fp32 gradients and optimizer state of the whole model."""
        return self.snapshot_bytes + sum(group.trainable for group in self.program.groups) * FP32

    @cached_property
    def disk_bytes(self) -> int:
        """Weights and optimizer state whose home is on disk."""
        place, form = self.settings.place, self.settings.form
        return sum(
            group.numel * form.weight_bytes * (place.home(group) == "disk")
            + form.state_bytes(group) * (place.state[group.index] == "disk")
            for group in self.program.groups
        )

    @cached_property
    def graphs_kept(self) -> int:
        """The number of calls of blocks in a step whose graph is kept for their backward."""
        return graphs_kept(self.schedule)

    @cached_property
    def taken_back_bytes(self) -> int:
        """Bytes that are read when a step whose norm is over the limit is dropped, before it is run again: weights that
        stages find in memory and that are at home on disk, whole, of groups that have stepped before the norm is known.
        0 where nothing speculates.
        """
        if not (self.settings.wait and self.settings.speculate):
            return 0
        place, late = self.settings.place, late_chunks(self.schedule)
        steps = {chunk_of(op) for op in self.schedule.ops if op.id.kind in ("OP", "MU")}
        early = {group for group, _ in steps - late if not self.settings.waits(group)}
        copied = (group for group in self.program.groups if group.index in early and place.copied(group))
        return sum(group.numel for group in copied) * self.settings.form.weight_bytes

    @property
    def calls(self) -> int:
        """The number of calls of blocks in a step, of this rank's."""
        own = sum(stage.kind == "call" and self.program.has(stage.index) for stage in self.program.stages)
        return own * self.settings.micro_batches

    @property
    def device_bytes(self) -> int:
        return self.schedule.peak_bytes("device")

    @property
    def host_bytes(self) -> int:
        return self.schedule.peak_bytes("host")
