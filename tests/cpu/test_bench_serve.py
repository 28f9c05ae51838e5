"""`tilemesh bench serve`: loads, our engine under them, a server under them, peers that are not there."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tilemesh.bench.serve import peer_process, peers
from tilemesh.bench.serve.features import FeatureBench, feature_rows
from tilemesh.bench.serve.load import Lengths, LoadRequest, make_load, read_trace, to_simulate
from tilemesh.bench.serve.models import SHAPES, random_served
from tilemesh.bench.serve.ours import fitting_batches, predict_load, run_load
from tilemesh.bench.serve.peers import PeerProcess, write_folder
from tilemesh.bench.serve.run import ServeBench
from tilemesh.bench.serve.url import load_url, read_url
from tilemesh.cli.main import main
from tilemesh.core.energy import EnergyCounter, EnergyMeter
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.model.config import preset
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.serving_clock import StepClock
from tilemesh.serve.engine import Engine
from tilemesh.serve.figures import ServeGoal

TINY = preset("tiny")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(random_served("tiny", TINY, torch.float32), pages=200, running=4, step_tokens=64) as made:
        yield made


def test_the_shapes_have_the_parameters_they_are_named_for() -> None:
    assert count_parameters(SHAPES["llama-27m"]).total == pytest.approx(27e6, rel=0.02)
    assert count_parameters(SHAPES["llama-110m"]).total == pytest.approx(110e6, rel=0.02)


def test_loads_repeat_share_a_beginning_and_keep_their_lengths() -> None:
    load = make_load(20, Lengths(10, 30), Lengths(2, 5), 256, rate=5.0, shared=8, seed=3)
    assert load == make_load(20, Lengths(10, 30), Lengths(2, 5), 256, rate=5.0, shared=8, seed=3)
    assert len({request.prompt[:8] for request in load}) == 1
    assert {len(request.prompt) for request in load} <= set(range(10, 31))
    assert [request.at_s for request in load] == sorted(request.at_s for request in load)
    assert load[-1].at_s == pytest.approx(20 / 5.0, rel=0.8)
    for bad in ("", "0", "5-2", "x", "-3", "1-2-3"):
        with pytest.raises(UsageError, match="--prompt"):
            Lengths.parse("--prompt", bad)


def test_a_trace_is_read_from_its_first_request_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 12.5, "prompt": 3, "output": 2}\n\n{"at": 12.0, "prompt": [5, 6], "output": 1}\n')
    first, second = read_trace(path, 256)
    assert first == LoadRequest(0.0, (5, 6), 1)
    assert (second.at_s, len(second.prompt), second.output) == (0.5, 3, 2)


@pytest.mark.parametrize(
    "line",
    ["", "x", "[]", '{"at": 1, "prompt": 2}', '{"at": -1, "prompt": 2, "output": 2}',
     '{"at": 1, "prompt": 0, "output": 2}', '{"at": 1, "prompt": [999], "output": 2}',
     '{"at": 1, "prompt": 2, "output": true}'],
)  # fmt: skip
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(UsageError, match=r"trace\.jsonl"):
        read_trace(path, 256)


def test_a_load_runs_at_its_times_and_its_prediction_has_the_same_steps(engine: Engine) -> None:
    load = make_load(6, Lengths(5, 30), Lengths(4, 9), TINY.vocabulary)
    history = run_load(engine, load)
    assert [len(record.output) for record in history.requests.values()] == [request.output for request in load]
    assert sum(step.prefill_tokens for step in history.steps) == sum(len(request.prompt) for request in load)
    predicted = predict_load(engine, load, lambda parts: 1e-3)
    # All at once: how long steps take changes nothing about them. The engine may begin before the last has come.
    assert sum(step.decode_tokens for step in predicted.steps) == sum(step.decode_tokens for step in history.steps)
    assert len(to_simulate(load)) == 6
    assert fitting_batches(1) == [1]
    assert fitting_batches(64) == [1, 4, 16, 64]


def test_rows_have_prediction_limit_and_reasons(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count(0.0, 6.0)  # joules: as much is drawn between any two looks
    counter = EnergyCounter("a planted counter", 1, lambda: next(readings))
    monkeypatch.setattr("tilemesh.bench.serve.run.energy_meter", lambda device: EnergyMeter(counter))
    clock = StepClock(TINY, parse_cluster("1xcpu"), "fp32")
    bench = ServeBench(engine, {"model": "tiny"}, clock, "", ServeGoal(60.0, 60.0), lambda text: None)
    bench.steps([1, 4], length=40, count=8)
    bench.offline(make_load(4, Lengths(5, 9), Lengths(3, 3), TINY.vocabulary), 2, [])
    bench.online(make_load(3, Lengths(5, 9), Lengths(3, 3), TINY.vocabulary, rate=100.0), 100.0)
    names = [row.name for row in bench.findings.rows]
    assert names[:3] == ["serve, decode step", "serve, decode step", "serve, offline"]
    assert "serve, first token" in names
    energy = bench.findings.rows[3]
    assert (energy.name, energy.missing["predicted"]) == (
        "serve, energy per token",
        "no power is known of this device",
    )
    assert energy.measured is not None
    assert energy.measured.median == 6 / 12  # four answers of three tokens
    for row in bench.findings.rows:
        assert row.predicted is not None or row is energy
        assert row.measured is not None
        assert json.loads(row.to_json())["case"]["model"] == "tiny"
    offline = bench.findings.rows[2]
    assert offline.measured is not None
    assert offline.measured.n == 2
    assert offline.missing["peers"] == "none was asked for"
    assert bench.findings.points[1].measured.goodput == 1.0


def test_a_slow_machine_measures_less_and_never_nothing(engine: Engine) -> None:
    said: list[str] = []
    bench = ServeBench(engine, {"model": "tiny"}, None, "", ServeGoal(60.0, 60.0), said.append, seconds=1e-3)
    bench.fit(4)  # of a time that is over: what was begun is enough
    assert bench.predict is not None
    bench.predict = lambda parts: 10.0  # seconds per step
    bench.offline(make_load(8, Lengths(5, 9), Lengths(3, 3), TINY.vocabulary), 3, [])
    row = bench.findings.rows[0]
    assert row.measured is not None
    assert (row.case["requests"], row.measured.n) == (1, 1)
    assert said[1:] == [
        "a slow machine: 1 of 8 requests (--seconds)",
        said[2],
        "no time for more than 1 of 3 turns (--seconds)",
    ]
    bench.online(make_load(3, Lengths(5, 9), Lengths(3, 3), TINY.vocabulary, rate=100.0), 100.0)
    assert [row.name for row in bench.findings.rows] == ["serve, offline", "serve, energy per token"]
    fresh = ServeBench(engine, {"model": "tiny"}, None, "", ServeGoal(60.0, 60.0), said.append, seconds=1e-3)
    fresh.online(make_load(3, Lengths(5, 9), Lengths(3, 3), TINY.vocabulary, rate=100.0), 100.0)
    assert fresh.findings.rows


def test_every_turn_computes_its_prompts(engine: Engine) -> None:
    """The engine keeps prompts that it has seen, and a peer without such a cache has to compute them every time."""
    bench = ServeBench(engine, {"model": "tiny"}, None, "", ServeGoal(60.0, 60.0), lambda text: None)
    load = make_load(4, Lengths(40, 40), Lengths(3, 3), TINY.vocabulary)
    seen = []
    peer = SimpleNamespace(name="peer", run=lambda given: seen.append(given) or 1.0, why="")
    bench.offline(load, 2, [peer])  # type: ignore[list-item]
    assert [[len(request.prompt) for request in given] for given in seen] == [[40] * 4] * 3
    assert len({request.prompt for given in seen for request in given}) == 12
    history = run_load(engine, seen[0])
    assert sum(step.prefill_tokens for step in history.steps) < 160  # these it has seen


def test_a_peer_that_is_not_installed_or_ends_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", {"nobody": ("a_package_that_nobody_has",), "unknown": ("torch",)})
    with PeerProcess("nobody", tmp_path, "fp32", "cpu") as missing:
        assert missing.why == "a_package_that_nobody_has not installed"
        assert missing.run([LoadRequest(0.0, (1,), 1)]) is None
    with PeerProcess("unknown", tmp_path, "fp32", "cpu") as broken:
        assert "KeyError" in broken.why


def test_a_peer_that_gives_no_answer_does_not_go_on_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "slow"
    program.write_text('#!/bin/sh\necho \'{"version": "1"}\'\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setattr(peers, "PEERS", {"slow": ()})
    monkeypatch.setattr("sys.executable", str(program))
    with PeerProcess("slow", tmp_path, "fp32", "cpu") as slow:
        assert (slow.version, slow.why) == ("1", "")
        assert slow.run([LoadRequest(0.0, (1,), 1)], limit_s=0.2) is None
        assert slow.why.startswith("no answer within")
        assert slow._process is not None
        assert slow._process.wait(5) != 0
        assert slow.run([LoadRequest(0.0, (1,), 1)]) is None


@pytest.mark.parametrize(("device", "most"), [("cpu", 8 * 2**30), ("cuda", None)])
def test_continuous_batching_on_a_cpu_gets_a_cache_that_fits(
    monkeypatch: pytest.MonkeyPatch, device: str, most: int | None
) -> None:
    """By itself it takes more than half of the machine's memory, and where several run it is killed."""
    asked: list[dict[str, Any]] = []

    class Model:
        def from_pretrained(self, *given: object, **options: object) -> Model:
            return self

        def to(self, device: str) -> Model:
            return self

        def eval(self) -> Model:
            return self

        def generate_batch(self, inputs: list[list[int]], **options: Any) -> dict[str, Any]:
            asked.append(options)
            return {str(at): SimpleNamespace(generated_tokens=[1, 2]) for at in range(len(inputs))}

    fake = SimpleNamespace(AutoModelForCausalLM=Model(), GenerationConfig=dict, ContinuousBatchingConfig=dict)
    monkeypatch.setattr(peer_process, "import_module", lambda name: torch if name == "torch" else fake)
    peer = peer_process.TransformersContinuous(Path("nowhere"), "fp32", device)
    peer.generate([{"prompt": [1], "output": 2}] * 3)
    (options,) = asked
    assert ("continuous_batching_config" in options) == (most is not None)
    if most is not None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert options["continuous_batching_config"]["max_memory_percent"] * total <= most
    with pytest.raises(RunError, match="these have 2-64: give --output one number"):  # it would compute 64 for each
        peer.generate([{"prompt": [1], "output": 2}, {"prompt": [1], "output": 64}])


@pytest.mark.slow
def test_transformers_answers_a_load(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_folder(random_served("tiny", TINY, torch.float32).model, tmp_path)
    load = make_load(3, Lengths(5, 9), Lengths(3, 3), TINY.vocabulary)
    with PeerProcess("transformers-static", tmp_path, "fp32", "cpu") as peer:
        assert peer.why == ""
        assert (peer.run(load) or 0) > 0


# A server ---------------------------------------------------------------------------------------------------------


class FakeServer:
    """Answers /v1/models and streams events, each of so many `tokens`, until there are as many as were asked for.
    `status` instead, where it is not 200."""

    def __init__(self, status: int = 200, tokens: int = 1) -> None:
        self.status, self.tokens, self.bodies = status, tokens, list[dict[str, object]]()
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    def _serve(self) -> None:
        async def main() -> None:
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            self._started.set()
            await asyncio.Event().wait()

        with contextlib.suppress(RuntimeError):  # stopped
            self._loop.run_until_complete(main())

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/v1/models" in head:
            body = b'{"data": [{"id": "fake"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            length = int(head.lower().split(b"content-length:")[1].split()[0])
            asked = json.loads(await reader.readexactly(length))
            self.bodies.append(asked)
            writer.write(b"HTTP/1.1 %d Told\r\nTransfer-Encoding: chunked\r\n\r\n" % self.status)
            count = -(-asked["max_tokens"] // self.tokens)
            events: list[dict[str, Any]] = [{"choices": [{"text": "x", "finish_reason": None}], "usage": None}] * count
            events.append({"choices": [{"text": "", "finish_reason": "length"}]})
            if self.tokens > 1 and asked["stream_options"] == {"include_usage": True}:
                events.append({"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}})
            for event in events if self.status == 200 else [{"error": "no"}]:
                data = b"data: " + json.dumps(event).encode() + b"\n\n"
                writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0.001)
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def test_a_server_on_loopback_is_timed_token_by_token() -> None:
    server = FakeServer()
    load = make_load(4, Lengths(3, 5), Lengths(2, 6), 100, rate=200.0)
    records = load_url(f"http://127.0.0.1:{server.port}/v1", load)
    server.close()
    assert [len(record.token_ns) for record in records] == [request.output for request in load]
    assert all((record.first_token_s or 0) > 0 for record in records)
    assert {body["model"] for body in server.bodies} == {"fake"}
    assert sorted(len(body["prompt"]) for body in server.bodies) == sorted(len(r.prompt) for r in load)  # type: ignore[arg-type]


def test_tokens_that_a_server_sends_together_are_all_counted() -> None:
    server = FakeServer(tokens=3)
    load = make_load(3, Lengths(3, 5), Lengths(2, 7), 100)
    records = load_url(f"http://127.0.0.1:{server.port}", load)
    server.close()
    assert [len(record.token_ns) for record in records] == [request.output for request in load]
    for record in records:
        assert record.token_ns == sorted(record.token_ns)
        assert len(set(record.token_ns)) == -(-record.max_tokens // 3)  # those of an event at its time


def test_a_server_that_refuses_or_is_not_there_is_an_error() -> None:
    server = FakeServer(status=500)
    with pytest.raises(RunError, match="500"):
        load_url(f"http://127.0.0.1:{server.port}", make_load(1, Lengths(3, 3), Lengths(1, 1), 9))
    server.close()
    with pytest.raises(RunError, match="does not answer"):
        load_url("http://127.0.0.1:9", make_load(1, Lengths(3, 3), Lengths(1, 1), 9))
    for bad in ("127.0.0.1:80", "https://127.0.0.1", "http://example.com", "http://127.0.0.1:99999", "http://10.0.0.1"):
        with pytest.raises(UsageError, match="--url"):
            read_url(bad)


def test_features_are_measured_with_and_without() -> None:
    served = random_served("tiny", TINY, torch.float32)
    bench = FeatureBench(served, "cpu", {"model": "tiny"}, Engine)
    (shared, apart), (places,) = feature_rows(bench, ["prefix", "pages"])
    assert (shared.case["shared"], apart.case["shared"], shared.unit) == (48, 0, "s")  # whole pages of 57 tokens
    for row in (shared, apart):
        assert row.predicted == pytest.approx(row.peers["without"].median * (64 - int(str(row.case["shared"]))) / 64)
    assert places.measured is not None
    # A request holds whole pages, and one page more than its tokens need at most.
    assert places.peers["one block per context"].median < places.measured.median <= 1
    assert "with and without" in places.missing["limit"]


def test_steps_launched_kernel_by_kernel_stand_beside_ours(engine: Engine, tmp_path: Path) -> None:
    bench = ServeBench(engine, {"model": "tiny"}, None, "no clock", ServeGoal(), lambda text: None)
    bench.steps([2], length=20, plain=engine, profile=tmp_path, count=8)
    (row,) = bench.findings.rows
    assert list(row.peers) == ["kernel by kernel"]
    assert (tmp_path / "decode-2.txt").read_text().split()[:2] == ["us", "calls"]


def test_the_energy_of_processes_on_gpus_is_not_that_of_the_cpu(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = itertools.count(0.0, 6.0)
    counter = EnergyCounter("this machine's packages", 1, lambda: next(readings))
    monkeypatch.setattr("tilemesh.bench.serve.run.energy_meter", lambda device: EnergyMeter(counter))
    replicas: Any = SimpleNamespace(engines=[engine], submit=engine.submit)
    for on_gpus in (False, True):
        bench = ServeBench(
            engine, {}, None, "", ServeGoal(), lambda text: None, watched=False, replicas=replicas, on_gpus=on_gpus
        )
        bench.offline(make_load(2, Lengths(5, 9), Lengths(3, 3), TINY.vocabulary), 1, [])
        row = bench.findings.rows[-1]
        assert (row.name, row.measured is None) == ("serve, energy per token", on_gpus)
        assert ("not added up" in row.missing.get("measured", "")) == on_gpus


def test_the_requests_of_a_trace_have_pages_and_are_what_rows_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, online = list[int](), ServeBench.online

    def noted(self: ServeBench, *arguments: Any) -> None:
        pages.append(self.engine.limits.pages)
        online(self, *arguments)

    monkeypatch.setattr(ServeBench, "online", noted)
    trace, rows = tmp_path / "trace.jsonl", tmp_path / "rows.jsonl"
    trace.write_text('{"at": 0, "prompt": 90, "output": 3}\n{"at": 0, "prompt": 5, "output": 2}\n')
    words = ["bench", "serve", "tiny", "--trace", str(trace), "--blocks", "0", "--running", "2"]
    # Prompts of 128 tokens, the usual most, would not fit the context of 128 beside an answer of 100: they get shorter.
    assert main([*words, "--output", "100", "--predict", "machine", "--json", str(rows)]) == 0
    assert pages[0] >= 2 * -(-93 // 16)
    cases = [json.loads(line)["case"] for line in rows.read_text().splitlines()]
    assert {(case["prompt"], case["output"], case["requests"]) for case in cases} == {("5-90", "2-3", 2)}


def test_a_decode_step_is_one_of_all_its_sequences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where prompts take so many steps that the first answer would be over before the last one begins."""
    histories: list[Any] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        histories.append(run_load(*arguments, **options))
        return histories[-1]

    monkeypatch.setattr("tilemesh.bench.serve.run.run_load", noted)
    model = random_served("tiny", TINY.replace(layers=1, width=32, heads=2, context=128), torch.float32)
    with Engine(model, pages=80, running=8, step_tokens=16) as narrow:
        bench = ServeBench(narrow, {}, None, "no clock", ServeGoal(), lambda text: None)
        bench.steps([8], length=100, count=10)
    steps = [step.decode_tokens for step in histories[-1].steps if not step.prefill_tokens]
    assert steps.count(8) >= 8
    (row,) = bench.findings.rows
    assert row.measured is not None
    assert row.measured.n == steps.count(8) - 2
    assert main(["bench", "serve", "--steps", "1,8", "--running", "4"]) == 2
    assert "--steps 8 and --running 4" in capsys.readouterr().err


def test_replicas_that_share_experts_are_timed_beside_their_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TINY.replace(layers=2, experts=4, experts_per_token=2, mlp_width=64)
    asked: list[tuple[object, ...]] = []

    class HalfSeconds:
        def __call__(self, parts: object) -> float:
            return 0.5

        limit = __call__

    def clock(*sizes: object) -> tuple[HalfSeconds, str]:
        asked.append(sizes[3:])
        return HalfSeconds(), ""

    monkeypatch.setattr("tilemesh.bench.serve.run.machine_clock", clock)
    folder, rows = write_folder(random_served("m", config, torch.float32).model, tmp_path / "m"), tmp_path / "r.jsonl"
    words = ["bench", "serve", str(folder), "--mesh", "dp=2,ep=2"]
    few = ["--requests", "4", "--prompt", "8", "--output", "3", "--blocks", "1", "--running", "4"]
    assert main([*words, *few, "--loads", "0.5", "--json", str(rows)]) == 0
    by_name = {row["name"]: row for row in map(json.loads, rows.read_text().splitlines())}
    row = by_name["serve, offline"]
    served_per_s = row["measured"]["median"] / 3  # three tokens each
    assert by_name["serve, first token"]["case"]["rate"] == pytest.approx(0.5 * served_per_s)
    assert asked == [(1, 2, 2)]
    assert row["case"]["mesh"] == "dp=2,ep=2"
    assert row["predicted"] == pytest.approx(8.0)  # each of two answers two requests, three tokens each, in three steps
    assert row["limit"] == pytest.approx(8.0)
    assert main([*words, "--loads", "0.5", "--blocks", "0"]) == 2
    assert "shares of what is served offline" in capsys.readouterr().err
    assert main([*words, "--steps", "2"]) == 2
    assert "leave --steps, --features and --peers out" in capsys.readouterr().err


class LlamaLibrary:
    """As much of llama.cpp as its peer calls: the next token is the last one plus 1."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[int, int]]] = {}
        self.widths: list[int] = []
        self.drawn = 0
        self.llama_log_callback, self.llama_vocab_n_tokens = (lambda call: call), (lambda vocabulary: 64)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: SimpleNamespace()

    def llama_batch_init(self, tokens: int, _: int, __: int) -> Any:
        return SimpleNamespace(
            token=[0] * tokens, pos=[0] * tokens, logits=[False] * tokens, n_seq_id=[0] * tokens,
            seq_id=[[-1] for _ in range(tokens)], n_tokens=0,
        )  # fmt: skip

    def llama_decode(self, context: Any, batch: Any) -> int:
        self.tokens = batch.token[: batch.n_tokens]
        self.widths.append(batch.n_tokens)
        for at in range(batch.n_tokens):
            assert batch.n_seq_id[at] == 1
            self.seen.setdefault(batch.seq_id[at][0], []).append((batch.pos[at], batch.token[at]))
        return 0

    def llama_get_logits_ith(self, context: Any, at: int) -> Any:
        self.drawn += 1
        logits = np.zeros(64, np.float32)
        logits[(self.tokens[at] + 1) % 64] = 1
        return logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def test_llama_cpp_decodes_all_that_has_begun_beside_chunks_of_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = LlamaLibrary()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)  # type: ignore[arg-type]
    (tmp_path / "llama-bf16.gguf").touch()
    peer = peer_process.LlamaCpp(tmp_path, "bf16", "cpu")
    monkeypatch.setattr(peer, "STEP_TOKENS", 8)
    requests = [{"prompt": [1, 2, 3], "output": 5}, {"prompt": list(range(10, 22)), "output": 2}]
    peer.generate(requests)
    assert library.seen == {
        0: list(enumerate([1, 2, 3, 4, 5, 6, 7])),
        1: list(enumerate([*range(10, 22), 22])),
    }
    assert library.widths == [8, 8, 2, 1, 1]
    assert library.drawn == 7
