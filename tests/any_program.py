"""Programs, placements and settings of any kind, as hypothesis strategies: what a planner must have an answer for.

A program is what the tape could find in some model: any stage may read any group, groups are used by one stage, by
several that do not follow each other, or by all of them, are trained, frozen or both, and are of sizes far apart. What
makes a gradient for a group reads it in its forward; a call's backward computes its forward again, and reads the same.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from hypothesis import strategies as st

from penstock.config import TIERS, Family, Tier
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.lower.route import Route
from penstock.schedule.lower.visits import lower_step, route_of
from penstock.schedule.place import Depths, Format, Placement, Settings
from penstock.schedule.program import ALIGN, GroupSpec, Program, Stage, Whole

SIZES = (0, 1, 2, 5, 12, 20, 40)
"""in units of ALIGN elements"""
BYTES = (0, 1, 100, 5000)


@st.composite
def programs(draw: st.DrawFn, *, stages: int = 9, groups: int = 8) -> Program:
    """Programs of 2 to ``stages`` stages and 1 to ``groups`` groups."""
    count, size = draw(st.integers(1, groups)), draw(st.integers(2, stages))
    specs = []
    for i in range(count):
        trainable = draw(st.sampled_from(SIZES))
        frozen = draw(st.sampled_from(SIZES if not trainable else (0, 0, 1, 12)))
        matrices = trainable and draw(st.integers(0, 2)) == 0
        whole = Whole(flop=draw(st.integers(1, 10**6)), scratch=draw(st.sampled_from(BYTES))) if matrices else None
        sizes = {"trainable": trainable * ALIGN, "frozen": frozen * ALIGN}
        specs.append(
            GroupSpec(index=i, name=f"g{i}", **sizes, compact=trainable > 0 and draw(st.booleans()), whole=whole)
        )
    members = st.sets(st.integers(0, count - 1), max_size=min(count, 4))
    everywhere = draw(st.sets(st.integers(0, count - 1), max_size=2))
    return Program(
        groups=tuple(specs),
        stages=tuple(_stage(draw, k, size, specs, tuple(sorted(draw(members) | everywhere))) for k in range(size)),
    )


def _stage(draw: st.DrawFn, index: int, size: int, groups: list[GroupSpec], reads: tuple[int, ...]) -> Stage:
    ends, last = index in (0, size - 1), index == size - 1
    kind: Literal["segment", "call"] = "segment" if ends or draw(st.integers(0, 3)) == 0 else "call"
    trained = [g for g in reads if groups[g].trainable]
    without = draw(st.sets(st.sampled_from(trained), max_size=2)) if trained and draw(st.booleans()) else set()
    saved = reads if kind == "call" or draw(st.booleans()) else tuple(g for g in reads if draw(st.booleans()))
    activation = 0 if last else draw(st.sampled_from(BYTES))
    return Stage(
        index=index,
        kind=kind,
        name=f"stage{index}",
        forward_reads=reads,
        backward_reads=saved,
        gradients=tuple(g for g in trained if g not in without),
        activation=activation,
        gradient=draw(st.sampled_from((0, activation))),
        kept=draw(st.sampled_from(BYTES)),
        forward_peak=500,
        backward_peak=900,
        graph=draw(st.sampled_from((None, 700, 7000))) if kind == "call" else None,
    )


@dataclass(frozen=True, kw_only=True)
class AnyCase:
    """One schedule and what it is built from."""

    program: Program
    settings: Settings
    family: Family

    @property
    def route(self) -> Route:
        return route_of(self.program, self.settings.micro_batches, self.family, train=self.settings.train)

    def build(self) -> Schedule:
        return lower_step(self.family, self.program, self.settings)


FORMATS = st.builds(
    Format.of,
    st.sampled_from(("fp32", "bf16", "fp16")),
    st.integers(0, 2),
    st.sampled_from(("fp32", "bf16", "int8")),
)


@st.composite
def cases(draw: st.DrawFn) -> AnyCase:
    """Any settings for any program: every family, placement, depth, delay and chunk size."""
    program, form = draw(programs()), draw(FORMATS)
    train = draw(st.integers(0, 9)) > 0
    family: Family = draw(st.sampled_from(("vertical", "horizontal"))) if train else "vertical"
    wait = train and draw(st.booleans())
    settings = Settings(
        micro_batches=draw(st.integers(1, 4)),
        chunk=draw(st.sampled_from((1, 2, 5, 64))) * ALIGN,
        form=form,
        place=draw(placements(program)),
        depths=draw(depths()),
        wait=wait,
        speculate=wait and draw(st.booleans()),
        train=train,
        delay=draw(st.sampled_from((0.0, 0.25, 0.5, 1.0))) if train and family == "vertical" else 0.0,
        grad_dtype=draw(st.sampled_from(("fp32", "bf16"))),
        cast=draw(st.sampled_from(("device", "host"))),
        strands=draw(st.sampled_from((1, 1, 2, 3, 4, 8))) if train else 1,
        stage=draw(st.sampled_from((3, 2, 0))),
        keep=draw(st.booleans()),
    )
    return AnyCase(program=program, settings=settings, family=family)


@st.composite
def depths(draw: st.DrawFn) -> Depths:
    few = st.integers(1, 4)
    return Depths(
        weights=draw(few),
        gradients=draw(few),
        stage_in=draw(few),
        stage_out=draw(few),
        state=draw(few),
        activations=draw(few),
        inputs=draw(st.integers(2, 4)),
        graphs=draw(st.sampled_from((0, 0, 1, 3, 30))),
    )


@st.composite
def placements(draw: st.DrawFn, program: Program) -> Placement:
    """Any placement that is possible: all groups alike, or each somewhere else."""
    made = Counter(g for stage in program.stages for g in stage.gradients)
    anywhere: list[tuple[Tier, Tier]] = [(w, s) for w in TIERS for s in TIERS if s != "device"]
    alike = draw(st.sampled_from((None, None, *anywhere)))
    homes = []
    for group in program.groups:
        own = [("device", "host")] if not group.trainable else [("device", "device")] if made[group.index] < 2 else []
        homes.append(alike or draw(st.sampled_from([*anywhere, *own])))
    return Placement(
        weights=tuple(weights for weights, _ in homes),
        state=tuple(state for _, state in homes),
        gradients=draw(st.sampled_from(("host", "disk"))),
        activations=draw(st.sampled_from(("device", "host", "disk"))),
    )
