"""Hugging Face folders from a run: its configuration and a checkpoint, read into one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tilemesh.model.config import check_written_model
from tilemesh.model.read import read_weights
from tilemesh.runs.manifest import MODEL
from tilemesh.runs.names import CONFIG
from tilemesh.runs.reader import open_checkpoint
from tilemesh.train.config import of_run


def export(
    run: str | Path, folder: str | Path, step: int | None = None, say: Callable[[str], None] = lambda text: None
) -> int:
    """Write a run's checkpoint as a Hugging Face folder; returns its step.

    `say` hears which step is used, where that is not the run's last one.
    """
    from tilemesh.model import huggingface

    config = of_run(run)
    reader = open_checkpoint(run, step, say)
    manifest = reader.manifest
    check_written_model(manifest.written_by.get(MODEL), manifest.step, config.model, Path(run) / CONFIG)
    huggingface.save_parameters(config.model, read_weights(config.model, reader), folder)
    return reader.manifest.step
