"""Repeated calls on torch tensors, and along any axis: kept ready, and the same numbers as the first of their kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.errors import UsageError

TIMEOUT_S = 30.0
SHAPES = [(4, 6), (4, 6, 500), (2, 4, 40_000)]  # whoever comes last adds up; one meeting; in segments
CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "max": lambda comm, x: comm.all_reduce(x, "max"),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "reduce_scatter axis 1": lambda comm, x: comm.reduce_scatter(x, axis=1),
    "reduce_scatter counts": lambda comm, x: comm.reduce_scatter(x, axis=1, counts=(1, x.shape[1] - 1)),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_gather last": lambda comm, x: comm.all_gather(x, axis=-1),
    "all_gather counts": lambda comm, x: comm.all_gather(
        x[:, : 1 + comm.rank].contiguous() if isinstance(x, Tensor) else x[:, : 1 + comm.rank].copy(),
        axis=1,
        counts=(1, 2),
    ),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "broadcast": lambda comm, x: comm.broadcast(x, root=1),
}


def spied(comm: Communicator, refused: list[Any]) -> None:
    """Note which ready calls leave a call to the ordinary way."""

    def spy(key: Any, ready: Any) -> Any:
        def noted(x: Any, out: Any) -> Any:
            result = ready(x, out)
            if result is NotImplemented:
                refused.append(key)
            return result

        return noted

    for key, ready in list(comm.ready_calls.items()):
        comm.ready_calls[key] = spy(key, ready)


def numbers(rank: int, turn: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers, so that every order of adding gives the same bits in every dtype."""
    seed = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randint(-8, 9, shape, generator=seed).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_repeated_calls_give_what_the_first_one_would(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def main(comm: Communicator) -> None:
        for name, call in CALLS.items():
            refused: list[Any] = []
            for turn in range(4):
                x = numbers(comm.rank, turn, shape, dtype)
                before = len(comm.ready_calls)
                result = call(comm, x)
                assert (type(result), result.dtype, result.is_contiguous()) == (Tensor, dtype, True), name
                if turn:
                    assert len(comm.ready_calls) == before > 0, f"{name} was not kept ready"
                    assert not refused, f"{name} was kept ready and went the ordinary way"
                else:
                    spied(comm, refused)
                if dtype != torch.bfloat16:
                    ready = dict(comm.ready_calls)
                    comm.ready_calls.clear()
                    ordinary = call(comm, x.numpy())
                    comm.ready_calls.clear()
                    comm.ready_calls.update(ready)
                    assert np.array_equal(result.numpy(), ordinary), (name, turn)
            if dtype == torch.bfloat16:
                x = numbers(comm.rank, 9, shape, dtype)
                assert torch.equal(call(comm, x), call(comm, x.float()).bfloat16()), name
            comm.ready_calls.clear()

    run_threads(2, main, timeout_s=TIMEOUT_S)


def test_every_kind_of_tensor_takes_the_ready_way_or_the_ordinary_one() -> None:
    def main(comm: Communicator) -> None:
        shape = (6, 4)
        plain = numbers(comm.rank, 0, shape, torch.float32)
        total = numbers(0, 0, shape, torch.float32) + numbers(1, 0, shape, torch.float32)
        comm.all_reduce(plain)
        made: dict[str, Tensor] = {
            "another address": plain.clone(),
            "transposed": plain.t().contiguous().t(),
            "part of another": torch.stack((plain, plain), -1)[..., 0],
            "requires gradients": plain.clone().requires_grad_(),
            "parameter": torch.nn.Parameter(plain.clone()),
            "negated lazily": torch._neg_view(-plain),
        }
        for name, x in made.items():
            assert torch.equal(comm.all_reduce(x), total), name
            if name != "parameter":
                out = torch.empty(shape)
                assert comm.all_reduce(x, out=out) is out, name
                assert torch.equal(out, total), name
        expanded = torch.full((1, 4), float(comm.rank + 1)).expand(shape)
        assert torch.equal(comm.all_reduce(expanded), torch.full(shape, 3.0))
        strided = torch.empty(4, 6).t()
        assert comm.all_reduce(plain, out=strided) is strided
        assert torch.equal(strided, total)
        inplace = plain.clone()
        assert comm.all_reduce(inplace, out=inplace) is inplace
        assert torch.equal(inplace, total)
        for wrong in (torch.empty(24), torch.empty(shape).double(), torch.empty(shape).requires_grad_(), total.numpy()):
            with pytest.raises(UsageError):
                comm.all_reduce(plain, out=wrong)
        assert torch.equal(comm.all_reduce(plain), total)

    run_threads(2, main, timeout_s=TIMEOUT_S)


def test_results_are_the_callers_own() -> None:
    def main(comm: Communicator) -> None:
        x = torch.ones(8)
        results = [comm.all_reduce(x * turn) for turn in range(4)]
        assert [result[0].item() for result in results] == [0.0, 2.0, 4.0, 6.0]
        x.add_(1)  # what was given stays the caller's as well
        assert results[1][0] == 2.0

    run_threads(2, main, timeout_s=TIMEOUT_S)


def test_lengths_that_cannot_be_looked_up_are_not_kept() -> None:
    def main(comm: Communicator) -> None:
        for _ in range(3):
            assert comm.all_gather(np.ones(comm.rank + 1), counts=[1, 2]).shape == (3,)
            assert comm.reduce_scatter(np.ones(3), counts=[1, 2]).shape == (comm.rank + 1,)
        assert not comm.ready_calls

    run_threads(2, main, timeout_s=TIMEOUT_S)
