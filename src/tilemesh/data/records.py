"""Records of JSONL, JSON and Parquet files, one field of each: text, or the messages of a conversation.

The one idea: a file is read record by record and never whole, and what a record lacks is said with its place and the
fields that it has. JSON by the standard library; Parquet by pyarrow, which is optional. A `.json` file is an array of
records, records by lines under another name, or one object, which is one record.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.ranges import shown
from tilemesh.data.chat import Conversation, read_conversation
from tilemesh.data.file_formats import file_format, opened

_SHOWN_FIELDS = 12
_CHECKED_BYTES = 4 << 20
"""Of a file, before a run begins: about 40 ms of reading. What comes after is read when its turn comes."""


class FieldRecord(NamedTuple):
    """One record's field, and how much of its file was read when it was."""

    number: int
    """From 1, in its file."""
    value: Any
    read_bytes: int
    tools: Any = None
    """Of a record of a conversation: what the assistant may call."""


def read_records(path: Path, field: str) -> Iterator[FieldRecord]:
    """The field of every record, in the file's order."""
    return {"parquet": _parquet, "json": _json}.get(file_format(path).kind, _jsonl)(path, field)


def record_content(record: FieldRecord, field: str, is_chat: bool, where: str) -> bytes | Conversation:
    """A record's field as text, or as a conversation; what is neither is refused with its place."""
    value = record.value
    if is_chat:
        return read_conversation(value, record.tools, where)
    if not isinstance(value, str):
        more = "; for conversations set data.chat=true" if isinstance(value, list) else ""
        raise UsageError("data.field", f": {field} of {where} is {shown(value)}: expected text{more}")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise UsageError("data.field", f": {field} of {where} has half a surrogate pair, which is no text") from None


def record_place(path: Path, record: FieldRecord) -> str:
    return f"{path}, record {record.number}"


def check_records(path: Path, field: str, is_chat: bool) -> None:
    """Refuse a file of which one of the first records is not as expected, before anybody goes to read it all."""
    empty = True
    for record in read_records(path, field):
        record_content(record, field, is_chat, record_place(path, record))
        empty = False
        if record.read_bytes >= _CHECKED_BYTES:
            break
    if empty:
        raise UsageError("data.source", f" {path} has no record: expected at least one")


def looks_like_jsonl(path: Path) -> bool:
    """Whether the first lines of a file that is read as text are JSON objects, which its name does not say."""
    with opened(path) as file:
        lines = [file.content.readline(_LONGEST_LOOKED_AT) for _ in range(2)]
    return _is_object(lines[0]) and (not lines[1].strip() or _is_object(lines[1]))


_LONGEST_LOOKED_AT = 1 << 20


def _jsonl(path: Path, field: str) -> Iterator[FieldRecord]:
    with opened(path) as file:
        for number, line in enumerate(file.content, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield _of_record(number, _parsed(line, where), field, where, file.stored.tell())


def _json(path: Path, field: str) -> Iterator[FieldRecord]:
    with opened(path) as file:
        if file.content.read(_LONGEST_BLANK).lstrip(_BLANK).startswith(b"["):  # one line of gigabytes, it may be
            return _array(path, field)
        file.content.seek(0)
        first, second = file.content.readline(_LARGEST_DOCUMENT), file.content.readline(_LARGEST_DOCUMENT)
    if second.strip() and _is_object(first):  # JSONL under another name
        return _jsonl(path, field)
    return _document(path, field)


_LONGEST_BLANK = 4096
_BLANK = b"\xef\xbb\xbf \t\r\n"
"""What may stand before JSON: a byte order mark, and white space."""
_LARGEST_DOCUMENT = 256 << 20


def _array(path: Path, field: str) -> Iterator[FieldRecord]:
    with opened(path) as file:
        text = io.TextIOWrapper(file.content, encoding="utf-8-sig")
        try:
            for number, record in enumerate(_values(text, path), start=1):
                yield _of_record(number, record, field, f"{path}, record {number}", file.stored.tell())
        except UnicodeDecodeError as error:
            raise _not_json(str(path), error) from None


def _document(path: Path, field: str) -> Iterator[FieldRecord]:
    """One object: the only record of its file."""
    with opened(path) as file:
        content = file.content.read(_LARGEST_DOCUMENT + 1)
        read = file.stored.tell()
    if len(content) > _LARGEST_DOCUMENT:
        raise UsageError("data.source", f" {path} is one large JSON document: {_EXPECTED_RECORDS}")
    record = _parsed(content, str(path))
    if isinstance(record, dict) and field not in record:
        keys = [
            key for key, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        if keys:
            raise UsageError(
                "data.source",
                f" {path} is one JSON object with records under {shown(keys[0])}: {_EXPECTED_RECORDS}, "
                f"such as by jq -c '.{keys[0]}[]'",
            )
    yield _of_record(1, record, field, str(path), read)


_EXPECTED_RECORDS = "expected an array of objects, or one object per line"


def _values(text: TextIO, path: Path) -> Iterator[Any]:
    """The values of a JSON array, each as soon as it is whole in what was read."""
    number = 0
    piece, place = _past_white(text, "", 0)
    place += 1  # the bracket
    while True:
        where = f"{path}, record {number + 1}"
        piece, place = _past_white(text, piece, place)
        if piece.startswith("]", place):
            break
        if number:
            if not piece.startswith(",", place):
                raise UsageError("data.source", f" {where} is not JSON: expected a comma or the array's end before it")
            piece, place = _past_white(text, piece, place + 1)
        value, piece, place = _first_value(text, piece, place, where)
        number += 1
        yield value
    if piece[place + 1 :].strip() or text.read(_READ_CHARACTERS).strip():
        raise UsageError("data.source", f" {path} has more after its array: {_EXPECTED_RECORDS}")


_READ_CHARACTERS = 1 << 20
_WHITE = re.compile(r"[ \t\r\n]*")
_LONGEST_TOKEN = 16
"""Of JSON, beside strings: an error this near the end of what was read may be of a token that was cut."""


def _past_white(text: TextIO, piece: str, place: int) -> tuple[str, int]:
    """Where white space ends, in this piece of the text or the next one; at the text's end, the piece's end."""
    while True:
        white = _WHITE.match(piece, place)
        place = white.end() if white else place
        if place < len(piece):
            return piece, place
        more = text.read(_READ_CHARACTERS)
        if not more:
            return piece, place
        piece, place = more, 0


def _first_value(text: TextIO, piece: str, place: int, where: str) -> tuple[Any, str, int]:
    """The value at a place, with the piece and the place of what follows; more is read where the value was cut."""
    while True:
        try:
            value, end = json.JSONDecoder().raw_decode(piece, place)
            return value, piece, end
        except RecursionError:
            raise _too_deep(where) from None
        except ValueError as error:
            more = ""
            if _may_be_cut(error, piece) and len(piece) < _LARGEST_DOCUMENT:
                more = text.read(max(_READ_CHARACTERS, len(piece)))  # doubled: long values are not tried often
            if not more:
                raise _not_json(where, error) from None
            piece, place = piece[place:] + more, 0


def _may_be_cut(error: ValueError, piece: str) -> bool:
    if not isinstance(error, json.JSONDecodeError):  # a number of thousands of digits
        return False
    return error.pos >= len(piece) - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")


def _parsed(content: bytes, where: str) -> Any:
    try:
        return json.loads(content)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise _not_json(where, error) from None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _too_deep(where: str) -> UsageError:
    return UsageError("data.source", f" {where} is not JSON that can be read: nested too deeply")


def _not_json(where: str, error: ValueError) -> UsageError:
    return UsageError("data.source", f" {where} is not JSON: {str(error).partition(';')[0]}")


def _of_record(number: int, record: Any, field: str, where: str, read_bytes: int) -> FieldRecord:
    if not isinstance(record, dict):
        raise UsageError("data.source", f" {where} is a {type(record).__name__}: expected one JSON object per record")
    if field not in record:
        raise _no_field(where, field, list(record), [key for key, value in record.items() if _is_chat(value)])
    return FieldRecord(number, record[field], read_bytes, record.get(_TOOLS))


_TOOLS = "tools"


def _parquet(path: Path, field: str) -> Iterator[FieldRecord]:
    file, size, number = _opened(path, field), path.stat().st_size, 0
    total = max(1, file.metadata.num_rows)
    columns = [field, *([_TOOLS] if _TOOLS in file.schema_arrow.names and field != _TOOLS else [])]
    for batch in file.iter_batches(columns=columns):
        for row in batch.to_pylist():
            number += 1
            yield FieldRecord(number, row[field], size * number // total, row.get(_TOOLS))


def _opened(path: Path, field: str) -> Any:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise RunError(
            f"{path} is Parquet and the package `pyarrow` is not installed: pip install 'tilemesh[data]'"
        ) from None
    try:
        file = parquet.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError("data.source", f" {path} is not a Parquet file: {str(error).partition(chr(10))[0]}") from None
    names = file.schema_arrow.names
    if field not in names:
        kinds = {name: file.schema_arrow.field(name).type for name in names}
        lists = [name for name, kind in kinds.items() if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type)]
        raise _no_field(str(path), field, names, lists)
    return file


def _is_chat(value: Any) -> bool:
    """Whether a field looks like the messages of a conversation."""
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict) and bool({"role", "from"} & {*value[0]})
    )


def _no_field(where: str, field: str, known: list[str], chats: list[str]) -> UsageError:
    """`chats`: fields that hold conversations."""
    names = ", ".join(known[:_SHOWN_FIELDS]) + (", …" if len(known) > _SHOWN_FIELDS else "") or "no field"
    start = f" {where} has no field {shown(field)}: it has {names}; "
    if chats:
        more = ("to read the conversations in it set ", "data.chat=true", " and ", "data.field", f"={chats[0]}")
        return UsageError("data.source", start, *more)
    return UsageError("data.source", start, "set ", "data.field")
