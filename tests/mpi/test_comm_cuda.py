"""CUDA tensors: natively over nccl (one rank a GPU), staged through pinned host memory where ranks share a GPU."""

from __future__ import annotations

import pytest
from started import ranks_of

from tilemesh.launch import call

torch = pytest.importorskip("torch")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("transport", ["torch", "mpi"])
@pytest.mark.parametrize(("how", "more"), [("nccl", 0), ("staged", 1)])
def test_tensors_on_a_gpu(how: str, more: int, transport: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Staging is said once, by the first rank."""
    ranks = torch.cuda.device_count() + more
    if transport == "mpi":
        pytest.importorskip("mpi4py")
    if transport == "mpi" and ranks < 2:
        pytest.skip("a single rank has nobody to move anything to")
    assert call("comm_cuda:cases_right", ranks, how, transport, transport=transport) == [72] * ranks
    assert capfd.readouterr().err.count("go through the host's memory: ranks 0 and") == more


def test_the_path_of_gpu_tensors_on_cpu_tensors() -> None:
    """Its logic, where there is no GPU: every call goes through it, and gives what the ordinary path gives."""
    assert ranks_of("torch", 3).call("comm_device:cases_right") == [87] * 3


@pytest.mark.parametrize(
    ("transport", "starter", "ranks"),
    [
        ("mpi", "mpiexec", 2),
        pytest.param("mpi", "mpiexec", 4, marks=pytest.mark.slow),
        pytest.param("torch", "torchrun", 5, marks=pytest.mark.slow),  # ranks that no other test has let meet
        pytest.param("torch", "srun", 6, marks=pytest.mark.slow),
    ],
)
def test_ranks_with_a_gpu_each_use_nccl_whoever_started_them(transport: str, starter: str, ranks: int) -> None:
    """What is in the host's memory goes by MPI all the same, where MPI has started them."""
    if transport == "mpi":
        pytest.importorskip("mpi4py")
    why = "ranks 0 and 1 share GPU-0, and NCCL wants a GPU for each rank"
    wanted = {1: [transport, 0, why], ranks: [transport, 2, ""]}
    gpus = [1, ranks] if transport == "mpi" else [ranks]  # torch's own meeting is once for a process
    found = ranks_of(transport, ranks).call("comm_own_gpu:moved_by", starter, gpus)
    assert found == [[wanted[count] for count in gpus]] * ranks
