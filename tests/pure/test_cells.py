"""What a bench of collectives is made of: sizes, limits and crossovers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilemesh.bench.collective.cells import Cell, cells_of, parse_ranks, parse_sizes
from tilemesh.comm.schedules.simulate import crossovers
from tilemesh.core.calibration import Calibration, Rates
from tilemesh.core.errors import UsageError

MIB = 1 << 20


def test_sizes_and_ranks() -> None:
    assert parse_sizes("4B..1KiB") == [4, 16, 64, 256, 1024]
    assert parse_sizes("4B..2KiB") == [4, 16, 64, 256, 1024, 2048]
    assert parse_sizes("1KiB,3MiB") == [1024, 3 * MIB]
    assert parse_ranks("2,4") == [2, 4]
    for wrong in ("64MiB..4B", "", "0B"):
        with pytest.raises(UsageError):
            parse_sizes(wrong)
    for wrong in ("two", "0", "2,,4"):
        with pytest.raises(UsageError, match="--ranks"):
            parse_ranks(wrong)


def test_every_size_that_is_announced_is_measured_once() -> None:
    """Four bytes are one number: all_reduce sends them as they are, an all_gather of 8 ranks needs a number of each."""
    assert [cell.payload for cell in cells_of("all_reduce", 8, [1, 4, 16], "ordinary")] == [4, 16]
    assert [cell.payload for cell in cells_of("all_gather", 8, [4, 16, 64], "ordinary")] == [32, 64]


def test_a_cell_has_as_much_for_every_rank() -> None:
    cell = Cell("all_gather", 3, 4)
    assert (cell.elements, cell.elements_in, cell.elements_out, cell.payload) == (3, 1, 3, 12)
    cell = Cell("reduce_scatter", 4, MIB)
    assert (cell.elements_in, cell.elements_out) == (MIB // 4, MIB // 16)
    assert Cell("all_reduce", 8, MIB).bus_factor == 1.75
    assert Cell("all_to_all", 8, MIB).bus_factor == 0.875


@pytest.mark.parametrize(
    ("collective", "read", "written"),
    [("all_reduce", 8, 8), ("reduce_scatter", 8, 1), ("all_gather", 1, 8), ("all_to_all", 8, 8), ("broadcast", 1, 7)],
)
def test_the_limit_reads_every_input_and_writes_every_result_once(collective: str, read: int, written: int) -> None:
    rates = Rates(read_bytes_per_s=4e9, write_bytes_per_s=8e9, copy_bytes_per_s=5e9)
    machine = Calibration("m", "w", "t", all_cores=rates)
    cell = Cell(collective, 8, 64 * MIB)
    limit, why = cell.limit_s(machine, 32 * MIB)
    assert limit == pytest.approx(64 * MIB * (read / 4e9 + written / 8e9))
    assert why == ""
    quick = Calibration("m", "w", "t", all_cores=replace(rates, copy_bytes_per_s=8e9))
    both, least = min(read, written), 64 * MIB
    expected = least * (2 * both / 8e9 + (read - both) / 4e9 + (written - both) / 8e9)
    assert cell.limit_s(quick, 32 * MIB)[0] == pytest.approx(expected)
    assert "not calibrated" in cell.limit_s(None, 0)[1]
    assert "caches" in Cell(collective, 8, 1000).limit_s(machine, 32 * MIB)[1]
    half = Calibration("m", "w", "t", all_cores=Rates(copy_bytes_per_s=1e9))
    assert "apart" in cell.limit_s(half, 0)[1]


def test_where_the_quickest_changes() -> None:
    times = {"flat": [(4, 1.0), (16, 2.0), (64, 8.0)], "slices": [(4, 3.0), (16, 3.0), (64, 4.0)]}
    assert crossovers(times) == [(16, 64, "flat", "slices")]
    assert crossovers({"flat": [(4, 1.0), (16, 2.0)]}) == []
