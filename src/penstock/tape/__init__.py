"""Runs an unmodified model block by block: suspended forwards, block-level backward.

``blocks`` finds the repeated blocks, ``groups`` lays out parameters, ``tape`` runs stages, ``probe`` learns a model's
program from one micro-batch, ``init`` fills a model that was built on the meta device. May import: ``config``,
``errors``, ``schedule.program``.
"""
