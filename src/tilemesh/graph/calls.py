"""Calls of a traced module that are written otherwise before torch takes them apart.

LSTMs are one operator per layer and direction, as eager runs them on a CPU: a loop in a library stays a loop. (torch
unrolls an LSTM whose input has a gradient into a dozen operators per time step, and drops its dropout.) Pictures that
are enlarged by a whole factor are repeated along new dims, and their gradient is a sum over these. (torch reads and
adds one by one through tables of indices.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import interpolate

LSTM = 2  # the number of this kind of cell in oneDNN's enumeration


def with_better_calls(module: fx.GraphModule) -> fx.GraphModule:
    """The module with each LSTM that the library serves as calls of its layers, and enlarged pictures repeated."""
    if torch._C._get_mkldnn_enabled():
        for node in module.graph.find_nodes(op="call_function", target=torch.lstm):
            if _served(node):
                node.target = lstm
    for node in module.graph.find_nodes(op="call_function", target=interpolate):
        factors = _whole_factors(node)
        if factors:
            node.target, node.args, node.kwargs = enlarged, (node.all_input_nodes[0], factors), {}
    module.recompile()
    return module


def _whole_factors(node: fx.Node) -> tuple[int, ...]:
    """By what each dim of a picture grows, where its pixels are repeated: 1, 2, 4 or 8, whose reciprocals torch rounds
    nowhere. Results lie as eager's where rows lie in order."""
    names = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
    settings: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    x = settings.pop("input", None)
    scale: Any = settings.pop("scale_factor", None)
    picture = x.meta.get("example_value") if isinstance(x, fx.Node) else None
    if settings.pop("mode", "nearest") != "nearest" or any(settings.values()) or not isinstance(picture, Tensor):
        return ()
    factors = tuple(scale) if isinstance(scale, Sequence) else (scale,) * (picture.dim() - 2)
    served = all(type(each) in (int, float) and each in (1, 2, 4, 8) for each in factors)
    if not served or len(factors) != picture.dim() - 2 or not picture.is_contiguous() or picture.numel() == 0:
        return ()
    return tuple(int(each) for each in factors)


def enlarged(x: Tensor, factors: Sequence[int]) -> Tensor:
    """Each pixel repeated along every dim of a picture."""
    sizes = x.shape[2:]
    thin = [each for size in sizes for each in (size, 1)]
    wide = [each for pair in zip(sizes, factors, strict=True) for each in pair]
    large = [size * factor for size, factor in zip(sizes, factors, strict=True)]
    return x.reshape(*x.shape[:2], *thin).expand(*x.shape[:2], *wide).reshape(*x.shape[:2], *large)


def _served(node: fx.Node) -> bool:
    """Equal lengths (not packed ones), 32-bit numbers on the host, no projections."""
    if len(node.args) != 9 or not isinstance(node.args[1], Sequence) or isinstance(node.args[2], Tensor):
        return False
    tensors = [each.meta.get("example_value") for each in node.all_input_nodes]
    if not all(isinstance(each, Tensor) and each.dtype == torch.float32 and each.is_cpu for each in tensors):
        return False
    hidden = [each.meta["example_value"].shape[-1] for each in node.args[1] if isinstance(each, fx.Node)]
    per_layer = 4 if node.args[3] else 2
    return len(set(hidden)) == 1 and len(node.args[2]) % per_layer == 0  # type: ignore[arg-type]


def layer_with_workspace(*arguments: Any) -> Any:
    """One layer, with what its backward pass reads: that the library is to train, it takes from the mode of gradients,
    which is off where a program runs."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.mkldnn_rnn_layer.default(*arguments)


def lstm(
    x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], biases: bool, layers: int, dropout: float,
    train: bool, both_ways: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`torch.lstm`: what each time step leaves, and the last states of every layer and direction."""
    ways, per = 2 if both_ways else 1, 4 if biases else 2
    kept = torch.is_grad_enabled() and any(each.requires_grad for each in (x, *states, *weights))
    x = x.transpose(0, 1) if batch_first else x
    ends: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        results = []
        for way in range(ways):
            place = layer * ways + way
            own = list(weights[place * per : place * per + per])
            own += [own[0].new_zeros(own[0].shape[0])] * (4 - per)
            first = [state[place].unsqueeze(0).contiguous() for state in states]
            y, h, c, _ = torch.ops.aten.mkldnn_rnn_layer(
                x.contiguous(), *own, *first, way == 1, [], LSTM, states[0].shape[-1], 1, biases, False, False, kept
            )
            results.append(y)
            ends.append((h[0], c[0]))
        x = torch.cat(results, -1) if both_ways else results[0]
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    h, c = (torch.stack(each) for each in zip(*ends, strict=True))
    return (x.transpose(0, 1) if batch_first else x), h, c
