"""A server that strangers may reach: keys, names, certificates, slow clients, and bodies that cost too much to read."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import CONFIG, make_folder

from tilemesh.cli.main import main
from tilemesh.core.access import server_access
from tilemesh.core.errors import UsageError
from tilemesh.data.tokenizer import Bytes, encode_prompt
from tilemesh.model import huggingface
from tilemesh.model.transformer import Transformer
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.constrain import mask

for package in ("starlette", "uvicorn", "prometheus_client", "tokenizers", "jinja2"):
    pytest.importorskip(package, reason=f"the server's tests need {package}: pip install -e '.[dev,serve]'")

uvicorn: Any = pytest.importorskip("uvicorn")
Starlette: Any = pytest.importorskip("starlette.applications").Starlette
connection: Any = pytest.importorskip("tilemesh.serve.connection")
bodies: Any = pytest.importorskip("tilemesh.serve.bodies")
make_app: Any = pytest.importorskip("tilemesh.serve.http").make_app


class Live:
    """An application behind a real socket, in a thread of this process."""

    def __init__(self, app: Any, tls: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        settings = connection.connection_settings(tls)
        config = uvicorn.Config(app, log_level="error", lifespan="off", **settings)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        self.socket.close()

    def get(self, path: str, **headers: str) -> int:
        asking = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            asking.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            return asking.getresponse().status
        finally:
            asking.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(make_folder(tmp_path_factory.mktemp("served") / "small"), pages=64) as started:
        yield started


def test_keys_names_and_pages_are_asked_for_before_anything_else(engine: Engine) -> None:
    access = server_access("127.0.0.1", ["key-of-anna", "key-of-ben"], ["gpu7"], ["https://app.example"], False)
    with Live(make_app(engine, access=access)) as live:
        assert live.get("/health") == 200  # for those who look after machines
        assert live.get("/v1/models") == live.get("/metrics") == live.get("/nothing") == 401
        assert live.get("/v1/models", Authorization="Bearer key-of-ben") == 200
        assert live.get("/v1/models", Authorization="Bearer key-of-ben", Host="evil.com") == 403
        assert live.get("/health", Host="evil.com") == 403
        assert live.get("/v1/models", Authorization="Bearer key-of-ben", Host="gpu7:1") == 200
        assert live.get("/v1/models", Authorization="Bearer key-of-ben", Origin="https://evil.example") == 403
        asking = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
        asking.request("OPTIONS", "/v1/models", headers={
            "Origin": "https://app.example", "Access-Control-Request-Method": "GET",
            "Access-Control-Request-Headers": "authorization",
        })  # fmt: skip
        assert asking.getresponse().headers["access-control-allow-origin"] == "https://app.example"
        asking.close()


@pytest.fixture
def own_engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine(make_folder(tmp_path / "own"), pages=64) as started:
        yield started


def test_weights_and_sleep_need_a_server_with_a_key(own_engine: Engine, tmp_path: Path) -> None:
    engine, own, other = own_engine, tmp_path / "own", tmp_path / "other"
    huggingface.save(Transformer(CONFIG, seed=9), other)

    def post(live: Live, path: str, key: str, **fields: object) -> tuple[int, str]:
        asking = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
        try:
            asking.request("POST", path, json.dumps(fields), {"Authorization": f"Bearer {key}"} if key else {})
            response = asking.getresponse()
            return response.status, response.read().decode()
        finally:
            asking.close()

    with Live(make_app(engine)) as live:
        for path, fields in (("/v1/weights", {"source": str(other)}), ("/sleep", {"level": 1}), ("/wake", {})):
            code, text = post(live, path, "", **fields)
            assert (code, "only with a key" in text) == (403, True)
    assert (engine.version, engine.asleep) == (0, 0)
    with Live(make_app(engine, access=server_access("127.0.0.1", ["key-of-anna"], [], [], False))) as live:
        assert post(live, "/v1/weights", "key-of-eve", source=str(other))[0] == 401
        key, asked = "key-of-anna", {"prompt": "to be", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
        (before,) = json.loads(post(live, "/v1/completions", key, **asked)[1])["choices"]
        assert before["weight_versions"] == [[0, 9]]
        for path, fields, words in (
            ("/v1/weights", {}, "source is missing"),
            ("/v1/weights", {"source": 7}, "source is 7: expected text"),
            ("/v1/weights", {"source": str(other), "version": 0}, "version"),
            ("/v1/weights", {"source": str(other), "running": "stop"}, "running"),
            ("/v1/weights", {"source": str(tmp_path / "nowhere")}, "nowhere"),
            ("/sleep", {"depth": 1}, "depth"),
            ("/sleep", {"level": 3}, "level is 3"),
        ):
            code, text = post(live, path, key, **fields)
            assert code == 400, text
            assert words in text
        code, text = post(live, "/v1/weights", key, source=str(other), version=4)
        assert (code, json.loads(text)) == (200, {"version": 4, "asleep": 0})
        (after,) = json.loads(post(live, "/v1/completions", key, **asked)[1])["choices"]
        assert after["weight_versions"] == [[4, 9]]
        assert after["text"] != before["text"]
        events = post(live, "/v1/completions", key, **asked, stream=True)[1].split("\n\n")
        chunks = [json.loads(event[6:])["choices"][0] for event in events if event.startswith("data: {")]
        assert sum(count for chunk in chunks for version, count in chunk["weight_versions"] if version == 4) == 9
        assert json.loads(post(live, "/sleep", key, level=2)[1]) == {"version": 4, "asleep": 2}
        assert json.loads(post(live, "/v1/weights", key, source=str(own))[1]) == {"version": 5, "asleep": 2}
        assert json.loads(post(live, "/wake", key)[1]) == {"version": 5, "asleep": 0}
        (again,) = json.loads(post(live, "/v1/completions", key, **asked)[1])["choices"]
        assert again["text"] == before["text"]


def test_no_page_may_ask_unless_it_was_named(engine: Engine) -> None:
    with Live(make_app(engine)) as live:
        asking = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
        asking.request("GET", "/v1/models", headers={"Origin": "https://app.example"})
        response = asking.getresponse()
        assert response.status == 403
        assert "access-control-allow-origin" not in response.headers
        asking.close()


def closed_after(client: socket.socket) -> bool:
    """Whether the server ends this connection within a time that only a hang exceeds."""
    client.settimeout(30)
    try:
        while client.recv(1024):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def test_half_sent_requests_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REQUEST_S", 0.3)
    with Live(Starlette()) as live:
        halves = [b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nab"]
        clients = [socket.create_connection(("127.0.0.1", live.port)) for _ in halves]
        for client, half in zip(clients, halves, strict=True):
            client.sendall(half)
        second = socket.create_connection(("127.0.0.1", live.port))  # whose first request was whole
        second.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert second.recv(1024).startswith(b"HTTP/1.1 404")
        second.sendall(b"GET / HT")
        for client in (*clients, second):
            assert closed_after(client)
            client.close()
        assert live.get("/") == 404


def test_a_body_that_is_too_long_is_refused_before_it_comes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REQUEST_S", 60.0)  # which the clients below do not wait for
    monkeypatch.setattr(bodies, "_PAUSE_S", 0.3)
    with Live(make_app(engine)) as live:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
        for more in (b"", b"Expect: 100-continue\r\n"):
            with socket.create_connection(("127.0.0.1", live.port), timeout=30) as client:
                client.sendall(head + more + b"Content-Length: 99999999999\r\n\r\n")
                assert client.recv(1024).startswith(b"HTTP/1.1 413")
                assert closed_after(client)
        # Whoever sends all of it before reading hears why, and a length that is not told is counted.
        long = b" " * (5 << 20)
        for path, body in (("completions", long), ("completions", iter([b" " * (1 << 20)] * 6)), ("embeddings", long)):
            asking = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
            asking.request("POST", f"/v1/{path}", body)
            response = asking.getresponse()
            assert (response.status, response.headers["Connection"]) == (413, "close")
            assert "longer than 4 MiB" in json.load(response)["error"]["message"]
            asking.close()


def test_too_many_connections_close_the_one_that_waited_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "most_connections", lambda: 4)
    with Live(Starlette()) as live:
        clients = []
        for _ in range(8):
            clients.append(socket.create_connection(("127.0.0.1", live.port)))
            clients[-1].sendall(b"GET / HT")
            time.sleep(0.01)
        assert all(closed_after(client) for client in clients[:4])
        assert live.get("/") == 404
        for client in clients:
            client.close()


def test_connections_between_two_requests_make_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "most_connections", lambda: 4)
    with Live(Starlette()) as live:
        clients = [socket.create_connection(("127.0.0.1", live.port), timeout=30) for _ in range(4)]
        for client in clients:
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert client.recv(1024).startswith(b"HTTP/1.1 404")
        assert live.get("/") == 404
        assert closed_after(clients[0])
        for client in clients:
            client.close()


BURST = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
import uvicorn
from starlette.applications import Starlette
from tilemesh.serve.connection import connection_settings
listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
print(listening.getsockname()[1], flush=True)
sys.stdin.readline()  # until there is a queue
config = uvicorn.Config(Starlette(), log_level="error", lifespan="off", **connection_settings())
uvicorn.Server(config).run(sockets=[listening])
"""


def test_a_burst_of_connections_does_not_use_up_the_files() -> None:
    """They are accepted a few at a time, so that room is made between; a process without files accepts nobody."""
    child = subprocess.Popen(
        [sys.executable, "-c", BURST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    port = int(child.stdout.readline())
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    child.stdin.write(b"\n")
    child.stdin.flush()
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    asking.request("GET", "/")
    assert asking.getresponse().status == 404
    asking.close()
    for client in clients:
        client.close()
    child.terminate()
    assert b"out of system resource" not in child.communicate(timeout=60)[1]


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "reply"),
    [
        (CHUNKED + b"1\r\na\r\n" * 2000 + b"0\r\n\r\n", b"send larger ones, or a Content-Length"),
        (CHUNKED + b"0\r\n" + b"a:\r\n" * 12_000 + b"\r\n", b"Invalid HTTP request received."),
        (WHOLE[:-2] + b"a:\r\n" * 12_000 + b"\r\n", b"Invalid HTTP request received."),
        (WHOLE * 100 + WHOLE[:-2] + b"a:\r\n" * 12_000 + b"\r\n", b""),
        (b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", b""),
    ],
)
def test_requests_in_crumbs_are_not_read(
    engine: Engine, request_bytes: bytes, reply: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A thousand times cheaper to send than to read: 1 MiB of chunks of one byte kept everybody waiting for seconds."""
    heard = b""
    with Live(make_app(engine)) as live, socket.create_connection(("127.0.0.1", live.port), timeout=30) as client:
        try:
            client.sendall(request_bytes)
            if not reply:  # after which, in the middle of it, comes what is no request
                client.recv(1)
                client.sendall(b"no chunk\r\n\r\n")
            while piece := client.recv(65536):
                heard += piece
        except OSError:  # closed under us
            pass
        assert reply in heard
        assert live.get("/health") == 200
    assert not caplog.records


def test_a_client_that_reads_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNREAD_S", 0.3)
    ended = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            for _ in range(4096):
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        finally:
            ended.set()

    with Live(endless) as live, socket.create_connection(("127.0.0.1", live.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert ended.wait(60)
        assert live.get("/nothing") == 200


@pytest.mark.parametrize(("size", "pause_s"), [(50_000, None), (400_000, 0.02)])
def test_a_reply_may_be_read_slowly_but_not_never(
    size: int, pause_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the server has closed, and only its buffer is left; as long as something is read, it waits."""
    monkeypatch.setattr(connection, "UNREAD_S", 0.3)

    async def reply(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b"x" * size})

    with Live(reply) as live, socket.socket() as client:
        for end, option in ((live.socket, socket.SO_SNDBUF), (client, socket.SO_RCVBUF)):
            end.setsockopt(socket.SOL_SOCKET, option, 4096)
        client.connect(("127.0.0.1", live.port))
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        heard = len(client.recv(1))
        while pause_s is not None and (piece := client.recv(16384)):
            heard += len(piece)
            time.sleep(pause_s)
        assert pause_s is None or heard > size
        deadline = time.monotonic() + 30
        while live.server.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not live.server.server_state.connections


def test_a_prompt_that_is_too_long_is_refused_by_its_beginning() -> None:
    read: list[int] = []

    class Counting(Bytes):
        def encode(self, text: bytes, special: bool = False) -> Any:
            read.append(len(text))
            return super().encode(text, special)

    with pytest.raises(UsageError, match="the prompt of 4,000,000 bytes has more than 100 tokens"):
        encode_prompt(Counting(), "x" * 4_000_000, most=100)
    assert sum(read) < 10_000
    assert encode_prompt(Counting(), "xyz", most=100) == [120, 121, 122]

    class Characters(Bytes):
        def encode(self, text: bytes, special: bool = False) -> Any:
            return [ord(character) for character in text.decode()]

    for before in ("", "a", "ab"):  # its beginning ends at each byte of a character
        with pytest.raises(UsageError, match="has more than 100 tokens"):
            encode_prompt(Characters(), before + "日" * 3000, most=100)


def drawn_value(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(6 if depth else 3)
    text = "".join(draw.choice('a"\\\\[]{{:,,\n\t é\x01') for _ in range(draw.randrange(6)))
    if kind < 3:
        return (text, draw.choice([None, True, 1, -2.5]), text * 2)[kind]
    if kind < 5:
        return [drawn_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {f"{index}{text}": drawn_value(draw, depth - 1) for index in range(draw.randrange(4))}


def counted(value: Any) -> tuple[int, int]:
    """Lists, objects and keys; commas."""
    if not isinstance(value, list | dict):
        return 0, 0
    children = [counted(child) for child in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    return 1 + keys + sum(row[0] for row in children), max(0, len(value) - 1) + sum(row[1] for row in children)


def test_a_bodys_structure_is_counted_outside_of_strings_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    for _ in range(400):
        value = [drawn_value(draw, 4), 1]
        text = json.dumps(value, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1]))
        branches, commas = counted(value)
        monkeypatch.setattr(bodies, "_MOST_BRANCHES", branches)
        monkeypatch.setattr(bodies, "_LEAST_VALUES", commas)
        assert bodies.parse_body(text.encode(), context=0) == value
        monkeypatch.setattr(bodies, "_LEAST_VALUES", commas - 1)
        with pytest.raises(UsageError, match="values: send fewer"):
            bodies.parse_body(text.encode(), context=0)
        assert bodies.parse_body(text.encode(), context=commas) == value
        monkeypatch.setattr(bodies, "_MOST_BRANCHES", branches - 1)
        with pytest.raises(UsageError, match="lists, objects and keys: send fewer"):
            bodies.parse_body(text.encode(), context=commas)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("unit", ["[[]]", "{}", "[1]", "1", '{"a":1}', '""', '",,",,'])
def test_a_million_small_values_are_not_parsed(unit: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies.json, "loads", lambda *_, **__: pytest.fail("such a body kept everybody waiting"))
    body = ('{"prompt": "a", "stop": [' + f"{unit}," * 300_000 + "1]}").encode(encoding)
    with pytest.raises(UsageError, match=r"send fewer|not JSON"):
        bodies.parse_body(body, context=96)


@pytest.mark.parametrize(
    "regex", ["(((){10000}){10000}){10000}b", "((a{1000}){1000}){1000}", "(a{0,100}){0,9999}", ".{0,9999}.{0,9999}"]
)
def test_a_regex_of_any_number_of_states_is_compiled_at_once_or_refused(engine: Engine, regex: str) -> None:
    pytest.importorskip("llguidance")
    began = time.thread_time()
    with contextlib.suppress(UsageError):
        engine.check([1], Sampling(regex=regex))
    # The first has 10^12 states. The second took 1.4 s of a core that others used.
    assert time.thread_time() - began < 4


def test_following_a_regex_has_a_limit_per_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that take long to find: the answer is refused, and the next request answered."""
    pytest.importorskip("llguidance")
    monkeypatch.setitem(mask._LIMITS, "step_lexer_fuel", 300)
    hostile = Sampling(max_tokens=60, regex="([a-z]|[a-m][a-z]){0,400}[0-9]x{30}", ignore_eos=True)
    with pytest.raises(UsageError, match="takes too much work to follow"):
        list(engine.generate(["a"], hostile))
    (answer,) = engine.generate(["a"], Sampling(max_tokens=3, ignore_eos=True))
    assert len(answer.answers[0].tokens) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines and there is no key"),
        (["--host", "::"], "can be reached from other machines and there is no key"),
        (["--api-key", "short"], "a key of 5 characters cannot be used"),
        (["--api-key", "@/nowhere"], "--api-key @/nowhere cannot be read"),
        (["--no-key", "--api-key", "long-enough"], "--no-key is given beside keys"),
        (["--allow-host", "https://x/"], "--allow-host is"),
        (["--allow-origin", "x"], "--allow-origin is 'x'"),
        (["--tls-cert", "/nowhere.pem"], "--tls-cert and --tls-key belong together"),
        (["--tls-cert", "/nowhere.pem", "--tls-key", "/nowhere.pem"], "cannot be used: No such file"),
    ],
)
def test_what_the_command_refuses_before_it_reads_a_model(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/no/model", "--port", "0", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_certificates_make_it_https(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilemesh.cli.commands.serve import ServeOptions, check_tls

    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = check_tls(ServeOptions(source="", tls_cert=str(certificate), tls_key=str(key)))
    assert tls is not None
    monkeypatch.setattr(connection, "most_connections", lambda: 4)
    with Live(make_app(engine), tls) as live:
        silent = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(8)]  # before any TLS
        assert all(closed_after(client) for client in silent[:4])
        trusting = ssl.create_default_context(cafile=str(certificate))
        asking = http.client.HTTPSConnection("localhost", live.port, timeout=30, context=trusting)
        for path in ("/health", "/metrics", "/v1/models", "/health"):  # on one connection
            asking.request("GET", path)
            response = asking.getresponse()
            assert response.status == 200
            assert response.read()
        asking.close()
        for client in silent:
            client.close()
