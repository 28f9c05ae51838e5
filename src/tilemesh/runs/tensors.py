"""What of a run's folder needs torch: safetensors files, and the copies that a checkpoint is written from.

Files are written here rather than by the library: tensor by tensor, without the interpreter's lock, the digest made on
the way. They are read as mapped memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilemesh.core.shard import Shard
from tilemesh.runs.manifest import StoredFile

Tensor = torch.Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
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
    hashed, written = hashlib.sha256(), 0
    with path.open("wb") as file:
        for raw in (len(text).to_bytes(8, "little") + text, *map(_raw, tensors.values())):
            view = memoryview(raw)
            for begin in range(0, len(view), _WRITE_BYTES):
                block = view[begin : begin + _WRITE_BYTES]
                hashed.update(block)
                file.write(block)
                written += len(block)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(path.name, written, hashed.hexdigest())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory: what is not looked at is not read."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    raw_bytes = torch.from_numpy(np.memmap(path, np.uint8, mode="c"))  # writes would stay in this process
    tensors = {}
    for key, of in header.items():
        if key != "__metadata__":
            begin, end = (8 + length + offset for offset in of["data_offsets"])
            dtype, raw = torch_dtype(of["dtype"]), raw_bytes[begin:end]
            tensors[key] = (raw if begin % dtype.itemsize == 0 else raw.clone()).view(dtype).reshape(of["shape"])
    return tensors


def torch_dtype(name: str) -> torch.dtype:
    """By a file's name for it; ValueError where there is none."""
    for dtype, known in DTYPES.items():
        if known == name:
            return dtype
    raise ValueError(f"dtype {name!r}: known are {', '.join(DTYPES.values())}")


def _raw(tensor: Tensor) -> Any:
    if tensor.numel() == 0:
        return b""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def empty(shape: Sequence[int], dtype: str) -> Tensor:
    """By a file's name for its dtype."""
    return torch.empty(tuple(shape), dtype=torch_dtype(dtype))


# ---- what a rank writes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One box of a tensor that this rank writes."""

    name: str
    key: str
    begin: tuple[int, ...]
    whole: tuple[int, ...]
    tensor: Tensor


def parts_of(name: str, mine: Shard, local: Tensor) -> list[Part]:
    """The boxes of a local tensor that this rank is the one to write; `name` may differ from the parameter's."""
    if not mine.writes:
        return []
    parts = []
    for number, (here, there) in enumerate(mine.boxes):
        key = name if len(mine.boxes) == 1 else f"{name}#{number}"
        parts.append(Part(name, key, there.begin, mine.whole, local.detach()[here.slices]))
    return parts


def snapshot(parts: Iterable[Part]) -> list[tuple[Part, Tensor]]:
    """Copies in this machine's memory that training does not change."""
    copies = [(part, _copied(part.tensor)) for part in parts]
    if any(part.tensor.is_cuda for part, _ in copies):  # not all are, where states are on the host
        torch.cuda.synchronize()
    return copies


def _copied(tensor: Tensor) -> Tensor:
    """A copy in this machine's memory that nobody else changes."""
    if tensor.is_cuda:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return target.copy_(tensor, non_blocking=True)
    return tensor.clone(memory_format=torch.contiguous_format)
