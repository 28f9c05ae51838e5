"""Gradients of the fused matmul, tracing, autocast and the module."""

from __future__ import annotations

import pytest
import torch
from kernel_bounds import gradient_error_bounds
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import tilemesh as tm
from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.activations import reference as activations
from tilemesh.kernels.matmul import gradient, reference

pytest.importorskip("triton")

fused = tm.kernels.fused_matmul
Config = tm.kernels.Config

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "squared_relu")
C_SHAPES = {"full": (6, 5), "row": (5,), "column": (6, 1), "scalar": (1,), "none": None}


def leaves(m, n, k, c_shape, dtype=torch.float64, batch=()):
    generator = torch.Generator().manual_seed(3)
    shapes = [(*batch, m, k), (k, n)] + ([c_shape] if c_shape is not None else [])
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("c_kind", C_SHAPES)
def test_gradcheck_once_and_twice(activation, c_kind):
    inputs = leaves(6, 5, 4, C_SHAPES[c_kind])
    torch.autograd.gradcheck(lambda *t: fused(*t, activation=activation), inputs, fast_mode=True)
    torch.autograd.gradgradcheck(lambda *t: fused(*t, activation=activation), inputs, fast_mode=True)


@pytest.mark.parametrize("c_shape", [(2, 6, 5), (6, 5), (5,), (6, 1), (2, 1, 1)])
def test_gradcheck_batched(c_shape):
    torch.autograd.gradcheck(
        lambda *t: fused(*t, activation="silu"), leaves(6, 5, 4, c_shape, batch=(2,)), fast_mode=True
    )


KINDS = ("full", "row", "column", "none")


@pytest.mark.parametrize(
    ("activation", "c_kind"),
    [(name, KINDS[(number + more) % 4]) for number, name in enumerate(ACTIVATIONS) for more in (0, 1)],
)
def test_interpreted_gradients_are_as_near_to_float64_as_arithmetic_allows(activation, c_kind):
    """The fused gradient pass and both products, in the interpreter, in float32."""
    c_shape = {"full": (70, 66), "row": (66,), "column": (70, 1), "none": None}[c_kind]
    ours = leaves(70, 66, 40, c_shape, torch.float32)
    grad = torch.randn(70, 66, generator=torch.Generator().manual_seed(9))
    fused(*ours, activation=activation, implementation="interpret").backward(grad)
    exact = [t.detach().double().requires_grad_() for t in ours]
    c = exact[2] if len(exact) > 2 else None
    reference.fused_matmul(exact[0], exact[1], c, activation).backward(grad.double())
    given = [t.detach() for t in ours] + [None] * (3 - len(ours))
    bounds = gradient_error_bounds(*given, activation, grad)
    for mine, true, bound in zip(ours, exact, bounds, strict=False):
        assert (wrong := excess(mine.grad, true.grad, bound)) is None, wrong


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_an_interpreted_gradient_is_rounded_to_bfloat16(activation):
    """Cut instead of rounded, it would be up to two units too small, and on average half of one."""
    saved, grad = (torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    ours, _ = gradient.activation_gradient(grad, saved, activation, "full", "interpret")
    exact = activations.gradient(grad.double(), saved.double(), activation)
    rounding = (exact.bfloat16().double() - exact).abs().mean()
    assert (ours.double() - exact).abs().mean() <= 1.05 * rounding


@pytest.mark.parametrize(
    "config", [Config("tma", 64, 64, 64), Config("split", 64, 64, 32, split_k=2)], ids=lambda c: c.label
)
def test_forced_kernels_keep_the_sum_for_the_backward_pass(config):
    ours = leaves(40, 72, 32, (72,), torch.float32)
    fused(*ours, activation="gelu", implementation="interpret", config=config).sum().backward()
    exact = [t.detach().double().requires_grad_() for t in ours]
    reference.fused_matmul(*exact, "gelu").sum().backward()
    bounds = gradient_error_bounds(*(t.detach() for t in ours), "gelu", torch.ones(40, 72))
    for mine, true, bound in zip(ours, exact, bounds, strict=True):
        assert (wrong := excess(mine.grad, true.grad, bound)) is None, wrong


def test_only_what_is_asked_for_is_computed():
    a, b, c = leaves(6, 5, 4, (5,))
    b.requires_grad_(False)
    fused(a, b, c).sum().backward()
    assert a.grad is not None
    assert b.grad is None
    assert c.grad is not None


def test_a_closed_relu_stops_an_infinite_gradient():
    a = torch.tensor([[-1.0, 0.0]], requires_grad=True)
    for implementation in ("auto", "interpret"):
        d = fused(a, torch.eye(2), torch.tensor([0.0, 1.0]), implementation=implementation)
        (grad,) = torch.autograd.grad(d, a, torch.tensor([[float("inf"), 2.0]]))
        assert grad[0, 0] == 0 or grad[0, 0].isnan()  # inf times b's zero is NaN in the product, never from relu
        assert not torch.isinf(grad[0, 0])


def test_deterministic_algorithms_are_respected():
    torch.use_deterministic_algorithms(True)
    try:
        ours = leaves(70, 66, 40, (66,), torch.float32)
        results = []
        for _ in range(2):
            d = fused(
                *ours, activation="silu", implementation="interpret", config=Config("split", 64, 64, 32, split_k=2)
            )
            results.append(torch.autograd.grad(d.sum(), ours))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_compile_takes_it_as_one_operator(activation, recording):
    def call(a, b, c):
        return fused(a, b, c, activation=activation) * 2

    backend, recorded = recording
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    ours, plain = leaves(6, 5, 4, (5,)), leaves(6, 5, 4, (5,))
    compiled(*ours).sum().backward()
    (reference.fused_matmul(*plain, activation) * 2).sum().backward()
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert recorded.count("tilemesh.fused_matmul.default") == 1
    with torch.no_grad():
        torch.testing.assert_close(compiled(*ours), call(*plain))
    assert recorded.count("tilemesh.fused_matmul.default") == 2


@pytest.mark.parametrize("implementation", [pytest.param("auto", marks=pytest.mark.slow), "interpret"])
def test_transforms_inside_compile_see_through_it(implementation, recording):
    backend, recorded = recording
    a, b, c = (t.detach() for t in leaves(6, 5, 4, (5,), torch.float32))

    def function(a):
        return fused(a, b, c, activation="silu", implementation=implementation)

    for transformed in (
        lambda a: torch.func.jvp(function, (a,), (torch.ones_like(a),)),
        torch.func.grad(lambda a: function(a).sum()),
        torch.func.vmap(lambda row: function(row[None])),
        torch.func.jacfwd(lambda a: function(a).sum(0)),
    ):
        compiled = torch.compile(transformed, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(a), transformed(a))
    assert not [name for name in recorded if name.startswith("tilemesh.")]
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(a), function(a))
    assert "tilemesh.fused_matmul.default" in recorded


def test_a_transform_inside_compile_after_one_of_other_sizes(recording):
    """The second one's sizes are not known while torch.compile traces: `5 in (1, size)` is False of such a size."""
    x, row = torch.randn(6, 5), torch.randn(5)
    a, b, c = (t.detach() for t in leaves(6, 5, 4, (5,), torch.float32))
    first = torch.func.jacfwd(lambda x: tm.kernels.scale_shift(x, row, row, implementation="interpret").sum(0))
    second = torch.func.jacfwd(lambda a: fused(a, b, c, activation="silu", implementation="interpret").sum(0))
    for transformed, given in ((first, x), (second, a)):
        compiled = torch.compile(transformed, fullgraph=True, backend=recording[0])
        torch.testing.assert_close(compiled(given), transformed(given))


def test_compile_with_a_forced_config_and_out():
    def call(a, b, out):
        return fused(a, b, implementation="interpret", config=Config("pointer", 64, 64, 32), out=out)

    a, b, out = torch.randn(8, 8), torch.randn(8, 8), torch.empty(8, 8)
    assert torch.compile(call, fullgraph=True, backend="aot_eager")(a, b, out) is not None
    torch.testing.assert_close(out, torch.relu(a @ b))


def test_compile_with_sizes_that_change_and_out():
    call = torch.compile(lambda a, b, out: fused(a, b, out=out), fullgraph=True, dynamic=True, backend="aot_eager")
    b = torch.randn(4, 6)
    for m in (5, 7, 9):
        a, out = torch.randn(2, m, 4), torch.empty(2, m, 6)
        call(a, b, out)
        torch.testing.assert_close(out, torch.relu(a @ b))


@pytest.mark.parametrize(("activation", "keep"), [("relu", False), ("none", False), ("silu", True)])
@pytest.mark.parametrize("c_kind", ["full", "row", "none"])
def test_opcheck(activation, keep, c_kind):
    inputs = leaves(6, 5, 4, C_SHAPES[c_kind], torch.float32)
    arguments = (*inputs, *([None] if c_kind == "none" else []), activation, "auto", "", keep)
    torch.library.opcheck(torch.ops.tilemesh.fused_matmul.default, arguments)


def test_fake_tensors_and_transforms():
    with FakeTensorMode():
        assert fused(torch.empty(2, 3, 4), torch.empty(4, 5)).shape == (2, 3, 5)
        with pytest.raises(ValueError, match="do not multiply"):
            fused(torch.empty(3, 4), torch.empty(5, 5))
    a, b = torch.randn(6, 4), torch.randn(4, 5)
    value = torch.func.grad(lambda x: fused(x, b, activation="none").sum())(a)
    torch.testing.assert_close(value, torch.ones(6, 5) @ b.t())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_jit_trace_records_it():
    """As one operator: under the tracer sizes are tensors, and what a kernel writes is not recorded."""
    a, b = torch.randn(6, 4), torch.randn(4, 5)
    traced = torch.jit.trace(lambda x: fused(x, b, implementation="interpret"), a, check_trace=False)
    other = torch.randn(6, 4)
    torch.testing.assert_close(traced(other), torch.relu(other @ b))


def test_autocast_casts_as_a_matmul_does():
    ours = leaves(6, 5, 4, (5,), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        d = fused(*ours)
        assert d.dtype == torch.bfloat16
        assert fused(*(t.double() for t in ours)).dtype == torch.float64
    d.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in ours)


def test_module_is_a_linear_with_its_activation():
    layer = tm.kernels.FusedLinear(8, 5, activation="gelu")
    plain = torch.nn.Linear(8, 5)
    plain.load_state_dict(layer.state_dict())
    for shape in ((3, 8), (2, 3, 8), (8,)):
        x = torch.randn(shape)
        torch.testing.assert_close(layer(x), torch.nn.functional.gelu(plain(x)))
    assert "activation=gelu" in repr(layer)
    torch.testing.assert_close(tm.kernels.FusedLinear(8, 5, bias=False, activation=None)(x).shape, torch.Size([5]))


@pytest.mark.parametrize("c_shape", [(5, 1), (5,), (5, 5), (2, 5, 1)])
def test_gradcheck_where_rows_and_columns_are_as_many(c_shape):
    torch.autograd.gradcheck(
        lambda *t: fused(*t, activation="silu"), leaves(5, 5, 3, c_shape, batch=(2,)), fast_mode=True
    )


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradcheck_of_c_without_dims(columns, batch):
    torch.autograd.gradcheck(
        lambda *t: fused(*t, activation="gelu"), leaves(3, columns, 2, (), batch=batch), fast_mode=True
    )


@pytest.mark.parametrize("sizes", [(3, 4, 0), (3, 0, 4), (0, 3, 4), (0, 0, 0)])
@pytest.mark.parametrize("implementation", ["auto", "interpret"])
def test_gradients_of_empty_sizes(sizes, implementation):
    m, n, k = sizes
    for batch in ((), (2,)):
        for activation, c_shape in (("relu", (n,)), ("gelu", (m, n)), ("none", None)):
            ours = leaves(m, n, k, c_shape, torch.float32, batch)
            fused(*ours, activation=activation, implementation=implementation).sum().backward()
            plain = [t.detach().requires_grad_() for t in ours]
            c = plain[2] if c_shape is not None else None
            reference.fused_matmul(plain[0], plain[1], c, activation).sum().backward()
            for mine, theirs in zip(ours, plain, strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "squared_relu"])
def test_second_derivative_in_c_alone(activation):
    a, b, c = leaves(6, 5, 4, (5,))
    a, b = a.detach(), b.detach()

    def hessian_row(function):
        (first,) = torch.autograd.grad(function().sum(), c, create_graph=True)
        return torch.autograd.grad(first.sum(), c)[0]

    torch.testing.assert_close(
        hessian_row(lambda: fused(a, b, c, activation=activation)),
        hessian_row(lambda: reference.fused_matmul(a, b, c, activation)),
    )


def test_forward_mode_keeps_its_tangent():
    a, b, c = (t.detach() for t in leaves(6, 5, 4, (5,), torch.float32))
    tangent = torch.ones(6, 4)
    with forward_ad.dual_level():
        want = forward_ad.unpack_dual(reference.fused_matmul(forward_ad.make_dual(a, tangent), b, c, "silu")).tangent
        for implementation in ("auto", "interpret"):
            dual = fused(forward_ad.make_dual(a, tangent), b, c, activation="silu", implementation=implementation)
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, want)
            assert forward_ad.unpack_dual(fused(a, b, c, implementation=implementation)).tangent is None
        with pytest.raises(UsageError, match="out="):
            fused(forward_ad.make_dual(a, tangent), b, c, out=torch.empty(6, 5))


def test_out_is_checked_off_the_eager_path_too():
    a, b = torch.ones(4, 3), torch.ones(3, 2)
    wrong = {"shape": torch.empty(7, 4, 2), "dtype": torch.empty(4, 2, dtype=torch.float64)}
    for out in wrong.values():
        compiled = torch.compile(lambda a, b, out=out: fused(a, b, out=out), backend="aot_eager")
        with pytest.raises(UsageError, match="out is"):
            compiled(a, b)
    leaf = torch.ones(4, 3, requires_grad=True)
    with pytest.raises(UsageError, match="out="):
        torch.compile(lambda a, out: fused(a, b, out=out), backend="aot_eager")(leaf, torch.empty(4, 2))
    with FakeTensorMode():
        fake = [torch.empty(4, 3), torch.empty(3, 2)]
        with pytest.raises(UsageError, match="out is"):
            fused(*fake, out=torch.empty(7, 4, 2))
        with pytest.raises(UsageError, match="out="):
            fused(fake[0].requires_grad_(), fake[1], out=torch.empty(4, 2))
    with pytest.raises(UsageError, match="out="):
        torch.func.vmap(lambda x: fused(x, b, out=torch.empty(4, 2)))(torch.ones(5, 4, 3))


def test_autocast_casts_under_a_transform_as_it_does_without():
    a, b, c = torch.ones(5, 4, 3), torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.func.vmap(lambda x: fused(x, b, c))(a).dtype == fused(a, b, c).dtype == torch.bfloat16


def test_a_weights_gradient_lies_as_the_weight_does():
    """B of a linear layer is its weight transposed: a gradient laid out otherwise would be copied at every step."""
    weight = torch.randn(24, 16, requires_grad=True)
    plain = torch.randn(16, 24, requires_grad=True)
    x, grad = torch.randn(5, 16), torch.randn(5, 24)
    for b in (weight.t(), plain):
        (db,) = torch.autograd.grad(fused(x, b, None, activation="none"), b, grad)
        assert db.stride() == b.stride()
        torch.testing.assert_close(db, x.t() @ grad)
