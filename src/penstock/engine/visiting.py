"""Weights that visit the device one group at a time, for what runs a model outside a plan: the probe and its timing."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from penstock.engine.resources import EngineResources
from penstock.schedule.place import FP32
from penstock.state.memory import BOUNCE, DeviceSlab

_NOTHING = -1


class VisitingWeights:
    """Attaches and detaches groups on demand. ``close`` detaches what is left and gives all memory back.

    Where each of several ranks has a part of every group, all of them come to bring one: those that ask for the same
    get it together, and others in turn. They need not ask in the same order, or as often: who needs no more ``ended``.
    """

    def __init__(self, resources: EngineResources) -> None:
        self._groups = resources.groups
        self._arrays = resources.arrays
        self._ranks = resources.ranks.sharing
        self._share = resources.share
        self._slabs: dict[int, DeviceSlab] = {}
        self._attached: set[int] = set()

    @property
    def are_copies(self) -> bool:
        """True if no group is attached where a run has its weights."""
        return not any(map(self._is_there, range(len(self._groups))))

    def _is_there(self, g: int) -> bool:
        """True if a group's weights are on the device as they are."""
        return self._share.size == 1 and self._share.holds(g) and self._arrays.found_on(g) == "device"

    def load(self, g: int) -> None:
        arrays = self._arrays
        self._attached.add(g)  # first: what is broken off half attached is detached
        if self._is_there(g):
            self._groups[g].attach(arrays.weights(g))
            return
        numel, dtype = self._groups[g].spec.numel, arrays.dtype
        self._slabs[g] = DeviceSlab(numel * dtype.itemsize, arrays.device)
        flat = self._slabs[g].bytes[: numel * dtype.itemsize].view(dtype)
        if not self._share.holds(g):
            _stand_in(g, flat)
        elif self._share.size > 1:
            self._meet(g, flat)
        else:
            self._bring(g, flat)
        self._groups[g].attach(flat)

    def unload(self, g: int) -> None:
        self._groups[g].detach(self._arrays.dtype, self._arrays.device)
        self._attached.discard(g)
        slab = self._slabs.pop(g, None)
        if slab is not None:
            slab.close()

    @contextmanager
    def there(self, groups: Iterable[int]) -> Iterator[None]:
        """Within, groups' weights are on the device."""
        wanted = sorted(set(groups))
        try:
            for g in wanted:
                self.load(g)
            yield
        finally:
            for g in wanted:
                self.unload(g)

    def ended(self) -> None:
        """This rank needs no more; those that do are sent its parts. Returns once no rank needs any."""
        if self._share.size > 1:
            while self._meet(_NOTHING, None):
                pass

    def _meet(self, wanted: int, flat: torch.Tensor | None) -> bool:
        """Bring what the ranks want, and this one's into ``flat``; False: none wants anything."""
        asked = {g for g in self._ranks.gather_objects("weights for the probe", wanted) if g != _NOTHING}
        for g in sorted(asked):
            self._bring(g, flat if g == wanted else None)
        return bool(asked)

    def _bring(self, g: int, flat: torch.Tensor | None) -> None:
        """All ranks' parts of a group's weights, piece by piece, into ``flat`` of those that ask."""
        name, share = f"weights.{g}", self._share
        group = share.part(self._groups[g].spec)
        with self._arrays.bounce() as bounce:
            for owner in range(share.size):
                for first, piece in self._arrays.pieces(name, bounce):
                    if owner == share.number:
                        self._arrays.read(name, first, piece)
                    if share.size > 1:
                        self._ranks.lend(piece.view(torch.uint8), owner)
                    if flat is not None:
                        frozen = first >= group.trainable
                        before = owner * (group.frozen if frozen else group.trainable)
                        start = before + first + frozen * (share.size - 1) * group.trainable
                        flat[start : start + piece.numel()].copy_(piece)

    def close(self) -> None:
        """May be called again."""
        for g in self._attached | self._slabs.keys():
            self.unload(g)


def _stand_in(g: int, flat: torch.Tensor) -> None:
    """Fill ``flat`` with small numbers in the place of the weights of a group that another rank of a pipeline has, the
    same on all ranks: weights do not cross for a probe, which looks at shapes and not at values."""
    generator = torch.Generator("cpu").manual_seed(g)
    step = BOUNCE // FP32
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        drawn = torch.randn(piece.numel(), generator=generator, dtype=torch.float32, device="cpu")
        piece.copy_(drawn.mul_(0.02))
