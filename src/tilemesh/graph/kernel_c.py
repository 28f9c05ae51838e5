"""Regions as C, compiled by the system's compiler: one library for all kernels of a program.

The rows of a region are shared among threads. Within a row, each reduction ends a run over its columns; what a later
run needs again is computed again, or kept in a buffer if it is costly. Loops over columns use vector instructions
(`omp simd`), sums over the rows are kept per thread in double precision and added in the order of the threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from tilemesh.core.c_library import NATIVE, build_library
from tilemesh.graph.ir import Node
from tilemesh.graph.kernel_plan import COSTLY, KernelPlan, needed, offset_terms, operand, passes
from tilemesh.graph.ops import FLOATS
from tilemesh.graph.regions import COLUMN, FULL, ROW
from tilemesh.graph.rewrite import number_of

DTYPES = {"float32": "float", "float64": "double", "bfloat16": "uint16_t", "int64": "int64_t", "int32": "int32_t"}
DTYPES |= {"bool": "uint8_t"}
PARALLEL = 16_384  # elements of a region above which threads pay
BLOCK = 4_096  # columns that a thread takes at once where a region has one row
_COMPUTED = DTYPES | {"bfloat16": "float"}
_BINARY = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
_COMPARE = {"equal": "==", "less": "<", "less_equal": "<="}
_OPTIONS = ("-O3", NATIVE, "-fno-math-errno", "-fno-trapping-math", "-std=gnu11", "-fopenmp")
_FLOAT = {name: f"fast_{name}" for name in ("exp", "log", "tanh", "sigmoid", "erf")}
_FLOAT |= {"sqrt": "sqrtf", "sin": "sinf", "cos": "cosf", "absolute": "fabsf", "power": "powf"}
_DOUBLE = {name: name for name in ("exp", "log", "tanh", "erf", "sqrt", "sin", "cos")}
_DOUBLE |= {"sigmoid": "slow_sigmoid", "absolute": "fabs", "power": "pow"}


def serves(node: Node) -> bool:
    """Whether C can compute a node: dtypes it has, and functions."""
    if any(value.dtype not in DTYPES for value in (node, *node.inputs)):
        return False
    if node.op in ("sum", "amax") or node.op in _FLOAT:
        return node.dtype in FLOATS
    if node.op == "divide":
        return node.dtype in FLOATS
    return node.op in (*_BINARY, "maximum", "minimum", "negate", "sign", "compare", "where", "cast")


class _CWriter:
    """One kernel."""

    def __init__(self, plan: KernelPlan, name: str) -> None:
        self.plan, self.name = plan, name
        self.ready, self.runs = passes(plan)
        self.stored = {node: place for place, node in enumerate(plan.body.outputs)}
        self.names: dict[Node, str] = {}
        self.kept = self._kept()
        self.sums = [node for node in plan.members if plan.levels[node] == COLUMN]

    def _kept(self) -> dict[Node, str]:
        """Costly full values that a later run needs again: they go into a buffer of a row."""
        kept: dict[Node, str] = {}
        for run in range(1, self.runs):
            starts = self._starts(self._roots(run))
            earlier = {node for node in self.ready if self.ready[node] < run}
            computed = needed(self.plan, starts, earlier)
            for value in [*starts, *(operand(value) for node in computed for value in node.inputs)]:
                self._walk(value, run, kept)
        return kept

    def _walk(self, value: Node, run: int, kept: dict[Node, str]) -> None:
        if self.plan.levels.get(value) != FULL or self.ready[value] >= run or value in kept:
            return
        if value.op in COSTLY:
            kept[value] = f"kept{len(kept)}"
            return
        for each in value.inputs:
            self._walk(operand(each), run, kept)

    def _starts(self, roots: Sequence[Node]) -> list[Node]:
        """The values that a run computes for its roots: results themselves, and what is reduced."""
        reduced = [operand(value) for node in roots for value in node.inputs if self.plan.levels[node] != FULL]
        return reduced + [node for node in roots if self.plan.levels[node] == FULL]

    def _roots(self, run: int) -> list[Node]:
        """What a run is for: reductions that end with it, results, and values to keep."""
        plan = self.plan
        roots = []
        for node in plan.members:
            level = plan.levels[node]
            if level == ROW and node.op in ("sum", "amax") and self.ready[node] == run + 1:
                roots.append(node)
            if level == COLUMN and self.ready[node] == run:
                roots.append(node)
            if level == FULL and self.ready[node] == run and node in self.stored:
                roots.append(node)
        return roots

    def write(self) -> str:
        plan = self.plan
        reads = [f"const {DTYPES[node.dtype]}* restrict i{place}" for place, node in enumerate(plan.body.inputs)]
        writes = [f"{DTYPES[node.dtype]}* restrict o{place}" for place, node in enumerate(plan.body.outputs)]
        head = f"void {self.name}({', '.join(reads + writes)})"
        rows, columns = plan.row_count, plan.column_count
        one_row = rows == 1 and not plan.reduces
        lines: list[str] = []
        threads = f"if({int(rows * columns > PARALLEL)})"
        if self.sums:
            lines.append("int most = omp_get_max_threads();")
            lines += [f"double* total{place} = calloc((size_t)most * {columns}, 8);" for place in range(len(self.sums))]
        lines.append(f"#pragma omp parallel {threads}")
        lines.append("{")
        lines += [
            f"{_COMPUTED[node.dtype]}* restrict {name} = malloc({columns} * sizeof({_COMPUTED[node.dtype]}));"
            for node, name in self.kept.items()
        ]
        lines += [
            f"double* restrict sum{place} = total{place} + (size_t)omp_get_thread_num() * {columns};"
            for place in range(len(self.sums))
        ]
        lines.append("#pragma omp for schedule(static)")
        if one_row:
            lines.append(f"for (int64_t block = 0; block < {-(-columns // BLOCK)}; block++) {{")
            lines.append("const int64_t row = 0;")
            lines.append(f"const int64_t begin = block * {BLOCK};")
            lines.append(f"const int64_t end = begin + {BLOCK} < {columns} ? begin + {BLOCK} : {columns};")
        else:
            lines.append(f"for (int64_t row = 0; row < {rows}; row++) {{")
            lines.append(f"const int64_t begin = 0, end = {columns};")
        lines += self._row()
        lines.append("}")
        lines += [f"free({name});" for name in self.kept.values()]
        lines.append("}")
        for place, node in enumerate(self.sums):
            lines.append(f"for (int64_t column = 0; column < {columns}; column++) {{ double value = 0.0;")
            lines.append(
                f"for (int thread = 0; thread < most; thread++) value += total{place}[thread * {columns} + column];"
            )
            lines.append(f"o{self.stored[node]}[column] = {_stored(node, f'({_COMPUTED[node.dtype]})value')}; }}")
            lines.append(f"free(total{place});")
        return f"{head} {{\n" + "\n".join(lines) + "\n}\n"

    def _row(self) -> list[str]:
        lines = []
        for leaf, read in self.plan.reads.items():
            if read.level == ROW:
                self.names[leaf] = f"a{len(self.names)}"
                lines.append(self._loaded(leaf))
        for run in range(self.runs):
            lines += self._row_values(run)
            lines += self._run(run)
        lines += self._row_values(self.runs)
        return lines

    def _row_values(self, run: int) -> list[str]:
        """Values of a row that are known once the runs before this one are done."""
        lines = []
        for node in self.plan.members:
            if self.plan.levels[node] != ROW or self.ready[node] != run:
                continue
            if node.op not in ("sum", "amax"):
                self.names[node] = f"v{len(self.names)}"
                lines.append(f"{_COMPUTED[node.dtype]} {self.names[node]} = {self._expression(node)};")
            if node in self.stored:
                lines.append(f"o{self.stored[node]}[row] = {_stored(node, self.names[node])};")
        return lines

    def _run(self, run: int) -> list[str]:
        roots = self._roots(run)
        keep = [node for node in self.kept if self.ready[node] == run]
        if not roots and not keep:
            return []
        outer = dict(self.names)
        lines, reductions, after = [], [], []
        for node in roots:
            if self.plan.levels[node] == ROW:
                name = outer[node] = self.names[node] = f"v{len(self.names)}"
                kind = _COMPUTED[node.dtype]
                lines.append(f"{kind} {name} = {'0' if node.op == 'sum' else '-INFINITY'};")
                reductions.append(f"reduction({'+' if node.op == 'sum' else 'max'}:{name})")
                if node.op == "amax":
                    lines.append(f"int {name}_bad = 0;")
                    reductions.append(f"reduction(|:{name}_bad)")
                    after.append(f"if ({name}_bad) {name} = NAN;")
        lines.append(f"#pragma omp simd {' '.join(reductions)}")
        lines.append("for (int64_t column = begin; column < end; column++) {")
        available = {node for node in self.kept if self.ready[node] < run}
        starts = self._starts(roots) + keep
        for node in available:
            self.names[node] = f"v{len(self.names)}"
            lines.append(f"const {_COMPUTED[node.dtype]} {self.names[node]} = {self.kept[node]}[column];")
        computed = list(needed(self.plan, starts, available))
        for leaf, read in self.plan.reads.items():
            if read.level == FULL and self._used(leaf, [*computed, *roots]):
                self.names[leaf] = f"a{len(self.names)}"
                lines.append(self._loaded(leaf))
        for node in computed:
            self.names[node] = f"v{len(self.names)}"
            lines.append(f"const {_COMPUTED[node.dtype]} {self.names[node]} = {self._expression(node)};")
        for node in keep:
            lines.append(f"{self.kept[node]}[column] = {self.names[node]};")
        for node in roots:
            lines += self._rooted(node)
        lines.append("}")
        self.names = {**outer, **{node: name for node, name in self.names.items() if self.plan.levels.get(node) == ROW}}
        return lines + after

    def _used(self, leaf: Node, nodes: Sequence[Node]) -> bool:
        return any(operand(value) is leaf for node in nodes for value in node.inputs)

    def _rooted(self, node: Node) -> list[str]:
        level = self.plan.levels[node]
        if level == FULL:
            at = f"row * {self.plan.column_count} + column" if self.plan.row_count > 1 else "column"
            return [f"o{self.stored[node]}[{at}] = {_stored(node, self.names[node])};"]
        value = self._value(node.inputs[0])
        if level == COLUMN:
            return [f"sum{self.sums.index(node)}[column] += {value};"]
        name = self.names[node]
        if node.op == "sum":
            return [f"{name} += {value};"]
        return [f"{name}_bad |= {value} != {value};", f"{name} = {name} > {value} ? {name} : {value};"]

    def _loaded(self, leaf: Node) -> str:
        read = self.plan.reads[leaf]
        terms = offset_terms("row", self.plan.rows, read.rows, "/")
        if read.level == FULL:
            terms += offset_terms("column", self.plan.columns, read.columns, "/")
        value = f"i{read.input}[{' + '.join(terms) or '0'}]"
        loaded = f"read_bf16({value})" if leaf.dtype == "bfloat16" else value
        return f"const {_COMPUTED[leaf.dtype]} {self.names[leaf]} = {loaded};"

    def _value(self, node: Node) -> str:
        number = number_of(node)
        if number is not None:
            return _literal(float(number) if node.dtype in FLOATS else int(number), node.dtype)
        leaf = operand(node)
        return "column" if leaf.op == "iota" else self.names[leaf]

    def _expression(self, node: Node) -> str:
        values = [self._value(value) for value in node.inputs]
        kind = _COMPUTED[node.dtype]
        functions = _DOUBLE if node.dtype == "float64" else _FLOAT
        if node.op in _BINARY:
            return f"{values[0]} {_BINARY[node.op]} {values[1]}"
        if node.op == "compare":
            return f"{values[0]} {_COMPARE[node['kind']]} {values[1]}"
        if node.op == "where":
            return f"{values[0]} ? {values[1]} : {values[2]}"
        if node.op in ("maximum", "minimum"):
            sign = ">" if node.op == "maximum" else "<"
            first, second = values
            return f"{first} {sign} {second} || {first} != {first} ? {first} : {second}"
        if node.op == "negate":
            return f"-{values[0]}"
        if node.op == "sign":
            return f"({kind})(({values[0]} > 0) - ({values[0]} < 0))"
        if node.op == "cast":
            if node.dtype == "bool":
                return f"{values[0]} != 0"
            inner = operand(node.inputs[0])
            if node.dtype in FLOATS and inner.op == "cast" and "int" in inner.dtype and inner.inputs[0].dtype in FLOATS:
                # gcc writes (float)(int)x as trunc(x), which is -0.0 for x = -0.5: the sum is 0.0.
                values = [f"(trunc({self._value(inner.inputs[0])}) + 0.0)"]
            return f"round_bf16(({kind}){values[0]})" if node.dtype == "bfloat16" else f"({kind}){values[0]}"
        return f"{functions[node.op]}({', '.join(values)})"


def _stored(node: Node, value: str) -> str:
    return f"write_bf16({value})" if node.dtype == "bfloat16" else value


def _literal(number: float | int, dtype: str) -> str:
    if dtype not in FLOATS:
        return str(int(number))
    if number != number:
        return "NAN"
    if number in (float("inf"), float("-inf")):
        return "INFINITY" if number > 0 else "(-INFINITY)"
    return f"({float(number)!r}{'' if dtype == 'float64' else 'f'})"


def write_kernels(plans: Sequence[KernelPlan]) -> tuple[str, list[str]]:
    """The text of a library with these kernels, and the name of each; equal ones are written once."""
    names: dict[str, str] = {}
    order, texts = [], []
    for plan in plans:
        text = _CWriter(plan, "@").write()
        if text not in names:
            names[text] = f"region{len(names)}"
            texts.append(text.replace("@", names[text], 1))
        order.append(names[text])
    return "\n".join(texts), order


def load_kernels(plans: Sequence[KernelPlan]) -> list[Any]:
    """The kernels of these plans, compiled or taken from the cache."""
    text, names = write_kernels(plans)
    whole = (files("tilemesh.graph") / "kernel_math.h").read_text() + text
    library = ctypes.CDLL(str(build_library("graph", whole, _OPTIONS, [*_openmp(), "-lm"])))
    functions = []
    for plan, name in zip(plans, names, strict=True):
        function = library[name]
        function.restype = None
        function.argtypes = [ctypes.c_void_p] * (len(plan.body.inputs) + len(plan.body.outputs))
        functions.append(function)
    return functions


def _openmp() -> list[str]:
    """OpenMP through the library that torch has loaded: two of them would each keep threads of their own."""
    libraries = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*")) + sorted(
        (Path(torch.__file__).parent.parent / "torch.libs").glob("libgomp*.so*")
    )
    return ["-fopenmp", str(libraries[0])] if libraries else ["-fopenmp"]
