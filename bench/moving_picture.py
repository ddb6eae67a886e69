"""The moving picture of the README: a run that is killed and goes on, and its losses beside those of one that was not.

    python -m bench.moving_picture

A small Llama is trained twice by ``penstock train``, with everything on disk. One run is left alone. The other is
started in a shell, killed by SIGKILL in the middle and started again by the same command. The picture is drawn only if
every loss of the two is equal in all bits. It shows what the shell showed, but for the end of the summary; lines that
are too long are cut, and waits are shortened.
"""

import argparse
import os
import pty
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness import ROOT, BenchError
from bench.moving_svg import Line, Scene, draw
from penstock.report.metrics_file import read_metrics

PICTURE = ROOT / "docs" / "killed.svg"
STEPS, KILLED_AFTER = 40, 17
_PROMPT = "$ "
_PATIENCE = 100.0
_COMMAND = "penstock train tiny.yaml --resume"
_SETTINGS = f"""\
run: runs/tiny
model:
  init: true
  config: {{model_type: llama, hidden_size: 64, intermediate_size: 176, num_hidden_layers: 4, num_attention_heads: 4}}
data:
  sources: [{{path: stdlib, limit: 400KB}}]
  tokenizer: {{train: {{vocabulary: 600, sample: 400KB}}}}
  sequence_length: 64
  packing: continuous
optimizer: {{name: adamw, lr: 2e-3}}
budget: {{device: 8MiB, host: 8MiB, disk: "{{run}}/store", weights: disk, state: disk}}
batch: {{sequences: 8}}
precision: fp32
steps: {STEPS}
"""


@dataclass(frozen=True, kw_only=True)
class Shell:
    """An interactive shell in ``folder``, on a terminal that shows plain lines."""

    pid: int
    terminal: int

    @staticmethod
    def start(folder: Path) -> "Shell":
        pid, terminal = pty.fork()
        if not pid:
            os.chdir(folder)
            programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            environment = os.environ | {"PATH": programs, "PS1": _PROMPT, "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        shell = Shell(pid=pid, terminal=terminal)
        shell._until_prompt([])
        return shell

    def run(self, command: str, look: Callable[[str], None] = lambda line: None) -> list[Line]:
        """The lines from the prompt with the command on, each when it came. ``look`` gets each at once.

        Raises:
            BenchError: the command took too long, or the shell has ended.
        """
        os.write(self.terminal, f"{command}\n".encode())
        lines: list[Line] = []
        self._until_prompt(lines, look)
        return [Line(text=_PROMPT + lines[0].text, at=lines[0].at), *lines[1:]]

    def child(self) -> int:
        """The process that runs in the foreground."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0])

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.terminal)

    def _until_prompt(self, lines: list[Line], look: Callable[[str], None] = lambda line: None) -> None:
        began, rest = time.monotonic(), ""
        while rest != _PROMPT:
            if not select.select([self.terminal], [], [], _PATIENCE)[0]:
                raise BenchError(f"the shell has said nothing for {_PATIENCE:.0f} s; its last line: {rest!r}")
            rest += os.read(self.terminal, 1 << 16).decode()
            *whole, rest = rest.replace("\r\n", "\n").split("\n")
            for text in whole:
                lines.append(Line(text=text, at=time.monotonic() - began))
                look(text)


def losses(run: Path) -> list[float]:
    """The loss of each step of a run, as its metrics have it.

    Raises:
        BenchError: a step is missing.
    """
    found = {m.step: m.loss for m in read_metrics(run / "metrics.jsonl") if m.loss is not None}
    if sorted(found) != list(range(1, STEPS + 1)):
        raise BenchError(f"{run} has {len(found)} steps and not {STEPS}")
    return [found[step] for step in sorted(found)]


def check_equal(whole: Sequence[float], killed: Sequence[float]) -> None:
    """Compare the losses of the two runs.

    Raises:
        BenchError: one differs in any bit.
    """
    for step, (one, other) in enumerate(zip(whole, killed, strict=True), 1):
        if one.hex() != other.hex():
            raise BenchError(f"step {step}: loss {other!r} after the kill, and {one!r} without: nothing is drawn")


def record(folder: Path) -> Scene:
    """Both runs, made in an empty folder.

    Raises:
        BenchError: a run failed, the kill came too late, or the losses differ.
    """
    (folder / "tiny.yaml").write_text(_SETTINGS)
    shell = Shell.start(folder)
    try:
        shell.run("penstock train tiny.yaml --run runs/whole")
        killed: list[int] = []

        def kill(line: str) -> None:
            if line.split()[:2] == ["step", f"{KILLED_AFTER}/{STEPS}"] and not killed:
                killed.append(shell.child())
                os.kill(killed[0], signal.SIGKILL)

        first = shell.run(_COMMAND, kill)
        second = shell.run(_COMMAND)
    finally:
        shell.end()
    if not killed or not any(line.text.startswith("Killed") for line in first):
        raise BenchError(f"the run was not killed:\n{first[-1].text}")
    whole = losses(folder / "runs" / "whole")
    check_equal(whole, losses(folder / "runs" / "tiny"))
    ends = next(i for i, line in enumerate(second) if line.text.startswith("loss "))
    return Scene(losses=whole, first=first, second=second[: ends + 1], pid=killed[0])


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if shutil.which("bash") is None:
        print("bench.moving_picture: needs bash", file=sys.stderr)
        return 2
    with TemporaryDirectory() as folder:
        try:
            scene = record(Path(folder))
        except BenchError as error:
            print(f"bench.moving_picture: {error}", file=sys.stderr)
            return 1
    PICTURE.write_text(draw(scene))
    print(f"{STEPS} losses of the killed run equal those of the other in all bits; drawn: {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
