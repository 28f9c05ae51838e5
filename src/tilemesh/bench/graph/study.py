"""What the small studies of graphs share: hardware, inputs, a call, a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilemesh.bench.graph.run import calibrated_device
from tilemesh.bench.harness import OURS, BenchCase, Estimate, calling
from tilemesh.core.hardware import Device
from tilemesh.graph.by_torch import dtype_of
from tilemesh.graph.emit import program
from tilemesh.graph.ir import Graph
from tilemesh.measure.gpu import call_timer
from tilemesh.measure.row import Row

NOT_PREDICTED = Estimate(None, "not predicted")


def predicted_here(place: torch.device, seconds: float | Callable[[Device], float]) -> Estimate:
    """A prediction for this machine; none where it is not calibrated."""
    device, why = calibrated_device(place)
    if device is None:
        return Estimate(None, why)
    return Estimate(seconds(device) if callable(seconds) else seconds)


def inputs_of(graph: Graph, place: torch.device) -> list[torch.Tensor]:
    """Random inputs of a graph, from one seed."""
    torch.manual_seed(0)
    return [(torch.randn(node.shape) / 8).to(device=place, dtype=dtype_of(node.dtype)) for node in graph.inputs]


def call_of(graph: Graph, inputs: list[torch.Tensor]) -> Callable[[int], object]:
    return calling(program(graph, inputs[0].device), *inputs)


def study_row(
    name: str, case: Mapping[str, Any], predicted: Estimate, calls: Mapping[str, Any], seconds: float,
    place: torch.device | None = None,
) -> Row:  # fmt: skip
    """Candidates in turns; `ours` is the row's measurement, the others are its peers."""
    return BenchCase(
        name=name, labels=case, ours=calls[OURS], peers={key: call for key, call in calls.items() if key != OURS},
        predict=predicted, limit=Estimate(None, "the programs are compared with each other"), seconds=seconds,
        timer=call_timer(place) if place is not None and place.type == "cuda" else None,
    ).measure()  # fmt: skip
