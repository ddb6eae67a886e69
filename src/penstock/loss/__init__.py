"""A language model's own loss, without its logits.

    tiled   ``tiled_loss``, a ``loss_fn``: a model's head hands out a stand-in for logits, which knows how to make them
    tiles   the cross-entropy of a linear head, computed tile by tile, forward and backward

Importing the package itself imports no torch. May import: ``errors``, ``compat``.
"""

DEFAULT_TILE = 1024
"""Tokens. With a vocabulary of 128k, 0.5 GB for each of the few fp32 arrays that are alive in a tile."""
