"""Equal programs of matrices: what a substitution is, how it is read, and whether matrices refute it.

A program of matrices is a term: a name, or an operator with its operands. Terms are evaluated on random matrices modulo
two primes. `scripts/graph_rules.py` finds substitutions and proves them from the axioms that stand here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

from tilemesh.core.errors import UsageError

Term: TypeAlias = "str | tuple[Any, ...]"  # a name, or (operator, term, ...)
Matrix: TypeAlias = "tuple[tuple[int, ...], ...]"

PRIMES = (536_870_909, 268_435_399)  # a product and a sum of eight of them fit into 64 bits
NAMES = ("x", "y", "z", "v", "w")
LONGEST = 64  # words of one side of a substitution: more is nothing that was ever generated
TAPS = 3
OPERANDS: dict[str, int] = {"add": 2, "multiply": 2, "dot": 2, "transpose": 1, "rows": 2, "columns": 2}
OPERANDS |= {"conv": 2}
"""`rows` puts one matrix below another, `columns` beside it. `conv(x, w)` is a convolution over one dim with zeros
beyond the edges: x is channels x positions, w is channels of the result x (channels of x times taps). What is true of
it is true of more dims: every tap is one more linear map of positions."""

# What is taken as true of the operators: the start of every proof. Checked on all small shapes by a test.
AXIOMS = (
    "add(x, y) = add(y, x)",
    "add(x, add(y, z)) = add(add(x, y), z)",
    "multiply(x, y) = multiply(y, x)",
    "multiply(x, multiply(y, z)) = multiply(multiply(x, y), z)",
    "multiply(x, add(y, z)) = add(multiply(x, y), multiply(x, z))",
    "dot(x, dot(y, z)) = dot(dot(x, y), z)",
    "dot(x, add(y, z)) = add(dot(x, y), dot(x, z))",
    "dot(add(x, y), z) = add(dot(x, z), dot(y, z))",
    "transpose(transpose(x)) = x",
    "transpose(add(x, y)) = add(transpose(x), transpose(y))",
    "transpose(multiply(x, y)) = multiply(transpose(x), transpose(y))",
    "transpose(dot(x, y)) = dot(transpose(y), transpose(x))",
    "transpose(rows(x, y)) = columns(transpose(x), transpose(y))",
    "transpose(columns(x, y)) = rows(transpose(x), transpose(y))",
    "rows(x, rows(y, z)) = rows(rows(x, y), z)",
    "columns(x, columns(y, z)) = columns(columns(x, y), z)",
    "dot(rows(x, y), z) = rows(dot(x, z), dot(y, z))",
    "dot(x, columns(y, z)) = columns(dot(x, y), dot(x, z))",
    "dot(columns(x, y), rows(z, w)) = add(dot(x, z), dot(y, w))",
    "rows(columns(x, y), columns(z, w)) = columns(rows(x, z), rows(y, w))",
    "add(rows(x, y), rows(z, w)) = rows(add(x, z), add(y, w))",
    "add(columns(x, y), columns(z, w)) = columns(add(x, z), add(y, w))",
    "multiply(rows(x, y), rows(z, w)) = rows(multiply(x, z), multiply(y, w))",
    "multiply(columns(x, y), columns(z, w)) = columns(multiply(x, z), multiply(y, w))",
    "conv(add(x, y), z) = add(conv(x, z), conv(y, z))",
    "conv(x, add(y, z)) = add(conv(x, y), conv(x, z))",
    "conv(x, rows(y, z)) = rows(conv(x, y), conv(x, z))",
    "conv(rows(x, y), columns(z, w)) = add(conv(x, z), conv(y, w))",
    "dot(x, conv(y, z)) = conv(y, dot(x, z))",
)


@dataclass(frozen=True)
class Substitution:
    """Two terms that are equal for all matrices whose shapes fit both."""

    left: Term
    right: Term

    def __str__(self) -> str:
        return f"{text_of(self.left)} = {text_of(self.right)}"


def text_of(term: Term) -> str:
    return term if isinstance(term, str) else f"{term[0]}({', '.join(text_of(part) for part in term[1:])})"


def names_of(term: Term) -> list[str]:
    """The names in the order of their first use."""
    if isinstance(term, str):
        return [term]
    return list(dict.fromkeys(name for part in term[1:] for name in names_of(part)))


def parse(text: str) -> Substitution:
    """A substitution from `left = right`; nonsense is refused."""
    left, equal, right = text.partition(" = ")
    if not equal:
        raise UsageError(f"{text!r} has no ' = '")
    made = Substitution(_read(left), _read(right))
    unbound = set(names_of(made.right)) - set(names_of(made.left))
    if unbound:
        raise UsageError(f"{text!r}: the right side has {', '.join(sorted(unbound))}, and the left has not")
    return made


def _read(text: str) -> Term:
    """A term from its text: a name, or an operator and its terms between brackets."""
    words = re.findall(r"\w+|\S", text)
    if len(words) > LONGEST:
        raise UsageError(f"{text.strip()[:40]!r}... has {len(words)} words; a side of at most {LONGEST} can be checked")
    term, rest = _term(words, text.strip())
    if rest:
        raise UsageError(f"{text.strip()!r} is no term: nothing may stand after {text_of(term)}")
    return term


def _term(words: Sequence[str], text: str) -> tuple[Term, Sequence[str]]:
    """The term that these words begin with, and the words behind it."""
    nonsense = UsageError(f"{text!r} is no term; write names and operators, as add(x, y)")
    if not words or not words[0].isidentifier():
        raise nonsense
    op, rest = words[0], words[1:]
    if not rest or rest[0] != "(":
        return op, rest
    parts: list[Term] = []
    while rest[0] in ("(", ","):
        part, rest = _term(rest[1:], text)
        parts.append(part)
        if not rest or rest[0] not in (")", ","):
            raise nonsense
    if OPERANDS.get(op) != len(parts):
        known = ", ".join(f"{name} of {n}" for name, n in OPERANDS.items())
        raise UsageError(f"{op} of {len(parts)} in {text!r}: there are {known}")
    return (op, *parts), rest[1:]


def evaluate(term: Term, values: Mapping[str, Matrix], prime: int) -> Matrix | None:
    """The matrix of a term modulo a prime; None where shapes do not fit."""
    if isinstance(term, str):
        return values[term]
    operands = [evaluate(part, values, prime) for part in term[1:]]
    if any(operand is None for operand in operands):
        return None
    return apply(term[0], [operand for operand in operands if operand is not None], prime)


def apply(op: str, operands: Sequence[Matrix], prime: int) -> Matrix | None:
    """One operator modulo a prime; None where shapes do not fit."""
    first = operands[0]
    if op == "transpose":
        return tuple(zip(*first, strict=True))
    second = operands[1]
    if op == "conv":
        if len(second[0]) != TAPS * len(first):
            return None
        return apply("dot", [second, _windows(first)], prime)
    if op == "dot":
        if len(first[0]) != len(second):
            return None
        turned = list(zip(*second, strict=True))
        return tuple(tuple(sum(map(int.__mul__, row, column)) % prime for column in turned) for row in first)
    if op == "rows":
        return first + second if len(first[0]) == len(second[0]) else None
    if len(first) != len(second):
        return None
    pairs = list(zip(first, second, strict=True))
    if op == "columns":
        return tuple(left + right for left, right in pairs)
    if len(first[0]) != len(second[0]):
        return None
    if op == "add":
        return tuple(tuple((a + b) % prime for a, b in zip(*pair, strict=True)) for pair in pairs)
    return tuple(tuple(a * b % prime for a, b in zip(*pair, strict=True)) for pair in pairs)


def _windows(x: Matrix) -> Matrix:
    """For every channel and tap the positions that a convolution reads there: zeros beyond the edges."""
    reach = TAPS // 2
    wide = [(0,) * reach + row + (0,) * reach for row in x]
    return tuple(row[tap : tap + len(x[0])] for row in wide for tap in range(TAPS))


def draw_matrix(rows: int, columns: int, prime: int, draws: random.Random) -> Matrix:
    return tuple(tuple(draws.randrange(prime) for _ in range(columns)) for _ in range(rows))


def renamed(substitution: Substitution) -> Substitution:
    """The same with names in the order of their first use on the left."""
    order = {name: f"{new}" for name, new in zip(names_of(substitution.left), "xyzwvu", strict=False)}

    def change(term: Term) -> Term:
        return order[term] if isinstance(term, str) else (term[0], *(change(part) for part in term[1:]))

    return Substitution(change(substitution.left), change(substitution.right))


def refuted(substitution: Substitution, tries: int = 2) -> str | None:
    """Matrices for which the two sides differ, in words; None where none was found on any small shapes.

    All shapes of 1 to 2 rows and columns are tried for every name, and 3 x 3 for all, modulo two primes. A wrong
    substitution of degree d survives one try with a probability of at most d / prime.
    """
    names = names_of(substitution.left)
    if len(names) > len(NAMES):
        return f"{substitution} has {len(names)} names; all shapes of at most {len(NAMES)} can be tried"
    draws = random.Random(7)
    shapes = [(rows, columns) for rows in (1, 2) for columns in (1, 2)]
    if "conv" in str(substitution):
        shapes += [(rows, columns) for rows in (1, 2) for columns in (TAPS, 2 * TAPS)]
    fitted = 0
    for chosen in (*product(shapes, repeat=len(names)), ((3, 3),) * len(names)):
        sizes = dict(zip(names, chosen, strict=True))
        if shape_of(substitution.left, sizes) is None or shape_of(substitution.right, sizes) is None:
            continue
        fitted += 1
        for prime in PRIMES:
            for _ in range(tries):
                values = {name: draw_matrix(*shape, prime, draws) for name, shape in sizes.items()}
                left, right = (evaluate(side, values, prime) for side in (substitution.left, substitution.right))
                if left != right:
                    words = ", ".join(f"{name} {list(shape)}" for name, shape in sizes.items())
                    return f"{substitution} differs for {words}"
    return None if fitted else f"{substitution} fits no shapes"


def shape_of(term: Term, sizes: Mapping[str, tuple[int, int]]) -> tuple[int, int] | None:
    """Rows and columns of a term, for these of its names; None where shapes do not fit: what `apply` says, at once."""
    if isinstance(term, str):
        return sizes[term]
    first = shape_of(term[1], sizes)
    second = shape_of(term[-1], sizes) if first is not None else None
    if first is None or second is None:
        return None
    (rows, columns), (below, beside) = first, second
    made = {
        "transpose": (True, (columns, rows)),
        "dot": (columns == below, (rows, beside)),
        "conv": (beside == TAPS * rows, (below, columns)),
        "rows": (columns == beside, (rows + below, columns)),
        "columns": (rows == below, (rows, columns + beside)),
    }.get(term[0], (first == second, first))
    return made[1] if made[0] else None
