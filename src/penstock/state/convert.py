"""The state of a run with its moments in another form (``optimizer.moments``): read by names, and written anew.

Which group a parameter is in, and where, differs between forms, as does what has one checksum. What holds:

1. Weights, what the master copy has besides them, and buffers are the same bits, parameter by parameter.
2. A moment is widened to fp32, and rounded to the new form, each as a step does it (``docs/numerics.md``). Widening is
   exact: only a narrower form changes numbers, and does so once, since what is rounded is rounded to itself.
3. Padding is zeros, as in state that is new, and rounded with its neighbours where these share a scale with it.
4. All else that a commit or a snapshot says of a run stays as it was; what it says of parameters by their number is
   said of the same ones.
5. A group's arrays are read and written piece by piece: memory has room for a few pieces, whatever the groups are.
"""

from collections.abc import Iterator, Mapping
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, get_args

import torch

from penstock.config import format_size
from penstock.config.optimizer import Moments
from penstock.documents.typed import shown
from penstock.errors import StoreError
from penstock.optim import kernels
from penstock.optim.codes import Codes
from penstock.optim.precision import DTYPES
from penstock.ranks.share import WHOLE, Share
from penstock.schedule.place import SCALED
from penstock.schedule.program import GroupSpec, round_up
from penstock.state.arrays import StateArrays
from penstock.state.layout import Part, parts_of
from penstock.state.memory import BOUNCE, HostSlab
from penstock.state.numa import thread_count
from penstock.state.parts import WholeArrays, form_of, groups_of
from penstock.state.record import NAMES, check_renumbered
from penstock.store.parts import HOLDERS


def has_other_form(found: Mapping[str, Any], model: Mapping[str, Any], where: str) -> bool:
    """True if moments were kept in another form than is asked for now. ``found``, ``model``: what both describe.

    Raises:
        StoreError: in none that there is.
    """
    had = found.get("moments", "fp32")
    if had not in get_args(Moments):
        raise StoreError(f"{where}: moments are kept in {shown(had)}: use the version of penstock that wrote them")
    return bool(had != model.get("moments", "fp32"))


def without_form(model: Mapping[str, Any]) -> dict[str, Any]:
    """A description of state without the form of moments and what follows from it: parameters, in whichever groups,
    with what else is said of the groups of those that are trained."""
    parameters = [
        [name, shape, trained, {key: value for key, value in group.items() if trained and key not in _OF_A_CUT}]
        for group in model["groups"]
        for name, shape, _, trained in group["parameters"]
    ]
    kept = {key: value for key, value in model.items() if key not in ("groups", "moments", HOLDERS)}
    return kept | {"parameters": sorted(parameters, key=itemgetter(0))}


_OF_A_CUT = frozenset({"name", "trainable", "frozen", "compact", "parameters"})
"""The keys of a group whose values differ between forms."""


def in_words(had: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """The form and bytes of moments before and after a conversion, in words."""
    before, after = (format_size(nbytes_of(each, ("moment", "scale"))) for each in (had, model))
    return f"from {had.get('moments', 'fp32')} to {model.get('moments', 'fp32')}, {before} of them to {after}"


def nbytes_of(model: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Bytes of all whole arrays whose names begin with one of these."""
    form, dtype = form_of(model), DTYPES[model["precision"]]
    parts = (part for group in groups_of(model) for part in parts_of(group, form, dtype))
    return sum(part.nbytes for part in parts if part.name.startswith(names))


def renumbered(
    record: Mapping[str, Any], had: Mapping[str, Any], model: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """A commit's or a snapshot's record, which numbers trained parameters in the order of the groups, and names them in
    it, with the numbers and in the order that they have now.

    Raises:
        StoreError: it names one that there is not.
    """
    names, now = _trained(had), {name: number for number, name in enumerate(_trained(model))}
    check_renumbered(record, where, names)
    missed = {str(now[names[int(number)]]): count for number, count in record["missed"].items()}
    groups = [
        {**group, NAMES: sorted(group[NAMES], key=now.__getitem__)} if NAMES in group else group
        for group in record["param_groups"]
    ]
    return {**record, "missed": missed, "param_groups": groups}


def _trained(model: Mapping[str, Any]) -> list[str]:
    return [name for group in model["groups"] for name, _, _, trained in group["parameters"] if trained]


def like_but_for_form(model: Mapping[str, Any]) -> dict[str, Any]:
    """The description that a store is made for, without the form of moments and what follows from it."""
    return {**without_form(model), HOLDERS: _held(model)}


def _held(model: Mapping[str, Any]) -> dict[str, int]:
    """By name the place in a pipeline that has each parameter, in whichever group; where there is one."""
    groups = zip(model["groups"], model.get(HOLDERS, ()), strict=False)
    return {name: holder for group, holder in groups for name, *_ in group["parameters"]}


class _Place(NamedTuple):
    """A parameter's elements in a whole group, and in one of the source."""

    start: int
    stop: int
    group: int
    offset: int


class Conversion:
    """Fills arrays whose moments have another form than the ones that they are filled from."""

    def __init__(self, source: WholeArrays, had: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        """``had``, ``model``: what the ``source`` is described as, and what is to be filled."""
        self._source = source
        self._groups = groups_of(model)
        found = {
            name: (g, offset) for g, group in enumerate(had["groups"]) for name, _, offset, _ in group["parameters"]
        }
        self._places = [
            [_Place(offset, offset + prod(shape), *found[name]) for name, shape, offset, _ in group["parameters"]]
            for group in model["groups"]
        ]
        self._threads = thread_count(torch.device("cpu"))

    def fill(self, arrays: StateArrays, share: Share = WHOLE) -> None:
        """Overwrite all ``arrays``, wherever they are at home, which have this ``share`` of every group that it holds.

        Raises:
            StoreError: a drive failed. Some of the arrays are then as they were.
        """
        with HostSlab(BOUNCE // 2) as bounce, HostSlab(BOUNCE // 2) as values, HostSlab(BOUNCE // 2) as beside:
            for name in arrays.parts:
                arrays.begin(name)
            for name, part in arrays.parts.items():
                kind = name.rpartition(".")[0]
                if kind.startswith("moment"):
                    scales = arrays.parts.get(name.replace("moment", "scale"))
                    self._moment(arrays, part, scales, share, bounce, values, beside)
                elif not kind.startswith("scale"):  # which goes with its moment
                    for start, piece in arrays.pieces(name, bounce.bytes):
                        for g, offset, into in self._found(arrays.groups[part.group], share.number, start, piece):
                            self._source.fetch((f"{kind}.{g}",), offset, into)
                        arrays.write(name, start, piece)
            for name in arrays.parts:
                if arrays.tier_of(name) == "disk":
                    arrays.flip(name)

    def _moment(
        self,
        arrays: StateArrays,
        part: Part,
        scaled: Part | None,
        share: Share,
        bounce: HostSlab,
        wide: HostSlab,
        beside: HostSlab,
    ) -> None:
        """Fill a moment; and its scales, if it has some."""
        kind = part.name.rpartition(".")[0]
        for start, piece in arrays.pieces(part.name, bounce.bytes):
            values = wide.bytes[: piece.numel() * 4].view(torch.float32)
            for g, offset, into in self._found(arrays.groups[part.group], share.number, start, values):
                self._widen(f"{kind}.{g}", offset, into)
            if scaled is None:
                kernels.encode(piece, values, self._threads)
            else:
                own = scaled.own(start, piece.numel())
                scales = beside.bytes[: (own.stop - own.start) * scaled.dtype.itemsize].view(scaled.dtype)
                scales.zero_()
                codes = Codes(codes=piece, scales=scales[: piece.numel() // SCALED])
                kernels.encode(codes, values, self._threads)
                arrays.write(scaled.name, own.start, scales)
            arrays.write(part.name, start, piece)

    def _widen(self, name: str, offset: int, out: torch.Tensor) -> None:
        """Fill ``out`` [n] fp32 with a moment's elements from ``offset`` on of a group of the source."""
        parts, n, scale = self._source.parts, out.numel(), name.replace("moment", "scale")
        dtype = parts[name].dtype
        if scale not in parts:
            if dtype == torch.float32:
                self._source.fetch((name,), offset, out)
            else:
                moment = torch.empty(n, dtype=dtype)
                self._source.fetch((name,), offset, moment)
                kernels.decode(out, moment, self._threads)
            return
        whole = round_up(n, SCALED)  # a parameter ends within a group of codes, and what follows is its padding
        codes = Codes(
            codes=torch.empty(whole, dtype=dtype), scales=torch.empty(whole // SCALED, dtype=parts[scale].dtype)
        )
        self._source.fetch((name,), offset, codes.codes)
        self._source.fetch((scale,), offset, codes.scales)
        values = torch.empty(whole, dtype=torch.float32)
        kernels.decode(values, codes, self._threads)
        out.copy_(values[:n])

    def _found(
        self, own: GroupSpec, number: int, start: int, flat: torch.Tensor
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Parameters' elements among those from ``start`` on of ``own``, the part of this ``number`` of a group, all
        trained or all frozen: the group that has them in the source, the first of them there, and where in ``flat``
        they go. What no parameter has is made zeros."""
        at = number * own.trainable + start
        if start >= own.trainable:
            at = self._groups[own.index].trainable + number * own.frozen + start - own.trainable
        stop = at + flat.numel()
        places = [place for place in self._places[own.index] if place.start < stop and at < place.stop]
        if sum(min(stop, place.stop) - max(at, place.start) for place in places) < flat.numel():
            flat.zero_()
        for place in places:
            first, last = max(at, place.start), min(stop, place.stop)
            yield place.group, place.offset + first - place.start, flat[first - at : last - at]
