"""A power cut at any flush of a run: where a step is committed it goes on, and has the numbers of each step once."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.store.facts import facts_of
from penstock.store.store import Store
from tests.conftest import Campaign
from tests.folder_power import LOSSES, FlushLog, Loss
from tests.runs import write_run

pytestmark = pytest.mark.usefixtures("one_thread")

LAST = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("power")
    return write_run(made, run=made / "truth", lines=1000)


def _numbers(run: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(m["step"], m["loss"], m["grad_norm"], m.get("validation_loss")) for m in lines]


@pytest.fixture(scope="module")
def truth(config: Path) -> list[tuple[Any, ...]]:
    """The numbers of the run that nothing happened to."""
    assert main(["train", str(config), "--steps", str(LAST)]) == 0
    return _numbers(config.parent / "truth")


Image = tuple[int | None, Loss, Path]
"""The last step whose commit had returned, what was lost, and the folder that has the rest."""


class Cuts:
    """Images of power cuts at flushes of a run under way."""

    def __init__(self, log: FlushLog, folder: Path, share: float, rng: random.Random) -> None:
        """``share``: of the flushes at which there is a cut. ``folder``: for the images."""
        self.found: list[Image] = []
        self.committed: int | None = None
        self._log, self._folder, self._share, self._rng = log, folder, share, rng

    def flushed(self) -> None:
        if self._rng.random() < self._share:
            self.cut()

    def cut(self) -> None:
        loss = LOSSES[len(self.found) % len(LOSSES)]
        image = self._folder / f"{len(self.found)}"
        self._log.image(loss, self._rng, image)
        self.found.append((self.committed, loss, image))


def _recorded(words: list[str], run: Path, cuts: Cuts, log: FlushLog) -> None:
    real = Store.commit

    def commit(store: Store, record: dict[str, Any]) -> None:
        real(store, record)
        cuts.committed = record["step"]
        cuts.cut()

    with pytest.MonkeyPatch.context() as patch, log.recording(cuts.flushed):
        patch.setattr(Store, "commit", commit)
        assert main(words) == 0


def _few(found: list[Image], rng: random.Random) -> list[Image]:
    """Two from after a second step of a start or a resumption, when the line of its first is not flushed yet, and of
    the others two."""
    late = [image for image in found if image[0] in (2, LAST) and image[1] != "torn"]
    others = [image for image in found if image not in late]
    return rng.sample(late, 2) + rng.sample(others, 2)


def test_after_a_power_cut_a_run_goes_on_with_each_steps_numbers_once(
    config: Path, truth: list[tuple[Any, ...]], tmp_path: Path, campaign: Campaign
) -> None:
    """Within a start, within its steps, and within a resumption, which writes some of the files again."""
    rng, run = random.Random(3), tmp_path / "run"
    log = FlushLog(run)
    cuts = Cuts(log, tmp_path / "images", campaign.cases(1, 10) / 20, rng)
    (tmp_path / "images").mkdir()
    place = ["--run", str(run), "--budget.disk", str(run / "store")]
    _recorded(["train", str(config), *place, "--steps", "2"], run, cuts, log)
    _recorded(["resume", str(run), "--steps", str(LAST)], run, cuts, log)
    log.close()
    images = cuts.found if campaign.full else _few(cuts.found, rng)
    seen: Counter[str] = Counter()
    for committed, loss, image in images:
        facts = facts_of([image / "store"]) if committed is not None else None
        if committed is not None:
            assert facts is not None
            assert facts.step is not None
            assert facts.step >= committed, (loss, image)
        place = ["--run", str(image), "--budget.disk", str(image / "store")]
        assert main(["train", str(config), *place, "--steps", str(LAST), "--resume"]) == 0, (committed, loss, image)
        assert [step for step, *_ in _numbers(image)] == list(range(1, LAST + 1)), (committed, loss, image)
        assert [n[:3] for n in _numbers(image)] == [n[:3] for n in truth], (committed, loss, image)
        assert main(["verify", str(image)]) == 0
        seen[f"{loss}, {'with' if committed is not None else 'before'} a commit"] += 1
        shutil.rmtree(image)
    campaign.found(f"power cut over a run's folder: {dict(seen)} of {len(cuts.found)}, all gone on with, bit-equal")
