"""Schedules of layers on a machine: every op takes what its work takes, and a rank steps only what it holds."""

from dataclasses import replace

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.hardware.machine import Network
from penstock.hardware.profiles import shipped_machine
from penstock.planner.layer_costs import layer_costs, layer_sizes
from penstock.schedule.ir.text import parse_schedule, parse_world
from penstock.schedule.ir.worlds import World
from penstock.schedule.lower.families import build
from penstock.schedule.lower.request import FamilyRequest
from penstock.schedule.place import Format
from penstock.shape.huggingface import model_shape
from penstock.shape.model import stage_times
from penstock.sim.costs import Costs

FORM = Format.of("bf16", 2)
PROFILE = model_shape("llama-8b").with_layers(4).profile(1, 2048, FORM)
BLOCK = PROFILE.program.groups[PROFILE.program.stages[1].forward_reads[0]].numel
MACHINE = replace(shipped_machine("a100-40g"), network=Network(bandwidth=1e9, latency=1e-3), overhead=1e-2)
TIMES = stage_times(PROFILE, MACHINE, "bf16")


def world_of(family: str) -> World:
    return build(FamilyRequest(family=family, layers=4, ranks=4, micro_batches=8, sizes=layer_sizes(PROFILE, FORM)))


def costs_of(world: World) -> Costs:
    return layer_costs(MACHINE, PROFILE, FORM, TIMES, "adamw.bf16", world)


def test_sizes_are_those_of_a_block() -> None:
    sizes = layer_sizes(PROFILE, FORM)
    assert (sizes.weights, sizes.gradient, sizes.state) == (2 * BLOCK, 4 * BLOCK, 10 * BLOCK)
    assert sizes.activation == 2048 * 4096 * 2
    assert layer_sizes(PROFILE, Format.of("fp32", 2)).state == 8 * BLOCK  # the master copy is the weights


def test_computing_takes_a_blocks_time_for_each_micro_batch_and_the_loss_the_epilogues() -> None:
    world = world_of("1f1b")
    seconds, ops = costs_of(world).seconds, world.ranks[3].by_id
    assert seconds(ops["F3m0"]) == pytest.approx(1e-2 + TIMES.forward[1])
    assert seconds(ops["B3m0"]) == pytest.approx(1e-2 + TIMES.backward[1])
    assert seconds(ops["E4m0"]) == pytest.approx(1e-2 + TIMES.forward[-1])
    together = world_of("pipeline").ranks[0].by_id["F0m0"]
    assert seconds(together) == pytest.approx(1e-2 + 8 * TIMES.forward[1])


def test_the_two_halves_of_a_backward_take_as_long_as_the_whole() -> None:
    world = world_of("zero-bubble")
    seconds, ops = costs_of(world).seconds, world.ranks[0].by_id
    assert seconds(ops["I0m0"]) + seconds(ops["W0m0"]) == pytest.approx(2e-2 + TIMES.backward[1])


@pytest.mark.parametrize(("family", "share"), [("ddp", 1), ("zero1", 1 / 4), ("fsdp", 1 / 4), ("1f1b", 1)])
def test_a_rank_steps_the_share_of_a_layers_state_that_it_holds(family: str, share: float) -> None:
    world = world_of(family)
    step = costs_of(world).seconds(world.ranks[0].by_id["OD0"])
    assert step == pytest.approx(1e-2 + share * BLOCK / MACHINE.device.optimizer["adamw.bf16"])


def test_a_message_takes_its_bytes_over_the_bandwidth_and_the_latency_once() -> None:
    world = world_of("1f1b")
    seconds = costs_of(world).seconds
    send, recv = world.ranks[0].by_id["SA0m0"], world.ranks[1].by_id["RA0m0"]
    assert seconds(send) == pytest.approx(1e-2 + 1e-3 + 2048 * 4096 * 2 / 1e9)
    assert seconds(recv) == 0


def test_where_a_schedule_does_not_say_what_a_rank_holds_a_step_is_of_all_of_it() -> None:
    world = World.of(parse_schedule("schedule mine micro-batches 1 chunk 0\nF0m0\nB0m0\nOD0\n"))
    step = costs_of(world).seconds(world.ranks[0].by_id["OD0"])
    assert step == pytest.approx(1e-2 + BLOCK / MACHINE.device.optimizer["adamw.bf16"])


@pytest.mark.parametrize("line", ["ND0", "NORM", "UN0"])
def test_an_op_that_no_layer_has_is_refused_by_its_name(line: str) -> None:
    world = World.of(parse_schedule(f"schedule mine micro-batches 1 chunk 0\nF0m0\n{line}\n"))
    seconds = costs_of(world).seconds
    with pytest.raises(ScheduleError, match=f"op {line}: no layer of a model has an op {line[:2]}"):
        seconds(world.ranks[0].by_id[line])


def test_any_rank_that_sends_needs_a_network() -> None:
    text = "world w ranks 2\nrank 0\nschedule a micro-batches 1 chunk 0\nRA0m0 peer 1\n"
    world = parse_world(text + "rank 1\nschedule b micro-batches 1 chunk 0\nSA0m0 peer 0\n")
    with pytest.raises(ConfigError, match="has no network between ranks"):
        layer_costs(replace(MACHINE, network=None), PROFILE, FORM, TIMES, "adamw.bf16", world)


def test_ranks_need_a_network_and_an_optimizer_a_rate() -> None:
    alone = replace(MACHINE, network=None)
    with pytest.raises(ConfigError, match="has no network between ranks"):
        layer_costs(alone, PROFILE, FORM, TIMES, "adamw.bf16", world_of("ddp"))
    single = build(FamilyRequest(family="single", layers=4, ranks=1, micro_batches=1, sizes=layer_sizes(PROFILE, FORM)))
    layer_costs(alone, PROFILE, FORM, TIMES, "adamw.bf16", single)
    with pytest.raises(ConfigError, match=r"no rate for the optimizer adagrad\.bf16"):
        layer_costs(alone, PROFILE, FORM, TIMES, "adagrad.bf16", single)
