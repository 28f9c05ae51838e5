"""Calls of a traced module that are written otherwise before torch takes them apart.

LSTMs are one operator per layer and direction, as eager runs them on a CPU: a loop in a library stays a loop. (torch
unrolls an LSTM whose input has a gradient into a dozen operators per time step, and drops its dropout.) Pictures that
are enlarged by a whole factor are repeated along new dims, and their gradient is a sum over these. (torch reads and
adds one by one through tables of indices.)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import interpolate, scaled_dot_product_attention

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
    if not any(_changes_tensors(node) for node in module.graph.nodes):
        _without_empty(module)
        _without_masks(module)
    module.recompile()
    return module


def _changes_tensors(node: fx.Node) -> bool:
    """Whether a call may change a tensor in place, and so what else is a view of it."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    settings = dict(node.kwargs)
    with suppress(TypeError, ValueError):  # what is no function in Python has no signature, and says it by its name
        settings = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    in_place = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_")
    has_target = settings.get("out") is not None or settings.get("inplace") is True
    return node.op.startswith("call") and (in_place or has_target or name in IN_PLACE)


IN_PLACE = ("setitem", *(f"i{name}" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "pow", "matmul")))


def _without_empty(module: fx.GraphModule) -> None:
    """Caches begin as tensors of no elements: what is put behind one is read as it is, and copied where it is
    returned."""
    for node in module.graph.find_nodes(op="call_function", target=torch.cat):
        parts = node.args[0] if node.args and isinstance(node.args[0], list | tuple) else ()
        filled = [part for part in parts if isinstance(part, fx.Node) and _shape(part) not in (None, (0,))]
        if len(filled) == 1 and len(parts) == 2 and any(_shape(part) == (0,) for part in parts):
            node.replace_all_uses_with(filled[0], delete_user_cb=lambda user: user.op != "output")


def _shape(node: Any) -> tuple[int, ...] | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


# What masks are made of, with the same result each time.
MASKS = (
    *("arange", "zeros", "ones", "full", "tensor", "new_ones", "new_zeros", "new_full", "where", "tril", "triu"),
    *("add", "sub", "mul", "neg", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "invert", "bitwise_and"),
    *("bitwise_or", "bitwise_not", "logical_and", "logical_or", "logical_not", "masked_fill", "getitem", "unsqueeze"),
    *("squeeze", "expand", "view", "reshape", "contiguous", "to", "bool", "float"),
)
MOST_NUMBERS = 1 << 26  # of a mask that is looked at


def _without_masks(module: fx.GraphModule) -> None:
    """Masks made of nothing but constants are computed here: where one hides nothing, or all that comes later, the
    attention is told so instead."""
    known: set[fx.Node] = set()
    kinds: dict[Any, str | None] = {}
    for node in module.graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if node.op.startswith("call_") and name in MASKS and known.issuperset(node.all_input_nodes):
            known.add(node)
    for node in module.graph.find_nodes(op="call_function", target=scaled_dot_product_attention):
        settings = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
        settings |= node.kwargs
        mask = settings.get("attn_mask")
        if mask not in known or settings.get("is_causal"):
            continue
        place = mask, _shape(settings["query"]), _shape(settings["key"])
        kind = kinds[place] if place in kinds else kinds.setdefault(place, _kind_of(*place, known))
        if kind is not None:
            node.args, node.kwargs = (), settings | {"attn_mask": None, "is_causal": kind == "causal"}


def _kind_of(
    mask: fx.Node, queries: tuple[int, ...] | None, keys: tuple[int, ...] | None, known: set[fx.Node]
) -> str | None:
    """`open`: it hides nothing; `causal`: all keys behind the query, of as many; None: anything else."""
    if queries is None or keys is None or not all(type(size) is int for size in (*queries, *keys)):
        return None
    size, shape = (queries[-2], keys[-2]), _shape(mask) or ()
    distinct = [length for length, step in zip(shape, mask.meta["example_value"].stride(), strict=True) if step]
    if not all(type(length) is int for length in shape) or len(shape) < 2 or math.prod(distinct) > MOST_NUMBERS:
        return None
    try:
        seen = _value_of(mask, known)
    except RuntimeError:  # of a device that is not here
        return None
    with unset_fake_temporarily():
        for dim, step in enumerate(seen.stride()):
            seen = seen.narrow(dim, 0, 1) if step == 0 else seen
        if seen.dtype.is_floating_point:
            hidden = seen <= torch.finfo(seen.dtype).min
            seen = seen == 0
            if not bool((seen | hidden).all()):
                return None
        if seen.dtype is not torch.bool:
            return None
        if bool(seen.all()):
            return "open"
        later = torch.ones(size, dtype=torch.bool, device=seen.device).tril()
        return "causal" if size[0] == size[1] and bool((seen == later).all()) else None


def _value_of(node: fx.Node, known: set[fx.Node]) -> Any:
    """What a node that is made of known ones is."""
    values: dict[fx.Node, Any] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for each in node.graph.nodes:
            if each in known:
                args, kwargs = fx.node.map_arg((each.args, each.kwargs), values.__getitem__)
                is_method = each.op == "call_method"
                values[each] = (getattr(args[0], each.target) if is_method else each.target)(
                    *args[is_method:], **kwargs
                )
            if each is node:
                break
    return values[node]


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
