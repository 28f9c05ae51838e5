"""Chapter 15: programs as data. Run it with `tilemesh guide 15`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 15: programs as data
#
# A model is a program. As long as it is Python that runs line by line, nobody can look ahead. Written down as **data**,
# a graph of operators and of the arrays between them, other programs can read it: one that differentiates it, one
# that makes it faster, one that proves that both are equal, one that searches. Here is such a graph, for
# loss = Σ (tanh(x·A)·B)²; every line is an operator.

# %%
import numpy as np
import torch

from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.graph import Graph, build, derive, run_numpy, trace
from tilemesh.graph.cost import graph_seconds
from tilemesh.graph.emit import program
from tilemesh.graph.rules import simplify
from tilemesh.guide import on_gpu
from tilemesh.guide.dataflow import work
from tilemesh.guide.dataflow.search import as_rules, read_proofs, read_substitutions, search
from tilemesh.guide.dataflow.substitute import parse, refuted
from tilemesh.guide.lesson import Lesson
from tilemesh.kernels.tuning.search import prune
from tilemesh.kernels.tuning.search import search as tune

lesson = Lesson("15")
predict = lesson.predict
inputs, loss = work.network()
forward = Graph(inputs, (loss,))
print(forward)

# %% [markdown]
# ## Derivatives, by hand and by pass
#
# **Forward mode**: with every number goes how much it moves when one input moves. For f = exp(x)·y at x = 1, y = 3:

# %%
lesson.source(work.Dual)
print(f"∂f/∂x = {(work.Dual(1.0, 1.0).exp() * work.Dual(3.0, 0.0)).slope:.6f} by hand")
x, y = build.argument("x", [], "float64"), build.argument("y", [], "float64")
both, _ = simplify(derive.jvp(Graph((x, y), (build.multiply(build.exp(x), y),)), [x]))
print(both)
assert np.isclose(run_numpy(both, *(np.float64(each) for each in (1, 3, 1)))[1], 3 * np.e)

# %% [markdown]
# The pass did not compute a derivative, it *wrote a program* for it, and exp(x), which the value and its slope both
# need, is there once. One pass of forward mode says how everything moves with **one** input. **Reverse mode** goes
# from the result back: each operator hands on to its operands how the result moves with them (the last exercise).
# One pass gives the slopes of **one** result with respect to all inputs. Above, x has 32 × 8 numbers, A 8 × 16 and B
# 16 × 4, and there is one loss. For all its slopes, how many times more passes does forward mode need?

# %%
guess = predict("passes of forward mode for each of reverse mode",
                name="forward / reverse passes", unit="count", model=448.0)  # fmt: skip
cost = derive.jacobian_cost(forward, inputs)
ratio = float(str(cost["forward"]["passes"])) / float(str(cost["reverse"]["passes"]))
lesson.show(guess, ratio, missing={"limit": "1: as many inputs as results"}, figure="counted")

# %% [markdown]
# ## Why not layer by layer?
#
# Older systems (Caffe) knew *layers*: each has code forward, and code backward that somebody wrote. Backpropagation
# runs the second kind in reverse. (PyTorch is between the two: autograd notes each operator as it runs and walks the
# notes back once; `torch.compile` writes both passes as a graph, as here.) The gradients are the same:

# %%
lesson.source(work.by_layers)
values = [np.random.default_rng(each).normal(size=[int(str(size)) for size in node.shape])
          for each, node in enumerate(inputs)]  # fmt: skip
layered = work.by_layers(values[0], [("product", values[1]), ("tanh", None), ("product", values[2]), ("squares", None)])
gradient = Graph(inputs, tuple(derive.gradient(loss, inputs[1:])))
for mine, theirs in zip(run_numpy(gradient, *values), layered[1], strict=True):
    assert np.allclose(mine, theirs)
step = Graph(inputs, (loss, *derive.update(loss, inputs[1:], rate=0.01)))
simpler, rules = simplify(step)
print(f"forward {work.launches(forward)} operators; with gradients and update {work.launches(step)}, simplified "
      f"{work.launches(simpler)}")  # fmt: skip

# %% [markdown]
# But a layer's backward code ends there. The gradient as a **bigger graph** is a program like any other:
#
# - it is simplified, fused, placed on ranks (chapter 16) *together* with forward pass and update;
# - what nobody asks for is not in it (here the gradient of x), with no flag for it in any layer;
# - it can be differentiated again. A layer would need somebody to write the backward of its backward.
#
# So how the gradient itself changes along a direction v, ∇(∇L · v), costs one line. Checked by two gradients a little
# apart:

# %%
direction = build.argument("v", [8, 16], "float64")
slope = build.total(build.multiply(derive.gradient(loss, [inputs[1]])[0], direction))
curvature = Graph((*inputs, direction), tuple(derive.gradient(slope, [inputs[1]])))
v = np.random.default_rng(9).normal(size=(8, 16))
exact = run_numpy(curvature, *values, v)[0]
ahead, behind = (run_numpy(gradient, values[0], values[1] + sign * 1e-5 * v, values[2])[0] for sign in (1, -1))
off = np.abs(exact - (ahead - behind) / 2e-5).max() / np.abs(exact).max()
print(f"second derivative: at most {off:.1e} of it apart")
assert np.allclose(exact, (ahead - behind) / 2e-5, rtol=1e-4, atol=1e-5 * np.abs(exact).max())

# %% [markdown]
# ## Fusion
#
# Eight cheap operators in a row on 16 million numbers. Apart, each reads 64 MiB and writes 64 MiB: 1 GiB. Fused into
# one kernel: read once, written once, 128 MiB, and one launch instead of eight. If memory were all, by how much would
# it be faster?

# %%
elements = 1 << 24
chain = work.chain(elements)
data = torch.randn(elements)
apart_s = on_gpu.timed("cpu", work.runner(chain, data))
guess = predict("time of the eight operators fused, as a share of the time apart", name="fused / apart",
                unit="fraction", model=2 / 16)  # fmt: skip
kernels = work.fused(chain)
if kernels is not None:
    print(f"{work.launches(chain)} operators become {work.launches(kernels)} kernel, written in C and compiled here")
    together_s = on_gpu.timed("cpu", work.runner(kernels, data))
else:  # no compiler: the same idea in blocks that stay in the cache
    out = np.empty(elements, np.float32)
    together_s = on_gpu.timed("cpu", lambda: work.in_blocks(data.numpy(), out, 1 << 14))
lesson.show(guess, together_s.median / apart_s.median, missing={"limit": "12.5 %: bytes alone"})
print(f"apart {format_seconds(apart_s.median)}, fused {format_seconds(together_s.median)}; bytes "
      f"{format_bytes(16 * 4 * elements)} and {format_bytes(2 * 4 * elements)}")  # fmt: skip

# %% [markdown]
# Libraries once wrote such kernels by hand: `FusedBiasRelu`, `FusedScaleBiasTanh`, ... With 12 kinds of elementwise
# operators and chains of up to three, how many `FusedABC` operators is that?

# %%
guess = predict("operators for all chains of up to three of 12 kinds", name="FusedABC operators", unit="count",
                model=12.0 + 12**2 + 12**3)  # fmt: skip
lesson.show(guess, float(sum(12**length for length in (1, 2, 3))), limit=12.0, figure="counted")

# %% [markdown]
# A **generator** needs a line of text for each kind (the limit above) and writes the kernel for the chain at hand.
#
# ## Rewrites, with proofs
#
# Two programs may be equal and one of them cheaper. A wrong rule is worse than none. How would you know? Candidates
# are first *refuted*: both sides are computed on small random matrices (shapes are printed), exactly (modulo a prime).
# What survives is *proved* from axioms (by the theorem prover z3, once; the proofs are kept, and checked when read):

# %%
for text in ("dot(x, add(y, z)) = add(dot(x, y), dot(x, z))", "dot(x, y) = dot(y, x)",
             "transpose(dot(x, y)) = dot(transpose(x), transpose(y))"):  # fmt: skip
    print(f"{text}: {refuted(parse(text)) or 'no counterexample'}")
proofs = read_proofs()
proved = [(rule, by) for rule, by in proofs if by]
rule, by = next(each for each in proved if str(each[0]).startswith("transpose(dot(x, transpose(y)))"))
print(f"{len(proved)} rules, proved from {len(proofs) - len(proved)} axioms; such as {rule}, from "
      f"{' and '.join(str(proofs[number - 1][0]) for number in by)}")  # fmt: skip
assert refuted(parse("dot(x, y) = dot(y, x)"))

# %% [markdown]
# ## Search: space → prune → cost → update
#
# With a list of rules, every program has neighbours, and those have neighbours: a **space**. What costs too much more
# than the best so far is **pruned**; a **cost** model prices the rest; the best so far is **updated**. x·A + x·B + x·C:

# %%
matrices = [build.argument(name, [256, 256]) for name in ("x", "A", "B", "C")]
products = [build.dot(matrices[0], each) for each in matrices[1:]]
written = Graph(tuple(matrices), (build.add(build.add(products[0], products[1]), products[2]),))
for slack in (1.0, 1.05, 2.0):
    result = search(written, as_rules(read_substitutions()),
                   lambda graph: graph_seconds(graph, work.h100()), slack, limit=400)  # fmt: skip
    print(f"keep what costs up to {slack:g} times the best: {result.seen} programs priced, "
          f"{format_seconds(result.cost)} from {format_seconds(graph_seconds(written, work.h100()))}")  # fmt: skip
print(result.graph)

# %% [markdown]
# The same loop chooses how a kernel computes: **AutoTVM** has a template with knobs (the space), a cost model that
# *learns* from measured kernels, and measures only what looks good. Ours (`kernels/tuning/search.py`) begins with a
# formula and corrects it by what was measured nearby. Here it tunes one knob on your machine: the block of the chain
# above when numpy computes it a block at a time. Small blocks cost calls, large ones leave the cache (if yours is large
# enough, all at once is as good: the formula does not know it, the measurement does).

# %%
elements = 1 << 22
some = data[:elements].numpy()
sizes = [work.ChainBlocks(1 << power) for power in range(9, 23)]
kept = prune(sizes, [each.predict_s(elements) for each in sizes])
tried = tune(
    kept,
    lambda config: config.predict_s(elements),
    lambda configs: work.measured_blocks(some, configs),
    budget=5,
    features=lambda config: [float(np.log2(config.size))],
)
for each in tried:
    print(f"blocks of {each.config.size:>9,}: {format_seconds(each.config.predict_s(elements))} predicted, "
          f"{format_seconds(each.seconds)} measured")  # fmt: skip
best = min(tried, key=lambda each: each.seconds)
whole_s = work.measured_blocks(some, sizes[-1:])[0]
print(f"{len(sizes)} sizes, {len(kept)} after pruning, {len(tried)} measured; best {best.config.size:,}: "
      f"{format_seconds(best.seconds)}; all numbers at once {format_seconds(whole_s)}")  # fmt: skip

# %% [markdown]
# Its limits are the same everywhere: a space that grows with every knob (AutoTVM's convolutions have millions of
# points), the time of each measurement, and a cost model that is wrong where nothing was measured.
#
# ## My CNN is slow on a fast GPU: why?
#
# A convolution slides a small window of weights over a picture; a batch norm shifts and scales each of its channels;
# ReLU is max(·, 0). Six of each, 32 channels, pictures of 32 × 32. An H100 does 990 TFLOP/s. For one
# picture, how much of the time is arithmetic? (Planned: some 5 µs of launch and a roofline for each of 30 operators: a
# batch norm is three.)

# %%
guess = predict("share of the time of one picture that is arithmetic at the GPU's peak", name="arithmetic, batch 1",
                unit="fraction", model=6 * 2 * 9 * 32**4 / 990e12 / (30 * 5e-6))  # fmt: skip
parts = {batch: work.shares(work.cnn_graph(batch)) for batch in (1, 64, 1024)}
lesson.show(guess, parts[1].flops_s / parts[1].seconds, missing={"limit": "100 %"}, figure="planned")
for batch, part in parts.items():
    print(f"batch {batch:>4}: {format_seconds(part.seconds)}: launches {part.launches / part.seconds:.0%}, elementwise "
          f"{part.memory / part.seconds:.0%}, convolutions {part.convolutions / part.seconds:.0%}")  # fmt: skip

# %% [markdown]
# With one picture it waits for **launches**; with many for **memory**, mostly in operators that hardly compute.
# What to do, measured on this machine with the same network in torch:
#
# - **more pictures at once**: the fixed cost of an operator is shared;
# - **fusion**: after training a batch norm is a scale and a shift, which move into the convolution's weights;
# - **layout**: channels first (NCHW) or last (NHWC) decides whether a convolution reads neighbours.

# %%
torch.manual_seed(0)
network = work.small_cnn()
with torch.no_grad():
    single, many = torch.randn(1, 3, 32, 32), torch.randn(16, 3, 32, 32)
    one_s = on_gpu.timed("cpu", lambda: network(single))
    guess = predict("time of 16 pictures at once, for each, as a share of one alone", name="per picture, 16 at once",
                    unit="fraction", model=0.7)  # fmt: skip
    many_s = on_gpu.timed("cpu", lambda: network(many))
    lesson.show(guess, many_s.median / 16 / one_s.median, missing={"limit": "6.25 %: 16 for the price of one"})
    traced = trace(network, [many])
    frozen = traced.frozen()
    folded = program(frozen, "cpu")
    apart = float((folded(many)[0] - network(many)).abs().max())
    folded_s = on_gpu.timed("cpu", lambda: folded(many))
    for parameter in network.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    last = many.contiguous(memory_format=torch.channels_last)
    last_s = on_gpu.timed("cpu", lambda: network(last))
print(f"16 pictures: {format_seconds(many_s.median)}; with channels last {format_seconds(last_s.median)}; with batch "
      f"norms folded {format_seconds(folded_s.median)} ({work.launches(traced.graph)} operators become "
      f"{work.launches(frozen)}, at most {apart:.0e} apart)")  # fmt: skip
assert apart < 1e-3
if device := on_gpu.gpu():
    for words, seconds in work.on_device(device).items():
        print(f"{on_gpu.name_of(device)}, {words}: {format_seconds(seconds)}")

# %% [markdown]
# Which of them helps depends on the machine: that is why it is measured. `tilemesh graph explain FILE.py:FUNCTION
# --device h100` says the same for a model of yours, rule by rule.
#
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
