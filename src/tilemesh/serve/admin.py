"""Paths that change the server itself: weights, adapters, sleep. They are served only where a key is asked for.

Whoever has a key may name any folder that this process can read; it is loaded only if it fits the model that is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.ranges import shown
from tilemesh.serve.bodies import parse_body, read_body
from tilemesh.serve.engine import Engine
from tilemesh.serve.replicas import Replicas
from tilemesh.serve.replies import failure

PATHS: Mapping[str, Mapping[str, type]] = {
    "/v1/weights": {"source": str, "version": int, "running": str, "step": int},
    "/sleep": {"level": int},
    "/wake": {},
    "/v1/load_lora_adapter": {"lora_name": str, "lora_path": str},
    "/v1/unload_lora_adapter": {"lora_name": str},
}
"""Of each the fields that a body may have."""


def admin_routes(engine: Engine | Replicas, model: str, has_key: bool) -> list[Route]:
    """`model`: what requests call the model itself."""

    def answering(path: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if not has_key:
                why = f"{path} changes what everybody is answered: it is served only with a key (--api-key)"
                return JSONResponse(failure(why, "invalid_request_error", None, "key_needed"), 403)
            try:
                fields = _read_fields(path, await read_body(request, engine.limits.context), engine.limits.context)
                await asyncio.to_thread(_change, engine, model, path, fields)
            except UsageError as error:
                code = int(getattr(error, "status", 400))
                return JSONResponse(failure(str(error), "invalid_request_error"), code)
            except RunError as error:
                return JSONResponse(failure(str(error), "server_error"), 503)
            except ClientDisconnect:
                return Response(status_code=499)
            if "lora_name" in PATHS[path]:
                return JSONResponse({"adapters": sorted(engine.adapters)})
            return JSONResponse({"version": engine.version, "asleep": engine.asleep})

        return answer

    return [Route(path, answering(path), methods=["POST"]) for path in PATHS]


def _read_fields(path: str, body: bytes, context: int) -> dict[str, Any]:
    fields = parse_body(body, context) if body.strip() else {}
    if not isinstance(fields, dict):
        raise UsageError(f"the body is {shown(fields)}: expected a JSON object")
    for name, value in fields.items():
        if name not in PATHS[path]:
            raise unknown("field", name[:200], list(PATHS[path]))
        if type(value) is not PATHS[path][name]:
            raise UsageError(f"{name} is {shown(value)}: expected {'text' if PATHS[path][name] is str else 'a number'}")
    return fields


_NEEDED = {
    "source": "the folder of a run or of Hugging Face on the server's machine",
    "lora_name": "what requests call the adapter",
    "lora_path": "the folder of an adapter on the server's machine, as PEFT writes it",
}


def check_adapters(names: Iterable[str], model: str) -> None:
    """Refuse one that is called as the model: its requests would be answered by that."""
    if model in names:
        raise UsageError(f"an adapter called '{model}', as the model is: give one of them another name")


def _change(engine: Engine | Replicas, model: str, path: str, fields: dict[str, Any]) -> None:
    for name, expected in _NEEDED.items():
        if name in PATHS[path] and name not in fields:
            raise UsageError(f"{name} is missing: expected {expected}")
    if path == "/sleep":
        engine.sleep(**fields)
    elif path == "/wake":
        engine.wake()
    elif path == "/v1/weights":
        engine.update_weights(**fields)
    elif "lora_path" in fields:
        check_adapters([fields["lora_name"]], model)
        engine.load_adapter(fields["lora_name"], fields["lora_path"])
    else:
        engine.drop_adapter(fields["lora_name"])
