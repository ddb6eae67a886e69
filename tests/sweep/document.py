"""The part of docs/architectures.md that says what came of each type of model, made from the table."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tests.sweep.inputs import KINDS, OWN_LOSS
from tests.sweep.trial import Result, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
BEGIN, END = "<!-- made by python -m tests.sweep --document -->", "<!-- end of what is made -->"

KIND_WORDS = {
    "causal": "causal language models",
    "masked": "masked language models",
    "seq2seq": "encoder-decoders",
    "image": "image classification",
    "audio": "audio classification",
    "ctc": "speech, connectionist",
    "speech": "speech to text",
    "image-text": "images and text",
}


def page(text: str, results: Iterable[Result], version: str) -> str:
    """The page with what is made of the results in place of what was made before."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{_made(list(results), version)}\n\n{END}{after}"


def _made(results: list[Result], version: str) -> str:
    equal = [r for r in results if r.verdict == "equal"]
    counts = ", ".join(f"{_count(results, v)} {word}" for v, word in _VERDICTS.items() if _count(results, v))
    lines = [
        f"Of the {len(results)} classes and configurations of transformers {version}: {counts}.",
        "",
        "| trained, with the numbers of the plain loop | types |",
        "|---|---|",
    ]
    for kind, words in KIND_WORDS.items():
        names = [_name(r) for r in equal if r.kind == kind]
        if names:
            lines.append(f"| {words}: {len(names)} | {', '.join(names)} |")
    if any("loss_weights" in r.given for r in equal):
        lines += ["", "\\* with `loss_weights`, which `step` asked for: its loss is no mean over labels."]
    if any("blocks" in r.given for r in equal):
        found = "those that are found by themselves are not called in every forward, or hand on a key-value cache"
        lines += ["", f"‡ with `blocks=[...]`, which the refusal asked for: {found}."]
    if own := [r.type for r in equal if r.model in OWN_LOSS]:
        lines += ["", f"With a `loss_fn`, as transformers computes none: {', '.join(sorted(set(own)))}."]
    if any("†" in _name(r) for r in equal):
        lines += ["", "† trained with text alone: the script found no images that it takes."]
    lines.append("")
    lines += _reasons([r for r in results if r.verdict == "refused"], "refused", "what the engine says")
    lines += [
        "",
        *_reasons([replace(r, reason=_group(r.reason)) for r in results if r.verdict == "skipped"], *_SKIPPED),
    ]
    return "\n".join(lines)


_VERDICTS: Mapping[Verdict, str] = {
    "equal": "equal the plain loop",
    "refused": "are refused",
    "skipped": "could not be tried",
    "differs": "differ",
    "crashed": "crash",
}


def _count(results: list[Result], verdict: Verdict) -> int:
    return sum(r.verdict == verdict for r in results)


def _name(result: Result) -> str:
    text_alone = KINDS[result.kind].media == "image and text" and result.inputs.startswith("text")
    marks = "".join(mark for word, mark in (("loss_weights", "*"), ("blocks", "‡")) if word in result.given)
    return result.type + marks + ("†" if text_alone else "")


def _reasons(results: list[Result], title: str, why: str) -> list[str]:
    """A row for each reason, numbers left out."""
    found: dict[str, list[str]] = {}
    for result in results:
        found.setdefault(_short(result.reason), []).append(f"{result.type} ({result.kind})")
    rows = [f"| {', '.join(names)} | {reason} |" for reason, names in sorted(found.items())]
    return [f"| {title} | {why} |", "|---|---|", *rows] if rows else []


_SKIPPED = ("not tried", "why (each one's own error is in `tests/sweep/results.json`)")
_GROUPS = {
    "does not build: ImportError: Dinat": "calls functions of natten (`natten2dqkrpb`, `natten2dav`) that its releases "
    "for this torch no longer have; 0.14.6, which has them, does not compile against it",
    "does not build: ImportError": "needs a package that is not installed",
    "does not build: ModuleNotFoundError": "needs a package that is not installed",
    "does not build": "transformers builds none: its configuration wants all layers to share the keys and values of "
    "others, and its language model one layer of each kind that does not",
    "does not get small": "the script's tiny configuration has too many parameters",
    "no inputs": "the script finds no micro-batch that it computes a loss from",
    "plain training": "plain training fails on what the script makes for it",
}


def _group(reason: str) -> str:
    return next(words for start, words in _GROUPS.items() if reason.startswith(start))


def _short(reason: str) -> str:
    """A reason in a cell of a table: its first 160 characters, to the end of a word."""
    words = re.sub(r"\s+", " ", reason.replace("|", "/"))
    return words if len(words) <= 160 else words[:160].rpartition(" ")[0] + " ..."
