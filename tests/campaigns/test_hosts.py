"""Two hosts of two ranks in each layout: what one process does. And hosts that are killed, cut off for good or for a
moment, or slow: an error names the host within ten seconds, or the step goes on; and all go on from their last step,
bit by bit. Hosts are network namespaces here.
"""

import filecmp
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.cluster import Cluster, started

from tests import warm
from tests.conftest import Campaign
from tests.patience import PATIENCE, until
from tests.ranks.launched import Launched
from tests.ranks.test_cluster import WORDS, numbers, on_hosts, penstock
from tests.runs import write_run_of_three_blocks as write_run

SOON = 10.0
"""seconds"""

SLOW = """
import os, sys, time
from penstock.cli import main
from penstock.engine.engine import Engine
step = Engine.step
def slow(engine, *args, **given):
    time.sleep(1.0 if os.environ["RANK"] == os.environ.get("SLOW", os.environ["RANK"]) else 0.0)
    return step(engine, *args, **given)
Engine.step = slow
sys.exit(main())
"""
"""Steps of a second, so that there is a moment to do something in."""


IN_FOUR = (*WORDS[:2], "--strands", "4", *WORDS[4:])
LAYOUTS: dict[str, tuple[str, ...]] = {
    "cut over all": (),
    "cut over all, horizontal": ("--schedule", "horizontal"),
    "cut over all in stage 2": ("--stage", "2"),
    "a copy on each host": ("--copies", "2"),
    "pipelines beside each other": ("--pipeline", "2"),
    "pipeline": ("--pipeline", "4"),
    "1f1b": ("--pipeline", "4", "--schedule", "1f1b"),
    "interleaved-1f1b": ("--pipeline", "4", "--schedule", "interleaved-1f1b"),
    "zero-bubble": ("--pipeline", "4", "--schedule", "zero-bubble"),
    "cp": ("--cp", "2"),
    "cp, horizontal": ("--cp", "2", "--schedule", "horizontal"),
    "cp between hosts": ("--cp", "2"),
    "cp between hosts, horizontal": ("--cp", "2", "--schedule", "horizontal"),
}
"""What asks for each."""
ONE_EACH = ("cp between hosts", "cp between hosts, horizontal")
"""Those of one rank on each host: neighbours that share a sequence are on one where it has more."""


def steps(folder: Path) -> int:
    file = folder / "run" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that nothing happens to."""
    folder = tmp_path_factory.mktemp("alone")
    write_run(folder, run=folder / "run")
    (folder / "host").mkdir()
    done = warm.run(["-m", "penstock", *WORDS], cwd=folder / "host", timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return folder


def gone_on(cluster: Cluster, folder: Path, alone: Path) -> None:
    """Resumed, the run ends with the numbers of the one that nothing happened to."""
    for code, _, errors in on_hosts(cluster, folder, "-m", "penstock", *WORDS, "--resume").outcomes():
        assert code == 0, errors
    assert numbers(folder / "run") == numbers(alone / "run")


def outcomes_after(running: Launched, happens: Callable[[], None]) -> tuple[list[tuple[int, str, str]], float]:
    """What all say, and the seconds that it took from what happened until the last had ended."""
    happens()
    since = time.monotonic()
    found = running.outcomes()
    return found, time.monotonic() - since


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a run of four steps by one process, and by two hosts of two ranks in each layout, exported."""
    found = dict[str, Path]()
    found["one process"] = alone = tmp_path_factory.mktemp("one-process")
    write_run(alone, run=alone / "run")
    (alone / "host0").mkdir()
    assert penstock(alone / "host0", *IN_FOUR)[0] == 0
    for layout, asked in LAYOUTS.items():
        found[layout] = folder = tmp_path_factory.mktemp(layout.replace(" ", "-"))
        with Cluster(2, folder) as hosts:
            each, words = 1 if layout in ONE_EACH else 2, ("-m", "penstock", *IN_FOUR, *asked)
            for code, _, errors in on_hosts(hosts, folder, *words, each=each).outcomes():
                assert code == 0, (layout, errors)
        shutil.copytree(folder / "host1" / "drive", folder / "host0" / "drive", dirs_exist_ok=True)
    for folder in found.values():
        code, said = penstock(folder / "host0", "export", folder / "run", "out")
        assert code == 0, said
    return found


@pytest.mark.campaign
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_hosts_of_two_ranks_in_each_layout_do_what_one_process_does(
    layout: str, exported: dict[str, Path], campaign: Campaign
) -> None:
    """No bit differs of losses, norms and weights. Where ranks share sequences, attention comes in other pieces: these
    are as close as torch's own attention is, and no bit differs among the schedules."""
    one, own = exported["one process"], exported[layout]
    if "--cp" in LAYOUTS[layout]:
        for line, other in zip(numbers(own / "run"), numbers(one / "run"), strict=True):
            known = [value for value in other if value is not None]
            assert [value for value in line if value is not None] == pytest.approx(known, rel=1e-4)
        one = exported["cp between hosts" if layout in ONE_EACH else "cp"]
    assert numbers(own / "run") == numbers(one / "run")
    names = sorted(path.name for path in (one / "host0" / "out").iterdir())
    assert filecmp.cmpfiles(one / "host0" / "out", own / "host0" / "out", names, shallow=False) == (names, [], [])
    like = next(name for name, folder in exported.items() if folder is one)
    campaign.found(f"two hosts of two ranks, {layout}: bit by bit as {like}")


def test_a_host_that_is_cut_off_for_good_is_named_and_all_go_on(
    two_hosts: Cluster, alone: Path, campaign: Campaign, tmp_path: Path
) -> None:
    if not campaign.full:
        pytest.skip("a silence takes eight seconds")
    for host in range(2):  # one of them has the ranks' common store
        folder = tmp_path / str(host)
        folder.mkdir()
        running = on_hosts(two_hosts, folder, "-c", SLOW, *WORDS)
        until(lambda folder=folder: steps(folder) >= 1)  # type: ignore[misc]
        found, seconds = outcomes_after(running, lambda host=host: two_hosts.cut(host))  # type: ignore[misc]
        assert seconds < SOON, (host, seconds)
        assert all(code == 1 for code, _, _ in found), found
        # Whoever is first ends; that it has is seen from the other host, as processes are here.
        assert re.search(r"rank 1 on host host1 (has not answered for 8 s|was killed)", found[0][2])
        assert "the host at 10.199.0.1, which has the ranks' common store, has not answered for 8 s" in found[1][2]
        two_hosts.mend(host)
        gone_on(two_hosts, folder, alone)
        campaign.found(f"link of host {host} down for good: named after {seconds:.1f} s, gone on bit by bit")


def test_a_link_that_is_down_for_three_seconds_costs_nothing_but_time(
    two_hosts: Cluster, alone: Path, campaign: Campaign, tmp_path: Path
) -> None:
    if not campaign.full:
        pytest.skip("it is down for three seconds")
    running = on_hosts(two_hosts, tmp_path, "-c", SLOW, *WORDS)
    until(lambda: steps(tmp_path) >= 1)
    two_hosts.cut(1)
    time.sleep(3.0)
    two_hosts.mend(1)
    for code, _, errors in running.outcomes():
        assert code == 0, errors
    assert numbers(tmp_path / "run") == numbers(alone / "run")
    campaign.found("link down for 3 s: the step goes on, bit by bit")


def test_a_slow_rank_is_waited_for(two_hosts: Cluster, alone: Path, campaign: Campaign, tmp_path: Path) -> None:
    if not campaign.full:
        pytest.skip("four steps of a second")
    found = on_hosts(two_hosts, tmp_path, "-c", SLOW, *WORDS, SLOW="1").outcomes()
    assert [code for code, _, _ in found] == [0, 0], found
    assert numbers(tmp_path / "run") == numbers(alone / "run")


def test_a_host_whose_drives_are_lost_takes_the_state_over(
    two_hosts: Cluster, campaign: Campaign, tmp_path: Path
) -> None:
    """Two ranks on each host, which has a copy of the state."""
    if not campaign.full:
        pytest.skip("tests/ranks/test_copies.py has it without hosts")
    of_four = [word if word != "2" else "4" for word in WORDS]  # strands
    words = [*of_four, "--copies", "2"]
    (alone := tmp_path / "alone").mkdir()
    write_run(alone, run=alone / "run")
    (alone / "host").mkdir()
    done = warm.run(["-m", "penstock", *of_four], cwd=alone / "host", timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    (folder := tmp_path / "several").mkdir()
    running = on_hosts(two_hosts, folder, "-c", SLOW, *words, each=2)
    until(lambda: steps(folder) >= 2)
    for process in running.processes[2:]:
        process.kill()
    found = running.outcomes()
    assert all("on host host1" in errors for _, _, errors in found[:2]), found
    shutil.rmtree(folder / "host1" / "drive")
    refused = on_hosts(two_hosts, folder, "-m", "penstock", *words, "--resume", each=2).outcomes()
    for _, _, errors in refused:
        assert "drive/rank-2, drive/rank-3 are not there: is the drive mounted?" in errors
        assert (
            "(mkdir -p drive/rank-2 drive/rank-3): rank 2 then takes the state over from rank 0, rank 3 from" in errors
        )
    for rank in (2, 3):  # as the errors say
        (folder / "host1" / "drive" / f"rank-{rank}").mkdir(parents=True)
    again = on_hosts(two_hosts, folder, "-m", "penstock", *words, "--resume", each=2).outcomes()
    assert [code for code, _, _ in again] == [0] * 4, again
    assert "rank 2: drive/rank-2: the state is taken over from rank 0" in again[2][2]
    assert numbers(folder / "run") == numbers(alone / "run")
    code, said = penstock(folder / "host0", "export", folder / "run", "out")
    assert code
    assert "drive/rank-2 is not here" in said
    shutil.copytree(folder / "host1" / "drive", folder / "host0" / "drive", dirs_exist_ok=True)
    assert penstock(folder / "host0", "export", folder / "run", "out")[0] == 0
    assert penstock(alone / "host", "export", alone / "run", "out")[0] == 0
    names = sorted(path.name for path in (alone / "host" / "out").iterdir())
    compared = filecmp.cmpfiles(alone / "host" / "out", folder / "host0" / "out", names, shallow=False)
    assert compared == (names, [], [])
    campaign.found("a host's drives lost: taken over from the other host's copy, bit by bit")


def test_a_host_that_is_killed_under_torchrun_is_named_and_all_go_on(
    two_hosts: Cluster, alone: Path, campaign: Campaign, tmp_path: Path
) -> None:
    """Cold processes, which do not see those of the other host; all of them end at once with their agent."""
    if not campaign.full:
        pytest.skip("torchrun takes half a minute to start")
    folders = [tmp_path / f"host{host}" for host in range(2)]
    for own in folders:
        own.mkdir()
    write_run(tmp_path, run=tmp_path / "run")
    (tmp_path / "slow.py").write_text(SLOW)
    command = ["--", tmp_path / "slow.py", *WORDS]
    running = [
        started(
            [two_hosts.torchrun(host, 1, sys.executable, command)],
            [tmp_path / f"log{host}"],
            cwd=folders[host],
            env=two_hosts.environment({"TMPDIR": str(tmp_path)}),
        )
        for host in range(2)
    ]
    with running[0] as (first,), running[1]:
        until(lambda: steps(tmp_path) >= 1)
        two_hosts.kill(1)
        since = time.monotonic()
        until(lambda: "penstock, rank 0: " in (tmp_path / "log0").read_text())
        seconds = time.monotonic() - since
        two_hosts.kill(0)
        first.wait(PATIENCE)
    assert seconds < SOON
    assert "rank 1 on host host1" in (tmp_path / "log0").read_text()
    gone_on(two_hosts, tmp_path, alone)
    campaign.found(f"a host killed under torchrun: named after {seconds:.1f} s, gone on bit by bit")
