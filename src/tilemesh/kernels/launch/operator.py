"""From a torch function and a module of kernels to a public operator: `@operator(kernel="…")` over the reference.

What all operators need is here once: which implementation runs, checks of device and dtype, autograd in both modes,
torch.compile and fake tensors (an operator registered with torch.library), autocast. The reference says what is
computed and for which shapes; it runs on a CPU, under function transforms and wherever derivatives of derivatives are
asked for. The kernel module gives `forward` and, unless the reference's gradient is good enough, `backward`:

    forward(launch, *arguments) -> Tensor, or a tuple: what the reference returns, then what is kept for backward
    backward(launch, gradients, arguments, kept) -> one gradient, or None, for each tensor argument, in order

`launch` runs a plan, compiled or interpreted (call.py). Results of kernels are contiguous.

A call of a signature that was seen before skips all of this: its checks have passed, its implementation is chosen, and
where the kernel module only allocates and launches, that is repeated without calling it (replay.py). So what the two
functions do may depend on shapes, strides, dtypes, alignment, devices and on the arguments that are no tensors, and on
nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.ranges import LARGEST_WHOLE
from tilemesh.kernels import context
from tilemesh.kernels.launch import call
from tilemesh.kernels.launch.replay import RepeatedCall, Tensors, signature
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
    is_watched,
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
    check_values: Callable[..., None] | None = None,
    kept: Sequence[Callable[..., Tensor]] = (),
    keeps_results: bool = False,
    dtypes: Sequence[torch.dtype] = FLOATS,
    casts: bool = False,
    own_dtype: Sequence[str] = (),
    served: Callable[..., bool] | None = None,
    gains: Callable[..., bool] | None = None,
    overwrites: str | None = None,
    told: str | None = None,
) -> Callable[[Reference], Callable[..., Any]]:
    """Make the decorated reference a public operator, with one more argument, `implementation`.

    kernel: the module of the kernels, imported when one of them first runs, or `module:object` for an object with the
    same two functions, where operators share a module. check: called with the arguments, refuses shapes, dtypes and
    other arguments that do not fit; where they passed once, it is not called again. check_values: the same for the
    values of tensors, called each time they are on a CPU (on a GPU, reading them would wait for it). kept: for each
    tensor that `forward` returns beyond the reference's, a function of the arguments that makes an empty one.
    keeps_results: whether `backward` is given the results too, before what is kept; they are rounded to their dtype.
    dtypes: those it takes; all floating point arguments have the same, except those named in own_dtype. casts: whether
    arguments are cast to autocast's dtype. served: whether there is a kernel for arguments of these shapes; where there
    is none, the reference computes. gains: whether `auto` takes the kernel on a GPU for arguments of these shapes; it
    always does without. overwrites: the name of a bool argument that lets `backward` write over a tensor it was
    given; where calls are recorded (torch.compile) it is False in `backward`. told: the name of a bool argument that is
    filled in at each call: whether a gradient may be asked for.
    """

    def decorate(reference: Reference) -> Callable[..., Any]:
        options = (tuple(kept), keeps_results, tuple(dtypes), casts, frozenset(own_dtype), served, gains)
        return _Operator(reference, kernel, check, check_values, *options, overwrites, told).public()

    return decorate


class _Operator:
    def __init__(
        self,
        reference: Reference,
        kernel: str,
        check: Callable[..., None] | None,
        check_values: Callable[..., None] | None,
        kept: tuple[Callable[..., Tensor], ...],
        keeps_results: bool,
        dtypes: tuple[torch.dtype, ...],
        casts: bool,
        own_dtype: frozenset[str],
        served: Callable[..., bool] | None,
        gains: Callable[..., bool] | None,
        overwrites: str | None,
        told: str | None,
    ) -> None:
        self.own_dtype, self.overwrites, self.told = own_dtype, overwrites, told
        self.served, self.gains = served, gains
        self.name, self.reference, self.kernel = reference.__name__, reference, kernel
        self.check, self.check_values, self.kept, self.dtypes, self.casts = check, check_values, kept, dtypes, casts
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
        self.places = {name: at for at, name in enumerate(self.names)}
        self.filled_in = [self.defaults.get(name) for name in self.names]  # what is not given
        self.least = max((at + 1 for at, name in enumerate(self.names) if name not in self.defaults), default=0)
        self._register([f"{_SCHEMA_TYPES[hints[name]]} {name}" for name in self.names])
        # As torch.autograd.Function.apply without its own questions about transforms, which were answered before.
        self.apply = super(torch.autograd.Function, _autograd_function(self)).apply  # type: ignore[misc]

    # ---- the public function -------------------------------------------------------------------------------------

    def public(self) -> Callable[..., Any]:
        @functools.wraps(self.reference)
        def call(*arguments: Any, implementation: str = "auto", **named: Any) -> Any:
            values = self._bound(arguments, named)
            if is_compiling() or is_watched():
                return self(values, implementation)
            tensors = [values[at] for at in self.tensors]
            key, addresses = self._key(values, tensors, implementation)
            try:
                found = None if key is None else context.current.runners.recent.get(key)
            except TypeError:  # something has no hash, a list for one: say which
                found = None
            if found is None:
                return self(values, implementation)
            return found(values, tensors, addresses)

        extra = inspect.Parameter("implementation", inspect.Parameter.KEYWORD_ONLY, default="auto", annotation=str)
        call.__signature__ = inspect.signature(self.reference).replace(  # type: ignore[attr-defined]
            parameters=[*self.parameters, extra]
        )
        call.reference = self.reference  # type: ignore[attr-defined]
        return call

    def _bound(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        """All values, in order."""
        count = len(arguments)
        if not self.least <= count <= self.positional:
            return self._bound_by_name(arguments, named)
        values = [*arguments, *self.filled_in[count:]]
        for name, value in named.items():
            at = self.places.get(name, -1)
            if at < count:
                return self._bound_by_name(arguments, named)  # refuses it
            values[at] = value
        return values

    def _bound_by_name(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        given = {**self.defaults, **dict(zip(self.names, arguments, strict=False)), **named}
        twice = [name for name in self.names[: len(arguments)] if name in named] if named else ()
        if len(arguments) > self.positional or len(given) != len(self.names) or twice:
            raise self._misfit(arguments, named, given, twice)
        return [given[name] for name in self.names]

    def _key(
        self, values: Sequence[Any], tensors: Tensors, implementation: str, *, cast: bool = False
    ) -> tuple[tuple[object, ...] | None, list[int]]:
        """All that decides how a call runs, and the tensors' addresses; no key for a call that is not to be repeated.

        cast: whether these are values after autocast; a call that has yet to cast has no key.
        """
        found = signature(tensors)
        if found is None or (self.casts and not cast and autocasts(_first(tensors))):
            return None, []
        key, addresses = found
        asked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors if tensor is not None)
        key += (self, implementation, asked, cast)
        for at, _, _ in self.others:
            value = values[at]
            key += (value, type(value))  # 1, 1.0 and True are equal, but not accepted alike
        return tuple(key), addresses

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

    def __call__(self, values: Sequence[Any], implementation: str) -> Any:
        """A call whose signature is new, or one that torch watches."""
        self._checked(values, implementation)
        tensors = [values[at] for at in self.tensors]
        given = [tensor for tensor in tensors if tensor is not None]
        if is_transformed(*given):
            return self.compute(values)
        how = self._how(implementation, given)
        conditions = (self.served, self.gains if implementation == "auto" else None)
        if how != "torch" and not all(holds is None or holds(*values) for holds in conditions):
            how = "torch"
        cast = how != "torch" and self.casts and autocasts(given[0])
        if cast:
            values = [autocast(value) if isinstance(value, Tensor) else value for value in values]
            tensors = [values[at] for at in self.tensors]
            given = [tensor for tensor in tensors if tensor is not None]
        traced = is_traced() or not all(is_plain(tensor) for tensor in given)
        asked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        if traced and how != "torch":
            values = self._telling(values, asked)
            made = getattr(torch.ops.tilemesh, self.name)(*values, how)
            made = made if isinstance(made, tuple) else (made,)
            return made[0] if self.results == 1 else made[: self.results]
        prepared = _PreparedCall(self, how, asked, values)
        key, addresses = (None, []) if traced else self._key(values, tensors, implementation, cast=cast)
        if key is None:
            return self.compute(values) if how == "torch" else prepared(values, tensors, [])
        runners = context.current.runners
        prepared = runners.recent.get(key) or runners.older.get(key) or prepared
        made = prepared(values, tensors, addresses)
        runners.keep(key, prepared)
        return made

    def _telling(self, values: Sequence[Any], asked: bool) -> Sequence[Any]:
        """Values with the argument filled in that says whether a gradient may be asked for."""
        if self.told is None:
            return values
        at = self.places[self.told]
        return [*values[:at], asked, *values[at + 1 :]]

    def _checked(self, values: Sequence[Any], implementation: str) -> None:
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
            if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
                raise UsageError(f"{name} is a whole number of {value.bit_length()} bits: expected one below 2**63")
        there = {name: tensor for name, tensor in given.items() if tensor is not None}
        floats = {name: tensor for name, tensor in there.items() if tensor.is_floating_point()} or there
        if not (self.casts and autocasts(next(iter(there.values())))):
            check_dtype({name: tensor for name, tensor in floats.items() if name not in self.own_dtype}, self.dtypes)
        check_device(there)
        if self.check is not None:
            self.check(*values)
        if self.check_values is not None and next(iter(there.values())).device.type == "cpu":
            self.check_values(*values)

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

    def forward(self, how: str, values: Sequence[Any]) -> Sequence[Tensor]:
        """Results, then what is kept for the backward pass: where torch.compile's graphs call it."""
        tensors = [values[at] for at in self.tensors]
        return self.repeat(
            (self, how, "forward", *self._options(values)),
            tensors,
            how,
            lambda launch, tensors: self._forward(launch, self._with(values, tensors)),
        )

    def _forward(self, launch: Callable[..., Any], values: Sequence[Any]) -> tuple[Tensor, ...]:
        made = self._kernels().forward(launch, *values)
        made = made if isinstance(made, tuple) else (made,)
        if len(made) != self.results + len(self.kept):
            wanted = f"expected {self.results} as the reference returns and {len(self.kept)} declared in kept="
            raise RunError(f"forward of {self.name} returned {len(made)} tensors: {wanted}")
        return made

    def backward(
        self, how: str, gradients: Sequence[Tensor], values: Sequence[Any], kept: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """One gradient, or None, for each tensor argument."""
        if not hasattr(self._kernels(), "backward"):
            found = iter(self.differentiate(gradients, values, create_graph=False))
            return [None if values[at] is None else next(found) for at in self.tensors]
        results, count = self.results, self.results + len(self.tensors)

        def run(launch: Callable[..., Any], tensors: Tensors) -> Sequence[Tensor | None]:
            given = self._with(values, tensors[results:count])
            return self._backward(launch, tensors[:results], given, tensors[count:])

        tensors = (*gradients, *(values[at] for at in self.tensors), *kept)
        return self.repeat(self.backward_key(how, values), tensors, how, run)

    def backward_key(self, how: str, values: Sequence[Any]) -> tuple[object, ...]:
        return (self, how, "backward", *self._options(values))

    def _backward(
        self, launch: Callable[..., Any], gradients: Tensors, values: Sequence[Any], kept: Tensors
    ) -> Sequence[Tensor | None]:
        made = self._kernels().backward(launch, tuple(gradients), tuple(values), tuple(kept))
        made = (made,) if isinstance(made, Tensor) else made or ()
        if len(made) != len(self.tensors):
            tensors = ", ".join(self.names[at] for at in self.tensors)
            raise RunError(
                f"backward of {self.name} returned {len(made)} gradients for {len(self.tensors)} tensors: {tensors}"
            )
        return [None if values[at] is None else gradient for at, gradient in zip(self.tensors, made, strict=True)]

    def repeat(
        self,
        key: tuple[object, ...],
        tensors: Tensors,
        how: str,
        function: Callable[[Callable[..., Any], Tensors], Sequence[Any]],
    ) -> Sequence[Any]:
        """Repeat what the first call with this key did on tensors of this signature; or make that first call."""
        launch = call.interpreted if how == "interpret" else call.compiled
        found = None if is_watched() else signature(tensors)
        if found is None:
            return function(launch, tensors)
        signed, addresses = found
        whole = (*signed, *key)
        runners = context.current.runners
        repeated = runners.recent.get(whole)
        if repeated is None:
            repeated = runners.older.get(whole) or RepeatedCall()
            runners.keep(whole, repeated)
        made: Sequence[Any] = repeated(tensors, addresses, launch, function)
        return made

    def _options(self, values: Sequence[Any]) -> list[object]:
        """The arguments that are no tensors, as parts of a key."""
        return [part for at, _, _ in self.others for part in (values[at], type(values[at]))]

    def _with(self, values: Sequence[Any], tensors: Tensors) -> list[Any]:
        """These values with other tensors."""
        made = list(values)
        for at, tensor in zip(self.tensors, tensors, strict=True):
            made[at] = tensor
        return made

    def differentiate(self, gradients: Sequence[Tensor], values: Sequence[Any], *, create_graph: bool) -> list[Tensor]:
        """The same by the reference: slower, and differentiable again with `create_graph`."""
        # Of torch's attention kernels, only those made of plain operators can be differentiated again.
        again = sdpa_kernel(SDPBackend.MATH) if create_graph else contextlib.nullcontext()
        with torch.enable_grad(), again:
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
        ctx.how, ctx.rest = how, self._with(values, [None] * len(self.tensors))
        ctx.save_for_backward(*(values[at] for at in self.tensors), *kept)

    def recall(
        self, how: str, rest: Sequence[Any], saved: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """One gradient, or None, for each tensor argument."""
        values, kept = self._with(rest, saved[: len(self.tensors)]), saved[len(self.tensors) :]
        given = [values[at] for at in self.tensors if values[at] is not None]
        filled = self._filled(gradients, values)
        watched = torch.is_grad_enabled() and any(t.requires_grad for t in (*given, *filled))
        if not watched and not is_traced() and all(is_plain(tensor) for tensor in (*filled, *given)):
            return self.backward(how, filled, values, kept)
        if watched and not is_traced():
            made = self.differentiate(filled, values, create_graph=True)
        else:
            made = getattr(torch.ops.tilemesh, f"{self.name}_backward")(*values, list(kept), filled, how)
        found = iter(made)
        return [None if values[at] is None else next(found) for at in self.tensors]

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
            return one_or_all(tuple(self.forward(values[-1], values[:-1])))

        def backward(*values: Any) -> list[Tensor]:
            *arguments, kept, gradients, how = values
            if self.overwrites is not None:
                arguments[self.names.index(self.overwrites)] = False
            made = self.backward(how, gradients, arguments, kept)
            pairs = [(grad, arguments[at]) for grad, at in zip(made, self.tensors, strict=True)]
            pairs = [(grad, tensor) for grad, tensor in pairs if tensor is not None]
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
            answer: list[Tensor | None] = [None] * (len(self.names) + 1)
            found = self.recall(ctx.how, ctx.rest, ctx.saved_tensors, gradients)
            for at, gradient in zip(self.tensors, found, strict=True):
                answer[at] = gradient
            return tuple(answer)

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


class _PreparedCall:
    """All that calls of one signature share: their checks have passed, and what runs is chosen."""

    def __init__(self, operator: _Operator, how: str, asked: bool, values: Sequence[Any]) -> None:
        self.operator, self.how, self.asked = operator, how, asked
        self.rest = operator._with(values, [None] * len(operator.tensors))
        self.backward_key = operator.backward_key(how, operator._telling(self.rest, asked))
        self.forward = RepeatedCall()
        self.shapes: list[tuple[torch.Size, torch.dtype, torch.device]] = []  # of the results
        on_cpu = any(values[at] is not None and values[at].device.type == "cpu" for at in operator.tensors)
        self.check_values = operator.check_values if on_cpu else None

    def __call__(self, values: Sequence[Any], tensors: Tensors, addresses: list[int]) -> Any:
        if self.check_values is not None:
            self.check_values(*values)
        operator = self.operator
        if self.how == "torch":
            return operator.compute(values)
        if self.asked:
            return operator.apply(self, values, addresses, *tensors)
        made = self.run(values, tensors, addresses)
        return made[0] if operator.results == 1 else made[: operator.results]

    def run(self, values: Sequence[Any], tensors: Tensors, addresses: list[int]) -> Sequence[Tensor]:
        """Results, then what is kept for the backward pass."""
        recording = self.forward.recording
        if recording is not None:
            return recording(tensors, addresses)
        operator = self.operator
        values = operator._telling(values, self.asked)
        launch = call.interpreted if self.how == "interpret" else call.compiled

        def forward(launch: Callable[..., Any], tensors: Tensors) -> Sequence[Tensor]:
            return operator._forward(launch, operator._with(values, tensors))

        made = self.forward(tensors, addresses, launch, forward)
        self.shapes = [(result.shape, result.dtype, result.device) for result in made[: operator.results]]
        return made

    def gradients(self, saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """One gradient, or None, for each tensor argument."""
        if not torch.is_grad_enabled() and not is_watched():
            given = [
                torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
                for gradient, (shape, dtype, device) in zip(gradients, self.shapes, strict=True)
            ]
            tensors = (*given, *saved)
            found = signature(tensors)
            if found is not None:
                key, addresses = found
                repeated = context.current.runners.recent.get((*key, *self.backward_key))
                if repeated is not None and repeated.recording is not None:
                    return repeated.recording(tensors, addresses)
            gradients = given
        operator = self.operator
        return operator.recall(self.how, operator._telling(self.rest, self.asked), saved, gradients)


def _autograd_function(operator: _Operator) -> Any:
    results, keeps_results, none = operator.results, operator.keeps_results, (None,) * len(operator.tensors)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, prepared: _PreparedCall, values: Sequence[Any], addresses: list[int], *tensors: Any
        ) -> Any:
            made = prepared.run(values, tensors, addresses)
            ctx.prepared = prepared
            ctx.save_for_backward(*tensors, *(made if keeps_results else made[results:]))
            ctx.set_materialize_grads(False)
            return made[0] if results == 1 else tuple(made[:results])

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            if all(gradient is None for gradient in gradients):
                return (None, None, None, *none)
            return (None, None, None, *ctx.prepared.gradients(ctx.saved_tensors, gradients))

    return Eager


def _first(tensors: Tensors) -> Tensor:
    return next(tensor for tensor in tensors if tensor is not None)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
