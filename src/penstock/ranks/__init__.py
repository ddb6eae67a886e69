"""Several processes that train one model: who they are, what moves between them, and what they have agreed on.

    start    the mesh of what torchrun has started
    parent   who has started this process, and whether that is still there
    axes     how they share the state
    group    what ranks do together: gathers and exchanges of tensors, and what all of them say; who is alone
    process_groups  several ranks on process groups of torch.distributed
    telling  what ranks tell each other
    left     the groups of closed engines, which the next one uses again
    waiting  calls of torch that wait for all of them
    watch    who has failed, ended, or does not answer
    between  the same for collectives of whatever else runs in the ranks' processes
    calls    who is in a call of an engine to which another one cannot come
    levels   collectives within hosts and between them
    order    the one order in which the gradients of all ranks are added up
    share    which elements of every param group are whose

The only room that uses ``torch.distributed``: it starts nothing (``torchrun`` does) and moves bytes by the collectives
that are there. What is added up is added up here, so that the numbers depend on no backend.

May import: ``errors``, ``compat``, ``accelerator``, ``schedule``.
"""
