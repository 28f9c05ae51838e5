"""`tilemesh bench train`: ours against the peers, each on ranks of its own, in turns.

MPI and gloo must not share a process; so every contender has ranks of its own (`launch.Ranks`), which sleep between
calls. Blocks of steps follow one another in an order shuffled each round. The rank's side is `rank.py`. All begin with
the same weights and take the same batches, and a peer whose first losses are not ours does not take part.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tilemesh.bench.harness import OURS
from tilemesh.bench.profile import write_kernel_times
from tilemesh.core.errors import RunError
from tilemesh.launch import Ranks
from tilemesh.measure.sample import Sample
from tilemesh.train.config import TrainConfig

PEERS = {
    "eager": "PyTorch eager",
    "compile": "PyTorch + torch.compile",
    "ddp": "DDP over gloo",
    "zero-optimizer": "ZeroRedundancyOptimizer over gloo",
    "fsdp": "fully_shard over gloo",
    "deepspeed": "DeepSpeed over gloo",
    "pipeline": "torch's pipelining over gloo",
    "fsdp-pipeline": "FSDP2 + DTensor + torch's pipelining over gloo",
}
ALONE = ("eager", "compile")
"""Peers that have one rank; the others have as many as ours."""
SAME_LOSS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-2}
"""How far a peer's loss may be from ours, relative: about a hundred roundings, or with 16-bit products two of them."""
MALLOC = {
    "kept": "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824",
    "mapped": "glibc.malloc.mmap_threshold=131072",
    "one-arena": "glibc.malloc.arena_max=1",
}
"""Settings of glibc: freed memory stays in the heap; every tensor of 128 KiB is a mapping of its own, which goes back
when it is freed; threads share one heap."""
READY_WITHIN_S = 300.0
_SIDE = "tilemesh.bench.train.rank"


@dataclass
class Contender:
    """Ranks that take turns with others."""

    name: str
    ranks: int
    transport: str
    started: Ranks | None = None
    seconds: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    losses: Sequence[float] = ()
    """Of the first steps."""
    settings: TrainConfig | None = None
    """Of ours with other settings, which the name says."""
    malloc: str = ""
    """glibc's tunables, where they are not the process's own."""

    @property
    def title(self) -> str:
        return PEERS.get(self.name, self.name)

    def start(self, config: TrainConfig) -> None:
        """Start the ranks and let them prepare themselves; `wait` for it."""
        environ = {**os.environ, "GLIBC_TUNABLES": self.malloc} if self.malloc else None
        self.started = Ranks(
            self.ranks, transport=self.transport, environ=environ, sink=lambda rank, stream, line: None
        )
        name = OURS if self.settings is not None or self.malloc else self.name
        self.started.begin(f"{_SIDE}:prepare", name, (self.settings or config).to_toml())

    def wait(self) -> None:
        assert self.started is not None
        self.losses = self.started.results(READY_WITHIN_S)[0]

    def turn(self, function: str, *arguments: object) -> Any:
        """What a function of `rank.py` returned on rank 0."""
        assert self.started is not None
        try:
            return self.started.call(f"{_SIDE}:{function}", *arguments)[0]
        except RunError as error:
            raise RunError(f"{self.title} failed in the middle: {error}") from error


@dataclass(frozen=True)
class TrainComparison:
    """Seconds per step of ours and of each peer; `missing` says why a peer is not there. `memory_bytes`: of the fullest
    rank of each, beside what its libraries took before there was a model."""

    ours: Sample
    peers: dict[str, Sample]
    missing: dict[str, str]
    memory_bytes: dict[str, int]


def compare(
    config: TrainConfig,
    *,
    peers: Sequence[str] = ("eager", "compile", "ddp"),
    also: Mapping[str, TrainConfig] | None = None,
    malloc: Sequence[str] = (),
    transport: str = "auto",
    blocks: int = 8,
    steps: int = 5,
    at_once: bool = False,
    profile: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> TrainComparison:
    """Time ours and the peers in turns on this machine. A peer that does not start is missing; ours must start.

    `at_once`: let them make themselves ready at the same time, where compiling on many cores takes longer than steps.
    `profile`: a folder for what each spends its step on, kernel by kernel, taken after the timing. `also`: ours with
    other settings, as further contenders under these names. `malloc`: ours under these settings of `MALLOC`, too.
    """
    ours = Contender(OURS, config.plan.world, transport)
    others = [Contender(name, 1 if name in ALONE else config.plan.world, "torch") for name in peers]
    others += [
        Contender(name, settings.plan.world, transport, settings=settings) for name, settings in (also or {}).items()
    ]
    others += [Contender(f"ours, malloc {name}", config.plan.world, transport, malloc=MALLOC[name]) for name in malloc]
    with _running([ours, *others], config, at_once, say) as missing:
        ready = [contender for contender in (ours, *others) if contender.name not in missing]
        _take_turns(ready, blocks, steps, say)
        if profile is not None:
            _profile(ready, profile, say)
    return TrainComparison(
        ours=Sample.of(ours.seconds),
        peers={contender.title: Sample.of(contender.seconds) for contender in ready if contender is not ours},
        missing={PEERS.get(name, name): why for name, why in missing.items()},
        memory_bytes={contender.title: contender.memory_bytes for contender in ready},
    )


@contextlib.contextmanager
def _running(
    contenders: Sequence[Contender], config: TrainConfig, at_once: bool, say: Callable[[str], None]
) -> Iterator[dict[str, str]]:
    """Contenders that are ready, started one after the other or all at once; gives why some are not, by their names."""
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as stack:

        def start(contender: Contender) -> None:
            contender.start(config)
            assert contender.started is not None
            stack.push(partial(_end, contender.title, contender.started, say))

        def attempt(contender: Contender, begin: Callable[[], None]) -> None:
            """A peer that cannot do this is missing, with the reason; without ours there is nothing to compare."""
            if contender.name in missing:
                return
            try:
                begin()
            except (RunError, OSError) as error:
                if contender.name == OURS:
                    raise RunError(f"ours did not start: {error}") from error
                missing[contender.name] = str(error)
                say(f"{contender.title} does not take part: {error}")

        for contender in contenders if at_once else ():
            attempt(contender, partial(start, contender))
        for contender in contenders:
            say(f"{'waiting for' if at_once else 'starting'} {contender.title}")
            if not at_once:
                attempt(contender, partial(start, contender))
            attempt(contender, contender.wait)
            attempt(contender, partial(require_same_losses, contender, contenders[0], config))
        yield missing


def require_same_losses(peer: Contender, ours: Contender, config: TrainConfig) -> None:
    """Refuse a peer that computes something else. With dropout each has masks of its own, and nothing can be said."""
    bound = SAME_LOSS.get(config.plan.precision)
    if config.model.dropout or bound is None:
        return
    for step, (theirs, mine) in enumerate(zip(peer.losses, ours.losses, strict=True), start=1):
        if not abs(theirs - mine) <= bound * abs(mine):
            raise RunError(f"its loss at step {step} is {theirs:.7g} and ours {mine:.7g}: it computes something else")


def usual_peers(config: TrainConfig) -> tuple[str, ...]:
    """Those that suit a plan."""
    plan = config.plan
    if plan.pp > 1:
        return ("fsdp-pipeline",) if plan.dp * plan.tp > 1 else ("eager", "pipeline")
    if plan.zero:
        return ("zero-optimizer" if plan.zero == 1 else "fsdp", "deepspeed")
    return ("eager", "compile", *(("ddp",) if plan.tp * plan.cp == 1 else ()))


def _end(title: str, started: Ranks, say: Callable[[str], None], *error: Any) -> None:
    """Whatever ranks do after their last turn, what was measured stays."""
    try:
        started.__exit__(*error)
    except RunError as late:
        say(f"{title} did not end well: {late}")


def _take_turns(ready: Sequence[Contender], blocks: int, steps: int, say: Callable[[str], None]) -> None:
    draw = random.Random(0)
    for number in range(blocks):
        for contender in draw.sample(ready, len(ready)):
            answer = contender.turn("block", steps)
            contender.seconds.append(answer["seconds"])
            contender.memory_bytes = answer["memory_bytes"]
        say(f"block {number + 1} of {blocks}")


def _profile(ready: Sequence[Contender], into: Path, say: Callable[[str], None]) -> None:
    """A file for each contender."""
    for contender in ready:
        path = into / f"{contender.name.replace('/', '-')}.txt"
        say(f"{contender.title}: {write_kernel_times(contender.turn('profile'), path)}")
