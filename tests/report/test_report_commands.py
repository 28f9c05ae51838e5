"""`tilemesh report` and `watch` as a user meets them: what is written, what is refused, what a server lets out."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilemesh.cli.jobs import write_page
from tilemesh.cli.main import main
from tilemesh.cli.pages import read_trials
from tilemesh.core.errors import RunError, UsageError
from tilemesh.kernels.matmul.config import Config
from tilemesh.kernels.matmul.problem import Problem
from tilemesh.kernels.tuning.search import Tried
from tilemesh.kernels.tuning.tuner import Tuned
from tilemesh.measure.row import read_rows
from tilemesh.measure.sample import Sample
from tilemesh.plan.grade import expected_memory
from tilemesh.report import memory_part, run, serve
from tilemesh.runs.folder import write_environment

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MakeRun = Callable[..., Path]


def test_a_page_is_written_into_the_run(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run()
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"page: {folder}/report.html\n"
    text = (folder / "report.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "src=" not in text.split("</head>")[1].split("<script>")[0]


def test_three_runs_on_one_page(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(make_run(name, seconds=seconds)) for name, seconds in (("a", 0.1), ("b", 0.2), ("c", 0.4))]
    page = tmp_path / "together.html"
    assert main(["report", *runs, "--html", str(page)]) == 0
    text = page.read_text()
    assert "3 runs: a, b, c" in text
    for heading in ("What differs", "Where they ended", "Held-out loss", "Gradient norm", "tokens/s"):
        assert heading in text
    assert main(["report", *runs]) == 2
    assert "3 runs together need a name for their page: give --html FILE" in capsys.readouterr().err
    assert main(["report", *runs * 3, "--html", str(page)]) == 2
    assert "a page shows up to 8 together" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["report", "nowhere"], 2, "is no folder"),
        (["report", "."], 2, "is no run"),
        (["report", "a", "b", "c"], 2, "is no folder"),
        (["report", "rows.jsonl"], 2, "give --html FILE"),
        (["report", "rows.jsonl", "--html", "p.html"], 2, "no rows to make a page of"),
        (["watch", "nowhere"], 2, "is no folder"),
    ],
)
def test_wrong_use_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("")
    assert main(arguments) == code
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ('{"schema": 2, "kind": "serve"}', "has schema 2, this version of tilemesh reads 1: use the one that wrote it"),
        ("{", "cannot be read: damaged, or cut short while it was written; it should hold"),
        ('{"schema": 1}', "says schema 1 and kind None: it should hold"),
    ],
)
@pytest.mark.parametrize("command", [["report"], ["watch"], ["report", "other"]])
def test_a_run_of_an_unknown_kind_is_one_line(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], command: list[str], about: str, words: str
) -> None:
    folder = make_run()
    (folder / "run.json").write_text(about)
    others = [str(make_run("other"))] if "other" in command else []
    assert main([command[0], *others, str(folder)]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_predicted_memory_adds_up_to_what_a_run_can_see(device: str, make_run: MakeRun) -> None:
    """On a GPU without what is reserved; gradients not there yet at the fullest moment are off the sum, never on it."""
    folder = make_run()
    summary = json.loads((folder / "summary.json").read_text()) | {
        "device": device, "peak_memory_bytes": [900] * 4, "memory_baseline_bytes": [0] * 4,
        "memory_bytes": {"weights": [200] * 4, "gradients": [100] * 4, "other": [600] * 4},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    memory = {"weights_bytes": 200, "gradients_bytes": 100, "activations_bytes": 700, "reserved_bytes": 50,
              "later_bytes": 100, "total_bytes": 950, "usable_bytes": 5000}  # fmt: skip
    (folder / "predicted.json").write_text(json.dumps({"step_time_s": 1.0, "memory": memory}))
    found = run.read(folder)
    expected = expected_memory(found.config, found.predicted, found.summary)
    assert ("reserved" in expected) is (device == "cpu")
    whole = 900 if device == "cuda" else 950
    for held in ({"weights": 200.0, "gradients": 100.0, "other": 600.0}, {}):
        joined = memory_part.joined(expected, held, "bf16")
        assert sum(joined.values()) == whole
        assert joined["gradients"] == (100 if held else 0)
    assert "later" not in str(memory_part.memory(found, expected))


def test_a_page_that_cannot_be_written_is_one_line(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run()
    assert main(["report", str(folder), "--html", str(folder / "config.toml" / "p.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_run_keeps_its_commands_and_ends_with_its_page(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run()
    write_environment(folder)
    write_environment(folder)  # gone on with
    found = run.read(folder)
    assert len(found.environment["commands"]) == 2
    assert write_page(folder) == f"look:    {folder}/report.html"
    assert "What was typed:" in (folder / "report.html").read_text()
    assert write_page(tmp_path) == f"no page: {tmp_path} is no run: it has neither config.toml nor metrics.jsonl"


# ---- benches, where there is no GPU to measure on ---------------------------------------------------------------


def test_bench_kernel_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = read_rows(RESULTS / "matmul_rows_h200_float16.jsonl")[:2]
    monkeypatch.setattr("tilemesh.bench.kernel.run.measure_cases", lambda *arguments, **options: (recorded, {}))
    grid, target = str(RESULTS / "matmul_grid_h200_float16.jsonl"), tmp_path / "page.html"
    command = ["bench", "kernel", "--shapes", "2048x2048x2048", "--html", str(target), "--tried"]
    assert main([*command, str(tmp_path / "nothing.jsonl")]) == 2
    assert not target.exists()
    assert main([*command, grid]) == 0
    text = target.read_text()
    assert "Roofline" in text
    assert "What the tuner tried" in text


def test_tune_writes_what_it_tried_and_a_heat_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = (Tried(Config("tma", block_m=64), 2e-5), Tried(Config("tma", block_n=256), math.inf))

    def found(operator: object, problem: Problem, *arguments: object, **options: object) -> Tuned[Config]:
        return Tuned(problem, Config("library"), {Config("library").label: Sample.of([1e-5])}, 8, tried)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("tilemesh.kernels.tuning.compiler.Compiler", lambda device: contextlib.nullcontext())
    monkeypatch.setattr("tilemesh.kernels.tuning.tuner.tune", found)
    rows, page = tmp_path / "trials.jsonl", tmp_path / "page.html"
    assert main(["tune", "512x512x512", "--no-save", "--json", str(rows), "--html", str(page)]) == 0
    first, second = read_trials(str(rows))
    assert (first.config["block_m"], first.seconds, second.seconds) == (64, 2e-5, math.inf)
    assert "64x128" in page.read_text()


# ---- the server ------------------------------------------------------------------------------------------------


@pytest.fixture
def server(make_run: MakeRun) -> Iterator[serve.PageServer]:
    folder = make_run()
    made = serve.PageServer(str(folder), lambda live: f"<p>{live}</p>")
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    yield made
    made.close()
    thread.join(10)


def ask(server: serve.PageServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
    place = server.address.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(place, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or place)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_there_is_a_page_and_its_state_and_nothing_else(server: serve.PageServer) -> None:
    assert ask(server, "/")[0] == 200
    code, state = ask(server, "/state")
    assert (code, state.decode()) == (200, server.version())
    paths = (
        "/config.toml",
        "/../secret",
        "/%2e%2e/secret",
        "//etc/passwd",
        "/state/..",
        "/?x",
        "/checkpoints",
        "/.",
        "*",
    )
    assert {ask(server, path)[0] for path in paths} == {404}


def test_it_only_reads_and_only_for_this_machine(server: serve.PageServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "_ANSWER"):
        assert ask(server, "/", method) == (405, b"only GET and HEAD are answered here\n")
    assert ask(server, "/", "HEAD") == (200, b"")
    port = server.address.rpartition(":")[2].rstrip("/")
    assert {ask(server, "/", host=name)[0] for name in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil")} == {
        403
    }
    assert ask(server, "/", host=f"localhost:{port}")[0] == 200
    # Bound to loopback alone: no other address of this machine answers.
    for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET):
        if not found[4][0].startswith("127."):
            with socket.socket() as one:
                one.settimeout(2)
                assert one.connect_ex((found[4][0], int(port))) != 0


HOSTILE = {
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n": b"414",
    b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n": b"431",
    b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n": b"431",
    b"GET / HTTP/9.9\r\n\r\n": b"505",
    b"GET / nothing\r\n\r\n": b"400",
    b"<script> a b c d\r\n\r\n": b"400",
    b"\x16\x03\x01\x02\x00 \xff \x00\r\n\r\n": b"400",
}


@pytest.mark.parametrize("request_sent", HOSTILE, ids=[repr(request[:18]) for request in HOSTILE])
def test_what_is_no_request_gets_one_line(server: serve.PageServer, request_sent: bytes) -> None:
    place, _, port = server.address.removeprefix("http://").rstrip("/").partition(":")
    with socket.create_connection((place, int(port)), timeout=10) as client:
        client.sendall(request_sent)
        head, _, body = b"".join(iter(lambda: client.recv(65536), b"")).rpartition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 " + HOSTILE[request_sent])
    assert re.fullmatch(rb"the request cannot be read: [\w -]+\n", body)


def test_a_client_that_leaves_in_the_middle_is_no_news(
    server: serve.PageServer, capfd: pytest.CaptureFixture[str]
) -> None:
    place, _, port = server.address.removeprefix("http://").rstrip("/").partition(":")
    client = socket.create_connection((place, int(port)), timeout=10)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing is a reset
    client.sendall(b"GET / HT")
    time.sleep(0.1)
    client.close()
    assert ask(server, "/")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_page_that_is_slow_to_make_is_not_made_again_at_once(make_run: MakeRun) -> None:
    folder, made, now = make_run(), [], 0.0

    def render(live: str) -> str:
        nonlocal now
        made.append(live)
        now += 0.1
        return live

    server = serve.PageServer(str(folder), render, clock=lambda: now)
    server.page()
    (folder / "sample.txt").write_text("more")
    now += 0.9
    assert server.page().decode() == server.version() == made[0]  # a second's rest for a tenth's work
    now += 0.2
    assert server.page().decode() == server.version() != made[0]
    assert len(made) == 2


def test_a_port_that_is_taken_is_one_sentence(server: serve.PageServer) -> None:
    port = int(server.address.rpartition(":")[2].rstrip("/"))
    with pytest.raises(RunError, match="cannot be used"):
        serve.PageServer("x", str, port)
    with pytest.raises(UsageError, match="port 99999: expected 0 to 65535"):
        serve.PageServer("x", str, 99999)


def test_watch_says_where_and_ends_when_interrupted(make_run: MakeRun) -> None:
    folder = make_run()
    before = sorted(path.name for path in folder.rglob("*"))
    command = [sys.executable, "-m", "tilemesh", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = line.split()[2]
        assert address.startswith("http://127.0.0.1:")
        connection = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=20)
        connection.request("GET", "/")
        assert b"made-up-2c" in connection.getresponse().read()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 130
        assert "Traceback" not in (process.stderr.read() if process.stderr else "")
    assert sorted(path.name for path in folder.rglob("*")) == before
