"""The embedding: the Triton code by the interpreter, against float64 and torch; its gradient, fixed bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck
from triton.backends.compiler import GPUTarget

import tilemesh as tm
from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import accumulator, excess, rounding_error, sum_error
from tilemesh.kernels.embedding import kernel
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.program import Operand, compile_step

pytest.importorskip("triton")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTERPRET = {"implementation": "interpret"}
kernels = tm.kernels


def normal(*shape, dtype=torch.float64, seed=0, grad=True):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return made.requires_grad_(grad)


def draw_tokens(shape, vocabulary, seed=0, power=4):
    """Some far more frequent than others."""
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) ** power
    return (vocabulary * drawn).long().clamp(max=vocabulary - 1)


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(1, 2), context=st.sampled_from([1, 5, 70]), width=st.sampled_from([1, 7, 1030]),
    vocabulary=st.sampled_from([1, 3, 12]), dtype=st.sampled_from(DTYPES), start=st.integers(0, 2),
    with_positions=st.booleans(), turned=st.booleans(), narrow=st.booleans(),
)  # fmt: skip
def test_any_size_strides_and_dtype(rows, context, width, vocabulary, dtype, start, with_positions, turned, narrow):
    tokens = draw_tokens((rows, context), vocabulary)
    tokens = tokens.int() if narrow else tokens
    weight = (
        normal(width, vocabulary, dtype=dtype, grad=False).t() if turned else normal(vocabulary, width, dtype=dtype)
    )
    weight = weight.detach().requires_grad_()
    positions = normal(context + 2, width, dtype=dtype, seed=1) if with_positions else None
    leaves = [weight] if positions is None else [weight, positions]
    y = kernels.embedding(tokens, weight, positions, start=start, **INTERPRET)
    upstream = normal(rows, context, width, dtype=dtype, seed=2, grad=False)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = kernels.embedding(tokens, *wide, start=start, implementation="torch")
    assert excess(y, exact.detach(), 2 * rounding_error(exact.detach(), dtype)) is None
    found = torch.autograd.grad(y, leaves, upstream)
    wanted = torch.autograd.grad(exact, wide, upstream.double())
    sizes = torch.autograd.grad(
        kernels.embedding(tokens, *wide, start=start, implementation="torch"), wide, upstream.double().abs()
    )
    for mine, true, size in zip(found, wanted, sizes, strict=True):
        allowed = sum_error(size, tokens.numel(), accumulator(dtype)) + rounding_error(true, dtype)
        assert mine.dtype == dtype
        assert excess(mine, true, 1.01 * allowed) is None


def test_frequent_tokens_are_added_up_by_stretches_and_repeat_bit_for_bit():
    """Runs that begin and end inside of stretches, fill them exactly, or are all there is."""
    width = 5
    for runs in ((200, 3, 64, 65, 1, 130), (128, 128), (1, 63, 65, 127, 129)):
        tokens = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs))
        tokens = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))]
        weight, upstream = normal(len(runs) + 2, width), normal(len(tokens), width, seed=1, grad=False)
        first, again = (
            torch.autograd.grad(kernels.embedding(tokens, weight, **INTERPRET), weight, upstream)[0] for _ in range(2)
        )
        (wanted,) = torch.autograd.grad(kernels.embedding(tokens, weight), weight, upstream)
        torch.testing.assert_close(first, wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(first, again)
        assert not first[len(runs) :].any()  # tokens that are not in the batch


def test_gradients_by_finite_differences():
    tokens = torch.tensor([[2, 0], [1, 2]])
    weight, positions = normal(4, 2), normal(3, 2, seed=1)
    assert torch.autograd.gradcheck(lambda *t: kernels.embedding(tokens, *t, start=1, **INTERPRET), (weight, positions))


def test_tokens_outside_of_the_table_do_no_harm_on_a_gpu():
    """There nothing reads them before: their rows are NaN, and their gradients go nowhere."""
    tokens, weight = torch.tensor([1, -1, 3, 1, 7]), normal(3, 2, grad=False)
    y = torch.ops.tilemesh.embedding(tokens, weight, None, 0, "interpret")
    assert y.isnan().any(1).tolist() == [False, True, True, False, True]
    backward = torch.ops.tilemesh.embedding_backward
    _, found = backward(tokens, weight, None, 0, [], [torch.ones(5, 2, dtype=torch.float64)], "interpret")
    assert found.tolist() == [[0, 0], [2, 2], [0, 0]]


def test_it_compiles_to_one_graph_forward_and_backward(recording):
    tokens, weight, positions = draw_tokens((2, 3), 5), normal(5, 4), normal(3, 4, seed=1)

    def function(*tables):
        return kernels.embedding(tokens, *tables, **INTERPRET)

    backend, recorded = recording
    plain = torch.autograd.grad(function(weight, positions).square().sum(), (weight, positions))
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    found = torch.autograd.grad(compiled(weight, positions).square().sum(), (weight, positions))
    torch.testing.assert_close(found, plain)
    assert "tilemesh.embedding_backward.default" in recorded
    opcheck(torch.ops.tilemesh.embedding.default, (tokens, weight, positions, 0, "interpret"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("index", ["int64", "int32"])
def test_the_kernels_compile_for_an_h200_that_is_not_here(dtype, index):
    kind = "float64" if dtype == "float64" else "float32"

    def place(*shape, dtype=dtype):
        return Place(shape, (shape[1], 1) if len(shape) == 2 else (1,), dtype, True)

    forward = {"tokens": place(40, dtype=index), "weight": place(9, 30), "positions": place(20, 30), "y": place(40, 30)}
    backward = {
        "grad": place(40, 30), "order": place(40, dtype="int64"), "sorted_tokens": place(40, dtype=index),
        "bounds": place(10, dtype="int64"), "partial": place(2, 30, dtype=kind), "dweight": place(9, 30),
    }  # fmt: skip
    for places, plan in (
        (forward, kernel.forward_plan(forward, context=20, start=0)),
        (backward, kernel.backward_plan(backward)),
    ):
        operands = {name: Operand(where.dtype) for name, where in places.items()}
        for step in plan.steps:
            assert compile_step(step, operands, GPUTarget("cuda", 90, 32)).asm["ptx"]


def test_the_module_is_torchs_with_positions():
    module = tm.kernels.FusedEmbedding(7, 4, **INTERPRET)
    tokens, positions = draw_tokens((2, 3), 7), torch.randn(5, 4)
    assert torch.equal(module(tokens), torch.nn.functional.embedding(tokens, module.weight))
    assert torch.equal(module(tokens, positions, 1), module(tokens) + positions[1:4])
    with pytest.raises(UsageError, match="unknown implementation"):
        tm.kernels.FusedEmbedding(7, 4, implementation="cuda")


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens(shape):
    weight = normal(3, 2)
    y = kernels.embedding(torch.zeros(shape, dtype=torch.long), weight, **INTERPRET)
    assert y.shape == (*shape, 2)
    y.sum().backward()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kernels.embedding(torch.zeros(3), torch.ones(4, 2)), "expected int64 or int32"),
        (lambda: kernels.embedding(torch.tensor(1), torch.ones(4, 2)), "of shape (…, T)"),
        (lambda: kernels.embedding(torch.tensor([1]), torch.ones(4)), "expected (V, D)"),
        (lambda: kernels.embedding(torch.tensor([4]), torch.ones(4, 2)), "tokens from 4 to 4: expected 0 to 3"),
        (lambda: kernels.embedding(torch.tensor([1]), torch.ones(4, 2), torch.ones(3, 3)), "as wide as weight"),
        (lambda: kernels.embedding(torch.tensor([1, 1]), torch.ones(4, 2), torch.ones(2, 2), start=1), "2 positions"),
        (lambda: kernels.embedding(torch.tensor([1]), torch.ones(4, 2), start=-1), "start is -1"),
    ],
)
def test_bad_arguments_get_a_reason(call, words):
    with pytest.raises(UsageError) as caught:
        call()
    assert words in str(caught.value)
