"""A run folder as values: whole, incomplete, older, still being written, with gaps and with what is no number."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tilemesh.core.busy import Busyness
from tilemesh.core.errors import UsageError
from tilemesh.core.scene import PALETTE
from tilemesh.core.units import format_bytes
from tilemesh.measure.row import Row
from tilemesh.measure.sample import Sample
from tilemesh.plan.prediction import Times
from tilemesh.report import (
    compare,
    compare_page,
    kernel_page,
    kind_page,
    run,
    run_page,
    run_parts,
    series,
    spans,
    time_parts,
    verdict,
)
from tilemesh.report.draw import PlotAxis, around
from tilemesh.report.html import coded, data, el, escape, page
from tilemesh.report.run import DIED, DONE, RUNNING, STARTING, STOPPED
from tilemesh.report.run_parts import progress
from tilemesh.runs.folder import write_busyness

MakeRun = Callable[..., Path]


def later(seconds: float = 3600.0) -> float:
    return time.time() + seconds


# ---- reading ---------------------------------------------------------------------------------------------------


def test_a_whole_run_misses_nothing(make_run: MakeRun) -> None:
    found = run.read(make_run())
    assert found.state == DONE
    assert found.missing == {}
    assert (found.last_step, found.planned_steps, found.world) == (60, 60, 4)
    assert [(event.step, event.kind) for event in found.events] == [(30, "checkpoint"), (60, "checkpoint")]
    assert found.step_time() == Sample(0.1, pytest.approx(0.097), pytest.approx(0.104), 57)


@pytest.mark.parametrize(
    "name", ["config.toml", "metrics.jsonl", "summary.json", "predicted.json", "trace.json", "sample.txt"]
)
def test_whatever_is_gone_is_named_and_the_rest_is_there(make_run: MakeRun, name: str) -> None:
    folder = make_run()
    (folder / name).unlink()
    found = run.read(folder, now=later())
    assert [what for what in found.missing if name in what], found.missing
    assert found.steps or name == "metrics.jsonl"


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", "\0\xff", "null", '{"schema": 99, "ranks": 7, "shares": 3}', "[" * 100_000]
)
def test_damaged_files_are_named_never_raised(make_run: MakeRun, text: str) -> None:
    folder = make_run()
    for name in ("summary.json", "predicted.json", "trace.json", "config.toml", "metrics.jsonl", "rows.jsonl"):
        (folder / name).write_text(text, encoding="latin-1")
    found = run.read(folder, now=later())
    assert len(found.missing) >= 2
    verdict.judge(found, None)


def test_lines_of_another_kind_are_no_steps(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step"}\n{"kind": "step", "step": "seven"}\n{"kind": "step", "step": true}\nnonsense\n')
        file.write('{"kind": "step", "step": 21, "loss": 1.')  # being written at this moment
    found = run.read(folder)
    assert found.last_step == 20
    assert found.missing["metrics.jsonl"] == "1 of its lines is damaged"


def test_a_step_done_twice_counts_once_and_the_restart_is_an_event(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            '{"kind": "resumed", "step": 10, "plan": {"dp": 4, "tp": 1}}\n{"kind": "step", "step": 11, "loss": 9.0}\n'
        )
    found = run.read(folder)
    assert dict(found.figure("loss"))[11] == 9.0
    assert found.last_step == len(found.steps) == 11  # what came after the checkpoint is undone until it is done again
    words = "went on after step 10 on dp 4; 10 steps done again"
    assert next(event.words for event in found.events if event.kind == "restart") == words
    assert max(step for _, step in found.clock) == 20  # but it took its time


def test_a_run_that_was_stopped_and_goes_on_was_not_restarted(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "resumed", "step": 20}\n{"kind": "step", "step": 21, "loss": 2.0}\n')
    found = run.read(folder)
    assert [(event.kind, event.words) for event in found.events if event.kind != "checkpoint"] == [
        ("resumed", "went on after step 20")
    ]
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"resumed": True}))
    shown = run_page.render(run.read(folder), kind_page.Beside())
    assert "since it went on" in shown
    assert ">in all<" not in shown


def test_every_kind_of_event_is_told_with_its_reason(make_run: MakeRun) -> None:
    folder = make_run(steps=20, planned=100, summary=False)
    lines = [
        '{"kind": "checkpoint", "step": 12, "ok": false, "why": "no space left on device"}',
        '{"kind": "warning", "step": 14, "text": "DAMAGED CHECKPOINT: altered"}',
        '{"kind": "restart", "step": 20, "why": "rank 1 was killed by SIGKILL", "at": 1790000003.0}',
        '{"kind": "resumed", "step": 10, "plan": {}, "at": 1790000004.0}',
        '{"kind": "step", "step": 11, "loss": 2.0, "at": 1790000005.0}',
        '{"kind": "failed", "step": 11, "why": "rank 0 raised RunError: <why>", "at": 1790000006.0}',
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")
    found = run.read(folder)
    told = [(event.step, event.kind, event.words) for event in found.events if event.kind != "checkpoint"]
    assert told == [
        (10, "restart", "went on after step 10; 10 steps done again"),
        (11, "failed", "failed at step 11: rank 0 raised RunError: <why>"),
        (12, "warning", "checkpoint of step 12 failed: no space left on device"),
        (14, "warning", "DAMAGED CHECKPOINT: altered"),
        (20, "restart", "failed at step 20 and was started again: rank 1 was killed by SIGKILL"),
    ]
    assert found.state == DIED
    sentence = verdict.judge(found, None).sentence
    assert sentence.startswith("Failed at step 11: rank 0 raised RunError: <why>; `tilemesh train --resume ")
    with (folder / "metrics.jsonl").open("a") as file:  # taken up again: it is no longer dead
        file.write('{"kind": "resumed", "step": 10}\n{"kind": "step", "step": 11, "loss": 2.0}\n')
    assert run.read(folder).state == RUNNING


def test_a_run_taken_up_after_its_summary_is_running(make_run: MakeRun) -> None:
    folder = make_run(steps=20, planned=100)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "resumed", "step": 20, "at": time.time() + 5}) + "\n")
    found = run.read(folder)
    assert (found.state, found.is_behind) == (RUNNING, True)


def test_states(make_run: MakeRun) -> None:
    running = make_run("a", steps=20, planned=100, summary=False)
    assert run.read(running).state == RUNNING
    assert run.read(running, now=later()).state == DIED
    (running / "metrics.jsonl").write_text("")
    assert run.read(running).state == STARTING
    stopped = make_run("b", steps=20, planned=100)
    told = json.loads((stopped / "summary.json").read_text())
    (stopped / "summary.json").write_text(json.dumps({**told, "interrupted": True}))
    assert run.read(stopped, now=later()).state == STOPPED


def test_a_summary_of_an_earlier_attempt_is_not_believed(make_run: MakeRun) -> None:
    folder = make_run(steps=20, planned=100)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 21, "loss": 1.0, "seconds": 5.0}\n')
    found = run.read(folder)
    assert found.state == RUNNING
    assert found.missing["summary.json"] == "the one there is of step 20"
    step = found.step_time()
    assert step is not None
    assert step.n == 16  # from the metrics, without the first three and the two with a checkpoint


def test_nan_and_gaps_are_kept_as_such(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[4] = '{"kind": "step", "step": 5, "loss": NaN, "norm": null}'
    (folder / "metrics.jsonl").write_text("\n".join(lines[:9] + lines[12:]) + "\n")
    found = run.read(folder)
    assert math.isnan(dict(found.figure("loss"))[5])
    assert series.gaps(one["step"] for one in found.steps) == [(10, 12)]
    assert [event.words for event in found.events if event.kind == "warning"] == ["the loss of step 5 is not a number"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        run.read(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is no run"):
        run.read(tmp_path)


def test_links_out_of_the_folder_and_pipes_are_not_followed(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run()
    secret = tmp_path / "secret"
    secret.write_text('{"improve": "THE SECRET", "step": 60}')
    for name in ("summary.json", "sample.txt"):
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
    (folder / "predicted.json").unlink()
    os.mkfifo(folder / "predicted.json")
    found = run.read(folder)
    assert "THE SECRET" not in repr(found)
    assert found.missing["summary.json"] == "a link, which is not followed"
    assert found.missing["predicted.json"] == "not a plain file"


# ---- series ----------------------------------------------------------------------------------------------------


def test_buckets_keep_extremes_and_break_at_gaps() -> None:
    points = [(step, float(step % 10)) for step in range(1, 1001) if not 400 <= step < 500]
    found = series.buckets(points, 50)
    assert len(found) <= 52
    assert min(one.low for one in found if one.low is not None) == 0
    assert max(one.high for one in found if one.high is not None) == 9
    assert [one.first for one in found if not one.follows] == [1, 500]
    line = series.line("x", found, 0)
    assert sum(value is None for _, value in line.points) == 1
    assert sum(one.last - one.first + 1 for one in found) == len(points)


def test_a_bucket_of_no_numbers_breaks_the_line() -> None:
    found = series.buckets([(1, 2.0), (2, math.nan), (3, math.inf), (4, 2.0)])
    assert [one.mean for one in found] == [2.0, None, None, 2.0]
    assert sum(one.bad for one in found) == 2
    assert series.buckets([]) == []
    sparse = series.buckets([(step, 1.0) for step in (*range(10, 400, 10), *range(500, 900, 10))], 20)
    assert len(sparse) <= 21
    assert [bucket.first for bucket in sparse if not bucket.follows] == [10, 500], "one gap, where steps are missing"


def test_axes_have_round_ticks() -> None:
    assert PlotAxis(0, 10_000, "").ticks(5) == [0, 2000, 4000, 6000, 8000, 10_000]
    assert PlotAxis(0, 270, "", unit=60).ticks(6) == [0, 60, 120, 180, 240]
    assert PlotAxis(0, 3, "", whole=True).ticks(6) == [0, 1, 2, 3]
    assert PlotAxis(0, 80 * 2**30, "", binary=True).ticks(4) == [0, 20 * 2**30, 40 * 2**30, 60 * 2**30, 80 * 2**30]
    for top, ticks in {
        435 * 2**20: ["0 B", "200 MiB", "400 MiB"],
        1.1 * 2**30: ["0 B", "512 MiB", "1 GiB"],  # not 500 and 1000 MiB
        2.7 * 2**30: ["0 B", "1 GiB", "2 GiB"],
        11 * 2**30: ["0 B", "5 GiB", "10 GiB"],
        3000: ["0 B", "1 KiB", "2 KiB"],
        3.7 * 2**40: ["0 B", "1 TiB", "2 TiB", "3 TiB"],
    }.items():
        assert [format_bytes(tick) for tick in PlotAxis(0, top, "", binary=True).ticks(4)] == ticks
    assert PlotAxis(1000 * 2**20, 1003 * 2**20, "", binary=True).ticks(4) == [
        n * 2**20 for n in (1000, 1001, 1002, 1003)
    ]
    assert PlotAxis(1e-6, 1e-3, "", log=True).ticks() == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3])
    assert PlotAxis(1, 4096, "", log=True, binary=True).ticks() == [1, 16, 256, 4096]
    assert PlotAxis(5, 5, "").place(5) == 0.5
    assert around([]) == (0.0, 1.0)
    assert around([3.0, math.nan])[1] > 3


# ---- spans -----------------------------------------------------------------------------------------------------


def test_seconds_by_kind_count_each_second_once(make_run: MakeRun) -> None:
    found = run.read(make_run(traced=5, layers=2, seconds=1.0)).timeline
    assert found is not None
    steps = spans.ordinary(found.steps)
    assert [step.number for step in steps] == [4, 5]
    seconds = spans.seconds_by_kind(found.ranks[0], steps)
    # forward 0.35 and backward 0.48 with a quarter in exchanges, gradients 0.08 with 0.06, optimizer 0.04
    assert seconds["compute"] == pytest.approx(0.75 * 0.83 + 0.02 + 0.04)
    assert seconds["exchange"] == pytest.approx(0.25 * 0.83 + 0.06)
    assert seconds["idle"] == pytest.approx(0.037)  # the all_reduce inside the meeting is waiting too
    assert seconds["data"] == pytest.approx(0.01)
    assert sum(seconds.values()) == pytest.approx(sum(s.ended_s - s.began_s for s in steps) / 2)


def test_the_predicted_bar_of_a_step_is_as_long_as_the_step() -> None:
    """Moves to the host that nothing hides are among what a rank measures as computing."""
    names = [field.name for field in dataclasses.fields(Times)]
    times = {name: float(2**place) for place, name in enumerate(names)}
    found = time_parts._predicted(run.Run("r", "/r", DONE, predicted={"times": times}))
    assert sum(found.values()) == Times(**times).total_s
    assert found[spans.EXCHANGE] == Times(**times).exposed_s


def test_events_that_are_none_are_passed_over() -> None:
    base = {"ph": "X", "ts": 0, "dur": 5, "pid": 0, "name": "<b>", "cat": ["?"], "args": None}
    events = [None, 3, {"ph": "X"}, base | {"ts": "a"}, base | {"dur": math.nan}, base | {"dur": -1}]
    events += [base | {"pid": None}, base]
    found = spans.timeline(events)
    assert [(span.name, span.kind) for span in found.ranks[0]] == [("<b>", "compute")]
    assert found.steps == []


def test_ranks_files_are_joined_where_no_trace_was_merged(make_run: MakeRun) -> None:
    from tilemesh.measure.trace import Trace

    folder = make_run(traced=0)
    for rank in range(2):
        with Trace(folder / "trace", rank=rank) as trace, trace.span("forward", kind="compute", step=4):
            pass
    before = sorted(path.name for path in folder.rglob("*"))
    found = run.read(folder).timeline
    assert found is not None
    assert [step.number for step in found.steps] == [4]
    assert sorted(path.name for path in folder.rglob("*")) == before  # reading leaves the folder as it was


# ---- words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gain", "words"), [(0.01, "The reward rose from 0.5"), (-0.01, "The reward fell from 0.4")])
def test_the_verdict_of_a_feedback_run_is_of_its_rewards(make_run: MakeRun, gain: float, words: str) -> None:
    """A loss there says little: it is near 0 whatever was learned."""
    folder = make_run(exchange=0.3)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"reward": 0.5 + gain * line["step"]} if line.get("kind") == "step" else {}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    judged = verdict.judge(run.read(folder), 0.62)
    assert judged.sentence.startswith(words)
    assert judged.is_bad == (gain < 0)


def test_the_verdict_names_the_largest_saving(make_run: MakeRun) -> None:
    found = run.read(make_run(exchange=0.3))
    assert verdict.judge(found, 0.62).sentence == (
        "The loss fell from 4.75 in the first 3 steps to 1.23 in the last 10 steps; 62 % of the calibrated limit; "
        "communication (with waiting for ranks) is 34 % of the step; "
        "the largest saving is exchanges that hide behind compute, at most 30 % of the step."
    )
    assert verdict.savings(verdict.shares_of(found), 0.2)[0] == verdict.Saving(
        "compute at the calibrated peak", pytest.approx(0.45)
    )
    # What can be done is about the saving that was named, whatever the run said before the limit was known.
    assert verdict.improve(found, 0.62).startswith("exchanges take 30 % of a step, most of it all_reduce over tp")
    assert verdict.improve(found, 0.2).startswith("compute takes 65 % of a step, and at the calibrated peak")
    assert "the largest saving beside compute is exchanges" in verdict.judge(found, None).sentence


def test_a_verdict_without_a_summary_uses_the_metrics(make_run: MakeRun) -> None:
    found = run.read(make_run(steps=20, planned=100, summary=False))
    words = verdict.judge(found, None).sentence
    assert words.startswith("Running, step 20 of 100, about 8")
    assert "communication (with waiting for ranks) is 30 % of the step" in words
    died = verdict.judge(run.read(found.folder, now=later()), None)
    assert died.is_bad
    assert "ended at step 20 of 100 without a summary" in died.sentence.lower()


def test_a_loss_that_is_no_number_is_the_verdict(make_run: MakeRun) -> None:
    folder = make_run(steps=20, summary=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 21, "loss": NaN}\n')
    (folder / "bad-batch-step-00000021-part-0.safetensors").write_bytes(b"")
    found = verdict.judge(run.read(folder, now=later()), None)
    assert found.is_bad
    assert "Stopped at step 21: it came to no number" in found.sentence


def test_the_facts_of_a_page_go_with_its_rows(make_run: MakeRun) -> None:
    found = run.read(make_run(), now=later())
    row = {"case": {}, "missing": {"peers": "none", "predicted": "none", "limit": "no calibration"}, "command": "c"}
    row |= {"machine": "m", "versions": {}, "commit": None, "predicted": None, "limit": None}
    step = Row(name="step time", unit="s", measured=Sample(2.0, 1.9, 2.1, 5), **row)
    speed = Row(name="throughput", unit="tokens/s", measured=Sample(1024.0, 1000.0, 1100.0, 5), **row)
    shown = run_page.render(found, kind_page.Beside([step, speed]))
    assert "1.02k<small>at the median step" in shown
    assert "how near the limit is not known (no calibration)" in shown
    without = run_page.render(found, kind_page.Beside([], "the summary is of another version: 'cores'"))
    assert "median of the last 10 steps" in without
    assert "how near the limit is not known (the summary is of another version: &#x27;cores&#x27;)" in without


def test_a_run_that_goes_on_is_held_against_the_limit_it_began_with(make_run: MakeRun) -> None:
    folder = make_run(steps=20, planned=100, summary=False)
    (folder / "predicted.json").write_text('{"limit_s": 0.025}')
    taken = run.read(folder).step_time()
    assert taken is not None
    shown = run_page.render(run.read(folder), kind_page.Beside()).replace("\u00a0", " ")
    assert f"{0.025 / taken.median:.0%} of the calibrated limit".replace("%", " %") in shown
    (folder / "predicted.json").write_text('{"limit_s": NaN}')
    assert "of the calibrated limit" not in run_page.render(run.read(folder), kind_page.Beside())


def test_metrics_that_cannot_be_read_are_not_a_run_that_has_not_begun(make_run: MakeRun) -> None:
    folder = make_run(summary=False)
    (folder / "metrics.jsonl").write_bytes(bytes(range(128, 256)) * 4 + b"\n")
    found = verdict.judge(run.read(folder), None)
    assert found.is_bad
    assert found.sentence == "No step can be read: the metrics are damaged."


def test_the_saving_of_rows_is_of_time_and_every_command_is_named() -> None:
    row = {"predicted": None, "missing": {"peers": "none", "predicted": "none"}, "machine": "m", "versions": {}}
    rows = [
        Row(name="step time", case={"compiled": False}, unit="s", measured=Sample(2.0, 2.0, 2.0, 3), limit=1.0,
            commit="a", command="first", **row),
        Row(name="memory", case={"compiled": True}, unit="B", measured=Sample(99.0, 99.0, 99.0, 1), limit=1.0,
            commit="b", command="second", **row),
    ]  # fmt: skip
    assert (
        kernel_page.verdict(rows)
        == "Median 50 % of the limit; the largest saving is step time not compiled, at most 50 % of its time."
    )
    shown = kernel_page.render(rows, [None, None])
    assert "first<br>second" in shown
    assert "step time not compiled" in shown


def test_curves_beside_each_other_end_with_the_last_step_done(make_run: MakeRun) -> None:
    runs = [
        run.read(make_run(name, steps=55, planned=planned), now=later()) for name, planned in (("a", 55), ("b", 4000))
    ]
    shown = run_parts.overlay("Loss", "nats per token", "loss", runs, ["a", "b"], zero=False)
    assert "4,000" not in shown
    assert "4,000" in run_parts.step_figure(runs[1], run_parts.LOSS)  # alone, what is left of a run is shown


def test_the_largest_saving_is_of_seconds_and_not_of_the_share() -> None:
    def row(shape: str, median: float, limit: float, unit: str = "s") -> Row:
        return Row(
            name="softmax", case={"shape": shape}, unit=unit, measured=Sample(median, median, median, 3), limit=limit,
            predicted=None, missing={"peers": "none", "predicted": "none"}, machine="m", versions={}, commit="a",
            command="c",
        )  # fmt: skip

    tiny, large = row("32x64", 2e-6, 2e-9), row("8192x8192", 1e-3, 6e-4)
    assert kernel_page.verdict([tiny, large]).endswith("the largest saving is 8192x8192, at most 40 % of its time.")
    rates = [row("a", 50.0, 100.0, "tokens/s"), row("b", 40.0, 100.0, "tokens/s")]
    assert kernel_page.verdict(rates).endswith("the largest saving is b, at most 60 % of its time.")


def test_only_times_are_faster_and_a_limit_is_more_than_nothing() -> None:
    def row(name: str, unit: str, ours: float, peer: float, limit: float | None = None) -> Row:
        return Row(
            name=name, case={"recipe": "int8"}, unit=unit, measured=Sample(ours, ours, ours, 1), limit=limit,
            predicted=None, peers={"plain": Sample(peer, peer, peer, 1)}, machine="m", versions={}, commit="a",
            command="c", missing={"predicted": "none"} | ({} if limit else {"limit": "none"}),
        )  # fmt: skip

    rows = [row("token", "s", 2.0, 1.0, 0.006), row("size", "B", 10.0, 40.0), row("held-out loss", "nats", 2.02, 2.0)]
    assert kernel_page.verdict(rows) == (
        "Faster than every peer in 0 of 1 cases, equal in 0; smaller than every peer in 1 of 1 cases, equal in 0; "
        "a lower loss than every peer in 0 of 1 cases, equal in 0; median 0 % of the limit; "
        "the largest saving is token int8, at most 99.7 % of its time."
    )
    shown = kernel_page.render(rows, [None] * 3)
    for title in ("Speedup over the best peer", "Bytes beside the best peer", "Loss beside the best peer"):
        assert title in shown
    assert "calibrate again" not in shown
    quick = kernel_page.render([row("token", "s", 1.0, 1.0, 1.5)], [None])
    assert "calibrate again" in quick
    assert "Of the limit" not in kernel_page.render([row("excess loss", "nats", 1.0, 1.0, 80.0)], [None])


def test_what_a_tuner_tried_has_a_sentence() -> None:
    def trial(problem: str, kind: str, seconds: float) -> kernel_page.TimedConfig:
        return kernel_page.TimedConfig(problem, {"kind": kind, "block_m": 64, "block_n": 64}, seconds)

    tried = [trial("a", "tma", 2.0), trial("a", "tma", 1.0), trial("a", "library", 1.5), trial("a", "torch", 3.0),
             trial("b", "tma", 2.0), trial("b", "torch", 1.0), trial("b", "tma", math.inf)]  # fmt: skip
    words = "The best tried is 0.50× to 1.50× as fast as the best built-in; it is faster in 1 of 2 problems."
    assert kernel_page.tuned(tried) == words
    assert words in kernel_page.render([], [], tried)
    assert "No built-in was timed" in kernel_page.render([], [], tried[:2])


def test_a_page_of_a_run_on_a_busy_machine_says_so(make_run: MakeRun) -> None:
    folder = make_run()
    assert 'id="busy"' not in run_page.render(run.read(folder), kind_page.Beside())
    write_busyness(folder, Busyness(0.01, 0.0))
    assert 'id="busy"' not in run_page.render(run.read(folder), kind_page.Beside())
    write_busyness(folder, Busyness(0.35, 0.0))
    page = run_page.render(run.read(folder), kind_page.Beside())
    assert "The machine was busy while this run went on (other work used 35% of the cores)" in page
    (folder / "predicted.json").write_text(json.dumps({"calibration_busy": "other work used 60% of the cores"}))
    page = run_page.render(run.read(folder), kind_page.Beside())
    assert "a calibration of a busy machine (other work used 60% of the cores): calibrate again" in page
    quiet, busy = run.read(make_run("quiet")), run.read(folder)
    pair = compare_page.render(quiet, kind_page.Beside(), busy, kind_page.Beside())
    for page in (pair, compare_page.render_several([quiet, busy, run.read(make_run("third"))])):
        assert f"<p>{busy.name}: The machine was busy while this run went on" in page
        assert page.count("The machine was busy") == 1


def test_ticks_of_a_clock_have_one_unit(make_run: MakeRun) -> None:
    read = run.read(make_run())
    for end_s, units in ((0.4, {"ms"}), (90, {"s"}), (270, {"min"}), (100_000, {"h"}), (800_000, {"d"})):
        began = read.clock[0][0]
        steps = tuple((began + end_s * place / 10, place) for place in range(11))
        chart = str(progress(dataclasses.replace(read, clock=steps, events=())))
        ticks = re.findall(r'class="tx[^"]*" style="[^"]*">([^<]*)<', chart)
        assert {tick.split()[1] for tick in ticks} == units, (end_s, ticks)


def test_two_runs_say_what_each_lacks(make_run: MakeRun) -> None:
    folder = make_run("a")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:9] + lines[12:]))
    first, second = run.read(folder), run.read(make_run("b"))
    shown = compare_page.render(first, kind_page.Beside(), second, kind_page.Beside())
    assert "<li>a: steps 10 to 12: not in the metrics</li>" in shown
    assert '<th scope="col">b</th>' in shown
    # A name that would push the columns out of sight stands in the title alone.
    long = run.read(make_run("B" * 200, seconds=0.2))
    shown = compare_page.render(first, kind_page.Beside(), long, kind_page.Beside())
    assert shown.count("B" * 200) == 2  # the page's title and its heading
    assert f"<h1>First: a; second: {'B' * 200}</h1>" in shown
    assert '<th scope="col">second</th>' in shown
    assert "more in second, which is worse" in shown


def test_two_runs_differ_by_more_than_noise_or_not(make_run: MakeRun) -> None:
    first, second = run.read(make_run("a")), run.read(make_run("b", lr=0.001, seconds=0.13))
    changed = compare.changes({"optimizer.lr": 0.004, "same": 1, "gone": 2}, {"optimizer.lr": 0.001, "same": 1})
    assert changed == [compare.Change("optimizer.lr", 0.004, 0.001), compare.Change("gone", 2, None)]
    found = {one.name: one.verdict for one in compare.training_differences(first, [], second, [])}
    assert found["step time"] == compare.WORSE
    assert found["throughput"] == compare.WORSE
    assert found["training loss, last steps"] == compare.SAME
    same = compare.training_differences(first, [], first, [])
    assert {one.verdict for one in same} == {compare.SAME}
    assert "no figure differs" in compare.sentence("b", [], same)


def test_rows_of_two_runs_are_held_against_those_of_their_own_case() -> None:
    def row(recipe: str, seconds: float) -> Row:
        return Row(
            name="decoded token", case={"recipe": recipe}, unit="s", measured=Sample(seconds, seconds, seconds, 5),
            predicted=None, limit=None, missing=dict.fromkeys(("predicted", "limit", "peers"), "none"), machine="m",
            versions={}, commit="a", command="c",
        )  # fmt: skip

    first = [row("int8", 1.0), row("int4", 2.0), row("2:4", 3.0)]
    found = compare.of_rows(first, [row("int4", 2.0), row("int8", 0.5)])
    assert [(each.name, each.verdict) for each in found] == [
        ("decoded token, recipe int8", compare.BETTER),
        ("decoded token, recipe int4", compare.SAME),
    ]
    alone = compare.of_rows(first[:1], [row("int4", 2.0)])  # one of each run: what was changed
    assert [(each.name, each.verdict) for each in alone] == [("decoded token", compare.WORSE)]
    assert compare.of_rows(first, [row("int8", 1.0), row("int8", 2.0)]) == []  # which of the two is not known


# ---- escaping --------------------------------------------------------------------------------------------------


def test_what_stands_between_backticks_is_set_as_code() -> None:
    assert coded("see `tilemesh plan <a>`, twice `b`") == (
        "see <code>tilemesh plan &lt;a&gt;</code>, twice <code>b</code>"
    )
    assert coded("a ` alone & nothing") == "a ` alone &amp; nothing"


def test_text_is_escaped_unless_it_is_markup() -> None:
    assert el("p", "<b>", el("i", "&")) == "<p>&lt;b&gt;<i>&amp;</i></p>"
    assert el("p", title='"><script>') == '<p title="&quot;&gt;&lt;script&gt;"></p>'
    assert escape("a\u202eb\x00\ud800") == "a\\u202eb\\u0000\\ud800"
    assert "</script><" not in data({"name": "</script><script>alert(1)"})[:-9]
    assert "<title>&lt;script&gt;</title>" in page("<script>", el("p", "x"))


# ---- colours ---------------------------------------------------------------------------------------------------

# What eyes without one kind of cone see, as matrices on linear RGB (Machado, Oliveira and Fernandes 2009, complete).
EYES = {
    "all three": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def seen(colour: str, eyes: str) -> tuple[float, float, float]:
    """A colour as CIELAB, where a distance of 2 is just noticeable and 10 is plain."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    r, g, b = (min(1.0, max(0.0, sum(w * v for w, v in zip(row, linear, strict=True)))) for row in EYES[eyes])
    x, y, z = (
        0.4339 * r + 0.3762 * g + 0.1899 * b,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        0.0177 * r + 0.1095 * g + 0.8730 * b,
    )
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_apart_by_all_eyes(eyes: str, scheme: int) -> None:
    palette = [PALETTE[f"c{number}"][scheme] for number in range(8)]
    distances = {
        pair: math.dist(seen(pair[0], eyes), seen(pair[1], eyes)) for pair in itertools.combinations(palette, 2)
    }
    nearest = min(distances, key=distances.__getitem__)
    assert distances[nearest] >= 12, nearest
