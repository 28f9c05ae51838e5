"""Regions as C, compiled by the system's compiler: one library for all kernels of a program.

The rows of a region are shared among threads. Within a row, each reduction ends a run over its columns; what a later
run needs again is computed again, or kept in a buffer if it is costly. Loops over columns use vector instructions
(`omp simd`), sums over the rows are kept per thread in double precision and added in the order of the threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from tilemesh.core.c_library import NATIVE, build_library
from tilemesh.graph.ir import Node
from tilemesh.graph.kernel_plan import KernelPlan, needed, operand
from tilemesh.graph.kernel_writer import KernelWriter
from tilemesh.graph.ops import FLOATS, primitive
from tilemesh.graph.regions import FULL

DTYPES = {"float32": "float", "float64": "double", "bfloat16": "uint16_t", "int64": "int64_t", "int32": "int32_t"}
DTYPES |= {"bool": "uint8_t"}
PARALLEL = 16_384  # elements of a region above which threads pay
BLOCK = 4_096  # columns that a thread takes at once where a region has one row
SUMMED = 1_024  # columns that are added in an operand's own precision: a long row's sum would lose digits
_COMPUTED = DTYPES | {"bfloat16": "float"}
_OPTIONS = ("-O3", NATIVE, "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-std=gnu11", "-fopenmp")


class CWriter(KernelWriter):
    """One kernel as a function of C."""

    language, dtypes, divide = "c", tuple(DTYPES), "/"

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        self.buffers = self._buffers()

    def _buffers(self) -> dict[Node, str]:
        """Costly full values that a later run needs again: they go into a buffer of a row."""
        buffers: dict[Node, str] = {}
        for run in range(1, self.runs):
            reduced = [operand(node.inputs[0]) for node in (*self.reductions(run), *self.added(run))]
            ends = [*reduced, *self.results(run)]
            earlier = {node for node in self.ready if self.ready[node] < run}
            computed = needed(self.plan, ends, earlier)
            for value in [*ends, *(operand(value) for node in computed for value in node.inputs)]:
                self._walk(value, run, buffers)
        return buffers

    def _walk(self, value: Node, run: int, buffers: dict[Node, str]) -> None:
        if self.plan.levels.get(value) != FULL or self.ready[value] >= run or value in buffers:
            return
        if primitive(value.op).costly:
            buffers[value] = f"kept{len(buffers)}"
            return
        for each in value.inputs:
            self._walk(operand(each), run, buffers)

    def kept(self, run: int) -> list[Node]:
        return [node for node in self.buffers if self.ready[node] == run]

    def write(self) -> str:
        """The function; its name is @."""
        rows, columns = self.rows, self.columns
        if self.sums:
            self.say("int most = omp_get_max_threads();")
        for place in range(len(self.sums)):
            self.say(f"double* total{place} = calloc((size_t)most * {columns}, 8);")
        self.say(f"#pragma omp parallel if((int64_t){rows} * {columns} > {PARALLEL})")
        self.say("{")
        for node, name in self.buffers.items():
            kind = _COMPUTED[node.dtype]
            self.say(f"{kind}* restrict {name} = malloc({columns} * sizeof({kind}));")
        for place in range(len(self.sums)):
            self.say(f"double* restrict sum{place} = total{place} + (size_t)omp_get_thread_num() * {columns};")
        self.say("#pragma omp for schedule(static)")
        if rows == 1 and not self.plan.reduces:
            self.say(f"for (int64_t block = 0; block < ({columns} + {BLOCK - 1}) / {BLOCK}; block++) {{")
            self.say("const int64_t row = 0;")
            self.say(f"const int64_t begin = block * {BLOCK};")
            self.say(f"const int64_t end = begin + {BLOCK} < {columns} ? begin + {BLOCK} : {columns};")
        else:
            self.say(f"for (int64_t row = 0; row < {rows}; row++) {{")
            self.say(f"const int64_t begin = 0, end = {columns};")
        self.by_runs()
        self.say("}")
        for name in self.buffers.values():
            self.say(f"free({name});")
        self.say("}")
        for place, node in enumerate(self.sums):
            self.say(f"for (int64_t column = 0; column < {columns}; column++) {{ double value = 0.0;")
            self.say(
                f"for (int thread = 0; thread < most; thread++) value += total{place}[thread * {columns} + column];"
            )
            self.say(f"o{self.stored[node]}[column] = {_stored(node, f'({_COMPUTED[node.dtype]})value')}; }}")
            self.say(f"free(total{place});")
        body = self.plan.body
        reads = [f"const {DTYPES[node.dtype]}* restrict i{place}" for place, node in enumerate(body.inputs)]
        writes = [f"{DTYPES[node.dtype]}* restrict o{place}" for place, node in enumerate(body.outputs)]
        return f"void @({', '.join(reads + writes)}) {{\n" + "\n".join(self.lines) + "\n}\n"

    def define(self, name: str, dtype: str, expression: str) -> None:
        self.say(f"const {_COMPUTED[dtype]} {name} = {expression};")

    def read(self, place: int, terms: Sequence[str], dtype: str, mask: str) -> str:
        value = f"i{place}[{' + '.join(terms) or '0'}]"
        return f"read_bf16({value})" if dtype == "bfloat16" else value

    def store(self, node: Node, at: str, mask: str) -> None:
        self.say(f"o{self.stored[node]}[{at}] = {_stored(node, self.names[node])};")

    def open_run(self, run: int, reductions: Sequence[Node]) -> dict[Node, str]:
        held, clauses, parts = {}, [], []
        for node in reductions:
            name = held[node] = self.fresh("v")
            if node.op == "sum":
                self.say(f"double {name}_all = 0;")
                parts.append(f"{_COMPUTED[node.dtype]} {name} = 0;")
                clauses.append(f"reduction(+:{name})")
            else:
                self.say(f"{_COMPUTED[node.dtype]} {name} = -INFINITY; int {name}_bad = 0;")
                clauses.append(f"reduction(max:{name}) reduction(|:{name}_bad)")
        first, last = ("first", "last") if parts else ("begin", "end")
        if parts:
            self.say(f"for (int64_t first = begin; first < end; first += {SUMMED}) {{")
            self.say(f"const int64_t last = first + {SUMMED} < end ? first + {SUMMED} : end; {' '.join(parts)}")
        self.say(f"#pragma omp simd {' '.join(clauses)}")
        self.say(f"for (int64_t column = {first}; column < {last}; column++) {{")
        for node, buffer in self.buffers.items():
            if self.ready[node] < run:
                self.names[node] = self.fresh("v")
                self.define(self.names[node], node.dtype, f"{buffer}[column]")
        return held

    def accumulate(self, node: Node, held: Mapping[Node, str]) -> None:
        value = self.value(node.inputs[0])
        if node in self.sums:
            self.say(f"sum{self.sums.index(node)}[column] += {value};")
        elif node.op == "sum":
            self.say(f"{held[node]} += {value};")
        else:
            name = held[node]
            self.say(f"{name}_bad |= {value} != {value};")
            self.say(f"{name} = {name} > {value} ? {name} : {value};")

    def close_run(self, run: int, held: Mapping[Node, str]) -> None:
        for node in self.kept(run):
            self.say(f"{self.buffers[node]}[column] = {self.names[node]};")
        self.say("}")
        sums = [f"{name}_all += {name};" for node, name in held.items() if node.op == "sum"]
        if sums:
            self.say(" ".join([*sums, "}"]))

    def reduced(self, node: Node, held: Mapping[Node, str]) -> str:
        name, kind = held[node], _COMPUTED[node.dtype]
        self.say(f"if ({name}_bad) {name} = NAN;" if node.op == "amax" else f"const {kind} {name} = {name}_all;")
        return name

    def words(self, dtype: str) -> dict[str, str]:
        double = dtype == "float64"
        return {"type": _COMPUTED[dtype], "f": "" if double else "f", "fast": "" if double else "fast_"}

    def cast(self, node: Node, value: str) -> str:
        if node.dtype == "bool":
            return f"{value} != 0"
        inner, kind = operand(node.inputs[0]), _COMPUTED[node.dtype]
        if node.dtype in FLOATS and inner.op == "cast" and "int" in inner.dtype and inner.inputs[0].dtype in FLOATS:
            # gcc writes (float)(int)x as trunc(x), which is -0.0 for x = -0.5: the sum is 0.0.
            value = f"(trunc({self.value(inner.inputs[0])}) + 0.0)"
        return f"round_bf16(({kind}){value})" if node.dtype == "bfloat16" else f"({kind}){value}"

    def literal(self, number: float | int, dtype: str) -> str:
        if dtype not in FLOATS:
            return str(number)
        if number != number:
            return "NAN"
        if number in (float("inf"), float("-inf")):
            return "INFINITY" if number > 0 else "(-INFINITY)"
        return f"({number!r}{'' if dtype == 'float64' else 'f'})"


def _stored(node: Node, value: str) -> str:
    return f"write_bf16({value})" if node.dtype == "bfloat16" else value


def write_kernels(plans: Sequence[KernelPlan]) -> tuple[str, list[str]]:
    """The text of a library with these kernels, and the name of each; equal ones are written once."""
    names: dict[str, str] = {}
    order, texts = [], []
    for plan in plans:
        text = CWriter(plan).write()
        if text not in names:
            names[text] = f"region{len(names)}"
            texts.append(text.replace("@", names[text], 1))
        order.append(names[text])
    return "\n".join(texts), order


def load_kernels(plans: Sequence[KernelPlan]) -> list[Any]:
    """The kernels of these plans, compiled or taken from the cache."""
    text, names = write_kernels(plans)
    library = load_library(text)
    return [
        kernel_function(library, name, len(plan.body.inputs) + len(plan.body.outputs))
        for plan, name in zip(plans, names, strict=True)
    ]


def load_library(text: str) -> ctypes.CDLL:
    """The library of kernels with this text."""
    whole = (files("tilemesh.graph") / "kernel_math.h").read_text() + text
    return ctypes.CDLL(str(build_library("graph", whole, _OPTIONS, [*_openmp(), "-lm"])))


def kernel_function(library: ctypes.CDLL, name: str, tensors: int, sizes: int = 0) -> Any:
    """A kernel of a library, called with the addresses of its tensors and the sizes that its text leaves open."""
    function = library[name]
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * tensors + [ctypes.c_int64] * sizes
    return function


def _openmp() -> list[str]:
    """OpenMP through the library that torch has loaded: two of them would each keep threads of their own."""
    libraries = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*")) + sorted(
        (Path(torch.__file__).parent.parent / "torch.libs").glob("libgomp*.so*")
    )
    return ["-fopenmp", str(libraries[0])] if libraries else ["-fopenmp"]
