"""What an operator gives to be measured beside its peers: arguments, what a user would call instead, what is right.

`measure.py` makes rows of it, the same way for every operator. An operator that is one decorated function needs a
`FunctionBench`, which is a value; one with more peers or a model of its own writes an `OperatorBench`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from tilemesh.core.hardware import Device
from tilemesh.kernels.accuracy import excess, rounding_error
from tilemesh.kernels.bench.problems import ProblemForm, ProblemT, SizedProblem
from tilemesh.kernels.rates import pass_s

OURS, EAGER = "ours", "eager"

# Arguments by position; tensors, and None where an optional one is left out.
Arguments = tuple[Any, ...]


class OperatorBench(ABC, Generic[ProblemT]):
    """One operator, as the rows of `tilemesh bench kernel` see it. `name`: of its rows, that of its public function."""

    name: str
    form: ProblemForm[ProblemT]
    compile_modes: ClassVar[Mapping[str, str | None]] = {"compile": None}
    """Peers that torch.compile makes of `eager`, and the mode of each."""
    no_peers: Sequence[str] = ()
    """Calls that compute less: shown for what they tell, neither checked nor compared."""

    @abstractmethod
    def arguments(self, problem: ProblemT, device: torch.device, seed: int) -> Arguments:
        """Arguments of a call, drawn from a seed."""

    @abstractmethod
    def calls(self, problem: ProblemT) -> dict[str, Callable[..., object]]:
        """Functions of the arguments: `ours`, `eager` (plain torch, which is also what is compiled) and other peers."""

    @abstractmethod
    def wrong(self, problem: ProblemT, arguments: Arguments, result: Tensor) -> str | None:
        """What is wrong with a result, or None."""

    @abstractmethod
    def predict_s(self, problem: ProblemT, device: torch.device, figures: Device) -> float:
        """Seconds of kernel time that ours should take."""

    def bytes_held(self, problem: ProblemT) -> int:
        """Bytes that one call touches: inputs rotate until the L2 holds none of them."""
        return self.form.cost(problem).bytes_moved

    def chosen(self, problem: ProblemT, device: torch.device) -> dict[str, str]:
        """What of our implementation a row should say: a configuration, where there are several."""
        return {}


@dataclass(frozen=True)
class FunctionBench(OperatorBench[SizedProblem]):
    """An operator of `@operator`, whose settings beside the dtype are arguments of its function by name.

    make: its arguments (problem, device, seed). exact and bound: the float64 result, and how far from it each element
    may be; without them the reference in float64, and twice the error that plain torch has.
    """

    function: Callable[..., Tensor]
    form: ProblemForm[SizedProblem]
    make: Callable[[SizedProblem, torch.device, int], Arguments]
    exact: Callable[..., Tensor] | None = None
    bound: Callable[..., Tensor] | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.function.__name__

    @property
    def reference(self) -> Callable[..., Tensor]:
        made: Callable[..., Tensor] = self.function.reference  # type: ignore[attr-defined]
        return made

    def arguments(self, problem: SizedProblem, device: torch.device, seed: int) -> Arguments:
        return self.make(problem, device, seed)

    def calls(self, problem: SizedProblem) -> dict[str, Callable[..., object]]:
        ours, reference, options = self.function, self.reference, problem.options
        return {OURS: lambda *given: ours(*given, **options), EAGER: lambda *given: reference(*given, **options)}

    def wrong(self, problem: SizedProblem, arguments: Arguments, result: Tensor) -> str | None:
        options, doubled = problem.options, [_double(value) for value in arguments]
        exact = self.reference(*doubled, **options) if self.exact is None else self.exact(*arguments, **options)
        plain = self.reference(*arguments, **options)
        # Plain torch rounds after each of its operators: what it may, a peer may.
        torchs = 2 * (plain.double() - exact).abs().max()
        own = rounding_error(exact, result.dtype) if self.bound is None else self.bound(*arguments, **options)
        return excess(result, exact, own.clamp(min=torchs.item()))

    def predict_s(self, problem: SizedProblem, device: torch.device, figures: Device) -> float:
        return pass_s(self.form.cost(problem), figures)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
