"""What the files in a run's folder are called. No other code spells these names (a test looks).

run.json         the kind of run and the schema       metrics.jsonl     one object per line, appended as it happens
config.toml      what was run                         summary.json      its results
environment.json machine, versions, commands          rows.jsonl        its rows: predicted, measured, limit
predicted.json   what the planner said before         sample.txt        text it wrote at the end
choices.json     what `auto` picked                   trace/, trace.json  what each rank did when, for Perfetto
checkpoints/     step-00000050/, newest last          report.html       the page
lock.json        who runs in this folder now          huggingface/      tokenizer and config.json of the first weights
server-records/  what each parameter server did, in its order, since the run was last started
base.json        size and digest of the frozen weights below adapters (LoRA), as the run began
align.toml       what a run of kind `align` learns from   samples.jsonl   answers to held-out prompts, over time
first-weights/   what it began with, where that was a run   rollout-batches/  answers of the steps under way
drawing.jsonl    when engines that draw batch after batch began what, with which weights

What lies inside a checkpoint is named in `manifest.py`.
"""

from __future__ import annotations

import re

from tilemesh.measure.trace import MERGED_FILE

SCHEMA = 1
"""Of run.json and summary.json. It goes up when an older reader would misread what is written."""

ABOUT = "run.json"
CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
PREDICTED = "predicted.json"
CHOICES = "choices.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
ROWS = "rows.jsonl"
SAMPLE = "sample.txt"
TRACE = MERGED_FILE
TRACE_PARTS = "trace"
CHECKPOINTS = "checkpoints"
PAGE = "report.html"
LOCK = "lock.json"
SERVER_RECORDS = "server-records"
BASE = "base.json"
FEEDBACK = "align.toml"
SAMPLES = "samples.jsonl"
START = "first-weights"
ROLLOUTS = "rollout-batches"
DRAWING = "drawing.jsonl"
CARRIED = "huggingface"
"""What lay beside the weights that a run began with: `export` writes it again."""

WRITTEN = frozenset({
    ABOUT, CONFIG, ENVIRONMENT, PREDICTED, CHOICES, METRICS, SUMMARY, ROWS, SAMPLE, TRACE, TRACE_PARTS, CHECKPOINTS,
    PAGE, SERVER_RECORDS, BASE, CARRIED, FEEDBACK, SAMPLES, ROLLOUTS,
    DRAWING,
})  # fmt: skip
"""Everything in a run's folder but its lock, and what has a number in its name."""

RUNS = "runs"
"""Where runs go that were given no folder."""
DAMAGED = "damaged-"
"""Before the name of a checkpoint that is not what was written: kept, and not used."""
BAD_BATCH = re.compile(r"bad-batch-step-(\d+)-")


def bad_batch(step: int, part: int | str) -> str:
    """The batch of a step whose loss was NaN or infinite; one file per part of the batch (`Mesh.part_of_batch`)."""
    return f"bad-batch-step-{step:08d}-part-{part}.safetensors"


def page_beside(other: str) -> str:
    """The page of this run and another of this name."""
    return f"report-beside-{other}.html"


def earlier_config(step: int) -> str:
    """The configuration that a run had until this step, when it was resumed with another."""
    return f"config.until-step-{step}.toml"
