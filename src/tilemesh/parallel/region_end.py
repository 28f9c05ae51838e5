"""Whether a region of a user's own module ends with its last exchange: read from autograd's graph, once.

The one idea: what comes after a row layer is computed alike by all ranks of tp, so its gradients are whole; yet in a
region gradients of whole parameters, and of what enters, are summed as parts. Walked from a region's output, gradients
are whole up to an exchange or a layer that is cut and parts from there on: one that is whole where it will be summed,
or a part where an exchange wants it whole, is counted wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves

from tilemesh.core.errors import UsageError
from tilemesh.core.shard import Shard

_EXITS = ("leave", "join", "add")
"""Passages whose gradients have to be whole."""


def require_end_at(name: str, region: nn.Module, model: nn.Module, shards: Mapping[str, Shard]) -> None:
    """Refuse, at the first forward pass with gradients, what follows an exchange inside of a region.

    `name`: the region's in the model, whose parameters are these shards.
    """

    def entered(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if is_compiling():
            return
        entries.clear()
        entries.update(x.grad_fn for x in tree_leaves((args, named)) if isinstance(x, Tensor) and x.grad_fn is not None)

    def left(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled() or is_compiling():
            return
        parameters = {id(value): shards[each] for each, value in model.named_parameters() if each in shards}
        for y in tree_leaves(output):
            problem = _problem(y.grad_fn, entries, parameters) if isinstance(y, Tensor) and y.grad_fn else ""
            if problem:
                raise UsageError(
                    f"{name}, a {type(module).__name__}, is a region and goes on after its layers' last exchange: "
                    f"{problem}; end it with its row layer, and do the rest in the module around it"
                )
        for hook in hooks:
            hook.remove()

    entries: set[Any] = set()
    hooks = [region.register_forward_pre_hook(entered, with_kwargs=True), region.register_forward_hook(left)]


def _problem(output: Any, entries: set[Any], parameters: Mapping[int, Shard]) -> str:
    """What is wrong with a region's graph, in words."""
    problem, has_exit = "", False
    waiting, seen = [(output, True)], set()
    while waiting:
        node, is_whole = waiting.pop()
        if node is None or (node, is_whole) in seen:
            continue
        seen.add((node, is_whole))
        shard = parameters.get(id(getattr(node, "variable", None)))
        if node in entries:
            problem = problem or "its input is added to, or used with, what ranks have summed" * is_whole
            continue
        if shard is not None and is_whole and not shard.cuts and "tp" in shard.partial:
            problem = problem or f"{shard.name} follows it, whose gradient would be counted once per rank"
        passage = getattr(node, "passage", "")
        if passage in _EXITS:
            has_exit = True
            if not is_whole:
                return "a column layer takes what an exchange gave, and its gradient stays one rank's part"
        inputs = [each for each, _ in node.next_functions]
        is_whole = is_whole and passage not in _EXITS and not any(_is_cut(each, parameters) for each in inputs)
        waiting += [(each, is_whole) for each in inputs]
    return problem if has_exit else ""


def _is_cut(node: Any, parameters: Mapping[int, Shard]) -> bool:
    """Whether it gives a parameter that is cut, as it is, turned or cast."""
    while node is not None and len(node.next_functions) == 1 and not hasattr(node, "passage"):
        [(node, _)] = node.next_functions
    shard = parameters.get(id(getattr(node, "variable", None)))
    return shard is not None and bool(shard.cuts)
