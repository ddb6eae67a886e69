"""Several processes in a network namespace of their own, in which the kernel counts what they alone send each other.

Imported by our side and by DeepSpeed's, which runs in an environment of its own: so it needs the standard library only.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

_UP = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@cache
def why_none() -> str | None:
    """Why this process can make no network namespace, or None when it can."""
    try:
        done = subprocess.run([*_UP, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no unshare (util-linux)"
    return None if done.returncode == 0 else f"unshare --net: {done.stderr.strip()}"


def run_ranks(
    python: Path | str, ranks: int, module: str, *words: str, root: Path, environment: Mapping[str, str], log: Path
) -> int:
    """Run ``python -m module`` as ``ranks`` processes that ``torchrun`` starts, in a namespace of their own where one
    can be made; the exit code. What they say goes to ``log``."""
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", module, *words]
    with log.open("w") as output:
        return subprocess.run(
            [*(_UP if why_none() is None else ()), *command],
            cwd=root,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | dict(environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        ).returncode


def sent_on_loopback(lines: Sequence[str] | None = None) -> int:
    """Bytes that all processes of this network namespace have sent on ``lo`` since it was made, with all headers.
    ``lines``: of ``/proc/net/dev``."""
    for line in Path("/proc/net/dev").read_text().splitlines() if lines is None else lines:
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    raise RuntimeError("/proc/net/dev has no lo: benchmarks need Linux")
