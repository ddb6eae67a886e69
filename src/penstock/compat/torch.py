"""Private names of torch.

Each function says what the name stands for, and (*Without*) what Penstock could not do if torch took it away.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Store", "TorchDispatchMode", "WeakTensorKeyDictionary", "flop_registry", "tree_iter", "tree_map_only"]
# Store: the type of what ``store_of`` gives. Without: Any.
# TorchDispatchMode: sees every op below autograd. Without: no probe, so no program of an unmodified model.
# WeakTensorKeyDictionary: tensors as keys, by identity. Without: a dry run could not keep values beside meta tensors.
# flop_registry: FLOP by op. Without: a table of our own.
# tree_iter, tree_map_only: nested arguments of any container. Without: Fabric's loops could use lists and dicts alone.

_aten = torch.ops.aten


@contextmanager
def autocast_of_meta() -> Iterator[None]:
    """Inside, a region of autocast for the meta device can be opened, and casts nothing.

    A function is put in the place of ``torch.autocast.__init__``, which refuses such a region even where it switches
    autocast off. Without: no dry run of models that open one where their tensors are, as peft's adapters of experts do.
    """
    region: Any = torch.autocast
    begin = region.__init__

    def elsewhere(self: Any, device_type: str, *given: Any, **named: Any) -> None:
        begin(self, "cpu" if device_type == "meta" else device_type, *given, **named)

    region.__init__ = elsewhere
    try:
        yield
    finally:
        region.__init__ = begin


# ---- processes


def store_of(name: str) -> "Store":
    """A part, by name, of the key-value store that ``init_process_group`` was given or has made, with a connection of
    its own.

    Without: ranks would need a store of their own, which ends with the rank that has it: nobody could say who failed.
    """
    from torch.distributed import distributed_c10d  # not every build of torch has it

    store: Store = distributed.PrefixStore(name, distributed_c10d._get_default_store()).clone()  # type: ignore[attr-defined]
    return store


def around_waits(around: Callable[[Any, Callable[[timedelta], Any], timedelta], Any]) -> None:
    """Have each wait for what a process group does made by ``around``, which is given the work, the wait itself, and
    how long that is to wait at most; 0: as long as the group does.

    A function is put in the place of ``Work.wait``. Without: who waits for a rank that is gone in a library's own
    collective would do so until torch's timeout, half an hour.
    """
    wait = distributed.Work.wait

    def made_by(work: Any, timeout: timedelta = timedelta(0)) -> Any:
        return around(work, partial(wait, work), timeout)

    distributed.Work.wait = made_by  # type: ignore[method-assign, assignment]


# ---- tensors


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage while it lives, on the meta device too, where all have the address 0.

    Without: views could not be told from copies, so neither what a graph keeps of a weight nor a block's own memory.
    """
    return int(tensor.untyped_storage()._cdata)


def is_held_elsewhere(tensor: torch.Tensor) -> bool:
    """True if something besides this tensor refers to its memory: a view of it, or a graph that has saved one.

    Without: what comes from another rank could not be put where what has come before was, as a block may keep that.
    """
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # the tensor, and what this looks by


def generator_key(generator: torch.Generator) -> int:
    """The identity of a generator of random numbers, which ops are handed in a new object each time.

    Without: one that two stretches of a model's own code draw from could not be told from two.
    """
    return int(generator._cdata)  # type: ignore[attr-defined]


def version(tensor: torch.Tensor) -> int:
    """The number of times that a tensor was changed in place; 0 of one made in inference mode, which nobody may change.

    Without: an input that changes between a block and its recomputation would give other numbers, and no error.
    """
    return 0 if tensor.is_inference() else int(tensor._version)


def is_view(tensor: torch.Tensor) -> bool:
    """True if autograd knows a tensor as a view of another one, which keeps that one's storage alive.

    Without: saved activations would be moved whose memory does not become free.
    """
    return tensor._base is not None


VIEW_QUESTION = torch.Tensor._is_view.__name__
"""The name of the function that asks a tensor whether it is a view, as torch's own code does.

Without: that would count as a look at values, and be refused for a weight that is away."""


def is_view_of_parameter(tensor: torch.Tensor) -> bool:
    """True if autograd knows a tensor as a view of a parameter.

    Without: a view of a weight that passes between blocks would be read when the weight has left.
    """
    return isinstance(tensor._base, nn.Parameter)


def gradient_hooks(tensor: torch.Tensor) -> Mapping[int, Any]:
    """The hooks of ``register_hook`` on a tensor, by the ids of their handles, in order.

    Without: the tape's own hook could run before the user's, which may replace the gradient.
    """
    return tensor._backward_hooks or {}


def accumulation_hooks(parameter: nn.Parameter) -> Mapping[int, Any]:
    """The hooks of ``register_post_accumulate_grad_hook`` on a parameter.

    Without: a hook that waits for ``.grad`` would never be called, and nobody would say so.
    """
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def new_wrapper(cls: type[Any], like: torch.Tensor, device: torch.device) -> Any:
    """A tensor of a subclass that has ``like``'s shape and dtype, and no memory.

    Without: a stand-in for logits would take the memory that it is there to save.
    """
    return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)


no_functions = torch._C._disabled_torch_function_impl
"""As ``__torch_function__`` of a subclass: it sees ops, and no functions of torch.

Without: what is not computed would be looked for in a function's results that are there."""


# ---- optimizers


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Leave the mark by which a learning rate schedule knows that ``optimizer.step`` was called before its own
    ``step``.

    Without: it warns of the wrong order at its first step.
    """
    setattr(optimizer, "_opt_called", True)  # noqa: B010 - torch sets it by the same detour


def hooks_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The registries of an optimizer's hooks, by the attributes that hold them.

    Without: one that stands for another could not be hooked on to, nor stepped once anybody has copied one of its kind.
    """
    return {key: value for key, value in vars(optimizer).items() if key.endswith("_hooks")}


# ---- autograd


def number_of(node: Node) -> int:
    """The number of an autograd node: of two of one thread the later one has the larger.

    Without: a graph could not be cut into the parts that belong to stages.
    """
    return int(node._sequence_nr())


def next_number() -> int:
    """The number that the next autograd node of this thread will get. Without: as ``number_of``."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def is_of_python(node: Node) -> bool:
    """True if a backward written in Python runs at a node, which may keep anything, and look at it at any time.

    Without: such a node between a product and its weights could read these where they have left.
    """
    return isinstance(node, BackwardCFunction)


def saved_tensor_hooks() -> Any:
    """The innermost pair of ``saved_tensors_hooks`` of this thread, None if there is none.

    Without: a block inside of ``torch.utils.checkpoint`` would be recomputed twice, and its tensors kept by others.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_in_transform() -> bool:
    """True if a transform of ``torch.func`` is under way. Without: blocks inside of one would be cut out of it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_in_forward_ad() -> bool:
    """True if forward-mode differentiation is under way. Without: tangents would be lost at blocks."""
    return forward_ad._current_level >= 0


# ---- modes


def function_modes() -> int:
    """The number of modes for functions of torch that are on in this thread.

    Without: a forward suspended inside of one would change what other micro-batches compute.
    """
    return torch._C._len_torch_function_stack()


def dispatch_modes() -> int:
    """The number of modes for ops that are on in this thread. Without: as ``function_modes``."""
    return torch._C._len_torch_dispatch_stack()


def caches_parametrizations() -> bool:
    """True within ``torch.nn.utils.parametrize.cached()``.

    Without: a micro-batch would compute with a weight out of another one's graph.
    """
    return parametrize._cache_enabled > 0


def is_watched() -> bool:
    """True if a mode sees the ops of this thread. Without: a probe would see compiled code, which has no ops."""
    return _get_current_dispatch_mode() is not None


def unwatched() -> AbstractContextManager[Any]:
    """Inside, no mode sees ops. Without: a probe would count its own work as the model's."""
    return _disable_current_modes()


def without_functions() -> AbstractContextManager[Any]:
    """Inside, no mode or subclass sees functions of torch. Without: as ``unwatched``."""
    return torch._C.DisableTorchFunction()


def functions_as_now() -> Callable[[], None]:
    """A function that has modes and subclasses see functions of torch as they do now, in the thread that is running.

    Without: an interrupt that comes between the last line within ``without_functions`` and its end, which Python then
    leaves out, would have the next call's losses not seen.
    """
    native: Any = torch._C
    return partial(native._set_torch_function_state, native._get_torch_function_state())


def without_transforms() -> AbstractContextManager[Any]:
    """Inside, no transform of ``torch.func`` wraps what is made.

    Without: weights that a probe brings while one is under way would be the transform's.
    """
    return temporarily_clear_interpreter_stack()


def without_subclasses() -> AbstractContextManager[Any]:
    """Inside, subclasses do not see functions of torch. Without: ``shape`` of a stand-in would call itself."""
    return torch._C.DisableTorchFunctionSubclass()


# ---- switches

FP32_PRECISIONS: tuple[tuple[Callable[[], str], Callable[[str], object]], ...] = tuple(
    (partial(torch._C._get_fp32_precision_getter, *of), partial(torch._C._set_fp32_precision_setter, *of))
    for of in (
        *(("generic", "all"), ("cuda", "all"), ("mkldnn", "all")),
        *((backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")),
    )
)
"""Getter and setter of each ``fp32_precision`` of torch's backends and their ops, those first that others fall back to.
The public names take seven times as long, and that of all of ``mkldnn`` sets another.

Without: a precision that a forward sets around its blocks would hold for other micro-batches, too.
"""


def product_rounding() -> tuple[Any, ...]:
    """Permissions of products to add up in less than fp32: with fp16, with bf16, and with fp16 in fp16.

    Without: as ``FP32_PRECISIONS``; the public names take ten times as long.
    """
    return (
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
    )


def set_product_rounding(value: tuple[Any, ...]) -> None:
    """Set what ``product_rounding`` reads. Without: as that."""
    fp16, bf16, accumulation = value
    torch._C._set_cublas_allow_fp16_reduced_precision_reduction(*fp16)
    torch._C._set_cublas_allow_bf16_reduced_precision_reduction(*bf16)
    torch._C._set_cublas_allow_fp16_accumulation(accumulation)


def attention_priority() -> list[int]:
    """The kernels of attention in the order in which torch tries them, which ``sdpa_kernel`` may set.

    Without: as ``FP32_PRECISIONS``.
    """
    return list(torch._C._get_sdp_priority_order())


def set_attention_priority(value: list[int]) -> None:
    """Set what ``attention_priority`` reads. Without: as that."""
    torch._C._set_sdp_priority_order(value)


def is_multithreading_enabled() -> bool:
    """True if a backward may use several threads (``torch.autograd.set_multithreading_enabled``).

    Without: as ``FP32_PRECISIONS``.
    """
    return torch._C._is_multithreading_enabled()


# ---- ops

GROUPED_MM = _aten._grouped_mm
"""The product of mixtures of experts. Without: a dry run in fp32 would fail, and its FLOP would be none."""

FLASH_CPU = _aten._scaled_dot_product_flash_attention_for_cpu
FLASH_CPU_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
FLASH = _aten._scaled_dot_product_flash_attention
FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward
EFFICIENT = _aten._scaled_dot_product_efficient_attention
"""Kernels of attention. Without: a dry run would have the memory of attention's plain path, quadratic in length."""

COPY_TO = _aten._to_copy
"""A copy of another dtype or on another device. Without: a model's ``.to(device)`` would be no wait for the device."""

HANDING_ON = (_aten._unsafe_view, _aten._reshape_alias, COPY_TO)
"""Ops whose results have the numbers of what they are given. Without: a reshaped product would count as read."""

_FLASH_CHOICE = 1
"""``torch._C._SDPBackend.FLASH_ATTENTION``, as ``torch._fused_sdp_choice`` returns it."""


def takes_flash(*args: Any, **kwargs: Any) -> bool:
    """True if torch takes the flash kernel for these arguments of ``scaled_dot_product_attention``, on their device.

    Without: as the kernels.
    """
    return bool(torch._fused_sdp_choice(*args, **kwargs) == _FLASH_CHOICE)


@contextmanager
def attention_by(attend: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Inside, functions of torch that call ``scaled_dot_product_attention`` themselves call ``attend`` in its place.

    Without: a dry run of ``MultiheadAttention`` would take the plain path, as modes are off within a function.
    """
    before = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def packet_of(func: Any) -> Any:
    """The op that an overload belongs to, such as ``aten.add`` of ``aten.add.Tensor``.

    Without: a table of FLOP for every overload.
    """
    return func._overloadpacket


def schema_of(func: Any) -> Any:
    """An op's schema, which says which of its arguments it writes to; None if it has none.

    Without: a write to a weight or a buffer in a forward would not be seen.
    """
    return getattr(func, "_schema", None)


# ---- torch.compile


@contextmanager
def compilations(most: int) -> Iterator[None]:
    """Inside, code is compiled at most ``most`` times, and once more is an error.

    Raises:
        RecompiledError: it was asked for once more.
        NotCompiledError: torch cannot compile it.

    Without: what is compiled too often would run uncompiled, slower and with other bits, and nobody would say so.
    """
    import torch._dynamo.config as dynamo
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        with dynamo.patch(recompile_limit=most, fail_on_recompile_limit_hit=True):
            yield
    except FailOnRecompileLimitHit as error:
        raise RecompiledError(str(error)) from error
    except TorchDynamoException as error:
        raise NotCompiledError(str(error)) from error


class RecompiledError(Exception):
    """Code was to be compiled more often than allowed; the text is torch's."""


class NotCompiledError(Exception):
    """torch cannot compile some code; the text is torch's."""


class Placeholder(torch.Tensor):
    """A tensor without numbers: what may be asked of it is its shape and the like. Any op that is handed one refuses,
    also where it lies in a list of the op's arguments.

    Without: as ``placeholder``.
    """

    penstock_refuse: Callable[[], None]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for value in tree_iter((args, kwargs or {})):
            if isinstance(value, cls):
                value.penstock_refuse()
        raise AssertionError(f"{func} was handed no placeholder")


def placeholder(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    refuse: Callable[[], None],
) -> torch.Tensor:
    """A tensor that can be handed on, and asked for its shape and the like. ``refuse`` is called by any other use, and
    raises an error.

    Without: a rank of a pipeline would have to know which of the model's lines compute with what another rank has.
    """
    made: Any = torch.Tensor._make_wrapper_subclass(
        Placeholder, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
    )
    made.penstock_refuse = refuse
    assert isinstance(made, torch.Tensor)
    return made
