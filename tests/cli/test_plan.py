"""``penstock plan`` answers in words and in JSON, without torch, and refuses what cannot be with what to do."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock.cli import main
from penstock.cli.durable import with_durability
from penstock.cli.settings import load
from penstock.cli.split import cut_batch
from penstock.cli.task import as_free_here, check_names
from penstock.hardware.machine import Between, Machine, Network, parse_machine
from penstock.hardware.profiles import save_profile
from penstock.planner.ask import PlanReport, plan, report
from penstock.planner.comparison import Comparison, compared
from penstock.planner.layouts import Asked
from penstock.planner.task import Task
from penstock.shape.huggingface import model_shape
from penstock.store.manifest import DATA
from tests.machines import gpu, measured_here
from tests.questions import DRIVE, LLAMA, MACHINE

PLENTY = 8 << 30
"""Bytes on a drive, more than any plan here asks for."""

CONFIG = """\
run: {run}
model:
  init: true
  config:
    model_type: llama
    hidden_size: 128
    intermediate_size: 352
    num_hidden_layers: 6
    num_attention_heads: 4
    max_position_embeddings: 256
data:
  sources: stdlib
  tokenizer: {{train: {{vocabulary: 1024}}}}
  sequence_length: 128
optimizer:
  lr: 1e-3
budget:
  device: {device}
  host: {host}
  disk: "{{run}}/store"
steps: 4
batch: {{sequences: 8}}
micro_batch_size: 2
clip_grad_norm: null
precision: fp32
delay: 0
"""
"""Without a delay to choose, which takes most of a plan."""


def as_ever(machine: Machine) -> Machine:
    """The machine without what changes from look to look: what is free on this one's drives, and where it is told."""
    drives = (replace(drive, free=min(drive.free, PLENTY)) for drive in machine.drives)
    return replace(machine, drives=tuple(drives), file="")


@pytest.fixture(scope="module", autouse=True)
def _each_plan_once() -> Iterator[None]:
    """A plan that several tests look at, as text and as JSON, is made once: most of what these tests take is plans."""
    known: dict[str, PlanReport] = {}

    def once(task: Task, **cut: Any) -> PlanReport:
        free, brief = min(task.disk_free or 0, PLENTY), PlanReport.advice == ()
        key = repr((replace(task, disk_free=free, machine=as_ever(task.machine)), cut, brief))
        if key not in known:
            known[key] = report(task, **cut)
        return known[key]

    comparisons: dict[str, Comparison] = {}

    def compared_once(asked: Asked) -> Comparison:
        hosts = [(as_ever(kind.machine), kind.count, asked.hosts.each) for kind in asked.hosts.kinds]  # of any name
        key = repr((replace(asked.task, machine=hosts[0][0]), hosts, asked.batch, asked.size, asked.cp))
        if key not in comparisons:
            comparisons[key] = compared(asked)
        return replace(comparisons[key], asked=asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.cli.plan.report", once)
        patch.setattr("penstock.planner.ask.report", once)
        patch.setattr("penstock.cli.plan_hosts.compared", compared_once)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planned")


@pytest.fixture
def config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file on a machine that has been measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    save_profile(measured_here(replace(MACHINE, drives=(replace(DRIVE, path=str(folder)),))))
    return write(folder)


def write(folder: Path, device: str = "10MiB", host: str = "8MiB") -> Path:
    path = folder / f"{device}-{host}.yaml"
    path.write_text(CONFIG.format(run=folder / "run", device=device, host=host))
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one message of a command that is refused."""
    assert main(["plan", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("penstock: ")
    assert "Traceback" not in captured.err
    return captured.err


def answered(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["plan", *map(str, words)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_overrides_are_compared_with_the_names_of_all_parameters(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all layers, although a plan looks at a few of those that are alike."""
    misspelt = ("--optimizer.overrides", "{match: nrom, lr: 1}")
    assert "override match='nrom' is the first match of no trained parameter" in refused(capsys, config, *misspelt)
    assert "match='nrom'" in refused(capsys, config, *misspelt, "--hosts", "2x1xa100-40g", "--network", "1GB/s")
    assert "match='nrom'" in refused(capsys, config, *misspelt, "--pipeline", "2")
    check_names(load(config, [("optimizer.overrides", "{match: layers.5, lr: 1}")]), "cpu")


@pytest.mark.usefixtures("brief")
def test_epochs_are_as_many_steps_as_the_run_makes_of_them(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rounded, and one at least: a step has 1,024 tokens. The delay is chosen."""
    for epochs, steps in (("1.4", 1), ("1.6", 2), ("0.1", 1)):
        flags = ("--steps", "null", "--epochs", epochs, "--epoch-tokens", "1024", "--delay", "null", "--json")
        assert json.loads(answered(capsys, config, *flags))["run"]["steps"] == steps


def test_a_settings_file_is_planned_for_the_machine_that_was_measured(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = answered(capsys, config)
    for word in (
        "It fits. vertical schedule, 4 micro-batches of 2 x 128 tokens",
        "step ",
        "no MFU, as the profile has no maker's peak",
        "profile     measured 2026-01-31 12:00 UTC, while other programs kept 0.2 of",
        "\nthe run     4 steps, 4,096 tokens: ",
        "of the drives' life",
        "an export ",
        "\ndurability  ",
        "bottleneck",
        "disk write",
        "weights ",
        "activations",
        "a snapshot",
        "\nkill        ",
        "at 100 TBW a drive",
        "sequences in a step",
        "<- this plan",
        "compute allows",
        "What would help",
    ):
        assert word in text


def test_json_says_the_same_as_the_function(
    config: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    data = json.loads(answered(capsys, config, "--json"))
    assert data["fits"] is True
    assert data["plan"]["micro_batches"] == 4
    assert data["plan"]["schedule"] == "vertical"
    step = data["step"]
    assert step["tokens_per_second"] == pytest.approx(step["tokens"] / step["seconds"])
    assert step["limit_seconds"] <= step["seconds"]
    assert data["lanes"][step["bottleneck"]]["work_seconds"] == step["limit_seconds"]
    for tier in ("device", "host", "disk"):
        assert data["memory"]["train"][tier] <= data["memory"]["budget"][tier]
    assert data["lanes"]["write"]["bytes"] == data["disk"]["written_per_step"]
    assert {"vertical", "horizontal"} == set(data["batches"][0]["tokens_per_second"])
    request.getfixturevalue("brief")  # what follows looks at the plan alone
    model = LLAMA | {"num_hidden_layers": 6}
    budget = penstock.Budget(device="10MiB", host="8MiB", disk=config.parent / "run" / "store")
    shape = model_shape(model, kind="cpu", loss_tile=1024)  # as is the default of settings
    cut: dict[str, Any] = {"micro_batches": 4, "micro_batch_size": 2, "sequence_length": 128, "delay": 0}
    found = penstock.plan(shape, budget=budget, schedule="vertical", **cut)
    assert found.json["step"] == step
    assert found.json["plan"] == data["plan"]
    assert found.plan.settings == plan(model, budget=budget, schedule="vertical", **cut).plan.settings


@pytest.mark.usefixtures("brief")
def test_settings_and_options_are_laid_over_the_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--batch.sequences",
        4,
        "--clip_grad_norm",
        1.0,
        "--tbw",
        7,
        "--disk-free",
        "1GiB",
        "--json",
        "--delay",
        0,
    )
    data = json.loads(answered(capsys, config, *options))
    assert data["plan"]["micro_batches"] == 2
    assert data["plan"]["waits_for_norm"] is True
    assert data["disk"]["tbw"] == 7
    assert data["memory"]["budget"]["disk"] == 1 << 30
    data = json.loads(answered(capsys, config, "--batch", 12, "--json", "--delay", 0))
    assert data["plan"]["micro_batches"] * data["plan"]["micro_batch_size"] == 12


def test_what_ships_is_answered_without_torch_and_without_a_measurement(tmp_path: Path) -> None:
    code = (
        "import sys; from penstock.cli import main; "
        "what = ['--model', 'llama-8b', '--machine', 'workstation', '--batch', '2']; "
        "code = main(['plan', *what, '--durability', 'step', '--delay', '0', '--json']); "
        "sys.exit(code or 3 * ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"XDG_CACHE_HOME": str(tmp_path), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["model"]["parameters"] == pytest.approx(8e9, rel=0.01)
    assert data["roofline"]["balance_tokens"] > 0


@pytest.mark.usefixtures("brief")
def test_a_plan_for_null_says_that_the_run_would_place_otherwise(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "plan: null" in answered(capsys, config, "--plan", "null")


@pytest.mark.usefixtures("brief")
def test_nothing_fits_that_takes_more_than_the_machine_has(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = penstock.plan("gpt-13b", machine="a100-40g", micro_batches=4, micro_batch_size=4, delay=0).forecast
    assert max(sizes["device"] for sizes in large.memory.values()) <= 40 << 30
    small = config.parent / "small.json"  # a settings file's budget may be more than a machine has
    small.write_text(replace(MACHINE, device=replace(MACHINE.device, memory=1 << 20)).to_json())
    text = answered(capsys, config, "--machine", small, "--delay", 0)
    assert "It fits into the budget, but not into the machine." in text
    assert "note: it does not fit into the machine: " in text


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--machine NAME|FILE" in answered(capsys, "--help")


# ---- refusals


def test_what_does_not_fit_is_refused_with_the_smallest_change(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(capsys, write(config.parent, device="1MiB", host="64MiB"))
    assert "does not fit in 1 MiB of device" in text
    assert "The smallest change that makes it fit:" in text
    assert "more device (" in text
    text = refused(capsys, write(config.parent), "--disk-free", "1MiB", "--budget.host", "4MiB")
    assert "more disk (" in text


def test_a_machine_that_was_never_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    text = refused(capsys, write(tmp_path))
    assert f"run penstock doctor --path {tmp_path / 'run' / 'store'}" in text
    assert "penstock doctor" in refused(capsys, "--model", "llama-8b")


def test_unknown_names_say_what_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean gpt-65b" in refused(capsys, "--model", "gpt-66b", "--machine", "a100-40g")
    assert "a100-40g" in refused(capsys, "--model", "gpt-65b", "--machine", "a100-41g")
    assert "missing.json" in refused(capsys, "--model", "gpt-65b", "--machine", "missing.json")
    assert "cannot read" in refused(capsys, "--model", "no/config.json", "--machine", "a100-40g")
    assert "cannot read the settings" in refused(capsys, "missing.yaml", "--machine", "a100-40g")


@pytest.mark.usefixtures("brief")
def test_an_option_of_the_other_form_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "gpt-65b", "--machine", "a100-40g")
    for flag in ("--ranks", "--epoch-tokens", "--config", "--settings"):
        assert f"there is no option {flag}" in refused(capsys, *model, flag, 2)
    assert "--tokens is for a model without a settings file" in refused(capsys, config, "--tokens", "5M")
    assert "--longest takes no value" in refused(capsys, *model, "--longest", "true")
    assert main(["plan", *model, "--optimizer", "sgd", "--momentum", "0.9", "--delay", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"read": 0.0}, "drives[0].read"),
        ({"write": None}, "drives[0] lacks 'write'"),
    ],
)
def test_a_profile_with_zero_or_missing_rates(
    config: Path, capsys: pytest.CaptureFixture[str], change: dict[str, float | None], said: str
) -> None:
    data = json.loads(MACHINE.to_json())
    data["drives"][0] |= {k: v for k, v in change.items() if v is not None}
    for key in (k for k, v in change.items() if v is None):
        del data["drives"][0][key]
    path = config.parent / "bad.json"
    path.write_text(json.dumps(data))
    assert said in refused(capsys, config, "--machine", path)


def test_a_profile_without_what_the_run_needs(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config.parent / "other.json"
    path.write_text(replace(MACHINE, drives=()).to_json())
    assert "has no drives" in refused(capsys, config, "--machine", path)
    assert "has no drives" in refused(capsys, config, "--machine", path, "--tbw", 600)
    path.write_text(MACHINE.to_json())
    assert "no optimizer rate lion.fp32" in refused(capsys, config, "--machine", path, "--optimizer.name", "lion")
    said = refused(capsys, config, "--machine", path, "--precision", "fp16", "--optimizer.name", "adamw")
    assert "no optimizer rate adamw.fp16" in said


def test_no_batch_is_promised_more_than_compute_allows(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other batches may keep more graphs on the device than the plan does."""
    small = config.parent / "fast-disk.json"
    rates = dict.fromkeys(("read", "write", "read_both", "write_both"), 1e12)
    small.write_text(replace(MACHINE, drives=(replace(DRIVE, path="/d", **rates),)).to_json())
    path = write(config.parent, device="32MiB", host="96MiB")
    data = json.loads(answered(capsys, path, "--machine", small, "--json"))
    assert 0 < data["plan"]["graphs_kept"] < 6 * data["plan"]["micro_batches"], "some, and not all"
    most = max(rate or 0.0 for point in data["batches"] for rate in point["tokens_per_second"].values())
    assert most <= data["roofline"]["compute_tokens_per_second"]


@pytest.mark.usefixtures("brief")
def test_a_plan_cuts_the_batch_as_the_run_does_whose_durability_is_weighed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With durable steps another cut is the fastest than with state in memory."""
    rates = {"read": 2.5e6, "write": 1.2e6, "read_both": 2e6, "write_both": 1e6}
    slow = replace(MACHINE, drives=(replace(DRIVE, path="/d", **rates),))
    machine = folder / "slow-drive.json"
    machine.write_text(slow.to_json())
    path = write(folder, device="14MiB", host="14MiB")
    path.write_text(path.read_text().replace("micro_batch_size: 2\n", ""))
    found = json.loads(answered(capsys, path, "--machine", machine, "--json"))
    config = load(path, ())
    cut = cut_batch(config, "vertical", slow, "cpu")
    run, _ = with_durability(config, "vertical", slow, cut, 1)
    assert found["durability"]["kept"] == run.budget.durability == "interval"
    assert found["plan"]["micro_batch_size"] == cut.size


@pytest.mark.usefixtures("brief")
def test_several_ranks_share_the_budget_and_the_step_and_one_sends_nothing(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config.parent / "ranks.json"
    path.write_text(replace(MACHINE, between=(Between(ranks=2, bandwidth=1e8, latency=1e-3),)).to_json())
    options = (config, "--machine", path, "--budget.host", "32MiB", "--delay", 0)
    one, two, four = (json.loads(answered(capsys, *options, "--ranks", ranks, "--json")) for ranks in (1, 2, 4))
    for ranks, data in ((1, one), (2, two), (4, four)):
        assert data["ranks"] == ranks
        assert data["step"]["tokens"] == one["step"]["tokens"]
        assert data["plan"]["micro_batches"] * ranks == one["plan"]["micro_batches"]
        assert data["memory"]["budget"]["host"] == (32 << 20) // ranks
        assert data["memory"]["train"]["host"] <= (32 << 20) // ranks
        assert ("net" in data["lanes"]) == (ranks > 1)
        assert data["step"]["seconds"] >= data["step"]["limit_seconds"]
    sent = [data["lanes"]["net"]["bytes"] * ranks / (ranks - 1) for ranks, data in ((2, two), (4, four))]
    assert sent[0] == pytest.approx(sent[1], rel=0.1)  # groups of a small model are padded
    said = answered(capsys, *options, "--ranks", 2)
    assert "2 ranks that share its state" in said
    assert "of each rank:" in said
    copied = json.loads(answered(capsys, *options, "--ranks", 4, "--copies", 2, "--json"))
    assert (copied["ranks"], copied["copies"], copied["step"]["tokens"]) == (4, 2, one["step"]["tokens"])
    assert copied["disk"]["written_per_parameter"] == pytest.approx(2 * two["disk"]["written_per_parameter"])
    assert "2 times 2 ranks, each with a copy" in answered(capsys, *options, "--ranks", 4, "--copies", 2)
    assert "copies=2 with 3 ranks" in refused(capsys, *options, "--batch", 6, "--ranks", 3, "--copies", 2)


@pytest.mark.usefixtures("brief")
def test_of_ranks_that_are_dealt_drives_each_has_the_room_of_the_one_with_the_least(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config.parent / "drives.json"
    drives = tuple(replace(DRIVE, path=f"/d{n}", free=1 << 30) for n in range(3))
    machine = replace(MACHINE, drives=drives, between=(Between(ranks=2, bandwidth=1e8, latency=1e-3),))
    path.write_text(machine.to_json())
    options = (config, "--machine", path, "--budget.disk", "[/d0, /d1, /d2]", "--delay", 0, "--json")
    for words, room in (((), 3 << 30), (("--ranks", 2), 1 << 30), (("--ranks", 2, "--disk-free", "1.5GiB"), 1 << 29)):
        assert json.loads(answered(capsys, *options, *words))["memory"]["budget"]["disk"] == room


def test_directories_on_one_file_system_have_what_is_free_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what stores that are there take already, and nothing else that is."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    paths = (tmp_path / "a", Path("/proc/not-made-yet"), tmp_path / "later" / "b")
    for place in (".", "rank-1", "rank-1/scratch", "other"):
        (paths[0] / place).mkdir(parents=True)
        (paths[0] / place / DATA).write_bytes(bytes(1 << 20))
    (paths[0] / "films").write_bytes(bytes(1 << 20))
    found = as_free_here(replace(MACHINE, drives=(DRIVE, DRIVE, DRIVE)), paths)
    half = ((1 << 30) + (3 << 20)) // 2
    assert [drive.free for drive in found.drives] == [half, 1 << 30, half]
    assert as_free_here(MACHINE, ()) == MACHINE


@pytest.mark.usefixtures("one_simulation")
def test_layouts_of_several_hosts_are_compared_and_the_fastest_is_named(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config.parent / "host.json"
    path.write_text(replace(MACHINE, between=(Between(ranks=2, bandwidth=1e8, latency=1e-3),)).to_json())
    options = (config, "--hosts", f"2x2x{path}", "--network", "200Mbit/s", "--budget.host", "32MiB")
    data = json.loads(answered(capsys, *options, "--json"))
    names = [one["name"] for one in data["layouts"]] + [one["name"] for one in data["refused"]]
    assert {"dp_shard 4, stage 3", "dp_shard 4, stage 2", "dp_shard 4, stage 0", "pp 4"} < set(names)
    assert "dp_replicate 2 x dp_shard 2, stage 3" in names
    assert data["fastest"] == data["layouts"][0]["name"]
    assert all(one["tokens"] == 8 * 128 for one in data["layouts"])
    assert data["hosts"][0]["nic"] == {"bandwidth": 25e6, "latency": 1e-5, "contention": {}}
    said = answered(capsys, *options)
    assert f"fastest     {data['fastest']}" in said
    assert "0.025 GB/s between hosts, 10 us a message, assumed" in said
    ranked = [line.split("  ")[0] for line in said.splitlines() if line.startswith(("dp_", "pp"))]
    assert ranked == 2 * [one["name"] for one in data["layouts"]], "how long, and what it takes"
    same = answered(capsys, config, "--machine", path, "--hosts", "2x2", *options[3:], "--latency", "10us")
    assert same == said.replace(", assumed: --latency says it", "").replace("2 x host", "2 x small")


@pytest.mark.usefixtures("one_simulation")
def test_layouts_of_ranks_that_share_each_sequence_are_compared(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config.parent / "host.json"
    between = (Between(ranks=2, bandwidth=1e8, latency=1e-3), Between(ranks=4, bandwidth=1e8, latency=1e-3))
    path.write_text(replace(MACHINE, between=between).to_json())
    options = (config, "--hosts", f"2x2x{path}", "--network", "200Mbit/s", "--budget.host", "32MiB", "--cp", "2")
    same = (*options[5:], "--stage", "3", "--micro_batch_size", "1")
    data = json.loads(answered(capsys, *options, "--json"))
    found = {one["name"]: one for one in data["layouts"]}
    assert {"dp_shard 2 x cp 2, stage 3", "dp_replicate 2 x cp 2, stage 3", "pp 2 x cp 2"} <= found.keys()
    assert found["pp 2 x cp 2"]["settings"]["cp"] == 2
    assert all(one["tokens"] == 8 * 128 for one in found.values())
    why = {one["name"]: one["why"] for one in data["refused"]}
    assert why["pp 4 x cp 2"] == (
        "cp=2: 1 rank cannot share sequences 2 by 2: let a multiple of 2 have each copy of the state, or place in a "
        "pipeline"
    )
    assert "2 ranks on each, 2 of which share each sequence" in answered(capsys, *options)
    for more, says in (
        (("--batch", "7"), "by 2 groups of 2 ranks that share each: give a batch of a multiple of 2 sequences"),
        (("--strands", "2"), "strands=2 with 4 ranks: must be 4 times a power of two"),
    ):
        uneven = json.loads(answered(capsys, *options, *more, "--json"))
        assert [one["name"] for one in uneven["layouts"]] == ["pp 2 x cp 2"]
        assert says in {one["name"]: one["why"] for one in uneven["refused"]}["dp_shard 2 x cp 2, stage 3"]
    (shared,) = json.loads(answered(capsys, config, "--hosts", f"1x2x{path}", *same, "--json"))["layouts"]
    alone = json.loads(answered(capsys, config, "--ranks", "2", "--machine", path, *same, "--json"))
    assert shared["name"] == "cp 2, stage 3"
    assert shared["seconds"] == alone["step"]["seconds"]


@pytest.mark.usefixtures("one_simulation")
@pytest.mark.parametrize(
    ("words", "room"), [(("--budget.host", "1MiB"), True), (("--strands", "3", "--stage", "3"), False)]
)
def test_more_memory_is_named_where_layouts_have_no_room(
    config: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], room: bool
) -> None:
    path = config.parent / "host.json"
    path.write_text(replace(MACHINE, between=(Between(ranks=2, bandwidth=1e8, latency=1e-3),)).to_json())
    assert main(["plan", str(config), "--hosts", f"1x2x{path}", *words]) == 1
    said = capsys.readouterr().out
    assert "No layout is possible, for the reasons above." in said
    assert ("Those without room" in said) == room


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--network", "1Gbit/s"), "network is that between hosts, and has no effect without --hosts"),
        (("--hosts", "2x2xa100-40g", "--latency", "1ms"), "latency is that of --network"),
        (("--hosts", "2xa100-40g"), "names no hosts. Write how many, the ranks of each and their machine"),
        (("--hosts", "1x2xh100-80g+1x4xh100-80g"), "has as many ranks on each of its hosts"),
        (("--hosts", "2x8xa100-40g", "--network", "fast"), "penstock: --network: 'fast' is not a network's rate"),
        (
            ("--hosts", "2x8xh100-80g", "--network", "1Gbit/s", "--latency", "-1us"),
            "penstock: --latency: '-1us' is not a message's delay",
        ),
        (("--hosts", "2x8xa100-40g", "--network", "1Gbit/s"), "does not tell how fast ranks send to each other"),
        (("--hosts", "2x8xh100-80g"), "does not tell how fast hosts send to each other: give --network"),
        (("--hosts", "2x8xh100-80g", "--ranks", "2"), "ranks does not go with --hosts"),
        (("--hosts", "2x8xh100-80g", "--machine", "gh200"), "has no effect, as --hosts names the machine"),
        (("--hosts", "1x1xh100-80g"), "is one rank: leave --hosts out"),
        (("--hosts", "1x2xh100-80g", "--network", "1Gbit/s"), "network is that between hosts, and hosts="),
        (("--hosts", "2x2xh100-80g", "--budget.disk", "null", "--disk_free", "1TB"), "disk_free has no effect without"),
    ],
)
def test_hosts_that_cannot_be_compared_are_refused(
    config: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code = main(["plan", str(config), *words])
    found = capsys.readouterr()
    assert code
    assert said in found.out + found.err


@pytest.mark.usefixtures("brief")
def test_what_several_ranks_cannot_have_planned(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not tell how fast ranks send to each other" in refused(capsys, config, "--ranks", 2)
    path = config.parent / "linked.json"
    path.write_text(replace(MACHINE, network=Network(bandwidth=1e9, latency=0.0)).to_json())
    options = (config, "--machine", path, "--ranks", 3)
    said = "batch: 4 micro-batches cannot be shared evenly by 3 ranks: give a batch of a multiple of {} sequences\n"
    assert said.format(6) in refused(capsys, *options)
    said = "batch: 4 sequences cannot be shared evenly by 3 ranks: give a batch of a multiple of 3 sequences\n"
    assert said in refused(capsys, *options, "--batch", 4)
    assert "must be from 1 to" in refused(capsys, config, "--ranks", 0)
    words = ["--machine", path, "--ranks", 2, "--budget.durability", "interval", "--budget.interval", 7]
    assert main(["plan", str(config), *map(str, words)]) == 0
    assert "a commit every 7 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "takes a settings file, or --model NAME, and was given none"),
        (("a.yaml", "b.yaml"), "a.yaml and b.yaml"),
        (("a.yaml", "b.yaml", "--model", "gpt-65b"), "a.yaml and b.yaml"),
        (("--model", "gpt-65b", "--frobnicate", "1"), "there is no option --frobnicate"),
        (("--model", "gpt-65b", "--gradient-accumulation-steps", "4"), "in a settings file it is batch.sequences ("),
        (("--model", "gpt-65b", "--learning_rate", "1"), "--learning_rate; in a settings file it is optimizer.lr\n"),
        (("--model", "gpt-65b", "--batch"), "--batch needs a value"),
        (("--model", "gpt-65b", "--machine", "a100-40g", "--batch", "0"), "--batch=0: must be a whole number"),
        (("--model", "gpt-65b", "--machine", "a100-40g", "--batch", "x"), "--batch must be a whole number"),
        (("--model", "gpt-65b", "--batch", "1048577"), "--batch=1048577: a step is trained on at most 1,048,576"),
        (("a.yaml", "--batch", "1048577"), "--batch=1048577: a step is trained on at most 1,048,576 sequences"),
        (("--model", "gpt-65b", "--machine", "a100-40g", "--tbw", "-3"), "--tbw=-3: must be a number"),
        (("--model", "gpt-65b", "--machine", "a100-40g", "--host", "much"), "--host: 'much' is not a size"),
        (("--model", "gpt-65b", "--machine", "a100-40g", "--host", "9TiB"), "has 512 GiB of host memory"),
        (("--model", "gpt-65b", "--machine", "a100-40g", "--precision", "fp8"), "must be one of fp32, bf16, fp16"),
        (("--model", "gpt-65b", "--machine", "a100-40g", "--micro-batches", "4"), "belong together"),
        (("--model", "gpt-65b", "--schedule", "1f1b"), "penstock plan FILE --pipeline N --schedule 1f1b"),
        (("--model", "gpt-65b", "--schedule", "diagonal"), "--schedule must be one of vertical, horizontal, not"),
        (("--model", "gpt-65b", "--machine", "a100-40g", "--sequence-length", "9999", "--batch", "2"), "9999"),
        (("--model", "gpt-65b", "--machine", "a100-40g", "--batch", "1009"), "batch=1009"),
    ],
)
def test_bad_words(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    assert said in refused(capsys, *words)


@pytest.mark.usefixtures("brief")
def test_what_is_written_a_day_is_told_beside_what_may_be(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--budget.endurance", "{tbw: 2000TB, days: 200}", "--tbw", "56064"]) == 0
    out = capsys.readouterr().out
    assert "at 56,064 TBW a drive" in out
    said = re.search(r"endurance   ([\d.]+ \wiB) written a day, 9.09 TiB allowed", out)
    assert said is not None
    assert "drives      plans write at the rate of the first seconds: doctor --sustained" in out
    assert "budget.endurance.per_day" in refused(capsys, config, "--budget.endurance.per_day", "much")
    assert "budget.endurance takes per_day, tbw, days" in refused(capsys, config, "--budget.endurance", "{daily: 1GB}")


def test_a_schedule_of_ones_own_is_for_simulate(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "own.txt").write_text("")
    assert "penstock simulate" in refused(capsys, config, "--delay", "null", "--schedule", config.parent / "own.txt")


@pytest.mark.usefixtures("brief")
def test_the_dtype_of_gradients_and_who_rounds_them_are_told(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "in bf16, rounded" not in answered(capsys, config)
    options = (config, "--grad_dtype", "bf16", "--delay", 0)
    found = re.search("gradients   in bf16, rounded (.+)", answered(capsys, *options))
    plan = json.loads(answered(capsys, *options, "--json"))["plan"]
    assert plan["grad_dtype"] == "bf16"
    assert found is not None
    assert found[1] == {"device": "on the device", "host": "as the optimizer reads them"}[plan["cast"]]
    cut: dict[str, int] = {"micro_batches": 4, "micro_batch_size": 4, "delay": 0}
    far = penstock.plan("gpt-13b", machine="a100-40g", grad_dtype="bf16", **cut).plan.settings
    assert (far.grad_dtype, far.cast) == ("bf16", "device"), "over PCIe the device had better round"
    words = ("--model", "gpt-65b", "--machine", "a100-40g", "--batch", 16)
    assert "must be one of fp32, bf16" in refused(capsys, *words, "--grad-dtype", "fp16")


# ---- the update mode of a plan

CLIPPED = ("--clip_grad_norm", 1.0, "--budget.state", "disk", "--budget.weights", "disk", "--budget.host", "12MiB")


@pytest.mark.usefixtures("one_simulation")
def test_the_text_tells_the_update_mode_and_what_another_would_gain(
    config: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    waits = answered(capsys, config, *CLIPPED, "--delay", 0, "--speculate", "false")
    request.getfixturevalue("brief")
    text = answered(capsys, config, *CLIPPED, "--delay", 0.2)
    assert "optimizer steps before the gradient norm is known, delay 0.2" in text
    assert "5% of the steps run twice" in text
    assert "optimizer waits for the gradient norm" in waits
    assert "run twice" not in waits
    assert "speculate: steps before the norm is known" in waits, "what would help"


@pytest.mark.usefixtures("brief")
def test_json_tells_the_update_mode(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(answered(capsys, config, *CLIPPED, "--delay", 0.2, "--json"))
    step = data["step"]
    assert data["plan"]["speculates"] is True
    assert data["plan"]["delay"] == 0.2
    assert step["repeats"] == 0.05
    assert step["expected_seconds"] == pytest.approx(1.05 * step["seconds"])
    assert step["tokens_per_second"] == pytest.approx(step["tokens"] / step["expected_seconds"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--speculate", "true"), "speculate has no effect without clip_grad_norm"),
        (("--clip_grad_norm", 1, "--budget.slots", 1, "--speculate", "true"), "budget.slots=1"),
        (("--delay", 1.5), "delay=1.5: must be from 0 to 1"),
    ],
)
def test_update_modes_that_cannot_be_are_refused(
    config: Path, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], said: str
) -> None:
    assert said in refused(capsys, config, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--strands", 3), "strands=3 with 1 rank: must be 1 times a power of two"),
        (("--strands", 3, "--ranks", 2), "strands=3 with 2 ranks: must be 2 times a power of two"),
        (("--strands", 3, "--pipeline", 2), "strands=3 with 1 rank: must be 1 times a power of two"),
        (("--deal", "[1, 1]"), "deal=[1, 1] says how many blocks each rank of a pipeline has, and there is none"),
    ],
)
def test_sums_and_deals_that_a_run_would_refuse_are_refused(
    config: Path, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], said: str
) -> None:
    assert said in refused(capsys, config, *words)


MUON = ("--optimizer.name", "muon", "--optimizer.adamw.lr", 1e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--optimizer.overrides", "{match: nrom, lr: 0}"), "override match='nrom' is the first match of no trained"),
        ((*MUON, "--optimizer.splits", "{match: qkv, parts: 3}"), "split match='qkv' is the first"),
        ((*MUON, "--optimizer.elementwise", "conv"), "elementwise='conv' finds no parameter"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--pipeline", 2)], ids=["alone", "pipeline"])
def test_names_that_the_model_does_not_have_are_refused_as_the_run_would(
    config: Path, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], said: str, more: tuple[object, ...]
) -> None:
    assert said in refused(capsys, config, *words, *more)


@pytest.mark.parametrize(
    ("given", "said"), [({"speculate": "yes"}, "speculate='yes'"), ({"delay": True}, "delay=True")]
)
def test_update_modes_of_another_type_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(penstock.ConfigError, match=said):
        penstock.plan("gpt-13b", machine="a100-40g", batch=16, **given)


@pytest.mark.usefixtures("brief")
def test_fp16_without_clipping_expects_no_step_to_be_run_twice() -> None:
    """A step that overflows is dropped, and not run again."""
    budget = penstock.Budget(device="30GiB", host="60GiB", disk="/disk", weights="disk", state="disk")
    machine = replace(
        MACHINE,
        device=replace(MACHINE.device, kind="cuda", flops={"fp16": 1e14}),
        host=replace(MACHINE.host, optimizer={"adamw.fp16": 1e9}),
        drives=(replace(DRIVE, read=1e10, write=1e10),),
    )
    found = penstock.plan(
        "gpt-13b", machine=machine, budget=budget, precision="fp16", delay=0, micro_batches=2, micro_batch_size=1
    )
    assert found.json["plan"]["speculates"]
    assert found.forecast.repeats == 0.0


@pytest.mark.usefixtures("brief")
def test_the_text_tells_how_many_blocks_have_their_state_on_the_device(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = set()
    for device, host in ((10, 12), (13, 12), (16, 12), (64, 6)):
        where = ("--budget.device", f"{device}MiB", "--budget.host", f"{host}MiB", "--budget.durability", "none")
        options = (config, *where, "--delay", 0, "--recompute", "true")
        share = json.loads(answered(capsys, *options, "--json"))["plan"]["state"].get("device", 0.0)
        lines = [
            line.strip() for line in answered(capsys, *options).splitlines() if line.strip().startswith("state of")
        ]
        assert bool(lines) <= (share > 0)
        told |= set(lines)
    assert "state of all blocks on the device, stepped there" in told
    assert any(re.match(r"state of (the last )?[1-5] blocks? on the device, stepped there", line) for line in told), (
        told
    )


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        (None, "whether adamw.bf16 steps on GPU have the host's bits has not been looked at: penstock doctor"),
        (("adamw.bf16",), "adamw.bf16 steps on GPU differ from the host's in some bits, so where the state lives"),
        ((), None),
        (("adamw.fp32",), None),
    ],
)
def test_a_device_that_may_step_with_other_bits_is_said(bits: tuple[str, ...] | None, said: str | None) -> None:
    device = gpu(other_bits=bits)
    assert parse_machine(replace(MACHINE, device=device).to_json(), "here").device == device
    words = device.differs("adamw.bf16")
    assert words is None if said is None else words is not None and words.startswith(said)


@pytest.mark.usefixtures("brief")
def test_a_plan_that_steps_on_a_gpu_of_which_nobody_knows_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "config.json"  # all of its state is on the device
    small.write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    words = ("--model", small, "--machine", "a100-40g", "--batch", 1, "--sequence-length", 128)
    told = answered(capsys, *words, "--durability", "none", "--delay", 0)
    assert "bits        whether adamw.bf16 steps on" in told
