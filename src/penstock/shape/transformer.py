"""Decoder-only transformers whose program follows from a few numbers by formula: in microseconds, without torch.

Known are the Hugging Face types gpt2, llama, mistral and qwen3 (``decoders``), with fused (flash) attention and without
dropout. What they give equals a dry run of the model (``meta``) on a GPU in 16 bits, and on a CPU in fp32. Only a
stage's peaks count on the moments at which models of usual proportions hold most (``Transformer.is_usual``); with
others they may be low.

T tokens in a micro-batch of sequences of length s, width h, q = heads x head_dim, k = kv_heads x head_dim, f the MLP's
width, V the vocabulary, all matrices of a block W elements: a block's forward is 2·T·W + 4·T·s·q FLOP (for GPT,
24·T·h² + 4·T·s·h), its backward the recomputed forward without the product out of the MLP (``tape.early_stop``), and
twice the products (2.5 times attention's, whose scores are not kept).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from penstock.errors import ConfigError
from penstock.schedule.matrices import is_matrix, whole_of
from penstock.schedule.place import FP32, Format
from penstock.schedule.program import (
    COMPACT_FROM,
    ELEMENTWISE,
    EXACT,
    LARGE_END,
    OF_BLOCK,
    GroupSpec,
    Program,
    Stage,
    flat_numel,
)
from penstock.schedule.work import NOTHING, BothWays, Work
from penstock.shape.model import ModelProfile


@dataclass(frozen=True, kw_only=True)
class End:
    """A module outside the blocks: the elements of its parameters, and where its weights are used."""

    name: str
    sizes: tuple[int, ...]
    first: bool
    """in the prologue"""
    last: bool
    """in the epilogue"""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The numbers that a decoder's program follows from. A ``ModelShape``.

    ``gated``: Llama's block (RMS norms, rotary positions, SwiGLU), else GPT-2's. ``qk_norm``: queries and keys are
    normed too. ``positions``: the longest sequence; ``window``: the longest whose attention is plain causal.
    """

    name: str
    path: str
    """name of the list of blocks in the model"""
    ends: tuple[End, ...]
    block: tuple[tuple[int, ...], ...]
    """shape of each parameter of a block"""
    matrices: int
    """elements of a block's weight matrices"""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    gated: bool
    qk_norm: bool
    positions: int
    window: int

    def profile(
        self, micro_batch_size: int, sequence_length: int, form: Format, *, loss_tile: int | None = None
    ) -> ModelProfile:
        """See ``ModelShape.profile``. Weights of 2 bytes are bf16. ``loss_tile``: as in ``loss.tiles``; None: whole.

        Raises:
            ConfigError: sequences longer than the model takes.
        """
        if sequence_length > self.positions:
            raise ConfigError(
                f"sequence_length={sequence_length}: {self.name} takes at most {self.positions} tokens at a time. "
                "Lower it, or plan for a model with more positions"
            )
        sizes = _Sizes(shape=self, rows=micro_batch_size, length=sequence_length, form=form)
        stages = (sizes.prologue(), *(sizes.call(i) for i in range(self.layers)), sizes.epilogue(loss_tile))
        return ModelProfile(
            program=Program(groups=self.groups(form), stages=stages),
            work=(sizes.prologue_work(), *(sizes.block_work(),) * self.layers, sizes.epilogue_work(loss_tile)),
            tokens=sizes.tokens,
            parameters=self.parameters,
        )

    @property
    def parameters(self) -> int:
        """The elements of all parameters, tied ones counted once."""
        return sum(n for end in self.ends for n in end.sizes) + self.layers * sum(map(prod, self.block))

    @property
    def is_usual(self) -> bool:
        """True if the proportions are those for which peaks are exact: what is wide, and what is much wider."""
        width = max(self.hidden, self.heads * self.head_dim)
        words = self.vocabulary >= 2 * width and (self.gated or self.vocabulary >= self.positions)
        return words and 2 * self.intermediate >= 5 * width

    def groups(self, form: Format) -> tuple[GroupSpec, ...]:
        """As ``tape.groups.group_parameters`` makes them: large ends, small ends, blocks."""
        small = [n for end in self.ends if not _large(end) for n in end.sizes]
        named = [(_home(end), _kinds(end.sizes, form)) for end in self.ends if _large(end)]
        named += [("ends.small", _kinds(small, form))] if small else []
        block = _kinds_of_block(self.block, form)
        named += [(f"{OF_BLOCK}{self.path}.{i}", block) for i in range(self.layers)]
        cut = [(name, kind) for name, kinds in named for kind in kinds]
        return tuple(replace(kind, index=i, name=name + kind.name) for i, (name, kind) in enumerate(cut))

    def readers(self, form: Format, *, first: bool) -> tuple[int, ...]:
        """The groups of ends that the prologue (``first``) or the epilogue reads."""
        index = {g.name: g.index for g in self.groups(form)}
        ends = [end for end in self.ends if (end.first if first else end.last)]
        return tuple(sorted({index[_home(end) + kind.name] for end in ends for kind in _kinds(end.sizes, form)}))

    def of_block(self, layer: int, form: Format) -> tuple[int, ...]:
        """The groups of a block."""
        ends, each = len(replace(self, layers=0).groups(form)), len(_kinds_of_block(self.block, form))
        first = ends + layer * each
        return tuple(range(first, first + each))


def _kinds(sizes: Sequence[int], form: Format, kind: str = "") -> list[GroupSpec]:
    """The groups that parameters of these sizes are cut into; their names are what follows another one."""
    cut = {"": [n for n in sizes if not form.is_compact or n >= COMPACT_FROM]}
    cut[EXACT] = [n for n in sizes if form.is_compact and n < COMPACT_FROM]
    return [
        GroupSpec(
            index=0,
            name=kind + exact,
            trainable=flat_numel(own),
            frozen=0,
            compact=form.is_compact and not exact,
        )
        for exact, own in cut.items()
        if own
    ]


def _kinds_of_block(shapes: Sequence[tuple[int, ...]], form: Format) -> list[GroupSpec]:
    """The groups that a block's parameters are cut into. A formula knows no names: there are no biases of two
    dimensions, and nothing is split."""
    rule = form.whole
    if rule is None:
        return _kinds([prod(shape) for shape in shapes], form)
    found: list[GroupSpec] = []
    for kind in (True, False):
        own = [shape for shape in shapes if is_matrix("", shape, rule) == kind]
        for group in _kinds([prod(shape) for shape in own], form, "" if kind else ELEMENTWISE):
            exact = form.is_compact and not group.compact
            of_group = [shape for shape in own if exact == (form.is_compact and prod(shape) < COMPACT_FROM)]
            whole = whole_of((("", shape) for shape in of_group), rule) if kind else None
            found.append(replace(group, whole=whole))
    return found


def _home(end: End) -> str:
    return f"ends.{end.name}" if _large(end) else "ends.small"


def _large(end: End) -> bool:
    return sum(end.sizes) >= LARGE_END


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Bytes and FLOP of one micro-batch: what the Hugging Face code holds at the moments when it holds most.

    ``u``: bytes of the hidden states of all tokens; ``w``: of an MLP's inner states.
    """

    shape: Transformer
    rows: int
    length: int
    form: Format

    @property
    def weight_bytes(self) -> int:
        return self.form.weight_bytes

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def u(self) -> int:
        return self.tokens * self.shape.hidden * self.weight_bytes

    @property
    def w(self) -> int:
        return self.tokens * self.shape.intermediate * self.weight_bytes

    @property
    def heads(self) -> tuple[int, int]:
        """Bytes of all queries, and of all keys."""
        each = self.tokens * self.shape.head_dim * self.weight_bytes
        return each * self.shape.heads, each * self.shape.kv_heads

    def prologue_work(self) -> BothWays:
        """Embeddings, and their gradients, which are as large as they are."""
        shape, e = self.shape, self.weight_bytes
        words, places = shape.vocabulary * shape.hidden * e, shape.positions * shape.hidden * e
        forward, backward = (2 * self.u, self.u + words) if shape.gated else (4 * self.u, 2 * self.u + words + places)
        found, looked_up = (26, 3) if shape.gated else (22, 7)
        return Work(traffic=forward, ops=found), Work(traffic=backward, ops=looked_up)

    def block_work(self) -> BothWays:
        shape = self.shape
        attention = 4 * self.tokens * self.length * shape.heads * shape.head_dim
        products = 2 * self.tokens * shape.matrices + attention
        again = products - 2 * self.tokens * shape.intermediate * shape.hidden
        traffic, ops = self._block_traffic(), self._block_ops()
        return (
            Work(flops=products, traffic=traffic[0], ops=ops[0]),
            Work(flops=2 * products + attention // 2 + again, traffic=traffic[1], ops=ops[1], again=again),
        )

    def epilogue_work(self, tile: int | None) -> BothWays:
        """``tile``: as ``loss_tile`` of ``Transformer.profile``."""
        head = 2 * self.tokens * self.shape.hidden * self.shape.vocabulary
        flops = (3 if tile is None else 4) * head
        return Work(flops=flops, traffic=self._epilogue_traffic(tile), ops=self._epilogue_ops(tile)), NOTHING

    def _block_traffic(self) -> tuple[int, int]:
        """Bytes that ops of a block beside products move in its forward and its backward, which computes that again:
        so many for each element of a token's hidden state, of its queries, keys and values, and of its MLP. The numbers
        are those of a dry run, by least squares over eight sizes; the tests of ``meta`` tell when they are others."""
        shape, narrow = self.shape, self.weight_bytes != FP32
        if not shape.gated:
            return 10 * self.u + 18 * self.w, 33 * self.u + 47 * self.w
        heads = shape.heads * shape.head_dim + shape.kv_heads * shape.head_dim
        normed = ((36, 128) if narrow else (28, 120)) if shape.qk_norm else (0, 0)
        hidden, rotated = ((84, 299), (20, 52)) if narrow else ((81, 327), (40, 103))
        forward, backward = (
            self.tokens * (hidden[i] * shape.hidden + (rotated[i] + normed[i]) * heads) for i in (0, 1)
        )
        return forward + 5 * self.w, backward + 14 * self.w

    def _block_ops(self) -> tuple[int, int]:
        """Ops of a block in its forward and its backward, by a dry run."""
        shape, narrow = self.shape, self.weight_bytes != FP32
        if not shape.gated:
            return 38, 158 if narrow else 156
        forward, backward = (77, 295) if narrow else (73, 285)
        normed = ((16, 78) if narrow else (12, 70)) if shape.qk_norm else (0, 0)
        return forward + normed[0], backward + normed[1]

    def _epilogue_ops(self, tile: int | None) -> int:
        """Ops of the last norm and the loss, with their backward; where the loss is in ``tile``s, of each slice of
        the vocabulary."""
        shape, narrow = self.shape, self.weight_bytes != FP32
        normed = (24 if narrow else 20) if shape.gated else 0
        if tile is None:
            return normed + (58 if narrow else 56)
        slices = -(-shape.vocabulary // self.slice_of(tile))
        return normed + (61 + 53 * slices if narrow else 57 + 50 * slices)

    def _epilogue_traffic(self, tile: int | None) -> int:
        """Of the last norm and the loss, forward and backward: so many bytes for each element of a hidden state and of
        logits; where the loss is in ``tile``s, for the hidden states of each slice of the vocabulary, too."""
        shape, narrow = self.shape, self.weight_bytes != FP32
        hidden = (128 if narrow else 120) if shape.gated else 5 * self.weight_bytes
        if tile is None:
            return self.tokens * (hidden * shape.hidden + (36 if narrow else 24) * shape.vocabulary)
        slices = -(-shape.vocabulary // self.slice_of(tile))
        hidden += (12 + 10 * slices) if narrow else (6 + 12 * slices)
        return self.tokens * (hidden * shape.hidden + (66 if narrow else 48) * shape.vocabulary)

    def slice_of(self, tile: int) -> int:
        """Words of the vocabulary whose logits of all tokens are as many as those of all words for a ``tile``."""
        return max(1, tile * self.shape.vocabulary // max(self.tokens, tile))

    def prologue(self) -> Stage:
        shape, e, positions = self.shape, self.weight_bytes, 8 * self.length
        reads = shape.readers(self.form, first=True)
        packed = 17 * self.tokens + 8 * self.rows  # a search for packed sequences in the positions
        embedding = shape.vocabulary * shape.hidden * e
        if shape.gated:
            rotary = 2 * self.length * shape.head_dim * e
            kept, forward = positions + rotary, max(packed, 18 * self.length * shape.head_dim) - rotary
            backward = embedding + e
        else:
            kept, forward = positions + self.u + self.length * shape.hidden * e, packed
            backward = embedding - positions + 2 * e
        return Stage(
            index=0,
            kind="segment",
            name="prologue",
            forward_reads=reads,
            gradients=reads,
            activation=self.u,
            gradient=self.u,
            kept=kept,
            forward_peak=forward,
            backward_peak=max(backward, 0),
        )

    def call(self, layer: int) -> Stage:
        shape = self.shape
        groups = shape.of_block(layer, self.form)
        forward, backward, split = self._gated_peaks() if shape.gated else self._gpt_peaks()
        return Stage(
            index=1 + layer,
            kind="call",
            name=f"{shape.path}.{layer}",
            forward_reads=groups,
            backward_reads=groups,
            gradients=groups,
            activation=self.u,
            gradient=self.u,
            forward_peak=forward,
            backward_peak=backward,
            split=self._held(),
            split_peak=max(split, self._held() + self._largest_matrix() - self._norms()),
            graph=self._saved() + self._saved_in_mlp(),
        )

    def epilogue(self, tile: int | None) -> Stage:
        """``tile``: as ``loss_tile`` of ``Transformer.profile``."""
        shape, e = self.shape, self.weight_bytes
        reads = shape.readers(self.form, first=False)
        norm = self._rms_norm(self.tokens, shape.hidden, output=True) if shape.gated else self.u + 8 * self.tokens
        # Not its own: the gradient that it leaves, and what it frees of the prologue's (GPT-2's two embeddings).
        own = norm - (self.u if shape.gated else 2 * self.u + self.length * shape.hidden * e)
        if tile is None:
            logits = self.tokens * shape.vocabulary
            loss = 3 * FP32 * logits  # softmax, its gradient and the one of what went in
            peak = own + 8 + max(loss, e * logits + shape.vocabulary * shape.hidden * e + self.u)
        else:
            peak = self._peak_in_tiles(tile, own)
        return Stage(
            index=1 + shape.layers,
            kind="segment",
            name="epilogue",
            forward_reads=reads,
            gradients=reads,
            forward_peak=peak,
        )

    def _peak_in_tiles(self, tile: int, own: int) -> int:
        """The peak is in the backward of a slice of the vocabulary: its logits, their slope in fp32 and, in 16 bits,
        the slope once more; beside what has been summed up for the hidden states, in fp32, and for the head. In fp32
        small slices have it a moment later, where the slope times the slice's weights is as large as the hidden states.
        ``own``: of the norm, and less what is not the epilogue's.
        """
        shape, e, tokens = self.shape, self.weight_bytes, self.tokens
        width = self.slice_of(tile)
        part = e * tokens * width
        logits = 2 * part if e == FP32 else 2 * part + 2 * FP32 * tokens * width
        if shape.gated and e == FP32:
            logits = max(logits, part + self.u - 29 * tokens)  # without what found the labels' places
        summed = FP32 * tokens * shape.hidden + shape.vocabulary * shape.hidden * e
        # Sums, factors and places of each token, and labels; a single row's are not copied when they are shifted.
        labels = (46 if e == FP32 else 38) * tokens + (20 if self.rows == 1 else 12)
        # With small slices it is in the norm's backward: copies of the hidden states, of 16 bits in fp32.
        norming = 0 if not shape.gated else 5 * self.u + 16 if e == FP32 else 12 * self.u + 12
        return max(own + summed + labels + logits, norming)

    def _rms_norm(self, rows: int, width: int, *, output: bool) -> int:
        """Bytes that an RMS norm keeps for its backward, besides its input, which stays anyway where it is fp32.

        In 16 bits it computes in fp32. ``output``: whether what it returns is kept too, as the input of a product.
        """
        e, elements = self.weight_bytes, rows * width
        copy = FP32 * elements if e != FP32 else 0
        return copy + FP32 * rows + elements * e + (elements * e if output else 0)

    def _attention(self) -> int:
        """Bytes of what attention returns, and of each row's sum, which its backward starts from."""
        shape = self.shape
        sums = FP32 * self.tokens * shape.heads + (24 if self.weight_bytes != FP32 else 0)
        return self.tokens * shape.heads * shape.head_dim * self.weight_bytes + sums

    def _held(self) -> int:
        """Bytes between the two parts of a backward: what goes into each product and the gradient of what comes out,
        but not of the block's output; and the gradients of the norms."""
        shape, u, w = self.shape, self.u, self.w
        if not shape.gated:
            return 7 * u + 2 * w + self._norms()
        q, k = self.heads
        return 3 * u + 2 * q + 2 * k + 3 * w + self._norms()

    def _norms(self) -> int:
        """Bytes of a block's weights that are in no product."""
        shape = self.shape
        each = 2 * shape.hidden + 2 * shape.head_dim * shape.qk_norm if shape.gated else 4 * shape.hidden
        return each * self.weight_bytes

    def _largest_matrix(self) -> int:
        """Bytes of the MLP's second matrix, whose gradient is the first of a block's."""
        shape = self.shape
        return (shape.intermediate + (not shape.gated)) * shape.hidden * self.weight_bytes

    def _saved(self) -> int:
        """Bytes that a block's graph has saved when its MLP begins, besides weights and the block's input: of both
        norms and of attention, with its queries, keys and values, and what goes into each product."""
        shape, e, u = self.shape, self.weight_bytes, self.u
        if not shape.gated:
            return 6 * u + 16 * self.tokens + self._attention()
        q, k = self.heads
        saved = 2 * self._rms_norm(self.tokens, shape.hidden, output=True) + q + 2 * k + self._attention()
        if shape.qk_norm:
            saved += self._rms_norm(self.tokens * (shape.heads + shape.kv_heads), shape.head_dim, output=False)
        if e == FP32:  # norms keep their inputs; the first one's is the saved activation
            saved += u + (q + k if shape.qk_norm else 0)
        return saved

    def _saved_in_mlp(self) -> int:
        """Bytes that a block's graph saves in the MLP: what goes into SiLU, both factors of the gating product and what
        goes into the last matrix; or of the tanh form of GELU what goes in, half of it, the tanh, one more than the
        tanh, and what comes out."""
        return (4 if self.shape.gated else 5) * self.w

    def _gpt_peaks(self) -> tuple[int, int, int]:
        """Forward: in the tanh form of GELU. Backward: there, or when the gradient of the second MLP matrix is made.
        First part of a backward: there."""
        u, w, saved = self.u, self.w, self._saved()
        return 2 * u + 4 * w, saved - u + max(6 * w + self._largest_matrix(), 7 * w), saved - u + 8 * w

    def _gated_peaks(self) -> tuple[int, int, int]:
        """Forward: in the MLP, or while rotating queries. Backward: at the MLP's product, or at its last matrix. First
        part of a backward: at that product."""
        u, w, saved, (q, k) = self.u, self.w, self._saved(), self.heads
        backward = max(5 * w + self._largest_matrix(), 6 * w)
        return max(u + 3 * w, 4 * q + 2 * k), saved - u + backward, saved - u + 7 * w
