"""Tensors that pass between a block and the rest of a model by another way than arguments and results.

By an attribute, a closure, a global or a buffer. With several micro-batches under way such a place holds another one's
tensor, a recomputation finds the last one's, and a gradient does not find its way. So in a probe the forward's ops are
watched for what they read: a block may read what it was handed and what does not depend on the micro-batch; the model's
own code may read of a block what it has returned.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from penstock.compat.torch import COPY_TO, storage_key
from penstock.errors import ModelError
from penstock.tape import trees
from penstock.tape.accesses import Accesses
from penstock.tape.buffers import ModulesBefore
from penstock.tape.carried import Carried, Replaced
from penstock.tape.changes import Change
from penstock.tape.generators import Generator, States
from penstock.tape.holders import along
from penstock.tape.outside import Outside
from penstock.tape.places import Held, Holder, Memory, Steps, Way, same
from penstock.tape.watch import Op, Operand, Watch, packets
from penstock.tape.weight_views import Alias

_ATEN = torch.ops.aten
_OF_SHAPES = packets(
    *(_ATEN.empty_like, _ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like, _ATEN.rand_like, _ATEN.randn_like),
    *(_ATEN.new_empty, _ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full, _ATEN.new_empty_strided),
)
"""Ops that take a tensor for its shape alone."""
_COPIES = packets(COPY_TO, _ATEN.clone, _ATEN.cat, _ATEN.constant_pad_nd)
"""Ops that put a tensor elsewhere as it is, perhaps beside others."""


class Smuggled:
    """Follows what depends on the micro-batch or on weights that train, op by op.

    ``found``: the first that is smuggled, in words. ``carried``: what passes to the next micro-batch. ``outside``: what
    comes from outside of the model.
    """

    def __init__(
        self,
        watch: Watch,
        parameters: Iterable[int] = (),
        aliases: Iterable[Alias] = (),
        generators: Iterable[Generator] = (),
    ) -> None:
        """``watch``: knows the storages that the ops of the probe have made; ``parameters``: the model's, by identity;
        ``aliases``: of these; ``generators``: the model's own, which ops need not be handed."""
        self._birth = watch.birth
        self._own: set[int] = set()
        self._kept: dict[int, Way] = {}  # own storages -> places in which the model's own code keeps tensors there
        self._beside: dict[int, torch.Tensor] = {}  # those that a block reads without being handed any
        self._views: set[int] = set()  # storages of weights that the segment has taken views of
        self._written: dict[int, dict[int, str | None]] = {}  # storages from before the probe -> segments and blocks
        self._generators = tuple(generators)
        self._states = States(())
        self._segment: int | None = None
        self._block: str | None = None
        self._reads = False  # a tensor has become a number with a fraction, from which others may follow
        self._handed: set[int] = set()
        self._blocks: dict[int, str] = {}  # segment -> block, of calls
        self.found: str | None = None
        self.read: dict[Holder, int] = {}
        """places in which the model's own code keeps tensors for later -> the last segment that reads one from there"""
        self.carried = Carried()
        self.outside = Outside({*parameters, *(id(tensor) for ref, _ in aliases if (tensor := ref()) is not None)})

    def given(self, micro_batch: Any) -> None:
        """The forward is about to begin with this micro-batch."""
        self._own = {storage_key(t) for t in trees.tensors(micro_batch) if trees.has_storage(t)}

    def begin(self, segment: int, block: str | None, handed: Iterable[torch.Tensor]) -> None:
        """A segment of the forward begins: a call of ``block``, which is ``handed`` these tensors, or the model's own
        code.
        """
        self._segment, self._block = segment, block
        self._handed = {storage_key(t) for t in handed if trees.has_storage(t)}
        self._beside.clear()
        self._states = States(self._generators)
        if block is not None:
            self._blocks[segment] = block

    def end(
        self,
        returned: Iterable[torch.Tensor] = (),
        kept: Iterable[tuple[torch.Tensor, Steps]] = (),
        found: Iterable[torch.Tensor] = (),
    ) -> None:
        """The segment has ended, and has ``returned`` these tensors; places of the model's own code hold those that are
        ``kept``; it has ``found`` these in places, each micro-batch its own."""
        known = {storage_key(t) for t in found if trees.has_storage(t)} if self._beside else set()
        for storage, tensor in self._beside.items():
            if storage not in known:
                self._find("{} reads {} that is none of its arguments", tensor)
        if self._segment is not None:
            for generator in self._states.drawn():
                self.carried.draws(generator, self._segment)
        self._segment = None
        self._views.clear()
        for tensor in returned:
            birth = self._birth(tensor)
            if birth is not None:
                birth.returned = True
        places: dict[int, dict[Holder, None]] = {}  # by storage: one tensor may be kept in several places
        for tensor, way in kept:
            if not trees.has_storage(tensor):
                continue
            storage, birth = storage_key(tensor), self._birth(tensor)
            if birth is not None or storage in self._own:
                here = places.setdefault(storage, {})
                here.update(dict.fromkeys(along(way)))
                if birth is not None:
                    birth.kept = tuple(here)
                else:
                    self._kept[storage] = tuple(here)

    def refuse(self) -> None:
        if self.found is not None:
            raise ModelError(
                f"{self.found} (it came by an attribute, a closure, a global or a buffer). With several micro-batches "
                "under way it would be that of another one, and its gradient would be lost: hand tensors to blocks as "
                "arguments, and let blocks return them"
            )

    def carries(self, before: ModulesBefore, accesses: Accesses) -> str | None:
        """The first tensor that passes from one micro-batch to the next through several stages, in words; or None.

        ``before``: the model's modules as they were when its forward, which has ended, began; ``accesses``: to their
        attributes since.
        """
        replaced: list[tuple[Replaced, set[int]]] = []
        names: dict[int, str] = {}
        for what, old, now in before.tensors():
            names.setdefault(storage_key(old), what)
            birth = None if now is old else self._birth(now)
            if birth is not None:
                if storage_key(old) in birth.copies - birth.of and not birth.depends:
                    continue  # it is the same, elsewhere or longer
                goes_on = birth.touched if storage_key(old) in birth.of else ()
                replaced.append(((what, old), {birth.segment, *goes_on}))
        attributes = accesses.carried(lambda t: (birth := self._birth(t)) is not None and birth.depends)
        for carried, segments in chain(self.carried.found(replaced), attributes):
            what = carried if isinstance(carried, str) else names.get(carried, "a tensor or generator of its own")
            return self.goes_on(what, segments)
        return None

    def filled(self, before: ModulesBefore, overwritten: Held) -> Iterator[Change]:
        """Tensors from before the forward that it fills with other numbers than they had, and not with what depends on
        any, or that count and are asked for their number, of those that several segments use. ``overwritten``: all but
        buffers, as they were."""
        buffers = ((f"buffer {b.path!r}", Memory(of=b.tensor), b.value) for b in before.buffers if b.tensor is not None)
        for what, place, value in chain(buffers, (("a tensor of its own", *pair) for pair in overwritten)):
            segments = sorted(self.carried.tried(place.of)) if trees.has_storage(place.of) else ()
            if segments and value is not None and not same(value, now := place.now()):
                yield Change(place=place, name=what, before=value, after=dict.fromkeys(segments, now))

    def goes_on(self, what: str, segments: Iterable[int]) -> str:
        """The words for ``what`` these segments have for each other in the next micro-batch."""
        who = " and ".join(dict.fromkeys(_who(self._blocks.get(segment)) for segment in sorted(segments)))
        return (
            f"{what} passes from one micro-batch to the next through several stages of the model ({who}). Block by "
            "block, each of several micro-batches would find there what others have left: give each step one "
            "micro-batch, or schedule='horizontal', or let one block, or one stretch of the model's own code, read "
            "and change it alone"
        )

    def on_op(self, op: Op, written: list[Operand]) -> None:
        """Take note of an op of the forward, which has ``written`` to these, besides parameters."""
        if self._segment is None:
            return
        self.outside.on_op(op, self._own, _who(self._block))
        if op.generator is not None:
            self.carried.draws(op.generator, self._segment)
        depends, of_shapes = any(map(self._depends, op.inputs)), id(op.packet) in _OF_SHAPES
        if written or op.made:  # a view reads nothing
            changed = {id(operand.tensor) for operand in written}
            for operand in op.inputs:
                if operand.birth is not None or id(operand.tensor) not in changed:  # what is kept may be added to
                    self._check(operand)
                    self._check_own(operand)
            if not of_shapes:
                moves = depends or self._reads or self._is_of_itself(op)
                self.carried.on_op(op.packet, self._segment, self._old(op), changed, depends=moves)
                self._follow(op)
        elif not op.results:  # it becomes a number, with which code goes on
            self._reads = self._reads or any(map(self._is_measured, op.inputs))
            self.carried.asks(self._segment, self._old(op))
            for operand in op.inputs:
                self._check_own(operand)
        if of_shapes or not depends:
            return
        for operand in op.results:
            if operand.birth is not None:
                operand.birth.depends = True
            elif operand.storage not in self._own:
                self._views.add(operand.storage)
        for operand in written:
            if operand.birth is not None:
                self._note_write(operand)
            elif operand.storage not in self._own:
                self._written.setdefault(operand.storage, {})[self._segment] = self._block

    def _is_measured(self, operand: Operand) -> bool:
        """True of numbers with a fraction that follow from the micro-batch, or from what earlier forwards have left."""
        tensor, _, birth = operand
        if not tensor.is_floating_point() or isinstance(tensor, nn.Parameter):
            return False
        return birth is None or birth.depends or bool(birth.of | birth.copies)

    def _old(self, op: Op) -> list[Operand]:
        """The inputs of an op from before the forward, but for the micro-batch's."""
        return [o for o in op.inputs if o.birth is None and o.storage not in self._own]

    def _is_of_itself(self, op: Op) -> bool:
        """True if an op writes what follows from the numbers that were there."""
        storages = {operand.storage for operand in op.written}
        return any(o.birth is not None and not storages.isdisjoint(o.birth.of | o.birth.copies) for o in op.inputs)

    def _note_write(self, operand: Operand) -> None:
        """Note that a block has written to a tensor that earlier code made and did not hand to it."""
        tensor, storage, birth = operand
        if birth is None or self._block is None or birth.segment == self._segment or storage in self._handed:
            return
        if tensor.is_floating_point() or tensor.is_complex():
            birth.writer = self._block

    def _follow(self, op: Op) -> None:
        """Note what the results of an op follow from."""
        of, copies = frozenset[int](), frozenset[int]()
        for tensor, storage, birth in op.inputs:
            if birth is not None:
                of, copies = of | birth.of, copies | birth.copies
            elif not isinstance(tensor, nn.Parameter):
                copies |= {storage}
        if id(op.packet) not in _COPIES:
            of, copies = of | copies, frozenset()
        for operand in op.results:
            if (birth := operand.birth) is not None:
                birth.of, birth.copies = birth.of | of, birth.copies | copies

    def _depends(self, operand: Operand) -> bool:
        tensor, storage, birth = operand
        if birth is not None:
            return birth.depends
        return tensor.requires_grad or storage in self._own or storage in self._views or storage in self._written

    def _check(self, operand: Operand) -> None:
        tensor, storage, birth = operand
        if self._segment is None or self.found is not None or (birth is not None and not birth.depends):
            return
        if birth is None:
            for segment, block in self._written.get(storage, {}).items():
                if segment != self._segment and (block != self._block or block is None):
                    self._find(f"{{}} reads {{}} that {_who(block)} has written to before", tensor)
        elif birth.segment != self._segment:
            if self._block is not None and storage not in self._handed:
                self._find("{} reads {} that is none of its arguments", tensor)
            elif self._block is None and birth.segment in self._blocks and not birth.returned:
                self._find(f"{{}} reads {{}} that {_who(self._blocks[birth.segment])} made, not returned", tensor)
            elif self._block is None and birth.writer is not None:
                self._find(f"{{}} reads {{}} that {_who(birth.writer)} has written to before", tensor)

    def _check_own(self, operand: Operand) -> None:
        """Note where what is read is kept, be it the micro-batch's own, or that a block has it from elsewhere."""
        tensor, storage, birth = operand
        if self._segment is None or isinstance(tensor, nn.Parameter):
            return
        if self._block is None:
            kept = self._kept.get(storage, ()) if birth is None else birth.kept
            if birth is None or (birth.depends and birth.segment != self._segment):
                self.read.update((holder, self._segment) for holder in kept)
        elif birth is None and storage in self._own and storage not in self._handed:
            self._beside.setdefault(storage, tensor)

    def _find(self, what: str, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, nn.Parameter):
            self.found = what.format(_who(self._block), f"a tensor of shape {tuple(tensor.shape)}")


def _who(block: str | None) -> str:
    return "the model itself" if block is None else f"block {block!r}"
