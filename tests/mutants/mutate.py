"""Small faults for the tests to notice: each is one expression or statement of the source, changed by its syntax tree.

A `Mutant` is a value: where, what stood there, what stands there now. `mutants` lists all of a file; `sample` takes a
seeded number of them by a hash of each one's name, so that an edit elsewhere leaves the sample as it was. What no
behaviour follows from is left out: annotations, docstrings, messages of errors, decorators, assertions.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# What is mutated, below src/tilemesh: all of these folders, and of serve the parts that decide without a tensor.
FOLDERS = ("core", "plan", "parallel", "methods", "compress")
FILES = tuple(f"serve/{name}.py" for name in ("scheduler", "pages", "prefix", "request", "simulate"))

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
EXTREMES = {"min": "max", "max": "min"}
SILENT_KEYWORDS = ("strict",)  # of zip: it only refuses what is wrong anyway


@dataclass(frozen=True)
class Mutant:
    """One change: `before` at this line (and the characters from `start` to `end` of the file) becomes `after`.

    `number` tells apart equal changes of one function; `uses` names what a module or a class sets here, since a line
    that runs once, at import, is tested by whoever reads that name.
    """

    path: str  # below src/tilemesh
    scope: str  # the function or class, dotted; empty in the module itself
    kind: str
    before: str
    after: str
    number: int
    line: int
    last_line: int
    start: int
    end: int
    uses: str | None = None

    @property
    def name(self) -> str:
        """What it is called in results: the same after edits elsewhere in the file."""
        number = f" #{self.number}" if self.number else ""
        return f"{self.path}:{self.scope or '<module>'}: {self.before} -> {self.after}{number}"


def targets(source: Path) -> list[Path]:
    inside = [path for folder in FOLDERS for path in (source / folder).rglob("*.py")]
    return sorted(inside + [source / name for name in FILES])


def sample(mutants: Iterable[Mutant], number: int, seed: int) -> list[Mutant]:
    return sorted(mutants, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest())[:number]


def all_mutants(source: Path) -> list[Mutant]:
    return [
        mutant for path in targets(source) for mutant in mutants_of(path.read_text(), str(path.relative_to(source)))
    ]


def mutated(text: str, mutant: Mutant) -> str:
    return text[: mutant.start] + mutant.after + text[mutant.end :]


def mutants_of(text: str, path: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines; those of one expression follow each other."""
    offsets, position = [], 0
    lines = text.splitlines(keepends=True)
    for line in lines:
        offsets.append(position)
        position += len(line)

    def place(line: int, column: int) -> int:  # the tree counts bytes, a string characters
        return offsets[line - 1] + len(lines[line - 1].encode()[:column].decode())

    listed: list[Mutant] = []
    seen: dict[tuple[str, str, str], int] = {}
    for scope, uses, node in _reached(ast.parse(text)):
        for kind, after in _changes(node):
            before = ast.unparse(node)
            key = (scope, before, after)
            number = seen[key] = seen.get(key, -1) + 1
            start, end = place(node.lineno, node.col_offset), place(node.end_lineno or 0, node.end_col_offset or 0)
            extent = (node.lineno, node.end_lineno or node.lineno)
            listed.append(Mutant(path, scope, kind, before, after, number, *extent, start, end, uses))
    return listed


def _reached(tree: ast.Module) -> Iterator[tuple[str, str | None, ast.expr | ast.stmt]]:
    """Nodes whose value the program uses, with the function or class around each, and the name it sets at import."""

    def visit(
        node: ast.AST, scope: str, uses: str | None, is_function: bool
    ) -> Iterator[tuple[str, str | None, ast.AST]]:
        if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.pattern, ast.arg)):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        yield scope, uses, node
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{scope}.{node.name}" if scope else node.name
            if isinstance(node, ast.FunctionDef):  # its defaults are set when it is defined: whoever calls it
                for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                    yield from visit(default, inner, node.name if not is_function else None, is_function)
            for statement in node.body:
                yield from visit(statement, inner, None, is_function or isinstance(node, ast.FunctionDef))
            return
        if not is_function and isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            uses = target.id if isinstance(target, ast.Name) else uses
        skipped = {id(getattr(node, "annotation", None))}
        skipped |= {id(keyword) for keyword in getattr(node, "keywords", []) if keyword.arg in SILENT_KEYWORDS}
        for child in ast.iter_child_nodes(node):
            if id(child) not in skipped:
                yield from visit(child, scope, uses, is_function)

    for scope, uses, node in visit(tree, "", None, False):
        if isinstance(node, (ast.expr, ast.stmt)):
            yield scope, uses, node


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """What may stand in its place: the kind of change, and the new text."""
    match node:
        case ast.Compare(ops=[operator, *_]) if type(operator) in COMPARED:
            yield "compare", _with(node, "ops", [COMPARED[type(operator)](), *node.ops[1:]])
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in COMPUTED:
            if not _is_text(left) and not _is_text(right):
                yield "arithmetic", _with(node, "op", COMPUTED[type(operator)]())
        case ast.BoolOp(op=operator):
            yield "logic", _with(node, "op", ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "logic", _in_brackets(operand)
        case ast.Constant(value=bool() as value):
            yield "constant", str(not value)
        case ast.Constant(value=int() as value):
            yield "constant", str(value + 1)
        case ast.Constant(value=float() as value):
            yield "constant", repr(value * 10 if value else 1.0)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[first, second], keywords=[]):
            yield "extreme", _with(node, "func", ast.Name(EXTREMES[name]))
            for kept in (first, second):
                if not isinstance(kept, (ast.Constant, ast.Starred)):
                    yield "unclamped", _in_brackets(kept)
        case ast.Expr(value=ast.Call()):
            yield "removed", "pass"
        case ast.AugAssign(op=operator) if type(operator) in COMPUTED:
            yield "arithmetic", _with(node, "op", COMPUTED[type(operator)]())


def _with(node: ast.expr | ast.stmt, field: str, value: object) -> str:
    changed = copy.copy(node)
    setattr(changed, field, value)
    return ast.unparse(changed) if isinstance(changed, ast.stmt) else _in_brackets(changed)


def _in_brackets(node: ast.expr) -> str:
    """The node's own precedence is then nobody's matter."""
    return f"({ast.unparse(node)})"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
