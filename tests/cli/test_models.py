"""``penstock train`` on a model's folder: what the run's folder keeps of it, going on without the source, refusals."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.cli import main
from penstock.hf.models import kept as kept_models
from penstock.hf.models.folder import SINGLE
from penstock.hf.models.kept import kept_model
from penstock.state.slots import Slots
from penstock.store.store import DATA, Store
from tests import warm
from tests.data_documents import tokenizer
from tests.folders import write
from tests.runs import FROM_A_FOLDER, write_run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write("llama-300", tmp_path_factory.mktemp("source") / "small", torch.bfloat16, max_shard_size="1GB")
    tokenizer(300).save_pretrained(folder)
    return folder


@pytest.fixture
def config(source: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(source, tmp_path / "small")
    return write_run(tmp_path, settings=FROM_A_FOLDER, model=folder)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of both steps, that nobody stopped. It is shared, and read."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["train", str(write_run(folder, settings=FROM_A_FOLDER, model=source))]) == 0
    return folder / "run"


def test_a_run_keeps_what_its_model_is_made_of_and_goes_on_without_the_source(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert main(["train", str(config), "--steps", "1"]) == 0
    kept = kept_model(run / "model")
    assert kept.config.dtype == torch.bfloat16
    assert kept.config.use_cache
    assert kept.config.architectures == ["LlamaForCausalLM"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (run / "model" / name).read_bytes() == (tmp_path / "small" / name).read_bytes()
    places = {"disk": "null", "weights": "host", "state": "host", "host": "64MiB"}
    in_memory = [word for key, value in places.items() for word in (f"--budget.{key}", value)]
    assert main(["train", str(config), "--run", str(tmp_path / "memory"), "--steps", "1", *in_memory]) == 0
    shutil.rmtree(tmp_path / "small")
    for folder in (run, tmp_path / "memory"):
        assert main(["resume", str(folder), "--steps", "2"]) == 0
        assert losses(folder) == losses(whole)


def test_a_run_does_not_go_on_as_another_model(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    assert main(["resume", str(run), "--model", str(tmp_path / "other")]) == 2
    assert "was started with model.path=" in capsys.readouterr().err


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


def test_a_store_that_was_never_filled_is_filled_when_the_run_is_started_again(
    config: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill while the shards are read leaves the store so: nothing has been committed."""
    with monkeypatch.context() as patch:
        patch.setattr("penstock.cli.removal.take_back", lambda *_: None)
        patch.setattr("penstock.hf.models.loading.FolderWeights.fill", lambda self, name, out: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(["train", str(config)])
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert losses(tmp_path / "run") == losses(whole)


def test_what_a_kill_left_of_the_model_that_a_run_was_to_keep_goes_with_the_run(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it a start in its place that fails before it keeps its own: no run can begin beside what is left."""
    if not (child := os.fork()):
        try:
            kept_models.write_config = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            main(["train", str(config)])
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    run = tmp_path / "run"
    assert list(run.glob("model*")), "it was killed before it began to keep its model"
    with monkeypatch.context() as patch:
        patch.setattr("penstock.cli.train.data_in", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(["train", str(config), "--overwrite"])
    assert not run.exists()


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
    flags = ["--machine", "rtx4090-24g", "--json", "--device", "cuda", "--plan", "auto", "--delay", "0"]
    assert main(["plan", str(config), *flags]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["model"]["parameters"] == sum(p.numel() for p in kept_shell(tmp_path / "small"))
    assert planned["model"]["name"] == "small"


def kept_shell(folder: Path) -> Iterator[torch.nn.Parameter]:
    from penstock.hf.models import shell

    parameters: Iterator[torch.nn.Parameter] = shell.build(shell.config_of(folder)).parameters()
    return parameters


# ---- penstock export


def test_what_is_exported_can_be_trained_further(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes out goes in again: a step at rate 0 sees the trained model, and gives back every byte of it."""
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["train", str(config)]) == 0
    assert f"penstock export {run} OUT writes the model" in capsys.readouterr().out
    assert main(["export", str(run), str(out), "--dtype", "fp32"]) == 0
    assert "step 2 of" in capsys.readouterr().out
    names = ["config.json", "generation_config.json", SINGLE, "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    flags = ["--model", str(out), "--run", str(tmp_path / "again"), "--steps", "1", "--optimizer.lr", "0"]
    assert main(["train", str(config), *flags]) == 0
    assert main(["export", str(tmp_path / "again"), str(tmp_path / "out2")]) == 0
    assert (tmp_path / "out2" / SINGLE).read_bytes() == (out / SINGLE).read_bytes()
    assert (tmp_path / "out2" / "config.json").read_bytes() == (out / "config.json").read_bytes()


def test_by_default_in_the_dtype_that_the_model_came_in(source: Path, trained: Path, tmp_path: Path) -> None:
    assert main(["export", str(trained), str(tmp_path / "out"), "--shard-size=20KB"]) == 0
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 1
    assert {t.dtype for shard in shards for t in load_file(shard).values()} == {torch.bfloat16}
    before = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == before


def test_a_new_model_is_exported_in_the_precision_of_its_run(config: Path, tmp_path: Path) -> None:
    flags = ["--model", f"{{config: {tmp_path / 'small'}, init: true}}", "--steps", "1", "--precision", "bf16"]
    assert main(["train", str(config), *flags]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert {t.dtype for t in load_file(tmp_path / "out" / SINGLE).values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "was given none"),
        (["{run}"], 2, "takes a run's folder and a new one"),
        (["{run}", "{out}", "--dtype", "int4"], 2, "--dtype must be one of fp32"),
        (["{run}", "{out}", "--dtype"], 2, "--dtype needs a value"),
        (["{run}", "{out}", "--shard-size", "big"], 2, "--shard-size: 'big' is not a size"),
        (["{run}", "{out}", "--shard-size", "0"], 2, "more than 0"),
        (["{run}", "{out}", "--force"], 2, "there is no option --force"),
        (["/nowhere", "{out}"], 2, "does not exist"),
        (["{run}", "{out}/deep/er"], 1, "does not exist: create it first"),
        (["{run}", "{run}/config.yaml/out"], 1, "config.yaml is a file: give another place"),
        (["{run}", "{run}"], 2, "exists"),
        (["{run}", "{run}", "--overwrite"], 2, "is no model's folder"),
        (["{run}", "{run}/model", "--overwrite"], 2, "a run keeps its model's configuration in"),
        (["{run}", "{run}/model/out"], 2, "a run keeps its model's configuration in"),
    ],
)
def test_what_cannot_be_exported_is_said(
    words: list[str], code: int, says: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"run": trained, "out": tmp_path / "out"}
    assert main(["export", *(word.format(**places) for word in words)]) == code
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("trained")
    path = write_run(folder, settings=FROM_A_FOLDER, model=source)
    assert main(["train", str(path), "--steps", "1"]) == 0
    return folder / "run"


def test_a_run_that_is_training_is_not_exported(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open([trained / "store"]):
        assert main(["export", str(trained), str(tmp_path / "out")]) == 1
    assert "is training (its store is in use): wait for it to end, or stop it with Ctrl-C" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_damage_is_found_and_nothing_is_left(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    with Store.open([run / "store"]) as store:
        extent = store.layout["weights.1"]
        slot = Slots(store).current("weights.1")
    with (run / "store" / DATA).open("r+b") as file:
        file.seek(extent.address(0, extent.stride, slot))
        file.write(b"damage")
    assert main(["export", str(run), str(tmp_path / "out")]) == 1
    assert "weights.1 is damaged" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_export_that_is_ended_leaves_nothing(number: int, code: int, trained: Path, tmp_path: Path) -> None:
    script = (
        "import os, sys; from penstock.cli import main; from penstock.hf.models.shard_files import ShardFiles; "
        "ShardFiles.finish = lambda self: os.kill(os.getpid(), int(sys.argv[1])); "
        "sys.exit(main(['export', *sys.argv[2:]]))"
    )
    done = warm.run(["-c", script, str(number), trained, tmp_path / "out"])
    assert done.returncode == code, done.stderr
    assert list(tmp_path.iterdir()) == []


# ---- adapters


def test_a_run_with_adapters_gives_the_adapter_or_the_merged_model(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base and adapter loaded by peft compute what the merged folder computes, and not what the base does. The base is
    found, and kept from being replaced, though it was named from another folder than the one that is exported in."""
    run = str(tmp_path / "run")
    flags = ["--lora", "{rank: 2, target_modules: [q_proj, down_proj]}", "--optimizer.lr", "0.1", "--model", "small"]
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(config), *flags]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for merge in ([], ["--merge"]):
        assert main(["export", run, str(tmp_path / "small"), "--overwrite", *merge]) == 2
        assert "has the weights that the adapters are for" in capsys.readouterr().err
    assert main(["export", run, str(tmp_path / "adapter")]) == 0
    assert "its adapter in float32" in capsys.readouterr().out
    assert main(["export", run, str(tmp_path / "merged"), "--merge", "--dtype", "fp32"]) == 0
    names = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert names[1:3] == ["adapter_config.json", "adapter_model.safetensors"]
    assert "tokenizer.json" in names
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "small")
    assert f"base_model: {tmp_path / 'small'}\n" in (tmp_path / "adapter" / "README.md").read_text()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        before = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()(tokens).logits
        assert torch.equal(merged(tokens).logits, adapted)
    assert not torch.allclose(before, adapted, atol=1e-2)


def test_a_run_does_not_go_on_with_other_adapters(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their scale is in no array, so that nothing else would notice another one."""
    assert main(["train", str(config), "--steps", "1", "--lora", "{rank: 2, alpha: 4}"]) == 0
    for changed, says in (
        ("{rank: 2, alpha: 64}", "lora.alpha=4, not 64"),
        ("{rank: 2, alpha: 4, dropout: 0.5}", "lora.dropout=0.0, not 0.5"),
        ("{rank: 2, alpha: 4, target_modules: [q_proj]}", "lora.target_modules='all-linear', not [\"q_proj\"]"),
        ("null", 'lora={"rank": 2, '),
    ):
        capsys.readouterr()
        assert main(["resume", str(tmp_path / "run"), "--steps", "2", "--lora", changed]) == 2
        assert f"was started with {says}" in capsys.readouterr().err


def test_adapters_that_are_not_there_are_not_merged(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained), str(tmp_path / "out"), "--merge"]) == 2
    assert "--merge has no effect" in capsys.readouterr().err
