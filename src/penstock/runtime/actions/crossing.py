"""Messages between the ranks of a pipeline: outputs of stages, gradients with respect to them, masks and the like.

Before a tensor goes a *head* of some numbers, by which whoever receives it makes memory of the same strides, so that
kernels sum in the order in which they would have. That of a gradient also says whether one has come at all, and whether
a loss was no number. A head is not counted among the bytes that a schedule knows of.
"""

from collections.abc import Callable

import torch

from penstock.errors import NonFiniteError
from penstock.ranks.group import Ranks
from penstock.runtime.access import Access
from penstock.schedule.ir.ops import Op
from penstock.tape.elsewhere import Elsewhere, Way
from penstock.tape.handed import Kind
from penstock.tape.tape import Tape

_DIMENSIONS = 8
_HEAD = 3 + 2 * _DIMENSIONS
"""Numbers of a head: 1 if a loss was no number, 1 if a tensor follows, its dimensions, sizes and strides."""
_WAYS: dict[str, Way] = {"A": "output", "D": "gradient", "X": "besides"}


class Crossing:
    """Sends what the tape has put out, and puts what is received where the tape finds it."""

    def __init__(self, access: Access, tape: Tape, ranks: Ranks) -> None:
        self._to = access
        self._tape = tape
        self._ranks = ranks

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
        self._send(self._elsewhere.take(way, k, m), op.peer)
        if way == "output":
            self._elsewhere.drop(k, m)

    def receive(self, op: Op) -> None:
        k, m, way = op.id.stage, op.id.micro_batch, _WAYS[op.id.kind[1]]
        self._elsewhere.put(way, k, m, self._receive(op, self._elsewhere.kind(k, m).dtype))

    def send_besides(self, op: Op) -> None:
        k, m = op.id.stage, op.id.micro_batch
        for number, _ in self._elsewhere.kinds_besides(k, m):
            self._send(self._elsewhere.shared(m, number), op.peer)
        self._elsewhere.require_as_they_were(m, "the model's own code")  # which runs on while this is sent

    def receive_besides(self, op: Op) -> None:
        k, m = op.id.stage, op.id.micro_batch
        for number, kind in self._elsewhere.kinds_besides(k, m):
            received = self._receive(op, kind.dtype)
            assert received is not None
            self._elsewhere.share(m, number, received)

    def _send(self, tensor: torch.Tensor | None, peer: int) -> None:
        failed = self._to.context.failure is not None
        if tensor is None:
            self._ranks.send(torch.tensor([failed] + [0] * (_HEAD - 1)), peer)
            return
        beyond = [0] * (_DIMENSIONS - tensor.dim())
        head = [failed, 1, tensor.dim(), *tensor.shape, *beyond, *tensor.stride(), *beyond]
        self._ranks.send(torch.tensor(head), peer)
        flat = tensor.detach().as_strided((Kind.of(tensor).span,), (1,))
        self._ranks.send(flat.view(torch.uint8), peer)
        self._to.moved += flat.nbytes

    def _receive(self, op: Op, dtype: torch.dtype) -> torch.Tensor | None:
        head = torch.empty(_HEAD, dtype=torch.int64)
        self._ranks.receive(head, op.peer)
        failed, follows, dimensions, *numbers = head.tolist()
        if failed and self._to.context.failure is None:
            self._to.context.failure = NonFiniteError(
                f"step {self._to.context.step}: a loss of rank 0 is infinite or NaN; that rank says which. Nothing was "
                f"updated (found out in stage {op.id.stage})"
            )
        if not follows:
            return None
        shape, stride = numbers[:dimensions], numbers[_DIMENSIONS : _DIMENSIONS + dimensions]
        span = Kind(shape=tuple(shape), stride=tuple(stride), dtype=dtype, requires_grad=False).span
        flat = torch.empty(span, dtype=dtype, device=self._to.arrays.device)
        self._ranks.receive(flat.view(torch.uint8), op.peer)
        self._to.moved += flat.nbytes
        return flat.as_strided(shape, stride)
