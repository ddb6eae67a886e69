"""A summary of the data, in words, before the first step."""

from penstock.data.opening import Data
from penstock.data.pieces import Cuts
from penstock.data.rows import Packing, Rows
from penstock.data.stream import Prepared


def summary_of(data: Data, length: int) -> str:
    """Documents, tokens, those that count in the loss, how full sequences are, what was cut off, and as what rows
    were read."""
    if not isinstance(data.train, Prepared):
        lines = [f"data are streamed, in sequences of {length:,} tokens"]
    else:
        rows = data.train.epoch(0)
        cuts = data.train.cuts
        epoch = f"an epoch of {len(rows):,} sequences of " + _sizes(rows, data.train.packing, length)
        lines = [f"{_documents(cuts.documents)}, {_tokens(cuts)}: {epoch}"]
        lines += _left_out(cuts, data.train.packing == "continuous")
        passes = data.train.mixture.passes(1)
        if data.train.mixture.weights is not None:
            lines.append("by weight an epoch reads the sources " + ", ".join(f"{p:.3g}" for p in passes) + " times")
    if data.validation is not None:
        cuts = data.validation.cuts
        lines.append(
            f"held out: {_documents(cuts.documents)}, {_tokens(cuts)}, {len(data.validation.epoch(0)):,} sequences"
        )
        lines += _left_out(cuts, data.validation.packing == "continuous")
    lines += data.forms
    return "\n".join(lines)


def _sizes(rows: Rows, packing: Packing, length: int) -> str:
    """The length of sequences, and how full they are if all have the same."""
    if packing is False:
        return f"up to {rows.longest:,} tokens"
    return f"{length:,}, {100 * rows.tokens / (len(rows) * length):.1f}% full"


def _documents(count: int) -> str:
    return f"{count:,} document{'s' * (count != 1)}"


def _tokens(cuts: Cuts) -> str:
    return f"{cuts.tokens:,} tokens, {cuts.labels:,} of which count in the loss"


def _left_out(cuts: Cuts, continuous: bool) -> list[str]:
    """Lines about the documents that are not trained on."""
    lines = []
    if continuous and cuts.lost:
        tokens = f"{cuts.lost:,} token{'s' * (cuts.lost != 1)}"
        lines.append(f"  left out at the end, where the next sequence would not be full: {tokens}")
    if cuts.too_long:
        became = f"{cuts.lost:,} tokens are left out" if cuts.lost else "split into several"
        lines.append(f"  {_documents(cuts.too_long)} longer than a sequence: {became}")
    if cuts.without:
        lines.append(f"  {cuts.without:,} pieces have no token that counts in the loss and are left out")
    return lines
