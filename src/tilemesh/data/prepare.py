"""`tilemesh data prepare`: a source written as token shards, some of it at a time, from where an earlier call stopped.

The one idea: documents come in one order, and shards end where documents do. After every shard a small file says how
many documents are in the shards so far; a call that finds it reads past so many documents and goes on, and what it
then writes is what one call would have written. A call that is asked to stop also keeps the documents that fill no
shard yet, in a file of their own. Both files are gone once `meta.json`, which makes the folder a source, is there.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilemesh.core.config import to_dict
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import PART, check_new_folder, read_json_object, replacing
from tilemesh.data.config import (
    PREPARING_FILE,
    SHARD_SUFFIX,
    DataConfig,
    check_source,
    has_shards,
    lies_in_source,
    source_path,
)
from tilemesh.data.corpus import (
    ENOUGH_DOCUMENTS,
    EncodedDocument,
    encoded_documents,
    is_held_out,
    joined,
    split_documents,
)
from tilemesh.data.documents import documents, source_bytes
from tilemesh.data.shards import BEGINS_SUFFIX, COUNTED_SUFFIX, DTYPES, HELD_OUT_PREFIX, META_FILE
from tilemesh.data.stream import Stream
from tilemesh.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer
from tilemesh.data.tokenizer_files import TOKENIZER

SHARD_TOKENS = 1 << 26
WAITING_FILE = "preparing.npz"
"""Documents that were tokenised and are in no shard yet, of a call that was asked to stop."""
Progress = Callable[[int, int], None]
"""Told how many bytes of the source were read, of how many."""


class PreparationStoppedError(Exception):
    """Asked to stop, and everything that was read is kept."""


def prepare(
    data: DataConfig,
    out: str | Path,
    shard_tokens: int = SHARD_TOKENS,
    on_progress: Progress = lambda read, total: None,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Write a source as token shards that `data.source` then names; returns what `meta.json` says.

    Where an earlier call with the same arguments was stopped, it goes on. `is_asked_to_stop` is asked after every
    document; if so, what was read is kept and `PreparationStoppedError` raised.
    """
    target = _target(data, out)
    tokenizer = open_tokenizer(data.tokenizer)
    state = _State.read(target, data, shard_tokens) or _State(_arguments(data, shard_tokens))
    total = source_bytes(data)
    if total == 0:
        raise UsageError("data.source", f" {data.source} is empty: there is no text to prepare")
    target.mkdir(parents=True, exist_ok=True)
    state.write(target)
    if isinstance(tokenizer, FileTokenizer):
        tokenizer.write(target)
    writer = _ShardWriter(target, tokenizer, state)
    waiting = _read_waiting(target, state)
    size = sum(len(document.tokens) for document in waiting)
    on_progress(waiting[-1].read_bytes if waiting else state.read_bytes, total)
    left = itertools.islice(documents(data), state.documents + len(waiting), None)  # those in no shard yet
    for document in encoded_documents(data, tokenizer, left):
        waiting.append(document)
        size += len(document.tokens)
        state.ends_inside |= document.ends_inside
        if len(waiting) % 64 == 0:
            on_progress(document.read_bytes, total)
        if size >= shard_tokens and state.documents + len(waiting) >= ENOUGH_DOCUMENTS:
            writer.flush(waiting, data.held_out)
            waiting, size = [], 0
            on_progress(document.read_bytes, total)
        if is_asked_to_stop():
            _keep_waiting(target, state, waiting)
            raise PreparationStoppedError(
                f"stopped after {state.documents + len(waiting):,} documents, which are kept in {target}: the same "
                "command goes on from there"
            )
    if state.documents:
        writer.flush(waiting, data.held_out)
    else:  # few documents, or a small source: whole, as training would read it
        writer.write(*split_documents(waiting, data.held_out), documents=len(waiting), read=total, most=shard_tokens)
    on_progress(total, total)
    return writer.finish(data)


def _target(data: DataConfig, out: str | Path) -> Path:
    target = Path(out)
    if data.mixture:
        raise UsageError("data.mixture", " is for training: prepare each of its sources by itself")
    check_source(data)
    source = source_path(data.source)
    if lies_in_source(target, data.source):
        raise UsageError(
            f"{target} lies in the source {source}, and would be read as text: name a folder outside of it"
        )
    if has_shards(source):
        raise UsageError("data.source", f" {data.source} has shards already: there is nothing to prepare")
    if has_shards(target) and not (target / PREPARING_FILE).exists():
        raise UsageError(f"{target} has shards already: name another folder, or remove it first")
    if not (target / PREPARING_FILE).exists():
        check_new_folder(target)
    return target


def _keep_waiting(target: Path, state: _State, waiting: Sequence[EncodedDocument]) -> None:
    """Documents that fill no shard yet, and how many are in shards before them."""
    path = target / WAITING_FILE
    if not waiting:
        path.unlink(missing_ok=True)
        return
    tokens = [document.tokens for document in waiting]
    counted = [document.counted for document in waiting if document.counted is not None]
    content = io.BytesIO()
    np.savez(
        content,
        after=np.array(state.documents),
        names=np.frombuffer(json.dumps([document.name for document in waiting]).encode(), np.uint8),
        lengths=np.array([len(piece) for piece in tokens]),
        read_bytes=np.array([document.read_bytes for document in waiting]),
        ends_inside=np.array([document.ends_inside for document in waiting]),
        tokens=np.concatenate(tokens),
        counted=np.concatenate(counted) if counted else np.zeros(0, np.bool_),
    )
    _write_whole(path, content.getvalue())


def _read_waiting(target: Path, state: _State) -> list[EncodedDocument]:
    """What an earlier call kept, unless shards were written since."""
    path = target / WAITING_FILE
    if not path.exists():
        return []
    try:
        with np.load(path, allow_pickle=False) as kept:
            content = {name: kept[name] for name in kept.files}
        if int(content["after"]) != state.documents:
            return []
        names = json.loads(content["names"].tobytes())
        cuts = np.cumsum(content["lengths"])[:-1]
        tokens = np.split(content["tokens"], cuts)
        counted = np.split(content["counted"], cuts) if len(content["counted"]) else [None] * len(names)
        columns = zip(names, tokens, counted, content["read_bytes"], content["ends_inside"], strict=True)
        waiting = [EncodedDocument(*row[:3], int(row[3]), bool(row[4])) for row in columns]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        raise UsageError(f"{path} is not what `tilemesh data prepare` wrote: remove {target} and begin anew") from None
    state.ends_inside |= any(document.ends_inside for document in waiting)
    return waiting


def _arguments(data: DataConfig, shard_tokens: int) -> dict[str, Any]:
    return {**to_dict(data), "shard_tokens": shard_tokens, "source_bytes": source_bytes(data)}


@dataclasses.dataclass
class _State:
    """How far it has come."""

    arguments: dict[str, Any]
    documents: int = 0
    read_bytes: int = 0
    counts: dict[str, int] = dataclasses.field(default_factory=lambda: {"train": 0, HELD_OUT_PREFIX: 0})
    """Shards of each side."""
    files: dict[str, int] = dataclasses.field(default_factory=dict)
    has_counted: bool = False
    has_begins: bool = False
    ends_inside: bool = False

    @staticmethod
    def read(target: Path, data: DataConfig, shard_tokens: int) -> _State | None:
        path = target / PREPARING_FILE
        if not path.exists():
            return None
        try:
            state = _State(**read_json_object(path))
        except TypeError:
            raise UsageError(
                f"{path} is not what `tilemesh data prepare` wrote: remove {target} and begin anew"
            ) from None
        if state.has_counted and not state.has_begins:
            raise UsageError(f"{target} was begun by an earlier version: remove it and begin anew")
        now = _arguments(data, shard_tokens)
        before = state.arguments
        different = [f"{key} was {before.get(key)!r} and is {now[key]!r}" for key in now if before.get(key) != now[key]]
        if different:
            differences = "; ".join(different)
            raise UsageError(f"{target} was begun otherwise ({differences}): do as then, or name another folder")
        return state

    def write(self, target: Path) -> None:
        _write_whole(target / PREPARING_FILE, json.dumps(dataclasses.asdict(self)).encode())


class _ShardWriter:
    def __init__(self, target: Path, tokenizer: Tokenizer, state: _State) -> None:
        self.target, self.tokenizer, self.state = target, tokenizer, state
        largest = max(tokenizer.vocabulary - 1, 1)
        self.dtype = next(name for name, kind in DTYPES.items() if largest <= np.iinfo(kind).max)

    def flush(self, waiting: list[EncodedDocument], held_out: float) -> None:
        """Documents into one shard for each side, and then how far that is."""
        if not waiting:
            return
        held_out_documents = [document for document in waiting if is_held_out(document.name, held_out)]
        train = [document for document in waiting if not is_held_out(document.name, held_out)]
        self.write(joined(train), joined(held_out_documents), documents=len(waiting), read=waiting[-1].read_bytes)

    def write(self, train: Stream, held: Stream, *, documents: int, read: int, most: int = 0) -> None:
        for prefix, stream in (("train", train), (HELD_OUT_PREFIX, held)):
            for part, tokens in enumerate(stream.parts):
                for begin in range(0, len(tokens), most or len(tokens)):
                    here = slice(begin, begin + (most or len(tokens)))
                    self._shard(prefix, stream.stretch(part, here))
        self.state.documents += documents
        self.state.read_bytes = read
        self.state.write(self.target)

    def _shard(self, prefix: str, stretch: Stream) -> None:
        name = f"{prefix}-{self.state.counts[prefix]:05d}{SHARD_SUFFIX}"
        (tokens,) = stretch.parts
        for counted in stretch.counted:
            self.state.has_counted = True
            _write_whole((self.target / name).with_suffix(COUNTED_SUFFIX), np.asarray(counted, np.uint8).tobytes())
        for begins in stretch.kept_begins:
            self.state.has_begins = True
            _write_whole((self.target / name).with_suffix(BEGINS_SUFFIX), begins.astype("<i8").tobytes())
        _write_whole(self.target / name, tokens.astype(DTYPES[self.dtype]).tobytes())
        self.state.counts[prefix] += 1
        self.state.files[name] = len(tokens)

    def finish(self, data: DataConfig) -> dict[str, Any]:
        meta = {
            "dtype": self.dtype, "vocabulary": self.tokenizer.vocabulary, "end": self.tokenizer.end,
            "tokenizer": "bytes" if data.tokenizer is None else TOKENIZER, "source": data.source,
            "documents": self.state.documents, "counted": self.state.has_counted,
            "begins": self.state.has_begins, "ends_inside": self.state.ends_inside, "files": self.state.files,
        }  # fmt: skip
        _write_whole(self.target / META_FILE, (json.dumps(meta, indent=2) + "\n").encode())
        left = self.target.glob(f"*{PART}")  # of a preparation that was killed
        for path in (self.target / WAITING_FILE, self.target / PREPARING_FILE, *left):
            path.unlink(missing_ok=True)
        return meta


def _write_whole(path: Path, content: bytes) -> None:
    """A file that has its name is whole."""
    try:
        with replacing(path) as part:
            part.write_bytes(content)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from None
