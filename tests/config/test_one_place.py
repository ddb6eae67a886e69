"""A setting is declared once: what is asked of steps are fields of one dataclass, and whoever needs them takes that.

Where a setting is used its name is a field or a parameter again: in a schedule that has been built, in what an op
costs, in kernels. Anywhere else it would be one more place to which the next setting has to be added.
"""

import ast
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import pytest

import penstock
from penstock.cli.plan import FileArguments, ModelArguments, PlanOptions
from penstock.config import Budget, OptimizerConfig, RunConfig, StepConfig, StreamConfig, TrainConfig
from penstock.config.layout import LayoutConfig
from penstock.config.meanings import by_need
from penstock.config.optimizer import OptimizerSpec
from penstock.engine.arguments import LoopArguments, WrapArguments
from penstock.fabric.strategy import StrategyArguments
from penstock.hf.engine_arguments import EngineArguments
from penstock.planner.arguments import PlanArguments, PlanSettings
from penstock.planner.request import Request
from penstock.planner.task import Task

SOURCE = Path(penstock.__file__).parent
_OPTIMIZERS = {"optim/": "the arithmetic itself"}
USED = {
    "grad_dtype": {
        "schedule/": "what a built schedule was given",
        "planner/costs.py": "what an op costs",
        "optim/": "the rounding itself",
        "runtime/": "the same",
        "doctor/": "measures it",
    },
    "delay": {
        "schedule/": "what a built schedule was given",
        **dict.fromkeys(("planner/proposals.py", "planner/search.py"), "ratios to try"),
    },
    "speculate": {
        "schedule/": "what a built schedule was given",
        **dict.fromkeys(("planner/phases.py", "planner/probes.py"), "the phases and loads of such a schedule"),
    },
    "recompute": {},
    "sync_buffers": {},
    "strands": {
        "schedule/": "what a built schedule was given",
        "engine/": "as many as there are ranks, or as the store has",
        **dict.fromkeys(("state/reshard.py", "cli/run_record.py"), "what stores are cut for"),
        "cli/reshard.py": "an option: what a run has from then on",
        "cli/split.py": "those of a snapshot, which ranks that go on from it have to share",
        "planner/layouts.py": "which ranks of a layout have to share",
    },
    "stage": {
        "schedule/": "what a built schedule was given; and the stages of a program, which are called so, too",
        "planner/bounds.py": "which buffers hold its lanes up",
        "planner/layouts.py": "the one of a layout, of which several are compared",
        **dict.fromkeys(
            (
                "engine/timing.py",
                "planner/following.py",
                "planner/phases.py",
                "planner/sample.py",
                "runtime/",
                "shape/",
                "tape/",
            ),
            "a stage of a program",
        ),
    },
    "replan": {"config/step.py": "an argument of the check of what a pipeline cannot do"},
    "cp": {
        "config/step.py": "an argument of the check of what ranks that share sequences cannot do",
        **dict.fromkeys(("shape/", "tape/"), "spans of a sequence, of which a model is run with one"),
        **dict.fromkeys(("engine/mixing.py", "engine/spans.py"), "the same"),
        "ranks/": "the axis itself",
        **dict.fromkeys(
            ("hardware/sharing.py", "planner/layouts.py"), "ranks of a layout, of which several are compared"
        ),
        "hf/training_arguments.py": "an argument of the check of what a Trainer cannot have with it",
        **dict.fromkeys(("cli/reshard.py", "cli/run_record.py"), "what a run has from then on"),
    },
    "copies": {
        "config/step.py": "an argument of the check of what copies cannot be",
        "ranks/": "the axis itself",
        "schedule/": "collectives between copies; and of a store's checksums",
        "store/parts.py": "the copies that stores are of",
        "state/buffers.py": "what is written, another thing",
        **dict.fromkeys(("hardware/sharing.py", "planner/"), "ranks of a layout, of which several are compared"),
    },
    "pipeline": {
        **dict.fromkeys(("cli/reshard.py", "cli/run_record.py"), "what a run has from then on"),
        "state/reshard.py": "the stores that are made",
        "cli/launch.py": "the words for so many ranks",
    },
    "deal": {"planner/layouts.py": "the one that was found for hosts that differ"},
    "slots": {"store/": "the slots", "state/": "the slots", "planner/phase_memory.py": "the memory of their checksums"},
    "durability": {
        "planner/durability.py": "compares them",
        "cli/disk_summary.py": "says what one costs",
        "cli/plan.py": "an option of a plan without a file, which has no section budget",
        **dict.fromkeys(
            ("engine/attempt.py", "engine/inside.py", "engine/snapshots.py"),
            "what makes a step durable, an object of that name",
        ),
    },
    "lr": {
        **_OPTIMIZERS,
        **dict.fromkeys(("report/metrics_file.py", "state/stats.py"), "the one of a step that was taken"),
    },
    **dict.fromkeys(("betas", "eps", "weight_decay", "ns_steps"), _OPTIMIZERS),
    **{name: {} for name in ("decay_norms_and_biases", "nesterov", "adjust_lr_fn", "adamw")},
    "momentum": {"planner/arguments.py": "whether there is any: a plan does not ask how much"},
    "elementwise": {"tape/groups.py": "groups that step element by element"},
    "splits": dict.fromkeys(("shape/", "tape/"), "the sides of a backward that is run in two parts, another thing"),
    "overrides": {**_OPTIMIZERS, "hf/trainer_optimizer.py": "what a Trainer does not decay"},
    "moments": {
        **dict.fromkeys(("optim/", "runtime/stepping.py"), "the moments themselves"),
        "schedule/place.py": "their number",
        "doctor/work.py": "measures each form",
        "hf/trainer_optimizer.py": "the one of a Trainer's engine, given to its optimizer",
        "hardware/crossing.py": "the pace of a form",
        "state/survey.py": "the form that a store has",
    },
}
"""The files or rooms in which each setting is used, and for what."""
HOMES = {
    "config/budget.py": Budget,
    "config/step.py": StepConfig,
    "config/layout.py": LayoutConfig,
    "config/engine.py": RunConfig,
    "config/optimizer.py": OptimizerConfig,
}
OTHERWISE = {
    TrainConfig: {"schedule", "plan", "device"},
    LoopArguments: {"schedule", "plan"},
    WrapArguments: {"device"},
    StrategyArguments: set(),
    EngineArguments: set(),
    PlanSettings: {"clip_grad_norm"},
    PlanArguments: set(),
    Task: {"precision"},
    Request: set(),
    OptimizerConfig: set(),
    OptimizerSpec: set(),
}
"""Settings that who adds to them has in a narrower type, or with another default."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The declarations of a file. ``names``: of the fields of its classes and of the parameters of its functions;
    ``fields``: of each of its dataclasses, with its name."""

    names: frozenset[str]
    fields: tuple[tuple[tuple[str, ...], str], ...]


@cache
def _declared(file: Path) -> Declared:
    names, of_classes = set[str](), []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            own = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            names |= {item.target.id for item in own if isinstance(item.target, ast.Name)}
            if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                of_classes.append((tuple(map(ast.unparse, own)), node.name))
        if isinstance(node, ast.FunctionDef):
            names |= {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    return Declared(names=frozenset(names), fields=tuple(of_classes))


@pytest.mark.parametrize("name", USED)
def test_a_setting_is_declared_in_one_place_and_where_it_is_used(name: str) -> None:
    found = {file.relative_to(SOURCE).as_posix() for file in SOURCE.rglob("*.py") if name in _declared(file).names}
    home = next(file for file, kind in HOMES.items() if name in {field.name for field in fields(kind)})
    assert home in found
    others = {file for file in found if file != home}
    assert {file for file in others if not file.startswith(tuple(USED[name]))} == set()
    assert all(any(file.startswith(place) for file in others) for place in USED[name]), "nothing is left over"


@pytest.mark.parametrize("kind", OTHERWISE, ids=lambda kind: kind.__name__)
def test_who_adds_to_settings_declares_none_of_them_again(kind: type) -> None:
    inherited = {name for base in kind.__mro__[1:] for name in vars(base).get("__annotations__", {})}
    assert set(kind.__annotations__) & inherited == OTHERWISE[kind]


def test_the_forms_of_a_command_declare_no_option_each() -> None:
    """Where both have one it is of the class that they have in common."""
    both = {cls for cls in FileArguments.__mro__ if cls in ModelArguments.__mro__}
    own = [
        {name for cls in form.__mro__ if cls not in both for name in vars(cls).get("__annotations__", {})}
        for form in (FileArguments, ModelArguments)
    ]
    assert own[0] & own[1] == set()
    assert {"batch", "machine", "json"} <= {field.name for field in fields(PlanOptions)}


def test_every_setting_of_a_steps_streams_and_of_the_optimizer_is_looked_at() -> None:
    settings = {field.name for kind in (StreamConfig, LayoutConfig, OptimizerConfig) for field in fields(kind)}
    assert settings - {"name"} <= set(USED), "much else has a name"


def test_settings_are_shown_by_need_wherever_python_keeps_annotations() -> None:
    """From Python 3.14 on a class does not hold them until somebody asks."""

    @dataclass(kw_only=True)
    class Base:
        rare: int = 0
        needed: int

    @dataclass(kw_only=True)
    class Own(Base):
        own: int = 0
        first: int

    for kind in (Base, Own):
        del kind.__annotations__
    assert [f.name for f in by_need(Own)] == ["first", "needed", "own", "rare"]


def test_no_two_dataclasses_are_the_same_fields() -> None:
    found: dict[tuple[str, ...], set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        for own, name in _declared(file).fields:
            found.setdefault(own, set()).add(f"{file.relative_to(SOURCE).as_posix()}: {name}")
    assert {names for names, where in found.items() if len(where) > 1 and len(names) > 2} == set()
