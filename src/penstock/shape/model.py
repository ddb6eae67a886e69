"""The facts that planning needs of a model: its program for one shape of micro-batch, and the work of each stage.

    shape    a model of which nothing is loaded: its name, and how to profile it
    profile  the program (groups, stages, bytes) and the work of every stage, for one micro-batch

Three sources give a shape: a name that ships with the package (``shipped``), a Hugging Face configuration
(``huggingface.model_shape``), and a callable that builds a module (``meta.MetaModel``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.errors import ConfigError
from penstock.hardware.machine import Machine
from penstock.schedule.place import Format
from penstock.schedule.program import Program
from penstock.schedule.work import BothWays, Work, model_flops, shares_again


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model and one of its micro-batches.

    ``work``: of each stage. ``tokens``: of one micro-batch, that are one rank's. ``parameters``: elements
    without padding, tied ones counted once.
    """

    program: Program
    work: tuple[BothWays, ...]
    tokens: int
    parameters: int

    def __post_init__(self) -> None:
        assert len(self.work) == len(self.program.stages)

    @property
    def flops(self) -> int:
        """FLOP of all products of one micro-batch."""
        return sum(forward.flops + backward.flops for forward, backward in self.work)

    @property
    def model_flops(self) -> int:
        """``flops`` without what is computed a second time: what model FLOPs utilisation (MFU) counts."""
        return model_flops(self.work)


class ModelShape(Protocol):
    """A model of which nothing is loaded."""

    @property
    def name(self) -> str: ...

    def profile(self, micro_batch_size: int, sequence_length: int, form: Format) -> ModelProfile:
        """The profile of micro-batches of ``micro_batch_size`` sequences of ``sequence_length`` tokens.

        Raises:
            ConfigError: the model does not take such micro-batches.
            ModelError: it cannot be run block by block, or not without values.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of compute per micro-batch; index = stage. The epilogue's ``forward`` holds its backward too.

    ``weights``: of the backward, those of its second part, where it is run in two (``Stage.split``); empty: of none.
    ``again``: the share of its forward that a call's backward computes again; empty: all of each.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...] = ()
    again: tuple[float, ...] = ()
    orthogonal: float | None = None
    """FLOP/s at which updates of matrices are made orthogonal; None: nobody has measured it"""

    def of(self, stage: int) -> tuple[float, ...]:
        """All that is known of one stage."""
        return tuple(column[stage] for column in (self.forward, self.backward, self.weights, self.again) if column)

    def kept(self, stage: int) -> float:
        """Seconds of the backward of a call whose graph was kept: without what it computes again of the forward, and at
        least half of the whole, for two products of three."""
        both = self.backward[stage]
        return max(both - self.forward[stage] + self._left_out(stage), both / 2)

    def in_two(self, stage: int) -> tuple[float, float]:
        """Seconds of both parts of a stage's backward. A third is for the weights where nobody has measured that: a
        backward is the forward again, but for what is left out, and two products for each of the forward's."""
        both = self.backward[stage]
        second = self.weights[stage] if self.weights else (both + self._left_out(stage)) / 3
        return both - second, second

    def _left_out(self, stage: int) -> float:
        """Seconds of a call's forward that its backward does without."""
        return self.forward[stage] * (1 - self.again[stage]) if self.again else 0.0


EFFICIENCY = {"cuda": 0.93, "cpu": 0.87}
"""The share of the rates of a large matrix product and of a large copy that a stage's ops reach, by kind of device.

Chosen so that what was measured is met (docs/log.md): of Llamas of 1.3B and 3.4B on an H100, with 16,384 and 8,192
tokens in a micro-batch and a copy of 1,424 GB/s, which is assumed, and of small ones on a processor. With so few tokens
that an op takes no longer than the host takes to queue it, stages take longer.
"""


def stage_times(profile: ModelProfile, machine: Machine, precision: str) -> StageTimes:
    """Seconds of each stage on a machine: FLOP over the rate of ``precision``, what other ops move over that of a copy,
    which reads and writes, both times ``EFFICIENCY``; and what its attention sends to those that share each sequence
    (``Machine.of_sequence``), for which it waits. The host takes its time for each op (``Machine.dispatch``): before a
    processor computes it, beside what a GPU computes, so that there the longer of both counts.

    Raises:
        ConfigError: the machine's profile has no rate for ``precision``, or for copies in the device's memory.
    """
    rate = machine.device.flops.get(precision)
    if rate is None:
        known = ", ".join(sorted(machine.device.flops))
        raise ConfigError(
            f"precision={precision!r}: the profile of {machine.name} has no rate for it, only for {known}. "
            "Choose one of these, or measure it: penstock doctor"
        )
    copy, reached = machine.device.copy, EFFICIENCY[machine.device.kind]
    if copy is None:
        raise ConfigError(
            f"the profile of {machine.name} does not tell how fast a copy in the device's memory is: measure the "
            "machine anew with penstock doctor, or add device.copy (bytes/s) to its profile"
        )
    products, memory = rate * reached, 2 * copy * reached

    def seconds(work: Work) -> float:
        computed = work.flops / products + work.traffic / memory
        queued = work.ops * machine.dispatch
        return computed + queued if machine.device.kind == "cpu" else max(computed, queued)

    times = StageTimes(
        forward=tuple(seconds(forward) for forward, _ in profile.work),
        backward=tuple(seconds(backward) for _, backward in profile.work),
        again=shares_again(profile.work),
    )
    return with_exchanges(times, profile.work, machine)


def with_exchanges(times: StageTimes, work: Sequence[BothWays], machine: Machine) -> StageTimes:
    """Times of a rank's stages, with those in which it waits for what the attention of ranks that share each sequence
    sends. ``work``: of each stage; ``machine``: as the rank sees it."""
    network = machine.of_sequence
    if network is None:
        assert not any(way.sent for both in work for way in both), "nobody shares the sequences"
        return times

    def longer(seconds: Sequence[float], ways: Iterable[Work]) -> tuple[float, ...]:
        waits = (way.sent / network.bandwidth + way.exchanges * network.latency for way in ways)
        return tuple(map(sum, zip(seconds, waits, strict=True)))

    return replace(
        times,
        forward=longer(times.forward, (forward for forward, _ in work)),
        backward=longer(times.backward, (backward for _, backward in work)),
    )
