"""Which rule steps a parameter, what it remembers of it, and with what weight decay. No torch: `update.py` computes.

The one idea: a rule is per element (AdamW, SGD, Lion), so it works on any shard of a parameter, or it needs the whole
matrix (Muon), whose parts ranks then exchange (`parallel/matrices.py`). Muon steps the matrices of layers; embedding
tables, the output projection, norms and biases are stepped by AdamW in the same run. The bias of a router moves by the
sign of its gradient, whatever the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from tilemesh.core.errors import UsageError
from tilemesh.core.ranges import Range
from tilemesh.model.work.task import STATE_BYTES
from tilemesh.train.config import OptimizerConfig

KINDS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),
    "sign": (),
}
"""What each rule remembers of a parameter, in the parameter's shape."""

_DECAY = Range(0)
_BALANCED = ".router.bias"


def rule_of(config: OptimizerConfig, name: str, shape: Sequence[int]) -> str:
    """Which rule steps the parameter of this name and shape, uncut."""
    if name.endswith(_BALANCED):
        return "sign"
    if config.name != "muon":
        return config.name
    return "muon" if len(shape) == 2 and name.startswith("layers.") else "adamw"


def kinds_of(config: OptimizerConfig, name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """What is remembered of a parameter; plain SGD remembers nothing."""
    rule = rule_of(config, name, shape)
    return () if rule == "sgd" and not config.momentum else KINDS[rule]


def kept_share(config: OptimizerConfig, precision: str) -> float:
    """Of the two moments that memory is predicted with, and a master copy beside them, what this optimizer keeps."""
    kinds, kept = len(kinds_of(config, "layers.0.weight", (1, 1))), STATE_BYTES[precision][2]
    return (kept - (2 - kinds) * (8 if precision == "fp64" else 4)) / kept


def decays(shape: Sequence[int]) -> bool:
    """Whether weight decay applies to a parameter of this shape, uncut: to matrices, not to biases and norms."""
    return len(shape) >= 2


def decay_of(config: OptimizerConfig, name: str, shape: Sequence[int]) -> float:
    """Weight decay of a parameter: that of the first pattern which matches its name, else that of all matrices."""
    if rule_of(config, name, shape) == "sign":
        return 0.0
    for pattern, decay in decay_patterns(config):
        if fnmatchcase(name, pattern):
            return decay
    return config.weight_decay if decays(shape) else 0.0


def decay_patterns(config: OptimizerConfig) -> list[tuple[str, float]]:
    """`optimizer.decay_groups` as pairs."""
    patterns = []
    for text in config.decay_groups:
        pattern, equals, number = text.rpartition("=")
        try:
            decay = float(number)
        except ValueError:
            decay = math.nan
        if not equals or not pattern or decay not in _DECAY:
            raise UsageError(
                f"optimizer.decay_groups has '{text}': expected PATTERN=NUMBER, such as token_embedding.*=0, with a "
                "number of 0 or more"
            )
        patterns.append((pattern, decay))
    return patterns
