"""Measure this machine's speed, for predictions and limits. Matmul peak, memory bandwidth, launch cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from tilemesh.cli.output import Output, console_beside, progress
from tilemesh.core.advice import NextCommand
from tilemesh.core.busy import SECTION, Busyness, replaces
from tilemesh.core.calibration import Calibration, find
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.options import ROWS, OutFile, option


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    json: OutFile | None = option(None, ROWS, "FILE")
    quick: bool = option(False, "Coarser, in less than half the time; no --host.")
    if_missing: bool = option(False, "Only where this machine was not measured.")
    save: bool = option(True, "Store the calibration for later limits.")
    host: bool = option(False, "Only what a GPU's host needs to launch a step (a minute); the rest stays.")


def calibrate(options: CalibrateOptions) -> Output | None:
    """Measure, show the rows and store them."""
    if_missing, host = options.if_missing, options.host
    if if_missing and _is_known():
        return None
    console = console_beside(options.json)
    # Late, because torch takes seconds to import and `--help` needs none of it.
    import torch

    from tilemesh.measure import calibrate as measuring
    from tilemesh.measure.busy import TRIES, OtherWork, again_while_busy
    from tilemesh.measure.machine import this_machine
    from tilemesh.measure.table import print_rows, print_words
    from tilemesh.train.host import host_figures

    stored = _stored_for_host(torch.cuda.is_available()) if host else None
    further = host_figures() if torch.cuda.is_available() and (host or not options.quick) else []
    # Who asks for it only where it is missing wants to get on: a line before, a line after.
    once = "once, for predictions and limits: " if if_missing else ""
    console.print(f"calibrating {once}{this_machine().words}", soft_wrap=True)
    began = time.perf_counter()

    def line(done: int, total: int, words: str = "") -> None:
        if done < total and not if_missing:
            console.print(f"[{done + 1}/{total}] {words}", soft_wrap=True)

    columns = SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()

    def measured() -> tuple[measuring.Calibrated, Busyness]:
        others = OtherWork()
        with progress(console, columns, line) as report:
            if stored is not None:
                calibrated = measuring.calibrate_further(stored, further, report)
            else:
                calibrated = measuring.calibrate(quick=options.quick, progress=report, further=further)
        return calibrated, others.busyness(
            row.measured for row in calibrated.rows if row.measured and row.name != "host"
        )

    def warn(text: str) -> None:
        print_words(f"warning: {text}", console, style="yellow")

    # Who only wants to get on waits for one more try at most.
    result, busy = again_while_busy(measured, warn, tries=2 if if_missing else TRIES)
    if not if_missing:
        console.print()
        print_rows(result.rows, console)
        console.print()
    copies = "" if host else "; a copied byte counts twice"
    more = "; `tilemesh calibrate` shows them" if if_missing else copies
    console.print(f"{len(result.rows)} figures in {time.perf_counter() - began:.1f} s{more}", soft_wrap=True)
    for warning in result.warnings:
        warn(warning)
    if result.warnings and not busy.is_busy:
        console.print("was other work running? Then calibrate again when this machine is idle", style="yellow")
    if options.save:
        _save(
            result.calibration if host else result.calibration.with_section(SECTION, busy.to_dict()),
            host,
            console,
            warn,
        )
    return Output(json=result.rows, next=NextCommand("plan tiny --cluster local --batch 16"))


def _save(calibration: Calibration, is_part: bool, console: Console, warn: Callable[[str], None]) -> None:
    """Store it, unless what is stored was measured on a quieter machine; earlier readings of all figures are kept."""
    try:
        before = find(calibration.identity)
    except RunError:  # damaged: replaced
        before = None
    new = Busyness.from_dict(calibration.extra.get(SECTION))
    stored = None if before is None else Busyness.from_dict(before.extra.get(SECTION))
    if before is not None and new is not None and not replaces(new, stored):
        warn(f"not stored: the calibration of {before.when} was measured on a quieter machine, and stays")
        return
    if before is not None and not is_part:
        calibration = calibration.stored_over(before)
    count = len(calibration.readings)
    kept = (
        f", reading {count} of this machine" if count > 1 else "; once more gives predictions a range of this machine"
    )
    console.print(f"calibration: {calibration.save()}{kept}", soft_wrap=True)


def _stored_for_host(has_gpu: bool) -> Calibration:
    """What the host's figures are added to."""
    from tilemesh.measure.machine import this_machine

    if not has_gpu:
        raise UsageError("--host measures what launching on a GPU costs, and torch sees no GPU here")
    stored_before = find(this_machine().id)
    if stored_before is None or stored_before.gpu is None:
        raise UsageError("--host adds to a stored calibration, and this GPU has none: run `tilemesh calibrate`")
    return stored_before


def _is_known() -> bool:
    """Whether this machine was measured; what cannot be read, or is from before layers were, is measured over."""
    from tilemesh.measure.machine import this_machine

    try:
        known = find(this_machine().id)
    except RunError:
        return False
    return known is not None and known.all_cores is not None and known.all_cores.operation_s is not None
