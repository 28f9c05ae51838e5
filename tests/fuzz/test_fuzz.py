"""The fuzzer: a sample of its cases in `make test`, all of them in `make test-all`. What a case is: `fuzz_cases.py`.

No case may show a traceback, take more than 10 s (less the time in which others had the cores), or leave a file, a
process or a thread behind; what is refused is refused in one line. A failure prints the line that repeats it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

import hostile
import pytest
from fuzz_client import Server, report, shuffled

SHARDS = 8
SAMPLE_OF_A_GROUP = 1
SAMPLE_OF_KILLS = (
    "kills: export, before change 6 and cut; then train",
    "kills: data prepare, before change 3; then train",
    "kills: train from weights, before change 12; then train --resume",
    "kills: train, before change 42; then train --resume",
)
"""Moments whose like once left what was taken for whole."""
LEAST_CASES = 1500

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the fuzzer forks and reads /proc")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


def run_all(server: Server, names: Iterable[str]) -> None:
    """All of them, then all that is wrong, each with the line that repeats it."""
    outcomes = [server.run_calmly(name) for name in names]
    wrong = [report(outcome) for outcome in outcomes if outcome["wrong"]]
    assert not wrong, f"{len(wrong)} cases\n" + "\n".join(wrong)


@pytest.mark.timeout(300)
def test_a_sample(server: Server) -> None:
    groups = defaultdict(list)
    for name, group in server.cases:
        groups[group].append(name)
    assert len(server.cases) >= LEAST_CASES
    numbers = defaultdict(lambda: SAMPLE_OF_A_GROUP, kills=0)
    chosen = [name for group, names in groups.items() for name in shuffled(names)[: numbers[group]]]
    kills = [name for name in groups["kills"] if name.startswith(SAMPLE_OF_KILLS)]
    assert len(kills) == len(SAMPLE_OF_KILLS)
    run_all(server, [*chosen, *kills])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_all(server: Server, shard: int) -> None:
    run_all(server, shuffled(name for name, _ in server.cases)[shard::SHARDS])


def test_every_command_has_a_sound_call_and_every_option_its_cases() -> None:
    """A command that `BASES` lacks is refused for what is missing, and its options are then never reached."""
    import fuzz_cases

    names = {case.name for case in fuzz_cases.command_cases()}
    for command in fuzz_cases.commands():
        assert f"{command}: sound" in names
        for parameter in fuzz_cases.parameters(fuzz_cases.commands()[command]):
            called = fuzz_cases._named(parameter)
            is_path = fuzz_cases.values_for(fuzz_cases.commands()[command], parameter) is hostile.PATHS
            known = hostile.is_written(called) or called in hostile.READ
            assert known or not is_path, f"say in hostile.py whether {command} reads or writes {called}"
        assert command in fuzz_cases.BASES or command == "doctor", f"add a sound, cheap call of {command} to BASES"
