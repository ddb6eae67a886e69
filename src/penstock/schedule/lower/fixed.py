"""Bytes that a step holds all the time besides its pools."""

from penstock.config import Tier
from penstock.schedule.place import BF16, Format, Placement
from penstock.schedule.program import Program

Fixed = tuple[tuple[Tier, str, int], ...]
"""(tier, what, bytes) that a step holds all the time besides its pools."""


def fixed_bytes(
    program: Program,
    form: Format,
    place: Placement,
    at_once: int,
    *,
    inputs: int = 0,
    step_temporaries: int = 0,
    messages: int = 0,
    train: bool = True,
    split: bool = False,
) -> Fixed:
    """Bytes that a step holds all the time besides its pools.

    ``at_once``: micro-batches that are under way at the same time. ``inputs``: bytes of all micro-batches on the
    device. ``step_temporaries``: bytes that the optimizer needs there besides the state, if any state is there; updates
    of matrices are added to it, and what it takes to make them orthogonal to what stages work with. ``messages``: bytes
    of host memory that messages of a pipeline pass through. ``train``: whether anything is stepped; ``split``:
    backwards are run in two parts.
    """
    tiers: tuple[Tier, ...] = ("device", "host")
    groups = program.groups
    weights = {t: sum(g.numel for g in groups if t in (place.weights[g.index], place.home(g))) for t in tiers}
    state = {t: sum(form.state_bytes(g) for g in groups if place.state[g.index] == t) for t in tiers}
    on_device = [g for g in groups if g.trainable and place.state[g.index] == "device"]
    updates = max((g.trainable * BF16 for g in on_device if g.whole), default=0)
    orthogonal = max((g.whole.scratch for g in groups if g.whole), default=0) if train else 0
    return (
        ("device", "inputs", inputs),
        ("device", "working", max(*(stage.peak(split=split) for stage in program.stages), orthogonal)),
        ("device", "kept", at_once * sum(s.kept for s in program.stages)),
        ("device", "optimizer", step_temporaries + updates if on_device else 0),
        ("device", "weights", weights["device"] * form.weight_bytes),
        ("device", "state", state["device"]),
        ("host", "weights", weights["host"] * form.weight_bytes),
        ("host", "state", state["host"]),
        ("host", "messages", messages),
    )
