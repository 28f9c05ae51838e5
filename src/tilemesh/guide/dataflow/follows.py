"""Checking a proof: whether two terms are equal by these axioms and no others. Plain Python, without z3.

The terms and everything that the axioms say of them are kept as classes of equal terms. A node is an operator applied
to classes; where two of its operands become equal, so do the nodes (congruence). Each round applies every axiom in both
directions wherever one of its sides stands; the proof holds once both terms are in one class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from tilemesh.guide.dataflow.substitute import Substitution, Term

ROUNDS = 6  # the committed proofs need at most 4
MOST_NODES = 20_000  # beyond, a proof of at most 64 words a side is not found

Operation: TypeAlias = tuple[str | int, ...]  # an operator, or a name, and the classes of its operands
Members: TypeAlias = dict[int, list[Operation]]


class _EqualTerms:
    def __init__(self) -> None:
        self.leaders: list[int] = []  # of each class the one that it was merged into, or itself
        self.classes: dict[Operation, int] = {}

    def leader(self, number: int) -> int:
        while self.leaders[number] != number:
            self.leaders[number] = self.leaders[self.leaders[number]]
            number = self.leaders[number]
        return number

    def add(self, term: Term, names: dict[str, int] | None = None) -> int:
        """The class of a term. names: the classes that its names stand for; without them they stand for themselves."""
        if isinstance(term, str) and names is not None:
            return self.leader(names[term])
        parts = () if isinstance(term, str) else tuple(self.add(part, names) for part in term[1:])
        node = (term if isinstance(term, str) else term[0], *parts)
        if node not in self.classes:
            self.classes[node] = len(self.leaders)
            self.leaders.append(len(self.leaders))
        return self.leader(self.classes[node])

    def merge(self, first: int, second: int) -> None:
        self.leaders[self.leader(first)] = self.leader(second)

    def close(self) -> None:
        """Merges what is the same operator of equal operands."""
        while True:
            closed: dict[Operation, int] = {}
            merged = False
            for (op, *parts), number in self.classes.items():
                node = (op, *(self.leader(int(part)) for part in parts))
                other = closed.setdefault(node, self.leader(number))
                if self.leader(other) != self.leader(number):
                    self.merge(number, other)
                    merged = True
            self.classes = {node: self.leader(number) for node, number in closed.items()}
            if not merged:
                return

    def matches(self, pattern: Term, number: int, names: dict[str, int], members: Members) -> Iterator[dict[str, int]]:
        """Every way in which a term of this class is an instance of a pattern."""
        if isinstance(pattern, str):
            if names.setdefault(pattern, number) == number:
                yield names
            return
        for node in members.get(number, ()):
            if node[0] == pattern[0]:
                found = [dict(names)]
                for part, operand in zip(pattern[1:], node[1:], strict=True):
                    found = [more for each in found for more in self.matches(part, int(operand), dict(each), members)]
                yield from found


def follows(substitution: Substitution, axioms: Sequence[Substitution]) -> bool:
    """Whether these axioms alone make the two sides equal."""
    terms = _EqualTerms()
    left, right = terms.add(substitution.left), terms.add(substitution.right)
    sides = [pair for axiom in axioms for pair in ((axiom.left, axiom.right), (axiom.right, axiom.left))]
    for _ in range(ROUNDS):
        members: Members = {}
        for node, number in terms.classes.items():
            members.setdefault(terms.leader(number), []).append(node)
        equal = [
            (number, there, names)
            for here, there in sides
            for number in members
            for names in terms.matches(here, number, {}, members)
        ]
        for number, there, names in equal:
            terms.merge(number, terms.add(there, names))
            if len(terms.classes) > MOST_NODES:
                return False
        terms.close()
        if terms.leader(left) == terms.leader(right):
            return True
    return False
