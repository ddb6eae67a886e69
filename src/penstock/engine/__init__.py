"""An engine: a model that is wrapped, and its steps. The only room that imports both the planner and the runtime.

    wrap, arguments, device, start    from a model, its optimizer and a budget to an engine
    engine, resources, progress       ``Engine``: a step, what surrounds it, what it lives on, how far it has got
    profile                           the machine's profile: stored, or measured for a moment
    planning, timing, visiting        micro-batches are probed and timed, and a plan is made for them
    runner                            a plan that can be executed
    fate, attempt, durability, due    which step counts, how it is taken, and when it is durable
    snapshots                         what they keep of an engine, and how it goes on from one
    batch, labels                     what users hand over as micro-batches
    turns, interrupt                  calls come one after another; Ctrl-C ends a run between steps

May import: ``accelerator``, ``errors``, ``files``, ``documents``, ``compat``, ``config``, ``schedule``, ``sim``,
``hardware``, ``loss``, ``tape``, ``ranks``, ``shape``, ``planner``, ``store``, ``optim``, ``state``, ``runtime``,
``doctor``.
"""
