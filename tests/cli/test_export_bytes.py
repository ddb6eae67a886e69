"""Every export of the same state has the same bytes, whatever process writes it."""

import hashlib
from pathlib import Path

import pytest

from penstock.cli import main
from tests import warm
from tests.data_documents import tokenizer
from tests.folders import write
from tests.runs import FROM_A_FOLDER, write_run

pytestmark = pytest.mark.usefixtures("one_thread")

EXPORTS = """
import sys
from penstock.cli import main
run, adapter, merged = sys.argv[1:]
assert main(["export", run, adapter]) == 0
assert main(["export", run, merged, "--merge"]) == 0
print(hash("the order of sets"))
"""
LAYERS = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_exports_of_the_same_state_have_the_same_bytes(tmp_path: Path) -> None:
    """A process of its own beside this one: the order of a set of text is another in each, as Python's hashes are."""
    source = write("llama-300", tmp_path / "source", max_shard_size="1GB")
    tokenizer(300).save_pretrained(source)
    config, run = write_run(tmp_path, settings=FROM_A_FOLDER, model=source), tmp_path / "run"
    lora = f"{{rank: 2, target_modules: {LAYERS}}}"
    assert main(["train", str(config), "--steps", "1", "--lora", lora]) == 0
    done = warm.run(["-c", EXPORTS, run, tmp_path / "adapter-1", tmp_path / "merged-1"])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) != hash("the order of sets"), "another process: unset PYTHONHASHSEED"
    assert main(["export", str(run), str(tmp_path / "adapter-2")]) == 0
    assert main(["export", str(run), str(tmp_path / "merged-2"), "--merge"]) == 0
    assert main(["export", str(run), str(tmp_path / "adapter-3"), "--shard-size=1MB"]) == 2  # it is one file
    found = [[_digests(tmp_path / f"{kind}-{number}") for kind in ("adapter", "merged")] for number in (1, 2)]
    assert found[0] == found[1]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= found[0][0].keys()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= found[0][1].keys()
