"""Measures the matmul ladder and its studies on this GPU, and writes rows.

python benchmarks/ladder_h200.py FOLDER [ladder_h200 | ladder_studies_h200]: both, or the named one.
"""

import sys
from pathlib import Path

from tilemesh.kernels.ladder.gpu import first_rows, ladder_rows, study_rows
from tilemesh.measure.row import write_rows
from tilemesh.measure.table import print_rows

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
parts = {"ladder_h200": [ladder_rows], "ladder_studies_h200": [first_rows, study_rows]}
for name in sys.argv[2:] or parts:
    rows = [row for make in parts[name] for row in make()]
    write_rows(rows, folder / f"{name}.jsonl")
    print_rows(rows)
