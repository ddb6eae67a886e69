"""The roofline of training with everything on disk: which tokens per second each part of a machine allows.

A step moves and steps every parameter once, whatever the number of tokens T in it, and computes for every token:

    tokens/s <= min( F / (FLOP per token), T / seconds of disk, T / seconds of the optimizer, T / seconds of the link )

so that a larger batch helps until compute is the bound. Compute equals disk at T* tokens, whatever the model's size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.hardware.crossing import Reads, step_rate
from penstock.hardware.drives import together
from penstock.planner.bounds import bound, limits_of
from penstock.planner.question import Question
from penstock.schedule.ir.lanes import STREAM_LANES
from penstock.schedule.place import BF16, FP32, Depths, Format
from penstock.schedule.program import GroupSpec


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds per step of each part that do not depend on the tokens, and tokens/s of compute.

    ``disk_seconds``, ``host_seconds``, ``link_seconds``: reading and writing everything, as far at once as the drives
    can, the optimizer's arithmetic on the host, and the busier direction of the link between host and device, each on
    its own; disk None: there is none. ``balance_tokens``: T* = (F/8) (r/Br + w/Bw), the tokens from which compute takes
    as long as a disk that reads and writes in turns, with r and w bytes per parameter read and written (14 and 12 in
    bf16 with Adam), F FLOP/s that the model reaches and 8 FLOP per parameter and token, 6 of blocks that are
    not computed again; frozen weights are read twice. ``disk_tokens``: the same for ``disk_seconds``.
    """

    compute_tokens_per_second: float
    disk_seconds: float | None
    host_seconds: float
    link_seconds: float
    balance_tokens: float | None
    disk_tokens: float | None

    def tokens_per_second(self, tokens: int) -> float:
        """The bound at so many tokens per step."""
        rest = max(self.disk_seconds or 0.0, self.host_seconds, self.link_seconds)
        return min(self.compute_tokens_per_second, tokens / rest)

    def bound_by(self, tokens: int) -> str:
        """The resource that bounds it: ``compute``, ``disk``, ``host`` or ``link``."""
        seconds = {
            "compute": tokens / self.compute_tokens_per_second,
            "disk": self.disk_seconds or 0.0,
            "host": self.host_seconds,
            "link": self.link_seconds,
        }
        return max(seconds, key=lambda name: seconds[name])


def moved_per_parameter(form: Format, groups: Sequence[GroupSpec]) -> tuple[float, float]:
    """Bytes of disk read and written per trained parameter and step: weights twice and state in, state and new weights
    out; in bf16 with Adam 14 and 12.

    That is a block's share, where host memory has room for a few blocks' weights between their last load and their step
    (``Settings.keep``); weights of the ends and of the last block are read once.
    """
    state = sum(form.state_bytes(group) for group in groups) / sum(group.trainable for group in groups)
    return 2 * form.weight_bytes + state, form.weight_bytes + state


def _host_work(form: Format, groups: Sequence[GroupSpec]) -> float:
    """Bytes that steps of all groups touch in host memory, over those of as many parameters that go element by
    element."""
    touched = sum(form.step_bytes(group, group.trainable) for group in groups)
    touched += sum(form.momentum_step_bytes(group, group.trainable) for group in groups if group.whole)
    return touched / (form.step_bytes_each() * sum(group.trainable for group in groups))


def roofline(question: Question, tokens: int, kept: float = 0.0) -> Roofline:
    """The roofline of a question's model, optimizer and machine. ``tokens``: of one micro-batch; ``kept``: share of the
    calls of blocks whose graphs are kept."""
    request, machine, times = question.request, question.machine, question.times
    form, trained = request.form, [group for group in request.program.groups if group.trainable]
    parameters = sum(group.trainable for group in trained)
    weights = sum(group.numel for group in request.program.groups) * request.form.weight_bytes
    calls = [stage.index for stage in request.program.stages if stage.kind == "call"]
    saved = kept * sum(times.backward[k] - times.kept(k) for k in calls)
    rate = tokens / (sum(times.forward) + sum(times.backward) - saved)
    disk = together(machine.drives) if machine.drives else None
    read, write = moved_per_parameter(form, trained)
    frozen = 2 * form.weight_bytes * sum(group.frozen for group in request.program.groups)
    turns = at_once = None
    if disk is not None:
        load = np.zeros((1, len(STREAM_LANES)))
        load[0, STREAM_LANES.index("read")] = (parameters * read + frozen) / disk.read
        load[0, STREAM_LANES.index("write")] = parameters * write / disk.write
        turns, at_once = float(load.sum()), bound(load, limits_of(question.costs, Depths())[: len(STREAM_LANES)])
    updates = sum(group.trainable * BF16 for group in trained if group.whole)
    down = (parameters * (BF16 if request.may_cast_on_device else FP32) + updates) / machine.device.d2h
    ways: tuple[Reads, ...] = ("fp32",) if request.grad_dtype == "fp32" else ("rounded", "bf16")
    return Roofline(
        compute_tokens_per_second=rate,
        disk_seconds=at_once,
        host_seconds=_host_work(form, trained)
        * parameters
        / max(step_rate(machine, question.optimizer, way) for way in ways),
        link_seconds=max((2 * weights + updates) / machine.device.h2d, down),
        balance_tokens=None if turns is None else rate * turns,  # rate = F / (8 parameters), or more
        disk_tokens=None if at_once is None else rate * at_once,
    )
