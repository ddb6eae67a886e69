"""Which submodules are blocks, and which parameters move together."""

import itertools

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.schedule.program import ALIGN
from penstock.tape import rng, trees
from penstock.tape.blocks import find_blocks
from penstock.tape.groups import group_parameters
from tests import models
from tests.models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_found(name: str) -> None:
    assert len(find_blocks(MODELS[name].model())) == MODELS[name].blocks


def test_blocks_of_encoder_and_decoder_in_order() -> None:
    names = [b.name for b in find_blocks(MODELS["t5"].model())]
    assert names == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1", "decoder.block.2"]


def test_small_lists_and_lists_inside_blocks_are_no_blocks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    model = nn.Module()
    model.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model.layers = nn.ModuleList([Block(), nn.Dropout(), Block()])
    model.single = nn.ModuleList([nn.Linear(64, 64)])
    assert [b.name for b in find_blocks(model)] == ["layers.0", "layers.2"]


class Composite(nn.Module):
    """A layer with modules of its own, as layers of transformers have."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)


class Other(Composite):
    pass


def holding(**modules: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def pairs() -> nn.ModuleList:
    """Layers as x-transformers and others have them: of each a list of norms, the layer itself, and what adds it."""
    norms = [nn.ModuleList([nn.LayerNorm(16), None]) for _ in range(4)]
    return nn.ModuleList(nn.ModuleList([norm, Composite(), nn.Identity()]) for norm in norms)


Sequence, List, Dict = nn.Sequential, nn.ModuleList, nn.ModuleDict
FOUND: dict[str, tuple[nn.Module, list[str]]] = {
    "with None": (holding(layers=List([Composite(), None, Composite()])), ["layers.0", "layers.2"]),
    "one layer, many times": (holding(layers=List([Composite()] * 3)), ["layers.0"]),
    "sequential": (
        holding(stem=nn.Linear(16, 16), blocks=Sequence(*(Composite() for _ in range(3)))),
        ["blocks.0", "blocks.1", "blocks.2"],
    ),
    "a sequential with ends": (Sequence(nn.Linear(16, 16), Composite(), Composite(), Other()), ["1", "2"]),
    "a sequential of kinds in turn": (Sequence(Composite(), Other(), Composite(), Other()), ["0", "1", "2", "3"]),
    "sequentials in a sequential": (
        holding(stages=Sequence(*(Sequence(Composite(), Composite()) for _ in range(2)))),
        ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"],
    ),
    "sequentials in a list": (
        holding(stages=List(Sequence(Composite(), Composite()) for _ in range(2))),
        ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"],
    ),
    "lists in a list": (
        holding(block=List(List([Composite()]) for _ in range(3))),
        ["block.0.0", "block.1.0", "block.2.0"],
    ),
    "norms and layers in lists in a list": (holding(layers=pairs()), [f"layers.{i}.1" for i in range(4)]),
    "a dict": (holding(layers=Dict({"a": Composite(), "b": Composite()})), ["layers.a", "layers.b"]),
    "a dict of everything": (
        holding(transformer=Dict({"wte": nn.Embedding(9, 16), "h": List([Composite(), Composite()])})),
        ["transformer.h.0", "transformer.h.1"],
    ),
    "a head that is a sequential": (
        holding(layers=List([Composite(), Composite()]), head=Sequence(nn.Linear(16, 16), nn.Linear(16, 16))),
        ["layers.0", "layers.1"],
    ),
    "projections in a list": (holding(layers=List(nn.Linear(16, 16) for _ in range(2))), ["layers.0", "layers.1"]),
}


@pytest.mark.parametrize("name", FOUND)
def test_lists_of_every_kind_are_found(name: str) -> None:
    model, names = FOUND[name]
    assert [b.name for b in find_blocks(model)] == names
    for block in find_blocks(model):
        assert model.get_submodule(block.name) is block.module


def test_bad_blocks_are_refused() -> None:
    model = MODELS["llama"].model()
    layers = list(model.model.layers)
    for blocks, message in (
        ([nn.Linear(2, 2)], "blocks[0] (Linear) is not a submodule of the model"),
        ([model], "is not a submodule of the model"),
        ([layers[0], layers[0].mlp], "'model.layers.0.mlp' is inside block 'model.layers.0'"),
        ([layers[0], layers[0]], "twice"),
        ([], "empty list"),
    ):
        with pytest.raises(ModelError) as caught:
            find_blocks(model, blocks)
        assert message in str(caught.value)
    with pytest.raises(ModelError, match="no ModuleList of two or more"):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_one_group(name: str) -> None:
    model = MODELS[name].model()
    groups = group_parameters(model, find_blocks(model))
    found = [s.name for g in groups for s in g.slices]
    assert sorted(found) == sorted(n for n, _ in model.named_parameters())
    assert [g.spec.index for g in groups] == list(range(len(groups)))
    for g in groups:
        assert g.spec.trainable % ALIGN == g.spec.frozen % ALIGN == 0
        places = sorted((s.offset, s.offset + s.numel) for s in g.slices)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        assert places[-1][1] <= g.spec.numel


def test_large_ends_are_groups_of_their_own_and_shared_parameters_are_ends() -> None:
    model = models.llama(vocab_size=9000)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    groups = {g.spec.name: [s.name for s in g.slices] for g in group_parameters(model, find_blocks(model))}
    assert list(groups)[:3] == ["ends.model.embed_tokens", "ends.lm_head", "ends.small"]
    assert groups["ends.model.embed_tokens"] == ["model.embed_tokens.weight"]
    assert groups["ends.small"] == ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    assert not any("up_proj" in n for name in groups for n in groups[name] if name.startswith("blocks.model.layers.1"))


def test_a_large_end_that_is_called_small_has_a_name_of_its_own() -> None:
    """By its group's name a parameter is drawn."""
    with torch.device("meta"):
        model = nn.Module()
        model.small = nn.Linear(512, 512)
        model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        model.head = nn.Linear(2, 2)
    names = [g.spec.name for g in group_parameters(model, find_blocks(model))]
    assert names == ["ends.small", "ends.<small>", "blocks.layers.0", "blocks.layers.1"]


def test_a_module_shared_by_two_blocks_is_an_end() -> None:
    model = models.llama()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    groups = {g.spec.name: [s.name for s in g.slices] for g in group_parameters(model, find_blocks(model))}
    assert "model.layers.0.mlp.up_proj.weight" in groups["ends.small"]


def test_frozen_parameters_come_last_and_have_no_state() -> None:
    model = models.llama()
    model.model.layers[0].mlp.requires_grad_(requires_grad=False)
    group = next(g for g in group_parameters(model, find_blocks(model)) if g.spec.name == "blocks.model.layers.0")
    frozen = [s.trainable for s in group.slices]
    assert frozen == sorted(frozen, reverse=True)
    assert all(s.trainable == (s.offset < group.spec.trainable) for s in group.slices)
    assert sum(s.numel for s in group.slices if not s.trainable) <= group.spec.frozen


def test_quantised_parameters_are_refused() -> None:
    model = models.llama()
    quantised = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    model.model.layers[0].mlp.up_proj.weight = quantised
    with pytest.raises(ModelError, match=r"mlp\.up_proj\.weight' is torch\.uint8"):
        group_parameters(model, find_blocks(model))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_detached_parameter_keeps_its_identity_and_reads_as_nan(device: str) -> None:
    with torch.device(device):
        model = models.llama()
    groups = group_parameters(model, find_blocks(model))
    before = dict(model.named_parameters())
    group = groups[-1]
    group.detach(torch.bfloat16, torch.device("cpu"))
    for s in group.slices:
        assert before[s.name] is s.parameter
        assert s.parameter.device.type == "cpu"
        assert s.parameter.isnan().all()
        assert s.parameter.untyped_storage().nbytes() == 2
    flat = torch.arange(group.spec.numel, dtype=torch.float32)
    group.attach(flat)
    for s in group.slices:
        assert before[s.name] is s.parameter
        assert torch.equal(s.parameter, flat[s.offset : s.offset + s.numel].view(s.shape))
        assert s.parameter.requires_grad


def test_a_parameter_with_hooks_does_not_leave_the_meta_device() -> None:
    with torch.device("meta"):
        model = models.llama()
    group = group_parameters(model, find_blocks(model))[-1]
    group.slices[0].parameter.register_hook(lambda gradient: None)
    with pytest.raises(AssertionError, match="would be lost"):
        group.detach(torch.float32, torch.device("cpu"))


def test_seeds_are_fixed_for_ever() -> None:
    """Saved runs resume with the same dropout only as long as these numbers stay."""
    assert rng.mix(0, 0, 0, 0, 0) == 8695987549771912286
    assert len({rng.mix(1, step, mb, stage, 0) for step in range(9) for mb in range(9) for stage in range(9)}) == 729
    assert rng.mix(1, 2) != rng.mix(2, 1)


def test_a_tree_is_replaced_without_touching_the_original() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    shared = {"x": [a]}
    value = (a, [b, (a, "text")], shared, shared)
    copy = trees.replace(value, lambda t: t + 1)
    assert value[2] is value[3]
    assert copy[2] is copy[3]
    assert copy[2] is not shared
    assert float(copy[2]["x"][0]) == 1.0
    assert float(a) == 0.0
    assert [id(t) for t in trees.tensors(value)] == [id(a), id(b)]


def test_only_what_changed_settles() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    value = {"old": [a], "new": [a], "pair": (a, [b])}
    before = trees.snapshot(value)
    value["new"].append(b)
    value["pair"][1][0] = a
    value["more"] = (b, "text")
    seen: list[int] = []
    trees.settle(value, before, lambda t: seen.append(id(t)) or t)
    assert seen == [id(b), id(a), id(b)]


def test_a_tree_may_contain_itself() -> None:
    loop: list[object] = [torch.zeros(1)]
    loop.append(loop)
    copy = trees.snapshot(loop)
    assert copy[1] is copy
    assert len(trees.tensors(loop)) == 1
    assert trees.settle(loop, copy, lambda t: t) is loop
