"""The pages of the documentation agree with the sources and with each other, so that they cannot fall behind."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from bench import what_fits
from penstock import errors
from penstock.hardware.profiles import shipped_names
from penstock.shape.shipped import CONFIGS
from tests import migration
from tests.documented import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")


def text_of(page: Path) -> str:
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE):
        words = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading)
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(text_of(page)):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_the_site_has_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(text[text.index("nav:") : text.index("theme:")])["nav"]
    listed = list(_files(nav))
    assert sorted(listed) == sorted(
        str(p.relative_to(ROOT)).replace("README.md", "index.md", p.parent == ROOT) for p in PAGES
    )


def _files(entries: list[dict[str, object]]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                assert isinstance(value, list)
                yield from _files(value)


def test_the_reference_has_all_that_is_public() -> None:
    shown = set(re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE))
    for module in ("penstock", "penstock.data", "penstock.hf", "penstock.fabric"):
        assert {f"{module}.{name}" for name in importlib.import_module(module).__all__} <= shown


TROUBLE = ROOT / "docs" / "troubleshooting.md"


def test_every_class_of_errors_has_its_entry() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes <= set(re.findall(r"^## (\w+)$", TROUBLE.read_text(), re.MULTILINE))


def test_the_messages_of_troubleshooting_are_those_of_the_sources() -> None:
    """Each piece between two ellipses, wherever the sources break a text over lines."""
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)
    headings = re.findall(r"^### `(.+)`$", TROUBLE.read_text(), re.MULTILINE)
    assert len(headings) > 20
    missing = [part for heading in headings for part in heading.split("…") if part not in joined]
    assert missing == []


def test_the_names_of_other_tools_are_those_that_errors_answer() -> None:
    page = migration.PAGE.read_text(encoding="utf-8")
    assert page.endswith(migration.table()), "python -m tests.migration writes it"


def test_what_fits_names_what_ships_and_is_said_to_be_predicted() -> None:
    page = what_fits.PAGE.read_text(encoding="utf-8")
    rows = what_fits.kept(page)
    assert page == what_fits.page(rows), "python -m bench.what_fits writes it"
    assert "**Predicted, not measured.**" in page
    assert tuple(rows) == what_fits.MACHINES
    assert set(rows) <= set(shipped_names())
    for of_machine in rows.values():
        assert tuple(row[0] for row in of_machine) == what_fits.MODELS
    assert set(what_fits.MODELS) <= set(CONFIGS)


def test_what_the_readme_says_of_a_desktop_is_what_the_page_says() -> None:
    desktop = {row[0]: row for row in what_fits.kept(what_fits.PAGE.read_text(encoding="utf-8"))["workstation"]}
    told = re.findall(
        r"^\| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    rows = [row for row in told if row[0] in desktop]
    assert len(rows) > 2
    assert rows == [(m, desktop[m][1], desktop[m][3], *desktop[m][5:]) for m, *_ in rows]
