"""The MLP as one operator: its kernels by the interpreter, forward and backward, against torch's operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tilemesh as tm
from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import unit
from tilemesh.kernels.launch import call

pytest.importorskip("triton")
from tilemesh.kernels.mlp.kernel import sum_columns

NAMES = ("x", "w_in", "b_in", "w_out", "b_out")
GELUS = {"gelu_tanh": "tanh", "gelu": "none"}


def drawn(shape: tuple[int, ...], width: int, hidden: int, out: int, dtype: torch.dtype, biases: bool) -> list:
    generator = torch.Generator().manual_seed(1)

    def draw(*sizes: int, by: float = 1.0) -> Tensor:
        return (torch.randn(sizes, generator=generator, dtype=torch.float64) * by).to(dtype).requires_grad_()

    b_in, b_out = (draw(hidden), draw(out)) if biases else (None, None)
    return [draw(*shape, width), draw(hidden, width, by=width**-0.5), b_in, draw(out, hidden, by=hidden**-0.5), b_out]


def results(arguments: list, implementation: str, activation: str = "gelu_tanh") -> list[Tensor]:
    """y and all gradients."""
    y = tm.kernels.mlp(*arguments, activation=activation, implementation=implementation)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [one for one in arguments if one is not None], upstream)]


@pytest.mark.parametrize(
    ("shape", "sizes", "activation", "biases"),
    [((5,), (7, 33, 3), "gelu_tanh", True), ((2, 3), (16, 24, 16), "relu", False), ((70,), (9, 130, 9), "silu", True)],
)
def test_results_and_gradients_are_torchs(
    shape: tuple[int, ...], sizes: tuple[int, int, int], activation: str, biases: bool
) -> None:
    exact = results([one if one is None else one.detach().double().requires_grad_()
                     for one in drawn(shape, *sizes, torch.float32, biases)], "torch", activation)  # fmt: skip
    for implementation in ("interpret", "torch"):
        found = results(drawn(shape, *sizes, torch.float32, biases), implementation, activation)
        for mine, wanted in zip(found, exact, strict=True):
            # Sums of at most 130 terms, twice over, of numbers around 1.
            assert (mine - wanted).abs().max() <= 130 * unit(torch.float32) * 4 * wanted.abs().max()


def test_bfloat16_is_no_less_exact_than_torch() -> None:
    arguments = drawn((40,), 16, 48, 16, torch.bfloat16, True)
    exact = results([one.detach().double().requires_grad_() for one in arguments], "torch")
    ours, torchs = results(arguments, "interpret"), results(arguments, "torch")
    for mine, theirs, wanted in zip(ours, torchs, exact, strict=True):
        assert (mine - wanted).norm() <= 2 * (theirs - wanted).norm()


def test_float64_passes_gradcheck() -> None:
    arguments = drawn((3,), 4, 6, 5, torch.float64, True)
    assert torch.autograd.gradcheck(lambda *given: tm.kernels.mlp(*given, implementation="interpret"), arguments)


def test_it_is_what_a_user_of_torch_writes() -> None:
    x, w_in, b_in, w_out, b_out = drawn((4,), 8, 12, 8, torch.float32, True)
    for name, approximate in GELUS.items():
        hidden = functional.gelu(functional.linear(x, w_in, b_in), approximate=approximate)
        wanted = functional.linear(hidden, w_out, b_out)
        torch.testing.assert_close(tm.kernels.mlp(x, w_in, b_in, w_out, b_out, activation=name), wanted)


def test_compiled_as_one_graph_and_under_autocast() -> None:
    arguments = drawn((4,), 8, 12, 8, torch.float32, True)

    def call_it(*given: Tensor) -> Tensor:
        made: Tensor = tm.kernels.mlp(*given, implementation="interpret")
        return made

    compiled = torch.compile(call_it, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), call_it(*arguments))
    with torch.autocast("cpu", torch.bfloat16):
        y = call_it(*arguments)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert {one.grad.dtype for one in arguments} == {torch.float32}


def test_empty_and_turned_inputs() -> None:
    empty = drawn((0,), 8, 12, 8, torch.float32, True)
    assert [one.shape for one in results(empty, "interpret")[1:]] == [one.shape for one in empty]
    x, w_in, b_in, w_out, b_out = drawn((6,), 8, 12, 8, torch.float32, True)
    turned = [x.detach().t().contiguous().t(), w_in.detach().t().contiguous().t(), b_in, w_out, b_out]
    for mine, wanted in zip(
        results([one.detach().requires_grad_() for one in turned], "interpret"),
        results([x, w_in, b_in, w_out, b_out], "interpret"),
        strict=True,
    ):
        torch.testing.assert_close(mine, wanted)


def test_operator_check() -> None:
    arguments = drawn((3,), 4, 6, 5, torch.float32, True)
    torch.library.opcheck(torch.ops.tilemesh.mlp.default, (*arguments, "gelu_tanh", "interpret"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w_in": torch.ones(6, 5)}, "do not multiply"),
        ({"b_in": torch.ones(5)}, "b_in has shape"),
        ({"w_out": torch.ones(6)}, "expected x"),
        ({"activation": "tanh"}, "activation"),
        ({"x": torch.ones(3, 4, dtype=torch.float64)}, "float64"),
    ],
)
def test_what_does_not_fit_is_said(change: dict, words: str) -> None:
    given = dict(zip(NAMES, [one.detach() for one in drawn((3,), 4, 6, 5, torch.float32, True)], strict=True))
    given = {**given, "activation": "relu", **change}
    with pytest.raises(UsageError, match=words):
        tm.kernels.mlp(*(given[name] for name in NAMES), activation=given["activation"])


@pytest.mark.parametrize("shape", [(1, 1), (33, 130), (200, 300)])
def test_column_sums(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(sum_columns(call.interpreted, x), x.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    turned = x.t().contiguous().t()
    assert torch.equal(sum_columns(call.interpreted, turned), sum_columns(call.interpreted, x))
