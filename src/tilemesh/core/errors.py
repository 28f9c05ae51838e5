"""The two kinds of error a user can meet, and how an unknown name is refused.

A message says what was given, what was expected and what to do, in one line: the command line
prints it as it stands. Anything that is not one of these two is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class Argument(str):
    """The name of a function's argument in a message, and what a command's user types for it: `--stop-after`."""

    typed: str

    def __new__(cls, name: str, typed: str = "") -> Argument:
        argument = super().__new__(cls, name)
        argument.typed = typed or f"--{name.replace('_', '-')}"
        return argument


class UsageError(ValueError):
    """Something asked for cannot be: a wrong name, value, shape or combination. Exit code 2.

    The message may come in pieces: those that are an `Argument` read as Python spells them, or as a user types them.
    It has no `__init__`: torch.compile raises what ValueError's own one made, and in torch 2.11 nothing else.
    """

    def __str__(self) -> str:
        return "".join(map(str, self.args))

    @property
    def typed(self) -> str:
        """The message for somebody who typed a command."""
        return "".join(piece.typed if isinstance(piece, Argument) else str(piece) for piece in self.args)

    def as_typed(self, names: Mapping[str, str]) -> UsageError:
        """The same error for a command that has options of its own for settings: what its user types, by setting."""
        return UsageError(*(Argument(piece, names[piece]) if piece in names else piece for piece in self.args))


class RunError(RuntimeError):
    """Something possible was asked for and failed: a rank died, memory ran out. Exit code 1."""

    def __init__(self, message: str) -> None:
        super().__init__(message)  # one piece: of several, RuntimeError would print a tuple


_LONGEST_NAME = 200


def nearest(name_typed: str, known: Iterable[str], least: float = 0.5) -> str | None:
    """The known name closest to what was given, or None when nothing is close: when less than `least` of it agrees."""
    folded = {name.lower(): name for name in known}
    if len(name_typed) > _LONGEST_NAME:
        return None  # no slip of the pen, and comparing takes as long as it is
    # "lr" shares too few letters with "train.lr" to be close to it, and yet is what was meant.
    tails = [name for name in folded if name.rpartition(".")[2] == name_typed.lower().rpartition(".")[2]]
    if len(tails) == 1:
        return folded[tails[0]]
    scores = {name: difflib.SequenceMatcher(None, name, name_typed.lower()).ratio() for name in folded}
    # People get the first letter right: of two equally close names, "dpp" means "dp" and not "pp".
    best = max(scores, key=lambda name: (scores[name], name[:1] == name_typed[:1].lower()), default="")
    return folded[best] if scores.get(best, 0) >= least else None


def unknown(kind: str, name_typed: object, known: Iterable[str], near: Iterable[str] | None = None) -> UsageError:
    """The error for a name that does not exist: names what was given, the nearest and all that are known.

    `near`: the names to look for the nearest in, where those are more than are worth listing.
    """
    names = list(known)
    if not isinstance(name_typed, str):
        return UsageError(f"{kind} is {name_typed!r}: expected one of {', '.join(names) or 'none'}")
    close = nearest(name_typed, names if near is None else near)
    hint = f"did you mean '{close}'? " if close else ""
    return UsageError(f"unknown {kind} '{name_typed}': {hint}known are {', '.join(names) or 'none'}")
