"""Which numbers a setting may have, as values: a configuration and a function's argument are refused in the same words.

A range never contains NaN, and infinity only where it says so: a comparison with NaN is false.
"""

from __future__ import annotations

import math
import reprlib
import sys
from dataclasses import dataclass
from typing import Any

from tilemesh.core.errors import Argument, UsageError

LARGEST_WHOLE = 2**63 - 1
"""The largest whole number of a configuration: that of TOML, of int64 tensors and of seeds."""


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`; `above` and `below` say that the end itself is not one of them."""

    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: Any) -> bool:
        low = value > self.least if self.above else value >= self.least
        if self.most == math.inf:
            high = value <= sys.float_info.max  # neither infinity nor a whole number that no float can hold
        else:
            high = value < self.most if self.below else value <= self.most
        return bool(low and high)

    @property
    def words(self) -> str:
        """What is expected, to be read after "expected"."""
        if self.most == math.inf:
            if self.above:
                return f"a number above {self.least:g}"
            return "0 or more" if self.least == 0 else f"at least {self.least:g}"
        if not self.above and not self.below:
            return f"between {_plain(self.least)} and {_plain(self.most)}"
        low = f"above {self.least:g}" if self.above else f"at least {self.least:g}"
        return f"{low} and {'below' if self.below else 'at most'} {_plain(self.most)}"

    def check(self, name: str, value: object, whole: bool = False) -> None:
        """Refuse what is not a number (`whole`: not a whole number), and numbers outside."""
        is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not is_number or value not in self:
            kind = "a whole number, " if whole else "" if is_number else "a number, "
            raise UsageError(name, f" is {shown(value)}: expected {kind}{self.words}")


def _plain(number: float) -> str:
    """With commas between thousands, and a whole number without a point."""
    return f"{int(number) if isinstance(number, int) or number.is_integer() else number:,}"


SEED = Range(0, LARGEST_WHOLE)
TEMPERATURE = Range(0)
SAMPLED_TOKENS = Range(0, 1_000_000)
TOP_K = Range(0, 2**31 - 1)
TOP_P = Range(0, 1, above=True)


def check_sampling(tokens: int, temperature: float, seed: int, top_k: int = 0, top_p: float = 1.0) -> None:
    """Refuse what no text can be drawn with."""
    SAMPLED_TOKENS.check(Argument("tokens"), tokens, whole=True)
    TEMPERATURE.check(Argument("temperature"), temperature)
    SEED.check(Argument("seed"), seed, whole=True)
    TOP_K.check(Argument("top_k"), top_k, whole=True)
    TOP_P.check(Argument("top_p"), top_p)


def shown(value: object) -> str:
    """A value as a message shows it: text in quotes, and nothing longer than a line."""
    if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
        return f"a whole number of {value.bit_length()} bits"  # thousands of digits, which Python may refuse to print
    if isinstance(value, str):
        text = f"'{value[:_SHOWN]}'"
    else:  # of a long list only the beginning is read: to write all of it down takes as long as it is
        text = _SHORT.repr(value) if isinstance(value, list | tuple | dict) else str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


_SHOWN = 120
_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHOWN // 2
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 2 * _SHOWN
