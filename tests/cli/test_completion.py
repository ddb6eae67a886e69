"""What shells propose for ``penstock``: asked of the shells themselves, and compared with what help shows."""

import argparse
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import shtab

from penstock.cli import COMMANDS, main
from penstock.cli.completion import parser_of

LINES = {
    "penstock res": ["reshard", "resume"],
    "penstock completion ": ["bash", "fish", "zsh"],
    "penstock help repo": ["report"],
    "penstock train x.yaml --optimizer.l": ["--optimizer.lr"],
    "penstock resume run --budget.state d": ["device", "disk"],
    "penstock train x.yaml --data.packing ": ["continuous", "false", "true"],
    "penstock plan x.yaml --epoch": ["--epoch-tokens", "--epochs"],
    "penstock export run out --dtype ": ["bf16", "fp16", "fp32"],
    "penstock verify some-f": ["some-file"],
}
"""A line that has been typed so far, and what there is for its last word."""

_BASH = """\
source "$1"; shift
for line in "$@"; do
  read -ra COMP_WORDS <<< "$line"
  [[ $line == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
  _shtab_penstock penstock
  echo "${COMPREPLY[*]}"
done
"""

_FISH = """\
source $argv[1]
for line in $argv[2..]; echo (complete -C $line | string split -f1 \\t); end
"""

_ZSH = """\
zmodload zsh/zpty
zpty shell 'zsh -f -i'
zpty -w shell "PROMPT=; autoload -Uz compinit; fpath=(${1:h} \\$fpath); compinit -u -D"
zpty -w shell 'show() { print -r -- "FOUND: $BUFFER" }; zle -N show; bindkey "^T" show; echo RE""ADY'
zpty -r -m shell line '*READY*'
zpty -w -n shell "$2"
until [[ $seen == *"FOUND: $3"* ]]; do
  sleep 0.1; zpty -w -n shell $'\\t'; sleep 0.1; zpty -w -n shell $'\\C-t'
  while zpty -r -t shell part; do seen+=$part; done
done
echo "$3"
"""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return parser_of(tuple(COMMANDS))


@pytest.mark.parametrize(("shell", "code"), [("bash", _BASH), ("fish", _FISH)])
def test_a_shell_proposes_what_there_is(
    shell: str, code: str, parser: argparse.ArgumentParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = _script(shell, parser, tmp_path)
    (tmp_path / "some-file").touch()
    done = subprocess.run(
        [shell, "-c", code, *(["shell"] if shell == "bash" else []), str(script), *LINES],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert [sorted(line.split()) for line in done.stdout.splitlines()] == list(LINES.values())


def test_zsh_proposes_what_there_is(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    """Typed into a terminal, as zsh completes nowhere else; a key of the test's own prints the line. Keys that are
    pressed too fast complete nothing, so that they are pressed until what nobody has typed is there."""
    script = _script("zsh", parser, tmp_path).rename(tmp_path / "_penstock")
    line = "penstock train x.yaml --optimizer.l"
    (found,) = (line.replace(line.split()[-1], word) for word in LINES[line])
    done = subprocess.run(
        ["zsh", "-f", "-c", _ZSH, "zsh", str(script), line, found],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "TERM": "xterm"},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert done.stdout.strip() == found


def _script(shell: str, parser: argparse.ArgumentParser, folder: Path) -> Path:
    if shutil.which(shell, path="/usr/bin:/bin") is None:
        pytest.skip(f"{shell} is not installed")
    script = folder / f"penstock.{shell}"
    script.write_text(shtab.complete(parser, shell=shell))
    return script


def test_all_that_help_shows_is_completed(parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    """The flags at the beginning of help's lines are those of the parser that scripts are made of."""
    known = shtab.complete(parser, shell="fish")
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        shown = re.findall(r"(?<=^  )--[\w.-]+|(?<=, )--[\w.-]+(?=[ ,])", capsys.readouterr().out, re.MULTILINE)
        missing = [flag for flag in shown if f"-l {flag[2:]} " not in known and f"-l '{flag[2:]}' " not in known]
        assert not missing, f"penstock {command}"


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    assert "complete -c penstock" in capsys.readouterr().out
