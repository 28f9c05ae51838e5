"""A source opened: tokens to train on and tokens held out, from documents or from shards that were prepared before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import UsageError
from tilemesh.data.chat import ConversationPiece, template_of
from tilemesh.data.config import DataConfig, blaming_mixture, has_shards, source_path
from tilemesh.data.documents import Document, documents, left_out_files
from tilemesh.data.shards import open_shards, shards_tokenizer
from tilemesh.data.stream import Corpus, CorpusPart, Stream, cut_end
from tilemesh.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer

ENOUGH_DOCUMENTS = 50
"""To hold whole ones out; below, the end of the text is held out."""


class EncodedDocument(NamedTuple):
    name: str
    tokens: NDArray[Any]
    counted: NDArray[np.bool_] | None
    """Which of them count as targets; None: all."""
    read_bytes: int
    ends_inside: bool = False
    """Whether the token that ends a document is also inside of it."""


def open_corpus(data: DataConfig) -> Corpus:
    """The tokens of a source, or of several; documents are read and tokenised here, shards are only mapped."""
    with blaming_mixture(data):
        opened = [_open_part(part, weight) for part, weight in data.parts]
    tokenizer = opened[0].tokenizer
    for other in opened[1:]:
        if _meaning(other.tokenizer) != _meaning(tokenizer):
            raise UsageError(
                f"data.mixture: {other.words} and {opened[0].words} have different tokenizers: prepare both with one"
            )
    words = opened[0].words
    if len(opened) > 1:
        total = sum(weight for _, weight in data.parts)
        shares = [f"{weight / total:.0%}".replace("%", " %") for _, weight in data.parts]
        words = "a mixture of " + "; ".join(
            f"{share} {corpus.words}" for share, corpus in zip(shares, opened, strict=True)
        )
    return Corpus(tuple(corpus.parts[0] for corpus in opened), tokenizer, words)


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """What a source's tokens mean, without reading it: text from a checkpoint needs no training data."""
    first, _ = data.parts[0]
    folder = source_path(first.source)
    if has_shards(folder):
        return shards_tokenizer(folder, first)
    return open_tokenizer(first.tokenizer)


def check_vocabulary(tokenizer: Tokenizer, vocabulary: int) -> None:
    """Refuse a model that has no row for some token."""
    if tokenizer.vocabulary > vocabulary:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocabulary} tokens and the model's vocabulary is {vocabulary}: "
            f"set model.vocabulary={tokenizer.vocabulary}"
        )


def encoded_documents(
    data: DataConfig, tokenizer: Tokenizer, chosen: Iterable[Document] | None = None
) -> Iterator[EncodedDocument]:
    """Every document of a source as tokens, with the token that ends it."""
    template = template_of(data.tokenizer) if data.chat else None
    end = np.array([tokenizer.end])
    for name, content, read in documents(data) if chosen is None else chosen:
        if isinstance(content, bytes):
            tokens = tokenizer.encode(content)
            yield EncodedDocument(name, np.concatenate([tokens, end.astype(tokens.dtype)]), None, read)
            continue
        assert template is not None
        pieces = [_encoded_piece(tokenizer, piece) for piece in template.pieces(content)]
        tokens = np.concatenate([piece.tokens for piece in pieces])
        counted = np.concatenate([np.arange(len(piece.tokens)) < piece.counted for piece in pieces])
        if tokens[-1] != tokenizer.end:  # some templates end with it
            tokens = np.concatenate([tokens, end.astype(tokens.dtype)])
            # An answer that the template did not end, ends here; one that it did, is over.
            counted = np.append(counted, pieces[-1].is_open)
        yield EncodedDocument(name, tokens, counted, read, bool((tokens[:-1] == tokenizer.end).any()))


class _EncodedPiece(NamedTuple):
    """A stretch of a conversation as tokens, of which the first `counted` are targets."""

    tokens: NDArray[Any]
    counted: int
    is_open: bool
    """Whether it is an answer without a token that ends it."""


def _encoded_piece(tokenizer: Tokenizer, piece: ConversationPiece) -> _EncodedPiece:
    if not piece.is_answer or not isinstance(tokenizer, FileTokenizer):
        tokens = tokenizer.encode(piece.text.encode())
        return _EncodedPiece(tokens, len(tokens) if piece.is_answer else 0, piece.is_answer)
    # What a template writes behind the answer's end token, a line break for instance, no model is asked for.
    tokens, until = tokenizer.encode_until_special(piece.text, piece.content_end)
    return _EncodedPiece(tokens, len(tokens) if until is None else until, until is None)


def is_held_out(name: str, fraction: float) -> bool:
    """By name, so that it does not depend on what else is there: a document stays on its side as others come and go."""
    return _draw(name) < fraction * 2**32


def _draw(name: str) -> int:
    """A number below 2**32 that follows from a document's name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def split_documents(pieces: Sequence[EncodedDocument], fraction: float) -> tuple[Stream, Stream]:
    """What is trained on, and what is held out: at least one document, where any is to be."""
    if len(pieces) < ENOUGH_DOCUMENTS:
        return cut_end(joined(pieces), fraction)
    sides = [is_held_out(piece.name, fraction) for piece in pieces]
    if fraction and not any(sides):  # of 50 documents at 2 %, once in three times
        sides[min(range(len(pieces)), key=lambda place: _draw(pieces[place].name))] = True
    train = [piece for piece, is_held in zip(pieces, sides, strict=True) if not is_held]
    return joined(train), joined([piece for piece, is_held in zip(pieces, sides, strict=True) if is_held])


def joined(pieces: Sequence[EncodedDocument]) -> Stream:
    """Documents as one stream."""
    if not pieces:
        return Stream(())
    counted = [piece.counted for piece in pieces if piece.counted is not None]
    whole = np.concatenate([piece.tokens for piece in pieces])
    if not counted:
        return Stream((whole,))
    # Kept, because a template may end answers with the token that ends documents.
    begins = np.cumsum([0, *(len(piece.tokens) for piece in pieces[:-1])])
    return Stream((whole,), (np.concatenate(counted),), (begins,))


def _open_part(data: DataConfig, weight: float) -> Corpus:
    folder = source_path(data.source)
    if has_shards(folder):
        return open_shards(folder, data, weight)
    tokenizer = open_tokenizer(data.tokenizer)
    train, held = split_documents(list(encoded_documents(data, tokenizer)), data.held_out)
    words = f"{data.source} as {tokenizer.name}: {train.length:,} tokens, {held.length:,} held out"
    if skipped := left_out_files(data):
        words += f" ({left_out_words(skipped)})"
    return Corpus((CorpusPart(train, held, weight),), tokenizer, words)


def left_out_words(names: Sequence[str]) -> str:
    """For people: the files that are not read, by the first of them."""
    others = f" and {len(names) - 1} other file{'s' * (len(names) > 2)}" if len(names) > 1 else ""
    return f"{names[0]}{others} left out: not text"


def _meaning(tokenizer: Tokenizer) -> str:
    """What tells tokenizers apart: a file by its content, others by their name."""
    if isinstance(tokenizer, FileTokenizer):
        return hashlib.sha256(Path(tokenizer.name).read_bytes()).hexdigest()
    return f"{tokenizer.name} {tokenizer.vocabulary}"
