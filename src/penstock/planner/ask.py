"""``penstock.plan(...)``: the best way to run a model on a machine, and what to expect of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from penstock.config import Budget, StepConfig, fields_of, format_size, parse_size
from penstock.config.meanings import model_and
from penstock.config.optimizer import NS_STEPS, Orthogonal, moment_count
from penstock.config.quantities import parse_count
from penstock.config.step import check_deal, check_strands
from penstock.errors import BudgetError, ConfigError
from penstock.hardware.machine import DeviceKind, Machine
from penstock.hardware.profiles import find_profile, machine_named, on_directories, why_none
from penstock.hardware.sharing import room_of_each
from penstock.planner.advice import Advice, advice, refusal, worn_out
from penstock.planner.arguments import PlanArguments, PlanSettings, check_drives, check_model
from penstock.planner.batches import MOST_MICRO_BATCHES, Point, Split, choose, curve, cuts, saturating, splits
from penstock.planner.durability import Weighed, settled, undecided, weigh
from penstock.planner.endurance import EnduranceError
from penstock.planner.forecast import Forecast, WholeRun
from penstock.planner.longest import Longest, longest
from penstock.planner.plan import Plan
from penstock.planner.proposals import Proposals
from penstock.planner.question import FAMILIES
from penstock.planner.roofline import Roofline, roofline
from penstock.planner.search import Choice, search
from penstock.planner.task import Task, own_budget
from penstock.shape.huggingface import model_shape
from penstock.shape.model import ModelShape


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanReport:
    """The best plan found, and what to expect of it. What takes other plans to tell is worked out when it is looked at.

    | attribute | meaning |
    |---|---|
    | ``forecast`` | the plan's step: time, tokens/s, MFU, bottleneck, bytes, memory, wear |
    | ``curve`` | vertical and horizontal over the global batch, by the linear program; of several ranks nothing |
    | ``roofline`` | what compute, disk, host and link allow with all state on disk; compute, with every graph kept that
    may be |
    | ``advice`` | what would make it faster, best first; of several ranks nothing |
    | ``longest`` | the longest sequences that would fit; None: none does |
    | ``notes`` | what to know about the machine's profile and the budget |
    | ``run`` | how long the steps take that were asked for, and what they cost the drives; None: nobody asked |
    | ``weighed`` | what a step takes by durability, where there is a choice; None: there is none |
    """

    forecast: Forecast
    notes: tuple[str, ...]
    weighed: Weighed | None
    steps: int | None = None

    @property
    def run(self) -> WholeRun | None:
        return None if self.steps is None else self.forecast.whole_run(self.steps)

    @cached_property
    def curve(self) -> tuple[Point, ...]:
        f = self.forecast
        if f.task.ranks > 1:  # batches and advice are weighed for one rank alone
            return ()
        batch = f.micro_batch_size * f.micro_batches
        return tuple(curve(f.task, f.micro_batch_size, until=4 * batch, also=batch))

    @cached_property
    def roofline(self) -> Roofline:
        f = self.forecast
        plan = f.choice.plan
        tokens = f.profile.tokens
        most = roofline(f.choice.question, tokens, 1.0 if f.choice.request.most_graphs else 0.0)
        found = roofline(f.choice.question, tokens, plan.graphs_kept / max(plan.calls, 1))
        return replace(found, compute_tokens_per_second=most.compute_tokens_per_second)  # other batches may keep more

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        f = self.forecast
        if f.task.ranks > 1:
            return ()
        return advice(f.task, f.micro_batch_size, f.choice)

    @cached_property
    def longest(self) -> Longest | None:
        return longest(self.forecast.task)

    def __repr__(self) -> str:
        f = self.forecast
        return (
            f"<PlanReport of {f.task.shape.name} on {f.task.machine.name}: {f.step_seconds:.3g} s a step, "
            f"{f.tokens_per_second:,.0f} tokens/s, bound by {f.bottleneck}>"
        )

    @property
    def plan(self) -> Plan:
        """Schedule, placement, chunk size and depths."""
        return self.forecast.choice.plan

    @cached_property
    def json(self) -> dict[str, Any]:
        """Everything as plain data, in seconds, bytes and tokens."""
        from penstock.planner.as_json import as_json

        return as_json(self)


@model_and(PlanArguments)
def plan(model: str | Path | Mapping[str, Any] | ModelShape, asked: PlanArguments) -> PlanReport:
    """Plan the training of a model on a machine. Loads no weights; needs neither the machine nor a GPU.

    ``model``: the name of a model that ships (``"gpt-65b"``), the path of a Hugging Face ``config.json`` or of its
    folder, such a configuration as a mapping, or a ``ModelShape`` (``penstock.shape.meta.MetaModel`` makes one of
    any module).

    Raises:
        ConfigError: an argument, the model, or the machine's profile is not usable; says which and why.
        BudgetError: it does not fit; says the smallest change that makes it fit.
        ModelError: the model cannot be run block by block.
    """
    check_model(model)
    check_deal(asked.deal, dealt=False)
    if asked.strands is not None:
        check_strands(asked.strands, 1)
    machine = _machine(asked.machine, asked.budget)
    budget = own_budget(machine, device=None, host=None) if asked.budget is None else asked.budget
    check_drives(asked.disk_free, asked.tbw, budget)
    if asked.tbw is not None:
        machine = rated(machine, asked.tbw)
    task = task_for(model, machine, budget, asked)
    found = report(task, batch=asked.batch, split=asked.split)
    if asked.tokens is None:
        return found
    return replace(found, steps=found.forecast.steps_for(parse_count("tokens", asked.tokens)))


def task_for(
    model: str | Path | Mapping[str, Any] | ModelShape, machine: Machine, budget: Budget, asked: PlanSettings
) -> Task:
    """The task of a model on a machine, of which no step is planned yet; raises as ``plan``."""
    return Task(
        shape=model_shape(model, kind=machine.device.kind) if isinstance(model, str | Path | Mapping) else model,
        machine=machine,
        budget=budget,
        sequence_length=asked.sequence_length,
        optimizer=asked.optimizer,
        moment_count=moment_count(asked.optimizer, asked.momentum),
        moments=asked.moments,
        whole=Orthogonal(steps=NS_STEPS) if asked.optimizer == "muon" else None,
        families=FAMILIES if asked.schedule is None else (asked.schedule,),
        disk_free=room_of_each(machine.drives, 1) if asked.disk_free is None else parse_size(asked.disk_free),
        **fields_of(asked, StepConfig) | {"precision": asked.precision_on(machine.device.kind)},
    )


def rated(machine: Machine, tbw: float) -> Machine:
    """The machine with another rating of its drives, in terabytes."""
    return replace(machine, drives=tuple(replace(drive, tbw=tbw / drive.directories) for drive in machine.drives))


def _machine(machine: str | Path | Machine | None, budget: Budget | None) -> Machine:
    paths = () if budget is None else budget.disk_paths
    if machine is None:
        return measured(paths)
    return on_directories(machine if isinstance(machine, Machine) else machine_named(str(machine)), paths)


def measured(paths: tuple[Path, ...], *, kind: DeviceKind | None = None) -> Machine:
    """The stored profile of this host and the directories. ``kind``: of the device that computes; None: any.

    Raises:
        ConfigError: there is none that is of this machine as it is now; says how to make one.
    """
    found = find_profile(paths, kind=kind)
    if found is None and kind is not None and find_profile(paths) is not None:
        raise ConfigError(
            f"the stored profile of this machine is for another kind of device than {kind}: penstock train measures it "
            "anew when it starts, or plan for another machine with --machine"
        )
    if found is None:
        where = " ".join(f"--path {path}" for path in paths)
        why = why_none(paths, kind=kind)
        if why is None:
            why = "this machine has not been measured"
            why += (f" with {', '.join(map(str, paths))}" if paths else "") + (f" and device={kind!r}" if kind else "")
        raise ConfigError(
            f"{why}: run penstock doctor{' ' + where if where else ''}, or plan for another machine with --machine"
        )
    return found


def report(task: Task, *, batch: int | None = None, split: tuple[int, int] | None = None) -> PlanReport:
    """Plan a task. ``batch``: sequences; ``split``: (sequences in a micro-batch, micro-batches), instead of ``batch``.

    Raises:
        BudgetError: it does not fit; says the smallest change that makes it fit.
    """
    try:
        task, choice, size, weighed = _settled(task, batch, split)
    except _NoPlanError as refused:
        raise refused.error() from None
    found = Forecast(task=task, choice=choice, micro_batch_size=size)
    return PlanReport(forecast=found, notes=(*_notes(task), *_beyond(found)), weighed=weighed)


class _NoPlanError(Exception):
    """Nothing fits, or lasts. ``error``: makes the error that says what would help, which takes a while to find out."""

    def __init__(self, error: Callable[[], BudgetError]) -> None:
        super().__init__()
        self.error = error


def _settled(task: Task, batch: int | None, split: tuple[int, int] | None) -> tuple[Task, Choice, int, Weighed | None]:
    """The task with the durability that it names, or gets; the plan, its sequences in a micro-batch, and what each
    durability takes, where there is a choice.

    Every step is durable unless that costs too much: which is known once it is known how the batch is cut.
    """
    if not undecided(task):
        named = settled(task)
        choice, size = _found(named, batch, split)
        may = task.ranks == 1 and task.budget.may_keep_every_step
        return named, choice, size, weigh(task, size, choice.request.micro_batches) if may else None
    named = settled(task, "step")
    try:
        choice, size = _found(named, batch, split)
    except _NoPlanError as first:
        named = settled(task, "interval")
        try:
            choice, size = _found(named, batch, split)
        except _NoPlanError:
            raise first from None
    weighed = weigh(task, size, choice.request.micro_batches)
    if weighed.default == "interval" and named.budget.durability == "step":
        named = settled(task, "interval")
        choice, size = _found(named, None, (size, choice.request.micro_batches))  # a run keeps its cut, too
    return named, choice, size, weighed


def _found(task: Task, batch: int | None, split: tuple[int, int] | None) -> tuple[Choice, int]:
    """The best plan for a batch, or for one way to cut it, and the sequences in a micro-batch."""
    if split is None:
        choice, chosen = _chosen(task, batch)
        return choice, chosen.micro_batch_size
    if split[1] > MOST_MICRO_BATCHES:
        raise ConfigError(f"{split[1]} micro-batches: at most {MOST_MICRO_BATCHES} can be planned; use larger ones")
    try:
        return search(task.question(*split)), split[0]
    except EnduranceError as error:
        raise _NoPlanError(partial(worn_out, task, *split, error)) from None
    except BudgetError as error:
        raise _NoPlanError(partial(refusal, task, *split, error)) from None


def _chosen(task: Task, batch: int | None) -> tuple[Choice, Split]:
    """``choose`` for a batch; None: for the saturating one, or half of it and so on, where no whole groups fit."""
    refused: _NoPlanError | None = None
    try:
        tried = [batch] if batch is not None else [first := saturating(task), *_halves(first)]
    except BudgetError as error:
        raise _NoPlanError(partial(refused_batch, task, 1, error)) from None
    for sequences in tried:
        try:
            return choose(task, sequences)
        except BudgetError as error:
            refused = refused or _NoPlanError(partial(refused_batch, task, sequences, error))
            if isinstance(error, EnduranceError):  # a smaller batch writes no less in a step that is shorter
                break
    assert refused is not None
    raise refused


def refused_batch(task: Task, batch: int, why: BudgetError) -> BudgetError:
    """The error for a batch of one rank that does not fit, or wears the drives too fast, however it is cut: what would
    help."""
    first = cuts(batch)[0]
    if isinstance(why, EnduranceError):
        return worn_out(task, *first, why)
    smaller = next((n for n in _halves(batch) if _fits_whole(task, n)), None)
    count = "1 sequence fits" if smaller == 1 else f"{smaller} sequences fit"
    more = "" if smaller is None else f". Or a smaller batch: {count}{' on each rank' * (task.size > 1)}"
    return BudgetError(f"{refusal(task, *first, why)}{more}")


def _fits_whole(task: Task, batch: int) -> bool:
    """True if a batch fits in some cut: in whole groups, too, and not only in shares of them."""
    return any(Proposals(task.question(s.micro_batch_size, s.micro_batches)).fits() for s in splits(task, batch))


def _halves(batch: int) -> Iterator[int]:
    while batch > 1:
        batch //= 2
        yield batch


def _beyond(found: Forecast) -> Iterator[str]:
    """Sentences on the memory that a plan takes beyond the machine, and that loading, saving or resuming takes beyond
    the budget that training keeps to."""
    if found.beyond_machine is not None:
        yield f"it does not fit into the machine: {found.beyond_machine}"
    for tier, size in found.task.budget.memory.items():
        for phase, sizes in found.memory.items():
            if sizes[tier] > size:
                yield f"{phase} takes {format_size(sizes[tier] - size)} of {tier} memory beyond the budget"


def _notes(task: Task) -> tuple[str, ...]:
    """Sentences that a user should know before trusting the numbers."""
    machine, budget = task.machine, task.budget
    notes = list(machine.warnings)
    for tier, there in machine.memory.items():
        if (given := budget.memory[tier]) > there:
            notes.append(f"budget.{tier} is {format_size(given)}, but the machine has {format_size(there)}")
    if machine.device.kind == "cuda" and budget.host_bytes > machine.host.lockable:
        notes.append(
            f"host memory has to be page-locked, and only {format_size(machine.host.lockable)} may be: raise ulimit -l"
        )
    return tuple(notes)
