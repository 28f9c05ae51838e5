"""Few-bit products on a GPU: codes of 4 bits times a few tokens, products of 8-bit codes, keys and values in 8 bits."""

from __future__ import annotations

import pytest
import torch

from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.launch import call
from tilemesh.kernels.lowbit.codes import pack, quantize
from tilemesh.kernels.lowbit.formats import FORMATS, Scheme
from tilemesh.kernels.lowbit_linear import some_rows, tokens
from tilemesh.kernels.lowbit_linear.reference import (
    error_bound,
    exact,
    lowbit_linear,
    norm_lowbit_linear,
    norm_row,
)
from tilemesh.kernels.paged_attention import reference as paged
from tilemesh.kernels.paged_attention.codes import CODES, put_pages
from tilemesh.kernels.problems import SizedProblem
from tilemesh.kernels.scaled_matmul import reference as scaled

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = needs_gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("count", "outputs", "inputs", "group", "symmetric"),
    [
        (1, 512, 1024, 128, True), (1, 1000, 1152, 128, False), (1, 16, 128, 128, True), (1, 28672, 1024, 256, False),
        (1, 9, 1024, 128, True), (1, 64, 24576, 128, True), (3, 1000, 1152, 128, False), (16, 8192, 1024, 256, True),
        (40, 200, 2048, 2048, False), (12, 20, 1024, 128, True), (5, 9, 1024, 128, False),
    ],
)  # fmt: skip
def test_codes_of_4_bits_times_a_few_tokens(dtype, count, outputs, inputs, group, symmetric):
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator, device="cuda")
    made = quantize(weight, Scheme("int4", "group", group, symmetric))
    x = torch.randn(count, inputs, generator=generator, device="cuda").to(dtype)
    given = (x, pack(made.codes, FORMATS["int4"]), made.scales.contiguous(), made.zeros)
    assert tokens.serves(x, made.scales, "int4") == (torch.cuda.get_device_capability()[0] >= 8)
    found = lowbit_linear(*given)
    assert excess(found, exact(*given), error_bound(*given)) is None
    assert torch.equal(found, lowbit_linear(*given))


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("gate", ["none", "silu"])
@pytest.mark.parametrize(
    ("dtype", "outputs", "inputs", "group", "symmetric"),
    [
        (torch.bfloat16, 6144, 4096, 128, True), (torch.bfloat16, 28672, 4096, 128, True),
        (torch.float16, 1000, 1152, 128, False), (torch.bfloat16, 4096, 14336, 256, True),
        (torch.float16, 40, 256, 256, True), (torch.bfloat16, 14, 256, 128, True),
    ],
)  # fmt: skip
def test_one_token_has_the_norm_before_and_the_gate_after_the_product_inside(
    dtype, outputs, inputs, group, symmetric, gate, settled
):
    generator = torch.Generator("cuda").manual_seed(1)
    x, branch = (torch.randn(1, inputs, generator=generator, device="cuda").to(dtype) for _ in range(2))
    gain = torch.rand(inputs, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator, device="cuda") / 50
    made = quantize(weight, Scheme("int4", "group", group, symmetric))
    codes = (pack(made.codes, FORMATS["int4"]), made.scales.contiguous(), made.zeros)
    row = norm_row(x, branch, gain, 1e-5)
    want, bound = exact(row, *codes, gate=gate), error_bound(row, *codes, gate=gate, dtype=dtype, roundings=3)
    with torch.inference_mode():
        for _ in range(3):  # a product behind itself is launched before the one ahead has ended
            found = lowbit_linear(x, *codes, gate=gate, settled=settled)
            normed, total = norm_lowbit_linear(x, branch, gain, *codes, eps=1e-5, gate=gate, settled=settled)
    assert excess(found, exact(x, *codes, gate=gate), error_bound(x, *codes, gate=gate)) is None
    assert torch.equal(total, x + branch)
    assert excess(normed, want, bound) is None
    assert excess(normed.flip(1), want, bound) is not None


def test_a_chain_of_products_launched_early_reads_what_the_one_before_wrote():
    """Each is one token of the product before; as one graph, and one by one with waits between."""
    weights = [torch.randn(4096, 4096, device="cuda") / 64 for _ in range(4)]
    all_codes = []
    for weight in weights:
        made = quantize(weight, Scheme("int4", "group", 128))
        all_codes.append((pack(made.codes, FORMATS["int4"]), made.scales.contiguous()))
    first, gain = torch.randn(1, 4096, device="cuda").bfloat16(), torch.ones(4096, device="cuda").bfloat16()

    def chain(wait):
        x, y = first, torch.zeros_like(first)
        for codes in all_codes * 8:
            y, x = norm_lowbit_linear(x, y, gain, *codes, settled=True)
            if wait:
                torch.cuda.synchronize()
            y = lowbit_linear(y, *codes, settled=True)
        return x + y

    with torch.inference_mode():
        want = chain(True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain(False)
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    ("count", "outputs", "inputs", "group", "form"),
    [
        (20, 1000, 1024, 128, some_rows._form(20)),
        (64, 512, 2048, 256, some_rows._form(64)),
        (120, 384, 1024, 1024, some_rows._form(120)),
        (200, 384, 1024, 512, some_rows._form(200)),
        (200, 384, 1024, 1024, some_rows.SomeRows(128, 128, 8, 3, 1)),
    ],
)
def test_codes_of_4_bits_times_some_rows(count, outputs, inputs, group, form):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("tiles that fit into the shared memory of Hopper")
    made = quantize(torch.randn(outputs, inputs, device="cuda"), Scheme("int4", "group", group))
    x = torch.randn(count, inputs, device="cuda").bfloat16()
    given = (x, pack(made.codes, FORMATS["int4"]), made.scales.contiguous())
    y = torch.full((count, outputs), torch.nan, dtype=torch.bfloat16, device="cuda")
    some_rows.product(call.compiled, *given, y, form)
    assert excess(y, exact(*given), error_bound(*given)) is None


@pytest.mark.parametrize("count", [1, 5, 20, 64, 200, 300])
def test_a_product_again_and_again_in_inference_mode(count):
    """A second call of the same shapes was repeated without the copy of the activations that the kernel reads."""
    made = quantize(torch.randn(384, 1024, device="cuda"), Scheme("int4", "group", 128))
    codes, scales = pack(made.codes, FORMATS["int4"]), made.scales.contiguous()
    with torch.inference_mode():
        for _ in range(3):
            given = (torch.randn(count, 1024, device="cuda").bfloat16(), codes, scales)
            assert excess(lowbit_linear(*given), exact(*given), error_bound(*given)) is None


@pytest.mark.parametrize(("count", "inputs", "group"), [(200, 1024, 128), (200, 96, 32), (5, 96, 32)])
def test_many_tokens_and_small_groups_are_decoded(count, inputs, group):
    made = quantize(torch.randn(130, inputs, device="cuda"), Scheme("int4", "group", group))
    given = (torch.randn(count, inputs, device="cuda").bfloat16(), pack(made.codes, FORMATS["int4"]), made.scales)
    assert excess(lowbit_linear(*given), exact(*given), error_bound(*given)) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("code", ["int8", "fp8"])
@pytest.mark.parametrize("sizes", [(16, 384, 512), (200, 1000, 1024), (300, 520, 4096), (2048, 2304, 768)])
def test_products_of_8_bit_codes(code, sizes, dtype):
    """The largest has a tile of its own for each width of the results: wide ones once took too much memory."""
    given = scaled.arguments(SizedProblem(sizes, dtype, {"code": code}), torch.device("cuda"), 0)
    found = scaled.scaled_matmul(*given, code=code, dtype=dtype)
    bound = scaled.error_bound(*given, code=code, dtype=dtype)
    assert excess(found, scaled.exact(*given, code=code), bound) is None


@pytest.mark.parametrize("code", ["int8", "fp8"])
def test_attention_over_codes(code):
    problem = SizedProblem((5, 300, 2, 4, 64), "bfloat16", {})
    q, keys, values, tables, tiles = paged.arguments(problem, torch.device("cuda"), 0)
    coded, scales = [], []
    for pool in (keys, values):
        held, scale = torch.zeros_like(pool, dtype=CODES[code]), torch.zeros(pool.shape[:3], device="cuda")
        places = torch.arange(pool.shape[0] * pool.shape[1], device="cuda")
        put_pages(held, scale, places, pool.view(-1, *pool.shape[2:]))
        coded.append(held)
        scales.append(scale)
    given, options = (q, *coded, tables, tiles, *scales), {"split": 128, "longest": 300}
    found = paged.paged_attention(*given, **options)
    want, bound = paged.exact(*given, **options), paged.error_bound(*given, **options)
    assert excess(found, want, bound) is None
