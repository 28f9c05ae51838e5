"""Follows a pattern byte by byte: which bytes may come next, and whether the text may end here.

The one idea: a place is a node of a graph and the nodes to return to when the rules under way end. A state is the set
of places that the text so far may stand at. States, and what each byte leads to from them, are made when they are
first needed and kept in a table, so the second text that comes by finds everything there. A rule that uses itself makes
new states the deeper it nests; everything else has finitely many.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tilemesh.core.errors import UsageError
from tilemesh.serve.constrain.pattern import Chars, Grammar, OneOf, Pattern, RuleName, Sequel, count_nodes, utf8_ranges

MOST_NODES = 30_000
MOST_STATES = 8192
"""More are forgotten all at once, and those that are needed are made again."""
DEAD, UNKNOWN = -1, -2
Place = tuple[int, int]
"""A node, and the number of the stack of nodes to return to; stack 0 is empty."""
State = frozenset[Place]


class WorkBudget:
    """How many places may be looked at, and for how long: a short pattern can ask for any amount of either."""

    def __init__(self, places: int, seconds: float) -> None:
        self.left = places
        self._until = time.monotonic() + seconds

    def spend(self, places: int) -> None:
        self.left -= places
        if self.left < 0 or time.monotonic() > self._until:
            raise UsageError(
                "this regex or json_schema takes too much work to follow: give fewer alternatives and repetitions"
            )


@dataclass
class _NodeGraph:
    """Nodes 0, 1, ...: what leads from each to others. A rule is a part of it with one entry and one exit."""

    edges: list[list[tuple[int, int]]] = field(default_factory=list)
    """(bytes, as bits of a number; node)"""
    free: list[list[int]] = field(default_factory=list)
    """Nodes reached without a byte."""
    calls: list[tuple[str, int] | None] = field(default_factory=list)
    """A rule to pass through, and the node behind it."""
    entries: dict[str, int] = field(default_factory=dict)
    exits: dict[str, int] = field(default_factory=dict)

    def node(self) -> int:
        self.edges.append([])
        self.free.append([])
        self.calls.append(None)
        return len(self.edges) - 1

    def add(self, pattern: Pattern, begin: int) -> int:
        """Lay the pattern out behind a node; returns the node at its end."""
        if isinstance(pattern, Chars):
            return self._add_chars(pattern, begin)
        if isinstance(pattern, Sequel):
            for part in pattern.parts:
                begin = self.add(part, begin)
            return begin
        end = self.node()
        if isinstance(pattern, OneOf):
            for part in pattern.parts:
                first = self.node()
                self.free[begin].append(first)
                self.free[self.add(part, first)].append(end)
        elif isinstance(pattern, RuleName):
            first = self.node()
            self.free[begin].append(first)
            self.calls[first] = (pattern.name, end)
        else:
            for _ in range(pattern.least):
                begin = self.add(pattern.part, begin)
            if pattern.most is None:
                first = self.node()
                self.free[begin] += [first, end]
                self.free[self.add(pattern.part, first)].append(begin)
            else:
                self.free[begin].append(end)
                for _ in range(pattern.most - pattern.least):
                    first = self.node()  # a node of its own: an end must not lead back into an earlier repetition
                    self.free[begin].append(first)
                    begin = self.add(pattern.part, first)
                    self.free[begin].append(end)
        return end

    def _add_chars(self, pattern: Chars, begin: int) -> int:
        end = self.node()
        behind: dict[tuple[tuple[int, int], ...], int] = {(): end}
        for sequence in utf8_ranges(pattern.ranges):
            for at in range(len(sequence) - 1, 0, -1):
                if sequence[at:] not in behind:
                    behind[sequence[at:]] = self.node()
                    self.edges[behind[sequence[at:]]].append((_bits(sequence[at]), behind[sequence[at + 1 :]]))
            self.edges[begin].append((_bits(sequence[0]), behind[sequence[1:]]))
        return end


def _bits(span: tuple[int, int]) -> int:
    first, last = span
    return (1 << last + 1) - (1 << first)


class ByteMachine:
    """A grammar's states. One thread at a time."""

    def __init__(self, grammar: Grammar, work: WorkBudget | None = None) -> None:
        self.work = work
        """What filling the table may take; whoever asks next sets its own. None: anything."""
        graph, patterns = _NodeGraph(), [("", grammar.start), *grammar.rules.items()]
        counted: dict[int, int] = {}
        if sum(1 + count_nodes(pattern, counted) for _, pattern in patterns) > MOST_NODES:
            raise UsageError(
                f"this regex or json_schema needs more than {MOST_NODES:,} nodes: give fewer or shorter repetitions"
            )
        for name, pattern in patterns:
            graph.entries[name] = graph.node()
            graph.exits[name] = graph.add(pattern, graph.entries[name])
        _check_calls(graph, work or WorkBudget(sys.maxsize, math.inf))
        useful = _useful(graph)
        if graph.entries[""] not in useful:
            raise UsageError("this regex or json_schema matches no text at all")
        for node in range(len(graph.edges)):
            graph.edges[node] = [(bits, target) for bits, target in graph.edges[node] if target in useful]
            graph.free[node] = [target for target in graph.free[node] if target in useful]
            call = graph.calls[node]
            if call is not None and (call[1] not in useful or graph.entries[call[0]] not in useful):
                graph.calls[node] = None
        self._graph = graph
        self._exit_of = {node: name for name, node in graph.exits.items()}
        self._classes = _byte_classes(graph)
        self._stacks: list[Place] = [(-1, -1)]
        self._stack_numbers: dict[Place, int] = {}
        self.forget()

    def forget(self) -> None:
        """Drop all states but the first; numbers of states given out before mean nothing any more."""
        self._stacks, self._stack_numbers = [(-1, -1)], {}
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._accepting: list[bool] = []
        self.table: NDArray[np.int32] = np.full((16, 256), UNKNOWN, np.int32)
        self.start = self._number(self._closed([(self._graph.entries[""], 0)]))

    @property
    def size(self) -> int:
        return len(self._states)

    def accepts(self, state: int) -> bool:
        """Whether the text may end here."""
        return self._accepting[state]

    def ended(self, state: int) -> bool:
        """Whether the text must end here."""
        self.fill(state)
        return self._accepting[state] and bool((self.table[state] == DEAD).all())

    def fill(self, state: int) -> None:
        """Make the row of the table that says where each byte leads from this state."""
        if self.table[state, 0] != UNKNOWN:
            return
        reached: list[set[Place]] = [set() for _ in self._classes]
        for node, stack in self._states[state]:
            if self.work is not None:
                self.work.spend(1 + len(self._graph.edges[node]) * len(self._classes) // 8)
            for bits, target in self._graph.edges[node]:
                for number, (first, _) in enumerate(self._classes):
                    if bits >> first & 1:
                        reached[number].add((target, stack))
        made = np.full(256, DEAD, np.int32)
        for (_, members), places in zip(self._classes, reached, strict=True):
            if places:
                made[members] = self._number(self._closed(places))
        self.table[state] = made  # not before: a new state may have moved the table

    def after(self, state: int, content: bytes | bytearray) -> int:
        """The state after these bytes; DEAD where they may not come."""
        for byte in content:
            if state == DEAD:
                return DEAD
            self.fill(state)
            state = int(self.table[state, byte])
        return state

    def _number(self, state: State) -> int:
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers[state] = len(self._states)
            self._states.append(state)
            self._accepting.append((self._graph.exits[""], 0) in state)
            if number == len(self.table):
                self.table = np.concatenate((self.table, np.full_like(self.table, UNKNOWN)))
        return number

    def _closed(self, places: Iterable[Place]) -> State:
        """All places that these lead to without a byte: of them those that bytes lead on from, or that are the end."""
        graph, seen, left = self._graph, set(places), list(places)
        while left:
            node, stack = left.pop()
            reached = [(target, stack) for target in graph.free[node]]
            call = graph.calls[node]
            if call is not None:
                reached.append((graph.entries[call[0]], self._pushed(call[1], stack)))
            if stack and node in self._exit_of:
                reached.append(self._stacks[stack])
            for place in reached:
                if place not in seen:
                    seen.add(place)
                    left.append(place)
        if self.work is not None:
            self.work.spend(len(seen))
        last = (graph.exits[""], 0)
        return frozenset(place for place in seen if graph.edges[place[0]] or place == last)

    def _pushed(self, node: int, stack: int) -> int:
        number = self._stack_numbers.setdefault((node, stack), len(self._stacks))
        if number == len(self._stacks):
            self._stacks.append((node, stack))
        return number


def _byte_classes(graph: _NodeGraph) -> list[tuple[int, NDArray[np.int64]]]:
    """Bytes that no edge tells apart, as (one of them, all of them)."""
    distinct = sorted({bits for edges in graph.edges for bits, _ in edges})
    alike: dict[tuple[int, ...], list[int]] = {}
    for byte in range(256):
        alike.setdefault(tuple(bits >> byte & 1 for bits in distinct), []).append(byte)
    return [(members[0], np.array(members)) for members in alike.values()]


def _useful(graph: _NodeGraph) -> set[int]:
    """Nodes from which their rule's exit can be reached. A call counts once its rule is known to be passable."""
    before: list[list[int]] = [[] for _ in graph.edges]
    waiting: dict[str, list[tuple[int, int]]] = {}
    for node, edges in enumerate(graph.edges):
        for target in [*(target for _, target in edges), *graph.free[node]]:
            before[target].append(node)
        call = graph.calls[node]
        if call is not None:
            waiting.setdefault(call[0], []).append((node, call[1]))
    names = {node: name for name, node in graph.entries.items()}
    useful, left = set(graph.exits.values()), list(graph.exits.values())
    while left:
        node = left.pop()
        reached = list(before[node])
        for caller, behind in waiting.pop(names[node], ()) if node in names else ():
            before[behind].append(caller)
            if behind in useful:
                reached.append(caller)
        new = [state for state in reached if state not in useful]
        useful.update(new)
        left += new
    return useful


def _check_calls(graph: _NodeGraph, work: WorkBudget) -> None:
    """Refuse rules that begin with themselves: no byte would ever end the search for the first one."""
    passable: set[str] = set()
    while True:  # rules that the empty text matches, until no more are found
        first_calls = {}
        known = len(passable)
        for name, entry in graph.entries.items():
            reached, first_calls[name] = _free_reach(graph, entry, passable)
            work.spend(len(reached))
            if graph.exits[name] in reached:
                passable.add(name)
        if len(passable) == known:
            break
    done: set[str] = set()
    for name in first_calls:
        path = [(name, sorted(first_calls[name]))]
        while path:
            at, ahead = path[-1]
            work.spend(len(path) // 8 + 1)
            if not ahead:
                done.add(at)
                path.pop()
                continue
            following = ahead.pop()
            if any(following == other for other, _ in path):
                raise UsageError(f"json_schema: {following} refers to itself with nothing before: it would never end")
            if following not in done:
                path.append((following, sorted(first_calls[following])))


def _free_reach(graph: _NodeGraph, entry: int, passable: set[str]) -> tuple[set[int], set[str]]:
    """The nodes that an entry leads to without a byte, and the rules that are called on the way."""
    seen, left, calls = {entry}, [entry], set[str]()
    while left:
        node = left.pop()
        reached = list(graph.free[node])
        call = graph.calls[node]
        if call is not None:
            calls.add(call[0])
            if call[0] in passable:
                reached.append(call[1])
        left += [target for target in dict.fromkeys(reached) if target not in seen]
        seen.update(reached)
    return seen, calls
