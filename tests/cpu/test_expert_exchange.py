"""Rows on their way to experts of other ranks: what is computed meanwhile, and what recomputation does not do again.

That layouts compute what one process does is the gate's matter (its model "spread").
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilemesh.comm import Communicator, run_threads
from tilemesh.comm.runtime.observe import BEGIN, CALL, WAIT, Seen
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.action import Action
from tilemesh.core.step.book import build
from tilemesh.core.step.passes import exchange, recompute
from tilemesh.core.step.text import parse_action
from tilemesh.model.config import ModelConfig
from tilemesh.model.experts import Experts
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.apply import lay
from tilemesh.parallel.experts import watch_experts
from tilemesh.parallel.laid import Laid, StepPiece
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.pipeline import Pipeline
from tilemesh.parallel.run import StepRunner
from tilemesh.report.pipeline_part import pipeline
from tilemesh.report.run import read
from tilemesh.report.time_parts import lanes
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import TRAIN
from tilemesh.train.load import load
from tilemesh.train.rank import train_here

CONFIG = ModelConfig(
    layers=2, width=16, heads=4, vocabulary=40, context=32, mlp_width=24, positions="rotary", norm="rmsnorm",
    activation="swiglu", biases=False, experts=4, experts_per_token=2, shared_width=20, balance_loss=0.1,
)  # fmt: skip
Moments = list[tuple[str, float, float]]


def laid_here(comm: Communicator, config: ModelConfig = CONFIG, **plan: Any) -> Laid:
    layout = ParallelPlan(precision="fp64", **plan)
    return lay(Transformer(config, seed=1, dtype=torch.float64), Mesh(comm, **layout.axes), layout)


def text_of(rank: int, rows: int = 2, tokens: int = 12) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(40, (rows, tokens + 1), generator=torch.Generator().manual_seed(rank))
    return drawn[:, :-1], drawn[:, 1:]


def moments_of(laid: Laid) -> Moments:
    """What happens from now on: exchanges of rows by phase, and passes through shared experts."""
    moments: Moments = []

    def observer(seen: Seen) -> Any:
        is_of_rows = seen.operation == "all_to_all" and seen.phase in (BEGIN, WAIT)
        return (lambda began, ended, calls: moments.append((seen.phase, began, ended))) if is_of_rows else None

    def mark(word: str) -> Any:
        return lambda *args: moments.append((word, time.perf_counter(), time.perf_counter()))

    for comm in laid.mesh.groups.values():
        comm.observe(observer, every=1)
    for module in laid.module.modules():
        if isinstance(module, Experts) and isinstance(module.shared, nn.Module):
            module.shared.register_forward_hook(mark("shared"))
            module.shared.register_full_backward_hook(mark("shared back"))
    return moments


def test_a_shared_expert_is_computed_while_rows_travel() -> None:
    """Forward beside the way to the experts, backward beside the gradients' way home; the wait comes after it."""

    def main(comm: Communicator) -> list[list[str]]:
        laid = laid_here(comm, dp=2, ep=2)
        moments = moments_of(laid)
        total, count = laid.loss(*text_of(comm.rank))
        forward = [word for word, _, _ in moments]
        moments.clear()
        laid.gradients.backward(total, count)
        return [forward, [word for word, _, _ in moments]]

    there = [BEGIN, "shared", WAIT, BEGIN, WAIT]
    back = [BEGIN, WAIT, BEGIN, "shared back", WAIT]
    for forward, backward in run_threads(2, main):
        assert forward == 2 * there
        assert backward == 2 * back


def calls_of(laid: Laid) -> Counter[tuple[str, int]]:
    """Collectives from now on, by operation and the bytes of a row."""
    calls: Counter[tuple[str, int]] = Counter()

    def observer(seen: Seen) -> Any:
        def note(began: float, ended: float, number: int) -> None:
            calls[seen.operation, seen.nbytes] += number

        return note if seen.phase in (BEGIN, CALL) else None

    for comm in laid.mesh.groups.values():
        comm.observe(observer, every=1)
    return calls


def turned_between(laid: Laid, rank: int) -> list[list[list[int]]]:
    """A step whose routers would all choose otherwise once the forward pass is over: by layer, the rows that its
    experts were given, each time."""
    given: dict[Experts, list[list[int]]] = {}
    modules = [module for module in laid.module.modules() if isinstance(module, Experts)]
    for module in modules:
        compute = module.compute

        def counted(rows: Tensor, counts: Tensor, module: Experts = module, compute: Any = compute) -> Tensor:
            given.setdefault(module, []).append(counts.tolist())
            return compute(rows, counts)  # type: ignore[no-any-return]

        module.compute = counted  # type: ignore[method-assign]
    total, count = laid.loss(*text_of(rank))
    for module in modules:
        module.router.weight.data.neg_()
    laid.gradients.backward(total, count)
    return [given[module] for module in modules]


@pytest.mark.parametrize("again", ["full", "operators"])
@pytest.mark.parametrize("ep", [1, 2])
def test_recomputation_takes_the_experts_that_were_chosen(again: str, ep: int) -> None:
    def main(comm: Communicator) -> Any:
        laid = laid_here(comm, dp=ep, ep=ep, recompute=again)
        return turned_between(laid, comm.rank)

    for layers in run_threads(ep, main):
        for first, second in layers:
            assert first == second


@pytest.mark.parametrize("again", ["full", "operators"])
def test_recomputation_asks_nobody_how_many_rows_come(again: str) -> None:
    """Of two layers each rank tells once how many rows it sends to each expert; with shared sequences, once how often
    experts were picked."""

    def main(comm: Communicator) -> Any:
        laid = laid_here(comm, dp=2, ep=2, cp=2, recompute=again)
        calls = calls_of(laid)
        total, count = laid.loss(*text_of(laid.mesh.dp.index))
        laid.gradients.backward(total, count)
        laid.mesh.comm.tell_observers()
        asked = calls["all_to_all", 8 * CONFIG.experts]
        picked = calls["all_reduce", 8 * 2 * (CONFIG.experts + 1)]
        return asked, picked

    assert run_threads(4, main) == [(2, 2)] * 4


def test_a_pass_that_a_list_repeats_takes_the_same_experts() -> None:
    """RECOMPUTE of a pipeline's chunk, whose routers would choose otherwise by then."""

    def main(comm: Communicator) -> Any:
        laid = laid_here(comm, CONFIG.replace(balance_loss=0.0), pp=2, accumulation=1)
        assert isinstance(laid, Pipeline)
        program = exchange(recompute(build("1f1b", 2, 1)))
        chosen: list[list[int]] = []
        router = next(module.router for module in laid.module.modules() if isinstance(module, Experts))

        def note(module: Any, args: Any, routing: Any) -> None:
            chosen.append(routing.experts_NC.tolist())
            router.weight.data.neg_()

        router.register_forward_hook(note)
        laid.runner = StepRunner(program, comm, laid.passers, laid.runner.services)
        laid.passes([StepPiece(*text_of(0), 0)])
        return chosen

    for first, second in run_threads(2, main):
        assert first == second


@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 2, "accumulation": 2, "schedule": "zb-h1"},
        {"pp": 2, "accumulation": 4, "schedule": "dualpipe", "recompute": "full"},
        {"zero": 3, "recompute": "operators"},
        {"offload": "activations", "recompute": "full", "recompute_every": 2},
    ],
    ids=["halves", "both ways", "gathered", "stretches"],
)
def test_a_pass_exchanges_what_its_list_says(plan: dict[str, Any]) -> None:
    """DISPATCH and COMBINE within each action of a step as it runs are those that are drawn and timed."""
    config = CONFIG.replace(layers=4, dense_layers=(1,))

    def main(comm: Communicator) -> Any:
        laid = laid_here(comm, config, dp=2, ep=2, **plan)
        assert isinstance(laid, Pipeline)
        seen: list[tuple[Action, list[tuple[str, str, int]]]] = []

        def around(action: Action, do: Callable[[], None]) -> None:
            seen.append((action, []))
            do()

        laid.watch_actions(lambda text: None, around)
        watch_experts(laid.module, lambda what, began_s, ended_s: seen[-1][1].append(what[:3]))
        laid.passes([StepPiece(*text_of(number), 2 * number) for number in range(laid.plan.accumulation)])
        laid.gradients.finish()
        wanted = [(action, laid.step.program.within(action)) for action, _ in seen]
        return seen, [(action, [(inner.kind, inner.of, inner.layer) for inner in inners]) for action, inners in wanted]

    for seen, wanted in run_threads(2 * plan.get("pp", 1), main):
        assert seen == wanted
        assert any(inners for _, inners in seen)


@pytest.mark.parametrize("mesh", ["dp=2,ep=2", "dp=2,ep=2,pp=2"])
def test_a_traced_run_shows_its_exchanges_in_a_lane_of_their_own(tmp_path: Path, mesh: str) -> None:
    """One span from the beginning of each exchange to the end of waiting for it; the run's page draws them."""
    (tmp_path / "text.txt").write_text("".join(f"line {number}: {number * 7} dogs\n" for number in range(200)))
    sets = (
        "model.layers=2,model.width=16,model.heads=4,model.mlp_width=24,model.context=16,model.experts=4,train.steps=2,"
        "model.shared_width=16,train.batch=4,train.trace_steps=2,evaluate.every=0,checkpoint.every=0,sample.tokens=0,"
        f"train.device=cpu,data.source={tmp_path / 'text.txt'}"
    )
    config, folder = load(mesh=mesh, sets=[sets]), tmp_path / "run"
    new_run(TRAIN, config.to_toml(), folder)
    run_threads(config.plan.world, lambda comm: train_here(config, folder, comm))
    traced = read(folder)
    assert traced.timeline is not None
    (step, *_) = traced.timeline.steps[-1:]
    for rank, spans in traced.timeline.experts.items():
        mine = [parse_action(span.name) for span in spans if step.began_s <= span.began_s <= step.ended_s]
        stage = rank // 2
        layers, passes = (2, 1) if config.plan.pp == 1 else (1, config.plan.accumulation)
        assert len(mine) == 4 * layers * passes
        assert {action.layer for action in mine} == ({0, 1} if config.plan.pp == 1 else {stage})
        assert {action.microbatch for action in mine} == set(range(config.plan.accumulation))
        assert {span.lane for span in spans}.isdisjoint({span.lane for span in traced.timeline.ranks[rank]})
    assert len(traced.timeline.experts) == config.plan.world
    page = str(lanes(traced)) + str(pipeline(traced, None) or "")
    for words in (
        "experts 0",
        "experts 1",
        "rows to experts of other ranks",
        *["run 1, experts"] * (config.plan.pp > 1),
    ):
        assert words in page
