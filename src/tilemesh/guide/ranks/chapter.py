"""Chapter 1: hello, ranks. Run it with `tilemesh guide 1`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 1: hello, ranks
#
# A distributed program is **one program that is started several times**. Each started copy is a *process*: the
# operating system gives it a number (its pid) and memory of its own. The launcher gives each copy a second number,
# its **rank**: 0, 1, 2 and so on. All ranks together are the **world**.
#
# The page that goes with this chapter, with drawings, is `docs/guide/ranks/README.md`.
#
# Each chapter asks you to *predict* a number before it measures it. A wrong guess costs nothing and teaches more than
# a right one that was never made. Type `3 ms`, `2.5 GB/s` or `12`; Enter skips. Beside your guess you will see what a
# *cost model* says (a formula, computed beforehand), what was *measured*, and the *limit*: the best that could be.
#
# The code below only imports what the chapter needs; you need not know these modules.

# %%
import os
import subprocess
import sys
import time
from pprint import pprint

from tilemesh.comm import run_threads
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.ranks import work
from tilemesh.launch import Ranks
from tilemesh.measure.machine import this_machine

lesson = Lesson("1")
predict = lesson.predict

# %% [markdown]
# ## Starting ranks
#
# `Ranks(4)` starts four processes that wait for work; `ranks.call(function)` runs a function on each and returns a
# list with one result per rank. The function lives in a file that every process can import (`lesson.source` prints
# its code). In it, `connect()` finds the other ranks and returns the **communicator**, the object through which a rank
# knows its own number (`comm.rank`) and how many there are (`comm.size`), and through which it will reach the others:

# %%
lesson.source(work.hello)

# %% [markdown]
# Starting a process takes time: Python starts, imports libraries, and the processes find one another. First we start
# one rank and time it. With that figure, how long will four take? (The cost model assumes that your cores share the
# work.)

# %%
began = time.perf_counter()
alone = Ranks(1)
alone.call(work.hello)
one_s = time.perf_counter() - began
alone.close()

began = time.perf_counter()
subprocess.run([sys.executable, "-c", "pass"], check=True)
python_s = time.perf_counter() - began  # the least a process can cost: Python starts and ends

cores = this_machine().cores
print(f"one rank: {one_s:.2f} s on a machine with {cores} cores; Python alone: {python_s:.3f} s")
guess = predict(
    "time to start 4 ranks and get an answer from each",
    name="start of 4 ranks",
    unit="s",
    model=one_s * max(1.0, 4 / cores),
)

began = time.perf_counter()
ranks = Ranks(4)
answers = ranks.call(work.hello)
lesson.show(guess, time.perf_counter() - began, limit=python_s * max(1.0, 4 / cores))
pprint(answers)

# %% [markdown]
# Four different pids: four processes. Every one executed the same function; only `rank` tells them apart. This style
# has a name, SPMD: *single program, multiple data*. (Lines that begin with `assert` check what was just said. If one
# of them did not hold on your machine, the chapter would stop there.)

# %%
assert [answer["rank"] for answer in answers] == [0, 1, 2, 3]
assert {answer["world"] for answer in answers} == {4}
assert len({answer["pid"] for answer in answers}) == 4
assert os.getpid() not in {answer["pid"] for answer in answers}

# %% [markdown]
# ## Memory is not shared
#
# `count_up` adds 1 to a global variable. Four ranks call it twice each. If they shared memory, the counter would
# reach 8.

# %%
lesson.source(work.count_up)
ranks.call(work.count_up)
counted = ranks.call(work.count_up)
print(counted)
assert counted == [2, 2, 2, 2]

# %% [markdown]
# Each rank has a counter of its own. To combine what ranks know, they must send it. `all_reduce` does that: every
# rank gives an array, every rank gets the sum (chapter 3 takes it apart).

# %%
lesson.source(work.add_up)
guess = predict(
    "sum that each of 4 ranks gets when every rank gives its number",
    name="sum of ranks",
    unit="count",
    model=0 + 1 + 2 + 3,
)
sums = ranks.call(work.add_up)
ranks.close()
lesson.show(guess, float(sums[0]), missing={"limit": "a count has no limit"}, figure="counted")
assert sums == [6, 6, 6, 6]

# %% [markdown]
# ## Threads that play ranks
#
# For learning and for tests the same code can run on *threads* of this one process. Nothing is started, so it is
# quick; but the pid is the same everywhere. `run_threads(n, main)` calls `main(comm)` on n threads, each with a
# communicator of its own: nobody need call `connect()`.

# %%
pids = run_threads(4, lambda comm: (comm.rank, os.getpid()))
print(pids)
assert {pid for _, pid in pids} == {os.getpid()}

# %% [markdown]
# ## Groups
#
# A large model may not fit into one process's memory, so several ranks hold a part of it each. How many is called
# tp, for *tensor parallel*. To get through more data, there are several such copies of the model; their number is dp,
# for *data parallel*. With dp = 2 and tp = 4, eight ranks form a grid (a *mesh*) of two rows and four columns. A rank
# then works in two groups: its **row**, the ranks that together hold its copy (its *tensor-parallel group*), and its
# **column**, the ranks that hold the same part of the other copies (its *data-parallel group*). `comm.split(color)`
# makes groups: every rank calls it with a number, the color, and ranks that give the same number get a communicator of
# their own.

# %%
lesson.source(work.in_groups)
by_rank = run_threads(8, lambda comm: work.in_groups(comm, tp=4))
for rank, groups in enumerate(by_rank):
    print(f"rank {rank}: row {groups['row']}, column {groups['column']}")
assert by_rank[6] == {"row": [4, 5, 6, 7], "column": [2, 6]}

# %% [markdown]
# ## Exercises
#
# A wrong answer is told why it is wrong.

# %%
lesson.exercises()

# %%
lesson.close()
