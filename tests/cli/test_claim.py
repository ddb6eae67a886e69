"""Whose a run's folder and its store are: what a start finds there, what it may replace, what an error takes back."""

import errno
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main, reshard, settings
from penstock.cli.claim import Claim, claimed
from penstock.cli.own_store import require_own_stores
from penstock.cli.run_folder import Start, settings_of, write_settings
from penstock.cli.run_record import RunRecord
from penstock.config import BatchConfig, Budget, TrainConfig
from penstock.errors import ConfigError, RankError, StoreError
from penstock.store.facts import facts_of, facts_of_all, store_exists
from penstock.store.layout import Layout
from penstock.store.owner import RUN_FILE, owner_in
from penstock.store.snapshot import written_snapshot
from penstock.store.store import DATA, Store
from penstock.store.transfer import aligned_bytes
from tests.faults import Nth, error, intercepted
from tests.patience import PATIENCE
from tests.runs import settings_for

LAYOUT = Layout.build([("weights.0", 4096, 1)])


def on(config: TrainConfig, *disk: Path) -> TrainConfig:
    return replace(config, budget=replace(config.budget, disk=tuple(map(str, disk))))


def make_store(config: TrainConfig, *, step: int | None = None, whole: bool = True) -> None:
    """What an engine makes for the run in the folder: a store, and a commit if there is a ``step``."""
    owner = owner_in(Path(config.run))
    with Store.create(config.budget.disk_paths, LAYOUT, model={}, owner=owner) as store:
        if step is not None:
            store.commit({"step": step, "whole": whole, "slots": "0"})


def run_of(config: TrainConfig, *, step: int | None = None, whole: bool = True, start: Start = "new") -> TrainConfig:
    """A run that began and was stopped."""
    with claimed(config, start) as claim:
        claim.begin(config)
        make_store(config, step=step, whole=whole)
        claim.state_made()
    if step:
        metrics = Path(config.run) / "metrics.jsonl"
        lines = [{"step": n, "loss": 1.0, "seconds": 1.0, "tokens": 1} for n in range(1, step + 1)]
        metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return config


def step_found(config: TrainConfig, start: Start = "resume") -> int | None:
    with claimed(config, start) as claim:
        return claim.step


def content(*folders: Path) -> dict[str, bytes]:
    """All files, but for locks, which anybody may make who looks."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files if path.name not in ("lock", "run.lock")}


# ---- a folder


@pytest.mark.parametrize(("key", "elsewhere"), [("run", "budget.disk"), ("budget.disk", "run")])
def test_a_place_whose_name_is_not_utf8_is_refused_before_anything_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, elsewhere: str
) -> None:
    """The run's files name it, and could not be read again."""
    here = Path(os.fsdecode(bytes(tmp_path) + b"/\xe9"))
    here.mkdir()
    monkeypatch.chdir(here)
    places = {key: Path("r"), elsewhere: tmp_path / "s"}
    config = on(settings_for(places["run"]), places["budget.disk"])
    with pytest.raises(ConfigError, match=rf"^{key}='r': .*udce9/r', has bytes"), claimed(config, "new"):
        pass
    assert not list(here.iterdir())


@pytest.mark.parametrize("moved", [False, True])
def test_an_earlier_run_or_its_state_is_refused_and_left_alone(tmp_path: Path, moved: bool) -> None:
    config = run_of(settings_for(tmp_path / "a"), step=3)
    other = replace(config, run=str(tmp_path / "b")) if moved else config
    before = content(tmp_path)
    says = f"a run, which began in {tmp_path}/a: give each" if moved else "--resume to go on with that run, or --overwr"
    with pytest.raises(ConfigError, match=says):
        step_found(other, "new")
    assert content(tmp_path) == before
    assert not (tmp_path / "b").exists()


def test_overwrite_replaces_a_runs_files_and_its_store_and_nothing_else(tmp_path: Path) -> None:
    config = run_of(settings_for(tmp_path), step=3)
    (tmp_path / "notes.txt").write_text("mine")
    with claimed(config, "overwrite") as claim:
        claim.begin(config)
        assert not store_exists(config.budget.disk_paths)
        assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
            "config.yaml",
            "notes.txt",
            RUN_FILE,
            "run.lock",
        }


def test_resume_changes_nothing_before_the_store_is_its_own(tmp_path: Path) -> None:
    config = run_of(settings_for(tmp_path), step=3)
    before = content(tmp_path)
    assert step_found(replace(config, steps=9)) == 3
    assert content(tmp_path) == before
    write_settings(tmp_path, replace(config, steps=9))
    assert settings.load(tmp_path / "config.yaml").steps == 9


def test_resume_on_other_data_is_refused(tmp_path: Path) -> None:
    config = run_of(settings_for(tmp_path), step=3)
    for changes, says in (
        ({"micro_batch_size": 4}, "micro_batch_size=2, not 4"),
        ({"batch": BatchConfig(sequences=6)}, r"batch\.sequences=4, not 6"),
        ({"data": replace(config.data, sequence_length=32)}, r"with data\.sequence_length=64, not 32: "),
    ):
        with pytest.raises(ConfigError, match=says):
            step_found(replace(config, **changes))
    assert settings.load(tmp_path / "config.yaml") == config


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/1/x")):
        with pytest.raises(ConfigError, match="cannot use this folder"):
            step_found(settings_for(folder), "overwrite")


@pytest.mark.parametrize("start", ["new", "overwrite", "resume"])
def test_a_place_for_state_that_cannot_be_made_is_said_before_anything_is_prepared_or_removed(
    start: Start, tmp_path: Path
) -> None:
    config = settings_for(tmp_path / "run")
    if start == "overwrite":
        run_of(config, step=3)
    before = content(tmp_path)
    with (
        pytest.raises(StoreError, match=f"{tmp_path}/no/drive does not exist and neither does {tmp_path}/no"),
        claimed(on(config, tmp_path / "no/drive"), start) as claim,
    ):
        claim.begin(on(config, tmp_path / "no/drive"))
    assert content(tmp_path) == before


@pytest.mark.parametrize("start", ["new", "overwrite", "resume"])
def test_a_folder_of_something_else_is_no_place_for_a_run(start: Start, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"already holds thesis\.tex"):
        step_found(settings_for(tmp_path), start)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_place_that_a_flag_names_is_meant_although_the_folder_was_copied(tmp_path: Path) -> None:
    """It is looked for in the copy only if the settings say so."""
    run_of(settings_for(tmp_path / "a"), step=3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for value, disk in ((str(tmp_path / "a/store"), "a/store"), ("{run}/other", "b/other"), (None, "b/store")):
        flags = [] if value is None else [("budget.disk", json.dumps(value))]
        found = settings_of(tmp_path / "b", flags)
        assert (found.run, found.budget.disk_paths) == (str(tmp_path / "b"), (tmp_path / disk,))
    with pytest.raises(StoreError, match=f"is a copy of the run in {tmp_path}/a"):
        step_found(settings_of(tmp_path / "b", [("budget.disk", str(tmp_path / "a/store"))]))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_that_begins_again_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int
) -> None:
    config = run_of(settings_for(tmp_path / "a"), step=0)
    (tmp_path / "a/metrics.jsonl").write_text("".join(f'{{"step": {n + 1}}}\n' for n in range(steps)))
    assert step_found(config) is None
    assert ("what it did is lost" in caplog.text) == (steps > 0)


@pytest.mark.parametrize("untouched_store", [False, True])
def test_a_run_that_has_a_snapshot_does_not_begin_again_for_being_given_a_disk(
    tmp_path: Path, untouched_store: bool
) -> None:
    run = tmp_path / "a"
    there = run_of(settings_for(run)) if untouched_store else settings_for(run)
    memory = replace(there, budget=replace(there.budget, disk=None))
    if not untouched_store:
        with claimed(memory, "new") as claim:
            claim.begin(memory)
            claim.state_made()
    write_settings(run, memory)
    with written_snapshot(run / "snapshot-3", [("weights.0", 4096)], {"step": 3}) as writer:
        writer.write("weights.0", 0, aligned_bytes(4096))
    before = content(run)
    with pytest.raises(ConfigError, match=r"has its state in .*snapshot-3.*--budget\.disk null"):
        step_found(there)
    assert content(run) == before
    if not untouched_store:
        assert step_found(memory) == 3


# ---- one command that always does


@pytest.mark.parametrize("step", [None, 0])
def test_where_no_step_is_committed_resume_begins(tmp_path: Path, step: int | None) -> None:
    for config in (settings_for(tmp_path / "nothing"), run_of(settings_for(tmp_path / "store"), step=step)):
        other = replace(config, seed=1)  # no step has been done with the settings that there were
        with claimed(other, "resume") as claim:
            assert claim.step is None
            claim.begin(other)
            make_store(other, step=2)
            claim.state_made()
        assert step_found(other) == 2


def test_a_state_that_a_kill_has_cost_is_said_and_begun_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = run_of(settings_for(tmp_path), step=3, whole=False)
    with claimed(config, "resume") as claim:
        assert claim.step is None
        claim.begin(config)
        make_store(config)
    assert "stopped after step 3, and is lost: it begins again" in caplog.text


def test_a_run_whose_state_is_not_there_does_not_begin_again(tmp_path: Path) -> None:
    """A drive that is not mounted looks like one on which nothing has begun."""
    drive = tmp_path / "drive"
    drive.mkdir()
    config = run_of(on(settings_for(tmp_path / "run"), drive / "store"), step=3)
    (tmp_path / "run" / "metrics.jsonl").unlink()  # rotated away
    drive.rename(tmp_path / "elsewhere")
    drive.mkdir()
    with pytest.raises(StoreError, match="is the drive mounted"):
        step_found(config)
    shutil.move(tmp_path / "elsewhere" / "store", drive / "store")
    with pytest.raises(StoreError, match=r"budget\.disk names"):
        step_found(on(config, tmp_path / "new"))
    assert step_found(config) == 3


def test_a_drive_of_several_that_is_not_there_is_named_and_nothing_removed(tmp_path: Path) -> None:
    config = run_of(on(settings_for(tmp_path / "run"), tmp_path / "a", tmp_path / "b"), step=3)
    for gone in ("a", "b"):
        (tmp_path / gone).rename(tmp_path / "away")
        before = content(tmp_path)
        for start in ("resume", "overwrite"):
            with pytest.raises(StoreError, match=f"{gone} lacks its part of the store"):
                step_found(config, start)
            assert content(tmp_path) == before
        (tmp_path / "away").rename(tmp_path / gone)
        if gone == "a":
            assert step_found(config) == 3


# ---- two runs


def test_a_run_never_takes_the_store_of_another(tmp_path: Path) -> None:
    """Also of one that is alike but for its learning rate: a model fits the store of each."""
    ours = run_of(settings_for(tmp_path / "a"), step=160)
    alike = replace(ours, run=str(tmp_path / "b"), optimizer=replace(ours.optimizer, lr=1.0))
    theirs = run_of(on(alike, tmp_path / "b" / "store"), step=3)
    before = content(tmp_path)
    for start in ("new", "overwrite", "resume"):
        for folder in ("b", "fresh"):
            taken = on(replace(theirs, run=str(tmp_path / folder)), *ours.budget.disk_paths)
            with pytest.raises((StoreError, ConfigError), match=rf"{tmp_path}/a|has its state in|already holds"):
                step_found(taken, start)
            with pytest.raises((StoreError, ConfigError), match=rf"{tmp_path}/a"):
                require_own_stores(Path(theirs.run), ours.budget)
    assert content(tmp_path) == before
    shutil.rmtree(tmp_path / "b" / "store")
    shutil.copytree(tmp_path / "a" / "store", tmp_path / "b" / "store")
    for start in ("overwrite", "resume"):
        with pytest.raises(StoreError, match=f"the state of another run, which began in {tmp_path}/a, and not that of"):
            step_found(theirs, start)


def test_a_store_of_no_run_is_not_a_runs(tmp_path: Path) -> None:
    config = settings_for(tmp_path / "run")
    run_of(config, step=3)
    shutil.rmtree(tmp_path / "run" / "store")
    Store.create(config.budget.disk_paths, LAYOUT, model={}).close()
    for start in ("overwrite", "resume"):
        with pytest.raises(StoreError, match="belongs to no run, such as"):
            step_found(config, start)
    with pytest.raises(ConfigError, match=r"already holds the state of a store of penstock\.wrap"):
        step_found(replace(config, run=str(tmp_path / "fresh")), "overwrite")


def test_a_run_is_the_same_wherever_its_folder_is(tmp_path: Path) -> None:
    run_of(on(settings_for(tmp_path / "run"), tmp_path / "drive"), step=3)
    (tmp_path / "run").rename(tmp_path / "moved")
    with claimed(settings_of(tmp_path / "moved"), "resume") as claim:
        assert claim.step == 3
        claim.state_made()
    assert owner_in(tmp_path / "moved") is not None
    assert owner_in(tmp_path / "moved").folder == str(tmp_path / "moved")  # type: ignore[union-attr]


@pytest.mark.parametrize("inside", [False, True])
def test_a_copy_of_a_run_goes_on_with_a_copy_of_its_state_alone(tmp_path: Path, inside: bool) -> None:
    store = tmp_path / "run" / "store" if inside else tmp_path / "drive"
    config = run_of(on(settings_for(tmp_path / "run"), store), step=3)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = settings_of(tmp_path / "copy")
    if inside:
        assert step_found(copy) == 3
        copied = copy
    else:
        for start in ("resume", "overwrite"):
            with pytest.raises(StoreError, match=f"is a copy of the run in {tmp_path}/run"):
                step_found(copy, start)
        with pytest.raises(StoreError, match=f"is a copy of the run in {tmp_path}/run"):
            reshard.run(reshard.Arguments(folder=tmp_path / "copy", ranks=2))
        shutil.copytree(store, tmp_path / "other")
        copied = on(copy, tmp_path / "other")
        assert step_found(copied) == 3
    with claimed(copied, "overwrite") as claim:
        claim.begin(copied)
    assert step_found(config) == 3, "of the one that was copied"


@pytest.mark.parametrize("inside", [False, True])
def test_what_a_start_that_was_stopped_was_to_replace_is_what_its_own_folder_has(tmp_path: Path, inside: bool) -> None:
    """And not what is where the folder was by now: the run as it was, put back from a copy."""
    store = tmp_path / "run" / "store" if inside else tmp_path / "drive"
    config = run_of(on(settings_for(tmp_path / "run"), store), step=3)
    shutil.copytree(tmp_path / "run", tmp_path / "before")
    with pytest.MonkeyPatch.context() as patched, suppress(AttributeError), claimed(config, "overwrite") as claim:
        patched.delattr("penstock.cli.removal.remove_stores")
        claim.begin(config)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = settings_of(tmp_path / "copy")
    if not inside:
        with pytest.raises(StoreError, match=f"is a copy of the run in {tmp_path}/run"):
            step_found(copy)
    else:
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "before").rename(tmp_path / "run")
        with claimed(copy, "resume") as claim:
            claim.begin(copy)
        assert not store_exists(copy.budget.disk_paths)
    assert facts_of([store]) is not None


def test_a_copy_of_all_that_a_run_has_goes_on_where_its_settings_name_relative_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same words name another store from where the copy is; but not if a link there leads to the same one."""
    (tmp_path / "a/drive").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    config = run_of(on(settings_for(Path("runs/x")), Path("drive/x")), step=3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").mkdir()
    shutil.copytree(tmp_path / "a/runs", tmp_path / "c/runs")
    (tmp_path / "c/drive").symlink_to(tmp_path / "a/drive")
    monkeypatch.chdir(tmp_path / "c")
    with pytest.raises(StoreError, match=f"is a copy of the run in {tmp_path}/a/runs/x"):
        step_found(config)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=rf"its state is not in drive/x \(relative to {tmp_path}\) any more") as gone:
        step_found(replace(config, run="a/runs/x"))
    assert "moved, say where to: --budget.disk DIR" in str(gone.value)
    assert "penstock train CONFIG --overwrite" in str(gone.value)  # penstock resume takes no such word
    with pytest.raises(ConfigError, match=rf"^drive/x \(relative to {tmp_path}\) holds no store: is the drive mounted"):
        require_own_stores(tmp_path / "a/runs/x", config.budget)
    monkeypatch.chdir(tmp_path / "b")
    assert step_found(config) == 3
    with claimed(config, "overwrite") as claim:
        claim.begin(config)
    monkeypatch.chdir(tmp_path / "a")
    assert step_found(config) == 3, "of the one that was copied"


@pytest.mark.parametrize("name", ["data/0123456789abcdef", "model"])
def test_a_folder_of_a_run_that_is_a_link_is_replaced_with_what_is_there_left_alone(tmp_path: Path, name: str) -> None:
    config = run_of(settings_for(tmp_path / "run"), step=3)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/config.json").write_text("{}")
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with claimed(config, "overwrite") as claim:
        claim.begin(config)
        assert not (tmp_path / "run" / name).is_symlink()
    assert (tmp_path / "elsewhere/config.json").read_text() == "{}"


# ---- one start at a time


def _hold(config: TrainConfig, ready: Any, leave: Any) -> None:
    with claimed(config, "resume"):
        ready.set()
        leave.wait(PATIENCE)


@contextmanager
def held(config: TrainConfig) -> Iterator[int]:
    """Another process is in the middle of a start."""
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(config, ready, leave))
    process.start()
    try:
        assert ready.wait(PATIENCE)
        assert process.pid is not None
        yield process.pid
    finally:
        leave.set()
        process.join(PATIENCE)


@pytest.mark.parametrize("start", ["new", "overwrite", "resume"])
def test_a_folder_is_one_starts_alone_from_its_first_moment(start: Start, tmp_path: Path) -> None:
    config = settings_for(tmp_path / "run")
    with held(config) as pid, pytest.raises(StoreError, match=f"is in use by process {pid}"):
        step_found(config, start)
    assert not (tmp_path / "run").exists(), "what it was made for has not begun"


def _start_over_and_over(config: TrainConfig, outcomes: Any) -> None:
    for _ in range(25):
        try:
            with claimed(config, "overwrite") as claim:
                claim.begin(config)
                make_store(config)
                claim.state_made()
            outcomes.put("done")
        except StoreError as error:
            outcomes.put("refused" if "is in use by process" in str(error) else repr(error))
        except (OSError, ValueError, AssertionError) as error:
            outcomes.put(repr(error))


def test_starts_in_one_folder_at_once_end_no_other(tmp_path: Path) -> None:
    config = settings_for(tmp_path / "run")
    context = multiprocessing.get_context("fork")
    outcomes = context.Queue()
    processes = [context.Process(target=_start_over_and_over, args=(config, outcomes)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [outcomes.get(timeout=PATIENCE) for _ in range(75)]
    for process in processes:
        process.join(PATIENCE)
    assert set(found) <= {"done", "refused"}
    assert "done" in found
    facts = facts_of(config.budget.disk_paths)
    assert facts is not None
    assert facts.owner == owner_in(tmp_path / "run")


# ---- errors


class TroubleError(Exception):
    pass


def fail_after_begin(config: TrainConfig, start: Start, meanwhile: Callable[[Claim], object]) -> None:
    def fail() -> None:
        with claimed(config, start) as claim:
            claim.begin(config)
            meanwhile(claim)
            raise TroubleError

    with pytest.raises(TroubleError):
        fail()


@pytest.mark.parametrize("step", [None, 0, 1, 22])
@pytest.mark.parametrize("start", ["new", "overwrite", "resume"])
def test_an_error_takes_back_what_the_start_made_unless_a_step_is_committed(
    step: int | None, start: Start, tmp_path: Path
) -> None:
    """Whatever is left of the numbers of the steps: they may have been moved away."""
    config = on(settings_for(tmp_path / "run"), tmp_path / "drive")
    fail_after_begin(config, start, lambda claim: (make_store(config, step=step), claim.state_made()))
    if step:
        assert step_found(config) == step
    else:
        assert not list(tmp_path.iterdir())


def test_a_removal_that_fails_leaves_a_folder_that_a_run_can_begin_in(tmp_path: Path) -> None:
    """Whichever it is: what is left is known to be a run's as long as there is anything but an empty folder."""

    def begin_and_fail(config: TrainConfig, number: int) -> Nth:
        taking_back = False
        removals = Nth(number, error(errno.EROFS), lambda call: taking_back and call.name in ("unlink", "rmdir"))

        def make(claim: Claim) -> None:
            nonlocal taking_back
            make_store(config)
            claim.state_made()
            prepared = Path(config.run) / "data" / "0123456789abcdef"
            prepared.mkdir(parents=True)
            (prepared / "text.tokens").write_text("tokens")
            taking_back = True

        with intercepted(tmp_path, removals, names=True):
            fail_after_begin(config, "new", make)
        return removals

    count = len(begin_and_fail(on(settings_for(tmp_path / "run"), tmp_path / "drive"), -1).calls)
    assert count > 5
    for number in range(count):
        config = on(settings_for(tmp_path / str(number)), tmp_path / f"drive{number}")
        assert begin_and_fail(config, number).struck
        with claimed(config, "resume") as claim:
            claim.begin(config)


def test_a_link_in_the_place_of_the_data_is_left_alone_and_keeps_nothing_back(tmp_path: Path) -> None:
    config = settings_for(tmp_path / "run")
    (tmp_path / "large").mkdir()

    def link(claim: Claim) -> None:
        (tmp_path / "run" / "data").symlink_to(tmp_path / "large")

    fail_after_begin(config, "new", link)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["data"]
    assert (tmp_path / "large").is_dir()


def test_an_error_in_a_folder_that_was_renamed_removes_nothing(tmp_path: Path) -> None:
    config = on(settings_for(tmp_path / "run"), tmp_path / "drive")
    before: dict[str, bytes] = {}

    def rename(claim: Claim) -> None:
        make_store(config)
        claim.state_made()
        (tmp_path / "run").rename(tmp_path / "renamed")
        run_of(on(settings_for(tmp_path / "run"), tmp_path / "other"))
        before.update(content(tmp_path))
        with pytest.raises(StoreError, match="another folder than it was"):
            claim.state_made()

    fail_after_begin(config, "new", rename)
    assert content(tmp_path) == before


@pytest.mark.parametrize("error", [None, FileNotFoundError(2, "No such file"), RankError("rank 1 has failed")])
def test_a_folder_that_is_moved_under_a_run_is_what_the_run_ends_with(error: Exception | None, tmp_path: Path) -> None:
    """Whoever misses it first says something of a file; or nobody does, and what comes next is kept nowhere."""
    config = settings_for(tmp_path / "run")

    def moved() -> None:
        with claimed(config, "new") as claim:
            claim.begin(config)
            (tmp_path / "run").rename(tmp_path / "moved")
            if error is not None:
                raise error

    with pytest.raises(StoreError, match=rf"no longer where it was .* it is {tmp_path}/moved now: move it back, and"):
        moved()
    assert (tmp_path / "moved" / "run.json").exists()


def test_an_error_that_a_step_has_left_its_numbers_of_removes_nothing(tmp_path: Path) -> None:
    config = settings_for(tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    fail_after_begin(config, "new", lambda _: metrics.write_text("{}\n"))
    assert metrics.read_text() == "{}\n"
    assert (tmp_path / "run" / "config.yaml").exists()


# ---- permission


@contextmanager
def as_nobody() -> Iterator[None]:
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_disk_that_cannot_be_made_is_refused_before_the_folder_is_a_runs(for_all: Path) -> None:
    """And so before the data are read, which may take hours."""
    (for_all / "drive").mkdir(mode=0o555)
    (for_all / "run").mkdir()
    if not os.geteuid():
        os.chown(for_all / "run", 65534, 65534)
    config = on(settings_for(for_all / "run"), for_all / "drive" / "store")
    with as_nobody(), claimed(config, "new") as claim, pytest.raises(StoreError, match="drive is not writable: change"):
        claim.begin(config)
    assert not (for_all / "run" / RUN_FILE).exists()


def test_where_one_may_not_look_is_not_where_nothing_is(for_all: Path) -> None:
    closed = for_all / "closed"
    closed.mkdir()
    config = run_of(on(settings_for(for_all / "run"), closed / "store"), step=3)
    closed.chmod(0)
    paths = config.budget.disk_paths
    for look in (store_exists, facts_of, lambda paths: facts_of_all([paths])):
        with as_nobody(), pytest.raises(StoreError) as found:
            look(paths)
        assert found.value.errno == errno.EACCES
        said = str(found.value)
        assert str(closed / "store" / DATA) in said
        assert f"(EACCES): {closed} belongs to user " in said


def test_a_settings_file_that_is_gone_is_written_again(tmp_path: Path) -> None:
    config = run_of(settings_for(tmp_path), step=3)
    (tmp_path / "config.yaml").unlink()
    assert step_found(config) == 3


def test_run_keeps_its_name_in_words(tmp_path: Path) -> None:
    config = settings_for(tmp_path)
    with claimed(config, "new") as claim:
        claim.begin(config)
        record = RunRecord.read(tmp_path)
        assert record is not None
        assert (record.owner.folder, record.pending) == (str(tmp_path), None)
        with pytest.raises(StoreError, match="is in use by process"):
            step_found(config)


# ---- several ranks


def make_folders(config: TrainConfig, ranks: int) -> None:
    """What the engine makes before the stores: the directories that the budget names."""
    for paths in config.budget.stores(ranks):
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)


def run_of_ranks(config: TrainConfig, ranks: int, *, step: int | None = None) -> TrainConfig:
    """A run of several ranks that began and was stopped."""
    with claimed(config, "new", ranks) as claim:
        claim.begin(config)
        make_folders(config, ranks)
        for paths in config.budget.stores(ranks):
            make_store(on(config, *paths), step=step)
        claim.state_made()
    return config


@pytest.mark.parametrize("disks", [1, 2, 4])
def test_a_run_of_two_ranks_goes_on_with_two(tmp_path: Path, disks: int) -> None:
    config = on(settings_for(tmp_path / "run"), *(tmp_path / f"disk-{n}" for n in range(disks)))
    run_of_ranks(config, 2, step=3)
    before = content(tmp_path)
    with claimed(config, "resume", 2) as claim:
        assert claim.step == 3
    for ranks in (1, 3):
        with (
            pytest.raises(ConfigError, match=r"has the state of 2 ranks.*-per-node 2 -m"),
            claimed(config, "resume", ranks),
        ):
            pass
    assert content(tmp_path) == before
    with claimed(config, "overwrite", 1) as claim:
        claim.begin(config)
        assert not any(path.name == DATA for path in tmp_path.rglob("*"))


def test_a_run_that_has_no_step_begins_with_another_number_of_ranks(tmp_path: Path) -> None:
    config = settings_for(tmp_path / "run")
    run_of_ranks(config, 2)
    with claimed(config, "resume", 1) as claim:
        assert claim.step is None
        claim.begin(config)
        assert not (tmp_path / "run" / "store").exists()
        make_store(config, step=1)
        claim.state_made()
    assert step_found(config) == 1


@pytest.mark.parametrize("made", [1, 2])
def test_what_all_ranks_have_made_is_taken_back(tmp_path: Path, made: int) -> None:
    config = settings_for(tmp_path / "run")
    with suppress(RuntimeError), claimed(config, "new", 2) as claim:
        claim.begin(config)
        make_folders(config, 2)
        for paths in config.budget.stores(2)[:made]:
            make_store(on(config, *paths))
        raise RuntimeError("on the way")
    assert not (tmp_path / "run").exists()


def test_a_rank_that_lost_its_store_is_named(tmp_path: Path) -> None:
    config = settings_for(tmp_path / "run")
    run_of_ranks(config, 2, step=3)
    shutil.rmtree(tmp_path / "run" / "store" / "rank-1")
    with pytest.raises(StoreError, match="rank-1 lacks its part of the store"), claimed(config, "resume", 2):
        pass


@pytest.mark.parametrize("ranks", [1, 3])
def test_state_that_is_not_there_is_missed_by_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    config = run_of_ranks(settings_for(tmp_path / "run"), 2, step=3)
    (tmp_path / "run" / "store").rename(tmp_path / "unmounted")
    before = content(tmp_path)
    with pytest.raises(StoreError, match="is the drive mounted"):
        claimed(config, "resume", ranks).__enter__()
    assert content(tmp_path) == before


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1), (2, 3)])
def test_runs_of_other_numbers_of_ranks_do_not_share_a_directory(tmp_path: Path, first: int, then: int) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    run_of_ranks(on(settings_for(tmp_path / "a"), disk), first, step=3)
    other, before = on(settings_for(tmp_path / "b"), disk), content(tmp_path)
    with pytest.raises(ConfigError, match=f"already holds the state of a run, which began in {tmp_path}/a"):
        claimed(other, "new", then).__enter__()
    assert content(tmp_path) == before


def test_a_run_without_a_disk_is_complete_for_any_number_of_ranks(tmp_path: Path) -> None:
    config = settings_for(tmp_path / "run", budget=Budget(device="1MiB", host="1MiB", durability="none"))
    run_of_ranks(config, 2)
    lines = [{"step": n, "loss": 1.0, "seconds": 1.0, "tokens": 1} for n in range(1, 6)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with claimed(config, "resume", 1) as claim:
        assert claim.step == 5


def test_a_run_without_a_disk_that_gives_epochs_is_complete_once_it_has_done_their_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = Budget(device="1MiB", host="1MiB", durability="none")
    config = settings_for(tmp_path / "run", budget=budget, steps=None, epochs=1.0)
    with claimed(config, "new") as claim:
        claim.begin(config)
        write_settings(tmp_path / "run", replace(config, steps=5, epochs=None))
    (tmp_path / "c.yaml").write_text(settings.dump(config))
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = [json.dumps({"step": n, "loss": 1.0, "seconds": 1.0, "tokens": 1}) for n in range(1, 6)]
    metrics.write_text("\n".join(lines[:4]) + "\n")
    with claimed(config, "resume") as claim:
        assert claim.step is None
    metrics.write_text("\n".join(lines) + "\n")
    assert main(["train", str(tmp_path / "c.yaml"), "--resume"]) == 0
    assert "is complete: 5 steps are done." in capsys.readouterr().out
