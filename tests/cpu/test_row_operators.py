"""Operators over rows (softmax, norms, losses): the Triton code by the interpreter, against float64 and torch."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.library import opcheck
from torch.nn import functional
from triton.backends.compiler import GPUTarget

import tilemesh as tm
from tilemesh.core.debug import VARIABLE
from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.context import Context, use
from tilemesh.kernels.cross_entropy import kernel as loss_kernels
from tilemesh.kernels.cross_entropy import reference as losses
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.gpu import described_gpu
from tilemesh.kernels.launch.operator import looks_at_values
from tilemesh.kernels.launch.program import Operand, compile_step
from tilemesh.kernels.linear_cross_entropy import cost as chunks
from tilemesh.kernels.norm import kernel as norm_kernels
from tilemesh.kernels.norm import reference as norms
from tilemesh.kernels.rows import load_stages
from tilemesh.kernels.softmax import kernel as softmax_kernels
from tilemesh.kernels.softmax import reference as softmaxes

pytest.importorskip("triton")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COLUMNS = (1, 5, 64, 129, 1025)
INTERPRET = {"implementation": "interpret"}
kernels = tm.kernels


def normal(*shape, dtype=torch.float64, seed=0, grad=False):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return made.requires_grad_(grad)


def strided(rows, columns, dtype, turned, step):
    """A tensor of this size whose elements do not lie side by side."""
    if turned:
        return normal(columns, rows, dtype=dtype).t()
    return normal(rows, step * columns, dtype=dtype)[:, ::step]


# ---- forward, against float64 ---------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(1, 9), columns=st.sampled_from(COLUMNS), dtype=st.sampled_from(DTYPES), turned=st.booleans(),
    step=st.integers(1, 2), scale=st.sampled_from([1.0, 0.3, -2.0, 0.0]), causal=st.booleans(),
)  # fmt: skip
def test_softmax_of_any_size_and_strides(rows, columns, dtype, turned, step, scale, causal):
    x = strided(min(rows, columns) if causal else rows, columns, dtype, turned, step)
    y = kernels.softmax(x, scale=scale, causal=causal, **INTERPRET)
    assert excess(y, softmaxes.exact(x, scale, causal), softmaxes.error_bound(x, scale, causal)) is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("columns", "function"), [(333, "whole_rows"), (32_768, "held_rows"), (50_257, "long_row")])
def test_rows_of_any_length_move_16_bytes_at_a_time_on_an_h200(columns, function, causal):
    """Compiled without one. Of rows that begin anywhere, a thread loaded and stored one element per instruction; those
    that wait in shared memory fit there."""
    place, limit = Place((600, columns), (columns, 1), "bfloat16", True), 232_448
    (step,) = softmax_kernels.forward_plan(
        {"x": place, "y": place}, scale=1.0, causal=causal, queries=300, programs=132, shared_bytes=limit
    ).steps
    assert step.function == function
    compiled = compile_step(step, {name: Operand("bfloat16") for name in "xy"}, GPUTarget("cuda", 90, 32))
    assert compiled.metadata.shared <= limit
    copies = [line for line in compiled.asm["ptx"].splitlines() if "ld.global" in line or "cp.async.cg" in line]
    assert copies
    assert causal or all("v4.b32" in line or "0x10" in line for line in copies)  # else every row has an end of its own
    assert "st.global.v4.b32" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("rows", "columns", "forward", "backward"),
    [
        (600, 333, "forward_pass", "backward_pass add_up"),
        (600, 50_257, "long_forward", "long_backward column_sums add_up"),
        (9, 50_257, "part_sums part_write", "part_slopes few_rows_back"),
        (34, 11, "forward_pass", "backward_pass"),
    ],
)
def test_what_norms_of_any_rows_launch_and_how_wide_they_load_on_an_h200(rows, columns, forward, backward, monkeypatch):
    monkeypatch.setattr(norm_kernels, "gpu_of", lambda index: described_gpu("h200"))
    monkeypatch.setattr(norm_kernels, "device_index", lambda device: 0)
    place, vector = Place((rows, columns), (columns, 1), "bfloat16", True), Place((columns,), (1,), "bfloat16", True)
    own = Place((rows,), (1,), "float32", True)
    places = {"x": place, "weight": vector, "bias": vector, "root": own, "mean": own}
    steps = norm_kernels.forward_plan(places | {"y": place}, eps=1e-5, centred=True).steps
    assert " ".join(step.function for step in steps) == forward
    walk = norm_kernels._programs(torch.device("cuda"), rows, columns, False)
    places |= {"grad": place, "dx": place, "dweight": vector, "dbias": vector}
    if walk["splits"]:
        shape = (2, walk["splits"], columns)
        places["sums"] = Place(shape, (shape[1] * columns, columns, 1), "float32", True)
    back = norm_kernels.backward_plan(places, centred=True, **walk).steps
    assert " ".join(step.function for step in back) == backward
    if columns == 333:
        operands = dict.fromkeys(("x", "y", "weight", "bias"), Operand("bfloat16"))
        operands |= dict.fromkeys(("root", "mean"), Operand("float32"))
        ptx = compile_step(steps[0], operands, GPUTarget("cuda", 90, 32)).asm["ptx"]
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx


@pytest.mark.parametrize(
    ("dtype", "columns"), [(torch.float16, 20_001), (torch.float16, 40_000), (torch.float32, 30_001)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_of_rows_too_long_for_registers(causal, columns, dtype):
    """In float32 read twice; in float16 one program holds them."""
    x = normal(5 if columns == 20_001 else 2, columns, dtype=dtype, grad=True)
    y = kernels.softmax(x, scale=0.5, causal=causal, **INTERPRET)
    assert excess(y, softmaxes.exact(x, 0.5, causal), softmaxes.error_bound(x, 0.5, causal)) is None
    (mine,) = torch.autograd.grad(y, x, x.detach())
    (exact,) = torch.autograd.grad(softmaxes.exact(x, 0.5, causal), x, x.detach().double())
    # Of the result, which is rounded, of the gradient itself, and of the float32 sums.
    assert (mine - exact).norm() <= (1e-6 + 2 * torch.finfo(dtype).eps) * exact.norm()


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(1, 9), columns=st.sampled_from(COLUMNS), dtype=st.sampled_from(DTYPES), turned=st.booleans(),
    step=st.integers(1, 2), centred=st.booleans(), with_weight=st.booleans(), shift=st.sampled_from([0.0, 3.0]),
)  # fmt: skip
def test_norms_of_any_size_and_strides(rows, columns, dtype, turned, step, centred, with_weight, shift):
    x = strided(rows, columns, dtype, turned, step) + shift
    weight = normal(columns, seed=1, dtype=dtype) if with_weight else None
    bias = normal(columns, seed=2, dtype=dtype) if with_weight and centred else None
    if centred:
        y = kernels.layer_norm(x, weight, bias, eps=1e-5, **INTERPRET)
    else:
        y = kernels.rms_norm(x, weight, eps=1e-5, **INTERPRET)
    exact = norms.exact(x, weight, bias, eps=1e-5, centred=centred)
    assert excess(y, exact, norms.error_bound(x, weight, bias, eps=1e-5, centred=centred)) is None


def test_a_sum_in_float32_beside_16_bits():
    x, residual = normal(40, 130, dtype=torch.bfloat16), normal(40, 130, seed=1, dtype=torch.float32)
    weight = normal(130, seed=2, dtype=torch.float32)
    y, total = kernels.add_rms_norm(x, residual, weight, eps=1e-5, **INTERPRET)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, residual + x.float())
    exact = norms.exact(total, weight, eps=1e-5, centred=False)
    allowed = norms.error_bound(total, weight, eps=1e-5, centred=False) + exact.abs() * torch.finfo(torch.bfloat16).eps
    assert excess(y, exact, allowed) is None


@pytest.mark.parametrize("columns", [40, 201])
@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_a_float64_residual_beside_a_float32_x_is_summed_and_normalized_in_float64(name, columns, monkeypatch):
    """Of rows in one block, and of those in four."""
    sizes = dict.fromkeys(("LONGEST_FORWARD", "LONGEST_ALONE", "LONGEST_SUMMED", "LONGEST_INVARIANT"), 99)
    for size in (sizes | {"_LONG_BLOCK": 64}).items():
        monkeypatch.setattr(norm_kernels, *size)
    tensors = normal(6, columns, dtype=torch.float32), normal(6, columns, seed=1), normal(columns, seed=2)
    results = []
    for implementation in ("torch", "interpret"):
        given = [tensor.clone().requires_grad_() for tensor in tensors]
        y, total = getattr(kernels, name)(*given, implementation=implementation)
        (y.double().sin().sum() + total.cos().sum()).backward()
        results.append((total, given[1].grad, given[2].grad))
    for expected, made in zip(*results, strict=True):
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-14)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(1, 9), columns=st.sampled_from(COLUMNS), dtype=st.sampled_from(DTYPES), turned=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]), z=st.sampled_from([0.0, 0.01]), narrow=st.booleans(),
)  # fmt: skip
def test_cross_entropy_of_any_size_and_strides(rows, columns, dtype, turned, smoothing, z, narrow):
    logits = strided(rows, columns, dtype, turned, 1)
    target = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(0))
    target[0] = -100
    options = {"label_smoothing": smoothing, "z_loss": z, "reduction": "none"}
    found = kernels.cross_entropy(logits, target.int() if narrow else target, **options, **INTERPRET)
    exact = kernels.cross_entropy(logits.double(), target, **options, implementation="torch")
    assert excess(found, exact, losses.error_bound(logits, target, z_loss=z)) is None
    assert found[0] == 0


@pytest.mark.parametrize("reduction", losses.REDUCTIONS)
@pytest.mark.parametrize(("rows", "classes"), [(5000, 1), (3000, 2), (5, 4103), (3, 1029)])
def test_the_loss_of_a_handful_of_classes_and_of_rows_that_begin_anywhere(rows, classes, reduction, monkeypatch):
    """Sums of sums, and blocks of which the first and the last have an end of the row; the gradient over the logits."""
    monkeypatch.setattr(loss_kernels, "_ADDED_AT_ONCE", 4)
    monkeypatch.setattr(loss_kernels, "MOST_IN_TILE", 1024)
    logits, target = normal(rows, classes, dtype=torch.float16), torch.arange(rows) * 37 % classes
    target[rows // 2] = -100
    wide = logits.double().requires_grad_()
    upstream = normal(rows, seed=1) if reduction == "none" else torch.tensor(2.0)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    mine = logits.clone().requires_grad_()
    found = kernels.cross_entropy(mine, target, overwrite=True, **options, **INTERPRET)
    exact = functional.cross_entropy(wide, target, **options)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(found, mine, upstream.float())
    (true,) = torch.autograd.grad(exact, wide, upstream.double())
    # The logits are rounded the same for both: what is left is the gradient's own rounding, and the float32 sums'.
    sums = 4 * torch.finfo(torch.float32).eps * upstream.norm()
    assert (grad - true).norm() <= 2 * torch.finfo(torch.float16).eps * true.norm() + sums


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_gradients_by_finite_differences():
    x, residual = normal(2, 3, 6, grad=True), normal(2, 3, 6, seed=3, grad=True)
    weight, bias = normal(6, seed=1, grad=True), normal(6, seed=2, grad=True)
    check = functools.partial(torch.autograd.gradcheck, fast_mode=True)  # along random directions
    assert check(lambda x: kernels.softmax(x, scale=0.7, causal=True, **INTERPRET), (x,))
    assert check(lambda *t: kernels.rms_norm(*t, **INTERPRET), (x, weight))
    assert check(lambda *t: kernels.layer_norm(*t, **INTERPRET), (x, weight, bias))
    assert check(lambda *t: kernels.add_rms_norm(*t, **INTERPRET), (x, residual, weight))
    assert check(lambda *t: kernels.add_layer_norm(*t, **INTERPRET), (x, residual, weight, bias))


@pytest.mark.parametrize("reduction", losses.REDUCTIONS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}])
def test_the_loss_by_finite_differences(reduction, options):
    logits, target = normal(4, 6, grad=True), torch.tensor([1, -100, 5, 0])
    options = {**options, "reduction": reduction, **INTERPRET}
    assert torch.autograd.gradcheck(lambda x: kernels.cross_entropy(x, target, **options), (logits,), fast_mode=True)


def test_gradients_of_vectors_repeat_bit_for_bit(monkeypatch):
    monkeypatch.setattr(norm_kernels, "_MANY_PROGRAMS", 26)  # a program takes four rows at once, as of many
    x, weight, bias = (
        normal(100, 70, dtype=torch.float32, grad=True),
        *(normal(70, seed=seed, dtype=torch.float32, grad=True) for seed in (1, 2)),
    )
    found = []
    for implementation in ("interpret", "interpret", "torch"):
        y = kernels.layer_norm(x, weight, bias, implementation=implementation)
        found.append(torch.autograd.grad(y, (x, weight, bias), x.detach()))
    assert all(torch.equal(first, again) for first, again in zip(found[0], found[1], strict=True))
    for mine, torchs in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("x", "grad", "columns"), [("float64", "float64", 4096), ("float32", "bfloat16", 8192)])
def test_a_norms_backward_pass_fits_into_shared_memory(x, grad, columns):
    """On an H200 that is not here; with three stages, float64 took 393,408 bytes of the 232,448 there are."""
    kind, rows, limit = ("float64" if x == "float64" else "float32"), 500, 232_448
    sizes = {"grad": grad, "grad_total": x, "x": x, "dx": grad} | ({} if x == grad else {"dtotal": x})
    places = {name: Place((rows, columns), (columns, 1), dtype, True) for name, dtype in sizes.items()}
    places |= {name: Place((rows,), (1,), kind, True) for name in ("root", "mean")}
    places |= {"weight": Place((columns,), (1,), kind, True)}
    places |= {"sums": Place((2, 132, columns), (132 * columns, columns, 1), kind, True)}
    step, _ = norm_kernels.backward_plan(places, centred=True, programs=132, splits=132, shared_bytes=limit).steps
    operands = {name: Operand(place.dtype) for name, place in places.items()}
    assert compile_step(step, operands, GPUTarget("cuda", 90, 32)).metadata.shared <= limit


@given(stage=st.integers(1, 2**22), shared=st.integers(0, 2**19))
def test_stages_of_loads_fit_where_there_is_more_than_one(stage, shared):
    stages = load_stages(stage, shared)
    assert 1 <= stages <= 3
    assert stages == 1 or (stages - 1) * stage < shared
    assert stages == 3 or stages * stage > shared - 2**13  # another would not fit


@pytest.mark.parametrize("is_double", [False, True])
def test_a_block_of_the_norms_backward_pass(is_double):
    for columns in (1 << power for power in range(18)):
        for rows in (1, 50, 1000, 100_000):
            shape = norm_kernels.backward_config(rows, columns, is_double)
            assert 1 <= shape.warps <= 32
            assert shape.warps & (shape.warps - 1) == shape.rows & (shape.rows - 1) == 0
            assert shape.columns == columns
            if columns <= norm_kernels.LONGEST_ALONE // (1 + is_double):
                assert shape.rows * columns // (32 * shape.warps) <= 32


@pytest.mark.parametrize("columns", [35, 250, 768, 5000, norm_kernels.LONGEST_INVARIANT])
def test_how_a_norms_forward_pass_adds_up_a_row_does_not_follow_from_the_number_of_rows(columns):
    """Engines compare their tokens with training's. The order of a sum follows from the warps, and from how many
    elements a thread has of a row: up to 16 bytes, where it has as many at all (tests/gpu compares the bits)."""
    found = set()
    for rows in (1, 7, 200, 4000, 100_000):
        places = {name: Place((rows, columns), (columns, 1), "bfloat16", True) for name in ("x", "y")}
        (step,) = norm_kernels.forward_plan(places, eps=1e-5, centred=True).steps
        assert step.constants["ROWS"] * step.constants["COLUMNS"] >= 8 * 32 * step.warps
        found.add((step.kernel, step.constants["COLUMNS"], step.constants["GROUP"], step.warps))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("adds", "alone", "few"), [(False, 99, 0), (True, 99, 0), (False, 999, 0), (False, 99, 9), (True, 99, 9)]
)
@pytest.mark.parametrize("centred", [False, True])
def test_norms_of_rows_too_long_for_registers(centred, adds, alone, few, monkeypatch):
    """In four blocks, the last of them ragged; backward too, or with registers for x's gradient alone; of few rows by
    a program for each block."""
    sizes = {"LONGEST_FORWARD": 99, "LONGEST_ALONE": alone, "LONGEST_SUMMED": 99, "_LONG_BLOCK": 64}
    sizes |= {"LONGEST_INVARIANT": 99, "_FEW_ROWS": few, "_FEW_ROWS_BACK": few}
    for name, size in (sizes | {"_SUMMED_ROWS": 4, "_SUMMED_COLUMNS": 128}).items():
        monkeypatch.setattr(norm_kernels, name, size)
    x, weight, bias = normal(9, 201, dtype=torch.float32), normal(201, seed=1), normal(201, seed=2)
    x = (x + 1000.0).requires_grad_()  # squares share six digits
    wide = x.detach().double().requires_grad_()
    residual = normal(9, 201, seed=3, dtype=torch.float32) if adds else None
    vectors = [each.float().requires_grad_() for each in ((weight, bias) if centred else (weight,))]
    name = ("add_" if adds else "") + ("layer_norm" if centred else "rms_norm")
    y = getattr(kernels, name)(x, *([residual] if adds else []), *vectors, eps=1e-5, **INTERPRET)
    y, total = y if adds else (y, x)
    plain = [each.detach().double().requires_grad_() for each in vectors]
    exact = norms.exact(wide if residual is None else wide + residual, *plain, eps=1e-5, centred=centred)
    assert excess(y, norms.exact(total, *plain, eps=1e-5, centred=centred),
                  norms.error_bound(total.detach(), *vectors, eps=1e-5, centred=centred)) is None  # fmt: skip
    slopes = normal(9, 201, seed=4, dtype=torch.float32)
    mine = torch.autograd.grad(y, (x, *vectors), slopes)
    for found, true in zip(mine, torch.autograd.grad(exact, (wide, *plain), slopes.double()), strict=True):
        assert (found - true).norm() <= 3e-4 * true.norm()  # 1000 is rounded to 6e-5, of elements about 1


def saved_bytes(function, *given):
    """What autograd keeps, each storage once, without the arguments that are parameters."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = function(*given)
    return sum(kept.values()), made


def test_of_a_sum_and_its_norm_the_sum_alone_is_kept():
    x, residual = normal(64, 128, dtype=torch.bfloat16, grad=True), normal(64, 128, dtype=torch.float32, grad=True)
    weight = normal(128, dtype=torch.float32, grad=True)
    size, _ = saved_bytes(lambda *t: kernels.add_rms_norm(*t, **INTERPRET), x, residual, weight)
    assert size == 4 * (64 * 128 + 128 + 64)  # the sum in float32, the weight, a number per row


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
@pytest.mark.parametrize("used", [0, 1])
def test_a_result_that_nothing_was_computed_from_has_no_gradient(name, used):
    function = getattr(kernels, name)
    given = [normal(5, 6, grad=True), normal(5, 6, seed=1, grad=True), normal(6, seed=2, grad=True)]
    found = []
    for implementation in ("interpret", "interpret", "torch"):
        made = function(*given, implementation=implementation)[used]
        found.append(torch.autograd.grad(made.square().sum(), given, allow_unused=True))
    for mine, again, torchs in zip(*found, strict=True):
        if torchs is None:  # the weight has no part in the sum
            torchs = torch.zeros_like(mine)
        torch.testing.assert_close(mine, torchs)
        assert torch.equal(mine, again)


@pytest.mark.parametrize("implementation", ["auto", "interpret"])
@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_where_squares_overflow_the_sums_gradient_passes(name, implementation):
    """The norm of such a row is lost in float32, and so is what comes back through it: nothing, and not NaN."""
    x, weight = normal(3, 40, dtype=torch.float32), normal(40, seed=1, dtype=torch.float32)
    x[1, 20] = torch.finfo(torch.float32).min
    upstream = [normal(3, 40, dtype=torch.float32, seed=seed) for seed in (2, 3)]
    upstream[0][1, 20] = 9.0  # times the least number it overflows
    made = getattr(kernels, name)(x.requires_grad_(), torch.zeros(3, 40), weight, implementation=implementation)
    (grad,) = torch.autograd.grad(made, x, upstream)
    assert torch.equal(grad[1], upstream[1][1])


def test_second_derivatives_of_a_sum_whose_summands_were_not_kept():
    x, residual = normal(2, 6, grad=True), normal(2, 6, seed=3, grad=True)
    weight, bias = normal(6, seed=1, grad=True), normal(6, seed=2, grad=True)
    twice = functools.partial(torch.autograd.gradgradcheck, fast_mode=True)  # along random directions
    assert twice(lambda *t: kernels.add_rms_norm(*t, **INTERPRET), (x, residual, weight))
    assert twice(lambda *t: kernels.add_layer_norm(*t, **INTERPRET), (x, residual, weight, bias))


def test_second_derivatives_where_one_argument_was_computed_from_another():
    weight = normal(6, seed=1, grad=True)

    def slope(implementation):
        y = kernels.rms_norm(weight * normal(2, 6), weight, implementation=implementation)
        (first,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), weight)

    torch.testing.assert_close(slope("interpret"), slope("torch"))


def test_only_what_needs_a_gradient_gets_one():
    x, weight = normal(4, 6), normal(6, seed=1, grad=True)
    kernels.rms_norm(x, weight, **INTERPRET).sum().backward()
    assert x.grad is None
    assert weight.grad is not None


@pytest.mark.parametrize(
    ("dtype", "reduction"), [pytest.param(torch.float32, "mean", marks=pytest.mark.slow), (torch.bfloat16, "sum")]
)
def test_a_loss_without_logits_in_several_chunks(dtype, reduction, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 128 * 50 * torch.finfo(dtype).bits // 8)
    x, weight = normal(140, 8, dtype=dtype, grad=True), normal(50, 8, seed=1, dtype=dtype, grad=True)
    target = torch.randint(50, (140,), generator=torch.Generator().manual_seed(0))
    target[7] = -100
    found = []
    for implementation in ("interpret", "torch"):
        loss = kernels.linear_cross_entropy(x, weight, target, reduction=reduction, implementation=implementation)
        found.append((loss, *torch.autograd.grad(3 * loss, (x, weight))))
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    loss = kernels.linear_cross_entropy(*wide, target, reduction=reduction)
    exact = (loss, *torch.autograd.grad(3 * loss, wide))
    for mine, torchs, true in zip(*found, exact, strict=True):
        floor = true.norm() * torch.finfo(dtype).eps  # of rounding the result itself
        assert (mine.double() - true).norm() <= 2 * (torchs.double() - true).norm() + floor


def test_chunks_are_equal_and_cover_the_rows():
    for rows, classes in ((8192, 50_304), (8192, 128_256), (1, 10), (129, 50_000_000), (5000, 50_304)):
        size = chunks.chunk_rows(rows, classes, 2)
        assert 0 < size <= rows
        assert size == rows or size % 128 == 0
        assert size <= 128 or size * classes * 2 <= chunks.CHUNK_BYTES + 128 * classes * 2


def test_without_gradients_a_loss_makes_none():
    with torch.no_grad():
        assert kernels.linear_cross_entropy(normal(4, 3), normal(5, 3), torch.tensor([0, 1, 2, 3]), **INTERPRET) > 0


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_sum_over_rows_that_float16_cannot_hold_is_scaled_before_it_must(overwrite: bool) -> None:
    """The mean over rows is taken by the gradient from above, and so is whatever scales a loss in float16."""
    x, target = torch.full((8, 8), 20_000.0, dtype=torch.float16), torch.zeros(8, dtype=torch.int64)
    for classes in (5, 8):
        weight = torch.zeros(classes, 8, dtype=torch.float16, requires_grad=True)
        loss = kernels.linear_cross_entropy(x, weight, target, reduction="sum", overwrite=overwrite, **INTERPRET)
        (loss / 8).backward()
        expected = torch.full((classes, 8), 20_000 / classes)
        expected[0] -= 20_000
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad.float(), expected, rtol=1e-3, atol=0)


def test_a_gradient_over_the_logits():
    logits, target = normal(4, 6, grad=True), torch.tensor([1, -100, 5, 0])
    copied = logits * 1
    loss = kernels.cross_entropy(copied, target, overwrite=True, **INTERPRET)
    loss.backward(retain_graph=True)
    (wanted,) = torch.autograd.grad(functional.cross_entropy(logits, target), logits)
    torch.testing.assert_close(logits.grad, wanted)
    torch.testing.assert_close(copied.detach(), wanted)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- as torch sees them ----------------------------------------------------------------------------------------------


def calls():
    x, weight, bias = normal(5, 6, grad=True), normal(6, seed=1, grad=True), normal(6, seed=2, grad=True)
    target = torch.tensor([1, -100, 5, 0, 2])
    return {
        "softmax": (lambda *t: kernels.softmax(*t, causal=True, **INTERPRET), (x,)),
        "rms_norm": (lambda *t: kernels.rms_norm(*t, **INTERPRET), (x, weight)),
        "layer_norm": (lambda *t: kernels.layer_norm(*t, **INTERPRET), (x, weight, bias)),
        "add_rms_norm": (lambda *t: kernels.add_rms_norm(*t, **INTERPRET)[0], (x, normal(5, 6, seed=4), weight)),
        "add_layer_norm": (lambda *t: kernels.add_layer_norm(*t, **INTERPRET)[1], (x, normal(5, 6, seed=4), weight)),
        "cross_entropy": (lambda x: kernels.cross_entropy(x * 1, target, overwrite=True, **INTERPRET), (x,)),
        "linear_cross_entropy": (
            lambda *t: kernels.linear_cross_entropy(*t, target, **INTERPRET), (x, normal(7, 6, grad=True)),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_it_compiles_to_one_graph_forward_and_backward(name, recording):
    function, given = calls()[name]
    backend, recorded = recording
    wanted = [tensor for tensor in given if tensor.requires_grad]
    plain = torch.autograd.grad(function(*given).square().sum(), wanted)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    found = torch.autograd.grad(compiled(*given).square().sum(), wanted)
    for mine, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert f"tilemesh.{name}_backward.default" in recorded


def test_torchs_own_check_of_operators():
    x, weight, head = normal(5, 6, grad=True), normal(6, seed=1, grad=True), normal(7, 6, grad=True)
    target, summand = torch.tensor([1, -100, 5, 0, 2]), normal(5, 6)
    given = {
        "rms_norm": (x, weight, 1e-5),
        "layer_norm": (x, weight, weight.detach(), 1e-5),
        "add_rms_norm": (x, summand, weight, 1e-5),
        "add_layer_norm": (x, summand, weight, None, 1e-5),
        "softmax": (x, 1.0, True),
        "cross_entropy": (x, target, -100, 0.1, 0.0, "mean", False),
        "linear_cross_entropy": (x, head, target, -100, 0.0, 0.0, "mean", False, True),
    }
    for name, values in given.items():
        assert callable(getattr(kernels, name))  # registers it
        opcheck(getattr(torch.ops.tilemesh, name).default, (*values, "interpret"))


def test_fake_tensors_have_the_shapes_of_results():
    with FakeTensorMode():
        x, weight, target = torch.empty(5, 6), torch.empty(6), torch.empty(5, dtype=torch.int64)
        rows = [kernels.softmax(x, **INTERPRET), kernels.rms_norm(x, weight, **INTERPRET)]
        rows += [kernels.layer_norm(x, weight, weight, **INTERPRET)]
        rows += [*kernels.add_rms_norm(x, x, weight, **INTERPRET), *kernels.add_layer_norm(x, x, weight, **INTERPRET)]
        losses = [kernels.cross_entropy(x, target, **INTERPRET)]
        losses += [kernels.linear_cross_entropy(x, torch.empty(7, 6), target, **INTERPRET)]
        assert all(isinstance(made, FakeTensor) for made in rows + losses)
        assert [made.shape for made in rows] == [x.shape] * 7
        assert [made.shape for made in losses] == [()] * 2


def test_autocast_casts_products_and_leaves_rows_as_they_are():
    x, weight, head = normal(5, 6).float(), normal(6, seed=1).float(), normal(7, 6, seed=2).float()
    target = torch.tensor([1, -100, 5, 0, 2])
    plain = [kernels.softmax(x, **INTERPRET), kernels.rms_norm(x, weight, **INTERPRET)]
    plain += [kernels.layer_norm(x, weight, weight, **INTERPRET), kernels.cross_entropy(x, target, **INTERPRET)]
    product = kernels.linear_cross_entropy(x.bfloat16(), head.bfloat16(), target, **INTERPRET)
    with torch.autocast("cpu", torch.bfloat16):
        cast = [kernels.softmax(x, **INTERPRET), kernels.rms_norm(x, weight, **INTERPRET)]
        cast += [kernels.layer_norm(x, weight, weight, **INTERPRET), kernels.cross_entropy(x, target, **INTERPRET)]
        assert torch.equal(kernels.linear_cross_entropy(x, head, target, **INTERPRET), product)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(cast, plain, strict=True))


@pytest.mark.parametrize("implementation", ["auto", "interpret"])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_sizes_of_zero(shape, implementation):
    x = torch.zeros(shape, requires_grad=True)
    for y in (kernels.softmax(x, implementation=implementation), kernels.rms_norm(x, implementation=implementation)):
        assert y.shape == shape
        y.sum().backward()


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kernels.softmax(torch.ones(())), "expected x (…, N)"),
        (lambda: kernels.softmax(torch.ones(3, 2), causal=True), "at least as many keys"),
        (lambda: kernels.rms_norm(torch.ones(3, 2), torch.ones(3)), "expected (2,)"),
        (lambda: kernels.rms_norm(torch.ones(3, 2), eps=float("nan")), "eps is nan"),
        (lambda: kernels.rms_norm(torch.ones(3, 2), eps=10**400), "eps is a whole number of 1329 bits"),
        (lambda: kernels.add_rms_norm(torch.ones(3, 2), torch.ones(2, 3)), "expected the same"),
        (lambda: kernels.add_rms_norm(torch.ones(2), torch.ones(2).half()), "a residual that can hold x"),
        (lambda: kernels.cross_entropy(torch.ones(3, 2), torch.zeros(2, dtype=torch.long)), "expected logits (…, V)"),
        (lambda: kernels.cross_entropy(torch.ones(3, 2), torch.zeros(3)), "int64 or int32"),
        (lambda: kernels.cross_entropy(torch.ones(1, 2), torch.tensor([2])), "target 2 is outside the 2 classes"),
        (lambda: kernels.cross_entropy(torch.ones(1, 2), torch.tensor([-1])), "target -1 is outside"),
        (lambda: kernels.cross_entropy(torch.ones(1, 2), torch.tensor([1]), reduction="max"), "unknown reduction"),
        (lambda: kernels.linear_cross_entropy(torch.ones(1, 2), torch.ones(5, 3), torch.tensor([1])), "weight (V, D)"),
        (lambda: kernels.linear_cross_entropy(torch.ones(1, 2), torch.ones(5, 2), torch.tensor([5])), "target 5 is"),
    ],
)
def test_bad_arguments_get_a_reason(call, words):
    with pytest.raises(UsageError) as caught:
        call()
    assert words in str(caught.value)


# ---- repeated calls --------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """How often the code of softmax's kernel module runs, forward and backward, in a context of its own."""
    ran = []
    for name in ("forward", "backward"):
        code = getattr(softmax_kernels, name)
        monkeypatch.setattr(
            softmax_kernels, name, lambda *given, name=name, code=code: ran.append(name) or code(*given)
        )
    with use(Context()):
        yield ran


def test_a_call_of_a_known_signature_is_repeated(counted):
    whole = normal(4, 40, dtype=torch.float32)

    def runs(x, **options):
        """Whether a right call ran the module's code."""
        before = len(counted)
        y = kernels.softmax(x, **options, **INTERPRET)
        assert excess(y.detach(), softmaxes.exact(x, **options), softmaxes.error_bound(x, **options)) is None
        return len(counted) > before

    assert runs(whole[:, :8].contiguous())
    for seed in range(3):
        assert not runs(normal(4, 8, seed=seed, dtype=torch.float32))  # at other addresses
    assert runs(whole[:, :8])  # other strides
    assert runs(whole[:, 1:9])  # another alignment
    assert not runs(whole[:, 5:13])  # the same again
    assert runs(whole[:, :8].contiguous(), scale=0.5)
    assert runs(whole[:, :8].contiguous(), scale=2)  # a number of another type is checked anew
    assert runs(whole[:, :8].contiguous().requires_grad_())
    with torch.no_grad():
        assert not runs(whole[:, :8].contiguous().requires_grad_())
    with use(Context()):
        assert runs(whole[:, :8].contiguous())
    with pytest.raises(UsageError, match="scale is True"):
        kernels.softmax(whole[:, :8].contiguous(), scale=True, **INTERPRET)


def test_a_backward_pass_is_repeated_too(counted):
    for seed in range(3):
        x, grad = normal(4, 8, seed=seed, grad=True), normal(4, 8, seed=seed + 9)
        (found,) = torch.autograd.grad(kernels.softmax(x, **INTERPRET), x, grad)
        torch.testing.assert_close(found, torch.autograd.grad(torch.softmax(x, -1), x, grad)[0])
    assert counted == ["forward", "backward"]
    torch.autograd.grad(kernels.softmax(x, **INTERPRET), x, normal(8, 4).t())
    assert counted == ["forward", "backward", "backward"]
    (first,) = torch.autograd.grad(kernels.softmax(x, **INTERPRET), x, grad, create_graph=True)
    assert first.requires_grad  # by the reference


def test_tensors_given_twice_are_told_apart_later():
    """The recorded call reads one tensor as both: a repeated one must not."""
    with use(Context()):
        x, residual, weight = normal(3, 8, grad=True), normal(3, 8, seed=1, grad=True), normal(8, seed=2, grad=True)
        for pair in ((x, x), (x, residual), (residual, residual)):
            found, wanted = (kernels.add_rms_norm(*pair, weight, implementation=how) for how in ("interpret", "torch"))
            torch.testing.assert_close(found, wanted)
            ups = (normal(3, 8, seed=3), normal(3, 8, seed=4))
            for results in (slice(2), slice(1), slice(1, 2)):  # one that nothing is computed from has no gradient
                leaves = list(dict.fromkeys((*pair, *([weight] if results != slice(1, 2) else []))))
                grads = [
                    torch.autograd.grad(y[results], leaves, ups[results], retain_graph=True) for y in (found, wanted)
                ]
                torch.testing.assert_close(*grads)


def test_values_are_checked_at_every_call():
    logits = normal(2, 5)
    kernels.cross_entropy(logits, torch.tensor([1, 4]), **INTERPRET)
    for implementation in ("interpret", "auto"):
        kernels.cross_entropy(logits, torch.tensor([1, 4]), implementation=implementation)
        with pytest.raises(UsageError, match="target 5 is outside"):
            kernels.cross_entropy(logits, torch.tensor([1, 5]), implementation=implementation)


def test_a_repeated_gradient_over_the_logits_is_seen_by_autograd():
    target = torch.tensor([1, -100, 5, 0])
    with use(Context()):
        for seed in range(3):
            logits = normal(4, 6, seed=seed, grad=True)
            copied = logits * 1
            loss = kernels.cross_entropy(copied, target, overwrite=True, **INTERPRET)
            (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
            torch.testing.assert_close(found, torch.autograd.grad(functional.cross_entropy(logits, target), logits)[0])
            torch.testing.assert_close(copied.detach(), found)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_what_is_saved_elsewhere_may_come_back_otherwise():
    """A hook on saved tensors can return other strides than were saved."""
    with use(Context()):
        for turn in (lambda saved: saved, lambda saved: saved.t().contiguous().t() if saved.dim() == 2 else saved):
            x, weight = normal(4, 8, grad=True), normal(8, seed=1, grad=True)
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, turn):
                found = torch.autograd.grad(kernels.rms_norm(x, weight, **INTERPRET).sum(), (x, weight))
            wanted = torch.autograd.grad(kernels.rms_norm(x, weight).sum(), (x, weight))
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("columns", [9, 20_000, 70_000])
def test_softmax_of_rows_at_the_least_number(columns: int) -> None:
    """A row that is padded everywhere: the uniform distribution, as in torch, and not NaN."""
    least = torch.finfo(torch.float32).min
    x = torch.full((2, columns), least)
    x[1, 3] = 1.0
    made = kernels.softmax(x, implementation="interpret")
    assert torch.allclose(made, torch.softmax(x, -1), rtol=1e-5, atol=0)


def test_cross_entropy_of_rows_at_the_least_number() -> None:
    logits = torch.full((2, 9), torch.finfo(torch.float32).min)
    logits[1, 3] = 1.0
    made = kernels.cross_entropy(logits, torch.tensor([0, 3]), reduction="none", implementation="interpret")
    assert torch.allclose(made, functional.cross_entropy(logits, torch.tensor([0, 3]), reduction="none"))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_logits_that_share_an_offset(smoothing: float) -> None:
    """Whole numbers beside 2^22 are exact in float32, and so is everything that is subtracted: not a bit may differ."""
    whole, target = (3 * normal(6, 40, dtype=torch.float32)).round(), torch.tensor([3, 0, -100, 39, 7, 7])
    options = {"label_smoothing": smoothing, "implementation": "interpret"}
    one, weight = torch.ones(6, 1), torch.zeros(40, 41)
    weight[:, 1:] = torch.eye(40)

    def from_logits(offset):
        logits = (whole + offset).requires_grad_()
        loss = kernels.cross_entropy(logits, target, **options)
        return loss.detach(), *torch.autograd.grad(loss, logits)

    def from_activations(offset):
        x, weight[:, 0] = torch.cat((one, whole), 1).requires_grad_(), offset
        loss = kernels.linear_cross_entropy(x, weight, target, **options)
        return loss.detach(), torch.autograd.grad(loss, x)[0][:, 1:]

    for made in (from_logits, from_activations):
        for plain, shifted in zip(made(0.0), made(2.0**22), strict=True):
            assert torch.equal(plain, shifted)
    # The stated bound is that of the logits without their offset.
    bounds = [losses.error_bound(whole + offset, target) for offset in (0.0, 2.0**22)]
    torch.testing.assert_close(*bounds, rtol=1e-6, atol=0)


def test_a_target_that_has_no_probability() -> None:
    logits, target = normal(3, 7, dtype=torch.float32), torch.tensor([2, 5, 1])
    logits[0, 2] = logits[1, 4] = -torch.inf
    for smoothing in (0.0, 0.1):
        options = {"label_smoothing": smoothing, "reduction": "none"}
        made = kernels.cross_entropy(logits, target, **options, **INTERPRET)
        torch.testing.assert_close(made, functional.cross_entropy(logits, target, **options))


def test_values_on_a_gpu_are_looked_at_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = [SimpleNamespace(device=SimpleNamespace(type="cuda"))]
    assert not looks_at_values(on_gpu)
    monkeypatch.setenv(VARIABLE, "collectives,values")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert looks_at_values(on_gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not looks_at_values(on_gpu)
    assert looks_at_values([torch.ones(1)])
