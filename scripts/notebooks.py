"""Run the notebooks from top to bottom and store what they print beside their cells: `python scripts/notebooks.py`.

Cells run in one namespace of this process, which is all that a plain notebook needs. What a cell prints becomes a
stream, and the value of its last line a result, as Jupyter would write them. A code host and the documents' readers
then see a notebook as it looks when it has been run.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = (ROOT / "docs" / "kernels" / "fused_matmul.ipynb", ROOT / "examples" / "collectives.ipynb")


def run(cells: list[dict[str, Any]]) -> None:
    """Run the code of all cells and put what comes of it into them."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in cells:
        if cell["cell_type"] == "code":
            number += 1
            cell["execution_count"] = number
            cell["outputs"] = _outputs("".join(cell["source"]), namespace, number)


def _outputs(source: str, namespace: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        run(notebook["cells"])
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: stored with its outputs", file=sys.stderr)


if __name__ == "__main__":
    main()
