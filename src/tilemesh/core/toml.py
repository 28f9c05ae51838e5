"""Plain values as TOML text; the standard library only reads it."""

from __future__ import annotations

from typing import Any


def toml_value(value: Any) -> str:
    """A value as it stands right of a `=`; None, which TOML has not, is the text "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, (int, float)):
        return repr(value)
    escaped = "".join(_ESCAPES.get(char, char) for char in value)
    return f'"{escaped}"'


_ESCAPES = {chr(code): f"\\u{code:04x}" for code in (*range(0x20), 0x7F)} | {
    '"': '\\"',
    "\\": "\\\\",
    "\b": "\\b",
    "\t": "\\t",
    "\n": "\\n",
    "\f": "\\f",
    "\r": "\\r",
}
