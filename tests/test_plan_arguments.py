"""What ``penstock plan`` and ``penstock.plan`` are asked for is what they plan, or an error that says why not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.models import MODELS
from tests.questions import MACHINE
from tests.training import budget, steps_of, wrap

import penstock
from penstock.cli.plan_text import describe
from penstock.plan import search
from penstock.plan.machine import Machine
from penstock.plan.task import Task

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 1024,
}
SPLIT: dict[str, Any] = {"micro_batches": 2, "micro_batch_size": 2, "sequence_length": 64}
GPU = replace(MACHINE, device=replace(MACHINE.device, kind="cuda"))


def planned(model: Any = LLAMA, machine: Machine = MACHINE, **more: Any) -> Task:
    """The task that is planned."""
    return penstock.plan(model, machine=machine, **{**SPLIT, **more}).forecast.task


# ---- models


def test_a_model_is_planned_for_the_machine_s_kind_of_device() -> None:
    for machine in (MACHINE, GPU):
        shape: Any = planned(machine=machine).shape
        assert shape.kind == machine.device.kind


def test_formulas_that_do_not_hold_are_not_used() -> None:
    """Grouped queries in fp32 on a GPU have no fused kernel: attention's scores are held."""
    grouped = {**LLAMA, "num_key_value_heads": 2, "vocab_size": 4096}
    on_gpu = planned(grouped, GPU, precision="fp32").profile(2)
    on_cpu = planned(grouped, MACHINE, precision="fp32").profile(2)
    assert on_gpu.program.stages != on_cpu.program.stages


def test_a_folder_a_file_and_a_mapping_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    for model in (folder, str(folder), folder / "config.json"):
        task = planned(model)
        assert task.shape.name == "tiny"
        assert task.profile(2) == planned().profile(2)


@pytest.mark.parametrize("changes", [{"hidden_size": 130}, {"hidden_size": 132}])
def test_heads_that_do_not_divide_the_width_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(penstock.ConfigError, match="Hugging Face cannot build this llama model"):
        planned({**LLAMA, **changes})


def test_a_mapping_without_a_type_is_refused() -> None:
    with pytest.raises(penstock.ConfigError, match=r"the model's configuration: .* has no model_type"):
        planned({"hidden_size": 128})


# ---- what runs and prints


def test_a_run_is_planned_with_the_threads_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spy(question: search.Question) -> search.Choice:
        asked.append(question.io_threads)
        return chosen(question)

    chosen = search.search
    monkeypatch.setattr(search, "search", spy)
    case = MODELS["llama"]
    machine = replace(MACHINE, drives=(replace(MACHINE.drives[0], path=str(tmp_path)),))
    with wrap(case, budget(tmp_path / "store"), plan=machine, io_threads=12) as engine:
        engine.step(steps_of(case, 1)[0])
    assert asked == [12]


def test_short_times_are_printed_in_short_units() -> None:
    fast = replace(MACHINE, overhead=0.0, device=replace(MACHINE.device, flops={"fp32": 1e13}, h2d=1e12, d2h=1e12))
    found = penstock.plan(LLAMA, machine=fast, **SPLIT)
    assert found.forecast.lanes["h2d"].work < 1e-4
    text = describe(found, wide=False)
    assert " µs" in text
    assert "e-0" not in text
