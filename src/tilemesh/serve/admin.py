"""Paths that change the server itself: weights, adapters, sleep. They are served only where a key is asked for.

Whoever has a key may name any folder that this process can read; it is loaded only if it fits the model that is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tilemesh.core.errors import UsageError
from tilemesh.serve.bodies import needed, read_fields
from tilemesh.serve.engine import Engine
from tilemesh.serve.protocol import RefusedError
from tilemesh.serve.replicas import Replicas

_LOAD = "/v1/load_lora_adapter"
PATHS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "/v1/weights": {"source": (str,), "version": (int,), "running": (str,), "step": (int,)},
    "/sleep": {"level": (int,)},
    "/wake": {},
    _LOAD: {"lora_name": (str,), "lora_path": (str,)},
    "/v1/unload_lora_adapter": {"lora_name": (str,)},
}
"""Of each the fields that a body may have."""


def admin_routes(engine: Engine | Replicas, model: str, has_key: bool) -> list[Route]:
    """`model`: what requests call the model itself."""

    def answering(path: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if not has_key:
                why = f"{path} changes what everybody is answered: it is served only with a key (--api-key)"
                raise RefusedError(None, why, 403, "key_needed")
            fields = await read_fields(request, engine.limits.context, PATHS[path])
            await asyncio.to_thread(_change, engine, model, path, fields)
            if "lora_name" in PATHS[path]:
                return JSONResponse({"adapters": sorted(engine.adapters)})
            return JSONResponse({"version": engine.version, "asleep": engine.asleep})

        return answer

    return [Route(path, answering(path), methods=["POST"]) for path in PATHS]


def check_adapters(names: Iterable[str], model: str) -> None:
    """Refuse one that is called as the model: its requests would be answered by that."""
    if model in names:
        raise UsageError(f"an adapter called '{model}', as the model is: give one of them another name")


def _change(engine: Engine | Replicas, model: str, path: str, fields: dict[str, Any]) -> None:
    if path == "/sleep":
        engine.sleep(**fields)
    elif path == "/wake":
        engine.wake()
    elif path == "/v1/weights":
        needed(fields, "source", "the folder of a run or of Hugging Face on the server's machine")
        engine.update_weights(**fields)
    else:
        name = needed(fields, "lora_name", "what requests call the adapter")
        if path != _LOAD:
            engine.drop_adapter(name)
            return
        folder = needed(fields, "lora_path", "the folder of an adapter on the server's machine, as PEFT writes it")
        check_adapters([name], model)
        engine.load_adapter(name, folder)
