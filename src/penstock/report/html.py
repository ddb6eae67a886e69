"""Puts a page together: the template, the script and the style of ``page/``, and everything else escaped into them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from typing import Any

from penstock.report.colors import GROUPS, OTHER
from penstock.report.columns import Columns

_SCRIPTS = "data op_ids format colors bars memory timeline pointer control tip rows curves main"
_UNIT = re.compile(r"(\d) (s|ms|µs|[KMGT]?i?B)\b")
_MARK = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of the page's head: what it is, the number, and a word on it."""

    name: str
    value: str
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a page says. Texts are plain: escaping happens here; ``sections`` alone are HTML already.

    ``facts``: what the script draws, in JSON; ``columns``: the numbers that ``facts`` refer to.
    """

    eyebrow: str
    heading: str
    sentence: str
    notes: Sequence[str]
    figures: Sequence[Figure]
    timeline: str
    hint: str
    sections: str
    facts: Mapping[str, Any]
    columns: Columns

    def html(self) -> str:
        parts = {
            "title": escape(f"{self.heading} - penstock"),
            "style": _file("page.css"),
            "eyebrow": escape(self.eyebrow),
            "heading": escape(self.heading),
            "sentence": escape(_kept_together(self.sentence)),
            "notes": "\n".join(f'<p class="note">{escape(note)}</p>' for note in self.notes),
            "figures": "\n".join(_figure(figure) for figure in self.figures),
            "timeline": escape(self.timeline),
            "hint": escape(self.hint),
            "sections": self.sections,
            "facts": in_script({**self.facts, "groups": [asdict(group) for group in (*GROUPS, OTHER)]}),
            "columns": self.columns.text(),
            "script": "\n".join(_file(f"{name}.js") for name in _SCRIPTS.split()),
        }
        page = _MARK.sub(lambda mark: parts[mark[1]], _file("page.html"))
        return page.encode(errors="replace").decode()  # the name of a folder may be no text


def _kept_together(text: str) -> str:
    """No line breaks between a number and its unit."""
    return _UNIT.sub("\\1\u00a0\\2", text)


def in_script(value: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end the element or start a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 and its like are escaped already
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> str:
    """An HTML table; the first cell of a row names it, the others are numbers. All texts are escaped."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _figure(figure: Figure) -> str:
    remark = f"<small>{escape(_kept_together(figure.remark))}</small>" if figure.remark else ""
    return f"<div><dt>{escape(figure.name)}</dt><dd>{escape(figure.value)}{remark}</dd></div>"


def _file(name: str) -> str:
    return files("penstock.report").joinpath("page", name).read_text(encoding="utf-8")
