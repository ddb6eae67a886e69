"""Drives that fail, processes that die, and Ctrl-C, in the middle of a step: real files, processes and signals."""

import errno
import signal
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import StoreError
from penstock.store import packed
from tests import warm
from tests.faults import failing
from tests.models import VOCABULARY, Case, causal_lm
from tests.patience import PATIENCE
from tests.training import Result, assert_same_state, budget, run_steps, state_of, steps_of, train, wrap

pytestmark = pytest.mark.usefixtures("one_thread")


class Stack(nn.Module):
    """Blocks with dropout between an embedding and a head; a process that runs it needs no more than torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 96), nn.Dropout(), nn.Linear(96, 32)) for _ in range(3))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


CASE = Case(build=Stack, micro_batch=causal_lm, blocks=3, loss_fn=lambda m, mb: m(**mb))
STEPS = steps_of(CASE, 4, lengths=(12, 8))


@cache
def undisturbed() -> Result:
    with TemporaryDirectory() as folder:
        return train(CASE, budget(Path(folder, "store")), STEPS)


def writes_of_a_step(engine: penstock.Engine) -> int:
    return len(engine.plan.schedule.lanes["write"])


@pytest.mark.parametrize(
    ("schedule", "code", "overlap"),
    [
        ("vertical", errno.EIO, True),
        ("vertical", errno.ENOSPC, False),
        ("horizontal", errno.ENOSPC, True),
    ],
)
def test_a_drive_that_fails_while_state_is_written(
    schedule: str, code: int, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one slot: the error surfaces as itself; the engine knows that its state is half updated; a snapshot
    mends it."""
    settings = {"schedule": schedule, "overlap": overlap}
    wanted = undisturbed()  # the schedule changes no bit
    with wrap(CASE, budget(tmp_path / "store", slots=1), **settings) as engine:
        first = run_steps(engine, STEPS[:2])
        engine.save(tmp_path / "snapshot")
        with (
            failing("pwritev", code, monkeypatch, after=writes_of_a_step(engine) // 2),
            pytest.raises(StoreError, match=r"penstock\.store: write of \d+ bytes at offset \d+") as failure,
        ):
            engine.step(STEPS[2])
        assert failure.value.errno == code
        assert any("in op W" in note for note in failure.value.__notes__)
        for unusable in (
            lambda: engine.step(STEPS[2]),
            lambda: engine.evaluate(STEPS[2]),
            lambda: engine.save(tmp_path / "other"),
            lambda: list(engine.master_parameters()),
        ):
            with pytest.raises(StoreError, match=r"step 3 was broken off by StoreError.*half updated: engine\.load"):
                unusable()
        assert not (tmp_path / "other").exists()
        engine.load(tmp_path / "snapshot")
        rest = run_steps(engine, STEPS[2:])
    assert first.losses + rest.losses == wanted.losses
    assert_same_state(rest.state, wanted.state)


def test_a_broken_state_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one slot: closing does not make it whole, and wrapping again says so."""
    with wrap(CASE, budget(tmp_path / "store", slots=1)) as engine:
        engine.step(STEPS[0])
        with failing("pwritev", errno.EIO, monkeypatch, after=2), pytest.raises(StoreError):
            engine.step(STEPS[1])
    with pytest.raises(StoreError, match="stopped in or before step 2"):
        wrap(CASE, budget(tmp_path / "store"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_drive_that_fails_anywhere_in_a_step_costs_only_that_step(
    call: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are two slots: at every few calls in turn, the state is that of the step before, and the run goes on."""
    wanted = undisturbed()
    with wrap(CASE, budget(tmp_path / "store"), overlap=overlap) as engine:
        first = run_steps(engine, STEPS[:2])
        calls = len(engine.plan.schedule.lanes["read" if call == "preadv" else "write"])
        for after in range(0, calls, 3):
            with failing(call, errno.EIO, monkeypatch, after=after), pytest.raises(StoreError):
                engine.step(STEPS[2])
            assert_same_state(state_of(engine), first.state)
        rest = run_steps(engine, STEPS[2:])
    assert first.losses + rest.losses == wanted.losses
    assert_same_state(rest.state, wanted.state)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_drive_that_fails_before_the_first_update(
    call: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that cannot be read, gradients and activations that cannot be put aside: the step can be tried again."""
    wanted = undisturbed()  # where they wait changes no bit
    with wrap(CASE, budget(tmp_path / "store", activations="disk", gradients="disk"), overlap=overlap) as engine:
        first = run_steps(engine, STEPS[:2])
        for after in (0, 3):
            with failing(call, errno.EIO, monkeypatch, after=after), pytest.raises(StoreError):
                engine.step(STEPS[2])
        assert_same_state(state_of(engine), first.state)
        rest = run_steps(engine, STEPS[2:])
    assert first.losses + rest.losses == wanted.losses
    assert_same_state(rest.state, wanted.state)


def test_a_snapshot_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with wrap(CASE, budget(tmp_path / "store")) as engine:
        engine.step(STEPS[0])
        engine.save(tmp_path / "snapshot")
        before = state_of(engine)
        engine.step(STEPS[1])
        with failing("pwritev", errno.ENOSPC, monkeypatch, after=2), pytest.raises(StoreError):
            engine.save(tmp_path / "snapshot", overwrite=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["snapshot", "store"]
        engine.load(tmp_path / "snapshot")
        assert_same_state(state_of(engine), before)


def test_a_load_that_breaks_off_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with wrap(CASE, budget(tmp_path / "store")) as engine:
        engine.step(STEPS[0])
        engine.save(tmp_path / "snapshot")
        before = state_of(engine)
        engine.step(STEPS[1])
        with failing("pwritev", errno.EIO, monkeypatch, after=2), pytest.raises(StoreError, match="write of"):
            engine.load(tmp_path / "snapshot")
        with pytest.raises(
            StoreError, match=r"loading .*snapshot was broken off by StoreError.*The state is half updated"
        ):
            engine.step(STEPS[1])
        engine.load(tmp_path / "snapshot")
        assert_same_state(state_of(engine), before)
        assert engine.step(STEPS[1]).step == 2


def test_nothing_of_the_store_is_left_when_it_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "free_bytes", lambda path: 4096)
    with pytest.raises(StoreError, match=r"the store needs .*, 4 KiB are free.*budget.slots=1 it takes half"):
        wrap(CASE, budget(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


# ---- processes

_CHILD = """
import os, sys, time, torch
from pathlib import Path
from tests.engine.test_faults import CASE, STEPS
from tests.faults import calls_can_be_replaced
from tests.training import AT_ONCE, budget, wrap
torch.set_num_threads(1)
def say(word):
    print(word, flush=True)
"""

_KILLED_IN_UPDATE = """
calls_can_be_replaced()
real = os.pwritev
def slow(*args):
    if armed:
        armed.append(1)
        if len(armed) == 6:
            say("updating")
            time.sleep(60)
    return real(*args)
armed = []
os.pwritev = slow
engine = wrap(CASE, budget(Path(sys.argv[1]), slots=int(sys.argv[2])), **AT_ONCE)
engine.step(STEPS[0])
armed.append(1)
engine.step(STEPS[1])
"""

_KILLED_BETWEEN_STEPS = """
engine = wrap(CASE, budget(Path(sys.argv[1])), **AT_ONCE)
engine.step(STEPS[0])
engine.step(STEPS[1])
say("between")
time.sleep(60)
"""

_INTERRUPTED = """
import signal
signals, arrived = os.pipe()
os.set_blocking(arrived, False)
signal.set_wakeup_fd(arrived)
def loss_fn(model, micro_batch):
    if len(done) == 1 and not heard:
        say("in step 2")
        for _ in range(int(sys.argv[2])):
            heard.append(os.read(signals, 1))
            say("heard")
    return CASE.loss_fn(model, micro_batch)
done, heard = [], []
with wrap(CASE, budget(Path(sys.argv[1])), loss_fn=loss_fn) as engine:
    try:
        for micro_batches in STEPS:
            engine.step(micro_batches)
            done.append(1)
    except KeyboardInterrupt:
        say(f"interrupted after step {engine.step_count}")
"""


def child(program: str, store: Path, *words: str) -> warm.Process:
    return warm.start(["-c", _CHILD + program, store, *words])


def wait_for(process: warm.Process, word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == word


def test_a_run_killed_while_updating_goes_on_from_the_step_before(tmp_path: Path) -> None:
    wanted = undisturbed()
    with child(_KILLED_IN_UPDATE, tmp_path / "store", "2") as process:
        wait_for(process, "updating")
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=PATIENCE)
    with wrap(CASE, budget(tmp_path / "store"), model=CASE.model(seed=5)) as engine:
        assert engine.step_count == 1
        rest = run_steps(engine, STEPS[1:])
    assert rest.losses == wanted.losses[1:]
    assert_same_state(rest.state, wanted.state)


def test_with_one_slot_a_run_killed_while_updating_is_not_continued(tmp_path: Path) -> None:
    with child(_KILLED_IN_UPDATE, tmp_path / "store", "1") as process:
        wait_for(process, "updating")
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=PATIENCE)
    with pytest.raises(StoreError, match=r"stopped in or before step 2.*Remove the directory.*load a snapshot"):
        wrap(CASE, budget(tmp_path / "store"))


def test_a_run_killed_between_steps_is_continued(tmp_path: Path) -> None:
    wanted = undisturbed()
    with child(_KILLED_BETWEEN_STEPS, tmp_path / "store") as process:
        wait_for(process, "between")
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=PATIENCE)
    with wrap(CASE, budget(tmp_path / "store"), model=CASE.model(seed=5)) as engine:
        rest = run_steps(engine, STEPS[2:])
    assert rest.losses == wanted.losses[2:]
    assert_same_state(rest.state, wanted.state)


def test_ctrl_c_takes_effect_after_the_step(tmp_path: Path) -> None:
    wanted = undisturbed()
    with child(_INTERRUPTED, tmp_path / "store", "1") as process:
        wait_for(process, "in step 2")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert output.splitlines()[-1] == "interrupted after step 2"
    with wrap(CASE, budget(tmp_path / "store"), model=CASE.model(seed=5)) as engine:
        assert engine.step_count == 2
        rest = run_steps(engine, STEPS[2:])
    assert rest.losses == wanted.losses[2:]
    assert_same_state(rest.state, wanted.state)


def test_a_second_ctrl_c_takes_effect_at_once(tmp_path: Path) -> None:
    """Before its forward goes on, which the child's first micro-batch does not until it has heard of two signals."""
    with child(_INTERRUPTED, tmp_path / "store", "2") as process:
        wait_for(process, "in step 2")
        process.send_signal(signal.SIGINT)
        wait_for(process, "heard")  # two signals that wait to be delivered are one
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE)
    assert output.splitlines()[-1] == "interrupted after step 1"  # it was still in its forward: nothing is lost
    with wrap(CASE, budget(tmp_path / "store")) as engine:
        assert engine.step_count == 1
