"""4-bit codes times some rows, under Triton's interpreter, and which form of the CUDA kernels a GPU would be given."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.launch import call, driver, program
from tilemesh.kernels.launch.call import Place
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


@pytest.mark.parametrize(
    ("count", "outputs", "inputs", "group", "split"), [(20, 200, 512, 256, 2), (5, 64, 256, 128, 1)]
)
def test_some_rows_are_within_their_bound(count, outputs, inputs, group, split):
    generator = torch.Generator().manual_seed(3)
    made = quantize(torch.randn(outputs, inputs, generator=generator), Scheme("int4", "group", group))
    x = torch.randn(count, inputs, generator=generator)
    given = (x, pack(made.codes, FORMATS["int4"]), made.scales.contiguous())
    y = torch.full((count, outputs), torch.nan)
    some_rows.product(call.interpreted, *given, y, some_rows.SomeRows(32, 64, 4, 3, split))
    assert excess(y, exact(*given), error_bound(*given)) is None


@drawn(st.integers(1, 300_000), st.integers(1, 300), st.integers(1, 200), st.booleans())
def test_blocks_for_one_token_have_all_outputs_and_no_more_work_than_asked(outputs, chunks, multiprocessors, settled):
    form = tokens.form_of(1, outputs, 128 * chunks, multiprocessors, settled)
    if not isinstance(form, tokens.OneTokenForm):
        assert outputs < 16 or -(-outputs // (16 * multiprocessors)) * 16 > outputs or chunks > 180
        return
    assert form.warps <= 16
    assert form.warps % form.ways == 0
    assert form.shared_bytes(128 * chunks) < 48 << 10
    blocks = form.grid(1, outputs)[0]
    assert form.outputs <= outputs <= blocks * form.outputs < outputs + form.outputs
    if outputs <= 16 * 16 * multiprocessors:
        assert blocks <= multiprocessors


@pytest.mark.parametrize(
    ("outputs", "inputs", "form"),
    [
        (8192, 8192, (16, 4)),
        (6144, 4096, (12, 4)),
        (28672, 4096, (14, 1)),
        (4096, 14336, (16, 8)),
        (128256, 4096, (4, 1)),
    ],
)  # fmt: skip
def test_one_token_fills_an_h200(outputs, inputs, form):
    """128 of its 132 multiprocessors have the same work, or four small blocks each at a time."""
    found = tokens.form_of(1, outputs, inputs, 132)
    assert isinstance(found, tokens.OneTokenForm)
    assert (found.warps, found.ways) == form
    assert found.grid(1, outputs)[0] in (128, 2004)


@pytest.mark.parametrize("gate", ["none", "silu"])
@pytest.mark.parametrize("how", ["torch", "interpret"])
@pytest.mark.parametrize(("outputs", "inputs", "group", "symmetric"), [(24, 256, 128, True), (34, 128, 64, False)])
def test_a_norm_before_and_a_gate_after_the_product_are_within_their_bounds(
    gate, how, outputs, inputs, group, symmetric
):
    generator = torch.Generator().manual_seed(5)
    x, branch = (torch.randn(1, inputs, generator=generator) for _ in range(2))
    gain = torch.rand(inputs, generator=generator)
    made = quantize(torch.randn(outputs, inputs, generator=generator), Scheme("int4", "group", group, symmetric))
    codes = (pack(made.codes, FORMATS["int4"]), made.scales.contiguous(), made.zeros)
    found = lowbit_linear(x, *codes, gate=gate, implementation=how)
    assert excess(found, exact(x, *codes, gate=gate), error_bound(x, *codes, gate=gate)) is None
    found, total = norm_lowbit_linear(x, branch, gain, *codes, eps=1e-5, gate=gate, implementation=how)
    row = norm_row(x, branch, gain, 1e-5)
    want, bound = exact(row, *codes, gate=gate), error_bound(row, *codes, gate=gate, dtype=x.dtype, roundings=4)
    assert torch.equal(total, x + branch)
    assert excess(found, want, bound) is None
    assert excess(found.flip(1), want, bound) is not None


def test_a_gate_or_norm_that_does_not_fit_is_refused():
    made = quantize(torch.randn(3, 128), Scheme("int4"))
    codes = (pack(made.codes, FORMATS["int4"]), made.scales)
    x = torch.randn(1, 128)
    with pytest.raises(UsageError, match="codes have 3 rows: expected as many for the gate"):
        lowbit_linear(x, *codes, gate="silu")
    with pytest.raises(UsageError, match="gate 'relu'"):
        lowbit_linear(x, *codes, gate="relu")
    with pytest.raises(UsageError, match=r"branch \(1, 64\)"):
        norm_lowbit_linear(x, x[:, :64], torch.ones(128), *codes)
    with pytest.raises(UsageError, match=r"eps is -1.0: expected at least 0"):
        norm_lowbit_linear(x, x, torch.ones(128), *codes, eps=-1.0)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (lambda x, codes, scales: (x.int(), codes, scales), "x of torch.int32: expected activations in floating point"),
        (lambda x, codes, scales: (x, codes, scales.bfloat16()), "scales of torch.bfloat16: expected torch.float32"),
        (lambda x, codes, scales: (x, codes, scales, scales), "zeros of torch.float32: expected torch.int8"),
        (lambda x, codes, scales: (x, codes, scales[:, :0]), r"scales \(4, 0\): expected \(N or 1, G\)"),
    ],
)
def test_numbers_of_a_kind_that_kernels_do_not_read_are_refused(what, told):
    made = quantize(torch.randn(4, 128), Scheme("int4"))
    with pytest.raises(UsageError, match=told):
        lowbit_linear(*what(torch.randn(1, 128), pack(made.codes, FORMATS["int4"]), made.scales))


def test_few_turns_of_a_settled_product_are_for_half_as_many_blocks():
    """Measured: 4.6 in place of 4.9 us where codes are asked for ahead, 7.2 in place of 5.5 where they are not."""
    found, settled = (tokens.one_token_form(4096, 4096, 132, settled) for settled in (False, True))
    assert (found, settled) == (tokens.OneTokenForm(16, 8), tokens.OneTokenForm(16, 4))
    assert tokens.one_token_form(4096, 14336, 132, True) == tokens.OneTokenForm(16, 8)


def test_a_kernel_in_cuda_is_given_addresses_and_numbers_in_its_order(monkeypatch):
    """On a CPU, where a function of ours stands for the driver's. A norm before the product has four tensors more."""
    told = []
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(driver._Launch), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
    )

    @prototype
    def launch(config, function, parameters, extra):
        kinds = [ctypes.c_void_p] * (5 if function == 4 else 8) + [ctypes.c_int] * (4 if function == 4 else 3)
        kinds += [ctypes.c_double] * (function == 8)
        values = [kind.from_address(parameters[at]).value for at, kind in enumerate(kinds)]
        this = config.contents
        told.append(([*this.grid], [*this.block], this.shared_bytes, this.stream, this.count, values))
        return 0

    sources = []

    def compiled(source, function, device):
        sources.append(source)
        return 4 if function == "int4_tokens" else 8

    monkeypatch.setattr(driver, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    monkeypatch.setattr(program, "compiled", compiled)
    monkeypatch.setattr(program.torch.cuda, "current_device", lambda: 0)
    few, row, vector = (Place(shape, (256, 1), "float16", aligned=True) for shape in ((3, 256), (1, 256), (256,)))
    codes, scales = Place((64, 128), (128, 1), "uint8", aligned=True), Place((64, 2), (2, 1), "float32", aligned=True)
    places = {"x": few, "w": codes, "scales": scales, "y": few}
    options = {"gated": False, "settled": True, "early": True, "eps": 0.5}
    plan = tokens.plan(places, form=tokens.TokenForm(1, 1, 4, 2), **options)
    launched = program.LaunchProgram(plan, {}, list(places))
    launched(7, 1, 2, 3, 5)
    assert told == [([4, 1, 1], [256, 1, 1], 0, 7, 1, [2, 3, 3, 1, 5, 3, 64, 256, 2])]
    assert "#define STRIPS 1\n" in sources[0]
    assert "#define EARLY 2\n" in sources[0]
    assert launched.direct()[0].arguments[3:6] == ((0, 0), (3, 0), (-1, 3))
    one = {"x": row, "branch": row, "gains": vector, "w": codes, "scales": scales, "y": row, "total": row}
    plan = tokens.plan(one, form=tokens.OneTokenForm(2, 1), **{**options, "early": False})
    program.LaunchProgram(plan, {}, list(one))(0, *range(10, 17))
    addresses = dict(zip(one, range(10, 17), strict=True))
    order = ("w", "scales", "scales", "x", "branch", "gains", "y", "total")
    assert told[1] == ([2, 1, 1], [64, 1, 1], 656, None, 0, [*map(addresses.get, order), 64, 256, 2, 0.5])
