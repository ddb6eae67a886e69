"""Memory outside of steps: what each tier holds at most while a model is loaded, probed, placed, saved and resumed.

Everything moves through one bounce buffer, so a phase takes what is resident then, and little more. Counted as the
engine counts: arrays, pools and slabs. Not counted: a model's own parameters where it was not built on the meta device
(they are given up group by group), its persistent buffers, the records beside the packed files (under 1 MiB), and the
libraries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.config import TIERS, Tier, format_size
from penstock.schedule.moving import held_by, move_order
from penstock.schedule.place import BOUNCE, FP32, Format, Placement, checksum_bytes, page_up
from penstock.schedule.program import Program

Phase = Literal["load", "probe", "place", "save", "resume", "close"]
Peaks = dict[Tier, int]


@dataclass(frozen=True, kw_only=True)
class Array:
    """One array of a group: weights, master copy, a moment or scales of one. See ``state.layout``."""

    group: int
    nbytes: int
    state: bool


def arrays(program: Program, form: Format) -> tuple[Array, ...]:
    """The arrays of all groups, as ``state.layout.parts_of`` makes them, in its order."""
    found = []
    for group in program.groups:
        if not group.numel:  # another rank has it
            continue
        found.append(Array(group=group.index, nbytes=group.numel * form.weight_bytes, state=False))
        if group.trainable:
            found += [Array(group=group.index, nbytes=nbytes, state=True) for nbytes in form.array_sizes(group)]
    return tuple(found)


def peaks_outside_steps(
    program: Program,
    form: Format,
    place: Placement,
    *,
    step: Mapping[Tier, int],
    disk: bool,
    host_bytes: int,
    slots: int,
    scratch: int = 0,
    cut: int = 1,
) -> dict[Phase, Peaks]:
    """Bytes that each tier holds at most in each phase outside of steps.

    Args:
        step: the step's own peaks of device and host, pools and resident arrays included (``Plan.device_bytes``,
            ``Plan.host_bytes``). Pools live on between steps.
        disk: whether there is a disk tier; all arrays have their extents there.
        host_bytes: the budget of host memory, which is filled first where there is no disk.
        slots: copies of every array on disk (``Budget.slots``); a snapshot has one. The checksums of all are there too,
            in a store twice.
        scratch: bytes on disk for saved activations and gradients that wait there, from the first step on
            (``Request.scratch_bytes``).
        cut: into how many parts groups are cut, of which the program has one: they are made, and visit the device,
            whole.

    Returns:
        ``load``: a fresh start (``engine.start.fill``, ``_write_group``): a group in fp32, then written to its home.
        The check that everything was filled takes one byte for each element of a parameter; the group's largest is
        taken to be all of it.
        ``probe``: the first step's probe (``engine.probing``): the weights of a stage at a time, all
        saved activations of one micro-batch.
        ``place``: arrays move to their tiers (``state.arrays.StateArrays.settle``); an array is in both places while
        it moves.
        ``save``: ``state.snapshots.save``, between steps. ``disk`` counts the new snapshot, wherever it is written; one
        that it replaces stays until it is complete.
        ``resume``: a snapshot is loaded (``state.snapshots.opened``, which reads and checks all of it, and
        ``restore``), before the first step or between steps. Continuing a store takes less: nothing but what is placed.
        ``close``: memory is written to the store (``state.arrays.StateArrays.to_disk``); pools are gone.
    """
    parts = arrays(program, form)
    sizes = [part.nbytes for part in parts]
    stored = sum(page_up(n) for n in sizes)
    groups = program.groups
    wanted: list[Tier] = [place.state[p.group] if p.state else place.home(groups[p.group]) for p in parts]
    first: list[Tier] = ["disk"] * len(parts) if disk else _start_in_memory(sizes, host_bytes)
    start, final = held_by(sizes, first), held_by(sizes, wanted)
    checksums = 2 * checksum_bytes(groups, form, slots)
    saved = stored + checksum_bytes(groups, form, 1)
    base = {tier: slots * stored + checksums if tier == "disk" and disk else 0 for tier in TIERS}

    def peaks(device: int, host: int, more_disk: int = 0) -> Peaks:
        return {"device": device, "host": host, "disk": base["disk"] + more_disk}

    whole = [cut * g.numel for g in groups]
    filling = max(numel * FP32 + max(BOUNCE, numel) for numel in whole)
    placing, copies = _moving(sizes, first, wanted), dict.fromkeys(TIERS, 0)
    for group in groups:
        if place.copied(group):
            copies[place.weights[group.index]] += group.numel * form.weight_bytes
    placed = {tier: max(placing[tier], final[tier] + copies[tier]) for tier in TIERS}  # copies are made last
    return {
        "load": peaks(start["device"], start["host"] + filling),
        "probe": peaks(start["device"] + _probing(program, form, first, parts, cut), start["host"] + BOUNCE),
        "place": peaks(placed["device"], placed["host"] + (BOUNCE if first != wanted or any(copies.values()) else 0)),
        "save": peaks(step["device"], step["host"] + BOUNCE, saved + scratch),
        "resume": peaks(max(start["device"], step["device"]), max(start["host"], step["host"]) + BOUNCE, scratch),
        "close": peaks(final["device"] + copies["device"], final["host"] + copies["host"] + (BOUNCE if disk else 0)),
    }


def beyond(peaks: Mapping[Phase, Peaks] | Mapping[str, Mapping[Tier, int]], room: Mapping[Tier, int]) -> str | None:
    """The first phase that takes more of a tier than there is room for, in words; None: there is room for all."""
    for phase, sizes in peaks.items():
        for tier, there in room.items():
            if sizes[tier] > there:
                taken = format_size(sizes[tier])
                return f"{phase} takes {taken} of {tier} memory, and the machine has {format_size(there)}"
    return None


def _start_in_memory(sizes: Sequence[int], room: int) -> list[Tier]:
    """The tier on which each array starts without a disk: the host while there is room, else the device (as in
    ``StateArrays``)."""
    tiers: list[Tier] = []
    for nbytes in sizes:
        fits = nbytes <= room
        room -= nbytes * fits
        tiers.append("host" if fits else "device")
    return tiers


def _moving(sizes: Sequence[int], now: Sequence[Tier], wanted: Sequence[Tier]) -> Peaks:
    held = held_by(sizes, now)
    most = dict(held)
    for i in move_order(sizes, now, wanted):
        held[wanted[i]] += sizes[i]
        most[wanted[i]] = max(most[wanted[i]], held[wanted[i]])
        held[now[i]] -= sizes[i]
    return most


def _probing(program: Program, form: Format, first: Sequence[Tier], parts: Sequence[Array], cut: int) -> int:
    """Device bytes of one micro-batch on its way through the model and back, with the weights of a stage at a time."""
    there = {p.group for p, tier in zip(parts, first, strict=True) if not p.state and tier == "device"}

    def weights(groups: Sequence[int]) -> int:
        return cut * sum(program.groups[g].numel * form.weight_bytes for g in groups if g not in there)

    most = alive = 0
    for stage in program.stages:
        gradient = program.stages[stage.index - 1].gradient if stage.index == len(program.stages) - 1 else 0
        alive += stage.activation + stage.kept + gradient
        most = max(most, alive + stage.forward_peak + weights(stage.forward_reads))
    scratch = max((g.whole.scratch for g in program.groups if g.whole), default=0)
    most = max(most, scratch + scratch // 3)  # how fast updates are made orthogonal is measured: with them
    for stage in program.stages[-2::-1]:
        alive -= stage.activation  # its reader is done
        below = program.stages[stage.index - 1].gradient if stage.index else 0
        most = max(most, alive + below + stage.backward_peak + weights(stage.backward_reads))
        alive += below - stage.kept - stage.gradient
    return most
