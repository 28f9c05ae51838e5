"""Show a run in progress in a browser on this machine. The page refreshes by itself."""

from __future__ import annotations

from dataclasses import dataclass

from tilemesh.core.options import argument, option


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    run: str = argument(..., "A run's folder.", "RUN")
    port: int = option(0, "On loopback; 0 takes a free one.", "N")


def watch(options: WatchOptions) -> None:
    from tilemesh.cli.pages import follow

    follow(options.run, options.port)
