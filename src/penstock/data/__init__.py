"""Documents in, micro-batches out, in an order that is a function of the seed, from any position on.

    sources/      files, folders, patterns, data sets on the hub: examples, one after the other
    forms, conversations, instructions    the forms that rows have: Penstock's own, ShareGPT's, Alpaca's
    example, chat, encode, tokenizer      an example to token ids, and which of them count in the loss
    token_files, prepare, identity        ids on disk, and whether they are still what a run began with
    blocks                                files that are compared with checksums as they are read
    pieces, packing, mixture, rows        documents to sequences: cut, packed, and in which order
    stream, streamed, batches, ahead      sequences from a position on, to micro-batches, in a thread of their own
    opening, summary                      from settings to all of this, and the lines that say what was read

May import: ``errors``, ``files``, ``documents``, ``compat``, ``config``, ``tape``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.data.batches import Batches, HeldOut, Step
    from penstock.data.token_files import write_tokens

_WHERE = {
    "Batches": "penstock.data.batches",
    "HeldOut": "penstock.data.batches",
    "Step": "penstock.data.batches",
    "write_tokens": "penstock.data.token_files",
}

__all__ = ["Batches", "HeldOut", "Step", "write_tokens"]


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for: a look for a source does without."""
    from importlib import import_module

    if name not in _WHERE:
        raise AttributeError(f"module 'penstock.data' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
