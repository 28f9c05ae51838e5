"""Asynchronous pipelines: lists that are proved, versions and delays as published, runs that equal a serial replay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.action import StepProgram
from tilemesh.core.step.book import asynchronous, build, find
from tilemesh.core.step.check import BrokenStepError, check
from tilemesh.core.step.pace import copies_of_weights
from tilemesh.core.step.passes import exchange
from tilemesh.core.step.program import step_program
from tilemesh.core.step.simulate import StepTimes, simulate
from tilemesh.core.step.versions import delays, held_versions
from tilemesh.data.corpus import open_corpus
from tilemesh.methods.versions import WeightUpdate, version_reads, version_services, versioned
from tilemesh.model import huggingface
from tilemesh.model.lora import attach
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.mesh import Axis
from tilemesh.parallel.run import StepRunner
from tilemesh.runs import folder as folders
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.reader import open_checkpoint
from tilemesh.train import load_config
from tilemesh.train.config import TrainConfig
from tilemesh.train.rank import train_here
from tilemesh.train.schedule import rate
from tilemesh.train.source import TextSource

RATE, WIDTH = 0.1, 6


def plain_sgd(parameters: Sequence[nn.Parameter], rate: Callable[[int], float]) -> WeightUpdate:
    """SGD that remembers nothing, at a rate by the number of the update."""

    def move(values: Sequence[Tensor], number: int, divisor: float) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            if parameter.grad is not None:
                value.data.sub_(parameter.grad, alpha=rate(number) / divisor)
                parameter.grad.zero_()

    return move


def made(name: str, ranks: int, microbatches: int) -> StepProgram:
    return build(name, ranks, find(name).microbatches_from(ranks, microbatches))


@given(st.sampled_from(asynchronous()), st.integers(1, 6), st.integers(1, 20))
def test_lists_are_proved_with_and_without_messages(name: str, ranks: int, microbatches: int) -> None:
    program = made(name, ranks, microbatches)
    check(program)
    whole = exchange(program)
    check(whole)
    assert max(held_versions(whole)) <= program.versions
    for rank, actions in enumerate(whole.actions):  # messages change no order of passes and updates
        assert [one for one in actions if one.kind not in ("SEND", "RECV")] == list(program.actions[rank])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_versions_delays_and_bubbles_are_as_published(ranks: int) -> None:
    many = 8 * ranks
    assert held_versions(build("pipedream", ranks, many)) == [ranks - rank for rank in range(ranks)]
    assert set(held_versions(build("pipedream-2bw", ranks, many))) == {2}
    assert set(held_versions(build("ampnet", ranks, many))) == {1}
    assert delays(build("ampnet", ranks, many)) == [ranks - rank for rank in range(ranks)]
    # 2BW: W(t+1) = W(t) - v grad f(W(t-1)), on every stage alike; version max(floor((k-1)/m) - 1, 0), k from 1.
    assert delays(build("pipedream-2bw", ranks, many)) == [2.0] * ranks
    reads = [version_reads(build("pipedream-2bw", ranks, many), chunk) for chunk in range(ranks)]
    for k in range(1, many + 1):
        assert {chunk_reads["F", k - 1] for chunk_reads in reads} == {max((k - 1) // ranks - 1, 0)}
    # One bubble in the whole run, that of filling and emptying: a synchronous step of p microbatches has it each time.
    times = StepTimes.even(ranks, 1.0, 1.0, 1.0)
    assert simulate(build("pipedream", ranks, many), times).bubble == pytest.approx((ranks - 1) / (many + ranks - 1))
    assert simulate(build("1f1b", ranks, ranks), times).bubble == pytest.approx((ranks - 1) / (2 * ranks - 1))


def test_a_wrong_version_is_refused() -> None:
    program = build("pipedream", 2, 4)
    forgets = dataclasses.replace(program, versions=1)
    with pytest.raises(BrokenStepError, match="reads version"):
        check(forgets)
    ampnet = build("ampnet", 2, 4)
    with pytest.raises(BrokenStepError, match="expected the same"):
        check(dataclasses.replace(ampnet, keeps_versions=True))
    with pytest.raises(UsageError, match="takes a multiple of 4, at least 4 microbatches: accumulation is 6, 8 is"):
        build("pipedream-2bw", 4, 6)


# ---- runs --------------------------------------------------------------------------------------------------------


def chunk_module(chunk: int, chunks: int) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            draw = torch.Generator().manual_seed(chunk)
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=draw) / 2)
    return module


def data(microbatch: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 + microbatch)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=draw), torch.randn(
        3, WIDTH, dtype=torch.float64, generator=draw
    )


class PlainPasses:
    """One linear layer with tanh; the last one has the loss."""

    def __init__(self, module: nn.Module, is_last: bool) -> None:
        self.module, self.is_last = module, is_last
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, microbatch: int, piece: int, x: Tensor | None, *, keeps: bool) -> Tensor | None:
        given = (data(microbatch)[0] if x is None else x.detach()).requires_grad_()
        out = torch.tanh(self.module(given))
        if self.is_last:
            out = (out - data(microbatch)[1]).square().mean()
        self.graphs[microbatch] = (given, out)
        return None if self.is_last else out.detach()

    def backward(self, microbatch: int, piece: int, gradient: Tensor | None, *, splits: bool) -> Tensor | None:
        given, out = self.graphs.pop(microbatch)
        out.backward(gradient)
        return given.grad

    def landing(self, microbatch: int, piece: int, of: str) -> Tensor:
        return torch.empty(3, WIDTH, dtype=torch.float64)


def run(program: StepProgram, warmup: int | None) -> list[tuple[list[Tensor], int]]:
    """On ranks that are threads: each chunk's last weights and how many versions were held."""

    def main(comm: Communicator) -> tuple[list[Tensor], int]:
        module = chunk_module(comm.rank, comm.size)
        passes = PlainPasses(module, comm.rank == comm.size - 1)
        chunks = versioned(
            program, {comm.rank: passes}, {comm.rank: module}, lambda own: plain_sgd(own, lambda update: RATE), warmup
        )
        StepRunner(program, comm, chunks, version_services(chunks))()
        kept = chunks[comm.rank].versions
        return kept.stored[kept.version], kept.most

    return run_threads(program.ranks, main)


def serial(program: StepProgram, warmup: int) -> list[list[Tensor]]:
    """The same by formulas, in one process: every version of every chunk is kept, and derivatives are written out."""
    chunks, taus = program.chunks, delays(program)
    history = [[[p.detach().clone() for p in chunk_module(c, chunks).parameters()]] for c in range(chunks)]
    changes = [[torch.zeros_like(p) for p in history[c][0]] for c in range(chunks)]
    reads = [version_reads(program, chunk) for chunk in range(chunks)]
    saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    back: dict[tuple[int, int], Tensor] = {}
    sums: list[list[Tensor]] = [[torch.zeros_like(p) for p in history[c][0]] for c in range(chunks)]
    updates = [sum(action.kind == "UPDATE" for action in actions) for actions in program.actions]
    share = updates[0] / program.microbatches
    slots = simulate(program, StepTimes.even(chunks, 1.0, 1.0, 1.0), keep_slots=True).slots
    for slot in slots:
        action, c = slot.action, slot.action.chunk
        if action.kind == "F":
            weight, bias = history[c][reads[c]["F", action.microbatch]]
            x = data(action.microbatch)[0] if not c else saved[c - 1, action.microbatch][1]
            saved[c, action.microbatch] = (x, torch.tanh(x @ weight.T + bias))
        elif action.kind == "B":
            x, out = saved[c, action.microbatch]
            if c == chunks - 1:
                dout = 2 * (out - data(action.microbatch)[1]) / out.numel()
            else:
                dout = back[c + 1, action.microbatch]
            inner = dout * (1 - out**2)
            weight = history[c][reads[c]["B", action.microbatch]][0]
            if program.name == "pipemare" and taus[c] > 1:
                weight = weight - (taus[c] - 1) * changes[c][0]
            back[c, action.microbatch] = inner @ weight
            sums[c] = [total + new for total, new in zip(sums[c], (inner.T @ x, inner.sum(0)), strict=True)]
        elif action.kind == "UPDATE":
            number, rate = len(history[c]) - 1, RATE
            if program.name == "pipemare":
                rate /= taus[c] ** (1 - min(number / max(1, warmup), 1.0))
                keep = math.exp(-2) ** (1 / max(1.0, taus[c] - 1))
                changes[c] = [keep * d - (1 - keep) * rate * g for d, g in zip(changes[c], sums[c], strict=True)]
            history[c].append([w - rate * g for w, g in zip(history[c][-1], sums[c], strict=True)])
            sums[c] = [torch.zeros_like(g) for g in sums[c]]
    assert share <= 1
    return [versions[-1] for versions in history]


@pytest.mark.parametrize("name", asynchronous())
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_on_ranks_equals_its_serial_replay(name: str, ranks: int) -> None:
    program = exchange(made(name, ranks, 24))
    found, wanted = run(program, warmup=8), serial(program, warmup=8)
    moved = 0.0
    for chunk, ((weights, most), exact) in enumerate(zip(found, wanted, strict=True)):
        assert most == held_versions(program)[chunk]
        for ours, theirs, first in zip(weights, exact, chunk_module(chunk, ranks).parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
            moved = max(moved, float((theirs - first.detach()).abs().max()))
    assert moved > 0.05


def test_the_four_differ() -> None:
    """Of two stages AMPNet is PipeDream: the first reads none of its weights on the way back."""
    found = {name: run(exchange(made(name, 4, 24)), warmup=8)[0][0][0] for name in asynchronous()}
    for name in found.keys() - {"pipedream"}:
        assert not torch.allclose(found[name], found["pipedream"], rtol=0, atol=1e-6), name


@given(st.sampled_from(asynchronous()), st.integers(2, 6), st.integers(1, 20))
def test_the_planner_counts_the_versions_that_are_held(name: str, ranks: int, microbatches: int) -> None:
    program = made(name, ranks, microbatches)
    copies = [copies_of_weights(name, rank, ranks, program.microbatches) for rank in range(ranks)]
    assert copies == [held + (name == "pipemare") for held in held_versions(program)]


def trained(
    name: str, mesh: str, folder: Path, adapters: Sequence[str], init: Path | None
) -> tuple[TrainConfig, dict[str, Tensor]]:
    """Two steps of plain SGD by `tilemesh train`: the configuration and the last weights.

    The text is always the same, and the rate so low that steps do not amplify how sums are rounded.
    """
    text = folder.with_suffix(".txt")
    text.write_text(" ".join(str(number**2 % 997) for number in range(5000)))
    config = load_config(
        sets=[
            "model.layers=2", "model.width=16", "model.heads=2", "model.context=8", "model.tied=false", "train.steps=2",
            "train.batch=16", "plan.microbatch=2", "plan.precision=fp64", "optimizer.clip=0", "optimizer.name=sgd",
            "optimizer.momentum=0", "optimizer.lr=0.1", "optimizer.weight_decay=0", "sample.tokens=0",
            "train.trace_steps=0", f"data.source={text}", f"plan.schedule={name}", "evaluate.every=0",
            *adapters,
        ],
        mesh=mesh, init=init,
    )  # fmt: skip
    folders.new_run(TRAIN, config.to_toml(), folder)
    run_threads(config.ranks, lambda comm: train_here(config, folder, comm))
    reader = open_checkpoint(folder)
    return config, {name[7:]: reader.whole(name) for name in reader.names if name.startswith("weight:")}


def learning(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("name", "mesh", "adapters"),
    [("pipedream", "pp=2", ()), ("pipedream-2bw", "pp=2", ()), ("pipedream", "dp=2,pp=2", ()),
     ("pipedream", "pp=2", ("lora.rank=2",))],
)  # fmt: skip
def test_training_equals_whole_gradients_at_mixed_versions(
    name: str, mesh: str, adapters: Sequence[str], tmp_path: Path
) -> None:
    """Each microbatch's gradient by plain autograd of the whole model, whose parts have the versions of the list."""
    init = tmp_path / "base" if adapters else None
    if init is not None:
        sizes = ["model.layers=2", "model.width=16", "model.heads=2", "model.context=8", "model.tied=false"]
        huggingface.save(Transformer(load_config(sets=sizes).model, seed=5, dtype=torch.float64), init)
    config, found = trained(name, mesh, tmp_path / "run", adapters, init)
    program, corpus = step_program(config.plan, 2).program, open_corpus(config.data)
    model = Transformer(config.model, seed=config.train.seed, dtype=torch.float64)
    if init is not None:
        model = huggingface.load(init, dtype=torch.float64)
        attach(model, config.lora, config.train.seed)
    home = {n: int(n.startswith(("layers.1", "final_norm", "output"))) for n, _ in model.named_parameters()}
    newest = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    reads = [version_reads(program, chunk) for chunk in (0, 1)]
    per_update = 2 if name == "pipedream-2bw" else 1
    alone = run_threads(1, lambda comm: comm)[0]
    plain = lay(model, Mesh(alone), ParallelPlan(precision="fp64"))
    replicas = [Axis("dp", config.plan.dp, index, (0,), alone) for index in range(config.plan.dp)]
    sources = [TextSource(config, corpus, replica, torch.device("cpu")) for replica in replicas]
    for step in (1, 2):
        history = [[{n: w for n, w in newest.items() if home[n] == chunk}] for chunk in (0, 1)]
        sums, count = {}, 0
        for number, batches in enumerate(zip(*(source.fetch(step) for source in sources), strict=True)):
            with torch.no_grad():
                for parameter, value in learning(model):
                    value.copy_(history[home[parameter]][reads[home[parameter]]["F", number]][parameter])
                    value.grad = None
            for tensors, _ in batches:
                total, targets = plain.loss(*tensors)
                total.backward()
                count += int(targets)
            for parameter, value in learning(model):
                sums[parameter] = sums.get(parameter, 0) + value.grad
            if (number + 1) % per_update == 0:
                move = float(np.float32(rate(step - 1, 2, config.optimizer))) / count
                for chunk in (0, 1):
                    history[chunk].append({n: w - move * sums[n] for n, w in history[chunk][-1].items()})
                sums, count = {}, 0
        newest = {**history[0][-1], **history[1][-1]}
    moved = max(float((newest[n] - p.detach()).abs().max()) for n, p in learning(model))
    assert moved > 1e-4
    assert found.keys() == newest.keys()
    for parameter, value in found.items():
        torch.testing.assert_close(value, newest[parameter], rtol=0, atol=1e-10)
