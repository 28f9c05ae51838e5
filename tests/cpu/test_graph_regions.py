"""Regions computed by generated kernels equal the same operators one by one: C, and Triton in its interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tilemesh.graph import build, derive
from tilemesh.graph.by_torch import run_torch
from tilemesh.graph.emit import program
from tilemesh.graph.generated import server
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.kernel_c import compiler, write_kernels
from tilemesh.graph.kernel_plan import plan_kernel
from tilemesh.graph.regions import fused
from tilemesh.graph.rules import simplify

needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C compiler here")
WAYS = [pytest.param("c", marks=needs_compiler), "interpret"]


def _norm(dtype: str) -> Graph:
    x, w, b = build.argument("x", [3, 5, 24], dtype), build.argument("w", [24], dtype), build.argument("b", [24], dtype)
    loss = build.total(build.gelu(build.layer_norm(build.tanh(x), w, b)))
    return Graph((x, w, b), (loss, *derive.gradient(loss, [x, w, b])))


def _softmax(dtype: str) -> Graph:
    x, mask = build.argument("x", [4, 6, 40], dtype), build.argument("mask", [6, 40], "bool")
    chosen = build.where(mask, build.multiply(x, 0.5), -1e4)
    value = build.softmax(chosen)
    loss = build.total(build.multiply(value, build.log(build.add(value, 0.1))))
    return Graph((x, mask), (value, build.log_softmax(x), *derive.gradient(loss, [x])))


def _shapes(dtype: str) -> Graph:
    """A reshape between operators, a transposed operand, one number per row, a sum over rows that leaves."""
    x, y = build.argument("x", [4, 6, 10], dtype), build.argument("y", [10, 24], dtype)
    flat = build.reshape(build.silu(x), [24, 10])
    mixed = build.multiply(build.add(flat, build.transpose(y)), build.reshape(build.total(x, [2], keep=True), [24, 1]))
    return Graph((x, y), (build.exp(build.negate(build.multiply(mixed, mixed))), build.total(mixed, [0])))


def _kinds(dtype: str) -> Graph:
    """Comparisons, signs, casts, maxima, an operand that is one number, results of several dtypes."""
    x, s = build.argument("x", [7, 9], dtype), build.argument("s", [], dtype)
    above = build.compare("less", s, x)
    clipped = build.minimum(build.maximum(x, -0.5), build.expand(s, x.shape))
    signs = build.cast(build.where(above, clipped, build.negate(x)), "int64")
    root = build.sqrt(build.add(build.multiply(x, x), 1.0))
    return Graph((x, s), (above, signs, build.divide(clipped, root), build.amax(build.add(root, clipped), [1])))


def _long(dtype: str) -> Graph:
    x = build.argument("x", [2, 17_000], dtype)
    return Graph((x,), (build.log_softmax(x), build.amax(build.multiply(x, 2.0), [1])))


PROGRAMS: dict[str, Callable[[str], Graph]] = {
    "norm": _norm, "softmax": _softmax, "shapes": _shapes, "kinds": _kinds, "long": _long,
}  # fmt: skip


def _values(graph: Graph) -> list[torch.Tensor]:
    torch.manual_seed(1)
    values = []
    for node in graph.inputs:
        shape = [int(size) for size in node.shape]  # type: ignore[call-overload]
        made = torch.randn(shape, dtype=torch.float64)
        values.append(made > 0 if node.dtype == "bool" else made.to(getattr(torch, node.dtype)))
    return values


def _launched(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes() if node.launched]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_region_equals_its_operators(name: str, dtype: str, way: str) -> None:
    graph, _ = simplify(PROGRAMS[name](dtype))
    better = fused(graph, server(way))
    assert len(_launched(better)) < len(_launched(graph)) / 2
    values = _values(graph)
    expected = run_torch(graph, *[value.double() if value.is_floating_point() else value for value in values])
    ours = program(better, way=way)(*values)
    plain = run_torch(graph, *values)
    for mine, exact, theirs in zip(ours, expected, plain, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        if not mine.is_floating_point():
            assert torch.equal(mine, theirs)
            continue
        # The bound: a few times what torch's own operators are off by, and a few units in the last place.
        scale = max(1.0, float(exact.abs().max()))
        own = float((theirs.double() - exact).abs().max())
        assert float((mine.double() - exact).abs().max()) <= 4 * own + 16 * torch.finfo(mine.dtype).eps * scale
    for mine, reference in zip(run_torch(better, *values), plain, strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("way", WAYS)
def test_nan_and_infinity_pass_as_in_torch(way: str) -> None:
    x = build.argument("x", [2, 6])
    graph = Graph((x,), (build.amax(build.multiply(x, 1.5), [1]), build.relu(build.negate(x)), build.silu(x)))
    values = torch.tensor([[1.0, float("nan"), 0.0, -1.0, 2.0, 3.0], [float("inf"), 1.0, -200.0, -90.0, 0.0, -1.0]])
    for mine, theirs in zip(program(fused(graph, server(way)), way=way)(values), run_torch(graph, values), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-6, atol=1e-30)


@needs_compiler
@pytest.mark.parametrize("name", ["exp", "log", "tanh", "sigmoid", "erf"])
def test_functions_of_c_are_precise(name: str) -> None:
    """Against float64: within a few units in the last place, over all magnitudes."""
    x = build.argument("x", [60_000])
    graph = Graph((x,), (build.add(build.multiply(getattr(build, name)(x), 1.0), 0.0),))
    wide = torch.cat(
        [torch.linspace(-110, 95, 30_000), torch.logspace(-37, 37, 15_000), -torch.logspace(-37, 1, 15_000)]
    )
    wide = wide.abs() if name == "log" else wide
    ours = program(fused(graph, server("c"), smallest=1), way="c")(wide)[0]
    exact = getattr(torch, name)(wide.double())
    error = (ours.double() - exact).abs() / exact.abs().clamp(min=1e-37)
    error[(exact.abs() > 3.4e38) & ours.isinf()] = 0.0
    error[(exact.abs() < 1.2e-38) & (ours.abs() < 1.2e-38)] = 0.0  # below the normal numbers
    assert float(error.max()) <= 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("function", ["tanh", "sigmoid"])
def test_a_costly_value_is_computed_once_though_two_runs_over_a_row_need_it(function: str) -> None:
    """Scores that a function bounds before a softmax: its largest and its sum are two runs."""
    x = build.argument("x", [4, 32])
    graph, _ = simplify(Graph((x,), (build.softmax(build.multiply(getattr(build, function)(x), 50.0)),)))
    (region,) = [node for node in fused(graph, server("c")).nodes() if node.op == "region"]
    plan = plan_kernel(region["body"], region["space"], region["columns"], [(32, 1)])
    text, _ = write_kernels([plan])
    assert text.count(f"fast_{function}(") == 1
    assert text.count("fast_exp(") == 1


@needs_compiler
def test_operands_that_lie_otherwise_are_laid_anew() -> None:
    x, y = build.argument("x", [8, 6], "float64"), build.argument("y", [8, 6], "float64")
    graph = Graph((x, y), (build.exp(build.multiply(x, build.add(y, 1.0))),))
    run = program(fused(graph, server("c")), way="c")
    values = torch.randn(6, 8, dtype=torch.float64).t(), torch.randn(8, 6, dtype=torch.float64)
    torch.testing.assert_close(run(*values)[0], run_torch(graph, *values)[0], rtol=1e-14, atol=0)


def test_a_region_never_waits_for_itself() -> None:
    """a, then a product of a, then a sum of both: the sum cannot be in a's region without a cycle."""
    x = build.argument("x", [4, 4], "float64")
    first = build.exp(build.negate(x))
    last = build.add(build.tanh(first), build.multiply(build.dot(first, x), first))
    graph = Graph((x,), (last, build.negate(last)))
    better = fused(graph, lambda node: True)
    values = _values(graph)
    for mine, theirs in zip(run_torch(better, *values), run_torch(graph, *values), strict=True):
        assert torch.equal(mine, theirs)
    assert sum(node.op == "region" for node in better.nodes()) == 2
