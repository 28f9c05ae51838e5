"""How long a batch of answers takes an engine to draw, how many of its pages that fills, and what a step of it holds.

The one idea: answers end one after the other (`AlignWork.lengths`), so the batch that decodes shrinks. While more wait
than run it is full; then it drains, until the last of its answers has as many tokens as are allowed. Answers share the
whole pages of their prompt: the first one computes all of it, the others what follows these, and each draws its first
token by that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tilemesh.core.placement import AlignWork
from tilemesh.model.work.decoding import SequencePart
from tilemesh.plan.serving import PAGE_TOKENS

Clock = Callable[[Sequence[SequencePart]], float]


def _shared_tokens(work: AlignWork) -> int:
    """Of a prompt, those in pages that all of its answers read: at least one token of it is computed for each."""
    return (work.prompt - 1) // PAGE_TOKENS * PAGE_TOKENS


def _whole_pages(tokens: float) -> int:
    return math.ceil(tokens / PAGE_TOKENS) * PAGE_TOKENS


def page_tokens(work: AlignWork, running: int, refills: bool) -> int:
    """The most tokens whose keys and values have room in pages while so many answers run: those that begin together
    grow until enough of them have ended; where others take their places, they are of every age. What was drawn last is
    in no page, and pages that several have computed alike become one."""
    each, shared = work.lengths(), work.prompt // PAGE_TOKENS * PAGE_TOKENS
    share, own = shared / min(work.answers, running), work.prompt - shared - 1
    alive = [running * (1 - place / len(each)) * (share + _whole_pages(own + long)) for place, long in enumerate(each)]
    aged = share + own + work.mean_age + PAGE_TOKENS / 2
    return math.ceil(max(*alive, running * aged if refills else 0.0))


def prompt_parts(work: AlignWork, sequences: int) -> list[tuple[int, SequencePart]]:
    """What is computed before the first tokens of so many answers: how often which part of a prompt."""
    shared, whole = _shared_tokens(work), SequencePart(work.prompt, work.prompt, 1)
    if not shared:
        return [(sequences, whole)]
    prompts = math.ceil(sequences / work.answers)
    return [(prompts, whole), (sequences - prompts, SequencePart(work.prompt - shared, work.prompt, 1))]


def most_step_tokens(work: AlignWork, sequences: int, running: int, step_tokens: int) -> int:
    """Of a step of the engine at most."""
    tokens = before = 0
    for count, part in prompt_parts(work, min(running, sequences)):  # beside the others' are the first ones' next
        tokens, before = max(tokens, before + count * part.queries), count
    return max(running, min(step_tokens, tokens))


def rollout_s(clock: Clock, work: AlignWork, sequences: int, running: int, streams: bool, step_tokens: int) -> float:
    """Of one replica that draws so many answers, at most `running` at a time. `streams`: others follow at once."""
    running, total = min(running, sequences), 0.0
    for count, part in prompt_parts(work, sequences):
        together = max(1, min(count, running, step_tokens // part.queries))
        total += count / together * clock([part] * together)
    each = work.lengths()
    waiting = sequences if streams else sequences - running
    if waiting:
        steps = waiting * (sum(each) / len(each) - 1) / running
        total += steps * clock([SequencePart(1, round(work.prompt + work.mean_age), 1)] * running)
    if not streams:
        return total + _drain_s(clock, work, running, each)
    again = round(work.prompt / min(work.answers, running) + work.mean_age)  # with new weights, which come once
    return total + clock([SequencePart(again, again, 0)] * running)


def _drain_s(clock: Clock, work: AlignWork, running: int, each: Sequence[float]) -> float:
    total, before = 0.0, 1.0  # the first token is the prompt's
    for place, length in enumerate([*each, float(work.tokens)]):
        if length > before:
            alive = max(1, round(running * (1 - place / len(each))))
            keys = round(work.prompt + (before + length) / 2)
            total += (length - before) * clock([SequencePart(1, keys, 1)] * alive)
            before = length
    return total
