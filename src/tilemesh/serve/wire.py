"""What the engine and the ranks that compute for it say to each other: a JSON header and buffers, over Unix sockets.

A message is its length, the header's length, the header and the bytes of one array. Nothing is pickled. Unix sockets
are the quickest of what was measured for messages of a step's size (docs/serve/LOG.md).
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilemesh.serve.batch import TokenSpan
from tilemesh.serve.request import ServeRequest
from tilemesh.serve.scheduler import Scheduled, StepPlan

_LENGTHS = struct.Struct("<QI")
_MOST_BYTES = 1 << 36
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
_DTYPES = {str(dtype): dtype for dtype in (*_FLOATS, torch.uint8, torch.int8, torch.int32)}


def message_bytes(header: Mapping[str, Any], body: bytes = b"", length: int | None = None) -> bytes:
    """A message; or its begin, where a body of this length follows."""
    told = json.dumps(header).encode()
    return _LENGTHS.pack(len(told) + (len(body) if length is None else length), len(told)) + told + body


def read_message(raw: bytes) -> tuple[dict[str, Any], bytearray]:
    """The inverse of `message_bytes`."""
    _, told = _LENGTHS.unpack_from(raw)
    begin = _LENGTHS.size
    return json.loads(raw[begin : begin + told]), bytearray(raw[begin + told :])


def send(connection: socket.socket, header: Mapping[str, Any], body: memoryview | bytes = b"") -> None:
    connection.sendall(message_bytes(header, length=len(body)))
    if len(body):
        connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """The next message; raises EOFError where the other side has gone."""
    whole, told = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
    if not told <= whole <= _MOST_BYTES:
        raise EOFError(f"a message of {whole} bytes, {told} of them its header")
    header = json.loads(_read(connection, told))
    return header, _read(connection, whole - told)


def _read(connection: socket.socket, count: int) -> bytearray:
    content = bytearray(count)
    view, at = memoryview(content), 0
    while at < count:
        read = connection.recv_into(view[at:])
        if read == 0:
            raise EOFError("the connection has ended")
        at += read
    return content


def pack_step(plan: StepPlan, spans: Sequence[TokenSpan]) -> tuple[dict[str, Any], bytes]:
    """Pages to copy and tokens to compute, as whole numbers one after the other."""
    numbers: list[int] = []
    for out_or_in in (plan.swapped_out, plan.swapped_in):
        numbers += [number for pair in out_or_in for number in pair]
    for span in spans:
        pages, local = span.entry.pages, span.entry.local
        numbers += (span.begin, span.end, span.wanted.start, span.wanted.stop, span.entry.request.adapter)
        numbers += (len(pages), len(local), *span.tokens, *pages, *local)
    header = {"out": len(plan.swapped_out), "into": len(plan.swapped_in), "spans": len(spans)}
    return header, np.array(numbers, np.int64).tobytes()


def unpack_step(header: Mapping[str, Any], body: bytearray) -> tuple[StepPlan, list[TokenSpan]]:
    """The same plan and spans, as far as a runner looks at them; spans are named by their place."""
    numbers: list[int] = np.frombuffer(body, np.int64).tolist()
    at = 0

    def pairs(count: int) -> tuple[tuple[int, int], ...]:
        nonlocal at
        some = numbers[at : at + 2 * count]
        at += 2 * count
        return tuple(zip(some[::2], some[1::2], strict=True))

    plan = StepPlan(0, (), pairs(header["out"]), pairs(header["into"]))
    spans = []
    for place in range(header["spans"]):
        begin, end, first, last, adapter, pages, local = numbers[at : at + 7]
        at += 7
        tokens = numbers[at : at + end - begin]
        at += end - begin
        # Nobody asks for the tokens before: their keys and values are in pages.
        request = ServeRequest(str(place), [0] * begin + tokens, 1, adapter=adapter)
        both = tuple(numbers[at : at + pages + local])
        entry = Scheduled(request, begin, end - begin, (), first < last, both[:pages], both[pages:])
        at += pages + local
        spans.append(TokenSpan(entry, begin, end, range(first, last)))
    return plan, spans


def pack_tensor(tensor: Tensor) -> tuple[dict[str, Any], memoryview]:
    """Logits, or weights."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    content: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}, content.data


def unpack_tensor(header: Mapping[str, Any], body: bytearray) -> Tensor:
    dtype, shape = _DTYPES[header["dtype"]], header["shape"]
    return torch.frombuffer(body, dtype=dtype).view(shape) if body else torch.empty(shape, dtype=dtype)
