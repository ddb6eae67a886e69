"""The public surface: a name, a parameter or a field that goes or changes breaks the programs of others."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
import typing
from collections.abc import Callable
from importlib import import_module

import pytest
import torch

import penstock
from penstock import errors
from penstock.planner.ask import PlanReport

NAMES = [
    "SGD",
    "Adam",
    "AdamW",
    "Budget",
    "BudgetError",
    "ConfigError",
    "Endurance",
    "Engine",
    "Lion",
    "ModelError",
    "Muon",
    "NonFiniteError",
    "Override",
    "RankError",
    "Schedule",
    "ScheduleError",
    "Split",
    "StepStats",
    "StoreError",
    "plan",
    "torchrun_mesh",
    "wrap",
]

WRAP = {
    "model": inspect.Parameter.empty,
    "optimizer": inspect.Parameter.empty,
    "budget": inspect.Parameter.empty,
    "precision": None,
    "schedule": "vertical",
    "clip_grad_norm": 1.0,
    "device": None,
    "blocks": None,
    "loss_fn": None,
    "seed": 0,
    "io_threads": 4,
    "overlap": True,
    "plan": "auto",
    "replan": None,
    "speculate": None,
    "recompute": None,
    "delay": None,
    "grad_dtype": "fp32",
    "compile": False,
    "weights": None,
    "init": False,
    "run": None,
    "mesh": None,
    "strands": None,
    "stage": None,
    "sync_buffers": None,
    "deal": None,
}

PLAN = {
    "model": inspect.Parameter.empty,
    "machine": None,
    "budget": None,
    "batch": None,
    "micro_batches": None,
    "micro_batch_size": None,
    "sequence_length": 2048,
    "precision": None,
    "optimizer": "adamw",
    "momentum": False,
    "moments": "fp32",
    "clip_grad_norm": None,
    "schedule": None,
    "speculate": None,
    "recompute": None,
    "delay": None,
    "grad_dtype": "fp32",
    "strands": None,
    "stage": None,
    "sync_buffers": None,
    "deal": None,
    "disk_free": None,
    "tbw": None,
    "tokens": None,
}

ENGINE = {
    "position",
    "budget",
    "close",
    "counters",
    "device",
    "evaluate",
    "expected_runs",
    "expected_seconds",
    "inside",
    "last_step",
    "load",
    "master_parameters",
    "model",
    "on_first",
    "optimizer",
    "plan",
    "prediction",
    "prepare",
    "save",
    "step",
    "step_count",
    "trace",
    "values",
}

STATS = [
    "step",
    "loss",
    "grad_norm",
    "tokens",
    "seconds",
    "lr",
    "clipped",
    "skipped",
    "loss_scale",
    "repeats",
    "non_finite",
    "labels",
    "flops",
    "plan_change",
    "bytes_written",
    "bytes_moved",
    "lane_seconds",
    "peak_bytes",
]

BUDGET = [
    "device",
    "host",
    "disk",
    "weights",
    "state",
    "gradients",
    "activations",
    "slots",
    "durability",
    "interval",
    "endurance",
]


def test_names() -> None:
    assert penstock.__all__ == NAMES
    assert set(NAMES) <= set(dir(penstock))
    for name in NAMES:
        assert getattr(penstock, name).__name__.removeprefix("penstock.") == name  # the package plan can be called
    with pytest.raises(AttributeError, match="no attribute 'Penstock'"):
        penstock.Penstock  # noqa: B018 - the access is what is tested


def test_wrap() -> None:
    parameters = inspect.signature(penstock.wrap).parameters
    assert {name: p.default for name, p in parameters.items()} == WRAP
    kinds = {name: p.kind for name, p in parameters.items()}
    assert kinds.pop("model") is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert set(kinds.values()) == {inspect.Parameter.KEYWORD_ONLY}


def test_plan() -> None:
    parameters = inspect.signature(penstock.plan).parameters
    assert {name: p.default for name, p in parameters.items()} == PLAN
    kinds = {name: p.kind for name, p in parameters.items()}
    assert kinds.pop("model") is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert set(kinds.values()) == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(("function", "result"), [(penstock.wrap, penstock.Engine), (penstock.plan, PlanReport)])
def test_the_types_of_arguments_and_result_are_there_to_be_asked(function: Callable[..., object], result: type) -> None:
    hints = typing.get_type_hints(function)
    assert {*hints} == {*inspect.signature(function).parameters, "return"}
    assert hints["return"] is result


def test_a_model_may_be_named() -> None:
    budget, optimizer = penstock.Budget(device="1MiB", host="1MiB"), penstock.SGD(lr=1.0)
    with pytest.raises(penstock.ModelError, match="no repeated blocks"):
        penstock.wrap(model=torch.nn.Linear(1, 1), optimizer=optimizer, budget=budget, plan=None)


def test_an_unknown_argument_is_named_before_one_that_is_missing() -> None:
    wrap: Callable[..., object] = penstock.wrap
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'optimzer'\. Did you mean 'optimizer'\?"):
        wrap(torch.nn.Linear(1, 1), optimzer=penstock.SGD(lr=1.0), budget=None)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        wrap(zzz=3)


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("offload_param", r"in a settings file it is budget\.weights \(device, host or disk\)"),
        ("learning_rate", "in a settings file it is optimizer.lr"),
        ("max_grad_norm", r"in a settings file it is clip_grad_norm \(null, not 0, turns it off\)"),
        ("optim", r"in a settings file it is optimizer\.name \(.*\)"),
        ("output_dir", r"in a settings file it is run \(the one folder of the run\)"),
        ("pp", r"here it is mesh=penstock\.torchrun_mesh\(pp=N\), in each process that torchrun has started"),
        ("pipeline", r"here it is mesh=penstock\.torchrun_mesh\(pp=N\), .*"),
        ("cp", r"here it is mesh=penstock\.torchrun_mesh\(cp=N\), .*"),
        ("copies", r"here it is mesh=penstock\.torchrun_mesh\(copies=N\), .*"),
        ("lora_r", r"here it is the model itself: peft\.get_peft_model\(model, \.\.\.\)"),
        ("max_steps", r"that is for the loop which calls engine\.step\(micro_batches\) to decide"),
        ("warmup_steps", r"here it is a scheduler of torch's on engine\.optimizer"),
    ],
)
def test_another_tools_name_for_an_argument_is_answered_with_what_stands_for_it(name: str, there: str) -> None:
    wrap: Callable[..., object] = penstock.wrap
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}': {there}$"):
        wrap(torch.nn.Linear(1, 1), **{name: 1})
    plan: Callable[..., object] = penstock.plan
    with pytest.raises(
        TypeError, match=r"unexpected keyword argument 'nvme_path': in a settings file it is budget.disk$"
    ):
        plan("llama-8b", nvme_path="/ssd")


def test_plan_is_the_same_whatever_was_imported_before() -> None:
    code = (
        "import penstock; a = penstock.plan; import penstock.planner.fit; assert a is penstock.plan; assert callable(a)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_engine() -> None:
    source = inspect.getsource(penstock.Engine.__init__)
    attributes = set(re.findall(r"self\.([a-z]\w*)(?:: [^=\n]+)? = ", source))
    members = {name for name in vars(penstock.Engine) if not name.startswith("_")}
    assert attributes | members == ENGINE
    assert {name for name in ("__enter__", "__exit__") if name in vars(penstock.Engine)} == {"__enter__", "__exit__"}
    step = ["self", "micro_batches", "loss_weights", "position"]
    assert list(inspect.signature(penstock.Engine.step).parameters) == step
    assert list(inspect.signature(penstock.Engine.evaluate).parameters) == ["self", "micro_batches", "loss_weights"]
    assert list(inspect.signature(penstock.Engine.save).parameters) == ["self", "path", "overwrite"]
    assert list(inspect.signature(penstock.Engine.load).parameters) == ["self", "path"]


def test_step_stats() -> None:
    assert [f.name for f in dataclasses.fields(penstock.StepStats)] == STATS


def test_budget() -> None:
    assert [f.name for f in dataclasses.fields(penstock.Budget)] == BUDGET


@pytest.mark.parametrize("kind", [penstock.StepStats, penstock.Budget, penstock.AdamW, penstock.Override])
def test_settings_and_results_are_frozen_and_keyword_only(kind: type) -> None:
    fields = dataclasses.fields(kind)
    assert all(f.kw_only for f in fields)
    assert kind.__dataclass_params__.frozen


def test_errors_are_what_programs_catch_them_as() -> None:
    bases = {
        "ConfigError": ValueError,
        "BudgetError": ValueError,
        "ModelError": ValueError,
        "ScheduleError": ValueError,
        "StoreError": OSError,
        "NonFiniteError": ArithmeticError,
    }
    for name, base in bases.items():
        assert issubclass(getattr(penstock, name), base)
        assert getattr(penstock, name) is getattr(errors, name)


def imported(*modules: str) -> dict[str, list[str]]:
    """Of each module the heavy libraries that are there once a new process has imported it, and those before it."""
    code = (
        "import json, sys; from importlib import import_module; heavy = {'torch', 'transformers', 'trl', "
        "'lightning_fabric'}; print(json.dumps({name: sorted(heavy & {*sys.modules}) for name in sys.argv[1:] "
        "if import_module(name)}))"
    )
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_planning_needs_no_torch_and_libraries_are_imported_when_they_are_asked_for() -> None:
    planning = ("penstock", "penstock.schedule.lower.visits", "penstock.schedule.check", "penstock.planner.fit")
    modules = (*planning, "penstock.planner.ask", "penstock.hf", "penstock.fabric")
    assert imported(*modules) == {module: [] for module in modules}
    assert all(import_module(package).__all__ for package in modules[-2:])
