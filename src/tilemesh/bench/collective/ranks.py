"""`tilemesh bench collective`, inside the ranks.

All ranks measure together, and each returns rows (or the fit), one JSON object each; those of rank 0 count.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tilemesh.bench.collective.cells import Cell, array_words, cells_of
from tilemesh.bench.collective.fit import arrays, measure_fit, timer_of
from tilemesh.bench.collective.peers import peer_call
from tilemesh.bench.collective.run import CollectiveJob
from tilemesh.bench.harness import Estimate, exactly, make_row
from tilemesh.comm.connection import connect
from tilemesh.comm.runtime.choose import Request, candidates
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.schedules.book import is_direct
from tilemesh.comm.schedules.cost import traffic
from tilemesh.core.calibration import Calibration, find
from tilemesh.core.errors import RunError, UsageError
from tilemesh.measure.machine import last_cache_bytes, stamp, this_machine
from tilemesh.measure.ranks import ranks_case
from tilemesh.measure.row import CaseValue, Row
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import Comparison, compare

LARGEST_NAIVE = 1 << 20  # beyond, the slowest algorithms take minutes and tell nothing


def measure(fields: dict[str, Any]) -> list[str]:
    job = CollectiveJob(**fields)
    comm = connect(timeout_s=120.0)
    sys.setswitchinterval(1e-3)

    def say(words: str) -> None:
        if comm.rank == 0:
            print(f"  {comm.size} ranks: {words}", file=sys.stderr, flush=True)

    if job.fit:
        fit = measure_fit(comm, seconds=job.seconds, most_bytes=max(job.sizes), say=say)
        lines = [json.dumps(fit.to_dict())]
    else:
        bench = Bench(comm, job)
        lines = []
        # The first moments of a job belong to what still starts: one cell for nothing.
        bench.cell(Cell(job.collectives[0], comm.size, min(job.sizes), job.buffers[0]))
        # Ordinary arrays first: once there are arrays of `empty`, large calls look whose is where.
        for buffers in job.buffers:
            for collective in job.collectives:
                for cell in cells_of(collective, comm.size, job.sizes, buffers):
                    say(f"{collective} {cell.payload} bytes, {array_words(buffers)}")
                    lines += [row.to_json() for row in bench.cell(cell)]
        if job.overlap:
            lines += [row.to_json() for row in bench.overlaps()]
    return lines


class Bench:
    """Measures cells. Every rank builds the same rows; rank 0's are kept."""

    def __init__(self, comm: Communicator, job: CollectiveJob) -> None:
        self.comm = comm
        self.job = job
        self.timer = timer_of(comm)
        self.stamp = stamp() | {"command": job.command}
        self.calibration = _calibration()
        self.cache_bytes = last_cache_bytes()

    def cell(self, cell: Cell) -> list[Row]:
        """One row an algorithm, with the library's own as its peer."""
        comm = self.comm
        request = Request(cell.collective, cell.payload, "float32", "sum")
        # Arrays of `empty` may go another way than the ordinary ones of the same size.
        picked = comm.choice(cell.collective, cell.payload).taken(in_arena=cell.buffers == "empty")
        x, out = arrays(comm, cell)
        method = getattr(comm, cell.collective)
        calls: dict[str, Callable[[int], object]] = {"auto": lambda _: method(x, out=out)}
        known = candidates(request, comm.transport)
        for name, refusal in known.items():
            # The library's own is the peer, called without us; as called by us it is what auto may pick.
            wanted = name != "native" and (not self.job.algorithms or name in self.job.algorithms)
            hopeless = name in ("naive", "ring_segmented") and cell.payload > LARGEST_NAIVE
            cannot = is_direct(name) and cell.buffers != "empty"
            if refusal is None and wanted and not hopeless and not cannot:
                calls[name] = lambda _, name=name: method(x, out=out, algorithm=name)  # type: ignore[misc]
        if (not self.job.algorithms or "native" in self.job.algorithms) and known["native"] is None:
            calls["native_by_us"] = lambda _: method(x, out=out, algorithm="native")
        missing = {}
        x0, out0 = arrays(comm, Cell(cell.collective, cell.ranks, cell.nbytes))  # the library has no other memory
        try:
            native = peer_call(comm, cell.collective, x0, out0)
            calls["native"] = lambda _: native()
        except UsageError as error:
            missing["native"] = str(error)
        # Predicted before anything is read.
        called = {"auto": picked, "native_by_us": "native"}
        before = {name: self._predicted(cell, called.get(name, name)) for name in calls if name != "native"}
        result = self._compare(calls, self.job.repeats, self.job.seconds * len(calls), warmup=2)
        self._verify(cell, calls, x, out)
        rows = []
        for name in calls:
            if name != "native":
                extra = self._where(lambda: method(x, out=out), result[name].median) if name == "auto" else {}
                if name == "auto":
                    extra = {"picked": picked, **extra}
                rows.append(self._row(cell, name, before[name], result, missing, extra))
        if "native" in result:
            rows.append(self._row(cell, "native", None, result, missing, {}))
        return rows

    def _compare(
        self, calls: dict[str, Callable[[int], object]], repeats: int, seconds: float, warmup: int = 3
    ) -> Comparison:
        return compare(calls, timer=self.timer, repeats=repeats, warmup=warmup, seconds=seconds, on_error="raise")

    def _predicted(self, cell: Cell, name: str) -> float | None:
        """Of a call of ours; what one of the library's costs without us is measured, never predicted."""
        fit = self.comm.fit
        return None if fit is None else fit.seconds(cell.collective, name, cell.payload)

    def _row(
        self,
        cell: Cell,
        name: str,
        predicted: float | None,
        result: Any,
        missing: dict[str, str],
        extra: dict[str, CaseValue],
    ) -> Row:
        measured: Sample = result[name]
        is_native = name == "native"
        bandwidth = cell.payload / measured.median
        case: dict[str, CaseValue] = {
            "algorithm": name,
            "bytes": cell.payload,
            "buffers": cell.buffers,
            "transport": self.comm.backend,
            **ranks_case(cell.ranks, self.comm.cores),
            "algorithm_bytes_per_s": round(bandwidth),
            "bus_bytes_per_s": round(bandwidth * cell.bus_factor),
            "sent_bytes": self._sent(cell, str(extra.get("picked", name))),
            **extra,
        }
        never = "the library's own collective is measured, never predicted"
        return make_row(
            cell.collective, case, measured, missing=missing, marks=self.stamp,
            predicted=Estimate(predicted, never if is_native else "not fitted: run with --fit first"),
            limit=Estimate(*cell.limit_s(self.calibration, self.cache_bytes)),
            peers={"native": result["native"]} if not is_native and "native" in result else {},
            no_peers="this is the library's own" if is_native else "no native collective",
        )  # fmt: skip

    def _sent(self, cell: Cell, name: str) -> int | None:
        """The most that a rank sends in one call of ours; the library's own does not say."""
        if name.startswith("native"):
            return None
        size = self.comm.node_size
        each = [
            traffic(cell.collective, name, cell.ranks, cell.payload, rank=rank, node_size=size).nbytes
            for rank in range(cell.ranks)
        ]
        return round(max(each))

    def _where(self, call: Callable[[], object], whole_s: float) -> dict[str, CaseValue]:
        """Shares of a call's time by part, the mean over ranks; what no part accounts for is set-up."""
        for _ in range(3):  # the last counts: the first makes its programs anew
            self.comm.barrier()
            spent = self.comm.breakdown(call)
        total = self.comm.all_reduce(np.array(list(spent.values())), "avg", algorithm="ring")
        shares = {part: float(seconds) / whole_s for part, seconds in zip(spent, total, strict=True)}
        known = sum(shares.values())
        shares = {"set-up": max(0.0, 1 - known), **shares}
        return {f"in_{part}": round(share / max(1.0, known), 3) for part, share in shares.items()}

    def _verify(self, cell: Cell, calls: dict[str, Callable[[int], object]], x: Any, out: Any) -> None:
        """A bench of wrong answers would be no bench. `out` is spoilt first: it must not keep another's answer."""
        n, me = cell.ranks, self.comm.rank
        places = np.resize(np.arange(5, dtype=np.float32), x.size)
        if cell.collective in ("all_reduce", "reduce_scatter"):
            start = me * cell.elements_out if cell.collective == "reduce_scatter" else 0
            wanted = n * places[start : start + cell.elements_out] + n * (n + 1) // 2
        elif cell.collective == "broadcast":
            wanted = places + 1
        else:
            block = cell.elements // n
            start = me * block if cell.collective == "all_to_all" else 0
            wanted = np.concatenate([places[start : start + block] + (rank + 1) for rank in range(n)])
        np.add(places, me + 1, out=x)
        for name, call in calls.items():
            if name == "native":
                continue
            out[:] = -1
            call(0)
            if not np.array_equal(out, wanted):
                raise RunError(f"{name} gave a wrong {cell.collective} of {cell.payload} bytes on rank {me}")

    def overlaps(self) -> list[Row]:
        """The share of communication that hides behind compute: started, computed over, waited for."""
        rows = []
        for nbytes in (256 << 10, 16 << 20):
            if nbytes > max(self.job.sizes):
                continue
            x, out = arrays(self.comm, Cell("all_reduce", self.comm.size, nbytes))
            for name in ("auto", "native"):
                if name == "native" and self.comm.transport.lacks("all_reduce", "float32", "sum", False):
                    continue
                rows.append(self._overlap(name, nbytes, x, out))
        return rows

    def _overlap(self, name: str, nbytes: int, x: Any, out: Any) -> Row:
        comm = self.comm
        a = np.ones((128, 128), np.float32)

        def compute(times: int, test: Callable[[], object] | None = None) -> None:
            for _ in range(times):
                np.matmul(a, a)
                if test is not None:
                    test()

        began = time.perf_counter()
        compute(50)
        one_s = comm.max_over_ranks([(time.perf_counter() - began) / 50])[0]
        alone = self._compare({"call": lambda _: comm.all_reduce(x, out=out, algorithm=name)}, 7, 1.0)["call"].median
        times = max(1, round(alone / one_s))

        def both(_: int) -> None:
            handle = comm.all_reduce(x, out=out, algorithm=name, wait=False)
            compute(times, handle.test)
            handle.wait()

        result = self._compare({"compute": lambda _: compute(times), "both": both}, 7, 2.0)
        computing, together = result["compute"].median, result["both"].median
        has_room = comm.size < comm.cores
        hidden = max(0.0, (alone + computing - together) / min(alone, computing))
        case: dict[str, CaseValue] = {
            "collective": "all_reduce", "algorithm": name, "bytes": nbytes, "transport": comm.backend,
            **ranks_case(comm.size, comm.cores), "communication_s": alone, "compute_s": computing, "both_s": together,
        }  # fmt: skip
        no_core = "no core is free: communication is CPU work, as compute is"
        return make_row(
            "overlap", case, exactly(hidden), unit="fraction", marks=self.stamp,
            predicted=Estimate(None, "no model of overlap"), limit=Estimate(1.0 if has_room else None, no_core),
            no_peers="native is a row of its own",
        )  # fmt: skip


def _calibration() -> Calibration | None:
    try:
        return find(this_machine().id)
    except RunError:
        return None
