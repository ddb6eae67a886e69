"""Decides how a model is trained on a machine, and tells what to expect. Nothing here imports torch at module level.

    costs, layer_costs             what an op costs on a machine
    update_mode                    waiting for the norm, speculating, delaying: what is possible
    request, plan                  a step to fit into a budget; a schedule with what it was built from
    fit, own_schedule              a plan that fits, by a fixed order of preference; a schedule of the user's own in it
    phases, sample, probes,        the phases of a step, and what it asks of each lane in each of them, read off
    classes, phase_costs           schedules of a small program
    placement_lp, rounding,        the linear program over tiers, whole groups from its shares, what the programs
    proposals, search              propose, and the search that lets the simulator decide
    places, dealt, joint           ranks of a pipeline that are alike; the plans of all, and the world that they make;
                                   the search for them
    task, batches, forecast,       what is asked, how large a step should be, what follows from a plan, what would help
    roofline, advice, ask

May import: ``errors``, ``config``, ``schedule``, ``sim``, ``hardware``, ``shape``.
"""
