"""The device that computes."""

import logging
from functools import cache

import torch
from torch import nn

from penstock import accelerator
from penstock.compat.torch import storage_key
from penstock.config import Budget, format_size
from penstock.errors import BudgetError, ConfigError
from penstock.hardware.machine import DeviceKind
from penstock.optim.agreement import other_bits
from penstock.optim.formula import KINDS

log = logging.getLogger("penstock")


def resolve_device(asked: torch.device | str | None) -> torch.device:
    """The device to compute on, with its index.

    Raises:
        ConfigError: it is neither the CPU nor a GPU that CUDA sees.
    """
    if asked is None:
        asked = accelerator.found() or "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise ConfigError(f"device={asked!r} is no device: use 'cpu' or 'cuda'") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type not in accelerator.KINDS:
        raise ConfigError(
            f"device={asked!r}: only 'cpu' and 'cuda' are supported, and nobody has run Penstock on {device.type!r} yet"
        )
    index: int | None = device.index
    count = accelerator.KINDS[device.type].count()
    if (index or 0) >= count:
        raise ConfigError(f"device={asked!r}: {device.type.upper()} sees {count} GPUs. Use another, or device='cpu'")
    return torch.device(device.type, torch.accelerator.current_device_index() if index is None else index)


def check_room(device: torch.device, budget: Budget, model: nn.Module) -> None:
    """Check that a device has what the budget gives of it. What a ``model`` that is there takes is given back.

    Raises:
        BudgetError: less is free.
    """
    if device.type == "cpu":
        return
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.device == device]
    given_back = {storage_key(t): t.untyped_storage().nbytes() for t in tensors}
    room, memory = accelerator.room(device) + sum(given_back.values()), accelerator.of(device).memory(device)[1]
    if budget.device_bytes > room:
        raise BudgetError(
            f"budget.device={budget.device}: {format_size(room)} ({room} bytes) of the {format_size(memory)} of "
            f"{device} are free for it, beside what the device itself, its libraries and other programs take. Lower "
            "budget.device to that, or end what holds memory there"
        )


def free_room() -> int | None:
    """Bytes that a budget may have of the accelerator that is there; None: there is none."""
    device = resolve_device(None)
    return None if device.type == "cpu" else accelerator.room(device)


def kind_of(device: torch.device) -> DeviceKind:
    """The kind of a device that ``resolve_device`` has found."""
    return "cpu" if device.type == "cpu" else "cuda"


def name_of(device: torch.device) -> str:
    """A device's name for people."""
    return "the processor" if device.type == "cpu" else accelerator.of(device).name(device)


@cache
def warn_of_other_bits(device: torch.device, optimizer: str) -> None:
    """Say so, once, if steps of an optimizer (``"adamw.bf16"``) on the device do not have the host's bits."""
    kind, precision, *moments = optimizer.split(".")
    if other_bits(device, [k for k in KINDS if k == kind], [precision], moments or ["fp32"]):
        log.warning(
            "%s steps on this device differ from the host's in some bits, so where the optimizer state lives changes "
            "the numbers: budget.state='host' or 'disk' keeps it on one side",
            optimizer,
        )
