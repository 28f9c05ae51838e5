"""Training from the first step to the last on ranks that are threads: equal after a stop, on any layout; faults."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tilemesh.bench.train import rank as bench_rank
from tilemesh.comm import connect, run_threads
from tilemesh.core.config import section
from tilemesh.core.energy import EnergyCounter, EnergyMeter
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.shard import Cut, Shard
from tilemesh.data.corpus import open_corpus
from tilemesh.kernels.context import Context, use
from tilemesh.measure.sample import Sample
from tilemesh.measure.table import print_rows
from tilemesh.measure.trace import Trace
from tilemesh.model import huggingface
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.kernels import PLAIN
from tilemesh.model.programs.prepare import prepare
from tilemesh.model.read import read_model
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.gradients import GradientStep, read
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import Held, join, take
from tilemesh.plan.step import predict
from tilemesh.runs import checkpoint
from tilemesh.runs.files import read_object
from tilemesh.runs.folder import new_run, read_config
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.manifest import checkpoints, digest
from tilemesh.runs.metrics import latest
from tilemesh.runs.names import CHECKPOINTS
from tilemesh.runs.reader import Reader, open_checkpoint
from tilemesh.runs.tensors import read_tensors, write_tensors
from tilemesh.serve.write import generate
from tilemesh.train import export, graph, optimizer
from tilemesh.train.config import OptimizerConfig, TrainConfig
from tilemesh.train.graph import StepGraph
from tilemesh.train.job import fit
from tilemesh.train.load import load
from tilemesh.train.loop import Loop
from tilemesh.train.memory import SavedBytes, storage_bytes
from tilemesh.train.optimizer import Optimizer
from tilemesh.train.pace import AHEAD, Pace
from tilemesh.train.plain import gpu_use
from tilemesh.train.rank import earlier_choices, lay_model, train_here
from tilemesh.train.record import Recorder
from tilemesh.train.result import Result
from tilemesh.train.rows import rows
from tilemesh.train.source import Microbatch, Objective, TextSource, next_token
from tilemesh.train.steps import Stepper
from tilemesh.train.summary import _joules_per_step

SMALL = (
    "model.layers=2,model.width=16,model.heads=4,model.kv_heads=2,model.mlp_width=32,model.context=16,"
    "train.steps=10,train.batch=8,checkpoint.every=5,evaluate.every=5,evaluate.sequences=6,sample.tokens=8,"
    "sample.prompt=def,optimizer.warmup=2,optimizer.lr=0.01,train.trace_steps=3"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "".join(f"line {number}: the quick brown fox jumps over {number * 7} dogs\n" for number in range(400))
    )
    return str(path)


def made(text: str, mesh: str = "dp=2,tp=2", *sets: str) -> TrainConfig:
    return load(mesh=mesh, sets=[SMALL, f"data.source={text}", *sets])


def trained(config: TrainConfig, folder: Path, **options: Any) -> tuple[Result, list[str]]:
    """The run on thread ranks, and what rank 0 said."""
    said: list[str] = []
    if not (folder / "config.toml").exists():
        new_run(TRAIN, config.to_toml(), folder)

    def main(comm: Any) -> Result:
        def emit(event: Any) -> None:
            if comm.rank == 0 and event["kind"] == "say":
                said.append(event["text"])

        return train_here(config, folder, comm, emit=emit, **options)

    return run_threads(config.plan.world, main)[0], said


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    reader = Reader(folder / CHECKPOINTS / f"step-{step:08d}")
    return {name: reader.whole(name) for name in reader.names}


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in latest(folder) if line["kind"] == "step"}


@pytest.fixture(scope="module")
def whole(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten steps that never stopped, on two by two."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trained(made(text), folder)
    return folder


class TestResume:
    def test_a_checkpoint_of_more_layers_is_another_models(self, text: str, whole: Path, tmp_path: Path) -> None:
        """One of fewer layers lacks weights; of more, a part would load."""
        shutil.copytree(whole, tmp_path / "run")
        with pytest.raises(
            UsageError, match=r"not the configuration that step 10 .* model\.layers is 2 there and 1 here"
        ):
            trained(made(text, "dp=1,tp=1", "model.layers=1,train.steps=12"), tmp_path / "run", resume=True)

    def test_a_run_that_is_done_stays_what_it_was(self, text: str, whole: Path, tmp_path: Path) -> None:
        shutil.copytree(whole, tmp_path / "run")
        again, said = trained(made(text), tmp_path / "run", resume=True)
        told = read_object(whole / "summary.json")
        assert read_object(tmp_path / "run" / "summary.json") == told
        assert (again.step, again.held_out) == (10, told["held_out"])
        assert "nothing left to do: all 10 steps are done; for more, set train.steps" in said

    def test_stopped_and_resumed_is_never_stopped_bit_for_bit(self, text: str, whole: Path, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        first, _ = trained(made(text), folder, stop_after=4)
        assert first.interrupted
        assert first.step == 4
        second, said = trained(made(text), folder, resume=True)
        assert not second.interrupted
        assert any("going on from step 4" in line for line in said)
        assert losses(folder) == losses(whole)
        ours, theirs = state(folder, 10), state(whole, 10)
        assert ours.keys() == theirs.keys()
        assert len(ours) == 3 * len(list(Transformer(made(text).model, device="meta").named_parameters()))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    @pytest.mark.parametrize("mesh", ["dp=4,tp=1", "dp=1,tp=2", "dp=1,tp=1"])
    def test_another_layout_goes_on_within_rounding(self, text: str, whole: Path, tmp_path: Path, mesh: str) -> None:
        folder = tmp_path / "run"
        trained(made(text), folder, stop_after=5)
        trained(made(text, mesh), folder, resume=True)
        theirs, ours = losses(whole), losses(folder)
        assert [ours[step] for step in range(1, 6)] == [theirs[step] for step in range(1, 6)]
        assert [ours[step] for step in range(6, 11)] == pytest.approx([theirs[step] for step in range(6, 11)], rel=2e-5)

    @pytest.mark.parametrize(
        "sets",
        [
            "plan.precision=bf16-master",
            "plan.precision=bf16,model.dropout=0.1",
            "plan.precision=fp16",
            "plan.precision=fp64,plan.recompute=full,plan.recompute_every=sqrt",
            "optimizer.name=sgd,optimizer.lr=0.1,train.compile=false,plan.microbatch=2,checkpoint.background=false",
        ],
    )
    def test_every_precision_and_optimiser_resumes_bit_for_bit(self, text: str, tmp_path: Path, sets: str) -> None:
        config = made(text, "dp=2,tp=1", sets, "train.steps=6,sample.tokens=0")
        trained(config, tmp_path / "a")
        trained(config, tmp_path / "b", stop_after=3)
        trained(config, tmp_path / "b", resume=True)
        assert losses(tmp_path / "a") == losses(tmp_path / "b")
        ours, theirs = state(tmp_path / "a", 6), state(tmp_path / "b", 6)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert losses(tmp_path / "a")[6] < losses(tmp_path / "a")[1]
        # Each attempt's first three steps are traced, and what was recorded before stays.
        assert (traced_steps(tmp_path / "a"), traced_steps(tmp_path / "b")) == ({1, 2, 3}, {1, 2, 3, 4, 5, 6})

    def test_recomputation_changes_nothing(self, text: str, tmp_path: Path) -> None:
        for name, again in (("kept", "none"), ("again", "full,plan.recompute_every=2")):
            sets = f"train.steps=3,sample.tokens=0,plan.recompute={again}"
            trained(made(text, "dp=1,tp=2", sets), tmp_path / name)
        assert losses(tmp_path / "kept") == losses(tmp_path / "again")


def traced_steps(folder: Path) -> set[int]:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return {event["args"]["step"] for event in events if event.get("cat") == "compute"}


def test_sixteen_bits_of_a_cpu_that_has_none_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(optimizer, "_multiplies", lambda short: short == "fp16")
    assert "multiplies no bf16 numbers" in optimizer.warning("bf16", cpu)
    assert "multiplies no bf16 numbers" in optimizer.warning("bf16-master", cpu)
    for precision, device in (("fp16", cpu), ("fp32", cpu), ("bf16", torch.device("cuda"))):
        assert optimizer.warning(precision, device) == ""


def test_tokens_that_the_model_does_not_have_are_named(text: str, tmp_path: Path) -> None:
    """Shards from elsewhere do not say how many tokens there are."""
    (tmp_path / "shards").mkdir()
    (np.arange(4000) % 900).astype("uint16").tofile(tmp_path / "shards" / "theirs.bin")
    with pytest.raises(UsageError, match=r"the data has token \d{3} and the model's vocabulary is 256"):
        trained(made(str(tmp_path / "shards"), "dp=1"), tmp_path / "run")


class TestFiles:
    def test_what_a_run_leaves(self, text: str, whole: Path) -> None:
        found = read_object(whole / "summary.json")
        assert found["step"] == 10
        assert found["world"] == 4
        assert sum(found["shares"].values()) == pytest.approx(1)
        assert found["exchanges"]["dp"]["all_reduce"] > 0
        assert found["exchanges"]["tp"]["all_reduce"] > 0
        assert len(found["peak_memory_bytes"]) == 4
        assert [step for step, _ in checkpoints(whole / CHECKPOINTS)] == [10, 5]
        lines = [line for line in latest(whole) if line["kind"] == "step"]
        # What a sample and held-out text exchange is no step's.
        assert found["exchange_steps"] == 10
        assert 0 < sum(found["exchange_seconds"].values()) <= sum(line["exchange_s"] for line in lines) + 1e-6
        written = [line for line in latest(whole) if line["kind"] == "checkpoint"]
        assert [(line["step"], line["ok"]) for line in written] == [(5, True), (10, True)]
        assert [line["step"] for line in lines] == list(range(1, 11))
        assert [line["step"] for line in lines if "held_out" in line] == [5, 10]
        assert read_object(whole / "choices.json")["collectives"]
        trace = json.loads((whole / "trace.json").read_text())["traceEvents"]
        assert {event["pid"] for event in trace} == {0, 1, 2, 3}
        names = {event["name"] for event in trace}
        assert {"forward", "backward", "optimizer", "data", "meet", "all_reduce"} <= names
        exchange = next(event for event in trace if event.get("cat") == "exchange")
        assert exchange["args"]["bytes"] > 0
        assert exchange["args"]["group"] in ("tp", "dp", "control")
        assert (whole / "sample.txt").read_text().startswith("def")

    def test_a_run_keeps_what_auto_picked_and_its_continuation_keeps_to_it(self, text: str, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        config = made(text, "dp=1,tp=2", "train.kernels=tilemesh,train.steps=4,sample.tokens=0")
        with use(Context()):  # what other tests of this process have multiplied is not of this run
            trained(config, folder, stop_after=2)
        first = read_object(folder / "choices.json")
        assert first["kernels"] == "tilemesh"
        assert first["graph"] is False
        assert first["matmul"]
        assert set(first["matmul"].values()) == {"kind=torch"}  # what `auto` stands for on a CPU
        assert all("float32" in key for key in first["matmul"])
        # As if this process came to something else by itself: what was picked before stands, on both sides.
        ours = {key: "tree" if value != "tree" else "ring" for key, value in first["collectives"].items()}
        (folder / "choices.json").write_text(json.dumps({**first, "collectives": ours}))
        trained(config, folder, resume=True)
        assert read_object(folder / "choices.json")["collectives"].items() >= ours.items()

    @pytest.mark.parametrize(
        ("sets", "words"),
        [
            ("train.steps=12,train.context=8", "train.context was 16 and is 8:"),
            (
                "train.steps=12,train.seed=3,data.packing=documents",
                "train.seed was 0 and is 3; data.packing was stream",
            ),
            ("train.steps=12,train.batch=4", ""),
        ],
    )
    def test_other_sequences_than_before_are_said(
        self, text: str, whole: Path, tmp_path: Path, sets: str, words: str
    ) -> None:
        shutil.copytree(whole, tmp_path / "run")
        _, said = trained(made(text, "dp=2,tp=2", sets), tmp_path / "run", resume=True, stop_after=11)
        (told,) = [line for line in said if line.startswith("THE DATA")] or [""]
        assert words in told
        assert bool(words) == bool(told)

    @pytest.mark.parametrize("table", [None, [1], "x", {"key": 3}, {"key": None}])
    def test_choices_of_wrong_types_are_made_afresh_and_said(self, table: object, tmp_path: Path) -> None:
        (tmp_path / "choices.json").write_text(json.dumps({"collectives": table, "matmul": {"a": "kind=torch"}}))
        said: list[str] = []
        assert earlier_choices(tmp_path, True, said.append) == {"collectives": {}, "matmul": {"a": "kind=torch"}}
        assert said == [
            "DAMAGED CHOICES: choices.json: collectives is no table of names: they are chosen afresh, and sums may "
            "round otherwise than before"
        ]

    def test_rows_of_a_run_that_was_too_short_to_be_timed(self, whole: Path) -> None:
        found = read_object(whole / "summary.json") | {"step_time_s": None}
        found["shares"] = {"compute": 1.0, "exchange": 0.0, "data": 0.0, "idle": 0.0}
        predicted = {"step_time_s": 1.0, "exchange_share": 0.1, "memory_bytes": 1e6, "mfu": 0.1, "hfu": 0.1}
        shown = io.StringIO()
        made = rows(found, predicted)
        print_rows(made, Console(file=shown, width=160))
        assert "too few steps" in shown.getvalue()
        memory = next(row for row in made if row.name == "peak memory per rank")
        nothing = dataclasses.replace(memory, measured=Sample(0.0, 0.0, 0.0, 1))
        assert (nothing.prediction_error, nothing.of_limit) == (None, None)

    def test_predicted_and_measured_utilisation_are_of_one_peak(
        self, whole: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The planner's own fraction may be of another peak (one core's, all cores'): its step time is what counts."""
        monkeypatch.setattr("tilemesh.train.rows.calibrated_peak", lambda found: (1e9, ""))
        step = {"median": 0.1, "p20": 0.1, "p80": 0.1, "n": 3}
        found = {**read_object(whole / "summary.json"), "step_time_s": step}
        made = {row.name: row for row in rows(found, {"step_time_s": 0.2, "mfu": 0.9, "hfu": 0.9})}
        for name in ("throughput", "MFU", "HFU"):
            assert made[name].prediction_error == pytest.approx(-0.5)
        # Answers share prompts and end early: a batch of whole contexts is no bound for their steps.
        feedback = {row.name: row for row in rows({**found, "kind": "align"}, {"step_time_s": 0.2})}
        for name in ("step time", "throughput", "MFU", "HFU"):
            assert "do not fill the context" in feedback[name].missing["limit"]
        assert feedback["step time"].measured is not None
        assert feedback["MFU"].measured is None

    def test_the_memory_of_a_rank_has_no_limit_to_be_a_percentage_of(self, whole: Path) -> None:
        memory = next(
            row for row in rows(read_object(whole / "summary.json"), {}) if row.name == "peak memory per rank"
        )
        assert (memory.limit, memory.of_limit) == (None, None)
        assert "optimizer states alone take" in memory.missing["limit"]

    def test_energy_is_over_all_devices_and_predicted_from_a_boards_power(self, whole: Path) -> None:
        found = read_object(whole / "summary.json") | {"joules_per_step": 60.0, "world": 2, "energy_source": "NVML"}
        found |= {"device": "cuda", "cluster": "2xh100", "tokens_per_step": 30.0}
        made = {row.name: row for row in rows(found, {"step_time_s": 0.1, "exchange_share": 0.5})}
        step, token = made["energy per step"], made["energy per token"]
        assert step.predicted == pytest.approx(0.1 * 2 * (100 + 0.5 * 600))  # watts: idle, and to the limit of 700
        assert (step.measured, token.measured) == (Sample.of([60.0]), Sample.of([2.0]))
        none = rows(found | {"joules_per_step": None, "energy_source": "not measured: no counter"}, {})[-1]
        assert none.missing["measured"] == "not measured: no counter"

    def test_steps_are_charged_what_they_draw_and_evaluations_nothing(
        self, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn, step, evaluate = [0.0], Loop.step, Stepper.evaluate

        def drawing(joules: float, call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any) -> Any:
                drawn[0] += joules
                return call(*args)

            return called

        counter = EnergyCounter("planted", 1, lambda: drawn[0])
        monkeypatch.setattr("tilemesh.train.loop.energy_meter", lambda device: EnergyMeter(counter))
        monkeypatch.setattr(Loop, "step", drawing(3.0, step))
        monkeypatch.setattr(Stepper, "evaluate", drawing(1000.0, evaluate))
        config = made(text, "dp=1", "train.steps=14,evaluate.every=3,checkpoint.every=5")
        result = fit(config, run=tmp_path / "run")
        (energy,) = (row for row in result.rows if row.name == "energy per step")
        assert energy.measured == Sample.of([3.0])

    def test_a_device_that_ranks_share_is_counted_once(self) -> None:
        joules, devices = [3.0, 5.0, 4.0], [1.0, 2.0, 1.0]
        assert _joules_per_step(np.array([joules, devices]).T) == 4 + 5
        assert _joules_per_step(np.array([[1.0, math.nan], [1.0, math.nan]]).T) is None

    def test_utilisation_of_a_gpu_is_of_its_datasheet_as_the_planners_is(self, whole: Path) -> None:
        found = read_object(whole / "summary.json")
        model, plan = ModelConfig(**found["model"]), ParallelPlan(microbatch=8, precision="bf16")
        planned = predict(model, parse_cluster("1xh200"), plan, found["context"])
        step = {"median": planned.step_time_s, "p20": planned.step_time_s, "p80": planned.step_time_s, "n": 3}
        found |= {"device": "cuda", "cluster": "1xh200", "world": 1, "plan": plan.to_dict(), "step_time_s": step}
        found |= {"batch": plan.batch, "machine": "no calibration of this"}
        made = {row.name: row for row in rows(found, {"step_time_s": planned.step_time_s})}
        for name, told in (("MFU", planned.mfu), ("HFU", planned.hfu)):
            measured = made[name].measured
            assert measured is not None
            assert measured.median == pytest.approx(made[name].predicted) == pytest.approx(told)

    def test_only_the_newest_stay(self, text: str, tmp_path: Path) -> None:
        trained(made(text, "dp=1", "checkpoint.every=1,checkpoint.keep=2"), tmp_path / "run")
        assert [step for step, _ in checkpoints(tmp_path / "run" / CHECKPOINTS)] == [10, 9]
        assert sorted(path.name for path in (tmp_path / "run" / CHECKPOINTS).iterdir()) == [
            "step-00000009",
            "step-00000010",
        ]

    def test_generation_in_one_process_writes_what_the_ranks_wrote(self, text: str, whole: Path) -> None:
        config = made(text)
        wrote = generate(whole, "def", tokens=8, temperature=config.sample.temperature, seed=0)
        assert (whole / "sample.txt").read_text() == "def" + wrote
        longer = generate(whole, "line ", tokens=40, temperature=0)
        assert len(longer.encode()) == 40  # past the context of 16

    @pytest.mark.parametrize(
        ("asked", "words"),
        [
            ({"prompt": ""}, "an empty prompt"),
            ({"tokens": -1}, "tokens is -1: expected a whole number, between 0"),
            ({"temperature": -0.5}, "temperature is -0.5: expected 0 or more"),
            ({"temperature": float("nan")}, "temperature is nan: expected 0 or more"),
        ],
    )
    def test_what_cannot_be_written_is_refused(self, whole: Path, asked: dict[str, Any], words: str) -> None:
        with pytest.raises(UsageError, match=words):
            generate(whole, **{"prompt": "def ", **asked})

    def test_generation_needs_no_training_data(self, text: str, whole: Path, tmp_path: Path) -> None:
        shutil.copytree(whole, tmp_path / "run")
        config = tmp_path / "run" / "config.toml"
        config.write_text(config.read_text().replace(text, "/nothing/here.txt"))
        wrote = generate(tmp_path / "run", "line ", tokens=8)
        assert wrote == generate(whole, "line ", tokens=8)

    def test_exported_weights_are_the_models(self, text: str, whole: Path, tmp_path: Path) -> None:
        assert export.export(whole, tmp_path / "hf") == 10
        # As a program that knows nothing of training reads it: the model's section, and the checkpoint.
        ours = read_model(section(ModelConfig, "model", *read_config(whole, TRAIN)), open_checkpoint(whole))
        theirs = huggingface.load(tmp_path / "hf")
        tokens = torch.arange(12)[None]
        assert torch.equal(ours(tokens), theirs.eval()(tokens))
        # Where nothing else says what the model is, it is the folder's, with its tokenizer.
        (tmp_path / "hf" / "tokenizer.json").touch()
        taken = load(init=tmp_path / "hf")
        assert (taken.model.width, taken.model.layers) == (made(text).model.width, made(text).model.layers)
        assert taken.data.tokenizer == tmp_path / "hf" / "tokenizer.json"
        assert load(init=tmp_path / "hf", sets=["model.width=64"]).model.width == 64
        with pytest.raises(UsageError, match=r"no config\.json there"):
            load(init=tmp_path / "nothing")
        # And a run may begin from them: its first loss is that of the trained model.
        folder = tmp_path / "again"
        trained(made(text, "dp=1,tp=2", "train.steps=2"), folder, init=tmp_path / "hf")
        assert losses(folder)[1] < 0.8 * losses(whole)[1]
        with pytest.raises(UsageError, match="another model: width is 16 there and 32 here"):
            fit(made(text, "dp=1", "model.width=32,train.steps=1"), run=tmp_path / "c", init=tmp_path / "hf")

    def test_what_is_asked_of_a_run_that_has_nothing(self, text: str, whole: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="is no run"):
            generate(tmp_path, "x")
        with pytest.raises(UsageError, match="no checkpoint of step 7"):
            generate(whole, "x", step=7)
        new_run(TRAIN, made(text).to_toml(), tmp_path / "empty")
        with pytest.raises(RunError, match="has no checkpoint yet"):
            generate(tmp_path / "empty", "x")
        with pytest.raises(UsageError, match="has a run already"):
            new_run(TRAIN, made(text).to_toml(), whole)
        with pytest.raises(UsageError, match="empty prompt"):
            generate(whole, "")


def test_our_files_are_safetensors_and_theirs_are_read(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(3, 4), "odd": torch.randn(5).bfloat16(), "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3), "half": torch.arange(7).half()[None],
    }  # fmt: skip
    stored = write_tensors(tmp_path / "ours.safetensors", tensors)
    assert stored.nbytes == (tmp_path / "ours.safetensors").stat().st_size
    assert stored.sha256 == digest(tmp_path / "ours.safetensors")
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    for found in (
        load_file(tmp_path / "ours.safetensors"),
        read_tensors(tmp_path / "ours.safetensors"),
        read_tensors(tmp_path / "theirs.safetensors"),
    ):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)


class PlayedGraphs:
    """A GPU's graphs, played: a captured step is called again."""

    def __init__(self, log: list[str], fails: bool = False) -> None:
        self.log, self.fails = log, fails

    def run(self, body: Callable[[], GradientStep]) -> GradientStep:
        self.log.append("run")
        return body()

    def capture(self, body: Callable[[], GradientStep]) -> PlayedGraphs:
        self.log.append("capture")
        if self.fails:
            raise RunError("cannot be captured in a CUDA graph: RuntimeError: something was waited for")
        self.body, self.result = body, body()
        return self

    def replay(self) -> None:
        self.log.append("replay")
        self.result = self.body()


class TestStepGraph:
    def steps(self, count: int, log: list[str], **options: Any) -> list[float]:
        loss = torch.zeros(())

        def body() -> GradientStep:
            return GradientStep(loss.add_(1.0), 8, loss)

        fails = options.pop("fails", False)
        told = options.pop("told", lambda now: None)
        step = StepGraph(body, told, graphs=PlayedGraphs(log, fails), **options)
        done = [step() for _ in range(count)]
        return [float(one.loss) for one in done[graph.PLAIN_STEPS :]]

    @pytest.mark.parametrize(("room", "always"), [(True, False), (False, True)])
    def test_two_steps_are_launched_then_one_is_captured_and_replayed(
        self, room: bool, always: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(graph, "has_room", lambda: room)
        log: list[str] = []
        told: list[bool] = []
        losses = self.steps(5, log, always=always, told=told.append)
        assert log == ["run", "run", "capture", "replay", "replay", "replay"]
        assert told == [True, False]
        assert losses == [4, 5, 6]  # what a step came to stays, though the next writes over where it was

    def test_without_room_all_are_launched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graph, "has_room", lambda: False)
        log: list[str] = []
        self.steps(4, log)
        assert log == ["run"] * 4

    def test_a_step_that_cannot_be_captured_says_what_to_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graph, "has_room", lambda: True)
        told: list[bool] = []
        with pytest.raises(RunError, match=r"the step cannot be .*something was waited for; set train.graph=false"):
            self.steps(3, [], fails=True, told=told.append)
        assert told == [True, False]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_optimizer_takes_any_shards_and_says_where_its_state_belongs(name: str) -> None:
    """Parameters cut over dp, as ZeRO cuts them, unevenly: put together, all it keeps is what one optimizer keeps."""
    config = OptimizerConfig(name=name, momentum=0.9, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    weights = {key: torch.randn(shape, generator=generator) for key, shape in (("w", (5, 3)), ("bias", (7,)))}
    gradients = {key: torch.randn(value.shape, generator=generator) for key, value in weights.items()}

    def kept(rank: int, cuts: tuple[Cut, ...]) -> list[tuple[str, Shard, torch.Tensor]]:
        held = {}
        for key, value in weights.items():
            mine = Shard(key, tuple(value.shape), (("dp", 3),), rank, cuts)
            held[key] = Held(torch.nn.Parameter(take(mine, value).clone()), mine)
            held[key].tensor.grad = take(mine, gradients[key]).clone()
        stepped = Optimizer(config, held, "fp32")
        for _ in range(2):
            stepped.step(0.1)
        return list(stepped.tensors())

    whole = kept(0, ())
    parts = [kept(rank, (Cut("dp", 0),)) for rank in range(3)]
    for (stored, _, wanted), *pieces in zip(whole, *parts, strict=True):
        assert {key for key, _, _ in pieces} == {stored}
        assert all(mine.writes for _, mine, _ in pieces)
        torch.testing.assert_close(join([mine for _, mine, _ in pieces], [value for _, _, value in pieces]), wanted)
    assert len(whole) == 2 * (3 if name == "adamw" else 2)


class TestAlone:
    """Steps that the host does not wait for, as on one GPU alone; forced here on a CPU."""

    def steps(
        self, text: str, late: bool, sets: str = "optimizer.clip=0.5", replayed: bool = False
    ) -> list[tuple[int, float, float]]:
        config = made(text, "dp=1,tp=1", "plan.microbatch=4", sets)
        mesh, device = Mesh(connect("alone")), torch.device("cpu")
        laid = lay_model(config, mesh, device, late=late)
        optimizer = Optimizer(config.optimizer, laid.held, config.plan.precision)
        source = TextSource(config, open_corpus(config.data), mesh.dp, device)
        stepper = Stepper(config, laid, optimizer, source, next_token(config, laid), Recorder(Trace(None)))
        assert stepper.is_late is late
        if replayed:  # as a graph does it: the same call on the same tensors each time
            stepper.replay = stepper._move  # type: ignore[assignment]
        done = read([stepper(number) for number in range(1, 7)])
        stepper.close()
        return [(number, loss, norm) for number, (loss, norm) in enumerate(done, 1)]

    def test_another_source_and_another_objective_are_handed_in(self, text: str) -> None:
        """A source of three tensors and a loss of two terms: a step needs to know of neither."""
        config = made(text, "dp=1,tp=1", "train.steps=8,optimizer.lr=0.02")
        laid = lay_model(config, Mesh(connect("alone")), torch.device("cpu"))
        tokens = torch.arange(17)[None] % 13
        teacher = torch.zeros(1, 16, config.model.vocabulary).scatter_(-1, tokens[:, 1:, None], 5.0)

        class Taught:
            names = ("tokens", "targets", "teacher")

            def fetch(self, number: int) -> list[Microbatch]:
                return [Microbatch((tokens[:, :-1], tokens[:, 1:], teacher), 0)]

            def held_out(self) -> Iterator[Microbatch]:
                yield from self.fetch(1)

            def fingerprint(self) -> str:
                return "taught"

            def go_on(self, steps: int, position: int) -> None:
                raise AssertionError

        def distilled(inputs: torch.Tensor, targets: torch.Tensor, wanted: torch.Tensor) -> Any:
            logits = laid.module(inputs)
            return functional.mse_loss(logits, wanted, reduction="sum"), torch.tensor(targets.numel())

        optimizer = Optimizer(config.optimizer, laid.held, config.plan.precision)
        objective = Objective(distilled, distilled)
        stepper = Stepper(config, laid, optimizer, Taught(), objective, Recorder(Trace(None)))
        before = stepper.evaluate()
        losses = [loss for loss, _ in read([stepper(number) for number in range(1, 9)])]
        assert losses[0] == pytest.approx(before, rel=1e-5)
        assert losses[-1] < 0.9 * losses[0]

    @pytest.mark.parametrize("sets", ["optimizer.fused=true", "optimizer.fused=false", "optimizer.name=sgd"])
    def test_they_come_to_the_same(self, text: str, sets: str) -> None:
        """Clipped in the optimiser's own pass where that is fused, else before it."""
        late, waited = (self.steps(text, way, f"optimizer.clip=0.5,{sets}") for way in (True, False))
        assert [step for step, _, _ in late] == [1, 2, 3, 4, 5, 6]
        assert [loss for _, loss, _ in late] == pytest.approx([loss for _, loss, _ in waited], rel=1e-5)
        assert [norm for _, _, norm in late] == pytest.approx([norm for _, _, norm in waited], rel=1e-4)

    @pytest.mark.parametrize("sets", ["optimizer.lr=0.0123", "optimizer.name=sgd,optimizer.lr=0.123"])
    def test_a_rate_has_the_same_bits_in_a_captured_step(self, text: str, sets: str) -> None:
        """That one reads it out of a float32."""
        assert self.steps(text, True, sets, replayed=True) == self.steps(text, True, sets)

    @pytest.mark.parametrize("sets", ["optimizer.fused=true", "optimizer.name=sgd", "model.dropout=0.2"])
    def test_what_a_captured_step_reads_is_written_before_each(self, text: str, sets: str) -> None:
        """Batch, rate and seed: left as they were at first, any of them would change what comes out."""
        replayed, waited = (self.steps(text, way, sets, replayed=way) for way in (True, False))
        assert [loss for _, loss, _ in replayed] == pytest.approx([loss for _, loss, _ in waited], rel=1e-5)
        assert [norm for _, _, norm in replayed] == pytest.approx([norm for _, _, norm in waited], rel=1e-4)

    def test_a_graph_that_cannot_be_is_refused(self, text: str) -> None:
        with pytest.raises(UsageError, match="this step cannot be captured: a graph is for one GPU alone"):
            self.steps(text, True, "train.graph=true")

    def test_the_host_is_a_few_steps_ahead_and_no_more(self) -> None:
        class GradientStep:
            done = False

            def synchronize(self) -> None:
                self.done = True

        pace, steps = Pace(), [GradientStep() for _ in range(3 * AHEAD)]
        for number, step in enumerate(steps, 1):
            pace(step)
            assert [one.done for one in steps] == [at < number - AHEAD for at in range(len(steps))]

    def test_a_bad_loss_is_in_what_is_read_later(self, text: str) -> None:
        values = self.steps(text, True, "optimizer.lr=1e30,optimizer.warmup=0,optimizer.clip=0")
        assert [math.isfinite(loss) for _, loss, _ in values][:1] == [True]
        assert not all(math.isfinite(loss) and math.isfinite(norm) for _, loss, norm in values)


@pytest.mark.parametrize("name", ["gpt2-124m", "tinyllama-1.1b"])
def test_what_suits_a_gpu_is_the_same_model(name: str) -> None:
    """Logits and every gradient, in float64; weights keep their names and tensors."""
    config = preset(name).replace(layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, vocabulary=67, context=16)
    tokens = torch.randint(67, (2, 16), generator=torch.Generator().manual_seed(0))
    found = []
    for suited in (False, True):
        model = Transformer(config.replace(dropout=0.0), dtype=torch.float64, kernels=PLAIN)
        logits = prepare(model, gpu_use(compiled=True))(tokens) if suited else model(tokens)
        logits.square().mean().backward()
        found.append({"logits": logits.detach()} | {key: one.grad for key, one in model.named_parameters()})
    plain, suited_one = found
    assert plain.keys() == suited_one.keys()
    largest = max(float(value.norm()) for value in plain.values())
    for key, value in plain.items():
        # Of whole tensors: what is near zero (a key's bias is zero but for rounding) is a difference of large terms.
        assert (suited_one[key] - value).norm() <= 1e-11 * value.norm() + 1e-14 * largest, key


def test_a_peer_of_the_bench_trains_the_same_model_alike(text: str) -> None:
    """Loss by loss: batches, schedule, clipping and decay are those of ours, so its weights stay those of ours."""
    config = made(text, "dp=1,tp=1", "plan.microbatch=4", "optimizer.clip=0.5")
    comm, device = connect("alone"), torch.device("cpu")
    runs = [bench_rank.ours(config, comm, device), bench_rank.peer_maker("eager")(config, comm, device)]
    ours, theirs = ([run(True) for _ in range(8)] for run in runs)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[-1] < ours[0]


class TestMemory:
    def test_what_autograd_keeps_is_counted_once_and_let_go(self) -> None:
        weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(16, 8)
        with SavedBytes([weight]) as saved:
            for _ in range(2):  # one after the other: the peak is of one
                hidden = (x @ weight).tanh()  # keeps x, and its own result
                y = hidden[:4] * hidden[4:8]  # keeps two views of that result
                y.sum().backward()
                del hidden, y
        assert saved.peak == 2 * 16 * 8 * 4
        assert storage_bytes([weight, weight.detach()[2:], None, x]) == 64 * 4 + 128 * 4

    @pytest.mark.parametrize(("precision", "state"), [("fp32", 8), ("bf16-master", 12)])
    def test_a_summary_tells_memory_by_kind(self, text: str, tmp_path: Path, precision: str, state: int) -> None:
        trained(made(text, "dp=1,tp=2", f"plan.precision={precision}", "train.steps=2"), tmp_path / "run")
        found = read_object(tmp_path / "run" / "summary.json")
        kinds = found["memory_bytes"]
        assert list(kinds) == ["weights", "gradients", "optimizer", "activations", "other"]
        assert "autograd" in found["memory_how"]
        plan = ParallelPlan(dp=1, tp=2, microbatch=8, precision=precision)
        told = predict(ModelConfig(**found["model"]), parse_cluster("2xh100"), plan, 16).memory
        for rank in range(2):
            assert kinds["weights"][rank] == told.weights_bytes
            assert kinds["gradients"][rank] == told.gradients_bytes
            # AdamW also counts its steps, four bytes a parameter tensor.
            assert 0 <= kinds["optimizer"][rank] - told.optimizer_bytes < 200
            assert kinds["optimizer"][rank] // told.weights_bytes == state // (4 if precision == "fp32" else 2)
            assert kinds["activations"][rank] > 0.9 * told.activations_bytes

    def test_recomputing_keeps_less(self, text: str, tmp_path: Path) -> None:
        kept = []
        for name in ("none", "full"):
            trained(made(text, "dp=1,tp=1", f"plan.recompute={name}", "train.steps=1"), tmp_path / name)
            kept.append(read_object(tmp_path / name / "summary.json")["memory_bytes"]["activations"][0])
        assert kept[1] < kept[0] / 2


@pytest.fixture(scope="module")
def stopped(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, stopped after step 8, whose checkpoint is not due: the one before it is of step 5."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    trained(made(text), folder, stop_after=8)
    return folder


class TestFaults:
    @pytest.mark.parametrize("how", ["truncated", "altered", "missing", "manifest"])
    def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
        self, text: str, whole: Path, stopped: Path, tmp_path: Path, how: str
    ) -> None:
        folder = tmp_path / "run"
        shutil.copytree(stopped, folder)
        newest = folder / CHECKPOINTS / "step-00000008"
        victim = newest / "shard-00001.safetensors"
        if how == "truncated":
            os.truncate(victim, victim.stat().st_size - 7)
        elif how == "altered":
            raw = bytearray(victim.read_bytes())
            raw[-5] ^= 1
            victim.write_bytes(raw)
        elif how == "missing":
            victim.unlink()
        else:
            (newest / "manifest.json").write_text("{")
        _, said = trained(made(text), folder, resume=True)
        assert any("going on from step 5" in line for line in said)
        assert losses(folder) == losses(whole)
        assert (folder / CHECKPOINTS / "damaged-step-00000008").is_dir()

    def test_a_damaged_shard_is_named_by_whoever_looks(self, text: str, tmp_path: Path) -> None:
        trained(made(text, "dp=1", "train.steps=5"), tmp_path / "run")
        victim = tmp_path / "run" / CHECKPOINTS / "step-00000005" / "shard-00000.safetensors"
        os.truncate(victim, 1000)
        with pytest.raises(RunError, match=r"shard-00000\.safetensors has 1000 bytes"):
            generate(tmp_path / "run", "x")

    def test_a_loss_that_is_no_number_stops_with_the_batch_kept(self, text: str, tmp_path: Path) -> None:
        config = made(text, "dp=2,tp=1", "optimizer.lr=1e30,optimizer.warmup=0,optimizer.clip=0")
        with pytest.raises(RunError, match=r"step \d+: (loss is|the gradient's norm is) (nan|inf)"):
            trained(config, tmp_path / "run")
        kept = sorted((tmp_path / "run").glob("bad-batch-step-*-part-*.safetensors"))
        assert len(kept) == 2
        assert load_file(kept[0])["tokens"].shape == (4, 16)

    def test_a_write_that_fails_is_said_and_training_goes_on(
        self, text: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, calls = checkpoint.write_tensors, []

        def full(path: Path, tensors: Any) -> Any:
            calls.append(path)
            if "step-00000010" in str(path) and "shard-00001" in path.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return real(path, tensors)

        monkeypatch.setattr(checkpoint, "write_tensors", full)
        result, said = trained(made(text, "dp=2,tp=2", "checkpoint.retry_s=0"), tmp_path / "run")
        assert (result.step, result.saved_step, result.saved_in) == (10, 5, tmp_path / "run")
        assert said[-1] == "THE WEIGHTS OF STEP 10 ARE LOST: the newest that are saved are of step 5"
        assert any("CHECKPOINT OF STEP 10 FAILED: training goes on, the last good one is of step 5" in x for x in said)
        assert losses(tmp_path / "run") == losses(whole)
        kept = {(line["kind"], line["step"]): line for line in latest(tmp_path / "run")}
        assert not kept["checkpoint", 10]["ok"]
        assert kept["checkpoint", 10]["why"] == "another rank could not write its part"
        assert kept["warning", 10]["text"] == said[-1]
        assert [step for step, _ in checkpoints(tmp_path / "run" / CHECKPOINTS)] == [5]
        assert not list((tmp_path / "run" / CHECKPOINTS).glob(".writing*"))

    def test_a_full_disk(self, text: str, small_disk: Path, tmp_path: Path) -> None:
        """A real one: there is room for one checkpoint and no more."""
        config = made(
            text,
            "dp=1,tp=2",
            "train.steps=6,checkpoint.every=2,checkpoint.keep=3,train.trace_steps=6,checkpoint.retry_s=0",
        )
        folder = small_disk / "run"
        new_run(TRAIN, config.to_toml(), folder)
        (small_disk / "filler").write_bytes(bytes(_room(small_disk) - 300_000))
        result, said = trained(config, folder)
        assert result.step == 6
        assert any("CHECKPOINT OF STEP 6 FAILED" in line for line in said)
        (step, path), *_ = checkpoints(folder / CHECKPOINTS)
        assert step in (2, 4)
        assert result.saved_step == step
        assert state(folder, step)
        assert list(path.glob("manifest.json"))

    def test_settings_that_cannot_be_trained(self, text: str, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"plan\.zero"):
            trained(made(text, "dp=1", "plan.zero=1"), tmp_path / "a")
        with pytest.raises(UsageError, match="materialized"):
            trained(made(text, "dp=1", "plan.attention=materialized"), tmp_path / "b")
        with pytest.raises(UsageError, match=r"plan\.pp"):
            made(text, "dp=1,pp=3")
        (tmp_path / "short.txt").write_text("x")
        with pytest.raises(UsageError, match="shorter than one sequence"):
            trained(made(str(tmp_path / "short.txt"), "dp=1"), tmp_path / "c")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One MiB of memory as a disk."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def _room(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
