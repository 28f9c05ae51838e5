"""ZeRO on ranks that are threads: equal to one process and to plain replicas, and its checkpoints fit any layout."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.axes import ordered
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan, Precision
from tilemesh.core.shard import Cut, Shard
from tilemesh.core.step.action import Action
from tilemesh.core.step.memory import StepBytes, memory_curve
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.gate import alone
from tilemesh.parallel.gate.cases import MODELS, Case, gate_plan
from tilemesh.parallel.gate.compare import Gate, GateResult
from tilemesh.parallel.gradients import Parts
from tilemesh.parallel.laid import StepPiece
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.parallel.shard import trained as trained_parameters
from tilemesh.parallel.zero import UNDER_WAY, RowsOfRanks, Zero
from tilemesh.parallel.zero3 import ZeroWeights
from tilemesh.runs.files import read_object
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.metrics import latest
from tilemesh.runs.names import CHECKPOINTS
from tilemesh.runs.reader import Reader
from tilemesh.train.config import OptimizerConfig, TrainConfig
from tilemesh.train.load import load
from tilemesh.train.offload import HostOptimizer
from tilemesh.train.optimizer import Optimizer
from tilemesh.train.rank import train_here

SMALL = (
    "model.layers=2,model.width=16,model.heads=4,model.kv_heads=2,model.mlp_width=36,model.context=16,"
    "train.steps=6,train.batch=8,checkpoint.every=0,evaluate.every=0,evaluate.sequences=4,sample.tokens=8,"
    "optimizer.warmup=2,optimizer.lr=0.01,train.trace_steps=0,train.device=cpu"
)


def gate(ranks: int, chosen: list[Case]) -> list[GateResult]:
    torch.set_num_threads(1)
    return run_threads(ranks, lambda comm: list(Gate(comm).run(chosen)), timeout_s=100)[0]


# Layouts ----------------------------------------------------------------------------------------------------------

LAYOUTS = [
    gate_plan(dp=4, zero=1),
    gate_plan(dp=4, accumulation=2, zero=2, zero_group=2),
    gate_plan(dp=2, tp=2, sequence=True, accumulation=2, zero=1),
    gate_plan(dp=2, tp=2, accumulation=2, zero=2),
]


def test_what_one_process_computes() -> None:
    results = gate(4, [Case(model, layout) for model, layout in zip(MODELS, LAYOUTS, strict=False)])
    assert len(results) == len(LAYOUTS)
    assert [result for result in results if not result.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_what_one_process_computes_for_every_model(precision: Precision) -> None:
    chosen = [Case(model, dataclasses.replace(layout, precision=precision)) for model in MODELS for layout in LAYOUTS]
    assert [result for result in gate(4, chosen) if not result.passed] == []


# Rows -------------------------------------------------------------------------------------------------------------


@given(
    shapes=some.lists(some.lists(some.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=4),
    dp=some.sampled_from([2, 4, 6]),
    tp=some.integers(1, 2),
    data=some.data(),
)
def test_rows_of_all_ranks_are_every_number_once(
    shapes: list[list[int]], dp: int, tp: int, data: some.DataObject
) -> None:
    axes = ordered({"dp": dp, "tp": tp})
    group = data.draw(some.sampled_from([size for size in range(2, dp + 1) if dp % size == 0]))
    rank = data.draw(some.integers(0, dp * tp - 1))
    cuts = (Cut("tp", 0),) if tp > 1 else ()
    shards = [Shard(f"p{n}", tuple(shape), axes, rank, cuts, ("dp",)) for n, shape in enumerate(shapes)]
    rows = RowsOfRanks(shards, group)
    whole = [torch.randn(shard.shape) for shard in shards]
    flat = torch.full((rows.numel,), math.nan)
    for number, values in enumerate(whole):
        rows.fill(flat, number, values)
    back = [torch.empty_like(values) for values in whole]
    rows.empty_into(flat, back)
    assert all(torch.equal(there, here) for there, here in zip(back, whole, strict=True))
    mine = flat[rows.begin :][: rows.counts[rows.index]]
    for number, piece in enumerate(rows.split(mine)):
        assert torch.equal(piece, rows.rows(number, whole[number]))
        assert rows.mine[number].rank == rank
        assert rows.mine[number].copies == dp // group


class Two(nn.Module):
    """`second` is used where it is asked for alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 5, dtype=torch.float64)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) + number)

    def forward(self, x: torch.Tensor, also: bool) -> torch.Tensor:
        x = self.first(x)
        return x.square().sum() + (self.second(x).sum() if also else 0)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("uses", [(True, False), (False, True), (False, False)])
def test_a_parameter_that_a_microbatch_does_not_reach(stage: int, uses: tuple[bool, bool]) -> None:
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    whole = Two()
    for row, also in enumerate((*uses, *uses)):
        torch.autograd.backward(whole(x[row : row + 1], also) / 4)
    norm = float(nn.utils.clip_grad_norm_(whole.parameters(), 1.0))

    def main(comm: Communicator) -> None:
        laid = lay(Two(), Mesh(comm, dp=2), ParallelPlan(dp=2, zero=stage, precision="fp64"), {}, bucket_bytes=64)
        for turn, also in enumerate(uses):
            row = 2 * comm.rank + turn
            laid.gradients.backward(laid.module(x[row : row + 1], also), 1, last=turn == 1)
        done = laid.gradients.finish(max_norm=1.0)
        assert done.norm == pytest.approx(norm, rel=1e-12)
        assert all(parameter.grad is None for parameter in laid.module.parameters())
        assert isinstance(laid.gradients, Zero)
        assert len(laid.gradients._spare) <= UNDER_WAY + 1
        found = laid.gather_gradients()
        for name, parameter in whole.named_parameters() if found is not None else ():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[name], wanted, rtol=1e-12, atol=1e-15)

    run_threads(2, main)


def _laid(comm: Communicator, model: nn.Module, **options: Any) -> object:
    plan = ParallelPlan(dp=comm.size, precision="fp32", **options)
    return lay(model, Mesh(comm, dp=comm.size), plan, {})


@pytest.mark.parametrize(
    ("ranks", "main", "words"),
    [
        (1, lambda comm: _laid(comm, nn.Linear(2, 2), zero=1), "zero is 1 and dp is 1: ZeRO shares among replicas"),
        (4, lambda comm: _laid(comm, nn.Linear(2, 2), zero=1, zero_group=3), "zero_group is 3 and dp is 4"),
        (
            2,
            lambda comm: lay(
                nn.Linear(2, 2), Mesh(comm, dp=2), ParallelPlan(dp=2, zero=1, precision="fp32"), {}, gradients="naive"
            ),
            "naive gradients with ZeRO-1: it exchanges them in buckets",
        ),
        (2, lambda comm: Zero(Parts({}, Mesh(comm, tp=2)), 1), "ZeRO shares among replicas and there is one"),
    ],
)
def test_what_zero_refuses(ranks: int, main: Callable[[Communicator], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_threads(ranks, main)


# Runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "".join(f"line {number}: the quick brown fox jumps over {number * 7} dogs\n" for number in range(400))
    )
    return str(path)


def made(text: str, mesh: str, *sets: str) -> TrainConfig:
    return load(mesh=mesh, sets=[SMALL, f"data.source={text}", *sets])


def trained(config: TrainConfig, folder: Path, **options: Any) -> dict[int, float]:
    """The loss of each step of a run on threads."""
    if not (folder / "config.toml").exists():
        new_run(TRAIN, config.to_toml(), folder)
    run_threads(config.plan.world, lambda comm: train_here(config, folder, comm, emit=lambda event: None, **options))
    return {line["step"]: line["loss"] for line in latest(folder) if line["kind"] == "step"}


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    reader = Reader(folder / CHECKPOINTS / f"step-{step:08d}")
    return {name: reader.whole(name) for name in reader.names}


def bits_of(precision: str) -> str:
    return f"plan.precision={precision},optimizer.clip=0,train.steps=4"


PRECISIONS = ("fp32", "bf16", "bf16-master", "fp16", "fp64")


@pytest.fixture(scope="module")
def plain(text: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Two plain replicas in each precision: the folder, and what `trained` says."""
    place = tmp_path_factory.mktemp("plain")
    runs = {name: made(text, "dp=2,tp=1", bits_of(name)) for name in PRECISIONS}
    return {name: (place / name, trained(config, place / name)) for name, config in runs.items()}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_replicas_compute_the_bits_of_two_plain_ones(
    text: str, tmp_path: Path, plain: dict[str, tuple[Path, Any]], precision: str, stage: int
) -> None:
    """A sum of two is the same in any order; the norm is not, so nothing is clipped. The first fp16 steps overflow."""
    losses = trained(made(text, "dp=2,tp=1", bits_of(precision), f"plan.zero={stage}"), tmp_path / "zero")
    folder, expected = plain[precision]
    assert losses == expected
    plain_state, zero_state = state(folder, 4), state(tmp_path / "zero", 4)
    assert plain_state.keys() == zero_state.keys()
    assert all(torch.equal(plain_state[name], zero_state[name]) for name in plain_state)
    folders = {"plain": folder, "zero": tmp_path / "zero"}
    held = {name: read_object(path / "summary.json")["memory_bytes"] for name, path in folders.items()}
    rows = 0.55  # half, but for rows that do not divide
    assert max(held["zero"]["optimizer"]) <= rows * max(held["plain"]["optimizer"])
    assert max(held["zero"]["gradients"]) <= rows * max(held["plain"]["gradients"])
    if stage == 3:
        assert max(held["zero"]["weights"]) <= rows * max(held["plain"]["weights"])
        # Each chunk prepares its passes anew: what they share (positions) is kept once per layer.
        assert max(held["zero"]["activations"]) <= 1.02 * max(held["plain"]["activations"])


@pytest.fixture(scope="module")
def stopped(text: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A run under ZeRO-2 that was stopped after three steps, and the losses of the one that was not."""
    folder = tmp_path_factory.mktemp("zero")
    config = made(text, "dp=2,tp=2", "plan.zero=2,plan.microbatch=2,plan.precision=fp64")
    losses = trained(config, folder / "whole")
    trained(config, folder / "stopped", stop_after=3)
    return folder, losses


@pytest.mark.parametrize(
    ("mesh", "sets"),
    [
        ("dp=2,tp=2", "plan.zero=1"),
        ("dp=4,tp=1", "plan.zero=2,plan.zero_group=2"),
        ("dp=4,tp=1", "plan.zero=3"),
        ("dp=2,tp=1,pp=2", "plan.zero=1"),
        ("dp=1,tp=2", ""),
        ("dp=2,tp=1", "plan.zero=0"),
    ],
)
def test_a_run_under_zero_goes_on_in_any_layout(
    text: str, stopped: tuple[Path, dict[int, float]], tmp_path: Path, mesh: str, sets: str
) -> None:
    folder, losses = stopped
    shutil.copytree(folder / "stopped", tmp_path / "run")
    config = load(resume=tmp_path / "run", mesh=mesh, sets=[sets] if sets else [])
    found = trained(config, tmp_path / "run", resume=True)
    assert list(found) == list(losses)
    assert list(found.values()) == pytest.approx(list(losses.values()), rel=1e-10)


def test_in_the_same_layout_it_goes_on_bit_for_bit(
    text: str, stopped: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    folder, losses = stopped
    config = load(resume=folder / "stopped")
    assert config.plan.zero == 2
    assert trained(config, folder / "stopped", resume=True) == losses
    ours, theirs = state(folder / "stopped", 6), state(folder / "whole", 6)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# Memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"prefetch": 0}, {"prefetch": 2, "accumulation": 2}, {"pp": 2, "accumulation": 4}])
def test_whole_weights_are_alive_as_the_list_says(fields: dict[str, Any]) -> None:
    """Bytes at every boundary of two actions, exactly those of the curve."""
    config = MODELS["gpt"].replace(layers=5, dropout=0.0)
    plan = ParallelPlan(dp=2, zero=3, precision="fp64", **fields)

    def main(comm: Communicator) -> None:
        laid = lay(Transformer(config, device="meta", dtype=torch.float64), Mesh(comm, **plan.axes), plan)
        assert isinstance(laid, Pipeline)
        gradients = laid.gradients
        assert isinstance(gradients, ZeroWeights)
        laid.initialize(1)
        program = laid.step.program
        sizes = [0.0] * program.chunks
        for chunk, buckets in gradients.reads.items():  # the head reads the first chunk's table, a bucket of its own
            sizes[chunk] = 8.0 * sum(bucket.rows.numel for bucket in buckets)
        seen = [gradients.gathered_bytes]

        def around(action: Action, do: Callable[[], None]) -> None:
            do()
            seen.append(gradients.gathered_bytes)

        laid.watch_actions(lambda text: None, around)
        generator = torch.Generator().manual_seed(1)
        pieces = []
        for turn in range(plan.accumulation):
            tokens = torch.randint(config.vocabulary, (2, 6), generator=generator)
            pieces.append(StepPiece(tokens, tokens.roll(1, 1), 2 * turn))
        laid.passes(pieces)
        curve = memory_curve(program, StepBytes(weights=sizes))[laid.mesh.pp.index]
        assert seen == curve
        assert plan.pp > 1 or max(curve) <= (1 + plan.prefetch) * max(sizes)
        assert seen[-1] == 0
        laid.gradients.finish()

    run_threads(plan.world, main)


@pytest.mark.parametrize("precision", ["fp32", "bf16-master"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_states_that_go_to_the_host_and_back_are_the_same_bits(precision: str, optimizer: str) -> None:
    """On a CPU the moves are copies; each part's states have memory of their own between steps."""

    def stepped(makes: Any, **options: Any) -> tuple[Any, list[torch.Tensor]]:
        model = Two().float() if precision == "fp32" else Two().bfloat16()
        made = makes(OptimizerConfig(name=optimizer), trained_parameters(model), precision, **options)  # type: ignore[arg-type]
        for step in range(3):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, 0.1 * (number + step + 1))
            made.step(0.1)
        return made, [value.detach().clone() for value in model.parameters()]

    plain, wanted = stepped(Optimizer)
    moved, found = stepped(HostOptimizer, part_bytes=100, moves=True)
    assert len(moved.parts) > 1
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    tensors = {name: value.clone() for name, _, value in moved.tensors()}
    assert tensors.keys() == {name for name, _, _ in plain.tensors()}
    assert all(torch.equal(value, tensors[name]) for name, _, value in plain.tensors())
    assert list(moved.kept()) == []
    again, _ = stepped(HostOptimizer, part_bytes=100, moves=True)
    again.load(3, {tuple(name.split(":", 1)): value for name, value in tensors.items()})
    assert all(torch.equal(value, tensors[name]) for name, _, value in again.tensors())


def test_a_run_with_its_states_on_the_host_is_the_same_run(text: str, tmp_path: Path) -> None:
    found = [
        trained(made(text, "dp=2,tp=1", f"plan.zero=1,plan.offload={what},train.steps=3"), tmp_path / f"run{what}")
        for what in ("", "optimizer")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("words", ["adapters", "adapters int4-g4"])
def test_zero3_cuts_weights_that_are_not_trained_too(words: str) -> None:
    """Of a frozen matrix, of codes and scales below adapters, each rank keeps its rows; all of it comes back whole."""
    config = MODELS["llama"].replace(layers=3)
    plan = gate_plan(2, zero=3)
    model = alone.whole_model(config, "fp64", words, "cpu")
    whole = model.state_dict()
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert not any(is_trained[name] for name in whole if name.endswith(("fc_q.weight", "fc_q.codes", "fc_q.scales")))

    def main(comm: Communicator) -> tuple[int, dict[str, torch.Tensor] | None]:
        laid = lay(alone.whole_model(config, "fp64", words, "cpu"), Mesh(comm, **plan.axes), plan)
        assert {name: mine.tensor.requires_grad for name, mine in laid.weights().items()} == is_trained
        assert not any(parameter.untyped_storage().nbytes() for parameter in laid.module.parameters())
        return sum(mine.tensor.nbytes for mine in laid.weights().values()), laid.gather()

    (first, gathered), (second, _) = run_threads(2, main)
    assert gathered is not None
    assert {name: torch.equal(gathered[name], value) for name, value in whole.items()} == dict.fromkeys(whole, True)
    nbytes = sum(value.nbytes for value in whole.values())
    assert first + second == nbytes
    assert abs(first - second) < nbytes / 8
