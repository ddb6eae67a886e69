"""The global norm of the gradients, from the sums of squares of their parts."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.optim.norm import grad_norm
from penstock.runtime.access import Access
from penstock.runtime.stepping import Stepping
from penstock.schedule.ir.ops import Op
from penstock.schedule.program import ALIGN


class Norm:
    """Collects the parts where they are computed, and adds them up in one order."""

    def __init__(self, access: Access, stepping: Stepping) -> None:
        self._to = access
        self._stepping = stepping
        self._on_device: dict[int, torch.Tensor] = {}

    def kinds(self) -> dict[str, Callable[[Op], None]]:
        return {"NG": self.of_chunk, "ND": self.of_group, "NORM": self.judge}

    def of_chunk(self, op: Op) -> None:
        """The sums of a chunk in host memory."""
        c = self._to.bound.chunk(op)
        partials = self._to.partials(op.id.group, c.start, c.numel)
        self._stepping.partial_norms(self._to.gradient(op, op.reads[0]), partials)

    def of_group(self, op: Op) -> None:
        """The sums of a group whose gradient is on the device."""
        g = op.id.group
        gradient = self._to.view(op.reads[0], self._to.bound.group(op).trainable)
        if gradient.device.type == "cpu":
            self._stepping.partial_norms(gradient, self._to.context.partials[g])
        else:
            self._on_device[g] = self._stepping.fold_squares(gradient)

    def in_passing(self, g: int, start: int, gradient: torch.Tensor) -> NDArray[np.float64] | torch.Tensor:
        """The array that a step that reads a group's gradient from element ``start`` on writes the sums to as it does.
        On an accelerator it is the whole group's, and they stay there until the norm is wanted."""
        if gradient.device.type == "cpu":
            return self._to.partials(g, start, gradient.numel())
        self._on_device[g] = torch.empty(gradient.numel() // ALIGN, dtype=torch.float64, device=gradient.device)
        return self._on_device[g]

    def bring(self) -> None:
        """Bring the sums that are on an accelerator to the others."""
        for g, partials in self._on_device.items():
            self._to.context.partials[g][:] = partials.cpu().numpy()
        self._on_device.clear()

    def judge(self, op: Op | None = None) -> None:
        """Add up the sums of all groups: the norm, the factor that every gradient is multiplied by, and whether the
        step is skipped are known from here on."""
        context = self._to.context
        self.bring()
        norm = grad_norm(context.partials[g] for g in sorted(context.partials)) / context.loss_scale
        context.judge(norm, speculative=self._to.bound.schedule.speculative)

    def forget(self) -> None:
        """A step was broken off."""
        self._on_device.clear()
