"""Settings are checked where they are written, and ``engine.optimizer`` is a torch optimizer to everyone who looks."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as lrs

from penstock.config import Override
from penstock.config.optimizer import SGD, Adam, AdamW, Lion, Muon, OptimizerSpec
from penstock.errors import ConfigError
from penstock.optim.facade import StreamedOptimizer
from penstock.optim.from_torch import spec_of

NAMES = ("embed.weight", "layers.0.norm.weight", "layers.0.linear.weight", "layers.0.linear.bias")


def named() -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, torch.nn.Parameter(torch.zeros(3))) for name in NAMES]


@pytest.mark.parametrize(
    ("spec", "reference"),
    [(AdamW(), torch.optim.AdamW), (Adam(), torch.optim.Adam), (SGD(), torch.optim.SGD)],
)
def test_defaults_are_torchs(spec: OptimizerSpec, reference: type[torch.optim.Optimizer]) -> None:
    defaults = reference([torch.nn.Parameter(torch.zeros(1))]).defaults
    assert spec.group_settings == {name: defaults[name] for name in spec.group_settings}


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (AdamW(), ("exp_avg", "exp_avg_sq")),
        (Adam(), ("exp_avg", "exp_avg_sq")),
        (SGD(), ()),
        (SGD(momentum=0.9), ("momentum_buffer",)),
        (Lion(), ("exp_avg",)),
    ],
)
def test_moments_are_named_and_counted(spec: OptimizerSpec, names: tuple[str, ...]) -> None:
    assert spec.moment_names == names
    assert spec.moment_count == len(names)
    assert [hyper.moments for hyper in StreamedOptimizer(spec, named()).hypers()] == [len(names)]


def test_an_optimizer_that_names_no_moments_is_not_taken_for_one_that_keeps_none() -> None:
    class Unnamed(OptimizerSpec):
        group_keys = ("lr", "weight_decay")

    with pytest.raises(NotImplementedError):
        Unnamed(lr=1e-3, weight_decay=0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: AdamW(lr=-1),
        lambda: AdamW(lr=float("nan")),
        lambda: AdamW(eps=-1e-8),
        lambda: AdamW(lr=1e39),
        lambda: Adam(eps=0.0, moments="int8"),
        lambda: Adam(eps=1e-46, moments="int8"),
        lambda: replace(Adam(eps=0.0), moments="int8"),
        lambda: AdamW(betas=(0.9, 1.0)),
        lambda: Lion(betas=(-0.1, 0.9)),
        lambda: SGD(momentum=-0.5),
        lambda: SGD(nesterov=True),
        lambda: Adam(weight_decay=float("inf")),
        lambda: Override(match="norm"),
        lambda: Override(match="(", lr=1.0),
        lambda: Override(match="norm", lr=-1.0),
    ],
)
def test_impossible_settings_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        wrong()


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model has no parameter that is trained"):
        StreamedOptimizer(AdamW(), [])


def test_weight_decay_may_spare_norms_and_biases() -> None:
    """In each group: vectors, and what is called a bias however many dimensions it has; not where it is overridden."""
    shapes = {
        "embed.weight": (5, 3),
        "layers.0.norm.weight": (3,),
        "layers.0.linear.weight": (3, 3),
        "layers.0.linear.bias": (3,),
        "layers.0.experts.gate_up_proj_bias": (4, 3),
        "layers.0.bias_proj.weight": (3, 3),
        "head.weight": (5, 3),
        "head.bias": (5,),
        "gate.scale": (),
        "last.norm.weight": (3,),
    }
    parameters = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    overrides = (Override(match="head", lr=5.0), Override(match="last", weight_decay=0.5))
    spec = AdamW(lr=1.0, weight_decay=0.1, overrides=overrides, decay_norms_and_biases=False)
    optimizer = StreamedOptimizer(spec, parameters)
    found = {name: optimizer.param_groups[optimizer.group_of(p)] for name, p in parameters}
    assert {name: (group["lr"], group["weight_decay"]) for name, group in found.items()} == {
        "embed.weight": (1.0, 0.1),
        "layers.0.norm.weight": (1.0, 0.0),
        "layers.0.linear.weight": (1.0, 0.1),
        "layers.0.linear.bias": (1.0, 0.0),
        "layers.0.experts.gate_up_proj_bias": (1.0, 0.0),
        "layers.0.bias_proj.weight": (1.0, 0.1),
        "head.weight": (5.0, 0.1),
        "head.bias": (5.0, 0.0),
        "gate.scale": (1.0, 0.0),
        "last.norm.weight": (1.0, 0.5),
    }
    without = StreamedOptimizer(AdamW(weight_decay=0.0, decay_norms_and_biases=False), parameters)
    assert len(without.param_groups) == 1, "there is nothing to spare them from"
    as_torch = StreamedOptimizer(AdamW(weight_decay=0.1), parameters)
    assert len(as_torch.param_groups) == 1


def test_overrides_become_param_groups() -> None:
    spec = AdamW(
        lr=1e-3,
        weight_decay=0.1,
        overrides=(Override(match=r"norm|bias$", weight_decay=0.0), Override(match=r"^embed|bias", lr=1e-4)),
    )
    parameters = named()
    optimizer = StreamedOptimizer(spec, parameters)
    assert [group["param_names"] for group in optimizer.param_groups] == [[NAMES[2]], [NAMES[1], NAMES[3]], [NAMES[0]]]
    assert [(h.lr, h.weight_decay) for h in optimizer.hypers()] == [(1e-3, 0.1), (1e-3, 0.0), (1e-4, 0.1)]
    assert [optimizer.group_of(p) for _, p in parameters] == [2, 1, 0, 1]


def test_all_parameters_may_be_overridden() -> None:
    optimizer = StreamedOptimizer(AdamW(overrides=(Override(match=".", lr=0.5),)), named())
    assert [h.lr for h in optimizer.hypers()] == [0.5]


def test_an_override_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'lm_head'.*embed\.weight"):
        StreamedOptimizer(AdamW(overrides=(Override(match="lm_head", lr=0.5),)), named())


SCHEDULERS: list[Callable[[torch.optim.Optimizer], lrs.LRScheduler]] = [
    lambda o: lrs.LambdaLR(o, lambda step: 0.5**step),
    lambda o: lrs.CosineAnnealingLR(o, T_max=10),
    lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.CosineAnnealingLR(o, 7)], milestones=[3]),
    lambda o: lrs.OneCycleLR(o, max_lr=0.1, total_steps=10),
    lambda o: lrs.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_lr_schedulers_drive_it_as_they_drive_torchs(make: Callable[[torch.optim.Optimizer], lrs.LRScheduler]) -> None:
    optimizer = StreamedOptimizer(AdamW(lr=0.1), named())
    reference = torch.optim.AdamW([p for _, p in named()], lr=0.1)
    ours, theirs = make(optimizer), make(reference)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()" would mean that steps go unseen
        for _ in range(6):
            optimizer.record_step()
            reference.step()
            ours.step()
            theirs.step()
            group = reference.param_groups[0]
            (hyper,) = optimizer.hypers()
            assert (hyper.lr, hyper.betas) == (group["lr"], tuple(group["betas"]))


def test_a_tensor_is_a_learning_rate_too() -> None:
    optimizer = StreamedOptimizer(AdamW(), named())
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    assert optimizer.hypers()[0].lr == 0.25


NAN, MINUS = float("nan"), -0.1


@pytest.mark.parametrize(
    ("spec", "key", "values"),
    [
        (AdamW(), "lr", (NAN, MINUS, None, "x", "0.1", True, torch.ones(2), 10**400, 1e39)),
        (AdamW(), "lr", (np.bool_(True), torch.tensor(True))),  # which become True's text in a commit
        (AdamW(), "weight_decay", (float("inf"), MINUS, None)),
        (AdamW(), "eps", (NAN, MINUS, None, 1j)),
        (Adam(), "eps", (NAN, MINUS, None)),
        (Adam(moments="int8"), "eps", (0, 1e-46)),
        (Lion(), "betas", ((1.0, 0.9), (0.9, MINUS), 0.9, None, (0.9,), (0.9, "x"))),
        (AdamW(), "betas", ((1.0, 0.9), (0.9, MINUS), (0.9, NAN))),
        (SGD(momentum=0.9), "momentum", (NAN, MINUS, None)),
        (Muon(), "momentum", (NAN, MINUS, 1.0, None)),
        (Muon(), "adjust_lr_fn", ("x", 3)),
    ],
)
def test_settings_that_are_written_into_param_groups_are_checked(
    spec: OptimizerSpec, key: str, values: tuple[object, ...]
) -> None:
    parameters = named()
    optimizer = StreamedOptimizer(spec, parameters, [id(p) for _, p in parameters])
    before = optimizer.param_groups[0][key]
    for value in values:
        optimizer.param_groups[0][key] = value
        with pytest.raises(ConfigError, match=f"param_groups: .*{key}="):
            optimizer.hypers()
    optimizer.param_groups[0][key] = before
    optimizer.hypers()
    del optimizer.param_groups[0][key]
    with pytest.raises(ConfigError, match=f"there is no {key}, which this optimizer has"):
        optimizer.hypers()


def test_param_groups_that_are_taken_away_are_refused() -> None:
    """Parameters have the settings of a group by its number."""
    optimizer = StreamedOptimizer(AdamW(lr=0.1, overrides=(Override(match=NAMES[0], lr=0.2),)), named())
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(ConfigError, match="1 have parameters, and 2 had"):
        optimizer.hypers()
    optimizer.param_groups.clear()
    with pytest.raises(ConfigError, match="0 have parameters"):
        optimizer.hypers()


def test_parameters_that_change_places_between_param_groups_are_refused() -> None:
    """As well: a rate that was meant for others would hold, without a word."""

    def built() -> StreamedOptimizer:
        return StreamedOptimizer(AdamW(lr=0.1, overrides=(Override(match="bias|norm", lr=0.2),)), named())

    changes: list[Callable[[list[dict[str, Any]]], object]] = [
        lambda groups: groups.reverse(),
        lambda groups: groups[1]["params"].append(groups[0]["params"].pop()),
        lambda groups: groups[0]["params"].pop(),
        lambda groups: groups[0]["params"].append(groups[0]["params"][0]),
        lambda groups: groups[0]["params"].append(torch.nn.Parameter(torch.zeros(3))),
    ]
    for change in changes:
        optimizer = built()
        change(optimizer.param_groups)
        with pytest.raises(ConfigError, match="param_groups: their parameters"):
            optimizer.hypers()
    optimizer = built()
    optimizer.param_groups[0]["params"].reverse()  # which of a group's is first is nothing to a step
    assert [hyper.lr for hyper in optimizer.hypers()] == [0.1, 0.2]


FOREIGN: list[tuple[OptimizerSpec, type[torch.optim.Optimizer], dict[str, Any]]] = [
    (AdamW(), torch.optim.AdamW, {"maximize": True}),
    (AdamW(), torch.optim.AdamW, {"amsgrad": True}),
    (Adam(), torch.optim.AdamW, {}),
    (AdamW(), torch.optim.Adam, {}),
    (SGD(momentum=0.9), torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (SGD(), torch.optim.SGD, {"momentum": 0.9}),
]


@pytest.mark.parametrize(("spec", "kind", "asked"), FOREIGN)
def test_what_torchs_optimizers_have_besides_is_refused_wherever_it_is_written(
    spec: OptimizerSpec, kind: type[torch.optim.Optimizer], asked: dict[str, Any]
) -> None:
    """By who loads one's settings, and then nothing has changed; and by who writes them into a param group."""
    optimizer = StreamedOptimizer(spec, named())
    before = optimizer.hypers()
    foreign = kind([p for _, p in named()], lr=0.5, **asked).state_dict()
    with pytest.raises(ConfigError, match=r"param_groups: |built without"):
        optimizer.load_state_dict(foreign)
    assert optimizer.hypers() == before
    optimizer.param_groups[0].update({k: v for k, v in foreign["param_groups"][0].items() if k != "params"})
    with pytest.raises(ConfigError, match=r"param_groups: |built without"):
        optimizer.hypers()


def test_settings_of_torchs_own_optimizer_are_taken_over() -> None:
    optimizer = StreamedOptimizer(AdamW(), named())
    settings = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.25, "weight_decay": 0.125}
    foreign = torch.optim.AdamW([p for _, p in named()], **settings, foreach=True)  # type: ignore[arg-type]
    optimizer.load_state_dict(foreign.state_dict())
    (hyper,) = optimizer.hypers()
    assert settings == {key: getattr(hyper, key) for key in settings}


@pytest.mark.parametrize("betas", [0.9, ("x", 0.9), (0.9,), None])
def test_betas_that_are_none_are_refused_by_name_where_torchs_optimizer_is_only_named(betas: Any) -> None:
    """As by a Trainer's ``optimizer_cls_and_kwargs``: no optimizer of torch's was made, which would have refused."""
    with pytest.raises(ConfigError, match="betas="):
        spec_of(torch.optim.AdamW, {"lr": 0.1, "betas": betas})


@pytest.mark.parametrize("wrong", [None, [], {}, {"state": {}}, {"param_groups": 3}, {"param_groups": [{"lr": 1.0}]}])
def test_what_is_no_state_dict_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="no state_dict of an optimizer"):
        StreamedOptimizer(AdamW(), named()).load_state_dict(wrong)


def test_settings_survive_a_state_dict_and_moments_are_refused() -> None:
    optimizer = StreamedOptimizer(AdamW(lr=0.1), named())
    optimizer.param_groups[0]["lr"] = 0.025
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    other = StreamedOptimizer(AdamW(lr=0.1), named())
    (group,) = other.param_groups
    other.load_state_dict(saved)
    assert other.hypers()[0].lr == 0.025
    group["lr"] = 0.5  # as a schedule does that was made for another optimizer with the same groups
    assert other.hypers()[0].lr == 0.5
    with pytest.raises(ConfigError, match=r"engine\.load"):
        other.load_state_dict(saved | {"state": {0: {"exp_avg": torch.zeros(3)}}})


def test_what_only_the_engine_can_do_says_so() -> None:
    optimizer = StreamedOptimizer(AdamW(), named())
    with pytest.raises(RuntimeError, match=r"engine\.step"):
        optimizer.step()
    with pytest.raises(ConfigError, match="overrides"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    for hook in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        with pytest.raises(ConfigError, match="would never be called"):
            hook(print)
    optimizer.zero_grad()


def test_momentum_cannot_appear_without_its_buffer() -> None:
    optimizer = StreamedOptimizer(SGD(), named())
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ConfigError, match="built without"):
        optimizer.hypers()


def test_nesterov_is_what_the_param_group_says() -> None:
    optimizer = StreamedOptimizer(SGD(momentum=0.9), named())
    assert [hyper.kind for hyper in optimizer.hypers()] == ["momentum"]
    optimizer.param_groups[0]["nesterov"] = True  # as a snapshot that is loaded brings it
    assert [hyper.kind for hyper in optimizer.hypers()] == ["nesterov"]
