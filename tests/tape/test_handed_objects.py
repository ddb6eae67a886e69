"""Objects, dicts and lists that blocks are handed: what is in them is each micro-batch's own."""

import contextvars
import functools
import gc
import types
import weakref
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from penstock.tape.holders import places_handed
from tests.models import Case, MicroBatch, draw_tokens
from tests.stacks import WEIGHTS, WIDTH, Layer, Stack, assert_exact, of, unequal
from tests.tape_reference import Bench, horizontal, vertical, with_graphs

pytestmark = pytest.mark.usefixtures("one_thread")

ORDERS = (vertical, horizontal, with_graphs)
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE")

Block = Callable[[torch.Tensor, Any], torch.Tensor]


class Told(Layer):
    """Does what it is told to with what it is handed."""

    told: Block

    def forward(self, x: torch.Tensor, *handed: Any) -> torch.Tensor:  # type: ignore[override]
        return self.told(super().forward(x), *handed)


class Model(Stack):
    """Keeps something, into which each forward puts a mask by ``keep``, and hands it to ``block`` as ``hand`` says.
    ``between``: with a product of the model's own behind each block; ``behind``: what it does behind all."""

    def __init__(
        self,
        kept: Callable[[], Any],
        keep: Callable[[Any, torch.Tensor], Any],
        block: Block,
        *,
        hand: Callable[[Any], Any] = lambda kept: kept,
        layers: tuple[int, ...] = (0, 1, 2),
        between: bool = False,
        behind: Block = lambda x, kept: x,
    ) -> None:
        super().__init__(Told)
        for layer in self.layers:
            layer.told = block  # type: ignore[assignment]
        self.kept, self.keep, self.hand, self.told_layers, self.behind = kept(), keep, hand, layers, behind
        self.norm = nn.Linear(WIDTH, WIDTH) if between else nn.Identity()

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.keep(self.kept, mask)
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = self.norm(layer(x, self.hand(self.kept) if index in self.told_layers else None))
        x = self.behind(x, self.kept)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def case(*model: Any, **options: Any) -> Case:
    def micro_batch(generator: torch.Generator, rows: int, length: int) -> MicroBatch:
        tokens = draw_tokens(generator, rows, length)
        return {"tokens": tokens, "mask": torch.rand(rows, length, 1, generator=generator, dtype=torch.float64)}

    return replace(of(lambda: Model(*model, **options)), micro_batch=micro_batch)


class Context:
    mask: torch.Tensor
    number = 0.0

    def get(self) -> torch.Tensor:
        return self.mask


def set_mask(kept: Any, mask: torch.Tensor) -> None:
    kept.mask = mask


def set_number(kept: Any, mask: torch.Tensor) -> None:
    kept.number = float(mask.mean())


def times_mask(x: torch.Tensor, handed: Any) -> torch.Tensor:
    return x if handed is None else x * handed.mask


def times_number(x: torch.Tensor, handed: Any) -> torch.Tensor:
    return x if handed is None else x * handed.number


@pytest.mark.sampled(4, pairs=True)
@pytest.mark.parametrize(("keep", "block"), [(set_mask, times_mask), (set_number, times_number)])
@pytest.mark.parametrize("layers", [(2,), (0, 2)])
@pytest.mark.parametrize("between", [False, True])
def test_only_some_blocks_are_handed_it(keep: Any, block: Block, layers: tuple[int, ...], between: bool) -> None:
    assert_exact(case(Context, keep, block, layers=layers, between=between), orders=ORDERS)


def test_a_list_in_a_tuple_that_the_last_block_alone_is_handed() -> None:
    def keep(kept: Any, mask: torch.Tensor) -> None:
        kept[0][0], kept[1]["mask"] = float(mask.mean()), mask

    def block(x: torch.Tensor, handed: Any) -> torch.Tensor:
        return x if handed is None else x * handed[0][0] * handed[1]["mask"]

    assert_exact(case(lambda: ([0.0], {}), keep, block, layers=(2,), behind=block), orders=ORDERS)


def counting(x: torch.Tensor, handed: Any) -> torch.Tensor:
    """Goes on with a number that earlier blocks have left."""
    handed.number, before = handed.number + float(x.detach().mean()), handed.number
    return x * (1 + before)


def counting_in_a_dict(x: torch.Tensor, handed: Any) -> torch.Tensor:
    handed["number"], before = handed["number"] + float(x.detach().mean()), handed["number"]
    return x * (1 + before)


def filling(x: torch.Tensor, handed: Any) -> torch.Tensor:
    return x * handed.setdefault("first", float(x.detach().mean()))


def filling_with_a_tensor(x: torch.Tensor, handed: Any) -> torch.Tensor:
    return x * handed.setdefault("first", x.sin())


def appending(x: torch.Tensor, handed: Any) -> torch.Tensor:
    handed.append(float(x.detach().mean()))
    return x * sum(handed)


def making(x: torch.Tensor, handed: Any) -> torch.Tensor:
    if "made" not in vars(handed):
        handed.made = float(x.detach().mean())
    return x * handed.made


STATES: dict[str, tuple[Any, ...]] = {
    "a number": (Context, lambda c, m: setattr(c, "number", 0.0), counting, lambda x, c: x * c.number),
    "an entry": (dict, lambda c, m: c.update(number=0.0), counting_in_a_dict, lambda x, c: x * c["number"]),
    "a new entry": (dict, lambda c, m: c.clear(), filling, lambda x, c: x * c["first"]),
    "a new tensor": (dict, lambda c, m: c.clear(), filling_with_a_tensor, lambda x, c: x * c["first"]),
    "a list": (list, lambda c, m: c.clear(), appending, lambda x, c: x * sum(c)),
    "a new attribute": (Context, lambda c, m: vars(c).clear(), making, lambda x, c: x * c.made),
}


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_what_a_block_leaves_for_the_next_ones_and_the_model(state: str, between: bool) -> None:
    kept, keep, block, behind = STATES[state]
    assert_exact(case(kept, keep, block, between=between, behind=behind), orders=ORDERS)


class Pair(NamedTuple):
    context: Context
    entries: dict[str, Any]


class OwnDict(dict[str, Any]):
    mask: torch.Tensor


class OwnList(list[Any]):
    mask: torch.Tensor


class OwnTuple(tuple[Any, ...]):
    mask: torch.Tensor


def closure(kept: Any) -> Callable[[], torch.Tensor]:
    return lambda: kept.mask  # type: ignore[no-any-return]


def called(x: torch.Tensor, handed: Any) -> torch.Tensor:
    return x * handed()


@pytest.mark.parametrize(
    ("kept", "hand", "block"),
    [
        (Context, lambda kept: kept.get, called),
        (Context, lambda kept: functools.partial(getattr, kept, "mask"), called),
        (Context, closure, called),
        (Context, lambda kept: UserDict(a=[(kept,)]), lambda x, h: x * h["a"][0][0].mask),
        (OwnDict, lambda kept: kept, times_mask),
        (OwnList, lambda kept: kept, times_mask),
        (OwnTuple, lambda kept: kept, times_mask),
        (Context, VARIABLE.set, lambda x, _: x * VARIABLE.get().mask),
    ],
    ids=["method", "partial", "closure", "nested", "own dict", "own list", "own tuple", "context variable"],
)
def test_whatever_leads_to_it(kept: Any, hand: Any, block: Block) -> None:
    assert_exact(case(kept, set_mask, block, hand=hand), orders=ORDERS)


def test_a_named_tuple_of_an_object_and_a_dict() -> None:
    def keep(kept: Any, mask: torch.Tensor) -> None:
        kept.context.mask = kept.entries["mask"] = mask

    block = lambda x, h: x * h.context.mask * h.entries["mask"]  # noqa: E731
    assert_exact(case(lambda: Pair(Context(), {}), keep, block), orders=ORDERS)


@pytest.mark.parametrize("new", [False, True])
def test_an_output_of_transformers_to_which_blocks_add(new: bool) -> None:
    """Its entries are attributes, too, and it refuses to have any taken out."""

    def keep(kept: Any, mask: torch.Tensor) -> None:
        kept[0] = BaseModelOutput() if new else kept[0]
        kept[0]["last_hidden_state"] = mask

    def block(x: torch.Tensor, handed: Any) -> torch.Tensor:
        handed["hidden_states"] = (x.detach().mean(),)
        return x * handed.last_hidden_state

    behind = lambda x, kept: x * kept[0].hidden_states[0]  # noqa: E731
    outputs = case(lambda: [BaseModelOutput()], keep, block, hand=lambda kept: kept[0], behind=behind)
    assert_exact(outputs, orders=ORDERS)


@pytest.mark.parametrize("kept", [lambda: [0.0], lambda: deque([0.0], maxlen=1)], ids=["list", "deque"])
def test_a_number_in_a_list(kept: Any) -> None:
    def keep(kept: Any, mask: torch.Tensor) -> None:
        kept[0] = float(mask.mean())

    assert_exact(case(kept, keep, lambda x, h: x * h[0]), orders=ORDERS)


def test_a_list_in_a_new_object_that_the_model_adds_to_between_blocks() -> None:
    def hand(kept: Any) -> Any:
        kept.seen.append(float(len(kept.seen)))
        return kept

    def keep(kept: Any, mask: torch.Tensor) -> None:
        kept.seen = [float(mask.mean())]

    assert_exact(case(Context, keep, lambda x, h: x * sum(h.seen), hand=hand), orders=ORDERS)


def test_it_is_found_beside_large_tables() -> None:
    table = {i: [i] for i in range(3000)}
    block = lambda x, h: x * h[0].mask  # noqa: E731
    assert_exact(case(Context, set_mask, block, hand=lambda kept: (kept, table, [table] * 5)), orders=(vertical,))
    assert not places_handed([table]), "it is looked at in no call"


def test_a_log_of_numbers_loses_nothing() -> None:
    def keep(kept: Any, mask: torch.Tensor) -> None:
        kept.mask = mask
        kept.log.append(float(mask.mean()))

    def behind(x: torch.Tensor, kept: Any) -> torch.Tensor:
        kept.log.append(float(x.detach().mean()))
        return x

    kept = lambda: types.SimpleNamespace(log=[])  # noqa: E731
    _, bench = assert_exact(case(kept, keep, times_mask, behind=behind), orders=(vertical,))
    assert len(bench.tape.model.kept.log) == 2 * len(WEIGHTS), "without the probe's"


CURRENT = Context()


def current() -> Context:
    return CURRENT


@pytest.mark.parametrize("between", [False, True])
def test_an_object_that_only_functions_behind_the_models_own_know(between: bool) -> None:
    def keep(_: Any, mask: torch.Tensor) -> None:
        current().mask, current().number = mask, 0.0

    def block(x: torch.Tensor, handed: Any) -> torch.Tensor:
        return counting(x, handed) * handed.mask

    behind = lambda x, _: x * current().number  # noqa: E731
    assert_exact(case(Context, keep, block, hand=lambda _: current(), between=between, behind=behind), orders=ORDERS)


def test_what_is_made_anew_in_a_tuple_is_not_held_behind_the_probe() -> None:
    def hand(kept: Any) -> Any:
        kept.made = ({"mask": kept.mask},)
        return kept.made

    one = case(Context, set_mask, lambda x, h: x * h[0]["mask"], hand=hand)
    bench, micro_batch = Bench(one, one.model().double(), moving=True), unequal(one)[0]
    mask = weakref.ref(micro_batch["mask"])
    bench.probe(micro_batch)
    del bench.learned, micro_batch  # with what the calls were handed
    vars(bench.tape.model.kept).clear()
    gc.collect()
    assert mask() is None


def test_an_engine_that_it_refers_to_is_left_alone() -> None:
    tape = Bench(case(Context, set_mask, times_mask), case(Context, set_mask, times_mask).model().double()).tape
    found = places_handed([types.SimpleNamespace(engine=tape)])
    assert [place.of for place, _ in found] == [{"engine": tape}]
