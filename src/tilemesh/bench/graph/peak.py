"""The bytes that live at the fullest moment of a run, by watching every operator: on any device, without its allocator.

After each operator the storages of tensors that it made are looked at; those that nothing holds any longer are gone.
What an operator allocates and frees within itself is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reference: Any = StorageWeakRef
        self.known = {self.reference(tensor.untyped_storage()).cdata for tensor in inputs}  # type: ignore[no-untyped-call]
        self.live: dict[int, tuple[Any, int]] = {}
        self.peak: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                reference = self.reference(storage)
                if reference.cdata not in self.known and reference.cdata not in self.live:
                    self.live[reference.cdata] = (reference, storage.nbytes())
        self.live = {key: value for key, value in self.live.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return results


def measured_peak(run: Callable[[list[Any]], Any], inputs: Sequence[torch.Tensor]) -> int:
    """Bytes of what a program made, at its fullest moment; its inputs are not counted."""
    with torch.no_grad(), _Watch(inputs) as watch:
        results = run(list(inputs))
    del results
    return int(watch.peak)
