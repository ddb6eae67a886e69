"""Measurements of ranks: rates of collectives between them, how much these and other lanes slow each other, and whether
all ranks compute the same bits. ``measure``: of ranks on this machine, in processes of their own; ``link``: of hosts,
by the ranks that are on them.

    python -m penstock.doctor.between SECONDS ROUNDS        one of them, as ``torchrun`` would start it

Each does what the engine's net lane does, at its sizes: it gathers a group from all parts, and exchanges chunks of a
gradient and adds them up. All do so at once, so that a rate is of one rank while the others have it, too.
"""

import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TypeVar

import torch

from penstock.doctor import work
from penstock.doctor.contention import LEAST
from penstock.errors import ConfigError
from penstock.hardware.machine import Between, Network
from penstock.optim import agreement
from penstock.ranks.group import Ranks
from penstock.ranks.order import add_up
from penstock.ranks.process_groups import join
from penstock.ranks.start import torchrun_mesh
from penstock.schedule.ir.lanes import Lane
from penstock.schedule.place import FP32

T = TypeVar("T")

LARGE, _SMALL = 1 << 22, 1 << 10
"""elements that a collective is of in all: 16 MiB, of which a block of a small model has a few; and next to none"""
_LONG = 0.25
"""seconds that a large collective may take"""
_PATIENCE = 120.0
"""seconds after which the measurement is given up"""
_OF_A_START = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_WORLD_SIZE")
"""Beginnings of what torchrun has set in the environment of a process that it has started: these are others."""


def measure(ranks: int, *, cores: int, seconds: float, rounds: int) -> Between:
    """Measure collectives between so many ranks, each with its share of the ``cores`` as its threads.

    Raises:
        ConfigError: a process failed; quotes the end of what it said.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    plain = {key: value for key, value in os.environ.items() if not key.startswith(_OF_A_START)}
    environment = plain | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(seconds), str(rounds)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = []
    try:
        said = [process.communicate(timeout=_PATIENCE) for process in processes]
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{ranks} ranks on this machine do not reach each other within {_PATIENCE:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [error for process, (_, error) in zip(processes, said, strict=True) if process.returncode]
    if failed:
        raise ConfigError(f"{ranks} ranks on this machine cannot be measured: {failed[0][-1000:]}")
    found = json.loads(said[0][0].splitlines()[-1])
    return Between(**found | {"other_bits": tuple(found["other_bits"])})


def look(ranks: Ranks, seconds: float, rounds: int) -> Between:
    """Measure together with all other ranks, which call this too: ``rounds`` times, ``seconds`` for each rate."""
    found = _look(ranks, ranks, "net", torch.device("cpu"), seconds, rounds)
    return Between(
        ranks=ranks.size,
        bandwidth=found.bandwidth,
        latency=found.latency,
        contention=found.contention,
        other_bits=other_bits(ranks),
    )


def link(ranks: Ranks, device: torch.device, seconds: float, rounds: int) -> Network:
    """Measure a host's link to the others together with all other ranks, which call this too: ranks that share all
    state, on several hosts. The first rank of each host sends and receives; the others compute as it does.

    Raises:
        BudgetError, ConfigError: on all ranks: one has no room to measure in. They can go on together.
    """
    place = ranks if ranks.size == ranks.hosts else ranks.of_place
    return _look(ranks, place if ranks.is_first_on_host else None, "nic", device, seconds, rounds)


def _look(
    ranks: Ranks, among: Ranks | None, crossing: Lane, device: torch.device, seconds: float, rounds: int
) -> Network:
    """The link of ranks ``among`` all, over which goes what is of the lane ``crossing``. None: this rank has none."""
    latency, large = [], []
    slower: dict[str, list[float]] = {}
    with ExitStack() as closing:
        small, some, lanes = _made(
            ranks,
            lambda: (
                _gathering(among, _SMALL, device),
                _gathering(among, LARGE // 16, device),
                _lanes(device, closing),
            ),
        )
        numel = _size(ranks, some)
        gather, exchange = _made(ranks, lambda: (_gathering(among, numel, device), _exchanging(among, numel, device)))
        calls = _calls(ranks, lambda: (gather(), exchange()), seconds)  # as many on each
        for _ in range(rounds):
            latency.append(_each(ranks, small, 10 * calls))
            alone = _each(ranks, gather, calls) + 2 * _each(ranks, exchange, calls)
            large.append(alone / 3)
            for lane, other in lanes.items():
                took, its = _beside(ranks, lambda: (gather(), exchange(), exchange()), calls, other, seconds)
                slower.setdefault(f"{crossing}+{lane}", []).append(took / alone - 1)
                slower.setdefault(f"{lane}+{crossing}", []).append(its - 1)
    contention = {pair: round(statistics.median(found), 3) for pair, found in slower.items()}
    contention |= {pair.replace("h2d", "d2h"): value for pair, value in contention.items() if "h2d" in pair}
    size, wait = max(ranks.gather_objects("size", 0 if among is None else among.size)), statistics.median(latency)
    sent = numel * FP32 * (size - 1) / size
    return Network(
        bandwidth=sent / max(statistics.median(large) - wait, 1e-9),
        latency=wait,
        contention={pair: value for pair, value in contention.items() if value >= LEAST},
    )


def _lanes(device: torch.device, closing: ExitStack) -> dict[Lane, Callable[[], None]]:
    """The work of other lanes that sending and it may slow."""
    if device.type != "cpu":  # a GPU computes beside its link
        return {}
    return {
        "compute": work.layer(device).workers[0],
        "cpu": work.Steps(device, threads=torch.get_num_threads()).load("adamw").workers[0],
        "h2d": work.copies("h2d", device, closing).workers[0],
    }


def _made(ranks: Ranks, make: Callable[[], T]) -> T:
    """This rank's result of ``make``, once all have theirs. Where one has no room for it, nobody waits for that one.

    Raises:
        BudgetError, ConfigError: on all ranks, what it has raised.
    """

    def made() -> T:
        try:
            return make()
        except (OSError, MemoryError, RuntimeError) as error:  # torch's: no memory, for one
            raise ConfigError(f"{type(error).__name__}: {error}") from error

    return ranks.jointly("measurement", made)


def other_bits(ranks: Ranks) -> tuple[str, ...]:
    """Computations whose bits differ between ranks for the same numbers: optimizers and precisions, or ``product``.

    Ranks may, where one has other kernels or threads than another: an environment of its own is enough.
    """
    digests = agreement.digests(torch.get_num_threads()) | {"product": _product()}
    found = ranks.gather_objects("bits", digests)
    return tuple(name for name in digests if len({theirs[name] for theirs in found}) > 1)


def _product() -> str:
    """A checksum of a matrix product whose sums are long enough to be cut up."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((64, 4096), (4096, 64)))
    return hashlib.blake2b((a @ b).numpy().tobytes(), digest_size=16).hexdigest()


def _gathering(ranks: Ranks | None, numel: int, device: torch.device) -> Callable[[], None]:
    if ranks is None:
        return _nothing
    part = torch.ones(numel // ranks.size, device=device)
    out = torch.zeros(part.numel() * ranks.size, device=device)

    def one() -> None:
        ranks.gather(out, part)
        work.wait_for(device)

    return one


def _exchanging(ranks: Ranks | None, numel: int, device: torch.device) -> Callable[[], None]:
    """An exchange of a chunk of a gradient, as the engine does it."""
    if ranks is None:
        return _nothing
    chunk = numel // ranks.size
    gradient, own = torch.ones(ranks.size, chunk, device=device), torch.zeros(chunk, device=device)
    into, out = torch.zeros(2, ranks.size, chunk, device=device)

    def one() -> None:
        into.copy_(gradient)
        ranks.exchange(out, into)
        add_up(tuple(out), own)
        work.wait_for(device)

    return one


def _nothing() -> None:
    """A call of a rank that sends nothing."""


def _size(ranks: Ranks, some: Callable[[], None]) -> int:
    """Elements of a collective to measure with, the same on all ranks: fewer where the link is slow, by a collective of
    ``some``, a sixteenth of the most."""
    some()
    took = _each(ranks, some, 1)
    brief = LARGE // 16
    return max(brief, min(LARGE, brief << max(0, int(_LONG / took).bit_length() - 1)))


def _calls(ranks: Ranks, one: Callable[[], object], seconds: float) -> int:
    """The number of calls that take about so long, at least two and the same on all ranks: by one that is timed, after
    one that does not count."""
    one()
    began = time.perf_counter()
    one()
    took = time.perf_counter() - began
    return max(2, round(seconds / max(ranks.gather_objects("seconds", took))))


def _each(ranks: Ranks, one: Callable[[], object], calls: int) -> float:
    """Seconds of a call, of the slowest rank."""
    ranks.gather_objects("start", None)
    began = time.perf_counter()
    for _ in range(calls):
        one()
    return max(ranks.gather_objects("seconds", (time.perf_counter() - began) / calls))


def _beside(
    ranks: Ranks, one: Callable[[], object], calls: int, other: Callable[[], None], seconds: float
) -> tuple[float, float]:
    """Seconds of a call while another thread of each rank does something else, and how many times longer that takes
    than while nothing is sent: the mean of all ranks."""
    stop, ends = threading.Event(), list[float]()

    def repeat() -> None:
        while not stop.is_set():
            other()
            ends.append(time.perf_counter())

    thread = threading.Thread(target=repeat, daemon=True)
    ranks.gather_objects("start", None)
    thread.start()
    try:
        time.sleep(seconds)
        ranks.gather_objects("alone", None)
        before = time.perf_counter()
        took = _each(ranks, one, calls)
        after = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    alone = [end for end in ends if end <= before]
    beside = [end for end in ends if before < end <= after]
    pace = _pace(alone), _pace(beside)
    found = pace[1] / pace[0] if all(pace) else 1.0
    return took, statistics.mean(ranks.gather_objects("slower", found))


def _pace(ends: Sequence[float]) -> float:
    """Seconds from one end to the next; 0 where there are not two."""
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else 0.0


def main(words: Sequence[str]) -> None:
    seconds, rounds = float(words[0]), int(words[1])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    cpu = torch.device("cpu")
    ranks = join(torchrun_mesh("cpu"), cpu)
    try:
        with ranks.together("the measurement"):
            found = look(ranks, seconds, rounds) if ranks.hosts == 1 else link(ranks, cpu, seconds, rounds)
            ranks.gather_objects("end", None)
    finally:
        ranks.close()
    print(json.dumps(asdict(found)), flush=True)
    os._exit(0)  # threads of torch's that still run as a process ends may abort it


if __name__ == "__main__":
    main(sys.argv[1:])
