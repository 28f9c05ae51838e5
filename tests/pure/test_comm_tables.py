"""The table of docs/comm/README.md says what the committed rows say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "Neoverse-N1, two cores": "auto-mpi-neoverse-n1-2c",
    "Xeon, sixteen cores": "auto-mpi-xeon-16c",
    "Xeon, two cores, 4 ranks, up to 8 MiB": "auto-mpi-xeon-2c-4ranks",
}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def rows(name):
    return [json.loads(line) for line in (ROOT / "benchmarks/results" / f"{name}.jsonl").read_text().splitlines()]


def ratio(row):
    return row["seconds"]["native"] / row["seconds"]["auto"]


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


TEXT = (ROOT / "docs/comm/README.md").read_text()
LINES = [
    cells(line) for line in TEXT.splitlines() if re.match(r"\| (`comm\.empty`|ordinary arrays|.*lowest of all)", line)
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_a_line_of_the_table(line):
    what, *said = line
    for collective, words in zip(COLLECTIVES, said, strict=True):
        if what.endswith("lowest of all"):
            low, high = (1024, 65536) if "KiB" in what else (8, 8)
            every = [row for name in FILES.values() for row in rows(name)]
            found = [
                ratio(row) for row in every if row["collective"] == collective and low <= row["asked_bytes"] <= high
            ]
            assert words == f"{min(found):.2f}"
        else:
            buffers, _, machine = what.partition(", ")
            wanted = ("empty" if "empty" in buffers else "ordinary", collective)
            found = [
                ratio(row)
                for row in rows(FILES[machine])
                if (row["buffers"], row["collective"]) == wanted and row["asked_bytes"] >= 131072
            ]
            assert words == f"{min(found):.2f} to {max(found):.2f}"


def test_all_lines_are_there():
    assert len(LINES) == 8


def test_below_one_it_is_the_librarys_own_or_less_than_a_microsecond():
    for name in FILES.values():
        for row in rows(name):
            lost = row["seconds"]["auto"] - row["seconds"]["native"]
            assert ratio(row) >= 1 or row["picked"] == "native" or lost < 1e-6, (name, row)
