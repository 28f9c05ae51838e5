"""The GPU matmul ladder. Run it with `tilemesh guide ladder`, as a script, or open it as a notebook."""

# %% [markdown]
# # The GPU matmul ladder
#
# One product of two N x N matrices, written again and again: each rung changes one thing. What is counted here is the
# kernel's own CUDA C++ text, executed on your CPU for all threads of a grid by a small interpreter. With an NVIDIA GPU
# the same text is compiled by NVRTC and timed; without one you see what an H200 measured.

# %%
from dataclasses import replace

import numpy as np
import torch

from tilemesh.core.hardware import find_device
from tilemesh.guide.ladder import rungs, studies, times
from tilemesh.guide.ladder.measured import h200_rows, reads_of, reserved_by
from tilemesh.guide.ladder.ours import our_rungs
from tilemesh.guide.lesson import Lesson

lesson = Lesson("ladder")
predict = lesson.predict
counted_only = {"limit": "a count has no limit"}

# %% [markdown]
# ## A first kernel
#
# Host code runs on the CPU: it allocates, copies and launches. Device code runs on the GPU, once for each thread. A
# launch names a **grid** of **blocks** of **threads**; every thread finds its own element from `blockIdx`, `blockDim`
# and `threadIdx`. A launch returns at once: the host waits only where it asks for the result.

# %%
print(rungs.source("first.cu"))
guess = predict(
    "12 x 6 elements, one thread each, C = A + 2 B: reads of global memory",
    name="reads of 72 threads",
    unit="count",
    model=144,
)
first = studies.first_kernel()
lesson.show(guess, first.total(shared=False).elements, missing=counted_only, figure="counted")
assert first.total(shared=False).elements == 144
assert first.stored(shared=False).elements == 72

# %% [markdown]
# A block of 4 x 3 = 12 threads is put into one **warp** of 32 lanes, of which 20 stay empty: blocks should be
# multiples of 32. The hardware hands blocks to multiprocessors (SMs) as they become free, in no promised order; more
# blocks than fit at once (*oversubscription*) keep all of them busy.

# %%
print(f"lanes used: {first.lanes_used:.1%}")
placed = studies.scheduled([3, 2, 4, 2, 3, 2, 2, 3, 2, 4], slots=4)
print("10 blocks on 4 SMs end at", max(end for _, _, end in placed), "where their sum over 4 is", 27 / 4)
assert first.lanes_used == 12 / 32

# %% [markdown]
# ## One element per thread: v1

# %%
v1 = rungs.v1(side=8)
print(v1.text())
guess = predict("v1 with N = 32: elements read from global memory",
                name="v1, N = 32", unit="count", model=v1.predicted(32)[0])  # fmt: skip
counted, _ = rungs.count(v1, 32)
lesson.show(guess, counted.total(shared=False).elements, missing=counted_only, figure="counted")
assert counted.total(shared=False).elements == 2 * 32**3

# %% [markdown]
# ## Registers: v1.5 and v2
#
# A thread that computes V x V elements can use what it has read again. v1.5 reuses A only; v2 adds up outer products
# and reuses both.

# %%
for make in (rungs.v1_5, rungs.v2):
    rung = make(v=4, side=4)
    guess = predict(
        f"{rung.key} with V = 4, N = 32: elements read from global memory",
        name=f"{rung.key}, N = 32, V = 4",
        unit="count",
        model=rung.predicted(32)[0],
    )
    counted, _ = rungs.count(rung, 32)
    lesson.show(guess, counted.total(shared=False).elements, missing=counted_only, figure="counted")
    assert counted.total(shared=False).elements == rung.predicted(32)[0]

# %% [markdown]
# ## Shared memory: v3
#
# The threads of a block fetch a tile of A and one of B together, wait for each other, and then read from shared
# memory. Global reads fall to 2N³/L; the registers are now filled from shared memory, 2N³/V times.

# %%
v3 = rungs.v3(v=4, tile=32, s=8)
print(v3.text())
guess = predict(
    "v3 with L = 32, N = 64: elements read from global memory",
    name="v3, N = 64, L = 32",
    unit="count",
    model=v3.predicted(64)[0],
)
counted, _ = rungs.count(v3, 64)
lesson.show(guess, counted.total(shared=False).elements, missing=counted_only, figure="counted")
assert (counted.total(shared=False).elements, counted.total(shared=True).elements) == v3.predicted(64)

# %% [markdown]
# ## The same reads, faster
#
# From here on the number of elements hardly changes; what changes is how they are moved. **Coalescing**: the 32 lanes
# of a warp should ask for neighbours, since memory moves sectors of 32 bytes. **Padding**: shared memory has 32 banks,
# and a bank gives one word in a pass. **Vector loads**: four elements in one instruction.

# %%
small_rungs = [make(v=4, tile=64) for make in (rungs.v3, rungs.coalescing, rungs.padding, rungs.vector)]
counts = {rung.key: rungs.count(rung, 64)[0] for rung in small_rungs}
print("rung          requests   sectors of A   passes to store sA")
for key, counted in counts.items():
    a, stored = counted.reads["A"], counted.writes["sA"]
    print(f"{key:14}{a.requests:8}{a.passes / a.requests:14.1f}{stored.passes / stored.requests:18.1f}")
assert counts["v3"].reads["A"].passes == 8 * counts["coalescing"].reads["A"].passes
assert counts["coalescing"].writes["sA"].passes == 16 * counts["padding"].writes["sA"].passes
assert counts["padding"].reads["A"].requests == 4 * counts["vector loads"].reads["A"].requests

# %% [markdown]
# ## Divergence, strides and banks, one at a time

# %%
guess = predict(
    "share of lanes at work when neighbouring lanes take 4 different paths",
    name="lanes at work, 4 paths",
    unit="fraction",
    model=1 / 4,
)
kernel = studies.divergence(paths=4, run=1, steps=200)
counted, _ = kernel.run(np.ones(kernel.inputs, np.float32))
lesson.show(guess, counted.lanes_used, limit=1.0, figure="counted")
for stride in (1, 2, 8, 32):
    copied, _ = studies.strided_copy(stride).run(np.zeros(4096, np.float32))
    banked, _ = studies.strided_banks(stride).run(np.zeros(32 * stride, np.float32))
    per_copy = copied.reads["input"].passes / copied.reads["input"].requests
    per_read = banked.reads["words"].passes / banked.reads["words"].requests
    print(f"stride {stride:2}: {per_copy:4.0f} sectors a request, {per_read:4.0f} passes over the banks")
    assert per_copy == studies.sectors_per_request(stride)
    assert per_read == studies.passes_per_request(stride)

# %% [markdown]
# ## The convolution: 384 reads, and how many with shared memory?

# %%
guess = predict(
    "width 3, 128 threads, inputs in shared memory: reads of a block",
    name="convolution, shared",
    unit="count",
    model=130,
)
for shared, expected in ((False, 384), (True, 130)):
    kernel = studies.convolution(shared=shared, blocks=1)
    counted, _ = kernel.run(np.ones(kernel.inputs, np.float32))
    assert counted.total(shared=False).elements == expected
lesson.show(guess, counted.total(shared=False).elements, missing=counted_only, figure="counted")

# %% [markdown]
# ## Occupancy
#
# What the compiler reserved (registers for each thread, shared memory for each block) decides how many blocks fit on a
# multiprocessor. More of them hide waiting better; large tiles need registers. There is no best value.

# %%
h200 = find_device("h200")
rows_of = {row.case["rung"]: row for row in h200_rows()}
for rung in rungs.ladder():
    if rung.key in ("v1.5", "v3", "lower precision"):
        registers, shared_bytes, blocks = reserved_by(rows_of[rung.key])
        resident = studies.occupancy(h200, rung.threads, registers, shared_bytes)
        print(
            f"{rung.key}: {rung.threads} threads of {registers} registers, {shared_bytes:,} bytes in a block: "
            f"{resident.blocks} blocks on an SM, {resident.share:.0%} of its warps, limited by {resident.limited_by}"
        )
        assert resident.blocks == blocks  # as the driver of an H200 told it

# %% [markdown]
# ## On a GPU
#
# Predicted is the slowest of arithmetic, of lines and bank passes (counted above), and of device memory. With a GPU the
# rungs run now; without one these are the rows of an H200.

# %%
if torch.cuda.is_available():
    from tilemesh.guide.ladder.gpu import first_rows, ladder_rows, study_rows

    measured = ladder_rows()
    for row in [*first_rows(), *study_rows()]:
        lesson.add(row)
else:
    measured = h200_rows()
print("rung               global reads     shared reads  bound by (predicted)   registers  blocks on an SM")
for row in measured:
    case = row.case
    words = (case.get(name, "") for name in ("global_reads", "shared_reads", "bound_by", "registers", "blocks_per_sm"))
    print("{:18}{:>13}{:>17}  {:22}{:>10}{:>17}".format(str(case["rung"]), *words))
    kept = replace(row, case={name: case[name] for name in ("rung", "n", "units")})
    lesson.add(kept, stored="" if torch.cuda.is_available() else "an H200")
names = [*(rung.key for rung in rungs.ladder()), *(rung.key for rung in our_rungs())]
assert [row.case["rung"] for row in measured] == names
for rung, row in zip(rungs.ladder(), measured, strict=False):
    assert reads_of(row) == rung.predicted(4096)[0]
print("FLOP per byte asked for:", {rung.key: round(times.intensity(rung, 4096), 2) for rung in rungs.ladder()})

# %% [markdown]
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
