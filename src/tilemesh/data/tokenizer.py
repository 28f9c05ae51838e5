"""Text to tokens and back: bytes, which need no library, or a file of the optional package `tokenizers`.

A document ends with one token that no text contains, so that a model learns where one stops.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import read_json_object, write_text
from tilemesh.data.config import check_tokenizer
from tilemesh.data.tokenizer_files import TOKENIZER, TOKENIZER_CONFIG, as_built, read_beside

END_BYTE = 0  # never part of a text file
_NEVER_WRITTEN = ("pad_token", "unk_token", "mask_token", "cls_token", "sep_token")
_END_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")


class EncodedText(NamedTuple):
    """A text's tokens, and the characters of it that each was made of."""

    tokens: NDArray[Any]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    is_special: NDArray[np.bool_]


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

    def encode_text(self, text: str) -> EncodedText: ...

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

    def encode_text(self, text: str) -> EncodedText:
        tokens = self.encode(text.encode())
        place = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
        return EncodedText(tokens, place, place + 1, np.zeros(len(tokens), np.bool_))

    def decode(self, tokens: Sequence[int]) -> str:
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")

    def spell(self, beginning: bool) -> list[bytes | None]:
        return [bytes([token]) for token in range(256)]


class FileTokenizer:
    """A Hugging Face `tokenizers` file, as transformers reads it with the files beside it (`tokenizer_files`)."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import AddedToken
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise RunError(
                f"the tokenizer is {path} and the package `tokenizers` is not installed: pip install 'tilemesh[hf]', "
                "or name no tokenizer to read text as bytes"
            ) from None
        check_tokenizer(path)
        self.name, self.files = str(path), read_beside(path)
        try:
            if self.files.tokenizer_class:
                self._inner = Loaded.from_str(json.dumps(as_built(read_json_object(path), self.files)))
            else:
                self._inner = Loaded.from_file(str(path))
            self._inner.add_tokens([AddedToken(**entry) for entry in self.files.added_tokens])
        except Exception as error:  # the library raises a bare Exception
            raise UsageError("data.tokenizer", f" {path} is not a tokenizers file: {error}") from None
        self._inner.no_truncation()  # which a file may ask for, and a document has no length
        self._inner.no_padding()
        self._add_named(AddedToken)
        self._inner.encode_special_tokens = bool(self.files.settings.get("split_special_tokens"))
        ids = self._inner.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values(), default=-1) + 1
        """One above the largest id: there may be holes."""
        named = self.files.special_tokens.get("eos_token")
        usual = [*(name for name in _END_NAMES if name in ids), *(t for t, i in ids.items() if i == self.files.end)]
        self.end_token = named if named in ids else next(iter(usual), None)
        """The text of the token that ends a document: as the folder names it, a usual name, or what the model's
        config.json says."""
        added = self._inner.get_added_tokens_decoder()
        special = {int(token) for token, entry in added.items() if entry.special}
        self._end = None if self.end_token is None else ids[self.end_token]
        self._is_special = np.zeros(self.vocabulary, np.bool_)
        self._is_special[[*special, *([] if self._end is None else [self._end])]] = True

    def _add_named(self, added_token: Any) -> None:
        """Tokens that the folder names as special are one token each, also where tokenizer.json does not say so."""
        added = {entry.content for entry in self._inner.get_added_tokens_decoder().values()}
        known = self._inner.get_vocab(with_added_tokens=True)
        for name, text in self.files.special_tokens.items():
            # One that the vocabulary lacks gets the next id, unless no text of ours could have it.
            is_needed = name not in self.files.implied and name not in _NEVER_WRITTEN
            if text not in added and (text in known or is_needed):
                self._inner.add_special_tokens([added_token(text, special=True)])

    @property
    def end(self) -> int:
        if self._end is None:
            raise UsageError(
                f"{self.name} has no token that is known to end a document: name it as eos_token in a "
                f"{TOKENIZER_CONFIG} beside it"
            )
        return self._end

    def encode(self, text: bytes, special: bool = False) -> NDArray[Any]:
        try:
            ids = self._inner.encode(text.decode(), add_special_tokens=special).ids
        except UnicodeDecodeError as error:
            raise UsageError(
                f"byte {error.start} is {text[error.start]:#04x}, which is not UTF-8: convert the text first, such as "
                "by iconv -f latin1 -t utf-8"
            ) from None
        return np.asarray(ids, np.uint32)

    def encode_text(self, text: str) -> EncodedText:
        if self._inner.encode_special_tokens:
            raise UsageError(
                f"split_special_tokens in the {TOKENIZER_CONFIG} beside {self.name}: the special tokens of a "
                "conversation would be cut into pieces, so that no answer has an end; take it out"
            )
        encoded = self._inner.encode(text, add_special_tokens=False)
        tokens = np.asarray(encoded.ids, np.uint32)
        offsets = np.asarray(encoded.offsets, np.int64).reshape(-1, 2)
        return EncodedText(tokens, offsets[:, 0], offsets[:, 1], self._is_special[tokens])

    def ids(self) -> tuple[str | None, dict[str, int]]:
        """Which token ends a document, and the number of each."""
        return self.end_token, self._inner.get_vocab(with_added_tokens=True)

    def digest(self) -> str:
        """The same for two files that mean the same tokens of documents, whatever they put around a prompt."""
        described = json.loads(self._inner.to_str()) | {"post_processor": None}
        return hashlib.sha256(f"{self.end_token} {json.dumps(described)}".encode()).hexdigest()

    def write(self, folder: Path, **settings: Any) -> None:
        """Files that mean this tokenizer, to transformers and to us; `settings` go into its configuration."""
        files, known = self.files, self._inner.get_vocab(with_added_tokens=True)
        special = {name: text for name, text in files.special_tokens.items() if text in known}
        entries: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special, **settings}
        if self.end_token is not None:
            entries["eos_token"] = self.end_token
        if files.templates:
            entries["chat_template"] = [{"name": name, "template": text} for name, text in files.templates.items()]
            if set(files.templates) == {"default"}:
                entries["chat_template"] = files.templates["default"]
        for name, text in (
            (TOKENIZER, self._inner.to_str()),
            (TOKENIZER_CONFIG, json.dumps(entries, indent=2, ensure_ascii=False) + "\n"),
        ):
            write_text(text, folder / name)

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
        return self.encode_text("").tokens

    def encode_text(self, text: str) -> EncodedText:
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


_BORDER_TOKENS = 16
"""By how many tokens a text may have fewer than its beginning has alone: a cut word takes more than a whole one."""


def encode_prompt(tokenizer: Tokenizer, prompt: str, special: bool = False, most: int | None = None) -> list[int]:
    """A prompt's tokens. A text that has more than `most` of them is refused before it is read to its end."""
    try:
        text = prompt.encode()
    except UnicodeEncodeError:  # bytes of the command line that are not text
        raise UsageError("the prompt is not UTF-8 text: give it in UTF-8") from None
    beginning = 8 * (most or 0) + 4096
    while most is not None and beginning < len(text):
        whole_characters = text[:beginning].decode(errors="ignore").encode()
        if len(tokenizer.encode(whole_characters, special)) > most + _BORDER_TOKENS:
            raise UsageError(f"the prompt of {len(text):,} bytes has more than {most:,} tokens: give at most {most:,}")
        beginning *= 4
    return [int(token) for token in tokenizer.encode(text, special)]
