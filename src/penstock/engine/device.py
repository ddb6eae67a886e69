"""Which device computes."""

import torch

from penstock.errors import ConfigError
from penstock.hardware.machine import DeviceKind


def resolve_device(asked: torch.device | str | None) -> torch.device:
    """The device to compute on, with its index.

    Raises:
        ConfigError: it is neither the CPU nor a GPU that CUDA sees.
    """
    if asked is None:
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise ConfigError(f"device={asked!r} is no device: use 'cpu' or 'cuda'") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"device={asked!r}: only 'cpu' and 'cuda' are supported")
    index: int | None = device.index
    if not torch.cuda.is_available() or (index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={asked!r}: CUDA sees {torch.cuda.device_count()} GPUs. Use another, or device='cpu'")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def kind_of(device: torch.device) -> DeviceKind:
    """The kind of a device that ``resolve_device`` has found."""
    return "cpu" if device.type == "cpu" else "cuda"
