"""What a model's own code changes in lists, dicts, objects and variables: the numbers of a plain loop, or a refusal."""

import functools
import types
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from tests.engine.test_buffers import SGD, STEPS, assert_plain, plain, refused
from tests.stacks import Layer, Stack, of, stack
from tests.training import budget, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

Run = Callable[[Any, torch.Tensor], torch.Tensor]

KEPT: dict[str, Any] = {}
LAST: Any = None
COUNT = 0


class Counts:
    calls: ClassVar[int] = 0


class Slotted:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0.0


def through(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def building(run: Run, layer: type[nn.Module] = Layer) -> Callable[[], nn.Module]:
    """Models that keep things of each kind, and find all of it as it was at first."""

    def build() -> nn.Module:
        global LAST, COUNT
        model: Any = Stack(layer, run)
        model.memory, model.recent, model.numbers = [], deque(maxlen=2), [0]
        model.stats, model.config = {"m": 0.0, "n": 0}, types.SimpleNamespace(scale=1.0, index=0)
        model.slotted, LAST, COUNT, Counts.calls = Slotted(), None, 0, 0
        KEPT.clear()
        for own in model.layers:
            vars(own)["shared"] = model.config
        cells = variable()
        model.read, model.write = cells
        return model  # type: ignore[no-any-return]

    return build


def variable() -> tuple[Callable[[], float], Callable[[float], None]]:
    number = 0.0

    def read() -> float:
        return number

    def write(value: float) -> None:
        nonlocal number
        number = value

    return read, write


# -- what goes on to the next micro-batch ----------------------------------------------------------------------------


def a_memory(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x + sum(model.memory))
    model.memory.append(x.detach().mean())
    return x


def a_memory_of_numbers(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x + sum(model.memory))
    model.memory.append(float(x.detach().mean()))
    return x


def the_most_recent(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x + sum(model.recent))
    model.recent.append(x.detach().mean())
    return x


def an_entry(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x + model.stats["m"])
    model.stats["m"] = x.detach().mean()
    return x


def an_entry_of_a_global(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x + KEPT.get("m", 0.0))
    KEPT.update(m=x.detach().mean())
    return x


def a_count_in_a_list(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x * (1 + 0.1 * model.numbers[0]))
    model.numbers[0] += 1
    return x


def a_number_of_an_object(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x * model.config.scale)
    model.config.scale = 1 + 0.1 * float(x.detach().mean())
    return x


def a_number_in_a_slot(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x * (1 + model.slotted.number))
    model.slotted.number = 0.1 * float(x.detach().mean())
    return x


def a_count_of_a_class(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x * (1 + 0.1 * Counts.calls))
    Counts.calls += 1
    return x


def a_count_of_a_module(model: Any, x: torch.Tensor) -> torch.Tensor:
    global COUNT
    x = through(model, x * (1 + 0.1 * COUNT))
    COUNT += 1
    return x


def a_variable_of_functions(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x * (1 + model.read()))
    model.write(0.1 * float(x.detach().mean()))
    return x


def counted_before_and_behind(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.stats["n"] += 1
    x = through(model, x * (1 + 0.1 * model.stats["n"]))
    model.stats["n"] += 1
    return x


def read_behind(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Before the blocks a number is taken that is used behind them."""
    factor = 1 + 0.1 * model.stats["n"]
    x = through(model, x) * factor
    model.stats["n"] += 1
    return x


GO_ON: tuple[Run, ...] = (
    *(a_memory, a_memory_of_numbers, the_most_recent, an_entry, an_entry_of_a_global, a_count_in_a_list),
    *(a_number_of_an_object, a_number_in_a_slot, a_count_of_a_class, a_count_of_a_module, a_variable_of_functions),
    *(counted_before_and_behind, read_behind),
)


@pytest.mark.parametrize("run", GO_ON, ids=lambda run: run.__name__)
def test_what_one_stage_reads_and_a_later_one_changes_in_place_goes_horizontally(run: Run) -> None:
    build = building(run)
    message = refused(build, budget(None))
    assert "passes from one micro-batch to the next through several stages of the model (the model itself)" in message
    assert_plain(build, budget(None), schedule="horizontal")


def test_the_refusal_names_the_place() -> None:
    for run, name in ((a_memory, "memory"), (an_entry, "stats.m"), (a_number_of_an_object, "config.scale")):
        assert f"what is in {name!r} passes on" in refused(building(run), budget(None)).replace(
            "passes from", "passes on"
        )


# -- what is a micro-batch's own -------------------------------------------------------------------------------------


class Told(Layer):
    """Reads numbers that its model's code has put into an object, a dict, a class and a variable of the module."""

    shared: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        told = self.shared.scale + self.shared.index + Counts.calls + COUNT + KEPT.get("layer", 0)
        return super().forward(x * (1 + 0.1 * told))


class Telling(Told):
    """Tells the next one a number that follows from the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.shared.scale = float(x.detach().mean())
        return x


def told_by_an_object(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.config.scale = float(x.detach().mean())
    return through(model, x)


def told_by_a_class(model: Any, x: torch.Tensor) -> torch.Tensor:
    Counts.calls = x.shape[1]
    return through(model, x)


def told_by_a_module(model: Any, x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT = float(x.detach().mean())  # type: ignore[assignment]
    return through(model, x)


def numbered(model: Any, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(model.layers):
        KEPT["layer"] = i
        x = layer(x)
    return x


def numbered_from_zero(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.config.index = 0
    for layer in model.layers:
        x = layer(x)
        model.config.index += 1
    return x


def ends_as_begun(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.config.index += 2
    x = through(model, x)
    model.config.index -= 2
    return x


def told_by_the_data_between(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.config.scale = 0.5
    for layer in model.layers:
        x = layer(x)
        model.config.scale = float(x.detach().mean())
    return x


def told_by_blocks(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.config.scale = 0.5
    return through(model, x)


def read_behind_from_a_list(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.numbers[0] = float(x.detach().mean())
    return through(model, x) * model.numbers[0]


def read_behind_from_a_log(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.memory.append(float(x.detach().mean()))
    return through(model, x) * sum(model.memory)


def read_behind_from_a_list_of_its_own(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.memory.clear()
    for layer in model.layers:
        model.memory.append(float(x.detach().mean()))
        x = layer(x)
    return x * (1 + sum(model.memory))


def read_behind_from_a_variable(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.write(float(x.detach().mean()))
    return through(model, x) * (1 + model.read())


def counted_at_once(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.numbers[0] += 1
    return through(model, x * (1 + 0.1 * model.numbers[0]))


def counted_at_once_for_all(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.config.index += 1
    return through(model, x) * (1 + 0.1 * model.config.index)


def remembered_behind(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = through(model, x)
    model.memory.append(x.detach().mean())
    return x + sum(model.memory)


OWN: dict[Run, type[nn.Module]] = {
    **dict.fromkeys((told_by_an_object, told_by_a_class, told_by_a_module, numbered, numbered_from_zero), Told),
    **dict.fromkeys((ends_as_begun, told_by_the_data_between, counted_at_once_for_all), Told),
    told_by_blocks: Telling,
    **dict.fromkeys((read_behind_from_a_list, read_behind_from_a_log, read_behind_from_a_variable), Layer),
    **dict.fromkeys((read_behind_from_a_list_of_its_own, counted_at_once, remembered_behind), Layer),
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("run", OWN, ids=lambda run: run.__name__)
def test_what_later_stages_read_is_each_micro_batch_s_own(run: Run, recompute: bool) -> None:
    assert_plain(building(run, OWN[run]), budget(None), clip=0.01, recompute=recompute)


def told_by_the_length(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.config.scale = 2.0 if x.shape[1] > 4 else 1.0
    return through(model, x)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_place_that_has_its_value_already_as_a_shape_is_probed_is_each_micro_batch_s_own(recompute: bool) -> None:
    """The shape of sixteen tokens finds what that of eight has left: a change that its own probe cannot see."""
    steps = [steps_of(stack(), 1, lengths=lengths)[0] for lengths in ((4, 4), (8, 8), (16, 16), (4, 16), (16, 4))]
    build = building(told_by_the_length, Told)
    assert_plain(build, budget(None), clip=0.01, steps=steps, recompute=recompute)


# -- what nothing depends on -----------------------------------------------------------------------------------------


def logged(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Counts and logs at each stage, for whoever looks between steps."""
    global COUNT
    for layer in model.layers:
        model.memory.append(float(x.detach().mean()))
        model.stats["n"] += 1
        KEPT.setdefault("log", []).append(x.shape[1])
        x = layer(x)
    model.stats["m"] = float(x.detach().mean())
    model.numbers[0] += 1
    model.config.index += 1
    Counts.calls += 1
    COUNT += 1
    return x


@functools.cache
def table_of(length: int) -> torch.Tensor:
    return torch.linspace(0, 1, length).unsqueeze(-1)


def with_tables(model: Any, x: torch.Tensor) -> torch.Tensor:
    length = x.shape[1]
    if length not in model.stats:
        model.stats[length] = torch.linspace(0, 1, length).unsqueeze(-1)
    x = through(model, x + model.stats[length] + table_of(length))
    if "behind" not in KEPT:
        KEPT["behind"] = torch.ones(1)
    return x * KEPT["behind"]


def marked(model: Any, x: torch.Tensor) -> torch.Tensor:
    if "seen" not in KEPT:
        x = x + 0
    x = through(model, x)
    KEPT["seen"] = True
    return x


@pytest.mark.parametrize("run", [logged, with_tables, marked], ids=lambda run: run.__name__)
def test_logs_counts_tables_and_marks_go_block_by_block(run: Run) -> None:
    assert_plain(building(run), budget(None))


def test_logs_and_counts_are_those_of_a_plain_loop() -> None:
    build = building(logged)
    _, looped = plain(of(build).model(), 100)
    wanted: Any = looped
    figures = [wanted.memory, wanted.stats["n"], wanted.numbers, wanted.config.index, Counts.calls, COUNT, KEPT["log"]]
    model: Any = of(build).model()
    with wrap(of(build), budget(None), model=model, optimizer=SGD, plan=None) as engine:
        for micro_batches in STEPS:
            engine.step(micro_batches)
    found = [model.memory, model.stats["n"], model.numbers, model.config.index, Counts.calls, COUNT, KEPT["log"]]
    assert sorted(found[0]) == pytest.approx(sorted(figures[0]), rel=1e-5)
    assert found[1:-1] == figures[1:-1]
    assert sorted(found[-1]) == sorted(figures[-1])
