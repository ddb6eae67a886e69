"""Tensors that pass between a block and the rest of a model by another way than arguments and results.

By an attribute, a closure, a global or a buffer. With several micro-batches under way such a place holds another one's
tensor, a recomputation finds the last one's, and a gradient does not find its way. So in a probe the forward's ops are
watched for what they read: a block may read what it was handed and what does not depend on the micro-batch; the model's
own code may read of a block what it has returned.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from penstock.compat.torch import COPY_TO, packet_of, storage_key
from penstock.errors import ModelError
from penstock.tape import trees
from penstock.tape.buffers import ModulesBefore
from penstock.tape.carried import Carried, Replaced
from penstock.tape.holders import Holder, Way
from penstock.tape.watch import Birth

_ATEN = torch.ops.aten
_OF_SHAPES = frozenset(
    {
        *(_ATEN.empty_like, _ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like, _ATEN.rand_like, _ATEN.randn_like),
        *(_ATEN.new_empty, _ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full, _ATEN.new_empty_strided),
    }
)
"""Ops that take a tensor for its shape alone."""
_COPIES = frozenset({COPY_TO, _ATEN.clone, _ATEN.cat, _ATEN.constant_pad_nd})
"""Ops that put a tensor elsewhere as it is, perhaps beside others."""


class Smuggled:
    """Follows what depends on the micro-batch or on weights that train, op by op.

    ``found``: the first that is smuggled, in words. ``carried``: what passes to the next micro-batch.
    """

    def __init__(self, birth: Callable[[torch.Tensor], Birth | None]) -> None:
        """``birth``: gives the birth of a tensor's storage, if an op of the probe has made it."""
        self._birth = birth
        self._own: set[int] = set()
        self._views: set[int] = set()  # storages of weights that the segment has taken views of
        self._written: dict[int, dict[int, str | None]] = {}  # storages from before the probe -> segments and blocks
        self._segment: int | None = None
        self._block: str | None = None
        self._handed: set[int] = set()
        self._blocks: dict[int, str] = {}  # segment -> block, of calls
        self.found: str | None = None
        self.read: dict[Holder, int] = {}
        """places in which the model's own code keeps tensors for later -> the last segment that reads one from there"""
        self.carried = Carried()

    def given(self, micro_batch: Any) -> None:
        """The forward is about to begin with this micro-batch."""
        self._own = {storage_key(t) for t in trees.tensors(micro_batch) if trees.has_storage(t)}

    def begin(self, segment: int, block: str | None, handed: Iterable[torch.Tensor]) -> None:
        """A segment of the forward begins: a call of ``block``, which is ``handed`` these tensors, or the model's own
        code.
        """
        self._segment, self._block = segment, block
        self._handed = {storage_key(t) for t in handed if trees.has_storage(t)}
        if block is not None:
            self._blocks[segment] = block

    def end(self, returned: Iterable[torch.Tensor] = (), kept: Iterable[tuple[torch.Tensor, Way]] = ()) -> None:
        """The segment has ended, and has ``returned`` these tensors; places of the model's own code hold those that are
        ``kept``."""
        self._segment = None
        self._views.clear()
        for tensor in returned:
            birth = self._birth(tensor)
            if birth is not None:
                birth.returned = True
        for tensor, way in kept:
            birth = self._birth(tensor)
            if birth is not None:
                birth.kept = way

    def refuse(self) -> None:
        if self.found is not None:
            raise ModelError(
                f"{self.found} (it came by an attribute, a closure, a global or a buffer). With several micro-batches "
                "under way it would be that of another one, and its gradient would be lost: hand tensors to blocks as "
                "arguments, and let blocks return them"
            )

    def carries(self, before: ModulesBefore) -> str | None:
        """The first tensor that passes from one micro-batch to the next through several stages, in words; or None.

        ``before``: the model's modules as they were when its forward, which has ended, began.
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
        for carried, segments in self.carried.found(replaced):
            what = carried if isinstance(carried, str) else names.get(carried, "a tensor or generator of its own")
            who = " and ".join(dict.fromkeys(_who(self._blocks.get(segment)) for segment in sorted(segments)))
            return (
                f"{what} passes from one micro-batch to the next through several stages of the model ({who}). Block by "
                "block, each of several micro-batches would find there what others have left: give each step one "
                "micro-batch, or schedule='horizontal', or let one block, or one stretch of the model's own code, read "
                "and change it alone"
            )
        return None

    def on_op(
        self,
        func: Any,
        inputs: list[torch.Tensor],
        written: list[torch.Tensor],
        results: list[torch.Tensor],
        generator: torch.Generator | None = None,
    ) -> None:
        """Take note of an op of the forward: the tensors that it read, changed (``written``) and made. ``generator``:
        the one that it draws from, where that is not torch's own."""
        if self._segment is None:
            return
        if generator is not None:
            self.carried.draws(generator, self._segment)
        depends, changed = any(self._depends(t) for t in inputs), {id(tensor) for tensor in written}
        if written or not {storage_key(t) for t in results} <= {storage_key(t) for t in inputs}:  # a view reads nothing
            for tensor in inputs:
                if id(tensor) not in changed or self._birth(tensor) is not None:  # what is kept may be added to
                    self._check(tensor)
            old = [t for t in inputs if self._birth(t) is None and storage_key(t) not in self._own]
            if packet_of(func) not in _OF_SHAPES:
                self.carried.on_op(func, self._segment, old, changed, depends=depends)
                self._follow(func, inputs, results)
        if packet_of(func) in _OF_SHAPES or not depends:
            return
        for tensor in results:
            birth = self._birth(tensor)
            if birth is not None:
                birth.depends = True
            elif storage_key(tensor) not in self._own:
                self._views.add(storage_key(tensor))
        for tensor in written:
            if self._birth(tensor) is None and storage_key(tensor) not in self._own:
                self._written.setdefault(storage_key(tensor), {})[self._segment] = self._block

    def _follow(self, func: Any, inputs: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> None:
        """Note what the results of an op follow from."""
        of, copies = frozenset[int](), frozenset[int]()
        for tensor in inputs:
            birth = self._birth(tensor)
            if birth is not None:
                of, copies = of | birth.of, copies | birth.copies
            elif not isinstance(tensor, nn.Parameter):
                copies |= {storage_key(tensor)}
        if packet_of(func) not in _COPIES:
            of, copies = of | copies, frozenset()
        for birth in filter(None, map(self._birth, results)):
            birth.of, birth.copies = birth.of | of, birth.copies | copies

    def _depends(self, tensor: torch.Tensor) -> bool:
        birth = self._birth(tensor)
        if birth is not None:
            return birth.depends
        storage = storage_key(tensor)
        return tensor.requires_grad or storage in self._own or storage in self._views or storage in self._written

    def _check(self, tensor: torch.Tensor) -> None:
        if self._segment is None or self.found is not None or isinstance(tensor, nn.Parameter):
            return
        birth = self._birth(tensor)
        if birth is not None and not birth.depends:
            return
        shape = tuple(tensor.shape)
        if birth is None:
            for segment, block in self._written.get(storage_key(tensor), {}).items():
                if segment != self._segment and (block != self._block or block is None):
                    self.found = (
                        f"{_who(self._block)} reads a tensor of shape {shape} that {_who(block)} has written to before"
                    )
        elif birth.segment != self._segment:
            if self._block is not None and storage_key(tensor) not in self._handed:
                self.found = f"{_who(self._block)} reads a tensor of shape {shape} that is none of its arguments"
            elif self._block is None and birth.segment in self._blocks and not birth.returned:
                made = self._blocks[birth.segment]
                self.found = f"the model itself reads a tensor of shape {shape} that {_who(made)} made, not returned"
            elif self._block is None:
                self.read.update((holder, self._segment) for holder in birth.kept)


def _who(block: str | None) -> str:
    return "the model itself" if block is None else f"block {block!r}"
