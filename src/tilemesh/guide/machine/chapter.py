"""Chapter 4: the machine. Run it with `tilemesh guide 4`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 4: the machine
#
# Everything so far ran on *some* machine. This chapter measures yours: how a processor executes instructions, how
# long it waits for data, and what that means for layers of a model.
#
# ## A processor, cycle by cycle
#
# An instruction is fetched, decoded, its operands are loaded, it is executed and its result stored: five steps of one
# cycle. Done one after the other, every instruction takes 5 cycles: CPI, *cycles per instruction*, is 5. In a
# **pipeline** the next instruction is fetched while this one is decoded, and CPI tends to 1, unless an instruction
# needs the result of the one before.

# %%
from tilemesh.core.cost import Ceiling, bound_by, limit_s
from tilemesh.core.hardware import H100, LINKS
from tilemesh.core.units import format_bytes, format_count, format_rate, format_seconds
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.machine import growth, hierarchy, layers, processor, work
from tilemesh.guide.messages.work import copy_seconds

lesson = Lesson("4")
predict = lesson.predict
lesson.source(processor.pipelined)
guess = predict(
    "cycles of 100 instructions in a pipeline of 5 stages, none waiting for another",
    name="100 instructions, pipelined",
    unit="count",
    model=5 + 99,
)
quick, slow = processor.pipelined(processor.independent(100)), processor.pipelined(processor.chained(100))
lesson.show(guess, float(processor.cycles(quick)), limit=100.0, figure="counted")
for words, fetched in (
    ("one by one", processor.sequential(processor.independent(100))),
    ("pipelined", quick),
    ("pipelined, each needs the one before", slow),
):
    print(f"{words}: {processor.cycles(fetched)} cycles, CPI {processor.cycles(fetched) / 100:.2f}")
assert processor.cycles(quick) == 104
assert processor.cycles(slow) == 5 + 99 * 3

# %% [markdown]
# Throughput rises, the latency of one instruction does not: it still takes five cycles. Chapter 7 says the same of
# models. (Real processors pass results on before they are stored, guess branches and start several instructions per
# cycle; the principle stays.)
#
# ## The memory hierarchy
#
# Fast memory is small and large memory is slow, so machines have several. Latency: the time of one read that must
# wait for the one before. How long does a read from main memory take, if no cache helps?

# %%
lesson.source(hierarchy.cycle_of)
guess = predict(
    "time of one read from main memory that no cache helps", name="one read from memory", unit="s",
    model=hierarchy.TYPICAL_S["memory"],
)  # fmt: skip
levels = hierarchy.measure()
by_name = {level.name: level for level in levels}
print(f"{'level':<10} {'read':>9} {'latency':>10} {'bandwidth':>12}")
print("\n".join(level.words() for level in levels))
memory = by_name["memory"]
if memory.latency_s is not None:
    lesson.show(guess, memory.latency_s, missing={"limit": "no datasheet of this machine's memory is known here"})
else:
    print("latencies need a C compiler (cc), and there is none here")

# %% [markdown]
# From a register to memory it is a factor of some hundred; to another process a factor of ten thousand; to the disk
# some hundred thousand and more. Bandwidths differ far less than latencies. So a program is fast when it reads each
# byte once, in large pieces, and reuses it while it is close: **locality**. The studies of loop order and tiling are in
# `tilemesh guide locality`.
#
# How the pieces hang together, the *topology*, decides which way is short. Ranks that talk most belong on cores that
# share a cache, or on GPUs that share NVLink:

# %%
print(work.topology())
for name in ("nvlink4", "pcie5", "ndr", "ethernet100"):
    link = LINKS[name]
    rate = format_rate(link.bytes_per_s, "B/s")
    print(f"{name:>12}: {rate:>10} in one direction, {format_seconds(link.latency_s)} for a small message")
print(
    f"an H100's own memory: {format_rate(H100.memory_bytes_per_s, 'B/s')}, its L2 cache: {format_bytes(H100.l2_bytes)}"
)
print(f"its shared memory: {format_bytes(H100.shared_bytes_per_sm)} on each of {H100.sm_count} SMs")

# %% [markdown]
# ## Roofline
#
# An operation has some FLOPs and moves some bytes. It cannot be faster than FLOPs / peak, nor than bytes / bandwidth.
# The larger of the two is its limit, and FLOPs per byte, the **arithmetic intensity**, decides which it is. An
# addition z = x + y of large arrays does 1 FLOP per 3 numbers moved: memory is all that counts. Predict its time from
# the time of a copy:

# %%
elements = 4_000_000
nbytes = 8 * elements
copy_s = copy_seconds(nbytes)  # reads and writes nbytes
guess = predict(
    f"time of z = x + y on arrays of {format_bytes(nbytes)}, if a copy of one takes {format_seconds(copy_s)}",
    name="z = x + y",
    unit="s",
    model=copy_s * 3 / 2,
)
lesson.show(guess, work.add_seconds(elements), limit=copy_s * 3 / 2)

# %% [markdown]
# Now layers. For each: what it keeps (parameters), what it computes (FLOPs), what it moves (bytes), and where that
# puts it under the roof of an H100. torch counts the same FLOPs:

# %%
ceiling = Ceiling.of_device(H100)
counted = layers.count_with_torch()
print(f"{'layer':<12} {'parameters':>10} {'FLOPs':>10} {'moved':>10} {'FLOP/byte':>9} bound by")
for row in layers.rows():
    amounts = [format_count(row.parameters), format_count(row.cost.flops), format_bytes(row.cost.bytes_moved)]
    print(
        f"{row.name:<12}",
        *(f"{amount:>10}" for amount in amounts),
        f"{row.cost.intensity:>9.1f}",
        bound_by(row.cost, ceiling),
    )
    assert counted[row.name] == row.cost.flops
assert bound_by(layers.rnn(512, 1024).cost, ceiling) == "memory"

# %% [markdown]
# "A kernel is 80 % memory and 20 % compute" is a rule of thumb of those who write them. Count it: the operators of
# one Transformer layer on 512 tokens, one by one, under the same roof.

# %%
operators = layers.operators(512, 1024)
by_memory = [op for op in operators if bound_by(op.cost, ceiling) == "memory"]
flops_share = sum(op.cost.flops for op in by_memory) / sum(op.cost.flops for op in operators)
time_share = sum(limit_s(op.cost, ceiling) for op in by_memory) / sum(limit_s(op.cost, ceiling) for op in operators)
print(f"{len(by_memory)} of {len(operators)} operators are bound by memory: {', '.join(op.name for op in by_memory)}")
print(f"they do {flops_share:.1%} of the FLOPs and take {time_share:.0%} of the least time")
assert {op.name for op in by_memory} >= {"norm", "rotary", "residual sum", "activation"}
assert flops_share < time_share

# %% [markdown]
# Fusing such operators with their neighbours, so that their numbers never go to memory, is what the kernels of tilemesh
# do.
#
# The RNN computes a quarter of what the MLP does and moves some eighty times as many bytes: it reads its weights again
# at every step, since a step needs the result of the one before. It is bound by memory, and no amount of parallel
# hardware helps. That the Transformer has no such chain over tokens is a reason for its success.
#
# ## Amdahl's law, and locality against parallelism
#
# If a part f of a program runs on one processor only, p processors make it 1 / (f + (1-f)/p) times faster. Here a
# program sleeps 40 ms alone and 160 ms of work that four threads share:

# %%
guess = predict(
    "times faster on 4 workers, if 20 % of the work is for one only", name="4 workers, 20 % serial", unit="count",
    model=processor.amdahl(0.2, 4),
)  # fmt: skip
one_s, four_s = work.half_serial(1, 0.04, 0.16), work.half_serial(4, 0.04, 0.16)
lesson.show(guess, one_s / four_s, missing={"limit": "4 workers: at most 4, and 5 with any number"})
print(f"with 100 workers: {processor.amdahl(0.2, 100):.1f}")
assert abs(processor.amdahl(0.2, 100) - 4.8) < 0.01

# %% [markdown]
# Parallel hardware must also be *fed*. Cut one product of 8192 x 8192 matrices over several GPUs, and send one matrix
# to each of them first. Over fast links more devices help; over slow ones the data had better stay where it is:

# %%
for name in ("nvlink4", "ndr", "ethernet10"):
    times = {count: work.matmul_on(H100, count, name) for count in (1, 2, 4, 8)}
    best = min(times, key=lambda count: times[count])
    words = ", ".join(f"{count}: {format_seconds(value)}" for count, value in times.items())
    print(f"{name:>11}, time by number of GPUs: {words}; best: {best}")
assert work.matmul_on(H100, 8, "ethernet10") > work.matmul_on(H100, 1, "ethernet10")

# %% [markdown]
# ## Models against hardware
#
# GPT had 0.117 billion parameters in 2018, PaLM 540 billion in 2022; training keeps 16 bytes for each (chapter 5). In
# the same years the memory of a GPU grew from 32 to 80 GB. The gap is why the next chapters exist.

# %%
for year, gpu in growth.GPUS.items():
    rates = f"{format_rate(gpu.fp16_flops_per_s, 'FLOP/s')} in fp16, {format_rate(gpu.bytes_per_s, 'B/s')}"
    print(f"{year} {gpu.name:>8}: {format_bytes(gpu.memory_bytes)}, {rates}")
more_model, more_memory = growth.times_larger(2018, 2022)
print(f"2018 to 2022: a model to train {more_model:,.0f} times larger, a GPU's memory {more_memory:.2g} times")

# %% [markdown]
# ## Look, do not guess
#
# Three tools. `nvidia-smi` shows whether GPUs are busy and how full they are. `torch.profiler` says which operators
# ran, how often and how long. `NCCL_DEBUG=INFO` in the environment makes NCCL print which links and algorithms it
# chose. In tilemesh: `tilemesh report`, `tilemesh watch`, and `comm.explain(...)`.

# %%
print(work.gpu_words())
for gpu_row in work.gpu_rows():  # with a GPU: its peak, bandwidth, launches and link beside the datasheet
    lesson.add(gpu_row)
calls = work.profiled()
print({name: calls[name] for name in ("aten::addmm", "aten::relu", "aten::mm") if name in calls})
assert calls["aten::addmm"] == 2  # two linear layers forward
assert calls["aten::mm"] == 3  # backward: two weight gradients, one gradient of the hidden layer

# %% [markdown]
# Two products forward, three backward: chapter 5's MLP, seen by a profiler.
#
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
