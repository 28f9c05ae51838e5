"""How long an operation takes on a device, and a collective over its links.

The one idea: a roofline per operation. A product takes its FLOPs at the rate its shape allows (tiles, waves, a fill per
tile, parts along k) or its bytes at the memory's, whichever is longer; the rest only moves bytes; nothing is shorter
than a launch. A collective runs on two levels of links, fast within a node and slower across: reduce_scatter inside a
node, the slice across nodes over every member's own adapter, all_gather inside; messages and bytes are those that
`comm/schedules/cost.py` counts.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tilemesh.comm.schedules.cost import seconds, traffic
from tilemesh.comm.schedules.topology import Wire
from tilemesh.core.calibration import Rates
from tilemesh.core.hardware import DEVICES, DTYPE_BYTES, Cluster, Device
from tilemesh.model.work.operations import FusedAttention, Operation, Product
from tilemesh.model.work.passes import MemoryPass
from tilemesh.model.work.task import Code, unaligned
from tilemesh.plan import constants

RateCurve = tuple[tuple[int, float], ...]


class AttentionRates(NamedTuple):
    """What a fused attention kernel sustains: FLOP/s by head width for either pass, and how short sequences lose."""

    forward: tuple[tuple[int, float], ...]
    backward: tuple[tuple[int, float], ...]
    fill_tokens: tuple[int, int] = (0, 0)
    """Tokens of a sequence that take as long again: blocks on the diagonal half used, and what precedes the loop."""

    def rate(self, backward: bool, head_width: int, tokens: int) -> float:
        known = self.backward if backward else self.forward
        _, rate = min(known, key=lambda pair: (abs(pair[0] - head_width), pair[0]))
        return rate / (1 + self.fill_tokens[backward] / tokens)


@dataclass(frozen=True)
class Speed:
    """A device as the model sees it."""

    flops_per_s: float
    """What a large matmul sustains."""
    attention: AttentionRates
    stream_bytes_per_s: float
    elementwise_bytes_per_s: float
    """Of tensors of a layer's size: on a CPU caches and allocation make it another figure than the memory's."""
    exponentials_per_s: float
    kinds_bytes_per_s: Mapping[str, float]
    """By a pass's kind, where that was measured apart."""
    narrow: tuple[RateCurve, RateCurve]
    """Of the sustained rate, what products reach by their smallest dim, forward and backward; empty: all of it."""
    launch_s: float
    processors: int
    """Streaming multiprocessors; 0 where tiles and waves do not matter."""
    tiles: constants.Tiles
    waits: bool
    """The caller waits for each operation (a CPU), so its launch adds to the work instead of hiding behind it."""
    pads: bool
    """Rows of unaligned length are padded before they reach a matmul."""
    times_as_long: Mapping[str, float]
    """As in `Rates`."""

    def matmul_s(self, op: Product) -> float:
        fraction, splits = shape_fraction(op.batch, op.m, op.n, op.k, self.processors, self.tiles)
        size = DTYPE_BYTES[op.dtype]
        awkward = unaligned(op.n, size) or unaligned(op.k, size)
        if awkward and self.processors and not self.pads:
            fraction = min(fraction, constants.UNALIGNED_FRACTION)
        cost = op.cost
        rate = self.flops_per_s * (constants.FP8_GAIN if op.fp8 else 1.0)
        compute = cost.flops / (rate * fraction * narrow_fraction(self.narrow[op.backward], op))
        # Parts of a split product are written in fp32 and read again to be summed.
        partial = 2 * 4 * splits * op.batch * op.m * op.n / self.stream_bytes_per_s if splits > 1 else 0.0
        # A CPU makes the products of a batch one by one.
        calls = op.batch if self.waits else 1
        return self._with_launches(max(compute + partial, cost.bytes_moved / self.stream_bytes_per_s), calls)

    def op_s(self, op: Operation) -> float:
        if isinstance(op, Product):
            return self.matmul_s(op) * self.times_as_long.get("products", 1.0)
        if isinstance(op, MemoryPass):
            longer = self.times_as_long.get("passes", 1.0)
            rate = self.kinds_bytes_per_s.get(op.kind, self.elementwise_bytes_per_s)
            moving = op.nbytes / (rate * constants.PASS_FRACTION[self.waits][op.kind])
            return longer * self._with_launches(moving + op.exponentials / self.exponentials_per_s, op.launches)
        cost = op.cost
        rate = self.attention.rate(op.backward, op.head_width, op.keys)
        if isinstance(op, FusedAttention) and op.is_block:
            rate *= constants.BLOCK_GAIN / (1 + constants.BLOCK_FILL / op.queries)
        compute = cost.flops / rate
        longer = self.times_as_long.get("attention", 1.0)
        return longer * self._with_launches(max(compute, cost.bytes_moved / self.stream_bytes_per_s), 1)

    def _with_launches(self, busy_s: float, launches: int) -> float:
        return busy_s + launches * self.launch_s if self.waits else max(busy_s, launches * self.launch_s)

    def seconds(self, ops: tuple[Operation, ...]) -> float:
        return sum(map(self.op_s, ops))


def speed_of(device: Device, dtype: str, rates: Rates | None = None, code: Code = "fused") -> Speed:
    """A device's speed from its datasheet and the constants, or from what was measured where it was."""
    sustained = sustained_flops_per_s(device, dtype)
    measured = rates or Rates()
    flops_per_s = measured.matmul_flops_per_s.get(dtype, sustained)
    stream = measured.copy_bytes_per_s or device.memory_bytes_per_s * constants.STREAM_FRACTION
    cpu = device.kind == "cpu"
    # A CPU without a figure of its own: a vectorised exponential takes about as long as so many multiply-adds.
    exponentials = measured.exponentials_per_s or (flops_per_s / constants.EXPONENTIAL_FLOPS if cpu else math.inf)
    return Speed(
        flops_per_s=flops_per_s,
        # A machine whose matmuls are slower or faster than expected is so in attention too.
        attention=_attention_speed(device, flops_per_s / constants.MATMUL_FRACTION[device.kin], measured, code),
        stream_bytes_per_s=stream,
        elementwise_bytes_per_s=measured.elementwise_bytes_per_s or stream,
        exponentials_per_s=exponentials,
        kinds_bytes_per_s={
            kind: rate
            for kind, rate in (("rows", measured.rows_bytes_per_s), ("halves", measured.halves_bytes_per_s))
            if rate is not None
        },
        narrow=_narrow(measured),
        launch_s=measured.operation_s or measured.launch_s or device.launch_s,
        processors=0 if cpu else device.sm_count,
        tiles=constants.HOPPER_TILES if device.capability >= (9, 0) and code != "fused" else constants.TILES,
        waits=cpu,
        pads=code != "eager",
        times_as_long=measured.times_as_long,
    )


def sustained_flops_per_s(device: Device, dtype: str) -> float:
    """What a large matmul sustains by the datasheet: a fraction of the peak, or what the board's power allows.

    A multiply-add costs energy, so a board that may draw less than the one whose fraction was measured sustains less:
    power beyond what it draws idle buys FLOPs at the price that they have on the other.
    """
    sustained = device.peak(dtype) * constants.MATMUL_FRACTION[device.kin]
    measured = DEVICES.get(device.like)
    if measured is None or device.power_w >= measured.power_w or dtype not in measured.peak_flops_per_s:
        return sustained
    idle_w = constants.IDLE_POWER * measured.power_w
    flops_per_joule = measured.peak(dtype) * constants.MATMUL_FRACTION[measured.name] / (measured.power_w - idle_w)
    return min(sustained, max(device.power_w - idle_w, idle_w) * flops_per_joule)


PEAK_WIDTH = 1024
"""From this smallest dim on a product runs at the rate of the peak, which is measured there."""


def _narrow(measured: Rates) -> tuple[RateCurve, RateCurve]:
    """Measured rates of narrow products, as fractions of the measured peak, so that they hold for any dtype."""
    peak = measured.matmul_flops_per_s.get("fp32")
    fractions: dict[str, list[tuple[int, float]]] = {"forward": [], "backward": []}
    for key, rate in measured.projection_flops_per_s.items() if peak else ():
        name, _, width = key.partition("-")
        fractions[name].append((int(width), rate / (peak or 1.0)))
    curves = (tuple(sorted(points)) for points in (fractions["forward"], fractions["backward"]))
    forward, backward = ((*points, (PEAK_WIDTH, 1.0)) if points else () for points in curves)
    return forward, backward


def narrow_fraction(curve: RateCurve, op: Product) -> float:
    """Between measured widths in a line over the width's logarithm; beyond them as at the ends.

    Measured were products with two narrow dims, which caches hold. With one they come from memory, and nothing is above
    the peak, which was measured so.
    """
    width, second, _ = sorted((op.m, op.n, op.k))
    most = 1.0 if second >= PEAK_WIDTH else math.inf
    if not curve or width >= curve[-1][0]:
        return 1.0
    if width <= curve[0][0]:
        return min(most, curve[0][1])
    (x0, y0), (x1, y1) = next(pair for pair in itertools.pairwise(curve) if pair[0][0] <= width < pair[1][0])
    return min(most, y0 + (y1 - y0) * math.log(width / x0) / math.log(x1 / x0))


def _attention_speed(device: Device, peak: float, measured: Rates, code: Code) -> AttentionRates:
    if measured.attention_flops_per_s:
        passes: dict[str, list[tuple[int, float]]] = {"forward": [], "backward": []}
        for key, rate in measured.attention_flops_per_s.items():
            name, _, width = key.partition("-")
            passes[name].append((int(width), rate))
        return AttentionRates(tuple(sorted(passes["forward"])), tuple(sorted(passes["backward"])))
    known = constants.TORCH_ATTENTION_FRACTION.get(device.kin)
    if known is None or code == "fused":
        forward, backward = constants.FUSED_ATTENTION_FRACTION[device.kin]
        return AttentionRates(((128, forward * peak),), ((128, backward * peak),))
    return AttentionRates(
        tuple((width, forward * peak) for width, (forward, _) in known.items()),
        tuple((width, backward * peak) for width, (_, backward) in known.items()),
        constants.TORCH_ATTENTION_FILL,
    )


@functools.cache
def shape_fraction(
    count: int, m: int, n: int, k: int, processors: int, choice: constants.Tiles = constants.TILES
) -> tuple[float, int]:
    """Of the sustained rate, what a shape allows (the best tile's edges, last wave and fill), and into how many parts
    its k is split.

    A wave is one tile on every multiprocessor; the last one is rarely full. Each tile spends a fixed time on filling
    its pipeline and on writing its result, as long as so many steps of k. A result of fewer tiles than multiprocessors
    (a narrow layer's weight gradient) is computed in parts along k, so that all have work.
    """
    if not processors:
        return 1.0, 1
    best = (0.0, 1)
    for tile_m, tile_n, rate in choice:
        tiles = count * math.ceil(m / tile_m) * math.ceil(n / tile_n)
        for splits in range(1, max(1, min(processors // tiles, k // constants.LEAST_SPLIT_K)) + 1):
            slots = math.ceil(tiles * splits / processors) * processors
            used = rate * splits * count * m * n / (slots * tile_m * tile_n)
            own_k = k / splits
            # Fewer parts among equals: each part's result is written and read.
            best = max(best, (used * own_k / (own_k + constants.TILE_FILL_K), splits), key=lambda b: (b[0], -b[1]))
    return best


# ---- links ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RanksOfNodes:
    """Ranks that exchange with one another: `inside` of them in each of `nodes` nodes."""

    inside: int
    nodes: int
    within: Wire
    """Between two ranks of a node."""
    across: Wire
    """Between two nodes, for each rank."""
    hides: bool = True
    """Whether an exchange can run beside computing; between CPU ranks it is computing itself."""
    meeting_s: float = 0.0
    """Of each exchange, beside its messages."""

    @property
    def ranks(self) -> int:
        return self.inside * self.nodes

    def all_gather_s(self, nbytes: float) -> float:
        """Each node gathers over its members' adapters at once, then inside: also the time of a scatter-sum."""
        across = seconds("all_gather", "ring", self.nodes, nbytes / self.inside, self.across)
        return across + seconds("all_gather", "ring", self.inside, nbytes, self.within)

    def all_reduce_s(self, nbytes: float) -> float:
        """Scatter-sum and gather-all, or a tree where latency rules."""
        tree = seconds("all_reduce", "tree", self.inside, nbytes, self.within)
        tree += seconds("all_reduce", "tree", self.nodes, nbytes, self.across)
        return min(2 * self.all_gather_s(nbytes), tree)

    def all_to_all_s(self, nbytes: float, copies: int = 1) -> float:
        """Of so many bytes on each rank an equal part for every other: those for the own node over its links, at the
        same time all others over each rank's own adapter. Of `copies` of a row to any ranks one is enough for each
        rank of the own node, and for each other node."""
        inside_bytes = nbytes * (self.inside - 1) / self.ranks * _different(self.ranks, copies)
        across_bytes = nbytes * (self.nodes - 1) / self.nodes * _different(self.nodes, copies)
        inside_s = self._at_once_s(self.within, self.inside - 1, inside_bytes)
        return max(inside_s, self._at_once_s(self.across, self.ranks - self.inside, across_bytes))

    def _at_once_s(self, wire: Wire, messages: int, nbytes: float) -> float:
        """So many messages of these bytes together: a GPU has them under way at once, a CPU sends one by one."""
        return (min(messages, 1) if self.hides else messages) * wire.latency_s + nbytes / wire.bytes_per_s

    def exchange_s(self, collective: str, nbytes: float, copies: int = 1) -> float:
        """A collective by its name."""
        if self.ranks == 1:
            return 0.0
        if collective == "all_to_all":
            return self.meeting_s + self.all_to_all_s(nbytes, copies)
        return self.meeting_s + (self.all_reduce_s if collective == "all_reduce" else self.all_gather_s)(nbytes)

    def sent_bytes(self, nbytes: float, collective: str) -> float:
        """What one rank sends for a buffer of so many bytes; the two levels together send what one ring would."""
        return sent_share(collective, self.ranks) * nbytes


def _different(places: int, copies: int) -> float:
    """Of so many copies to random places, the fraction that goes to different ones, expected."""
    return places * (1 - (1 - 1 / places) ** copies) / copies


@functools.cache
def sent_share(collective: str, ranks: int) -> float:
    """Of a buffer, what one rank sends."""
    algorithm = "pairwise" if collective == "all_to_all" else "ring"
    return traffic(collective, algorithm, ranks, ranks).nbytes / ranks


def group(cluster: Cluster, size: int, stride: int) -> RanksOfNodes:
    """The slowest group of an axis: `size` ranks, `stride` apart, ranks laid on nodes in order."""
    node = cluster.node
    inside = _ranks_inside(cluster.world, node.count, size, stride)
    return RanksOfNodes(
        inside=inside,
        nodes=size // inside,
        within=_inside_a_node(cluster),
        across=_between_nodes(cluster),
        hides=node.device.kind == "gpu",
        meeting_s=node.intra.meeting_s,
    )


@functools.cache
def _ranks_inside(world: int, per_node: int, size: int, stride: int) -> int:
    """How many ranks of a group share a node, for the group that the ends of nodes cut worst. Shares of unequal size
    exchange as their greatest common divisor would: the smallest share's adapters set the pace."""
    firsts = (block + offset for block in range(0, world, size * stride) for offset in range(stride))
    shares = (Counter((first + place * stride) // per_node for place in range(size)) for first in firsts)
    return min(math.gcd(*share.values()) for share in shares)


def neighbour_s(cluster: Cluster, stride: int, ranks: int, nbytes: float) -> float:
    """One message to the next rank of an axis: within the node when the whole axis lies in one, else across."""
    near = stride * ranks <= cluster.node.count
    return (_inside_a_node(cluster) if near else _between_nodes(cluster)).seconds(nbytes)


def _inside_a_node(cluster: Cluster) -> Wire:
    link = cluster.node.intra
    return Wire(link.latency_s, link.bytes_per_s * constants.LINK_FRACTION)


def _between_nodes(cluster: Cluster) -> Wire:
    return Wire(cluster.node.inter.latency_s, cluster.node.inter_bytes_per_s_per_device * constants.LINK_FRACTION)
