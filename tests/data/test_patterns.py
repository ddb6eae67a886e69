"""Files that a source's path names: as ``glob`` finds them, and nothing that was meant is passed over in silence."""

import glob
import os
import stat
from pathlib import Path

import pytest

from penstock.config import SourceConfig
from penstock.data.sources.find import left_out, local_source
from penstock.data.sources.pattern import matching
from penstock.errors import ConfigError

ROW = '{"text": "a"}\n'


def tree(folder: Path) -> Path:
    for name in ("a.jsonl", "b.txt", ".hid.jsonl", "one/c.jsonl", "one/two/d.jsonl", "one/[x].jsonl", ".dot/e.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(ROW)
    (folder / "three.jsonl").mkdir()
    (folder / "linked.jsonl").symlink_to(folder / "one" / "c.jsonl")
    (folder / "elsewhere").symlink_to(folder / "one")
    return folder


PATTERNS = (
    *("*", "**", "*.jsonl", "**/*.jsonl", "**/d.jsonl", "*/*", "*/two/*", "one/**", "one/**/*.jsonl", "[ab].*"),
    *(
        "?.txt",
        ".*",
        "**/.*",
        ".dot/*",
        "*.nothing",
        "nothing/*",
        "a.jsonl/*",
        "**/two/../*.jsonl",
        "one/[[]x].jsonl",
    ),
    "**/**/*",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_names_the_files_that_glob_finds(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in (tree(tmp_path) / pattern, Path(pattern)):
        monkeypatch.chdir(tmp_path)
        expected = {Path(p) for p in glob.glob(str(given), recursive=True) if os.path.isfile(p)}
        assert matching(given) == tuple(sorted(expected))
        assert expected or "nothing" in pattern or "a.jsonl/" in pattern


def test_a_link_that_leads_back_to_a_folder_is_not_followed_again(tmp_path: Path) -> None:
    (tree(tmp_path) / "one" / "back").symlink_to(tmp_path)
    (tmp_path / "elsewhere").unlink()
    found = matching(tmp_path / "**" / "d.jsonl")
    assert found == (tmp_path / "one" / "two" / "d.jsonl",)


@pytest.mark.parametrize("to", ["gone.jsonl", "LOST.jsonl"], ids=["to nothing", "to itself"])
@pytest.mark.parametrize("path", ["LOST.jsonl", "", "*.jsonl", "**/*.jsonl"])
def test_a_link_to_data_that_are_not_there_is_an_error_that_names_it(path: str, to: str, tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / "LOST.jsonl").symlink_to(tmp_path / to)
    with pytest.raises(ConfigError, match=r"LOST\.jsonl is a link .*remove the link"):
        local_source(SourceConfig(path=str(tmp_path / path)))


def test_a_name_of_no_file_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(ConfigError, match="'pipe' is neither a file nor a folder, but a pipe or a device: write what"):
        local_source(SourceConfig(path="pipe"))
    assert local_source(SourceConfig(path="nothing")) is None
    with pytest.raises(ConfigError, match="'nothing' is a data set on the hub, not kind: tokens"):
        local_source(SourceConfig(path="nothing", kind="tokens"))


@pytest.mark.parametrize("path", ["", "one/*.jsonl", "**/*.jsonl", "**", "one/LOST.jsonl"])
@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a link to a device"])
def test_what_is_no_file_and_has_the_name_of_data_is_refused_by_its_own(path: str, kind: str, tmp_path: Path) -> None:
    there = tree(tmp_path) / "one" / "LOST.jsonl"
    if kind == "a pipe":
        os.mkfifo(there)
    elif kind == "a socket":
        os.mknod(there, stat.S_IFSOCK)
    else:
        there.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"/LOST\.jsonl' is neither a file nor a folder"):
        local_source(SourceConfig(path=str(tmp_path / path)))


def test_a_linked_folder_in_a_folder_is_said_to_be_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text(ROW)
    assert left_out(SourceConfig(path=str(folder))) is None
    (folder / "part2").symlink_to(tree(tmp_path / "ssd2"))
    words = left_out(SourceConfig(path=str(folder)))
    assert words == f"left out of the folder: links to folders, {folder / 'part2'} (name each as a source of its own)"
