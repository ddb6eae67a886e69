"""Profiles of machines, measured by ``penstock doctor`` or shipped, and the folder where they are kept.

Nothing here imports torch. May import: ``errors``, ``documents``, ``config``, ``schedule``.
"""
