"""Decides how a model is trained on a machine, and tells what to expect. Nothing here imports torch at module level.

    costs, layer_costs             what an op costs on a machine
    update_mode                    waiting for the norm, speculating, delaying: what is possible
    fit, own_schedule              a plan that fits, by a fixed order of preference; a schedule of the user's own in it
    phase_costs, placement_lp,     the linear program over tiers, whole groups from its shares, what the programs
    rounding, proposals, search    propose, and the search that lets the simulator decide
    alternatives                   a plan's means beside those that it could have had instead
    task, batches, forecast,       what is asked, how large a step should be, what follows from a plan, what would help
    roofline, advice, ask

May import: ``errors``, ``config``, ``schedule``, ``sim``, ``hardware``, ``shape``.
"""
