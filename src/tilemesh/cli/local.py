"""`--cluster local`: this machine, from its stored calibration. The arithmetic is `plan/local.py`'s."""

from __future__ import annotations

import re

from tilemesh.core import calibration
from tilemesh.core.errors import UsageError, nearest, unknown
from tilemesh.core.hardware import DEVICES
from tilemesh.measure.machine import this_machine
from tilemesh.plan.local import Local, local_cpu, local_gpu

_PATTERN = re.compile(r"(?:(\d+)x)?local(-cpu)?")
_NAMES = ("local", "local-cpu")


def is_local(text: str) -> bool:
    """Whether a cluster means this machine; a UsageError where it nearly does (`4xlocl`)."""
    folded = text.strip().lower()
    if _PATTERN.fullmatch(folded) is not None:
        return True
    name = re.sub(r"^(\d+x)+", "", folded)
    if name not in _NAMES and nearest(name, (*DEVICES, *_NAMES)) in _NAMES:
        raise unknown("device", name, (*DEVICES, *_NAMES))
    if name in _NAMES:
        raise UsageError(f"'{text}' is one machine of several: write local, 4xlocal or 4xlocal-cpu")
    return False


def local_machine(text: str) -> Local:
    """ "local" (a rank a GPU, or a rank a core), "4xlocal" (so many), "4xlocal-cpu" (cores, also beside a GPU)."""
    match = _PATTERN.fullmatch(text.strip().lower())
    if match is None:
        raise UsageError(f"'{text}' is not understood: write local, 4xlocal or 4xlocal-cpu")
    machine = this_machine()
    found = calibration.find(machine.id)
    if found is None:
        raise UsageError(f"this machine ({machine.words}) was not measured yet: run `tilemesh calibrate`, then again")
    on_gpu = bool(machine.gpus) and match[2] is None
    ranks = int(match[1]) if match[1] else (len(machine.gpus) if on_gpu else machine.cores)
    if on_gpu:
        return local_gpu(found, ranks, machine.gpus)
    return local_cpu(found, ranks, machine.cores, machine.memory_bytes)
