"""What ``penstock train`` says when something goes wrong on the way: a slow drive, no memory."""

import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.cli import main, settings, train
from penstock.cli.model import RunModel, run_model
from penstock.cli.out_of_memory import explain
from penstock.cli.showing import pace
from penstock.hardware.profiles import save_profile
from penstock.runtime.streams import HostStreams, Mark
from tests.engine.test_prediction import machine
from tests.machines import measured_here

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.usefixtures("one_simulation")
def test_a_drive_that_becomes_slow_is_said_each_time_it_does(
    config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow from step 4 to 5 and from 7 to 8: said at 4 and at 7, with the lane that it was. The slow writes put the
    clock forward, by so much that a busy machine's other steps are not slow, too; and not within other lanes' ops."""
    monkeypatch.setattr(pace, "LOST", 8.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_profile(measured_here(machine(tmp_path)))
    metrics = tmp_path / "run" / "metrics.jsonl"
    real, clock, lost = os.pwritev, time.perf_counter, 0.0

    def slow(*args: Any) -> int:
        nonlocal lost
        if metrics.exists() and metrics.read_text().count("\n") in (3, 4, 6, 7):
            lost += 1.0
        return real(*args)

    begin, end, began = HostStreams.begin, HostStreams.end, dict[int, float]()

    def begun(streams: HostStreams, mark: Mark, waits: Iterable[Mark]) -> None:
        begin(streams, mark, waits)
        began[id(mark)] = lost

    def ended(streams: HostStreams, mark: Mark) -> None:
        end(streams, mark)
        if mark.lane != "write":
            mark.end -= lost - began[id(mark)]

    monkeypatch.setattr(HostStreams, "begin", begun)
    monkeypatch.setattr(HostStreams, "end", ended)
    monkeypatch.setattr(os, "pwritev", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + lost)
    words = ["--plan", "auto", "--replan", "false", "--steps", "8", "--evaluate", "null"]
    assert main(["train", str(config), *words]) == 0
    said = [message for message in caplog.messages if "predicted" in message]
    assert [message.split(" took ")[0] for message in said] == ["step 4", "step 7"]
    for message in said:
        rates = re.search(r"the write lane moved (\S+) GB/s where the plan assumed (\S+)\. ", message)
        assert rates is not None, message
        assert float(rates[1]) < 0.01 < 0.1 < float(rates[2])


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize("state", ["disk", "host"])
def test_out_of_memory_says_what_to_lower_what_is_safe_and_how_to_go_on(
    state: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own allocator refuses in the middle of step 3, when a layer asks for more than there is."""
    calls = 0

    def hungry(module: nn.Module, arguments: object) -> None:
        nonlocal calls
        calls += 1
        if json_lines(tmp_path / "run") == 2:
            torch.empty(1 << 50)

    def build(*arguments: Any) -> RunModel:
        model = run_model(*arguments)
        layer = model.model.get_submodule("model.layers.1")
        layer.register_forward_pre_hook(hungry)
        return model

    with monkeypatch.context() as patch:
        patch.setattr(train, "run_model", build)
        assert main(["train", str(config), "--budget.state", state, "--evaluate", "null"]) == 1
    assert calls > 0
    err = capsys.readouterr().err
    assert "Traceback" not in err
    message = err.splitlines()[-1]
    assert message.startswith("penstock: out of memory on the host: ")
    assert "Lower budget.device (now 8MiB) or budget.host (now 12MiB)" in message
    assert "The last commit, step 2, is intact" in message
    again = f"penstock resume {tmp_path / 'run'} --budget.device SIZE --budget.host SIZE"
    assert message.endswith(again)
    assert main([*again.replace("SIZE", "12MiB").split()[1:]]) == 0
    assert json_lines(tmp_path / "run") == 4


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "device"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "device"),
        ("HIP out of memory. Tried to allocate 2.00 GiB", "device"),
        ("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory", "host"),
    ],
)
def test_out_of_memory_says_of_whose(said: str, where: str, config: Path) -> None:
    message = explain(RuntimeError(said), settings.load(config), ranks=1, begun=False)
    assert message.startswith(f"out of memory on the {where}: ")
    assert ("Lower budget.device (now 8MiB), or micro_batch_size" in message) is (where == "device")


def json_lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len([json.loads(line) for line in path.read_text().splitlines()]) if path.exists() else 0


def test_a_compiler_that_there_is_none_of_is_refused_before_the_data_are_read(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), "--compile", "yes"]) == 2
    said = capsys.readouterr()
    assert "penstock: compile='yes' is no backend of torch.compile's: give True, or one of" in said.err
    assert "Reading the data" not in said.out
    assert not (tmp_path / "run").exists()
