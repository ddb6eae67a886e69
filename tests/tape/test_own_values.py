"""Attributes that a forward puts on the model, and that later stages of the same forward read."""

import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from tests.models import Case, MicroBatch, draw_tokens
from tests.stacks import WEIGHTS, WIDTH, Layer, Stack, assert_exact, of, stack
from tests.tape_reference import horizontal, vertical, with_graphs

pytestmark = pytest.mark.usefixtures("one_thread")


def through(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def a_tensor(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.mask = torch.sigmoid(x.detach().mean(-1, keepdim=True))
    return through(model, x) * model.mask


def a_tensor_with_a_gradient(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.first = x.sin()
    return through(model, x) + model.first


def a_number(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.length = x.shape[1]
    return through(model, x) / model.length


def a_number_of_the_data(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.scale = float(x.detach().abs().max())
    return through(model, x) * model.scale


def one_that_goes_away(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.length = x.shape[1]
    x = through(model, x) / model.length
    del model.length
    return x


def a_new_list(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.seen = []
    for layer in model.layers:
        model.seen.append(x.mean())
        x = layer(x)
    return x + torch.stack(model.seen).sum()


def between_blocks(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        model.scale = float(x.detach().mean())
        x = layer(x) * (1 + model.scale)
    return x


def a_buffer(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.held = x.detach().mean((0, 1))
    return through(model, x) + model.held


class Scaled(Layer):
    """Is told a number by an attribute, and notes one."""

    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = float(x.detach().abs().max())
        return super().forward(x) * self.scale


def told(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        layer.scale = 1 / x.shape[1]
    return through(model, x)


def told_one_after_the_other(model: Any, x: torch.Tensor) -> torch.Tensor:
    """All blocks read one attribute, which is another one's when they are computed again."""
    for i, layer in enumerate(model.layers):
        model.layers[0].scale = 1 + i + float(x.detach().mean())
        layer.scale = model.layers[0].scale
        x = layer(x)
    return x


def read_of_blocks(model: Any, x: torch.Tensor) -> torch.Tensor:
    return through(model, x) * sum(layer.largest for layer in model.layers)


PATTERNS = {
    pattern.__name__: pattern
    for pattern in (
        *(a_tensor, a_tensor_with_a_gradient, a_number, a_number_of_the_data, one_that_goes_away, a_new_list),
        *(between_blocks, a_buffer, told, told_one_after_the_other, read_of_blocks),
    )
}


class Holding(Stack):
    def __init__(self, run: Any) -> None:
        super().__init__(Scaled, run)
        self.register_buffer("held", torch.zeros(WIDTH), persistent=False)


Pattern = Callable[[Any, torch.Tensor], torch.Tensor]


def see(model: Any) -> None:
    """So that the probe puts the same numbers where they are already."""
    model(torch.zeros(1, 12, dtype=torch.long))


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_attributes_are_those_of_the_micro_batch(pattern: Pattern) -> None:
    assert_exact(of(lambda: Holding(pattern)), see, (vertical, with_graphs))


def test_a_block_that_is_computed_again_finds_those_of_its_call() -> None:
    assert_exact(of(lambda: Holding(told_one_after_the_other)), orders=(horizontal, with_graphs))


def a_list_of_its_own(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.kept.clear()
    for layer in model.layers:
        model.kept.append(x.mean())
        x = layer(x)
    return x + torch.stack(model.kept).sum()


def an_object(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.object.mask = torch.sigmoid(x.mean(-1, keepdim=True))
    return through(model, x) * model.object.mask


KEPT: dict[str, Any] = {}
LAST: torch.Tensor | None = None


def a_global_dict(model: Any, x: torch.Tensor) -> torch.Tensor:
    KEPT["mask"] = torch.sigmoid(x.mean(-1, keepdim=True))
    return through(model, x) * KEPT.pop("mask")


def a_global(model: Any, x: torch.Tensor) -> torch.Tensor:
    global LAST
    LAST = torch.sigmoid(x.mean(-1, keepdim=True))
    x = through(model, x)
    assert LAST is not None
    return x * LAST


def one_tensor_in_two_places(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.object.mask = KEPT["mask"] = torch.sigmoid(x.mean(-1, keepdim=True))
    model.kept[:] = [model.object.mask]
    return through(model, x) * model.object.mask + KEPT["mask"] - model.kept.pop().square()


class Keeping(Stack):
    def __init__(self, run: Any) -> None:
        super().__init__(run=run)
        self.kept: list[torch.Tensor] = []
        self.object = types.SimpleNamespace()


@pytest.mark.parametrize("run", [a_list_of_its_own, an_object, a_global_dict, a_global, one_tensor_in_two_places])
def test_objects_from_before_the_forward_hold_what_is_the_micro_batchs(run: Pattern) -> None:
    assert_exact(of(lambda: Keeping(run)), orders=(vertical, horizontal))


def a_log(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.kept.append(x.detach().mean())
    return through(model, x)


def test_a_log_that_nobody_reads_is_as_it_was() -> None:
    _, bench = assert_exact(of(lambda: Keeping(a_log)))
    assert len(bench.tape.model.kept) == len(WEIGHTS), "without the probe's"


def loss_of_features(model: nn.Module, micro_batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**micro_batch)
    return loss + sum(feature.square().mean() for feature in KEPT["features"])


@pytest.mark.parametrize("pre", [False, True])
def test_features_that_hooks_keep_for_the_loss(pre: bool) -> None:
    KEPT["features"] = []

    def change(model: Any) -> None:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            KEPT["features"].append(args[0])

        def behind(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            KEPT["features"].append(output)

        model.register_forward_pre_hook(lambda module, args, kwargs: KEPT["features"].clear(), with_kwargs=True)
        for module in model.layers if pre else (model.embed, *model.layers):
            _ = module.register_forward_pre_hook(before) if pre else module.register_forward_hook(behind)

    assert_exact(replace(stack(), loss_fn=loss_of_features), change, (vertical, horizontal, with_graphs))


def counted_twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.count += 1
    x = through(model, x)
    model.count += 1
    return x


def counted_by_blocks(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
        layer.shared[0].count += 1
    return x


@pytest.mark.parametrize(("run", "each"), [(counted_twice, 2), (counted_by_blocks, 3)])
def test_counts_that_several_stages_go_on_with_lose_nothing(run: Pattern, each: int) -> None:
    def change(model: Any) -> None:
        model.count = 0
        for layer in model.layers:
            layer.shared = [model]

    _, bench = assert_exact(of(lambda: Stack(run=run)), change, (vertical, vertical))
    assert bench.tape.model.count == each * 2 * len(WEIGHTS)  # a probe's are put back


def never_read(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        model.seen = x.detach() + 1
        x = layer(x)
    return x


def test_a_tensor_that_nobody_reads_is_not_kept() -> None:
    _, bench = assert_exact(of(lambda: Stack(run=never_read)))
    assert not any(stage.assigned or stage.finds for stage in bench.tape.facts)


def in_an_object(model: Any, mask: torch.Tensor) -> None:
    model.object.mask = mask


def in_one_made_at_first(model: Any, mask: torch.Tensor) -> None:
    if not hasattr(model, "made"):
        model.made = types.SimpleNamespace()
    model.made.mask = mask


def in_a_global(model: Any, mask: torch.Tensor) -> None:
    KEPT["mask"] = mask


def in_a_global_with_others(model: Any, mask: torch.Tensor) -> None:
    KEPT["batch"] = {"mask": mask, "none": None}


def in_a_list(model: Any, mask: torch.Tensor) -> None:
    model.kept.append(mask[:, :1])


def on_a_block(model: Any, mask: torch.Tensor) -> None:
    model.layers[1].mask = mask


class Masked(Keeping):
    """Puts a tensor of the micro-batch where whoever needs it finds it. ``reads``: what the model does with it behind
    the blocks; ``of_block``: what the second one does."""

    def __init__(self, keep: Any, reads: Any = None, of_block: Any = None) -> None:
        super().__init__(None)
        self.keep, self.run = keep, reads
        if of_block is not None:
            self.layers[1] = Reading(of_block)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.keep(self, mask)
        return super().forward(tokens)


class Reading(Layer):
    def __init__(self, reads: Any) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.reads(self)


def masked_case(keep: Any, **reads: Any) -> Case:
    def micro_batch(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
        tokens = draw_tokens(generator, rows, length)
        return {"tokens": tokens, "mask": torch.rand(rows, length, 1, generator=generator, dtype=torch.float64)}

    return replace(of(lambda: Masked(keep, **reads)), micro_batch=micro_batch)


READ: dict[Any, Pattern] = {
    in_an_object: lambda model, x: through(model, x) * model.object.mask,
    in_one_made_at_first: lambda model, x: through(model, x) * model.made.mask,
    in_a_global: lambda model, x: through(model, x) * KEPT["mask"],
    in_a_global_with_others: lambda model, x: through(model, x) * KEPT["batch"]["mask"],
    in_a_list: lambda model, x: through(model, x) * model.kept.pop(),
    on_a_block: lambda model, x: through(model, x) * model.layers[1].mask[0, 0].item(),
}


@pytest.mark.parametrize("keep", READ, ids=lambda keep: keep.__name__)
def test_what_a_micro_batch_was_given_is_its_own_wherever_it_is_kept(keep: Any) -> None:
    assert_exact(masked_case(keep, reads=READ[keep]), orders=(vertical, horizontal, with_graphs))


def test_a_number_of_a_tensor_that_is_kept_is_read_of_the_micro_batchs() -> None:
    def read(model: Any, x: torch.Tensor) -> torch.Tensor:
        return through(model, x) * KEPT["mask"].sum().item()

    assert_exact(masked_case(in_a_global, reads=read), orders=(vertical,))


def test_a_block_finds_what_the_micro_batch_was_given_as_an_attribute_and_nowhere_else() -> None:
    assert_exact(masked_case(on_a_block, of_block=lambda block: block.mask), orders=(vertical, with_graphs))
    for read in (lambda _: KEPT["mask"], lambda _: KEPT["mask"][0, 0].item()):
        case = masked_case(in_a_global, of_block=read)
        with pytest.raises(ModelError, match=r"'layers.1' reads a tensor of shape .* that is none of its arguments"):
            assert_exact(case, orders=(vertical,))


class Handed(Layer):
    def forward(self, x: torch.Tensor, context: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * (context["mask"] if isinstance(context, dict) else context.mask)


class Handing(Masked):
    """Hands its blocks something of its own that is there for all micro-batches, or that it makes anew."""

    def __init__(self, keep: Any) -> None:
        super().__init__(keep, reads=lambda model, x: model.through(x))
        self.layers = nn.ModuleList(Handed() for _ in self.layers)
        self.entries: dict[str, torch.Tensor] = {}

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.handed)
        return x


class HandedNumbers(Layer):
    def forward(self, x: torch.Tensor, context: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * context.mask[0, 0].tolist()[0]


class Context:
    __slots__ = ("mask",)
    mask: torch.Tensor


@dataclass(slots=True)
class Record:
    mask: torch.Tensor


def in_an_object_of_ours(model: Any, mask: torch.Tensor) -> None:
    model.handed = model.object
    model.handed.mask = mask


def in_a_new_object(model: Any, mask: torch.Tensor) -> None:
    model.handed = types.SimpleNamespace(mask=mask)


def in_a_dict_of_ours(model: Any, mask: torch.Tensor) -> None:
    model.handed = model.entries
    model.handed["mask"] = mask


def in_slots(model: Any, mask: torch.Tensor) -> None:
    if not isinstance(model.object, Context):
        model.object = Context()
    in_an_object_of_ours(model, mask)


def in_a_record_with_slots(model: Any, mask: torch.Tensor) -> None:
    if not isinstance(model.object, Record):
        model.object = Record(mask)
    in_an_object_of_ours(model, mask)


def computed(model: Any, mask: torch.Tensor) -> None:
    in_an_object_of_ours(model, mask + mask.square())


@pytest.mark.parametrize(
    "keep",
    [in_an_object_of_ours, in_a_new_object, in_a_dict_of_ours, in_slots, in_a_record_with_slots, computed],
    ids=lambda keep: keep.__name__,
)
def test_what_blocks_are_handed_holds_what_is_the_micro_batchs(keep: Any) -> None:
    case = replace(masked_case(keep), build=of(lambda: Handing(keep)).build)
    assert_exact(case, orders=(vertical, horizontal, with_graphs))


def test_what_blocks_read_without_any_op_is_the_micro_batchs() -> None:
    def build() -> nn.Module:
        model = Handing(in_an_object_of_ours)
        model.layers = nn.ModuleList(HandedNumbers() for _ in model.layers)
        return model

    assert_exact(replace(masked_case(in_an_object_of_ours), build=of(build).build), orders=(vertical, with_graphs))


def test_what_blocks_are_handed_may_change_between_them() -> None:
    class Changing(Handing):
        def through(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                self.handed.mask = self.handed.mask.square() + x.detach().mean()
                x = layer(x, self.handed)
            return x

    case = replace(masked_case(in_an_object_of_ours), build=of(lambda: Changing(in_an_object_of_ours)).build)
    assert_exact(case, orders=(vertical, horizontal, with_graphs))


@dataclass
class Place:
    index: int = 0


class Indexed(Layer):
    def forward(self, x: torch.Tensor, place: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * (1 + (place["index"] if isinstance(place, dict) else place.index))


def each_its_own(model: Any) -> Any:
    return Place()


def the_same_for_all(model: Any) -> Any:
    return model.object


def a_dict(model: Any) -> Any:
    return model.entries


@pytest.mark.parametrize("number", ["of the layer", "of the data"])
@pytest.mark.parametrize("place", [each_its_own, the_same_for_all, a_dict], ids=lambda place: place.__name__)
def test_blocks_are_handed_a_number_in_an_object(place: Any, number: str) -> None:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        handed = place(model)
        for i, layer in enumerate(model.layers):
            index = i if number == "of the layer" else float(x.detach().mean())
            handed.update(index=index) if isinstance(handed, dict) else setattr(handed, "index", index)
            x = layer(x, handed)
        return x

    def build() -> nn.Module:
        model = Keeping(run)
        model.layers, model.entries = nn.ModuleList(Indexed() for _ in model.layers), dict[str, Any]()
        return model

    assert_exact(of(build), orders=(vertical, horizontal, with_graphs))


def test_a_log_within_what_blocks_are_handed_loses_nothing() -> None:
    def keep(model: Any, mask: torch.Tensor) -> None:
        in_an_object_of_ours(model, mask)
        vars(model.object).setdefault("log", []).append(mask.mean())

    case = replace(masked_case(keep), build=of(lambda: Handing(keep)).build)
    _, bench = assert_exact(case, orders=(vertical,))
    assert len(bench.tape.model.object.log) == len(WEIGHTS), "without the probe's"
