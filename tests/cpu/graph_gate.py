"""The graph backend against eager, case by case; `test_graph_differential.py` runs a sample, `make test-all` all.

    python tests/cpu/graph_gate.py -n 16                  # every case, in 16 processes
    python tests/cpu/graph_gate.py -n 16 --share 1/3      # a third of them
    python tests/cpu/graph_gate.py --match pow            # cases whose names have this
    python tests/cpu/graph_gate.py --way interpret        # the text of GPU kernels, by Triton's interpreter

A case is a function of tensors. It is traced, lowered, rewritten and compiled as the backend does, and compared with
eager for special values of every kind (`differential.py`), results and gradients; float64 is the truth. What eager
refuses has to be refused. Cases are torch's own database of operators (`op_db`), chains of two operators, casts through
every pair of dtypes, numbers that compare equal and are not, indices that are none, and sizes that change.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import os
import sys
import tempfile
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from differential import KINDS, disagreement, planted
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

if importlib.util.find_spec("expecttest") is None:  # the database imports it for a class of tests that is not used here
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in

from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from tilemesh.graph.aten import decompositions
from tilemesh.graph.backend import Backend, compiled
from tilemesh.graph.generated import way_for
from tilemesh.graph.lower import NotServedError

Function = Callable[..., Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
ALL_KINDS = (*KINDS, "huge")
BAD_INDICES = ("-1", "size", "far")
NEIGHBOURS = 8  # inputs beside a case's own, on which eager is tried where a result is far from it


@dataclass(frozen=True)
class Case:
    """A function of tensors. kinds: the special values it gets; slopes: whether its gradients are compared too."""

    name: str
    function: Function
    tensors: Sequence[Tensor]
    kinds: Sequence[str] = ALL_KINDS
    slopes: bool = False
    defined: Function | None = None  # of the tensors: for each result where eager's own value is defined
    bits: bool = False  # are compared: it has one rounding or none


@dataclass
class Outcome:
    """What a run gave: results, or the error that it ended with."""

    results: list[Tensor] = field(default_factory=list)
    error: Exception | None = None


def filled(x: Tensor, kind: str) -> Tensor:
    """A tensor of these values: `planted`, and `huge`: sums of few elements are beyond the dtype, and no element is."""
    if kind != "huge" or not x.is_floating_point() or not x.numel():
        return planted(x, kind)
    scale = torch.finfo(x.dtype).max / 2
    return (scale * (0.5 + 0.5 * torch.linspace(0, 1, x.numel(), dtype=torch.float64))).to(x.dtype).reshape(x.shape)


def attempt(function: Function, tensors: Sequence[Tensor], slopes: bool) -> Outcome:
    """Results, and the gradients of a weighted sum of them; who draws random numbers draws the same ones."""
    torch.manual_seed(0)
    leaves = [tensor for tensor in tensors if torch.is_tensor(tensor) and tensor.requires_grad]
    try:
        results = [each for each in tree_leaves(function(*tensors)) if torch.is_tensor(each)]
        total = torch.zeros((), dtype=torch.float64)
        for each in results:
            if slopes and each.requires_grad and each.is_floating_point():
                weights = torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype).reshape(each.shape)
                total = total + (each * weights).sum()
        gradients = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else ()
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise
    except Exception as error:
        return Outcome(error=error)
    return Outcome([_real(each.detach()) for each in (*results, *(each for each in gradients if each is not None))])


def _real(x: Tensor) -> Tensor:
    """What can be compared: of complex numbers their parts, of integers of 64 bits without a sign those with one."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.view(torch.int64) if x.dtype == torch.uint64 else x


def through_backend(function: Function, way: str | None) -> Function:
    """The function as the backend compiles it, without Dynamo before it."""

    def compile_piece(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Function:
        try:
            return compiled(module, inputs, way)[0]
        except NotServedError:
            return make_boxed_func(module.forward)  # type: ignore[no-any-return]

    return aot_function(  # type: ignore[no-any-return]
        function, fw_compiler=compile_piece, bw_compiler=compile_piece, decompositions=decompositions()
    )


def traced(function: Function) -> Function:
    """The function as torch traces it for every backend, and runs it operator by operator itself."""
    return aot_function(function, fw_compiler=lambda module, _: make_boxed_func(module.forward))  # type: ignore[no-any-return]


def wrong(case: Case, way: str | None) -> Iterator[str]:
    """What is wrong with a case, kind by kind of special values.

    Not the backend's is what torch's own tracing does before it: checks of a matrix and branches on values are left
    out, some operators (interpolation) are written in others. Whoever runs the traced program gets these results.
    """
    run, by_torch = through_backend(case.function, way), traced(case.function)
    for kind in case.kinds:
        tensors = [_placed(each, kind, case.slopes) for each in case.tensors]
        eager = attempt(case.function, tensors, case.slopes)
        if eager.error is None and not _repeats(case, tensors, eager.results):
            return  # it draws random numbers, or reads memory that nobody wrote
        try:
            ours = attempt(run, tensors, case.slopes)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return  # torch itself cannot trace what values decide
        if eager.error is not None or ours.error is not None:
            if type(ours.error) not in (type(eager.error), type(attempt(by_torch, tensors, case.slopes).error)):
                yield f"{case.name} {kind}: ours {_said(ours)}, eager's {_said(eager)}"
            continue
        wide = [_placed(each, kind, case.slopes, torch.float64) for each in case.tensors]
        exact = attempt(case.function, wide, case.slopes)
        alike = exact.error is None and len(exact.results) == len(eager.results)
        true = exact.results if alike else eager.results
        different = list(_differences(case, kind, tensors, ours.results, eager.results, true))
        if different:
            plain = attempt(by_torch, tensors, case.slopes).results
            if len(plain) == len(eager.results) and not list(
                _differences(case, kind, tensors, ours.results, plain, true)
            ):
                continue
        yield from different


def _differences(
    case: Case, kind: str, tensors: Sequence[Tensor], ours: list[Tensor], eager: list[Tensor], true: list[Tensor]
) -> Iterator[str]:
    if len(ours) != len(eager):
        yield f"{case.name} {kind}: {len(ours)} results, eager has {len(eager)}"
        return
    defined = case.defined(*tensors) if case.defined is not None else [None] * len(eager)
    bits = case.bits
    for place, (mine, theirs, exact, where) in enumerate(zip(ours, eager, true, defined, strict=True)):
        if where is not None and mine.shape == theirs.shape:
            mine, theirs, exact = mine[where], theirs[where], exact[where]
        if not mine.is_floating_point() and not bits and mine.shape == theirs.shape == exact.shape:
            mine = torch.where((mine == exact) & (mine.dtype == theirs.dtype), theirs, mine)  # nearer than eager
        if not bits and kind != "plain" and mine.is_floating_point() and mine.shape == theirs.shape == exact.shape:
            mine = torch.where(_lost(theirs, exact), theirs, mine)
        why = disagreement(mine, theirs, theirs.double() if bits else exact, signs=bits)
        if why is None and bits and not torch.equal(torch.nan_to_num(mine), torch.nan_to_num(theirs)):
            why = f"found {mine.flatten()[:4].tolist()}, eager {theirs.flatten()[:4].tolist()}"
        if why is not None and (bits or not _as_near(case, tensors, place, mine, exact)):
            yield f"{case.name} {kind}: result {place} {why}"


def _as_near(case: Case, tensors: Sequence[Tensor], place: int, mine: Tensor, exact: Tensor) -> bool:
    """Whether a result is within the bound of eager on inputs that differ by one unit in the last place.

    On few elements eager may be lucky; how far it gets on such inputs says what can be asked of anybody.
    """
    draws = torch.Generator().manual_seed(2)
    farthest = None
    for _ in range(NEIGHBOURS):
        moved = [_moved(each.detach(), draws).requires_grad_(each.requires_grad) for each in tensors]
        eager = attempt(case.function, moved, case.slopes)
        if eager.error is not None or len(eager.results) <= place or eager.results[place].shape != mine.shape:
            continue
        there = eager.results[place]
        if not mine.is_floating_point():  # decided element by element
            mine = torch.where(mine == there, exact.to(mine.dtype), mine)
        farthest = there if farthest is None else farthest
        further = (there.double() - exact.double()).abs() > (farthest.double() - exact.double()).abs()
        farthest = torch.where(further, there, farthest)
    if farthest is None or not mine.is_floating_point():
        return torch.equal(mine, exact.to(mine.dtype))
    return disagreement(mine, farthest, exact) is None


def _moved(x: Tensor, draws: torch.Generator) -> Tensor:
    """Each number that is finite, one unit up or down; integers stay."""
    if not x.is_floating_point():
        return x
    up = torch.rand(x.shape, generator=draws) < 0.5
    return torch.where(x.isfinite(), torch.nextafter(x, torch.where(up, torch.inf, -torch.inf).to(x.dtype)), x)


def _lost(eager: Tensor, exact: Tensor) -> Tensor:
    """Where eager has no right digit left, as where numbers of the largest size cancel: there is nothing to hold."""
    eager, exact = eager.double(), exact.double()
    return torch.where(exact.isnan(), ~eager.isnan(), exact.isfinite() & ~((eager - exact).abs() <= 0.1 * exact.abs()))


def _placed(tensor: Tensor, kind: str, slopes: bool, dtype: torch.dtype | None = None) -> Tensor:
    value = filled(tensor.detach(), kind)
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    return value.requires_grad_(slopes and tensor.requires_grad)


def _repeats(case: Case, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    again = attempt(case.function, tensors, case.slopes)
    pairs = zip(results, again.results, strict=True) if len(results) == len(again.results) else [(None, None)]
    return all(first is not None and torch.equal(first.nan_to_num(), second.nan_to_num()) for first, second in pairs)


def _said(outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"{type(outcome.error).__name__}: {str(outcome.error).splitlines()[0][:100]}"
    return f"{[each.flatten()[:3].tolist() for each in outcome.results[:2]]}"


# torch's database of operators

# They return memory that nobody wrote, or views of it.
UNWRITTEN = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_")
# Their samples are sparse, or elements of one place in memory: nothing can be planted there.
UNPLANTED = ("sparse.mm", "sparse.sampled_addmm", "to_sparse", "linalg.pinv-singular")


# Kinds of values that are left out, and why.
LEFT_OUT = {
    **dict.fromkeys(
        ("var_mean", "std_mean", "var", "std", "nn.functional.layer_norm", "native_layer_norm"),
        (("inf", "-inf", "largest", "huge"), "a running mean does not overflow where a sum does: 1e37 in float32"),
    ),
    "_softmax_backward_data": (
        ("inf", "largest", "huge"),
        "probabilities beyond 1: torch's decomposition has inf - inf for them",
    ),
    "einsum": (("largest",), "its sums depend on the order of additions"),
    "masked.softmin": (("subnormal",), "nearly equal numbers cancel in its gradient: 4e-7 of 1 are left to chance"),
    "nn.functional.cosine_similarity": (("subnormal",), "a gradient that is 0 is the difference of two roundings"),
    "nn.functional.rms_norm": (("offset",), "of one element: its gradient is the difference of two roundings"),
    "nn.functional.softmin": (("subnormal", "largest"), "nearly equal numbers cancel in its gradient"),
    "torch.ops.aten._safe_softmax.default": (("subnormal",), "nearly equal numbers cancel in its gradient"),
    "special.erfcx": (("offset", "huge"), "its derivative is the difference of two roundings there"),
    "nn.functional.poisson_nll_loss": (
        ("largest", "huge"),
        "inf - inf, where a fused multiply-add has inf minus a number",
    ),
    "nn.functional.scaled_dot_product_attention": (
        ("subnormal",),
        "nearly equal scores cancel in its gradient, and torch's tracing drops others than eager",
    ),
    "nn.functional.kl_div": (("largest", "huge"), "inf - inf, where a fused multiply-add has inf minus a number"),
}


# Scores beyond 100: a probability is 1, and gradients are what two roundings differ by. Narrower dtypes hold them.
SATURATED = {("nn.functional.scaled_dot_product_attention", torch.float64)}


def operator_names() -> dict[str, OpInfo]:
    named = {f"{each.name}{each.variant_test_name and '-' + each.variant_test_name}": each for each in op_db}
    return {name: each for name, each in sorted(named.items()) if not {name, each.name} & {*UNWRITTEN, *UNPLANTED}}


def operator_cases(name: str, samples: int) -> Iterator[Case]:
    """The first samples of an operator, in every dtype that it has."""
    operator = operator_names()[name]
    for dtype in (each for each in DTYPES if each in operator.dtypes):
        slopes = operator.supports_autograd and dtype.is_floating_point and (operator.name, dtype) not in SATURATED
        given = operator.sample_inputs("cpu", dtype, requires_grad=slopes)
        for number, sample in enumerate(itertools.islice(given, samples)):
            function, tensors = called(operator, sample)
            word = str(dtype).removeprefix("torch.")
            left_out, _ = LEFT_OUT.get(operator.name, ((), ""))
            kinds = [kind for kind in ALL_KINDS if kind not in left_out]
            yield Case(f"operator {name} {word} {number}", function, tensors, kinds, slopes)


def called(operator: OpInfo, sample: Any) -> tuple[Function, list[Tensor]]:
    """An operator as a function of its sample's tensors, and these."""
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [place for place, each in enumerate(flat) if torch.is_tensor(each)]

    def run(*tensors: Tensor) -> list[Tensor]:
        given = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        first, args, kwargs = tree_unflatten(given, spec)
        return [each for each in tree_leaves(operator(first, *args, **kwargs)) if torch.is_tensor(each)]

    return run, [flat[place] for place in places]


# Operators that read by an index and look at it first. Others read what is there.
INDEXED = """
    nn.functional.embedding nn.functional.cross_entropy nn.functional.nll_loss nn.functional.multi_margin_loss gather
    index_select index_add index_copy index_fill scatter scatter_add take take_along_dim index_put __getitem__
"""


def index_cases(name: str, samples: int) -> Iterator[Case]:
    """An operator that reads by an index, with one that is negative, one beyond the end, and one far beyond it."""
    operator = operator_names()[name]
    given = operator.sample_inputs("cpu", torch.float32, requires_grad=True)
    for number, sample in enumerate(itertools.islice(given, samples)):
        function, tensors = called(operator, sample)
        places = [place for place, each in enumerate(tensors) if each.dtype == torch.int64 and each.numel()]
        sizes = [size for each in tensors if each.is_floating_point() for size in each.shape]
        for place, bad in itertools.product(places, BAD_INDICES):
            changed = tensors[place].clone()
            changed.view(-1)[-1] = {"-1": -1, "size": max(sizes, default=1), "far": 1 << 40}[bad]
            with_bad = [*tensors[:place], changed, *tensors[place + 1 :]]
            yield Case(f"index {name} {number} {place} {bad}", function, with_bad, ("plain",), True)


# Chains of two operators


def _halves(x: Tensor) -> Tensor:
    return torch.cat([x[..., : x.shape[-1] // 2], -x[..., x.shape[-1] // 2 :]], -1)


UNARY = """
    exp log sqrt rsqrt sin cos tanh sigmoid erf neg abs reciprocal square relu log1p expm1 logical_not isnan clone
"""
ELEMENTS: dict[str, Function] = {
    **{name: getattr(torch, name) for name in UNARY.split()},
    **{name: getattr(functional, name) for name in ("gelu", "silu", "softplus", "elu", "leaky_relu", "hardswish")},
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "logsigmoid": functional.logsigmoid,
    "x ** 3": lambda x: x**3,
    "x ** -0.5": lambda x: x**-0.5,
    "x ** 1.7": lambda x: x**1.7,
    "x + 1": lambda x: x + 1,
    "x + 1.003": lambda x: x + 1.003,
    "1 - x": lambda x: 1 - x,
    "3 x": lambda x: x * 3,
    "x / 3": lambda x: x / 3,
    "1.003 / x": lambda x: 1.003 / x,
    "x x": lambda x: x * x,
    "x - x": lambda x: x - x,
    "clamp": lambda x: x.clamp(-1.003, 0.7),
    "where": lambda x: torch.where(x > 0.503, x, 1.003),
    "masked": lambda x: x.masked_fill(x < 0, -1.003),
    "maximum": lambda x: torch.maximum(x, -x),
    "x < 1.003": lambda x: x < 1.003,
    "x == x": lambda x: x == x,
}
ROWS: dict[str, Function] = {
    "sum": lambda x: x.sum(-1, keepdim=True),
    "sum of columns": lambda x: x.sum(0, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "mean of all": lambda x: x.mean(),
    "amax": lambda x: x.amax(-1, keepdim=True),
    "variance": lambda x: x.var(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "norm": lambda x: x.norm(dim=-1, keepdim=True),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "RMS norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "RMS norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "transposed": lambda x: (x.t() + 1).t(),
    "halves": _halves,
    "twice": lambda x: torch.stack([x, x]).sum(0),
}
CHAINED = {**ELEMENTS, **ROWS}


# Kinds of values that a first operator does not get, and pairs that are not compared.
CHAIN_LEFT_OUT: dict[str, tuple[str, ...]] = {
    "any": ("largest",),  # whose sums depend on the order of additions
    "halves": ("huge",),  # of both signs after it: likewise
    "layer norm": ("huge",),  # a running mean does not overflow where a sum does
    # Of two zeros eager takes either: by vectors of several elements 0.0, in the rest of a row the first.
    "relu": ("zeros",),
    "maximum": ("zeros",),
}
# Rows of nearly equal numbers after the first: what is left of them without their mean is the rounding of a sum.
UNSTEADY = set(itertools.product(("clamp", "log", "log1p"), ("layer norm", "centred", "variance")))


def chain_cases(first: str, dtype: torch.dtype) -> Iterator[Case]:
    """An operator, and every other one after it: one program, so that kernels hold both."""

    def run(x: Tensor) -> list[Tensor]:
        value = CHAINED[first](x)
        if not value.is_floating_point():
            return [value, *(value.to(each) for each in FLOATS)]
        values = [CHAINED[name](value) for name in CHAINED if (first, name) not in UNSTEADY]
        return [*values, *(value.to(each).to(x.dtype) for each in FLOATS)]

    x = torch.linspace(-2.5, 3.5, 3 * 34, dtype=torch.float64).reshape(3, 34).to(dtype)
    word = str(dtype).removeprefix("torch.")
    left_out = CHAIN_LEFT_OUT["any"] + CHAIN_LEFT_OUT.get(first, ())
    kinds = [kind for kind in ALL_KINDS if kind not in left_out]
    yield Case(f"chain {first} {word}", run, [x], kinds)


# Casts through every pair of dtypes


def cast_cases(source: torch.dtype) -> Iterator[Case]:
    """Casts from a dtype to a second and a third, and one operator after them."""
    ways = [(second, third) for second in DTYPES for third in DTYPES]

    def run(x: Tensor) -> list[Tensor]:
        return [x.to(second).to(third) for second, third in ways]

    def defined(x: Tensor) -> list[Tensor]:
        """Where no floating-point number becomes an integer that its dtype has not: C++ leaves that open."""
        masks = []
        for second, third in ways:
            middle = x.to(second)
            masks.append(_holds(x, second) & (_holds(middle, third) | ~_holds(x, second)))
        return masks

    values = torch.tensor([0.0, 1.0, 2.5, -1.5, 100.0, 3e3, 7e4, 1e10, 1e30, 1e-30, 6e-8, 1e-40, -7e4, 1.003])
    x = values.double().to(source) if source.is_floating_point else torch.tensor([0, 1, 2, 3, 100, 127]).to(source)
    yield Case(f"casts from {str(source).removeprefix('torch.')}", run, [x], defined=defined, bits=True)


def _holds(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype == torch.bool or not x.is_floating_point():
        return torch.ones_like(x, dtype=torch.bool)
    limits, whole = torch.iinfo(dtype), x.double().trunc()
    return whole.isfinite() & (whole >= limits.min) & (whole <= limits.max) & (whole < 2.0**62)


# Numbers that compare equal and are not

EQUAL = ((0.0, -0.0), (0, 0.0, False), (1, 1.0, True), (2, 2.0), (1.003, 1.0030000000000001))
WITH_NUMBER: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "x + n": lambda x, n: x + n,
    "x - n": lambda x, n: x - n,
    "n - x": lambda x, n: n - x,
    "x n": lambda x, n: x * n,
    "x / n": lambda x, n: x / n,
    "x ** n": lambda x, n: x**n,
    "power by a tensor": lambda x, n: torch.pow(x, torch.full_like(x, n)),
    "copysign": lambda x, n: torch.copysign(x, n),
    "fmod": lambda x, n: torch.fmod(x, n),
    "full": lambda x, n: torch.full((2,), n),
    "full like": lambda x, n: torch.full_like(x, n) * x,
    "where": lambda x, n: torch.where(x > 0, x, n),
    "masked": lambda x, n: x.masked_fill(x > 0, n),
    "clamp": lambda x, n: x.clamp(min=n),
    "equal": lambda x, n: x == n,
    "less": lambda x, n: x < n,
    "a tensor": lambda x, n: x * torch.tensor(n, dtype=x.dtype),
}


POWER = "power by a tensor"  # the only one that no library rounds correctly


def constant_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Programs that hold several numbers which are equal in Python; what eager refuses is a program of its own."""
    for numbers in EQUAL:
        x = torch.tensor([0.0, -0.0, 0.3, -0.7, 1.0, 1.0, 2.0, 3.0]).to(dtype)
        calls = list(itertools.product(WITH_NUMBER, numbers))
        refused = [call for call in calls if attempt(WITH_NUMBER[call[0]], [x, call[1]], False).error is not None]
        programs = {str(call): [call] for call in refused}
        rest = [call for call in calls if call not in refused]
        programs["all"] = [call for call in rest if call[0] != POWER]
        programs[POWER] = [call for call in rest if call[0] == POWER]
        for name, together in programs.items():

            def run(x: Tensor, together: Sequence[tuple[str, Any]] = together) -> list[Tensor]:
                return [WITH_NUMBER[function](x, number) for function, number in together]

            word = str(dtype).removeprefix("torch.")
            kinds = KINDS if dtype.is_floating_point else ("plain",)
            yield Case(f"constants {numbers} {word} {name}", run, [x], kinds, bits=name != POWER)


# Sizes that change, through torch.compile


def _attended(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).chunk(3, -1)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _weights(*shapes: Sequence[int]) -> list[Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=draws) * 0.3 for shape in shapes]


# For each its function of data and weights, the data for a size, and the weights.
CHANGING: dict[str, tuple[Function, Callable[[int], Tensor], list[Tensor]]] = {
    "convolution": (
        lambda x, w, b: functional.gelu(functional.conv2d(x, w, b)).mean((2, 3)),
        lambda n: torch.randn(n, 3, 7, 7),
        _weights([4, 3, 3, 3], [4]),
    ),
    "convolution of a line": (
        lambda x, w: functional.conv1d(x, w, padding=1).relu(),
        lambda n: torch.randn(2, 3, 4 + n),
        _weights([4, 3, 3]),
    ),
    "loss": (
        lambda x, w: functional.cross_entropy(x @ w, torch.arange(x.shape[0]) % 5),
        lambda n: torch.randn(n, 6),
        _weights([6, 5]),
    ),
    "table": (
        lambda x, w: functional.embedding(x.long().abs() % 5, w).mean(0),
        lambda n: torch.randn(n, 3),
        _weights([5, 4]),
    ),
    "attention": (_attended, lambda n: torch.randn(2, n, 8), _weights([8, 24])),
    "norm": (
        lambda x, w, b: functional.layer_norm(x, [6], w, b).tanh(),
        lambda n: torch.randn(n, 6),
        _weights([6], [6]),
    ),
    "parts": (
        lambda x, w: torch.cat([x[1:], x[:1]]).transpose(0, 1).reshape(-1) * w,
        lambda n: torch.randn(n, 4),
        _weights([1]),
    ),
}


def wrong_sizes(name: str) -> Iterator[str]:
    """Programs whose sizes change: eager's numbers, and no piece left as traced that is compiled for known sizes."""
    function, data, weights = CHANGING[name]
    for slopes in (True, False):  # of the data
        left: dict[bool | None, int] = {}
        for dynamic in (False, True):
            torch._dynamo.reset()
            backend = Backend()
            run = torch.compile(function, backend=backend, dynamic=dynamic)
            for size in (5, 2, 9):
                x = data(size).requires_grad_(slopes)
                given = [x, *(each.clone().requires_grad_() for each in weights)]
                eager, ours = attempt(function, given, True), attempt(run, given, True)
                wide = [each.detach().double().requires_grad_(each.requires_grad) for each in given]
                exact = attempt(function, wide, True)
                case = Case(f"sizes {name} {'of' if slopes else 'without'} data's gradient {size}", function, given)
                if ours.error is not None or eager.error is not None:
                    yield f"{case.name}: ours {_said(ours)}, eager's {_said(eager)}"
                    continue
                yield from _differences(case, "plain", given, ours.results, eager.results, exact.results)
            left[dynamic] = sum(piece.graph is None for piece in backend.report.pieces)
        if left[True] and not left[False]:
            yield f"sizes {name}: {left[True]} pieces run as traced where sizes change, none where they are known"


# All of them


def parts(samples: int) -> dict[str, Callable[[str | None], Iterator[str]]]:
    """The gate in parts that can run one by one: for each its name and what it finds, given how kernels are made."""

    def of(make: Callable[[], Iterator[Case]]) -> Callable[[str | None], Iterator[str]]:
        return lambda way: (each for case in make() for each in wrong(case, way))

    found: dict[str, Callable[[str | None], Iterator[str]]] = {}
    for source in DTYPES:
        found[f"casts {source}"] = of(lambda source=source: cast_cases(source))  # type: ignore[misc]
    for dtype in (*FLOATS, torch.float64, torch.int64):
        found[f"constants {dtype}"] = of(lambda dtype=dtype: constant_cases(dtype))  # type: ignore[misc]
    for name, operator in operator_names().items():
        if operator.name in INDEXED.split():
            found[f"index {name}"] = of(lambda name=name: index_cases(name, samples))  # type: ignore[misc]
    for name, dtype in itertools.product(CHAINED, FLOATS):
        found[f"chain {name} {dtype}"] = of(lambda name=name, dtype=dtype: chain_cases(name, dtype))  # type: ignore[misc]
    for name in CHANGING:
        found[f"sizes {name}"] = lambda way, name=name: wrong_sizes(name)  # type: ignore[misc]
    for name in operator_names():
        found[f"operator {name}"] = of(lambda name=name: operator_cases(name, samples))  # type: ignore[misc]
    return found


def findings(name: str, samples: int = 3, way: str | None = None) -> list[str]:
    """What one part finds, each as one line."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [" ".join(each.split()) for each in parts(samples)[name](way or way_for(torch.device("cpu")))]


def _job(given: tuple[str, int, str | None]) -> tuple[str, list[str]]:
    torch.set_num_threads(1)
    try:
        return given[0], findings(*given)
    except Exception as error:
        return given[0], [f"{given[0]}: the gate itself: {type(error).__name__}: {error}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--match", default="", help="only parts whose names have this")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="every N-th part, beginning with the I-th")
    parser.add_argument("--samples", type=int, default=3, help="of each operator in each dtype")
    parser.add_argument("--way", choices=("c", "interpret"), help="how kernels are made")
    options = parser.parse_args()
    begin, step = map(int, options.share.split("/"))
    names = [name for name in parts(options.samples) if options.match in name][begin - 1 :: step]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        with multiprocessing.get_context("spawn").Pool(options.n, maxtasksperchild=40) as pool:
            jobs = [(name, options.samples, options.way) for name in names]
            bad = 0
            for _, lines in pool.imap_unordered(_job, jobs):
                for line in lines:
                    print(line, flush=True)
                bad += len(lines)
    print(f"{len(names)} parts, {bad} findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
