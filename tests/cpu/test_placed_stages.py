"""Stages of a pipeline on ranks that need not be as many: what the cut into stages chose runs, equal to one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilemesh.comm.connection import run_threads
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError
from tilemesh.graph.ir import Graph
from tilemesh.graph.joint import ModuleCall, divided, halved, trace_joint
from tilemesh.parallel.choose.stages import cut_stages
from tilemesh.parallel.placed import place_joint
from tilemesh.parallel.staged import StagedModule, _StepState, stage
from tilemesh.plan.place.local import local_graph

D = torch.float64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8, dtype=D), nn.Linear(8, 16, dtype=D)
        self.down = nn.Linear(16, 8, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return added


class Ending(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.body(x), y)


def cut(blocks: Sequence[nn.Module], counts: Sequence[int]) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for at, count in enumerate(counts):
        body = nn.Sequential(*blocks[sum(counts[:at]) : sum(counts[:at]) + count])
        modules.append(Ending(body) if at == len(counts) - 1 else body)
    return modules


def steps(modules: Sequence[nn.Module], microbatches: Sequence[Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Two of one process."""
    modules = copy.deepcopy(list(modules))
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], 0.01)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=D)
        for [x], more in microbatches:
            for module in modules[:-1]:
                x = module(x)
            total = total + modules[-1](x, *more) / len(microbatches)
        total.backward()
        optimizer.step()
        losses.append(total.item())
    states = [(at, module.state_dict()) for at, module in enumerate(modules)]
    return losses, {f"{at}.{name}": value for at, state in states for name, value in state.items()}


@pytest.mark.parametrize(
    ("meshes", "counts", "schedule"),
    [
        ([{"tp": 1}, {"tp": 2}], [1, 3], "1f1b"),
        ([{"dp": 2}, {"tp": 1}], [2, 2], "gpipe"),
        ([{"dp": 2, "tp": 2}, {"tp": 1}], [3, 1], "1f1b"),
        ([{"tp": 2}, {"dp": 1}], [1, 1, 1, 1], "interleaved"),
        ([{"dp": 2}, {"tp": 2}], [2, 2], "zb-h1"),
        ([{"tp": 1}, {"tp": 2}], [1, 1, 1, 1], "zb-v"),
    ],
)
def test_stages_on_unequal_ranks_train_as_one_process(
    meshes: Sequence[Mapping[str, int]], counts: Sequence[int], schedule: str
) -> None:
    torch.manual_seed(0)
    modules = cut([Block() for _ in range(sum(counts))], counts)
    microbatches = [([torch.randn(4, 8, dtype=D)], [torch.randn(4, 8, dtype=D)]) for _ in range(4)]
    losses, want = steps(modules, microbatches)
    pins: list[dict[str, str]] = []
    for number in range(len(modules)):
        axes = meshes[number % len(meshes)]
        rows = {"input0": "dp:S0"} if axes.get("dp", 1) > 1 else {}
        pins.append(rows | ({"*.up.weight": "tp:S0"} if axes.get("tp", 1) > 1 else {}))

    def rank(comm: Communicator) -> tuple[list[float], dict[str, Tensor] | None]:
        staged = stage(modules, comm, meshes, microbatches, pins=pins, schedule=schedule)
        optimizer = torch.optim.AdamW(staged.parameters(), 0.01)
        done = []
        for _ in range(2):
            optimizer.zero_grad()
            done.append(staged.step(microbatches).item())
            optimizer.step()
        return done, staged.gather()

    results = run_threads(sum(axes.get("dp", 1) * axes.get("tp", 1) for axes in meshes), rank)
    for done, _ in results:
        assert done == pytest.approx(losses, abs=1e-10)
    state = results[0][1]
    assert state is not None
    assert state.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(state[name], value, atol=1e-10, rtol=1e-10, msg=name)


def test_modules_that_share_a_parameter_are_no_stages() -> None:
    table, head = nn.Linear(8, 8, dtype=D), nn.Linear(8, 8, dtype=D)
    head.weight = table.weight
    microbatches = [([torch.zeros(4, 8, dtype=D)], [torch.zeros(4, 8, dtype=D)])]
    with pytest.raises(UsageError, match=r"body\.weight of module 1 of a pipeline is weight of module 0"):
        run_threads(2, lambda comm: stage([table, Ending(head)], comm, [{}, {}], microbatches))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.scale, 0.5)


class Mean(Dropping):
    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return super().forward(x).mean()


def test_stages_drop_other_elements() -> None:
    """A quarter is left and scaled by four. With the same mask twice it would be half."""
    ones = torch.ones(64, 64, dtype=D)

    def rank(comm: Communicator) -> float:
        return stage([Dropping(), Mean()], comm, [{}, {}], [([ones], [])]).step([([ones], [])]).item()

    assert run_threads(2, rank)[0] == pytest.approx(1, abs=0.2)


def test_what_the_dynamic_program_cut_runs() -> None:
    """Three ranks, the first twice as quick: layers and ranks of each stage are those of its answer."""
    torch.manual_seed(0)
    speeds = [2.0, 1.0, 1.0]
    found = cut_stages(4, 3, 4, lambda layers, ranks: len(layers) / sum(speeds[rank] for rank in ranks), sizes=(1, 2))
    assert sorted(found.ranks) != [1, 1, 1]
    modules = cut([Block() for _ in range(4)], found.layers)
    microbatches = [([torch.randn(4, 8, dtype=D)], [torch.randn(4, 8, dtype=D)]) for _ in range(4)]
    losses, _ = steps(modules, microbatches)
    meshes = [{"tp": ranks} for ranks in found.ranks]
    pins = [{"*.up.weight": "tp:S0"}] * len(modules)
    done = run_threads(3, lambda comm: stage(modules, comm, meshes, microbatches, pins=pins).step(microbatches).item())
    assert done == pytest.approx([losses[0]] * 3, abs=1e-10)


def test_a_backward_pass_in_two_computes_nothing_twice() -> None:
    trace = trace_joint(Block(), ModuleCall.example([torch.randn(4, 8, dtype=D, requires_grad=True)]))
    joint = place_joint(trace, (("tp", 2),), {"up.weight": "tp:S0"})
    _, backward = divided(local_graph(joint.placed, 0, joint.outputs), trace.results)

    def products(graph: Graph) -> int:
        return sum(node.op == "dot" for node in graph.nodes())

    assert [products(graph) for graph in (backward, *halved(backward, 1))] == [4, 2, 2]


def test_what_no_placed_stage_can_run_is_refused() -> None:
    microbatches = [([torch.randn(4, 8, dtype=D)], [torch.randn(4, 8, dtype=D)]) for _ in range(4)]
    modules = cut([Block(), Block()], [1, 1])
    with pytest.raises(UsageError, match=r"stages of 1 \+ 2 ranks and there are 2"):
        run_threads(2, lambda comm: stage(modules, comm, [{"tp": 1}, {"tp": 2}], microbatches))
    with pytest.raises(UsageError, match="3 modules on 2 stages"):
        run_threads(2, lambda comm: stage([*modules, Block()], comm, [{"tp": 1}, {"tp": 1}], microbatches))


class OnDevice(Tensor):
    """Stands for a tensor of a GPU: nothing but `cpu` makes an ordinary one of it."""

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor)


def test_all_ranks_exchange_the_loss_from_the_host() -> None:
    """A rank without losses has no GPU's tensor to give, and all must give alike."""
    state, given = _StepState(), []

    class Ranks:
        def broadcast(self, mean: Tensor, root: int) -> Tensor:
            given.append(type(mean))
            return mean

    def run() -> None:
        state.losses.append(torch.ones(()).as_subclass(OnDevice))

    chunk: Any = SimpleNamespace(state=state, placed=nn.Module())
    ranks: Any = Ranks()
    assert float(StagedModule(ranks, {0: chunk}, run, [0]).step([])) == 1
    assert given == [Tensor]
