"""Exercises of chapter 9, with the wrong answers that have a reason."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from tilemesh.guide.exercise import choice, code, numeric

SIZE = numeric(
    "kv_size",
    "A model has 32 layers, 32 query heads, 8 KV heads of 128 numbers, kept in 2 bytes each. How many bytes of keys "
    "and values does one token need?",
    2 * 32 * 8 * 128 * 2,
    unit="B",
    tolerance=0.03,
    wrong={
        32 * 8 * 128 * 2: "Half of it: a key *and* a value are kept.",
        2 * 32 * 32 * 128 * 2: "Four times too much: query heads keep nothing. Only the 8 KV heads do.",
        2 * 8 * 128 * 2: "That is one layer. Each of the 32 has keys and values of its own.",
        2 * 32 * 8 * 128: "These are numbers. Each takes 2 bytes.",
    },
    otherwise="Key and value, times layers, times KV heads, times numbers of a head, times bytes of a number.",
    explanation="2 · 32 · 8 · 128 · 2 = 131,072 bytes: 128 KiB per token, 1 GiB at 8,192 tokens.",
)

SEQUENCES = numeric(
    "sequences",
    "At 128 KiB per token, how many sequences of 8,192 tokens fit into 64 GiB beside the weights?",
    64,
    wrong={
        8192: "8,192 is as if a whole sequence took 8 MiB. It takes 8,192 × 128 KiB.",
        512: "That is 64 GiB / 128 MiB: a sequence takes 1,024 MiB.",
        524288: "That is how many tokens fit. A sequence has 8,192 of them.",
    },
    otherwise="First the bytes of a sequence: 8,192 × 128 KiB. Then how often they fit into 64 GiB.",
    explanation="A sequence takes 1 GiB. This, and not arithmetic, bounds the batch of long chats.",
)

CHAIN = choice(
    "hash_chain",
    "Why is a page's key made of its own tokens *and* of the key of the page before?",
    {
        "Keys and values of a token depend on everything before it, not on its own page alone.": None,
        "So that two pages never have the same key.": "Equal beginnings *should* have equal keys: that is how a page "
        "is found.",
        "So that pages can be freed in order.": "The order of eviction is kept apart; a key only finds a page.",
        "Hashing 16 tokens at once would be too slow.": "Both ways hash 16 tokens per page. What differs is which "
        "pages are taken for equal.",
    },
    explanation="The same 16 tokens after another beginning have other keys and values: found by their tokens alone, "
    "they would give a wrong answer without any error.",
)


# A page allocator -----------------------------------------------------------------------------------------------------


class Pages:
    """The solution."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.free_pages, self.page_tokens = list(range(pages)), page_tokens
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, int] = {}
        self.users = [0] * pages

    def _take(self) -> int:
        page = self.free_pages.pop()
        self.users[page] = 1
        return page

    def table(self, name: str) -> list[int]:
        return self.tables[name]

    def fork(self, name: str, other: str) -> None:
        self.tables[other], self.tokens[other] = list(self.tables[name]), self.tokens[name]
        for page in self.tables[name]:
            self.users[page] += 1

    def append(self, name: str) -> Any:
        """One more token: (page, place in it, copied from), or None where no page is free."""
        table, count = self.tables.setdefault(name, []), self.tokens.setdefault(name, 0)
        place, source = count % self.page_tokens, None
        if place == 0 or self.users[table[-1]] > 1:
            if not self.free_pages:
                return None
            if place:
                source = table.pop()
                self.users[source] -= 1
            table.append(self._take())
        self.tokens[name] = count + 1
        return table[-1], place, source

    def free(self, name: str) -> None:
        for page in self.tables.pop(name, []):
            self.users[page] -= 1
            if not self.users[page]:
                self.free_pages.append(page)
        self.tokens.pop(name, None)


def page_allocator(pages: int, page_tokens: int) -> Any:
    return Pages(pages, page_tokens)


def why_not_pages(function: Callable[[int, int], Any]) -> str | None:
    """300 lives of random appends, forks and ends; what lies in each page is kept here and compared."""
    for seed in range(300):
        why = _why_not_life(function, random.Random(seed))
        if why:
            return why
    return None


def _why_not_life(function: Callable[[int, int], Any], draw: random.Random) -> str | None:
    """Run one pool; `memory` is what its pages hold, `texts` what each sequence wrote."""
    pages, page_tokens = draw.randint(3, 10), draw.choice((1, 2, 4))
    mine = function(pages, page_tokens)
    memory, texts = dict[tuple[int, int], int](), dict[str, list[int]]()
    for number in range(60):
        kind = draw.choice(("append",) * 6 + ("fork", "free"))
        name = draw.choice(sorted(texts)) if texts and (kind != "append" or draw.random() < 0.8) else f"s{number}"
        if kind == "append" or name not in texts:
            why = _why_not_append(mine, name, number, memory, texts, (pages, page_tokens))
        elif kind == "fork":
            texts[f"s{number}"] = list(texts[name])
            mine.fork(name, f"s{number}")
            shared = list(mine.table(f"s{number}")) == list(mine.table(name))
            why = None if shared else "the fork has other pages. It shares all of them until one of the two writes."
        else:
            mine.free(name)
            del texts[name]
            why = None
        why = why or _why_not_tables(mine, memory, texts, page_tokens)
        if why:
            return f"A pool of {pages} pages of {page_tokens}, after {kind} of {name}: {why}"
    return None


def _why_not_append(
    mine: Any,
    name: str,
    token: int,
    memory: dict[tuple[int, int], int],
    texts: dict[str, list[int]],
    size: tuple[int, int],
) -> str | None:
    pages, page_tokens = size
    before = {other: list(mine.table(other)) for other in texts}
    users = Counter(page for table in before.values() for page in table)
    place = len(texts.get(name, [])) % page_tokens
    needs = place == 0 or users[before[name][-1]] > 1
    result = mine.append(name)
    if result is None:
        if not needs:
            return "refused, although its last page has room and nobody else uses it."
        used = len(users)
        return None if used == pages else f"refused, although only {used} of {pages} pages are in any table."
    page, at, source = result
    if not 0 <= page < pages or at != place:
        return f"the token goes to place {place} of a page from 0 to {pages - 1}, not to place {at} of page {page}."
    if needs and page in users:
        return f"page {page} has another user: a new page is needed, and a copy of what it holds." if place else (
            f"page {page} is taken as a new one and is in somebody's table."
        )  # fmt: skip
    if source is not None:
        for position in range(place):
            memory[page, position] = memory.get((source, position), -1)
    memory[page, at] = token
    texts.setdefault(name, []).append(token)
    return None


def _why_not_tables(
    mine: Any, memory: dict[tuple[int, int], int], texts: dict[str, list[int]], page_tokens: int
) -> str | None:
    for name, text in texts.items():
        table = list(mine.table(name))
        if len(table) != -(-len(text) // page_tokens):
            return f"{name} has {len(text)} tokens and {len(table)} pages."
        read = [memory.get((table[place // page_tokens], place % page_tokens)) for place in range(len(text))]
        if read != text:
            place = next(place for place, pair in enumerate(zip(read, text, strict=True)) if pair[0] != pair[1])
            page = table[place // page_tokens]
            return f"token {place} of {name} is not what was written: page {page} was overwritten, or not copied."
    return None


ALLOCATOR = code(
    "page_allocator",
    "Write a page allocator with copy on write. `page_allocator(pages, page_tokens)` returns an object with four "
    "methods; the checker writes tokens where it says, and reads them back.",
    '''def page_allocator(pages, page_tokens):
    """An object with these methods; pages are numbered 0 to pages - 1:

    append(name)       one more token of a sequence, which may be new: (page,
                       place in the page, source), where source is the page to
                       copy from because others still use it, or None; None
                       instead if no page is free
    fork(name, other)  `other` begins with all tokens of `name`: no page is
                       copied yet
    free(name)         the sequence has ended
    table(name)        its pages in order
    """
    ...''',
    returns="an object with append, fork, free and table",
    solution=page_allocator,
    correct=why_not_pages,
    explanation="tilemesh's is `serve/pages.py`, with one thing more: a full page that nobody uses is kept until its "
    "place is needed, so that a later prompt finds it.",
)

EXERCISES = (SIZE, SEQUENCES, CHAIN, ALLOCATOR)
