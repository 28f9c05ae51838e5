"""The global norm of many tensors, as clipping needs it: one launch per combination of dtypes, and one that adds up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels import context
from tilemesh.kernels.adamw.op import register, traced_norm
from tilemesh.kernels.adamw.table import NORM_BLOCK, BlockTable, check_lists, is_aligned
from tilemesh.kernels.launch import call
from tilemesh.kernels.launch.implementation import implementation_of
from tilemesh.kernels.launch.tensors import is_plain, is_traced


@torch.no_grad()
def global_norm(tensors: Sequence[Tensor], *, implementation: str = "auto") -> Tensor:
    """The root of the sum of all elements' squares, as a scalar on their device: at least float32, in a fixed order."""
    if not tensors:
        raise UsageError("global_norm of no tensors: expected at least one")
    check_lists({"tensors": tensors})
    if is_traced() or not all(map(is_plain, tensors)):
        return traced_norm(tensors, implementation)
    kind = torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32
    tensors = [tensor.detach().contiguous() for tensor in tensors if tensor.numel()] or [tensors[0].new_zeros(1)]
    how = implementation_of(implementation, tensors)
    if how == "torch":
        return torch.stack([tensor.to(kind).square().sum() for tensor in tensors]).sum().sqrt()
    from tilemesh.kernels.adamw import kernel

    launch = call.interpreted if how == "interpret" else call.compiled
    tables = _norm_tables(tensors, NORM_BLOCK)
    device = tensors[0].device
    partial = torch.empty(sum(table.blocks for *_, table in tables), dtype=kind, device=device)
    begin = 0
    for members, dtype, aligned, table in tables:
        of_group = partial[begin : begin + table.blocks]
        begin += table.blocks
        rows, like = table.rows([[tensors[at] for at in members]]), torch.empty(1, dtype=dtype, device=device)
        read = {"table": rows, "owners": table.owners, "partial": of_group, "like": like}
        launch(kernel.squares_plan, read, written=("partial",), aligned=aligned)
    norm = torch.empty(1, dtype=kind, device=device)
    launch(kernel.norm_plan, {"partial": partial, "norm": norm}, written=("norm",))
    return norm[0]


def _norm_of_a_graph(tensors: Sequence[Tensor], implementation: str) -> Tensor:
    # A copy: a result that is a part of another tensor would be a view in the operator's schema.
    return global_norm(tensors, implementation=implementation).clone()


def _norm_without_memory(tensors: Sequence[Tensor], implementation: str) -> Tensor:
    wide = any(tensor.dtype is torch.float64 for tensor in tensors)
    return tensors[0].new_empty((), dtype=torch.float64 if wide else torch.float32)


register("global_norm", _norm_of_a_graph, _norm_without_memory)


def _norm_tables(tensors: Sequence[Tensor], block: int) -> list[tuple[list[int], torch.dtype, bool, BlockTable]]:
    kinds = tuple([(tensor.dtype, is_aligned(tensor), tensor.numel()) for tensor in tensors])
    key, runners = ("global_norm", tensors[0].device, *kinds), context.current.runners
    tables: list[tuple[list[int], torch.dtype, bool, BlockTable]] | None
    tables = runners.recent.get(key) or runners.older.get(key)
    if tables is None:
        tables = []
        for dtype, aligned in dict.fromkeys(kind[:2] for kind in kinds):
            members = [at for at, kind in enumerate(kinds) if kind[:2] == (dtype, aligned)]
            sizes = [tensors[at].numel() for at in members]
            table = BlockTable(sizes, block, tensors[0].device, [0.0] * len(members))
            tables.append((members, dtype, aligned, table))
        runners.keep(key, tables)
    return tables
