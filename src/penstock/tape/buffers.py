"""A model's buffers, and the plain attributes beside them, as they were before code ran that may change them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.compat.modules import buffers_of, persistent_buffers
from penstock.compat.torch import version
from penstock.errors import ModelError
from penstock.tape import trees
from penstock.tape.generators import Generator, States, of_modules
from penstock.tape.places import ABSENT, Entry, Held, Holder, is_figure, put, values_in

_OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}

Buffer = tuple[nn.Module, str, torch.Tensor | None]
"""A module, the name of one of its buffers, and the buffer."""
Attributes = tuple[nn.Module, Mapping[str, Any]]
"""A module and its plain attributes."""


@dataclass(frozen=True, kw_only=True)
class BufferBefore:
    """A buffer with its owner, its name there and within all, a copy of its value, and how often it had been written
    to. One that the owner has declared may hold nothing yet (None); of one without a copy, only another tensor in its
    place can be undone."""

    module: nn.Module
    name: str
    path: str
    tensor: torch.Tensor | None
    value: torch.Tensor | None
    version: int

    def has_changed(self) -> bool:
        now = buffers_of(self.module).get(self.name)
        if now is None or now is not self.tensor:
            return now is not self.tensor
        # Written to is changed, also where that has left the same value: in another micro-batch it may not.
        return version(now) != self.version or not (self.value is None or now.is_meta or torch.equal(now, self.value))

    def put_back(self) -> None:
        buffers_of(self.module)[self.name] = self.tensor
        if self.tensor is not None and self.value is not None:
            with torch.no_grad():
                self.tensor.copy_(self.value)


class ModulesBefore:
    """The buffers and the plain attributes of a module and those within it, as they are when this is made.

    An attribute is put back as the object that it was: of a list or a dict, what is in it by then. Generators have
    their states again, too.
    """

    def __init__(
        self,
        module: nn.Module,
        changing: Collection[tuple[nn.Module, str]] | None = None,
        generators: Iterable[Generator] = (),
        places: Iterable[Holder] = (),
    ) -> None:
        """``changing``: the buffers, as (module, name), of which there is a copy besides the persistent ones; None: all
        of them. ``generators``: the model's own, besides those that are attributes; ``places``: others that it changes.
        """
        modules = list(module.named_modules())
        self.attributes = [(owner, attributes_of(owner)) for _, owner in modules]
        self._generators = States((*generators, *of_modules(owner for _, owner in modules)))
        self._places = values_in(places)
        self.buffers = [
            _before(owner, name, path, keeps=changing is None or (owner, name) in changing or name in persistent)
            for path, owner in modules
            if buffers_of(owner)
            for persistent in [persistent_buffers(owner)]
            for name in buffers_of(owner)
        ]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """The buffers that are one piece of memory, and attributes: in words, as they were, and what is there now."""
        held = [(f"buffer {b.path!r}", b.tensor, buffers_of(b.module).get(b.name)) for b in self.buffers]
        for module, before in self.attributes:
            kind, now = type(module).__name__, vars(module)
            held += [
                (f"attribute {key!r} of a {kind}", value, found)
                for key, value in before.items()
                if isinstance(value, torch.Tensor) and isinstance(found := now.get(key), torch.Tensor)
            ]
        for what, old, new in held:
            if old is not None and new is not None and trees.has_storage(old) and trees.has_storage(new):
                yield what, old, new

    def changed(self) -> list[BufferBefore]:
        """The buffers that have changed since."""
        return [buffer for buffer in self.buffers if buffer.has_changed()]

    def refuse_unplaced(self) -> None:
        """Raise ModelError for a persistent buffer that commits and snapshots have no place for, or one for another
        shape or dtype than it has now: what a run goes on with would be other bytes."""
        for buffer in self.buffers:
            now, was = persistent_buffers(buffer.module).get(buffer.name), buffer.value
            if now is not None and buffer.tensor is None:
                raise ModelError(
                    f"buffer {buffer.path!r} is None until a forward puts a tensor there, so that commits and "
                    "snapshots have no place for it: register it with a tensor, or with persistent=False if it is no "
                    "state"
                )
            if now is not None and was is not None and (now.shape, now.dtype) != (was.shape, was.dtype):
                raise ModelError(
                    f"buffer {buffer.path!r} is {tuple(was.shape)} of {was.dtype} before a forward, and "
                    f"{tuple(now.shape)} of {now.dtype} behind it, for which commits and snapshots have no place: let "
                    "it keep its shape and dtype, or register it with persistent=False if it is no state"
                )

    def copies(self) -> dict[tuple[nn.Module, str], torch.Tensor]:
        """The copies that there are of buffers, by (module, name in it)."""
        return {(buffer.module, buffer.name): buffer.value for buffer in self.buffers if buffer.value is not None}

    def put_back(self) -> None:
        """Undo what has happened since. An attribute that is new stays, but for figures: it may tell of what is not
        undone, as transformers' mark of the hooks that a first forward installs does."""
        known = {(buffer.module, buffer.name) for buffer in self.buffers}
        for owner, before in self.attributes:
            buffers = buffers_of(owner)
            for name in [name for name in buffers if (owner, name) not in known]:
                del buffers[name]
            new = [key for key, value in attributes_of(owner).items() if key not in before and is_figure(value)]
            put((Entry(of=vars(owner), key=key), value) for key, value in before.items())
            put((Entry(of=vars(owner), key=key), ABSENT) for key in new)
        for buffer in self.buffers:
            buffer.put_back()
        put(self._places)
        self._generators.put_back()


def _before(module: nn.Module, name: str, path: str, *, keeps: bool) -> BufferBefore:
    buffer = buffers_of(module)[name]
    return BufferBefore(
        module=module,
        name=name,
        path=f"{path}.{name}" if path else name,
        tensor=buffer,
        value=buffer.clone() if keeps and buffer is not None and trees.has_storage(buffer) else None,
        version=0 if buffer is None else version(buffer),
    )


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes that are none of torch's, and not its forward."""
    return {key: value for key, value in vars(module).items() if is_own(key)}


def tensor_attributes(module: nn.Module, name: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors among the plain attributes of a module, which is called ``name``, and of those within it, each with
    its attribute in words: the first one with the value that it is in, as many modules have the same config."""
    values = {
        id(value): (value, key, path)
        for path, owner in reversed([*module.named_modules()])
        for key, value in attributes_of(owner).items()
    }
    return [
        (f"attribute {key!r} of {f'{name}.{path}' if path else name!r}", tensor)
        for value, key, path in values.values()
        for tensor in trees.tensors(value)
    ]


def is_own(name: str) -> bool:
    """True if a module's attribute of this name is none of torch's, and not its forward."""
    return name not in _OF_TORCH


def copies(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    return tuple((module, name, None if buffer is None else buffer.clone()) for module, name, buffer in buffers)


def attributes_beside(attributes: Iterable[Attributes], buffers: Iterable[Buffer]) -> Held:
    """The attributes of the modules that have these buffers."""
    owners = {module for module, _, _ in buffers}
    return tuple(
        (Entry(of=vars(m), key=key), v) for m, beside in attributes if m in owners for key, v in beside.items()
    )


def replaced(block: str, buffers: Sequence[tuple[Buffer, int]]) -> tuple[Buffer, ...]:
    """Buffers that a call has put others in the place of, though the probe has not seen them change, as they were.

    Raises:
        ModelError: one was written to, and nobody has a copy of what it held.
    """
    found = []
    for (module, name, before), at in buffers:
        if buffers_of(module).get(name) is not before:
            found.append((module, name, before))
        elif before is not None and version(before) != at:
            raise ModelError(
                f"block {block!r} changes its buffer {name!r} for this micro-batch, and did not for the first one of "
                "its shape, so what the buffer held before is not known where the block is recomputed: write to it in "
                f"every call, or put a new tensor in its place (self.{name} = ...)"
            )
    return tuple(found)
