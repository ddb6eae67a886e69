"""A drive that fails, is full or gives up half way at every system call in turn: named, survived, and gone on from."""

import errno
import random
import re
import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest

from tests.campaign import ON_ACCELERATOR, SETTINGS, Attempt
from tests.conftest import Campaign
from tests.faults import Call, Go, Nth, error, intercepted

pytestmark = pytest.mark.usefixtures("one_thread")

LAST = 3


def whole_life(attempt: Attempt, folder: Path) -> None:
    """A run is made, saves a snapshot, loads it, trains to the end and is looked at again, whatever happens once."""
    attempt.to(1)
    attempt.insist(lambda engine: engine.save(folder / "snapshot", overwrite=True))
    attempt.insist(lambda engine: engine.load(folder / "snapshot"))
    attempt.to(LAST)
    attempt.close()
    attempt.insist(attempt.look)
    attempt.close()


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


def check_error(fault: str, nth: Nth, attempt: Attempt, warned: str) -> None:
    """The first error names the file, and for a transfer the offset at which it ended. Without an error something is
    ``warned`` of: a snapshot that another one has replaced could not be removed."""
    if fault == "half a transfer":
        assert not attempt.errors, "a short transfer is gone on with, not an error"
        return
    call = nth.calls[nth.number]
    if not attempt.errors and fault == "no byte" and (call.offset, call.nbytes) == (0, 4096):
        return  # nobody needs what is in there: whether a file can be read directly is tried with its first block
    said = str(attempt.errors[0]) if attempt.errors else warned
    beside = r"(\.[0-9a-f]{12})?\.partial(-\w+)?"
    names = re.sub(beside, "", call.path).rsplit("/", 1)
    assert all(name in re.sub(beside, "", said) for name in names), f"{call}: {said}"
    if call.name in ("preadv", "pwritev"):
        found = re.search(r"(read|write) of (\d+) bytes at offset (\d+) stopped after (\d+) bytes: (.*)", said)
        if found is None and (call.offset, call.nbytes) == (0, 4096):  # "cannot be opened": whether it reads directly
            return
        assert found is not None, f"{call}: {said}"
        assert int(found[3]) + int(found[4]) == call.offset
        assert found[5]


@pytest.mark.accelerator
@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
def test_a_fault_beside_an_accelerator_is_named_and_survived(
    fault: str, tmp_path: Path, campaign: Campaign, caplog: pytest.LogCaptureFixture
) -> None:
    """What is queued when a lane fails has come to rest before anything is tried again."""
    (name,) = ON_ACCELERATOR
    test_a_fault_at_any_system_call_is_named_and_survived(name, fault, tmp_path, campaign, caplog)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_fault_at_any_system_call_is_named_and_survived(
    name: str, fault: str, tmp_path: Path, campaign: Campaign, caplog: pytest.LogCaptureFixture
) -> None:
    act, counts = FAULTS[fault]
    (tmp_path / "clean").mkdir()
    clean = Nth(-1, act, counts)
    with intercepted(tmp_path / "clean", clean):
        whole_life(Attempt(name, tmp_path / "clean" / "store"), tmp_path / "clean")
    total = len(clean.calls)
    every = 1 if name == next(iter(SETTINGS)) else 5  # the others differ in order and number, not in kind
    numbers = list(range(0, total, every)) if campaign.full else random.Random(name).sample(range(total), 1)
    struck: Counter[str] = Counter()
    again = 0
    for number in numbers:
        folder = tmp_path / "case"
        folder.mkdir()
        nth = Nth(number, act, counts)
        attempt = Attempt(name, folder / "store")
        caplog.clear()
        with intercepted(folder, nth), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a file that cannot be read directly is read through the page cache
            whole_life(attempt, folder)
        assert nth.struck
        check_error(fault, nth, attempt, caplog.text)
        struck[nth.calls[number].name] += 1
        again += attempt.engines > 2
        shutil.rmtree(folder)
    campaign.found(
        f"{fault}, {name}: at {dict(struck)}: all named, all ended bit-equal, "
        f"{len(numbers) - again} in the same engine, {again} in a new one"
    )
