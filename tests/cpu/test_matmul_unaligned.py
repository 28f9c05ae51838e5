"""Rows that start anywhere, in the interpreter: the aligned copies word by word, and the library on padded operands."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bounds import gradient_error_bounds

import tilemesh as tm
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.launch.tensors import dtype_name
from tilemesh.kernels.matmul import reference
from tilemesh.kernels.matmul.arguments import problem_of
from tilemesh.kernels.matmul.op import _reads_slowly
from tilemesh.kernels.matmul.problem import Problem, contiguous
from tilemesh.kernels.matmul.run import matrix_of

pytest.importorskip("triton")

from tilemesh.kernels.launch import interpret
from tilemesh.kernels.launch.steps import LaunchPlan
from tilemesh.kernels.matmul.copies import aligned_copies

Config = tm.kernels.Config
fused = tm.kernels.fused_matmul

PADDED = Config("library", padded=True)


def bits(tensor):
    """To compare every bit, those of NaN too."""
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def draw(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


SOURCES = {
    "odd rows": lambda dtype: draw((19, 517), dtype),
    "rows of one word and a bit": lambda dtype: draw((9, 5), dtype),
    "one element": lambda dtype: draw((1, 1), dtype),
    "cut from longer rows": lambda dtype: draw((10, 131), dtype)[:, :129],
    "transposed": lambda dtype: draw((21, 70), dtype)[:, :67].t(),
    "an odd address": lambda dtype: draw((7 * 35 + 1,), dtype)[1:].view(7, 35),
    "every other element": lambda dtype: draw((6, 44), dtype)[:, ::2],
    "one row for all": lambda dtype: draw((1, 37), dtype).expand(5, 37),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SOURCES)
def test_copies_hold_every_element_and_zeros_beyond(name, dtype):
    """Both matrices in one launch: A as named, B of odd rows; grown by a few rows and columns."""
    a, b = SOURCES[name](dtype), draw((13, 259), dtype, 1)
    if dtype == torch.float16:
        b[0, 0] = b[12, 258] = float("nan")
    problem = Problem(matrix_of(a), matrix_of(b), None, contiguous(4, 4), "none", dtype_name(dtype), "none")
    for grown in (0, 3):
        sides = {key: (t.shape[0] + grown, t.shape[1] + grown) for key, t in (("a", a), ("b", b))}
        steps, buffers = [], {}
        places = aligned_copies(problem, ["a", "b"], steps, buffers, sides)
        assert len(steps) == 1
        tensors = {"a": a, "b": b}
        tensors |= {key: torch.full((one.elements,), float("nan"), dtype=dtype) for key, one in buffers.items()}
        interpret.run(LaunchPlan(tuple(steps), buffers), tensors)
        for key, source in (("a", a), ("b", b)):
            copy, matrix = places[key]
            leading = max(matrix.row_stride, matrix.column_stride)
            assert leading * source.element_size() % 128 == 0
            found = tensors[copy].as_strided(sides[key], (matrix.row_stride, matrix.column_stride))
            want = torch.zeros(sides[key], dtype=dtype)
            want[: source.shape[0], : source.shape[1]] = source
            assert torch.equal(bits(found), bits(want))


def problems():
    turns = list(itertools.product((False, True), repeat=2))
    shapes = [(133, 67, 35), (129, 33, 40), (7, 5, 3), (130, 72, 33)]  # 40 and 72: a side that needs no padding
    activations = ("relu", "gelu", "none", "silu", "gelu_tanh", "squared_relu")
    kinds = ("full", "row", "column", "none")
    dtypes = (torch.float16, torch.float32, torch.bfloat16)
    for at in range(12):
        yield shapes[at % 4], turns[(at // 3) % 4], kinds[(at + at // 4) % 4], activations[at % 6], dtypes[at % 3]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if place in (0, 3, 5, 7, 9, 10) else pytest.mark.slow)
        for place, case in enumerate(problems())
    ],
    ids=str,
)
def test_the_library_on_padded_operands(case):
    """As near to float64 as arithmetic allows; an infinity or NaN beyond K would show everywhere."""
    (m, n, k), turned, c_kind, activation, dtype = case
    a = draw((k, m), dtype, 1).t() if turned[0] else draw((m, k), dtype, 1)
    b = draw((n, k), dtype, 2).t() if turned[1] else draw((k, n), dtype, 2)
    shape = {"full": (m, n), "row": (n,), "column": (m, 1), "none": None}[c_kind]
    c = None if shape is None else draw(shape, dtype, 3)
    held = torch.full((m + 2, n + 3), float("nan"), dtype=dtype)
    out = held[1:-1, 2:-1]
    fused(a, b, c, activation=activation, implementation="interpret", config=PADDED, out=out)
    exact = reference.exact(a, b, c, activation)
    bound = reference.error_bound(a, b, c, activation, separate=True)
    assert (wrong := excess(out, exact, bound)) is None, wrong
    out.fill_(float("nan"))
    assert held.isnan().all()


def test_nan_and_infinity_stay_where_they_are():
    a, b, c = draw((9, 35), torch.float32), draw((35, 11), torch.float32, 1), draw((9, 11), torch.float32, 2)
    a[3, 34], a[8, 2], c[5, 10], b[34, 7] = float("inf"), float("nan"), float("nan"), float("-inf")
    d = fused(a, b, c, activation="relu", implementation="interpret", config=PADDED)
    want = reference.fused_matmul(a, b, c, "relu")
    assert torch.equal(d.isnan(), want.isnan())
    assert torch.equal(d.isinf(), want.isinf())
    assert not d.isnan().all(dim=1)[:3].any()


def test_the_sum_is_kept_for_the_backward_pass():
    leaves = [draw(shape, torch.float32, n).requires_grad_() for n, shape in enumerate([(40, 33), (33, 71), (71,)])]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    fused(*leaves, activation="gelu", implementation="interpret", config=PADDED).sum().backward()
    reference.fused_matmul(*exact, "gelu").sum().backward()
    bounds = gradient_error_bounds(*(leaf.detach() for leaf in leaves), "gelu", torch.ones(40, 71))
    for mine, true, bound in zip(leaves, exact, bounds, strict=True):
        assert (wrong := excess(mine.grad, true.grad, bound)) is None, wrong


@given(st.lists(st.integers(1, 40), min_size=3, max_size=3), st.booleans(), st.booleans(), st.integers(0, 9))
@settings(max_examples=80, deadline=None)
def test_a_backward_product_is_slow_where_the_problem_says_so(sizes, a_turned, b_turned, offset):
    m, n, k = sizes

    def matrix(rows, columns, turned, begin=0):
        shape = (columns, rows) if turned else (rows, columns)
        whole = torch.zeros(begin + rows * columns, dtype=torch.float16)[begin:].view(shape)
        return whole.mT if turned else whole

    x, y = matrix(m, k, a_turned, offset), matrix(k, n, b_turned)
    problem = problem_of(x, y, None, torch.empty(m, n, dtype=torch.float16), activation="none")
    assert _reads_slowly(x, y) or not problem.slow_operands  # never taken for quick where it is not
    if min(m, n, k) > 1:  # a single row or column has a stride that nothing reads: counted slow, harmlessly
        assert _reads_slowly(x, y) == bool(problem.slow_operands)
    assert not _reads_slowly(x.float(), y.float())
