"""Token shards on disk: `.bin` files of tokens and a `meta.json` that says what they are.

Shards are memory-mapped: a rank touches what it reads. Beside a shard of conversations lies a `.counted` file, a byte
per token: whether it counts as a target; and a `.begins` file of 64-bit integers: at which tokens of the shard
conversations begin. Shards of earlier versions have no such file: there, documents end with a token. `prepare.py`
writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import UsageError
from tilemesh.core.files import read_json_object
from tilemesh.core.ranges import Range, shown
from tilemesh.data.config import SHARD_SUFFIX, DataConfig, has_shards
from tilemesh.data.stream import Corpus, CorpusPart, Stream, cut_end
from tilemesh.data.tokenizer import FileTokenizer, Tokenizer, Unknown, open_tokenizer

META_FILE = "meta.json"
HELD_OUT_PREFIX = "heldout"
COUNTED_SUFFIX = ".counted"
BEGINS_SUFFIX = ".begins"
DTYPES: dict[str, Any] = {"uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32}
_VOCABULARY = Range(0, 2**32)
_ASCII = bytes(range(128))


def open_shards(folder: Path, data: DataConfig, weight: float = 1.0) -> Corpus:
    """Memory-mapped `.bin` files: with `meta.json` what it says, else 16-bit tokens as others write them."""
    meta = _read_meta(folder)
    if data.packing != "stream" and meta.get("ends_inside") and not meta.get("begins"):
        raise UsageError(
            "data.packing",
            f" is {data.packing} and in {folder}, of an earlier version, the chat template ends answers with the token "
            "that ends documents, so that conversations would be cut in the middle: prepare the shards again, or set "
            "data.packing=stream",
        )
    tokenizer = _tokenizer(folder, data, meta)
    if data.packing != "stream" and isinstance(tokenizer, Unknown) and "end" not in meta:
        raise UsageError(
            "data.packing",
            f" is {data.packing} and nobody said which token ends a document in {folder}: set data.tokenizer, give "
            f"its number as end in {folder / META_FILE}, or set data.packing=stream",
        )
    dtype = DTYPES[meta.get("dtype", "uint16")]
    paths = sorted(folder.glob("*" + SHARD_SUFFIX))
    held_paths = [path for path in paths if path.name.startswith((HELD_OUT_PREFIX, "val"))]
    train, unseen = (
        _stream(some, dtype, bool(meta.get("counted")), bool(meta.get("begins")))
        for some in ([path for path in paths if path not in held_paths], held_paths)
    )
    if not held_paths:
        train, unseen = cut_end(train, data.held_out)
    words = f"{len(paths)} shards of {folder}: {train.length:,} tokens, {unseen.length:,} held out"
    return Corpus((CorpusPart(train, unseen, weight),), tokenizer, words)


def shards_tokenizer(folder: Path, data: DataConfig) -> Tokenizer:
    """What the shards' tokens mean, without opening them."""
    return _tokenizer(folder, data, _read_meta(folder))


def has_conversations(folder: Path) -> bool:
    """Whether a source is shards of conversations."""
    return has_shards(folder) and bool(_read_meta(folder).get("counted"))


def _stream(paths: list[Path], dtype: Any, has_counted: bool, has_begins: bool) -> Stream:
    tokens = tuple(_mapped(path, dtype) for path in paths)
    counted = tuple(_mapped(path.with_suffix(COUNTED_SUFFIX), np.uint8) for path in paths) if has_counted else ()
    for path, part, beside in zip(paths, tokens, counted, strict=False):
        if len(part) != len(beside):
            raise UsageError(
                f"{path.with_suffix(COUNTED_SUFFIX)} is of {len(beside)} tokens, {path.name} of {len(part)}"
            )
    begins = tuple(_begins(path, len(part)) for path, part in zip(paths, tokens, strict=True)) if has_begins else ()
    return Stream(tokens, counted, begins)


def _begins(path: Path, tokens: int) -> NDArray[np.int64]:
    beside = path.with_suffix(BEGINS_SUFFIX)
    content = beside.read_bytes() if beside.exists() else b"missing"
    begins = np.frombuffer(content, "<i8").astype(np.int64) if len(content) % 8 == 0 else np.array([-1])
    if len(begins) and (begins[0] < 0 or begins[-1] >= tokens or (np.diff(begins) <= 0).any()):
        raise UsageError(f"{beside} does not say where conversations begin in {path.name}: prepare the shards again")
    return begins


def _tokenizer(folder: Path, data: DataConfig, meta: dict[str, Any]) -> Tokenizer:
    name = meta.get("tokenizer")
    own = None if name in (None, "bytes") else folder / name
    if data.tokenizer is None:
        unknown = Unknown(int(meta.get("vocabulary", 0)), end=int(meta.get("end", 0)))
        return unknown if name is None else open_tokenizer(own)
    chosen = FileTokenizer(data.tokenizer)
    if own is not None and own.is_file():
        differs = chosen.ids() != FileTokenizer(own).ids()
    else:  # an exported model of bytes has a file whose tokens are the bytes
        differs = name == "bytes" and (chosen.vocabulary != 256 or chosen.encode(_ASCII).tolist() != list(_ASCII))
    if differs:
        raise UsageError(
            "data.tokenizer",
            f" is {data.tokenizer} and the shards in {folder} were prepared with {own or 'bytes as tokens'}: prepare "
            "them again with the tokenizer of the model, or set no other one",
        )
    return chosen


def _mapped(path: Path, dtype: Any) -> NDArray[Any]:
    size = path.stat().st_size if path.exists() else 0
    if size == 0 or size % np.dtype(dtype).itemsize:
        raise UsageError(f"{path} has {size} bytes, no whole number of {np.dtype(dtype)} tokens: was it cut short?")
    return np.memmap(path, dtype, mode="r")


def _read_meta(folder: Path) -> dict[str, Any]:
    """What is said of the shards; nothing where nobody said anything."""
    path = folder / META_FILE
    if not path.exists():
        return {}
    meta = read_json_object(path)
    dtype, name, vocabulary = meta.get("dtype", "uint16"), meta.get("tokenizer"), meta.get("vocabulary", 0)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UsageError(f"{path}: dtype is {shown(dtype)}: expected one of {', '.join(DTYPES)}")
    if name is not None and (not isinstance(name, str) or Path(name).name != name):
        raise UsageError(f"{path}: tokenizer is {shown(name)}: expected bytes, or the name of a file in this folder")
    _VOCABULARY.check(f"{path}: vocabulary", vocabulary, whole=True)
    _VOCABULARY.check(f"{path}: end", meta.get("end", 0), whole=True)
    return meta
