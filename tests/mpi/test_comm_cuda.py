"""CUDA tensors: natively over nccl (one rank a GPU), staged through pinned host memory where ranks share a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilemesh.launch import call
from tilemesh.launch.job import launch

torch = pytest.importorskip("torch")
HERE = Path(__file__).parent


def lines_of(command: list[str], ranks: int) -> list[str]:
    lines: list[str] = []
    outcome = launch(command, ranks=ranks, transport="torch", sink=lambda _, __, line: lines.append(line.decode()))
    assert outcome.failure is None, "\n".join(lines)
    return lines


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("how", "more"), [("nccl", 0), ("staged", 1)])
def test_tensors_on_a_gpu(how: str, more: int) -> None:
    ranks = torch.cuda.device_count() + more
    lines = lines_of([str(HERE / "comm_cuda_script.py"), how], ranks)
    assert [line for line in lines if line == f"72 cases right over {how}"] == [f"72 cases right over {how}"] * ranks


def test_the_path_of_gpu_tensors_on_cpu_tensors() -> None:
    """Its logic, where there is no GPU: every call goes through it, and gives what the ordinary path gives."""
    assert call("comm_device:cases_right", 3, transport="torch") == [87] * 3
