"""``penstock simulate`` where it is asked for what would do nothing, and where its input or its output gives way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from tests.machines import cluster_profile

COMMAND = (sys.executable, "-m", "penstock.cli")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("single --lookahead 2", "--lookahead 2 does nothing for single with --costs puzzle"),
        ("grad-accumulation --lookahead 2", "--lookahead 2 does nothing for grad-accumulation"),
        ("ddp --lookahead 2", "--lookahead 2 does nothing for ddp"),
        ("zero1 --lookahead 2 --costs unit", "--lookahead 2 does nothing for zero1 with --costs unit"),
        ("1f1b --lookahead 2", "--lookahead 2 does nothing for 1f1b with --costs unit"),
        (
            "zero2 --buffer-size 1KiB --costs unit",
            "--buffer-size does nothing for --costs unit, where gradients have no",
        ),
        ("fsdp --delay 0", "--delay does nothing for fsdp"),
        ("1f1b --device-blocks 0", "--device-blocks does nothing for 1f1b"),
        ("1f1b --html a --trace ./a", "--html and --trace would both write a"),
        ("vertical --ranks 2 --costs a100-40g", "no network between them: add a network (bandwidth, latency) to"),
        ("vertical --ranks 2 --micro-batches 3", "--micro-batches 3 cannot be shared evenly by 2 ranks"),
    ],
)
def test_an_option_that_would_do_nothing_or_cannot_be_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    assert main(["simulate", *words.split()]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", ["fsdp --lookahead 1 --costs unit", "1f1b --lookahead 1 --costs puzzle"])
def test_a_lookahead_that_does_something_is_taken(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert main(["simulate", *words.split(), "--json"]) == 0


def test_no_name_and_no_command_are_told_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", ""]) == 2
    assert "takes one schedule, by its name or a file's, and was given none" in capsys.readouterr().err
    assert main(["simulat"]) == 2
    assert capsys.readouterr().err == (
        "penstock: there is no command simulat; did you mean simulate? (penstock takes init, train, resume, verify, "
        "export, reshard, plan, simulate, runs, report, doctor)\n"
    )
    assert main(["xyzzy"]) == 2
    assert "init, train, resume" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["horizontal", "vertical", "zero-infinity", "greedysnake"])
def test_ranks_of_offload_share_weights_state_and_micro_batches(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    words = ["simulate", name, "--layers", "4", "--chunks", "2", "--costs", str(cluster_profile(tmp_path)), "--json"]
    assert main([*words, "--micro-batches", "2"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main([*words, "--micro-batches", "4", "--ranks", "2"]) == 0
    together = json.loads(capsys.readouterr().out)
    assert len(together["ranks"]) == 2
    assert together["bytes"]["net"] > 0
    assert together["bytes"]["read"] == pytest.approx(alone["bytes"]["read"], rel=0.01)


@pytest.mark.parametrize("words", ["vertical-pipeline", "streamed-1f1b", "vertical --ranks 2"])
def test_several_ranks_that_stream_are_simulated_where_nothing_is_said_of_their_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str
) -> None:
    options = [*words.split(), "--layers", "4", "--micro-batches", "4", "--chunks", "2"]
    assert main(["simulate", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["ranks"]) == (2 if "2" in words else 4)
    assert main(["simulate", *options, "--text"]) == 0
    path = tmp_path / "mine.txt"
    path.write_text(capsys.readouterr().out)
    assert main(["simulate", str(path), "--model", "gpt-65b", "--layers", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["time"] == found["time"]


def test_the_bound_of_a_rank_that_does_one_thing_at_a_time_is_all_that_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "gpipe", "--costs", "puzzle"]) == 0
    assert "all that rank 1 does; the step" in capsys.readouterr().out
    assert main(["simulate", "single"]) == 0
    assert "all that there is to do, one after another; the step" in capsys.readouterr().out


# ---- files on a machine


def test_layers_of_a_file_are_those_of_the_model_and_its_sizes_must_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What is printed with a machine's costs simulates to the same; what is printed with other costs is refused."""

    def printed(*words: str) -> Path:
        assert main(["simulate", *words, "--text"]) == 0
        path = tmp_path / "schedule.txt"
        path.write_text(capsys.readouterr().out)
        return path

    machine = ("--costs", str(cluster_profile(tmp_path)))
    words = ("1f1b", "--layers", "8", *machine)
    path = printed(*words)
    assert main(["simulate", str(path), *machine, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert main(["simulate", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == said
    assert main(["simulate", str(path), *machine, "--layers", "8"]) == 2
    assert "--layers does nothing for" in capsys.readouterr().err
    assert main(["simulate", str(path), *machine, "--sequence-length", "1024", "--model", "llama-8b"]) == 2
    assert "this model would have multiples of" in capsys.readouterr().err
    for costs, says in (
        ("unit", "pool saved has buffers of 1, and this model has no such pool"),
        ("puzzle", "pool act"),
    ):
        assert main(["simulate", str(printed("1f1b", "--costs", costs)), *machine]) == 2
        said_of_it = capsys.readouterr().err
        assert says in said_of_it
        assert "print it with --costs" in said_of_it


@pytest.mark.parametrize(
    ("text", "costs", "says"),
    [
        ("F0m0\nND0\n", "a100-40g", "op ND0: no layer of a model has an op ND"),
        ("F0m0\nND0\n", "puzzle", "op ND0: the puzzles know no op ND"),
        ("F1m0\n", "a100-40g", "no op computes layer 0"),
        ("OD0\n", "a100-40g", "no op computes layer 0"),
        ("pool p device 1 x 5\npool p device 1 x 5\nF0m0\n", "unit", "line 3: pool p appears twice"),
        ("carry a b q\nF0m0\n", "unit", "line 2: buffer a is carried in pool q, which does not exist"),
        ("pool q device 0 x 5\ncarry a b q\nF0m0\n", "unit", "line 2: more buffers of pool q are carried"),
        ("", "unit", "line 1: schedule mine has no ops"),
        ("F0m0 bytes " + "9" * 400 + "\n", "unit", "line 2: op 'F0m0': bytes '99999"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line_or_op(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, costs: str, says: str
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("schedule mine micro-batches 1 chunk 0\n" + text)
    assert main(["simulate", str(path), "--costs", costs]) == 2
    assert says in capsys.readouterr().err


def test_faults_of_a_world_have_lines_and_a_byte_order_mark_is_no_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "world.txt"
    text = "world w ranks {}\ngroup far 0,{}\nrank 0\nschedule s micro-batches 1 chunk 0\nF0m0\n"
    for count, member, says in ((1, 9, "line 2: group far has rank 9"), (3, 0, "line 1: ")):
        path.write_text(text.replace("0,{}", "{}").format(count, member))
        assert main(["simulate", str(path)]) == 2
        assert f"{path}: {says}" in capsys.readouterr().err
    path.write_text("\ufeffschedule s micro-batches 1 chunk 0\nF0m0\n", encoding="utf-8")
    assert main(["simulate", str(path)]) == 0


# ---- an output that gives way


@pytest.mark.parametrize("words", ["simulate 1f1b --ranks 64 --micro-batches 4 --json", "simulate --help"])
def test_a_full_output_is_an_error_in_one_line(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, *words.split()], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "penstock: cannot write the output: No space left on device\n"


@pytest.mark.parametrize(
    "words", ["simulate 1f1b --ranks 64 --micro-batches 4 --json", "simulate 1f1b --ranks 24", "--help"]
)
def test_whoever_has_read_enough_hears_nothing(words: str) -> None:
    """``penstock ... | head -1``, with a reader that is gone before anything is written."""
    with subprocess.Popen([*COMMAND, *words.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() in (1, 141)


@pytest.mark.parametrize("family", [["zero-bubble", "--virtual-stages", "2"], ["dualpipe-v"]])
def test_a_rank_where_a_pipeline_folds_holds_two_stages(family: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--layers", "16", "--ranks", "4", "--micro-batches", "8", "--json"]
    found = {}
    for costs in ("unit", "puzzle"):
        assert main(["simulate", *family, *shape, "--costs", costs]) == 0
        found[costs] = [rank["in_flight_peak"] for rank in json.loads(capsys.readouterr().out)["ranks"]]
    assert found["puzzle"] == found["unit"]
