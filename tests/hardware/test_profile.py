"""Machine profiles: what cannot be right is refused by the name of its key, and stored ones are found again."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.hardware import peaks, profiles, system
from penstock.hardware.drives import together, used_rates
from penstock.hardware.machine import (
    Crossing,
    Drive,
    Host,
    Machine,
    Measured,
    Network,
    Sustained,
    load_machine,
    parse_machine,
)
from tests.machines import gpu, measured_here


def drive(path: Path | str, **changes: Any) -> Drive:
    made = Drive(path=str(path), read=3e9, write=2e9, read_both=1.5e9, write_both=1e9, free=10**12, tbw=1200.0)
    return replace(made, **changes)


def machine(*drives: Drive, **changes: Any) -> Machine:
    made = Machine(
        name="box",
        host=Host(
            cores=8, memory=2**36, lockable=0, copy=1e10, optimizer={"adamw.fp32": 1e9, "sgd.bf16": 2e9}, nodes=2
        ),
        device=gpu(memory=2**34, h2d_both=1.8e10, d2h_both=1.7e10, node=1),
        drives=drives,
        network=Network(bandwidth=1e10, latency=0.0),
        contention={"cpu+read": 0.0, "compute+cpu": 0.25},
        overhead=1e-5,
        interpreter=2e-5,
        dispatch=1e-5,
        warnings=("too warm",),
    )
    return replace(made, **changes)


MEASURED = Measured(at="2026-01-31T12:00:00+00:00", load=0.25)
SUSTAINED = Sustained(write=5e8, read_both=1e9, write_both=4e8, after=10**11)
CROSSING = Crossing(
    grad_bf16=9e9,
    grad_fp32=5e9,
    step=1e9,
    step_grad_bf16=1.1e9,
    step_grad_rounded=9e8,
)


def test_the_text_form_parses_back() -> None:
    made = machine(drive("/a"), drive("/b", node=0, tbw=None, kind="hdd"))
    assert parse_machine(made.to_json(), "x") == made
    alone = replace(machine(), network=None)
    assert parse_machine(alone.to_json(), "x") == alone
    measured = replace(alone, crossing=CROSSING)
    assert parse_machine(measured.to_json(), "x") == measured


def test_a_profile_from_before_there_was_a_crossing_has_none() -> None:
    data = json.loads(machine().to_json())
    del data["crossing"]
    assert parse_machine(json.dumps(data), "x") == machine()


def test_a_profile_from_before_the_sustained_rate_was_measured_is_read() -> None:
    made = machine(drive("/a"), drive("/b", sustained=SUSTAINED))
    data = json.loads(made.to_json())
    assert parse_machine(json.dumps(data), "box.json") == made
    del data["drives"][0]["sustained"]
    assert parse_machine(json.dumps(data), "box.json") == made


def test_sizes_may_be_written_with_an_exponent_and_rates_without() -> None:
    made = machine(drive("/a"))
    text = (
        made.to_json()
        .replace(f'"free": {10**12}', '"free": 1e12')
        .replace('"read": 3000000000.0', '"read": 3000000000')
    )
    found = parse_machine(text, "box.json")
    assert (found, found.to_json()) == (made, made.to_json())


def test_a_run_gets_the_sustained_rates_where_they_are_known() -> None:
    slower, unknown = drive("/a", sustained=SUSTAINED), drive("/b")
    assert slower.steady == drive("/a", write=5e8, read_both=1e9, write_both=4e8)
    assert unknown.steady == unknown
    assert used_rates([slower]).endswith("at the sustained rate")
    assert "but for /b, where" in used_rates([slower, unknown])
    assert "at the rate of the first seconds: doctor --sustained" in used_rates([unknown])


Data = dict[str, Any]
Change = Callable[[Data], object]

WRONG: dict[str, tuple[Change, str]] = {
    "zero": (lambda d: d["host"].update(copy=0), r"host\.copy=0 must be more than 0"),
    "negative": (lambda d: d["drives"][0].update(read=-1.0), r"drives\[0\]\.read=-1 must be more than 0"),
    "zero in a table": (lambda d: d["device"]["flops"].update(bf16=0), r"device\.flops\.bf16=0 must be more"),
    "no throughput": (lambda d: d["device"].update(flops={}), r"device\.flops must have a number for each dtype"),
    "negative where zero may be": (
        lambda d: d["network"].update(latency=-1),
        r"network\.latency=-1 must be at least 0",
    ),
    "negative contention": (
        lambda d: d["contention"].update({"cpu+h2d": -0.1}),
        r"contention\.cpu\+h2d=-0\.1 must be at least",
    ),
    "no pair of lanes": (lambda d: d["contention"].update({"cpu": 1}), r"contention\.cpu: a pair of lanes is written"),
    "no lane": (lambda d: d["contention"].update({"cpu+gpu": 1}), r"contention\.cpu\+gpu: a pair of lanes is written"),
    "missing": (lambda d: d["device"].pop("h2d"), r"device lacks 'h2d'"),
    "missing in a drive": (lambda d: d["drives"][0].pop("write_both"), r"drives\[0\] lacks 'write_both'"),
    "missing in a crossing": (lambda d: d["crossing"].pop("step"), r"crossing lacks 'step'"),
    "zero in a crossing": (lambda d: d["crossing"].update(grad_bf16=0), r"crossing\.grad_bf16=0 must be more than 0"),
    "missing part": (lambda d: d.pop("host"), "it lacks 'host'"),
    "unknown": (lambda d: d["host"].update(gpus=1), r"host has 'gpus', which is none of cores, memory"),
    "unknown at the top": (lambda d: d.update(date="today"), "it has 'date', which is none of"),
    "text for a number": (
        lambda d: d["host"].update(memory="64GiB"),
        r"host\.memory must be a whole number, not '64GiB'",
    ),
    "truth for a number": (lambda d: d["host"].update(cores=True), r"host\.cores must be a whole number, not True"),
    "null for a number": (lambda d: d["device"].update(d2h=None), r"device\.d2h must be a number, not None"),
    "NaN": (lambda d: d["host"].update(copy=float("nan")), "NaN is not a number"),
    "infinite": (lambda d: d.update(overhead=float("inf")), "Infinity is not a number"),
    "number for a text": (lambda d: d.update(name=3), "name must be text, not 3"),
    "unknown device": (lambda d: d["device"].update(kind="tpu"), r"device\.kind must be one of cuda, cpu, not 'tpu'"),
    "object for a list": (lambda d: d.update(drives={}), r"drives must be a list in which each is an object, not \{\}"),
    "list for an object": (lambda d: d.update(host=[]), r"host must be an object, not \[\]"),
    "numbers that are none": (lambda d: d["host"].update(optimizer=[1]), r"host\.optimizer must be an object"),
    "no float holds it": (
        lambda d: d["host"].update(memory=10**400),
        r"host\.memory must be a whole number, not 1000.*\.\.\., which has more than 63 bits",
    ),
    "faster than any": (lambda d: d["device"].update(h2d=1e30), r"device\.h2d=1e\+30 must be from 1 to 1e\+21"),
    "next to nothing": (
        lambda d: d["device"]["flops"].update(bf16=1e-300),
        r"device\.flops\.bf16=1e-300 must be from 1",
    ),
    "half a core": (lambda d: d["host"].update(cores=0.5), r"host\.cores must be a whole number, not 0\.5"),
    "a core and a half": (lambda d: d["host"].update(cores=1.5), r"host\.cores must be a whole number, not 1\.5"),
    "a standstill": (
        lambda d: d["contention"].update({"cpu+read": 1e308}),
        r"contention\.cpu\+read=1e\+308 must be from 0 to 1e\+06",
    ),
    "an op that takes years": (lambda d: d.update(overhead=1e300), r"overhead=1e\+300 must be from 0 to 1e\+06"),
    "a kind of drive that is none": (
        lambda d: d["drives"][0].update(kind="banana"),
        r"drives\[0\]\.kind must be one of ssd, hdd, .* not 'banana'",
    ),
    "a kind that is no word": (
        lambda d: d["drives"][0].update(kind=[]),
        r"drives\[0\]\.kind must be one of ssd, .* not \[\]",
    ),
    "half a byte": (
        lambda d: d["drives"][0]["sustained"].update(after=1.5),
        r"drives\[0\]\.sustained\.after must be a whole number",
    ),
    "missing in the sustained rates": (
        lambda d: d["drives"][0]["sustained"].pop("write"),
        r"drives\[0\]\.sustained lacks 'write'",
    ),
    "no time": (lambda d: d["measured"].update(at="today"), r"measured\.at='today' is not a time with its zone"),
    "a time of no zone": (lambda d: d["measured"].update(at="2026-01-31T12:00:00"), r"measured\.at='2026.* zone"),
    "less than no load": (lambda d: d["measured"].update(load=-1), r"measured\.load=-1 must be at least 0"),
    "a peak of nothing": (lambda d: d["device"]["peak"].update(bf16=0), r"device\.peak\.bf16=0 must be more"),
    "the name of its own file": (lambda d: d.update(file="x"), "file is no part of a profile"),
    "half a node": (
        lambda d: d["drives"][0].update(node="0"),
        r"drives\[0\]\.node must be a whole number or null, not '0'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_right_is_refused_by_its_key(name: str) -> None:
    change, message = WRONG[name]
    data = json.loads(machine(drive("/a", sustained=SUSTAINED), crossing=CROSSING, measured=MEASURED).to_json())
    change(data)
    with pytest.raises(ConfigError, match=f"box.json: {message}"):
        parse_machine(json.dumps(data), "box.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is not JSON"),
        ("", "this is not JSON"),
        ("[]", "the whole of it must be an object"),
        ("[" * 100_000, "brackets within brackets"),
        (f'{{"overhead": {"9" * 5000}}}', "this cannot be read"),
        ('{"name": "a", "name": "b"}', "the key 'name' is there twice"),
    ],
)
def test_what_is_no_profile_at_all(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"m.json: {message}"):
        load_machine(file)


def test_a_profile_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: cannot read this machine profile: No such file"):
        load_machine(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.json: this is no machine profile: it is not UTF-8"):
        load_machine(tmp_path / "binary.json")


def test_what_has_no_end_is_not_read_as_a_profile(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for file in (tmp_path / "pipe.json", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="this is no machine profile: it is no regular file"):
            load_machine(file)


# ---- shipped


@pytest.mark.parametrize("name", profiles.shipped_names())
def test_every_shipped_profile_is_whole(name: str) -> None:
    found = profiles.machine_named(name)
    assert found.name.startswith(f"{name}: ")
    assert found.device.kind == "cuda"
    assert {"fp32", "bf16", "fp16"} <= found.device.flops.keys()
    kinds = ("adamw", "adam", "sgd", "lion", "momentum", "nesterov")
    wanted = {f"{kind}.{precision}" for kind in kinds for precision in ("fp32", "bf16", "fp16")}
    assert wanted == found.host.optimizer.keys() == found.device.optimizer.keys()
    assert found.drives
    for each in found.drives:
        assert each.read_both <= each.read
        assert each.write_both <= each.write
    assert found.device.h2d_both <= found.device.h2d
    assert found.measured is None
    assert "not measured" in found.source
    for dtype, peak in found.device.peak.items():
        assert 0.7 * peak < found.device.flops[dtype] < peak
    known = peaks.maker_peak(found.device.name)
    assert known in ({}, found.device.peak)
    assert found.device.peak or name == "dgx-spark", "its maker states none"


@pytest.mark.parametrize("name", profiles.shipped_names())
def test_the_page_has_the_figures_of_a_shipped_profile(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "machines.md").read_text()
    row = re.search(rf"^\| `{name}` \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert row is not None, name
    found, giga = profiles.machine_named(name), 1e9
    gpu, host, link, drives = row.groups()
    size, unit = re.findall(r"(\d+) (GB)", gpu)[0]
    assert found.device.memory == int(size) * (giga if name == "dgx-spark" else 2**30), gpu
    size, unit = re.findall(r"(\d+) (GB|GiB|TiB)", host)[0]
    assert found.host.memory == pytest.approx(int(size) * {"GB": giga, "GiB": 2**30, "TiB": 2**40}[unit], rel=1e-3)
    bandwidth = int(re.findall(r"(\d+)(?: of \d+)? GB/s", host)[0])
    assert found.host.copy == pytest.approx(0.4 * bandwidth * giga, rel=0.01)
    assert found.host.lockable == found.host.memory
    alone, both = link.removesuffix(" GB/s").split(" / ")
    up, down = re.findall(r"[\d.]+", alone)[0], re.findall(r"[\d.]+", alone)[-1]
    device = found.device
    rates = (device.h2d, device.d2h, device.h2d_both, device.d2h_both)
    assert rates == tuple(float(rate) * giga for rate in (up, down, both, both))
    count, read, write = re.findall(r"^(\d+) x Gen\d, ([\d.]+) / ([\d.]+) GB/s$", drives)[0]
    assert len(found.drives) == int(count)
    assert sum(each.read for each in found.drives) == pytest.approx(float(read) * giga)
    assert sum(each.write for each in found.drives) == pytest.approx(float(write) * giga)


def test_the_shipped_machines() -> None:
    assert profiles.shipped_names() == (
        *("a100-40g", "a100-80g", "b200-180g", "dgx-spark", "gh200", "h100-80g", "rtx3090-24g", "rtx4060ti-16g"),
        *("rtx4080-16g", "rtx4090-24g", "rtx5060ti-16g", "rtx5080-16g", "rtx5090-32g", "rtxpro6000-96g", "workstation"),
    )


def test_a_machine_by_name_or_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = machine()
    monkeypatch.chdir(tmp_path)
    Path("m.json").write_text(made.to_json())
    Path("plain").write_text(made.to_json())
    assert profiles.machine_named("m.json") == profiles.machine_named("plain") == made
    with pytest.raises(
        ConfigError, match=r"machine 'a100': did you mean a100-.0g\? Known: a100-40g, .*penstock doctor"
    ):
        profiles.machine_named("a100")
    with pytest.raises(ConfigError, match=r"other\.json: cannot read"):
        profiles.machine_named("other.json")


# ---- stored


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def kept(*drives: Drive, **changes: Any) -> Machine:
    return measured_here(machine(*drives, **changes))


def store(made: Machine, age: float) -> Path:
    file = profiles.save_profile(made)
    os.utime(file, (1e9 - age, 1e9 - age))
    return file


def test_nothing_is_found_where_nothing_was_measured(cache: Path) -> None:
    assert profiles.find_profile() is None
    assert profiles.find_profile([cache]) is None


def test_a_profile_is_found_for_its_directory_and_for_others_on_the_same_drive(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    made = kept(drive(tmp_path / "data"))
    profiles.save_profile(made)
    assert profiles.find_profile([tmp_path / "data"]) == made
    later = tmp_path / "runs" / "not-made-yet"
    assert profiles.find_profile([later]) == kept(drive(later))
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert profiles.find_profile([tmp_path / "link"]) == made


def test_a_directory_on_another_drive_was_not_measured(cache: Path, tmp_path: Path) -> None:
    profiles.save_profile(kept(drive(tmp_path)))
    assert profiles.find_profile([Path("/proc")]) is None
    assert profiles.find_profile([tmp_path, Path("/proc")]) is None


def test_the_newest_profile_counts_and_one_of_all_directories_before_it(cache: Path, tmp_path: Path) -> None:
    a, b = Path("/proc"), tmp_path
    store(kept(drive(a), name="a"), age=1)
    store(kept(drive(b), name="b"), age=2)
    both = profiles.find_profile([b, a])
    assert both is not None
    assert (both.name, [d.path for d in both.drives]) == ("a", [str(b), str(a)])
    store(kept(drive(a, read=1e9), drive(b, read=2e9), name="both"), age=3)
    both = profiles.find_profile([b, a])
    assert both is not None
    assert (both.name, [d.read for d in both.drives]) == ("both", [2e9, 1e9])
    newest = profiles.find_profile()
    assert newest is not None
    assert newest.name == "a"


def test_measuring_anew_replaces_the_profile_of_the_same_directories(cache: Path, tmp_path: Path) -> None:
    first = profiles.save_profile(kept(drive(tmp_path), name="old"))
    assert profiles.save_profile(kept(drive(tmp_path), name="new")) == first
    assert [f.name for f in first.parent.iterdir()] == [first.name]
    assert profiles.find_profile([tmp_path]) == kept(drive(tmp_path), name="new")


def test_what_fewer_cores_or_another_mount_measure_is_kept_beside_what_was_measured_before(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A brief measurement of a job on some of the cores does not take the place of doctor's of the whole machine."""
    whole, now = kept(drive(tmp_path), name="whole"), system.look()
    profiles.save_profile(whole)
    monkeypatch.setattr(system, "look", lambda root: replace(now, cores=now.cores + 1))
    assert profiles.find_profile([tmp_path]) is None
    some = replace(whole, name="some", host=replace(whole.host, cores=now.cores + 1))
    profiles.save_profile(some)
    assert profiles.find_profile([tmp_path]) == some
    monkeypatch.setattr(system, "look", lambda root: now)
    assert profiles.find_profile([tmp_path]) == whole
    profiles.save_profile(replace(whole, drives=(drive(tmp_path, mount="/mnt/other"),)))
    assert profiles.find_profile([tmp_path]) == whole


def test_what_a_job_with_less_memory_measures_does_not_count_where_there_is_more(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = system.look()
    whole = kept(drive(tmp_path), name="whole")
    whole = replace(whole, host=replace(whole.host, memory=now.memory))
    less = replace(whole, name="less", host=replace(whole.host, memory=now.memory // 2))
    store(less, age=1)
    assert profiles.find_profile([tmp_path]) == less
    store(whole, age=2)
    assert profiles.find_profile([tmp_path]) == profiles.find_profile() == whole
    monkeypatch.setattr(system, "look", lambda root: replace(now, memory=now.memory // 2))
    assert profiles.find_profile([tmp_path]) == less


def test_measuring_anew_supersedes_what_cannot_be_read_of_the_same_directories_and_keeps_it(
    cache: Path, tmp_path: Path
) -> None:
    """It may be of a newer version, which reads it again."""
    whole = kept(drive(tmp_path))
    newer = profiles.save_profile(replace(whole, host=replace(whole.host, cores=999)))
    newer.write_text(newer.read_text().replace('"host"', '"of a newer version": 1, "host"', 1))
    other = profiles.save_profile(kept())
    other.write_text("{")
    with (
        pytest.raises(ConfigError, match=f"{newer}: it has 'of a newer version'"),
        pytest.warns(UserWarning, match="left out"),
    ):
        profiles.find_profile([tmp_path])
    profiles.save_profile(whole)
    assert newer.exists()
    with pytest.warns(UserWarning, match="left out") as warned:
        assert profiles.find_profile([tmp_path]) == whole
    assert [str(other) in str(one.message) for one in warned] == [True]


def test_profiles_of_other_hosts_are_not_taken(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles.save_profile(kept())
    monkeypatch.setattr("socket.gethostname", lambda: "an/other")
    assert profiles.find_profile() is None
    assert profiles.profile_folder().parent == cache / "penstock" / "machines"


def test_a_relative_cache_folder_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert profiles.profile_folder().parents[2] == tmp_path / ".cache"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has a number and no name."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    with pytest.raises(ConfigError, match="this user has no home: set HOME, or XDG_CACHE_HOME"):
        profiles.find_profile()


def test_finding_a_profile_needs_no_torch() -> None:
    code = "import sys, penstock.hardware.profiles; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_damaged_profile_is_named(cache: Path) -> None:
    file = profiles.save_profile(kept())
    file.write_text("{")
    with pytest.raises(ConfigError, match=f"{file}: this is not JSON"):
        profiles.find_profile()


def test_a_folder_that_cannot_be_written_is_said(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be stored in .*: Not a directory. Set XDG_CACHE_HOME"):
        profiles.save_profile(kept())


def test_directories_on_one_file_system_have_the_drive_together(cache: Path, tmp_path: Path) -> None:
    """However many were measured. One on another file system has its own to itself."""
    a, b, other = tmp_path / "a", tmp_path / "b", Path("/proc")
    whole = drive(a, sustained=SUSTAINED)
    profiles.save_profile(kept(whole, drive(other)))
    found = profiles.find_profile([a, other, b])
    assert found is not None
    first, alone, second = found.drives
    assert alone == kept(drive(other)).drives[0]
    assert (first.path, second.path) == (str(a), str(b))
    assert replace(second, path=first.path) == first
    assert together([first, second]) == together([whole])
    assert 2 * first.free == whole.free
    assert first.tbw == 600.0
    assert (first.directories, alone.directories) == (2, 1)
    single = profiles.find_profile([b])
    assert single is not None
    assert single.drives[0].read == whole.read
    profiles.save_profile(kept(whole, drive(b, read=9e9)))
    for paths in ((), (a, b)):
        both = profiles.find_profile(paths)
        assert both is not None
        assert together(both.drives) == together([whole])
    parts, missing = profiles.find_parts([a, b], kind="cuda")
    assert parts is not None
    assert [each.read for each in parts.drives] == [3e9, 9e9], "as they are stored"
    assert not missing


def test_a_profile_of_another_gpu_of_the_machine_is_not_taken(cache: Path, tmp_path: Path) -> None:
    profiles.save_profile(kept(drive(tmp_path)))
    assert profiles.find_profile([tmp_path], kind="cuda", device="GPU") == kept(drive(tmp_path))
    assert profiles.find_profile([tmp_path], kind="cuda", device="another") is None
    assert profiles.find_parts([tmp_path], kind="cuda", device="another") == (None, (tmp_path,))
    why = profiles.why_none([tmp_path], kind="cuda", device="another")
    assert (why or "").endswith("it was measured on GPU, and this run computes on another")
