"""Sequences that ranks share: every token once, every pair of tokens once, and as much work for each rank."""

from __future__ import annotations

import itertools

import pytest

from tilemesh.core.sequence import (
    TokenRun,
    attended,
    block_pairs,
    joined_runs,
    ranks_sharing_heads,
    runs_around,
    tokens_of,
    zigzag,
)
from tilemesh.core.shard import share


@pytest.mark.parametrize(("tokens", "ranks"), [*itertools.product((1, 2, 5, 7, 16, 33), (1, 2, 3, 4, 8))])
def test_every_token_is_one_ranks_and_every_pair_is_computed_once(tokens: int, ranks: int) -> None:
    runs = [zigzag(tokens, ranks, rank) for rank in range(ranks)]
    places = [[at for run in of_rank for at in range(run.begin, run.end)] for of_rank in runs]
    assert sorted(itertools.chain(*places)) == list(range(tokens))
    assert all(tokens_of(of_rank) >= 1 for of_rank in runs if tokens >= ranks)
    for joined in (False, True):
        seen = []
        for query, key in itertools.product(range(ranks), repeat=2):
            for pair in block_pairs(runs[query], runs[key], joined=joined):
                asked, answers = (
                    places[rank][run.begin : run.end] for rank, run in ((query, pair.queries), (key, pair.keys))
                )
                if not joined:
                    assert (asked[0], answers[0]) == (pair.first_query, pair.first_key)
                seen += [(a, b) for a, b in itertools.product(asked, answers) if not pair.causal or b <= a]
        assert sorted(seen) == [(a, b) for a in range(tokens) for b in range(a + 1)]


def test_zigzag_gives_rank_r_the_blocks_r_and_2c_minus_1_minus_r() -> None:
    assert [zigzag(16, 2, rank) for rank in range(2)] == [((0, 4), (12, 4)), ((4, 8),)]
    assert zigzag(10, 4, 0, begin=5) == (TokenRun(5, 2), TokenRun(14, 1))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_work_between_ranks_is_even_in_zigzag_order_and_not_in_plain_order(ranks: int) -> None:
    """In blocks, where one on the diagonal counts as one: the plain ring's last rank has c, the mean is (c+1)/2."""
    for tokens in (2 * ranks, 64 * ranks):
        runs = [zigzag(tokens, ranks, rank) for rank in range(ranks)]
        work = [attended(of_rank, runs) for of_rank in runs]
        assert max(work) * ranks == sum(work) == ranks * tokens * (tokens + 1) // (2 * ranks)
    plain = [(TokenRun(*share(ranks, ranks, rank)),) for rank in range(ranks)]
    work = [attended(of_rank, plain) for of_rank in plain]
    assert max(work) * ranks / sum(work) == pytest.approx(2 * ranks / (ranks + 1))


def test_pairs_beyond_a_window_are_left_out_and_neighbours_are_joined() -> None:
    queries, keys = zigzag(32, 2, 0), zigzag(32, 2, 1)  # blocks 0 and 3, and 1 and 2
    assert [pair.keys for pair in block_pairs(queries, keys)] == [TokenRun(0, 16)]
    assert block_pairs(queries, queries, window=8, joined=False)[-1].causal, "block 0 is 16 tokens before block 3"
    assert len(block_pairs(queries, queries, window=18, joined=False)) == 3, "the last key of it is 17 before"
    assert len(block_pairs(queries, queries, window=17, joined=False)) == 2
    every = [pair for rank in range(4) for pair in block_pairs(zigzag(64, 4, 1), zigzag(64, 4, rank))]
    assert [(pair.queries.length, pair.keys.length) for pair in every] == [
        (16, 8),
        (8, 8),
        (8, 8),
        (8, 8),
        (8, 16),
        (8, 16),
    ]


@pytest.mark.parametrize("tokens", [1, 7, 11, 64, 97])
@pytest.mark.parametrize(("ranks", "near"), [(2, 1), (4, 2), (6, 3), (8, 2), (8, 8)])
def test_neighbours_together_share_as_their_groups_would_and_gathered_keys_are_seen_once(
    tokens: int, ranks: int, near: int
) -> None:
    runs = [zigzag(tokens, ranks, rank) for rank in range(ranks)]
    stops = [joined_runs(runs[at : at + near]) for at in range(0, ranks, near)]
    assert sorted(at for stop in stops for run in stop for at in range(run.begin, run.end)) == list(range(tokens))
    if tokens % (2 * ranks) == 0:
        assert stops == [zigzag(tokens, ranks // near, stop) for stop in range(ranks // near)]
    for own in stops:
        seen = [
            (pair.queries.begin + query, pair.keys.begin + key)
            for pair in block_pairs(own, runs_around(own))
            for query in range(pair.queries.length)
            for key in range(query + 1 if pair.causal else pair.keys.length)
        ]
        positions = [at for run in own for at in range(run.begin, run.end)]
        assert sorted(seen) == [(at, key) for at, position in enumerate(positions) for key in range(position + 1)]


def test_as_many_ranks_share_out_heads_as_there_are_whole_ones_for() -> None:
    assert [ranks_sharing_heads("heads-ring", 8, heads) for heads in (1, 2, 6, 8, 32)] == [1, 2, 2, 8, 8]
    assert [ranks_sharing_heads(how, 8, 2) for how in ("ring", "gather", "heads")] == [1, 1, 8]
