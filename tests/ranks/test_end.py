"""The end of a process whose engine nobody has closed."""

import subprocess
import sys

_ENDS = """
from torch import distributed as dist
from penstock.ranks import watch
from penstock.ranks.calls import Calls
watch.EVERY = 0.0  # it asks the store all the time
watch.Watch(dist.HashStore(), 0, [watch.Place.here()], Calls())
"""


def test_a_process_that_ends_with_an_engine_open_is_not_aborted() -> None:
    """In a process of its own: what Python does at its end is the subject, and the warm server's children skip it."""
    ended = subprocess.run([sys.executable, "-c", _ENDS], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
