"""An engine's resources for as long as it lives: a model cut into groups, its state and store, its streams."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from penstock.compat.marks import buffer_dtypes
from penstock.config import Precision
from penstock.config.optimizer import OptimizerSpec
from penstock.config.step import SPLIT, check_strands
from penstock.engine import start
from penstock.engine.arguments import WrapArguments
from penstock.engine.dealt import deal_blocks
from penstock.engine.progress import Progress
from penstock.engine.spans import Spans
from penstock.engine.stripes import as_striped, room_beside, users_of, weights_for
from penstock.errors import ConfigError
from penstock.hardware.machine import Machine
from penstock.optim.facade import StreamedOptimizer, rate_name
from penstock.optim.precision import DTYPES, LossScale
from penstock.planner.request import Request
from penstock.ranks.group import Ranks
from penstock.ranks.share import Share
from penstock.runtime.streams import Streams, streams_for
from penstock.schedule.ir.ops import Schedule
from penstock.schedule.matrices import Piece, pieces
from penstock.schedule.place import Format
from penstock.sim.library import why_none
from penstock.state import numa
from penstock.state.arrays import StateArrays
from penstock.state.buffers import FIRST_BUFFERS, Buffers
from penstock.state.commits import Commits
from penstock.state.shared import SharedArrays
from penstock.state.values import Arrays, Values
from penstock.store.owner import Owner
from penstock.store.parts import of_rank
from penstock.store.removal import SCRATCH, remove_scratch
from penstock.tape.blocks import find_blocks
from penstock.tape.groups import ParamGroup, ParamSlice, group_parameters
from penstock.tape.guard import guard
from penstock.tape.tape import Tape
from penstock.tape.weight_views import aliases_of

log = logging.getLogger("penstock")

_ALIKE = "call torch.manual_seed(0), on each the same number, before the model is made, or load the same weights"

Run = tuple[int, int, int]
"""(first element, end, index of hyper-parameters): a range of a group's buffer that one torch param group rules."""


@dataclass(frozen=True, kw_only=True)
class EngineResources:
    """Resources that all plans of an engine share: they outlive each plan."""

    groups: tuple[ParamGroup, ...]
    tape: Tape
    buffers: Buffers
    commits: Commits
    optimizer: StreamedOptimizer
    progress: Progress
    description: Mapping[str, Any]
    """the model and optimizer that the store, and a snapshot, is made for"""
    runs: Mapping[int, Sequence[Run]]
    """by group, in order of elements"""
    matrices: Mapping[int, Sequence[tuple[ParamSlice, Sequence[Piece]]]]
    """by group of matrices, what each parameter consists of"""
    ranks: Ranks
    """the ranks that train the model together"""
    share: Share
    """this rank's part of every group, which its arrays hold"""
    dealt: tuple[int, ...]
    """in a pipeline, the rank that has each block"""
    spans: Spans | None
    """the cut of micro-batches for ranks that share each sequence; None: each rank has its own"""
    settings: WrapArguments
    """as ``wrap`` was asked, and what counts where nothing was"""
    strands: int
    """strands of all ranks together"""
    device: torch.device
    streams: Streams
    scratch_paths: tuple[Path, ...]
    users: tuple[int, ...]
    """the number of directories of this host's stores on the file system of each of this one's"""
    threads: int
    """threads of the optimizer"""
    machine: Machine | None
    """the machine that plans are made for; None: nothing is predicted"""
    rate: str
    """the machine's name for the rate of this optimizer in this precision"""

    @property
    def arrays(self) -> StateArrays:
        return self.commits.arrays

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that compute."""
        return self.arrays.dtype

    @property
    def whole_arrays(self) -> Arrays:
        """All of every array; several ranks read the same ranges at the same time."""
        if self.share.is_whole:
            return self.arrays
        return SharedArrays(self.arrays, self.description, self.ranks, self.share)

    @property
    def held(self) -> list[ParamGroup]:
        """The groups that this rank has some of."""
        return [group for group in self.groups if self.share.holds(group.spec.index)]

    def disk_free(self, request: Request) -> int | None:
        """Bytes that the store and scratch space of a request's plan may take; None: there is no disk."""
        if (store := self.commits.store) is None:
            return None
        return request.store_bytes + room_beside(store, self.scratch_paths, self.users)

    def values(self, arrays: Arrays | None = None) -> Values:
        """Every parameter and persistent buffer, of whole arrays. ``arrays``: how these are read."""
        return Values(arrays or self.whole_arrays, self.description, self.buffers.tensors())

    def close(self) -> None:
        """Take the model from the tape and the store's memory; each happens whatever the others raise."""
        with ExitStack() as all_of_it:  # last in, first out
            for group in self.groups:
                all_of_it.callback(group.detach, self.dtype, self.device)
            all_of_it.callback(self.tape.close)


def looked_up(model: nn.Module, groups: Sequence[ParamGroup]) -> frozenset[int]:
    """The groups whose parameters are all the rows of embeddings, and of nothing else."""
    of_modules = [(isinstance(m, nn.Embedding), id(p)) for m in model.modules() for p in m.parameters(recurse=False)]
    rows = {p for is_rows, p in of_modules if is_rows} - {p for is_rows, p in of_modules if not is_rows}
    return frozenset(g.spec.index for g in groups if g.slices and all(id(s.parameter) in rows for s in g.slices))


def open_resources(
    model: nn.Module,
    settings: WrapArguments,
    *,
    device: torch.device,
    machine: Machine | None,
    owner: Owner | None,
    ranks: Ranks,
    make_room: Callable[[], None] | None,
) -> EngineResources:
    """Cut a model into groups, open or make its store, and bring its values to where they live from now on.

    ``settings``: as asked for, and what counts where nothing was. ``machine``: to plan for. ``owner``: the run that the
    store belongs to. ``make_room``: removes the stores that are there, before any are looked for; None: they are gone
    on with.

    Raises:
        ConfigError, BudgetError, ModelError, StoreError: as ``wrap``. Nothing is open then.
    """
    budget, precision = settings.budget, settings.precision
    assert precision is not None, "wrap has chosen one"
    assert settings.loss_fn is not None, "and this"
    found, from_meta, aliases = find_blocks(model, settings.blocks), start.built_on_meta(model), aliases_of(model)
    spec = settings.optimizer
    form = Format.of(precision, spec.moment_count, spec.moments, spec.whole)
    parts = settings.parts(ranks.sharing.each)
    dtypes = buffer_dtypes(model, DTYPES[precision])
    groups, buffers = group_parameters(model, found, parts, form), Buffers(model, dtypes)
    dealt, holders = list[int](), list[int]()
    if ranks.are_pipeline:
        specs, blocks = [g.spec for g in groups], [block.name for block in found]
        goes_on = budget.disk_paths if make_room is None else ()
        assert not isinstance(settings.schedule, Schedule), "wrap has refused it"
        dealt, holders = deal_blocks(
            specs, blocks, ranks, settings.deal, goes_on, settings.schedule, looked_up(model, groups)
        )
    share = ranks.share(parts, holders)
    optimizer = optimizer_for(spec, groups)
    strands = ranks.sharing.size if settings.strands is None else settings.strands
    description = start.describe_model(groups, buffers, precision, spec, strands)
    description |= of_rank(
        ranks.rank,
        ranks.size,
        whole=share.is_whole,
        copies=ranks.copies,
        holders=share.holders,
        stages=ranks.stages if ranks.are_pipeline else None,
    )
    check_strands(strands, ranks.sharing.size)
    names = [[name, *parameter] for group in description["groups"] for name, *parameter in group["parameters"]]
    ranks.agree_on_each({"model": type(model).__name__, "parameters of the model": _digest(names)})
    if make_room is not None:
        make_room()
    commits = Commits(
        budget,
        [share.part(g.spec) for g in groups],
        form,
        DTYPES[precision],
        device,
        buffers,
        model=description,
        owner=owner,
        ranks=ranks,
        share=share,
        any_strands=settings.strands is None,
        weights=lambda paths: weights_for(paths, machine, ranks),
    )
    with ExitStack() as undo:
        undo.callback(commits.close)
        for path in budget.disk_paths:
            remove_scratch(path)
        spans = None if ranks.cp == 1 else Spans(model, ranks)
        if spans is not None:
            undo.callback(spans.ulysses.close)
        guard(model, blocks=[block.module for block in found])  # now: whatever fails from here on, it has no values
        check_strands(description.get("strands", 1), ranks.sharing.size)
        progress = Progress(
            seed=settings.seed,
            trained=[s.name for g in groups for s in g.slices if s.trainable],
            optimizer=optimizer,
            scale=LossScale.of(precision),
        )
        if from_meta:
            start.make_buffers(model, device, settings.seed, settings.weights, resumed=commits.resumed is not None)
        start.buffers_to(model, device, dtypes)
        if commits.resumed is None:
            weights = settings.weights
            values = start.fill(
                model,
                groups,
                commits.arrays,
                from_meta=from_meta,
                seed=settings.seed,
                weights=weights,
                share=share,
                digest=ranks.sharing.size > 1,
            )
            ranks.sharing.agree("values of the model, before its first step", values, how=_ALIKE)
            ranks.agree("buffers of the model, before its first step", buffers.digest(), how=_ALIKE)
        else:
            _resume(groups, buffers, commits, progress, budget.disk_paths[0], apart=settings.sync_buffers == "own")
        tape = Tape(
            model,
            found,
            groups,
            settings.loss_fn if spans is None else spans.loss_fn(settings.loss_fn),
            seed=settings.seed,
            device=device,
            compile="inductor" if settings.compile is True else settings.compile or None,
            ulysses=None if spans is None else spans.ulysses,
            splits=settings.schedule in SPLIT,
            keeps=settings.recompute is not True,
            aliases=aliases,
        )
        undo.callback(tape.close)
        resources = EngineResources(
            groups=groups,
            tape=tape,
            buffers=buffers,
            commits=commits,
            optimizer=optimizer,
            progress=progress,
            description=description,
            runs={g.spec.index: hyper_runs(g, optimizer) for g in groups if g.spec.trainable},
            matrices=_matrices(groups, form),
            ranks=ranks,
            share=share,
            dealt=tuple(dealt),
            spans=spans,
            settings=settings,
            strands=description.get("strands", 1),
            device=device,
            streams=streams_for(device),
            scratch_paths=tuple(path.absolute() / SCRATCH for path in budget.disk_paths),
            users=users_of(commits.store, ranks),
            threads=numa.thread_count(device),
            machine=as_striped(_if_simulated(machine, ranks), commits.store, ranks.size),
            rate=rate_name(spec, precision),
        )
        undo.pop_all()
        return resources


def _if_simulated(machine: Machine | None, ranks: Ranks) -> Machine | None:
    """The machine; None, and a warning, where the library is missing, on any rank, that steps are simulated with."""
    missing = [why for why in ranks.gather_objects("simulator", why_none()) if why is not None]
    if machine is None or not missing:
        return machine
    log.warning("the plan is made without predictions: %s", missing[0])
    return None


def _resume(
    groups: Sequence[ParamGroup], buffers: Buffers, commits: Commits, progress: Progress, path: Path, *, apart: bool
) -> None:
    """Go on from the commit that was found. ``apart``: each rank has buffers of its own; else all had the same ones, or
    had their own so far."""
    assert commits.resumed is not None
    progress.check(commits.resumed, f"the last commit in {path}")
    for group in groups:
        group.detach(commits.arrays.dtype, commits.arrays.device)
    buffers.read(commits.slots.read)
    if not apart and buffers.take_first(commits.ranks) and commits.ranks.rank == 0:
        log.warning("%s: %s", path, FIRST_BUFFERS)
    progress.adopt(commits.resumed)
    log.warning("continuing the store in %s from step %d", path, progress.step)


def optimizer_for(spec: OptimizerSpec, groups: Sequence[ParamGroup]) -> StreamedOptimizer:
    """The optimizer of all that is trained in these groups.

    Raises:
        ConfigError: as ``StreamedOptimizer``.
    """
    trained = [(s.name, s.parameter) for g in groups for s in g.slices if s.trainable]
    matrices = {id(s.parameter) for g in groups if g.spec.whole for s in g.slices if s.trainable}
    return StreamedOptimizer(spec, trained, matrices)


def check_rules(model: nn.Module, spec: OptimizerSpec, precision: Precision) -> None:
    """As ``wrap`` does, before anything is made for the model.

    Raises:
        ConfigError: an override of the optimizer, or one of its rules by name, finds no parameter of the model.
        ModelError: the model is one that ``wrap`` refuses.
    """
    form = Format.of(precision, spec.moment_count, spec.moments, spec.whole)
    groups = group_parameters(model, find_blocks(model), form=form)
    optimizer_for(spec, groups)
    _matrices(groups, form)


def _matrices(groups: Sequence[ParamGroup], form: Format) -> dict[int, Sequence[tuple[ParamSlice, Sequence[Piece]]]]:
    """``EngineResources.matrices``.

    Raises:
        ConfigError: a rule by name that finds nothing.
    """
    rule = form.whole
    if rule is None:
        return {}
    found = {g.spec.index: [s for s in g.slices if s.trainable] for g in groups if g.spec.whole}
    names, all_names = ([s.name for own in each for s in own] for each in (found.values(), [g.slices for g in groups]))
    of_split = {id(rule.split_of(name)) for name in names}
    for split in rule.splits:
        if id(split) not in of_split:
            raise ConfigError(
                f"split match={split.match!r} is the first match of no matrix that Muon steps; names are like "
                f"{', '.join(names[:3]) or 'none, as blocks have no trained matrices'}"
            )
    if rule.elementwise is not None and not any(map(rule.leaves, all_names)):
        raise ConfigError(
            f"elementwise={rule.elementwise!r} finds no parameter; names are like {', '.join(all_names[:3])}"
        )
    return {g: [(s, pieces(s.name, s.shape, rule)) for s in own] for g, own in found.items()}


def _digest(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())


def hyper_runs(group: ParamGroup, optimizer: StreamedOptimizer) -> tuple[Run, ...]:
    """Ranges of a group's buffer by torch param group; padding goes with what precedes it."""
    runs: list[list[int]] = []
    for s in (s for s in group.slices if s.trainable):
        hyper = optimizer.group_of(s.parameter)
        if runs and runs[-1][2] == hyper:
            continue
        if runs:
            runs[-1][1] = s.offset
        runs.append([s.offset, group.spec.trainable, hyper])
    return tuple((first, end, hyper) for first, end, hyper in runs)
