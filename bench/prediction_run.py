"""One configuration of ``bench.prediction`` in a process of its own: predict, run, count, print one line of JSON."""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

import penstock
from penstock.cli.model import run_model
from penstock.cli.settings import load
from penstock.hardware.machine import load_machine
from penstock.planner.plan import Plan
from penstock.runtime import access
from penstock.runtime.bound import Bound
from penstock.schedule.check.late import late_moves
from penstock.schedule.ir.lanes import Lane

_LENGTH = 256
_SIDE, _TIMES = 1024, 24
"""of the products of matrices that the processors' speed is told by, and how many: half a second of two cores"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration: ``size`` sequences in a micro-batch; ``places`` are pins of the budget."""

    schedule: Literal["vertical", "horizontal"]
    micro_batches: int
    size: int
    places: Mapping[str, str]
    clip: float | None = None

    @property
    def where(self) -> str:
        """Where the state is, in words."""
        weights, state = self.places["weights"], self.places["state"]
        where = state if weights == state else f"weights {weights}, moments {state}"
        return where if self.clip is None else f"{where}, clipped"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Predicted and measured: seconds of a step, bytes per lane of all steps, peak bytes per tier. ``runs``: of the
    schedule, in each measured step: two where the step went over the limit on the norm. ``expected_runs``: those that
    the engine expected of a step after the first; ``predicted`` counts them. ``drift``: how much longer the same
    products of matrices took around the measured steps than when the machine was measured for the prediction, relative.
    """

    predicted: float
    expected_runs: float
    lower_bound: float
    measured: list[float]
    runs: list[int]
    predicted_bytes: dict[str, int]
    measured_bytes: dict[str, int]
    predicted_peak: dict[str, int]
    measured_peak: dict[str, int]
    drift: float


def speed() -> float:
    """Seconds that some products of matrices take now, in the median."""
    a = torch.ones(_SIDE, _SIDE)
    found = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        torch.mm(a, a)
        found.append(time.perf_counter() - began)
    return median(found)


def bytes_of_a_repeat(plan: Plan) -> dict[Lane, int]:
    """Bytes that each lane moves in a run to which nothing is left, and before it: the run before has taken home what
    the step before it had left, what that run has read ahead is read anew, and what it has stepped is taken back."""
    schedule, moved = plan.schedule, plan.schedule.bytes_per_lane()
    for op in late_moves(schedule):
        moved[op.lane] -= op.nbytes
    moved["read"] += plan.taken_back_bytes
    moved["read"] += sum(schedule.by_id[op].nbytes for op in Bound(schedule=schedule, program=plan.program).reads_ahead)
    return moved


class Counting:
    """Counts bytes where they are copied: by lane thread for the links, by the stores' own counts for the disk."""

    def __init__(self) -> None:
        self.copied: Counter[str] = Counter()
        self._copy = access.copy
        access.copy = self._counted

    def _counted(self, target: torch.Tensor, source: torch.Tensor) -> None:
        lane = threading.current_thread().name.removeprefix("penstock-").partition("-")[0]
        self.copied[lane] += source.numel() * source.itemsize
        self._copy(target, source)

    def take(self, engine: penstock.Engine) -> dict[str, int]:
        """Bytes since the start."""
        runner = engine.inside.planning.runner
        assert runner is not None
        stores = [store.stats for store in (engine.inside.resources.commits.store, runner.scratch) if store is not None]
        return {
            "read": sum(stats.bytes_read for stats in stores),
            "write": sum(stats.bytes_written for stats in stores),
            "h2d": self.copied["h2d"],
            "d2h": self.copied["d2h"],
        }


def run(case: Case, profile: Path, steps: int, folder: Path) -> Outcome:
    """A first step, which plans, and ``steps`` measured ones."""
    config = load(Path(__file__).resolve().parent.parent / "examples" / "demo.yaml", {})
    torch.manual_seed(0)
    model: Any = run_model(config.model, config.data).model
    tokens = torch.Generator().manual_seed(0)

    def step() -> list[dict[str, torch.Tensor]]:
        shape = (case.size, _LENGTH)
        drawn = [torch.randint(0, config.data.vocabulary, shape, generator=tokens) for _ in range(case.micro_batches)]
        return [{"input_ids": ids, "labels": ids} for ids in drawn]

    counting = Counting()
    budget = penstock.Budget(
        device="400MiB", host="2GiB", disk=folder / "store", activations="host", **dict(case.places)
    )
    with penstock.wrap(
        model,
        optimizer=penstock.AdamW(lr=1e-4),
        budget=budget,
        precision="fp32",
        schedule=case.schedule,
        clip_grad_norm=case.clip,
        device="cpu",
        plan=load_machine(profile),
    ) as engine:
        first = [speed()]
        engine.step(step())
        first.append(speed())
        prediction, expected = engine.prediction, engine.expected_seconds
        assert prediction is not None
        assert expected is not None
        expected_runs = engine.expected_runs
        before = counting.take(engine)
        done, later = [], first[-1:]
        for _ in range(steps):
            done.append(engine.step(step()))
            later.append(speed())
        after = counting.take(engine)
        said, again = prediction.bytes_per_lane(), bytes_of_a_repeat(engine.plan)
        runs, repeats = [1 + stats.repeats for stats in done], sum(stats.repeats for stats in done)
        peak = prediction.peak(0)
        return Outcome(
            predicted=expected,
            expected_runs=expected_runs,
            lower_bound=prediction.lower_bound,
            measured=[stats.seconds for stats in done],
            runs=runs,
            predicted_bytes={lane: said[lane] * steps + again[lane] * repeats for lane in before},  # type: ignore[index]
            measured_bytes={lane: after[lane] - before[lane] for lane in before},
            predicted_peak={tier: peak[tier] for tier in peak},
            measured_peak={tier: max(stats.peak_bytes[tier] for stats in done) for tier in done[0].peak_bytes},
            drift=median(later) / median(first) - 1,
        )


def main() -> int:
    case, profile, steps = Case(**json.loads(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3])
    with TemporaryDirectory(dir=profile.parent) as folder:
        print(json.dumps(asdict(run(case, profile, steps, Path(folder)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
