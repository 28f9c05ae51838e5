"""An operator as torch knows it: `torch.ops.tilemesh.NAME` and `NAME_backward`, with fake tensors and autograd.

torch.compile and everything else that records operators calls these; a plain call does not (operator.py).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch._library.utils import get_layout_constraint_tag

from tilemesh.kernels.launch.computation import Computation

_library = torch.library.Library("tilemesh", "FRAGMENT")
_INDUCTOR_PRINTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


def register(computation: Computation) -> None:
    """Define the operator and its backward pass, for CPU and CUDA."""
    name, binding = computation.name, computation.binding
    given, count = ", ".join(binding.schema), computation.results + len(computation.options.kept)
    made = f"({', '.join(['Tensor'] * count)})" if count > 1 else "Tensor"
    _library.define(f"{name}({given}, str how) -> {made}")
    _library.define(f"{name}_backward({given}, Tensor[] kept, Tensor?[] gradients, str how) -> Tensor[]")

    def one_or_all(tensors: tuple[Tensor, ...]) -> Any:
        return tensors if count > 1 else tensors[0]

    def forward(*values: Any) -> Any:
        return one_or_all(tuple(computation.forward(values[-1], values[:-1])))

    def backward(*values: Any) -> list[Tensor]:
        *arguments, kept, gradients, how = values
        return _recorded_backward(computation, how, arguments, kept, gradients)

    def fake(*values: Any) -> Any:
        _announce(name)
        return one_or_all(computation.fake(*values[:-1]))

    def fake_backward(*values: Any) -> list[Tensor]:
        _announce(f"{name}_backward")
        *arguments, kept, _, _ = values
        arguments = computation.restored(arguments, kept)
        return [arguments[at].new_empty(arguments[at].shape) for at in binding.tensors if arguments[at] is not None]

    for suffix, function in (("", forward), ("_backward", backward)):
        _library.impl(f"{name}{suffix}", function, "CPU")
        _library.impl(f"{name}{suffix}", function, "CUDA")
    whole = f"tilemesh::{name}"
    torch.library.register_fake(whole, fake, lib=_library)
    torch.library.register_fake(f"{whole}_backward", fake_backward, lib=_library)
    _register_autograd(computation, whole)


def _announce(name: str) -> None:
    """Tell Inductor that it calls this operator as it is, with the layouts it would have decided on.

    Before torch 2.13 it finds that out for itself, and writes a line for its log with the arguments as text: everything
    that they were computed from, again for each path that leads there. After the norms of gpt2-124m's 12 layers that
    line did not end within minutes. It is called while a graph is traced, when Inductor is loaded but has yet to begin.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering") if _INDUCTOR_PRINTS else None
    if lowering is None:
        return
    operator = getattr(torch.ops.tilemesh, name).default
    if operator not in lowering.lowerings:
        tag = get_layout_constraint_tag(operator, with_default=True)
        lowering.make_fallback(operator, layout_constraint=lowering.tag_to_layout_constraint(tag))


def _recorded_backward(
    computation: Computation, how: str, arguments: list[Any], kept: list[Tensor], gradients: list[Tensor | None]
) -> list[Tensor]:
    """Gradients of all tensors that were given, each in memory of its own."""
    binding, overwrites = computation.binding, computation.options.overwrites
    if overwrites is not None:
        arguments[binding.names.index(overwrites)] = False
    made = computation.backward(how, gradients, arguments, kept)
    pairs = [(grad, at) for grad, at in zip(made, binding.tensors, strict=True) if arguments[at] is not None]
    whole = [grad.contiguous() for grad, _ in pairs if grad is not None]
    if len(whole) < len(pairs):  # rare, and restoring may launch something
        like = computation.restored(arguments, kept)
        whole = [torch.zeros_like(like[at]) if grad is None else grad.contiguous() for grad, at in pairs]
    # What is recorded must not return one tensor twice.
    return [each.clone() if any(each is earlier for earlier in whole[:at]) else each for at, each in enumerate(whole)]


def _register_autograd(computation: Computation, name: str) -> None:
    binding = computation.binding

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        made = output if isinstance(output, tuple) else (output,)
        tensors = [inputs[at] for at in binding.tensors]
        stand_ins = computation.stand_ins(tensors)
        ctx.how, ctx.rest = inputs[-1], binding.with_tensors(inputs[:-1], [None] * len(tensors))
        saved = [stand_ins.get(at, tensor) for at, tensor in enumerate(tensors)]
        ctx.save_for_backward(*saved, *computation.kept_of(made))
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        answer: list[Tensor | None] = [None] * (len(binding.names) + 1)
        if all(gradient is None for gradient in gradients[: computation.results]):
            return tuple(answer)
        gradients_made = computation.recall(ctx.how, ctx.rest, ctx.saved_tensors, gradients)
        for at, gradient in zip(binding.tensors, gradients_made, strict=True):
            answer[at] = gradient
        return tuple(answer)

    torch.library.register_autograd(name, differentiate, setup_context=setup, lib=_library)
