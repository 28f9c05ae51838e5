"""Chapter 16: who cuts what. Run it with `tilemesh guide 16`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 16: who cuts what
#
# Chapters 5 to 7 cut models by hand: rows of the batch, columns and rows of matrices, layers. A model has hundreds of
# operators, and each can be cut in several ways. This chapter lets a program choose. First one operator, C = A·B: C
# has M rows and N columns, and each of its numbers is a sum over K. On four ranks,
#
# - **rows**: rows of A are cut, B is whole. Each rank has rows of C.
# - **along K**: columns of A and rows of B are cut. Each rank has a *part of the sum* of all of C: an all-reduce.
# - **2-D tiles**: rows of A over one pair of ranks, columns of B over the other. Each rank has a tile of C.
# - **rows and K**: rows of A over one pair, K over the other. Each rank has a part of the sum of half of C.
#
# A mesh is the ranks on a grid with named axes, here `tp` and `dp` (chapter 1). Along each axis a tensor is R (the same
# on every rank), S(0) or S(1) (cut along that dim), or P (a part of a sum); torch's DTensor says Replicate, Shard and
# Partial. C has 256 × 192 numbers of 8 bytes, 384 KiB. What does each rank send along K?

# %%
import numpy as np

from tilemesh.core.hardware import parse_cluster
from tilemesh.core.step.book import build
from tilemesh.core.step.draw import bars
from tilemesh.core.step.simulate import StepTimes, simulate
from tilemesh.core.tensor_placement import P, R, S, TensorPlacement, parse
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.graph.evaluate import run_numpy
from tilemesh.guide.cutting import work
from tilemesh.guide.lesson import Lesson
from tilemesh.measure.sample import Sample
from tilemesh.parallel.choose import choose, race
from tilemesh.parallel.choose.dynamic import dynamic
from tilemesh.parallel.choose.stages import StageCut, cut_stages, placed_stage_s
from tilemesh.plan.place.propagate import propagate

lesson = Lesson("16")
predict = lesson.predict
shape = (256, 320, 192)
placed = {name: work.cut_product(name, *shape) for name in work.CUTS}
guess = predict("bytes that each of four ranks sends, cut along K", name="along K, four ranks: sent",
                unit="B", model=work.product_bytes(placed["along K"]))  # fmt: skip
ran = {name: work.run_placed(each, work.arrays_of(each.graph)) for name, each in placed.items()}
lesson.show(guess, float(ran["along K"].sent[0]), limit=2 * 3 / 4 * 256 * 192 * 8, figure="counted")

# %% [markdown]
# All four gave the same product; who holds what, and who sends what, differs:

# %%
for name, each in placed.items():
    product = run_numpy(each.graph, *work.arrays_of(each.graph))[0]
    assert np.abs(ran[name].outputs[0] - product).max() < 1e-10
    cost, output = work.mesh_cost(each.axes), each.graph.outputs[0]
    cuts = [f"{node['name']} {each.placements[node]} ({format_bytes(int(cost.nbytes(node, each.placements[node])))})"
            for node in each.graph.inputs]  # fmt: skip
    print(f"{name:>10}: {', '.join(cuts)}; C comes out as {each.given[output]}, sent {format_bytes(ran[name].sent[0])}")
lesson.source(work.run_local, work.exchange)

# %% [markdown]
# None is best. Rows send nothing, but every rank holds all of B; along K both inputs are cut, and C is summed; tiles
# are between the two. **And where do A and B come from?** What an operator before left cut otherwise must be exchanged
# first.
#
# ## Edges cost
#
# An operator is a node of a graph, and a tensor between two of them an edge. What one leaves as P and the next wants as
# S(0) is a reduce_scatter. For 1,024 × 4,096 numbers in 16 bits, 8 MiB, on four H100s (the planner's formulas):

# %%
step, carried = work.mlp_step(1024, 1024, 4096)
hidden = next(each for each in step.nodes() if each.shape == (1024, 4096))
cost = work.mesh_cost(work.LINE)
for before in (P, S(0), S(1), R):
    words = []
    for after in (S(0), S(1), R):
        seconds, sent = cost.exchange(hidden, TensorPlacement.of(tp=before), TensorPlacement.of(tp=after))
        words.append(f"{after}: {format_seconds(seconds)}, {format_bytes(int(sent))}")
    print(f"from {before!s:>4} to  " + "   ".join(words))

# %% [markdown]
# ## One annotation
#
# If only one tensor is cut by hand, what follows for the others? Rules say for each operator in which ways it can be
# cut with nothing exchanged. Known placements spread along them, forward and backward, and an exchange is put in only
# where nothing else is left. This is **GSPMD's** idea. The graph: a training step of relu(x·A)·B, two products with
# max(·, 0) between them, with its gradients and its new matrices (chapter 15). We annotate A alone: cut by columns.
# What does each rank send in the whole step, with 64 tokens of width 256?

# %%
small, small_carried = work.mlp_step(64, 256, 1024, dtype="float64")
guess = predict(
    "bytes each rank sends in a step whose A is cut by columns (64 × 256 numbers of 8 bytes are 128 KiB)",
    name="one annotation: sent in a step",
    unit="B",
    model=2 * 3 / 4 * 64 * 256 * 8,  # one all-reduce, of the result; nobody asks for the gradient of x
)
annotated = propagate(small, {"A": parse("tp:S1")}, work.LINE)
run = work.run_placed(annotated, work.arrays_of(small))
lesson.show(guess, float(run.sent[0]), limit=2 * 3 / 4 * 64 * 256 * 8, figure="counted")
for tensor in small.inputs:
    print(f"{tensor['name']}: {annotated.placements[tensor]}")
# readers that want the same share an exchange
exchanges = dict.fromkeys(f"{move.collective} of {list(move.node.shape) or 'the loss'}" for move in annotated.exchanges)
print("exchanges: " + ", ".join(exchanges))
alone = run_numpy(small, *work.arrays_of(small))
assert all(np.allclose(mine, ours, rtol=1e-10) for mine, ours in zip(alone, run.outputs, strict=True))
assert str(annotated.placements[small.inputs[2]]) == "tp:S(0)"

# %% [markdown]
# B came out cut by rows: Megatron's layout, from one annotation. But one all-reduce of the result would have been
# enough. Propagation decides at one operator after the other what is cheapest *there*, and does not look further: the
# readers of a sum may get it each in a way of their own. Two annotations may want one tensor in two ways; then
# the cheaper is taken and the conflict listed (`tilemesh graph explain FILE.py:FUNCTION --mesh tp=4 --pin A=tp:S1`
# prints both).
#
# ## Nobody annotates
#
# Without annotations every operator is free. The step above, on four ranks: some operators decide, with a few ways
# each; the others lie as what they read does. How long would this machine take to try every combination?

# %%
space = work.space_of((step, carried))
problem = space.problem
many = int(np.prod([len(own) for own in problem.seconds]))
print(f"{len(step.nodes())} operators, of which {len(problem.seconds)} decide, with "
      f"{' · '.join(str(len(own)) for own in problem.seconds)} = {many:,} placements")  # fmt: skip
# some 400 table lookups in Python
guess = predict(f"time to price {many:,} placements one after the other", name="all placements, one by one",
                unit="s", model=many * 400 * 0.25e-6)  # fmt: skip
readings = work.seconds_per_try(problem)
lesson.show(guess, Sample.of([many * each for each in readings]),
            missing={"limit": "what is never priced costs nothing"})  # fmt: skip

# %% [markdown]
# (300 were priced, and the time was multiplied.) And this is a graph of two matrices. So:
#
# - **random**: the best of a thousand. **greedy**: change one operator's way at a time while it helps.
# - **MCMC**: such changes too, but a worse one is sometimes taken, less and less (FlexFlow).
# - **learned**: a policy draws placements and is rewarded for short times, by chapter 12's REINFORCE (ColocRL).
# - **dp**, dynamic programming (not data parallelism): a *beginning* is a choice for the first operators; of all that
#   look alike to the rest only the best goes on. Exact, if all kinds of beginnings are kept; on wide graphs there are
#   too many, and ours keeps 100.
# - **ILP**: one variable of 0 or 1 for each way of each operator, and a solver that also proves a bound (Alpa).
#
# All are judged by one predicted time. Here they race (without scipy the ILP is missing: `pip install
# 'tilemesh[choose]'`), beside a dp that keeps all beginnings and so proves the least:

# %%
for tokens in (64, 1024):
    space = work.space_of(work.mlp_step(tokens, 1024, 4096))
    proved = dynamic(space.problem, most=1_000_000)
    answers = race(space.problem)
    assert proved.is_optimal
    least_s = space.problem.figures(proved.choice or ()).seconds
    print(f"{tokens} tokens: the least is {format_seconds(least_s)}, proved by {proved.evaluations:,} beginnings "
          "priced")  # fmt: skip
    for answer in answers:
        assert answer.figures is not None
        more = answer.figures.seconds / least_s - 1
        assert more > -1e-9, "nobody is below what was proved"
        print(f"  {answer.chooser:>7}: {format_seconds(answer.figures.seconds)} ({more:+.1%}) after "
              f"{answer.evaluations:>6,} tries in {format_seconds(answer.seconds)}")  # fmt: skip

# %% [markdown]
# What each knew after how many tries (a bar: how much slower its best placement was than the least; none: not):

# %%
tries = [2**power for power in range(15)]
for answer in answers:
    if len(answer.history) > 1:
        above = [seconds / least_s - 1 for seconds in work.best_so_far(answer.history, tries)]
        line = bars([value for value in above for _ in range(3)], 1.0)
        print(f"{answer.chooser:>7} |{line}| 1 to {tries[-1]:,} tries")

# %% [markdown]
# A predicted time is worth no more than its model. Bytes at least can be checked: we run what DP chose and a random
# placement, in float64 on threads, and count. (Fewer may be sent than predicted: an exchange that the next one only
# undoes is not made.)

# %%
tiny = work.mlp_step(64, 256, 1024, dtype="float64")
space = work.space_of(tiny)
for name in ("dp", "random"):
    choice = choose(space.problem, name).choice or ()
    carried_out = work.run_placed(space.placed(choice), work.arrays_of(tiny[0]))
    assert all(np.allclose(a, b, rtol=1e-10) for a, b in zip(carried_out.outputs, alone, strict=True))
    predicted, counted = space.problem.figures(choice).sent_bytes, carried_out.sent[0]
    assert counted <= predicted + 100
    print(f"{name}: {format_bytes(int(predicted))} per rank predicted, {format_bytes(counted)} counted; equal numbers")

# %% [markdown]
# ## Two levels
#
# Within an operator, between operators: a whole model has both (chapter 7's pipelines). **Alpa** chooses on two levels.
# For every stretch of layers and every group of ranks the inner level (above) says how long it takes; the outer one is
# a dynamic program over where to cut. Eight pairs of matrices, 16 microbatches, two H100s (990 TFLOP/s in 16 bits) and
# two A100s (312). How many of the eight layers should the H100s have?


# %%
def pipeline(*devices: str) -> StageCut:
    """The quickest cut of the eight layers on these GPUs, which it must all use."""
    inner = placed_stage_s(lambda layers: work.mlp_step(1024, 1024, 4096, layers), devices, "greedy")
    return cut_stages(8, len(devices), 16, inner, sizes=(1, 2, 4))


ratio = parse_cluster("1xh100").device.peak("bf16") / parse_cluster("1xa100").device.peak("bf16")
guess = predict("layers of 8 for the two H100s", name="layers on the fast ranks",
                unit="count", model=round(8 * ratio / (1 + ratio)))  # fmt: skip
cut = pipeline("h100", "h100", "a100", "a100")
fast = sum(layers for place, layers in enumerate(cut.layers) if sum(cut.ranks[:place]) < 2)
lesson.show(guess, float(fast), missing={"limit": "8: all of them"}, figure="planned")
print(f"stages of {cut.layers} layers on {cut.ranks} ranks; a microbatch takes "
      f"{', '.join(format_seconds(each) for each in cut.stage_s)}, a step {format_seconds(cut.seconds)}")  # fmt: skip
third = [seconds / 3 for seconds in cut.stage_s]
clock = simulate(build("gpipe", len(cut.layers), cut.microbatches), StepTimes(third, third, third))
print(f"on the pipeline's clock of chapter 7: {format_seconds(clock.total_s)}; "
      f"the H100s alone {format_seconds(pipeline('h100', 'h100').seconds)}, "
      f"with two T4s as well {format_seconds(pipeline('h100', 'h100', 't4', 't4').seconds)}")  # fmt: skip
assert abs(clock.total_s / cut.seconds - 1) < 1e-9

# %% [markdown]
# The outer formula is chapter 7's: all stages once, and m - 1 times the slowest. It uses every rank it is given: T4s,
# which have no unit for this number format, make a step longer than no T4s. `tilemesh plan` searches layouts of
# known kinds for our own models; `tilemesh.parallel.place` runs any module so placed.
#
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
