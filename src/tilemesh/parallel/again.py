"""A layer of whose forward pass the results of some operators are kept, and the rest is computed again in backward.

The one idea: what is dear to compute and small to keep stays. That is the result of attention and of every second
matrix product, from the layer's first one on (torch calls it selective activation checkpointing); norms, activations,
rotations, copies and the other products come back in the backward pass from the layer's input and from these.

torch's own modes for this want every operator to come again in the same order. Exchanges between ranks do not promise
that (a second call finds buffers that the first one made), so the modes here look at nothing but the operators whose
results they keep. Under torch.compile nothing runs but the tracer, which knows only torch's.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tilemesh.core.errors import RunError
from tilemesh.model.transformer import LayerCall, Pass, ResidualStream, added, settled

PRODUCTS = ("aten::mm", "aten::addmm", "aten::_addmm_activation", "tilemesh::fused_matmul")
"""Operators that multiply an activation by a matrix, as autograd calls them."""


def call_again(layer: LayerCall, stream: ResidualStream, now: Pass, *, moves: bool = False) -> ResidualStream:
    """A layer, with its backward pass computing again what is not kept. `moves`: what autograd keeps may go elsewhere
    until then, and what is kept here is to go with it."""
    if not torch.is_grad_enabled():
        return layer(stream, now)
    kept: deque[KeptResult] = deque()

    def whole(x_BTD: Tensor, router_loss: Tensor | None) -> ResidualStream:
        return settled(layer(ResidualStream(x_BTD, None, router_loss), now))

    is_traced = torch.compiler.is_compiling()
    context_fn = traced_contexts if is_traced else partial(contexts, kept)
    # Dropout has no state to keep: a mask is a function of where an element stands.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": context_fn}
    x_BTD, _, loss = checkpoint(whole, added(stream), stream.router_loss, **options)
    if moves and not is_traced:
        x_BTD, loss = PutAside.apply(kept, x_BTD, loss)  # type: ignore[no-untyped-call]
    return ResidualStream(x_BTD, None, loss)


class OperatorChoice:
    """Which operators' results are kept, asked in the order of the calls of one pass."""

    def __init__(self) -> None:
        self.products = 0

    def __call__(self, operator: Any) -> bool:
        name = operator.name()
        if "attention" in name:
            return True
        if name.partition(".")[0] not in PRODUCTS:
            return False
        self.products += 1
        return self.products % 2 == 1


class KeptResult(NamedTuple):
    tensors: Any
    """What the operator returned, apart from the graph."""
    versions: tuple[int, ...]
    """How often each had been written to."""

    @classmethod
    def of(cls, made: Any) -> KeptResult:
        # Below autograd a detached tensor would count its own writes; so it shares the count of the one it is of.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            apart = tree_map_only(Tensor, Tensor.detach, made)
        return cls(apart, _versions(apart))


class KeepingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around the forward pass: keeps."""

    def __init__(self, kept: deque[KeptResult]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.is_kept = kept, OperatorChoice()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        made = operator(*args, **(options or {}))
        if self.is_kept(operator):
            self.kept.append(KeptResult.of(made))
        return made


class AgainMode(KeepingMode):  # type: ignore[no-untyped-call]
    """Around the same pass in backward: gives what was kept in place of computing it."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        if not self.is_kept(operator):
            return operator(*args, **(options or {}))
        if not self.kept:
            raise RunError(
                f"{operator.name()} is computed again and its result is gone: a layer that recomputes by operators "
                "goes backward once; set plan.recompute=full to go backward twice"
            )
        result = self.kept.popleft()
        if _versions(result.tensors) != result.versions:
            raise RunError(f"the kept result of {operator.name()} was written to before the backward pass read it")
        return result.tensors


class PutAside(torch.autograd.Function):
    """Behind a layer, on the way of all that it gave: hands what was kept of it over to autograd, and in backward,
    before the layer's turn, back."""

    @staticmethod
    def forward(ctx: Any, kept: deque[KeptResult], x: Tensor, loss: Tensor | None) -> tuple[Tensor, Tensor | None]:
        values, ctx.form = tree_flatten([result.tensors for result in kept])
        ctx.others = [None if isinstance(value, Tensor) else value for value in values]
        ctx.save_for_backward(*(value for value in values if isinstance(value, Tensor)))
        ctx.kept = kept
        kept.clear()
        return x.view_as(x), None if loss is None else loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = iter(ctx.saved_tensors)
        values = [next(tensors) if other is None else other for other in ctx.others]
        ctx.kept.extend(KeptResult(made, _versions(made)) for made in tree_unflatten(values, ctx.form))
        return None, *gradients


def contexts(kept: deque[KeptResult]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the forward pass, and around the one in backward."""
    return KeepingMode(kept), AgainMode(kept)


def traced_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The same for a compiler, which takes the policy and keeps, on top of it, what it finds cheaper to keep."""
    make: Any = create_selective_checkpoint_contexts
    keeping, again = make(partial(traced_policy, {False: OperatorChoice(), True: OperatorChoice()}))
    return keeping, again


def traced_policy(
    choices: dict[bool, OperatorChoice], context: Any, operator: Any, *args: Any, **options: Any
) -> CheckpointPolicy:
    """Whether an operator's result is kept, in torch's words."""
    is_kept = choices[context.is_recompute](operator)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _versions(tensors: Any) -> tuple[int, ...]:
    several = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
    return tuple(tensor._version for tensor in several if isinstance(tensor, Tensor))
