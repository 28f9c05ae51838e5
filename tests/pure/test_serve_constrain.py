"""Constraints without a model: whatever is drawn under one matches it, and what matches can be drawn."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.data.tokenizer import Bytes, Unknown
from tilemesh.serve.constrain import machine as machines
from tilemesh.serve.constrain.machine import DEAD, ByteMachine
from tilemesh.serve.constrain.mask import Constraint, Constraints, Cursor, TokenTree
from tilemesh.serve.constrain.pattern import Grammar, merged, others, utf8_ranges
from tilemesh.serve.constrain.regex import parse_regex
from tilemesh.serve.constrain.schema import parse_schema


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


# Characters and regular expressions -----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 0x3000)), max_size=4), st.characters())
def test_bytes_of_a_range_are_those_of_its_characters(spans: list[tuple[int, int]], char: str) -> None:
    ranges = merged((first, min(first + more, 0x10FFFF)) for first, more in spans)
    edges = [chr(code) for first, last in ranges for code in (first, last)]
    for one in [char, *edges]:
        content = one.encode()
        found = [
            sequence
            for sequence in utf8_ranges(ranges)
            if len(sequence) == len(content)
            and all(low <= byte <= high for (low, high), byte in zip(sequence, content, strict=True))
        ]
        assert len(found) == any(first <= ord(one) <= last for first, last in ranges)
    assert others(others(ranges)) == ranges


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
        "{",
        "x{",
        "[]a]",
        "[a-]",
    ]
)


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    times = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?", "??", "{,2}"])
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
    machine = ByteMachine(Grammar(parse_regex(source), {}))
    for text in texts:
        state = machine.after(machine.start, text.encode())
        assert (state != DEAD and machine.accepts(state)) == bool(re.fullmatch(source, text, re.ASCII))
    made = written(Constraint(Grammar(parse_regex(source), {}), *KNOWN._vocabulary()), random.Random(seed), 40)
    if made is not None:
        assert re.fullmatch(source, made.decode(), re.ASCII)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("(a", "group that does not end"),
        ("a)", "nobody opened"),
        ("*", "nothing to repeat"),
        ("a**", "repetition of"),
        ("a*+", "possessive"),
        ("(?=a)", "looking ahead"),
        ("(?<=a)b", "looking behind"),
        ("(a)\\1", r"\\1"),
        ("(?i)a", "a flag"),
        ("\\bword", r"\\b"),
        ("a^b", "beginning"),
        ("a$b", "an end"),
        ("(a$)", "an end"),
        ("[a", "does not end"),
        ("[z-a]", "ends before"),
        ("[\\d-z]", "no characters"),
        ("\\xg1", "digits"),
        ("\\ud800", "digits"),
        ("a{3,2}", "fewer"),
        ("a{99999}", "times"),
        ("a{99999999999999999999}", "more than 10,000 times"),
        ("a{0,999999999}", "more than 10,000 times"),
        ("a{999999999,}", "more than 10,000 times"),
        ("a{" + "9" * 5000 + "}", "more than 10,000 times"),
        ("(?P=n)", "reference"),
        ("\\", "regex"),
        ("(?#x)", "comment"),
        ("(" * 65 + ")" * 65, "groups in one another"),
        ("[^\\s\\S]", "no text at all"),
        ("((a{1000}){1000})", "nodes"),
        ("x" * 100_001, "long"),
    ],
)
def test_what_is_no_regular_expression_here_is_refused(source: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        KNOWN.get(source, None)


def test_states_that_are_forgotten_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilemesh.serve.constrain.mask.MOST_STATES", 3)
    constraint = Constraint(Grammar(parse_regex("(a|b)*a(a|b){4}"), {}), *KNOWN._vocabulary())
    one, other = Cursor(constraint), Cursor(constraint)
    texts = {one: "", other: ""}
    draw = random.Random(2)
    for _ in range(60):
        for cursor in (one, other):
            (after,) = cursor.ahead([])
            assert after is not None
            assert after.may_end == bool(re.fullmatch("(a|b)*a(a|b){4}", texts[cursor]))
            token = int(draw.choice(np.flatnonzero(after.mask_V[:257])))
            cursor.add(token)
            texts[cursor] += WORDS.decode([token])
    assert constraint.epoch > 5
    assert constraint.machine.size < 300


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=60), REGEXES)
def test_a_mask_is_each_tokens_own_bytes(words: list[bytes], source: str) -> None:
    machine = ByteMachine(Grammar(parse_regex(source), {}))
    found = TokenTree([None, *words]).allowed(machine, machine.start)
    assert [bool(one) for one in found] == [False, *(machine.after(machine.start, word) != DEAD for word in words)]


def test_guesses_are_looked_at_one_after_the_other() -> None:
    constraint = KNOWN.get("abc|abd", None)
    assert constraint is not None
    a, b, c, d = (1 + byte for byte in b"abcd")
    cursor = Cursor(constraint)
    first, second, third, fourth = cursor.ahead([a, b, c])
    assert first is not None
    assert second is not None
    assert third is not None
    assert fourth is None  # complete: nothing is drawn there
    assert first.mask_V[a]
    assert not first.mask_V[b]
    assert second.mask_V[b]
    assert third.mask_V[c]
    assert third.mask_V[d]
    assert cursor.ahead([b, a])[1:] == [None, None]  # behind a guess that may not be, nothing matters
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
        low = schema.get("minimum", -math.inf) <= value and schema.get("exclusiveMinimum", -math.inf) < value
        return low and value <= schema.get("maximum", math.inf) and value < schema.get("exclusiveMaximum", math.inf)
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
    constraint = Constraint(parse_schema(schema), *KNOWN._vocabulary())
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
            ["{}", '{"a": [1, {"b": null}], "c":"\\u0041"}', '{\n  "a": 1\n}'],
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
            ["-106", "99", "-0", "01", ""],
        ),
        ({"type": "number"}, ["0", "-1.5e-9", "12"], ["1.", ".5", "01", "+1", "1e"]),
        (
            {"type": "string", "format": "date"},
            ['"2024-02-28"', '"1999-12-31"'],
            ['"2024-02-30"', '"2024-13-01"', '"24-01-01"'],
        ),
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
    machine = ByteMachine(parse_schema(schema))
    for text, wanted in [*((one, True) for one in good), *((one, False) for one in bad)]:
        state = machine.after(machine.start, text.encode())
        assert (state != DEAD and machine.accepts(state)) == wanted, text


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"oneOf": [{"type": "null"}]}, "oneOf.*use anyOf"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
        ({"type": "number", "minimum": 1}, "minimum"),
        ({"type": ["number", "integer"], "minimum": 1}, "minimum"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {}}, "not"),
        ({"$ref": "http://x/y"}, "expected '#'"),
        ({"$ref": "#/$defs/x"}, "not in this schema"),
        ({"$ref": "#"}, "refers to itself"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "refers to itself"),
        ({"$ref": "#/x", "type": "null", "x": {}}, "not served beside"),
        ({"type": "text"}, "expected of object"),
        ({"type": []}, "empty list"),
        ({"enum": 3}, "expected a list"),
        ({"enum": []}, "no text at all"),
        (False, "no text"),
        ({"type": "string", "format": "email"}, "expected one of date"),
        ({"type": "string", "pattern": "(?=a)"}, "looking"),
        ({"type": "string", "pattern": "a", "maxLength": 2}, "only one of them"),
        ({"type": "string", "minLength": -1}, "whole"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no whole number"),
        ({"type": "integer", "minimum": 0.5}, "whole number"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "below"),
        ({"allOf": [{}, {}]}, "exactly one"),
        ({"items": 3}, "schema"),
        ({"type": "object", "properties": []}, "expected an object"),
        ({"type": "object", "required": "a"}, "list of names"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False}, "no text"),
        ({"type": "object", "properties": {"a" * 101: {}}}, "101 characters"),
        ({"properties": {"\ud800": {}}}, "surrogates"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no text at all"),
        ({"type": "string", "maxLength": 10_000}, "nodes"),
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


def test_machines_are_compiled_once_and_the_oldest_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilemesh.serve.constrain.mask._KEPT_MACHINES", 2)
    known = Constraints(Bytes(), frozenset())
    first = known.get("a", None)
    known.get("b", None)
    assert known.get("a", None) is first
    known.get("c", None)
    assert known.get("a", None) is first
    assert len(known._made) == 2


def test_the_limit_on_nodes_is_the_documented_one() -> None:
    assert machines.MOST_NODES == 30_000


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"name{number}": 3 for number in range(751)}},
        {"anyOf": [3] * 751},
        {"type": "array", "prefixItems": [3] * 751},
    ],
    ids=["properties", "anyOf", "prefixItems"],
)
def test_too_many_schemas_are_refused_before_the_first_is_read(schema: Any) -> None:
    with pytest.raises(UsageError, match="holds more than 750 schemas"):
        parse_schema(schema)
