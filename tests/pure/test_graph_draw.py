"""Drawings of graphs: every arrow is seen from one end to the other."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.graph import build, derive
from tilemesh.graph.draw import BOX, drawing
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.graph.rules import simplify


def _hidden(svg: str) -> list[str]:
    """The lines that run behind a box: sampled, and compared with all boxes."""
    boxes = [
        tuple(map(float, found)) for found in re.findall(r' x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"', svg)
    ]
    assert all(box[3] == BOX for box in boxes)
    paths: list[str] = re.findall(r'<path class="edge thin" d="([^"]+)"', svg)
    return [
        path
        for path in paths
        if any(
            x < across < x + width and y < down < y + height
            for across, down in _points(path)
            for x, y, width, height in boxes
        )
    ]


def _points(path: str) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for command, text in re.findall("([MCV])([^MCV]*)", path):
        numbers = [float(word) for word in text.split()]
        if command == "M":
            points.append((numbers[0], numbers[1]))
            continue
        start = points[-1]
        if command == "V":
            numbers = [start[0], start[1], start[0], numbers[0], start[0], numbers[0]]
        corners = [start, *zip(numbers[::2], numbers[1::2], strict=True)]
        for step in range(1, 41):
            share = step / 40
            weights = [(1 - share) ** 3, 3 * share * (1 - share) ** 2, 3 * share**2 * (1 - share), share**3]
            across, down = (sum(w * corner[dim] for w, corner in zip(weights, corners, strict=True)) for dim in (0, 1))
            points.append((across, down))
    return points


def _searched() -> Graph:
    x, y, z, w = (build.argument(name, [512, 512]) for name in "xyzw")
    return Graph((x, y, z, w), (build.add(build.dot(x, y), build.add(w, build.dot(x, z))),))


def _regression() -> Graph:
    data, target, w = build.argument("data", [8, 3]), build.argument("target", [8, 1]), build.argument("w", [3, 1])
    error = build.subtract(build.dot(data, w), target)
    loss = build.mean(build.multiply(error, error))
    return simplify(Graph((data, target, w), (loss, *derive.update(loss, [w], rate=0.1))))[0]


def _norm() -> Graph:
    x, w, b = build.argument("x", [32, 64]), build.argument("w", [64]), build.argument("b", [64])
    return simplify(Graph((x, w, b), (build.gelu(build.layer_norm(x, w, b)),)))[0]


@pytest.mark.parametrize("made", [_searched, _regression, _norm])
def test_no_line_runs_behind_a_box(made: object) -> None:
    svg = drawing([("a program", made()), ("again", made())])  # type: ignore[operator]
    assert svg.count("<polygon ") > 10
    assert _hidden(svg) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=20))
def test_no_line_runs_behind_a_box_in_any_graph(picks: list[tuple[bool, int, int]]) -> None:
    inputs = tuple(build.argument(name, [3, 3]) for name in ("a", "a longer name"))
    pool: list[Node] = list(inputs)
    for alone, first, second in picks:
        left, right = pool[first % len(pool)], pool[second % len(pool)]
        pool.append(build.exp(left) if alone else make("add", left, right))
    graph = Graph(inputs, tuple(pool[-2:]))
    drawn = drawing([("", graph)])
    assert drawn.count('<rect class="box') == len(graph.nodes())
    assert _hidden(drawn) == []
