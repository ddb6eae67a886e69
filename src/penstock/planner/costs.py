"""From a machine profile and a model's stage times to the costs that the simulator needs."""

from collections.abc import Callable, Collection

from penstock.config import GradDtype
from penstock.hardware.crossing import compact_pace, crossing_of, step_rate
from penstock.hardware.drives import Together, together
from penstock.hardware.machine import Collectives, Machine, Network
from penstock.planner.plan import Plan
from penstock.schedule.dealt import message_piece
from penstock.schedule.ir.lanes import LANES, Lane
from penstock.schedule.ir.ops import Op, has_graph
from penstock.schedule.place import BF16, FP32, Format
from penstock.schedule.program import Program
from penstock.shape.model import StageTimes
from penstock.sim.costs import Costs, Pair

_OF_PRODUCTS = 0.7
"""The share of the rate of large products at which updates of matrices are made orthogonal: an estimate."""


def costs_of_plan(
    plan: Plan,
    machine: Machine,
    times: StageTimes,
    optimizer: str,
    *,
    io_threads: int = 4,
    link_to: Callable[[int], Network] | None = None,
) -> Costs:
    """The costs of a plan's schedule; arguments and errors as of ``machine_costs``."""
    settings = plan.settings
    return machine_costs(
        machine,
        plan.program,
        settings.form,
        times,
        optimizer,
        io_threads=io_threads,
        grad_dtype=settings.grad_dtype,
        narrow=plan.schedule.narrow,
        link_to=link_to,
    )


def machine_costs(
    machine: Machine,
    program: Program,
    form: Format,
    times: StageTimes,
    optimizer: str,
    *,
    io_threads: int = 4,
    grad_dtype: GradDtype = "fp32",
    narrow: Collection[int] = (),
    link_to: Callable[[int], Network] | None = None,
) -> Costs:
    """The costs of a schedule of ``program`` on ``machine``.

    ``optimizer``: key of the machine's optimizer rates, ``"adamw.bf16"``. ``io_threads``: as ``penstock.wrap``.
    ``grad_dtype``: as in ``Settings``; ``narrow``: groups whose gradients are rounded to it on the device
    (``schedule.lower.provision``). ``link_to``: the link over which messages go to another rank; None: the network.

    A transfer takes its bytes over the lane's rate, compute what ``times`` say, an optimizer step its parameters over
    the measured rate; a gradient that is rounded on its way what doctor has measured of that (``crossing``); sums and
    norms on the host are bound by memory like the step, and take its bytes per second. A collective takes what a rank
    sends over the network's rate, and its latency as often as there is something to send. Of several ranks: the
    machine as each of them sees it (``hardware.sharing``). A message from one accelerator to another takes longer by
    one piece's copies; the others are made while it crosses (``runtime.staging``). Besides, an op costs a hand-over,
    and compute what the ops of other lanes take of the interpreter. Updates are made orthogonal as fast as was
    measured, else at 0.7 of the rate of large products in bf16 (or what is known), as their bytes are not counted.

    Raises:
        ConfigError: the machine has no rate for this optimizer.
    """
    touched = form.step_bytes_each()
    host = machine.host_rate(optimizer) * touched
    pace, on_device = (
        compact_pace(rates, optimizer, form.form) for rates in (machine.host.optimizer, machine.device.optimizer)
    )
    steps = {False: step_rate(machine, optimizer, "rounded" if grad_dtype == "bf16" else "fp32") * pace * touched}
    rounded_down = 0.0
    if narrow:
        steps[True] = step_rate(machine, optimizer, "bf16") * pace * form.step_bytes_each(BF16)
        rounded_down = BF16 * crossing_of(machine).grad_bf16
    device = machine.device.optimizer.get(optimizer, 0.0) * on_device or host / touched
    disk = together(machine.drives) if machine.drives else None
    piece = 0 if machine.device.kind == "cpu" else message_piece(program)
    """bytes of a message that are copied before the first of it crosses, and when the last has"""
    rates: dict[Lane, float] = {"h2d": machine.device.h2d, "d2h": machine.device.d2h, "cpu": host}
    if disk is not None:
        rates |= {"read": disk.read, "write": disk.write}
    if machine.network is not None:
        rates |= {"net": machine.network.bandwidth, "send": machine.network.bandwidth}
    if machine.across is not None:
        rates["nic"] = machine.across.bandwidth
    groups = program.groups
    flops = machine.device.flops
    orthogonal = times.orthogonal or (flops.get("bf16") or max(flops.values())) * _OF_PRODUCTS

    links = [link for link in (machine.network, machine.across) if link is not None]
    agreement_latency = max(
        (link.latency_of_all if isinstance(link, Collectives) else link.latency for link in links), default=0.0
    )
    """the time in which, before a group's first chunk, all ranks tell each other which gradients there are"""

    def compute(op: Op) -> float:
        ident = op.id
        if ident.kind in ("F", "E"):
            return times.forward[ident.stage] * op.items
        if ident.kind == "B":
            return (times.kept(ident.stage) if has_graph(op) else times.backward[ident.stage]) * op.items
        if ident.kind in ("I", "W"):
            return times.in_two(ident.stage)[ident.kind == "W"] * op.items
        whole = groups[ident.group].whole
        if ident.kind == "NS" and whole:
            return whole.flop / orthogonal
        if ident.kind == "OD" and whole:
            return groups[ident.group].trainable / device + whole.flop / orthogonal
        share = {"ND": FP32 / touched, "AD": 3 * FP32 / touched}.get(ident.kind, 1.0)
        return groups[ident.group].trainable * share / device

    def crossing(op: Op) -> float:
        ident, kind = op.id, op.id.kind
        link = machine.across if op.lane == "nic" else machine.network
        if op.lane == "send" and link_to is not None:
            link = link_to(op.peer)
        assert link is not None
        bandwidth, latency, messages = link.bandwidth, link.latency, 1
        if isinstance(link, Collectives) and kind in ("AR", "AN"):
            bandwidth, latency = link.of_all, link.latency_of_all
        elif isinstance(link, Collectives) and kind == "SG":
            bandwidth = link.exchange
        if kind in ("GW", "HW") and ident.group < len(groups):
            messages = (groups[ident.group].trainable > 0) + (groups[ident.group].frozen > 0)
        elif kind in ("AR", "HR"):  # an exchange of pieces, which are then gathered
            messages = 2
        tells = kind in ("SG", "AR") and ident.chunk == 0
        copied = min(op.nbytes, piece) / rates["d2h"] if op.lane == "send" else 0.0
        return op.nbytes / bandwidth + latency * messages + copied + (agreement_latency if tells else 0.0)

    def seconds(op: Op) -> float:
        lane = op.lane
        if lane == "compute":
            return machine.overhead + compute(op)
        if lane == "recv":
            return min(op.nbytes, piece) / rates["h2d"]
        if lane not in rates:
            raise KeyError(f"op {op.id} of lane {lane}: {machine.name} has none")
        ident = op.id
        if ident.kind in ("OP", "MU"):
            return machine.overhead + op.nbytes / steps[ident.group in narrow]
        if ident.kind == "DG" and ident.group in narrow:
            return machine.overhead + op.nbytes / rounded_down
        if lane in ("net", "nic", "send"):
            return machine.overhead + crossing(op)
        return machine.overhead + op.nbytes / rates[lane]

    workers = max(1, io_threads // 2)
    return Costs(
        name=machine.name,
        seconds=seconds,
        contention=contention(machine, disk),
        widths={"read": workers, "write": workers},
        interpreter=machine.interpreter,
    )


def contention(machine: Machine, disk: Together | None) -> dict[Pair, float]:
    """The ``contention`` of ``Costs`` on a machine: measured pairs, and links that do less in both directions at
    once."""
    found: dict[Pair, float] = {}
    lanes: dict[str, Lane] = {lane: lane for lane in LANES}
    for pair, value in machine.contention.items():
        a, _, b = pair.partition("+")
        if a in lanes and b in lanes and value > 0:
            found[lanes[a], lanes[b]] = value
    device = machine.device
    _share(found, ("h2d", "d2h"), (device.h2d, device.d2h), (device.h2d_both, device.d2h_both))
    if disk is not None:
        _share(found, ("read", "write"), (disk.read, disk.write), (disk.read_both, disk.write_both))
    return found


def _share(
    found: dict[Pair, float], lanes: tuple[Lane, Lane], alone: tuple[float, float], both: tuple[float, float]
) -> None:
    a, b = lanes
    for pair, one, two in (((a, b), alone[0], both[0]), ((b, a), alone[1], both[1])):
        if one > two:
            found[pair] = one / two - 1
