"""Weights that stay in host memory from their last load of a step until the optimizer takes them from there.

A step on disk reads a group's weights for its forward and for its backward, and the optimizer reads them again beside
the state. The last of these loads may read into the buffer that the optimizer takes, which then reads the state alone.

*Which*: of the groups whose weights are found on disk, and that step within the backward, those whose last load is for
the visit that the step follows, or for one with which at most one other visit that reads weights lies between. So a
block's weights are kept from the load for its backward, the last block's, which stay on the device for that (``stay``),
from the one for its forward, and a head's from the one for the epilogue; but not those of an embedding, from the first
load of a step to its last update. Groups that wait for the norm keep nothing: all would at once. Nor do delayed chunks,
whose weights are new when they are loaded, nor frozen ones, nor those of a step that makes its weights from the state.

*What it costs*: a chunk's buffer is taken by the read, and given back by what brings the stepped weights home. Loads
are written down at most ``Depths.weights`` visits ahead (``rank``), and a group's step in what follows its last visit.
So when all ops before some point have run, those buffers are held whose load is for a visit up to so many ahead, and
whose last visit is not over. The pool has the most that this ever is of them, of blocks one more than the depth, and
``Depths.stage_out`` more. Without these the read of a group's state, which comes behind the loads ahead of it in its
lane, would wait until the group before it is written, and reading and writing would take turns: by as many chunks the
writes may lag, as where nothing is kept.

There is no deadlock: the read lane alone takes from the pool, in the order of emission, and in that order it never
lacks a buffer (``emitter``). What gives one back waits for the upload and the step of its own chunk and for the writes
before it, none of which is behind a load that could wait for that buffer.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

from penstock.schedule.lower.route import Route
from penstock.schedule.lower.stay import Stay
from penstock.schedule.place import Settings


def kept_groups(route: Route, settings: Settings, stay: Stay, counts: Mapping[int, int]) -> dict[int, int]:
    """Group -> the visit whose load leaves its weights in host memory. ``counts``: of the groups that step on the host
    within the backward, chunks that do so in this step."""
    if not settings.form.steps_weights:
        return {}
    last_loads = {g: stay.loads[g][-1] for g, n in counts.items() if n and settings.place.weights[g] == "disk"}
    return {g: i for g, i in last_loads.items() if route.readers_between(i, route.last_visit[g]) <= 1}


def most_kept(route: Route, ahead: int, kept: Mapping[int, int], counts: Mapping[int, int]) -> int:
    """The most chunks that are kept at once if no lane runs ahead. ``kept``, ``counts``: of ``kept_groups``; ``ahead``:
    visits by which loads come before their turn. Matrices step one visit later (``updates_of_matrices``)."""
    changes = Counter[int]()
    for g, index in kept.items():
        changes[index - ahead] += counts[g]
        changes[route.last_visit[g] + (1 if route.program.groups[g].whole is None else 2)] -= counts[g]
    return max(accumulate(changes[i] for i in sorted(changes)), default=0)
