"""A chart of stored rows: chart_collectives.py OUT.svg COLLECTIVE[,COLLECTIVE] ROWS.jsonl..."""

from __future__ import annotations

import sys

from tilemesh.bench.collective.chart import draw
from tilemesh.measure.row import read_rows

if __name__ == "__main__":
    out, wanted, *paths = sys.argv[1:]
    rows = [row for path in paths for row in read_rows(path) if row.name in wanted.split(",")]
    draw(rows, out)
