"""Token shards on disk: `.bin` files of tokens and a `meta.json` that says what they are.

Shards are memory-mapped: a rank touches what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import naming, read_json_object
from tilemesh.core.ranges import Range, shown
from tilemesh.data.config import SHARD_SUFFIX, DataConfig
from tilemesh.data.stream import Corpus, Stream, cut_end
from tilemesh.data.tokenizer import Tokenizer, Unknown, open_tokenizer

META_FILE = "meta.json"
HELD_OUT_PREFIX = "heldout"
SHARD_TOKENS = 1 << 26
_VOCABULARY = Range(0, 2**32)
_DTYPES: dict[str, Any] = {"uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32}


def open_shards(folder: Path, data: DataConfig) -> Corpus:
    """Memory-mapped `.bin` files: with `meta.json` what it says, else 16-bit tokens as others write them."""
    meta = _read_meta(folder)
    dtype = meta.get("dtype", "uint16")
    paths = sorted(folder.glob("*" + SHARD_SUFFIX))
    maps = {path: _mapped(path, _DTYPES[dtype]) for path in paths}
    held = [tokens for path, tokens in maps.items() if path.name.startswith((HELD_OUT_PREFIX, "val"))]
    train = [tokens for path, tokens in maps.items() if not path.name.startswith((HELD_OUT_PREFIX, "val"))]
    streams = (Stream(tuple(train)), Stream(tuple(held))) if held else cut_end(Stream(tuple(train)), data.held_out)
    words = f"{len(paths)} shards of {folder}: {streams[0].length:,} tokens, {streams[1].length:,} held out"
    return Corpus(*streams, _tokenizer(folder, data, meta), words)


def shards_tokenizer(folder: Path, data: DataConfig) -> Tokenizer:
    """What the shards' tokens mean, without opening them."""
    return _tokenizer(folder, data, _read_meta(folder))


def write_shards(corpus: Corpus, data: DataConfig, target: Path, shard_tokens: int = SHARD_TOKENS) -> dict[str, Any]:
    """Write a corpus as shards; returns what `meta.json` says."""
    largest = max(corpus.tokenizer.vocabulary - 1, 1)
    dtype = next(name for name, kind in _DTYPES.items() if largest <= np.iinfo(kind).max)
    target.mkdir(parents=True, exist_ok=True)
    meta: dict[str, Any] = {
        "dtype": dtype, "vocabulary": corpus.tokenizer.vocabulary, "tokenizer": "bytes",
        "end": corpus.tokenizer.end, "source": data.source, "files": {},
    }  # fmt: skip
    if data.tokenizer is not None:
        with naming(target / "tokenizer.json"):
            (target / "tokenizer.json").write_bytes(data.tokenizer.read_bytes())
        meta["tokenizer"] = "tokenizer.json"
    for prefix, stream in (("train", corpus.train), (HELD_OUT_PREFIX, corpus.held_out)):
        for number, piece in enumerate(_pieces(stream, shard_tokens)):
            name = f"{prefix}-{number:05d}{SHARD_SUFFIX}"
            try:
                piece.astype(_DTYPES[dtype]).tofile(target / name)
            except OSError as error:
                raise RunError(f"{target / name} cannot be written: {error.strerror or error}") from None
            meta["files"][name] = len(piece)
    with naming(target / META_FILE):
        (target / META_FILE).write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def _tokenizer(folder: Path, data: DataConfig, meta: dict[str, Any]) -> Tokenizer:
    name = meta.get("tokenizer")
    chosen = data.tokenizer or (folder / name if name and name != "bytes" else None)
    if chosen is None and name != "bytes":
        return Unknown(int(meta.get("vocabulary", 0)))
    return open_tokenizer(chosen)


def _mapped(path: Path, dtype: Any) -> NDArray[Any]:
    size, each = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % each:
        raise UsageError(f"{path} has {size} bytes, no whole number of {np.dtype(dtype)} tokens: was it cut short?")
    return np.memmap(path, dtype, mode="r")


def _read_meta(folder: Path) -> dict[str, Any]:
    """What is said of the shards; nothing where nobody said anything."""
    path = folder / META_FILE
    if not path.exists():
        return {}
    meta = read_json_object(path)
    dtype, name, vocabulary = meta.get("dtype", "uint16"), meta.get("tokenizer"), meta.get("vocabulary", 0)
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise UsageError(f"{path}: dtype is {shown(dtype)}: expected one of {', '.join(_DTYPES)}")
    if name is not None and (not isinstance(name, str) or Path(name).name != name):
        raise UsageError(f"{path}: tokenizer is {shown(name)}: expected bytes, or the name of a file in this folder")
    _VOCABULARY.check(f"{path}: vocabulary", vocabulary, whole=True)
    return meta


def _pieces(stream: Stream, size: int) -> Iterator[NDArray[Any]]:
    for part in stream.parts:
        for begin in range(0, len(part), size):
            yield part[begin : begin + size]
