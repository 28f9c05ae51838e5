"""Schemas that clients send, and the JSON Schema Test Suite: most compile, none accepts what it forbids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tilemesh.core.errors import UsageError
from tilemesh.data.tokenizer import Bytes
from tilemesh.serve.constrain.mask import Constraint, Constraints, Cursor

pytest.importorskip("llguidance")

FOLDER = Path(__file__).parent.parent / "data" / "json_schema"
KNOWN = Constraints(Bytes(), frozenset({0}))


class SchemaCase(NamedTuple):
    name: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]


def cases(file: str) -> list[SchemaCase]:
    return [SchemaCase(*case) for case in json.loads((FOLDER / file).read_text())]


def compiled(some: list[SchemaCase]) -> Iterator[tuple[SchemaCase, Constraint]]:
    """Those that are not refused before anything is generated."""
    for case in some:
        try:
            constraint = KNOWN.get(None, case.schema)
        except UsageError:
            continue
        assert constraint is not None
        yield case, constraint


def accepts(constraint: Constraint, instance: Any) -> bool:
    """Whether it can be written, without white space, byte by byte, and may end there."""
    cursor, is_complete = Cursor(constraint), False
    for byte in json.dumps(instance, ensure_ascii=False, separators=(",", ":")).encode():
        (after,) = cursor.ahead([])
        if is_complete or after is None or not after.mask_V[byte]:
            return False
        is_complete = cursor.add(byte)
    (after,) = cursor.ahead([])
    return is_complete or (after is not None and after.may_end)


def test_everyday_schemas_compile_and_mean_what_they_say() -> None:
    """28 are pydantic's; two ask for items that differ, which a grammar cannot count."""
    every = cases("everyday.json")
    assert (len(every), sum(case.name.startswith("pydantic") for case in every)) == (49, 28)
    served = list(compiled(every))
    assert {case.name for case in every} - {case.name for case, _ in served} == {
        "items that differ",
        "pydantic: Booking",
    }
    for case, constraint in served:
        for instance in case.valid:
            assert accepts(constraint, instance), f"{case.name} refuses {instance}"
        for instance in case.invalid:
            assert not accepts(constraint, instance), f"{case.name} accepts {instance}"


def test_no_invalid_instance_of_the_test_suite_is_accepted() -> None:
    served = list(compiled(cases("draft2020-12.json")))
    assert len(served) >= 150, "of 368"
    wrong = [(c.name, c.schema, x) for c, constraint in served for x in c.invalid if accepts(constraint, x)]
    assert not wrong
    judged = sum(len(case.invalid) for case, _ in served)
    right = [accepts(constraint, instance) for case, constraint in served for instance in case.valid]
    assert judged >= 220
    assert sum(right) >= 0.9 * len(right), "a schema may be narrowed where an answer would not end"
