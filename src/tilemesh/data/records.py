"""Records of JSONL and Parquet files, one field of each: text, or the messages of a conversation.

The one idea: a file is read record by record and never whole, and what a record lacks is said with its place and the
fields that it has. JSON by the standard library; Parquet by pyarrow, which is optional.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.ranges import shown
from tilemesh.data.chat import read_messages

JSONL, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
_SHOWN_FIELDS = 12
_CHECKED_BYTES = 4 << 20
"""Of a file, before a run begins: about 40 ms of reading. What comes after is read when its turn comes."""


class FieldRecord(NamedTuple):
    """One record's field, and how much of its file was read when it was."""

    number: int
    """From 1, in its file."""
    value: Any
    read_bytes: int


def is_records(path: Path) -> bool:
    """Whether a file holds records, by its name."""
    return path.suffix.lower() in (*JSONL, *PARQUET)


def read_records(path: Path, field: str) -> Iterator[FieldRecord]:
    """The field of every record, in the file's order."""
    return _parquet(path, field) if path.suffix.lower() in PARQUET else _jsonl(path, field)


def record_content(value: Any, field: str, is_chat: bool, where: str) -> bytes | list[dict[str, Any]]:
    """A field's value as text, or as the messages of a conversation; what is neither is refused with its place."""
    if is_chat:
        return read_messages(value, where)
    if not isinstance(value, str):
        more = "; for conversations set data.chat=true" if isinstance(value, list) else ""
        raise UsageError("data.field", f": {field} of {where} is {shown(value)}: expected text{more}")
    return value.encode(errors="replace")


def record_place(path: Path, record: FieldRecord) -> str:
    return f"{path}, record {record.number}"


def check_records(path: Path, field: str, is_chat: bool) -> None:
    """Refuse a file of which one of the first records is not as expected, before anybody goes to read it all."""
    empty = True
    for record in read_records(path, field):
        record_content(record.value, field, is_chat, record_place(path, record))
        empty = False
        if record.read_bytes >= _CHECKED_BYTES:
            break
    if empty:
        raise UsageError("data.source", f" {path} has no record: expected at least one")


def _jsonl(path: Path, field: str) -> Iterator[FieldRecord]:
    read = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                read += len(line)
                if line.strip():
                    yield FieldRecord(number, _field(line, field, f"{path}:{number}"), read)
    except OSError as error:
        raise RunError(f"data: {path} cannot be read: {error.strerror}") from None


def _field(line: bytes, field: str, where: str) -> Any:
    try:
        record = json.loads(line)
    except RecursionError:
        raise UsageError("data.source", f" {where} is not JSON that can be read: nested too deeply") from None
    except ValueError as error:
        raise UsageError("data.source", f" {where} is not JSON: {str(error).partition(';')[0]}") from None
    if not isinstance(record, dict):
        raise UsageError("data.source", f" {where} is a {type(record).__name__}: expected one JSON object per line")
    if field not in record:
        raise _no_field(where, field, list(record))
    return record[field]


def _parquet(path: Path, field: str) -> Iterator[FieldRecord]:
    file, size, number = _opened(path, field), path.stat().st_size, 0
    total = max(1, file.metadata.num_rows)
    for batch in file.iter_batches(columns=[field]):
        for value in batch.column(0).to_pylist():
            number += 1
            yield FieldRecord(number, value, size * number // total)


def _opened(path: Path, field: str) -> Any:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise RunError(
            "data.source",
            f" {path} is Parquet and the package `pyarrow` is not installed: pip install 'tilemesh[data]'",
        ) from None
    try:
        file = parquet.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError("data.source", f" {path} is not a Parquet file: {str(error).partition(chr(10))[0]}") from None
    names = file.schema_arrow.names
    if field not in names:
        raise _no_field(str(path), field, names)
    return file


def _no_field(where: str, field: str, known: list[str]) -> UsageError:
    names = ", ".join(known[:_SHOWN_FIELDS]) + (", …" if len(known) > _SHOWN_FIELDS else "") or "no field"
    return UsageError("data.source", f" {where} has no field {shown(field)}: it has {names}; set ", "data.field")
