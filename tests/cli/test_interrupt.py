"""Signals: the first ends a run after its step, the second at once, and a terminal that is gone fails nothing."""

import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import warm
from tests.patience import PATIENCE

LOOP = """
import sys, time
from penstock.cli.showing.display import PlainDisplay
from penstock.cli.interrupt import Interrupt
display = PlainDisplay(sys.stdout)
with Interrupt(display.notice, display.last_words) as interrupt:
    print("ready", flush=True)
    while not (interrupt.requested and sys.argv[1] == "whole steps"):
        time.sleep(0.01)
print("stopped", flush=True)
sys.exit(interrupt.exit_code)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_one_signal_ends_the_loop_after_its_step(number: signal.Signals, code: int) -> None:
    with _loop("whole steps") as process:
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert "stopped" in out
    assert "Stopping after this step" in err


def test_a_second_ctrl_c_stops_at_once() -> None:
    with _loop("endless step") as process:
        assert process.stderr is not None
        os.kill(process.pid, signal.SIGINT)
        assert "Stopping after this step" in process.stderr.readline()
        time.sleep(0.1)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "stopped" not in out
    assert "in the middle of a step" in err


def test_a_second_signal_stops_a_main_thread_that_nothing_wakes() -> None:
    """Any thread may be the one that the kernel interrupts, or the main one just before it begins to wait."""
    body = LOOP.replace("import sys, time", "import queue, signal, sys, threading, time").replace(
        """    while not (interrupt.requested and sys.argv[1] == "whole steps"):
        time.sleep(0.01)
""",
        """    def send():
        for _ in range(2):
            time.sleep(0.2)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    threading.Thread(target=send, daemon=True).start()
    queue.SimpleQueue().get()
""",
    )
    assert "pthread_kill" in body
    done = warm.run(["-c", body], timeout=PATIENCE)
    assert done.returncode == 128 + signal.SIGTERM
    assert "Stopping after this step" in done.stderr
    assert "in the middle of a step" in done.stderr


def test_a_forked_process_is_not_heard_for_its_parent() -> None:
    body = LOOP.replace("import sys, time", "import os, signal, sys, time").replace(
        """    while not (interrupt.requested and sys.argv[1] == "whole steps"):
        time.sleep(0.01)
""",
        """    leaving = os.fork()
    if leaving == 0:
        sys.exit(0)
    assert os.waitpid(leaving, 0)[1] == 0
    child = os.fork()
    if child == 0:
        time.sleep(600)
    for _ in range(2):
        os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), interrupt.requested)
    os.kill(os.getpid(), signal.SIGTERM)
    print(interrupt.requested)
""",
    )
    assert "fork" in body
    done = warm.run(["-c", body], timeout=PATIENCE)
    assert done.stdout.split() == ["ready", "-15", "False", "True", "stopped"]
    assert done.returncode == 128 + signal.SIGTERM


def test_what_cannot_be_said_keeps_no_signal_from_being_heard() -> None:
    body = LOOP.replace(
        "with Interrupt(display.notice, display.last_words)",
        "def fail(text=''):\n    raise OSError(text)\nwith Interrupt(fail, fail)",
    ).replace(
        """    while not (interrupt.requested and sys.argv[1] == "whole steps"):
        time.sleep(0.01)
""",
        """    import os, signal
    os.kill(os.getpid(), signal.SIGTERM)
    print(interrupt.requested, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
""",
    )
    done = warm.run(["-c", body], timeout=PATIENCE)
    assert done.stdout.split() == ["ready", "True"]
    assert done.returncode == 128 + signal.SIGINT


def test_a_terminal_that_closes_with_two_signals_at_once_is_one_request() -> None:
    """As a shell and the kernel send them, torchrun, and systemd."""
    sent = [(signal.SIGHUP, signal.SIGHUP), (signal.SIGHUP, signal.SIGTERM), (signal.SIGTERM, signal.SIGHUP)]
    with ExitStack() as stack:
        processes = [stack.enter_context(_loop("endless step")) for _ in sent]
        for process, (first, second) in zip(processes, sent, strict=True):
            assert process.stderr is not None
            os.kill(process.pid, first)
            assert "Stopping after this step" in process.stderr.readline()
            os.kill(process.pid, second)
        time.sleep(1.2)
        assert [process.poll() for process in processes] == [None] * len(sent)
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(timeout=PATIENCE) == 128 + signal.SIGTERM


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """``nohup`` starts a program with SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    words = [sys.executable, "-c", LOOP, "whole steps"]  # the very start of a process: a cold one
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGHUP)
        time.sleep(0.2)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 128 + signal.SIGTERM


@pytest.mark.parametrize("asked", [None, signal.SIGINT], ids=["closed", "Ctrl-C and closed"])
def test_a_run_whose_terminal_is_gone_still_ends_after_its_step(tmp_path: Path, asked: signal.Signals | None) -> None:
    """What it has to say fails with EIO there; the step and the exit code must not."""
    after = tmp_path / "after"
    loop = LOOP.rpartition("sys.exit")[0].replace("    while", "    time.sleep(0.5)\n    while")
    body = f"{loop}open({str(after)!r}, 'w').write(str(interrupt.exit_code))\n"
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", body, "whole steps"])
    assert b"ready" in os.read(terminal, 100)
    if asked is not None:
        os.kill(child, asked)
        assert b"Stopping after this step" in os.read(terminal, 100)
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    assert after.read_text() == ("129" if asked is None else "130")


def _loop(behaviour: str) -> warm.Process:
    process = warm.start(["-c", LOOP, behaviour])
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process
