"""Documents in, micro-batches out, in an order that is a function of the seed, from any position on.

    sources/      files, folders, patterns, data sets on the hub: examples, one after the other
    example, chat, encode, tokenizer      an example to token ids, and which of them count in the loss
    token_files, prepare, identity        ids on disk, and whether they are still what a run began with
    pieces, packing, mixture, rows        documents to sequences: cut, packed, and in which order
    stream, streamed, batches, ahead      sequences from a position on, to micro-batches, in a thread of their own
    opening, told                         from settings to all of this, and what was read in words

May import: ``config``, ``errors``.
"""

from penstock.data.batches import Batches, HeldOut, Step
from penstock.data.token_files import write_tokens

__all__ = ["Batches", "HeldOut", "Step", "write_tokens"]
