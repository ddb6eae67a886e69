"""Settings to begin with, for a model, data and a machine: each with the reason that the file gives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.cli.first_look import BYTES_A_TOKEN, DataFacts, DiskFacts, MachineFacts, ModelFacts
from penstock.cli.located import RUN
from penstock.config import SourceConfig, StepConfig, format_size
from penstock.config.data import STREAM_FROM
from penstock.config.sizes import format_parameters
from penstock.schedule.place import Format

_LENGTH = 2048
_STEPS = 1000
"""Steps of a run over data whose length is not known."""

_SCRATCH = ((0.125e9, 6e-4), (0.35e9, 3e-4), (0.76e9, 2.5e-4), (1.3e9, 2e-4), (2.7e9, 1.6e-4), (6.7e9, 1.2e-4))
"""Parameters, and the learning rate that GPT-3's authors took for them (arXiv 2005.14165, table 2.1)."""
_SMALLEST = 1e-4


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A proposed settings file. ``settings``: as the file has them. ``reasons``: by dotted name. ``warnings``: what to
    look at first."""

    settings: Mapping[str, Any]
    reasons: Mapping[str, str]
    title: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def propose(
    *, model: ModelFacts, data: DataFacts, disk: DiskFacts, machine: MachineFacts, run: Path | None
) -> Proposal:
    """Settings that ``penstock train`` takes as they are, as far as can be told without reading all."""
    why: dict[str, str] = {}
    length = min(model.positions or _LENGTH, _LENGTH)
    why["data.sequence_length"] = (
        f"the model takes {model.positions:,}; longer sequences need more memory for each micro-batch"
        if model.positions
        else "the model's configuration sets no limit; longer sequences need more memory for each micro-batch"
    )
    sequences = _sequences(data.tokens, length, machine, why)
    streamed = data.nbytes is not None and data.nbytes >= STREAM_FROM and "tokens" not in data.kinds
    held_out = data.has_many and not streamed
    settings: dict[str, Any] = {
        "run": str(run) if run is not None else f"runs/{model.name}",
        "model": _model(model),
        "data": _data(model, data, length, held_out=held_out, why=why),
        "optimizer": {"name": "adamw", "lr": _rate(model, data, why), "betas": [0.9, 0.95], "weight_decay": 0.1},
        "batch": {"sequences": sequences},
        "budget": _budget(disk, machine, why),
    }
    if streamed:
        settings["steps"] = _STEPS
        why["steps"] = "an epoch of data that are streamed has no known length: set as many as you want"
    else:
        settings["epochs"] = 1 if data.kinds <= {"text", "tokens"} else 2
        why["epochs"] = length_in_words(data, settings["epochs"], sequences * length)
    settings["lr_schedule"] = {"kind": "cosine", "warmup_share": 0.03, "final": 0.1}
    if held_out:
        settings["evaluate"] = {"every": 50, "batches": 4}
    warnings = _room(model, disk, machine)
    return Proposal(
        settings=settings,
        reasons=why,
        title=(
            f"Settings of a run of penstock train, as penstock init proposes them for {machine.title}.",
            "Each comment says what a setting means and, behind ->, why it has its value.",
            "penstock train --help lists all others.",
        ),
        warnings=warnings,
    )


def _model(model: ModelFacts) -> Any:
    given = model.settings
    return {"path": given.path} if given.path else {"config": given.config, "init": True}


def _data(model: ModelFacts, data: DataFacts, length: int, *, held_out: bool, why: dict[str, str]) -> dict[str, Any]:
    sources = [_written(source) for source in data.sources]
    alone = len(sources) == 1 and isinstance(sources[0], str)
    found: dict[str, Any] = {"sources": sources[0] if alone else sources, "sequence_length": length}
    why["data.sources"] = "found: " + "; ".join(data.forms)
    if not model.tokenizer:
        vocabulary = _vocabulary(model, data)
        found["tokenizer"] = {"train": {"vocabulary": vocabulary}}
        why["data.tokenizer"] = "none is beside the model's configuration"
        why["data.tokenizer.train.vocabulary"] = "more merges than the text repeats are refused: a larger text has more"
    if held_out:
        found["validation"] = {"share": 0.01}
        why["data.validation.share"] = f"a hundredth of at least {data.documents:,} documents"
    return found


def _written(source: SourceConfig) -> Any:
    given = {f.name: value for f in fields(source) if (value := getattr(source, f.name)) is not None}
    return source.path if given.keys() == {"path"} else given


def _vocabulary(model: ModelFacts, data: DataFacts) -> int:
    """A power of two: as the configuration has it, and no more than one for 400 bytes of what it is trained on."""
    asked = model.config.get("vocab_size")
    most = min(data.nbytes or 4_000_000, 4_000_000) // 400
    return 1 << max(9, int(math.log2(max(512, min(asked if isinstance(asked, int) else 32768, most)))))


def _sequences(tokens: int | None, length: int, machine: MachineFacts, why: dict[str, str]) -> int:
    most = 64 if machine.kind == "cuda" else 8
    found = most
    reason = "weights and state move once a step: a large batch hides the drives. The plan cuts it into micro-batches"
    if tokens is not None and (enough := tokens // (length * 100)) < most:
        found = 1 << max(0, int(math.log2(max(enough, 1))))
        reason = f"the data have about {tokens:,} tokens, of which a larger batch would leave few steps"
    why["batch.sequences"] = reason
    return found


def _rate(model: ModelFacts, data: DataFacts, why: dict[str, str]) -> float:
    if model.settings.path:
        text = data.kinds == {"text"}
        why["optimizer.lr"] = (
            "a usual rate to go on with pre-training"
            if text
            else "a usual rate to fine-tune all parameters; with lora, 1e-4"
        ) + ". It is the first setting to try others of"
        return 2e-5 if text else 1e-5
    count = model.parameters or 0
    rate = next((rate for most, rate in _SCRATCH if count <= most), _SMALLEST)
    size = format_parameters(count) if count else "the smallest models"
    why["optimizer.lr"] = f"as GPT-3's authors took for {size} (arXiv 2005.14165, table 2.1). Try others first of all"
    return rate


def _budget(disk: DiskFacts, machine: MachineFacts, why: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"device": _size(machine.device), "host": _size(machine.host)}
    why["budget.device"] = f"from {machine.how}" + (
        ". The processor computes: this and budget.host are the same memory" if machine.kind == "cpu" else ""
    )
    why["budget.host"] = "the same, less what the system and other programs need"
    if disk.paths:
        paths = [_of_run(path) for path in disk.paths]
        found["disk"] = paths[0] if len(paths) == 1 else paths
        why["budget.disk"] = "{run} is the name of the run's folder, so that each run has a directory of its own"
        if disk.free is not None:
            why["budget.disk"] += f"; {format_size(disk.free)} are free"
    return found


def _of_run(path: Path) -> str:
    return str(path if RUN in str(path) else path / RUN)


def _size(nbytes: int) -> str:
    """Rounded down, so that what there is is enough."""
    return f"{nbytes >> 30}GiB" if nbytes >= 8 << 30 else f"{max(nbytes >> 20, 1)}MiB"


def length_in_words(data: DataFacts, epochs: int, per_step: int) -> str:
    """The number of steps of so many epochs, each of so many tokens ``per_step``, as far as it is known."""
    if data.tokens is None:
        return "the number of steps is known when the data have been read"
    guessed = "" if data.kinds == {"tokens"} else f", at {BYTES_A_TOKEN} bytes a token"
    return f"about {max(1, epochs * data.tokens // per_step):,} steps{guessed}; or give steps instead"


def _room(model: ModelFacts, disk: DiskFacts, machine: MachineFacts) -> tuple[str, ...]:
    """A line for a model whose weights and state do not fit the drives or budgets; nothing where they do."""
    if model.parameters is None:
        return ()
    form = Format.of(StepConfig().precision_on(machine.kind), 2)
    state = int(model.parameters * (form.weight_bytes + form.per_element))
    need = f"look     weights and state are {format_size(state)}"
    if disk.paths and disk.free is not None and 2 * state > disk.free:
        there = f"on disk twice (budget.slots), and {format_size(disk.free)} are free there"
        return (f"{need}, {there}: name a larger drive, or keep one copy (slots: 1)",)
    if not disk.paths and state > machine.device + machine.host:
        return (f"{need}, more than the budgets: give a directory (--disk DIR)",)
    return ()
