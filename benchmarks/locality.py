"""Measures the guide's locality studies on this CPU and writes rows: python benchmarks/locality.py FILE.jsonl"""

import sys
from collections.abc import Mapping

from tilemesh.guide.locality import measured
from tilemesh.guide.locality.caches import cache_sizes
from tilemesh.guide.locality.traffic import nest_of
from tilemesh.measure.machine import stamp
from tilemesh.measure.row import Row, write_rows
from tilemesh.measure.sample import Sample
from tilemesh.measure.table import print_rows

N, SIDES = 512, (8, 16, 32, 64, 128, 256, 512)
rows: list[Row] = []


def add(study: str, samples: Mapping[str | int, Sample], **more: int) -> None:
    for variant, sample in samples.items():
        rows.append(
            Row(
                name="locality",
                case={"study": study, "variant": str(variant), **more},
                unit="s",
                predicted=None,
                measured=sample,
                limit=None,
                missing={
                    "predicted": "reads are predicted and counted, not times",
                    "limit": "variants of one program are compared",
                    "peers": "variants of one program are compared",
                },
                **stamp(),
            )
        )


for variant, sample in measured.nest_times(N).items():
    sizes = measured.sizes_for(variant, N)
    reads = {} if variant == "numpy" else {"memory_reads": nest_of(variant).memory_reads(sizes)}
    add("loop nests", {variant: sample}, **sizes, **reads)
add("layout", measured.layout_times())
add("fused loops", measured.fused_times())
add("convolution", measured.convolution_times())
add("vectors", measured.vector_times())
add("prefetch", measured.gather_times())
add("false sharing", measured.sharing_times())
add("cache contention", measured.contention_times(cache_sizes().get("L2", 2**20)))
add("threads", measured.thread_times((1, 2, 4, 16)))
add("OpenMP", measured.openmp_times((1, 2, 4)))
for (tile_rows, tile_columns), seconds in (measured.tile_map(N, SIDES) or {}).items():
    add("tile map", {f"{tile_rows}x{tile_columns}": Sample.of([seconds])}, n=N, rows=tile_rows, columns=tile_columns)
write_rows(rows, sys.argv[1])
print_rows(rows)
