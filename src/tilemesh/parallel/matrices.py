"""A function of whole matrices where every rank holds a part of each: what Muon makes orthogonal.

The one idea: the matrices are shared out. Each rank of the group gets the parts of some of them from the others (one
all_to_all), computes the function of these alone, and sends everyone its part of the result (another). So a rank
computes 1/n of the work, sends and receives each of its numbers about once in either direction, and holds a few whole
matrices at a time, whatever cuts them: tp by column or row, ZeRO by rows, or both. The result is that of one process,
bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.axes import Blocks, members
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.shard import Shard
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import put, take
from tilemesh.parallel.whole import shard_views
from tilemesh.parallel.zero import sharing_blocks

ROUND_NUMBERS = 16 << 20
"""Of whole matrices for each rank in one round, at least: few exchanges. More where one matrix alone is larger."""


class MatrixGroup:
    """The ranks of a mesh that hold parts of the same matrices. A collective call of the whole mesh."""

    def __init__(self, mesh: Mesh, plan: ParallelPlan, spread: Blocks = ()) -> None:
        """`spread`: the matrices are those of `Shard.spread`."""
        along_tp = plan.ranks_per_expert if spread else plan.tp
        cuts = (
            ("tp", along_tp),
            *(sharing_blocks(mesh.shape, plan.zero_group or plan.dp, spread) if plan.zero else ()),
        )
        blocks = tuple((name, count) for name, count in cuts if count > 1)
        self.comm: Communicator = mesh.among(blocks)
        self.ranks = members(mesh.comm.rank, blocks, mesh.shape)
        """In the mesh, in the order of `comm`."""
        self.of_experts = MatrixGroup(mesh, plan, plan.expert_spread) if spread != plan.expert_spread else None
        """The ranks that hold parts of this one's experts, where replicas share these out."""

    def rounds(self, shards: Iterable[Shard], least: int = ROUND_NUMBERS) -> Iterator[MatrixRound]:
        """Matrices in their order, as many together as give each rank `least` numbers, or one of the largest."""
        shards = list(shards)
        if self.of_experts is not None:
            yield from self._rounds([shard for shard in shards if shard.every == 1], least)
            yield from self.of_experts.rounds([shard for shard in shards if shard.every > 1], least)
        else:
            yield from self._rounds(shards, least)

    def _rounds(self, shards: Iterable[Shard], least: int) -> Iterator[MatrixRound]:
        waiting: list[Shard] = []
        for shard in shards:
            waiting.append(shard)
            sizes = [math.prod(other.whole) for other in waiting]
            if sum(sizes) >= len(self.ranks) * max(least, *sizes):
                yield MatrixRound(self, waiting)
                waiting = []
        if waiting:
            yield MatrixRound(self, waiting)


class MatrixRound:
    """Matrices that are exchanged together. `shards`: this rank's part of each."""

    def __init__(self, group: MatrixGroup, shards: Sequence[Shard]) -> None:
        self.comm, self.shards = group.comm, tuple(shards)
        self._parts = [[shard.on(rank) for shard in shards] for rank in group.ranks]
        self._computed = _shared_out([shard.whole for shard in shards], len(group.ranks))
        """The places in `shards` of the matrices that each rank computes."""
        # Of ranks that hold the same part (repeated KV heads) the first one sends it.
        self._sends = [
            [all(other[place].spans != part.spans for other in self._parts[:rank]) for place, part in enumerate(parts)]
            for rank, parts in enumerate(self._parts)
        ]

    def __call__(self, function: Callable[[Tensor], Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of `function` of each whole matrix, from its parts of them; shapes stay, and the dtype."""
        me, ranks = self.comm.rank, range(self.comm.size)
        sent = [[parts[place] for place in self._gathered(me, to)] for to in ranks]
        shards = [[self._parts[source][place] for place in self._gathered(source, me)] for source in ranks]
        matrices = {place: parts[place].new_empty(self.shards[place].whole) for place in self._computed[me]}
        for source, pieces in enumerate(self._exchange(sent, shards, parts[0])):
            for place, piece in zip(self._gathered(source, me), pieces, strict=True):
                put(self._parts[source][place], piece, matrices[place])
        for place in matrices:
            matrices[place] = function(matrices[place])
        sent = [[take(self._parts[to][place], matrix) for place, matrix in matrices.items()] for to in ranks]
        shards = [[self._parts[me][place] for place in self._computed[source]] for source in ranks]
        arrived = self._exchange(sent, shards, parts[0])
        results = {
            place: piece
            for places, pieces in zip(self._computed, arrived, strict=True)
            for place, piece in zip(places, pieces, strict=True)
        }
        return [results[place] for place in range(len(self.shards))]

    def _gathered(self, source: int, to: int) -> list[int]:
        """The matrices of which one rank sends its part to another, which computes them."""
        return [place for place in self._computed[to] if self._sends[source][place]]

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], shards: Sequence[Sequence[Shard]], like: Tensor
    ) -> list[list[Tensor]]:
        """Tensors to every rank; what came from every rank, as these shards say."""
        flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensors in sent for tensor in tensors)])
        send_counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        recv_counts = [sum(math.prod(shard.shape) for shard in source) for source in shards]
        arrived: Tensor = self.comm.all_to_all(flat, send_counts=send_counts, recv_counts=recv_counts)
        pieces = arrived.split_with_sizes(recv_counts)
        return [shard_views(piece, source) for piece, source in zip(pieces, shards, strict=True)]


def _shared_out(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[list[int]]:
    """The places of the matrices that each rank computes: the costliest first, each to who has least to do so far."""
    costs = [math.prod(shape) * min(shape) for shape in shapes]
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    for place in sorted(range(len(shapes)), key=lambda place: -costs[place]):
        min(chosen, key=lambda places: sum(costs[other] for other in places)).append(place)
    return chosen
