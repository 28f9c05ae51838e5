"""Any OpenAI-compatible server on loopback under a load: one connection per request, tokens timed as they arrive.

Plain asyncio and HTTP/1.1, so that nothing but the server is measured. A server that answers in parts (`stream`) sends
an event per step, which is one token, unless the usage that it tells at the end says another number: a server that
guesses ahead has several tokens in an event, and one may have no text to send.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Sequence
from urllib.parse import urlsplit

from tilemesh.bench.serve.load import LoadRequest
from tilemesh.core.errors import RunError, UsageError
from tilemesh.serve.history import RequestRecord
from tilemesh.serve.request import FinishReason

_LONGEST_S = 600.0
URL_VOCABULARY = 256
"""Tokens of prompts are below this: every vocabulary known to us has as many."""


def read_url(url: str) -> tuple[str, int, str]:
    """Host, port and path before /v1; another machine is refused."""
    parts = urlsplit(url)
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    host = parts.hostname or ""
    if parts.scheme != "http" or not host or not 0 < port < 1 << 16:
        raise UsageError(f"--url is '{url}': expected http://127.0.0.1:PORT")
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise UsageError(f"--url is '{url}': only servers on this machine are loaded, such as http://127.0.0.1:8000")
    return host, port, parts.path.rstrip("/").removesuffix("/v1")


def load_url(url: str, load: Sequence[LoadRequest]) -> list[RequestRecord]:
    """Each request at its time; returns when all have ended."""
    return asyncio.run(_load(url, load))


async def served_model(url: str) -> str:
    """The name of the first model that the server has."""
    host, port, path = read_url(url)
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        raise RunError(f"{url} does not answer: {error.strerror or error}") from None
    writer.write(f"GET {path}/v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    _, body = await _answer(reader)
    writer.close()
    try:
        return str(json.loads(b"".join([part async for part in body]))["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise RunError(f"{url}/v1/models names no model: is it an OpenAI-compatible server?") from None


async def _load(url: str, load: Sequence[LoadRequest]) -> list[RequestRecord]:
    name = await served_model(url)
    began = time.monotonic()

    async def later(number: int, request: LoadRequest) -> RequestRecord:
        await asyncio.sleep(max(0.0, began + request.at_s - time.monotonic()))
        return await _ask(url, name, number, request)

    return list(await asyncio.gather(*(later(number, request) for number, request in enumerate(load))))


async def _ask(url: str, model: str, number: int, request: LoadRequest) -> RequestRecord:
    host, port, path = read_url(url)
    body = json.dumps(
        {
            "model": model,
            "prompt": list(request.prompt),
            "max_tokens": request.output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ).encode()
    head = f"POST {path}/v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    now = time.monotonic_ns()
    record = RequestRecord(f"{number + 1}/0", now, now, number, request.prompt, request.output)
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        raise RunError(f"{url} does not answer: {error.strerror or error}") from None
    try:
        writer.write(head.encode() + body)
        status, parts = await _answer(reader)
        left = b""
        async for part in parts:
            *lines, left = (left + part).split(b"\n")
            for line in lines:
                if status == 200:
                    _hear(record, line.strip())
        if status != 200 and status != 429:
            raise RunError(f"{url} answered {status}: {left[:300].decode(errors='replace')}")
    finally:
        writer.close()
    record.finish = FinishReason.LENGTH if record.token_ns else FinishReason.ERROR
    return record


def _hear(record: RequestRecord, line: bytes) -> None:
    """One line of server-sent events."""
    if not line.startswith(b"data:") or line == b"data: [DONE]":
        return
    try:
        chunk = json.loads(line[5:])
    except ValueError:
        raise RunError(f"the server sent an event that is not JSON: {line[:100].decode(errors='replace')}") from None
    if "error" in chunk:
        raise RunError(f"the server could not answer: {chunk['error']}")
    counted = (chunk.get("usage") or {}).get("completion_tokens")
    if not chunk.get("choices") and isinstance(counted, int) and record.token_ns:
        events, tokens = record.token_ns, min(counted, record.max_tokens)
        record.token_ns = [events[place * len(events) // tokens] for place in range(tokens)]  # each as many as another
    missing = record.max_tokens - len(record.token_ns)
    if chunk.get("choices") and missing > 0 and not (chunk["choices"][0].get("finish_reason") and _is_silent(chunk)):
        record.token_ns.append(time.monotonic_ns())


def _is_silent(chunk: dict[str, list[dict[str, object]]]) -> bool:
    """Whether an event only says that it is over."""
    return chunk["choices"][0].get("text") in ("", None)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, AsyncIterator[bytes]]:
    """The status, and the body's bytes as they come."""
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _LONGEST_S)
        status = int(head.split(b" ", 2)[1])
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ValueError, IndexError):
        raise RunError("the server's answer is no HTTP: is the address right?") from None
    return status, _chunks(reader) if b"chunked" in head.lower() else _rest(reader)


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await asyncio.wait_for(reader.read(65536), _LONGEST_S):
        yield part


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await asyncio.wait_for(reader.readline(), _LONGEST_S)).split(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readline()
