"""The way of a random model through its blocks, what is around their calls, how they are held, and what is changed of a
model that is built.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.any_calls import Flow, Outside, Record

if TYPE_CHECKING:
    from tests.any_model import AnyModel

# -- the way through the blocks -----------------------------------------------------------------------------------

Way = Callable[["AnyModel", torch.Tensor, Flow], torch.Tensor]


def in_order(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    for i in range(len(model.blocks)):
        x = model.call(i, x, flow)
    return x


def backwards(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    for i in reversed(range(len(model.blocks))):
        x = model.call(i, x, flow)
    return x


def twice(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    return backwards(model, in_order(model, x, flow), flow)


def first_again(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    return model.call(0, model.call(0, in_order(model, x, flow), flow), flow)


def skips(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """Down and up again, as a U-Net."""
    below = []
    for i in range(len(model.blocks)):
        below.append(x)
        x = model.call(i, x, flow)
    for i in reversed(range(len(model.blocks))):
        x = model.call(i, x + below.pop(), flow)
    return x


def towers(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    found = [model.call(i, x, flow) for i in range(len(model.blocks))]
    return torch.stack(found).sum(0)


def dense(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    seen = [x]
    for i in range(len(model.blocks)):
        seen.append(model.call(i, torch.stack(seen).mean(0), flow))
    return torch.cat(seen, dim=1).tanh()[:, -x.shape[1] :] + seen[1]


def weighed(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """The head after every block, whose loss counts."""
    for i in range(len(model.blocks)):
        x = model.call(i, x, flow)
        flow.total = flow.total + model.head(x).logsumexp(-1).mean() * 0.1
    return x


def dropped_layers(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    for i in range(len(model.blocks)):
        if i == 0 or not model.training or torch.rand(()) > 0.3:
            x = model.call(i, x, flow)
    return x


def by_length(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    for i in range(len(model.blocks)):
        if i == 0 or x.shape[1] % 2:
            x = model.call(i, x, flow)
    return x


def one_left_out(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    for i in range(len(model.blocks) - 1):
        x = model.call(i, x, flow)
    return x


def cut(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """Only the last block gets a gradient."""
    for i in range(len(model.blocks)):
        x = model.call(i, x.detach() if i == len(model.blocks) - 1 else x, flow)
    return x


def teacher(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """Once more without gradients, evaluated."""
    y = in_order(model, x, flow)
    model.eval()
    with torch.no_grad():
        wanted = in_order(model, x.detach(), replace(flow, trail=[], shared=dict(flow.shared)))
    model.train()
    return y + (y - wanted).square()


def looks_back(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """A gradient with respect to what the last block returned."""
    x = in_order(model, x, flow)
    if not x.requires_grad:
        return x
    (gradient,) = torch.autograd.grad(model.head(x).logsumexp(-1).sum(), x, create_graph=True)
    return x + gradient.square().sum(-1, keepdim=True)


def remembers(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """Attributes of the model that its own code sets and reads behind blocks."""
    model.first = x
    x = in_order(model, x, flow)
    return x + model.first.tanh()


def averages(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """A running mean of what comes out."""
    x = in_order(model, x, flow)
    model.running.lerp_(x.detach().mean((0, 1)), 0.1)
    return x - model.running


def averages_before(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """The same, of the one before."""
    x = in_order(model, x - model.running, flow)
    model.running.lerp_(x.detach().mean((0, 1)), 0.1)
    return x


def mixes(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """A weighed mean of what all blocks return."""
    seen = []
    for i in range(len(model.blocks)):
        x = model.call(i, x, flow)
        seen.append(x)
    share = model.bias[:1].expand(len(seen)).softmax(0)
    return sum(s * w for s, w in zip(seen, share.unbind(), strict=True))  # type: ignore[return-value]


def penalised(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """All weights are part of the loss."""
    x = in_order(model, x, flow)
    flow.total = flow.total + sum(p.float().square().sum() for p in model.parameters()) * 0.01
    return x


def inside_of_one(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """Uses a part of a block without the block."""
    x = in_order(model, x, flow)
    names = model.blocks[0].parts
    return getattr(model.blocks[0], names[0])(x) if names else x


def as_one_says(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    for i in range(len(model.blocks)):
        y = model.call(i, x, flow)
        x = y if float(y.detach().sum()) > 0 else x + 0.5 * y
    return x


def reversible(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    """Two streams."""
    a, b = x, x * 0.5
    for i in range(len(model.blocks)):
        a, b = b, a + model.call(i, b, flow)
    return a * b


def in_autocast(model: "AnyModel", x: torch.Tensor, flow: Flow) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return in_order(model, x, flow).float()


WAYS: dict[str, Way] = {
    "in autocast": in_autocast,
    "mixes": mixes,
    "penalised": penalised,
    "inside of one": inside_of_one,
    "as one says": as_one_says,
    "reversible": reversible,
    "in order": in_order,
    "backwards": backwards,
    "twice": twice,
    "first again": first_again,
    "skips": skips,
    "towers": towers,
    "dense": dense,
    "weighed": weighed,
    "layer drop": dropped_layers,
    "by length": by_length,
    "one left out": one_left_out,
    "cut": cut,
    "teacher": teacher,
    "looks back": looks_back,
    "remembers": remembers,
    "averages": averages,
    "averages before": averages_before,
}

# -- what is around calls -----------------------------------------------------------------------------------------


@contextmanager
def evaluated(model: "AnyModel") -> Iterator[None]:
    model.eval()
    yield
    model.train()


Around = Callable[["AnyModel", int], AbstractContextManager[Any]]

AROUND: dict[str, Around] = {
    "nothing": lambda model, i: nullcontext(),
    "no_grad": lambda model, i: torch.no_grad() if i == 0 else nullcontext(),
    "autocast": lambda model, i: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast for one": lambda model, i: torch.autocast("cpu", dtype=torch.bfloat16, enabled=i == 1),
    "evaluated": lambda model, i: evaluated(model) if i == 0 else nullcontext(),
    "enable_grad": lambda model, i: torch.enable_grad(),
    "inference_mode": lambda model, i: torch.inference_mode() if i == 0 else nullcontext(),
    "save_on_cpu": lambda model, i: torch.autograd.graph.save_on_cpu(),
    "anomaly": lambda model, i: torch.autograd.detect_anomaly(check_nan=False),
    "fork_rng": lambda model, i: torch.random.fork_rng(),
}


def functional(call: Outside) -> Outside:
    """Its own weights, by torch.func."""

    def same(layer: nn.Module, x: torch.Tensor, flow: Flow) -> torch.Tensor:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(layer, dict(layer.named_parameters()), args, kwargs)

        return call(cast(nn.Module, forward), x, flow)

    return same


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda call: call,
    "checkpoint": lambda call: lambda layer, x, flow: checkpoint(call, layer, x, flow, use_reentrant=False),
    "reentrant checkpoint": lambda call: lambda layer, x, flow: checkpoint(call, layer, x, flow, use_reentrant=True),
    "functional_call": functional,
    "vmap": lambda call: lambda layer, x, flow: torch.vmap(lambda t: call(layer, t[None], flow)[0])(x),
}

# -- how blocks are held, and what is changed of a model that is built ----------------------------------------------


def in_attributes(model: Any, blocks: list[nn.Module]) -> None:
    for i, block in enumerate(blocks):
        model.add_module(f"block{i}", block)


def in_stages(model: Any, blocks: list[nn.Module]) -> None:
    model.stages = nn.ModuleList([nn.ModuleList(blocks[:1]), nn.ModuleList(blocks[1:])])


def in_towers(model: Any, blocks: list[nn.Module]) -> None:
    model.encoder, model.decoder = nn.Module(), nn.Module()
    model.encoder.layers, model.decoder.layers = nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:])


def in_blocks(model: Any, blocks: list[nn.Module]) -> None:
    """Two blocks and more in a larger one, which is no list."""
    model.layers = nn.ModuleList([nn.Sequential(*blocks[:2]), *blocks[2:]])


HOLDERS: dict[str, Callable[[Any, list[nn.Module]], None]] = {
    "list": lambda model, blocks: setattr(model, "layers", nn.ModuleList(blocks)),
    "sequential": lambda model, blocks: setattr(model, "layers", nn.Sequential(*blocks)),
    "dict": lambda model, blocks: setattr(model, "layers", nn.ModuleDict({f"b{i}": b for i, b in enumerate(blocks)})),
    "attributes": in_attributes,
    "stages": in_stages,
    "towers": in_towers,
    "blocks": in_blocks,
}


def of_kind(module: nn.Module, kind: type[nn.Module]) -> list[Any]:
    return [m for m in module.modules() if isinstance(m, kind)]


def tie_blocks(model: "AnyModel") -> None:
    found = [of_kind(block, nn.Linear) for block in model.blocks]
    if found[0] and found[-1] and hasattr(found[0][0], "bias"):
        found[-1][0].bias = found[0][0].bias


def tie_root(model: "AnyModel") -> None:
    for linear in of_kind(model.blocks[0], nn.Linear)[:1]:
        linear.bias = model.bias


def share_module(model: "AnyModel") -> None:
    names = model.blocks[-1].parts
    if names and model.blocks[0].parts:
        setattr(model.blocks[-1], names[-1], getattr(model.blocks[0], model.blocks[0].parts[-1]))


def share_buffer(model: "AnyModel") -> None:
    table = torch.rand(model.width)
    for block in model.blocks:
        block.register_buffer("table", table)
        block.register_forward_pre_hook(lambda m, args: args)
        block.register_forward_hook(lambda m, args, y: y + m.table if isinstance(y, torch.Tensor) else y)


def add_hooks(model: "AnyModel") -> None:
    for block in model.blocks:
        block.register_forward_pre_hook(lambda m, args, kwargs: (args, kwargs), with_kwargs=True)
        block.register_forward_hook(lambda m, args, y: y * 1.1 if isinstance(y, torch.Tensor) else None)


def add_backward_hooks(model: "AnyModel") -> None:
    model.blocks[0].register_full_backward_hook(lambda m, inward, outward: None)
    model.head.register_full_backward_pre_hook(lambda m, outward: tuple(g * 0.5 for g in outward))


def hook_parameters(model: "AnyModel") -> None:
    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(lambda grad: grad * 0.5)


def keep_features(model: "AnyModel") -> None:
    """Hooks that keep what blocks return, for the loss."""
    for block in model.blocks:
        block.register_forward_hook(lambda m, args, y: model.features.append(y) if torch.is_tensor(y) else None)


def borrow(of: Callable[["AnyModel"], Any]) -> Callable[["AnyModel"], None]:
    """Blocks read a weight that is not theirs."""

    def change(model: "AnyModel") -> None:
        for block in model.blocks:
            block.register_forward_hook(lambda m, a, y: y + of(model).sum() * 0.1 if torch.is_tensor(y) else None)

    return change


def freeze(*names: str) -> Callable[["AnyModel"], None]:
    def change(model: "AnyModel") -> None:
        for name, p in model.named_parameters():
            if any(part in name for part in names):
                p.requires_grad_(requires_grad=False)

    return change


CHANGES: dict[str, Callable[["AnyModel"], Any]] = {
    "tied head": lambda model: setattr(model.head, "weight", model.embed.weight),
    "tied blocks": tie_blocks,
    "tied to the root": tie_root,
    "shared part": share_module,
    "shared buffer": share_buffer,
    "hooks": add_hooks,
    "backward hooks": add_backward_hooks,
    "hooks of parameters": hook_parameters,
    "features": keep_features,
    "input asks for a gradient": lambda model: model.embed.register_forward_hook(lambda m, a, y: y.requires_grad_()),
    "borrowed head": borrow(lambda model: model.head.weight),
    "borrowed bias": borrow(lambda model: model.bias.detach() + model.bias),
    "borrowed block": borrow(lambda model: next(model.blocks[0].parameters(), model.bias)),
    "frozen ends": freeze("embed", "head", "bias", "positions"),
    "frozen biases": freeze("bias"),
    "frozen weights": freeze("weight"),
    "frozen first": lambda model: model.blocks[0].requires_grad_(requires_grad=False),
    "unreached": lambda model: model.register_parameter("spare", nn.Parameter(torch.rand(3))),
    "evaluated": lambda model: model.blocks[0].eval(),
    "bf16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
}

LOSSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda loss: loss,
    "dict": lambda loss: {"loss": loss, "other": loss.detach()},
    "tuple": lambda loss: (loss, None),
    "record": lambda loss: Record(loss),
    "one element": lambda loss: loss.reshape(1, 1),
    "attribute": lambda loss: None,
}
