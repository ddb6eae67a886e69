"""A power cut at any instant: a committed step is always found, whole, and training goes on from it bit for bit."""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.campaign import SETTINGS, Setting, Truth, go_on, open_run, share, truth
from tests.conftest import Campaign
from tests.power import LOSSES, Killed, WriteLog
from tests.training import abandon, assert_same_state, state_of

pytestmark = pytest.mark.usefixtures("one_thread")

LAST = 5


def record(setting: Setting, folder: Path) -> WriteLog:
    """Train a new run to the end, from the making of its store to its closing."""
    log = WriteLog(folder / "store", folder / "base")
    with log.recording(), open_run(setting, folder / "store") as engine:
        go_on(engine, LAST)
    return log


def instants(log: WriteLog, rng: random.Random) -> int:
    """Any tick, every second time one within a commit."""
    if rng.random() < 0.5:
        return rng.randint(0, log.end)
    commit = rng.choice(log.commits)
    return rng.randint(commit.began, commit.ended)


def check_image(log: WriteLog, instant: int, image: Path, setting: Setting, known: Truth, *, train: bool) -> int:
    """What a run finds in the image is the newest step whose commit had returned, or the one under way, whole."""
    returned = max((c.step for c in log.commits if c.ended <= instant), default=0)
    under_way = {c.step for c in log.commits if c.began <= instant < c.ended}
    with open_run(setting, image) as engine:
        step = engine.step_count
        assert step in {returned} | under_way
        assert_same_state(state_of(engine), known.states[step])
        if train:
            numbers = go_on(engine, LAST)
            assert numbers == known.after(step, LAST)
            assert_same_state(state_of(engine), known.states[LAST])
    return step


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("name", SETTINGS)
def test_after_a_power_cut_a_committed_step_is_found_whole(name: str, tmp_path: Path, campaign: Campaign) -> None:
    rng = random.Random(name)
    known = truth(name)
    log = record(SETTINGS[name], tmp_path)
    found: Counter[int] = Counter()
    losses: Counter[str] = Counter()
    lost = trained = 0
    for case in range(campaign.cases(6, share(500))):
        instant, loss = instants(log, rng), LOSSES[case % len(LOSSES)]
        log.image(instant, loss, rng, image := tmp_path / "image")
        train = case % 5 == case // 5 % 5  # a fifth of them, of every kind of loss
        found[check_image(log, instant, image, SETTINGS[name], known, train=train)] += 1
        losses[loss] += 1
        trained += train
        lost += log.unsafe(instant) > 0
        shutil.rmtree(image)
    campaign.found(
        f"power cut, {name}: {dict(losses)} of a log of {log.writes} writes, {lost} with writes to lose; "
        f"found at step {dict(sorted(found.items()))}, all whole; {trained} trained on, all bit-equal"
    )


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_power_cut_after_a_kill_within_a_commit(name: str, tmp_path: Path, campaign: Campaign) -> None:
    """What a killed process had written but not flushed can be read, and is gone after a power cut all the same.

    The run that goes on from a commit record that was never flushed must not overwrite what the one before it names.
    """
    rng = random.Random(name)
    setting, known = SETTINGS[name], truth(name)
    log = WriteLog(tmp_path / "store", tmp_path / "base")
    with log.recording():
        engine = open_run(setting, tmp_path / "store")
        go_on(engine, 1)
        with log.killed_before_flush_of_record(), pytest.raises(Killed):
            go_on(engine, LAST)
        abandon(engine)
        engine.close()
        opened, opening = log.end, len(log.commits)
        with open_run(setting, tmp_path / "store") as engine:
            log.found(engine.step_count)
            assert engine.step_count == log.commits[opening - 1].step
            go_on(engine, LAST)
    cases = campaign.cases(3, share(200))
    for case in range(cases):
        instant = rng.randint(opened, log.end) if case % 2 else rng.randint(opened, log.commits[opening].ended)
        log.image(instant, LOSSES[case % len(LOSSES)], rng, image := tmp_path / "image")
        check_image(log, instant, image, setting, known, train=case % 5 == 0)
        shutil.rmtree(image)
    campaign.found(f"SIGKILL in a commit, then a power cut, {name}: {cases} cases, all found whole")
