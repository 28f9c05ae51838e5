"""Chapter 9: the KV cache. Run it with `tilemesh guide 9`, as a script, or open it as a notebook."""

# %% [markdown]
# # Chapter 9: the KV cache
#
# To make the next token, attention looks at the **keys and values** of all tokens before it. They do not change, so
# they are kept: 2 vectors (key and value) for each token, layer and KV head. Without them every token would compute
# the whole text again.
#
# How much is that? Llama 3 70B has 80 layers, 8 KV heads of 128 numbers, 2 bytes each. "A long chat takes 10 GB", one
# hears.

# %%
import statistics
from dataclasses import replace

from tilemesh.core.units import format_bytes, format_seconds
from tilemesh.guide.kv_cache import work
from tilemesh.guide.lesson import Lesson
from tilemesh.guide.requests.work import Load, continuous, random_model
from tilemesh.model.config import preset
from tilemesh.plan.memory import kv_cache_bytes
from tilemesh.serve.pages import PagePool
from tilemesh.serve.scheduler import ServeLimits

lesson = Lesson("9")
predict = lesson.predict
large = preset("llama-3-70b")
guess = predict("keys and values of one sequence of 32,768 tokens, Llama 3 70B in 16 bits",
                name="KV cache, 70 B, 32,768 tokens", unit="B", model=2 * 80 * 8 * 128 * 2 * 32768)  # fmt: skip
lesson.show(guess, float(kv_cache_bytes(large, 32768)),
            missing={"limit": "0, if everything were computed again"}, figure="planned")  # fmt: skip
every_head = replace(large, kv_heads=large.heads)
for words, model, element in (("64 KV heads", every_head, 2), ("8 KV heads", large, 2), ("8 KV heads, int8", large, 1)):
    size = kv_cache_bytes(model, 32768, element)
    print(f"{words}: {format_bytes(size // 32768)} per token, {format_bytes(size)} at 32,768")
assert kv_cache_bytes(every_head, 32768) == 8 * kv_cache_bytes(large, 32768)

# %% [markdown]
# The 10 GB are true *because* eight query heads share a KV head (**grouped-query attention**): with a KV head for
# each of the 64 it would be eight times as much. Eight bits instead of 16 halve it again (with a scale for each token
# and head, which the engine keeps beside it).
#
# ## Set aside in one piece
#
# Nobody knows how long an answer will be. An array per request must have room for the longest: here 2,048 tokens.
# Real chats are shorter. How much of that memory is never written?

# %%
tokens = work.lengths(1000)
print(f"drawn by chance: a chat has {statistics.median(tokens):.0f} tokens in the middle, {max(tokens)} at most")
lesson.source(work.waste, work.waste_in_pages)
guess = predict("share of the memory that stays empty if each request has 2,048 tokens set aside",
                name="empty, in one piece", unit="fraction", model=1 - statistics.mean(tokens) / 2048)  # fmt: skip
lesson.show(guess, work.waste(tokens, 2048), missing={"limit": "0 %"}, figure="counted")
assert work.waste(tokens, 2048) > 0.9

# %% [markdown]
# **Pages** mend it, as in an operating system: memory is cut into pages of 16 tokens, a request takes one when it
# needs it, and a **block table** says which page holds its tokens 0 to 15, which 16 to 31, and so on. Only the last
# page of a request is partly empty, by half a page on average.

# %%
guess = predict("share that stays empty with pages of 16 tokens", name="empty, pages of 16",
                unit="fraction", model=7.5 / (statistics.mean(tokens) + 7.5))  # fmt: skip
lesson.show(guess, work.waste_in_pages(tokens, 16), missing={"limit": "0 %"}, figure="counted")
for page_tokens in (1, 16, 64, 256):
    print(f"pages of {page_tokens}: {work.waste_in_pages(tokens, page_tokens):.1%} empty")

# %% [markdown]
# The same memory that held 10 requests holds nearly 300. Smaller pages waste less; larger ones have shorter tables
# and are read in longer pieces. A pool of pages is a list of free numbers and a count of users for each:

# %%
pool = PagePool(8)
first = pool.take(3)
pool.share(first[:2])  # a second request begins with the same 32 tokens
second = [*first[:2], *pool.take(1)]
print(f"tables: {first} and {second}; users of page {first[0]}: {pool.users(first[0])}; free: {pool.available}")
pool.release(first)
assert pool.users(second[0]) == 1, "the second request still needs it"
print(f"after the first request has ended: free {pool.available}")

# %% [markdown]
# Two requests share pages as long as nobody writes. Who writes into a page with two users takes a copy first: **copy
# on write**. Full pages are never written again, so a shared beginning costs nothing.
#
# ## The same beginning, once
#
# Chats begin alike: the same instructions, the same documents, everything said before. A page is found by a **hash
# chain**: its key is made of its tokens and of the key of the page before. So equal keys mean (but for a collision of
# hashes) that *everything* up to there is equal, which is what keys and values depend on.

# %%
lesson.source(work.chain)
instructions = list(range(100, 148))
one, other = work.chain([*instructions, 7, 8], 16), work.chain([*instructions[:20], 9, *instructions[21:]], 16)
print(f"same first page: {one[0] == other[0]}; second page, one token changed: {one[1] == other[1]}; third page, the "
      f"same 16 tokens: {one[2] == other[2]}")  # fmt: skip
assert (one[0] == other[0], one[1] == other[1], one[2] == other[2]) == (True, False, False)

# %% [markdown]
# The real engine with a model of 27 million weights: a prompt of 512 tokens, then another that differs in its last
# 32. 480 tokens are found in the cache. How much of the time to the first token is left?

# %%
served = random_model()
guess = predict("time to the first token with 480 of 512 tokens in the cache, as a share of the time without",
                name="first token, 480 of 512 found", unit="fraction", model=32 / 512)  # fmt: skip
alone_s, again_s, cached = work.first_tokens(served, 480, 32)
lesson.show(guess, again_s / alone_s, missing={"limit": "reading the weights once"})
print(f"{format_seconds(alone_s)} without, {format_seconds(again_s)} with {cached} tokens found")
assert cached == 480
assert again_s < alone_s

# %% [markdown]
# ## When pages run out
#
# Requests that run grow; some day there is no free page. Then the engine **evicts** pages that are only kept for
# later, and if there are none it **preempts** the newest request: its pages go to older ones. Later it is *computed
# again* (its tokens are known: one prefill), or its pages were copied to the CPU's memory and come back (*swapped*).
# Computing again takes operations, swapping takes the link: for the 70 B model and a request of 1,000 tokens,
# computed for one H100 (on eight, both are an eighth):

# %%
flops, peak, link = 2 * 70e9 * 1000, 0.5 * 989e12, 55e9
print(f"computed again: {format_seconds(flops / peak)}; swapped out and in: "
      f"{format_seconds(2 * kv_cache_bytes(large, 1000) / link)}")  # fmt: skip
loads = [Load(0.0, 30, 60) for _ in range(8)]


def run(pages: int) -> tuple[int, int, float]:
    """(tokens computed, preemptions, seconds) for the eight requests in so many pages."""
    history = continuous(loads, ServeLimits(pages=pages, context=128, running=8, step_tokens=64), lambda n: 0.02)
    steps = history.steps
    return (
        sum(part.count for step in steps for part in step.parts),
        sum(len(step.preempted) for step in steps),
        steps[-1].ended_ns * 1e-9,
    )


guess = predict(
    "eight requests of 30 + 60 tokens need 48 pages of 16. How many tokens are computed with 24 pages? (With 48: 712)",
    name="tokens computed in half the pages",
    unit="count",
    model=712 + 4 * 48,  # half of them are preempted once, half-way
)
plenty, few = run(48), run(24)
lesson.show(guess, float(few[0]), limit=712.0, figure="counted")
for pages, (computed, preempted, seconds) in ((48, plenty), (24, few)):
    print(f"{pages} pages: {computed} tokens computed, {preempted} preemptions, {format_seconds(seconds)}")
assert plenty[:2] == (712, 0)
assert few[1] > 0

# %% [markdown]
# Nothing is lost, it only takes longer: answers are the same. And a layer with a **window** of W tokens never looks
# further back: pages behind it are free again, so a text of any length needs pages for W tokens and a chunk.

# %%
windowed = ServeLimits(pages=8, context=4096, running=1, step_tokens=32, window=64)
record = next(iter(continuous([Load(0.0, 600, 8)], windowed, lambda n: 0.01).requests.values()))
print(f"a prompt of 600 tokens in 8 pages of 16, window 64: {len(record.output)} tokens of answer")
assert len(record.output) == 8

# %% [markdown]
# ## Exercises

# %%
lesson.exercises()

# %%
lesson.close()
