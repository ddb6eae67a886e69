"""Private names of Lightning Fabric: the steps of a strategy that it has no public names for."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from lightning_fabric import fabric
from lightning_fabric.plugins.precision import Precision
from lightning_fabric.strategies.single_device import SingleDeviceStrategy
from lightning_fabric.utilities.apply_func import convert_to_tensors
from lightning_fabric.utilities.distributed import _all_gather_ddp_if_available, _sync_ddp_if_available
from lightning_fabric.wrappers import _FabricModule, _unwrap_compiled
from torch import distributed as dist
from torch import nn

from penstock.compat.torch import tree_map_only

__all__ = ["OneDevice", "Precision", "drop_by", "note_compiled", "resolve_first"]
# Precision: a plugin by which Fabric converts nothing. Without: the same class, as ``lightning_fabric.plugins`` has it.


def resolve_first(kind: type, value_of: Callable[[Any], Any]) -> None:
    """Have values of a kind taken for what they stand for, where Fabric tells other processes of them.

    A function is put in the place of Fabric's ``convert_to_tensors``. Without: it would leave them as they are, and
    each process would go on with its own.
    """

    def converted(data: Any, device: torch.device | str | int) -> Any:
        return convert_to_tensors(tree_map_only(kind, value_of, data), device)

    vars(fabric)["convert_to_tensors"] = converted


def drop_by(kind: type[nn.Module]) -> None:
    """Have ``model.zero_grad()`` of what ``fabric.setup`` has returned be that of the module within, of a ``kind``.

    A function is put in the place of what ``_FabricModule`` inherits. Without: losses whose gradients a loop has
    dropped so would count in the next step.
    """

    def zero_grad(model: _FabricModule, set_to_none: bool = True) -> None:
        within, _ = _unwrap_compiled(model._forward_module)
        if isinstance(within, kind):
            within.zero_grad(set_to_none)
        else:
            nn.Module.zero_grad(model, set_to_none)

    _FabricModule.zero_grad = zero_grad  # type: ignore[method-assign, assignment]


def note_compiled() -> Callable[[nn.Module], bool]:
    """A function that tells, once, of the module that a strategy is to set up if ``fabric.setup`` has it compiled.

    A function is put in the place of Fabric's ``_unwrap_compiled``, after which a strategy has the module within, and
    before which Fabric compiles what the strategy returns. Without: torch would compile how a loop is recorded, and
    nothing of the model.
    """
    last: list[weakref.ref[nn.Module]] = []

    def unwrapped(given: Any) -> tuple[Any, dict[str, Any] | None]:
        module, compile_kwargs = _unwrap_compiled(given)
        last[:] = [] if compile_kwargs is None else [weakref.ref(module)]
        return module, compile_kwargs

    vars(fabric)["_unwrap_compiled"] = unwrapped
    return lambda module: bool(last) and last.pop()() is module


class OneDevice(SingleDeviceStrategy):
    """A strategy on one device in each of ``world_size`` processes. Fabric may give it several: ``check_devices`` says
    no, or which process this is.

    Without: each of several processes would take itself for the only one. ``fabric.all_reduce`` would return its own
    value, and all of them would write what one is to write.
    """

    num_nodes = 1
    _num_nodes = 1
    """The number of hosts, which Fabric sets. Without: more than one host would be taken for one."""

    @property
    def host_count(self) -> int:
        return self._num_nodes

    def check_devices(self) -> None:
        """To be overridden. Raises: whatever is to be said about devices that cannot be used."""
        raise NotImplementedError

    # ---- several processes, each of which deals with the others as under Fabric's own strategies

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return _sync_ddp_if_available(tensor, group, reduce_op) if self.world_size > 1 else tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return _all_gather_ddp_if_available(tensor, group, sync_grads) if self.world_size > 1 else tensor

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.world_size > 1:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.world_size == 1:
            return obj
        found = [obj]
        dist.broadcast_object_list(found, src)
        return found[0]

    def _configure_launcher(self) -> None:
        """Called once Fabric has set the devices, and before any process is started.

        Without: several devices would be found out about only where the model is set up.
        """
        self.check_devices()

    def plain(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state with ``state_dict()`` of all that has one, as Fabric's own strategies save it.

        Without: schedulers and the like would be pickled whole.
        """
        return self._convert_stateful_objects_in_state(state, filter={})
