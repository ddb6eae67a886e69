"""Texts that YAML wants in quotes: a shell takes the quotes of a flag away, and whoever writes a file forgets them."""

from pathlib import Path

import pytest

from penstock.cli import settings
from penstock.errors import ConfigError

_FILE = """\
run: runs/x
model: models/m
data: {sources: a.txt, sequence_length: 64}
optimizer: {lr: 3e-4}
budget: {device: 64MiB, host: 24MiB, disk: ssd}
batch: {sequences: 12}
steps: 5
"""

_TEXTS = pytest.mark.parametrize(
    ("key", "value"), [("budget.disk", "{run}/x"), ("budget.disk", "{run}"), ("data.sources", "*.md")]
)


@_TEXTS
def test_a_flag_needs_no_quotes_of_yaml(tmp_path: Path, key: str, value: str) -> None:
    (path := tmp_path / "c.yaml").write_text(_FILE)
    assert settings.load(path, [(key, value)]) == settings.load(path, [(key, f'"{value}"')])


@_TEXTS
def test_a_file_without_them_is_told_to_have_them(tmp_path: Path, key: str, value: str) -> None:
    section, _, name = key.partition(".")
    path = tmp_path / "c.yaml"
    for written in (f"{section}:\n  {name}: {value}\n", f"{section}: {{{name}: {value}}}", f"{name}: [a, {value}]"):
        path.write_text(written)
        with pytest.raises(ConfigError) as refused:
            settings.load(path)
        assert f'"{value}"' in str(refused.value)
        assert str(path) in str(refused.value)
