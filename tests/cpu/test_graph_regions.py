"""Regions computed by generated kernels equal the same operators one by one: C, and Triton in its interpreter."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tilemesh.core.c_library import compiler
from tilemesh.graph import build, derive
from tilemesh.graph.by_torch import run_torch
from tilemesh.graph.emit import program
from tilemesh.graph.evaluate import run_numpy
from tilemesh.graph.generated import RegionCall, kernel_job, server
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.graph.kernel_c import write_kernels
from tilemesh.graph.kernel_plan import plan_kernel
from tilemesh.graph.kernel_triton import launch_plans
from tilemesh.graph.ops import PRIMITIVES, primitive
from tilemesh.graph.regions import fused
from tilemesh.graph.rules import simplify
from tilemesh.kernels.launch import compile_ahead
from tilemesh.kernels.launch.compile_ahead import AheadCompilers

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


@pytest.mark.parametrize("way", WAYS)
def test_a_primitive_is_one_row(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added to the table has a value by numpy and torch, a derivative, code, and kernels."""
    row = replace(primitive("exp"), name="expm1", torch="expm1", partials="add(out, 1.0)")
    row = replace(row, c="expm1{f}({x})", triton="tl.exp({x}) - 1.0")
    monkeypatch.setitem(PRIMITIVES, "expm1", row)
    x = build.argument("x", [3, 4], "float64")
    value = build.multiply(make("expm1", x), 2.0)
    graph = Graph((x,), (value, *derive.gradient(build.total(value), [x])))
    values = torch.randn(3, 4, dtype=torch.float64)
    expected = (2 * values.expm1(), 2 * values.exp())
    kernels = program(fused(graph, server(way)), way=way)
    assert len(kernels.regions) == 1
    by_numpy = [torch.from_numpy(each) for each in run_numpy(graph, values.numpy())]
    for results in (by_numpy, run_torch(graph, values), program(graph)(values), kernels(values)):
        torch.testing.assert_close(tuple(results), expected, rtol=1e-14, atol=1e-15)


@needs_compiler
def test_a_long_row_is_added_in_parts() -> None:
    """32-bit sums forget a one beside 2^25: all that lie between the first and the last thousand."""
    x = torch.ones(2, 1 << 17)
    x[:, :1024], x[:, -1024:] = 1 << 24, -(1 << 24)
    graph = Graph((row := build.argument("x", list(x.shape)),), (build.total(build.add(row, row), [1]),))
    (total,) = program(fused(graph, server("c")), way="c")(x)
    assert total.tolist() == [2.0 * (x.shape[1] - 2048)] * 2


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


def test_the_text_of_a_kernel_is_the_same_in_every_process() -> None:
    """It is the key of its library in the cache. Kept values were read in the order of a set of objects."""
    x = build.argument("x", [4, 32])
    parts = [make(name, x) for name in ("exp", "tanh", "sigmoid", "erf", "sin", "cos")]
    most = build.amax(functools.reduce(build.add, parts), [1], keep=True)
    graph = Graph((x,), tuple(build.multiply(part, most) for part in parts))
    (region,) = [node for node in fused(graph, server("c")).nodes() if node.op == "region"]
    text, _ = write_kernels([plan_kernel(region["body"], region["space"], region["columns"], [(32, 1)])])
    assert re.findall(r"= (kept\d)\[column\]", text) == [f"kept{place}" for place in range(6)]


@pytest.mark.parametrize("way", WAYS)
def test_operands_that_lie_otherwise_get_a_kernel_of_their_own(way: str) -> None:
    """Transposed, and with numbers of their own where one was repeated."""
    x, y = build.argument("x", [8, 6], "float64"), build.argument("y", [8, 6], "float64")
    graph = Graph((x, y), (build.exp(build.multiply(x, build.add(y, 1.0))),))
    numbers = torch.randn(8, 6, dtype=torch.float64)
    run = program(fused(graph, server(way)), inputs=[numbers[:1].expand(8, 6), numbers], way=way)
    for values in ((numbers, numbers), (numbers[:1].expand(8, 6), numbers), (numbers.t().contiguous().t(), numbers)):
        torch.testing.assert_close(run(*values)[0], run_torch(graph, *values)[0], rtol=1e-14, atol=0)
    assert len(run.regions[0].others) == 2


FAR = 1 << 30
"""Numbers between two rows: the third is more than 32 bits away."""


@pytest.mark.parametrize(
    ("size", "reduces", "strides"),
    [((3,), False, (FAR,)), ((3, 8), True, (FAR, 1)), ((8, 3), True, (1, FAR)), ((3, 20_000), True, (FAR, 1))],
    ids=["line", "rows", "columns", "long rows"],
)
def test_a_slice_of_a_tensor_beyond_32_bits_is_read_where_it_lies(
    size: tuple[int, ...], reduces: bool, strides: tuple[int, ...]
) -> None:
    x = build.argument("x", size, "bool")
    number = build.negate(build.add(build.cast(x, "float32"), 1.0))
    graph = fused(Graph((x,), (build.total(number, [1]) if reduces else number,)), server("interpret"))
    memory = torch.empty(2 * FAR + 20_000, dtype=torch.bool)  # of which a few pages are touched
    values = memory.as_strided(size, strides)
    values.copy_(torch.arange(values.numel()).reshape(size) % 3 == 1)
    (ours,) = program(graph, inputs=[values], way="interpret")(values)
    torch.testing.assert_close(ours, run_torch(graph, values)[0])


def test_the_largest_of_a_row_and_its_powers_are_found_in_one_run() -> None:
    """Also where a row has infinities or is NaN: as torch computes it."""
    x = build.argument("x", [6, 20_000], "float32")
    most = build.amax(x, [1])
    powers = build.exp(build.subtract(x, build.expand(build.reshape(most, [6, 1]), x.shape)))
    graph = fused(Graph((x,), (most, build.total(powers, [1]))), server("interpret"))
    values = torch.randn(6, 20_000) * 30
    values[1, 17_000:] = -torch.inf
    values[2] = -torch.inf
    values[3, 5] = torch.inf
    values[4, 19_999] = torch.nan
    values[5] = torch.finfo(torch.float32).min
    run = program(graph, way="interpret")
    for ours, theirs in zip(run(values), run_torch(graph, values), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0, equal_nan=True)
    (region,) = [node for node in graph.nodes() if node.op == "region"]
    plan = plan_kernel(region["body"], region["space"], region["columns"], [(20_000, 1)])
    ((_, written),) = launch_plans([plan], torch.device("cpu"))
    assert written.text.count("for start in") == 1


def test_weights_are_widened_as_they_are_read() -> None:
    x, w, b = (build.argument(name, shape, "bfloat16") for name, shape in (("x", [4, 5, 8]), ("w", [8]), ("b", [8])))
    wide = build.layer_norm(*(build.cast(value, "float32") for value in (x, w, b)))
    graph = fused(Graph((x, w, b), (build.cast(wide, "bfloat16"),)), server("interpret"))
    assert [node.op for node in graph.nodes() if node.op not in ("input", "item")] == ["region"]
    values = [torch.randn(4, 5, 8).bfloat16(), torch.randn(8).bfloat16(), torch.randn(8).bfloat16()]
    given, *weights = (value.float() for value in values)
    expected = torch.nn.functional.layer_norm(given, [8], *weights)
    torch.testing.assert_close(program(graph, way="interpret")(*values)[0], expected.bfloat16())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "float64"])
def test_other_numbers_become_bfloat16(way: str, dtype: str) -> None:
    x, y = build.argument("x", [7], dtype), build.argument("y", [7], "bfloat16")
    graph = fused(Graph((x, y), (build.negate(build.add(build.cast(x, "bfloat16"), y)),)), server(way))
    values = [torch.tensor([0, 1, 2, -3, 5, 7, -1]).to(getattr(torch, dtype)), torch.zeros(7, dtype=torch.bfloat16)]
    assert torch.equal(program(graph, way=way)(*values)[0], run_torch(graph, *values)[0])


@pytest.mark.parametrize("way", WAYS)
def test_the_number_of_a_class_is_no_column_where_logits_are_one_for_each_row(way: str) -> None:
    """Logits as sums over as many features as there are classes: of the kernel's rows each has one."""
    x, target = build.argument("x", [6, 5, 5], "float64"), build.argument("target", [6], "int64")
    logits = build.total(build.multiply(x, x), [2])
    hit = build.compare("equal", build.iota([6, 5], 1), build.reshape(target, [6, 1]))
    graph = Graph((x, target), (build.where(hit, logits, 0.0), build.log_softmax(logits)))
    values = [torch.randn(6, 5, 5, dtype=torch.float64), torch.arange(6) % 5]
    for mine, theirs in zip(
        program(fused(graph, server(way)), way=way)(*values), run_torch(graph, *values), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


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


def test_workers_compile_kernels_for_a_gpu_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handed over by two programs of a model, compiled while the second is written, there when the context ends."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    jobs = [_job(_norm("bfloat16")), _job(_long("float32"))]
    with AheadCompilers(1) as ahead:
        for job in jobs:
            ahead.hand_over([job])
        assert ahead.done == 0
    assert ahead.done == 2
    assert len(list(tmp_path.rglob("*.cubin"))) == 2


def test_workers_serve_the_next_piece_and_end_when_nobody_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that torch cuts into 29 pieces (Mixtral) started 8 processes for each; one that is gone starts again."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with AheadCompilers(1) as ahead:
        ahead.hand_over([_job(_long("float16"))])
    (worker,) = compile_ahead._WORKERS.alive
    process = worker.process
    with AheadCompilers(1) as ahead:
        ahead.hand_over([_job(_norm("float16"))])
    assert (ahead.done, compile_ahead._WORKERS.alive, worker.process) == (1, [worker], process)
    process.kill()
    process.wait()
    with AheadCompilers(1) as ahead:
        ahead.hand_over([_job(_softmax("float32"))])
    assert (ahead.done, len(list(tmp_path.rglob("*.cubin")))) == (1, 3)
    monkeypatch.setattr(compile_ahead, "IDLE_S", 0.05)
    with suppress(ZeroDivisionError), AheadCompilers(1) as ahead:  # after an error nobody waits
        ahead.hand_over([_job(_long("float32"))] * 50)
        raise ZeroDivisionError
    worker.join(timeout=60)
    assert not worker.is_alive()
    assert not compile_ahead._WORKERS.alive
    assert worker.process.returncode == 0


def _job(graph: Graph) -> dict[str, Any]:
    """The first region of a graph as a job for an H100 or H200."""
    region = next(node for node in fused(simplify(graph)[0], server("interpret")).nodes() if node.op == "region")
    body = region["body"]
    strides = [torch.empty(node.shape).stride() for node in body.inputs]
    plan = plan_kernel(body, region["space"], region["columns"], strides)
    ((launch, written),) = launch_plans([plan], torch.device("cpu"))
    return kernel_job(written, launch.steps[0], RegionCall(region, torch.device("cpu")), ["cuda", 90, 32])
