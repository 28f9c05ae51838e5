"""Chapter 12: what PPO really is. Run it with `tilemesh guide 12`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 12: what PPO really is
#
# Six ideas, one after the other, each mending what fails without it. The formulas are those that `tilemesh align`
# trains with; here they run on a **bandit**: eight arms, each pays a reward, and a policy π takes arm a with
# probability π(a).
#
# **1. The policy gradient.** The expected reward is J = Σ π(a) r(a). Its gradient can be *drawn* instead of
# enumerated: ∇J = E[ r(a) ∇ log π(a) ]. Take an arm, see what it pays, and make it likelier by as much. No derivative
# of the reward is needed: it may be a game, a test suite, a person.

# %%
import statistics

import numpy as np

from tilemesh.core.step.draw import bars
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.policy import work

lesson = Lesson("12")
predict = lesson.predict
lesson.source(work.exact_gradient, work.sampled_gradient)
logits, draw = np.zeros(8), np.random.default_rng(0)
drawn = work.sampled_gradient(logits, work.REWARDS, draw, 100_000, 0.0)
apart = float(np.abs(drawn - work.exact_gradient(logits, work.REWARDS)).max())
print(f"100,000 arms drawn: at most {apart:.1e} from the enumerated gradient")
assert apart < 5e-3

# %% [markdown]
# **It fails** where rewards have an offset. Pay 10 more for every arm: nothing has changed about which is best, but
# every arm that is drawn now becomes much likelier, the good and the bad. From 16 samples, how much larger is the
# error?

# %%
quiet, loud = work.gradient_noise(0.0, 0.0), work.gradient_noise(10.0, 0.0)
guess = predict(
    "all rewards 10 higher (their mean was 0.49): how many times larger is the error of a gradient from 16 samples?",
    name="error with an offset of 10",
    unit="count",
    model=10.4875 / float(np.sqrt(np.mean(work.REWARDS**2) + 0.01)),  # the error grows with the size of a reward
)
lesson.show(guess, loud / quiet, missing={"limit": "1: an offset says nothing about arms"})
without = work.learn(10.0, with_baseline=False)
print(f"learning with the offset: {bars(without[::3], 1)} ends at {without[-1]:.2f} of 1")

# %% [markdown]
# **2. A baseline.** Subtract a number b that does not depend on the arm: E[ b ∇ log π ] = b Σ ∇π = b ∇1 = 0. The
# gradient is the same on average, and its error is small if b is about the mean reward. What is left, r - b, is the
# **advantage**: better or worse than usual.

# %%
calm = work.gradient_noise(10.0, 10.4875)
with_baseline = [work.learn(10.0, True, seed=seed)[-1] for seed in range(5)]
lost = [work.learn(10.0, False, seed=seed)[-1] for seed in range(5)]
print(f"error with the baseline {calm:.3f}, without {loud:.3f}")
print(f"learning with it: {bars(work.learn(10.0, True)[::3], 1)}")
ends = [[round(value, 2) for value in values] for values in (with_baseline, lost)]
print(f"five seeds end at {ends[0]} with, {ends[1]} without")
assert min(with_baseline) > 0.95
assert statistics.mean(lost) < 0.95

# %% [markdown]
# GRPO's baseline is the mean of several answers to the same prompt, RLOO's the mean of the *others*, PPO's a second
# model that predicts the reward: the **critic**.
#
# **3. Who earned it?** A text is a chain of choices, paid once at the end. If every token gets the whole score, the
# first of twelve is praised and blamed for what eleven others did. A critic that knows what to expect *before* each
# choice, V, gives each choice its own share: δ = r + γ V(next) - V(now), where γ (1 here) makes later rewards count
# less. **GAE** takes a λ between: the sum of (γλ)^k δ of the k-th choice after. λ = 1: everything that followed
# (true, noisy). λ = 0: only what the critic says (quiet, and wrong if the critic is).

# %%
length = 12
guess = predict(
    "12 choices, paid at the end for the share that is right, noise of 0.2: scatter of the first choice's advantage at "
    "λ = 1, if the critic is perfect",
    name="scatter at λ = 1",
    unit="count",
    model=float(np.sqrt(12 * 0.25 / 144 + 0.2**2)),  # twelve coins of 1/12 each, and the noise
)
_, scatter = work.chain_advantages(1.0, True)
lesson.show(guess, scatter, missing={"limit": "0.042: the first choice's own share"})
for decay in (0.0, 0.5, 0.9, 1.0):
    (signal, noise), (blind, _) = work.chain_advantages(decay, True), work.chain_advantages(decay, False)
    print(f"λ = {decay}: right beats wrong by {signal:.3f}, scatter {noise:.3f}; with a critic that knows nothing: "
          f"{blind:.3f}")  # fmt: skip
scatters = [work.chain_advantages(tenth / 10, True)[1] for tenth in range(11)]
print(f"scatter from λ = 0 to 1: {bars(scatters, max(scatters))}")
assert work.chain_advantages(0.0, False)[0] == 0.0

# %% [markdown]
# At λ = 0 and with a critic that knows nothing, the first choice learns *nothing*: its reward never reaches it.
#
# **4. Use a batch again.** Answers are expensive to draw, updates are cheap: make twenty updates from one batch. **It
# fails**: after the first update the policy is another one, and the gradient is still that of the old. What was
# likely by luck becomes certain, and is never left again.
#
# **5. Ratio and clip.** Weigh each sample by π_new / π_old: then the average is right again (importance sampling).
# And stop pushing a sample whose ratio has left 1 ± 0.2 in the direction of its advantage: min(ratio · A, clip(ratio)
# · A). Its gradient is then zero. How far apart two policies are is said by their **KL**, Σ π log(π / π'): 0 if they
# are equal, never negative.

# %%
# every ratio about 1 ± 0.2: the mean of (log ratio)² / 2
guess = predict("KL between the policies before and after 20 updates from one batch, clipped at 0.2",
                name="KL of a round, clipped", unit="count", model=0.2**2 / 2)  # fmt: skip
clipped = [work.reuse("clip", seed) for seed in range(5)]
plain = [work.reuse("plain", seed) for seed in range(5)]
lesson.show(guess, statistics.mean(first for first, _ in clipped), missing={"limit": "0: no update"})
unbounded = [work.reuse("clip", seed, clip=1e9) for seed in range(5)]
for words, runs in (("neither", plain), ("the ratio alone", unbounded), ("ratio and clip", clipped)):
    print(f"{words}: KL {statistics.mean(first for first, _ in runs):.2f} in the first round; after 40 rounds "
          f"{[round(ends[-1], 2) for _, ends in runs]}; the last of them: {bars(runs[-1][1], 1)}")  # fmt: skip
assert statistics.mean(ends[-1] for _, ends in clipped) > statistics.mean(ends[-1] for _, ends in plain)

# %% [markdown]
# **6. Stay near where you came from.** A reward is never quite what you want. Here a reward model is right about
# seven answers and loves the eighth, which is worthless and which the model hardly ever gave before. **It fails**:
# train long enough and every answer is the eighth (*reward hacking*). A penalty β · KL(π, reference) keeps the policy
# near. The best policy then is known exactly: reference · exp(reward / β), scaled to sum to 1.

# %%
print("   β      KL   reward model says   true reward")
for beta in (1.0, 0.3, 0.1, 0.05, 0.02):
    policy = work.tuned(beta)
    print(f"{beta:>5} {work.divergence(policy, work.REFERENCE):>7.2f} {policy @ work.PROXY:>12.2f} "
          f"{policy @ work.TRUE:>17.2f}")  # fmt: skip
best = work.best_beta()
curve = [float(work.tuned(10 ** (0.5 - place / 24)) @ work.TRUE) for place in range(60)]
print(f"true reward from β = 3 down to 0.01: {bars(curve[::2], max(curve))} (best near β = {best:.2f})")
assert work.tuned(best) @ work.TRUE > max(work.REFERENCE @ work.TRUE, work.tuned(0.02) @ work.TRUE)

# %% [markdown]
# The KL is estimated from the tokens that were drawn. With r = π_ref / π three estimators are in use: k1 = -log r, k2
# = (log r)² / 2, k3 = r - 1 - log r. Which of them are right on average?

# %%
policy = work.tuned(0.3)
exact = work.divergence(policy, work.REFERENCE)
estimates = work.expected_estimates(policy, work.REFERENCE)
print(f"KL {exact:.4f}; on average " + ", ".join(f"{name} {value:.4f}" for name, value in estimates.items()))
assert abs(estimates["k1"] - exact) < 1e-12
assert abs(estimates["k3"] - exact) < 1e-12
assert abs(estimates["k2"] - exact) > 1e-3

# %% [markdown]
# k1 and k3 are; k1 can be negative, k3 never is. That is PPO: a drawn gradient, a baseline, credit over time, a
# ratio, a clip, and a leash. `tilemesh align` has each as a choice, and an algorithm is a row of choices.

# %% [markdown]
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
