"""Chapter 7: pipelines. Run it with `tilemesh guide 7`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 7: pipelines
#
# A pipeline cuts work into **stages** that run at the same time on different items, like an assembly line. It is
# older than neural networks: processors do it with instructions, and a program that serves a model does it with
# requests: load, preprocess, infer, postprocess.
#
# Here four stages sleep for 10, 5, 15 and 5 ms. One by one, an item takes 35 ms. With a thread per stage and queues
# between them, how long do 12 items take?

# %%
from functools import partial

import numpy as np

from tilemesh.comm import run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.step import draw
from tilemesh.core.step.action import StepProgram
from tilemesh.core.step.book import build
from tilemesh.core.step.check import check
from tilemesh.core.step.memory import memory_curve, memory_peaks
from tilemesh.core.step.search import PassTimes
from tilemesh.core.step.simulate import simulate
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.guide import on_gpu
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.pipelines import work
from tilemesh.plan import search

lesson = Lesson("7")
predict = lesson.predict
lesson.source(work.pipelined)
items, item_s, slowest = 12, sum(work.STAGES.values()), max(work.STAGES.values())
guess = predict(
    f"time of {items} items through four stages of 10, 5, 15 and 5 ms, pipelined",
    name=f"{items} items, pipelined",
    unit="s",
    model=item_s + (items - 1) * slowest,
)
in_order, alone_s = work.one_by_one(items)
done, pipelined_s, inside_s = work.pipelined(items)
lesson.show(guess, pipelined_s, limit=items * slowest)
print(f"one by one {format_seconds(alone_s)}; an item was inside the pipeline for {format_seconds(inside_s)}")
assert done == in_order == list(range(items))

# %% [markdown]
# Throughput rises to one item per 15 ms, the slowest stage. The **latency** of one item does not fall: it still
# passes all four stages, and now it also waits for slower neighbours.
#
# ## A model as a pipeline
#
# Cut a model's layers into D stages, one per rank, and the batch into N microbatches. Each microbatch goes forward
# through all stages and then backward through them. A *schedule* says in which order each rank does its forward (F)
# and backward (B) passes. GPipe does all forward passes first. In the drawings time runs to the right, `F3` is the
# forward pass of microbatch 3, a dot is waiting, and the line `memory` rises with the activations that a rank keeps.

# %%
stages, microbatches = 4, 8


def show(name: str) -> tuple[float, list[float]]:
    """Prove, time and draw a schedule; its bubble and what each rank keeps."""
    program = build(name, stages, microbatches)
    check(program)
    passes = PassTimes()
    timeline = simulate(program, passes.times(program), keep_slots=True)
    curves = draw.curves(program, timeline, memory_curve(program, passes.sizes(program)))
    print(draw.text(program, timeline, curves, columns=max(60, min(118, lesson.console.width - 1))))
    return timeline.bubble, memory_peaks(program, passes.sizes(program))


guess = predict(
    f"part of all ranks' time that is idle: GPipe, {stages} stages, {microbatches} microbatches",
    name="GPipe's bubble",
    unit="fraction",
    model=(stages - 1) / (stages - 1 + microbatches),
)
gpipe_bubble, gpipe_kept = show("gpipe")
lesson.show(guess, gpipe_bubble, missing={"limit": "0 %, if nothing depended on anything"}, figure="simulated")
assert abs(gpipe_bubble - (stages - 1) / (stages - 1 + microbatches)) < 1e-12
assert gpipe_kept == [microbatches] * stages

# %% [markdown]
# The idle corners are the **bubble**: (D-1)/(D-1+N) of all time. Every rank keeps the activations of all N
# microbatches. **1F1B** has the same bubble and keeps at most D: it does a backward pass as soon as one is possible.

# %%
same_bubble, kept = show("1f1b")
assert abs(same_bubble - gpipe_bubble) < 1e-12
assert kept == [stages - rank for rank in range(stages)]

# %% [markdown]
# More chunks per rank (interleaved) or splitting the backward pass (ZB-H1 puts off gradients of weights, which nobody
# waits for) fill the corners:

# %%
bubbles = {"gpipe": gpipe_bubble, "1f1b": same_bubble}
for name in ("interleaved", "zb-h1"):
    bubbles[name], _ = show(name)
print({name: f"{value:.1%}" for name, value in bubbles.items()})
assert abs(bubbles["interleaved"] - (stages - 1) / (2 * microbatches + stages - 1)) < 1e-12
assert bubbles["zb-h1"] < bubbles["1f1b"]

# %% [markdown]
# ## A schedule is data
#
# `check` proved each of them: every pass happens once, inputs are there, nothing deadlocks. A list in which a rank does
# the backward pass of a microbatch before its forward pass is refused, before anything runs (`1B0`: chunk 1, backward,
# microbatch 0):

# %%
right = build("1f1b", 2, 2)
first, second = right.actions
swapped = (first, tuple(second[place] for place in (1, 0, 2, 3)))  # B0 before F0
try:
    check(StepProgram("swapped", right.placement, 2, swapped))
    raise AssertionError("a schedule that cannot run was accepted")
except UsageError as error:
    print(error)

# %% [markdown]
# And the same lists can be *run*. The executor walks down a rank's list: receive, compute, send. Every schedule must
# give the gradients that one process gives, and keep as many activations as predicted:

# %%
lesson.source(work.run_schedule)
for name in ("gpipe", "1f1b", "interleaved"):
    program = build(name, stages, microbatches)
    problem = work.make(program.chunks, microbatches)
    expected = work.gradients_alone(problem)
    results = run_threads(stages, partial(work.run_schedule, program=program, problem=problem))
    apart = max(float(np.abs(value - expected[chunk]).max()) for sums, _ in results for chunk, value in sums.items())
    most = [count for _, count in results]
    print(f"{name}: gradients at most {apart:.1e} from one process; activations kept by rank {most}")
    assert apart < 1e-12
    share = program.chunks // program.ranks
    assert most == [round(peak * share) for peak in memory_peaks(program, PassTimes().sizes(program))]

# %% [markdown]
# With a GPU the executor runs on its tensors, too. Stages that share one GPU only show that it is right: they gain
# nothing, since one GPU does all the arithmetic, and every activation travels to the host and back.

# %%
on_gpu.add_row(lesson, work.gpu_row)

# %% [markdown]
# ## Which layout?
#
# You have met all of them: data parallelism cuts the batch, ZeRO cuts what is kept, tensor parallelism cuts layers,
# pipelines cut the stack. The order in which to try them: one device; data parallelism; then ZeRO, tensor
# parallelism, pipelines as memory and links demand. The planner computes memory and time for every combination:

# %%
for model, cluster, tokens in (
    ("gpt2-124m", "8xh100", 500_000),
    ("llama-3-8b", "8xh100", 1_000_000),
    ("llama-3-70b", "64xh100", 4_000_000),
):
    best = search(model, cluster, batch_tokens=tokens, shown=1).best
    print(f"{model:>12} on {cluster}: {best.plan.short()}: {best.tokens_per_s:,.0f} tokens/s, "
          f"{format_bytes(best.memory.total_bytes)} per GPU")  # fmt: skip
    assert best.fits
    assert best.plan.tp * best.plan.dp * best.plan.pp == int(cluster.partition("x")[0])

# %% [markdown]
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
