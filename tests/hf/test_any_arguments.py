"""Runs of the libraries' loops with any arguments: all that a user can see of one is as in the library's own run.

Log, numbers, state, callbacks, files, what is returned, and weights; of a run that is resumed, too. Or an argument is
refused, by name.
"""

import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from tests.any_run import Run, differences, seen
from tests.conftest import Campaign
from tests.drawn_runs import any_run, any_trl_run

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

REFUSALS: dict[str, Callable[[Run], bool]] = {
    "optim='adafactor' cannot be streamed": lambda run: run.settings.get("optim") == "adafactor",
    "Tuples is no model of transformers": lambda run: run.model == "tuples",
    "load_best_model_at_end=True needs the whole state": lambda run: bool(run.settings.get("save_only_model")),
}


@pytest.fixture(autouse=True)
def _no_progress(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    yield
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def fails(run: Run, folder: Path) -> str:
    """What is not as in the library's own run; empty: nothing."""
    theirs = seen(run, folder / "theirs", by_engine=False)
    mine = seen(run, folder / "mine", by_engine=True)
    error = mine.get("error")
    if isinstance(error, ConfigError):
        fair = any(re.match(re.escape(words), str(error)) and of(run) for words, of in REFUSALS.items())
        return "" if fair or type(theirs.get("error")) is ValueError else f"refused: {error}"
    if error is not None:
        return "" if type(error) is type(theirs.get("error")) else repr(error)
    return "\n".join(differences(mine, theirs)[:8])


@pytest.mark.parametrize("drawn", [any_run, any_trl_run])
def test_a_run_of_any_arguments_is_the_librarys_own_or_refused(
    campaign: Campaign, tmp_path: Path, drawn: Callable[[random.Random], Run]
) -> None:
    for seed in range(campaign.cases(1, 500)):
        run = drawn(random.Random(seed))
        assert not (words := fails(run, tmp_path)), f"seed {seed}: {words}\n{run}"


def test_an_epoch_that_ends_within_a_step_leaves_its_micro_batches_as_they_were_dealt_out(tmp_path: Path) -> None:
    """Its loss knows how many they were."""
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 1}
    run = Run(data="iterated", count=5, cls="own share", settings={"save_strategy": "no", **settings})
    assert not fails(run, tmp_path)
