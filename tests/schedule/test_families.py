"""What holds for every family of schedules, whatever is asked of it."""

import gc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedule.check.worlds import violations
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.text import parse_world
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.emitter import Emitter
from penstock.schedule.lower.families import FAMILIES, ScheduleFamily, build
from penstock.schedule.lower.layers import layer_program
from penstock.schedule.lower.request import FamilyRequest, Sizes
from penstock.schedule.lower.seat import streaming_seat
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.place import Depths
from penstock.schedule.program import ALIGN
from penstock.sim.costs import Costs
from penstock.sim.models import puzzle, unit
from penstock.sim.simulate import simulate
from tests.programs import all_on_disk, random_case

LAYERED = [name for name, family in FAMILIES.items() if family.streaming is None]

SIZES = Sizes(activation=100, activation_gradient=90, weights=66, gradient=130, state=390, saved=1000)
"""Nothing divides evenly, nothing is equal, nothing is left out."""


def uneven(op: Op) -> float:
    """Costs under which no two lanes keep step."""
    compute = {"F": 1.0, "B": 2.1, "I": 0.9, "W": 1.3, "OD": 0.3, "E": 0.4}
    return compute.get(op.id.kind, 0.17 + op.nbytes / 500) * op.items


COSTS = {
    "uneven": Costs(name="uneven", seconds=uneven),
    "serial": puzzle().costs,
    "unit": unit().costs,
}


def asked(family: str, *, layers: int = 6, ranks: int = 4, micro_batches: int = 4) -> FamilyRequest:
    return FamilyRequest(family=family, layers=layers, ranks=ranks, micro_batches=micro_batches, sizes=SIZES)


@st.composite
def requests(draw: st.DrawFn) -> FamilyRequest:
    """Requests that the families can do."""
    family = draw(st.sampled_from(sorted(LAYERED)))
    kind = FAMILIES[family]
    ranks = 1 if kind.one_rank else draw(st.integers(1, 5))
    together = draw(st.sampled_from([None, 2])) if "partition_activations" in kind.options else None
    virtual = draw(st.integers(1, 2)) if "virtual_stages" in kind.options and family != "dualpipe-v" else None
    layers = draw(st.integers(1, 6)) + (ranks * 2 if virtual or family in ("dualpipe-v", "pipeline-fsdp") else 0)
    micro_batches = draw(st.integers(1, 12))
    if family in ("interleaved-1f1b", "looped-dfs") or "buffer_size" in kind.options:
        micro_batches = ranks * draw(st.integers(1, 3))
    elif family == "dualpipe-v":
        micro_batches += 2 * ranks - 1
    return FamilyRequest(
        family=family,
        layers=layers,
        ranks=ranks * (together or 1),
        micro_batches=micro_batches,
        sizes=draw(st.sampled_from([SIZES, puzzle().sizes, unit().sizes])),
        stage_ops=draw(st.booleans()),
        virtual_stages=virtual,
        gather_group=draw(st.sampled_from([None, "stage", "world"])) if "gather_group" in kind.options else None,
        fused=draw(st.booleans()) if "fused" in kind.options else False,
        partition_activations=together,
        buffer_size=draw(st.sampled_from([None, 60_000])) if "buffer_size" in kind.options else None,
        lookahead=draw(st.sampled_from([0, 1, 3])),
    )


@settings(max_examples=60, deadline=None)
@given(requests())
def test_every_schedule_is_safe_and_runs_under_any_costs_and_reads_back(request: FamilyRequest) -> None:
    world = build(request)
    assert violations(world) == []
    assert parse_world(str(world)) == world
    for costs in COSTS.values():
        simulation = simulate(world, costs)
        assert simulation.time >= simulation.lower_bound - 1e-9
        for rank, schedule in enumerate(world.ranks):
            assert simulation.peak(rank)["device"] <= schedule.peak_bytes("device")


@settings(max_examples=60, deadline=None)
@given(requests())
def test_every_micro_batch_goes_once_through_every_layer_and_back_and_what_is_sent_is_received(
    request: FamilyRequest,
) -> None:
    world = build(request)
    done: Counter[tuple[str, int]] = Counter()  # (kind, layer) -> micro-batches
    for schedule in world.ranks:
        place = {op.id: i for i, op in enumerate(schedule.ops)}
        for op in schedule.ops:
            kind, layer, m = op.id.kind, op.id.stage, op.id.micro_batch
            if kind in ("F", "B", "I", "W", "E"):
                done[kind, layer] += op.items
            if kind in ("B", "I"):
                assert place[f"F{layer}m{m}"] < place[op.id]
            if kind == "W":
                assert place[f"I{layer}m{m}"] < place[op.id]
    batches = request.micro_batches * (request.partition_activations or 1)
    layers = {layer for kind, layer in done if kind == "F"}
    assert layers == set(range(len(layers)))
    for layer in layers:
        assert done["F", layer] == batches
        assert done["B", layer] + done["I", layer] == batches
        assert done["W", layer] == done["I", layer]
    assert done["E", len(layers)] == batches
    sent: Counter[tuple[str, int, int, int]] = Counter()
    got: Counter[tuple[str, int, int, int]] = Counter()
    for rank, schedule in enumerate(world.ranks):
        for op in schedule.ops:
            if op.lane == "send":
                sent[op.id[1:], rank, op.peer, op.nbytes] += 1
            elif op.lane == "recv":
                got[op.id[1:], op.peer, rank, op.nbytes] += 1
    assert sent == got
    assert set(sent.values()) <= {1}


@pytest.mark.parametrize("family", ["ddp", "zero1", "zero2", "fsdp", "weight-sharded"])
def test_ranks_that_do_the_same_share_one_schedule(family: str) -> None:
    assert len({id(schedule) for schedule in build(asked(family)).ranks}) == 1


@pytest.mark.parametrize("family", sorted(LAYERED))
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("virtual_stages", 2),
        ("gather_group", "stage"),
        ("fused", True),
        ("partition_activations", 2),
        ("buffer_size", 50),
    ],
)
def test_an_option_changes_the_schedule_or_is_refused(family: str, option: str, value: object) -> None:
    """``dualpipe-v`` and the looped ones have two stages unless asked otherwise."""
    ranks = 1 if FAMILIES[family].one_rank else 4
    request = asked(family, ranks=ranks, layers=12, micro_batches=8)
    with_option = replace(request, **{option: value})
    if option not in FAMILIES[family].options:
        with pytest.raises(ConfigError, match=f"{family} has no option {option}"):
            build(with_option)
    elif option == "virtual_stages" and family != "zero-bubble":
        assert build(with_option) == build(request)
    else:
        assert build(with_option) != build(request)


def test_buffers_to_look_ahead_let_the_network_run_beside_the_compute() -> None:
    """With one buffer for gathered weights, a gather waits until the layer before is done."""
    costs = Costs(name="even", seconds=lambda op: {"F": 1.0, "B": 2.0, "GW": 0.9, "SG": 0.9}.get(op.id.kind, 0.0))
    request = asked("fsdp", layers=8)
    alone, ahead = (build(replace(request, lookahead=n)) for n in (0, 1))
    assert simulate(alone, costs).time == pytest.approx(8 * 1.9 + 8 * 3.8)
    assert simulate(ahead, costs).time < 8 * (1 + 2) + 3
    assert pools(alone)["weights"] == (1, SIZES.weights)
    assert pools(ahead)["weights"] == (2, SIZES.weights)
    grid = replace(asked("pipeline-fsdp", layers=16), micro_batches=2, gather_group="stage")  # 2 stages of 8 layers
    late, early = (simulate(build(replace(grid, lookahead=n)), costs).time for n in (0, 1))
    assert early < 0.75 * late


def test_parts_that_stream_meet_the_other_ranks_as_parts_on_the_device_do() -> None:
    """ZeRO-3 of the same layers: a rank computes the same, gathers the same weights but for those that stay from the
    last forward to its backward, and scatters the same gradients, wherever its parts live."""
    layers, ranks = 4, 2
    on_device = build(asked("fsdp", layers=layers, ranks=ranks, micro_batches=ranks)).ranks[0]
    program = layer_program(SIZES, layers)
    parts = replace(program, groups=tuple(replace(group, trainable=ALIGN) for group in program.groups))
    settings = replace(all_on_disk(parts, chunk=ALIGN), depths=Depths(weights=1))
    streamed = lower_step("vertical", parts, settings, seat=streaming_seat(ranks))
    done = []
    for schedule in (on_device, streamed):
        computed = [op.id for op in schedule.lanes["compute"] if op.id.kind != "OD"]
        gathered = [op.id for op in schedule.lanes["net"] if op.id.kind == "GW"]
        scattered = [op.id.group for op in schedule.lanes["net"] if op.id.kind == "SG"]
        done.append((computed, [name for name in gathered if name != f"GW{layers - 1}@B{layers - 1}"], scattered))
    assert done[0] == done[1]
    assert [len(names) for names in done[0]] == [2 * layers + 1, 2 * layers - 1, layers]


def pools(world: World) -> dict[str, tuple[int, int]]:
    return {pool.name: (pool.count, pool.size) for pool in world.ranks[0].pools}


def test_partitioned_activations_keep_a_part_of_each_layers_input() -> None:
    """ZeRO-R: two ranks that compute the same micro-batches keep half of each layer's input, and gather it again."""
    layers, ranks, items = 6, 4, 2
    whole = build(asked("zero2", layers=layers, ranks=ranks // 2, micro_batches=4))
    parts = build(replace(asked("zero2", layers=layers, ranks=ranks, micro_batches=4), partition_activations=2))
    assert pools(whole)["activations"] == (layers + 1, SIZES.activation * items)
    assert pools(parts)["activations"] == (2, SIZES.activation * items)
    assert pools(parts)["activation_shards"] == (layers, SIZES.activation * items // 2)
    assert pools(parts)["gathered_activations"] == (1, SIZES.activation * items)
    assert parts.groups == {"data0": (0, 2), "data1": (1, 3), "model0": (0, 1), "model1": (2, 3)}


def test_bytes_are_those_of_ring_collectives_and_of_what_is_passed() -> None:
    """An all-reduce sends 2 (P - 1) / P of the gradient."""
    ddp = simulate(build(asked("ddp", layers=3, ranks=2, micro_batches=2)), COSTS["unit"])
    assert ddp.bytes_per_lane()["net"] == 2 * 3 * SIZES.gradient  # both ranks, each 2 / 2 of it
    passed = simulate(build(asked("1f1b", ranks=3, micro_batches=5)), COSTS["unit"]).bytes_per_lane()
    assert passed["send"] == passed["recv"] == 2 * 5 * (SIZES.activation + SIZES.activation_gradient)


@pytest.mark.parametrize("family", ["ddp", "zero1", "zero2", "fsdp"])
def test_a_constant_buffer_takes_the_same_bytes_in_pieces(family: str) -> None:
    """ZeRO-R: the buffer is as large as asked, however large the layers."""
    request = asked(family, ranks=2)
    at_once, pieces = build(request), build(replace(request, buffer_size=50))
    kind = "AR" if family == "ddp" else "SG"
    moved = [[op.nbytes for op in world.ranks[0].ops if op.id.kind == kind] for world in (at_once, pieces)]
    assert sum(moved[0]) == sum(moved[1])
    assert len(moved[1]) == request.layers * 3  # 130 in pieces of 50
    assert pools(pieces)["buffers"] == (1, 50)
    assert "buffers" not in pools(at_once)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (asked("dpp"), "no schedule 'dpp'. Known: single"),
        (asked("single"), "single is for one rank, and 4 were asked for"),
        (asked("ddp", micro_batches=6), "multiple of 4"),
        (replace(asked("fsdp"), partition_activations=3), "partition_activations=3 does not divide 4 ranks"),
        (replace(asked("fsdp"), partition_activations=1), "partition_activations=1 must be at least 2"),
        (replace(asked("fsdp"), buffer_size=0), "buffer_size=0 must be at least 1"),
        (asked("pipeline-fsdp", layers=3, ranks=16), "4 stages to a pipeline, which need a layer each"),
        (asked("ddp", layers=0), "layers=0 must be at least 1"),
        (replace(asked("ddp"), sizes=replace(SIZES, state=-1)), "sizes.state=-1 must be at least 0"),
    ],
)
def test_what_a_family_cannot_do_is_said(request_: FamilyRequest, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(request_)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_cycles_are_looked_for_while_a_schedule_is_made(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def lower(request: FamilyRequest) -> World:
        seen.append(gc.isenabled())
        if request.layers > 1:
            raise ConfigError("too many")
        return World(name="probe", ranks=(), groups={})

    monkeypatch.setitem(FAMILIES, "probe", ScheduleFamily(summary="", lower=lower))
    (gc.enable if enabled else gc.disable)()
    try:
        build(asked("probe", layers=1))
        assert gc.isenabled() == enabled
        with pytest.raises(ConfigError):
            build(asked("probe"))
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert seen == [False, False]


def test_no_cycles_are_looked_for_while_a_steps_schedule_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule by the way that an engine and a planner take."""
    seen: list[bool] = []
    emit = Emitter.emit

    def watched(self: Emitter, *args: Any, **kwargs: Any) -> Any:
        seen.append(gc.isenabled())
        return emit(self, *args, **kwargs)

    monkeypatch.setattr(Emitter, "emit", watched)
    random_case(0, largest=3).build()
    assert seen
    assert not any(seen)
    assert gc.isenabled()
