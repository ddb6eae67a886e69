"""What a model's own forward does around its blocks: each is as in a plain loop, or refused in words.

``EXACT``: three micro-batches of unequal length give the gradients of a plain loop, of the same parameters, in both
orders. ``REFUSED``: a ModelError that says so.
"""

import copy
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from penstock.compat.torch import attention_priority, is_multithreading_enabled
from penstock.tape.dry import build_on_meta, dry_run
from tests.models import VOCABULARY
from tests.stacks import WIDTH, Layer, Run, Stack, assert_exact, assert_same_gradients, of, refused, stack
from tests.tape_reference import Bench, Gradients, horizontal, in_two_parts, vertical, with_graphs
from tests.training import budget, master_of, plain_loop, relative, run_steps, steps_of, torch_adamw, wrap

pytestmark = pytest.mark.usefixtures("one_thread")


def through(wrapped: Callable[[int, torch.Tensor], Any]) -> Run:
    """A forward that calls each layer within ``wrapped(index of the layer, x)``."""

    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(model.layers):
            with wrapped(i, x):
                x = layer(x)
        return x

    return run


# -- the mode that a block is called in ---------------------------------------------------------------------------


class OwnGrad(Layer):
    """Switches gradients on by itself, whatever it is called in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return super().forward(x)


class HalfGrad(Layer):
    """Returns what has a gradient and what has none."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            scale = self.linear(x).square().mean(-1, keepdim=True)
        return super().forward(x), scale


def run_twice(model: Stack, x: torch.Tensor) -> torch.Tensor:
    """Self-conditioning: the blocks once without gradients, and once with them."""
    with torch.no_grad():
        hint = x
        for layer in model.layers:
            hint = layer(hint)
    for layer in model.layers:
        x = layer(x + 0.5 * hint)
    return x


def run_half(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        y, scale = layer(x)
        x = y * (1 + scale)
    return x


def run_momentum(model: Stack, x: torch.Tensor) -> torch.Tensor:
    """A block that runs without gradients may change its input: it is not recomputed."""
    y = x.detach().clone()
    with torch.no_grad():
        for layer in model.layers:
            y = layer(y)
    return model.layers[0](x) * y


class Clamps(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() and not x.requires_grad:
            x.clamp_(-0.5, 0.5)
        return super().forward(x)


def autocast_and_no_grad(i: int, x: torch.Tensor) -> Any:
    return torch.no_grad() if i == 1 else torch.autocast("cpu", torch.bfloat16, enabled=i == 2)


MODES: dict[str, tuple[type[nn.Module], Run]] = {
    "no_grad around one block": (Layer, through(lambda i, x: torch.no_grad() if i == 1 else nullcontext())),
    "no_grad around the first": (Layer, through(lambda i, x: torch.set_grad_enabled(i > 0))),
    "set_grad_enabled around all but the last": (Layer, through(lambda i, x: torch.set_grad_enabled(i == 2))),
    "no_grad for some micro-batches": (Layer, through(lambda i, x: torch.set_grad_enabled(i != 1 or x.shape[1] > 9))),
    "blocks called without and with gradients": (Layer, run_twice),
    "a block that switches gradients on": (OwnGrad, through(lambda i, x: torch.set_grad_enabled(i != 1))),
    "no_grad within a block": (HalfGrad, run_half),
    "no_grad and autocast": (Layer, through(autocast_and_no_grad)),
    "a block that changes its input without gradients": (Clamps, run_momentum),
}


@pytest.mark.parametrize("name", MODES)
def test_the_mode_at_the_call_decides(name: str) -> None:
    assert_exact(stack(*MODES[name]), orders=(vertical, horizontal))


def test_a_block_called_without_gradients_costs_no_backward() -> None:
    found, bench = assert_exact(stack(*MODES["no_grad around one block"]))
    assert not any(name.startswith("layers.1") for name in found)
    assert [s.backward_reads == s.gradients == () for s in bench.stages if s.name == "layers.1"] == [True]


@contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@contextmanager
def switched(place: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    yield
    setattr(place, name, before)


@contextmanager
def called(read: Callable[[], Any], set_to: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    set_to(value)
    yield
    set_to(before)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):
        yield


CUDA: Any = torch.backends.cuda
MHA = torch.backends.mha
SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "default dtype": (torch.get_default_dtype, default_dtype),
    "deterministic": (torch.are_deterministic_algorithms_enabled, deterministic),
    "attention": (CUDA.math_sdp_enabled, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    "order of attention's kernels": (
        attention_priority,
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    ),
    "attention's reductions": (
        CUDA.fp16_bf16_reduction_math_sdp_allowed,
        lambda: called(CUDA.fp16_bf16_reduction_math_sdp_allowed, CUDA.allow_fp16_bf16_reduction_math_sdp, True),
    ),
    "attention of inference": (
        MHA.get_fastpath_enabled,
        lambda: called(MHA.get_fastpath_enabled, MHA.set_fastpath_enabled, False),
    ),
    "mkldnn": (lambda: torch.backends.mkldnn.enabled, lambda: torch.backends.mkldnn.flags(enabled=False)),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu", torch.bfloat16)),
    "precision of products": (
        torch.get_float32_matmul_precision,
        lambda: called(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    ),
    "TF32 in products": (lambda: CUDA.matmul.allow_tf32, lambda: switched(CUDA.matmul, "allow_tf32", True)),
    "TF32 in products, by its newer name": (
        lambda: CUDA.matmul.fp32_precision,
        lambda: switched(CUDA.matmul, "fp32_precision", "tf32"),
    ),
    "TF32 everywhere": (
        lambda: torch.backends.mkldnn.conv.fp32_precision,  # type: ignore[attr-defined]
        lambda: torch.backends.flags(fp32_precision="tf32"),
    ),
    "TF32 in cuDNN": (
        lambda: torch.backends.cudnn.allow_tf32,
        lambda: switched(torch.backends.cudnn, "allow_tf32", False),
    ),
    "reductions": (
        lambda: CUDA.matmul.allow_bf16_reduced_precision_reduction,
        lambda: switched(CUDA.matmul, "allow_bf16_reduced_precision_reduction", False),
    ),
    "accumulation": (
        lambda: CUDA.matmul.allow_fp16_accumulation,
        lambda: switched(CUDA.matmul, "allow_fp16_accumulation", True),
    ),
    "anomalies": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
    "threads of autograd": (is_multithreading_enabled, lambda: torch.autograd.set_multithreading_enabled(False)),
    "threads": (torch.get_num_threads, lambda: called(torch.get_num_threads, torch.set_num_threads, 2)),
    "warnings": (lambda: list(warnings.filters), quiet),
    "stdout": (lambda: sys.stdout, lambda: redirect_stdout(io.StringIO())),
    "stderr": (lambda: sys.stderr, lambda: redirect_stderr(io.StringIO())),
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch, of what the switch was before
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_holds_for_the_calls_inside_of_it_and_for_nothing_else(name: str) -> None:
    read, inside = SWITCHES[name]
    outside = read()
    told = SimpleQueue[object]()  # what a probe or a recomputation puts there stays, unlike what is in a list

    class Looks(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            told.put(read())
            return super().forward(x)

    def checked(stages: int, count: int) -> Iterator[tuple[str, int, int]]:
        for place in vertical(stages, count):
            assert read() == outside
            yield place

    assert_exact(stack(Looks, through(lambda i, x: inside() if i == 1 else nullcontext())), orders=[checked])
    assert read() == outside
    # Of each layer: the probe's forward, its call on other numbers and its recomputation; three micro-batches' forwards
    # and recomputations; the plain loop's three.
    seen = [told.get() for _ in range(told.qsize())]
    assert len(seen) == 3 * (3 + 2 * 3 + 3)
    # What is called again prints where everybody does by then: a file that the forward had may be closed.
    again = 1 + 1 + 3 if name in ("stdout", "stderr") else 0
    assert sum(value != outside for value in seen) == len(seen) // 3 - again


def test_older_and_newer_names_of_a_precision_agree_after_a_forward_that_sets_it() -> None:
    """torch raises where a precision was set by both; a forward may read by either."""

    class Reads(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((torch.get_float32_matmul_precision(), CUDA.matmul.fp32_precision))
            return super().forward(x)

    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        x = model.layers[0](x)
        with called(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"):
            x = model.layers[1](x)
        with torch.backends.flags(fp32_precision="tf32"):
            return model.layers[2](x)  # type: ignore[no-any-return]

    before = torch.backends.fp32_precision
    seen: list[tuple[str, str]] = []
    with called(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"):
        assert_exact(stack(Reads, run))
        assert torch.get_float32_matmul_precision() == "highest"
    assert set(seen) == {("highest", "ieee"), ("medium", "tf32")}
    assert torch.backends.fp32_precision == before


def test_warnings_that_a_forward_records_are_its_own() -> None:
    with warnings.catch_warnings(record=True) as outside:
        warnings.simplefilter("always")
        assert_exact(stack(Layer, through(lambda i, x: warnings.catch_warnings(record=True))))
        warnings.warn("after", stacklevel=1)
    assert [str(w.message) for w in outside] == ["after"]


class Drops(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


class Distilled(Stack):
    """Learns from what it puts out itself without dropout, which is behind its layers and in them."""

    def __init__(self) -> None:
        super().__init__(Drops)

    def outputs(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.dropout(self.head(x), 0.3, self.training)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.eval()
        with torch.no_grad():
            wanted = self.outputs(tokens)
        self.train()
        return (self.outputs(tokens) - wanted).square().mean()


class DistilledLast(Distilled):
    """The same the other way round, and is left without dropout."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.train()
        found = self.outputs(tokens)
        self.eval()
        with torch.no_grad():
            wanted = self.outputs(tokens)
        return (found - wanted).square().mean()


@pytest.mark.parametrize("model", [Distilled, DistilledLast])
def test_train_and_eval_within_a_forward_are_of_its_own_micro_batch(model: type[nn.Module]) -> None:
    assert_exact(of(model), orders=(vertical, horizontal, with_graphs))


def test_modules_are_in_the_mode_after_a_step_that_they_were_in_before() -> None:
    case = of(DistilledLast)
    bench = Bench(case, model := case.model().train())
    micro_batches = case.micro_batches(2)
    bench.probe(micro_batches[0])
    assert all(module.training for module in model.modules())
    bench.load_all()
    bench.step(micro_batches, [1.0, 1.0])
    bench.tape.begin(1, micro_batches, [1.0, 1.0], stages=bench.stages)
    for stage in range(len(bench.stages) - 1):
        bench.tape.forward(stage, 0)
        assert all(module.training for module in model.modules())
    bench.tape.abort()
    assert all(module.training for module in model.modules())


REFUSED_MODES: dict[str, tuple[Callable[[int, torch.Tensor], Any], str]] = {
    "inference mode": (lambda i, x: torch.inference_mode(), "use torch.no_grad()"),
    "save_on_cpu": (lambda i, x: torch.autograd.graph.save_on_cpu(), "inside of saved_tensors_hooks"),
    "device mode": (lambda i, x: torch.device("cpu"), "a mode for torch functions"),
    "cached parametrizations": (lambda i, x: parametrize.cached(), "inside of torch.nn.utils.parametrize.cached()"),
    "forward AD": (lambda i, x: torch.autograd.forward_ad.dual_level(), "forward-mode differentiation"),
}


@pytest.mark.parametrize("name", REFUSED_MODES)
def test_what_a_suspended_forward_cannot_carry_is_refused(name: str) -> None:
    wrapped, message = REFUSED_MODES[name]
    assert message in refused(stack(Layer, through(wrapped)))


# -- what is done with a block's output ---------------------------------------------------------------------------


def after(change: Callable[[Stack, torch.Tensor, torch.Tensor], torch.Tensor]) -> Run:
    """A forward that goes on with ``change(model, output, input)`` behind each layer."""

    def run(model: Stack, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = change(model, layer(x), x)
        return x

    return run


def add(model: Stack, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y += x
    return y


def mask_rows(model: Stack, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y[:, 0] = 0.0
    y[..., 1] *= 2.0
    return y


def view_add(model: Stack, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y.view(-1)[3:].add_(x.reshape(-1)[3:].sin())
    return y


def weight_add(model: Stack, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y.mul_(model.head.weight[0]).add_(x)
    return y


def relu(model: Stack, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.relu_(y) + x


def no_grad_write(model: Stack, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y.clamp_(-1.0, 1.0)
    return y


def detach_in_place(model: Stack, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.detach_() + x


def dropout(model: Stack, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(y, 0.1, inplace=True)


class Pair(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, y * 0.5


class Halves(Layer):
    """Two outputs in one memory."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).chunk(2, dim=-1)


class Whole(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, y[:, :1]


class Tail(Layer):
    """Its output lies in the memory of its input."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.view(x.shape), super().forward(x)


def pair_in_place(model: Stack, pair: Any, x: torch.Tensor) -> torch.Tensor:
    y, half = pair
    y += half
    half += x
    return y * half


def tail_in_place(model: Stack, pair: Any, x: torch.Tensor) -> torch.Tensor:
    same, y = pair
    same += 1
    return y


def halves(model: Stack, pair: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = pair
    return torch.cat([a * 2, b * a], dim=-1)


def halves_in_place(model: Stack, pair: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = pair
    a *= 2
    return torch.cat([a, b * a], dim=-1)


def whole_in_place(model: Stack, pair: Any, x: torch.Tensor) -> torch.Tensor:
    y, first = pair
    y *= 2
    return y + first


def run_before(model: Stack, x: torch.Tensor) -> torch.Tensor:
    x += model.head.weight[0]
    for layer in model.layers:
        x = layer(x)
    x *= 2
    return x


def run_skip_in_place(model: Stack, x: torch.Tensor) -> torch.Tensor:
    """Skips that are added in place far above."""
    skips = []
    for layer in model.layers:
        x = layer(x)
        x += 1
        skips.append(x)
    x = model.layers[0](x)
    x += skips[0]
    x += skips[1].exp()
    return x


IN_PLACE: dict[str, tuple[type[nn.Module], Run]] = {
    "add": (Layer, after(add)),
    "a part": (Layer, after(mask_rows)),
    "a view": (Layer, after(view_add)),
    "with a weight": (Layer, after(weight_add)),
    "relu": (Layer, after(relu)),
    "dropout": (Layer, after(dropout)),
    "without gradients": (Layer, after(no_grad_write)),
    "detach": (Layer, after(detach_in_place)),
    "two outputs": (Pair, after(pair_in_place)),
    "two outputs in one memory, not changed": (Halves, after(halves)),
    "before the first block and behind the last": (Layer, run_before),
    "skips": (Layer, run_skip_in_place),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_outputs_may_be_changed_in_place(name: str) -> None:
    assert_exact(stack(*IN_PLACE[name]), orders=(vertical, horizontal))


IN_PLACE_REFUSED: dict[str, tuple[type[nn.Module], Run, str]] = {
    "halves": (Halves, after(halves_in_place), "lies in the same memory"),
    "a whole and its part": (Whole, after(whole_in_place), "lies in the same memory"),
    "a part of the input": (Tail, after(tail_in_place), "in place"),
}


@pytest.mark.parametrize("name", IN_PLACE_REFUSED)
def test_what_autograd_could_not_follow_is_refused(name: str) -> None:
    layer, run, message = IN_PLACE_REFUSED[name]
    assert message in refused(stack(layer, run))


# -- how blocks are held ------------------------------------------------------------------------------------------


class Held(nn.Module):
    """Layers that are held by something else than a list, and called as ``run`` does."""

    def __init__(self, layers: nn.Module, run: Run) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = layers
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.run = run

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.run(self, self.embed(tokens))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def run_stages(model: Any, x: torch.Tensor) -> torch.Tensor:
    for stage in model.layers:
        for layer in stage:
            x = layer(x) if layer is not None else x
    return x


def run_dict(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers.values():
        x = layer(x)
    return x


HELD: dict[str, Callable[[], nn.Module]] = {
    "a sequential": lambda: Held(nn.Sequential(Layer(), Layer(), Layer()), lambda model, x: model.layers(x)),
    "lists of lists": lambda: Held(
        nn.ModuleList([nn.ModuleList([Layer(), None, Layer()]), nn.ModuleList([Layer()])]), run_stages
    ),
    "a dict": lambda: Held(nn.ModuleDict({"a": Layer(), "b": Layer(), "c": Layer()}), run_dict),
}


@pytest.mark.parametrize("name", HELD)
def test_blocks_may_be_held_by_any_list(name: str) -> None:
    _, bench = assert_exact(of(HELD[name]))
    assert len(bench.blocks) == 3
    assert sum(s.kind == "call" for s in bench.stages) == 3


# -- numbers without a dimension ----------------------------------------------------------------------------------


class Scaled(Layer):
    """Has a parameter without a dimension, and takes and returns a tensor without one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> Any:
        y = super().forward(x) * self.scale + total
        return y, total + y.square().mean()


def run_scaled(model: Stack, x: torch.Tensor) -> torch.Tensor:
    total = x.mean()
    for layer in model.layers:
        x, total = layer(x, total)
    return x + total


def test_tensors_without_a_dimension() -> None:
    found, bench = assert_exact(stack(Scaled, run_scaled), orders=(vertical, horizontal))
    assert found["layers.1.scale"].shape == ()
    assert all(s.activation > 0 for s in bench.stages if s.kind == "call")


@pytest.mark.parametrize("meta", [False, True])
def test_parameters_without_a_dimension_are_trained_and_read_back(meta: bool, tmp_path: Path) -> None:
    case = stack(Scaled, run_scaled)
    with torch.device("meta" if meta else "cpu"):
        model = case.model()
    for layer in model.layers:
        layer.reset_parameters = partial(nn.init.constant_, layer.scale, 0.7)
    with wrap(case, budget(tmp_path), model=model) as engine:
        run_steps(engine, steps_of(case, 2))
        scales = [value for name, value in engine.master_parameters() if name.endswith("scale")]
    assert [scale.shape for scale in scales] == [torch.Size([])] * 3
    assert all(0.69 < float(scale) < 0.71 and float(scale) != torch.tensor(0.7) for scale in scales)


class WithNothing(Stack):
    """Has a parameter without elements, which gets a gradient, and no other that trains outside of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        for end in (self.embed, self.head):
            end.requires_grad_(requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.nothing.sum()


def test_a_parameter_without_elements_may_be_there(tmp_path: Path) -> None:
    case = of(WithNothing)
    with wrap(case, budget(tmp_path / "store")) as engine:
        run_steps(engine, steps_of(case, 2))
        assert dict(engine.master_parameters())["nothing"].shape == (0, 3)


# -- sparse gradients ---------------------------------------------------------------------------------------------


class Looked(Layer):
    """Looks up what it adds in a table of its own."""

    sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, sparse=self.sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.table(x.argmax(-1))


class SparselyLooked(Looked):
    sparse = True


def tie_head(model: Stack) -> None:
    model.head.weight = model.embed.weight


@pytest.mark.parametrize("change", [lambda model: None, tie_head], ids=["apart", "tied"])
def test_sparse_gradients_are_added_up_like_others(change: Any) -> None:
    def gradients(layer: type[Looked]) -> list[Gradients]:
        case = stack(layer)
        model = case.model()
        model.embed.sparse = layer.sparse
        change(model)
        bench = Bench(case, model, moving=True, splits=True)
        micro_batches = case.micro_batches(3)
        bench.probe(micro_batches[0])
        orders = (vertical, in_two_parts, with_graphs)
        return [bench.step(micro_batches, [0.2, 0.3, 0.5], order)[1] for order in orders]

    for found, wanted in zip(gradients(SparselyLooked), gradients(Looked), strict=True):
        assert_same_gradients(found, wanted)


def test_a_dry_run_of_a_model_with_sparse_gradients() -> None:
    case = stack(SparselyLooked)
    model = build_on_meta(case.build)
    found = dry_run(model, case.micro_batches(1)[0], dtype=torch.float32, kind="cpu", loss_fn=case.loss_fn)
    assert all(stage.gradients for stage in found.stages)


# -- whole steps --------------------------------------------------------------------------------------------------

WHOLE: dict[str, tuple[type[nn.Module], Run]] = {
    "without gradients for one block": MODES["no_grad around one block"],
    "without gradients for some micro-batches": MODES["no_grad for some micro-batches"],
    "blocks called twice": MODES["blocks called without and with gradients"],
    "changed in place": IN_PLACE["skips"],
    "no dimension": (Scaled, run_scaled),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("name", WHOLE)
def test_steps_equal_a_plain_loop(name: str, schedule: str, tmp_path: Path) -> None:
    case = stack(*WHOLE[name])
    model = case.model()
    plain_model = copy.deepcopy(model)
    steps = steps_of(case, 2)
    with wrap(case, budget(tmp_path), model=model, schedule=schedule, clip_grad_norm=1.0) as engine:
        found = run_steps(engine, steps)
        plain = plain_loop(case, plain_model, engine, steps, torch_adamw, 1.0)
        assert found.losses == pytest.approx(plain.losses, rel=1e-6)
        assert found.norms == pytest.approx(plain.norms, rel=1e-5)
        assert relative(master_of(engine), plain.parameters) <= 1e-6


def test_a_block_that_prints_to_a_file_which_its_forward_has_closed_is_called_again(tmp_path: Path) -> None:
    class Prints(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print(x.shape)
            return super().forward(x)

    @contextmanager
    def to_file() -> Iterator[None]:
        with (tmp_path / "out").open("w") as file, redirect_stdout(file):
            yield

    assert_exact(stack(Prints, through(lambda i, x: to_file())))
