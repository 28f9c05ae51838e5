"""Locality on the CPU. Run it with `tilemesh guide locality`, as a script, or open it as a notebook."""

# %% [markdown]
# # Locality on the CPU
#
# The same arithmetic can take ten times as long when it walks through memory the wrong way. **Temporal locality**:
# what was used is used again soon. **Spatial locality**: what lies beside it is used next. Both are what caches bet on.
#
# The programs are small C files. Your C compiler makes them fast; the ladder's interpreter runs the *same text* and
# counts what it reads. Without a compiler the loops run in numpy.

# %%
from tilemesh.core.c_library import compiler
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.locality import measured, traffic
from tilemesh.guide.locality.build import source
from tilemesh.guide.locality.caches import LINE_BYTES, SimulatedCache, cache_sizes
from tilemesh.guide.locality.figures import heat_map
from tilemesh.guide.locality.strides import StridedView
from tilemesh.guide.locality.work import write_picture
from tilemesh.measure.machine import this_machine

lesson = Lesson("locality")
predict = lesson.predict
counted_only = {"limit": "a count has no limit"}
no_limit = {"limit": "variants of one program are compared"}
caches = cache_sizes()
print("compiler:", compiler() or "none, numpy instead", "· caches of a core:", caches or "unknown")

# %% [markdown]
# ## An array is a buffer, an offset, a shape and strides
#
# Element [i, j] lies at `offset + i * strides[0] + j * strides[1]`. Slicing, transposing and broadcasting change these
# few numbers and copy nothing.

# %%
matrix = StridedView.of(range(20), (4, 5))
guess = predict("4 x 5 matrix, rows 1 to 3, columns 2 and 3: offset of the view",
                name="offset of a slice", unit="count", model=7)  # fmt: skip
part = matrix.slice(range(1, 4), range(2, 4))
lesson.show(guess, part.offset, missing=counted_only, figure="counted")
print("slice:", part.shape, part.strides, "contiguous" if part.contiguous else "not contiguous", list(part))
print(
    "transposed:",
    matrix.permute(1, 0).strides,
    "· broadcast row:",
    StridedView.of(range(5), (1, 5)).broadcast(4, 5).strides,
)
assert (part.offset, part.shape, part.strides) == (7, (3, 2), (5, 1))
assert matrix.permute(1, 0).strides == (1, 5)
assert StridedView.of(range(5), (1, 5)).broadcast(4, 5).strides == (0, 1)

# %% [markdown]
# A logical transpose is free, but whoever reads it walks down columns. A physical one copies once and reads fast. (The
# cost model counts bytes: for each element two of 4 bytes, and for the third a line of 64 or again 4.)

# %%
layout = measured.layout_times(1024)
guess = predict(
    "adding a 1024 x 1024 matrix to a transposed view takes how many times as long as to a transposed copy?",
    name="view over copy",
    unit="count",
    model=(LINE_BYTES + 8) / 12,
)
lesson.show(guess, layout["add to its view"].median / layout["add to its copy"].median, missing=no_limit)
for name, sample in layout.items():
    print(f"{name:22}{sample.median * 1e6:12.1f} µs")

# %% [markdown]
# ## ijk against ikj
#
# ijk multiplies a row of A with a column of B: every step down the column is a new cache line. ikj takes one element
# of A and adds a row of B to a row of C: both are *streamed*.

# %%
print(source("order.c"))
nest = {nest.key: nest for nest in traffic.NESTS}
small = {"N": 16}
guess = predict(
    "ijk, n = 16, cache of 16 lines with 4 elements each: misses",
    name="misses of ijk",
    unit="count",
    model=16**3 + 16**3 // 4 + 16**2,
)
down = traffic.misses(nest["ijk"], small, SimulatedCache(256, line_bytes=16))
along = traffic.misses(nest["ikj"], small, SimulatedCache(256, line_bytes=16))
lesson.show(guess, down, missing=counted_only, figure="counted")
print(f"misses: ijk {down}, ikj {along}")
assert along == 16**3 // 4 + 2 * 16**2 // 4
assert down == 16**3 + 16**3 // 4 + 16**2  # every element of B, A's lines for each j, and C

# %% [markdown]
# ## Tiles for the cache, tiles for registers, both
#
# With b1 rows of A in the L1, B has to come only n/b1 times: n² + n³/b1 elements from memory, as long as
# b1 n + b2 n elements fit. With v1 x v2 sums in registers, an element of A serves v2 products: n³/v2 + n³/v1. Both
# together: n² + n³/b1 from memory, n³/v2 + n³/v1 from the L1.

# %%
sizes = {"N": 16, "B1": 8, "B2": 4, "V1": 4, "V2": 2}
for key in ("cache_tiles", "register_tiles", "both_tiles"):
    tile_sizes = {name: sizes[name] for name in ("N", *measured.TILE_NAMES[key])}
    guess = predict(
        f"{key}, n = 16 {', '.join(f'{name} = {value}' for name, value in tile_sizes.items() if name != 'N')}: "
        "elements from memory",
        name=f"{key}: from memory",
        unit="count",
        model=nest[key].memory_reads(tile_sizes),
    )
    counted = traffic.count(nest[key], tile_sizes)
    lesson.show(guess, counted.total(shared=False).elements, missing=counted_only, figure="counted")
    assert counted.total(shared=False).elements == nest[key].memory_reads(tile_sizes)
    assert counted.total(shared=True).elements == nest[key].buffer_reads(tile_sizes)

# %% [markdown]
# Now the time. Counts say what is asked for; the compiler's vector instructions and the hardware's prefetcher decide
# the rest, and numpy's library does all of this at once. (The cost model is the ratio of the misses counted above.)

# %%
n = 192 if compiler() else 48
guess = predict(f"n = {n}: ijk takes how many times as long as ikj?",
                name="ijk over ikj", unit="count", model=down / along)  # fmt: skip
times = measured.nest_times(n)
lesson.show(guess, times["ijk"].median / times["ikj"].median, missing=no_limit)
for key, sample in times.items():
    print(f"{key:16}{sample.median * 1e3:10.3f} ms {2 * n**3 / sample.median / 1e9:8.2f} GFLOP/s")

# %% [markdown]
# ## A map of tile sizes
#
# A tile of B is used by all rows of A before the next one comes. Where does it stay? The picture has the sizes of your
# caches drawn in.

# %%
seconds = measured.tile_map(256, (16, 32, 64, 128, 256), repeats=1)
if seconds:
    best = min(seconds, key=seconds.__getitem__)
    print(
        "fastest tile:", best, f"{4 * best[0] * best[1]} bytes; picture:", write_picture(heat_map(seconds, caches, 256))
    )

# %% [markdown]
# ## Fused loops
#
# E = D + (A + B) C as three loops moves 9 elements for 3 operations; fused it moves 5.

# %%
guess = predict("operations over elements moved, fused", name="intensity, fused", unit="count", model=3 / 5)
operations, moved = traffic.intensity("fused")
lesson.show(guess, operations / moved, missing=counted_only, figure="counted")
assert traffic.intensity("three_loops")[0] * 3 == traffic.intensity("three_loops")[1]
assert operations * 5 == moved * 3
fused = measured.fused_times(2**20)
print({name: f"{sample.median * 1e3:.2f} ms" for name, sample in fused.items()})

# %% [markdown]
# ## A tiled convolution
#
# A tile of T x T outputs needs (T + 2)² inputs. Read once into a small buffer, that is all that comes from memory.

# %%
guess = predict("3 x 3 convolution, tiles of 4 x 4: reads for each output",
                name="reads per output", unit="count", model=36 / 16)  # fmt: skip
reads = traffic.convolution_reads("tiled", 8, 8, 4)
lesson.show(guess, reads / 64, missing=counted_only, figure="counted")
assert reads == traffic.convolution_formula("tiled", 8, 8, 4) == 4 * 36
assert traffic.convolution_reads("plain", 8, 8, 4) == 9 * 64
print({name: f"{sample.median * 1e3:.2f} ms" for name, sample in measured.convolution_times(256, 256, 32).items()})

# %% [markdown]
# ## Vectors and prefetching
#
# `float4` adds four numbers at once: 256 elements need 64 turns of the loop. A prefetch asks for an element before it
# is needed. It helps where the hardware cannot guess and the core cannot run ahead; along a chain, where each address
# is found in the element before, nothing helps.

# %%
print({name: f"{sample.median * 1e6:.2f} µs" for name, sample in measured.vector_times().items()})
print({name: f"{sample.median * 1e3:.2f} ms" for name, sample in measured.gather_times(2**20, 2**16).items()})
assert (traffic.turns("one_by_one"), traffic.turns("four_by_four")) == (256, 64)

# %% [markdown]
# ## Threads and caches
#
# *False sharing*: counters that lie in one cache line. *Contention*: threads that together want more than a cache
# holds. More threads than cores bring nothing for arithmetic. OpenMP cuts a loop over threads with one line.

# %%
cores = this_machine().cores
print("two counters:", {name: f"{x.median * 1e3:.2f} ms" for name, x in measured.sharing_times(1_000_000).items()})
contended = measured.contention_times(caches.get("L2", 2**20), threads=max(2, cores), times=20)
print("half a cache each:", {name: f"{x.median * 1e3:.2f} ms" for name, x in contended.items()})
counts = (1, cores, 4 * cores)
print("threads:", {name: f"{x.median * 1e3:.2f} ms" for name, x in measured.thread_times(counts, 2_000_000).items()})
print(
    "OpenMP:",
    {name: f"{x.median * 1e3:.2f} ms" for name, x in measured.openmp_times(counts, 2**18).items()} or "none here",
)

# %% [markdown]
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
