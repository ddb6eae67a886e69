"""Runs an unmodified model block by block: suspended forwards, block-level backward.

    blocks    finds the submodules that are the blocks
    refusals  refuses models that cannot be run so
    groups    parameters that move together, and how they are attached to memory
    tape      a step: its micro-batches, stage by stage
    running   one stage of one micro-batch: its random numbers, and the gradients that come of it
    suspended  one micro-batch's suspended forward, and its cuts
    backward  the backward of that: blocks by recomputation
    early_stop  recomputations without the last product of a block
    boundary  stands in front of a block, where forwards are suspended
    saved_activations  those of a step, which may leave the device
    let_go    weights and activations that are elsewhere: to read one is an error
    facts     a block where it stands, and what the probe has learned about a stage
    likeness  compares a recomputation's results with its forward's
    outline   what of a model can be another between two steps, so that it is to be probed again
    probe     learns a model's program from one micro-batch; watch sees its ops, segments makes stages of them
    buffers   which buffers code changes, and as they were
    graph     autograd by pieces
    compiled  torch.compile of blocks
    modes     torch's switches of a thread
    rng       seeds as a function of the place in training
    trees     tensors in nested arguments
    opaque    tensors in objects that cannot be looked into
    changes   what a forward changes outside of modules
    smuggled  tensors that pass by other ways than arguments and results
    weight_views  views of weights that are read when the weight has left
    asked     calls of autograd in a model's forward
    parameters  hooks on parameters, and parameters that must stay
    unequal   torch's errors about dtypes, by module
    cut       ends the graph behind a block
    init      fills a model from the meta device
    guard     refuses uses of the model outside of the engine

``tape`` is built on ``probe`` and ``running``, these on ``suspended``, that on ``backward``, and ``backward`` on
``graph`` and ``trees``. Importing the package itself imports no torch. May import: ``errors``, ``compat``,
``schedule``.
"""
