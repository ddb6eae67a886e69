"""The examples: each is a settings file without a mistake, and fits the machine that it says it is for."""

import json
import re
from pathlib import Path

import pytest

from penstock.cli.settings import load
from penstock.cli.task import task_of
from penstock.hardware.profiles import machine_named, on_directories
from penstock.planner.batches import cuts
from penstock.planner.search import estimate

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
FILES = sorted(EXAMPLES.glob("*.yaml"))

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
SIZES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""The configurations of the models that are on the hub under ``meta-llama/Llama-3.1-SIZE...``."""


def _as_on_the_hub(name: str, folder: Path) -> Path:
    """A folder with the configuration of the model that has a name on the hub, and nothing else."""
    size = re.match(r"meta-llama/Llama-3.1-(\d+B)(-Instruct)?$", name)
    assert size is not None, f"{name}: say here how large it is"
    (folder / "config.json").write_text(json.dumps(LLAMA | SIZES[size[1]]))
    return folder


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_read_and_says_how_to_run_it(path: Path) -> None:
    load(path)
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert re.search(rf"penstock train examples/{path.name}|make {path.stem}", "\n".join(head))


@pytest.mark.parametrize("path", [p for p in FILES if "--machine" in p.read_text()], ids=lambda path: path.stem)
def test_an_example_fits_the_machine_that_it_is_for(path: Path, tmp_path: Path) -> None:
    """The machine is that of the ``penstock plan`` line in its comment; a model from the hub is there as its config."""
    named = re.search(rf"penstock plan examples/{path.name} --machine (\S+)", path.read_text())
    assert named is not None
    config = load(path)
    if config.model.path is not None:
        config = load(path, [("model", str(_as_on_the_hub(config.model.path, tmp_path)))])
    machine = on_directories(machine_named(named[1]), config.budget.disk_paths)
    task = task_of(config, machine)
    ways = (way for way in reversed(cuts(config.sequences_per_step)) if way[1] >= 4)
    assert any(estimate(task.question(*way), task.families[0]) is not None for way in ways)
