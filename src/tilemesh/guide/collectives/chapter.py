"""Chapter 3: collectives. Run it with `tilemesh guide 3`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 3: collectives
#
# A **collective** is a call that all ranks of a group make together: add up everybody's array, give everybody a copy,
# deal out parts. There are eight that matter. Each line below shows one rank's blocks before and after: `b2` is block
# 2 of rank 1 (ranks are a, b, c), `Σ2` is the sum of all ranks' block 2, a dot is nothing.

# %%
from functools import partial

from tilemesh.comm import minimal, run_threads
from tilemesh.comm.schedules import cost, draw
from tilemesh.comm.schedules.book import build
from tilemesh.comm.schedules.check import check
from tilemesh.comm.schedules.simulate import Memory, simulate
from tilemesh.comm.schedules.topology import Flat, LinearArray, Wire
from tilemesh.core.units import format_bytes, format_rate, format_seconds
from tilemesh.guide import on_gpu
from tilemesh.guide.collectives import work
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.messages.work import copy_seconds, ping_pong
from tilemesh.launch import Ranks
from tilemesh.measure.machine import this_machine
from tilemesh.measure.sample import Sample

lesson = Lesson("3")
predict = lesson.predict
print(draw.pictures(3))

# %% [markdown]
# They come in pairs that undo each other, or would if adding could be undone: scatter and gather; broadcast and
# reduce; all_gather and reduce_scatter. Where one *copies*, the other *adds*. (Training needs both: it goes forward
# through a model and then backward, to find out how the loss depends on every number. If forward copies a number to
# four ranks, backward adds up what the four found out.) all_reduce is reduce_scatter followed by all_gather.
# all_to_all, in which everybody sends a different block to everybody, undoes itself. Tried out on four ranks:

# %%
for rank_says in run_threads(4, work.inverses):
    assert all(rank_says.values()), rank_says
print("\n".join(rank_says))

# %% [markdown]
# ## The naive way
#
# With the messages of chapter 2 every collective is a few lines: send everybody what they need, and combine what
# comes. `comm/minimal.py` has five of them (all_reduce, reduce_scatter, all_gather, all_to_all, broadcast; the others
# are parts of these), and they agree with the built-in ones.

# %%
lesson.source(minimal.exchange, minimal.all_reduce)
for rank_says in run_threads(4, work.minimal_and_built_in):
    assert all(rank_says.values()), rank_says

# %% [markdown]
# So why are there libraries of collectives? Count the bytes. The minimal all-reduce sends the whole array to each of
# the other ranks. A **ring** cuts the array into as many pieces (*chunks*) as there are ranks. Each rank sends one
# piece to its neighbour, which adds its own and sends the sum on. After n-1 rounds every rank owns one finished piece
# (that was a reduce_scatter); n-1 more rounds carry the finished pieces round (an all_gather).
#
# Below, each line is a round and each column a rank: `→1:3` sends piece 3 to rank 1, `←3:2+` receives piece 2 from rank
# 3 and adds it, without `+` it replaces what was there. Round 0 copies the input, so that it stays as it is.

# %%
print(draw.text(build("all_reduce", "ring", 4)))
ranks, nbytes = 4, 1 << 20
guess = predict(
    f"bytes that each of {ranks} ranks sends in a ring all-reduce of 1 MiB",
    name="ring all-reduce of 1 MiB: sent",
    unit="B",
    model=cost.traffic("all_reduce", "ring", ranks, nbytes).nbytes,
)
counted = {
    name: run_threads(ranks, partial(work.traffic_of, algorithm=name, nbytes=nbytes))
    for name in ("minimal", "ring", "tree")
}
lesson.show(guess, float(counted["ring"][0][1]), limit=2 * nbytes * (ranks - 1) / ranks, figure="counted")
for name, per_rank in counted.items():
    words = "; ".join(f"{messages}, {format_bytes(sent)}" for messages, sent in per_rank)
    print(f"{name:>8}, messages and bytes by rank: {words}")
assert counted["minimal"] == [(ranks - 1, nbytes * (ranks - 1))] * ranks
assert counted["ring"] == [(2 * (ranks - 1), 2 * nbytes * (ranks - 1) // ranks)] * ranks

# %% [markdown]
# The ring's 2·(n-1)/n arrays per rank is also the least possible: in every all-reduce the rank that sends most sends at
# least so much. (The limit column says so. Some ranks of the tree sent less, others more.) But it takes 2·(n-1) rounds,
# one after the other. A **tree** adds up in pairs, then pairs of pairs: 2·log2(n) rounds, in each of which whole arrays
# are sent.

# %%
print(draw.text(build("all_reduce", "tree", 4)))
for algorithm in ("ring", "tree"):
    for size in (2, 3, 4, 8, 13):
        check(build("all_reduce", algorithm, size))  # proves: everybody gets every contribution exactly once

# %% [markdown]
# `check` does not run anything: a schedule here is data, and the check follows every piece through it. It would
# refuse a schedule that adds something twice or forgets somebody.
#
# ## α and β of this machine
#
# Chapter 2: a message of N bytes takes α + N·β. Measure both between two processes, and everything else follows. With
# n ranks and an array of N bytes a ring takes 2(n-1)·(α + N/n·β), for its messages have N/n bytes, and a tree takes
# 2·log2(n)·(α + N·β).

# %%
four = Ranks(4)
messages = four.call(ping_pong, [8, 1 << 20, 8 << 20], 15)[0]  # between ranks 0 and 1, 15 times each
small_s, middle_s, large_s = (Sample.of(times).median for times in messages)
alpha_s = small_s
beta_s = max(large_s - middle_s, 1e-9) / (7 << 20)  # 7 MiB more took so much longer
wire = Wire(alpha_s, 1 / beta_s)
print(f"α = {format_seconds(alpha_s)}, 1/β = {format_rate(1 / beta_s, 'B/s')}")
for size in (1 << 10, 64 << 10, 4 << 20):
    ring_s, tree_s = (cost.seconds("all_reduce", name, 4, size, wire) for name in ("ring", "tree"))
    winner = "ring" if ring_s < tree_s else "tree"
    print(f"{format_bytes(size):>8}: ring {format_seconds(ring_s)}, tree {format_seconds(tree_s)}: {winner}")

# %% [markdown]
# Now the prediction of this chapter. Four ranks all-reduce 64 MiB by a ring. The cost model takes α and β from above;
# it does not know how many cores you have. The limit: every rank must at least read its array once and write the
# result once, which is one copy per rank, shared by the cores.

# %%
size, cores = 64 << 20, this_machine().cores
guess = predict("time of a 64 MiB all-reduce on 4 ranks",
                unit="s", model=cost.seconds("all_reduce", "ring", 4, size, wire))  # fmt: skip
copy_s = copy_seconds(size)


def of_slowest(by_rank: list[list[float]]) -> Sample:
    """A collective is done when its slowest rank is: of each repetition the longest time counts."""
    return Sample.of([max(times) for times in zip(*by_rank, strict=True)])


measured = {name: of_slowest(four.call(work.all_reduce_seconds, size, name)) for name in ("ring", "auto")}
lesson.show(guess, measured["ring"], limit=copy_s * max(1.0, 4 / cores), peers={"auto": measured["auto"]})
ring_s, auto_s = measured["ring"].median, measured["auto"].median
print(f"ring {format_seconds(ring_s)}, what tilemesh picks by itself {format_seconds(auto_s)}")

# %% [markdown]
# The model is too optimistic, for reasons that it does not know. If four ranks have fewer than four cores, they take
# turns, and other programs may take the cores as well. And β was measured with one message under way, of 8 MiB, which
# caches may hold: now four ranks copy and add at the same time, out of one memory. (On 16 free cores of a Xeon the
# model said 10 ms, and 73 were measured.)
#
# What tilemesh picks by itself on one machine is no ring at all: ranks of one machine can share memory (the *stage*
# below), so nobody needs to send. `comm.explain("all_reduce", nbytes)` returns a text that says what would be picked
# for so many bytes and why, and what every algorithm would send. Times stand there once `tilemesh bench collective
# --fit` has measured this machine. Rank 0's:

# %%
print(four.call(work.explained, size)[0])

# %% [markdown]
# With a GPU, the same again with tensors that lie on it. The four ranks share it, so everything goes to the host's
# memory and back. Without a GPU there is no such row.

# %%
device = on_gpu.gpu()
if device is not None:
    gpu_row = on_gpu.all_reduce_row(
        device, 4, size, measured["ring"], lambda: of_slowest(four.call(work.gpu_all_reduce_seconds, size, device))
    )
    lesson.add(gpu_row)
four.close()

# %% [markdown]
# ## A ring on a line
#
# Machines are not always wired as rings. Put n ranks in a row with wires between neighbours only (a *linear array*).
# The ring's messages go to the right-hand neighbour, except the last rank's, which must travel back over all wires.
# With **wormhole routing** each node passes a message on while it is still arriving, so the long way costs only a
# little latency per hop. And it meets nobody: all other messages go the other way. If nodes stored the whole message
# first, it would cost n-1 times as much. Simulated:

# %%
free = Memory(1e18, 1e18)  # adding and copying take no time here: only messages do
line_ranks, payload = 8, 1 << 20
ring = build("all_reduce", "ring", line_ranks)
link = Wire(2e-6, 25e9)
on_ring = simulate(ring, payload, Flat(line_ranks, link), free).seconds
wormhole = simulate(ring, payload, LinearArray(line_ranks, link, 1e-7), free).seconds  # 0.1 µs for each hop more
stored = simulate(ring, payload, LinearArray(line_ranks, link, stores=True), free).seconds
print(
    f"ring {format_seconds(on_ring)}, line, wormhole {format_seconds(wormhole)}, line, stored {format_seconds(stored)}"
)
assert on_ring < wormhole < 1.2 * on_ring
assert abs(stored / on_ring - (line_ranks - 1)) < 1e-6

# %% [markdown]
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
