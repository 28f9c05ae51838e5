"""Measures the matmul ladder and its studies on this GPU, and writes rows: python benchmarks/ladder_h200.py FOLDER"""

import sys
from pathlib import Path

from tilemesh.kernels.ladder.gpu import first_rows, ladder_rows, study_rows
from tilemesh.measure.row import write_rows
from tilemesh.measure.table import print_rows

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
parts = {"ladder_h200": [ladder_rows], "ladder_studies_h200": [first_rows, study_rows]}
for name, makers in parts.items():
    rows = [row for make in makers for row in make()]
    write_rows(rows, folder / f"{name}.jsonl")
    print_rows(rows)
