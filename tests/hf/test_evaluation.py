"""The evaluation of ``penstock.hf.Trainer``: several batches at a time, with the losses of one after the other."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset

import penstock
from penstock.compat.accelerate import Ahead
from penstock.hf import Trainer
from tests.library_runs import CLOSE, arguments, examples, in_memory, llama

pytestmark = pytest.mark.usefixtures("one_thread")


def trainer(folder: Path, data: Any, each: int, library: Any = Trainer, **given: Any) -> Any:
    """``each``: micro-batches of a step."""
    settings = {"gradient_accumulation_steps": each, "per_device_eval_batch_size": 2}
    given = given if library is transformers.Trainer else {"engine": in_memory()} | given
    return library(**{"model": llama(), "args": arguments(folder, **settings), "eval_dataset": data} | given)


def calls_of(engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch, most: int = 100) -> list[int]:
    """The number of batches of each evaluation from now on; more than ``most`` do not fit."""
    found: list[int] = []
    evaluate = engine.evaluate

    def counted(micro_batches: Any, **more: Any) -> Any:
        if len(micro_batches) > most:
            raise penstock.BudgetError("too many at once")
        found.append(len(micro_batches))
        return evaluate(micro_batches, **more)

    monkeypatch.setattr(engine, "evaluate", counted)
    return found


@pytest.mark.parametrize(
    ("examples_of", "each", "found"),
    [(15, 3, [3, 3, 1, 1]), (14, 3, [3, 3, 1]), (2, 3, [1]), (6, 1, [1, 1, 1])],
)
def test_as_many_batches_as_a_step_has_are_evaluated_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examples_of: int, each: int, found: list[int]
) -> None:
    """The last one is by itself, since what is gathered then is cut to an epoch's examples."""
    data = examples(examples_of)
    mine = trainer(tmp_path, data, each)
    calls = calls_of(mine.engine, monkeypatch)
    loss = mine.evaluate()["eval_loss"]
    assert calls == found
    theirs = trainer(tmp_path, data, each, transformers.Trainer).evaluate()["eval_loss"]
    assert loss == pytest.approx(theirs, rel=CLOSE["rtol"])
    mine.end()


def test_losses_are_the_bits_of_one_batch_after_the_other_where_not_all_fit_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = examples(24)
    losses, calls = [], []
    for most, each in ((100, 1), (2, 5)):
        mine = trainer(tmp_path, data, each)
        calls.append(calls_of(mine.engine, monkeypatch, most))
        losses += [mine.evaluate()["eval_loss"], mine.evaluate()["eval_loss"]]
        mine.end()
    assert len(set(losses)) == 1
    assert calls[0] == [1] * 24
    assert max(calls[1]) == 2, "what has not fitted is not tried again"
    assert sum(calls[1]) == 24


def test_what_asks_for_more_than_losses_is_evaluated_batch_by_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of several batches would be on the device together."""
    mine = trainer(tmp_path, examples(6), 3, compute_metrics=lambda _: {"one": 1.0})
    calls = calls_of(mine.engine, monkeypatch)
    mine.evaluate()
    assert calls == [1, 1, 1]
    mine.end()


def test_each_of_several_data_sets_is_evaluated_from_its_beginning(tmp_path: Path) -> None:
    data = {"short": Dataset.from_list(examples(4)), "long": Dataset.from_list(examples(11))}
    mine, theirs = (trainer(tmp_path, data, 4, library) for library in (Trainer, transformers.Trainer))
    for name in ("eval_short_loss", "eval_long_loss"):
        assert mine.evaluate()[name] == pytest.approx(theirs.evaluate()[name], rel=CLOSE["rtol"])
    mine.end()


class Twice(Trainer):
    """A user's own, which looks at each batch."""

    def prediction_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        first = super().prediction_step(model, inputs, *rest, **more)
        again = super().prediction_step(model, inputs, *rest, **more)
        assert torch.equal(first[0], again[0])
        inputs["labels"] = torch.full_like(inputs["labels"], -100)
        return again


def test_who_looks_at_each_batch_has_each_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = examples(9)
    mine = trainer(tmp_path, data, 4, Twice)
    calls = calls_of(mine.engine, monkeypatch)
    theirs = trainer(tmp_path, data, 4, transformers.Trainer).evaluate()["eval_loss"]
    assert mine.evaluate()["eval_loss"] == pytest.approx(theirs, rel=CLOSE["rtol"])
    assert set(calls) == {1}
    mine.end()


class LooksAhead(transformers.TrainerCallback):
    """Another evaluation, and another look at the data, within an evaluation."""

    def __init__(self, other: Any) -> None:
        self.other, self.losses = other, list[float]()
        self.trainer: Any = None

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any) -> None:
        trainer, self.trainer = self.trainer, None
        if trainer is not None:
            self.losses.append(trainer.evaluate(self.other)["eval_loss"])
            next(iter(eval_dataloader))


def test_an_evaluation_within_an_evaluation_has_its_own_data(tmp_path: Path) -> None:
    data, other = examples(14), examples(10, longest=7)
    callback = LooksAhead(other)
    mine = trainer(tmp_path, data, 3, callbacks=[callback])
    callback.trainer = mine
    plain = trainer(tmp_path, data, 3, transformers.Trainer)
    assert mine.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=CLOSE["rtol"])
    assert callback.losses == [pytest.approx(plain.evaluate(other)["eval_loss"], rel=CLOSE["rtol"])]
    mine.end()


def test_batches_of_other_entries_are_not_evaluated_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def collated(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}
        return batch if not bool(batch["attention_mask"].all()) else {k: v for k, v in batch.items() if "mask" not in k}

    data = examples(12)
    for row in data[4:8]:
        row["attention_mask"] = [1] * len(row["attention_mask"])
    mine = trainer(tmp_path, data, 4, data_collator=collated)
    calls = calls_of(mine.engine, monkeypatch)
    theirs = trainer(tmp_path, data, 4, transformers.Trainer).evaluate()["eval_loss"]
    found = mine.evaluate()["eval_loss"]
    assert sum(calls) == 6
    assert max(calls) == 2
    assert abs(found - theirs) < 0.2, "of four rows another mask is taken"
    mine.end()


class Loader:
    """Batches that say which is the last one, as accelerate's loaders do."""

    def __init__(self, count: int) -> None:
        self.count, self.end_of_dataloader, self.name = count, False, "loader"

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        for i in range(self.count):
            self.end_of_dataloader = i == self.count - 1
            yield i


@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize("each", [1, 2, 3, 10])
def test_batches_come_in_their_order_and_the_end_is_said_with_the_last(count: int, each: int) -> None:
    loader = Loader(count)
    ahead = Ahead(loader, each)
    seen = [(batch, list(ahead.waiting), loader.end_of_dataloader) for batch in ahead]
    assert [batch for batch, _, _ in seen] == list(range(count))
    assert [end for _, _, end in seen] == [i == count - 1 for i in range(count)]
    for batch, waiting, _ in seen:
        assert waiting == list(range(batch, batch + len(waiting)))
        assert len(waiting) <= each
        assert count - 1 not in waiting or waiting == [count - 1]
    assert not ahead.waiting
    assert (len(ahead), ahead.name) == (count, "loader")
