"""``transformers.Trainer`` on the engine: the library's own loop, whose steps, evaluation and state are the engine's.

    training_step      collects a micro-batch; at the last of an optimizer step the engine takes them all
    optimizer.step     checks that it has
    prediction_step    the library's own, run by the engine as the loss of one micro-batch in evaluation mode
    checkpoint-N/      the model as ``save_pretrained`` writes it, and beside it a snapshot of the engine

A micro-batch goes through the engine as a mapping that also carries a ``Piece``: what to compute, and what came of it.
A batch that is no mapping is one entry of such a mapping. Of ranks that take batches together (``joint``) each is told
what came of those that it was dealt.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers
from torch import nn

from penstock.compat.accelerate import deal_neighbours, keep_processes, leave_model, note_gathered, note_skipped
from penstock.compat.transformers import REPLACED, TrainerSteps
from penstock.config import fields_of
from penstock.engine import start
from penstock.engine.arguments import LoopArguments, WrapArguments
from penstock.engine.engine import Engine
from penstock.engine.wrap import wrap_among
from penstock.errors import ConfigError, ModelError
from penstock.hf import changes, checkpoint, joint
from penstock.hf.engine_arguments import EngineArguments
from penstock.hf.evaluation import INSTEAD, Evaluation, EvaluationSteps
from penstock.hf.lora import BaseWeights
from penstock.hf.models.adapters import check_adapters, has_adapters
from penstock.hf.pieces import Loss, Notes, as_micro_batch, current_notes, loss_of_piece, notes_of, of_spans
from penstock.hf.trainer_optimizer import optimizer_of, precision_of
from penstock.hf.training_arguments import (
    check_arguments,
    check_limit,
    check_trainer,
    is_of_library,
    limit_of,
    refuse_foreign,
)
from penstock.loss.tiled import in_tiles
from penstock.optim.driven import DrivenOptimizer
from penstock.ranks.group import ALONE, Ranks
from penstock.ranks.process_groups import join
from penstock.state.stats import StepStats
from penstock.tape import trees
from penstock.tape.guard import guard

T = TypeVar("T")

_REPLACED = ("training_step", "create_optimizer", *REPLACED)


class EngineMixin(EvaluationSteps):
    """Puts the training of a ``transformers.Trainer`` (named after it among the bases) on the engine.

    Takes one more keyword argument than the class that it is mixed into: ``engine``, an ``EngineArguments``.
    ``compute_loss``, of the library or of a subclass, is called for each micro-batch, and once or twice more: when a
    plan is made for micro-batches of a new shape, and when a step is run again because its norm was over the limit.

    Raises:
        ConfigError: an argument cannot be honoured; it is named, and what to do.
    """

    losses_of_spans: tuple[Any, ...] = (transformers.Trainer.compute_loss,)
    """forms of ``compute_loss`` that give a span of sequences its part of their loss"""
    keeps_books = False
    """a loss of TRL's may make notes on ``self``, which are kept by forward"""
    exact_entries: tuple[str, ...] = ()
    """names of a batch's entries that the loss alone reads, in their own precision; labels are so in any case"""

    def __init__(self, *args: Any, engine: EngineArguments, **kwargs: Any) -> None:
        of_trl = next((base for base in type(self).__mro__ if base.__module__.partition(".")[0] == "trl"), None)
        if of_trl is not None and not self.keeps_books:
            raise ConfigError(
                f"{of_trl.__name__} is one of TRL's trainers that EngineMixin cannot put on the engine: those that can "
                "be are penstock.hf.SFTTrainer, DPOTrainer, KTOTrainer and RewardTrainer. Use one of these, or derive "
                "from it"
            )
        self.check_given(self._named(inspect.signature(super().__init__).bind(*args, **kwargs)))
        for name in _REPLACED:
            behind = getattr(super(TrainerSteps, self), name)
            if not is_of_library(behind):
                raise ConfigError(
                    f"{behind.__qualname__} cannot be honoured: the engine's own comes before it. Override it in the "
                    "class that EngineMixin is a base of, where super() is the engine's, or, for a loss, compute_loss"
                )
        self._engine_arguments = engine
        self._engine: Engine | None = None
        self._ranks: Ranks = ALONE  # until there is an engine, whose ranks they are
        self._has_neighbours = False  # how the data for training are dealt out
        self._collected: list[tuple[Any, Loss, float]] = []  # batches of the step that is begun, with weights
        self._stats: StepStats | None = None
        self._limit: float | None = None  # of the norm, once there is an engine
        self._settings: Mapping[str, Any] = {}  # of the engine's optimizer, as they were when it was made
        self._driven: DrivenOptimizer | None = None  # that optimizer in the loop's hands
        self._evaluation = Evaluation()
        self._resumes: Path | None = None
        self._written: Path | None = None  # the checkpoint that was begun last
        self._dtypes: Mapping[str, torch.dtype] = {}  # of parameters as they were given, if they had values
        try:
            super().__init__(*args, **kwargs)
            brought = (self.optimizer, getattr(self.lr_scheduler, "optimizer", self.lr_scheduler))
            foreign = tuple(part for part in brought if not isinstance(part, DrivenOptimizer))
            refuse_foreign({"optimizers": foreign, "model_init": self.model_init})
            self._check()
        except BaseException:
            self._close_engine()  # nobody has the trainer that could end it
            raise

    def _named(self, given: inspect.BoundArguments) -> dict[str, Any]:
        """Arguments of the constructor by their names; those that it only hands on (``*args``, ``**kwargs``), by the
        names that the library has for them."""
        found: dict[str, Any] = {}
        for name, value in given.arguments.items():
            kind = given.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                found |= value
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                library = next(base for base in type(self).__mro__ if is_of_library(base))
                left = [name for name in inspect.signature(library).parameters if name not in found]
                found |= zip(left, value, strict=False)
            else:
                found[name] = value
        return found

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Refuse arguments of the constructor, by their names, before data sets are prepared."""
        refuse_foreign(given)
        if given.get("args") is not None:
            check_arguments(given["args"])

    def _check(self) -> None:
        """Refuse what cannot be honoured, as the library has filled it in, or a program has set since."""
        check_trainer(self, self._engine_arguments.cp)
        if self._engine is not None:
            changes.check_model(self.model, self._engine.model)

    # ---- the engine

    def create_accelerator_and_postprocess(self) -> None:
        """The library's own, which must neither wrap the model for several processes, nor move it, nor gather in a
        forward, and must leave their group as it is at the end."""
        super().create_accelerator_and_postprocess()
        leave_model(self.accelerator)
        keep_processes(self.accelerator)
        note_gathered(self.accelerator, self._keep_gathered)

    def _keep_gathered(self, gathered: Any, counted: bool) -> bool:
        """As ``note_gathered`` has it. Each process runs its forwards when the engine's schedule says so, and may run
        some again."""
        if self.args.world_size > 1 and self.is_in_forward():
            raise ModelError(
                "compute_loss gathers from other processes (accelerator.gather), whose forwards do not run at the same "
                "time: let it use what this process has alone"
            )
        return False

    @property
    def engine(self) -> Engine:
        """The engine that holds the model's state; made when it is first needed, and open until ``end``. Of several
        processes all come here, and make one together.

        Raises:
            ConfigError: ``model`` was replaced since.
        """
        if self._engine is None:
            self._engine = self._open_engine()
        changes.check_model(self.model, self._engine.model)
        return self._engine

    def _open_engine(self) -> Engine:
        self._check()  # TRL may ask for it before it is done with its constructor
        model, device = self.model, self.args.device
        assert isinstance(model, nn.Module)
        model.zero_grad()  # as the library's own ``train`` does
        asked = self._asked(model)
        ranks = join(joint.mesh_of(self._engine_arguments, int(self.args.world_size), device.type), device)
        try:
            with ranks.together("wrap"):
                if self._resumes is not None:
                    look = partial(checkpoint.look_into, self._resumes, model, asked, ranks)
                    ranks.jointly("checkpoint to go on from", look)
                if ranks.hosts > 1 and self.args.save_on_each_node:
                    raise ranks.of_all(
                        ConfigError(
                            "save_on_each_node=True: all hosts see output_dir, and one rank writes there: leave it out"
                        )
                    )
                self._on_each_host(ranks, checkpoint.to_replace)
            engine = wrap_among(ranks, model, asked, partial(self._on_each_host, ranks, checkpoint.make_room))
        except BaseException:
            ranks.close()
            raise
        self._ranks = ranks
        checkpoint.name_run(engine, ranks)
        guard(engine.model, INSTEAD)
        return engine

    def _on_each_host(self, ranks: Ranks, see_to: Callable[..., object]) -> None:
        given = self._engine_arguments
        for host in range(ranks.hosts):  # in turn: they may see the same directories
            its = ranks.host == host and ranks.is_first_on_host
            call = partial(see_to, self._resumes, given.budget, overwrite=given.overwrite)
            ranks.jointly("room for the state", call if its else lambda: None)

    def _asked(self, model: nn.Module) -> WrapArguments:
        """The engine that the arguments ask for. Takes note of the dtypes that the model is given in."""
        if not start.built_on_meta(model):
            self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        given = self._engine_arguments
        weights, self._limit, self._settings = given.weights, limit_of(self.args), changes.settings_of_optimizer(self)
        if weights is not None and hasattr(model, "peft_config"):
            weights = BaseWeights(weights)
        return WrapArguments(
            optimizer=optimizer_of(self, given.moments),
            precision=precision_of(self.args, model),
            clip_grad_norm=self._limit,
            device=self.args.device,
            loss_fn=loss_of_piece,
            seed=self.args.seed,
            **fields_of(given, LoopArguments) | {"weights": weights},
        )

    def end(self) -> None:
        """Close the engine, then what the library closes. The model's parameters are placeholders from here on.

        While an error is under way (``finally``, ``except``) other ranks are told it, and what is not committed by then
        is not: as where an error leaves the ``with`` of an engine.
        """
        self._close_engine()
        super().end()  # type: ignore[no-untyped-call]

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.__exit__(*sys.exc_info())  # an error of this rank's: others may wait for it elsewhere

    # ---- training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """The library's own ``train``. With ``resume_from_checkpoint=True`` the last complete checkpoint is taken.

        Raises:
            ConfigError: a callback looks at gradients, which there are none of between steps; checkpoints are to be
                saved of a model that cannot be; or a checkpoint is to be resumed and none is complete.
            ModelError: the model has adapters that could not be saved.
        """
        self._check()
        check_adapters(self.model)
        written = isinstance(self.model, transformers.PreTrainedModel) or has_adapters(self.model)
        if self.args.save_strategy != "no" and not written:
            raise ConfigError(
                f"checkpoints were asked for, and {type(self.model).__name__} is no model of transformers: set "
                "save_strategy='no', and call trainer.engine.save(path)"
            )
        if resume_from_checkpoint is True:
            resume_from_checkpoint = checkpoint.last_complete(Path(str(self.args.output_dir))) or True
        for callback in self.callback_handler.callbacks:
            if type(callback).on_pre_optimizer_step is not transformers.TrainerCallback.on_pre_optimizer_step:
                raise ConfigError(
                    f"{type(callback).__name__}.on_pre_optimizer_step cannot be honoured: it is for looking at "
                    "gradients, and these have become the update by then. Use on_step_end, and the logged grad_norm"
                )
        self._collected.clear()  # by a run that was ended within a step
        asked = self.args.activation_checkpointing
        self.args.activation_checkpointing = False  # honoured by the engine; the library would do it once more
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.activation_checkpointing = asked
            # Also where it has failed: what comes next is no run of that checkpoint's.
            self._resumes = self._written = None

    def get_train_dataloader(self) -> Any:
        """The library's own, of several processes so that a step's micro-batches are in the order of one process."""
        loader = super().get_train_dataloader()
        self._has_neighbours = deal_neighbours(loader, self.args.gradient_accumulation_steps)
        return loader

    def at_a_time(self, of_ranks: Sequence[Sequence[T]]) -> list[Sequence[T]]:
        """All that ranks have of each micro-batch of the step just taken, by the micro-batches that ranks have at the
        same time when the library deals them out.
        """
        if not self._has_neighbours:
            return list(zip(*of_ranks, strict=True))
        in_order = [found for rank in of_ranks for found in rank]
        return [in_order[i : i + len(of_ranks)] for i in range(0, len(in_order), len(of_ranks))]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The engine's optimizer, which the library's loop and learning rate schedules take for one of torch's."""
        if self.optimizer is None:
            changes.check_not_renewed(self._driven)
            streamed = self.engine.optimizer
            changes.check_settings(changes.settings_of_optimizer(self), self._settings)
            self.optimizer = self._driven = DrivenOptimizer(streamed, self._finish_step)
        changes.check_optimizer(self.optimizer, self._driven)
        return self.optimizer

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Collect a micro-batch. The last of an optimizer step returns the loss of them all, the others zero.

        By then the step has happened: callbacks that are called before ``optimizer.step`` come after it.
        """
        changes.check_model(model, self.engine.model)
        model.train()
        dealt = self.current_gradient_accumulation_steps

        def loss(of: nn.Module, prepared: Any) -> torch.Tensor:
            notes = current_notes()
            assert notes is not None
            notes.dealt = dealt
            with self.compute_loss_context_manager(), self.tiles(of):
                found = self.compute_loss(of, prepared, num_items_in_batch=num_items_in_batch)
            return cast(torch.Tensor, found)  # or whatever a user's own returns, which the engine says

        if len(self._collected) >= 2 * (asked := self.args.gradient_accumulation_steps):  # an epoch may leave some over
            raise ConfigError(
                f"gradient_accumulation_steps={asked}: the training data end before so many batches, so that no epoch "
                "ever takes a step: lower it, or give a dataset that has a length, or more data"
            )
        self._collected.append((inputs, loss, self._loss_weight(num_items_in_batch)))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        changes.check_optimizer(self.optimizer, self._driven)
        check_limit(self.args, self._limit)
        batches, losses, weights = zip(*self._collected, strict=True)
        self._collected.clear()

        def step(micro_batches: Sequence[dict[str, Any]], weights: Sequence[float]) -> None:
            self._stats = self.engine.step(micro_batches, loss_weights=weights, position=self.engine.position)

        self._after_notes(self._taken_by_engine(step, batches, losses, weights), batches)
        assert self._stats is not None
        return torch.tensor(self._stats.loss, device=self.args.device)

    def _taken_by_engine(
        self,
        take: Callable[[Sequence[dict[str, Any]], Sequence[float]], None],
        batches: Sequence[Any],
        losses: Sequence[Loss],
        weights: Sequence[float],
        way: str = "",
    ) -> list[Notes]:
        """Have the engine ``take`` batches, by their ``losses``, which compute in this ``way``; the notes of each.
        Other ranks' batches go by the loss of this one's at the same place."""
        assert self.engine is not None  # whose ranks take them
        together = joint.take_together(self._ranks)
        if together:
            with self._ranks.together("step"):
                own = list(zip(map(joint.to_tell, batches), weights, range(len(losses)), strict=True))
                batches, weights, places = zip(*joint.theirs(self._ranks, own), strict=True)
            losses = [losses[place] for place in places]
        exact = (*self.label_names, *self.exact_entries)
        micro_batches = [
            as_micro_batch(self.prepared(b), loss, way, exact) for b, loss in zip(batches, losses, strict=True)
        ]
        take(micro_batches, weights)
        notes: list[Notes] = [notes_of(micro_batch) for micro_batch in micro_batches]
        if not together:
            return notes
        with self._ranks.together("step"):
            found = [of_spans(of_one) for of_one in joint.given_back(self._ranks, notes, at_once=not way)]
        for note in found:
            note.result = trees.replace(note.result, lambda tensor: tensor.to(self.args.device))
        return found

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """The library's number of micro-batches that it deals out together. Within a forward that of its micro-batch,
        which may have been left by an epoch before."""
        notes = current_notes()
        return self._dealt if notes is None or notes.dealt is None else notes.dealt

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, count: int) -> None:
        self._dealt = count

    def tiles(self, model: nn.Module) -> AbstractContextManager[None]:
        tile = self._engine_arguments.loss_tile
        return nullcontext() if tile is None else in_tiles(model, tile)

    def _loss_weight(self, num_items_in_batch: Any) -> float:
        """The weight of a micro-batch's loss, as the library has it: losses that know the whole step's items add up.
        Those of several processes are averaged: the library multiplies those that know it by their number."""
        scaled: bool | None = self.loss_is_scaled_for_ga
        if scaled is None:
            knows = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = knows or self.compute_loss_func is not None
        each: float = 1.0 if scaled else 1.0 / self.current_gradient_accumulation_steps
        return each / int(self.args.world_size)

    def _taken(self) -> StepStats:
        """The engine's figures of the step that the loop is about to finish."""
        if self._stats is None:
            raise ModelError("training_step was overridden and did not call super().training_step: no step was taken")
        return self._stats

    def _finish_step(self) -> None:
        """Carry out ``optimizer.step``: the engine has taken the step already."""
        note_skipped(self.optimizer, self._taken().skipped)
        self._stats = None

    def norm_of_step(self) -> float:
        return self._taken().grad_norm

    def _after_notes(self, notes: list[Notes], batches: Sequence[Any]) -> None:
        """Take over the ``notes`` of each batch after a step; for subclasses whose loss keeps books."""

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The library's own. The engine is there first: the library would move the model to the device otherwise."""
        assert self.engine is not None
        self._check()
        return super().evaluation_loop(*args, **kwargs)

    def _take_losses(self, batches: Sequence[Any], losses: Sequence[Loss], way: str) -> list[Notes]:
        def evaluate(micro_batches: Sequence[dict[str, Any]], weights: Sequence[float]) -> None:
            self.engine.evaluate(micro_batches, loss_weights=weights)

        found = self._taken_by_engine(evaluate, batches, losses, [1.0] * len(batches), way)
        self._after_notes(found, batches)
        return found

    # ---- checkpoints

    def begin_checkpoint(self, folder: Path) -> None:
        if self._ranks.rank == 0 and folder != self._written:  # else it is of this step, and the same is written again
            checkpoint.unmark(folder)
        self._written = folder

    def flush_checkpoint(self, folder: Path) -> None:
        checkpoint.flush(folder)

    def save_whole(self, folder: Path) -> None:
        assert self.lr_scheduler is not None
        checkpoint.save(self.engine, folder, self._engine_arguments.budget, self._ranks)
        if self._ranks.rank == 0:
            torch.save(self.lr_scheduler.state_dict(), folder / checkpoint.SCHEDULER)

    def look_at(self, folder: Path) -> None:
        """Only looks: the weights are part of the snapshot, and come when there is an engine."""
        self._resumes = checkpoint.require(folder)

    def load_state(self, folder: Path) -> None:
        assert self.lr_scheduler is not None
        self.engine.load(folder / checkpoint.SNAPSHOT)
        self.lr_scheduler.load_state_dict(torch.load(folder / checkpoint.SCHEDULER, weights_only=True))

    def load_best(self) -> None:
        """Take over the best checkpoint: the library loads its weights, here the optimizer goes back with them.

        Raises:
            ConfigError: it was removed. The library only warns, and goes on with the last step's model.
        """
        assert self.state.best_model_checkpoint is not None
        best = Path(self.state.best_model_checkpoint)
        if not best.is_dir():
            raise ConfigError(
                f"load_best_model_at_end: {best} is not there any more. The model is that of the last step, and can be "
                "saved: trainer.save_model()"
            )
        self.engine.load(checkpoint.require(best) / checkpoint.SNAPSHOT)

    def write_model(self, folder: Path) -> None:
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        checkpoint.write_model(self.engine, folder, self._ranks, tokenizer, self._dtypes)
        if self._ranks.rank == 0:
            torch.save(self.args, folder / checkpoint.ARGUMENTS)
        self.wait_for_all()

    def wait_for_all(self) -> None:
        with self._ranks.together("save"):
            self._ranks.gather_objects("files of a checkpoint", None)


class Trainer(EngineMixin, transformers.Trainer):
    """``transformers.Trainer`` on the engine.

        trainer = penstock.hf.Trainer(
            model=model, args=TrainingArguments(...), train_dataset=...,
            engine=penstock.hf.EngineArguments(budget=penstock.Budget(device="8GiB", host="32GiB", disk="/ssd/run")),
        )
        trainer.train()
        trainer.save_model("out")
        trainer.end()

    Raises:
        ConfigError: an argument cannot be honoured; it is named, and what to do.
    """
