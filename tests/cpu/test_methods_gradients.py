"""Compressed and local updates behind the gradient protocol: equality where it is promised, bytes, error feedback."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.shard import Shard
from tilemesh.methods.compressed import SCHEMES, CompressedGradients, Compression, Scheme, sent_bytes
from tilemesh.methods.local import LocalPeriod, LocalUpdates
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.host import HostLink
from tilemesh.parallel.laid import StepPiece
from tilemesh.train.config import OptimizerConfig
from tilemesh.train.offload import HostOptimizer

RANKS, RATE = 3, 0.05
SHAPES = [(24, 10), (24,), (7, 24), (7,)]


def model() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(10, 24), torch.nn.Tanh(), torch.nn.Linear(24, 7)).double()
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).sin().reshape(parameter.shape) / (2 + number))
    return made


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 10, dtype=torch.float64, generator=draw)
    return x, torch.sin(x @ torch.linspace(0, 1, 70, dtype=torch.float64).reshape(10, 7))


def train(way: Any, steps: int, rate: float = RATE, ranks: int = RANKS) -> list[tuple[Tensor, Any, int]]:
    """Plain SGD over ranks: (weights, gradients, bytes sent) of each."""

    def main(comm: Communicator) -> tuple[Tensor, Any, int]:
        mesh = Mesh(comm, dp=ranks)
        laid = lay(model(), mesh, ParallelPlan(dp=ranks, precision="fp64"), {}, gradients=way, algorithm="ring")
        before = mesh.dp.comm.sent.nbytes
        for step in range(steps):
            x, y = batch(comm.rank, step)
            laid.gradients.backward((laid.module(x) - y).square().sum(), 4)
            laid.gradients.finish()
            with torch.no_grad():
                for parameter in laid.module.parameters():
                    parameter -= rate * parameter.grad
            laid.gradients.updated()
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in laid.module.parameters()])
        return flat, laid.gradients, mesh.dp.comm.sent.nbytes - before

    return run_threads(ranks, main)


def compressed(scheme: Scheme, **settings: Any) -> Callable[..., CompressedGradients]:
    return lambda parts: CompressedGradients(parts, Compression(scheme, **settings))


def loss_of(weights: Tensor) -> float:
    whole = model()
    torch.nn.utils.vector_to_parameters(weights, whole.parameters())
    with torch.no_grad():
        pairs = [batch(rank, 999) for rank in range(8)]
        return float(sum((whole(x) - y).square().mean() for x, y in pairs)) / 8


@pytest.fixture(scope="module")
def exact() -> Tensor:
    return train("bucketed", 60)[0][0]


@pytest.mark.parametrize("scheme", ["top-k", "random-k"])
def test_everything_kept_is_data_parallelism(scheme: Scheme, exact: Tensor) -> None:
    for weights, gradients, _ in train(compressed(scheme, keep=1.0), 60):
        torch.testing.assert_close(weights, exact, rtol=0, atol=1e-12)
        assert not any(residual.any() for residual in gradients.residuals.values())


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [("top-k", {"keep": 0.1}), ("random-k", {"keep": 0.2}), ("one-bit", {}), ("int8", {}), ("powersgd", {"rank": 2})],
)
def test_feedback_sends_later_what_was_left_out(scheme: Scheme, settings: dict, exact: Tensor) -> None:
    """Ranks stay equal; with feedback the loss comes to that of the whole gradients."""
    found = train(compressed(scheme, **settings), 60)
    assert all(torch.equal(weights, found[0][0]) for weights, _, _ in found)
    assert loss_of(found[0][0]) < 1.25 * loss_of(exact)
    first = loss_of(torch.cat([parameter.detach().reshape(-1) for parameter in model().parameters()]))
    assert loss_of(exact) < 0.6 * first


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        ("top-k", {"keep": 0.1}), ("top-k", {"keep": 0.4}), ("top-k", {"keep": 0.5}), ("random-k", {"keep": 0.2}),
        ("powersgd", {"rank": 2}), ("int8", {}), ("one-bit", {}),
    ],
)  # fmt: skip
def test_bytes_are_as_computed(scheme: Scheme, settings: dict) -> None:
    """As the communicator counts what leaves: over a ring, whose parts differ by one element at most; the last exchange
    of a step is three numbers."""
    wanted = 5 * sent_bytes(Compression(scheme, **settings), SHAPES, RANKS, 8)
    found = train(compressed(scheme, **settings), 5)
    control = train("bucketed", 5)
    whole = 5 * sent_bytes(None, SHAPES, RANKS, 8)
    for (_, gradients, sent), (_, _, plain) in zip(found, control, strict=True):
        assert gradients.sent_bytes == pytest.approx(wanted, rel=0.01)
        assert abs(sent - wanted - (plain - whole)) <= 5 * 8 * 16
    if scheme != "top-k":
        assert wanted < 0.6 * whole


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_top_k_takes_the_form_of_fewer_bytes(width: int, ranks: int) -> None:
    """Gathered places and values, or a dense sum, by the bytes of each for values of this width."""
    length = 10_000
    for keep in (0.01, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.9):
        sparse, dense = (ranks - 1) * keep * length * (width + 4), 2 * (ranks - 1) / ranks * length * width
        made = Compression("top-k", keep=keep)
        assert made.is_dense(ranks, width) == (sparse >= dense)
        assert sent_bytes(made, [(length,)], ranks, width) == pytest.approx(min(sparse, dense), rel=1e-3)


def test_bytes_of_few_bits() -> None:
    """8 bits and 1 bit of each value, twice; a part is padded to whole bytes of signs, and a scale goes with it."""
    length = sum(torch.Size(shape).numel() for shape in SHAPES)
    for scheme, bits in (("int8", 8), ("one-bit", 1)):
        found = sent_bytes(Compression(scheme), SHAPES, RANKS, 8)
        assert 0 <= found - 4 / 3 * length * bits / 8 <= 2 * (RANKS - 1) * (8 + 4)


def test_whole_gradients_come_first(exact: Tensor) -> None:
    for weights, gradients, _ in train(compressed("top-k", start=60), 60):
        torch.testing.assert_close(weights, exact, rtol=0, atol=1e-12)
        assert gradients.sent_bytes == pytest.approx(60 * sent_bytes(None, SHAPES, RANKS, 8))
    late = train(compressed("top-k", keep=0.1, start=55), 60)
    assert all(torch.equal(weights, late[0][0]) for weights, _, _ in late)
    assert any(residual.any() for residual in late[0][1].residuals.values())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_of_16_bits_are_compressed(scheme: Scheme) -> None:
    """As bf16-master has them: what was sent and what is left to be sent is the gradient, but for rounding."""

    def main(comm: Communicator) -> float:
        made = torch.nn.Linear(9, 11, bias=False, dtype=torch.bfloat16)
        plan = ParallelPlan(dp=RANKS, precision="bf16-master")
        laid = lay(made, Mesh(comm, dp=RANKS), plan, {}, gradients=compressed(scheme, keep=0.5, rank=1))
        laid.gradients.backward(laid.module.weight.sum() * 3, 3)
        laid.gradients.finish()
        kept = [value for name, _, value in laid.gradients.remembered() if not name.startswith("factor")]
        left = sum(float(value.double().sum()) * (1 if value.dim() == 2 else RANKS) for value in kept)
        return float(made.weight.grad.double().sum()) + left

    for total in run_threads(RANKS, main):
        assert total == pytest.approx(99, rel=4 * 2**-8)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_remembered_makes_the_next_steps_the_same(scheme: Scheme) -> None:
    """And remembering changes nothing: of three runs one remembers after a step, and one goes on from there."""

    def main(comm: Communicator) -> list[list[Tensor]]:
        runs = [
            lay(
                model(), Mesh(comm, dp=RANKS), ParallelPlan(dp=RANKS, precision="fp64"), {},
                gradients=compressed(scheme, rank=1),
            )
            for _ in range(3)
        ]  # fmt: skip
        whole, remembers, goes_on = runs
        kept: dict[str, Tensor] = {}

        def recall(name: str, shard: Shard, *, by_replica: bool = False) -> Tensor | None:
            return kept[name][0] if by_replica and name in kept else kept.get(name)

        made: list[list[Tensor]] = []
        for step in range(3):
            for laid in (whole, remembers) if step == 0 else runs:
                x, y = batch(comm.rank, step)
                laid.gradients.backward((laid.module(x) - y).square().sum(), 4)
                laid.gradients.finish()
            if step == 0:
                kept |= {name: value.clone() for name, _, value in remembers.gradients.remembered()}
                goes_on.gradients.recall(recall)
                goes_on.gradients.go_on(1)
            else:
                made.append([torch.cat([p.grad.reshape(-1) for p in laid.module.parameters()]) for laid in runs])
        return made

    for made in run_threads(RANKS, main):
        for whole, remembers, goes_on in made:
            assert torch.equal(remembers, whole)
            assert torch.equal(goes_on, whole)


@pytest.mark.parametrize("scheme", ["one-bit", "top-k"])
def test_ranks_that_hold_the_same_leave_out_the_same(scheme: Scheme) -> None:
    """Norms of sequence parallelism: each rank of tp has a part of their gradient, and one of them writes what is left
    of it. With parts compressed apart, a resumed run went on with another rank's."""
    plan = ParallelPlan(dp=2, tp=2, sequence_parallel=True, precision="fp64")
    config = ModelConfig(layers=1, width=8, heads=2, vocabulary=11, context=8)

    def main(comm: Communicator) -> dict[str, Tensor]:
        torch.manual_seed(0)
        mesh = Mesh(comm, dp=2, tp=2)
        laid = lay(Transformer(config).double(), mesh, plan, gradients=compressed(scheme))
        tokens = (torch.arange(16).view(2, 8) * (1 + mesh.dp.index)) % 11
        laid.passes([StepPiece(tokens, tokens.roll(1, 1), 0)])
        laid.gradients.finish()
        remembered = laid.gradients.remembered()
        return {name: value.clone() for name, shard, value in remembered if shard.copies_along("tp") == 2}

    ranks = run_threads(4, main)
    assert len(ranks[0]) > 0
    assert any(not torch.equal(value, ranks[2][name]) for name, value in ranks[0].items())  # replicas differ
    for one, other in ((0, 1), (2, 3)):
        for name, value in ranks[one].items():
            assert torch.equal(value, ranks[other][name]), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_left_out_is_sent_later_as_a_mean(scheme: Scheme) -> None:
    """Whatever was applied, and what is still to be sent, add up to the mean gradients of all steps, though these count
    1,000, 10 and 300 targets over all ranks."""
    counts = ((400, 350, 250), (2, 8, 0), (100, 100, 100))

    def main(comm: Communicator) -> tuple[Tensor, Tensor]:
        mesh, made = Mesh(comm, dp=RANKS), torch.nn.Linear(9, 11, dtype=torch.float64)
        way = compressed(scheme, keep=0.1, rank=1)
        laid = lay(made, mesh, ParallelPlan(dp=RANKS, precision="fp64"), {}, gradients=way)
        applied = torch.zeros(110, dtype=torch.float64)
        for step, targets in enumerate(counts):
            draw = torch.Generator().manual_seed(10 * step + comm.rank)
            slopes = torch.randn(11, 9, dtype=torch.float64, generator=draw) * targets[comm.rank]
            loss = (laid.module.weight * slopes).sum() + laid.module.bias.sum() * targets[comm.rank]
            laid.gradients.backward(loss, targets[comm.rank])
            laid.gradients.finish()
            applied += torch.cat([laid.module.weight.grad.reshape(-1), laid.module.bias.grad])
        kept = torch.zeros(2, 110, dtype=torch.float64)  # of each rank its own; of the sum of its part, all of it
        for name, _, value in laid.gradients.remembered():
            kind, _, parameter = name.partition(":")
            if kind != "factor":
                kept[int(kind == "sum_error"), slice(99) if parameter == "weight" else slice(99, 110)] = value.reshape(
                    -1
                )
        return applied, torch.from_numpy(comm.all_reduce(kept[0].numpy())) + kept[1]

    wanted = torch.zeros(11, 9, dtype=torch.float64)
    for step, targets in enumerate(counts):
        for rank, count in enumerate(targets):
            draw = torch.Generator().manual_seed(10 * step + rank)
            wanted += torch.randn(11, 9, dtype=torch.float64, generator=draw) * count / sum(targets)
    whole = torch.cat([wanted.reshape(-1), torch.full((11,), 3.0, dtype=torch.float64)])
    for applied, kept in run_threads(RANKS, main):
        # Of one-bit and int8 a scale is sent as float32, and what it rounds is kept as well: sums in float64.
        torch.testing.assert_close(applied + kept, whole, rtol=0, atol=1e-12)
        if scheme != "powersgd":  # which may be exact
            assert kept.any()


def test_one_bit_takes_its_scale_of_values_alone() -> None:
    """Of 9 values on 2 ranks the second sums one, in a part of 8: where all are 1, signs and their mean are exact."""

    def main(comm: Communicator) -> Tensor:
        made = torch.nn.Linear(1, 9, bias=False, dtype=torch.float64)
        plan = ParallelPlan(dp=2, precision="fp64")
        laid = lay(made, Mesh(comm, dp=2), plan, {}, gradients=compressed("one-bit"))
        laid.gradients.backward(laid.module.weight.sum(), 1)
        laid.gradients.finish()
        return laid.module.weight.grad.reshape(-1)

    for found in run_threads(2, main):
        assert found.tolist() == [1.0] * 9


def local(**settings: Any) -> Callable[..., LocalUpdates]:
    return lambda parts: LocalUpdates(parts, LocalPeriod(**settings))


def test_a_period_of_one_with_plain_sgd_is_data_parallelism(exact: Tensor) -> None:
    for weights, _, _ in train(local(period=1), 60):
        torch.testing.assert_close(weights, exact, rtol=0, atol=1e-12)
    for weights, _, _ in train(local(period=7, start=60), 60):
        torch.testing.assert_close(weights, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("start", "outer_rate", "momentum"), [(0, 1.0, 0.0), (6, 1.0, 0.0), (0, 0.7, 0.9)])
def test_local_updates_are_what_one_process_computes(start: int, outer_rate: float, momentum: float) -> None:
    """Local SGD, post-local SGD and DiLoCo beside the same on one process, replica after replica."""
    steps, period = 20, 4
    when = LocalPeriod(period, start, outer_rate, momentum, last=steps)
    replicas = [model() for _ in range(RANKS)]
    anchor = [parameter.detach().clone() for parameter in replicas[0].parameters()]
    velocity = [torch.zeros_like(value) for value in anchor]
    for step in range(1, steps + 1):
        for rank, replica in enumerate(replicas):
            x, y = batch(rank, step - 1)
            replica.zero_grad()
            ((replica(x) - y).square().sum() / 4).backward()
        groups = list(zip(*(replica.parameters() for replica in replicas), strict=True))
        with torch.no_grad():
            for number, same in enumerate(groups):
                if step <= start:
                    mean = sum(parameter.grad for parameter in same) / RANKS
                    for parameter in same:
                        parameter.grad = mean
                for parameter in same:
                    parameter -= RATE * parameter.grad
                if step > start and when.meets(step):
                    change = anchor[number] - sum(same) / RANKS
                    velocity[number] = momentum * velocity[number] + change
                    anchor[number] = anchor[number] - outer_rate * (change + momentum * velocity[number])
                    for parameter in same:
                        parameter.copy_(anchor[number])
                elif step <= start:
                    anchor[number] = same[0].detach().clone()
    wanted = torch.cat([parameter.detach().reshape(-1) for parameter in replicas[0].parameters()])
    settings = {"period": period, "start": start, "outer_rate": outer_rate, "outer_momentum": momentum, "last": steps}
    for weights, gradients, sent in train(local(**settings), steps):
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-12)
        assert gradients.rounds == len([s for s in range(start + 1, steps + 1) if when.meets(s)])
        if not start:
            assert sent == pytest.approx(steps / period * sent_bytes(None, SHAPES, RANKS, 8), rel=0.02)


def test_replicas_average_masters_and_not_what_is_left_of_them_in_16_bits() -> None:
    def main(comm: Communicator) -> tuple[list[float], list[float]]:
        linear = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
        laid = lay(linear, Mesh(comm, dp=RANKS), ParallelPlan(dp=RANKS), {}, gradients=local(period=2, last=2))
        masters = {"weight": torch.tensor([[1 + 2.0**-20 * comm.rank, 3.0 * comm.rank]])}
        laid.gradients.average(masters)
        for _ in range(2):
            laid.gradients.backward(laid.module(torch.ones(1, 2, dtype=torch.bfloat16)).sum(), 1)
            laid.gradients.finish()
            laid.gradients.updated()
        return masters["weight"].tolist()[0], laid.module.weight.float().tolist()[0]

    ranks = range(RANKS)
    wanted = [1 + 2.0**-20 * sum(ranks) / RANKS, 3.0 * sum(ranks) / RANKS]
    for masters, weights in run_threads(RANKS, main):
        assert masters == wanted
        assert weights == [1.0, torch.tensor(wanted[1]).bfloat16().item()]


class LateLink(HostLink):
    """Copies to the host's memory that are over no sooner than somebody waits for them, as those of a GPU may be."""

    def out(self, pairs: Any, *after: Any, keeps: bool = False) -> None:
        self.begun = [*getattr(self, "begun", ()), *((tensor.clone(), home) for tensor, home in pairs)]

    def into(self, pairs: Any, *after: Any) -> None:
        self.settle()
        super().into(pairs)

    def settle(self) -> None:
        begun, self.begun = getattr(self, "begun", ()), ()
        super().out(begun)


def test_masters_on_the_host_are_read_after_they_have_come_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilemesh.train.offload.HostLink", LateLink)

    def main(comm: Communicator, moves: bool) -> tuple[Tensor, Tensor]:
        plan = ParallelPlan(dp=RANKS, precision="bf16-master")
        laid = lay(model().bfloat16(), Mesh(comm, dp=RANKS), plan, {}, gradients=local(period=2, start=2, last=6))
        optimizer = HostOptimizer(OptimizerConfig(name="sgd"), laid.gradients.stepped, plan.precision, moves=moves)
        laid.gradients.average(optimizer.stepped, optimizer.settle)
        for step in range(6):
            x, y = (part.bfloat16() for part in batch(comm.rank, step))
            laid.gradients.backward((laid.module(x) - y).square().sum(), 4)
            optimizer.update(RATE, laid.gradients.finish())
            laid.gradients.updated()
        return tuple(
            torch.cat([value.detach().reshape(-1) for value in values.values()])
            for values in (optimizer.stepped, laid.gradients.anchor)
        )

    moved, stayed = (run_threads(RANKS, partial(main, moves=moves)) for moves in (True, False))
    for theirs, ours in zip(moved, stayed, strict=True):
        assert all(torch.equal(*both) for both in zip(theirs, ours, strict=True))


@pytest.mark.parametrize(
    "wrong", [lambda: Compression("top-k", keep=0), lambda: Compression("zip"), lambda: LocalPeriod(0)]
)
def test_what_is_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="expected"):
        wrong()


def test_gradients_of_one_row_are_one_product_and_come_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a matrix by one row is an outer product, which factors of rank 1 hold without error."""
    several = batch
    monkeypatch.setitem(globals(), "batch", lambda rank, step: tuple(part[:1] for part in several(0, step)))
    whole, factored = (train(way, 3)[0][0] for way in ("bucketed", compressed("powersgd", rank=1)))
    torch.testing.assert_close(factored, whole, rtol=0, atol=1e-12)
