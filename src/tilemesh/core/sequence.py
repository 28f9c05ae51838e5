"""How ranks share a sequence (context parallelism): which of its tokens each has, and which of them attend to which.

The one idea: a rank's tokens are a few runs of the sequence, and a run of queries sees all of a run of keys that lies
before it, its own up to each token, and nothing of one behind it. So whatever order the runs are dealt in, attention
is a list of pairs of runs, and a rank's work is the sum of their areas. Zigzag order cuts a sequence into 2c blocks and
gives rank r the blocks r and 2c-1-r, an early and a late one: all ranks have the same work, where with one block each
the last of c ranks has 2c/(c+1) times the mean. Plain values; `parallel/ring.py` computes by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tilemesh.core.shard import share


class TokenRun(NamedTuple):
    """Consecutive tokens."""

    begin: int
    length: int

    @property
    def end(self) -> int:
        return self.begin + self.length


Runs = tuple[TokenRun, ...]
"""Of one rank, in the order in which its tokens lie."""


class BlockPair(NamedTuple):
    """Queries and keys of two ranks that attend: where they lie in the ranks' own tokens, and in the sequence."""

    queries: TokenRun
    keys: TokenRun
    first_query: int
    first_key: int
    causal: bool
    """Whether they are the same tokens, each of which sees those up to itself; otherwise each query sees every key."""


def zigzag(tokens: int, ranks: int, rank: int, begin: int = 0) -> Runs:
    """The tokens of one rank, out of so many from `begin` on; blocks may differ by one token, and may be empty."""
    runs: list[TokenRun] = []
    for block in dict.fromkeys((rank, 2 * ranks - 1 - rank)):
        first, length = share(tokens, 2 * ranks, block)
        if runs and runs[-1].end == begin + first:
            runs[-1] = TokenRun(runs[-1].begin, runs[-1].length + length)
        elif length:
            runs.append(TokenRun(begin + first, length))
    return tuple(runs)


def tokens_of(runs: Runs) -> int:
    return sum(run.length for run in runs)


def stretch_of_runs(runs: Runs, first: int, count: int) -> Runs:
    """So many of a rank's tokens, from `first` in the order in which they lie."""
    kept, at = [], 0
    for run in runs:
        begin, end = max(first, at), min(first + count, at + run.length)
        if begin < end:
            kept.append(TokenRun(run.begin + begin - at, end - begin))
        at += run.length
    return tuple(kept)


def runs_of_ranks(tokens: int, cp: int, tp: int = 1) -> list[Runs]:
    """Of every rank that shares a sequence by cp, and of those that cut its tokens once more by tp."""
    shares = []
    for rank in range(cp):
        runs = zigzag(tokens, cp, rank)
        shares += [stretch_of_runs(runs, *share(tokens_of(runs), tp, place)) for place in range(tp)]
    return shares


def joined_runs(runs: Iterable[Runs]) -> Runs:
    """Of several ranks together, in the order of the sequence."""
    joined: list[TokenRun] = []
    for run in sorted(run for each in runs for run in each):
        if joined and joined[-1].end == run.begin:
            joined[-1] = TokenRun(joined[-1].begin, joined[-1].length + run.length)
        else:
            joined.append(run)
    return tuple(joined)


def runs_around(own: Runs) -> Runs:
    """All tokens up to the last of a rank's, cut where its runs begin and end."""
    every: list[TokenRun] = []
    for run in own:
        before = every[-1].end if every else 0
        every += [TokenRun(before, run.begin - before)] * (run.begin > before) + [run]
    return tuple(every)


def ranks_sharing_heads(exchange: str, ranks: int, kv_heads: int) -> int:
    """Of ranks that share a sequence, the neighbours of which each gets all their tokens of a part of the heads: as
    many as the KV heads of a rank allow, and 1 where an exchange leaves heads together."""
    if exchange == "heads":
        return ranks
    return math.gcd(ranks, kv_heads) if exchange == "heads-ring" else 1


def block_pairs(queries: Runs, keys: Runs, window: int = 0, joined: bool = True) -> list[BlockPair]:
    """Which runs of queries see which of keys; those of the same tokens first.

    `window`: of the last so many tokens alone. `joined`: runs that lie side by side and see all of the same are one.
    """
    pairs: list[BlockPair] = []
    at = 0
    for query in queries:
        before: list[BlockPair] = []
        here = 0
        for key in keys:
            if query == key:
                pairs.append(
                    BlockPair(TokenRun(at, query.length), TokenRun(here, key.length), query.begin, key.begin, True)
                )
            elif key.end <= query.begin and not 0 < window <= query.begin - (key.end - 1):
                before.append(
                    BlockPair(TokenRun(at, query.length), TokenRun(here, key.length), query.begin, key.begin, False)
                )
            here += key.length
        pairs += _joined_keys(before) if joined else before
        at += query.length
    same = [pair for pair in pairs if pair.causal]
    full = [pair for pair in pairs if not pair.causal]
    if not joined:
        return same + full
    # Pairs of the same keys, turned round: queries that follow one another.
    turned = [pair._replace(queries=pair.keys, keys=pair.queries) for pair in full]
    return same + [pair._replace(queries=pair.keys, keys=pair.queries) for pair in _joined_keys(turned)]


def _joined_keys(pairs: Sequence[BlockPair]) -> list[BlockPair]:
    """Pairs of the same queries as one where their keys follow one another."""
    merged: list[BlockPair] = []
    for pair in pairs:
        last = merged[-1] if merged else None
        if last is not None and last.queries == pair.queries and last.keys.end == pair.keys.begin:
            merged[-1] = last._replace(keys=TokenRun(last.keys.begin, last.keys.length + pair.keys.length))
        else:
            merged.append(pair)
    return merged


def attended(queries: Runs, keys: Sequence[Runs]) -> int:
    """Pairs of a query and a key that a rank computes, out of all ranks' keys: its work."""
    total = 0
    for runs in keys:
        for pair in block_pairs(queries, runs):
            length = pair.queries.length
            total += length * (length + 1) // 2 if pair.causal else length * pair.keys.length
    return total
