"""Chapter 8: a request's life. Run it with `tilemesh guide 8`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 8: a request's life
#
# A text goes to a served model. It is cut into **tokens**, waits in a **queue**, is **scheduled**, its prompt is read
# in one go (**prefill**), then tokens come one by one (**decode**): each is **sampled** from the model's
# probabilities, turned back into text and **streamed** to whoever asked. Two times matter to a person: until the
# first token, and between two tokens.
#
# A decode step computes one token of a request. For that it reads every weight of the model once and does two
# operations with each. Here is a model of 27 million weights in 4 bytes each; a product with a matrix of 128 MiB says
# how quickly this machine reads.

# %%
import statistics

from tilemesh.core.units import format_seconds
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.requests import work
from tilemesh.guide.requests.work import Load
from tilemesh.serve.history import RequestRecord
from tilemesh.serve.scheduler import ServeLimits

lesson = Lesson("8")
predict = lesson.predict
served = work.random_model()
read = work.weight_bytes(served)
alone_s = work.product_seconds(1)
rate = work.PRODUCT_BYTES / alone_s
print(f"a step reads {read / 1e6:.0f} MB (all weights but the embedding, of which a token reads one row); this machine "
      f"reads {rate / 1e9:.1f} GB/s")  # fmt: skip
lesson.source(work.serve)
guess = predict("time of one decode step, one request: how long does it take to read all weights?",
                name="a decode step of one request", unit="s", model=read / rate)  # fmt: skip
work.serve(served, 1, 32, 4)  # the first steps of a process are slower
one = work.serve(served, 1, 64, 16)
one_s = work.decode_seconds(one.steps).median
lesson.show(guess, work.decode_seconds(one.steps), limit=read / rate)
(record,) = one.requests.values()
first_s, gaps = record.first_token_s or 0.0, record.gaps_s
print(f"first token after {format_seconds(first_s)} (64 tokens of prompt in one step), then one per "
      f"{format_seconds(statistics.median(gaps))}")  # fmt: skip
assert first_s > statistics.median(gaps)
assert len(record.output) == 16

# %% [markdown]
# Reading the weights is the limit: a processor can do far more than two operations in the time in which it reads one
# weight. What lies above the limit is the host: Python and one small operator after the other (chapter 10).
#
# So the weights are read once for one token. How much longer does it take to make a token for each of 16 requests
# from the same read? The roofline of chapter 4: the longer of reading and computing. A product with 256 vectors says
# how quickly this machine computes.

# %%
flops_per_s = 256 * work.PRODUCT_BYTES / 2 / work.product_seconds(256)  # 2 operations for 4 bytes and vector
computing_s = 16 * read / 2 / flops_per_s
print(f"16 tokens: {format_seconds(read / rate)} to read, {format_seconds(computing_s)} to compute; both take equally "
      f"long with {16 * read / rate / computing_s:.0f} tokens")  # fmt: skip
guess = predict("how many times longer is a step of 16 requests than a step of one?",
                name="step of 16 / step of 1", unit="count", model=max(1.0, computing_s * rate / read))  # fmt: skip
many_s = work.decode_seconds(work.serve(served, 16, 16, 16).steps).median
lesson.show(guess, many_s / one_s, limit=1.0)
print(f"tokens per second: {1 / one_s:.0f} for one request, {16 / many_s:.0f} for 16")
assert 16 / many_s > 1 / one_s, "a batch makes more tokens per second"

# %% [markdown]
# Far less than 16 times: this is why engines batch. (From the number printed above computing takes longer than reading;
# on a GPU it is some hundred.) The price is the gap between tokens that each person sees. Take a step's time as a + b
# · tokens, from the two measurements, and work *backwards* from a budget: if nobody may wait longer than 60 ms for a
# token, how many requests may share a step? A model that takes 10 s to predict is useless, however many predictions
# it makes at once.

# %%
per_token_s = max(1e-6, (many_s - one_s) / 15)
fixed_s = max(1e-6, one_s - per_token_s)


def step_s(tokens: int) -> float:
    """Seconds of a step that computes so many tokens, prompts' and answers'."""
    return fixed_s + per_token_s * tokens


for budget_s in (0.03, 0.06, 0.12):
    batch = int((budget_s - fixed_s) / per_token_s)
    words = "no batch is quick enough" if batch < 1 else f"{batch} requests, {batch / step_s(batch):.0f} tokens/s"
    print(f"at most {format_seconds(budget_s)} per token: {words}")

# %% [markdown]
# ## Static or continuous
#
# Eight requests want 4 to 40 tokens. A **static** batch takes four, computes until the longest is done, then takes
# the next four. A **continuous** batch is made anew in every step: who has ended leaves, who waits joins. `s` is the
# first step, `#` a token, `.` no token in this column: it waits, or a step takes longer. How many times quicker is
# the last answer there?

# %%
answers = (40, 4, 6, 5, 4, 30, 5, 6)
loads = [Load(0.0, 8, answer) for answer in answers]
limits = ServeLimits(pages=64, context=64, running=4, step_tokens=64)
lesson.source(work.static_batches)


def timeline(records: list[RequestRecord], end_s: float) -> None:
    """One line per request, 72 columns of time."""
    for place, shown in enumerate(records):
        row = ["."] * 72
        for number, at_ns in enumerate(shown.token_ns):
            row[min(71, int(at_ns * 1e-9 / end_s * 72))] = "#" if number else "s"
        last = max(column for column, mark in enumerate(row) if mark != ".")
        print(f"{place} {''.join(row[: last + 1])}")


static = work.static_batches(loads, 4, step_s)
static_end = max(shown.token_ns[-1] for shown in static) * 1e-9
guess = predict(
    f"answers of {answers} tokens, four at a time: how many times quicker is the whole by continuous batching?",
    name="static / continuous",
    unit="count",
    # Steps: static 40 + 30. Continuous: 40 is the longest answer; the other seven have 60 tokens for three places.
    model=(40 + 30) / 40,
)
flowing = list(work.continuous(loads, limits, step_s).requests.values())
flowing_end = max(shown.token_ns[-1] for shown in flowing) * 1e-9
print("static:")
timeline(static, static_end)
print("continuous:")
timeline(flowing, static_end)
lesson.show(guess, static_end / flowing_end, missing={"limit": "depends on the answers' lengths"}, figure="simulated")
assert flowing_end < static_end
assert [len(shown.token_ns) for shown in flowing] == list(answers)

# %% [markdown]
# ## A long prompt among short answers
#
# A prompt of 1,000 tokens comes while three people read their answers. Computed in one step, it holds up everybody.
# **Chunked prefill** cuts it: at most so many tokens in a step, beside one token of each that decodes.

# %%
mixed = [Load(0.0, 8, 60) for _ in range(3)] + [Load(5 * step_s(3), 1000, 4)]


def longest_gap(chunk: int) -> tuple[float, float]:
    """The longest wait between two tokens of the three, and the first token of the long prompt."""
    cut = ServeLimits(pages=200, context=2048, running=4, step_tokens=chunk + 4, chunk_tokens=chunk)
    *readers, late = work.continuous(mixed, cut, step_s).requests.values()
    return max(max(shown.gaps_s) for shown in readers), late.first_token_s or 0.0


guess = predict("longest gap between tokens if the 1,000 tokens of prompt go into one step",
                name="longest gap, prompt in one step", unit="s", model=fixed_s + 1003 * per_token_s)  # fmt: skip
held_up, first = longest_gap(1024)
lesson.show(guess, held_up, limit=step_s(4), figure="simulated")
for chunk in (256, 64, 16):
    gap, first_chunked = longest_gap(chunk)
    print(f"chunks of {chunk}: longest gap {format_seconds(gap)}, the long prompt's first token after "
          f"{format_seconds(first_chunked)} (in one step: {format_seconds(first)})")  # fmt: skip
    assert gap < held_up

# %% [markdown]
# ## Little's law
#
# Requests come, on average λ per second in whatever rhythm, and each stays for W seconds on average. Then L = λ · W
# of them are there on average, whatever the scheduler does. It needs no model of the engine: count L and λ, and you
# know W; or see that a queue grows.

# %%
capacity = 1 / (16 * fixed_s / 16 + 47 * per_token_s)  # requests per second: 16 share each step; 32 + 16 - 1 tokens
rate_per_s = 0.7 * capacity
arrived = work.poisson_loads(rate_per_s, 400, 32, 16)
roomy = ServeLimits(pages=400, context=128, running=16, step_tokens=256, waiting=1000)
records = list(work.continuous(arrived, roomy, step_s).requests.values())
stays = [shown.whole_s or 0.0 for shown in records]
lasted = (max(shown.token_ns[-1] for shown in records) - min(shown.asked_ns for shown in records)) * 1e-9
guess = predict(
    f"{len(records) / lasted:.1f} requests per second come and stay {statistics.mean(stays):.2f} s each: how many are "
    "there on average?",
    name="requests in the system",
    unit="count",
    model=len(records) / lasted * statistics.mean(stays),
)
lesson.show(guess, work.mean_in_system(records), missing={"limit": "0, if nobody came"}, figure="simulated")

# %% [markdown]
# Load and waiting do not grow together: at 95 % of capacity the same engine makes people wait much longer than at 50
# %.

# %%
for share in (0.5, 0.8, 0.95, 1.2):
    busy = work.continuous(work.poisson_loads(share * capacity, 300, 32, 16), roomy, step_s).requests.values()
    firsts = sorted(shown.first_token_s or 0.0 for shown in busy)
    print(f"load {share:.0%}: first token after {format_seconds(statistics.median(firsts))} in the middle, "
          f"{format_seconds(firsts[int(0.95 * len(firsts))])} at the 95th percentile")  # fmt: skip

# %% [markdown]
# ## What an answer costs
#
# Latency, throughput, and energy: a device that draws P watts and makes n tokens in a step of t seconds spends P · t
# / n joules per token. With P = 100 W (stated, not measured: `nvidia-smi` or RAPL say what yours draws):

# %%
for batch in (1, 4, 16):
    print(f"batch {batch}: {format_seconds(step_s(batch))} between tokens, {batch / step_s(batch):.0f} tokens/s, "
          f"{100 * step_s(batch) / batch:.2g} J per token")  # fmt: skip

# %% [markdown]
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
