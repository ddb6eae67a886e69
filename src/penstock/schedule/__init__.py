"""The schedule: what runs when, as plain data. Nothing here imports torch.

``program`` is what has to be computed, ``work`` how much that is, ``place`` where its bytes live and how they are cut,
``mesh`` and ``dealt`` what each of several ranks has of it, ``alike`` which of them do the same. ``ir`` is the schedule
itself, with its references and its text; ``lower`` makes it; ``check`` proves it safe, and ``meaning`` that it computes
what the program says. May import: ``errors``, ``config``.
"""
