"""`tilemesh bench train`: ours against the peers, each in a process group of its own, in turns.

MPI and gloo must not share a process, and a waiting MPI rank would take a core; so every contender is a job of its
own that sleeps until the turn file names it. Blocks of steps follow one another in an order shuffled each round.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilemesh.core.errors import RunError
from tilemesh.launch.job import Outcome, launch
from tilemesh.measure.sample import Sample
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import TRAIN
from tilemesh.train.config import TrainConfig

PEERS = {"eager": "PyTorch eager", "compile": "PyTorch + torch.compile", "ddp": "DDP over gloo"}
TURN_FILE = "turn.json"
READY_WITHIN_S = 300.0


@dataclass
class Contender:
    """A job that takes turns."""

    name: str
    ranks: int
    transport: str
    folder: Path
    said: list[str] = field(default_factory=list)
    outcome: Outcome | None = None
    thread: threading.Thread | None = None
    seconds: list[float] = field(default_factory=list)
    memory_bytes: int = 0

    def start(self) -> None:
        def sink(rank: int, stream: str, line: bytes) -> None:
            self.said.append(line.decode(errors="replace"))

        def main() -> None:
            command = ["-m", "tilemesh.train.bench_rank", self.name, str(self.folder)]
            try:
                self.outcome = launch(
                    command, ranks=self.ranks, transport=self.transport, sink=sink, say=self.said.append
                )
            except RunError as error:
                self.said.append(str(error))

        self.thread = threading.Thread(target=main, daemon=True)
        self.thread.start()

    @property
    def lives(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def why(self) -> str:
        """Why it did not take part, in one line."""
        if self.outcome is not None and self.outcome.failure is not None:
            return self.outcome.failure.sentence()
        return self.said[-1] if self.said else "it ended without a word"


@dataclass(frozen=True)
class Comparison:
    """Seconds a step of ours and of each peer; `missing` says why a peer is not there."""

    ours: Sample
    peers: dict[str, Sample]
    missing: dict[str, str]
    memory_bytes: dict[str, int]


def compare(
    config: TrainConfig,
    *,
    peers: Sequence[str] = ("eager", "compile", "ddp"),
    transport: str = "auto",
    blocks: int = 8,
    steps: int = 5,
    at_once: bool = False,
    profile: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Time ours and the peers in turns on this machine.

    `at_once`: let them make themselves ready at the same time, where compiling on many cores takes longer than steps.
    `profile`: a folder for what each spends its step on, kernel by kernel, taken after the timing.
    """
    with tempfile.TemporaryDirectory(prefix="tilemesh-bench-") as place:
        folder = new_run(TRAIN, config.to_toml(), Path(place) / "bench")
        all_of_them = [Contender("ours", config.plan.world, transport, folder)]
        for name in peers:
            ranks = config.plan.world if name == "ddp" else 1
            all_of_them.append(Contender(name, ranks, "torch", folder))
        with _running(all_of_them, folder, at_once, say) as ready:
            _take_turns(ready, folder, blocks, steps, say)
            if profile is not None:
                _profile(ready, folder, profile, say)
            missing = {PEERS[one.name]: one.why() for one in all_of_them if one not in ready}
            if all_of_them[0] not in ready or not all_of_them[0].seconds:
                raise RunError(f"ours did not run: {all_of_them[0].why()}")
    found = {one.name: Sample.of(one.seconds) for one in ready if one.seconds}
    return Comparison(
        ours=found.pop("ours"),
        peers={PEERS[name]: sample for name, sample in found.items()},
        missing=missing,
        memory_bytes={PEERS.get(one.name, one.name): one.memory_bytes for one in ready},
    )


@contextlib.contextmanager
def _running(
    contenders: list[Contender], folder: Path, at_once: bool, say: Callable[[str], None]
) -> Iterator[list[Contender]]:
    """Contenders that are ready, started one after the other or all at once; all are ended afterwards."""
    ready = []
    try:
        for one in contenders if at_once else ():
            one.start()
        for one in contenders:
            say(f"{'waiting for' if at_once else 'starting'} {PEERS.get(one.name, one.name)}")
            if not at_once:
                one.start()
            end = time.monotonic() + READY_WITHIN_S
            while one.lives and time.monotonic() < end and not (folder / f"{one.name}.ready").exists():
                time.sleep(0.05)
            if (folder / f"{one.name}.ready").exists():
                ready.append(one)
            else:
                say(f"{PEERS.get(one.name, one.name)} does not take part: {one.why()}")
        yield ready
    finally:
        _write(folder / TURN_FILE, {"name": ""})
        for one in contenders:
            if one.thread is not None:
                one.thread.join(60)


def _take_turns(ready: list[Contender], folder: Path, blocks: int, steps: int, say: Callable[[str], None]) -> None:
    draw, turn = random.Random(0), 0
    for number in range(blocks):
        order = list(ready)
        draw.shuffle(order)
        for one in order:
            turn += 1
            found = _turn(one, folder, {"block": turn, "steps": steps})
            one.seconds.append(float(found["seconds"]))
            one.memory_bytes = int(found["memory_bytes"])
        say(f"block {number + 1} of {blocks}")


def _profile(ready: list[Contender], folder: Path, into: Path, say: Callable[[str], None]) -> None:
    """A file for each contender: a line for each kernel, microseconds a step, calls a step, its name."""
    into.mkdir(parents=True, exist_ok=True)
    for one in ready:
        kernels = _turn(one, folder, {"block": 0, "profile": True})["kernels"]
        lines = [f"{seconds * 1e6:10.1f} {calls:7.1f}  {name}" for seconds, calls, name in kernels]
        path = into / f"{one.name}.txt"
        path.write_text("\n".join(["        us   calls  a step", *lines, ""]))
        total_ms, calls = sum(kernel[0] for kernel in kernels) * 1e3, sum(kernel[1] for kernel in kernels)
        say(f"{PEERS.get(one.name, one.name)}: {total_ms:.2f} ms in {calls:.0f} calls a step, by kernel in {path}")


def _turn(one: Contender, folder: Path, what: dict[str, Any]) -> dict[str, Any]:
    """Let a contender take a turn, and wait for what it says of it."""
    _write(folder / TURN_FILE, {"name": one.name, **what})
    done = folder / f"{one.name}-{what['block']}.done"
    while not done.exists():
        if not one.lives:
            raise RunError(f"{PEERS.get(one.name, one.name)} ended in the middle: {one.why()}")
        time.sleep(0.005)
    found: dict[str, Any] = json.loads(done.read_text())
    return found


def _write(path: Path, value: dict[str, Any]) -> None:
    other = path.with_name(f".{path.name}.new")
    other.write_text(json.dumps(value))
    os.replace(other, path)
