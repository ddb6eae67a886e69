"""Names of torch by which a loop clips gradients and steps optimizers, and functions in their places that look on."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers


def look_at_uses(check_clipping: Callable[[Iterable[Any]], None], check_step: Callable[[Any], None]) -> None:
    """From now on ``check_clipping`` sees the parameters of each call of torch's functions that clip gradients, also of
    those by other libraries, and ``check_step`` each of torch's optimizers whose ``step`` is called; either may refuse.

    Functions are put in the places of ``clip_grads_with_norm_``, under its private name, too, which ``clip_grad_norm_``
    calls wherever a loop has that from, and of ``clip_grad_value_``. Without: both would do nothing, and say nothing,
    where gradients never are on parameters.
    """

    def checked(clip: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(clip)
        def looked_at(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            check_clipping(found)
            return clip(found, *args, **kwargs)

        return looked_at

    clip_grad._clip_grads_with_norm_ = utils.clip_grads_with_norm_ = checked(clip_grad._clip_grads_with_norm_)
    clip_grad.clip_grad_value_ = utils.clip_grad_value_ = checked(clip_grad.clip_grad_value_)
    optimizers.register_optimizer_step_pre_hook(lambda stepped, args, kwargs: check_step(stepped))
