"""Show a run in a browser, or a live server here, until it ends. A server is named by its address (http://...)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tilemesh.core.options import argument, option
from tilemesh.core.ranges import Range


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    run: str = argument(..., "A run's folder, or a server's address.", "RUN")
    port: int = option(0, "On loopback; 0 takes a free one.", "N")
    api_key: str | None = option(None, "Of a server that asks for one.", "KEY")
    every: Annotated[float, Range(0, 3600, above=True)] = option(1.0, "Of a server: seconds between lines.", "S")


def watch(options: WatchOptions) -> None:
    if options.run.startswith(("http://", "https://")):
        from tilemesh.cli.server_watch import watch_server

        address = options.run.rstrip("/").removesuffix("/v1")
        watch_server(address, options.api_key, options.every, lambda line: print(line, flush=True))
        return
    from tilemesh.cli.pages import follow

    follow(options.run, options.port)
