"""In a model where some layers have a window and some have none: the pages of those that do.

The one idea: a page of the pool is tokens of a sequence, whoever shares it. Layers without a window keep it as long as
anyone uses it; for the others it has a *local* page out of a smaller pool, which is freed as soon as it lies behind the
window of everyone. Beginnings that are found again are those whose last window still has its local pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tilemesh.serve.pages import PagePool


class LocalPages:
    def __init__(self, size: int) -> None:
        self.pool = PagePool(size)
        self.pool.on_evict = self._lose
        self._local: dict[int, int] = {}  # by page of the other pool
        self._page: dict[int, int] = {}  # the inverse

    def table(self, pages: Sequence[int], behind: int) -> tuple[int, ...]:
        """Of a sequence's pages; in place of those that were left behind stands its first own one: what is masked is
        read all the same, and must be nobody else's."""
        own = tuple(map(self._local.__getitem__, pages[behind:]))
        return own[:1] * behind + own if own else ()

    def take(self, pages: Iterable[int]) -> None:
        """For pages that were just taken."""
        each = list(pages)
        for page, local in zip(each, self.pool.take(len(each)), strict=True):
            self._local[page], self._page[local] = local, page

    def idle(self, pages: Iterable[int]) -> int:
        """How many of these nobody uses."""
        return sum(self.pool.users(self._local[page]) == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        self.pool.share(self._local[page] for page in pages)

    def release(self, pages: Iterable[int]) -> None:
        """One user fewer for each."""
        for page in pages:
            local = self._local[page]
            self.pool.release([local])
            if self.pool.users(local) == 0 and not self.pool.is_idle(local):
                self._lose(local)

    def publish(self, page: int, there: int) -> None:
        """A page may be found again, as `there`, which is itself, or another with the same tokens that its user has
        from now on."""
        if there != page and there in self._local:
            self.share([there])
            self.release([page])
        elif there != page:  # its own had been lost: now it is this one's
            local = self._local.pop(page)
            self._local[there], self._page[local] = local, there
        self.pool.keep(self._local[there])

    def forget(self, page: int) -> None:
        """What the page held is of no use any more, and nobody uses it."""
        if page in self._local:
            local = self._local[page]
            self.pool.forget(local)
            self._lose(local)

    def found(self, pages: Sequence[int], behind: Callable[[int], int]) -> int:
        """How many of these first pages of a sequence can be gone on from: all that lie in the last window before have
        their local page. `behind(n)`: of n pages, how many lie before it."""
        run, most = 0, 0
        for count, page in enumerate(pages, 1):
            run = run + 1 if page in self._local else 0
            if run >= count - behind(count):
                most = count
        return most

    def _lose(self, local: int) -> None:
        del self._local[self._page.pop(local)]
