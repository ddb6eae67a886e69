"""Python programs in processes of their own that need not import torch: forked from a server that has.

``run(words)`` and ``start(words)`` are ``subprocess.run([sys.executable, *words])`` and ``subprocess.Popen``: with a
process id, signals, an exit code, standard streams, an environment and a folder of their own, 3 s earlier. What a test
says of imports, of memory, or of the very start of a process it must say of a cold one; but for amounts of memory so
large that they are mapped anew (``tests/bench/test_folder.py``).
"""

import atexit
import contextlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Self


class Forked(ForkServerProcess):
    """A process of the server's that has the environment of whoever makes it, as one that is started has. By itself it
    would have the server's, which may begin before the fixtures of all tests: with the user's own folders, then."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._environment = dict(os.environ)

    def run(self) -> None:
        _take_over(self._environment)
        super().run()


class Server(ForkServerContext):
    """As ``multiprocessing`` has it, with ``Forked`` processes."""

    Process = Forked


def server() -> Server:
    """Starts processes from a server that has imported what they need, which takes it seconds, once.

    It must have no other threads, which a fork would lose: ``OMP_NUM_THREADS`` is 1 in all tests.
    """
    assert os.environ["OMP_NUM_THREADS"] == "1"
    context = Server()
    context.set_forkserver_preload(["tests.warm_imports"])
    return context


class Process:
    """A running program, as ``subprocess.Popen`` with pipes for text has it. ``given``: descriptors of its
    standard output and standard error, instead of pipes; ``quiet``: nobody hears what it says."""

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        given: Sequence[int] = (),
        quiet: bool = False,
    ) -> None:
        self.args = [str(word) for word in words]
        pipes = [] if quiet or given else [multiprocessing.Pipe(duplex=False) for _ in range(2)]
        files = [os.dup(file) for file in given] or [os.open(os.devnull, os.O_RDWR) for _ in range(2) if quiet]
        theirs = [end for _, end in pipes] or [Connection(file) for file in files]
        environment = dict(os.environ if env is None else env)
        where = str(Path.cwd() if cwd is None else cwd)
        self._process = server().Process(target=_become, args=(self.args, environment, where, theirs))
        self._process.start()
        for end in theirs:
            end.close()
        self.stdout, self.stderr = [_text(end) for end, _ in pipes] or (None, None)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def sentinel(self) -> int:
        """Ready, for ``multiprocessing.connection.wait``, when it has ended."""
        return self._process.sentinel

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """To a program that has ended: nothing. The server hears of an end first, and tells it then."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it still writes to its standard output and its standard error, until it ends."""
        said = ["", ""]

        def read(number: int, stream: IO[str]) -> None:
            said[number] = stream.read()

        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in enumerate(streams)]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return said[0], said[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def start(words: Sequence[str | Path], **more: Any) -> Process:
    """A program that runs: ``-c CODE``, ``-m MODULE`` or a script, and what it is given. Ended, by a ``with``, if it
    has not ended by then."""
    return Process(words, **more)


def run(
    words: Sequence[str | Path], *, timeout: float | None = None, **more: Any
) -> "subprocess.CompletedProcess[str]":
    """A program that has ended, with all that it has said."""
    with start(words, **more) as process:
        out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def _text(end: Connection) -> IO[str]:
    file = os.dup(end.fileno())
    end.close()
    return open(file, encoding="utf-8", errors="replace")


# ---- in the process


def _become(words: list[str], environment: dict[str, str], where: str, streams: list[Connection]) -> None:
    """Never returns: this process is the program from here on."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    _take_over(environment)
    os.chdir(where)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # pytest's own, in the server
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    code = _outcome(words)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of a program does
    atexit._run_exitfuncs()
    for stream_of_text in (sys.stdout, sys.stderr):
        try:
            stream_of_text.flush()
        except OSError:
            code = code or 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _take_over(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is looked up once, and the server may have


def _outcome(words: list[str]) -> int:
    """The exit code that Python would end with; negative: the signal that it would end itself by."""
    try:
        become(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    except BaseException:  # noqa: BLE001 - Python itself
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def become(words: list[str]) -> None:
    """Run a program in this process, as Python would."""
    match words:
        case ["-c", code, *rest]:
            sys.argv, sys.path[0] = ["-c", *rest], ""
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), main.__dict__)
        case ["-m", module, *rest]:
            sys.argv, sys.path[0] = [module, *rest], os.getcwd()
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *_]:
            sys.argv, sys.path[0] = words, str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")
