"""A model on the meta device is filled with its own initialisation, one group at a time."""

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.tape.blocks import find_blocks
from penstock.tape.groups import ParamGroup, group_parameters
from penstock.tape.init import initialise, materialise_buffers
from tests.models import MODELS, VOCABULARY
from tests.sweep.configs import tiny_of
from tests.tape_reference import CPU


def on_meta(name: str) -> tuple[nn.Module, tuple[ParamGroup, ...]]:
    with torch.device("meta"):
        model = MODELS[name].build().train()
    groups = group_parameters(model, find_blocks(model))
    for group in groups:
        group.detach(torch.float32, CPU)
    return model, groups


def fill(model: nn.Module, groups: tuple[ParamGroup, ...], seed: int) -> None:
    """Values are made as the engine does it: one group has memory at a time."""
    flats = []
    for group in groups:
        flats.append(torch.zeros(group.spec.numel))
        group.attach(flats[-1])
        initialise(model, group, seed)
        group.detach(torch.float32, CPU)
    for group, flat in zip(groups, flats, strict=True):
        group.attach(flat)


@pytest.mark.parametrize("name", MODELS)
def test_statistics_and_buffers_are_those_of_a_model_built_on_the_cpu(name: str) -> None:
    model, groups = on_meta(name)
    materialise_buffers(model, CPU, 0)
    fill(model, groups, 0)
    wanted = MODELS[name].model()
    assert dict(model.named_parameters()).keys() == dict(wanted.named_parameters()).keys()
    for key, parameter in wanted.named_parameters():
        found = model.get_parameter(key).detach()
        if parameter.std(correction=0) == 0:  # a norm or a bias
            assert torch.equal(found, parameter)
        elif parameter.numel() >= 128:
            assert 0.8 < float(found.std() / parameter.detach().std()) < 1.25, key
    assert dict(model.named_buffers()).keys() == dict(wanted.named_buffers()).keys()
    for key, buffer in wanted.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key
    micro_batch = MODELS[name].micro_batches(1)[0]
    assert MODELS[name].loss_fn(model, micro_batch).isfinite()


def test_a_group_depends_on_seed_and_name_alone() -> None:
    model, groups = on_meta("llama")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    fill(model, groups, 0)
    assert torch.equal(torch.get_rng_state(), state)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    other, others = on_meta("llama")
    fill(other, tuple(reversed(others)), 0)
    assert all(torch.equal(p, first[name]) for name, p in other.named_parameters())
    fill(other, others, 1)
    assert not torch.equal(other.model.embed_tokens.weight, first["model.embed_tokens.weight"])
    layers = [first[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2)]
    assert not torch.equal(*layers)


def test_filling_a_group_leaves_the_others_alone() -> None:
    model, groups = on_meta("gpt2")
    for group in groups[1:]:
        group.attach(torch.full((group.spec.numel,), 3.0))
    groups[0].attach(torch.zeros(groups[0].spec.numel))
    initialise(model, groups[0], 0)
    for group in groups[1:]:
        assert all(bool((s.parameter == 3.0).all()) for s in group.slices)


class Plain(nn.Module):
    def __init__(self, *, scale: bool = False, table: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, VOCABULARY)
        self.head.weight = self.embed.weight
        if scale:
            self.scale = nn.Parameter(torch.ones(8))
        if table:
            self.register_buffer("table", torch.arange(8.0))


def plain_on_meta(**settings: bool) -> tuple[nn.Module, tuple[ParamGroup, ...]]:
    with torch.device("meta"):
        model = Plain(**settings)
    groups = group_parameters(model, find_blocks(model))
    for group in groups:
        group.detach(torch.float32, CPU)
    return model, groups


def test_a_tied_weight_is_filled_by_its_first_owner() -> None:
    model, groups = plain_on_meta()
    fill(model, groups, 0)
    assert model.head.weight is model.embed.weight
    assert 0.8 < float(model.embed.weight.detach().std()) < 1.2  # as an embedding; a linear layer's would be 0.2
    assert float(model.head.bias.detach().abs().max()) <= 8**-0.5


def test_recurrent_layers_leave_the_meta_device() -> None:
    """Torch's own have weak references to their weights."""
    with torch.device("meta"):
        model = nn.Sequential(nn.LSTM(4, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    groups = group_parameters(model, find_blocks(model))
    fill(model, groups, 0)
    assert model[0](torch.ones(2, 1, 4))[0].isfinite().all()
    others = {name: torch.zeros_like(weight) for name, weight in model[0].named_parameters()}
    assert not torch.func.functional_call(model[0], others, torch.ones(2, 1, 4))[0].any(), "as it is on the CPU"


def test_a_parameter_that_nothing_fills_is_named() -> None:
    model, groups = plain_on_meta(scale=True)
    with pytest.raises(ModelError, match="nothing initialises parameter 'scale'"):
        fill(model, groups, 0)


def test_a_buffer_that_nothing_fills_is_named() -> None:
    model, _ = plain_on_meta(table=True)
    with pytest.raises(ModelError, match="nothing computes buffer 'table'"):
        materialise_buffers(model, CPU, 0)


class Stage(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), scale), persistent=False)


class Filled(nn.Module):
    """Fills buffers of the modules within it, which have nothing that does."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(0.5 + i) for i in range(3))

    def reset_parameters(self) -> None:
        for i, stage in enumerate(self.stages):
            stage.get_buffer("scale").fill_(0.5 + i)


def test_a_buffer_is_filled_by_what_it_is_within() -> None:
    with torch.device("meta"):
        model = Filled()
    materialise_buffers(model, CPU, 0)
    for key, buffer in Filled().named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key


def test_a_buffer_may_be_filled_with_nan() -> None:
    with torch.device("meta"):
        model = Filled()
    model.reset_parameters = lambda: [stage.scale.fill_(float("nan")) for stage in model.stages]
    materialise_buffers(model, CPU, 0)
    assert all(buffer.isnan().all() for buffer in model.buffers())


def test_buffers_that_a_model_of_transformers_computes_for_its_layers_are_right() -> None:
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = tiny_of(FalconH1ForCausalLM, FalconH1Config)
    config.ssm_multipliers = [0.5, 0.25, 2.0, 3.0, 4.0]
    with torch.device("meta"):
        model = FalconH1ForCausalLM(config)
    materialise_buffers(model, CPU, 0)
    wanted = dict(FalconH1ForCausalLM(config).named_buffers())
    assert any("mup_vector" in name for name in wanted)
    for key, buffer in wanted.items():
        assert torch.equal(model.get_buffer(key), buffer), key
