"""A better program by search: best-first over rewritten graphs, with a way back from steps that cost more.

Greedy rewriting takes a rule only where it pays at once. Here a queue holds every graph found so far, the cheapest
first; a graph is looked at while it costs at most `slack` times the best one, so a step that gains nothing, or loses a
little, can be the way to one that gains a lot (the search of TASO).
"""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from tilemesh.core.errors import UsageError
from tilemesh.graph.ir import Graph
from tilemesh.graph.rewrite import Match, RewriteRule, by_operator, rule
from tilemesh.guide.dataflow.follows import follows
from tilemesh.guide.dataflow.substitute import AXIOMS, Substitution, Term, names_of, parse, refuted, renamed

FILE = "substitutions.txt"


@dataclass(frozen=True)
class FoundProgram:
    """The best graph, what it costs, the rules that lead to it, and how many graphs were looked at."""

    graph: Graph
    cost: float
    rules: tuple[str, ...]
    seen: int


def read_substitutions(text: str | None = None) -> list[Substitution]:
    """The committed substitutions, or those of a text."""
    return [substitution for substitution, _ in read_proofs(text)]


def read_proofs(text: str | None = None) -> list[tuple[Substitution, tuple[int, ...]]]:
    """Substitutions with the axioms that prove them (none: it is an axiom itself).

    A line is `NUMBER axiom LEFT = RIGHT` or `NUMBER proved LEFT = RIGHT by AXIOM AXIOM ...`. What is no rule is refused
    with its number: an axiom must be that one of `AXIOMS`, a proof names axioms that stand above it, and what is called
    proved is evaluated on all small shapes and follows from its axioms (0.4 s for the committed file, once).
    """
    given = (files("tilemesh.guide.dataflow") / FILE).read_text() if text is None else text
    return list(_checked(given))


@functools.lru_cache(maxsize=8)
def _checked(text: str) -> tuple[tuple[Substitution, tuple[int, ...]], ...]:
    proofs: dict[int, tuple[Substitution, tuple[int, ...]]] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        number, _, rest = line.partition(" ")
        try:
            if not re.fullmatch("[1-9][0-9]{0,5}", number) or int(number) in proofs:
                raise UsageError("a rule begins with a number of its own, from 1 on")
            proofs[int(number)] = _proof(int(number), rest, proofs)
        except UsageError as error:
            raise UsageError(f"substitution {number[:20] or line.strip()[:20]}: {error}") from None
    return tuple(proofs.values())


def _proof(
    number: int, rest: str, above: Mapping[int, tuple[Substitution, tuple[int, ...]]]
) -> tuple[Substitution, tuple[int, ...]]:
    """What follows the number of a rule."""
    how, _, rule_text = rest.partition(" ")
    if how not in ("axiom", "proved"):
        raise UsageError(f"{how[:20]!r} is neither axiom nor proved")
    rule_text, _, by = rule_text.partition(" by ")
    substitution = parse(rule_text)
    if how == "axiom":
        if by or not 1 <= number <= len(AXIOMS) or str(substitution) != AXIOMS[number - 1]:
            expected = f"axiom {number} is {AXIOMS[number - 1]}" if 1 <= number <= len(AXIOMS) else ""
            raise UsageError(f"{rest!r} is no axiom; {expected or f'there are {len(AXIOMS)}, under their own numbers'}")
        return substitution, ()
    names = by.split()
    axioms = [str(place) for place, (_, proof) in above.items() if not proof]
    wrong = [name for name in names if name not in axioms or names.count(name) > 1]
    if wrong or not names:
        said = f"proved by {', '.join(dict.fromkeys(wrong)) or 'nothing'}"
        raise UsageError(f"{said}; name axioms that stand above it, each once")
    why = refuted(substitution, tries=1)
    if why:
        raise UsageError(f"{why}: nothing proves it")
    if not follows(substitution, [above[int(name)][0] for name in names]):
        raise UsageError(f"{substitution} does not follow from {', '.join(names)}; name the axioms that prove it")
    return substitution, tuple(map(int, names))


def as_rules(substitutions: Sequence[Substitution]) -> list[RewriteRule]:
    """Substitutions as rules of graphs, in both directions where both sides have the same names; each once."""
    rules: dict[str, RewriteRule] = {}  # by their text with names in one order
    for each in substitutions:
        sides = [(each.left, each.right)]
        if set(names_of(each.left)) == set(names_of(each.right)):
            sides.append((each.right, each.left))
        for left, right in sides:
            if isinstance(left, str):
                continue
            once = str(renamed(Substitution(left, right)))
            convolves, kinds = "conv" in once, dict[str, str]()
            spelled = [_spelled(side, "map" if convolves else "matrix", kinds) for side in (left, right)]
            if None not in spelled:
                text = f"{spelled[0]} = {spelled[1]}"
                rules.setdefault(once, rule(text, text, _convolutions if convolves else _matrices, exact=False))
    return list(rules.values())


def _convolutions(match: Match) -> bool:
    """Weights and maps of convolutions over any dims, in one group."""
    return match.attributes["a"]["groups"] == 1 and all(len(node.shape) >= 3 for node in match.nodes.values())


def _matrices(match: Match) -> bool:
    """Concatenation along dims 0 and 1 means rows and columns of matrices alone."""
    return all(len(node.shape) == 2 for node in match.nodes.values())


# Along which dim of a kind rows or columns stand: channels of maps are dim 1, weights are [out, in, ...].
_DIMS = {("rows", "matrix"): 0, ("columns", "matrix"): 1, ("rows", "weights"): 0, ("columns", "weights"): 1}
_DIMS |= {("rows", "map"): 1}


def _spelled(term: Term, kind: str, kinds: dict[str, str]) -> str | None:
    """A term in the words of the graph's primitives, as a matrix, a map or weights; None where it is none of that kind.

    kinds: what each name stands for, in both sides of a rule.
    """
    if isinstance(term, str):
        return term if kinds.setdefault(term, kind) == kind else None
    op, *parts = term
    if op == "conv":
        inner = [_spelled(part, each, kinds) for part, each in zip(parts, ("map", "weights"), strict=True)]
        return None if kind != "map" or None in inner else f"conv({inner[0]}, {inner[1]}, **a)"
    words = [_spelled(part, kind, kinds) for part in parts]
    if None in words or (op in ("dot", "transpose") and kind != "matrix"):
        return None
    if op in ("rows", "columns"):
        return f"concat({words[0]}, {words[1]}, dim={_DIMS[op, kind]})" if (op, kind) in _DIMS else None
    return f"{op}({', '.join(map(str, words))}{', order=(1, 0)' if op == 'transpose' else ''})"


def search(
    graph: Graph, rules: Sequence[RewriteRule], cost: Callable[[Graph], float], slack: float = 1.05, limit: int = 2000
) -> FoundProgram:
    """The cheapest graph that was found; a graph that costs more than `slack` times the best so far is left alone."""
    by_op = by_operator(rules)
    best = FoundProgram(graph, cost(graph), (), 1)
    waiting: list[tuple[float, int, Graph, tuple[str, ...]]] = [(best.cost, 0, graph, ())]
    seen = {graph.outputs}
    while waiting and len(seen) < limit:
        price, _, current, way = heapq.heappop(waiting)
        if price > slack * best.cost:
            break
        for name, changed in _neighbours(current, by_op):
            if changed.outputs in seen:
                continue
            seen.add(changed.outputs)
            new = cost(changed)
            if new < best.cost:
                best = FoundProgram(changed, new, (*way, name), len(seen))
            if new <= slack * best.cost:
                heapq.heappush(waiting, (new, len(seen), changed, (*way, name)))
    return FoundProgram(best.graph, best.cost, best.rules, len(seen))


def greedy(graph: Graph, rules: Sequence[RewriteRule], cost: Callable[[Graph], float]) -> FoundProgram:
    """The graph after taking, again and again, the one rewrite that pays most; it stops where none pays."""
    by_op = by_operator(rules)
    best, seen = graph, 1
    way: list[str] = []
    while True:
        tried = [(cost(changed), name, changed) for name, changed in _neighbours(best, by_op)]
        seen += len(tried)
        choice = min(tried, key=lambda each: each[0], default=None)
        if choice is None or choice[0] >= cost(best):
            return FoundProgram(best, cost(best), tuple(way), seen)
        best = choice[2]
        way.append(choice[1])


def _neighbours(graph: Graph, by_op: dict[str, list[RewriteRule]]) -> Iterator[tuple[str, Graph]]:
    """Every graph that one rule at one place makes of this one."""
    for node in graph.nodes():
        for each in by_op.get(node.op, ()):
            new = each.apply(node)
            if new is not None:
                yield each.name, graph.substitute({node: new})
