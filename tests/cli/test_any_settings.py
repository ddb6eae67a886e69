"""Settings of any kind (``tests.any_settings``): each trains to the numbers of the plainest ones, or is refused.

A run is planned, trained, verified, exported, reported, and trained a second time by the same settings, ended within a
step, by Ctrl-C or a kill, and gone on with by others that must not change numbers either. Settings with one mistake are
refused by the name of what is wrong.
"""

import copy
import json
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from penstock.cli import main
from penstock.cli.settings import load
from penstock.engine.engine import Engine
from penstock.errors import ConfigError
from penstock.hardware.profiles import save_profile
from penstock.planner import search
from penstock.planner.ask import PlanReport
from tests import warm
from tests.any_settings import PLAINEST, Asked, Shelf, Tree, any_run, as_json, needs_norm
from tests.conftest import Campaign
from tests.engine.test_prediction import machine
from tests.machines import measured_here
from tests.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("one_thread")

_NUMBERS = (
    *("step", "loss", "grad_norm", "lr", "tokens", "data_tokens", "loss_tokens", "data_passes", "truncated_tokens"),
    *("clipped", "skipped", "loss_scale", "validation_loss"),
)
"""What a line of metrics has of training, and not of the machine."""

_KILLED = """
import os, signal, sys, threading
from penstock.cli import main
from penstock.engine.engine import Engine
plain, left = Engine.step, [int(sys.argv[2])]
def step(*given, **more):
    if not left[0]:
        threading.Timer(float(sys.argv[3]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    left[0] -= 1
    return plain(*given, **more)
Engine.step = step
main(["train", sys.argv[1]])
"""
"""Trains, and kills itself within or soon after the step that follows so many."""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are simulated once and weighed against nothing, as any of them has to have the same numbers."""
    monkeypatch.setattr(search, "SIMULATIONS", 1)
    monkeypatch.setattr(PlanReport, "curve", ())
    monkeypatch.setattr(PlanReport, "advice", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = machine(tmp_path)
    rates = [f"{name}.{form}" for name in ("adamw", "adam", "sgd", "momentum", "lion", "muon") for form in _FORMS]
    host = replace(here.host, optimizer=dict.fromkeys(rates, 1e8))
    device = replace(here.device, flops=dict.fromkeys(_FORMS, 1e11))
    save_profile(measured_here(replace(here, host=host, device=device)))


_FORMS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A place to carry runs out in."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def call(self, *words: object) -> tuple[int, str, str]:
        """(exit code, what it said, what it complained about)."""
        self.capsys.readouterr()
        code = main([str(word) for word in words])
        said = self.capsys.readouterr()
        return code, said.out, said.err

    def done(self, *words: object) -> str:
        code, out, err = self.call(*words)
        assert code == 0, f"penstock {words[0]}: {err}"
        return out

    def write(self, asked: Asked, run: Path, how: Mapping[str, Any]) -> Path:
        places = {"{drive}": self.folder / "drive", "{prepared}": self.folder / "prepared"}
        text = as_json(asked.settings(run, how))
        for name, place in places.items():
            place.mkdir(exist_ok=True)
            text = text.replace(name, str(place))
        (path := self.folder / f"{run.name}.yaml").write_text(text)
        return path

    def weights(self, run: Path) -> Mapping[str, bytes]:
        """The model's files of weights, as they are exported."""
        out = self.folder / f"{run.name}-out"
        self.done("export", run, out)
        return {path.name: path.read_bytes() for path in out.glob("*.safetensors")}


def _metrics(run: Path) -> list[Tree]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _numbers(run: Path) -> list[tuple[Any, ...]]:
    return [tuple(line.get(key) for key in _NUMBERS) for line in _metrics(run)]


def _resolved(run: Path) -> Tree:
    found: Tree = yaml.safe_load((run / "config.yaml").read_text())
    return found


def _keeps(settings: Tree) -> bool:
    """True if a run leaves its state when it ends."""
    return settings["budget"]["disk"] is not None or settings["budget"]["durability"] != "none"


def _check_what_is_said(bench: Bench, run: Path, steps: int) -> None:
    lines, settings = _metrics(run), _resolved(run)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        for tier, most in (line.get("planned_peak_bytes") or {}).items():
            assert line["peak_bytes"].get(tier, 0) <= most, f"memory of step {line['step']}"
    assert bench.call("verify", run)[0] == (0 if _keeps(settings) else 2)
    code, _, why_not = bench.call("report", run)
    assert (code, (run / "report.html").exists()) == ((0, True) if settings["trace_steps"] != 0 else (2, False)), (
        why_not
    )
    (said,) = json.loads(bench.done("runs", run, "--json"))
    assert (said["state"], said["step"], said["loss"]) == ("complete", steps, lines[-1]["loss"])
    if settings["plan"] == "auto":
        assert (run / "prediction.json").exists()
        assert all((line.get("predicted_seconds") or 1) > 0 for line in lines)  # none of steps by another plan


def _end_within_a_step(bench: Bench, asked: Asked, config: Path, drawn: Random) -> None:
    if asked.killed:
        words: list[str | Path] = ["-c", _KILLED, config, str(asked.stops), str(drawn.random() * 0.06)]
        assert "Traceback" not in warm.run(words, timeout=PATIENCE).stderr
        return
    plain, left = Engine.step, [asked.stops - 1]

    def step(*given: Any, **more: Any) -> Any:
        if not left[0]:
            signal.raise_signal(signal.SIGINT)
        left[0] -= 1
        return plain(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", step)
        assert bench.call("train", config)[0] == 130


def check(asked: Asked, bench: Bench, drawn: Random) -> str:
    """Carry out a run. The words with which it is refused; empty: it is not.

    Raises:
        AssertionError: it has other numbers, or a command says what is not so.
    """
    run, plain, again = (bench.folder / name for name in ("run", "plain", "again"))
    config = bench.write(asked, run, asked.how)
    can_be, _, why_not = bench.call("plan", config)
    code, _, refused = bench.call("train", config)
    if code:
        assert code == 2, refused
        assert refused.startswith("penstock: ")
        assert not run.exists() or not any(run.iterdir()), "something is left of a run that never began"
        assert can_be == 2 or "data" in refused or "prepared" in refused, f"planned, and refused: {refused}"
        return refused
    assert can_be == 0, f"trained, and not planned: {why_not}"
    _check_what_is_said(bench, run, asked.steps)

    same = Asked(
        **{**vars(asked), "numbers": {**asked.numbers, "micro_batch_size": _resolved(run)["micro_batch_size"]}}
    )
    waits = {"speculate": False} if needs_norm(asked.numbers) else {}
    bench.done("train", bench.write(same, plain, PLAINEST | waits))
    assert _numbers(run) == _numbers(plain), "beside the plainest settings"
    weights = bench.weights(plain)
    assert not _keeps(_resolved(run)) or bench.weights(run) == weights

    _end_within_a_step(bench, asked, bench.write(same, again, asked.how), drawn)
    code, _, refused = bench.call("train", bench.write(same, again, asked.then), "--resume")
    if code:
        assert code == 2, refused
        bench.done("train", bench.write(same, again, asked.how), "--resume")
    assert _numbers(again) == _numbers(plain), "of a run that was ended within a step"
    assert not _keeps(_resolved(again)) or bench.weights(again) == weights
    _check_what_is_said(bench, again, asked.steps)
    return ""


@pytest.mark.usefixtures("planned")
@pytest.mark.filterwarnings("ignore")
def test_settings_of_any_kind_have_the_numbers_of_the_plainest_or_are_refused(
    campaign: Campaign, shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = 0
    for seed in range(campaign.cases(1, 2000)):
        drawn = Random(seed)
        asked = any_run(drawn, shelf)
        (folder := tmp_path / "case").mkdir()
        try:
            trained += not check(asked, Bench(folder=folder, capsys=capsys), drawn)
        except Exception as error:  # noqa: BLE001  any is a finding
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}\n{as_json(vars(asked))}")
        shutil.rmtree(folder)
    assert trained, "no settings were trained"


# -- mistakes -----------------------------------------------------------------------------------------------------

_WRONG: Mapping[type, tuple[Any, ...]] = {
    bool: ("maybe", [True], {"x": 1}, 2.5, "\u0442\u0440\u0443"),
    int: ([1], {"x": 1}, "many", "1MBB", -7, float("nan"), "\u0663x"),
    float: ([0.5], {"x": 1}, "half", -3.0, float("nan"), float("inf")),
    str: ([["x"]], {"odd": {"x": 1}}, True),
    type(None): ({"odd": {"x": [1]}},),
}
_ELSEWHERE = ("beta", "sequence_len", "slots", "momentum", "every", "tbw", "match", "w\u00f6rter")
"""Keys of other sections, of other tools, and of none."""


def _places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every value but those of a model's own configuration."""
    if isinstance(tree, dict | list) and at[:2] != ("model", "config"):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _places(value, (*at, key))
    elif at[:2] != ("model", "config"):
        yield at


def _mistake(drawn: Random, tree: Tree) -> tuple[str, str]:
    """(settings with something wrong, what that is called)."""
    at = drawn.choice([*_places(tree)])
    name = next(key for key in reversed(at) if isinstance(key, str))
    parent: Any = tree
    for key in at[:-1]:
        parent = parent[key]
    change = drawn.choice(("value", "value", "key", "twice"))
    if change == "value" or isinstance(parent, list):
        parent[at[-1]] = drawn.choice(_WRONG[type(parent[at[-1]])])
    elif change == "key":
        name = drawn.choice([key for key in _ELSEWHERE if key not in parent])
        parent[name] = 1
    text = json.dumps(tree, ensure_ascii=False)
    return (text.replace(f'"{name}":', f'"{name}": 1, "{name}":', 1) if change == "twice" else text), name


def test_settings_with_a_mistake_are_refused_by_its_name(campaign: Campaign, shelf: Shelf, tmp_path: Path) -> None:
    path, tried = tmp_path / "c.yaml", 0
    for seed in range(campaign.cases(60, 10_000)):
        drawn = Random(seed)
        asked = any_run(drawn, shelf)
        asked.how["budget"].pop("disk", None)  # which names a place
        tree = asked.settings(tmp_path / "run", asked.how)
        path.write_text(as_json(tree))
        try:
            load(path)
        except ConfigError:
            continue
        text, name = _mistake(drawn, copy.deepcopy(tree))
        path.write_text(text)
        with pytest.raises(ConfigError) as refused:
            load(path)
        assert name in str(refused.value), f"seed {seed}: {text}"
        tried += 1
    assert tried
