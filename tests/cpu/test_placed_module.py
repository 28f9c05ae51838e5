"""Modules placed on a mesh train as one process does, in a loop of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.comm.connection import run_threads
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.axes import ordered, ranks_of
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.tensor_placement import parse
from tilemesh.graph import build
from tilemesh.graph.by_torch import run_torch
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.joint import ModuleCall, trace_joint, with_update
from tilemesh.parallel import Mesh, PlacedModule, place
from tilemesh.parallel.placed import Pins, place_joint
from tilemesh.plan.place.combine import combined
from tilemesh.plan.place.cost import MeshCost
from tilemesh.plan.place.local import local_graph
from tilemesh.plan.place.propagate import propagate
from tilemesh.runs.tensors import parts_of

D = torch.float64
TOLERANCE = 1e-10
STEPS = 3
Loss = Callable[[Any], Tensor]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, dtype=D), nn.Linear(8, 6, dtype=D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.down(torch.tanh(self.up(x))) + x, y)


def batch(rows: int = 8, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 6, dtype=D, generator=random) for _ in range(2)]


def called(module: nn.Module, example: Any) -> Any:
    return module(**example) if isinstance(example, Mapping) else module(*example)


def train(module: nn.Module, example: Any, loss: Loss, make: Any) -> list[float]:
    optimizer, losses = make(module.parameters()), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(called(module, example))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def by_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01)


def by_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


def itself(value: Tensor) -> Tensor:
    return value


def require_equal(
    module: nn.Module, example: Any, axes: Mapping[str, int], pins: Pins, loss: Loss = itself, make: Any = by_sgd
) -> tuple[int, list[str]]:
    """Losses and all tensors after some steps; how many numbers rank 0 holds, and what it exchanges in a step."""
    mesh_axes = ordered({"dp": 1, "tp": 1} | dict(axes))
    joint = place_joint(trace_joint(module, ModuleCall.example(example)), mesh_axes, pins)

    def rank(comm: Communicator) -> Any:
        laid = place(module, Mesh(comm, **axes), pins, example, joint=joint)
        losses = train(laid, example, loss, make)
        run = laid.program(ModuleCall.example(example))
        held = sum(value.numel() for value in laid.parameters())
        return losses, laid.gather(), held, [f"{node.op} {node['axis']}" for node in run.exchanges]

    ranks = run_threads(ranks_of(mesh_axes), rank)
    single = copy.deepcopy(module)
    wanted = train(single, example, loss, make)
    for losses, *_ in ranks:
        assert losses == pytest.approx(wanted, abs=TOLERANCE, rel=TOLERANCE)
    state = ranks[0][1]
    assert state.keys() == single.state_dict().keys()
    for name, value in single.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=TOLERANCE, rtol=TOLERANCE, msg=name)
    return ranks[0][2], ranks[0][3]


ROWS = {"input*": "dp:S0"}


def test_data_tensor_and_both_parallelism_of_an_mlp_equal_one_process() -> None:
    module = Mlp()
    everything = sum(value.numel() for value in module.parameters())
    held, _ = require_equal(module, batch(), {"dp": 2}, ROWS)
    assert held == everything
    megatron = {"up.weight": "tp:S0"}
    held, exchanged = require_equal(module, batch(), {"tp": 2}, megatron)
    assert held == everything - (6 * 8 + 8 + 8 * 6) // 2, "both matrices and the first bias are cut"
    assert exchanged == ["all_reduce tp"], "one sum, where the second product leaves"
    require_equal(module, batch(), {"dp": 2, "tp": 2}, ROWS | megatron, make=by_adam)
    require_equal(module, batch(7), {"dp": 3}, ROWS)  # uneven


def test_parameters_cut_over_the_batchs_axis_are_fully_sharded() -> None:
    """ZeRO is S on parameters, gradients and states: gathered where they are used, gradients reduced and scattered."""
    held, exchanged = require_equal(
        Mlp(), batch(64), {"dp": 2}, ROWS | {"*weight": "dp:S0", "*bias": "dp:S0"}, make=by_adam
    )
    assert held == (6 * 8 + 8 + 8 * 6 + 6) // 2
    exchanged.remove("all_reduce dp")  # the loss
    assert exchanged == ["all_gather dp", "all_gather dp", "reduce_scatter dp"], "small ones are made together"


def test_a_module_goes_on_from_a_state_that_another_layout_wrote(tmp_path: Path) -> None:
    module, path = Mlp(), tmp_path / "state.pt"

    def first(comm: Communicator) -> Any:
        laid = place(module, Mesh(comm, dp=2), ROWS | {"up.weight": "dp:S1"}, batch())
        train(laid, batch(), itself, by_sgd)
        state = laid.gather()
        if state is not None:
            torch.save(state, path)
        return [part for name, value in laid.state_dict().items() for part in parts_of(name, laid.shards[name], value)]

    def second(comm: Communicator) -> Any:
        laid = place(Mlp(), Mesh(comm, tp=3), {"up.weight": "tp:S0"}, batch())
        laid.load(torch.load(path) if comm.rank == 1 else None, root=1)
        train(laid, batch(), itself, by_sgd)
        return laid.gather()

    written = [part for parts in run_threads(2, first) for part in parts]
    stored = torch.load(path)
    assert sum(part.tensor.numel() for part in written) == sum(value.numel() for value in stored.values()), "once each"
    for part in written:  # the boxes of a checkpoint
        there = tuple(
            slice(*ends)
            for ends in zip(part.begin, map(sum, zip(part.begin, part.tensor.shape, strict=True)), strict=True)
        )
        assert torch.equal(stored[part.name][there], part.tensor)
    state = run_threads(3, second)[0]
    single = copy.deepcopy(module)
    for _ in range(2):
        train(single, batch(), itself, by_sgd)
    for name, value in single.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=TOLERANCE, rtol=TOLERANCE)


def test_other_shapes_evaluation_and_clipping() -> None:
    module = Mlp()

    def rank(comm: Communicator) -> Any:
        laid = place(module, Mesh(comm, dp=2), ROWS, batch())
        with torch.no_grad():
            losses = [laid(*batch(6)).item(), laid(*batch(8)).item()]
        laid(*batch(8)).backward()
        norm = laid.clip_gradients(0.1)
        return losses, norm, laid.gather({name: p.grad for name, p in laid.named_parameters()})

    (losses, norm, gradients), _ = run_threads(2, rank)
    assert losses == pytest.approx([module(*batch(6)).item(), module(*batch(8)).item()], abs=TOLERANCE)
    module(*batch(8)).backward()
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(module.parameters(), 0.1)), abs=TOLERANCE)
    for name, value in module.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad, atol=TOLERANCE, rtol=TOLERANCE)


def by_moments(parameter: Node, gradient: Node, mean: Node, square: Node) -> tuple[Node, ...]:
    """Adam's first step with its usual numbers."""
    mean = build.add(mean, build.multiply(build.subtract(gradient, mean), 0.1))
    square = build.add(build.multiply(square, 0.999), build.multiply(build.multiply(gradient, gradient), 0.001))
    scale = build.add(build.divide(build.sqrt(square), 0.001**0.5), 1e-8)
    return build.subtract(parameter, build.multiply(build.divide(mean, scale), 0.01 / 0.1)), mean, square


def test_states_cut_over_the_batchs_axis_are_zeros_first_stage() -> None:
    """Forward, backward and update as one graph: parameters whole, their states cut."""
    module, example = Mlp(), batch(64)
    trace = trace_joint(module, ModuleCall.example(example))
    graph, replaced = with_update(trace, ["mean", "square"], by_moments)
    cut = parse("dp:S0")
    pins = {node: cut for node in graph.inputs if node["name"].startswith(("input", "mean", "square"))}
    pins |= {trace.node(name): parse("R") for name in trace.parameters}
    ends = {new: pins[old] for new, old in replaced.items()}
    placed = propagate(graph, pins, (("dp", 2),), ends=ends)
    kinds = [exchange.collective for exchange in placed.exchanges if exchange.nbytes]
    assert kinds.count("reduce_scatter") == kinds.count("all_gather") == 4, "of gradients, of new parameters"
    assert kinds.count("all_reduce") == 1, "the loss"
    values: list[Tensor] = [*module.state_dict().values(), *example, torch.ones((), dtype=D)]
    values += [torch.zeros(node.shape, dtype=D) for node in graph.inputs[len(values) :]]  # type: ignore[arg-type]
    made = run_torch(graph, *values)
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    module(*example).backward()
    optimizer.step()
    for name, value in module.state_dict().items():
        new = next(new for new, old in replaced.items() if old["name"] == name)
        torch.testing.assert_close(made[graph.outputs.index(new)], value, atol=TOLERANCE, rtol=TOLERANCE)


class Scores(nn.Linear):
    """A module whose loss is the user's."""


def test_results_come_whole_or_as_they_are_pinned() -> None:
    module = Scores(6, 4, dtype=D)
    x = batch()[0]

    def rank(comm: Communicator) -> Any:
        mesh = Mesh(comm, dp=2)
        whole = place(module, mesh, {"input": "dp:S0"}, {"input": x})(input=x)
        part = place(module, mesh, {"input": "dp:S0", "output0": "dp:S0"}, {"input": x})
        rows = part(input=x)
        rows.square().sum().backward()  # each rank of its own rows: the gradient is of their sum
        return whole.detach(), rows.detach(), part.gather({"weight": part.weight.grad})

    (whole, first, gradient), (_, last, _) = run_threads(2, rank)
    wanted = module(x)
    wanted.square().sum().backward()
    for got in (whole, torch.cat([first, last])):
        torch.testing.assert_close(got, wanted.detach(), atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(gradient["weight"], module.weight.grad, atol=TOLERANCE, rtol=TOLERANCE)


def test_dropout_is_the_same_for_every_layout() -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 16, dtype=D), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 4, dtype=D))
    x = batch()[0]

    def rank(comm: Communicator) -> Any:
        sizes = {"dp": 2, "tp": 2} if comm.size == 4 else {"tp": 1}
        laid = place(module, Mesh(comm, **sizes), {"input0": "dp:S0", "0.weight": "tp:S0"}, x)
        laid(x).square().sum().backward()
        twice = laid(x)
        laid.eval()
        return laid.gather({name: p.grad for name, p in laid.named_parameters()}), twice.detach(), laid(x).detach()

    [(alone, twice, without)], ranks = run_threads(1, rank), run_threads(4, rank)
    torch.testing.assert_close(without, module.eval()(x).detach(), atol=TOLERANCE, rtol=TOLERANCE)
    assert not torch.allclose(twice, without)
    for name, gradient in alone.items():
        torch.testing.assert_close(ranks[0][0][name], gradient, atol=TOLERANCE, rtol=TOLERANCE)
    for _, other, _ in ranks:
        torch.testing.assert_close(other, twice, atol=TOLERANCE, rtol=TOLERANCE)


class Draws(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(6)


class Branches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("module", "pins", "message"),
    [
        (Mlp(), {"up.wieght": "tp:S0"}, "tensor 'up.wieght'"),
        (Mlp(), {"up.weight": "cp:S0"}, "axis 'cp'"),
        (Branches(6, 6, dtype=D), {}, "depends on a tensor's values"),
        (Draws(6, 6, dtype=D), {}, "aten.randn.default draws random numbers"),
    ],
)
def test_what_cannot_be_placed_is_refused_in_a_line(module: nn.Module, pins: Pins, message: str) -> None:
    def rank(comm: Communicator) -> PlacedModule:
        return place(module, Mesh(comm, tp=1), pins, batch()[: 2 if isinstance(module, Mlp) else 1])

    with pytest.raises((UsageError, RunError)) as caught:
        run_threads(1, rank)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("index", [-1, 8])
def test_an_index_beyond_a_table_cut_by_rows_is_refused_in_a_line(index: int) -> None:
    def main(comm: Communicator) -> None:
        placed = place(nn.Embedding(8, 4), Mesh(comm, tp=2), {"weight": "tp:S0"}, example=torch.tensor([1, 2]))
        placed(torch.tensor([1, index]))

    with pytest.raises(UsageError, match=r"an index is in no row of the table .* give each from 0"):
        run_threads(2, main)


def test_small_sums_of_gradients_are_one_exchange() -> None:
    """As many bytes in fewer exchanges, which pays wherever one begins with a latency; large ones stay apart."""
    trace = trace_joint(Mlp(), ModuleCall.example(batch()))
    joint = place_joint(trace, (("dp", 4),), {"input0": "dp:S0", "input1": "dp:S0"})
    local = local_graph(joint.placed, 0, joint.outputs)
    fewer, cost = combined(local), MeshCost((("dp", 4),), parse_cluster("4xh100"))
    cost.groups = {"dp": replace(cost.groups["dp"], hides=False)}  # what is hidden takes nobody's time

    def sums(graph: Graph) -> list[Node]:
        return [node for node in graph.nodes() if node.op == "all_reduce"]

    assert (len(sums(local)), len(sums(fewer))) == (5, 1), "of four gradients and, as nothing is divided here, the loss"
    (before_s, before), (after_s, after) = cost.of_program(local), cost.of_program(fewer)
    assert after == before
    assert after_s < before_s
    assert [node.shape for node in fewer.outputs] == [node.shape for node in local.outputs]
    large = nn.Linear(512, 512)
    trace = trace_joint(large, ModuleCall.example([torch.randn(8, 512)]))
    joint = place_joint(trace, (("dp", 4),), {"input0": "dp:S0"})
    local = local_graph(joint.placed, 0, joint.outputs)
    assert len(sums(combined(local))) == len(sums(local))


class Averages(nn.Module):
    """Buffers that are assigned to, and written into in place after they were read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4, dtype=D)
        self.register_buffer("mean", torch.ones(4, dtype=D))
        self.register_buffer("queue", torch.eye(8, 4, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        loss = (y * self.mean).square().mean() + (y @ self.queue.clone().t()).logsumexp(1).mean()
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.queue.copy_(y.detach())
        return loss


def test_buffers_that_are_assigned_to_or_read_before_they_change() -> None:
    module = Averages()
    require_equal(module, [batch()[0]], {"dp": 2}, ROWS)
    require_equal(module, [batch()[0]], {"dp": 2, "tp": 2}, ROWS | {"linear.weight": "tp:S0", "queue": "tp:S1"})


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4, dtype=D)
        self.register_buffer("seen", torch.zeros(1, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.mean().reshape(1)])
        return self.linear(x).mean()


def test_a_buffer_that_becomes_another_is_refused() -> None:
    with pytest.raises(UsageError, match=r"its buffer seen, torch.float64 \[1\], one of torch.float64 \[2\]"):
        trace_joint(Grows(), ModuleCall.example([batch()[0]]))


class Holds(nn.Module):
    """A tensor that is no buffer, read more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6, dtype=D), torch.arange(6.0, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.linear(x) * self.scale).tanh() * self.scale).square().mean()


def test_a_tensor_of_the_modules_own_is_read_more_than_once() -> None:
    require_equal(Holds(), [batch()[0]], {"dp": 2}, ROWS)
    require_equal(Holds(), [batch()[0]], {"tp": 2}, {"linear.weight": "tp:S0"})
    module = Holds()
    module.scale = torch.randn(8, 6, dtype=D)  # is cut as the rows are
    require_equal(module, [batch()[0]], {"dp": 3}, ROWS)


class Aliased(nn.Module):
    """A parameter that is also read from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=D)
        self.tables = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.tables[0], self.linear.bias).square().mean()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6, dtype=D), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).square().mean() * self.calls


def test_what_a_program_would_keep_as_it_was_is_refused() -> None:
    x = batch()[0]
    with pytest.raises(UsageError, match="weight is read beside the module's parameters"):
        trace_joint(Aliased(), ModuleCall.example([x]))
    with pytest.raises(UsageError, match="calls changes as the module is called"):
        trace_joint(Counts(), ModuleCall.example([x]))
    with pytest.raises(UsageError, match="a ndarray: expected tensors, numbers"):
        ModuleCall.example([x, np.ones(2000)])
    hooked = Mlp()
    hooked.up.weight.register_hook(lambda gradient: gradient / 2)
    with pytest.raises(UsageError, match="weight has hooks"):
        run_threads(1, lambda comm: place(hooked, Mesh(comm, dp=1), {}, batch()))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.leaky = nn.Linear(6, 6, dtype=D), nn.LeakyReLU(0.1)

    def forward(self, x: Tensor, pair: Any) -> Tensor:
        return (self.leaky(self.up(x)) * pair[0] - pair[1]).square().mean()


def test_tensors_of_one_shape_in_one_argument_are_two() -> None:
    x, y = batch()
    example = {"x": x, "pair": (y, y + 1)}
    assert ModuleCall.example(example).names == ("x", "pair.0", "pair.1")
    require_equal(Gated(), example, {"dp": 2}, {"x": "dp:S0", "pair.*": "dp:S0"})


def test_what_is_set_or_thawed_after_a_module_was_placed_counts() -> None:
    x, y = batch()
    module = Gated()
    module.up.weight.requires_grad_(False)

    def step(module: Any) -> Any:
        module(x, (y, y)).backward()
        module.up.weight.requires_grad_(True)
        module.leaky.negative_slope = 3.0
        loss = module(x, (y, y))
        loss.backward()
        return loss.item(), module.up.weight.grad, module.up.bias.grad

    def rank(comm: Communicator) -> Any:
        return step(place(module, Mesh(comm, dp=2), ROWS, [x, (y, y)]))

    got, *_ = run_threads(2, rank)
    for mine, wanted in zip(got, step(copy.deepcopy(module)), strict=True):
        torch.testing.assert_close(mine, wanted, atol=TOLERANCE, rtol=TOLERANCE)


class Versioned(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"version": 2}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 2}


def test_a_state_with_more_than_tensors_is_gathered() -> None:
    module = nn.Sequential(Versioned(6, 4, dtype=D))
    state, _ = run_threads(2, lambda comm: place(module, Mesh(comm, tp=2), {"*weight": "tp:S0"}, batch()[:1]).gather())
    module.load_state_dict(state)


class OneHot(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return (super().forward(input) * functional.one_hot(input.argmax(1), 4)).sum()


def test_a_check_of_values_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match=r"\(one_hot: Class values must be non-negative.\): leave it out; one_hot"):
        trace_joint(OneHot(6, 4, dtype=D), ModuleCall.example(batch()[:1]))


class Powers(nn.Linear):
    powers = (1,)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return sum(super(Powers, self).forward(input).pow(each).mean() for each in self.powers)


def test_a_list_of_numbers_and_attributes_of_the_module_itself_count() -> None:
    module, x = Powers(6, 4, dtype=D), batch()[0]

    def values(module: Any) -> Any:
        first = module(x).item()
        module.powers = [2, 3]
        return first, module(x).item()

    got = run_threads(2, lambda comm: values(place(module, Mesh(comm, dp=2), ROWS, [x])))
    assert got[0] == pytest.approx(values(copy.deepcopy(module)), abs=TOLERANCE)


def test_an_operator_with_several_results_is_not_cut_where_it_cannot_be() -> None:
    module = nn.Sequential(nn.Linear(6, 8, dtype=D), nn.PReLU(8, dtype=D))
    require_equal(module, batch()[:1], {"tp": 2}, {"0.weight": "tp:S0"}, loss=Tensor.sum)
