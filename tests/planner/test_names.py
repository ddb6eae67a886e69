"""Which model a plan is for: what a settings file names, a name that ships, a name on the hub, or ``--model``."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.plan import FileArguments, read_arguments
from penstock.cli.settings import load
from penstock.cli.task import shape_of, shipped_shape
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.shape.huggingface import HuggingFaceModel, model_shape
from penstock.shape.shipped import CONFIGS, ON_THE_HUB

EXAMPLES = sorted((Path(__file__).resolve().parent.parent.parent / "examples").glob("*.yaml"))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*words: Any, **more: Any) -> None:
        raise AssertionError(f"the hub was asked for {words}")

    monkeypatch.setattr("penstock.hf.models.folder.snapshot_download", asked)


@pytest.mark.parametrize("path", [path for path in EXAMPLES if load(path).model.path], ids=lambda path: path.stem)
def test_the_models_of_the_examples_are_planned_without_the_hub(path: Path) -> None:
    config = load(path)
    shape = shape_of(config, "cuda")
    assert isinstance(shape, HuggingFaceModel)
    assert shape.config == CONFIGS[ON_THE_HUB[config.model.source]]


@pytest.mark.parametrize("name", [*CONFIGS, *ON_THE_HUB])
def test_a_name_that_ships_is_the_same_model_however_it_is_asked_for(name: str) -> None:
    config = CONFIGS[ON_THE_HUB.get(name, name)]
    assert model_shape(name).config == config
    assert shipped_shape(ModelConfig(path=name)) == ON_THE_HUB.get(name, name)


def test_what_is_there_or_is_of_another_revision_is_not_taken_for_the_published_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = next(iter(ON_THE_HUB))
    assert shipped_shape(ModelConfig(path=name, revision="main")) is None
    assert shipped_shape(ModelConfig(path="somebody/else")) is None
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 3}))
    assert shipped_shape(ModelConfig(path=name)) is None
    assert model_shape(name).config == {"model_type": "gpt2", "n_layer": 3}


@pytest.mark.parametrize("name", ["somebody/else", "nowhere/config.json"])
def test_a_name_that_neither_ships_nor_is_there_says_which_do(name: str) -> None:
    with pytest.raises(ConfigError, match="ships with penstock: gpt-13b, "):
        model_shape(name)


def test_a_settings_file_is_planned_for_another_model_as_it_is_trained(tmp_path: Path) -> None:
    """``--model`` is the setting, as in ``penstock train``."""
    arguments = read_arguments([str(EXAMPLES[0]), "--model", "qwen3-8b", "--machine", "workstation"])
    assert isinstance(arguments, FileArguments)
    assert arguments.settings == (("model", "qwen3-8b"),)
    config = load(arguments.config, arguments.settings)
    assert config.model == ModelConfig(path="qwen3-8b")
    assert shape_of(config, "cuda").name == "qwen3-8b"
