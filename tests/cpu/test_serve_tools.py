"""Tools through OpenAI's client, against a server process: calls that must come, calls in free text, streamed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from served import Serving, make_folder

from tilemesh.serve import Engine

for package in ("starlette", "uvicorn", "prometheus_client", "openai", "tokenizers", "jinja2"):
    pytest.importorskip(package, reason=f"the server's tests need {package}: pip install -e '.[dev,serve]'")

TEMPLATE = (
    "{% if tools %}T{{ tools | length }}\n{% endif %}{% for message in messages %}<{{ message.role[0] }}>"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>{{ call.function.arguments.a }}"
    "</tool_call>{% endfor %}{% else %}{{ message.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}{# <think></think> #}"
)
PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"$ref": "#/$defs/small"},
        "word": {"enum": ["x", "yes", "no"]},
        "deep": {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
    },
    "required": ["a", "word"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "pick", "description": "d", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
ASK: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = make_folder(tmp_path_factory.mktemp("served") / "small")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    serving = Serving(folder)
    yield serving
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(40) == 0


def check_arguments(name: str, text: str) -> None:
    """By hand: what the schemas say."""
    told = json.loads(text)
    if name == "stop":
        assert told == {}
        return
    assert set(told) <= {"a", "word", "deep"}
    assert type(told["a"]) is int
    assert 0 <= told["a"] <= 99
    assert told["word"] in ("x", "yes", "no")
    assert "deep" not in told or isinstance(told["deep"]["b"], bool)


def create(server: Serving, **fields: Any) -> Any:
    options = {"model": "small", "messages": ASK, "tools": TOOLS, "max_tokens": 70, "temperature": 1.2} | fields
    return server.client.chat.completions.create(**options)


def check_choice(choice: Any, named: bool) -> bool:
    """Whether an answer that was not cut is calls with sound arguments."""
    if choice.finish_reason == "length":
        return False
    assert choice.finish_reason == ("stop" if named else "tool_calls")
    calls = choice.message.tool_calls
    assert calls
    assert len(calls) == 1 or not named
    for call in calls:
        assert call.function.name in (("pick",) if named else ("pick", "stop"))
        check_arguments(call.function.name, call.function.arguments)
    return True


@pytest.mark.parametrize("count", [3, pytest.param(250, marks=pytest.mark.slow)])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_a_call_that_must_come_comes_and_is_sound(server: Serving, choice: Any, count: int) -> None:
    sound = 0
    for seed in range(count):
        made = create(server, tool_choice=choice, seed=seed, n=2, parallel_tool_calls=seed % 2 == 0)
        sound += sum(check_choice(one, choice != "required") for one in made.choices)
    assert sound > count / 2


def forced(text: str) -> dict[str, str]:
    """A regular expression of this text alone: what the model is made to say."""
    return {"regex": "".join(f"\\{letter}" if letter in r"\.[]{}()*+?|^$" else letter for letter in text)}


CALL = '<tool_call>{"name":"stop","arguments":{}}</tool_call>'


def test_calls_in_free_text_and_reasoning_come_apart(server: Serving) -> None:
    text = f"<think>hm</think>Yes.{CALL}"
    (choice,) = create(server, extra_body=forced(text), max_tokens=80).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Yes.")
    assert choice.message.reasoning_content == "hm"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("stop", "{}")
    (choice,) = create(server, extra_body=forced(CALL), max_tokens=80, tool_choice="none").choices
    assert (choice.finish_reason, choice.message.content) == ("stop", CALL)
    # And with the call and its result in the history, as an agent's next turn has it.
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    called = {"id": call.id, "type": "function", "function": {"name": "pick", "arguments": '{"a": 7}'}}
    history = [*ASK, {"role": "assistant", "content": None, "tool_calls": [called]}, result]
    again = create(server, messages=history, max_tokens=2)
    prompt = "T2\n<u>hi<a><tool_call>7</tool_call><t>rain<a>"  # jinja2 takes the line ends behind blocks away
    assert again.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("choice", ["auto", {"type": "function", "function": {"name": "pick"}}])
def test_calls_are_streamed_in_deltas(server: Serving, choice: Any) -> None:
    extra = {"extra_body": forced(f"Yes.{CALL}")} if choice == "auto" else {"seed": 3}
    names, arguments, content, ids, finish = [], "", "", set(), None
    for chunk in create(server, tool_choice=choice, stream=True, max_tokens=80, **extra):
        (one,) = chunk.choices
        content += one.delta.content or ""
        for call in one.delta.tool_calls or ():
            assert call.index == 0
            names += [call.function.name] if call.function.name else []
            ids |= {call.id} if call.id else set()
            arguments += call.function.arguments or ""
        finish = one.finish_reason or finish
    expected = "stop" if choice == "auto" else "pick"
    assert (names, len(ids), finish) == ([expected], 1, "tool_calls" if choice == "auto" else "stop")
    assert content == ("Yes." if choice == "auto" else "")
    check_arguments(expected, arguments)


def test_calls_that_must_come_are_written_as_mistrals_templates_write_them(tmp_path: Path) -> None:
    """Marks are special tokens, and the prompt has the first ones."""
    import tokenizers

    folder = make_folder(tmp_path / "small", vocabulary=260)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    inner.save(str(folder / "tokenizer.json"))
    template = "{% if tools %}T{% endif %}{{ messages[0].content }}{# '[TOOL_CALLS]' + name + '[ARGS]' #}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
    make_app: Any = pytest.importorskip("tilemesh.serve.http").make_app
    testclient: Any = pytest.importorskip("starlette.testclient")
    named = {"type": "function", "function": {"name": "pick"}}
    with Engine(folder, pages=40) as engine:
        client = testclient.TestClient(make_app(engine), base_url="http://localhost")
        for choice, before, finish in (("required", 4, "tool_calls"), (named, 9, "stop")):
            body = {
                "messages": ASK,
                "tools": TOOLS,
                "tool_choice": choice,
                "max_tokens": 70,
                "logprobs": True,
                "seed": 2,
            }
            told = client.post("/v1/chat/completions", json=body).json()
            (made,) = told["choices"]
            assert (told["usage"]["prompt_tokens"], made["finish_reason"]) == (before, finish)
            for call in made["message"]["tool_calls"]:
                check_arguments(call["function"]["name"], call["function"]["arguments"])
            tokens = [token["token"] for token in made["logprobs"]["content"]]
            assert tokens.count("[ARGS]") == (len(made["message"]["tool_calls"]) if choice == "required" else 0)


# Through LangChain ----------------------------------------------------------------------------------------------------


@pytest.fixture
def chat(server: Serving) -> Any:
    chat_model: Any = pytest.importorskip("langchain_openai", reason="pip install langchain-openai").ChatOpenAI
    address = f"http://127.0.0.1:{server.port}/v1"
    return chat_model(model="small", base_url=address, api_key="none", temperature=1.2, max_tokens=80, seed=3)


def schema_of() -> Any:
    pydantic: Any = pytest.importorskip("pydantic")
    bounded = (int, pydantic.Field(ge=0, le=9))
    return pydantic.create_model("Pick", __doc__="Pick one.", a=bounded, word=(Literal["x", "yes", "no"], ...))


def check_pick(told: Any) -> None:
    assert set(told) == {"a", "word"}
    assert told["a"] in range(10)
    assert told["word"] in ("x", "yes", "no")


@pytest.mark.parametrize("choice", ["required", "Pick"])
def test_langchain_binds_tools(chat: Any, choice: str) -> None:
    messages: Any = pytest.importorskip("langchain_core.messages")
    bound = chat.bind_tools([schema_of()], tool_choice=choice, parallel_tool_calls=False)
    made = bound.invoke("hi")
    (call,) = made.tool_calls
    assert (call["name"], made.invalid_tool_calls) == ("Pick", [])
    check_pick(call["args"])
    total = None
    for part in bound.stream("hi"):  # the same seed: the same call, in deltas
        total = part if total is None else total + part
    assert total is not None
    assert [one["args"] for one in total.tool_calls] == [call["args"]]
    result = messages.ToolMessage("rain", tool_call_id=call["id"])
    assert chat.bind(max_tokens=2).invoke([("user", "hi"), made, result]).usage_metadata["output_tokens"] <= 2


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_gets_structured_output(chat: Any, method: str) -> None:
    schema = schema_of()
    told = chat.with_structured_output(schema, method=method).invoke("hi")
    assert isinstance(told, schema)
    check_pick(told.model_dump())
    both = chat.with_structured_output(schema.model_json_schema(), method=method, include_raw=True).invoke("hi")
    assert both["parsing_error"] is None
    check_pick(both["parsed"])
