"""Proving a substitution from the properties of the operators, by z3 (`pip install 'tilemesh[graph]'`).

Matrices are an uninterpreted sort and operators uninterpreted functions; the axioms hold for all matrices. A
substitution is proved when its negation contradicts them; the axioms that the contradiction needs are its proof, and
anyone can check it with these alone. What z3 does not decide in time is not proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilemesh.core.errors import RunError
from tilemesh.graph.substitute import AXIOMS, OPERANDS, Substitution, Term, names_of, parse


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
