"""``penstock train`` on several ranks by settings of any kind (``tests.any_settings``), which share the model in any
way: each has the numbers and the model of the plainest settings, or is refused by all.

A run is trained; and a second time, ended within a step, by a signal to one rank or a kill of it, and gone on with by
other settings that must not change numbers either, or cut for another number of ranks. Ranks that share sequences have
sums of their own, and three have: those are compared with the plainest settings of as many.
"""

import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from tests.any_settings import PLAINEST, Asked, Shelf, Tree, any_run, as_json, maybe, needs_norm
from tests.conftest import Campaign
from tests.ranks.launched import Launched
from tests.ranks.test_command import numbers

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = 13
"""The first case, which every run of the tests takes: a small one."""
IN_TURN = ("1f1b", "interleaved-1f1b", "zero-bubble")

ENDED = """
import os, signal, sys, threading
from penstock.cli import main
from penstock.engine.engine import Engine
plain, left, seconds = Engine.step, [int(sys.argv[2])], float(sys.argv[4])
def step(*given, **more):
    if not left[0] and os.environ["RANK"] == sys.argv[1]:
        end = (os.getpid(), signal.Signals[sys.argv[3]])
        threading.Timer(seconds, os.kill, end).start() if end[1] == signal.SIGKILL else os.kill(*end)
    left[0] -= 1
    return plain(*given, **more)
Engine.step = step
sys.exit(main(sys.argv[5:]))
"""
"""A command on a rank, one of which ends in the step that follows so many."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of so many ranks. ``layout``: the settings of how they share the model; ``end``: the rank that ends it, the
    number of steps before, the signal, and the seconds into the step of a kill; ``cut``: what it is cut for then, if it
    does not go on with as many."""

    asked: Asked
    ranks: int
    layout: Tree
    end: tuple[str, ...]
    cut: tuple[str, ...]

    @property
    def sharing(self) -> int:
        """The number of ranks that share the micro-batches of a step."""
        return self.ranks // int(self.layout.get("pipeline", 1)) // int(self.layout.get("cp", 1))

    @property
    def is_like_one(self) -> bool:
        """True if one process has the same sums."""
        return "cp" not in self.layout and not self.sharing & (self.sharing - 1)


def any_layout(drawn: Random) -> tuple[int, Tree]:
    """(ranks, the settings of how they share the model)."""
    ranks = drawn.choice((2, 2, 2, 3, 4))
    kind = drawn.choice(("all", "all", "each", "pipeline", "pipeline", "cp", "copies"))
    if kind == "pipeline":
        found: Tree = {"pipeline": drawn.choice([n for n in (2, 3, 4) if not ranks % n])}
        found["schedule"] = drawn.choice(("vertical", *IN_TURN))
        if found["pipeline"] < ranks:
            found |= maybe(drawn, 0.3, cp=(2,))
        return ranks, found
    if kind == "cp":
        return ranks, {"cp": drawn.choice([n for n in (2, 3, 4) if not ranks % n])}
    if kind == "copies":
        return 4, {"copies": 2, **maybe(drawn, 0.5, stage=(2, 3))}
    return ranks, {"stage": 0} if kind == "each" else maybe(drawn, 0.7, stage=(1, 2, 3))


def of_ranks(how: Tree, layout: Tree) -> Tree:
    """The settings without what several ranks refuse by name."""
    found = {key: value for key, value in how.items() if key not in ("stage", "replan")} | layout
    if "cp" in layout or layout.get("schedule") in IN_TURN:
        found.pop("recompute", None)
    if found.get("schedule", "vertical") != "vertical":
        found.pop("delay", None)
    places = {key: value for key, value in how["budget"].items() if value != "device"}
    return found | {"budget": places | {key: "64MiB" for key in ("device", "host") if places[key] in ("1MiB", "2MiB")}}


def any_case(seed: int, shelf: Shelf) -> Case:
    drawn = Random(seed)
    asked = any_run(drawn, shelf)
    ranks, layout = any_layout(drawn)
    case = Case(asked=asked, ranks=ranks, layout=layout, end=(), cut=())
    own = {key: value for key, value in asked.numbers.items() if key not in ("strands", "attention_heads", "mlp_tile")}
    (what, count), *_ = own["batch"].items()
    own["batch"] = {what: count * case.sharing}
    own |= {"micro_batch_size": 1} if "micro_batch_size" not in own else {}
    if drawn.random() < 0.4:
        own["strands"] = case.sharing * int(layout.get("cp", 1)) * drawn.choice((1, 2))
    signal = drawn.choice(("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT"))
    end = (str(drawn.randrange(ranks)), str(asked.stops - (signal != "SIGKILL")), signal, str(drawn.random() * 0.06))
    to = drawn.choice((1, 1, 2, 3, 4))
    piped = to > 1 and drawn.random() < 0.5 and "bloom" not in str(own["model"])  # whose blocks put out two tensors
    cut = ("--ranks", str(to), *(("--pipeline",) if piped else ()), "--cp", "1")
    asked = replace(asked, numbers=own, how=of_ranks(asked.how, layout), then=of_ranks(asked.then, layout))
    return replace(case, asked=asked, end=end, cut=cut if drawn.random() < 0.3 and "cp" not in layout else ())


# -- carrying it out ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A place to carry runs out in."""

    folder: Path

    def write(self, asked: Asked, name: str, how: Tree) -> str:
        text = as_json(asked.settings(self.folder / name, how))
        for place in ("drive", "prepared"):
            (self.folder / place).mkdir(exist_ok=True)
            text = text.replace(f"{{{place}}}", str(self.folder / place))
        (path := self.folder / f"{name}.yaml").write_text(text)
        return str(path)

    def start(self, ranks: int, *words: str) -> list[tuple[int, str, str]]:
        """(exit code, output, errors) of each rank; none says anything of Python's."""
        found = Launched(ranks, words, self.folder).outcomes()
        for rank, (_, _, errors) in enumerate(found):
            assert "Traceback" not in errors, f"rank {rank}: {errors}"
        return found

    def call(self, ranks: int, *words: str) -> str:
        """The words with which ``penstock WORDS`` is refused; empty: it is done."""
        found = self.start(ranks, "-m", "penstock", *words)
        if all(code == 0 for code, _, _ in found):
            return ""
        assert {code for code, _, _ in found} <= {1, 2}, found
        refused = [errors for code, _, errors in found if code == 2]
        assert refused, found
        assert all("penstock" in errors for _, _, errors in found)
        return refused[0]

    def done(self, ranks: int, *words: str) -> None:
        assert not (refused := self.call(ranks, *words)), f"{shlex.join(words)}: {refused}"

    def weights(self, name: str) -> dict[str, bytes]:
        """The model's files of weights, as they are exported; none of a run that keeps no state."""
        settings: Any = yaml.safe_load((self.folder / name / "config.yaml").read_text())
        if settings["budget"]["disk"] is None and settings["budget"]["durability"] == "none":
            return {}
        self.done(1, "verify", name)
        self.done(1, "export", name, f"{name}-out")
        return {path.name: path.read_bytes() for path in (self.folder / f"{name}-out").glob("*.safetensors")}


def go_on(bench: Bench, case: Case) -> None:
    """Train the run that was ended to its end; of one without stores as is advised."""
    asked = case.asked
    refused = bench.call(1, "reshard", "again", *case.cut) if case.cut else "it goes on with as many"
    if not refused or "From its snapshot" in refused:
        ranks, words = int(case.cut[1]), ("resume", "again", *refused.rpartition("resume again")[2].split())
        if bench.call(ranks, *words):  # what is not for these ranks was said, and can be taken back
            plain = ("--plan", "null", "--delay", "null", "--speculate", "null")
            places = [word for key in ("weights", "state", "gradients") for word in (f"--budget.{key}", "null")]
            bench.done(ranks, *words, *plain, *places)
    elif bench.call(case.ranks, "train", bench.write(asked, "again", asked.then), "--resume"):
        bench.done(case.ranks, "train", bench.write(asked, "again", asked.how), "--resume")


def check(case: Case, bench: Bench) -> str:
    """Carry out a case. The words with which it is refused; empty: it is not.

    Raises:
        AssertionError: it has other numbers, or ranks do not end as they should.
    """
    asked, ranks = case.asked, case.ranks
    if refused := bench.call(ranks, "train", bench.write(asked, "run", asked.how)):
        assert not (bench.folder / "run").exists(), "something is left of a run that never began"
        return refused
    plainest = PLAINEST | ({"speculate": False} if needs_norm(asked.numbers) else {})
    if case.is_like_one:
        asked = replace(asked, numbers={"strands": case.sharing, **asked.numbers})
        bench.done(1, "train", bench.write(asked, "plain", plainest))
    else:
        layout = {key: value for key, value in case.layout.items() if key != "schedule"}
        bench.done(ranks, "train", bench.write(asked, "plain", of_ranks(plainest, layout)))
    assert numbers(bench.folder / "run") == numbers(bench.folder / "plain"), "beside the plainest settings"
    weights = bench.weights("plain")
    assert bench.weights("run") in ({}, weights)

    words = ("-c", ENDED, *case.end, "train", bench.write(case.asked, "again", case.asked.how))
    ended = bench.start(ranks, *words)
    if case.end[2] != "SIGKILL":
        assert {code for code, _, _ in ended} == {143 if case.end[2] == "SIGTERM" else 130}, ended
    go_on(bench, case)
    assert numbers(bench.folder / "again") == numbers(bench.folder / "plain"), "of a run that was ended within a step"
    assert bench.weights("again") in ({}, weights)
    return ""


@pytest.mark.filterwarnings("ignore")
def test_settings_of_any_kind_on_several_ranks_have_the_numbers_of_the_plainest_or_are_refused(
    campaign: Campaign, tmp_path: Path
) -> None:
    shelf, trained = Shelf(tmp_path / "shelf"), 0
    for seed in range(FIRST, FIRST + campaign.cases(1, 400)):
        case = any_case(seed, shelf)
        (folder := tmp_path / "case").mkdir()
        try:
            trained += not check(case, Bench(folder=folder))
        except BaseException as error:
            error.add_note(f"seed {seed}: {case}")
            raise
        shutil.rmtree(folder)
    assert trained, "no settings were trained"
    campaign.found(f"{trained} random settings trained by 2 to 4 ranks: all with the numbers of the plainest")
