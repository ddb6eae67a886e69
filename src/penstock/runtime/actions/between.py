"""The actions that ranks do together: weights put together, gradients added up, and what all need to know of them."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import NonFiniteError
from penstock.ranks import levels
from penstock.ranks.group import Ranks
from penstock.runtime.access import Access
from penstock.runtime.actions.compute import Compute
from penstock.runtime.actions.norm import Norm
from penstock.schedule.ir.ops import Op
from penstock.schedule.place import FP32


class Between:
    """Moves what is on the device between ranks. Every rank has the same ops, in the same order. Where collectives have
    two levels, those between hosts are ops of another lane than those within them, and go on beside them."""

    def __init__(self, access: Access, compute: Compute, norm: Norm, ranks: Ranks) -> None:
        self._to = access
        self._compute = compute
        self._norm = norm
        self._ranks = ranks
        self._sharing = ranks.sharing
        self._copy = ranks.of_copy
        self._host, self._place = ranks.of_host, ranks.of_place

    def kinds(self) -> dict[str, Callable[[Op], None]]:
        gather = self.gather_within if self._host.size > 1 else self.gather
        return {
            **dict.fromkeys(("GW", "GU"), gather),
            **dict.fromkeys(("HW", "HU"), self.gather_between),
            "DP": self.leave_crossed,
            "UP": self.bring_crossed,
            "SG": self.exchange,
            "HG": self.exchange_between,
            "AR": self.add_up_for_all,
            "HR": self.add_up_copies,
            "AN": self.gather_norm,
        }

    def gather(self, op: Op) -> None:
        """Put together a group's weights, or its updates of matrices, from the parts of all ranks."""
        for part, whole in self._parts(op):
            self._copy.gather(whole, part)
            self._sent(part, self._copy)

    def gather_between(self, op: Op) -> None:
        """Put together as much of it as the ranks with this one's place on all hosts have."""
        for part, whole in self._parts(op):
            levels.gather_between(self._place, whole, part)
            self._sent(part, self._place)

    def gather_within(self, op: Op) -> None:
        """Put together all of it, from what the ranks of this host have."""
        for whole in self._cut(op, op.writes[0], self._copy.size):
            levels.gather_within(self._host, self._place.size, whole)
            self._sent(whole[: whole.numel() // self._host.size], self._host)

    def leave_crossed(self, op: Op) -> None:
        """Down to host memory, of a group's weights, those of the ranks with this one's place on all hosts."""
        for whole, own in self._crossed(op, op.reads[0], op.writes[0]):
            for target, source in zip(own, whole[:, self._host.rank], strict=True):
                self._to.copy(target, source)

    def bring_crossed(self, op: Op) -> None:
        """The same up again, to where ``gather_within`` finds it."""
        for whole, own in self._crossed(op, op.writes[0], op.reads[0]):
            self._to.copy(whole.view(-1)[: own.numel()], own.view(-1))

    def _crossed(self, op: Op, whole: str, own: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A group's weights, [hosts, ranks of each, n], and those of the ranks with this one's place, [hosts, n]. Ranks
        whose collectives have one level count as one to a host."""
        each = self._host.size
        hosts = self._copy.size // each
        for all_of_it, part in zip(self._cut(op, whole, self._copy.size), self._cut(op, own, hosts), strict=True):
            yield all_of_it.view(hosts, each, -1), part.view(hosts, -1)

    def _parts(self, op: Op) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's parts of what an op puts together, and where all ranks' go."""
        return zip(self._cut(op, op.reads[0], 1), self._cut(op, op.writes[0], self._copy.size), strict=True)

    def _cut(self, op: Op, name: str, ranks: int) -> list[torch.Tensor]:
        """The parts of so many ranks in a buffer: a group's weights, first those that are trained, and then the others,
        if it has any; or updates of matrices."""
        group = self._to.bound.group(op)
        if op.id.kind in ("GU", "HU"):
            return [self._to.view(name, ranks * group.trainable, torch.bfloat16)]
        flat = self._to.view(name, ranks * group.numel, self._to.arrays.dtype)
        return [part for part in (flat[: ranks * group.trainable], flat[ranks * group.trainable :]) if part.numel()]

    def exchange(self, op: Op) -> None:
        """A chunk of this rank's part of a gradient, from all ranks' gradients; each sends every other one its part. On
        two levels the sums of this host, of the chunks of all ranks with this one's place."""
        size, c = self._copy.size, self._to.bound.chunk(op)
        if c.start == 0:
            self._tell(op)
        through = op.writes[-1]
        into, out = self._to.view(through, 2 * size * c.numel).view(2, size, c.numel)
        if op.reads[0] != through:  # else it is there already, summed on the host
            own = self._to.bound.group(op).trainable
            gradient = self._to.view(op.reads[0], size * own).view(size, own)
            into.copy_(gradient[:, c.start : c.start + c.numel])
        if len(op.writes) > 1:
            self._add_up(into, out, self._to.view(op.writes[0], c.numel), self._copy)
        else:
            levels.add_up_within(self._host, self._place.size, into, out)
            self._sent(into[: self._place.size], self._host)

    def exchange_between(self, op: Op) -> None:
        """A chunk of this rank's part of a gradient, from all hosts' sums."""
        size, c = self._copy.size, self._to.bound.chunk(op)
        into, out = self._to.view(op.reads[0], 2 * size * c.numel).view(2, size, c.numel)
        levels.add_up_between(self._place, into, out, self._to.view(op.writes[0], c.numel))
        self._sent(into[0], self._place)

    def add_up_for_all(self, op: Op) -> None:
        """A chunk of the sum of all ranks' gradients: each adds up a piece of it, and all put the pieces together."""
        if self._to.bound.chunk(op).start == 0:
            self._tell(op)
        self._add_up_pieces(op, self._sharing)

    def add_up_copies(self, op: Op) -> None:
        """A chunk of the sum of all copies' gradients, from what each has added up: each of the ranks that have it adds
        up a piece, and all put the pieces together."""
        self._add_up_pieces(op, self._ranks.of_part)

    def _add_up_pieces(self, op: Op, ranks: Ranks) -> None:
        size, c = ranks.size, self._to.bound.chunk(op)
        piece = -(-c.numel // size)
        into, out = self._to.view(op.writes[1], 2 * size * piece).view(2, size, piece)
        flat, found = into.view(-1), out.view(-1)
        if op.reads[0] != op.writes[1]:
            offset = c.start * FP32 if op.reads[0].chunk < 0 else 0  # of a whole group, or the chunk alone
            flat[: c.numel].copy_(self._to.view(op.reads[0], c.numel, offset=offset))
        flat[c.numel :].zero_()
        mine = into[0]
        self._add_up(into, out, mine, ranks)
        ranks.gather(found, mine)
        self._sent(mine, ranks)
        self._to.view(op.writes[0], c.numel).copy_(found[: c.numel])

    def _add_up(self, into: torch.Tensor, out: torch.Tensor, total: torch.Tensor, ranks: Ranks) -> None:
        """Send row r of ``into`` to rank r, and add up in ``total`` what all send to this one, by way of ``out``."""
        ranks.exchange_and_add(into, out, total)
        self._sent(into[0], ranks)

    def _tell(self, op: Op) -> None:
        """Tell all ranks which parameters of a group have a gradient on any of them, and whether a loss was no number
        on one, so that nothing is stepped on the others either."""
        assert op.id.visit is not None
        context, stage = self._to.context, op.id.visit.stage
        slices = [s for s in self._compute.groups[op.id.group].slices if s.trainable]
        mine = [context.failure is not None, *(id(s.parameter) in context.update.touched for s in slices)]
        ranks = self._sharing
        words = torch.empty(ranks.size * len(mine), dtype=torch.uint8, device=self._to.arrays.device)
        ranks.gather(words, torch.tensor(mine, dtype=torch.uint8, device=words.device))
        failed, *found = words.view(ranks.size, -1).cpu().T
        context.update.touched.update(
            id(s.parameter) for s, by_rank in zip(slices, found, strict=True) if bool(by_rank.any())
        )
        if bool(failed.any()) and context.failure is None:
            rank = int(failed.nonzero()[0])
            context.failure = NonFiniteError(
                f"step {context.step}: a loss of rank {rank} is infinite or NaN; that rank says which. Nothing was "
                f"updated (found out in stage {stage})"
            )

    def gather_norm(self, op: Op) -> None:
        """The sums of squares of all ranks' parts of the gradients; in pipelines of the groups that each has, and each
        sends as many as the rank that has most."""
        self._norm.bring()
        partials, bound = self._to.context.partials, self._to.bound
        share, dealt = bound.share, bound.program.dealt
        ranks, groups = (self._copy, bound.trained) if share.holders is None else (self._ranks, sorted(partials))
        of_rank: list[list[NDArray[np.float64]]] = [[] for _ in range(ranks.size)]
        for g in groups:
            first = 0 if share.holders is None else share.holders[g] * share.size
            for number, sums in enumerate(partials[g].reshape(share.size, -1), first):
                of_rank[number].append(sums)
        own = np.concatenate([*of_rank[share.rank], np.zeros(0)])
        most = own.size if dealt is None else dealt.partials
        part = torch.from_numpy(np.pad(own, (0, most - own.size))).to(self._to.arrays.device)
        found = torch.empty(ranks.size * most, dtype=part.dtype, device=part.device)
        ranks.gather(found, part)
        self._sent(part, ranks)
        for row, parts in zip(found.view(ranks.size, -1).cpu().numpy(), of_rank, strict=True):
            begin = 0
            for sums in parts:
                sums[:] = row[begin : begin + sums.size]
                begin += sums.size

    def _sent(self, part: torch.Tensor, ranks: Ranks) -> None:
        self._to.moved += part.numel() * part.itemsize * (ranks.size - 1)
