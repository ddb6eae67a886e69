"""Moments in another form: by parameter, what is there afterwards is what was there, widened and rounded as a step does
it, and nothing else has changed.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import permutations
from math import prod
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock.config import Precision
from penstock.config.optimizer import Moments, OptimizerSpec
from penstock.engine.start import describe_model
from penstock.errors import StoreError
from penstock.optim import kernels
from penstock.optim.codes import Codes
from penstock.optim.precision import DTYPES
from penstock.ranks.share import Share
from penstock.schedule.place import GRAIN, Format
from penstock.state.arrays import StateArrays
from penstock.state.buffers import Buffers
from penstock.state.convert import Conversion, renumbered, without_form
from penstock.state.parts import form_of, groups_of
from penstock.state.slots import Slots
from penstock.tape.blocks import find_blocks
from penstock.tape.groups import group_parameters
from tests.training import ADAMW

FORMS: tuple[Moments, ...] = get_args(Moments)
CHANGES = list(permutations(FORMS, 2))
MUON = penstock.Muon(adamw=ADAMW)
OPTIMIZERS: Sequence[OptimizerSpec] = (ADAMW, penstock.Lion(lr=1e-3), penstock.SGD(lr=0.1, momentum=0.9), MUON)


class Rows(nn.Module):
    """Blocks of any sizes: trained, frozen, some trained ones that are small, and a matrix; and ends."""

    def __init__(self, sizes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ParameterList([*map(torch.zeros, each[:-1]), torch.zeros(2, each[-1])]) for each in sizes
        )
        for block in self.blocks:
            block[1].requires_grad = False
        self.ends = nn.ParameterList([torch.zeros(70), torch.zeros(5000)])


def described(
    sizes: Sequence[Sequence[int]], optimizer: OptimizerSpec, precision: Precision, ranks: int = 1
) -> dict[str, Any]:
    model = Rows(sizes)
    blocks = find_blocks(model, list(model.blocks))
    form = Format.of(precision, optimizer.moment_count, optimizer.moments, optimizer.whole)
    groups = group_parameters(model, blocks, ranks, form)
    return describe_model(groups, Buffers(model), precision, optimizer)


def arrays_of(model: Mapping[str, Any], share: Share) -> StateArrays:
    groups = [share.part(group) for group in groups_of(model)]
    dtype, device = DTYPES[model["precision"]], torch.device("cpu")
    return StateArrays(groups, form_of(model), dtype, device, None, Slots(None), host_bytes=1 << 40)


def fill_at_random(arrays: StateArrays, seed: int) -> None:
    """Any bits of weights; moments of every magnitude, with zeros, infinities, NaNs and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    for name in arrays.parts:
        array, kind = arrays.array(name), name.partition(".")[0]
        if kind.startswith("scale"):
            continue
        if not kind.startswith("moment"):
            array.view(torch.uint8).random_(generator=generator)
            continue
        n = array.numel()
        values = torch.randn(n, generator=generator) * 10.0 ** torch.randint(-42, 5, (n,), generator=generator)
        values[torch.randint(0, n, (n // 500 + 2,), generator=generator)] = torch.tensor([0.0, torch.inf])[seed % 2]
        values[torch.randint(0, n, (1,), generator=generator)] = torch.nan
        moment = moment_of(in_memory(arrays), name)
        kernels.encode(moment, values.abs() if kind == "moment1" else values)


State = Mapping[str, torch.Tensor]
"""Every array, by name."""
Found = dict[str, dict[str, torch.Tensor]]
"""Each array of each parameter, by the parameter's name and the array's kind."""


def in_memory(arrays: StateArrays) -> State:
    return {name: arrays.array(name) for name in arrays.parts}


def moment_of(state: State, name: str) -> torch.Tensor | Codes:
    array, scales = state[name], name.replace("moment", "scale")
    return Codes(codes=array, scales=state[scales][: array.numel() // 32]) if scales in state else array


def by_parameter(model: Mapping[str, Any], states: Sequence[State]) -> tuple[Found, State]:
    """What each parameter has, moments widened to fp32, out of the parts of all ranks; and the padding of each array,
    all of which is looked at."""
    found: Found = {}
    padding: dict[str, torch.Tensor] = {}
    for group in groups_of(model):
        each, parameters = group.trainable // len(states), model["groups"][group.index]["parameters"]
        for name in (name for name in states[0] if name.endswith(f".{group.index}")):
            kind, parts = name.partition(".")[0], []
            if kind.startswith("scale"):
                continue
            for state in states:
                parts.append(state[name])
                if kind.startswith("moment"):
                    parts[-1] = torch.empty(each)
                    kernels.decode(parts[-1], moment_of(state, name))
            whole = torch.cat([part[:each] for part in parts] + [part[each:] for part in parts])
            pads = torch.ones(whole.numel(), dtype=torch.bool)
            for parameter, shape, offset, trained in parameters:
                if trained or kind == "weights":
                    span = slice(offset, offset + prod(shape))
                    found.setdefault(parameter, {})[kind], pads[span] = whole[span], False
            padding[name] = whole[pads]
    return found, padding


def rounded(values: torch.Tensor, form: Moments, kind: str) -> torch.Tensor:
    """A parameter's moment, alone, as it is after it has been in a form."""
    if form == "fp32" or values.numel() < 4096:
        return values
    padded = torch.zeros(-(-values.numel() // 32) * 32)
    padded[: values.numel()] = values
    moment: torch.Tensor | Codes = torch.empty(padded.numel(), dtype=torch.bfloat16)
    if form == "int8":
        dtype = torch.uint8 if kind == "moment1" else torch.int8
        scales = torch.empty(padded.numel() // 32, dtype=torch.int16)
        moment = Codes(codes=torch.empty(padded.numel(), dtype=dtype), scales=scales)
    kernels.encode(moment, padded)
    kernels.decode(padded, moment)
    return padded[: values.numel()]


def check_converted(before: Found, after: Found, form: Moments) -> None:
    """Each parameter has what it had: the same bits, of moments those that ``rounded`` gives; of NaNs that they are."""
    assert after.keys() == before.keys()
    for name, arrays in before.items():
        assert after[name].keys() == arrays.keys()
        for kind, values in arrays.items():
            here, wanted = after[name][kind], values
            if kind.startswith("moment"):
                wanted = rounded(values, form, kind)
                assert torch.equal(here.isnan(), wanted.isnan()), (name, kind)
                here, wanted = (each.where(~each.isnan(), 0.0) for each in (here, wanted))
            here, wanted = (each.contiguous().view(torch.uint8) for each in (here, wanted))
            assert torch.equal(here, wanted), (name, kind)


SIZES = st.one_of(st.integers(1, 200), st.integers(4000, 4200), st.integers(1, 90_000))


@settings(max_examples=20, deadline=None)
@example([(90_000, 1, 70, 90_000), (5_000, 1, 1, 1)], ("fp32", "int8"), ADAMW, "bf16", (1, 1), 0)
@example([(90_000, 90_000, 70, 90_000)], ("int8", "bf16"), ADAMW, "bf16", (3, 2), 1)
@example([(70, 70, 5_000, 500), (5_000, 70, 70, 5_000)], ("fp32", "int8"), MUON, "bf16", (1, 2), 2)
@given(
    sizes=st.lists(st.tuples(SIZES, SIZES, SIZES, SIZES), min_size=1, max_size=2),
    change=st.sampled_from(CHANGES),
    optimizer=st.sampled_from(OPTIMIZERS),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    ranks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 1000),
)
def test_each_parameter_has_what_it_had_widened_and_rounded_once(
    sizes: list[tuple[int, ...]],
    change: tuple[Moments, Moments],
    optimizer: OptimizerSpec,
    precision: Precision,
    ranks: tuple[int, int],
    seed: int,
) -> None:
    """Whatever groups the parameters are in, in however many pieces and by however many ranks these are cut."""
    had, model = (
        described(sizes, replace(optimizer, moments=form), precision, number)
        for form, number in zip(change, ranks, strict=True)
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch("penstock.state.convert.BOUNCE", 8 * GRAIN))  # a piece is a grain
        old, new = (
            [arrays_of(each, Share(rank=rank, size=size)) for rank in range(size)]
            for each, size in ((had, ranks[0]), (model, ranks[1]))
        )
        for arrays in (*old, *new):
            stack.callback(arrays.close)
        for rank, arrays in enumerate(old):
            fill_at_random(arrays, seed + rank)
        for rank, arrays in enumerate(new):
            fill_at_random(arrays, seed - 1 - rank)  # nothing of what is there before is left
            Conversion(Together(had, old), had, model).fill(arrays, Share(rank=rank, size=ranks[1]))
        before, _ = by_parameter(had, [in_memory(arrays) for arrays in old])
        after, padding = by_parameter(model, [in_memory(arrays) for arrays in new])
        check_converted(before, after, change[1])
        for name, values in padding.items():
            if change[1] == "int8":  # it may share a scale with a NaN, which all of that group is then
                values = values[~values.isnan()]
            assert not values.any() or (change[1] == "int8" and name.startswith("moment1"))
        for arrays in new:
            for name, part in arrays.parts.items():
                used = arrays.groups[part.group].trainable // 32
                assert not (name.startswith("scale") and arrays.array(name)[used:].any())


class Together:
    """Whole groups out of the parts of all ranks, which are in memory."""

    def __init__(self, model: Mapping[str, Any], shares: Sequence[StateArrays]) -> None:
        self._groups, self._shares = {group.index: group for group in groups_of(model)}, shares
        self.parts = shares[0].parts

    def fetch(self, names: tuple[str, ...], offset: int, flat: torch.Tensor) -> None:
        part = self.parts[names[0]]
        share = Share(size=len(self._shares))
        for piece in share.pieces(self._groups[part.group], offset, flat.numel() * part.per):
            into = flat[piece.first // part.per : (piece.first + piece.numel) // part.per]
            self._shares[piece.rank].fetch(names, piece.start, into)


def test_what_is_said_of_a_group_is_compared_by_parameter() -> None:
    had, model = (described([(5000, 7, 8, 5000)], replace(ADAMW, moments=form), "bf16") for form in ("fp32", "bf16"))
    assert without_form(had) == without_form(model)
    for damage in ({"moments": 1}, {"parameters": model["groups"][0]["parameters"][:-1]}):
        groups = [model["groups"][0] | damage, *model["groups"][1:]]
        assert without_form(had) != without_form(model | {"groups": groups})


def test_what_is_said_of_parameters_by_number_is_said_of_the_same_ones() -> None:
    """Small parameters come after the others of their block in a compact form, and so get other numbers."""
    sizes = [(10, 20, 5000, 30), (6000, 7, 8, 5000)]
    had, model = (described(sizes, replace(ADAMW, moments=form), "bf16") for form in ("fp32", "bf16"))
    order, numbers = (
        [name for group in each["groups"] for name, _, _, trained in group["parameters"] if trained]
        for each in (had, model)
    )
    assert order != numbers
    groups = [{"lr": 1.0, "param_names": order[::3]}, {"param_names": order[1:]}, {"eps": 2.0}]
    record = {"step": 7, "missed": {str(i): 10 + i for i in range(len(order))}, "param_groups": groups, "seed": 3}
    found = renumbered(record, had, model, "there")
    assert {numbers[int(i)]: count for i, count in found["missed"].items()} == {n: 10 + i for i, n in enumerate(order)}
    for before, after in zip(groups, found["param_groups"], strict=True):
        names = before.get("param_names", [])
        assert after == before | ({"param_names": [name for name in numbers if name in names]} if names else {})
    changed = {"missed": 0, "param_groups": 0}
    assert found | changed == record | changed
    for damage, said in (
        ({"missed": {str(len(order)): 1}}, "it counts steps of a parameter"),
        ({"param_groups": [{"param_names": ["other"]}]}, "param_names="),
        ({"param_groups": [{"param_names": 7}]}, "param_names="),
    ):
        with pytest.raises(StoreError, match=said):
            renumbered(record | damage, had, model, "there")
