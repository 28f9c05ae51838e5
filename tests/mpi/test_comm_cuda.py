"""CUDA tensors: natively over nccl (one rank a GPU), staged through pinned host memory where ranks share a GPU."""

from __future__ import annotations

import pytest
from started import ranks_of

from tilemesh.launch import call

torch = pytest.importorskip("torch")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("how", "more"), [("nccl", 0), ("staged", 1)])
def test_tensors_on_a_gpu(how: str, more: int) -> None:
    ranks = torch.cuda.device_count() + more
    assert call("comm_cuda:cases_right", ranks, how, transport="torch") == [72] * ranks


def test_the_path_of_gpu_tensors_on_cpu_tensors() -> None:
    """Its logic, where there is no GPU: every call goes through it, and gives what the ordinary path gives."""
    assert ranks_of("torch", 3).call("comm_device:cases_right") == [87] * 3
