"""Configurations, the search space, launch plans and `auto`'s choice: all without torch."""

from __future__ import annotations

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import DEVICES
from tilemesh.kernels.launch.steps import Descriptor, FitError, Pointer
from tilemesh.kernels.matmul import select
from tilemesh.kernels.matmul.config import (
    KINDS,
    TILE_KINDS,
    Config,
    check,
    decode,
    default,
    encode,
    from_dict,
    libraries,
    refusal,
    space,
    to_dict,
)
from tilemesh.kernels.matmul.cost import rates_of
from tilemesh.kernels.matmul.padded import padded_plan
from tilemesh.kernels.matmul.plan import tiles_plan
from tilemesh.kernels.matmul.problem import LAYOUTS, Matrix, Problem, contiguous, dense
from tilemesh.kernels.matmul.select import TABLES, GpuFeatures
from tilemesh.kernels.tuning.table import TunedEntry, TunedTable

OLDER = GpuFeatures(tma=False, hopper=False)
RATES = rates_of(DEVICES["h200"], "float16")
SHAPES = [(512, 512, 512), (2048, 2048, 2048), (64, 4096, 4096), (16, 8192, 8192), (2049, 2047, 2051), (1, 1, 1)]


def test_config_survives_a_round_trip_and_stays_short():
    config = Config("persistent", 128, 256, 64, 8, 3, subtile=2)
    assert from_dict(to_dict(config)) == config
    full = Config("persistent", 64, 64, 32, 4, 5, 16, 2, 2, True, tail=True, copy="ab", flatten=False)
    assert decode(encode(full)) == full
    assert decode(encode(config)) == config
    assert to_dict(Config("library")) == {"kind": "library"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "persistant"}, "did you mean 'persistent'"),
        ({"kind": "tma", "blok_m": 64}, "unknown config field 'blok_m'"),
        ({"block_m": 64}, "expected a kind"),
        ({"kind": "tma", "block_m": 96}, "power of two"),
        ({"kind": "tma", "stages": 0}, "at least 1"),
        ({"kind": "tma", "copy": "c"}, "copy"),
        ({"kind": "tma", "block_m": "128"}, "block_m='128': expected a whole number"),
        ({"kind": "tma", "block_n": 128.0}, "whole number"),
        ({"kind": "split", "split_k": 2.5}, "whole number"),
        ({"kind": "tma", "stages": True}, "whole number"),
        ({"kind": "split", "chained": "yes"}, "chained='yes': expected True or False"),
    ],
)
def test_bad_configs_say_what_is_wrong(values, words):
    with pytest.raises(UsageError, match=words):
        from_dict(values)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config("tma", 256, 256, 64, 8), "registers"),
        (Config("tma", 128, 256, 128, 8, 5), "shared memory"),
        (Config("tma", 8, 128, 64), "at least 16"),
        (Config("tma", 128, 32, 64, subtile=4), "subtile"),
        (Config("split", split_k=1), "split_k"),
        (Config("tma", split_k=4), "does not use split_k"),
        (Config("pointer", tail=True, split_k=2), "tail"),
        (Config("pointer", c_early=True), "c_early"),
        (Config("tma", specialize=True), "specialize"),
        (Config("pointer", 16, 16, 16, warps=64), "at most 32"),
        (Config("split", 16, 16, 16, split_k=65536), "65535"),
        (Config("library", padded=True), "not aligned"),
        (Config("tma", padded=True), "kind library"),
        (Config("torch", padded=True), "kind library"),
    ],
)
def test_refusals_come_before_any_launch(config, words):
    assert words in (refusal(config, dense(512, 512, 512)) or "")
    with pytest.raises(UsageError, match="cannot compute"):
        check(config, dense(512, 512, 512))


def test_float64_is_left_to_torch():
    assert "torch" in (refusal(Config("tma"), dense(8, 8, 8, dtype="float64")) or "")
    assert refusal(Config("torch"), dense(8, 8, 8, dtype="float64")) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_space_is_runnable_fixed_and_free_of_repeats(shape):
    problem = dense(*shape)
    grid = space(problem)
    assert grid
    assert grid == space(problem)
    assert len(set(grid)) == len(grid)
    assert all(refusal(config, problem) is None for config in grid)
    smaller = space(problem, shared_limit=100 * 1024)
    assert set(smaller) <= set(grid)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_kind_has_a_default_that_runs(shape, kind, dtype):
    problem = dense(*shape, dtype=dtype)
    reason = refusal(default(kind, problem), problem)
    if kind == "pingpong" and (dtype == "float32" or shape[1] % 8):
        assert reason is not None
        assert "float16" in reason or "aligned rows" in reason
    else:
        assert reason is None


def test_labels_tell_configurations_of_a_grid_apart():
    grid = space(dense(2048, 2048, 2048))
    assert len({config.label for config in grid}) == len(grid)


# ---- plans -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(100, 136, 70), (1, 8, 16), (257, 513, 65)])
@pytest.mark.parametrize("kind", TILE_KINDS)
def test_plan_covers_every_tile_and_names_only_what_exists(shape, kind):
    problem = dense(*shape)
    config = default(kind, problem)
    if refusal(config, problem):
        pytest.skip("this kind needs aligned rows")
    plan = tiles_plan(problem, config, 4)
    known = {"a", "b", "c", "d", "z", *plan.buffers}
    for step in plan.steps:
        for argument in step.arguments.values():
            if isinstance(argument, Pointer | Descriptor):
                assert argument.of in known
            if isinstance(argument, Descriptor):
                assert argument.strides[1] == 1
                assert argument.strides[0] * 2 % 16 == 0
    tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n)
    main = next(step for step in plan.steps if "tiles" in step.function)
    covered = main.arguments["tiles"] if kind in ("persistent", "pingpong") else main.grid[0]
    assert covered == tiles


def test_unaligned_operands_are_copied_and_aligned_ones_are_not():
    kernels = [step.function for step in tiles_plan(dense(100, 100, 101), Config("tma"), 4).steps]
    assert kernels == ["copy_pass", "tma_tiles"]  # rows of 101 and of 100 elements, in one launch
    assert [step.function for step in tiles_plan(dense(100, 104, 104), Config("tma"), 4).steps] == ["tma_tiles"]
    forced = tiles_plan(dense(100, 104, 104), Config("tma", copy="a"), 4)
    assert list(forced.buffers) == ["a_copy"]


def test_the_library_gets_whole_groups_of_16_bytes():
    plan = padded_plan(dense(2049, 2047, 2051))
    sizes = [(view.matrix.rows, view.matrix.columns) for view in (plan.a, plan.b, plan.out)]
    assert sizes == [(2049, 2056), (2056, 2048), (2049, 2048)]
    assert all(view.matrix.tma(2) for view in (plan.a, plan.b, plan.out))
    # Only what is read slowly is copied: here K is whole, so A stays; B has odd rows.
    one = padded_plan(dense(64, 63, 64))
    assert (one.a.of, one.b.of) == ("a", "b_copy")
    turned = padded_plan(dense(131, 64, 64, layout="tn"))
    assert (turned.a.of, turned.a.matrix.rows, turned.b.of) == ("a_copy", 136, "b")


def test_mixed_alignment_keeps_neighbours_together():
    """The epilogue pass: wide accesses where every matrix allows them, single elements where one does not."""
    assert not padded_plan(dense(64, 63, 64)).after.steps[0].hints
    assert padded_plan(dense(64, 64, 63)).after.steps[0].hints


def test_padding_is_offered_and_chosen_only_where_it_helps():
    for shape in SHAPES:
        problem = dense(*shape)
        offered = {config.label for config in libraries(problem)}
        assert ("library padded" in offered) == (problem.n % 8 > 0 or problem.k % 8 > 0)
        assert {config for config in libraries(problem) if config.padded} <= set(space(problem))


def test_tail_cuts_only_the_last_wave():
    config = Config("persistent", 64, 64, 64, split_k=3, tail=True)
    main, cut, last = tiles_plan(dense(64 * 3, 64 * 5, 256), config, 4).steps
    assert main.arguments["tiles"] == 12
    assert cut.grid == (3, 3)
    assert cut.arguments["tile0"] == 12
    assert last.function == "reduce_tiles"
    assert last.grid[0] == 3
    assert len(tiles_plan(dense(64 * 4, 64 * 5, 256), config, 4).steps) == 1  # whole waves: nothing to cut


def test_large_tensors_get_wide_strides():
    assert dense(65536, 32768, 16).wide
    assert not dense(4096, 4096, 4096).wide
    assert all(step.wide for step in tiles_plan(dense(65536, 32769, 16), Config("pointer"), 132).steps)


def test_the_aligned_copy_has_its_own_width():
    """Rows of 17 become rows of 64: the copy passes 2**31 elements where its source does not."""
    problem = dense(2**25 + 128, 32, 17)
    assert not problem.wide
    plan = tiles_plan(problem, Config("tma", 128, 128, 64, 8, 3), 132)
    copy = plan.steps[0]
    assert copy.arguments["source"] == Pointer("a")
    assert plan.buffers["a_copy"].elements >= 2**31
    assert copy.wide
    small = tiles_plan(dense(2**20, 32, 17), Config("tma", 128, 128, 64, 8, 3), 132)
    assert not any(step.wide for step in small.steps)


@pytest.mark.parametrize(
    ("matrix", "fits"),
    [
        (contiguous(4, 8), True),
        (contiguous(4, 9), False),
        (Matrix(4, 8, 8, 1, aligned=False), False),
        (Matrix(8, 4, 1, 8), True),
        (Matrix(4, 8, 16, 2), False),
        (Matrix(4, 8, 0, 1), False),
        (contiguous(0, 8), False),
    ],
)
def test_what_tma_can_read(matrix, fits):
    assert matrix.tma(2) is fits


def test_layouts_of_all_four_matrices_are_in_the_key():
    plain = dense(64, 64, 64)
    assert plain.layout == "nn"
    assert [dense(64, 64, 64, layout=word).layout for word in LAYOUTS] == list(LAYOUTS)
    assert dense(64, 64, 63).layout == dense(63, 63, 63).layout == "nnu"
    assert dense(63, 63, 63, layout="nt").layout == "ntu"
    assert [dense(64, 64, 64, c_kind=kind).layout for kind in ("none", "row", "column")] == ["nn"] * 3
    turned, padded, scattered = Matrix(64, 64, 1, 64), Matrix(64, 64, 67, 1), Matrix(64, 64, 128, 2)
    assert [dataclasses.replace(plain, c=c).layout for c in (turned, padded, scattered)] == ["nn-ct", "nn-cp", "nn-cs"]
    assert dataclasses.replace(plain, d=turned).layout == "nn-dt"
    assert dataclasses.replace(plain, a=scattered).layout == "snu"
    assert dataclasses.replace(plain, c=Matrix(64, 64, 128, 1)).key == plain.key  # longer rows, as fast
    assert dense(1, 64, 64).layout == dense(64, 1, 64, layout="nt").layout.replace("t", "n") == "nn"


def test_split_without_tma_uses_nothing_of_hopper():
    config = default("split", dense(64, 64, 4096), tma=False)
    assert not config.uses_tma
    assert not any(step.early or step.constants["EARLY"] for step in tiles_plan(dense(64, 64, 4096), config, 108).steps)
    assert default("split", dense(64, 64, 4096)).uses_tma


def test_within_a_call_each_kernel_is_launched_early_but_the_first():
    alone = tiles_plan(dense(256, 256, 256), Config("tma"), 4).steps
    assert [(step.early, step.constants["EARLY"]) for step in alone] == [(False, False)]
    config = Config("persistent", 64, 64, 64, split_k=3, tail=True, copy="ab")
    steps = tiles_plan(dense(64 * 3, 64 * 5, 256), config, 4).steps
    assert [step.early for step in steps] == [False, True, True, True]
    assert all(step.constants["EARLY"] for step in steps)
    # Only the cut tiles do not wait at once: the kernel ahead of them writes nothing that they read.
    assert [bool(step.constants.get("FOLLOWS")) for step in steps] == [False, False, True, False]
    for off in (dataclasses.replace(config, chained=False), config):
        steps = tiles_plan(dense(64 * 3, 64 * 5, 256), off, 4, interpreted=off is config).steps
        assert not any(step.early or step.constants["EARLY"] or step.constants.get("FOLLOWS") for step in steps)


# ---- choosing --------------------------------------------------------------------------------------------------


def table(*pairs: tuple[Problem, Config]) -> TunedTable:
    return TunedTable("gpu", {}, {problem.key: TunedEntry(config, 1e-5) for problem, config in pairs})


def test_exact_entries_win_and_the_users_come_first():
    problem = dense(512, 512, 512)
    mine, theirs = Config("pointer", 64, 64, 64), Config("tma", 64, 64, 64)
    assert select.choose(problem, [table((problem, mine)), table((problem, theirs))], RATES) == mine
    assert select.choose(problem, [table(), table((problem, theirs))], RATES) == theirs


def test_a_near_shape_speaks_for_another_but_not_across_alignment():
    known = Config("tma", 64, 64, 64)
    tables = [table((dense(512, 512, 512), known))]
    assert select.choose(dense(512, 640, 512), tables, RATES) == known
    assert select.choose(dense(512, 512, 512, dtype="bfloat16", c_kind="row"), tables, RATES) == known
    assert select.nearest(dense(512, 513, 511), tables[0].entries.items()) is None
    assert select.nearest(dense(8192, 8192, 512), tables[0].entries.items()) is None
    assert select.nearest(dense(16, 512, 512), tables[0].entries.items()) is None


def test_pingpong_is_chosen_only_on_the_generation_it_is_written_for():
    problem, tiles = dense(8192, 8192, 1024), Config("pingpong", 128, 128, 64, 4, 5)
    assert select.choose(problem, [table((problem, tiles))], RATES) == tiles
    assert select.by_model(problem, RATES).kind == "pingpong"
    later = GpuFeatures(hopper=False)
    assert select.choose(problem, [table((problem, tiles))], RATES, None, later).kind not in ("pingpong", "library")
    assert select.nearest(dense(8192, 8192, 1024, activation="gelu"), table((problem, tiles)).entries.items()) == tiles


def test_a_library_that_won_by_its_own_epilogue_speaks_for_no_other():
    """cuBLASLt adds a row bias and applies relu itself; with silu it would need a second pass."""
    tiles = Config("pingpong", 128, 128, 64, 4, 5)
    biased = dense(2048, 2048, 2048, c_kind="row")
    tables = [table((biased, Config("library")), (dense(2048, 2048, 2048), tiles))]
    entries = tables[0].entries.items()
    assert select.nearest(dense(2048, 2048, 2048, c_kind="row", layout="nt"), entries) == Config("library")
    assert select.nearest(dense(2048, 2048, 2048, c_kind="row", activation="silu"), entries) == tiles
    whole = [table((dense(3000, 3000, 3000), Config("library")))]
    assert select.nearest(dense(3000, 3000, 3000, activation="silu"), whole[0].entries.items()) == Config("library")


def test_an_entry_that_cannot_run_here_is_passed_over():
    problem = dense(512, 512, 512)
    big = Config("tma", 128, 256, 64, 8, 4)
    small = GpuFeatures(shared_bytes=64 * 1024)
    assert select.choose(problem, [table((problem, big))], RATES, None, small) != big
    assert select.choose(problem, [table((problem, big))], RATES, None, OLDER).kind in ("pointer", "library")


def test_a_gpu_without_figures_gets_the_library_unless_a_table_speaks():
    problem, mine = dense(4096, 4096, 4096), Config("pointer", 64, 64, 64)
    assert select.choose(problem, [], None, None, OLDER) == Config("library")
    assert select.choose(problem, [table((problem, mine))], None, None, OLDER) == mine
    assert select.choose(dense(8, 8, 8, dtype="float64"), [], None) == Config("torch")


def test_unsure_means_library_and_float64_means_torch():
    assert select.choose(dense(512, 512, 512, dtype="float32"), [], RATES) == Config("library")
    assert select.choose(dense(512, 512, 512, dtype="float64"), [], RATES) == Config("torch")
    assert select.choose(dense(8, 8, 0), [], RATES) == Config("library")


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_is_chosen_runs(shape):
    for c_kind in ("full", "row", "none"):
        problem = dense(*shape, c_kind=c_kind)
        assert refusal(select.choose(problem, [], RATES), problem) is None


# ---- tables on disk --------------------------------------------------------------------------------------------


def test_cache_file_is_readable_and_grows(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    versions = {"torch": "2.11.0", "triton": "3.6.0"}
    first, second = dense(512, 512, 512).key, dense(64, 64, 64).key
    TABLES.add("NVIDIA H200", versions, {first: TunedEntry(Config("tma", 64, 64, 64), 4e-6, 6e-6)})
    path = TABLES.add("NVIDIA H200", versions, {second: TunedEntry(Config("library"), 4e-6)})
    assert path.parent == tmp_path / "tilemesh" / "matmul"
    assert "h200" in path.name
    assert "3.6.0" in path.name
    assert set(TABLES.load("NVIDIA H200", versions).entries) == {first, second}
    assert TABLES.load("NVIDIA H200", {**versions, "triton": "3.7.1"}).entries == {}
    assert not list(path.parent.glob("*.part"))


def test_stores_at_once_all_stay(tmp_path, monkeypatch):
    """From several threads; a lock is per opened file, so it holds between processes as it does here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keys = [dense(8 * side, 8, 8).key for side in range(1, 41)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: TABLES.add("gpu", {}, {key: TunedEntry(Config("library"), 1e-6)}), keys))
    assert set(TABLES.load("gpu", {}).entries) == set(keys)
    assert not list((tmp_path / "tilemesh" / "matmul").glob("*.part"))


def test_what_an_entry_gets_wrong_is_said_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = TABLES.add("gpu", {}, {"8x8x8": TunedEntry(Config("tma"), 1e-6)})
    good = path.read_text()
    bad = [
        good.replace("1e-06", '"x"'),
        good.replace('"tma"', '"tmaa"'),
        good.replace('{"kind": "tma"}', '{"kind": "tma", "blok_m": 64}'),
        good.replace('{"kind": "tma"}', '{"kind": "tma", "block_m": 96}'),
        good.replace('{"kind": "tma"}', '{"kind": "split", "split_k": 2.5}'),
    ]
    for text in bad:
        assert text != good
        path.write_text(text)
        with pytest.raises(UsageError, match=re.escape(str(path))):
            TABLES.load("gpu", {})
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match=re.escape(str(path))):
        TABLES.load("gpu", {})


def test_a_broken_cache_file_is_named():
    for text in ("{", "[" * 100_000, "[]", '{"format": 1}', '{"format": 0, "gpu": "x", "versions": {}, "entries": {}}'):
        with pytest.raises(UsageError, match=r"some/file\.json"):
            TABLES.from_json(text, "some/file.json")


def test_the_shipped_table_fits_its_gpu():
    shipped = TABLES.shipped("NVIDIA H200")
    assert shipped is not None
    assert len(shipped.entries) >= 14
    for key, entry in shipped.entries.items():
        shape, dtype, _, c_kind, activation = key.split(" ")
        m, n, k = (int(side) for side in shape.split("x"))
        problem = dense(m, n, k, dtype=dtype, c_kind=c_kind, activation=activation)
        assert problem.key == key
        assert refusal(entry.config, problem) is None
        assert entry.library_s is None or entry.measured_s <= entry.library_s
    assert TABLES.shipped("Some Other GPU") is None


def test_padding_follows_its_entries_only_to_shapes_like_theirs():
    """As the shipped table and the model have it: other C, activations and layouts yes; aligned or skinny shapes no."""
    shipped = TABLES.shipped("NVIDIA H200")
    assert shipped is not None

    def auto(m, n, k, **given):
        return select.choose(dense(m, n, k, **given), [shipped], RATES)

    padded = Config("library", padded=True)
    others = [
        {"dtype": "bfloat16"}, {"c_kind": "row"}, {"c_kind": "none", "activation": "none"}, {"activation": "gelu"},
        {"layout": "nt"}, {"layout": "nt", "c_kind": "row", "activation": "gelu", "dtype": "bfloat16"}, {"keep": True},
    ]  # fmt: skip
    for shape in ((2049, 2047, 2051), (1001, 1003, 1005), (4097, 4095, 4099)):
        assert all(auto(*shape, **given) == padded for given in [{}, *others]), shape
    for shape in ((2048, 2048, 2048), (1000, 1000, 1000), (4096, 4096, 4104)):
        assert not auto(*shape).padded
    for shape in ((1, 4095, 4099), (17, 4095, 4099), (4097, 17, 4099), (4097, 4095, 17), (33, 33, 33), (1, 1, 1)):
        assert select.nearest(dense(*shape), shipped.entries.items()) is None
        assert not auto(*shape).padded


def test_values_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config("tma").kind = "pointer"  # type: ignore[misc]


def test_a_triton_that_nobody_has_launched_with_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilemesh.kernels.launch import program

    monkeypatch.setattr(program, "_VERSION", (3, 9))
    step = type("Step", (), {"kernel": "module:matmul", "function": "matmul"})()
    with pytest.raises(FitError, match="implementation='torch' works with any"):
        program._Prepared(step, {}, ())
