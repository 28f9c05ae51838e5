"""Where the chapter leaves the reader's own picture."""

from __future__ import annotations

import os
from pathlib import Path

from tilemesh.core.files import write_text


def write_picture(svg: str, name: str = "tile_map.svg") -> Path:
    """Writes a drawing to the user's cache folder, and says where."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilemesh" / "guide" / name
    write_text(svg, path)
    return path
