"""torch's switches, which a suspended forward must carry by itself: captured and applied again.

Some belong to a thread (grad mode, autocast), some to the process (the default dtype, which kernels are allowed, where
Python prints and warns), and ``training`` to each module. What cannot be carried, as it is a stack that others go on
building on, is refused where a block is called inside of it.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import nn

from penstock.compat import torch as private
from penstock.compat.python import listening, set_listening
from penstock.errors import ModelError

_Switch = tuple[Callable[[], Any], Callable[[Any], object]]


def _attribute(module: Any, name: str) -> _Switch:
    return partial(getattr, module, name), partial(setattr, module, name)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _nesting() -> int:
    """The number of autocast's regions that are open. The one that leaves none forgets all cast weights."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_nesting(value: int) -> None:
    for _ in range(_nesting(), value):
        torch.autocast_increment_nesting()
    for _ in range(value, _nesting()):
        torch.autocast_decrement_nesting()


def _older(switch: _Switch) -> _Switch:
    """A switch by its older name, None where newer names have set what this has no word for: torch raises there."""
    read, set_to = switch

    def read_or_none() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    def set_if_known(value: Any) -> None:
        if value is not None:
            set_to(value)

    return read_or_none, set_if_known


def _anomalies() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomalies(value: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(value[0], check_nan=value[1])


_CUDA: Any = torch.backends.cuda
_SWITCHES: tuple[_Switch, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, _set_deterministic),
    (_nesting, _set_nesting),
    (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    (_CUDA.fp16_bf16_reduction_math_sdp_allowed, _CUDA.allow_fp16_bf16_reduction_math_sdp),
    (private.attention_priority, private.set_attention_priority),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    *(_attribute(torch.backends.mkldnn, name) for name in ("enabled", "deterministic")),
    (private.product_rounding, private.set_product_rounding),
    # Older names before the newer ones, of which each sets several.
    _older((torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)),
    _older(_attribute(torch.backends.cudnn, "allow_tf32")),
    *private.FP32_PRECISIONS,
)
"""Switches of the whole process that decide numbers: how each is read, and how it is set."""

_BESIDE: tuple[_Switch, ...] = (
    (_anomalies, _set_anomalies),
    (private.is_multithreading_enabled, torch.autograd.set_multithreading_enabled),
    (torch.get_num_threads, torch.set_num_threads),
)
"""Switches that decide no number of a call: debugging, and threads."""


_NO_MODULE = frozenset[nn.Module]()


class _Asked:
    """The attributes of a module whose ``training`` is none of its own, as that of one that ``torch.compile`` wraps."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)


class TrainingFlags:
    """``training`` of modules that a forward may switch (``train()``, ``eval()``), as it was when this was made."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [*dict.fromkeys(modules)]
        # Read without the modules, of which a probe hears of each look at an attribute: a deep model has thousands.
        self._attributes = [
            _Asked(module) if hasattr(type(module), "training") or "training" not in vars(module) else vars(module)
            for module in self._modules
        ]
        self._before = self._now()
        self.seen: set[nn.Module] = set()
        """Modules that were switched when somebody asked."""

    def switched(self) -> frozenset[nn.Module]:
        """The modules that are in the other mode now."""
        now = self._now()
        if now == self._before:  # as nearly always; this is asked at each call of a block, of all modules of the model
            return _NO_MODULE
        found = frozenset(compress(self._modules, map(operator.ne, now, self._before)))
        self.seen |= found
        return found

    def _now(self) -> list[bool]:
        return [attributes["training"] for attributes in self._attributes]

    def switch(self, modules: frozenset[nn.Module]) -> None:
        """Put these modules into the other mode, and the rest into the one that they were in."""
        for module, before in zip(self._modules, self._before, strict=True):
            training = before != (module in modules)
            if module.training != training:
                module.training = training


@dataclass(frozen=True, kw_only=True)
class Modes:
    """torch's switches as they stand at one place of a forward. ``switched``: as of ``TrainingFlags``. ``beside``, and
    ``python``'s of its own, make no difference between two calls."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    switches: tuple[Any, ...]
    switched: frozenset[nn.Module]
    beside: tuple[Any, ...] = field(compare=False)
    python: tuple[Any, ...] = field(compare=False)

    @classmethod
    def capture(cls, device_types: tuple[str, ...], flags: TrainingFlags) -> "Modes":
        return cls(
            grad=torch.is_grad_enabled(),
            autocast=tuple([(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types]),
            autocast_cache=torch.is_autocast_cache_enabled(),
            switches=tuple([read() for read, _ in _SWITCHES]),
            switched=flags.switched(),
            beside=tuple([read() for read, _ in _BESIDE]),
            python=listening(),
        )

    def printing_as(self, other: "Modes") -> "Modes":
        """These, but for where Python prints: a file that a call has printed to may be closed when it runs again."""
        return replace(self, python=(*other.python[:2], *self.python[2:]))

    def apply(self, flags: TrainingFlags, now: "Modes") -> None:
        """Switch to these. ``now``: as they stand."""
        torch.clear_autocast_cache()  # a cast weight would outlive the weight that it was cast from
        torch.set_grad_enabled(self.grad)
        for device_type, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        if self.switches != now.switches:
            _set(_SWITCHES, self.switches)
        if self.beside != now.beside:
            _set(_BESIDE, self.beside)
        if any(mine is not other for mine, other in zip(self.python, now.python, strict=True)):
            set_listening(self.python)
        if self.switched != now.switched:
            flags.switch(self.switched)


def _set(switches: tuple[_Switch, ...], values: tuple[Any, ...]) -> None:
    """Set those that are others. Each is read again, as setting one may set others that fall back to it."""
    for (read, set_to), value in zip(switches, values, strict=True):
        if read() != value:
            set_to(value)


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """The heights of torch's stacks of a thread. What is on them is in effect for whoever runs, so a forward that is
    suspended with something of its own on one of them would change what the others compute.
    """

    function_modes: int
    dispatch_modes: int
    saved_tensors: Any

    @classmethod
    def capture(cls) -> "Stacks":
        return cls(
            function_modes=private.function_modes(),
            dispatch_modes=private.dispatch_modes(),
            saved_tensors=private.saved_tensor_hooks(),
        )


def refuse_stacked(name: str, before: Stacks) -> None:
    """Raise ModelError when block ``name`` is called inside of what a suspended forward cannot carry.

    ``before``: when the forward was last resumed.
    """
    now = Stacks.capture()
    if torch.is_inference_mode_enabled():
        what, instead = "torch.inference_mode()", "use torch.no_grad(), whose outputs training can go on with"
    elif private.is_in_transform():
        what, instead = "a transform of torch.func (grad, vmap, jvp)", "transform what is inside of a block, or none"
    elif private.is_in_forward_ad():
        what, instead = "forward-mode differentiation", "use it inside of a block, or not at all"
    elif private.caches_parametrizations():
        what, instead = "torch.nn.utils.parametrize.cached()", "use it inside of a block, or not at all"
    elif now.saved_tensors != before.saved_tensors:
        what = "saved_tensors_hooks (torch.utils.checkpoint, save_on_cpu)"
        instead = "leave them out: Penstock recomputes blocks by itself, and the budget says where activations live"
    elif now.function_modes != before.function_modes:
        what, instead = "a mode for torch functions, such as `with torch.device(...)`", "end it before the call"
    elif now.dispatch_modes != before.dispatch_modes:
        what, instead = "a mode that watches or changes torch's operations", "end it before the call"
    else:
        return
    raise ModelError(
        f"block {name!r} is called inside of {what}, which would be in effect for other micro-batches, too: {instead}"
    )
