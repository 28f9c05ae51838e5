"""A source opened: tokens to train on and tokens held out, from text or from shards that were prepared before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import UsageError
from tilemesh.data.config import DataConfig, check_source, has_shards, source_path
from tilemesh.data.documents import documents
from tilemesh.data.shards import SHARD_TOKENS, open_shards, shards_tokenizer, write_shards
from tilemesh.data.stream import Corpus, Stream, cut_end
from tilemesh.data.tokenizer import Tokenizer, open_tokenizer

_ENOUGH_DOCUMENTS = 50  # to hold whole ones out; below, the end of the text is held out


def open_corpus(data: DataConfig) -> Corpus:
    """The tokens of a source; text is read and tokenised here, shards are only mapped."""
    folder = source_path(data.source)
    if has_shards(folder):
        return open_shards(folder, data)
    tokenizer = open_tokenizer(data.tokenizer)
    train, held = _split(documents(data.source, data.pattern), tokenizer, data.held_out)
    words = f"{data.source} as {tokenizer.name}: {train.length:,} tokens, {held.length:,} held out"
    return Corpus(train, held, tokenizer, words)


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """What a source's tokens mean, without reading it: text from a checkpoint needs no training data."""
    folder = source_path(data.source)
    if has_shards(folder):
        return shards_tokenizer(folder, data)
    return open_tokenizer(data.tokenizer)


def check_vocabulary(tokenizer: Tokenizer, vocabulary: int) -> None:
    """Refuse a model that has no row for some token."""
    if tokenizer.vocabulary > vocabulary:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocabulary} tokens and the model's vocabulary is {vocabulary}: "
            f"set model.vocabulary={tokenizer.vocabulary}"
        )


def prepare(data: DataConfig, out: str | Path, shard_tokens: int = SHARD_TOKENS) -> dict[str, Any]:
    """Write a source as token shards that `data.source` then names; returns what `meta.json` says."""
    if not str(out).strip():
        raise UsageError("the folder to write to is empty: name one")
    target = Path(out)
    check_source(data)
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file: expected a folder to write shards to")
    if has_shards(target):
        raise UsageError(f"{target} has shards already: name another folder, or remove it first")
    return write_shards(open_corpus(data), data, target, shard_tokens)


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
    return cut_end(whole, fraction)


def _is_held_out(name: str, fraction: float) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") < fraction * 2**32


def _joined(pieces: Sequence[NDArray[Any]]) -> Stream:
    return Stream((np.concatenate(pieces),)) if pieces else Stream(())
