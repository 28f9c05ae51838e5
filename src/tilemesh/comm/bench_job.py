"""What the ranks of `tilemesh bench collective` are told to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Job:
    """What the ranks are to do. `algorithms`: names, or all; `out`: where rank 0 writes."""

    out: str
    command: str
    collectives: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    algorithms: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ("ordinary", "empty")
    fit: bool = False
    overlap: bool = True
    repeats: int = 15
    seconds: float = 0.5

    def with_out(self, path: str) -> Job:
        return replace(self, out=path)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields: dict[str, Any] = json.loads(text)
        for name, value in fields.items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return cls(**fields)
