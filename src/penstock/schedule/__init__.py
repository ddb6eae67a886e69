"""The schedule: what runs when, as plain data. Nothing here imports torch.

``program`` is what has to be computed, ``op`` the IR with its text form, one file per family of schedules
builds it, ``check`` proves it safe. May import: ``config``, ``errors``.
"""
