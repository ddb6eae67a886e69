"""Every system call of every command on a run's files fails in turn, or is the command's last: one command goes on."""

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import pytest

from penstock.cli.run_folder import settings_of, write_settings
from penstock.state.slots import Slots
from penstock.store.facts import facts_of
from penstock.store.owner import RUN_FILE
from penstock.store.store import Store
from penstock.store.transfer import aligned_bytes
from tests.conftest import Campaign
from tests.interposed import FAILS, Commands, Ended, commands
from tests.runs import write_text

CONFIG = """\
run: {run}
model:
  init: true
  config: {{model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 2}}
data:
  sources: "{text}"
  tokenizer: {{train: {{vocabulary: 270}}}}
  sequence_length: 16
  packing: continuous
optimizer: {{lr: 3e-3}}
budget: {{device: 8MiB, host: 12MiB, disk: "{disk}", weights: disk, state: disk}}
batch: {{sequences: 2}}
micro_batch_size: 1
delay: 0
speculate: false
device: cpu
steps: 2
plan: null
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the commands work, put back before each case. ``work`` holds the run's folder, ``drive`` its store."""

    folder: Path
    commands: Commands

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def run(self) -> Path:
        return self.work / "run"

    @property
    def drive(self) -> Path:
        return self.folder / "drive"

    @property
    def folders(self) -> tuple[Path, Path]:
        return self.work, self.drive

    def penstock(self, words: Sequence[str], *, fault: str = "EIO", at: int = -1) -> Ended:
        counted = (*self.folders, *(self.folder / name for name in ("config.yaml", "text.txt", "base")))
        return self.commands.run(words, counted, fault=fault, at=at)

    def train(self, *words: str, fault: str = "EIO", at: int = -1) -> Ended:
        return self.penstock(["train", str(self.folder / "config.yaml"), *words], fault=fault, at=at)

    def put(self, before: str | None) -> None:
        """What ``keep`` has kept under this name; None: nothing. Nor is anything left of what was measured."""
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
            if before is None:
                folder.mkdir()
            else:
                shutil.copytree(self.folder / f"{folder.name}-{before}", folder)

    def keep(self, name: str) -> None:
        for folder in self.folders:
            shutil.copytree(folder, self.folder / f"{folder.name}-{name}")

    def step(self) -> int:
        """The last step that is committed."""
        facts = facts_of([self.drive / "run"])
        return 0 if facts is None else facts.step or 0

    def left_without_a_step(self) -> bool:
        facts = facts_of([self.drive / "run"])
        return facts is not None and facts.step == 0

    def outcome(self) -> dict[str, str]:
        """All that a run comes to: the numbers of its steps, and the bits of its state."""
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        numbers = [json.loads(line) for line in lines]
        found = {f"line {n}": f"{of['step']} {of['loss']!r} {of['grad_norm']!r}" for n, of in enumerate(numbers)}
        with Store.open([self.drive / "run"]) as store:
            slots = Slots(store)
            for extent in store.layout.extents:
                buffer = aligned_bytes(extent.stride)
                store.read(extent.name, 0, buffer, slots.current(extent.name))
                found[extent.name] = sha256(bytes(buffer)).hexdigest()
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("calls")
    text = write_text(folder / "text.txt", 300)
    with commands(folder) as started:
        found = Place(folder=folder, commands=started)
        (folder / "config.yaml").write_text(CONFIG.format(run=found.run, text=text, disk=found.drive / "{run}"))
        found.put(None)
        for steps in (1, 2):
            ended = found.train("--resume", "--steps", str(steps))
            assert ended.code == 0, ended.said
            write_settings(found.run, replace(settings_of(found.run), steps=2))  # as of a run that was ended before
            found.keep(f"after {steps}")
        found.put(None)
        at = found.train("--resume").calls("SIGKILL") * 3 // 4
        while not found.left_without_a_step():  # a kill between the making of the store and its first step
            at += 15
            found.put(None)
            assert found.train("--resume", fault="SIGKILL", at=at).code < 0, "the kill never comes there"
        found.keep("a beginning")
        found.put("after 2")
        ended = found.penstock(["export", str(found.run), str(folder / "base")])
        assert ended.code == 0, ended.said
        yield found


def cases(name: str, clean: Ended, campaign: Campaign, few: int) -> list[tuple[str, int]]:
    """(fault, number of the call) of the command that ended so when nothing happened to it."""
    found = [(fault, at) for fault in FAILS for at in range(clean.calls(fault))]
    return random.Random(name).sample(found, min(campaign.cases(few, 400), len(found)))


STARTS = {
    "a run begins": (None, ["--resume"]),
    "a run goes on": ("after 1", ["--resume"]),
    "a run is replaced": ("after 1", ["--overwrite"]),
    "a run is begun": (None, []),
    "a run from a folder begins": (None, ["--resume", "--model", "{base}", "--data.tokenizer", "null"]),
    "a start fails and takes back what it made": (None, ["--budget.device", "64KiB"]),
    "a beginning of nothing is begun again": ("a beginning", ["--resume"]),
}
"""What is there before, and the words of the start that is hit."""


@pytest.mark.sampled(3, values=False)
@pytest.mark.parametrize("name", STARTS)
def test_one_command_does_whatever_a_start_was_hit_by(name: str, place: Place, campaign: Campaign) -> None:
    """A start ends by an error in words, and removes nothing that is committed; ``train --resume`` then has the bits
    of a run that nothing happened to."""
    before, words = STARTS[name]
    words = [word.format(base=place.folder / "base") for word in words]
    again_words = ["--resume", *(words[1:] if "--model" in words else [])]
    place.put(before)
    clean = place.train(*words)
    place.train(*again_words)
    truth = place.outcome()
    tried: Counter[str] = Counter()
    wrong: list[str] = []
    for fault, at in cases(name, clean, campaign, 1):
        place.put(before)
        ended = place.train(*words, fault=fault, at=at)
        done, case = place.step(), f"{name}: {fault} at call {at}, {ended.struck}: "
        said = max((int(n) for n in re.findall(r"^step (\d+)/2", ended.said, re.MULTILINE)), default=0)
        if fault != "SIGKILL" and not ended.clean:
            wrong.append(f"{case}exit code {ended.code}\n{ended.said}")
        if done < said or (before == "after 1" and name != "a run is replaced" and not done):
            wrong.append(f"{case}step {said} was done, and the store has {done}\n{ended.said}")
        known = at % 2 and (place.run / RUN_FILE).exists() and clean.code == 0  # the folder knows its settings
        again = place.penstock(["resume", str(place.run)]) if known else place.train(*again_words)
        if again.code != 0 or place.outcome() != truth:
            word = "resume" if known else "train --resume"
            wrong.append(f"{case}then {word}: exit code {again.code}\n{ended.said}\n--- then\n{again.said}")
        tried[fault] += 1
    assert not wrong, f"{len(wrong)} of {tried.total()}\n" + "\n\n".join(wrong)
    campaign.found(f"system calls, {name}: {dict(tried)}: all ended in words, all went on bit-equal")


READERS = {
    "export": (["export", "{run}", "{work}/out"], "out"),
    "verify": (["verify", "{run}"], None),
    "report": (["report", "{run}", "--trace", "{work}/out.json"], None),
    "plan": (["plan", "{config}", "--machine", "workstation", "--device", "cuda"], None),
    "resume": (["resume", "{run}"], None),
    "doctor": (["doctor", "--quick", "--path", "{drive}"], None),
}
SECONDS_EACH = {"plan": 40, "doctor": 10}
"""Commands that take seconds, and how many cases of them are enough."""


@pytest.mark.sampled(4, values=False)
@pytest.mark.parametrize("name", READERS)
def test_a_command_on_a_run_ends_in_words_and_leaves_it_as_it_was(name: str, place: Place, campaign: Campaign) -> None:
    """What it writes is there whole or not at all."""
    if name in SECONDS_EACH and not campaign.full:
        pytest.skip("each case takes seconds: make faults does it")
    words, made = READERS[name]
    names = {"run": place.run, "work": place.work, "drive": place.drive, "config": place.folder / "config.yaml"}
    words = [word.format(**names) for word in words]
    place.put("after 2")
    truth = place.outcome()
    assert settings_of(place.run).steps == 2

    def files() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in (place.work / (made or "-")).rglob("*") if p.is_file()}

    clean = place.penstock(words)
    assert clean.code == 0, clean.said
    whole = files()
    wrong: list[str] = []
    tried: Counter[str] = Counter()
    for fault, at in cases(name, clean, campaign, 1)[: SECONDS_EACH.get(name)]:
        place.put("after 2")
        ended = place.penstock(words, fault=fault, at=at)
        case = f"{fault} at call {at}, {ended.struck}: "
        if fault != "SIGKILL" and not ended.clean:
            wrong.append(f"{case}exit code {ended.code}\n{ended.said}")
        if files() not in ({}, whole):
            wrong.append(f"{case}half written: {sorted(files())}\n{ended.said}")
        # Killed in the moments between the end of its work and its own, it has made what is not replaced unasked.
        done = made is not None and fault == "SIGKILL" and files() == whole
        again = place.penstock(words) if ended.code else ended
        refused = done and again.code == 2 and f"{place.work / 'out'} exists" in again.said
        if (again.code != 0 and not refused) or files() != whole or place.outcome() != truth:
            wrong.append(f"{case}then: exit code {again.code}\n{again.said}")
        tried[fault] += 1
    assert not wrong, f"{len(wrong)} of {tried.total()}\n" + "\n\n".join(wrong)
    campaign.found(f"system calls, penstock {name}: {dict(tried)}: all ended in words, all right when done again")
