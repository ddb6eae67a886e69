"""The axes of a mesh: how the ranks that train together share the state.

    dp_replicate  copies of the state (HSDP), each of neighbouring ranks, as those of one host are
    dp_shard      the ranks that share one copy
    pp            the ranks of a pipeline, each of which has blocks of its own; before ``dp_shard``: pipelines beside
                  each other, of micro-batches of their own, in which neighbours share what is one rank's in a pipeline
    cp            behind any of these: neighbours that share each sequence, too (context parallel)

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
    ConfigError: the mesh is of another kind, or its ranks are not in ascending order.
    """
    names = mesh.mesh_dim_names or ((SHARD,) if mesh.ndim == 1 else ())
    orders = ((PIPELINE, SHARD, CONTEXT), (REPLICATE, SHARD, CONTEXT))
    if names in ((), (REPLICATE,)) or not any(
        names == tuple(axis for axis in order if axis in names) for order in orders
    ):
        raise ConfigError(
            f"mesh has the axes {names or mesh.ndim}: give one axis, {SHARD!r}, of the ranks that share the state, as "
            f"init_device_mesh({mesh.device_type!r}, (world_size,), mesh_dim_names=({SHARD!r},)), or for copies of the "
            f"state two, {REPLICATE!r} and {SHARD!r}; or {PIPELINE!r}, of the ranks of a pipeline, alone or before "
            f"{SHARD!r}; and for ranks that share each sequence {CONTEXT!r}, alone or behind these"
        )
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    copies = sizes.get(REPLICATE, 1)
    each = mesh.size() // copies
    if copies > 1 and (each < 2 or each & (each - 1)):
        raise ConfigError(
            f"mesh has {copies} copies of the state, each on {each} rank{'s' * (each > 1)}: give 2, 4, 8 or another "
            "power of two, with which the numbers do not depend on the number of copies"
            + (f"; or for a copy on each rank stage=0 and one axis, {SHARD!r}" if each == 1 else "")
        )
    members = mesh.mesh.flatten().tolist()
    if members != sorted(members):  # torch's groups number theirs so, whatever the order that they are given in
        raise ConfigError(
            f"mesh has the ranks {', '.join(map(str, members))}, row by row: give them in ascending order, as "
            "init_device_mesh does"
        )
    return Axes(copies=copies, members=members, stages=sizes.get(PIPELINE, 1), cp=sizes.get(CONTEXT, 1))
