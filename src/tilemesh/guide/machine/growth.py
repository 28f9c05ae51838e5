"""How models and the GPUs that train them grew, as published."""

from __future__ import annotations

from dataclasses import dataclass

from tilemesh.core.hardware import DEVICES

# Parameters: GPT (Radford et al. 2018), GPT-2 (Radford et al. 2019), GPT-3 (Brown et al. 2020), PaLM (Chowdhery et al.
# 2022).
MODELS = {2018: ("GPT", 0.117e9), 2019: ("GPT-2", 1.5e9), 2020: ("GPT-3", 175e9), 2022: ("PaLM", 540e9)}
TRAINING_BYTES = 16  # per parameter, chapter 5


@dataclass(frozen=True)
class YearsGpu:
    """The largest GPU of a year's data centres."""

    name: str
    memory_bytes: int
    fp16_flops_per_s: float
    bytes_per_s: float


def _known(name: str) -> YearsGpu:
    device = DEVICES[name]
    return YearsGpu(name, device.memory_bytes, device.peak("fp16"), device.memory_bytes_per_s)


GPUS = {
    # NVIDIA V100 datasheet, SXM2 column, 32 GB. It is not a device that tilemesh plans for, so its figures stand here.
    2018: YearsGpu("v100", 32 << 30, 125e12, 900e9),
    2020: _known("a100-80"),
    2022: _known("h100"),
    2023: _known("h200"),
    2024: _known("b200"),
}


def times_larger(first: int, last: int) -> tuple[float, float]:
    """How many times larger between two years: what the model needs for training, and the memory of a GPU."""
    return MODELS[last][1] / MODELS[first][1], GPUS[last].memory_bytes / GPUS[first].memory_bytes
