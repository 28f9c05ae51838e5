"""A server's life: the engine, a socket, requests until a signal comes, and those under way finished."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tilemesh.core.access import is_loopback, read_keys, server_access
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.ranges import Range

_GRACE_S = 30
"""How long answers that are under way may take when the server is told to stop; a second signal stops at once."""


@dataclass(frozen=True)
class ListenOptions:
    """Where a server listens, and to whom: as typed."""

    host: str
    port: int
    keys: tuple[str, ...]
    without_key: bool
    hosts: tuple[str, ...]
    origins: tuple[str, ...]
    certificate: str | None
    private_key: str | None

    def check_tls(self) -> dict[str, Any]:
        """uvicorn's settings for HTTPS; refuses files that cannot be used before a model is read."""
        if (self.certificate is None) != (self.private_key is None):
            raise UsageError("--tls-cert and --tls-key belong together: give both, or neither")
        if self.certificate is None:
            return {}
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.private_key, password="")
        except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
            why = getattr(error, "strerror", None) or error
            raise UsageError(
                f"--tls-cert {self.certificate} and --tls-key {self.private_key} cannot be used: {why}"
            ) from None
        return {"ssl_certfile": self.certificate, "ssl_keyfile": self.private_key}


def run(
    source: str,
    listen: ListenOptions,
    name: str | None,
    mesh: str | None,
    options: Mapping[str, Any],
    say: Callable[[str], None],
    generation_config: bool = False,
) -> int:
    Range(0, 65535).check("--port", listen.port, whole=True)
    keys, tls = read_keys(listen.keys), listen.check_tls()
    sizes = read_mesh(mesh)
    try:
        import uvicorn

        from tilemesh.serve.connection import PatientConnection
        from tilemesh.serve.http import make_app
    except ImportError as error:
        raise RunError(f"serving needs the package {error.name}: pip install 'tilemesh[serve]'") from None
    from tilemesh.serve.engine import Engine
    from tilemesh.serve.load import folder_defaults
    from tilemesh.serve.replicas import Replicas

    defaults = folder_defaults(source) if generation_config else {}
    # Before gigabytes are read: a port that is taken is the commonest failure.
    listening = _listen(listen.host, listen.port)
    with listening, contextlib.ExitStack() as stack:
        address, at = listening.getsockname()[:2]
        access = server_access(address, keys, listen.hosts, listen.origins, listen.without_key)
        engine: Engine | Replicas
        if sizes["dp"] > 1:
            engine = stack.enter_context(Replicas(source, sizes["dp"], ranks=sizes["tp"], say=say, **options))
        else:
            ranks = sizes["tp"] if sizes["tp"] > 1 else 0
            engine = stack.enter_context(Engine(source, ranks=ranks, say=say, **options))
        app = make_app(engine, name, defaults, access)
        config = uvicorn.Config(
            app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=_GRACE_S, ws="none",
            http=PatientConnection, server_header=False, **tls,
        )  # fmt: skip
        server = uvicorn.Server(config)
        # From here on, also while the collection below runs, which would swallow an exception. uvicorn raises the
        # signals that stopped it again when it is done; to have stopped well is no failure.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.handle_exit)
        # What was read until now stays: a collection that looks at all of torch's objects stops everybody for 0.15 s.
        gc.collect()
        gc.freeze()
        limits, used = engine.limits, engine.limits.pages * engine.limits.page_tokens
        shown = f"[{address}]" if ":" in address else address
        say(
            f"{limits.pages} pages of {limits.page_tokens} tokens: {used:,} tokens, {limits.running} requests at a time"
        )
        say(f"serving {name or engine.served.name} on {'https' if tls else 'http'}://{shown}:{at}/v1")
        if not keys and not is_loopback(address):
            say("no key is asked for: whoever reaches this machine may use it")
        asyncio.run(server.serve(sockets=[listening]))
        say("stopped")
    return 0


def read_mesh(text: str | None) -> dict[str, int]:
    """`tp=2,dp=2`: the axes that serving knows, 1 where they are not named."""
    sizes = {"tp": 1, "dp": 1}
    for word in text.split(",") if text is not None else ():
        axis, _, number = word.strip().partition("=")
        if axis not in sizes:
            raise UsageError(f"--mesh is {text}: expected tp=N, dp=N or both, such as tp=2,dp=2")
        if not number.isascii() or not number.isdecimal() or not 1 <= int(number[:9]) <= 256:
            raise UsageError(f"--mesh is {text}: expected a whole number from 1 to 256 after {axis}=")
        sizes[axis] = int(number)
    return sizes


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host is {host}: it is no address of this machine ({error})") from None
    made = socket.socket(family, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(1024)
    except OSError as error:
        made.close()
        why = error.strerror or error
        raise RunError(
            f"cannot listen on {host}, port {port}: {why}; give another --port (0 takes a free one)"
        ) from None
    return made
