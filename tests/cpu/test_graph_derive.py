"""A graph by numpy, by torch and by torch's own derivatives: every primitive, random graphs, second order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.graph import build, derive
from tilemesh.graph.by_torch import run_torch
from tilemesh.graph.evaluate import run_numpy
from tilemesh.graph.ir import Graph, Node, make, ordered
from tilemesh.graph.ops import PRIMITIVES
from tilemesh.plan.place.rules import EXCHANGES

F64 = "float64"


def x64(name: str, *shape: int) -> Node:
    return build.argument(name, shape, F64)


def values(nodes: Sequence[Node], seed: int, low: float = -1.5, high: float = 1.5) -> list[np.ndarray[Any, Any]]:
    numbers = np.random.default_rng(seed)
    made = []
    for node in nodes:
        shape = tuple(int(size) for size in node.shape if isinstance(size, int))
        integers = node.dtype == "int64"
        made.append(numbers.integers(0, 4, shape) if integers else numbers.uniform(low, high, shape))
    return made


x, y, positive = x64("x", 3, 4), x64("y", 3, 4), x64("p", 3, 4)
image, kernel = x64("image", 2, 4, 7, 6), x64("kernel", 6, 2, 3, 2)
CASES: dict[str, tuple[Sequence[Node], Callable[[], Node]]] = {
    "add": ((x, y), lambda: build.add(x, y)),
    "subtract": ((x, y), lambda: build.subtract(x, y)),
    "multiply": ((x, y), lambda: build.multiply(x, y)),
    "divide": ((x, positive), lambda: build.divide(x, positive)),
    "power": ((positive, y), lambda: build.power(positive, y)),
    "square": ((x,), lambda: build.power(x, 2.0)),
    "maximum": ((x, y), lambda: build.maximum(x, y)),
    "minimum": ((x, y), lambda: build.minimum(x, y)),
    "negate": ((x,), lambda: build.negate(x)),
    "absolute": ((x,), lambda: make("absolute", x)),
    "sign": ((x,), lambda: build.multiply(make("sign", x), x)),
    **{op: ((x,), partial(make, op, x)) for op in ("exp", "sin", "cos", "tanh", "sigmoid", "erf")},
    "log": ((positive,), lambda: build.log(positive)),
    "sqrt": ((positive,), lambda: build.sqrt(positive)),
    "where": ((x, y), lambda: build.where(build.compare("less", x, y), build.exp(x), build.multiply(y, y))),
    "less_equal": ((x, y), lambda: build.where(build.compare("less_equal", x, y), x, build.multiply(y, x))),
    "cast": ((x,), lambda: build.cast(build.cast(x, F64), F64)),
    "sum": ((x,), lambda: build.total(build.multiply(x, x), [0])),
    "amax": ((x,), lambda: build.amax(x, [1])),
    "reshape": ((x,), lambda: build.reshape(build.exp(x), [2, 6])),
    "transpose": ((image,), lambda: build.transpose(build.exp(image), [2, 0, 3, 1])),
    "broadcast": ((x,), lambda: make("broadcast", build.exp(x), shape=(4, 2, 3), dims=(2, 0))),
    "concat": ((x, y), lambda: build.concat([build.exp(x), y, x], 1)),
    "slice": (
        (image,),
        lambda: make("slice", build.exp(image), start=(0, 1, 2, 0), stop=(2, 3, 7, 6), step=(1, 1, 2, 4)),
    ),
    "pad": ((x,), lambda: build.pad(build.exp(x), [1, 0], [0, 2], [2, 1])),
    "reverse": ((x,), lambda: make("reverse", build.exp(x), dims=(1,))),
    "dot": ((x, y), lambda: build.dot(x, build.transpose(y))),
    "dot by batch": ((image,), lambda: build.dot(image, build.transpose(image))),
    "take": ((x,), lambda: build.take(build.exp(x), build.constant(2, (2, 3), "int64"))),
    "argmax": ((x,), lambda: build.take(build.exp(x), make("argmax", x, dim=0))),
    "put_add": ((x,), lambda: make("put_add", build.exp(x), build.constant(1, (3,), "int64"), size=5)),
    "conv1d": (
        (x64("a", 2, 4, 9), x64("b", 6, 4, 3)),
        lambda: build.conv(x64("a", 2, 4, 9), x64("b", 6, 4, 3), [2], [1]),
    ),
    "conv2d": (
        (image, kernel),
        lambda: build.conv(image, kernel, stride=[2, 1], padding=[1, 2], dilation=[1, 2], groups=2),
    ),
    "conv3d": (
        (x64("a", 1, 2, 4, 3, 4), x64("b", 3, 2, 2, 2, 2)),
        lambda: build.conv(x64("a", 1, 2, 4, 3, 4), x64("b", 3, 2, 2, 2, 2), padding=[1, 0, 1]),
    ),
    "max_pool": ((image,), lambda: build.max_pool(image, [3, 2], [2, 2])),
    "average_pool": ((image,), lambda: build.average_pool(image, [3, 2], [1, 2])),
    "softmax": ((x,), lambda: build.softmax(x)),
    "cross_entropy": ((x,), lambda: build.cross_entropy(x, build.constant(3, (3,), "int64"))),
    "layer_norm": ((x,), lambda: build.layer_norm(x, build.constant(1.5, (4,), F64), build.constant(0.5, (4,), F64))),
    "gelu": ((x,), lambda: build.gelu(x)),
}


def seeds_of(graph: Graph, inputs: Sequence[Node]) -> tuple[list[Any], list[Any]]:
    low = 0.3 if positive in inputs else -1.5
    return values(inputs, 1, low), values(inputs, 2)


@pytest.mark.parametrize("name", CASES)
def test_every_primitive(name: str) -> None:
    inputs, body = CASES[name]
    output = body()
    graph = Graph(tuple(inputs), (output,))
    given_values, direction = seeds_of(graph, inputs)
    tensors = [torch.from_numpy(value) for value in given_values]

    def reference(*values: torch.Tensor) -> torch.Tensor:
        return run_torch(graph, *values)[0]  # type: ignore[no-any-return]

    by_numpy = run_numpy(graph, *given_values)[0]
    by_torch = reference(*tensors)
    np.testing.assert_allclose(by_numpy, by_torch, rtol=1e-13, atol=1e-13)
    assert by_numpy.shape == output.shape
    ours = run_numpy(derive.jvp(graph, inputs), *given_values, *direction)[1]
    primal_tangent = torch.func.jvp(reference, tuple(tensors), tuple(map(torch.from_numpy, direction)))[1]
    np.testing.assert_allclose(ours, primal_tangent, rtol=1e-12, atol=1e-12)
    weight = torch.from_numpy(values([output], 3)[0])
    cotangent = build.argument("g", output.shape, F64)
    back = Graph((*inputs, cotangent), tuple(derive.vjp([output], [cotangent], inputs)))
    expected = torch.func.vjp(reference, *tensors)[1](weight)
    for ours, theirs in zip(run_numpy(back, *given_values, weight.numpy()), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(run_torch(back, *tensors, weight), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_no_primitive_is_without_a_case() -> None:
    """What is added to the table is compared with torch by the cases above, itself or as a derivative of another."""
    seen = set()
    for inputs, body in CASES.values():
        output = body()
        slopes = derive.vjp([output], [build.argument("g", output.shape, F64)], inputs)
        seen |= {node.op for node in ordered([output, *slopes])}
    elsewhere = {"switch", "merge", "region", "opaque", "item", "lay", "own_copy", *EXCHANGES}  # other tests have these
    assert set(PRIMITIVES) - seen <= elsewhere


@pytest.mark.parametrize(
    "name", ["conv2d", "power", "softmax", "amax", "cross_entropy", "gelu", "dot", "divide", "average_pool"]
)
def test_second_order(name: str) -> None:
    """The gradient of a number made of the gradient: torch differentiates twice as well."""
    inputs, body = CASES[name]
    output = body()
    loss = build.total(build.multiply(output, build.tanh(output)))
    first = derive.gradient(loss, inputs)
    number = build.total(build.multiply(first[0], first[0]))
    graph = Graph(tuple(inputs), tuple(derive.gradient(number, inputs)))
    given_values, _ = seeds_of(graph, inputs)
    tensors = [torch.from_numpy(value).requires_grad_() for value in given_values]
    out = run_torch(Graph(tuple(inputs), (output,)), *tensors)[0]
    slope = torch.autograd.grad((out * out.tanh()).sum(), tensors, create_graph=True)
    expected = torch.autograd.grad((slope[0] * slope[0]).sum(), tensors)
    for ours, theirs in zip(run_numpy(graph, *given_values), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-11)


UNARY = ("negate", "exp", "sin", "cos", "tanh", "sigmoid", "erf")
BINARY = ("add", "subtract", "multiply", "maximum", "minimum")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(UNARY + BINARY + ("dot", "sum", "amax")), st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=9,
    )
)
def test_random_graphs(steps: list[tuple[str, int, int]]) -> None:
    """Both modes agree with each other and with torch on graphs of any shape, with values used several times."""
    a, b = x64("a", 3, 3), x64("b", 3, 3)
    pool = [a, b]
    for op, first, second in steps:
        left, right = pool[first % len(pool)], pool[second % len(pool)]
        if op in UNARY:
            pool.append(make(op, build.tanh(left)))
        elif op == "dot":
            pool.append(build.tanh(build.dot(left, right)))
        elif op in ("sum", "amax"):
            pool.append(build.expand(make(op, left, dims=(first % 2,)), (3, 3)))
        else:
            pool.append(make(op, left, right))
    loss = build.total(pool[-1])
    graph = Graph((a, b), (loss,))
    inputs, direction = values((a, b), 5), values((a, b), 6)
    tensors = [torch.from_numpy(value).requires_grad_() for value in inputs]
    expected = torch.autograd.grad(run_torch(graph, *tensors)[0], tensors, allow_unused=True)
    gradients = run_numpy(Graph((a, b), tuple(derive.gradient(loss, (a, b)))), *inputs)
    slope = 0.0
    for ours, theirs, way in zip(gradients, expected, direction, strict=True):
        np.testing.assert_allclose(ours, 0.0 if theirs is None else theirs, rtol=1e-10, atol=1e-10)
        slope += float((ours * way).sum())
    forward = run_numpy(derive.jvp(graph, (a, b)), *inputs, *direction)[1]
    np.testing.assert_allclose(forward, slope, rtol=1e-10, atol=1e-10)


def test_control_flow_has_gradients() -> None:
    """x goes through one of two branches; the other one is dead, and its gradient is zero."""
    v, decide = x64("v", 3), build.argument("decide", (), "bool")
    high = build.multiply(build.switch(v, decide, True), 3.0)
    low = build.exp(build.switch(v, decide, False))
    result = build.total(build.merge(decide, high, low))
    graph = Graph((v, decide), (result, *derive.gradient(result, [v])))
    numbers = np.array([0.5, -1.0, 2.0])
    for branch, value, slope in (
        (True, (3 * numbers).sum(), np.full(3, 3.0)),
        (False, np.exp(numbers).sum(), np.exp(numbers)),
    ):
        out, gradient = run_numpy(graph, numbers, np.array(branch))
        np.testing.assert_allclose(out, value)
        np.testing.assert_allclose(gradient, slope)
        out, gradient = run_torch(graph, torch.from_numpy(numbers), torch.tensor(branch))
        np.testing.assert_allclose(gradient, slope)
    tangent = derive.jvp(Graph((v, decide), (result,)), [v])
    assert run_numpy(tangent, numbers, np.array(True), np.ones(3))[1] == pytest.approx(9.0)


def test_a_program_with_its_update() -> None:
    """Forward, loss, gradient and update declared at once, then run: the loss falls."""
    data, target, w = x64("data", 8, 3), x64("target", 8, 1), x64("w", 3, 1)
    error = build.subtract(build.dot(data, w), target)
    loss = build.mean(build.multiply(error, error))
    graph = Graph((data, target, w), (loss, *derive.update(loss, [w], 0.2)))
    inputs, goal = values([data], 3)[0], np.array([[1.0], [-2.0], [0.5]])
    weights, losses = np.zeros((3, 1)), []
    for _ in range(300):
        value, weights = run_numpy(graph, inputs, inputs @ goal, weights)
        losses.append(float(value))
    np.testing.assert_allclose(weights, goal, atol=1e-3)
    assert losses[-1] < losses[0] * 1e-4


def test_the_cost_of_each_mode() -> None:
    wide = x64("wide", 100)
    cost = derive.jacobian_cost(Graph((wide,), (build.total(build.exp(wide)),)), [wide])
    assert cost["forward"]["passes"] == 100
    assert cost["reverse"]["passes"] == 1


def test_what_has_no_derivative_is_named() -> None:
    value = make("opaque", x, target="aten.unheard_of", shape=(3, 4), dtype=F64, line="model.py:7")
    with pytest.raises(UsageError, match=r"aten.unheard_of has no derivative here \(model.py:7\)"):
        derive.gradient(build.total(value), [x])
    several = make("opaque", x, target="aten.of_several", shape=(), dtype="tuple", line="model.py:8")
    first = make("item", several, index=0, shape=(3, 4), dtype=F64)
    for derived in (
        lambda: derive.gradient(build.total(first), [x]),  # was a gradient of zeros
        lambda: derive.jvp(Graph((x,), (build.total(first),)), [x]),
    ):
        with pytest.raises(UsageError, match=r"aten.of_several has no derivative here \(model.py:8\)"):
            derived()
    with pytest.raises(UsageError, match="a gradient is of one number"):
        derive.gradient(x, [x])


def _attention_block() -> tuple[Sequence[Node], Node]:
    """A Transformer block with its loss: norms, attention, GELU, targets."""
    h = x64("h", 2, 5, 8)
    names = {"q": (8, 8), "k": (8, 8), "v": (8, 8), "o": (8, 8), "up": (8, 16), "down": (16, 8), "head": (8, 11)}
    w = {name: x64(name, *shape) for name, shape in names.items()}
    one, none = x64("one", 8), x64("none", 8)
    normed = build.layer_norm(h, one, none)
    q, k, v = (build.dot(normed, build.expand(w[name], (2, 8, 8))) for name in "qkv")
    mixed = build.dot(build.softmax(build.multiply(build.dot(q, build.transpose(k)), 8**-0.5)), v)
    y = build.add(h, build.dot(mixed, build.expand(w["o"], (2, 8, 8))))
    wide = build.gelu(build.dot(build.layer_norm(y, one, none), build.expand(w["up"], (2, 8, 16))))
    y = build.add(y, build.dot(wide, build.expand(w["down"], (2, 16, 8))))
    logits = build.dot(y, build.expand(w["head"], (2, 8, 11)))
    return (h, *w.values(), one, none), build.cross_entropy(logits, build.constant(7, (2, 5), "int64"))


def _picture_model() -> tuple[Sequence[Node], Node]:
    """Convolutions with a branch that joins again, pooling, a head."""
    picture, first, second, head = x64("x", 2, 3, 8, 8), x64("a", 4, 3, 3, 3), x64("b", 4, 4, 3, 3), x64("c", 4, 5)
    y = build.relu(build.conv(picture, first, padding=[1, 1]))
    y = build.max_pool(build.add(y, build.tanh(build.conv(y, second, padding=[1, 1]))), [2, 2])
    logits = build.dot(build.mean(y, [2, 3]), head)
    return (picture, first, second, head), build.cross_entropy(logits, build.constant(2, (2,), "int64"))


@pytest.mark.parametrize("model", [_attention_block, _picture_model])
def test_whole_models(model: Callable[[], tuple[Sequence[Node], Node]]) -> None:
    """Both modes of a whole model and its loss are torch.func's."""
    inputs, loss = model()
    graph = Graph(tuple(inputs), (loss,))
    given_values, direction = values(inputs, 1, -0.9, 0.9), values(inputs, 2)
    tensors = tuple(map(torch.from_numpy, given_values))

    def reference(*given: torch.Tensor) -> torch.Tensor:
        return run_torch(graph, *given)[0]  # type: ignore[no-any-return]

    gradients = run_numpy(Graph(tuple(inputs), tuple(derive.gradient(loss, inputs))), *given_values)
    expected = torch.func.grad(reference, argnums=tuple(range(len(tensors))))(*tensors)
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    forward = run_numpy(derive.jvp(graph, inputs), *given_values, *direction)[1]
    tangent = torch.func.jvp(reference, tensors, tuple(map(torch.from_numpy, direction)))[1]
    np.testing.assert_allclose(forward, tangent, rtol=1e-12, atol=1e-12)
