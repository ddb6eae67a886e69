"""Settings files of any kind: all that ``penstock train`` may be asked for, drawn by chance and combined freely.

``Asked`` is one run. Its ``numbers`` decide what it computes; its ``how`` must not, so that a run with ``PLAINEST``
in its place has the same losses and the same model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from penstock.data import write_tokens
from tests.data_documents import MARKED_TEMPLATE, PLAIN_TEMPLATE, chats, sentences, tokenizer, write_jsonl, write_table
from tests.runs import write_text

Tree = dict[str, Any]

_WIDTHS: Tree = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
_LAYERS: Tree = {"num_hidden_layers": 3, "max_position_embeddings": 128}
_EXPERTS: Tree = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: Mapping[str, Tree] = {
    "llama": {**_WIDTHS, **_LAYERS},
    "qwen3": {**_WIDTHS, **_LAYERS, "head_dim": 8},
    "qwen2_moe": {**_WIDTHS, **_LAYERS, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "mixtral": {**_WIDTHS, **_LAYERS, "num_local_experts": 4},
    "gemma3_text": {**_WIDTHS, **_LAYERS, "head_dim": 8, "sliding_window": 8},
    "phi3": {**_WIDTHS, **_LAYERS, "pad_token_id": 0},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4},
}
TIED = ("llama", "qwen3", "qwen2_moe", "mixtral")

PLAINEST: Tree = {
    "schedule": "vertical",
    "plan": None,
    "delay": 0.0,
    "recompute": True,
    "trace_steps": 0,
    "device": "cpu",
    "budget": {"device": "64MiB", "host": "64MiB", "disk": "{run}/store", "weights": "disk", "state": "disk"},
}
"""One block at a time, all state on disk, nothing planned."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run: what is trained, and two ways of training it, one before it is ended after ``steps`` and one after."""

    numbers: Tree
    how: Tree
    then: Tree
    killed: bool
    stops: int

    def settings(self, run: Path, how: Mapping[str, Any]) -> Tree:
        return {"run": str(run), **self.numbers, **how}

    @property
    def steps(self) -> int:
        return int(self.numbers["steps"])


class Shelf:
    """Data and models to draw from, in one folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.folder = folder
        folder.mkdir(exist_ok=True)
        words = tokenizer(320)
        texts = sentences(300)
        answers = [{"prompt": line, "completion": other} for line, other in zip(texts, reversed(texts), strict=True)]
        told = [{"instruction": row["prompt"], "output": row["completion"]} for row in answers]
        said = [
            {"conversations": [{"from": "human", "value": r["prompt"]}, {"from": "gpt", "value": r["completion"]}]}
            for r in answers
        ]
        pages = [{"text": line} for line in texts]
        self.sources: Mapping[str, Sequence[str | Tree]] = {
            "text": (
                str(write_text(folder / "text.txt", 1500)),
                str(write_jsonl(folder / "pages.jsonl", pages)),
                str(write_table(folder / "pages.csv", pages)),
                {
                    "path": str(write_jsonl(folder / "own.jsonl.gz", [{"content": t} for t in texts])),
                    "fields": {"text": "content"},
                },
                {"path": str(folder / "text.txt"), "limit": "20KB"},
            ),
            "answers": (
                str(write_jsonl(folder / "answers.jsonl", answers)),
                {"path": str(write_table(folder / "answers.csv", answers)), "kind": "completion"},
            ),
            "chat": (
                str(write_jsonl(folder / "chats.jsonl", chats(100))),
                str(write_jsonl(folder / "said.jsonl", said)),
                str(write_jsonl(folder / "told.jsonl", told)),
            ),
            "tokens": (str(folder / "ids.tokens"),),
        }
        self.held = str(write_text(folder / "held.txt", 20))
        write_tokens(folder / "ids.tokens", (words(text)["input_ids"] for text in texts), dtype="uint16")
        (folder / "chat.jinja").write_text(PLAIN_TEMPLATE)
        for name, template in (("plain", None), ("marked", MARKED_TEMPLATE)):
            words.chat_template = template
            words.save_pretrained(folder / f"tokenizer-{name}")
        for kind in ("llama", "qwen2_moe", "gpt2"):
            torch.manual_seed(0)
            config = AutoConfig.for_model(kind, vocab_size=len(words), **MODELS[kind])
            words.save_pretrained(folder / kind)
            build: Any = AutoModelForCausalLM  # transformers leaves it without types
            build.from_config(config).save_pretrained(folder / kind, max_shard_size="40KB")

    def model(self, drawn: Random) -> tuple[str, Tree]:
        """(its type, the section ``model``)."""
        if drawn.random() < 0.3:
            kind = drawn.choice(("llama", "qwen2_moe", "gpt2"))
            return kind, {"path": str(self.folder / kind)}
        kind = drawn.choice(list(MODELS))
        config = {"model_type": kind, **MODELS[kind]}
        if kind in TIED:
            config["tie_word_embeddings"] = drawn.random() < 0.5
        return kind, {"init": True, "config": config}

    def data(self, drawn: Random, kind: str, *, new: bool) -> Tree:
        form = drawn.choice(("text", "text", "answers", "chat", "tokens"))
        count = drawn.choice((1, 1, 1, 2, 3))
        pool = [(form, s) for s in self.sources[form]] + [("text", s) for s in self.sources["text"]] * (count > 1)
        forms, found = zip(*(drawn.choice(pool) for _ in range(count)), strict=True)
        sources: list[Any] = [s if isinstance(s, str) else dict(s) for s in found]
        streaming = drawn.choice((None, None, False, True))
        if count > 1 and (streaming or drawn.random() < 0.5):
            sources = [
                {**({"path": s} if isinstance(s, str) else s), "weight": drawn.choice((1, 2.5))} for s in sources
            ]
        data: Tree = {
            "sources": sources[0] if count == 1 and drawn.random() < 0.5 else sources,
            "sequence_length": drawn.choice((16, 32, 48)),
            "packing": drawn.choice((True, True, False, "continuous")),
        }
        if streaming is not None:
            data["streaming"] = streaming
        if kind == "bloom" and data["packing"] is True:
            data["packing"] = False
        if data["packing"] != "continuous":
            data |= maybe(drawn, 0.4, too_long=("split", "cut", "drop"))
        if {"answers", "chat"} & {*forms}:
            data |= maybe(drawn, 0.4, loss_on=("answers", "all"))
        if streaming:
            data["shuffle"] = drawn.choice((1, 7, 50))  # 10,000 documents would be these hundreds of times
        elif drawn.random() < 0.2:
            data["prepared"] = "{prepared}"
        if "chat" in forms:
            data["tokenizer"] = str(self.folder / "tokenizer-marked")
            if drawn.random() < 0.3:
                data |= {
                    "tokenizer": str(self.folder / "tokenizer-plain"),
                    "chat_template": str(self.folder / "chat.jinja"),
                }
        elif "tokens" in forms or streaming:
            data |= {"tokenizer": str(self.folder / "tokenizer-plain")}
        elif new:
            data["tokenizer"] = drawn.choice(({"train": {"vocabulary": 300}}, str(self.folder / "tokenizer-plain")))
        return data


def maybe(drawn: Random, chance: float = 0.5, **values: Sequence[Any]) -> Tree:
    """Some of the keys, each with one of its values."""
    return {key: drawn.choice(each) for key, each in values.items() if each and drawn.random() < chance}


def _optimizer(drawn: Random, kind: str) -> Tree:
    name = drawn.choice(("adamw", "adamw", "adam", "sgd", "lion", "muon"))
    found: Tree = {"lr": drawn.choice((1e-3, 1e-2))} | (
        {"name": name} if name != "adamw" or drawn.random() < 0.5 else {}
    )
    found |= maybe(drawn, 0.3, weight_decay=(0.0, 0.1), moments=("fp32", "bf16", "int8"))
    if name in ("adamw", "adam", "lion"):
        found |= maybe(drawn, 0.3, betas=([0.9, 0.95], [0.5, 0.0]))
    if name in ("adamw", "adam"):
        found |= maybe(drawn, 0.3, eps=(1e-6, 1e-2))
    if name == "sgd":
        found |= maybe(drawn, 0.6, momentum=(0.9,))
        found |= maybe(drawn, 0.5, nesterov=(True, False)) if "momentum" in found else {}
    if name == "muon":
        found |= maybe(drawn, 0.3, momentum=(0.9, 0.0), nesterov=(True, False), ns_steps=(1, 3))
        found |= maybe(drawn, 0.3, adjust_lr_fn=("original", "match_rms_adamw"), elementwise=("mlp|c_fc", "gate"))
        splits = {
            "gpt2": {"match": "c_attn.weight", "parts": 3, "dim": 1},
            "llama": {"match": "q_proj|up_proj", "parts": 2},
        }
        found |= maybe(drawn, 0.5, splits=([splits[kind]],) if kind in splits else ())
        found["adamw"] = {"lr": 1e-3} | maybe(drawn, 0.3, betas=([0.9, 0.95],), weight_decay=(0.0, 0.1), eps=(1e-6,))
    if found.get("moments") not in (None, "fp32") and name == "sgd" and not found.get("momentum"):
        del found["moments"]
    if name != "muon" and found.get("weight_decay", 0.01 if name == "adamw" else 0):
        found |= maybe(drawn, 0.2, decay_norms_and_biases=(True, False))
    rules = ({"match": "norm|ln_", "weight_decay": 0.0}, {"match": "embed|wte", "lr": 1e-4}, {"match": "1", "lr": 0.0})
    found |= maybe(drawn, 0.4, overrides=([drawn.choice(rules) for _ in range(drawn.choice((1, 2)))],))
    return found


def _lr_schedule(drawn: Random) -> Tree:
    kind = drawn.choice(("constant", "linear", "cosine", "wsd"))
    found: Tree = {
        "kind": kind,
        **maybe(drawn, 0.5, **drawn.choice(({"warmup_steps": (1, 2)}, {"warmup_share": (0.2,)}))),
    }
    if kind != "constant":
        found |= maybe(drawn, 0.3, final=(0.1, 2.0))
    if kind == "wsd":
        found |= drawn.choice(({"decay_steps": 1}, {"decay_share": 0.3}))
        found |= maybe(drawn, 0.5, decay_shape=("linear", "cosine", "1-sqrt"))
    return found


def _numbers(drawn: Random, shelf: Shelf) -> Tree:
    kind, model = shelf.model(drawn)
    new = "init" in model
    data = shelf.data(drawn, kind, new=new)
    sequences = drawn.choice((1, 2, 4, 6, 8))
    found: Tree = {
        "model": model,
        "data": data,
        "optimizer": _optimizer(drawn, kind),
        "batch": {"sequences": sequences} if drawn.random() < 0.7 else {"tokens": sequences * data["sequence_length"]},
        "steps": drawn.choice((3, 4, 5)),
    }
    sizes = tuple(size for size in (1, 2, 4) if not sequences % size)
    found |= maybe(drawn, 0.9, micro_batch_size=sizes)
    found |= maybe(drawn, 0.6, precision=("fp32", "bf16", "bf16", "fp16"), clip_grad_norm=(None, 0.5, 1.0, 3.0, 100))
    found |= maybe(drawn, 0.3, grad_dtype=("fp32", "bf16"), strands=(1, 2, 3, 4), seed=(0, 1, 12345))
    found |= maybe(drawn, 0.3, loss_tile=(None, 7, 40), mlp_tile=(None, 11), attention_heads=(1, 2))
    found |= maybe(drawn, 0.5, lr_schedule=(_lr_schedule(drawn),))
    if not new:
        lora = {"rank": drawn.choice((2, 4))} | maybe(drawn, 0.4, alpha=(4,), dropout=(0.0, 0.2))
        found |= maybe(drawn, 0.5, lora=(lora,))
    if "lora" in found:  # of these names nothing is trained
        found["optimizer"].pop("overrides", None)
    if drawn.random() < 0.4:
        held = {"sources": shelf.held}
        found["data"]["validation"] = held if data.get("streaming") or drawn.random() < 0.3 else {"share": 0.1}
    return found


def _budget(drawn: Random) -> Tree:
    sizes = ("1MiB", "2MiB", "4MiB", "16MiB", "64MiB", "1GiB")
    found: Tree = {"device": drawn.choice(sizes), "host": drawn.choice(sizes)}
    tiers: tuple[str, ...] = ("device", "host")
    if drawn.random() < 0.8:
        tiers = ("device", "host", "disk")
        found["disk"] = drawn.choice(("{run}/store", "{run}/store", ["{run}/a", "{run}/b"], "{drive}/{run}"))
        found |= maybe(drawn, 0.2, slots=(1, 2), durability=("step", "interval", "none"))
        if found.get("durability") == "interval":
            found |= maybe(drawn, 0.6, interval=(1, 2, 3, "1s"))
        found |= maybe(drawn, 0.05, endurance=({"per_day": "900TB"}, {"tbw": "1200TB", "days": 0.5}))
    found |= maybe(drawn, 0.25, weights=tiers, state=tiers, activations=tiers, gradients=tiers[1:])
    return found


def needs_norm(numbers: Tree) -> bool:
    """True if steps wait for the norm of all gradients, unless they speculate."""
    return numbers.get("clip_grad_norm", 1.0) is not None or numbers.get("precision") == "fp16"


def how(drawn: Random, numbers: Tree) -> Tree:
    found: Tree = {"device": "cpu", "budget": _budget(drawn)}
    found |= maybe(drawn, 0.5, schedule=("vertical", "horizontal"))
    found |= maybe(drawn, 0.3, delay=(0.0, 0.3, 1.0), recompute=(True, False))
    found["plan"] = "auto" if drawn.random() < 0.3 else None
    found |= maybe(drawn, 0.1, replan=(False,) if found["plan"] is None else (True, False))
    found |= maybe(drawn, 0.2, trace_steps=(0, 1, None), deterministic=(True, False), stage=(0, 1, 2, 3))
    if needs_norm(numbers):
        found |= maybe(drawn, 0.3, speculate=(True, False))
    if "disk" in found["budget"]:
        found |= maybe(drawn, 0.1, drive_tbw=(0.5, 600))
    found |= maybe(drawn, 0.03, report_to=("tensorboard",))
    return found


def any_run(drawn: Random, shelf: Shelf) -> Asked:
    numbers = _numbers(drawn, shelf)
    first, then = how(drawn, numbers), how(drawn, numbers)
    if "validation" in numbers["data"]:
        evaluate = {"every": drawn.choice((1, 2, 3))} | maybe(drawn, 0.5, batches=(1, 2))
        numbers["evaluate"] = evaluate
    for key in ("disk", "slots"):  # that a run does not change
        then["budget"].pop(key, None)
        if key in first["budget"]:
            then["budget"][key] = first["budget"][key]
    return Asked(
        numbers=numbers,
        how=first,
        then=then,
        killed=drawn.random() < 0.5,
        stops=drawn.randrange(1, numbers["steps"]),
    )


def as_json(tree: Tree) -> str:
    """A settings file: YAML reads JSON."""
    return json.dumps(tree, indent=1)
