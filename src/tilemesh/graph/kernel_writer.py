"""Writing the kernel of a plan: what the dialects `kernel_c.py` and `kernel_triton.py` have in common.

A row that is not held in registers is gone through in *runs*: each reduction ends one, and what a later run needs again
is computed again. What an operator is in a dialect stands in the table of primitives (`ops.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from tilemesh.graph.ir import Node
from tilemesh.graph.kernel_plan import KernelPlan, OperandRead, needed, offset_terms, operand, passes
from tilemesh.graph.ops import COMPARISONS, FLOATS, REDUCTIONS, primitive
from tilemesh.graph.regions import COLUMN, FULL, ROW
from tilemesh.graph.rewrite import number_of


class KernelWriter:
    """One kernel. A dialect says how values are defined, read, written, reduced, and how a run over a row looks."""

    language: ClassVar[str]  # the field of a primitive that has its text
    dtypes: ClassVar[Sequence[str]]  # of operands and results
    divide: ClassVar[str]  # whole numbers

    def __init__(self, plan: KernelPlan, beside: Mapping[Node, Node] | None = None) -> None:
        self.plan = plan
        self.rows, self.columns = plan.row_count, plan.column_count
        self.beside = beside or {}  # sums that are found with a maximum
        self.ready, self.runs = passes(plan, self.beside)
        self.stored = {node: place for place, node in enumerate(plan.body.outputs)}
        self.sums = [node for node in plan.members if plan.levels[node] == COLUMN]
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []
        self.named = 0
        self.indent = 0
        self.column = "column"  # what the code calls the number of an element in its row

    @classmethod
    def serves(cls, node: Node) -> bool:
        """Whether this dialect can compute a node: dtypes it has, and functions."""
        if any(value.dtype not in cls.dtypes for value in (node, *node.inputs)):
            return False
        row = primitive(node.op)
        if node.op in REDUCTIONS or row.floats:
            return node.dtype in FLOATS and (node.op in REDUCTIONS or bool(getattr(row, cls.language)))
        return node.op == "cast" or bool(getattr(row, cls.language))

    # What a dialect says.

    def define(self, name: str, dtype: str, expression: str) -> None:
        raise NotImplementedError

    def read(self, place: int, terms: Sequence[str], dtype: str, mask: str) -> str:
        raise NotImplementedError

    def store(self, node: Node, at: str, mask: str) -> None:
        raise NotImplementedError

    def literal(self, number: float | int, dtype: str) -> str:
        raise NotImplementedError

    def cast(self, node: Node, value: str) -> str:
        raise NotImplementedError

    def words(self, dtype: str) -> dict[str, str]:
        raise NotImplementedError

    def open_run(self, run: int, reductions: Sequence[Node]) -> dict[Node, str]:
        """Begins a loop over the columns; for each reduction what its parts are kept in."""
        raise NotImplementedError

    def accumulate(self, node: Node, held: Mapping[Node, str]) -> None:
        raise NotImplementedError

    def close_run(self, run: int, held: Mapping[Node, str]) -> None:
        raise NotImplementedError

    def reduced(self, node: Node, held: Mapping[Node, str]) -> str:
        """The name of what a loop reduced."""
        raise NotImplementedError

    def pick(self, reductions: Sequence[Node]) -> None:
        """Gives names to reductions that need no run over the row."""

    def kept(self, run: int) -> Sequence[Node]:
        """What a run computes for later ones."""
        return ()

    # What they share.

    def say(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def fresh(self, kind: str) -> str:
        """A name that the code has nowhere else: Triton wants one type of a name, also after a loop."""
        self.named += 1
        return f"{kind}{self.named}"

    def value(self, node: Node) -> str:
        number = number_of(node)
        if number is not None:
            return self.literal(float(number) if node.dtype in FLOATS else int(number), node.dtype)
        leaf = operand(node)
        return self.column if leaf.op == "iota" else self.names[leaf]

    def compute(self, node: Node) -> None:
        values = [self.value(value) for value in node.inputs]
        if node.op == "cast":
            expression = self.cast(node, values[0])
        else:
            sign = COMPARISONS[node["kind"]] if node.op == "compare" else ""
            names = dict(zip("xyz", values, strict=False))
            text: str = getattr(primitive(node.op), self.language)
            expression = text.format(**names, sign=sign, **self.words(node.dtype))
        name = self.names[node] = self.fresh("v")
        self.define(name, node.dtype, expression)

    def load(self, leaf: Node, full: str = "", row: str = "") -> None:
        """Reads an operand. full and row: masks for one number per element and for one per row."""
        read = self.plan.reads[leaf]
        terms = offset_terms("row", self.plan.rows, read.rows, self.divide)
        inner = self._columns(read)
        name = self.names[leaf] = self.fresh("a")
        self.define(name, leaf.dtype, self.read(read.input, terms + inner, leaf.dtype, full if inner else row))

    def _columns(self, read: OperandRead) -> list[str]:
        if read.level != FULL:
            return []
        return offset_terms(self.column, self.plan.columns, read.columns, self.divide, read.swap)

    def load_for(self, readers: Sequence[Node], mask: str = "") -> None:
        """Reads the operands of these that have no name yet."""
        for leaf in self.plan.reads:
            if leaf not in self.names and any(operand(value) is leaf for node in readers for value in node.inputs):
                self.load(leaf, mask)

    def reductions(self, run: int) -> list[Node]:
        """The reductions of rows that a run ends with."""
        rows = [node for node in self.plan.members if self.plan.levels[node] == ROW and node.op in REDUCTIONS]
        return [node for node in rows if self.ready[node] == run + 1]

    def results(self, run: int) -> list[Node]:
        full = [node for node in self.plan.members if self.plan.levels[node] == FULL and node in self.stored]
        return [node for node in full if self.ready[node] == run]

    def added(self, run: int) -> list[Node]:
        """The sums over rows that a run adds to."""
        return [node for node in self.sums if self.ready[node] == run]

    def by_runs(self) -> None:
        """A row, gone through once for every reduction."""
        for leaf, read in self.plan.reads.items():
            if read.level == ROW or not any(read.columns):
                self.load(leaf)
        for run in range(self.runs + 1):
            for node in self.plan.members:
                if self.plan.levels[node] == ROW and self.ready[node] == run:
                    if node.op not in REDUCTIONS:
                        self.compute(node)
                    if node in self.stored:
                        self.store(node, "row", "")
            self.pick(self.reductions(run))
            self._run(run)

    def _run(self, run: int) -> None:
        reductions = [node for node in self.reductions(run) if node not in self.names]
        results, sums, kept = self.results(run), self.added(run), self.kept(run)
        if not (reductions or results or sums or kept):
            return
        before = dict(self.names)
        held = self.open_run(run, reductions)
        alone = [node for node in reductions if node not in self.beside]
        ends = [*(operand(node.inputs[0]) for node in (*alone, *sums)), *results, *kept]
        computed = needed(self.plan, ends, set(self.names))
        self.load_for([*computed, *alone, *sums], "inside")
        for node in computed:
            self.compute(node)
        for node in results:
            self.store(node, f"row * {self.columns} + column" if self.rows > 1 else "column", "inside")
        for node in (*(each for each in reductions if each in self.beside), *alone, *sums):
            self.accumulate(node, held)
        self.close_run(run, held)
        self.names = before
        for node in reductions:
            self.names[node] = self.reduced(node, held)
