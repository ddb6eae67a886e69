"""Weights that visit the device one group at a time, for what runs a model outside a plan: the probe and its timing."""

from penstock.state.arrays import StateArrays
from penstock.state.memory import BOUNCE, DeviceSlab, HostSlab
from penstock.tape.groups import ParamGroup


class VisitingWeights:
    """Attaches and detaches groups on demand. ``close`` detaches what is left and gives all memory back."""

    def __init__(self, groups: tuple[ParamGroup, ...], arrays: StateArrays) -> None:
        self._groups = groups
        self._arrays = arrays
        self._slabs: dict[int, DeviceSlab] = {}
        self._bounce = HostSlab(BOUNCE, pin=arrays.device.type == "cuda")

    def load(self, g: int) -> None:
        arrays, name = self._arrays, f"weights.{g}"
        if arrays.tier_of(name) == "device":
            self._groups[g].attach(arrays.array(name))
            return
        part = arrays.parts[name]
        self._slabs[g] = DeviceSlab(part.nbytes, arrays.device)
        flat = self._slabs[g].bytes[: part.nbytes].view(part.dtype)
        for first, piece in arrays.pieces(name, self._bounce):
            arrays.read(name, first, piece)
            flat[first : first + piece.numel()].copy_(piece)
        self._groups[g].attach(flat)

    def unload(self, g: int) -> None:
        self._groups[g].detach(self._arrays.dtype, self._arrays.device)
        slab = self._slabs.pop(g, None)
        if slab is not None:
            slab.close()

    def close(self) -> None:
        for g in list(self._slabs):
            self.unload(g)
        self._bounce.close()
