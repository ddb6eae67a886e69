"""The fields of ``transformers.TrainingArguments`` when the engine trains, each of one of three kinds.

``KEPT``      the Trainer's own code carries it out, as without the engine
``ENGINE``    the engine carries it out, or does so in any case
``REFUSED``   cannot be honoured: any value but the default is an error that says why, and what to do

A field that is in none of them, of a version of the library that is newer than this table, is refused like the last.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from numbers import Real
from typing import Any, NoReturn

from penstock.errors import ConfigError
from penstock.ranks.start import can_start_again

_LIBRARIES = ("transformers", "trl")

KEPT = frozenset(
    {
        # how long, on what, and in which order; how long the library's own gathers wait for other processes
        "ddp_timeout",
        *("output_dir", "num_train_epochs", "max_steps", "seed", "data_seed", "full_determinism", "use_cpu", "tf32"),
        *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        *("average_tokens_across_devices", "train_sampling_strategy", "length_column_name", "label_names"),
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
        *("remove_unused_columns", "accelerator_config", "ignore_data_skip", "resume_from_checkpoint"),
        # the loss and the learning rate
        *("label_smoothing_factor", "neftune_noise_alpha", "use_cache"),
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
        # what is said about it
        *("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter"),
        *("include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name"),
        *("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "skip_memory_metrics"),
        # evaluation
        *("eval_strategy", "eval_steps", "eval_delay", "prediction_loss_only", "eval_on_start"),
        *("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics"),
        *("batch_eval_metrics", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        # checkpoints and the hub
        *("save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit"),
        "restore_callback_states_from_checkpoint",
        *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
        *("hub_revision", "do_train", "do_eval", "do_predict"),
    }
)

ENGINE: Mapping[str, str] = {
    "learning_rate": "lr of the engine's optimizer, before the schedule",
    "optim": "the engine's own: adamw_torch, adamw_torch_fused, sgd, and lion_32bit",
    "optim_args": "momentum and nesterov, with optim='sgd'",
    "weight_decay": "for the parameters that the Trainer decays; 0 for the others",
    "adam_beta1": "of adamw and lion",
    "adam_beta2": "of adamw and lion",
    "adam_epsilon": "of adamw",
    "max_grad_norm": "clipping, exact; 0 or inf: none",
    "bf16": "weights that compute are bf16, and their master copy is fp32; there is no autocast",
    "fp16": "as bf16, with a loss scale",
    "activation_checkpointing": "what the engine does where device memory is short: blocks are recomputed from their "
    "inputs, as few as have to be. EngineArguments(recompute=True) recomputes all",
    "gradient_checkpointing": "the old name of activation_checkpointing",
}

_RANKS = "the engine shares the state among the processes that torchrun has started (EngineArguments(stage=...))"
_NO_DDP = "no model is wrapped in DistributedDataParallel: the engine adds up gradients itself"
_MEMORY = "the engine keeps device memory within its budget by itself"
_COMPILE = "it compiles the model as a whole: EngineArguments(compile=True), or a backend's name, compiles its blocks"
_RECOMPUTE = "blocks are recomputed by the engine, and EngineArguments(recompute=...) is all that there is to choose"

REFUSED: Mapping[str, str] = {
    "optim_target_modules": "the optimizers that take it (GaLore, APOLLO) are not among the engine's",
    "bf16_full_eval": "evaluation runs on the weights that train, in their precision: set bf16",
    "fp16_full_eval": "evaluation runs on the weights that train, in their precision: set fp16",
    "activation_checkpointing_kwargs": f"{_RECOMPUTE}. gradient_checkpointing_kwargs is its old name",
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "use_liger_kernel": "it replaces the forward of blocks that the engine runs one by one",
    "liger_kernel_config": "it replaces the forward of blocks that the engine runs one by one",
    "torch_empty_cache_steps": _MEMORY,
    "auto_find_batch_size": f"{_MEMORY}, and says before it starts what would fit: choose a batch size that does",
    "enable_jit_checkpoint": "it saves in the middle of a step: use save_strategy='steps', and resume from the last",
    "parallelism_config": _RANKS,
    "fsdp": _RANKS,
    "fsdp_config": _RANKS,
    "deepspeed": "the engine does what it would do: give the budget instead",
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": f"{_NO_DDP}. EngineArguments(sync_buffers='first') gives all ranks the first's, and "
    "'own' leaves each its own",
    "ddp_static_graph": _NO_DDP,
    "ddp_backend": "processes speak to each other by gloo without GPUs, and by NCCL with",
    "local_rank": "whoever has started the process says that",
    "debug": "it watches weights that are not on the device outside of their block's turn",
}

_REFERENCE = "the reference is the model as it is before its first step, or without its adapters"

TRL_KEPT = frozenset(
    {
        *("model_init_kwargs", "trust_remote_code", "chat_template_path", "router_aux_loss_coef", "loss_type"),
        *("dataset_text_field", "dataset_kwargs", "dataset_num_proc", "eos_token", "pad_token", "shuffle_dataset"),
        *("max_length", "truncation_mode", "packing", "packing_strategy", "padding_free", "pad_to_multiple_of"),
        *("eval_packing", "completion_only_loss", "assistant_only_loss"),
        # of preferences
        *("beta", "label_smoothing", "loss_weights", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef"),
        *("discopop_tau", "use_weighting", "precompute_ref_log_probs", "precompute_ref_batch_size"),
        *("disable_dropout", "center_rewards_coefficient", "desirable_weight", "undesirable_weight"),
    }
)
TRL_REFUSED: Mapping[str, str] = {
    "activation_offloading": "the engine moves activations itself: give the budget, or pin budget.activations",
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), _REFERENCE),
}

_GENERATION = (
    "text is generated a token at a time, and the engine's weights pass by in a step or an evaluation alone: evaluate "
    "the loss, and generate with the model that save_model has written and from_pretrained loads"
)
SEQ2SEQ_REFUSED: Mapping[str, str] = dict.fromkeys(
    ("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"), _GENERATION
)

_UNKNOWN = (
    "this version of penstock does not know it. An option of your own belongs in a class of its own, of which "
    "HfArgumentParser takes several"
)


def refuse_foreign(given: Mapping[str, Any]) -> None:
    """Refuse arguments of a Trainer's constructor that bring an optimizer, or a function that makes models.

    Raises:
        ConfigError: one of them is there; it is named.
    """
    for name in ("optimizers", "model_init"):
        value = given.get(name)
        if any(part is not None for part in (value if isinstance(value, tuple) else (value,))):
            raise ConfigError(
                f"{name} cannot be honoured: the engine makes the optimizer, and for the model that it is given"
            )


def check_trainer(trainer: Any, cp: int) -> None:
    """Refuse what cannot be honoured of a Trainer, ``cp`` of whose ranks share each sequence.

    Raises:
        ConfigError: as ``check_arguments``, ``check_launch`` and ``check_spans``; or the model recomputes its blocks.
    """
    check_arguments(trainer.args)
    check_launch(trainer)
    check_spans(trainer, cp)
    if getattr(trainer.model, "is_activation_checkpointing", False):
        raise ConfigError(
            "the model has activation checkpointing switched on, and the engine recomputes blocks by itself: "
            "call model.activation_checkpointing_disable()"
        )


def check_arguments(args: Any) -> None:
    """Refuse what cannot be honoured.

    Raises:
        ConfigError: an argument is not at its default and would have no effect, or another than it says.
    """
    refused = {**REFUSED, **TRL_REFUSED, **SEQ2SEQ_REFUSED}
    library: Any = next(filter(is_of_library, type(args).__mro__))
    known = {field.name: field for field in dataclasses.fields(library)}  # a subclass may have defaults of its own
    for field in dataclasses.fields(args):
        if field.name in KEPT or field.name in ENGINE or field.name in TRL_KEPT:
            continue
        value = getattr(args, field.name)
        if value is None or value in ([], {}, "", _default_of(known.get(field.name, field))):
            continue
        why = refused.get(field.name, _UNKNOWN)
        raise ConfigError(f"{field.name}={value!r} cannot be honoured: {why}. Leave it out")
    started = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if args.world_size != started:
        raise ConfigError(
            f"{started} processes started, and the TrainingArguments know of {args.world_size}: they look for GPUs, "
            "and there are none. Give them use_cpu=True"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"{args.n_gpu} GPUs are visible, and the Trainer would copy the model to each. Start a process for each, "
            f"torchrun --nproc-per-node {args.n_gpu}, or make one visible, with CUDA_VISIBLE_DEVICES=0"
        )
    if args.world_size > 1 and not args.accelerator_config.even_batches:
        raise ConfigError(
            "accelerator_config: even_batches=False cannot be honoured by several processes, which need as many "
            "micro-batches each: leave it out, or set dataloader_drop_last=True"
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ConfigError(
            "average_tokens_across_devices=False cannot be honoured by several processes: each would divide by the "
            "labels of its own micro-batches, and the engine deals those out in another order. Leave it out"
        )
    if args.world_size > 1 and not can_start_again():
        raise ConfigError(
            "torchrun was told to start the processes again if one fails (--max-restarts), and the TrainingArguments "
            "have started torch.distributed, which may look for those of the attempt before then: call "
            "penstock.torchrun_mesh() before the TrainingArguments are made"
        )
    limit_of(args)
    if args.load_best_model_at_end and args.save_only_model:
        raise ConfigError(
            "load_best_model_at_end=True needs the whole state in the checkpoints: leave save_only_model out"
        )


def limit_of(args: Any) -> float | None:
    """The limit of the norm that the arguments ask for; None: there is none.

    Raises:
        ConfigError: it is no number.
    """
    given = args.max_grad_norm
    if isinstance(given, bool) or not isinstance(given, Real):  # numpy's are numbers, too
        raise ConfigError(f"max_grad_norm={given!r}: must be a number. 0 stands for no clipping")
    limit = float(given)
    return limit if limit > 0 and math.isfinite(limit) else None


def check_limit(args: Any, limit: float | None) -> None:
    """Refuse ``max_grad_norm`` that was changed since the engine was made, which clips by ``limit``.

    Raises:
        ConfigError: it is another one now, which the library's own steps would heed.
    """
    if limit_of(args) != limit:
        raise ConfigError(
            f"max_grad_norm={args.max_grad_norm!r} was set after the engine was made, which clips by "
            f"{limit!r}, and cannot be honoured: give it in the TrainingArguments, and make another trainer"
        )


def check_launch(trainer: Any) -> None:
    """Refuse what ``accelerate launch`` was told that the arguments do not say, and that cannot be honoured.

    Raises:
        ConfigError: it was told to shard the model by another engine or in another way, to compile it, another
            precision than the engine's, or to start several processes, of which it has started one.
    """
    if trainer.args.world_size == 1 and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys():
        raise ConfigError(
            "accelerate launch was told to start several processes, and without GPUs starts this one alone: start them "
            "with torchrun --nproc-per-node N SCRIPT. Where one is meant, unset MASTER_ADDR, and leave --num_processes "
            "out"
        )
    other = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed" if trainer.is_deepspeed_enabled else None
    if other is not None:
        raise ConfigError(
            f"accelerate was told to use {other}, and the engine does what that would do: start the processes with "
            "torchrun --nproc-per-node N SCRIPT, or have accelerate launch use neither (--multi_gpu)"
        )
    shares = trainer.accelerator.parallelism_config
    if shares is not None and shares.total_size > 1:
        raise ConfigError(
            "accelerate was told how processes share the model (parallelism_config), and the engine shares it itself: "
            "leave --use_parallelism_config out"
        )
    if trainer.args.mixed_precision not in ("no", "bf16", "fp16"):
        raise ConfigError(
            f"accelerate was told to compute in {trainer.args.mixed_precision}, which the engine does not: give "
            "accelerate launch --mixed_precision bf16"
        )
    plugin = getattr(trainer.accelerator.state, "dynamo_plugin", None)  # none where a program has made the state itself
    backend = "NO" if plugin is None else plugin.backend.value
    if backend != "NO":
        raise ConfigError(
            f"accelerate was told to compile the model (dynamo_backend {backend.lower()}), as a whole: "
            f"EngineArguments(compile={backend.lower()!r}) compiles its blocks. Give it --dynamo_backend no"
        )


def check_spans(trainer: Any, cp: int) -> None:
    """Refuse what is made of whole sequences where ``cp`` ranks share each: each has a span, whose losses are added up.

    Raises:
        ConfigError: the loss is none of the model's own or TRL's; noise is added to embeddings; or evaluation wants
            more than the loss.
    """
    if cp == 1:
        return
    smoothing, noise = trainer.args.label_smoothing_factor, trainer.args.neftune_noise_alpha
    for asked, what in (
        (type(trainer).compute_loss not in trainer.losses_of_spans, f"{type(trainer).__name__}.compute_loss"),
        (trainer.compute_loss_func is not None, "compute_loss_func"),
        (smoothing > 0, f"label_smoothing_factor={smoothing:g}"),
        (noise is not None, f"neftune_noise_alpha={noise}, which goes by a sequence's length"),
        (getattr(trainer, "aux_loss_enabled", False), "a router's loss (output_router_logits)"),
    ):
        if asked:
            raise ConfigError(
                f"cp={cp} cannot be had with {what}: ranks that share each sequence have a span of it each, and add up "
                "the model's own losses of these. Leave one of the two out"
            )
    if trainer.compute_metrics is not None and not trainer.args.prediction_loss_only:
        refuse_logits(cp)


def refuse_logits(cp: int) -> NoReturn:
    """Raises:
    ConfigError: ``cp`` ranks share each sequence, and more of it is asked for than its loss.
    """
    raise ConfigError(
        f"cp={cp}: ranks that share each sequence have the logits of a span each, and evaluate the loss alone: leave "
        "compute_metrics out, set prediction_loss_only=True, and call evaluate"
    )


def is_of_library(named: Any) -> bool:
    """True of a class, or a function, that is one of the libraries' own."""
    return str(named.__module__).partition(".")[0] in _LIBRARIES


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
