"""Ranks that add up what they have give the same sum, in the same order, whatever their number."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.ranks.order import add_up
from penstock.ranks.share import Share
from penstock.schedule.place import strand_ends, strand_sums
from penstock.schedule.program import ALIGN, GroupSpec


def sums(parts: list[torch.Tensor], strands: int) -> torch.Tensor:
    """The gradients of micro-batches, as one rank adds them up."""
    found: dict[int, torch.Tensor] = {}
    ends, first = strand_ends(len(parts), strands), 0
    for last, pairs in strand_sums(len(parts), strands).items():
        total = parts[first].clone()
        for part in parts[first + 1 : last + 1]:
            total += part
        found[ends[last]], first = total, last + 1
        for into, what in pairs:
            found[into] += found.pop(what)
    (total,) = found.values()
    return total


@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 5), st.integers(0, 2**32))
def test_a_part_of_the_ranks_gives_the_same_bits(ranks: int, doubled: int, each: int, seed: int) -> None:
    """As many ranks as strands, a half, a quarter of them, down to as many as cannot be halved."""
    most = ranks << doubled
    parts = list(torch.randn(most * each, 16, generator=torch.Generator().manual_seed(seed)))
    wanted = sums(parts, most) if ranks == 1 else None
    for halved in range(doubled + 1):
        size = most >> halved
        count = len(parts) // size
        own = [sums(parts[r * count : (r + 1) * count], most // size) for r in range(size)]
        total = torch.empty(16)
        add_up(own, total)
        wanted = total if wanted is None else wanted
        assert torch.equal(total, wanted)


def test_the_tree_is_not_the_order_of_the_micro_batches() -> None:
    """Else the test above would show nothing."""
    parts = list(torch.randn(24, 4096, generator=torch.Generator().manual_seed(0)))
    found = [sums(parts, strands) for strands in (1, 2, 4, 8)]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 3), st.data())
def test_every_element_is_one_ranks(size: int, trainable: int, frozen: int, data: st.DataObject) -> None:
    group = GroupSpec(index=0, name="g", trainable=size * trainable * ALIGN, frozen=size * frozen * ALIGN)
    flat = torch.arange(group.numel)
    shares = [Share(rank=rank, size=size) for rank in range(size)]
    own = [share.own(group, flat) for share in shares]
    assert torch.equal(torch.cat(own).sort()[0], flat)
    for share, part in zip(shares, own, strict=True):
        assert share.part(group).numel == part.numel()
        if trainable:
            assert part[0] == share.start(group)
    for begin, count in ((0, group.trainable), (group.trainable, group.frozen)):
        if not count:
            continue
        offset = data.draw(st.integers(0, count - 1))
        numel = data.draw(st.integers(1, count - offset))
        out = torch.full((numel,), -1)
        for piece in shares[0].pieces(group, begin + offset, numel):
            out[piece.first : piece.first + piece.numel] = own[piece.rank][piece.start : piece.start + piece.numel]
        assert torch.equal(out, flat[begin + offset : begin + offset + numel])


@pytest.mark.parametrize("size", [1, 3])
def test_a_group_that_cannot_be_cut_evenly_is_a_mistake(size: int) -> None:
    group = GroupSpec(index=0, name="g", trainable=2 * ALIGN, frozen=0)
    if size == 1:
        assert Share().part(group) == group
    else:
        with pytest.raises(AssertionError):
            Share(rank=0, size=size).part(group)
