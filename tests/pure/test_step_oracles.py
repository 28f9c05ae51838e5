"""Published figures of pipeline schedules: bubbles and peaks, exactly."""

from __future__ import annotations

import pytest

from tilemesh.core.step.book import build
from tilemesh.core.step.memory import StepBytes, memory_curve, memory_peaks
from tilemesh.core.step.passes import exchange, gather
from tilemesh.core.step.simulate import StepTimes, Timeline, simulate
from tilemesh.core.step.slices import SliceTime, cut_sequence

# Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), tables 5 and 9: stages, microbatches, F, B, W and transfer
# in ms, chunks of the interleaved schedule, and the bubble rates of 1F1B, ZB-H1, ZB-H2 and 1F1B interleaved.
ZERO_BUBBLE = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 3, 0.2431, 0.1585, 0.1083, 0.1055),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 3, 0.1985, 0.1242, 0.0837, 0.0818),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 4, 0.2347, 0.1323, 0.0698, 0.0808),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 4, 0.1091, 0.0554, 0.0294, 0.0320),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 3, 0.2552, 0.1397, 0.0672, 0.1104),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 3, 0.1251, 0.0576, 0.0266, 0.0445),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 2, 0.2646, 0.1421, 0.0641, 0.1493),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 2, 0.1352, 0.0594, 0.0257, 0.0624),
]


def linear_slice_time(fixed_s: float, token_s: float, context_s: float, product_s: float) -> SliceTime:
    """The paper's model, a0 + a1 i + a2 j + a3 ij for i tokens after j, which it fits within 2 %."""
    return lambda tokens, before: fixed_s + token_s * tokens + context_s * before + product_s * tokens * before


def terapipe_s(lengths: list[int], stages: int, slice_s: SliceTime) -> float:
    """Seconds of one pass of one sequence through all stages."""
    times = [slice_s(tokens, sum(lengths[:place])) for place, tokens in enumerate(lengths)]
    return sum(times) + (stages - 1) * max(times)


def run(name: str, p: int, m: int, f: float, i: float, w: float, transfer: float = 0.0) -> Timeline:
    program = build(name, p, m)
    return simulate(program, StepTimes.even(program.chunks, f, i, w, transfer))


def idle_s(timeline: Timeline) -> float:
    return timeline.total_s - max(timeline.busy_s)


@pytest.mark.parametrize("row", ZERO_BUBBLE)
def test_zero_bubble_rates(row: tuple[float, ...]) -> None:
    p, m, *times = row[:6]
    found = [round(run(name, int(p), int(m), *times).bubble_rate, 4) for name in ("1f1b", "zb-h1", "zb-h2")]
    assert found == [*row[7:10]]


@pytest.mark.parametrize("row", ZERO_BUBBLE)
def test_interleaved_rates_differ_by_p_transfers(row: tuple[float, ...]) -> None:
    """The order of Narayanan et al. exposes 2 (v p - 1) transfers: a microbatch's way through all chunks and back.

    The published rates are those of p transfers fewer, in all eight cells to four digits. That many cannot be
    hidden by this order when a transfer delays its receiver: the last rank's first pass waits for p - 1 transfers, its
    v - 1 groups of the warm-up for p each, and the way back is the same.
    """
    p, m, v = int(row[0]), int(row[1]), int(row[6])
    f, i, w, transfer = row[2:6]
    program = build("interleaved", p, m, v)
    timeline = simulate(program, StepTimes.even(p * v, f / v, i / v, w / v, transfer))
    work_s = m * (f + i + w)
    ideal_s = work_s + (p - 1) * (f + i + w) / v
    assert max(timeline.spans_s) == pytest.approx(ideal_s + 2 * (v * p - 1) * transfer)
    published_s = ideal_s + (2 * (v * p - 1) - p) * transfer
    assert 1 - work_s / published_s == pytest.approx(row[10], abs=1e-4)


@pytest.mark.parametrize("p", [2, 4, 7])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (5, 4, 3)])
def test_zero_bubble_formulas(p: int, f: float, i: float, w: float) -> None:
    m = 4 * p
    spare = {"1f1b": f + i + w, "zb-h1": f + i - w}
    for name, each in spare.items():
        assert idle_s(run(name, p, m, f, i, w)) == pytest.approx((p - 1) * each), name
    # Of ZB-H2 the idle time is counted on a rank's own span: it ends late by as much as it began late.
    timeline = run("zb-h2", p, m, f, i, w)
    assert max(timeline.spans_s) - m * (f + i + w) == pytest.approx((p - 1) * (f + i - 2 * w))


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zero_bubble_peaks(p: int) -> None:
    """By rank r from 0: activations M until I and what W still needs after it, N; Qi et al., table 2."""
    whole, left = 10.0, 3.0
    sizes = StepBytes.activations(p, whole, left)
    m = 4 * p
    assert memory_peaks(build("1f1b", p, m), sizes) == [(p - r) * whole for r in range(p)]
    assert memory_peaks(build("zb-h1", p, m), sizes) == [(p - r) * whole + r * left for r in range(p)]
    most = [(2 * (p - r) - 1) * whole + 2 * r * left for r in range(p)]
    assert memory_peaks(build("zb-h2", p, m), sizes) == most
    assert most[0] == (2 * p - 1) * whole


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zb_v_never_waits_and_keeps_as_much_as_1f1b(p: int) -> None:
    timeline = run("zb-v", p, 3 * p, 1, 1, 1)
    assert timeline.bubble_rate == 0
    assert max(memory_peaks(build("zb-v", p, 3 * p), StepBytes.activations(2 * p, 0.5, 0.5))) == p


@pytest.mark.parametrize("p", [4, 8, 16])
def test_v_half_and_v_min(p: int) -> None:
    """Half of 1F1B's bubble at half its memory, two thirds at one third, but for a constant number of passes."""
    m = 4 * p
    one_f_one_b_s = idle_s(run("1f1b", p, m, 1, 1, 1))
    for name, share, least in (("v-half", 1 / 2, 1 / 2), ("v-min", 2 / 3, 1 / 3)):
        # Its chunks are half as large as 1F1B's.
        assert idle_s(run(name, p, m, 0.5, 0.5, 0.5)) <= share * one_f_one_b_s + 1.5, name
        peaks = memory_peaks(build(name, p, m), StepBytes.activations(2 * p, 0.5, 0.5))
        assert max(peaks) <= least * p + 1.5, name


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 2, 1)])
def test_dual_pipe(p: int, f: float, i: float, w: float) -> None:
    """DeepSeek's README: (PP/2-1)(F&B+B-3W) of bubble, PP+1 activations; DualPipeV the same with PP for PP/2."""
    together, backward = f + i + w, i + w
    for m in (2 * p, 20):
        assert idle_s(run("dualpipe", p, m, f, i, w)) == pytest.approx((p / 2 - 1) * (together + backward - 3 * w))
        peaks = memory_peaks(build("dualpipe", p, m), StepBytes.activations(p, 1.0, 1.0))
        assert max(peaks) == p + 1
        assert idle_s(run("dualpipe-v", p, m, f, i, w)) == pytest.approx((p - 1) * (together + backward - 3 * w))


def test_dual_pipes_formula_does_not_hold_for_all_times() -> None:
    assert idle_s(run("dualpipe", 8, 20, 2, 3, 1)) == 19
    assert (8 / 2 - 1) * ((2 + 3 + 1) + (3 + 1) - 3 * 1) == 21


@pytest.mark.parametrize("p", [4, 8, 16])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_chimera(p: int, turns: int) -> None:
    """Li and Hoefler 2021: idle D - 2 of 2N + D - 2 slots of equally long passes; peaks from D/2 + 1 to D."""
    m = turns * p
    timeline = run("chimera", p, m, 1, 1, 0)
    assert timeline.total_s == 2 * m + p - 2
    assert timeline.bubble == pytest.approx((p - 2) / (2 * m + p - 2))
    peaks = memory_peaks(build("chimera", p, m), StepBytes.activations(p))
    assert (min(peaks), max(peaks)) == (p / 2 + 1, p)


@pytest.mark.parametrize("stages", [1, 3, 6])
@pytest.mark.parametrize("lengths", [[16, 12, 8, 8], [8, 8, 8, 8], [4, 20, 4]])
def test_terapipe_takes_the_sum_and_the_slowest_for_every_other_stage(stages: int, lengths: list[int]) -> None:
    slice_s = linear_slice_time(1.0, 0.25, 0.05, 0.01)
    times = [slice_s(tokens, sum(lengths[:place])) for place, tokens in enumerate(lengths)]
    # Forward passes alone: backward ones take no time here.
    forward = StepTimes([1.0] * stages, [0.0] * stages, [0.0] * stages, slice_shares=times)
    program = build("terapipe", stages, 1, slices=len(lengths))
    expected = sum(times) + (stages - 1) * max(times)
    assert terapipe_s(lengths, stages, slice_s) == pytest.approx(expected)
    assert simulate(program, forward).total_s == pytest.approx(expected)


def all_cuts(places: int) -> list[list[int]]:
    if not places:
        return [[]]
    return [[first, *rest] for first in range(1, places + 1) for rest in all_cuts(places - first)]


@pytest.mark.parametrize("stages", [1, 3, 12])
@pytest.mark.parametrize("a", [(0.0, 1.0, 0.0, 0.1), (2.0, 1.0, 0.1, 0.3), (9.0, 0.1, 0.0, 0.0), (0.5, 0.2, 0.3, 0.05)])
def test_slices_are_the_best_of_all(stages: int, a: tuple[float, float, float, float]) -> None:
    slice_s = linear_slice_time(*a)
    best = min(terapipe_s(cut, stages, slice_s) for cut in all_cuts(10))
    assert terapipe_s(cut_sequence(10, stages, slice_s, grain=1), stages, slice_s) == pytest.approx(best)


@pytest.mark.parametrize("slices", [1, 2, 4, 10])
@pytest.mark.parametrize("a", [(0.0, 1.0, 0.0, 0.1), (2.0, 1.0, 0.1, 0.3), (0.5, 0.2, 0.3, 0.05)])
def test_so_many_slices_are_the_best_of_all_that_are_so_many(slices: int, a: tuple[float, float, float, float]) -> None:
    slice_s = linear_slice_time(*a)
    best = min(terapipe_s(cut, 3, slice_s) for cut in all_cuts(10) if len(cut) == slices)
    found = cut_sequence(10, 3, slice_s, grain=1, slices=slices)
    assert len(found) == slices
    assert terapipe_s(found, 3, slice_s) == pytest.approx(best)
    uneven = cut_sequence(10, 3, slice_s, grain=4)  # 4, 8 and the end are places
    assert sum(uneven) == 10


def test_a_long_sequence_is_cut_into_shorter_and_shorter_slices() -> None:
    cut = cut_sequence(2048, 48, linear_slice_time(2.0, 0.02, 0.0, 1e-5), grain=8)
    assert sum(cut) == 2048
    assert cut[0] > cut[-2]


@pytest.mark.parametrize("layers", [1, 8, 32])
def test_zero_3_sends_one_and_a_half_times_as_much(layers: int) -> None:
    """Rajbhandari et al. 2020: gathers forward and backward and a scatter-sum, each once over the parameters, where an
    all-reduce is two. The last layer is still whole when its backward pass comes: one gather less."""
    whole = exchange(gather(build("breadth-first", 1, 1, per_rank=layers), ahead=0), reduce="step")
    kinds = [action.kind for action in whole.actions[0]]
    assert kinds.count("REDUCE") == layers
    assert kinds.count("GATHER") == 2 * layers - 1
    sent, all_reduce = kinds.count("GATHER") + kinds.count("REDUCE"), 2 * layers
    assert sent / all_reduce == pytest.approx(1.5, abs=0.5 / layers)


def test_zero_states_of_7_5_billion_parameters() -> None:
    """16, 4 + 12/N, 2 + 14/N and 16/N bytes per parameter at N = 64, as they lie after the sum of gradients."""
    parameters, n = 7.5e9, 64
    held = {0: (2, 2, 12), 1: (2, 2, 12 / n), 2: (2, 2 / n, 12 / n), 3: (2 / n, 2 / n, 12 / n)}
    expected = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.88}
    for stage, (weights, reduced, states) in held.items():
        sizes = StepBytes(gradients=[2 * parameters], reduced=[reduced * parameters], states=[states * parameters])
        program = build("1f1b", 1, 2)
        whole = exchange(gather(program) if stage == 3 else program, reduce="step", update=True)
        words = [str(action) for action in whole.actions[0]]
        after_sum = memory_curve(whole, sizes)[0][words.index("0REDUCE_GRAD") + 1] + weights * parameters
        assert after_sum / 1e9 == pytest.approx(expected[stage], rel=3e-3)
