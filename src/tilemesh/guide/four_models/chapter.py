"""Chapter 13: four models. Run it with `tilemesh guide 13`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 13: four models
#
# PPO on a language model (chapter 12) is a dance of four models of about the same size. The **actor** draws answers
# and is trained. The **reward** model scores them. The **critic** says what score was to be expected before each
# token, and is trained. The **reference** is the actor as it was, for the KL.
#
# A model that is trained keeps 16 bytes per parameter (weights and gradients in 16 bits, a float32 copy, two
# moments), a frozen one 2. How much do the four hold at 8 billion parameters each, before a single activation?

# %%
from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.guide.four_models import work
from tilemesh.guide.lesson import Lesson
from tilemesh.model.config import preset

lesson = Lesson("13")
predict = lesson.predict
small, large = preset("llama-3-8b"), preset("llama-3-70b")
guess = predict("bytes that actor, critic, reward and reference of 8 billion parameters each hold",
                name="four models of 8 B", unit="B", model=36 * 8e9)  # fmt: skip
lesson.show(guess, float(work.held_bytes(small, list(work.ROLES))),
            missing={"limit": "depends on what is left out"}, figure="planned")  # fmt: skip
for role, (_, flops, does) in work.ROLES.items():
    sizes = [format_bytes(work.held_bytes(model, [role])) for model in (small, large)]
    print(f"{role:>10}: {sizes[0]} at 8 B, {sizes[1]} at 70 B; {flops} operations per parameter and token: it {does}")

# %% [markdown]
# Count the operations: 22 per parameter and token, of which drawing an answer takes only 2. So drawing is a tenth of
# the time? Decoding is bound by reading weights (chapter 8), not by operations. The planner's clock knows that: a
# step of 64 prompts × 16 answers of 1,024 tokens, 8 B, on 16 H100s:

# %%
everybody = work.planned(small, "16xh100", algorithm="ppo", critic="own", reward="model", reference=True)
share = everybody.seconds["rollout"] / everybody.step.seconds
print(", ".join(f"{phase} {format_seconds(seconds)}" for phase, seconds in everybody.seconds.items()))
print("(planned, not measured: there are no 16 H100s here; the actor's log-probabilities are kept as it draws)")
guess = predict("share of a step that drawing takes, where it is 2 of 22 operations",
                name="drawing's share of a step", unit="fraction", model=2 / 22)  # fmt: skip
lesson.show(guess, share, missing={"limit": "what decoding must read"}, figure="planned")
assert share > 2 / 22

# %% [markdown]
# ## Fewer than four
#
# - **GRPO** drops the critic: the mean of several answers to a prompt says what was to be expected.
# - A **verifier** (a test, a calculator) replaces the reward model, and cannot be flattered.
# - A **LoRA** actor trains a few million numbers (**adapters**) on top of frozen weights. Those *are* the reference:
#   it takes 0 bytes.

# %%
variants = {
    "four models": {"algorithm": "ppo", "critic": "own", "reward": "model", "reference": True},
    "a verifier": {"algorithm": "ppo", "critic": "own", "reference": True},
    "GRPO": {"algorithm": "grpo", "reference": True},
    "GRPO, LoRA": {"algorithm": "grpo", "reference": True, "lora": 16},
}
names = list(work.ROLES)
kept = work.held_bytes(small, ["actor", "reference"])
guess = predict("share of the four models' bytes that GRPO with a verifier still holds",
                name="GRPO and a verifier hold", unit="fraction", model=18 / 36)  # fmt: skip
lesson.show(guess, kept / work.held_bytes(small, names), missing={"limit": "the actor alone: 44 %"}, figure="planned")
predictions = {}
for words, choices in variants.items():
    planned = predictions[words] = work.planned(small, "16xh100", "colocated", **choices)
    models = {
        name: size for name, size in planned.memory[0].items() if name not in ("activations", "pages", "reserved")
    }
    print(f"{words:>12}: a step of {format_seconds(planned.step.seconds)}, models {format_bytes(sum(models.values()))} "
          f"per rank ({plan.short() if (plan := planned.placement.pools[0].plan) else ''})")  # fmt: skip
assert predictions["GRPO, LoRA"].step.seconds < predictions["four models"].step.seconds

# %% [markdown]
# Models include the engine's own copy of the weights. Fewer models leave room for a quicker layout: a verifier's plan
# cuts the model over fewer stages, so a rank holds more and the step is shorter. (The letters are those of chapters 5
# to 7.)
#
# ## The length trap
#
# GRPO divides each answer's gradient by its length, so that every answer counts alike. It sounds fair. But for a
# wrong answer (negative advantage) it means: the longer it is, the less each token is blamed. On average an update
# then makes wrong answers *longer* and right ones shorter, although length has nothing to do with being right. Here
# answers go on after each token with probability 0.9; half of them are wrong.

# %%
guess = predict(
    "how far does an update move the logit of going on, of wrong answers (advantage -0.5; 0 would be: not at all)?",
    name="drift of wrong answers, GRPO",
    unit="count",
    model=work.exact_drift(0.9, -0.5),
)
lesson.source(work.drift)
lesson.show(guess, work.drift("sequence", 0.9, -0.5),
            missing={"limit": "0: length has nothing to do with it"}, figure="simulated")  # fmt: skip
fair = work.drift("constant", 0.9, -0.5)
print(f"with one weight for every token, whatever the answer's length (Dr. GRPO): {fair:.5f}")
right, wrong = work.trained_lengths()[-1]
print(f"after 200 updates: right answers {right:.1f} tokens, wrong ones {wrong:.0f}; without the division both stay "
      "at 10")  # fmt: skip
assert abs(fair) < 0.001
assert wrong > 10 > right

# %% [markdown]
# So a curve of answer lengths that rises while the reward stands still need not be "more thinking". The page of a run
# shows lengths, truncations and samples beside the reward for this reason; `tilemesh align RUN --task length` runs
# the trap with a real model.
#
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
