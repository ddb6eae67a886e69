"""Attention of ranks that share each sequence, by Ulysses' exchange (arXiv 2309.14509).

    a rank has             [b, heads, span, d]      a span of the tokens, all heads
    to_heads               [b, heads / cp, T, d]    all tokens, some heads: queries, keys and values in one exchange
    the attention itself   [b, T, heads / cp, d]    the model's own implementation, as one process calls it
    to_spans               [b, span, heads, d]      as it began

All else that a model of this kind does is done for each token alone. Its attention is called through transformers'
attention interface, where ``Ulysses`` stands in for the implementation that the model has. Masks are made there, too:
of all tokens, so that a rank has the mask that one process would have.

Who moves the bytes is not said here: an exchange sends row r of a matrix to rank r, and puts what it gets from there in
row r. The backward of an exchange is the same exchange. Where a rank is by itself, in a probe or where a model is run
without values, it takes its own rows for those of the others: the sizes are right, and the numbers are not looked at.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NoReturn, cast
from weakref import WeakValueDictionary

import torch
from torch import nn

from penstock.compat.torch import unwatched
from penstock.errors import ModelError, is_out_of_memory
from penstock.tape.likeness import alike, sample

Exchange = Callable[[torch.Tensor, torch.Tensor], None]
"""Fills a matrix [cp, n] with the rows that the ranks send to this one, from what this one sends to them."""

_GROUPS = "num_key_value_groups"
"""The number of query heads that share a key/value head, of a module; attention functions read it."""
_OF_TOKENS = frozenset({"position_ids", "cache_position", "shift_labels", "num_items_in_batch"})
"""Names that models hand on to their attention, of which one that has all tokens and their mask reads none."""
_TRIED = 16
"""tokens of the attention by which heads are tried"""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The parts of masks, for all tokens [b, T] of a micro-batch. ``positions``: int64; None: there is one document in
    each row. ``attends``: bool, as a model's ``attention_mask``; None: all tokens count."""

    positions: torch.Tensor | None
    attends: torch.Tensor | None


WHOLE: ContextVar[Whole | None] = ContextVar("penstock_whole", default=None)
"""All tokens of the micro-batch whose forward is running."""


class Ulysses:
    """Stands in for the attention implementation of a transformers model, from now until it is closed."""

    def __init__(self, model: nn.Module, cp: int, exchange: Exchange | None = None) -> None:
        """``exchange``: with the ranks that share a sequence; None: this one is by itself.

        Raises:
            ModelError: the model does not call its attention through transformers' interface, or has an implementation
                that is not known here.
        """
        self.cp = cp
        self._model = model
        self._exchange = _take_own if exchange is None else exchange
        self._ranks = self._exchange
        self._apart = False
        self._tried: set[int] = set()
        self.sent = 0
        """bytes that were sent to other ranks so far, or would have been by one that is by itself"""
        self.exchanges = 0
        """the number of exchanges in which they were"""
        self._number = next(_numbers)
        _known[self._number] = self
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "to_dict") or not hasattr(model, "set_attn_implementation"):
            self._refuse("it is no model of transformers")
        if getattr(config, "is_encoder_decoder", False):
            self._refuse("it has an encoder and a decoder, which attends to other tokens than its own")
        if (setting := _of_the_whole_sequence(config.get_text_config())) is not None:
            self._refuse(f"{setting} looks at the length of the whole sequence, of which each rank has a span")
        from penstock.compat import transformers as compat  # only who has such a model has the library

        self._compat = compat
        before = compat.implementation(model)
        if before not in ("sdpa", "eager"):
            self._refuse(
                f"its attn_implementation is {before!r}: build it with attn_implementation='sdpa' (or 'eager')"
            )
        self._before: str = before
        self.name = compat.stand_in(model, self.attend, self.mask)
        """the name in transformers' interface"""
        if self.name is None:
            self._refuse("its class does not call attention through transformers' attention interface")

    def close(self) -> None:
        """Give the model its own implementation back."""
        if self.name is not None:
            self._compat.take_back(self._model, self.name, self._before)
            self.name = None

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """Inside, this rank takes its own rows for those of the others."""
        self._exchange = _take_own
        try:
            yield
        finally:
            self._exchange = self._ranks

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, attention gives each token numbers that are of that token alone: then nothing of a model may mix
        tokens."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    # ---- the attention interface

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **given: Any,
    ) -> tuple[torch.Tensor, None]:
        """The attention of all tokens, for this rank's span of them [b, span, heads, d]. ``query`` [b, heads, span, d],
        ``key`` and ``value`` with as many heads or fewer."""
        heads, groups = query.shape[1], query.shape[1] // key.shape[1]
        if self._apart:
            return _of_each_token(query, key, value), None
        given = self._checked(module, query, key, value, attention_mask, given)
        inner = self._compat.attention_of(self._before, module)
        if inner is None:
            self._refuse(f"{type(module).__name__} has no eager_attention_forward: give attn_implementation='sdpa'")
        if not torch.compiler.is_compiling() and id(module) not in self._tried and self._exchange is _take_own:
            self._try(inner, module, (query, key, value), given)
        if key.shape[1] < self.cp:  # each rank has the one that its query heads share
            times = self.cp // key.shape[1]
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
            groups = heads // self.cp
        query, key, value = self._to_heads(query, key, value)
        with _sharing(module, groups):
            found = inner(module, query, key, value, attention_mask, **given)[0]
        return self._to_spans(found), None

    def mask(self, **given: Any) -> torch.Tensor | None:
        """The mask of all tokens; ``given``: as transformers asks for one, of this rank's span of them."""
        if self._apart:
            return None
        length = given["q_length"]
        if given["kv_length"] != length or given.get("q_offset", 0) or given.get("kv_offset", 0):
            self._refuse("it attends to other tokens than its own (a cache, or an encoder's)")
        if given.get("allow_is_bidirectional_skip"):
            self._refuse("its attention looks ahead, and a sequence whose end is padded would see that")
        whole = WHOLE.get() or Whole(positions=None, attends=None)
        given |= {"q_length": self.cp * length, "kv_length": self.cp * length, "attention_mask": whole.attends}
        if whole.positions is not None:
            packed = self._compat.of_documents(given["mask_function"], whole.positions)
            if packed is not None:
                given |= {"mask_function": packed, "allow_is_causal_skip": False}
        try:
            found: torch.Tensor | None = self._compat.mask_of(self._before)(**given)
        except IndexError:
            self._refuse("its mask depends on more of the tokens than their places")
        return found

    # ---- what is refused

    def _checked(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        given: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The arguments of an attention function that are not of this rank's span of the tokens."""
        heads, keys = query.shape[1], key.shape[1]
        if heads % self.cp or (keys % self.cp and self.cp % keys) or keys != value.shape[1]:
            self._refuse(
                f"{heads} query heads and {keys} key/value heads cannot be dealt out to {self.cp} ranks: give a cp "
                "that divides the query heads, and divides the key/value heads or is a multiple of them"
            )
        if keys != heads and not hasattr(module, _GROUPS):
            self._refuse(f"{type(module).__name__} does not say how many query heads share a key ({_GROUPS})")
        if key.shape[2] != query.shape[2]:
            self._refuse(f"{type(module).__name__} attends to other tokens than its own")
        if mask is not None and mask.shape[1] != 1:
            self._refuse(f"{type(module).__name__} has a mask for each head")
        kept = {name: one for name, one in given.items() if name not in _OF_TOKENS}
        for name, one in kept.items():
            if isinstance(one, torch.Tensor):
                self._refuse(f"{type(module).__name__} hands its attention {name!r}, which would have to be dealt out")
        return kept

    def _try(
        self,
        inner: Callable[..., Any],
        module: nn.Module,
        states: tuple[torch.Tensor, ...],
        given: Mapping[str, Any],
    ) -> None:
        """Raise ModelError where a head depends on others, or on its number."""
        query, key, value = (t.detach()[:, :, :_TRIED] for t in states)
        given = {**given, "dropout": 0.0}
        heads, keys = query.shape[1], key.shape[1]
        half = max(keys // 2, 1)
        queries = max(heads // 2, 1) if keys == 1 else half * (heads // keys)
        try:
            with torch.no_grad(), unwatched():
                whole = inner(module, query, key, value, None, **given)[0]
                with _sharing(module, queries // half):
                    part = inner(module, query[:, -queries:], key[:, -half:], value[:, -half:], None, **given)[0]
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._refuse(
                f"{type(module).__name__} does not take some of its heads alone ({' '.join(str(error).split())[:200]})"
            )
        if not alike(sample(part), whole[:, :, -queries:], within=torch.finfo(part.dtype).eps ** 0.5):
            self._refuse(f"{type(module).__name__} has heads that depend on each other, or on their numbers")
        self._tried.add(id(module))

    def _refuse(self, why: str) -> NoReturn:
        raise ModelError(
            f"cp={self.cp}: {type(self._model).__name__} cannot be trained by ranks that share each sequence: {why}. "
            "Without cp its ranks share the state alone"
        )

    # ---- the exchanges

    def _to_heads(self, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of tensors [b, heads, span, d] with all heads those [b, heads / cp, cp * span, d] with all tokens."""
        if len({t.dtype for t in states}) > 1:
            return tuple(self._to_heads(one)[0] for one in states)
        batch, _, span, _ = states[0].shape
        shapes = [(batch, t.shape[1] // self.cp, span, t.shape[3]) for t in states]
        rows = [
            t.reshape(batch, self.cp, heads, span, size).transpose(0, 1).reshape(self.cp, -1)
            for t, (_, heads, _, size) in zip(states, shapes, strict=True)
        ]
        got = torch.split(self._exchanged(torch.cat(rows, dim=1)), [row.shape[1] for row in rows], dim=1)
        return tuple(
            one.reshape(self.cp, *shape).permute(1, 2, 0, 3, 4).reshape(batch, shape[1], self.cp * span, shape[3])
            for one, shape in zip(got, shapes, strict=True)
        )

    def _to_spans(self, found: torch.Tensor) -> torch.Tensor:
        """Of [b, cp * span, heads / cp, d] that of this rank's span [b, span, heads, d]."""
        batch, tokens, heads, size = found.shape
        span = tokens // self.cp
        rows = found.reshape(batch, self.cp, span, heads, size).transpose(0, 1).reshape(self.cp, -1)
        got = self._exchanged(rows).reshape(self.cp, batch, span, heads, size)
        return got.permute(1, 2, 0, 3, 4).reshape(batch, span, self.cp * heads, size)

    def _exchanged(self, rows: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return cast(torch.Tensor, exchange_rows(rows, self._number))
        fill = partial(self._fill, self._exchange)
        return cast(torch.Tensor, _Exchanged.apply(rows, fill))  # type: ignore[no-untyped-call]

    def _fill(self, exchange: Exchange, out: torch.Tensor, rows: torch.Tensor) -> None:
        exchange(out, rows)
        self.sent += rows.nbytes // self.cp * (self.cp - 1)
        self.exchanges += 1


_numbers = count(1)
_known: WeakValueDictionary[int, Ulysses] = WeakValueDictionary()
"""Every ``Ulysses`` that is in use, by the number by which compiled code calls it."""


@torch.library.custom_op("penstock::exchange_rows", mutates_args=())
def exchange_rows(rows: torch.Tensor, number: int) -> torch.Tensor:
    """The exchange of a ``Ulysses`` as an op, which compiled code calls and does not look into."""
    ulysses, out = _known[number], torch.empty_like(rows)
    ulysses._fill(ulysses._exchange, out, rows)
    return out


@exchange_rows.register_fake
def _like_rows(rows: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(rows)


def _note_number(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.number = inputs[1]


def _exchange_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return exchange_rows(gradient.contiguous(), ctx.number), None


exchange_rows.register_autograd(_exchange_back, setup_context=_note_number)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        out = torch.empty_like(rows)
        exchange(out, rows)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        out = torch.empty_like(gradient)
        ctx.exchange(out, gradient)
        return out, None


def _take_own(out: torch.Tensor, rows: torch.Tensor) -> None:
    out.copy_(rows)


def _of_each_token(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Numbers [b, span, heads, d of values] that depend on all of a token's query, key and value, and on no other's."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    both = query.mean(-1, keepdim=True) + key.mean(-1, keepdim=True)
    return (value + both).transpose(1, 2).to(query.dtype)


@contextmanager
def _sharing(module: nn.Module, groups: int) -> Iterator[None]:
    """Inside, so many query heads of a module share a key/value head."""
    own = vars(module)
    before = own.get(_GROUPS)
    if before is None:
        yield
        return
    own[_GROUPS] = groups
    try:
        yield
    finally:
        own[_GROUPS] = before


def _of_the_whole_sequence(config: Any) -> str | None:
    """The setting of a text model by which a token's position counts for others, too; None: there is none."""
    rope: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for of_layers in (rope, *(found for found in rope.values() if isinstance(found, dict))):
        kind = str(of_layers.get("rope_type", "default"))
        if kind == "longrope" or "dynamic" in kind:
            return f"rope_type={kind!r}"
    return "attn_temperature_tuning" if getattr(config, "attn_temperature_tuning", False) else None
