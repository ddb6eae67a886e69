"""The process that has started this one, without torch: noted before anything that takes its time is imported."""

import os

_parent = 0


def _note() -> None:
    global _parent
    _parent = os.getppid()


def is_orphan() -> bool:
    """True if the process that has started this one has ended since."""
    return os.getppid() != _parent


_note()
os.register_at_fork(after_in_child=_note)
