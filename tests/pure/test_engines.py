"""Plans in others' terms: options exist, numbers mean the plan, refusals name what does run, a shell reads them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilemesh.cli.main import make_app, redirected
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import preset
from tilemesh.plan.engines.engine import EngineJob, OtherEngine
from tilemesh.plan.engines.tables import ENGINES, TRAINING
from tilemesh.plan.engines.write import LAUNCH, engine_files
from tilemesh.plan.nearest import nearest_layouts

OPTIONS = json.loads((Path(__file__).parent / "engine_options.json").read_text())
STARTS = (
    ParallelPlan(dp=8, tp=2, sequence_parallel=True, zero=2, microbatch=2, accumulation=4, precision="bf16"),
    ParallelPlan(dp=16, zero=3, zero_group=8, recompute="full", precision="bf16"),
    ParallelPlan(dp=2, tp=2, pp=4, accumulation=8, schedule="interleaved", interleave=2, precision="bf16"),
    ParallelPlan(dp=4, pp=4, zero=1, accumulation=8, chunk_layers=(7, 9, 9, 7), precision="bf16-master"),
    ParallelPlan(dp=16, zero=3, offload="optimizer+weights", precision="bf16-master"),
    ParallelPlan(dp=16, recompute="operators", precision="bf16", accumulation=2),
    ParallelPlan(dp=4, tp=4, sequence_parallel=True, zero=1, recompute="full", precision="bf16-master"),
)


def job(plan: ParallelPlan, **more: Any) -> EngineJob:
    return EngineJob(preset("llama-3-8b"), plan, parse_cluster("2x8xh100"), 8192, "llama-3-8b", **more)


def jobs(engine: OtherEngine) -> Iterator[EngineJob]:
    """Layouts of all kinds on sixteen GPUs that it runs."""
    for start in STARTS:
        near = [start, *list(nearest_layouts(preset("llama-3-8b"), start))[:40]]
        yield from (job(plan) for plan in near if plan.world == 16 and not any(engine.why_not(job(plan))))


SHARED = ParallelPlan(dp=8, cp=2, zero=3, microbatch=2, precision="bf16")


@pytest.mark.parametrize("name", TRAINING)
def test_what_is_shared_out_is_told_or_refused(name: str) -> None:
    """A plan with ranks that share sequences, or experts: never written as another one."""
    engine = ENGINES[name]
    names = engine.values(job(SHARED))
    is_told = any("context-parallel" in option and value == 2 for option, value in names.items())
    by_heads = dataclasses.replace(SHARED, cp_exchange="heads")
    assert is_told or "cp" in {refusal.field for refusal in engine.why_not(job(SHARED))}
    assert {"cp", "cp_exchange"} & {refusal.field for refusal in engine.why_not(job(by_heads))}
    experts = dataclasses.replace(job(ParallelPlan(dp=8, tp=2, ep=4, expert_tp=1)), model=preset("mixtral-8x7b"))
    is_told = engine.values(experts).get("expert-model-parallel-size") == 4
    assert is_told or "ep" in {refusal.field for refusal in engine.why_not(experts)}


@pytest.mark.parametrize("name", TRAINING)
def test_products_in_8_bits_are_refused(name: str) -> None:
    eight = job(ParallelPlan(dp=16, zero=3, precision="fp8"))
    assert "precision" in {refusal.field for refusal in ENGINES[name].why_not(eight)}


def test_what_megatron_gathers_early_goes_with_early_sums() -> None:
    values = ENGINES["megatron"].values(job(ParallelPlan(tp=8, cp=2, zero=1, precision="bf16-master")))
    assert values["overlap-param-gather"] is True
    assert values["overlap-grad-reduce"] is True


ONE_EXPERT = {"experts_per_token": 1, "router_groups": 1, "router_groups_per_token": 1}
MIXED = ParallelPlan(dp=4, tp=4, ep=8, expert_tp=1, sequence_parallel=True, precision="bf16-master")


@pytest.mark.parametrize(
    ("model", "changes", "expected"),
    [
        ("mixtral-8x7b", {}, {"num-experts": 8, "moe-router-topk": 2, "moe-ffn-hidden-size": 14336}),
        ("qwen3-30b-a3b", {"balance_loss": 0.01}, {
            "num-experts": 128, "moe-router-topk": 8, "moe-router-load-balancing-type": "seq_aux_loss",
            "moe-aux-loss-coeff": 0.01,
        }),
        ("deepseek-v3", {}, {
            "num-experts": 256, "moe-layer-freq": "([0]*3+[1]*58)", "ffn-hidden-size": 18432,
            "moe-ffn-hidden-size": 2048, "moe-shared-expert-intermediate-size": 2048, "moe-router-num-groups": 8,
            "moe-router-group-topk": 4, "moe-router-score-function": "sigmoid", "moe-router-topk-scaling-factor": 2.5,
            "moe-router-enable-expert-bias": True, "multi-latent-attention": True, "q-lora-rank": 1536,
            "kv-lora-rank": 512, "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128,
            "qk-layernorm": True, "rotary-percent": None,
        }),
        ("deepseek-v3", {**ONE_EXPERT, "router_renormalized": False}, {"moe-router-topk": 1}),
        ("deepseek-v3", ONE_EXPERT, "it weighs a token's only expert by its score"),
        ("deepseek-v3", {"router_renormalized": False}, "it divides sigmoids of several experts"),
        ("mixtral-8x7b", {"router_bias": True}, "its bias of experts goes with sigmoid scores"),
        ("deepseek-moe-16b", {}, {"moe-router-pre-softmax": True, "moe-shared-expert-intermediate-size": 2816}),
        ("mixtral-8x7b", {"expert_capacity": 1.25}, "it drops a microbatch's least likely tokens"),
        ("mixtral-8x7b", {"shared_width": 64, "shared_gate": True}, "its shared expert has no gate"),
        ("gpt-oss-20b", {}, "its router's products have no bias"),
        ("qwen3-30b-a3b", {"router_groups": 4, "router_groups_per_token": 2}, "it ranks groups by the sum"),
    ],
)  # fmt: skip
def test_experts_in_megatrons_words(model: str, changes: dict[str, Any], expected: dict[str, Any] | str) -> None:
    """As DeepSeek's and Qwen's own scripts for it have them; what it would compute otherwise is refused."""
    engine = ENGINES["megatron"]
    asked = dataclasses.replace(job(MIXED), model=preset(model).replace(**changes))
    why = [refusal.why for refusal in engine.why_not(asked)]
    if isinstance(expected, str):
        assert any(words.startswith(expected) for words in why)
        return
    assert not why
    told = engine.values(asked)
    assert {name: told.get(name) for name in expected} == expected
    assert (told["expert-model-parallel-size"], told["expert-tensor-parallel-size"]) == (8, 1)
    assert set(told) <= set(OPTIONS["megatron"]["options"])
    one = dataclasses.replace(asked, plan=dataclasses.replace(MIXED, sequence_parallel=False))
    assert "sequence_parallel" in {refusal.field for refusal in engine.why_not(one)}
    assert not any("expert" in name or "moe" in name for name in engine.values(job(MIXED)))


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("zero_group", [0, 2])
def test_torchtitan_s_degrees_multiply_to_all_ranks(zero: int, zero_group: int) -> None:
    plan = ParallelPlan(dp=4, tp=2, cp=2, zero=zero, zero_group=zero_group, precision="bf16")
    told = {name: value for name, value in ENGINES["torchtitan"].values(job(plan)).items() if name.endswith("-degree")}
    assert math.prod(told.values()) == plan.world
    assert told["parallelism.data-parallel-shard-degree"] == (zero_group or plan.dp)


@pytest.mark.parametrize(
    ("changes", "configuration", "is_noted"),
    [
        ({"rotary_scaling": "llama3", "rotary_factor": 8.0}, "llama3_8b", False),
        ({"context": 4096, "family": "llama", "rotary_scaling": "llama3", "rotary_factor": 8.0}, "llama3_8b", False),
        ({}, "llama3_8b", True),
        ({"rotary_scaling": "llama3", "rotary_factor": 32.0}, "llama3_8b", True),
        ({"tied": True}, "CONFIG", False),
        ({"rotary_base": 10_000.0}, "CONFIG", False),
        ({"head_width": 64}, "CONFIG", False),
        ({"biases": "attention"}, "CONFIG", False),
        ({"qk_norm": "head"}, "CONFIG", False),
        ({"window": 1024}, "CONFIG", False),
    ],
)
def test_torchtitan_trains_this_model_or_asks_for_it(
    changes: dict[str, Any], configuration: str, is_noted: bool
) -> None:
    asked = dataclasses.replace(job(STARTS[0]), model=preset("llama-3-8b").replace(**changes))
    text = engine_files(ENGINES["torchtitan"], asked, "")[LAUNCH]
    assert (f"--config {configuration}" in text) == (configuration != "CONFIG")
    assert ("${CONFIG:?" in text) == (configuration == "CONFIG")
    assert ("stretches rotary frequencies otherwise" in text) == is_noted


@pytest.mark.parametrize(
    ("engine", "plan", "words"),
    [
        ("accelerate", ParallelPlan(dp=16, zero=2, accumulation=16, precision="bf16"), '"sync_each_batch": true'),
        ("accelerate", ParallelPlan(dp=8, tp=2, zero=2, precision="bf16"), 'tp_plan="auto"'),
        ("torchtitan", ParallelPlan(dp=16, zero=2, accumulation=4, precision="bf16"), "in every microbatch"),
    ],
)  # fmt: skip
def test_what_the_script_has_to_say_is_noted(engine: str, plan: ParallelPlan, words: str) -> None:
    """Where the plan needs it, and not of one microbatch on replicas alone."""
    plain = ParallelPlan(dp=16, zero=plan.zero, precision=plan.precision)
    assert words in engine_files(ENGINES[engine], job(plan), "")[LAUNCH]
    assert words not in engine_files(ENGINES[engine], job(plain), "")[LAUNCH]


def served() -> EngineJob:
    return job(ParallelPlan(dp=4, tp=4, precision="bf16"), running=64, step_tokens=512)


@pytest.mark.parametrize("name", [*ENGINES])
def test_every_option_is_one_of_the_engine(name: str) -> None:
    engine, known = ENGINES[name], OPTIONS[name]
    assert engine.version == known["version"]
    all_jobs = [served()] if name == "vllm" else list(jobs(engine))
    if name == "megatron":  # one with experts, and one with latents besides
        all_jobs += [dataclasses.replace(job(MIXED), model=preset(model)) for model in ("qwen3-30b-a3b", "deepseek-v3")]
    names = {option for one in all_jobs for option in engine.values(one)}
    assert names <= set(known["options"])
    written = {option.name for option in engine.options}
    assert len(names) > 0.6 * len(written), "the layouts above leave most of the table untried"
    lasts = {word for one in all_jobs for word in engine.last(one).split() if word.startswith("activation-")}
    assert lasts <= set(known["options"])


@pytest.mark.parametrize("name", [*TRAINING])
def test_ranks_and_sequences_are_those_of_the_plan(name: str) -> None:
    """By each engine's own arithmetic, which is not the table's."""
    engine = TRAINING[name]
    tried = list(jobs(engine))
    assert len(tried) > 3
    for one in tried:
        v, plan = engine.values(one), one.plan
        if name == "torchtitan":
            degrees = [v[f"parallelism.{axis}-degree"] for axis in ("data-parallel-replicate", "data-parallel-shard")]
            assert math.prod(degrees) == plan.dp
            assert math.prod(degrees) * v["parallelism.tensor-parallel-degree"] * plan.pp == plan.world
            steps = v["training.global-batch-size"] / (v["training.local-batch-size"] * plan.dp)
            assert steps == (1 if plan.pp > 1 else plan.accumulation)
            parts = v.get("parallelism.module-fqns-per-model-part", [",".join(f"layers.{n}" for n in range(32))])
            assert [w for part in parts for w in part.split(",") if "layers" in w] == [f"layers.{n}" for n in range(32)]
        elif name == "megatron":
            dp = plan.world // (v["tensor-model-parallel-size"] * v["pipeline-model-parallel-size"])
            assert v["global-batch-size"] == v["micro-batch-size"] * dp * plan.accumulation
            layout = v.get("pipeline-model-parallel-layout", "Et*32L")
            assert sum(map(int, re.findall(r"t\*(\d+)", layout))) == 32
            assert ("use-distributed-optimizer" in v) == (plan.zero > 0)
        elif name == "deepspeed":
            each = v["train_micro_batch_size_per_gpu"] * v["gradient_accumulation_steps"]
            assert each * plan.dp == plan.batch
            assert v.get("train_batch_size", each * plan.world) == each * plan.world  # what it checks
            assert v.get("tensor_parallel.autotp_size", 1) == plan.tp
            assert v["zero_optimization.stage"] == plan.zero
        else:
            sizes = ("dp_replicate_size", "dp_shard_size", "tp_size")
            given = [v.get(f"parallelism_config.parallelism_config_{size}") for size in sizes]
            if plan.zero > 1:
                assert math.prod(given) == v["num_processes"] == plan.world
            else:
                assert given == [None] * 3
                assert plan.tp == 1


def run(*words: str) -> Any:
    line = redirected(["plan", *words])
    return CliRunner(env={"COLUMNS": "160"}).invoke(make_app(line), line, catch_exceptions=False)


@pytest.mark.parametrize(
    ("engine", "fix", "why"),
    [
        ("torchtitan", "zero=1,tp=4,pp=1", "zero is 1: fully_shard cuts weights and gradients too"),
        ("torchtitan", "dp=4,tp=4,pp=1,zero=0,microbatch=1", "zero is 0: without stages it sums over replicas"),
        ("torchtitan", "tp=1,pp=1,zero=3,zero_group=8,microbatch=1", "zero_group is 8: without stages it sums"),
        ("megatron", "pp=4,tp=1,schedule=zb-v", "schedule is zb-v: it has 1F1B"),
        ("deepspeed", "pp=2", "pp is 2: a configuration of it has no pipeline stages"),
        ("accelerate", "precision=bf16-master", "precision is bf16-master: it keeps float32 weights and casts"),
    ],
)
def test_what_cannot_run_names_what_can(engine: str, fix: str, why: str) -> None:
    asked = ("llama-3-8b", "--cluster", "16xh100", "--batch", "32", "--for", engine)
    with pytest.raises(UsageError) as refused:
        run(*asked, "--fix", fix)
    words = str(refused.value)
    assert why in words
    nearest = re.search(r"the nearest that it runs: --fix (\S+) ", words)
    assert nearest is not None
    changed = dict(pair.split("=") for pair in fix.split(",")) | dict(p.split("=") for p in nearest[1].split(","))
    assert run(*asked, "--fix", ",".join(f"{name}={value}" for name, value in changed.items())).exit_code == 0


def test_kinds_of_nodes_alone_get_layouts_that_the_engine_runs_too() -> None:
    asked = ("gpt2-124m", "--cluster", "8xh100+8xa100", "--batch", "16", "--fix", "microbatch=1", "--for", "deepspeed")
    words = " ".join(run(*asked).stdout.split())
    assert len(re.findall(r"alone trains on [^(]*\(dp \d+ x tp \d+ x pp 1, ", words)) == 2


def test_an_engine_that_runs_nothing_there_says_why() -> None:
    """Without ZeRO so many parameters need stages."""
    with pytest.raises(UsageError, match=r"no pipeline stages; .*nor any other layout there"):
        run(
            "gpt3-175b", "--cluster", "128xh100", "--batch", "128", "--for", "deepspeed", "--fix", "zero=0,microbatch=1"
        )


def test_without_pins_the_best_that_runs_is_written(tmp_path: Path) -> None:
    out = tmp_path / "job"
    said = run("llama-3-8b", "--cluster", "16xh100", "--batch", "32", "--for", "accelerate", "--out", str(out)).stdout
    assert {path.name for path in out.iterdir()} == {"accelerate.yaml", LAUNCH, "job.slurm", "plan.toml"}
    assert "For accelerate 1.15.0" in said
    assert "#SBATCH --nodes=2\n" in (out / "job.slurm").read_text()
    (out / LAUNCH).write_text("mine")
    with pytest.raises(UsageError, match=rf"has {LAUNCH} already, with other text: name another folder"):
        run("llama-3-8b", "--cluster", "16xh100", "--batch", "32", "--for", "accelerate", "--out", str(out))
    assert (out / LAUNCH).read_text() == "mine"
    served_words = run("gpt2-124m", "--cluster", "1xh100", "--prompt", "64", "--output", "16", "--for", "vllm").stdout
    assert "vllm serve" in served_words


def test_vllm_serves_the_folder_that_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is there, not by how it is written; what it cannot read is asked for."""
    monkeypatch.chdir(tmp_path)
    for file in ("a model/config.json", "run/config.toml"):
        Path(file).parent.mkdir()
        Path(file).write_text("{}")
    read = {word: dataclasses.replace(served(), source=word).folder for word in ("a model", "./a model/config.json")}
    assert {*read.values()} == {f"'{tmp_path / 'a model'}'"}
    for word, expected in (("./run", "export it first"), ("llama-3-8b", "a Hugging Face folder"), ("./m.toml", "")):
        asked = dataclasses.replace(served(), source=word).folder
        assert asked.startswith('"${MODEL:?')
        assert expected in asked
    assert "batch" not in served().describe()
    assert "up to 64 sequences, 512 tokens in a step" in served().describe()


RECORDER = """#!{python}
import json, os, sys
json.dump(sys.argv[1:], open(os.environ["RECORDED"], "w"))
"""


@pytest.mark.parametrize("name", [*ENGINES])
@pytest.mark.parametrize("node", ["0", "1"])
def test_a_shell_reads_the_command_as_it_is_meant(name: str, node: str, tmp_path: Path) -> None:
    """Its words, with the program itself replaced by one that writes them down."""
    engine = ENGINES[name]
    staged = name in ("torchtitan", "megatron")
    one = served() if name == "vllm" else next(one for one in jobs(engine) if one.plan.pp > 1 or not staged)
    for file, text in engine_files(engine, one, "origin").items():
        (tmp_path / file).write_text(text)
        if not file.endswith((".json", ".yaml")):
            subprocess.run(["bash", "-n", tmp_path / file], check=True)
    for program in ("torchrun", "accelerate", "vllm"):
        (tmp_path / program).write_text(RECORDER.format(python=sys.executable))
        (tmp_path / program).chmod(0o755)
    more = {"RECORDED": str(tmp_path / "words"), "SCRIPT": "my script.py", "MEGATRON": "/m", "MODEL": "a model"}
    more["NODE"] = node
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", tmp_path / LAUNCH, "--extra"], check=True, env=dict(os.environ) | more | paths)
    words = json.loads((tmp_path / "words").read_text())
    assert "--extra" in words
    if name == "vllm":  # a start rank without --headless is another way to balance load
        more_words = [] if node == "0" else ["--headless", "--data-parallel-start-rank", str(one.plan.dp // 2)]
        assert words[words.index("--extra") + 1 :] == more_words
        assert "data-parallel-start-rank" in OPTIONS[name]["options"]
    if name == "accelerate":
        assert words[words.index("--machine_rank") + 1] == node
    if name in ("deepspeed", "accelerate"):
        assert "my script.py" in words
        assert str(tmp_path / engine.file) in words
        return
    for option, value in engine.values(one).items():
        following = words[words.index(f"--{option}") + 1 :]
        if value is not True and "$" not in str(value):
            expected = value if isinstance(value, list) else [str(value)]
            assert following[: len(expected)] == expected
