"""The IR and rewrites, without torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import DEVICES
from tilemesh.graph import build
from tilemesh.graph.cost import graph_seconds
from tilemesh.graph.evaluate import run_numpy
from tilemesh.graph.folding import constant_of, specialise
from tilemesh.graph.ir import Graph, Node, make, ordered
from tilemesh.graph.rewrite import rewrite, rule
from tilemesh.graph.rules import ALGEBRA, INFERENCE, simplify

x, y = build.argument("x", [3, 4], "float64"), build.argument("y", [3, 4], "float64")


def test_equal_nodes_are_one_object() -> None:
    assert build.add(x, y) is build.add(x, y)
    assert build.add(x, y) is not build.add(y, x)  # operand order is a rule's business, not identity's
    graph = Graph((x, y), (build.multiply(build.add(x, y), build.add(x, y)),))
    assert [node.op for node in graph.nodes()] == ["input", "input", "add", "multiply"]
    assert graph.flops == 24
    assert graph.moved_bytes == (3 + 2) * 96  # add reads two and writes one; multiply reads one, twice, and writes one


def test_a_deep_graph_needs_no_recursion() -> None:
    node = x
    for _ in range(5_000):
        node = build.tanh(node)
    assert len(Graph((x,), (node,)).nodes()) == 5_001
    rewritten, _ = simplify(Graph((x,), (build.negate(build.negate(node)),)))
    assert rewritten.outputs == (node,)


def test_the_printed_form() -> None:
    graph = Graph((x, y), (build.total(build.multiply(build.add(x, y), 2.0), [1]),))
    assert str(graph) == (
        "(x: float64[3, 4], y: float64[3, 4])\n"
        "  %0 = add(x, y)  # float64[3, 4]\n"
        "  %1 = broadcast(2.0, dims=[], shape=[3, 4])  # float64[3, 4]\n"
        "  %2 = multiply(%0, %1)  # float64[3, 4]\n"
        "  %3 = sum(%2, dims=[1])  # float64[3]\n"
        "  return %3"
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: make("ad", x, y), "primitive"),
        (lambda: make("add", x), "add got 1 inputs; give 2"),
        (lambda: make("add", x, build.argument("z", [4, 3], "float64")), "give equal shapes and dtypes"),
        (lambda: build.dot(x, y), r"give \[..., m, k\] and \[..., k, n\]"),
        (lambda: make("reshape", x, shape=(5, 2)), "give as many elements"),
        (lambda: make("transpose", x, order=(0, 0)), "different ones below 2"),
        (lambda: build.conv(x, y), "a convolution of"),
        (lambda: build.concat([x, build.argument("z", [2, 5], "float64")], 0), "other sizes must be equal"),
        (lambda: build.part(x, 0, 2, 9), "leaves a dim of 3"),
        (lambda: build.exp(build.argument("i", [2], "int64")), "give a floating-point dtype"),
        (lambda: build.expand(x, (5, 4)), "cannot be broadcast"),
        (lambda: build.argument("q", [2], "float7"), "dtype"),
        (lambda: Graph((x,), (build.add(x, y),)), "the outputs need the inputs y"),
    ],
)
def test_what_does_not_fit_is_refused(made: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made()  # type: ignore[operator]


def test_arrays_of_other_shapes_are_refused() -> None:
    tokens = build.argument("tokens", [5, 4], "float64")
    with pytest.raises(UsageError, match=r"input tokens has shape \[2, 3\]; the graph needs \[5, 4\]"):
        run_numpy(Graph((tokens,), (build.exp(tokens),)), np.zeros((2, 3)))


def random_graph(draws: list[tuple[str, int, int]]) -> tuple[tuple[Node, ...], Node]:
    square = (build.argument("a", [3, 3], "float64"), build.argument("b", [3, 3], "float64"))
    pool: list[Node] = [*square, build.like(square[0], 0.0), build.like(square[0], 1.0), build.like(square[0], 2.0)]
    for op, first, second in draws:
        left, right = pool[first % len(pool)], pool[second % len(pool)]
        if op == "transpose":
            pool.append(build.transpose(left))
        elif op == "reshape":
            pool.append(build.reshape(build.reshape(left, [9]), [3, 3]))
        elif op == "power":
            pool.append(make("power", build.exp(build.tanh(left)), pool[2 + second % 3]))
        elif op in ("negate", "tanh", "sigmoid"):
            pool.append(make(op, left))
        elif op == "where":
            pool.append(build.where(build.compare("less", left, right), left, right if second % 2 else left))
        else:
            pool.append(make(op, left, right))
    return square, pool[-1]


OPS = ("add", "subtract", "multiply", "dot", "transpose", "reshape", "negate", "tanh", "sigmoid", "power", "where")


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=14))
def test_rewriting_changes_no_result(draws: list[tuple[str, int, int]]) -> None:
    inputs, output = random_graph(draws)
    graph = Graph(inputs, (output,))
    simplified, _ = simplify(graph)
    numbers = np.random.default_rng(0)
    arrays = [numbers.uniform(-1, 1, (3, 3)) for _ in inputs]
    with np.errstate(over="ignore", invalid="ignore"):
        before, after = run_numpy(graph, *arrays)[0], run_numpy(simplified, *arrays)[0]
    np.testing.assert_allclose(after, before, rtol=1e-12, atol=1e-12)
    assert simplified.launches <= graph.launches
    assert _transposes(simplified) <= _transposes(graph)
    again, more = simplify(simplified)
    assert again == simplified
    assert not more


def _transposes(graph: Graph) -> int:
    return sum(node.op == "transpose" for node in graph.nodes())


def _met(output: Node, left: int = 0) -> Graph:
    """The program without its transposes, which gives the same numbers; so many are left."""
    nodes = Graph(tuple(node for node in ordered([output]) if node.op == "input"), (output,))
    after, steps = simplify(nodes)
    assert "transposes meet" in {step.rule for step in steps}
    assert _transposes(after) == left < _transposes(nodes)
    assert after.launches == nodes.launches
    numbers = np.random.default_rng(2)
    values = [numbers.uniform(-1, 1, node.shape) for node in nodes.inputs]
    np.testing.assert_array_equal(run_numpy(after, *values)[0], run_numpy(nodes, *values)[0])
    return after


def test_transposes_that_meet_go() -> None:
    """Through a chain of operators, several operands, numbers and vectors; one more transpose is never needed."""
    wide, tall, vector = _argument("wide", 2, 5), _argument("tall", 5, 2), _argument("vector", 5)
    product, back = build.dot(wide, tall), build.transpose
    assert _met(back(build.exp(back(product)))).outputs == (build.exp(product),)
    assert _met(back(build.relu(build.add(back(wide), back(build.tanh(wide)))))).outputs[0].shape == (2, 5)
    biased = build.add(build.multiply(back(wide), 2.0), make("broadcast", vector, shape=(5, 2), dims=(0,)))
    assert _met(back(biased)).outputs[0].inputs[1]["dims"] == (1,)
    _met(back(build.silu(back(wide))))  # an operand that two operators between read
    image = _argument("image", 2, 3, 4, 5)
    channels_last = build.tanh(make("transpose", image, order=(0, 2, 3, 1)))
    _met(make("transpose", channels_last, order=(0, 3, 1, 2)))
    _met(make("transpose", channels_last, order=(0, 2, 1, 3)), left=1)  # two become one
    chosen = build.where(build.compare("less", back(wide), 0.0), back(wide), 1.0)
    _met(back(chosen))


def test_a_transposed_product_of_a_transposed_matrix_is_the_other_way_round() -> None:
    """As in the gradient of x·xᵀ of a batch, which is added to the other half; a product that others read stays."""
    x, y = build.argument("x", [5, 2, 3], "float64"), build.argument("y", [5, 2, 4], "float64")
    back = lambda node: make("transpose", node, order=(0, 2, 1))  # noqa: E731
    product = build.dot(back(x), y)
    graph = _met(back(product), left=1)
    assert graph.outputs[0].op == "dot"
    both = Graph((x, y), (back(product), build.exp(product)))
    assert simplify(both)[0].outputs == both.outputs


def test_transposes_that_do_not_meet_stay() -> None:
    """Where an operand would have to be transposed instead, or a value between is read by others as well."""
    wide, tall = _argument("wide", 2, 5), _argument("tall", 5, 2)
    back = build.transpose
    between = build.exp(back(wide))
    for outputs in (
        (back(build.add(back(wide), tall)),),
        (back(between), build.tanh(between)),
        (back(between), between),
        (build.exp(back(wide)),),
    ):
        graph = Graph((wide, tall), outputs)
        after, steps = simplify(graph)
        assert after == graph
        assert not steps


def _argument(name: str, *shape: int) -> Node:
    return build.argument(name, shape, "float64")


def test_batch_norm_goes_into_the_convolution() -> None:
    image, w = build.argument("image", [2, 3, 8, 8], "float64"), build.argument("w", [5, 3, 3, 3], "float64")
    scale, shift = build.argument("scale", [5], "float64"), build.argument("shift", [5], "float64")

    def channel(vector: Node) -> Node:
        return make("broadcast", vector, shape=(2, 5, 6, 6), dims=(1,))

    normal = build.add(build.multiply(build.conv(image, w), channel(scale)), channel(shift))
    graph = Graph((image, w, scale, shift), (build.relu(normal),))
    folded, steps = simplify(graph, (*ALGEBRA, *INFERENCE))
    assert [step.rule for step in steps] == ["scale of a convolution"]
    numbers = np.random.default_rng(1)
    values = {node["name"]: numbers.normal(size=node.shape) for node in graph.inputs}
    expected = run_numpy(graph, *values.values())[0]
    np.testing.assert_allclose(run_numpy(folded, *values.values())[0], expected, rtol=1e-12, atol=1e-12)
    picture = values.pop("image")
    ready = specialise(folded, values)  # a trained model: the weights are known, and the scale disappears
    assert [node.op for node in ready.nodes() if node.op not in ("input", "constant", "broadcast")] == [
        "conv",
        "add",
        "maximum",
    ]
    np.testing.assert_allclose(run_numpy(ready, picture)[0], expected, rtol=1e-12, atol=1e-12)


def test_constants_are_folded() -> None:
    doubled = build.multiply(build.constant(2.0, [3, 4], "float64"), build.constant(3.0, [3, 4], "float64"))
    graph, _ = simplify(Graph((x,), (build.subtract(x, build.subtract(doubled, 6.0)),)))
    assert graph.outputs == (x,)
    table = constant_of(np.arange(6.0).reshape(2, 3), "float64")
    reduced, _ = simplify(Graph((), (build.total(table, [0]),)))
    assert reduced.outputs[0].op == "constant"
    np.testing.assert_array_equal(run_numpy(reduced)[0], [3.0, 5.0, 7.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add(x, 0.0)", "has no ' = '"),
        ("add(x, = x", "is no pattern"),
        ("plus(x, y) = x", "primitive"),
        ("add(x) = x", "add has 1 inputs; give 2"),
        ("add(x, x) = y", "the right side uses y"),
        ("transpose(x, order=p) = transpose(x, order=turn(p))", "turn"),
    ],
)
def test_a_rule_that_is_nonsense_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rule("7", text)


def test_rules_that_undo_one_another_end() -> None:
    there, back = (
        rule("there", "exp(negate(x)) = divide(1.0, exp(x))"),
        rule("back", "divide(1.0, exp(x)) = exp(negate(x))"),
    )
    with pytest.raises(UsageError, match="two rules undo one another: there, back"):
        rewrite(Graph((x,), (build.exp(build.negate(x)),)), [there, back], limit=50)


def test_a_product_in_a_kernel_takes_as_long_as_alone() -> None:
    """At the rate of 16-bit products, though the kernel's own result is a tuple; and so does an opaque one."""
    device = DEVICES["h100"]
    a, b = build.argument("a", [4096, 4096], "bfloat16"), build.argument("b", [4096, 4096], "bfloat16")
    product = build.dot(a, b)
    alone = graph_seconds(Graph((a, b), (product,)), device)
    body = Graph((a, b), (build.relu(product),))
    region = make("region", a, b, body=body, space=4096 * 4096, columns=0)
    assert graph_seconds(Graph((a, b), (region,)), device) == pytest.approx(alone, rel=0.01)
    opaque = make("opaque", a, b, target="t", args=(), kwargs=(), shape=(), dtype="tuple", flops=product.flops)
    assert graph_seconds(Graph((a, b), (opaque,)), device) == pytest.approx(alone, rel=0.01)
