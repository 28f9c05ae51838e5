"""A serving benchmark as a run's folder: configuration, prediction, every step, rows and results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilemesh.bench.serve.run import LoadPoint, ServeFindings, point_figures
from tilemesh.core.toml import toml_value
from tilemesh.measure.row import write_rows
from tilemesh.runs import folder as folders
from tilemesh.runs.journal import Journal
from tilemesh.runs.kind import SERVE
from tilemesh.runs.metrics import STARTED, STEP
from tilemesh.runs.names import ROWS


def write_serve_run(path: str | None, settings: Mapping[str, Any], findings: ServeFindings, page_tokens: int) -> Path:
    """Written after all loads: writing must not disturb them."""
    lines = [f"{name} = {toml_value(value)}" for name, value in settings.items() if value is not None]
    run = folders.new_run(SERVE, "\n".join(["[serve]", *lines, ""]), path, name="serve")
    guesses = {load_name(point): point.predicted.to_dict() for point in findings.points}
    folders.write_prediction(run, guesses)
    folders.write_environment(run)
    journal = Journal(run)
    journal.add(STARTED, 0)
    number = 0
    for point in findings.points:
        first = point.history.steps[0].began_ns if point.history.steps else 0
        for step in point.history.steps:
            number += 1
            prefilling = sum(1 for part in step.parts if part.count > 1 or not part.samples)
            journal.add(
                STEP, number, load=load_name(point), at_s=(step.began_ns - first) * 1e-9, seconds=step.seconds,
                prefill=step.prefill_tokens, decode=step.decode_tokens, decoding=len(step.parts) - prefilling,
                prefilling=prefilling, running=step.running, waiting=step.waiting, pages_used=step.pages_used,
                pages_idle=step.pages_idle, held_tokens=step.held_tokens, held_places=step.held_pages * page_tokens,
                preempted=len(step.preempted),
            )  # fmt: skip
    write_rows(findings.rows, run / ROWS)
    journal.summarize(
        SERVE,
        {
            "model": settings["model"],
            "points": [point_figures(point) for point in findings.points],
            "steps": number,
            "fitted_error": findings.fitted_error,
        },
    )
    return run


def load_name(point: LoadPoint) -> str:
    return "all at once" if point.rate is None else f"{point.rate:g} requests/s"
