"""Small transformers, placements and schedules as plain data: what the tests of planning and running share."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from penstock.config import TIERS, Family, Tier, ZeroStage
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.lower.fixed import Fixed
from penstock.schedule.lower.seat import streaming_seat
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.place import Depths, Format, Placement, Settings
from penstock.schedule.program import ALIGN, GroupSpec, Program, Stage

ACTIVATION = 5000
"""Bytes of a block's outputs for one micro-batch; not a whole number of pages."""


def transformer(
    layers: int, *, tied: bool = False, frozen: bool = False, reader: bool = False, block: int = 12
) -> Program:
    """Embedding, norm, head and ``layers`` blocks of ``block`` x 4096 parameters; ends first, as the tape has them.

    ``tied``: the head is the embedding. ``frozen``: the first block is frozen, the second in part. ``reader``: the
    first block also reads the norm's group without a gradient for it, so its last reader is not who makes its gradient.
    """
    sizes = [("embed", 20, 0), ("small", 1, 0)] + ([] if tied else [("head", 20, 0)])
    ends = len(sizes)
    for i in range(layers):
        kept = block if frozen and i == 0 else 3 if frozen and i == 1 else 0
        sizes.append((f"block{i}", 0 if frozen and i == 0 else block, kept))
    groups = tuple(
        GroupSpec(index=i, name=name, trainable=t * ALIGN, frozen=f * ALIGN) for i, (name, t, f) in enumerate(sizes)
    )

    def stage(index: int, kind: Literal["segment", "call"], reads: tuple[int, ...], back: tuple[int, ...]) -> Stage:
        inner = index <= layers
        return Stage(
            index=index,
            kind=kind,
            name=f"stage{index}",
            forward_reads=reads,
            backward_reads=back,
            gradients=tuple(g for g in (back or reads) if groups[g].trainable and not (inner and index and g < ends)),
            activation=ACTIVATION if inner else 0,
            gradient=ACTIVATION if inner else 0,
            kept=100,
            forward_peak=500,
            backward_peak=900,
            split=3 * ACTIVATION if kind == "call" and index % 3 else None,
            split_peak=3 * ACTIVATION + 900,
            graph=7 * ACTIVATION if kind == "call" and index % 4 != 2 else None,
        )

    stages = [stage(0, "segment", (0,), ())]
    for i in range(layers):
        reads = (1, ends + i) if reader and i == 0 else (ends + i,)
        stages.append(stage(i + 1, "call", reads, reads))
    last = (0, 1) if tied else (1, 2)
    stages.append(stage(layers + 1, "segment", last, last))
    return Program(groups=groups, stages=tuple(stages))


def placement(rng: Random, program: Program, *, tied: bool) -> Placement:
    """Any placement that is possible, another one for each group."""
    below: list[tuple[Tier, Tier]] = [(w, s) for w in TIERS for s in TIERS if s != "device"]
    chosen = [rng.choice(below + ([] if tied and g.index == 0 else [("device", "device")])) for g in program.groups]
    if rng.random() < 0.3:
        chosen = [("disk", "disk")] * len(chosen)
    return Placement(
        weights=tuple(w for w, _ in chosen),
        state=tuple(s for _, s in chosen),
        gradients=rng.choice(("host", "disk")),
        activations=rng.choice(("device", "host", "disk")),
    )


def all_on_disk(program: Program, *, chunk: int, micro_batches: int = 1, **more: Any) -> Settings:
    """Settings of a step in 16 bits that streams all of a program, and waits for no norm unless ``more`` says so."""
    disk: tuple[Tier, ...] = ("disk",) * len(program.groups)
    place = Placement(weights=disk, state=disk, gradients="host", activations="host")
    common = {"form": Format.of("bf16", 2), "depths": Depths(), "wait": False, "place": place}
    return Settings(micro_batches=micro_batches, chunk=chunk, **common | more)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One schedule and what it was built from."""

    program: Program
    settings: Settings
    family: Family
    ranks: int = 1
    hosts: int = 1

    def build(self) -> Schedule:
        fixed: Fixed = (("device", "working", 900),)
        seat = streaming_seat(self.ranks, self.settings.stage, hosts=self.hosts, secondary=self.settings.secondary)
        return lower_step(self.family, self.program, self.settings, fixed, seat=seat)

    def shared_by(self, ranks: int, stage: ZeroStage = 3, hosts: int = 1, *, secondary: bool = False) -> "Case":
        """The case of one of several ranks, whose parts live below the device."""
        place = self.settings.place

        def below(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
            return tuple("host" if tier == "device" else tier for tier in tiers)

        place = replace(place, weights=below(place.weights), state=below(place.state))
        once = not self.settings.train and bool(stage)  # as ``settings_of`` has it
        stage, secondary = 3 if once else stage, secondary and self.settings.train
        settings = replace(self.settings, place=place, stage=stage, secondary=secondary)
        return replace(self, ranks=ranks, hosts=hosts, settings=settings)

    def gradient_bytes(self, schedule: Schedule, tag: str) -> int:
        """The bytes of an element of the chunk ``tag`` ("5.1"), as it crosses in a schedule of this case and waits: in
        fp32 if it comes in several parts."""
        crossings = sum(op.id.startswith(f"DG{tag}@") for op in schedule.lanes["d2h"])
        s = self.settings
        return 2 if (s.grad_dtype, s.cast, crossings) == ("bf16", "device", 1) else 4


def random_case(seed: int, *, largest: int = 4) -> Case:
    """A case drawn from the product of all settings; the same one for the same seed."""
    rng = Random(seed)
    tied = rng.random() < 0.3
    program = transformer(rng.randint(1, largest), tied=tied, frozen=rng.random() < 0.3, reader=rng.random() < 0.3)
    form = Format.of(rng.choice(("fp32", "bf16", "fp16")), rng.randint(0, 2))
    train = rng.random() < 0.85
    depths = Depths(
        weights=rng.randint(1, 3),
        gradients=rng.randint(1, 3),
        stage_in=rng.randint(1, 3),
        stage_out=rng.randint(1, 3),
        state=rng.randint(1, 3),
        activations=rng.randint(1, 3),
        graphs=rng.choice((0, 1, 3, 30)),
    )
    settings = Settings(
        micro_batches=rng.randint(1, largest),
        chunk=rng.choice((1, 5, 20)) * ALIGN,
        form=form,
        place=placement(rng, program, tied=tied),
        depths=depths,
        wait=train and rng.random() < 0.5,
        train=train,
    )
    if settings.wait and rng.random() < 0.4:
        settings = replace(settings, speculate=True)
    family: Family = rng.choice(("vertical", "horizontal")) if train else "vertical"
    if rng.random() < 0.4:
        settings = replace(settings, grad_dtype="bf16", cast=rng.choice(("device", "host")))
    settings = replace(settings, keep=rng.random() < 0.5)
    return Case(program=program, settings=settings, family=family)


def sent_bytes(program: Program, micro_batches: int) -> int:
    """Bytes that ``program``'s rank sends to others in a step, without its part of the norm."""
    dealt = program.dealt
    assert dealt is not None
    total = 0
    for k, stage in enumerate(program.stages[:-1]):
        if dealt.crosses(k):
            total += dealt.has(k) * stage.activation + dealt.has(k + 1) * stage.gradient
    total += (dealt.rank == 0) * sum(dealt.besides)
    return micro_batches * total
