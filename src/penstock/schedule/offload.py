"""The offload schedules by name: the two families with what may be chosen, and what the literature's systems do.

Each is a ``Placement`` and an order of visits of the one builder; ``FAMILIES`` says what of a ``Request`` they take.
Bytes per parameter and step, M micro-batches, bf16 weights and Adam, next to what the papers count:

| | ours | theirs |
|---|---|---|
| weights up, horizontal | 2M x 2 of blocks (last block M x 2, first (M + 1) x 2), M x 2 of ends | 2M x 2 |
| weights up, vertical | 2 x 2 of blocks (last block 2), 2 of ends | 2 x 2 |
| fp32 gradients, horizontal | M x 4 down; M - 1 sums on the host | (2M - 1) x 4: the sum so far goes up each time |
| fp32 gradients, vertical | 4 down | 4 down |
| checkpoints of M micro-batches, C each | M x C down and M x C up (see below) | 2MC, vertical 3MC: ours are read once |
| gradients of checkpoints, vertical | stay on the device, block by block | 2MC |
| all on disk, vertical | 2 + 2 + 12 read (last block 2 + 12), 12 + 2 written | the same |
| the same with delay ratio a | (2 - a) x 2 + 12 read: new weights go up from the step's own buffer | the same |

What stays on the device between two visits is not moved: see ``stay``. The checkpoint between the last block and the
head is used at once and never leaves. That before the last block leaves for all micro-batches but two in the vertical
schedule, and for none in the horizontal one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from penstock.config import Tier
from penstock.errors import ConfigError
from penstock.schedule.build import EVERYONE
from penstock.schedule.horizontal import horizontal
from penstock.schedule.ir.worlds import World
from penstock.schedule.place import FP32, Depths, Format, Placement, Settings, part_of
from penstock.schedule.program import ALIGN, Program, round_up
from penstock.schedule.provision import fixed_bytes
from penstock.schedule.vertical import vertical

_PLACES = ("weights", "state", "checkpoints", "gradients")
_CHUNKS = 16
_MOST_CHUNKS = 64


@dataclass(frozen=True, kw_only=True)
class Family:
    """An order of visits and what it chooses where a request says nothing; ``options``: what a request may say."""

    description: str
    order: Literal["vertical", "horizontal"]
    weights: Tier
    state: Tier
    checkpoints: Tier
    wait: bool
    delay: float = 0.0
    device_share: float = 0.0
    """of the blocks whose state lives on the device"""
    options: tuple[str, ...] = ("chunks", "depths")


FAMILIES: Mapping[str, Family] = {
    "horizontal": Family(
        description="each micro-batch through all blocks before the next; gradients are summed in host memory",
        order="horizontal",
        weights="disk",
        state="disk",
        checkpoints="host",
        wait=False,
        options=("chunks", "depths", "wait", "ranks", *_PLACES),
    ),
    "vertical": Family(
        description="all micro-batches through a block before the next; a share of the steps (delay) in the next "
        "step's forward",
        order="vertical",
        weights="disk",
        state="disk",
        checkpoints="host",
        wait=False,
        options=("chunks", "depths", "wait", "delay", "ranks", *_PLACES),
    ),
    "zero-offload": Family(
        description="weights on the device, state in host memory; gradients go down as they are made, the CPU steps "
        "after the global norm (Ren et al., arXiv 2101.06840)",
        order="horizontal",
        weights="device",
        state="host",
        checkpoints="device",
        wait=True,
    ),
    "zero-infinity": Family(
        description="weights and state on disk, checkpoints in host memory, micro-batch by micro-batch, steps after "
        "the global norm (Rajbhandari et al., arXiv 2104.07857)",
        order="horizontal",
        weights="disk",
        state="disk",
        checkpoints="host",
        wait=True,
        options=("chunks", "depths", "ranks"),
    ),
    "superoffload": Family(
        description="zero-offload that does not wait for the norm (a step that should not have been is taken back), "
        "with the state of the blocks whose gradients come last on the device (Lian et al., arXiv 2509.21271)",
        order="horizontal",
        weights="device",
        state="host",
        checkpoints="device",
        wait=False,
        device_share=0.125,
        options=("chunks", "depths", "device_blocks"),
    ),
    "greedysnake": Family(
        description="vertical with everything on disk, steps beside the backward, half of them in the next step's "
        "forward (Yue et al., arXiv 2512.17570)",
        order="vertical",
        weights="disk",
        state="disk",
        checkpoints="host",
        wait=False,
        delay=0.5,
        options=("chunks", "depths", "delay", "ranks"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be built. None: what the family does.

    ``chunks``: pieces that a block is cut into. ``delay``: the delay ratio, 0 to 1. ``wait``: whether the optimizer
    waits for the global norm of the gradients. ``weights``, ``state``, ``checkpoints``, ``gradients`` (that wait): the
    tier of all of them. ``device_blocks``: blocks whose state lives on the device, those whose gradients come last.
    ``ranks``: data-parallel ranks, each with its own ``micro_batches``, and with its part of weights and state.
    """

    family: str
    program: Program
    micro_batches: int
    form: Format = field(default_factory=lambda: Format(weight_bytes=2, moments=2))
    depths: Depths | None = None
    chunks: int | None = None
    delay: float | None = None
    wait: bool | None = None
    weights: Tier | None = None
    state: Tier | None = None
    checkpoints: Tier | None = None
    gradients: Literal["host", "disk"] | None = None
    device_blocks: int | None = None
    ranks: int | None = None

    @property
    def blocks(self) -> tuple[int, ...]:
        """Groups that calls of blocks read, in the order of the forward."""
        calls = (stage for stage in self.program.stages if stage.kind == "call")
        return tuple(dict.fromkeys(g for stage in calls for g in stage.forward_reads))


def build(request: Request) -> World:
    """The schedules of one step in the steady state. All ranks do the same.

    Raises:
        ConfigError: no such family, or an option that it does not have or that is out of range.
    """
    s = settings(request)
    family = FAMILIES[request.family]
    builder = vertical if family.order == "vertical" else horizontal
    at_once = request.micro_batches if family.order == "vertical" else 1
    fixed = fixed_bytes(request.program, s.form, s.place, at_once, ranks=s.ranks)
    schedule = builder(request.program, s, fixed, request.family)
    groups = {EVERYONE: tuple(range(s.ranks))} if s.ranks > 1 else {}
    return World(name=request.family, ranks=(schedule,) * s.ranks, groups=groups)


def settings(request: Request) -> Settings:
    """What ``build`` builds from; raises as it does."""
    family = _family(request)
    delay = family.delay if request.delay is None else request.delay
    wait = family.wait if request.wait is None else request.wait
    if request.gradients is not None and not (wait or delay):
        raise ConfigError(f"gradients={request.gradients!r} does nothing: no gradient waits without wait or a delay")
    checkpoints = request.checkpoints or family.checkpoints
    return Settings(
        micro_batches=request.micro_batches,
        chunk=_chunk(request, match=delay > 0 and checkpoints == "host"),
        form=request.form,
        place=_placement(request, family, checkpoints),
        depths=request.depths or Depths(),
        wait=wait,
        delay=delay,
        ranks=request.ranks or 1,
    )


def _family(request: Request) -> Family:
    name = request.family
    if name not in FAMILIES:
        raise ConfigError(f"no offload schedule is called {name!r}. Known: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    options = ("chunks", "depths", "delay", "wait", "device_blocks", "ranks", *_PLACES)
    for option in options:
        if getattr(request, option) is not None and option not in family.options:
            raise ConfigError(f"{name} has no option {option}: it has {', '.join(family.options)}")
    if request.micro_batches < 1:
        raise ConfigError(f"micro_batches={request.micro_batches} must be at least 1")
    if request.ranks is not None and request.ranks < 1:
        raise ConfigError(f"ranks={request.ranks} must be at least 1")
    if request.delay is not None and not 0 <= request.delay <= 1:
        raise ConfigError(f"delay={request.delay} must be from 0 (every step in its own backward) to 1")
    return family


def _chunk(request: Request, *, match: bool) -> int:
    """Elements of a chunk. ``match``: delayed gradients and checkpoints can take turns in one pool where a buffer of
    the one is as large as one of the other, so a chunk's fp32 gradient is made as large as a checkpoint if nothing else
    is asked for and that makes a sensible number of chunks.
    """
    parts = [part_of(group, request.ranks or 1) for group in request.program.groups]
    block = max([parts[g].numel for g in request.blocks], default=max(part.numel for part in parts))
    if request.chunks is not None and not 1 <= request.chunks <= block // ALIGN:
        raise ConfigError(
            f"chunks={request.chunks} must be from 1 to {block // ALIGN}: a chunk has at least {ALIGN} parameters, and "
            f"the largest block{' of a rank' if request.ranks else ''} {block}"
        )
    wanted = round_up(-(-block // (request.chunks or _CHUNKS)), ALIGN)
    if match and request.chunks is None:
        checkpoint = max(stage.checkpoint for stage in request.program.stages) // FP32 // ALIGN * ALIGN
        if block <= checkpoint * _MOST_CHUNKS and checkpoint <= block:
            wanted = checkpoint
    return max(wanted, ALIGN)


def _placement(request: Request, family: Family, checkpoints: Tier) -> Placement:
    groups = request.program.groups
    weights, state = request.weights or family.weights, request.state or family.state
    pair = f"weights={weights!r} with state={state!r}"
    if state == "device" and weights != "device":
        raise ConfigError(f"{pair} cannot work: state on the device needs weights on the device")
    if not request.form.split and weights == "device" and state != "device":
        raise ConfigError(
            f"{request.family}: {pair} cannot work in fp32, where the master copy is the weights: use bf16"
        )
    if (request.ranks or 1) > 1 and "device" in (weights, state):
        raise ConfigError(
            f"ranks={request.ranks} with {pair} cannot work: with several ranks, no weights stay on a device"
        )
    states = [state] * len(groups)
    for g in _on_device(request, family):
        states[g] = "device"
    return Placement(
        weights=(weights,) * len(groups),
        state=tuple(states),
        gradients=request.gradients or "host",
        checkpoints=checkpoints,
    )


def _on_device(request: Request, family: Family) -> tuple[int, ...]:
    """Blocks whose state lives on the device though the others' does not. Their gradients come last: nothing of the
    backward is left that a step on the host could run beside.
    """
    count = request.device_blocks
    if count is None:
        count = ceil(family.device_share * len(request.blocks))
    if not 0 <= count <= len(request.blocks):
        raise ConfigError(f"device_blocks={count} must be from 0 to {len(request.blocks)}, the number of blocks")
    return request.blocks[:count]
