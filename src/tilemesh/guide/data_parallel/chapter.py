"""Chapter 5: data parallelism. Run it with `tilemesh guide 5`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 5: data parallelism
#
# One step of training is θ' = f(θ, ∇L(θ, D)): from weights θ and data D comes a gradient, and the optimizer f makes
# new weights. Every way to train on many devices cuts one of these symbols. **Data parallelism** cuts D: each rank
# has all weights and a part of the samples.
#
# The model here is a two-layer MLP with its backward pass written out, so that every matrix product can be seen. Names
# end with the dims of their arrays: `x_BD` has B samples (rows) of D numbers, F is the hidden width, E the output's.

# %%
from functools import partial

from tilemesh.comm import run_threads
from tilemesh.core.units import format_bytes
from tilemesh.guide import on_gpu
from tilemesh.guide.data_parallel import work
from tilemesh.guide.lesson import Lesson

lesson = Lesson("5")
predict = lesson.predict
lesson.source(work.gradient_sums)
weights, x, y = work.make(inputs=24, hidden=32, outputs=8, samples=40)

# %% [markdown]
# Is the gradient right? Compare it with a difference quotient: change one weight a little and look at the loss.

# %%
gradient = work.gradient_sums(weights, x, y)
for row, column in ((0, 0), (3, 7), (20, 31)):
    changed = weights.w1_DF.copy()
    changed[row, column] += 1e-6
    quotient = (work.loss_sum(work.MlpWeights(changed, weights.w2_FE), x, y) - work.loss_sum(weights, x, y)) / 1e-6
    print(f"dW1[{row},{column}]: {gradient.w1_DF[row, column]:.6f} by hand, {quotient:.6f} by a difference quotient")
    assert abs(quotient - gradient.w1_DF[row, column]) < 1e-3 * max(1.0, abs(quotient))

# %% [markdown]
# ## Cut the samples
#
# Deal the rows of x out over ranks. Row b of h needs row b of x and nothing else, so forward needs no communication,
# and neither does dh = dz·W2ᵀ in backward. Call such products **type 1**: the cut dimension survives. But dW2 = hᵀ·dz
# *sums over samples*, and so does dW1: the cut dimension is summed away (**type 2**). Each rank gets a part of the
# sum, and an all_reduce adds the parts up. So backward has one type-1 product and two type-2 products, and the
# communication of data parallelism is exactly those two sums.

# %%
lesson.source(work.step_parallel)
alone = work.step_alone(weights, x, y)
for ranks in (2, 3, 4):
    stepped = run_threads(ranks, lambda comm: work.step_parallel(comm, weights, x, y))
    apart = max(work.distance(mine, alone) for mine in stepped)
    print(f"{ranks} ranks: at most {apart:.1e} from one process")
    assert apart < 1e-12
    assert all(work.distance(mine, stepped[0]) == 0 for mine in stepped)  # the same bits on every rank

# %% [markdown]
# The same functions take torch tensors. With a GPU, two ranks that share it do a larger step: they compute what one
# process computes, and take longer, because one GPU does the same arithmetic and the gradients travel to the host and
# back. Two GPUs would halve the arithmetic. Without a GPU there is no such row.

# %%
on_gpu.add_row(lesson, work.gpu_row)

# %% [markdown]
# 3 ranks do not divide 40 samples. It works because *sums* are added up and divided once by the number of all
# samples. Averaging the ranks' averages would be wrong; an exercise below plants that mistake.
#
# No barrier is needed after a blocking all_reduce: when it returns, the result is there.
#
# ## Accumulation: more time instead of more ranks
#
# The same sums can be made by one process, piece by piece: *gradient accumulation*. A batch of 40 in microbatches of
# 8 is 40 / 8 = 5 pieces, and memory for activations of 8 samples is enough.

# %%
lesson.source(work.step_accumulated)
for pieces in (2, 5, 40):
    assert work.distance(work.step_accumulated(weights, x, y, pieces), alone) < 1e-12
guess = predict(
    "samples per update with microbatches of 4, 8 of them accumulated, on 16 ranks",
    name="global batch",
    unit="count",
    model=4 * 8 * 16,
)
counted = sum(4 for rank in range(16) for microbatch in range(8))
lesson.show(guess, float(counted), missing={"limit": "a count has no limit"}, figure="counted")

# %% [markdown]
# ## ZeRO: do not keep everything everywhere
#
# Mixed-precision Adam keeps 16 bytes for each parameter: 2 for the 16-bit weight, 2 for its gradient, and 12 for a
# 32-bit master copy and two moments. Plain data parallelism keeps all of it on every rank. ZeRO cuts it over the n
# ranks: stage 1 the optimizer's 12 bytes, stage 2 the gradients too, stage 3 the weights too.

# %%
lesson.source(work.kept_bytes)
parameters, ranks = 1_000_000, 4
guess = predict(
    "bytes a rank keeps for a million parameters with ZeRO stage 1 on 4 ranks",
    name="ZeRO-1, kept per rank",
    unit="B",
    model=(4 + 12 / 4) * parameters,
)
kept = [work.kept_bytes(stage, ranks, parameters) for stage in range(4)]
lesson.show(guess, float(kept[1].total), limit=16 / ranks * parameters, figure="counted")
for stage, size in enumerate(kept):
    print(f"stage {stage}: weights {format_bytes(size.weights)}, gradients {format_bytes(size.gradients)}, "
          f"optimizer {format_bytes(size.optimizer)}: {size.total / parameters:g} bytes per parameter")  # fmt: skip
assert [size.total / parameters for size in kept] == [16, 4 + 12 / 4, 2 + 14 / 4, 16 / 4]

# %% [markdown]
# What does it cost? Stage 0 sends an all_reduce of the gradients: 2·(n-1)/n of their bytes per rank (chapter 3).
# Stages 1 and 2 send the same amount in two halves: a reduce_scatter gives each rank the summed gradient of *its*
# part, it updates that part, and an all_gather spreads the new weights. Stage 3 keeps the weights cut, gathers each
# layer before forward and again before backward, and reduce-scatters gradients. How much is that?

# %%
lesson.source(work.zero_step)
ranks = 4
array_bytes = weights.count * 8
one_pass = array_bytes * (ranks - 1) // ranks  # what a ring all_gather or reduce_scatter sends per rank
guess = predict(
    f"bytes each of {ranks} ranks sends in a step of ZeRO stage 3 (the weights have {format_bytes(array_bytes)})",
    name="ZeRO-3, sent per rank",
    unit="B",
    model=3.0 * one_pass,
)
sent = {}
for stage in range(4):
    step = partial(work.zero_step, stage=stage, weights=weights, x_BD=x, y_BE=y)
    stepped_and_sent = run_threads(ranks, step)
    assert max(work.distance(new, alone) for new, _ in stepped_and_sent) < 1e-12, "every stage computes the same step"
    sent[stage] = stepped_and_sent[0][1]
lesson.show(guess, float(sent[3]), missing={"limit": "the least depends on how much memory there is"}, figure="counted")
print({f"stage {stage}": format_bytes(amount) for stage, amount in sent.items()})
assert [sent[stage] / one_pass for stage in range(4)] == [2, 2, 2, 3]

# %% [markdown]
# The same step from every stage, to the last digits: what is cut is memory, never the result. Stage 3 sends half as
# much again as stages 0 to 2, and in return keeps 16/n bytes per parameter.
#
# tilemesh trains with any stage: `tilemesh train --mesh dp=4,tp=1 --set plan.zero=2`, and `tilemesh plan` predicts
# memory and speed for each.

# %%
per_parameter = (16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64)
print(f"7.5 billion parameters on 64 GPUs, GB by stage: {[round(factor * 7.5, 2) for factor in per_parameter]}")

# %% [markdown]
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
