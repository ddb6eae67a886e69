"""Weights that visit the device one group at a time, for what runs a model outside a plan: the probe and its timing."""

import torch

from penstock.ranks.group import Ranks
from penstock.ranks.share import Share
from penstock.schedule.place import FP32
from penstock.state.arrays import StateArrays
from penstock.state.memory import BOUNCE, DeviceSlab, HostSlab
from penstock.tape.groups import ParamGroup


class VisitingWeights:
    """Attaches and detaches groups on demand. ``close`` detaches what is left and gives all memory back.

    Of several ranks one after the other has its turn. Meanwhile the others ``serve``: they send it their parts of the
    groups that it asks for, if each has a part, until it has ``ended``. Of a pipeline all have their turn at once.
    """

    def __init__(
        self, groups: tuple[ParamGroup, ...], arrays: StateArrays, ranks: Ranks, share: Share, turn: int
    ) -> None:
        self._groups = groups
        self._arrays = arrays
        self._ranks = ranks
        self._share = share
        self._turn = turn
        self._slabs: dict[int, DeviceSlab] = {}
        self._bounce = HostSlab(BOUNCE, beside=arrays.device)

    def load(self, g: int) -> None:
        arrays = self._arrays
        if self._share.size == 1 and self._share.holds(g) and arrays.found_on(g) == "device":
            self._groups[g].attach(arrays.weights(g))
            return
        if self._share.size > 1:
            self._ranks.lend(torch.tensor([g]), self._turn)
        numel, dtype = self._groups[g].spec.numel, arrays.dtype
        self._slabs[g] = DeviceSlab(numel * dtype.itemsize, arrays.device)
        flat = self._slabs[g].bytes[: numel * dtype.itemsize].view(dtype)
        if self._share.holds(g):
            self._bring(g, flat)
        else:
            _stand_in(g, flat)
        self._groups[g].attach(flat)

    def unload(self, g: int) -> None:
        self._groups[g].detach(self._arrays.dtype, self._arrays.device)
        slab = self._slabs.pop(g, None)
        if slab is not None:
            slab.close()

    def serve(self) -> None:
        """Send what the rank whose turn it is asks for, until it has ended."""
        asked = torch.zeros(1, dtype=torch.int64)
        while True:
            self._ranks.lend(asked, self._turn)
            if asked < 0:
                return
            self._bring(int(asked), None)

    def ended(self) -> None:
        """The turn is over."""
        self._ranks.lend(torch.tensor([-1]), self._turn)

    def _bring(self, g: int, flat: torch.Tensor | None) -> None:
        """All ranks' parts of a group's weights, piece by piece, into ``flat`` of the one that asks."""
        name, share = f"weights.{g}", self._share
        group = share.part(self._groups[g].spec)
        for owner in range(share.size):
            for first, piece in self._arrays.pieces(name, self._bounce):
                if owner == share.rank:
                    self._arrays.read(name, first, piece)
                if share.size > 1:
                    self._ranks.lend(piece.view(torch.uint8), owner)
                if flat is not None:
                    frozen = first >= group.trainable
                    before = owner * (group.frozen if frozen else group.trainable)
                    start = before + first + frozen * (share.size - 1) * group.trainable
                    flat[start : start + piece.numel()].copy_(piece)

    def close(self) -> None:
        for g in list(self._slabs):
            self.unload(g)
        self._bounce.close()


def _stand_in(g: int, flat: torch.Tensor) -> None:
    """Fill ``flat`` with small numbers in the place of the weights of a group that another rank of a pipeline has, the
    same on all ranks: weights do not cross for a probe, which looks at shapes and not at values."""
    generator = torch.Generator().manual_seed(g)
    step = BOUNCE // FP32
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        piece.copy_(torch.randn(piece.numel(), generator=generator).mul_(0.02))
