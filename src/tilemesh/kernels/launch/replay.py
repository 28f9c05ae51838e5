"""A call of a kernel module, recorded once and repeated: what it allocates, and what it launches on which tensors.

`forward` and `backward` of an operator are ordinary torch code: they allocate results, take views, plan and launch.
All of it but the addresses is the same at every call of one signature (shapes, strides, dtypes, devices, alignment,
and the arguments that are no tensors). So the first call is watched, and later ones allocate and launch directly. A
product that torch writes to a given tensor is a launch like any other. A call that also computed something else by
torch, or copied a tensor, cannot be repeated like this: it has no recording.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilemesh.kernels.launch import call
from tilemesh.kernels.launch.tensors import PLAIN_TYPES

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)

# As users call them: naming the overload takes torch twice as long.
_PRODUCTS = {_aten.mm.out: torch.mm, _aten._scaled_mm.out: torch._scaled_mm}

Tensors = Sequence[Tensor | None]


def signature(tensors: Tensors) -> tuple[list[object], list[int]] | None:
    """What of tensors decides how a call on them runs, as parts of a key, and their addresses.

    None where one is no plain tensor. One that was left out (None) has the address 0.
    """
    key: list[object] = []
    addresses: list[int] = []
    try:
        for tensor in tensors:
            if type(tensor) in PLAIN_TYPES:
                if tensor.is_neg():  # type: ignore[union-attr]
                    return None
                address = tensor.data_ptr()  # type: ignore[union-attr]
                key += tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address & 15  # type: ignore[union-attr]
                addresses.append(address)
            elif tensor is None:
                key.append(None)
                addresses.append(0)
            else:
                return None
    except RuntimeError:  # a sparse tensor has neither address nor strides
        return None
    return key, addresses


@dataclass(frozen=True)
class SlotView:
    """A part of a slot; the slots of a call are the tensors it was given, then those it allocated."""

    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset_bytes: int
    dtype: torch.dtype
    is_whole: bool
    """Whether the slot has this shape and these strides itself."""

    def of(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is not self.dtype:
            tensor = tensor.view(self.dtype)
        if self.is_whole:
            return tensor
        begin = tensor.storage_offset() + self.offset_bytes // tensor.element_size()
        return tensor.as_strided(self.shape, self.strides, begin)


@dataclass(frozen=True)
class SlotAllocation:
    """A contiguous tensor, and the cheapest way to make it: like a slot, or from one of its dtype, if there is one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    like: int | None
    dtype_of: int | None

    def make(self, slots: Tensors) -> Tensor:
        if self.like is not None:
            return _empty_like(slots[self.like])  # type: ignore[arg-type]
        if self.dtype_of is not None:
            return slots[self.dtype_of].new_empty(self.shape)  # type: ignore[union-attr]
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


_empty_like = torch.empty_like


@dataclass(frozen=True)
class TorchProduct:
    """A product of torch's as a launch on tensors, the last being its `out`; in `arguments` each other is `Tensor`."""

    function: Any
    arguments: tuple[object, ...]

    def launch(self, tensors: Sequence[Tensor]) -> None:
        given = iter(tensors)
        self.function(*[next(given) if value is Tensor else value for value in self.arguments], out=next(given))


class CallRecording:
    """What one call did, to be done again on other tensors of the same signature."""

    def __init__(
        self,
        given: int,
        allocations: Sequence[SlotAllocation],
        launches: Sequence[tuple[Any, Sequence[SlotView]]],
        results: Sequence[int | SlotView | None],
        changed: Sequence[int],
    ) -> None:
        self.allocations, self.launches, self.results = tuple(allocations), tuple(launches), tuple(results)
        self.changed = tuple(changed)  # those of the given tensors that launches write to
        # Addresses of parts that do not begin where their slot begins are listed after those of the slots.
        self.inner: list[tuple[int, int]] = []
        self.steps: list[tuple[Any, Callable[[list[int]], tuple[int, ...]] | None, Sequence[SlotView]]] = []
        for program, views in launches:
            if not isinstance(program, call.Launched):  # by tensors
                self.steps.append((program, None, views))
                continue
            places = []
            for view in views:
                places.append(view.slot)
                if view.offset_bytes:
                    places[-1] = given + len(allocations) + len(self.inner)
                    self.inner.append((view.slot, view.offset_bytes))
            self.steps.append((program, _picker(places), views))
        self.pick: Callable[[list[Any]], tuple[Any, ...]] | None = None
        if all(isinstance(result, int) for result in results):
            self.pick = _picker(list(results))  # type: ignore[arg-type]
        self.like: int | None = None
        """Where one tensor is allocated, like this slot, and is all that one launch leaves: most of what is called."""
        is_single = len(launches) == len(allocations) == 1 and self.results == (given,)
        if is_single and self.steps[0][1] is not None and not (self.inner or self.changed):
            self.like = allocations[0].like

    def __call__(self, tensors: Tensors, addresses: list[int]) -> tuple[Any, ...]:
        """Allocate and launch; `addresses` are those of `tensors`, and are added to."""
        if self.like is not None:
            made = _empty_like(tensors[self.like])  # type: ignore[arg-type]
            addresses.append(made.data_ptr())
            ((program, pick, _),) = self.steps
            program.launch(pick(addresses))  # type: ignore[misc]
            return (made,)
        slots: list[Any] = [*tensors]
        for allocation in self.allocations:
            # Mostly like one that is there: without a call of Python's own.
            made = allocation.make(slots) if allocation.like is None else _empty_like(slots[allocation.like])
            slots.append(made)
            addresses.append(made.data_ptr())
        for slot, offset in self.inner:
            addresses.append(addresses[slot] + offset)
        for program, pick, views in self.steps:
            program.launch([view.of(slots[view.slot]) for view in views] if pick is None else pick(addresses))
        for slot in self.changed:
            _changed(slots[slot])
        return self.pick(slots) if self.pick is not None else tuple([_result(part, slots) for part in self.results])

    def launch_on(self, slots: Sequence[Any]) -> None:
        """The launches alone, on tensors that are there."""
        for program, pick, views in self.steps:
            parts = [view.of(slots[view.slot]) for view in views]
            program.launch(parts if pick is None else [part.data_ptr() for part in parts])


def _picker(places: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A function that takes a list's elements at these places, as a tuple."""
    if len(places) == 1:
        (at,) = places
        return lambda items: (items[at],)
    return operator.itemgetter(*places) if places else lambda items: ()


def _result(part: int | SlotView | None, slots: Sequence[Any]) -> Tensor | None:
    if part is None:
        return None
    made: Tensor = slots[part] if isinstance(part, int) else part.of(slots[part.slot].detach())
    return made


def _changed(tensor: Any) -> None:
    """Kernels write behind autograd's back; tensors of inference mode have no version to tell it by."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


class CallRecorder(TorchDispatchMode):
    """Watches one call: `with recorder:`, on `recorder.tensors` and with `recorder.launch`; then `recording(results)`.

    Where a tensor comes from is known by its identity, followed through views, or by its storage where that belongs to
    one slot alone. The tensors of the call are aliases of those given, so that one given twice is told apart.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports its compiler at the first call, which takes seconds, only to keep it out."""
        return False

    def __init__(self, launch: Callable[..., Any], given: Tensors) -> None:
        super().__init__()
        self.tensors = [None if tensor is None else tensor.detach() for tensor in given]
        self._launch, self._launching = launch, False
        self._slots: list[Tensor | None] = [*self.tensors]
        self._slot_of = {id(tensor): at for at, tensor in enumerate(self._slots) if tensor is not None}
        self._views: list[Tensor] = []  # held, so that no identity is used twice
        self._launches: list[tuple[Any, list[SlotView | None]]] = []
        self._written: set[int] = set()
        self._computes = False

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: dict[str, Any] | None = None
    ) -> Any:
        made = function(*arguments, **(named or {}))
        if self._launching:
            return made
        if function in _ALLOCATIONS and made.is_contiguous() and not (named or {}).get("pin_memory"):
            self._slot_of[id(made)] = len(self._slots)
            self._slots.append(made)
        elif function in _PRODUCTS:
            out = (named or {})["out"]
            given = [value for value in arguments if isinstance(value, Tensor)]
            program = TorchProduct(
                _PRODUCTS[function], tuple(Tensor if isinstance(value, Tensor) else value for value in arguments)
            )
            self._add(program, [*given, out], [out])
        elif function.is_view:
            slot, storage = self._slot_of.get(id(arguments[0])), arguments[0].untyped_storage()._cdata
            for view in made if isinstance(made, (list, tuple)) else (made,):
                self._views.append(view)
                # `contiguous` and `reshape` are listed as views, and copy where they must; in inference mode they come
                # here as they are called, and not as the copy that they make.
                if view.untyped_storage()._cdata != storage:
                    self._computes = True
                elif slot is not None:
                    self._slot_of[id(view)] = slot
        else:
            self._computes = True
        return made

    def launch(self, plan: call.Plan, tensors: Mapping[str, Tensor], written: Sequence[str], **constants: Any) -> None:
        """What the kernel module is given as `launch`."""
        self._launching = True
        try:
            program = self._launch(plan, tensors, written, **constants)
        finally:
            self._launching = False
        self._add(program, list(tensors.values()), [tensors[name] for name in written])

    def _add(self, program: Any, tensors: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        self._launches.append((program, [self._view(tensor) for tensor in tensors]))
        self._written |= {view.slot for tensor in written if (view := self._view(tensor)) is not None}

    def recording(self, results: Tensors) -> CallRecording | None:
        """To be repeated; None where the call did anything else than allocate, take views and launch."""
        parts = [None if result is None else self._part(result) for result in results]
        lost = any(part is None and result is not None for part, result in zip(parts, results, strict=True))
        launches = [
            (program, [view for view in views if view is not None])
            for program, views in self._launches
            if None not in views
        ]
        if self._computes or lost or not launches or len(launches) < len(self._launches):
            return None
        count = len(self.tensors)
        allocations = [self._allocation(at) for at in range(count, len(self._slots))]
        return CallRecording(count, allocations, launches, parts, sorted(at for at in self._written if at < count))

    def _part(self, result: Tensor) -> int | SlotView | None:
        """Where a result is: as a rule all of an allocated tensor, of which the caller may hold another handle."""
        view = self._view(result)
        if view is not None and self._slots[view.slot].dtype is not view.dtype:  # type: ignore[union-attr]
            return None  # node.cpp makes no such views
        return view.slot if view is not None and view.is_whole and view.slot >= len(self.tensors) else view

    def _view(self, tensor: Tensor) -> SlotView | None:
        slot = self._slot_of.get(id(tensor))
        if slot is None:
            storage = tensor.untyped_storage()._cdata
            slots = enumerate(self._slots)
            same = [at for at, base in slots if base is not None and base.untyped_storage()._cdata == storage]
            if len(same) != 1:
                return None
            (slot,) = same
        base = self._slots[slot]
        if base is None or base.device != tensor.device:
            return None
        begin = tensor.data_ptr() - base.data_ptr()
        is_whole = not begin and (tensor.shape, tensor.stride()) == (base.shape, base.stride())
        return SlotView(slot, tuple(tensor.shape), tensor.stride(), begin, tensor.dtype, is_whole)

    def _allocation(self, slot: int) -> SlotAllocation:
        made = self._slots[slot]
        assert made is not None
        like = dtype_of = None
        for at, base in enumerate(self._slots[:slot]):
            if base is None or (base.dtype, base.device) != (made.dtype, made.device):
                continue
            dtype_of = at
            if (base.shape, base.stride()) == (made.shape, made.stride()):
                like = at
        return SlotAllocation(tuple(made.shape), made.dtype, made.device, like, dtype_of)


class RepeatedCall:
    """A kernel module's forward or backward for one signature: recorded at its first call, then repeated."""

    def __init__(self) -> None:
        self.recording: CallRecording | None = None
        self._ordinary = False  # there is nothing to record

    def __call__(
        self,
        tensors: Tensors,
        addresses: list[int],
        launch: Callable[..., Any],
        function: Callable[[Callable[..., Any], Tensors], Sequence[Any]],
    ) -> Sequence[Any]:
        """Results for these tensors. `function` is called with `launch` and the tensors where it is not repeated."""
        if self.recording is not None:
            return self.recording(tensors, addresses)
        if self._ordinary:
            return function(launch, tensors)
        recorder = CallRecorder(launch, tensors)
        with recorder:
            made = function(recorder.launch, recorder.tensors)
        self.recording = recorder.recording(made)
        self._ordinary = self.recording is None
        return made
