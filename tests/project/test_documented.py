"""Every command and snippet of the README and of docs/ is run as it stands there.

A command line and a snippet are run in a folder that holds tiny stand-ins for what they name: a model, chats, texts,
settings. ``SMALLER`` are flags that are added so that a run is small; ``NOT_RUN`` says of what is only looked at why,
and where it is run. What is in neither is run, so that a new block works or fails here.
"""

import ast
import json
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

import penstock
import penstock.hf
from penstock.cli import COMMANDS, doctor, export, init, main, plan, report, reshard, simulate, verify
from penstock.cli.arguments import ResumeArguments, TrainArguments
from penstock.cli.located import parse_yaml
from penstock.cli.settings import load, settings_below
from penstock.cli.words import read_words
from penstock.config import TrainConfig
from penstock.data import Batches, Step
from penstock.data.token_files import write_tokens
from penstock.hardware.profiles import save_profile
from tests.data_documents import MARKED_TEMPLATE, sentences, tokenizer, write_jsonl
from tests.data_victim import batches
from tests.documented import KINDS, ROOT, Block, blocks, commands_within_text
from tests.folders import write
from tests.machines import measured_here
from tests.questions import DRIVE, MACHINE
from tests.runs import write_text

BLOCKS = list(blocks())


@pytest.fixture(autouse=True, scope="module")
def wandb_is_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Other libraries' loops import it. It makes two temporary folders then, which go when the process ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("wandb")))
        import_module("wandb")


FOLDERS = ("/models/my-8b", "/ssd")
"""Places of the reader's machine, of which the stand-ins are in the test's folder."""

TINY = (
    *("--data.sequence_length", "64", "--batch", "{sequences: 2}", "--micro_batch_size", "1", "--device", "cpu"),
    *("--evaluate", "null", "--data.validation", "null", "--plan", "null", "--report_to", "[]"),
)
NEW = (
    *(*TINY, "--data.sources", "books/*.txt", "--data.tokenizer", "{train: {vocabulary: 300}}", "--steps", "2"),
    *("--model.config.num_hidden_layers", "2", "--model.config.hidden_size", "24"),
    *("--model.config.intermediate_size", "32", "--lr_schedule.warmup_steps", "1"),
)
SMALLER = {
    "penstock train examples/sft-8b-24gb.yaml": (*TINY, "--epochs", "0.5", "--budget.disk", "ssd/sft"),
    "penstock train examples/demo.yaml": NEW,
    "penstock train train.yaml": (*TINY, "--epochs", "0.5"),
    "penstock resume runs/my-8b": ("--steps", "4"),
    "penstock resume runs/b": ("--steps", "3"),
}
NOT_RUN = {
    "git clone": "there is nothing to clone from",
    "torchrun": "tests/ranks runs it: test_example.py and test_command.py",
    "penstock reshard": "there is no such run; test_reshard.py has one",
    "make demo": "two minutes; what it runs is its line in the Makefile, which is looked at here",
    "make test": "this is it",
    "make lint": "the checks run it",
    "make faults": "nine minutes",
    "make docs": "half a minute; test_site.py looks at the pages",
    "make wheel": "some minutes; test_wheel.py is a part of it",
    ".ci/run": "it runs this test",
    "penstock doctor --path": "it measures for a minute; test_doctor.py runs it",
    "penstock plan examples/sft-8b-24gb.yaml": "it searches for half a minute; test_examples.py plans it in short",
    "penstock plan --model llama-8b": "it searches for seconds; test_cli_plan.py plans others",
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small stand-ins for all that the documents name."""
    folder = tmp_path_factory.mktemp("stage")
    words = tokenizer(300)
    words.chat_template = MARKED_TEMPLATE
    model = write("llama-300", folder / "models" / "my-8b", torch.bfloat16, max_shard_size="1GB")
    words.save_pretrained(model)
    said = [{"role": "user", "content": "the water"}, {"role": "assistant", "content": "of the river"}]
    write_jsonl(folder / "chat.jsonl", [{"messages": said}] * 8)
    (folder / "books").mkdir()
    for number in range(2):
        write_text(folder / "books" / f"{number}.txt", 600)
    (folder / "config.yaml").write_text(
        'run: runs/mine\nmodel: models/my-8b\ndata: {sources: "books/*.txt", sequence_length: 32}\n'
        'optimizer: {lr: 1e-3}\nbudget: {device: 8MiB, host: 12MiB, disk: "{run}/store"}\nbatch: {sequences: 2}\n'
        "micro_batch_size: 1\nprecision: fp32\ndevice: cpu\nsteps: 2\n"
    )
    shutil.copy(folder / "config.yaml", folder / "CONFIG.yaml")
    (folder / "ssd").mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture
def here(
    stage: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
    one_simulation: None,
    each_model_is_looked_at_once: None,
) -> Path:
    """The current directory: the stage, on a machine that has been measured."""
    folder = tmp_path / "here"
    shutil.copytree(stage, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_profile(measured_here(replace(MACHINE, drives=(replace(DRIVE, path=str(folder)),))))
    return folder


def test_a_block_says_what_it_is() -> None:
    assert {block.place: block.kind for block in BLOCKS if block.kind not in KINDS} == {}


def test_no_entry_of_the_tables_is_left_over() -> None:
    lines = [line for block in BLOCKS for line in block.commands]
    for start in (*SMALLER, *NOT_RUN):
        assert any(line.startswith(start) for line in lines), start


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "sh"], ids=lambda block: block.place)
def test_the_commands_of_a_block_work(block: Block, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in block.commands:
        words = shlex.split(_in_place(line))
        not_run = next((start for start in NOT_RUN if line.startswith(start)), None)
        if not_run is not None:
            _looked_at(line, words)
            continue
        assert words[0] == "penstock", f"{block.place}: {line}"
        added = next((flags for start, flags in SMALLER.items() if line.startswith(start)), ())
        code = main([*words[1:], *added])
        assert code == 0, f"{line}: {capsys.readouterr().err}"


def _in_place(text: str) -> str:
    for folder in FOLDERS:
        text = text.replace(folder, folder.removeprefix("/"))
    return text


def _looked_at(line: str, words: list[str]) -> None:
    """What is not run is at least there, and of a form that is understood."""
    if words[0] == "make":
        done = subprocess.run(["make", "-n", words[1]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif words[0] == "penstock":
        _understood(words[1:])
    elif words[0] == "torchrun" and "penstock" in words:
        _understood(words[words.index("penstock") + 1 :])
    elif words[0] == "torchrun":
        assert (ROOT / next(word for word in words if word.endswith(".py"))).is_file(), line
    else:
        assert words[:2] == ["git", "clone"] or (ROOT / words[0]).is_file(), line


PARSERS = {
    "train": partial(read_words, TrainArguments),
    "resume": partial(read_words, ResumeArguments),
    "plan": plan.read_arguments,
    **{
        room.__name__.rpartition(".")[2]: partial(read_words, room.Arguments)
        for room in (doctor, export, init, report, reshard, verify)
    },
    "simulate": partial(read_words, simulate.Arguments),
}


def _understood(words: list[str]) -> None:
    if len(words) > 1 and not all(word.startswith("--") for word in words[1:]):
        PARSERS[words[0]](words[1:])
    else:
        assert words[0] in COMMANDS


@pytest.mark.parametrize(("page", "command"), list(commands_within_text()))
def test_a_command_within_the_text_is_understood(page: str, command: str) -> None:
    if command != "penstock plan --machine NAME":  # which is a part of one
        _understood(shlex.split(command)[1:])


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "python"], ids=lambda block: block.place)
def test_a_snippet_runs(block: Block, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it takes from the reader's own program. Transformers wants a GPU for bf16, and the reader has one."""
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    tree = ast.parse(_in_place(block.text))
    with ExitStack() as stack:
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        opened = {
            ast.unparse(i.optional_vars) for i in ast.walk(tree) if isinstance(i, ast.withitem) and i.optional_vars
        }
        names = {name: make(here, stack) for name, make in READERS_OWN.items() if name in named - opened}
        exec(compile(tree, block.place, "exec"), names)
        if "strategy" in names:
            names["strategy"].engine.close()


def _micro_batches(here: Path, stack: ExitStack) -> list[list[dict[str, torch.Tensor]]]:
    ids = torch.arange(1, 17).reshape(1, 16)
    return [[{"input_ids": ids, "labels": ids}] * 2] * 2


def _budget(here: Path, stack: ExitStack) -> penstock.Budget:
    return penstock.Budget(device="8MiB", host="12MiB", disk=here / "ssd" / "own")


def _dataset(here: Path, stack: ExitStack) -> Dataset:
    said = [{"role": "user", "content": "the water"}, {"role": "assistant", "content": "of the river"}]
    ids = list(range(1, 17))
    return Dataset.from_list([{"input_ids": ids, "labels": ids, "messages": said}] * 16)


def _pairs(here: Path, stack: ExitStack) -> Dataset:
    return Dataset.from_list([{"prompt": "the water", "chosen": " of the river", "rejected": " of the sea"}] * 4)


def _engine(here: Path, stack: ExitStack) -> penstock.Engine:
    config = AutoConfig.from_pretrained(here / "models" / "my-8b", vocab_size=320, use_cache=False)
    model = AutoModelForCausalLM.from_config(config)
    return stack.enter_context(penstock.wrap(model, optimizer=penstock.AdamW(), budget=_budget(here, stack), plan=None))


@dataclass
class _Few:
    """The first steps of batches without end."""

    batches: Batches

    def steps(self, position: Any) -> Iterator[Step]:
        with closing(self.batches.steps(position)) as steps:
            yield from islice(steps, 2)


def _batches(here: Path, stack: ExitStack) -> _Few:
    write_jsonl(here / "a.jsonl", ({"text": text} for text in sentences(40)))
    return _Few(batches(here, sources="a.jsonl"))


def _tokenizer(here: Path, stack: ExitStack) -> Any:
    words = tokenizer(300)
    words.chat_template = MARKED_TEMPLATE
    return words


READERS_OWN: Mapping[str, Callable[[Path, ExitStack], Any]] = {
    "penstock": lambda here, stack: penstock,
    "torch": lambda here, stack: torch,
    "loaded": lambda here, stack: penstock.hf.load(here / "models" / "my-8b"),
    "model": lambda here, stack: AutoModelForCausalLM.from_pretrained(here / "models" / "my-8b"),
    "tokenizer": _tokenizer,
    "texts": lambda here, stack: ["a penstock", "a turbine"],
    "dataset": _dataset,
    "pairs": _pairs,
    "budget": _budget,
    "steps": _micro_batches,
    "engine": _engine,
    "batches": _batches,
}
"""What a snippet may take for granted, under the names that the documents use."""


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "yaml"], ids=lambda block: block.place)
def test_settings_of_a_block_are_settings(block: Block, here: Path) -> None:
    """Over those of a whole file, as a reader would put them there."""
    given = parse_yaml(_in_place(block.text), block.place).plain()
    config = load(here / "config.yaml", [(key, json.dumps(value)) for key, value in given.items()])
    assert {setting.name for setting in settings_below(TrainConfig)} >= set(given)
    assert config.run == "runs/mine"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "json"], ids=lambda block: block.place)
def test_json_of_a_block_is_what_is_written(block: Block, tmp_path: Path) -> None:
    told = json.loads(block.text)
    write_tokens(tmp_path / "corpus.tokens", [[1, 2, 3]], dtype="uint16")
    written = json.loads((tmp_path / "corpus.json").read_text())
    assert {**told, "tokens": 3, "documents": 1}.items() <= written.items()
