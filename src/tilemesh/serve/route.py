"""Which replica answers a prompt: the one that has to compute the least before its first token. No torch, no clock.

The one idea: what a replica has in its prefix cache is guessed from what was sent to it. Prompts are cut into pages;
the hash of a page and all before it is remembered for each replica, the longest unused forgotten first. A guess that is
wrong costs time, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixRouter:
    def __init__(self, replicas: int, page_tokens: int, pages: int) -> None:
        """`pages`: as many as each replica has, and so beginnings that are remembered of it."""
        self.page_tokens, self.pages = page_tokens, pages
        self.waiting = [0] * replicas
        """Tokens of prompts that were sent to each and have given no token yet."""
        self.running = [0] * replicas
        """Answers under way at each."""
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]

    def choose(self, prompt: Sequence[int], alive: Sequence[bool]) -> tuple[int, int]:
        """The replica with the least to do before this prompt's first token, and how many tokens it has to compute.

        That is what it lacks of the prompt, what waits there already, and a token for each of its answers.
        """
        chain = self._chain(prompt)
        costs = []
        for replica, sent in enumerate(self._sent):
            known = 0
            while known < len(chain) and chain[known] in sent:
                known += 1
            missing = len(prompt) - known * self.page_tokens
            running = self.running[replica]
            costs.append((missing + self.waiting[replica] + running, running, replica, missing))
        some = [cost for cost, is_alive in zip(costs, alive, strict=True) if is_alive] or costs
        _, _, replica, missing = min(some)
        sent = self._sent[replica]
        for mark in chain:
            sent.pop(mark, None)
            sent[mark] = None
        while len(sent) > self.pages:
            sent.popitem(last=False)
        return replica, missing

    def forget(self, replica: int) -> None:
        """Its pages are gone."""
        self._sent[replica].clear()

    def _chain(self, prompt: Sequence[int]) -> list[int]:
        """A number for each full page of the prompt and all that is before it; the last token is always computed."""
        marks, before = [], 0
        for end in range(self.page_tokens, len(prompt), self.page_tokens):
            before = hash((before, tuple(prompt[end - self.page_tokens : end])))
            marks.append(before)
        return marks
