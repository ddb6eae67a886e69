"""The loads that the linear program predicts of a placement are those of its schedule, in each phase and lane."""

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import Budget
from penstock.planner.fit import Request
from penstock.planner.phase_costs import Load, PhaseCosts
from penstock.planner.phases import Phases
from penstock.planner.sample import Sample
from penstock.schedule.ir.lanes import LOCAL_LANES
from penstock.schedule.ir.ops import Op, chunk_of
from penstock.schedule.program import ALIGN, Program
from penstock.sim.costs import Costs
from tests.programs import Case, placement, random_case, transformer


def per_op_and_byte(op: Op) -> float:
    """Seconds that tell apart ops that are exchanged for each other."""
    kinds = sorted(("F", "E", "B", "OP", "OD", "ND", "NG", "DG", "AG", "RW", "UW", "RS", "WS", "WW", "UN", "RG", "WG"))
    kind = kinds.index(op.id.kind) + 1 if op.id.kind in kinds else 0
    return 1.0 + 0.01 * kind + 0.001 * max(op.id.stage, 0) + op.nbytes / 1000


COSTS = Costs(name="each", seconds=per_op_and_byte)


def asked(case: Case) -> Request:
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
    )


def lowered(case: Case) -> Load:
    """Seconds by row and lane of the whole schedule. Norms of groups that do not wait, though others do, are left out,
    and ops that there is one of: see ``phase_costs``."""
    request, s = asked(case), case.settings
    phases = Phases(request.route, wait=s.wait, speculate=s.speculate)
    load = np.zeros((len(phases.names) + 1, len(LOCAL_LANES)))
    schedule = case.build()
    late = {chunk_of(op) for op in schedule.ops if op.id.kind == "OP" and op.reads[0].kind in ("h", "r")}
    for op, row in phases.rows(schedule):
        alone = op.id.kind in ("NORM", "CM")
        passing = op.id.kind in ("NG", "ND") and not s.waits(op.id.group) and chunk_of(op) not in late
        if not alone and not passing:
            load[row, LOCAL_LANES.index(op.lane)] += per_op_and_byte(op)
    return load


def predicted(case: Case) -> Load:
    """... of the linear program."""
    loads = PhaseCosts(asked(case), case.settings, COSTS)
    lowest = loads.prices.alone((asked(case).bottom,) * 2, "host", late=case.settings.delay > 0)
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
        place=placement(rng, program, case.settings.form, tied=tied),
        depths=replace(case.settings.depths, inputs=rng.randint(2, 6)),
        delay=late,
    )
    if 0 < late < 1:  # an even number of chunks for each part, of which a delay takes a half
        program, whole = _in_even_chunks(program), replace(whole, chunk=2 * ALIGN)
    found = replace(case, program=program, settings=whole)
    np.testing.assert_allclose(predicted(found), lowered(found), rtol=1e-9, atol=1e-9)


def _in_even_chunks(program: Program) -> Program:
    """... of 2 ``ALIGN`` elements."""
    groups = (replace(g, trainable=-(-g.trainable // (4 * ALIGN)) * 4 * ALIGN) for g in program.groups)
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
            place = placement(Random(seed), program_, case.settings.form, tied=True)
            found = replace(case, program=program_, settings=replace(case.settings, place=place))
            np.testing.assert_allclose(predicted(found), lowered(found), rtol=1e-9, atol=1e-9)
