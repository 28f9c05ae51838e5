"""The tuner's search on made-up and on recorded timings, and the command lines that need no GPU to refuse."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources

from tilemesh.bench.kernel.matmul import BENCH
from tilemesh.bench.kernel.measure import check_of
from tilemesh.cli.commands.bench.kernel import KernelBenchOptions, kernel
from tilemesh.cli.commands.tune import TuneOptions, tune
from tilemesh.cli.typed import run
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import DEVICES
from tilemesh.kernels import FusedLinear
from tilemesh.kernels.context import Context, use
from tilemesh.kernels.launch import program
from tilemesh.kernels.launch.gpu import Gpu
from tilemesh.kernels.launch.program import Operand, _typed, compile_step
from tilemesh.kernels.launch.steps import FitError
from tilemesh.kernels.matmul import choose, op, trial
from tilemesh.kernels.matmul.arguments import problem_of
from tilemesh.kernels.matmul.config import TILE_KINDS, Config, default, from_dict, space
from tilemesh.kernels.matmul.cost import FORM, predict_s, rates_of
from tilemesh.kernels.matmul.plan import tiles_plan
from tilemesh.kernels.matmul.problem import Matrix, dense
from tilemesh.kernels.matmul.select import TABLES
from tilemesh.kernels.matmul.trial import make_inputs
from tilemesh.kernels.matmul.tuning import SHORTLIST, TUNING
from tilemesh.kernels.tuning import compiler, search, tuner
from tilemesh.kernels.tuning.table import TunedEntry, TunedTable, versions
from tilemesh.kernels.tuning.trial import ConfigTrial
from tilemesh.measure.sample import Sample

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "matmul_grid_h200_float16.jsonl"
PROBLEM = dense(2048, 2048, 2048)
RATES = rates_of(DEVICES["h200"], "float16")
GRID = space(PROBLEM)


def predicted(config: Config) -> float:
    return predict_s(PROBLEM, config, RATES)


def crooked(config: Config) -> float:
    """A truth the cost model does not know: it likes one stage count, and one kind less than predicted."""
    wrong = (
        1
        + 0.1 * abs(config.stages - 4)
        + 0.3 * (config.kind == "persistent")
        + 0.05 * abs(math.log2(config.block_k / 128))
    )
    return predicted(config) * wrong


def searched(grid, measure, budget):
    return search.search(grid, predicted, measure, budget, TUNING.features)


def test_search_is_bounded_without_repeats_and_the_same_each_time():
    def run():
        return searched(GRID, lambda batch: [crooked(config) for config in batch], len(GRID) // 4)

    trials = run()
    assert len(trials) == len(GRID) // 4 == len({trial.config for trial in trials})
    assert trials == run()


def test_search_learns_where_the_model_is_wrong():
    trials = searched(GRID, lambda batch: [crooked(config) for config in batch], len(GRID) // 4)
    assert search.best(trials).seconds <= 1.02 * min(crooked(config) for config in GRID)


def test_failures_do_not_stop_the_search():
    def half_fail(batch):
        return [math.inf if config.stages == 3 else crooked(config) for config in batch]

    trials = searched(GRID, half_fail, 40)
    assert len(trials) == 40
    assert math.isfinite(search.best(trials).seconds)


def test_small_and_empty_spaces():
    assert searched([], list, 5) == []
    assert len(searched(GRID[:3], lambda batch: [1.0] * len(batch), 50)) == 3
    assert len(searched(GRID, lambda batch: [1.0] * len(batch), 1)) == 1


def test_pruning_keeps_the_best_prediction():
    values = [predicted(config) for config in GRID]
    kept = search.prune(GRID, values)
    assert GRID[values.index(min(values))] in kept
    assert len(kept) < len(GRID)


def test_tune_modes(monkeypatch):
    table = TunedTable("gpu", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with use(Context()) as context:
        for mode, wanted in (("never", False), ("once", True), ("always", True)):
            monkeypatch.setenv("TILEMESH_TUNE", mode)
            assert choose.may_tune(PROBLEM, table) is wanted
            assert choose.may_tune(dense(8, 8, 0), table) is False
            assert choose.may_tune(replace(PROBLEM, keep=True), table) is False
        table.entries[PROBLEM.key] = TunedEntry(Config("library"), 1.0)
        assert choose.may_tune(PROBLEM, table) is True  # always
        context.state("matmul").tuned.add(PROBLEM.key)
        assert choose.may_tune(PROBLEM, table) is False  # but once per process
        context.state("matmul").tuned.clear()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose.may_tune(PROBLEM, table) is False
        monkeypatch.setenv("TILEMESH_TUNE", "once")
        assert choose.may_tune(PROBLEM, table) is False
        monkeypatch.setenv("TILEMESH_TUNE", "sometimes")
        with pytest.raises(UsageError, match="TILEMESH_TUNE"):
            choose.may_tune(PROBLEM, table)


def test_names_mean_configurations_on_a_pretended_h200(monkeypatch, tmp_path):
    gpu = Gpu("NVIDIA H200", (9, 0), 132, 232448)
    monkeypatch.setattr(choose, "gpu_of", lambda index: gpu)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TILEMESH_TUNE", raising=False)
    device = torch.device("cuda", 0)
    shipped = TABLES.shipped("NVIDIA H200").entries
    mine = Config("pointer", 64, 64, 64)
    with use(Context()) as context:
        assert choose.choose(PROBLEM, "auto", None, device) == shipped[PROBLEM.key].config
        TABLES.add("NVIDIA H200", versions(), {PROBLEM.key: TunedEntry(mine, 1e-5)})
        assert choose.choose(PROBLEM, "auto", None, device) == shipped[PROBLEM.key].config  # read once
        context.forget()
        assert choose.choose(PROBLEM, "auto", None, device) == mine
        assert choose.choose(PROBLEM, "split", None, device).kind == "split"
        assert choose.choose(PROBLEM, "library", None, device) == Config("library")
        assert choose.choose(PROBLEM, "auto", Config("tma"), device) == Config("tma")
    given = TunedTable("NVIDIA H200", {}, {PROBLEM.key: TunedEntry(Config("pointer", 128, 64, 64), 1e-5)})
    with use(Context({"matmul": {"NVIDIA H200": given}})) as context:  # instead of what is on disk
        assert choose.choose(PROBLEM, "auto", None, device) == Config("pointer", 128, 64, 64)
        context.forget()
        assert choose.choose(PROBLEM, "auto", None, device) == Config("pointer", 128, 64, 64)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_linear_layers_problem_is_what_the_command_line_tunes_and_measures(dtype):
    kind = getattr(torch, dtype)
    layer, x, d = FusedLinear(24, 40, dtype=kind), torch.empty(16, 24, dtype=kind), torch.empty(16, 40, dtype=kind)
    met = problem_of(x, layer.weight.detach().t(), layer.bias.detach(), d, activation="relu")
    problem = FORM.problem("16x40x24", {"dtype": dtype, "c": "row", "layout": "nt"})
    assert (met.key, met.precision) == (problem.key, problem.precision)


def test_a_gpu_without_figures_gets_the_library(monkeypatch, tmp_path):
    monkeypatch.setattr(choose, "gpu_of", lambda index: Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 101376))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TILEMESH_TUNE", raising=False)
    device = torch.device("cuda", 0)
    with use(Context()):
        for shape in ((512, 512, 512), (64, 4096, 4096), (2049, 2047, 2051), (37, 991, 4000)):
            assert choose.choose(dense(*shape), "auto", None, device) == Config("library")
        assert not choose.choose(PROBLEM, "split", None, device).uses_tma


PLAIN = dense(32, 64, 48)


@pytest.mark.parametrize(
    "problem",
    [
        PLAIN,
        replace(PLAIN, c=Matrix(32, 64, 128, 1)),
        replace(PLAIN, c=Matrix(32, 64, 1, 32)),
        replace(PLAIN, c=Matrix(32, 64, 0, 0)),
        replace(PLAIN, d=Matrix(32, 64, 100, 1)),
        replace(PLAIN, d=Matrix(32, 64, 1, 40)),
        replace(PLAIN, a=Matrix(32, 48, 3, 300)),
        replace(PLAIN, b=Matrix(48, 64, 65, 1, aligned=False)),
        dense(32, 64, 48, c_kind="row"),
        dense(32, 64, 48, c_kind="column"),
    ],
    ids=lambda problem: problem.layout,
)
def test_trial_inputs_lie_as_the_problem_says(problem):
    """A kernel indexes them by the problem's strides: anything else would read or write outside of them."""
    inputs = make_inputs(problem, torch.device("cpu"))
    for tensor, matrix in ((inputs.a, problem.a), (inputs.b, problem.b), (inputs.c, problem.c), (inputs.d, problem.d)):
        assert tuple(tensor.shape) == (matrix.rows, matrix.columns)
        assert tensor.stride() == (matrix.row_stride, matrix.column_stride)
        held = tensor.untyped_storage().nbytes() // tensor.element_size()
        assert tensor.storage_offset() + matrix.reach <= held
        assert (tensor.data_ptr() % 16 == 0) is matrix.aligned


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_the_addmm_peer_activates_in_place(activation, monkeypatch):
    problem = dense(8, 8, 8, dtype="float32", activation=activation)
    product = torch.randn(8, 8)
    monkeypatch.setattr(torch, "addmm", lambda c, a, b: product)
    assert BENCH.calls(problem)["addmm"](*BENCH.arguments(problem, torch.device("cpu"), 0)) is product


@pytest.mark.parametrize("c_kind", ["full", "row", "none"])
def test_a_wrong_last_row_is_seen_by_the_tuner_and_by_the_rows(monkeypatch, c_kind):
    """The last tiles are the ones that masks, a partial wave or a cut along K get wrong."""
    problem = dense(2000, 16, 8, dtype="float32", c_kind=c_kind)
    monkeypatch.setattr(trial, "rotating_sets", lambda make, size: [make(0)])
    monkeypatch.setattr(trial, "KernelTimer", lambda: None)
    timed = trial.MatmulBench(problem, torch.device("cpu"))

    def wrong(a, b, c, d, z):
        d.copy_(torch.relu(a @ b if c is None else a @ b + c))
        d[-1] += 0.5

    monkeypatch.setattr(timed, "runner", lambda config: wrong)
    assert "wrong result" in timed.time(Config("torch")).failure
    inputs = timed.sets[0]
    wrong(inputs.a, inputs.b, inputs.c, inputs.d, None)
    with pytest.raises(RunError, match="ours is wrong"):
        check_of(BENCH, problem, {}, set(), [inputs.given], None).verify("ours", inputs.d, 0)
    inputs.d[-1] -= 0.5
    check_of(BENCH, problem, {}, set(), [inputs.given], None).verify("ours", inputs.d, 0)


def test_tuning_goes_on_where_the_cache_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    gpu = Gpu("NVIDIA H200", (9, 0), 132, 232448)
    monkeypatch.setattr(tuner, "gpu_of", lambda index: gpu)
    monkeypatch.setattr(compiler, "gpu_of", lambda index: gpu)
    found = TunedEntry(Config("library"), 1e-5)
    monkeypatch.setattr(tuner, "_decide", lambda *_: SimpleNamespace(entry=found))
    with pytest.warns(UserWarning, match="could not be remembered"):
        assert tuner.tune_now(TUNING, PROBLEM, torch.device("cuda", 0)) is found


# ---- compiled for a GPU that is not here ---------------------------------------------------------------------------

HOPPER = GPUTarget("cuda", 90, 32)


def compiled(problem, config, target=HOPPER):
    plan = tiles_plan(problem, config, 132)
    operands = {name: Operand(problem.dtype) for name in ("a", "b", "c", "d", "z")}
    operands |= {name: Operand(buffer.dtype) for name, buffer in plan.buffers.items()}
    return [compile_step(step, operands, target) for step in plan.steps]


def test_problems_that_differ_in_sizes_alone_share_a_kernel():
    config = Config("pointer", 16, 32, 32, 1, 2)
    (first,) = compiled(dense(8192, 64, 64), config)
    assert compiled(dense(16, 64, 64), config)[0] is first
    assert compiled(dense(8192, 64, 64, activation="none"), config)[0] is not first
    assert compiled(dense(8192, 64, 64), replace(config, warps=2))[0] is not first


def test_one_persistent_kernel_serves_every_length_of_a_batch():
    config = Config("persistent", 64, 64, 64, 4, 2, tma_epilogue=True)
    (first,) = compiled(dense(512, 64, 64, c_kind="row"), config)
    for length in (8192, 8200, 8193, 77):
        assert compiled(dense(length, 64, 64, c_kind="row"), config)[0] is first
    assert compiled(dense(512, 64, 72, c_kind="row"), config)[0] is not first


def test_split_with_pointer_loads_compiles_for_an_older_gpu():
    problem = dense(64, 64, 4096)
    config = replace(default("split", problem, tma=False), block_n=64, stages=2)
    assert len(compiled(problem, config, GPUTarget("cuda", 80, 32))) == 2


def test_sizes_within_a_tile_of_two_to_the_31_are_64_bit():
    for size, kind in ((2**31 - 1, "i64"), (2**31 - 256, "i64"), (2**30, "i32")):
        step = tiles_plan(dense(size, 1, 2), Config("pointer", 64, 64, 64), 132).steps[0]
        assert _typed(step, "M", {})[0] == kind


def test_a_kernel_too_large_for_the_gpu_is_a_clear_error_and_auto_takes_the_library(monkeypatch):
    class TooLarge:
        @property
        def run(self):
            raise OutOfResources(300000, 232448, "shared memory")

    monkeypatch.setattr(program, "compile_step", lambda step, operands: TooLarge())
    plan = tiles_plan(PROBLEM, Config("tma"), 132)
    operands = {name: Operand("float16") for name in ("a", "b", "c", "d")}
    with pytest.raises(FitError, match="shared memory 300000, this GPU has 232448"):
        program.LaunchProgram(plan, operands, list(operands))
    tried = []

    def prepare(problem, config, device):
        tried.append(config.kind)
        if config.kind != "library":
            raise FitError("too large")
        return "runner"

    monkeypatch.setattr(op, "prepare", prepare)
    monkeypatch.setattr(op, "choose", lambda problem, implementation, config, device: config or Config("tma"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    device = SimpleNamespace(type="cuda")
    assert op.prepare_on(PROBLEM, "auto", None, device) == "runner"
    assert tried == ["tma", "library"]
    for implementation, config in (("tma", None), ("auto", Config("tma"))):
        with pytest.raises(FitError):
            op.prepare_on(PROBLEM, implementation, config, device)


def tune_shapes(shapes: list[str], **options: Any) -> None:
    run(tune, TuneOptions(shapes=tuple(shapes), **options))


def bench(operators: list[str], **options: Any) -> None:
    run(kernel, KernelBenchOptions(operators=tuple(operators), **options))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tune_shapes(["2048x2048"]), "write MxNxK"),
        (lambda: tune_shapes(["8x8x8"], dtype="float8"), "unknown dtype"),
        (lambda: tune_shapes(["8x8x8"], c="rows"), "did you mean 'row'"),
        (lambda: tune_shapes(["8x8x8"], layout="nx"), "unknown layout"),
        (lambda: tune_shapes(["²x1x1"]), "write MxNxK"),
        (lambda: tune_shapes(["1" * 5000 + "x1x1"]), "1…' is not understood"),
        (lambda: tune_shapes(["8x8x8"], dtype="float32"), "only non-empty float16 and bfloat16"),
        (lambda: tune_shapes(["matmul"]), "no shapes to tune matmul for: write MxNxK, as in"),
        (lambda: tune_shapes(["scale_shift"]), "operator 'scale_shift' has nothing to tune; these have: matmul"),
        (lambda: tune_shapes(["scale_shift", "8x8"]), "nothing to tune"),
        (lambda: tune_shapes(["matmull", "8x8x8"]), "did you mean 'matmul'"),
        (lambda: tune_shapes(["8x8x8"], settings=["c"]), "expected NAME=VALUE"),
        (lambda: tune_shapes(["8x8x8"], c="row", settings=["c=full"]), "c is given twice"),
        (lambda: bench(["softmaxx"]), "unknown operator"),
        (lambda: bench(["scale_shift"], shapes=("8x8x8",)), "write ROWSxCOLUMNS, as in 16384x1024"),
        (lambda: bench(["scale_shift"], c="row"), "unknown setting of this operator 'c'"),
        (lambda: bench(["scale_shift"], settings=["activation=tanh"]), "unknown activation 'tanh'"),
        (lambda: bench([], shapes=("8x8",)), "write MxNxK"),
        (lambda: bench([], dtype="float16,int8"), "unknown dtype"),
        (lambda: bench(["softmax", "attention"], settings=["maks=full"]), "'maks': did you mean 'mask'"),
        (lambda: bench([], repeats=0), "repeats is 0: expected"),
        (lambda: bench([], times=("kernal",)), "unknown kind of time 'kernal': did you mean 'kernel'"),
        (lambda: bench([], peers=("eagre",)), "unknown peer 'eagre': did you mean 'eager'"),
        (lambda: bench([], seconds=0.0), "--seconds 0: expected more than 0"),
        (lambda: bench([], chart="roof.gif"), "ends in .svg or .png"),
    ],
)
def test_commands_refuse_what_they_do_not_know(call, words):
    with pytest.raises(UsageError, match=words):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_commands_say_that_they_need_a_gpu():
    with pytest.raises(UsageError, match="GPU"):
        tune_shapes(["8x8x8"])
    with pytest.raises(UsageError, match="GPU"):
        bench([], shapes=("8x8x8",))
    with pytest.raises(UsageError, match="--peers cuDNN: this peer needs a GPU"):
        bench(["attention"], peers=("eager", "cuDNN"))
    with pytest.raises(UsageError, match="'cudnnn': did you mean 'cuDNN'"):
        bench(["attention"], peers=("cudnnn",))


def test_the_claim_holds_on_the_recorded_grids():
    """Within 2 % of the grid's best in at most a quarter of its trials, replayed from every trial made on an H200."""
    recorded: dict[str, dict[Config, float]] = {}
    for text in RECORDED.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["config"]["kind"] in TILE_KINDS:
            seconds = math.inf if line["seconds"] is None else float(line["seconds"])  # infinite: it failed
            recorded.setdefault(line["problem"], {})[from_dict(line["config"])] = seconds
    assert {key.split(" ")[0] for key in recorded} == {"2048x2048x2048", "8192x8192x1024", "64x4096x4096"}
    for key, trials in recorded.items():
        shape, dtype, _, c_kind, activation = key.split(" ")
        m, n, k = (int(side) for side in shape.split("x"))
        problem = dense(m, n, k, dtype=dtype, c_kind=c_kind, activation=activation)
        grid, rates = space(problem), rates_of(DEVICES["h200"], dtype)
        assert set(grid) <= trials.keys()
        found = search.search(
            search.prune(grid, [predict_s(problem, config, rates) for config in grid]),
            partial(predict_s, problem, rates=rates),
            lambda batch, trials=trials: [trials[config] for config in batch],
            len(grid) // tuner.SHARE,
            TUNING.features,
        )
        assert len(found) * 4 <= len(grid)
        assert search.best(found).seconds <= 1.02 * min(trials[config] for config in grid)


def test_tuning_never_ends_with_less_than_auto_had_untuned(monkeypatch):
    """The shipped table was refined beyond the grid: its choice is among the finalists, and wins where it is faster."""
    problem = dense(64, 4096, 4096)
    shipped = TABLES.shipped("NVIDIA H200").entries[problem.key].config
    assert shipped not in space(problem)
    monkeypatch.setattr(tuner, "gpu_of", lambda index: Gpu("NVIDIA H200", (9, 0), 132, 232448))

    class Pretended:
        problem, timer, sets = dense(64, 4096, 4096), None, (0,)

        def __init__(self, problem, device, seed=0):
            pass

        def time(self, config):
            return ConfigTrial(config, predict_s(self.problem, config, RATES))

        def runner(self, config):
            if config.kind == "torch":
                raise FitError("as if it could not be loaded")
            return config

        def wrong(self, runner):
            return "as if it were" if runner == wrong else None

        def call(self, runner):
            return runner

    def pretend(calls, **_):
        return {label: Sample.of([10e-6 if config == fast else 12e-6] * 3) for label, config in calls.items()}

    monkeypatch.setattr(TUNING, "bench", Pretended)
    monkeypatch.setattr(tuner, "compare", pretend)
    wrong = None
    for fast in (shipped, Config("library")):
        nothing = SimpleNamespace(ahead=lambda operator, jobs: {})
        found = tuner.tune(TUNING, problem, torch.device("cuda", 0), compiler=nothing)
        assert found.config == fast
        assert found.tried <= found.grid // 4
        assert {shipped.label, "library"} < set(found.finals)
        assert "torch" not in found.finals
    # Inside a user's program: the best few by the model that was learnt, and what is wrong is not among the finalists.
    monkeypatch.setattr(TUNING.tables, "add", lambda *_: None)
    few = TUNING.shortlist(problem, Gpu("NVIDIA H200", (9, 0), 132, 232448))
    assert len(few) == SHORTLIST
    fast = few[2]
    assert tuner.tune_now(TUNING, problem, torch.device("cuda", 0)).config == fast
    wrong = few[2]
    assert tuner.tune_now(TUNING, problem, torch.device("cuda", 0)).config != fast
