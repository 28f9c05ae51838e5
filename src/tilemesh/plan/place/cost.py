"""What a placed program takes on a mesh: seconds of computing, seconds and bytes of exchanges, bytes in memory.

The one cost by which every chooser is judged. Computing is the roofline of what a rank has, plus a launch per operator;
an exchange is a row of collectives, one axis after the other, each timed by the formulas of `comm/schedules` on the
links between the ranks of that axis. Nothing overlaps here. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilemesh.core.axes import Axes
from tilemesh.core.cost import SHORT_DTYPES
from tilemesh.core.hardware import Cluster
from tilemesh.core.tensor_placement import SILENT, Mark, R, TensorPlacement, V, exchange_of
from tilemesh.graph.ir import Node
from tilemesh.plan.place.exchange import Step, exchange_steps
from tilemesh.plan.place.propagate import DTYPE_BYTES, sent_bytes
from tilemesh.plan.place.rules import sized
from tilemesh.plan.speed import RanksOfNodes, group


class MeshCost:
    """Seconds and bytes on a mesh of a cluster's devices; the first axis joins neighbours in rank."""

    def __init__(self, axes: Axes, cluster: Cluster) -> None:
        self.axes, self.device, self.sizes = axes, cluster.device, dict(axes)
        self.groups: dict[str, RanksOfNodes] = {}
        stride = 1
        for axis, size in axes:
            self.groups[axis] = group(cluster, size, stride)
            stride *= size
        self._exchanges: dict[tuple[object, ...], tuple[float, float]] = {}

    def pieces(self, placement: TensorPlacement, dim: int) -> int:
        return math.prod(self.sizes[axis] for axis in placement.axes_of(dim))

    def nbytes(self, node: Node, placement: TensorPlacement) -> float:
        """What a rank has of a tensor, on average."""
        if node.dtype == "tuple":
            return 0.0
        cut = math.prod(self.sizes[axis] for axis, mark in placement if mark.kind == "S")
        return math.prod(sized(node, dim) for dim in range(len(node.shape))) * DTYPE_BYTES.get(node.dtype, 2) / cut

    def exchange(self, node: Node, before: TensorPlacement, after: TensorPlacement) -> tuple[float, float]:
        """Seconds, and the bytes that each rank sends; infinite where there is no way."""
        if before == after:
            return 0.0, 0.0
        key = (node.shape, node.dtype, before, after)
        if key not in self._exchanges:
            if any(mark == V for _, mark in before):
                return math.inf, math.inf
            steps = self.steps(node, before, after)
            self._exchanges[key] = (sum(seconds for _, seconds, _ in steps), sum(sent for _, _, sent in steps))
        return self._exchanges[key]

    def steps(self, node: Node, before: TensorPlacement, after: TensorPlacement) -> list[tuple[Step, float, float]]:
        """The collectives of an exchange with their seconds and the bytes that each rank sends."""
        timed, placement = [], before
        for axis, old, new in exchange_steps(before, after, self.axes):
            if exchange_of(old, new) not in SILENT:
                nbytes = self.nbytes(node, placement.put(axis, R))
                sent = sent_bytes(old, new, self.sizes[axis], nbytes)
                timed.append(((axis, old, new), self._step_s(node, axis, (old, new), nbytes), sent))
            placement = placement.put(axis, new)
        return timed

    def _step_s(self, node: Node, axis: str, marks: tuple[Mark, Mark], nbytes: float) -> float:
        collective = exchange_of(*marks)
        payload = nbytes / self.sizes[axis] if collective == "all_to_all" else nbytes
        seconds = self.groups[axis].exchange_s(collective, payload)
        # Pieces that are not rows of the whole are copied into their places, read and written once.
        dims = [mark.dim for mark in marks if isinstance(mark.dim, int)]
        is_strided = any(math.prod(sized(node, lead) for lead in range(dim)) > 1 for dim in dims)
        return seconds + (2 * payload / self.device.memory_bytes_per_s if is_strided else 0.0)

    def compute_s(self, node: Node, taken: Sequence[TensorPlacement], output: TensorPlacement) -> float:
        """An operator on what a rank takes: all axes along which anything is cut divide its work."""
        if not node.launched:
            return 0.0
        cut = {axis for placement in (*taken, output) for axis, mark in placement if mark.kind == "S"}
        flops = node.flops
        assert isinstance(flops, int), node
        short = SHORT_DTYPES.get(node.dtype, "fp32")
        peak = self.device.peak(short if short in self.device.peak_flops_per_s else "fp32")
        inputs = dict(zip(node.inputs, taken, strict=True))
        moved = self.nbytes(node, output) + sum(self.nbytes(value, placed) for value, placed in inputs.items())
        work = flops / math.prod(self.sizes[axis] for axis in cut) / peak
        return self.device.launch_s + max(work, moved / self.device.memory_bytes_per_s)
