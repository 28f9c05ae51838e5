"""Running a region by an operator of `tilemesh.kernels`: what `templates.py` found, called with torch's tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from tilemesh import kernels
from tilemesh.graph.by_torch import run_torch
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.templates import ASIDE, KernelUse

Tensor = torch.Tensor
Laid = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]  # a tensor's shape, strides, dtype and device


def kernel_of(node: Node) -> KernelUse | None:
    """The kernel that a region names."""
    use: KernelUse | None = dict(node.attributes).get("kernel")
    return use


def embedding_gradient(gradient: Tensor, indices: Tensor, rows: int, padding: int, by_count: bool) -> Tensor:
    """A table's gradient: each token's is added to its row, in any order and in a dtype wider than the result's.

    torch's own operator sorts the tokens first and adds those of a row in parts, which takes longer; it is used where
    the order of additions has to be the same in every run. One after the other in float32, the 65,536 pairs of 256
    tokens on the 32 rows of T5's position biases would be off by three times as much as in parts.
    """
    if by_count or torch.are_deterministic_algorithms_enabled():
        sorted_sums: Tensor = torch.ops.aten.embedding_dense_backward(gradient, indices, rows, padding, by_count)
        return sorted_sums
    width, kind = gradient.shape[-1], torch.float32 if gradient.dtype.itemsize == 2 else torch.float64
    sums = torch.zeros(rows, width, dtype=kind, device=gradient.device)
    sums.index_add_(0, indices.reshape(-1), gradient.reshape(-1, width).to(kind))
    if padding >= 0:
        sums[padding] = 0
    return sums.to(gradient.dtype)


class KernelCall:
    """One region, by its kernel. `implementation`: triton on a GPU, interpret or torch on a CPU."""

    def __init__(self, node: Node, implementation: str) -> None:
        use = kernel_of(node)
        assert use is not None
        self.use, self.implementation = use, implementation
        body: Graph = node["body"]
        outputs = [output for output, place in zip(body.outputs, use.results, strict=True) if place == ASIDE]
        self.aside = Graph(body.inputs, tuple(outputs)) if outputs else None
        self.shapes = [output.shape for output in body.outputs]
        self.laid: tuple[Laid, ...] = ()  # how operands lie, from a run on tensors without data
        public = getattr(kernels, use.kernel)  # which also registers the operator with torch
        self.run = self._product if use.kernel == "fused_matmul" else self._rows(public)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        if not self.laid and isinstance(tensors[0], FakeTensor):
            self.laid = tuple((tuple(each.shape), each.stride(), each.dtype, each.device) for each in tensors)
        results = self.run(*(tensors[place] for place in self.use.operands))
        aside = iter(run_torch(self.aside, *tensors) if self.aside else ())
        values = [next(aside) if place == ASIDE else results[place] for place in self.use.results]
        return [value.view(shape) for value, shape in zip(values, self.shapes, strict=True)]

    def made(self) -> None:
        """Has the kernel compiled, by a run on zeros that lie as operands will. What is wrong shows when it is used."""
        with unset_fake_temporarily(), torch.no_grad(), suppress(Exception):
            self(
                *(
                    torch.empty_strided(at, strides, dtype=kind, device=on).zero_()
                    for at, strides, kind, on in self.laid
                )
            )

    def _product(self, a: Tensor, b: Tensor, c: Tensor | None = None) -> Any:
        settings = dict(self.use.settings)
        # The implementations of a product have names of their own; on a GPU it takes the one that was tuned.
        chosen = "auto" if self.implementation == "triton" else self.implementation
        if len(self.shapes) == 1:
            return (kernels.fused_matmul(a, b, c, implementation=chosen, **settings),)
        return torch.ops.tilemesh.fused_matmul.default(a, b, c, settings["activation"], chosen, "", True)

    def _rows(self, public: Callable[..., Any]) -> Callable[..., Any]:
        settings, columns = dict(self.use.settings), self.use.columns
        if "ignore_index" in settings:
            settings["ignore_index"] = int(settings["ignore_index"])
        alone = set(self.use.results) <= {0, ASIDE}

        def run(x: Tensor, *others: Tensor) -> Any:
            given = [x.reshape(-1, columns), *(other.reshape(-1) for other in others)]
            if alone:
                return (public(*given, implementation=self.implementation, **settings),)
            bound = inspect.signature(public).bind(*given, **settings)
            bound.apply_defaults()
            values = [value for name, value in bound.arguments.items() if name != "implementation"]
            return getattr(torch.ops.tilemesh, self.use.kernel)(*values, self.implementation)

        return run
