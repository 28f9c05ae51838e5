"""Chapter 17: making it smaller. Run it with `tilemesh guide 17`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 17: making it smaller
#
# A model is too large for a phone, or too slow: decoding reads every weight for every token (chapter 8), so half the
# bytes are half the time. Three ways: fewer **bits** per weight, fewer **weights**, and a smaller model that **learns
# from** the large one. What does each cost?
#
# The subject: a Transformer of 84,000 weights, trained here and now to sort six digits.

# %%
from copy import deepcopy
from dataclasses import replace

import torch

from tilemesh.compress.prune import prune
from tilemesh.compress.quantize import quantize
from tilemesh.compress.recipe import PruneRecipe, Recipe
from tilemesh.core.units import format_seconds
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.smaller import work
from tilemesh.model.transformer import Transformer

lesson = Lesson("17")
predict = lesson.predict
model = Transformer(work.SHAPE, seed=0)
work.train(model, 260)
model.eval()
plain = work.quality(model)
quality = f"{plain.right:.1%} of unseen sequences sorted without a fault, loss {plain.loss:.4f}"
print(f"{work.weights_of(model):,} weights; {quality}")
assert plain.right > 0.7

# %% [markdown]
# ## Fewer bits
#
# Rounding to b bits with one scale per group of weights: 2^(b-1) - 1 steps reach from 0 to the group's largest
# weight. The error of one weight is evenly spread over a step, so its size is step / √12. The largest magnitude of 16
# normal numbers is about 2.1 of their spread: with 4 bits (7 steps) the error is about...

# %%
lesson.source(work.rounding_error)
guess = predict("error of rounding to 4 bits in groups of 16, as a share of the weights' size",
                name="rounding error, 4 bits, groups of 16", unit="fraction", model=2.08 / 7 / 12**0.5)  # fmt: skip
lesson.show(guess, work.rounding_error(4, 16), missing={"limit": "0: all bits"})
for bits in (8, 4, 3, 2):
    errors = ", ".join(f"{work.rounding_error(bits, group):.1%} by {group}" for group in (16, 128, 4096))
    print(f"{bits} bits: error {errors}")

# %% [markdown]
# Each bit less doubles the error while there are many steps (127, 63, …), and more than doubles it at the end (7, 3,
# 1); smaller groups have smaller largest weights, and pay with more scales (16 bits for 16 weights is one bit per
# weight). Now the model, rounded after training (**PTQ**):

# %%
tokens = work.sequences(64, 77)[:, :-1]
results, bytes_held = {}, {"fp32": work.held_bytes(model)}
for recipe in ("int8", "int4-tensor", "int4-g16", "int3-g16", "int2-g16", "int2-g16-gptq"):
    rounded = quantize(model, recipe, tokens)
    results[recipe], bytes_held[recipe] = work.quality(rounded), work.held_bytes(rounded)
    print(f"{recipe:>14}: {results[recipe].right:.1%} right, loss {results[recipe].loss:.4f}")
assert abs(results["int8"].right - plain.right) < 0.03
assert results["int2-g16"].loss > plain.loss

# %% [markdown]
# Eight bits cost nothing, four little; at two, rounding to nearest is clearly worse. The notes that this guide grew
# from say: PTQ, *medium* accuracy; **QAT** (training that rounds in every pass), *high*. And GPTQ, which rounds
# column by column and lets later columns make good for earlier ones, needs no training. Where does QAT with 2 bits
# end?

# %%
# as good as before
guess = predict("share sorted without a fault with 2 bits, after 60 steps of training with rounding",
                name="2 bits, trained with rounding", unit="fraction", model=plain.right)  # fmt: skip
aware = work.quality(work.trained_with_rounding(model, "int2-g16"))
lesson.show(guess, aware.right, missing={"limit": "100 %"})
further = deepcopy(model).train()
work.train(further, 60, 1e-3, seed=1)
print(f"2 bits: rounded {results['int2-g16'].right:.1%}, GPTQ {results['int2-g16-gptq'].right:.1%}, trained with "
      f"rounding {aware.right:.1%}; as many steps without {work.quality(further.eval()).right:.1%}")  # fmt: skip
assert aware.loss < results["int2-g16"].loss

# %% [markdown]
# ## Fewer weights
#
# **Unstructured** pruning sets the smallest weights to zero, wherever they are. **Structured** pruning takes out
# whole rows: hidden units of an MLP, heads, layers. The notes say: the first is hard for hardware, the second
# friendly to it. Both claims, measured: quality of this model, and the time of a product of 4,096 × 1,024 with 80 %
# zeros, and with half of its rows. (Half of the hidden units are 29 % of all weights.)

# %%
for structure, amount in (("unstructured", 0.29), ("unstructured", 0.5), ("unstructured", 0.8), ("2:4", 0.5),
                          ("mlp", 0.25), ("mlp", 0.5)):  # fmt: skip
    smaller = prune(model, Recipe(prune=PruneRecipe(structure=structure, amount=amount)))  # type: ignore[arg-type]
    result = work.quality(smaller)
    print(f"{structure:>13} {amount:.0%}: {result.right:.1%} right, {work.weights_of(smaller):,} numbers stored")
full_s = work.product_seconds(4096)
guess = predict("time of the product with half of the rows, as a share of the whole",
                name="half of the rows", unit="fraction", model=0.5)  # fmt: skip
half_s, sparse_s = work.product_seconds(2048), work.product_seconds(4096, zeros=0.8)
lesson.show(guess, half_s / full_s, missing={"limit": "50 %"})
print(f"80 % zeros: {sparse_s / full_s:.2f} of the time ({format_seconds(full_s)}): a zero is multiplied like any "
      "other")  # fmt: skip

# %% [markdown]
# ## A smaller one that learns from it
#
# **Distillation** trains a small student on the teacher's *probabilities*: not only which digit is right, but how
# sure a good model is. Half the width, 80 steps, without and with the teacher:

# %%
small = replace(work.SHAPE, width=32, mlp_width=64)
students = {}
for words, teacher in (("alone", None), ("with the teacher", model)):
    student = Transformer(small, seed=1)
    work.train(student, 80, seed=2, teacher=teacher)
    students[words] = work.quality(student.eval())
    print(f"{words}: {students[words].right:.1%} right, loss {students[words].loss:.3f} ({work.weights_of(student):,} "
          "weights)")  # fmt: skip

# %% [markdown]
# On a task with one right answer the teacher's probabilities say little that the labels do not: expect little here,
# and more where many answers are possible. Measured, not believed.
#
# ## Speed, memory, quality
#
# A decode step takes as long as reading the weights. So bytes are both memory and time (the bars), and a choice is a
# point between bytes and quality. Embedding and norms are not rounded, and scales are held in 32 bits:

# %%
print("                    bytes  of fp32    right")
bytes_held["int2-g16, QAT"] = bytes_held["int2-g16"]
for name, result in {"fp32": plain, **results, "int2-g16, QAT": aware}.items():
    share = bytes_held[name] / bytes_held["fp32"]
    print(f"{name:>14} {bytes_held[name]:>10,} {share:>8.0%} {result.right:>8.1%}  {'█' * round(32 * share)}")
assert torch.isfinite(torch.tensor([result.loss for result in results.values()])).all()

# %% [markdown]
# `tilemesh compress RUN --recipe int4-g128-gptq` does it to a run or a folder, `tilemesh bench compress` compares
# recipes with others' and says how good one is on your text.
#
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
