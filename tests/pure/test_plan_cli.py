"""`tilemesh plan`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilemesh.cli.main import make_app, redirected
from tilemesh.cli.models import load_model
from tilemesh.core import calibration, config
from tilemesh.core.calibration import Calibration, Rates
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import PART
from tilemesh.core.hardware import A100, H100, parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import preset
from tilemesh.model.families.book import to_json
from tilemesh.plan.choose import search
from tilemesh.train.config import TrainConfig

MEGATRON_530B = [
    "gpt3-175b", "--set", "model.layers=105,model.width=20480,model.heads=128,model.vocabulary=51200",
    "--cluster", "280xa100", "--batch", "280",
    "--fix", "tp=8,pp=35,interleave=3,microbatch=1,recompute=selective,sequence_parallel=yes",
    "--fix", "attention=materialized,zero=0",
]  # fmt: skip


def invoke(arguments: list[str], **options: Any) -> Any:
    line = redirected(["plan", *arguments])
    return CliRunner(env=options.pop("env", None)).invoke(make_app(line), line, **options)


def run(*arguments: str) -> Any:
    result = invoke(list(arguments), env={"COLUMNS": "160"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result


@pytest.mark.parametrize(
    "arguments",
    [
        ["llama-3-8b", "--cluster", "8xh100", "--explain"],
        ["llama-3-70b", "--cluster", "64xh100", "--batch-tokens", "4M", "--fix", "tp=8"],
        ["--draw", "1f1b", "--stages", "4", "--microbatches", "8"],
    ],
    ids=["explain", "layouts", "draw"],
)
def test_in_a_pipe_everything_fits_100_columns(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = invoke(arguments, catch_exceptions=False).stdout.splitlines()
    assert len(lines) > 10
    assert max(len(line) for line in lines if not line.startswith("next: ")) <= 100  # a command is not broken


def test_json_has_every_figure_by_name() -> None:
    out = run(*MEGATRON_530B, "--json", "-")
    (best,) = [json.loads(line) for line in out.stdout.splitlines()]
    assert best["step_time_s"] == pytest.approx(37.83, rel=0.05)
    assert best["tokens_per_s"] == pytest.approx(280 * 2048 / best["step_time_s"])
    assert best["mfu"] == pytest.approx(0.56, rel=0.05)
    assert best["memory"]["activations_bytes"] / 2**30 == pytest.approx(23.1, abs=0.05)
    for term in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert best["memory"][term] > 0
    assert best["bubble_fraction"] == pytest.approx(34 / 874)
    assert set(best["traffic"]) == {"tp", "pp", "dp"}
    assert best["trainable"].startswith(("yes", "no, "))
    assert "layouts" not in out.stdout  # words go to the other stream


def test_what_the_model_and_the_defaults_of_training_refuse_is_said_before() -> None:
    """An asynchronous schedule has neither tied tables nor clipping; a layout of this model that has none trains."""
    asked = ("gpt2-124m", "--cluster", "2xh100", "--batch", "8", "--json", "-", "--fix")
    known = {
        fixed: json.loads(run(*asked, fixed).stdout.splitlines()[0])["trainable"]
        for fixed in ("pp=2,schedule=pipedream", "pp=2,schedule=1f1b")
    }
    assert known["pp=2,schedule=1f1b"] == "yes"
    assert "model.tied is true" in known["pp=2,schedule=pipedream"]
    assert "set optimizer.clip=0" in known["pp=2,schedule=pipedream"]


def test_the_table_and_why() -> None:
    out = run("llama-3-8b", "--cluster", "16xh100", "--batch-tokens", "1M").stdout
    assert "8,030,261,248 parameters on 2x8xh100" in out
    assert re.search(r"\byes\b|no, ", out)
    assert "Why the first" in out
    assert "runner-up" in out
    small = " ".join(run("tiny", "--cluster", "8xh100", "--batch-tokens", "8k").stdout.split())
    assert "GiB per GPU as well" in small


def test_a_name_that_is_neither_preset_nor_folder_is_told_so() -> None:
    with pytest.raises(UsageError, match=r"unknown model 'modle': .*; or a folder or file, and none is here"):
        run("modle", "--cluster", "8xh100")


def test_no_figure_is_cut_in_a_narrow_terminal() -> None:
    out = invoke(
        ["llama-3-70b", "--cluster", "64xh100", "--batch-tokens", "4M", "--fix", "attention=materialized,tp=8"],
        env={"COLUMNS": "60"},
        catch_exceptions=False,
    )
    assert out.exit_code == 0
    assert "…" not in out.stdout
    table = [line for line in out.stdout.splitlines() if re.match(r" *\d+ +\d+ +\d+ ", line)]
    assert len(table) == 10
    assert max(map(len, table)) <= 100
    # What training lacks for a layout stands once below the table, under the mark of its lines.
    assert re.search(r"no \[1\]", out.stdout)
    assert re.search(r"^\[1\] no, attention is materialized", out.stdout, re.MULTILINE)


RATES = Rates(
    {"fp32": 40e9, "bf16": 1e9}, copy_bytes_per_s=30e9, launch_s=8e-6, elementwise_bytes_per_s=25e9,
    exponentials_per_s=3e8, attention_flops_per_s={"forward-32": 8e9, "backward-32": 9e9},
)  # fmt: skip
THIS_BOX = Calibration("id", "a box", "today", one_core=RATES, all_cores=RATES)


def test_figures_of_this_machine_are_said_to_be_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "find", lambda machine_id: THIS_BOX)
    printed = run("tiny", "--cluster", "2xlocal-cpu", "--batch", "16").output.replace("\n", " ")
    assert "eager (on this machine, as `tilemesh calibrate` measured it)" in printed
    assert "H200" not in printed
    assert "as measured on an H200" in run("tiny", "--cluster", "2xh100", "--batch", "16", "--code", "eager").output


def test_the_least_that_one_rank_needs_is_the_less_of_recomputing_and_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "find", lambda machine_id: THIS_BOX)
    small = ["tiny", "--set", "model.layers=1,model.width=32,model.heads=2,model.context=16", "--batch", "4"]
    printed = run(*small, "--cluster", "1xlocal-cpu", "--fix", "microbatch=1,recompute=none", "--json", "-").output
    assert "with one sequence at a time." in printed
    assert "everything recomputed" not in printed
    assert "everything recomputed" in run("gpt2-124m", "--cluster", "2xh100", "--batch", "16").output


@pytest.mark.parametrize("cluster", ["4xlocl", "lokal", "4xlocal-gpu", "2x4xlocal"])
def test_a_cluster_that_is_nearly_local(cluster: str) -> None:
    with pytest.raises(UsageError, match=r"did you mean 'local|write local, 4xlocal"):
        run("tiny", "--cluster", cluster)


def test_explain_without_a_cluster_is_the_models_arithmetic() -> None:
    assert "FLOPs of a step over 8 sequences" in run("gpt3-175b", "--explain", "--batch", "8").stdout
    out = run("gpt3-175b", "--explain").stdout
    for words in ("174,604,259,328", "350 GB", "2,100 GB", "12 M/64", "KV cache", "Amdahl", "Gustafson", "FLOP/B"):
        assert words in out


def test_explain_with_a_cluster_shows_formulas_and_numbers() -> None:
    out = run(*MEGATRON_530B, "--explain").stdout
    for words in (
        "178,257,920 B per layer",
        "139 and 71 of a chunk",
        "23.1 GiB",
        "(p - 1) / (v m + p - 1)",
        "MFU",
        "HFU",
        "Karp-Flatt",
        "ridge",
    ):
        assert words in out


def test_save_is_what_a_plan_file_is(tmp_path: Path) -> None:
    path = tmp_path / "new" / "PLAN.toml"
    out = run(*MEGATRON_530B, "--out", str(path)).stdout
    assert "cannot run it: attention is materialized" in out
    assert "for one it can: --fix attention=fused" in out
    data = config.read_toml(path)
    model, context = data.pop("model"), data.pop("train")["context"]
    assert data.pop("kind") == "train"
    found = config.from_dict(ParallelPlan, data)
    assert (found.tp, found.pp, found.interleave, found.accumulation) == (8, 35, 3, 280)
    assert (model["layers"], model["width"], context) == (105, 20480, 2048)
    assert "# predicted:" in path.read_text()


def test_html_is_written(tmp_path: Path) -> None:
    run("tiny", "--cluster", "4xcpu", "--batch", "32", "--html", str(tmp_path / "p.html"))
    assert "<svg" in (tmp_path / "p.html").read_text()


def test_settings_change_a_preset_and_a_file_is_a_model(tmp_path: Path) -> None:
    changed = load_model("gpt3-175b", ["model.width=20480,model.heads=128"])
    assert (changed.mlp_width, changed.kv_heads) == (81920, 128)
    (tmp_path / "m.toml").write_text("[model]\nlayers = 2\nwidth = 64\nheads = 4\nvocabulary = 256\ncontext = 32\n")
    assert load_model(str(tmp_path / "m.toml"), []).layers == 2
    assert load_model("llama-3-8b", []) == preset("llama-3-8b")


def test_a_training_file_is_planned_for_its_own_batch_and_context(tmp_path: Path) -> None:
    model, plan = "[model]\nlayers = 2\nwidth = 64\nheads = 4\nvocabulary = 256\ncontext = 64\n", tmp_path / "plan.toml"
    said = {}
    for name, more in (("loop", "[train]\nbatch = 24\ncontext = 32\n"), ("layout", "[plan]\ndp = 2\nmicrobatch = 6\n")):
        (tmp_path / f"{name}.toml").write_text(model + more)
        said[name] = run(str(tmp_path / f"{name}.toml"), "--cluster", "2xcpu", "--out", str(plan)).stdout
        said["plan"] = run(str(plan), "--cluster", "2xcpu").stdout
        sizes = [words.split("batch of ")[1].split("(")[0].split() for words in (said[name], said["plan"])]
        assert sizes[0] == sizes[1]
    assert "batch of 24 sequences x 32 tokens" in " ".join(said["loop"].split())
    assert "batch of 12 sequences x 64 tokens" in " ".join(said["layout"].split())
    typed = run(str(tmp_path / "loop.toml"), "--cluster", "2xcpu", "--batch", "8", "--context", "16").stdout
    assert "batch of 8 sequences x 16 tokens" in " ".join(typed.split())


def test_a_file_whose_text_is_read_as_bytes_need_not_say_the_vocabulary(tmp_path: Path) -> None:
    model = "[model]\nlayers = 2\nwidth = 64\nheads = 4\ncontext = 32\n"
    (tmp_path / "run.toml").write_text(f"{model}[data]\nsource = 'text.txt'\n")
    assert load_model(str(tmp_path / "run.toml"), []).vocabulary == 256
    (tmp_path / "run.toml").write_text(f"{model}[data]\ntokenizer = 'folder'\n")
    with pytest.raises(UsageError, match=r"missing key 'model\.vocabulary'"):
        load_model(str(tmp_path / "run.toml"), [])


def test_a_model_is_read_from_whatever_holds_one(tmp_path: Path) -> None:
    """A Hugging Face folder and its config.json, a run's folder and its configuration, a saved plan: one model."""
    model = preset("llama-3-8b")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(to_json(model, "bfloat16")))
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "config.toml").write_text(config.dump_toml(TrainConfig(model)))
    run("llama-3-8b", "--cluster", "8xh100", "--batch", "8", "--out", str(tmp_path / "plan.toml"))
    for name in ("hf", "hf/config.json", "run", "run/config.toml", "plan.toml"):
        assert load_model(str(tmp_path / name), []) == model
    assert load_model(str(tmp_path / "hf"), ["model.width=2048"]).head_width == 64


def test_a_folder_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("dp = 2\n")
    (tmp_path / "text").write_text("")
    (tmp_path / "none").mkdir()
    half = tmp_path / "half"
    half.mkdir()
    (half / f".unfinished{PART}").touch()
    for name, words in {
        "half": "half-written: the command that wrote it was killed",
        "none": "has neither config.json nor config.toml",
        "missing/model": "is not there: expected a preset",
        "text": "is a file: expected a preset",
        "no.json": "does not exist",
        "plan.toml": r"has no \[model\] section",
    }.items():
        with pytest.raises(UsageError, match=words):
            load_model(str(tmp_path / name), [])


def test_nodes_of_two_kinds_go_at_the_pace_of_the_least() -> None:
    mixed = parse_cluster("16xh100+8xa100")
    assert (mixed.name, mixed.world) == ("2x8xh100+1x8xa100-80", 24)
    assert parse_cluster(mixed.name) == mixed
    for name in ("memory_bytes", "usable_bytes", "memory_bytes_per_s"):
        assert getattr(mixed.device, name) == min(getattr(device, name) for device in (A100, H100))
    assert mixed.device.peak_flops_per_s["bf16"] == A100.peak_flops_per_s["bf16"]
    assert "fp8" not in mixed.device.peak_flops_per_s
    words = run("llama-3-8b", "--cluster", "8xh100+8xa100", "--batch", "64").stdout
    together, fast, slow = (float(found) for found in re.findall(r"(\d+\.?\d*)k\s+tokens/s", words)[-3:])
    same = search("llama-3-8b", "16xa100", batch=64).best.tokens_per_s / 1e3
    # The memory of an H100 is the smaller one, by 0.2 %: another layout may be first, and none is faster.
    assert 0.98 * same < together < 1.005 * same
    assert fast > slow


@pytest.mark.parametrize(
    ("cluster", "words"),
    [("4xh100+8xa100", "nodes of 4 and of 8"), ("8xh100+8xcpu", "GPUs and CPUs"), ("8xh100+8xh10", "did you mean 'h1")],
)
def test_nodes_that_share_no_layout(cluster: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_cluster(cluster)


def test_a_budget_is_hours_and_tokens(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    words = ("llama-3-8b", "--cluster", "8xh100", "--batch", "8", "--price", "2.5", "--budget", "1000")
    out = run(*words, "--json", str(path)).stdout
    best = json.loads(path.read_text().splitlines()[0])
    money = best["money"]
    assert (money["per_hour"], money["hours"]) == (20.0, 50.0)
    assert money["tokens"] == pytest.approx(50 * 3600 * best["tokens_per_s"])
    assert money["tokens"] * money["per_billion_tokens"] / 1e9 == pytest.approx(1000)
    assert "A budget of 1,000 is 50 hours" in out
    with pytest.raises(UsageError, match="--price"):
        run("llama-3-8b", "--cluster", "8xh100", "--budget", "1000")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lama-3-8b", "--cluster", "8xh100"], "did you mean 'llama-3-8b'"),
        (["llama-3-8b", "--cluster", "8xh10"], "did you mean 'h100'"),
        (["llama-3-8b", "--cluster", "8xh100", "--set", "model.layer=3"], "did you mean 'model.layers'"),
        (["llama-3-8b", "--cluster", "8xh100", "--set", "layers=3"], "did you mean 'model.layers'"),
        (["llama-3-8b", "--cluster", "8xh100", "--batch", "0"], "batch is 0: expected a whole number, between 1 and"),
        (["llama-3-8b", "--cluster", "8xh100", "--batch-tokens", "4X"], "no known suffix"),
        (["llama-3-8b", "--fix", "tp=2"], "needs --cluster"),
        (["llama-3-8b", "--code", "eager"], "needs --cluster"),
        (["gpt3-175b", "--set", "model.width=20480", "--cluster", "8xh100"], "not divisible by 96 heads"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], words: str) -> None:
    result = invoke(arguments)
    assert isinstance(result.exception, UsageError), f"{result!r} {result.output}"
    assert re.search(words, str(result.exception)), result.exception
    assert "\n" not in str(result.exception)


def test_a_model_that_fits_nowhere_fails_and_still_gives_figures(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    with pytest.raises(RunError, match=r"gpt3-175b does not fit on 1x8xh100.*such GPUs would do"):
        invoke(["gpt3-175b", "--cluster", "8xh100", "--json", str(path)], catch_exceptions=False)
    found = json.loads(path.read_text())
    assert (found["case"]["cluster"], found["case"]["batch"], found["case"]["context"]) == ("1x8xh100", 512, 2048)
    assert found["fits"] is False
    assert found["memory"]["total_bytes"] > found["memory"]["usable_bytes"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("plan gpt2-124m --cluster 2xh100", "--out"),
        ("plan gpt2-124m --cluster 2xh100", "--json"),
        ("plan --draw zb-v", "--csv"),
        ("plan --draw zb-v", "--svg"),
        ("plan gpt2-124m --serve --cluster 1xh200 --prompt 64 --output 16", "--json"),
        ("bench collective all_reduce --draw ring --ranks 4", "--svg"),
    ],
)
def test_files_are_there_also_where_nobody_reads_the_text(words: str, option: str, tmp_path: Path) -> None:
    """As with `| head`, which stops reading: the text has no reader from the start here."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-u", "-m", "tilemesh", *words.split(), option, str(tmp_path / "file")]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    os.close(writing)
    assert (tmp_path / "file").stat().st_size > 100, done.stderr
    assert "Traceback" not in done.stderr
