"""``penstock simulate``: numbers that are right, files that open, and a clear word about anything that cannot be."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.cli.schedule_file import line_of
from penstock.cli.simulate_arguments import Arguments
from penstock.cli.words import read_words
from penstock.hardware.profiles import shipped_machine
from penstock.schedule.ir.lanes import LOCAL_LANES
from penstock.schedule.lower.families import FAMILIES
from tests.machines import cluster_profile
from tests.patience import PATIENCE

Simulate = Callable[..., dict[str, Any]]


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Simulate:
    """Run the command with --json; what it prints."""

    def run(*words: object) -> dict[str, Any]:
        assert main(["simulate", *map(str, words), "--json"]) == 0
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        return said

    return run


Fails = Callable[..., str]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Run the command; what it says when it ends with 2, having printed nothing on standard output."""

    def run(*words: object) -> str:
        assert main(["simulate", *map(str, words)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "Traceback" not in said.err
        return said.err

    return run


# ---- what it says


def test_every_number_of_1f1b_is_there_and_right(simulate: Simulate) -> None:
    """Four ranks, eight micro-batches: 33 = (8 + 3) x 3, and as many in flight as ranks follow."""
    said = simulate("1f1b", "--ranks", 4, "--micro-batches", 8, "--costs", "unit")
    assert said["schedule"] == "1f1b"
    assert (said["time"], said["lower_bound"], said["violations"]) == (33, 24, [])
    assert [rank["in_flight_peak"] for rank in said["ranks"]] == [4, 3, 2, 1]
    assert [rank["end"] for rank in said["ranks"]] == [33, 31, 29, 27]
    assert {rank["busy"] for rank in said["ranks"]} == {24}
    assert [rank["peak"] for rank in said["ranks"]] == [{"device": n, "host": 0, "disk": 0} for n in (4, 3, 2, 1)]
    assert said["ranks"][0]["puzzle_time"] <= 33
    assert said["bubble"] == pytest.approx(3 / 11)
    assert said["stalls"][0] == {"rank": 0, "op": "B0m0", "waited": 6, "for": ["RD0m0", "1:SD0m0", "B1m0"]}


def test_json_has_the_keys_that_programs_read_and_no_others(simulate: Simulate) -> None:
    said = simulate("1f1b", "--ranks", 2, "--micro-batches", 2, "--costs", "unit")
    whole = ("schedule", "costs", "time", "ranks", "bytes", "lower_bound", "bubble", "stalls", "violations")
    assert tuple(said) == whole
    of_a_rank = ("end", "busy", "peak", "in_flight_peak", "puzzle_time", "puzzle_peak")
    assert [tuple(rank) for rank in said["ranks"]] == [of_a_rank] * 2
    assert {tuple(rank["peak"]) for rank in said["ranks"]} == {("device", "host", "disk")}
    assert {tuple(stall) for stall in said["stalls"]} == {("rank", "op", "waited", "for")}
    assert said["bytes"].keys() == {*LOCAL_LANES, "send", "recv"}


@pytest.mark.parametrize(
    ("words", "end", "peak"),
    [
        (("single", "--layers", 2, "--micro-batches", 4), 17.0, 20),
        (("grad-accumulation", "--layers", 2, "--micro-batches", 4), 17.0, 15),
        (("ddp", "--layers", 2, "--ranks", 4, "--micro-batches", 4), 5.6, 14),
        (("weight-sharded", "--layers", 6, "--ranks", 4, "--micro-batches", 4), 20.4, 21),
        (("fsdp", "--layers", 6, "--ranks", 4, "--micro-batches", 4), 20.4, 18),
    ],
)
def test_the_puzzles_come_out_in_decimals_without_what_binary_leaves_behind(
    simulate: Simulate, words: tuple[object, ...], end: float, peak: int
) -> None:
    said = simulate(*words, "--costs", "puzzle")
    assert said["time"] == end
    assert {rank["puzzle_peak"] for rank in said["ranks"]} == {peak * 131072}
    assert max(rank["puzzle_time"] for rank in said["ranks"]) == round(end - 0.5, 9)  # the optimizer's last step


def test_layers_of_one_rank_in_a_row_are_one_stage_whose_micro_batches_are_in_flight(simulate: Simulate) -> None:
    """Two layers to a rank: as many micro-batches in flight as if a stage were one op."""
    said = simulate("1f1b", "--layers", 8, "--ranks", 4, "--micro-batches", 8, "--costs", "puzzle")
    assert [rank["in_flight_peak"] for rank in said["ranks"]] == [4, 3, 2, 1]


@pytest.mark.parametrize("costs", ["unit", "puzzle"])
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.streaming])
def test_every_family_simulates_by_its_name_alone(simulate: Simulate, family: str, costs: str) -> None:
    said = simulate(family, "--costs", costs)
    assert said["time"] >= said["lower_bound"] > 0
    for rank in said["ranks"]:
        assert 0 < rank["busy"] <= rank["end"] <= said["time"]
        assert rank["puzzle_time"] <= rank["end"]
        assert rank["puzzle_peak"] <= rank["peak"]["device"]
        assert costs == "puzzle" or rank["in_flight_peak"] == rank["peak"]["device"]


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.streaming])
def test_every_offload_schedule_simulates_on_a_shipped_machine(simulate: Simulate, family: str) -> None:
    said = simulate(family, "--layers", 3, "--ranks", 1, "--micro-batches", 2, "--chunks", 4)
    assert "A100" in said["costs"]
    assert said["time"] >= said["lower_bound"] > 0
    assert said["ranks"][0]["in_flight_peak"] == (2 if FAMILIES[family].streaming.order == "vertical" else 1)
    assert said["bytes"]["h2d"] > 0


@pytest.mark.parametrize("family", ["1f1b", "fsdp", "zero1", "pipeline-fsdp", "zero-bubble"])
def test_a_distributed_schedule_takes_its_costs_from_a_profile_with_a_network(
    simulate: Simulate, tmp_path: Path, family: str
) -> None:
    said = simulate(family, "--costs", cluster_profile(tmp_path), "--model", "llama-8b", "--layers", 8)
    assert said["costs"] == "cluster"
    assert said["time"] >= said["lower_bound"] > 0
    assert sum(said["bytes"].values()) > 0


def test_a_faster_machine_is_faster_and_a_longer_sequence_slower(simulate: Simulate) -> None:
    words = ("zero-offload", "--layers", 2, "--micro-batches", 2, "--chunks", 2)
    slow, fast = (simulate(*words, "--costs", machine)["time"] for machine in ("a100-40g", "gh200"))
    assert fast < slow
    assert simulate(*words, "--sequence-length", 1024)["time"] < slow
    assert simulate(*words, "--micro-batch-size", 4)["time"] > slow
    vertical = ("vertical", "--layers", 2, "--micro-batches", 2, "--chunks", 2)
    assert simulate(*vertical, "--precision", "fp32")["time"] > simulate(*vertical)["time"]


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (("zero-bubble",), ("--virtual-stages", 2)),
        (("pipeline-fsdp",), ("--gather-group", "stage")),
        (("single",), ("--fused",)),
        (("ddp",), ("--partition-activations", 2)),
        (("zero2",), ("--buffer-size", 65536)),
        (("fsdp",), ("--lookahead", 2)),
        (("vertical", "--layers", 2), ("--delay", 0.5)),
        (("vertical", "--layers", 2), ("--wait",)),
        (("vertical", "--layers", 2), ("--activations", "disk")),
        (("vertical", "--layers", 2), ("--state", "host")),
        (("superoffload", "--layers", 4), ("--device-blocks", 2)),
        (("vertical", "--layers", 2), ("--chunks", 3)),
    ],
)
def test_every_option_changes_the_schedule(
    capsys: pytest.CaptureFixture[str], words: tuple[object, ...], more: tuple[object, ...]
) -> None:
    said = []
    for each in (words, words + more):
        assert main(["simulate", *map(str, each), "--text"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] != said[1]


def test_the_table_names_the_costs_the_bound_the_stalls_and_what_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "zero-offload", "--micro-batches", "1", "--chunks", "2"]) == 0
    said = capsys.readouterr().out
    for part in (
        "zero-offload: 80 layers, 1 micro-batch",
        "costs of a100-40g",
        "gpt-65b (64.9B parameters)",
        "lower bound",
        "longest stalls of the compute lane",
        "does not fit: 131 GiB on the device, and a100-40g has 40 GiB",
    ):
        assert part in said
    assert "\x1b[" not in said  # no terminal, no colours


def test_of_many_ranks_the_table_has_the_first_and_those_that_stand_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "1f1b", "--ranks", "40", "--micro-batches", "2"]) == 0
    said = capsys.readouterr().out
    assert "of 40 ranks; --json has all" in said
    assert "0 (most memory, latest end)" in said
    assert "39 " in said


def test_a_rank_that_does_one_thing_at_a_time_stalls_in_whatever_it_does(
    simulate: Simulate, capsys: pytest.CaptureFixture[str]
) -> None:
    said = simulate("1f1b", "--costs", "puzzle")
    assert said["stalls"][0]["op"].startswith("R")
    assert main(["simulate", "1f1b", "--costs", "puzzle"]) == 0
    assert "longest stalls of the ranks" in capsys.readouterr().out


# ---- files


@pytest.mark.parametrize("name", ["1f1b", "fsdp", "pipeline-fsdp", "vertical"])
def test_a_schedule_written_as_text_simulates_to_the_same_numbers(
    simulate: Simulate, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    more = ("--layers", "2", "--chunks", "2") if name == "vertical" else ()
    assert main(["simulate", name, *more, "--text"]) == 0
    path = tmp_path / "schedule.txt"
    path.write_text(capsys.readouterr().out)
    said = simulate(path, *(more[:2]))
    wanted = simulate(name, *more)
    if name == "pipeline-fsdp":  # what it sends says unit to a file, and collectives say puzzle to the name
        said = simulate(path, "--costs", "puzzle")
    assert said == wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_of_every_family_simulates_to_the_same_numbers(
    simulate: Simulate, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    of_streams = ("--layers", "2", "--micro-batches", "4", "--chunks", "2") if FAMILIES[name].streaming else ()
    words = (name, *of_streams, "--costs", "unit")
    assert main(["simulate", *words, "--text"]) == 0
    path = tmp_path / "schedule.txt"
    path.write_text(capsys.readouterr().out)
    assert simulate(path, "--costs", "unit") == simulate(*words)


def test_a_schedule_that_has_all_on_the_device_is_read_as_one_that_offloads(
    simulate: Simulate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It uses no lane but compute; its stages are a model's all the same, and not the layers of a puzzle."""
    tiers = ("--weights", "device", "--state", "device", "--activations", "device")
    model = ("--model", "llama-8b", "--layers", "2")
    assert main(["simulate", "horizontal", *model, *tiers, "--text"]) == 0
    path = tmp_path / "schedule.txt"
    path.write_text(capsys.readouterr().out)
    assert simulate(path, *model) == simulate("horizontal", *model, *tiers)


@pytest.mark.parametrize("name", ["vertical", "fsdp"])
def test_the_text_of_a_schedule_needs_no_network_that_its_simulation_needs(
    fails: Fails, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = (name, "--costs", "a100-40g", "--layers", "2", "--ranks", "2")
    assert main(["simulate", *words, "--text"]) == 0
    assert "\nrank 0" in capsys.readouterr().out
    assert "network between" in fails(*words)


def test_a_trace_has_a_process_for_each_rank_a_row_for_each_lane_and_every_op(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert main(["simulate", "1f1b", "--ranks", "2", "--micro-batches", "2", "--trace", str(path)]) == 0
    events = json.loads(path.read_text())
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    ops = {(e["pid"], e["name"]): e for e in events if e["ph"] == "X"}
    assert ops[0, "F0m0"]["ts"] == 0
    assert ops[0, "F0m0"]["dur"] == 1e6
    assert ops[1, "F1m0"]["ts"] == 1e6
    assert ops[1, "F1m0"]["args"]["waited"] == 1
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {rows[e["pid"], e["tid"]] for e in ops.values()} == {"compute", "send", "recv"}
    held = [e["args"]["in use"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert max(held) == 2
    assert held[-1] == 0


def test_ops_of_a_trace_never_overlap_in_one_row(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert main(["simulate", "vertical", "--layers", "2", "--micro-batches", "2", "--trace", str(path)]) == 0
    until: dict[tuple[int, int], float] = {}
    for e in json.loads(path.read_text()):
        if e["ph"] == "X":
            assert e["ts"] >= until.get((e["pid"], e["tid"]), 0) - 1e-2
            until[e["pid"], e["tid"]] = e["ts"] + e["dur"]


def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert main(["simulate", "gpipe", "--html", str(path)]) == 0
    assert path.read_text().lower().startswith("<!doctype html>")
    assert "costs unit: forward 1, backward 2" in path.read_text(), "what it was simulated with"
    assert f"written      {path}" in capsys.readouterr().out


# ---- what cannot be

GOOD = """\
schedule mine micro-batches 1 chunk 4096
pool in device 1 x 16
# a comment
RA0m0 take A=in write A peer 1

F1m0 after RA0m0 read A give A
"""


def world_of(text: str) -> str:
    """Two ranks, the first of which sends what ``text`` receives."""
    return (
        "world two ranks 2\nrank 0\n"
        + text
        + "rank 1\nschedule other micro-batches 1 chunk 0\nF0m0\nSA0m0 after F0m0 peer 0\n"
    )


BROKEN_FILE: dict[str, tuple[str, str, list[str]]] = {
    "cycle": (
        "RA0m0 take",
        "RA0m0 after F1m0 take",
        ["line 8: deadlock: rank 0: compute F1m0 waits for op RA0m0; rank 0: recv RA0m0 waits for op F1m0"],
    ),
    "no such producer": ("after RA0m0", "after RA9m0", ["line 8: rank 0: op F1m0 waits for RA9m0, which does not ex"]),
    "not taken": ("RA0m0 take A=in write A", "RA0m0", ["line 8: rank 0: op F1m0 gives back A, which is not taken"]),
    "wrong pool": ("A=in", "A=attic", ["line 6: rank 0: op RA0m0 takes A from pool attic, which does not exist"]),
    "unknown op": ("F1m0 after", "Z1m0 after", ["line 8: 'Z1m0' is not an op"]),
    "bad header": ("schedule mine micro-batches 1 chunk 4096", "plan mine", ["line 3: the first line must be 'schedu"]),
    "unknown field": ("read A", "reads A", ["line 8: op 'F1m0': unknown field 'reads'"]),
    "no such peer": ("peer 1", "peer 5", ["line 6: rank 0: op RA0m0 receives from rank 5, which does not exist"]),
    "nobody sends": ("RA0m0 take", "RA3m0 peer 1\nRA0m0 take", ["line 6: rank 0: op RA3m0 receives from rank 1"]),
    "twice": ("F1m0 after RA0m0 read A give A", "F1m0\nF1m0", ["line 9: rank 0: op F1m0 appears twice"]),
    "never given back": (" give A", "", ["line 6: rank 0: buffer A is never given back to pool in"]),
    "never written": ("take A=in write A", "take A=in", ["line 8: rank 0: use before load: op F1m0 reads A"]),
}


@pytest.mark.parametrize("name", BROKEN_FILE)
def test_a_schedule_that_cannot_be_is_named_by_file_line_and_op(fails: Fails, tmp_path: Path, name: str) -> None:
    old, new, says = BROKEN_FILE[name]
    assert old in GOOD
    path = tmp_path / "mine.txt"
    path.write_text(world_of(GOOD.replace(old, new)))
    said = fails(path)
    for part in says:
        assert part in said
    assert str(path) in said


def test_the_example_is_good(simulate: Simulate, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(world_of(GOOD))
    assert simulate(path)["time"] == 2


def test_a_line_is_that_of_the_rank_that_breaks_the_rule() -> None:
    text = world_of(GOOD)
    assert line_of(text, 1, "SA0m0") == 12
    assert line_of(text, 0, "SA0m0") is None
    assert line_of(GOOD, -1, "F1m0") == 6


def test_several_violations_are_all_named(fails: Fails, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(world_of(GOOD.replace("peer 1", "peer 0")))
    said = fails(path)
    assert "line 6: rank 0: op RA0m0 receives from rank 0" in said
    assert "line 12: rank 1: op SA0m0 sends to rank 0, which has no op RA0m0 from rank 1" in said


WRONG_WORDS: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "takes one schedule, by its name or a file's, and was given none"),
    "two": (["gpipe", "1f1b"], "was given gpipe and 1f1b"),
    "a name that is nearly right": (["gpip"], "Did you mean gpipe?"),
    "a name that is nothing": (["zzz"], "there is no schedule 'zzz', and no such file. Known: single"),
    "no such file": (["no/such/file"], "cannot read the schedule in no/such/file: No such file"),
    "a folder": (["."], "cannot read the schedule in .: Is a directory"),
    "zero": (["1f1b", "--ranks", "0"], "--ranks=0: must be a whole number from 1"),
    "negative": (["1f1b", "--layers=-1"], "--layers=-1: must be a whole number from 1"),
    "negative, apart": (["1f1b", "--layers", "-1"], "--layers=-1: must be a whole number from 1"),
    "a word": (["1f1b", "--micro-batches", "many"], "--micro-batches must be a whole number"),
    "half": (["1f1b", "--layers", "1.5"], "--layers must be a whole number, not 1.5"),
    "very many": (["1f1b", "--ranks", "999999999999"], "from 1 to 1,000,000"),
    "more than fits": (["1f1b", "--ranks", "1000000"], "fit in memory: ask for fewer"),
    "more pieces than fit": (["zero2", "--buffer-size", "1"], "fit in memory: ask for fewer"),
    "more offload than fits": (["horizontal", "--micro-batches", "100000"], "fit in memory: ask for fewer"),
    "more layers than fit": (["vertical", "--layers", "1000000"], "fit in memory: ask for fewer"),
    "no value": (["1f1b", "--ranks"], "--ranks needs a value"),
    "an option for a value": (["1f1b", "--ranks", "--json"], "--ranks needs a value"),
    "a value for a switch": (["1f1b", "--json=yes"], "--json takes no value"),
    "twice": (["1f1b", "--ranks", "2", "--ranks", "4"], "--ranks is given twice"),
    "unknown option": (["1f1b", "--rank", "2"], "there is no option --rank; did you mean --ranks?"),
    "another tool's option": (
        ["vertical", "--offload-param", "disk"],
        "--offload-param; in a settings file it is budget.weights",
    ),
    "option of another family": (["1f1b", "--virtual-stages", "2"], "--virtual-stages does nothing for 1f1b"),
    "option of offload": (["fsdp", "--delay", "0.5"], "--delay does nothing for fsdp"),
    "option of pipelines": (["vertical", "--virtual-stages", "2"], "--virtual-stages does nothing for vertical"),
    "option of another preset": (["zero-offload", "--delay", "0.5"], "--delay does nothing for zero-offload"),
    "a share beyond 1": (["vertical", "--delay", "1.5"], "--delay=1.5: must be from 0 to 1"),
    "no share": (["vertical", "--delay", "nan"], "--delay must be a number, not 'nan'"),
    "no tier": (
        ["vertical", "--state", "tape"],
        "--state must be one of device, host, disk",
    ),
    "waiting on the device": (
        ["vertical", "--gradients", "device"],
        "gradients must be one of host, disk, not 'device'",
    ),
    "state without weights": (["vertical", "--state", "device"], "state on the device needs weights on the device"),
    "ranks of offload": (["zero-offload", "--ranks", "4"], "zero-offload is a schedule of one rank"),
    "ranks of one": (["single", "--ranks", "2"], "single is for one rank"),
    "no such group": (["pipeline-fsdp", "--gather-group", "row"], "must be one of stage, world"),
    "uneven": (["ddp", "--micro-batches", "3"], "3 micro-batches cannot be shared evenly by 4 ranks"),
    "no size": (["zero2", "--buffer-size", "big"], "'big' is not a size"),
    "no such machine": (["vertical", "--costs", "cray"], "there is no machine 'cray'. Known: a100-40g"),
    "no such profile": (["vertical", "--costs", "no.json"], "no.json: cannot read this machine profile"),
    "no such model": (["vertical", "--model", "gpt-66b"], "did you mean gpt-65b?"),
    "puzzle for offload": (["vertical", "--costs", "puzzle"], "neither host memory nor disk"),
    "a model for a puzzle": (["fsdp", "--model", "llama-8b"], "--model does nothing for --costs puzzle"),
    "no such precision": (
        ["vertical", "--precision", "int8"],
        "precision must be one of fp32, bf16, fp16",
    ),
    "a precision for a puzzle": (["fsdp", "--precision", "bf16"], "--precision does nothing for --costs puzzle"),
    "too long": (["vertical", "--sequence-length", "4096"], "2048"),
    "no network": (["1f1b", "--costs", "a100-40g"], "has no network between ranks"),
    "text and numbers": (["1f1b", "--text", "--json"], "--text prints the schedule and simulates nothing"),
    "no such folder": (["1f1b", "--html", "no/such/page.html"], "cannot write no/such/page.html: there is no folder"),
    "a folder for a file": (["1f1b", "--trace", "."], "cannot write .: it is a folder"),
}


@pytest.mark.parametrize("name", WRONG_WORDS)
def test_what_cannot_be_is_said_and_nothing_is_done(fails: Fails, name: str) -> None:
    words, says = WRONG_WORDS[name]
    assert says in fails(*words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--layers", "3"], "--layers does nothing for a schedule from a file"),
        (["--ranks", "3"], "--ranks does nothing for a schedule from a file"),
        (["--fused"], "--fused does nothing for a schedule from a file"),
        (["--chunks", "3"], "--chunks does nothing for a schedule from a file"),
    ],
)
def test_a_file_says_itself_what_an_option_would(fails: Fails, tmp_path: Path, words: list[str], says: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(world_of(GOOD))
    assert says in fails(path, *words)


def test_a_file_for_another_model_is_refused(fails: Fails, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simulate", "vertical", "--layers", "2", "--chunks", "2", "--text"]) == 0
    path = tmp_path / "mine.txt"
    path.write_text(capsys.readouterr().out)
    assert "is not of gpt-65b with 80 layers" in fails(path)
    assert "the puzzles have no lane" in fails(path, "--costs", "puzzle")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (("device", "h2d"), 0, "device.h2d=0 must be more than 0"),
        (("host", "copy"), None, "host lacks 'copy'"),
        (("drives",), [], "uses the disk, and the machine"),
    ],
)
def test_a_profile_with_zero_or_missing_rates_is_named(
    fails: Fails, tmp_path: Path, key: tuple[str, ...], value: object, says: str
) -> None:
    data = json.loads(shipped_machine("a100-40g").to_json())
    at = data
    for part in key[:-1]:
        at = at[part]
    at[key[-1]] = value
    if value is None:
        del at[key[-1]]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data))
    assert says in fails("vertical", "--layers", 2, "--costs", path)


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["simulate", "1f1b", option, "/dev/full"]) == 2
    assert "cannot write /dev/full: No space left on device" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """``penstock simulate ... | head``"""
    words = [
        sys.executable,
        "-m",
        "penstock.cli",
        "simulate",
        "1f1b",
        "--ranks",
        "64",
        "--micro-batches",
        "64",
        "--text",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_file_that_is_not_text_is_refused(fails: Fails, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8 text" in fails(path)


def test_collectives_between_hosts_are_not_those_of_one_machine(fails: Fails, tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text(
        "world mine ranks 2\ngroup all 0-1\nrank 0-1\nschedule mine micro-batches 1 chunk 4096\n"
        "pool w device 1 x 100\nHW0 group all take w0=w write w0 bytes 100 give w0\nF0m0\nUW0.0@F0m0 bytes 100\n"
    )
    assert "has collectives between hosts" in fails(path, "--layers", 2, "--costs", "h100-80g")
    assert main(["simulate", str(path), "--costs", "unit"]) == 0


def test_a_page_does_not_take_the_place_of_its_schedule(
    fails: Fails, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.txt"
    assert main(["simulate", "1f1b", "--ranks", "2", "--text"]) == 0
    path.write_text(text := capsys.readouterr().out)
    for option in ("--html", "--trace"):
        assert "would take the place of the schedule" in fails(path, option, tmp_path / "." / "mine.txt")
    assert path.read_text() == text


def test_values_follow_their_option_or_an_equals_sign() -> None:
    assert read_words(Arguments, ["1f1b", "--ranks=4"]) == read_words(Arguments, ["--ranks", "4", "1f1b"])
    assert read_words(Arguments, ["zero2", "--buffer-size", "1KiB"]).buffer_bytes == 1024


def test_help_names_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in FAMILIES)
    assert all(len(line) <= 120 for line in said.splitlines())


def test_it_runs_in_a_process_of_its_own_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from penstock.cli import main; "
        f"code = main(['simulate', 'vertical', '--layers', '2', '--html', {str(tmp_path / 'page.html')!r}]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=PATIENCE)


def test_a_pipeline_of_a_thousand_ranks_is_a_matter_of_seconds(simulate: Simulate) -> None:
    """An eighth of the micro-batches that the command is meant for; polling would take minutes here."""
    said = simulate("1f1b", "--layers", 96, "--ranks", 1024, "--micro-batches", 8)
    assert said["time"] == 3 * (8 + 1023)
    assert len(said["ranks"]) == 1024
