"""The host's floor under a step: a GPU runs no faster than its kernels are launched.

The one idea: what the host needs does not depend on how large the tensors are, so it is measured on a model so small
that the GPU only waits (`train/host.py`), of two depths, which gives seconds a layer and seconds a step; forward and
backward passes apart from clipping and the optimiser, since a step makes the former once a microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilemesh.model.config import ModelConfig
from tilemesh.plan.passes import Code


def step_s(measured: Mapping[str, float], model: ModelConfig, code: Code, layers: int, microbatches: int) -> float:
    """Seconds of the host for a step; 0 where its figures for this kind of layer and code were not measured."""
    name = f"{kind_of(model)}-{code}"
    try:
        passes_s = measured[f"{name}-passes-layer"] * layers + measured[f"{name}-passes"]
        update_s = measured[f"{name}-update-layer"] * layers + measured[f"{name}-update"]
    except KeyError:
        return 0.0
    return microbatches * passes_s + update_s


def kind_of(model: ModelConfig) -> str:
    """Which of the two kinds of layer that are measured this model's are most like: they launch different kernels."""
    return "llama" if model.activation == "swiglu" else "gpt"
