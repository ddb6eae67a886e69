"""Messages between the ranks of a pipeline: outputs of stages, gradients with respect to them, masks and the like.

Before a tensor goes a *head* of some numbers, by which whoever receives it makes memory of the same strides, so that
kernels sum in the order in which they would have. That of a gradient also says whether one has come at all, and whether
a loss was no number. A head is not counted among the bytes that a schedule knows of.

A small tensor goes in one message with its head, as many bytes as the probe has seen of it: what a message takes counts
then, and not its bytes. One that has turned out otherwise comes in a message of its own. All that a stage is handed
besides its input goes in one message in the same way, all heads first.

Messages are of host memory. What is on an accelerator passes through page-locked memory there, piece by piece: one is
copied while the one before crosses (``Staging``). There each slot of the pool has one buffer while a step lasts:
torch's allocator would give the memory of what is gone to what comes only when compute's stream has done all that is
queued by then. Memory that something still refers to when its slot is given back is left to that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from penstock.compat.torch import is_held_elsewhere
from penstock.errors import NonFiniteError
from penstock.ranks.group import Ranks
from penstock.runtime.access import Access
from penstock.runtime.staging import Staging
from penstock.runtime.streams import Streams
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Op
from penstock.tape.elsewhere import Elsewhere, Way
from penstock.tape.handed import Kind
from penstock.tape.tape import Tape

_DIMENSIONS = 8
_HEAD = 3 + 2 * _DIMENSIONS
"""Numbers of a head: 1 if a loss was no number, where its tensor is, and the dimensions, sizes and strides of that."""
_HEAD_BYTES = 8 * _HEAD
_NO_TENSOR, _IN_ITS_MESSAGE, _IN_THE_NEXT = range(3)
SMALL = 1 << 18
"""Bytes of a tensor up to which it goes with its head."""
_WAYS: dict[str, Way] = {"A": "output", "D": "gradient", "X": "besides"}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Message:
    """Memory for the heads of some tensors, and for what goes with them: all of it, the heads' numbers in it, and each
    tensor's place."""

    memory: torch.Tensor
    heads: npt.NDArray[np.int64]
    places: Sequence[torch.Tensor]

    @classmethod
    def of(cls, kinds: Sequence[Kind]) -> "_Message":
        sizes = [kind.nbytes if kind.nbytes <= SMALL else 0 for kind in kinds]
        memory = torch.empty(len(kinds) * _HEAD_BYTES + sum(sizes), dtype=torch.uint8, device="cpu")
        heads, *places = torch.split(memory, [len(kinds) * _HEAD_BYTES, *sizes])
        return cls(memory=memory, heads=heads.numpy().view(np.int64), places=places)


class Crossing:
    """Sends what the tape has put out, and puts what is received where the tape finds it."""

    def __init__(
        self,
        access: Access,
        tape: Tape,
        ranks: Ranks,
        streams: Streams,
        staging: Staging | None,
    ) -> None:
        """``staging``: where messages pass through host memory; None: they are there."""
        self._to = access
        self._tape = tape
        self._ranks = ranks
        self._streams = streams
        self._staging = staging
        self._slots: dict[tuple[str, int], torch.Tensor] = {}
        """on an accelerator: (pool, slot) -> its memory, once something has come there"""
        self._messages: dict[tuple[Lane, tuple[Kind, ...]], _Message] = {}
        """those of this step, each used again and again: new memory is slow"""

    def kinds(self) -> dict[str, Callable[[Op], None]]:
        return {
            **dict.fromkeys(("SA", "SD"), self.send),
            **dict.fromkeys(("RA", "RD"), self.receive),
            "SX": self.send_besides,
            "RX": self.receive_besides,
        }

    @property
    def _elsewhere(self) -> Elsewhere:
        assert self._tape.elsewhere is not None
        return self._tape.elsewhere

    def send(self, op: Op) -> None:
        k, m, way = op.id.stage, op.id.micro_batch, _WAYS[op.id.kind[1]]
        self._send([(self._elsewhere.kind(k, m), self._elsewhere.take(way, k, m))], op.peer)
        if way == "output":
            self._elsewhere.drop(k, m)

    def receive(self, op: Op) -> None:
        k, m, way = op.id.stage, op.id.micro_batch, _WAYS[op.id.kind[1]]
        (received,) = self._receive(op, [self._elsewhere.kind(k, m)], op.writes)
        self._elsewhere.put(way, k, m, received)

    def send_besides(self, op: Op) -> None:
        k, m = op.id.stage, op.id.micro_batch
        sent = [(kind, self._elsewhere.shared(m, number)) for number, kind in self._elsewhere.kinds_besides(k, m)]
        for _, tensor in sent:
            self._streams.used_on("send", tensor)  # it goes with the micro-batch, which does not wait for this
        self._send(sent, op.peer)
        self._elsewhere.require_as_they_were(m, "the model's own code")  # which runs on while this is sent

    def receive_besides(self, op: Op) -> None:
        k, m = op.id.stage, op.id.micro_batch
        shares = self._elsewhere.kinds_besides(k, m)
        for (number, _), received in zip(shares, self._receive(op, [kind for _, kind in shares]), strict=True):
            assert received is not None
            self._elsewhere.share(m, number, received)

    def given(self, op: Op) -> None:
        """An op that gives buffers has run."""
        if not self._slots:
            return
        for name in op.gives:
            pool, slot = self._to.pools.slot(name)
            memory = self._slots.get((pool.name, slot))
            if memory is not None and is_held_elsewhere(memory):
                self._leave((pool.name, slot))

    def let_go(self) -> None:
        """The step is over: nothing that it has queued is under way."""
        for slot in list(self._slots):
            self._leave(slot)
        self._messages.clear()

    def _leave(self, slot: tuple[str, int]) -> None:
        """Leave a slot's memory to who refers to it."""
        self._streams.used_on("compute", self._slots.pop(slot))

    def _message(self, lane: Lane, kinds: Sequence[Kind]) -> _Message:
        """Memory for a message of such a lane, which has one under way at a time."""
        key = lane, tuple(kinds)
        if key not in self._messages:
            self._messages[key] = _Message.of(kinds)
        return self._messages[key]

    def _memory(self, names: Sequence[str], numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device for what comes: of the slot of the buffer that it is put in, if it fits there."""
        nbytes = numel * dtype.itemsize
        if self._staging is not None and names:
            (name,) = names
            pool, slot = self._to.pools.slot(name)
            if nbytes <= pool.size:
                key = (pool.name, slot)
                if key not in self._slots:
                    self._slots[key] = torch.empty(pool.size, dtype=torch.uint8, device=self._to.arrays.device)
                return self._slots[key].data[:nbytes].view(dtype)  # data: what is written later is no change of this
        found = torch.empty(numel, dtype=dtype, device=self._to.arrays.device)
        self._streams.used_on("compute", found)
        return found

    def _send(self, sent: Sequence[tuple[Kind, torch.Tensor | None]], peer: int) -> None:
        """``sent``: tensors, each after the kind of what the probe has seen in its place; None: there is none."""
        if not sent:  # a micro-batch may hand on less than another
            return
        message = self._message("send", [kind for kind, _ in sent])
        failed, alone, numbers = self._to.context.failure is not None, list[torch.Tensor](), list[int]()
        for (_, tensor), place in zip(sent, message.places, strict=True):
            where, layout = _NO_TENSOR, [0] * (_HEAD - 2)
            if tensor is not None:
                beyond = [0] * (_DIMENSIONS - tensor.dim())
                layout = [tensor.dim(), *tensor.shape, *beyond, *tensor.stride(), *beyond]
                flat = _bytes_of(tensor)
                self._to.moved += flat.numel()
                where = _IN_ITS_MESSAGE if flat.numel() == place.numel() else _IN_THE_NEXT
                if where == _IN_ITS_MESSAGE:
                    place.copy_(flat)
                else:
                    alone.append(flat)
            numbers += [failed, where, *layout]
        message.heads[:] = numbers
        self._ranks.send(message.memory, peer)
        for flat in alone:
            if self._staging is None:
                self._ranks.send(flat, peer)
            else:
                self._staging.send(flat, partial(self._ranks.send, peer=peer))

    def _receive(self, op: Op, kinds: Sequence[Kind], names: Sequence[str] = ()) -> list[torch.Tensor | None]:
        """``names``: the buffers that the schedule has for it."""
        if not kinds:
            return []
        message = self._message("recv", kinds)
        self._ranks.receive(message.memory, op.peer)
        heads = message.heads.reshape(-1, _HEAD).tolist()
        return [
            self._received(op, kind, head, place, names)
            for kind, head, place in zip(kinds, heads, message.places, strict=True)
        ]

    def _received(
        self, op: Op, kind: Kind, head: Sequence[int], place: torch.Tensor, names: Sequence[str]
    ) -> torch.Tensor | None:
        """``place``: of the message that has come, where the tensor is if it came with that."""
        failed, where, dimensions, *numbers = head
        if failed and self._to.context.failure is None:
            self._to.context.failure = NonFiniteError(
                f"step {self._to.context.step}: a loss of rank {self._ranks.number_of(0)} is infinite or NaN; that "
                f"rank says which. Nothing was updated (found out in stage {op.id.stage})"
            )
        if where == _NO_TENSOR:
            return None
        shape, stride = numbers[:dimensions], numbers[_DIMENSIONS : _DIMENSIONS + dimensions]
        span = replace(kind, shape=tuple(shape), stride=tuple(stride)).span
        flat = self._memory(names, span, kind.dtype)
        if where == _IN_ITS_MESSAGE:
            flat.view(torch.uint8).copy_(place)
        elif self._staging is None:
            self._ranks.receive(flat.view(torch.uint8), op.peer)
        else:
            self._staging.receive(flat.view(torch.uint8), partial(self._ranks.receive, peer=op.peer))
        self._to.moved += flat.nbytes
        return flat.as_strided(shape, stride)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory from its first number to its last."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1).view(torch.uint8)
    return tensor.detach().as_strided((Kind.of(tensor).span,), (1,)).view(torch.uint8)
