"""The words after ``penstock simulate``."""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.config import TIERS, Tier, parse_size
from penstock.errors import ConfigError
from penstock.schedule.lower.request import GatherGroup

SIMULATE_HELP = """\
penstock simulate: how long a schedule takes, and how much memory it holds when

  penstock simulate NAME [options]    a schedule that penstock knows (below)
  penstock simulate FILE [options]    a schedule in the text form, which is checked first; --text prints one

How much of what
  --layers L            layers of the model (with --costs unit, a pipeline's stage is one op, whatever it holds)
  --ranks P             ranks
  --micro-batches M     micro-batches of the step, over all ranks

What it is made of; asked of a schedule that has no such thing, an option is an error
  --virtual-stages V    stages that a rank of a pipeline holds
  --gather-group G      who takes part in a gather of weights: the ranks of a stage (stage), or all (world,
                        which is what pipeline-fsdp does if not told)
  --fused               the optimizer steps a layer as soon as its backward is done
  --partition-activations N
                        ZeRO-R: N ranks of a model-parallel group keep one copy of each layer's input
  --buffer-size SIZE    ZeRO-R: gradients cross the network in pieces of this size, through one buffer
  --lookahead N         the network runs ahead of the compute: gathers come N visits before their turn, and pools
                        between the two have N buffers more than the order needs
  --delay A             share of the optimizer's work that is done during the next step's forward, 0 to 1
  --wait                the optimizer waits for the norm of all gradients
  --weights TIER, --state TIER, --checkpoints TIER, --gradients TIER
                        where they live: device, host or disk (gradients that wait: host or disk)
  --device-blocks N     blocks whose optimizer state lives on the device
  --chunks N            pieces that a block is moved and stepped in

What it costs
  --costs puzzle        as in the LLM training puzzles: a layer's forward or backward 1, optimizer 0.5, collectives 0.3,
                        sends and receives 0.2; a rank does one thing at a time; memory in elements
  --costs unit          forward 1, backward 2 (1 + 1 where split), nothing else; memory in micro-batches in flight
  --costs PROFILE.json  a machine that penstock doctor has measured, or one that ships, by its name:
                        {machines}
  --model NAME          with a machine: the model, by name or as the folder of a Hugging Face configuration:
                        {models}
  --precision P         with a machine: bf16, fp16 or fp32
  --micro-batch-size N, --sequence-length N
                        with a machine: sequences of a micro-batch, and tokens of each

Without --costs: unit for pipelines, puzzle for the others that do not offload, and for those that do a100-40g with
gpt-65b.

What comes out
  --json                numbers, for programs
  --text                the schedule's text form, and nothing else
  --html FILE           a page with every rank's timeline and memory
  --trace FILE          a Chrome trace, for https://ui.perfetto.dev

Schedules
{families}
"""

Precision = Literal["bf16", "fp16", "fp32"]
_Kind = Literal["count", "share", "size", "tier", "word", "file", "switch"]
_OPTIONS: dict[str, _Kind] = {
    "--layers": "count",
    "--ranks": "count",
    "--micro-batches": "count",
    "--virtual-stages": "count",
    "--gather-group": "word",
    "--fused": "switch",
    "--partition-activations": "count",
    "--buffer-size": "size",
    "--lookahead": "count",
    "--delay": "share",
    "--wait": "switch",
    "--weights": "tier",
    "--state": "tier",
    "--checkpoints": "tier",
    "--gradients": "tier",
    "--device-blocks": "count",
    "--chunks": "count",
    "--costs": "word",
    "--model": "word",
    "--precision": "word",
    "--micro-batch-size": "count",
    "--sequence-length": "count",
    "--json": "switch",
    "--text": "switch",
    "--html": "file",
    "--trace": "file",
}
_LEAST = {"--lookahead": 0, "--device-blocks": 0, "--partition-activations": 2}
_LARGEST = 1_000_000
_HINT = "Try: penstock simulate --help"


@dataclass(frozen=True, kw_only=True)
class SimulateArguments:
    """``penstock simulate``. What is None or False was not asked for."""

    name: str
    layers: int | None = None
    ranks: int | None = None
    micro_batches: int | None = None
    virtual_stages: int | None = None
    gather_group: GatherGroup | None = None
    fused: bool = False
    partition_activations: int | None = None
    buffer_size: int | None = None
    lookahead: int | None = None
    delay: float | None = None
    wait: bool = False
    weights: Tier | None = None
    state: Tier | None = None
    checkpoints: Tier | None = None
    gradients: Literal["host", "disk"] | None = None
    device_blocks: int | None = None
    chunks: int | None = None
    costs: str | None = None
    model: str | None = None
    precision: Precision | None = None
    micro_batch_size: int | None = None
    sequence_length: int | None = None
    json: bool = False
    text: bool = False
    html: Path | None = None
    trace: Path | None = None

    def refuse(self, what: str, *names: str) -> None:
        """Raise ConfigError if one of these options was given: it would do nothing."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value is not False:  # 0 was asked for, too
                raise ConfigError(f"--{name.replace('_', '-')} does nothing for {what}: leave it out")


def parse_simulate(words: Sequence[str]) -> SimulateArguments:
    """Take apart the words after ``penstock simulate``. An option's value is the next word, or follows ``=``.

    Raises:
        ConfigError: names the option that is unknown, given twice, without its value or with an impossible one.
    """
    names: list[str] = []
    given: dict[str, int | float | str | bool | Path] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            names.append(word)
            continue
        option, equals, value = word.partition("=")
        kind = _OPTIONS.get(option)
        if kind is None:
            near = difflib.get_close_matches(option, _OPTIONS, n=1)
            raise ConfigError(f"there is no option {option}." + (f" Did you mean {near[0]}?" if near else f" {_HINT}"))
        key = option.removeprefix("--").replace("-", "_")
        if key in given:
            raise ConfigError(f"{option} is given twice: keep one")
        if kind == "switch":
            if equals:
                raise ConfigError(f"{option} takes no value: write {option}")
            given[key] = True
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{option} needs a value: {option} VALUE")
            value = rest.pop(0)
        given[key] = _value(option, kind, value)
    if len(names) != 1 or not names[0]:
        found = " and ".join(filter(None, names)) or "none"
        raise ConfigError(
            f"penstock simulate takes one schedule, by its name or a file's, and was given {found}. {_HINT}"
        )
    if given.get("text") and (other := [name for name in ("json", "html", "trace") if name in given]):
        raise ConfigError(f"--text prints the schedule and simulates nothing: leave out --{other[0]}, or --text")
    html, trace = given.get("html"), given.get("trace")
    if isinstance(html, Path) and isinstance(trace, Path) and html.resolve() == trace.resolve():
        raise ConfigError(f"--html and --trace would both write {html}: give each a file of its own")
    return SimulateArguments(name=names[0], **given)  # type: ignore[arg-type]  # each by its kind, as its field's type


def _value(option: str, kind: _Kind, text: str) -> int | float | str | Path:
    match kind:
        case "count":
            return _count(option, text)
        case "share":
            try:
                share = float(text)
            except ValueError:
                share = math.nan
            if not 0 <= share <= 1:
                raise ConfigError(f"{option} {text}: write a share from 0 to 1, as 0.25")
            return share
        case "size":
            size = parse_size(text)
            if size < 1:
                raise ConfigError(f"{option} {text}: write more than 0")
            return size
        case "tier":
            tiers = [tier for tier in TIERS if option != "--gradients" or tier != "device"]
            if text not in tiers:
                raise ConfigError(f"{option} {text}: write {', '.join(tiers[:-1])} or {tiers[-1]}")
        case "file":
            return Path(text)
    if option == "--gather-group" and text not in ("stage", "world"):
        raise ConfigError(f"--gather-group {text}: write stage or world")
    if option == "--precision" and text not in ("bf16", "fp16", "fp32"):
        raise ConfigError(f"--precision {text}: write bf16, fp16 or fp32")
    return text


def _count(option: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ConfigError(f"{option} {text}: write a whole number") from None
    least = _LEAST.get(option, 1)
    if not least <= number <= _LARGEST:
        raise ConfigError(f"{option} {text}: write a whole number from {least} to {_LARGEST:,}")
    return number
