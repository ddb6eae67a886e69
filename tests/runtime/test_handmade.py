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
from penstock.planner.own_schedule import own_plan
from penstock.runtime.bound import refuse_others
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.text import parse_op, parse_schedule
from penstock.schedule.lower.visits import lower_step
from penstock.schedule.meaning import Needs, prove
from penstock.schedule.program import ALIGN
from tests.models import MODELS
from tests.programs import all_on_disk, transformer
from tests.training import (
    Result,
    assert_same,
    budget,
    master_of,
    plain_loop,
    relative,
    run_steps,
    steps_of,
    torch_adamw,
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
    """The numbers of a schedule that was built, without overlap and all on disk."""
    serial: dict[str, Any] = {"overlap": False, "speculate": False, "delay": 0.0}
    with TemporaryDirectory() as folder:
        return train(CASE, budget(Path(folder, "store")), STEPS, clip_grad_norm=CLIP, **serial)


def edited(*edits: tuple[str, str]) -> Schedule:
    text = str(HANDMADE)
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return parse_schedule(text)


KEPT = (
    ("RW1.1@B1 take i1.1@B1=staged write i1.1@B1 ", "RW1.1@B1 take O1.1=new write O1.1 "),
    (
        "UW1.1@B1 after RW1.1@B1 take W1@B1=blocks read i1.1@B1 write W1@B1 give i1.1@B1 ",
        "UW1.1@B1 after RW1.1@B1 take W1@B1=blocks read O1.1 write W1@B1 ",
    ),
    ("RS1.1 take S1.1=state,O1.1=new write S1.1,O1.1 bytes 98304", "RS1.1 take S1.1=state write S1.1 bytes 65536"),
)
"""The weights of chunk 1.1 that were read for the backward stay in host memory until they are stepped."""


@pytest.mark.parametrize(
    ("own", "overlap"), [(HANDMADE, True), (HANDMADE, False), (edited(*KEPT), True)], ids=["overlap", "serial", "kept"]
)
def test_a_schedule_that_no_builder_makes_gives_the_bits_of_one_that_was_built(
    own: Schedule, overlap: bool, tmp_path: Path
) -> None:
    with wrap(CASE, anywhere(tmp_path), clip_grad_norm=CLIP, schedule=own, overlap=overlap) as engine:
        found = run_steps(engine, STEPS)
        assert engine.plan.schedule.ops == own.ops
        assert {e.op for e in engine.trace} == {op.id for op in own.ops}
        assert engine.last_step is not None
        for lane in ("read", "write", "cpu"):
            assert engine.last_step.bytes_moved[lane] == own.bytes_per_lane()[lane]
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
        ("OP3.1 take W3@F3=blocks read O3.1 ", "OP3.1 take W3@F3=blocks ", "whose home is host, and it is disk"),
        ("read R1.0,S1.0,O1.0 write S1.0,O1.0", "read R1.0,S1.0,O1.0 write S1.0", "changes other buffers than"),
        ("bytes 98304\nDG1.1@B1m1", "bytes 98300\nDG1.1@B1m1", "op AG1.0@B1m1 says that it moves 98300 bytes"),
        ("\nNORM after ND2,NG0.0", "\nNORM after NG0.0", "op NORM may run before ND2"),
        ("pool out host 1 x 4096", "pool out host 1 x 3072", "memory comes in whole pages: write 4096"),
        ("pool own device", "pool more disk 1 x 4096\npool own device", "pool more is on disk"),
        ("OD2 after NORM read G2 ", "OD2 after NORM read G2\nOD2@B2 read G2 ", "op OD2@B2 is for a visit"),
        ("OD2 after NORM read G2 ", "OD2 after NORM read G2\nOD2.0 read G2 ", "op OD2.0 is not of a group"),
        ("OD2 after NORM read G2 ", "OD99 after NORM read G2\nOD2 read G2 ", "op OD99 is of a group that this model"),
        (
            "OP0.0 after NORM read H0.0u0 give H0.0u0 bytes 229376",
            "OP0.0 after NORM read H0.0u0 bytes 229376\nOP0.0@B0 read H0.0u0 give H0.0u0 bytes 229376",
            "op OP0.0@B0 is for a visit",
        ),
        ("F0m1 take A0m1", "F0m1 items 7 take A0m1", "op F0m1 computes 7 micro-batches at once"),
        ("F0m1 take A0m1", "F0m1 bytes 7 take A0m1", "op F0m1 says that it moves 7 bytes"),
        ("NORM after ND2,NG0.0", "NORM after ND2,NG0.0 bytes 4096", "op NORM says that it moves 4096 bytes"),
        ("CM after OP3.1,WS3.1,WW3.1", "CM after OP3.1,WS3.1,WW3.1 elements 5-3", "op CM has elements"),
        ("pool own device", "pool own host", "needs 65536 bytes on the device for G2"),
    ],
)
def test_one_that_would_not_compute_the_step_is_refused_before_anything_runs(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    refuses(edited((old, new)), said, tmp_path)


def test_one_of_several_ranks_that_takes_from_no_pool_is_refused_when_it_is_planned(tmp_path: Path) -> None:
    """That of one rank is checked before; of gradients that wait on disk its ops are put in order to see whose they
    are."""
    assert {"WG", "RG"} <= {op.id.kind for op in HANDMADE.ops}
    with wrap(CASE, anywhere(tmp_path), clip_grad_norm=CLIP, schedule=HANDMADE) as engine:
        engine.prepare(STEPS[0])
        request = engine.inside.planning.request
    with pytest.raises(ScheduleError, match="op B2m0 takes G2 from pool own, which does not exist"):
        own_plan(request, edited(("pool own device", "pool owned device")))


LOADS_W2 = (
    ("pool blocks device 2", "pool blocks device 3"),
    (
        "F2m0 take",
        "UW2.0@F2 take W2@F2=blocks write W2@F2 bytes 65536 elements 0-16384\nF2m0 after UW2.0@F2 take",
    ),
    ("take A2m0=acts read ", "take A2m0=acts read W2@F2,"),
    ("read A1m1 write A2m1", "read W2@F2,A1m1 write A2m1 give W2@F2"),
)
EXTRA_W = (
    ("pool blocks device 2", "pool blocks device 3"),
    ("take A0m0=acts read W0@F0 write A0m0", "take A0m0=acts,W1@F0=blocks read W0@F0 write A0m0,W1@F0"),
    ("UW1.0@F1 after RW1.0@F1 ", "UW1.0@F1 after RW1.0@F1,F0m0 "),
    ("read W1@F1,A0m1 write A1m1 give W1@F1", "read W1@F1,A0m1 write A1m1 give W1@F1,W1@F0"),
)
EARLY_LOAD = (
    (
        "RS3.1 take",
        (
            "RW3.0@F3 take i3.0@F3=large write i3.0@F3 bytes 65536 elements 0-16384\n"
            "UW3.0@F3 after RW3.0@F3 take W3@F3=blocks read i3.0@F3 write W3@F3 give i3.0@F3 "
            "bytes 65536 elements 0-16384\n"
            "RS3.1 take"
        ),
    ),
    (
        (
            "RW3.0@F3 take i3.0@F3=staged write i3.0@F3 bytes 32768\n"
            "UW3.0@F3 after RW3.0@F3 read i3.0@F3 write W3@F3 give i3.0@F3 bytes 32768\n"
        ),
        "",
    ),
    ("UW3.1@F3 after OP3.1 take W3@F3=blocks read", "UW3.1@F3 after OP3.1 read"),
    ("F3m0 after UW3.0@F3", "F3m0 after UW3.1@F3"),
    ("WW3.1 after OP3.1,UW3.1@F3", "WW3.1 after OP3.1,UW3.1@F3,RW3.0@F3"),
)
LATE_AGAIN = (
    ("UW3.1@F3 after OP3.1 take W3@F3=blocks read O3.1 write W3@F3 bytes 32768\n", ""),
    (
        "WW3.1 after OP3.1,UW3.1@F3 read O3.1 give O3.1 bytes 32768\n",
        (
            "WW3.1 after OP3.1 read O3.1 give O3.1 bytes 32768\n"
            "RS3.1@F3 after WW3.1 take Sx=state,Ox=new write Sx,Ox give Sx bytes 98304\n"
            "UW3.1@F3 after RS3.1@F3 take W3@F3=blocks read Ox write W3@F3 give Ox bytes 32768\n"
        ),
    ),
    ("CM after OP3.1,WS3.1,WW3.1", "CM after OP3.1,WS3.1,WW3.1,RS3.1@F3"),
)
CAST = (
    (
        "OP3.1 after RS3.1 read h3.1,S3.1,O3.1 write S3.1,O3.1 give h3.1 bytes 229376",
        "OP3.1 after RS3.1 read h3.1,S3.1,O3.1 write S3.1,O3.1 give h3.1 bytes 212992",
    ),
    ("pool own device", "pool casts device 2 x 65536\npool own device"),
    (
        "take H3.0u0=held read G3@B3 write H3.0u0 bytes 32768",
        "take H3.0u0=held,k30=casts read G3@B3 write H3.0u0,k30 bytes 16384",
    ),
    (
        "take H3.1u0=held read G3@B3 write H3.1u0 give G3@B3 bytes 32768",
        "take H3.1u0=held,k31=casts read G3@B3 write H3.1u0,k31 give G3@B3,k31 bytes 16384",
    ),
    (
        "NG3.0 after DG3.0@B3 read H3.0u0 bytes 32768\nNG3.1 after DG3.1@B3 read H3.1u0 bytes 32768\n",
        "ND3 after DG3.0@B3 read k30 give k30\n",
    ),
    ("NORM after ND2,NG0.0", "NORM after ND2,NG0.0,ND3"),
)
CAST_IN_PLACE = (
    *CAST[:3],
    (CAST[3][0], CAST[3][1].replace(",k31=casts", "").replace("k31", "G3@B3", 1).replace(",k31", "")),
    *CAST[4:],
)
UC_ALIAS = (
    ("UC0m1 after DC0m1 take a0m1=again read C0m1 write a0m1", "UC0m1 after DC0m1 read C0m1 write a0m0"),
    ("B1m0 after UW1.0@B1,UC0m0 ", "B1m0 after UW1.0@B1,UC0m0,UC0m1 "),
    ("give a0m0,D1m0", "give D1m0"),
    ("read W1@B1,G1@B1m1,a0m1,D1m1", "read W1@B1,G1@B1m1,a0m0,D1m1"),
    ("give a0m1,D1m1", "give a0m0,D1m1"),
)
KEPT_BY_ANOTHER_NAME = (
    (" take W1@B1=blocks read i1.1@B1 write W1@B1 give i1.1@B1 ", " take W1@B1=blocks read i1.1@B1 write W1@B1 "),
    KEPT[2],
    ("read H1.1u0,S1.1,O1.1 write S1.1,O1.1", "read H1.1u0,S1.1,i1.1@B1 write S1.1,i1.1@B1"),
    ("WW1.1 after OP1.1,CM read O1.1 give O1.1", "WW1.1 after OP1.1,CM read i1.1@B1 give i1.1@B1"),
)
KEPT_OF_ANOTHER_CHUNK = (
    ("RW1.0@B1 take i1.0@B1=staged write i1.0@B1 ", "RW1.0@B1 take O1.1=new write O1.1 "),
    (
        "UW1.0@B1 after RW1.0@B1 read i1.0@B1 write W1@B1 give i1.0@B1 ",
        "UW1.0@B1 after RW1.0@B1 read O1.1 write W1@B1 ",
    ),
    KEPT[2],
)
KEPT_LATE = (
    ("RS3.1 take S3.1=state,O3.1=new write S3.1,O3.1 bytes 98304", "RS3.1 take S3.1=state write S3.1 bytes 65536"),
    ("OP3.1 after RS3.1 ", "RW3.1@F3 take O3.1=new write O3.1 bytes 32768\nOP3.1 after RS3.1,RW3.1@F3 "),
)
FIRST = "F2m0 take A2m0=acts read A1m0 write A2m0\n"
SECOND = "F2m1 take A2m1=acts read A1m1 write A2m1\n"
STALE = (
    (" give A2m1,D3m1,W3@F3", " give A2m1,D3m1"),
    ("read G3@B3 write H3.0u0 bytes", "read G3@B3 write H3.0u0 give W3@F3 bytes"),
)
UNKNOWN_CHUNK = (
    ("\nRW1.0@F1 ", "\nRW1.7@F1 "),
    ("\nUW1.0@F1 after RW1.0@F1 ", "\nUW1.7@F1 after RW1.7@F1 "),
    ("F1m0 after UW1.0@F1 ", "F1m0 after UW1.7@F1 "),
)


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        (STALE, "op DG3.0@B3 gives back W3@F3, which only stages"),
        (EXTRA_W, "op F0m0 takes W1@F0, which only loads"),
        ((("F1m1 take A1m1=acts read W1@F1,", "F1m1 take A1m1=acts read W1@F1,W0@F0,"),), "has W0@F0, and its stage"),
        (LOADS_W2, "weights of blocks.transformer.h.1 found on host and their state at home on device"),
        (EARLY_LOAD, "op RW3.0@F3 reads chunk 3.1 before the step before has brought it home"),
        (LATE_AGAIN, "op RS3.1@F3 is for a visit"),
        (CAST, "op ND3 takes k30 for a gradient, which it is not"),
        (CAST_IN_PLACE, "op DG3.1@B3 rounds a gradient in G3@B3, which it has to take for that"),
        (UC_ALIAS, "op UC0m1 writes a0m0, which it has to take"),
        (((FIRST + SECOND, SECOND + FIRST),), "op F2m1 comes before micro-batch 0 of its stage"),
        (UNKNOWN_CHUNK, "the chunk in its id is not among them"),
        (KEPT[:2], "op RS1.1 takes O1.1, which RW1.1@B1 took before"),
        (
            (*KEPT[:2], (KEPT[2][0], "RS1.1 after UW1.1@B1 take S1.1=state write S1.1,O1.1 bytes 98304")),
            "use before load: op UW1.1@B1 reads O1.1 before RS1.1 has written it",
        ),
        ((*KEPT[:2], (KEPT[2][0], KEPT[2][1].replace("65536", "98304"))), "op RS1.1 says that it moves 98304 bytes"),
        ((KEPT[0], (KEPT[1][0], KEPT[1][1] + "give O1.1 "), KEPT[2]), "op WW1.1 gives back O1.1, which is not taken"),
        (
            (KEPT[0], (KEPT[1][0], KEPT[1][1].replace("after RW1.1@B1 ", "")), KEPT[2]),
            "use before load: op UW1.1@B1 uses O1.1 before RW1.1@B1 has taken it",
        ),
        ((*KEPT, ("read H1.1u0,S1.1,O1.1 write S1.1,O1.1", "read H1.1u0,S1.1 write S1.1")), "op RS1.1 says"),
        (KEPT_BY_ANOTHER_NAME, "op OP1.1 has i1.1@B1 where what is run looks for O1.1"),
        (KEPT_OF_ANOTHER_CHUNK, "op OP1.1 takes O1.1 for weights of its chunk, which it is not"),
        (KEPT_LATE, "op RW3.1@F3 may run before OP3.1, which it has to come after"),
    ],
)
def test_one_that_would_compute_something_else_is_refused(
    edits: tuple[tuple[str, str], ...], said: str, tmp_path: Path
) -> None:
    more = {"grad_dtype": "bf16"} if edits in (CAST, CAST_IN_PLACE) else {}
    refuses(edited(*edits), said, tmp_path, **more)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("W0@F0", "V0", "op UW0.0@F0 writes V0, and weights on the device are in buffers W0@..."),
        ("W1@F1", "W3@F1", "op UW1.0@F1 takes W3@F1, and is of group 1"),
        ("A0m0", "W1@F0", "op F0m0 takes W1@F0, which only loads of their group may do"),
        ("A0m0", "G1@F0", "op F0m0 has G1@F0, and its stage has no use for that"),
    ],
)
def test_names_of_weights_on_the_device_say_what_is_in_them(old: str, new: str, said: str, tmp_path: Path) -> None:
    refuses(parse_schedule(str(HANDMADE).replace(old, new)), said, tmp_path)


def test_a_step_changes_the_buffers_that_it_reads() -> None:
    program = transformer(1)
    settings = all_on_disk(program, chunk=20 * ALIGN)
    schedule = lower_step("vertical", program, settings)
    step = next(op for op in schedule.ops if op.id.kind == "OP")
    over = replace(step, writes=(*(name for name in step.writes if name in step.reads), step.reads[0]))
    own = replace(schedule, ops=tuple(over if op is step else op for op in schedule.ops))
    with pytest.raises(ScheduleError, match=rf"op {step.id} changes other buffers than those"):
        prove(own, Needs.of(program, settings))


def refuses(own: Schedule, said: str, folder: Path, **more: Any) -> None:
    with pytest.raises(ScheduleError) as caught:  # noqa: SIM117
        with wrap(CASE, anywhere(folder), clip_grad_norm=CLIP, schedule=own, **more) as engine:
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
