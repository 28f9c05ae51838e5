"""Where the chapter leaves the reader's own picture."""

from __future__ import annotations

from pathlib import Path

from tilemesh.core.files import cache_folder, write_text


def write_picture(svg: str, name: str = "tile_map.svg") -> Path:
    """Writes a drawing to the user's cache folder, and says where."""
    path = cache_folder() / "guide" / name
    write_text(svg, path)
    return path
