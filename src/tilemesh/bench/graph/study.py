"""What the small studies of graphs share: hardware, inputs, a call, a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilemesh.bench.graph.run import calibrated_device
from tilemesh.core.hardware import DEVICES, Device
from tilemesh.graph.by_torch import dtype_of
from tilemesh.graph.emit import program
from tilemesh.graph.ir import Graph
from tilemesh.graph.size import known
from tilemesh.measure.gpu import call_timer
from tilemesh.measure.machine import stamp
from tilemesh.measure.row import Row
from tilemesh.measure.timing import LoopTimer, compare

Predicted = tuple[float | None, str]
"""Seconds, or why nothing is predicted."""
NOT_PREDICTED: Predicted = (None, "not predicted")


def ranking_device(place: torch.device) -> Device:
    """What programs are ranked by: the machine's calibrated rates, or those of a datasheet, which are never shown."""
    return calibrated_device(place)[0] or DEVICES["h200" if place.type == "cuda" else "h100"]


def predicted_here(place: torch.device, seconds: Callable[[Device], float]) -> Predicted:
    """A prediction for this machine; none where it is not calibrated."""
    device, why = calibrated_device(place)
    return (None, why) if device is None else (seconds(device), "")


def inputs_of(graph: Graph, place: torch.device) -> list[torch.Tensor]:
    """Random inputs of a graph, from one seed."""
    torch.manual_seed(0)
    shapes = [[known(size, {}) for size in node.shape] for node in graph.inputs]
    made = zip(shapes, graph.inputs, strict=True)
    return [(torch.randn(shape) / 8).to(device=place, dtype=dtype_of(node.dtype)) for shape, node in made]


def call_of(graph: Graph, inputs: list[torch.Tensor]) -> Callable[[int], object]:
    run = program(graph, inputs[0].device)
    return lambda index: run(*inputs)


def study_row(
    name: str, case: Mapping[str, Any], predicted: Predicted, calls: Mapping[str, Any], seconds: float,
    place: torch.device | None = None,
) -> Row:  # fmt: skip
    """Candidates in turns; `ours` is the row's measurement, the others are its peers."""
    timer = call_timer(place) if place is not None and place.type == "cuda" else LoopTimer()
    timed = compare(calls, timer=timer, repeats=30, seconds=seconds)
    missing = dict(timed.missing) | {"limit": "the programs are compared with each other"}
    return Row(
        name=name, case=dict(case), unit="s", predicted=predicted[0], measured=timed["ours"], limit=None,
        peers={key: value for key, value in timed.items() if key != "ours"},
        missing=missing | ({"predicted": predicted[1]} if predicted[0] is None else {}), **stamp(),
    )  # fmt: skip
