"""Write every chapter's drawings into the documents: `python -m tilemesh.guide.draw docs/guide`; a test compares."""

from __future__ import annotations

import sys
from pathlib import Path

from tilemesh.core.files import write_text
from tilemesh.guide import attention, overview, programs, stale, strategies
from tilemesh.guide.book import PARTS


def every_figure() -> dict[str, str]:
    """All drawings by their path below `docs/guide`: those of the chapters, and those of no chapter."""
    drawn = {f"{part.folder}/{name}": text for part in PARTS for name, text in part.figures().items()}
    others = programs.figures() | attention.figures() | stale.figures() | strategies.figures()
    return drawn | overview.figures() | {f"figures/{name}": text for name, text in others.items()}


def write_figures(folder: Path) -> list[Path]:
    """Draw all figures below a folder; the files written."""
    drawn = every_figure()
    for name, text in drawn.items():
        write_text(text, folder / name)
    return [folder / name for name in drawn]


if __name__ == "__main__":
    print(*write_figures(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/guide")), sep="\n")
