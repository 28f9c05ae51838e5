"""Forward over ranks: the exchanges, every model of the gate, logits and generation; and the bytes they cost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import parallel_cases
import torch

from tilemesh.comm import Communicator, connect, run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.shard import share
from tilemesh.launch.start import find_mpiexec
from tilemesh.parallel.tensor import Seams, vocabulary_loss

PROCESSES = [pytest.param("mpi", marks=pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")), "torch"]
PARTS = ["exchanges", "forward", "cached", "bytes_on_the_wire", "loss_memory"]


@pytest.mark.parametrize("part", ["exchanges", "forward"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_on_threads(part: str, ranks: int) -> None:
    run_threads(ranks, parallel_cases.PARTS[part])


@pytest.mark.parametrize("ranks", [1, 2])
def test_caches_of_a_rank_s_own_heads(ranks: int) -> None:
    run_threads(ranks, parallel_cases.cached)


def test_bytes_on_the_wire() -> None:
    run_threads(2, parallel_cases.bytes_on_the_wire)


@pytest.mark.parametrize("transport", PROCESSES)
@pytest.mark.parametrize("part", PARTS)
def test_of_processes(transport: str, part: str) -> None:
    parallel_cases.require_part(transport, part)


def test_a_token_outside_the_vocabulary_is_refused_as_it_is_by_one_process() -> None:
    def main(comm: object) -> None:
        laid = parallel_cases.laid_of(comm, "gpt", 1, 2)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="tokens from 0 to 61: the vocabulary is 61"):
            laid.logits(torch.tensor([[0, 61]]))

    run_threads(2, main)


def test_a_loss_of_mismatched_shapes_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a target a token"):
        vocabulary_loss(torch.zeros(2, 3, 5), torch.zeros(2, 4), Seams(connect("alone")), 5)


def test_a_second_backward_through_the_loss_is_refused() -> None:
    """It turned what it held into the gradient; autograd notices."""
    logits = torch.zeros(1, 3, 5, requires_grad=True)
    total, _ = vocabulary_loss(logits, torch.tensor([[0, 1, 2]]), Seams(connect("alone")), 5)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_loss_is_torchs(dtype: torch.dtype, ranks: int) -> None:
    """A vocabulary that ranks cut unevenly: value and gradient of cross_entropy, in at least float32."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(2, 7, 9, generator=generator) * 5).to(dtype)
    targets = torch.randint(0, 9, (2, 7), generator=generator)
    targets[0, :3] = -100
    whole = logits.to(torch.promote_types(dtype, torch.float32), copy=True).requires_grad_()
    wanted = torch.nn.functional.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="sum")
    wanted.backward()

    def main(comm: Communicator) -> None:
        first, count = share(9, comm.size, comm.rank)
        mine = logits[..., first : first + count].clone().requires_grad_()
        total, counted = vocabulary_loss(mine, targets, Seams(comm), 9)
        total.backward()
        assert total.dtype == wanted.dtype
        torch.testing.assert_close(total, wanted)
        assert counted == 11
        torch.testing.assert_close(mine.grad, whole.grad[..., first : first + count].to(dtype))

    run_threads(ranks, main)


def test_logits_that_are_not_this_ranks_part_are_refused() -> None:
    with pytest.raises(UsageError, match="logits of 4 tokens: this rank's part of 5 is 5"):
        vocabulary_loss(torch.zeros(1, 3, 4), torch.zeros(1, 3), Seams(connect("alone")), 5)
