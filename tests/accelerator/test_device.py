"""The simulated accelerator does what its description says, and finds what it is there to find."""

import ctypes
import os
import re
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from penstock.errors import BudgetError
from penstock.state.memory import HostSlab
from tests.accelerator import DEVICE, simulated
from tests.accelerator.simulated import Simulated

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(DEVICE != "sim", reason="needs the simulated accelerator"),
]

SIM = "sim:0"
"""The device's name as text: in other processes it is no device."""


@pytest.fixture
def sim() -> Iterator[Simulated]:
    sim = simulated.start()
    yield sim
    sim.patience(None)
    sim.limit(simulated.MEMORY)


def test_ops_are_queued_and_have_the_bits_of_the_cpu(sim: Simulated) -> None:
    a, b = torch.randn(30, 30), torch.randn(30, 30, requires_grad=True)
    there = b.detach().to(SIM).requires_grad_()
    result = (a.to(SIM) @ there).softmax(-1).square().sum(0)
    result.sum().backward()
    wanted = (a @ b).softmax(-1).square().sum(0)
    wanted.sum().backward()
    assert torch.equal(result.detach().cpu(), wanted.detach())
    assert there.grad is not None
    assert b.grad is not None
    assert torch.equal(there.grad.cpu(), b.grad)


def test_an_op_runs_when_somebody_waits_for_it_and_not_before(sim: Simulated) -> None:
    target = torch.zeros(1000).pin_memory()
    target.copy_(torch.ones(1000, device=SIM), non_blocking=True)
    assert target.sum() == 0
    torch.accelerator.synchronize()
    assert target.sum() == 1000


def test_with_patience_an_op_runs_at_some_moment(sim: Simulated) -> None:
    target = torch.zeros(1).pin_memory()
    sim.patience(100.0)
    target.copy_(torch.ones(1, device=SIM), non_blocking=True)
    end = torch.Event(SIM)
    end.record()
    while not end.query():
        pass
    assert target == 1


@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_does_not_wait_for_another_is_found(waits: bool, sim: Simulated) -> None:
    source, side = torch.full((1000,), 7.0).pin_memory(), torch.Stream(SIM)
    target = torch.zeros(1000, device=SIM)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        target.copy_(source, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    result = (target * 2).cpu()
    found = sim.findings()
    sim.clear()
    if waits:
        assert result[0] == 14
        assert not found
    else:
        assert result[0] == 0, "and it is late"
        assert len(found) == 1
        assert (
            "read by aten::mul.out on stream 0, not ordered after the write by copy to the device on stream" in found[0]
        )


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_is_freed_while_another_stream_uses_it_is_found(recorded: bool, sim: Simulated) -> None:
    source, side = torch.full((1000,), 3.0, device=SIM), torch.Stream(SIM)
    target = torch.empty(1000).pin_memory()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        target.copy_(source, non_blocking=True)
    if recorded:
        source.record_stream(side)
    del source
    other = torch.full((1000,), 9.0, device=SIM)
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    found = sim.findings()
    sim.clear()
    assert bool(found) is not recorded
    assert bool(target[0] == 3) or not recorded
    assert other.cpu()[0] == 9


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("idle", [False, True])
def test_memory_that_another_stream_uses_before_its_own_has_come_to_it_is_found(
    idle: bool, waits: bool, sim: Simulated
) -> None:
    """Whether nobody has had it yet, or somebody a while ago, makes no difference: else it would be found sometimes."""
    torch.accelerator.empty_cache()
    if idle:
        torch.empty(1000, device=SIM)
    torch.accelerator.synchronize()
    target, side = torch.empty(1000, device=SIM), torch.Stream(SIM)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        target.copy_(torch.zeros(1000).pin_memory(), non_blocking=True)
    found = sim.findings()
    sim.clear()
    assert bool(found) is not waits
    assert all("not ordered after the write by the first use of memory on stream 0" in each for each in found)


def test_a_finding_says_of_how_many_bytes_it_is_and_where(sim: Simulated) -> None:
    side, there = torch.Stream(SIM), torch.ones(1000, device=SIM)

    def used_elsewhere() -> None:
        with side:
            there.mul_(2)

    thread = threading.Thread(target=used_elsewhere, name="another one")
    thread.start()
    thread.join()
    found = sim.findings()
    sim.clear()
    assert found
    said = r"\(of 4000 bytes\), at test_device\.py:\d+ used_elsewhere in another one$"
    assert all(re.search(said, each) for each in found), found


def test_freed_memory_is_overwritten_and_handed_out_again(sim: Simulated) -> None:
    first = torch.ones(1000, device=SIM)
    address = first.data_ptr()
    del first
    second = torch.empty(1000, device=SIM)
    assert second.data_ptr() == address
    assert bool(second.isnan().all())


def test_memory_that_nobody_has_had_holds_nothing_to_rely_on(sim: Simulated) -> None:
    torch.accelerator.empty_cache()
    fresh = torch.empty(12_345_678, device=SIM)
    assert bool(fresh.isnan().all())
    assert sim.findings() == []


def test_memory_that_is_given_back_takes_nothing_from_its_neighbours(sim: Simulated) -> None:
    pairs = [(torch.full((1024 + 128 * i,), 3.0, device=SIM), torch.full((1024,), 5.0, device=SIM)) for i in range(20)]
    stay = [second for _, second in pairs]
    del pairs
    torch.accelerator.empty_cache()
    assert all(bool((each.cpu() == 5).all()) for each in stay)


def test_memory_ends_at_its_limit_and_can_be_had_again(sim: Simulated) -> None:
    torch.accelerator.empty_cache()
    sim.limit(torch.accelerator.memory_reserved() + (4 << 20))
    held = torch.empty(3 << 20, dtype=torch.uint8, device=SIM)
    with pytest.raises(torch.OutOfMemoryError, match="the simulated device is out of memory"):
        torch.empty(2 << 20, dtype=torch.uint8, device=SIM)
    del held
    torch.empty(2 << 20, dtype=torch.uint8, device=SIM)


def test_the_host_cannot_touch_it(sim: Simulated) -> None:
    there = torch.ones(1, device=SIM)
    child = os.fork()
    if not child:
        ctypes.memset(there.data_ptr(), 0, 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_page_locked_memory_is_known_as_such(sim: Simulated) -> None:
    slab = HostSlab(1 << 20, beside=torch.device(SIM))
    assert slab.bytes.is_pinned()
    assert slab.bytes[5000:].is_pinned()
    assert not HostSlab(1 << 20).bytes.is_pinned()
    assert sim.lock_pages(torch.device(SIM), slab.bytes.data_ptr() + 4096, 4096) == 712, "it is already"
    slab.close()


def test_page_locking_that_fails_is_a_budget_error(sim: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "refuses_pages", True)
    with pytest.raises(BudgetError, match=r"could not be page-locked \(sim error 2\)"):
        HostSlab(1 << 20, beside=torch.device(SIM))


def copied_to(*, waits: bool) -> HostSlab:
    """Page-locked memory that the device copies to; ``waits``: until that is over."""
    slab = HostSlab(4096, beside=torch.device(SIM))
    slab.bytes.copy_(torch.ones(4096, dtype=torch.uint8, device=SIM), non_blocking=True)
    if waits:
        torch.accelerator.synchronize()
    return slab


@pytest.mark.parametrize("waits", [False, True])
def test_a_host_thread_that_does_not_wait_is_found(waits: bool, sim: Simulated) -> None:
    slab = copied_to(waits=waits)
    sim.host_access(slab.bytes.data_ptr(), 4096, "a look", writes=False)
    found = sim.findings()
    assert bool(found) is not waits
    assert all("read by a look on host thread" in each for each in found)
    torch.accelerator.synchronize()
    slab.close()
    sim.clear()


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_is_given_back_while_the_device_uses_it_is_found(waits: bool, sim: Simulated) -> None:
    copied_to(waits=waits).close()
    found = sim.findings()
    sim.clear()
    assert bool(found) is not waits
    assert all("unlock on host thread" in each for each in found), found


def test_random_numbers_are_its_own(sim: Simulated) -> None:
    """Drawn when an op is called, whenever it runs; and nobody's else, on either side."""
    torch.manual_seed(0)
    on_cpu, there = torch.rand(4), torch.rand(4, device=SIM)
    torch.manual_seed(0)
    again, on_cpu_again = torch.rand(4, device=SIM), torch.rand(4)
    assert torch.equal(on_cpu, on_cpu_again)
    assert torch.equal(there.cpu(), again.cpu())
    module = torch.get_device_module(SIM)
    state = module.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(100, device=SIM), 0.5)
    module.set_rng_state(state)
    torch.default_generator.manual_seed(5)
    assert torch.equal(first.cpu(), torch.nn.functional.dropout(torch.ones(100, device=SIM), 0.5).cpu())


def test_a_kernel_that_fails_is_heard_of_once(sim: Simulated) -> None:
    table = torch.ones(3, 2, device=SIM)
    torch.nn.functional.embedding(torch.tensor([7], device=SIM), table)
    with pytest.raises(RuntimeError, match="a kernel of the simulated device failed"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def test_integers_are_counted(sim: Simulated) -> None:
    """Mixtures of experts do this."""
    found = torch.histc(torch.tensor([1, 2, 2, 3], device=SIM), bins=4, min=0, max=3)
    assert found.tolist() == [0, 1, 2, 1]


def test_waits_of_the_host_are_counted(sim: Simulated) -> None:
    sim.clear()
    there = torch.ones(3, device=SIM)
    there.sum().item()
    there.nonzero()
    counts = sim.counts()
    assert counts["host waits: for a number"] == counts["host waits: aten::nonzero"] == 1
