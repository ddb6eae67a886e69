"""Collectives on two levels: within each host, and between the ranks that have the same place on their hosts.

    gather    each rank has part (h, i), of H hosts of r ranks
              between  rank i of each host gets the parts (0..H-1, i)             H - 1 parts are sent by each rank
              within   all get all                                                H (r - 1)
    add up    each rank has a row for every part
              within   rank i adds up its host's rows for (0..H-1, i)             H (r - 1) rows
              between  rank i of host h adds up all hosts' sums for (h, i)        H - 1

All in all a rank sends as much as on one level. But no more than (H - 1) / H of the whole leaves a host, whatever the
number of its ranks, where all-to-all each of them would send that. The sum of a host is a branch of the tree in which
the gradients of all ranks are added up (``order``) if r is a power of two: else they are added up on one level.
"""

from typing import Protocol

import torch

from penstock.ranks.order import add_up


class Level(Protocol):
    """Ranks of one level."""

    size: int

    def gather(self, out: torch.Tensor, part: torch.Tensor) -> None: ...

    def exchange(self, out: torch.Tensor, into: torch.Tensor) -> None: ...


def gather(within: Level, between: Level, out: torch.Tensor, part: torch.Tensor) -> None:
    """Fill ``out`` [H * r * n] with all ranks' ``part`` [n], one after the other, host by host."""
    hosts, each, n = between.size, within.size, part.numel()
    flat = out.view(-1)
    of_place = flat[: hosts * n]
    between.gather(of_place, part)
    # From the last host to the first: what is put together never lies over a part that is still to be sent, but for the
    # first host's own.
    for host in reversed(range(hosts)):
        mine = of_place[host * n : (host + 1) * n]
        within.gather(flat[host * each * n : (host + 1) * each * n], mine if host else mine.clone())


def exchange_and_add(within: Level, between: Level, into: torch.Tensor, out: torch.Tensor, total: torch.Tensor) -> None:
    """Add up in ``total`` [c] this rank's rows of all ranks' ``into`` [H * r, c], by way of ``out``, which is as large.
    Both are overwritten."""
    hosts, each = between.size, within.size
    by_host = into.view(hosts, each, -1), out.view(hosts, each, -1)
    for sent, got in zip(*by_host, strict=True):
        within.exchange(got, sent)
    sums, of_hosts = into[:hosts], out[:hosts]
    for host, got in enumerate(by_host[1]):
        add_up(tuple(got), sums[host])
    between.exchange(of_hosts, sums)
    add_up(tuple(of_hosts), total)
