"""The server, as a process of its own, through OpenAI's client and through raw bodies."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_http import hostile_bodies, send_all
from served import RUNNING, WAITING, Serving, make_folder

from tilemesh.cli import server_watch
from tilemesh.cli.main import main
from tilemesh.cli.server_watch import server_line, watch_server
from tilemesh.core.access import server_access
from tilemesh.core.errors import RunError, UsageError
from tilemesh.model import huggingface
from tilemesh.runs.lock import process_start
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.load import folder_defaults

for package in ("starlette", "uvicorn", "prometheus_client", "openai", "tokenizers", "jinja2"):
    pytest.importorskip(package, reason=f"the server's tests need {package}: pip install -e '.[dev,serve]'")

openai: Any = pytest.importorskip("openai")
make_app: Any = pytest.importorskip("tilemesh.serve.http").make_app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("served") / "small")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    serving = Serving(folder)
    yield serving
    if serving.process.poll() is None:
        serving.wait_until_idle()  # whatever the tests did, no page is left behind
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait(40) == 0


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[Engine]:
    with Engine(folder) as engine:
        yield engine


def test_a_completion_is_the_engines(server: Serving, expected: Engine) -> None:
    asked = Sampling(max_tokens=12, temperature=0.8, seed=3, n=2, logprobs=2)
    (ours,) = expected.generate("to be", asked)
    made = server.client.completions.create(
        model="small", prompt="to be", max_tokens=12, temperature=0.8, seed=3, n=2, logprobs=2
    )
    assert [choice.text for choice in made.choices] == [answer.text for answer in ours.answers]
    assert [choice.finish_reason for choice in made.choices] == [answer.finish.value for answer in ours.answers]
    assert [choice.index for choice in made.choices] == [0, 1]
    assert made.usage is not None
    counted = sum(len(answer.tokens) for answer in ours.answers)
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (
        5,
        counted,
        5 + counted,
    )
    told = made.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs == pytest.approx([one.logprob for one in ours.answers[0].logprobs], abs=1e-4)
    assert told.text_offset == list(range(len(ours.answers[0].tokens)))
    assert [len(one) for one in told.top_logprobs or []] == [2] * len(ours.answers[0].tokens)
    sampled = [one.sampled for one in ours.answers[0].logprobs]
    assert told.sampled_logprobs == pytest.approx(sampled, abs=1e-4)
    assert sampled != pytest.approx(told.token_logprobs, abs=1e-2)  # the temperature is in one of them
    assert [len(one) for one in told.sampled_top_logprobs] == [2] * len(ours.answers[0].tokens)


def test_tokens_of_texts_and_texts_of_tokens(server: Serving, expected: Engine) -> None:
    def post(path: str, **fields: object) -> tuple[int, Any]:
        code, content, _ = server.send("POST", path, json.dumps(fields).encode())
        return code, json.loads(content)

    code, told = post("/tokenize", prompt="to be")
    assert (code, told) == (200, {"tokens": expected.encode("to be"), "count": 5, "max_model_len": 96})
    assert post("/detokenize", tokens=told["tokens"]) == (200, {"prompt": "to be"})
    for path, fields, words in (
        ("/tokenize", {}, "prompt is missing"),
        ("/tokenize", {"prompt": 3}, "prompt is 3: expected text"),
        ("/detokenize", {"tokens": [9999]}, "token 9999"),
        ("/v1/embeddings", {"input": "a", "dimensions": 8}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "pooling": "first"}, "expected mean or last"),
        ("/v1/embeddings", {"input": []}, "input is []: expected a text"),
        ("/v1/embeddings", {"input": ["a", ""]}, "an empty prompt: give at least one"),
    ):
        code, told = post(path, **fields)
        assert code == 400
        assert words in told["error"]["message"]
        assert (told["error"]["param"] == "input") == words.startswith(("input", "an empty"))


def test_embeddings_are_pooled_states_of_the_model(server: Serving, expected: Engine, folder: Path) -> None:
    """Through OpenAI's client, which asks for base64; against the model's own pass, its output projection taken out."""
    model = huggingface.load(folder)
    assert model.output is not None
    model.output = torch.nn.Identity()  # type: ignore[assignment]
    states = [model(torch.tensor([expected.encode(text)]))[0] for text in ("to be", "or not")]
    made = server.client.embeddings.create(model="small", input=["to be", "or not"])
    for entry, x_TD in zip(made.data, states, strict=True):
        vector = x_TD.mean(0) / x_TD.mean(0).norm()
        assert entry.embedding == pytest.approx(vector.tolist(), abs=1e-5)
    assert made.usage.prompt_tokens == 11
    last = server.client.embeddings.create(
        model="small", input="or not", encoding_format="float", extra_body={"pooling": "last"}
    )
    assert last.data[0].embedding == pytest.approx((states[1][-1] / states[1][-1].norm()).tolist(), abs=1e-5)


def test_a_prompt_is_scored_as_evaluation_harnesses_ask(server: Serving, expected: Engine) -> None:
    (ours,) = expected.generate("to be", Sampling(max_tokens=1, prompt_logprobs=1))
    made = server.client.completions.create(
        model="small", prompt="to be", max_tokens=0, echo=True, logprobs=1, user="me"
    )
    (choice,) = made.choices
    assert (choice.text, choice.finish_reason, made.usage.completion_tokens) == ("to be", "length", 0)
    assert choice.logprobs.token_logprobs[0] is None
    values = [told.logprob for told in ours.prompt_logprobs]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(values, abs=1e-5)


def test_a_stream_is_the_completion_in_pieces(server: Serving) -> None:
    asked: dict[str, Any] = {"model": "small", "prompt": ["to be", "or not"], "max_tokens": 15, "seed": 3, "n": 2}
    whole = server.client.completions.create(**asked)
    texts, reasons, chunks = [""] * 4, [None] * 4, 0
    stream = server.client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            chunks += 1
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks > 20
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_a_chat_follows_the_folders_template(server: Serving, expected: Engine) -> None:
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    prompt = "<s><system>be brief\n<user>hi\n<assistant>"
    (ours,) = expected.generate([expected.encode(prompt, special=False)], Sampling(max_tokens=9, seed=1, logprobs=1))
    assert expected.encode(prompt, special=False)[0] == 256  # one token
    asked: dict[str, Any] = {"model": "small", "messages": messages, "seed": 1, "logprobs": True, "top_logprobs": 1}
    made = server.client.chat.completions.create(**asked, max_completion_tokens=9)
    assert made.choices[0].message.content == ours.text
    told = made.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [one.logprob for one in told.content] == pytest.approx(
        [one.logprob for one in ours.answers[0].logprobs], abs=1e-4
    )
    assert [one.sampled_logprob for one in told.content] == [one.logprob for one in told.content]  # temperature 1
    assert [one.sampled_top_logprobs[0]["logprob"] for one in told.content] == [
        one.top_logprobs[0].logprob for one in told.content
    ]
    pieces, roles = "", []
    for chunk in server.client.chat.completions.create(**asked, max_tokens=9, stream=True):
        pieces += chunk.choices[0].delta.content or ""
        roles.append(chunk.choices[0].delta.role)
    assert pieces == ours.text
    assert roles[0] == "assistant"
    assert set(roles[1:]) == {None}
    with pytest.raises(openai.BadRequestError, match="no tools"):
        server.client.chat.completions.create(
            model="small", messages=[{"role": "tool", "content": "x", "tool_call_id": None}]
        )


def test_echo_repeats_the_prompt_with_its_logprobs(server: Serving, expected: Engine) -> None:
    (ours,) = expected.generate("echo", Sampling(max_tokens=2, seed=1, logprobs=1, prompt_logprobs=1))
    asked: dict[str, Any] = {
        "model": "small",
        "prompt": "echo",
        "max_tokens": 2,
        "seed": 1,
        "logprobs": 1,
        "echo": True,
    }
    made = server.client.completions.create(**asked).choices[0]
    assert made.text == "echo" + ours.text
    assert made.logprobs is not None
    values = [one.logprob for one in (*ours.prompt_logprobs, *ours.answers[0].logprobs)]
    assert made.logprobs.token_logprobs == [None, *(pytest.approx(value, abs=1e-4) for value in values)]
    chunks = [chunk.choices[0] for chunk in server.client.completions.create(**asked, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == made.text
    told = [value for chunk in chunks if chunk.logprobs for value in chunk.logprobs.token_logprobs or []]
    assert told == made.logprobs.token_logprobs


def test_a_streamed_echo_has_all_of_the_prompts_logprobs_in_every_choice(tmp_path: Path) -> None:
    """The first answer computes the prompt again for them, in chunks; the second finds it and is there before. What the
    tokenizer puts before a text is no part of it."""
    testclient: Any = pytest.importorskip("starlette.testclient")
    tokenizers: Any = pytest.importorskip("tokenizers")
    folder = make_folder(tmp_path / "begins")
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    inner.save(str(folder / "tokenizer.json"))
    asked = {"prompt": "echo" * 10, "max_tokens": 3, "seed": 1, "n": 2, "logprobs": 0, "echo": True}
    with Engine(folder, pages=64, page_tokens=4, chunk_tokens=8) as engine:
        access = server_access("127.0.0.1", [], ["testserver"], [], False)
        client = testclient.TestClient(make_app(engine, access=access))
        whole = client.post("/v1/completions", json=asked).json()["choices"]
        told: list[list[float]] = [[], []]
        assert [choice["text"][:41] for choice in whole] == [asked["prompt"] + choice["text"][40] for choice in whole]
        assert [choice["logprobs"]["text_offset"][:42] for choice in whole] == [[0, *range(41)]] * 2
        assert [choice["logprobs"]["tokens"][:2] for choice in whole] == [["<s>", "e"]] * 2
        for line in client.post("/v1/completions", json=asked | {"stream": True}).text.split("\n\n")[:-2]:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            told[choice["index"]] += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    for values, choice in zip(told, whole, strict=True):
        assert values[1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-4)


def test_stop_strings_and_tokens_reach_the_client(server: Serving) -> None:
    free = server.client.completions.create(model="small", prompt="go", max_tokens=40, seed=5)
    text = free.choices[0].text
    stop = text[7:9]
    made = server.client.completions.create(model="small", prompt="go", max_tokens=40, seed=5, stop=stop)
    assert made.choices[0].text == text[: text.index(stop)]
    assert made.choices[0].finish_reason == "stop"
    ended = server.client.completions.create(
        model="small", prompt="go", max_tokens=40, seed=5, extra_body={"stop_token_ids": [3], "logit_bias": {"3": 100}}
    )
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")


def test_json_and_regular_expressions_are_kept_to(server: Serving) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 5, "maximum": 44}},
        "required": ["n"],
    }
    told: Any = {"type": "json_schema", "json_schema": {"name": "number", "strict": True, "schema": schema}}
    messages: Any = [{"role": "user", "content": "a number"}]
    made = server.client.chat.completions.create(
        model="small", messages=messages, response_format=told, n=4, temperature=2, seed=1
    )
    for choice in made.choices:
        assert choice.finish_reason == "stop"
        assert 5 <= json.loads(choice.message.content)["n"] <= 44
    pieces: dict[int, str] = {}
    stream = server.client.completions.create(
        model="small",
        prompt="x",
        max_tokens=30,
        n=3,
        seed=2,
        stream=True,
        extra_body={"regex": "[a-f]{3}(-[0-9]{2}){2}"},
    )
    for chunk in stream:
        for one in chunk.choices:
            pieces[one.index] = pieces.get(one.index, "") + one.text
    assert len(pieces) == 3
    assert all(re.fullmatch("[a-f]{3}(-[0-9]{2}){2}", text) for text in pieces.values())


def test_watch_shows_a_live_server_until_it_ends(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    read = server_watch._read

    def show(line: str) -> None:
        lines.append(line)
        server.client.completions.create(model="small", prompt="x", max_tokens=7, extra_body={"ignore_eos": True})
        if len(lines) == 2:
            monkeypatch.setattr(server_watch, "_read", lambda *_: read("http://127.0.0.1:1", "/metrics", None))

    watch_server(f"http://127.0.0.1:{server.port}", None, 0.01, show)
    first, second, last = lines
    counts = [int(re.search(r"([\d,]+) tokens,", line)[1].replace(",", "")) for line in (first, second)]  # type: ignore[index]
    assert counts[1] - counts[0] == 7
    assert re.match(
        r"small: 0 running, 0 waiting · .* tokens/s · pages 0 used, \d+ idle, \d+ free · .*version 0$", second
    )
    assert last == "the server has ended"
    assert "· asleep · adapters a, b" in server_line({"tilemesh_sleep_level": 1.0}, ["small", "a", "b"], 0)
    with pytest.raises(RunError, match="does not answer as `tilemesh serve` does"):
        watch_server("http://127.0.0.1:1", None, 0.01, show)


def test_models_health_and_unknown_paths(server: Serving) -> None:
    assert [model.id for model in server.client.models.list()] == ["small"]
    assert server.client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="there is 'small'"):
        server.client.models.retrieve("other")
    assert server.send("GET", "/health")[0] == 200
    code, content, _ = server.send("GET", "/v1/nothing")
    assert (code, "is not served here" in content.decode()) == (404, True)
    assert server.send("GET", "/v1/completions")[0] == 405


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prompt": ""}, "an empty prompt"),
        ({"prompt": "x" * 97}, "the prompt has 97 tokens and the context is 96 tokens: give at most 96"),
        ({"prompt": "x", "max_tokens": 97}, "set max_tokens to at most 96"),
        ({"prompt": "x", "temprature": 1}, "did you mean 'temperature'"),
        ({"prompt": "x", "best_of": 3}, "best_of is 3: only 1 is served here"),
        ({"prompt": "x", "temperature": -1}, "temperature is -1: expected 0 or more"),
        ({"prompt": "x", "regex": "(?=a)"}, "look-around"),
        (
            {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            'Unimplemented keys: ["not"]',
        ),
        ({"prompt": [999]}, "token 999: expected whole numbers from 0 to 257"),
    ],
)
def test_what_is_not_served_is_a_400_with_its_reason(server: Serving, asked: dict[str, Any], words: str) -> None:
    code, content, _ = server.send("POST", "/v1/completions", json.dumps(asked).encode())
    assert code == 400
    assert words in json.loads(content)["error"]["message"]


def test_another_model_is_a_404_as_openai_says_it(server: Serving) -> None:
    code, content, _ = server.send("POST", "/v1/completions", b'{"prompt": "x", "model": "other"}')
    told = json.loads(content)["error"]
    assert (code, told["code"], told["param"]) == (404, "model_not_found", "model")
    assert "model 'other' is not served here: there is 'small'" in told["message"]
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="other", prompt="x")


def test_any_body_is_answered_and_none_breaks_the_server(server: Serving) -> None:
    send_anything(server, 150, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_thousand_bodies_are_answered_and_none_breaks_the_server(server: Serving) -> None:
    send_anything(server, 2000, 4)


def send_anything(server: Serving, count: int, seed: int) -> None:
    sent = send_all(server.port, server.process.pid, hostile_bodies(count, seed))
    assert not sent.failed, "\n".join(sent.failed)
    assert {200, 400} <= set(sent.codes)
    assert server.send("GET", "/health")[0] == 200


def open_stream(server: Serving, **more: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"prompt": "a", "stream": True, "max_tokens": 90, "ignore_eos": True, **more}
    connection.request("POST", "/v1/completions", json.dumps(body).encode())
    return connection, connection.getresponse()


def test_a_full_queue_is_a_429_with_a_time_and_hanging_up_frees_everything(server: Serving) -> None:
    connection, response = open_stream(server, n=RUNNING + WAITING)
    assert response.readline().startswith(b"data: ")
    code, content, headers = server.send("POST", "/v1/completions", b'{"prompt": "b"}')
    if code != 200:  # 200: a very quick machine had finished one by then
        assert code == 429
        assert int(headers["retry-after"]) >= 1
        assert "ask again later" in json.loads(content)["error"]["message"]
    response.close()
    connection.close()  # in the middle of the stream
    server.wait_until_idle()
    assert b'tilemesh_answers_total{reason="abort"}' in server.send("GET", "/metrics")[1]


def test_more_answers_than_ever_fit_are_not_to_be_asked_for_again(server: Serving) -> None:
    body = {"prompt": ["a"] * 2, "n": (RUNNING + WAITING) // 2 + 1, "max_tokens": 1}
    code, content, _ = server.send("POST", "/v1/completions", json.dumps(body).encode())
    assert code == 400
    assert f"2 prompts of {body['n']} answers each: expected at most 1" in json.loads(content)["error"]["message"]


def test_hanging_up_before_a_whole_reply_frees_its_pages(server: Serving) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"prompt": "a", "max_tokens": 90, "n": RUNNING + WAITING, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body).encode())
    time.sleep(0.05)
    connection.close()
    server.wait_until_idle()


@pytest.mark.slow
def test_a_server_over_ranks_and_replicas_answers_and_ends_well(folder: Path, expected: Engine) -> None:
    """`--mesh tp=2,dp=2` with a draft model: five processes behind one port."""
    serving = Serving(folder, "--mesh", "tp=2,dp=2", "--pages", "200", "--draft", str(folder))
    try:
        (want,) = expected.generate("one two", Sampling(max_tokens=8, temperature=0))
        for _ in range(3):
            made = serving.client.completions.create(model="small", prompt="one two", max_tokens=8, temperature=0)
            assert made.choices[0].text == want.text
        streamed = serving.client.completions.create(
            model="small", prompt="one two", max_tokens=8, temperature=0, stream=True
        )
        assert "".join(part.choices[0].text for part in streamed if part.choices) == want.text
    finally:
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait(60) == 0


def test_metrics_count_what_was_served(server: Serving) -> None:
    before = server.metric("tilemesh_output_tokens_total")
    server.client.completions.create(model="small", prompt="a", max_tokens=5, extra_body={"ignore_eos": True})
    assert server.metric("tilemesh_output_tokens_total") == before + 5
    assert server.metric("tilemesh_time_to_first_token_seconds_count") > 0


def test_a_folders_own_defaults_count_when_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not there"):
        folder_defaults(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7, "do_sample": true, "pad_token_id": 0}')
    assert folder_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 7}
    file.write_text('{"temperature": 0.6, "do_sample": false, "repetition_penalty": 1.1}')
    assert folder_defaults(tmp_path) == {"temperature": 0.0, "repetition_penalty": 1.1}
    file.write_text('{"top_p": 7}')
    with pytest.raises(UsageError, match="top_p is 7"):
        folder_defaults(tmp_path)


def test_a_default_of_max_tokens_is_cut_to_the_room_that_is_left(folder: Path) -> None:
    testclient: Any = pytest.importorskip("starlette.testclient")
    access = server_access("127.0.0.1", [], ["testserver"], [], False)
    with Engine(folder, pages=64) as engine:
        client = testclient.TestClient(make_app(engine, defaults={"max_tokens": 96}, access=access))
        body: dict[str, Any] = {"prompt": ["a" * 90, "a" * 80], "ignore_eos": True}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 14
        assert client.post("/v1/completions", json=body | {"max_tokens": 96}).status_code == 400


def test_what_is_constrained_is_content_also_where_a_prompt_begins_reasoning(tmp_path: Path) -> None:
    testclient: Any = pytest.importorskip("starlette.testclient")
    pytest.importorskip("llguidance")
    folder = make_folder(tmp_path / "thinks")
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told["chat_template"] += "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    access = server_access("127.0.0.1", [], ["testserver"], [], False)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"const": "yes"}}}
    with Engine(folder, pages=64) as engine:
        client = testclient.TestClient(make_app(engine, access=access))
        for asked, key in ((body, "reasoning_content"), (body | {"response_format": form}, "content")):
            (choice,) = client.post("/v1/chat/completions", json=asked).json()["choices"]
            assert choice["message"][key]
        assert choice["message"]["content"] == '"yes"'
        assert "reasoning_content" not in choice["message"]


def test_what_the_command_refuses(folder: Path, server: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), "--port", str(server.port)]) == 1
    assert f"cannot listen on 127.0.0.1, port {server.port}" in capsys.readouterr().err
    assert main(["serve", str(folder), "--mesh", "pp=2"]) == 2
    assert "--mesh is pp=2: serving has no pp" in capsys.readouterr().err
    assert main(["serve", str(folder), "--port", "70000"]) == 2
    assert "--port is 70000" in capsys.readouterr().err


CLIENT = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
connection.request("POST", "/v1/completions", b'{"prompt": "a", "stream": true, "max_tokens": 90, "ignore_eos": true}')
print(connection.getresponse().readline(), flush=True)
sys.stdin.read()
"""


def test_a_killed_client_frees_what_it_held_and_the_others_go_on(server: Serving) -> None:
    server.wait_until_idle()
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(server.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    connection, response = open_stream(server)
    for client in clients:
        assert client.stdout is not None
        assert client.stdout.readline().startswith(b"b'data: ")
        client.kill()
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    server.wait_until_idle()
    for client in clients:
        client.communicate()


def kill_under_load(server: Serving, wait_s: float) -> int:
    """How many clients got an error: soon, and none an answer that looks whole. Then it starts again where it was."""
    read: list[bytes] = []
    errors: list[Exception] = []

    def ask(stream: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"prompt": "a" * 20, "stream": stream, "max_tokens": 70, "ignore_eos": True, "n": 2}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body).encode())
            read.append(connection.getresponse().read())
        except (OSError, http.client.HTTPException) as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(wait_s)
    server.kill()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a client still waits for a server that is gone"
    assert len(read) + len(errors) == len(threads)
    for content in read:  # what was read to its end had one
        assert content.endswith(b"data: [DONE]\n\n") or "choices" in (told := json.loads(content)) or told["error"]
    server.start_again()
    assert server.send("GET", "/health")[0] == 200
    assert server.send("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 2}')[0] == 200
    return len(errors)


def test_a_server_that_was_killed_under_load_starts_again_where_it_was(server: Serving) -> None:
    assert kill_under_load(server, wait_s=0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_at_many_moments_of_a_server_with_ranks(folder: Path) -> None:
    """Whatever moment it is, the ranks of the server that was killed end too."""
    serving = Serving(folder, "--mesh", "tp=2,dp=2", "--pages", "200")
    try:
        for number in range(5):
            ranks = descendants(serving.process.pid)
            assert len(ranks) >= 4
            kill_under_load(serving, wait_s=0.2 * number)
            end = time.monotonic() + 30
            while left := [pid for pid in ranks if process_start(pid) is not None]:
                assert time.monotonic() < end, f"{left} outlive the server"
                time.sleep(0.1)
    finally:
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait(60) == 0


def descendants(pid: int) -> list[int]:
    """Processes below one, whoever of them started them."""
    below = [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]
    return below + [lower for child in below for lower in descendants(child)]


def test_on_a_signal_answers_are_finished_and_the_server_ends_well(server: Serving) -> None:
    """The last test here: it ends the server that the others use."""
    server.wait_until_idle()
    connection, response = open_stream(server)
    assert response.readline().startswith(b"data: ")
    server.process.send_signal(signal.SIGTERM)
    rest: list[bytes] = []
    reader = threading.Thread(target=lambda: rest.append(response.read()))
    reader.start()
    reader.join(60)
    assert rest[0].endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in rest[0]
    connection.close()
    assert server.process.wait(40) == 0
