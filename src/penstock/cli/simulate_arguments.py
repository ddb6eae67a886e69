"""The command line arguments of ``penstock simulate``."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock.cli.words import Words
from penstock.config import Precision, parse_size
from penstock.config.sizes import check_size
from penstock.errors import ConfigError
from penstock.schedule.lower.request import LayerOptions, StreamOptions

_LEAST = {"lookahead": 0, "device_blocks": 0, "stage": 0, "partition_activations": 2}
_LARGEST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Arguments(StreamOptions, LayerOptions, Words):
    """penstock simulate: how long a schedule takes, and how much memory it holds when

      penstock simulate NAME [options]    a schedule that penstock knows (below)
      penstock simulate FILE [options]    a schedule in the text form, which is checked first; --text prints one

    How much of what

    | option | meaning |
    |---|---|
    | ``layers`` | layers of the model (with --costs unit, a pipeline's stage is one op, whatever it holds) |
    | ``ranks`` | ranks |
    | ``micro_batches`` | micro-batches of the step, over all ranks |

    What it costs

    | option | meaning |
    |---|---|
    | ``costs`` NAME|FILE | puzzle: as in the LLM training puzzles: a layer's forward or backward 1, optimizer 0.5,
    collectives 0.3, sends and receives 0.2; a rank does one thing at a time; memory in elements. unit: forward 1,
    backward 2 (1 + 1 where split), nothing else; memory in micro-batches in flight. Or a machine that penstock doctor
    has measured (PROFILE.json), or one that ships: {machines} |
    | ``model`` NAME | with a machine: the model, by name or as the folder of a Hugging Face configuration: {models} |
    | ``precision`` | with a machine |
    | ``micro_batch_size``, ``sequence_length`` | with a machine: sequences of a micro-batch, and tokens of each |

    Without --costs: unit for pipelines, puzzle for the others that do not offload, and for those that do a100-40g with
    gpt-65b, or with several ranks a100-80g, whose GPUs are linked.

    What comes out

    | option | meaning |
    |---|---|
    | ``json`` | numbers, for programs |
    | ``text`` | the schedule's text form, and nothing else |
    | ``html`` | a page with every rank's timeline and memory |
    | ``trace`` | a Chrome trace, for https://ui.perfetto.dev |

    What it is made of; asked of a schedule that has no such thing, an option is an error

    | option | meaning |
    |---|---|
    | ``buffer_size`` | ZeRO-R: gradients cross the network in pieces of this size, through one buffer |
    | ``lookahead`` | the network runs ahead of the compute: gathers come N visits before their turn, and pools between
    the two have N buffers more than the order needs |

    Schedules
    {families}
    """

    command: ClassVar[str] = "penstock simulate"
    takes: ClassVar[str] = "one schedule, by its name or a file's"
    operands: ClassVar[tuple[str, ...]] = ("name",)
    of_a_run: ClassVar[bool] = True

    name: str
    layers: int | None = None
    ranks: int | None = None
    micro_batches: int | None = None
    buffer_size: str | int | float | None = None
    lookahead: int | None = None
    costs: str | None = None
    model: str | None = None
    precision: Precision | None = None
    micro_batch_size: int | None = None
    sequence_length: int | None = None
    json: bool = False
    text: bool = False
    html: Path | None = None
    trace: Path | None = None

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            least = _LEAST.get(key, 1)
            if type(value) is int and not least <= value <= _LARGEST:
                raise ConfigError(f"{key}={value}: must be a whole number from {least} to {_LARGEST:,}")
        super().__post_init__()
        if self.buffer_size is not None:
            check_size("buffer_size", self.buffer_size)
            if not self.buffer_bytes:
                raise ConfigError(f"buffer_size={self.buffer_size}: must be more than 0")
        if self.text and (other := [key for key in ("json", "html", "trace") if getattr(self, key)]):
            raise ConfigError(f"--text prints the schedule and simulates nothing: leave out --{other[0]}, or --text")
        if self.html is not None and self.trace is not None and self.html.resolve() == self.trace.resolve():
            raise ConfigError(f"--html and --trace would both write {self.html}: give each a file of its own")
        for key, path in (("html", self.html), ("trace", self.trace)):
            if path is not None and path.is_file() and path.resolve() == Path(self.name).resolve():
                raise ConfigError(f"--{key} {path} would take the place of the schedule: give a file of its own")

    @property
    def buffer_bytes(self) -> int | None:
        return None if self.buffer_size is None else parse_size(self.buffer_size)

    def refuse(self, what: str, *names: str) -> None:
        """Raise ConfigError if one of these options was given: it would do nothing."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value is not False:  # 0 was asked for, too
                raise ConfigError(f"--{name.replace('_', '-')} does nothing for {what}: leave it out")
