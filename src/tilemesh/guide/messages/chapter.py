"""Chapter 2: messages. Run it with `tilemesh guide 2`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 2: messages
#
# Ranks share nothing, so they send. A **message** has two ends: one rank calls `send`, the other calls `recv`, and
# only when both have been called has it arrived. Both ends name the other rank.
#
# (In this chapter threads play the ranks, by chapter 1's `run_threads`, until times are measured.)

# %%
import os

import numpy as np

from tilemesh.comm import Communicator, run_threads
from tilemesh.core.errors import RunError
from tilemesh.core.hardware import LINKS
from tilemesh.core.units import format_rate, format_seconds
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.messages import work
from tilemesh.launch import Ranks
from tilemesh.measure.sample import Sample

lesson = Lesson("2")
predict = lesson.predict
lesson.source(work.greet)
print(run_threads(2, work.greet))
assert run_threads(2, work.greet) == [42, 42]

# %% [markdown]
# `recv` fills an array that exists already: the receiver says how much it expects. If the sizes differ, that is a
# mistake in the program, and both sides get an error. (A number of numpy's default type, float64, has 8 bytes.)


# %%
def wrong_size(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(np.zeros(4), to=1)
    else:
        comm.recv(np.zeros(3), source=0)


try:
    run_threads(2, wrong_size)
    raise AssertionError("a message of the wrong size was delivered")
except RunError as error:
    print(error)

# %% [markdown]
# ## A token round the ring
#
# Now a chain: an array with one number, the *token*, goes from rank 0 to rank 1, on to rank 2 and so forth, and from
# the last rank back to rank 0. Each rank waits for the one before it, adds 1, and passes the token on. With n ranks,
# how many messages are sent in all?

# %%
lesson.source(work.pass_token)
ring = 6
guess = predict(f"messages until the token has gone round {ring} ranks",
                name="token round the ring", unit="messages", model=ring)  # fmt: skip


def token_and_count(comm: Communicator) -> tuple[int, int]:
    seen = work.pass_token(comm)
    return seen, comm.sent.messages  # the communicator counts what this rank has sent


results = run_threads(ring, token_and_count)
sent = sum(messages for _, messages in results)
lesson.show(guess, float(sent), missing={"limit": "a count has no limit"}, figure="counted")
assert sent == ring
assert [seen for seen, _ in results] == [6, 2, 3, 4, 5, 6]

# %% [markdown]
# ## Deadlock
#
# `send` may wait until the other side receives. Two ranks that both send first wait for each other for ever. Nothing
# crashes and nothing is printed: the program just stands still. It is the most common bug of distributed programs.
# Here a **watchdog** notices it after half a second (`timeout_s`), says who waits for whom, and ends the program:

# %%
lesson.source(work.everybody_sends_first)
try:
    run_threads(2, work.everybody_sends_first, timeout_s=0.5)
    raise AssertionError("the deadlock was not noticed")
except RunError as error:
    said = str(error)
print(said)
assert "rank 0 has waited" in said or "rank 1 has waited" in said
assert "is in send to rank" in said

# %% [markdown]
# Two ways out. *In turns*: one rank receives first; right, but only one direction works at a time. *Both at once*:
# `irecv` and `isend` only **begin** and return a handle; the rank waits after both have begun, so no order can be
# wrong.

# %%
lesson.source(work.in_turns, work.both_at_once)
assert run_threads(2, work.in_turns) == [1, 0]
assert run_threads(2, work.both_at_once) == [1, 0]

# %% [markdown]
# ## Waiting
#
# Between `irecv` and `wait()` the array holds whatever it held before. Reading it then is a mistake that raises
# nothing; the numbers are just wrong.

# %%
lesson.source(work.read_too_early)
early, late = run_threads(2, work.read_too_early)[1]
print(f"read before wait(): {early}; after wait(): {late}")
assert (early, late) == (-1, 42)

# %% [markdown]
# A *blocking* call such as `comm.send(...)`, `comm.recv(...)` or `comm.all_reduce(...)` has waited when it returns:
# no barrier (a call in which all ranks wait for one another) is needed after it.
#
# ## The wrong device
#
# A tensor, PyTorch's array, lies on a **device**: in the host's memory (`cpu`) or in a GPU's (`cuda`). Libraries send
# from one kind of memory only: NCCL, NVIDIA's, takes tensors on GPUs and fails for others; MPI built without GPU
# support reads host memory only and crashes on a GPU's address. tilemesh looks first. A tensor without any memory
# stands in for a wrong device here; `cuda` is refused in the same way where there is no GPU:

# %%
answer = run_threads(2, lambda comm: work.on_a_device(comm, "meta"))[0]
print(answer)
assert answer.startswith("refused: input is a tensor on meta")
assert run_threads(2, lambda comm: work.on_a_device(comm, "cpu")) == ["sum is [2.0]"] * 2

# %% [markdown]
# ## How long does a message take?
#
# Now on two real processes of this machine. A message of N bytes takes about **α + N·β**: a fixed time α to get it
# going (the *latency*), and β for every byte (1/β is the *bandwidth*). To help you guess β, a copy of 16 MiB inside
# this process is timed first: no message can be quicker than that.

# %%
lesson.source(work.ping_pong, work.bounce)
small, large = 8, 16 << 20  # bytes; 16 << 20 is 16 * 2**20, 16 MiB
copy_s = work.copy_seconds(large)
print(f"one copy of 16 MiB inside this process: {format_seconds(copy_s)}")
alpha_s = LINKS["memory"].latency_s
small_guess = predict("time of an 8-byte message between two processes of this machine",
                      name="message of 8 B", unit="s", model=alpha_s)  # fmt: skip
large_guess = predict("time of a 16 MiB message between them",
                      name="message of 16 MiB", unit="s", model=alpha_s + 2 * copy_s)  # fmt: skip
with Ranks(2) as ranks:
    (small_times,) = ranks.call(work.ping_pong, [small])[0]
    (large_times,) = ranks.call(work.ping_pong, [large], 15)[0]
with Ranks(2, environ={**os.environ, "OMPI_MCA_smsc": "^cma"}) as ranks:  # explained below
    (shared_times,) = ranks.call(work.ping_pong, [large], 15)[0]
small_s, large_s, shared_s = (Sample.of(times) for times in (small_times, large_times, shared_times))
lesson.show(small_guess, small_s, missing={"limit": "no datasheet says how fast two processes notice each other"})
lesson.show(large_guess, large_s, limit=copy_s, peers={"through shared memory": shared_s})
print(f"the large one through shared memory: {format_seconds(shared_s.median)}")
quickest = [format_seconds(min(times)) for times in (large_times, shared_times)]
print(f"the quickest of {len(large_times)}: {quickest[0]}; through shared memory: {quickest[1]}")
rates = [format_rate(size / sample.median, "B/s") for size, sample in ((large, large_s), (small, small_s))]
print(f"bandwidth of the large one: {rates[0]}; of the small one: {rates[1]}")

# %% [markdown]
# The cost model took α = 1 µs, a typical figure for two processes that share memory and each have a core to
# themselves. `send` and `recv` are Python here, which compares sizes and watches for deadlocks: that adds some 20 µs.
# If α came out far above that, other programs are using your cores, and a process must first be given one before it
# can notice a message.
#
# For β the model took two copies: by the sender into memory that both processes share, and by the receiver out of it.
# The large message took longer? Then MPI let the *kernel* copy it, straight from one process into the other
# (*cross-memory attach*, CMA). That is one copy instead of two, but the kernel looks up every page of 4 KiB that it
# reads: 4,096 pages, at about a microsecond each, are 4 ms. So the message was also sent with MPI told not to do so
# (`OMPI_MCA_smsc=^cma`), and that is the figure *through shared memory*: the model's two copies, partly at the same
# time. It needs both processes to run together; where other programs interrupt them, it is the slower way. Compare the
# quickest messages of both: they met the fewest interruptions.
#
# The small message carries two million times fewer bytes and takes perhaps a thousand times less time: it is all α.
# So ten small messages cost ten times α, and one with all their bytes costs one. That is why training systems collect
# many small arrays into one large *bucket* before they send it.
#
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
