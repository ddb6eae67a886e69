"""What settings name and is not there is said before anything heavy is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main

CONFIG = """\
run: {folder}/run
model: {{init: true, config: {{model_type: llama}}}}
data: {{sources: stdlib, tokenizer: {{train: {{vocabulary: 512}}}}, sequence_length: 64}}
optimizer: {{lr: 1e-3}}
budget: {{device: 64MiB, host: 24MiB, disk: "{{run}}/store"}}
batch: {{sequences: 2}}
steps: 5
"""


LONG = "long" * 64


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings, where importing what trains is an error of the test's: it takes seconds."""
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(folder=tmp_path))
    monkeypatch.setitem(sys.modules, "penstock.cli.train", None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "LOOP").symlink_to("LOOP")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.jsonl").touch()
    (tmp_path / "mixed" / "b.parquet").touch()
    model = tmp_path / "half"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / "pytorch_model.bin").touch()
    return path


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--data.sources", "{folder}/chat.jsonl"), "chat.jsonl' matches no file"),
        (("--data.sources", "{folder}/*.txt"), "*.txt' matches no file"),
        (("--data.sources", "chat.jsonl"), "'chat.jsonl' matches no file"),
        (("--data.sources", "[{{path: stdlib}}, {{path: {folder}/x.parquet}}]"), "x.parquet' matches no file"),
        (("--data.sources", "{folder}/empty"), "empty' is a folder without a file"),
        (("--data.sources", "{folder}/mixed"), "holds JSON (a.jsonl) and Parquet (b.parquet)"),
        (("--data.validation", "{{sources: held-out.jsonl}}", "--evaluate.every", "2"), "'held-out.jsonl' matches"),
        (("--data.tokenizer", "{folder}/tokenizer"), "data.tokenizer="),
        (("--data.chat_template", "{folder}/chat.jinja"), "data.chat_template="),
        (("--budget.disk", "{folder}/c.yaml/store"), "c.yaml is a file: give a folder"),
        (("--data.prepared", "{folder}/c.yaml"), "data.prepared='"),
        (("--run", "{folder}/c.yaml"), "c.yaml is a file: give a folder"),
        (("--data.prepared", "{folder}/LOOP"), "LOOP: Too many levels of symbolic links (ELOOP): remove the link"),
        (("--budget.disk", "{folder}/LOOP"), "LOOP: Too many levels of symbolic links (ELOOP): remove the link"),
        (("--data.sources", "{folder}/LOOP"), "LOOP is a link that leads back to itself: remove"),
        (("--data.sources", "{folder}/pipe"), "pipe' is neither a file nor a folder"),
        (("--data.tokenizer", "{folder}/pipe"), "what is there is no folder of a tokenizer: give one"),
        (("--data.chat_template", "{folder}/pipe"), "what is there is no file with a template: give one"),
        (("--data.chat_template", "{folder}/empty"), "what is there is no file with a template: give one"),
        (("--schedule", "{folder}/own.txt"), "there is no such file"),
        (("--model", "{folder}/nowhere"), "there is no such folder"),
        (("--model", "{folder}/empty"), "it has no config.json"),
        (("--model", "{folder}/c.yaml"), "is a file"),
        (("--model", "{folder}/half"), "its weights are pickles"),
        (("--model", "{{init: true, config: {folder}/nowhere/config.json}}"), "there is no such folder"),
    ],
)
def test_what_is_not_there_is_said_at_once(
    config: Path, tmp_path: Path, flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), *(flag.format(folder=tmp_path) for flag in flags)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_is_there_or_may_be_on_the_hub_goes_on(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"penstock\.cli\.train"):
        main(["train", str(config)])
    (tmp_path / "chat.jsonl").touch()
    with pytest.raises(ImportError, match=r"penstock\.cli\.train"):
        main(["train", str(config), "--data.sources", f"[{tmp_path}/*.jsonl, owner/name]", "--model", "owner/name"])


def test_looking_for_files_imports_no_torch(config: Path) -> None:
    """In a process of its own, as this one has imported it long ago."""
    code = (
        "import sys; from penstock.cli import main; "
        f"code = main(['train', {str(config)!r}, '--data.sources', 'a.jsonl', '--model', {str(config.parent)!r}]); "
        "sys.exit(code * 10 + len({'torch', 'transformers', 'pyarrow', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "matches no file" in done.stderr
    assert done.returncode == 20


@pytest.mark.parametrize(
    "words",
    [
        *(
            ("train", "c.yaml", f"--{key}", LONG)
            for key in ("run", "data.prepared", "data.tokenizer", "data.chat_template", "budget.disk", "schedule")
        ),
        ("train", "c.yaml", "--data.sources", LONG),
        ("train", "c.yaml", "--model", LONG),
        ("train", "c.yaml", "--resume", "--run", LONG),
        *((command, LONG) for command in ("resume", "verify", "report", "runs", "simulate")),
        ("export", LONG, "out"),
        ("reshard", LONG, "--ranks", "2"),
        ("plan", "--model", "llama-8b", "--machine", LONG),
        ("simulate", "1f1b", "--costs", LONG),
        ("simulate", "1f1b", "--html", LONG),
    ],
    ids=" ".join,
)
def test_a_name_that_no_file_can_have_is_refused_as_what_was_asked_for(
    words: tuple[str, ...], config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    before = sorted(config.parent.iterdir())
    if "--resume" in words or words[0] == "resume":
        monkeypatch.delitem(sys.modules, "penstock.cli.train")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "file systems take no names this long" in said
    assert sorted(config.parent.iterdir()) == before
