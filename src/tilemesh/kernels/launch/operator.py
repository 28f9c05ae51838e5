"""From a torch function and a module of kernels to a public operator: `@operator(kernel="…")` over the reference.

What all operators need is here once: which implementation runs, checks of device and dtype, autograd in both modes,
torch.compile and fake tensors (an operator registered with torch.library), autocast. The reference says what is
computed and for which shapes; it runs on a CPU, under function transforms and wherever derivatives of derivatives are
asked for. The kernel module gives `forward` and, unless the reference's gradient is good enough, `backward`:

    forward(launch, *arguments) -> Tensor, or a tuple: what the reference returns, then what is kept for backward
    backward(launch, gradients, arguments, kept) -> one gradient, or None, for each tensor argument, in order

`launch` runs a plan, compiled or interpreted (call.py). Results of kernels are contiguous.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.kernels.launch import call
from tilemesh.kernels.launch.tensors import (
    FLOATS,
    autocast,
    autocasts,
    check_device,
    check_dtype,
    check_tensors,
    is_plain,
    is_traced,
    is_transformed,
)

IMPLEMENTATIONS = ("auto", "triton", "interpret", "torch")
_HAS_TRITON = importlib.util.find_spec("triton") is not None  # found once: torch.compile does not trace the search

_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", int: "SymInt", float: "float", bool: "bool"}
# What an argument of a type may be; torch.compile traces with the symbolic ones.
_ACCEPTED: dict[type, tuple[type, ...]] = {
    str: (str,),
    bool: (bool, torch.SymBool),
    int: (int, torch.SymInt),
    float: (float, int, torch.SymFloat, torch.SymInt),
}

_library = torch.library.Library("tilemesh", "FRAGMENT")

Reference = Callable[..., Any]


def operator(
    *,
    kernel: str,
    check: Callable[..., None] | None = None,
    kept: Sequence[Callable[..., Tensor]] = (),
    keeps_results: bool = False,
    dtypes: Sequence[torch.dtype] = FLOATS,
    casts: bool = False,
    own_dtype: Sequence[str] = (),
    served: Callable[..., bool] | None = None,
    overwrites: str | None = None,
    told: str | None = None,
) -> Callable[[Reference], Callable[..., Any]]:
    """Make the decorated reference a public operator, with one more argument, `implementation`.

    kernel: the module of the kernels, imported when one of them first runs, or `module:object` for an object with the
    same two functions, where operators share a module. check: called with the arguments, refuses
    what does not fit. kept: for each tensor that `forward` returns beyond the reference's, a function of the arguments
    that makes an empty one. keeps_results: whether `backward` is given the results too, before what is kept; they are
    rounded to their dtype. dtypes: those it takes; all floating point arguments have the same, except those named in
    own_dtype. casts: whether arguments are cast to autocast's dtype. served: whether there is a kernel for these
    arguments; where there is none, the reference computes. overwrites: the name of a bool argument that lets `backward`
    write over a tensor it was given; where calls are recorded (torch.compile) it is False in `backward`. told: the name
    of a bool argument that is filled in at each call: whether a gradient may be asked for.
    """

    def decorate(reference: Reference) -> Callable[..., Any]:
        options = (tuple(kept), keeps_results, tuple(dtypes), casts, frozenset(own_dtype), served, overwrites, told)
        return _Operator(reference, kernel, check, *options).public()

    return decorate


class _Operator:
    def __init__(
        self,
        reference: Reference,
        kernel: str,
        check: Callable[..., None] | None,
        kept: tuple[Callable[..., Tensor], ...],
        keeps_results: bool,
        dtypes: tuple[torch.dtype, ...],
        casts: bool,
        own_dtype: frozenset[str],
        served: Callable[..., bool] | None,
        overwrites: str | None,
        told: str | None,
    ) -> None:
        self.own_dtype, self.served, self.overwrites, self.told = own_dtype, served, overwrites, told
        self.name, self.reference, self.kernel = reference.__name__, reference, kernel
        self.check, self.kept, self.dtypes, self.casts = check, kept, dtypes, casts
        self.keeps_results = keeps_results
        self.parameters = list(inspect.signature(reference).parameters.values())
        hints = typing.get_type_hints(reference)
        self.results = _count_results(self.name, hints.pop("return", None))
        _check_hints(self.name, self.parameters, hints)
        self.names = [parameter.name for parameter in self.parameters]
        self.positional = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in self.parameters)
        self.defaults = {p.name: p.default for p in self.parameters if p.default is not p.empty}
        self.tensors = [at for at, name in enumerate(self.names) if hints[name] in (Tensor, Tensor | None)]
        self.required = {name for name in self.names if hints[name] is Tensor}
        self.others = [(at, name, hints[name]) for at, name in enumerate(self.names) if hints[name] in _ACCEPTED]
        self._register([f"{_SCHEMA_TYPES[hints[name]]} {name}" for name in self.names])
        self.function = _autograd_function(self)

    # ---- the public function -------------------------------------------------------------------------------------

    def public(self) -> Callable[..., Any]:
        @functools.wraps(self.reference)
        def call(*arguments: Any, implementation: str = "auto", **named: Any) -> Any:
            return self(self._bound(arguments, named), implementation)

        extra = inspect.Parameter("implementation", inspect.Parameter.KEYWORD_ONLY, default="auto", annotation=str)
        call.__signature__ = inspect.signature(self.reference).replace(  # type: ignore[attr-defined]
            parameters=[*self.parameters, extra]
        )
        call.reference = self.reference  # type: ignore[attr-defined]
        return call

    def _bound(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        given = {**self.defaults, **dict(zip(self.names, arguments, strict=False)), **named}
        twice = [name for name in self.names[: len(arguments)] if name in named] if named else ()
        if len(arguments) > self.positional or len(given) != len(self.names) or twice:
            raise self._misfit(arguments, named, given, twice)
        return tuple([given[name] for name in self.names])

    def _misfit(
        self, arguments: tuple[Any, ...], named: Mapping[str, Any], given: Mapping[str, Any], twice: Sequence[str]
    ) -> UsageError:
        for name in named:
            if name not in self.names:
                return unknown(f"argument of {self.name}", name, self.names)
        if len(arguments) > self.positional:
            by_name = ", ".join(self.names[self.positional :])
            then = f"; give {by_name} by name" if by_name else ""
            takes = ", ".join(self.names[: self.positional])
            return UsageError(f"{self.name} takes {takes} by position, got {len(arguments)} arguments{then}")
        if twice:
            return UsageError(f"{self.name} was given {', '.join(twice)} twice: by position and by name")
        missing = ", ".join(name for name in self.names if name not in given)
        return UsageError(f"{self.name} takes {', '.join(self.names)}; missing: {missing}")

    def __call__(self, values: tuple[Any, ...], implementation: str) -> Any:
        self._checked(values, implementation)
        tensors = [values[at] for at in self.tensors if values[at] is not None]
        if is_transformed(*tensors):
            return self.compute(values)
        how = self._how(implementation, tensors)
        if how != "torch" and self.served is not None and not self.served(*values):
            how = "torch"
        if how == "torch":
            return self.compute(values)
        if self.casts and autocasts(tensors[0]):
            values = tuple([autocast(value) if isinstance(value, Tensor) else value for value in values])
            tensors = [values[at] for at in self.tensors if values[at] is not None]
        if self.told is not None:
            asked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            values = tuple(
                [asked if name == self.told else value for name, value in zip(self.names, values, strict=True)]
            )
        if is_traced() or not all(is_plain(tensor) for tensor in tensors):
            made = getattr(torch.ops.tilemesh, self.name)(*values, how)
        elif torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            made = self.function.apply(how, *values)
        else:
            made = self.forward(how, values)
        made = made if isinstance(made, tuple) else (made,)
        return made[0] if self.results == 1 else made[: self.results]

    def _checked(self, values: tuple[Any, ...], implementation: str) -> None:
        if implementation not in IMPLEMENTATIONS:
            raise unknown("implementation", str(implementation), IMPLEMENTATIONS)
        given = {self.names[at]: values[at] for at in self.tensors}
        for name in self.required:
            if given[name] is None:
                raise UsageError(f"{name} is None: expected a torch.Tensor")
        check_tensors(given)
        for at, name, kind in self.others:
            value = values[at]
            if not isinstance(value, _ACCEPTED[kind]) or (kind is not bool and isinstance(value, bool)):
                hint = "; .item() makes a number of it" if isinstance(value, Tensor) and kind is not str else ""
                shown = "" if isinstance(value, Tensor) else f"{value!r}, "
                raise UsageError(f"{name} is {shown}a {type(value).__name__}: expected a {kind.__name__}{hint}")
        there = {name: tensor for name, tensor in given.items() if tensor is not None}
        floats = {name: tensor for name, tensor in there.items() if tensor.is_floating_point()} or there
        if not (self.casts and autocasts(next(iter(there.values())))):
            check_dtype({name: tensor for name, tensor in floats.items() if name not in self.own_dtype}, self.dtypes)
        check_device(there)
        if self.check is not None:
            self.check(*values)

    def _how(self, implementation: str, tensors: Sequence[Tensor]) -> str:
        on_gpu = tensors[0].device.type == "cuda"
        if implementation == "triton" and not on_gpu:
            raise UsageError(
                f"implementation 'triton' needs CUDA tensors, got {tensors[0].device}: use 'auto' or 'interpret'"
            )
        if implementation == "auto":
            implementation = "triton" if on_gpu and _HAS_TRITON else "torch"
        return "torch" if any(0 in tensor.shape for tensor in tensors) else implementation

    # ---- what is computed ----------------------------------------------------------------------------------------

    def compute(self, values: Sequence[Any]) -> Any:
        """By the reference."""
        named = dict(zip(self.names[self.positional :], values[self.positional :], strict=True))
        return self.reference(*values[: self.positional], **named)

    def _kernels(self) -> Any:
        module, _, name = self.kernel.partition(":")
        found = importlib.import_module(module)
        return getattr(found, name) if name else found

    def forward(self, how: str, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """Results, then what is kept for the backward pass."""
        kernels = self._kernels()
        made = kernels.forward(call.interpreted if how == "interpret" else call.compiled, *values)
        made = made if isinstance(made, tuple) else (made,)
        if len(made) != self.results + len(self.kept):
            wanted = f"expected {self.results} as the reference returns and {len(self.kept)} declared in kept="
            raise RunError(f"forward of {self.name} returned {len(made)} tensors: {wanted}")
        return made

    def backward(
        self, how: str, gradients: Sequence[Tensor], values: Sequence[Any], kept: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """One gradient for each tensor argument that was given."""
        kernels = self._kernels()
        if not hasattr(kernels, "backward"):
            return self.differentiate(gradients, values, create_graph=False)
        launch = call.interpreted if how == "interpret" else call.compiled
        made = kernels.backward(launch, tuple(gradients), tuple(values), tuple(kept))
        made = (made,) if isinstance(made, Tensor) else made or ()
        if len(made) != len(self.tensors):
            tensors = ", ".join(self.names[at] for at in self.tensors)
            raise RunError(
                f"backward of {self.name} returned {len(made)} gradients for {len(self.tensors)} tensors: {tensors}"
            )
        return [gradient for at, gradient in zip(self.tensors, made, strict=True) if values[at] is not None]

    def differentiate(self, gradients: Sequence[Tensor], values: Sequence[Any], *, create_graph: bool) -> list[Tensor]:
        """The same by the reference: slower, and differentiable again with `create_graph`."""
        with torch.enable_grad():
            if not create_graph:
                values = [_leaf(value) if isinstance(value, Tensor) else value for value in values]
            inputs = [values[at] for at in self.tensors if values[at] is not None]
            results = self.compute(values)
            results = results if isinstance(results, tuple) else (results,)
            wanted = [tensor for tensor in inputs if tensor.requires_grad]
            found = iter(torch.autograd.grad(results, wanted, gradients, create_graph=create_graph, allow_unused=True))
        made = [next(found) if tensor.requires_grad else None for tensor in inputs]
        pairs = zip(made, inputs, strict=True)
        return [torch.zeros_like(tensor) if gradient is None else gradient for gradient, tensor in pairs]

    # ---- autograd, eager and traced ------------------------------------------------------------------------------

    def remember(self, ctx: Any, how: str, values: Sequence[Any], made: Sequence[Tensor]) -> None:
        kept = made if self.keeps_results else made[self.results :]
        ctx.how, ctx.rest = how, [None if at in self.tensors else value for at, value in enumerate(values)]
        ctx.save_for_backward(*(values[at] for at in self.tensors), *kept)

    def recall(self, ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of all arguments, None for those that are no tensors or need none."""
        saved = ctx.saved_tensors
        values, kept = list(ctx.rest), saved[len(self.tensors) :]
        for at, tensor in zip(self.tensors, saved, strict=False):
            values[at] = tensor
        given = [values[at] for at in self.tensors if values[at] is not None]
        filled = self._filled(gradients, values)
        watched = torch.is_grad_enabled() and any(t.requires_grad for t in (*given, *filled))
        made: Sequence[Tensor | None]
        if watched and not is_traced():
            made = self.differentiate(filled, values, create_graph=True)
        elif is_traced() or not all(is_plain(tensor) for tensor in (*filled, *given)):
            made = getattr(torch.ops.tilemesh, f"{self.name}_backward")(*values, list(kept), filled, ctx.how)
        else:
            made = self.backward(ctx.how, filled, values, kept)
        answer: list[Tensor | None] = [None] * len(values)
        found = iter(made)
        for at in self.tensors:
            if values[at] is not None:
                answer[at] = next(found)
        return answer

    def _filled(self, gradients: Sequence[Tensor | None], values: Sequence[Any]) -> list[Tensor]:
        """A result that nothing was computed from has a gradient of zeros."""
        wanted = gradients[: self.results]
        if all(gradient is not None for gradient in wanted):
            return [gradient for gradient in wanted if gradient is not None]
        shapes = self.fake(*values)
        return [torch.zeros_like(one) if g is None else g for g, one in zip(wanted, shapes, strict=False)]

    def fake(self, *values: Any) -> tuple[Tensor, ...]:
        made = self.compute(values)
        made = made if isinstance(made, tuple) else (made,)
        return (*(tensor.new_empty(tensor.shape) for tensor in made), *(make(*values) for make in self.kept))

    def _register(self, parameters: Sequence[str]) -> None:
        given, count = ", ".join(parameters), self.results + len(self.kept)
        made = f"({', '.join(['Tensor'] * count)})" if count > 1 else "Tensor"
        _library.define(f"{self.name}({given}, str how) -> {made}")
        _library.define(f"{self.name}_backward({given}, Tensor[] kept, Tensor[] gradients, str how) -> Tensor[]")

        def one_or_all(tensors: tuple[Tensor, ...]) -> Any:
            return tensors if count > 1 else tensors[0]

        def forward(*values: Any) -> Any:
            return one_or_all(self.forward(values[-1], values[:-1]))

        def backward(*values: Any) -> list[Tensor]:
            *arguments, kept, gradients, how = values
            if self.overwrites is not None:
                arguments[self.names.index(self.overwrites)] = False
            made = self.backward(how, gradients, arguments, kept)
            given = [arguments[at] for at in self.tensors if arguments[at] is not None]
            pairs = zip(made, given, strict=True)
            whole = [torch.zeros_like(tensor) if grad is None else grad.contiguous() for grad, tensor in pairs]
            # What is recorded must not return one tensor twice.
            return [each.clone() if any(each is one for one in whole[:at]) else each for at, each in enumerate(whole)]

        def fake_backward(*values: Any) -> list[Tensor]:
            return [values[at].new_empty(values[at].shape) for at in self.tensors if values[at] is not None]

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            made = output if isinstance(output, tuple) else (output,)
            self.remember(ctx, inputs[-1], inputs[:-1], made)
            ctx.set_materialize_grads(False)

        def differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            if all(gradient is None for gradient in gradients[: self.results]):
                return (None,) * (len(self.names) + 1)
            return (*self.recall(ctx, gradients), None)

        for name, function in ((self.name, forward), (f"{self.name}_backward", backward)):
            _library.impl(name, function, "CPU")
            _library.impl(name, function, "CUDA")
        torch.library.register_fake(f"tilemesh::{self.name}", lambda *v: one_or_all(self.fake(*v[:-1])), lib=_library)
        torch.library.register_fake(f"tilemesh::{self.name}_backward", fake_backward, lib=_library)
        torch.library.register_autograd(f"tilemesh::{self.name}", differentiate, setup_context=setup, lib=_library)


def _count_results(name: str, hint: Any) -> int:
    if hint is Tensor:
        return 1
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is not tuple or any(part is not Tensor for part in parts):
        raise UsageError(f"{name} returns {_words(hint)}: expected -> Tensor, or -> tuple[Tensor, Tensor] and the like")
    return len(parts)


def _check_hints(name: str, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]) -> None:
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UsageError(f"{name} takes {parameter}: expected arguments with names of their own")
        hint = hints.get(parameter.name)
        if hint not in _SCHEMA_TYPES:
            known = "Tensor, Tensor | None, str, int, float or bool"
            raise UsageError(f"{parameter.name} of {name} is annotated with {_words(hint)}: expected {known}")
    if Tensor not in hints.values():
        raise UsageError(f"{name} takes no tensor: expected at least one argument annotated with Tensor")


def _words(hint: Any) -> str:
    return "nothing" if hint is None else getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint)


def _autograd_function(operator: _Operator) -> Any:
    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, how: str, *values: Any) -> Any:
            made = operator.forward(how, values)
            operator.remember(ctx, how, values, made)
            ctx.set_materialize_grads(False)
            return made[0] if operator.results == 1 else made[: operator.results]

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            if all(gradient is None for gradient in gradients):
                return (None,) * (len(operator.names) + 1)
            return (None, *operator.recall(ctx, gradients))

    return Eager


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
