"""Profiles of machines, measured by ``penstock doctor`` or shipped, and the folder where they are kept.

system.py    cores, memory and limits, as the system and its cgroups give them to this process
peaks.py     what makers state of their GPUs
present.py   whether a profile is still of this machine

Nothing here imports torch. May import: ``errors``, ``documents``, ``config``, ``schedule``.
"""
