"""Sizes, counts, rates and durations as text, and back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.core.units import (
    format_bytes,
    format_change,
    format_count,
    format_plain,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_fraction,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("x", "expected"),
    [(0.00134, "+0.0013"), (-0.1, "-0.1000"), (-0.000004, "-0.000004"), (0.0, "0"), (-0.0, "0"), (-1e-12, "0")],
)
def test_a_change_has_the_digits_that_tell_it_from_none(x: float, expected: str) -> None:
    assert format_change(x) == expected


@pytest.mark.parametrize(
    ("x", "expected"),
    [(7e-05, "0.00007"), (-0.0, "0"), (0.5, "0.5"), (1e9, "1e+09"), (-0.00018, "-0.00018"), (1e-20, "1e-20")],
)
def test_a_plain_number_has_no_exponent_where_that_is_short_and_no_negative_zero(x: float, expected: str) -> None:
    assert format_plain(x) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64MiB", 64 * 2**20),
        ("4B", 4),
        ("1GB", 10**9),
        ("512", 512),
        ("1.5 GiB", 3 * 2**29),
        (" 1_024 kB ", 1_024_000),
        ("2tib", 2**41),
        ("79.3 GiB", 85147726643),  # 79.3 x 2**30 = 85147726643.2
    ],
)
def test_parse_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("64M", "size '64M' is ambiguous: write MB for powers of 1000 or MiB for 1024"),
        ("64XB", "size '64XB' has no known unit: use B, kB, MB, GB, TB or KiB, MiB, GiB, TiB"),
        ("1.5B", "size '1.5B' is not a whole number of bytes"),
        ("1.5", "size '1.5' is not a whole number of bytes"),
        ("-1", "size '-1' is not a number with a unit: write it such as 64MiB, 1GB or 512"),
        ("", "size '' is not a number with a unit: write it such as 64MiB, 1GB or 512"),
    ],
)
def test_parse_bytes_refuses(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4M", 4_000_000),
        ("512k", 512_000),
        ("512K", 512_000),
        ("2G", 2 * 10**9),
        ("7B", 7 * 10**9),
        ("1.5k", 1500),
        ("1024", 1024),
        ("1_000", 1000),
        ("0.3M", 300_000),
    ],  # 0.3 has no exact binary float
)
def test_parse_count(text: str, expected: int) -> None:
    assert parse_count(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4X", "count '4X' has no known suffix: use k, M, G (or B) or T"),
        ("1.5", "count '1.5' is not a whole number"),
        ("1.0005k", "count '1.0005k' is not a whole number"),
        ("many", "count 'many' is not a number with a unit: write it such as 4M, 512k or 1024"),
    ],
)
def test_parse_count_refuses(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_count(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (64 * 2**20, "64 MiB"),
        (1536, "1.5 KiB"),
        (85198045184, "79.3 GiB"),
        (1000, "1000 B"),
        (2**20 - 1, "1 MiB"),
        (-2048, "-2 KiB"),
        (2**70, "1048576 PiB"),
        (math.inf, "inf B"),
    ],
)
def test_format_bytes(n: float, expected: str) -> None:
    assert format_bytes(n) == expected


@pytest.mark.parametrize(
    ("s", "expected"),
    [
        (12.34e-6, "12.3 µs"),
        (1.42, "1.42 s"),
        (0, "0 s"),
        (37.83, "37.8 s"),
        (5e-10, "0.5 ns"),
        (999.9996e-6, "1 ms"),
        (119, "119 s"),
        (150, "2.5 min"),
        (3 * 3600, "3 h"),
        (864000, "10 d"),
        (-3e-3, "-3 ms"),
        (math.nan, "nan s"),
    ],
)
def test_format_seconds(s: float, expected: str) -> None:
    assert format_seconds(s) == expected


@pytest.mark.parametrize(
    ("x", "unit", "expected"),
    [
        (789e12, "FLOP/s", "789 TFLOP/s"),
        (4.3e12, "B/s", "4.3 TB/s"),
        (2.25e15, "FLOP/s", "2.25 PFLOP/s"),
        (541_234, "tokens/s", "541k tokens/s"),
        (12.34, "steps/s", "12.3 steps/s"),
        (0, "B/s", "0 B/s"),
        (math.inf, "B/s", "inf B/s"),
    ],
)
def test_format_rate(x: float, unit: str, expected: str) -> None:
    assert format_rate(x, unit) == expected


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (512, "512"),
        (4_000_000, "4M"),
        (124_439_808, "124M"),
        (1_180_000_000, "1.18G"),
        (999_999, "1M"),
        (math.nan, "nan"),
    ],
)
def test_format_count(n: float, expected: str) -> None:
    assert format_count(n) == expected


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=2**55))
def test_a_printed_size_reads_back_within_its_digits(n: int) -> None:
    assert abs(parse_bytes(format_bytes(n)) - n) <= 0.005 * n


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=10**15 - 10**13))  # parse_count goes up to T
def test_a_printed_count_reads_back_within_its_digits(n: int) -> None:
    assert abs(parse_count(format_count(n)) - n) <= 0.005 * n


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=999), st.sampled_from(["", "k", "M", "G", "T"]))
def test_a_round_count_is_printed_as_it_was_written(n: int, suffix: str) -> None:
    text = f"{n}{suffix}" if n else "0"
    assert format_count(parse_count(text)) == text


@settings(deadline=None)
@given(st.floats(min_value=1e-12, max_value=1e9))
def test_a_printed_duration_never_shows_a_thousand_or_an_exponent(s: float) -> None:
    number, unit = format_seconds(s).split()
    assert "e" not in number
    assert float(number) < 1000 or unit == "d"


def test_a_fraction_as_percent_or_number() -> None:
    assert [parse_fraction(text) for text in ("5%", "0.05", " 12.5 % ", "1", "0")] == [0.05, 0.05, 0.125, 1.0, 0.0]
    for wrong in ("five", "-1", "5 GB", "%", "5%%", ""):
        with pytest.raises(UsageError, match=r"such as 5% or 0\.05"):
            parse_fraction(wrong)


def test_durations_are_read_and_refused() -> None:
    read = {"90": 90.0, "1.5s": 1.5, "30m": 1800.0, "1h30m": 5400.0, "1d": 86400.0}
    assert {text: parse_seconds(text) for text in read} == read
    for wrong in ("", "1h30", "m", "5x", "-1s"):
        with pytest.raises(UsageError, match="is no duration"):
            parse_seconds(wrong)
