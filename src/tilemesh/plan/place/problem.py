"""The question that every chooser answers, as plain tables: one choice for each variable, at the least predicted time.

A variable is an operator, or several that are placed alike (`space.py` makes them of a graph). Its choice decides how
it computes, in which placement its values lie and in which it takes those of others. No torch, no graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilemesh.core.errors import UsageError

Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Transfer:
    """A value on its way to readers. Readers that want it in one placement share one exchange."""

    source: int
    states: tuple[int, ...]
    """In which placement the value lies, for each choice of its variable."""
    readers: tuple[tuple[int, tuple[int, ...]], ...]
    """A variable, and in which placement it wants the value, for each of its choices."""
    seconds: Table
    """Of the exchange from a state (row) to what is wanted (column)."""
    sent_bytes: Table
    copy_bytes: Table
    """What the reader holds besides, while it reads."""
    count: int = 1
    """How many values are alike in all of this."""

    def wanted(self, choice: Sequence[int]) -> set[int]:
        return {wants[choice[reader]] for reader, wants in self.readers}

    def seconds_of(self, choice: Sequence[int]) -> float:
        row = self.seconds[self.states[choice[self.source]]]
        return self.count * sum(row[target] for target in self.wanted(choice))


@dataclass(frozen=True)
class Moment:
    """While one operator runs: how many of which values live, and which (transfer, reader) give it copies."""

    values: Mapping[int, int]
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class PlacementFigures:
    """What a choice comes to, per rank."""

    seconds: float
    sent_bytes: float
    memory_bytes: float


@dataclass(frozen=True)
class PlacementProblem:
    """`seconds[variable][choice]` of computing, the transfers, and when which values live."""

    names: tuple[str, ...]
    seconds: Table
    transfers: tuple[Transfer, ...] = ()
    values: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """Of each kind of value its variable, and its bytes for each choice."""
    moments: tuple[Moment, ...] = ()
    limit_bytes: float = math.inf

    def figures(self, choice: Sequence[int]) -> PlacementFigures:
        seconds = sum(own[k] for own, k in zip(self.seconds, choice, strict=True))
        sent = 0.0
        for transfer in self.transfers:
            seconds += transfer.seconds_of(choice)
            row = transfer.sent_bytes[transfer.states[choice[transfer.source]]]
            sent += transfer.count * sum(row[target] for target in transfer.wanted(choice))
        return PlacementFigures(seconds, sent, max((self.held(at, choice) for at in self.moments), default=0.0))

    def held(self, moment: Moment, choice: Sequence[int]) -> float:
        """Bytes of a rank at a moment."""
        total = 0.0
        for value, count in moment.values.items():
            variable, sizes = self.values[value]
            total += count * sizes[choice[variable]]
        for transfer, reader in moment.copies:
            total += self.copied(transfer, reader, choice)
        return total

    def copied(self, transfer: int, reader: int, choice: Sequence[int]) -> float:
        this = self.transfers[transfer]
        variable, wants = this.readers[reader]
        return this.copy_bytes[this.states[choice[this.source]]][wants[choice[variable]]]

    def fixed(self, choices: Mapping[int, Sequence[int]]) -> PlacementProblem:
        """The same with some variables left only these choices: others of theirs take for ever."""
        seconds = list(self.seconds)
        for variable, allowed in choices.items():
            if not allowed:
                raise UsageError(f"{self.names[variable]}: none of its choices is as it is pinned")
            own = seconds[variable]
            seconds[variable] = tuple(cost if k in allowed else math.inf for k, cost in enumerate(own))
        return replace(self, seconds=tuple(seconds))


@dataclass(frozen=True)
class Chosen:
    """An answer: for each variable its choice, or None where none fits, and what is known of better ones."""

    chooser: str
    choice: tuple[int, ...] | None
    figures: PlacementFigures | None
    evaluations: int
    bound_s: float = 0.0
    """No choice takes less."""
    lp_bound_s: float = 0.0
    """The same without whole numbers."""
    seconds: float = field(default=0.0, compare=False)
    """That choosing took."""
    overlapped_s: float = 0.0
    """What the first rank's program is predicted to take, exchanges combined and begun early; 0: not asked."""
    history: tuple[tuple[int, float], ...] = ()
    """After how many evaluations the best so far took how long."""

    @property
    def gap(self) -> float:
        """At most so much of the time could be saved; 0 is proved optimal."""
        if self.figures is None or self.figures.seconds <= 0:
            return 0.0 if self.figures is not None else math.inf
        return max(0.0, 1 - self.bound_s / self.figures.seconds)

    @property
    def is_optimal(self) -> bool:
        return self.figures is not None and self.gap <= 1e-6
