"""Code of a model's own runs only where this command says so: a run's folder does not allow it to itself."""

import json
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from tests.data_documents import tokenizer
from tests.folders import write
from tests.runs import FROM_A_FOLDER, write_run

pytestmark = pytest.mark.usefixtures("one_thread")

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({marker!r}).touch()

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.mark.parametrize("kind", ["mine", "llama"])
def test_code_in_a_runs_folder_runs_only_if_this_command_says_so(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``kind``: the type that the configuration names: one that transformers does not know, and one that it does."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    marker = tmp_path / "it ran"
    source = write("llama-300", tmp_path / "source", max_shard_size="1GB")
    tokenizer(300).save_pretrained(source)
    (source / "modeling_mine.py").write_text(CODE.format(marker=str(marker)))
    classes = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    changes = {"model_type": kind, "architectures": ["MineForCausalLM"], "auto_map": classes}
    file = source / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    model = f"{{path: {source}, trust_remote_code: true}}"
    config, run = write_run(tmp_path, settings=FROM_A_FOLDER, model=model), tmp_path / "run"
    assert main(["train", str(config), "--steps", "1"]) == 0
    assert marker.exists(), "a settings file that this command names may say it"
    assert (run / "model" / "modeling_mine.py").exists()

    def afresh(words: list[str]) -> int:
        """A command as a process runs it that has not loaded the code."""
        marker.unlink(missing_ok=True)
        for name in [name for name in sys.modules if "modeling_mine" in name]:
            del sys.modules[name]
        capsys.readouterr()
        return main(words)

    resume = ["resume", str(run), "--steps", "2"]
    export = ["export", str(run), str(tmp_path / "out")]
    again = ["train", str(config), "--resume", "--steps", "3"]
    allows = ["--model.trust_remote_code", "true"]
    for words, flag in (
        (resume, "--model.trust_remote_code true"),
        ([*resume, "--model.trust_remote_code", "false"], "--model.trust_remote_code true"),
        (again, "--model.trust_remote_code true"),
        (export, "--trust-remote-code"),
    ):
        assert afresh(words) == 2, words
        assert not marker.exists(), words
        assert f"say so with this command: {flag}" in capsys.readouterr().err
    for words in (["verify", str(run)], ["report", str(run)]):
        assert afresh(words) == 0
        assert not marker.exists()
    for words in ([*resume, *allows], [*again, *allows], [*export, "--trust-remote-code"]):
        assert afresh(words) == 0, words
        assert marker.exists(), words
