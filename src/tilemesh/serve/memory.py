"""How many pages: what a token's keys and values take, and how much memory there is for them. And memory given back."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields

import torch
from torch import Tensor, UntypedStorage

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import Range
from tilemesh.core.units import format_bytes
from tilemesh.kernels.paged_attention.codes import code_bytes
from tilemesh.measure.machine import memory_bytes
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.decoding import key_value_bytes
from tilemesh.serve.config import EngineConfig
from tilemesh.serve.scheduler import ServeLimits

_CPU_SHARE = 0.3
"""Of a CPU's free memory, unless asked for more: other programs run there too."""
_GPU_SHARE = 0.9


def choose_limits(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    longest: int,
    device: torch.device,
    draft: ModelConfig | None,
) -> ServeLimits:
    """The limits that were asked for, with as many pages as fit where nobody says how many."""
    pages, chunk = config.pages, config.step_tokens if config.chunk_tokens is None else config.chunk_tokens
    # A draft looks as far back as it likes, and steps that are launched ahead have one table of pages.
    slides = 0 < model.window < longest and draft is None
    ahead = device.type == "cuda" if config.launch_ahead is None else config.launch_ahead
    mixed = slides and bool(model.full_layers) and not ahead and not config.swap_pages
    local = 0
    if mixed:  # a window of each, where it begins within a page, and the page after; beside them a step's prompts
        each = -(-model.window // config.page_tokens) + 2
        local = config.running * each + -(-config.step_tokens // config.page_tokens)
    if pages is None:
        useful = longest * config.running
        if device.type == "cuda":
            useful *= 1 + config.prefix_room
        pages = choose_pages(
            model, dtype, config.page_tokens, useful, config.memory, device, draft, config.kv_cache, local,
            config.shared_by,
        )  # fmt: skip
    same = {field.name: getattr(config, field.name) for field in fields(ServeLimits) if hasattr(config, field.name)}
    local = local if local < pages else 0
    window = model.window if slides and (local or not model.full_layers) else 0
    own = {"pages": pages, "context": longest, "chunk_tokens": chunk, "window": window, "local_pages": local}
    return ServeLimits(**same | own)


def choose_pages(
    config: ModelConfig,
    dtype: torch.dtype,
    page_tokens: int,
    useful_tokens: int,
    share: float | None,
    device: torch.device,
    draft: ModelConfig | None = None,
    kv_cache: str = "",
    local_pages: int = 0,
    shared_by: int = 1,
) -> int:
    """As many as fit into a share of what is free, and no more than `useful_tokens` could ever fill.

    A draft model's keys and values lie in pages of its own beside them. `kv_cache`: as in `ServeLimits`. `local_pages`:
    so many are enough for layers with a window, which have pages of their own; 0: they have none. `shared_by`: engines
    of this machine that have such a share together.
    """
    Range(1, 2**40).check("page_tokens", page_tokens, whole=True)
    on_gpu = device.type == "cuda"
    if share is not None:
        Range(0, 1, above=True).check("memory", share)
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else free_cpu_bytes()
    models = [model for model in (config, draft) if model is not None]
    numbers = [key_value_bytes(model, 1) * code_bytes(dtype.itemsize, model.head_width, kv_cache) for model in models]
    each = int(sum(numbers) * page_tokens)
    room = int(free * (share if share is not None else _GPU_SHARE if on_gpu else _CPU_SHARE)) // shared_by
    fitting = room // each
    if 0 < local_pages < fitting:
        full = each * len({*config.full_layers}) // config.layers
        fitting = (room - local_pages * (each - full)) // full
    if fitting < 1:
        raise UsageError(
            f"a page of {page_tokens} tokens takes {format_bytes(each)} and {format_bytes(free)} are free: "
            "expected room for one at least; give memory a larger share, or page_tokens fewer"
        )
    return min(fitting, -(-useful_tokens // page_tokens))


def free_cpu_bytes() -> int:
    """What can be had without swapping, within what a container may have; where the system does not say, all of it."""
    may_have = memory_bytes()
    try:
        with open("/proc/self/statm") as own, open("/proc/meminfo") as lines:
            may_have -= int(own.read().split()[1]) * mmap.PAGESIZE
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return max(0, min(may_have, int(line.split()[1]) * 1024))
    except OSError:
        pass
    return may_have


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, which on a CPU take no memory before something is written there: torch's own are all written first."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    taken = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(taken, dtype=dtype).view(*shape)


class GivenBack:
    """Memory of tensors that was given back, to be taken again under the same tensors.

    On a GPU their storages have none meanwhile and lie elsewhere later, so captured steps that read them are void. On a
    CPU they stay where they are and the system takes their pages, which then read as zeros: what torch frees, its
    allocator may keep (on arm64 it does).
    """

    def __init__(self, tensors: Iterable[Tensor], keep: bool = False) -> None:
        """`keep`: what is on a GPU moves to the host."""
        storages = {storage._cdata: storage for tensor in tensors for storage in (tensor.untyped_storage(),)}
        self._pieces = [(storage, storage.nbytes(), _give_back(storage, keep)) for storage in storages.values()]

    def take(self, values: bool = True) -> None:
        """With what was kept, or zeros."""
        for storage, size, kept in self._pieces:
            if storage.device.type == "cuda":
                storage.resize_(size)
                if kept is not None and values:
                    storage.copy_(kept)
                else:
                    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


def _give_back(storage: UntypedStorage, keep: bool) -> UntypedStorage | None:
    if storage.device.type == "cuda":
        kept = storage.cpu() if keep else None  # type: ignore[no-untyped-call]
        storage.resize_(0)
        return kept
    page = mmap.PAGESIZE
    begin, end = -(-storage.data_ptr() // page) * page, (storage.data_ptr() + storage.nbytes()) // page * page
    if sys.platform == "linux" and begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
    return None
