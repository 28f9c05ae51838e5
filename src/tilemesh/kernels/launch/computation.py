"""How an operator's results and gradients come about: by its reference, or by its kernel module, first or repeated.

Nothing here chooses an implementation (operator.py does) or knows how torch learns of the operator (registration.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilemesh.core.errors import RunError
from tilemesh.kernels import context
from tilemesh.kernels.launch import call
from tilemesh.kernels.launch.binding import Binding
from tilemesh.kernels.launch.replay import RepeatedCall, Tensors, signature
from tilemesh.kernels.launch.tensors import FLOATS, autocasts, is_plain, is_traced, is_watched

Reference = Callable[..., Any]
Restore = Callable[[list[Any], Sequence[Tensor]], list[Any]]


@dataclass(frozen=True)
class OperatorOptions:
    """What `@operator` is told; it says what each of them means."""

    kernel: str
    check: Callable[..., None] | None = None
    check_values: Callable[..., None] | None = None
    kept: tuple[Callable[..., Tensor], ...] = ()
    keeps_results: bool | tuple[int, ...] = False
    dtypes: tuple[torch.dtype, ...] = FLOATS
    casts: bool = False
    own_dtype: frozenset[str] = frozenset()
    served: Callable[..., bool] | None = None
    gains: Callable[..., bool] | None = None
    overwrites: str | None = None
    told: str | None = None
    forgets: tuple[str, ...] = ()
    restored: Restore | None = None
    partial: bool = False


class Computation:
    """One operator: its reference, its kernel module, and what passes from forward to backward."""

    def __init__(self, reference: Reference, options: OperatorOptions) -> None:
        self.binding = Binding(reference)
        self.name, self.reference, self.options = reference.__name__, reference, options
        self.tensors, self.results = self.binding.tensors, self.binding.results
        wanted = options.keeps_results
        self.results_kept = tuple(range(self.results)) if wanted is True else wanted or ()
        self.forgotten = [self.tensors.index(self.binding.places[name]) for name in options.forgets]
        """Which of the tensor arguments are saved as empty tensors of their dtype."""

    # ---- forward -------------------------------------------------------------------------------------------------

    def compute(self, values: Sequence[Any]) -> Any:
        """By the reference, in the dtypes of the values: as for the kernels, autocast ends with the arguments."""
        positional = self.binding.positional
        named = dict(zip(self.binding.names[positional:], values[positional:], strict=True))
        first = next(values[at] for at in self.tensors if values[at] is not None)
        if not autocasts(first):
            return self.reference(*values[:positional], **named)
        with torch.autocast(first.device.type, enabled=False):
            return self.reference(*values[:positional], **named)

    def _kernels(self) -> Any:
        module, _, name = self.options.kernel.partition(":")
        kernels = importlib.import_module(module)
        return getattr(kernels, name) if name else kernels

    def forward(self, how: str, values: Sequence[Any]) -> Sequence[Tensor]:
        """Results, then what is kept for the backward pass: where torch.compile's graphs call it."""
        return self._repeat(
            (self, how, "forward", *self.binding.options(values)),
            [values[at] for at in self.tensors],
            how,
            lambda launch, tensors: self.run_forward(launch, self.binding.with_tensors(values, tensors)),
        )

    def run_forward(self, launch: Callable[..., Any], values: Sequence[Any]) -> tuple[Tensor, ...]:
        made = self._kernels().forward(launch, *values)
        made = made if isinstance(made, tuple) else (made,)
        kept = len(self.options.kept)
        if len(made) != self.results + kept:
            wanted = f"expected {self.results} as the reference returns and {kept} declared in kept="
            raise RunError(f"forward of {self.name} returned {len(made)} tensors: {wanted}")
        return made

    def run_forward_alone(self, launch: Callable[..., Any], values: Sequence[Any]) -> tuple[Tensor, ...]:
        """Results alone, where no gradient can be asked for: by the module's `forward_alone`, if it has one."""
        module = self._kernels()
        if not hasattr(module, "forward_alone"):
            return self.run_forward(launch, values)
        made = module.forward_alone(launch, *values)
        return made if isinstance(made, tuple) else (made,)

    def telling(self, values: Sequence[Any], asked: bool) -> Sequence[Any]:
        """Values with the argument filled in that says whether a gradient may be asked for."""
        if self.options.told is None:
            return values
        at = self.binding.places[self.options.told]
        return [*values[:at], asked, *values[at + 1 :]]

    def fake(self, *values: Any) -> tuple[Tensor, ...]:
        """Empty tensors like the results and what is kept."""
        made = self.compute(values)
        made = made if isinstance(made, tuple) else (made,)
        return (*(tensor.new_empty(tensor.shape) for tensor in made), *(make(*values) for make in self.options.kept))

    # ---- what passes from forward to backward ----------------------------------------------------------------------

    def kept_of(self, made: Sequence[Tensor]) -> list[Tensor]:
        """What `backward` is given of what forward returned."""
        return [*(made[at] for at in self.results_kept), *made[self.results :]]

    def stand_ins(self, tensors: Tensors) -> dict[int, Tensor]:
        """Empty tensors in the place of arguments of which the backward pass needs the dtype alone."""
        tensors_kept = {at: tensors[at] for at in self.forgotten}
        return {at: tensor.new_empty(0) for at, tensor in tensors_kept.items() if tensor is not None}

    def restored(self, values: Sequence[Any], kept: Sequence[Tensor]) -> list[Any]:
        """Arguments from which the reference computes the same results, in place of those that were not saved."""
        restore = self.options.restored
        return list(values) if restore is None else restore(list(values), kept)

    # ---- backward ------------------------------------------------------------------------------------------------

    def recall(
        self, how: str, rest: Sequence[Any], saved: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """One gradient, or None, for each tensor argument; `rest`: the arguments that are no tensors, in place."""
        count = len(self.tensors)
        values, kept = self.binding.with_tensors(rest, saved[:count]), saved[count:]
        given = [values[at] for at in self.tensors if values[at] is not None]
        filled = self._filled(gradients, values, kept)
        there = [gradient for gradient in filled if gradient is not None]
        watched = torch.is_grad_enabled() and any(t.requires_grad for t in (*given, *there, *kept))
        if not watched and not is_traced() and all(is_plain(tensor) for tensor in (*there, *given)):
            return self.backward(how, filled, values, kept)
        if watched and not is_traced():
            made = self.differentiate(filled, self.restored(values, kept), create_graph=True)
        else:
            made = getattr(torch.ops.tilemesh, f"{self.name}_backward")(*values, list(kept), filled, how)
        gradients_made = iter(made)
        return [None if values[at] is None else next(gradients_made) for at in self.tensors]

    def _filled(
        self, gradients: Sequence[Tensor | None], values: Sequence[Any], kept: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """A result that nothing was computed from has a gradient of zeros, or None where `backward` takes that."""
        wanted = list(gradients[: self.results])
        if self.options.partial or all(gradient is not None for gradient in wanted):
            return wanted
        shapes = self.fake(*self.restored(values, kept))
        return [torch.zeros_like(shape) if g is None else g for g, shape in zip(wanted, shapes, strict=False)]

    def backward(
        self, how: str, gradients: Tensors, values: Sequence[Any], kept: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """One gradient, or None, for each tensor argument."""
        if not hasattr(self._kernels(), "backward"):
            computed = iter(self.differentiate(gradients, self.restored(values, kept), create_graph=False))
            return [None if values[at] is None else next(computed) for at in self.tensors]
        results, count = self.results, self.results + len(self.tensors)

        def run(launch: Callable[..., Any], tensors: Tensors) -> Sequence[Tensor | None]:
            given = self.binding.with_tensors(values, tensors[results:count])
            return self._run_backward(launch, tensors[:results], given, tensors[count:])

        tensors = (*gradients, *(values[at] for at in self.tensors), *kept)
        return self._repeat(self.backward_key(how, values), tensors, how, run)

    def backward_key(self, how: str, values: Sequence[Any]) -> tuple[object, ...]:
        return (self, how, "backward", *self.binding.options(values))

    def _run_backward(
        self, launch: Callable[..., Any], gradients: Tensors, values: Sequence[Any], kept: Tensors
    ) -> Sequence[Tensor | None]:
        made = self._kernels().backward(launch, tuple(gradients), tuple(values), tuple(kept))
        made = (made,) if isinstance(made, Tensor) else made or ()
        if len(made) != len(self.tensors):
            tensors = ", ".join(self.binding.names[at] for at in self.tensors)
            raise RunError(
                f"backward of {self.name} returned {len(made)} gradients for {len(self.tensors)} tensors: {tensors}"
            )
        return [None if values[at] is None else gradient for at, gradient in zip(self.tensors, made, strict=True)]

    def differentiate(self, gradients: Tensors, values: Sequence[Any], *, create_graph: bool) -> list[Tensor]:
        """The same by the reference: slower, and differentiable again with `create_graph`."""
        with torch.enable_grad():
            # Aliases: where one argument was computed from another, gradients stop here and do not go on to that one.
            taken = _alias if create_graph else _leaf
            values = [taken(value) if isinstance(value, Tensor) else value for value in values]
            inputs = [values[at] for at in self.tensors if values[at] is not None]
            results = self.compute(values)
            results = results if isinstance(results, tuple) else (results,)
            wanted = [tensor for tensor in inputs if tensor.requires_grad]
            pairs = [(made, g) for made, g in zip(results, gradients, strict=True) if g is not None]
            outputs, upstream = [made for made, _ in pairs], [gradient for _, gradient in pairs]
            computed = iter(
                torch.autograd.grad(outputs, wanted, upstream, create_graph=create_graph, allow_unused=True)
            )
        made = [next(computed) if tensor.requires_grad else None for tensor in inputs]
        both = zip(made, inputs, strict=True)
        return [torch.zeros_like(tensor) if gradient is None else gradient for gradient, tensor in both]

    # ---- repeated calls --------------------------------------------------------------------------------------------

    def _repeat(
        self,
        key: tuple[object, ...],
        tensors: Tensors,
        how: str,
        function: Callable[[Callable[..., Any], Tensors], Sequence[Any]],
    ) -> Sequence[Any]:
        """Repeat what the first call with this key did on tensors of this signature; or make that first call."""
        launch = launcher(how)
        read = None if is_watched() else signature(tensors)
        if read is None:
            return function(launch, tensors)
        signed, addresses = read
        whole = (*signed, *key)
        runners = context.current.runners
        repeated = runners.recent.get(whole)
        if repeated is None:
            repeated = runners.older.get(whole) or RepeatedCall()
            runners.keep(whole, repeated)
        made: Sequence[Any] = repeated(tensors, addresses, launch, function)
        return made


def launcher(how: str) -> Callable[..., Any]:
    """What runs a plan: interpreted, or compiled."""
    return call.interpreted if how == "interpret" else call.compiled


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
