"""A request's body: so many bytes, of so many values, as JSON; and the replies to requests that are refused.

The one idea: both limits come before the work. The parser is one call that nothing else runs beside, so a body of a
million lists would keep everybody waiting; its structure is counted first, by a few passes over its bytes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.ranges import shown
from tilemesh.serve.protocol import RefusedError
from tilemesh.serve.replies import failure
from tilemesh.serve.scheduler import QueueFullError

_LEAST_LIMIT, _BYTES_PER_TOKEN = 4 << 20, 32
"""A body may have as many bytes as the context has tokens times this, and never fewer than 4 MiB."""
_PAUSE_S = 1.0
"""What is left of a body that is too long is forgotten until it pauses for so long, or its deadline is over."""
_MOST_BRANCHES = 1 << 16
"""Lists, objects and their keys: 8,192 messages of one part each have 57,344. They take about a microsecond each."""
_LEAST_VALUES = 1 << 18
"""A body may have as many values as the context has tokens, and never fewer than this: 128 prompts of 2,048 tokens."""
_ORDINARY = bytes(set(range(256)) - set(b'"[{:,'))
INVALID, FAILED = "invalid_request_error", "server_error"
"""OpenAI's words for who is at fault."""
CLOSED_BY_CLIENT = 499  # what others log for it; nobody reads the reply
NO_ANSWER = (UsageError, RunError, ClientDisconnect)
"""What may keep a request from being answered, and has a reply (`refusal`)."""
_KINDS = {str: "text", int: "a whole number", bool: "true or false", list: "a list"}


class BodyTooLongError(RefusedError):
    """More bytes than are read; the rest may still be on its way."""


async def read_body(request: Request, context: int) -> bytes:
    """The bytes that a client sends to a server of so many tokens of context."""
    most = max(_LEAST_LIMIT, _BYTES_PER_TOKEN * context)
    refusal = BodyTooLongError(None, f"the body is longer than {most >> 20} MiB: send less", 413)
    length = request.headers.get("content-length", "0")
    if len(length) > 18 or int(length) > most:  # digits, as whoever parsed the request has seen
        raise refusal
    pieces = bytearray()
    async for piece in request.stream():
        pieces += piece
        if len(pieces) > most:
            raise refusal
    return bytes(pieces)


class EarlyReply(JSONResponse):
    """A reply to a request whose body is still on its way: sent at once, and the connection closed after it. A client
    that sends all before it reads would lose the reply to a connection that is closed under it, so the rest is read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all_but_the_end(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        self.headers["Connection"] = "close"
        await super().__call__(scope, receive, send_all_but_the_end)
        more = True
        while more:
            try:
                more = (await asyncio.wait_for(receive(), _PAUSE_S)).get("more_body", False)
            except TimeoutError:
                more = False
        await send({"type": "http.response.body", "body": b""})


def refusal(error: Exception, retry_after_s: int) -> Response:
    """The reply to a request that was refused, or that the engine could not take. `retry_after_s`: when to ask again
    where its queue is full."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLOSED_BY_CLIENT)
    if isinstance(error, BodyTooLongError):
        return EarlyReply(failure(str(error), INVALID), error.status)
    if isinstance(error, RefusedError):
        return JSONResponse(failure(str(error), INVALID, error.parameter, error.code), error.status)
    if isinstance(error, UsageError):
        return JSONResponse(failure(str(error), INVALID), 400)
    if isinstance(error, QueueFullError):
        content = failure(str(error), "rate_limit_error", None, "queue_full")
        return JSONResponse(content, 429, {"Retry-After": str(retry_after_s)})
    return JSONResponse(failure(str(error), FAILED), 503)


async def read_fields(request: Request, context: int, known: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """What the body of a request says, each field of one of these types; null counts as not given."""
    content = await read_body(request, context)
    body = parse_body(content, context) if content.strip() else {}
    if not isinstance(body, dict):
        raise RefusedError(None, f"the body is {shown(body)}: expected a JSON object")
    for name, value in body.items():
        if name not in known:
            raise unknown("field", name[:200], list(known))
        if value is not None and type(value) not in known[name]:
            expected = " or ".join(_KINDS[kind] for kind in known[name])
            raise RefusedError(name, f"{name} is {shown(value)}: expected {expected}")
    return {name: value for name, value in body.items() if value is not None}


def needed(fields: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in fields:
        raise RefusedError(name, f"{name} is missing: expected {what}")
    return fields[name]


def parse_body(body: bytes, context: int) -> object:
    """What a body says. JSON is UTF-8, in which the bytes of quotes, brackets and commas are nothing else."""
    _check_structure(body, max(_LEAST_VALUES, context))
    try:
        return json.loads(body.decode("utf-8-sig"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # a syntax error, bytes that are no text, or nesting without end
        raise RefusedError(None, f"the body is not JSON: {str(error)[:200]}") from None


def _check_structure(body: bytes, most_values: int) -> None:
    if _branches(body) <= _MOST_BRANCHES and body.count(b",") <= most_values:
        return  # even if all of them stood outside of strings
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _ORDINARY)
    if unescaped.count(b'"') > 2 * (most_values + _MOST_BRANCHES):  # as each string is a value or a key
        raise _too_many(f"{most_values:,} values")
    pieces = unescaped.replace(b'""', b"").split(b'"')
    outside = b"".join(pieces[::2])  # right up to the first syntax error, and nothing is parsed beyond
    if outside.count(b",") > most_values:
        raise _too_many(f"{most_values:,} values")
    if _branches(outside) > _MOST_BRANCHES:
        raise _too_many(f"{_MOST_BRANCHES:,} lists, objects and keys")


def _too_many(what: str) -> RefusedError:
    return RefusedError(None, f"the body has more than {what}: send fewer", 413)


def _branches(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
