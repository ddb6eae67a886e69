"""Forwards and backwards of stages, with weights in their place and gradients added up."""

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from penstock.errors import ModelError, NonFiniteError
from penstock.runtime.access import Access
from penstock.schedule.ir.ops import Op, has_graph
from penstock.schedule.ir.references import Buffer
from penstock.tape.groups import ParamGroup
from penstock.tape.tape import Tape


class Compute:
    """Runs the tape. Parameters of a group are views of the buffer that an op names, or of the group's array."""

    def __init__(self, access: Access, groups: Sequence[ParamGroup], tape: Tape) -> None:
        self._to = access
        self._arrays = access.arrays
        self.groups = groups
        self._tape = tape
        self._stages = access.bound.program.stages
        self._specs = access.bound.program.groups
        self._attached: dict[int, str] = {}
        """group -> the buffer that its parameters are views of; empty: its array"""
        self._accumulators: Mapping[int, torch.Tensor] = {}
        """by identity of a parameter, where its gradient is added up in the op under way"""
        self._places: dict[str, tuple[torch.Tensor, dict[int, torch.Tensor]]] = {}
        """buffer of a group's gradient -> its bytes, and the view of them that each parameter's gradient is added to"""
        tape.on_gradient = self._accumulate

    def begin(self) -> None:
        """A step begins: weights that no op has brought cannot be read."""
        for g, group in enumerate(self.groups):
            if g not in self._attached:
                group.let_go()

    def kinds(self) -> dict[str, Callable[[Op], None]]:
        return {
            "F": self.forward,
            "E": self.epilogue,
            "B": partial(self._run, self._tape.backward),
            "I": partial(self._run, self._tape.backward_inputs),  # which adds to no gradient
            "W": partial(self._run, self._tape.backward_weights),
            "AD": self.add_strand,
        }

    def forward(self, op: Op) -> None:
        def run(stage: int, micro_batch: int) -> None:
            stay = all(self._attached.get(g) == "" for g in self._stages[stage].forward_reads)
            self._tape.forward(stage, micro_batch, keep=has_graph(op), stay=stay)

        self._run(run, op)

    def epilogue(self, op: Op) -> None:
        """Forward and backward of the last stage; the losses are looked at when all are there."""
        self.forward(op)
        if op.id == self._to.bound.last_loss:
            self._check_losses()

    def _run(self, run: Callable[[int, int], None], op: Op) -> None:
        """``run(stage, micro-batch)`` of an op, with weights and gradients in their place."""
        self._attach(op)
        sent = self._tape.sent
        run(op.id.stage, op.id.micro_batch)
        self._to.moved += self._tape.sent - sent
        self._detach(op)

    def add_strand(self, op: Op) -> None:
        """A strand's gradient to another one's, which the op writes."""
        (into,) = op.writes
        (what,) = (name for name in op.reads if name != into)
        numel = self._to.bound.whole(self._specs[op.id.group].trainable)
        self._to.view(into, numel).add_(self._to.view(what, numel))

    def _check_losses(self) -> None:
        """Before any optimizer step: a loss that is no number must not reach the state."""
        context = self._to.context
        for m, loss in enumerate(torch.stack(self._tape.losses()).tolist()):
            if not math.isfinite(loss):
                context.failure = NonFiniteError(
                    f"step {context.step}, micro-batch {m}: the loss is {loss}. Nothing was updated. Look at that "
                    "micro-batch, lower the learning rate, or give up precision='fp16', if it is that"
                )
                return

    def _attach(self, op: Op) -> None:
        """Weights that an op reads into the model, and gradients that it writes where they are added up."""
        stage, dtype = self._stages[op.id.stage], self._arrays.dtype
        for name in op.reads:
            if name.kind == "W":
                g = name.group
                if self._attached.get(g) != name:
                    flat = self._to.view(name, self._to.bound.whole(self._specs[g].numel), dtype)
                    self._attached[g] = name  # first: what an interrupt leaves half attached is detached
                    self.groups[g].attach(flat)
        for g in {*stage.forward_reads, *stage.backward_reads} - self._attached.keys():
            if self._arrays.found_on(g) == "device":
                self._attached[g] = ""
                self.groups[g].attach(self._arrays.weights(g))
        of_groups = [self._gradient_views(op, name) for name in op.writes if name.kind == "G"]
        self._accumulators = of_groups[0] if len(of_groups) == 1 else dict(ChainMap(*of_groups))

    def _gradient_views(self, op: Op, name: Buffer) -> dict[int, torch.Tensor]:
        """The places of parameters' gradients in a buffer that an op writes, with zeros in one that it takes."""
        there, known = self._to.pools.buffer(name), self._places.get(name)
        begins = any(name == taken for taken, _ in op.takes)
        if begins or known is None or known[0] is not there:
            flat = self._to.view(name, self._to.bound.whole(self._specs[name.group].trainable))
            if begins:
                flat.zero_()
            views = self.groups[name.group].views(flat)
            known = self._places[name] = there, {id(piece.parameter): view for piece, view in views}
        return known[1]

    def _detach(self, op: Op) -> None:
        for g in [g for g, name in self._attached.items() if name and name in op.gives]:
            self.groups[g].detach(self._arrays.dtype, self._arrays.device)
            self.groups[g].let_go()
            del self._attached[g]
        self._accumulators = {}

    def _accumulate(self, parameter: torch.nn.Parameter, stage: int, gradient: torch.Tensor) -> None:
        """Add a parameter's gradient to its place; called by the tape."""
        target = self._accumulators.get(id(parameter))
        if target is None and not parameter.numel():
            return
        if target is None:
            raise ModelError(
                f"{self._name(parameter)} received a gradient in stage {stage} ({self._stages[stage].name}), where the "
                "micro-batch that the plan was made from gave none to any parameter of its group. Which groups a stage "
                "uses must not depend on the values of the data: where the model leaves this one out, let it add "
                "0 * parameter.sum() to what it computes"
            )
        target.add_(gradient)
        self._to.context.update.touched.add(id(parameter))

    def _name(self, parameter: torch.nn.Parameter) -> str:
        slices = (s for g in self.groups for s in g.slices)
        return next((s.name for s in slices if s.parameter is parameter), "an unknown parameter")

    def release(self) -> None:
        """Detach all parameters: the step is over."""
        for group in self.groups:
            group.take_back()
        for g in self._attached:
            self.groups[g].detach(self._arrays.dtype, self._arrays.device)
        self._attached.clear()
        self._accumulators = {}
        self._places.clear()
