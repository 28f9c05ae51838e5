"""A source opened: tokens to train on and tokens held out, from documents or from shards that were prepared before."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import UsageError
from tilemesh.data.chat import PLAIN_TEMPLATE, AnswerPlace, template_of
from tilemesh.data.config import DataConfig, blaming_mixture, check_complete, has_shards, source_path
from tilemesh.data.documents import Document, documents, left_out_files
from tilemesh.data.shards import has_conversations, open_shards, shards_tokenizer
from tilemesh.data.stream import Corpus, CorpusPart, Stream, cut_end
from tilemesh.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer
from tilemesh.data.tokenizer_files import DEFAULT, TokenizerFiles

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


def equal_tokens(data: DataConfig, enough: int = 1 << 20) -> float:
    """How likely two tokens of a source are the same, by about its first million (of several sources, the first's)."""
    first, _ = data.parts[0]
    folder = source_path(first.source)
    pieces, read = [], 0
    if has_shards(folder):
        pieces = [open_shards(folder, first).train.tokens(0, enough)]
    else:
        for document in encoded_documents(first, tokenizer_of(data)):
            pieces, read = [*pieces, document.tokens], read + len(document.tokens)
            if read >= enough:
                break
    counts = np.unique(np.concatenate(pieces), return_counts=True)[1] / sum(map(len, pieces))
    return float((counts**2).sum())


def chat_template_of(data: DataConfig, tokenizer: Tokenizer) -> tuple[str | None, Mapping[str, str]]:
    """How conversations are written for a model that a source trained, with the special tokens that the template uses;
    None: it has no template, and was not trained on conversations."""
    files = tokenizer.files if isinstance(tokenizer, FileTokenizer) else TokenizerFiles()
    first, _ = data.parts[0]
    is_chat = data.chat or has_conversations(source_path(first.source))
    return files.templates.get(DEFAULT, PLAIN_TEMPLATE if is_chat else None), files.special_tokens


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
            with _naming(name):
                tokens = tokenizer.encode(content)
            yield EncodedDocument(name, np.concatenate([tokens, end.astype(tokens.dtype)]), None, read)
            continue
        assert template is not None
        with _naming(name):
            tokens, counted, is_open = _encoded_conversation(tokenizer, *template.write(content))
        if not len(tokens) or tokens[-1] != tokenizer.end:  # some templates end with it
            tokens = np.concatenate([tokens, end.astype(tokens.dtype)])
            # An answer that the template did not end, ends here; one that it did, is over.
            counted = np.append(counted, is_open)
        yield EncodedDocument(name, tokens, counted, read, bool((tokens[:-1] == tokenizer.end).any()))


@contextlib.contextmanager
def _naming(document: str) -> Iterator[None]:
    """What is wrong with a document is said with its name."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{document}: ", *error.args) from None


def _encoded_conversation(
    tokenizer: Tokenizer, text: str, answers: Sequence[AnswerPlace]
) -> tuple[NDArray[Any], NDArray[np.bool_], bool]:
    """Tokens of a conversation, encoded once as a whole; which of them are targets; whether the last answer has no
    token that ends it."""
    tokens, begins, ends, is_special = tokenizer.encode_text(text)
    counted, is_open = np.zeros(len(tokens), np.bool_), False
    for answer in answers:
        inside = np.flatnonzero((begins < answer.end) & (ends > answer.begin))
        if not len(inside):
            continue
        first, last = int(inside[0]), int(inside[-1])
        closing = inside[is_special[inside] & (begins[inside] >= (answer.content_end or answer.begin))]
        if not answer.is_marked and len(closing):
            # What a template writes behind the answer's end token, a line break for instance, no model is asked for.
            last = int(closing[-1 if answer.content_end is None else 0])
        elif answer.needs_end:
            raise UsageError(
                "this chat template ends an answer with no special token, and writes it differently once more messages "
                "follow, so that it cannot be told where it ends: use another template, or data.chat=false"
            )
        counted[first : last + 1] = True
        is_open = not is_special[last] and last + 1 == len(tokens)
    return tokens, counted, is_open


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
    tokens = np.concatenate([piece.tokens for piece in pieces])
    if not counted:
        return Stream((tokens,))
    # Kept, because a template may end answers with the token that ends documents.
    begins = np.cumsum([0, *(len(piece.tokens) for piece in pieces[:-1])])
    return Stream((tokens,), (np.concatenate(counted),), (begins,))


def _open_part(data: DataConfig, weight: float) -> Corpus:
    folder = source_path(data.source)
    check_complete(folder)
    if has_shards(folder):
        return open_shards(folder, data, weight)
    tokenizer = open_tokenizer(data.tokenizer)
    train, unseen = split_documents(list(encoded_documents(data, tokenizer)), data.held_out)
    words = f"{data.source} as {tokenizer.name}: {train.length:,} tokens, {unseen.length:,} held out"
    if skipped := left_out_files(data):
        words += f" ({left_out_words(skipped)})"
    return Corpus((CorpusPart(train, unseen, weight),), tokenizer, words)


def left_out_words(names: Sequence[str]) -> str:
    """For people: the files that are not read, by the first of them."""
    others = f" and {len(names) - 1} other file{'s' * (len(names) > 2)}" if len(names) > 1 else ""
    return f"{names[0]}{others} left out: not text"


def _meaning(tokenizer: Tokenizer) -> str:
    """What tells tokenizers apart: a file by its content, others by their name and the token that ends a document."""
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.digest()
    return f"{tokenizer.name} {tokenizer.vocabulary} {tokenizer.end}"
