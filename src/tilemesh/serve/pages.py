"""A pool of pages with reference counts. A page is a number here; what lies in it, others know.

The one idea: a page that nobody uses is either free, or idle: its content may serve again, so it is kept until
somebody needs a page, and the one idle for longest goes first. A page is never both, and never used and either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from tilemesh.core.errors import RunError


class PagePool:
    """Pages 0 to `size` - 1."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.on_evict: Callable[[int], None] = lambda page: None
        """Called with a kept page before it is given out as a new one."""
        self._users = [0] * size
        self._free = list(range(size - 1, -1, -1))  # a stack: the page freed last is the likeliest in a CPU's cache
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first
        self._kept = bytearray(size)  # whether it becomes idle, and not free, when its last user leaves

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.size - self.available

    @property
    def idle(self) -> tuple[int, ...]:
        """Pages that are kept and that nobody uses, longest idle first."""
        return tuple(self._idle)

    def users(self, page: int) -> int:
        return self._users[page]

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def forget(self, page: int) -> None:
        """Make an idle page free."""
        del self._idle[page]
        self._kept[page] = False
        self._free.append(page)

    def take(self, count: int) -> list[int]:
        """So many pages for one new user each; idle ones are evicted when the free ones are used up."""
        if count > self.available:
            raise RunError(f"{count} pages were asked of a pool that has {self.available} left: a bug in the scheduler")
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._kept[page] = False
                self.on_evict(page)
            self._users[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One user more for each; the page is in use, or idle."""
        for page in pages:
            if self._users[page] == 0 and page not in self._idle:
                raise RunError(f"page {page} is free and was asked to be shared: a bug in the scheduler")
            self._idle.pop(page, None)
            self._users[page] += 1

    def free_idle(self) -> list[int]:
        """Make all idle pages free, and return them: `on_evict` hears nothing of these."""
        pages = list(self._idle)
        self._idle.clear()
        for page in pages:
            self._kept[page] = False
        self._free += pages
        return pages

    def keep(self, page: int) -> None:
        """From now on this page becomes idle, and not free, when its last user leaves."""
        if self._users[page] == 0:
            raise RunError(f"page {page} has no user and was asked to be kept: a bug in the scheduler")
        self._kept[page] = True

    def release(self, pages: Iterable[int]) -> None:
        """One user fewer for each. Give a request's pages last first: ends of prompts are then evicted first."""
        for page in pages:
            if self._users[page] == 0:
                raise RunError(f"page {page} was released and has no user: a bug in the scheduler")
            self._users[page] -= 1
            if self._users[page] == 0:
                if self._kept[page]:
                    self._idle[page] = None
                else:
                    self._free.append(page)
