"""Schedules of many ranks, and of one: every family that does not offload. Nothing here imports torch.

``request`` is what is asked for, ``families`` the names and ``build``. ``recorder`` writes down one rank's ops and
sizes its pools. ``replicated`` are the data-parallel families; ``orders`` and ``folded`` say in which order a rank of
a pipeline does its work, ``stages`` which layers it holds, ``pipeline`` turns that into ops; ``grid`` is pipelines
beside each other with sharded weights. May import: ``config``, ``errors``, the rest of ``schedule``.
"""

from penstock.schedule.distributed.families import FAMILIES, Family, build
from penstock.schedule.distributed.request import GatherGroup, Request, Sizes

__all__ = ["FAMILIES", "Family", "GatherGroup", "Request", "Sizes", "build"]
