"""Runs an unmodified model block by block: suspended forwards, block-level backward.

    blocks   which submodules are the blocks            groups   which parameters move together, and how they are attached
    tape     stages, checkpoints, gradients of a step   passage  one micro-batch's suspended forward, cut and recomputation
    probe    learns a model's program                   watch    what each op of a probe reads and allocates
    legs     turns what was seen into stages            graph    autograd by pieces
    rng      seeds as a function of place               trees    tensors in nested arguments
    init     fills a model from the meta device

``tape`` is built on ``probe`` and ``passage``; ``passage`` on ``graph`` and ``trees``. May import: ``config``,
``errors``, ``schedule.program``. Importing the package itself imports no torch.
"""
