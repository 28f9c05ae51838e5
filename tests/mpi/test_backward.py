"""Backward over ranks: gradients of users' own modules, buckets against the naive exchange, and what is refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import parallel_cases
import torch

from tilemesh.comm import Communicator, connect, run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.launch import call
from tilemesh.launch.start import find_mpiexec
from tilemesh.parallel import Column, Mesh, Vocabulary, lay

PROCESSES = [pytest.param("mpi", marks=pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")), "torch"]
PARTS = ["own_module", "buckets", "readiness_differs"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_threads(part: str, ranks: int) -> None:
    run_threads(ranks, parallel_cases.PARTS[part])


@pytest.mark.parametrize("transport", PROCESSES)
@pytest.mark.parametrize("part", PARTS)
def test_of_processes(transport: str, part: str) -> None:
    parallel_cases.require_part(transport, part)


def alone(bucket_bytes: int | None = 1 << 20) -> tuple[torch.nn.Linear, object]:
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    mesh = Mesh(connect("alone"))
    return model, lay(model, mesh, ParallelPlan(precision="fp64"), {}, bucket_bytes=bucket_bytes).gradients


@pytest.mark.parametrize("bucket_bytes", [None, 1 << 20])
def test_a_step_on_one_rank_is_torchs_own(bucket_bytes: int | None) -> None:
    """Mean over counted tokens, clipped like clip_grad_norm_; scale is taken out again; nothing is left over."""
    model, gradients = alone(bucket_bytes)
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    for _ in range(2):
        for turn, rows in enumerate((x[:1], x[1:])):
            gradients.backward(model(rows).square().sum(), len(rows), last=turn == 1, scale=8.0)  # type: ignore[attr-defined]
        done = gradients.finish(max_norm=1.0)  # type: ignore[attr-defined]
        whole = torch.nn.Linear(3, 2, dtype=torch.float64)
        whole.load_state_dict(model.state_dict())
        loss = whole(x).square().sum() / 4
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        torch.testing.assert_close(model.weight.grad, whole.weight.grad)
        torch.testing.assert_close(model.bias.grad, whole.bias.grad)
        assert done.tokens == 4
        assert math.isclose(done.loss, loss.item(), rel_tol=1e-12)
        assert math.isclose(done.norm, norm.item(), rel_tol=1e-12)


def test_gradients_that_are_not_finite_are_told_by_the_norm() -> None:
    model, gradients = alone()
    gradients.backward(model(torch.full((1, 3), math.inf, dtype=torch.float64)).sum(), 1)  # type: ignore[attr-defined]
    assert not math.isfinite(gradients.finish(max_norm=1.0).norm)  # type: ignore[attr-defined]


def test_a_step_without_any_counted_token_changes_nothing() -> None:
    model, gradients = alone()
    gradients.backward(model(torch.ones(1, 3, dtype=torch.float64)).sum() * 0, 0)  # type: ignore[attr-defined]
    done = gradients.finish(max_norm=1.0)  # type: ignore[attr-defined]
    assert (done.loss, done.tokens, done.norm) == (0.0, 0, 0.0)
    assert not model.weight.grad.any()


def test_steps_out_of_order_are_refused() -> None:
    model, gradients = alone()
    loss = model(torch.ones(1, 3, dtype=torch.float64)).sum()
    with pytest.raises(UsageError, match="before the last microbatch"):
        gradients.finish()  # type: ignore[attr-defined]
    gradients.backward(loss, 1)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="call finish\\(\\) first"):
        gradients.backward(loss, 1)  # type: ignore[attr-defined]


def test_a_region_wants_its_input_unnamed() -> None:
    def main(comm: Communicator) -> None:
        block = torch.nn.Sequential(torch.nn.Linear(4, 4))
        laid = lay(block, Mesh(comm, tp=2), ParallelPlan(tp=2, precision="fp32"), {"0": "column"})
        with pytest.raises(UsageError, match="give its input as the first argument, unnamed"):
            laid.module[0](input=torch.ones(1, 4))  # type: ignore[index]

    run_threads(2, main)


class Tied(torch.nn.Module):
    """A user's model whose output is its table, of 13 tokens: no rank count divides them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(13, 8)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.head = torch.nn.Linear(8, 13, bias=False)
        self.head.weight = self.table.weight
        with torch.no_grad():
            for number, parameter in enumerate(self.double().parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).sin().reshape(parameter.shape) / (1 + number))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        y: torch.Tensor = self.head(x + self.down(torch.relu(self.up(x))))
        return y


TIED = {"table": "vocabulary", "head": Vocabulary(joins=True), "up": "column", "down": "row"}


def test_a_users_tied_table_of_a_size_that_does_not_divide() -> None:
    tokens = torch.tensor([[0, 5, 12], [7, 7, 1]])
    whole = Tied()
    whole(tokens).square().sum().backward()

    def main(comm: Communicator) -> None:
        laid = lay(Tied(), Mesh(comm, tp=comm.size), ParallelPlan(tp=comm.size, precision="fp64"), TIED)
        y = laid.module(tokens)
        assert y.shape == (2, 3, 13)
        laid.gradients.backward(y.square().sum(), 1)
        laid.gradients.finish()
        found = laid.gather({name: p.grad for name, p in laid.module.named_parameters()})
        for name, parameter in whole.named_parameters() if found is not None else ():
            parallel_cases.close(found[name], parameter.grad)

    for ranks in (2, 4):
        run_threads(ranks, main)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"table": "vocabulary"}, "head.weight is table.weight, one tensor, and they are split differently"),
        ({"head": Vocabulary(joins=True)}, "head.weight is table.weight, one tensor"),
        (TIED | {"head": Column(joins=True)}, "head.weight: its output of 13 is not divisible by 2"),
        ({"up": None}, "a split is None: expected one of column, row"),
        ({"down": "row"}, "a row-split layer of 16 inputs got 16: this rank's part takes 8"),
    ],
)
def test_a_map_that_does_not_fit_the_module(splits: dict[str, Any], message: str) -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(UsageError) as caught:
            lay(Tied(), Mesh(comm, tp=2), ParallelPlan(tp=2, precision="fp64"), splits).module(torch.zeros(1, 1).long())
        assert message in str(caught.value)

    run_threads(2, main)


def test_parts_cannot_be_joined_end_to_end() -> None:
    with pytest.raises(UsageError, match="cannot be joined end to end"):
        Column(parts=3, joins=True)


def test_a_whole_state_that_lacks_a_parameter_is_refused() -> None:
    def main(comm: Communicator) -> None:
        laid = parallel_cases.laid_of(comm, "gpt", 1, 2)
        with pytest.raises(UsageError, match=r"the state lacks token_embedding\.weight"):
            laid.load({})
        with pytest.raises(UsageError, match="load without a state"):
            laid.load(None)
        with pytest.raises(UsageError, match="nonsense is no parameter"):
            laid.gather({"nonsense": torch.ones(1)})

    run_threads(2, main)


def test_frozen_parameters_are_cut_and_left_alone() -> None:
    def main(comm: Communicator) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        model[0].weight.requires_grad_(False)
        plan = ParallelPlan(tp=2, precision="fp32")
        laid = lay(model, Mesh(comm, tp=2), plan, {"0": "column", "1": "row"})
        laid.gradients.backward(laid.module(torch.ones(1, 4)).sum(), 1)
        laid.gradients.finish()
        assert model[0].weight.shape == (2, 4)
        assert model[0].weight.grad is None
        assert model[1].weight.grad is not None
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        with pytest.raises(UsageError, match="nothing to train"):
            lay(model, laid.mesh, plan, {})

    run_threads(2, main)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", PROCESSES)
def test_a_compiled_model_over_ranks_is_the_same(transport: str) -> None:
    assert call("parallel_compile:compiled_is_the_same", 2, transport=transport) == [transport] * 2
