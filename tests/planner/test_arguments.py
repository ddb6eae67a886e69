"""What ``penstock plan`` and ``penstock.plan`` are asked for is what they plan, or an error that says why not."""

import json
import pkgutil
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.cli import main, train
from penstock.cli.plan_text import describe
from penstock.cli.settings import load
from penstock.cli.showing.display import choose_display
from penstock.cli.train import profile_for_plan
from penstock.hardware.machine import Machine, Network
from penstock.hardware.profiles import find_profile, on_directories, save_profile
from penstock.planner import search
from penstock.planner.task import Task
from tests.machines import measured_here
from tests.models import PLAIN
from tests.questions import DRIVE, LLAMA, MACHINE
from tests.training import budget, steps_of, wrap

SPLIT: dict[str, Any] = {"micro_batches": 2, "micro_batch_size": 2, "sequence_length": 64}
LITTLE: dict[str, Any] = {"schedule": "vertical", "delay": 0.0}
"""Little to choose: how well the planner does is no matter here."""
GPU = replace(MACHINE, device=replace(MACHINE.device, kind="cuda"))


def planned(model: Any = LLAMA, machine: Machine = MACHINE, **more: Any) -> Task:
    """The task that would be planned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.planner.ask.report", lambda task, **cut: task)
        task: Any = penstock.plan(model, machine=machine, **{**SPLIT, **LITTLE, **more})
    assert isinstance(task, Task)
    return task


# ---- models


def test_a_model_is_planned_for_the_machine_s_kind_of_device() -> None:
    for machine in (MACHINE, GPU):
        shape: Any = planned(machine=machine).shape
        assert shape.kind == machine.device.kind


def test_formulas_that_do_not_hold_are_not_used() -> None:
    """Grouped queries in fp32 on a GPU have no fused kernel: attention's scores are held."""
    grouped = {**LLAMA, "num_key_value_heads": 2, "vocab_size": 4096}
    on_gpu = planned(grouped, GPU, precision="fp32").profile(2)
    on_cpu = planned(grouped, MACHINE, precision="fp32").profile(2)
    assert on_gpu.program.stages != on_cpu.program.stages


def test_a_folder_a_file_and_a_mapping_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    for model in (folder, str(folder), folder / "config.json"):
        task = planned(model)
        assert task.shape.name == "tiny"
        assert task.profile(2) == planned().profile(2)


@pytest.mark.parametrize("changes", [{"hidden_size": 130}, {"hidden_size": 132}])
def test_heads_that_do_not_divide_the_width_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(penstock.ConfigError, match="Hugging Face cannot build this llama model"):
        planned({**LLAMA, **changes}).profile(2)


def test_a_mapping_without_a_type_is_refused() -> None:
    with pytest.raises(penstock.ConfigError, match=r"the model's configuration: .* has no model_type"):
        planned({"hidden_size": 128})


# ---- drives


def two_drives(*paths: Path | str) -> Machine:
    """Reads of 1 MB/s times the drive's number."""
    drives = tuple(replace(DRIVE, path=str(p), read=(i + 1) * 1e6) for i, p in enumerate(paths))
    return measured_here(replace(MACHINE, drives=drives))


def test_a_named_machine_has_as_many_drives_as_the_budget_has_directories(tmp_path: Path) -> None:
    machine = two_drives("/nvme0", "/nvme1")
    one = planned(machine=machine, budget=penstock.Budget(device="64MiB", host="64MiB", disk=tmp_path))
    assert [d.path for d in one.machine.drives] == [str(tmp_path)]
    assert one.disk_free == DRIVE.free
    assert len(planned(machine=machine).machine.drives) == 2
    three = penstock.Budget(device="64MiB", host="64MiB", disk=[tmp_path / name for name in "abc"])
    with pytest.raises(penstock.ConfigError, match="has 2 drives, but 3 directories are given"):
        planned(machine=machine, budget=three)


def test_a_directory_is_on_the_drive_that_was_measured_there(tmp_path: Path) -> None:
    machine = two_drives(tmp_path / "a", "/proc", tmp_path / "b")
    found = on_directories(machine, [tmp_path / "other", tmp_path / "b", Path("/proc/1")])
    assert [d.read for d in found.drives] == [1e6, 3e6, 2e6]


def test_a_run_on_a_named_machine_needs_a_drive_for_each_directory(tmp_path: Path) -> None:
    two = penstock.Budget(device="64MiB", host="64MiB", disk=[tmp_path / "a", tmp_path / "b"])
    with pytest.raises(penstock.ConfigError, match="has 1 drive, but 2 directories are given"):
        wrap(PLAIN, two, plan=MACHINE)


SETTINGS = """\
run: {run}
model: {{init: true, config: {{model_type: llama, hidden_size: 128, intermediate_size: 352, num_hidden_layers: 3,
  num_attention_heads: 4, max_position_embeddings: 256}}}}
data: {{sources: stdlib, tokenizer: {{train: {{vocabulary: 1024}}}}, sequence_length: 64}}
optimizer: {{lr: 1e-3}}
budget: {{device: 64MiB, host: 64MiB, disk: "{{run}}/store", slots: 1}}
steps: 4
batch: {{sequences: 4}}
micro_batch_size: 2
schedule: vertical
delay: 0
"""
"""Little to choose here, too."""
GIVEN = [f"--budget.{what}={tier}" for what, tier in (("weights", "disk"), ("state", "disk"), ("activations", "host"))]
"""Nothing to choose, of a run with a disk."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(SETTINGS.format(run=tmp_path / "run"))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of profiles."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measures(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may be measured."""
    monkeypatch.delenv("PENSTOCK_MEASURE")


def stored_as(path: Path, machine: Machine) -> Path:
    path.write_text(machine.to_json())
    return path


def said(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    """What a plan prints: its answer (0), or why it is refused (2)."""
    assert main(["plan", *map(str, words)]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


@pytest.mark.usefixtures("brief")
def test_a_settings_file_is_planned_with_its_own_number_of_drives(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stored_as(config.parent / "m.json", two_drives("/nvme0", "/nvme1"))
    data = json.loads(said(capsys, 0, config, *GIVEN, "--machine", file, "--json"))
    assert data["memory"]["budget"]["disk"] == DRIVE.free
    disks = f"[{config.parent / 'a'}, {config.parent / 'b'}]"
    data = json.loads(said(capsys, 0, config, *GIVEN, "--machine", file, "--json", "--budget.disk", disks))
    assert data["memory"]["budget"]["disk"] == 2 * DRIVE.free


# ---- kinds of device


def test_a_stored_profile_of_another_kind_is_not_used(cache: Path, tmp_path: Path) -> None:
    on_cpu = two_drives(tmp_path)
    on_gpu = replace(on_cpu, device=GPU.device)
    save_profile(on_gpu)
    assert find_profile([tmp_path], kind="cpu") is None
    assert find_profile([tmp_path], kind="cuda") == find_profile([tmp_path]) == on_gpu
    case = PLAIN
    with wrap(case, budget(tmp_path / "gpu")) as engine:
        engine.step(steps_of(case, 1)[0])
        assert engine.prediction is None
    save_profile(on_cpu)
    assert find_profile([tmp_path], kind="cpu") == on_cpu
    assert find_profile([tmp_path], kind="cuda") == on_gpu


@pytest.mark.usefixtures("brief")
def test_a_named_machine_of_another_kind_than_the_device_is_refused(
    config: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(penstock.ConfigError, match=r"device='cpu', but the profile of small .* computes on cuda"):
        wrap(PLAIN, budget(config.parent), plan=GPU)
    file = stored_as(config.parent / "gpu.json", GPU)
    assert "device='cpu', but the profile of small" in said(capsys, 2, config, "--device", "cpu", "--machine", file)
    assert "It fits" in said(capsys, 0, config, *GIVEN, "--device", "cuda:0", "--machine", file)
    assert "It fits" in said(capsys, 0, config, *GIVEN, "--machine", file)
    save_profile(two_drives(config.parent))
    assert "another kind of device than cuda" in said(capsys, 2, config, "--device", "cuda")
    assert "It fits" in said(capsys, 0, config, *GIVEN, "--device", "cpu")


@pytest.mark.usefixtures("brief")
def test_a_plan_says_where_a_gpus_steps_are_not_known(
    config: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = replace(GPU, device=replace(GPU.device, optimizer={"adamw.bf16": 1e9}))
    for machine, says in ((GPU, True), (known, False)):
        file = stored_as(config.parent / "gpu.json", machine)
        out = said(capsys, 0, config, *GIVEN, "--device", "cuda:0", "--machine", file)
        assert ("steps of adamw.bf16 on none take as long as on the host" in out) == says


@pytest.mark.usefixtures("measures")
def test_training_measures_anew_where_the_stored_profile_is_of_another_kind(
    config: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = two_drives(config.parent)
    save_profile(replace(made, device=GPU.device))
    monkeypatch.setattr("penstock.doctor.examine.examine", lambda *asked: made)
    found = profile_for_plan(load(config, [("device", "cpu")]), choose_display(sys.stdout))
    assert found is not None
    assert found.device.kind == "cpu"
    assert "no profile for this kind of device yet: measuring it" in capsys.readouterr().out


@pytest.mark.usefixtures("measures")
def test_training_that_measures_other_directories_keeps_the_links_that_are_known(
    config: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, link = two_drives(config.parent), Network(bandwidth=1e9, latency=1e-4)
    save_profile(replace(two_drives("/proc"), nic=link))
    monkeypatch.setattr("penstock.doctor.examine.examine", lambda *asked: made)
    found = profile_for_plan(load(config, [("device", "cpu")]), choose_display(sys.stdout))
    assert found is not None
    assert found == replace(made, drives=found.drives, nic=link)


def test_training_measures_the_steps_that_a_stored_profile_lacks_of_its_gpu(
    config: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``wrap`` does; and nothing where it has them."""
    asked, settings = list[tuple[object, ...]](), load(config, [])
    known = replace(GPU, device=replace(GPU.device, optimizer={"adamw.bf16": 5e9}))

    def measured(*what: object) -> Machine:
        asked.append(what)
        return known

    where = torch.device("cuda", 0)
    monkeypatch.setattr(train, "resolve_device", lambda asked: where)
    monkeypatch.setattr(train, "name_of", lambda device: GPU.device.name)
    monkeypatch.setattr(train, "profile_of", measured)
    for stored in (replace(two_drives(config.parent), device=GPU.device), known):
        monkeypatch.setattr(train, "find_profile", lambda *paths, stored=stored, **which: stored)
        assert profile_for_plan(settings, choose_display(sys.stdout)) == known
    assert asked == [(settings.budget.disk_paths, where, "adamw.bf16")]


@pytest.mark.usefixtures("measures")
def test_what_cannot_be_measured_says_how_to_train_without(
    config: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*asked: object) -> Machine:
        raise penstock.ConfigError("the file system is full")

    monkeypatch.setattr("penstock.doctor.examine.examine", full)
    with pytest.raises(penstock.ConfigError, match=r"is full\. Or train without a prediction, .*: --plan null"):
        profile_for_plan(load(config, [("device", "cpu")]), choose_display(sys.stdout))


@pytest.mark.usefixtures("measures")
def test_nothing_is_measured_where_it_could_not_be_kept(
    config: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.write_text("a file")
    monkeypatch.setattr("penstock.doctor.examine.examine", lambda *asked: pytest.fail("it was measured"))
    with pytest.raises(penstock.ConfigError, match=r"cannot be stored in .* Set XDG_CACHE_HOME .* --plan null"):
        profile_for_plan(load(config, [("device", "cpu")]), choose_display(sys.stdout))
    assert "measuring" not in capsys.readouterr().out


# ---- arguments


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"schedule": "1f1b"}, "schedule='1f1b' is an order of the ranks of a pipeline, and there is none without"),
        ({"schedule": "zero-bubble"}, "schedule='zero-bubble' is an order of the ranks of a pipeline, and there is"),
        ({"schedule": "diagonal"}, "schedule='diagonal': must be one of vertical, horizontal"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm=-1.0: must be positive"),
        ({"clip_grad_norm": "1"}, "clip_grad_norm='1': must be a number"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm=nan: must be a number"),
        ({"batch": True, "micro_batches": None, "micro_batch_size": None}, "batch=True: must be a whole number"),
        ({"batch": "8", "micro_batches": None, "micro_batch_size": None}, "batch='8': must be a whole number"),
        ({"micro_batches": 2.0}, "micro_batches=2.0: must be a whole number"),
        ({"sequence_length": None}, "sequence_length=None: must be a whole number"),
        ({"batch": 4}, "give it without micro_batches"),
        ({"micro_batches": None}, "belong together"),
        ({"strands": 3}, "strands=3 with 1 rank: must be 1 times a power of two"),
        ({"deal": [1, 1]}, r"deal=\[1, 1\] says how many blocks each rank of a pipeline has, and there is none"),
        ({"disk_free": "much"}, "disk_free: 'much' is not a size"),
        ({"disk_free": -1}, "disk_free: -1 is not a size"),
        ({"tbw": "much"}, "tbw='much': must be a number"),
        ({"tbw": 0}, "tbw=0: must be a number of more than 0"),
        ({"optimizer": "adagrad"}, "optimizer='adagrad': must be one of adamw, adam, sgd, lion"),
        ({"optimizer": ["adamw"]}, r"optimizer=\['adamw'\]: must be one of"),
        ({"optimizer": "sgd", "momentum": True}, "momentum=True: must be a number"),
        ({"momentum": 0.9}, "momentum has no effect with optimizer='adamw'"),
        ({"precision": "fp8"}, "precision='fp8': must be one of fp32, bf16, fp16"),
        ({"model": 65}, "model=65: must be a name"),
        ({"model": None}, "model=None: must be a name"),
        ({"machine": 3}, "machine=3: must be text or a path or a Machine or None"),
        ({"budget": {"device": "1GiB"}}, "budget=.*: must be a Budget or None"),
    ],
)
def test_an_argument_that_cannot_be_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(penstock.ConfigError, match=said):
        planned(**given)


def test_the_class_that_makes_a_shape_of_a_module_is_there_by_the_name_that_is_said() -> None:
    with pytest.raises(penstock.ConfigError) as caught:
        planned(65)
    found = re.search(r"\((\S+) makes one of a module\)", str(caught.value))
    assert found is not None
    assert isinstance(pkgutil.resolve_name(found[1]), type)


@pytest.mark.parametrize("given", [{"tbw": 600.0}, {"disk_free": 1 << 30}])
def test_what_is_said_of_a_disk_that_is_not_there_is_refused(given: dict[str, Any]) -> None:
    no_disk = penstock.Budget(device="64MiB", host="64MiB")
    for asked in ({"budget": no_disk}, {"machine": replace(MACHINE, drives=())}):
        with pytest.raises(penstock.ConfigError, match=f"{next(iter(given))} has no effect without a disk tier"):
            planned(**asked, **given)


def test_flags_without_effect_are_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = stored_as(config.parent / "m.json", MACHINE)
    here = (config, "--machine", file)
    off = ("--budget.disk", "null", "--budget.slots", 2)
    for flag in (("--tbw", 600), ("--disk-free", "1GiB")):
        assert "no effect without a disk tier" in said(capsys, 2, *here, *off, *flag)
    for flag in (("--micro_batches", 3), ("--micro-batch-size", 3)):
        assert f"give it without {flag[0].replace('_', '-')}" in said(capsys, 2, *here, "--batch", 8, *flag)
    assert "--machine is given twice" in said(capsys, 2, *here, "--machine", "a100-40g")
    assert "--micro-batches is given twice" in said(capsys, 2, *here, "--micro-batches", 2, "--micro_batches", 3)


# ---- damaged profiles


def test_a_damaged_profile_stops_nobody_but_those_who_need_it(cache: Path, tmp_path: Path) -> None:
    good = two_drives(tmp_path)
    damaged = save_profile(two_drives("/proc"))
    save_profile(good)
    damaged.write_text("{")
    with pytest.warns(UserWarning, match=f"left out: {damaged}: this is not JSON"):
        assert find_profile([tmp_path], kind="cpu") == good
    with pytest.raises(penstock.ConfigError, match=f"{damaged}: this is not JSON"):
        find_profile([Path("/proc")])
    with pytest.warns(UserWarning, match="left out"):
        assert find_profile([Path("/proc")], kind="cuda") is None


# ---- what runs and prints


@pytest.mark.usefixtures("one_simulation")
def test_a_run_is_planned_with_the_threads_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spy(question: search.Question) -> search.Choice:
        asked.append(question.io_threads)
        return chosen(question)

    chosen = search.search
    monkeypatch.setattr(search, "search", spy)
    case = PLAIN
    machine = replace(MACHINE, drives=(replace(MACHINE.drives[0], path=str(tmp_path)),))
    with wrap(case, budget(tmp_path / "store"), plan=machine, io_threads=12) as engine:
        engine.step(steps_of(case, 1)[0])
    assert asked == [12]


@pytest.mark.usefixtures("brief")
def test_short_times_are_printed_in_short_units() -> None:
    fast = replace(MACHINE, overhead=0.0, device=replace(MACHINE.device, flops={"fp32": 1e13}, h2d=1e12, d2h=1e12))
    in_place = penstock.Budget(device="64MiB", host="64MiB", disk="/disk", slots=1)  # neither delays nor speculates
    found = penstock.plan(LLAMA, machine=fast, budget=in_place, **SPLIT)
    assert found.forecast.lanes["h2d"].work < 1e-4
    text = describe(found, wide=False)
    assert " µs" in text
    assert "e-0" not in text
