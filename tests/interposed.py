"""Commands of ``penstock`` in processes of their own, one of whose system calls fails, or is the last.

``Commands`` starts one process that has imported all that the commands need, with ``interposed.cpp`` loaded before
everything else. For each case it forks a child, which takes a tenth of the time of a new process, and in which calls on
the files of the given folders are counted from the first line of ``main`` on.
"""

import ctypes
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE

_CRASHED = 99
KILL = -1
"""In the place of an errno: SIGKILL, before the call is made."""


class Kind(IntFlag):
    """Kinds of system calls, as ``interposed.cpp`` numbers them."""

    OPEN = 1
    MAKE = 2
    READ = 4
    WRITE = 8
    FLUSH = 16
    NAMES = 32
    LOOK = 64
    LOCK = 128


_ALL = Kind(255)
FAILS: dict[str, tuple[int, Kind]] = {
    "EIO": (errno.EIO, _ALL),
    "ENOSPC": (errno.ENOSPC, Kind.MAKE | Kind.WRITE | Kind.FLUSH | Kind.NAMES),
    "EACCES": (errno.EACCES, Kind.OPEN | Kind.MAKE | Kind.NAMES | Kind.LOOK),
    "EROFS": (errno.EROFS, Kind.MAKE | Kind.WRITE | Kind.NAMES),
    "EMFILE": (errno.EMFILE, Kind.OPEN | Kind.MAKE),
    "EINTR": (errno.EINTR, Kind.OPEN | Kind.MAKE | Kind.READ | Kind.WRITE | Kind.FLUSH | Kind.LOCK),
    "SIGKILL": (KILL, _ALL & ~Kind.LOOK),
}
"""What a call can come to, and which kinds of calls it is said of."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended. ``kinds``: how many calls there were of each. ``struck``: the one that was hit, with its
    path."""

    code: int
    said: str
    kinds: Mapping[str, int]
    struck: str

    def calls(self, fault: str) -> int:
        """How many calls there were that a fault is said of."""
        return sum(self.kinds[str(int(kind))] for kind in Kind if kind & FAILS[fault][1])

    @property
    def clean(self) -> bool:
        """True if it ended as a command may: done, or with an error in words."""
        return self.code in (0, 1, 2) and "Traceback" not in self.said


class Commands:
    """Made by ``commands``."""

    def __init__(self, server: "subprocess.Popen[str]", output: Path) -> None:
        self._server, self._output = server, output

    def run(self, words: Sequence[str], folders: Sequence[Path], *, fault: str = "EIO", at: int = -1) -> Ended:
        """``penstock words``. ``at``: which of the calls that ``fault`` is said of is hit, from 0; -1: none."""
        code, kinds = FAILS[fault]
        asked = {
            "words": list(words),
            "folders": "".join(f"{os.path.realpath(folder)}\n" for folder in folders),
            "kinds": int(kinds),
            "at": at,
            "code": code,
            "output": str(self._output),
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        return Ended(**answer, said=self._output.read_text(errors="replace"))


@contextmanager
def commands(folder: Path) -> Iterator[Commands]:
    """``folder``: where the library is built, and the output of the commands goes; and profiles of the machine, into
    ``cache``."""
    library = folder / "interposed.so"
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run(["c++", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.interposed"],
        env=os.environ
        | alone
        | {"LD_PRELOAD": str(library), "TOKENIZERS_PARALLELISM": "false", "XDG_CACHE_HOME": str(folder / "cache")},
        cwd=source.parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Commands(server, folder / "output")
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.kill()
        server.wait(PATIENCE)


# ---- in the server


def _serve() -> None:
    gc.disable()  # there is no garbage among what is imported
    import torch
    import torch._dynamo
    import torch._subclasses.schema_check_mode
    import transformers.models.llama.modeling_llama  # noqa: F401

    import penstock.cli.export
    import penstock.cli.plan
    import penstock.cli.report
    import penstock.cli.train
    import penstock.cli.verify
    import penstock.doctor.examine
    import penstock.report.picture  # noqa: F401

    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)
    shim = ctypes.CDLL(None)
    shim.interposed_struck.restype = ctypes.c_char_p
    shim.interposed_count.restype = ctypes.c_long
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _carry_out(asked, shim)
        code = _await(child)
        struck = shim.interposed_struck().decode(errors="replace")
        kinds = {int(kind): shim.interposed_count(int(kind)) for kind in Kind}
        sys.stdout.write(json.dumps({"code": code, "kinds": kinds, "struck": struck}) + "\n")
        sys.stdout.flush()


def _await(child: int) -> int:
    """The exit code of a child; minus the number of a signal that ended it."""
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


def _carry_out(asked: dict[str, Any], shim: ctypes.CDLL) -> None:
    """The command, in the child; does not return."""
    from penstock.cli import main

    signal.alarm(int(PATIENCE))  # a command that hangs ends by SIGALRM
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = _CRASHED
    try:
        shim.interpose(os.fsencode(asked["folders"]), asked["kinds"], ctypes.c_long(asked["at"]), asked["code"])
        code = main(asked["words"])
    except BaseException:  # noqa: BLE001  whatever it is: it is what the test looks for
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
