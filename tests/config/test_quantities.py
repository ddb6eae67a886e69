"""Numbers with units: the same forms of numbers whatever is counted, and each with its own units."""

from collections.abc import Callable
from functools import partial

import pytest

from penstock.config import parse_duration, parse_size
from penstock.config.quantities import parse_count, parse_delay, parse_rate
from penstock.errors import ConfigError

rate, delay, count = (partial(parse, "key") for parse in (parse_rate, parse_delay, parse_count))


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_size, "1.5GiB", 3 << 29),
        (parse_size, " 2 kb\n", 2000),
        (parse_size, "1e3", 1000),
        (count, "1.5B", 1_500_000_000),
        (count, 1e16, 10**16),
        (parse_duration, "5min", 300.0),
        (parse_duration, ".5 h", 1800.0),
        (rate, "100Gbit/s", 1.25e10),
        (rate, "1e2 gbps", 1.25e10),
        (rate, "2GB/s", 2e9),
        (delay, "10us", 1e-5),
        (delay, "0.5ms", 5e-4),
        (delay, "0s", 0.0),
    ],
)
def test_a_number_is_read_with_its_unit(parse: Callable[[object], float], text: object, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (parse_size, ("", "K", "-1K", "1.K", "1e-3", "5 G B", "1KK", "5s", "1e999", "nan")),
        (count, ("", "0", "0.5", "5kb", "inf", True, float("nan"))),
        (parse_duration, ("5", "0s", "5M", "-5s", "1e7s", "5us", "s")),
        (rate, ("5", "5Gbit", "5gB", "5Gbyte/s", "0Gbit/s", "1e16B/s")),
        (delay, ("10", "10Ms", "-1us", "1e8s", "1e999s", "10min")),
    ],
)
def test_what_is_no_number_with_such_a_unit_is_refused(
    parse: Callable[[object], float], texts: tuple[object, ...]
) -> None:
    for text in texts:
        with pytest.raises(ConfigError, match="is not a"):
            parse(text)
