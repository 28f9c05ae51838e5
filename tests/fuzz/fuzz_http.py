"""Hostile HTTP bodies for a server process: what they cost it, and whether anybody else notices.

    python tests/fuzz/fuzz_http.py --bodies 2000 --seed 4     # costs count on an idle machine only

`hostile_bodies` makes them from a seed: no JSON, JSON of any shape, and sound bodies in which a field or two were
replaced by values that are wrong, long, deep, or short to write and long to read. `send_all` sends them one by one to a
server, asks /health all the while, and returns what was not as it must be: a status of 5xx, a refusal that took more
than 100 ms of processor time per MiB that was sent, memory that grew, a /health that others' bodies kept waiting.
`make test` sends some and looks at statuses, which do not depend on who else uses the cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REFUSAL_S_PER_MIB = 0.1
HEALTH_S = 0.1  # at the 99th percentile
MEMORY_GROWTH = 200 << 20
_TICKS = os.sysconf("SC_CLK_TCK")

FIELDS = (
    "model", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop",
    "stream", "stream_options", "logprobs", "top_logprobs", "echo", "logit_bias", "best_of", "suffix", "user", "tools",
    "priority", "ignore_eos", "stop_token_ids", "response_format", "regex", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_completion_tokens", "a key nobody knows",
)  # fmt: skip
RAW = (
    b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000,
    b'{"prompt":"\\ud800"}', b"1" * 5000, b'{"prompt": "x", "prompt": "y"}', b'{"' + b"k" * (1 << 20) + b'": 1}',
    b'{"prompt": [' + b"1," * 500_000 + b"1]}", b'{"prompt": "' + b"x" * (3 << 20) + b'"}',
    b'{"prompt": "' + b"\\u00e9" * 400_000 + b'"}', b'{"messages": [' + b'{"role":"user","content":"a"},' * 40_000
    + b'{"role":"user","content":"a"}]}', b'{"prompt": ' + b"9" * 100_000 + b"}", b" " * (2 << 20) + b"{}",
    *(b'{"prompt": "a", "stop": [' + unit * ((4 << 20) // len(unit) - 20) + b"1]}"
      for unit in (b"[[]],", b"[],", b"{},", b'{"a":1},', b"1,", b"1.5,", b'"",', b'"ab",', b'",,",')),
    b"{" + b",".join(b'"%x":0' % number for number in range(380_000)) + b"}",
)  # fmt: skip
REGEXES = (
    "(((){10000}){10000}){10000}b", "((a{1000}){1000}){1000}", "(a|b)*a(a|b){20}", "(a?){5000}a{5000}", "(.*){30}x",
    "((a|b|ab)*c?){200}", "[" + "".join(chr(0x4E00 + 2 * index) for index in range(4000)) + "]{2000}",
    "(" * 60 + "a" + ")*" * 60, "(x+x+)+y", "a{10000}", "|".join("a" * index for index in range(1, 300)),
    ".{0,9999}.{0,9999}", "(" + "a?" * 2000 + ")" + "a" * 2000, "\\d{1,20}(\\.\\d{1,20}){0,500}",
)  # fmt: skip


def _nested(depth: int, last: Any) -> Any:
    for _ in range(depth):
        last = {"type": "object", "properties": {"a": last, "b": last}}
    return last


def _schemas() -> list[Any]:
    wide = {f"name{index}": {"type": "string"} for index in range(1500)}
    chain = {f"d{index}": {"anyOf": [{"$ref": f"#/$defs/d{index + 1}"}, {"type": "null"}]} for index in range(800)}
    return [
        True, 3, {"type": "object"}, {"$ref": "#"}, {"enum": []}, {"properties": {"a": 3}}, {"oneOf": [{}]},
        {"type": "object", "properties": wide}, {"enum": [f"value {index}" for index in range(2500)]},
        {"$defs": {**chain, "d800": {"type": "null"}}, "$ref": "#/$defs/d0"}, _nested(12, {"type": "string"}),
        {"type": "array", "minItems": 9999, "items": {"type": "array", "minItems": 9999}},
        {"type": "string", "maxLength": 10_000}, {"type": "string", "pattern": REGEXES[0]},
        {"type": "integer", "minimum": -(10**18), "maximum": 10**18}, {"a" * 5000: 1},
    ]  # fmt: skip


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**70, 10**30, 10**300, 1e308, 1e-320, 0.5, "", "x", "ü" * 50, "\x00", "\ud800", [], [[]],
    [1], ["a", 1], {}, {"a": {}}, [None], "1" * 5000, {"type": "json_object"}, {"type": "json_schema"},
    "x" * 300_000, ["x" * 2000] * 100, [-1] * 20_000, {str(index): 1 for index in range(20_000)}, ["y"] * 5000,
    [{"role": "user", "content": "z" * 200_000}], [{"role": "user", "content": [{"type": "text", "text": ""}] * 5000}],
    *REGEXES, *({"type": "json_schema", "json_schema": {"schema": schema}} for schema in _schemas()),
)  # fmt: skip


def hostile_bodies(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Paths below /v1 and bodies: each of `RAW`, each regular expression and schema once, then drawn ones."""
    draw = random.Random(seed)
    certain = [(path, raw) for raw in RAW for path in ("completions", "chat/completions")]
    certain += [
        ("completions", json.dumps({"prompt": "a", "max_tokens": 4, "regex": regex}).encode()) for regex in REGEXES
    ]
    for schema in _schemas():
        asked = {"type": "json_schema", "json_schema": {"schema": schema}}
        certain.append(("completions", json.dumps({"prompt": "a", "max_tokens": 4, "response_format": asked}).encode()))
    draw.shuffle(certain)
    yield from certain[:count]
    for _ in range(count - len(certain)):
        chat = draw.random() < 0.5
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
        body["max_tokens"] = 2
        for _ in range(draw.choice((1, 1, 2))):
            body[draw.choice(FIELDS)] = draw.choice(VALUES)
        yield "chat/completions" if chat else "completions", json.dumps(body).encode()


@dataclass
class Sent:
    """What came of all bodies."""

    codes: dict[int, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    """Statuses that no body may cause."""
    costly: list[str] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    grown: int = 0

    @property
    def slowest_health_s(self) -> float:
        """At the 99th percentile."""
        return sorted(self.health_s)[int(0.99 * len(self.health_s))] if self.health_s else 0.0


def send_all(port: int, process: int, bodies: Iterator[tuple[str, bytes]]) -> Sent:
    """Send them to the server of this process, one after the other."""
    sent, done = Sent(), threading.Event()
    probe = threading.Thread(target=_ask_health, args=(port, done, sent))
    probe.start()
    before = _memory(process)
    try:
        for path, body in bodies:
            began = _cpu_s(process)
            code, content = request(port, "POST", f"/v1/{path}", body)
            cost = _cpu_s(process) - began
            sent.codes[code] = sent.codes.get(code, 0) + 1
            what = f"{path} {body[:120]!r} ({len(body):,} bytes)"
            if code >= 500 or code not in (200, 400, 404, 413, 429):
                sent.failed.append(f"{code} for {what}: {content[:200]!r}")
            elif code != 200 and not json.loads(content)["error"]["message"]:
                sent.failed.append(f"{code} without a reason for {what}")
            # Two ticks are what the kernel's clock, and /health beside it, may add.
            allowed = REFUSAL_S_PER_MIB * max(1.0, len(body) / (1 << 20)) + 2 / _TICKS
            if code != 200 and cost > allowed:
                sent.costly.append(f"refusing took {cost:.2f} s of processor time, more than {allowed:.2f}: {what}")
    finally:
        done.set()
        probe.join()
    sent.grown = _memory(process) - before
    if sent.grown > MEMORY_GROWTH:
        sent.costly.append(f"memory grew by {sent.grown >> 20} MiB")
    return sent


def request(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _ask_health(port: int, done: threading.Event, sent: Sent) -> None:
    while not done.wait(0.02):
        began = time.monotonic()
        code, _ = request(port, "GET", "/health")
        sent.health_s.append(time.monotonic() - began)
        if code != 200:
            sent.failed.append(f"/health answered {code}")


def _cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _memory(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(argv: list[str]) -> int:
    """Start a server, send it hostile bodies, and say what was wrong."""
    parser = argparse.ArgumentParser(description="Send hostile bodies to a server and measure what they cost.")
    parser.add_argument("--bodies", type=int, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=4, metavar="N")
    options = parser.parse_args(argv)
    sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
    from served import Serving, make_folder

    with tempfile.TemporaryDirectory() as folder:
        serving = Serving(make_folder(Path(folder) / "small"))
        try:
            sent = send_all(serving.port, serving.process.pid, hostile_bodies(options.bodies, options.seed))
        finally:
            serving.process.terminate()
            serving.process.wait(60)
    if sent.slowest_health_s > HEALTH_S:
        sent.costly.append(f"/health took {1000 * sent.slowest_health_s:.0f} ms at the 99th percentile")
    for line in (*sent.failed, *sent.costly):
        print(line)
    counts = ", ".join(f"{count} x {code}" for code, count in sorted(sent.codes.items()))
    print(
        f"{options.bodies} bodies: {counts}; /health {1000 * sent.slowest_health_s:.0f} ms at the 99th percentile of "
        f"{len(sent.health_s)}; memory grew by {sent.grown >> 20} MiB; {len(sent.failed) + len(sent.costly)} violations"
    )
    return int(bool(sent.failed or sent.costly))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
