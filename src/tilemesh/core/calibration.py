"""What one machine was measured to do: the figures that limits and predictions are made of.

The one idea: a calibration is a plain value with the machine's identity in it, kept as one JSON file per
machine, so that a limit can never come from another machine unnoticed. Sections this version does not know
(`extra`: fitted collectives and whatever joins later) are carried along untouched. How a figure is measured is
not here: that is `measure/`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.files import cache_folder, replacing

SCHEMA = 1

Part = Literal["one_core", "all_cores", "gpu"]
PARTS: tuple[Part, ...] = ("one_core", "all_cores", "gpu")

_BY_KEY = (
    "matmul_flops_per_s",
    "attention_flops_per_s",
    "projection_flops_per_s",
    "host_s",
    "host_link_bytes_per_s",
    "times_as_long",
)  # rates that are a number for each key

EARLIER = "earlier"
"""The section with what was read of the same machine before."""
MOST_READINGS = 5

_AGAIN = "remove it and calibrate this machine again"


@dataclass(frozen=True)
class Rates:
    """The figures of one part of a machine: one core, all cores together, or a GPU. None: not measured.

    A copied byte counts twice in `copy_bytes_per_s` (it is read and written), so that copy, read and write
    compare directly with a cost's bytes.
    """

    matmul_flops_per_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Best matmul by dtype name ("fp32", "bf16", ...)."""
    copy_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    launch_s: float | None = None
    """One kernel launch (GPU) or one smallest torch operation (CPU), as its caller pays for it."""
    attention_flops_per_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Causal fused attention by pass and head width ("forward-64", "backward-64", ...), the masked half not counted;
    in bf16 on a GPU, in fp32 on a CPU."""
    elementwise_bytes_per_s: float | None = None
    """A product of tensors of a layer's size, which caches hold in part; measured on CPUs."""
    exponentials_per_s: float | None = None
    """Elements of an activation with an exponential in it; on a CPU that is not bound by memory."""
    projection_flops_per_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    """A layer's products by pass and smaller dim ("forward-64", "backward-64", ...), operands from memory; on CPUs."""
    rows_bytes_per_s: float | None = None
    """A norm's operations, forward and backward; measured on CPUs."""
    halves_bytes_per_s: float | None = None
    """Operations on halves of a head (rotary positions), forward and backward; measured on CPUs."""
    operation_s: float | None = None
    """What an operation of a training step costs beside its work: its call and its part in autograd; on CPUs."""
    host_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    """What the host of a GPU needs to launch a training step, by kind of layer, code and part ("gpt-compiled-passes" a
    step, "gpt-compiled-passes-layer" a layer more, "gpt-compiled-update", ...)."""

    host_link_bytes_per_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Between a GPU and page-locked memory of its host: "in" to the GPU, "out" to the host, and in either
    direction while "both" are busy."""

    times_as_long: Mapping[str, float] = field(default_factory=dict, hash=False)
    """What software makes of these figures, by kind of operation ("products", "attention", "passes"), where it differs;
    of a profile (`plan/software.py`), not of a machine."""

    def __post_init__(self) -> None:
        for name, value in _leaves(self):
            if not math.isfinite(value) or value <= 0:
                raise UsageError(f"calibrated {name} is {value}: expected a number above 0")


@dataclass(frozen=True)
class Calibration:
    """One machine's figures, with what is needed to trust them: which machine, when, with which versions."""

    identity: str
    """Stable id of the machine; the file's name comes from it."""
    words: str
    """The same machine for people: "2 cores of AMD EPYC 7B13, 8 GiB; NVIDIA H200"."""
    when: str
    """ISO 8601, with the offset."""
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    one_core: Rates | None = None
    all_cores: Rates | None = None
    gpu: Rates | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further sections by name, JSON values only; kept through load and save whoever wrote them."""

    def __post_init__(self) -> None:
        if not self.identity:
            raise UsageError("a calibration needs the identity of its machine")
        taken = _KNOWN.intersection(self.extra)
        if taken:
            raise UsageError(f"section '{min(taken)}' of a calibration is a field of its own: set the field")

    def rates(self, part: str) -> Rates:
        """The figures of a part, or an error that says which parts this calibration has."""
        if part not in PARTS:
            raise unknown("part of a machine", part, PARTS)
        rates = {"one_core": self.one_core, "all_cores": self.all_cores, "gpu": self.gpu}[part]
        if rates is None:
            have = ", ".join(name for name in PARTS if getattr(self, name) is not None) or "nothing"
            raise UsageError(f"'{part}' was not measured on {self.words}: this calibration has {have}")
        return rates

    def with_section(self, name: str, value: Any) -> Calibration:
        """A copy in which one section of `extra` is new or replaced."""
        return replace(self, extra={**self.extra, name: value})

    @property
    def readings(self) -> tuple[Calibration, ...]:
        """This one and earlier ones of the same machine with the same torch, the newest first: how they differ says how
        far the next one may be from them."""
        kept = self.extra.get(EARLIER, ())
        extra = {name: value for name, value in self.extra.items() if name != EARLIER}
        # What others measured once, such as fitted collectives, holds for readings that were made without it.
        earlier = [Calibration.from_dict({**extra, **each}) for each in kept] if isinstance(kept, list) else []
        torch = self.versions.get("torch")
        return (self, *(each for each in earlier if each.versions.get("torch") == torch))

    def stored_over(self, before: Calibration) -> Calibration:
        """A copy that keeps the newest readings of the calibration in whose place it is stored."""
        plain = [{key: value for key, value in each.to_dict().items() if key != EARLIER} for each in before.readings]
        return self.with_section(EARLIER, plain[: MOST_READINGS - 1])

    def to_dict(self) -> dict[str, Any]:
        """JSON values only; unmeasured figures are left out."""
        plain: dict[str, Any] = {"schema": SCHEMA, "identity": self.identity, "words": self.words, "when": self.when}
        plain["versions"] = dict(self.versions)
        for part in PARTS:
            rates: Rates | None = getattr(self, part)
            if rates is not None:
                plain[part] = {
                    f.name: getattr(rates, f.name) for f in fields(rates) if getattr(rates, f.name) is not None
                }
                for name in _BY_KEY:
                    plain[part].pop(name)
                    if getattr(rates, name) or name == "matmul_flops_per_s":
                        plain[part][name] = dict(getattr(rates, name))
        return plain | dict(self.extra)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_dict`; a RunError says what is wrong with data that is not one."""
        if data.get("schema") != SCHEMA:
            raise RunError(f"has schema {data.get('schema')!r}, this version reads {SCHEMA}")
        try:
            return cls(
                identity=_text(data, "identity"),
                words=_text(data, "words"),
                when=_text(data, "when"),
                versions={str(k): str(v) for k, v in _section(data, "versions").items()},
                one_core=_rates(data, "one_core"),
                all_cores=_rates(data, "all_cores"),
                gpu=_rates(data, "gpu"),
                extra={key: value for key, value in data.items() if key not in _KNOWN},
            )
        except UsageError as error:
            raise RunError(str(error)) from None

    def save(self, path: Path | None = None) -> Path:
        """Writes the file whole or not at all (a reader sees the old or the new one) and returns its path."""
        target = path_for(self.identity) if path is None else path
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as part:
            part.write_text(text, encoding="utf-8")
        return target


_KNOWN = frozenset(f.name for f in fields(Calibration)) - {"extra"} | {"schema"}


def load(path: Path) -> Calibration:
    """The calibration in a file. Missing: UsageError. Damaged or of another schema: RunError with what to do."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no calibration at '{path}': calibrate this machine first") from None
    except (ValueError, RecursionError) as error:  # not JSON, or not even text
        raise RunError(f"calibration '{path}' is damaged ({error}): {_AGAIN}") from None
    except OSError as error:
        raise RunError(f"calibration '{path}' cannot be read: {error.strerror}") from None
    if not isinstance(data, dict):
        raise RunError(f"calibration '{path}' is damaged (not a JSON object): {_AGAIN}")
    try:
        return Calibration.from_dict(data)
    except RunError as error:
        raise RunError(f"calibration '{path}' cannot be used ({error}): {_AGAIN}") from None


def find(identity: str, folder: Path | None = None) -> Calibration | None:
    """The stored calibration of that machine, or None when it has none."""
    path = path_for(identity, folder)
    if not path.exists():
        return None
    stored = load(path)
    if stored.identity != identity:
        raise RunError(f"calibration '{path}' is of '{stored.identity}', not of '{identity}': {_AGAIN}")
    return stored


def default_folder() -> Path:
    return cache_folder() / "calibration"


def path_for(identity: str, folder: Path | None = None) -> Path:
    """Where a machine's calibration lies. Ids that are not plain file names get a hash, so that no two share a file."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", identity).strip(".-")[:80]
    if name != identity:
        name = f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}".lstrip("-")
    return (folder or default_folder()) / f"{name}.json"


def _leaves(rates: Rates) -> list[tuple[str, float]]:
    """Every figure there is, with its name."""
    leaves: list[tuple[str, float]] = []
    for name in (f.name for f in fields(rates)):
        value = getattr(rates, name)
        if name in _BY_KEY:
            leaves += [(f"{name}.{key}", each) for key, each in value.items()]
        elif value is not None:
            leaves.append((name, value))
    return leaves


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise RunError(f"'{key}' is {value!r}, expected text")
    return value


def _section(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise RunError(f"'{key}' is {value!r}, expected an object")
    return value


def _rates(data: Mapping[str, Any], part: Part) -> Rates | None:
    if part not in data:
        return None
    rates = dict(_section(data, part))
    by_key = {name: _section(rates, name) for name in _BY_KEY}
    for name in _BY_KEY:
        rates.pop(name, None)
    keyed = [item for section in by_key.values() for item in section.items()]
    for key, value in [*keyed, *rates.items()]:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RunError(f"'{part}.{key}' is {value!r}, expected a number")
    known = [f.name for f in fields(Rates)]
    for key in rates:
        if key not in known:
            raise unknown(f"rate in '{part}'", key, known)
    return Rates(**by_key, **rates)  # type: ignore[arg-type]  # names and numbers were checked above
