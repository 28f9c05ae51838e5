"""A plan as a file: what `tilemesh plan … --out` writes, and `--plan` of the commands that run it reads.

The one idea: whatever is planned is its kind, a layout, a section with what else the kind's command is told, and the
model that it was made for. A reader names the kind that it runs, and is refused another in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilemesh.core import config
from tilemesh.core.errors import Argument, UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.ranges import shown
from tilemesh.core.toml import toml_value

KIND, MODEL, TRAIN, SERVE, ALIGN = "kind", "model", "train", "serve", "align"
SECTIONS = {TRAIN: (TRAIN, MODEL), SERVE: (SERVE, "demand", MODEL), ALIGN: (ALIGN, "lora", MODEL)}
"""Of a plan's kind, which is also the command that runs it; a file that names no kind is of training."""


@dataclass(frozen=True)
class PlanFile:
    """What such a file says. `sections`: all that its kind may have; empty where the file has it not."""

    source: str
    layout: ParallelPlan
    sections: Mapping[str, Mapping[str, Any]]


def plan_text(kind: str, note: str, layout: Mapping[str, Any], **sections: Mapping[str, Any]) -> str:
    """The file's text; `note` is a comment above it."""
    lines = [*(f"# {line}" for line in note.splitlines()), *_lines({KIND: kind, **layout})]
    for name, values in sections.items():
        lines += ["", f"[{name}]", *_lines(values)]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {toml_value(value)}" for key, value in values.items()]


def read_plan(file: str | Path, kind: str) -> PlanFile:
    """The plan in a file. UsageError where it is of another kind, or no plan."""
    keys, source = config.read_toml(file, "plan"), str(file)
    written = f"expected a file that `tilemesh plan {kind} MODEL --cluster … --out FILE` writes"
    if not keys:
        raise UsageError(Argument("plan"), f" '{source}' is empty: {written}")
    file_kind = keys.pop(KIND, TRAIN)
    if file_kind != kind:
        runs = f"; `tilemesh {file_kind} --plan` runs this one" if file_kind in (*SECTIONS,) else ""
        raise UsageError(Argument("plan"), f" '{source}' is a plan of kind {shown(file_kind)}: {written}{runs}")
    sections = {name: keys.pop(name, {}) for name in SECTIONS[kind]}
    for name, values in sections.items():
        if not isinstance(values, dict):
            raise UsageError(f"{source}: {name} is {shown(values)}: expected a section [{name}]")
    return PlanFile(source, config.from_dict(ParallelPlan, keys, source), sections)
