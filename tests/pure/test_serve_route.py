"""Which replica a prompt goes to: where its beginning is, unless there is too much to do there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilemesh.serve.route import PrefixRouter


def test_equal_beginnings_meet_and_others_spread() -> None:
    router = PrefixRouter(2, 4, 100)
    both = [True, True]
    first, missing = router.choose(list(range(40)), both)
    assert missing == 40
    again, missing = router.choose([*range(36), 7, 7, 7, 7, 7], both)
    assert (again, missing) == (first, 5)
    router.running[first] += 1
    other, _ = router.choose([9] * 40, both)  # nothing of it is anywhere: where less is under way
    assert other != first


def test_a_long_queue_costs_more_than_a_prefix_saves() -> None:
    router = PrefixRouter(2, 4, 100)
    first, _ = router.choose(list(range(40)), [True, True])
    router.waiting[first] = 100
    assert router.choose(list(range(40)), [True, True]) == (1 - first, 40)
    assert router.choose(list(range(40)), [True, True])[0] == 1 - first  # it has it by now


def test_a_replica_that_is_gone_is_not_asked_and_forgets() -> None:
    router = PrefixRouter(2, 4, 100)
    first, _ = router.choose(list(range(40)), [True, True])
    alive = [replica != first for replica in range(2)]
    assert router.choose(list(range(40)), alive) == (1 - first, 40)
    router.forget(1 - first)
    assert router.choose(list(range(40)), alive) == (1 - first, 40)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), max_size=30), st.integers(1, 5))
def test_no_more_is_said_to_be_there_than_was_sent(prompts: list[list[int]], page_tokens: int) -> None:
    """A replica that remembers two pages at most; the last token is always computed."""
    router = PrefixRouter(1, page_tokens, 2)
    for prompt in prompts:
        _, missing = router.choose(prompt, [True])
        assert 1 <= missing <= len(prompt)
        assert len(router._sent[0]) <= 2
