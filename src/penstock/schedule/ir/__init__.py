"""The schedule as data: lanes, references, ops and schedules, worlds of ranks, and the reader of their text form.

May import: ``config``, ``errors``.
"""
