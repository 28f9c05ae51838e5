"""How many pages: what a token's keys and values take, and how much memory there is for them."""

from __future__ import annotations

import os

import torch

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import Range
from tilemesh.core.units import format_bytes
from tilemesh.kernels.paged_attention.codes import code_bytes
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.decoding import key_value_bytes

_CPU_SHARE = 0.3
"""Of a CPU's free memory, unless asked for more: other programs run there too."""
_GPU_SHARE = 0.9


def choose_pages(
    config: ModelConfig,
    dtype: torch.dtype,
    page_tokens: int,
    useful_tokens: int,
    share: float | None,
    device: torch.device,
    draft: ModelConfig | None = None,
    kv_cache: str = "",
) -> int:
    """As many as fit into a share of what is free, and on a CPU no more than `useful_tokens` could ever fill.

    A draft model's keys and values lie in pages of its own beside them. `kv_cache`: as in `ServeLimits`.
    """
    Range(1, 2**40).check("page_tokens", page_tokens, whole=True)
    on_gpu = device.type == "cuda"
    if share is not None:
        Range(0, 1, above=True).check("memory", share)
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else free_cpu_bytes()
    models = [model for model in (config, draft) if model is not None]
    numbers = [key_value_bytes(model, 1) * code_bytes(dtype.itemsize, model.head_width, kv_cache) for model in models]
    each = int(sum(numbers) * page_tokens)
    fitting = int(free * (share if share is not None else _GPU_SHARE if on_gpu else _CPU_SHARE)) // each
    if fitting < 1:
        raise UsageError(
            f"a page of {page_tokens} tokens takes {format_bytes(each)} and {format_bytes(free)} are free: "
            "expected room for one at least; give memory a larger share, or page_tokens fewer"
        )
    return fitting if on_gpu else min(fitting, -(-useful_tokens // page_tokens))


def free_cpu_bytes() -> int:
    """What can be had without swapping; where the system does not say, what it has in all."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
