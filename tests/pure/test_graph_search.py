"""Substitutions: found by fingerprints, refuted by evaluation, proved by z3 where it is installed; and the search."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import random
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import DEVICES
from tilemesh.graph import build
from tilemesh.graph.cost import graph_seconds
from tilemesh.graph.evaluate import run_numpy
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.graph.rewrite import by_operator
from tilemesh.guide.dataflow.search import (
    _neighbours,
    as_rules,
    greedy,
    read_proofs,
    read_substitutions,
    search,
)
from tilemesh.guide.dataflow.substitute import (
    AXIOMS,
    Substitution,
    draw_matrix,
    evaluate,
    parse,
    refuted,
    shape_of,
)

_SPEC = importlib.util.spec_from_file_location("graph_rules", Path(__file__).parents[2] / "scripts" / "graph_rules.py")
assert _SPEC is not None
assert _SPEC.loader is not None
RULES: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(RULES)
FALSE = (
    "dot(x, y) = dot(y, x)",  # the wrong order
    "transpose(dot(x, y)) = dot(transpose(x), transpose(y))",  # a property that is nearly right
    "multiply(x, dot(y, z)) = dot(multiply(x, y), z)",  # two kinds of product mixed up
    "multiply(dot(x, x), transpose(x)) = multiply(x, transpose(dot(x, x)))",  # true of 2 x 2 matrices alone
)
needs_z3 = pytest.mark.skipif(
    importlib.util.find_spec("z3") is None, reason="z3 is not installed: pip install 'tilemesh[graph]'"
)


@functools.cache
def _generated() -> list[Substitution]:
    """Some seconds of work that two tests look at."""
    made: list[Substitution] = RULES.generate(3)
    return made


@pytest.mark.parametrize("text", AXIOMS)
def test_an_axiom_holds_on_all_small_shapes(text: str) -> None:
    assert refuted(parse(text)) is None


@pytest.mark.parametrize("text", FALSE)
def test_a_false_rule_is_refuted(text: str) -> None:
    assert "differs for" in str(refuted(parse(text)))


@needs_z3
@pytest.mark.parametrize("text", FALSE)
def test_a_false_rule_is_not_proved(text: str) -> None:
    assert not RULES.Prover(seconds=1.0).proves(parse(text))


@needs_z3
def test_what_is_committed_is_proved() -> None:
    """Each proof is checked with the axioms that it names, and no others."""
    provers: dict[tuple[int, ...], Any] = {}
    for substitution, used in read_proofs():
        if used:
            prover = provers.setdefault(used, RULES.Prover([AXIOMS[number - 1] for number in used]))
            assert prover.proves(substitution), f"{substitution} by {used}"
        else:
            assert str(substitution) in AXIOMS


def test_the_committed_file_is_what_is_generated() -> None:
    made = _generated()
    committed = read_substitutions()
    assert [str(each) for each in committed] == [*AXIOMS, *map(str, made)]
    proofs = [(substitution, used) for substitution, used in read_proofs() if used]
    assert RULES.write_substitutions(proofs) == (files("tilemesh.guide.dataflow") / "substitutions.txt").read_text()
    assert all(refuted(each) is None for each in committed)


def test_pruning() -> None:
    """No pair is an instance of another one, and none has more operators than were asked for."""
    made = _generated()
    assert len({str(each) for each in made}) == len(made)
    assert all(RULES.operators(each.left) <= 3 for each in made)
    for number, each in enumerate(made):
        assert not any(RULES.matched(other.left, each.left, {}) for other in made[:number])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("37 proven add(x, y) = add(y, x)", "substitution 37: 'proven' is neither axiom nor proved"),
        ("38 proved add(x, y) by 1", "substitution 38: .* has no ' = '"),
        ("39 proved plus(x, y) = x by 1", "substitution 39: plus"),
        ("40 proved add(x, x) = y by 1", "substitution 40: .*the right side has y"),
        ("41 proved add(x, = x by 1", "substitution 41: .*is no term"),
        ("42 proved add(x, y) = add(y, x)", "substitution 42: proved by nothing"),
        ("43 proved add(x, y) = add(y, x) by 99", "substitution 43: proved by 99; name axioms that stand above it"),
        ("30 proved add(x, y) = add(y, x) by 1 1", "substitution 30: proved by 1; name axioms .* each once"),
        ("30 proved dot(x, y) = dot(y, x) by 6", r"substitution 30: .* differs for x \[1, 2\], y \[2, 1\]"),
        ("30 proved add(x, y) = multiply(x, y) by 1", "substitution 30: .* differs for"),
        ("30 proved add(dot(x, y), dot(z, x)) = dot(x, add(y, z)) by 6", "substitution 30: .* differs for"),
        (
            "30 proved add(x, add(y, z)) = add(add(y, x), z) by 2",
            "substitution 30: .* does not follow from 2; name the",
        ),
        (
            "30 proved dot(dot(x, y), z) = dot(x, dot(y, z)) by 7 8 12",
            "substitution 30: .* does not follow from 7, 8, 12",
        ),
        ("30 proved add(x, transpose(rows(x, x))) = x by 6", "substitution 30: .* fits no shapes"),
        ("30 proved add(add(add(x, y), add(z, a)), add(b, c)) = x by 1", "substitution 30: .* has 6 names"),
        ("30 axiom transpose(x) = x", "substitution 30: .* is no axiom; there are 29"),
        ("30 axiom add(x, y) = add(y, x)", "substitution 30: .* is no axiom; there are 29"),
        ("30 proved " + "transpose(" * 40 + "x" + ")" * 40 + " = x by 9", "substitution 30: .* has 121 words"),
        ("30 proved " + "transpose(" * 20_000 + "x = x by 9", "substitution 30: .* has 40001 words"),
        ("30 proved add(x, y)(z) = x by 1", "substitution 30: .* is no term"),
        ("30 proved add(x y) = x by 1", "substitution 30: .* is no term"),
        ("30 proved \x00 = x by 1", "substitution 30: .* is no term"),
        ("abc proved add(x, y) = add(y, x) by 1", "substitution abc: a rule begins with a number of its own"),
        ("0 proved add(x, y) = add(y, x) by 1", "substitution 0: a rule begins with a number of its own"),
        ("9" * 5000 + " proved add(x, y) = add(y, x) by 1", "substitution 9{20}: a rule begins with a number"),
        (" proved add(x, y) = add(y, x) by 1", "substitution proved add.*: a rule begins with a number of its own"),
        ("29 proved add(x, y) = add(y, x) by 1", "substitution 29: a rule begins with a number of its own"),
    ],
)
def test_a_file_edited_into_nonsense_is_refused(line: str, message: str) -> None:
    """A line behind the axioms, which stand as they are committed."""
    axioms = "".join(f"{number} axiom {text}\n" for number, text in enumerate(AXIOMS, 1))
    with pytest.raises(UsageError, match=message):
        read_substitutions(axioms + line)


def test_an_axiom_stands_under_its_own_number() -> None:
    with pytest.raises(UsageError, match=r"substitution 2: .* is no axiom; axiom 2 is add\(x, add\(y, z\)\) = "):
        read_substitutions(f"2 axiom {AXIOMS[0]}\n")
    with pytest.raises(UsageError, match=r"substitution 1: .* is no axiom; axiom 1 is"):
        read_substitutions(f"1 axiom {AXIOMS[0]} by 1\n")
    with pytest.raises(UsageError, match="substitution 30: proved by 1; name axioms that stand above it"):
        read_substitutions(f"30 proved transpose(transpose(x)) = x by 1\n1 axiom {AXIOMS[0]}\n")
    with pytest.raises(UsageError, match="substitution 31: proved by 30; name axioms"):
        read_substitutions(
            f"1 axiom {AXIOMS[0]}\n30 proved add(x, y) = add(y, x) by 1\n31 proved add(x, y) = add(y, x) by 30\n"
        )


def test_shapes_are_those_that_evaluation_finds() -> None:
    """The quick rule of shapes and the arithmetic agree on every axiom and small shape."""
    draws = random.Random(1)
    sizes = [(rows, columns) for rows in (1, 2, 3) for columns in (1, 2, 3, 6)]
    for text in AXIOMS:
        term = parse(text).left
        for _ in range(100):
            chosen = {name: draws.choice(sizes) for name in "xyzw"}
            values = {name: draw_matrix(*shape, 101, draws) for name, shape in chosen.items()}
            result = evaluate(term, values, 101)
            assert shape_of(term, chosen) == (None if result is None else (len(result), len(result[0])))


def test_the_search_goes_where_greedy_is_stuck() -> None:
    """x·y + (w + x·z): factoring out x needs another order of the sum first, which gains nothing by itself."""
    x, y, z, w = (build.argument(name, [512, 512], "float64") for name in "xyzw")
    graph = Graph((x, y, z, w), (build.add(build.dot(x, y), build.add(w, build.dot(x, z))),))
    rules = as_rules(read_substitutions())

    def cost(each: Graph) -> float:
        return graph_seconds(each, DEVICES["h100"])

    stuck = greedy(graph, rules, cost)
    found = search(graph, rules, cost)
    assert stuck.graph.outputs == graph.outputs
    assert [node.op for node in found.graph.nodes()].count("dot") == 1
    assert found.cost < 0.75 * stuck.cost  # one product and two sums for two and two; a launch each
    assert len(found.rules) >= 2
    numbers = np.random.default_rng(0)
    values = [numbers.normal(size=(512, 512)) for _ in range(4)]
    np.testing.assert_allclose(run_numpy(found.graph, *values)[0], run_numpy(graph, *values)[0], rtol=1e-9, atol=1e-9)


def test_the_search_keeps_shapes() -> None:
    """Of a rule whose other side does not fit the shapes nothing is made."""
    x, y = build.argument("x", [2, 3], "float64"), build.argument("y", [3, 5], "float64")
    graph = Graph((x, y), (build.transpose(build.dot(x, y)),))
    found = search(graph, as_rules(read_substitutions()), lambda each: float(each.launches), slack=2.0, limit=50)
    assert found.graph.outputs[0].shape == (5, 2)
    assert found.cost == 1.0


def _steps(graph: Graph) -> list[str]:
    """Every program that one rule at one place makes of this one gives the same numbers; the rules that fitted."""
    numbers = np.random.default_rng(5)
    values = [numbers.normal(size=[int(size) for size in node.shape]) for node in graph.inputs]  # type: ignore[call-overload]
    expected = run_numpy(graph, *values)[0]
    fitted = []
    for name, changed in _neighbours(graph, _BY_OPERATOR):
        np.testing.assert_allclose(run_numpy(changed, *values)[0], expected, rtol=1e-9, atol=1e-9, err_msg=name)
        fitted.append(name)
    return fitted


def test_no_rule_is_another_one_with_other_names() -> None:
    """29 of 260 were the same text, and 32 more the same with other names: each was tried again at every node."""
    texts = []
    for each in as_rules(read_substitutions()):
        order: dict[str, str] = {}
        texts.append(re.sub(r"\b[u-z]\b", lambda name: order.setdefault(name[0], f"n{len(order)}"), each.name))  # noqa: B023
    assert len(set(texts)) == len(texts) == 199


_BY_OPERATOR = by_operator(as_rules(read_substitutions()))


def _grown(pool: list[Node], picks: list[tuple[str, int, int]]) -> Node:
    """Sums, products and concatenations of values that fit one another."""
    for op, first, second in picks:
        left = pool[first % len(pool)]
        fits = [node for node in pool if node.shape == left.shape and node is not left] or [left]
        right = fits[second % len(fits)]
        pool.append(make(op, left, right) if op in ("add", "multiply") else build.concat([left, right], int(op[-1])))
    return pool[-1]


_PICKS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "multiply", "dim 0", "dim 1"]), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(
    maps=st.lists(st.tuples(st.just(1), st.integers(1, 2), st.integers(1, 6)), min_size=2, max_size=4),
    weights=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3)), min_size=2, max_size=4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    picks=_PICKS,
)
def test_no_rule_changes_what_convolutions_give(
    maps: list[tuple[int, int, int]],
    weights: list[tuple[int, int, int]],
    stride: int,
    padding: int,
    dilation: int,
    picks: list[tuple[str, int, int]],
) -> None:
    """Whatever sizes, strides and paddings meet: maps and taps of other sizes may give results of the same size."""
    pictures = [build.argument(f"x{place}", shape, "float64") for place, shape in enumerate(maps)]
    filters = [build.argument(f"w{place}", shape, "float64") for place, shape in enumerate(weights)]
    pool = []
    for x, w in itertools.product(pictures, filters):
        with contextlib.suppress(UsageError):  # other numbers of channels, or a window larger than its map
            pool.append(build.conv(x, w, [stride], [padding], [dilation]))
    if pool:
        _steps(Graph((*pictures, *filters), (_grown(pool, picks),)))


def test_a_rule_is_left_where_shapes_would_have_to_be_repeated() -> None:
    """Taps of 1 and 2 with a stride of 2 give results of one size; the sum of the two weights is no weight."""
    x, (y, z) = _argument("x", 1, 2, 6), (_argument(f"w{taps}", 3, 2, taps) for taps in (1, 2))
    graph = Graph((x, y, z), (build.add(build.conv(x, y, [2]), build.conv(x, z, [2])),))
    assert not any("conv(x, add(" in name for name in _steps(graph))
    short, long, w = _argument("short", 1, 2, 1), _argument("long", 1, 2, 2), _argument("w", 3, 2, 3)
    graph = Graph((short, long, w), (build.add(build.conv(short, w, [2], [1]), build.conv(long, w, [2], [1])),))
    assert not any("= conv(add(" in name for name in _steps(graph))
    alike = _argument("alike", 3, 2, 2)
    graph = Graph((x, alike, z), (build.add(build.conv(x, alike, [2]), build.conv(x, z, [2])),))
    assert any("= conv(x, add(" in name for name in _steps(graph))


def _argument(name: str, *shape: int) -> Node:
    return build.argument(name, shape, "float64")


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=2, max_size=4),
    products=st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(0, 99)), max_size=4),
    picks=_PICKS,
)
def test_no_rule_changes_what_matrices_give(
    shapes: list[tuple[int, int]], products: list[tuple[bool, int, int]], picks: list[tuple[str, int, int]]
) -> None:
    given_matrices = [build.argument(f"x{place}", shape, "float64") for place, shape in enumerate(shapes)]
    pool = list(given_matrices)
    for turned, first, second in products:
        left, right = (pool[pick % len(pool)] for pick in (first, second))
        pool.append(build.transpose(left))
        if not turned and left.shape[1] == right.shape[0]:
            pool.append(build.dot(left, right))
    _steps(Graph(tuple(given_matrices), (_grown(pool, picks),)))
