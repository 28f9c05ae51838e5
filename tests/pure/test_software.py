"""Software profiles: fitted on some runs, graded on the others, and named beside what they predict."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilemesh.cli.main import make_app, redirected
from tilemesh.core.hardware import parse_cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import preset
from tilemesh.plan.software import SOFTWARE, MeasuredRun, Software, fit_software

FILES = Path(__file__).parents[2] / "benchmarks" / "software"
PLAIN = SOFTWARE["compiled"]


def invoke(*arguments: str) -> Any:
    line = redirected(["plan", *arguments])
    return CliRunner(env={"COLUMNS": "160"}).invoke(make_app(line), line)


def run(*arguments: str) -> Any:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result


def measured(number: int, software: Software) -> MeasuredRun:
    """Of layouts in which attention, products, passes and exchanges weigh differently, as some software would run."""
    model = preset(("llama-3-8b", "tinyllama-1.1b")[number % 2])
    context = (2048, 8192, 32768)[number % 3]
    plan = ParallelPlan(dp=8, zero=3, precision="bf16", microbatch=1 + number // 4, recompute="full")
    run = MeasuredRun(str(number), model, plan, parse_cluster("1x8xh100"), context, 1.0, held_out=number >= 6)
    return dataclasses.replace(run, step_s=run.predicted_s(software))


@pytest.mark.parametrize("name", ["llm_foundry_2023", "torchtitan_2025", "megatron_2025"])
def test_a_stored_profile_is_what_its_runs_say_and_predicts_the_others(name: str, tmp_path: Path) -> None:
    saved = tmp_path / "profile.toml"
    text = run("--fit", str(FILES / f"{name}.toml"), "--out", str(saved), "--json", "-").output
    (found,) = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
    assert found["median_error"] <= 0.10
    known = SOFTWARE[name.replace("_", "-")]
    assert {key: found[key] for key in dataclasses.asdict(known)} == dataclasses.asdict(known)
    assert {line[""] for line in found["runs"]} == {"fitted", "graded"}
    with_file = run("llama-3-8b", "--cluster", "8xh100", "--code", str(saved), "--json", "-").output
    assert json.loads(with_file.splitlines()[0])["software"] == known.words


def test_fitting_finds_what_made_the_runs() -> None:
    truth = dataclasses.replace(PLAIN, products=1.2, attention=1.6, exchanges=1.3)
    runs = [measured(number, truth) for number in range(10)]
    found = fit_software("mine", "made up", "compiled", runs)
    held_out = [run for run in runs if run.held_out]
    assert max(abs(run.error(PLAIN)) for run in held_out) > 0.15
    assert max(abs(run.error(found)) for run in held_out) < 0.02
    assert found.attention == pytest.approx(1.6, rel=0.1)
    assert found.products == pytest.approx(1.2, rel=0.05)


def test_a_factor_lengthens_its_part_alone() -> None:
    run = measured(1, PLAIN)
    assert dataclasses.replace(PLAIN, name="same").on(run.cluster, None) == (run.cluster, None)
    step = run.predicted_s(PLAIN)
    parts = {part: run.predicted_s(dataclasses.replace(PLAIN, **{part: 2.0})) - step for part in PLAIN.factors}
    assert all(0 < seconds < step for seconds in parts.values())
    everything = dataclasses.replace(PLAIN, **dict.fromkeys(PLAIN.factors, 2.0))
    assert run.predicted_s(everything) == pytest.approx(2 * step, rel=0.03), "launches and host aside"


def test_every_prediction_says_what_it_stands_on() -> None:
    found = run("llama-3-8b", "--cluster", "8xh100", "--code", "llm-foundry-2023").output
    assert "figures of llm-foundry-2023" in found.replace("\n", " ")
    plain, slow = (
        json.loads(run("llama-3-8b", "--cluster", "8xh100", "--batch", "64", "--code", code, "--json", "-").output
                   .splitlines()[0])
        for code in ("eager", "llm-foundry-2023")
    )  # fmt: skip
    assert plain["software"].startswith("eager (")
    assert slow["step_time_s"] > plain["step_time_s"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('code = "eager"\n', "has no [[runs]] section"),
        ('code = "eger"\n[[runs]]\nname = "a"\n', "missing key"),
        ('code = "eager"\n[[runs]]\nname = "a"\nmodel = "llama-3-8b"\ncluster = "8xh100"\n', "give a plan, and either"),
        (
            'code = "eager"\n[[runs]]\nname = "a"\nmodel = "llama-3-8b"\ncluster = "8xh100"\nplan = { dp = 4 }\n'
            "tokens_per_s_per_gpu = 100\n",
            "4 ranks on 8 devices",
        ),
        (
            'code = "eager"\n[[runs]]\nname = "a"\nmodel = "llama-3-8b"\ncluster = "8xh100"\nplan = { dp = 8 }\n'
            'log = "x"\nof = "titan"\n',
            "of is 'titan', expected one of torchtitan",
        ),
    ],
)
def test_runs_that_are_not_described_are_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "runs.toml"
    file.write_text(text)
    assert words in str(invoke("fit", str(file)).exception)


def test_a_log_is_a_run(tmp_path: Path) -> None:
    """torchtitan's lines, at half the speed that is predicted: the first reading is left out."""
    (tmp_path / "run.log").write_text(
        "".join(f"step: {step}  loss: 9.1  memory: 60.0GiB(63%)  tps: {tps}  tflops: 300\n"
                for step, tps in ((1, 10), (10, 2500), (20, 2500)))
    )  # fmt: skip
    file = tmp_path / "runs.toml"
    file.write_text(
        'code = "compiled"\n[[runs]]\nname = "mine"\nmodel = "llama-3-8b"\ncluster = "8xh100"\nof = "torchtitan"\n'
        'log = "run.log"\nplan = { dp = 8, zero = 3, precision = "bf16", recompute = "operators" }\n'
    )
    plan = tmp_path / "plan.toml"
    settings = "--fix", "dp=8,zero=3,precision=bf16,recompute=operators,microbatch=1", "--batch", "8"
    run("llama-3-8b", "--cluster", "8xh100", *settings, "--out", str(plan))
    words = ("grade", str(tmp_path / "run.log"), "--of", "torchtitan", "--plan", str(plan), "--cluster", "8xh100")
    grades = [json.loads(run(*words, *code, "--json", "-").output.splitlines()[0])
              for code in ((), ("--code", "llm-foundry-2023"))]  # fmt: skip
    assert [each["software"] for each in grades] == [PLAIN.words, SOFTWARE["llm-foundry-2023"].words]
    quick, slow = (next(each for each in grade["figures"] if each["name"] == "step time") for grade in grades)
    assert quick["measured"] == slow["measured"] == pytest.approx(8192 / 2500)
    assert quick["predicted"] < slow["predicted"]
    found = run("fit", str(file)).output
    assert "3.277" in found, "8,192 tokens at 2,500 tokens/s"
    assert "no run was held out" in found
