"""Runs tests that are marked ``accelerator`` in a process that has the simulated device, and reports them as one's own.

A process has the device from its start or not at all, and everybody in it would find it. So pytest's process gives such
a test to another one, which stays until pytest ends: with fixtures of its own, and one module's for as long as tests of
that module follow each other. On a GPU nothing of this happens, and tests run where they are.
"""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests import warm
from tests.accelerator import DEVICE, build

MARKER = "accelerator"
PREFIX = "penstock-accelerator-"
"""What its folder in the system's temporary one is called; it is there until pytest ends."""
_PROCESS = pytest.StashKey["Elsewhere"]()
_inside = False
"""True if this process is the other one."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _needs_device(item) and build.compiler() is None:
        reason = "the simulated accelerator needs a C++ compiler"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not _needs_device(item) or build.compiler() is None:
        return None
    process = item.config.stash.get(_PROCESS, None)
    if process is None:
        process = item.config.stash[_PROCESS] = Elsewhere(item.session)
        item.config.add_cleanup(process.close)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in process.run(item, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # Of tests that ran here, what the next one does not need goes; pytest has no other name for it.
    vars(item.session)["_setupstate"].teardown_exact(nextitem)
    return True


def _needs_device(item: pytest.Item) -> bool:
    return item.get_closest_marker(MARKER) is not None and DEVICE != "cuda" and not _inside


class Elsewhere:
    """The other process, as pytest's own sees it; another one when it has died."""

    def __init__(self, session: pytest.Session) -> None:
        self._config = config = session.config
        mine = (item.path.relative_to(config.rootpath) for item in session.items if _needs_device(item))
        self._files = [str(path) for path in dict.fromkeys(mine)]
        self._process: warm.Process | None = None

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        if self._process is None:
            self._start()
        following = nextitem.nodeid if nextitem is not None and _needs_device(nextitem) else None
        try:
            self._connection.send((item.nodeid, following))
            reports = self._connection.recv()
        except (EOFError, OSError):
            return [self._died(item)]
        hook = self._config.hook
        return [hook.pytest_report_from_serializable(config=self._config, data=report) for report in reports]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        words = ["-m", __name__, f"{self._folder.name}/tests", *self._files]
        words += ["--campaign"] if self._config.getoption("--campaign") else []
        mine, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it is open as long as the process
        with theirs:
            given = (theirs.fileno(), self._said.fileno())
            self._process = warm.start(words, cwd=self._config.rootpath, given=given)
        self._connection = Connection(mine.detach())

    def _died(self, item: pytest.Item) -> pytest.TestReport:
        assert self._process is not None
        code = self._process.wait()
        self._said.seek(0)
        text = f"the process with the simulated accelerator ended with {code}\n{self._said.read()[-8000:]}"
        self._process = None
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")

    def close(self) -> None:
        if self._process is not None:
            self._connection.send(None)
            self._process.wait()
            self._folder.cleanup()


# ---- in the other process


class Served:
    """Runs what it is asked for, one test after the other."""

    def __init__(self, connection: Connection) -> None:
        from tests.accelerator import simulated, watching

        self._connection = connection
        self._sim = simulated.start()
        watching.install(self._sim)
        self._reports: list[dict[str, Any]] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        while (asked := self._connection.recv()) is not None:
            name, following = asked
            self._reports = []
            session.config.hook.pytest_runtest_protocol(item=items[name], nextitem=items.get(following))
            self._connection.send(self._reports)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._config
        self._reports.append(config.hook.pytest_report_to_serializable(config=config, report=report))

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Nothing may be left to chance, and no kernel may fail unheard."""
        self._sim.clear()
        yield
        findings, failed = self._sim.findings(), self._sim.clear()
        if findings or failed:
            pytest.fail("\n".join(["found by the simulated accelerator:", *findings[:20], *failed]), pytrace=False)


def main() -> None:
    global _inside
    _inside = True
    connection = Connection(os.dup(1))
    os.dup2(2, 1)
    folder, *files = sys.argv[1:]
    given = [f"--basetemp={folder}", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    sys.exit(pytest.main(given, plugins=[Served(connection)]))


if __name__ == "__main__":
    from tests.accelerator import elsewhere

    elsewhere.main()
