"""A trial of Triton: a masked kernel, compiled for the GPU, or run by the interpreter when TRITON_INTERPRET=1 is set.

Run as a process of its own (`python -m tilemesh.cli.probe_triton`), because the interpreter is chosen when Triton is
imported. Prints one line of what was done.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def double_plus_one(x_ptr, y_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(y_ptr + index, tl.load(x_ptr + index, mask=inside) * 2 + 1, mask=inside)


def try_triton() -> str:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    x = torch.randn(1000, device="cpu" if interpreted else "cuda")  # not a multiple of the block: the mask counts
    y = torch.full_like(x, torch.nan)
    double_plus_one[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    if not torch.equal(y, x * 2 + 1):
        raise RuntimeError("the kernel's result is wrong")
    return "run by the interpreter on the CPU" if interpreted else f"compiled for {torch.cuda.get_device_name()}"


if __name__ == "__main__":
    print(try_triton())
