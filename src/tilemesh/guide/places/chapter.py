"""Chapter 14: where they live. Run it with `tilemesh guide 14`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 14: where they live
#
# A step of learning from feedback draws answers and then trains on them (chapter 13). On many GPUs there are several
# ways to share them out:
#
# - **colocated**, in turns: all ranks draw, then all train. Nobody idles, but both must fit, and each change of roles
#   frees and takes memory.
# - **split**: some ranks draw, the others train. Each waits while the other works.
# - **one step off**: split, and the next batch is drawn *while* this one is trained on: with weights that are one
#   update old.
# - **asynchronous**: further ahead still, with a bound.
#
# Say drawing takes 0.4 rank-seconds and an update 0.2 on 8 ranks, and both divide perfectly. Colocated, a step takes
# 0.6 / 8 = 75 ms. What does 4 + 4, split, take?

# %%
from tilemesh.core.placement import reshard_bytes
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.guide.four_models.work import planned
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.places import work
from tilemesh.model.config import preset
from tilemesh.model.work.weights import count_parameters

lesson = Lesson("14")
predict = lesson.predict
step = work.StepWork(draw=0.4, update=0.2)
lesson.source(work.phase_seconds, work.carry_out)
guess = predict("a step of 4 ranks that draw and 4 that train, in turns", name="split, 4 + 4", unit="s",
                model=work.predicted("split", 8, step, 4)[0].seconds)  # fmt: skip
split = work.carry_out("split", 8, step, 4, steps=6)
lesson.show(guess, split.step_s, limit=0.6 / 8)
print(f"idle: {work.predicted('split', 8, step, 4)[1]:.0%} of all ranks' time")
assert set(split.staleness) == {0}

# %% [markdown]
# Half of all ranks wait at any time. Drawn **one batch ahead**, both work at once and a step takes as long as the
# slower half. The price: answers were drawn by the weights *before* the last update. How many updates old are they?

# %%
guess = predict("a step of 4 + 4, one batch ahead", name="one step off, 4 + 4", unit="s",
                model=work.predicted("one-step-off", 8, step, 4)[0].seconds)  # fmt: skip
ahead = work.carry_out("one-step-off", 8, step, 4, steps=9)
lesson.show(guess, ahead.step_s, limit=0.6 / 8)
print(f"updates between drawing and training, step by step: {ahead.staleness}")
further = work.carry_out("asynchronous", 8, step, 4, steps=9)
print(f"two ahead: {format_seconds(further.step_s)} per step, {further.staleness}: older answers, and no quicker, "
      "since drawing is the slower half")  # fmt: skip
assert ahead.staleness[0] == 0
assert set(ahead.staleness[1:]) == {1}
assert max(further.staleness) == 2

# %% [markdown]
# 4 + 4 is not the best split: drawing is twice the work, so it should get twice the ranks. Then one step off is as
# quick as colocated, within rounding, and never has to change roles:

# %%
tried = {drawing: work.predicted("one-step-off", 8, step, drawing)[0].seconds for drawing in range(1, 8)}
print("ranks that draw:  " + "  ".join(f"{drawing}: {format_seconds(seconds)}" for drawing, seconds in tried.items()))
drawing, best_s = work.best_split(8, step)
print(f"best: {drawing} draw and {8 - drawing} train, {format_seconds(best_s)}; colocated "
      f"{format_seconds(work.predicted('colocated', 8, step)[0].seconds)}")  # fmt: skip
assert drawing in (5, 6)

# %% [markdown]
# So when does splitting win? Where phases do *not* divide perfectly: drawing on 64 ranks with a few long answers
# leaves most of them idle, and a layout that is best for training (tensor parallel over 8) is not best for drawing.
#
# ## New weights, every step
#
# After an update the engine needs the new weights. Colocated and laid out alike, they are there: 0 bytes. If training
# cuts matrices over tp · pp ranks and the engine over fewer, each rank receives what it lacks: M bytes of
# weights · (1 / ranks of an engine - 1 / (tp · pp)). For 8 B in 16 bits, trained with tp 8, drawn by engines of 1 rank?

# %%
size = 2 * count_parameters(preset("llama-3-8b")).total
guess = predict("bytes that each rank receives: 8 B in 16 bits, tp 8 to engines of one rank",
                name="new weights per rank", unit="B", model=16e9 * 7 / 8)  # fmt: skip
received = reshard_bytes(size, tp=8, pp=1, engine_tp=1)
lesson.show(guess, received, missing={"limit": "0: laid out alike"}, figure="planned")
print(f"over NVLink (450 GB/s): {format_seconds(received / 450e9)}; over 50 GB/s between nodes: "
      f"{format_seconds(received / 50e9)}; laid out alike: {format_bytes(reshard_bytes(size, 8, 1, 8))}")  # fmt: skip

# %% [markdown]
# ## The planner's answer
#
# Which placement would you choose for an 8 B model with GRPO on 16 H100s? The planner tries all sizes and layouts
# with the memory of chapter 13 and the clocks of chapters 7 and 8 (without a reference, which chapter 13's 8 B had):

# %%
name, cluster = "llama-3-8b", "16xh100"
for kind in ("colocated", "split", "one-step-off"):
    prediction = planned(preset(name), cluster, kind, algorithm="grpo")
    pools = " + ".join(str(pool.ranks) for pool in prediction.placement.pools)
    print(f"{name} on {cluster}, {kind:>12} {pools:>8}: {format_seconds(prediction.step.seconds)} a step, idle "
          f"{prediction.idle:.0%}, at most {format_bytes(max(prediction.total_bytes))} per rank")  # fmt: skip

# %% [markdown]
# `tilemesh plan MODEL --align … --cluster …` prints the same for yours with the reasons, and `tilemesh align
# --placement auto` runs the best that it can. Whatever the placement: split gives the colocated run's numbers bit for
# bit, and one step off equals a serial replay of what it did.
#
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
