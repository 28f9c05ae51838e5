"""Seconds of collectives on two levels of links: fast within a node, slower across. Closed forms, alpha-beta.

`ring_*` and `tree_*` are the textbook forms over one kind of link (alpha seconds a message, beta bytes a second).
A `Group` is how an axis of the mesh lies on the nodes; its collectives run in two levels: scatter-sum inside a node,
the slice across nodes over every member's own adapter, gather-all inside. Bytes are those of the whole buffer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilemesh.core.hardware import Cluster
from tilemesh.plan.constants import LINK_FRACTION


def ring_all_reduce_s(ranks: int, nbytes: float, alpha_s: float, bytes_per_s: float) -> float:
    """2(n-1) messages, 2(n-1)/n of the buffer over each link: the fewest bytes there can be."""
    return 2 * ring_all_gather_s(ranks, nbytes, alpha_s, bytes_per_s)


def ring_all_gather_s(ranks: int, nbytes: float, alpha_s: float, bytes_per_s: float) -> float:
    """(n-1) messages, (n-1)/n of the whole over each link; scatter-sum is the same backwards."""
    return (ranks - 1) * (alpha_s + nbytes / ranks / bytes_per_s)


def tree_all_reduce_s(ranks: int, nbytes: float, alpha_s: float, bytes_per_s: float) -> float:
    """Up and down a binary tree, the whole buffer at each of 2 log2(n) steps: best for small ones."""
    return 2 * math.ceil(math.log2(ranks)) * (alpha_s + nbytes / bytes_per_s)


@dataclass(frozen=True)
class RanksOfNodes:
    """Ranks that exchange with one another: `inside` of them in each of `nodes` nodes."""

    inside: int
    nodes: int
    inside_alpha_s: float
    inside_bytes_per_s: float
    across_alpha_s: float
    across_bytes_per_s: float
    hides: bool = True
    """Whether an exchange can run beside computing; between CPU ranks it is computing itself."""

    @property
    def ranks(self) -> int:
        return self.inside * self.nodes

    def all_gather_s(self, nbytes: float) -> float:
        """Each node gathers over its members' adapters at once, then inside: also the time of a scatter-sum."""
        across = ring_all_gather_s(self.nodes, nbytes / self.inside, self.across_alpha_s, self.across_bytes_per_s)
        return across + ring_all_gather_s(self.inside, nbytes, self.inside_alpha_s, self.inside_bytes_per_s)

    def all_reduce_s(self, nbytes: float) -> float:
        """Scatter-sum and gather-all, or a tree where latency rules."""
        if self.ranks == 1:
            return 0.0
        tree = 0.0
        if self.inside > 1:
            tree += tree_all_reduce_s(self.inside, nbytes, self.inside_alpha_s, self.inside_bytes_per_s)
        if self.nodes > 1:
            tree += tree_all_reduce_s(self.nodes, nbytes, self.across_alpha_s, self.across_bytes_per_s)
        return min(2 * self.all_gather_s(nbytes), tree)

    def sent_bytes(self, nbytes: float, collective: str) -> float:
        """What one rank sends for a buffer of so many bytes; the two levels together send what one ring would."""
        passes = 2 if collective == "all_reduce" else 1
        return passes * nbytes * (self.ranks - 1) / self.ranks


def group(cluster: Cluster, size: int, stride: int) -> RanksOfNodes:
    """The group of an axis: `size` ranks, `stride` apart, ranks laid on nodes in order."""
    node = cluster.node
    fit = max(1, min(size, node.count // stride))
    inside = max(d for d in range(1, fit + 1) if size % d == 0)
    return RanksOfNodes(
        inside=inside,
        nodes=size // inside,
        inside_alpha_s=node.intra.latency_s,
        inside_bytes_per_s=node.intra.bytes_per_s * LINK_FRACTION,
        across_alpha_s=node.inter.latency_s,
        across_bytes_per_s=node.inter_bytes_per_s_per_device * LINK_FRACTION,
        hides=node.device.kind == "gpu",
    )


def neighbour_s(cluster: Cluster, stride: int, ranks: int, nbytes: float) -> float:
    """One message to the next rank of an axis: within the node when the whole axis lies in one, else across."""
    node = cluster.node
    if stride * ranks <= node.count:
        return node.intra.latency_s + nbytes / (node.intra.bytes_per_s * LINK_FRACTION)
    return node.inter.latency_s + nbytes / (node.inter_bytes_per_s_per_device * LINK_FRACTION)
