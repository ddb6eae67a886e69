"""The boundary in front of each block while a tape has the model: there forwards are suspended."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any, Literal

from penstock.compat.modules import buffers_of
from penstock.errors import ModelError
from penstock.tape.blocks import Block
from penstock.tape.facts import Site
from penstock.tape.suspended import current_forward


@dataclass(kw_only=True)
class Doing:
    """A tape's present work: a forward (or nothing), or the backward of the model's own code, of a block call, or of a
    call's inputs alone."""

    what: Literal["forward", "segment", "call", "inputs"] = "forward"


class Boundary:
    """Stands in for a block's ``forward``: suspends a micro-batch's forward that arrives, and otherwise is not there.

    An object and not a closure, so that a deep copy of the model calls its own blocks.
    """

    def __init__(self, site: Site, doing: Doing) -> None:
        self._site = site
        self._doing = doing
        self.of_class = getattr_static(type(site.module), "forward")
        self.__wrapped__ = site.forward  # what inspect.signature looks at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        suspended = current_forward()
        if suspended is not None:
            return suspended.arrive(self._site, args, kwargs)
        if self._doing.what == "segment":
            raise ModelError(
                f"block {self._site.name!r} is called again in the backward (by torch.utils.checkpoint, or a function "
                "with a backward of its own, around the block): leave that out, as Penstock recomputes blocks by itself"
            )
        return self._site.forward(*args, **kwargs)


def site_of(index: int, block: Block, forward: Callable[..., Any]) -> Site:
    trainable = any(p.requires_grad for p in block.module.parameters())
    buffered = tuple(m for m in block.module.modules() if buffers_of(m))
    return Site(
        index=index, name=block.name, module=block.module, forward=forward, trainable=trainable, buffered=buffered
    )


def install(site: Site, doing: Doing) -> Any:
    """Put a boundary in front of a block. Returns the forward that the module itself had; None: it had its class's."""
    replaced = vars(site.module).get("forward")
    vars(site.module)["forward"] = Boundary(site, doing)
    return replaced


def remove(site: Site, replaced: Any) -> None:
    """Take the boundary away again. ``replaced``: what ``install`` has returned."""
    vars(site.module).pop("forward", None)
    if replaced is not None:
        vars(site.module)["forward"] = replaced


def check_installed(site: Site) -> None:
    boundary = vars(site.module).get("forward")
    if not isinstance(boundary, Boundary) or boundary.of_class is not getattr_static(type(site.module), "forward"):
        raise ModelError(
            f"the forward of block {site.name!r} was replaced after wrap(): replace it before, and wrap the model again"
        )
