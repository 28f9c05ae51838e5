"""Programs that run otherwise: trees, fx modules; options of the backend."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import tilemesh as tm
from tilemesh.bench.graph.peak import measured_peak
from tilemesh.bench.graph.trees import WAYS, Switched, TreeModel, random_tree
from tilemesh.core.errors import RunError, UsageError
from tilemesh.graph import build, derive
from tilemesh.graph.backend import tilemesh
from tilemesh.graph.by_torch import run_torch
from tilemesh.graph.emit import program
from tilemesh.graph.evaluate import run_numpy
from tilemesh.graph.ir import Graph, make
from tilemesh.graph.kernel_call import embedding_gradient
from tilemesh.graph.memory import lifetimes, live_bytes


def _step(layers: int, width: int = 16) -> Graph:
    """Loss and gradients of an MLP."""
    x = build.argument("x", [64, width], "float64")
    weights = [build.argument(f"w{layer}", [width, width], "float64") for layer in range(layers)]
    node = x
    for weight in weights:
        node = build.gelu(build.dot(node, weight))
    loss = build.mean(build.multiply(node, node))
    return Graph((x, *weights), (loss, *derive.gradient(loss, weights)))


def _values(graph: Graph) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn([int(str(size)) for size in node.shape], dtype=torch.float64) / 4 for node in graph.inputs]


def test_tied_weights_are_an_input_under_each_name() -> None:
    """An embedding whose table is the head, too; it runs, and the placed graph names what it takes."""
    table = nn.Embedding(12, 6)
    head = nn.Linear(6, 12, bias=False)
    head.weight = table.weight
    tokens = torch.tensor([[1, 5, 11]])
    traced = tm.graph.trace(nn.Sequential(table, head), [tokens])
    assert [node["name"] for node in traced.graph.inputs] == ["0.weight", "1.weight", "input0"]
    torch.testing.assert_close(traced.run(tokens)[0], head(table(tokens)))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input0 = nn.Parameter(torch.full((3,), 5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.input0 * 2


def test_a_weight_may_be_called_as_an_input_is() -> None:
    """Inputs of one name, shape and dtype are one node: the weight's value was the input's."""
    x = torch.ones(3)
    assert torch.equal(tm.graph.trace(Named(), [x]).run(x)[0], torch.full((3,), 11.0))
    one = build.argument("x", [3])
    with pytest.raises(UsageError, match="two are one"):
        Graph((one, one), (one,))


def test_the_peak_is_as_predicted() -> None:
    """Operator by operator, with values dropped after their last use: what a program makes is what liveness says."""
    graph = _step(4, width=32)
    given = _values(graph)
    measured, predicted = measured_peak(program(graph).function, given), max(live_bytes(lifetimes(graph)))
    assert measured <= predicted * 1.02 + 4096
    assert measured >= 0.9 * predicted


def test_trees_by_four_ways() -> None:
    torch.manual_seed(0)
    draws = random.Random(3)
    model = TreeModel(50, 8)
    trees = [random_tree([draws.randrange(50) for _ in range(6)], draws) for _ in range(5)]
    assert len({tree.shape for tree in trees}) > 1
    with torch.no_grad():
        expected = torch.cat([model(tree) for tree in trees])
        for name, make in WAYS.items():
            torch.testing.assert_close(torch.cat(make(model, 6)(trees)), expected, rtol=1e-5, atol=1e-6, msg=name)


def test_a_program_with_switches_has_gradients() -> None:
    """The gradient of a tree's root goes through the branch that each step took."""
    model = TreeModel(9, 4).double()
    tree = random_tree([1, 5, 2, 7], random.Random(1))
    switched = Switched(model, 4)
    loss = build.total(switched.graph.outputs[0])
    weights = switched.graph.inputs[3:]
    graph = Graph(switched.graph.inputs, tuple(derive.gradient(loss, weights)))
    given = (
        torch.tensor([right < 0 for _, right in tree.steps]),
        torch.tensor([left for left, _ in tree.steps]),
        torch.tensor([max(right, 0) for _, right in tree.steps]),
    )
    parameters = [model.table, model.a, model.b, model.c]
    expected = torch.autograd.grad(model(tree).sum(), parameters)
    ours = run_torch(graph, *given, *(parameter.detach() for parameter in parameters))
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_export_gives_an_fx_module() -> None:
    model = nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.LayerNorm(9))
    x = torch.randn(6, 4)
    for _ in range(2):  # the function stays a function once its module is loaded
        traced = tm.graph.trace(model, [x])
    module = tm.graph.export(traced.graph)
    assert isinstance(module, torch.fx.GraphModule)
    assert {node.op for node in module.graph.nodes} == {"placeholder", "call_function", "output"}
    torch.testing.assert_close(module(*traced.weights.values(), x)[0], model(x))
    torch.testing.assert_close(traced.run(x)[0], model(x))


class Masked(nn.Module):
    """Constants that tracing makes: a mask, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(9, 4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        mask = torch.tril(torch.ones(5, 5, dtype=torch.bool))
        return self.mix(hidden, hidden, hidden, attn_mask=~mask)[0] * 2 + torch.tensor(3.0)  # type: ignore[no-any-return]


def test_export_of_programs_with_constants() -> None:
    torch.manual_seed(0)
    pictures = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x, tokens, rows = torch.randn(1, 3, 5, 5), torch.randint(0, 9, (2, 5)), torch.randn(2, 5, 3)
    with torch.no_grad():
        module = tm.graph.export(tm.graph.trace(pictures, [x]).frozen())
        torch.testing.assert_close(module(x)[0], pictures(x))
        for model, given in ((Masked(), tokens), (nn.LSTM(3, 4, batch_first=True), rows)):
            traced = tm.graph.trace(model, [given])
            expected = model(given) if isinstance(model, Masked) else model(given)[0]
            torch.testing.assert_close(traced.export()(*traced.weights.values(), given)[0], expected)


POOLS = {
    "largest": nn.MaxPool2d(2),
    "largest, overlapping, padded": nn.MaxPool2d(3, 2, 1),
    "largest along a line": nn.Sequential(nn.Flatten(2), nn.MaxPool1d(3, 2, 1)),
    "largest in three dims": nn.Sequential(nn.Unflatten(1, (2, 4)), nn.MaxPool3d(2)),
    "mean": nn.AvgPool2d(2),
    "mean, overlapping, padded": nn.AvgPool2d(3, 2, 1),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling_is_made_of_primitives(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), POOLS[name]).double()
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    traced = tm.graph.trace(model, [x])
    assert not [node for node in traced.graph.nodes() if node.op == "opaque"]
    expected = model(x)
    loss = build.total(traced.graph.outputs[0])
    slopes = Graph(traced.graph.inputs, tuple(derive.gradient(loss, traced.graph.inputs[:2])))
    given = [*traced.weights.values(), x]
    torch.testing.assert_close(traced.run(x)[0], expected)
    torch.testing.assert_close(torch.from_numpy(run_numpy(traced.frozen(), x.numpy())[0]), expected)
    for ours, theirs in zip(
        run_torch(slopes, *given), torch.autograd.grad(expected.sum(), list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_pooling_that_primitives_do_not_have_runs_everywhere_as_torchs_own() -> None:
    x = torch.randn(2, 3, 9, 9)
    for model in (nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, dilation=2), nn.AvgPool2d(3, 2, 1, ceil_mode=True)):
        traced = tm.graph.trace(model, [x])
        assert [node.op for node in traced.graph.nodes() if node.launched] == ["opaque"]
        for run in (traced.run, lambda x: run_torch(traced.graph, x)):  # noqa: B023
            torch.testing.assert_close(run(x)[0], model(x))


def test_switches_by_every_way_to_run_them() -> None:
    chosen, x = build.argument("chosen", [], "bool"), build.argument("x", [5], "float64")
    merged = build.merge(
        chosen,
        build.multiply(build.switch(x, chosen, True), 3.0),
        build.add(build.exp(build.switch(x, chosen, False)), 1.0),
    )
    loss = build.total(merged)
    graph = Graph((chosen, x), (loss, *derive.gradient(loss, [x]), build.switch(x, chosen, True)))
    for which in (True, False):
        given = torch.tensor(which), torch.randn(5, dtype=torch.float64)
        expected = run_torch(graph, *given)
        results = program(graph)(*given)
        torch.testing.assert_close(results[:2], expected[:2])
        alive = torch.equal(results[2], given[1]) if which else str(results[2]) == "dead: its branch was not taken"
        assert alive
    with pytest.raises(UsageError, match="has switches, which an fx module has not"):
        tm.graph.export(graph)


def test_what_tracing_and_running_refuse() -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    with pytest.raises(UsageError, match=r"give a list of tensors: trace\(model, \[x\]\)"):
        tm.graph.trace(model, x)  # type: ignore[arg-type]
    traced = tm.graph.trace(model, [x])
    with pytest.raises(UsageError, match=r"was given \[5, 4\]; the program was traced for \[2, 4\]"):
        traced.run(torch.randn(5, 4))
    with pytest.raises(UsageError, match="was given nothing"):
        traced.run()
    with pytest.raises(UsageError, match=r"input input0 has shape \[5, 4\]"):
        tm.graph.program(traced.graph)(*traced.weights.values(), torch.randn(5, 4))
    with pytest.raises(RunError, match="the program cannot be traced: RuntimeError: "):
        tm.graph.trace(model, [torch.randn(2, 5)])


def test_a_batch_norm_becomes_part_of_the_convolution_before_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False))
    model = model.append(nn.BatchNorm2d(4)).double()
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    model(x)  # so that the norms have averages
    model.eval()
    traced = tm.graph.trace(model, [x])
    frozen = traced.frozen()
    assert [node["name"] for node in frozen.inputs] == ["input0"]
    operators = [node.op for node in frozen.nodes() if node.launched]
    assert sorted(operators) in (
        ["add", "add", "conv", "conv", "maximum"],
        ["add", "conv", "conv", "maximum", "subtract"],
    ), operators
    torch.testing.assert_close(run_torch(frozen, x)[0], model(x), rtol=1e-11, atol=1e-12)


def test_trace_of_a_model_that_changes_its_buffers() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.RMSNorm(5))
    x = torch.randn(6, 4)
    before = model[1].running_mean.clone()  # type: ignore[operator]
    traced = tm.graph.trace(model, [x])
    assert torch.equal(model[1].running_mean, before)  # type: ignore[arg-type]
    torch.testing.assert_close(traced.run(x)[0], model(x))
    with pytest.raises(UsageError, match="changes its inputs in place"):
        tm.graph.trace(lambda y: y.add_(1.0), [x])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "max-autotune"}, "mode"),
        ({"options": {"cuda_graph": True}}, "did you mean|cuda_graphs"),
        ({"options": {"kernels": 1}}, "give True or False"),
    ],
)
def test_options_of_the_backend(given: dict[str, Any], message: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(nn.Linear(2, 2), backend=tilemesh, **given)(torch.ones(1, 2))


def test_modes_that_are_known() -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    for given in ({"mode": "reduce-overhead"}, {"options": {"rematerialise": True}}):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, backend=tilemesh, **given)(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("padding", "by_count"), [(-1, False), (2, False), (2, True)])
def test_a_tables_gradient_is_the_sum_of_its_tokens(dtype: torch.dtype, padding: int, by_count: bool) -> None:
    """What a GPU adds in any order equals torch's own operator."""
    torch.manual_seed(0)
    gradient, tokens = torch.randn(3, 4, 5, dtype=dtype), torch.randint(0, 6, (3, 4))
    expected = torch.ops.aten.embedding_dense_backward(gradient.double(), tokens, 6, padding, by_count)
    ours = embedding_gradient(gradient, tokens, 6, padding, by_count)
    assert ours.dtype == dtype
    bound = 1e-2 if dtype is torch.bfloat16 else 1e-14
    torch.testing.assert_close(ours.double(), expected, rtol=bound, atol=bound)


def test_a_tables_gradient_is_added_up_in_more_digits() -> None:
    """Many tokens on few rows, as position biases have them: one rounding, where one after the other has hundreds."""
    torch.manual_seed(0)
    gradient, tokens = torch.randn(20_000, 3), torch.randint(0, 2, (20_000,))
    exact = torch.ops.aten.embedding_dense_backward(gradient.double(), tokens, 2, -1, False)
    ours = embedding_gradient(gradient, tokens, 2, -1, False)
    assert bool(((ours.double() - exact).abs() <= 2.0**-24 * exact.abs()).all())


def test_a_view_is_one_call() -> None:
    """On small tensors each call from Python costs as much as an operator; a part that others read stays a slice."""
    x, v, w = (build.argument(name, shape) for name, shape in (("x", [4, 3, 5]), ("v", [4]), ("w", [3])))
    middle, last = build.part(x, 1, 1, 2), build.part(x, 1, 2, 3)
    turned = make("transpose", build.reshape(middle, [4, 5]), order=(1, 0))
    between = make("broadcast", w, shape=(4, 3, 5), dims=(1,))
    outputs = (build.add(turned, build.expand(v, [5, 4])), last, build.reshape(last, [4, 5]), build.add(x, between))
    graph = Graph((x, v, w), outputs)
    run, given = program(graph), _values(graph)
    assert run.source.count(".select(1, 1).") + run.source.count(".select(1, 1)\n") == 1
    assert run.source.count(".narrow(") == 1
    assert ".transpose(0, 1)" in run.source
    assert run.source.count(".unsqueeze(") == 1
    for ours, theirs in zip(run(*given), run_torch(graph, *given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
