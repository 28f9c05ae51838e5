"""What of a JSON schema llguidance is given: as much as it keeps exactly, and no more than a request may cost.

The one idea: the library refuses keywords that it does not know. The rest is here: a schema is narrowed where an answer
would not end (unnamed properties, integers without bounds), and refused where the library would accept too much or work
for minutes. Narrower is always safe, but not for parts of `allOf` and of a `oneOf` whose options may overlap:
a document with these keeps its objects open.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import shown

Schema = Mapping[str, Any]

_MOST_DEPTH, _MOST_SCHEMAS = 32, 2_000
_MOST_COMBINED = 1_000
"""Alternatives of one part times those of the next: the library looks at each pair."""
_MOST_STATES = 10_000
"""Remainders that the digits of a number may have: 20 microseconds each."""
_MOST_INTEGER = 10**15 - 1
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_COMBINING = {"$ref", "anyOf", "oneOf", "allOf"}
_OPENING = {"additionalProperties", "patternProperties", "minProperties"}
_ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly",
                "$schema", "$id", "$defs", "definitions", "discriminator", "x-guidance"}  # fmt: skip
_CONTROL = re.compile(r"\\u00[01]|\\\\(x[01{]|u00[01]|u\{|c|0|v|a)")
"""In JSON: characters below the blank, themselves or in a pattern. The library drops those that need a `\\u`."""
_DAYS = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"[12][0-9]{{3}}-{_DAYS}"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-](0[0-9]|1[0-4]):[0-5][0-9])"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Of these the library also writes some that few can read: the year 0, the second 60."""


def prepare_schema(schema: Any) -> dict[str, Any]:
    """The schema that the library compiles; the given one is a stranger's, so nothing in it is trusted."""
    if not isinstance(schema, Mapping | bool):
        raise UsageError(f"json_schema is {shown(schema)}: expected a schema")
    if schema is False:
        raise UsageError("json_schema is false: it allows no text at all")
    root = {} if schema is True else schema
    narrowed: dict[str, Any] = _Document(root).narrow(root)
    return narrowed


class _Document:
    def __init__(self, root: Schema) -> None:
        self.root, self._costs, schemas = root, dict[int, int](), list[Schema]()
        for schema in _subschemas(root, 0):
            schemas.append(schema)
            _check(schema, "$id" in schema and len(schemas) > 1, len(schemas))
        if max(map(self._cost, schemas)) > _MOST_COMBINED:
            raise UsageError("json_schema combines too many schemas in an allOf: merge them into one")
        if math.prod(map(_remainders, schemas)) > _MOST_STATES:
            raise UsageError(f"json_schema: its multipleOf multiply to more than {_MOST_STATES:,}: give smaller ones")
        self.closes = not any(map(self._intersects, schemas))

    def narrow(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        # x-guidance holds options of the library, which are not a stranger's to set.
        inner = {key: _map(key, value, self.narrow) for key, value in schema.items() if key != "x-guidance"}
        if "oneOf" in inner and "anyOf" not in inner and self._disjoint(schema):
            inner["anyOf"] = inner.pop("oneOf")
            inner.pop("discriminator", None)
        if str(inner.get("format")) in _FORMATS and "pattern" not in inner:
            inner["pattern"] = _FORMATS[inner.pop("format")]
        _bound_integers(inner)
        properties = inner.get("properties")
        if self.closes and properties and not inner.keys() & _OPENING:
            inner["additionalProperties"] = not all(name in properties for name in _list(inner.get("required")))
        named = inner.get("additionalProperties") is False and "patternProperties" not in inner
        if _number(inner.get("minProperties"), 0) > 1 and not named:
            raise UsageError(
                "json_schema: minProperties is above 1, but a name that no schema lists may come twice: expected "
                "additionalProperties false beside it"
            )
        return inner

    def _target(self, pointer: Any) -> Any:
        """What a reference names, if it lies in this document."""
        part: Any = self.root if str(pointer).startswith("#") else None
        for word in str(pointer).split("/")[1:]:
            part = part.get(word.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
        return part

    def _cost(self, schema: Any) -> int:
        """How many combinations the library may look at for this schema."""
        if not isinstance(schema, Mapping) or not schema.keys() & _COMBINING:
            return 1
        if id(schema) not in self._costs:
            self._costs[id(schema)] = 1  # while it is counted: what refers to itself is followed once
            parts = [*([self._target(schema["$ref"])] if "$ref" in schema else []), *_list(schema.get("allOf"))]
            costs = [self._cost(part) for part in parts] + [1] * bool(_beside(schema))
            costs += [sum(map(self._cost, _list(schema[word]))) for word in ("anyOf", "oneOf") if word in schema]
            cost = math.prod(costs) + (sum(costs) if len(costs) > 1 else 0)
            self._costs[id(schema)] = min(cost, _MOST_COMBINED + 1)
        return self._costs[id(schema)]

    def _intersects(self, schema: Schema) -> bool:
        """Whether closing the objects in this schema could leave nothing of it, or leave what it does not allow."""
        combined = schema.keys() & _COMBINING
        several = len(combined) > 1 or len(_list(schema.get("allOf"))) > 1 or bool(combined and _beside(schema))
        return several or ("oneOf" in schema and not self._disjoint(schema))

    def _disjoint(self, schema: Schema) -> bool:
        """Whether each schema of a `oneOf` asks for other values of one property: none allows what another does."""
        options = [
            self._target(option["$ref"]) if isinstance(option, Mapping) and "$ref" in option else option
            for option in _list(schema["oneOf"])
            if not isinstance(option, Mapping) or "$ref" not in option or not _beside(option)
        ]
        if len(options) != len(_list(schema["oneOf"])) or not all(isinstance(option, Mapping) for option in options):
            return False
        values = [_required_values(option) for option in options]
        return any(
            len(set[str]().union(*(some.get(name, ()) for some in values))) == sum(len(some[name]) for some in values)
            for name in (values[0] if values else ())
            if all(some.get(name) for some in values)
        )


def _check(schema: Schema, nested_id: bool, count: int) -> None:
    if count > _MOST_SCHEMAS:
        raise UsageError(f"json_schema holds more than {_MOST_SCHEMAS:,} schemas: give fewer or smaller ones")
    if nested_id:
        raise UsageError("json_schema: a schema in it has an $id of its own: expected references from # alone")
    patterns = [schema.get("pattern"), list(schema.get("patternProperties", ()))]
    texts = [schema.get("const"), schema.get("enum"), schema.get("required"), list(schema.get("properties", ()))]
    if _CONTROL.search(json.dumps([patterns, texts])):
        raise UsageError("json_schema holds a control character that is none of \\b \\f \\n \\r \\t: leave it out")


def _subschemas(schema: Any, depth: int) -> Iterator[Schema]:
    if depth > _MOST_DEPTH:
        raise UsageError(f"json_schema: schemas lie more than {_MOST_DEPTH} deep in one another")
    if isinstance(schema, Mapping):
        parts: list[Any] = []
        for key, value in schema.items():
            _map(key, value, parts.append)
        yield schema
        for part in parts:
            yield from _subschemas(part, depth + 1)


def _map(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """A keyword's value with the schemas in it changed."""
    if key in _NAMED and isinstance(value, Mapping):
        return {name: change(part) for name, part in value.items()}
    if key in _LISTED and isinstance(value, list):
        return [change(part) for part in value]
    if key in (*_NAMED, *_LISTED):
        raise UsageError(f"json_schema: {key} is {shown(value)}: expected schemas")
    return change(value) if key in _SINGLE else value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any, otherwise: float) -> float:
    return value if isinstance(value, int | float) and math.isfinite(value) else otherwise


def _beside(schema: Schema) -> set[str]:
    """Keywords that ask for something beside what a schema combines."""
    return set(schema) - _COMBINING - _ANNOTATIONS


def _required_values(schema: Schema) -> dict[str, set[str]]:
    """The texts that an object must have one of, by the property that must hold it."""
    properties = {name: part for name, part in schema.get("properties", {}).items() if isinstance(part, Mapping)}
    listed = {name: part.get("enum", [part.get("const")]) for name, part in properties.items()}
    required = _list(schema.get("required")) if schema.get("type") == "object" else []
    return {
        name: set(values)
        for name, values in listed.items()
        if name in required and isinstance(values, list) and all(isinstance(value, str) for value in values)
    }


def _remainders(schema: Schema) -> int:
    """Of a `multipleOf`, as the library follows the digits of a number."""
    step = _number(schema.get("multipleOf"), 1)
    return int("".join(map(str, Decimal(str(step)).normalize().as_tuple().digits)) or 1) or 1


def _bound_integers(schema: dict[str, Any]) -> None:
    kinds = _list(schema.get("type")) or [schema.get("type")]
    if "integer" in kinds and "number" not in kinds:
        bounds = (schema.get(word) for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
        most = _MOST_INTEGER + max(math.ceil(abs(_number(bound, 0))) for bound in bounds)
        schema.setdefault("minimum", -most)
        schema.setdefault("maximum", most)
