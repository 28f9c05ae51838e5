"""Compression on one H200: products with few-bit weights, decoding an 8 B shape, sparse products, pruned models.

    PYTHONPATH=src python benchmarks/compress_h200.py products|shapes|decode|dense|pruned
        [--rows 1,16] [--shape NAME] [--seconds S] [--out FOLDER]

`products`: x W^T with 4-bit codes in groups of 128 for 1 to 8,192 tokens, every form that is in question beside bf16
and the operator as it is; fp8 and int8 codes beside `_scaled_mm` and `_int_mm`; 2:4 through torch's sparse kernels.
Each form is checked against its error bound before it is timed. Kernel time, by replays of a CUDA graph, with weights
rotated past the L2. `shapes`: the same for one token and llama-3-8b's matrices. `decode`: a step of the engine with
that shape at batch 1, bf16 and int4, and where its time goes; `dense`: without an engine. `pruned`: what structured
pruning should gain and gains. Readings are written as they come, so that a part that is cut off keeps what it has; each
part in a process of its own, because a kernel that fails takes the process's GPU along.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from serve_decode_h200 import Watched, engine_of, generate, random_model
from torch import Tensor
from torch.nn import functional

from tilemesh.bench.compress.passes import passes_of
from tilemesh.bench.compress.run import bench_recipes
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.launch import call
from tilemesh.kernels.lowbit.codes import quantize
from tilemesh.kernels.lowbit.formats import parse_scheme
from tilemesh.kernels.lowbit_linear import some_rows, tokens
from tilemesh.kernels.lowbit_linear.reference import arguments, error_bound, exact, lowbit_linear, norm_lowbit_linear
from tilemesh.kernels.lowbit_linear.some_rows import SomeRows
from tilemesh.kernels.lowbit_linear.tokens import OneTokenForm, TokenForm
from tilemesh.kernels.problems import SizedProblem
from tilemesh.kernels.scaled_matmul import reference as scaled
from tilemesh.measure.gpu import KernelTimer
from tilemesh.measure.row import write_rows
from tilemesh.measure.timing import compare
from tilemesh.model.config import preset
from tilemesh.model.kinds import few_bits, model_bytes, projections, put
from tilemesh.model.programs.group import GroupProduct
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.gate.alone import compress_all

Form = TokenForm | OneTokenForm | SomeRows
FORMS: Mapping[int, tuple[Form, ...]] = {
    1: (OneTokenForm(16, 4, 7), OneTokenForm(16, 4, 8), OneTokenForm(8, 2, 6, 2), OneTokenForm(16, 8)),
    8: (TokenForm(2, 1, 3, 2), TokenForm(4, 1, 3, 1)), 16: (TokenForm(4, 2, 3, 1),),
    32: (), 64: (SomeRows(64, 128, 4, 3, 4), SomeRows(64, 64, 4, 3, 2)), 128: (), 256: (),
    512: (), 1024: (), 8192: (),
}  # fmt: skip
"""By the number of tokens, for 8192 x 8192: what is timed beside the operator as it is."""
DECODED_SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
"""Outputs and inputs of llama-3-8b's products, side by side where they have the same activations."""
DECODED_FORMS = (OneTokenForm(16, 8), OneTokenForm(16, 4), OneTokenForm(7, 1, 6, 2), OneTokenForm(8, 1, 6, 2))
_L2_BYTES = 60 << 20
_STEPS = 96


class Readings:
    """One object per line, written at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, **what: Any) -> None:
        print(" | ".join(f"{key} {_short(value)}" for key, value in what.items()), flush=True)
        with self._path.open("a") as stream:
            stream.write(json.dumps(what) + "\n")


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def by_form(form: Form, x: Tensor, codes: Tensor, scales: Tensor, y: Tensor) -> None:
    if isinstance(form, SomeRows):
        some_rows.product(call.compiled, x, codes, scales, y, form)
    else:
        tokens.product(x, codes, scales, None, y, form, settled=True)


def _sets(nbytes: int) -> int:
    return max(2, -(-_L2_BYTES // nbytes) + 1)


def times(sizes: tuple[int, int, int], forms: tuple[Form, ...], keep: Readings, seconds: float) -> Any:
    """The quickest form that is right; each one's time is kept. None: the operator as it is."""
    count, outputs, inputs = sizes
    problem = SizedProblem(sizes, "bfloat16", {"code": "int4"})
    sets = _sets(outputs * inputs // 2)
    given = [arguments(problem, torch.device("cuda"), seed) for seed in range(sets)]
    y = torch.empty((count, outputs), dtype=torch.bfloat16, device="cuda")
    checked = slice(0, min(outputs, 512))  # the error bound is float64: of some outputs
    x, codes, scales = given[0]
    part = (x, codes[checked], scales[checked])
    want, bound = exact(*part), error_bound(*part)
    weights = [torch.randn(outputs, inputs, device="cuda").bfloat16() for _ in range(_sets(2 * outputs * inputs))]
    calls: dict[str, Callable[[int], object]] = {
        "bf16": lambda turn: functional.linear(x, weights[turn % len(weights)]),
        "as it is": lambda turn: lowbit_linear(*given[turn]),
    }
    if count <= tokens.MOST:
        calls["settled"] = lambda turn: lowbit_linear(*given[turn], settled=True)
        calls["not launched early"] = lambda turn: tokens.product(*given[turn], None, y, early=False)
    if count == 1:
        gain, gates = torch.rand(inputs, device="cuda").bfloat16(), {"gate": "silu", "settled": True}
        calls["settled, gate inside"] = lambda turn: lowbit_linear(*given[turn], **gates)
        calls["settled, norm inside"] = lambda turn: norm_lowbit_linear(x, x, gain, *given[turn][1:], settled=True)
        calls["settled, norm and gate inside"] = lambda turn: norm_lowbit_linear(x, x, gain, *given[turn][1:], **gates)
    wrong: dict[str, str] = {}
    found = {"as it is": lowbit_linear(*given[0])}
    right: dict[str, Any] = {"as it is": None}
    for form in forms:
        try:
            y.fill_(torch.nan)
            by_form(form, *given[0], y)
            torch.cuda.synchronize()
            found[str(form)] = y.clone()
            right[str(form)] = form
        except Exception as error:  # a form that does not compile or fit: said, and the others go on
            wrong[str(form)] = f"{type(error).__name__}: {str(error)[:300]}"
            if "misaligned" in str(error) or "illegal" in str(error):
                raise
    for name, result in found.items():
        complaint = excess(result[:, checked], want, bound)
        if complaint is not None:
            wrong[name] = complaint
            right.pop(name)
        elif right[name] is not None:
            calls[name] = lambda turn, form=right[name]: by_form(form, *given[turn], y)
    timed = compare(calls, timer=KernelTimer(), repeats=12, warmup=1, seconds=seconds, sets=sets)
    plain = timed["bf16"].median
    for name, sample in timed.items():
        keep.add(
            what="int4-g128", sizes=sizes, way=name, us=sample.median * 1e6, p20_us=sample.p20 * 1e6,
            p80_us=sample.p80 * 1e6, times_bf16=plain / sample.median,
        )  # fmt: skip
    for name, why in {**wrong, **timed.missing}.items():
        keep.add(what="int4-g128", sizes=sizes, way=name, failed=why)
    quick = [name for name in right if name in timed]
    return right[min(quick, key=lambda name: timed[name].median)] if quick else None


def code_product(code: str, count: int, keep: Readings, seconds: float) -> None:
    """8-bit codes times 8-bit codes, beside torch's."""
    sizes = (count, 8192, 8192)
    problem = SizedProblem(sizes, "bfloat16", {"code": code})
    given = [scaled.arguments(problem, torch.device("cuda"), seed) for seed in range(3)]
    small = tuple(value[:256] for value in given[0])
    result = scaled.scaled_matmul(*given[0], code=code)[:256, :256]
    wrong = excess(result, scaled.exact(*small, code=code), scaled.error_bound(*small, code=code))
    x, weight = torch.randn(count, 8192, device="cuda").bfloat16(), torch.randn(8192, 8192, device="cuda")
    weights = [weight.bfloat16() + turn for turn in range(2)]
    calls: dict[str, Callable[[int], object]] = {
        "bf16": lambda turn: functional.linear(x, weights[turn % 2]),
        "library": lambda turn: scaled.by_library(*given[turn], code=code),
        "as it is": lambda turn: scaled.scaled_matmul(*given[turn], code=code),
    }
    if code == "int8":
        calls["_int_mm alone"] = lambda turn: torch._int_mm(given[turn][0], given[turn][1].mT)
    timed = compare(calls, timer=KernelTimer(), repeats=12, warmup=1, seconds=seconds, sets=3)
    library = timed["library"].median if "library" in timed else float("nan")
    for name, sample in timed.items():
        keep.add(
            what=code, sizes=sizes, way=name, us=sample.median * 1e6, of_library=library / sample.median,
            wrong=wrong if name == "as it is" else None,
        )  # fmt: skip
    for name, why in timed.missing.items():
        keep.add(what=code, sizes=sizes, way=name, failed=why)


def sparse_products(keep: Readings, seconds: float) -> None:
    """2:4 by torch's sparse kernels."""
    from torch.sparse import to_sparse_semi_structured

    weight = torch.randn(8192, 8192, device="cuda").bfloat16()
    place = torch.arange(8192, device="cuda") % 4 < 2
    halves = (weight * place).contiguous()
    for count in (16, 64, 256, 1024, 8192):
        x = torch.randn(count, 8192, device="cuda").bfloat16()
        packed = to_sparse_semi_structured(halves)
        calls: dict[str, Callable[[int], object]] = {
            "bf16": lambda turn, x=x: functional.linear(x, halves),
            "2:4": lambda turn, x=x, packed=packed: functional.linear(x, packed),
        }
        timed = compare(calls, timer=KernelTimer(), repeats=12, warmup=1, seconds=seconds)
        if timed.missing:
            keep.add(what="2:4", sizes=(count, 8192, 8192), failed=str(timed.missing))
            continue
        plain, fewer = timed["bf16"].median, timed["2:4"].median
        keep.add(what="2:4", sizes=(count, 8192, 8192), us=fewer * 1e6, bf16_us=plain * 1e6, times_bf16=plain / fewer)


def products(keep: Readings, seconds: float, rows: Sequence[int] | None) -> None:
    for count in rows or FORMS:
        times((count, 8192, 8192), FORMS[count], keep, seconds)
        torch.cuda.empty_cache()
    if rows:
        return
    for code in ("fp8", "int8"):
        for count in (16, 64, 1024, 8192):
            code_product(code, count, keep, seconds)
    sparse_products(keep, seconds)


def step_ms(model: Transformer, told: Mapping[str, Any], keep: Readings, with_profile: bool) -> float:
    """A decoding step of the engine at batch 1."""
    with engine_of(model, 1, True) as engine:
        generate(engine, 1, 16, 4)  # compiles and captures
        print(f"{told}: answers", flush=True)
        watched = Watched(engine, model, 1.0)
        generate(engine, 1, 128, _STEPS)
        took = watched.decode_s(1) * 1e3
        busy, _ = watched.gpu_s(1)
        keep.add(**told, step_ms=took, busy_ms=busy * 1e3, bytes=model_bytes(model))
        if with_profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                generate(engine, 1, 16, 12)
                torch.cuda.synchronize()
            print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=60))
    torch.cuda.empty_cache()
    return took


def decoded_products(keep: Readings, seconds: float) -> None:
    """Of llama-3-8b's shapes, one token."""
    for sizes in DECODED_SHAPES:
        times((1, *sizes), DECODED_FORMS, keep, seconds / 2)
        torch.cuda.empty_cache()


def decode(keep: Readings, seconds: float, shape: str) -> None:
    """int4 first: an engine puts plain weights side by side, so each form of weights is a model of its own."""
    model = random_model(preset(shape))
    compress_all(model, "int4-g128")
    torch.cuda.synchronize()
    found = {"int4-g128": step_ms(model, {"shape": shape, "weights": "int4-g128"}, keep, True)}
    output, scheme = dict(projections(model))["output"], parse_scheme("int4-g128")
    put(model, "output", few_bits(output, scheme, quantize(output.weight, scheme)))
    told = {"shape": shape, "weights": "int4-g128, output too"}
    found["int4-g128, output too"] = step_ms(model, told, keep, False)
    plainly = mock.patch.object(tokens, "launches_early", return_value=False)
    apart = mock.patch.object(GroupProduct, "takes_row", return_value=False)
    for name, patches in {"not launched early": (plainly,), "norms and gates apart": (plainly, apart)}.items():
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            step_ms(model, {**told, "how": name}, keep, False)
    del model, output
    torch.cuda.empty_cache()
    plain = step_ms(random_model(preset(shape)), {"shape": shape, "weights": "bf16"}, keep, True)
    for name, took in found.items():
        keep.add(shape=shape, weights=name, times_bf16=plain / took)


def dense(keep: Readings, seconds: float, shape: str) -> None:
    """The same without an engine: a token after 128, keys and values side by side, all kernels as one graph."""
    models = {name: random_model(preset(shape)) for name in ("bf16", "int4-g128")}
    compress_all(models["int4-g128"], "int4-g128")
    tokens_given = torch.randint(models["bf16"].config.vocabulary, (1, 128), device="cuda")
    with torch.inference_mode():
        calls = {name: passes_of(model, tokens_given)[1] for name, model in models.items()}
        timed = compare(calls, timer=KernelTimer(), repeats=20, warmup=2, seconds=4 * seconds)
    for name, sample in timed.items():
        ratio = timed["bf16"].median / sample.median
        keep.add(shape=shape, weights=name, way="dense", step_ms=sample.median * 1e3, times_bf16=ratio)
    for name, why in timed.missing.items():
        keep.add(shape=shape, weights=name, way="dense", failed=why)


def pruned(keep: Readings, seconds: float, folder: Path) -> None:
    """On tinyllama's shape with random weights: times count, losses do not."""
    model = random_model(preset("tinyllama-1.1b")).float()
    drawn = torch.randint(model.config.vocabulary, (8, 257))
    text = drawn, drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    recipes = ("mlp-25", "mlp-50", "heads-50", "layers-25", "layers-50", "unstructured-50")
    case = {"model": "tinyllama-1.1b, random weights", "sequences": 8, "calibrated": 8, "dtype": "bf16"}

    def only_times(rows: Any) -> None:
        write_rows([row for row in rows if row.unit == "s"], folder / "compress_pruned_h200.jsonl")

    found = bench_recipes(model, recipes, text, case, (), 4 * seconds, print, torch.bfloat16, only_times)
    for point in found.points:
        for what in ("forward", "decode"):
            plain, small, guess = (point[f"{kind}{what}_s"] for kind in ("plain_", "", "predicted_"))
            keep.add(
                what="pruned", recipe=point["recipe"], of=what, speedup=plain / small, predicted=plain / guess,
                off=guess / small - 1,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("products", "shapes", "decode", "dense", "pruned"))
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument(
        "--rows", metavar="1,16", help="products with int4 weights and so many tokens, and nothing else"
    )
    parser.add_argument("--shape", default="llama-3-8b", help="what is decoded with")
    parser.add_argument("--out", type=Path, default=Path())
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available():
        sys.exit("compress_h200: no GPU here: run it on a machine with one")
    keep = Readings(asked.out / "readings_compress_products_h200.jsonl")
    keep.add(about=f"{torch.cuda.get_device_name()}, torch {torch.__version__}", command=" ".join(sys.argv))
    for part in asked.parts:
        began = time.perf_counter()
        try:
            if part == "pruned":
                pruned(keep, asked.seconds, asked.out)
            elif part == "products":
                rows = [int(count) for count in asked.rows.split(",")] if asked.rows else None
                products(keep, asked.seconds, rows)
            elif part == "shapes":
                decoded_products(keep, asked.seconds)
            else:
                {"decode": decode, "dense": dense}[part](keep, asked.seconds, asked.shape)
        except Exception as error:
            traceback.print_exc()
            keep.add(part=part, failed=f"{type(error).__name__}: {error}"[:500])
        keep.add(part=part, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    main()
