"""Serve a model over HTTP to OpenAI's clients. Paths: /v1/completions, /v1/chat/completions, /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import signal
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from tilemesh.cli.output import tell
from tilemesh.cli.planned import serve_planned
from tilemesh.core.access import is_loopback, read_keys, server_access
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.options import argument, option
from tilemesh.core.ranges import Range
from tilemesh.kernels.launch.compile_ahead import start_workers
from tilemesh.serve.config import EngineConfig

_GRACE_S = 30
"""How long answers that are under way may take when the server is told to stop; a second signal stops at once."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(EngineConfig):
    """Where a server listens, and to whom, before how its engine serves."""

    source: str = argument(..., "A run's folder, or a Hugging Face folder.", "RUN|FOLDER")
    port: Annotated[int, Range(0, 65535)] = option(8000, "Where to listen; 0 takes any that is free.", "N")
    host: str = option("127.0.0.1", "By default only this machine can connect.")
    api_key: tuple[str, ...] = option(
        (), "Answer only who sends one of these; also from TILEMESH_API_KEYS.", "KEY|@FILE"
    )
    no_key: bool = option(False, "Let other machines ask without a key.")
    allow_host: tuple[str, ...] = option((), "Another name that this server is asked for under.", "NAME")
    allow_origin: tuple[str, ...] = option((), "Pages that may ask from a browser, or *; else none.", "URL")
    tls_cert: str | None = option(None, "Serve HTTPS with this certificate.", "FILE")
    tls_key: str | None = option(None, "The certificate's private key.", "FILE")
    name: str | None = option(None, "What the model is called; by default as its folder.")
    mesh: str | None = option(None, "Processes per matrix, replicas, and how many share experts.", "tp=2,dp=2,ep=2")
    plan: str | None = option(None, "Instead: a plan of `tilemesh plan serve --out`.", "PLAN.toml")
    adapter: tuple[str, ...] = option((), "An adapter to begin with; --adapters says how many may come.", "NAME=FOLDER")
    draft: str | None = option(None, "A smaller model that guesses, up to --speculate tokens (4).", "RUN|FOLDER")
    explain: bool = option(False, "Say which programs compute the model, and why not others.")
    generation_config: bool = option(False, "Take the folder's generation_config.json as defaults.")


def serve(options: ServeOptions) -> None:
    """A server's life: the engine, a socket, requests until a signal comes, and those under way finished."""
    options = serve_planned(options)
    keys, tls, sizes = read_keys(options.api_key), check_tls(options), read_mesh(options.mesh)
    if options.device.startswith("cuda") and sizes["tp"] == 1:
        with contextlib.suppress(OSError):  # the engine does without
            start_workers()
    try:
        import uvicorn

        from tilemesh.serve.connection import connection_settings
        from tilemesh.serve.http import make_app
    except ModuleNotFoundError as error:
        raise RunError(f"serving needs the package {error.name}: pip install 'tilemesh[serve]'") from None
    from tilemesh.serve.engine import Engine
    from tilemesh.serve.load import folder_defaults
    from tilemesh.serve.replicas import Replicas

    adapters = read_adapters(options.adapter)
    options = replace(options, adapters=max(options.adapters, len(adapters)))
    defaults = folder_defaults(options.source) if options.generation_config else {}
    # Before gigabytes are read: a port that is taken is the commonest failure.
    listening = _listen(options.host, options.port)
    with listening, contextlib.ExitStack() as stack:
        address, at = listening.getsockname()[:2]
        access = server_access(address, keys, options.allow_host, options.allow_origin, options.no_key)
        engine: Engine | Replicas
        models: dict[str, Any] = {"draft": options.draft, "say": tell, "prepare": True}
        ranks, replicas, ep = sizes["tp"], sizes["dp"], sizes["ep"]
        if replicas > 1:
            engine = stack.enter_context(Replicas(options.source, replicas, options, ranks=ranks, ep=ep, **models))
        else:
            engine = stack.enter_context(Engine(options.source, options, ranks=ranks if ranks > 1 else 0, **models))
        for name, folder in adapters.items():
            engine.load_adapter(name, folder)
        if options.explain:
            for line in engine.explain():
                tell(line)
        app = make_app(engine, options.name, defaults, access, tell)
        config = uvicorn.Config(
            app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=_GRACE_S, ws="none",
            server_header=False, **connection_settings(tls),
        )  # fmt: skip
        server = uvicorn.Server(config)
        # From here on, also while the collection below runs, which would swallow an exception. uvicorn raises the
        # signals that stopped it again when it is done; to have stopped well is not a failure.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.handle_exit)
        # What was read until now stays: a collection that looks at all of torch's objects stops everybody for 0.15 s.
        gc.collect()
        gc.freeze()
        limits, used = engine.limits, engine.limits.pages * engine.limits.page_tokens
        shown = f"[{address}]" if ":" in address else address
        local = f" ({limits.local_pages} in layers with a window)" if limits.local_pages else ""
        tell(
            f"{limits.pages} pages{local} of {limits.page_tokens} tokens: {used:,} tokens, {limits.running} requests "
            "at a time"
        )
        tell(f"serving {options.name or engine.served.name} on {'https' if tls else 'http'}://{shown}:{at}/v1")
        if not keys and not is_loopback(address):
            tell("no key is asked for: whoever reaches this machine may use it")
        asyncio.run(server.serve(sockets=[listening]))
        tell("stopped")


def check_tls(options: ServeOptions) -> ssl.SSLContext | None:
    """What HTTPS needs, if it is asked for; refuses files that cannot be used before a model is read."""
    if (options.tls_cert is None) != (options.tls_key is None):
        raise UsageError("--tls-cert and --tls-key belong together: give both, or neither")
    if options.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key, password="")
    except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--tls-cert {options.tls_cert} and --tls-key {options.tls_key} cannot be used: {why}"
        ) from None
    return context


def read_adapters(words: Sequence[str]) -> dict[str, str]:
    """`NAME=FOLDER`, each name once."""
    pairs = [word.partition("=") for word in words]
    for word, (name, _, folder) in zip(words, pairs, strict=True):
        if not name or not folder:
            raise UsageError(f"--adapter is {word}: expected NAME=FOLDER, such as sql=adapters/sql")
    read = {name: folder for name, _, folder in pairs}
    if len(read) < len(pairs):
        raise UsageError(f"--adapter names {len(pairs)} adapters, and some of them twice: give each a name of its own")
    return read


_NO_AXIS = {
    "pp": "a token passes all stages before the next one can begin, so stages would take turns; set tp or dp",
    "cp": "a step computes one new token of each request, which leaves nothing of a sequence to share; set tp or dp",
}


def read_mesh(text: str | None) -> dict[str, int]:
    """`tp=2,dp=2,ep=2`: the axes that serving knows, 1 where they are not named."""
    sizes = {"tp": 1, "dp": 1, "ep": 1}
    for word in text.split(",") if text is not None else ():
        axis, _, number = word.strip().partition("=")
        if axis in _NO_AXIS:
            raise UsageError(f"--mesh is {text}: serving has no {axis}: {_NO_AXIS[axis]}")
        if axis not in sizes:
            raise UsageError(f"--mesh is {text}: expected some of tp=N, dp=N and ep=N, such as tp=2,dp=2")
        if not re.fullmatch("[1-9][0-9]{0,2}", number) or int(number) > 256:
            raise UsageError(f"--mesh is {text}: expected a whole number from 1 to 256 after {axis}=")
        sizes[axis] = int(number)
    if sizes["dp"] % sizes["ep"]:
        raise UsageError(
            f"--mesh is {text}: experts are shared among replicas, and dp {sizes['dp']} of them do not make up groups "
            f"of ep {sizes['ep']}; set dp to a multiple of it"
        )
    return sizes


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host is {host}: it is no address of this machine ({error})") from None
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        why = error.strerror or error
        raise RunError(
            f"cannot listen on {host}, port {port}: {why}; give another --port (0 takes a free one)"
        ) from None
    return listening
