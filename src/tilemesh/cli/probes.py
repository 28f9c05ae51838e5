"""Small trials, each run in a process of its own: `python -m tilemesh.cli.probes torch|triton|graph`.

A broken driver may crash rather than raise: a separate process turns that into an answer. Prints one line of what
was done.
"""

from __future__ import annotations

import sys

import numpy as np
import torch


def try_graph() -> str:
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    torch.add(x, 1, out=y)  # warm: a first call may allocate, which a capture forbids
    with torch.cuda.graph(graph):
        torch.add(x, 1, out=y)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(y, x + 1):
        raise RuntimeError("the replayed graph's result is wrong")
    return "captured and replayed on new input"


def try_triton() -> str:
    """A kernel of ours, compiled for the GPU, or run by the interpreter."""
    from tilemesh.kernels.softmax.reference import softmax

    has_gpu = torch.cuda.is_available()
    x = torch.randn(3, 1000, device="cuda" if has_gpu else "cpu")
    if not torch.allclose(softmax(x, implementation="triton" if has_gpu else "interpret"), torch.softmax(x, dim=-1)):
        raise RuntimeError("the kernel's result is wrong")
    return f"compiled for {torch.cuda.get_device_name()}" if has_gpu else "run by the interpreter on the CPU"


def try_torch() -> str:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Through numpy, which everything that measures or moves buffers needs as well.
    a = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 64))).to(device)
    if not torch.allclose(a @ torch.linalg.inv(a), torch.eye(64, device=device, dtype=torch.float64), atol=1e-6):
        raise RuntimeError("a matrix times its inverse is not one")
    return f"computes on the {'GPU' if device == 'cuda' else 'CPU'}"


if __name__ == "__main__":
    print({"graph": try_graph, "torch": try_torch, "triton": try_triton}[sys.argv[1]]())
