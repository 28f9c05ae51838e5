"""Calls at random, every result compared with numpy's: what one call leaves behind must not be seen by the next.

All ranks draw the calls from one generator; where its arrays lie (`comm.empty`, a slice of it, ordinary memory, every
other row, numpy or torch), whether they come again, and in which order it waits, each rank draws from its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tilemesh.comm.runtime.communicator import Communicator

COLLECTIVES = ("all_reduce", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "scatter")
DTYPES = ("float32", "float32", "float64", "float16", "int8", "uint32", "bool")
LENGTHS = (0, 1, 3, 17, 63, 1000, 4099, 50_000)
BLOCK_BYTES = 1 << 20


class RandomCalls:
    """One rank's part in them."""

    def __init__(self, comm: Communicator, seed: int) -> None:
        self.comm, self.seed = comm, seed
        self.common, self.own = np.random.default_rng(seed), np.random.default_rng([seed, comm.rank])
        self.blocks = [comm.empty(BLOCK_BYTES, np.uint8) for _ in range(3)]
        self.again: dict[tuple[Any, ...], Any] = {}
        self.open: list[tuple[Any, Any, Any, str, tuple[Any, ...]]] = []
        self.calls = [self.drawn() for _ in range(6)]

    def drawn(self) -> tuple[Any, ...]:
        collective, dtype = str(self.common.choice(COLLECTIVES)), str(self.common.choice(DTYPES))
        op = str(self.common.choice(["sum", "prod", "min", "max", "avg" if "float" in dtype else "sum"]))
        return collective, dtype, op, int(self.common.choice(LENGTHS)), int(self.common.integers(self.comm.size))

    def run(self, calls: int) -> None:
        for number in range(calls):
            if self.common.random() < 0.1:
                self.calls[int(self.common.integers(6))] = self.drawn()
                place = int(self.common.integers(3))
                self.again.clear()
                self.blocks[place] = None
                self.blocks[place] = self.comm.empty(BLOCK_BYTES, np.uint8)
            self.make(number, *self.calls[int(self.common.integers(6))], wait=self.common.random() < 0.6)
            while len(self.open) > 4 or (self.open and self.own.random() < 0.2):
                self.finish()
        while self.open:
            self.finish()

    def make(self, number: int, collective: str, dtype: str, op: str, length: int, root: int, *, wait: bool) -> None:
        comm = self.comm
        inputs = [self.values(number, rank, op, length, dtype) for rank in range(comm.size)]
        wanted = self.wanted(collective, op, inputs, root)
        x = self.array(length, dtype)
        out = self.array(len(wanted), dtype) if self.own.random() < 0.7 else None
        if collective == "all_reduce" and self.own.random() < 0.15:
            out = x
        elif out is not None and np.may_share_memory(x, out):
            out = None
        x[...] = inputs[comm.rank]
        given = torch.from_numpy if collective != "scatter" and self.own.random() < 0.1 else lambda array: array
        options: dict[str, Any] = {"out": None if out is None else given(out), "wait": wait}
        if collective in ("all_reduce", "reduce_scatter"):
            options["op"] = op
        elif collective in ("broadcast", "scatter"):
            options["root"] = root
        what = f"seed {self.seed}, call {number}: {collective} of {length} {dtype}, {op}, root {root}, {wait=}"
        result = getattr(comm, collective)(given(x), **options)
        if wait:
            self.compare(result, wanted, what)
        else:
            self.open.append((result, wanted, out, what, (x, out)))

    def finish(self) -> None:
        handle, wanted, _, what, _ = self.open.pop(int(self.own.integers(len(self.open))))
        self.compare(handle.wait(), wanted, what)

    @staticmethod
    def compare(result: Any, wanted: Any, what: str) -> None:
        got = np.asarray(result)
        assert got.dtype == wanted.dtype, what
        assert np.array_equal(got, wanted), f"{what}: {got[:8]} for {wanted[:8]}"

    @staticmethod
    def values(number: int, rank: int, op: str, length: int, dtype: str) -> Any:
        """Small whole numbers, so that every order of adding gives the same; of a product ones and few twos."""
        raw = (np.arange(length) * (2 * rank + 3) + 7 * number + rank) % 11
        return (raw % 6 if op != "prod" else 1 + (raw == rank % 11)).astype(dtype)

    def wanted(self, collective: str, op: str, inputs: list[Any], root: int) -> Any:
        n, me = self.comm.size, self.comm.rank
        if collective in ("all_reduce", "reduce_scatter"):
            function: Any = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(op, np.add)
            total = inputs[0]
            for other in inputs[1:]:
                total = function(total, other)
            if op == "avg":
                wide = total.astype(np.float32) if total.dtype == np.float16 else total
                total = (wide / wide.dtype.type(n)).astype(total.dtype)
            return total if collective == "all_reduce" else np.array_split(total, n)[me]
        if collective == "all_gather":
            return np.concatenate(inputs)
        if collective == "all_to_all":
            return np.concatenate([np.array_split(given, n)[me] for given in inputs])
        return inputs[root] if collective == "broadcast" else np.array_split(inputs[root], n)[me]

    def array(self, length: int, dtype: str) -> Any:
        """Memory of some kind that nothing under way uses; often the same as before."""
        where = str(self.own.choice(["block", "block", "ordinary", "strided"]))
        key = (where, length, dtype, int(self.own.integers(3)))
        array = self.again.get(key) if self.own.random() < 0.8 else None
        if array is None:
            nbytes = length * np.dtype(dtype).itemsize
            if where == "block" and nbytes <= BLOCK_BYTES:
                at = int(self.own.integers(0, (BLOCK_BYTES - nbytes) // 64 + 1)) * 64
                array = self.blocks[int(self.own.integers(3))][at : at + nbytes].view(dtype)
            else:
                array = np.empty(2 * length, dtype)[::2] if where == "strided" else np.empty(length, dtype)
        if any(used is not None and np.may_share_memory(used, array) for *_, arrays in self.open for used in arrays):
            return np.empty(length, dtype)
        self.again[key] = array
        return array


def calls_at_random(comm: Communicator) -> None:
    RandomCalls(comm, seed=1).run(150)
