"""How the problems of an operator are written: sizes such as 2048x2048x2048, and settings such as dtype and activation.

Commands know nothing else of an operator's problems, so `tilemesh bench kernel` and `tilemesh tune` are the same for
all of them. A row keeps its problem in the same words, from which its cost is found again. Nothing here needs torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tilemesh.core.cost import SHORT_DTYPES, Cost
from tilemesh.core.errors import UsageError, unknown

ProblemT = TypeVar("ProblemT")

_SIZE = re.compile(r"[0-9]{1,12}")  # no other digits (², ٣), and none that Python takes seconds to read


@dataclass(frozen=True)
class Setting:
    """A property of a problem besides its sizes, and the values it may have.

    named: whether every row's case says it, or only those where it is not the default.
    """

    known: tuple[str, ...]
    default: str
    named: bool = True


ANY_DTYPE = Setting(tuple(SHORT_DTYPES), "bfloat16")
PASSES = Setting(("forward", "both"), "forward", named=False)
"""What is timed: the forward pass, or forward and backward together."""


@dataclass(frozen=True)
class SizedProblem:
    """A problem that is its sizes and its settings: enough for most operators."""

    sizes: tuple[int, ...]
    dtype: str
    options: Mapping[str, str]
    """Every setting but the dtype, as the operator's function takes it."""

    @classmethod
    def of(cls, *sizes: int, dtype: str, **options: str) -> SizedProblem:
        return cls(sizes, dtype, options)


@dataclass(frozen=True)
class ProblemForm(Generic[ProblemT]):
    """How one operator's problems are written, made and counted.

    sizes: the names of its sizes, as in `MxNxK`. suite: the problems that are measured where none is named. make: from
    sizes by position and settings by name. Every form has the setting `dtype`.
    """

    sizes: str
    suite: tuple[str, ...]
    settings: Mapping[str, Setting]
    make: Callable[..., ProblemT]
    cost: Callable[[ProblemT], Cost]

    def parse_sizes(self, text: str) -> tuple[int, ...]:
        sides = text.strip().lower().split("x")
        fits = len(sides) == len(self.sizes.split("x")) and all(_SIZE.fullmatch(side) for side in sides)
        if not fits or not all(int(side) for side in sides):
            shown = text if len(text) <= 60 else f"{text[:60]}…"
            raise UsageError(f"shape '{shown}' is not understood: write {self.sizes}, as in {self.suite[0]}")
        return tuple(int(side) for side in sides)

    def settled(self, given: Mapping[str, str]) -> dict[str, str]:
        """A value for every setting: the one given, or the default."""
        for name, value in given.items():
            if name not in self.settings:
                raise unknown("setting of this operator", name, self.settings)
            if value not in self.settings[name].known:
                raise unknown(name, value, self.settings[name].known)
        return {name: given.get(name, setting.default) for name, setting in self.settings.items()}

    def problem(self, shape: str, settings: Mapping[str, str]) -> ProblemT:
        """The problem of this shape; settings that are not given have their defaults."""
        return self.make(*self.parse_sizes(shape), **self.settled(settings))

    def case(self, shape: str, settings: Mapping[str, str]) -> dict[str, Any]:
        """A problem in the words of a row."""
        settled = self.settled(settings)
        said = {name: setting for name, setting in self.settings.items() if setting.named}
        said |= {name: setting for name, setting in self.settings.items() if settled[name] != setting.default}
        return {"shape": shape, **{name: settled[name] for name in self.settings if name in said}}

    def cost_of(self, case: Mapping[str, Any]) -> Cost:
        """What a row's problem needs."""
        given = {name: str(case[name]) for name in self.settings if name in case}
        return self.cost(self.problem(str(case["shape"]), given))


def sized_form(
    sizes: str, suite: tuple[str, ...], count: Callable[..., Cost], backward: Callable[..., Cost] | None = None, *,
    dtype: Setting = ANY_DTYPE, **settings: Setting,
) -> ProblemForm[SizedProblem]:  # fmt: skip
    """Of an operator whose problems are their sizes and settings.

    count: what one costs, from its sizes, its dtype and, by name, those of its settings that it takes. backward: the
    same of a backward pass, where `count` is of the forward pass alone.
    """
    taken = inspect.signature(count).parameters.keys() & settings

    def cost(problem: SizedProblem) -> Cost:
        options = {name: value for name, value in problem.options.items() if name in taken}
        once = count(*problem.sizes, problem.dtype, **options)
        if backward is None or problem.options["passes"] != "both":
            return once
        return once + backward(*problem.sizes, problem.dtype)

    return ProblemForm(sizes, suite, {"dtype": dtype, **settings}, SizedProblem.of, cost)


def rows_form(
    suite: tuple[str, ...], forward: Callable[..., Cost], backward: Callable[..., Cost]
) -> ProblemForm[SizedProblem]:
    """Of an operator over (rows, columns) in one dtype, timed forward or both ways."""
    return sized_form("ROWSxCOLUMNS", suite, forward, backward, passes=PASSES)
