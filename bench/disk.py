"""``python -m bench.disk``: the store's 8 MiB direct reads, writes, and both at once, against fio on the same file.

Both sides keep the same number of 8 MiB requests in flight per direction, which is what a lane of the executor does,
walk the file in order, and run in turn (store, fio, store, fio, ...) for a fixed time each. fio uses libaio.

Which memory a buffer is in matters more than who reads: the drive takes a request as physically contiguous runs, and in
scattered 4 KiB pages it needs many more. The store's buffers are in huge pages. fio is measured with its own default
memory, and with huge pages too where this process may reserve them (root; given back at the end).

The store checks what it reads; fio does not look at it. So reads have a side more: fio that compares each byte with
what the file consists of.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.harness import ROOT, machine, write_section
from penstock.store import Layout, Store
from penstock.store.facts import store_exists
from penstock.store.removal import delete_store
from penstock.store.store import DATA
from penstock.store.transfer import aligned_bytes

CHUNK = 8 << 20
REQUIRED = 0.95
_EXTENT = "bench"
_PATTERN = np.random.default_rng(0).bytes(512)
"""What all of the file consists of, whoever has written it last: the store checks what it reads."""
_COMPARING = "fio, huge pages, comparing"
_HUGE_PAGES = 40  # of 2 MiB: fio keeps depth x 8 MiB per direction and rounds up

Move = Callable[[str, int, npt.NDArray[np.uint8]], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What both sides do: ``depth`` requests of ``CHUNK`` bytes in flight per direction, for ``seconds``."""

    path: Path
    nbytes: int
    depth: int
    seconds: int


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second of each direction; 0 where a direction was not asked for."""

    read: float
    write: float

    @property
    def total(self) -> float:
        return self.read + self.write


@dataclass(frozen=True, kw_only=True)
class Work:
    name: str
    read: bool
    write: bool


WORKS = (
    Work(name="read", read=True, write=False),
    Work(name="write", read=False, write=True),
    Work(name="both", read=True, write=True),
)


def store_rates(store: Store, work: Work, setting: Setting, buffers: list[npt.NDArray[np.uint8]]) -> Rates:
    """Move chunks through the store from ``depth`` threads per direction, as the executor's lanes do: where both are
    asked for, each in its half of the file, since what is being written cannot be read."""
    chunks = setting.nbytes // CHUNK
    middle = chunks // 2 if work.read and work.write else 0
    to_read, to_write = range(middle or chunks), range(middle, chunks)
    deadline = time.perf_counter() + setting.seconds
    with ThreadPoolExecutor(2 * setting.depth) as lanes:
        runs: dict[str, list[Future[float]]] = {"read": [], "write": []}
        for worker in range(setting.depth):
            if work.read:
                runs["read"].append(
                    lanes.submit(_walk, store.read, buffers[2 * worker], to_read[worker :: setting.depth], deadline)
                )
            if work.write:
                runs["write"].append(
                    lanes.submit(
                        _walk, store.write, buffers[2 * worker + 1], to_write[worker :: setting.depth], deadline
                    )
                )
    return Rates(**{verb: sum(run.result() for run in workers) for verb, workers in runs.items()})


def _walk(move: Move, buffer: npt.NDArray[np.uint8], places: Sequence[int], deadline: float) -> float:
    """The given chunks of the file in order, round and round, until the deadline: bytes per second."""
    start = now = time.perf_counter()
    chunks = 0
    while now < deadline:
        move(_EXTENT, places[chunks % len(places)] * CHUNK, buffer)
        chunks += 1
        now = time.perf_counter()
    return chunks * CHUNK / (now - start)


def fio_rates(work: Work, setting: Setting, memory: Sequence[str]) -> Rates:
    """The same work by fio, on the store's own file."""
    common = [
        f"--filename={setting.path / DATA}",
        f"--size={setting.nbytes}",
        f"--bs={CHUNK}",
        f"--iodepth={setting.depth}",
        f"--runtime={setting.seconds}",
        "--ioengine=libaio",
        "--direct=1",
        "--time_based",
        "--fallocate=none",
        "--allow_file_create=0",
        "--scramble_buffers=0",  # the store does not make up new bytes between writes either
        f"--buffer_pattern=0x{_PATTERN.hex()}",
        *memory,
    ]
    jobs = [[f"--name={verb}", f"--rw={verb}"] for verb in ("read", "write") if getattr(work, verb)]
    command = ["fio", "--output-format=json", *(option for job in jobs for option in [*job, *common])]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return Rates(**{verb: sum(job[verb]["bw_bytes"] for job in report["jobs"]) for verb in ("read", "write")})


@contextmanager
def fio_sides() -> Iterator[dict[str, list[str]]]:
    """fio's options per name of a side; huge pages are reserved meanwhile if this process may."""
    reserve = Path("/proc/sys/vm/nr_hugepages")
    before = reserve.read_text()
    sides: dict[str, list[str]] = {"fio": []}
    try:
        reserve.write_text(str(int(before) + _HUGE_PAGES))
        if int(reserve.read_text()) == int(before) + _HUGE_PAGES:
            sides["fio, huge pages"] = ["--iomem=mmaphuge", "--hugepage-size=2m"]
            sides[_COMPARING] = [
                *sides["fio, huge pages"],
                "--verify=pattern",
                f"--verify_pattern=0x{_PATTERN.hex()}",
            ]
        else:
            reserve.write_text(before)
            print("fio runs with its default memory only: memory is too fragmented to reserve huge pages")
    except PermissionError:
        print("fio runs with its default memory only: reserving huge pages needs root")
    try:
        yield sides
    finally:
        if len(sides) > 1:
            reserve.write_text(before)


Samples = dict[tuple[str, str], list[Rates]]  # of a work and a side


def measure(store: Store, setting: Setting, rounds: int) -> Samples:
    """The rates of every side at every work, ``rounds`` times in turn; who goes first goes round as well."""
    buffers = [aligned_bytes(CHUNK) for _ in range(2 * setting.depth)]
    for buffer in buffers:
        buffer[:] = _content()
    found: Samples = {}
    with fio_sides() as fio:
        for turn in range(rounds):
            for work in WORKS:
                order = deque(["store", *(side for side in fio if side != _COMPARING or not work.write)])
                order.rotate(turn)
                for side in order:
                    rates = (
                        fio_rates(work, setting, fio[side])
                        if side in fio
                        else store_rates(store, work, setting, buffers)
                    )
                    found.setdefault((work.name, side), []).append(rates)
                    print(f"  round {turn + 1}/{rounds}  {work.name:<5}  {side:<26}  {_show(rates)} GB/s", flush=True)
    return found


def _show(rates: Rates) -> str:
    parts = f" ({rates.read / 1e9:.2f}+{rates.write / 1e9:.2f})" if rates.read and rates.write else ""
    return f"{rates.total / 1e9:.2f}{parts}"


def _median(rates: list[Rates]) -> Rates:
    return Rates(read=statistics.median(r.read for r in rates), write=statistics.median(r.write for r in rates))


def table(found: Samples) -> tuple[str, float]:
    """A Markdown table of medians, and the smallest ratio; a ratio is the median over the rounds of store over fio."""
    lines = ["| work | store, GB/s | against | GB/s | ratio | required |", "|---|---|---|---|---|---|"]
    worst = float("inf")
    for (work, side), theirs in found.items():
        if side != "store":
            ours = found[work, "store"]
            ratio = statistics.median(a.total / b.total for a, b in zip(ours, theirs, strict=True))
            worst = min(worst, ratio)
            shown = [_show(_median(rates)) for rates in (ours, theirs)]
            lines.append(f"| {work} | {shown[0]} | {side} | {shown[1]} | {ratio:.3f} | {REQUIRED} |")
    return "\n".join(lines), worst


def _content() -> npt.NDArray[np.uint8]:
    """A chunk of the file."""
    return np.tile(np.frombuffer(_PATTERN, np.uint8), CHUNK // len(_PATTERN))


def prepare(setting: Setting) -> Store:
    """A store whose whole file has been written once, so that no side pays for first writes."""
    setting.path.parent.mkdir(parents=True, exist_ok=True)
    if store_exists([setting.path]):
        delete_store([setting.path])
    layout = Layout.build([(_EXTENT, setting.nbytes, 1)])
    store = Store.create([setting.path], layout, model={}, direct=True)
    buffer = aligned_bytes(CHUNK)
    buffer[:] = _content()
    for offset in range(0, setting.nbytes, CHUNK):
        store.write(_EXTENT, offset, buffer)
    store.flush()
    return store


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.disk", description=__doc__)
    parser.add_argument(
        "--path", type=Path, default=ROOT / ".bench" / "disk", help="where the file is made and removed"
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the file")
    parser.add_argument("--depth", type=int, default=2, help="requests in flight per direction")
    parser.add_argument("--seconds", type=int, default=2, help="of each run")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-results", action="store_true", help="print only")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        parser.error("fio is not installed: apt install fio")
    setting = Setting(
        path=options.path,
        nbytes=options.mib << 20,
        depth=options.depth,
        seconds=options.seconds,
    )
    store = prepare(setting)
    try:
        with store:
            found = measure(store, setting, options.rounds)
    finally:
        delete_store([setting.path])
        setting.path.rmdir()
    text, worst = table(found)
    print(text)
    if not options.no_results:
        how = (
            f"`python -m bench.disk`: {options.rounds} rounds of {options.seconds} s a side, depth {options.depth}, "
            f"{options.mib} MiB file, fio with libaio; the store checks what it reads; "
            "a ratio is the median over the rounds of store/fio."
        )
        body = f"{how}\n\n{machine()}\n\n{text}"
        print(f"written to {write_section('disk', body)}")
    return 0 if worst >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
