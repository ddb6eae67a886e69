"""What fits on what: eight models that ship, planned for eight machines that ship. Writes docs/what-fits.md.

    python -m bench.what_fits [--machine NAME ...]

Nothing is measured: each number is what ``penstock plan`` predicts, for machines that are described (docs/machines.md).
A plan takes some seconds. With ``--machine`` only those are planned, and the page keeps what it has of the others.
"""

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import penstock
from penstock.config.optimizer import Moments
from penstock.errors import BudgetError
from penstock.hardware.profiles import shipped_machine

PAGE = Path(__file__).parents[1] / "docs" / "what-fits.md"
MODELS = ("llama-8b", "qwen3-8b", "gpt-13b", "qwen3-14b", "gpt-oss-20b", "gpt-30b", "llama-70b", "gpt-175b")
MACHINES = (
    *("rtx4060ti-16g", "rtx5080-16g", "rtx3090-24g", "workstation"),
    *("rtx5090-32g", "dgx-spark", "rtxpro6000-96g", "h100-80g"),
)
HEAD = ("model", "moments", "tokens a step", "s a step", "tokens/s", "days for 100M tokens", "of the drives' life")
_FORMS: tuple[Moments, ...] = ("fp32", "int8")
_TOKENS = 100_000_000

Row = tuple[str, ...]
"""The cells of a row, of ``HEAD``."""


def planned(model: str, machine: str) -> Row:
    """The answer of ``penstock plan --model MODEL --machine MACHINE --clip-grad-norm 1``, with ``--moments int8`` if it
    does not fit without."""
    for moments in _FORMS:
        try:
            found = penstock.plan(model, machine=machine, moments=moments, clip_grad_norm=1.0).forecast
        except BudgetError:
            continue
        run = found.whole_run(found.steps_for(_TOKENS))
        life = "–" if run.life is None else f"{_number(100 * run.life)}%"
        seconds, rate = _number(found.choice.expected_seconds), _number(found.tokens_per_second)
        return model, moments, f"{found.tokens:,}", seconds, rate, _number(run.days), life
    return model, "–", *["–"] * 5


def kept(page: str) -> dict[str, list[Row]]:
    """Machine -> the rows that a page has of it."""
    found = {}
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        found[section.partition("\n")[0]] = [tuple(c.strip() for c in line[2:-1].split("|")) for line in lines[2:]]
    return found


def page(rows: Mapping[str, Sequence[Row]]) -> str:
    parts = [INTRO, _days(rows), _DETAILS]
    for machine, of_machine in rows.items():
        name = shipped_machine(machine).name.partition(": ")[2]
        parts += [f"### {machine}\n", f"{name}.\n", _as_table([HEAD, *of_machine])]
    return "\n".join(parts)


def _days(rows: Mapping[str, Sequence[Row]]) -> str:
    lines: list[Sequence[str]] = [("", *(f"[{machine}](#{machine})" for machine in rows))]
    for number, model in enumerate(MODELS):
        of_model = [of_machine[number] for of_machine in rows.values()]
        lines.append((model, *(row[5] + "*" * (row[1] == "int8") for row in of_model)))
    return _as_table(lines)


def _as_table(rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])) + "\n"


def _number(value: float) -> str:
    """Two digits that count, or all of them before the point."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


INTRO = """\
# What fits on what

**Predicted, not measured.** Every number here is what `penstock plan` says of a model and a machine that ship with
Penstock, whose figures are [makers' and papers'](machines.md). Of GPUs only an H100 was measured, for an hour in all.
`python -m bench.what_fits` makes this page. For your own model and machine ask `penstock plan` yourself.

All weights are trained, in bf16 with AdamW and clipping, 2,048 tokens a sequence. The batch is the smallest with which
a larger one would gain less than 3%. Adapters take far less.

Days for 100 million tokens; with a `*` the moments are kept in [8 bits](numerics.md#state-in-less-memory), as they do
not fit in fp32; `–`: it does not fit either way.
"""
_DETAILS = """\
## Machine by machine

A step is one optimizer step over that many tokens. The last column is what 100 million tokens take of all that the
drives are rated to be written: over 100% they are worn out before.
"""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plan eight models for eight machines.")
    parser.add_argument("--machine", choices=MACHINES, action="append")
    asked = parser.parse_args(words)
    rows = kept(PAGE.read_text(encoding="utf-8")) if asked.machine and PAGE.exists() else {}
    for machine in asked.machine or MACHINES:
        rows[machine] = []
        for model in MODELS:
            rows[machine].append(planned(model, machine))
            print(machine, *rows[machine][-1], flush=True)
    PAGE.write_text(page({name: rows[name] for name in MACHINES if name in rows}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
