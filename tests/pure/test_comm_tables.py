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
SIZES = {
    "1 to 32 KiB, lowest of all": (1024, 32768, "native"),
    "8 B, lowest of all": (8, 8, "native"),
    "beside mpi4py, from 1 KiB, lowest of all": (1024, 2**60, "mpi4py"),
}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def rows(name):
    return [json.loads(line) for line in (ROOT / "benchmarks/results" / f"{name}.jsonl").read_text().splitlines()]


def ratio(row, peer="native"):
    return row["seconds"][peer] / row["seconds"]["auto"]


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
            low, high, peer = SIZES[what]
            every = [row for name in FILES.values() for row in rows(name)]
            chosen = [row for row in every if row["collective"] == collective and low <= row["asked_bytes"] <= high]
            assert words == f"{min(ratio(row, peer) for row in chosen):.2f}"
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
    assert len(LINES) == 2 * len(FILES) + len(SIZES)
    above = TEXT[: TEXT.index("| `comm.empty`, ")].splitlines()
    assert cells(above[-2]) == ["", *COLLECTIVES]
    caption = " ".join(above[-6:])
    every = [row["asked_bytes"] for name in FILES.values() for row in rows(name)]
    assert "128 KiB to 64 MiB at 2, 4 and 8 ranks" in caption
    assert max(every) == 64 * 2**20
    assert not [size for size in every if 32768 < size < 131072]


def test_what_is_said_below_the_table():
    assert "Where it is below 1, `auto` took the library's own or lost less than 1 µs;" in TEXT


def test_below_one_it_is_the_librarys_own_or_less_than_a_microsecond():
    for name in FILES.values():
        for row in rows(name):
            lost = row["seconds"]["auto"] - row["seconds"]["native"]
            assert ratio(row) >= 1 or row["picked"] == "native" or lost < 1e-6, (name, row)
