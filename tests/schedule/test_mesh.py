"""Where ranks stand, and with whom they share what."""

from itertools import product

import pytest

from penstock.schedule.mesh import ALONE, Mesh, ProcessGroup
from penstock.schedule.program import ALIGN
from tests.uniform import uniform_program

MESHES = [Mesh(data=d, stages=s, model=t) for d, s, t in product((1, 2, 3), repeat=3)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_stands_somewhere_else_and_every_kind_of_group_covers_them_once(mesh: Mesh) -> None:
    ranks = range(mesh.size)
    assert len({mesh.stands(rank) for rank in ranks}) == mesh.size == mesh.data * mesh.stages * mesh.model
    assert mesh.everyone().members == tuple(ranks)
    groups = {mesh.replicas(rank) for rank in ranks}
    assert sorted(rank for group in groups for rank in group.members) == list(ranks)
    for rank in ranks:
        assert rank in mesh.replicas(rank).members
        assert {mesh.stands(other)[1:] for other in mesh.replicas(rank).members} == {mesh.stands(rank)[1:]}
        together = mesh.together(rank)
        if mesh.model == 1:
            assert together == ALONE
        else:
            assert rank in together.members
            assert {mesh.stands(other)[:2] for other in together.members} == {mesh.stands(rank)[:2]}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_parts_make_the_whole_and_each_rank_sends_all_but_its_own(size: int) -> None:
    group = ProcessGroup(name="all", members=tuple(range(size)))
    whole = uniform_program(2, block=10 * ALIGN, embedding=3 * ALIGN)
    part = group.part(whole)
    for own, all_of_it in zip(part.groups, whole.groups, strict=True):
        assert all_of_it.numel <= size * own.numel < all_of_it.numel + size * ALIGN
        assert own.numel % ALIGN == 0
        assert group.sent(size * own.numel) == (size - 1) * own.numel
    assert part.stages == whole.stages
    assert group.share(10) * size >= 10 > (group.share(10) - 1) * size
