"""Write a checkpoint as a Hugging Face folder. `transformers` reads it; adapters (LoRA) are merged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tilemesh.cli.output import tell
from tilemesh.core.errors import UsageError
from tilemesh.core.files import check_new_folder
from tilemesh.core.options import OutFolder, argument, option


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    run: str = argument(..., "A run's folder.", "RUN")
    folder: OutFolder = argument(..., "Where to write the Hugging Face folder.", "FOLDER")
    step: str | None = option(None, "Which checkpoint; the newest, if not given.", "N|best")
    adapter: bool = option(False, "Write the adapter alone, as PEFT reads it.")
    format: Literal["safetensors", "dcp"] = option(
        "safetensors", "Of the weights; dcp: torch's distributed checkpoint.", "NAME"
    )


def export(options: ExportOptions) -> None:
    check_new_folder(Path(options.folder))  # before torch is loaded
    from tilemesh.runs.reader import read_step
    from tilemesh.train.export import export as write

    run, folder, is_dcp = options.run, options.folder, options.format == "dcp"
    if is_dcp and options.adapter:
        raise UsageError("--adapter writes a folder of PEFT, which is safetensors: leave --format out")
    step = write(run, folder, read_step(run, options.step), tell, adapter=options.adapter, distributed=is_dcp)
    print(f"step {step} of {run}: {folder}")
