"""Fill Triton's cache with what torch.compile will try for some shapes: timing it is mostly compiling otherwise.

    TRITON_CACHE_DIR=shared TORCHINDUCTOR_CACHE_DIR=other python benchmarks/warm_matmul.py MxNxK …

Run several at once with an inductor cache of their own: what they find fastest while they disturb each other must not
be believed; the run that times starts with an empty inductor cache and the same Triton cache, and tunes again in quiet.
"""

from __future__ import annotations

import sys

import torch

from tilemesh.kernels.matmul import reference
from tilemesh.kernels.matmul.cost import FORM


def eager(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return reference.fused_matmul(a, b, c, "relu")


def main() -> None:
    for shape in sys.argv[1:]:
        m, n, k = FORM.parse_sizes(shape)
        for dtype in (torch.float16, torch.bfloat16):
            a, b, c = (torch.randn(size, device="cuda", dtype=dtype) for size in ((m, k), (k, n), (m, n)))
            torch._dynamo.reset()
            torch.compile(eager, dynamic=False)(a, b, c)
            torch.compile(eager, mode="max-autotune-no-cudagraphs", dynamic=False)(a, b, c)


if __name__ == "__main__":
    main()
