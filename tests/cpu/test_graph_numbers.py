"""Numbers that a compiled program once had wrong without a word: each is eager's, and what eager refuses is refused.

`test_graph_differential.py` looks for such numbers among all operators; here are the ones that were found by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from tilemesh.graph.backend import Backend
from tilemesh.graph.lower import lower

Tensor = torch.Tensor
ZEROS = torch.tensor([0.0, -0.0, 1.0, -1.0])


def _compiled(function: Callable[..., Any], **settings: Any) -> tuple[Callable[..., Any], Backend]:
    torch._dynamo.reset()
    backend = Backend()
    return torch.compile(function, backend=backend, **settings), backend


def _bits(result: Any) -> list[Any]:
    """Every number with its sign: 0.0 and -0.0 are two."""
    return [
        (str(each.dtype), [float(value).hex() for value in each.double().flatten()])
        for each in torch.utils._pytree.tree_leaves(result)
    ]


NARROW = torch.linspace(-1.5, 1.5, 7).bfloat16()
EXACT: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "numbers that are negated as they are read": (
        lambda x: x * 2 + 1,
        (torch.complex(ZEROS, torch.linspace(1, 4, 4)).conj().imag,),
    ),
    "whole numbers beyond the largest": (
        lambda x: (x + 1 > x, x - 1 < x, x * 2 > x),
        (torch.tensor([2**31 - 1, -(2**31), 5], dtype=torch.int32),),
    ),
    "a cast through a smaller range": (lambda x: x.half().float(), (torch.tensor([1e30, 1.0]).bfloat16(),)),
    "zeros of both signs": (lambda x: (torch.copysign(x, 0.0), torch.copysign(x, -0.0), x * 0.0, x * -0.0), (ZEROS,)),
    "zeros added": (lambda x: (x + 0.0, x - 0.0, x + -0.0, x - -0.0), (ZEROS,)),
    "a zero's sign through a function": (lambda x: 1 / torch.tanh(x * 3), (torch.tensor([0.0, -0.0]),)),
    "a stored number": (lambda x: torch.full((7,), 1.003, dtype=x.dtype) * x, (NARROW,)),
    "a stored number, cast": (lambda x: torch.full((7,), 1.003, dtype=x.dtype).float() * x.float(), (NARROW,)),
    "numbers that are compared": (lambda x: torch.where(x < 1.003, x + 1, x - 1), (NARROW,)),
    "numbers that bound": (lambda x: x.clamp(-1.003, 1.003) * 3, (NARROW,)),
    "numbers that fill": (lambda x: x.masked_fill(x > 0, 1.003) * 3, (NARROW,)),
    "one, one and true": (
        lambda x: (torch.full((2,), 1), torch.full((2,), 1.0), torch.full((2,), True), x + True),
        (torch.tensor([0, 1]),),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_every_bit_is_eager_s(name: str) -> None:
    function, tensors = EXACT[name]
    assert _bits(_compiled(function)[0](*tensors)) == _bits(function(*tensors))


def test_means_of_16_bits_do_not_overflow() -> None:
    """A mean is below the largest element whatever its sum is; one unit in the last place is half a rounding each."""
    x = torch.linspace(10.0, 60.0, 2 * 8 * 56 * 56).reshape(2, 8, 56, 56).half()
    functions = (
        lambda x: x.mean((2, 3)),
        lambda x: torch.var_mean(x, (2, 3)),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    )
    for function in functions:
        ours = torch.utils._pytree.tree_leaves(_compiled(function)[0](x))
        for mine, true in zip(ours, torch.utils._pytree.tree_leaves(function(x.double())), strict=True):
            torch.testing.assert_close(mine.double(), true, rtol=3 * 2.0**-11, atol=0.0)


def test_roots_of_16_bits_are_rounded_once() -> None:
    """A reciprocal root is a root and a quotient; only the quotient is rounded to 16 bits."""
    x = torch.arange(1, 2049).div(256).half()
    run, _ = _compiled(lambda x: (torch.rsqrt(x + 0), (x + 0) ** -0.5))
    for mine in run(x):
        torch.testing.assert_close(mine.double(), x.double() ** -0.5, rtol=1.001 * 2.0**-11, atol=0.0)


def test_a_power_given_by_a_tensor_is_torch_s() -> None:
    """As a product it would be another function: torch's own may be one unit in the last place off."""
    run, backend = _compiled(lambda x: torch.pow(x, torch.full_like(x, 2.0)))
    x = torch.linspace(0.1, 3.0, 64)
    torch.testing.assert_close(run(x).double(), x.double() ** 2, rtol=2.0**-23, atol=0.0)
    assert not [step for step in backend.report.pieces[0].steps if step.before.op == "power"]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bad", [7, 5, -1])
def test_a_target_that_is_no_class_is_refused(bad: int, reduction: str) -> None:
    x, target = torch.randn(3, 5), torch.tensor([1, bad, -100])
    run, _ = _compiled(lambda x, target: functional.cross_entropy(x, target, reduction=reduction))
    for loss in (run, lambda x, target: functional.cross_entropy(x, target, reduction=reduction)):
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
            loss(x, target)
    target[1] = 4
    torch.testing.assert_close(run(x, target), functional.cross_entropy(x, target, reduction=reduction))


@pytest.mark.parametrize("bad", [7, 5, -1])
def test_an_index_that_is_no_row_is_refused(bad: int) -> None:
    run, _ = _compiled(lambda table, index: functional.embedding(index, table) * 2)
    with pytest.raises(IndexError, match="out of range"):
        run(torch.randn(5, 2), torch.tensor([1, bad]))


def test_the_largest_of_a_row_has_a_gradient_where_scores_are_computed_again() -> None:
    """It is shared by the elements that equal it: products that a backward kernel does not round equal no rounded one,
    and the gradient was 0 / 0."""
    torch.manual_seed(0)
    x = torch.randn(16, 48, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(48, dtype=torch.bfloat16, requires_grad=True)

    def chances(x: Tensor, w: Tensor) -> Tensor:
        scores = x * w
        return (scores - scores.amax(-1, keepdim=True)).exp().sum(-1)

    run = torch.compile(chances, backend=Backend(rematerialise=True))
    wide = [each.detach().double().requires_grad_() for each in (x, w)]
    true = torch.autograd.grad(chances(*wide).sum(), wide)
    for ours, exact in zip(torch.autograd.grad(run(x, w).sum(), (x, w)), true, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0.05, atol=0.05)


class _Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.gelu(self.convolution(x)).mean((2, 3)))  # type: ignore[no-any-return]


def test_a_convolution_of_data_is_compiled_for_sizes_that_change() -> None:
    """Its input gets no gradient, which torch traces as a result that is None."""
    model = _Convolved()
    run, backend = _compiled(model, dynamic=True)
    x = torch.randn(2, 3, 8, 8)
    run(x).sum().backward()
    assert len(backend.report.pieces) == 2
    assert all(piece.graph is not None for piece in backend.report.pieces), str(backend.report)
    ours = [each.grad for each in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for mine, theirs in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad)


def test_a_compiled_module_can_be_copied() -> None:
    run, backend = _compiled(_Convolved())
    x = torch.randn(2, 3, 8, 8)
    expected = run(x)
    copied = copy.deepcopy(run)
    torch.testing.assert_close(copied(x), expected)
    assert copy.deepcopy(backend) is backend  # whose report is of all copies


@pytest.mark.parametrize(("own", "other"), [("cuda", "cpu"), ("cpu", "meta")])
def test_tensors_on_another_device_stay_torch_s_own(own: str, other: str) -> None:
    """Else zeros made on the host would be the GPU's, and so would a copy on the host."""

    def call(x: torch.Tensor) -> Any:
        return x.exp(), torch.zeros(3, device=other), x.to(other).sin()

    with FakeTensorMode():
        graph = lower(make_fx(call)(torch.empty(3, device=own))).graph
    assert [node.op for node in graph.outputs] == ["exp", "opaque", "opaque"]
    assert [node["target"] for node in graph.outputs[1:]] == ["aten.zeros.default", "aten.sin.default"]


def test_casts_that_name_their_own_device_are_casts() -> None:
    """As torch writes those of a backward pass; traced for a GPU, none is needed."""
    aten = torch.ops.aten
    with FakeTensorMode():
        x = torch.empty(2, 4, dtype=torch.bfloat16, device="cuda")

        def cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            wide = aten._to_copy.default(x, dtype=torch.float32, layout=torch.strided, device=x.device)
            return wide, aten._to_copy.default(wide, device=torch.device("cpu"))

        module = make_fx(cast)(x)
    same, moved = lower(module).graph.outputs
    assert (same.op, moved.op) == ("cast", "opaque")
