"""Measure the rows that chapters of the guide show: `python scripts/guide_rows.py STUDY FILE.jsonl`.

ladder and ladder-studies need a GPU; locality runs on this CPU. The rows that travel with the guide lie in
src/tilemesh/guide/ladder/ and src/tilemesh/guide/locality/.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from tilemesh.bench.harness import Estimate, make_row
from tilemesh.measure.row import Row, write_rows
from tilemesh.measure.sample import Sample
from tilemesh.measure.table import print_rows

N, SIDES = 512, (8, 16, 32, 64, 128, 256, 512)


def locality_rows() -> Iterator[Row]:
    from tilemesh.guide.locality import measured
    from tilemesh.guide.locality.caches import cache_sizes
    from tilemesh.guide.locality.traffic import nest_of

    for variant, sample in measured.nest_times(N).items():
        sizes = measured.sizes_for(variant, N)
        reads = {} if variant == "numpy" else {"memory_reads": nest_of(variant).memory_reads(sizes)}
        yield from locality("loop nests", {variant: sample}, **sizes, **reads)
    yield from locality("layout", measured.layout_times())
    yield from locality("fused loops", measured.fused_times())
    yield from locality("convolution", measured.convolution_times())
    yield from locality("vectors", measured.vector_times())
    yield from locality("prefetch", measured.gather_times())
    yield from locality("false sharing", measured.sharing_times())
    yield from locality("cache contention", measured.contention_times(cache_sizes().get("L2", 2**20)))
    yield from locality("threads", measured.thread_times((1, 2, 4, 16)))
    yield from locality("OpenMP", measured.openmp_times((1, 2, 4)))
    for (rows, columns), seconds in (measured.tile_map(N, SIDES) or {}).items():
        yield from locality("tile map", {f"{rows}x{columns}": Sample.of([seconds])}, n=N, rows=rows, columns=columns)


def locality(study: str, samples: Mapping[str | int, Sample], **more: int) -> Iterator[Row]:
    beside = "variants of one program are compared"
    for variant, sample in samples.items():
        yield make_row(
            "locality", {"study": study, "variant": str(variant), **more}, sample, no_peers=beside,
            predicted=Estimate(None, "reads are predicted and counted, not times"), limit=Estimate(None, beside),
        )  # fmt: skip


def study_rows(study: str) -> list[Row]:
    if study == "locality":
        return list(locality_rows())
    from tilemesh.guide.ladder import gpu

    return gpu.ladder_rows() if study == "ladder" else [*gpu.first_rows(), *gpu.study_rows()]


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("ladder", "ladder-studies", "locality"):
        sys.exit("expected ladder, ladder-studies or locality, and a file for the rows")
    measured_rows = study_rows(sys.argv[1])
    write_rows(measured_rows, sys.argv[2])
    print_rows(measured_rows)
