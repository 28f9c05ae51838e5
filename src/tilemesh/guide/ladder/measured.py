"""What an H200 measured of the ladder: `benchmarks/results/ladder_h200.jsonl`, as an installed package has it."""

from __future__ import annotations

from importlib import resources

from tilemesh.measure.row import Row


def h200_rows() -> list[Row]:
    """The rows in the order of the rungs."""
    return stored_rows("ladder", "h200.jsonl")


def stored_rows(chapter: str, file: str) -> list[Row]:
    """Rows of `benchmarks/results` that a chapter shows, as an installed package has them."""
    text = (resources.files(f"tilemesh.guide.{chapter}") / file).read_text(encoding="utf-8")
    return [Row.from_json(line) for line in text.splitlines()]


def median_s(row: Row) -> float:
    assert row.measured is not None
    return row.measured.median


def reserved_by(row: Row) -> tuple[int, int, int]:
    """Registers of a thread, shared bytes of a block, and blocks that a multiprocessor held, as the driver told it."""
    registers, shared, blocks = (row.case[name] for name in ("registers", "shared_bytes", "blocks_per_sm"))
    assert isinstance(registers, int)
    assert isinstance(shared, int)
    assert isinstance(blocks, int)
    return registers, shared, blocks


def reads_of(row: Row) -> int:
    reads = row.case["global_reads"]
    assert isinstance(reads, int)
    return reads
