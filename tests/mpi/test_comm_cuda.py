"""CUDA tensors: natively over nccl (one rank a GPU), staged through pinned host memory where ranks share a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilemesh.launch.job import launch

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SCRIPT = str(Path(__file__).parent / "comm_cuda_script.py")


@pytest.mark.parametrize(("how", "more"), [("nccl", 0), ("staged", 1)])
def test_tensors_on_a_gpu(how: str, more: int) -> None:
    ranks = torch.cuda.device_count() + more
    lines: list[str] = []
    outcome = launch(
        [SCRIPT, how], ranks=ranks, transport="torch", sink=lambda _, __, line: lines.append(line.decode())
    )
    assert outcome.failure is None, "\n".join(lines)
    assert [line for line in lines if line == f"72 cases right over {how}"] == [f"72 cases right over {how}"] * ranks
