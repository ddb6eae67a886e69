"""SIGKILL at any instant: a run goes on from the last step that it had reported, and ends with the same bits."""

import random
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaign import SETTINGS, STEPS, digests, share, truth
from tests.conftest import Campaign
from tests.victims import Diary, KillPoint, Victims, victims_of_one_thread

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _victims() -> Iterator[None]:
    with victims_of_one_thread():
        yield


@pytest.mark.sampled(2, values=False)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_killed_at_any_instant_goes_on_bit_for_bit(name: str, tmp_path: Path, campaign: Campaign) -> None:
    """Kills come at random times, and at random system calls of a commit; every third time the run that goes on is
    killed, too."""
    rng = random.Random(name)
    victims = Victims(name, STEPS)
    known = truth(name)
    wanted = digests(known.states[STEPS])
    victims.start()
    began = time.monotonic()
    clean = victims.run(tmp_path / "clean", tmp_path / "clean.diary")
    length = time.monotonic() - began  # a little longer than a run: some cases are drawn again
    assert (clean.numbers, clean.state) == (known.numbers, wanted)

    struck = {"at a time": 0, "in a commit": 0}
    from_step: Counter[int | None] = Counter()
    for case in range(campaign.cases(2, share(200))):
        kind = "in a commit" if case % 2 else "at a time"
        store = tmp_path / f"{case}"
        lives = [_kill(victims, kind, rng, length, clean, store)]
        while lives[-1].state is not None:  # it had ended before
            store = store.with_name(f"{store.name}-again")
            lives = [_kill(victims, kind, rng, length, clean, store)]
        struck[kind] += 1
        if case % 3 == 0:
            lives.append(_kill(victims, kind, rng, length, clean, store))
        if lives[-1].state is None:
            lives.append(victims.run(store, _diary(store)))
        _check_lives(lives, known.numbers, SETTINGS[name].lag)
        assert lives[-1].state == wanted
        from_step[lives[-1].resumed] += 1
        shutil.rmtree(store)
    campaign.found(f"SIGKILL, {name}: {struck}, all resumed bit-equal, from steps {dict(sorted(from_step.items()))}")


def _diary(store: Path) -> Path:
    return store.with_name(f"{store.name}.diary-{uuid.uuid4().hex}")


def _kill(victims: Victims, kind: str, rng: random.Random, length: float, clean: Diary, store: Path) -> Diary:
    if kind == "at a time":
        return victims.run(store, _diary(store), after=rng.uniform(0, length))
    commit = rng.randrange(len(clean.commits))
    call, when = rng.randrange(clean.commits[commit]), rng.choice(["before", "half", "after"])
    return victims.run(store, _diary(store), at=KillPoint(commit=commit, call=call, when=when))


def _check_lives(lives: list[Diary], known: dict[int, tuple[float, float]], lag: int) -> None:
    """Each went on from the last step that had been reported, or the one whose commit was under way; the same bits."""
    reported = 0
    for life in lives:
        if life.resumed is not None:
            assert reported - lag <= life.resumed <= reported + 1
            reported = life.resumed
        assert all(known[step] == numbers for step, numbers in life.numbers.items())
        reported = max(life.numbers, default=reported)
