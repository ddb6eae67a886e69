"""What the builders make: every schedule is safe, and moves exactly the bytes that the formulas of the field say."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from penstock.config import Family, Precision, Tier
from penstock.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.provision import Provision
from penstock.schedule.lower.visits import lower_step, route_of
from penstock.schedule.place import (
    LARGE_PART,
    PAGE,
    Depths,
    Format,
    Placement,
    Settings,
    chunk_count,
    chunks,
    grain,
    on_grain,
)
from penstock.schedule.program import ALIGN, GroupSpec, Program
from penstock.sim.costs import Costs
from penstock.sim.simulate import simulate
from tests.programs import ACTIVATION, random_case, transformer


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("part", range(10))
def test_every_schedule_is_safe(part: int) -> None:
    for seed in range(part * 40, part * 40 + 40):
        case = random_case(seed)
        try:
            check(case.build())
        except Exception as error:
            error.add_note(f"random_case({seed}): {case.family}, {case.settings}")
            raise


def settings(
    program: Program, weights: Tier, state: Tier, *, micro_batches: int = 3, form: Format, wait: bool = False
) -> Settings:
    count = len(program.groups)
    return Settings(
        micro_batches=micro_batches,
        chunk=5 * ALIGN,
        form=form,
        place=Placement(weights=(weights,) * count, state=(state,) * count, gradients="host", activations="device"),
        depths=Depths(),
        wait=wait,
    )


LAYERS = 3
BLOCKS, EMBEDDING, ENDS = LAYERS * 12 * ALIGN, 20 * ALIGN, 41 * ALIGN
N = BLOCKS + ENDS
BLOCK = BLOCKS // LAYERS
ADAM32, ADAM16 = Format.of("fp32", 2), Format.of("bf16", 2)


def moved(family: Family, s: Settings) -> dict[Lane, int]:
    program = transformer(LAYERS)
    return lower_step(family, program, s).bytes_per_lane()


def loaded(family: Family, micro_batches: int = 3) -> int:
    """Elements that go to the device: a block's twice and the ends' once, if horizontal for each micro-batch. The last
    block's stay there from its forward to its backward; the first one's from one micro-batch's backward to the next
    one's forward, since only the embedding's come in between.
    """
    if family == "vertical":
        return 2 * BLOCKS + ENDS - BLOCK
    return micro_batches * (2 * BLOCKS + ENDS) - (2 * micro_batches - 1) * BLOCK


@pytest.mark.parametrize(("form", "width"), [(ADAM32, 4), (ADAM16, 2)])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_vertical_moves_a_block_twice_and_its_gradient_once_whatever_the_micro_batches(
    form: Format, width: int, micro_batches: int
) -> None:
    """Per parameter of a block but the last: weights up 2 x, fp32 gradient down once (GreedySnake's table). The ends
    are needed once: the embedding only in the forward, norm and head in one visit that is both."""
    s = settings(transformer(LAYERS), "disk", "disk", micro_batches=micro_batches, form=form)
    found = moved("vertical", s)
    assert found["h2d"] == width * loaded("vertical")
    assert found["d2h"] == 4 * N


@pytest.mark.parametrize(("form", "width"), [(ADAM32, 4), (ADAM16, 2)])
@pytest.mark.parametrize("M", [1, 2, 5])
def test_horizontal_moves_everything_once_per_micro_batch_and_sums_gradients_on_the_host(
    form: Format,
    width: int,
    M: int,  # noqa: N803 - M is the field's name for it
) -> None:
    found = moved("horizontal", settings(transformer(LAYERS), "disk", "disk", micro_batches=M, form=form))
    assert found["h2d"] == width * loaded("horizontal", M)
    assert found["d2h"] == M * 4 * N
    # The host sums M gradients: M-1 additions, each of which reads two and writes one.
    step = moved("vertical", settings(transformer(LAYERS), "disk", "disk", form=form))["cpu"]
    assert found["cpu"] == step + (M - 1) * 12 * N


def test_fp32_adam_on_disk_reads_4_and_4_and_12_and_writes_12_bytes_per_parameter() -> None:
    found = moved("vertical", settings(transformer(LAYERS), "disk", "disk", form=ADAM32))
    assert found["read"] == (4 + 4 + 12) * BLOCKS - 4 * BLOCK + (4 + 12) * ENDS
    assert found["write"] == 12 * N


def test_bf16_adam_on_disk_reads_2_and_2_and_12_and_writes_12_bytes_per_parameter() -> None:
    """The master copy is 2 bytes of weights and 2 more."""
    found = moved("vertical", settings(transformer(LAYERS), "disk", "disk", form=ADAM16))
    assert found["read"] == (2 + 2 + 12) * BLOCKS - 2 * BLOCK + (2 + 12) * ENDS
    assert found["write"] == 12 * N


@pytest.mark.parametrize(("family", "form"), list(product(("vertical", "horizontal"), (ADAM32, ADAM16))))
def test_weights_that_are_kept_are_read_for_visits_alone(family: Family, form: Format) -> None:
    """Of a block 4 + 4 + 8 bytes a parameter in fp32, and 2 + 2 + 10 in bf16; with several micro-batches in turn, the
    last one's. The embedding's are read once more: they are loaded when a step begins, and stepped when it ends."""
    s = replace(settings(transformer(LAYERS), "disk", "disk", form=form), keep=True)
    found, width = moved(family, s), form.weight_bytes
    assert found["read"] == width * loaded(family) + form.per_element * N + width * EMBEDDING
    assert found["write"] == 12 * N


def test_weights_are_kept_for_steps_that_read_them_within_the_backward() -> None:
    program = transformer(LAYERS, frozen=True)
    asked = replace(settings(program, "disk", "disk", form=ADAM16), keep=True)
    route = route_of(program, 3, "vertical")

    def kept(**changed: Any) -> set[int]:
        return {*Provision(route, replace(asked, **changed)).kept}

    norm, head, second, third = 1, 2, 4, 5
    assert kept() == {norm, head, second, third}  # not the embedding, nor the first block, which is frozen
    assert kept(place=replace(asked.place, state=("host",) * len(program.groups))) == {norm, head, second, third}
    assert kept(wait=True) == set()
    assert kept(wait=True, speculate=True) == {norm, head, second, third}
    assert kept(delay=1.0) == set()
    assert kept(form=Format.of("fp16", 2)) == set()
    assert kept(place=replace(asked.place, weights=("host",) * len(program.groups))) == set()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_room_for_kept_weights_is_one_block_more_than_their_depth_and_what_may_lag(depth: int) -> None:
    program, chunks_of_a_block = transformer(8, block=60), 12  # more than the head has
    s = settings(program, "disk", "disk", form=ADAM16)
    s = replace(s, keep=True, depths=Depths(weights=depth, stage_out=2))
    schedule = lower_step("vertical", program, s)
    (pool,) = (pool for pool in schedule.pools if pool.name == "kept_weights")
    assert pool.size == 5 * ALIGN * 2
    assert pool.count == (depth + 1) * chunks_of_a_block + 2

    def with_buffers(count: int) -> Schedule:
        changed = (replace(one, count=count) if one is pool else one for one in schedule.pools)
        return replace(schedule, pools=tuple(changed))

    check(with_buffers(pool.count - 2))
    with pytest.raises(ScheduleError, match=r"deadlock: .*a buffer of pool kept_weights"):
        check(with_buffers(pool.count - 3))


def test_reads_and_writes_do_not_take_turns_where_weights_are_kept() -> None:
    """With one chunk a block, a delay, and a drive that bounds the step, writes may lag as where nothing is kept."""
    program = transformer(12, block=20)
    s = replace(settings(program, "disk", "disk", form=ADAM32), chunk=20 * ALIGN, micro_batches=1, delay=0.4)
    each = Costs(name="drive", seconds=lambda op: op.nbytes / (1 if op.lane in ("read", "write") else 100))
    without, kept = (
        simulate(World.of(lower_step("vertical", program, replace(s, keep=keep))), each).time for keep in (False, True)
    )
    assert kept < 0.95 * without


def test_fp16_adam_on_disk_reads_2_and_2_and_12_and_writes_12_and_2_bytes_per_parameter() -> None:
    """The master copy is beside the weights, which a step only writes."""
    found = moved("vertical", settings(transformer(LAYERS), "disk", "disk", form=Format.of("fp16", 2)))
    assert found["read"] == (2 + 2 + 12) * BLOCKS - 2 * BLOCK + (2 + 12) * ENDS
    assert found["write"] == (12 + 2) * N


@pytest.mark.parametrize(("moments", "family"), list(product((0, 1, 2), ("vertical", "horizontal"))))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_optimizer_step_touches_gradient_weights_and_state_once(
    moments: int, family: Family, precision: Precision
) -> None:
    """cpu lane: gradient read, master and moments read and written, weights written where they are no part of it."""
    form = Format.of(precision, moments)
    found = moved(family, settings(transformer(LAYERS), "disk", "disk", micro_batches=1, form=form))
    copied = 2 if precision == "fp16" else 0
    assert found["cpu"] == (4 + 2 * 4 * (1 + moments) + copied) * N
    weights = form.weight_bytes * loaded(family, 1)
    assert found["read"] == weights + 4 * (1 + moments) * N
    assert found["write"] == (4 * (1 + moments) + copied) * N


@pytest.mark.parametrize("family", ["vertical", "horizontal"])
@pytest.mark.parametrize(
    ("weights", "state", "precision", "read", "write"),
    [
        # at home where the state is, or below: a copy in host memory is not read from disk, and a step writes both
        ("host", "host", "fp32", 0, 0),
        ("host", "disk", "fp32", 8, 12),
        ("disk", "host", "fp32", 4, 4),
        ("device", "host", "fp32", 0, 0),
        ("device", "disk", "fp32", 12, 12),
        ("host", "host", "bf16", 0, 0),
        ("host", "disk", "bf16", 10, 12),
        ("disk", "host", "bf16", 2, 2),
        ("device", "host", "bf16", 0, 0),
        ("device", "disk", "bf16", 12, 12),
        # a step makes the weights anew from the master copy
        ("host", "disk", "fp16", 12, 14),
        ("disk", "host", "fp16", 0, 2),
        ("device", "disk", "fp16", 12, 14),
    ],
)
def test_only_what_is_on_disk_is_read_and_written(
    weights: Tier, state: Tier, precision: Precision, read: int, write: int, family: Family
) -> None:
    form = Format.of(precision, 2)
    width = form.weight_bytes
    found = moved(family, settings(transformer(LAYERS), weights, state, form=form))
    times = 3 if family == "horizontal" else 1
    streamed = width * loaded(family)
    assert found["read"] == (streamed if weights == "disk" else 0) + read * N
    assert found["write"] == write * N
    assert found["h2d"] == (width * N if weights == "device" else streamed)  # new weights go up to their copy
    assert found["d2h"] == times * 4 * N


@pytest.mark.parametrize("family", ["vertical", "horizontal"])
@pytest.mark.parametrize("form", [ADAM32, ADAM16])
def test_a_model_that_is_at_home_on_the_device_moves_nothing(family: Family, form: Format) -> None:
    found = moved(family, settings(transformer(LAYERS), "device", "device", form=form))
    assert set(found.values()) == {0}


@pytest.mark.parametrize("family", ["vertical", "horizontal"])
def test_gradients_that_wait_on_disk_cost_4_bytes_each_way(family: Family) -> None:
    at_once = settings(transformer(LAYERS), "disk", "disk", form=ADAM32)
    waiting = replace(at_once, wait=True)
    on_disk = replace(waiting, place=replace(waiting.place, gradients="disk"))
    a, b, c = moved(family, at_once), moved(family, waiting), moved(family, on_disk)
    # The norm reads every gradient once more.
    assert b == {**a, "cpu": a["cpu"] + 4 * N}
    assert c == {**b, "read": b["read"] + 4 * N, "write": b["write"] + 4 * N}


@pytest.mark.parametrize("family", ["vertical", "horizontal"])
@pytest.mark.parametrize("M", [1, 2, 3, 5])
def test_a_saved_activation_goes_down_once_and_up_once_but_the_last_blocks_stays(
    family: Family,
    M: int,  # noqa: N803 - M is the field's name for it
) -> None:
    """Per micro-batch and block boundary one way down and one up, 2MC; the last block's outputs are used by the
    epilogue at once, and two of its inputs (all, micro-batch by micro-batch) stay. Recompute starts from the saved
    activation that the backward brings up anyway, so this is less than the 3MC that GreedySnake counts for vertical,
    and the gradients of saved activations never leave the device."""
    stay = settings(transformer(LAYERS), "disk", "disk", micro_batches=M, form=ADAM32)
    host = replace(stay, place=replace(stay.place, activations="host"))
    disk = replace(stay, place=replace(stay.place, activations="disk"))
    a, b, c = moved(family, stay), moved(family, host), moved(family, disk)
    last = max(M - 2, 0) if family == "vertical" else 0
    # boundaries: the embedding's outputs and those of all blocks but the last two, then the inputs of the last
    count = M * (LAYERS - 1) + last
    nbytes = count * ACTIVATION
    assert b == {**a, "h2d": a["h2d"] + nbytes, "d2h": a["d2h"] + nbytes}
    pages = count * 2 * PAGE
    assert ACTIVATION < 2 * PAGE
    assert c == {**b, "read": b["read"] + pages, "write": b["write"] + pages}


# ---- what stays on the device


def ops_of(schedule: Schedule, kind: str, group: int) -> list[str]:
    """Visits that bring a group's first chunk."""
    return [op.id.partition("@")[2] for op in schedule.ops if op.id.startswith(f"{kind}{group}.0@")]


@pytest.mark.parametrize("kind", ["RW", "UW"])
def test_the_last_blocks_weights_come_once_for_forward_and_backward(kind: str) -> None:
    program = transformer(LAYERS)
    first, last = len(program.groups) - LAYERS, len(program.groups) - 1
    by_block = lower_step("vertical", program, settings(program, "disk", "disk", form=ADAM16))
    assert ops_of(by_block, kind, last) == [f"F{LAYERS}"]
    assert ops_of(by_block, kind, last - 1) == [f"F{LAYERS - 1}", f"B{LAYERS - 1}"]
    assert by_block.by_id[f"B{LAYERS}m2"].gives[0] == f"W{last}@F{LAYERS}"
    one_by_one = lower_step("horizontal", program, settings(program, "disk", "disk", form=ADAM16))
    assert ops_of(one_by_one, kind, last) == [f"F{LAYERS}m{m}" for m in range(3)]
    assert ops_of(one_by_one, kind, first) == ["F1m0", "B1m0", "B1m1", "B1m2"]
    assert ops_of(one_by_one, kind, first + 1) == [f"{visit}2m{m}" for m in range(3) for visit in "FB"]


@pytest.mark.parametrize("family", ["vertical", "horizontal"])
@pytest.mark.parametrize("reader", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_stays_takes_no_buffer_more(family: Family, reader: bool, depth: int) -> None:
    """The pools are those of visits that load everything: room for one, and ``depth`` - 1 groups more. Blocks,
    embedding and head are of one size class, so that with depth 1 the last block has to make room for the head."""
    program = transformer(LAYERS, reader=reader)
    s = settings(program, "disk", "disk", micro_batches=4, form=ADAM16)
    s = replace(s, depths=Depths(weights=depth), place=replace(s.place, activations="host"))
    schedule = lower_step(family, program, s)
    check(schedule)
    pools = {pool.name: pool.count for pool in schedule.pools}
    assert pools["weights.0"] == depth
    under_way = 4 if family == "vertical" else 1
    assert pools["activations"] == under_way + 2 + 1  # a gradient is there beside what it is with respect to
    assert pools["restored"] == under_way + 1
    visit = "" if family == "vertical" else "m0"
    kept = ops_of(schedule, "UW", len(program.groups) - 1)[:2] != [f"F{LAYERS}{visit}", f"B{LAYERS}{visit}"]
    assert kept == (depth > 1)


def test_consecutive_visits_of_one_group_load_it_once() -> None:
    """A block whose weights every call shares, with nothing else in between."""
    program = transformer(LAYERS)
    shared = len(program.groups) - 1
    stages = tuple(
        replace(stage, forward_reads=(shared,), backward_reads=(shared,), gradients=(shared,))
        if stage.kind == "call"
        else stage
        for stage in program.stages
    )
    program = replace(program, stages=stages)
    for depth, loads in ((1, ["F1", f"B{LAYERS}"]), (2, ["F1"])):
        s = replace(settings(program, "disk", "disk", form=ADAM16), depths=Depths(weights=depth))
        schedule = lower_step("vertical", program, s)
        check(schedule)
        assert ops_of(schedule, "UW", shared) == loads


@pytest.mark.parametrize("inputs", [2, 3, 5])
def test_as_many_inputs_of_the_last_block_stay_as_there_is_room_for(inputs: int) -> None:
    program = transformer(LAYERS)
    s = settings(program, "disk", "disk", micro_batches=5, form=ADAM16)
    s = replace(s, place=replace(s.place, activations="host"), depths=Depths(inputs=inputs))
    schedule = lower_step("vertical", program, s)
    check(schedule)
    leave = 5 - inputs
    for kind in ("DC", "UC"):
        found = {(op.id.stage, op.id.micro_batch) for op in schedule.ops if op.id.kind == kind}
        assert found == {(k, m) for k in range(LAYERS - 1) for m in range(5)} | {(LAYERS - 1, m) for m in range(leave)}
    for m in range(5):
        assert f"{'a' if m < leave else 'A'}2m{m}" in schedule.by_id[f"B3m{m}"].gives
    counts = {pool.name: pool.count for pool in schedule.pools}
    assert counts["saved_activations"] == 5 * (LAYERS - 1) + leave
    assert counts["activations"] == 5 + inputs + 1
    assert counts["restored"] == 5 + 1


def test_frozen_parameters_move_up_only() -> None:
    program = transformer(2, frozen=True)
    s = settings(program, "disk", "disk", form=ADAM32)
    found = lower_step("vertical", program, s).bytes_per_lane()
    trained, all_blocks = (12 + 41) * ALIGN, (12 + 15) * ALIGN
    assert found["d2h"] == 4 * trained
    assert found["write"] == 12 * trained
    assert found["h2d"] == 4 * (2 * all_blocks - 15 * ALIGN + 41 * ALIGN)


def test_tied_weights_are_stepped_once_after_both_gradients() -> None:
    program = transformer(2, tied=True)
    schedule = lower_step("vertical", program, settings(program, "disk", "disk", form=ADAM32))
    n, twice = (24 + 21) * ALIGN, 20 * ALIGN
    assert schedule.bytes_per_lane()["d2h"] == 4 * (n + twice)
    assert schedule.bytes_per_lane()["write"] == 12 * n


def test_an_evaluation_moves_weights_up_once_and_nothing_else() -> None:
    program = transformer(LAYERS)
    s = replace(settings(program, "disk", "disk", form=ADAM16), train=False)
    found = lower_step("vertical", program, s).bytes_per_lane()
    assert found == {"compute": 0, "h2d": 2 * N, "d2h": 0, "read": 2 * N, "write": 0, "cpu": 0}


def test_the_size_of_chunks_changes_no_bytes() -> None:
    for seed in range(20):
        case = random_case(seed)
        found = {
            tuple(replace(case, settings=replace(case.settings, chunk=n * ALIGN)).build().bytes_per_lane().items())
            for n in (1, 2, 5, 100)
        }
        assert len(found) == 1


def test_gradients_are_added_up_in_the_same_order_by_both_families() -> None:
    """Micro-batches in order within a stage, then stages in backward order: else the schedule would change the bits."""
    program = transformer(2, tied=True)
    s = settings(program, "disk", "disk", form=ADAM32)
    for group in (0, 4):
        compute = [
            op
            for op in lower_step("vertical", program, s).lanes["compute"]
            if any(w.startswith(f"G{group}@") for w in op.writes)
        ]
        ops = lower_step("horizontal", program, s).ops
        down = [
            op.id.partition("@")[2] for op in ops if op.id.kind == "DG" and op.id.group == group and not op.id.chunk
        ]
        by_stage = sorted(down, key=lambda visit: visit.partition("m")[0], reverse=True)
        assert [op.id for op in compute] == by_stage
        for stage in {visit.partition("m")[0] for visit in down}:
            parts = [visit for visit in down if visit.startswith(f"{stage}m")]
            assert parts == [f"{stage}m{m}" for m in range(3)]
    sums = [op.id for op in lower_step("horizontal", program, s).lanes["cpu"] if op.id.startswith("AG0.0@")]
    assert sums[-1] == "AG0.0@sum1"  # the head's sum first, the embedding's onto it


def test_a_group_is_not_stepped_while_a_later_stage_still_reads_it() -> None:
    """The norm's group gets its gradient in the epilogue, but block 0 reads it once more in its backward."""
    program = transformer(3, reader=True)
    for wait in (False, True):
        schedule = lower_step("vertical", program, settings(program, "disk", "disk", form=ADAM32, wait=wait))
        assert "B1m2" in schedule.by_id["OP1.0"].after


@pytest.mark.parametrize("seed", range(30))
def test_pools_are_known_before_any_op_exists(seed: int) -> None:
    case = random_case(seed)
    s = case.settings
    route = route_of(case.program, s.micro_batches, case.family, train=s.train)
    schedule = case.build()
    assert tuple(Provision(route, s).pools.values()) == schedule.pools
    assert {pool for op in schedule.ops for _, pool in op.takes} == {pool.name for pool in schedule.pools}


@pytest.mark.parametrize(
    ("trainable", "frozen", "largest"), [(12, 0, 5), (1, 0, 1), (7, 3, 2), (0, 9, 4), (100, 1, 64)]
)
def test_chunks_cover_a_group_without_gap_or_mix(trainable: int, frozen: int, largest: int) -> None:
    group = GroupSpec(index=0, name="g", trainable=trainable * ALIGN, frozen=frozen * ALIGN)
    cut = chunks(group, largest * ALIGN)
    assert [c.index for c in cut] == list(range(len(cut)))
    position = 0
    for c in cut:
        assert c.start == position
        assert 0 < c.numel <= largest * ALIGN
        assert c.numel % ALIGN == 0
        assert c.trainable == (c.start < group.trainable)
        position += c.numel
    assert position == group.numel
    for kind in (True, False):
        sizes = [c.numel for c in cut if c.trainable is kind]
        assert max(sizes, default=0) - min(sizes, default=0) <= ALIGN


@pytest.mark.parametrize("largest", [1 << 16, 3 << 16, (3 << 16) + ALIGN, 1 << 21, LARGE_PART, LARGE_PART + 5 * ALIGN])
@pytest.mark.parametrize("numel", [LARGE_PART - ALIGN, LARGE_PART, LARGE_PART + 5 * ALIGN, 5 * LARGE_PART + 3 * ALIGN])
def test_chunks_of_any_size_begin_where_checksums_do(numel: int, largest: int) -> None:
    """A store is cut once, and read by plans with chunks of any size that the search may choose."""
    group = GroupSpec(index=0, name="g", trainable=numel, frozen=numel)
    cut = chunks(group, largest)
    for kind, begin in ((True, 0), (False, numel)):
        part = [c for c in cut if c.trainable is kind]
        assert len(part) == chunk_count(numel, largest)
        assert sum(c.numel for c in part) == numel
        assert all((c.start - begin) % grain(numel) == 0 for c in part)
        assert 0 < min(c.numel for c in part) <= max(c.numel for c in part) <= largest
    assert on_grain(group, largest)


def test_chunks_below_the_grain_are_for_simulations() -> None:
    group = GroupSpec(index=0, name="g", trainable=LARGE_PART, frozen=0)
    assert {c.numel for c in chunks(group, 5 * ALIGN)} <= {4 * ALIGN, 5 * ALIGN}
    assert not on_grain(group, 5 * ALIGN)
    assert on_grain(replace(group, trainable=LARGE_PART - ALIGN), 5 * ALIGN)
