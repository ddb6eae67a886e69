"""A schedule that somebody has written by hand, which no builder makes, runs as it stands and gives the same bits."""

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import penstock
from penstock.errors import ScheduleError
from penstock.runtime.bound import refuse_others
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.text import parse_op, parse_schedule
from tests.engine.test_plain import torch_adamw
from tests.models import MODELS
from tests.training import (
    Result,
    assert_same,
    budget,
    master_of,
    plain_loop,
    relative,
    run_steps,
    steps_of,
    train,
    wrap,
)

CASE, CLIP = MODELS["gpt2"], 2.0
STEPS = steps_of(CASE, 4, lengths=(12, 9))
HANDMADE = parse_schedule(Path(__file__).with_name("handmade.txt").read_text())


def anywhere(folder: Path, **places: Any) -> penstock.Budget:
    """A budget that leaves to the schedule where everything lives."""
    return budget(folder, **{"weights": None, "state": None, "durability": "none"} | places)


@cache
def wanted() -> Result:
    """Of a schedule that was built, without overlap and all on disk."""
    serial: dict[str, Any] = {"overlap": False, "speculate": False, "delay": 0.0}
    with TemporaryDirectory() as folder:
        return train(CASE, budget(Path(folder, "store")), STEPS, clip_grad_norm=CLIP, **serial)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_schedule_that_no_builder_makes_gives_the_bits_of_one_that_was_built(overlap: bool, tmp_path: Path) -> None:
    with wrap(CASE, anywhere(tmp_path), clip_grad_norm=CLIP, schedule=HANDMADE, overlap=overlap) as engine:
        found = run_steps(engine, STEPS)
        assert engine.plan.schedule.ops == HANDMADE.ops
        assert {e.op for e in engine.trace} == {op.id for op in HANDMADE.ops}
        assert engine.last_step is not None
        for lane in ("read", "write", "cpu"):
            assert engine.last_step.bytes_moved[lane] == HANDMADE.bytes_per_lane()[lane]
    assert_same(found, wanted())
    assert {s.clipped for s in found.stats} == {True, False}
    assert found.placed == {"device", "host", "disk"}


@pytest.mark.usefixtures("one_thread")
def test_it_trains_as_plain_torch_does_and_goes_on_from_its_store(tmp_path: Path) -> None:
    model = CASE.model()
    plain_model = copy.deepcopy(model)
    with wrap(CASE, anywhere(tmp_path), model=model, clip_grad_norm=CLIP, schedule=HANDMADE) as engine:
        first = run_steps(engine, STEPS[:2])
    with wrap(CASE, anywhere(tmp_path), clip_grad_norm=CLIP, schedule=HANDMADE) as engine:
        rest = run_steps(engine, STEPS[2:])
        plain = plain_loop(CASE, plain_model, engine, STEPS, torch_adamw, CLIP)
        assert first.losses + rest.losses == pytest.approx(plain.losses, rel=1e-6)
        assert first.norms + rest.norms == pytest.approx(plain.norms, rel=1e-5)
        assert relative(master_of(engine), plain.parameters) <= 1e-6
    assert first.losses + rest.losses == wanted().losses


def edited(old: str, new: str) -> Schedule:
    text = str(HANDMADE)
    assert text.count(old) == 1, old
    return parse_schedule(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("F1m0 after UW1.0@F1 ", "F1m0 ", "op F1m1 gives back W1@F1, which is not taken"),
        ("i1.0@F1 bytes 65536 elements 0-16384\nF1m0", "i1.0@F1 bytes 32768 elements 0-8192\nF1m0", "which it is not"),
        (
            "write i1.0@F1 bytes 65536 elements 0-16384",
            "write i1.0@F1 bytes 65536 elements 4096-16384",
            "no whole chunks",
        ),
        ("NG3.0 after DG3.0@B3 ", "NG3.0 elements 0-8192 after DG3.0@B3 ", "only loads of weights have"),
        ("\nRW1.0@B1 ", "\nRW3.0@B1 ", "UW1.0@B1 waits for RW1.0@B1, which does not exist"),
        ("OD2 after NORM ", "OD2 ", "op OD2 may run before NORM"),
        ("OP3.1 take W3@F3=blocks read S3.1 ", "OP3.1 take W3@F3=blocks ", "whose home is host, and it is disk"),
        ("read R1.0,S1.0 write S1.0", "read R1.0,S1.0", "has 0 buffers for state and new weights, and needs 1"),
        ("bytes 98304\nDG1.1@B1m1", "bytes 98300\nDG1.1@B1m1", "op AG1.0@B1m1 says that it moves 98300 bytes"),
        ("\nNORM after ND2,NG0.0", "\nNORM after NG0.0", "op NORM may run before ND2"),
        ("pool out host 1 x 4096", "pool out host 1 x 3072", "writes whole pages, and C1m1 has 3072 bytes"),
        ("pool own device", "pool own host", "needs 65536 bytes on the device for G2"),
    ],
)
def test_one_that_would_not_compute_the_step_is_refused_before_anything_runs(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    own = edited(old, new)
    with pytest.raises(ScheduleError) as caught:  # noqa: SIM117
        with wrap(CASE, anywhere(tmp_path), clip_grad_norm=CLIP, schedule=own) as engine:
            engine.step(STEPS[0])
    assert said in str(caught.value), str(caught.value)


@pytest.mark.parametrize("op", ["AR0 group all bytes 8", "GW1@F1 group all bytes 8", "SA1m0 peer 1", "RD1m0 peer 1"])
def test_ops_between_ranks_are_refused_by_what_can_run(op: str) -> None:
    """They are ops like others for whoever reads a schedule; what does them comes with ranks."""
    more = replace(HANDMADE, ops=(*HANDMADE.ops, parse_op(op)))
    kinds = dict.fromkeys({known.id.kind for known in HANDMADE.ops})
    refuse_others(HANDMADE, kinds)
    with pytest.raises(ScheduleError, match=f"op {op.split()[0]} of schedule handmade is for lane"):
        refuse_others(more, kinds)
