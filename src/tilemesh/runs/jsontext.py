"""Values as JSON text and back: what every small file of a run is written and read through.

JSON has no NaN and no infinity, and many readers refuse a file that spells them bare. They are written as the strings
"NaN", "Infinity" and "-Infinity" (as protobuf's JSON does) and come back as floats; a text that is exactly one of
these words comes back as a float, too. Numbers of numpy and torch become plain ones.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

from tilemesh.core.errors import UsageError

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_EXPECTED = "expected a number, text, a bool, None, or a list or mapping of these"


def to_text(value: Mapping[str, Any], file: str, indent: int | None = None) -> str:
    """The object as strict JSON; UsageError names the file, and the key of a value that JSON cannot hold."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return json.dumps(_plain(value, ""), indent=indent, allow_nan=False)
    except _NotPlainError as error:
        raise UsageError(f"{file}: {error}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not to be written as JSON: {error}") from None


def from_text(text: str) -> Any:
    """What `to_text` was given; ValueError or RecursionError for what is no JSON. Bare NaN is read as well."""
    value = json.loads(text)
    return _restored(value) if any(f'"{word}"' in text for word in _WORDS) else value


class _NotPlainError(Exception):
    """Which value cannot be written, and what it is."""


def _plain(value: Any, path: str) -> Any:
    """The value in types that JSON has. `path`: the keys that lead to it, for the error."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float | numbers.Real):
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        return number if math.isfinite(number) else _word(number)
    if isinstance(value, Mapping):
        return {_key(key, path): _plain(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{place}]") for place, item in enumerate(value)]
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        item = value.item()
        if isinstance(item, bool | int | float | str):
            return _plain(item, path)
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    hint = "; give .tolist() of it" if hasattr(value, "tolist") else ""
    raise _NotPlainError(f"'{path}' is a {type(value).__name__}{shape}: {_EXPECTED}{hint}")


def _word(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _key(key: Any, path: str) -> str:
    if isinstance(key, str | int):
        return str(key)
    raise _NotPlainError(f"a key of '{path}' is {key!r}: expected text")


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value
