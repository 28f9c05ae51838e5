"""The reference of a training configuration: as a Markdown page, and as a TOML file with an explanation of every key.

Both are made from the configuration's dataclasses (`core/reference.py`); nothing about a key is written down here.
"""

from __future__ import annotations

from tilemesh.core.reference import SectionDescription, commented_toml, describe, markdown
from tilemesh.core.step.book import schedules_page
from tilemesh.train.config import DEFAULT_PRESET, PRESETS, TrainConfig

_PAGE = f"""# Configuration

A training run is described by a TOML file. `tilemesh config > run.toml` writes one with every key and its explanation,
`tilemesh train run.toml --dry-run` shows what it would run, and `tilemesh train run.toml` runs it. Keys that are left
out have their default. Values come from, later ones over earlier ones: the defaults below, a preset
({", ".join(PRESETS)}; without a name: {DEFAULT_PRESET}), the file, `--plan` or `--mesh`, and `--set section.key=value`.
"none" stands for no value. An unknown key is an error that names the nearest one.

This page is generated: `tilemesh config --reference > docs/configuration.md`.
"""

_FILE = """# A training run: `tilemesh train FILE`, or `tilemesh train FILE --dry-run` to see what it would be.
# Keys that are commented out have their default. Reference: docs/configuration.md.
"""


def sections() -> list[SectionDescription]:
    """Every key of a training configuration."""
    return describe(TrainConfig)


def reference_page() -> str:
    """The Markdown page."""
    return f"{_PAGE}\n{markdown(sections())}\n{schedules_page()}"


def commented_file(config: TrainConfig) -> str:
    """A TOML file that `load` reads as the same run."""
    return f"{_FILE}\n{commented_toml(config, sections())}"
