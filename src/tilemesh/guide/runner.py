"""Running a chapter: its script cut into cells of text and code, shown and executed one after the other.

The percent format (`# %%`, `# %% [markdown]`) is what editors and Jupytext read as a notebook; `notebook` writes the
same cells as an .ipynb file. All code cells share one namespace, as in a notebook.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from tilemesh.core.errors import UsageError
from tilemesh.guide.book import GuidePart
from tilemesh.guide.lesson import Ask, Lesson, show_code
from tilemesh.measure.row import Row
from tilemesh.measure.table import print_words

_MARK = re.compile(r"# %%(?: \[(\w+)\])?\s*")


@dataclass(frozen=True)
class ScriptCell:
    """A piece of a script: text (Markdown, comment signs removed) or code, and the line where it begins."""

    is_code: bool
    source: str
    line: int

    @property
    def asks(self) -> bool:
        """Whether it asks for a prediction."""
        return self.is_code and "predict(" in self.source


def cells(script: str) -> Iterator[ScriptCell]:
    """The cells of a script in percent format; what stands before the first mark is the module's docstring."""
    kind: str | None = None
    begun, lines = 0, list[str]()
    for number, line in enumerate([*script.splitlines(), "# %%"], start=1):
        mark = _MARK.fullmatch(line)
        if mark is None:
            lines.append(line)
            continue
        if kind is not None and any(text.strip() for text in lines):
            if kind == "markdown":
                yield ScriptCell(False, _text(lines, begun), begun)
            else:
                yield ScriptCell(True, "\n".join(lines).strip("\n"), begun + _blank(lines))
        kind, begun, lines = mark[1] or "code", number + 1, []


def _blank(lines: list[str]) -> int:
    return next(place for place, line in enumerate(lines) if line.strip())


def _text(lines: list[str], begun: int) -> str:
    for place, line in enumerate(lines):
        if line.strip() and not line.startswith("#"):
            raise UsageError(f"line {begun + place} of a text cell is no comment: {line[:60]!r}")
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines).strip()


def run_part(part: GuidePart, console: Console, pause: Ask | None = None) -> list[Row]:
    """Show and execute a chapter; the rows it measured. `pause`: asked before each text but the first."""
    script = part.script.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(part.script)}
    if console.is_terminal:
        namespace["print"] = _print_at(console)
    is_first = True
    for cell in cells(script):
        if not cell.is_code:
            if pause is not None and not is_first and pause("\n[Enter] to go on, q to leave: ") is None:
                return []
            _show_text(cell.source, console)
            is_first = False
            continue
        # Code that asks for a prediction often holds the answer: it is shown when the question has been answered.
        if not cell.asks:
            console.print()
            show_code(cell.source, console, indent="    ")
        # Blank lines before it, so that a traceback names the script's own lines.
        exec(compile("\n" * (cell.line - 1) + cell.source, str(part.script), "exec"), namespace)
        if cell.asks:
            console.print("\nThe code of this step:\n")
            show_code(cell.source, console, indent="    ")
    lesson = namespace.get("lesson")
    return lesson.rows if isinstance(lesson, Lesson) else []


def _show_text(text: str, console: Console) -> None:
    console.print()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        console.print(text, markup=False, soft_wrap=True)


def _print_at(console: Console) -> Callable[..., None]:
    """`print` as a chapter's code calls it: lines that are wider than the terminal are broken between words."""

    def print_broken(*values: object, sep: str = " ") -> None:
        print_words(sep.join(map(str, values)), console)

    return print_broken


def notebook(part: GuidePart) -> str:
    """The chapter as a Jupyter notebook (format 4.5), its cells not yet run."""
    cell_bodies = []
    for number, cell in enumerate(cells(part.script.read_text(encoding="utf-8"))):
        body: dict[str, Any] = {
            "id": f"cell-{number}",
            "cell_type": "code" if cell.is_code else "markdown",
            "metadata": {},
            "source": cell.source.splitlines(keepends=True),
        }
        if cell.is_code:
            body |= {"execution_count": None, "outputs": []}
        if cell.asks:
            body["metadata"] = {"jupyter": {"source_hidden": True}}  # as above: folded until the reader opens it
        cell_bodies.append(body)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cell_bodies, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"
