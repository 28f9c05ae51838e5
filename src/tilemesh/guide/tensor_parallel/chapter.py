"""Chapter 6: tensor parallelism. Run it with `tilemesh guide 6`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 6: tensor parallelism
#
# What if one layer's weights are too large for a device, or one token's arithmetic takes too long? Then the matrices
# themselves are cut. The building block is two products with something element-wise between them, z = relu(x·A)·B:
# that is an MLP, and attention has the same shape (queries, keys and values first, the output projection last). Names
# end with the dims of their arrays: `x_TD` has T tokens (rows) of D numbers, and F is the width in the middle.

# %%
from functools import partial

from tilemesh.comm import run_threads
from tilemesh.core.units import format_bytes
from tilemesh.guide import on_gpu
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.tensor_parallel import work
from tilemesh.parallel.gate.cases import cases
from tilemesh.parallel.gate.compare import Gate
from tilemesh.parallel.gate.plant import PLANTS

lesson = Lesson("6")
predict = lesson.predict
lesson.source(work.alone)
problem = work.make(tokens=16, width=12, hidden=32)
alone = work.alone(problem)

# %% [markdown]
# Two products forward, four backward: each forward product has *two* backward ones, for its input and for its matrix.
#
# ## Cut by rows
#
# Cutting the tokens (rows of x) is chapter 5: nothing to send forward, and both weight gradients must be summed.

# %%
lesson.source(work.by_rows)
rows = run_threads(2, partial(work.by_rows, p=problem))
assert work.distance([result.z_TD for result in rows], alone.z_TD, 0) < 1e-12
assert work.distance([result.da_DF for result in rows], alone.da_DF, -1) < 1e-12

# %% [markdown]
# ## Columns, then rows
#
# Cut A by **columns**: rank i gets x·A_i, some whole columns of h, and can apply relu to them at once. Cut B by
# **rows**, the matching ones: rank i gets h_i·B_i, an array of z's full shape that lacks the other ranks' part of the
# sum. One all_reduce finishes z. This is Megatron's way.

# %%
lesson.source(work.columns_then_rows)
ranks, array_bytes = 4, problem.x_TD.nbytes
guess = predict(
    f"bytes each of {ranks} ranks sends in forward (x and z have {format_bytes(array_bytes)} each)",
    name="column, row: forward sends",
    unit="B",
    model=2 * array_bytes * (ranks - 1) / ranks,
)
cut = run_threads(ranks, partial(work.columns_then_rows, p=problem))
lesson.show(guess, float(cut[0].forward_bytes),
            missing={"limit": "the least depends on what may stay cut"}, figure="counted")  # fmt: skip
assert work.distance([result.z_TD for result in cut], alone.z_TD, -1) < 1e-12
assert work.distance([result.dx_TD for result in cut], alone.dx_TD, -1) < 1e-12
assert work.distance([result.da_DF for result in cut], alone.da_DF, 1) < 1e-12  # gradients are cut like their matrices
assert work.distance([result.db_FD for result in cut], alone.db_FD, 0) < 1e-12
assert cut[0].forward_bytes == cut[0].backward_bytes == 2 * array_bytes * (ranks - 1) // ranks

# %% [markdown]
# With a GPU the same function runs on its tensors, with two ranks that share it (chapter 5 says why that takes longer
# than one process):

# %%
on_gpu.add_row(lesson, work.gpu_row)

# %% [markdown]
# Backward sums too, at the other end: dx = Σ da_i·A_iᵀ. The column half is silent forward and sums backward; the row
# half the other way round. Weight gradients need nobody: each rank has the gradient of its own part.
#
# In a Transformer: `fc_q`, `fc_k`, `fc_v` and the MLP's first projection are cut by output (columns), `fc_o` and the
# MLP's last by input (rows), their partial results are summed, and a bias is added once, after the sum.
#
# ## Sequence parallelism, and why backward sends more
#
# Between two such blocks every rank holds the *whole* of z, n times the same, and norms and dropout compute on it n
# times. Sequence parallelism splits the all_reduce into its halves (chapter 3): reduce_scatter leaves each rank its
# tokens only, and the next block gathers them again. Forward sends the same bytes as before. But only the part of x
# was kept, and backward needs all of x for dA. How much does backward send, in halves of an all_reduce?

# %%
lesson.source(work.with_sequence)
half = array_bytes * (ranks - 1) // ranks  # an all_gather or a reduce_scatter
guess = predict(
    f"bytes each of {ranks} ranks sends in backward with sequence parallelism (forward: {format_bytes(2 * half)})",
    name="sequence parallel: backward sends",
    unit="B",
    model=3.0 * half,
)
split = run_threads(ranks, partial(work.with_sequence, p=problem))
lesson.show(guess, float(split[0].backward_bytes),
            missing={"limit": "the least depends on what may be kept"}, figure="counted")  # fmt: skip
assert work.distance([result.z_TD for result in split], alone.z_TD, 0) < 1e-12
assert work.distance([result.dx_TD for result in split], alone.dx_TD, 0) < 1e-12
assert work.distance([result.da_DF for result in split], alone.da_DF, 1) < 1e-12
assert (split[0].forward_bytes, split[0].backward_bytes) == (2 * half, 3 * half)

# %% [markdown]
# So backward communicates more for a reason that can be counted: it has two products for each forward one, and one of
# them needs an input that was not kept whole. (With data parallelism on top, the sums of weight gradients come to it,
# too.)
#
# ## The gate
#
# Is the parallel program still the same program? tilemesh answers by training a whole Transformer on a layout and on
# one process, in float64, and comparing losses, gradients and weights. Here with tp = 2, on threads (`×2`: in two
# microbatches; True: nothing differed):

# %%
chosen = [case for case in cases(2, ("gpt",)) if case.layout.tp == 2 and case.layout.pp == 1][:2]
passed = run_threads(
    2, lambda comm: [(str(checked.case.layout), checked.passed) for checked in Gate(comm, "cpu", None).run(chosen)]
)
print(passed[0])
assert passed[0]
assert all(right for _, right in passed[0])

# %% [markdown]
# A gate is worth something only if it closes. Plant the mistake of the last exercise, a bias added on every rank, and
# it says where the layout differs first:

# %%
planted = run_threads(
    2,
    lambda comm: [
        (checked.passed, checked.where) for checked in Gate(comm, "cpu", PLANTS["mlp-bias-everywhere"]).run(chosen[:1])
    ],
)
print(planted[0])
assert not planted[0][0][0]
assert "layers.1.mlp" in planted[0][0][1]

# %% [markdown]
# `tilemesh verify --ranks 8` does this for every layout, on processes; `--plant mlp-bias-everywhere` shows the
# failure.
#
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
