"""Copies between host and device with a cast on the device, so that what crosses the link is of the dtype it needs.

Where the cast is done changes no bit: ``kernels.cast`` rounds the same on every device, and so does the optimizer when
it rounds a gradient as it reads it. See ``docs/numerics.md``.
"""

import torch

from penstock.optim import kernels


def copy_cast(target: torch.Tensor, source: torch.Tensor, staging: torch.Tensor | None) -> None:
    """``target`` becomes ``source`` in its own dtype; the cast is done on the device, on the current stream.

    From a device, ``source`` is rounded into ``staging``, which crosses; to a device, ``source`` crosses as it is into
    ``staging`` and is rounded there. Between the two ends nothing waits: neither end nor ``staging`` may be used by
    anything that is not ordered behind the current stream. Where host and device are one memory, the cast is the copy,
    needs no ``staging``, and runs in the calling thread: a lane that copies must not wait for the optimizer's threads.

    Args:
        target, source: [n] of fp32, bf16 or fp16, at most one of them on an accelerator. The other is page-locked.
        staging: [n] on that accelerator, of the dtype that crosses: ``target``'s from it, ``source``'s to it.

    Raises:
        ValueError: ``staging`` is missing where it is needed, there where it is not, or does not fit.
    """
    if source.device == target.device:
        if staging is not None:
            raise ValueError(f"staging: must be None where source and target are both on {source.device}")
        kernels.cast(target, source)
        return
    down = target.device.type == "cpu"
    device, dtype = (source.device, target.dtype) if down else (target.device, source.dtype)
    if staging is None or (staging.device, staging.dtype, staging.numel()) != (device, dtype, target.numel()):
        found = "None" if staging is None else f"{list(staging.shape)} {staging.dtype} on {staging.device}"
        raise ValueError(f"staging is {found}: must be {target.numel()} elements of {dtype} on {device}")
    if down:
        kernels.cast(staging, source)
        target.copy_(staging, non_blocking=True)
    else:
        staging.copy_(source, non_blocking=True)
        kernels.cast(target, staging)
