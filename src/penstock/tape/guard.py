"""Keeps a model whose weights the engine holds from being used as if it had them: its placeholders read as NaN."""

from typing import Any, NoReturn

from torch import nn

from penstock.errors import ModelError
from penstock.tape.passage import current_passage


def guard(model: nn.Module, instead: str) -> None:
    """From now on the model's forward outside of the engine, and its ``state_dict``, are errors that say ``instead``.

    For loops in which others get hold of the model: callbacks, and code behind the training. Of a model with adapters
    the one below them is guarded, too.
    """

    def refuse(*_: Any) -> NoReturn:
        raise ModelError(f"the model's weights are the engine's, and it has none of its own: {instead}")

    def check_forward(*_: Any) -> None:
        if current_passage() is None:
            refuse()

    below = getattr(model, "get_base_model", None)
    for module in {model, below() if callable(below) else model}:
        module.register_forward_pre_hook(check_forward)
        module.register_state_dict_pre_hook(refuse)
        module.register_load_state_dict_pre_hook(refuse)
