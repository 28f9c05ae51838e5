"""Two processes, two classic patterns, many times: are loads and stores seen in the order that the flags rely on?

litmus_script.py PATTERN ITERATIONS [plain]: prints how often an order was seen that must not be. `plain` leaves the
fence out, to see what the processor does by itself.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable

from tilemesh.comm.runtime.flags import WORDS, make_fence

LINES = 64


def message_passing(words: memoryview, me: int, rounds: int, fence: Callable[[], object]) -> int:
    """One writes data in four lines, then a flag; the other sees the flag, then must see the data."""
    flag, answer = 0, WORDS
    data = [(8 + k) * WORDS for k in range(4)]
    wrong = 0
    for i in range(1, rounds + 1):
        if me == 0:
            while words[answer] != i - 1:
                pass
            for place in data:
                words[place] = i
            fence()
            words[flag] = i
        else:
            while words[flag] != i:
                pass
            fence()
            wrong += sum(words[place] != i for place in reversed(data))
            for place in data:
                words[place + 1] = i  # takes the line away, so that the next store to it misses
            fence()
            words[answer] = i
    return wrong


def store_buffering(words: memoryview, me: int, rounds: int, fence: Callable[[], object]) -> int:
    """Both write their own, then read the other's: at least one must see what the other wrote."""
    mine, other = (2 + me) * WORDS, (3 - me) * WORDS
    here, there = (4 + me) * WORDS, (5 - me) * WORDS
    saw, seen = (6 + me) * WORDS, (7 - me) * WORDS
    wrong = 0
    for i in range(1, rounds + 1):
        words[here] = 2 * i - 1
        while words[there] < 2 * i - 1:
            pass
        words[mine] = i
        fence()
        missed = words[other] != i
        words[saw] = 2 * i + missed
        fence()
        words[here] = 2 * i
        while words[there] < 2 * i:
            pass
        fence()
        wrong += missed and words[seen] == 2 * i + 1
    return wrong


PATTERNS = {"message_passing": message_passing, "store_buffering": store_buffering}


def main() -> None:
    pattern, rounds = PATTERNS[sys.argv[1]], int(sys.argv[2])
    # Message passing is what x86 keeps by itself; that a load may pass a store, no processor prevents.
    needed = make_fence() if sys.argv[1] == "message_passing" else make_fence("any")
    fence = (None if "plain" in sys.argv else needed) or (lambda: None)
    words = memoryview(mmap.mmap(-1, LINES * WORDS * 8)).cast("Q")
    cores = sorted(os.sched_getaffinity(0))
    child = os.fork()
    me = int(child == 0)
    os.sched_setaffinity(0, {cores[me % len(cores)]})
    wrong = pattern(words, me, rounds, fence)
    words[40 * WORDS + me] = wrong
    if me:
        os._exit(0)
    os.waitpid(child, 0)
    print(max(words[40 * WORDS], words[40 * WORDS + 1]))


main()
