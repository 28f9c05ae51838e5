"""What chapter 9 runs: memory set aside in one piece or in pages, and a shared beginning in the real engine."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from itertools import pairwise

from tilemesh.guide.requests.work import MODEL
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.history import ServeHistory
from tilemesh.serve.load import ServedModel


def lengths(count: int, seed: int = 0) -> list[int]:
    """Tokens of prompt and answer, as chats have them: many short ones, a few long."""
    draw = random.Random(seed)
    return [max(4, min(2048, round(draw.lognormvariate(3.7, 0.9)))) for _ in range(count)]


def waste(tokens: Sequence[int], reserved: int) -> float:
    """The share of memory that nothing is written into where each sequence has so many tokens set aside."""
    return 1 - sum(tokens) / (reserved * len(tokens))


def waste_in_pages(tokens: Sequence[int], page_tokens: int) -> float:
    """The same where each has just the pages that it fills; only the last is partly empty."""
    taken = sum(-(-count // page_tokens) * page_tokens for count in tokens)
    return 1 - sum(tokens) / taken


def first_tokens(served: ServedModel, shared: int, own: int, repeats: int = 3) -> tuple[float, float, int]:
    """Two prompts that begin with the same tokens, one after the other: seconds until each one's first token, and how
    many tokens of the second were found in the cache."""
    history = ServeHistory()
    sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    with Engine(served, history=history, step_tokens=2048) as engine:
        for repeat in range(repeats + 1):
            beginning = [(repeat * 517 + 13 * place) % MODEL.vocabulary for place in range(shared)]
            for end in (1, 2):
                list(engine.generate([beginning + [end * 101 + place for place in range(own)]], sampling))
    records = list(history.requests.values())[2:]  # the first steps of an engine are slower
    alone, again = ([record.first_token_s or 0.0 for record in records[begin::2]] for begin in (0, 1))
    return statistics.median(alone), statistics.median(again), records[-1].found


def chain(tokens: Sequence[int], page_tokens: int) -> list[int]:
    """The key of each full page: a number made of its tokens *and* of the key before. Equal keys: equal beginnings."""
    keys = [0]
    for first, last in pairwise(range(0, len(tokens) + 1, page_tokens)):
        keys.append(hash((keys[-1], *tokens[first:last])))
    return keys[1:]
