"""Rich's console, as wide as the terminal."""

import os
import shutil
from typing import TextIO

from rich.console import Console


class _Console(Console):
    """A console whose cursor stays: a process that has hidden it, and is suspended or killed, leaves the terminal
    without one."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


def console(out: TextIO, *, soft_wrap: bool = False) -> Console:
    """A console that writes to ``out``, texts as they are: ``:x:`` in a folder's name is no picture. COLUMNS and LINES
    count, but for 0, of which rich makes pages without a character: some programs set it for a size that they do not
    know."""
    size = shutil.get_terminal_size()
    return _Console(
        file=out,
        highlight=False,
        emoji=False,
        soft_wrap=soft_wrap,
        width=size.columns if _is_no_size("COLUMNS") else None,
        height=size.lines if _is_no_size("LINES") else None,
    )


def _is_no_size(name: str) -> bool:
    """True of a variable that rich would take for a size, and which is none."""
    text = os.environ.get(name, "")
    return text.isdigit() and not (text.isdecimal() and int(text) > 0)
