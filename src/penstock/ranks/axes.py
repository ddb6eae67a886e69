"""The axes of a mesh: how the ranks that train together share the state.

    dp_replicate  copies of the state (HSDP), each of neighbouring ranks, as those of one host are
    dp_shard      the ranks that share one copy
    cp            ranks that share each sequence, too (context parallel): neighbours, and all of them share the state
    pp            the ranks of a pipeline, each of which has blocks of its own; before ``dp_shard``: pipelines beside
                  each other, of micro-batches of their own, in which neighbours share what is one rank's in a pipeline

Names as torchtitan has them. This is the only place that reads a mesh's axes. A rank's number is that of the mesh in
row-major order, so that the ranks of a copy are neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError

SHARD = "dp_shard"
REPLICATE = "dp_replicate"
PIPELINE = "pp"
CONTEXT = "cp"


@dataclass(frozen=True, kw_only=True)
class Axes:
    """``copies`` of the state, each of as many ranks; or pipelines of so many ``stages``. ``members``: the numbers of
    all of them in ``torch.distributed``, by rank. ``cp``: so many neighbours share each sequence."""

    copies: int
    members: Sequence[int]
    stages: int = 1
    cp: int = 1

    def of_copy(self, rank: int) -> range:
        """The ranks that share a rank's copy."""
        each = len(self.members) // self.copies
        first = rank - rank % each
        return range(first, first + each)

    def of_part(self, rank: int) -> range:
        """The ranks that have the same part as a rank, of all copies."""
        each = len(self.members) // self.copies
        return range(rank % each, len(self.members), each)

    def of_stage(self, rank: int) -> range:
        """The ranks that have the same place as a rank, each in its pipeline."""
        each = len(self.members) // self.stages
        return range(rank - rank % each, rank - rank % each + each)

    def of_pipeline(self, rank: int) -> range:
        """The ranks of a rank's pipeline."""
        each = len(self.members) // self.stages
        return range(rank % each, len(self.members), each)

    def of_sequence(self, rank: int) -> range:
        """The ranks that share a rank's sequences."""
        first = rank - rank % self.cp
        return range(first, first + self.cp)


def axes_of(mesh: DeviceMesh) -> Axes:
    """Raises:
    ConfigError: the mesh is of another kind.
    """
    names = mesh.mesh_dim_names
    kind = mesh.device_type
    if mesh.ndim == 1 and names in (None, (SHARD,)):
        return Axes(copies=1, members=mesh.mesh.flatten().tolist())
    if names in ((PIPELINE,), (PIPELINE, SHARD)):
        return Axes(copies=1, members=mesh.mesh.flatten().tolist(), stages=mesh.size(0))
    if names in ((CONTEXT,), (SHARD, CONTEXT)):
        return Axes(copies=1, members=mesh.mesh.flatten().tolist(), cp=mesh.size(mesh.ndim - 1))
    if names != (REPLICATE, SHARD):
        raise ConfigError(
            f"mesh has the axes {names or mesh.ndim}: give one axis, {SHARD!r}, of the ranks that share the state, as "
            f"init_device_mesh({kind!r}, (world_size,), mesh_dim_names=({SHARD!r},)), or for copies of the state two, "
            f"{REPLICATE!r} and {SHARD!r}; for ranks that share each sequence {CONTEXT!r}, alone or behind {SHARD!r}; "
            f"or {PIPELINE!r}, of the ranks of a pipeline, alone or before {SHARD!r}"
        )
    copies, each = mesh.mesh.shape
    if copies > 1 and (each < 2 or each & (each - 1)):
        raise ConfigError(
            f"mesh has {each} ranks on the axis {SHARD!r}, with {copies} copies of the state: give 2, 4, 8 or another "
            "power of two, with which the numbers do not depend on the number of copies"
            + (f"; or for a copy on each rank stage=0 and one axis, {SHARD!r}" if each == 1 else "")
        )
    return Axes(copies=copies, members=mesh.mesh.flatten().tolist())
