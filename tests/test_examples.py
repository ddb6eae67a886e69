"""The examples: each is a settings file without a mistake, and fits the machine that it says it is for."""

import json
import re
from pathlib import Path

import pytest

from penstock.cli.settings import load
from penstock.cli.task import task_of
from penstock.plan.batches import cuts
from penstock.plan.profiles import machine_named, on_directories
from penstock.plan.search import estimate

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FILES = sorted(EXAMPLES.glob("*.yaml"))

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
"""The configuration of the model that is on the hub under the names below."""


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_read_and_says_how_to_run_it(path: Path) -> None:
    load(path)
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert re.search(rf"penstock train examples/{path.name}|make {path.stem}", "\n".join(head))


@pytest.mark.parametrize("path", [p for p in FILES if "--machine" in p.read_text()], ids=lambda path: path.stem)
def test_an_example_fits_the_machine_that_it_is_for(path: Path, llama_8b: Path) -> None:
    """The machine is that of the ``penstock plan`` line in its comment; a model from the hub is there as its config."""
    named = re.search(rf"penstock plan examples/{path.name} --machine (\S+)", path.read_text())
    assert named is not None
    config = load(path)
    if config.model.path is not None:
        assert config.model.path.startswith("meta-llama/Llama-3.1-8B")
        config = load(path, [("model", str(llama_8b))])
    machine = on_directories(machine_named(named[1]), config.budget.disk_paths)
    task = task_of(config, machine, disk_free=sum(drive.free for drive in machine.drives))
    sizes = [size for size in cuts(config.sequences_per_step) if size[1] >= 4]
    assert estimate(task.question(*sizes[-1]), task.families[0]) is not None
