"""Limits for a bare machine: the committed calibration where this is the machine it was made on; otherwise exit 1."""

from __future__ import annotations

import sys
from pathlib import Path

from tilemesh.core import calibration
from tilemesh.measure.machine import this_machine

known = calibration.load(Path(__file__).parent / "results" / "calibration-h200.json")
if known.identity != this_machine().id:
    sys.exit(f"{this_machine().id} is not {known.identity}, whose calibration is committed")
known.save()
