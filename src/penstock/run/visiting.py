"""Weights that visit the device one group at a time, for what runs a model outside a plan: the probe and its timing."""

from penstock.run.memory import BOUNCE, DeviceSlab, HostSlab
from penstock.run.residence import Residence
from penstock.tape.groups import ParamGroup


class VisitingWeights:
    """Attaches and detaches groups on demand. ``close`` detaches what is left and gives all memory back."""

    def __init__(self, groups: tuple[ParamGroup, ...], residence: Residence) -> None:
        self._groups = groups
        self._residence = residence
        self._slabs: dict[int, DeviceSlab] = {}
        self._bounce = HostSlab(BOUNCE, pin=residence.device.type == "cuda")

    def load(self, g: int) -> None:
        residence, name = self._residence, f"weights.{g}"
        if residence.tier_of(name) == "device":
            self._groups[g].attach(residence.array(name))
            return
        part = residence.parts[name]
        self._slabs[g] = DeviceSlab(part.nbytes, residence.device)
        flat = self._slabs[g].bytes[: part.nbytes].view(part.dtype)
        for first, piece in residence.pieces(name, self._bounce):
            residence.read(name, first, piece)
            flat[first : first + piece.numel()].copy_(piece)
        self._groups[g].attach(flat)

    def unload(self, g: int) -> None:
        self._groups[g].detach(self._residence.dtype, self._residence.device)
        slab = self._slabs.pop(g, None)
        if slab is not None:
            slab.close()

    def close(self) -> None:
        for g in list(self._slabs):
            self.unload(g)
        self._bounce.close()
