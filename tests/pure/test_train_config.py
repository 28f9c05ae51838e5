"""One frozen config: presets, files, settings, meshes; what cannot be is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.train import config
from tilemesh.train.config import PRESETS
from tilemesh.train.load import load, settled


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_settles_and_survives_its_file(name: str) -> None:
    made = load(name)
    assert config.from_toml(made.to_toml()) == made
    assert settled(made) == made
    assert made.plan.batch == made.batch == made.train.batch


def test_the_default_is_two_by_two_on_a_cpu_and_one_rank_a_gpu() -> None:
    cpu = load()
    assert (cpu.plan.dp, cpu.plan.tp, cpu.plan.precision) == (2, 2, "fp32")
    gpu = load(gpus=8)
    assert (gpu.plan.dp, gpu.plan.tp, gpu.plan.precision) == (8, 1, "bf16")
    assert load(gpus=8, mesh="dp=2,tp=2").plan.world == 4


def test_a_files_own_layout_holds_where_there_are_gpus(tmp_path: Path) -> None:
    written = "[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 16\n[train]\nbatch = 8\n"
    (tmp_path / "laid.toml").write_text(written + "[plan]\ndp = 2\n")
    assert load(str(tmp_path / "laid.toml"), gpus=8).plan.dp == 2
    (tmp_path / "open.toml").write_text(written)
    assert load(str(tmp_path / "open.toml"), gpus=8).plan.dp == 8


@given(dp=st.sampled_from([1, 2, 4, 8, 16]), tp=st.sampled_from([1, 2]))
def test_a_mesh_changes_how_the_batch_is_cut_and_not_the_batch(dp: int, tp: int) -> None:
    made = load(mesh=f"dp={dp},tp={tp}")
    assert made.batch == load().batch
    assert made.plan.dp * made.plan.microbatch * made.plan.accumulation == made.batch
    assert made.plan.microbatch <= PRESETS["default"]["plan"]["microbatch"]


def test_ranks_without_a_mesh() -> None:
    assert (load(ranks=2).plan.dp, load(ranks=2).plan.tp) == (1, 2)
    assert (load(ranks=1).plan.dp, load(ranks=1).plan.tp) == (1, 1)
    with pytest.raises(UsageError, match="ranks is 3 and the mesh has 4"):
        load(ranks=3, mesh="dp=2,tp=2")


def test_a_plan_says_layout_and_batch(tmp_path: Path) -> None:
    plan = ParallelPlan(dp=2, tp=1, microbatch=3, accumulation=2, precision="fp32")
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    made = load(plan=tmp_path / "plan.toml")
    assert made.plan == plan
    assert made.batch == 12
    with pytest.raises(UsageError, match="give one of them"):
        load(plan=tmp_path / "plan.toml", mesh="dp=2")
    over = load(plan=tmp_path / "plan.toml", sets=["plan.precision=bf16,plan.microbatch=2", "train.batch=8"])
    assert (over.plan.precision, over.plan.dp, over.plan.microbatch, over.batch) == ("bf16", 2, 2, 8)


def test_a_file_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\nlayers=2\nwidth=32\nheads=2\nvocabulary=256\ncontext=16\n[train]\nbatch=4\n")
    made = load(str(path), sets=["train.steps=7,optimizer.lr=0.5", "plan.recompute=full,plan.recompute_every=sqrt"])
    assert (made.train.steps, made.optimizer.lr, made.batch, made.context) == (7, 0.5, 4, 16)
    assert made.plan.stretch(made.model.layers) == 1
    assert load(sets=["plan.recompute=full,plan.recompute_every=sqrt"]).plan.stretch(16) == 4
    assert load(sets=["plan.recompute=full"]).plan.stretch(16) == 1
    assert load().plan.stretch(16) == 0


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ("train.step=3", "did you mean 'train.steps'"),
        ("lr=3", "did you mean 'optimizer.lr'"),
        ("train.batch=15", "does not divide among dp=2"),
        ("train.steps=0", "train.steps is 0: expected at least 1"),
        ("train.context=999", "between 1 and model.context, 128"),
        ("data.held_out=1", "data.held_out is 1.0: expected at least 0 and below 1"),
        ("checkpoint.every=-1", "expected 0 or more"),
        ("plan.recompute=full,plan.recompute_every=-2", "recompute_every is -2: expected a whole number, between 1"),
        ("plan.recompute_every=2", "only full recomputation has stretches of layers; set plan.recompute=full"),
        ("plan.zero=4", "zero is 4: expected a whole number, between 0 and 3"),
        ("plan.dp=1,plan.zero=1", "plan.zero is 1 and dp is 1: ZeRO shares among replicas and there is one; set plan"),
        ("plan.dp=8,plan.zero=1,plan.zero_group=3", "zero_group is 3 and dp is 8: .*; set plan.zero_group=2"),
        ("plan.offload=optimiser", "did you mean 'optimizer'"),
        ("optimizer.name=adam", "did you mean 'adamw'"),
        ("optimizer.clip=nan", "expected 0 or more"),
        ("train.graph=true", "train.graph=true is for one GPU alone"),
        ("train.graph=true,plan.dp=1,plan.tp=1,plan.precision=fp16", "any precision but fp16"),
        ("train.graph=true,plan.dp=1,plan.tp=1,optimizer.fused=false", "a fused optimiser"),
        ("train.graph=true,plan.dp=1,plan.tp=1,train.device=cpu", "for one GPU alone"),
    ],
)
def test_what_cannot_be_is_refused(sets: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load(sets=[sets])


@pytest.mark.parametrize("mesh", ["dp=0", "ep=2", "dp", "dp=two"])
def test_a_mesh_that_is_none(mesh: str) -> None:
    with pytest.raises(UsageError):
        load(mesh=mesh)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'gpt2-124m'"):
        load("gpt2")


def test_a_file_without_a_word_on_microbatches_takes_a_replicas_rows_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    model = "[model]\nlayers=1\nwidth=16\nheads=2\nmlp_width=32\ncontext=16\nvocabulary=256\n"
    path.write_text(f"{model}[train]\nbatch=12\n[plan]\ndp=2\n")
    assert (load(str(path)).plan.microbatch, load(str(path)).plan.accumulation) == (6, 1)
    asked = load(str(path), sets=["plan.microbatch=2"]).plan
    assert (asked.microbatch, asked.accumulation) == (2, 3)


def test_the_small_model_trains_by_the_name_the_planner_knows_it_by() -> None:
    assert load("tiny") == load()
