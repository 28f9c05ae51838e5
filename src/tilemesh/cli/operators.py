"""What commands about operators share: settings of a problem as they are typed."""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.core.errors import UsageError


def given_settings(pairs: Sequence[str] | None, **flags: str | None) -> dict[str, str]:
    """Settings by name, of the flags that were given and of `--set NAME=VALUE`; the operator knows which there are."""
    given = {name: value for name, value in flags.items() if value is not None}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--set '{pair}': expected NAME=VALUE, as in activation=relu")
        if given.setdefault(name, value) != value:
            raise UsageError(f"{name} is given twice, as '{given[name]}' and as '{value}': give it once")
    return given
