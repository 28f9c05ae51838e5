"""Chapter 11: guessing ahead. Run it with `tilemesh guide 11`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 11: guessing ahead
#
# A decode step reads all weights to make one token (chapter 8). Reading them for five tokens takes hardly longer. But
# token 5 depends on token 4, which is not known. So **guess**: a small model, or the text itself, proposes the next
# few tokens, and the large model looks at all of them in one pass. Guesses that it would have made itself stay.
#
# "Would have made itself" needs care when tokens are drawn at random. Let the large model give a token probability q
# and the small one p. A guess x stays with probability min(1, q(x)/p(x)). If it does not, the token is drawn from
# what the small model gave too little: max(0, q - p), scaled to sum to 1. Then every token comes out with probability
# q:
#
# - x is guessed and stays: p · min(1, q/p) = min(p, q).
# - x replaces a guess that did not stay. That happens with probability 1 - Σ min(p, q) = Σ max(0, q - p), and x then
#   has probability max(0, q - p) / Σ max(0, q - p): together max(0, q - p).
# - The sum: min(p, q) + max(0, q - p) = q. Whatever the small model says.

# %%
import statistics
from collections import Counter

import numpy as np

from tilemesh.core.units import format_seconds
from tilemesh.guide.guessing import work
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.requests.work import random_model

lesson = Lesson("11")
predict = lesson.predict
lesson.source(work.exact_output)
draw = np.random.default_rng(5)
worst = 0.0
for _ in range(1000):
    large, small = (draw.dirichlet([0.4] * 6).tolist() for _ in range(2))
    worst = max(worst, float(np.abs(np.subtract(work.exact_output(large, small), large)).max()))
print(f"1,000 random pairs of models, every guess enumerated: at most {worst:.1e} from the large model's probabilities")
assert worst < 1e-12

# %% [markdown]
# And drawn: 20,000 tokens from a small model that is wrong about everything. The chi-squared sum should be about 5
# (six tokens, five degrees of freedom); above 30 chance is no explanation any more. A tempting shortcut, to draw the
# replacement from q itself, fails it.

# %%
q, p = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04], [0.05, 0.1, 0.1, 0.15, 0.3, 0.3]
guess = predict("chi-squared sum of 20,000 tokens, rightly drawn", unit="count", model=5.0, name="chi-squared, right")
first = Counter(work.verify([q, q], [p], [work.pick(p, draw.random())], draw.random)[0] for _ in range(20_000))
right = work.chi_squared([first[token] for token in range(6)], q)
lesson.show(guess, right, missing={"limit": "chance alone"})
shortcut: Counter[int] = Counter()
for _ in range(20_000):
    x = work.pick(p, draw.random())
    stays = draw.random() * p[x] < q[x]
    shortcut[x if stays else work.pick(q, draw.random())] += 1
print(f"with the shortcut: {work.chi_squared([shortcut[token] for token in range(6)], q):,.0f}")
assert right < 30
assert work.chi_squared([shortcut[token] for token in range(6)], q) > 100

# %% [markdown]
# ## How much it gains
#
# A guess stays with probability a = Σ min(p, q): what the two have in common. With g guesses per pass, and each
# staying independently, a pass gives 1 + a + a² + … + a^g = (1 - a^(g+1)) / (1 - a) tokens.

# %%
guesses = 4
draft = work.mixed(q, 0.7)
rate = work.acceptance(q, draft)
guess = predict(
    f"a small model agrees on {rate:.1%} and guesses {guesses} tokens: how many tokens does a pass give on average?",
    name="tokens per pass",
    unit="count",
    model=work.tokens_per_pass(rate, guesses),
)
counts = work.counted_tokens(q, draft, guesses, 4000)
lesson.show(guess, statistics.mean(counts),
            missing={"limit": f"{guesses + 1}, if every guess stayed"}, figure="counted")  # fmt: skip
assert abs(statistics.mean(counts) / work.tokens_per_pass(rate, guesses) - 1) < 0.03

# %% [markdown]
# The small model is not free: if one of its tokens costs c of a pass, a pass takes 1 + c · g. More guesses help until
# the later ones hardly ever stay:

# %%
print("speedup by guesses per pass:")
for cost, words in ((0.0, "n-gram, free"), (0.05, "c = 0.05"), (0.2, "c = 0.2")):
    row = [f"{g}: {work.speedup(rate, g, cost):.2f}" for g in (1, 2, 4, 8, 16)]
    print(f"  {words:>14}  " + "  ".join(row))
assert work.speedup(0.3, 8, 0.2) < 1, "guesses that rarely stay cost more than they give"

# %% [markdown]
# ## In the engine
#
# The cheapest small model is the text: where the last few tokens stood before, guess what came after (**n-gram**). It
# gains where text repeats: code that is edited, documents that are quoted, and models that begin to loop, as one with
# random weights does. The answer is the same token for token; only steps are fewer.

# %%
served = random_model()
work.engine_run(served, 0, output=8)  # the first steps of a process are slower
plain = work.engine_run(served, 0)
# the first guesses must wait until something repeats
guess = predict("a model that repeats itself, up to 4 n-gram guesses: tokens per step",
                name="tokens per step, n-gram", unit="count", model=work.tokens_per_pass(0.75, 4))  # fmt: skip
guessed = work.engine_run(served, 4)
lesson.show(guess, len(guessed.tokens) / guessed.decode_steps,
            missing={"limit": "5, if every guess stayed"}, figure="counted")  # fmt: skip
print(f"{plain.decode_steps} steps in {format_seconds(plain.seconds)} without, {guessed.decode_steps} in "
      f"{format_seconds(guessed.seconds)} with guesses; the same tokens: {plain.tokens == guessed.tokens}")  # fmt: skip
assert plain.tokens == guessed.tokens
assert guessed.decode_steps < plain.decode_steps

# %% [markdown]
# ## When it loses
#
# Guesses use arithmetic that lies idle. In a large batch nothing lies idle: if a step takes 20 ms and 0.5 ms per
# token, 64 requests with four guesses each are 320 tokens. The speedup over the batch:

# %%
for batch in (1, 8, 32, 64, 128, 256):
    plain_s, guessed_s = 0.020 + 0.0005 * batch, 0.020 + 0.0005 * batch * (guesses + 1)
    gain = work.tokens_per_pass(rate, guesses) * plain_s / guessed_s
    print(f"batch {batch}: {gain:.2f}×" + (" (it loses)" if gain < 1 else ""))
assert gain < 1

# %% [markdown]
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
