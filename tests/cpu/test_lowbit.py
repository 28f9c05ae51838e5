"""Quantise, dequantise, pack; the CPU's integer products; compressed projections in a model."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from triton.backends.compiler import GPUTarget

from tilemesh.comm import run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.program import Operand, compile_step
from tilemesh.kernels.launch.steps import FitError
from tilemesh.kernels.lowbit import codes, cpu
from tilemesh.kernels.lowbit.formats import FORMATS, SECOND_LEVEL, Scheme, parse_scheme
from tilemesh.kernels.scaled_matmul import kernel as scaled_kernel
from tilemesh.kernels.scaled_matmul import reference as scaled
from tilemesh.model import kinds, linear
from tilemesh.model.config import preset
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.apply import lay
from tilemesh.parallel.gate.alone import compress_all
from tilemesh.parallel.gate.cases import Case, compressed
from tilemesh.parallel.gate.compare import Gate
from tilemesh.parallel.mesh import Mesh

WHOLE = ("int8", "int4", "int3", "int2")
SCHEMES = ("int8", "int8-tensor", "int4-g16", "int4-g16-affine", "int3", "int3-g16-affine", "int2-g16", "fp8",
           "fp8-e5m2", "nf4-g16", "fixed16", "int4-g16-2level")  # fmt: skip


def matrix(seed: int, rows: int = 5, columns: int = 48, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from(WHOLE), st.booleans(), st.sampled_from(["channel", "tensor", "group"]))
def test_no_value_is_off_by_more_than_half_a_step(seed, name, symmetric, granularity):
    scheme = Scheme(name, granularity, 16 if granularity == "group" else 0, symmetric)
    weight = matrix(seed, spread=10.0 ** (seed % 7 - 3))
    made = codes.quantize(weight, scheme)
    back = codes.decode(made.codes, scheme, made.scales, made.zeros, torch.float64)
    step = made.scales.double().expand(len(weight) if granularity != "tensor" else 1, -1)
    step = step.repeat_interleave(weight.shape[1] // step.shape[1], 1)
    # A zero point is rounded itself, which moves the ends of the range by up to half a step more.
    most = 0.5 if symmetric else 1.0
    rounding = 4 * 2.0**-24 * weight.double().abs().max()  # of the scale and of the quotient, in float32
    assert ((back - weight.double()).abs() <= most * step + rounding).all()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from(sorted(FORMATS)), st.integers(1, 40), st.integers(1, 6))
def test_packing_comes_back(seed, name, columns, rows):
    number = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    if number.kind in ("int", "fixed"):
        kind = torch.int16 if number.bits > 8 else torch.int8
        made = torch.randint(int(number.low), int(number.high) + 1, (rows, columns), generator=generator).to(kind)
    else:
        made = torch.randint(0, 1 << number.bits, (rows, columns), generator=generator).to(torch.uint8)
    packed = codes.pack(made, number)
    assert torch.equal(codes.unpack(packed, number, columns), made)
    if number.bits < 8:
        assert packed.shape == (rows, -(-columns * number.bits // 8))


def test_codes_of_four_bits_lie_as_compressed_tensors_has_them():
    made = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, 4]], dtype=torch.int8)
    (word,) = codes.pack(made, FORMATS["int4"]).view(torch.int32).flatten().tolist()
    assert word & 0xFFFFFFFF == sum((value + 8) << (4 * place) for place, value in enumerate(made[0].tolist()))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000))
def test_what_is_on_the_grid_stays(seed):
    """Quantising what came back gives the same codes: nothing drifts. (Two-level scales are themselves rounded.)"""
    for name in ("int4-g16", "fp8", "nf4-g16", "fixed16"):
        scheme, weight = parse_scheme(name), matrix(seed)
        made = codes.quantize(weight, scheme)
        back = codes.decode(made.codes, scheme, made.scales, made.zeros, torch.float32)
        assert torch.equal(codes.encode(back, scheme, made.scales, made.zeros), made.codes)


def test_two_levels_are_whole_parts_of_a_rows_scale():
    made = codes.quantize(matrix(3), parse_scheme("int4-g16-2level"))
    parts = made.scales / codes.row_steps(made.scales)
    assert torch.allclose(parts, parts.round(), atol=1e-3)
    assert parts.max() <= SECOND_LEVEL + 1e-3
    plain = codes.quantize(matrix(3), parse_scheme("int4-g16"))
    assert (made.scales >= plain.scales * (1 - 1e-3)).all()  # rounded up: no value is cut off


def test_fixed_point_scales_are_powers_of_two():
    exponents = codes.quantize(matrix(4), Scheme("fixed16")).scales.log2()
    assert torch.equal(exponents, exponents.round())


def test_nf4_takes_the_nearest_of_its_values():
    scheme, weight = parse_scheme("nf4-g16"), matrix(5)
    made = codes.quantize(weight, scheme)
    table = torch.tensor(FORMATS["nf4"].table)
    scaled = codes.by_group(weight, 3) / made.scales[..., None]
    distance = (scaled[..., None] - table).abs()
    chosen = distance.gather(-1, codes.by_group(made.codes, 3).long()[..., None])[..., 0]
    assert (chosen <= distance.amin(-1) + 1e-6).all()


needs_c = pytest.mark.skipif(cpu.library() is None, reason="no C compiler, or not Linux")


@needs_c
@pytest.mark.parametrize("name", ["int8", "int8-tensor", "int8-g16-affine", "int4-g16", "int4-g48-affine", "int4"])
@pytest.mark.parametrize("outputs", [1, 3, 4, 9])
@pytest.mark.parametrize("rows", [1, 4])
def test_integer_products_are_right_to_the_activations_rounding(name, outputs, rows):
    scheme, weight, x = parse_scheme(name), matrix(7, outputs), matrix(8, rows)
    made = codes.quantize(weight, scheme)
    exact = x.double() @ codes.decode(made.codes, scheme, made.scales, made.zeros, torch.float64).t()
    packed = codes.pack(made.codes, scheme.number)
    for x_scales, steps in ((None, 127 * 128), (codes.find_scales(x, Scheme("int8"))[0], 127.5)):
        assert cpu.serves(x, scheme, 48, made.scales.shape[1])
        bias = torch.arange(float(outputs))
        y = cpu.product(x, packed, scheme, made.scales, made.zeros, bias, x_scales) - bias
        weights = codes.decode(made.codes, scheme, made.scales, made.zeros, torch.float64).abs().sum(1)
        bound = 0.5 / steps * x.double().abs().amax(1)[:, None] * weights + 1e-5 * (1 + exact.abs())
        assert ((y.double() - exact).abs() <= bound).all()


@needs_c
@pytest.mark.parametrize(
    ("outputs", "rows", "name"), [(9, 1, "fixed16"), (3, 2, "fixed16-g16"), (8, 5, "fixed16-tensor")]
)
def test_products_of_fixed_point_are_exact_but_for_the_activations(outputs, rows, name):
    """Activations on the grid of their power of two give the product of what the codes mean, to float32's rounding."""
    scheme, weight = parse_scheme(name), matrix(3, outputs)
    made = codes.quantize(weight, scheme)
    x = torch.randint(-20000, 20001, (rows, 48), generator=torch.Generator().manual_seed(2)).float() * 2.0**-14
    bias, back = torch.randn(outputs), codes.decode(made.codes, scheme, made.scales, None, torch.float64)
    assert cpu.serves(x, scheme, 48, made.scales.shape[1])
    y = cpu.product(x, made.codes, scheme, made.scales, None, bias)
    torch.testing.assert_close(y.double(), x.double() @ back.T + bias.double(), rtol=1e-6, atol=1e-6)


@needs_c
@pytest.mark.parametrize("name", sorted(cpu.FEW_ROWS))
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_so(name, value):
    scheme = Scheme(name)
    made = codes.quantize(matrix(1), scheme)
    x = torch.ones(3, 48)
    x[1, 17] = value
    y = cpu.product(x, codes.pack(made.codes, scheme.number), scheme, made.scales, None, None)
    assert not y[1].isfinite().any()
    assert y[[0, 2]].isfinite().all()


@needs_c
def test_integer_products_take_zeros_and_refuse_what_they_do_not_serve():
    scheme = Scheme("int8")
    made = codes.quantize(matrix(1), scheme)
    assert cpu.product(torch.zeros(1, 48), made.codes, scheme, made.scales, None, None).abs().sum() == 0
    assert not cpu.serves(torch.zeros(1, 48, dtype=torch.float64), scheme, 48, 1)
    assert not cpu.serves(torch.zeros(4096, 48), scheme, 48, 1)
    assert not cpu.serves(torch.zeros(1, 48, requires_grad=True), scheme, 48, 1)


@needs_c
@pytest.mark.parametrize("name", ["int8", "fixed16"])
def test_a_compiled_or_transformed_projection_is_torchs_operators(name):
    """Without calls on addresses of tensors that a graph no longer holds, or behind which a derivative is lost."""
    plain, scheme = nn.Linear(48, 12).requires_grad_(False), parse_scheme(name)
    low = kinds.few_bits(plain, scheme, codes.quantize(plain.weight, scheme))
    x = torch.randn(3, 48)
    compiled = torch.compile(low, backend="eager", fullgraph=True)
    weight = low.kind.decoded(low, x.dtype)
    torch.testing.assert_close(compiled(x), nn.functional.linear(x, weight, plain.bias))
    torch.testing.assert_close(torch.func.vmap(low)(x), nn.functional.linear(x, weight, plain.bias))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(low(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    torch.testing.assert_close(tangent, weight.sum(1).expand(3, -1))


@pytest.mark.parametrize("name", SCHEMES)
def test_a_low_bit_projection_computes_with_the_weight_that_its_codes_mean(name):
    torch.manual_seed(0)
    plain, scheme = nn.Linear(48, 12).double(), parse_scheme(name)
    made = codes.quantize(plain.weight, scheme)
    low = kinds.few_bits(plain, scheme, made)
    x = torch.randn(3, 48, dtype=torch.float64, requires_grad=True)
    weight = codes.decode(made.codes, scheme, made.scales, made.zeros, torch.float64)
    torch.testing.assert_close(low(x), nn.functional.linear(x, weight, plain.bias))
    low(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1))
    assert low.weight.shape == (12, 48)
    kinds.open_codes(low)
    torch.testing.assert_close(low(x), nn.functional.linear(x, weight, plain.bias))
    low.to(torch.bfloat16)
    assert low.scales.dtype == torch.float32  # every weight is multiplied by one of them


@pytest.mark.parametrize(("name", "sizes"), [("int8", (5, 70, 48)), ("fp8", (5, 70, 48)), ("int8", (130, 16, 160))])
def test_products_of_8_bit_codes_have_their_scales(name, sizes):
    rows, outputs, inputs = sizes
    x, weight = (codes.quantize(matrix(seed, count, inputs), Scheme(name)) for seed, count in ((1, rows), (2, outputs)))
    given = (x.codes, weight.codes, x.scales, weight.scales)
    for dtype in ("float32", "bfloat16"):
        want, bound = scaled.exact(*given, code=name), scaled.error_bound(*given, code=name, dtype=dtype)
        for how in ("interpret", "torch"):
            found = scaled.scaled_matmul(*given, code=name, dtype=dtype, implementation=how)
            assert excess(found, want, bound) is None
        assert excess(found.roll(1, 0), want, bound) is not None
    one = (x.codes, weight.codes, x.scales[:1], weight.scales[:1])
    found = scaled.scaled_matmul(*one, code=name, implementation="interpret")
    assert excess(found, scaled.exact(*one, code=name), scaled.error_bound(*one, code=name)) is None
    with pytest.raises(UsageError, match="x_scales"):
        scaled.scaled_matmul(*given[:2], x.scales[:2], weight.scales, code=name)


@pytest.mark.parametrize("name", ["int8", "int8-tensor", "fp8"])
@pytest.mark.parametrize("static", [False, True])
def test_a_projection_of_codes_by_codes_is_one_of_rounded_activations(name, static):
    torch.manual_seed(1)
    plain, scheme, x = nn.Linear(48, 12, bias=False), parse_scheme(name), torch.randn(2, 3, 48)
    scale = x.abs().max().reshape(1) / 120 if static else None
    inputs = Scheme(scheme.format)
    low = kinds.few_bits(plain, scheme, codes.quantize(plain.weight, scheme), inputs, scale)
    assert low.kind.has_codes_of_both(low)
    want = nn.functional.linear(low.kind.quantized(low, x), low.weight)
    torch.testing.assert_close(low.kind.product_of_codes(low, x), want, rtol=1e-4, atol=1e-5)


def test_the_tile_of_every_product_of_8_bit_codes_fits_its_gpu():
    """Three widths of shared memory: data-centre GPUs from Hopper on, an A100's, consumer GPUs'."""
    # The figure that an H200 refused, and what it takes at 16 bits.
    assert scaled_kernel.bytes_of_tile((128, 256, 128, 8, 4), "float32") == 327712
    assert scaled_kernel.bytes_of_tile((128, 256, 128, 8, 4), "bfloat16") == 229408
    best = {"float32": (128, 128, 128, 8, 4), "bfloat16": (128, 256, 128, 8, 4), "float16": (128, 256, 128, 8, 4)}
    for dtype, rows, outputs in itertools.product(
        best, (1, 17, 64, 65, 200, 1024, 4096, 512 * 1024), (16, 768, 2304, 3072, 8192, 50257)
    ):
        for limit in (227 << 10, 163 << 10, 99 << 10):
            tile = scaled_kernel.tile_of(rows, outputs, dtype, limit)
            assert scaled_kernel.bytes_of_tile(tile, dtype) <= limit
        if rows * outputs > 2048 * 2048 and rows > 64:  # what was measured to be the best is taken where it fits
            assert scaled_kernel.tile_of(rows, outputs, dtype, 227 << 10) == best[dtype]
    with pytest.raises(FitError, match="this GPU has 48000"):
        scaled_kernel.tile_of(1, 16, "float32", 48000)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_product_of_8_bit_codes_that_fits_no_kernel_is_computed_by_the_reference(name):
    def refuses(*arguments, **named):
        raise FitError("kernel scaled_product: shared memory 327712, this GPU has 232448")

    x, weight = (codes.quantize(matrix(seed, 6, 48), Scheme(name)) for seed in (1, 2))
    given = (x.codes, weight.codes, x.scales, weight.scales)
    found = scaled_kernel.forward(refuses, *given, name, "float32")
    torch.testing.assert_close(found, scaled.scaled_matmul(*given, code=name, dtype="float32", implementation="torch"))


@pytest.mark.parametrize(
    ("dtype", "result"), [("int8", "bfloat16"), ("float8_e4m3fn", "bfloat16"), ("int8", "float32")]
)
def test_the_product_of_8_bit_codes_compiles_for_an_h200(dtype, result):
    def place(kind, *shape):
        return Place(shape, torch.empty(shape, device="meta").stride(), kind, aligned=True)

    places = {"x": place(dtype, 4096, 4096), "w": place(dtype, 4096, 4096), "y": place(result, 4096, 4096)}
    places |= {"x_scales": place("float32", 4096, 1), "scales": place("float32", 4096, 1)}
    (step,) = scaled_kernel.plan(places, multiprocessors=132).steps
    made = compile_step(step, {name: Operand(one.dtype) for name, one in places.items()}, GPUTarget("cuda", 90, 32))
    assert "wgmma" in made.asm["ptx"]
    tile = scaled_kernel.tile_of(4096, 4096, result, scaled_kernel.HOPPER_SHARED_BYTES)
    assert made.metadata.shared <= scaled_kernel.bytes_of_tile(tile, result) <= 227 << 10


def test_the_bytes_of_a_tile_are_what_triton_takes():
    def place(kind, *shape):
        return Place(shape, torch.empty(shape, device="meta").stride(), kind, aligned=True)

    for tile, result in (((128, 256, 128, 8, 4), "float32"), ((128, 128, 128, 8, 3), "bfloat16")):
        places = {"x": place("int8", 4096, 768), "w": place("int8", 3072, 768), "y": place(result, 4096, 3072)}
        places |= {"x_scales": place("float32", 4096, 1), "scales": place("float32", 3072, 1)}
        (step,) = scaled_kernel.plan(places, multiprocessors=132, tile=tile).steps
        made = compile_step(step, {name: Operand(one.dtype) for name, one in places.items()}, GPUTarget("cuda", 90, 32))
        assert made.metadata.shared == scaled_kernel.bytes_of_tile(tile, result)


def test_a_pass_does_not_decode_the_output_projection_to_see_its_size(monkeypatch):
    """On an H200 that took 6 ms in every step of an 8 B model."""
    model = Transformer(preset("tiny").replace(tied=False), seed=1).eval().requires_grad_(False)
    scheme = parse_scheme("int8")
    assert model.output is not None
    kinds.put(model, "output", kinds.few_bits(model.output, scheme, codes.quantize(model.output.weight, scheme)))
    want = model.output.weight.mT

    def asked(self):
        raise AssertionError("the weight was decoded")

    monkeypatch.setattr(linear.CodedLinear, "weight", property(asked))
    torch.testing.assert_close(model.project(torch.eye(model.config.width)), want, rtol=1e-3, atol=1e-4)


def test_rounding_while_training_passes_gradients_straight_through():
    plain = nn.Linear(32, 4)
    rounding = linear.as_kind(plain, kinds.Rounded(scheme=parse_scheme("int4-g16")))
    x = torch.randn(5, 32)
    y = rounding(x)
    torch.testing.assert_close(
        y, nn.functional.linear(x, codes.rounded(plain.weight, parse_scheme("int4-g16")), plain.bias)
    )
    y.sum().backward()
    torch.testing.assert_close(plain.weight.grad, x.sum(0).expand(4, -1))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_an_expert_without_tokens_rounds_none(name):
    """Activations that are rounded while training, and those of codes."""
    plain, none, inputs = nn.Linear(32, 4), torch.empty(0, 32, requires_grad=True), parse_scheme(name)
    few = kinds.few_bits(plain, parse_scheme("int4"), codes.quantize(plain.weight, parse_scheme("int4")), inputs)
    for projection in (linear.as_kind(plain, kinds.Rounded(scheme=parse_scheme("int8"), inputs=inputs)), few):
        y = projection(none)
        assert y.shape == (0, 4)
        y.sum().backward()


def test_masks_keep_the_largest():
    score = torch.arange(24.0).view(3, 8)
    kept = kinds.magnitude_mask(score, 0.5)
    assert torch.equal(kept, score >= 12)
    kept = kinds.magnitude_mask(score, 0.5, (2, 4))
    assert (kept.view(3, 2, 4).sum(-1) == 2).all()
    assert kept[0].tolist() == [False, False, True, True] * 2
    assert kinds.magnitude_mask(torch.zeros(4, 4), 0.25).sum() == 12  # ties do not take more


def test_a_model_with_low_bit_projections_still_generates():
    model = Transformer(preset("tiny"), seed=1).eval().requires_grad_(False)
    tokens = torch.randint(0, 256, (1, 12))
    before, bytes_before = model(tokens), kinds.model_bytes(model)
    compress_all(model, "int8")
    assert (model(tokens) - before).norm() < 0.05 * before.norm()
    assert kinds.model_bytes(model) < 0.4 * bytes_before
    assert len(kinds.compressed(model)) == 4 * 7


@pytest.mark.parametrize(
    ("ranks", "places"),
    [
        (1, slice(None)),
        (2, slice(2, None, 3)),  # ZeRO-3, sequences and stages, rounded and with adapters
        pytest.param(2, slice(None), marks=pytest.mark.slow),
        (4, slice(None)),
    ],
    ids=["1", "2 a sample", "2", "4"],
)
def test_the_gate_passes_compressed_models(ranks, places):
    """Codes and rounded weights over dp, tp, sequences, ZeRO and recomputation: what one process computes."""
    models = ("gpt", "llama", "gemma")
    cases = [Case(models[place % 3], layout, weights) for place, (layout, weights) in enumerate(compressed(ranks))]
    chosen = cases[places]
    results = run_threads(ranks, lambda comm: list(Gate(comm).run(chosen)), timeout_s=100)[0]
    assert len(results) == len(chosen)
    for result in results:
        assert result.passed, f"{result.case} {result.apart} {result.where}"


def test_ranks_that_would_share_a_group_of_inputs_say_so():
    plan = ParallelPlan(tp=2, precision="fp32")

    def main(comm):
        model = Transformer(preset("tiny"))
        compress_all(model, "rounded int4-g128")
        with pytest.raises(UsageError, match="groups of 128 do not divide the 64 inputs of a rank"):
            lay(model, Mesh(comm, **plan.axes), plan)

    run_threads(2, main)


ROWS = (1, 4, 5, 16, 17, 200)
"""Of activations: products of few rows are computed by `cpu.c`, of more by torch."""


def compressed_tensors_codes(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of activations and their scales as compressed-tensors defines them for 8 bits, symmetric, per token."""
    scale = x.abs().amax(-1, keepdim=True) / (255 / 2) if scale is None else scale
    return torch.clamp(torch.round(x / scale), -128, 127), scale


def activations(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of many sizes; one has every tie and both ends of the range."""
    x = matrix(3, 200, columns, 20.0)
    x[3] = torch.linspace(-127.5, 127.5, 256)[:: 256 // columns][:columns].round(decimals=0) + 0.5
    x[3, 0], x[3, 1] = -127.5, 127.5
    return x.to(dtype)


@pytest.mark.parametrize("is_static", [False, True], ids=["per token", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_have_the_same_codes_for_any_number_of_rows(is_static, dtype):
    """The identity as a weight shows codes and scales themselves: each result is a code times its scale."""
    x = activations(64, dtype)
    static = torch.tensor([[0.125]]) if is_static else None
    eye = codes.Quantized(torch.eye(64, dtype=torch.int8), torch.ones(64, 1), None)
    layer = kinds.few_bits(nn.Linear(64, 64, bias=False), Scheme(), eye, Scheme(), static)
    theirs, scale = compressed_tensors_codes(x.float(), static)
    assert theirs.min() == -128
    assert theirs.max() == 127
    for rows in ROWS:
        found = torch.cat([layer(part) for part in x.split(rows)])
        assert torch.equal(found, (theirs * scale).to(dtype)), rows


@pytest.mark.parametrize("name", ["int8", "int8-tensor", "int8-g32", "int4-g32", "int4-g32-affine"])
@pytest.mark.parametrize("is_static", [False, True], ids=["per token", "static"])
def test_products_of_codes_are_one_arithmetic_for_any_number_of_rows(name, is_static):
    """Against the codes' own product in float64: 1e-6 of the sum of magnitudes, whichever way it is computed."""
    x, scheme = activations(128, torch.float32), parse_scheme(name)
    made = codes.quantize(matrix(5, 24, 128), scheme)
    static = torch.tensor([[0.25]]) if is_static else None
    layer = kinds.few_bits(nn.Linear(128, 24, bias=False), scheme, made, Scheme(), static)
    theirs, scale = compressed_tensors_codes(x, static)
    back = theirs.double() * scale.double()
    weight = codes.decode(made.codes, scheme, made.scales, made.zeros, torch.float64)
    # With a zero point codes and zero points are multiplied apart.
    sizes = weight.abs() if made.zeros is None else weight.abs() + 16 * made.scales.double().repeat_interleave(32, 1)
    for rows in ROWS:
        found = torch.cat([layer(part) for part in x.split(rows)])
        assert ((found.double() - back @ weight.T).abs() <= 1e-6 * (back.abs() @ sizes.T)).all(), rows
