"""What a function would launch, found without launching: on tensors that have a shape and a device, and no memory.

Plans are functions of how tensors lie in memory, so all that a function's kernels are compiled from is known before
there are weights. What torch computes in between is computed on the meta device: shapes alone. torch's own fake tensors
would do as well; to import them takes as long as to compile a few kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tilemesh.kernels import context
from tilemesh.kernels.launch.call import Place, Plan
from tilemesh.kernels.launch.steps import LaunchPlan
from tilemesh.kernels.launch.tensors import dtype_name


def rehearse(function: Callable[[], object], device: torch.device) -> list[tuple[LaunchPlan, Mapping[str, Place]]]:
    """The plans that `function` would launch, and where their tensors would lie; each once.

    All that it makes on that device has no memory. What it is given lies elsewhere: nothing there is changed.
    """
    plans: dict[tuple[object, ...], tuple[LaunchPlan, Mapping[str, Place]]] = {}

    def note(plan: Plan, tensors: Mapping[str, Tensor], **constants: Any) -> None:
        places = {name: _place_of(tensor) for name, tensor in tensors.items()}
        key = (plan, *places.items(), *constants.items())
        if key not in plans:
            plans[key] = plan(places, **constants), places

    before = context.rehearsal.set(note)
    try:
        with _Shapes(device):
            function()
    finally:
        context.rehearsal.reset(before)
    return list(plans.values())


def _place_of(tensor: Tensor) -> Place:
    aligned = tensor.storage_offset() * tensor.element_size() % 16 == 0
    return Place(tuple(tensor.shape), tensor.stride(), dtype_name(tensor.dtype), aligned)


class _Shape(Tensor):
    """A tensor without memory that says it is on a device; `meta` is the same on the meta device."""

    meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> _Shape:
        made: _Shape = Tensor._make_wrapper_subclass(
            cls, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=device
        )
        made.meta = meta
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        raise NotImplementedError(f"{function} outside of a rehearsal")


class _Shapes(TorchDispatchMode):
    """Gives `_Shape`s of a device in place of its tensors; what is on others is computed as ever."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in `CallRecorder`."""
        return False

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        given_shapes = any(issubclass(each, _Shape) for each in types)
        place = next((each for each in (*arguments, *named.values()) if isinstance(each, torch.device)), None)
        is_elsewhere = place is not None and place.type != self.device.type
        if given_shapes and is_elsewhere:
            raise NotImplementedError(f"{function} moves what has no values to {place}")
        if is_elsewhere or (place is None and not given_shapes):
            return function(*arguments, **named)
        given = tree_map(_without_device, (tuple(arguments), named))
        made = function(*given[0], **given[1])
        if function._schema.is_mutable and arguments and isinstance(arguments[0], _Shape):
            return arguments[0]
        return tree_map(lambda each: _Shape(each, self.device) if isinstance(each, Tensor) else each, made)


def _without_device(value: Any) -> Any:
    if isinstance(value, _Shape):
        return value.meta
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, Tensor) else value
