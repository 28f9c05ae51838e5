"""A live server's figures in a terminal: its /metrics and /v1/models, read again and again."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from tilemesh.core.errors import RunError, UsageError

_FIGURE = re.compile(r'^(tilemesh_\w+)(?:\{\w+="(\w+)"\})? (\S+)$', re.MULTILINE)
_TIMEOUT_S = 10


def watch_server(address: str, key: str | None, every_s: float, show: Callable[[str], None]) -> None:
    """Show a line whenever so many seconds have passed, until the server ends."""
    last: tuple[float, float] | None = None
    while True:
        try:
            figures = {
                " ".join(filter(None, (name, label))): float(value)
                for name, label, value in _FIGURE.findall(_read(address, "/metrics", key))
            }
            models = [model["id"] for model in json.loads(_read(address, "/v1/models", key))["data"]]
        except urllib.error.HTTPError as error:
            raise UsageError(f"{address} answered {error.code} ({error.reason}): give --api-key its key") from None
        except (OSError, ValueError, LookupError) as error:
            if last is None:
                raise RunError(f"{address} does not answer as `tilemesh serve` does: {error}") from None
            show("the server has ended")
            return
        now = (time.monotonic(), figures.get("tilemesh_output_tokens_total", 0.0))
        rate = 0.0 if last is None else (now[1] - last[1]) / max(1e-9, now[0] - last[0])
        last = now
        show(server_line(figures, models, rate))
        time.sleep(every_s)


def server_line(figures: dict[str, float], models: list[str], tokens_per_s: float) -> str:
    """Requests, tokens, pages, version and adapters."""

    def count(name: str) -> str:
        return f"{figures.get(f'tilemesh_{name}', 0.0):,.0f}"

    asleep = " · asleep" if figures.get("tilemesh_sleep_level") else ""
    adapters = f" · adapters {', '.join(models[1:])}" if models[1:] else ""
    return (
        f"{models[0]}: {count('running_requests')} running, {count('waiting_requests')} waiting · "
        f"{count('output_tokens_total')} tokens, {tokens_per_s:,.0f} tokens/s · pages {count('pages used')} used, "
        f"{count('pages idle')} idle, {count('pages free')} free · weights version {count('weights_version')}"
        f"{asleep}{adapters}"
    )


def _read(address: str, path: str, key: str | None) -> str:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers), timeout=_TIMEOUT_S) as reply:
        return str(reply.read().decode())
