"""The engine's optimizer in the hands of a loop that is not ours, which calls ``step`` and ``zero_grad`` itself."""

from collections.abc import Callable
from typing import Any

import torch

from penstock.compat.torch import hooks_of
from penstock.optim.facade import StreamedOptimizer


class DrivenOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose ``step`` calls back: whoever made it knows which micro-batches are due.

    Everything else is the engine's own optimizer: its live param groups, its settings as ``state_dict``.

    Args:
        streamed: the engine's optimizer.
        step: takes what has been collected to the engine, or checks that it has been taken there.
        discard: forgets what has been collected; None: nothing ever waits.
    """

    is_engines = True
    """As of ``StreamedOptimizer``."""

    def __init__(
        self, streamed: StreamedOptimizer, step: Callable[[], None], discard: Callable[[], None] | None = None
    ) -> None:
        # Not the parent's: it would build param groups of its own. What a learning rate scheduler looks at is here, and
        # hooks: those of a step are called around it, those of a state_dict by the engine's own optimizer.
        self.streamed = streamed
        super().__setstate__({"defaults": dict(streamed.defaults), **hooks_of(streamed)})
        self._step = step
        self._discard = discard

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.streamed.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.streamed.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.streamed.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Let the step that has been collected happen.

        Raises:
            ValueError: a closure was given; the engine runs forward and backward itself, once.
        """
        if closure is not None:
            raise ValueError("optimizer.step(closure) cannot be honoured: the engine runs forward and backward itself")
        self._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the micro-batches whose gradients would have been there by now; parameters never have any."""
        if self._discard is not None:
            self._discard()

    def state_dict(self) -> dict[str, Any]:
        return self.streamed.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.streamed.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.streamed.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"DrivenOptimizer({self.streamed!r})"
