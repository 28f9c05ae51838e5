"""What a placed program takes on a mesh: seconds of computing, seconds and bytes of exchanges, bytes in memory.

The one cost by which every chooser is judged. Computing is the roofline of what a rank has, plus a launch per operator;
an exchange is a row of collectives, one axis after the other, each timed by the formulas of `comm/schedules` on the
links between the ranks of that axis. Nothing overlaps here. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilemesh.core.axes import Axes
from tilemesh.core.calibration import Rates
from tilemesh.core.cost import SHORT_DTYPES
from tilemesh.core.hardware import Cluster
from tilemesh.core.tensor_placement import REPLICATED, SILENT, Mark, P, R, S, TensorPlacement, V, exchange_of
from tilemesh.graph.ir import Graph, Node
from tilemesh.model.work.operations import Product
from tilemesh.model.work.passes import MemoryPass
from tilemesh.plan import constants
from tilemesh.plan.place.exchange import Step, exchange_steps
from tilemesh.plan.place.overlap import begun_early
from tilemesh.plan.place.propagate import DTYPE_BYTES, sent_bytes
from tilemesh.plan.place.rules import EXCHANGES
from tilemesh.plan.speed import RanksOfNodes, Speed, group, speed_of

VIEW_LAUNCHES = 0.5
"""Of an operator's call, what the call of a view takes where the caller waits for both."""
EXPONENTIALS = {"exp": 1, "log": 1, "tanh": 1, "erf": 2, "sin": 1, "cos": 1, "power": 2}
"""Of operators that take dozens of instructions for an element: as many as so many exponentials, about."""


class MeshCost:
    """Seconds and bytes on a mesh of a cluster's devices; the first axis joins neighbours in rank."""

    def __init__(self, axes: Axes, cluster: Cluster, rates: Rates | None = None) -> None:
        self.axes, self.device, self.sizes, self.rates = axes, cluster.device, dict(axes), rates
        self._speeds: dict[str, Speed] = {}
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
        return math.prod(node.shape) * DTYPE_BYTES.get(node.dtype, 2) / cut

    def exchange(self, node: Node, before: TensorPlacement, after: TensorPlacement) -> tuple[float, float]:
        """Seconds, and the bytes that each rank sends; infinite where there is no way."""
        if before == after:
            return 0.0, 0.0
        key = (node.shape, node.dtype, node["order"] if node.op == "transpose" else (), before, after)
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
        is_turned = node.op == "transpose"
        if is_turned and collective == "all_gather":  # as what it is a view of, and seen so again
            dims, node, is_turned = [node["order"][dim] for dim in dims], node.inputs[0], False
        is_strided = any(math.prod(node.shape[:dim]) > 1 for dim in dims)
        if not (is_turned or is_strided):
            return seconds
        return seconds + self._speed("fp32").op_s(MemoryPass("copy", round(2 * payload), kind="strided"))

    def compute_s(self, node: Node, taken: Sequence[TensorPlacement], output: TensorPlacement) -> float:
        """An operator on what a rank takes: all axes along which anything is cut divide its work."""
        if node.op in ("input", "constant", "iota"):
            return 0.0
        is_copy = node.op == "reshape" and node.inputs[0].op == "transpose"
        short = SHORT_DTYPES.get(node.dtype, "fp32")
        short = short if short in self.device.peak_flops_per_s else "fp32"
        speed = self._speed(short)
        if not (node.launched or is_copy):
            return VIEW_LAUNCHES * speed.launch_s if speed.waits else 0.0
        if node.op == "dot":
            return speed.op_s(self._product(node, taken, output, short))
        inputs = dict(zip(node.inputs, taken, strict=True))
        moved = self.nbytes(node, output) + sum(self.nbytes(value, placed) for value, placed in inputs.items())
        elements = self.nbytes(node, output) / DTYPE_BYTES.get(node.dtype, 2)
        exponentials = round(elements * EXPONENTIALS.get(node.op, 0))
        seconds = speed.op_s(MemoryPass(node.op, round(moved), 1, exponentials, _pass_kind(node)))
        flops = node.flops
        cut = {axis for placement in (*taken, output) for axis, mark in placement if mark.kind == "S"}
        return max(seconds, flops / math.prod(self.sizes[axis] for axis in cut) / speed.flops_per_s)

    def pass_s(self, memory: MemoryPass) -> float:
        """Of a pass over a rank's memory."""
        return self._speed("fp32").op_s(memory)

    def of_program(self, *programs: Graph) -> tuple[float, float]:
        """Seconds of one rank's programs, one after the other, with their exchanges; and the bytes that it sends.

        An exchange moves from where it begins to where it is first read, one at a time, where the links move by
        themselves; what of it is hidden slows computing as the planner assumes. Between ranks of a CPU it is computing.
        """
        total, sent = 0.0, 0.0
        for local in programs:
            clock = free = 0.0  # of computing, and from when on links move nothing
            moving: dict[Node, tuple[float, float]] = {}  # when an exchange will have come, and what it takes
            order = [(node, node.inputs) for node in begun_early(local)]
            for node, read in [*order, (None, local.outputs)]:
                for comes, took in [moving.pop(value) for value in dict.fromkeys(read) if value in moving]:
                    exposed = max(0.0, comes - clock)
                    clock += exposed + constants.HIDDEN_COST * max(0.0, took - exposed)
                if node is None:
                    break
                if node.op not in EXCHANGES:
                    clock += self.compute_s(node, (REPLICATED,) * len(node.inputs), REPLICATED)
                    continue
                value, axis, marks = node.inputs[0], str(node["axis"]), _marks_of(node)
                nbytes = max(self.nbytes(each, REPLICATED) for each in (value, node))
                nbytes *= self.sizes[axis] if node.op == "all_to_all" else 1
                sent += sent_bytes(*marks, self.sizes[axis], nbytes)
                took = self._step_s(value, axis, marks, nbytes)
                if self.groups[axis].hides:
                    free = max(free, clock) + took
                    moving[node] = free, took
                else:
                    clock += took
            total += clock
        return total, sent

    def least_s(self, graph: Graph) -> float:
        """No placement of a graph takes less: its operations, all ranks busy with them at the best rate."""
        flops = graph.flops
        peak = max(self.device.peak_flops_per_s.values())
        return flops / peak / math.prod(self.sizes.values())

    def _speed(self, short: str) -> Speed:
        if short not in self._speeds:
            self._speeds[short] = speed_of(self.device, short, self.rates)
        return self._speeds[short]

    def _product(self, node: Node, taken: Sequence[TensorPlacement], output: TensorPlacement, short: str) -> Product:
        """What a rank has of a product of matrices."""

        def local(value: Node, placement: TensorPlacement, dim: int) -> int:
            return max(1, value.shape[dim] // self.pieces(placement, dim))

        last = len(node.shape) - 1
        *batch, m, n = (local(node, output, dim) for dim in range(last + 1))
        k = local(node.inputs[0], taken[0], last)
        return Product("dot", math.prod(batch), m, n, k, short)


def _marks_of(node: Node) -> tuple[Mark, Mark]:
    """From what to what an exchange in a rank's program leads."""
    if node.op == "all_reduce":
        return P, R
    dim = int(node["dim"])
    if node.op == "all_to_all":
        return S(dim), S(int(node["into"]))
    return (S(dim), R) if node.op == "all_gather" else (P, S(dim))


def _pass_kind(node: Node) -> str:
    """Whether an operator reads and writes as a product of elements does."""
    if node.op in ("take", "put_add"):
        return "gathered"
    if node.op not in ("sum", "amax", "argmax"):
        return "plain"
    return "rows" if len(node.inputs[0].shape) - 1 in node["dims"] else "strided"
