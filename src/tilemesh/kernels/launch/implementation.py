"""Which implementation runs: what was asked for, or what suits where the tensors are."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from torch import Tensor

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels import context

IMPLEMENTATIONS = ("auto", "triton", "interpret", "torch")
_HAS_TRITON = importlib.util.find_spec("triton") is not None  # found once: torch.compile does not trace the search


def check_implementation(implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise unknown("implementation", str(implementation), IMPLEMENTATIONS)


def implementation_of(implementation: str, tensors: Sequence[Tensor]) -> str:
    """One of triton, interpret and torch: on a CPU `auto` is torch, unless the context says otherwise. All tensors are
    on one device."""
    check_implementation(implementation)
    # torch.compile of torch 2.11 cannot trace bool() of a list: each operator would end a graph.
    on_gpu = len(tensors) > 0 and tensors[0].device.type == "cuda"
    if implementation == "triton" and not on_gpu:
        where = f", got {tensors[0].device}" if tensors else ""
        raise UsageError(f"implementation 'triton' needs CUDA tensors{where}: use 'auto' or 'interpret'")
    if implementation == "auto":
        if on_gpu:
            return "triton" if _HAS_TRITON else "torch"
        return context.current.on_cpu
    return implementation
