"""Page-locked host memory through which messages pass between an accelerator and other ranks."""

from collections.abc import Callable, Iterator

import torch

from penstock import accelerator
from penstock.state.memory import HostSlab

_EACH_WAY = 2


class Staging:
    """Two pieces for what is sent, and two for what is received: one is copied while the other crosses. Each way is one
    thread's, on a stream of its own; when a call returns, what it was to do is done.
    """

    def __init__(self, piece: int, device: torch.device) -> None:
        """``piece``: bytes, the same on all ranks: a longer message crosses in so many messages."""
        self._its, self._device = accelerator.of(device), device
        self._slab = HostSlab(2 * _EACH_WAY * piece, beside=device)
        rows = self._slab.bytes[: 2 * _EACH_WAY * piece].view(2, _EACH_WAY, piece)
        self._out, self._in = rows

    def send(self, data: torch.Tensor, send: Callable[[torch.Tensor], None]) -> None:
        """Hand bytes of the device to ``send``, piece by piece."""
        under_way: tuple[torch.Tensor, torch.Event] | None = None
        for piece, staged in _pieces(data, self._out):
            staged.copy_(piece, non_blocking=True)
            came = self._mark()
            if under_way is not None:
                _hand_on(under_way, send)
            under_way = staged, came
        if under_way is not None:
            _hand_on(under_way, send)

    def receive(self, into: torch.Tensor, receive: Callable[[torch.Tensor], None]) -> None:
        """Have ``receive`` fill bytes of the device, piece by piece."""
        left: list[torch.Event] = []
        for piece, staged in _pieces(into, self._in):
            if len(left) == _EACH_WAY:
                left.pop(0).synchronize()
            receive(staged)
            piece.copy_(staged, non_blocking=True)
            left.append(self._mark())
        for copied in left:
            copied.synchronize()

    def _mark(self) -> torch.Event:
        found = self._its.event()
        found.record(self._its.current_stream(self._device))
        return found

    def close(self) -> None:
        """Give the memory back."""
        del self._out, self._in
        self._slab.close()


def _hand_on(staged: tuple[torch.Tensor, torch.Event], send: Callable[[torch.Tensor], None]) -> None:
    piece, came = staged
    came.synchronize()
    send(piece)


def _pieces(data: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(piece, the memory that it passes through) of bytes, by turns through each of some rows."""
    size = rows.shape[1]
    for number, start in enumerate(range(0, data.numel(), size)):
        piece = data[start : start + size]
        yield piece, rows[number % len(rows), : piece.numel()]
