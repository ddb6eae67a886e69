"""Sizes: what people write is what they mean, and a number whose unit was forgotten is no size."""

import math
from pathlib import Path
from typing import Any

import pytest

from penstock import Budget
from penstock.cli import settings
from penstock.config import Endurance, SourceConfig, TokenizerTrainingConfig, parse_size
from penstock.config.sizes import MEMORY_LEAST, TEXT_LEAST, check_size, format_flops, format_parameters, three_digits
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("64GiB", 64 << 30),
        ("64G", 64 << 30),
        ("64g", 64 << 30),
        ("64GB", 64 * 10**9),
        ("8 gb", 8 * 10**9),
        (" 1.5 Mib ", 3 << 19),
        (".5k", 512),
        ("3T", 3 << 40),
        ("3tb", 3 * 10**12),
        ("7B", 7),
        ("7", 7),
        (7, 7),
        (1.5e9, 1_500_000_000),
        ("1.5e9", 1_500_000_000),
        ("2E+3 MB", 2 * 10**9),
    ],
)
def test_a_size_as_people_write_it(written: Any, meant: int) -> None:
    assert parse_size(written) == meant


@pytest.mark.parametrize(
    "written",
    ["", "G", "64 GG", "64Gi", "6 4G", "-1G", "1,5G", "1e-3G", "9e18 k", "1e999", -1, True, 1.5, math.nan, math.inf],
)
def test_what_is_no_size(written: Any) -> None:
    with pytest.raises(ConfigError, match="is not a size: write a number with"):
        parse_size(written)


@pytest.mark.parametrize("written", [24, "24", " 24 ", 24.0, "2.4e1", 81920, MEMORY_LEAST - 1])
def test_a_small_number_without_a_unit_is_refused_with_what_to_write(written: Any) -> None:
    with pytest.raises(ConfigError, match=r"^host: (\S+) without a unit .* write \1GiB, \1GB .*\1B, if it is bytes"):
        check_size("host", written, MEMORY_LEAST)


@pytest.mark.parametrize("written", [0, "0", "24B", "24 k", MEMORY_LEAST, str(MEMORY_LEAST)])
def test_a_size_with_a_unit_or_of_nothing_may_be_small(written: Any) -> None:
    check_size("host", written, MEMORY_LEAST)


@pytest.mark.parametrize(
    ("key", "budget"),
    [
        ("budget.device", {"device": 24}),
        ("budget.host", {"host": "64"}),
        ("budget.endurance.tbw", {"disk": "d", "endurance": Endurance(tbw=1200, days=365)}),
        ("budget.endurance.per_day", {"disk": "d", "endurance": Endurance(per_day=3)}),
    ],
)
def test_every_size_of_a_budget_needs_a_unit(key: str, budget: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: .* without a unit"):
        Budget(**{"device": "8G", "host": "8G", **budget}).check_units()


def test_a_ranks_share_of_a_budget_has_its_unit_however_small_it_is() -> None:
    given = Budget(device="8G", host=MEMORY_LEAST, disk="d", endurance=Endurance(per_day=MEMORY_LEAST))
    given.check_units()
    own = given.of_rank(0, 4)
    own.check_units()
    assert own.endurance is not None
    assert (own.host_bytes, own.endurance.bytes_per_day) == (MEMORY_LEAST // 4, MEMORY_LEAST // 4)


def test_a_settings_file_takes_sizes_in_each_form(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "run: r\nmodel: m\ndata: {sources: a.txt, sequence_length: 64}\noptimizer: {lr: 1e-3}\nbatch: {sequences: 2}\n"
        "steps: 3\nbudget:\n  device: 1.5e9\n  host: 64 g\n"
    )
    budget = settings.load(path).budget
    assert (budget.device_bytes, budget.host_bytes) == (1_500_000_000, 64 << 30)
    assert settings.load_text(settings.dump(settings.load(path)), "again").budget == budget
    with pytest.raises(ConfigError, match=r"^--budget\.device: 24 without a unit would be bytes"):
        settings.load(path, [("budget.device", "24")])
    path.write_text(path.read_text().replace("64 g", "64"))
    with pytest.raises(ConfigError, match=r"c\.yaml:9: budget\.host: 64 without a unit"):
        settings.load(path)


def test_sizes_of_text_need_a_unit_too() -> None:
    assert SourceConfig(path="a.txt", limit=TEXT_LEAST).limit_bytes == TEXT_LEAST
    with pytest.raises(ConfigError, match=r"^limit: 8 without a unit"):
        SourceConfig(path="a.txt", limit=8)
    with pytest.raises(ConfigError, match=r"^data\.tokenizer\.train\.sample: 4 without a unit"):
        TokenizerTrainingConfig(vocabulary=512, sample=4)


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.0, "0"), (0.01234, "0.0123"), (99.94, "99.9"), (99.96, "100"), (999.7, "1,000"), (1620.4, "1,620")],
)
def test_numbers_have_three_digits_and_all_before_the_point(value: float, written: str) -> None:
    assert three_digits(value) == written
    assert format_flops(value * 1e12) == (
        f"{written} TFLOP/s" if value >= 0.1 else f"{three_digits(value * 1e3)} GFLOP/s"
    )


def test_a_count_of_parameters_is_never_said_to_be_none() -> None:
    said = [format_parameters(count) for count in (0, 24_096, 999_999, 1_000_000, 29_360_128, 70_553_706_496)]
    assert said == [
        "0 parameters",
        "24,096 parameters",
        "999,999 parameters",
        "1.0M parameters",
        "29.4M parameters",
        "70,553.7M parameters",
    ]
