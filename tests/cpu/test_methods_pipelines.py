"""Asynchronous pipelines: lists that are proved, versions and delays as published, runs that equal a serial replay."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.action import StepProgram
from tilemesh.core.step.asynchronous import ASYNCHRONOUS, asynchronous, delays, held_versions
from tilemesh.core.step.check import BrokenStepError, check
from tilemesh.core.step.passes import exchange
from tilemesh.core.step.schedules import one_f_one_b
from tilemesh.core.step.simulate import StepTimes, simulate
from tilemesh.methods.versions import VersionServices, run_pipeline, version_reads, versioned
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.laid import StepPiece
from tilemesh.parallel.run import StepRunner

RATE, WIDTH = 0.1, 6


def made(name: str, ranks: int, microbatches: int) -> StepProgram:
    per_update = ranks if name == "pipedream-2bw" else 1
    return asynchronous(name, ranks, -(-microbatches // per_update) * per_update, per_update)


@given(st.sampled_from(ASYNCHRONOUS), st.integers(1, 6), st.integers(1, 20))
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
    assert held_versions(asynchronous("pipedream", ranks, many)) == [ranks - rank for rank in range(ranks)]
    assert set(held_versions(asynchronous("pipedream-2bw", ranks, many, ranks))) == {2}
    assert set(held_versions(asynchronous("ampnet", ranks, many))) == {1}
    assert delays(asynchronous("ampnet", ranks, many)) == [ranks - rank for rank in range(ranks)]
    # 2BW: W(t+1) = W(t) - v grad f(W(t-1)), on every stage alike; version max(floor((k-1)/m) - 1, 0), k from 1.
    assert delays(asynchronous("pipedream-2bw", ranks, many, ranks)) == [2.0] * ranks
    reads = [version_reads(asynchronous("pipedream-2bw", ranks, many, ranks), chunk) for chunk in range(ranks)]
    for k in range(1, many + 1):
        assert {chunk_reads["F", k - 1] for chunk_reads in reads} == {max((k - 1) // ranks - 1, 0)}
    # One bubble in the whole run, that of filling and emptying: a synchronous step of p microbatches has it each time.
    times = StepTimes.even(ranks, 1.0, 1.0, 1.0)
    assert simulate(asynchronous("pipedream", ranks, many), times).bubble == pytest.approx(
        (ranks - 1) / (many + ranks - 1)
    )
    assert simulate(one_f_one_b(ranks, ranks), times).bubble == pytest.approx((ranks - 1) / (2 * ranks - 1))


def test_a_wrong_version_is_refused() -> None:
    program = asynchronous("pipedream", 2, 4)
    forgets = dataclasses.replace(program, versions=1)
    with pytest.raises(BrokenStepError, match="reads version"):
        check(forgets)
    ampnet = asynchronous("ampnet", 2, 4)
    with pytest.raises(BrokenStepError, match="expected the same"):
        check(dataclasses.replace(ampnet, keeps_versions=True))
    for wrong in (("pipedream-2bw", 4, 8, 2), ("ampnet", 2, 4, 2), ("gpipe", 2, 4, 1), ("ampnet", 0, 4, 1)):
        with pytest.raises(UsageError):
            asynchronous(*wrong)


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
        chunks = versioned(program, {comm.rank: passes}, {comm.rank: module}, lambda update: RATE, warmup)
        StepRunner(program, comm, chunks, VersionServices(chunks))()
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


@pytest.mark.parametrize("name", ASYNCHRONOUS)
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
    found = {name: run(exchange(made(name, 4, 24)), warmup=8)[0][0][0] for name in ASYNCHRONOUS}
    for name in ASYNCHRONOUS[1:]:
        assert not torch.allclose(found[name], found["pipedream"], rtol=0, atol=1e-6), name


CONFIG = ModelConfig(layers=2, width=16, heads=2, vocabulary=32, context=8, tied=False)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_a_transformer_equals_whole_gradients_at_mixed_versions(name: str) -> None:
    """Each microbatch's gradient by plain autograd of the whole model, whose parts have the versions of the list."""
    program = exchange(made(name, 2, 8))
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (8, 2, 9), generator=draw)
    pieces = [StepPiece(one[:, :-1], one[:, 1:], 2 * number) for number, one in enumerate(tokens)]

    def main(comm: Communicator) -> tuple[dict[str, Tensor], int]:
        model = Transformer(CONFIG, seed=1, dtype=torch.float64)
        plan = ParallelPlan(pp=2, accumulation=8, microbatch=2, precision="fp64")
        laid = lay(model, Mesh(comm, pp=2), plan)
        (chunk,) = run_pipeline(laid, program, pieces, lambda update: RATE).values()
        return {n: p.detach().clone() for n, p in laid.module.named_parameters()}, chunk.versions.most

    found = run_threads(2, main)
    model = Transformer(CONFIG, seed=1, dtype=torch.float64)
    home = {parameter: chunk for chunk, (weights, _) in enumerate(found) for parameter in weights}
    history = [[{n: p.detach().clone() for n, p in model.named_parameters() if home[n] == c}] for c in (0, 1)]
    per_update = 2 if name == "pipedream-2bw" else 1
    sums: dict[str, Tensor] = {}
    reads = [version_reads(program, chunk) for chunk in (0, 1)]
    plain = lay(model, Mesh(run_threads(1, lambda comm: comm)[0]), ParallelPlan(precision="fp64"))
    for number, piece in enumerate(pieces):
        with torch.no_grad():
            for parameter, value in model.named_parameters():
                value.copy_(history[home[parameter]][reads[home[parameter]]["F", number]][parameter])
                value.grad = None
        total, count = plain.loss(piece.tokens, piece.targets)
        total.backward()
        for parameter, value in model.named_parameters():
            sums[parameter] = sums.get(parameter, 0) + value.grad / (int(count) * per_update)
        if (number + 1) % per_update == 0:
            for chunk in (0, 1):
                history[chunk].append({n: w - RATE * sums[n] for n, w in history[chunk][-1].items()})
            sums = {}
    for chunk, (weights, most) in enumerate(found):
        assert most == held_versions(program)[chunk]
        for parameter, value in weights.items():
            torch.testing.assert_close(value, history[chunk][-1][parameter], rtol=0, atol=1e-10)
