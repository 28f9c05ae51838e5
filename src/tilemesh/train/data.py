"""Tokens on their way to the model: a source becomes two streams (to train on, held out), a stream becomes samples.

The one idea: a sample is a number. Sample i of a stream is the tokens from i x context on, one more than a sequence
for the targets; `order.py` says which number stands at which position, so a batch is a pure function of (seed,
position) and a checkpoint keeps one integer. Shards on disk are memory-mapped: a rank touches what it reads.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import RunError, UsageError
from tilemesh.train.config import DataConfig
from tilemesh.train.order import Order
from tilemesh.train.text import Tokenizer, documents, open_tokenizer

SHARD_SUFFIX = ".bin"
META_FILE = "meta.json"
HELD_OUT_PREFIX = "heldout"
SHARD_TOKENS = 1 << 26
_ENOUGH_DOCUMENTS = 50  # to hold whole ones out; below, the end of the text is held out
_DTYPES: dict[str, Any] = {"uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32}


@dataclass(frozen=True)
class Stream:
    """Tokens one after the other, in one or several arrays (shards), which samples may span."""

    parts: tuple[NDArray[Any], ...]

    @property
    def length(self) -> int:
        return sum(len(part) for part in self.parts)

    def samples(self, context: int) -> int:
        """Whole sequences; the last token is only ever a target."""
        return max(0, (self.length - 1) // context)

    def sample(self, index: int, context: int) -> NDArray[np.int64]:
        """context + 1 tokens: inputs and, one further, targets."""
        begin, wanted = index * context, context + 1
        taken: list[NDArray[Any]] = []
        for part in self.parts:
            if wanted and begin < len(part):
                piece = part[begin : begin + wanted]
                taken.append(piece)
                wanted -= len(piece)
                begin = 0
            else:
                begin -= len(part) if not taken else 0
        return np.concatenate([np.asarray(piece, np.int64) for piece in taken])

    def fingerprint(self) -> str:
        """A short name of the content: length, and a checksum of some of it spread over the whole."""
        digest = hashlib.sha256(str(self.length).encode())
        for part in self.parts:
            step = max(1, len(part) // (1 << 20))
            digest.update(zlib.crc32(np.ascontiguousarray(part[::step]).tobytes()).to_bytes(4, "little"))
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Corpus:
    """What a run learns from and what it is judged by."""

    train: Stream
    held_out: Stream
    tokenizer: Tokenizer
    words: str
    """For people: where it came from and how much."""


def open_corpus(data: DataConfig) -> Corpus:
    """The tokens of a source; text is read and tokenised here, shards are only mapped."""
    folder = Path(data.source).expanduser()
    if folder.is_dir() and any(folder.glob("*" + SHARD_SUFFIX)):
        return _open_shards(folder, data)
    tokenizer = open_tokenizer(data.tokenizer)
    train, held = _split(documents(data.source, data.pattern), tokenizer, data.held_out)
    words = f"{data.source} as {tokenizer.name}: {train.length:,} tokens, {held.length:,} held out"
    return Corpus(train, held, tokenizer, words)


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """What a source's tokens mean, without reading it: text from a checkpoint needs no training data."""
    folder = Path(data.source).expanduser()
    if folder.is_dir() and any(folder.glob("*" + SHARD_SUFFIX)):
        return _shards_tokenizer(folder, data, _read_meta(folder))
    return open_tokenizer(data.tokenizer)


def batch(stream: Stream, order: Order, position: int, rows: Iterable[int], context: int) -> NDArray[np.int64]:
    """(rows, context + 1) tokens: the given rows of the batch that begins at a position."""
    return np.stack([stream.sample(order.at(position + row), context) for row in rows])


def check_tokens(corpus: Corpus, vocabulary: int) -> None:
    if corpus.tokenizer.vocabulary > vocabulary:
        raise UsageError(
            f"the tokenizer has {corpus.tokenizer.vocabulary} tokens and the model's vocabulary is {vocabulary}: "
            f"set model.vocabulary={corpus.tokenizer.vocabulary}"
        )


# ---- text ------------------------------------------------------------------------------------------------------


def _split(found: Iterator[tuple[str, bytes]], tokenizer: Tokenizer, fraction: float) -> tuple[Stream, Stream]:
    ended = np.array([tokenizer.end])
    pieces: list[tuple[str, NDArray[Any]]] = []
    for name, content in found:
        tokens = tokenizer.encode(content)
        pieces.append((name, np.concatenate([tokens, ended.astype(tokens.dtype)])))
    if len(pieces) >= _ENOUGH_DOCUMENTS:
        # By name, so that it does not depend on what else is there: a document stays on its side as others come and go.
        train = [tokens for name, tokens in pieces if not _is_held_out(name, fraction)]
        held = [tokens for name, tokens in pieces if _is_held_out(name, fraction)]
        return _joined(train), _joined(held)
    whole = _joined([tokens for _, tokens in pieces])
    return _cut(whole, fraction)


def _is_held_out(name: str, fraction: float) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") < fraction * 2**32


def _joined(pieces: Sequence[NDArray[Any]]) -> Stream:
    return Stream((np.concatenate(pieces),)) if pieces else Stream(())


def _cut(whole: Stream, fraction: float) -> tuple[Stream, Stream]:
    """The end of a stream held out, across its parts."""
    keep = whole.length - int(whole.length * fraction)
    train, held = [], []
    for part in whole.parts:
        train.append(part[:keep])
        held.append(part[keep:] if keep < len(part) else part[:0])
        keep = max(0, keep - len(part))
    return Stream(tuple(p for p in train if len(p))), Stream(tuple(p for p in held if len(p)))


# ---- shards ----------------------------------------------------------------------------------------------------


def _open_shards(folder: Path, data: DataConfig) -> Corpus:
    """Memory-mapped `.bin` files: with `meta.json` what it says, else 16-bit tokens as others write them."""
    meta = _read_meta(folder)
    dtype = meta.get("dtype", "uint16")
    if dtype not in _DTYPES:
        raise UsageError(f"{folder / META_FILE}: dtype is {dtype!r}: expected one of {', '.join(_DTYPES)}")
    paths = sorted(folder.glob("*" + SHARD_SUFFIX))
    maps = {path: _mapped(path, _DTYPES[dtype]) for path in paths}
    held = [tokens for path, tokens in maps.items() if path.name.startswith((HELD_OUT_PREFIX, "val"))]
    train = [tokens for path, tokens in maps.items() if not path.name.startswith((HELD_OUT_PREFIX, "val"))]
    streams = (Stream(tuple(train)), Stream(tuple(held))) if held else _cut(Stream(tuple(train)), data.held_out)
    words = f"{len(paths)} shards of {folder}: {streams[0].length:,} tokens, {streams[1].length:,} held out"
    return Corpus(*streams, _shards_tokenizer(folder, data, meta), words)


def _shards_tokenizer(folder: Path, data: DataConfig, meta: dict[str, Any]) -> Tokenizer:
    name = meta.get("tokenizer")
    chosen = data.tokenizer or (folder / name if name and name != "bytes" else None)
    if chosen is None and name != "bytes":
        return Unknown(int(meta.get("vocabulary", 0)))
    return open_tokenizer(chosen)


@dataclass(frozen=True)
class Unknown:
    """Shards from elsewhere, of which nobody said what their numbers mean."""

    vocabulary: int
    name: str = "tokens"
    end: int = 0

    def encode(self, text: bytes) -> NDArray[Any]:
        raise UsageError("these shards do not say which tokenizer made them: set data.tokenizer")

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in tokens)


def _mapped(path: Path, dtype: Any) -> NDArray[Any]:
    size, each = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % each:
        raise UsageError(f"{path} has {size} bytes, no whole number of {np.dtype(dtype)} tokens: was it cut short?")
    return np.memmap(path, dtype, mode="r")


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / META_FILE
    if not path.exists():
        return {}
    try:
        meta = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(meta, dict):
        raise UsageError(f"{path} holds a {type(meta).__name__}: expected a JSON object")
    return meta


def prepare(data: DataConfig, out: str | Path, shard_tokens: int = SHARD_TOKENS) -> dict[str, Any]:
    """Write a source as token shards that `data.source` then names; returns what `meta.json` says."""
    target = Path(out)
    if target.exists() and any(target.glob("*" + SHARD_SUFFIX)):
        raise UsageError(f"{target} has shards already: name another folder, or remove it first")
    corpus = open_corpus(data)
    largest = max(corpus.tokenizer.vocabulary - 1, 1)
    dtype = next(name for name, kind in _DTYPES.items() if largest <= np.iinfo(kind).max)
    target.mkdir(parents=True, exist_ok=True)
    meta: dict[str, Any] = {
        "dtype": dtype, "vocabulary": corpus.tokenizer.vocabulary, "tokenizer": "bytes",
        "end": corpus.tokenizer.end, "source": data.source, "files": {},
    }  # fmt: skip
    if data.tokenizer is not None:
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
    (target / META_FILE).write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def _pieces(stream: Stream, size: int) -> Iterator[NDArray[Any]]:
    for part in stream.parts:
        for begin in range(0, len(part), size):
            yield part[begin : begin + size]
