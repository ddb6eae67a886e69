"""Several ranks on process groups of ``torch.distributed``: what moves between them, and who waits for whom."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock import accelerator
from penstock.compat.torch import store_of
from penstock.errors import ConfigError, RankError
from penstock.ranks import levels
from penstock.ranks.axes import Axes, axes_of
from penstock.ranks.between import check_none_given_up, close_watch, open_watch
from penstock.ranks.calls import Calls
from penstock.ranks.group import ALONE, Ranks
from penstock.ranks.left import Left
from penstock.ranks.telling import Telling
from penstock.ranks.waiting import LOOK, Beside, GivingUp, beside, give_up
from penstock.ranks.watch import LONG, Place, Watch, host_count, log
from penstock.schedule.mesh import is_branch

T = TypeVar("T")
_PIECE = 1 << 20
"""Bytes of a message between hosts. Where several ranks share a link they take turns: in larger pieces one waits for
another, and then all of them rest."""
_GLANCE = timedelta(seconds=LOOK)
_SHORT = 1e-3
"""seconds"""
_TAG = 0
"""the tag of all messages: they come in the order in which they are sent"""
_FEW = 3.0
"""seconds in which calls return that were given up"""
_PATIENCE = timedelta(days=7)
"""Patience of a rank with others that prepare data, or load a model; one that is gone is noticed at once."""

_WAITS_IN_WRAP = "rank %d has waited in wrap for %.0f s, and goes on waiting: all ranks of its mesh make this call"


class Together(Telling):
    """One of several ranks."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        """All ranks of the mesh come here."""
        global _made
        check_none_given_up()
        axes = axes_of(mesh)
        members = axes.members
        self.rank, self.size, self.copies = members.index(dist.get_rank()), len(members), axes.copies
        self.cp = axes.cp
        self.stages = axes.stages
        self._beside: dict[int, Beside] = {}
        """thread -> the one that waits in its place"""
        self._pending: list[object] = []
        """objects that a broken-off collective may still write to"""
        self._on_device: list[dist.ProcessGroup] = []
        """process groups of what is queued on the device"""
        self._aborting = threading.Lock()
        self._left = Left.of(mesh, device)
        try:
            with _said_if_long(self.rank):
                found = _told(mesh, (Place.here(), _made, self._left.numbers))
        except RankError:  # of an engine that is there already
            raise
        except RuntimeError as error:  # whoever waits for it is told at once that a rank is dead
            raise RankError(f"another rank was gone before all had joined: {error}") from error
        self._number = _made = max(made for _, made, _ in found) + 1
        self._to_take_over = deque(self._left.taken([numbers for _, _, numbers in found]))
        self._groups: list[dist.ProcessGroup] = []
        """process groups, in the order in which they were joined"""
        places = [place for place, _, _ in found]
        self.hosts = host_count(places)
        store = store_of(f"penstock/{'-'.join(map(str, members))}/{_made}")
        self._calls = Calls()
        self._watch = Watch(store, self.rank, places, self._calls)
        self._giving_up = GivingUp(self._watch)
        self._members, self._device = members, device
        self._hosts = [place.host for place in places]
        try:
            self.control = self._join(members, "gloo", device)
            """the process group of what ranks tell each other"""
            self._data = self._join(members, dist.get_default_backend_for_device(device), device)
            self._crossing = self._join(members, "gloo", device) if self.are_pipeline else None
            some_of_hosts = Across if self.hosts > 1 and device.type == "cpu" else Some
            if self.copies > 1:
                self._of_copy = self._some(axes.of_copy(self.rank))
                self._of_part = some_of_hosts(self, axes.of_part(self.rank))
            if 1 < self.stages < self.size:  # pipelines beside each other
                self._pipe = Some(self, axes.of_pipeline(self.rank), tells=True)
                self._sharing = self._some(axes.of_stage(self.rank), tells=True, cp=self.cp)
            if self.cp > 1:
                self._of_sequence = self._some(axes.of_sequence(self.rank))
            self._between: Some | None = None
            """the ranks of ``of_place``, for collectives of all that have two levels"""
            if self.copies == self.stages == 1 and 1 < self.hosts < self.size:
                hosts = Axes(copies=self.hosts, members=members)
                self._of_host = Some(self, hosts.of_copy(self.rank))
                self._between = some_of_hosts(self, hosts.of_part(self.rank))
                self._of_place = some_of_hosts(self, hosts.of_part(self.rank))
            alone = self.copies == self.stages == 1 and self._are_apart(range(self.size))
            self._apart = Across(self, range(self.size)) if alone else None
            """all ranks, if each is on a host of its own"""
        except BaseException as error:
            self._watch.tell(error)
            raise
        open_watch(self._watch)

    @property
    def in_call(self) -> str:
        return self._calls.name

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        with self._calls.call(call), super().together(call):
            yield

    def beside(self) -> Ranks:
        other = copy(self)
        other.control = self._join(self._members, "gloo", self._device)
        return other

    def _join(self, members: Sequence[int], backend: str, device: torch.device) -> "dist.ProcessGroup":
        """Make a process group."""

        def make() -> dist.ProcessGroup:
            if device.type != "cpu":
                torch.accelerator.set_device_index(device)
            group = dist.new_group(list(members), backend=backend, use_local_synchronization=True, timeout=_PATIENCE)
            assert isinstance(group, dist.ProcessGroup)
            return group

        try:
            group = self._to_take_over.popleft() if self._to_take_over else beside(make, self.check)
            self._groups.append(group)
            if backend != "gloo":
                self._on_device.append(group)
            return group
        except RankError:
            raise
        except RuntimeError as error:
            raise self._watch.lost(error) from error

    def _are_apart(self, ranks: Sequence[int]) -> bool:
        """True if each of some ranks is on a host of its own, without a GPU."""
        return self._device.type == "cpu" and 1 < len(ranks) == len({self._hosts[rank] for rank in ranks})

    def _some(self, ranks: Sequence[int], *, tells: bool = False, cp: int = 1) -> "Some":
        return (Across if self._are_apart(ranks) else Some)(self, ranks, tells=tells, cp=cp)

    def gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        if self._apart is not None:
            self._apart.gather(out, part)
        elif self._between is None:
            self.gather_in(self._data, out, part)
        else:
            levels.gather_between(self._between, out, part)
            levels.gather_within(self.of_host, self._between.size, out)

    def exchange_and_add(self, into: torch.Tensor, out: torch.Tensor, total: torch.Tensor) -> None:
        if self._between is None or not is_branch(self.of_host.size):
            super().exchange_and_add(into, out, total)
        else:
            levels.add_up_within(self.of_host, self._between.size, into, out)
            levels.add_up_between(self._between, into, out, total)

    def group_of(self, members: Sequence[int], backend: str | None = None) -> "dist.ProcessGroup":
        """A process group of some of the ranks, all of which come here. ``backend``: None: the device's."""
        among = [self._members[rank] for rank in members]
        return self._join(among, backend or dist.get_default_backend_for_device(self._device), self._device)

    def gather_in(self, group: "dist.ProcessGroup", out: torch.Tensor, part: torch.Tensor) -> None:
        by_its_new_name = getattr(dist, "all_gather_single", None)  # from torch 2.13 on
        work = (by_its_new_name or dist.all_gather_into_tensor)(out, part, group=group, async_op=True)
        self._wait(work, out, part)

    def exchange(self, out: torch.Tensor, into: torch.Tensor) -> None:
        if self._apart is None:
            self.exchange_in(self._data, out, into)
        else:
            self._apart.exchange(out, into)

    def exchange_in(self, group: "dist.ProcessGroup", out: torch.Tensor, into: torch.Tensor) -> None:
        work = dist.all_to_all_single(out.view(-1), into.view(-1), group=group, async_op=True)
        self._wait(work, out, into)

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        assert self._crossing is not None
        self._cross(self._crossing.send, tensor, peer)

    def receive(self, into: torch.Tensor, peer: int) -> None:
        assert self._crossing is not None
        self._cross(self._crossing.recv, into, peer)

    def _cross(self, call: Callable[..., Any], tensor: torch.Tensor, peer: int) -> None:
        works = list[list[Any]]()

        def message() -> None:
            works.append([call([tensor], peer, _TAG)])  # fails where a rank is gone
            _wait_for(works[0])

        self._message(message, tensor, works=works)

    def _message(self, call: Callable[[], Any], *tensors: torch.Tensor, works: Sequence[Sequence[Any]]) -> None:
        """Do what waits for messages to or from other ranks. ``tensors``: what it sends and receives. ``works``: those
        of gloo that it waits for: gloo gives none up by itself."""
        try:
            with self._watch.waits(), self._giving_up.while_waiting_for(works):
                if threading.current_thread() is threading.main_thread():  # an interrupt ends that one's wait
                    self._aside(call)
                else:
                    self.check()  # of what fails later ``works`` are given up
                    call()
        except (RankError, KeyboardInterrupt):
            self._pending.append((call, tensors))  # the backend still has their addresses
            give_up(works)
            raise
        except RuntimeError as error:
            self._pending.append((call, tensors))
            raise self._watch.lost(error) from error

    def _aside(self, call: Callable[[], Any]) -> None:
        """Have another thread make a call that nothing ends, and wait as long as all others are there."""
        thread = threading.get_ident()
        if thread not in self._beside:
            self._beside[thread] = Beside()

        def waiting() -> None:
            with self._watch.waits():  # that thread, too: its wait is none of other code
                call()

        self._beside[thread].make(waiting, self.check)

    def trade_in(
        self, group: "dist.ProcessGroup", sent: Mapping[int, torch.Tensor], got: Mapping[int, torch.Tensor]
    ) -> None:
        """Send tensors on the CPU to some ranks, and fill others with what those send: piece by piece, two of which are
        under way."""
        under_way = list[list[Any]]()

        def all_pieces() -> None:
            cut = {rank: (_pieces(sent[rank]), _pieces(got[rank])) for rank in sent}
            for piece in range(max(len(theirs) for theirs, _ in cut.values())):
                works = []
                for rank, (to, of) in cut.items():
                    works.append(dist.irecv(of[piece], self._members[rank], group=group))
                    works.append(dist.isend(to[piece], self._members[rank], group=group))
                under_way.append(works)
                if len(under_way) > 1:
                    _wait_for(under_way[0])
                    del under_way[0]
            for works in under_way:
                _wait_for(works)

        self._message(all_pieces, *sent.values(), *got.values(), works=under_way)

    def _gather_control(self, out: torch.Tensor, part: torch.Tensor) -> None:
        self.gather_in(self.control, out, part)

    def lend(self, tensor: torch.Tensor, owner: int) -> None:
        self.lend_in(self.control, tensor, owner)

    def lend_in(self, group: "dist.ProcessGroup", tensor: torch.Tensor, owner: int) -> None:
        source = dist.get_global_rank(group, owner)
        self._wait(dist.broadcast(tensor, source, group=group, async_op=True), tensor)

    @property
    def failure(self) -> RankError | None:
        return self._watch.failure

    def fail(self, error: BaseException) -> None:
        self._watch.tell(error)

    @property
    def broken_off(self) -> bool:
        return bool(self._pending)

    def close(self) -> None:
        close_watch(self._watch)
        self._watch.close()
        self._giving_up.close()
        for thread in self._beside.values():
            thread.close()
        until = time.monotonic() + _FEW
        for thread in self._beside.values():
            thread.await_end(until)
        if not self.broken_off and self._watch.failure is None:
            self._left.put(self._number, [*self._groups, *self._to_take_over])

    def _wait(self, work: Any, *tensors: torch.Tensor) -> None:
        """Block until a collective is done. ``tensors``: what it reads and writes."""
        device = tensors[0].device
        try:
            with self._watch.waits():
                while device.type == "cpu" and not _is_over(work):
                    if self._watch.failure is not None:
                        self._pending.append((work, tensors))  # the backend still has their addresses
                        self.check()
                work.wait()  # of a device: until all is queued
        except RankError:
            raise
        except RuntimeError as error:
            raise self._watch.lost(error) from error
        if device.type != "cpu":
            self._wait_for_device(device, *tensors)

    def _wait_for_device(self, device: torch.device, *tensors: torch.Tensor) -> None:
        """Block until the device has come to what is queued now. It waits there for the other ranks' devices, with no
        end where one is gone: then what is under way is given up, so that its streams go on."""
        its = accelerator.of(device)
        done = its.event()
        done.record(its.current_stream(device))

        def over() -> None:
            with its.selected(device):
                done.synchronize()

        if not done.query():
            try:
                with self._watch.waits():
                    self._aside(over)
            except RankError:
                self._pending.append((over, tensors))
                self._abort()
                raise
            except RuntimeError as error:
                raise self._watch.lost(error) from error
        done.synchronize()  # it is over; what has failed on the device is told to who asks

    def _abort(self) -> None:
        """Give up what is under way on the device, once: whoever comes second finds that done."""
        with self._aborting:
            while self._on_device:
                self._on_device.pop().abort()


class Some(Telling):
    """Some of several ranks, for what they alone move between them."""

    def __init__(self, all_of_them: Together, members: Sequence[int], *, tells: bool = False, cp: int = 1) -> None:
        """``members``: by their numbers among all. All of those come here. ``tells``: they tell each other things."""
        self._all, self._numbers, self.cp = all_of_them, members, cp
        self.rank, self.size = members.index(all_of_them.rank), len(members)
        self._group = all_of_them.group_of(members)
        self._control = all_of_them.group_of(members, "gloo") if tells else None

    def gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        self._all.gather_in(self._group, out, part)

    def exchange(self, out: torch.Tensor, into: torch.Tensor) -> None:
        self._all.exchange_in(self._group, out, into)

    def number_of(self, rank: int) -> int:
        return self._numbers[rank]

    @property
    def in_call(self) -> str:
        return self._all.in_call

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._all.send(tensor, self._numbers[peer])

    def receive(self, into: torch.Tensor, peer: int) -> None:
        self._all.receive(into, self._numbers[peer])

    def _gather_control(self, out: torch.Tensor, part: torch.Tensor) -> None:
        assert self._control is not None
        self._all.gather_in(self._control, out, part)

    def lend(self, tensor: torch.Tensor, owner: int) -> None:
        assert self._control is not None
        self._all.lend_in(self._control, tensor, owner)

    def fail(self, error: BaseException) -> None:
        self._all.fail(error)

    @property
    def failure(self) -> RankError | None:
        return self._all.failure


class Across(Some):
    """Ranks of different hosts, without GPUs. Each sends each other what is for that one, straight from and to where it
    belongs, in small pieces: the collectives of gloo reach 0.5 to 0.8 of a link."""

    def __init__(self, all_of_them: Together, members: Sequence[int], *, tells: bool = False, cp: int = 1) -> None:
        super().__init__(all_of_them, members, tells=tells, cp=cp)
        self._others = {rank: row for row, rank in enumerate(members) if row != self.rank}

    def gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        rows, mine = out.view(self.size, -1), part.view(-1)
        rows[self.rank].copy_(mine)
        self._trade(dict.fromkeys(self._others, mine), rows)

    def exchange(self, out: torch.Tensor, into: torch.Tensor) -> None:
        rows, mine = out.view(self.size, -1), into.view(self.size, -1)
        rows[self.rank].copy_(mine[self.rank])
        self._trade({rank: mine[row] for rank, row in self._others.items()}, rows)

    def _trade(self, sent: Mapping[int, torch.Tensor], rows: torch.Tensor) -> None:
        self._all.trade_in(self._group, sent, {rank: rows[row] for rank, row in self._others.items()})


def _pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    size = _PIECE // flat.itemsize
    return [flat[start : start + size] for start in range(0, flat.numel(), size)]


def _is_over(work: Any) -> bool:
    """Wait for a collective of gloo, for ``LOOK`` seconds; True: it is done, or has failed.

    torch itself waits. A callback of Python would be made whenever the collective ends: also as the process does, after
    another rank was given up, and would abort it.
    """
    try:
        work.wait(_GLANCE)
    except RuntimeError:
        time.sleep(_SHORT)  # whatever it was that came at once
        return bool(work.is_completed())
    return True


def _wait_for(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


@contextmanager
def _said_if_long(rank: int) -> Iterator[None]:
    """Until all ranks are in ``wrap``, nobody knows who is missing."""
    said = threading.Timer(LONG, partial(log.warning, _WAITS_IN_WRAP, rank, LONG))
    said.daemon = True
    said.start()
    try:
        yield
    finally:
        said.cancel()


def _told(mesh: DeviceMesh, value: T) -> list[T]:
    """The values of all ranks of a mesh, by rank."""
    found: list[Any] = [value]
    for axis in reversed(range(mesh.ndim)):  # along the last one first: neighbours
        group = mesh.get_group(axis)
        gathered: list[Any] = [None] * mesh.size(axis)
        dist.all_gather_object(gathered, found, group=group)
        found = [one for along in gathered for one in along]
    return found


_made = 0
"""the number of the last ``Together`` that this process was in: the next one's is above that of all who are in it"""


def join(mesh: DeviceMesh | None, device: torch.device) -> Ranks:
    """The ranks of a mesh, all of which come here; who has none is alone.

    Raises:
        ConfigError: the mesh is of another kind than ranks that share all state, this process is not in it, or they
            are spread unevenly over hosts.
        RankError: another rank has gone.
    """
    if mesh is None:
        return ALONE
    own, members = dist.get_rank(), axes_of(mesh).members
    if own not in members:
        raise ConfigError(
            f"rank {own} is not in the mesh, which is of the ranks {', '.join(map(str, members))}: give it a mesh that "
            "it is in, or have only those train"
        )
    return Together(mesh, device) if mesh.size() > 1 else ALONE
