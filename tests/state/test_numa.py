"""Threads and page-locked pools are bound to the GPU's node: where there are several, and only there."""

import os
import threading
from pathlib import Path

import pytest
import torch

from penstock.runtime.executor import Executor
from penstock.runtime.pools import Pools
from penstock.runtime.streams import HostStreams
from penstock.schedule.ir.text import parse_schedule
from penstock.state import numa
from penstock.state.numa import Node

CPU = torch.device("cpu")
GPU = "0000:3b:00.0"


def sysfs(root: Path, cpus: dict[int, str], gpu: int | None) -> Path:
    """A machine with nodes of these cores and a GPU that says it is on node ``gpu``."""
    for node, text in cpus.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n")
    if gpu is not None:
        folder = root / "sys/bus/pci/devices" / GPU
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{gpu}\n")
    return root


TWO = {0: "0-3,8-11", 1: "4-7,12-15"}
ALL = frozenset(range(16))


def test_the_nodes_are_those_with_cores(tmp_path: Path) -> None:
    found = numa.nodes(sysfs(tmp_path, {10: "7", 2: "0-2,5", 3: ""}, None))
    assert [(n.index, sorted(n.cpus)) for n in found] == [(2, [0, 1, 2, 5]), (10, [7])]


def test_it_binds_to_the_cores_of_the_gpus_node(tmp_path: Path) -> None:
    binding = numa.bind(GPU, allowed=ALL, root=sysfs(tmp_path, TWO, gpu=1))
    assert binding == Node(index=1, cpus=frozenset({4, 5, 6, 7, 12, 13, 14, 15}))


def test_it_binds_to_no_core_that_the_process_may_not_use(tmp_path: Path) -> None:
    binding = numa.bind(GPU, allowed=frozenset({2, 3, 4}), root=sysfs(tmp_path, TWO, gpu=0))
    assert binding == Node(index=0, cpus=frozenset({2, 3}))


@pytest.mark.parametrize(
    ("cpus", "gpu", "allowed"),
    [
        ({0: "0-15"}, 0, ALL),  # one node
        ({0: "0-15", 1: ""}, 0, ALL),  # the other is a GPU's memory
        (TWO, -1, ALL),  # the firmware does not say
        (TWO, None, ALL),  # no such device
        (TWO, 5, ALL),  # a node without cores
        (TWO, 1, frozenset({0, 1})),  # the process is kept away from the node
    ],
)
def test_nothing_is_bound_where_there_is_nothing_to_choose(
    tmp_path: Path, cpus: dict[int, str], gpu: int | None, allowed: frozenset[int]
) -> None:
    assert numa.bind(GPU, allowed=allowed, root=sysfs(tmp_path, cpus, gpu)) is None


def test_nothing_is_bound_for_the_cpu(tmp_path: Path) -> None:
    assert numa.bind(None, allowed=ALL, root=sysfs(tmp_path, TWO, gpu=1)) is None
    assert numa.binding_for(CPU) is None
    assert numa.thread_count(CPU) == torch.get_num_threads()
    before = os.sched_getaffinity(0)
    with numa.near(CPU):
        assert os.sched_getaffinity(0) == before


def test_a_disks_node_is_that_of_the_controller_above_it(tmp_path: Path) -> None:
    controller = tmp_path / "sys/devices/pci0000:80/0000:81:00.0"
    disk = controller / "nvme/nvme0/nvme0n1/nvme0n1p1"
    disk.mkdir(parents=True)
    (controller / "numa_node").write_text("1\n")
    assert numa.node_of(disk) == 1
    assert numa.node_of(tmp_path / "sys/devices/virtual/block/dm-0") is None


def test_this_machines_first_node_can_be_bound_to() -> None:
    allowed = frozenset(os.sched_getaffinity(0))
    first = next(node for node in numa.nodes() if node.cpus & allowed)
    binding = Node(index=first.index, cpus=first.cpus & allowed)
    with binding.here():
        assert os.sched_getaffinity(0) == binding.cpus
    assert os.sched_getaffinity(0) == allowed


def test_memory_is_bound_for_a_while_whatever_happens() -> None:
    allowed = os.sched_getaffinity(0)
    one = Node(index=0, cpus=frozenset({min(allowed)}))

    def fail() -> None:
        with one.here():
            assert os.sched_getaffinity(0) == one.cpus
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert os.sched_getaffinity(0) == allowed


def test_every_lane_thread_is_bound_and_the_callers_is_not() -> None:
    schedule = parse_schedule(
        "schedule s micro-batches 1 chunk 4096\n"
        "RW0.0@F0\nUW0.0@F0 after RW0.0@F0\nF0m0 after UW0.0@F0\n"
        "DG0.0@F0 after F0m0\nOP0.0 after DG0.0@F0\nWS0.0 after OP0.0\n"
    )
    allowed = os.sched_getaffinity(0)
    one = Node(index=0, cpus=frozenset({max(allowed)}))
    seen: dict[str, set[int]] = {}
    started: dict[str, set[int]] = {}

    def act(op: object) -> None:
        seen[threading.current_thread().name] = os.sched_getaffinity(0)
        if threading.current_thread() is not threading.main_thread():
            helper = threading.Thread(target=lambda: started.update({str(op): os.sched_getaffinity(0)}))
            helper.start()
            helper.join()

    pools = Pools(schedule, CPU)
    executor = Executor(schedule, pools, act, HostStreams(), binding=one)
    try:
        executor.run()
    finally:
        executor.close()
        pools.close()
    assert seen.pop("MainThread") == allowed
    assert len(seen) == 5
    assert all(cpus == one.cpus for cpus in seen.values())
    assert len(started) == 5
    assert all(cpus == one.cpus for cpus in started.values())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_is_where_sysfs_says() -> None:
    pci = numa.pci_address(torch.device("cuda", 0))
    assert pci is not None
    assert (Path("/sys/bus/pci/devices") / pci / "vendor").read_text().strip() == "0x10de"
