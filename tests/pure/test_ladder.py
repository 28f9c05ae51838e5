"""The matmul ladder: counted reads equal the formulas, and what the interpreter must refuse or find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import find_device
from tilemesh.guide.ladder import rungs, studies, times
from tilemesh.guide.ladder.interpret import launch
from tilemesh.guide.ladder.measured import h200_rows
from tilemesh.guide.ladder.memory import GlobalArray, Lanes, wavefronts
from tilemesh.guide.ladder.ours import our_rungs
from tilemesh.guide.ladder.parse import parse

# Each rung at the smallest sizes that have more than one block, warp and step.
SMALL = [
    (rungs.v1(side=8), 16),
    (rungs.v1_5(v=2, side=8), 32),
    (rungs.v2(v=4, side=8), 64),
    (rungs.v3(v=4, tile=32, s=8), 64),
    (rungs.coalescing(v=4, tile=32, s=8), 64),
    (rungs.padding(v=4, tile=32, s=8), 64),
    (rungs.vector(v=4, tile=32, s=8), 64),
    (rungs.double_buffer(v=4, tile=32, s=8), 64),
    (rungs.tensor_cores(tile=64, s=16, wm=32, wn=16), 128),
    (rungs.half(lm=32, ln=64, s=32, wm=16, wn=32, stages=3), 128),
]


def tolerance(rung, n):
    """Errors are in units of max|a| max|b| sqrt(n): n roundings of the sum and of each operand, all one way."""
    unit = {"fp32": 2**-24, "tf32": 2**-11, "fp16": 2**-11}[rung.units]
    return np.sqrt(n) * (2 * unit + n * 2**-24)


@pytest.mark.parametrize(("rung", "n"), SMALL, ids=lambda value: getattr(value, "key", value))
def test_counted_reads_equal_the_formula(rung, n):
    counted, error = rungs.count(rung, n)
    assert (counted.total(shared=False).elements, counted.total(shared=True).elements) == rung.predicted(n)
    assert error <= tolerance(rung, n)
    assert counted.writes["C"].elements == n * n


def test_the_formulas_are_those_of_the_oracles():
    n = 4096
    expected = {
        "v1": 2 * n**3,
        "v1.5": n**3 // 8 + n**3,
        "v2": 2 * n**3 // 8,
        "v3": 2 * n**3 // 128,
    }
    for rung in rungs.ladder():
        reads, shared = rung.predicted(n)
        assert reads == expected.get(rung.key, expected["v3"])
        if "V" in rung.constants and "L" in rung.constants:
            assert shared == 2 * n**3 // rung.constants["V"]


@settings(max_examples=12, deadline=None)
@given(
    v=st.sampled_from([1, 2, 4]),
    side=st.sampled_from([2, 4]),
    times_tile=st.integers(1, 3),
    kind=st.sampled_from(["v1.5", "v2"]),
)
def test_register_tiles_of_any_size(v, side, times_tile, kind):
    rung = (rungs.v1_5 if kind == "v1.5" else rungs.v2)(v=v, side=side)
    n = v * side * times_tile
    counted, error = rungs.count(rung, n)
    assert counted.total(shared=False).elements == rung.predicted(n)[0]
    assert error <= tolerance(rung, n)


@settings(max_examples=4, deadline=None)
@given(v=st.sampled_from([2, 4]), side=st.sampled_from([4, 8]), s=st.sampled_from([4, 8, 16]), blocks=st.integers(1, 2))
def test_shared_tiles_of_any_size(v, side, s, blocks):
    tile = v * side
    n = tile * blocks * (s // 4)
    if tile * s % (side * side) or n % s:
        return
    rung = rungs.padding(v=v, tile=tile, s=s)
    counted, error = rungs.count(rung, n)
    assert (counted.total(shared=False).elements, counted.total(shared=True).elements) == (
        2 * n**3 // tile,
        2 * n**3 // v,
    )
    assert error <= tolerance(rung, n)


def test_threads_that_cannot_share_a_tile_evenly_are_refused():
    with pytest.raises(UsageError, match="256 threads that fetch 4 elements each cannot share 512"):
        rungs.tensor_cores(tile=64, s=8, wm=32, wn=16)
    with pytest.raises(UsageError, match="N must be a multiple"):
        rungs.v3().grid(100)


def per_request(traffic):
    return traffic.passes / traffic.requests


def test_coalescing_takes_sectors_away_and_padding_bank_conflicts():
    """S as on the GPU; with V = 4 two, not four, of a warp's columns lie in one bank."""
    tiles = {"v": 4, "tile": 64}
    made = (rungs.v3(**tiles), rungs.coalescing(**tiles), rungs.padding(**tiles))
    counted = {rung.key: rungs.count(rung, 64)[0] for rung in made}
    assert per_request(counted["v3"].reads["A"]) == 32
    assert per_request(counted["coalescing"].reads["A"]) == 4
    assert per_request(counted["coalescing"].writes["sA"]) == 16
    assert per_request(counted["padding"].writes["sA"]) == 1
    assert per_request(counted["coalescing"].reads["sB"]) == 2
    assert per_request(counted["padding"].reads["sB"]) == 1


def test_vector_loads_take_a_quarter_of_the_requests():
    before, after = (rungs.count(rung, 64)[0] for rung in (rungs.padding(4, 64), rungs.vector(4, 64)))
    assert before.total(shared=False).requests == 4 * after.total(shared=False).requests
    assert before.total(shared=True).requests == 4 * after.total(shared=True).requests
    assert before.total(shared=False).bytes == after.total(shared=False).bytes


# What goes wrong in a kernel is found ---------------------------------------------------------------------------------


def broken(rung, old, new):
    text = rung.text()
    assert old in text
    n = 2 * rung.tile[0]
    a, b = rungs.operands(rung, n, 0)
    c = np.full((n, n), np.nan, np.float32)
    return lambda: launch(
        text.replace(old, new), "matmul", rung.grid(n), rung.block, {"A": a, "B": b, "C": c, "N": n}
    ), (a, b, c)


@pytest.mark.parametrize("comment", ["the tiles are complete", "all have read them"])
def test_each_missing_barrier_is_a_race(comment):
    rung = rungs.v3(v=4, tile=32, s=8)
    line = next(line for line in rung.text().splitlines() if comment in line)
    run, _ = broken(rung, line, "")
    with pytest.raises(RunError, match=r"race: thread \d+ of block \d+ (reads|writes) s[AB]\[\d+\]\[\d+\]"):
        run()


def test_a_copy_that_nothing_waited_for_gives_a_wrong_result():
    rung = rungs.half(lm=32, ln=64, s=32, wm=16, wn=32, stages=3)
    a, b = rungs.operands(rung, 128, 0)
    c = np.zeros((128, 128), np.float16)
    text = rung.text().replace("wait_copies(STAGES - 2)", "wait_copies(STAGES - 1)")
    given_ = {name: x.view(np.uint16) for name, x in (("A", a), ("B", b), ("C", c))}
    with pytest.raises(RunError, match="race"):
        launch(text, "matmul", rung.grid(128), rung.block, {**given_, "N": 128}, rung.dynamic)


def test_reading_b_from_the_tile_of_a_gives_another_product():
    """The error of a well-known text: `b` read from sA."""
    run, (a, b, c) = broken(rungs.v3(v=4, tile=32, s=8), "b[x] = sB[k]", "b[x] = sA[k]")
    run()
    assert np.abs(c - a @ b).max() > 1


def test_an_index_outside_names_the_thread():
    run, _ = broken(rungs.v1(side=8), "B[k * N + column]", "B[k * N + column + 1]")
    with pytest.raises(RunError, match=r"thread 56 of block 2 touches B\[256\], which has 256 elements"):
        run()


def test_a_barrier_in_a_divergent_branch_is_refused():
    text = 'extern "C" __global__ void f(float* x) { if (threadIdx.x < 3) { __syncthreads(); } }'
    with pytest.raises(UsageError, match="wait for ever"):
        launch(text, "f", (1, 1), (32, 1), {"x": np.zeros(1, np.float32)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int f() { while (1) { } }", "while is not declared|expected"),
        ("int f() { goto end; }", "expected"),
        ("int f() {\n\n  @ }", "line 3"),
        ("class X;", "expected int or"),
    ],
)
def test_what_is_not_in_the_language_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse(text)


def test_an_inner_name_hides_an_outer_one():
    text = 'extern "C" __global__ void f(float* x) { int i = 1; { int i = 2; x[i] = i; } x[i] = i; }'
    x = np.zeros(3, np.float32)
    launch(text, "f", (1, 1), (1, 1), {"x": x})
    assert x.tolist() == [0, 1, 2]


def test_the_right_side_of_and_is_not_read_where_the_left_is_false():
    head = 'extern "C" __global__ void f(float* x, float* y) { int i = threadIdx.x;'
    text = head + " if (i < 2 && x[i] > 0.0f) { y[i] = 1.0f; } }"
    x, y = np.array([1, 0], np.float32), np.zeros(2, np.float32)
    counted = launch(text, "f", (1, 1), (32, 1), {"x": x, "y": y})
    assert counted.reads["x"].elements == 2
    assert y.tolist() == [1, 0]


def test_loops_of_different_length_leave_lanes_idle():
    loop = "for (int i = 0; i < threadIdx.x; ++i) { s += 1.0f; }"
    text = 'extern "C" __global__ void f(float* x) { float s = 0.0f;' + loop + " x[threadIdx.x] = s; }"
    x = np.zeros(32, np.float32)
    counted = launch(text, "f", (1, 1), (32, 1), {"x": x})
    assert x.tolist() == list(range(32))
    assert counted.lanes_used < 0.6


# Memory ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 200), min_size=32, max_size=32), st.lists(st.booleans(), min_size=32, max_size=32))
def test_wavefronts_equal_a_plain_count(words, mask):
    """By a dictionary: for each bank the different words that are asked of it."""
    banks: dict[int, set[int]] = {}
    for word, taking_part in zip(words, mask, strict=True):
        if taking_part:
            banks.setdefault(word % 32, set()).add(word)
    expected = max((len(asked) for asked in banks.values()), default=0)
    assert wavefronts(np.array(words) * 4, np.array(mask), 4).tolist() == [expected]


@given(st.lists(st.integers(0, 255), min_size=32, max_size=32))
def test_sectors_equal_a_plain_count(places):
    array = GlobalArray("x", np.zeros(256, np.float32), Lanes((1, 1), (32, 1)))
    array.load(np.array(places), np.ones(32, bool))
    assert array.read.passes == len({place * 4 // 32 for place in places})
    assert array.read.lines == len({place * 4 // 128 for place in places})


# Studies --------------------------------------------------------------------------------------------------------------


def test_the_first_kernel_has_72_threads_in_6_blocks():
    counted = studies.first_kernel()
    assert counted.total(shared=False).elements == 2 * 72
    assert counted.stored(shared=False).elements == 72
    assert counted.writes["C"].requests == 6  # a warp for each block, in which 12 of 32 lanes work
    assert counted.lanes_used == 12 / 32


def test_a_grid_that_is_too_large_is_cut_by_the_condition():
    counted = studies.first_kernel(width=13, height=5, block=(8, 4))
    assert counted.stored(shared=False).elements == 65


def test_the_convolution_reads_384_or_130_elements_for_each_block():
    for shared, reads in ((False, 384), (True, 130)):
        kernel = studies.convolution(shared=shared, blocks=3)
        values = np.random.default_rng(0).standard_normal(kernel.inputs).astype(np.float32)
        counted, output = kernel.run(values)
        assert counted.total(shared=False).elements == 3 * reads
        np.testing.assert_allclose(output, np.convolve(values, np.ones(3), "valid") / 3, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("paths", "run"), [(1, 1), (2, 1), (4, 1), (32, 1), (2, 16), (2, 32), (4, 32)])
def test_a_warp_runs_every_path_that_one_of_its_lanes_takes(paths, run):
    kernel = studies.divergence(paths, run, steps=200)
    counted, _ = kernel.run(np.ones(kernel.inputs, np.float32))
    assert counted.lanes_used == pytest.approx(1 / studies.paths_in_warp(paths, run), abs=0.1)


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 16, 32])
def test_strides_and_sectors(stride):
    kernel = studies.strided_copy(stride)
    values = np.arange(kernel.inputs, dtype=np.float32)
    counted, output = kernel.run(values)
    assert sorted(output) == values.tolist()
    assert per_request(counted.reads["input"]) == studies.sectors_per_request(stride)


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8, 16, 17, 32, 33])
def test_strides_and_banks(stride):
    counted, _ = studies.strided_banks(stride).run(np.zeros(32 * stride, np.float32))
    assert per_request(counted.reads["words"]) == studies.passes_per_request(stride)


def test_occupancy_names_the_resource_that_runs_out():
    h200 = find_device("h200")
    assert studies.occupancy(h200, 256, 32, 0).share == 1
    tight = studies.occupancy(h200, 256, 128, 16384)
    assert (tight.blocks, tight.limited_by) == (2, "registers")
    assert studies.occupancy(h200, 256, 214, 108544) == studies.Occupancy(1, 8, 64, "registers")
    assert studies.occupancy(h200, 128, 32, 100_000).limited_by == "shared memory"
    assert studies.occupancy(h200, 32, 16, 0).limited_by == "blocks"


def test_blocks_go_to_the_slot_that_is_free_first():
    assert studies.scheduled([3, 1, 1, 1], 2) == [(0, 0, 3), (1, 0, 1), (1, 1, 2), (1, 2, 3)]


def test_predicted_times_name_what_binds():
    h200 = find_device("h200")
    first, conflicting, padded = rungs.v1(), rungs.coalescing(4, 64), rungs.padding(4, 64)
    assert times.predicted_time(first, 4096, h200).bound_by == "L1 and shared memory"
    before, after = (times.predicted_time(rung, 4096, h200).loads_s for rung in (conflicting, padded))
    assert after < before / 1.3
    assert times.intensity(first, 4096) == 0.25
    assert times.intensity(padded, 4096) == 16


def test_the_guides_rows_are_the_committed_ones():
    root = Path(__file__).parents[2]
    committed = root / "benchmarks" / "results" / "ladder_h200.jsonl"
    assert (root / "src/tilemesh/guide/ladder/h200.jsonl").read_text() == committed.read_text()
    for rung, row in zip(rungs.ladder(), h200_rows(), strict=False):
        assert (row.case["global_reads"], row.case["shared_reads"]) == rung.predicted(4096)
    last = h200_rows()[-1]
    assert last.case["rung"] == our_rungs()[-1].key
    assert last.speedup["torch"] > 0.95
