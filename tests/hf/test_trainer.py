"""``penstock.hf.Trainer`` runs transformers' own loop: it logs, saves and goes on from what the library's own does."""

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

import penstock
import penstock.hf
from penstock.hf import Trainer
from tests.library_runs import (
    CLOSE,
    StopAfter,
    arguments,
    check_kept_whole,
    check_same,
    check_same_weights,
    examples,
    in_memory,
    llama,
    on_disk,
    shown,
    tokenizer,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = examples(16)
HELD_OUT = examples(5)


def plain(folder: Path, model: Any = None, cls: Any = transformers.Trainer, given: Any = None, **settings: Any) -> Any:
    """The library's own run."""
    trainer = cls(
        model=model or llama(),
        args=arguments(folder / "plain", **settings),
        train_dataset=DATA,
        eval_dataset=HELD_OUT,
        **(given or {}),
    )
    trainer.train()
    return trainer


def on_engine(folder: Path, model: Any = None, cls: Any = Trainer, given: Any = None, **settings: Any) -> Any:
    """A trainer on the engine, whose store is in ``folder``."""
    return cls(
        model=model or llama(),
        args=arguments(folder / "engine", **settings),
        train_dataset=DATA,
        eval_dataset=HELD_OUT,
        **{"engine": on_disk(folder / "store")} | (given or {}),
    )


def streamed(folder: Path, model: Any = None, cls: Any = Trainer, given: Any = None, **settings: Any) -> Any:
    """The library's own run, on the engine."""
    trainer = on_engine(folder, model, cls, given, **settings)
    trainer.train()
    return trainer


def test_a_run_logs_and_learns_what_the_librarys_own_run_does(tmp_path: Path) -> None:
    """Steps of three micro-batches of unequal length, and one of two at the end of each epoch; evaluation between."""
    settings = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    theirs, mine = plain(tmp_path, **settings), streamed(tmp_path, **settings)
    check_same(shown(mine), shown(theirs))
    check_same_weights(mine.engine, theirs.model)
    assert mine.state.global_step == mine.engine.step_count == 6
    assert mine.state.total_flos == theirs.state.total_flos
    mine.end()


def test_a_gradient_from_before_has_no_part_in_a_run_as_in_the_librarys_own(tmp_path: Path) -> None:
    found = []
    for gradient in (None, 3.0):
        model = llama()
        if gradient is not None:
            model.lm_head.weight.grad = torch.full_like(model.lm_head.weight, gradient)
        trainer = streamed(tmp_path, model, given={"engine": in_memory()}, max_steps=1)
        trainer.end()
        found.append(shown(trainer))
    assert found[0] == found[1]


def test_an_optimizer_class_has_the_settings_that_the_librarys_own_run_gives_it(tmp_path: Path) -> None:
    """Its own learning rate where none is given, whatever the arguments say; their weight decay."""
    given = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"betas": (0.9, 0.95)})}
    theirs = plain(tmp_path, given=given, max_steps=4)
    mine = streamed(tmp_path, given=given | {"engine": in_memory()}, max_steps=4)
    check_same(shown(mine), shown(theirs))
    mine.end()


class EndsWithinAStep(transformers.TrainerCallback):
    """Ends the first epoch, or the first run, after one micro-batch of its second step."""

    def __init__(self, what: str = "should_training_stop") -> None:
        self.what = what
        self.done = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1 and not self.done:
            self.done = True
            setattr(control, self.what, True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("logging_steps", [1, 100])
@pytest.mark.parametrize("what", ["should_epoch_stop", "should_training_stop"])
def test_an_epoch_that_ends_within_a_step_leaves_its_micro_batches_to_the_next_one(
    what: str, logging_steps: int, tmp_path: Path
) -> None:
    """As the library has it. Where there is no next one, they count for nothing: the library adds their losses to the
    mean over steps, to which they do not belong."""
    theirs = plain(tmp_path, given={"callbacks": [EndsWithinAStep(what)]}, logging_steps=logging_steps)
    given = {"callbacks": [EndsWithinAStep(what)], "engine": in_memory()}
    mine = streamed(tmp_path, given=given, logging_steps=logging_steps)
    ends = what == "should_training_stop"
    assert mine.state.global_step == theirs.state.global_step == mine.engine.step_count == (1 if ends else 4)
    for (step, key, found), (their_step, their_key, wanted) in zip(shown(mine), shown(theirs), strict=True):
        assert (step, key) == (their_step, their_key)
        if ends and key == "train_loss":
            assert found == pytest.approx(mine.engine.last_step.loss, rel=1e-6)
            assert found < wanted
        else:
            torch.testing.assert_close(found, wanted, **CLOSE, msg=lambda why, k=key: f"{k}: {why}")
    mine.end()


def test_training_again_goes_on_as_the_library_does(tmp_path: Path) -> None:
    """The first run is ended within a step: what it has collected for that is no part of the second's."""
    theirs = plain(tmp_path, given={"callbacks": [EndsWithinAStep()]})
    mine = streamed(tmp_path, given={"callbacks": [EndsWithinAStep()], "engine": in_memory()})
    for trainer in (theirs, mine):
        assert trainer.state.global_step == 1
        trainer.train()
        assert trainer.state.global_step == 6
    check_same(shown(mine), shown(theirs))
    mine.end()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"}, id="sgd"),
        pytest.param({"label_smoothing_factor": 0.2}, id="label-smoothing"),
        pytest.param({"max_grad_norm": 0.0, "lr_scheduler_type": "cosine"}, id="no-clipping"),
        pytest.param({"max_grad_norm": float("inf")}, id="norm-alone"),
        pytest.param({"max_grad_norm": 0.05, "train_sampling_strategy": "sequential"}, id="every-step-clipped"),
    ],
)
def test_arguments_that_change_the_numbers_change_them_alike(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = settings | {"max_steps": 4}  # into the second epoch
    theirs, mine = plain(tmp_path, **settings), streamed(tmp_path, given={"engine": in_memory()}, **settings)
    check_same(shown(mine), shown(theirs))
    mine.end()


@pytest.mark.parametrize(("returned", "said"), [(lambda loss: (loss, None), "tuple"), (lambda loss: 1.0, "float")])
def test_a_loss_that_is_no_tensor_is_an_error_that_says_so(returned: Any, said: str, tmp_path: Path) -> None:
    class Returns(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return returned(model(**inputs).loss)

    trainer = Returns(model=llama(), args=arguments(tmp_path), train_dataset=DATA, engine=in_memory())
    with pytest.raises(penstock.ModelError, match=f"must be a real tensor of one element, .* returned {said}"):
        trainer.train()
    trainer.end()


def test_a_loss_in_tiles_is_the_same_loss(tmp_path: Path) -> None:
    """Seven tokens' logits at a time, in training and evaluation, with what the whole step has as the divisor."""
    settings = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2, "max_steps": 4}
    theirs = plain(tmp_path, **settings)
    mine = streamed(tmp_path, given={"engine": in_memory(loss_tile=7)}, **settings)
    check_same(shown(mine), shown(theirs))
    mine.end()


def test_a_loss_that_cannot_be_in_tiles_is_refused_with_the_argument_that_asked_for_them(tmp_path: Path) -> None:
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    trainer = Trainer(model=llama(), args=args, train_dataset=DATA, engine=in_memory(loss_tile=5))
    with pytest.raises(penstock.ModelError, match=r"loss_tile=5: .*leave out tiled_loss, or the loss_tile of EngineAr"):
        trainer.train()
    trainer.end()


def sum_of_squares(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of a user's own, which divides by what the whole step has."""
    squares = outputs.logits.square().mean(-1)[labels != -100].sum()
    return squares / num_items_in_batch


class OwnLoss:
    """A user's ``compute_loss`` that knows nothing of the step: the library averages over micro-batches."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = outputs.logits[labels != -100].square().mean()
        return (loss, outputs) if return_outputs else loss


class PlainOwnLoss(OwnLoss, transformers.Trainer):
    pass


class StreamedOwnLoss(OwnLoss, Trainer):
    pass


def test_a_users_own_loss_is_the_one_that_trains(tmp_path: Path) -> None:
    theirs = plain(tmp_path, given={"compute_loss_func": sum_of_squares}, max_steps=4)
    mine = streamed(tmp_path, given={"compute_loss_func": sum_of_squares, "engine": in_memory()}, max_steps=4)
    check_same(shown(mine), shown(theirs))
    mine.end()
    theirs = plain(tmp_path, cls=PlainOwnLoss, max_steps=4)
    mine = streamed(tmp_path, cls=StreamedOwnLoss, max_steps=4)
    check_same(shown(mine), shown(theirs))
    mine.end()


class LossOfParts:
    """A user's ``compute_loss`` for batches of any type, as the collator makes them."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        if isinstance(inputs, transformers.BatchEncoding):
            return model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, labels=inputs.labels).loss
        ids, rest = inputs
        return model(input_ids=ids, **rest).loss


class PlainLossOfParts(LossOfParts, transformers.Trainer):
    pass


class StreamedLossOfParts(LossOfParts, Trainer):
    pass


def as_encoding(rows: list[dict[str, Any]]) -> transformers.BatchEncoding:
    return transformers.BatchEncoding(dict(transformers.default_data_collator(rows)))


def as_tuple(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, dict[str, Any]]:
    batch = dict(transformers.default_data_collator(rows))
    return batch.pop("input_ids"), batch


@pytest.mark.parametrize("collator", [as_encoding, as_tuple])
def test_a_users_own_loss_is_handed_what_the_collator_makes(collator: Any, tmp_path: Path) -> None:
    given = {"data_collator": collator}
    theirs = plain(tmp_path, cls=PlainLossOfParts, given=given, max_steps=3)
    mine = streamed(tmp_path, cls=StreamedLossOfParts, given=given | {"engine": in_memory()}, max_steps=3)
    check_same(shown(mine), shown(theirs))
    if collator is as_tuple:
        with pytest.raises(penstock.ConfigError, match=r"data_collator returns a tuple, .*let it return a dict"):
            mine.evaluate()
    mine.end()


def accuracy(prediction: Any) -> dict[str, float]:
    best = prediction.predictions[:, :-1].argmax(-1)
    labels = prediction.label_ids[:, 1:]
    return {"accuracy": float((best == labels)[labels != -100].mean())}


def test_what_is_to_be_computed_goes_through_the_engine_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = arguments(tmp_path, max_steps=1, gradient_accumulation_steps=1)
    trainer = Trainer(model=llama(), args=settings, train_dataset=DATA, eval_dataset=HELD_OUT[:2], engine=in_memory())
    check_kept_whole(trainer.engine, lambda: (trainer.train(), trainer.evaluate()), monkeypatch)
    trainer.end()


def test_predictions_and_metrics_come_from_the_models_own_outputs(tmp_path: Path) -> None:
    settings = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2}
    given = {"compute_metrics": accuracy}
    theirs = plain(tmp_path, given=given, **settings)
    mine = streamed(tmp_path, given=given | {"engine": in_memory()}, **settings)
    check_same(shown(mine), shown(theirs))
    unlabelled = [{k: v for k, v in example.items() if k != "labels"} for example in HELD_OUT]
    for data in (HELD_OUT, unlabelled):
        found, expected = mine.predict(data), theirs.predict(data)
        np.testing.assert_allclose(found.predictions, expected.predictions, rtol=1e-3, atol=1e-4)
    mine.end()


def test_predictions_after_an_evaluation_of_the_loss_alone_have_all_of_the_models_outputs(tmp_path: Path) -> None:
    model = llama()
    model.config.output_hidden_states = True
    theirs = transformers.Trainer(model=copy.deepcopy(model), args=arguments(tmp_path), eval_dataset=HELD_OUT)
    mine = Trainer(model=model, args=arguments(tmp_path), eval_dataset=HELD_OUT, engine=in_memory())
    mine.evaluate()
    found, expected = (one.predict(HELD_OUT).predictions for one in (mine, theirs))
    for own, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-4)
    mine.end()


@pytest.mark.parametrize("filtered", [True, False])
def test_an_evaluation_batch_without_labels_counts_as_the_library_has_it(tmp_path: Path, filtered: bool) -> None:
    """Its loss is NaN, which ends no training."""
    data = [dict(example) for example in HELD_OUT[:3]]
    data[1] = data[1] | {"labels": [-100] * len(data[1]["labels"])}
    settings = {"per_device_eval_batch_size": 1, "logging_nan_inf_filter": filtered}
    losses = []
    for cls, given in ((transformers.Trainer, {}), (Trainer, {"engine": in_memory()})):
        trainer = cls(model=llama(), args=arguments(tmp_path, **settings), eval_dataset=data, **given)
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.end()
    assert losses[1] == pytest.approx(losses[0], rel=1e-6, nan_ok=True)
    assert math.isnan(losses[1]) is not filtered


def test_a_run_that_stopped_goes_on_to_the_bits_of_one_that_did_not(tmp_path: Path) -> None:
    """The run has dropout, shuffled data and momentum; the store that is left is of a later step than the
    checkpoint."""
    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    whole = streamed(tmp_path / "whole", llama(dropout=0.1), **settings)
    stopped = streamed(tmp_path / "stopped", llama(dropout=0.1), given={"callbacks": [StopAfter(3)]}, **settings)
    assert stopped.engine.step_count == 3
    stopped.end()
    resumed = on_engine(tmp_path / "stopped", llama(seed=1, dropout=0.1), **settings)
    resumed.train(resume_from_checkpoint=True)
    assert shown(resumed)[:-1] == shown(whole)[:-1]  # the last number is the mean loss since the resumption
    mine, theirs = ({n: t.clone() for n, t in t.engine.master_parameters()} for t in (resumed, whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    names = sorted(p.name for p in (tmp_path / "stopped" / "engine").glob("checkpoint-*"))
    assert names == ["checkpoint-4", "checkpoint-6"]
    resumed.end()
    whole.end()


def test_the_state_of_the_loop_is_saved_where_a_script_asks_for_it(tmp_path: Path) -> None:
    """As scripts do after training, by the library's own name."""
    trainer = Trainer(model=llama(), args=arguments(tmp_path), eval_dataset=HELD_OUT, engine=in_memory())
    trainer.save_state()
    assert transformers.TrainerState.load_from_json(str(tmp_path / "trainer_state.json")).global_step == 0
    trainer.end()


def test_a_model_with_more_than_weights_is_saved_again_where_it_is(tmp_path: Path) -> None:
    """Several chat templates are a folder beside the weights. What the model does not consist of stays."""
    chats = tokenizer()
    chats.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    trainer = Trainer(model=llama(), args=arguments(tmp_path), processing_class=chats, engine=in_memory())
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"an earlier model's")
    (tmp_path / "model_ema.safetensors").write_bytes(b"the user's own")
    for _ in range(2):
        trainer.save_model()
    trainer.end()
    assert set(AutoTokenizer.from_pretrained(tmp_path).chat_template) == {"default", "tools"}
    assert sorted(file.name for file in tmp_path.glob("model*")) == ["model.safetensors", "model_ema.safetensors"]


def test_each_parameter_is_saved_in_the_dtype_that_it_was_given_in(tmp_path: Path) -> None:
    """As the library's own saves it: a norm in fp32 among weights in 16 bits."""
    found = []
    for cls, given in ((transformers.Trainer, {}), (Trainer, {"engine": in_memory()})):
        model: Any = llama(dtype=torch.bfloat16)
        model.model.norm.float()
        trainer = cls(model=model, args=arguments(tmp_path), **given)
        folder = tmp_path / cls.__module__
        trainer.save_model(str(folder))
        trainer.end()
        dtypes = {name: tensor.dtype for name, tensor in load_file(folder / "model.safetensors").items()}
        found.append((dtypes, json.loads((folder / "config.json").read_text())))
    assert found[1] == found[0]
    assert found[1][0]["model.norm.weight"] == torch.float32


def test_a_saved_model_is_what_transformers_loads(tmp_path: Path) -> None:
    mine = streamed(tmp_path, given={"engine": in_memory()}, max_steps=2)
    mine.save_model(str(tmp_path / "out"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    theirs = {name: tensor.clone() for name, tensor in mine.engine.master_parameters()}
    assert all(torch.equal(value, theirs[name]) for name, value in weights(loaded).items())
    labelled = {key: torch.tensor([HELD_OUT[0][key]]) for key in HELD_OUT[0]}
    with torch.no_grad():
        expected = loaded.eval()(**labelled).logits
    torch.testing.assert_close(torch.tensor(mine.predict(HELD_OUT[:1]).predictions), expected)
    mine.end()


def test_a_folder_is_trained_without_its_model_ever_being_whole_in_memory(tmp_path: Path) -> None:
    """``penstock.hf.load`` gives a model on the meta device; evaluation comes first, and makes the engine."""
    llama().save_pretrained(tmp_path / "folder")
    theirs = plain(tmp_path, max_steps=2)
    loaded = penstock.hf.load(tmp_path / "folder")
    mine = on_engine(tmp_path, loaded.model, given={"engine": in_memory(weights=loaded.weights)}, max_steps=2)
    before = transformers.Trainer(model=llama(), args=arguments(tmp_path / "other"), eval_dataset=HELD_OUT).evaluate()
    assert mine.evaluate()["eval_loss"] == pytest.approx(before["eval_loss"], rel=1e-6)
    mine.train()
    check_same([line for line in shown(mine) if line[1] != "eval_loss"], shown(theirs))
    mine.end()


def test_the_best_checkpoint_is_taken_back_at_the_end(tmp_path: Path) -> None:
    """The loss falls, and the highest counts as the best, so that the last evaluation is not the best."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "load_best_model_at_end": True}
    settings |= {"metric_for_best_model": "loss", "greater_is_better": True, "max_steps": 5}
    mine = streamed(tmp_path, given={"engine": in_memory()}, **settings)
    losses = [line["eval_loss"] for line in mine.state.log_history if "eval_loss" in line]
    assert max(losses) > losses[-1]
    assert mine.evaluate()["eval_loss"] == max(losses)
    mine.end()


class RemovesTheFirst(transformers.TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step > 1:
            shutil.rmtree(Path(args.output_dir) / "checkpoint-1", ignore_errors=True)


def test_a_best_checkpoint_that_was_removed_is_said_and_the_model_is_still_there(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = on_engine(tmp_path, given={"callbacks": [RemovesTheFirst()], "engine": in_memory()}, **settings)
    with pytest.raises(penstock.ConfigError, match=r"checkpoint-1 is not there any more.*save_model"):
        trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").is_file()
    trainer.end()


def test_half_precision_keeps_the_precision_of_the_master_copy(tmp_path: Path) -> None:
    """Weights that compute are rounded; a step far smaller than their rounding still adds up in the master copy."""
    mine = streamed(tmp_path, given={"engine": in_memory()}, bf16=True, learning_rate=1e-6, max_steps=3)
    before = weights(llama())
    moved = [not torch.equal(tensor, before[name]) for name, tensor in mine.engine.master_parameters()]
    assert all(moved)
    assert next(mine.model.parameters()).dtype == torch.bfloat16
    mine.end()


def test_the_model_is_not_used_behind_the_engines_back(tmp_path: Path) -> None:
    """A forward, or a state_dict, of a user's callback or script would be of placeholders."""
    mine = streamed(tmp_path, given={"engine": in_memory()}, max_steps=1)
    prompt = torch.tensor([[1, 2, 3]])
    for use in (
        lambda: mine.model(prompt),
        lambda: mine.model.generate(prompt, max_new_tokens=1),
        lambda: mine.model.state_dict(),
    ):
        with pytest.raises(penstock.ModelError, match=r"the model's weights are the engine's.*save_model"):
            use()
    mine.end()


class Unsized(torch.utils.data.IterableDataset[Any]):
    """So many examples, and nobody knows how many these are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(DATA[: self.count])


def test_data_without_a_length_that_end_before_a_step_are_refused_and_longer_ones_train(
    tmp_path: Path,
) -> None:
    """The library's own run goes through the first for ever. What an epoch leaves over is part of the next one's."""
    settings: dict[str, Any] = {"max_steps": 4, "lr_scheduler_type": "constant"}
    theirs = transformers.Trainer(llama(), arguments(tmp_path / "plain", **settings), train_dataset=Unsized(9))
    theirs.train()
    args = arguments(tmp_path / "engine", **settings)
    mine = Trainer(llama(), args, train_dataset=Unsized(9), engine=in_memory())
    mine.train()
    check_same(shown(mine), shown(theirs))
    mine.end()
    short = Trainer(llama(), args, train_dataset=Unsized(5), engine=in_memory())
    short.args.gradient_accumulation_steps = 4
    with pytest.raises(penstock.ConfigError, match="steps=4: the training data end before so many batches"):
        short.train()
    short.end()
