"""The state of a run on all tiers: arrays of the groups, slots of their extents, commits, snapshots.

    memory, numa       page-locked slabs of host and device memory, near the device
    layout, arrays     the arrays that each group has; all of them, wherever they live, and their way between tiers
    slots              which copy of an extent counts, and what a step has written of the other one
    commits, record    the store of a run, and what a commit says besides its arrays
    survey, opening    what each rank finds of its store, and what all decide by that; each does it
    background         state in memory is written while training goes on
    buffers, values    a model's persistent buffers; values by name, out of wherever they live
    convert, converted_stores          the state with its moments in another form; all stores of a run so
    settled, take_over                 stores that take the place of others; state that is lost, and another rank has
    snapshots, stats   whole copies of the state; what a step reports, and its commit keeps

May import: ``accelerator``, ``errors``, ``files``, ``documents``, ``compat``, ``config``, ``schedule``, ``store``,
``optim``, ``ranks``.
"""
