"""``python -m tests.sweep``: run every type, as far as it has not been run, and write the table.

--again VERDICT   run again what came to that verdict (equal, refused, differs, crashed, skipped, all)
--only WORD       only jobs with WORD in their name
--jobs N          processes at a time
--document        run nothing: write what the table says into docs/architectures.md, as each run does at its end
--table FILE      another table than the one that is kept in the repository
--in-memory       with all state in memory and graphs kept on the device, instead of weights and state on disk; into
                  another table
--bf16            a step in bf16, against the model that from_pretrained gives in bf16 (``rounded``); into another table
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parents[2] / ".venv" / "sweep"))  # see ``packages``

import torch

from tests.sweep import packages

packages.name_operations()  # which transformers, when it is imported, wants to be there

import transformers  # noqa: E402  behind that

from tests.sweep import document, rounded, trial  # noqa: E402  likewise
from tests.sweep.trial import Job, Result  # noqa: E402  likewise

Way = Callable[[Job, Path], Result]
"""A way to run a type, beside an empty folder."""

TABLE = Path(__file__).parent / "results.json"
SECONDS = 300.0
"""that a type may take"""
MEMORY = 6 << 30
"""bytes of address space that it may take more than it begins with"""


@dataclass(frozen=True, kw_only=True)
class _Running:
    job: Job
    process: Any
    results: Connection
    until: float
    disk: Path


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep")
    parser.add_argument("--again", action="append", default=[])
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) - 1, 1))
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--document", action="store_true")
    another = parser.add_mutually_exclusive_group()
    another.add_argument("--in-memory", action="store_true")
    another.add_argument("--bf16", action="store_true")
    asked = parser.parse_args(arguments)
    if (asked.in_memory or asked.bf16) and asked.table == TABLE:
        parser.error("the table that is kept is of state on disk, in fp32: give another one (--table)")
    way: Way = rounded.run if asked.bf16 else partial(trial.run, in_memory=asked.in_memory)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    known = read(asked.table)
    todo = [
        job
        for job in trial.jobs()
        if not asked.document
        and (not asked.only or any(word in job.name for word in asked.only))
        and (job.name not in known or "all" in asked.again or known[job.name].verdict in asked.again)
    ]
    for result in _run_all(todo, asked.jobs, way):
        known[_name(result)] = result
        print(f"{result.verdict:8} {result.seconds:5.1f} s  {_name(result)}  {result.reason[:150]}", flush=True)
        write(known, asked.table)
    if asked.table == TABLE:
        document.PAGE.write_text(document.page(document.PAGE.read_text(), read(TABLE).values(), version(TABLE)))
    counts = Counter(result.verdict for result in known.values())
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return int(any(counts[verdict] for verdict in ("differs", "crashed")))


def read(table: Path = TABLE) -> dict[str, Result]:
    """The table: results by the names of their jobs."""
    if not table.exists():
        return {}
    found = [Result(**row) for row in json.loads(table.read_text())["results"]]
    return {_name(result): result for result in found}


def version(table: Path = TABLE) -> str:
    """The version of transformers that a table was made with."""
    return str(json.loads(table.read_text())["versions"]["transformers"])


def write(results: dict[str, Result], table: Path) -> None:
    rows = [results[name].as_json() for name in sorted(results)]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    about = json.dumps({"transformers": transformers.__version__, "torch": torch.__version__})
    table.write_text(f'{{"versions": {about}, "results": [\n{lines}\n]}}\n')


def _name(result: Result) -> str:
    return Job(kind=result.kind, type=result.type, model=result.model).name


def _run_all(todo: Sequence[Job], processes: int, way: Way) -> Any:
    """Each job in a process of its own, forked from this one, where all that takes long to import is imported."""
    waiting, running = list(reversed(todo)), list[_Running]()
    while waiting or running:
        while waiting and len(running) < processes:
            running.append(_start(waiting.pop(), way))
        wait([r.results for r in running], timeout=max(min(r.until for r in running) - time.monotonic(), 0.0))
        for one in list(running):
            if one.results.poll() or time.monotonic() > one.until:
                running.remove(one)
                yield _end(one)


def _start(job: Job, way: Way) -> _Running:
    disk = Path(tempfile.mkdtemp(prefix="penstock-sweep-"))
    mine, its = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(job, disk, way, its))
    process.start()
    its.close()
    return _Running(job=job, process=process, results=mine, until=time.monotonic() + SECONDS, disk=disk)


def _child(job: Job, disk: Path, way: Way, results: Connection) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    if "SWEEP_VERBOSE" not in os.environ:
        os.dup2(null, 2)
    result = way(job, disk / "store")
    results.send(replace(result, seconds=round(time.process_time(), 1)))


def _end(one: _Running) -> Result:
    about = {"kind": one.job.kind, "type": one.job.type, "model": one.job.model}
    try:
        result: Result = (
            one.results.recv()
            if one.results.poll()
            else Result(**about, verdict="crashed", reason=f"it did not end within {SECONDS:.0f} s")
        )
    except EOFError:
        one.process.join()
        result = Result(**about, verdict="crashed", reason=f"the process ended with {one.process.exitcode}")
    one.process.kill()
    one.process.join()
    shutil.rmtree(one.disk, ignore_errors=True)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
