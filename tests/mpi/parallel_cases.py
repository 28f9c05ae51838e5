"""What a laid model must get right over every transport: parts that run on threads and inside processes alike.

Each part takes a communicator and asserts. Threads run them directly; of processes, ranks that are kept for all tests
(`started.py`) are called with the part's name: starting ranks is most of the cost.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paged_cache import through_pages, through_rows
from started import ranks_of
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.comm import Communicator, connect
from tilemesh.comm.schedules.book import build
from tilemesh.comm.schedules.collectives import BLOCKED, cut, layout
from tilemesh.comm.schedules.cost import count
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan, Precision
from tilemesh.model.cache import KeyValueCache
from tilemesh.model.config import ModelConfig
from tilemesh.model.loss import IGNORED, loss_sum
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.exchanges import Exchange, embedding_exchanges, head_exchanges, layer_exchanges
from tilemesh.model.work.task import Task
from tilemesh.parallel import ColumnSplit, Mesh, Region, collect, lay, place, tensor
from tilemesh.parallel.agree import agree
from tilemesh.parallel.buckets import Bucketed
from tilemesh.parallel.gate import alone
from tilemesh.parallel.gate.cases import MODELS, Case, gate_plan
from tilemesh.parallel.gate.compare import Gate
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.tensor import Seams

RANKS = {"mpi": 4, "torch": 2}


def close(got: Any, wanted: Any, bound: float = 1e-12) -> None:
    got, wanted = (np.asarray(x.detach() if isinstance(x, Tensor) else x) for x in (got, wanted))
    assert got.shape == wanted.shape
    scale = np.linalg.norm(wanted)
    assert np.linalg.norm(got - wanted) <= bound * max(scale, 1e-300), np.linalg.norm(got - wanted) / scale


def laid_of(
    comm: Communicator,
    model: str | ModelConfig,
    dp: int,
    tp: int,
    sequence: bool = False,
    precision: Precision = "fp64",
    **options: Any,
) -> Laid:
    """A gate's model laid on all ranks, in float64 unless said, with weights of which none is 0 or 1."""
    config = MODELS[model] if isinstance(model, str) else model
    mesh = Mesh(comm, dp=dp, tp=tp)
    plan = ParallelPlan(dp=dp, tp=tp, sequence_parallel=sequence, precision=precision)
    stored = torch.bfloat16 if precision == "bf16-master" else alone.weights_dtype(precision)
    laid = lay(Transformer(config, device="meta", dtype=stored), mesh, plan, **options)
    laid.load(alone.start(config, "fp64"))
    return laid


def whole_of(model: str | ModelConfig) -> Transformer:
    config = MODELS[model] if isinstance(model, str) else model
    whole = Transformer(config, dtype=torch.float64)
    whole.load_state_dict(alone.start(config, "fp64"))
    return whole


def shapes(ranks: int) -> list[tuple[int, int]]:
    return [(ranks // tp, tp) for tp in range(1, ranks + 1) if ranks % tp == 0]


# Groups -----------------------------------------------------------------------------------------------------------


def groups(comm: Communicator) -> None:
    for dp, tp in shapes(comm.size):
        mesh = Mesh(comm, dp=dp, tp=tp)
        assert (mesh.tp.index, mesh.dp.index) == (comm.rank % tp, comm.rank // tp)
        assert mesh.tp.members == tuple(range(comm.rank // tp * tp, comm.rank // tp * tp + tp))
        assert mesh.dp.members == tuple(range(comm.rank % tp, comm.size, tp))
        for axis in (mesh.tp, mesh.dp):
            assert (axis.comm.size, axis.comm.rank) == (axis.size, axis.index)
            assert axis.comm.all_gather(np.array([comm.rank])).tolist() == list(axis.members)
            assert axis.members[axis.index] == comm.rank
        # Neighbours along one axis never hear those along the other.
        assert mesh.tp.comm.all_reduce(np.array([float(mesh.dp.index)]))[0] == tp * mesh.dp.index
        assert mesh.dp.comm.all_reduce(np.array([float(mesh.tp.index)]))[0] == dp * mesh.tp.index
        mesh.close()
    alone_axis = Mesh(comm, dp=comm.size).tp
    before = comm.sent.nbytes
    assert alone_axis.comm.all_reduce(np.ones(3)).tolist() == [1, 1, 1]
    assert (alone_axis.size, alone_axis.comm.sent.nbytes, comm.sent.nbytes - before) == (1, 0, 0)
    with pytest.raises(UsageError) as caught:
        Mesh(comm, dp=comm.size, tp=2)
    assert f"needs {2 * comm.size} ranks and there are {comm.size}" in str(caught.value)


def configurations_differ(comm: Communicator) -> None:
    agree(comm, {"train.lr": 0.1, "model.layers": 2})
    with pytest.raises(UsageError) as caught:
        agree(comm, {"model.layers": 2, "train.lr": 0.1 if comm.rank != comm.size - 1 else 0.2})
    assert f"train.lr is 0.1 on rank 0 and 0.2 on rank {comm.size - 1}" in str(caught.value)
    with pytest.raises(UsageError) as caught:
        Mesh(comm, dp=comm.size if comm.rank else 1, tp=1 if comm.rank else comm.size)
    assert f"mesh.dp is 1 on rank 0 and {comm.size} on rank 1" in str(caught.value)
    config = MODELS["gpt"] if comm.rank else MODELS["gpt"].replace(norm_epsilon=1e-6)
    mesh = Mesh(comm, dp=comm.size)
    with pytest.raises(UsageError) as caught:
        lay(Transformer(config), mesh, ParallelPlan(dp=comm.size, precision="fp32"))
    assert "model.norm_epsilon is 1e-06 on rank 0 and 1e-05 on rank 1" in str(caught.value)


# Sharding ---------------------------------------------------------------------------------------------------------


def sharding(comm: Communicator) -> None:
    """What one layout gathers another takes, to the bit: any checkpoint fits any layout."""
    for model in ("gpt", "llama"):
        state = alone.start(MODELS[model], "fp64")
        for dp, tp in shapes(comm.size):
            laid = laid_of(comm, model, dp, tp)
            whole = laid.gather()
            assert (whole is None) == (comm.rank != 0)
            if whole is not None:
                assert whole.keys() == state.keys()
                assert all(torch.equal(whole[name], state[name]) for name in state)
            other = laid_of(comm, model, comm.size, 1)
            other.load({name: torch.zeros_like(value) for name, value in state.items()})
            other.load(whole, root=0)
            for name, parameter in other.module.named_parameters():
                assert torch.equal(parameter, state[name])
            # Every number is written by exactly one rank of the mesh.
            written = np.zeros(sum(value.numel() for value in state.values()))
            start = 0
            for name, value in state.items():
                here = written[start : start + value.numel()].reshape(value.shape)
                for _, there in laid.shards[name].boxes if laid.shards[name].writes else ():
                    here[there.slices] += 1
                start += value.numel()
            assert (comm.all_reduce(written) == 1).all()
    # What is wrong with the one state there is, every rank hears: none waits for a tensor that never comes.
    last, name = comm.size - 1, "token_embedding.weight"
    wrong: list[tuple[dict[str, Tensor] | None, str]] = [
        (None, "load without a state"),
        ({**state, "nonsense": state[name]}, "unknown parameter 'nonsense'"),
        ({key: value for key, value in state.items() if key != name}, f"the state lacks {name}"),
        ({**state, name: state[name][1:]}, f"{name}: the whole array has shape"),
    ]
    for given, message in wrong:
        with pytest.raises(UsageError) as caught:
            other.load(given if comm.rank == last else None, root=last)
        assert message in str(caught.value)
    fresh = laid_of(comm, "llama", 1, comm.size)
    fresh.initialize(seed=5)
    whole = fresh.gather()
    if whole is not None:
        wanted = Transformer(MODELS["llama"], seed=5, dtype=torch.float64).state_dict()
        assert all(torch.equal(whole[name], wanted[name]) for name in wanted)


# Forward ----------------------------------------------------------------------------------------------------------


def exchanges(comm: Communicator) -> None:
    """The four exchanges against what they say, for numpy and torch, and as adjoint pairs."""
    n, me = comm.size, comm.rank
    for total in (2 * n, 2 * n + 1):
        rng = np.random.default_rng(0)
        whole = rng.normal(size=(3, 2, total))
        partials = rng.normal(size=(n, 3, 2, total))
        lo = sum(cut(total, n)[:me])
        mine = slice(lo, lo + cut(total, n)[me])
        for convert in (np.asarray, torch.from_numpy, lambda a: np.asfortranarray(a).astype(np.float32)):
            x, partial = convert(whole[..., mine].copy()), convert(partials[me].copy())
            joined = collect.forward_input(x, comm, total=total)
            assert type(joined) is type(x)
            assert joined.dtype == x.dtype
            assert np.array_equal(np.asarray(joined), np.asarray(convert(whole.copy())))
            assert np.array_equal(
                np.asarray(collect.forward_output(x, comm, split="output", total=total)), np.asarray(joined)
            )
            summed = collect.forward_output(partial, comm)
            close(summed, partials.sum(0), 1e-6)
            close(collect.backward_x(partial, comm), partials.sum(0)[..., mine], 1e-6)
            before = comm.sent.nbytes
            own = collect.backward_output(joined, comm)
            assert np.array_equal(np.asarray(own), np.asarray(x))
            assert comm.sent.nbytes == before
        # <gather(x), g> over all ranks' g equals <x, its adjoint of g>.
        left = (np.stack([whole] * n) * partials).sum()
        right = comm.all_reduce(np.array((whole[..., mine] * collect.backward_x(partials[me], comm)).sum()))
        assert abs(left - right) < 1e-9
        # A joined output is one value that all ranks have, and so is its gradient.
        left = (whole * partials[0]).sum()
        right = comm.all_reduce(np.array((whole[..., mine] * collect.backward_output(partials[0], comm)).sum()))
        assert abs(left - right) < 1e-9
    half = torch.full((2, 1), float(me + 1), dtype=torch.bfloat16)
    assert collect.forward_input(half, comm).dtype == torch.bfloat16
    with pytest.raises(UsageError) as caught:
        collect.forward_output(half, comm, split="both")
    assert "unknown split 'both'" in str(caught.value)
    for nothing in ([1.0], np.array(1.0)):
        with pytest.raises(UsageError):
            collect.backward_output(nothing, comm)


def forward(comm: Communicator) -> None:
    """Losses, logits and generation of a laid model against the whole one's. Of routers' losses the gate knows."""
    for config in MODELS.values():
        model = config.replace(balance_loss=0.0, router_z_loss=0.0)
        whole = whole_of(model)
        tokens_BT, targets_BT = alone.batch(whole.config, 0)
        wanted, wanted_count = loss_sum(whole(tokens_BT, dropout_seed=3), targets_BT)
        for sequence in (False, True) if comm.size > 1 else (False,):
            laid = laid_of(comm, model, 1, comm.size, sequence)
            total, counted = laid.loss(tokens_BT, targets_BT, dropout_seed=3)
            close(total, wanted)
            assert counted == wanted_count
            if comm.backend != "threads":  # recomputing imports all that compiles, which takes seconds in each process
                continue
            laid.recompute_every = 1
            close(laid.loss(tokens_BT, targets_BT, dropout_seed=3)[0], wanted)
    whole.eval()
    with torch.no_grad():
        close(laid.logits(tokens_BT), whole(tokens_BT))
    assert laid.module.training


def cached(comm: Communicator) -> None:
    """Generation over ranks, each with a cache of its own heads, for sequences of different lengths in one pass."""
    for model in ("gpt", "llama"):
        whole = whole_of(model).eval()
        tokens_BT, _ = alone.batch(whole.config, 0)
        sequences = [tokens_T[:length] for tokens_T, length in zip(tokens_BT, (6, 9, 1), strict=False)]
        laid = laid_of(comm, model, 1, comm.size, sequence=comm.size > 1)

        def logits(tokens_BT: Tensor, cache: KeyValueCache, laid: Laid = laid) -> Tensor:
            return laid.logits(tokens_BT, cache=cache)

        capacity = whole.config.context
        paged = through_pages(logits, sequences, capacity, "packed", seed=1)
        dense = through_rows(logits, sequences, capacity, seed=3)
        for tokens_T, *made in zip(sequences, paged, dense, strict=True):
            with torch.no_grad():
                wanted_TV = whole(tokens_T[None])[0]
            for logits_TV in made:
                close(logits_TV, wanted_TV)


# Backward ---------------------------------------------------------------------------------------------------------


class Mine(nn.Module):
    """A user's own module: a fused q, k, v, a parameter inside the region, a layer nobody uses, an output to join."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 16)
        self.block = Block()
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        y: Tensor = self.out(x + self.block(x))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.qkv = nn.Linear(16, 48)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.back = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)
        z: Tensor = self.back(y.transpose(1, 2).flatten(-2))
        return z


GENERATOR = threading.Lock()  # threads share torch's: one at a time draws weights from it
SPLITS: dict[str, Any] = {
    "table": "vocabulary",
    "block": Region(divides=("heads",)),
    "block.qkv": ColumnSplit(parts=3),
    "block.back": "row",
    "out": ColumnSplit(joins=True),
}


def made(seed: int = 0) -> Mine:
    torch.manual_seed(seed)
    return Mine().double()


def own_module(comm: Communicator) -> None:
    """A user's module by a map of splits: gradients as in one process, with what is unused as zeros."""
    tokens = torch.arange(2 * 5).reshape(2, 5) % 13
    with GENERATOR:
        whole = made()
    loss = whole(tokens).square().sum()
    loss.backward()
    for way, bucket_bytes in (("bucketed", 1), ("bucketed", 1 << 20), ("naive", 1)):
        with GENERATOR:
            local = made()
        laid = lay(
            local, Mesh(comm, tp=comm.size), ParallelPlan(tp=comm.size, precision="fp64"), SPLITS,
            gradients=way, bucket_bytes=bucket_bytes,
        )  # fmt: skip
        mine = laid.module(tokens).square().sum()
        close(mine, loss)
        laid.gradients.backward(mine, 1)
        laid.gradients.finish()
        found = laid.gather({name: p.grad for name, p in laid.module.named_parameters()})
        for name, parameter in whole.named_parameters() if found is not None else ():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            close(found[name], wanted)
        assert torch.equal(local.unused.weight.grad, torch.zeros(3, 3).double())


def buckets(comm: Communicator) -> None:
    """Bucketed, in any size, is the naive exchange; what is launched goes in one order; accumulation sends once."""
    config = MODELS["post"]
    steps = {}
    for bucket_bytes in (None, 1, 3000, 1 << 30):
        way = {"gradients": "naive"} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
        laid = laid_of(comm, config, comm.size, 1, algorithm="ring", **way)
        tokens_BT, targets_BT = alone.batch(config, 0)
        order: list[int] = []
        if isinstance(laid.gradients, Bucketed):
            _note_order(laid.gradients, order)
        rows = cut(len(tokens_BT), comm.size)
        first = sum(rows[: comm.rank])
        sent = laid.mesh.dp.comm.sent.nbytes
        for turn in range(2):
            here = slice(first + turn, first + turn + 1)
            total, counted = laid.loss(tokens_BT[here], targets_BT[here], dropout_seed=1)
            laid.gradients.backward(total, counted, last=turn == 1)
            if turn == 0:
                assert laid.mesh.dp.comm.sent.nbytes == sent, "only the last microbatch exchanges"
        done = laid.gradients.finish(max_norm=0.01)
        assert order == sorted(order)
        if isinstance(laid.gradients, Bucketed):
            assert len(order) == len(laid.gradients.buckets)
            for parameter in laid.module.parameters():
                assert any(_is_view(parameter.grad, flat) for flat in laid.gradients.buffers)
        gradients = laid.gather({name: p.grad for name, p in laid.module.named_parameters()})
        steps[bucket_bytes] = (done, gradients)
    naive, wanted = steps[None]
    for done, gradients in steps.values():
        assert done.tokens == naive.tokens
        assert abs(done.norm - naive.norm) < 1e-12 * naive.norm
        if gradients is not None:
            size = torch.stack([g.norm() for g in gradients.values()]).norm()
            close(size, 0.01, 1e-3)  # clipped
            for name in wanted:
                close(gradients[name], wanted[name], 1e-11)


def _note_order(gradients: Bucketed, order: list[int]) -> None:
    exchange = gradients.exchange

    def noted(bucket: Any) -> Any:
        order.append(next(i for i, known in enumerate(gradients.buckets) if known is bucket))
        return exchange(bucket)

    gradients.exchange = noted  # type: ignore[method-assign]


def _is_view(view: Tensor | None, flat: Tensor) -> bool:
    return view is not None and view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def readiness_differs(comm: Communicator) -> None:
    """Ranks whose gradients come in different orders, and that use different parameters, still agree."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            first, second = (self.a, self.b) if comm.rank % 2 else (self.b, self.a)
            y: Tensor = second(first(x))
            return y + self.c(x) if comm.rank == 0 else y

    model = Switch()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, 16).reshape(4, 4) + index)
    laid = lay(model, Mesh(comm, dp=comm.size), ParallelPlan(dp=comm.size, precision="fp64"), {}, bucket_bytes=1)
    assert len(laid.gradients.buckets) == 3
    x = torch.arange(8.0, dtype=torch.float64).reshape(2, 4) + comm.rank
    for _ in range(3):
        laid.gradients.backward(laid.module(x).sum(), 2)
        laid.gradients.finish()
    everyone = comm.all_gather(torch.cat([p.grad.flatten() for p in model.parameters()])[None])
    assert (everyone == everyone[0]).all()
    assert float(everyone[0][-16:].abs().sum()) > 0


# The wire and memory ----------------------------------------------------------------------------------------------


def bytes_on_the_wire(comm: Communicator) -> None:
    """What the transports counted in a step is the formula's list, byte for byte, for every layout."""
    for model, layers in (("gpt", 1), ("gpt", 2), ("llama", 2)):
        config = MODELS[model].replace(layers=layers)
        for dp, tp in shapes(comm.size):
            for sequence in (False, True) if tp > 1 else (False,):
                laid = laid_of(comm, config, dp, tp, sequence, algorithm="ring", bucket_bytes=3000)
                _count_step(comm, laid, config, rows=3, tokens=8, turns=2)
    # Autocast: what is joined in 16 bits, what is summed in backward in 32; 16-bit weights: everything in 16.
    everywhere = comm.backend == "threads"  # over processes one of them: what is counted is the same there
    for precision in ("bf16", "bf16-master") if everywhere else ("bf16",):
        for sequence in (False, True) if everywhere else (True,):
            for model in ("gpt", "query") if everywhere else ("gpt",):
                laid = laid_of(comm, model, 1, comm.size, sequence, precision, algorithm="ring", bucket_bytes=3000)
                _count_step(comm, laid, MODELS[model], rows=2, tokens=8, turns=1)


def _count_step(comm: Communicator, laid: Laid, config: ModelConfig, rows: int, tokens: int, turns: int) -> None:
    mesh = laid.mesh
    assert isinstance(laid.gradients, Bucketed)
    counted = {"tp": mesh.tp.comm, "dp": mesh.dp.comm, "mesh": comm}
    counted |= {
        f"tp {blocks[0][1]}": group
        for blocks, group in laid.gradients.groups.items()
        if group is not mesh.tp.comm and dict(blocks).get("tp")
    }
    before = {axis: group.sent.nbytes for axis, group in counted.items()}
    tokens_BT = torch.arange(rows * tokens).reshape(rows, tokens) % config.vocabulary
    for turn in range(turns):
        total, count_ = laid.loss(tokens_BT, tokens_BT, dropout_seed=turn)
        laid.gradients.backward(total, count_, last=turn == turns - 1)
    laid.gradients.finish(1.0)
    sent = {axis: group.sent.nbytes - before[axis] for axis, group in counted.items()}
    plan = dataclasses.replace(laid.plan, microbatch=rows)
    task = Task.of(plan, tokens, "eager", gpu=False)
    ends = [*embedding_exchanges(config, task), *head_exchanges(config, task)]
    exchanges = turns * (ends + config.layers * list(layer_exchanges(config, task)))
    for bucket in laid.gradients.buckets:
        for axis, size in (("dp", mesh.dp.size), *bucket.copies_summed):
            named = axis if size == mesh.axis(axis).size else f"{axis} {size}"
            numbers, itemsize = bucket.flat.numel(), bucket.flat.element_size()
            exchanges.append(Exchange("gradients", named, "all_reduce", numbers, itemsize))
    exchanges.append(Exchange("loss, tokens and norm", "mesh", "all_reduce", 3, 8))
    wanted = dict.fromkeys(counted, 0)
    for exchange in exchanges:
        wanted[exchange.axis] += _ring_bytes(counted[exchange.axis], exchange)
    assert sent == wanted, (laid.plan.describe(), sent, wanted)
    # And the closed form of the whole: activations cost every block the same, with sequence parallelism or without.
    if mesh.tp.size > 1 and laid.plan.precision == "fp64":
        share = (mesh.tp.size - 1) / mesh.tp.size
        activations = rows * tokens * config.width * 8
        by_hand = turns * share * (2 * activations * (4 * config.layers + 2) + 2 * 3 * rows * tokens * 8)
        whole = (("tp", mesh.tp.size),)
        partial = sum(b.flat.numel() for b in laid.gradients.buckets if b.copies_summed == whole)
        assert partial % mesh.tp.size == 0
        assert sent["tp"] == by_hand + 2 * share * partial * 8


def _ring_bytes(comm: Communicator, one: Exchange) -> int:
    """What this rank sends in the ring's schedule of that collective, as the proved schedule itself says."""
    if comm.size == 1:
        return 0
    sizes: tuple[int, ...] = (one.elements,)
    if one.collective in BLOCKED:
        sizes = cut(one.elements, comm.size)
    schedule = build(one.collective, "ring", comm.size)
    place = layout(one.collective, comm.rank, 0, comm.size, schedule.chunks, sizes, ())
    return count(schedule, lambda _: place, one.itemsize)[comm.rank].nbytes


def loss_memory(comm: Communicator) -> None:
    """The loss holds nothing the size of all logits. Of processes alone: threads share their memory."""
    if comm.backend == "threads" or not Path("/proc/self/clear_refs").exists():
        return
    positions, vocabulary = 1024, 16384 * comm.size
    local = positions * vocabulary // comm.size * 4
    logits = torch.zeros(1, positions, vocabulary // comm.size, requires_grad=True)
    targets = torch.arange(positions)[None] * 7 % vocabulary
    targets[0, :9] = IGNORED
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    start = _status("VmRSS")
    total, _ = tensor.vocabulary_loss(logits, targets, Seams(comm), vocabulary)
    total.backward()
    close(total.double(), (positions - 9) * np.log(vocabulary), 1e-5)
    peak = _status("VmHWM") - start
    # One array from forward to backward, which becomes the gradient; a second for what comes and goes.
    assert peak < 2.5 * local, f"{peak / local:.2f} times this rank's logits"
    assert comm.size < 3 or 2.5 * local < positions * vocabulary * 4  # on two ranks it says little, and is still true


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def placed_module(comm: Communicator) -> None:
    """A traced module on all ranks: two of tp, the others of dp; one table is cut unevenly."""
    torch.manual_seed(comm.rank)  # rank 0's weights count
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    tokens = torch.arange(8) % 7
    pins = {"input0": "dp:S0", "0.weight": "tp:S0", "1.weight": "tp:S0"}
    laid = place(model, Mesh(comm, dp=comm.size // 2, tp=2), pins, [tokens])
    single = None
    if comm.rank == 0:
        single = model
    for module in (laid, single):
        if module is not None:
            optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
            for _ in range(3):
                optimizer.zero_grad()
                module(tokens).square().mean().backward()
                optimizer.step()
    state = laid.gather()
    if single is not None and state is not None:
        for name, value in single.state_dict().items():
            close(state[name], value)


PARTS: dict[str, Callable[[Communicator], None]] = {
    part.__name__: part
    for part in (
        groups, configurations_differ, sharding, exchanges, forward, cached, own_module, buckets, readiness_differs,
        bytes_on_the_wire, loss_memory, placed_module,
    )
}  # fmt: skip


def small_gate(comm: Communicator) -> None:
    layouts = (
        gate_plan(1, 4, True),
        gate_plan(2, 2, False, 2),
        gate_plan(2, 2, True),
        gate_plan(4, 1, False, 2),
        gate_plan(1, 2, True, 2),
        gate_plan(2, 2, True, 2, zero=2),
        gate_plan(2, 1, False, 2, zero=1),
        gate_plan(1, 2, True, 4, 2, "zb-v"),
        gate_plan(1, 1, False, 4, 2, "dualpipe"),
    )
    fit = [chosen for chosen in layouts if chosen.world <= comm.size]
    # In turn: every model on every layout is `test_the_whole_gate`, which is slow.
    every = [Case(("gpt", "llama")[turn % 2], chosen) for turn, chosen in enumerate(fit)]
    spread = (gate_plan(2, accumulation=2, ep=2), gate_plan(4, ep=2, zero=2))
    every += [Case("spread", chosen) for chosen in spread if chosen.world <= comm.size]
    for result in Gate(comm).run(every):
        assert result.passed, f"{result}"


def on_a_rank(part: str) -> str:
    """One part on a communicator of its own; which backend it ran over."""
    torch.set_num_threads(1)
    with connect(timeout_s=100.0) as comm:
        (small_gate if part == "gate" else PARTS[part])(comm)
        return comm.backend


def require_part(transport: str, part: str) -> None:
    ranks = ranks_of(transport, RANKS[transport])
    assert ranks.call("parallel_cases:on_a_rank", part) == [transport] * ranks.ranks
