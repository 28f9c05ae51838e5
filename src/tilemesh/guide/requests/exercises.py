"""Exercises of chapter 8, with the wrong answers that have a reason."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilemesh.guide.exercise import choice, code, numeric
from tilemesh.guide.requests.work import Load, continuous
from tilemesh.serve.scheduler import ServeLimits

BATCH = numeric(
    "batch_for_budget",
    "A decode step takes 20 ms and 0.5 ms more for each request in it. Nobody may wait longer than 50 ms for a token. "
    "How many requests may share a step?",
    60,
    wrong={
        100: "100 is 50 / 0.5: the 20 ms for the weights are in every step, too.",
        2: "2 is 50 / 20 rounded down: as if every request read the weights again. One read serves all of a step.",
        40: "40 uses up 20 ms for tokens. There are 50 ms, of which the weights take 20.",
        61: "At 61 the step takes 50.5 ms.",
    },
    otherwise="Of the budget, take off what a step takes whoever is in it; divide the rest by a request's share.",
    explanation="(50 - 20) / 0.5 = 60 requests: 1,200 tokens per second, where one request alone gets 49.",
)

LITTLE = numeric(
    "little",
    "8 requests per second come; each waits 0.5 s and then runs for 2 s. How many are there on average, waiting or "
    "running?",
    20,
    wrong={
        16: "16 are running on average (8 per second × 2 s). Another 8 × 0.5 s = 4 are waiting.",
        4: "4 are waiting on average: 8 × 0.5. Those that run are there, too.",
        3.2: "3.2 is 8 / 2.5: the law multiplies how many come by how long each stays.",
    },
    otherwise="Little's law: how many come per second, times the seconds that each of them stays in all.",
    explanation="L = λ · W = 8 · 2.5. If you count 40 of them instead and 8 still come per second, each stays 5 s.",
)

WHY = choice(
    "why_decode",
    "On a GPU a decode step of 8 requests takes hardly longer than one of a single request. Why?",
    {
        "The weights are read once for all eight, and reading them takes longest.": None,
        "The eight run on eight cores.": "It is so on one core, too, and on a GPU: what is shared is the read of the "
        "weights.",
        "A step skips requests that are not ready.": "Every request of the batch gets its token in every step.",
        "Keys and values of earlier tokens are kept.": "That makes a step of one request short. Each of the eight has "
        "its own keys and values, and all of them are read.",
    },
    explanation="Two operations per weight and request: until the arithmetic takes longer than the read, requests are "
    "nearly free. A prompt's tokens share a read in the same way, so that a prefill is bound by arithmetic.",
)


# A scheduler ----------------------------------------------------------------------------------------------------------


@dataclass
class RequestView:
    """A request as `next_step` sees it."""

    name: str
    prompt: int
    most: int
    """Tokens of prompt and whole answer."""
    known: int
    """Tokens of the prompt and of the answer so far."""
    done: int = 0
    """Of those, how many have been computed: their keys and values lie in pages."""
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LoadCase:
    """Requests (the step before which each comes, prompt, answer) and what there is for them."""

    loads: tuple[tuple[int, int, int], ...]
    pages: int
    page_tokens: int
    budget: int


Views = Sequence[RequestView]
LOADS = 1000
MOST_SLOWER = 1.25
"""How many times as many steps as tilemesh's scheduler an answer may take over all loads. Ours lends pages that are not
needed yet and takes them back; to keep to what was promised costs steps where pages are few."""
_MOST_WAIT = 40


def next_step(requests: Views, free_pages: Sequence[int], page_tokens: int, budget: int) -> dict[str, Any]:
    """The solution: go on with those that run, then begin with the oldest that wait while their pages are sure."""

    def pages_for(tokens: int) -> int:
        return -(-tokens // page_tokens)

    free, step = list(free_pages), dict[str, Any]()
    promised = sum(pages_for(one.most - 1) - len(one.pages) for one in requests if one.pages)
    deciding = sum(one.pages != [] and one.known - one.done == 1 for one in requests)
    left = budget - deciding  # a token of each that decodes comes first; prompts share the rest
    for one in requests:
        begins = not one.pages
        if begins and (left < 1 or pages_for(one.most - 1) > len(free_pages) - promised):
            break  # nobody overtakes
        decodes = not begins and one.known - one.done == 1
        count = 1 if decodes else min(one.known - one.done, left)
        if count == 0:
            continue
        left -= 0 if decodes else count
        promised += pages_for(one.most - 1) if begins else 0
        lacking = pages_for(one.done + count) - len(one.pages)
        step[one.name] = count, [free.pop() for _ in range(lacking)]
    return step


def random_case(seed: int) -> LoadCase:
    draw = random.Random(seed)
    page_tokens, budget = draw.choice((2, 4, 8)), draw.choice((8, 12, 24))
    loads, at = [], 0
    for _ in range(draw.randint(3, 8)):
        loads.append((at, draw.randint(1, 30), draw.randint(1, 12)))
        at += draw.choice((0, 0, 1, 4))
    largest = max(-(-(prompt + answer) // page_tokens) for _, prompt, answer in loads)
    return LoadCase(tuple(loads), largest + draw.randint(0, 2 * largest), page_tokens, budget)


def steps_of_ours(case: LoadCase) -> int:
    """tilemesh's scheduler on the same requests, pages and budget; a step is a second."""
    limits = ServeLimits(
        pages=case.pages, context=64, page_tokens=case.page_tokens, step_tokens=case.budget, running=case.budget,
        share_prefixes=False,
    )  # fmt: skip
    loads = [Load(float(at), prompt, answer) for at, prompt, answer in case.loads]
    records = continuous(loads, limits, lambda tokens: 1.0).requests.values()
    return round(max(record.token_ns[-1] for record in records) * 1e-9)


def why_not_scheduled(function: Callable[..., Any]) -> str | None:
    """What is wrong with a scheduler: every step of a thousand random loads is checked, then the sum of steps."""
    mine = ours = 0
    for seed in range(LOADS):
        case = random_case(seed)
        steps = _run(function, case)
        if isinstance(steps, str):
            return f"Load {seed} ({len(case.loads)} requests, {case.pages} pages of {case.page_tokens}): {steps}"
        mine, ours = mine + steps, ours + steps_of_ours(case)
    if mine > MOST_SLOWER * ours:
        return (
            f"Every answer is right, but {LOADS} loads take {mine:,} steps where tilemesh's scheduler takes {ours:,}: "
            "let a request begin as soon as its pages are sure, beside those that run."
        )
    return None


def _run(function: Callable[..., Any], case: LoadCase) -> int | str:
    """How many steps it takes until all have ended, or what is wrong."""
    coming = [(at, RequestView(str(number), prompt, prompt + answer, prompt)) for number, (at, prompt, answer) in
              enumerate(case.loads)]  # fmt: skip
    free, here, waited = list(range(case.pages)), list[RequestView](), dict[str, int]()
    number = 0
    while coming or here:
        while coming and coming[0][0] <= number:
            here.append(coming.pop(0)[1])
        number += 1
        if not here:
            continue
        shown = [RequestView(one.name, one.prompt, one.most, one.known, one.done, list(one.pages)) for one in here]
        step = function(shown, list(free), case.page_tokens, case.budget)
        why = _why_no_step(step, here, free, case) or _why_unfair(step, here, waited)
        if why:
            return f"step {number}: {why}"
        for one in list(here):
            if one.name not in step:
                continue
            count, pages = step[one.name]
            one.pages += pages
            free = [page for page in free if page not in pages]
            one.done += count
            one.known += one.done == one.known
            if one.known == one.most:
                here.remove(one)
                free += one.pages
    return number


def _why_no_step(step: Any, here: Sequence[RequestView], free: Sequence[int], case: LoadCase) -> str | None:
    if not isinstance(step, Mapping):
        return f"expected a dictionary from names to (tokens, new pages), not {step!r:.60}."
    known = {one.name: one for one in here}
    owner = {page: one.name for one in here for page in one.pages}
    for name, (count, pages) in step.items():
        if name not in known:
            return f"there is no request {name!r:.20} now: it has ended, or has not come."
        one = known[name]
        if not 1 <= count <= one.known - one.done:
            return f"request {name} has {one.known - one.done} tokens to compute, not {count}."
        for page in pages:
            if page in owner:
                return f"page {page} goes to request {name} and belongs to {owner[page]}: one overwrites the other."
            if page not in free:
                return f"there is no page {page}."
            owner[page] = name
        room = (len(one.pages) + len(pages)) * case.page_tokens
        if one.done + count > room:
            return f"request {name} would have {one.done + count} tokens in pages for {room}."
    total = sum(count for count, _ in step.values())
    if total > case.budget:
        return f"{total} tokens in a step for {case.budget}: cut a prompt into chunks."
    if step:
        return None
    running = [one for one in here if one.pages]
    for one in running:
        if free or one.done < len(one.pages) * case.page_tokens:
            room = len(free) * case.page_tokens + len(one.pages) * case.page_tokens - one.done
            return (
                f"nobody runs although request {one.name} has {one.known - one.done} of its {one.known} tokens to "
                f"compute and room for {room}: after a chunk comes the rest of the prompt, as much as fits."
            )
    if running:
        return (
            f"nobody can run: {len(running)} requests hold all {case.pages} pages, and each needs one more. Be sure of "
            "the pages of a whole answer before a request begins."
        )
    return "nobody runs although requests wait and all pages are free."


def _why_unfair(step: Mapping[str, Any], here: Sequence[RequestView], waited: dict[str, int]) -> str | None:
    for place, one in enumerate(here):
        begins = one.name in step and not one.pages
        older = next((other for other in here[:place] if not other.pages and other.name not in step), None)
        if begins and older is not None:
            return f"request {one.name} begins before {older.name}, which came first: under load that one starves."
        waited[one.name] = 0 if one.name in step or not one.pages else waited.get(one.name, 0) + 1
        if waited[one.name] > _MOST_WAIT:
            return (
                f"request {one.name} has had no step for {_MOST_WAIT} steps with {one.known - one.done} of its "
                f"{one.known} tokens not computed: it has pages and is forgotten."
            )
    return None


SCHEDULER = code(
    "next_step",
    "Write a scheduler: which tokens are computed in the next step, and which pages they get. Requests begin in the "
    "order in which they came; a step has at most `budget` tokens; a page holds `page_tokens` tokens of one request, "
    "which keeps it until it ends; nothing can be taken back.",
    '''def next_step(requests, free_pages, page_tokens, budget):
    """{name: (tokens to compute, [new pages])} for those that run in this step.

    requests: those that are here, oldest first (who has pages has begun); each
    has .name, .prompt, .known (tokens of the prompt and of the answer so far),
    .done (how many of them were computed), .pages (its pages), .most (tokens of
    prompt and whole answer). free_pages: numbers of pages that nobody has. A
    request whose known tokens are all computed gets one more at the end of the
    step; its last needs no page.
    """
    ...''',
    returns="a dictionary such as {'0': (8, [3, 4])}",
    solution=next_step,
    correct=why_not_scheduled,
    explanation="tilemesh's own is `serve/scheduler.py`: it also lends pages that are not needed yet and takes them "
    "back from the newest request, which is computed again later.",
)  # fmt: skip

EXERCISES = (BATCH, LITTLE, WHY, SCHEDULER)
