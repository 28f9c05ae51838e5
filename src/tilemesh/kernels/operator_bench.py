"""What an operator gives to be measured beside its peers: arguments, what a user would call instead, what is right.

`tilemesh.bench.kernel` makes rows of it, the same way for every operator. An operator that is one decorated function
needs a `FunctionBench`, which is a value; one with more peers or a model of its own writes an `OperatorBench`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from tilemesh.core.hardware import Device
from tilemesh.kernels.accuracy import accumulator, excess, rounding_error, unit
from tilemesh.kernels.problems import ProblemForm, ProblemT, SizedProblem
from tilemesh.kernels.rates import pass_s

OURS, EAGER = "ours", "eager"
_ROUNDINGS = 16

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
    gpu_peers: ClassVar[Sequence[str]] = ()
    """Peers that `calls` has on a GPU alone."""
    in_place: ClassVar[bool] = False
    """Whether a call changes its arguments and returns nothing."""

    @abstractmethod
    def arguments(self, problem: ProblemT, device: torch.device, seed: int) -> Arguments:
        """Arguments of a call, drawn from a seed."""

    @abstractmethod
    def calls(self, problem: ProblemT) -> dict[str, Callable[..., object]]:
        """Functions of the arguments: `ours`, `eager` (plain torch, which is also what is compiled) and other peers."""

    @abstractmethod
    def wrong(self, problem: ProblemT, arguments: Arguments, result: Any) -> str | None:
        """What is wrong with a call's first result (in place: with the arguments after it), or None."""

    @abstractmethod
    def predict_s(self, problem: ProblemT, device: torch.device, figures: Device) -> float:
        """Seconds of kernel time that ours should take."""

    def timed(self, problem: ProblemT, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is called instead of a candidate, compiled or not: with its backward pass, say."""
        return function

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
    may be; without them the reference in float64, and twice the error that plain torch has, or, where that is less, the
    rounding of the result and 16 roundings in the kernels' precision (float32, or float64) of its largest element.
    eager: what a user of plain torch would call, where that is not the reference. options: what the function is given
    by name beside the settings.
    constant: positions of floating point arguments that need no gradient.
    With the setting `passes=both`, forward and backward are timed together; the result that is checked is the gradient
    of the first argument, within twice the error that plain torch has or the same roundings.
    """

    function: Callable[..., Tensor]
    form: ProblemForm[SizedProblem]
    make: Callable[[SizedProblem, torch.device, int], Arguments]
    exact: Callable[..., Tensor] | None = None
    bound: Callable[..., Tensor] | None = None
    eager: Callable[..., Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    constant: Sequence[int] = ()

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
        ours, plain, options = self.function, self.eager or self.reference, self._options(problem)
        return {OURS: lambda *given: ours(*given, **options), EAGER: lambda *given: plain(*given, **options)}

    def timed(self, problem: SizedProblem, function: Callable[..., Any]) -> Callable[..., Any]:
        return both_ways(function, self.constant) if problem.options.get("passes") == "both" else function

    def _options(self, problem: SizedProblem) -> dict[str, Any]:
        return {**self.options, **{name: value for name, value in problem.options.items() if name != "passes"}}

    def wrong(self, problem: SizedProblem, arguments: Arguments, result: Tensor) -> str | None:
        options = self._options(problem)

        def reference(*given: Any) -> Any:
            return self.reference(*given, **options)

        reference = self.timed(problem, reference)
        forward, doubled = problem.options.get("passes") != "both", [_double(value) for value in arguments]
        exact = self.exact(*arguments, **options) if self.exact and forward else _first(reference(*doubled))
        plain = _first(self.timed(problem, self.calls(problem)[EAGER])(*arguments))
        # Plain torch rounds after each of its operators: what it may, a peer may. On few elements it may be lucky, so
        # that without a bound of the operator's own a few roundings in the kernels' precision are allowed as well.
        torchs = 2 * (plain.double() - exact).abs().max()
        if self.bound and forward:
            own = self.bound(*arguments, **options)
        else:
            own = rounding_error(exact, result.dtype) + _ROUNDINGS * unit(accumulator(result.dtype)) * exact.abs().max()
        wrong = excess(result, exact, own.clamp(min=torchs.item()))
        hint = "" if wrong is None or self.bound else "; exact= and bound= of FunctionBench give it a bound of its own"
        return None if wrong is None else wrong + hint

    def predict_s(self, problem: SizedProblem, device: torch.device, figures: Device) -> float:
        return pass_s(self.form.cost(problem), figures)


def both_ways(function: Callable[..., Any], constant: Sequence[int]) -> Callable[..., Any]:
    """The gradients of all floating point arguments, of the first first; upstream's gradient is the result itself.

    constant: positions of those that are given none.
    """

    def call(*given: Any) -> tuple[Tensor, ...]:
        moved = [_is_float(value) and at not in constant for at, value in enumerate(given)]
        inputs = [
            value.detach().requires_grad_() if moves else value for moves, value in zip(moved, given, strict=True)
        ]
        made = function(*inputs)
        made = made if isinstance(made, tuple) else (made,)
        wanted = [value for moves, value in zip(moved, inputs, strict=True) if moves]
        return torch.autograd.grad(made, wanted, [tensor.detach() for tensor in made])

    return call


def _first(made: Any) -> Tensor:
    result: Tensor = made[0] if isinstance(made, tuple) else made
    return result


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _double(value: Any) -> Any:
    return value.double() if _is_float(value) else value
