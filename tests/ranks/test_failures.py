"""A rank that fails, is killed, hangs or does something else ends all of them, each with an error that names it; what
was committed is there, and all go on from one step.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.errors import ConfigError, ModelError, NonFiniteError, RankError, StoreError
from penstock.ranks import watch
from penstock.state.values import committed
from penstock.store.layout import ALIGN, Layout
from penstock.store.store import Store
from tests.models import MODELS, PLAIN
from tests.ranks.launched import Launched
from tests.ranks.test_calls import give_up_when_told
from tests.ranks.worlds import RankFailedError, World, refusals, together
from tests.training import AT_ONCE, budget, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = PLAIN
LENGTHS = (12, 8, 10, 12)


def micro_batches(mesh: DeviceMesh, count: int, first: int = 1) -> list[Any]:
    share = len(LENGTHS) // mesh.size()
    begin = mesh.get_rank() * share
    return [step[begin : begin + share] for step in steps_of(CASE, count, first=first, lengths=LENGTHS)]


def steps(mesh: DeviceMesh, disk: Path, count: int, **settings: Any) -> tuple[int, list[float]]:
    """The step that a run on a store began after, and its losses."""
    with wrap(CASE, budget(disk), mesh=mesh, **settings) as engine:
        begun = engine.step_count
        return begun, run_steps(engine, micro_batches(mesh, count, first=begun + 1)).losses


@cache
def whole() -> list[float]:
    """The losses of four steps of two ranks that nothing happens to: those of one process that sums as they do."""
    with wrap(CASE, budget(None), strands=2) as engine:
        return run_steps(engine, steps_of(CASE, 4, lengths=LENGTHS)).losses


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of two ranks that have done a step. Copy it; it is shared."""
    made = tmp_path_factory.mktemp("ranks") / "store"
    together(2, steps, made, 1)
    return made


@pytest.fixture
def stored(one_step: Path, tmp_path: Path) -> Path:
    """Such a store of one's own."""
    return Path(shutil.copytree(one_step, tmp_path / "store"))


def others(found: list[Any], rank: int) -> list[RankFailedError]:
    kept = [f for r, f in enumerate(found) if r != rank]
    assert all(isinstance(f, RankFailedError) for f in kept), kept
    return kept


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize(("axis", "lingers"), [("dp_shard", 1), ("pp", 1)])
def test_who_gives_another_rank_up_ends_by_its_own_error(axis: str, lingers: int, tmp_path: Path) -> None:
    """And not by a signal, as what still waits for others ends while the process does, or later."""
    words = ["-m", "tests.ranks.given_up", axis, str(lingers)]
    *ended, (code, _, _) = Launched(4, words, tmp_path).outcomes()
    assert code == -signal.SIGKILL
    for code, _, errors in ended:
        assert code == 1, errors
        assert "RankError: rank 3 was killed" in errors


def to_be_ended(mesh: DeviceMesh, disk: Path, how: int, victim: int) -> None:
    """In the third step of one rank, before its backward."""
    with wrap(CASE, budget(disk), mesh=mesh, **AT_ONCE) as engine:
        first, second, third = micro_batches(mesh, 3)
        engine.step(first)
        engine.step(second)
        if how == signal.SIGSTOP:
            watch.SILENT = 3.0
        if mesh.get_rank() == victim:
            engine.model.head.register_forward_hook(lambda *_: os.kill(os.getpid(), how))
        engine.step(third)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_rank_that_is_killed_ends_the_others_in_five_seconds(victim: int, tmp_path: Path) -> None:
    """Each time ``test_accelerator`` kills the other one, on a device."""
    world = World(2, to_be_ended, tmp_path / "store", signal.SIGKILL, victim)
    world.processes[victim].join()
    since = time.monotonic()
    (other,) = others(world.outcomes(), victim)
    assert time.monotonic() - since < 5
    assert (other.kind, other.said) == ("RankError", f"rank {victim} was killed")
    assert together(2, steps, tmp_path / "store", 2) == [(2, whole()[2:])] * 2


def test_a_rank_that_hangs_ends_the_others(tmp_path: Path) -> None:
    world = World(2, to_be_ended, tmp_path / "store", signal.SIGSTOP, 1)
    pid = world.processes[1].pid
    assert pid is not None
    while "T" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
        time.sleep(0.01)
    since = time.monotonic()
    world.processes[0].join(20)
    assert time.monotonic() - since < 7
    os.kill(pid, signal.SIGKILL)
    (other,) = others(world.outcomes(), 1)
    assert (other.kind, other.said) == ("RankError", "rank 1 has not answered for 3 s")


def failing(mesh: DeviceMesh, disk: Path | None, where: str, **settings: Any) -> None:
    with wrap(CASE, budget(disk), mesh=mesh, **settings) as engine:
        (first, second) = micro_batches(mesh, 2)
        engine.step(first)
        if mesh.get_rank() == 1:
            if where == "micro-batches":
                second = second[:1]
            if where == "caller":
                raise OSError("no more data")
            if where == "forward":
                engine.model.head.register_forward_hook(_fails)
            if where == "commit":
                engine.inside.resources.commits.store.commits.append = _fails  # type: ignore[union-attr, method-assign]
            if where == "fill":
                engine.inside.resources.arrays.complete_step = _fails  # type: ignore[method-assign]
            if where == "write":
                engine.inside.resources.commits.store.write = _fails  # type: ignore[union-attr, method-assign]
        engine.step(second)


def _fails(*_: object, **__: object) -> None:
    raise StoreError("the drive is gone")


@pytest.mark.parametrize(
    ("where", "mine", "theirs"),
    [
        ("caller", "OSError", "rank 1 has failed: OSError: no more data"),
        ("forward", "StoreError", "rank 1 has failed: StoreError: the drive is gone"),
        ("write", "StoreError", "rank 1 has failed: StoreError: the drive is gone"),
        ("fill", "StoreError", "rank 1 has failed: StoreError: the drive is gone"),
        ("commit", "StoreError", "the drive is gone"),
    ],
)
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "settings",
    [AT_ONCE, {"overlap": False}, {"delay": 0.5}, {"schedule": "horizontal"}],
    ids=["", "serial", "delayed", "horizontal"],
)
def test_what_fails_on_one_rank_is_said_on_all(
    where: str, mine: str, theirs: str, settings: Mapping[str, Any], tmp_path: Path
) -> None:
    found = World(2, failing, tmp_path / "store", where, **settings).outcomes()
    (other,) = others(found, 1)
    assert found[1].kind == mine
    assert other.kind == "RankError"
    assert theirs in other.said
    if settings.get("delay"):
        return
    begun = [begun for begun, _ in together(2, steps, tmp_path / "store", 0)]
    assert begun == [1, 1], "the second step was not committed by all, so by nobody"


def left_over(mesh: DeviceMesh) -> None:
    model = CASE.model(seed=0)
    if mesh.get_rank() == 1:
        CASE.loss_fn(model, CASE.micro_batches(1)[0]).backward()
    with wrap(CASE, budget(None), mesh=mesh, model=model):
        pass


def test_a_gradient_that_one_rank_has_before_wrap_is_said_on_all() -> None:
    found = World(2, left_over).outcomes()
    (other,) = others(found, 1)
    assert found[1].kind == "ModelError"
    assert "has a gradient already" in found[1].said
    assert (other.kind, other.said) == ("RankError", f"rank 1 has failed: ModelError: {found[1].said}")


def odd(mesh: DeviceMesh, **settings: Any) -> None:
    mine = {key: values[mesh.get_rank()] for key, values in settings.items()}
    with wrap(CASE, budget(None), mesh=mesh, **mine) as engine:
        engine.step(micro_batches(mesh, 1)[0])


ODD: dict[str, list[Any]] = {
    "seed": [1, 2],
    "optimizer": [penstock.AdamW(lr=1e-3), penstock.AdamW(lr=2e-3)],
    "clip_grad_norm": [1.0, None],
    "precision": ["fp32", "bf16"],
}


@pytest.fixture(scope="module")
def unequal() -> list[dict[str, Any]]:
    """By rank what is said of settings, models and calls that are not those of the other one; and the steps of those
    who go on after that."""
    return together(2, all_that_is_unequal)


def all_that_is_unequal(mesh: DeviceMesh) -> dict[str, Any]:
    return {
        "settings": refusals(mesh, odd, [{name: values} for name, values in ODD.items()]),
        "micro-batches": refusals(mesh, failing, [{"disk": None, "where": "micro-batches"}]),
        "calls": refusals(mesh, unlike, [{"what": what} for what in UNLIKE]),
        "goes on": unlike_once(mesh),
    }


def test_another_number_of_micro_batches_is_said_on_all(unequal: list[dict[str, Any]]) -> None:
    for of_rank in unequal:
        ((kind, said),) = of_rank["micro-batches"]
        assert kind == "ConfigError"
        assert "the same number of micro-batches" in said


def test_other_settings_on_one_rank_are_said_on_all(unequal: list[dict[str, Any]]) -> None:
    for of_rank in unequal:
        for (kind, said), name in zip(of_rank["settings"], ODD, strict=True):
            assert kind == "ConfigError", said
            assert "all ranks need the same" in said
            assert name in said


def unlike(mesh: DeviceMesh, what: str) -> None:
    own = mesh.get_rank() == 1
    model = (MODELS["qwen3"] if own and what == "model" else CASE).model(seed=int(own and what == "values"))
    with wrap(CASE, budget(None), mesh=mesh, model=model) as engine:
        first, second = micro_batches(mesh, 2)
        engine.step(first)
        if own and what == "lr":
            engine.optimizer.param_groups[0]["lr"] = 0.5
        if own and what == "evaluates":
            engine.evaluate(second)
        if own and what == "reads":
            list(engine.master_parameters())
        if what == "order":
            values = engine.values()
            for name in sorted(values.parameters, reverse=own):
                values.parameter(name)
        engine.step(second)


UNLIKE = {
    "model": "model",
    "values": "values of the model, before its first step",
    "lr": "lr of param group 0, and theirs differ (rank 0: 0.001; rank 1: 0.5)",
    "evaluates": "call, and theirs differ (rank 0: step; rank 1: evaluate)",
    "reads": "call, and theirs differ (rank 0: step; rank 1: values)",
    "order": "values to read",
}


def test_another_model_learning_rate_or_call_on_one_rank_is_said_on_all(unequal: list[dict[str, Any]]) -> None:
    for of_rank in unequal:
        for (kind, said), wanted in zip(of_rank["calls"], UNLIKE.values(), strict=True):
            assert kind == "ConfigError", said
            assert f"all ranks need the same {wanted}" in said
            assert ("torch.manual_seed(0), on each" in said) == wanted.startswith("values of the model")


def unlike_once(mesh: DeviceMesh) -> int:
    with wrap(CASE, budget(None), mesh=mesh) as engine:
        first, second = micro_batches(mesh, 2)
        with pytest.raises(penstock.ConfigError, match="all ranks need the same call") as error:
            (engine.evaluate if mesh.get_rank() else engine.step)(first)
        assert engine.inside.resources.ranks.is_of_all(error.value)
        engine.step(second)
        return engine.step_count


def test_a_call_that_ranks_find_to_be_another_on_each_ends_nothing(unequal: list[dict[str, Any]]) -> None:
    """An error that one of them told the others could reach these before their own."""
    assert [of_rank["goes on"] for of_rank in unequal] == [1, 1]


def closing(mesh: DeviceMesh) -> None:
    with wrap(CASE, budget(None), mesh=mesh) as engine:
        for step in micro_batches(mesh, 1 + mesh.get_rank()):
            engine.step(step)


def test_a_rank_that_ends_early_is_said() -> None:
    for f in World(2, closing).outcomes():
        assert f.kind == "RankError"
        assert "tells its end of the run" in f.said
        assert "give all ranks the same calls" in f.said


def in_another_order(mesh: DeviceMesh, call: str) -> None:
    """Two engines, whose calls one rank makes in the other order."""
    (step,) = micro_batches(mesh, 1)
    with wrap(CASE, budget(None), mesh=mesh) as first, wrap(CASE, budget(None), mesh=mesh) as second:
        give_up_when_told([first, second])
        for engine in (second, first) if mesh.get_rank() == 1 else (first, second):
            engine.close() if call == "close" else engine.step(step)


@pytest.mark.parametrize("call", ["close", "step"])
def test_of_calls_of_two_engines_in_different_orders_it_is_said_who_is_waited_for(call: str) -> None:
    for f in World(2, in_another_order, call).outcomes():
        assert f.kind == "RankError"
        assert re.search(r"TimeoutError: rank (0 .* for rank 1|1 .* for rank 0): all ranks make every call", f.said)


def alone_on(disk: Path) -> None:
    with wrap(CASE, budget(disk / "rank-0")):
        raise AssertionError("not refused")


def test_one_process_does_not_take_a_ranks_store_for_its_own(stored: Path) -> None:
    with pytest.raises(StoreError, match="has the part of rank 0 of 2, and what is asked for is all of the state"):
        alone_on(stored)


def test_one_process_does_not_begin_anew_beside_the_stores_of_ranks(stored: Path) -> None:
    said = "rank-0 has the state of a rank of several, and this run, of 1, would begin anew"
    with pytest.raises(StoreError, match=said), wrap(CASE, budget(stored)):
        pass


@pytest.mark.parametrize("step", [0, 3])
def test_one_process_asks_a_ranks_store_on_several_drives_as_a_whole(tmp_path: Path, step: int) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    with Store.create([drive / "rank-0" for drive in drives], Layout.build([("a", ALIGN, 2)]), model={}) as store:
        store.commit({"step": step, "whole": True})
    said = "a/rank-0 has the state of a rank of several, and this run, of 1, would begin anew"
    with nullcontext() if step == 0 else pytest.raises(StoreError, match=said), wrap(CASE, budget(drives)):
        pass


def test_ranks_do_not_begin_anew_beside_the_store_of_one_process(tmp_path: Path) -> None:
    with wrap(CASE, budget(tmp_path)) as engine:
        run_steps(engine, steps_of(CASE, 1))
    for found in World(2, steps, tmp_path, 1).outcomes():
        assert found.kind == "StoreError"
        assert "has the state of one process, and this run, of 2, would begin anew" in found.said


def test_fewer_ranks_do_not_take_the_stores_of_more_that_each_have_all_of_the_state(tmp_path: Path) -> None:
    """They would leave the others behind, who could not go on."""
    together(2, steps, tmp_path / "store", 1, stage=0)
    said = "has all of the state, as rank 0 of 2, and what is asked for is all of the state, of one process"
    with pytest.raises(StoreError, match=said):
        alone_on(tmp_path / "store")
    with pytest.raises(StoreError, match=said), committed([[tmp_path / "store" / "rank-0"]]):
        pass
    (two := tmp_path / "two").mkdir()
    with wrap(CASE, budget(two / "rank-0")) as engine:
        run_steps(engine, steps_of(CASE, 1))
    shutil.copytree(two / "rank-0", two / "rank-1")
    for found in World(2, steps, two, 1, stage=0).outcomes():
        assert "has all of the state, of one process, and what is asked for is all of the state, as rank" in found.said


def outside(mesh: DeviceMesh, members: list[int]) -> None:
    of_some = DeviceMesh("cpu", members, mesh_dim_names=("dp_shard",))
    with wrap(CASE, budget(None), mesh=of_some, plan=None) as engine:
        engine.step(CASE.micro_batches(1, seed=mesh.get_rank()))


@pytest.mark.parametrize("members", [[0], [0, 1]])
def test_a_rank_outside_of_its_mesh_is_refused(members: list[int]) -> None:
    """Of a mesh of one rank, too: it would train by itself."""
    *inside, last = World(len(members) + 1, outside, members).outcomes()
    assert inside == [None] * len(members)
    assert last.kind == "ConfigError"
    assert f"rank {len(members)} is not in the mesh" in last.said


def test_one_of_several_processes_that_has_no_mesh_says_that_it_trains_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As it is where ``mesh`` was forgotten."""
    for count, said in (("2", True), ("1", False)):
        caplog.clear()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("WORLD_SIZE", count)
        with wrap(CASE, budget(None)):
            assert ("one of 2 processes, and wrap was given no mesh" in caplog.text) == said


def normed(mesh: DeviceMesh) -> None:
    case = MODELS["skips"]
    with wrap(case, budget(None), mesh=mesh) as engine:
        engine.step(case.micro_batches(1, seed=mesh.get_rank()))


def test_buffers_that_a_forward_changes_are_refused() -> None:
    for f in World(2, normed).outcomes():
        assert f.kind in (ModelError.__name__, RankError.__name__)
        assert "running_mean" in f.said or "num_batches_tracked" in f.said or "running_var" in f.said
        assert "sync_buffers" in f.said


def records(mesh: DeviceMesh, disk: Path) -> None:
    """One rank has a commit that the other one has not: it was killed in between."""
    with wrap(CASE, budget(disk), mesh=mesh, **AT_ONCE) as engine:
        engine.step(micro_batches(mesh, 1)[0])
        if mesh.get_rank() == 0:
            store = engine.inside.resources.commits.store
            assert store is not None
            append = store.commits.append

            def then_die(*args: Any) -> None:
                append(*args)
                os.kill(os.getpid(), signal.SIGKILL)

            store.commits.append = then_die  # type: ignore[method-assign]
        if mesh.get_rank() == 1:
            engine.inside.resources.commits.store.commits.append = lambda *_: time.sleep(0.5)  # type: ignore[union-attr, method-assign]
        engine.step(micro_batches(mesh, 1, first=2)[0])


def test_a_commit_that_not_all_ranks_have_is_taken_back(tmp_path: Path) -> None:
    World(2, records, tmp_path / "store").outcomes()
    assert together(2, steps, tmp_path / "store", 2) == [(1, whole()[1:3])] * 2


def averaged(mesh: DeviceMesh, disk: Path) -> tuple[float, dict[str, torch.Tensor]]:
    with wrap(CASE, budget(disk), mesh=mesh) as engine:
        first, second = micro_batches(mesh, 2)
        engine.step(first)
        return engine.evaluate(second), dict(engine.master_parameters())


def test_ranks_evaluate_together(tmp_path: Path) -> None:
    found = together(2, averaged, tmp_path / "store")
    with wrap(CASE, budget(None), strands=2) as engine:
        first, second = steps_of(CASE, 2, lengths=LENGTHS)
        engine.step(first)
        assert {loss for loss, _ in found} == {engine.evaluate(second)}
        for name, tensor in engine.master_parameters():
            assert all(torch.equal(tensor, parameters[name]) for _, parameters in found)


def test_a_store_is_that_of_its_rank(stored: Path) -> None:
    for rank in range(2):
        with Store.open([stored / f"rank-{rank}"], writable=False) as store:
            assert (store.model["rank"], store.model["ranks"], store.model["strands"]) == (rank, 2, 2)


def learns(
    what: str, batches: Sequence[Any], where: penstock.Budget, *, mine: bool, **settings: Any
) -> tuple[str, float]:
    """The error of a step in which a loss is no number, ``mine`` or another rank's, and the loss of the next one."""
    broken = False

    def loss_fn(model: Any, micro_batch: Any) -> torch.Tensor:
        loss = CASE.loss_fn(model, micro_batch)
        return loss * float("nan") if broken else loss

    with wrap(CASE, where, loss_fn=loss_fn, **settings) as engine:
        first, second = batches
        engine.step(first)
        broken = mine
        with pytest.raises(NonFiniteError) as caught:
            (engine.evaluate if what == "evaluate" else engine.step)(second)
        broken = False
        return str(caught.value), engine.step(second).loss


def not_a_number(mesh: DeviceMesh) -> list[tuple[str, float]]:
    """One rank's loss is none; all learn it, and go on."""
    mine, batches = mesh.get_rank() == 1, micro_batches(mesh, 2)
    return [
        learns(what, batches, budget(None), mine=mine, mesh=mesh, schedule=schedule)
        for what, schedule in (("evaluate", "vertical"), ("step", "vertical"), ("step", "horizontal"))
    ]


def test_a_loss_that_is_no_number_on_one_rank_is_known_to_all() -> None:
    for (mine, loss), (theirs, other) in zip(*together(2, not_a_number), strict=True):
        assert "rank 1" in mine
        assert "the loss is nan" in theirs
        assert loss == other


def interrupted(mesh: DeviceMesh, disk: Path) -> int:
    try:
        with wrap(CASE, budget(disk, weights="host", state="host"), mesh=mesh) as engine:
            begun = engine.step_count
            engine.step(micro_batches(mesh, 1, first=begun + 1)[0])
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return begun


def test_an_interrupt_of_all_ranks_keeps_what_is_in_memory(tmp_path: Path) -> None:
    assert [together(2, interrupted, tmp_path / "store") for _ in range(2)] == [[0, 0], [1, 1]]


def full(mesh: DeviceMesh, disk: Path, fails: bool) -> int:
    with pytest.MonkeyPatch.context() as patch:
        if fails and mesh.get_rank() == 1:
            patch.setattr(Store, "create", _fails)
        with wrap(CASE, budget(disk), mesh=mesh) as engine:
            return engine.step(micro_batches(mesh, 1)[0]).step


def test_a_beginning_that_came_to_nothing_on_one_rank_can_be_done_again(tmp_path: Path) -> None:
    found = World(2, full, tmp_path / "store", True).outcomes()
    assert {f.kind for f in found} <= {"StoreError", "RankError"}
    assert together(2, full, tmp_path / "store", False) == [1, 1]


@pytest.mark.parametrize("lost", [pytest.param(None, marks=pytest.mark.campaign), 1])
def test_what_a_start_that_failed_has_left_without_a_commit_makes_room_for_another_model(
    lost: int | None, tmp_path: Path
) -> None:
    """All ranks begin anew, also those whose store is gone since."""
    wrong = penstock.Muon(splits=(penstock.Split(match="no_such", parts=2),))
    assert {f.kind for f in World(2, steps, tmp_path, 0, optimizer=wrong).outcomes()} <= {"ConfigError", "RankError"}
    assert all((tmp_path / f"rank-{rank}").is_dir() for rank in range(2))
    if lost is not None:
        shutil.rmtree(tmp_path / f"rank-{lost}")
    assert together(2, steps, tmp_path, 1) == [(0, whole()[:1])] * 2


def test_strands_that_cannot_be_leave_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="strands=3 with 1 rank"):
        wrap(CASE, budget(tmp_path / "store"), strands=3)
    with wrap(CASE, budget(tmp_path / "store"), strands=4) as engine:
        engine.step(steps_of(CASE, 1)[0])
    with wrap(CASE, budget(tmp_path / "store")) as engine:
        assert engine.inside.resources.strands == 4


def test_a_part_is_not_taken_for_the_whole(stored: Path) -> None:
    with pytest.raises(StoreError, match="has the part of rank 0 of 2"), committed([[stored / "rank-0"]]):
        pass


def test_what_is_refused_leaves_no_folders(tmp_path: Path) -> None:
    for f in World(2, steps, tmp_path / "store", 1, strands=3).outcomes():
        assert f.kind == "ConfigError"
        assert "strands=3 with 2 ranks: must be 2 times a power of two" in f.said
    assert list(tmp_path.iterdir()) == []
