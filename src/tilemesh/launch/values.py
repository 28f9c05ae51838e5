"""What passes between a caller and its ranks: JSON values and buffers, nested; nothing is pickled.

A value becomes one JSON header and the buffers it holds (numpy arrays, torch tensors, bytes), written into a file one
after the other. What cannot be sent is refused with the path to it: `result["a"][3]: a set`. numpy and torch are used
only where they are loaded already, or where the file holds what was theirs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import replacing

_TAG = "$"  # a JSON object with this key stands for something that JSON lacks
_ALIGNMENT = 64
_LENGTH_BYTES = 8
_PLAIN_KINDS = "?biufcSUmM"  # numpy's dtypes whose bytes are their values
_EXPECTED = "expected JSON values (None, bool, int, float, str), lists, tuples, dicts, bytes, numpy arrays or tensors"


def write(path: Path, value: object, name: str) -> None:
    """Write the value into a file that appears under its name only when it is complete; `name` begins the paths."""
    buffers: list[memoryview] = []
    header = json.dumps(_encode(value, name, buffers, set())).encode()
    with replacing(path) as part, part.open("wb") as file:
        file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
        for buffer in buffers:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            file.write(buffer)


def read(path: Path) -> Any:
    """The value again. Its arrays are writable and share one block of memory."""
    data = bytearray(path.read_bytes())
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    at = start

    def take(nbytes: int) -> memoryview:
        nonlocal at
        at += -at % _ALIGNMENT
        at += nbytes
        if at > len(data):
            raise RunError(f"{path}: {len(data)} bytes, expected at least {at}: it is damaged")
        return memoryview(data)[at - nbytes : at]

    return _decode(json.loads(data[_LENGTH_BYTES:start]), take)


def _encode(value: Any, path: str, buffers: list[memoryview], inside: set[int]) -> Any:
    """The JSON value that stands for it; buffers are appended in the order in which `_decode` meets them."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple | dict):
        if id(value) in inside:
            raise UsageError(f"{path}: a {type(value).__name__} that contains itself; {_EXPECTED}")
        inside = inside | {id(value)}
    if type(value) is list:
        return [_encode(item, f"{path}[{index}]", buffers, inside) for index, item in enumerate(value)]
    if type(value) is tuple:
        items = [_encode(item, f"{path}[{index}]", buffers, inside) for index, item in enumerate(value)]
        return {_TAG: "tuple", "items": items}
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise UsageError(f"{path}: a dict with the key {key!r}: expected keys that are strings")
        by_key = {key: _encode(item, f'{path}["{key}"]', buffers, inside) for key, item in value.items()}
        return {_TAG: "dict", "items": by_key} if _TAG in by_key else by_key
    if type(value) in (bytes, bytearray):
        buffers.append(memoryview(value))
        return {_TAG: type(value).__name__, "nbytes": len(value)}
    return _encode_array(value, path, buffers)


def _encode_array(value: Any, path: str, buffers: list[memoryview]) -> Any:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise UsageError(f"{path}: a tensor of layout {value.layout}: send a dense one, such as x.to_dense()")
        octets = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        buffers.append(memoryview(octets))
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TAG: "tensor", "dtype": dtype, "shape": list(value.shape), "nbytes": octets.nbytes}
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        array = numpy.asarray(value)
        if array.dtype.kind not in _PLAIN_KINDS or type(value) not in (numpy.ndarray, array.dtype.type):
            raise UsageError(f"{path}: a {type(value).__name__} of dtype {array.dtype}: {_EXPECTED}")
        buffers.append(memoryview(numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)))
        kind = "array" if isinstance(value, numpy.ndarray) else "scalar"
        return {_TAG: kind, "dtype": array.dtype.str, "shape": list(array.shape), "nbytes": array.nbytes}
    hint = "; send dataclasses.asdict(...) of it" if hasattr(value, "__dataclass_fields__") else ""
    article = "an" if type(value).__name__[0].lower() in "aeiou" else "a"
    raise UsageError(f"{path}: {article} {type(value).__name__}{hint}: {_EXPECTED}")


def _decode(value: Any, take: Callable[[int], memoryview]) -> Any:
    if isinstance(value, list):
        return [_decode(item, take) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: _decode(item, take) for key, item in value.items()}
    if kind == "tuple":
        return tuple(_decode(item, take) for item in value["items"])
    if kind == "dict":
        return {key: _decode(item, take) for key, item in value["items"].items()}
    buffer = take(value["nbytes"])
    if kind in ("bytes", "bytearray"):
        return bytes(buffer) if kind == "bytes" else bytearray(buffer)
    import numpy as np

    if kind == "tensor":
        import torch

        octets = torch.from_numpy(np.frombuffer(buffer, np.uint8))
        return octets.view(getattr(torch, value["dtype"])).reshape(value["shape"])
    dtype = np.dtype(value["dtype"])
    if not dtype.itemsize:  # strings of length 0 have no bytes to view
        return np.zeros(value["shape"], dtype)
    array = np.frombuffer(buffer, dtype).reshape(value["shape"])
    return array[()] if kind == "scalar" else array
