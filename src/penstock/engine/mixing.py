"""Finds out whether anything of a model but its attention mixes tokens: ranks that share each sequence cannot do that.

The model runs once on two short rows, forward alone, with an attention that mixes nothing. What its embedding puts out
for half of the tokens is NaN: of the first half in the first row, of the second half in the second. Whatever mixes
tokens (a convolution, a state that is handed on, an attention of another kind, a mean over a row or over the batch)
makes others NaN. No product with NaN is a number, so that no mixing is too small to be seen. The labels of the others
are all that the loss is of: it has to be the sum that torch's cross-entropy gives, divided by what is asked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from penstock.engine.labels import IGNORED
from penstock.engine.resources import EngineResources
from penstock.engine.spans import Spans
from penstock.engine.visiting import VisitingWeights
from penstock.errors import BudgetError, ConfigError, ModelError, RankError, StoreError, is_out_of_memory
from penstock.tape import trees
from penstock.tape.facts import Learned, Site
from penstock.tape.tape import Tape
from penstock.tape.unequal import unequal_dtypes_told

_TOKENS = 64
_ITEMS = 7
"""A number of items by which a loss is divided that is no number of labels here."""


def check_on_first(shared: EngineResources, spans: Spans) -> None:
    """Check on the first rank that the model can be trained by ranks that share each sequence.

    Raises:
        ModelError: it cannot, on all of them.
    """
    said = None
    weights = VisitingWeights(shared)
    with shared.tape.undo.after(weights.close):
        if shared.ranks.rank == 0:
            try:
                check_mixes_nothing(shared.tape, spans, shared.arrays.dtype, weights)
            except ModelError as error:
                said = str(error)
        weights.ended()
    said = shared.ranks.gather_objects("what mixes tokens", said)[0]
    if said is not None:
        raise shared.ranks.of_all(ModelError(said))


def check_mixes_nothing(tape: Tape, spans: Spans, dtype: torch.dtype, weights: VisitingWeights) -> None:
    """``dtype``: of the weights as they compute.

    Raises:
        ModelError: a block, or the model's own code, mixes tokens; or its loss is another one than is asked for.
    """
    model = tape.model
    embedding: nn.Module | None = getattr(model, "get_input_embeddings", lambda: None)()
    table = getattr(embedding, "weight", None)
    if embedding is None or not isinstance(table, torch.Tensor):
        _refuse(spans.cp, f"{type(model).__name__} has no table of embeddings (get_input_embeddings)")
    tokens = min(_TOKENS, getattr(model.config, "max_position_embeddings", None) or _TOKENS)
    clean = torch.zeros(2, tokens, dtype=torch.bool, device=tape.device)
    clean[0, tokens // 2 :] = clean[1, : tokens // 2] = True
    mixed: list[str] = []
    with spans.ulysses.apart(), _spoilt(embedding, clean) as spoilt, _looking(tape.sites, clean, mixed):
        try:
            with unequal_dtypes_told(model, dtype):
                given, copies = _micro_batch(clean, table.shape[0]), weights.are_copies
                learned = tape.probe(given, weights.load, weights.unload, all_copies=copies, train=False)
        except (BudgetError, ConfigError, ModelError, RankError, StoreError):
            raise
        except Exception as error:  # the model's own, of any class
            if is_out_of_memory(error):
                raise
            _refuse(
                spans.cp,
                f"{type(model).__name__} does not take token ids [rows, tokens] with as many labels, shift_labels and "
                f"num_items_in_batch ({type(error).__name__}: {error})",
            )
    if not spoilt:
        _refuse(spans.cp, f"{type(model).__name__} does not call its table of embeddings once")
    if mixed:
        _refuse(
            spans.cp,
            f"block {mixed[0]!r} mixes tokens in another way than by attention through transformers' attention "
            "interface (a convolution, a recurrence, statistics of a batch, an attention of its own)",
        )
    _check_loss(type(model).__name__, learned, spans.cp, int(clean.sum()))


def _micro_batch(clean: torch.Tensor, vocabulary: int) -> Mapping[str, Any]:
    """Tokens whose ``labels`` are class 0, and whose ``shift_labels`` are class 1 where they are ``clean``."""
    rows, tokens = clean.shape
    ids = torch.arange(rows * tokens, device=clean.device).remainder(vocabulary).view(rows, tokens)
    places = torch.arange(tokens, device=clean.device).expand(rows, tokens).contiguous()
    return {
        "input_ids": ids,
        "position_ids": places,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.zeros_like(ids),
        "shift_labels": torch.full_like(ids, IGNORED).masked_fill_(clean, 1),
        "num_items_in_batch": torch.tensor(_ITEMS, device=clean.device),
    }


@contextmanager
def _spoilt(embedding: nn.Module, clean: torch.Tensor) -> Iterator[list[bool]]:
    """Inside, the embeddings of all tokens that are not ``clean`` are NaN. Gives a list that says so once they were."""
    done: list[bool] = []

    def spoil(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        if output.shape[:2] != clean.shape:
            return output
        done.append(True)
        return output.masked_fill(~clean[..., None], float("nan"))

    handle = embedding.register_forward_hook(spoil)
    try:
        yield done
    finally:
        handle.remove()


@contextmanager
def _looking(blocks: Sequence[Site], clean: torch.Tensor, mixed: list[str]) -> Iterator[None]:
    """Inside, the name of each block is put into ``mixed`` that has made a clean token NaN."""

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            for tensor in trees.tensors(output):
                of_tokens = tensor.is_floating_point() and tensor.shape[:2] == clean.shape
                if of_tokens and bool(tensor[clean].isnan().any()):
                    mixed.append(name)

        return hook

    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.module.register_forward_hook(look(block.name)).remove)
        yield


def _check_loss(name: str, learned: Learned, cp: int, labels: int) -> None:
    """``name``: of the model's class."""
    compared, loss = learned.losses, learned.loss
    if len(compared) != 1 or compared[0].targets is None:
        _refuse(cp, f"the loss of {name} is made of {len(compared)} calls of torch's cross-entropy, and not of one")
    found = compared[0]
    assert found.targets is not None
    assert loss is not None
    if found.targets.numel() != labels or not bool((found.targets == 1).all()):
        _refuse(
            cp, f"the loss of {name} does not compare with the labels that it is given for its tokens (shift_labels)"
        )
    if found.summed is None:
        _refuse(cp, f"the loss of {name} is not divided by the number of items that it is given (num_items_in_batch)")
    if not found.summed.isfinite():
        _refuse(cp, f"{name} mixes tokens outside of its blocks, or has weights that are NaN")
    if float(found.summed / _ITEMS) != loss:
        _refuse(
            cp,
            f"the loss of {name} is more than the sum over its labels, divided by num_items_in_batch (a router's loss: "
            "output_router_logits=False)",
        )


def _refuse(cp: int, why: str) -> NoReturn:
    raise ModelError(f"cp={cp}: {why}. So ranks cannot share its sequences; without cp they share the state alone")
