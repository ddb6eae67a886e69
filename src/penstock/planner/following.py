"""Following the machine while a run goes on: what its lanes do beside what was predicted, and the rates that tell it.

One number for each lane says how a step went: what the lane's ops took of the machine over what they were predicted to
take, both as if nothing else had run beside them (``Seen.factors``). 1 is as predicted, 4 a lane that goes at a quarter
of its rate. Lanes that wait for each other, or slow each other down as the profile says, do not change it, so it tells
which lane is another one than the plan was made for, which a step's seconds do not.

``Deviations`` says when these numbers are no noise any more, ``corrected`` and ``corrected_times`` make the profile and
the stage times of them. By those the same step is as predicted: every number is 1 again, and nothing swings.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.hardware.drives import together
from penstock.hardware.machine import Machine, at_pace
from penstock.schedule.ir.lanes import LANES, Lane
from penstock.schedule.ir.references import COMPUTES
from penstock.schedule.place import Format, Placement
from penstock.schedule.program import Program, Stage
from penstock.shape.model import StageTimes
from penstock.sim.costs import Pair

WINDOW = 3
"""The last steps, of which each must be off. Only the first can be of the pace before in part; their median is not."""
LEAST = math.log(1.1)
"""A lane whose factor (its logarithm) is less than this off is as predicted: a prediction is 10% off at worst."""
OF_NOISE = 2.5
"""Times its noise that a lane must be off in each of these steps."""
MATTERS = 0.05
"""The share of a step that a lane must be busy for to matter, or be predicted to be: one that has become fast hardly is
busy any more."""
HORIZON = 50
"""Steps for which a machine is expected to stay as it was found. What a change costs must come back within them."""
LEAST_GAIN = 0.03
"""The share of a step that a change must promise."""
PATIENCE = 8, 512
"""Steps after a search before the next one: at first, and, doubled each time that nothing better was found, at most."""
AGAIN = 0.1
"""The share by which steps must take more or less than at the last search for another one before that."""
ANOTHER = math.log(2)
"""A lane that is so much faster or slower than at the last search (a logarithm) is reason enough, too: one that bounds
no step is in none of their seconds."""

_REMEMBERED = 32
"""The jumps that tell the noise. By half as many, noise of 10% would be a deviation three times as often."""
_OUTSIDE: frozenset[Lane] = frozenset(("read", "write", "net", "nic"))
"""Lanes whose pace is set by what is not the processor, so that one that goes slower takes less from the others."""
_ROUNDS = 4

STAGE_KEYS = ("forward", "backward", "ends", "orthogonal")
"""Compute, by what it is of: blocks' forward and backward, the model's own code between blocks, and updates that are
made orthogonal."""
KEYS: tuple[str, ...] = (*LANES, *STAGE_KEYS)
"""Everything that is looked at in a step: its lanes, and its compute by kind."""


def stage_key(kind: str, stage: Stage) -> str | None:
    """The one of ``STAGE_KEYS`` that an op of compute counts to; None: it is none of theirs."""
    if kind == "NS":
        return "orthogonal"
    if kind not in COMPUTES:
        return None
    if stage.kind == "segment":
        return "ends"
    return "forward" if kind == "F" else "backward"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One step as it ran.

    ``together``: seconds by which of ``KEYS`` were busy at once, a bit for each. ``expected``: seconds that each of
    them was predicted to take for what it moved, alone.
    """

    together: Mapping[int, float]
    expected: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """From the first op's start to the last one's end."""
        return sum(self.together.values())

    def factors(self, contention: Mapping[Pair, float]) -> dict[str, float]:
        """By lane and by stage key: what its ops have taken over what they were predicted to take.

        While lanes b run beside lane a, that gets ahead by 1 / (1 + sum of c[a, b]) of its rate. What a drive that
        goes at a part of its rate takes from others is that part of what was measured, so ``c[a, b]`` is divided by
        the factor of b; some rounds of this find both.
        """
        found: dict[str, float] = {}
        for _ in range(_ROUNDS):
            slowed = _scaled(contention, found)
            found = {
                key: work / self.expected[key]
                for key in KEYS
                if key != "compute" and self.expected.get(key, 0.0) > 0 and (work := self._work(key, slowed)) > 0
            }
        return found

    def shares(self) -> dict[str, float]:
        """By lane and by stage key: the share of the step that it was busy, or was predicted to be, if that is more."""
        whole = max(self.seconds, 1e-9)
        return {key: max(self._work(key, {}), self.expected.get(key, 0.0)) / whole for key in KEYS if key != "compute"}

    def _work(self, key: str, contention: Mapping[Pair, float]) -> float:
        """Seconds that a lane, or a stage key, was busy, each as much as it got ahead in it."""
        here = 1 << KEYS.index(key)
        lane: Lane = "compute" if key in STAGE_KEYS else LANES[KEYS.index(key)]
        total = 0.0
        for mask, seconds in self.together.items():
            if mask & here:
                beside = (b for i, b in enumerate(LANES) if mask >> i & 1 and b != lane)
                total += seconds / (1.0 + sum(contention.get((lane, b), 0.0) for b in beside))
        return total


def _scaled(contention: Mapping[Pair, float], factors: Mapping[str, float]) -> dict[Pair, float]:
    """The contention of lanes where some go at another pace. Reads and writes share a drive as before."""
    return {(a, b): c / _less(a, b, factors) for (a, b), c in contention.items()}


def _less(a: str, b: str, factors: Mapping[str, float]) -> float:
    """The factor by which lane b takes less from lane a than was measured."""
    one_drive = {a, b} == {"read", "write"}
    return factors.get(b, 1.0) if b in _OUTSIDE and not one_drive else 1.0


def of_all_ranks(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Factors, or shares, of all ranks together: those of the slowest, as plans are made for it. Only what a rank takes
    for collectives counts least: there all wait for the last one, which does not wait."""
    keys = sorted({key for one in found for key in one})
    return {key: (min if key in ("net", "nic") else max)(one[key] for one in found if key in one) for key in keys}


class Deviations:
    """The last steps' factors, as logarithms, and whether they are off by more than their noise.

    The noise of each is estimated from the steps themselves: 1.48 times the median of the differences between one step
    and the next, over the root of 2, which is the standard deviation where it is normal, and which a jump from one pace
    to another does not raise.
    """

    def __init__(self) -> None:
        self._recent: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._shares: Mapping[str, float] = {}
        self._jumps: dict[str, deque[float]] = {}

    def add(self, factors: Mapping[str, float], shares: Mapping[str, float]) -> None:
        """Take in a step."""
        now = {key: math.log(factor) for key, factor in factors.items()}
        before = self._recent[-1] if self._recent else {}
        for key in now.keys() & before.keys():
            self._jumps.setdefault(key, deque(maxlen=_REMEMBERED)).append(abs(now[key] - before[key]))
        self._recent.append(now)
        self._shares = shares

    def clear(self) -> None:
        """Forget the recent steps, as other times are predicted from here on. The noise stays the same."""
        self._recent.clear()

    def noise(self, key: str) -> float:
        jumps = self._jumps.get(key)
        return 1.4826 * statistics.median(jumps) / math.sqrt(2) if jumps else 0.0

    def middle(self) -> dict[str, float]:
        """The median factor of each lane and stage key over the last steps, where each of them has one."""
        keys = set.intersection(*(set(step) for step in self._recent)) if self._recent else set()
        return {key: math.exp(statistics.median(step[key] for step in self._recent)) for key in sorted(keys)}

    def off(self) -> dict[str, float]:
        """The factors of what is not as predicted, by more than its noise; empty: all is, or too little is known."""
        if len(self._recent) < WINDOW:
            return {}
        return {
            key: factor
            for key, factor in self.middle().items()
            if self._shares.get(key, 0.0) >= MATTERS and self._off_by(key) > max(LEAST, OF_NOISE * self.noise(key))
        }

    def _off_by(self, key: str) -> float:
        """The least by which the last steps are off, all to the same side; less than 0: they are not."""
        found = [step[key] for step in self._recent]
        return max(min(found), -max(found))


def corrected(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The profile by which lanes take ``factors`` times as long as by ``machine``."""

    def by(lane: Lane) -> float:
        return 1.0 / factors.get(lane, 1.0)

    down, up, steps = by("d2h"), by("h2d"), by("cpu")
    drive = {"read": by("read"), "read_both": by("read"), "write": by("write"), "write_both": by("write")}
    return replace(
        machine,
        drives=tuple(at_pace(one.steady, **drive) for one in machine.drives),
        device=at_pace(machine.device, h2d=up, h2d_both=up, d2h=down, d2h_both=down),
        host=at_pace(machine.host, optimizer=steps),
        crossing=machine.crossing and machine.crossing.at(down=down, steps=steps),  # else the other rates tell
        network=machine.network and machine.network.at(by("net")),
        across=machine.across and machine.across.at(by("nic")),
        contention={pair: value / _less(*_both(pair), factors) for pair, value in machine.contention.items()},
    )


def _both(pair: str) -> tuple[str, str]:
    """The lanes of a pair of ``Machine.contention``."""
    a, _, b = pair.partition("+")
    return a, b


def corrected_times(times: StageTimes, factors: Mapping[str, float], stages: Sequence[Stage]) -> StageTimes:
    """Stage times that are ``factors`` times as long."""

    def by(kind: str) -> Iterable[float]:
        return (factors.get(stage_key(kind, stage) or "", 1.0) for stage in stages)

    orthogonal = times.orthogonal
    return replace(
        times,
        orthogonal=None if orthogonal is None else orthogonal / factors.get("orthogonal", 1.0),
        forward=tuple(seconds * factor for seconds, factor in zip(times.forward, by("F"), strict=True)),
        backward=tuple(seconds * factor for seconds, factor in zip(times.backward, by("B"), strict=True)),
        weights=tuple(seconds * factor for seconds, factor in zip(times.weights, by("W"), strict=bool(times.weights))),
    )


def moving_seconds(program: Program, form: Format, now: Placement, then: Placement, machine: Machine) -> float:
    """Seconds in which arrays move from where they are to where another plan has them, one after the other, and copies
    of weights are made."""
    disk, device = together(machine.drives) if machine.drives else None, machine.device
    each = {
        "read": math.inf if disk is None else disk.read,
        "write": math.inf if disk is None else disk.write,
        "up": device.h2d,
        "down": device.d2h,
    }
    total = 0.0
    for group in program.groups:
        g, weights, home = group.index, group.numel * form.weight_bytes, then.home(group)
        had = now.weights[g] if now.copied(group) else None
        copy = then.weights[g] if then.copied(group) and then.weights[g] != had else home
        for nbytes, before, after in (
            (weights, now.home(group), home),
            (form.state_bytes(group), now.state[g], then.state[g]),
            (weights, home, copy),
        ):
            if before != after:
                total += nbytes / each["read"] * (before == "disk") + nbytes / each["write"] * (after == "disk")
                total += nbytes / each["up"] * (after == "device") + nbytes / each["down"] * (before == "device")
    return total


_NAMES: Mapping[str, str] = {
    "read": "reads", "write": "writes", "h2d": "copies to the device", "d2h": "copies from the device",
    "cpu": "the optimizer", "net": "collectives", "nic": "collectives between hosts",
    "forward": "the blocks' forward", "backward": "the blocks' backward", "ends": "the model's ends",
    "orthogonal": "Muon's orthogonal updates",
}  # fmt: skip


def what_is_off(off: Mapping[str, float], before: Machine) -> str:
    """The lanes that are not as predicted, in words: the one that is off the most first."""
    disk = together(before.drives) if before.drives else None
    rates = {
        "read": 0.0 if disk is None else disk.read,
        "write": 0.0 if disk is None else disk.write,
        "h2d": before.device.h2d,
        "d2h": before.device.d2h,
        "net": 0.0 if before.network is None else before.network.bandwidth,
        "nic": 0.0 if before.across is None else before.across.bandwidth,
    }
    parts = []
    for key in sorted(off, key=lambda key: -abs(math.log(off[key]))):
        rate = rates.get(key, 0.0)
        if rate:
            parts.append(f"{_NAMES[key]} at {rate / off[key] / 1e6:,.0f} MB/s, {rate / 1e6:,.0f} predicted")
        else:
            parts.append(f"{_NAMES[key]} at {1 / off[key]:.2f} of the pace predicted")
    return "; ".join(parts)
