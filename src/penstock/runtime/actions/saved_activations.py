"""Saved activations on their way off the device and back."""

from collections.abc import Callable

import torch

from penstock.errors import ModelError
from penstock.runtime.access import Access
from penstock.runtime.bound import activation_extent
from penstock.runtime.streams import Streams
from penstock.schedule.ir.ops import Op
from penstock.schedule.place import end_to_end
from penstock.tape.tape import Tape


class SavedActivations:
    """Moves what the tape has kept of a stage for a micro-batch: all of its tensors, one behind the other."""

    def __init__(self, access: Access, tape: Tape, streams: Streams) -> None:
        self._to = access
        self._tape = tape
        self._streams = streams

    def kinds(self) -> dict[str, Callable[[Op], None]]:
        return {"DC": self.down, "WC": self.write, "RC": self.read, "UC": self.up}

    def down(self, op: Op) -> None:
        """To host buffers that hold it together; the device's memory is free then."""
        k, m = op.id.stage, op.id.micro_batch
        tensors = self._tape.saved_activations.of(k, m)
        offsets = end_to_end([t.nbytes for t in tensors])
        self._require_room(k, m, offsets[-1] + tensors[-1].nbytes if tensors else 0)
        for tensor, offset in zip(tensors, offsets, strict=True):
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            for piece, first in self._to.pools.pieces(op.writes, offset, data.numel()):
                self._to.copy(piece, data[first : first + piece.numel()])
            self._streams.used_on("d2h", data)
        self._tape.saved_activations.drop(k, m)

    def _require_room(self, k: int, m: int, nbytes: int) -> None:
        """Raises:
        ModelError: a micro-batch of a shape that was planned for hands on more than there is room for.
        """
        stage = self._to.bound.program.stages[k]
        if nbytes > stage.activation:
            raise ModelError(
                f"micro-batch {m}: stage {k} ({stage.name}) puts out {nbytes} bytes, where the one of its shape that "
                f"the plan was made from put out {stage.activation}. The sizes of what blocks are handed must not "
                "depend on the values of the data (on how many tokens a mask hides): keep the padding, or let saved "
                "activations stay on the device, budget.activations='device'"
            )

    def up(self, op: Op) -> None:
        """Back to the tape, in a buffer of the device."""
        k, m = op.id.stage, op.id.micro_batch
        old, buffer = self._tape.saved_activations.of(k, m), self._to.pools.buffer(op.writes[0])
        tensors = []
        for like, offset in zip(old, end_to_end([t.nbytes for t in old]), strict=True):
            data = buffer[offset : offset + like.nbytes]
            for piece, first in self._to.pools.pieces(op.reads, offset, like.nbytes):
                self._to.copy(data[first : first + piece.numel()], piece)
            tensors.append(data.view(like.dtype).view(like.shape))
        self._tape.saved_activations.restore(k, m, tensors)

    def write(self, op: Op) -> None:
        """To disk, in whole pages."""
        self._to.write_scratch(activation_extent(op), 0, self._to.pools.buffer(op.reads[0])[: op.nbytes])

    def read(self, op: Op) -> None:
        """Back from there."""
        self._to.read_scratch(activation_extent(op), 0, self._to.pools.buffer(op.writes[0])[: op.nbytes])
