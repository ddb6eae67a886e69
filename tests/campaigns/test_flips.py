"""One bit flipped anywhere in a store: found at its first use, named, and never trained on."""

import random
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.errors import StoreError
from penstock.state.slots import Slots
from penstock.store import Store, digests
from tests.campaign import SETTINGS, Attempt, Setting, Truth, go_on, open_run, share, truth
from tests.conftest import Campaign
from tests.faults import Call, Go, Nth, intercepted
from tests.training import assert_same_state, state_of

pytestmark = pytest.mark.usefixtures("one_thread")

DONE, LAST = 2, 4


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Bytes of a file of the store. ``counts``: whether the last commit vouches for them; ``named``: in the error."""

    file: str
    start: int
    stop: int
    counts: bool
    named: str


def stretches(store: Path) -> dict[str, list[Stretch]]:
    """All of a store by kind: every slot of every extent, the checksums, the manifest and the commit records."""
    found: dict[str, list[Stretch]] = {}
    with Store.open([store]) as opened:
        slots, last = Slots(opened), opened.commits.table
        assert last is not None
        table = digests.area(opened.layout, slots=2)
        current = {e.name: slots.current(e.name) for e in opened.layout.extents} | {table.name: last.slot}
        newest = opened.commits.path.name
        extents = (*opened.layout.extents, table)
    for extent in extents:
        for slot in range(extent.slots):
            start, counts = extent.address(0, 0, slot), slot == current[extent.name]
            named = "checksums of the last commit" if extent.name == table.name else extent.name
            kind = extent.name.split(".")[0] if counts else "a slot that does not count"
            stop = start + (extent.stride if extent.name != table.name else extent.nbytes)
            found.setdefault(kind, []).append(
                Stretch(file="penstock.store", start=start, stop=stop, counts=counts, named=named)
            )
    for name in ("manifest.json", "commit.0", "commit.1"):
        kind = "manifest" if name == "manifest.json" else "newest commit record" if name == newest else "other record"
        text = (store / name).read_bytes().rstrip()
        found[kind] = [Stretch(file=name, start=0, stop=len(text), counts=kind == "manifest", named=name)]
    return found


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def outcome(setting: Setting, store: Path, known: Truth) -> str | None:
    """The error of a run that goes on from the store; without one it must have ended as it should."""
    try:
        with open_run(setting, store) as engine:
            first = engine.step_count
            assert go_on(engine, LAST) == known.after(first, LAST)
            assert_same_state(state_of(engine), known.states[LAST])
    except StoreError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", SETTINGS)
def test_a_flipped_bit_is_named_and_never_trained_on(
    name: str, tmp_path: Path, campaign: Campaign, caplog: pytest.LogCaptureFixture
) -> None:
    """Flipped back, the run goes on. The older commit record takes the newest one's place, with a word."""
    rng = random.Random(name)
    setting, known = SETTINGS[name], truth(name)
    with open_run(setting, trained := tmp_path / "trained") as engine:
        go_on(engine, DONE)
    kinds = stretches(trained)
    if not campaign.full and name != next(iter(SETTINGS)):  # the others differ in order and number, not in kind
        kinds = dict(rng.sample(sorted(kinds.items()), 3))
    hit: Counter[str] = Counter()
    for _ in range(campaign.cases(1, share(25))):
        for kind, places in kinds.items():
            stretch = rng.choice(places)
            store = tmp_path / "store"
            shutil.copytree(trained, store)
            caplog.clear()
            bit = rng.randrange(8 * stretch.start, 8 * stretch.stop)
            flip(store / stretch.file, bit)
            said = outcome(setting, store, known)
            if stretch.counts:
                assert said is not None, f"bit {bit} of {stretch} was trained on"
                assert stretch.named in said
                flip(store / stretch.file, bit)
                said = outcome(setting, store, known)
            assert said is None
            if stretch.file.startswith("commit"):
                assert f"{store / stretch.file} " in caplog.text
            hit[kind] += 1
            shutil.rmtree(store)
    campaign.found(f"one bit flipped, {name}: {dict(hit)}, all named, none trained on")


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_flipped_bit_at_every_read_is_found(name: str, tmp_path: Path, campaign: Campaign) -> None:
    """Bits flip on the way from the drive into memory, at each read of a run in turn: the step can be repeated."""

    def flipped(call: Call, go: Go) -> object:
        moved = go()
        assert call.data is not None
        call.data[0] ^= 1
        return moved

    def reads(call: Call) -> bool:
        return call.name == "preadv"

    clean = Nth(-1, flipped, reads)
    attempt = Attempt(name, tmp_path / "store")
    attempt.to(DONE)
    with intercepted(tmp_path / "store", clean):
        attempt.to(DONE + 1)
    attempt.close()
    total = len(clean.calls)
    if total == 0:
        pytest.skip("a step reads nothing: its state is in memory")
    numbers = range(total) if campaign.full else random.Random(0).sample(range(total), 1)
    for number in numbers:
        nth, store = Nth(number, flipped, reads), tmp_path / f"store-{number}"
        attempt = Attempt(name, store)
        attempt.to(DONE)
        with intercepted(store, nth):
            attempt.to(LAST)
        assert nth.struck
        assert re.search("is damaged in bytes", str(attempt.errors[0]))
        attempt.insist(attempt.look)
        attempt.close()
    campaign.found(
        f"one bit flipped on the way from the drive, {name}: at each of {len(numbers)} reads of a step, all found"
    )
