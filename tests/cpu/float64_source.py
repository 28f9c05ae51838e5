"""A module of Python made from another's source, in which float32 is float64.

Models of transformers compute norms, rotary positions or the loss in float32 whatever their dtype is, and another order
of additions shows there in the seventh digit.
"""

from __future__ import annotations

import inspect
import re
import sys
from types import ModuleType


def read_as_float64(module: ModuleType) -> ModuleType:
    """A module made from the same source, in which float32 is float64."""
    name = f"{module.__name__}_in_float64"
    if name in sys.modules:
        return sys.modules[name]
    source = re.sub(r"torch\.float(32)?\b", "torch.float64", inspect.getsource(module)).replace(".float()", ".double()")
    made = ModuleType(name)
    made.__package__, made.__file__ = module.__package__, module.__file__
    sys.modules[name] = made
    exec(compile(source, str(module.__file__), "exec"), made.__dict__)
    return made
