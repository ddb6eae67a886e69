"""Other tools' names for the settings here, for those who bring a file of theirs: looked up where a key is unknown.

The names are those of Hugging Face's and TRL's training arguments, DeepSpeed's JSON and axolotl's YAML.
"""

import re
from collections.abc import Container, Mapping


def counterpart(
    key: str, section: str | None = None, known: Container[str] = (), *, of_wrap: bool = False
) -> str | None:
    """A hint about another tool's ``key``, found in a settings file within a ``section`` that has the ``known``
    settings; None: it is an option of a command, or an argument, which have names of their own (``of_wrap``: of who has
    no settings file). None: it is no name of theirs."""
    key = key.replace("-", "_")
    found = HERE.get(f"{section}.{key}") or HERE.get(key)
    first = re.match(r"\w*", found or key)
    if of_wrap and first and first[0] in _OF_WRAP:
        return _OF_WRAP[first[0]]
    if found is None or found.startswith("drop it"):
        return found
    if section is None:
        return f"in a settings file it is {found}"
    if section in _LIKE:  # a setting that it has itself is meant there
        found = re.sub(rf"\b{_LIKE[section]}\.(\w+)", lambda m: f"{section}.{m[1]}" if m[1] in known else m[0], found)
    return f"here it is {found}"


_LIKE = {
    "optimizer.adamw": "optimizer",
    "optimizer.overrides": "optimizer",
    "data.validation": "data",
    "data.validation.sources": "data.sources",
}
"""Sections that have settings of another one."""


_RANKS = "here it is mesh=penstock.torchrun_mesh({}=N), in each process that torchrun has started"
_OF_WRAP: Mapping[str, str] = {
    **{key: _RANKS.format(axis) for key, axis in {"pipeline": "pp", "copies": "copies", "cp": "cp"}.items()},
    "model": "penstock.hf.load opens a model's folder or name: give its model, and weights= its weights",
    "lora": "here it is the model itself: peft.get_peft_model(model, ...)",
    "lr_schedule": "here it is a scheduler of torch's on engine.optimizer",
    **dict.fromkeys(
        ("data", "batch", "micro_batch_size", "steps", "epochs", "evaluate", "report_to"),
        "that is for the loop which calls engine.step(micro_batches) to decide",
    ),
}
"""Answers for callers of ``wrap``, by settings and sections."""

_STEP = "batch.sequences counts the sequences of a whole step, over all micro-batches and ranks"
_SPLIT = f"{_STEP}; without micro_batch_size the plan cuts it"
_KEPT = (
    "with budget.disk every step, or one every budget.interval, is committed, and the last commit is kept; "
    "penstock export writes it as a Hugging Face folder"
)
_LOGGED = "every step is written to metrics.jsonl in the run's folder"
_STREAMED = "nothing is quantised; weights that do not fit are streamed within budget"
_OWN_BATCH = "BatchNorm normalises with its own micro-batch's statistics; sync_buffers is about running ones"
_WANDB = "report_to: wandb; the project is WANDB_PROJECT in the environment"

_TABLE = {
    # the model, and where the run is kept
    "base_model base_model_config model_name model_name_or_path": "model.path",
    "model_revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "output_dir logging_dir": "run (the one folder of the run)",
    "resume_from_checkpoint auto_resume_from_checkpoints": (
        "drop it: penstock resume RUN goes on, and so does penstock train CONFIG --resume"
    ),
    "save_steps save_strategy saves_per_epoch": f"budget.durability and budget.interval ({_KEPT})",
    "save_total_limit save_only_model save_safetensors": f"drop it: {_KEPT}",
    # the batch and the length of the run
    "gradient_accumulation_steps": f"batch.sequences ({_SPLIT})",
    "train_batch_size global_batch_size": "batch.sequences (of a whole step)",
    "per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu": (
        f"micro_batch_size and batch.sequences ({_SPLIT})"
    ),
    "batch_size": f"batch.sequences ({_STEP})",
    "micro_batch_size": f"micro_batch_size (outside of any section; {_STEP})",
    "num_train_epochs num_epochs": "epochs (instead of steps)",
    "max_steps total_num_steps": "steps (optimizer steps, instead of epochs)",
    "data_seed": "seed",
    # the optimizer
    "learning_rate lr warmup_max_lr": "optimizer.lr",
    "optim optimizer.type": "optimizer.name (adamw, adam, sgd, lion or muon)",
    "optimizer.params": "optimizer (these settings stand in the section itself)",
    "adam_beta1 adam_beta2 betas": "optimizer.betas (both, as [0.9, 0.999])",
    "adam_epsilon eps": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay",
    "momentum": "optimizer.momentum",
    "max_grad_norm gradient_clipping": "clip_grad_norm (null, not 0, turns it off)",
    # the learning rate's schedule
    "lr_scheduler_type": "lr_schedule.kind (constant, linear, cosine or wsd)",
    "lr_scheduler scheduler": "lr_schedule (a section; its kind is the schedule's name)",
    "warmup_steps warmup_num_steps": "lr_schedule.warmup_steps",
    "warmup_ratio": "lr_schedule.warmup_share (a share of all steps)",
    "min_lr_ratio min_lr_rate cosine_min_lr_ratio cos_min_ratio": "lr_schedule.final",
    # the data
    "datasets dataset dataset_name train_file pretraining_dataset": "data.sources",
    "dataset_config_name": "data.sources.subset",
    "data.sources.type data.sources.ds_type": "data.sources.kind",
    "data.sources.name": "data.sources.subset",
    "field field_messages field_system field_tools field_instruction field_input field_output text_column "
    "message_property_mappings dataset_text_field columns column_mapping": (
        "data.sources.fields (such as {messages: chat}: the name here, then the file's)"
    ),
    "test_datasets validation_file": "data.validation.sources",
    "val_set_size validation_split_percentage": "data.validation.share (from 0 to 1)",
    "dataset_prepared_path": "data.prepared",
    "sequence_len max_seq_length max_seq_len max_length model_max_length cutoff_len block_size seq_length": (
        "data.sequence_length"
    ),
    "sample_packing eval_sample_packing pad_to_sequence_len": "data.packing",
    "train_on_inputs": "data.loss_on (true is all, false is answers)",
    "assistant_only_loss completion_only_loss": "data.loss_on (true is answers, false is all)",
    "tokenizer_name tokenizer_name_or_path tokenizer_config": "data.tokenizer",
    "chat_template chat_template_jinja chat_template_path": "data.chat_template (a file)",
    "dataloader_num_workers dataloader_prefetch_factor": "drop it: data are read ahead by themselves",
    # evaluation, and what is said
    "eval_steps eval_strategy evaluation_strategy": "evaluate.every (counts steps)",
    "evals_per_epoch": "evaluate.every (counts the steps between two evaluations)",
    "per_device_eval_batch_size eval_batch_size": "evaluate.batches (how many; each is as large as a step's)",
    "logging_steps logging_strategy logging_first_step steps_per_print": f"drop it: {_LOGGED}",
    "use_wandb wandb_project wandb_entity wandb_name run_name": f"report_to ({_WANDB})",
    "use_tensorboard": "report_to (report_to: tensorboard)",
    "use_mlflow": "report_to (report_to: mlflow)",
    # precision and memory
    "bf16 fp16 mixed_precision torch_dtype dtype": "precision (fp32, bf16 or fp16)",
    "load_in_4bit load_in_8bit": f"drop it: {_STREAMED}",
    "gradient_checkpointing activation_checkpointing": (
        "recompute (left out, as few blocks as budget.device allows are computed again)"
    ),
    "offload_optimizer offload_optimizer_device": "budget.state (device, host or disk)",
    "offload_param offload_param_device": "budget.weights (device, host or disk)",
    "nvme_path": "budget.disk",
    "zero_optimization zero_stage deepspeed fsdp fsdp_config": (
        "budget and stage (budget says how much memory of each tier; stage is ZeRO's, of several ranks)"
    ),
    "broadcast_buffers ddp_broadcast_buffers": "sync_buffers (true is first, false is own; there is mean, too)",
    "sync_bn sync_batchnorm": f"drop it: {_OWN_BATCH}",
    "gpu_memory_limit max_memory": "budget.device and budget.host",
    "torch_compile": "compile",
    "pp": "pipeline",
    # adapters
    "adapter": "lora (a section: lora: {rank: 16})",
    "lora_r lora_rank lora.r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "lora_target_linear": "lora.target_modules (all-linear)",
}
HERE: Mapping[str, str] = {name: said for names, said in _TABLE.items() for name in names.split()}
"""The settings here that do what one of another tool does, and in brackets what else to know."""
