"""Bytes per parameter that a step reads from disk and writes there: by the trace, and by the kernel's count.

    python -m bench.bytes

A Llama of 29M parameters with AdamW or Muon, weights and state on disk, saved activations in memory, and host memory
for the weights of a few blocks, which so stay there from their last read to their step. Nothing is delayed, and no norm
is waited for.
Required of a step:

- by the trace, of each parameter of a block that is loaded twice: in fp32 16 bytes read (weights for the forward and
  for the backward, moments) and 12 written; in bf16, where the state has half of the master copy, 14 and 12; with
  moments in bf16 10 and 8, and in 8 bits 8.125 and 6.125, besides what pads their scales to whole pages; and of a
  matrix that Muon steps 10 and 8, and with momentum in 8 bits 7.0625 and 5.0625;
- what the kernel counts for this process (``/proc/self/io``) is the trace's bytes, and at most 1% more.

Then, with the disk held to 200/100 MB/s, the time of a step in bf16 with each form of AdamW's moments, in turn, planned
for the machine as it is held: with moments in 8 bits at most 0.55 of that with fp32 ones, and each within 10% of what
was predicted.

Said apart: what is loaded once (the last block, whose weights stay on the device for its backward, and the ends), what
small tensors take (a group is padded to 4,096 elements; their moments are fp32 whatever is asked for), and what the
kernel counts beyond the trace: checksums, commits and the file system's own. How busy the machine is changes no byte.
"""

import argparse
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import penstock
from bench import turns
from bench.harness import ROOT, BenchError, block_device, machine, measure_machine, results_file, write_section
from bench.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Tokens, Work, build, disk_bytes
from penstock.config import Precision
from penstock.config.optimizer import Moments, OptimizerSpec
from penstock.schedule.place import PAGE
from penstock.schedule.program import ELEMENTWISE, EXACT
from penstock.tape.groups import ParamGroup

COMMAND = "python -m bench.bytes"
OVERHEAD = 1.01
COMPACT, PREDICTED = 0.55, 0.10
VARIANTS = tuple(turns.Variant(name=moments, moments=moments, same=moments == "fp32") for moments in get_args(Moments))
"""fp32 first, 8 bits last"""
LANES = ("read", "write")
_TWICE, _LAST, _EMBEDDING, _ENDS = "blocks, loaded twice", "last block", "embedding", "norm and head"
_SMALL = "small tensors"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained in, and what is required of a block's parameter: bytes read and written."""

    name: str
    precision: Precision
    required: tuple[float, float]
    moments: Moments = "fp32"
    muon: bool = False

    @property
    def optimizer(self) -> OptimizerSpec:
        rates = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
        adamw = penstock.AdamW(**rates, betas=BETAS, eps=EPS)
        if self.muon:
            return penstock.Muon(**rates, adamw=adamw, adjust_lr_fn="match_rms_adamw", moments=self.moments)
        return replace(adamw, moments=self.moments)

    def is_met(self, each: tuple[float, float], elements: float) -> bool:
        """``elements``: of one group. Scales of each moment may be padded by a page, in each direction."""
        pads = 2 * PAGE / elements if self.moments == "int8" else 0.0
        return all(want <= found <= want + pads for want, found in zip(self.required, each, strict=True))


CASES = (
    Case(name="fp32", precision="fp32", required=(16, 12)),
    Case(name="bf16", precision="bf16", required=(14, 12)),
    Case(name="bf16, moments in bf16", precision="bf16", moments="bf16", required=(10, 8)),
    Case(name="bf16, moments in int8", precision="bf16", moments="int8", required=(8.125, 6.125)),
    Case(name="bf16, Muon", precision="bf16", muon=True, required=(10, 8)),
    Case(name="bf16, Muon in int8", precision="bf16", muon=True, moments="int8", required=(7.0625, 5.0625)),
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Groups that a step treats alike. ``elements``: with padding; ``moved``: bytes read and written by the trace."""

    name: str
    parameters: int
    elements: int
    moved: tuple[int, int]
    groups: int

    @property
    def each(self) -> tuple[float, float]:
        """Bytes read and written for each element."""
        return self.moved[0] / self.elements, self.moved[1] / self.elements


@dataclass(frozen=True, kw_only=True)
class Found:
    """One step. ``kernel``: bytes read and written as the kernel counts them; ``again``: what would be read if weights
    did not stay in host memory, by the schedule."""

    case: Case
    parts: Sequence[Part]
    kernel: tuple[int, int]
    again: int

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes read and written by the trace."""
        return sum(part.moved[0] for part in self.parts), sum(part.moved[1] for part in self.parts)

    def missed(self) -> list[str]:
        """What is required and not the case, in words."""
        found = [
            f"{self.case.name}, {part.name}: {part.each[0]:g} and {part.each[1]:g} bytes, not "
            f"{self.case.required[0]} and {self.case.required[1]}"
            for part in self.parts
            if part.name == _TWICE and not self.case.is_met(part.each, part.elements / part.groups)
        ]
        for lane, traced, kernel in zip(LANES, self.moved, self.kernel, strict=True):
            if not 1 <= kernel / traced <= OVERHEAD:
                found.append(f"{self.case.name}: the kernel counts {kernel:,} bytes {lane}, and the trace {traced:,}")
        return found


def measure(case: Case, model: str, folder: Path) -> Found:
    """The second step of a model: the first one plans, and finds what loading has left in memory."""
    store = folder / case.name.replace(", ", "-").replace(" ", "-")
    store.mkdir()
    work = Work(model=model, micro_batches=2, batch=1, length=16, steps=2, threads=1, scratch=str(folder))
    tokens = Tokens(work)
    with penstock.wrap(
        build(model),
        optimizer=case.optimizer,
        budget=penstock.Budget(
            device="1GiB", host="1GiB", disk=store, weights="disk", state="disk", activations="device"
        ),
        precision=case.precision,
        clip_grad_norm=None,
        delay=0.0,
        device="cpu",
        plan=None,
    ) as engine:
        engine.step(tokens.step(0))
        before = disk_bytes()
        engine.step(tokens.step(1))
        kernel = tuple(after - b for after, b in zip(disk_bytes(), before, strict=True))
        request = engine.inside.planning.request
        without = request.build(replace(engine.plan.settings, keep=False))
        found = Found(
            case=case,
            parts=_parts(engine, engine.inside.resources.groups),
            kernel=(kernel[0], kernel[1]),
            again=without.bytes_per_lane()["read"],
        )
    shutil.rmtree(store)
    return found


def _parts(engine: penstock.Engine, groups: Sequence[ParamGroup]) -> list[Part]:
    """What the last step has moved, for groups that it treats alike."""
    ops, program = engine.plan.schedule.by_id, engine.plan.program
    moved: dict[str, Counter[int]] = {lane: Counter() for lane in LANES}
    for event in engine.trace:
        if event.lane in LANES:
            moved[event.lane][ops[event.op].id.group] += event.bytes
    small = [group.spec.index for group in groups if group.spec.name.endswith((EXACT, ELEMENTWISE))]
    blocks = [g.spec.index for g in groups if g.spec.name.startswith("blocks.") and g.spec.index not in small]
    named = {group.spec.index: _ENDS for group in groups} | dict.fromkeys(blocks, _TWICE)
    named |= {blocks[-1]: _LAST} | dict.fromkeys(program.stages[0].forward_reads, _EMBEDDING)
    named |= dict.fromkeys(small, _SMALL)
    return [
        Part(
            name=name,
            parameters=sum(s.numel for group in members for s in group.slices),
            elements=sum(group.spec.numel for group in members),
            moved=(
                sum(moved["read"][group.spec.index] for group in members),
                sum(moved["write"][group.spec.index] for group in members),
            ),
            groups=len(members),
        )
        for name in (_TWICE, _LAST, _EMBEDDING, _ENDS, _SMALL)
        if (members := [group for group in groups if named[group.spec.index] == name])
    ]


def table(found: Sequence[Found]) -> str:
    lines = [
        "| kept in | what | parameters | padding | read, bytes each | written | required |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        for part in one.parts:
            required = " + ".join(map(str, one.case.required)) if part.name == _TWICE else ""
            padding = f"{part.elements / part.parameters - 1:.3%}"
            cells = (
                one.case.name,
                part.name,
                f"{part.parameters:,}",
                padding,
                *(f"{n:g}" for n in part.each),
                required,
            )
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| kept in | lane | trace | of each parameter | kernel | checksums, commit | read if weights did not stay |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        for lane, traced, kernel in zip(LANES, one.moved, one.kernel, strict=True):
            again = f"{one.again:,} ({one.again / one.parameters:.2f} each)" if lane == "read" else ""
            of_each = f"{traced / one.parameters:.2f}"
            more = f"{kernel - traced:,} ({kernel / traced - 1:.2%})"
            cells = (one.case.name, lane, f"{traced:,}", of_each, f"{kernel:,}", more, again)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _counted(arguments: argparse.Namespace) -> Iterator[str]:
    """The first part; what is required and not the case."""
    with TemporaryDirectory(dir=arguments.scratch) as folder:
        found = [measure(case, arguments.model, Path(folder)) for case in CASES]
    print(table(found))
    if not arguments.no_record:
        note = f"`{COMMAND}`: {arguments.model}, all on disk, 2 micro-batches of 1x16 tokens; {machine()}"
        path = write_section("bytes", f"{note}\n\n{table(found)}", results_file())
        print(f"written to {path.relative_to(ROOT)}")
    for one in found:
        yield from one.missed()


def held(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The times of steps on a disk that is held to a rate: a section, and what is required and not the case."""
    with turns.disk(arguments) as (folder, group):
        profile = str(measure_machine(folder, group))
        work = turns.work(arguments, folder, micro_batches=2, batch=1, length=64)
        job = turns.Job(work=work, variants=VARIANTS, profile=profile, host="256MiB", precision="bf16")
        measured = turns.measure(job, group)
    rows, missed = [], []
    for variant in VARIANTS:
        plan = measured.plans[variant.name]
        assert plan.predicted is not None
        busiest, error = (
            max(plan.work, key=lambda lane: plan.work[lane]),
            plan.predicted / measured.seconds(variant.name) - 1,
        )
        ratio = measured.ratio(variant.name, VARIANTS[0].name)
        predicted = f"{plan.predicted:.3f} s ({error:+.1%})"
        cells = (measured.spread(variant.name), predicted, f"{plan.lower_bound:.3f} s ({busiest})", f"{ratio:.3f}")
        rows.append((variant.name, *cells))
        if abs(error) > PREDICTED:
            missed.append(f"{variant.name}: {error:+.1%} predicted, not within {PREDICTED:.0%}")
    compact = measured.ratio(VARIANTS[-1].name, VARIANTS[0].name)
    if compact > COMPACT:
        missed.append(f"{VARIANTS[-1].name}: {compact:.3f} of the time of {VARIANTS[0].name}, not {COMPACT}")
    header = ("moments", "step: median (fastest to slowest)", "predicted", "lower bound", "of fp32's time")
    said = f"`{COMMAND}`, the disk held: {turns.size(measured)}; {turns.setting(measured, arguments)}"
    verdict = turns.verdict("Moments in 8 bits, of the time of fp32 ones", compact, COMPACT)
    return f"{said}\n\n{turns.table(header, rows)}\n\n{verdict}", missed


def main(words: Sequence[str] | None = None) -> int:
    parser = turns.parser(__doc__, rounds=8)
    parser.add_argument("--part", choices=("bytes", "held"), help="only one of the two")
    arguments = parser.parse_args(words)
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    try:
        block_device(arguments.scratch)  # elsewhere the kernel counts nothing
        missed = [*_counted(arguments)] if arguments.part != "held" else []
        if arguments.part != "bytes":
            text, more = held(arguments)
            turns.record("bytes, disk held", text, arguments)
            missed += more
    except BenchError as error:
        print(f"bench.bytes: {error}", file=sys.stderr)
        return 2
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
