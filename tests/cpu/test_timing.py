"""The harness, on clocks the tests move by hand: interleaving, rotation, budget, checks, failures, ranks, graphs."""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from tilemesh.core.errors import RunError, UsageError
from tilemesh.measure import gpu, ranks, timing
from tilemesh.measure.timing import FEWEST_ROUNDS, MIN_READING_S, Check, LoopTimer, compare


@dataclass
class Clock:
    """Time passes only when a call says so."""

    now_s: float = 0.0
    calls: list[tuple[str, int]] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    def candidate(self, name: str, seconds: float) -> Callable[[int], str]:
        def call(index: int) -> str:
            self.calls.append((name, index))
            self.now_s += seconds
            return f"{name}[{index}]"

        return call


def test_medians_are_seconds_a_call() -> None:
    clock = Clock()
    result = compare(
        {"slow": clock.candidate("slow", 0.5), "fast": clock.candidate("fast", 0.25)}, timer=LoopTimer(clock), repeats=5
    )
    assert result["slow"].median == pytest.approx(0.5)
    assert result["fast"].median == pytest.approx(0.25)
    assert result["fast"].n == 5
    assert result.missing == {}


def test_every_round_reads_every_candidate_once_in_changing_order() -> None:
    clock = Clock()
    names = ["a", "b", "c"]
    compare({n: clock.candidate(n, 1.0) for n in names}, timer=LoopTimer(clock), repeats=12, warmup=0, seconds=1e9)
    timed = [name for name, _ in clock.calls[-36:]]
    rounds = [tuple(timed[i : i + 3]) for i in range(0, 36, 3)]
    assert all(sorted(one) == names for one in rounds)
    assert len(set(rounds)) > 3
    again = Clock()
    compare({n: again.candidate(n, 1.0) for n in names}, timer=LoopTimer(again), repeats=12, warmup=0, seconds=1e9)
    assert again.calls == clock.calls  # shuffled, yet the same each time


def test_input_sets_rotate_through_all() -> None:
    clock = Clock()
    compare({"a": clock.candidate("a", 1.0)}, timer=LoopTimer(clock), repeats=8, warmup=1, sets=4, seconds=1e9)
    indices = [index for _, index in clock.calls]
    assert indices == [i % 4 for i in range(len(indices))]
    assert set(Counter(indices[-8:]).values()) == {2}


@pytest.mark.parametrize("call_s", [1e-9, 50e-9, 3e-6, 150e-6])
def test_short_calls_are_looped_until_the_clock_can_see_them(call_s: float) -> None:
    clock = Clock()
    ready = LoopTimer(clock).prepare(clock.candidate("a", call_s), sets=3, warmup=0)
    reading = ready.read()
    assert reading.seconds * reading.calls >= 0.99 * MIN_READING_S
    assert reading.seconds == pytest.approx(call_s, rel=1e-3)


def test_long_calls_are_not_looped() -> None:
    clock = Clock()
    assert LoopTimer(clock).prepare(clock.candidate("a", 1e-3), sets=1, warmup=0).read().calls == 1


def test_the_budget_ends_the_rounds_but_leaves_enough_for_a_median() -> None:
    clock = Clock()
    within = compare({"a": clock.candidate("a", 1.0)}, timer=LoopTimer(clock), repeats=100, seconds=7.5)
    assert within["a"].n == 8
    least = compare({"a": clock.candidate("a", 1.0)}, timer=LoopTimer(clock), repeats=100, seconds=0.1)
    assert least["a"].n == FEWEST_ROUNDS


def test_who_fails_is_left_out_with_the_reason_and_the_rest_is_timed() -> None:
    clock = Clock()

    def broken(index: int) -> object:
        raise ValueError("no such kernel\nand a long explanation")

    result = compare({"ours": clock.candidate("ours", 1.0), "peer": broken}, timer=LoopTimer(clock), repeats=3)
    assert set(result) == {"ours"}
    assert result.missing == {"peer": "ValueError: no such kernel"}
    with pytest.raises(RunError, match="peer could not be timed: ValueError: no such kernel"):
        result["peer"]
    with pytest.raises(KeyError):
        result["nobody"]
    with pytest.raises(ValueError, match="no such kernel"):
        compare({"peer": broken}, timer=LoopTimer(clock), on_error="raise")


def test_who_fails_half_way_is_left_out_too() -> None:
    clock = Clock()
    good = clock.candidate("good", 1.0)
    seen = Counter[str]()

    def fragile(index: int) -> object:
        seen["calls"] += 1
        if seen["calls"] > 6:
            raise RuntimeError("gave up")
        clock.now_s += 1.0
        return None

    result = compare({"good": good, "fragile": fragile}, timer=LoopTimer(clock), repeats=10, seconds=1e9)
    assert result["good"].n == 10
    assert result.missing == {"fragile": "RuntimeError: gave up"}


def test_output_is_poisoned_before_and_verified_after() -> None:
    clock = Clock()
    outputs = {"right": torch.zeros(2), "idle": torch.zeros(2)}

    def right(index: int) -> torch.Tensor:
        clock.now_s += 1.0
        return outputs["right"].fill_(float(index))

    def idle(index: int) -> torch.Tensor:  # computes nothing once it has been warmed up
        clock.now_s += 1.0
        return outputs["idle"]

    def poison(name: str, result: object) -> None:
        assert isinstance(result, torch.Tensor)
        result.fill_(float("nan"))

    def verify(name: str, result: object, index: int) -> None:
        assert isinstance(result, torch.Tensor)
        if not torch.equal(result, torch.full((2,), float(index))):
            raise RunError(f"{name} gave {result.tolist()} on set {index}")

    result = compare(
        {"right": right, "idle": idle}, timer=LoopTimer(clock), repeats=4, sets=3, check=Check(poison, verify)
    )
    assert set(result) == {"right"}
    assert result.missing["idle"].startswith("idle gave [nan, nan]")


def test_garbage_collection_rests_while_timing_and_comes_back() -> None:
    clock = Clock()
    states: list[bool] = []

    def call(index: int) -> None:
        clock.now_s += 1.0
        states.append(gc.isenabled())

    assert gc.isenabled()
    compare({"a": call}, timer=LoopTimer(clock), repeats=5, warmup=0)
    assert states[-5:] == [False] * 5
    assert gc.isenabled()


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"warmup": -1}, {"sets": 0}, {"seconds": 0.0}])
def test_wrong_arguments_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        compare({"a": lambda index: None}, **wrong)  # type: ignore[arg-type]


def test_no_candidates_is_refused() -> None:
    with pytest.raises(UsageError, match="no candidates"):
        compare({})


def test_settling_waits_for_spinning_threads_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {"wall": 0.0, "cpu": 0.0}

    def sleep(seconds: float) -> None:
        passed["wall"] += seconds
        if passed["wall"] < spins_until_s:
            passed["cpu"] += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: passed["wall"])
    monkeypatch.setattr(timing.time, "process_time", lambda: passed["cpu"])
    monkeypatch.setattr(timing.time, "sleep", sleep)
    spins_until_s = 0.5
    assert 0.5 <= timing.settle() <= 0.55
    assert timing.settle() <= 0.03  # quiet: one look
    spins_until_s = 1e9
    assert timing.settle(longest_s=2.0) == pytest.approx(2.0, abs=0.05)


# Ranks ---------------------------------------------------------------------------------------------------------------


class Threads:
    """Ranks as threads that share a barrier and a list."""

    def __init__(self, size: int) -> None:
        self.meet = threading.Barrier(size, timeout=30)
        self.given: dict[int, list[float]] = {}

    def barrier(self) -> None:
        self.meet.wait()

    def max_over_ranks(self, values: list[float]) -> list[float]:
        self.given[threading.get_ident()] = values
        self.meet.wait()
        largest = [max(column) for column in zip(*self.given.values(), strict=True)]
        self.meet.wait()  # nobody writes the next values before all have read these
        return largest


def test_the_slowest_rank_counts_and_all_ranks_take_the_same_readings() -> None:
    group = Threads(3)
    clocks = [Clock() for _ in range(3)]
    results: dict[int, object] = {}

    def rank(number: int) -> None:
        clock = clocks[number]
        dice = random.Random(number)

        def uneven(index: int) -> None:
            clock.now_s += (number + 1) * 1e-6 * dice.uniform(0.9, 1.1)  # rank 2 is the slowest, none is steady

        results[number] = compare(
            {"uneven": uneven, "even": clock.candidate("even", 1e-3)},
            timer=ranks.rank_timer(group, clock=clock),
            repeats=50,
            seconds=0.02,
            on_error="raise",
        )

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results[0] == results[1] == results[2]
    sample = results[0]["uneven"]  # type: ignore[index]
    assert sample.median == pytest.approx(3e-6, rel=0.02)
    assert sample.n < 50  # the budget ended all ranks in the same round
    assert clocks[0].calls == clocks[1].calls == clocks[2].calls


def test_the_case_says_whether_ranks_outnumber_cores() -> None:
    assert ranks.ranks_case(4, cores=2) == {"ranks": 4, "cores": 2, "oversubscribed": True}
    assert ranks.ranks_case(2, cores=2) == {"ranks": 2, "cores": 2, "oversubscribed": False}
    assert ranks.ranks_case(1)["cores"] >= 1  # type: ignore[operator]


# Graphs, with the GPU played by a clock ------------------------------------------------------------------------------


class FakeCaptured:
    def __init__(self, graphs: FakeGraphs, body: Callable[[], object]) -> None:
        before = len(graphs.clock.calls), graphs.clock.now_s
        self.result = body()
        self.calls = graphs.clock.calls[before[0] :]
        self.seconds = graphs.clock.now_s - before[1]

    def replay_s(self) -> float:
        return self.seconds


class FakeGraphs:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.captures: list[FakeCaptured] = []
        self.warm_calls = 0

    def warm(self, body: Callable[[], object]) -> None:
        before = len(self.clock.calls)
        body()
        self.warm_calls = len(self.clock.calls) - before

    def capture(self, body: Callable[[], object]) -> FakeCaptured:
        self.captures.append(FakeCaptured(self, body))
        return self.captures[-1]


def test_a_graph_holds_whole_passes_over_the_sets_and_lasts_long_enough() -> None:
    clock = Clock()
    graphs = FakeGraphs(clock)
    ready = gpu.KernelTimer(graphs).prepare(clock.candidate("a", 10e-6), sets=8, warmup=3)
    assert graphs.warm_calls == 8
    assert [len(one.calls) for one in graphs.captures] == [8, 104]  # 13 passes: the first multiple above 1 ms
    assert [index for _, index in graphs.captures[-1].calls] == [i % 8 for i in range(104)]
    reading = ready.read()
    assert (reading.calls, ready.last()) == (104, ("a[7]", 7))
    assert reading.seconds == pytest.approx(10e-6)


def test_a_long_kernel_is_captured_once() -> None:
    clock = Clock()
    graphs = FakeGraphs(clock)
    assert gpu.KernelTimer(graphs).prepare(clock.candidate("a", 2e-3), sets=2, warmup=1).read().calls == 2
    assert len(graphs.captures) == 1


def test_the_graph_does_not_grow_without_end() -> None:
    clock = Clock()
    graphs = FakeGraphs(clock)
    calls = gpu.KernelTimer(graphs).prepare(clock.candidate("a", 1e-9), sets=3, warmup=1).read().calls
    assert calls == gpu.MOST_CALLS_IN_GRAPH // 3 * 3


@pytest.mark.parametrize(
    ("bytes_per_set", "l2_bytes", "sets"),
    [(384 << 20, 50 << 20, 2), (10 << 20, 50 << 20, 10), (3 << 20, 50 << 20, 34), (16, 50 << 20, gpu.MOST_SETS)],
)
def test_sets_go_past_the_l2(bytes_per_set: int, l2_bytes: int, sets: int) -> None:
    made = gpu.rotating_sets(lambda index: index, bytes_per_set, l2_bytes)
    assert made == list(range(sets))
    assert sets == gpu.MOST_SETS or sets * bytes_per_set >= gpu.L2_TIMES * l2_bytes


def test_a_set_of_no_bytes_is_refused() -> None:
    with pytest.raises(UsageError, match="bytes_per_set=0"):
        gpu.sets_needed(0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
def test_kernel_time_without_a_gpu_says_what_it_needs() -> None:
    with pytest.raises(UsageError, match="NVIDIA GPU"):
        gpu.KernelTimer()
