"""Grouped products: the Triton code by the interpreter, forward and both gradients, with empty and overloaded groups;
and experts computed by them, beside one expert after the other."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sampled import sampled
from triton.backends.compiler import GPUTarget

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import accumulator, excess, rounding_error, sum_error
from tilemesh.kernels.grouped_linear import plan
from tilemesh.kernels.grouped_linear.cost import FORM, cost, loads_of
from tilemesh.kernels.grouped_linear.plan import GroupedTarget
from tilemesh.kernels.grouped_linear.reference import arguments, error_bound, exact, grouped_linear
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.program import Operand, compile_step
from tilemesh.kernels.lowbit_linear import reference as lowbit
from tilemesh.kernels.lowbit_linear.grouped import grouped_lowbit_linear
from tilemesh.kernels.lowbit_linear.kernel import plan as few_bits_plan
from tilemesh.kernels.problems import SizedProblem
from tilemesh.model.config import ModelConfig
from tilemesh.model.experts import Experts
from tilemesh.model.programs.grouped_experts import compute_grouped, lay_together, stacked, why_apart
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.gate.alone import compress_all

LOADS = ([3, 0, 20, 1], [0, 0, 24], [24], [0, 17, 0, 0, 7, 0], [16, 16], [1] * 9)


def drawn(counts: list[int], outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(len(counts))
    x, upstream = (torch.randn(sum(counts), size, generator=generator).to(dtype) for size in (inputs, outputs))
    weight = torch.randn(len(counts), outputs, inputs, generator=generator).to(dtype)
    return x, weight, torch.tensor(counts).cumsum(0).int(), upstream


SIZES = [(24, 40), (16, 16), (8, 72)]  # outputs, inputs


@pytest.mark.parametrize(
    ("counts", "outputs", "inputs"),
    sampled(
        ((counts, *sizes) for counts in LOADS for sizes in SIZES),
        [(counts, *SIZES[place % 3]) for place, counts in enumerate(LOADS)],
    ),
)
def test_products_and_gradients_are_within_their_bounds(counts: list[int], outputs: int, inputs: int) -> None:
    dtype = torch.bfloat16 if outputs % 16 else torch.float16
    x, weight, ends, upstream = drawn(counts, outputs, inputs, dtype)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = grouped_linear(*leaves, ends, implementation="interpret")
    bare = [leaf.detach() for leaf in leaves]
    assert excess(y.detach(), exact(*bare, ends), error_bound(*bare, ends)) is None
    found = torch.autograd.grad(y, leaves, upstream)
    wide = [leaf.double().requires_grad_() for leaf in bare]
    wanted = torch.autograd.grad(grouped_linear(*wide, ends), wide, upstream.double())
    sizes = [leaf.abs().double().requires_grad_() for leaf in bare]
    most = torch.autograd.grad(grouped_linear(*sizes, ends), sizes, upstream.abs().double())
    for mine, true, size, terms in zip(found, wanted, most, (outputs, max(counts)), strict=True):
        bound = 1.01 * (sum_error(size, terms + 1, accumulator(dtype)) + rounding_error(true, dtype))
        assert excess(mine, true, bound) is None
    for group, count in enumerate(counts):
        assert count or not found[1][group].any(), "an idle group has a gradient of zeros"


def test_rows_of_other_groups_do_no_harm() -> None:
    """A tile at the end of a group brings some of the next group's rows and weights: what is NaN there stays there."""
    x, weight, ends, upstream = drawn([5, 6], 8, 24, torch.bfloat16)  # 24 is no multiple of the tile
    x[5:], weight[1] = torch.nan, torch.nan
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = grouped_linear(*leaves, ends, implementation="interpret")
    dx, dw = torch.autograd.grad(y, leaves, upstream)
    assert not any(part.isnan().any() for part in (y[:5], dx[:5], dw[0]))
    assert y[5:].isnan().all()


def test_ends_may_be_a_column_of_a_table() -> None:
    """Kernels read one number after the other."""
    x, weight, ends, upstream = drawn([3, 0, 9], 8, 32, torch.bfloat16)
    column, codes = torch.stack((ends, ends), 1)[:, 0], torch.ones(3, 8, 32, dtype=torch.int8)
    made = []
    for given in (ends, column):
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        y = grouped_linear(*leaves, given, implementation="interpret")
        few = grouped_lowbit_linear(x, codes, torch.ones(3, 8, 1), None, given, code="int8", implementation="interpret")
        made.append((y, few, *torch.autograd.grad(y, leaves, upstream)))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


@pytest.mark.parametrize("turned", [False, True])
def test_the_kernels_compile_for_an_h200_that_is_not_here(turned: bool) -> None:
    """For the issue's first shape: tensor cores, tiles copied by TMA, and no more shared memory than there is."""

    def place(*shape: int, dtype: str = "bfloat16") -> Place:
        strides = tuple(torch.empty(shape, device="meta").stride())
        return Place(shape, strides, dtype, True)

    wide, narrow = (4096, 14336) if turned else (14336, 4096)
    rows = {"x": place(16384, narrow), "w": place(8 * 14336, 4096), "ends": place(8, dtype="int32")}
    plans = [
        (rows | {"y": place(16384, wide)}, partial(plan.rows_plan, groups=8, turned=turned, target=GroupedTarget()))
    ]
    if turned:
        of_weights = {"grad": place(16384, 14336), "x": place(16384, 4096), "dw": place(8, 14336, 4096)}
        plans.append(
            (of_weights | {"ends": place(8, dtype="int32")}, partial(plan.weights_plan, target=GroupedTarget()))
        )
    for places, make in plans:
        operands = {name: Operand(where.dtype) for name, where in places.items()}
        for step in make(places).steps:
            compiled = compile_step(step, operands, GPUTarget("cuda", 90, 32))
            assert "wgmma.mma_async" in compiled.asm["ptx"]
            assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
            assert compiled.metadata.shared <= 232_448


def test_loads_are_all_rows_and_costs_follow_them() -> None:
    for rows, groups in ((16384, 8), (100, 7), (3, 5)):
        for load in ("even", "skewed"):
            counts = loads_of(rows, groups, load)
            assert (sum(counts), len(counts)) == (rows, groups)
    assert loads_of(16, 8, "skewed") == [8, 4, 2, 1, 1, 0, 0, 0]
    both, forward = (cost(100, 16, 24, 4, passes=passes) for passes in ("both", "forward"))
    assert both.flops == 3 * forward.flops == 3 * 2 * 100 * 16 * 24
    few = cost(100, 16, 24, 4, used=1, passes="both")  # nobody reads a matrix without rows; all have a gradient
    assert (both.bytes_read - few.bytes_read, few.bytes_written) == (2 * 3 * 2 * 16 * 24, both.bytes_written)
    problem = SizedProblem((64, 8, 16, 4), "bfloat16", {"load": "skewed", "passes": "forward"})
    x, weight, ends = arguments(problem, torch.device("cpu"), 0)
    assert (x.shape, weight.shape, ends.tolist()) == ((64, 16), (4, 8, 16), [32, 48, 56, 64])
    assert FORM.cost(problem).flops == 2 * 64 * 8 * 16


@pytest.mark.parametrize(
    ("ends", "words"),
    [([1, 3, 2], "numbers that do not fall, up to 4 rows"), ([1, 2, 3], "up to 4 rows"), ([1, 4], r"of shape \(3,\)")],
)
def test_ends_that_are_none_are_refused(ends: list[int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        grouped_linear(torch.ones(4, 8), torch.ones(3, 8, 8), torch.tensor(ends, dtype=torch.int32))


# ---- experts by grouped products -------------------------------------------------------------------------------------


def experts_of(activation: str, dtype: torch.dtype) -> Experts:
    config = ModelConfig(
        layers=1, width=16, heads=2, vocabulary=8, context=8, mlp_width=24, activation=activation,  # type: ignore[arg-type]
        biases=False, experts=5, experts_per_token=2,
    )  # fmt: skip
    block = Transformer(config, seed=1, dtype=dtype).layers[0].mlp
    assert isinstance(block, Experts)
    return block


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu"])
@pytest.mark.parametrize("counts", [[4, 0, 9, 1, 0], [0, 0, 0, 0, 14]], ids=str)
def test_experts_by_grouped_products_are_the_definition(activation: str, counts: list[int]) -> None:
    block = experts_of(activation, torch.float64)
    assert why_apart(block) == ""
    rows = torch.randn(14, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    leaves = [rows, *(value for name, value in block.named_parameters() if ".fc_" in name)]
    plain, grouped = block.compute(rows, torch.tensor(counts)), compute_grouped(block, rows, torch.tensor(counts))
    torch.testing.assert_close(grouped, plain, rtol=1e-13, atol=1e-15)
    upstream = torch.randn(14, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for mine, wanted in zip(*(torch.autograd.grad(y, leaves, upstream) for y in (grouped, plain)), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-16)


def test_experts_by_the_kernels_in_16_bits() -> None:
    block, counts = experts_of("swiglu", torch.bfloat16), torch.tensor([4, 0, 9, 1, 0])
    rows = torch.randn(14, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    block.compute_by(partial(compute_grouped, block, implementation="interpret"))
    wide = experts_of("swiglu", torch.float64)
    wide.load_state_dict(block.state_dict())
    exact_ND = wide.compute(rows.double(), counts)
    off = (block.compute(rows, counts).double() - exact_ND).norm() / exact_ND.norm()
    assert off < 4 * torch.finfo(torch.bfloat16).eps  # three roundings on the way


@pytest.mark.parametrize("counts", [[3, 0, 20, 1], [0, 0, 24], [24], [0, 40, 0, 0, 7, 0]], ids=str)
@pytest.mark.parametrize(("code", "with_zeros"), [("int4", False), ("int4", True), ("int8", False)])
def test_grouped_products_of_few_bits(counts: list[int], code: str, with_zeros: bool) -> None:
    """Of each group what `lowbit_linear` gives; the reference of that is another's test."""
    groups, outputs, inputs, generator = len(counts), 40, 64, torch.Generator().manual_seed(5)
    x = torch.randn(sum(counts), inputs, generator=generator).bfloat16()
    width, low, high = (inputs // 2, 0, 256) if code == "int4" else (inputs, -128, 128)
    codes = torch.randint(low, high, (groups, outputs, width), generator=generator)
    codes = codes.to(torch.uint8 if code == "int4" else torch.int8)
    scales = torch.rand(groups, outputs, 2, generator=generator)
    zeros = torch.randint(-3, 4, scales.shape, generator=generator).to(torch.int8) if with_zeros else None
    ends = torch.tensor(counts).cumsum(0).int()
    found = grouped_lowbit_linear(x, codes, scales, zeros, ends, code=code, implementation="interpret")
    begin = 0
    for group, end in enumerate(ends.tolist()):
        zero = None if zeros is None else zeros[group]
        given = (x[begin:end], codes[group], scales[group], zero, code)
        assert excess(found[begin:end], lowbit.exact(*given), lowbit.error_bound(*given)) is None
        begin = end


@pytest.mark.parametrize("rows", [pytest.param(16, marks=pytest.mark.slow), 128])
def test_products_of_few_bits_compile_for_an_h200_that_is_not_here(rows: int) -> None:
    shapes = {"x": (rows, 4096), "w": (8 * 1024, 2048), "scales": (8 * 1024, 32), "ends": (8,), "y": (rows, 1024)}
    dtypes = {"w": "uint8", "scales": "float32", "ends": "int32"}
    places = {
        name: Place(shape, tuple(torch.empty(shape, device="meta").stride()), dtypes.get(name, "bfloat16"), True)
        for name, shape in shapes.items()
    }
    (step,) = few_bits_plan(places, code="int4").steps
    operands = {name: Operand(place.dtype) for name, place in places.items()}
    compiled = compile_step(step, operands, GPUTarget("cuda", 90, 32))
    assert "mma" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 232_448


@pytest.mark.parametrize("scheme", ["int4-g32", "int8"])
def test_experts_of_few_bits_are_computed_together(scheme: str) -> None:
    config = ModelConfig(
        layers=1, width=32, heads=2, vocabulary=8, context=8, mlp_width=64, activation="swiglu", biases=False, experts=5
    )  # fmt: skip
    model = Transformer(config, seed=1, dtype=torch.bfloat16)
    compress_all(model, scheme)
    block, counts = model.layers[0].mlp, torch.tensor([4, 0, 9, 1, 0])
    assert isinstance(block, Experts)
    assert why_apart(block) == ""
    rows = torch.randn(14, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    plain = block.compute(rows, counts)
    lay_together(block)
    codes = [mlp.fc_in.codes for mlp in block.experts]  # type: ignore[union-attr]
    assert stacked(codes).data_ptr() == codes[0].data_ptr()
    found = compute_grouped(block, rows, counts, implementation="interpret")
    assert (found.double() - plain.double()).norm() < 4 * torch.finfo(torch.bfloat16).eps * plain.double().norm()


def test_a_model_that_serves_gets_its_matrices_side_by_side() -> None:
    block, counts = experts_of("swiglu", torch.float64), torch.tensor([4, 0, 9, 1, 0])
    rows = torch.randn(14, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    before, names = block.compute(rows, counts), [name for name, _ in block.named_parameters()]
    assert block.waits_for_loads
    lay_together(block)
    weights = [mlp.fc_in.weight for mlp in block.experts]  # type: ignore[union-attr]
    assert stacked(weights).data_ptr() == weights[0].data_ptr()
    lay_together(block)
    assert stacked(weights).data_ptr() == weights[0].data_ptr(), "nothing moves where they lie so already"
    assert [name for name, _ in block.named_parameters()] == names
    block.compute_by(partial(compute_grouped, block))
    assert not block.waits_for_loads
    torch.testing.assert_close(block.compute(rows, counts), before, rtol=1e-13, atol=1e-15)


def test_matrices_side_by_side_are_not_copied() -> None:
    together = torch.randn(3, 4, 5)
    views = [torch.nn.Parameter(part) for part in together.unbind()]
    assert stacked(views).data_ptr() == together.data_ptr()
    assert torch.equal(stacked(views), together)
    apart = [torch.nn.Parameter(part.clone()) for part in together]
    assert torch.equal(stacked(apart), together)
    assert torch.equal(stacked(views[::-1]), together.flip(0))
