"""Arguments of training runs (``tests.any_run``), drawn at random."""

import random
from dataclasses import replace
from typing import Any

import torch

from tests.any_run import AFTER, Run
from tests.run_parts import CLASSES, DATA, EVENTS, MODELS, OF_TRL, Meddling

Settings = dict[str, Any]

_SCHEDULES: dict[str, list[Any]] = {
    "linear": [None],
    "cosine": [None, {"num_cycles": 1.5}],
    "cosine_with_restarts": [None, {"num_cycles": 2}],
    "polynomial": [None, {"power": 2.0, "lr_end": 1e-6}],
    "constant": [None],
    "constant_with_warmup": [None],
    "inverse_sqrt": [None, {"timescale": 3}],
    "reduce_lr_on_plateau": [None, {"patience": 0, "factor": 0.5}, {"mode": "max", "min_lr": [1e-4, 1e-5]}],
    "cosine_with_min_lr": [{"min_lr": 1e-4}, {"min_lr_rate": 0.2}],
    "cosine_warmup_with_min_lr": [{"min_lr_rate": 0.2}, {"min_lr": 1e-4, "warmup_lr_rate": 0.1}],
    "warmup_stable_decay": [{"num_decay_steps": 2}, {"num_decay_steps": 3, "min_lr_ratio": 0.1}],
    "greedy": [None, {"patience": 0}, {"patience": 0, "smooth": True, "window_size": 2, "factor": 0.5}],
}
_BY_METRIC = ("reduce_lr_on_plateau", "greedy")

_ALWAYS: dict[str, list[Any]] = {
    "learning_rate": [1e-3, 5e-3],
    "seed": [0, 3],
    "per_device_train_batch_size": [1, 2, 2, 3, 4],
    "per_device_eval_batch_size": [1, 2, 3, 8],
    "gradient_accumulation_steps": [1, 1, 2, 3, 4],
    "num_train_epochs": [1, 1, 1.5, 2, 2, 2.3, 0.4],
    "logging_strategy": ["steps", "steps", "steps", "epoch", "no"],
    "logging_steps": [1, 1, 2, 3, 0.3],
    "save_strategy": ["no", "no", "steps", "epoch", "best"],
    "save_steps": [1, 2, 3, 0.4],
}
_AT_TIMES: dict[str, tuple[float, list[Any]]] = {
    "max_steps": (0.3, [1, 3, 5]),
    "data_seed": (0.2, [5]),
    "lr_scheduler_type": (0.5, [*_SCHEDULES, *_BY_METRIC]),
    "warmup_steps": (0.4, [1, 2, 0.25, 10]),
    "weight_decay": (0.4, [0.1]),
    "max_grad_norm": (0.3, [0, 0.1, 100.0, float("inf")]),
    "optim": (0.3, ["adamw_torch", "sgd", "sgd", "sgd", "adafactor"]),
    "adam_beta2": (0.2, [0.95]),
    "adam_epsilon": (0.2, [1e-6]),
    "label_smoothing_factor": (0.15, [0.1]),
    "use_cache": (0.1, [True]),
    "activation_checkpointing": (0.2, [True]),
    "logging_first_step": (0.3, [True]),
    "logging_nan_inf_filter": (0.2, [False]),
    "include_num_input_tokens_seen": (0.3, ["all", "non_padding", True, False]),
    "log_level": (0.1, ["error", "warning"]),
    "disable_tqdm": (0.1, [False]),
    "skip_memory_metrics": (0.1, [False]),
    "prediction_loss_only": (0.2, [True]),
    "eval_do_concat_batches": (0.2, [False]),
    "eval_use_gather_object": (0.2, [True]),
    "eval_accumulation_steps": (0.2, [1, 2]),
    "include_for_metrics": (0.3, [["inputs"], ["loss"], ["inputs", "loss"]]),
    "save_total_limit": (0.3, [1, 2]),
    "save_only_model": (0.15, [True]),
    "ignore_data_skip": (0.2, [True]),
    "restore_callback_states_from_checkpoint": (0.3, [True]),
    "full_determinism": (0.1, [True]),
    "dataloader_drop_last": (0.3, [True]),
    "dataloader_num_workers": (0.03, [1]),
    "dataloader_pin_memory": (0.2, [False]),
    "remove_unused_columns": (0.2, [False]),
    "train_sampling_strategy": (0.3, ["group_by_length", "sequential", "random", "batch_sampler"]),
    "accelerator_config": (
        0.2,
        [
            *({"use_seedable_sampler": False}, {"split_batches": True}, {"even_batches": False}),
            *({"dispatch_batches": True}, {"non_blocking": True}),
            {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        ],
    ),
    "label_names": (0.1, [["labels"], ["labels", "attention_mask"]]),
    "average_tokens_across_devices": (0.1, [False]),
}
_EVALUATING: dict[str, tuple[float, list[Any]]] = {
    "eval_steps": (0.6, [1, 2, 3, 0.4]),
    "eval_delay": (0.2, [1, 2, 0.5]),
    "eval_on_start": (0.2, [True]),
}
_OPTIMIZERS: list[Any] = [
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.5}),
    (torch.optim.AdamW, {"lr": 2e-3}),
    (torch.optim.Adam, {}),
]
_FLAGS = ["should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop"]
_LOSSES_OF_PAIRS = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft"),
)


def _chosen(draw: random.Random, table: dict[str, tuple[float, list[Any]]]) -> Settings:
    return {name: draw.choice(values) for name, (chance, values) in table.items() if draw.random() < chance}


def any_run(draw: random.Random) -> Run:
    """Anything of the Trainer's."""
    model = draw.choice([*MODELS, "llama", "llama"])
    s: Settings = {name: draw.choice(values) for name, values in _ALWAYS.items()} | _chosen(draw, _AT_TIMES)
    data, count = draw.choice([*DATA, *["list", "datasets"] * 3]), draw.choice([1, 3, 5, 7, 8, 9])
    evaluated, measured = draw.choice(["", "one", "one", "two"]), draw.choice(["", "all", "all", "batches"])
    if evaluated:
        s |= {"eval_strategy": draw.choice(["steps", "steps", "epoch", "no"])} | _chosen(draw, _EVALUATING)
    orders = tuple(
        Meddling(event=draw.choice(EVENTS), call=draw.randint(1, 4), flag=draw.choice(_FLAGS))
        for _ in range(draw.choice([0, 0, 1, 2]))
    )
    run = Run(
        model=model,
        data=data,
        count=8 if data in ("iterated", "streamed") else count,
        extra=s.get("remove_unused_columns", True) and draw.random() < 0.3,
        evaluated=evaluated,
        eval_count=draw.choice([1, 4, 5, 7]),
        eval_data=draw.choice([*DATA, "list", "datasets"]),
        eval_labels=model == "t5" or draw.random() < 0.85,
        settings=s,
        metrics=measured,
        logits=draw.random() < 0.3,
        loss=model in ("llama", "classes", "tokens", "hidden") and draw.random() < 0.15,
        cls=draw.choice([*CLASSES, "", "", ""]),
        patience=draw.choice([1, 2]) if draw.random() < 0.15 else 0,
        meddling=orders,
        optimizer=draw.choice(_OPTIMIZERS) if draw.random() < 0.1 else None,
        before=tuple(draw.sample([name for name in AFTER if name != "train"], 1)) if draw.random() < 0.2 else (),
        after=tuple(draw.sample([*AFTER], draw.choice([0, 1, 2, 3]))),
        resumed=draw.choice([1, 2, 3]) if model != "tuples" and draw.random() < 0.3 else 0,
        on_disk=draw.random() < 0.2,
    )
    return _by_metric(draw, _allowed(draw, run))


def _allowed(draw: random.Random, run: Run) -> Run:
    """Without what the library refuses, or does for ever."""
    s = dict(run.settings)
    if kwargs := draw.choice(_SCHEDULES.get(s.get("lr_scheduler_type", ""), [None])):
        s["lr_scheduler_kwargs"] = kwargs
    if s.get("optim") == "sgd":
        s["optim_args"] = draw.choice([None, "momentum=0.9", "momentum=0.9,nesterov=True"])
    if run.metrics == "batches":
        s["batch_eval_metrics"] = True
    if run.model == "tuples":
        s["save_strategy"] = "no"
        s = {name: s[name] for name in s if name not in ("label_smoothing_factor", "activation_checkpointing")}
    if run.data in ("iterated", "streamed"):  # an epoch without a whole step goes round for ever
        s.setdefault("max_steps", 3)
        s |= {"per_device_train_batch_size": draw.choice([1, 2]), "gradient_accumulation_steps": draw.choice([1, 2])}
    if any(
        order.flag.endswith("stop") for order in run.meddling
    ):  # what is logged of a step that is broken off differs
        s["gradient_accumulation_steps"] = 1
    if "train" in run.after:
        s.pop("save_total_limit", None)  # the library goes by the time of checkpoints, if these are a second apart
    if run.resumed:
        s |= {"save_strategy": "steps", "save_steps": 1, "save_only_model": False}
    return replace(run, settings=s)


def _by_metric(draw: random.Random, run: Run) -> Run:
    """With what goes by a metric, and with that."""
    s = dict(run.settings)
    best = run.evaluated != "" and s["save_strategy"] != "no" and draw.random() < 0.4
    needed = best or run.patience or s["save_strategy"] == "best" or s.get("lr_scheduler_type") in _BY_METRIC
    if not needed:
        return run
    if best and s["save_strategy"] != "best":
        s |= {"eval_strategy": s["save_strategy"], "eval_steps": s["save_steps"]}
    elif not run.evaluated or s["eval_strategy"] == "no":
        s |= {"eval_strategy": draw.choice(["steps", "epoch"]), "eval_steps": 1}
    names = ["first_loss", "eval_second_loss"] if run.evaluated == "two" else ["loss", "eval_loss"]
    if run.metrics == "all" and run.evaluated != "two" and not s.get("prediction_loss_only"):
        names.append("predictions")
    s |= {"load_best_model_at_end": best, "metric_for_best_model": draw.choice(names)}
    s |= draw.choice([{}, {"greater_is_better": True}, {"greater_is_better": False}])
    return replace(run, settings=s, evaluated=run.evaluated or "one", eval_labels=True)


def any_trl_run(draw: random.Random) -> Run:
    """Anything of TRL's trainers."""
    run = any_run(draw)
    while run.model == "tuples":
        run = any_run(draw)
    name = draw.choice([*OF_TRL, "SFTTrainer", "SFTTrainer"])
    is_sft = name == "SFTTrainer"
    data = "streamed" if run.data in ("iterated", "counted", "streamed") and is_sft else "datasets"
    kind = draw.choice(["", ": text", ": chats", ": completed chats"]) if is_sft else ""
    left_out = {"include_for_metrics", "remove_unused_columns", "label_names", "train_sampling_strategy"}
    left_out |= {"use_cache", "activation_checkpointing", "accelerator_config"}
    left_out |= set() if is_sft else {"label_smoothing_factor"}
    s = {setting: value for setting, value in run.settings.items() if setting not in left_out}
    if data == "streamed":  # packed, an epoch may be a batch
        s = {"max_steps": 3} | s | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    s |= _of_sft(draw, kind) if is_sft else _of_preferences(draw, name)
    if s.get("loss_type") == "dft":
        s.pop("label_smoothing_factor", None)
    return replace(
        run,
        model=name,
        kind=kind,
        adapter=name != "RewardTrainer" and draw.random() < 0.2,
        data=data,
        eval_data="datasets",
        eval_labels=True,
        settings=s,
        metrics=run.metrics if is_sft else "",
        logits=run.logits and is_sft,
        loss=False,
        cls=run.cls if run.cls in ("own steps", "own prediction") else "",
        extra=False,
        before=tuple(what for what in run.before if what == "save model"),
        after=tuple(what for what in run.after if what not in ("predict", "evaluate other")),
    )


def _of_sft(draw: random.Random, kind: str) -> Settings:
    s: Settings = {"max_length": draw.choice([8, 16, 48, None])}
    packed = s["max_length"] is not None and draw.random() < 0.3
    if packed:
        s |= {"packing": True, "packing_strategy": draw.choice(["bfd", "bfd_split", "wrapped"])}
        s |= draw.choice([{}, {"eval_packing": False}])
    more: dict[str, tuple[float, list[Any]]] = {
        "loss_type": (0.3, ["dft"]),
        "padding_free": (0.4 if s["max_length"] is None else 0.0, [True]),
        "assistant_only_loss": (0.5 if "chats" in kind and not packed else 0.0, [True]),
        "completion_only_loss": (0.4 if kind in ("", ": completed chats") else 0.0, [True, False]),
        "truncation_mode": (0.2, ["keep_end"]),
        "shuffle_dataset": (0.2, [True]),
        "pad_to_multiple_of": (0.2, [8]),
    }
    return s | _chosen(draw, more)


def _of_preferences(draw: random.Random, name: str) -> Settings:
    common: dict[str, tuple[float, list[Any]]] = {"max_length": (0.3, [12]), "pad_to_multiple_of": (0.2, [8])}
    if name == "RewardTrainer":
        return _chosen(draw, common | {"center_rewards_coefficient": (0.4, [0.01])})
    if name == "KTOTrainer":
        s = {"per_device_train_batch_size": draw.choice([2, 3]), "per_device_eval_batch_size": 2}
        return s | _chosen(draw, common | {"loss_type": (0.5, ["apo_zero_unpaired"]), "desirable_weight": (0.3, [1.5])})
    kind = draw.choice(_LOSSES_OF_PAIRS)
    s = {"loss_type": draw.choice([[kind], [kind], [kind, "sft"]])} if kind != "sft" else {"loss_type": ["sft"]}
    if kind in ("exo_pair", "robust"):
        s["label_smoothing"] = 0.1
    if len(s["loss_type"]) > 1:
        s |= draw.choice([{}, {"loss_weights": [0.7, 0.3]}])
    more: dict[str, tuple[float, list[Any]]] = {
        "ld_alpha": (0.2, [0.5]),
        "use_weighting": (0.2, [True]),
        "padding_free": (0.2, [True]),
        "f_divergence_type": (0.2, ["js_divergence", "alpha_divergence", "forward_kl"]),
    }
    return s | _chosen(draw, common | more)
