"""How long a batch of answers takes an engine to draw, and how many of its pages that fills.

The one idea: answers end one after the other (`AlignWork.lengths`), so the batch that decodes shrinks. While more wait
than run it is full; then it drains, until the last of its answers has as many tokens as are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tilemesh.core.placement import AlignWork
from tilemesh.model.work.decoding import SequencePart
from tilemesh.plan.serving import PAGE_TOKENS

Clock = Callable[[Sequence[SequencePart]], float]


def page_tokens(work: AlignWork, running: int, refills: bool) -> int:
    """The most tokens whose keys and values are kept while so many answers run: those that begin together grow until
    enough of them have ended; where others take their places, they are of every age."""
    each, share = work.lengths(), work.prompt / min(work.answers, running)
    alive = [running * (1 - place / len(each)) * (share + length) for place, length in enumerate(each)]
    most = max(*alive, running * (share + work.mean_age) if refills else 0.0)
    return math.ceil(most + running * (PAGE_TOKENS - 1) / 2)


def rollout_s(clock: Clock, work: AlignWork, sequences: int, running: int, streams: bool, step_tokens: int) -> float:
    """Of one replica that draws so many answers, at most `running` at a time. `streams`: others follow at once."""
    running = min(running, sequences)
    prompts = math.ceil(sequences / work.answers)
    together = max(1, min(prompts, step_tokens // work.prompt))
    whole = [SequencePart(work.prompt, work.prompt, 1)] * together
    total = prompts / together * clock(whole)
    each = work.lengths()
    waiting = sequences if streams else sequences - running
    if waiting:
        steps = waiting * sum(each) / len(each) / running
        total += steps * clock([SequencePart(1, round(work.prompt + work.mean_age), 1)] * running)
    if not streams:
        return total + _drain_s(clock, work, running, each)
    again = round(work.prompt / min(work.answers, running) + work.mean_age)  # with new weights, which come once
    return total + clock([SequencePart(again, again, 0)] * running)


def _drain_s(clock: Clock, work: AlignWork, running: int, each: Sequence[float]) -> float:
    total = before = 0.0
    for place, length in enumerate([*each, float(work.tokens)]):
        if length > before:
            alive = max(1, round(running * (1 - place / len(each))))
            keys = round(work.prompt + (before + length) / 2)
            total += (length - before) * clock([SequencePart(1, keys, 1)] * alive)
            before = length
    return total
