"""One token times 4-bit codes on an H200: what reading alone takes, and kernels that may take the place of `int4.cu`.

    PYTHONPATH=src python benchmarks/int4_variants.py floor|products|decode [--seconds S] [--shape NAME] [--out FOLDER]

`floor`: kernels that read the codes and scales of an 8192 x 8192 matrix (35.7 MB) and multiply nothing, from memory's
first byte to its last and in the order of the product: what is left to the product is the difference. `products`: the
forms of `int4_stream.cu` (codes come through shared memory, thread by thread) and of `int4_early.cu` (in registers),
each with and without a launch before the kernel ahead has ended, beside bf16 and the operator as it is. Each is
checked before it is timed; replays of a CUDA graph, weights rotated past the L2. `decode`: a step of the engine at
batch 1 as it is, by the best of these forms in a chain of early launches, and in bf16. Readings are written as they
come.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from compress_h200 import Readings, _sets
from serve_decode_h200 import Watched, engine_of, generate, random_model
from torch import Tensor
from torch.nn import functional

from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.few_linear.reference import parts_rms_norm
from tilemesh.kernels.lowbit.codes import quantize
from tilemesh.kernels.lowbit.formats import parse_scheme
from tilemesh.kernels.lowbit_linear import tokens
from tilemesh.kernels.lowbit_linear.reference import arguments, error_bound, exact, lowbit_linear
from tilemesh.kernels.problems import SizedProblem
from tilemesh.measure.gpu import KernelTimer
from tilemesh.measure.timing import compare
from tilemesh.model.config import preset
from tilemesh.model.lowbit import LowBitLinear, StackedCodes, compress_all, model_bytes, projections, put
from tilemesh.model.transformer import Layer, Pass, Transformer
from tilemesh.serve import Sampling

HERE = Path(__file__).parent
BEST = "int4_best.json"
MULTIPROCESSORS = 132
LLAMA = ((6144, 4096, 0), (4096, 4096, 0), (28672, 4096, 1), (4096, 14336, 0), (128256, 4096, 0))
"""Rows of codes, inputs and whether half of the rows are gates: the products of llama-3-8b."""


@dataclass(frozen=True)
class Form:
    """`source`: int4_stream or int4_early; the others as in these files."""

    source: str
    strips: int
    depth: int
    blocks: int
    early: int = 1
    gated: int = 0
    read_only: int = 0

    @property
    def results(self) -> int:
        return 16 * self.strips // (2 if self.gated else 1)

    @property
    def shared_bytes(self) -> int:
        if self.source != "int4_stream":
            return 0
        return 8 * 8 * 16 * self.strips * 4 + 8 * self.depth * 2 * self.strips * 32 * 20


STREAMS = (
    Form("int4_stream", 2, 4, 2), Form("int4_stream", 2, 3, 2), Form("int4_stream", 1, 8, 2),
    Form("int4_stream", 4, 5, 1),
)  # fmt: skip
EARLIES = (Form("int4_early", 2, 3, 2), Form("int4_early", 1, 4, 2))
CHOSEN = {4096: Form("int4_early", 1, 4, 2)}
"""What `decode` takes where `products` was cut off."""


class _Value(ctypes.Union):
    _fields_ = (("whole", ctypes.c_char * 64), ("flag", ctypes.c_int))


class _Attribute(ctypes.Structure):
    _fields_ = (("name", ctypes.c_int), ("unused", ctypes.c_char * 4), ("value", _Value))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint), ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


_EARLY_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def _checked(driver: Any, result: int, what: str) -> None:
    if result:
        told = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(told))
        raise RuntimeError(f"{what}: {(told.value or b'an error without a name').decode()}")


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _function(source: str, name: str, shared_bytes: int) -> Any:
    kernel = torch.cuda._compile_kernel(source, name)
    if shared_bytes > 48 << 10:
        driver = _driver()
        _checked(driver, driver.cuFuncSetAttribute(kernel.func, _MOST_SHARED, shared_bytes), "shared memory")
    return kernel


def launch(
    function: Any, blocks: tuple[int, int], threads: int, shared_bytes: int, early: bool, given: list[Any]
) -> None:
    driver = _driver()
    held = [ctypes.c_void_p(v.data_ptr()) if isinstance(v, Tensor) else ctypes.c_int(v) for v in given]
    pointers = (ctypes.c_void_p * len(held))(*[ctypes.cast(ctypes.byref(one), ctypes.c_void_p) for one in held])
    attribute = _Attribute(_EARLY_LAUNCH, b"", _Value(flag=1))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    told = _Launch(
        *blocks, 1, threads, 1, 1, shared_bytes, stream, ctypes.pointer(attribute) if early else None, int(early)
    )
    _checked(driver, driver.cuLaunchKernelEx(ctypes.byref(told), function.func, pointers, None), "launch")


def product(form: Form, x: Tensor, codes: Tensor, scales: Tensor, y: Tensor) -> None:
    (count, inputs), results = x.shape, y.shape[-1]
    names = {
        "STRIPS": form.strips, "TILES": 1, "DEPTH": form.depth, "BLOCKS": form.blocks, "HALF": 0, "ZEROS": 0,
        "PER_GROUP": inputs // scales.shape[1] // 128, "EARLY": form.early, "GATED": form.gated,
        "READ_ONLY": form.read_only,
    }  # fmt: skip
    lines = "".join(f"#define {name} {value}\n" for name, value in names.items())
    entry = "int4_stream" if form.source == "int4_stream" else "int4_tokens"
    function = _function(lines + (HERE / f"{form.source}.cu").read_text(), entry, form.shared_bytes)
    across = -(-results // form.results)
    if form.source == "int4_stream":
        across = min(across, form.blocks * MULTIPROCESSORS)
    given = [codes, scales, scales, x, y, count, results, inputs, scales.shape[1]]
    launch(function, (across, -(-count // 8)), 256, form.shared_bytes, bool(form.early), given)


LINEAR = """
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
read_all(const uint4* codes, const uint4* scales, unsigned* y, int code_count, int scale_count) {
    unsigned found = 0;
    const int own = blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
    for (int pass = 0; pass < 2; pass++) {
        const uint4* from = pass ? scales : codes;
        const int count = pass ? scale_count : code_count;
        for (int at = own; at < count; at += all * LOADS) {
            uint4 v[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const int place = min(at + i * all, count - 1);
                asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                             : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w) : "l"(from + place));
            }
#pragma unroll
            for (int i = 0; i < LOADS; i++) found ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
        }
    }
    if (found == 0x12345678u) y[own] = found;
}
"""


def floor(keep: Readings, seconds: float) -> None:
    """Reads 8192 x 8192 codes and their scales, and multiplies nothing."""
    problem = SizedProblem((1, 8192, 8192), "bfloat16", {"code": "int4"})
    sets = _sets(8192 * 4096)
    given = [arguments(problem, torch.device("cuda"), seed) for seed in range(sets)]
    y, room = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in ((1, 8192), (1 << 20,)))
    nbytes = given[0][1].nbytes + given[0][2].nbytes
    calls: dict[str, Callable[[int], object]] = {}
    for blocks, threads, loads in ((1, 1024, 8), (2, 512, 8), (2, 1024, 4), (2, 256, 16)):
        source = f"#define THREADS {threads}\n#define BLOCKS {blocks}\n#define LOADS {loads}\n" + LINEAR

        def linear(turn: int, source: str = source, blocks: int = blocks, threads: int = threads) -> None:
            _, codes, scales = given[turn]
            counts = [codes.nbytes // 16, scales.nbytes // 16]
            launch(
                _function(source, "read_all", 0), (blocks * MULTIPROCESSORS, 1), threads, 0, False,
                [codes, scales, room, *counts],
            )  # fmt: skip

        calls[f"first to last byte, {blocks} blocks of {threads} threads, {loads} loads"] = linear
    forms = [replace(form, read_only=1, early=0) for form in (STREAMS[0], STREAMS[3], EARLIES[0])]
    forms.append(replace(STREAMS[0], read_only=1))
    for form in forms:
        calls[str(form)] = lambda turn, form=form: product(form, *given[turn], y)
    calls["torch: sum of the codes as int64"] = lambda turn: given[turn][1].view(torch.int64).sum()
    _write(keep, "read only", (1, 8192, 8192), calls, sets, seconds, nbytes)


def _write(
    keep: Readings, what: str, sizes: tuple[int, ...], calls: dict[str, Callable[[int], object]], sets: int,
    seconds: float, nbytes: int,
) -> dict[str, float]:  # fmt: skip
    timed = compare(calls, timer=KernelTimer(), repeats=10, warmup=1, seconds=seconds, sets=sets)
    plain = timed["bf16"].median if "bf16" in timed else float("nan")
    for name, sample in sorted(timed.items(), key=lambda item: item[1].median):
        us = sample.median * 1e6
        keep.add(
            what=what, sizes=sizes, way=name, us=us, p20_us=sample.p20 * 1e6, p80_us=sample.p80 * 1e6,
            tb_per_s=nbytes / us / 1e6, times_bf16=plain * 1e6 / us,
        )  # fmt: skip
    for name, why in timed.missing.items():
        keep.add(what=what, sizes=sizes, way=name, failed=why)
    return {name: sample.median for name, sample in timed.items()}


def products(keep: Readings, seconds: float, folder: Path) -> None:
    best: dict[str, Any] = {}
    for outputs, inputs, gated in ((8192, 8192, 0), *LLAMA):
        of_model = (outputs, inputs) != (8192, 8192)
        sizes = (1, outputs, inputs)
        problem = SizedProblem(sizes, "bfloat16", {"code": "int4"})
        sets = _sets(outputs * inputs // 2)
        given = [arguments(problem, torch.device("cuda"), seed) for seed in range(sets)]
        weights = [torch.randn(outputs, inputs, device="cuda").bfloat16() for _ in range(_sets(2 * outputs * inputs))]
        x, codes, scales = given[0]
        y = torch.empty((1, outputs), dtype=torch.bfloat16, device="cuda")
        calls: dict[str, Callable[[int], object]] = {
            "bf16": lambda turn, x=x, weights=weights: functional.linear(x, weights[turn % len(weights)]),
            "as it is": lambda turn, given=given: lowbit_linear(*given[turn]),
        }
        forms = [*STREAMS, *EARLIES]
        if not of_model:
            forms += [replace(form, early=0) for form in (STREAMS[0], EARLIES[0])]
        if gated:
            forms += [replace(form, gated=1) for form in forms if form.strips > 1]
        right: dict[str, Form] = {}
        part = slice(0, 512)
        want, bound = exact(x, codes[part], scales[part]), error_bound(x, codes[part], scales[part])
        values = exact(x, codes[outputs // 2 :][part], scales[outputs // 2 :][part]) if gated else None
        for form in forms:
            found = torch.full((1, outputs // (2 if form.gated else 1)), torch.nan, dtype=torch.bfloat16, device="cuda")
            try:
                product(form, x, codes, scales, found)
                torch.cuda.synchronize()
            except Exception as error:
                keep.add(what="int4-g128", sizes=sizes, way=str(form), failed=f"{type(error).__name__}: {error}"[:300])
                if "illegal" in str(error) or "misaligned" in str(error):
                    raise
                continue
            if form.gated:
                assert values is not None
                gate = functional.silu(want) * values
                off = float((found[:, part].double() - gate).abs().max() / gate.abs().max())
                wrong = f"off by {off:.3f} of the largest" if not off < 0.01 else None
            else:
                wrong = excess(found[:, part], want, bound)
            if wrong is None and bool(found.isnan().any()):
                wrong = "some outputs were not written"
            if wrong is not None:
                keep.add(what="int4-g128", sizes=sizes, way=str(form), failed=wrong)
                continue
            right[str(form)] = form
            to = found if form.gated else y
            calls[str(form)] = lambda turn, form=form, to=to, given=given: product(form, *given[turn], to)
        nbytes = codes.nbytes + scales.nbytes
        found_s = _write(keep, "int4-g128", sizes, calls, sets, seconds if not of_model else seconds / 2, nbytes)
        if of_model:
            quick = [name for name in right if name in found_s and right[name].gated == gated]
            if quick:
                best[f"{outputs}x{inputs}"] = asdict(right[min(quick, key=lambda name: found_s[name])])
                (folder / BEST).write_text(json.dumps(best))
        del weights, given
        torch.cuda.empty_cache()


class CodedTokens:
    """As `model/few_tokens.py`, for layers of codes: every kernel is launched before the one ahead has ended."""

    def __init__(self, model: Transformer, product: Callable[[Tensor, LowBitLinear, bool], Tensor]) -> None:
        self.model, self.product = model, product

    @staticmethod
    def takes(tokens: int) -> bool:
        return tokens == 1

    def __call__(self, x_TD: Tensor, now: Pass) -> Tensor:
        parts_STD = torch.zeros_like(x_TD)[None]
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            heads, gated = layer.attention.stacked, layer.mlp.stacked
            assert isinstance(heads, StackedCodes)
            assert isinstance(gated, StackedCodes)
            y_TD, x_TD = self._norm(parts_STD, x_TD, layer.attention_norm)
            y_1TD = layer.attention.attend(self.product(y_TD, heads.whole, False), now, x_TD.dtype)
            parts_STD = self.product(y_1TD[0], layer.attention.fc_o, False)
            y_TD, x_TD = self._norm(parts_STD, x_TD, layer.mlp_norm)
            h_1TF = self.product(y_TD, gated.whole, True)
            parts_STD = self.product(h_1TF[0], layer.mlp.fc_out, False)
        return self._norm(parts_STD, x_TD, self.model.final_norm)[0]

    def _norm(self, parts_STD: Tensor, x_TD: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        y_TD, total_TD = parts_rms_norm(parts_STD, x_TD, norm.weight, eps=norm.epsilon)
        return y_TD, total_TD


def _form(best: dict[str, Form], codes: Tensor, inputs: int, gated: bool) -> Form:
    form = best.get(f"{len(codes)}x{inputs}") or CHOSEN.get(len(codes)) or Form("int4_early", 2, 3, 2)
    return replace(form, gated=int(gated))


def decode(keep: Readings, shape: str, folder: Path) -> None:
    known = folder / BEST
    best = {name: Form(**told) for name, told in json.loads(known.read_text()).items()} if known.exists() else {}
    print(f"forms: {best}", flush=True)
    as_it_is = tokens.product

    def by_best(x: Tensor, module: LowBitLinear, gated: bool) -> Tensor:
        y = torch.empty((1, 1, module.out_features // (2 if gated else 1)), dtype=x.dtype, device=x.device)
        form = _form(best, module.codes, x.shape[1], gated)
        product(form, x.contiguous(), module.codes, module.scales, y[0])
        return y

    def one_token(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, y: Tensor, form: Any = None) -> None:
        if len(x) > 1 or zeros is not None:
            as_it_is(x, codes, scales, zeros, y, form)
        else:
            product(_form(best, codes, x.shape[1], False), x, codes, scales, y)

    def step(model: Transformer, weights: str, chain: bool = False) -> tuple[float, list[int]]:
        """Milliseconds of a step at batch 1, and the first tokens of an answer."""
        began = time.perf_counter()
        with engine_of(model, 1, True) as engine:
            tokens.product = one_token if chain else as_it_is
            if chain:
                engine._core.runner._few = CodedTokens(model, by_best)
            prompt = [[3, 1, 4, 1, 5, 9, 2, 6] * 2]
            (answer,) = engine.generate(prompt, Sampling(max_tokens=12, temperature=0, ignore_eos=True))
            watched = Watched(engine, model, 1.0)
            generate(engine, 1, 128, 96)
            took, (busy, _) = watched.decode_s(1) * 1e3, watched.gpu_s(1)
        told = {"shape": shape, "weights": weights, "step_ms": took, "busy_ms": busy * 1e3, "bytes": model_bytes(model)}
        keep.add(**told, of_this_script_s=time.perf_counter() - began)
        tokens.product = as_it_is
        torch.cuda.empty_cache()
        return took, answer.answers[0].tokens

    model = random_model(preset(shape))
    compress_all(model, "int4-g128")
    found = {"int4-g128": step(model, "int4-g128")}
    plain_output, scheme = dict(projections(model))["output"], parse_scheme("int4-g128")
    put(model, "output", LowBitLinear(plain_output, scheme, quantize(plain_output.weight, scheme)))
    found["int4-g128, output too"] = step(model, "int4-g128, output too")
    found["chain, output too"] = step(model, "int4-g128 in a chain, output too", chain=True)
    pairs = zip(found["int4-g128, output too"][1], found["chain, output too"][1], strict=True)
    keep.add(what="tokens of 12 that a chain has as well", count=sum(one == other for one, other in pairs))
    plain = step(random_model(preset(shape)), "bf16")[0]
    for name, (took, _) in found.items():
        keep.add(shape=shape, weights=name, times_bf16=plain / took)
    put(model, "output", plain_output)
    keep.add(shape=shape, weights="chain", times_bf16=plain / step(model, "int4-g128 in a chain", chain=True)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("floor", "products", "decode"))
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--out", type=Path, default=Path())
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("int4_variants: no GPU here: run it on a machine with one")
    keep = Readings(asked.out / "readings_compress_variants_h200.jsonl")
    keep.add(about=f"{torch.cuda.get_device_name()}, torch {torch.__version__}", command=" ".join(sys.argv))
    for part in asked.parts:
        began = time.perf_counter()
        try:
            if part == "floor":
                floor(keep, asked.seconds)
            elif part == "products":
                products(keep, asked.seconds, asked.out)
            else:
                decode(keep, asked.shape, asked.out)
        except Exception as error:
            traceback.print_exc()
            keep.add(part=part, failed=f"{type(error).__name__}: {error}"[:500])
        keep.add(part=part, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    main()
