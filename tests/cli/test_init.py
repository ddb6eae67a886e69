"""``penstock init`` writes settings that the reader of settings takes as they are."""

import gzip
import io
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import first_look, main
from penstock.cli.commented import written
from penstock.cli.first_look import DataFacts, DiskFacts, MachineFacts, ModelFacts, look_at_disk
from penstock.cli.located import parse_yaml
from penstock.cli.proposal import length_in_words, propose
from penstock.cli.settings import load, load_text, settings_below
from penstock.config import ModelConfig, SourceConfig, TrainConfig
from penstock.data import write_tokens

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
ODD = (
    "a b.jsonl",
    "null",
    "1e5",
    "x: y",
    "#x",
    "'\"",
    "- a",
    "ü\u0085\u2028.txt",
    "{run}",
    "tab\there\nand there",
    "*a",
)
"""Names that YAML would take for something else, or a comment would end at."""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration and text, and no profile of a machine; it is where the command runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 128}))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "one document"}) + "\n")
    return tmp_path


LONG = "long" * 64
GIVEN = ("--model", "config.json", "--data", "text.jsonl", "--disk", "ssd")


def test_any_answers_round_trip_through_the_reader_of_settings() -> None:
    for seed in range(12):
        model, data, disk, machine, run = _answers(random.Random(seed))
        proposal = propose(model=model, data=data, disk=disk, machine=machine, run=run)
        text = written(proposal.settings, proposal.reasons, proposal.title)
        assert parse_yaml(text, "file").plain() == proposal.settings, text
        config = load_text(text, "file")
        assert config.model == model.settings
        assert config.data.each_source == data.sources
        assert config.budget.device_bytes <= machine.device
        assert config.budget.host_bytes <= machine.host
        assert len(config.budget.disk_paths) == len(disk.paths)


def _answers(draw: random.Random) -> tuple[ModelFacts, DataFacts, DiskFacts, MachineFacts, Path | None]:
    def name() -> str:
        return draw.choice(ODD)

    scratch = draw.random() < 0.5
    config: dict[str, Any] = LLAMA | ({"max_position_embeddings": draw.choice([2, 512, 131072])} if scratch else {})
    model = ModelFacts(
        settings=ModelConfig(config=name(), init=True) if scratch else ModelConfig(path=name()),
        config=config,
        parameters=draw.choice([None, 10**6, 8 * 10**9, 10**12]),
        template=draw.choice([None, True, False]),
        tokenizer=draw.random() < 0.7,
    )
    sources = tuple(
        draw.choice([SourceConfig(path=name()), SourceConfig(path=name(), fields={"text": name()})])
        for _ in range(draw.randint(1, 3))
    )
    data = DataFacts(
        sources=sources,
        forms=tuple(f"{source.path}: {name()}" for source in sources),
        kinds=frozenset(draw.sample(["text", "chat", "completion", "tokens"], draw.randint(0, 2))),
        documents=draw.choice([1, 999, 2000]),
        nbytes=draw.choice([None, 1, 10**6, 10**9, 10**13]),
        tokens=draw.choice([None, 0, 10**6, 10**12]),
    )
    disk = DiskFacts(paths=tuple(map(Path, draw.sample(ODD, draw.randint(0, 2)))), free=draw.choice([None, 1, 10**12]))
    machine = MachineFacts(
        name=draw.choice([None, name()]),
        kind=draw.choice(["cpu", "cuda"]),
        title=name(),
        device=draw.randint(1 << 20, 1 << 37),
        host=draw.randint(1 << 20, 1 << 40),
        how=name(),
    )
    return model, data, disk, machine, draw.choice([None, Path(name())])


def test_what_is_written_is_explained_in_the_words_of_the_settings(there: Path) -> None:
    assert main(["init", *GIVEN]) == 0
    text = " ".join((there / "train.yaml").read_text().replace("#", "").split())
    meanings = {setting.name: setting.meaning for setting in settings_below(TrainConfig)}
    for name in ("data.sequence_length", "optimizer.lr", "budget.host", "batch.sequences", "epochs"):
        assert " ".join(meanings[name].split()) in text, name
    assert "\n# penstock plan train.yaml    what to expect of it\n" in (there / "train.yaml").read_text()
    config = load(there / "train.yaml")
    assert config.model.name == "config.json"
    assert config.data.sequence_length == 128, "no more than the model's positions"
    assert config.data.training is not None, "there is no tokenizer beside the configuration"


def test_token_ids_are_refused_where_no_tokenizer_is_beside_the_configuration(
    there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(there / "c.tokens", [[1, 2, 3]])
    assert main(["init", *GIVEN[:2], "--data", "c.tokens", *GIVEN[4:]]) == 2
    assert "'c.tokens' is token ids, and the model brings no tokenizer: put the one that" in capsys.readouterr().err
    assert not (there / "train.yaml").exists()


def test_a_file_that_is_there_stays_unless_it_may_go(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (there / "train.yaml").write_text("mine")
    assert main(["init", *GIVEN]) == 2
    assert "train.yaml: it is there already: --overwrite" in capsys.readouterr().err
    assert (there / "train.yaml").read_text() == "mine"
    assert main(["init", *GIVEN, "--overwrite"]) == 0
    assert load(there / "train.yaml").model == ModelConfig(config="config.json", init=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give --model NAME and --data FILE and --disk DIR (or --disk none)"),
        (GIVEN[:4], "there is no terminal here: give --disk DIR"),
        ((*GIVEN, "--model=./gone"), "--model is given twice"),
        (("--model", "./gone", *GIVEN[2:]), "--model: ./gone: there is no such folder"),
        (("--model", "text.jsonl", *GIVEN[2:]), "--model: text.jsonl is a file"),
        ((*GIVEN, "--data", "gone.jsonl"), "--data: data: 'gone.jsonl' matches no file"),
        ((*GIVEN[:3], "{path: text.jsonl, feilds: {text: a}}", *GIVEN[4:]), "did you mean fields?"),
        ((*GIVEN[:5], "text.jsonl/ssd"), "--disk text.jsonl/ssd: "),
        ((*GIVEN, "--disk", "none"), "--disk none beside other directories"),
        ((*GIVEN, "--machine", "h101"), "there is no machine 'h101'"),
        ((*GIVEN, "--output", "gone/a.yaml"), "--output gone/a.yaml: gone is no folder"),
        ((*GIVEN[:3], "{}", *GIVEN[4:]), "--data: the mapping lacks path"),
        ((*GIVEN[:5], "/x/{nope}"), "--disk '/x/{nope}': {nope} stands for nothing; {run} does"),
        ((*GIVEN, "--disk", "./ssd"), "--disk ./ssd is given twice"),
        ((*GIVEN, "--run", "text.jsonl"), "run='text.jsonl': text.jsonl is a file: give a folder"),
        ((*GIVEN, "--run", LONG), "give a shorter one"),
        ((*GIVEN, "--output", LONG), "give a shorter one"),
        ((*GIVEN[:5], LONG), "give a shorter one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_of_no_use_is_named_with_its_flag_and_nothing_is_written(
    words: tuple[str, ...], said: str, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (there / "train.yaml").exists()


def test_on_a_terminal_it_asks_and_asks_again(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("./gone\nconfig.json\ntext.jsonl\nworkstation\n/nvme\n"))
    assert main(["init"]) == 0
    said = capsys.readouterr()
    assert "there is no such folder" in said.err
    assert "penstock plan train.yaml --machine workstation" in said.out
    config = load(there / "train.yaml")
    assert config.budget == replace(config.budget, disk=f"/nvme/{Path(config.run).name}")
    monkeypatch.setattr(sys, "stdin", Terminal("config.json\n"))
    assert main(["init", "--output", "b.yaml"]) == 2
    assert not (there / "b.yaml").exists()


def test_directories_on_one_drive_have_its_free_space_once(tmp_path: Path) -> None:
    one = look_at_disk([str(tmp_path / "a")], here=True).free
    two = look_at_disk([str(tmp_path / "a"), str(tmp_path / "b")], here=True).free
    assert one is not None
    assert two is not None
    assert two < 1.5 * one


def test_several_sources_that_will_be_streamed_have_their_sizes_as_shares(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which training would ask for."""
    monkeypatch.setattr(first_look, "STREAM_FROM", 1000)
    text = "".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(100)).encode()
    (there / "a.jsonl").write_bytes(text)
    (there / "b.JSONL.GZ").write_bytes(gzip.compress(text))
    names = ["a.jsonl", "b.JSONL.GZ"]
    sizes = [len(text), 4 * (there / names[1]).stat().st_size]
    found = first_look.look_at_data(names, template=None, tokenizer=True)
    assert [source.weight for source in found.sources] == pytest.approx([size / 1e9 for size in sizes], rel=0.01)
    assert found.nbytes == sum(sizes)
    alone = first_look.look_at_data(names[:1], template=None, tokenizer=True)
    assert [source.weight for source in alone.sources] == [None]


def test_tokens_are_counted_as_wide_as_they_are_and_no_more_text_than_its_limit(there: Path) -> None:
    """What the batch and the number of steps are proposed by."""
    write_tokens(there / "narrow.tokens", [[1] * 6000], dtype="uint16")
    write_tokens(there / "wide.tokens", [[1] * 6000], dtype="uint32")
    (there / "raw.bin").write_bytes(bytes(4 * 6000))
    raw = "{path: raw.bin, dtype: uint32}"
    for path in ("narrow.tokens", "wide.tokens", raw):
        data = first_look.look_at_data([path], template=None, tokenizer=True)
        assert data.tokens == 6000, path
        assert length_in_words(data, 1, 60) == "about 100 steps; or give steps instead"
    (there / "a.txt").write_text("text " * 1000)
    text = first_look.look_at_data(["a.txt", "{path: a.txt, limit: 2000}"], template=None, tokenizer=True)
    assert text.tokens == (5000 + 2000) // 4
    assert length_in_words(text, 1, 175) == "about 10 steps, at 4 bytes a token; or give steps instead"


def test_a_run_has_a_directory_of_its_own_where_its_place_is_named(there: Path) -> None:
    for given, disk in {"ssd": "ssd/mine", "ssd/{run}": "ssd/mine", "{run}/store": "runs/mine/store"}.items():
        assert main(["init", *GIVEN[:5], given, "--run", "runs/mine", "--overwrite"]) == 0
        assert load(there / "train.yaml").budget.disk == disk
