"""Simulation: how long a schedule takes, and how much memory it holds when, on a machine that need not exist.

``simulate`` runs every rank's lanes in time, in native code (``library``); ``Costs`` say how long
an op takes and which lanes slow each other down. Nothing here imports torch. May import: ``errors``, ``native``,
``config``, ``schedule``.
"""
