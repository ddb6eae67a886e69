"""Models that cannot be run block by block from memory that moves, refused before anything is touched, with the reason.

What only a run can show (a cache, an input or a parameter that is changed in place, a block that does something else
when it is recomputed) is refused where it shows: in ``kv_cache.without_caches``, ``suspended`` and ``probe``.
"""

import torch
from torch import nn

from penstock.compat.marks import is_moved
from penstock.compat.modules import is_compiled, persistent_buffers
from penstock.compat.torch import accumulation_hooks, gradient_hooks, storage_key
from penstock.errors import ModelError
from penstock.tape import trees

NO_GRAPHS = (
    "recompute=False: no block's graph can be kept, as they have backwards written in Python, change buffers, are "
    "handed containers, or put out other bits where a gradient is asked for: leave recompute out"
)
"""For who asks that no block is computed again."""

NOTHING_TRAINS = (
    "the loss does not depend on any parameter that is trained: is requires_grad False everywhere, or does loss_fn "
    "detach?"
)

_WRAPPERS = {
    "DataParallel": "it splits batches over devices by itself",
    "DistributedDataParallel": "it sums gradients over processes by itself",
    "FullyShardedDataParallel": "it keeps parameters in shards of its own",
    "CheckpointWrapper": "it recomputes activations by itself, as Penstock does",
    "OptimizedModule": "torch.compile has made one program of the whole model; use compile=True of penstock.wrap",
}

COMPILED = "has been compiled by its compile(): leave that out and use compile=True of penstock.wrap"


def refuse(model: nn.Module) -> None:
    """Raises:
    ModelError: the model is wrapped or hooked by something that moves, splits, compiles or recomputes it itself; or its
        tensors cannot be trained as they are.
    """
    if torch.is_inference_mode_enabled():
        raise ModelError("penstock.wrap inside of torch.inference_mode(), which nothing can train in: call it outside")
    for name, module in model.named_modules():
        where = f"{name!r}" if name else "the model"
        _refuse_wrapper(where, module)
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ModelError(
                f"gradient checkpointing is switched on in the model (in {name or type(model).__name__!r}), but "
                "Penstock recomputes blocks by itself, where it has to: call model.gradient_checkpointing_disable()"
            )
        if is_moved(module):
            raise ModelError(
                f"{where} has hooks of accelerate, which move its weights (it was loaded with device_map, or "
                "offloaded): load it without device_map; the budget says where weights live"
            )
        if is_compiled(module):
            raise ModelError(f"{where} {COMPILED}")
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ModelError(
                f"{where} has state besides parameters and buffers (get_extra_state of {type(module).__name__}), for "
                "which commits and snapshots have no place, so that a run would go on without it: keep it in buffers"
            )
    _refuse_parameters(model)


def _refuse_wrapper(where: str, module: nn.Module) -> None:
    kind = type(module)
    reason = _WRAPPERS.get(kind.__name__) if kind.__module__.startswith("torch.") else None
    if kind.__module__.startswith("torch.jit"):
        reason = "its forward is a compiled program, in which blocks cannot be told apart"
    if any(cls.__name__ == "FSDPModule" for cls in kind.__mro__):
        reason = _WRAPPERS["FullyShardedDataParallel"]
    if reason is not None:
        raise ModelError(f"{where} is a {kind.__name__}: {reason}. Give the module inside it to penstock.wrap")


def _refuse_parameters(model: nn.Module) -> None:
    devices: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        refuse_accumulation_hooks(name, parameter)
        if parameter.is_meta and gradient_hooks(parameter):
            raise ModelError(
                f"parameter {name!r} has a hook and is on the meta device, which it leaves without hooks: register it "
                "when the model is wrapped"
            )
        if not trees.has_storage(parameter):
            raise ModelError(
                f"parameter {name!r} is sparse or nested, and what streams is one piece of memory: let it be dense "
                "(.to_dense()), or build it in the forward, of dense parameters"
            )
        kind = type(parameter.data).__name__
        if type(parameter) is not nn.Parameter or kind not in ("Tensor", "Parameter"):
            what = type(parameter).__name__ if kind in ("Tensor", "Parameter") else kind
            raise ModelError(
                f"parameter {name!r} is a {what}, no plain tensor of numbers: it is quantised, sharded or not there "
                "yet. Give a model with plain parameters (without quantisation)"
            )
        _refuse_inference(f"parameter {name!r}", parameter)
        if parameter.requires_grad and overlaps_itself(parameter):
            raise ModelError(
                f"elements of parameter {name!r} lie in the same memory (expand, as_strided), and would be trained "
                "apart: give each its own (.clone()), or let the forward expand what is one number"
            )
        if not parameter.is_meta:
            devices.setdefault(f"{parameter.device.type}:{parameter.device.index or 0}", name)
    for name, buffer in model.named_buffers():
        if not isinstance(buffer, nn.UninitializedBuffer):
            _refuse_inference(f"buffer {name!r}", buffer)
    for path, module in model.named_modules():
        for name, buffer in persistent_buffers(module).items():
            if not trees.has_storage(buffer):
                raise ModelError(
                    f"buffer {(f'{path}.{name}' if path else name)!r} is sparse or nested, for which commits and "
                    "snapshots have no place: let it be dense, or register it with persistent=False if it is no state"
                )
    if len(devices) > 1:
        (one, first), (other, second), *_ = devices.items()
        raise ModelError(
            f"parameters are on several devices ({first!r} on {one}, {second!r} on {other}): put the whole model on "
            "the CPU; the budget says where weights live"
        )
    _refuse_shared(model)


def _refuse_inference(what: str, tensor: torch.Tensor) -> None:
    if tensor.is_inference():
        raise ModelError(
            f"{what} was made inside of torch.inference_mode(), where torch notes no changes: build the model outside "
            "of it (torch.no_grad() does no harm)"
        )


def overlaps_itself(parameter: torch.Tensor) -> bool:
    """True if elements share memory, other than in the placeholder that an engine leaves behind, which is NaN."""
    if parameter.is_meta or not parameter.numel() or not trees.has_storage(parameter):
        return False
    last = 0  # the last element of those along the dimensions with smaller steps
    for step, count in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if count > 1 and step <= last:
            return any(parameter.stride()) or not bool(parameter.detach().as_strided((), ()).isnan())
        last += (count - 1) * step
    return False


def _refuse_shared(model: nn.Module) -> None:
    """Refuse two parameters in one memory, one of which trains: each gets memory of its own, which unties them."""
    found: dict[int, list[tuple[int, int, str, bool]]] = {}  # storage -> (first byte, the one behind, name, trains)
    for name, parameter in model.named_parameters():
        span = trees.span(parameter.shape, parameter.stride())
        if parameter.is_meta or not parameter.numel() or 0 in parameter.stride():  # as placeholders have it
            continue
        size, start = parameter.element_size(), int(parameter.storage_offset())
        end = start + (span if span == parameter.numel() else 1)  # what lies between other elements may be another's
        place = (start * size, end * size, name, parameter.requires_grad)
        found.setdefault(storage_key(parameter), []).append(place)
    for places in found.values():
        last, before, trained = 0, "", False
        for start, end, name, trains in sorted(places):
            if start < last and (trains or trained):
                raise ModelError(
                    f"parameters {before!r} and {name!r} lie in the same memory, and would be trained apart: tie them "
                    "by one parameter (model.head.weight = model.embed.weight), or give each its own (.clone())"
                )
            if end > last:
                last, before, trained = end, name, trains


def refuse_accumulation_hooks(name: str, parameter: nn.Parameter, *, ours: bool = False) -> None:
    """Raise ModelError where hooks wait for what is accumulated in ``.grad``. ``ours``: one of them is the tape's."""
    if parameter.requires_grad and len(accumulation_hooks(parameter)) > int(ours):
        raise ModelError(
            f"parameter {name!r} has a hook of register_post_accumulate_grad_hook: gradients are not accumulated in "
            ".grad, but streamed to where the optimizer's state is. Remove the hook; clipping and the optimizer are "
            "settings of penstock.wrap, and register_hook sees each micro-batch's gradient"
        )
