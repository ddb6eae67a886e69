"""What ``penstock COMMAND --help`` says, and the ways to call the command."""

import runpy
import sys

import pytest

from penstock.cli import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", command]) == 0
    said = capsys.readouterr().out
    assert f"  penstock {command} " in said or said.startswith(f"penstock {command} ")
    assert "penstock: trains language models" not in said, "the general help"
    assert max(map(len, said.splitlines())) <= 120
    for asked in (["--help"], ["-h"], ["RUN", "--help"]):
        assert main([command, *asked]) == 0
        assert capsys.readouterr().out == said, asked


def test_the_general_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  penstock {command} " in said


@pytest.mark.parametrize("module", ["penstock", "penstock.cli"])
def test_python_runs_the_command_without_it_being_on_the_path(
    module: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("penstock ")
