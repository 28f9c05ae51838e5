"""Quantities as people write and read them: "64MiB", "4M", "12.3 µs", "789 TFLOP/s".

The one idea: memory sizes are printed in powers of two and say so (MiB), everything else is decimal, and
whatever is printed can be read back. Three significant digits; tables and messages need no more.
Not for storage: files hold plain numbers in bytes, seconds and FLOP.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import LARGEST_WHOLE, shown

_NUMBER = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)

_BYTE_UNITS = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgtp", start=1)
    for name, base in ((f"{letter}b", 1000), (f"{letter}ib", 1024))
}
# "B" is how a billion parameters is written; a count is never in bytes, so it cannot be mistaken here.
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def parse_bytes(text: str) -> int:
    """Bytes from "64MiB", "1GB", "1.5 GiB", "4B" or "512"; a fraction of a byte is rounded to the nearest."""
    number, unit = _split(text, "size", "such as 64MiB, 1GB or 512")
    if unit in ("k", "m", "g", "t", "p"):
        # A bare letter is read as 1000 by some and as 1024 by others; 7 % at G is too much to guess.
        letter = unit.upper()
        raise UsageError(f"size '{text}' is ambiguous: write {letter}B for powers of 1000 or {letter}iB for 1024")
    if unit not in _BYTE_UNITS:
        raise UsageError(f"size '{text}' has no known unit: use B, kB, MB, GB, TB or KiB, MiB, GiB, TiB")
    if unit in ("", "b") and number != int(number):
        raise UsageError(f"size '{text}' is not a whole number of bytes")
    return _bounded(number * _BYTE_UNITS[unit], text, "size")


def parse_count(text: str) -> int:
    """A whole count from "4M", "512k", "2G", "7B" or "1024"; the suffixes are decimal."""
    number, unit = _split(text, "count", "such as 4M, 512k or 1024")
    if unit not in _COUNT_UNITS:
        raise UsageError(f"count '{text}' has no known suffix: use k, M, G (or B) or T")
    value = number * _COUNT_UNITS[unit]
    count = _bounded(value, text, "count")
    if value != count:
        raise UsageError(f"count '{text}' is not a whole number")
    return count


def parse_fraction(text: str) -> float:
    """A fraction from "5%" or "0.05"."""
    is_percent = text.strip().endswith("%")
    number, unit = _split(text.strip().removesuffix("%"), "fraction", "such as 5% or 0.05")
    if unit:
        raise UsageError(f"fraction {shown(text)} has no known unit: write it such as 5% or 0.05")
    return float(number / 100) if is_percent else float(number)


def parse_seconds(text: str) -> float:
    """Seconds of a duration: "90" and "90s", "30m", "2h", "1d", and several of them together, "1h30m"."""
    wrong = UsageError(
        f"{shown(text)} is no duration: expected a number of seconds, or one with units, such as 90s, 30m, 1h30m"
    )
    pieces = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not pieces or "".join(number + unit for number, unit in pieces) != text.strip():
        raise wrong
    lengths = [_SECONDS[unit or "s"] for _, unit in pieces]
    if (any(not unit for _, unit in pieces) and len(pieces) > 1) or lengths != sorted(set(lengths), reverse=True):
        raise wrong  # 1d1d, 30m1h
    return sum(float(number) * _SECONDS[unit or "s"] for number, unit in pieces)


def format_bytes(n: float) -> str:
    """A memory size: 67108864 is "64 MiB"."""
    number, name = _scaled(n, 1024, _BINARY)
    return f"{number} {name}"


def format_count(n: float) -> str:
    """A count, short: 4000000 is "4M", 1180000000 is "1.18G", 512 is "512"."""
    return "".join(_scaled(n, 1000, _DECIMAL))


def format_rate(x: float, unit: str) -> str:
    """A rate: 7.89e14 "FLOP/s" is "789 TFLOP/s"; a unit that is a word keeps it whole, "541k tokens/s"."""
    if not unit.startswith(("B/", "FLOP")):
        return f"{format_count(x)} {unit}"
    number, prefix = _scaled(x, 1000, _DECIMAL)
    return f"{number} {prefix}{unit}"


def format_seconds(s: float) -> str:
    """A duration in the unit that reads best: "12.3 µs", "1.42 s", "3.5 h", "12 d"."""
    s = _as_float(s)
    if not math.isfinite(s) or s == 0:
        return f"{s:g} s"
    size = abs(s)
    # Beyond two of the next unit a reader stops dividing in the head: 119 s stays, 121 s is 2.02 min.
    for unit, seconds, limit in (("d", 86400, 172800), ("h", 3600, 7200), ("min", 60, 120)):
        if size >= limit:
            return f"{_three_digits(s / seconds)} {unit}"
    # Round before choosing, so that 999.9996 µs is "1 ms" and never "1000 µs".
    for unit, per_second in (("ns", 1e9), ("µs", 1e6), ("ms", 1e3)):
        text = _three_digits(s * per_second)
        if abs(float(text)) < 1000:
            return f"{text} {unit}"
    return f"{_three_digits(s)} s"


def format_change(x: float) -> str:
    """A change of a loss with its sign and four digits after the point, or as many as tell it from none: "+0.0013",
    "-0.000004"; "0" where nothing changed."""
    for digits in range(4, 10):
        text = f"{x:+.{digits}f}"
        if float(text) != 0:
            return text
    return "0"


def format_plain(x: float) -> str:
    """A number in six digits without an exponent where that is short, and never as a negative zero."""
    x = _as_float(x)
    text = f"{x + 0.0:g}"
    return f"{x:.9f}".rstrip("0").rstrip(".") if "e-0" in text else text


def _split(text: str, kind: str, examples: str) -> tuple[Decimal, str]:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{kind} {shown(text)} is not a number with a unit: write it {examples}")
    return Decimal(match[1].replace("_", "")), match[2].lower()


def _bounded(value: Decimal, text: str, kind: str) -> int:
    """The nearest whole number; no memory and no count is beyond 2**63."""
    if value > LARGEST_WHOLE:
        raise UsageError(f"{kind} {shown(text)} is too large: write one below 2**63")
    return int(value.to_integral_value())


def _as_float(x: float) -> float:
    """An integer too large for a float is infinite: nobody reads 400 digits."""
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _scaled(x: float, base: int, names: tuple[str, ...]) -> tuple[str, str]:
    x, step = _as_float(x), 0
    if not math.isfinite(x):
        return str(x), names[0]
    while abs(float(_three_digits(x))) >= base and step + 1 < len(names):
        x /= base
        step += 1
    return _three_digits(x), names[step]


def _three_digits(x: float) -> str:
    """Three significant digits, all of the integer part, no trailing zeros and no exponent."""
    if x == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(x))))
    text = f"{x:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
