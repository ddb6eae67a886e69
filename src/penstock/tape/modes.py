"""torch's switches of a thread, captured and applied again."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Modes:
    """torch's thread-local switches, which a greenlet must carry by itself."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool

    @classmethod
    def capture(cls, device_types: tuple[str, ...]) -> "Modes":
        return cls(
            grad=torch.is_grad_enabled(),
            autocast=tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types),
            autocast_cache=torch.is_autocast_cache_enabled(),
        )

    def apply(self) -> None:
        # A cast weight that autocast remembered would outlive the weight that it was cast from.
        if any(enabled or torch.is_autocast_enabled(device_type) for device_type, enabled, _ in self.autocast):
            torch.clear_autocast_cache()
        torch.set_grad_enabled(self.grad)
        for device_type, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
