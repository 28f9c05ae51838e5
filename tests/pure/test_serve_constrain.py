"""Constraints without a model: whatever is drawn under one matches it, and what matches can be drawn."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.data.tokenizer import Bytes, Unknown
from tilemesh.serve.constrain.mask import Constraint, Constraints, Cursor

pytest.importorskip("llguidance")


class Words:
    """A vocabulary of words of several bytes, parts of characters among them, and all single bytes; 0 is the end."""

    vocabulary, name, end = 400, "words", 0

    def __init__(self, seed: int = 5) -> None:
        draw = random.Random(seed)
        letters = [b"a", b"b", b"1", b"0", b'"', b"{", b"}", b"[", b"]", b",", b":", b" ", b"\\", b"\n", b"-", b"."]
        letters += [b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b'":', b'", "', b"null", b"true", b'{"', b"\xf0\x9f"]
        made = [b"".join(draw.choices(letters, k=draw.choice((2, 2, 3, 5)))) for _ in range(self.vocabulary - 257)]
        self.words: list[bytes | None] = [None, *(bytes([byte]) for byte in range(256)), *made]

    def spell(self, beginning: bool) -> list[bytes | None]:
        return list(self.words)

    def encode(self, text: bytes, special: bool = False) -> Any:
        raise NotImplementedError

    def decode(self, tokens: Any) -> str:
        return b"".join(self.words[token] or b"" for token in tokens).decode(errors="replace")


WORDS = Words()
KNOWN = Constraints(WORDS, frozenset({0}))


def written(constraint: Constraint, draw: random.Random, most: int = 300) -> bytes | None:
    """A random text under a constraint, every token of it one that is allowed; None if it was still not complete."""
    cursor, text = Cursor(constraint), b""
    for _ in range(most):
        (after,) = cursor.ahead([])
        assert after is not None
        tokens = np.flatnonzero(after.mask_V)
        assert len(tokens) or after.may_end, f"nothing can follow {text!r}"
        if after.may_end and (not len(tokens) or draw.random() < 0.3):
            return text
        token = int(draw.choice(tokens))
        text += WORDS.words[token] or b""
        if cursor.add(token):
            return text
    return None


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether a text can be written under a constraint byte by byte, and may end there."""
    cursor = Cursor(constraint)
    tokens = [1 + byte for byte in text.encode()]
    for token in tokens:
        if cursor._parser.validate_tokens([int(constraint.spellings.by_place[1][token])]) != 1:
            return False
        cursor.add(token)
    return bool(cursor._parser.is_accepting())


def compiled(regex: str | None = None, schema: Any = None) -> Constraint:
    constraint = KNOWN.get(regex, schema)
    assert constraint is not None
    return constraint


# Regular expressions --------------------------------------------------------------------------------------------------


ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "ab",
        "é",
        "€",
        ".",
        "\\d",
        "\\w",
        "[a-c]",
        "[^a]",
        "[^\\W\\d]",
        "[é-ü€]",
        "\\.",
        "\\n",
        "\\x41",
        "[]a]",
        "[a-]",
    ]
)


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    times = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?", "??"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, times).map(lambda two: f"({two[0]}){two[1]}"),
        inner.map(lambda one: f"(?P<n{abs(hash(one))}>{one}|)"),
    )


REGEXES = st.recursive(ATOMS, _larger, max_leaves=8).filter(lambda source: _sound(source))


def _sound(source: str) -> bool:
    try:
        re.compile(source)
    except re.error:  # two groups of one name
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(REGEXES, st.lists(st.text("abc1é€A.\n{x_", max_size=6), max_size=8), st.integers(0, 2**32))
def test_a_regex_is_what_re_says_it_is(source: str, texts: list[str], seed: int) -> None:
    constraint = compiled(source)
    for text in texts:
        assert accepts(constraint, text) == bool(re.fullmatch(source, text, re.ASCII))
    made = written(constraint, random.Random(seed), 40)
    if made is not None:
        assert re.fullmatch(source, made.decode(), re.ASCII)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("(a", "unclosed group"),
        ("a)", "unopened"),
        ("*", "repetition"),
        ("(?=a)", "look-around"),
        ("(?<=a)b", "look-around"),
        ("(a)\\1", "backreferences"),
        ("\\bword", "lookarounds"),
        ("a$b", "lookarounds"),
        ("[z-a]", "invalid"),
        ("a{3,2}", "invalid"),
        ("a{99999999999999999999}", "invalid"),
        ("(" * 300 + ")" * 300, "invalid"),
        ("[^\\s\\S]", "no text at all"),
        ("x" * 100_001, "long"),
    ],
)
def test_what_is_no_regular_expression_here_is_refused(source: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        KNOWN.get(source, None)


def test_guesses_are_looked_at_one_after_the_other() -> None:
    constraint = compiled("[ab]b[cd]")
    a, b, c, d = (1 + byte for byte in b"abcd")
    cursor = Cursor(constraint)
    first, second, third, fourth = cursor.ahead([a, b, c])
    assert first is not None
    assert second is not None
    assert third is not None
    assert fourth is None  # complete: nothing is drawn there
    assert first.mask_V[a]
    assert first.mask_V[b]
    assert not first.mask_V[c]
    assert second.mask_V[b]
    assert third.mask_V[c]
    assert third.mask_V[d]
    assert cursor.ahead([c, a])[1:] == [None, None]  # behind a guess that may not be, nothing matters
    assert [cursor.add(token) for token in (a, b, d)] == [False, False, True]


# JSON schemas ---------------------------------------------------------------------------------------------------------


def holds(schema: Any, value: Any, root: Any) -> bool:
    """Whether a value is what a schema allows, by the schema's own definition."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        found = root
        for word in schema["$ref"].split("/")[1:]:
            found = found[word]
        return holds(found, value, root)
    types = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "null": type(None),
        "number": (int, float),
        "integer": int,
    }
    told = schema.get("type")
    names = [told] if isinstance(told, str) else told
    if names and not any(
        isinstance(value, types[name]) and (not isinstance(value, bool) or name == "boolean") for name in names
    ):
        return False
    if "enum" in schema and not any(json.dumps(one) == json.dumps(value) for one in schema["enum"]):
        return False
    if "const" in schema and json.dumps(schema["const"]) != json.dumps(value):
        return False
    if "anyOf" in schema and not any(holds(one, value, root) for one in schema["anyOf"]):
        return False
    if isinstance(value, str):
        length = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
        return length and ("pattern" not in schema or bool(re.search(schema["pattern"], value, re.ASCII)))
    if isinstance(value, int | float) and not isinstance(value, bool):
        low = schema.get("minimum", value) <= value and not value <= schema.get("exclusiveMinimum", math.nan)
        return low and value <= schema.get("maximum", value) and not value >= schema.get("exclusiveMaximum", math.nan)
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
            return False
        rules = [*first, *[schema.get("items", True)] * (len(value) - len(first))]
        return all(holds(rule, one, root) for rule, one in zip(rules, value, strict=False))
    if isinstance(value, dict):
        named = schema.get("properties", {})
        if not set(schema.get("required", [])) <= set(value):
            return False
        more = schema.get("additionalProperties", True)
        return all(holds(named.get(key, more), one, root) for key, one in value.items())
    return True


NAMES = st.sampled_from(["a", "ab", "abc", "b", "né", 'q"', "", "x y", "1"])
LEAVES = st.one_of(
    st.sampled_from(
        [True, {}, {"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": ["null", "integer"]}]
    ),
    st.tuples(st.integers(-150, 150), st.integers(0, 400)).map(
        lambda two: {"type": "integer", "minimum": two[0], "exclusiveMaximum": two[0] + two[1] + 1}
    ),
    st.sampled_from(
        [{"exclusiveMinimum": 7}, {"type": "integer", "maximum": -12}, {"type": "integer", "minimum": 10**16}]
    ),
    st.tuples(st.integers(0, 2), st.integers(0, 3)).map(
        lambda two: {"type": "string", "minLength": two[0], "maxLength": sum(two)}
    ),
    st.sampled_from(["^[ab]{1,3}$", "a", "^1", "0$", 'a"\\\\b|\\n', "^[^a-z]{0,2}$", "^(é|a)|b$"]).map(
        lambda source: {"type": "string", "pattern": source}
    ),
    st.lists(st.sampled_from(["a", 'b"\n', 1, -2.5, None, True, {"k": [1]}, "é"]), min_size=1, max_size=3).map(
        lambda some: {"enum": some}
    ),
    st.just({"const": {"z": ["y"]}}),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(
        st.dictionaries(NAMES, inner, max_size=4), st.lists(NAMES, max_size=2), st.sampled_from([None, False, True, 1])
    ).map(_object)


def _object(parts: tuple[dict[str, Any], list[str], Any]) -> dict[str, Any]:
    properties, required, more = parts
    made: dict[str, Any] = {"type": "object", "properties": properties, "title": "ignored"}
    made["required"] = [name for name in required if name in properties or more is not False]
    if more is not None:
        made["additionalProperties"] = {"type": "integer"} if more == 1 and more is not True else more
    return made


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda three: {"type": "array", "items": three[0], "minItems": three[1], "maxItems": sum(three[1:])}
        ),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda some: {"prefixItems": some, "type": "array", "items": False}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(SCHEMAS, st.integers(0, 2**32))
def test_whatever_is_drawn_under_a_schema_is_what_it_allows(schema: Any, seed: int) -> None:
    draw = random.Random(seed)
    constraint = compiled(None, schema)
    for _ in range(3):
        made = written(constraint, draw, 120)
        if made is not None:
            value = json.loads(made)
            assert holds(schema, value, schema), (schema, made)


TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "right": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#"}]}},
    "required": ["right"],
    "$defs": {"leaf": {"type": "integer", "minimum": 0, "maximum": 9}},
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "object"},
            ["{}", '{"a": [1, {"b": null}], "c":"A"}', '{\n  "a": 1\n}'],
            ["[]", "{,}", '{"a"}', "1"],
        ),
        (TREE, ['{"right":1}', '{"left": {"right": 0}, "right": {"right": 9}}'], ['{"left":{}}', '{"right":10}', "{}"]),
        (
            {"type": "object", "properties": {"a": True, "b": True, "c": True}, "required": ["b"]},
            ['{"b":1}', '{"a":1,"b":2}', '{"a":[],"b":{},"c":""}'],
            ['{"a":1}', '{"b":1,"a":1}', '{"b":1,}', '{"b":1,"d":1}'],
        ),
        (
            {"properties": {"ab": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
            ['{"ab":null}', '{"a":1}', '{"abc":1,"b":2}', "{}"],
            ['{"ab":1}', '{"a":null}', '{"a":1,"ab":2}'],
        ),
        (
            {"type": "integer", "minimum": -105, "maximum": 98},
            ["-105", "0", "98", "-9", "7"],
            ["-106", "99", "01", ""],
        ),
        ({"type": "number"}, ["0", "-1.5e-9", "12"], ["1.", ".5", "01", "+1", "1e"]),
        (
            {"type": "string", "format": "date"},
            ['"2024-02-28"', '"1999-12-31"'],
            ['"2024-02-30"', '"2024-13-01"', '"24-01-01"', '"1901-02-29"'],
        ),
        (
            {"type": "string", "format": "date", "pattern": "^2"},
            ['"2024-02-28"', '"2023-02-28"'],
            ['"2023-02-29"', '"1999-01-01"'],
        ),
        (
            {"type": "string", "format": "time", "pattern": "Z$"},
            ['"10:10:10Z"'],
            ['"10:10:60Z"', '"10:10:10+01:00"'],
        ),
        (
            {"type": "string", "format": "date-time"},
            ['"2024-02-28T23:59:59Z"', '"1999-10-31T00:00:00.5+01:00"'],
            ['"1901-02-29T00:00:00Z"', '"2024-04-31T00:00:00Z"', '"2024-02-28T24:00:00Z"'],
        ),
        (  # as pydantic writes nine optional dates: nothing is combined here
            {
                "type": "object",
                "properties": {
                    name: {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]} for name in "abcdefghi"
                },
            },
            ['{"a":"2024-02-01","i":null}'],
            ['{"a":"2024-02-01","i":1}'],
        ),
        (
            {"type": "string", "format": "uri-reference"},
            ['"https://a.b:80/c%20d/?q=1#x"', '"/a/b.txt"', '"../a"', '"?a"', '"mailto:a@b"', '""'],
            ['"a b"', '"http://[x"', '"%zz"', '"1:a"', '"a\\\\b"', '"a#b#c"', '"http://a:b"'],
        ),
        ({"type": "string", "format": "iri"}, ['"http://a.b/c"'], ['"a"', '"http://a b"']),
        ({"type": "string", "format": "idn-email"}, ['"a@b.de"'], ['"a"']),
        ({"type": "string", "format": "json-pointer"}, ['""', '"/a~1b/0"'], ['"a"', '"/~2"']),
        ({"type": "string", "format": "iri-reference", "pattern": "^a"}, ['"a/b"'], ['"b"', '"a b"']),
        *(
            ({"type": "string", "format": form, "maxLength": 3}, ['"(a"'], ["1", '"abcd"'])
            for form in ("password", "byte", "binary", "int64", "regex")
        ),
        ({"type": "integer", "format": "int32"}, ["7"], ["7.5"]),
        ({"type": "string", "format": "ipv4"}, ['"127.0.0.1"', '"255.255.255.255"'], ['"256.1.1.1"', '"1.1.1"']),
        (
            {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
            ["[true]", "[true, false]"],
            ["[]", "[true,true,true]", "[1]"],
        ),
        ({"allOf": [{"type": "null"}], "description": "x"}, ["null"], ["", "nul"]),
        ({"enum": ["a", 1], "type": "string"}, ['"a"'], ["1"]),
    ],
)
def test_a_schema_accepts_what_it_should(schema: Any, good: list[str], bad: list[str]) -> None:
    constraint = compiled(None, schema)
    for text, wanted in [*((one, True) for one in good), *((one, False) for one in bad)]:
        assert accepts(constraint, text) == wanted, text


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"oneOf": [{"minimum": 1}, {"maximum": 2}]}, "oneOf"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"not": {}}, "not"),
        ({"$ref": "http://x/y"}, "not present"),
        ({"properties": {"a": {"$id": "http://x/y"}}}, "id of its own"),
        ({"$ref": "#/$defs/x"}, "defs/x"),
        ({"type": "text"}, "Invalid type"),
        ({"enum": 3}, "enum"),
        ({"enum": []}, "Unsatisfiable"),
        ({"$ref": "#"}, "no text at all"),
        (False, "some text"),
        (3, "expected a schema"),
        ({"type": "string", "format": 3}, "format"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "greater"),
        ({"items": 3}, "schema"),
        ({"type": "object", "properties": []}, "expected schemas"),
        ({"type": "object", "minProperties": 2}, "may come twice"),
        (
            {"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
            "Unsatisfiable",
        ),
        ({"properties": {"\ud800": {}}}, "hex escape"),
        ({"const": "a\x00b"}, "control character"),
        ({"type": "string", "pattern": "^a\\x01b$"}, "control character"),
        ({"type": "integer", "multipleOf": 9_999_991}, "multipleOf"),
        ({"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]}, "multipleOf"),
        ({"allOf": [{"anyOf": [{"minimum": low} for low in range(9)]} for _ in range(9)]}, "too large"),
        ({"allOf": [{"type": "string", "pattern": f"a{number}"} for number in range(40)]}, "too many patterns"),
        ({"default": {"allOf": [{"pattern": "a"}] * 40}, "$ref": "#/default"}, "no schema of this document"),
    ],
)
def test_what_a_schema_asks_and_is_not_served_is_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        KNOWN.get(None, schema)


def test_a_schema_that_nests_too_deeply_is_refused() -> None:
    schema: Any = {"type": "null"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UsageError, match="deep"):
        KNOWN.get(None, schema)


def test_a_vocabulary_without_text_is_refused_and_bytes_need_no_library() -> None:
    with pytest.raises(UsageError, match="no tokenizer"):
        Constraints(Unknown(16), frozenset()).get("a", None)
    made = Constraints(Bytes(), frozenset({0})).get(".*", None)
    assert made is not None
    (after,) = Cursor(made).ahead([])
    assert after is not None
    assert after.may_end
    assert not after.mask_V[0]  # the end is no character, though a dot would match it
    assert not after.mask_V[0xC0]  # no text has this byte
    assert after.mask_V[0xC3]


def test_constraints_are_compiled_once_and_the_oldest_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilemesh.serve.constrain.mask._KEPT", 2)
    known = Constraints(Bytes(), frozenset())
    first = known.get("a", None)
    known.get("b", None)
    assert known.get("a", None) is first
    known.get("c", None)
    assert known.get("a", None) is first
    assert known._compiled.cache_info().currsize == 2


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"regex needs the package `llguidance`: pip install 'tilemesh\[serve\]'"):
        Constraints(Bytes(), frozenset()).get("a", None)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"name{number}": {} for number in range(2001)}},
        {"anyOf": [{}] * 2001},
        {"type": "array", "prefixItems": [{}] * 2001},
    ],
    ids=["properties", "anyOf", "prefixItems"],
)
def test_too_many_schemas_are_refused_before_the_first_is_read(schema: Any) -> None:
    with pytest.raises(UsageError, match="holds more than 2,000 schemas"):
        KNOWN.get(None, schema)


# Everyday schemas -----------------------------------------------------------------------------------------------------


def test_a_name_has_one_spelling() -> None:
    opened = compiled(None, {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True})
    assert accepts(opened, '{"a":1,"b":"x"}')
    assert not accepts(opened, '{"a":1,"\\u0061":"x"}')


def _pydantic_schemas() -> dict[str, Any]:
    pydantic = pytest.importorskip("pydantic")
    from datetime import date, datetime
    from typing import Annotated, Literal

    field, model = pydantic.Field, pydantic.create_model
    cat = model("Cat", kind=(Literal["cat"], ...), lives=(Annotated[int, field(ge=0, le=9)], ...))
    dog = model("Dog", kind=(Literal["dog"], ...), breed=(str | None, None))
    union = Annotated[cat | dog, field(discriminator="kind")]
    number = model("Number", op=(Literal["number"], ...), value=(Annotated[float, field(gt=0, lt=10)], ...))
    add = model("Add", op=(Literal["add"], ...), left=("Expression", ...), right=("Expression", ...))
    expression = Annotated[number | add, field(discriminator="op")]
    add.model_rebuild(_types_namespace={"Expression": expression, "Number": number, "Add": add})
    price = model("Price", currency=(Annotated[str, field(pattern="^[A-Z]+$", min_length=3, max_length=3)], ...),
                  at=(datetime, ...), day=(date, ...), share=(Annotated[float, field(ge=0, le=1)], 0.5))  # fmt: skip
    return {name: pydantic.TypeAdapter(kind).json_schema() for name, kind in
            {"pet": union, "expression": expression, "price": price, "tuple": tuple[int, str]}.items()}  # fmt: skip


def test_what_is_drawn_under_models_of_pydantic_is_what_they_read() -> None:
    pydantic = pytest.importorskip("pydantic")
    draw, finished = random.Random(2), 0
    for name, schema in _pydantic_schemas().items():
        for _ in range(12):
            text = written(compiled(None, schema), draw, 200)
            if text is None:
                continue
            finished += 1
            value = json.loads(text)
            if name == "pet":
                assert set(value) <= ({"kind", "lives"} if value["kind"] == "cat" else {"kind", "breed"})
            elif name == "price":
                assert re.fullmatch("[A-Z]{3}", value["currency"])
                assert 0 <= value.get("share", 0) <= 1
                pydantic.TypeAdapter(__import__("datetime").datetime).validate_python(value["at"])
            elif name == "expression":
                assert value["op"] in ("number", "add")
    assert finished > 20
