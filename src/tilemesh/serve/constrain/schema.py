"""What of a JSON schema llguidance is given: as much as it keeps exactly, and no more than a request may cost.

The one idea: the library refuses keywords that it does not know. The rest is here: a schema is narrowed where an answer
would not end (unnamed properties, integers without bounds), and refused where the library would accept too much or work
for minutes. Narrower is safe but in an `allOf`, or a `oneOf` whose options may overlap: with these objects stay open.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import shown

_MOST_DEPTH, _MOST_SCHEMAS, _MOST_INTEGER = 32, 2_000, 10**15 - 1
_MOST_PATTERNS = 8
"""Of one text, which must match all of them: 20 take 2 s, 40 take minutes."""
_MOST_STATES = 10_000
"""Remainders that the digits of a number may have: 20 microseconds each."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
CALLS = "x-tool-calls"
"""Instead of a schema: calls of tools must come that are no JSON as a whole, but a name before each one's JSON."""
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SINGLE = ("items", "additionalProperties")
_COMBINING = {"$ref", "anyOf", "oneOf", "allOf"}
_OPENING = {"additionalProperties", "patternProperties", "minProperties"}
_ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly",
                "$schema", "$id", "$defs", "definitions", "discriminator", "x-guidance"}  # fmt: skip
_CONTROL = re.compile(r"\\u00[01]|\\\\(x[01{]|u00[01]|u\{|c|0|v|a)")
"""In JSON: characters below the blank, themselves or in a pattern. The library drops those that need a `\\u`."""
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-](0[0-9]|1[0-4]):[0-5][0-9])$"
_DATE = "[12].{3}-((0[13-9]|1[0-2])-..|02-([01].|2[0-8]))"
_LETTER = "([A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
_PATH = f"(//[A-Za-z0-9.-]+(:[0-9]{{1,5}})?(/{_LETTER}*)*|/?({_LETTER}+/)*{_LETTER}*)"
_REFERENCE = f"^([A-Za-z][A-Za-z0-9+.-]*:)?{_PATH}(\\?({_LETTER}|[/?:])*)?(#({_LETTER}|[/?:])*)?$"
_POINTER = "^(/([^/~]|~[01])*)*$"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_CLOCK}", "date-time": f"^{_DATE}T{_CLOCK}",
            "uri-reference": _REFERENCE, "iri-reference": _REFERENCE, "json-pointer": _POINTER}  # fmt: skip
"""Beside a format: of the first three the library also writes some that few can read, such as the year 0, the second 60
and a 29 February of any year; the others it does not know."""
_NARROWER = {"iri": "uri", "idn-email": "email"}
_OWN_FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
"""Formats that the library keeps. One that neither it nor this module knows asks nothing, as JSON Schema has it."""
_FORMAT = re.compile(r'"format": "([^"\\]{1,40})"')


def prepare_schema(schema: Any) -> Any:
    """What the library compiles. The given one is a stranger's: where it is not a schema any error may come."""
    root = {} if schema is True else schema
    if not isinstance(root, Mapping):
        raise UsageError(f"{shown(schema)}: expected a schema that allows some text")
    return _Document(root).narrow(root)


def unchecked_formats(schema: Any) -> list[str]:
    """What a schema calls a format and nothing here checks."""
    named = set(_FORMAT.findall(json.dumps(schema)))
    return sorted(named - _FORMATS.keys() - _NARROWER.keys() - _OWN_FORMATS)


class _Document:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root, self.schemas = root, dict[int, Mapping[str, Any]]()
        self._collect(root, 0)
        schemas = self.schemas.values()
        if any(isinstance(part, Mapping) and id(part) not in self.schemas for part in map(self._target, schemas)):
            raise UsageError("a $ref leads to what is no schema of this document, such as an example")
        patterns = sum(("pattern" in schema) + ("format" in schema) for schema in schemas)
        if min(patterns, sum(max(0, _joined(schema) - 1) for schema in schemas)) > _MOST_PATTERNS:
            raise UsageError("it has too many patterns beside an allOf or $ref: merge these schemas into one")
        steps = [re.sub(r"\D", "", repr(schema.get("multipleOf", 1))).strip("0") for schema in schemas]
        if math.prod(int(step or 1) for step in steps) > _MOST_STATES:
            raise UsageError(f"its multipleOf multiply to more than {_MOST_STATES:,}: give smaller ones")
        # Closing the objects could leave nothing of what is combined, or what one option of a `oneOf` forbids another.
        overlap = any("oneOf" in schema and not self._is_disjoint(schema) for schema in schemas)
        self.closes = not overlap and all(_joined(schema) < 2 for schema in schemas)

    def _collect(self, schema: Any, depth: int) -> None:
        """Keep a schema and all in it, unless there is too much of it."""
        if not isinstance(schema, Mapping):
            return
        self.schemas[id(schema)] = schema
        if depth > _MOST_DEPTH or len(self.schemas) > _MOST_SCHEMAS:
            raise UsageError(f"it holds more than {_MOST_SCHEMAS:,} schemas, or lies more than {_MOST_DEPTH} deep")
        if "$id" in schema and depth:
            raise UsageError("a schema in it has an $id of its own: expected references from # alone")
        names = [list(schema.get(word, ())) for word in ("patternProperties", "properties")]
        texts = [schema.get(word) for word in ("pattern", "const", "enum", "required")]
        if _CONTROL.search(json.dumps([names, texts])):
            raise UsageError("it holds a control character that is none of \\b \\f \\n \\r \\t: leave it out")
        for key, value in schema.items():
            _map(key, value, lambda part: self._collect(part, depth + 1))

    def narrow(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        # x-guidance holds options of the library, which are not a stranger's to set.
        inner = {key: _map(key, value, self.narrow) for key, value in schema.items() if key != "x-guidance"}
        if "oneOf" in inner and "anyOf" not in inner and self._is_disjoint(schema):
            inner["anyOf"] = inner.pop("oneOf")
            inner.pop("discriminator", None)
        if isinstance(form := inner.get("format"), str):
            form = inner["format"] = _NARROWER.get(form, form)
            if form not in _OWN_FORMATS:
                del inner["format"]
            if form in _FORMATS and "pattern" in inner:
                inner["allOf"] = [*inner.get("allOf", ()), {"type": "string", "pattern": _FORMATS[form]}]
            elif form in _FORMATS:
                inner["pattern"] = _FORMATS[form]
        if "integer" in inner.get("type", ()) and "number" not in inner["type"]:
            most = _MOST_INTEGER + max(math.ceil(abs(inner.get(word, 0))) for word in _BOUNDS)
            inner = {"minimum": -most, "maximum": most, **inner}
        if self.closes and inner.get("properties") and not inner.keys() & _OPENING:
            inner["additionalProperties"] = not all(name in inner["properties"] for name in inner.get("required", ()))
        is_named = inner.get("additionalProperties") is False and "patternProperties" not in inner
        if inner.get("minProperties", 0) > 1 and not is_named:
            raise UsageError("minProperties is above 1, but a name may come twice: expected additionalProperties false")
        return inner

    def _target(self, schema: Any) -> Any:
        """What a schema refers to, if it lies in this document; itself, if it refers to nothing."""
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        part: Any = self.root if str(schema["$ref"]).startswith("#") else None
        for word in str(schema["$ref"]).split("/")[1:]:
            part = part.get(word.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
        return part

    def _is_disjoint(self, schema: Mapping[str, Any]) -> bool:
        """Whether each schema of a `oneOf` asks for other texts of one property: none allows what another does."""
        options = [_required_texts(self._target(one) if _joined(one) < 2 else None) for one in schema["oneOf"]]
        for name in options[0] if options else ():
            texts = [text for option in options for text in option.get(name, ())]
            if all(name in option for option in options) and len(set(texts)) == len(texts):
                return True
        return False


def _map(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """A keyword's value with the schemas in it changed."""
    if key in _NAMED and isinstance(value, Mapping):
        return {name: change(part) for name, part in value.items()}
    if key in _LISTED and isinstance(value, list):
        return [change(part) for part in value]
    if key in (*_NAMED, *_LISTED):
        raise UsageError(f"{key} is {shown(value)}: expected schemas")
    return change(value) if key in _SINGLE else value


def _joined(schema: Any) -> int:
    """How many parts a schema combines, all of which must hold."""
    combined = schema.keys() & _COMBINING if isinstance(schema, Mapping) else set[str]()
    beside = bool(combined and set(schema) - _COMBINING - _ANNOTATIONS)
    return len(combined - {"allOf"}) + (len(schema.get("allOf", ())) if combined else 0) + beside


def _required_texts(schema: Any) -> dict[str, list[str]]:
    """The texts that an object must have one of, by the property that must hold it."""
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return {}
    parts = [(name, schema.get("properties", {}).get(name)) for name in schema.get("required", ())]
    listed = {name: part.get("enum", [part.get("const")]) for name, part in parts if isinstance(part, Mapping)}
    return {name: texts for name, texts in listed.items() if texts and all(isinstance(text, str) for text in texts)}
