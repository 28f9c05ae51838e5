"""The page of a training run: did it work, how fast against the limit, where time and memory went, what to do next."""

from __future__ import annotations

import math

from tilemesh.core.axes import ORDER
from tilemesh.core.units import format_bytes, format_count, format_seconds
from tilemesh.measure.sample import Sample
from tilemesh.plan.grade import expected_kept
from tilemesh.report import (
    compare,
    memory_part,
    mesh_part,
    method_part,
    pipeline_part,
    routing_part,
    run_parts,
    time_parts,
)
from tilemesh.report.html import Child, Fact, Html, el, join, pair, tied
from tilemesh.report.kind_page import Beside, KindPage, PageSection, PairSection, Verdict
from tilemesh.report.rows import percent, row_table
from tilemesh.report.run import RUNNING, Run
from tilemesh.report.verdict import improve, judge
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.names import CONFIG, METRICS, PREDICTED, SAMPLE, SUMMARY, TRACE
from tilemesh.runs.values import number, section
from tilemesh.runs.values import numbers as figures


def _about(run: Run) -> str:
    model, plan = section(run.summary, "model") or section(run.config, "model"), run.plan
    parts = []
    if number(run.summary.get("parameters"), 0) > 0:
        parts.append(f"{format_count(run.summary['parameters'])} parameters")
    shape = [f"{key} {model[key]}" for key in ("layers", "width", "heads", "vocabulary") if key in model]
    parts += [", ".join(shape)] if shape else []
    shown = [axis for axis in ("dp", "tp", *ORDER) if axis in plan and (axis in ("dp", "tp") or plan[axis] != 1)]
    axes = " x ".join(f"{axis} {plan[axis]}" for axis in dict.fromkeys(shown))
    servers = len(run.servers)
    also = f" + {servers} server{'s' * (servers > 1)}" if servers else ""
    parts += [f"{axes}{also} = {run.world} rank{'s' * (run.world > 1)}"] if axes else []
    parts += [str(plan["precision"])] if "precision" in plan else []
    where = [str(run.summary[key]) for key in ("backend", "device", "machine") if run.summary.get(key)]
    return " · ".join(
        [*parts, " on ".join([" ".join(where[:1]), ", ".join(where[1:])]).strip() if where else ""]
    ).strip(" ·")


def _verdict(run: Run, beside: Beside) -> Verdict:
    of_limit = _of_limit(run, beside)
    reasons = [row.missing.get(key) for row in beside.rows if row.name == "step time" for key in ("measured", "limit")]
    why_no_limit = next((reason for reason in reasons if reason), "" if beside.rows else beside.why_no_rows)
    return judge(run, of_limit, why_no_limit, improve(run, of_limit))


def _of_limit(run: Run, beside: Beside) -> float | None:
    """What the row says; of a run that goes on, by the limit written down before it began."""
    taken, limit_s = run.step_time(), number(run.predicted.get("limit_s"))
    if run.state == RUNNING and taken is not None and 0 < limit_s < math.inf:
        return limit_s / taken.median
    return next((row.of_limit for row in beside.rows if row.name == "step time"), None)


def _facts(run: Run, beside: Beside) -> list[Fact]:
    facts: list[Fact] = []
    losses = [value for _, value in run.figure("loss")]
    if losses:
        planned = f" of {run.planned_steps:,}" if run.planned_steps else ""
        shown = f"{losses[-1]:.4g}" if math.isfinite(losses[-1]) else "not a number"
        facts.append(Fact("training loss", shown, f"step {run.last_step:,}{planned}"))
    held_out = run.figure("held_out")
    if held_out:
        facts.append(Fact("held-out loss", f"{held_out[-1][1]:.4g}", f"step {held_out[-1][0]:,}"))
    speed, of_what = _speed(run, beside)
    if speed is not None:
        facts.append(Fact("tokens/s", format_count(speed.median), of_what))
    taken = run.step_time()
    if taken is not None:
        facts.append(
            Fact("a step", format_seconds(taken.median), f"{format_seconds(taken.p20)} to {format_seconds(taken.p80)}")
        )
    of_limit = _of_limit(run, beside)
    if of_limit is not None:
        facts.append(Fact("of the limit", percent(of_limit), "as calibrated on this machine"))
    most = max(figures(run.summary, "peak_memory_bytes"), default=0.0)
    if most > 0:
        facts.append(Fact("memory", format_bytes(most), "the largest rank, its process included"))
    total = number(run.summary.get("seconds"))
    if math.isfinite(total):
        first = number(run.summary.get("seconds_to_first_step"))
        remark = f"first step after {format_seconds(first)}" if first > 0 else ""
        # What came before it was resumed is in the metrics alone.
        name = "since it went on" if run.summary.get("resumed") else "in all"
        facts.append(Fact(name, format_seconds(total), remark))
    return facts


def _speed(run: Run, beside: Beside) -> tuple[Sample | None, str]:
    """As the table of rows has it, so that it goes with the step's time; else of the last steps there are."""
    throughput = next((row.measured for row in beside.rows if row.name == "throughput"), None)
    return (
        (throughput, "at the median step") if throughput else (run.tail("tokens_per_s"), f"median of {run.tail_words}")
    )


# ---- sections --------------------------------------------------------------------------------------------------


def _learning(run: Run, beside: Beside) -> Child:
    speed = run_parts.step_figure(run, run_parts.SPEED)
    return pair(run_parts.step_figure(run, run_parts.LOSS, "held_out"), speed, run_parts.progress(run))


def _steps(run: Run, beside: Beside) -> Child:
    figures = (run_parts.NORM, run_parts.RATE, run_parts.MEMORY)
    return pair(*(run_parts.step_figure(run, figure) for figure in figures))


def _rows(run: Run, beside: Beside) -> Html:
    if not beside.rows:
        return run_parts.absent("no rows", beside.why_no_rows or "the run has no summary")
    words = (
        "Errors of a prediction are coloured in three steps: within 15 %, within 50 %, beyond. 100 % is at the limit."
    )
    counted = f" {beside.mfu_words}." if beside.mfu_words else ""
    return join(el("p", tied(words + counted), class_="quiet"), row_table(beside.rows))


def _time(run: Run, beside: Beside) -> Html:
    return join(time_parts.by_rank(run), time_parts.savings(run, _of_limit(run, beside)))


def _pipeline(run: Run, beside: Beside) -> Child:
    return pipeline_part.pipeline(run, expected_kept(run.config, run.predicted, run.summary))


def _memory(run: Run, beside: Beside) -> Child:
    kept = expected_kept(run.config, run.predicted, run.summary)
    return join(memory_part.memory(run, beside.memory), pipeline_part.memory_over_step(run, kept))


def _again(run: Run, beside: Beside) -> Html:
    is_training = run.kind == TRAIN.name
    return run_parts.again(run, guess=f"tilemesh train {run.folder.rstrip('/')}/{CONFIG}" if is_training else "")


# ---- two runs --------------------------------------------------------------------------------------------------


def _curves(first: Run, second: Run, names: tuple[str, str]) -> Child:
    return pair(
        run_parts.overlay("Loss", "nats per token", "loss", (first, second), names, zero=False),
        run_parts.overlay("Speed", "tokens/s", "tokens_per_s", (first, second), names, zero=True),
    )


def _times(first: Run, second: Run, names: tuple[str, str]) -> Child:
    parts = zip(names, (first, second), strict=True)
    return pair(*(el("div", el("h3", name), time_parts.by_rank(run)) for name, run in parts))


TRAIN_PAGE = KindPage(
    about=_about,
    verdict=_verdict,
    facts=_facts,
    sections=(
        PageSection("learning", "Did it learn", _learning),
        PageSection("steps", "Gradient norm, learning rate and memory", _steps),
        PageSection("experts", "What routers chose", lambda run, _: routing_part.routing(run)),
        PageSection("rows", "How fast, against prediction and limit", _rows),
        PageSection("time", "Where the time went", _time),
        PageSection("timeline", "A few steps, one lane per rank", lambda run, _: time_parts.lanes(run)),
        PageSection("pipeline", "The pipeline, measured and simulated", _pipeline),
        PageSection("memory", "Where the memory went", _memory),
        PageSection("mesh", "The mesh and what crosses it", lambda run, _: mesh_part.mesh(run)),
        PageSection("method", "How ranks kept together", lambda run, _: method_part.method(run)),
        PageSection("events", "Checkpoints, restarts and warnings", lambda run, _: run_parts.events(run)),
        PageSection("again", "To run it again", _again),
    ),
    differences=compare.training_differences,
    pairs=(PairSection("Side by side", _curves), PairSection("Where the time went", _times)),
    expects={
        CONFIG: "configuration",
        METRICS: "loss and speed, step by step",
        SUMMARY: "the run's own summary",
        PREDICTED: "predictions",
        TRACE: "time by kind and the timeline",
        SAMPLE: "the text it wrote",
    },
)
