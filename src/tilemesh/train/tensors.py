"""Tensors in a safetensors file, written with its digest and read as memory.

Written here rather than by the library: tensor by tensor, without the interpreter's lock, and read only once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilemesh.train.manifest import StoredFile

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
"""A file's names for them."""
_WRITE_BYTES = 8 << 20


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
    """A file, flushed to the disk, with its digest made while it is written."""
    header: dict[str, Any] = {}
    offset = 0
    for key, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    made, written = hashlib.sha256(), 0
    with path.open("wb") as file:
        for raw in (len(text).to_bytes(8, "little") + text, *map(_raw, tensors.values())):
            view = memoryview(raw)
            for begin in range(0, len(view), _WRITE_BYTES):
                block = view[begin : begin + _WRITE_BYTES]
                made.update(block)
                file.write(block)
                written += len(block)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(path.name, written, made.hexdigest())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory: what is not looked at is not read."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    whole = torch.from_numpy(np.memmap(path, np.uint8, mode="c"))  # writes would stay in this process
    made = {}
    for key, of in header.items():
        if key != "__metadata__":
            begin, end = (8 + length + offset for offset in of["data_offsets"])
            dtype, raw = torch_dtype(of["dtype"]), whole[begin:end]
            made[key] = (raw if begin % dtype.itemsize == 0 else raw.clone()).view(dtype).reshape(of["shape"])
    return made


def torch_dtype(name: str) -> torch.dtype:
    return next(dtype for dtype, known in DTYPES.items() if known == name)


def _raw(tensor: Tensor) -> Any:
    if tensor.numel() == 0:
        return b""
    return tensor.reshape(-1).view(torch.uint8).numpy()
