"""COMPUTE: one folder per operator. Names load when first used, so that importing this package costs nothing.

`tilemesh.kernels.scale_shift` is the function, although the folder has the same name: `from
tilemesh.kernels.scale_shift.cost import …` reaches the folder's modules.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from tilemesh.kernels.registry import find_function, public_functions

_OTHERS = {
    "FusedLinear": "tilemesh.kernels.modules:FusedLinear",
    "FusedEmbedding": "tilemesh.kernels.modules:FusedEmbedding",
    "SelfAttention": "tilemesh.kernels.modules:SelfAttention",
    **{
        name: f"tilemesh.kernels.transformer_modules:{name}"
        for name in (
            "FusedCrossEntropyLoss",
            "FusedLayerNorm",
            "FusedLinearCrossEntropyLoss",
            "FusedMlp",
            "FusedRMSNorm",
            "FusedSoftmax",
            "GatedMlp",
            "Rotary",
        )
    },
    "Config": "tilemesh.kernels.matmul.config:Config",
    "AdamW": "tilemesh.kernels.adamw.reference:AdamW",
    "global_norm": "tilemesh.kernels.adamw.norm:global_norm",
}


def __getattr__(name: str) -> Any:
    home = _OTHERS.get(name) or public_functions().get(name)
    if home is None and not name.startswith("_") and (entry := find_function(name)) is not None:
        home = entry.public  # of another package
    if home is None:
        raise AttributeError(f"module 'tilemesh.kernels' has no attribute '{name}'")
    module, _, attribute = home.partition(":")
    # Kept, so that the next look-up is a plain attribute: a small matmul takes no longer than this function.
    globals()[name] = getattr(importlib.import_module(module), attribute)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*_OTHERS, *public_functions()])


class _Kernels(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # Python sets a folder that was imported as an attribute here, in place of the function of that name.
        if not (isinstance(value, ModuleType) and name in public_functions()):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Kernels
