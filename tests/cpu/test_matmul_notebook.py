"""docs/kernels/fused_matmul.ipynb runs top to bottom, as a reader without a GPU would run it.

Cells are executed in one namespace, which is all a plain notebook needs: no kernel process, no further dependency.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

NOTEBOOK = Path(__file__).parents[2] / "docs" / "kernels" / "fused_matmul.ipynb"


def test_every_cell_runs(capsys):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(compile(source, f"cell {number} of {NOTEBOOK.name}", "exec"), namespace)
    assert capsys.readouterr().out.endswith("done\n")


def test_it_is_stored_with_what_it_prints():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] == "code" and "\nprint(" in "".join(cell["source"]):
            assert cell["outputs"], "run scripts/notebooks.py"
    assert "".join(cells[-1]["outputs"][0]["text"]) == "done\n"
