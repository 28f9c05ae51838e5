"""CUDA tensors: natively over nccl (one rank a GPU), staged through pinned host memory where ranks share a GPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from started import ranks_of

from tilemesh.comm import connection
from tilemesh.comm.runtime.threads import ThreadTransport, run_ranks
from tilemesh.core.context import Membership
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
    assert ranks_of("torch", 3).call("comm_device:cases_right") == [105] * 3


class World(ThreadTransport):
    """Ranks as threads, in place of MPI's."""

    beside: Any = None

    def put_beside(self, transport: Any) -> None:
        self.beside = transport


@pytest.mark.parametrize("gpus", [1, 3])
def test_ranks_that_mpi_brought_together_meet_again_for_their_gpus(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each has its own: at one store, which the first has made for all."""

    def met(member: Membership, timeout_s: float, store_of: Callable[..., Any]) -> list[str]:
        store = store_of(member.size, timedelta(seconds=timeout_s))
        store.set(f"rank {member.rank}", f"GPU of {member.local_rank}")
        return [store.get(f"rank {rank}").decode() for rank in range(member.size)]

    monkeypatch.setattr(connection, "_torch_world", met)
    monkeypatch.setattr(connection, "visible_gpus", lambda: tuple(f"GPU-{number}" for number in range(gpus)))

    def body(transport: ThreadTransport) -> tuple[str, Any]:
        world = World(transport.world, transport.rank, transport.size)
        connection._put_nccl_beside(world, Membership("mpiexec", world.rank, 3, world.rank, 3), 20.0)  # type: ignore[arg-type]
        return world.staged_because, world.beside

    shared = ("ranks 0 and 1 share GPU-0, and NCCL wants a GPU for each rank", None)
    assert run_ranks(3, body) == [shared if gpus == 1 else ("", [f"GPU of {rank}" for rank in range(3)])] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "starter", "ranks"),
    [
        ("mpi", "mpiexec", 2),
        ("mpi", "mpiexec", 4),
        ("torch", "torchrun", 5),  # ranks that no other test has let meet
        ("torch", "srun", 6),
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
