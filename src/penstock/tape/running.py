"""Runs one stage of one suspended forward at a time, forward or backward, and hands out the gradients that appear.

Each run draws its own random numbers: before it, torch's generators are seeded for its place in training (``rng``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointError

from penstock.compat.torch import next_number
from penstock.errors import ModelError
from penstock.tape import rng
from penstock.tape.boundary import Doing
from penstock.tape.facts import StageFacts
from penstock.tape.groups import ParamGroup
from penstock.tape.parameters import GradientHooks
from penstock.tape.refusals import NOTHING_TRAINS
from penstock.tape.split import Held, NotInTwoError, Splitting
from penstock.tape.suspended import Event, SuspendedForward

OnGradient = Callable[[nn.Parameter, int, torch.Tensor], None]


class Running:
    """The stage that runs now, of a step or of a probe, and the gradients of parameters that come of it.

    ``on_gradient(parameter, stage, gradient)``: as of ``Tape``. ``doing``: what runs, for the blocks' boundaries.
    """

    def __init__(self, groups: Sequence[ParamGroup], *, seed: int, device: torch.device) -> None:
        self.on_gradient: OnGradient = _drop_gradient
        self.doing = Doing()
        self.hooks = GradientHooks(groups, self._gradient_of_segment, self._gradient_of_call)
        self._seed = seed
        self._device = device
        self._waiting: list[tuple[nn.Parameter, torch.Tensor]] = []  # gradients that half a backward has made
        self.learns = False
        """True in a probe, which finds out whose gradients come in parts (``_hand_on``)"""
        self._in_parts: set[int] = set()
        self._parts: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        self._arrived: set[int] = set()
        self._open = False
        self._train = True
        self._step = self._first = 0
        self._stage = 0  # whose backward is running

    def begin(self, step: int, *, train: bool, first: int) -> None:
        """Gradients count from here on. ``first``: the number in the whole step of the first micro-batch."""
        self._step, self._train, self._first, self._open = step, train, first, True

    def end(self) -> None:
        """Nothing runs any more: gradients are somebody else's, and a backward that was broken off leaves none."""
        if self._open and self._train:
            self.hooks.drop_gradients()
        self._open = self.learns = False
        self._waiting.clear()

    def run_code(self, suspended: SuspendedForward, stage: int) -> Event:
        """Let the model's own code run, as a stage of its own."""
        self._seed_for(suspended, stage, rng.FORWARD)
        return self.resume(suspended, stage)

    def resume(self, suspended: SuspendedForward, stage: int) -> Event:
        """Let the model's own code go on from a call that was made elsewhere."""
        suspended.backward.starts[stage] = next_number()
        return suspended.resume(stage)

    def run_call(self, suspended: SuspendedForward, stage: int, facts: StageFacts, *, goes_on: bool = False) -> Event:
        """Run the block that a forward is suspended at, and cut the graph behind it; with ``goes_on`` the model's own
        code behind that, too, up to its next event."""
        self._seed_for(suspended, stage, rng.FORWARD)
        suspended.facts = facts
        event = suspended.resume(stage, goes_on=goes_on)
        assert (event == "cut") is not goes_on
        return event

    def run_loss(self, suspended: SuspendedForward, weight: float) -> torch.Tensor:
        """Take the loss of a forward that has ended and run the epilogue backward. Returns the loss, detached."""
        loss, suspended.loss = suspended.loss, None
        assert loss is not None
        value = loss.detach()
        if self._train:
            if not loss.requires_grad:
                raise ModelError(NOTHING_TRAINS)
            root = (get_gradient_edge(loss), torch.full_like(value, weight))
            del loss
            last = max(suspended.backward.starts)
            with self._backward_of(last, "segment"):
                suspended.backward.run_code(last, root)
        return value

    def backward_code(self, suspended: SuspendedForward, stage: int) -> None:
        """Backward of the model's own code that belongs to ``stage``, if a gradient waits there."""
        if not suspended.backward.has_code(stage):
            return
        self._seed_for(suspended, stage, rng.BACKWARD)
        with self._backward_of(stage, "segment"):
            suspended.backward.run_code(stage)

    def call_elsewise(self, suspended: SuspendedForward, stage: int) -> None:
        """See ``Backward.call_elsewise``; nothing is learned on the meta device."""
        if self._device.type != "meta":
            suspended.backward.call_elsewise(stage)

    def refuse_unlike(self, suspended: SuspendedForward, stage: int, block: str) -> None:
        """In a probe, of a call that no gradient has come to, so that it is not computed again: refuse a block that
        returns other numbers where a graph is made, as it is in a plain loop."""
        if self._device.type == "meta" or stage not in suspended.backward.calls:
            return
        alike = []
        for grad in (True, False):
            self._seed_for(suspended, stage, rng.FORWARD)
            alike.append(suspended.backward.is_alike(stage, grad=grad))
        if alike == [False, True]:
            raise ModelError(
                f"block {block!r} returns other numbers where gradients are computed (it asks torch.is_grad_enabled(), "
                "or x.requires_grad of what it has computed), and its forward runs without them: ask self.training"
            )

    def backward_call(self, suspended: SuspendedForward, stage: int, splitting: Splitting | None = None) -> Held | None:
        """Recompute a block call and run it backward; with ``splitting`` the first part of that, and return the rest.

        Raises:
            NotInTwoError: this call's backward can only be run as a whole.
        """
        seed = partial(self._seed_for, suspended, stage, rng.FORWARD)
        seed()
        with self._backward_of(stage, "call" if splitting is None else "inputs"):
            held = suspended.backward.run_call(stage, seed, splitting)
        return None if held is None else self._with_waiting(held)

    def try_split(self, suspended: SuspendedForward, stage: int) -> Held | None:
        """In a probe: run the first part of a call's backward, of which nothing comes to other stages. None: it cannot
        be run in two parts, or nothing would be left to the second."""
        seed = partial(self._seed_for, suspended, stage, rng.FORWARD)
        seed()
        try:
            with self._backward_of(stage, "inputs"):
                held = suspended.backward.try_split(stage, seed)
        except (NotInTwoError, CheckpointError):  # a checkpoint within may save in other ways when it runs again
            held = None
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):  # which a transform of torch.func has no way to follow
                raise
            held = None
        if held is None or not held.products:
            self._waiting.clear()
            return None
        return self._with_waiting(held)

    def _with_waiting(self, held: Held) -> Held:
        """The rest of a backward, with the gradients of parameters that its first part has made itself."""
        held.waiting, self._waiting = self._waiting, []
        return held

    def run_held(self, suspended: SuspendedForward, stage: int, held: Held) -> None:
        """Run the second part of a call's backward, of which nothing is left then."""
        self._seed_for(suspended, stage, rng.BACKWARD)
        with self._backward_of(stage, "call"):
            while held.waiting:
                parameter, gradient = held.waiting.pop(0)
                self._hand_on(parameter, gradient)
                del gradient
            held.run()

    @contextmanager
    def _backward_of(self, stage: int, what: Literal["segment", "call", "inputs"]) -> Iterator[None]:
        self._stage, self.doing.what = stage, what
        try:
            yield
            for parameter, gradient in self._parts.values():
                self.on_gradient(parameter, stage, gradient)
        finally:
            self.doing.what = "forward"
            self._parts.clear()
            self._arrived.clear()

    def _seed_for(self, suspended: SuspendedForward, stage: int, part: int) -> None:
        rng.seed(self._seed, self._step, self._first + suspended.index, stage, part, self._device)

    # -- gradients ------------------------------------------------------------------------------------------------

    def _gradient_of_segment(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self._open or self.doing.what != "segment":
            return None
        self._hand_on(parameter, _dense(gradient))
        # What autograd hands on from here is thrown away; one element instead of the gradient lets it be freed now.
        if gradient.is_sparse:  # which would have to be replaced by a sparse one, and is small
            return None
        return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand_as(gradient)

    def _gradient_of_call(self, parameter: torch.Tensor) -> None:
        if not self._open or parameter.grad is None:
            return
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        gradient = _dense(gradient)
        if self.doing.what == "forward":
            raise ModelError(
                "backward() was called in the forward, where the gradients of weights would not be kept: add the "
                "tensor that it is called on to the loss"
            )
        if self.doing.what == "inputs":
            self._waiting.append((parameter, gradient))
        elif self.doing.what == "call":  # that of a segment has been seen before it was accumulated
            self._hand_on(parameter, gradient)

    def _hand_on(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Hand a parameter's gradient on. One that comes in parts (by a reentrant checkpoint's backward within another)
        goes on as their sum: it is a micro-batch's, which is added to those before it, or to what they add up to later.
        """
        key = id(parameter)
        if key in self._in_parts:
            known = self._parts.get(key)
            self._parts[key] = parameter, gradient if known is None else known[1] + gradient
            return
        if self.learns:
            if key in self._arrived:
                self._in_parts.add(key)
            self._arrived.add(key)
        self.on_gradient(parameter, self._stage, gradient)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a plain tensor: ``nn.Embedding(sparse=True)`` makes sparse ones."""
    if gradient.is_sparse and gradient.is_meta:  # of which torch makes none
        return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _drop_gradient(parameter: nn.Parameter, stage: int, gradient: torch.Tensor) -> None:
    raise AssertionError("Tape.on_gradient is not set")
