"""The gate itself: green where it should be, red for every planted bug, and the bug named."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import parallel_cases
import torch

from tilemesh.cli.commands.verify import LayoutTable, train_optimizer
from tilemesh.cli.main import main
from tilemesh.comm import connect, run_threads
from tilemesh.core.errors import UsageError
from tilemesh.core.step.book import synchronous
from tilemesh.launch.start import find_mpiexec
from tilemesh.parallel.gate.cases import (
    MODELS,
    OPTIMIZERS,
    PAPERS,
    Case,
    cases,
    compressed,
    gate_plan,
    layouts,
    numerics,
    pipelines,
    shared_sequences,
    spread_experts,
)
from tilemesh.parallel.gate.cause import gradient_cause, norm_cause, order_cause, order_words
from tilemesh.parallel.gate.compare import Apart, Gate, GateResult
from tilemesh.parallel.gate.pairs import OFFLOADED, _chosen, _possible, combinations, every_case
from tilemesh.parallel.gate.plant import PLANTS
from tilemesh.parallel.gate.plant_numerics import NUMERIC, Plant
from tilemesh.parallel.matrices import MatrixRound
from tilemesh.parallel.mesh import Mesh

NEEDS_MPI = pytest.mark.skipif(find_mpiexec() is None, reason="needs mpiexec")
PROCESSES = [pytest.param("mpi", marks=NEEDS_MPI), "torch"]


def run(ranks: int, chosen: list[Case], plant: Plant | None = None, **options: Any) -> list[GateResult]:
    """A planted bug is let run, whatever its placements say."""
    torch.set_num_threads(1)
    gate = functools.partial(
        Gate, plant=plant, optimizer=train_optimizer, **({"checks_types": plant is None} | options)
    )
    results = run_threads(ranks, lambda comm: list(gate(comm).run(chosen)), timeout_s=100)
    assert [rank for rank, found in enumerate(results) if found and rank] == []
    return results[0]


@pytest.mark.parametrize("transport", PROCESSES)
def test_a_sample_of_layouts_over_processes(transport: str) -> None:
    parallel_cases.require_part(transport, "gate")


@pytest.mark.parametrize("model", MODELS)
def test_a_layout_with_everything_for_every_model(model: str) -> None:
    chosen = [Case(model, gate_plan(2, 2, True, 2)), Case(model, gate_plan(1, 4, False, 1))]
    assert [result for result in run(4, chosen) if not result.passed] == []


def test_groups_of_experts_do_not_tie_by_sigmoids_without_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "spread", MODELS["spread"].replace(router_bias=False))  # type: ignore[arg-type]
    assert [result for result in run(2, [Case("spread", gate_plan(cp=2, ep=2))]) if not result.passed] == []


def test_ranks_without_a_part_wait_for_a_case_and_not_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with much else to do takes longer for all small layouts than any wait may take."""
    result = GateResult(Case("gpt", gate_plan(2)), Apart(0, 0, 0), Apart(1, 1, 1))

    def slowly(gate: Gate, case: Case, mesh: Mesh) -> GateResult | None:
        time.sleep(0.5)
        return None if mesh.comm.rank else result

    monkeypatch.setattr(Gate, "_one", slowly)
    chosen = [Case("gpt", gate_plan(2))] * 3 + [Case("gpt", gate_plan(1, 2))] * 3 + [Case("gpt", gate_plan(1))] * 2
    found = run_threads(4, lambda comm: list(Gate(comm).run(chosen)), timeout_s=2.0)
    assert found == [[result] * 8, [], [], []]


def test_every_optimizer_a_scaled_loss_and_all_papers_on_one_process() -> None:
    """On two ranks, and with 16-bit weights: `test_the_whole_gate`."""
    chosen = [case for case in numerics(1) if case.precision == "fp64"]
    assert {case.model for case in chosen if case.by_papers} == {*PAPERS}
    assert {case.optimizer for case in chosen} == {*OPTIMIZERS, ""}
    results = run(1, chosen)
    assert [result for result in results if not result.passed] == []
    assert max(max(dataclasses.astuple(result.apart)) for result in results) < 1e-13


@pytest.mark.slow
def test_16_bit_weights_report_the_norm_of_their_own_gradients() -> None:
    results = run(2, [case for case in numerics(2) if case.precision == "bf16-master"])
    assert [result.apart.norm <= 1e-6 and result.passed for result in results] == [True] * 4


def test_muon_where_matrices_are_cut_and_that_the_gate_sees_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All such layouts, with tp and ZeRO together and repeated KV heads: `test_the_whole_gate`."""
    chosen = [
        Case("llama", gate_plan(1, 2, True, 2), optimizer="muon"),
        Case("gemma", gate_plan(2, zero=3), optimizer="muon"),
    ]
    assert {*chosen} < {*numerics(2)}
    assert [result for result in run(2, chosen) if not result.passed] == []
    monkeypatch.setattr(MatrixRound, "__call__", lambda _, function, parts: list(map(function, parts)))
    assert [result.passed for result in run(2, chosen[:1])] == [False]


def test_a_case_of_an_optimizer_needs_one() -> None:
    with pytest.raises(UsageError, match="a case of adamw, and the gate was given no optimizer"):
        list(Gate(connect("alone")).run([Case("gpt", gate_plan(), optimizer="adamw")]))


def test_float32_within_twice_another_order_of_summation() -> None:
    results = run(4, [Case(model, gate_plan(2, 2, True, precision="fp32")) for model in MODELS])
    assert [result for result in results if not result.passed] == []
    # The bound is rounding, not slack: far above float64's, far below what a bug does.
    assert all(1e-9 < result.bound.gradient < 1e-3 for result in results)


CAUSES = {
    "bucket-left-out": "as if only replica 0 counted: a sum along dp is missing",
    "last-microbatch": "as if only microbatch 1 of 2 counted",
    "stage-tied-counted-twice": ": as if token_embedding.weight were counted twice",
    "stage-microbatches-swapped": ", in microbatches 0 and 1 alone: as if their order were wrong",
    "stage-scaled-by-microbatches": "4 times what it should be, as if it were not divided by the 4 microbatches",
    "stage-not-reduced": "as if only replica 0 counted: a sum along dp is missing",
    "stage-steps-early": ", from microbatch 1 on: as if the weights changed within the step",
    "scale-first-microbatch": "as if the loss scale of 1024 were applied to microbatch 0 alone",
    "scale-left-in-norm": ": as if the loss scale of 1024 were not taken out of it",
    "zero-norm-twice": ": as if every part were counted twice",
    "zero-groups-not-summed": "counted: a sum between groups of replicas is missing",
    "zero-microbatch-left-out": "as if only microbatch 0 of 2 counted",
    "zero-early-free": "an early FREE",
    "expert-gradient-times-ep": "2 times what it should be",
    "remote-gradient-lost": "as if only replica 1 counted: a sum along dp is missing",
    "context-loss-divided": "as if it were divided by 2 once too often, as many as ranks of cp",
    "context-loss-scaled": "as if it were not divided by the 2 microbatches or each of 2 ranks that share a sequence",
}
"""Of bugs that leave more than a place: what the gate says of their cause."""


SAMPLED = ("expert-gradient-times-ep", "context-loss-divided", "context-loss-scaled")
"""Of the bugs of experts and of shared sequences, those that every run of the tests plants."""


def slow_or_not(name: str) -> Any:
    """Products in bf16 take seconds on a CPU that has none; of two axes a sample is enough each time."""
    is_of_axis = name.startswith(("context-", "expert-", "router-", "remote-"))
    is_slow = PLANTS[name].kind == "masters" or (is_of_axis and name not in SAMPLED)
    return pytest.param(name, marks=pytest.mark.slow if is_slow else ())


def case_with(plant: Plant) -> Case:
    """The first case that can have a bug."""
    if plant in NUMERIC:
        candidates = numerics(1)
    elif plant.kind == "optimizer":
        candidates = numerics(2)
    elif plant.kind == "context":
        candidates = [case for ranks in (2, 4) for case in shared_sequences(ranks)]
        candidates.append(Case("dropped", gate_plan(cp=2, ep=2)))
    elif plant.kind == "zero":
        candidates = [case for ranks in (2, 4) for case in combinations(ranks)]
    else:
        spread = [Case("spread", *pair) for ranks in (2, 4) for pair in spread_experts(ranks)]
        candidates = (spread if plant.kind == "experts" else []) + [
            Case(model, layout)
            for ranks in (2, 4, 8)
            for layout in (pipelines(ranks) if plant.kind == "pipeline" else layouts(ranks))
            for model in MODELS
        ]
    return next(case for case in candidates if plant.applies(case))


@pytest.mark.parametrize("name", [slow_or_not(name) for name in PLANTS])
def test_a_planted_bug_turns_it_red_and_is_named(name: str) -> None:
    plant = PLANTS[name]
    case = case_with(plant)
    (result,) = run(case.layout.world, [case], plant)
    assert not result.passed
    assert plant.names in result.where
    assert CAUSES.get(name, "") in result.where
    if name not in CAUSES:
        assert "as if" not in result.where, "a cause that it is not"


SHIPPED = {
    "expert-gradient-times-ep": ("", "ep", "mlp.experts."),
    "expert-norm-left-out": ("dp, of which ep is a part", "ep", ""),
    "expert-clipped-apart": ("dp, of which ep is a part", "ep", "output.weight"),
    "expert-summed-over-all": ("dp, of which ep is a part", "ep", "mlp.experts."),
    "router-empty-slots": ("", "ep", "mlp.router.weight"),
    "router-detached": ("", "ep", "mlp.router.weight"),
    "remote-gradient-lost": ("over ep", "ep", "mlp.experts."),
    "expert-tail-not-set": ("", "ep", "mlp.experts."),
    "expert-idle-no-decay": ("", "ep", "mlp.experts."),
    "router-loss-divided": ("over dp", "dp", "mlp.router.weight"),
    "router-loss-times-tp": ("over tp", "tp", "mlp.router.weight"),
    "router-counts-twice": ("", "recompute", "mlp.router.weight"),
    "context-second-loss-divided": ("over cp", "cp", "mlp.router.weight"),
    "context-packed-positions": ("", "cp", "token_embedding.weight"),
    "zero-other-partition": ("over dp", "zero", "output.weight"),
}
"""Fifteen bugs that others shipped: what their placements say of them before anything runs, if they do; the axis or
setting that they come with; and what they are in."""
TYPED = sorted(name for name, (words, _, _) in SHIPPED.items() if words)


def test_placements_alone_refuse_half_of_the_bugs_that_others_shipped() -> None:
    assert len(SHIPPED) == 15
    assert len(TYPED) >= 8


@pytest.mark.parametrize("name", TYPED)
def test_a_bug_is_refused_before_anything_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(*arguments: object, **options: object) -> None:
        raise AssertionError("a step runs")

    monkeypatch.setattr(Gate, "train", runs)
    case = case_with(PLANTS[name])
    (result,) = run(case.layout.world, [case], PLANTS[name], checks_types=True)
    assert not result.passed
    assert result.where.startswith("refused before it ran: ")
    assert SHIPPED[name][0] in result.where
    assert re.search(r"(layers\.\d\.mlp\.(router|experts)|output)[.\w]*", result.where), "a parameter"


@pytest.mark.parametrize(
    "name",
    [*("attention-no-sum", "region-no-sum", "norm-no-sum", "attention-kv-copies", "stage-tied-not-summed"),
     *("stage-tied-counted-twice", "zero-norm-twice", "zero-groups-not-summed", "context-balance-per-rank"),
     "context-capacity-per-rank"],
)  # fmt: skip
def test_placements_see_older_bugs_too(name: str) -> None:
    case = case_with(PLANTS[name])
    (result,) = run(case.layout.world, [case], PLANTS[name], checks_types=True)
    assert result.where.startswith("refused before it ran: ")


def clean_layouts() -> list[Case]:
    """24, with each axis alone and together."""
    spread = [Case("spread", *pair) for ranks in (2, 4) for pair in spread_experts(ranks)]
    shared = [case for ranks in (2, 4) for case in shared_sequences(ranks)]
    whole = [Case(model, layout) for layout in layouts(4)[2:] for model in ("experts", "llama")]
    return [*spread[:10:2], *spread[10:], *shared[::3], *whole][:24]


@pytest.mark.parametrize("part", [slice(2), pytest.param(slice(2, 24), marks=pytest.mark.slow)])
def test_nothing_is_wrong_with_clean_layouts(part: slice) -> None:
    assert len(clean_layouts()) == 24
    assert [result for result in run(4, clean_layouts()[part]) if not result.passed] == []


@pytest.mark.slow
def test_every_bug_that_others_shipped_comes_with_an_axis_and_a_parameter() -> None:
    began = time.perf_counter()
    for name, (_, axis, parameter) in SHIPPED.items():
        case = case_with(PLANTS[name])
        (result,) = run(case.layout.world, [case], PLANTS[name])
        assert not result.passed, name
        assert f"(comes with {axis})" in result.where, name
        assert parameter in result.where, name
    assert time.perf_counter() - began < 120


def test_causes_that_no_plant_has() -> None:
    layout = gate_plan(dp=2, tp=4, accumulation=3)
    wanted = torch.arange(1.0, 5.0, dtype=torch.float64)
    nothing: Any = None  # a gradient that is a multiple of the right one asks the model nothing
    for ratio, words in (
        (3.0, "3 times what it should be, as if it were not divided by the 3 microbatches"),
        (2.0, "2 times what it should be, as if it were not divided by the 2 replicas or it were counted twice"),
        (0.25, "0.25 times what it should be, as if it were divided by 4 once too often, as many as ranks of tp"),
        (1.7, "1.7 times what it should be"),
    ):
        assert gradient_cause(layout, nothing, "weight", ratio * wanted, wanted, 1e-9) == f": {words}"
    assert gradient_cause(layout, nothing, "weight", 3 * wanted, wanted, 0.1) == "", "bf16 is too coarse"
    gradients = {"a": wanted, "b": 2 * wanted}
    squares = [float(gradient.square().sum()) for gradient in gradients.values()]
    assert norm_cause(math.sqrt(squares[0]), gradients, 1e-9) == "as if b were counted not at all"
    assert norm_cause(math.sqrt(3 * sum(squares)), gradients, 1e-9) == "as if every part were counted 3 times"
    assert norm_cause(math.sqrt(1.1 * sum(squares)), gradients, 1e-9) == "a part counts wrongly"
    assert norm_cause(math.inf, gradients, 1e-9) == norm_cause(math.nan, gradients, 1e-9) == "a part counts wrongly"
    turns = [wanted, wanted + 1, wanted + 2, wanted + 3]
    assert order_cause(turns, turns, 1e-9) == 0
    assert order_words(order_cause([t + 1 for t in turns], turns, 1e-9)) == ""


def compressed_cases(plant: Plant) -> list[Case]:
    """Of frozen codes and of matrices rounded in every pass, the first layout and model each that can have the bug."""
    every = [
        Case(model, layout, weights=weights)
        for ranks in (2, 4)
        for layout, weights in compressed(ranks)
        for model in MODELS
    ]
    suited = [case for case in every if plant.applies(case)]
    return list({case.weights.startswith("rounded"): case for case in reversed(suited)}.values())


OTHERWISE_PLANTED = ("attention-no-sum", "mlp-bias-everywhere", "mlp-wrong-slice")
"""Bugs that are put into a compressed projection in another way than into a plain one."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OTHERWISE_PLANTED else pytest.mark.slow)
        for name, plant in PLANTS.items()
        if compressed_cases(plant)
    ],
)
def test_a_planted_bug_reaches_compressed_matrices(name: str) -> None:
    """They hold their sum over ranks, their bias and their rows in other places than plain ones do."""
    plant = PLANTS[name]
    for case in compressed_cases(plant):
        (result,) = run(case.layout.world, [case], plant)
        assert not result.passed, f"{case} passes with the bug in it"
        assert plant.names in result.where


def test_every_bug_but_those_of_pipelines_and_deeper_zero_meets_compressed_matrices() -> None:
    never = {name for name, plant in PLANTS.items() if not compressed_cases(plant)}
    others = {name for name in never if PLANTS[name].kind not in ("pipeline", "context", "experts")}
    others -= {"expert-idle-no-decay"}  # of an optimizer over experts
    assert {name for name in others if PLANTS[name] not in NUMERIC} == {
        "zero-groups-not-summed",
        "zero-microbatch-left-out",
    }, "ZeRO in groups and in stage 2 without offload: not among the compressed layouts"
    codes = {name for name, plant in PLANTS.items() if any("rounded" not in c.weights for c in compressed_cases(plant))}
    assert {PLANTS[name].kind for name in codes} >= {"attention", "mlp", "column", "embedding", "loss", "gradients"}


OF_ONE_PROCESS = {name for name, plant in PLANTS.items() if any(map(plant.applies, every_case(1)))}


@pytest.mark.parametrize("name", sorted(PLANTS.keys() - OF_ONE_PROCESS))
def test_a_bug_that_nothing_asked_for_can_have_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Or else the gate would be green with nothing planted. What it says to give instead does have it."""
    assert main(["verify", "--ranks", "1", "--no-pairs", "--plant", name]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    given = re.search(r"give --ranks (\d)(?: --models (\w+))?( without --no-pairs)?$", said)
    assert given is not None, said
    asked = every_case(int(given[1]), (given[2],) if given[2] else (), pairs=bool(given[3]))
    assert any(PLANTS[name].applies(case) for case in asked)


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_combinations_have_every_pair_of_settings_that_can_be(ranks: int) -> None:
    def pairs(combinations: Any) -> set[object]:
        inside: set[object] = set()
        for values in {combination.values for combination in combinations}:
            inside.update(itertools.combinations(enumerate(values), 2))
        return inside.union((found.model, place) for found in combinations for place in enumerate(found.values))

    chosen, possible = _chosen(ranks), list(_possible(ranks))
    assert set(chosen) <= set(possible)
    assert pairs(chosen) == pairs(possible)
    assert len(chosen) < len(possible) / 4
    layouts_of = [case.layout for case in combinations(ranks)]
    assert {layout.schedule for layout in layouts_of} == {*synchronous()}
    assert {layout.offload for layout in layouts_of} == {*OFFLOADED}
    assert {(layout.zero, layout.recompute) for layout in layouts_of} == {
        (zero, recompute) for zero in range(4) for recompute in ("none", "full", "operators")
    }


def test_a_sample_of_the_combinations() -> None:
    """Some of those on four ranks; all of them, on up to eight, are `test_the_whole_gate`."""
    of_four = [case for case in combinations(4) if case.layout.world == 4]
    firsts = {(case.layout.zero, case.layout.pp > 1): case for case in reversed(of_four)}
    chosen = list(firsts.values())
    assert {zero for zero, _ in firsts} == {0, 1, 2, 3}
    assert [result for result in run(4, chosen) if not result.passed] == []


def test_there_is_a_bug_for_every_kind_of_layer() -> None:
    kinds = {plant.kind for plant in PLANTS.values()}
    assert kinds == {
        "attention",
        "mlp",
        "column",
        "embedding",
        "loss",
        "norm",
        "dropout",
        "gradients",
        "pipeline",
        "zero",
        "context",
        "experts",
        "scale",
        "masters",
        "optimizer",
        "papers",
    }
    assert {"last-microbatch", "scale-first-microbatch", "rotary-angles-everywhere"} <= OF_ONE_PROCESS


def test_not_a_number_is_within_no_bound() -> None:
    bound = Apart(1.0, 1.0, 1.0, 1.0)
    assert Apart(0, 0, 0).within(bound)
    for place, value in itertools.product(range(4), (math.nan, 2.0)):
        assert not Apart(*(value if place == other else 0.0 for other in range(4))).within(bound)


def test_what_it_covers() -> None:
    chosen = [case for case in cases(8) if not case.weights]
    assert {case.weights.split("-")[0] for case in cases(8)} >= {"", "int3", "int4", "int8", "rounded int4"}
    piped = [case.layout for case in chosen if case.layout.pp > 1]
    plain = [case for case in chosen if case.layout.pp == case.layout.ep == case.layout.cp == 1 and not case.packed]
    plain = [case for case in plain if not case.layout.expert_tp]
    assert len(plain) == 32 * (len(MODELS) - 1)  # one is for layouts that share out experts
    assert {layout.schedule for layout in piped} == {*synchronous()}
    assert {(layout.dp > 1, layout.tp > 1, layout.pp) for layout in piped} >= {
        (dp, tp, 2) for dp in (False, True) for tp in (False, True)
    }
    assert {case.layout.world for case in chosen} == {1, 2, 4, 8}
    models = MODELS.values()
    for field in ("norm", "norm_place", "positions", "biases", "tied", "activation", "kv_heads"):
        assert len({getattr(model, field) for model in models}) >= 2, field
    assert all(model.dropout == 0.1 for model in models)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "3 ranks"),
        ((16,), "16 ranks"),
        ((2, ("gtp",)), "did you mean 'gpt'"),
        ((2, (), "fp8"), "precision 'fp8'"),
    ],
)
def test_what_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        cases(*arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tilemesh", "verify", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=1000, check=False)


@pytest.mark.slow
def test_the_command_prints_its_table_and_keeps_the_lines(tmp_path: Path) -> None:
    file = tmp_path / "gate.jsonl"
    done = command("--ranks", "2", "--transport", "threads", "--models", "gpt", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "dp=1 tp=2 sequence ×2" in done.stdout
    assert f"{len(every_case(2, ('gpt',)))} cases: every layout computes what one process computes" in done.stdout
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == len(every_case(2, ("gpt",)))
    assert all(line["passed"] and line["apart"]["gradient"] <= line["bound"]["gradient"] == 1e-10 for line in lines)


def test_a_case_is_in_the_file_as_soon_as_it_is_found(tmp_path: Path) -> None:
    """A run of many minutes that is stopped leaves what it has found; a file of an earlier run is replaced."""
    file = tmp_path / "new" / "gate.jsonl"
    file.parent.mkdir()
    file.write_text("of an earlier run\n")
    zeros = {"loss": 0.0, "gradient": 0.0, "weights": 0.0, "norm": 0.0}
    ones = dict.fromkeys(zeros, 1.0)
    lines = [
        {"model": "gpt", "layout": f"dp={dp}", "passed": True, "apart": zeros, "bound": ones, "planted": False}
        for dp in (1, 2, 4)
    ]
    table = LayoutTable(str(file))
    for count, line in enumerate(lines, start=1):
        table.add(line)
        assert [json.loads(text) for text in file.read_text().splitlines()] == lines[:count]
    summary = table.end()
    assert [json.loads(text) for text in file.read_text().splitlines()] == lines
    assert any("3 cases" in str(block) for block in summary.text)


@pytest.mark.parametrize("transport", ["threads", pytest.param("mpi", marks=[NEEDS_MPI, pytest.mark.slow])])
def test_the_command_is_red_when_it_should_be(
    transport: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Layouts over processes are also in `test_a_sample_of_layouts_over_processes`."""
    file = tmp_path / "gate.jsonl"
    words = ("--ranks", "2", "--transport", transport, "--models", "gpt", "--no-pairs")
    assert main(["verify", *words, "--plant", "attention-no-sum", "--json", str(file)]) == 1
    assert "gpt: refused before it ran: layers.0.attention.fc_o.weight is cut over tp" in capfd.readouterr().out
    assert json.loads(file.read_text())["apart"]["gradient"] is None
    assert main(["verify", *words, "--plant", "mlp-bias-everywhere", "--json", str(file)]) == 1
    said = capfd.readouterr().out
    assert "1 of 1 FAIL" in said
    assert "gpt: forward differs first at layers.1.mlp;" in said
    assert "planted in 1 case, found in 1 of them\n1 case: 1 FAIL" in said, "the first case that shows it is the last"
    [line] = [json.loads(line) for line in file.read_text().splitlines()]
    assert line["planted"]
    assert not line["passed"]
    assert line["apart"]["gradient"] > line["bound"]["gradient"] == 1e-10


def test_a_plant_that_some_cases_do_not_show_is_looked_for_in_the_next() -> None:
    """On more ranks than a layout has, too: all of them stop together."""
    plant = PLANTS["attention-no-sum"]
    never = dataclasses.replace(plant, put=lambda laid: None if laid.mesh.tp.size == 4 else plant.put(laid))
    chosen = [Case("gpt", gate_plan(1, tp)) for tp in (2, 2, 4)]  # those of most ranks come first
    torch.set_num_threads(1)
    found = run_threads(4, lambda comm: list(Gate(comm, plant=never, stops_when_found=True).run(chosen)), timeout_s=100)
    assert [(result.case.layout.tp, result.passed) for result in found[0]] == [(4, True), (2, False)]
    assert found[1:] == [[], [], []]


@pytest.mark.parametrize("words", [("--plant", "nonsense"), ("--transport", "smoke"), ("--device", "tpu")])
def test_wrong_words_are_refused_before_anything_starts(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--ranks", "2", *words]) == 2
    assert f"'{words[1]}'" in capsys.readouterr().err


def test_what_the_documents_say_of_the_gate_is_so() -> None:
    """How many cases there are, and which models: both are written by hand."""
    root = Path(__file__).parents[2]
    said = re.search(r"(\d+) cases of layout and model on up to 8 ranks", (root / "README.md").read_text())
    assert said is not None
    assert int(said[1]) == len(every_case(8))
    assert f"Of {', '.join(MODELS)}; default" in (root / "docs" / "commands.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", [*PROCESSES, "threads"])
def test_the_whole_gate(transport: str) -> None:
    done = command("--ranks", "8", "--transport", transport)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(every_case(8))} cases: every layout computes what one process computes" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@NEEDS_MPI
def test_the_whole_gate_where_arithmetic_rounds(precision: str) -> None:
    done = command("--ranks", "8", "--transport", "mpi", "--precision", precision)
    assert done.returncode == 0, done.stdout + done.stderr
