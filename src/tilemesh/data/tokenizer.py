"""Text to tokens and back: bytes, which need no library, or a file of the optional package `tokenizers`.

A document ends with one token that no text contains, so that a model learns where one stops.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import RunError, UsageError

END_BYTE = 0  # never part of a text file
_END_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def end(self) -> int:
        """What stands after a document."""
        ...

    def encode(self, text: bytes, special: bool = False) -> NDArray[Any]:
        """Tokens of a text; with `special` also those that stand around every prompt, if the tokenizer has such."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def spell(self, beginning: bool) -> list[bytes | None]:
        """The bytes that each token adds to a text, at its beginning or later; None: a special token, or no bytes."""
        ...


@dataclass(frozen=True)
class Bytes:
    """A byte is a token."""

    vocabulary: int = 256
    name: str = "bytes"
    end: int = END_BYTE

    def encode(self, text: bytes, special: bool = False) -> NDArray[Any]:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(int(token) & 0xFF for token in tokens).decode(errors="replace")

    def spell(self, beginning: bool) -> list[bytes | None]:
        return [bytes([token]) for token in range(256)]


class FileTokenizer:
    """A Hugging Face `tokenizers` file."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise RunError(
                f"the tokenizer is {path} and the package `tokenizers` is not installed: pip install 'tilemesh[hf]', "
                "or name no tokenizer to read text as bytes"
            ) from None
        if not path.is_file():
            raise UsageError("data.tokenizer", f" {path} does not exist: expected a tokenizer.json file")
        try:
            self._inner = Loaded.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise UsageError("data.tokenizer", f" {path} is not a tokenizers file: {error}") from None
        self.name = str(path)
        self.vocabulary = int(self._inner.get_vocab_size())
        ends = {name: end for name in _END_NAMES if (end := self._inner.token_to_id(name)) is not None}
        self.end_token = next(iter(ends), None)
        """The text of the token that ends a document, where the file has one of the usual names for it."""
        self.end = self.vocabulary - 1 if self.end_token is None else int(ends[self.end_token])
        added = self._inner.get_added_tokens_decoder()
        self._special = {self.end, *(int(token) for token, entry in added.items() if entry.special)}

    def encode(self, text: bytes, special: bool = False) -> NDArray[Any]:
        ids = self._inner.encode(text.decode(errors="replace"), add_special_tokens=special).ids
        return np.asarray(ids, np.uint32)

    def encode_until_special(self, text: str, place: int) -> tuple[NDArray[Any], int | None]:
        """Tokens of a text, and how many they are up to and with the first special one from a character on; None:
        there is no such token."""
        encoded = self._inner.encode(text, add_special_tokens=False)
        pairs = enumerate(zip(encoded.ids, encoded.offsets, strict=True))
        until = next(
            (at + 1 for at, (token, (at_character, _)) in pairs if token in self._special and at_character >= place),
            None,
        )
        return np.asarray(encoded.ids, np.uint32), until

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._inner.decode([int(token) for token in tokens], skip_special_tokens=False))

    def spell(self, beginning: bool) -> list[bytes | None]:
        """From how the file's decoder joins tokens: in bytes as GPT-2 writes them, or as SentencePiece does."""
        described = json.loads(self._inner.to_str())
        steps = _steps(described.get("decoder"))
        kinds = {str(step["type"]) for step in steps}
        added = {int(token_entry["id"]): token_entry for token_entry in described.get("added_tokens", ())}
        if not steps or (kinds - _BYTE_DECODERS and kinds - _WORD_DECODERS):
            names = ", ".join(sorted(kinds)) or "none"
            raise UsageError(f"{self.name} has a decoder ({names}) whose tokens have no bytes of their own")
        token_bytes: list[bytes | None] = [None] * self.vocabulary
        for text, token in self._inner.get_vocab(with_added_tokens=True).items():
            if token in added:
                token_bytes[token] = None if added[token]["special"] else text.encode()
            elif kinds <= _BYTE_DECODERS:
                token_bytes[token] = _byte_letters(text)
            else:
                token_bytes[token] = _piece_bytes(text, steps, beginning)
        return token_bytes


@dataclass(frozen=True)
class Unknown:
    """Shards from elsewhere, of which nobody said what their numbers mean."""

    vocabulary: int
    name: str = "tokens"
    end: int = 0

    def encode(self, text: bytes, special: bool = False) -> NDArray[Any]:
        raise UsageError(
            "it is not known which tokenizer made these tokens: put its tokenizer.json into the model's folder, or for "
            "shards set ",
            "data.tokenizer",
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in tokens)

    def spell(self, beginning: bool) -> list[bytes | None]:
        raise UsageError("this model's folder has no tokenizer, so nobody knows which text its tokens are")


_BYTE_DECODERS, _WORD_DECODERS = {"ByteLevel"}, {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def _steps(decoder: Any) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return (
        [step for inner in decoder["decoders"] for step in _steps(inner)]
        if decoder["type"] == "Sequence"
        else [decoder]
    )


@functools.cache
def _letters() -> Mapping[str, int]:
    """The letter that GPT-2's vocabularies write for each byte: itself where it can be seen, else one from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {**{chr(byte): byte for byte in seen}, **{chr(256 + index): byte for index, byte in enumerate(hidden)}}


def _byte_letters(text: str) -> bytes | None:
    letters = _letters()
    return bytes(letters[char] for char in text) if all(char in letters for char in text) else text.encode()


def _piece_bytes(text: str, steps: Sequence[Mapping[str, Any]], beginning: bool) -> bytes:
    if any(step["type"] == "ByteFallback" for step in steps) and re.fullmatch("<0x[0-9A-F]{2}>", text):
        return bytes([int(text[3:5], 16)])
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            text = text.replace(step["pattern"]["String"], step["content"])
        elif step["type"] == "Metaspace":
            prepended = step.get("prepend_scheme", "always") != "never"
            text = text.replace(step["replacement"], "" if beginning and prepended else " ")
        elif step["type"] == "Strip" and beginning:
            for _ in range(step["start"]):
                text = text.removeprefix(step["content"])
    return text.encode()


def open_tokenizer(path: Path | None) -> Tokenizer:
    return Bytes() if path is None else FileTokenizer(path)


def encode_prompt(tokenizer: Tokenizer, prompt: str, special: bool = False) -> list[int]:
    try:
        text = prompt.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no text
        raise UsageError("the prompt is not UTF-8 text: give it in UTF-8") from None
    return [int(token) for token in tokenizer.encode(text, special)]
