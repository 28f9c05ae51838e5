"""Requests to serve, as values: random tokens of random lengths at random times, or those of a trace file.

Prompts are made of random tokens, so no two begin alike unless a shared beginning is asked for; outputs have a fixed
number of tokens each, so that everyone computes the same amount of work.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import shown
from tilemesh.serve.simulate import NS, SimRequest, poisson_arrivals

MOST_TOKENS = 1_000_000


@dataclass(frozen=True)
class LoadRequest:
    at_s: float
    """After the beginning of the load."""
    prompt: tuple[int, ...]
    output: int
    """Tokens of the answer."""


@dataclass(frozen=True)
class Lengths:
    """From `least` to `most` tokens, each length as likely."""

    least: int
    most: int

    @classmethod
    def parse(cls, name: str, text: str) -> Lengths:
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", text.strip())
        lengths = cls(int(match[1]), int(match[2] or match[1])) if match else cls(0, 0)
        if not 1 <= lengths.least <= lengths.most <= MOST_TOKENS:
            raise UsageError(f"{name} is {shown(text)}: expected a number of tokens, or a range such as 100-1024")
        return lengths

    def draw(self, source: random.Random) -> int:
        return source.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


def make_load(
    count: int, prompt: Lengths, output: Lengths, vocabulary: int, *, rate: float | None = None, shared: int = 0,
    seed: int = 0,
) -> list[LoadRequest]:  # fmt: skip
    """So many requests: all at once, or with a rate per second as a Poisson process. `shared`: tokens that all prompts
    begin with."""
    source = random.Random(seed)
    beginning = [source.randrange(vocabulary) for _ in range(shared)]
    arrivals = [0] * count if rate is None else poisson_arrivals(rate, count, seed + 1)
    load = []
    for at_ns in arrivals:
        length = prompt.draw(source)
        own = [source.randrange(vocabulary) for _ in range(max(1, length - shared))]
        load.append(LoadRequest(at_ns / NS, tuple((beginning + own)[: max(length, shared + 1)]), output.draw(source)))
    return load


def other_prompts(load: Sequence[LoadRequest], vocabulary: int, seed: int) -> list[LoadRequest]:
    """The same requests with other tokens: an engine that keeps prompts it has seen would not compute them again."""
    source = random.Random(f"prompts {seed}")
    return [replace(request, prompt=tuple(source.randrange(vocabulary) for _ in request.prompt)) for request in load]


def read_trace(path: str | Path, vocabulary: int, seed: int = 0) -> list[LoadRequest]:
    """A file of one JSON object per line: {"at": seconds, "prompt": tokens, "output": tokens}; `prompt` may be a list
    of token numbers. In any order."""
    source, load = random.Random(seed), []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"no trace can be read from '{path}': {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"no trace can be read from '{path}': it is no text") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            load.append(_traced(line, f"'{path}', line {number}", vocabulary, source))
    if not load:
        raise UsageError(f"the trace '{path}' has no requests: expected a JSON object per line")
    first = min(request.at_s for request in load)
    return sorted((replace(request, at_s=request.at_s - first) for request in load), key=lambda request: request.at_s)


def _traced(line: str, where: str, vocabulary: int, source: random.Random) -> LoadRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is not JSON: expected an object with at, prompt and output") from None
    wanted = {"at", "prompt", "output"}
    if not isinstance(fields, dict) or set(fields) != wanted:
        raise UsageError(f"{where}: expected an object with the keys at, prompt and output, and no others")
    at, prompt, output = fields["at"], fields["prompt"], fields["output"]
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e9:
        raise UsageError(f"{where}: at is {shown(at)}, expected seconds from 0")
    if isinstance(prompt, int) and not isinstance(prompt, bool) and 1 <= prompt <= MOST_TOKENS:
        tokens = [source.randrange(vocabulary) for _ in range(prompt)]
    elif (
        isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < vocabulary for token in prompt)
    ):
        tokens = prompt
    else:
        raise UsageError(f"{where}: prompt is {shown(prompt)}, expected how many tokens, or tokens below {vocabulary}")
    if type(output) is not int or not 1 <= output <= MOST_TOKENS:
        raise UsageError(f"{where}: output is {shown(output)}, expected how many tokens")
    return LoadRequest(float(at), tuple(tokens), output)


def to_simulate(load: Sequence[LoadRequest]) -> list[SimRequest]:
    """The same for the simulator; what an answer will say does not matter there, and never repeats."""
    sims, fresh = [], 1 << 40
    for number, request in enumerate(load):
        output = range(fresh, fresh + request.output)
        fresh += request.output
        sims.append(SimRequest(f"{number + 1}/0", round(request.at_s * NS), request.prompt, output, request.output))
    return sims
