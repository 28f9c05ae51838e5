"""Backward over ranks: gradients of users' own modules, buckets against the naive exchange, and what is refused."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
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
from tilemesh.parallel import ColumnSplit, Mesh, Region, VocabularySplit, lay
from tilemesh.parallel.apply import _sums_of_bits
from tilemesh.parallel.buckets import Bucket, Bucketed
from tilemesh.parallel.gradients import Gradients, GradientStep, Parts, read, settle

PROCESSES = [pytest.param("mpi", marks=pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")), "torch"]
PARTS = ["own_module", "placed_module", "buckets", "readiness_differs"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_threads(part: str, ranks: int) -> None:
    run_threads(ranks, parallel_cases.PARTS[part])


@pytest.mark.parametrize("transport", PROCESSES)
@pytest.mark.parametrize("part", PARTS)
def test_of_processes(transport: str, part: str) -> None:
    parallel_cases.require_part(transport, part)


def alone(way: str = "bucketed", tokens: int | None = None) -> tuple[torch.nn.Linear, Gradients]:
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    mesh = Mesh(connect("alone"))
    return model, lay(model, mesh, ParallelPlan(precision="fp64"), {}, gradients=way, tokens=tokens).gradients


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("way", ["bucketed", "naive", "local"])
def test_a_step_on_one_rank_is_torchs_own(way: str, divide: bool) -> None:
    """Mean over counted tokens, clipped like clip_grad_norm_; scale is taken out again; nothing is left over."""
    model, gradients = alone(way, tokens=4)
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    scale = 1.0 if way == "local" else 8.0
    for _ in range(2):
        for turn, rows in enumerate((x[:1], x[1:])):
            gradients.backward(model(rows).square().sum(), len(rows), last=turn == 1, scale=scale)
        done = gradients.finish(max_norm=1.0, divide=divide)
        assert (done.divisor is None) == divide
        if done.divisor is not None:  # what the optimizer does on its way
            for flat in gradients.buffers:
                flat /= done.divisor
        assert isinstance(done.norm, torch.Tensor) == gradients.is_late == (way == "local")
        [(loss_read, norm_read)] = read([done])
        whole = torch.nn.Linear(3, 2, dtype=torch.float64)
        whole.load_state_dict(model.state_dict())
        loss = whole(x).square().sum() / 4
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        # A divisor is float32, as the optimizers' kernels take it.
        bound = {"rtol": 1e-7, "atol": 1e-7} if not divide else {}
        torch.testing.assert_close(model.weight.grad, whole.weight.grad, **bound)
        torch.testing.assert_close(model.bias.grad, whole.bias.grad, **bound)
        assert done.tokens == 4
        assert math.isclose(loss_read, loss.item(), rel_tol=1e-12)
        assert math.isclose(norm_read, norm.item(), rel_tol=1e-12)
        gradients.clear()


class Wide(torch.nn.Module):
    """A loss whose gradient is what was drawn: a million values, of which a float32 sum loses 3 parts in 100,000."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        shape = (1024, 1024 if dtype == torch.float32 else 64)
        self.direction = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))

    def forward(self) -> torch.Tensor:
        return (self.weight * self.direction).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["bucketed", "naive", "local", "zero"])
def test_the_norm_is_that_of_the_gradients_in_float64(way: str, dtype: torch.dtype) -> None:
    """Reported and clipped by: 16-bit gradients have no 16-bit norm, and many values no float32 sum."""
    norms, clips = {}, {}

    def step(comm: Communicator) -> None:
        plan = ParallelPlan(dp=comm.size, zero=int(way == "zero"))
        laid = lay(Wide(dtype), Mesh(comm, dp=comm.size), plan, {}, gradients="bucketed" if way == "zero" else way,
                   tokens=4)  # fmt: skip
        # Sums of equals and powers of two: nothing is rounded on the way, what is left is the norm's own error.
        laid.gradients.backward(laid.module(), 4 // comm.size)
        done = laid.gradients.finish(max_norm=2.0, divide=False)
        [(_, norms[comm.rank])] = read([done])
        assert done.divisor is not None
        clips[comm.rank] = float(done.divisor) * (4 if way == "local" else 1) / 4

    ranks = 1 if way == "local" else 2
    run_threads(ranks, step)
    exact = float(Wide(dtype).direction.double().norm()) * ranks / 4
    for rank in range(ranks):
        assert math.isclose(norms[rank], exact, rel_tol=1e-6)
        assert math.isclose(clips[rank], exact / 2.0, rel_tol=1e-6)


def test_several_steps_are_read_with_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: waits.append(1) or tolist(tensor))
    steps = [GradientStep(torch.tensor(float(number)), 8, 2.0 * number) for number in range(3)]
    assert read(steps) == [(0.0, 0.0), (1.0, 2.0), (2.0, 4.0)]
    assert waits == [1]
    assert read([]) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: alone("local"), "local gradients without tokens"),
        (lambda: alone("buckets"), "unknown gradients 'buckets': did you mean 'bucketed'"),
        (
            lambda: alone("local", 4)[1].backward(torch.ones(()), 1, scale=2.0),
            "a loss scale of 2.0 with local gradients",
        ),
        (lambda: alone("local", 4)[1].finish(), "before the last microbatch"),
        (lambda: run_threads(2, _local_on_two), "local gradients on a mesh of dp=2 × tp=1: they are for one process"),
    ],
)
def test_what_a_way_of_making_gradients_cannot_do(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert message in str(caught.value)


def _local_on_two(comm: Communicator) -> None:
    plan = ParallelPlan(dp=2, precision="fp32")
    lay(torch.nn.Linear(2, 2), Mesh(comm, dp=2), plan, {}, gradients="local", tokens=4)


def test_another_exchange_is_a_method_away() -> None:
    """What compression does: it sends something else; the bucket holds the sum once the handle has been waited for."""

    class Halved(Bucketed):
        """Sends 16 bits of each number."""

        def exchange(self, bucket: Bucket) -> Any:
            sent = bucket.flat.bfloat16()
            handle = self.groups[bucket.batch_summed].all_reduce(sent, out=sent, algorithm=self.algorithm, wait=False)

            class Expanding:
                def test(self) -> bool:
                    return bool(handle.test())

                def wait(self) -> None:
                    handle.wait()
                    bucket.flat.copy_(sent)

            return Expanding()

    def main(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, int]:
        found = []
        for way in ("bucketed", Halved):
            model = torch.nn.Linear(64, 64)
            with torch.no_grad():
                model.weight.copy_(torch.linspace(-1, 1, 64 * 64).reshape(64, 64))
            mesh = Mesh(comm, dp=2)
            laid = lay(model, mesh, ParallelPlan(dp=2, precision="fp32"), {}, gradients=way, algorithm="ring")
            before = mesh.dp.comm.sent.nbytes
            laid.gradients.backward(laid.module(torch.ones(3, 64) * (comm.rank + 1)).square().sum(), 3)
            laid.gradients.finish()
            assert model.weight.grad is not None
            found.append((model.weight.grad, mesh.dp.comm.sent.nbytes - before))
        return found[0][0], found[1][0], found[0][1] // found[1][1]

    for exact, halved, ratio in run_threads(2, main):
        assert ratio == 2
        assert 0 < float((halved - exact).norm() / exact.norm()) < 2**-7


def test_without_overlap_nothing_is_exchanged_before_the_end_and_the_sums_are_the_same() -> None:
    class Noting(Bucketed):
        """Counts the exchanges that have begun."""

        begun = 0

        def exchange(self, bucket: Bucket) -> Any:
            self.begun += 1
            return super().exchange(bucket)

    def main(comm: Communicator) -> None:
        found = []
        for overlap in (True, False):
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.25)
            plan, made = ParallelPlan(dp=2, precision="fp32"), lambda parts, o=overlap: Noting(parts, 8, overlap=o)
            laid = lay(model, Mesh(comm, dp=2), plan, {}, gradients=made)
            laid.gradients.backward(laid.module(torch.ones(1, 4) * (comm.rank + 1)).square().sum(), 1)
            assert isinstance(laid.gradients, Noting)
            assert laid.gradients.begun == (4 if overlap else 0)
            laid.gradients.finish()
            assert laid.gradients.begun == 4
            found.append([parameter.grad for parameter in model.parameters()])
        assert all(torch.equal(early, late) for early, late in zip(*found, strict=True))

    run_threads(2, main)


class Scattered(Bucketed):
    """What ZeRO does: each rank is left with the sum of its own half of a bucket."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.halves: dict[int, torch.Tensor] = {}

    def exchange(self, bucket: Bucket) -> Any:
        half = self.halves[id(bucket)] = torch.empty_like(bucket.flat.chunk(2)[0])
        return self.groups[bucket.batch_summed].reduce_scatter(bucket.flat, out=half, wait=False)

    def kept(self, bucket: Bucket) -> tuple[torch.Tensor, int]:
        return self.halves[id(bucket)], bucket.copies // 2


class Unsent(Bucketed):
    """What local updates do: a replica's own mean, nothing exchanged."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.counted = ()  # this rank alone

    def exchange(self, bucket: Bucket) -> Any:
        return None

    def kept(self, bucket: Bucket) -> tuple[torch.Tensor, int]:
        return bucket.flat, bucket.copies // self.mesh.dp.size


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_zero_and_local_updates_are_two_methods_away(max_norm: float | None) -> None:
    def main(comm: Communicator) -> None:
        rows = torch.arange(8.0).reshape(2, 4)[comm.rank :][:1] + 1  # this rank's part of the batch

        def step(way: Any) -> tuple[Any, Any, torch.Tensor]:
            model = torch.nn.Linear(4, 2, bias=False)
            with torch.no_grad():
                model.weight.fill_(0.25)
            laid = lay(model, Mesh(comm, dp=2), ParallelPlan(dp=2, precision="fp32"), {}, gradients=way)
            laid.gradients.backward(laid.module(rows).square().sum(), comm.rank + 1)  # replicas of 1 and 2 tokens
            assert model.weight.grad is not None
            return laid.gradients, laid.gradients.finish(max_norm), model.weight.grad.flatten()

        _, wanted, gradient = step("bucketed")
        scattered, done, _ = step(Scattered)
        (half,) = scattered.halves.values()
        torch.testing.assert_close(half, gradient.chunk(2)[comm.rank])
        assert (done.tokens, done.norm) == (3, pytest.approx(wanted.norm))
        # Alone with its rows a process has the same as a replica that sends nothing.
        weight = torch.full((2, 4), 0.25, requires_grad=True)
        ((rows @ weight.T).square().sum() / (comm.rank + 1)).backward()
        assert weight.grad is not None
        norm = float(weight.grad.norm())
        _, done, own = step(Unsent)
        assert (done.tokens, done.norm) == (comm.rank + 1, pytest.approx(norm))
        scale = 1.0 if max_norm is None else min(1.0, max_norm / norm)
        torch.testing.assert_close(own, weight.grad.flatten() * scale, rtol=1e-5, atol=0)

    run_threads(2, main)


@pytest.mark.parametrize("divide", [True, False])
def test_a_norm_that_is_read_late_is_settled_like_one_that_is_known(divide: bool) -> None:
    for norm in (3.0, torch.tensor(3.0)):
        gradient = torch.full((4,), 8.0)
        done = settle([gradient], 0.0, 1, norm, factor=1 / 8, max_norm=1.5, divide=divide)
        divisor = 1.0 if done.divisor is None else done.divisor
        torch.testing.assert_close(gradient / divisor, torch.full((4,), 0.5))


def test_gradients_that_are_not_finite_are_told_by_the_norm() -> None:
    model, gradients = alone()
    gradients.backward(model(torch.full((1, 3), math.inf, dtype=torch.float64)).sum(), 1)
    assert not math.isfinite(gradients.finish(max_norm=1.0).norm)


def test_a_step_without_any_counted_token_changes_nothing() -> None:
    model, gradients = alone()
    gradients.backward(model(torch.ones(1, 3, dtype=torch.float64)).sum() * 0, 0)
    done = gradients.finish(max_norm=1.0)
    assert (done.loss, done.tokens, done.norm) == (0.0, 0, 0.0)
    assert not model.weight.grad.any()


def test_steps_out_of_order_are_refused() -> None:
    model, gradients = alone()
    loss = model(torch.ones(1, 3, dtype=torch.float64)).sum()
    with pytest.raises(UsageError, match="before the last microbatch"):
        gradients.finish()
    gradients.backward(loss, 1)
    with pytest.raises(UsageError, match="call finish\\(\\) first"):
        gradients.backward(loss, 1)


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


TIED = {"table": "vocabulary", "head": VocabularySplit(joins=True), "up": "column", "down": "row"}


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
        ({"head": VocabularySplit(joins=True)}, "head.weight is table.weight, one tensor"),
        (TIED | {"head": ColumnSplit(joins=True)}, "head.weight: its output of 13 is not divisible by 2"),
        ({"up": None}, "a split is None: expected one of column, row"),
        ({"down": "row"}, "a row-split layer got 16 inputs: this rank's part takes 8"),
    ],
)
def test_a_map_that_does_not_fit_the_module(splits: dict[str, Any], message: str) -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(UsageError) as caught:
            lay(Tied(), Mesh(comm, tp=2), ParallelPlan(tp=2, precision="fp64"), splits).module(torch.zeros(1, 1).long())
        assert message in str(caught.value)

    run_threads(2, main)


class ScaledTable(torch.nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return 3 * super().forward(input)


class TwiceLinear(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return 2 * super().forward(input)


def hooked() -> torch.nn.Linear:
    layer = torch.nn.Linear(8, 4)
    layer.register_forward_hook(lambda module, args, y: 2 * y)
    return layer


def halved() -> torch.nn.Linear:
    layer = torch.nn.Linear(8, 4)
    layer.weight.register_hook(lambda gradient: gradient / 2)  # type: ignore[no-untyped-call]
    return layer


@pytest.mark.parametrize(
    ("layer", "split", "message"),
    [
        (halved, "row", "0.weight has hooks on its gradient"),
        (lambda: ScaledTable(4, 4), "vocabulary", "0, a ScaledTable, has a forward of its own, which a VocabularySpl"),
        (lambda: TwiceLinear(8, 4), "row", "0, a TwiceLinear, has a forward of its own, which a RowSplit would drop"),
        (hooked, "row", "0, a Linear, has hooks, which a RowSplit would drop: make it a plain nn.Linear"),
        (lambda: torch.nn.Embedding(4, 4, max_norm=1.0, sparse=True), "vocabulary", "has max_norm and sparse, which"),
    ],
)
def test_what_a_cut_layer_would_no_longer_compute_is_refused(layer: Any, split: str, message: str) -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(UsageError) as caught:
            lay(torch.nn.Sequential(layer()), Mesh(comm, tp=2), ParallelPlan(tp=2, precision="fp32"), {"0": split})
        assert message in str(caught.value)

    run_threads(2, main)


def test_the_padding_row_of_a_cut_table_has_no_gradient() -> None:
    def main(comm: Communicator) -> None:
        table = torch.nn.Embedding(4, 2, padding_idx=3)
        torch.nn.init.ones_(table.weight)
        plan = ParallelPlan(tp=2, precision="fp32")
        laid = lay(torch.nn.Sequential(table), Mesh(comm, tp=2), plan, {"0": "vocabulary"})
        laid.gradients.backward(laid.module(torch.tensor([1, 2, 3, 3])).sum(), 1)
        laid.gradients.finish()
        wanted = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
        assert torch.equal(laid.module[0].weight.grad, wanted if comm.rank == 0 else wanted.flip(0))  # type: ignore[index]

    run_threads(2, main)


class Attending(torch.nn.Module):
    """Attention to another input, in heads of 4."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (torch.nn.Linear(4 * heads, 4 * heads) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        given = ((self.q, x), (self.k, memory), (self.v, memory))
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer, y in given)
        y: torch.Tensor = self.o(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


ATTENDING = {"": Region(divides=("heads",)), "q": "column", "k": "column", "v": "column", "o": "row"}


def test_heads_that_do_not_divide_are_refused() -> None:
    whole = torch.nn.ModuleList([Attending(6)])

    def main(comm: Communicator) -> None:
        model = copy.deepcopy(whole)
        splits: Any = {f"0.{name}".rstrip("."): split for name, split in ATTENDING.items()}
        with pytest.raises(UsageError, match=r"0\.heads is 6 and tp 4: a rank would compute parts of heads; set a tp"):
            lay(model, Mesh(comm, tp=4), ParallelPlan(tp=4, precision="fp32"), splits)

    run_threads(4, main)


class Block(torch.nn.Module):
    """A region of two matrices, and one of several things after them."""

    def __init__(self, after: str) -> None:
        super().__init__()
        self.up, self.down, self.norm = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), torch.nn.LayerNorm(8)
        self.again = torch.nn.Linear(8, 8)
        self.scale = torch.nn.Parameter(torch.ones(8))  # of a rank's own features
        self.after = after

    def forward(self, x: torch.Tensor) -> Any:
        wide = torch.relu(self.up(x))
        y: torch.Tensor = self.down(wide)
        match self.after:
            case "residual":
                return (y + x, 1)
            case "norm":
                return self.norm(y)
            case "column":
                return self.again(y)
            case "scaled":
                return wide * self.scale
        return {"y": torch.nn.functional.dropout(y)}


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ("residual", "region, a Block, is a region .*its input is added to"),
        ("norm", r"region\.norm\.(weight|bias) follows it"),
        ("column", "a column layer takes what an exchange gave"),
        ("", ""),
        ("scaled", ""),
    ],
)
def test_what_follows_an_exchange_in_a_region_is_refused(after: str, words: str) -> None:
    model = torch.nn.ModuleDict({"before": torch.nn.Linear(8, 8), "region": Block(after)})
    splits: Any = {"region": "region", "region.up": "column", "region.down": "row", "region.again": "column"}

    def main(comm: Communicator) -> None:
        block = lay(copy.deepcopy(model), Mesh(comm, tp=2), ParallelPlan(tp=2, precision="fp32"), splits).module
        with torch.no_grad():
            block["region"](block["before"](torch.ones(2, 8)))  # type: ignore[index]
        for _ in range(2):
            with pytest.raises(UsageError, match=words) if words else nullcontext():
                block["region"](block["before"](torch.ones(2, 8)))  # type: ignore[index]

    run_threads(2, main)


class AttendingOne(Attending):
    """To what lies in a tuple or dict."""

    def forward(self, x: torch.Tensor, memory: Any) -> torch.Tensor:
        return super().forward(x, memory["given"] if isinstance(memory, dict) else memory[0])


def test_a_region_wants_a_tensor_first() -> None:
    def main(comm: Communicator) -> None:
        block = torch.nn.Sequential(torch.nn.Linear(4, 4))
        laid = lay(block, Mesh(comm, tp=2), ParallelPlan(tp=2, precision="fp32"), {"0": "column"})
        with pytest.raises(UsageError, match="its first is a tuple, expected a tensor"):
            laid.module[0]((torch.ones(1, 4),))  # type: ignore[index]

    run_threads(2, main)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("within", [None, lambda x: (x, 1), lambda x: [x], lambda x: {"given": x}])
def test_all_that_a_region_is_given_has_whole_gradients(named: bool, within: Any) -> None:
    torch.manual_seed(0)
    region = Attending(2) if within is None else AttendingOne(2)
    model = torch.nn.ModuleDict({"before": torch.nn.Linear(8, 8), "region": region}).double()
    x, memory = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)

    def loss_of(model: Any) -> torch.Tensor:
        given = (within or (lambda x: x))(model["before"](memory))
        y: torch.Tensor = model["region"](x, memory=given) if named else model["region"](x, given)
        return y.square().sum()

    whole = copy.deepcopy(model)
    loss_of(whole).backward()
    splits: Any = {f"region.{name}".rstrip("."): split for name, split in ATTENDING.items()}

    def main(comm: Communicator) -> None:
        laid = lay(copy.deepcopy(model), Mesh(comm, tp=2), ParallelPlan(tp=2, precision="fp64"), splits)
        laid.gradients.backward(loss_of(laid.module), 1)
        laid.gradients.finish()
        found = laid.module["before"].weight.grad  # type: ignore[index]
        parallel_cases.close(found, whole["before"].weight.grad)

    run_threads(2, main)


def test_parts_cannot_be_joined_end_to_end() -> None:
    with pytest.raises(UsageError, match="cannot be joined end to end"):
        ColumnSplit(parts=3, joins=True)


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


def test_ranks_with_other_weights_take_those_of_the_first() -> None:
    """Modules without a seed differ between processes: cut as they are, they would be parts of no matrix."""
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6)) for _ in range(2)]
    models[1][1].running_mean.fill_(2)  # type: ignore[union-attr, operator]
    first = copy.deepcopy(models[0].state_dict())

    def main(comm: Communicator) -> None:
        laid = lay(
            models[comm.rank], Mesh(comm, tp=2), ParallelPlan(tp=2, precision="fp32"), {"0": ColumnSplit(joins=True)}
        )
        assert laid.module.state_dict()["1.running_mean"].tolist() == [0.0] * 6
        gathered = laid.gather()
        if gathered is not None:
            assert all(torch.equal(gathered[name], first[name]) for name in gathered)

    run_threads(2, main)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (257,), (40, 50)])
def test_tensors_of_other_bits_are_told_apart(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    whole = torch.randint(0, 2, (count + 3,), generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor = whole[3:].view(shape)  # which need not begin at a word
    sums = _sums_of_bits(tensor)
    assert torch.equal(sums, _sums_of_bits(tensor.clone()))
    for place in range(0, count, 97):
        other = tensor.clone()
        other.view(-1)[place] = 1 - int(other.view(-1)[place])
        assert not torch.equal(sums, _sums_of_bits(other))


def test_ranks_without_memory_beside_others_with_it_are_refused() -> None:
    def main(comm: Communicator) -> None:
        model = torch.nn.Linear(4, 4, device="meta" if comm.rank else "cpu")
        with pytest.raises(UsageError, match='without memory" on rank 1'):
            lay(model, Mesh(comm, dp=2), ParallelPlan(dp=2, precision="fp32"), {})

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


@pytest.mark.parametrize("place", [1, 2])
def test_dropout_of_ranks_that_compute_alike_is_refused(place: int) -> None:
    """Between a column and a row layer each rank's elements are its own; behind the row layer both drop others."""

    def main(comm: Communicator) -> None:
        layers = [torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)]
        layers.insert(place, torch.nn.Dropout(0.5))
        splits = {"0": "column", str(1 + (place == 1)): "row"}
        laid = lay(torch.nn.Sequential(*layers), Mesh(comm, tp=2), ParallelPlan(tp=2, precision="fp32"), splits)
        torch.manual_seed(comm.rank)
        laid.gradients.backward(laid.module(torch.ones(3, 4)).sum(), 3)
        if place == 1:
            laid.gradients.finish()
        else:
            with pytest.raises(UsageError, match="ranks of tp computed other losses of the same rows"):
                laid.gradients.finish()

    run_threads(2, main)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", PROCESSES)
def test_a_compiled_model_over_ranks_is_the_same(transport: str) -> None:
    assert call("parallel_compile:compiled_is_the_same", 2, transport=transport) == [transport] * 2


def test_batch_norms_of_replicas_rows_are_refused() -> None:
    def main(comm: Communicator) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
        mesh, plan = Mesh(comm, dp=2), ParallelPlan(dp=2, precision="fp32")
        with pytest.raises(UsageError, match="1 is a BatchNorm1d in training: each replica would take the mean"):
            lay(model, mesh, plan, {"0": "whole"})
        lay(model.eval(), mesh, plan, {"0": "whole"})

    run_threads(2, main)
