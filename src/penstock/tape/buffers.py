"""A module's buffers as they were before code ran that may change them: which ones it has changed, and all put back."""

from dataclasses import dataclass

import torch
from torch import nn

from penstock.compat.torch import buffers_of, version


@dataclass(frozen=True, kw_only=True)
class BufferBefore:
    """A buffer with its owner, its name there and within all, a copy of its value, and how often it had been written
    to. One that the owner has declared may hold nothing yet (None)."""

    module: nn.Module
    name: str
    path: str
    tensor: torch.Tensor | None
    value: torch.Tensor | None
    version: int

    def has_changed(self) -> bool:
        now = buffers_of(self.module)[self.name]
        if now is None or self.value is None or now is not self.tensor:
            return now is not self.tensor
        # Written to is changed, also where that has left the same value: in another micro-batch it may not.
        return version(now) != self.version or not (now.is_meta or torch.equal(now, self.value))

    def put_back(self) -> None:
        buffers_of(self.module)[self.name] = self.tensor
        if self.tensor is not None and self.value is not None:
            with torch.no_grad():
                self.tensor.copy_(self.value)


def buffers_before(module: nn.Module) -> list[BufferBefore]:
    """All buffers of a module and those within it, as they are now."""
    return [
        BufferBefore(
            module=owner,
            name=name,
            path=f"{path}.{name}" if path else name,
            tensor=buffer,
            value=None if buffer is None else buffer.clone(),
            version=0 if buffer is None else version(buffer),
        )
        for path, owner in module.named_modules()
        for name, buffer in buffers_of(owner).items()
    ]
