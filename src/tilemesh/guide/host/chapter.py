"""Chapter 10: the CPU in front of the GPU. Run it with `tilemesh guide 10`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 10: the CPU in front of the GPU
#
# A GPU computes nothing by itself: a program on the CPU, the **host**, launches each of its kernels. In a decode step
# a kernel takes a few microseconds, and so does its launch: Python finds the operator, the framework checks shapes
# and takes memory, the driver puts it in a queue. If the host is slower than the GPU, a faster GPU changes nothing.
#
# You can see it without a GPU. This model has 12 layers of 64 numbers: its arithmetic takes almost no time.

# %%
import torch

from tilemesh.core.errors import UsageError
from tilemesh.core.units import format_seconds
from tilemesh.guide.host import work
from tilemesh.guide.lesson import Lesson

lesson = Lesson("10")
predict = lesson.predict
model, x = work.SmallModel().eval(), torch.randn(1, work.WIDTH)
call_s = work.call_seconds()
operators, flops = 3 * work.LAYERS, 2 * work.LAYERS * work.WIDTH**2
print(f"{operators} operators, {flops:,} operations; adding two numbers takes {format_seconds(call_s)}, almost all "
      "of it before anything is added")  # fmt: skip
lesson.source(work.SmallModel.forward)
guess = predict(f"time of a pass: {operators} operators on 64 numbers each",
                name="a pass of small operators", unit="s", model=operators * call_s)  # fmt: skip
with torch.no_grad():
    eager = work.seconds_of(lambda: model(x))
lesson.show(guess, eager, limit=flops / 10e9)
arithmetic = format_seconds(flops / 10e9)
print(f"{format_seconds(eager.median / operators)} per operator; the arithmetic of all at 10 GFLOP/s: {arithmetic}")

# %% [markdown]
# More than 36 additions take: a linear layer is a Python module, a transposed view and a product, and each call costs
# several times what adding two numbers does.
#
# ## Record once, run again
#
# A **CUDA graph** is the list of a step's kernels with their very addresses, recorded once. To run it again is *one*
# launch: no Python, no checks, no memory taken. Here is the same mechanism for operators on the CPU: watch a pass,
# keep each operator with the tensors that it read and wrote, and go down the list.

# %%
lesson.source(work.Recorded)
recorded = work.Recorded(model, x)
guess = predict(f"time of the recorded pass: {len(recorded.calls)} operators without the model's own Python",
                name="the pass, recorded", unit="s", model=work.LAYERS * work.layer_seconds())  # fmt: skip
again = work.seconds_of(lambda: recorded(x))
lesson.show(guess, again, limit=flops / 10e9)
other = torch.randn(1, work.WIDTH)
with torch.no_grad():
    assert torch.equal(recorded(other), model(other)), "the same operators on the same numbers"
print(f"{eager.median / again.median:.2f}× quicker, the same numbers to the bit")

# %% [markdown]
# What a recording cannot know is what breaks it. It was made for one **shape**; a **decision** that Python took from
# a value is taken for ever; and it reads and writes the **same memory**: a result is overwritten by the next run.

# %%
try:
    recorded(torch.randn(2, work.WIDTH))
    raise AssertionError("another shape was accepted")
except UsageError as error:
    print("another shape:", error)
frozen = work.Recorded(work.doubles_if_positive, torch.ones(2))
print(f"a decision: {work.doubles_if_positive(-torch.ones(2)).tolist()} by Python, {frozen(-torch.ones(2)).tolist()} "
      "by the recording of a positive input")  # fmt: skip
first = recorded(x)
kept = first.clone()
recorded(other)
print(f"the same memory: the first result is still what it was: {torch.equal(first, kept)}")
assert not torch.equal(first, kept)
assert frozen(-torch.ones(2)).tolist() == [-2.0, -2.0]

# %% [markdown]
# An engine therefore records its decode step for some batch sizes, **buckets**, and pads a batch to the next larger
# one. How much is computed for nothing if every batch from 1 to 64 is equally likely?

# %%
sizes, powers = list(range(1, 65)), [1, 2, 4, 8, 16, 32, 64]
guess = predict(
    "share of rows that are padding: batches of 1 to 64, recordings for 1, 2, 4, 8, 16, 32 and 64",
    name="padding, buckets 1, 2, 4 … 64",
    unit="fraction",
    model=0.25,  # a batch just above a power of two wastes half, one just below nothing
)
lesson.show(guess, work.padded(sizes, powers),
            missing={"limit": "0 %, with a recording for every size"}, figure="counted")  # fmt: skip
for words, buckets in (("every 8th", [1, 2, 4, *range(8, 65, 8)]), ("every size", sizes)):
    print(f"{words}: {len(buckets)} recordings, {work.padded(sizes, buckets):.1%} padding")

# %% [markdown]
# ## Five milliseconds and two to five
#
# An example that is often told: the GPU computes a step in 5 ms, the CPU schedules it in 2 to 5 ms. One after the
# other that is 7 to 10 ms, of which the CPU takes 29 to 50 % ("20-50 %", as it is told, forgets that 2 of 7 are 29
# %). **Launching ahead** hides it: while the GPU computes a step, the CPU prepares the next. Here a thread that
# sleeps is the GPU.

# %%
lesson.source(work.stepped)
steps = 30
guess = predict(f"{steps} steps of 5 ms on the device and 3 ms on the host, prepared ahead",
                name=f"{steps} steps, prepared ahead", unit="s", model=0.003 + steps * 0.005)  # fmt: skip
ahead_s = work.stepped(steps, 0.005, 0.003, ahead=True)
lesson.show(guess, ahead_s, limit=steps * 0.005)
for host_s in (0.002, 0.003, 0.005):
    serial_s = work.stepped(steps, 0.005, host_s, ahead=False)
    print(f"host {format_seconds(host_s)}: one after the other {format_seconds(serial_s / steps)} per step, the host's "
          f"share {host_s / (host_s + 0.005):.0%}")  # fmt: skip
assert ahead_s < work.stepped(steps, 0.005, 0.003, ahead=False)

# %% [markdown]
# How long does a scheduler take? tilemesh's own, for a step of 64 requests: planned and booked, in Python.

# %%
# a few microseconds for each request
guess = predict("host time of one step of tilemesh's scheduler with 64 requests",
                name="scheduling 64 requests", unit="s", model=64 * 8e-6)  # fmt: skip
booked_s = work.scheduler_seconds(64)
lesson.show(guess, booked_s, missing={"limit": "0, if nothing had to be decided"})

# %% [markdown]
# ## Who waits for whom
#
# Launches run ahead of the device until something is *read*: `.item()`, `.cpu()`, a print. Then the host waits for
# the device, and the device for the host. Twelve kernels of 10 µs, launched in 4 µs each, without and with a read
# after each third:

# %%
host, device = [4e-6] * 12, [10e-6] * 12
for words, waits in (("no read", [False] * 12), ("a read after each third", [place % 3 == 2 for place in range(12)])):
    spans = work.timeline(host, device, waits)
    idle = spans[-1][1] - sum(device)
    print(f"{words}: {format_seconds(spans[-1][1])}, the device idle for {format_seconds(idle)}")
slow_host = work.timeline([20e-6] * 12, device, [False] * 12)
print(f"launches of 20 µs: {format_seconds(slow_host[-1][1])}, the device idle for "
      f"{format_seconds(slow_host[-1][1] - sum(device))}: here a recording helps")  # fmt: skip

# %% [markdown]
# ## Reading a profile
#
# `torch.profiler` counts operators and their time on the host. In a pass of small operators the list is long and each
# entry short: the sign of a host that is in the way.

# %%
with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    model(x)
events = [event for event in profile.key_averages() if event.key.startswith("aten::")]
for event in sorted(events, key=lambda one: -one.self_cpu_time_total)[:4]:
    print(f"{event.key:>12}: {event.count} calls, {event.self_cpu_time_total:.0f} µs")
assert sum(event.count for event in events) >= operators

# %% [markdown]
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
