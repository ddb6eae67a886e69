"""``penstock train`` on a model's folder: what the run's folder keeps of it, going on without the source, refusals."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.documents import tokenizer
from tests.folders import write

from penstock.cli import main
from penstock.hf.models.folder import SINGLE
from penstock.hf.models.kept import kept_model

CONFIG = """\
run: {run}
model: {model}
data: {{sources: "{text}", sequence_length: 32}}
optimizer: {{lr: 1e-3}}
budget: {{device: 8MiB, host: 12MiB, disk: "{{run}}/store", weights: disk, state: disk}}
batch: {{sequences: 2}}
micro_batch_size: 1
device: cpu
steps: 2
plan: null
"""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write("llama-300", tmp_path_factory.mktemp("source") / "small", torch.bfloat16, max_shard_size="1GB")
    tokenizer(300).save_pretrained(folder)
    return folder


@pytest.fixture
def config(source: Path, tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the {i * i} penstocks of {i % 11} turbines carry water\n" for i in range(2000)))
    folder = shutil.copytree(source, tmp_path / "small")
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(run=tmp_path / "run", model=folder, text=text))
    return path


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_keeps_what_its_model_is_made_of_and_goes_on_without_the_source(config: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(["train", str(config), "--run", str(whole)]) == 0
    assert main(["train", str(config), "--steps", "1"]) == 0
    kept = kept_model(run / "model")
    assert kept.config.dtype == torch.bfloat16
    assert kept.config.use_cache
    assert kept.config.architectures == ["LlamaForCausalLM"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (run / "model" / name).read_bytes() == (tmp_path / "small" / name).read_bytes()
    shutil.rmtree(tmp_path / "small")
    assert main(["resume", str(run), "--steps", "2"]) == 0
    assert losses(run) == losses(whole)


def test_a_run_does_not_go_on_as_another_model(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), "--steps", "1"]) == 0
    assert main(["train", str(config), "--resume", "--model", str(tmp_path / "other")]) == 2
    assert "was started with model=" in capsys.readouterr().err


def test_weights_that_are_not_numbers_leave_nothing(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small" / SINGLE
    state = load_file(file)
    state["model.norm.weight"][3] = float("nan")
    save_file(state, file, metadata={"format": "pt"})
    assert main(["train", str(config)]) == 2
    assert "model.norm.weight has nan at [3]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_store_that_was_never_filled_is_not_gone_on_with(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill while the shards are read leaves it: nothing has been committed."""
    with monkeypatch.context() as patch:
        patch.setattr("penstock.cli.train.discard", lambda config: None)
        patch.setattr("penstock.hf.models.loading.FolderWeights.fill", lambda self, name, out: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(["train", str(config)])
    assert main(["resume", str(tmp_path / "run")]) == 1
    assert "before all of the model was in its store" in capsys.readouterr().err
    assert main(["train", str(config), "--overwrite"]) == 0


def test_random_weights_of_a_folders_configuration(config: Path, tmp_path: Path) -> None:
    for source in (tmp_path / "small", tmp_path / "small" / "config.json"):
        flags = ["--model", f"{{config: {source}, init: true}}", "--steps", "1", "--overwrite"]
        assert main(["train", str(config), *flags]) == 0
        assert losses(tmp_path / "run")[0] == pytest.approx(5.7, abs=0.1)  # log(300)


def test_a_model_that_is_no_language_model_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), "--model", str(write("vit", tmp_path / "vit"))]) == 2
    assert "is a ViTForImageClassification, and penstock train trains causal" in capsys.readouterr().err


def test_the_plan_of_a_folder_is_that_of_its_configuration(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (tmp_path / "small").glob("*.safetensors"):
        file.unlink()  # a plan needs none
    flags = ["--machine", "rtx4090-24g", "--json", "--device", "cuda", "--plan", "auto"]
    assert main(["plan", str(config), *flags]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["model"]["parameters"] == sum(p.numel() for p in kept_shell(tmp_path / "small"))
    assert planned["model"]["name"] == "small"


def kept_shell(folder: Path) -> Iterator[torch.nn.Parameter]:
    from penstock.hf.models import shell

    parameters: Iterator[torch.nn.Parameter] = shell.build(shell.config_of(folder)).parameters()
    return parameters
