"""Whether the frozen weights below a run's adapters (LoRA) are still those that the adapters were trained on.

They lie in a folder of their own, which no checkpoint copies. So a run writes the size and a digest of each weight file
when it begins, and whoever resumes, serves or merges it compares them. Files up to `WHOLE` are read whole; of longer
ones `PIECES` pieces spread over the file, which sees any further training and takes a second where reading all of it
would take minutes. One edited value between the pieces is not seen.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.core.files import naming
from tilemesh.runs.files import Unread, read_object, write_object
from tilemesh.runs.names import BASE, CONFIG

PIECE = 1 << 20
PIECES = 256
WHOLE = PIECE * PIECES


def write_base(run: str | Path, base: str | Path) -> None:
    """Keep in a run's folder what its base is at the beginning."""
    write_object(Path(run) / BASE, {"files": digests(Path(base))})


def check_base(run: str | Path, base: Path | None) -> None:
    """Refuse weights that are not those the run's adapters were trained on. A run of before this was written, or one
    whose record is damaged, is taken as it is; a base that is not there, whoever reads it refuses."""
    if base is None or not base.is_dir():
        return
    try:
        before = read_object(Path(run) / BASE).get("files")
    except Unread:
        return
    now = digests(base)
    if not isinstance(before, dict) or before == now:
        return
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise UsageError(
        f"the adapters of {run} were trained on other weights than {base} holds now ({names[0]}{more} changed since "
        f"the run began): put the first ones back, or set lora.base in {Path(run) / CONFIG} to where they are"
    )


def digests(folder: Path) -> dict[str, Any]:
    """Size and digest of each weight file of a Hugging Face folder, by name."""
    return {path.name: _digest(path) for path in sorted(folder.glob("*.safetensors"))}


def _digest(path: Path) -> list[Any]:
    summed = hashlib.blake2b(digest_size=16)
    with naming(path), path.open("rb") as file:
        size = path.stat().st_size
        if size <= WHOLE:
            while piece := file.read(PIECE):
                summed.update(piece)
        else:
            for number in range(PIECES):  # the first and the last byte are among them
                file.seek(number * (size - PIECE) // (PIECES - 1))
                summed.update(file.read(PIECE))
    return [size, summed.hexdigest()]
