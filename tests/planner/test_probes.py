"""The loads that the linear program predicts of a placement are those of its schedule, in each phase and lane."""

from dataclasses import replace
from random import Random
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.phase_costs import Load, PhaseCosts
from penstock.planner.phases import Phases
from penstock.planner.sample import Sample
from penstock.schedule.ir.lanes import STREAM_LANES
from penstock.schedule.ir.ops import Op, chunk_of
from penstock.schedule.program import ALIGN, Program, Whole
from penstock.sim.costs import Costs
from tests.programs import Case, all_on_disk, placement, random_case, transformer
from tests.questions import request_of


def per_op_and_byte(op: Op) -> float:
    """Seconds that tell apart ops that are exchanged for each other."""
    words = "F E B OP OD ND NG DG AG RW UW RS WS WW UN RG WG GW SG RM MU WM UU GU NS DU"
    kinds = sorted(words.split())
    kind = kinds.index(op.id.kind) + 1 if op.id.kind in kinds else 0
    return 1.0 + 0.01 * kind + 0.001 * max(op.id.stage, 0) + op.nbytes / 1000


COSTS = Costs(name="each", seconds=per_op_and_byte)


def lowered(case: Case) -> Load:
    """Seconds by row and lane of the whole schedule. Norms of groups that do not wait, though others do, are left out,
    and ops that there is one of: see ``phase_costs``."""
    request, s = request_of(case), case.settings
    phases = Phases(request.route, wait=s.wait, speculate=s.speculate)
    load = np.zeros((phases.rows_of_load, len(STREAM_LANES)))
    schedule = case.build()
    late = {chunk_of(op) for op in schedule.ops if op.id.kind in ("OP", "MU") and op.reads[0].kind in ("h", "r")}
    for op, row in phases.rows(schedule):
        alone = op.id.kind in ("NORM", "CM", "AN")
        passing = op.id.kind in ("NG", "ND") and not s.waits(op.id.group) and chunk_of(op) not in late
        if not alone and not passing:
            load[row, STREAM_LANES.index(op.lane)] += per_op_and_byte(op)
    return load


def predicted(case: Case) -> Load:
    """Seconds by row and lane that the linear program has for the placement."""
    loads = PhaseCosts(request_of(case), case.settings, COSTS)
    lowest = loads.prices.alone((request_of(case).bottom,) * 2, "host", late=case.settings.delay > 0)
    return loads.of(case.settings.place) - lowest


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), layers=st.integers(1, 9), delay=st.sampled_from((0.0, 0.5, 1.0)))
def test_loads_are_those_of_the_schedule_in_each_phase_and_lane(seed: int, layers: int, delay: float) -> None:
    case, rng = random_case(seed, largest=5), Random(seed)
    tied, frozen, reader = (rng.random() < 0.3 for _ in range(3))
    program = transformer(layers, tied=tied, frozen=frozen, reader=reader, block=rng.choice((12, 20)))
    late = delay if case.family == "vertical" and case.settings.train else 0.0
    whole = replace(
        case.settings,
        place=placement(rng, program, tied=tied),
        depths=replace(case.settings.depths, inputs=rng.randint(2, 6)),
        delay=late,
    )
    if 0 < late < 1:  # an even number of chunks for each part, of which a delay takes a half
        program, whole = _in_even_chunks(program), replace(whole, chunk=2 * ALIGN)
    elif rng.random() < 0.5:  # groups of matrices are delayed whole: no share of each is
        program = _of_matrices(program, rng)
    found = replace(case, program=program, settings=whole)
    if rng.random() < 0.5:
        found = found.shared_by(rng.randint(2, 4))
    np.testing.assert_allclose(predicted(found), lowered(found), rtol=1e-9, atol=1e-9)


def _in_even_chunks(program: Program) -> Program:
    """The program with groups of an even number of chunks of 2 ``ALIGN`` elements."""
    groups = (replace(g, trainable=-(-g.trainable // (4 * ALIGN)) * 4 * ALIGN) for g in program.groups)
    return Program(groups=tuple(groups), stages=program.stages)


def _of_matrices(program: Program, rng: Random) -> Program:
    """The program with some or all groups whose steps take matrices whole."""
    whole, share = Whole(flop=7, scratch=0), rng.choice((0.5, 1.0))
    groups = (replace(g, whole=whole if g.trainable and rng.random() < share else None) for g in program.groups)
    return Program(groups=tuple(groups), stages=program.stages)


def test_a_sample_stays_small_and_keeps_what_is_not_alike() -> None:
    small = Sample.of(transformer(96, tied=True))
    assert len(small.program.stages) == 2 + 4
    assert small.groups[:2] == (0, 1)
    assert small.stages[:4] == (0, 1, 2, 2)
    assert small.stages[-4:] == (2, 3, 4, 5)
    apart = transformer(12, frozen=True)  # the first block is frozen, the second in part
    assert len(Sample.of(apart).program.stages) == 2 + 1 + 1 + 4


def test_blocks_that_take_turns_or_share_weights_have_samples() -> None:
    """Every second block is larger; and the last one reads the first one's weights, too."""
    program = transformer(12)
    groups = tuple(replace(g, trainable=g.trainable * (1 + g.index % 2)) for g in program.groups)
    turns = Program(groups=groups, stages=program.stages)
    assert len(Sample.of(turns).program.stages) == 2 + 4 + 4
    first, last = program.stages[1], program.stages[12]
    both = (*first.forward_reads, *last.forward_reads)
    shared = replace(last, forward_reads=both, backward_reads=both)
    stages = (*program.stages[:12], shared, program.stages[13])
    sharing = Sample.of(Program(groups=groups, stages=stages)).program
    assert sharing.stages[-2].forward_reads[0] == sharing.stages[1].forward_reads[0]
    for program_ in (turns, Program(groups=groups, stages=stages)):
        for seed in range(4):
            case = random_case(seed, largest=5)
            place = placement(Random(seed), program_, tied=True)
            found = replace(case, program=program_, settings=replace(case.settings, place=place))
            np.testing.assert_allclose(predicted(found), lowered(found), rtol=1e-9, atol=1e-9)


WAITING = """
start RW0.0@F0 UW0.0@F0 RW3.0@F1 UW3.0@F1
forward F0m0 F0m1 RW4.0@F2 UW4.0@F2 F1m0 F1m1 DC0m0 DC0m1 RW5.0@F3 UW5.0@F3 F2m0 F2m1 DC1m0 DC1m1
forward RW1.0@E4 UW1.0@E4 RW2.0@E4 UW2.0@E4 F3m0 F3m1
epilogue E4m0 E4m1
backward RW4.0@B2 UW4.0@B2 DG1.0@E4 DG2.0@E4 NG1.0 NG2.0 B3m0 B3m1 UC1m0 UC1m1 RW3.0@B1 UW3.0@B1 DG5.0@B3 NG5.0
backward B2m0 B2m1 UC0m0 UC0m1 DG4.0@B2 NG4.0 B1m0 B1m1 B0m0 B0m1
tail DG3.0@B1 NG3.0 DG0.0@B0 NG0.0
update NORM RS0.0 OP0.0 WS0.0 WW0.0 RS1.0 OP1.0 WS1.0 WW1.0 RS2.0 OP2.0 WS2.0 WW2.0
update RS3.0 OP3.0 WS3.0 WW3.0 RS4.0 OP4.0 WS4.0 WW4.0 RS5.0 OP5.0 WS5.0 WW5.0
"""
DELAYED = """
ahead RS0.0 RS3.0
start OP0.0 UW0.0@F0 OP3.0 UW3.0@F1
home WS0.0 WW0.0 WS3.0 WW3.0
forward F0m0 F0m1 RS4.0 OP4.0 UW4.0@F2 WS4.0 WW4.0 F1m0 F1m1 DC0m0 DC0m1 RS5.0 OP5.0 UW5.0@F3 WS5.0 WW5.0
forward F2m0 F2m1 DC1m0 DC1m1 RS1.0 OP1.0 UW1.0@E4 WS1.0 WW1.0 RS2.0 OP2.0 UW2.0@E4 WS2.0 WW2.0 CM F3m0 F3m1
epilogue E4m0 E4m1
backward RW4.0@B2 UW4.0@B2 DG1.0@E4 DG2.0@E4 NG1.0 NG2.0 B3m0 B3m1 UC1m0 UC1m1 RW3.0@B1 UW3.0@B1 DG5.0@B3 NG5.0
backward B2m0 B2m1 UC0m0 UC0m1 DG4.0@B2 NG4.0 B1m0 B1m1 B0m0 B0m1
tail DG3.0@B1 NG3.0 DG0.0@B0 NG0.0
"""
ONE_BY_ONE = """
start RW0.0@F0m0 UW0.0@F0m0 RW3.0@F1m0 UW3.0@F1m0
forward F0m0 RW4.0@F2m0 UW4.0@F2m0 F1m0 DC0m0 RW5.0@F3m0 UW5.0@F3m0 F2m0 DC1m0
forward RW1.0@E4m0 UW1.0@E4m0 RW2.0@E4m0 UW2.0@E4m0 F3m0 RW0.0@F0m1 UW0.0@F0m1 F0m1 RW4.0@F2m1 UW4.0@F2m1 F1m1 DC0m1
forward RW5.0@F3m1 UW5.0@F3m1 F2m1 DC1m1 RW1.0@E4m1 UW1.0@E4m1 RW2.0@E4m1 UW2.0@E4m1 F3m1
backward E4m0 RW4.0@B2m0 UW4.0@B2m0 DG1.0@E4m0 DG2.0@E4m0 B3m0 UC1m0 RW3.0@B1m0 UW3.0@B1m0 DG5.0@B3m0
backward B2m0 UC0m0 DG4.0@B2m0 B1m0 DG3.0@B1m0 B0m0 DG0.0@B0m0
last E4m1 RW4.0@B2m1 UW4.0@B2m1 DG1.0@E4m1 AG1.0@E4m1 DG2.0@E4m1 AG2.0@E4m1 RS1.0 OP1.0 WS1.0 WW1.0
last RS2.0 OP2.0 WS2.0 WW2.0 B3m1 UC1m1 RW3.0@B1m1 UW3.0@B1m1 DG5.0@B3m1 AG5.0@B3m1 RS5.0 OP5.0 WS5.0 WW5.0
last B2m1 UC0m1 DG4.0@B2m1 AG4.0@B2m1 RS4.0 OP4.0 WS4.0 WW4.0 B1m1 B0m1
tail DG3.0@B1m1 AG3.0@B1m1 RS3.0 OP3.0 WS3.0 WW3.0 DG0.0@B0m1 AG0.0@B0m1 RS0.0 OP0.0 WS0.0 WW0.0
"""


@pytest.mark.parametrize(
    ("family", "wait", "delay", "expected"),
    [("vertical", True, 0.0, WAITING), ("vertical", False, 1.0, DELAYED), ("horizontal", False, 0.0, ONE_BY_ONE)],
)
def test_each_op_falls_into_its_phase(
    family: Literal["vertical", "horizontal"], wait: bool, delay: float, expected: str
) -> None:
    """The program has three blocks and two micro-batches, all at home on disk; the rest is written out by hand. Groups:
    embedding, norm, head, blocks; stage 4 is the epilogue."""
    program = transformer(3, block=4)
    streamed = all_on_disk(program, chunk=256 * ALIGN, micro_batches=2, wait=wait, delay=delay)
    case = Case(program=program, family=family, settings=streamed)
    phases = Phases(request_of(case).route, wait=wait, speculate=False)
    names = (*phases.names, "ahead", "home")
    found = {str(op.id): names[row] for op, row in phases.rows(case.build())}
    lines = (line.split() for line in expected.strip().splitlines())
    assert found == {ident: name for name, *idents in lines for ident in idents}


def test_weights_that_some_blocks_share_leave_in_between_in_the_sample_too() -> None:
    """Every sixth block reads one more group, as Zamba's do."""
    program = transformer(18)
    sixth = [
        replace(s, forward_reads=(1, *s.forward_reads), backward_reads=(1, *s.backward_reads))
        if s.kind == "call" and s.index % 6 == 0
        else s
        for s in program.stages
    ]
    shared = Program(groups=program.groups, stages=tuple(sixth))
    for seed in range(6):
        case = random_case(seed, largest=5)
        place = placement(Random(seed), shared, tied=True)
        found = replace(case, program=shared, settings=replace(case.settings, place=place))
        np.testing.assert_allclose(predicted(found), lowered(found), rtol=1e-9, atol=1e-9)
