"""Runs an unmodified model block by block: suspended forwards, block-level backward.

    blocks    which submodules are the blocks
    refusals  which models cannot be run so
    groups    which parameters move together, and how they are attached to memory
    tape      a step: stages, checkpoints, gradients
    passage   one micro-batch's suspended forward, its cuts and its recomputation
    likeness  whether a recomputation returned what its forward did
    probe     learns a model's program from one micro-batch; watch sees its ops, legs makes stages of them
    graph     autograd by pieces
    compiled  torch.compile of blocks
    modes     torch's switches of a thread
    rng       seeds as a function of place
    trees     tensors in nested arguments
    opaque    tensors in objects that cannot be looked into
    smuggled  tensors that pass by other ways than arguments and results
    asked     what a forward asks of autograd by itself
    parameters  hooks on parameters, and parameters that must stay
    cut       where the graph ends behind a block
    init      fills a model from the meta device
    guard     refuses uses of the model outside of the engine

``tape`` is built on ``probe`` and ``passage``, and ``passage`` on ``graph`` and ``trees``. Importing the package itself
imports no torch. May import: ``errors``, ``compat``, ``schedule``.
"""
