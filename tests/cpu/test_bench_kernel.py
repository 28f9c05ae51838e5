"""Rows of `tilemesh bench kernel`: peers, checks, limits, charts."""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
import torch

from tilemesh.bench.harness import BenchCase, KeptRows, TimingTurn
from tilemesh.bench.kernel.book import bench_of
from tilemesh.bench.kernel.cases import cases_of, drawn_cases
from tilemesh.bench.kernel.counted import counted_rows
from tilemesh.bench.kernel.measure import Candidates, MeasuredDevice, _limit, prepared_cases
from tilemesh.bench.kernel.run import measure_cases
from tilemesh.cli.main import main
from tilemesh.cli.pages import _work, bench_drawings, write_charts
from tilemesh.core import calibration
from tilemesh.core.cost import Ceiling, limit_s
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import DEVICES
from tilemesh.kernels import registry, scale_shift
from tilemesh.kernels.launch.native import NATIVE
from tilemesh.kernels.launch.steps import LaunchPlan
from tilemesh.kernels.matmul.cost import SUITE, cost
from tilemesh.kernels.matmul.problem import dense
from tilemesh.kernels.rates import pass_s
from tilemesh.measure.row import read_rows
from tilemesh.measure.timing import LoopTimer
from tilemesh.report import kernel_page
from tilemesh.report.draw import Drawing, Note, PageTable, Plot, PlotAxis
from tilemesh.report.kernel_charts import compute_bound, kernel_times, names_beside, roofline
from tilemesh.report.picture import svg, write_picture

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROBLEM = dense(2048, 2048, 2048)


ON_THE_CPU = MeasuredDevice(
    torch.device("cpu"), "NVIDIA H200", 1, {kind: LoopTimer(min_reading_s=1e-6) for kind in ("kernel", "call")}
)


def bench_rows(bench, shapes, settings=None, *, compiled=True, peers=None, repeats, on):
    """Of operators that no registry has."""
    (shape,), settings = shapes, settings or {}
    problem = bench.form.problem(shape, settings)
    candidates = Candidates.of(bench, problem, compiled, peers)
    cases = prepared_cases(bench, problem, bench.form.case(shape, settings), candidates, on, repeats)
    return [case.measure() for case in cases]


def test_calls_with_gradients_are_timed_once_their_node_is_compiled(monkeypatch):
    """The first to call it starts the compiler beside the work, and for a minute calls would be those of Python."""
    loads = []
    monkeypatch.setattr(NATIVE, "functions", None)
    monkeypatch.setattr(NATIVE, "load", lambda: loads.append(1))
    bench = bench_of(registry.find("rms_norm"))
    for kind, passes, count in (("call", "forward", 0), ("kernel", "both", 0), ("call", "both", 1)):
        on = replace(ON_THE_CPU, timers={kind: ON_THE_CPU.timers[kind]})
        bench_rows(bench, ["5x8"], {"passes": passes, "dtype": "float32"}, compiled=False, repeats=1, on=on)
        assert len(loads) == count


@pytest.mark.parametrize(
    ("name", "shape", "given", "peers"),
    [
        ("matmul", "8x6x4", {"dtype": "float32", "c": "row"}, ["eager", "addmm", "cublaslt", "a @ b alone"]),
        ("matmul", "8x6x4", {"dtype": "float32", "c": "none", "layout": "nt"}, ["eager", "a @ b alone"]),
        ("scale_shift", "5x7", {"activation": "silu"}, ["eager"]),
    ],
)
def test_rows_of_any_operator_are_made_the_same_way(monkeypatch, name, shape, given, peers):
    monkeypatch.setattr(calibration, "find", lambda identity: None)
    entry = registry.find(name)
    rows = bench_rows(bench_of(entry), [shape], given, compiled=False, repeats=2, on=ON_THE_CPU)
    assert [row.case["time"] for row in rows] == ["kernel", "call"]
    kernel, call = rows
    form, figures = entry.load("form"), DEVICES["h200"]
    work = form.cost(form.problem(shape, given))
    for row in rows:
        assert row.name == entry.public.partition(":")[2]
        assert list(row.peers) == peers
        assert row.limit == limit_s(work, Ceiling.of_device(figures))
        assert {"compile": "left out: --no-compile"}.items() <= row.missing.items()
        assert form.cost_of(row.case) == work
        assert row.case.items() >= {"shape": shape, **given, "limit": "datasheet"}.items()
    assert kernel.predicted > kernel.limit
    assert (call.predicted, "predicted" in call.missing) == (None, True)
    if name == "scale_shift":
        assert kernel.predicted == pass_s(work, figures)


def test_rows_have_what_torch_compile_makes_and_refuse_a_wrong_result(monkeypatch):
    bench, made = bench_of(registry.find("scale_shift")), []

    def compiled(function, mode, dynamic):
        made.append(mode)
        return lambda *given: function(*given) + 1

    monkeypatch.setattr(torch, "compile", compiled)
    rows = bench_rows(bench, ["5x7"], repeats=1, on=ON_THE_CPU)
    assert made == [None]
    for row in rows:
        assert "compile" not in row.peers
        assert "compile is wrong: error" in row.missing["compile"]
    unknown_gpu = replace(ON_THE_CPU, name="NVIDIA Unheard-of")
    (row, _) = bench_rows(bench, ["5x7"], compiled=False, repeats=1, on=unknown_gpu)
    assert row.missing["predicted"] == "no figures for NVIDIA Unheard-of"
    wrong = replace(bench, function=wrong_scale_shift)
    with pytest.raises(RunError, match=r"5x7: .*ours is wrong"):
        bench_rows(wrong, ["5x7"], compiled=False, repeats=1, on=ON_THE_CPU)
    call_alone = replace(ON_THE_CPU, timers={"call": ON_THE_CPU.timers["call"]})
    with pytest.raises(RunError, match=r"5x7: .*ours is wrong"):
        bench_rows(wrong, ["5x7"], compiled=False, repeats=1, on=call_alone)


def test_rows_check_what_a_step_in_place_does(monkeypatch):
    """Torch's own step for adamw is right; one that does nothing is no peer, and says why."""
    bench = bench_of(registry.find("adamw"))
    (row, _) = bench_rows(bench, ["2x9"], {"dtype": "float32"}, repeats=1, on=ON_THE_CPU)
    assert list(row.peers) == ["eager"]
    idle = {**bench.calls(None), "eager": lambda *given: None}
    monkeypatch.setattr(bench, "calls", lambda problem: idle)
    (row, _) = bench_rows(bench, ["2x9"], {"dtype": "float32"}, repeats=1, on=ON_THE_CPU)
    assert row.missing["eager"].startswith("eager is wrong: tensor 0: error")


def liger(functions):
    """A package like Liger-Kernel that has these functions, each a torch.autograd.Function by its looks."""
    return SimpleNamespace(**{name: SimpleNamespace(apply=apply) for name, apply in functions.items()})


def test_peers_of_other_packages_are_called_on_tensors_of_their_own(monkeypatch):
    """Liger-Kernel writes gradients over its inputs: nobody else may see that, and its result is still checked."""

    def overwriting(x):
        y = torch.softmax(x, -1)
        x.data.fill_(7.0)
        return y

    monkeypatch.setitem(sys.modules, "liger_kernel.ops", liger({"LigerSoftmaxFunction": overwriting}))
    bench = bench_of(registry.find("softmax"))
    (row, _) = bench_rows(bench, ["5x7"], compiled=False, repeats=1, on=ON_THE_CPU)
    assert {"eager", "liger"} == set(row.peers)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", liger({"LigerSoftmaxFunction": lambda x: x.detach() * 2}))
    (row, _) = bench_rows(bench, ["5x7"], peers=["liger"], repeats=1, on=ON_THE_CPU)
    assert row.missing["liger"].startswith("liger is wrong: error")
    assert (row.missing["eager"], row.missing["compile"]) == ("left out: --peers", "left out: --peers")


def test_a_peer_that_is_not_there_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)  # as where it is not installed
    monkeypatch.delattr("torch.nn.functional.linear_cross_entropy", raising=False)
    bench = bench_of(registry.find("linear_cross_entropy"))
    (row, _) = bench_rows(bench, ["5x4x7"], compiled=False, repeats=1, on=ON_THE_CPU)
    assert row.missing["liger"].startswith(
        "Liger-Kernel cannot be imported: ModuleNotFoundError: import of liger_kernel"
    )
    assert row.missing["F.linear_cross_entropy"].endswith("has no F.linear_cross_entropy")
    (row, _) = bench_rows(bench_of(registry.find("scale_shift")), ["5x7"], peers=["liger"], repeats=1, on=ON_THE_CPU)
    assert row.missing["liger"] == "scale_shift has no such peer for this problem"


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="needs torch 2.13")
@pytest.mark.parametrize("passes", ["forward", "both"])
def test_torchs_own_fused_loss_is_a_peer_where_torch_has_it(passes):
    bench = bench_of(registry.find("linear_cross_entropy"))
    given = {"dtype": "float32", "passes": passes}
    (row, _) = bench_rows(bench, ["6x4x9"], given, peers=["F.linear_cross_entropy"], repeats=1, on=ON_THE_CPU)
    assert list(row.peers) == ["F.linear_cross_entropy"]


def test_all_is_every_operator_forward_and_backward():
    cases = cases_of(["all"])
    assert list(dict.fromkeys(case.operator for case in cases)) == registry.names()
    for name in registry.names():
        form, own = registry.find(name).load("form"), [case for case in cases if case.operator == name]
        assert list(dict.fromkeys(case.shape for case in own)) == list(form.suite)
        both = {"forward", "both"} if "passes" in form.settings else set()
        assert {case.settings["passes"] for case in own if "passes" in case.settings} == both
    given = cases_of(["all"], settings={"passes": "both"})
    assert {case.settings["passes"] for case in given if case.settings} == {"both"}
    two = cases_of(["matmul", "softmax"], settings={"c": "row"}, dtypes="float16,float32")
    assert {(case.operator, *case.settings.items()) for case in two} == {
        ("matmul", ("c", "row"), ("dtype", "float16")), ("matmul", ("c", "row"), ("dtype", "float32")),
        ("softmax", ("dtype", "float16")), ("softmax", ("dtype", "float32")),
    }  # fmt: skip


def test_a_case_that_fails_is_named_and_the_others_go_on(monkeypatch, tmp_path):
    kept = KeptRows(tmp_path / "rows.jsonl")
    cases = cases_of(["softmax", "scale_shift"], ["5x7"])
    broken = bench_of(registry.find("scale_shift"))
    monkeypatch.setattr(type(broken), "predict_s", lambda *given: 1 / (given[0].name != "scale_shift"))
    rows, without = measure_cases(
        cases, compiled=False, peers=["eager"], times=["call"], repeats=1, rows=kept,
        on=ON_THE_CPU,
    )  # fmt: skip
    assert [(row.name, row.case["time"]) for row in rows] == [("softmax", "call")]
    assert without == {"scale_shift 5x7": "ZeroDivisionError: division by zero"}
    assert kept == read_rows(tmp_path / "rows.jsonl") == rows
    with pytest.raises(RunError, match="none of 2 cases could be measured; softmax 5x7: the time was up"):
        measure_cases(cases, seconds=1e-9, on=ON_THE_CPU)
    with pytest.raises(ZeroDivisionError):
        measure_cases(cases[1:], compiled=False, repeats=1, on=ON_THE_CPU)


def test_in_a_turn_every_case_has_compiled_before_the_first_is_timed(monkeypatch, tmp_path):
    seen, cases, measure = [], cases_of(["softmax", "scale_shift"], ["5x7"]), BenchCase.measure
    monkeypatch.setattr(BenchCase, "warm", lambda case: seen.append(f"{case.name} ready"))
    monkeypatch.setattr(BenchCase, "measure", lambda case: seen.append(case.name) or measure(case))
    given = {
        "peers": ["eager"],
        "times": ["call"],
        "repeats": 1,
        "on": ON_THE_CPU,
        "turn": TimingTurn(tmp_path / "lock"),
    }
    rows, without = measure_cases(cases, **given)
    assert seen == ["softmax ready", "scale_shift ready", "softmax", "scale_shift"]
    assert ([row.name for row in rows], without) == (["softmax", "scale_shift"], {})


def wrong_scale_shift(x, scale, shift, activation):
    return x * scale


wrong_scale_shift.reference = scale_shift.reference


def test_bench_kernel_measures_an_operator_without_a_tuner(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("tilemesh.bench.kernel.run.this_gpu", lambda: ON_THE_CPU)
    rows, chart, page = (tmp_path / name for name in ("rows.jsonl", "chart.svg", "page.html"))
    command = ["bench", "kernel", "scale_shift", "--shapes", "5x7,9x4", "--dtype", "float32,bfloat16", "--no-compile"]
    written = ["--json", str(rows), "--chart", str(chart), "--html", str(page)]
    assert main([*command, "--set", "activation=gelu", "--repeats", "1", *written]) == 0
    found = list(read_rows(str(rows)))
    assert [(row.case["shape"], row.case["dtype"], row.case["activation"]) for row in found[::2]] == [
        (shape, dtype, "gelu") for dtype in ("float32", "bfloat16") for shape in ("5x7", "9x4")
    ]
    assert ">scale_shift, float32, gelu<" in chart.read_text()
    assert "Roofline" in page.read_text()
    assert main(["tune", "scale_shift"]) == 2
    assert capsys.readouterr().err == "tilemesh: operator 'scale_shift' has nothing to tune; these have: matmul\n"


RECORDED = BENCHMARKS / "results" / "matmul_rows_h200_float16.jsonl"


def test_the_chart_has_every_recorded_shape_and_peer(tmp_path):
    rows = read_rows(RECORDED)
    write_picture(bench_drawings(rows), str(tmp_path / "chart.svg"))
    text = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    assert all(f">{shape}<" in text for shape in SUITE)
    assert all(f">{peer}<" in text for peer in ("limit", "ours", *rows[0].peers))
    ET.fromstring(text)
    with pytest.raises(UsageError, match=r"\.svg or \.png"):
        write_picture(bench_drawings(rows), str(tmp_path / "chart.pdf"))
    with pytest.raises(UsageError, match="no kernel-time rows"):
        bench_drawings([row for row in rows if row.case["time"] == "call"])


def test_a_rate_is_work_over_time():
    """Bandwidth for what moves more than it computes, else FLOP/s; the limit's and the peers' from the same row."""
    rows = read_rows(BENCHMARKS / "results" / "kernels_h200.jsonl")
    drawings = {drawing.title: drawing for drawing in bench_drawings(rows)}
    softmax = drawings["softmax, bfloat16"]
    assert softmax.plot.y.words == "B/s reached"
    assert drawings["linear_cross_entropy, bfloat16, forward and backward"].plot.y.words == "FLOP/s reached"
    lines = {layer.name: dict(layer.points) for layer in softmax.plot.layers}
    row = next(row for row in rows if row.name == "softmax" and row.case["shape"] == "8192x8192")
    place = softmax.plot.x.names.index("8192x8192")
    taken = {"ours": row.measured.median, "limit": row.limit, "compile": row.peers["compile"].median}
    for name, seconds in taken.items():
        assert lines[name][place] == pytest.approx(2 * 2 * 8192 * 8192 / seconds)


def test_a_png_is_made_by_what_the_machine_has(tmp_path, monkeypatch):
    drawings = bench_drawings(read_rows(RECORDED))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="found neither"):
        write_picture(drawings, str(tmp_path / "chart.png"))
    tool = tmp_path / "rsvg-convert"
    tool.write_text("#!/bin/sh\n[ $1 = --zoom ] && [ -s $5 ] && echo picture > $4\n")
    tool.chmod(0o755)
    write_picture(drawings, str(tmp_path / "new" / "chart.png"))
    assert (tmp_path / "new" / "chart.png").read_text() == "picture\n"
    tool.write_text("#!/bin/sh\necho no fonts >&2\n")
    with pytest.raises(RunError, match="no fonts"):
        write_picture(drawings, str(tmp_path / "chart.png"))


def test_no_name_of_the_roofline_covers_a_dot_or_another():
    text = svg([bench_drawings(read_rows(RECORDED))[-1]])
    names = re.findall(
        r'<text class="note" font-size="11" x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([^<]+)<', text
    )
    shapes = re.findall(r'<path class="s[01] dot" stroke-width="10" d="([^"]+)"', text)
    dots = re.findall(r"M([\d.]+),([\d.]+)h0", "".join(shapes))
    assert len(names) == len(SUITE)  # every dot has its name, or its number where that has no room
    assert len(dots) == 2 * len(SUITE)
    boxes = []
    for x, y, anchor, word in names:
        begin = float(x) - (6 * len(word) if anchor == "end" else 0)
        boxes.append((begin, float(y) - 10, begin + 6 * len(word), float(y) + 2))
    boxes += [(float(x) - 4, float(y) - 4, float(x) + 4, float(y) + 4) for x, y in dots]
    for one, other in itertools.combinations(range(len(boxes)), 2):
        if one < len(names):
            (a, b, c, d), (e, f, g, h) = boxes[one], boxes[other]
            assert a >= g or e >= c or b >= h or f >= d, (names[one], boxes[other])


def test_a_name_of_the_roofline_is_near_its_dot_or_a_line_leads_to_it():
    x, y = PlotAxis(0.0, 1.0, "x", str), PlotAxis(0.0, 1.0, "y", str)
    heap = [(0.5, 0.5 + place / 100) for place in range(10)]
    made = names_beside(heap, [], [f"{place}x8192x8192 float16" for place in range(10)], x, y, numbers=True)
    assert len(made) == len(heap)
    line = 0.06
    far = [note for note, (_, height) in zip(made, heap, strict=True) if abs(note.y - height) > 1.5 * line]
    assert far
    assert all(note.text.isdigit() for note in far)  # where names are far away they are short
    assert [note for note in made if note.named_y is not None] == far
    plot = Plot(x, y, made)
    assert str(Drawing("t", "", plot, PageTable([], [])).show()).count('class="lead"') == len(far)
    assert svg([Drawing("t", "", plot, PageTable([], []))]).count('class="lead"') == len(far)


def test_the_roofline_of_several_operators_names_them():
    rows = [row for row in read_rows(BENCHMARKS / "results" / "operators_h200.jsonl") if row.name != "train"]
    work = [_work(row) for row in rows]
    pairs = kernel_times(rows, work)
    assert {row.name for row, _ in compute_bound(pairs)} == {"linear_cross_entropy"}
    drawing = roofline(pairs)
    notes = [layer.text for layer in drawing.plot.layers if isinstance(layer, Note)]
    assert sorted(notes, key=int) == [str(number + 1) for number in range(len(pairs))]
    assert any(cells[0].endswith(": softmax 8192x8192 bfloat16") for cells in drawing.table.rows)
    shown = kernel_page.render(rows, work)
    assert "the largest saving is linear_cross_entropy 8192x4096x128256" in shown


def test_the_roofline_explains_numbers_where_it_has_any():
    rows = read_rows(RECORDED)
    for some in (rows, [row for row in rows if row.case["shape"] == rows[0].case["shape"]][:1]):
        drawing = bench_drawings(some)[-1]
        assert drawing.title == "Roofline"
        numbers = [layer.text for layer in drawing.plot.layers if isinstance(layer, Note) and layer.text.isdigit()]
        assert ("A number is that of a case" in drawing.words) == bool(numbers) == (some is rows)


def test_the_committed_charts_are_of_the_committed_rows(tmp_path):
    """docs/kernels/README.md has the command that makes them."""
    folder = BENCHMARKS.parent / "docs" / "kernels" / "charts"
    files = re.search(r"tilemesh report (.*) --svg docs/kernels/charts", (folder.parent / "README.md").read_text())
    rows = [row for path in files.group(1).split() for row in read_rows(BENCHMARKS.parent / path)]
    made = {Path(path).name: Path(path).read_text(encoding="utf-8") for path in write_charts(rows, str(tmp_path))}
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")} == made


def test_a_limit_says_where_it_is_from(monkeypatch):
    calibrated = calibration.load(BENCHMARKS / "results" / "calibration-h200.json")
    monkeypatch.setattr(calibration, "find", lambda identity: calibrated)
    limit, why = _limit(cost(PROBLEM), "NVIDIA H200")
    assert (round(limit * 1e6, 1), why) == (22.3, "")
    monkeypatch.setattr(calibration, "find", lambda identity: None)
    by_datasheet, why = _limit(cost(PROBLEM), "NVIDIA H200")
    assert (by_datasheet < limit, why) == (True, "datasheet")
    assert _limit(cost(PROBLEM), "NVIDIA Unheard-of")[0] is None


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float16_row"])
def test_the_committed_rows_lie_under_one_roof(name):
    """The calibrated one of the machine that made them: another for some of them would be a spike in the chart."""
    calibrated = calibration.load(BENCHMARKS / "results" / "calibration-h200.json")
    for row in read_rows(str(BENCHMARKS / "results" / f"matmul_rows_h200_{name}.jsonl")):
        assert row.machine == calibrated.identity
        sides = (int(side) for side in row.case["shape"].split("x"))
        problem = dense(*sides, dtype=row.case["dtype"], c_kind=row.case["c"], activation=row.case["activation"])
        assert row.limit == pytest.approx(limit_s(cost(problem), Ceiling.of_calibration(calibrated, "gpu")))


def test_drawn_problems_go_on_where_they_stopped():
    cases = drawn_cases(["layer_norm", "matmul"], 30)
    assert [case.operator for case in cases] == ["layer_norm"] * 30 + ["matmul"] * 30
    assert drawn_cases(["layer_norm"], 10, skip=20) == cases[20:30]
    for case in cases[:30]:
        rows, columns = map(int, case.shape.split("x"))
        assert rows <= 1_000_000
        assert columns <= 131_072
        assert rows * columns <= 2**27
    assert {case.settings["passes"] for case in cases[:30]} == {"forward", "both"}
    with pytest.raises(UsageError, match="operators over rows, not of rotary"):
        drawn_cases(["rotary"], 1)


def test_without_a_gpu_kernels_are_checked_and_counted(tmp_path, capsys, monkeypatch):
    file = tmp_path / "rows.jsonl"
    asked = ["bench", "kernel", "layer_norm", "--set", "passes=both", "--shapes", "2048x301", "--json", str(file)]
    assert main([*asked, "--on", "h200"]) == 0
    (row,) = read_rows(file)
    work = registry.find("layer_norm").load("form").cost_of({"shape": "2048x301", "passes": "both"})
    assert (row.measured, row.case["bytes"], row.case["flops"]) == (None, work.bytes_moved, work.flops)
    assert row.limit == pytest.approx(work.bytes_moved / DEVICES["h200"].memory_bytes_per_s)
    assert row.predicted > row.limit
    assert "no GPU here" in row.missing["measured"]
    assert "128x76" in capsys.readouterr().out
    monkeypatch.setattr("tilemesh.kernels.norm.kernel.forward_plan", lambda *_, **__: LaunchPlan(()))  # writes nothing
    assert main([*asked[:-2], "--on", "h200"]) == 1
    assert "none of 1 cases could be counted; layer_norm 2048x301 both: ours is wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    "operator", ["adamw 16x1024", "attention 1x64x2x2x16", "matmul 64x64x64", "self_attention 1x32x2x1x16"]
)
def test_every_kind_of_benchmark_is_checked_without_a_gpu(operator):
    name, shape = operator.split()
    rows, without = counted_rows(cases_of([name], [shape]), "a100")
    assert without == {}
    assert rows[0].predicted > 0


def test_without_a_gpu_configurations_are_ranked(capsys):
    assert main(["tune", "2000x3000x1000", "--on", "a100"]) == 0
    said = capsys.readouterr().out
    assert "10 of 24, ranked by the cost model" in said.replace("\n", " ")
    assert main(["tune", "2000x3000x1000"]) == 2
    assert "--on h200" in capsys.readouterr().err
