"""Whole tensors: put together from the parts that ranks hold, handed around, or drawn. `Laid` gathers and loads so."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.shard import Shard
from tilemesh.model.fresh import draw
from tilemesh.parallel.agree import tell
from tilemesh.parallel.shard import join

_PACK_BYTES = 64 << 20  # of one exchange: many small parameters, or one large


def gather_parts(
    parts: Sequence[tuple[Shard, Tensor]], group: Communicator, members: Sequence[int]
) -> dict[str, Tensor]:
    """Whole tensors by name, in CPU memory, on the first of a group whose ranks in the mesh are these (a collective
    call). What all of them have whole, the first has anyway."""
    wholes = {mine.name: local.cpu().clone() for mine, local in parts if _is_everywhere(mine)}
    waiting: list[tuple[Shard, Tensor]] = []
    for mine, local in parts:
        if _is_everywhere(mine):
            continue
        # By whole sizes: parts differ between ranks, which are to exchange the same together.
        packed = sum(math.prod(part.whole) * tensor.element_size() for part, tensor in waiting)
        if waiting and (waiting[0][1].dtype != local.dtype or packed >= _PACK_BYTES):
            wholes |= _gather_packed(waiting, group, members)
            waiting = []
        waiting.append((mine, local))
    return wholes | _gather_packed(waiting, group, members) if waiting else wholes


def reshard(
    parts: Iterable[tuple[Shard, Tensor]], wanted: Mapping[str, Shard], group: Communicator, members: Sequence[int]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors as another layout cuts them, one after the other, from the boxes of a group that has them together, whose
    ranks in the mesh are these (a collective call). What is not cut moves nowhere."""
    waiting: list[tuple[Shard, Tensor]] = []
    for mine, local in parts:
        if _is_everywhere(mine):
            yield mine.name, local
            continue
        packed = sum(math.prod(part.whole) * tensor.element_size() for part, tensor in waiting)
        if waiting and (waiting[0][1].dtype != local.dtype or packed >= _PACK_BYTES):
            yield from _regrouped(waiting, wanted, group, members)
            waiting = []
        waiting.append((mine, local))
    if waiting:
        yield from _regrouped(waiting, wanted, group, members)


def _regrouped(
    parts: Sequence[tuple[Shard, Tensor]], wanted: Mapping[str, Shard], group: Communicator, members: Sequence[int]
) -> Iterator[tuple[str, Tensor]]:
    """Several parameters in one exchange."""
    everyone = [[mine.on(rank) for mine, _ in parts] for rank in members]
    counts = [sum(math.prod(mine.shape) for mine in shards) for shards in everyone]
    flat = group.all_gather(torch.cat([local.flatten() for _, local in parts]), counts=counts)
    pieces = [shard_views(packed, shards) for shards, packed in zip(everyone, flat.split(counts), strict=True)]
    for number, (mine, local) in enumerate(parts):
        into = local.new_empty(wanted[mine.name].shape)
        for at, whole in wanted[mine.name].boxes:
            for shards, tensors in zip(everyone, pieces, strict=True):
                for own, theirs in shards[number].boxes:
                    if common := whole.overlap(theirs):
                        part = tensors[number][own.slices][common.within(theirs)]
                        into[at.slices][common.within(whole)] = part
        yield mine.name, into


def _is_everywhere(mine: Shard) -> bool:
    return not mine.cuts and mine.every == 1


def _gather_packed(
    parts: Sequence[tuple[Shard, Tensor]], group: Communicator, members: Sequence[int]
) -> dict[str, Tensor]:
    """Several parameters in one exchange."""
    everyone = [[mine.on(rank) for mine, _ in parts] for rank in members]
    counts = [sum(math.prod(mine.shape) for mine in shards) for shards in everyone]
    flat = group.gather(torch.cat([local.flatten() for _, local in parts]), root=0, counts=counts)
    if flat is None:
        return {}
    pieces = [shard_views(packed, shards) for shards, packed in zip(everyone, flat.cpu().split(counts), strict=True)]
    columns = zip(zip(*everyone, strict=True), zip(*pieces, strict=True), strict=True)
    return {shards[0].name: join(shards, locals_) for shards, locals_ in columns}


def shard_views(flat: Tensor, shards: Sequence[Shard]) -> list[Tensor]:
    """Views of numbers that lie one shard after the other."""
    pieces = flat.split_with_sizes([math.prod(mine.shape) for mine in shards])
    return [piece.view(mine.shape) for piece, mine in zip(pieces, shards, strict=True)]


def handed_around(comm: Communicator, tensors: Mapping[str, Tensor] | None, root: int) -> Iterator[tuple[str, Tensor]]:
    """The root's tensors by name, one after the other, in CPU memory on every rank (a collective call: all ranks take
    all of them). What other ranks give is not looked at."""
    own = tensors if comm.rank == root and tensors is not None else {}
    described = {name: [list(value.shape), str(value.dtype)] for name, value in own.items()}
    for name, (shape, dtype) in json.loads(tell(comm, json.dumps(described), root)).items():
        if comm.rank == root:
            tensor = own[name].cpu()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        yield name, comm.broadcast(tensor, root=root)


class FreshWeights(Mapping[str, Tensor]):
    """Whole parameters, drawn when asked for."""

    def __init__(self, shards: Mapping[str, Shard], seed: int, layers: int) -> None:
        self.shards, self.seed, self.layers = shards, seed, layers

    def __getitem__(self, name: str) -> Tensor:
        return draw(name, self.shards[name].whole, self.seed, self.layers)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shards)

    def __len__(self) -> int:
        return len(self.shards)
