"""A drive that fails, is full or gives up half way at every system call in turn: named, survived, and gone on from."""

import errno
import random
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.campaign import SETTINGS, Setting, Truth, go_on, open_run, truth
from tests.conftest import Campaign
from tests.faults import Call, Go, Nth, error, intercepted
from tests.training import assert_same_state, state_of

import penstock
from penstock.errors import StoreError

pytestmark = pytest.mark.usefixtures("one_thread")

LAST = 3


class Attempt:
    """A run that is made, saves a snapshot, loads it, trains to the end and is looked at again.

    What fails is tried again: in the same engine, and where that refuses, in a new one on the same store.
    """

    def __init__(self, setting: Setting, folder: Path, known: Truth) -> None:
        self._setting = setting
        self._folder = folder
        self._known = known
        self._engine: penstock.Engine | None = None
        self._done = self._target = 0
        self.errors: list[StoreError] = []
        self.engines = 0

    def run(self) -> None:
        snapshot = self._folder / "snapshot"
        self._insist(lambda engine: self._step(engine, 1))
        self._insist(lambda engine: engine.save(snapshot, overwrite=True))
        self._insist(lambda engine: engine.load(snapshot))
        for step in range(2, LAST + 1):
            self._insist(lambda engine, step=step: self._step(engine, step))
        self._close()
        self._insist(lambda engine: self._look(engine))
        self._close()

    def _step(self, engine: penstock.Engine, step: int) -> None:
        self._target = step
        for done in range(engine.step_count + 1, step + 1):
            assert go_on(engine, done) == self._known.after(done - 1, done)
            self._done = done
        next(engine.master_parameters())  # refused when the step had been taken, but could not be made durable

    def _look(self, engine: penstock.Engine) -> None:
        """It has the state of its last step, which is the one that it had reported, or one after that."""
        assert engine.step_count in (self._done, self._done + 1)
        assert_same_state(state_of(engine), self._known.states[engine.step_count])

    def _insist(self, action: Callable[[penstock.Engine], None]) -> None:
        for _ in range(4):
            try:
                if self._engine is None:
                    self._engine = open_run(self._setting, self._folder / "store")
                    self.engines += 1
                    self._look(self._engine)
                    self._step(self._engine, self._target)
                action(self._engine)
                return
            except StoreError as failure:
                self.errors.append(failure)
                if len(self.errors) > 1:
                    self._close()
        raise self.errors[-1]

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                engine.close()
        except StoreError as failure:  # what it has not made durable was done before: nothing is lost
            self.errors.append(failure)


def half(call: Call, go: Go) -> object:
    """A transfer that moves a part of what was asked: whole sectors, as direct I/O does."""
    return go(max(call.nbytes // 2 // 4096 * 4096, min(4096, call.nbytes)))


def nothing(call: Call, go: Go) -> object:
    """A transfer that moves no byte and says so: the end of the file, or a drive that takes no more."""
    return go(0)


def _transfer(call: Call) -> bool:
    return call.data is not None


def _writes(call: Call) -> bool:
    return call.writes or call.name == "posix_fallocate"


FAULTS = {
    "EIO": (error(errno.EIO), lambda call: True),
    "ENOSPC": (error(errno.ENOSPC), _writes),
    "half a transfer": (half, _transfer),
    "no byte": (nothing, lambda call: call.name in ("preadv", "pwritev")),
}


def check_error(fault: str, nth: Nth, attempt: Attempt) -> None:
    """The first error names the file, and for a transfer the offset at which it ended.

    A commit record that cannot be read is none while there is the other one.
    """
    if fault == "half a transfer":
        assert not attempt.errors, "a short transfer is gone on with, not an error"
        return
    call = nth.calls[nth.number]
    if not attempt.errors and fault == "no byte" and (call.offset, call.nbytes) == (0, 4096):
        return  # nobody needs what is in there: whether a file can be read directly is tried with its first block
    if not attempt.errors and call.name in ("open", "read") and Path(call.path).name.startswith("commit."):
        return  # the other one was taken
    said = str(attempt.errors[0]) if attempt.errors else "not a word"
    names = re.sub(r"\.partial(-\w+)?", "", call.path).rsplit("/", 1)
    assert all(name in re.sub(r"\.partial(-\w+)?", "", said) for name in names), f"{call}: {said}"
    if call.name in ("preadv", "pwritev"):
        found = re.search(r"(read|write) of (\d+) bytes at offset (\d+) stopped after (\d+) bytes: (.*)", said)
        if found is None and (call.offset, call.nbytes) == (0, 4096):  # "cannot be opened": whether it reads directly
            return
        assert found is not None, f"{call}: {said}"
        assert int(found[3]) + int(found[4]) == call.offset
        assert found[5]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_fault_at_any_system_call_is_named_and_survived(
    name: str, fault: str, tmp_path: Path, campaign: Campaign
) -> None:
    act, counts = FAULTS[fault]
    known = truth(name)
    (tmp_path / "clean").mkdir()
    clean = Nth(-1, act, counts)
    with intercepted(tmp_path / "clean", clean):
        Attempt(SETTINGS[name], tmp_path / "clean", known).run()
    total = len(clean.calls)
    numbers = list(range(total)) if campaign.full else random.Random(name).sample(range(total), 2)
    struck: Counter[str] = Counter()
    again = 0
    for number in numbers:
        folder = tmp_path / "case"
        folder.mkdir()
        nth = Nth(number, act, counts)
        attempt = Attempt(SETTINGS[name], folder, known)
        with intercepted(folder, nth), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a file that cannot be read directly is read through the page cache
            attempt.run()
        assert nth.struck
        check_error(fault, nth, attempt)
        struck[nth.calls[number].name] += 1
        again += attempt.engines > 2
        shutil.rmtree(folder)
    campaign.found(
        f"{fault}, {name}: at {dict(struck)}: all named, all ended bit-equal, "
        f"{len(numbers) - again} in the same engine, {again} in a new one"
    )
