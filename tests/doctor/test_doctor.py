"""The command ``penstock doctor``: what it prints and stores, what it refuses, and how it ends."""

import ctypes
import errno
import json
import os
import re
import resource
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock import accelerator
from penstock.cli import main
from penstock.cli.doctor import Arguments, describe
from penstock.cli.words import read_words
from penstock.config import format_size
from penstock.doctor import between, device, disk, examine, mounts, work
from penstock.doctor.disk import Scratch
from penstock.errors import ConfigError
from penstock.hardware import system
from penstock.hardware.machine import Between, Machine, Network, Sustained, load_machine, parse_machine
from penstock.hardware.profiles import find_profile, profile_folder, save_profile
from penstock.schedule.program import ALIGN
from penstock.store import packed
from tests import warm
from tests.accelerator import DEVICE
from tests.hardware.test_profile import CROSSING
from tests.machines import GIB, SMALL, drive, gpu, host, measured_here
from tests.patience import PATIENCE, until
from tests.questions import MACHINE

BRIEF = examine.Effort(seconds=0.005, rounds=1, disk=SMALL)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[examine.Effort]:
    """The command measures nothing and finds a machine like any; the efforts that it was asked for."""
    asked = []

    def examine_nothing(paths: Sequence[Path], effort: examine.Effort, *rest: object) -> Machine:
        asked.append(effort)
        drives = tuple(drive(path=str(path.resolve())) for path in paths)
        return Machine(name="box", host=host(), device=gpu(), drives=drives, warnings=("it is Monday",))

    monkeypatch.setattr(examine, "examine", examine_nothing)
    return asked


def measure_little(patch: pytest.MonkeyPatch) -> None:
    """What is measured with is small, where rates say nothing: on processors, and on the simulated accelerator."""
    patch.setitem(device.SIZES, "cpu", (64,))
    patch.setattr(between, "LARGE", 1 << 16)
    if DEVICE != "cuda":
        patch.setitem(device.SIZES, "cuda", (64,))
        patch.setattr(system, "cache_size", lambda: 0)
        for name, smaller in (("CHUNK", ALIGN), ("DEVICE_STEP", ALIGN), ("QUEUED", 2)):
            patch.setattr(work, name, smaller)


@pytest.fixture
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_little(monkeypatch)


def _environment(cache: Path) -> dict[str, str]:
    return os.environ | {"XDG_CACHE_HOME": str(cache)}


@pytest.mark.usefixtures("smaller")
def test_json_is_the_profile_and_nothing_else_and_is_stored(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "QUICK", BRIEF)
    folder = tmp_path / "data"
    folder.mkdir()
    assert main(["doctor", "--path", str(folder), "--json", "--quick"]) == 0
    out, err = capsys.readouterr()
    machine = parse_machine(out, "stdout")
    assert machine == find_profile([folder])
    assert not list(folder.iterdir())
    assert [d.path for d in machine.drives] == [str(folder)]
    assert {"fp32", "bf16", "fp16"} == machine.device.flops.keys()
    assert machine.overhead > 0
    assert machine.interpreter > 0
    assert machine.dispatch > 0
    assert machine.crossing is not None
    assert f"Disk {folder}: reading, writing, and both at once: " in err
    assert "Traceback" not in err
    (stored,) = profile_folder().iterdir()
    assert load_machine(stored) == machine


def test_a_person_gets_tables_and_what_is_wrong(
    tmp_path: Path,
    cache: Path,
    measured: list[examine.Effort],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    out, _ = capsys.readouterr()
    assert "What is wrong\n  - it is Monday\n" in out
    assert f"    {tmp_path.resolve()}" in out  # the current directory
    assert f"Stored as {profile_folder()}" in out
    assert measured == [examine.THOROUGH]


@pytest.mark.parametrize(("switch", "effort"), [("--quick", "QUICK"), ("--sustained", "SUSTAINED")])
def test_the_switches_choose_the_effort(
    tmp_path: Path, cache: Path, measured: list[examine.Effort], switch: str, effort: str
) -> None:
    assert main(["doctor", switch, "--path", str(tmp_path)]) == 0
    assert measured == [getattr(examine, effort)]


def test_links_that_are_not_measured_are_kept_as_they_were_known_and_that_is_said(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, board = Network(bandwidth=2e9, latency=1e-4), Network(bandwidth=3e9, latency=1e-5)
    two, four = (Between(ranks=ranks, bandwidth=1e9 * ranks, latency=1e-5) for ranks in (2, 4))
    alone = measured_here(replace(MACHINE, drives=(drive(path=str(tmp_path)),), between=(replace(two, bandwidth=9e9),)))
    save_profile(replace(alone, device=replace(alone.device, name="another"), nic=board))
    save_profile(replace(alone, drives=(), nic=link, network=board, between=(two, four)))
    monkeypatch.setattr(examine, "examine", lambda *_: alone)
    for said in (
        ["Not measured now, and kept as it was known before: what 4 ranks, any ranks, hosts send each other."],
        [],
    ):
        assert main(["doctor", "--path", str(tmp_path)]) == 0
        out, _ = capsys.readouterr()
        assert [line for line in out.splitlines() if "Not measured now" in line] == said
        assert "\n    hosts                         2     0.10 ms" in out
        kept = replace(alone, nic=link, network=board, between=(replace(two, bandwidth=9e9), four))
        assert find_profile([tmp_path], kind="cpu") == kept
        alone = kept  # as if all of it had been measured


def test_what_is_written_until_a_rate_settles_is_said_beforehand(
    tmp_path: Path, cache: Path, measured: list[examine.Effort], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--sustained", "--path", str(tmp_path)]) == 0
    most = format_size(disk.file_size(mounts.look(tmp_path), disk.SUSTAINED))
    out, _ = capsys.readouterr()
    assert out.startswith(f"Writes up to {most} in {tmp_path}, until the rate at which the drive takes it has settled")


@pytest.mark.usefixtures("smaller")
def test_a_brief_look_has_all_that_a_plan_needs(tmp_path: Path) -> None:
    brief = replace(examine.BRIEF, seconds=0.002, disk=SMALL)
    found = examine.examine([tmp_path], brief, torch.device("cpu"), lambda _: nullcontext())
    assert found.host.optimizer.keys() == found.device.optimizer.keys() >= {"adamw.fp32", "adamw.bf16.int8"}
    assert found.crossing is not None
    assert found.overhead > 0
    assert {pair for pair in found.contention if "read" in pair or "write" in pair} == set()
    for lane in ("compute", "cpu"):
        assert found.contention.get(f"{lane}+h2d") == found.contention.get(f"{lane}+d2h")
        assert found.contention.get(f"h2d+{lane}") == found.contention.get(f"d2h+{lane}")
    drives, between = examine.more_of(found, [tmp_path], brief, lambda _: nullcontext())
    assert [each.path for each in (*found.drives, *drives)] == [str(tmp_path)] * 2
    assert between == ()
    assert not list(tmp_path.iterdir())


def test_where_no_space_is_reserved_the_sustained_rate_is_refused_and_the_rest_is_measured(
    tmp_path: Path, measured: list[examine.Effort], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The C library would write zeros by itself, and says nothing of it."""

    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    assert packed.preallocates(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(fallocate=refuse))
        assert not packed.preallocates(tmp_path)
    monkeypatch.setattr(packed, "preallocates", lambda folder: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["doctor", "--sustained", "--path", str(tmp_path)]) == 2
    assert "reserves no space" in capsys.readouterr().err
    assert not measured
    assert main(["doctor", "--path", str(tmp_path)]) == 0
    assert len(measured) == 1


def test_a_sustained_rate_is_shown_below_the_burst(tmp_path: Path) -> None:
    left = Sustained(write=4e8, read_both=1e9, write_both=3e8, after=100 * GIB)
    text = describe(Machine(name="box", host=host(), device=gpu(), drives=(drive(sustained=left),)))
    assert re.search(r"/d +5 +3 +4 \+ 2\.5 .*\n +after 100 GiB +0\.4 +1 \+ 0\.3\n", text)
    assert "plans write at the sustained rate" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--path", "{tmp}/none"], "/none does not exist: is the drive mounted?"),
        (["--path", "~nobody-of-this-name/x"], "~nobody-of-this-name/x does not exist"),
        (["--path", "{tmp}/file"], "/file is not a directory: give one"),
        (["--path", "{tmp}", "--path={tmp}/."], "are the same directory: give it once"),
        (["--path"], "--path needs a value: --path"),
        (["--path", "--json"], "--path needs a value: --path"),
        (["--path="], "--path needs a value: --path"),
        (["--fast"], "there is no option --fast; did you mean"),
        (["/data"], "takes no words but options (--path DIR, once for each drive), and was given /data"),
        (["--quick", "--sustained"], "give one of them"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "file").touch()
    assert main(["doctor", *(word.format(tmp=tmp_path) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert not cache.exists()


def test_a_directory_that_may_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode, **_: False)  # root may write anywhere
    assert main(["doctor", "--path", str(tmp_path)]) == 2
    assert "is not writable: change its owner or mode" in capsys.readouterr().err


def test_a_read_only_file_system_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/proc cannot be measured: .*"):
        Scratch(Path("/proc"), SMALL.nbytes, depth=2)


def test_a_profile_that_cannot_be_stored_is_still_printed(
    tmp_path: Path, cache: Path, measured: list[examine.Effort], capsys: pytest.CaptureFixture[str]
) -> None:
    cache.write_text("a file")
    assert main(["doctor", "--path", str(tmp_path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["drives"]
    assert "cannot be stored" in err


def test_that_nothing_can_be_stored_is_said_before_anything_is_measured(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder can be made, and has no room for a profile: as of a full file system, or a quota that is used up."""

    def fill(*_: object) -> object:
        assert "warning: the profile cannot be stored in" in capsys.readouterr().err
        raise ConfigError("measured")

    monkeypatch.setattr(examine, "examine", fill)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        assert main(["doctor", "--path", str(tmp_path)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "penstock: measured" in capsys.readouterr().err


def test_a_drive_without_room_is_said_before_another_one_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    look = mounts.look
    monkeypatch.setattr(mounts, "look", lambda path: replace(look(path), free=0 if path.name == "full" else 1 << 40))
    monkeypatch.setattr(examine, "Scratch", None)  # a disk is measured in one
    with pytest.raises(ConfigError, match=r"full: the file system is full: 0 B are free"):
        examine.examine([tmp_path, tmp_path / "full"], examine.QUICK, torch.device("cpu"), lambda _: nullcontext())


def test_the_words() -> None:
    assert read_words(Arguments, []).paths == (Path(),)
    parsed = read_words(Arguments, ["--json", "--path", "/a", "--sustained", "--path=/b"])
    assert (parsed.paths, parsed.json, parsed.quick, parsed.sustained) == ((Path("/a"), Path("/b")), True, False, True)
    assert read_words(Arguments, ["--path", "~/x"]).paths == (Path.home() / "x",)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_in_the_middle_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    process = warm.start(["-m", "penstock.cli", "doctor", "--path", str(folder)], env=_environment(tmp_path / "cache"))
    until(lambda: _open_files(process.pid, str(folder)))
    time.sleep(0.5)  # in the middle of the first disk measurement
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert not list(folder.iterdir())
    assert not (tmp_path / "cache").exists()
    if number == signal.SIGINT:
        assert err.splitlines()[-1] == "penstock: interrupted"
        assert "Traceback" not in err


def _open_files(pid: int, folder: str) -> list[str]:
    """Names of a process's open files in a folder."""
    found = []
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            name = str(link.readlink())
        except OSError:
            continue
        if name.startswith(folder):
            found.append(name)
    return found


def test_the_table_of_a_machine_with_a_gpu() -> None:
    machine = Machine(
        name="box",
        host=host(nodes=2, lockable=GIB),
        device=gpu(node=1, room=22 * GIB, optimizer={"adamw.fp32": 5e9}),
        crossing=CROSSING,
        drives=(drive(path="/mnt/a-rather-long-name/of/a/directory", node=0), drive(path="/b", kind="hdd", read=9.9e7)),
        contention={"cpu+read": 0.25, "read+cpu": 0.1},
        overhead=2e-5,
        interpreter=1e-5,
        dispatch=1.25e-5,
        nic=Network(bandwidth=1.25e9, latency=1e-4),
        warnings=("something " * 30,),
    )
    text = describe(machine)
    assert "64 GiB; may be page-locked: 1 GiB" in text
    assert "GPU; 24 GiB, 22 GiB free, on NUMA node 1" in text
    assert "8, on 2 NUMA nodes" in text
    assert "an op of a model 12.5 µs of the host, however little it computes" in " ".join(text.split())
    assert "1,000        5,000" in text
    assert "  gradients are 1.29x as fast if the device casts them" in text
    (row,) = (line.split() for line in text.splitlines() if "rather" in line)
    assert " ".join(row) == "/mnt/a-rather-long-name/of/a/directory 5 3 4 + 2.5 500 GiB ssd, NUMA node 0"
    assert "0.099" in text
    assert "  between                 GB/s each  collective\n    hosts                      1.25     0.10 ms\n" in text
    assert max(len(line) for line in text.splitlines()) <= 110


def test_the_rates_of_large_gpus_are_written_out() -> None:
    flops = {"fp32": 7.5e13, "bf16": 1.62e15, "fp16": 1e12}
    text = describe(Machine(name="box", host=host(), device=gpu(flops=flops)))
    assert "fp32 75   bf16 1,620   fp16 1   TFLOP/s" in text


@pytest.mark.accelerator
@pytest.mark.usefixtures("smaller")
def test_an_accelerator_is_measured_and_given_back(tmp_path: Path) -> None:
    where, before = torch.device(DEVICE, 0), torch.accelerator.memory_allocated()
    machine = examine.examine([tmp_path], BRIEF, where, lambda text: nullcontext())
    found = machine.device
    assert parse_machine(machine.to_json(), "x") == machine
    assert found.kind == "cuda"
    assert found.room is not None
    assert 0 < found.room < found.memory - before
    assert found.flops.keys() == {"fp32", "bf16", "fp16"}
    assert found.optimizer.keys() == machine.host.optimizer.keys()
    assert found.other_bits == ()
    assert machine.crossing is not None
    assert torch.accelerator.memory_allocated() - before <= accelerator.of(where).beside_plans(where)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_rates_of_a_gpu_are_those_of_a_gpu(tmp_path: Path) -> None:
    machine = examine.examine([tmp_path], BRIEF, torch.device("cuda", 0), lambda text: nullcontext())
    measured, crossing = machine.device, machine.crossing
    assert measured.memory > GIB
    assert measured.flops["bf16"] > measured.flops["fp32"] > 1e12
    assert 1e9 < measured.h2d_both <= measured.h2d
    assert 1e9 < measured.d2h_both <= measured.d2h
    assert crossing is not None
    assert crossing.grad_bf16 > crossing.grad_fp32 > 0.7 * measured.d2h / 4
    assert not any("compute" in pair for pair in machine.contention)
