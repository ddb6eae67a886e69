"""What training runs by a library's loop are made of (``tests.any_run``): models, data, and what a user brings."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
import transformers
import trl
from torch import nn
from transformers import TrainerCallback

from tests import models, preferred
from tests.library_runs import llama
from tests.models import VOCABULARY

LENGTH = 6
OF_TRL: dict[str, Any] = {"SFTTrainer": trl.SFTConfig} | preferred.CONFIGS

# -- models -------------------------------------------------------------------------------------------------------


class Tuples(nn.Module):
    """A module of torch that says a tuple, and knows nothing of a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return (logits,)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def _head(cls: Any, **changes: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        config = llama().config
        config.pad_token_id = 0
        for name, value in changes.items():
            setattr(config, name, value)
        torch.manual_seed(1)
        model: nn.Module = cls(config)
        return model

    return made


def _t5() -> nn.Module:
    torch.manual_seed(1)
    config = models.t5().config
    config.dropout_rate = config.classifier_dropout = 0.0
    torch.manual_seed(1)
    return transformers.T5ForConditionalGeneration(config)


def _answers() -> nn.Module:
    """Both of its biases add to all positions: their gradients are zero, but for rounding."""
    model = _head(transformers.LlamaForQuestionAnswering)()
    model.qa_outputs.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
    return model


def _said(**changes: bool) -> nn.Module:
    """A language model that says more, or in another way."""
    model = llama()
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def _plain() -> nn.Module:
    torch.manual_seed(1)
    return Tuples()


def _lm(row: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    return row | {"labels": [i if m else -100 for i, m in zip(row["input_ids"], row["attention_mask"], strict=True)]}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[dict[str, Any], random.Random], dict[str, Any]]]] = {
    "llama": (llama, _lm),
    "classes": (
        _head(transformers.LlamaForSequenceClassification, num_labels=3),
        lambda row, draw: row | {"label": draw.randrange(3)},
    ),
    "regression": (
        _head(transformers.LlamaForSequenceClassification, num_labels=1),
        lambda row, draw: row | {"label": draw.random()},
    ),
    "several classes": (
        _head(transformers.LlamaForSequenceClassification, num_labels=3, problem_type="multi_label_classification"),
        lambda row, draw: row | {"labels": [float(draw.randrange(2)) for _ in range(3)]},
    ),
    "answers": (
        _answers,
        lambda row, draw: row | {"start_positions": draw.randrange(3), "end_positions": draw.randrange(3)},
    ),
    "tokens": (
        _head(transformers.LlamaForTokenClassification, num_labels=4, classifier_dropout=0.0),
        lambda row, draw: row | {"labels": [draw.randrange(4) if m else -100 for m in row["attention_mask"]]},
    ),
    "t5": (_t5, lambda row, draw: row | {"labels": [draw.randrange(2, VOCABULARY) for _ in range(4)]}),
    "hidden": (lambda: _said(output_hidden_states=True), _lm),
    "tuples": (_plain, lambda row, draw: {"input_ids": row["input_ids"], "labels": row["input_ids"]}),
}

# -- data ---------------------------------------------------------------------------------------------------------


def texts(model: str, count: int, draw: random.Random) -> list[dict[str, Any]]:
    """What TRL trains on. ``model``: the name of a trainer, with the kind of its data behind a colon."""

    def said(least: int = 1) -> str:
        return " ".join(draw.choices(preferred.WORDS, k=draw.randint(least, 6)))

    def turn(role: str) -> list[dict[str, str]]:
        return [{"role": role, "content": said()}]

    def row(number: int) -> dict[str, Any]:
        if model == "SFTTrainer: text":
            return {"text": said(2)}
        if model == "SFTTrainer: chats":
            return {"messages": turn("user") + turn("assistant")}
        if model == "SFTTrainer: completed chats":
            return {"prompt": turn("user"), "completion": turn("assistant")}
        if model == "SFTTrainer":
            return {"prompt": said(), "completion": " " + said()}
        if model == "KTOTrainer":
            return {"prompt": said(), "completion": " " + said(), "label": number % 2 == 0}
        return {"prompt": said(), "chosen": " " + said(), "rejected": " " + said()}

    return [row(number) for number in range(count)]


def rows(model: str, count: int, seed: int, *, extra: bool = False) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    if model.partition(":")[0] in OF_TRL:
        return texts(model, count, draw)
    found = []
    for _ in range(count):
        length = draw.randint(3, LENGTH)
        ids = [draw.randrange(2, VOCABULARY) for _ in range(length)] + [0] * (LENGTH - length)
        row = {"input_ids": ids, "attention_mask": [1] * length + [0] * (LENGTH - length)}
        row = MODELS[model][1](row, draw)
        found.append(row | ({"note": "x" * length, "length": length} if extra else {}))
    return found


class Iterated(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __init__(self, data: list[dict[str, Any]]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.data)


class Counted(Iterated):
    def __len__(self) -> int:
        return len(self.data)


DATA: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "list": lambda data: data,
    "datasets": datasets.Dataset.from_list,
    "iterated": Iterated,
    "counted": Counted,
    "streamed": lambda data: datasets.Dataset.from_list(data).to_iterable_dataset(),
}

# -- what a user brings along -------------------------------------------------------------------------------------

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_") and name != "on_pre_optimizer_step"]


class Notes(TrainerCallback):
    """Every call of a callback, with what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []


def _noted(name: str) -> Callable[..., None]:
    def called(self: Notes, args: Any, state: Any, control: Any, **given: Any) -> None:
        flags = [flag for flag, value in sorted(vars(control).items()) if value is True]
        there = sorted(key for key, value in given.items() if value is not None)
        self.events.append((name, state.global_step, state.epoch, tuple(flags), tuple(there)))

    return called


for _name in EVENTS:
    setattr(Notes, _name, _noted(_name))


@dataclass(frozen=True, kw_only=True)
class Meddling:
    """A flag that a callback sets, at the n-th call of an event."""

    event: str
    call: int
    flag: str


class Meddler(TrainerCallback):
    def __init__(self, orders: tuple[Meddling, ...]) -> None:
        self.orders = orders
        self.calls = dict.fromkeys(EVENTS, 0)


def _meddling(name: str) -> Callable[..., Any]:
    def called(self: Meddler, args: Any, state: Any, control: Any, **given: Any) -> Any:
        self.calls[name] += 1
        for order in self.orders:
            if (order.event, order.call) == (name, self.calls[name]):
                setattr(control, order.flag, True)
        return control

    return called


for _name in EVENTS:
    setattr(Meddler, _name, _meddling(_name))


def metrics(found: Any) -> dict[str, float]:
    """Numbers that depend on all that there is."""
    said = {}
    for name in ("predictions", "label_ids", "losses", "inputs"):
        value = getattr(found, name, None)
        if value is not None:
            parts = [np.asarray(part, dtype=np.float64) for part in _leaves(value)]
            said[name] = float(sum(np.abs(part).mean() + part.size * 1e-3 for part in parts))
    return said


class Batches:
    """``compute_metrics`` that is called for each batch."""

    def __init__(self) -> None:
        self.total = 0.0

    def __call__(self, found: Any, compute_result: bool) -> dict[str, float]:
        self.total += sum(metrics(found).values())
        if not compute_result:
            return {}
        total, self.total = self.total, 0.0
        return {"total": total}


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in _leaves(one)]
    return [] if value is None else [value.float().cpu() if isinstance(value, torch.Tensor) else value]


def largest(logits: Any, labels: Any) -> Any:
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.argmax(-1)


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")
    return loss / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


class OwnLoss:
    """Of a Trainer: a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **given)  # type: ignore[misc]
        loss = loss * 0.5 + 0.1
        return (loss, outputs) if return_outputs else loss


class OwnMean:
    """Of a Trainer: the mean of each batch, said to be."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        return (loss, outputs) if return_outputs else loss


class OwnShare(OwnMean):
    """Of a Trainer: the loss's share of a step."""

    loss_is_scaled_for_ga = True
    current_gradient_accumulation_steps: int

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss / self.current_gradient_accumulation_steps if model.training else loss
        return (loss, outputs) if return_outputs else loss


class OwnSteps:
    """Of a Trainer: looks at each step, and logs more."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.looked = getattr(self, "looked", 0) + ("labels" in inputs) + 1
        return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *rest: Any, **more: Any) -> None:
        super().log(logs | {"looked": float(getattr(self, "looked", 0))}, *rest, **more)  # type: ignore[misc]


class OwnPrediction:
    """Of a Trainer: looks at each prediction."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        return None if loss is None else loss * 2, logits, labels


CLASSES: dict[str, type[Any] | None] = {
    "": None,
    "own loss": OwnLoss,
    "own mean": OwnMean,
    "own share": OwnShare,
    "own steps": OwnSteps,
    "own prediction": OwnPrediction,
}
