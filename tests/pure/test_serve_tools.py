"""Calls of tools in the forms that families write, however a stream is cut; and what a body may say of tools."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from tilemesh.core.errors import UsageError
from tilemesh.data.tokenizer import Bytes
from tilemesh.serve.chat import ChatTemplate
from tilemesh.serve.constrain.schema import CALLS
from tilemesh.serve.protocol import ChatMessage, RefusedError, read_chat
from tilemesh.serve.tools import FORMS, THINKING, AnswerReader, ToolUse, form_of, whole_message

HERMES, MISTRAL, LLAMA = FORMS
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
            "required": ["city"],
            "$defs": {"city": {"type": "string"}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
USE = ToolUse((WEATHER, TIME))
CALL = '{"name": "weather", "arguments": {"city": "Ulm"}}'


def read(text: str, cut: int, use: ToolUse = USE, form: Any = HERMES, **options: Any) -> list[tuple[str, str, int]]:
    """Deltas of a text that comes in pieces, neighbours of one kind joined."""
    reader, joined = AnswerReader(use, form, **options), list[tuple[str, str, int]]()
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    for number, piece in enumerate([*pieces, ""]):
        for delta in reader.add(piece, last=number == len(pieces)):
            if joined and joined[-1][::2] == (delta.kind, delta.call) and delta.kind != "call":
                joined[-1] = (delta.kind, joined[-1][1] + delta.text, delta.call)
            else:
                joined.append(tuple(delta))  # type: ignore[arg-type]
    return joined


ULM = [("call", "weather", 0), ("arguments", '{"city": "Ulm"}', 0)]
BOTH = [*ULM, ("call", "time", 1), ("arguments", "{}", 1)]


@pytest.mark.parametrize("cut", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, f"Sure. \n<tool_call>\n{CALL}\n</tool_call>", [("content", "Sure.", 0), *ULM]),
        (HERMES, f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>', BOTH),
        (HERMES, "a <tool talk", [("content", "a <tool talk", 0)]),
        (HERMES, "<tool_call>no</tool_call> x", [("content", "<tool_call>no</tool_call> x", 0)]),
        (HERMES, "Hm <tool_call>", [("content", "Hm<tool_call>", 0)]),
        (HERMES, '<tool_call>{"name": "we', [("content", '<tool_call>{"name": "we', 0)]),
        (HERMES, CALL.join(("<tool_call>", "</tool_call>")).replace("weather", "other"),
         [("content", f"<tool_call>{CALL}</tool_call>".replace("weather", "other"), 0)]),
        (MISTRAL, f'[TOOL_CALLS][{CALL}, {{"name": "time", "arguments": {{}}}}]', BOTH),
        (MISTRAL, "Hello [TOOL", [("content", "Hello [TOOL", 0)]),
        (MISTRAL, 'Sure.[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}', [("content", "Sure.", 0), *ULM]),
        (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}[TOOL_CALLS]time[ARGS]{}', BOTH),
        (MISTRAL, '[TOOL_CALLS]weather{"city": "Ulm"}\n[TOOL_CALLS]time{}', BOTH),
        (MISTRAL, '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Ulm"}', ULM),
        (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "a[TOOL_CALLS]time[ARGS]{}"}',
         [ULM[0], ("arguments", '{"city": "a[TOOL_CALLS]time[ARGS]{}"}', 0)]),
        (MISTRAL, "[TOOL_CALLS]other[ARGS]{}", [("content", "[TOOL_CALLS]other[ARGS]{}", 0)]),
        (MISTRAL, '[TOOL_CALLS]time[ARGS]{"a', [("content", '[TOOL_CALLS]time[ARGS]{"a', 0)]),
        (LLAMA, CALL.replace("arguments", "parameters"), ULM),
        (LLAMA, f'<|python_tag|>{CALL}; {{"name": "time", "arguments": {{}}}}'.replace("argument", "parameter"), BOTH),
        (LLAMA, '{"a": 3}', [("content", '{"a": 3}', 0)]),
        (LLAMA, f"Well: {CALL}", [("content", f"Well: {CALL}", 0)]),
    ],
)  # fmt: skip
def test_each_form_is_read_however_it_is_cut(form: Any, text: str, expected: list[Any], cut: int) -> None:
    assert read(text, cut, form=form) == expected


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_reasoning_comes_apart(cut: int) -> None:
    text = f"<think>\nhm, well\n</think>\n\nGood.\n<tool_call>{CALL}</tool_call>"
    assert read(text, cut, thinks=THINKING[0]) == [("reasoning", "hm, well", 0), ("content", "Good.", 0), *ULM]
    inside = read("hm</think>yes", cut, ToolUse(), None, thinks=THINKING[0], thinking=True)
    assert inside == [("reasoning", "hm", 0), ("content", "yes", 0)]
    theirs = text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    assert read(theirs, cut, thinks=THINKING[1]) == [("reasoning", "hm, well", 0), ("content", "Good.", 0), *ULM]
    assert read("<think>x</think>", cut) == [("content", "<think>x</think>", 0)]  # a model that has no such marks


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_call_that_must_come_has_no_marks(cut: int) -> None:
    assert read(f"[{CALL}]", cut, ToolUse((WEATHER, TIME), "required"), None) == ULM
    named = ToolUse((WEATHER,), "named", "weather")
    assert read('{"city": "Ulm"}', cut, named, None) == ULM
    assert read(CALL, cut, ToolUse((WEATHER,), "none")) == [("content", CALL, 0)]


def test_a_whole_message_has_its_calls_and_one_alone_where_they_may_not_be_parallel() -> None:
    twice = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    message = whole_message(AnswerReader(USE, HERMES), twice)
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "weather"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Ulm"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    alone = whole_message(AnswerReader(ToolUse((WEATHER,), parallel=False), HERMES), twice)
    assert len(alone["tool_calls"]) == 1
    assert whole_message(AnswerReader(USE, HERMES), "hi") == {"role": "assistant", "content": "hi", "refusal": None}


def test_forms_are_found_from_templates() -> None:
    assert form_of("{{ tools }} <tool_call>") == HERMES
    assert form_of("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]") == MISTRAL
    assert form_of('{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}') == LLAMA
    assert form_of("<tool_call> and no way to show any") is None


TAG = "</tool_call>"


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 12, 1000])
@pytest.mark.parametrize(
    "text", [TAG, f'a\\"{TAG}\\\\', f'{TAG}"}} <tool_call>{{"'.replace('"', '\\"'), f"{TAG}{TAG} \\\\"]
)
def test_the_mark_that_closes_a_call_may_stand_in_an_argument(text: str, cut: int) -> None:
    first = ("arguments", f'{{"city": "{text}"}}', 0)
    told = f"<tool_call>{CALL.replace('Ulm', text)}{TAG}\n<tool_call>{CALL}{TAG} x"
    ulm = [(kind, more, 1) for kind, more, _ in ULM]
    assert read(told, cut) == [ULM[0], first, *ulm, ("content", "x", 0)]


@pytest.mark.parametrize("cut", [1, 5, 1000])
@pytest.mark.parametrize("broken", ['{"name": "weather}', "no", '{"name": "weather", "arguments": {"city": }}'])
def test_a_call_behind_a_broken_one_is_read(broken: str, cut: int) -> None:
    told = f"<tool_call>{broken}{TAG}<tool_call>{CALL}{TAG}"
    assert read(told, cut) == [("content", f"<tool_call>{broken}{TAG}", 0), *ULM]


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_a_mark_of_reasoning_behind_content_is_content(cut: int) -> None:
    text = "a < b <tool and <think>no</think> more"
    assert read(text, cut, thinks=THINKING[0]) == [("content", text, 0)]


@pytest.mark.parametrize("use", [USE, ToolUse((WEATHER, TIME), choice="required")])
def test_arguments_are_json_whatever_the_numbers_and_letters(use: ToolUse) -> None:
    """A number that no float holds became Infinity, and half of a pair of surrogates cannot be sent."""
    text = '[{"name": "weather", "arguments": {"city": "\\ud800", "days": 8e849}}]'
    text = text if use.must_call else f"<tool_call>{text}</tool_call>"
    (call,) = whole_message(AnswerReader(use, HERMES), text)["tool_calls"]
    arguments = call["function"]["arguments"]
    arguments.encode()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(arguments, parse_constant=refuse) == {"city": "\ud800", "days": 1.7976931348623157e308}
    nothing = whole_message(AnswerReader(USE, HERMES), text.replace("8e849", "NaN").strip("[]"))
    assert "tool_calls" not in nothing


def test_an_answer_that_is_cut_in_a_call_that_must_come_has_no_mark_before_it() -> None:
    for form in FORMS:
        message = whole_message(AnswerReader(ToolUse((TIME,), "required"), form), '[{"na')
        assert message["content"] == '[{"na'


class TwoMarks(Bytes):
    """Marks of calls are special tokens, as in Mistral's tokenizers."""

    marks = ("[TOOL_CALLS]", "[ARGS]")

    def encode(self, text: bytes, special: bool = False) -> Any:
        return [256 + self.marks.index(text.decode())] if text.decode() in self.marks else list(text)

    def spell(self, beginning: bool) -> list[bytes | None]:
        return [*super().spell(beginning), None, None]


@pytest.mark.parametrize("tokenizer", [Bytes(), TwoMarks()])
def test_calls_that_must_come_have_their_names_first_where_the_template_writes_them_so(tokenizer: Bytes) -> None:
    pytest.importorskip("llguidance")
    mask = pytest.importorskip("tilemesh.serve.constrain.mask")
    known = mask.Constraints(tokenizer, frozenset({0}))
    constraint = known.get(None, ToolUse((WEATHER, TIME), "required", marks=("[ARGS]",)).schema())

    def accepts(*parts: str) -> bool:
        cursor = mask.Cursor(constraint)
        for token in (token for part in parts for token in tokenizer.encode(part.encode())):
            (after,) = cursor.ahead([])
            if after is None or not after.mask_V[token]:
                return False
            cursor.add(token)
        return bool(cursor._parser.is_accepting())

    ulm = ("weather", "[ARGS]", '{"city": "Ulm", "days": 3}')
    assert accepts(*ulm)
    assert accepts(*ulm, "[TOOL_CALLS]", "time", "[ARGS]", "{}")
    assert not accepts(*ulm, "time", "[ARGS]", "{}")
    assert not accepts("weather", "[ARGS]", "{}")
    assert not accepts("other", "[ARGS]", "{}")
    assert not accepts("[TOOL_CALLS]", "time", "[ARGS]", "{}")  # the prompt ends with the first mark
    constraint = known.get(None, ToolUse((WEATHER, TIME), "required", marks=("[CALL_ID]", "[ARGS]")).schema())
    assert accepts(
        "weather", "[CALL_ID]", "a1B2c3D4e", *ulm[1:], "[TOOL_CALLS]", "time", "[CALL_ID]", "a" * 9, "[ARGS]", "{}"
    )
    assert not accepts(*ulm)
    assert not accepts("time", "[CALL_ID]", "a1", "[ARGS]", "{}")
    for parallel, count in ((True, 8), (False, 1)):
        schema = ToolUse((TIME,), "required", parallel=parallel, marks=("[ARGS]",)).schema()
        constraint = known.get(None, schema)
        calls = ("time", "[ARGS]", "{}", "[TOOL_CALLS]") * 9
        assert [accepts(*calls[: 4 * number - 1]) for number in (1, count, count + 1)] == [True, True, False]


def test_the_prompt_ends_with_the_marks_of_a_call_that_must_come() -> None:
    pytest.importorskip("jinja2")
    first = "{% if tools %}T{% endif %}{# '[TOOL_CALLS]' + name + '[ARGS]' #}"
    messages = [ChatMessage("user", "a")]
    for source, required, named in (
        (first, "T[TOOL_CALLS]", "T[TOOL_CALLS]time[ARGS]"),
        (first.replace("name", "name + '[CALL_ID]'"), "T[TOOL_CALLS]", "T[TOOL_CALLS]time[CALL_ID]call00000[ARGS]"),
        (first.replace("'[ARGS]'", "''"), "T", "T"),
    ):
        template = ChatTemplate(source, {})
        use = partial(ToolUse, (TIME,), marks=template.marks)
        assert template(messages, use("required")) == required
        assert template(messages, use("named", "time")) == named
        assert template(messages, use()) == "T"
        assert (CALLS in use("required").schema()) == (required != "T")
    use = ToolUse((WEATHER, TIME), "required")
    assert read('weather[ARGS]{"city": "Ulm"}[TOOL_CALLS]time[ARGS]{}', 3, use, MISTRAL) == BOTH


def test_references_of_a_tool_hold_inside_of_the_list_of_calls() -> None:
    schema = ToolUse((TIME, WEATHER), "required").schema()
    assert schema["$defs"]["1"]["properties"]["city"] == {"$ref": "#/$defs/1/$defs/city"}
    assert (schema["minItems"], schema["maxItems"]) == (1, 8)
    told = {"enum": [{"$ref": "#/a"}], "default": {"$ref": "#/b"}, "properties": {"default": {"$ref": "#/c"}}}
    named = {"type": "function", "function": {"name": "f", "parameters": told}}
    moved = ToolUse((named,), "required").schema()["$defs"]["0"]
    assert moved == {**told, "properties": {"default": {"$ref": "#/$defs/0/c"}}}  # constants are no references
    assert ToolUse((WEATHER,), "required", parallel=False).schema()["maxItems"] == 1


def test_a_body_with_tools_is_read() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}]
    history = [
        {"role": "user", "content": "a", "name": "anna"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = read_chat({"messages": history, "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False})
    assert asked.tools == ToolUse((WEATHER,), "named", "weather", False)
    assert asked.sampling.json_schema == WEATHER["function"]["parameters"]  # type: ignore[index]
    assert asked.messages[1].more["tool_calls"][0]["function"]["arguments"] == {"city": "Ulm"}
    assert asked.messages[2].more == {"tool_call_id": "1"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0] is"),
        ({"tools": [WEATHER, WEATHER]}, "tools has a name twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "expected letters, digits, _ and -"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "expected a JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "strict: true and tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {CALLS: {}}}}]}, "is not served here"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [TIME], "tool_choice": "sometimes"}, "expected auto, none, required or one function"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "expected one of time"),
        ({"tools": [TIME], "tool_choice": "required", "regex": "a"}, "beside response_format"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "["}}]}]},
            "as JSON",
        ),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "'tool_calls'"),
    ],
)
def test_what_is_wrong_with_tools_is_said_in_one_line(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(RefusedError) as error:
        read_chat({"messages": [{"role": "user", "content": "a"}]} | fields)
    assert why in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("marks", [(), ("[ARGS]",)])
def test_a_tool_whose_schema_is_not_served_says_so_and_nothing_of_the_grammar(marks: tuple[str, ...]) -> None:
    pytest.importorskip("llguidance")
    mask = pytest.importorskip("tilemesh.serve.constrain.mask")
    bad = {"type": "function", "function": {"name": "a", "parameters": {"type": "array", "uniqueItems": True}}}
    use = ToolUse((TIME, bad), "required", marks=marks)
    with pytest.raises(UsageError, match=r'^json_schema cannot be served: Unimplemented keys: \["uniqueItems"\]$'):
        mask.Constraints(Bytes(), frozenset({0})).get(None, use.schema())
