"""The engine's optimizer for a Trainer's arguments."""

from dataclasses import replace
from typing import Any

from torch import nn

from penstock.config import Precision
from penstock.config.optimizer import AdamW, Lion, Moments, Muon, OptimizerSpec, Override
from penstock.errors import ConfigError
from penstock.optim.from_torch import override_for, spec_of
from penstock.optim.precision import precision_of_weights

_SGD_ARGS = frozenset({"momentum", "nesterov"})


def optimizer_of(trainer: Any, moments: Moments) -> OptimizerSpec:
    """The optimizer that a Trainer would create, with the parameters that it would not decay as an override, and
    ``moments`` in that form.

    Raises:
        ConfigError: ``optim``, or something in ``optim_args`` or ``optimizer_cls_and_kwargs``, is not among what the
            engine does.
    """
    return replace(_optimizer_of(trainer), moments=moments)


def _optimizer_of(trainer: Any) -> OptimizerSpec:
    args = trainer.args
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient: there is nothing to train")
    free = [name for name in trained if name not in decayed]
    overrides = (override_for(free, weight_decay=0.0),) if free else ()
    if trainer.optimizer_cls_and_kwargs is not None:
        kind, settings = trainer.optimizer_cls_and_kwargs
        if settings.get("weight_decay", args.weight_decay) != args.weight_decay:
            raise ConfigError(
                f"optimizer_cls_and_kwargs: weight_decay={settings['weight_decay']!r} would have no effect, as the "
                f"Trainer takes that of its arguments, {args.weight_decay!r}: give it there"
            )
        # A learning rate that is left out is the class's own, as in the library: not that of the arguments.
        if isinstance(kind, type) and issubclass(kind, OptimizerSpec):
            return _own(kind, dict(settings), args, overrides)
        return spec_of(kind, {**settings, "weight_decay": args.weight_decay}, overrides)
    return _by_name(trainer, overrides)


def _own(
    kind: type[OptimizerSpec], settings: dict[str, Any], args: Any, overrides: tuple[Override, ...]
) -> OptimizerSpec:
    """An optimizer of the engine's own. Muon's AdamW is that of the arguments, unless it is given."""
    for key, instead in (
        ("moments", "give EngineArguments(moments=...)"),
        ("overrides", "the Trainer says itself what does not decay (get_decay_parameter_names)"),
    ):
        if key in settings:
            raise ConfigError(f"optimizer_cls_and_kwargs: {key} cannot be honoured there: {instead}")
    if issubclass(kind, Muon):
        settings.setdefault(
            "adamw",
            AdamW(
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
                weight_decay=args.weight_decay,
            ),
        )
    settings |= {"weight_decay": args.weight_decay, "overrides": overrides}
    try:
        return kind(**settings)
    except TypeError as error:
        raise ConfigError(f"optimizer_cls_and_kwargs: {kind.__name__} does not take this: {error}") from error


def _by_name(trainer: Any, overrides: tuple[Override, ...]) -> OptimizerSpec:
    args, optim = trainer.args, trainer.args.optim
    name = str(getattr(optim, "value", optim))  # a program may have set the word
    if name not in ("adamw_torch", "adamw_torch_fused", "sgd", "lion_32bit"):
        raise ConfigError(f"optim={name!r} cannot be streamed: use adamw_torch, adamw_torch_fused, sgd or lion_32bit")
    given = {part.split("=")[0].strip() for part in (args.optim_args or "").split(",") if part.strip()}
    if unknown := given - (_SGD_ARGS if name == "sgd" else frozenset()):
        raise ConfigError(f"optim_args: {', '.join(sorted(unknown))} would have no effect with optim={name!r}")
    if name == "lion_32bit":
        betas = (args.adam_beta1, args.adam_beta2)
        return Lion(lr=args.learning_rate, betas=betas, weight_decay=args.weight_decay, overrides=overrides)
    kind, settings = trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
    return spec_of(kind, {**settings, "weight_decay": args.weight_decay}, overrides)


def precision_of(args: Any, model: nn.Module) -> Precision:
    """The precision that weights compute in: as the arguments say, or ``accelerate launch`` was told, else as the model
    is.

    Raises:
        ConfigError: the model is in fp16, and the arguments do not say so.
    """
    asked = "bf16" if args.bf16 else "fp16" if args.fp16 else args.mixed_precision
    return precision_of_weights(model) if asked == "no" else "bf16" if asked == "bf16" else "fp16"
