"""Finds and proves equal programs of matrices: the rules of guide/dataflow/substitutions.txt.

    python scripts/graph_rules.py > src/tilemesh/guide/dataflow/substitutions.txt    # needs z3: 'tilemesh[graph]'

Small programs are enumerated and evaluated on random matrices modulo two primes; two different polynomials of degree d
agree there with a probability of at most d / prime for each, so a wrong pair is all but impossible. Only terms whose
parts are the simplest of their kind are built, sums in one order, and names in the order of their use; and a pair that
is an instance of a more general one is dropped. So what is equal by renaming, by a common subgraph or by the order of
operands never appears.

Every pair is then proved from the properties of the operators by z3. Matrices are an uninterpreted sort and operators
uninterpreted functions; the axioms hold for all matrices. A substitution is proved when its negation contradicts them;
the axioms that the contradiction needs are its proof, which `guide/dataflow/follows.py` checks without z3 when the
file is read. What z3 does not decide in time is not proved.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilemesh.core.errors import RunError
from tilemesh.guide.dataflow.substitute import (
    AXIOMS,
    NAMES,
    OPERANDS,
    PRIMES,
    TAPS,
    Matrix,
    Substitution,
    Term,
    apply,
    draw_matrix,
    names_of,
    parse,
    renamed,
    text_of,
)

SIZE = 3  # of 2 x 2 matrices more is true than of all: there the square of x is a sum of x and the identity
WEIGHTS = ("v", "w")  # of convolutions, while programs are generated
COMMUTE = ("add", "multiply")


def operators(term: Term) -> int:
    """How many different operators a program runs: a part that stands twice runs once."""
    return len(_parts(term))


def _parts(term: Term) -> set[Term]:
    if isinstance(term, str):
        return set()
    return {term}.union(*(_parts(part) for part in term[1:]))


def generate(most: int = 3, names: Sequence[str] = NAMES) -> list[Substitution]:
    """All pairs of programs of at most so many operators over these names: larger = simplest of its kind."""
    draws = random.Random(20)
    values: dict[Term, tuple[Matrix, ...]] = {
        name: tuple(draw_matrix(SIZE, SIZE * (TAPS if name in WEIGHTS else 1), prime, draws) for prime in PRIMES)
        for name in names
    }
    kept: dict[tuple[Matrix, ...], Term] = {value: name for name, value in values.items()}
    prints = dict(values)
    substitutions: dict[str, Substitution] = {}
    levels: list[list[Term]] = [list(names)]
    for count in range(1, most + 1):
        level: list[Term] = []
        for term in _terms(levels, count):
            fingerprint = _print(term, prints)
            if fingerprint is None or operators(term) > most:
                continue
            simplest = kept.setdefault(fingerprint, term)
            if simplest is term:
                prints[term] = fingerprint
                level.append(term)
            else:
                substitution = renamed(Substitution(term, simplest))
                substitutions.setdefault(str(substitution), substitution)
        levels.append(level)
    return _general(list(substitutions.values()))


def _general(substitutions: Sequence[Substitution]) -> list[Substitution]:
    """Without the pairs whose left side is an instance of another's: small ones with many names come first."""
    kept: dict[str, list[Substitution]] = {}
    order = sorted(substitutions, key=lambda each: (operators(each.left), -len(names_of(each.left)), str(each)))
    for each in order:
        same = kept.setdefault(each.left[0], [])
        if not any(matched(other.left, each.left, {}) for other in same):
            same.append(each)
    return [each for each in order if each in kept[each.left[0]]]


def matched(pattern: Term, term: Term, names: dict[str, Term]) -> bool:
    """Whether a term is an instance of a pattern; `names` gets what the pattern's names stand for."""
    if isinstance(pattern, str):
        return names.setdefault(pattern, term) == term
    if isinstance(term, str) or term[0] != pattern[0]:
        return False
    return all(matched(inner, part, names) for inner, part in zip(pattern[1:], term[1:], strict=True))


def _print(term: Term, prints: Mapping[Term, tuple[Matrix, ...]]) -> tuple[Matrix, ...] | None:
    """The values of a term modulo every prime, from those of its operands."""
    operands = [prints[part] for part in term[1:]]
    values = [apply(term[0], [value[place] for value in operands], prime) for place, prime in enumerate(PRIMES)]
    known = tuple(value for value in values if value is not None)
    return known if len(known) == len(PRIMES) else None


def _terms(levels: Sequence[Sequence[Term]], count: int) -> Iterator[Term]:
    """The terms whose operands, counted with repetition, have one operator less; sums in one order only."""
    for op, operands in OPERANDS.items():
        if operands == 1:
            yield from ((op, part) for part in levels[count - 1])
            continue
        for own in range(count):
            for left in levels[own]:
                for right in levels[count - 1 - own]:
                    if op not in COMMUTE or (own, text_of(left)) <= (count - 1 - own, text_of(right)):
                        yield (op, left, right)


class Prover:
    """z3 with the axioms."""

    def __init__(self, axioms: Sequence[str] = AXIOMS, seconds: float = 5.0) -> None:
        try:
            import z3  # type: ignore[import-not-found, unused-ignore]
        except ModuleNotFoundError:
            raise RunError("proofs need z3: pip install 'tilemesh[graph]'") from None
        self.z3: Any = z3
        self.sort = z3.DeclareSort("Matrix")
        self.functions = {op: z3.Function(op, *[self.sort] * (count + 1)) for op, count in OPERANDS.items()}
        self.solver = z3.Solver()
        self.solver.set("timeout", int(seconds * 1000))
        self.solver.set("smt.mbqi", False)  # only instances of what stands there: proofs, no models
        for number, text in enumerate(axioms, 1):
            axiom = parse(text)
            variables = self._variables(axiom)
            left, right = self._made(axiom.left, variables), self._made(axiom.right, variables)
            # An axiom is used wherever either of its sides stands.
            patterns = [side for side in (left, right) if side.num_args()]
            holds = z3.ForAll(list(variables.values()), left == right, patterns=patterns)
            self.solver.assert_and_track(holds, str(number))

    def proves(self, substitution: Substitution) -> bool:
        return self.proof(substitution) is not None

    def proof(self, substitution: Substitution) -> tuple[int, ...] | None:
        """The numbers of the axioms that a substitution follows from; None where it is not proved."""
        variables = self._variables(substitution)
        self.solver.push()
        self.solver.add(self._made(substitution.left, variables) != self._made(substitution.right, variables))
        proved = self.solver.check() == self.z3.unsat
        used = sorted(int(str(name)) for name in self.solver.unsat_core()) if proved else []
        self.solver.pop()
        return tuple(used) if proved else None

    def _variables(self, substitution: Substitution) -> dict[str, Any]:
        return {name: self.z3.Const(name, self.sort) for name in names_of(substitution.left)}

    def _made(self, term: Term, variables: dict[str, Any]) -> Any:
        if isinstance(term, str):
            return variables[term]
        return self.functions[term[0]](*(self._made(part, variables) for part in term[1:]))


def write_substitutions(proofs: Sequence[tuple[Substitution, Sequence[int]]]) -> str:
    """The file: axioms first, then what was generated and proved, with the axioms of each proof."""
    lines = [f"axiom {text}" for text in AXIOMS]
    lines += [f"proved {substitution} by {' '.join(map(str, used))}" for substitution, used in proofs]
    head = (
        "# Equal programs of matrices: axioms, then what follows of at most 3 operators over 5 names, with the axioms"
        " that prove it (by z3).\n"
    )
    return head + "".join(f"{number} {line}\n" for number, line in enumerate(lines, 1))


if __name__ == "__main__":
    prover = Prover()
    proofs = [(substitution, prover.proof(substitution)) for substitution in generate()]
    unproved = [str(substitution) for substitution, used in proofs if used is None]
    if unproved:
        raise SystemExit(f"not proved: {', '.join(unproved)}")
    sys.stdout.write(write_substitutions([(substitution, used or ()) for substitution, used in proofs]))
