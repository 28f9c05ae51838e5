"""What commands about operators share: settings of a problem as they are typed."""

from __future__ import annotations

from typing import Any

from tilemesh.core.errors import UsageError


def problem_settings(options: Any, *flags: str) -> dict[str, str]:
    """Settings by name, of the flags that were given and of `--set NAME=VALUE`; the operator knows which there are."""
    settings = {name: value for name in flags if (value := getattr(options, name)) is not None}
    for pair in options.settings:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--set '{pair}': expected NAME=VALUE, as in activation=relu")
        if settings.setdefault(name, value) != value:
            raise UsageError(f"{name} is given twice, as '{settings[name]}' and as '{value}': give it once")
    return settings
