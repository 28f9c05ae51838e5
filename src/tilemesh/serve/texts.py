"""Paths beside answers: tokens of a text, the text of tokens, and embeddings. Bodies are read as strictly as others."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import shown
from tilemesh.serve.bodies import needed, read_fields
from tilemesh.serve.engine import Engine
from tilemesh.serve.protocol import RefusedError, read_prompts
from tilemesh.serve.replicas import Replicas
from tilemesh.serve.runner import POOLINGS

_FIELDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "/tokenize": {"model": (str,), "prompt": (str,), "add_special_tokens": (bool,)},
    "/detokenize": {"model": (str,), "tokens": (list,)},
    "/v1/embeddings": {
        "model": (str,), "input": (str, list), "encoding_format": (str,), "pooling": (str,), "user": (str,),
    },
}  # fmt: skip
PATHS = tuple(_FIELDS)


class Naming(Protocol):
    """Who knows what a model is called: `ServingApp`."""

    engine: Engine | Replicas
    name: str

    def adapter(self, name: str | None) -> str | None: ...


def text_routes(app: Naming) -> list[Route]:
    calls: dict[str, Callable[[Naming, dict[str, Any]], dict[str, Any]]] = dict(
        zip(PATHS, (_tokenize, _detokenize, _embed), strict=True)
    )

    def answering(path: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            fields = await read_fields(request, app.engine.limits.context, _FIELDS[path])
            return JSONResponse(await asyncio.to_thread(calls[path], app, fields))

        return answer

    return [Route(path, answering(path), methods=["POST"]) for path in PATHS]


def _tokenize(app: Naming, body: dict[str, Any]) -> dict[str, Any]:
    app.adapter(body.get("model"))
    tokens = app.engine.encode(needed(body, "prompt", "a text"), body.get("add_special_tokens", True))
    return {"tokens": tokens, "count": len(tokens), "max_model_len": app.engine.limits.context}


def _detokenize(app: Naming, body: dict[str, Any]) -> dict[str, Any]:
    app.adapter(body.get("model"))
    tokens = app.engine.encode(needed(body, "tokens", "a list of tokens"))
    return {"prompt": app.engine.served.tokenizer.decode(tokens)}


def _embed(app: Naming, body: dict[str, Any]) -> dict[str, Any]:
    adapter, engine = app.adapter(body.get("model")), app.engine
    wanted, pooling = body.get("encoding_format", "float"), body.get("pooling", POOLINGS[0])
    if wanted not in ("float", "base64"):
        raise RefusedError("encoding_format", f"encoding_format is {shown(wanted)}: expected float or base64")
    if pooling not in POOLINGS:
        raise RefusedError("pooling", f"pooling is {shown(pooling)}: expected {' or '.join(POOLINGS)}")
    prompts = read_prompts(needed(body, "input", "a text or a list of texts"))
    try:
        encoded = [engine.encode(prompt) for prompt in prompts]
        vectors = [engine.embed(tokens, pooling, adapter) for tokens in encoded]
    except UsageError as error:
        raise RefusedError("input", str(error)) from None
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(vector) if wanted == "base64" else vector}
        for index, vector in enumerate(vectors)
    ]
    count = sum(map(len, encoded))
    counted = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": adapter or app.name, "usage": counted}


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
