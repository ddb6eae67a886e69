"""How a mesh's axes say what ranks share: which orders there are, and who has what together."""

from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from penstock.ranks.axes import Axes, axes_of
from penstock.ranks.group import Ranks


class Mesh:
    """What is read of a ``DeviceMesh``, without processes."""

    device_type = "cpu"

    def __init__(self, **axes: int) -> None:
        self.mesh_dim_names = tuple(axes) or None
        sizes = tuple(axes.values()) or (4,)
        self.mesh = torch.arange(torch.Size(sizes).numel()).view(sizes)
        self.ndim = self.mesh.dim()

    def size(self, axis: int | None = None) -> int:
        return self.mesh.numel() if axis is None else self.mesh.shape[axis]


def read(**axes: int) -> Axes:
    mesh: Any = Mesh(**axes)
    return axes_of(mesh)


@pytest.mark.parametrize("copies", [None, 1, 2, 4])
@pytest.mark.parametrize("stages", [None, 2, 3])
@pytest.mark.parametrize("shards", [None, 1, 2])
@pytest.mark.parametrize("cp", [None, 2, 3])
def test_axes_in_their_order_are_read_or_refused(
    copies: int | None, stages: int | None, shards: int | None, cp: int | None
) -> None:
    given = {"dp_replicate": copies, "pp": stages, "dp_shard": shards, "cp": cp}
    axes = {name: count for name, count in given.items() if count is not None}
    each = (shards or 1) * (cp or 1)
    alone = copies is not None and len(axes) == 1
    no_power = copies is not None and copies > 1 and (each < 2 or each & (each - 1))
    if (copies is not None and stages is not None) or alone or no_power:
        with pytest.raises(ConfigError, match="mesh has"):
            read(**axes)
        return
    found = read(**axes)
    assert (found.copies, found.stages, found.cp) == (copies or 1, stages or 1, cp or 1)
    for rank in found.members:
        assert rank in found.of_sequence(rank)
        assert len(found.of_sequence(rank)) == found.cp
        assert set(found.of_sequence(rank)) <= set(found.of_copy(rank)) & set(found.of_stage(rank))
        assert len(set(found.of_pipeline(rank)) & set(found.of_sequence(rank))) == 1


@pytest.mark.parametrize("names", [("cp", "dp_shard"), ("dp_shard", "pp"), ("cp", "pp"), ("tp",), ("dp_shard", "tp")])
def test_another_order_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="mesh has the axes"):
        read(**dict.fromkeys(names, 2))


@pytest.mark.parametrize("order", [[[0, 2], [1, 3]], [[3, 2], [1, 0]]])
@pytest.mark.parametrize("names", [("dp_replicate", "dp_shard"), ("pp", "dp_shard"), ("dp_shard", "cp")])
def test_ranks_that_are_not_in_ascending_order_are_refused(names: tuple[str, ...], order: list[list[int]]) -> None:
    mesh: Any = Mesh(**dict.fromkeys(names, 2))
    mesh.mesh = 4 + 2 * mesh.mesh
    assert axes_of(mesh).members == [4, 6, 8, 10]
    mesh.mesh = torch.tensor(order)
    with pytest.raises(ConfigError, match=r"mesh has the ranks \d, 2, 1, \d, row by row: give them in ascending order"):
        axes_of(mesh)


@pytest.mark.parametrize(("groups", "cp"), [(1, 1), (4, 1), (1, 4), (2, 2), (3, 2)])
def test_every_span_of_every_micro_batch_of_a_step_has_a_number_of_its_own(groups: int, cp: int) -> None:
    """Those of the first spans are those without: ``cp`` alone changes which random numbers are drawn."""
    numbers = []
    for rank in range(groups * cp):
        ranks = Ranks()
        ranks.rank, ranks.size, ranks.cp = rank, groups * cp, cp
        numbers.append([ranks.number(m, 3) for m in range(3)])
    assert sorted(n for of_rank in numbers for n in of_rank) == list(range(3 * groups * cp))
    assert [n for of_rank in numbers[::cp] for n in of_rank] == list(range(3 * groups))
