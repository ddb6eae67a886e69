"""A profile that was measured counts only for the machine that it was measured on, as that is now."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.hardware import profiles, system
from penstock.hardware.machine import Drive, Machine, Measured, parse_machine
from penstock.hardware.present import is_gone, mount_point, outdated
from penstock.planner.ask import measured
from tests.hardware.test_profile import drive, machine

HERE = Measured(at="2026-01-31T12:00:00+00:00", load=0.25)


def without_copy(machine: Machine) -> str:
    profile = json.loads(machine.to_json())
    del profile["device"]["copy"]
    return json.dumps(profile)


def here(*drives: Drive) -> Machine:
    """A profile of this machine."""
    found, now = machine(*drives, measured=HERE), system.look()
    return replace(
        found,
        host=replace(found.host, cores=now.cores, memory=now.memory),
        device=replace(found.device, kind="cpu", name=system.cpu_name()),
    )


def test_a_profile_of_this_machine_is_not_outdated() -> None:
    assert outdated(here()) is None
    assert "from before profiles said when" in (outdated(replace(here(), measured=None)) or "")
    older = parse_machine(without_copy(here()), "a profile of before")
    assert "how fast a copy in the device's memory is" in (outdated(older) or "")


def test_what_has_changed_is_said() -> None:
    now = here()
    cores = replace(now, host=replace(now.host, cores=now.host.cores + 1))
    assert f"and this process may use {now.host.cores}" in (outdated(cores) or "")
    memory = replace(now, host=replace(now.host, memory=2 * now.host.memory))
    assert "of memory, and this process may use" in (outdated(memory) or "")
    other = replace(now, device=replace(now.device, name="a processor of another kind"))
    assert "it was measured on a processor of another kind, and this machine has" in (outdated(other) or "")


def test_a_gpu_is_asked_of_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = here()
    on_gpu = replace(now, device=replace(now.device, kind="cuda", name="NVIDIA H200"))
    monkeypatch.setattr(system, "look", lambda root: replace(system_now, cores=now.host.cores))
    assert outdated(on_gpu, tmp_path) is None, "a container may not show its driver"
    file = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    file.parent.mkdir(parents=True)
    file.write_text("Model: \t\t NVIDIA H100\nIRQ:   \t\t 24\n")
    assert (outdated(on_gpu, tmp_path) or "").endswith("and this machine has NVIDIA H100")
    file.write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 24\n")
    a_slice = replace(on_gpu, device=replace(on_gpu.device, name="NVIDIA H200 MIG 3g.71gb"))
    assert outdated(a_slice, tmp_path) is None
    assert outdated(on_gpu, tmp_path) is None
    file.write_text("Model: \t\t NVIDIA L4\n")
    assert (outdated(on_gpu, tmp_path) or "").endswith("measured on NVIDIA H200, and this machine has NVIDIA L4")


system_now = system.look()


def test_a_drive_is_gone_when_something_else_is_mounted_there(tmp_path: Path) -> None:
    there = drive(tmp_path / "not yet made", mount=mount_point(tmp_path))
    assert not is_gone(there)
    assert not is_gone(replace(there, mount=None)), "nobody has looked"
    assert is_gone(replace(there, mount=str(tmp_path)))


def test_a_plan_refuses_a_profile_that_is_not_of_this_machine_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    good = here(drive(data, mount=mount_point(data)))
    profiles.save_profile(replace(good, host=replace(good.host, cores=999)))
    for paths in ((), (data,)):
        with pytest.raises(ConfigError, match=r"\.json is not of this machine .* 999 cores.*: run penstock doctor"):
            measured(paths)
    profiles.save_profile(replace(good, drives=(drive(data, mount="/mnt/drive"),)))
    for paths in ((), (data,)):
        with pytest.raises(
            ConfigError, match=r"what was mounted for .*data when it was measured is gone: run penstock"
        ):
            measured(paths)
    profiles.save_profile(good)
    assert measured((data,)) == measured(()) == good
    assert Path(measured(()).file).is_file()
