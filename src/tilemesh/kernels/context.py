"""What calls of the kernels share: prepared runners, tuned tables, and what `auto` stands for.

All that one call can change for a later one is here. What else a process keeps is the value of a function of constants:
kernels by what they are compiled from (`launch/program.py`), interpreted modules, a GPU's properties, and the operators
that were registered. `tests/test_layers.py` lists them.

`fused_matmul(a, b, c)` takes no such argument, so there is one context that all calls use, and it can be replaced:
`with use(Context()):`. It holds for all threads of the process, because autograd runs backward passes in threads of
its own. Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from tilemesh.kernels.tuning.table import Tables, TunedTable, versions

MOST_RUNNERS = 1024  # of a generation


class Runners:
    """Prepared calls by everything that decides what is right or fast.

    Two generations: what the last `most` new signatures did not use again is dropped. A hit in `recent` costs nothing.
    """

    def __init__(self, most: int = MOST_RUNNERS) -> None:
        self.most = most
        self.recent: dict[tuple[object, ...], Any] = {}
        self.older: dict[tuple[object, ...], Any] = {}

    def keep(self, key: tuple[object, ...], runner: Any) -> None:
        if len(self.recent) >= self.most:
            self.recent, self.older = {}, self.recent
        self.recent[key] = runner

    def clear(self) -> None:
        self.recent.clear()
        self.older.clear()


class OperatorState:
    """What `auto` stands for, of one operator: configurations as text, by the problem's key, and tuned tables by GPU.

    given: the user's tables by GPU, instead of those on disk.
    """

    def __init__(self, given: Mapping[str, TunedTable[Any]] | None = None) -> None:
        self.picked: dict[str, str] = {}
        self.kept: dict[str, str] = {}  # what an earlier process picked, which this one goes on with
        self.tuned: set[str] = set()  # problems that were tuned in this process
        self._given = dict(given or {})
        self.forget_tables()

    def user_table(self, tables: Tables[Any], gpu: str) -> TunedTable[Any]:
        """The user's table for a GPU, read from disk when first asked for."""
        if gpu not in self._user:
            self._user[gpu] = tables.load(gpu, versions())
        return self._user[gpu]

    def shipped_table(self, tables: Tables[Any], gpu: str) -> TunedTable[Any] | None:
        """The table that travels with the package for a GPU, if there is one."""
        if gpu not in self._shipped:
            self._shipped[gpu] = tables.shipped(gpu)
        return self._shipped[gpu]

    def forget_tables(self) -> None:
        self._user: dict[str, TunedTable[Any]] = dict(self._given)
        self._shipped: dict[str, TunedTable[Any] | None] = {}


class Context:
    """One set of runners and choices. `tables`: tuned tables by operator and GPU, instead of those on disk.

    on_cpu: what `auto` stands for where there is no GPU, `torch` or `interpret`.
    """

    def __init__(
        self,
        tables: Mapping[str, Mapping[str, TunedTable[Any]]] | None = None,
        *,
        most_runners: int = MOST_RUNNERS,
        on_cpu: str = "torch",
    ) -> None:
        self.on_cpu = on_cpu
        self.runners = Runners(most_runners)
        self._given = {operator: dict(by_gpu) for operator, by_gpu in (tables or {}).items()}
        self._states: dict[str, OperatorState] = {}

    def state(self, operator: str) -> OperatorState:
        if operator not in self._states:
            self._states[operator] = OperatorState(self._given.get(operator))
        return self._states[operator]

    def picks(self, operator: str) -> dict[str, str]:
        """What `auto` came to so far, by problem, as text: for whoever wants the same again later."""
        return dict(sorted(self.state(operator).picked.items()))

    def keep_to(self, operator: str, earlier: Mapping[str, str]) -> None:
        """Let `auto` stand for what it stood for in an earlier process, where this device can run that."""
        self.state(operator).kept = dict(earlier)

    def forget(self) -> None:
        """Drop prepared runners and loaded tables: after tuning, or after a file of tables was edited."""
        self.runners.clear()
        for state in self._states.values():
            state.forget_tables()


current = Context()
"""Read at every call; replace it by `use`."""
rehearsal: ContextVar[Callable[..., Any] | None] = ContextVar("rehearsal", default=None)
"""What this thread gives every plan to, in place of launching it: see `launch/rehearsal.py`."""


def default_context() -> Context:
    """The context that calls use now."""
    return current


@contextlib.contextmanager
def use(context: Context) -> Iterator[Context]:
    """Let all calls use this context until the block ends."""
    global current
    before, current = current, context
    try:
        yield context
    finally:
        current = before
