"""The range that goes with a prediction: where eight of ten measurements are expected.

The one idea: a prediction is wrong in two ways that know nothing of each other. Its machine is not the same at two
readings: the prediction is made with every calibration of it that is kept, and their scatter says by how much (as for
the next value of a few that were drawn alike, in logarithms: with two readings the range is wide). And its model leaves
things out: how far it was from graded runs on quiet machines, below, which no reading of a machine makes smaller.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

MODEL_ERRORS = {
    # 14 layouts on two arm64 cores, alone on the machine (benchmarks/results/plan_grades_quiet_neoverse_n1_2c.jsonl).
    "cpu": {"step_time_s": 0.118, "memory_bytes": 0.105},
    # One H200: five steps, in graphs or longer than their launches (docs/plan/LOG.md, "How good predictions are"); and
    # the memory of those, and of one rank of 64 in three layouts (docs/train/LOG.md).
    "gpu": {"step_time_s": 0.048, "memory_bytes": 0.012},
}
"""By kind of device and figure: of the runs graded, four fifths were nearer to the prediction (in logarithms)."""
_STUDENT = (3.078, 1.886, 1.638, 1.533)
"""By how many readings there are beyond one: of Student's distribution, what four fifths lie within on both sides."""


def predicted_range(by_reading: Sequence[float], model_error: float) -> tuple[float, float]:
    """Lowest and highest, of what was predicted with each reading of the machine, the newest first."""
    logs = [math.log(value) for value in by_reading]
    half = model_error
    if len(logs) > 1:
        quantile = _STUDENT[min(len(logs) - 1, len(_STUDENT)) - 1]
        half = math.hypot(half, quantile * statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs)))
    middle = statistics.fmean(logs)
    return min(by_reading[0], math.exp(middle - half)), max(by_reading[0], math.exp(middle + half))
