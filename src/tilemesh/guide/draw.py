"""Write every chapter's drawings into the documents: `python -m tilemesh.guide.draw docs/guide`; a test compares."""

from __future__ import annotations

import sys
from pathlib import Path

from tilemesh.core.files import write_text
from tilemesh.guide.book import PARTS


def write_figures(folder: Path) -> list[Path]:
    """Draw all figures below a folder; the files written."""
    written = []
    for part in PARTS:
        for name, text in part.figures().items():
            write_text(text, folder / part.folder / name)
            written.append(folder / part.folder / name)
    return written


if __name__ == "__main__":
    print(*write_figures(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/guide")), sep="\n")
