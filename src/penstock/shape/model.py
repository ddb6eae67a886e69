"""The facts that planning needs of a model: its program for one shape of micro-batch, and the arithmetic of each stage.

    shape    a model of which nothing is loaded: its name, and how to profile it
    profile  the program (groups, stages, bytes) and the FLOP of every stage, for one micro-batch

Three sources give a shape: a name that ships with the package (``shipped.named``), a Hugging Face configuration
(``huggingface.model_shape``), and a callable that builds a module (``meta.from_callable``).
"""

from dataclasses import dataclass
from typing import Protocol

from penstock.errors import ConfigError
from penstock.hardware.machine import Machine
from penstock.schedule.place import Format
from penstock.schedule.program import Program


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model and one of its micro-batches. FLOP count a multiplication and an addition as two.

    ``forward_flops[stage]``: the stage's forward; of the epilogue, whose backward runs at once, forward and backward.
    ``backward_flops[stage]``: the stage's backward, the recomputation of a call's forward included; 0 for the epilogue.
    ``sent[stage]``: bytes that the attention of ranks which share each sequence sends in the stage's forward and in its
    backward; empty: they share none. ``tokens``: of one micro-batch, that are one rank's. ``parameters``: elements
    without padding, tied ones counted once.
    """

    program: Program
    forward_flops: tuple[float, ...]
    backward_flops: tuple[float, ...]
    sent: tuple[tuple[int, int], ...] = ()
    tokens: int
    parameters: int

    def __post_init__(self) -> None:
        assert len(self.forward_flops) == len(self.backward_flops) == len(self.program.stages)

    @property
    def flops(self) -> float:
        """All that one micro-batch computes."""
        return sum(self.forward_flops) + sum(self.backward_flops)

    @property
    def model_flops(self) -> float:
        """``flops`` without what is computed a second time: what model FLOPs utilisation (MFU) counts."""
        stages = zip(self.program.stages, self.forward_flops, self.backward_flops, strict=True)
        return self.flops - sum(forward for stage, forward, backward in stages if stage.kind == "call" and backward)


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
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...] = ()
    orthogonal: float | None = None
    """FLOP/s at which updates of matrices are made orthogonal; None: nobody has measured it"""

    def kept(self, stage: int) -> float:
        """Seconds of the backward of a call whose graph was kept: without the forward, and at least half of the whole,
        for two products of three."""
        both = self.backward[stage]
        return max(both - self.forward[stage], both / 2)

    def in_two(self, stage: int) -> tuple[float, float]:
        """Seconds of both parts of a stage's backward. A third is for the weights where nobody has measured that: a
        backward is the forward again, and two products for each of the forward's."""
        both = self.backward[stage]
        second = self.weights[stage] if self.weights else both / 3
        return both - second, second


EFFICIENCY = {"cuda": 0.7, "cpu": 0.7}
"""The share of the rate of a large matrix product that a stage reaches, by kind of device.

An estimate: the rest of the time goes to what is not a matrix product (norms, activations, softmax, casts: bound by
memory), to smaller products, and to attention.
"""


def stage_times(profile: ModelProfile, machine: Machine, precision: str, efficiency: float | None = None) -> StageTimes:
    """Seconds of each stage on a machine: FLOP over the rate of ``precision`` times ``efficiency``, and what its
    attention sends at the rate of the network, as which it waits for the others.

    ``efficiency``: None is ``EFFICIENCY`` of the machine's kind of device.

    Raises:
        ConfigError: the machine's profile has no rate for ``precision``, or for what ranks send each other.
    """
    rate = machine.device.flops.get(precision)
    if rate is None:
        known = ", ".join(sorted(machine.device.flops))
        raise ConfigError(
            f"precision={precision!r}: the profile of {machine.name} has no rate for it, only for {known}. "
            "Choose one of these, or measure it: penstock doctor"
        )
    rate *= EFFICIENCY[machine.device.kind] if efficiency is None else efficiency
    sent = profile.sent or ((0, 0),) * len(profile.forward_flops)
    network = machine.network
    if profile.sent and network is None:
        raise ConfigError(
            f"the profile of {machine.name} does not tell how fast ranks send to each other: measure the machine anew "
            "with penstock doctor, or add a network (bandwidth, latency) to its profile"
        )
    pace = 0.0 if network is None else 1 / network.bandwidth
    forward, backward = ([both[i] * pace for both in sent] for i in (0, 1))
    return StageTimes(
        forward=tuple(f / rate + wait for f, wait in zip(profile.forward_flops, forward, strict=True)),
        backward=tuple(f / rate + wait for f, wait in zip(profile.backward_flops, backward, strict=True)),
    )
