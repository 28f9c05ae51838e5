"""Full pages by the tokens that lead to them, so that equal beginnings of prompts are computed once.

The one idea: a page is found by (serial number of the page before it, its own tokens). The serial stands for all tokens
before, so a chain of lookups compares every token, and two prompts whose hashes collide are still two prompts. A serial
is never given twice: pages that followed an evicted page cannot be found by accident under its successor. New weights
begin a chain of their own (`begin_again`), and so does each adapter: what other weights computed is never found.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.serve.pages import PagePool

Key = tuple[int, tuple[int, ...]]


class PrefixCache:
    """Which pages of the pool hold which beginnings; the pool evicts those idle for longest."""

    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._pool = pool
        self._pages: dict[Key, int] = {}
        self._entries: dict[int, tuple[int, Key]] = {}  # page: its serial, and the key that it is found by
        self._roots = {0: 0}  # what comes before the first page, by adapter
        self._last = 0  # the serial that was given last
        pool.on_evict = self.forget

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, tokens: Sequence[int], most: int, adapter: int = 0) -> tuple[list[int], list[int]]:
        """The cached pages, and their serials, that hold the first tokens; at most `most` tokens. Nobody's use is
        counted yet: call `pool.share`."""
        pages: list[int] = []
        serials: list[int] = []
        serial, size = self._root(adapter), self.page_tokens
        for begin in range(0, most - size + 1, size):  # `key` written out: a long prompt has hundreds of pages
            page = self._pages.get((serial, tuple(tokens[begin : begin + size])))
            if page is None:
                break
            serial = self._entries[page][0]
            pages.append(page)
            serials.append(serial)
        return pages, serials

    def key(self, tokens: Sequence[int], serials: Sequence[int], adapter: int = 0) -> Key:
        """What the page after these would be found by."""
        begin = len(serials) * self.page_tokens
        return (serials[-1] if serials else self._root(adapter), tuple(tokens[begin : begin + self.page_tokens]))

    def publish(self, key: Key, page: int) -> tuple[int, int]:
        """Let a computed page be found; returns the page to use from now on, and its serial.

        Where another page with the same tokens is there already, that one is shared and this one released.
        """
        there = self._pages.get(key)
        if there is not None:
            self._pool.share([there])
            self._pool.release([page])
            return there, self._entries[there][0]
        self._last += 1
        self._pages[key] = page
        self._entries[page] = (self._last, key)
        self._pool.keep(page)
        return page, self._last

    def begin_again(self) -> None:
        """Nothing that was published so far is found any more."""
        self._roots.clear()

    def forget_idle(self) -> set[int]:
        """Free the pages that nobody uses, all at once, and return them: after a batch of answers tens of thousands."""
        freed = set(self._pool.free_idle())
        if freed:
            left = self._entries.items() if len(freed) < len(self._entries) else ()
            self._entries = {page: entry for page, entry in left if page not in freed}
            self._pages = {key: page for page, (_, key) in self._entries.items()}
        return freed

    def _root(self, adapter: int) -> int:
        if adapter not in self._roots:
            self._last += 1
            self._roots[adapter] = self._last
        return self._roots[adapter]

    def forget(self, page: int) -> None:
        """Its page is given out as a new one."""
        _, key = self._entries.pop(page)
        del self._pages[key]
