"""Buffers of a model that are out of the ordinary: the numbers of a plain loop, or a refusal that says what to do."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import MiniMaxConfig, MiniMaxForCausalLM

import penstock
from penstock.errors import ModelError
from tests.models import Case, causal_lm
from tests.stacks import WIDTH, Layer, Stack, of, stack
from tests.sweep.configs import tiny
from tests.training import MicroBatches, budget, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

SGD = penstock.SGD(lr=0.1)
STEPS = steps_of(stack(), 3)


def plain(model: nn.Module, clip: float, steps: Sequence[MicroBatches] = STEPS) -> tuple[list[float], nn.Module]:
    """Losses of a plain loop over ``steps``, and the model as it ends."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for micro_batches in steps:
        optimizer.zero_grad()
        each = []
        for micro_batch in micro_batches:
            loss = model(**micro_batch) / len(micro_batches)
            loss.backward()
            each.append(float(loss.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(sum(each))
    return losses, model


def assert_plain(
    build: Callable[[], nn.Module],
    where: penstock.Budget,
    clip: float = 100,
    steps: Sequence[MicroBatches] = STEPS,
    **settings: Any,
) -> None:
    case = of(build)
    wanted, model = plain(case.model(), clip, steps)
    with wrap(case, where, optimizer=SGD, clip_grad_norm=clip, plan=None, **settings) as engine:
        assert [engine.step(s).loss for s in steps] == pytest.approx(wanted, rel=1e-6)
        found = engine.values().buffers
        assert all(torch.allclose(found[name], buffer) for name, buffer in model.named_buffers() if name in found)


def refused(build: Callable[[], nn.Module], where: penstock.Budget, **settings: Any) -> str:
    def train() -> None:
        with wrap(of(build), where, optimizer=SGD, plan=None, **settings) as engine:
            for micro_batches in STEPS:
                engine.step(micro_batches)

    with pytest.raises(ModelError) as caught:
        train()
    return str(caught.value)


# -- what passes from one micro-batch to the next -------------------------------------------------------------------


class Normed(Layer):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norm is None else norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x.flatten(0, 1)).view(x.shape))


def mean_behind(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + model.mean
    for layer in model.layers:
        x = layer(x)
    if model.training:
        model.mean.mul_(0.5).add_(x.detach().mean((0, 1)))
    return x


def replaced_behind(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + model.mean
    for layer in model.layers:
        x = layer(x)
    model.mean = 0.5 * model.mean + x.detach().mean((0, 1))
    return x


def counted_behind(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * (1 + 0.1 * model.count)
    for layer in model.layers:
        x = layer(x)
    model.count += 1
    return x


def counted_anew(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.count = model.count + 1
    for layer in model.layers:
        x = layer(x)
    return x * (1 + 0.1 * model.count)


def twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in (*model.layers, model.layers[0]):
        x = layer(x)
    return x


def around(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = model.norm(x.flatten(0, 1)).view(x.shape)
    for layer in model.layers:
        x = layer(x)
    return model.norm(x.flatten(0, 1)).view(x.shape)  # type: ignore[no-any-return]


def shared_norm() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    model = Stack()
    model.layers = nn.ModuleList(Normed(norm) for _ in range(3))
    return model


def with_mean(run: Any) -> nn.Module:
    model = Stack(run=run)
    model.register_buffer("mean", torch.zeros(WIDTH))
    model.register_buffer("count", torch.zeros((), dtype=torch.long))
    return model


def drawn_around(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + torch.randn(WIDTH, generator=model.generator)
    for layer in model.layers:
        x = layer(x)
    return x + torch.randn(WIDTH, generator=model.generator)


def with_generator() -> nn.Module:
    model: Any = Stack(run=drawn_around)
    model.generator = torch.Generator().manual_seed(3)
    return model  # type: ignore[no-any-return]


def with_numpys_generator() -> nn.Module:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + model.generator.standard_normal()
        for layer in model.layers:
            x = layer(x)
        return x + model.generator.standard_normal()

    model: Any = Stack(run=run)
    model.generator = np.random.default_rng(3)
    return model  # type: ignore[no-any-return]


def with_norm() -> nn.Module:
    model = Stack(run=around)
    model.norm = nn.BatchNorm1d(WIDTH)
    return model


CARRIED: dict[str, Callable[[], nn.Module]] = {
    "written behind the blocks": lambda: with_mean(mean_behind),
    "replaced behind the blocks": lambda: with_mean(replaced_behind),
    "counted behind the blocks": lambda: with_mean(counted_behind),
    "counted anew before the blocks, and read behind them": lambda: with_mean(counted_anew),
    "a block called twice": lambda: Stack(Normed, twice),
    "a norm of several blocks": shared_norm,
    "a norm before the blocks and behind them": with_norm,
    "a generator before the blocks and behind them": with_generator,
    "one of numpy's before the blocks and behind them": with_numpys_generator,
}


@pytest.mark.parametrize("build", CARRIED.values(), ids=CARRIED.keys())
def test_what_passes_to_the_next_micro_batch_through_several_stages_goes_horizontally(
    build: Callable[[], nn.Module],
) -> None:
    """Block by block, a stage would find there what another micro-batch has left in another stage."""
    message = refused(build, budget(None))
    assert "passes from one micro-batch to the next through several stages" in message
    assert "schedule='horizontal'" in message
    assert_plain(build, budget(None), schedule="horizontal")
    with wrap(of(build), budget(None), optimizer=SGD, plan=None) as engine:
        engine.step(STEPS[0][:1])


class Rows(Layer):
    """Keeps statistics in a row of a buffer that all blocks have, and counts calls in a number of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.row = 0
        self.shared: Any = nn.Module()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.shared.get_buffer("rows")[self.row].mul_(0.9).add_(x.detach().mean((0, 1)))
        self.shared.get_buffer("calls").add_(1)
        return x


def with_rows(layer: type[Rows] = Rows) -> nn.Module:
    model, shared = Stack(layer), nn.Module()
    shared.register_buffer("rows", torch.zeros(3, WIDTH))
    shared.register_buffer("calls", torch.zeros((), dtype=torch.long))
    for row, layer in enumerate(model.layers):
        layer.row, layer.shared = row, shared
    return model


class Adds(Rows):
    """Adds to what all blocks keep, and reads it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.shared.get_buffer("rows")[0]
        kept.add_(x.detach().mean((0, 1)))
        return super(Rows, self).forward(x) + kept


def running_sum(model: Any, x: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros(())
    for layer in model.layers:
        layer.kept = kept
        x = layer(x)
    return x + kept


class AddsToSum(Layer):
    kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.add_(x.mean())
        return super().forward(x)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: with_rows(Adds), "block 'layers.1' reads a tensor .* that block 'layers.0' has written to before"),
        (lambda: Stack(AddsToSum, running_sum), "block 'layers.1' reads a tensor .* that is none of its arguments"),
    ],
    ids=["a buffer", "a tensor of this forward"],
)
def test_what_blocks_add_to_and_others_read_is_handed_on_beside_them(
    build: Callable[[], nn.Module], message: str
) -> None:
    assert re.match(message, refused(build, budget(None), schedule="horizontal"))


def left_and_looked_up(model: Any, x: torch.Tensor) -> torch.Tensor:
    """What nothing reads may be left anywhere, and a table that is as for any other micro-batch read everywhere."""
    model.count += 1
    model.mean = x.detach().mean((0, 1))
    table = model.table[: x.shape[1]]
    table.copy_(torch.arange(x.shape[1]).unsqueeze(1).cos().expand(-1, WIDTH))
    x = x + table
    for layer in model.layers:
        x = layer(x)
    return x + model.table[: x.shape[1]]


def with_table() -> nn.Module:
    model = with_mean(left_and_looked_up)
    model.register_buffer("table", torch.zeros(16, WIDTH), persistent=False)
    return model


def cast_and_grown(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Tables that are made to fit the first micro-batch that asks for it."""
    model.table, length = model.table.to(x), x.shape[1]
    if len(model.rows) < length:
        model.rows = torch.cat([model.rows, torch.arange(len(model.rows), length).to(x).sin()])
    for layer in model.layers:
        x = layer(x) + model.rows[:length, None] * model.table
    return x


def with_tables() -> nn.Module:
    model: Any = Stack(run=cast_and_grown)
    model.table, model.rows = torch.linspace(0, 1, WIDTH, dtype=torch.float64), torch.zeros(1)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "build",
    [lambda: Stack(Normed), with_rows, with_table, with_tables],
    ids=["norms", "rows of one buffer", "a table", "tables that are made to fit"],
)
def test_what_one_stage_alone_keeps_goes_block_by_block(build: Callable[[], nn.Module]) -> None:
    assert_plain(build, budget(None))


class Smooths(Layer):
    """Keeps of its first call what the graph of that has saved, and changes it in the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(super().forward(x))
        if self.kept is None:
            self.kept = [y.detach()]
        else:
            self.kept[0].mul_(0.5)
        return x + y * y


def test_what_a_block_keeps_of_a_call_may_be_changed_before_its_backward() -> None:
    """With weights on the device, too, where autograd by itself would end the step."""
    assert_plain(lambda: Stack(Smooths), budget(None))


# -- their place in commits and in memory ---------------------------------------------------------------------------


class Grows(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, self.seen.new_ones(1)])
        return super().forward(x) + self.seen.mean()


class Widens(Layer):
    """Has another dtype once it has seen a long micro-batch, after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, None
        self.register_buffer("wide", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.wide = (self.wide + 1).to(torch.float64 if x.shape[1] > 12 else self.wide.dtype)
        return super().forward(x)


def test_persistent_buffers_keep_their_shape_and_dtype(tmp_path: Path) -> None:
    """A commit has the place that they had before: a run went on with other bytes, or without those that were new."""
    assert "'layers.0.seen' is (2,) of torch.float32 before a forward, and (3,)" in refused(
        lambda: Stack(Grows), budget(tmp_path / "grows")
    )


def test_one_that_changes_them_later_on_is_refused_then(tmp_path: Path) -> None:
    case = stack(Widens)
    longer = steps_of(case, 1, first=9, lengths=(14, 8, 10))[0]
    with wrap(case, budget(tmp_path), optimizer=SGD, plan=None) as engine:
        engine.step(STEPS[0])
        with pytest.raises(ModelError, match=r"'layers\.0\.wide' is \(2,\) of torch\.float32 before a forward"):
            engine.step(longer)
        assert engine.step_count == 1
        engine.step(STEPS[1])


class Held(Layer):
    """Has a buffer of a kind. ``persistent``: it is part of the state."""

    def __init__(self, buffer: torch.Tensor, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("held", buffer, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.1 * self.get_buffer("held").to_dense()[0].sum()


def holding(make: Callable[[], torch.Tensor], *, persistent: bool = True) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Stack()
        model.layers = nn.ModuleList(Held(make(), persistent=persistent) for _ in range(3))
        return model

    return build


@pytest.mark.parametrize("persistent", [True, False])
def test_elements_of_a_buffer_may_lie_in_one_memory(tmp_path: Path, persistent: bool) -> None:
    build = holding(lambda: torch.ones(1, 3).expand(4, 3), persistent=persistent)
    assert_plain(build, budget(tmp_path))
    with wrap(of(build), budget(tmp_path), optimizer=SGD, plan=None) as engine:
        assert engine.step_count == len(STEPS)
        engine.step(STEPS[0])


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_buffers_are_no_state(tmp_path: Path, layout: str) -> None:
    def made() -> torch.Tensor:
        return getattr(torch.eye(3), layout)()  # type: ignore[no-any-return]

    assert "buffer 'layers.0.held' is sparse or nested" in refused(holding(made), budget(tmp_path / "refused"))
    assert_plain(holding(made, persistent=False), budget(tmp_path / "trained"))


def noisy(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + torch.randn(x.shape, generator=model.generator)
    for layer in model.layers:
        x = layer(x)
    return x


def with_generator() -> nn.Module:
    model = Stack(run=noisy)
    model.generator = torch.Generator().manual_seed(0)
    return model


@pytest.mark.parametrize("speculate", [True, False])
def test_a_models_own_generator_draws_once_for_each_micro_batch(tmp_path: Path, speculate: bool) -> None:
    """Not in the probe, and not again in a step that is run twice, as all are that speculate here."""
    assert_plain(with_generator, budget(tmp_path), clip=0.01, speculate=speculate)


def test_saved_tables_of_transformers_models_go_on_in_the_dtype_that_they_compute_in(tmp_path: Path) -> None:
    """A wrap that fails leaves them as they are."""
    case = Case(build=lambda: MiniMaxForCausalLM(tiny(MiniMaxConfig)), micro_batch=causal_lm, blocks=3)
    micro_batches = case.micro_batches(1)
    model = case.model()
    with pytest.raises(penstock.BudgetError):
        wrap(case, penstock.Budget(device="1KiB", host="1KiB"), model=model, precision="bf16", plan=None)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    for step in range(2):
        with wrap(case, budget(tmp_path), optimizer=SGD, precision="bf16", plan=None) as engine:
            assert engine.step_count == step
            assert {buffer.dtype for buffer in engine.values().buffers.values()} == {torch.bfloat16}
            engine.step(micro_batches)


class Table(Layer):
    """Multiplies by a table that stays in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.get_buffer("table"))


def test_a_table_in_fp32_beside_weights_in_16_bits_is_an_error_that_names_its_module(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = Stack()
        model.layers[1] = Table()
        return model

    said = refused(build, budget(None), precision="bf16")
    assert said.startswith("module 'layers.1' (Table) does not compute in bf16")
    assert "precision='fp32'" in said
    assert_plain(build, budget(None))


def test_an_error_about_whole_numbers_is_torchs() -> None:
    """Ids that are no whole numbers are wrong in any precision."""
    micro_batches = [{key: value.float() for key, value in mb.items()} for mb in STEPS[0]]
    with (
        wrap(of(Stack), budget(None), optimizer=SGD, precision="bf16", plan=None) as engine,
        pytest.raises(RuntimeError, match="Long, Int"),
    ):
        engine.step(micro_batches)
