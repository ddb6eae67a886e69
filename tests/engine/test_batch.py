"""Micro-batches: every tensor in them is moved, counted and planned for, however deep it lies."""

import copy
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.engine import batch
from penstock.engine.spans import Beside
from penstock.errors import ModelError
from tests.models import PLAIN
from tests.stacks import Own
from tests.training import assert_same, budget, steps_of, train, wrap


@dataclass
class Pixels:
    values: torch.Tensor
    sizes: list[torch.Tensor]


def nested(rows: int) -> dict[str, Any]:
    return {
        "input_ids": torch.zeros(rows, 4, dtype=torch.int64),
        "image": {"pixels": Pixels(values=torch.zeros(rows, 3), sizes=[torch.zeros(rows)]), "kind": "rgb"},
        "more": UserDict(mask=(torch.zeros(rows, dtype=torch.bool), None)),
    }


def test_tensors_in_nested_containers_are_moved_and_cast() -> None:
    given = nested(2)
    moved = batch.to_device(given, torch.device("meta"), torch.bfloat16)
    found = [
        moved["input_ids"],
        moved["image"]["pixels"].values,
        moved["image"]["pixels"].sizes[0],
        moved["more"]["mask"][0],
    ]
    assert [t.device.type for t in found] == ["meta"] * 4
    assert [t.dtype for t in found] == [torch.int64, torch.bfloat16, torch.bfloat16, torch.bool]
    assert moved["image"]["kind"] == "rgb"
    assert given["image"]["pixels"].values.device.type == "cpu", "what was given is as it was"


def test_labels_and_what_only_a_loss_reads_are_not_rounded() -> None:
    class Note(Beside):
        exact = ("margin",)

    given = {"x": torch.zeros(2), "labels": (torch.zeros(3),), "margin": torch.zeros(4), "note": Note()}
    moved = batch.to_device(given, torch.device("meta"), torch.bfloat16)
    assert [moved["x"].dtype, moved["labels"][0].dtype, moved["margin"].dtype] == [torch.bfloat16] + [torch.float32] * 2
    assert batch.nbytes(given, torch.bfloat16) == 2 * 2 + 3 * 4 + 4 * 4


def test_a_plan_has_room_for_the_tensors_in_nested_containers() -> None:
    small, large = batch.shapes(nested(2)), batch.shapes(nested(3))
    assert batch.covers(large, small)
    assert not batch.covers(small, large)
    wide = nested(3)
    wide["image"]["pixels"].values = torch.zeros(3, 5)
    assert not batch.covers(large, batch.shapes(wide))
    for dtype in (torch.float32, torch.bfloat16):  # as it is on the device
        assert batch.nbytes(wide, dtype) - batch.nbytes(nested(3), dtype) == 3 * 2 * dtype.itemsize


def test_a_micro_batch_whose_tensors_are_nested_is_one() -> None:
    batch.check([{"inputs": {"x": torch.zeros(1)}}], train=True)
    with pytest.raises(ModelError, match="no tensor with elements"):
        batch.check([{"inputs": {"x": torch.zeros(0)}, "names": ["a"]}], train=True)


def test_what_holds_no_tensor_reaches_the_loss_as_it_is() -> None:
    """The caller may collect in it, wherever in a micro-batch it lies."""
    results: list[float] = []
    notes: dict[str, Any] = {}
    names = UserDict(a=["x"])
    given = {"x": torch.zeros(2), "out": results, "more": {"x": (torch.zeros(2), notes)}, "names": names}
    moved = batch.to_device(given, torch.device("meta"), torch.bfloat16)
    assert moved["out"] is results
    assert moved["more"]["x"][1] is notes
    assert moved["names"] is names
    assert moved["more"] is not given["more"]


def test_a_loss_that_collects_tensors_in_its_micro_batch_is_refused(tmp_path: Path) -> None:
    """Changes would be in copies that nobody has. Numbers are no tensors, and a variable of one's own is no copy."""
    case, own = PLAIN, list[torch.Tensor]()
    given = case.micro_batches(1)[0]

    def collecting(model: nn.Module, mb: Mapping[str, Any]) -> torch.Tensor:
        loss = case.loss_fn(model, {name: value for name, value in mb.items() if name != "out"})
        mb["out"].append(float(loss.detach()) if "plain" in mb["out"] else loss.detach())
        own.append(loss.detach())
        return loss

    with wrap(case, budget(tmp_path / "store"), loss_fn=collecting) as engine:
        plain: list[Any] = ["plain"]
        first = engine.evaluate([given | {"out": plain}])
        assert plain[-1] == pytest.approx(first)
        assert float(own[-1]) == plain[-1]
    with (
        wrap(case, budget(tmp_path / "other"), loss_fn=collecting) as engine,
        pytest.raises(ModelError, match="loss_fn puts tensors into 'out' of its micro-batch, where they would be lost"),
    ):
        engine.step([given | {"out": []}])


@pytest.mark.parametrize("there", [[], [torch.zeros(1)], ["a", {"x": torch.zeros(1)}]])
def test_it_is_refused_wherever_in_a_micro_batch_it_collects(there: list[Any], tmp_path: Path) -> None:
    case = PLAIN
    given = case.micro_batches(1)[0] | {"out": {"mask": torch.zeros(2), "seen": there}}

    def collecting(model: nn.Module, mb: Mapping[str, Any]) -> torch.Tensor:
        loss = case.loss_fn(model, {name: value for name, value in mb.items() if name != "out"})
        mb["out"]["seen"].insert(0, loss.detach())
        return loss

    with (
        wrap(case, budget(tmp_path / "store"), loss_fn=collecting) as engine,
        pytest.raises(ModelError, match=r"loss_fn puts tensors into 'out\.seen' of its micro-batch"),
    ):
        engine.step([given])


def test_a_loss_that_begins_to_collect_later_breaks_no_step(tmp_path: Path) -> None:
    """What a plan was made for is asked before the step: its micro-batches may be others after it."""
    case, calls = PLAIN, count()
    given = case.micro_batches(1)[0] | {"out": []}

    def collecting(model: nn.Module, mb: Mapping[str, Any]) -> torch.Tensor:
        if next(calls) > 1:
            mb["out"].append(torch.zeros(1))
        return case.loss_fn(model, {name: value for name, value in mb.items() if name != "out"})

    with wrap(case, budget(tmp_path / "store"), loss_fn=collecting, clip_grad_norm=1.0) as engine:  # runs it again
        assert engine.step([given]).flops > 0
    assert given["out"]


def test_a_loss_may_write_into_its_micro_batch(tmp_path: Path) -> None:
    """It finds what was given whenever it runs: in the probe, in a step and where a step is run again."""
    case = PLAIN
    steps = steps_of(case, 2)
    before = copy.deepcopy(steps)

    def masking(model: nn.Module, mb: Mapping[str, Any]) -> torch.Tensor:
        mask = torch.rand(mb["input_ids"].shape) < 0.3
        mb["input_ids"][mask] = 0
        return case.loss_fn(model, mb)

    settings: dict[str, Any] = {"loss_fn": masking, "clip_grad_norm": 1e-3, "delay": 0}
    waits, again = (
        train(case, budget(tmp_path / str(speculate)), steps, speculate=speculate, **settings)
        for speculate in (False, True)
    )
    assert [s.repeats for s in again.stats] == [1, 1]
    assert_same(waits, again)
    torch.testing.assert_close(steps, before, rtol=0, atol=0)


def test_nothing_is_written_into_a_mapping_of_an_unknown_kind() -> None:
    """It is handed on as other objects are: whoever made it moves what is in it."""
    own, pixels = Own(x=torch.zeros(2)), torch.zeros(3)
    given = {"a": own, "more": {"own": own, "pixels": pixels}}
    moved = batch.to_device(given, torch.device("cpu"), torch.bfloat16)
    assert own["x"].dtype == torch.float32
    assert moved["a"] is moved["more"]["own"] is own
    assert moved["more"]["pixels"].dtype == torch.bfloat16
    assert batch.nbytes(given, torch.float32) == 3 * 4
    with pytest.raises(ModelError, match="no tensor with elements"):
        batch.check([{"a": own}], train=True)


def test_each_tensor_counts_once_under_a_place_of_its_own() -> None:
    nested, flat = torch.zeros(9), torch.zeros(1)
    given = {"a": {"b": nested}, "a.b": flat}
    assert batch.nbytes(given, torch.float32) == 10 * 4
    assert {shape for _, shape, _ in batch.shapes(given)} == {(9,), (1,)}
    twice = {"a": [flat, {"again": flat}]}
    moved = batch.to_device(twice, torch.device("meta"), torch.bfloat16)
    assert batch.nbytes(twice, torch.float32) == 4
    assert moved["a"][0] is moved["a"][1]["again"]


def test_examples_are_those_of_the_first_tensor_as_it_was_given() -> None:
    given = {"pixel_values": torch.zeros(8, 3), "grid": torch.zeros(1, 3)}
    assert batch.tokens(given) == 8
    assert batch.shapes(given) == batch.shapes(dict(reversed(given.items()))), "the order says nothing to a plan"


def test_a_mask_that_hides_something_is_another_shape_wherever_it_lies() -> None:
    def shapes(mask: torch.Tensor) -> batch.Shapes:
        return batch.shapes({"text": {"attention_mask": mask}})

    assert shapes(torch.ones(2, 2)) != shapes(torch.eye(2))


def test_places_that_begin_anew_within_a_row_are_another_shape() -> None:
    """Models make a mask of them, which takes memory; and one of a larger number of documents is no smaller."""

    def shapes(*rows: tuple[int, ...]) -> batch.Shapes:
        ends = torch.tensor([place for row in rows for place in row if not place])
        return batch.shapes({"position_ids": torch.tensor(rows), "cu_seq_lens_q": ends})

    one, two = shapes((0, 1, 2, 3), (0, 1, 2, 3)), shapes((0, 1, 2, 3), (0, 1, 0, 1))
    assert one != two
    assert batch.covers(two, one)
    assert not batch.covers(one, two)
    assert not batch.handed_alike(two, one)
    assert batch.handed_alike(shapes((0, 0, 1, 0), (0, 1, 0, 1)), two)
    assert not batch.handed_alike(two, shapes((0, 0, 1, 0), (0, 1, 0, 1)))
    assert not batch.handed_alike(two, shapes((0, 1, 0), (0, 1, 2)))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_places_in_a_dtype_that_torch_does_not_subtract_are_handed_on_as_the_same_numbers(dtype: torch.dtype) -> None:
    places = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    given = {"position_ids": places.to(dtype), "pixels": places.to(dtype)}
    found = batch.to_device(given, torch.device("cpu"), torch.float32)
    assert torch.equal(found["position_ids"], places)
    assert found["position_ids"].dtype == torch.int64
    assert found["pixels"].dtype == dtype, "they are whatever the model takes them for"
    assert batch.nbytes(given, torch.float32) == 8 * (8 + dtype.itemsize)
    assert batch.shapes(given)[1][1] == (2, 4, 1)
    assert batch.shapes({"position_ids": places[:1].to(dtype)})[0][1] == (1, 4, 0)
    wraps = torch.tensor([[254, 255, 0, 1]], dtype=torch.uint8)
    assert batch.shapes({"position_ids": wraps})[0][1] == (1, 4, 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32])
def test_ids_and_labels_in_any_whole_dtype_are_handed_on_as_the_same_numbers_in_one_that_models_take(
    dtype: torch.dtype,
) -> None:
    ids = torch.tensor([[3, 1, 2, 0]])
    names = ("input_ids", "token_type_ids", "position_ids", "labels")
    given = {name: ids.to(dtype) for name in (*names, "pixels")}
    found = batch.to_device(given, torch.device("cpu"), torch.float32)
    for name in names:
        assert torch.equal(found[name].long(), ids)
        nn.Embedding(4, 2)(found[name])
    nn.functional.cross_entropy(torch.zeros(4, 4), found["labels"][0])
    assert found["pixels"].dtype == dtype
    assert batch.nbytes(given, torch.float32) == sum(t.numel() * t.dtype.itemsize for t in found.values())
    assert batch.to_device({"labels": ids.bool()}, torch.device("cpu"), torch.float32)["labels"].dtype == torch.bool


def test_places_without_one_piece_of_memory_are_a_shape() -> None:
    rows = [torch.arange(2), torch.arange(3)]
    nested = batch.shapes({"position_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)})
    assert [place for place, _, _ in nested] == [("position_ids",)]
    assert batch.shapes({"attention_mask": torch.eye(3).to_sparse_csr()})[0][1] == (3, 3)


@pytest.mark.parametrize("what", ["parameter", "output"])
def test_what_trains_outside_of_the_model_is_refused_in_a_step_and_may_be_evaluated(what: str, tmp_path: Path) -> None:
    """Its gradient would be lost: in a plain loop, ``backward`` brings it to a model before this one."""
    encoder = nn.Linear(8, 8)
    given = encoder.weight if what == "parameter" else encoder(torch.zeros(8, 8))
    case = PLAIN
    micro_batch = {**case.micro_batches(1)[0], "more": [given]}

    def loss(model: Any, mb: Mapping[str, Any]) -> torch.Tensor:
        found: torch.Tensor = case.loss_fn(model, {k: v for k, v in mb.items() if k != "more"})
        return found

    with wrap(case, budget(tmp_path), loss_fn=loss) as engine:
        with pytest.raises(ModelError, match=r"micro-batch 0: 'more\.0' needs a gradient"):
            engine.step([micro_batch])
        with pytest.raises(ModelError, match=r"micro-batch 0: 'more\.0' needs a gradient"):
            engine.prepare([micro_batch])
        assert engine.evaluate([micro_batch]) > 0
        assert engine.step([{**micro_batch, "more": [given.detach().requires_grad_()]}]).loss > 0
