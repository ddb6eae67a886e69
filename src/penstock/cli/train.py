"""``penstock train``: from a settings file to a trained model, step by step, with everything it did written down."""

import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from penstock import files
from penstock.cli.account import Stretch
from penstock.cli.changed import changed, without_effect
from penstock.cli.claim import is_complete
from penstock.cli.deterministic import deterministic_kernels
from penstock.cli.disk_summary import allowed_per_day, cost_of_a_kill, space
from penstock.cli.durable import in_words, with_durability
from penstock.cli.environment import write_environment
from penstock.cli.joint import Joint, joint
from penstock.cli.kept_files import KeptFiles, kept_of, vouched_by
from penstock.cli.launch import launched
from penstock.cli.loop import report_last, run_steps
from penstock.cli.model import RunModel, resumed_model, run_model
from penstock.cli.out_of_memory import explain
from penstock.cli.run_data import data_in, in_steps, look_ahead
from penstock.cli.run_folder import Start, as_cut_before, model_folder, write_settings
from penstock.cli.run_snapshots import newest, record_kept, strands_kept
from penstock.cli.schedule_file import read_world
from penstock.cli.settings import plain
from penstock.cli.showing.display import Display, choose_display
from penstock.cli.showing.meter import Meter, Outline
from penstock.cli.showing.pace import Pace
from penstock.cli.showing.summary import closing, opening, resident_bytes
from penstock.cli.showing.yardstick import Yardstick, yardstick
from penstock.cli.split import Cut, check_goes_on, check_shared, cut_batch
from penstock.config import Family, Precision, RunConfig, TrainConfig, fields_of, format_size
from penstock.config.optimizer import OptimizerSpec
from penstock.config.sizes import format_parameters
from penstock.data.apart import check_keeps_apart
from penstock.data.batches import Batches, HeldOut
from penstock.data.opening import Data
from penstock.data.summary import summary_of
from penstock.engine.arguments import WrapArguments, check_compile
from penstock.engine.device import kind_of, name_of, resolve_device
from penstock.engine.engine import Engine
from penstock.engine.profile import may_measure, profile_of, with_link
from penstock.engine.resources import check_rules
from penstock.engine.start import WeightSource
from penstock.engine.wrap import wrap_among
from penstock.errors import BudgetError, ConfigError, StoreError, is_out_of_memory
from penstock.hardware.machine import DeviceKind, Machine
from penstock.hardware.profiles import check_can_be_saved, find_profile, save_profile, why_none, with_known_links
from penstock.hardware.sharing import knows_ranks
from penstock.hf.lora import BaseWeights
from penstock.hf.models.shell import parameter_count
from penstock.loss.tiled import plain_head, tiled_loss
from penstock.optim.facade import rate_name
from penstock.planner.durability import Weighed
from penstock.ranks.group import Ranks
from penstock.report.sentence import format_time
from penstock.schedule.ir.ops import Schedule
from penstock.state.memory import watching
from penstock.store.facts import facts_of_all


def train(config: TrainConfig, start: Start, *, own_code: bool = False) -> int:
    """Carry out a run and return the exit code: 0, or 128 plus the signal that ended it early.

    0 also where there is nothing to carry out, as the run to go on with is complete. ``own_code``: whether this command
    itself says that Python code in the run's folder may run, should the run go on.

    Raises:
        ConfigError, BudgetError, ModelError, StoreError, NonFiniteError: as they come.
        MemoryError: no memory was left, of the device's or the process's memory.
    """
    check_compile(config.compile)  # before the data are read
    display = choose_display(sys.stdout)
    optimizer = config.optimizer.spec
    with (
        deterministic_kernels(config.deterministic),
        launched(config.device, config) as ranks,
    ):
        if start != "resume":  # a run that goes on has more to say
            check_shared(config, ranks.size)
        ranks.agree_on_each({key: repr(value) for key, value in plain(config).items()})
        schedule = ranks.jointly("the schedule", lambda: _schedule(config.schedule, ranks.size))
        with joint(ranks, config, start) as run:
            if run.is_complete:
                display.say(is_complete(config, run.step or 0, ranks.size, ranks.hosts))
                return 0
            try:
                return _start(config, display, run, optimizer, schedule, own_code=own_code)
            except BaseException as error:
                if is_out_of_memory(error):
                    said = explain(error, config, ranks=ranks.size, hosts=ranks.hosts, begun=run.has_steps)
                    raise MemoryError(said) from error
                raise


def _start(
    config: TrainConfig,
    display: Display,
    run: Joint,
    optimizer: OptimizerSpec,
    schedule: Family | Schedule,
    *,
    own_code: bool,
) -> int:
    """The run from its model to its end. The folder changes as late as possible: what is wrong with the settings
    comes out before."""
    new, ranks = run.step is None, run.ranks
    position: Mapping[str, Any] | None = None
    if new:
        check_shared(config, ranks.size)
        model = run_model(config.model, config.data)
    else:
        config = ranks.once("settings of the run before", lambda: _as_before(config, ranks.size))
        check_shared(config, ranks.size)
        position = ranks.once("files of the run", lambda: _require_kept(config, run.folder, ranks))
        in_store = bool(config.budget.disk_paths)
        model = resumed_model(model_folder(run.folder), config.model, config.data, in_store=in_store, own_code=own_code)
    if config.data.packing is True:
        check_keeps_apart(model.model)
    trained = _trained(model, config)
    check_rules(trained[0], optimizer, _precision(config))
    if config.loss_tile is not None:
        plain_head(trained[0], config.loss_tile)  # now, and not when all weights are in the store
    among = ranks.size // ranks.hosts
    profile = ranks.once("machine", lambda: profile_for_plan(config, display, among))
    profile = with_link(profile, ranks, config.budget.disk_paths, resolve_device(config.device))
    known = ranks.size == 1 or (profile is not None and knows_ranks(profile, ranks.size, ranks.hosts, config.copies))
    machine = profile if known else None
    kind, precision = device_kind(config.device), _precision(config)  # what follows depends on what is free just now
    cut = ranks.once("cut", lambda: cut_batch(config, schedule, machine, kind, ranks.size, ranks.hosts))
    for words in without_effect(trained[0], config, cut.size):
        display.say(words)
    config, weighed = ranks.once(
        "durability", partial(with_durability, config, schedule, machine, cut, ranks.size, ranks.hosts)
    )
    if new:
        config = replace(config, precision=precision)  # wherever it goes on
        run.check_room(config, trained[0], kind)
        run.look_ahead(partial(look_ahead, config, display, model, cut, kind, ranks))
        run.begin(config)
    else:
        cut = replace(cut, reason="as the run began")
    make_engine = partial(_engine, ranks, *trained, optimizer, config, schedule, profile, run.folder)
    measure = yardstick(config, machine, kind=device_kind(config.device), hosts=ranks.hosts)
    data = ranks.after_first("data", lambda: _open_data(config, display, run, model, position, new=new))
    ranks.agree("data", data.identity.fingerprint)
    kept = ranks.once("what the run keeps", lambda: _keep(config, run.folder, data))
    count = parameter_count(model.model)
    return _train(config, display, run, make_engine, count, data, kept, cut, measure, weighed, profile)


def _as_before(config: TrainConfig, ranks: int) -> TrainConfig:
    """The settings of a run that goes on, cut as it was so far. Where it goes on from a snapshot its gradients are
    summed as they were, too, by any number of ``ranks`` that can.

    Raises:
        ConfigError: its settings cannot be read, or so many ranks cannot go on from its snapshot.
        StoreError: its snapshot cannot be read.
    """
    config = as_cut_before(config)
    had = None if config.budget.disk_paths else strands_kept(Path(config.run))
    if had is None:
        return config
    check_goes_on(config, had, ranks)
    return (
        config
        if config.strands is not None or had == config.sharing(ranks) * config.cp
        else replace(config, strands=had)
    )


def _require_kept(config: TrainConfig, folder: Path, ranks: Ranks) -> Mapping[str, Any] | None:
    """Check the files that a run keeps, before it goes on and reads any: those that are there have not changed since it
    began. Only prepared data may be missing: it is made again. Returns the position that the last commit has.

    Raises:
        StoreError: a file has changed, or is gone that cannot be made again.
    """
    if stores := config.budget.stores(ranks.size, ranks.hosts):
        facts = facts_of_all(stores[: ranks.size // ranks.hosts])
        record = None if facts is None else facts.record
    else:
        record = record_kept(folder)
    place = config.data.prepared_in(folder)
    kept_of(folder, vouched_by(record)).require(folder, place, missing_in=(place, place.resolve()))
    return None if record is None else record.get("position")


def _keep(config: TrainConfig, folder: Path, data: Data) -> str:
    """From now on the run keeps what is there, which is flushed; returns its digest.

    Raises:
        StoreError: it goes on, and what was gone and has been made again is not what it was.
    """
    kept, place = KeptFiles.read(folder), config.data.prepared_in(folder)
    if kept is None:
        kept = KeptFiles.of(folder, place, [model_folder(folder), *data.folders])
        kept.write(folder)
    elif (found := next(kept.damage(folder, place), None)) is not None:
        raise StoreError(
            f"{found}, although it was made again from the same data in the same way: is another version of the "
            "tokenizer's library installed? Put back the one that was"
        )
    return kept.digest


def _train(
    config: TrainConfig,
    display: Display,
    run: Joint,
    make_engine: Callable[[], Engine],
    parameters: int,
    data: Data,
    kept: str,
    cut: Cut,
    measure: Yardstick,
    weighed: Weighed | None,
    profile: Machine | None,
) -> int:
    """The run in a folder that is its own."""
    config, folder, ranks = in_steps(config, data), run.folder, run.ranks
    display.say(opening(config, summary_of(data, config.data.sequence_length), parameters))
    own = resident_bytes()
    with ExitStack() as after, ExitStack() as stack:
        text = f"Preparing {format_parameters(parameters)} and their optimizer state"
        with display.working(text) as note, _memory_shown(note):
            engine = stack.enter_context(make_engine())
        run.state_made()
        if not config.budget.disk_paths:
            _load_newest(engine, run)
        display.say(_place(config, ranks, weighed))
        config, batches, validation = _settle(config, display, engine, data, cut, ranks)
        _say_what_to_expect(config, display, engine, weighed)
        outline = Outline(
            steps=config.step_count,
            parameters=parameters,
            given={"device": engine.budget.device_bytes, "host": engine.budget.host_bytes},
            ranks=ranks.size,
            hosts=ranks.hosts,
            first=engine.step_count,
            yardstick=replace(measure, allowed=allowed_per_day(config.budget, ranks.size, ranks.hosts)),
        )
        stretch = Stretch(
            config=config,
            folder=folder,
            ranks=ranks,
            display=display,
            engine=engine,
            after=after,
            kept=kept,
            train=batches,
            validation=validation,
            first=engine.step_count,
            meter=Meter(outline=outline),
            pace=Pace(),
        )
        missed = report_last(stretch)
        if engine.step_count >= config.step_count:
            display.say(is_complete(config, engine.step_count, ranks.size, ranks.hosts))
            return 0
        code = run_steps(stretch, missed, partial(_write_down, stretch, profile))
    if ranks.rank == 0:
        _say_what_came_of_it(stretch, own, stopped=code != 0)
    return code


def _write_down(stretch: Stretch, profile: Machine | None) -> None:
    """Write down the settings, and the machine, that the run goes on with from here."""
    config, folder, ranks = stretch.config, stretch.folder, stretch.ranks
    ranks.once("settings of the run", lambda: write_settings(folder, config))
    if ranks.rank == 0:
        write_environment(folder, name_of(resolve_device(config.device)), profile)


def _place(config: TrainConfig, ranks: Ranks, weighed: Weighed | None) -> str:
    """The place of the state, and what a kill costs as far as that is known before there is a plan."""
    words, cost = space(config.budget, ranks.size, ranks.hosts, ranks.host), cost_of_a_kill(config.budget, None)
    return words if cost is None else f"{words}; {cost}{in_words(config, weighed)}"


def _say_what_to_expect(config: TrainConfig, display: Display, engine: Engine, weighed: Weighed | None) -> None:
    """Say what follows from the plan: what a kill costs, where only that tells, and the time of a step."""
    if cost_of_a_kill(config.budget, None) is None:
        display.say(f"As planned, {cost_of_a_kill(config.budget, engine.plan)}{in_words(config, weighed)}")
    if engine.expected_seconds is not None:
        share = engine.expected_runs - 1
        twice = f", {share:.0%} of the steps run twice" if share else ""
        said = f"{format_time(engine.expected_seconds)} a step predicted{twice}"
        display.say(f"{said}, from the model's own stages as they were timed here")


def _say_what_came_of_it(stretch: Stretch, own: int, *, stopped: bool) -> None:
    """Say the last words of a run. ``own``: bytes that were resident before there was a model."""
    config, folder = stretch.config, stretch.folder
    stays = bool(config.budget.disk_paths) or config.budget.durability != "none"
    words = closing(stretch.meter, own_bytes=own, folder=folder, trace=stretch.trace, stopped=stopped, kept=stays)
    stretch.display.say(words)
    if stays:
        again = shlex.quote(str(folder))
        stretch.display.say(f"export   penstock export {again} OUT writes the model as a Hugging Face folder")


def _load_newest(engine: Engine, run: Joint) -> None:
    """Go on from the newest snapshot in the folder of a run that has no disk.

    Raises:
        StoreError: the run has steps, and its snapshot is gone.
    """
    snapshot = run.ranks.once("snapshot to go on from", lambda: newest(run.folder))
    if snapshot is not None:
        engine.load(snapshot)
    elif run.step is not None:
        raise StoreError(f"{run.folder}: the snapshot went away while the run was started: start it again")


def _settle(
    config: TrainConfig, display: Display, engine: Engine, data: Data, cut: Cut, ranks: Ranks
) -> tuple[TrainConfig, Batches, HeldOut | None]:
    """Plan for the batch as it is to be cut; in smaller pieces where the model needs more than was expected of it.

    Raises:
        BudgetError: it does not fit, and there are no smaller pieces to try.
    """
    for size in (cut.size, *cut.smaller):
        config = replace(config, micro_batch_size=size)
        batches, validation = _batches(config, data, ranks)
        words = cut.words(config.sequences_per_step) if size == cut.size else f"micro-batches of {size} instead"
        try:
            with display.working(f"Planning a step of {words}") as note, _memory_shown(note):
                engine.prepare(batches.largest())
        except BudgetError as error:
            if not [smaller for smaller in cut.smaller if smaller < size]:
                raise
            display.say(f"Micro-batches of {size} sequences do not fit after all: {error}")
        else:
            return config, batches, validation
    raise AssertionError("the last size is tried or raises")


def _memory_shown(note: Callable[[str], None]) -> AbstractContextManager[None]:
    """Within, ``note`` is told how much memory is there of what is to be page-locked."""
    done = 0

    def faulted(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        note(f"{format_size(done)} of host memory to page-lock")

    return watching(faulted)


def _open_data(
    config: TrainConfig,
    display: Display,
    run: Joint,
    model: RunModel,
    position: Mapping[str, Any] | None,
    *,
    new: bool,
) -> Data:
    """The run's data. The folder of a ``new`` run keeps the model's configuration and the tokenizer from now on."""
    data = data_in(run.folder, config, display, model, position)
    if new and run.ranks.rank == 0:
        own = config.data.tokenizer is None and config.data.chat_template is None
        tokenizer = None if own else data.tokenizer
        model.keep(model_folder(run.folder), _precision(config), config.model.path, tokenizer)
    return data


def _precision(config: TrainConfig) -> Precision:
    """The one that counts where none is named."""
    return config.precision_on(device_kind(config.device))


def _schedule(asked: Family | Path, ranks: int) -> Family | Schedule:
    """A family by its name, or the schedule that a file holds for so many ranks, checked.

    Raises:
        ConfigError: the file cannot be read, or it holds no schedule for all ranks that keeps the rules.
    """
    if not isinstance(asked, Path):
        return asked
    world = read_world(asked)
    if len(world.ranks) != ranks:
        raise ConfigError(f"schedule={str(asked)!r} is for {len(world.ranks)} ranks: this is {ranks}")
    if any(schedule != world.ranks[0] for schedule in world.ranks):
        raise ConfigError(f"schedule={str(asked)!r}: ranks that share the state do the same: write it once, for all")
    return world.ranks[0]


def profile_for_plan(config: TrainConfig, display: Display, ranks: int = 1) -> Machine | None:
    """The profile to plan for: the one that is stored, else a quick one that is made and stored now, also of what so
    many ``ranks`` send each other. Of a GPU's optimizers only the run's own is measured, as each has kernels to be
    compiled. None: there is to be none, or nothing may be measured (``engine.profile.may_measure``)."""
    if config.plan is None:
        return None
    paths, device = config.budget.disk_paths, resolve_device(config.device)
    kind, name = kind_of(device), None if device.type == "cpu" else name_of(device)
    found = find_profile(paths, kind=kind, device=name)
    steps = rate_name(config.optimizer.spec, _precision(config))
    if found is None:
        from penstock.doctor import examine

        other = " for this kind of device" if find_profile(paths) is not None else ""
        why = why_none(paths, kind=kind, device=name) or f"This machine has no profile{other} yet"
        if not may_measure():
            display.say(f"{why[0].upper()}{why[1:]}, and PENSTOCK_MEASURE=never: nothing is predicted")
            return None
        among = (ranks,) if ranks > 1 and kind == "cpu" else ()
        existing = dict.fromkeys(map(files.nearest_folder, paths))
        try:
            check_can_be_saved()
            display.say(f"{why[0].upper()}{why[1:]}: measuring it, once (penstock doctor does it more thoroughly)")
            found = examine.examine(list(existing), examine.QUICK, device, display.working, among, steps)
            save_profile(with_known_links(found))
        except ConfigError as error:
            raise ConfigError(f"{error}. Or train without a prediction, which measures nothing: --plan null") from None
        found = find_profile(paths, kind=kind, device=name)
    elif kind != "cpu" and steps not in found.device.optimizer:
        found = profile_of(paths, device, steps)
    return found


def device_kind(asked: str | None) -> DeviceKind:
    """The kind of the device that a run computes on."""
    return kind_of(resolve_device(asked))


def _trained(model: RunModel, config: TrainConfig) -> tuple[nn.Module, WeightSource | None]:
    """The module to train, and its values' source; None: it initialises itself."""
    weights = model.weights
    if config.lora is not None and weights is not None:
        weights = BaseWeights(weights)
    return changed(model.model, config), weights


def _engine(
    ranks: Ranks,
    model: nn.Module,
    weights: WeightSource | None,
    optimizer: OptimizerSpec,
    config: TrainConfig,
    schedule: Family | Schedule,
    profile: Machine | None,
    run: Path,
) -> Engine:
    asked = WrapArguments(
        weights=weights,
        optimizer=optimizer,
        loss_fn=None if config.loss_tile is None else tiled_loss(config.loss_tile),
        run=run,
        **fields_of(config, RunConfig)
        | {
            "budget": config.budget if config.budget.disk_paths else replace(config.budget, durability="none"),
            "schedule": schedule,
            "plan": profile,
            "replan": None if profile is None else config.replan,
        },
    )
    return wrap_among(ranks, model, asked)


def _batches(config: TrainConfig, data: Data, ranks: Ranks) -> tuple[Batches, HeldOut | None]:
    """Training sequences in random order, held-out ones in the order of the documents."""
    how: dict[str, Any] = {
        "packing": config.data.packing,
        "length": config.data.sequence_length,
        "pad": data.pad,
        "sequences_per_step": config.sequences_per_step,
        "micro_batch_size": config.split[0],
        "fingerprint": data.identity.fingerprint,
        "rank": ranks.sharing.rank // ranks.cp,
        "ranks": ranks.sharing.size // ranks.cp,
    }
    held_out = None if data.validation is None else HeldOut(stream=data.validation, **how)
    return Batches(stream=data.train, **how), held_out
