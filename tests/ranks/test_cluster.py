"""Several hosts, which are network namespaces here: one run, its state on each host's own drives."""

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from bench.cluster import Cluster

from penstock.store import successor
from penstock.store.manifest import Manifest
from tests import warm
from tests.patience import PATIENCE
from tests.ranks.launched import Launched
from tests.runs import write_run_of_three_blocks as write_run

WORDS = ("train", "../config.yaml", "--strands", "2", "--batch.sequences", "8", "--budget.disk", "drive")
WORDS += ("--evaluate", "null")
"""The budget names a directory of each host's own. What ranks evaluate ``test_command`` compares."""

STOPPED = """
import os, signal, sys
from penstock.cli import main
from penstock.engine.engine import Engine
step = Engine.step
def stopped(engine, *args, **given):
    if (engine.step_count, os.environ["RANK"]) == (2, "1"):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(engine, *args, **given)
Engine.step = stopped
sys.exit(main())
"""


def numbers(run: Path) -> list[Any]:
    keys = ("step", "loss", "grad_norm", "validation_loss", "lr", "clipped")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[line.get(key) for key in keys] for line in lines]


def on_hosts(cluster: Cluster, folder: Path, *words: str | Path, each: int = 1, **more: str) -> Launched:
    """A program on so many ranks of each host, in a folder of the host's own; the run's is shared."""
    folders = [folder / f"host{host}" for host in range(cluster.hosts)]
    for own in folders:
        own.mkdir(exist_ok=True)
    if not (folder / "config.yaml").exists():
        write_run(folder, run=folder / "run")
    of_ranks = [own for own in folders for _ in range(each)]
    return Launched(each * cluster.hosts, words, of_ranks, cluster=cluster, **more)


def penstock(folder: Path, *words: str | Path) -> "tuple[int, str]":
    done = warm.run(["-m", "penstock", *words], cwd=folder, timeout=PATIENCE)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    write_run(folder, run=folder / "run")
    (folder / "host").mkdir()
    assert penstock(folder / "host", *WORDS)[0] == 0
    return folder / "run"


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        ((), "has the state of 2 ranks on 2 hosts"),
        pytest.param(("--pipeline", "2"), "pipeline=2: this is one process", marks=pytest.mark.campaign),
    ],
)
def test_two_hosts_with_drives_of_their_own_do_what_one_process_does(
    more: tuple[str, ...], refusal: str, alone: Path, two_hosts: Cluster, tmp_path: Path
) -> None:
    """One is killed, and all go on from their last step; what reads all of the state says what is not there."""
    (folder := tmp_path / "several").mkdir()
    began = on_hosts(two_hosts, folder, "-c", STOPPED, *WORDS, *more)
    began.processes[1].wait(PATIENCE)
    since = time.monotonic()
    (code, said, errors), killed = began.outcomes()
    assert time.monotonic() - since < 10
    assert (code, killed[0]) == (1, -signal.SIGKILL), (errors, killed)
    assert "of disk taken in drive on each of 2 hosts" in said
    assert "penstock, rank 0: rank 1 on host host1 was killed" in errors
    assert [path.name for path in (folder / "host1" / "drive").iterdir()] == ["rank-1"]
    refused = penstock(folder / "host0", "resume", folder / "run")
    assert refused[0] == 2
    assert refusal in refused[1]
    limit = ("--budget.endurance.per_day", "1000TB", "--drive_tbw", "1000")
    resumed = on_hosts(two_hosts, folder, "-m", "penstock", "resume", folder / "run", *limit).outcomes()
    for code, _, errors in resumed:
        assert code == 0, errors
    assert " a day of the 1819 TiB allowed" in resumed[0][1], "of the drives of both"
    assert " of the 1819 TiB that they are rated for" in resumed[0][1], "as is their life"
    assert numbers(folder / "run") == numbers(alone)
    code, said = penstock(folder / "host0", "verify", folder / "run")
    assert code
    assert "drive/rank-1 is not here: the run trains on 2 hosts" in said
    shutil.copytree(folder / "host1" / "drive", folder / "host0" / "drive", dirs_exist_ok=True)
    assert "Every checksum is right." in penstock(folder / "host0", "verify", folder / "run")[1]


@pytest.mark.campaign
def test_pipelines_over_two_hosts_of_two_ranks_do_what_one_process_does(
    alone: Path, two_hosts: Cluster, tmp_path: Path
) -> None:
    """The ranks of a host share the state of its blocks. Each time those below are one of a host."""
    (folder := tmp_path / "several").mkdir()
    for code, _, errors in on_hosts(two_hosts, folder, "-m", "penstock", *WORDS, "--pipeline", "2", each=2).outcomes():
        assert code == 0, errors
    assert numbers(folder / "run") == numbers(alone)
    stores = [sorted(path.name for path in (folder / f"host{host}" / "drive").iterdir()) for host in range(2)]
    assert stores == [["rank-0", "rank-1"], ["rank-2", "rank-3"]]


def test_each_host_of_a_pipeline_converts_its_own_moments_and_puts_them_in_their_place(
    two_hosts: Cluster, tmp_path: Path
) -> None:
    """Also what a start before this one has not put there."""
    (alone := tmp_path / "alone").mkdir()
    write_run(alone, run=alone / "run")
    (alone / "host").mkdir()
    (folder := tmp_path / "several").mkdir()
    more, other = ("--steps", "1"), ("--steps", "2", "--optimizer.moments", "int8")
    assert penstock(alone / "host", *WORDS, *more)[0] == 0
    assert penstock(alone / "host", "resume", alone / "run", *other)[0] == 0
    for code, _, errors in on_hosts(two_hosts, folder, "-m", "penstock", *WORDS, *more, "--pipeline", "2").outcomes():
        assert code == 0, errors
    stores = [[folder / f"host{host}" / "drive" / f"rank-{host}"] for host in range(2)]
    for (path,) in stores:
        shutil.copytree(path, successor.staged([path])[0])
    successor.decide(stores[0][0])
    resumed = on_hosts(two_hosts, folder, "-m", "penstock", "resume", folder / "run", *other)
    for code, _, errors in resumed.outcomes():
        assert code == 0, errors
    assert numbers(folder / "run") == numbers(alone / "run")
    assert [Manifest.read(path).model["moments"] for (path,) in stores] == ["int8", "int8"]
    assert successor.decided(stores) is None
    assert not any(place.exists() for paths in stores for place in successor.staged(paths))


def test_the_folder_of_a_run_is_shared_and_what_a_start_has_made_goes_from_all_hosts(
    two_hosts: Cluster, tmp_path: Path
) -> None:
    found = on_hosts(two_hosts, tmp_path, "-m", "penstock", *WORDS, "--run", "run").outcomes()
    said = "run='run' is another folder on host host1 than on the first: the folder of a run has to be on a file system"
    assert [code for code, _, _ in found] == [2, 1]
    assert all(said in errors for _, _, errors in found), found
    small = ("--micro_batch_size", "4", "--budget.device", "300KiB")
    for code, _, errors in on_hosts(two_hosts, tmp_path, "-m", "penstock", *WORDS, *small).outcomes():
        assert code == 2
        assert "budget" in errors
    assert not (tmp_path / "run").exists()
    assert not any((tmp_path / f"host{host}" / "drive").exists() for host in range(2))
