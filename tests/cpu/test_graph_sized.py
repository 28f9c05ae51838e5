"""Sizes that change: one program for all of them, beside eager in float64, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tilemesh.bench.graph.models import GptBlock, ModelSize
from tilemesh.core.c_library import compiler
from tilemesh.graph import backend as graph_backend
from tilemesh.graph.backend import Backend
from tilemesh.graph.lower import NotServedError
from tilemesh.graph.sized import formula, joined_text

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler here")
SIZES = [(3, 5), (7, 11), (13, 17), (19, 23)]


class _Positions(nn.Module):
    """A table of positions that ends: sizes above it are none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x + self.table[: x.shape[0]], -1)


def _pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.reshape(x.shape[0] // 2, 2, -1), 1).flatten(0, 1) * 2.0


def _counted(x: torch.Tensor) -> torch.Tensor:
    """Means over the size that changes: a number per column each, and the size itself as a number."""
    return (x - x.mean(0)) * (x * x).mean(0).sqrt()


def _norms() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Softmax(-1))


def _deep() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.LogSoftmax(-1))


def _values(call: Callable[..., Any], x: torch.Tensor, module: Any) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    weights = list(module.parameters()) if isinstance(module, nn.Module) else []
    y = call(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *weights])]


def _checked(make: Callable[[], Any], shapes: list[tuple[int, ...]]) -> Backend:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, backend = make(), Backend()
    module = module.double() if isinstance(module, nn.Module) else module
    compiled = torch.compile(module, backend=backend, dynamic=True)
    for shape in shapes:
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(_values(compiled, x, module), _values(module, x, module), rtol=1e-10, atol=1e-11)
    return backend


@needs_compiler
@pytest.mark.parametrize("make", [_norms, _deep, lambda: _counted])
def test_one_program_serves_fifty_sizes(make: Callable[[], Any]) -> None:
    """Also those that are the size of another dim, and one that is long enough for threads."""
    backend = _checked(make, [(rows, 8) for rows in (*range(2, 51), 4000)])
    assert len(backend.report.pieces) == 2, str(backend.report)  # forward and backward
    assert all(piece.graph is not None for piece in backend.report.pieces)


@needs_compiler
@pytest.mark.slow
def test_two_sizes_change_at_once() -> None:
    size = ModelSize(width=16, layers=1, heads=2, vocabulary=0, batch=0, tokens=0, side=0)
    backend = _checked(lambda: GptBlock(size), [(batch, tokens, 16) for batch in (3, 2, 16) for tokens in (5, 2, 16)])
    assert len(backend.report.pieces) == 2, str(backend.report)


@needs_compiler
def test_sizes_up_to_the_end_of_a_table() -> None:
    backend = _checked(_Positions, [(rows, 8) for rows in (64, 2, 8, 63)])
    assert len(backend.report.pieces) == 2, str(backend.report)


@needs_compiler
def test_the_last_hundred_of_fewer_are_all() -> None:
    """At made-up sizes beyond 100 they would be a slice, which a call of 98 has not."""
    _checked(lambda: lambda x: x[-100:].exp(), [(rows, 6) for rows in (98, 50, 99, 130)])


def test_what_is_no_formula_gets_a_program_per_size() -> None:
    """Half of a size is none that is served; the results are right all the same."""
    backend = _checked(lambda: _pairs, [(2 * rows, 3) for rows in (2, 5, 7)])
    assert len(backend.report.pieces) > 2


@needs_compiler
@pytest.mark.parametrize(
    "call",
    [
        lambda x: functional.pad(x, (0, 0, 0, -x.shape[0] % 64)).softmax(-1).sum(0) / x.shape[0],
        lambda x: functional.pad(x, (0, 0, 0, -x.shape[0] % 2)).exp().sum(0),
        lambda x: torch.exp(x[: x.shape[0] // 64 * 64]) + 1,
        lambda x: x.exp() * (x.shape[0] % 2) + x.shape[0] // 64,
        lambda x: x.exp()[: torch.sym_min(x.shape[0], 64)] * 2,
    ],
    ids=["to 64", "to 2", "whole 64", "factor", "least"],
)
def test_sizes_that_are_rounded_are_right_at_every_size(call: Callable[..., Any]) -> None:
    """At four neighbouring primes these are constants."""
    _checked(lambda: call, [(rows, 6) for rows in (100, 130, 200, 300, 30)])


def test_a_formula_fits_all_sizes_or_none() -> None:
    assert formula([n for n, _ in SIZES], SIZES) == "(n0)"
    assert formula([64 * n * m for n, m in SIZES], SIZES) == "(n0*n1*64)"
    assert formula([m - 1 for _, m in SIZES], SIZES) == "(n1+-1)"
    assert formula([5] * 4, SIZES) == "5"
    for wrong in ([n // 2 for n, _ in SIZES], [n + m for n, m in SIZES], [3, 7, 13, 20]):
        with pytest.raises(NotServedError, match="a number that is"):
            formula(wrong, SIZES)


def test_texts_may_differ_in_numbers_alone() -> None:
    texts = [f"v12 = f({n}, {n}.0f, 1e-05, x{n * 0})" for n, _ in SIZES]
    assert joined_text(texts, SIZES, "({1}){0}") == "v12 = f((n0), (float)(n0), 1e-05, x0)"
    with pytest.raises(NotServedError, match="more than numbers"):
        joined_text(["f(3)", "g(7)", "f(13)", "f(19)"], SIZES)
    with pytest.raises(NotServedError, match=r"0\.333"):
        joined_text([f"f({1 / n})" for n, _ in SIZES], SIZES)


def test_beyond_the_most_sizes_torch_runs_its_own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the parts that they are taken into where kernels compute them."""
    monkeypatch.setattr(graph_backend, "MOST_SIZES", 0)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: functional.gelu(x[: x.shape[0] // 2]), backend=Backend(), dynamic=True)
    x, longer = torch.randn(7, 3), torch.randn(14, 3)
    compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = compiled(longer)
    names = [event.name for event in profile.events()]
    assert (names.count("aten::gelu"), names.count("aten::erf")) == (1, 0)
    torch.testing.assert_close(result, functional.gelu(longer[:7]))
