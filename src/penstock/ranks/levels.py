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

Between its two levels a result is in what will be filled, or what is sent by way of. So the levels of one collective
can be ops of two lanes, and those of different ones go on beside each other.
"""

from typing import Protocol

import torch

from penstock.ranks.order import add_up


class Level(Protocol):
    """Ranks of one level."""

    size: int

    def gather(self, out: torch.Tensor, part: torch.Tensor) -> None: ...

    def exchange(self, out: torch.Tensor, into: torch.Tensor) -> None: ...


def gather_between(between: Level, out: torch.Tensor, part: torch.Tensor) -> None:
    """Put the ``part`` [n] of each rank with this one's place at the beginning of ``out`` [H * r * n], host by host."""
    between.gather(out.view(-1)[: between.size * part.numel()], part)


def gather_within(within: Level, hosts: int, out: torch.Tensor) -> None:
    """Fill ``out`` [H * r * n] with all ranks' parts [n], one after the other, host by host. It begins with those of
    this rank's place on all ``hosts`` (``gather_between``)."""
    flat, each = out.view(-1), within.size
    n = flat.numel() // (hosts * each)
    of_place = flat[: hosts * n]
    # From the last host to the first: what is put together never lies over a part that is still to be sent, but for the
    # first host's own.
    for host in reversed(range(hosts)):
        mine = of_place[host * n : (host + 1) * n]
        within.gather(flat[host * each * n : (host + 1) * each * n], mine if host else mine.clone())


def add_up_within(within: Level, hosts: int, into: torch.Tensor, out: torch.Tensor) -> None:
    """Add up in the first rows of ``into`` [H * r, c], one for each of the ``hosts``, this host's rows for the ranks
    with this one's place on them, by way of ``out``, which is as large. Both are overwritten."""
    by_host = into.view(hosts, within.size, -1), out.view(hosts, within.size, -1)
    for sent, got in zip(*by_host, strict=True):
        within.exchange(got, sent)
    for host, got in enumerate(by_host[1]):
        add_up(tuple(got), into[host])


def add_up_between(between: Level, into: torch.Tensor, out: torch.Tensor, total: torch.Tensor) -> None:
    """Add up in ``total`` [c] all hosts' rows for this rank, from the first rows of their ``into`` (``add_up_within``),
    by way of ``out``, which is overwritten."""
    sums, of_hosts = into[: between.size], out[: between.size]
    between.exchange(of_hosts, sums)
    add_up(tuple(of_hosts), total)
