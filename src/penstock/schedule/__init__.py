"""The schedule: what runs when, as plain data. Nothing here imports torch.

``program`` is what has to be computed, ``op`` the IR with its text form, ``route`` the visits of a step in order,
``provision`` the pools that follow from it; one file per family of schedules builds it, ``check`` proves it safe. May
import: ``errors``, ``config``.
"""
