"""Blocks by ``torch.compile``: one compilation for all that are alike, weights that move, the bits of any schedule."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ModelError
from penstock.tape import compiled
from tests import models
from tests.engine.test_zoo import ADAMW, ZOO, built
from tests.models import MicroBatch
from tests.training import budget, master_of, relative

pytestmark = pytest.mark.usefixtures("one_thread", "fresh")


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is compiled yet. Inductor's kernels have no vector instructions: to look for those of the processor, and
    to parse torch's headers for them, takes the C++ compiler far longer than the kernels. And they are compiled here:
    processes that compile beside would import torch, for a kernel or two.
    """
    from torch._inductor import config  # which takes a second

    torch._dynamo.reset()
    with config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False, "compile_threads": 1}):
        yield
    torch._dynamo.reset()


class Counted:
    """A backend of ``torch.compile`` that runs graphs as they are and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs = 0
        torch._dynamo.register_backend(self, name="penstock_test")  # type: ignore[arg-type]
        registry = torch._dynamo.backends.registry
        monkeypatch.setitem(registry._COMPILER_FNS, "penstock_test", self)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        self.graphs += 1
        return graph.forward


def micro_batches(lengths: Sequence[int], seed: int = 0) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    return [models.causal_lm(generator, 2, length) for length in lengths]


def run(
    model: nn.Module, where: Path, steps: Sequence[list[MicroBatch]], **settings: Any
) -> tuple[list[float], torch.Tensor]:
    common: dict[str, Any] = {"optimizer": penstock.AdamW(**ADAMW), "precision": "fp32", "device": "cpu"}
    with penstock.wrap(model, budget=budget(where), **common | settings) as engine:
        return [engine.step(step).loss for step in steps], master_of(engine)


def test_all_like_blocks_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and recomputation; once more for another shape, and for nothing else: not for a block, nor for weights
    that come back elsewhere, step by step. And it is near plain training."""
    count, steps = Counted(monkeypatch), [micro_batches((8, 8), seed) for seed in range(2)]
    losses, plain = run(built(ZOO["llama"]), tmp_path / "plain", steps)
    settings: dict[str, Any] = {"optimizer": penstock.AdamW(**ADAMW), "precision": "fp32", "device": "cpu"}
    where = budget(tmp_path / "compiled")
    with penstock.wrap(built(ZOO["llama"]), budget=where, compile="penstock_test", **settings) as engine:
        for step, loss in zip(steps, losses, strict=True):
            assert engine.step(step).loss == pytest.approx(loss, rel=1e-6)
            assert count.graphs == 2
        assert relative(master_of(engine), plain) <= 1e-6
        engine.step(micro_batches((8, 6)))
        assert count.graphs == 4
        engine.step(micro_batches((6, 8)))
        assert count.graphs == 4
        engine.evaluate(micro_batches((8,)))
        after = count.graphs
        engine.evaluate(micro_batches((8,), 1))
        assert count.graphs == after <= 5


class Gated(nn.Module):
    """A model with one kernel of inductor's, each of which takes the C++ compiler two seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.linear(x).chunk(2, -1)
        return x + nn.functional.silu(gate) * value


class Stack(nn.Module):
    """A model that is so small that it gets compiled fast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(models.VOCABULARY, 16)
        self.layers = nn.ModuleList(Gated() for _ in range(3))
        self.head = nn.Linear(16, models.VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


def test_compiled_training_is_training_in_any_order(tmp_path: Path) -> None:
    """By inductor: near plain training, and the same bits by both schedules and by the oracle."""
    steps = [micro_batches((8, 8, 8), seed) for seed in range(2)]
    losses, plain = run(Stack(), tmp_path / "plain", steps)
    ways: list[dict[str, Any]] = [{}, {"schedule": "horizontal", "overlap": False}]
    found = [run(Stack(), tmp_path / str(i), steps, compile=True, **way) for i, way in enumerate(ways)]
    assert found[0][0] == pytest.approx(losses, rel=1e-6)
    assert relative(found[0][1], plain) <= 1e-6
    assert found[1][0] == found[0][0]
    assert torch.equal(found[1][1], found[0][1])


@pytest.mark.campaign
def test_a_compiled_recomputation_repeats_its_dropout(tmp_path: Path) -> None:
    """Of a model that is linear in what dropout leaves, the loss tells the gradient: SGD has made it smaller by it."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x * self.scale, 0.5)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    model = Model()
    settings: dict[str, Any] = {"optimizer": penstock.SGD(lr=1.0), "precision": "fp32", "device": "cpu"}
    loss_fn = lambda model, micro_batch: model(micro_batch["x"])  # noqa: E731
    with penstock.wrap(
        model, budget=budget(tmp_path), loss_fn=loss_fn, clip_grad_norm=None, compile=True, **settings
    ) as engine:
        stats = engine.step([{"x": torch.ones(1, 64)}])
        # With every scale at one, the gradient of each scale is what its element adds to the loss.
        for _, value in engine.master_parameters():
            assert float((1.0 - value).sum()) == pytest.approx(stats.loss)
            assert 0 < int((value == 1.0).sum()) < 64


class Printing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y if float(y.detach().sum()) > 1e9 else y + 1


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Printing() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_block_that_cannot_be_compiled_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"compile: block 'layers.0' cannot be compiled as a whole") as caught:
        run(
            Broken(),
            tmp_path,
            [[{"x": torch.ones(2, 8)}]],
            loss_fn=lambda model, micro_batch: model(micro_batch["x"]),
            compile="eager",
        )
    assert "leave compile out" in str(caught.value)


def test_too_many_shapes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LIMIT", 4)
    with pytest.raises(ModelError, match="have been compiled 4 times, and are asked for once more") as caught:
        run(Stack(), tmp_path, [micro_batches((4, 5, 6, 7, 8))], compile="eager")
    assert "few shapes" in str(caught.value)
