"""Every argument of a Trainer is carried out, by the library or by the engine, or refused: none is ignored."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate.commands.launch import launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from huggingface_hub import PyTorchModelHubMixin
from transformers import Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments
from trl import DPOConfig, KTOConfig, RewardConfig, SFTConfig

import penstock
from penstock.hf import Trainer
from penstock.hf.trainer_optimizer import precision_of
from penstock.hf.training_arguments import (
    ENGINE,
    KEPT,
    REFUSED,
    SEQ2SEQ_REFUSED,
    TRL_KEPT,
    TRL_REFUSED,
    check_arguments,
    check_launch,
)
from tests.library_runs import arguments, examples, in_memory, llama

DATA = examples(4)
OF_TRL: tuple[type[Any], ...] = (SFTConfig, DPOConfig, KTOConfig, RewardConfig)


def fields(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def test_every_argument_of_the_installed_library_is_in_one_part_of_the_table() -> None:
    parts = [KEPT, set(ENGINE), set(REFUSED)]
    assert sum(len(part) for part in parts) == len(set().union(*parts))
    assert set().union(*parts) == fields(TrainingArguments)
    assert not TRL_KEPT & set(TRL_REFUSED)
    assert TRL_KEPT | set(TRL_REFUSED) == set().union(*map(fields, OF_TRL)) - fields(TrainingArguments)


def test_defaults_are_accepted(tmp_path: Path) -> None:
    check_arguments(TrainingArguments(str(tmp_path), report_to=[]))
    for of_trl in OF_TRL:
        check_arguments(of_trl(str(tmp_path), report_to=[], bf16=False, use_cpu=True))


@pytest.mark.parametrize("name", sorted({*REFUSED, *TRL_REFUSED, *SEQ2SEQ_REFUSED}))
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Set behind the library's back, whose own checks want some of these to come with others."""
    cls = next(cls for cls in (*OF_TRL, Seq2SeqTrainingArguments) if name in fields(cls))
    args = cls(str(tmp_path), report_to=[], bf16=False, use_cpu=True)
    setattr(args, name, 3)
    with pytest.raises(penstock.ConfigError, match=f"^{name}=3 cannot be honoured: .*Leave it out$"):
        check_arguments(args)


def test_an_argument_that_the_table_does_not_know_is_refused_unless_it_asks_for_nothing(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Newer(TrainingArguments):
        shiny: int = 0

    check_arguments(Newer(str(tmp_path), report_to=[]))
    with pytest.raises(penstock.ConfigError, match="shiny=1 cannot be honoured: this version"):
        check_arguments(Newer(str(tmp_path), report_to=[], shiny=1))


def test_what_a_subclass_asks_for_by_a_default_of_its_own_is_refused_as_if_it_was_given(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Mine(TrainingArguments):
        bf16_full_eval: bool = True
        optim: str = "sgd"

    with pytest.raises(penstock.ConfigError, match=r"^bf16_full_eval=True cannot be honoured"):
        check_arguments(Mine(str(tmp_path), report_to=[], use_cpu=True))
    check_arguments(Mine(str(tmp_path), report_to=[], use_cpu=True, bf16_full_eval=False))


class LooksAtGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise AssertionError("no step is taken")


class OwnOptimizer(Trainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return self.optimizer


class OwnStep(Trainer):
    def training_step(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(())


def checkpointed() -> transformers.PreTrainedModel:
    model = llama()
    model.activation_checkpointing_enable()
    return model


def frozen() -> transformers.PreTrainedModel:
    return llama().requires_grad_(False)


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))


class OfHub(Plain, PyTorchModelHubMixin): ...


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "optimizers": ({}, {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, "optimizers cannot be honoured"),
    "model_init": ({}, {"model": None, "model_init": llama}, "model_init cannot be honoured"),
    "optim": ({"optim": "adafactor"}, {}, "optim='adafactor' cannot be streamed: use adamw_torch"),
    "optim_args": ({"optim_args": "amsgrad=true"}, {}, "optim_args: amsgrad would have no effect"),
    "optim_args of lion": (
        {"optim": "lion_32bit", "optim_args": "rank=8"},
        {},
        "optim_args: rank would have no effect with optim='lion_32bit'",
    ),
    "weight decay in two places": (
        {"weight_decay": 0.1},
        {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.3})},
        "weight_decay=0.3 would have no effect, as the Trainer takes that of its arguments, 0.1",
    ),
    "optimizer class": (
        {},
        {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"amsgrad": True})},
        r"AdamW\(amsgrad=True\) cannot be honoured",
    ),
    "best": (
        {"load_best_model_at_end": True, "save_only_model": True, "save_strategy": "epoch", "eval_strategy": "epoch"},
        {"eval_dataset": DATA},
        "load_best_model_at_end=True needs the whole state",
    ),
    "an old name": (
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {},
        "gradient_checkpointing_kwargs is its old name",
    ),
    "recomputation": ({}, {"model": checkpointed}, "activation_checkpointing_disable"),
    "nothing to train": ({}, {"model": frozen}, "no parameter of the model requires a gradient"),
    "fp16 weights": ({}, {"model": lambda: llama(dtype=torch.float16)}, "ask for fp16"),
    "saving": ({"save_strategy": "epoch"}, {"model": Plain}, "is no model of transformers: set save_strategy"),
    "saving by others": ({"save_strategy": "epoch"}, {"model": OfHub}, "OfHub is no model of transformers"),
    "callback": ({}, {"callbacks": [LooksAtGradients()]}, "LooksAtGradients.on_pre_optimizer_step"),
}


@pytest.mark.parametrize(("settings", "given", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_cannot_be_honoured_stops_a_run_before_its_first_step(
    tmp_path: Path, settings: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    model: Callable[[], Any] | None = given.get("model", llama)
    with pytest.raises(penstock.ConfigError, match=message):
        Trainer(
            args=arguments(tmp_path / "run", **settings),
            train_dataset=DATA,
            engine=in_memory(),
            **given | {"model": None if model is None else model()},
        ).train()


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (OwnOptimizer, "trainer.optimizer is SGD, because .* create_optimizer was overridden"),
        (OwnStep, "no step was taken"),
    ],
)
def test_a_subclass_that_would_train_past_the_engine_is_refused(tmp_path: Path, cls: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(model=llama(), args=arguments(tmp_path), train_dataset=DATA, engine=in_memory()).train()


def test_what_a_class_behind_the_engine_overrides_in_vain_is_refused(tmp_path: Path) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        raise AssertionError

    for name in ("training_step", "create_optimizer", "_save", "_load_best_model", "_clip_grad_norm"):
        theirs = type("Theirs", (transformers.Trainer,), {name: nothing})
        mine = type("Mine", (penstock.hf.EngineMixin, theirs), {})
        with pytest.raises(penstock.ConfigError, match="nothing cannot be honoured: the engine's own comes before it"):
            mine(model=llama(), args=arguments(tmp_path), train_dataset=DATA, engine=in_memory())


class HandsOn(transformers.Trainer):
    """A trainer whose constructor names none of the library's arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Handed(penstock.hf.EngineMixin, HandsOn): ...


class HandsOnRest(transformers.Trainer):
    """A trainer whose constructor names the first of the library's arguments."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)


class HandedRest(penstock.hf.EngineMixin, HandsOnRest): ...


class BringsOptimizer(transformers.Trainer):
    """A trainer that makes an optimizer, or a schedule, itself."""

    def __init__(self, *, which: int, **kwargs: Any) -> None:
        optimizer = torch.optim.SGD(kwargs["model"].parameters(), lr=1.0)
        made = (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0))
        super().__init__(**kwargs, optimizers=(made[0], None) if which == 0 else (None, made[1]))


class Brings(penstock.hf.EngineMixin, BringsOptimizer): ...


def test_arguments_that_a_constructor_hands_on_are_looked_at_by_the_librarys_names(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    for kind in (Handed, HandedRest):
        kind(llama(), args, transformers.default_data_collator, train_dataset=DATA, engine=in_memory()).end()
    with pytest.raises(penstock.ConfigError, match="model_init cannot be honoured"):
        Handed(None, args, engine=in_memory(), model_init=llama)
    refused = arguments(tmp_path)
    refused.torch_compile = True
    with pytest.raises(penstock.ConfigError, match="torch_compile=True cannot be honoured"):
        Handed(None, refused, engine=in_memory())


@pytest.mark.parametrize("which", [0, 1])
def test_an_optimizer_or_a_schedule_that_a_constructor_brings_itself_is_refused(tmp_path: Path, which: int) -> None:
    with pytest.raises(penstock.ConfigError, match="optimizers cannot be honoured"):
        Brings(model=llama(), args=arguments(tmp_path), train_dataset=DATA, engine=in_memory(), which=which)


class AsksEarly(transformers.Trainer):
    """A trainer that has the loop's optimizer and schedule made as soon as it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.create_optimizer_and_scheduler(num_training_steps=1)


class Early(penstock.hf.EngineMixin, AsksEarly): ...


def test_a_constructor_may_have_the_engines_optimizer_and_its_schedule_made(tmp_path: Path) -> None:
    Early(model=llama(), args=arguments(tmp_path), train_dataset=DATA, engine=in_memory()).end()


@pytest.mark.parametrize("limit", [None, "1.0", True])
def test_a_limit_of_the_norm_that_is_no_number_is_refused(limit: Any, tmp_path: Path) -> None:
    with pytest.raises(penstock.ConfigError, match=f"max_grad_norm={limit!r}: must be a number. 0 stands for no"):
        check_arguments(arguments(tmp_path, max_grad_norm=limit))


class Clips(TrainerCallback):
    """Asks for other clipping after the first step."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        args.max_grad_norm = self.limit


def test_another_limit_of_the_norm_in_the_middle_of_a_run_is_refused_and_never_passed_over(tmp_path: Path) -> None:
    """The library's own steps heed it."""
    for limit, steps in ((0.01, 1), (0.0, 1), (np.float32(1.0), 2)):
        args = arguments(tmp_path, max_steps=2, gradient_accumulation_steps=1)
        found = Trainer(llama(), args, train_dataset=DATA, callbacks=[Clips(limit)], engine=in_memory())
        if steps == 2:
            found.train()
        else:
            with pytest.raises(penstock.ConfigError, match=f"max_grad_norm={limit!r} was set after the engine was"):
                found.train()
        assert found.engine.step_count == steps
        found.end()


def test_a_checkpoint_without_the_engines_state_is_refused(tmp_path: Path) -> None:
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    trainer = Trainer(model=llama(), args=arguments(tmp_path, **settings), train_dataset=DATA, engine=in_memory())
    trainer.train()
    trainer.end()
    again = Trainer(model=llama(), args=arguments(tmp_path, **settings), train_dataset=DATA, engine=in_memory())
    with pytest.raises(penstock.ConfigError, match=r"checkpoint-1 has no penstock.snapshot"):
        again.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("asked", ["bf16", "fp16"])
def test_the_precision_that_accelerate_launch_was_told_is_that_of_the_weights(
    tmp_path: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    trainer = Trainer(model=llama(), args=arguments(tmp_path), train_dataset=DATA, engine=in_memory())
    assert precision_of(trainer.args, llama()) == asked
    trainer.args.bf16 = True
    assert precision_of(trainer.args, llama()) == "bf16", "what is set behind it counts"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (("MIXED_PRECISION", "fp8"), "told to compute in fp8, .* accelerate launch --mixed_precision bf16"),
        (("DYNAMO_BACKEND", "EAGER"), r"EngineArguments\(compile='eager'\) compiles its blocks"),
    ],
)
def test_what_accelerate_launch_was_told_is_refused_where_it_cannot_be_honoured(
    tmp_path: Path, told: tuple[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ACCELERATE_{told[0]}", told[1])
    with pytest.raises(penstock.ConfigError, match=message):
        Trainer(model=llama(), args=arguments(tmp_path), train_dataset=DATA, engine=in_memory())


@pytest.mark.parametrize("count", [1, 2])
def test_processes_that_accelerate_launch_was_told_and_has_not_started_are_refused(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does without GPUs."""
    told = ["--cpu", "--num_processes", str(count), "--num_machines", "1", "--num_cpu_threads_per_process", "1"]
    told += ["--mixed_precision", "no", "--dynamo_backend", "no", "script.py"]
    _, environment = prepare_simple_launcher_cmd_env(launch_command_parser().parse_args(told))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refused = pytest.raises(penstock.ConfigError, match=r"starts this one alone: .* torchrun --nproc-per-node N SCRIPT")
    with refused if count > 1 else nullcontext():
        Trainer(model=llama(), args=arguments(tmp_path), train_dataset=DATA, engine=in_memory())


def test_a_way_to_share_the_model_that_accelerate_launch_was_told_is_refused(tmp_path: Path) -> None:
    """accelerate itself takes one on GPUs alone."""
    trainer = Trainer(model=llama(), args=arguments(tmp_path), train_dataset=DATA, engine=in_memory())
    for sizes in ({"tp_size": 2}, {"cp_size": 2}, {"dp_replicate_size": 1, "dp_shard_size": 2}):
        state = SimpleNamespace(parallelism_config=ParallelismConfig(**sizes), state=trainer.accelerator.state)
        told = SimpleNamespace(args=trainer.args, accelerator=state, is_fsdp_enabled=False, is_deepspeed_enabled=False)
        with pytest.raises(penstock.ConfigError, match="leave --use_parallelism_config out"):
            check_launch(told)
    check_launch(trainer)


def test_a_name_that_is_none_of_the_engines_says_what_stands_for_it() -> None:
    ours: Any = penstock.hf.EngineArguments
    budget = penstock.Budget(device="1GiB", host="1GiB")
    for given, hint in ({"pp": 2}, "in a settings file it is pipeline"), ({"pipelin": 2}, "Did you mean 'pipeline'"):
        with pytest.raises(TypeError, match=rf"EngineArguments\(\) got an unexpected keyword argument .*{hint}"):
            ours(budget=budget, **given)
    assert ours(budget=budget, pipeline=2).pipeline == 2


def test_help_explains_each_argument_of_the_engine() -> None:
    said = penstock.hf.EngineArguments.__init__.__doc__ or ""
    explained = re.findall(r"^    (\w+): ", said.partition("Keyword arguments:")[2], re.MULTILINE)
    assert sorted(explained) == sorted(inspect.signature(penstock.hf.EngineArguments).parameters)
    assert explained[0] == "budget", "what is needed comes first"
    assert "is continued from its last step" not in said, "of a Trainer the checkpoint decides"
