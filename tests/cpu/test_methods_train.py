"""Training by each method: equal to data parallelism where that is promised, refusals. Resumed: tests/resume."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tilemesh.comm import run_threads
from tilemesh.core.errors import RunError, UsageError
from tilemesh.data.corpus import open_corpus
from tilemesh.methods.link import ServerLink
from tilemesh.methods.record import read_record, replay, standing
from tilemesh.methods.rules import Push
from tilemesh.methods.server import mean_update
from tilemesh.model import huggingface
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh
from tilemesh.parallel.mesh import Axis
from tilemesh.report.kind_page import Beside
from tilemesh.report.run import read as read_run
from tilemesh.report.run_page import render
from tilemesh.runs import folder as folders
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.manifest import checkpoints
from tilemesh.runs.metrics import latest
from tilemesh.runs.names import CHECKPOINTS, SERVER_RECORDS, SUMMARY
from tilemesh.runs.reader import open_checkpoint
from tilemesh.train import fit, load_config, rank, steps
from tilemesh.train.config import TrainConfig
from tilemesh.train.offload import HostOptimizer
from tilemesh.train.optimizer import LossScale
from tilemesh.train.preview import preview
from tilemesh.train.rank import lay_model, train_here
from tilemesh.train.servers import FlatWeights, WorkerSource, as_server, as_worker, server_cuts, server_shard

SMALL = (
    "model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "train.steps=8", "train.batch=4",
    "plan.microbatch=2", "plan.precision=fp64", "optimizer.clip=0", "evaluate.every=4", "evaluate.sequences=4",
    "checkpoint.every=4", "sample.tokens=0", "optimizer.fused=false", "train.trace_steps=0",
    "checkpoint.background=false",
)  # fmt: skip
SGD = ("optimizer.name=sgd", "optimizer.momentum=0", "optimizer.lr=0.1")
LOCAL = (
    "train.method=local", "method.period=2", "train.steps=4", "method.outer_lr=0.7", "method.outer_momentum=0.9",
    "model.layers=4", "model.tied=true", "optimizer.clip=0.5", "train.batch=8",
)  # fmt: skip
PIPED = ("model.layers=2", "model.tied=false")
TEXT = Path(__file__)


def config(*sets: str, mesh: str = "dp=2") -> TrainConfig:
    return load_config(sets=[*SMALL, f"data.source={TEXT}", *sets], mesh=mesh)


def train(
    made: TrainConfig,
    folder: Path,
    *,
    stop_after: int | None = None,
    resume: bool = False,
    hear: Callable[[Any], None] = lambda event: None,
) -> dict:
    if not resume:
        folders.new_run(TRAIN, made.to_toml(), folder)
    run_threads(
        made.ranks, lambda comm: train_here(made, folder, comm, resume=resume, stop_after=stop_after, emit=hear)
    )
    return json.loads((folder / "summary.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    reader = open_checkpoint(folder)
    return {name: reader.whole(name) for name in sorted(reader.names) if name.startswith("weight:")}


def assert_equal(one: Path, other: Path, bound: float) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert first
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=bound)


def told(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and norm that the metrics have of each step."""
    return {line["step"]: (line["loss"], line["norm"]) for line in latest(folder) if line["kind"] == "step"}


def assert_tell_the_same(one: Path, other: Path) -> None:
    first, second = told(one), told(other)
    assert sorted(first) == sorted(second) == list(range(1, len(first) + 1))
    for step, figures in first.items():
        assert figures == pytest.approx(second[step], rel=1e-10)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "synchronous"
    train(config(*SGD), folder)
    return folder


@pytest.mark.parametrize(
    "sets",
    [
        ("train.method=server", "method.servers=2"),
        ("train.method=server", "method.consistency=ssp", "method.staleness=0"),
        ("train.method=local", "method.period=1"),
        ("method.compress=top-k", "method.keep=1"),
        ("method.compress=random-k", "method.keep=1"),
    ],
)
def test_methods_that_are_data_parallelism(sets: tuple[str, ...], synchronous: Path, tmp_path: Path) -> None:
    """Eight steps in float64: each sum of two gradients may round once more than the other's."""
    train(config(*SGD, *sets), tmp_path / "run")
    assert_equal(tmp_path / "run", synchronous, 1e-12)
    assert_tell_the_same(tmp_path / "run", synchronous)


def test_workers_go_on_with_another_batch_where_data_parallelism_does(tmp_path: Path) -> None:
    for method in ("synchronous", "server"):
        sets = (*SGD, f"train.method={method}", "train.steps=6")
        train(config(*sets), tmp_path / method, stop_after=4)
        train(config(*sets, "train.batch=8"), tmp_path / method, resume=True)
    assert_equal(tmp_path / "server", tmp_path / "synchronous", 1e-12)


def test_workers_keep_activations_on_the_host(synchronous: Path, tmp_path: Path) -> None:
    train(config(*SGD, "train.method=server", "plan.offload=activations", "plan.recompute=full"), tmp_path / "run")
    assert_equal(tmp_path / "run", synchronous, 1e-12)
    assert_tell_the_same(tmp_path / "run", synchronous)


@pytest.mark.slow  # half a minute each for the compiler
@pytest.mark.parametrize("method", ["server", "local"])
def test_compiled_replicas_train_as_others_do(method: str, tmp_path: Path) -> None:
    """On processes: torch compiles for one thread at a time."""
    sets = (*SGD, f"train.method={method}", "method.period=4", "train.device=cpu")
    for compiled in ("false", "layers"):
        fit(config(*sets, f"train.compile={compiled}"), run=tmp_path / compiled, transport="torch")
    assert_equal(tmp_path / "layers", tmp_path / "false", 1e-10)


@pytest.mark.parametrize(
    "method",
    [
        "train.method=local,method.period=4",
        "method.compress=top-k",
        pytest.param("train.method=server", marks=pytest.mark.slow),
        pytest.param("method.compress=int8", marks=pytest.mark.slow),
    ],
)
def test_what_overflows_in_fp16_is_made_again(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales are powers of two, so a run whose gradients overflow at first is the run that began with the scale that
    does not: where replicas find scales of their own, but for what one of them rounds to zero and another does not."""
    sets = (*SGD, method, "plan.precision=fp16")
    scale, ends = 2.0**30, {}
    for name in ("high", "right"):
        monkeypatch.setattr(steps, "LossScale", functools.partial(LossScale, value=scale))
        train(config(*sets), tmp_path / name)
        ends[name] = open_checkpoint(tmp_path / name).manifest.values["scale"]
        scale = ends["high"]["scale"]
    assert 2.0**10 < scale < 2.0**30
    assert ends["right"] == {"scale": scale, "good": 8, "of_mean": 1}
    assert_equal(tmp_path / "high", tmp_path / "right", 0 if "compress" in method else 2.0**-24)


def test_loss_scales_of_replicas_that_meet_are_the_smallest() -> None:
    def main(comm: Any) -> tuple[float, int]:
        scale = LossScale(True, value=2.0 ** (8 + comm.rank))
        for _ in range(3 - comm.rank):
            scale.grow()
        scale.meet(comm)
        return scale.value, scale.good

    assert run_threads(3, main) == [(2.0**8, 1)] * 3


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_workers_end_early_when_the_first_one_decides_so(consistency: str, tmp_path: Path) -> None:
    sets = ("evaluate.every=2", "evaluate.patience=1", "evaluate.min_improvement=100", "train.steps=40")
    made = config(*SGD, "train.method=server", f"method.consistency={consistency}", *sets)
    summary = train(made, tmp_path / "run")
    assert summary["ended_early"].startswith("early stopping")
    assert 4 <= summary["step"] < 40
    assert train(made, tmp_path / "run", resume=True)["step"] == summary["step"]


@pytest.mark.parametrize("what", ["teacher", "pruning", "documents"])
def test_every_worker_trains_for_what_the_configuration_says(what: str, tmp_path: Path) -> None:
    """A teacher, weights left out more and more, attention within documents: under BSP as by data parallelism. Of the
    documents each sequence holds two whole ones, so that all workers count equally many targets."""
    if what == "teacher":
        huggingface.save(Transformer(config().model, seed=5).double(), tmp_path / "teacher")
        sets = (f"distill.teacher={tmp_path / 'teacher'}", "distill.share=0.75")
    elif what == "pruning":
        sets = ("compress.recipe=[prune]\nstructure = 'unstructured'\namount = 0.5",)
    else:
        lines = [json.dumps({"text": f"{number:07d}"}) for number in range(0, 5000, 7)]
        (tmp_path / "text.jsonl").write_text("\n".join(lines))
        sets = ("data.packing=documents", f"data.source={tmp_path / 'text.jsonl'}")
    for name, method in (("synchronous", "synchronous"), ("served", "server")):
        train(config(*SGD, *sets, f"train.method={method}", "train.steps=4", "evaluate.every=0"), tmp_path / name)
    assert_equal(tmp_path / "served", tmp_path / "synchronous", 1e-12)


def test_a_server_weighs_answers_as_data_parallelism_does(tmp_path: Path) -> None:
    """Workers whose conversations have more targets that count weigh more, and metrics are of all of them."""
    records = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x" * (1 + n * n % 11)}]}
        for n in range(300)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sets = (*SGD, f"data.source={tmp_path / 'chat.jsonl'}", "data.chat=true", "data.packing=none", "train.steps=4")
    sets += ("model.context=48", "optimizer.clip=0.1", "plan.microbatch=1", "train.batch=2", "evaluate.every=0")
    for method in ("synchronous", "server"):
        train(config(*sets, f"train.method={method}", "method.servers=2"), tmp_path / method)
    assert_equal(tmp_path / "server", tmp_path / "synchronous", 1e-12)
    assert_tell_the_same(tmp_path / "server", tmp_path / "synchronous")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local updates of replicas that are one rank each."""
    folder = tmp_path_factory.mktemp("replicas") / "run"
    train(config(*LOCAL), folder)
    return folder


@pytest.mark.parametrize(
    ("mesh", "sets"),
    [
        ("dp=2,tp=2", "plan.sequence_parallel=true"),
        ("dp=2,tp=2,pp=2", "plan.schedule=terapipe,plan.slices=2"),
        ("dp=2", "plan.offload=optimizer"),
        ("dp=2", "plan.offload=activations+weights,plan.prefetch=0,plan.recompute=full"),
        pytest.param("dp=2,tp=2", "", marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2", "plan.schedule=1f1b", marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2", "plan.schedule=dualpipe,plan.microbatch=1", marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2", "plan.schedule=zb-v,plan.offload=weights,plan.prefetch=0", marks=pytest.mark.slow),
    ],
)
def test_local_updates_of_replicas_that_are_meshes(replicas: Path, tmp_path: Path, mesh: str, sets: str) -> None:
    """DiLoCo, whose oracle is tests/cpu/test_methods_gradients.py, over every way to lay a replica out."""
    made = config(*LOCAL, *filter(None, [sets]), mesh=mesh)
    figures = train(made, tmp_path / "run")["method"]
    assert_equal(tmp_path / "run", replicas, 1e-10)
    assert figures["spread"] == pytest.approx(folders.read_small(replicas, SUMMARY)["method"]["spread"], rel=1e-8)


SERVED = ("model.layers=4", "model.tied=true", "optimizer.clip=0.5", "train.batch=8", "train.steps=3")


@pytest.fixture(scope="module")
def whole_batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data parallelism of replicas that are one rank each."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(config(*SERVED), folder)
    return folder


@pytest.mark.parametrize(
    ("mesh", "sets"),
    [
        ("dp=2,tp=2", "plan.sequence_parallel=true,method.servers=2"),
        ("dp=2,pp=2", "plan.schedule=dualpipe,plan.microbatch=1,method.servers=3"),
        pytest.param(
            "dp=2",
            "plan.offload=activations+weights,plan.prefetch=0,plan.recompute=full,method.servers=2",
            marks=pytest.mark.slow,
        ),
        pytest.param("dp=2,tp=2", "optimizer.name=muon", marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2", "plan.schedule=1f1b,method.servers=2", marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2", "plan.schedule=zb-v", marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2,pp=2", "plan.schedule=terapipe,plan.slices=2", marks=pytest.mark.slow),
    ],
)
def test_workers_that_are_meshes(whole_batches: Path, tmp_path: Path, mesh: str, sets: str) -> None:
    """By BSP with AdamW and clipping over every way to lay a worker out: data parallelism."""
    if "muon" in sets:
        whole_batches = tmp_path / "whole"
        train(config(*SERVED, "optimizer.name=muon"), whole_batches)
    made = config(*SERVED, "train.method=server", sets, mesh=mesh)
    summary = train(made, tmp_path / "run")
    assert_equal(tmp_path / "run", whole_batches, 1e-10)
    assert_tell_the_same(tmp_path / "run", whole_batches)
    assert len(summary["ranks"]) == len(summary["peak_memory_bytes"]) == made.ranks


def test_servers_step_adapters_and_workers_read_the_base(tmp_path: Path) -> None:
    huggingface.save(Transformer(config(*SERVED).model, seed=5).double(), tmp_path / "base")
    sets = (*SERVED, "lora.rank=2", "method.servers=2", "optimizer.lr=0.05")
    for name, mesh, more in (("whole", "dp=2", ()), ("run", "dp=2,tp=2", ("train.method=server",))):
        sets_now = [*SMALL, f"data.source={TEXT}", *sets, *more]
        train(load_config(sets=sets_now, mesh=mesh, init=tmp_path / "base"), tmp_path / name)
    assert_equal(tmp_path / "run", tmp_path / "whole", 1e-10)
    assert_tell_the_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("mesh", ["dp=1", pytest.param("dp=1,tp=2", marks=pytest.mark.slow)])
def test_servers_keep_float32_weights_of_workers_in_16_bits(mesh: str, tmp_path: Path) -> None:
    """One worker's gradients are divided and applied in float32, as without a server: the same bits."""
    sets = ("plan.precision=bf16-master", "train.steps=3", "checkpoint.every=2", "evaluate.every=0", "train.batch=2")
    for method, stop in (("server", 2), ("synchronous", None)):
        made = config(*sets, f"train.method={method}", mesh=mesh)
        train(made, tmp_path / method, stop_after=stop)
        if stop is not None:
            train(made, tmp_path / method, resume=True)
    assert_equal(tmp_path / "server", tmp_path / "synchronous", 0)
    assert any((value != value.bfloat16().float()).any() for value in weights(tmp_path / "server").values())


@pytest.mark.parametrize(
    ("scheme", "mesh", "sets", "like"),
    [
        ("top-k", "dp=2", "plan.zero=1", ""),
        ("int8", "dp=2", "plan.zero=2,plan.microbatch=1", "plan.microbatch=1"),
        # Layer by layer, as these are: what travels together is the same.
        ("one-bit", "dp=2", "plan.zero=3", "plan.offload=weights,plan.prefetch=0"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("powersgd,method.rank=1", "dp=2,pp=2", "plan.zero=2,plan.schedule=zb-v", "plan.schedule=zb-v"),
                ("top-k", "dp=4", "plan.zero=1,plan.zero_group=2", ""),
                ("random-k", "dp=2,tp=2", "plan.zero=3", "plan.offload=weights"),
            )
        ),
    ],
)
def test_compressed_gradients_of_which_ranks_keep_rows(
    scheme: str, mesh: str, sets: str, like: str, tmp_path: Path
) -> None:
    """Under ZeRO the sums are those that every rank would have: compressed data parallelism, of whole gradients at
    first, then with what is left out."""
    common = ("model.layers=4", "train.batch=8", "optimizer.clip=0.5", "method.start=2", f"method.compress={scheme}")
    common += ("train.steps=5", "evaluate.every=0", "checkpoint.every=5")
    for name, settings in (("rows", sets), ("whole", like)):
        train(config(*common, *filter(None, [settings]), mesh=mesh), tmp_path / name)
    assert_equal(tmp_path / "rows", tmp_path / "whole", 1e-10)
    rows, whole = (open_checkpoint(tmp_path / name) for name in ("rows", "whole"))
    left = [name for name in whole.names if name.startswith("mean_residual")]
    assert any(whole.whole(name).any() for name in left)
    for name in left:
        torch.testing.assert_close(rows.whole(name), whole.whole(name), rtol=0, atol=1e-10)
    assert_tell_the_same(tmp_path / "rows", tmp_path / "whole")


ASP = ("train.method=server", "method.consistency=asp")


@pytest.mark.parametrize(("method", "late_s"), [(ASP, 0.0), (ASP, 0.5), (("train.method=local",), 0.0)])
def test_metrics_are_of_all_replicas(
    method: tuple[str, ...], late_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a learning rate of nearly 0 a step's loss and norm are those of its batch at the first weights.

    `late_s`: so long after the servers begin does the first worker read; others may push meanwhile."""
    begin = ServerLink.start

    def begin_late(*arguments: Any, **options: Any) -> None:
        begin(*arguments, **options)
        time.sleep(late_s)

    monkeypatch.setattr(ServerLink, "start", begin_late)
    made = config(*SGD, "optimizer.lr=1e-14", *method, "method.period=4")
    train(made, tmp_path / "run")
    alone = run_threads(1, lambda comm: comm)[0]
    laid, corpus = lay_model(as_worker(made), Mesh(alone), torch.device("cpu"), False), open_corpus(made.data)
    of_push = {}
    for worker in (0, 1):
        source = WorkerSource(made, corpus, Axis("dp", 2, worker, (0,), alone), torch.device("cpu"))
        for clock in range(8):
            pairs = [tensors for tensors, _ in source.fetch(clock + 1)]
            tokens, targets = (torch.cat(column) for column in zip(*pairs, strict=True))
            loss = torch.nn.functional.cross_entropy(laid.module(tokens).flatten(0, 1), targets.flatten())
            grads = torch.autograd.grad(loss, list(laid.module.parameters()))
            of_push[worker, clock] = loss.item(), float(sum(grad.square().sum() for grad in grads))
    steps = [[(worker, clock) for worker in (0, 1)] for clock in range(8)]
    if "server" in method[0]:  # what was applied between two reads of the first worker, and before the first of them
        steps, since = [], []
        for event in read_record(tmp_path / "run" / SERVER_RECORDS / "0.jsonl"):
            since += event.pushes if event.kind == "apply" else ()
            if event.kind == "pull" and event.pushes[0].worker == 0:
                steps, since = [*steps, since], []
        assert steps[0] or not late_s
        steps = [[*steps[0], *steps[1]], *steps[2:]]
    figures = told(tmp_path / "run")
    assert len(figures) == len(steps) == 8
    for step, pushes in enumerate(steps, start=1):
        losses, squares = zip(*(of_push[tuple(push)] for push in pushes), strict=True)
        expected = sum(losses) / len(pushes), math.sqrt(sum(squares) / len(pushes))
        assert figures[step] == pytest.approx(expected, rel=1e-6)


CLIP = "optimizer.clip=0.1"  # below the norm of every step's gradient


@pytest.fixture(scope="module")
def clipped(tmp_path_factory: pytest.TempPathFactory, synchronous: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "clipped"
    train(config(*SGD, CLIP), folder)
    with pytest.raises(AssertionError):
        assert_equal(folder, synchronous, 1e-3)
    return folder


@pytest.mark.parametrize(
    "sets",
    [
        ("train.method=server", "method.servers=3"),
        ("train.method=server", "method.consistency=ssp", "method.staleness=0"),
        ("train.method=local", "method.period=1"),
        ("method.compress=top-k", "method.keep=1"),
    ],
)
def test_methods_that_are_data_parallelism_clip_the_mean_of_all_gradients(
    sets: tuple[str, ...], clipped: Path, tmp_path: Path
) -> None:
    """By the norm of the whole model, of which each server has a part."""
    train(config(*SGD, CLIP, *sets), tmp_path / "run")
    assert_equal(tmp_path / "run", clipped, 1e-12)


def test_a_run_with_servers_that_is_out_of_time_goes_on_as_if_it_never_stopped(tmp_path: Path) -> None:
    """Its first worker stops after the first step, wherever others are; what these have pushed since is not kept."""
    sets = (*SGD, "train.method=server", "method.servers=2")
    train(config(*sets), tmp_path / "whole")
    summary = train(config(*sets, "train.max_time_s=0.001"), tmp_path / "stopped")
    assert (summary["step"], summary["interrupted"]) == (1, True)
    assert [rank["name"] for rank in summary["ranks"]] == ["worker 0", "worker 1", "server 0", "server 1"]
    train(config(*sets), tmp_path / "stopped", resume=True)
    assert_equal(tmp_path / "whole", tmp_path / "stopped", 0)


def test_steps_of_servers_are_those_of_a_run_that_still_has_some(tmp_path: Path) -> None:
    folder, kept = tmp_path / "run", []
    for last, method in enumerate(("server", "synchronous"), start=1):
        train(config(f"train.method={method}", f"train.steps={last}"), folder, resume=last > 1)
        kept.append(open_checkpoint(folder).manifest.values.get("server_steps"))
    assert kept == [[1], None]


def test_a_first_worker_that_was_given_up_goes_on_where_the_others_are(tmp_path: Path) -> None:
    """It hangs after its second step for longer than servers wait; the other goes on to the end without it."""
    said = []

    def hear(event: Any) -> None:
        if event["kind"] == "say":
            said.append(event["text"])
        if event["kind"] == "step" and event["step"] == 2:
            time.sleep(5.0)

    summary = train(config(*SGD, "train.method=server", "train.timeout_s=6"), tmp_path / "run", hear=hear)
    (server,) = summary["method"]["servers"]
    assert summary["step"] == server["updates"] == 8
    assert checkpoints(tmp_path / "run" / CHECKPOINTS)[0][0] == 8
    assert any(text.startswith("LATE: this rank was waited for no more in step 3") for text in said)
    assert "2 workers (dp) + 1 server = 3 ranks" in said[0]


def test_a_worker_whose_loss_is_no_number_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It pushes nothing, so that it would make the same step for ever."""
    monkeypatch.setattr("tilemesh.train.servers.read", lambda steps: [(math.nan, math.nan)])
    with pytest.raises(RunError, match="worker 1, step 1: loss is nan"):
        train(config("train.method=server"), tmp_path / "run")


def test_a_replica_without_an_update_meets_the_others_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that step alone, one comes to no number in the step after which they average."""
    real = steps.Stepper._gradients

    def spoilt(stepper: steps.Stepper, number: int, batches: Any) -> Any:
        done = real(stepper, number, batches)
        return dataclasses.replace(done, norm=math.nan) if (number, stepper.laid.mesh.dp.index) == (2, 1) else done

    monkeypatch.setattr(steps.Stepper, "_gradients", spoilt)
    with pytest.raises(RunError, match="step 2: the gradient's norm is nan"):
        train(config("train.method=local", "method.period=2", "plan.precision=fp16"), tmp_path / "run")


def test_what_would_be_started_counts_servers() -> None:
    lines = dict(preview(config("train.method=server", "method.servers=2")).lines())
    assert lines["layout"].startswith("2 workers (dp) + 2 servers = 4 ranks, ")
    seen = preview(config("train.method=server", mesh="dp=1"))
    assert dict(seen.lines())["layout"].startswith("1 worker (dp) + 1 server = 2 ranks, ")
    assert "ranks exchange through" in dict(seen.lines())["layout"]
    assert seen.rows()[0].case["ranks"] == 2


def test_asp_comes_to_its_end_with_its_figures(tmp_path: Path) -> None:
    summary = train(config("train.method=server", "method.consistency=asp", "method.batch=2"), tmp_path / "run")
    (server,) = summary["method"]["servers"]
    assert sum(count for _, count in server["staleness"]) == 16
    assert summary["held_out"] > 0
    assert server["given_up"] == []
    page = render(read_run(tmp_path / "run"), Beside())
    assert "Staleness" in page
    assert "workers waited for others" in page
    assert "Divergence from synchronous training" in page
    assert 0 <= server["divergence"]["mean"] <= server["divergence"]["most"] < 1
    assert server["divergence"]["gradients"] > 0
    sent = sum(tensor.nbytes for tensor in weights(tmp_path / "run").values())
    # Two workers and a server are three ranks, which exchange the weights each way in every step.
    assert summary["world"] == 3
    assert [rank["name"] for rank in summary["ranks"]] == ["worker 0", "worker 1", "server 0"]
    assert summary["exchanges"] == {"server": {"push": sent, "pull": sent}}
    assert summary["shares"]["exchange"] > 0
    assert len(summary["peak_memory_bytes"]) == 3
    assert "dp 2 x tp 1 + 1 server = 3 ranks" in page
    assert "2 workers (dp) and 1 server" in page
    assert "One rank" not in page
    assert server["bytes"] == pytest.approx(sent * (16 + server["pulls"]), rel=1e-9)


@pytest.mark.parametrize(
    ("consistency", "batch", "stops", "mesh"),
    [
        ("asp", 1, (), "dp=2"), ("ssp", 1, (), "dp=2,pp=2"), ("asp", 2, (), "dp=2"), ("ssp", 1, (6, 4), "dp=2"),
        ("asp", 1, (6, 0), "dp=2,tp=2"), ("bsp", 1, (), "dp=2"),
    ],
)  # fmt: skip
def test_an_asynchronous_run_is_the_serial_replay_of_its_record(
    consistency: str, batch: int, stops: tuple[int, ...], mesh: str, tmp_path: Path
) -> None:
    """Two workers and two servers train; what the servers wrote of it is done again in one process.

    `stops`: after which step it is stopped, and the checkpoint that it goes on from where that is an earlier one, as
    after a kill; 0: none, it begins anew. Under BSP servers clip, and say by how much."""
    method = (f"method.consistency={consistency}", "method.staleness=1", f"method.batch={batch}", "method.servers=2")
    clip = (CLIP,) if consistency == "bsp" else ()
    made, folder = config(*SGD, "model.layers=2", "train.method=server", *method, *clip, mesh=mesh), tmp_path / "run"
    if stops:
        train(made, folder, stop_after=stops[0])
        for lost in (folder / CHECKPOINTS).iterdir() if len(stops) > 1 else ():
            if int(lost.name.rpartition("-")[2]) > stops[1]:
                shutil.rmtree(lost)
    train(made, folder, resume=bool(stops))
    whole = [read_record(file) for file in sorted((folder / SERVER_RECORDS).iterdir())]
    assert [sum(event.kind == "start" for event in events) for events in whole] == [1 + bool(stops)] * 2
    if len(stops) > 1:
        assert all(len(standing(events)) < len(events) for events in whole)
    records = [standing(events) for events in whole]
    if stops != (6, 4):  # there, of who was ahead of worker 0 or behind it, steps are done twice or lost
        assert [sum(event.kind == "push" for event in events) for events in records] == [16, 16]
    alone = run_threads(1, lambda comm: comm)[0]
    laid = lay_model(as_server(made), Mesh(alone), torch.device("cpu"), False)
    laid_before = {name: mine.tensor.detach().clone() for name, mine in laid.gradients.stepped.items()}
    shards = [server_shard(made, laid.gradients.stepped, number) for number in (0, 1)]
    vectors = FlatWeights(laid.gradients.stepped, 2)
    corpus = open_corpus(made.data)
    sources = [WorkerSource(made, corpus, Axis("dp", 2, worker, (0,), alone), torch.device("cpu")) for worker in (0, 1)]

    def gradient(push: Push, read: list[torch.Tensor]) -> list[torch.Tensor]:
        vectors.flat.copy_(torch.cat(read))
        batches = sources[push.worker // made.plan.tp].fetch(push.clock + 1)
        for turn, (tensors, _) in enumerate(batches):
            laid.gradients.backward(*laid.loss(*tensors), last=turn == len(batches) - 1)
        laid.gradients.finish()
        whole = torch.cat([mine.tensor.grad.reshape(-1) for mine in vectors.held.values()])
        return [whole[cut].clone() for cut in vectors.cuts]

    replay(
        records,
        lambda server: shards[server].weights.clone(),
        gradient,
        lambda server, pushes, gradients, scale: mean_update(shards[server], pushes, gradients, 2, scale),
    )
    found = weights(folder)
    ends = dict(zip(vectors.held, vectors.split(torch.cat([shard.weights for shard in shards])), strict=True))
    for name, value in ends.items():
        torch.testing.assert_close(found[f"weight:{name}"], value, rtol=0, atol=1e-10)
        assert not torch.equal(value, laid_before[name])


def test_compression_and_local_updates_tell_what_they_saved(tmp_path: Path) -> None:
    figures = train(config("method.compress=powersgd", "method.rank=1"), tmp_path / "a")["method"]
    assert figures["sent_bytes"] < 0.5 * figures["whole_bytes"]
    page = render(read_run(tmp_path / "a"), Beside())
    assert "Gradients compressed by powersgd" in page
    assert "Divergence from synchronous training" in page
    assert 0 < figures["left_out"] < 1
    figures = train(config("train.method=local", "method.period=4"), tmp_path / "b")["method"]
    assert (figures["rounds"], figures["steps"]) == (2, 8)
    assert 0 < figures["spread"] < 1
    assert "Weights averaged every 4 steps, 2 times" in render(read_run(tmp_path / "b"), Beside())


@pytest.mark.parametrize("name", ["pipedream", pytest.param("pipemare", marks=pytest.mark.slow)])
def test_states_on_the_host_come_for_each_update_within_a_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several parts, which move though host and device are one: the bits of a run whose states stay."""
    monkeypatch.setattr(rank, "HostOptimizer", functools.partial(HostOptimizer, part_bytes=20_000, moves=True))
    sets = (*PIPED, f"plan.schedule={name}", "train.batch=8", "train.steps=4", "evaluate.every=0")
    for offload in ("", "optimizer"):
        train(config(*sets, f"plan.offload={offload}", mesh="pp=2"), tmp_path / f"run{offload}")
    assert_equal(tmp_path / "runoptimizer", tmp_path / "run", 0)


@pytest.mark.parametrize("name", ["pipedream-2bw", "ampnet"])
def test_an_asynchronous_pipeline_learns_and_tells_its_versions(name: str, tmp_path: Path) -> None:
    """By AdamW, in as many updates as its list has: more than one for each step."""
    made = config(*PIPED, f"plan.schedule={name}", "train.batch=8", "optimizer.lr=0.01", mesh="pp=2")
    summary = train(made, tmp_path / "run")
    figures = summary["method"]
    assert figures["updates"] == 8 * figures["updates_per_step"] == 8 * (2 if name == "pipedream-2bw" else 4)
    assert figures["versions"] == ([2, 2] if name == "pipedream-2bw" else [1, 1])
    assert summary["held_out"] < 5.0  # of 5.55 at first
    page = render(read_run(tmp_path / "run"), Beside())
    assert f"{name}: {figures['updates']} updates" in page
    assert "delay in updates" in page
    assert 0 < figures["divergence"] < 1


@pytest.mark.parametrize(
    ("sets", "mesh", "words"),
    [
        (("plan.schedule=ampnet", "model.layers=2", "model.tied=true"), "pp=2", "model.tied=false"),
        (("plan.schedule=ampnet", *PIPED, "optimizer.clip=1"), "pp=2", "optimizer.clip=0"),
        (("plan.schedule=ampnet", *PIPED, "plan.zero=1"), "dp=2,pp=2", "zero=0"),
        (("plan.schedule=ampnet", *PIPED, "plan.recompute=full"), "pp=2", "recompute=none"),
        (("plan.schedule=pipemare", *PIPED, "plan.recompute=operators"), "pp=2", "recompute=none"),
        (("plan.schedule=ampnet",), "dp=2", "schedule=1f1b"),
        (("train.method=server", "plan.zero=1"), "dp=2", "plan.zero=0"),
        (("train.method=local", "plan.zero=1"), "dp=2", "plan.zero=0"),
        (("train.method=server", "method.servers=500"), "dp=2", "set method.servers="),
        (("train.method=local", "method.period=3"), "dp=2", "multiples"),
        (("train.method=local",), "dp=1", "set plan.dp=2"),
        (("method.compress=int8", "train.method=server"), "dp=2", "method.compress=none"),
        (("method.keep=0",), "dp=2", "method.keep"),
    ],
)
def test_what_is_refused(sets: tuple[str, ...], mesh: str, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace(".", r"\.")):
        config(*sets, mesh=mesh)


@pytest.mark.parametrize(
    "settings", ["", "model.biases=true", "model.tied=false,model.norm=layernorm", "model.qk_norm=full"]
)
def test_as_many_servers_as_tensors_are_accepted(settings: str) -> None:
    made = config(*[settings] if settings else [], mesh="dp=2")
    tensors = len(list(Transformer(made.model).parameters()))
    rest = [settings] if settings else []
    assert config("train.method=server", f"method.servers={tensors}", *rest, mesh="dp=2").servers == tensors
    with pytest.raises(UsageError, match=f"set method.servers={tensors}$"):
        config("train.method=server", f"method.servers={tensors + 1}", *rest, mesh="dp=2")


def test_the_bias_of_a_router_moves_by_the_share_of_the_workers_that_pushed() -> None:
    made = config("train.method=server", "model.experts=4", "model.router_bias=true", "model.router_scores=sigmoid")
    alone = run_threads(1, lambda comm: comm)[0]
    held = lay_model(as_server(made), Mesh(alone), torch.device("cpu"), False).gradients.stepped
    shard = server_shard(made, {name: mine for name, mine in held.items() if name.endswith("router.bias")}, 0)
    before = shard.weights.clone()
    for share in (0.5, 1.0):
        shard.apply(torch.ones_like(before), 1, share)
    torch.testing.assert_close(before - shard.weights, torch.full_like(before, 1.5 * made.optimizer.balance_rate))


def test_parameters_are_shared_out_among_servers() -> None:
    assert server_cuts([4, 4, 4, 4], 2) == [range(2), range(2, 4)]
    assert server_cuts([100, 1, 1], 3) == [range(1), range(1, 2), range(2, 3)]
    for servers in range(1, 8):
        cuts = server_cuts([3, 9, 1, 1, 20, 7, 2], servers)
        assert [place for cut in cuts for place in cut] == list(range(7))
        assert all(len(cut) for cut in cuts)
