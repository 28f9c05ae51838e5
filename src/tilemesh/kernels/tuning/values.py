"""What the tuner knows of any operator's problems and configurations: a key, a kind, a label."""

from __future__ import annotations

from typing import Protocol, TypeVar


class TunedProblem(Protocol):
    """One call that can be tuned for."""

    @property
    def key(self) -> str:
        """The name under which a tuned configuration is stored."""


class Configuration(Protocol):
    """A configuration; hashable, and equal where it does the same."""

    @property
    def kind(self) -> str: ...

    @property
    def label(self) -> str: ...

    def __hash__(self) -> int: ...


ProblemT = TypeVar("ProblemT", bound=TunedProblem)
ProblemIn = TypeVar("ProblemIn", bound=TunedProblem, contravariant=True)
ConfigurationT = TypeVar("ConfigurationT", bound=Configuration)
