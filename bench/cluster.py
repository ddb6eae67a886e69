"""Hosts on one machine: network namespaces that a switch joins, for what trains on several hosts.

    host0 (10.199.0.1)  eth0 ---- switch ---- eth0  host1 (10.199.0.2)

Each is a namespace of its own, the switch too, so that nothing of this machine's own network changes. A host has a name
and processes that no other one sees, as real ones have; memory and files they share. Links can be cut, and be given a
rate. Needs root. Imported by sides of benchmarks in environments of their own: the standard library only.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

PORT = 29400
_numbers = count()
_NEW_UTS, _NEW_NET = 0x04000000, 0x40000000


class Cluster:
    """So many hosts, ``with`` which ends them and all that runs on them. ``folder``: for what they are told."""

    def __init__(self, hosts: int, folder: Path) -> None:
        self.hosts = hosts
        self._name = f"penstock-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._name}-switch"
        self._names = folder

    def namespace(self, host: int) -> str:
        return f"{self._name}-{host}"

    def address(self, host: int) -> str:
        return f"10.199.0.{host + 1}"

    def __enter__(self) -> "Cluster":
        try:
            names = [f"{self.address(host)} host{host}" for host in range(self.hosts)]
            (self._names / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
            (self._names / "resolv.conf").write_text("nameserver 127.0.0.1\n")
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            for host in range(self.hosts):
                own, port = self.namespace(host), f"port{host}"
                _ip("netns", "add", own)
                _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", own)
                _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
                _ip("-n", own, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
                for link in ("lo", "eth0"):
                    _ip("-n", own, "link", "set", link, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(self.hosts):
            self.kill(host)
        for name in (*map(self.namespace, range(self.hosts)), self._switch):
            with suppress(subprocess.CalledProcessError):  # it was never made
                _ip("netns", "delete", name)

    # ---- what happens to a host

    def cut(self, host: int) -> None:
        """Take a host's link down, as a cable that is pulled."""
        _ip("-n", self.namespace(host), "link", "set", "eth0", "down")

    def mend(self, host: int) -> None:
        _ip("-n", self.namespace(host), "link", "set", "eth0", "up")

    def kill(self, host: int) -> None:
        """End all that runs on a host at once."""
        for process in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def processes(self, host: int) -> list[int]:
        try:
            return [int(word) for word in _ip("netns", "pids", self.namespace(host)).split()]
        except subprocess.CalledProcessError:
            return []

    def shape(self, mbit: float) -> None:
        """Let each host send, and be sent, so many megabits a second."""
        for host in range(self.hosts):
            for where, link in ((self.namespace(host), "eth0"), (self._switch, f"port{host}")):
                rule = ["dev", link, "root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms"]
                _run("tc", "-n", where, "qdisc", "replace", *rule)

    def sent(self, host: int) -> int:
        """Bytes that a host has sent to the others since it was made, with all headers."""
        (link,) = json.loads(_ip("-n", self.namespace(host), "-s", "-j", "link", "show", "eth0"))
        return int(link["stats64"]["tx"]["bytes"])

    # ---- what runs on a host

    def on(self, host: int, words: Sequence[str | Path]) -> list[str]:
        """A command that runs another one on a host."""
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        binds = " && ".join(f'mount --bind "$0/{name}" /etc/{name}' for name in ("hosts", "resolv.conf"))
        named = ["sh", "-c", f'hostname host{host} && {binds} && exec "$@"', str(self._names)]
        return ["ip", "netns", "exec", self.namespace(host), *apart, *named, *map(str, words)]

    def torchrun(self, host: int, each: int, python: Path | str, words: Sequence[str | Path]) -> list[str]:
        """A command that starts ``each`` processes on a host, of as many on all of them, which find each other."""
        agent = [python, "-m", "torch.distributed.run", "--nnodes", self.hosts, "--nproc-per-node", each]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.address(0)}:{PORT}", "--rdzv-id", self._name]
        meet += ["--local-addr", self.address(host)]
        return self.on(host, [*map(str, agent), *meet, *words])

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """That of every process of theirs."""
        return {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **(more or {})}


def move_to(namespace: str, name: str) -> None:
    """Make this thread, and what it starts from here on, one of a host's. Others still see its process."""
    with Path("/run/netns", namespace).open() as file:
        _libc("setns", file.fileno(), _NEW_NET)
    _libc("unshare", _NEW_UTS)
    socket.sethostname(name)


@contextmanager
def started(
    commands: Sequence[Sequence[str]], logs: Sequence[Path], *, cwd: Path, env: Mapping[str, str]
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Programs that run, each with a log of what it says. Ended where they have not ended by then."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as said:
                process = subprocess.Popen(
                    command, cwd=cwd, env=env, stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
                )
                running.append(process)
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


@cache
def why_none() -> str | None:
    """Why this process can make no hosts, or None when it can."""
    try:
        with TemporaryDirectory() as folder, Cluster(1, Path(folder)) as one:
            _run(*one.on(0, ["true"]))
            one.shape(1000)
    except FileNotFoundError as error:
        return f"there is no {error.filename} (iproute2, util-linux)"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return None


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def _libc(name: str, *given: int) -> None:
    """Call the C library, as Python 3.12 does by itself (``os.setns``, ``os.unshare``)."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*given):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
