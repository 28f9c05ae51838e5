"""JSON schemas to grammars: each output is JSON that the schema allows. What cannot be kept is refused by its name.

The one idea: what is written is chosen more narrowly than what a schema allows wherever that keeps the grammar small
and an answer from going on for ever: properties come in the order of the schema, those that it does not name only where
it asks for them, white space is at most one blank or a line with its indentation, numbers have at most 15 digits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import shown
from tilemesh.serve.constrain.pattern import (
    EMPTY,
    NOTHING,
    Chars,
    Grammar,
    OneOf,
    Pattern,
    Repeat,
    RuleName,
    Sequel,
    chars,
    choice,
    maybe,
    merged,
    others,
    row,
    text,
)
from tilemesh.serve.constrain.regex import parse_regex

_MOST_DEPTH = 32
_MOST_SCHEMAS = 750
"""In one another: so many need more nodes than a machine may have, and this is known sooner."""
_MOST_NAME = 100
_MOST_DIGITS = 15
_MOST_COUNT = 10_000
_ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions",
                "deprecated", "readOnly", "writeOnly"}  # fmt: skip
_KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set[str](),
    "boolean": set[str](),
    "null": set[str](),
}
_DAYS = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|02-(?:0[1-9]|1\\d|2[0-8]))"
_DATE = f"[1-2]\\d{{3}}-{_DAYS}"
_TIME = "(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,6})?(?:Z|[+-](?:0\\d|1[0-4]):[0-5]\\d)"
_FORMATS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": "(?:(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)\\.){3}(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)",
}  # fmt: skip

_SPACE = maybe(choice(" ", row("\n", Repeat(text(" "), 0, 24))))
_COMMA, _COLON = row(",", _SPACE), row(":", maybe(" "))
_DIGIT = chars("0123456789")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PLAIN = others([(0, 31), (34, 34), (92, 92)])
_ANY = "any JSON value"


def parse_schema(schema: Any) -> Grammar:
    """A grammar of the JSON texts that a schema allows; the schema is the body's own, so nothing in it is trusted."""
    made = _Schemas(schema)
    start = made.pattern(schema, "#", 0)
    return Grammar(start, made.rules)


class _Schemas:
    def __init__(self, root: Any) -> None:
        self.root = root
        self.rules: dict[str, Pattern] = {}
        self.objects = self.schemas = 0

    def pattern(self, schema: Any, where: str, depth: int) -> Pattern:
        self.schemas += 1
        self._check_room(0)
        if depth > _MOST_DEPTH:
            raise UsageError(f"json_schema: schemas lie more than {_MOST_DEPTH} deep in one another at {where[:100]}")
        if schema is True or schema == {}:
            return self._any()
        if schema is False:
            return NOTHING
        if not isinstance(schema, Mapping):
            raise UsageError(f"json_schema: {where[:200]} is {shown(schema)}: expected a schema")
        given = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
        for key, read in (("$ref", self._reference), ("anyOf", self._any_of), ("allOf", self._all_of)):
            if key in given:
                _only(given, {key}, where)
                return read(given[key], f"{where}/{key}", depth + 1)
        types = _types(given, where)
        if "const" in given or "enum" in given:
            _only(given, {"const", "enum", "type"}, where)
            return _listed(given, types, where)
        if not given:
            return self._any()
        _only(given, {"type"}.union(*(_KEYWORDS[name] for name in types)), where)
        if "number" in types:
            _only(given, {"type"}.union(*(_KEYWORDS[name] for name in types if name != "integer")), where)
        return choice(*(self._of_type(name, given, where, depth) for name in types))

    def _check_room(self, more: int) -> None:
        """Refuse so many schemas beside those that were read: before the first of them is."""
        if self.schemas + more > _MOST_SCHEMAS:
            raise UsageError(f"json_schema holds more than {_MOST_SCHEMAS:,} schemas: give fewer or smaller ones")

    def _of_type(self, name: str, given: Mapping[str, Any], where: str, depth: int) -> Pattern:
        if name == "object":
            return self._object(given, where, depth)
        if name == "array":
            return self._array(given, where, depth)
        if name == "string":
            return _string(given, where)
        if name == "integer":
            return _integer(given, where)
        simple: dict[str, Pattern] = {"number": _NUMBER, "boolean": choice("true", "false"), "null": text("null")}
        return simple[name]

    def _any(self) -> Pattern:
        if _ANY not in self.rules:
            self.rules[_ANY] = NOTHING  # the rule uses itself
            value = RuleName(_ANY)
            self.rules[_ANY] = choice(
                _container("{", row(_STRING, _COLON, value), 0, None, "}"),
                _container("[", value, 0, None, "]"),
                _STRING, _NUMBER, "true", "false", "null",
            )  # fmt: skip
        return RuleName(_ANY)

    def _reference(self, pointer: Any, where: str, depth: int) -> Pattern:
        if not isinstance(pointer, str) or (pointer != "#" and not pointer.startswith("#/")):
            raise UsageError(f"json_schema: {where[:200]} is {shown(pointer)}: expected '#' or '#/...' in this schema")
        if pointer not in self.rules:
            target = self.root
            for word in pointer.split("/")[1:]:
                key = word.replace("~1", "/").replace("~0", "~")
                if isinstance(target, Mapping) and key in target:
                    target = target[key]
                elif isinstance(target, list) and key.isascii() and key.isdecimal() and int(key[:9]) < len(target):
                    target = target[int(key[:9])]
                else:
                    raise UsageError(f"json_schema: {where[:200]} is {shown(pointer)}, which is not in this schema")
            self.rules[pointer] = NOTHING  # while it is made, so that it may refer to itself
            self.rules[pointer] = self.pattern(target, pointer, depth)
        return RuleName(pointer)

    def _any_of(self, schemas: Any, where: str, depth: int) -> Pattern:
        if not isinstance(schemas, list) or not schemas:
            raise UsageError(f"json_schema: {where[:200]} is {shown(schemas)}: expected a list of schemas")
        self._check_room(len(schemas))
        return choice(*(self.pattern(schema, f"{where}/{index}", depth) for index, schema in enumerate(schemas)))

    def _all_of(self, schemas: Any, where: str, depth: int) -> Pattern:
        if not isinstance(schemas, list) or len(schemas) != 1:
            raise UsageError(
                f"json_schema: {where[:200]}: allOf is served with exactly one schema; merge them into one"
            )
        return self.pattern(schemas[0], f"{where}/0", depth)

    # ---- objects and arrays ------------------------------------------------------------------------------------

    def _object(self, given: Mapping[str, Any], where: str, depth: int) -> Pattern:
        properties, required = given.get("properties", {}), given.get("required", [])
        if not isinstance(properties, Mapping):
            raise UsageError(f"json_schema: {where[:200]}/properties is {shown(properties)}: expected an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise UsageError(f"json_schema: {where[:200]}/required is {shown(required)}: expected a list of names")
        more = given.get("additionalProperties", not properties)
        unnamed = given.get("additionalProperties", True)
        named = {**properties, **{name: unnamed for name in required if name not in properties}}
        self._check_room(len(named))
        longest = max(map(len, named), default=0)
        if longest > _MOST_NAME:
            raise UsageError(
                f"json_schema: {where[:200]} names a property of {longest} characters: expected at most {_MOST_NAME}"
            )
        pairs = [
            row(_quoted_text(name), _COLON, self.pattern(value, f"{where}/properties/{name}", depth + 1))
            for name, value in named.items()
        ]
        extra: Pattern = NOTHING
        if more is not False:
            value = self.pattern(more, f"{where}/additionalProperties", depth + 1)
            extra = row(_not_quoted(list(named)), _COLON, value)
        # What may come from each property on, after one that was written: a rule each, or n optional ones are n² nodes.
        self.objects += 1
        rest = [RuleName(f"object {self.objects} from {number}") for number in range(len(pairs) + 1)]
        self.rules[rest[-1].name] = Repeat(row(_COMMA, extra), 0, None)
        openings: list[Pattern] = []
        for number, (name, pair) in enumerate(zip(named, pairs, strict=True)):
            said = row(_COMMA, pair)
            self.rules[rest[number].name] = row(said if name in required else maybe(said), rest[number + 1])
        for number, name in enumerate(named):
            openings.append(row(pairs[number], rest[number + 1]))
            if name in required:
                break
        else:
            openings += [row(extra, rest[-1]), EMPTY]
        body = choice(*(opening if opening is EMPTY else row(_SPACE, opening, _SPACE) for opening in openings))
        return row("{", body, "}")

    def _array(self, given: Mapping[str, Any], where: str, depth: int) -> Pattern:
        least, most = _counts(given, "minItems", "maxItems", where)
        first = given.get("prefixItems", [])
        if not isinstance(first, list):
            raise UsageError(f"json_schema: {where[:200]}/prefixItems is {shown(first)}: expected a list of schemas")
        self._check_room(len(first))
        item = self.pattern(given.get("items", True), f"{where}/items", depth + 1)
        if not first:
            return _container("[", item, least, most, "]")
        if most is not None and most < len(first):
            raise UsageError(f"json_schema: {where[:200]}: maxItems is below the {len(first)} of prefixItems")
        heads = [self.pattern(schema, f"{where}/prefixItems/{index}", depth + 1) for index, schema in enumerate(first)]
        joined = row(*(part for head in heads for part in (_COMMA, head)))
        rest = Repeat(row(_COMMA, item), max(0, least - len(first)), None if most is None else most - len(first))
        return row("[", _SPACE, Sequel(joined.parts[1:]), rest, _SPACE, "]")


def _only(given: Mapping[str, Any], served: set[str], where: str) -> None:
    for key in given:
        if key not in served:
            instead = "; use anyOf" if key == "oneOf" else ""
            beside = f" beside {', '.join(sorted(served & set(given)))}" if served & set(given) else ""
            raise UsageError(f"json_schema: {where[:200]} has {shown(key)}, which is not served{beside}{instead}")


def _types(given: Mapping[str, Any], where: str) -> Sequence[str]:
    """What `type` says, or what the other keywords are about."""
    told = given.get("type", [name for name, words in _KEYWORDS.items() if words & set(given)])
    names = [told] if isinstance(told, str) else told
    if not isinstance(names, list) or not all(isinstance(name, str) and name in _KEYWORDS for name in names):
        raise UsageError(f"json_schema: {where[:200]}/type is {shown(told)}: expected of {', '.join(_KEYWORDS)}")
    if "type" in given and not names:
        raise UsageError(f"json_schema: {where[:200]}/type is an empty list: expected at least one type")
    return names


def _listed(given: Mapping[str, Any], types: Sequence[str], where: str) -> Pattern:
    values = given.get("enum", [given.get("const")])
    if not isinstance(values, list):
        raise UsageError(f"json_schema: {where[:200]}/enum is {shown(values)}: expected a list")
    if "const" in given:
        values = [value for value in values if _same(value, given["const"])]
    if "type" in given:
        values = [value for value in values if any(_is_type(value, name) for name in types)]
    return choice(*(json.dumps(value, ensure_ascii=False, allow_nan=False) for value in values))


def _same(first: Any, other: Any) -> bool:
    return json.dumps(first, sort_keys=True) == json.dumps(other, sort_keys=True)


def _is_type(value: Any, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if name == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    kinds: dict[str, Any] = {"string": str, "object": Mapping, "array": list, "number": (int, float)}
    return isinstance(value, kinds.get(name, ()))


def _counts(given: Mapping[str, Any], low: str, high: str, where: str) -> tuple[int, int | None]:
    least, most = given.get(low, 0), given.get(high)
    for key, value in ((low, least), (high, most)):
        if value is not None and (type(value) is not int or not 0 <= value <= _MOST_COUNT):
            raise UsageError(
                f"json_schema: {where[:200]}/{key} is {shown(value)}: expected a whole number, 0 to {_MOST_COUNT:,}"
            )
    if most is not None and most < least:
        raise UsageError(f"json_schema: {where[:200]}: {high} is {most}, below {low} of {least}")
    return least, most


def _container(opens: str, item: Pattern, least: int, most: int | None, closes: str) -> Pattern:
    if most == 0:
        return row(opens, closes)
    more = Repeat(row(_COMMA, item), max(0, least - 1), None if most is None else most - 1)
    filled = row(_SPACE, item, more, _SPACE)
    return row(opens, filled if least else maybe(filled), closes)


# ---- strings ---------------------------------------------------------------------------------------------------


def _quoted(pattern: Pattern) -> Pattern:
    """The same text as it stands in a JSON string."""
    if isinstance(pattern, Chars):
        plain = Chars(_both(pattern.ranges, _PLAIN))
        escaped = [spelled for char, spelled in _ESCAPES.items() if _has(pattern.ranges, ord(char))]
        escaped += [f"\\u{code:04x}" for code in range(32) if chr(code) not in _ESCAPES and _has(pattern.ranges, code)]
        return choice(plain, *escaped) if escaped else plain
    if isinstance(pattern, Repeat):
        return Repeat(_quoted(pattern.part), pattern.least, pattern.most)
    if isinstance(pattern, Sequel | OneOf):
        return type(pattern)(tuple(_quoted(part) for part in pattern.parts))
    return pattern


def _both(first: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return merged((max(a, c), min(b, d)) for a, b in first for c, d in other if max(a, c) <= min(b, d))


def _has(ranges: Sequence[tuple[int, int]], code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)


def _quoted_text(content: str) -> Pattern:
    try:
        content.encode()
    except UnicodeEncodeError:
        raise UsageError(f"json_schema: {shown(content)} is not Unicode text: expected no lone surrogates") from None
    return text(json.dumps(content, ensure_ascii=False))


def _string(given: Mapping[str, Any], where: str) -> Pattern:
    least, most = _counts(given, "minLength", "maxLength", where)
    limits = [key for key in ("pattern", "format", "minLength", "maxLength") if key in given]
    for key in ("pattern", "format"):
        if key in given:
            if len(limits) > 1:
                raise UsageError(f"json_schema: {where[:200]} has {' and '.join(limits)}: only one of them is served")
            value = given[key]
            if not isinstance(value, str) or (key == "format" and value not in _FORMATS):
                expected = "a text" if key == "pattern" else f"one of {', '.join(_FORMATS)}"
                raise UsageError(f"json_schema: {where[:200]}/{key} is {shown(value)}: expected {expected}")
            pattern = parse_regex(value, search=True) if key == "pattern" else parse_regex(_FORMATS[value])
            return row('"', _quoted(pattern), '"')
    return row('"', Repeat(_STRING_CHAR, least, most), '"')


def _not_quoted(names: Sequence[str]) -> Pattern:
    """A JSON string without escapes that is none of these."""

    def differs(tails: Sequence[str]) -> Pattern:
        """Texts that are none of these tails."""
        heads = sorted({tail[0] for tail in tails if tail})
        free = Chars(_both(_PLAIN, others((ord(head), ord(head)) for head in heads)))
        branches: list[Pattern] = [row(free, Repeat(Chars(_PLAIN), 0, None))]
        for head in heads:
            branches.append(row(head, differs([tail[1:] for tail in tails if tail[:1] == head])))
        return choice(*branches) if "" in tails else choice(EMPTY, *branches)

    # A name that needs an escape cannot be written by accident.
    return row('"', differs([name for name in names if all(_has(_PLAIN, ord(char)) for char in name)]), '"')


# ---- numbers ---------------------------------------------------------------------------------------------------


def _integer(given: Mapping[str, Any], where: str) -> Pattern:
    bounds: dict[str, int] = {}
    for key, inward in (("minimum", 0), ("exclusiveMinimum", 1), ("maximum", 0), ("exclusiveMaximum", -1)):
        if key in given:
            if type(given[key]) is not int or abs(given[key]) > 10**18:
                raise UsageError(
                    f"json_schema: {where[:200]}/{key} is {shown(given[key])}: expected a whole number up to 10^18"
                )
            bounds[key] = given[key] + inward
    least = [bounds[key] for key in ("minimum", "exclusiveMinimum") if key in bounds]
    most = [bounds[key] for key in ("maximum", "exclusiveMaximum") if key in bounds]
    low, high = max(least, default=min([-(10**_MOST_DIGITS) + 1, *most])), min(most, default=10**_MOST_DIGITS - 1)
    high = high if most else max(high, low)
    if low > high:
        raise UsageError(f"json_schema: {where[:200]}: no whole number is between {low} and {high}")
    branches: list[Pattern] = []
    if low < 0:
        branches.append(row("-", _between(max(1, -high), -low)))
    if high >= 0:
        branches.append(_between(max(0, low), high))
    return choice(*branches)


def _between(low: int, high: int) -> Pattern:
    """Whole numbers from 0 on, without leading zeros."""
    branches = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        branches.append(_same_digits(str(first), str(min(high, 10**length - 1))))
    return choice(*branches)


def _same_digits(low: str, high: str) -> Pattern:
    if not low:
        return EMPTY
    if set(low) == {"0"} and set(high) == {"9"}:
        return Repeat(_DIGIT, len(low), len(low))
    first, last = int(low[0]), int(high[0])
    if first == last:
        return row(low[0], _same_digits(low[1:], high[1:]))
    rest = len(low) - 1
    branches: list[Pattern] = [
        row(low[0], _same_digits(low[1:], "9" * rest)), row(high[0], _same_digits("0" * rest, high[1:]))
    ]  # fmt: skip
    if last - first > 1:
        middle = chars("".join(str(digit) for digit in range(first + 1, last)))
        branches.append(row(middle, Repeat(_DIGIT, rest, rest)))
    return choice(*branches)


_WHOLE = row(maybe("-"), choice("0", row(chars("123456789"), Repeat(_DIGIT, 0, _MOST_DIGITS - 1))))
_NUMBER = row(
    _WHOLE,
    maybe(row(".", Repeat(_DIGIT, 1, _MOST_DIGITS))),
    maybe(row(chars("eE"), maybe(chars("+-")), Repeat(_DIGIT, 1, 2))),
)
_STRING_CHAR = choice(Chars(_PLAIN), row("\\", choice(chars('"\\/bfnrt'), row("u", Repeat(_DIGIT, 4, 4)))))
_STRING = row('"', Repeat(_STRING_CHAR, 0, None), '"')
