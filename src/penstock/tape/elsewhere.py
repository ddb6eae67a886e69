"""A tape's side of a pipeline: what its stages are handed by other ranks, and put out for them.

*Rank 0* runs the model's own code. A call of a block that another rank has is not made: it returns a *placeholder*,
which can be handed to the next block and is an error in any other use. So the code runs ahead to the next call of this
rank, whose input is put in the placeholder's place when it has come; or it stays at the last of the others' calls, and
goes on with what that has put out. *Other ranks* have no code of the model: they make the calls of their own blocks one
after the other, as the probe saw them made (``handed``).

A graph begins at what has come, and the gradient that arrives there goes back to where it came from. All of this is the
compute thread's, but for ``take`` and ``put``: what is to cross, and what has crossed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from penstock.compat.torch import placeholder
from penstock.errors import ModelError
from penstock.schedule.program import Dealt
from penstock.tape import trees
from penstock.tape.cut import Leaf, begun
from penstock.tape.handed import Handed, HandedOn, Kind, Sharing, difference, fill
from penstock.tape.places import values_in
from penstock.tape.rng import RandomState
from penstock.tape.suspended import LossFn, SuspendedForward

if TYPE_CHECKING:
    from penstock.tape.tape import Tape

Way = Literal["output", "gradient", "besides"]
"""A part that crosses: a stage's output, the gradient with respect to it, what it is handed besides its input."""


def besides(handed: HandedOn, of_stages: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """By stage, the numbers of what its rank is sent with it besides its input: what it has not had before."""
    had: dict[int, set[int]] = {}
    found: dict[int, tuple[int, ...]] = {}
    for k, call in enumerate(handed.calls):
        if call is None or not of_stages[k]:
            continue
        known = had.setdefault(of_stages[k], set())
        if new := tuple(n for n in call.shares if n not in known):
            found[k] = new
            known.update(new)
    return found


def _shared_at_first(mb: int, micro_batch: Mapping[str, Any], handed: HandedOn, of_stages: Sequence[int]) -> Sharing:
    """The parts of a micro-batch that blocks of other ranks than the first are handed, before its forward begins.

    Raises:
        ModelError: it has no plain value of a name that one is handed.
    """
    others = [call for k, call in enumerate(handed.calls) if call is not None and of_stages[k]]
    numbers = {place - 1 for call in others for place in call.places.values() if place}
    found = Sharing.given(micro_batch, handed.shared, sorted(numbers))
    for call in others:
        for name in call.names.values():
            if name not in found.values:
                raise ModelError(
                    f"micro-batch {mb} has no number or text {name!r}, which block {call.block!r} was handed of the "
                    "first micro-batch of its shape, and is on another rank of the pipeline: give it with each"
                )
    return found


class Elsewhere:
    """One step of a rank of a pipeline."""

    def __init__(
        self,
        tape: "Tape",
        dealt: Dealt,
        micro_batches: Sequence[Mapping[str, Any]],
        handed: Sequence[HandedOn],
    ) -> None:
        """``micro_batches``: all of the step, on the device; ``handed``: of each, as the probe of its shape has seen
        it."""
        self._tape = tape
        self._dealt = dealt
        self._handed = handed
        self._besides = [besides(of_one, dealt.of_stages) for of_one in handed]
        self._shared = [
            _shared_at_first(mb, *given, dealt.of_stages)
            for mb, given in enumerate(zip(micro_batches, handed, strict=True))
        ]
        self._out: dict[tuple[Way, int, int], torch.Tensor | None] = {}
        self._in: dict[tuple[Way, int, int], torch.Tensor | None] = {}
        self._sources: dict[tuple[int, int], torch.Tensor] = {}
        """(stage, micro-batch) -> what was sent, as this rank has it"""
        self._leaves: dict[tuple[int, int], Leaf] = {}
        """(stage, micro-batch) -> where the gradient of what was received comes to"""
        self._inputs: dict[int, torch.Tensor] = {}
        """micro-batch -> the input of its next call"""

    def has(self, stage: int) -> bool:
        return self._dealt.has(stage)

    @property
    def goes_on(self) -> bool:
        """True if the code behind a call runs on to the next call at once: where it is the model's own."""
        return not self._dealt.rank

    # ---- what crosses

    def take(self, way: Way, stage: int, mb: int) -> torch.Tensor | None:
        """The tensor that is to be sent; None: no gradient has come."""
        return self._out.pop((way, stage, mb))

    def put(self, way: Way, stage: int, mb: int, tensor: torch.Tensor | None) -> None:
        """Keep what was received until the stage runs."""
        self._in[way, stage, mb] = tensor

    def kind(self, stage: int, mb: int) -> Kind:
        """The kind of what a stage puts out for the next one."""
        calls = self._handed[mb].calls
        following, own = calls[stage + 1], calls[stage]
        found = following.input if following is not None else None if own is None else own.result
        assert found is not None, "this was refused at the start"
        return found

    def kinds_besides(self, stage: int, mb: int) -> list[tuple[int, Kind]]:
        """(number, kind) of what is sent for a stage besides its input."""
        return [(number, self._handed[mb].shared[number].kind) for number in self._besides[mb].get(stage, ())]

    def share(self, mb: int, number: int, tensor: torch.Tensor) -> None:
        """One of the tensors that calls share has come."""
        self._shared[mb].add(number, tensor)

    def shared(self, mb: int, number: int) -> torch.Tensor:
        """One of the tensors that calls share."""
        return self._shared[mb].tensors[number]

    def require_as_they_were(self, mb: int, who: str) -> None:
        """Raises:
        ModelError: ``who`` has written to one of the tensors that calls share.
        """
        if self._shared[mb].written():
            raise ModelError(
                f"micro-batch {mb}: {who} writes in place to a tensor that blocks of several ranks of the pipeline are "
                "handed, and each rank has its own: let it make a new one"
            )

    def drop(self, stage: int, mb: int) -> None:
        """The output of a stage has been sent."""
        self._tape.saved_activations.drop(stage, mb)

    # ---- forward

    def code(self, mb: int) -> LossFn:
        """The code that a rank without the model's own runs in its place: its calls, one after the other."""

        def calls(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
            own = [k for k, call in enumerate(self._handed[mb].calls) if call is not None and self.has(k)]
            made: torch.Tensor | None = None
            for k in own:
                call, site = self._call(k, mb), self._tape.facts[k].site
                assert site is not None
                if not self.has(k - 1):
                    made = self._inputs.pop(mb)
                assert made is not None
                suspended = self._tape.suspended[mb]
                now = suspended.modes_now()
                replace(call.modes, beside=now.beside, python=now.python).apply(suspended.flags, now)
                args, kwargs = fill(call, made, self._shared[mb])
                made = None  # nothing here holds what a block was handed while another micro-batch runs
                made = trees.tensors(site.module.forward(*args, **kwargs))[0]
                self.require_as_they_were(mb, f"block {site.name!r}")
                del args, kwargs
            raise AssertionError("a rank of a pipeline that has no code of the model has no loss")

        return calls

    def before(self, suspended: SuspendedForward, stage: int) -> None:
        """A stage is about to run: what it is handed is put in its place."""
        k, mb = stage - 1, suspended.index
        if self._dealt.rank and self.has(k):
            self._arrive(suspended, stage)
        if not stage or self.has(k):
            return
        received = self._begun(k, mb)
        if self._tape.facts[stage].site is None:
            suspended.answer = self._answer(k, mb, received)
            assert self._tape.running.resume(suspended, k) == "cut"
        elif self._dealt.rank:
            self._inputs[mb] = received
            self._arrive(suspended, stage)
        else:
            arrival = suspended.arrival
            assert arrival is not None
            waiting = arrival.tensors.get(self._call(stage, mb).of_input)
            inputs = trees.replace(arrival.inputs, lambda t: received if t is waiting else t)
            suspended.arrival = replace(arrival, inputs=inputs, tensors=trees.places(inputs))
        self._tape.saved_activations.note(k, mb, [received])

    def _arrive(self, suspended: SuspendedForward, stage: int) -> None:
        """Let a rank without the model's own code come to a call: all that it is handed is there now."""
        assert suspended.resume(stage - 1) == "call"
        assert suspended.arrival is not None
        handed = suspended.arrival.tensors[self._call(stage, suspended.index).of_input]
        self._tape.saved_activations.note(stage - 1, suspended.index, [handed])

    def behind(self, suspended: SuspendedForward, stage: int) -> None:
        """A stage has run: what it puts out for another rank is there, and the model's own code goes on."""
        dealt, mb = self._dealt, suspended.index
        if dealt.crosses(stage):
            if dealt.rank:
                (made,) = suspended.outputs
                self._tape.saved_activations.note(stage, mb, [made])
            else:
                site = self._tape.facts[stage + 1].site
                assert site is not None
                suspended.expect_call(stage + 1, site)
                assert suspended.arrival is not None
                made = suspended.arrival.tensors[self._call(stage + 1, mb).of_input]
            if suspended.train:
                self._sources[stage, mb] = made
            self._refuse_other(made, stage, mb)
            self._out["output", stage, mb] = made.detach()
            if not dealt.rank:
                self._run_ahead(suspended, stage)
        if stage == len(dealt.of_stages) - 1 and suspended.train:
            self.behind_backward(suspended, stage)

    def _run_ahead(self, suspended: SuspendedForward, stage: int) -> None:
        """Run the model's code through the calls of other ranks, up to the next one of this rank."""
        tape, mb = self._tape, suspended.index
        random = RandomState.capture(tape.device)
        for k in self._dealt.others_after(stage):
            site = tape.facts[k].site
            assert site is not None
            suspended.expect_call(k, site)
            assert suspended.arrival is not None
            call = self._call(k, mb)
            other = difference(call, suspended.arrival.inputs, suspended.modes, self._shared[mb])
            if other:
                raise ModelError(
                    f"micro-batch {mb}, block {site.name!r}: {other}. Another rank of the pipeline makes this call as "
                    "the first micro-batch of its shape did: let it not depend on the values of the data, or give the "
                    "value with the micro-batch, under the name of the argument"
                )
            if tape.facts[k + 1].site is None:
                return
            assert call.result is not None
            suspended.answer = self._answer(k, mb, self._placeholder(site.name, call.result))
            assert tape.running.resume(suspended, k) == "cut"
            suspended.resume(k)
            suspended.own.update(values_in(tape.facts[k].assigned))
            if not random.is_now():
                raise ModelError(
                    f"the model's own code draws random numbers behind block {site.name!r}, which another rank of the "
                    "pipeline has, and they would be others than those of one rank. Train with ranks that share all "
                    "state (without a pipeline)"
                )

    def _placeholder(self, block: str, kind: Kind) -> torch.Tensor:
        def refuse() -> None:
            raise ModelError(
                f"the model's own code computes with what block {block!r} puts out, which is on another rank of the "
                "pipeline: blocks have to be handed just that. Train with ranks that share all state (without a "
                "pipeline)"
            )

        return placeholder(kind.shape, kind.stride, kind.dtype, self._tape.device, kind.requires_grad, refuse)

    def _answer(self, stage: int, mb: int, tensor: torch.Tensor) -> Callable[[], Any]:
        """A function that makes a call of another rank's return what it returned in the probe, around a tensor."""
        output = self._call(stage, mb).output
        return lambda: trees.replace(output, lambda _: tensor)

    def _begun(self, stage: int, mb: int) -> torch.Tensor:
        """The tensor that was received, with which a graph begins if its gradient is wanted."""
        tensor = self._in.pop(("output", stage, mb))
        assert tensor is not None
        if not self.kind(stage, mb).requires_grad:
            return tensor
        leaf = self._leaves[stage, mb] = Leaf()
        return begun(tensor, leaf)

    def _refuse_other(self, made: torch.Tensor, stage: int, mb: int) -> None:
        if replace(Kind.of(made), requires_grad=False) != replace(self.kind(stage, mb), requires_grad=False):
            raise ModelError(
                f"micro-batch {mb}: stage {stage} puts out a tensor of shape {tuple(made.shape)}, strides "
                f"{made.stride()} and {made.dtype}, where the first micro-batch of its shape put out "
                f"{self.kind(stage, mb)}: it must not depend on the values of the data"
            )

    def _call(self, stage: int, mb: int) -> Handed:
        call = self._handed[mb].calls[stage]
        assert call is not None
        return call

    # ---- backward

    def before_backward(self, suspended: SuspendedForward, stage: int) -> None:
        """A stage is about to run backward: the gradient of what it put out for another rank is there."""
        key = (stage, suspended.index)
        if self._dealt.crosses(stage):
            source, gradient = self._sources.pop(key), self._in.pop(("gradient", *key), None)
            if gradient is not None:
                suspended.backward.route(source, gradient)

    def behind_backward(self, suspended: SuspendedForward, stage: int) -> None:
        """A stage has run backward: the gradient of what it was handed is there. After this rank's last one nothing of
        the micro-batch is kept."""
        key = (stage - 1, suspended.index)
        leaf = self._leaves.pop(key, None)
        if leaf is not None:
            self._out["gradient", *key] = leaf.take()
        if stage == self._dealt.of_stages.index(self._dealt.rank):
            suspended.close()
            self._shared[suspended.index] = Sharing()
