"""``penstock`` and ``python`` for shell scripts that tests run: each call is a process of ``tests.warm``.

What a script starts is a small program, which hands its words, its environment, its folder and its output on to the
test's process, and ends as the process that runs for it there does. When it is killed, so is that one.
"""

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from tests.warm import Process

_PROGRAM = """#!{python} -SE
import json, os, socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({address!r})
words = [*{prefix!r}, *sys.argv[1:]]
socket.send_fds(link, [json.dumps([words, os.getcwd(), dict(os.environ)]).encode()], [1, 2])
code = int(link.recv(100))
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def commands(folder: Path) -> Iterator[Path]:
    """A folder for the front of PATH, made in ``folder``."""
    place = folder / "bin"
    place.mkdir()
    address = str(folder / "s")
    for name, prefix in (("python", []), ("penstock", ["-m", "penstock.cli"])):
        program = place / name
        program.write_text(_PROGRAM.format(python=sys.executable, address=address, prefix=prefix))
        program.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(address)
        server.listen()
        ended, end = os.pipe()
        thread = threading.Thread(target=_serve, args=(server, ended))
        thread.start()
        try:
            yield place
        finally:
            os.close(end)
            thread.join()
            os.close(ended)


def _serve(server: socket.socket, ended: int) -> None:
    """Until the other end of ``ended`` is closed. What was killed is seen to before anything new is started."""
    running: dict[socket.socket, Process] = {}
    while True:
        ready = wait([ended, server, *running, *(process.sentinel for process in running.values())])
        for link, process in list(running.items()):
            if process.sentinel in ready:
                process.wait()
                link.send(str(process.returncode).encode())
            elif link in ready or ended in ready:
                process.kill()
                process.wait()
            else:
                continue
            link.close()
            del running[link]
        if ended in ready:
            return
        if server in ready:
            link, _ = server.accept()
            running[link] = _started(link)


def _started(link: socket.socket) -> Process:
    message, files, _, _ = socket.recv_fds(link, 1 << 20, 2)
    words, where, environment = json.loads(message)
    process = Process(words, env=environment, cwd=where, given=files)
    for file in files:
        os.close(file)
    return process
