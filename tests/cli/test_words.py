"""The words after a command are read into its dataclass by the same code as the settings file, with the same errors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from penstock.cli import arguments, export, main, plan, report, simulate, verify
from penstock.cli.words import Words, help_of, read_words
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Example(Words):
    """penstock example: every kind of option

    | option | meaning |
    |---|---|
    | ``count``, ``share`` SHARE | numbers |
    | ``fast`` | a switch |
    | ``kind`` | a word of
    several |
    | ``each`` | given again and again |
    | ``picture`` | a name may follow |
    | ``flag`` | open: neither |
    | ``size`` | bytes |
    """

    command: ClassVar[str] = "penstock example"
    takes: ClassVar[str] = "a file and more"
    operands: ClassVar[tuple[str, ...]] = ("file", "more")
    endings: ClassVar[Mapping[str, str]] = {"picture": ".png"}

    file: Path
    more: tuple[str, ...] = ()
    count: int | None = None
    share: float = 0.5
    fast: bool = False
    kind: Literal["a", "b"] = "a"
    each: tuple[Path, ...] = ()
    picture: Path | bool = False
    flag: bool | None = None
    size: str | int = "1KiB"

    def __post_init__(self) -> None:
        if self.count == 13:
            raise ConfigError("count=13: must be another one")


def test_each_kind_of_option_is_read() -> None:
    words = ["f", "--count", "3", "--share=1e-1", "--fast", "--each", "1", "--each=2", "--kind", "b", "more", "true"]
    found = read_words(Example, [*words, "--flag", "false", "--size", "7"])
    assert (found.file, found.more, found.count, found.share) == (Path("f"), ("more", "true"), 3, 0.1)
    assert (found.fast, found.kind, found.each) == (True, "b", (Path("1"), Path("2")))
    assert (found.flag, found.size) == (False, "7")
    assert read_words(Example, ["f"]) == Example(file=Path("f"))
    assert read_words(Example, ["--picture", "f"]).picture is True
    assert read_words(Example, ["f", "--picture", "p.png"]).picture == Path("p.png")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "penstock example takes a file and more, and was given none. Try: penstock example --help"),
        (["f", "--cuont", "3"], "there is no option --cuont; did you mean --count"),
        (["f", "--zzz"], r"there is no option --zzz; penstock example takes --count, --share"),
        (["f", "--count"], "--count needs a value: --count N"),
        (["f", "--count="], "--count needs a value"),
        (["f", "--count", "--fast"], "--count needs a value"),
        (["f", "--count", "x"], "--count must be a whole number, not 'x'"),
        (["f", "--count", ""], "--count must be a whole number, not ''"),
        (["f", "--count", "null"], "--count must be a whole number, not 'null'"),
        (["f", "--share", "~"], "--share must be a number, not '~'"),
        (["f", "--flag", ""], "--flag must be true or false, not ''"),
        (["f", "--each", ""], "--each needs a value: --each FILE"),
        (["f", "--each="], "--each needs a value: --each FILE"),
        (["f", "--size", ""], "--size needs a value: --size SIZE"),
        (["f", "--picture="], "--picture needs a value"),
        (["f", "--count", "13"], "--count=13: must be another one"),
        (["f", "--count", "1", "--count=2"], "--count is given twice"),
        (["f", "--fast=yes"], "--fast takes no value"),
        (["f", "--fast", "false"], "--fast takes no value: write --fast alone, or leave it out"),
        (["f", "--kind", "c"], "--kind must be one of a, b, not 'c'"),
        (["f", "--file", "g"], "there is no option --file"),
        (["f", "--count", "[1"], "--count: this is not YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_option(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_words(Example, words)


def test_a_picture_with_another_ending_is_no_picture() -> None:
    with pytest.raises(ConfigError, match=r"and pic is no folder\. A picture's name ends in \.svg$"):
        report.run(read_words(report.Arguments, ["run", "--svg", "pic"]))
    with pytest.raises(ConfigError, match=r"and more is no folder$"):
        report.run(read_words(report.Arguments, ["run", "--svg", "a.svg", "more"]))


def test_a_command_without_options_says_so() -> None:
    with pytest.raises(ConfigError, match=r"there is no option --deep; penstock verify takes no options$"):
        read_words(verify.Arguments, ["run", "--deep"])


@pytest.mark.parametrize("kind", [arguments.TrainArguments, arguments.ResumeArguments, plan.FileArguments])
def test_a_setting_is_given_once(kind: type[Words]) -> None:
    with pytest.raises(ConfigError, match=r"--data.sequence-length is given twice: keep one"):
        read_words(kind, ["a", "--data.sequence-length", "3", "--data.sequence_length", "4"])


@pytest.mark.parametrize("words", [("report", "RUN", "--out"), ("report", "RUN", "--trace"), ("doctor", "--path")])
@pytest.mark.parametrize("empty", [True, False])
def test_a_path_that_is_empty_is_refused_before_any_work(
    words: tuple[str, ...], empty: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, ""] if empty else [*words[:-1], f"{words[-1]}="]) == 2
    assert f"{words[-1]} needs a value: {words[-1]} FILE" in capsys.readouterr().err


def test_of_a_plan_without_a_file_the_misspelt_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"there is no option --modle; did you mean --model\?"):
        plan.read_arguments(["--modle", "gpt-65b"])
    with pytest.raises(ConfigError, match="takes a settings file, or --model NAME, and was given none"):
        plan.read_arguments(["--machine", "a100-40g", "--optimizer.lr", "1e-3", "--steps=3"])


def test_options_are_listed_with_what_is_needed_first() -> None:
    """In errors and in help alike: what has to be given, what is the command's own, and last what is rarely said."""
    with pytest.raises(ConfigError) as caught:
        plan.read_arguments(["--modle", "gpt-65b"])
    listed = re.findall(r"--[a-z-]+", str(caught.value).partition("takes ")[2])
    shown = re.findall(r"^  (--[a-z-]+)", plan.help_text().partition("With --model")[2], re.MULTILINE)
    of_both = ["--machine", "--hosts", "--network", "--latency", "--longest", "--json"]
    assert listed[:10] == ["--model", *of_both, "--device", "--host", "--durability"]
    assert listed.index("--batch") < listed.index("--optimizer") < listed.index("--grad-dtype")
    assert [flag for flag in listed if flag in shown] == shown


def test_help_is_the_docstring_with_every_option_once() -> None:
    lines = help_of(Example).splitlines()
    assert lines[0] == "penstock example: every kind of option"
    assert "  --count N, --share SHARE" in lines
    assert "  --kind a|b             a word of several (a)" in lines


@pytest.mark.parametrize("kind", [verify.Arguments, export.Arguments, report.Arguments, plan.FileArguments])
def test_every_option_of_a_command_is_in_its_help(kind: type[Words]) -> None:
    said = help_of(kind)
    for name in (field.name for field in fields(kind)):
        assert name in (*kind.operands, "settings") or f"--{name.replace('_', '-')}" in said


def test_every_option_of_simulate_and_of_plan_without_a_file_is_in_its_help() -> None:
    for kind, said in ((simulate.Arguments, simulate.help_text()), (plan.ModelArguments, plan.help_text())):
        for name in (field.name for field in fields(kind)):
            assert name == "name" or f"--{name.replace('_', '-')} " in said or f"--{name.replace('_', '-')}\n" in said
