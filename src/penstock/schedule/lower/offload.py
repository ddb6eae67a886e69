"""The offload schedules by name: the two families with what may be chosen, and what the literature's systems do.

Each is a ``Placement`` and an order of visits of the one builder.
Bytes per parameter and step, M micro-batches, bf16 weights and Adam, next to what the papers count:

| | ours | theirs |
|---|---|---|
| weights up, horizontal | 2M x 2 of blocks (last block M x 2, first (M + 1) x 2), M x 2 of ends | 2M x 2 |
| weights up, vertical | 2 x 2 of blocks (last block 2), 2 of ends | 2 x 2 |
| fp32 gradients, horizontal | M x 4 down; M - 1 sums on the host | (2M - 1) x 4: the sum so far goes up each time |
| fp32 gradients, vertical | 4 down | 4 down |
| saved activations, M of C bytes | M x C down and M x C up (see below) | 2MC, vertical 3MC: ours are read once |
| gradients of saved activations, vertical | stay on the device, block by block | 2MC |
| all on disk, vertical | 2 + 2 + 12 read (last block 2 + 12), 12 written | 16, 14: their master copy is apart |
| the same with delay ratio a | (2 - a) x 2 + 12 read: new weights go up from the step's own buffer | the same |

On disk, a plan's schedules read 2 less where weights stay in host memory until they are stepped (``kept``).

Several ranks that go micro-batch by micro-batch sum gradients of all ranks' parts, M x 4 down and 4 up, and exchange
them once. ZeRO-Infinity exchanges them M times, and sums its part alone.

What stays on the device between two visits is not moved: see ``stay``. The saved activation between the last block and
the head is used at once and never leaves. That before the last block leaves for all micro-batches but two in the
vertical schedule, and for none in the horizontal one.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil

from penstock.config import Family, Tier
from penstock.config.step import SPLIT, parts_of
from penstock.errors import ConfigError
from penstock.schedule.dealt import programs_of_ranks, stages_dealt
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.fixed import fixed_bytes
from penstock.schedule.lower.request import FamilyRequest
from penstock.schedule.lower.seat import Seat, Sharding, pipeline_world, streaming_seat
from penstock.schedule.lower.visits import lower_step, route_of
from penstock.schedule.mesh import Mesh
from penstock.schedule.place import FP32, Depths, Placement, Settings
from penstock.schedule.program import ALIGN, Program, round_up

_CHUNKS = 16
_MOST_CHUNKS = 64


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """An order of visits and what it chooses where a request says nothing. ``device_share``: of the blocks whose state
    lives on the device. ``sharding``: how several ranks share, if not in a stage of ZeRO. ``dealt``: several ranks are
    a pipeline, to which blocks are dealt out (``dealt``)."""

    order: Family
    weights: Tier = "disk"
    state: Tier = "disk"
    activations: Tier = "host"
    wait: bool = False
    delay: float = 0.0
    device_share: float = 0.0
    sharding: Sharding | None = None
    dealt: bool = False


def lower_program(request: FamilyRequest, streaming: Streaming) -> World:
    """The schedules of one step. Of several ranks all do the same, with an even part of every group's weights and state
    unless another stage of ZeRO is asked for: each brings its part to the device, all gather the whole for each visit,
    and scatter the sum of their gradients, once a step or after each visit. Nothing lives on the device then. One rank
    has nobody to take turns with, and goes horizontally instead.

    Raises:
        ConfigError: an option that is out of range, or micro-batches that cannot be shared evenly.
    """
    s, order = settings(request, streaming), streaming.order
    if streaming.dealt and request.ranks > 1:
        assert request.program is not None
        of_stages = stages_dealt(request.program, request.ranks, family=order)
        seat = streaming_seat(1, pipe=request.ranks)
        programs = programs_of_ranks(request.program, of_stages, request.ranks)
        return pipeline_world([_lower(request, program, s, order, seat) for program in programs])
    seat = streaming_seat(request.ranks, s.stage)
    if streaming.sharding is not None and request.ranks > 1:
        seat = replace(seat, sharding=streaming.sharding)
    alone: Family = "vertical" if order == "vertical" else "horizontal"
    return seat.world(_lower(request, _part(request, streaming), s, alone, seat))


def _lower(request: FamilyRequest, program: Program, s: Settings, order: Family, seat: Seat) -> Schedule:
    """One rank's schedule, with what it holds besides its pools."""
    at_once = route_of(program, s.micro_batches, order).at_once
    fixed = fixed_bytes(program, s.form, s.place, at_once, split=order in SPLIT)
    return lower_step(order, program, s, fixed, request.family, seat)


def settings(request: FamilyRequest, streaming: Streaming) -> Settings:
    """The settings that ``lower_program`` builds from; raises as it does."""
    delay = streaming.delay if request.delay is None else request.delay
    wait = streaming.wait or request.wait
    if request.gradients is not None and not (wait or delay):
        raise ConfigError(f"gradients={request.gradients!r} does nothing: no gradient waits without wait or a delay")
    if request.stage is not None and request.ranks == 1:
        raise ConfigError(
            f"stage={request.stage} says what several ranks have parts of: ask for more than one, or drop it"
        )
    micro_batches, rest = divmod(request.micro_batches, 1 if streaming.dealt else request.ranks)
    if rest:
        raise ConfigError(
            f"{request.family}: {request.micro_batches} micro-batches cannot be shared evenly by {request.ranks} "
            f"ranks: ask for a multiple of {request.ranks}"
        )
    program, activations = _part(request, streaming), request.activations or streaming.activations
    return Settings(
        micro_batches=micro_batches,
        chunk=_chunk(request, program, match=delay > 0 and activations == "host"),
        form=request.form,
        place=_placement(request, program, streaming, activations),
        depths=request.depths or Depths(),
        wait=wait,
        delay=delay,
        stage=3 if request.stage is None else request.stage,
    )


def _part(request: FamilyRequest, streaming: Streaming) -> Program:
    """The part of the program that each rank has; of a pipeline all of it, of which it has some blocks."""
    if request.program is None:
        raise ConfigError(f"{request.family} streams the groups of a program: give it one")
    parts = 1 if streaming.dealt else parts_of(request.stage, request.ranks)
    return Mesh(data=parts).everyone().part(request.program)


def _blocks(program: Program) -> tuple[int, ...]:
    """Groups that calls of blocks read, in the order of the forward."""
    return tuple(dict.fromkeys(g for stage in program.stages if stage.kind == "call" for g in stage.forward_reads))


def _chunk(request: FamilyRequest, program: Program, *, match: bool) -> int:
    """Elements of a chunk. ``match``: delayed gradients and saved activations can take turns in one pool where a buffer
    of the one is as large as one of the other, so a chunk's fp32 gradient is made as large as a saved activation if
    nothing else is asked for and that makes a sensible number of chunks.
    """
    sizes = [group.numel for group in program.groups]
    block = max([sizes[g] for g in _blocks(program)], default=max(sizes))
    if request.chunks is not None and not 1 <= request.chunks <= block // ALIGN:
        raise ConfigError(
            f"chunks={request.chunks} must be from 1 to {block // ALIGN}: a chunk has at least {ALIGN} parameters, and "
            f"the largest block{' of a rank' if request.ranks > 1 else ''} {block}"
        )
    if match and request.chunks is None:
        activation = max(stage.activation for stage in program.stages) // FP32 // ALIGN * ALIGN
        if ALIGN <= activation <= block <= activation * _MOST_CHUNKS:
            return activation
    return max(round_up(-(-block // (request.chunks or _CHUNKS)), ALIGN), ALIGN)


def _placement(request: FamilyRequest, program: Program, family: Streaming, activations: Tier) -> Placement:
    groups, made = program.groups, Counter(g for stage in program.stages for g in stage.gradients)
    weights, state = request.weights or family.weights, request.state or family.state
    pair = f"weights={weights!r} with state={state!r}"
    if state == "device" and weights != "device":
        raise ConfigError(f"{pair} cannot work: state on the device needs weights on the device")
    if state == "device" and (tied := [groups[g].name for g, stages in made.items() if stages > 1]):
        raise ConfigError(
            f"{pair} cannot work for this model: {tied[0]!r} has gradients from several stages, which are added up in "
            "host memory. Give another tier for state, or a model without tied weights"
        )
    if request.ranks > 1 and not family.dealt and "device" in (weights, state):
        raise ConfigError(
            f"ranks={request.ranks} with {pair} cannot work: with several ranks, no weights stay on a device"
        )
    blocks = _blocks(program)
    on_device = ceil(family.device_share * len(blocks)) if request.device_blocks is None else request.device_blocks
    if not 0 <= on_device <= len(blocks):
        raise ConfigError(f"device_blocks={on_device} must be from 0 to {len(blocks)}, the number of blocks")
    # Their gradients come last: nothing of the backward is left that a step on the host could run beside.
    there = blocks[:on_device]
    return Placement(
        weights=(weights,) * len(groups),
        state=tuple("device" if group.index in there else state for group in groups),
        gradients=request.gradients or "host",
        activations=activations,
    )
