"""`fit(config)`: improve a model by what its answers are worth. `tilemesh align` is this function with flags before it.

A run begins with the weights of a Hugging Face folder, or of a run, which are first written as such a folder into the
new run's: it is then whole by itself, and has its reference beside it.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from tilemesh.align.config import AlignConfig, of_run
from tilemesh.align.inputs import check_inputs
from tilemesh.align.placement import predict_feedback
from tilemesh.align.rows import phase_rows
from tilemesh.core.context import membership
from tilemesh.core.errors import UsageError
from tilemesh.measure.machine import usable_gpus
from tilemesh.model.families.book import CONFIG as MODEL_FILE
from tilemesh.runs.folder import fresh_folder, newest_checkpoint
from tilemesh.runs.kind import ALIGN
from tilemesh.runs.names import FEEDBACK, RUNS, START
from tilemesh.train import job
from tilemesh.train.check import JobRequest, RankProgram, check_job
from tilemesh.train.load import settled
from tilemesh.train.result import Result


def fit(
    config: AlignConfig | None = None,
    start: str | Path | None = None,
    *,
    run: str | Path | None = None,
    name: str = "align",
    resume: str | Path | None = None,
    **options: Any,
) -> Result:
    """Align and return what it came to.

    `start`: the folder of a run, or a Hugging Face folder, to begin with. `resume`: a run of kind `align` to go on
    with; `config` then changes what it says. `options`: as `train.fit` takes them.
    """
    if config is None:
        if resume is None:
            raise UsageError("fit needs a config, or a run to resume")
        config = of_run(resume)
    check_inputs(config)
    program = program_of(config)
    if resume is not None:
        return _with_phases(config, job.fit(config.training, resume=resume, program=program, **options))
    if start is None:
        raise UsageError("fit needs a start: the folder of a run, or a Hugging Face folder")
    folder, init = place(config, Path(start), run, name, options)
    return _with_phases(config, job.fit(config.training, run=folder, init=init, program=program, **options))


def _with_phases(config: AlignConfig, result: Result) -> Result:
    """With rows of a step's phases, where the run has some."""
    if not result.rows:
        return result
    return dataclasses.replace(result, rows=[*result.rows, *phase_rows(config, result.folder, usable_gpus())])


def program_of(config: AlignConfig) -> RankProgram:
    """What the ranks of such a run do."""
    files, beside = {FEEDBACK: config.file}, config.align.ranks_beside
    return RankProgram(ALIGN, "tilemesh.align.rank", files, beside, lambda _, gpus: predict_feedback(config, gpus))


def place(
    config: AlignConfig, start: Path, run: str | Path | None, name: str, options: dict[str, Any]
) -> tuple[str | Path | None, Path]:
    """The new run's folder, and the Hugging Face folder that it begins with."""
    if (start / MODEL_FILE).is_file():
        return run, start
    if membership() is not None:
        raise UsageError(f"{start} is a run, which one process has to write out first: export it, and begin with that")
    known = {field.name for field in dataclasses.fields(JobRequest)}
    known_options = {key: value for key, value in options.items() if key in known}
    check_job(settled(config.training), JobRequest(run, name, **known_options))
    if newest_checkpoint(start) is None:
        raise UsageError(f"{start} has no checkpoint to begin with")
    from tilemesh.train.export import export  # late: torch

    folder = Path(run) if run is not None else fresh_folder(Path(RUNS), f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    first = folder / START
    if not (first / MODEL_FILE).is_file():
        os.makedirs(folder, exist_ok=True)
        export(start, first)
    return folder, first
