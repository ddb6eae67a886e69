"""Micro-batches: checked, measured, and moved to the device."""

import functools
import hashlib
import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.documents.text import parse_json
from penstock.documents.typed import shown
from penstock.engine.labels import IGNORED, unlabelled
from penstock.engine.spans import Beside
from penstock.errors import ConfigError, ModelError
from penstock.ranks.group import ALONE, Ranks
from penstock.tape import trees

MicroBatch = Mapping[str, Any]
Shapes = tuple[tuple[trees.Place, tuple[int, ...], str], ...]
MOST_POSITION = 1 << 16
"""Bytes of JSON that a position in the data may take: every commit writes it."""
MOST_WEIGHT = 1e30
"""The largest weight of a loss: fp32 has room for it with the largest loss scale."""


def _tensors(micro_batch: MicroBatch) -> dict[trees.Place, torch.Tensor]:
    """All tensors of a micro-batch in its order, by name and, in nested containers, place: ``("pixels", 0)``."""
    return {
        (name, *place): tensor for name, value in micro_batch.items() for place, tensor in trees.places(value).items()
    }


def check(micro_batches: Sequence[MicroBatch], *, train: bool) -> None:
    """Raises ModelError for a list that is empty, or whose members are no mappings, differ in their keys, or have
    tensors without values or shapes; or, to ``train`` on, tensors whose gradient would be somebody else's."""
    if isinstance(micro_batches, Mapping) or not isinstance(micro_batches, Sequence):
        raise ModelError(
            f"step() takes a list of micro-batches (mappings of tensors), not {type(micro_batches).__name__}"
        )
    if not micro_batches:
        raise ModelError("step() was given no micro-batches: give a list of at least one mapping of tensors")
    for m, mb in enumerate(micro_batches):
        if not isinstance(mb, Mapping):
            raise ModelError(f"micro-batch {m} is a {type(mb).__name__}: it must be a mapping of names to tensors")
        found = _tensors(mb)
        for place, value in found.items():
            what = ""
            if value.is_meta:
                what = "is on the meta device, without values: give a real tensor"
            elif value.is_nested and value.layout == torch.strided:
                what = "is a nested tensor without shapes that can be asked for: pad it, or give layout=torch.jagged"
            elif train and _trains_others(value):
                what = (
                    "needs a gradient for what is none of the model's: it would get none. Compute it in the model's "
                    "forward, or give it without (.detach())"
                )
            if what:
                raise ModelError(f"micro-batch {m}: {'.'.join(map(str, place))!r} {what}")
        if not any(value.numel() for value in found.values()):
            raise ModelError(f"micro-batch {m} holds no tensor with elements")
        if set(mb) != set(micro_batches[0]):
            extra = sorted(map(repr, set(mb) ^ set(micro_batches[0])))
            raise ModelError(
                f"micro-batch {m} differs from micro-batch 0 in {', '.join(extra)}: all of a step must have the same "
                "entries, so let whoever collates them make these always, such as a mask of ones, or never"
            )


def _trains_others(tensor: torch.Tensor) -> bool:
    """True of a parameter that trains, and of what was computed from such. Other tensors that need a gradient may need
    it for a derivative in the forward."""
    return tensor.requires_grad and (isinstance(tensor, torch.nn.Parameter) or tensor.grad_fn is not None)


def as_json(position: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A copy of a position in the data as it will be read back.

    Raises:
        ConfigError: JSON does not hold it, or it is too large for every commit to have it.
    """
    if position is None:
        return None
    copy = read_back(position, "position", finite=True)
    if copy != position:
        raise ConfigError(f"position={position!r}: JSON would give back {copy!r} instead: use lists and text keys")
    if not isinstance(copy, dict):
        raise ConfigError(f"position={position!r}: must be a mapping, such as {{'document': 3}}")
    return copy


def read_back(value: Any, what: str, *, finite: bool, most: int | None = MOST_POSITION) -> Any:
    """A copy of what every commit is to have, as it is read back from one. ``what``: it is, for messages; ``finite``:
    NaN and infinity are none; ``most``: bytes of JSON that it may take, None: any number.

    Raises:
        ConfigError: JSON does not hold it, it is deeper than what is read back, or it is too large for that.
    """
    try:
        text = json.dumps(value, allow_nan=not finite, ensure_ascii=False)
        nbytes = len(text.encode())  # half of a pair of surrogates can be written, and not read
        if most is None or nbytes <= most:
            return parse_json(text, finite=finite)
    except (TypeError, ValueError, RecursionError) as why:
        raise ConfigError(f"{what}={shown(value)}: a commit holds what JSON holds: {why}. Keep it elsewhere") from None
    raise ConfigError(f"{what}: {nbytes:,} bytes of JSON, and a commit takes {most:,} at most")


LABELS = ("labels", "label")
"""Entries that losses read: what a model is to say is not rounded to what it computes in."""


def _exact(micro_batch: MicroBatch) -> set[str]:
    """Names of entries whose floating-point values keep their precision."""
    return {*LABELS, *(name for value in micro_batch.values() if isinstance(value, Beside) for name in value.exact)}


def to_device(micro_batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Copy tensors to the device, those in nested containers too; floating-point ones (pixels, audio features) in the
    compute dtype, but labels and what only a loss reads in fp32, if they are no narrower; ids, and labels that are
    whole numbers, in a dtype that models can look up by. A forward may write to the copies, so each is handed its own.
    What holds no tensor that ``trees`` sees is handed on as it is: a list that is collected in."""
    exact = _exact(micro_batch)

    def move(tensor: torch.Tensor, name: str) -> torch.Tensor:
        to = _dtype_there(tensor, name, exact, dtype)
        return tensor.to(device=device, dtype=to, non_blocking=True, copy=True)

    # One that a value holds twice is counted and moved once.
    return {
        name: trees.replace(value, functools.cache(functools.partial(move, name=name)), keep=True)
        for name, value in micro_batch.items()
    }


_NO_IDS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64)
"""Dtypes of whole numbers in which torch looks nothing up (``nn.Embedding``)."""


def _whole_there(name: object, dtype: torch.dtype) -> torch.dtype:
    """The dtype on the device of whole numbers: of ids (of tokens, their types, their places) one that embeddings take,
    and of labels the one that losses take, in which -100, that losses leave out, is no other number."""
    if name in LABELS:
        return dtype if dtype == torch.bool else torch.int64
    return torch.int64 if str(name).rpartition("_")[2] == "ids" and dtype in _NO_IDS else dtype


def _is_of_places(name: object) -> bool:
    return str(name).endswith("position_ids")


def _dtype_there(tensor: torch.Tensor, name: object, exact: Container[object], dtype: torch.dtype) -> torch.dtype:
    """The dtype on the device, which computes in ``dtype``, of a tensor of the micro-batch's entry ``name``. Those in
    ``exact`` keep their precision."""
    if not tensor.is_floating_point():
        return _whole_there(name, tensor.dtype)
    return (torch.float32 if tensor.dtype == torch.float64 else tensor.dtype) if name in exact else dtype


def check_not_collected(before: Sequence[tuple[trees.Place, Any, int]]) -> None:
    """Raises ModelError if loss_fn has added tensors to lists of its micro-batch, or put any into containers that held
    none (``trees.to_collect_in``, before it was called): it is handed copies of those that hold tensors, in which they
    are lost.
    """
    for place, container, count in before:
        if len(trees.tensors(container)) > count:
            raise ModelError(
                f"loss_fn puts tensors into {'.'.join(map(str, place))!r} of its micro-batch, where they would be "
                "lost: containers that hold tensors are copied on their way to the device. Collect them in a variable "
                "of its own instead; and where they are for loss_fn itself, let it take a copy first: list(...)"
            )


def all_to_device(
    micro_batches: Sequence[MicroBatch], device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    return [to_device(mb, device, dtype) for mb in micro_batches]


def shapes(micro_batch: MicroBatch) -> Shapes:
    """The properties of a micro-batch that a plan depends on: places, shapes and dtypes of its tensors.

    A mask that hides something is as one with another dimension: models drop masks that hide nothing, and what they
    make of the others takes memory. So are places that begin anew within a row, of which models make a mask that keeps
    documents apart; and so is the way in which the model is asked to compute: by the loss function (``Beside``), and by
    switches among the entries (True, False, None).
    """
    found = sorted(_tensors(micro_batch).items(), key=lambda item: repr(item[0]))
    asked = [
        (name, value.way if isinstance(value, Beside) else repr(value))
        for name, value in micro_batch.items()
        if value is None or isinstance(value, Beside | bool)
    ]
    ways = [((name,), (), way) for name, way in asked if way]
    return (*((place, (*value.shape, *_hides(place, value)), str(value.dtype)) for place, value in found), *ways)


def _hides(place: trees.Place, value: torch.Tensor) -> tuple[int, ...]:
    if value.is_meta or not trees.has_storage(value):
        return ()
    if str(place[-1]).endswith("attention_mask"):
        return (int(not bool(value.all())),)
    if not _is_of_places(place[-1]):
        return ()
    places = value if value.is_floating_point() else value.long()  # small unsigned ones would wrap around
    return (int(value.dim() > 0 and bool((places.diff(dim=-1) != 1).any())),)


def digest(micro_batches: Sequence[MicroBatch], weights: Sequence[float] | None) -> str:
    """A text that is the same for equal micro-batches with equal weights: down to the values of their tensors, but for
    those that are no one piece of memory."""
    found = hashlib.blake2b(digest_size=8)
    for micro_batch in micro_batches:
        for place, tensor in sorted(_tensors(micro_batch).items(), key=lambda item: repr(item[0])):
            found.update(repr((place, tensor.dtype, tuple(tensor.shape))).encode())
            if trees.has_storage(tensor) and not tensor.is_meta:
                found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        others = {name: value for name, value in micro_batch.items() if isinstance(value, str | int | float | bool)}
        found.update(repr(sorted(others.items(), key=repr)).encode())
    found.update(repr(weights).encode())
    return found.hexdigest()


_ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
"""Entries that say where packed documents end, as many numbers as there are of these."""


def handed_alike(planned: Shapes, wanted: Shapes) -> bool:
    """True if blocks are handed the same of two micro-batches, but for the micro-batch's own, of which the second is no
    larger: the number of packed documents, of as many tokens, is another one."""
    return covers(planned, wanted) and all(
        a[1] == b[1] or a[0][-1] in _ENDS for a, b in zip(planned, wanted, strict=True)
    )


def covers(planned: Shapes, wanted: Shapes) -> bool:
    """True if a plan made for one micro-batch has room for another: same tensors, no dimension larger."""
    return len(planned) == len(wanted) and all(
        a[0] == b[0]
        and a[2] == b[2]
        and len(a[1]) == len(b[1])
        and all(x >= y for x, y in zip(a[1], b[1], strict=True))
        for a, b in zip(planned, wanted, strict=True)
    )


def nbytes(micro_batch: MicroBatch, dtype: torch.dtype) -> int:
    """Bytes of a micro-batch on the device: floating-point tensors are there in the compute ``dtype``, but for those
    that keep their own."""
    exact = _exact(micro_batch)
    return sum(
        t.numel() * _dtype_there(t, place[0], exact, dtype).itemsize for place, t in _tensors(micro_batch).items()
    )


_ORDERED: tuple[type, ...] = (Sequence, torch.Tensor, np.ndarray)
"""Kinds of values that have their numbers in an order."""


def given_weights(
    micro_batches: Sequence[MicroBatch], given: Sequence[float] | None = None, ranks: Ranks = ALONE
) -> list[float] | None:
    """Weights of the micro-batches' losses, where the caller gives them; None: labels decide (``engine.labels``).
    ``ranks``: that share the micro-batches of the step.

    Raises:
        ModelError: the weights are not one finite number for each micro-batch, or are too large for fp32; or none are
            given, and a micro-batch has labels of which none counts, so that its mean is undefined.
    """
    if given is not None:
        try:
            ordered = isinstance(given, _ORDERED) and not isinstance(given, bytes)
            weights = [float(weight + 0) for weight in given] if ordered else []  # text has no sum
        except (TypeError, ValueError, RuntimeError, OverflowError):
            weights = []
        if len(weights) != len(micro_batches) or not all(abs(weight) <= MOST_WEIGHT for weight in weights):
            raise ModelError(
                f"loss_weights={given!r} for {len(micro_batches)} micro-batches: give a number for each, of at most "
                f"{MOST_WEIGHT:g}"
            )
        return weights
    for m, mb in enumerate(micro_batches):
        labels = mb.get("labels")
        if (
            isinstance(labels, torch.Tensor)
            and not labels.is_floating_point()
            and bool((labels.long() == IGNORED).all())
        ):
            raise unlabelled(m, ranks, f" (all are {IGNORED})")
    return None


def weighted(weights: Sequence[float], losses: Sequence[float]) -> list[float]:
    """The terms of a step's mean loss that a rank has computed."""
    return [weight * loss for weight, loss in zip(weights, losses, strict=True)]


def mean_loss(terms: Iterable[Sequence[float]]) -> float:
    """The sum of all ranks' ``weighted`` losses, added up as one list whoever has computed them."""
    return math.fsum(term for by_rank in terms for term in by_rank)


def tokens(micro_batch: MicroBatch) -> int:
    """Tokens of a micro-batch for throughput: positions of ``input_ids``, else examples of the first tensor."""
    ids = micro_batch.get("input_ids")
    if isinstance(ids, torch.Tensor):
        return ids.numel()
    first = next(iter(_tensors(micro_batch).values()))
    return int(first.shape[0]) if first.ndim else 1
