"""One plan file for every kind: what `tilemesh plan … --out` writes is what `--plan` of its command runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tilemesh.align.config import load as load_align
from tilemesh.align.placement import run_placement
from tilemesh.cli.commands.bench import redirect
from tilemesh.cli.commands.bench.serve import ServeBenchOptions
from tilemesh.cli.commands.serve import ServeOptions
from tilemesh.cli.main import main
from tilemesh.cli.planned import bench_planned, serve_planned
from tilemesh.core.errors import UsageError
from tilemesh.core.plan_file import SECTIONS, read_plan
from tilemesh.model import huggingface
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.transformer import Transformer
from tilemesh.train.load import load as load_train

WORK = "prompts=4,answers=4,prompt=16,tokens=24,algorithm=rloo"
WORDS = {
    "train": ["--batch", "8", "--cluster", "2xcpu"],
    "serve": ["--prompt", "16", "--output", "8", "--rate", "3", "--cluster", "2xcpu"],
    "align": ["--align", WORK, "--runnable", "--placement", "split", "--cluster", "2xcpu"],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of each kind for `tiny`, and a Hugging Face folder of it."""
    folder = tmp_path_factory.mktemp("plans")
    for kind, words in WORDS.items():
        assert main(["plan", kind, "tiny", *words, "--out", str(folder / f"{kind}.toml")]) == 0
    huggingface.save(Transformer(preset("tiny")), folder / "tiny")
    (folder / "plans").mkdir()
    for name, kind, old, new in (
        ("other", "serve", "layers = 4", "layers = 5"),
        ("other-align", "align", "layers = 4", "layers = 5"),
        ("key", "serve", "running =", "runing ="),
        ("cache", "serve", "tp = 2\n\n[serve]", 'tp = 1\n\n[serve]\nkv_cache = "int8"'),
    ):
        (folder / f"{name}.toml").write_text((folder / f"{kind}.toml").read_text().replace(old, new))
    return folder


@pytest.mark.parametrize("kind", WORDS)
def test_every_kind_has_its_layout_its_section_and_its_model(kind: str, files: Path) -> None:
    plan = read_plan(files / f"{kind}.toml", kind)
    assert plan.layout.world == (1 if kind == "align" else 2)  # of a split placement the ranks that train
    assert plan.sections.keys() == set(SECTIONS[kind])
    assert ModelConfig(**plan.sections["model"]) == preset("tiny")


def test_bench_takes_a_plan_by_its_kind(files: Path) -> None:
    for kind in ("train", "serve"):
        plan = str(files / f"{kind}.toml")
        assert redirect(["--plan", plan, "--json", "-"]) == [kind, "--plan", plan, "--json", "-"]
        assert redirect([f"--plan={plan}", "tiny"]) == [kind, f"--plan={plan}", "tiny"]
    assert redirect(["train", "--plan", "a"]) == ["train", "--plan", "a"]
    assert redirect([]) == []
    with pytest.raises(UsageError, match="does not exist"):
        redirect(["--plan", str(files / "none.toml")])


def test_each_kind_is_refused_where_another_is_run(files: Path) -> None:
    for kind in WORDS:
        for other in WORDS.keys() - {kind}:
            with pytest.raises(UsageError) as error:
                read_plan(files / f"{other}.toml", kind)
            assert f"is a plan of kind '{other}': expected a file that `tilemesh plan {kind}" in str(error.value)
            assert f"`tilemesh {other} --plan` runs this one" in str(error.value)
    (files / "odd.toml").write_text('kind = ["serve"]\n')
    with pytest.raises(UsageError, match=r"plan of kind \['serve'\]"):
        read_plan(files / "odd.toml", "serve")


def test_a_training_plan_is_trained(files: Path) -> None:
    config = load_train(plan=files / "train.toml")
    assert config.plan == read_plan(files / "train.toml", "train").layout
    assert config.batch == 8


def test_a_placement_is_the_one_that_feedback_runs_on(files: Path) -> None:
    config = load_align(files / "tiny", sets=["align.task=sort"], plan=files / "align.toml")
    placement, align = run_placement(config), config.align
    assert (placement.kind, [pool.ranks for pool in placement.pools]) == ("split", [1, 1])
    assert (align.algorithm, align.prompts, align.answers, align.longest) == ("rloo", 4, 4, 24)
    over = load_align(files / "tiny", sets=["align.task=sort", "align.prompts=8"], plan=files / "align.toml")
    assert (over.align.prompts, over.align.answers) == (8, 4)


def test_a_serving_plan_sets_what_no_flag_does(files: Path) -> None:
    plan = read_plan(files / "serve.toml", "serve")
    options = ServeOptions(source=str(files / "tiny"), plan=str(plan.source), dtype="fp64")
    served = serve_planned(options)
    assert served.mesh == f"tp={plan.layout.tp}" * (plan.layout.tp > 1) + f"dp={plan.layout.dp}" * (plan.layout.dp > 1)
    assert (served.dtype, served.running) == ("fp64", plan.sections["serve"]["running"])
    assert served.running != ServeOptions(source="x").running
    text = Path(plan.source).read_text()
    (files / "shared.toml").write_text(text.replace("dp = 1\ntp = 2\n", "dp = 4\nep = 2\ntp = 1\n"))
    assert serve_planned(replace(options, plan=str(files / "shared.toml"))).mesh == "dp=4,ep=2"
    with pytest.raises(UsageError, match="--mesh and --plan both say"):
        serve_planned(replace(options, mesh="dp=2"))


def test_a_benchmark_takes_the_load_of_a_plan(files: Path) -> None:
    text = (files / "serve.toml").read_text()
    (files / "two.toml").write_text(text.replace("dp = 1\n", "dp = 2\n").replace("tp = 2\n", "tp = 1\n"))
    measured = bench_planned(ServeBenchOptions(model="tiny", plan=str(files / "two.toml"), output="4"))
    assert (measured.rates, measured.prompt, measured.output) == ((1.5,), "16", "4")
    (files / "cut.toml").write_text(text.replace("dp = 2\n", "dp = 1\n").replace("tp = 1\n", "tp = 2\n"))
    with pytest.raises(UsageError, match="cuts the model over 2 ranks, and one process is measured here"):
        bench_planned(ServeBenchOptions(model="tiny", plan=str(files / "cut.toml")))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["serve", "tiny", "--plan", "other.toml"], "'other.toml' was made for another model: layers is 5 there and"),
        (["align", "tiny", "--task", "sort", "--plan", "other-align.toml"], "was made for another model: layers is"),
        (["serve", "tiny", "--plan", "key.toml"], "key.toml: serve: unknown key 'runing': did you mean 'running'?"),
        (["bench", "serve", "tiny", "--plan", "cache.toml"], "cache.toml: serve.kv_cache: this command does not set"),
        (["align", "tiny", "--task", "sort", "--plan", "align.toml", "--mesh", "dp=2"], "--mesh and --plan both say"),
        (["plan", "tiny", "--cluster", "2xcpu", "--save", "x"], "--save is called --out: tilemesh plan"),
        (["plan", "align", "tiny", "--align", f"{WORK[:-4]}ppo,reward=model", "--cluster", "2xcpu",
          "--placement", "split", "--out", "x"],
         "`tilemesh align` does not run split: models beside the engine lie on the ranks that train; add --runnable"),
        (["plan", "tiny", "--cluster", "2xcpu", "--out", "plans"], "--out plans cannot be written: it is a folder"),
    ],
)  # fmt: skip
def test_what_no_command_can_run_is_one_line(
    words: list[str], expected: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    capsys.readouterr()
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
