"""A small machine, and questions to a planner about small programs on it."""

from dataclasses import replace
from random import Random
from typing import Any

from penstock.config import Budget, Family
from penstock.hardware.machine import Device, Drive, Host, Machine, at_pace
from penstock.planner import search as searching
from penstock.planner.bounds import Load
from penstock.planner.question import Question
from penstock.planner.request import Request
from penstock.planner.search import Choice, search
from penstock.schedule.ir.lanes import STREAM_LANES
from penstock.schedule.place import Format
from penstock.schedule.program import Program
from penstock.shape.model import EFFICIENCY, StageTimes
from tests.programs import Case, transformer

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 1024,
}
"""The configuration of a small model, as Hugging Face has it."""

DRIVE = Drive(path="/disk", read=2e7, write=1e7, read_both=1.5e7, write_both=0.9e7, free=1 << 40, tbw=100)
RATES = {"adamw.fp32": 3e6, "adamw.bf16": 3e6}
MACHINE = Machine(
    name="small",
    host=Host(cores=2, memory=1 << 30, lockable=1 << 30, copy=1e8, optimizer=RATES),
    device=Device(
        name="none",
        kind="cpu",
        memory=1 << 30,
        flops=dict.fromkeys(("fp32", "bf16"), 7e8 / EFFICIENCY["cpu"]),
        copy=1e15,  # so that stages take what their products take, at 0.7 GFLOP/s
        h2d=2e8,
        d2h=1e8,
        h2d_both=1.5e8,
        d2h_both=1e8,
    ),
    drives=(DRIVE,),
    overhead=1e-4,
    interpreter=2e-5,
)


def times_for(program: Program) -> StageTimes:
    """Every block takes the same."""
    n = len(program.stages)
    return StageTimes(forward=(0.01,) * n, backward=(0.02,) * n)


def plain(asked: Question) -> Question:
    """A question in the request's own family, with all else as it is where nothing is said."""
    request = asked.request
    return Question(
        request=request,
        machine=asked.machine,
        times=asked.times,
        optimizer=asked.optimizer,
        families=(request.family,),
    )


def question(
    program: Program,
    *,
    form: Format,
    wait: bool = False,
    device: int = 1 << 40,
    host: int = 1 << 40,
    micro_batches: int = 3,
    family: Family = "vertical",
    machine: Machine = MACHINE,
    disk_free: int | None = None,
) -> Question:
    """A question about a program on a small machine."""
    request = Request(
        program=program,
        budget=Budget(device=device, host=host, disk="store"),
        form=form,
        micro_batches=micro_batches,
        wait=wait,
        speculate=False,
        delay=0.0,
        family=family,
        inputs=4096,
    )
    return Question(
        request=request,
        machine=machine,
        times=times_for(program),
        optimizer="adamw.fp32" if form.weight_bytes == 4 else "adamw.bf16",
        families=(family,),
        disk_free=disk_free,
    )


def drawn_question(seed: int) -> Question:
    """A question about a small program, whose tiers have room for a part of it, on a machine on which anything may be
    what bounds a step; the same one for the same seed."""
    rng = Random(seed)
    program = transformer(rng.randint(2, 6), block=rng.choice((8, 16, 32, 64)))
    form = Format.of(rng.choice(("fp32", "bf16")), 2)
    parameters = sum(group.numel for group in program.groups)
    drive, link, steps, compute = (10 ** rng.uniform(-0.7, 0.7) for _ in range(4))
    machine = replace(
        MACHINE,
        drives=(at_pace(DRIVE, read=drive, read_both=drive, write=drive, write_both=drive),),
        device=at_pace(MACHINE.device, h2d=link, h2d_both=link, d2h=link, d2h_both=link),
        host=at_pace(MACHINE.host, optimizer=steps),
    )
    asked = question(
        program,
        form=form,
        wait=rng.random() < 0.5,
        device=int(4 * parameters * rng.uniform(0.2, 1.0)) + (2 << 20),
        host=int(12 * parameters * rng.uniform(0.2, 1.0)) + (2 << 20),
        micro_batches=rng.randint(1, 6),
        machine=machine,
    )
    times = asked.times
    return replace(
        asked,
        times=replace(
            times,
            forward=tuple(compute * seconds for seconds in times.forward),
            backward=tuple(compute * seconds for seconds in times.backward),
        ),
    )


_ANSWERS: dict[str, Choice] = {}


def searched(asked: Question) -> Choice:
    """The search's answer to a question, which is the same each time (``test_search`` holds it to that)."""
    key = repr((asked, asked.request.program.groups, asked.request.program.stages, searching.SIMULATIONS))
    if key not in _ANSWERS:
        _ANSWERS[key] = search(asked)
    return _ANSWERS[key]


def request_of(case: Case) -> Request:
    """A request with a case's program and settings, and memory for any placement."""
    s = case.settings
    return Request(
        program=case.program,
        budget=Budget(device=1 << 40, host=1 << 40, disk="store"),
        form=s.form,
        micro_batches=s.micro_batches,
        wait=s.wait,
        speculate=s.speculate,
        delay=s.delay,
        grad_dtype=s.grad_dtype,
        cast=s.cast,
        train=s.train,
        family="horizontal" if case.family == "horizontal" else "vertical",
        ranks=case.ranks,
        stage=s.stage,
        hosts=case.hosts,
        secondary=s.secondary,
    )


def by_lane(load: Load) -> dict[str, float]:
    """Seconds of each lane over all phases."""
    return dict(zip(STREAM_LANES, load.sum(axis=0).tolist(), strict=True))
