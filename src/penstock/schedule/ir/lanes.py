"""The lanes of a rank: each does one thing at a time, in order."""

from typing import Literal, get_args

Lane = Literal["compute", "h2d", "d2h", "read", "write", "cpu", "net", "nic", "send", "recv"]
LANES: tuple[Lane, ...] = get_args(Lane)
LOCAL_LANES: tuple[Lane, ...] = LANES[:6]
"""The lanes that a rank needs no other rank for."""
STREAM_LANES: tuple[Lane, ...] = LANES[:8]
"""The lanes of a step whose groups stream, on one rank or on several that share them."""
