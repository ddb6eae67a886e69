"""``torch.compile`` of blocks: one compilation for all blocks of a class.

A block's class is compiled, with the block as an argument, so blocks that differ in their weights alone share its code:
one compilation for the forward (without a graph), one for the recomputation (with one), and one for evaluation. Weights
are inputs of that code, wherever they are by then; where they are is nothing that it was compiled for.

Each shape of micro-batch has code of its own. Code for all shapes would depend on the one that it was first compiled
for, and so the numbers on the order in which a schedule, or a resumed run, comes to them.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.compat.torch import NotCompiledError, RecompiledError, compilations, is_watched
from penstock.errors import ModelError
from penstock.tape.blocks import Block

LIMIT = 32
"""Compilations of a class of blocks: eight shapes of micro-batch, two kinds of layers, forward and recomputation."""

Forward = Callable[..., Any]


def compiled_forwards(blocks: Sequence[Block], backend: str) -> list[Forward]:
    """A compiled ``forward`` for each block, in their order. Nothing is compiled before it is called."""
    by_class: dict[type[nn.Module], Forward] = {}
    forwards: list[Forward] = []
    for block in blocks:
        cls = type(block.module)
        for name, module in block.module.named_modules(prefix=block.name):
            if "forward" in vars(module):
                raise ModelError(
                    f"compile: the forward of {name!r} has been replaced on the module itself, so it is not the one of "
                    "its class that would be compiled: leave compile out"
                )
        if cls not in by_class:
            by_class[cls] = _compile(cls, backend)
        forwards.append(_Compiled(block, by_class[cls]))
    return forwards


class _Compiled:
    """A block's forward. Compiled, but for a probe, which has to see the ops of which compiled code has none."""

    def __init__(self, block: Block, compiled: Forward) -> None:
        self._block = block
        self._eager = block.module.forward
        self._compiled = compiled
        self.__wrapped__ = block.module.forward  # what inspect.signature looks at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_watched():
            return self._eager(*args, **kwargs)
        try:
            with compilations(LIMIT):
                return self._compiled(self._block.module, *args, **kwargs)
        except RecompiledError as error:
            raise ModelError(
                f"compile: block {self._block.name!r} and those like it have been compiled {LIMIT} times, and are "
                "asked for once more: each shape of micro-batch is compiled for itself. Give micro-batches of few "
                f"shapes (packing does), or leave compile out. What differed last: {_line(error)}"
            ) from error
        except NotCompiledError as error:
            raise ModelError(
                f"compile: block {self._block.name!r} cannot be compiled as a whole: leave compile out. "
                f"torch.compile says: {_line(error)}"
            ) from error


def _compile(cls: type[nn.Module], backend: str) -> Forward:
    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(block, *args, **kwargs)

    # Code is what torch.compile counts compilations for; that of another engine's blocks must not count here.
    own: Any = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, cls.__name__, None, forward.__closure__
    )
    # Dropout draws by torch's own generators, which the tape seeds, and not by numbers that depend on the code.
    options: Any = {"fallback_random": True} if backend == "inductor" else None
    compiled: Forward = torch.compile(own, backend=backend, fullgraph=True, dynamic=False, options=options)
    return compiled


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
