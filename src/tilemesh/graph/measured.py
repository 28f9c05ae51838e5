"""A cost model that learns: operators that were timed cost what was measured, the others the roofline, scaled.

The search asks for costs; the program it finds is timed operator by operator, and the search goes on with what is now
known, until the best program has nothing left to measure.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tilemesh.core.errors import UsageError
from tilemesh.core.files import write_text
from tilemesh.core.hardware import Device
from tilemesh.graph.by_torch import dtype_of, evaluate_torch
from tilemesh.graph.cost import node_seconds
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.rewrite import RewriteRule
from tilemesh.graph.search import FoundProgram, search
from tilemesh.graph.size import numbers
from tilemesh.measure.machine import this_machine

REPEATS = 5


class MeasuredCost:
    """Seconds of a graph: measured where an operator of these shapes was timed, else predicted for this device."""

    def __init__(self, device: Device, place: torch.device | str = "cpu") -> None:
        self.device, self.place = device, torch.device(place)
        self.seconds: dict[str, float] = {}
        self.ratios: dict[str, list[float]] = {}  # measured over predicted, by operator

    def __call__(self, graph: Graph) -> float:
        return sum(self._node(node) for node in graph.nodes() if node.launched)

    def has_measured(self, graph: Graph) -> bool:
        """Whether all of it was timed here, so that nothing of its time comes from the device's figures."""
        return all(_key(node) in self.seconds for node in graph.nodes() if node.launched)

    def _node(self, node: Node) -> float:
        seconds = self.seconds.get(_key(node))
        if seconds is not None:
            return seconds
        return node_seconds(node, self.device) * statistics.median(self.ratios.get(node.op, [1.0]))

    def save(self, path: Path) -> None:
        """What was measured, one row per operator, for a later search on this machine."""
        head = {"machine": this_machine().id, "device": self.place.type}
        rows: list[dict[str, Any]] = [head]
        rows += [{"operator": key, "seconds": value} for key, value in self.seconds.items()]
        rows += [{"kind": op, "ratios": values} for op, values in self.ratios.items()]
        write_text("".join(json.dumps(row) + "\n" for row in rows), path)

    def load(self, path: Path) -> None:
        """Rows that were measured before; those of another machine are refused, and so is a file that is cut."""
        seconds, ratios = _read_rows(path, {"machine": this_machine().id, "device": self.place.type})
        self.seconds |= seconds
        self.ratios |= ratios

    def measure(self, graph: Graph) -> int:
        """Times what was not timed yet; how many operators that were."""
        new = {_key(node): node for node in graph.nodes() if node.launched and _key(node) not in self.seconds}
        for key, node in new.items():
            taken = self.seconds[key] = self._timed(node)
            predicted = node_seconds(node, self.device)
            if predicted > 0:
                self.ratios.setdefault(node.op, []).append(taken / predicted)
        return len(new)

    def _timed(self, node: Node) -> float:
        inputs = [
            torch.rand(numbers(value.shape), device=self.place).to(dtype_of(value.dtype)) for value in node.inputs
        ]
        readings = []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            evaluate_torch(node, inputs, {}, self.place)
            if self.place.type == "cuda":
                torch.cuda.synchronize(self.place)
            readings.append(time.perf_counter() - began)
        return statistics.median(readings[1:])


def _read_rows(path: Path, here: dict[str, str]) -> tuple[dict[str, float], dict[str, list[float]]]:
    seconds: dict[str, float] = {}
    ratios: dict[str, list[float]] = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}; give a file that MeasuredCost.save wrote") from error
    for number, line in enumerate(lines or [""], 1):
        try:
            row = json.loads(line)
            if number == 1:
                head = {"machine": row["machine"], "device": row["device"]}
                if head != here:
                    raise UsageError(f"{path} was measured on {head}; this is {here}: measure again")
            elif "operator" in row:
                seconds[row["operator"]] = float(row["seconds"])
            else:
                ratios[row["kind"]] = [float(value) for value in row["ratios"]]
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError):
            raise UsageError(
                f"{path}, line {number} is {line[:60]!r}; give a file that MeasuredCost.save wrote, or measure again"
            ) from None
    return seconds, ratios


def _key(node: Node) -> str:
    """An operator with its shapes and settings, as text: the same in every process."""
    return f"{node.op} {[value.typed for value in node.inputs]} {node.attributes}"


def refined_search(graph: Graph, rules: Sequence[RewriteRule], cost: MeasuredCost, rounds: int = 4) -> FoundProgram:
    """A search whose cost model is refined by every program that it finds."""
    cost.measure(graph)
    searched = search(graph, rules, cost)
    for _ in range(rounds):
        if not cost.measure(searched.graph):
            break
        searched = search(graph, rules, cost)
    return searched
