"""From a torch function and a module of kernels to a public operator: `@operator(kernel="…")` over the reference.

What all operators need is here once: which implementation runs, checks of device and dtype, autograd in both modes,
torch.compile and fake tensors (an operator registered with torch.library), autocast. The reference says what is
computed and for which shapes; it runs on a CPU, under function transforms and wherever derivatives of derivatives are
asked for. The kernel module gives `forward` and, unless the reference's gradient is good enough, `backward`:

    forward(launch, *arguments) -> Tensor, or a tuple: what the reference returns, then what is kept for backward
    backward(launch, gradients, arguments, kept) -> one gradient, or None, for each tensor argument, in order
    forward_alone(launch, *arguments) -> what the reference returns; optional, where no gradient can be asked for

`launch` runs a plan, compiled or interpreted (call.py). Results of kernels are contiguous.

A call of a signature that was seen before skips all of this: its checks have passed, its implementation is chosen, and
where the kernel module only allocates and launches, that is repeated without calling it (replay.py). So what the two
functions do may depend on shapes, strides, dtypes, alignment, devices and on the arguments that are no tensors, and on
nothing else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilemesh.core import debug
from tilemesh.kernels import context
from tilemesh.kernels.launch import native
from tilemesh.kernels.launch.computation import Computation, OperatorOptions, Reference, Restore, launcher
from tilemesh.kernels.launch.implementation import check_implementation, implementation_of
from tilemesh.kernels.launch.native import NATIVE
from tilemesh.kernels.launch.registration import register
from tilemesh.kernels.launch.replay import CallRecording, RepeatedCall, Tensors, signature
from tilemesh.kernels.launch.tensors import (
    FLOATS,
    autocast,
    autocasts,
    check_device,
    check_dtype,
    is_plain,
    is_traced,
    is_transformed,
    is_watched,
)


def operator(
    *,
    kernel: str,
    check: Callable[..., None] | None = None,
    check_values: Callable[..., None] | None = None,
    kept: Sequence[Callable[..., Tensor]] = (),
    keeps_results: bool | Sequence[int] = False,
    dtypes: Sequence[torch.dtype] = FLOATS,
    casts: bool = False,
    own_dtype: Sequence[str] = (),
    served: Callable[..., bool] | None = None,
    gains: Callable[..., bool] | None = None,
    overwrites: str | None = None,
    told: str | None = None,
    forgets: Sequence[str] = (),
    restored: Restore | None = None,
    partial: bool = False,
) -> Callable[[Reference], Callable[..., Any]]:
    """Make the decorated reference a public operator, with one more argument, `implementation`.

    kernel: the module of the kernels, imported when one of them first runs, or `module:object` for an object with the
    same two functions, where operators share a module. check: called with the arguments, refuses shapes, dtypes and
    other arguments that do not fit; where they passed once, it is not called again. check_values: the same for the
    values of tensors, called each time they are on a CPU (on a GPU, reading them would wait for it). kept: for each
    tensor that `forward` returns beyond the reference's, a function of the arguments that makes an empty one.
    keeps_results: whether `backward` is given the results too, before what is kept, or which of them; they are rounded
    to their dtype. dtypes: those it takes; all floating point arguments have the same, except those named in own_dtype.
    casts: whether arguments are cast to autocast's dtype, except those named in own_dtype; without, autocast changes
    nothing. served: whether there is a kernel for arguments of these shapes, where these need gradients; where there is
    none, the reference computes. gains: whether `auto` takes the kernel on a GPU for arguments of these shapes; it
    always does without. overwrites: the name of a bool argument that lets `backward` write over a tensor it was given;
    where calls are recorded (torch.compile) it is False in `backward`. told: the name of a bool argument that is filled
    in at each call: whether a gradient may be asked for.

    forgets: names of tensors that `backward` does not read: it is given an empty one of the same dtype, so that their
    memory is free after the forward pass. restored: then needed for where the reference differentiates; a function of
    the arguments and of what is kept that puts tensors in their place from which the reference computes the same.
    partial: whether `backward` takes None as the gradient of a result that nothing was computed from; else zeros.
    """

    def decorate(reference: Reference) -> Callable[..., Any]:
        which = keeps_results if isinstance(keeps_results, bool) else tuple(keeps_results)
        options = OperatorOptions(
            kernel, check, check_values, tuple(kept), which, tuple(dtypes), casts, frozenset(own_dtype), served,
            gains, overwrites, told, tuple(forgets), restored, partial,
        )  # fmt: skip
        return _Operator(Computation(reference, options)).public()

    return decorate


class _Operator:
    """Which implementation a call takes, and what calls of one signature share."""

    def __init__(self, computation: Computation) -> None:
        self.computation, self.binding, self.options = computation, computation.binding, computation.options
        self.tensors, self.other_places = self.binding.tensors, [at for at, _, _ in self.binding.others]
        # How many arguments are tensors, where these come first: slices of the values are quicker than picking.
        self.leading = len(self.tensors) if self.tensors == [*range(len(self.tensors))] else 0
        register(computation)
        # As torch.autograd.Function.apply without its own questions about transforms, which were answered before.
        self.apply = super(torch.autograd.Function, _autograd_function(computation)).apply  # type: ignore[misc]

    def public(self) -> Callable[..., Any]:
        reference, bind, leading = self.computation.reference, self.binding.bind, self.leading

        @functools.wraps(reference)
        def call(*arguments: Any, implementation: str = "auto", **named: Any) -> Any:
            values = bind(arguments, named)
            if is_compiling() or is_watched():
                return self(values, implementation)
            tensors = values[:leading] if leading else [values[at] for at in self.tensors]
            key, addresses = self._key(values, tensors, implementation)
            try:
                runner = None if key is None else context.current.runners.recent.get(key)
            except TypeError:  # something has no hash, a list for one: say which
                runner = None
            if runner is None:
                return self(values, implementation)
            if runner.repeats:  # at once: a tiny call is all host time
                return runner.pick(runner.forward.recording(tensors, addresses))
            if runner.native is not None:
                return NATIVE.functions.call(runner.native, *tensors)
            return runner(values, tensors, addresses)

        extra = inspect.Parameter("implementation", inspect.Parameter.KEYWORD_ONLY, default="auto", annotation=str)
        call.__signature__ = inspect.signature(reference).replace(  # type: ignore[attr-defined]
            parameters=[*self.binding.parameters, extra]
        )
        call.reference = reference  # type: ignore[attr-defined]
        return call

    def _key(
        self, values: Sequence[Any], tensors: Tensors, implementation: str, *, cast: bool = False
    ) -> tuple[tuple[object, ...] | None, list[int]]:
        """All that decides how a call runs, and the tensors' addresses; no key for a call that is not to be repeated.

        cast: whether these are values after autocast; a call that has yet to cast has no key.
        """
        signed = signature(tensors)
        if signed is None or (self.options.casts and not cast and _casts_now(tensors)):
            return None, []
        key, addresses = signed
        needing: tuple[int, ...] = ()  # a gradient: which of them, and not whether one, since `served` may ask that
        if torch.is_grad_enabled():
            needing = tuple([at for at, tensor in enumerate(tensors) if tensor is not None and tensor.requires_grad])
        others = values[self.leading :] if self.leading else [values[at] for at in self.other_places]
        key += self, implementation, needing, cast, *others
        key += map(type, others)  # 1, 1.0 and True are equal, but not accepted alike
        return tuple(key), addresses

    def __call__(self, values: Sequence[Any], implementation: str) -> Any:
        """A call whose signature is new, or one that torch watches."""
        computation, options = self.computation, self.options
        self._checked(values, implementation)
        cast = options.casts and _casts_now([values[at] for at in self.tensors])
        if cast:
            values = [
                autocast(value) if isinstance(value, Tensor) and name not in options.own_dtype else value
                for name, value in zip(self.binding.names, values, strict=True)
            ]
        tensors = [values[at] for at in self.tensors]
        given = [tensor for tensor in tensors if tensor is not None]
        if is_transformed(*given):
            return computation.compute(values)
        how = self._how(implementation, given)
        conditions = (options.served, options.gains if implementation == "auto" else None)
        if how != "torch" and not all(holds is None or holds(*values) for holds in conditions):
            how = "torch"
        if how != "torch" and not torch.compiler.is_compiling() and context.rehearsal.get() is not None:
            values = computation.telling(values, False)
            made = computation.run_forward_alone(launcher(how), values)
            return made[0] if computation.results == 1 else made[: computation.results]
        traced = is_traced() or not all(is_plain(tensor) for tensor in given)
        asked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
        if traced and how != "torch":
            values = computation.telling(values, asked)
            made = getattr(torch.ops.tilemesh, computation.name)(*values, how)
            made = made if isinstance(made, tuple) else (made,)
            return made[0] if computation.results == 1 else made[: computation.results]
        prepared = _PreparedCall(self, how, asked, values)
        key, addresses = (None, []) if traced else self._key(values, tensors, implementation, cast=cast)
        if key is None:
            return computation.compute(values) if how == "torch" else prepared(values, tensors, [])
        runners = context.current.runners
        prepared = runners.recent.get(key) or runners.older.get(key) or prepared
        made = prepared(values, tensors, addresses)
        runners.keep(key, prepared)
        return made

    def _checked(self, values: Sequence[Any], implementation: str) -> None:
        check_implementation(implementation)
        options, names = self.options, self.binding.names
        self.binding.check_kinds(values)
        there = {names[at]: values[at] for at in self.tensors if values[at] is not None}
        floats = {name: tensor for name, tensor in there.items() if tensor.is_floating_point()} or there
        if not (options.casts and autocasts(next(iter(there.values())))):
            alike = {name: tensor for name, tensor in floats.items() if name not in options.own_dtype}
            if alike:  # else `check` says what those with dtypes of their own may be
                check_dtype(alike, options.dtypes)
        check_device(there)
        if options.check is not None:
            options.check(*values)
        if options.check_values is not None and looks_at_values(there.values()):
            options.check_values(*values)

    def _how(self, implementation: str, tensors: Sequence[Tensor]) -> str:
        how = implementation_of(implementation, tensors)
        return "torch" if any(0 in tensor.shape for tensor in tensors) else how


def looks_at_values(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a call reads targets and tokens before it uses them: on a CPU, elsewhere where that is asked for.

    On a GPU it waits at each call, and while a graph is captured it cannot.
    """
    kinds = {tensor.device.type for tensor in tensors if tensor is not None}
    return "cpu" in kinds or (debug.asks_for("values") and not torch.cuda.is_current_stream_capturing())


class _PreparedCall:
    """All that calls of one signature share: their checks have passed, and what runs is chosen."""

    def __init__(self, operator: _Operator, how: str, asked: bool, values: Sequence[Any]) -> None:
        computation, tensors = operator.computation, operator.tensors
        self.computation, self.apply, self.how, self.asked = computation, operator.apply, how, asked
        self.results = computation.results
        self.rest = operator.binding.with_tensors(values, [None] * len(tensors))
        self.gradients = _Gradients(computation, how, computation.telling(self.rest, asked))
        self.forward = RepeatedCall()
        self.stand_ins = computation.stand_ins([values[at] for at in tensors]) if asked else {}
        on_cpu = any(values[at] is not None and values[at].device.type == "cpu" for at in tensors)
        self.check_values = operator.options.check_values if on_cpu or debug.asks_for("values") else None
        self.repeats = False
        """Whether a call is its recording and nothing else."""
        self.native: Any = None
        """The same with a gradient: what node.cpp is given, once that is there."""
        self.pick = itemgetter(0) if self.results == 1 else itemgetter(slice(self.results))

    def __call__(self, values: Sequence[Any], tensors: Tensors, addresses: list[int]) -> Any:
        if self.check_values is not None and looks_at_values(tensors):
            self.check_values(*values)
        if self.how == "torch":
            return self.computation.compute(values)
        if self.asked:
            made = self.apply(self, values, addresses, *tensors)
            if addresses and self.check_values is None and self.native is None:
                self._go_native(tensors)
            return made
        made = self.run(values, tensors, addresses)
        self.repeats = self.forward.recording is not None and self.check_values is None
        return self.pick(made)

    def _go_native(self, tensors: Tensors) -> None:
        recording = self.forward.recording
        # Interpreted launches take seconds: nobody compiles for them, but what is there is used.
        functions = NATIVE.functions if self.how == "interpret" else NATIVE.ask()
        if functions is None or recording is None or recording.changed:
            return
        computation = self.computation
        stand_ins = [self.stand_ins.get(at) for at in range(len(tensors))]
        kept = [*computation.results_kept, *range(self.results, len(recording.results))]
        name = f"{computation.name}Backward"
        self.native = native.call_of(name, self.gradients.add, self.results, stand_ins, kept, recording, tensors)

    def run(self, values: Sequence[Any], tensors: Tensors, addresses: list[int]) -> Sequence[Tensor]:
        """Results, then what is kept for the backward pass."""
        recording = self.forward.recording
        if recording is not None:
            return recording(tensors, addresses)
        computation = self.computation
        values = computation.telling(values, self.asked)
        run = computation.run_forward if self.asked else computation.run_forward_alone

        def forward(launch: Callable[..., Any], tensors: Tensors) -> Sequence[Tensor]:
            return run(launch, computation.binding.with_tensors(values, tensors))

        made = self.forward(tensors, addresses, launcher(self.how), forward)
        self.gradients.shapes = [(result.shape, result.dtype, result.device) for result in made[: self.results]]
        return made


class _Gradients:
    """The backward pass of calls of one signature."""

    def __init__(self, computation: Computation, how: str, rest: Sequence[Any]) -> None:
        self.computation, self.how, self.rest = computation, how, rest
        self.key = computation.backward_key(how, rest)
        self.shapes: list[tuple[torch.Size, torch.dtype, torch.device]] = []  # of the results
        self.added = 0

    def __call__(self, saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """One gradient, or None, for each tensor argument."""
        computation = self.computation
        if not torch.is_grad_enabled() and not is_watched():
            if len(self.shapes) > 1 and not computation.options.partial:  # of one there is a gradient, or no call
                gradients = [
                    torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
                    for gradient, (shape, dtype, device) in zip(gradients, self.shapes, strict=True)
                ]
            tensors = (*gradients, *saved)
            repeated, addresses = self._repeated(tensors)
            if repeated is not None:
                return repeated(tensors, addresses)
        return computation.recall(self.how, self.rest, saved, gradients)

    def add(self, call: Any, slots: Sequence[Any], results: int) -> Sequence[Tensor | None]:
        """The same for node.cpp, which then repeats it by itself where gradients lie in memory as these do."""
        made = self(slots[results:], slots[:results])
        if not torch.is_grad_enabled() and not is_watched() and self.added < native.MOST_BACKWARD:
            recording, _ = self._repeated(slots)
            if recording is not None:
                self.added += 1
                NATIVE.functions.add_backward(call, tuple(slots), native.program_of(recording, slots))
        return made

    def _repeated(self, tensors: Tensors) -> tuple[CallRecording | None, list[int]]:
        signed = signature(tensors)
        if signed is None:
            return None, []
        key, addresses = signed
        repeated = context.current.runners.recent.get((*key, *self.key))
        return (None if repeated is None else repeated.recording), addresses


def _autograd_function(computation: Computation) -> Any:
    results, kept_of, none = computation.results, computation.kept_of, (None,) * len(computation.tensors)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, prepared: _PreparedCall, values: Sequence[Any], addresses: list[int], *tensors: Any
        ) -> Any:
            made = prepared.run(values, tensors, addresses)
            ctx.prepared = prepared
            if prepared.stand_ins:
                tensors = tuple([prepared.stand_ins.get(at, tensor) for at, tensor in enumerate(tensors)])
            ctx.save_for_backward(*tensors, *kept_of(made))
            ctx.set_materialize_grads(False)
            return made[0] if results == 1 else tuple(made[:results])

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            if gradients[0] is None and all(gradient is None for gradient in gradients):
                return (None, None, None, *none)
            return (None, None, None, *ctx.prepared.gradients(ctx.saved_tensors, gradients))

    return Eager


def _casts_now(tensors: Tensors) -> bool:
    """Whether autocast is on for these; where no tensor is given at all, the checks that follow say so."""
    for tensor in tensors:
        if tensor is not None:
            return autocasts(tensor)
    return False
