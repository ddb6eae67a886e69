"""What cannot be trained block by block is refused, with the reason and what to do, before it trains on nonsense."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ModelError
from penstock.tape.refusals import refuse
from penstock.tape.weight_views import aliases_of
from tests import models
from tests.accelerator import DEVICE
from tests.tape.test_rules import Layer, Stack, stack
from tests.training import budget, wrap

pytestmark = pytest.mark.usefixtures("one_thread")


def refused(model: nn.Module, where: Path, *, steps: bool = True) -> str:
    """What ``wrap``, or the first step, says; a refusal at the step leaves no update behind."""
    case = stack()
    settings: dict[str, Any] = {"optimizer": penstock.SGD(lr=0.1), "precision": "fp32", "device": "cpu"}

    def train() -> None:
        with penstock.wrap(model, budget=budget(where), loss_fn=case.loss_fn, **settings) as engine:
            assert steps, "wrap was to refuse it"
            engine.step(case.micro_batches(2))

    with pytest.raises(ModelError) as caught:
        train()
    return str(caught.value)


class Noisy(Layer):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.1 * torch.rand(x.shape, generator=self.generator)


class Growing(Layer):
    """Changes its own parameter, behind autograd's back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(1.01)
        return super().forward(x)


class GrowingData(Layer):
    """The same in a way that leaves no trace in the parameter's version."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.bias.data.add_(0.01)
        return super().forward(x)


class Normalised(Layer):
    """Puts its parameter elsewhere, which is no op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data = nn.functional.normalize(self.linear.weight.data)
        return super().forward(x)


class Anew(Layer):
    """Has another parameter after each call, to which a gradient would be lost."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight = nn.Parameter(nn.functional.normalize(self.linear.weight.detach()))
        return super().forward(x)


class Asking(Layer):
    """Does something else where gradients are computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if torch.is_grad_enabled() else 1)


class Imaginary(Noisy):
    """Returns complex numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(*2 * [super().forward(x)])


class Thin(Noisy):
    """Returns sparse ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to_sparse()


def run_by_real_numbers(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        y = layer(x)
        x = y.to_dense() if y.is_sparse else torch.view_as_real(y).sum(-1)
    return x


def run_detached(model: Stack, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = x + layer(x).detach()
    return x


def run_changing_the_head(model: Stack, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.head.weight.clamp_(-0.1, 0.1)
    for layer in model.layers:
        x = layer(x)
    return x


@pytest.mark.parametrize(
    ("layer", "run", "message"),
    [
        (Noisy, None, "block 'layers.2' returned other numbers when it was recomputed"),
        (Growing, None, "block 'layers.0' changes a parameter in its forward"),
        (GrowingData, None, "block 'layers.0' changes a parameter in its forward"),
        (Normalised, None, "block 'layers.0' changes parameter 'layers.0.linear.weight' in its forward"),
        (Anew, None, "block 'layers.0' changes parameter 'linear.weight' in its forward"),
        (Imaginary, run_by_real_numbers, "block 'layers.2' returned other numbers when it was recomputed"),
        (Thin, run_by_real_numbers, "block 'layers.2' returned other numbers when it was recomputed"),
        (Asking, None, "block 'layers.2' returned other numbers when it was recomputed"),
        (Asking, run_detached, "block 'layers.2' returns other numbers where gradients are computed"),
        (Layer, run_changing_the_head, "the model itself changes a parameter in its forward"),
    ],
)
def test_a_forward_with_a_memory_is_refused(layer: type[nn.Module], run: Any, message: str, tmp_path: Path) -> None:
    assert message in refused(Stack(layer, run), tmp_path)


class Normed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x.flatten(0, 1)).view_as(x))


def test_buffers_may_change_and_dropout_may_draw(tmp_path: Path) -> None:
    case = stack()
    model = Stack(Normed)
    for layer in model.layers:
        layer.linear = nn.Sequential(layer.linear, nn.Dropout(0.5))
    settings: dict[str, Any] = {"optimizer": penstock.SGD(lr=0.1), "precision": "fp32", "device": "cpu"}
    with penstock.wrap(model, budget=budget(tmp_path), loss_fn=case.loss_fn, **settings) as engine:
        engine.step(case.micro_batches(2))
        assert int(model.layers[0].norm.num_batches_tracked) == 2


class Smoothed(Layer):
    """Uses what its buffers hold after it has changed them: one in place, one by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("teacher", torch.zeros(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        self.teacher.lerp_(self.linear.weight.detach(), 0.5)
        return super().forward(x - self.mean) + x @ self.teacher


class Begins(Layer):
    """A mean of what it has seen, which begins with the first call."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", None, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x.detach().mean((0, 1))
        self.mean = seen if self.mean is None else 0.9 * self.mean + 0.1 * seen
        return super().forward(x - self.mean)


class BeginsInState(Begins):
    def __init__(self) -> None:
        super().__init__(persistent=True)


def test_state_that_is_not_there_until_a_forward_makes_it_is_refused(tmp_path: Path) -> None:
    model = Stack(BeginsInState)
    assert "buffer 'layers.0.mean' is None until a forward puts a tensor there" in refused(model, tmp_path)
    assert model.layers[0].mean is None


class Tabled(Layer):
    """Makes a table at its first call, as rotary embeddings once did, and counts its calls for whom it concerns."""

    table: torch.Tensor | None = None
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 8)
        self.calls += 1
        self.last = super().forward(x + self.table)
        return self.last


@pytest.mark.parametrize("layer", [Smoothed, Begins, Tabled])
def test_what_a_block_keeps_for_itself_may_be_kept(layer: type[nn.Module], tmp_path: Path) -> None:
    """The block trains as in a plain loop, with several micro-batches under way."""
    case = stack()
    torch.manual_seed(0)
    model = Stack(layer)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    settings: dict[str, Any] = {"optimizer": penstock.SGD(lr=0.1), "precision": "fp32", "device": "cpu"}
    with penstock.wrap(model, budget=budget(tmp_path), loss_fn=case.loss_fn, clip_grad_norm=None, **settings) as engine:
        for seed in range(2):
            micro_batches = case.micro_batches(3, seed=seed)
            engine.step(micro_batches)
            for micro_batch in micro_batches:
                (case.loss_fn(plain, micro_batch) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        wanted = dict(plain.named_parameters())
        for name, value in engine.master_parameters():
            torch.testing.assert_close(value, wanted[name].detach(), rtol=1e-6, atol=1e-7)
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(dict(model.named_buffers())[name], buffer, rtol=1e-6, atol=1e-7)


def parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def compiled_whole(model: nn.Module) -> nn.Module:
    return torch.compile(model)  # type: ignore[return-value]


def compiled_layer(model: nn.Module) -> nn.Module:
    model.layers[1].compile()
    return model


def dispatched(model: nn.Module) -> nn.Module:
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


class Packed(torch.Tensor):
    """Tensors as quantised weights of torchao are: floating-point to whoever asks, and something else inside."""


def quantised(model: nn.Module) -> nn.Module:
    inner = model.layers[0].linear.weight.detach().as_subclass(Packed)
    model.layers[0].linear.weight = nn.Parameter(inner)
    return model


class Params4bit(nn.Parameter):
    """Tensors as those of bitsandbytes are."""


def four_bits(model: nn.Module) -> nn.Module:
    model.layers[0].linear.weight = Params4bit(torch.zeros(8, 8))
    return model


def lazy(model: nn.Module) -> nn.Module:
    model.head = nn.LazyLinear(models.VOCABULARY)
    return model


def sparse(model: nn.Module) -> nn.Module:
    model.table = nn.Parameter(torch.eye(3).to_sparse())
    return model


def nested(model: nn.Module) -> nn.Module:
    model.table = nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (sparse, "parameter 'table' is sparse or nested, and what streams is one piece of memory: let it be dense"),
        (nested, "parameter 'table' is sparse or nested, and what streams is one piece of memory: let it be dense"),
        (parallel, "the model is a DataParallel: it splits batches over devices by itself. Give the module inside it"),
        (compiled_whole, "the model is a OptimizedModule: torch.compile has made one program of the whole model"),
        (compiled_layer, "'layers.1' has been compiled by its compile()"),
        (dispatched, "has hooks of accelerate"),
        (quantised, "parameter 'layers.0.linear.weight' is a Packed, no plain tensor of numbers"),
        (four_bits, "parameter 'layers.0.linear.weight' is a Params4bit, no plain tensor of numbers"),
        (lazy, "parameter 'head.weight' is a UninitializedParameter"),
    ],
)
def test_models_in_the_hands_of_others_are_refused_by_wrap(
    change: Callable[[nn.Module], nn.Module], message: str, tmp_path: Path
) -> None:
    assert message in refused(change(Stack()), tmp_path / "store", steps=False)
    assert not (tmp_path / "store").exists()


def tie_data(model: Any) -> None:
    model.head.weight.data = model.embed.weight.data


def tie_anew(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embed.weight)


def tie_a_part(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(2 * models.VOCABULARY, 8)[1 : models.VOCABULARY + 1])
    model.embed.weight.data = model.head.weight.data[5:]


@pytest.mark.parametrize(
    ("dtype", "said"),
    [(torch.complex64, r"real and imaginary parts \(torch\.view_as_real"), (torch.int8, "quantisation")],
)
def test_parameters_of_no_floating_point_are_refused_with_what_to_do(dtype: torch.dtype, said: str) -> None:
    model = Stack()
    model.head.phase = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=dtype.is_complex)
    with pytest.raises(ModelError, match=rf"parameter 'head\.phase' is {dtype}: only floating-point .*{said}"):
        penstock.wrap(model, budget=penstock.Budget(device="64MiB", host="64MiB"), optimizer=penstock.SGD(lr=0.1))


@pytest.mark.parametrize("tie", [tie_data, tie_anew, tie_a_part])
def test_parameters_in_one_memory_are_refused(tie: Callable[[Any], None], tmp_path: Path) -> None:
    """Each would get memory of its own, and be trained apart."""
    model = Stack()
    tie(model)
    first, other = ("head", "embed") if tie is tie_a_part else ("embed", "head")
    message = refused(model, tmp_path / "store", steps=False)
    assert f"parameters '{first}.weight' and '{other}.weight' lie in the same memory" in message
    assert "tie them by one parameter" in message


class Aliased(Stack):
    """Reads its embedding by a tensor that was made of it before training."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "buffer":
            self.register_buffer("table", self.embed.weight.data)
        else:
            self.table = self.embed.weight.t() if kind == "transposed" else self.embed.weight.detach()[1:]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.table.square().mean()


@pytest.mark.parametrize("kind", ["buffer", "transposed", "a part"])
def test_a_tensor_in_the_memory_of_a_parameter_is_refused_where_it_is_read(kind: str, tmp_path: Path) -> None:
    """It would have the parameter's first values for ever."""
    message = refused(Aliased(kind), tmp_path / "store")
    assert "the model itself reads a view of parameter 'embed.weight'" in message
    frozen = Aliased(kind)
    frozen.embed.requires_grad_(requires_grad=False)
    assert aliases_of(frozen) == []


def test_a_tensor_in_the_memory_of_a_parameter_that_is_replaced_before_it_is_read_may_be_there(tmp_path: Path) -> None:
    """As spectral normalisation of old leaves one."""
    model = Stack()
    nn.utils.spectral_norm(model.layers[1].linear)
    assert len(aliases_of(model)) == 1
    with wrap(stack(), budget(tmp_path / "store"), model=model) as engine:
        engine.step(stack().micro_batches(2))


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(1).expand(models.VOCABULARY),
        torch.zeros(8).expand(models.VOCABULARY, 8),
        torch.zeros(500).as_strided((models.VOCABULARY, 8), (4, 1)),
    ],
)
def test_a_parameter_whose_elements_share_memory_is_refused(data: torch.Tensor) -> None:
    model = Stack()
    model.head.weight = nn.Parameter(data)
    with pytest.raises(ModelError, match=r"elements of parameter 'head\.weight' lie in the same memory"):
        refuse(model)
    refuse(model.requires_grad_(requires_grad=False))
    model.head.weight = nn.Parameter(torch.zeros(3, 8, 2).transpose(0, 2)[:, ::2])
    refuse(model)


def test_what_was_made_in_inference_mode_is_refused() -> None:
    """torch counts no changes of it."""
    with torch.inference_mode():
        made = Stack()
        table = torch.zeros(3)
        with pytest.raises(ModelError, match=r"inside of torch\.inference_mode\(\), which nothing can train in"):
            refuse(Stack())
    with pytest.raises(ModelError, match=r"parameter 'embed\.weight' was made inside of torch\.inference_mode"):
        refuse(made)
    model = Stack()
    model.register_buffer("table", table)
    with pytest.raises(ModelError, match=r"buffer 'table' was made inside of torch\.inference_mode"):
        refuse(model)


def test_parameters_in_one_memory_that_do_not_train_are_not_refused() -> None:
    model = Stack()
    tie_data(model)
    refuse(model.requires_grad_(requires_grad=False))


def test_parameters_beside_each_other_in_one_memory_are_not_refused() -> None:
    model = Stack()
    both = torch.randn(models.VOCABULARY, 16)
    model.embed.weight, model.head.weight = nn.Parameter(both[:, :8]), nn.Parameter(both[:, 8:])
    refuse(model)


@pytest.mark.accelerator
def test_parameters_on_several_devices_are_refused(tmp_path: Path) -> None:
    model = Stack()
    model.head.to(DEVICE)
    assert "parameters are on several devices ('embed.weight' on cpu:0" in refused(model, tmp_path, steps=False)


class Extra(Layer):
    def get_extra_state(self) -> Any:
        return {"scale": 2.0}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_state_that_no_commit_has_a_place_for_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'layers\.0' has state besides parameters and buffers \(get_extra_sta"):
        refuse(Stack(Extra))
