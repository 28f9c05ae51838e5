"""Measure this machine: the figures that limits and predictions are made of, as rows and as a `Calibration`.

Every figure is predicted first (`calibrate_cpu.py`, `calibrate_gpu.py` build them), then measured one by one. It takes
about 25 seconds on two cores, and about as long again on a GPU; what training adds (`train/host.py`) compiles for a
while there.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilemesh.core.calibration import Calibration, Part, Rates, find
from tilemesh.core.errors import RunError
from tilemesh.core.heap import keep_freed_memory
from tilemesh.measure.calibrate_cpu import cpu_figures
from tilemesh.measure.calibrate_gpu import gpu_figures
from tilemesh.measure.calibrate_link import link_figures
from tilemesh.measure.figure import Figure, FigureOutcome
from tilemesh.measure.machine import Machine, stamp, this_machine
from tilemesh.measure.row import Row
from tilemesh.measure.timing import reason_of

# Told before each figure: how many are done, how many there are, and what comes now.
Progress = Callable[[int, int, str], None]


# Less than this from all cores together, or readings spread wider, and something else had the machine.
GAIN_OF_CORES = 1.1
UNSTEADY = 1.3


@dataclass(frozen=True)
class Calibrated:
    """What calibrating gave: rows to show, a calibration to save, and why it should perhaps not be trusted."""

    rows: tuple[Row, ...]
    calibration: Calibration
    warnings: tuple[str, ...] = ()


def calibrate(*, quick: bool = False, progress: Progress | None = None, further: Sequence[Figure] = ()) -> Calibrated:
    """Measure this machine's processor and, where torch sees one, its GPU; `quick` takes less than half the time.

    `further`: figures that folders above this one know how to measure. Sections that others keep in this machine's
    stored calibration (fitted collectives, say) are carried over.
    """
    machine = this_machine()
    keep_freed_memory()  # as ranks that train do
    figures = cpu_figures(machine, quick=quick)
    if torch.cuda.is_available():
        figures += [*gpu_figures(quick=quick), *link_figures()]
    figures += further
    rows = measure_figures(figures, progress)
    calibration = assemble(machine, figures, rows)
    return Calibrated(tuple(rows), calibration, tuple(doubts(calibration, rows)))


def calibrate_further(stored: Calibration, figures: Sequence[Figure], progress: Progress | None = None) -> Calibrated:
    """Measure these figures alone and put them in place of what a calibration has of their kind."""
    rows = measure_figures(figures, progress)
    updated = replace(stored, when=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"))
    for figure, row in zip(figures, rows, strict=True):
        if row.measured is None:
            continue
        before: Rates = getattr(updated, figure.part) or Rates()
        value: Any = row.measured.median
        if figure.key or figure.dtype:
            value = {**getattr(before, figure.rate), (figure.key or figure.dtype): value}
        rates = replace(before, **{figure.rate: value})
        parts: dict[str, Any] = {figure.part: rates}
        updated = replace(updated, **parts)
    return Calibrated(tuple(rows), updated)


def measure_figures(figures: Sequence[Figure], progress: Progress | None = None) -> list[Row]:
    """Measure one figure after another. One that fails becomes a row that says why; the rest goes on."""
    origin = stamp()
    rows = []
    for done, figure in enumerate(figures):
        if progress is not None:
            progress(done, len(figures), describe(figure))
        try:
            outcome = figure.measure()
        except Exception as error:  # out of memory, an unsupported dtype: one figure less, not no calibration
            outcome = FigureOutcome(None, missing={"measured": reason_of(error), "peers": "ours could not be measured"})
        rows.append(figure.row(outcome, origin))
    if progress is not None:
        progress(len(figures), len(figures), "done")
    return rows


def describe(figure: Figure) -> str:
    """A few words for a progress line: `matmul fp32, one core`."""
    which = figure.key or figure.dtype
    return f"{figure.name}{f' {which}' if which else ''}, {figure.part.replace('_', ' ')}"


def assemble(machine: Machine, figures: Sequence[Figure], rows: Sequence[Row]) -> Calibration:
    """The medians, put where `core.calibration` keeps them."""
    parts: dict[Part, dict[str, Any]] = {}
    extra: dict[str, Any] = {}
    with suppress(RunError):  # a damaged file is about to be replaced
        before = find(machine.id)
        extra = dict(before.extra) if before is not None else {}
    for figure, row in zip(figures, rows, strict=True):
        if row.measured is None:
            continue
        rates = parts.setdefault(figure.part, {})
        if figure.rate == "kernel_floor_s":
            extra["gpu_kernel"] = {"floor_s": row.measured.median}
        elif figure.key or figure.dtype:
            rates.setdefault(figure.rate, {})[figure.key or figure.dtype] = row.measured.median
        else:
            rates[figure.rate] = row.measured.median
    one_core = parts.get("one_core")
    all_cores = parts.get("all_cores")
    if one_core is not None:
        # A call is made by one thread: all cores together pay the same for it. With one core, that is all of them.
        all_cores = one_core if machine.cores == 1 else {"launch_s": one_core.get("launch_s")} | (all_cores or {})
    return Calibration(
        identity=machine.id,
        words=machine.words,
        when=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        versions=stamp()["versions"],
        one_core=_rates(one_core),
        all_cores=_rates(all_cores),
        gpu=_rates(parts.get("gpu")),
        extra=extra,
    )


def doubts(calibration: Calibration, rows: Sequence[Row]) -> list[str]:
    """What says that other work was running: cores that together do no better than one, readings that wander."""
    reasons = []
    alone_rates, all_ = calibration.one_core, calibration.all_cores
    if alone_rates is not None and all_ is not None and alone_rates != all_:
        pairs = [("fp32 matmul", alone_rates.matmul_flops_per_s.get("fp32"), all_.matmul_flops_per_s.get("fp32"))]
        pairs.append(("copy", alone_rates.copy_bytes_per_s, all_.copy_bytes_per_s))
        reasons += [
            f"{name} on all cores reached only {together / alone:.2f} times one core"
            for name, alone, together in pairs
            if alone and together and together < GAIN_OF_CORES * alone
        ]
    # A difference of two times, as the host's figures are, wanders more than either.
    steady = [row for row in rows if row.measured and row.name != "host"]
    wandering = [row for row in steady if row.measured and row.measured.p80 > UNSTEADY * row.measured.p20]
    if wandering:
        reasons.append(f"{len(wandering)} of {len(rows)} figures have a p80 above {UNSTEADY:g} times their p20")
    return reasons


def _rates(figures: dict[str, Any] | None) -> Rates | None:
    return None if not figures else Rates(**figures)
