"""Other tools' names for the settings here, for those who bring a file of theirs: looked up where a key is unknown.

The names are those of Hugging Face's and TRL's training arguments, DeepSpeed's JSON and axolotl's YAML.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """The settings here that do what a setting of another tool does.

    ``keys``: the dotted names here; none: nothing has to be said. ``differs``: what else to know.
    """

    keys: tuple[str, ...] = ()
    differs: str = ""

    def __str__(self) -> str:
        if not self.keys:
            return f"drop it: {self.differs}"
        return f"here it is {' and '.join(self.keys)}" + (f" ({self.differs})" if self.differs else "")


def counterpart(key: str, section: str = "", known: Container[str] = ()) -> Counterpart | None:
    """The counterpart of another tool's ``key``, found within a ``section`` that has the ``known`` settings; None: it
    is no name of theirs. A setting that the section has itself is meant there: ``optimizer.adamw.lr``.
    """
    found = ELSEWHERE.get(f"{section}.{key}") or ELSEWHERE.get(key)
    if found is None or not section:
        return found
    last = {whole: whole.rpartition(".")[2] for whole in found.keys}
    return replace(found, keys=tuple(f"{section}.{last[k]}" if last[k] in known else k for k in found.keys))


def counterpart_among(
    key: str, known: Container[str], sections: Container[str] = (), spelled: Callable[[str], str] = str
) -> str | None:
    """A hint about another tool's ``key`` where settings are options of a command or arguments of a function: the
    ``known`` ones, of which only ``sections`` have settings inside. None: it is no name of theirs, or has no setting
    here. ``spelled``: how a known one is written.
    """
    found = ELSEWHERE.get(key.replace("-", "_"))
    keys = (key,) if found is None else found.keys
    here = [spelled(name) for whole in keys if (name := _among(whole, known, sections))]
    if here:
        return f"here it is {' and '.join(here)}"
    parts = [whole.partition(".")[0] for whole in keys]
    if "mesh" in known and (said := next((_OF_WRAP[part] for part in parts if part in _OF_WRAP), None)):
        return said
    return f"in a settings file it is {' and '.join(keys)}" if found is not None and keys else None


def _among(whole: str, known: Container[str], sections: Container[str]) -> str | None:
    section, _, last = whole.rpartition(".")
    alone = _ALONE.get(whole, last)
    if section in sections and whole not in _ALONE:
        return whole
    return alone if alone in known else None


_ALONE = {"batch.sequences": "batch", "optimizer.name": "optimizer", "model.path": "model", "run": ""}
"""Names of settings outside of their sections, if not the last part of their own. ``run`` has none: as an argument of
``wrap`` it is a run that is there, and no folder that something is written to."""


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
"""Answers for callers of ``wrap``, who have no settings file, by its settings and sections."""


def _is(*keys: str, differs: str = "") -> Counterpart:
    return Counterpart(keys=keys, differs=differs)


def _named(names: str, found: Counterpart) -> Mapping[str, Counterpart]:
    return dict.fromkeys(names.split(), found)


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

ELSEWHERE: Mapping[str, Counterpart] = {
    # the model, and where the run is kept
    **_named("base_model base_model_config model_name model_name_or_path", _is("model.path")),
    "model_revision": _is("model.revision"),
    "trust_remote_code": _is("model.trust_remote_code"),
    **_named("output_dir logging_dir", _is("run", differs="the one folder of the run")),
    **_named(
        "resume_from_checkpoint auto_resume_from_checkpoints",
        _is(differs="penstock resume RUN goes on, and so does penstock train CONFIG --resume"),
    ),
    **_named("save_steps save_strategy saves_per_epoch", _is("budget.durability", "budget.interval", differs=_KEPT)),
    **_named("save_total_limit save_only_model save_safetensors", _is(differs=_KEPT)),
    # the batch and the length of the run
    "gradient_accumulation_steps": _is("batch.sequences", differs=_SPLIT),
    **_named("train_batch_size global_batch_size", _is("batch.sequences", differs="of a whole step")),
    **_named(
        "per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu",
        _is("micro_batch_size", "batch.sequences", differs=_SPLIT),
    ),
    "batch_size": _is("batch.sequences", differs=_STEP),
    "micro_batch_size": _is("micro_batch_size", differs=f"outside of any section; {_STEP}"),
    **_named("num_train_epochs num_epochs", _is("epochs", differs="instead of steps")),
    **_named("max_steps total_num_steps", _is("steps", differs="optimizer steps, instead of epochs")),
    "data_seed": _is("seed"),
    # the optimizer
    **_named("learning_rate lr warmup_max_lr", _is("optimizer.lr")),
    **_named("optim optimizer.type", _is("optimizer.name", differs="adamw, adam, sgd, lion or muon")),
    "optimizer.params": _is("optimizer", differs="these settings stand in the section itself"),
    **_named("adam_beta1 adam_beta2 betas", _is("optimizer.betas", differs="both, as [0.9, 0.999]")),
    **_named("adam_epsilon eps", _is("optimizer.eps")),
    "weight_decay": _is("optimizer.weight_decay"),
    "momentum": _is("optimizer.momentum"),
    **_named("max_grad_norm gradient_clipping", _is("clip_grad_norm", differs="null, not 0, turns it off")),
    # the learning rate's schedule
    "lr_scheduler_type": _is("lr_schedule.kind", differs="constant, linear, cosine or wsd"),
    **_named("lr_scheduler scheduler", _is("lr_schedule", differs="a section; its kind is the schedule's name")),
    **_named("warmup_steps warmup_num_steps", _is("lr_schedule.warmup_steps")),
    "warmup_ratio": _is("lr_schedule.warmup_share", differs="a share of all steps"),
    **_named("min_lr_ratio min_lr_rate cosine_min_lr_ratio cos_min_ratio", _is("lr_schedule.final")),
    # the data
    **_named("datasets dataset dataset_name train_file pretraining_dataset", _is("data.sources")),
    "dataset_config_name": _is("data.sources.subset"),
    **_named("data.sources.type data.sources.ds_type", _is("data.sources.kind")),
    "data.sources.name": _is("data.sources.subset"),
    **_named(
        "field field_messages field_system field_tools field_instruction field_input field_output text_column "
        "message_property_mappings dataset_text_field columns column_mapping",
        _is("data.sources.fields", differs="such as {messages: chat}: the name here, then the file's"),
    ),
    **_named("test_datasets validation_file", _is("data.validation.sources")),
    **_named("val_set_size validation_split_percentage", _is("data.validation.share", differs="from 0 to 1")),
    "dataset_prepared_path": _is("data.prepared"),
    **_named(
        "sequence_len max_seq_length max_seq_len max_length model_max_length cutoff_len block_size seq_length",
        _is("data.sequence_length"),
    ),
    **_named("sample_packing eval_sample_packing pad_to_sequence_len", _is("data.packing")),
    "train_on_inputs": _is("data.loss_on", differs="true is all, false is answers"),
    **_named("assistant_only_loss completion_only_loss", _is("data.loss_on", differs="true is answers, false is all")),
    **_named("tokenizer_name tokenizer_name_or_path tokenizer_config", _is("data.tokenizer")),
    **_named("chat_template chat_template_jinja chat_template_path", _is("data.chat_template", differs="a file")),
    **_named("dataloader_num_workers dataloader_prefetch_factor", _is(differs="data are read ahead by themselves")),
    # evaluation, and what is said
    **_named("eval_steps eval_strategy evaluation_strategy", _is("evaluate.every", differs="counts steps")),
    "evals_per_epoch": _is("evaluate.every", differs="counts the steps between two evaluations"),
    **_named(
        "per_device_eval_batch_size eval_batch_size",
        _is("evaluate.batches", differs="how many; each is as large as a step's"),
    ),
    **_named("logging_steps logging_strategy logging_first_step steps_per_print", _is(differs=_LOGGED)),
    **_named("use_wandb wandb_project wandb_entity wandb_name run_name", _is("report_to", differs=_WANDB)),
    "use_tensorboard": _is("report_to", differs="report_to: tensorboard"),
    "use_mlflow": _is("report_to", differs="report_to: mlflow"),
    # precision and memory
    **_named("bf16 fp16 mixed_precision torch_dtype dtype", _is("precision", differs="fp32, bf16 or fp16")),
    **_named("load_in_4bit load_in_8bit", _is(differs=_STREAMED)),
    **_named(
        "gradient_checkpointing activation_checkpointing",
        _is("recompute", differs="left out, as few blocks as budget.device allows are computed again"),
    ),
    **_named("offload_optimizer offload_optimizer_device", _is("budget.state", differs="device, host or disk")),
    **_named("offload_param offload_param_device", _is("budget.weights", differs="device, host or disk")),
    "nvme_path": _is("budget.disk"),
    **_named(
        "zero_optimization zero_stage deepspeed fsdp fsdp_config",
        _is("budget", "stage", differs="budget says how much memory of each tier; stage is ZeRO's, of several ranks"),
    ),
    **_named(
        "broadcast_buffers ddp_broadcast_buffers",
        _is("sync_buffers", differs="true is first, false is own; there is mean, too"),
    ),
    **_named("sync_bn sync_batchnorm", _is(differs=_OWN_BATCH)),
    **_named("gpu_memory_limit max_memory", _is("budget.device", "budget.host")),
    "torch_compile": _is("compile"),
    "pp": _is("pipeline"),
    # adapters
    "adapter": _is("lora", differs="a section: lora: {rank: 16}"),
    **_named("lora_r lora_rank lora.r", _is("lora.rank")),
    "lora_alpha": _is("lora.alpha"),
    "lora_dropout": _is("lora.dropout"),
    "lora_target_modules": _is("lora.target_modules"),
    "lora_target_linear": _is("lora.target_modules", differs="all-linear"),
}
