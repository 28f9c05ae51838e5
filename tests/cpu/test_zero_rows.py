"""Where ZeRO puts rows in its buffers: as rank after rank wants them, and by as few copies as there are parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilemesh.core.shard import Shard
from tilemesh.parallel.zero import RowsOfRanks


class Copies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += function is torch.ops.aten.copy_.default
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(("rows", "copies"), [((128, 64), 2), ((100, 33), 2 * 64)])
def test_a_parameter_is_one_copy_where_ranks_have_as_many_rows(rows: tuple[int, int], copies: int) -> None:
    """64 replicas of a layer took 64 launches for each of its matrices, which the GPU waited for."""
    shards = [Shard(f"{number}", (count, 3), (("dp", 64),), 5) for number, count in enumerate(rows)]
    whole = [torch.randn(count, 3) for count in rows]
    places = RowsOfRanks(shards, 64)
    flat, again = torch.full((places.numel + 7,), torch.nan), [torch.full_like(each, torch.nan) for each in whole]
    with Copies() as filled:
        for number, values in enumerate(whole):
            places.fill(flat, number, values)
    with Copies() as emptied:
        places.empty_into(flat, again)
    of_ranks = zip(*(torch.tensor_split(each, 64) for each in whole), strict=True)
    by_rank = [part.reshape(-1) for parts in of_ranks for part in parts]
    assert torch.equal(flat[: places.numel], torch.cat(by_rank))
    assert all(map(torch.equal, whole, again))
    assert filled.count == emptied.count == copies
