"""The locality studies: counted reads equal the formulas, strides equal numpy's, the simulated cache a plain one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.c_library import compiler
from tilemesh.core.errors import RunError, UsageError
from tilemesh.guide.locality import build, caches, measured, traffic
from tilemesh.guide.locality.strides import StridedView, row_major


def sizes_of(nest, n, b1, b2, v1, v2):
    every = {"N": n, "B1": b1, "B2": b2, "V1": v1, "V2": v2}
    return {name: value for name, value in every.items() if name == "N" or name in build.source(nest.file)}


@pytest.mark.parametrize("nest", traffic.NESTS, ids=lambda nest: nest.key)
@settings(max_examples=3, deadline=None)
@given(st.data())
def test_counted_reads_equal_the_formulas(nest, data):
    v1, v2 = (data.draw(st.sampled_from([1, 2, 3])) for _ in range(2))
    b1, b2 = (v * data.draw(st.sampled_from([1, 2])) for v in (v1, v2))
    n = int(np.lcm(b1, b2))
    n *= max(1, 8 // n)
    sizes = sizes_of(nest, n, b1, b2, v1, v2)
    counted = traffic.count(nest, sizes)
    assert counted.total(shared=False).elements == nest.memory_reads(sizes)
    assert counted.total(shared=True).elements == nest.buffer_reads(sizes)
    assert counted.writes["C"].elements == (n**3 if nest.key == "ikj" else n**2)


def test_the_formulas_are_those_of_the_oracles():
    n, b1, v1, v2 = 64, 16, 4, 8
    sizes = {"N": n, "B1": b1, "B2": 16, "V1": v1, "V2": v2}
    reads = {nest.key: (nest.memory_reads(sizes), nest.buffer_reads(sizes)) for nest in traffic.NESTS}
    assert reads["cache_tiles"][0] == n**2 + n**3 // b1
    assert reads["register_tiles"][0] == n**3 // v2 + n**3 // v1
    assert reads["both_tiles"] == (n**2 + n**3 // b1, n**3 // v2 + n**3 // v1)


def test_a_tile_that_does_not_divide_is_refused():
    with pytest.raises(UsageError, match="B1 = 5: expected a divisor of N = 16"):
        traffic.nest_of("cache_tiles").text({"N": 16, "B1": 5, "B2": 4})


def test_columns_miss_where_rows_hit():
    """16 lines of 4 floats, matrices of 16 x 16: a column of B needs all of them, and the row of A besides."""
    cache = {"size_bytes": 256, "line_bytes": 16}
    down = traffic.misses(traffic.nest_of("ijk"), {"N": 16}, caches.SimulatedCache(**cache))
    along = traffic.misses(traffic.nest_of("ikj"), {"N": 16}, caches.SimulatedCache(**cache))
    assert down > 16**3  # every element of B, as its line is gone before its neighbour is read
    # ikj: each line of B once for each i; a row of A and of C stays
    assert along == 16**3 // 4 + 2 * 16**2 // 4


@given(
    st.lists(st.integers(0, 600), max_size=200),
    st.sampled_from([(64, 16, 0), (128, 16, 2), (256, 32, 1)]),
)
def test_the_simulated_cache_equals_a_plain_one(addresses, kind):
    size, line, ways = kind
    cache = caches.SimulatedCache(size, line, ways).run(addresses)
    per_set = ways or size // line
    sets = size // line // per_set
    held = [[] for _ in range(sets)]
    misses = 0
    for address in addresses:
        wanted = address // line
        lines = held[wanted % sets]
        if wanted in lines:
            lines.remove(wanted)
        else:
            misses += 1
        lines.append(wanted)
        del lines[:-per_set]
    assert (cache.misses, cache.hits) == (misses, len(addresses) - misses)


def test_cache_sizes_are_read_from_the_system(tmp_path: Path):
    for index, (kind, level, size) in enumerate([("Data", 1, "48K"), ("Instruction", 1, "32K"), ("Unified", 2, "2M")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in (("type", kind), ("level", level), ("size", size)):
            (folder / name).write_text(f"{value}\n")
    assert caches.cache_sizes(tmp_path) == {"L1d": 48 * 1024, "L2": 2 * 1024**2}
    assert caches.cache_sizes(tmp_path / "nothing") == {}


def test_fusing_three_loops_raises_the_intensity_from_a_third_to_three_fifths():
    assert traffic.intensity("three_loops", 5) == (15, 45)
    assert traffic.intensity("fused", 5) == (15, 25)


def test_vectors_of_four_need_a_quarter_of_the_turns():
    assert (traffic.turns("one_by_one", 256), traffic.turns("four_by_four", 256)) == (256, 64)


@pytest.mark.parametrize("tile", [1, 2, 4])
def test_reads_of_the_convolution(tile):
    for function in ("plain", "tiled"):
        assert traffic.convolution_reads(function, 8, 4, tile) == traffic.convolution_formula(function, 8, 4, tile)


# Compiled -------------------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler")


@needs_compiler
@pytest.mark.parametrize("nest", traffic.NESTS, ids=lambda nest: nest.key)
def test_the_same_text_compiled_computes_the_product(nest):
    sizes = sizes_of(nest, 48, 12, 8, 4, 4)
    a, b, c, product = traffic.operands(48, nest.turned)
    nest.function(sizes)(a, b, c)
    np.testing.assert_allclose(c, product, atol=1e-4)


@needs_compiler
def test_a_text_that_does_not_compile_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RunError, match="could not compile"):
        build.library("int f(void) { return nothing; }")
    assert list((tmp_path / "tilemesh" / "guide").iterdir()) == []


def test_without_a_compiler_there_is_no_library(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert compiler() is None
    assert build.library("int f(void) { return 1; }") is None
    assert traffic.nest_of("ijk").function({"N": 4}) is None


# Strides --------------------------------------------------------------------------------------------------------------


def test_the_slice_of_the_exercise():
    view = StridedView.of(range(20), (4, 5)).slice(range(1, 4), range(2, 4))
    assert (view.offset, view.shape, view.strides) == (7, (3, 2), (5, 1))
    assert list(view) == [7, 8, 12, 13, 17, 18]
    assert not view.contiguous
    assert view.copied().strides == (2, 1)


def test_transposing_swaps_strides_and_broadcasting_sets_them_to_zero():
    matrix = StridedView.of(range(12), (3, 4))
    turned = matrix.permute(1, 0)
    assert (turned.shape, turned.strides) == ((4, 3), (1, 4))  # (1, n), not (1, m)
    assert StridedView.of(range(3), (1, 3)).broadcast(4, 3).strides == (0, 1)
    assert StridedView.of(range(3), (3,)).broadcast(4, 3).strides == (0, 1)
    assert row_major((2, 3, 4)) == (12, 4, 1)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_views_equal_numpys(shape, data):
    array = np.arange(int(np.prod(shape)))
    view, array = StridedView.of(array.tolist(), tuple(shape)), array.reshape(shape)
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["slice", "permute", "broadcast"]))
        if kind == "slice":
            starts = [data.draw(st.integers(0, length - 1)) for length in view.shape]
            steps = [data.draw(st.integers(1, 2)) for _ in view.shape]
            ranges = [range(start, length, step) for start, length, step in zip(starts, view.shape, steps, strict=True)]
            view = view.slice(*ranges)
            array = array[tuple(slice(chosen.start, chosen.stop, chosen.step) for chosen in ranges)]
        elif kind == "permute":
            dims = data.draw(st.permutations(range(len(view.shape))))
            view, array = view.permute(*dims), array.transpose(dims)
        elif len(view.shape) < 4:
            view, array = view.broadcast(2, *view.shape), np.broadcast_to(array, (2, *view.shape))
    assert list(view) == array.reshape(-1).tolist()
    assert view.contiguous == array.flags.c_contiguous


@pytest.mark.parametrize(
    "wrong",
    [
        lambda view: view.slice(range(5), range(1)),
        lambda view: view.permute(0, 0),
        lambda view: view.broadcast(2),
        lambda view: view.broadcast(3, 5),
        lambda view: view[4, 0],
        lambda view: StridedView.of([1, 2], (3,)),
    ],
)
def test_wrong_views_are_refused(wrong):
    with pytest.raises(UsageError):
        wrong(StridedView.of(range(20), (4, 5)))


def test_the_guides_rows_are_the_committed_ones():
    root = Path(__file__).parents[2]
    committed = root / "benchmarks" / "results" / "locality-neoverse-n1-2c.jsonl"
    assert (root / "src/tilemesh/guide/locality/neoverse_n1.jsonl").read_text() == committed.read_text()


def test_without_a_compiler_numpy_runs_the_loops(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    for nest in traffic.NESTS:
        a, b, c, product = traffic.operands(16, nest.turned)
        measured.IN_NUMPY[nest.key](a, b, c, tiles=measured.TILES)
        np.testing.assert_allclose(c, product, atol=1e-4)
    assert measured.tile_map(16, (8, 16)) is None
    assert measured.sharing_times() == measured.thread_times((1,)) == measured.openmp_times((1,)) == {}
    assert set(measured.fused_times(64)) == {"three_loops", "fused"}
