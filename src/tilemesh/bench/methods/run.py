"""`tilemesh bench methods`: rows of stragglers, servers, compressed and local updates, and MapReduce.

Every prediction is computed before its measurement: throughput by the simulator (`methods/simulate.py`) with the
durations that ranks are asked to take and messages as one worker alone measured them, bytes by formulas, K-means by
the time of one rank. The rank's side is `ranks.py`, torch's hooks beside ours `hooks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilemesh.bench.harness import Estimate, exactly, make_row
from tilemesh.bench.methods.bounds import CONVERGES_BELOW, excess, excess_limit
from tilemesh.bench.methods.ranks import durations_of, replay_difference
from tilemesh.bench.methods.traffic import hotspots, traffic_rows
from tilemesh.comm.schedules.book import build
from tilemesh.comm.schedules.simulate import Memory, simulate
from tilemesh.comm.schedules.topology import Flat, Wire
from tilemesh.core.cores import available_cores
from tilemesh.launch.calls import Ranks
from tilemesh.measure.method_curve import BoundCurve, MethodCurve, ServerLoad
from tilemesh.measure.ranks import ranks_case
from tilemesh.measure.row import CaseValue, Row
from tilemesh.measure.sample import Sample
from tilemesh.methods.programs import k_means_speedup
from tilemesh.methods.simulate import ServerTimes, SimulatedRun, simulate_server, simulate_synchronous

WORKERS, SERVERS, CLOCKS, COMPUTE_S, PERIOD = 4, 1, 60, 0.02, 8
_LEAST_CLOCKS = 8
METHODS: dict[str, dict[str, Any]] = {
    "synchronous": {"method": "together", "period": 1},
    "BSP": {"method": "server", "bound": 0},
    "SSP(1)": {"method": "server", "bound": 1},
    "SSP(3)": {"method": "server", "bound": 3},
    "ASP": {"method": "server", "bound": None},
    f"local SGD ({PERIOD})": {"method": "together", "period": PERIOD},
}
_BOUNDS, _WIDE_BOUNDS, _BOUND_CLOCKS = [0, 1, 3, 10], [0, 3, 10, 30], 100
_POINTS, _DIMS, _CLUSTERS, _ITERATIONS, _TURNS = 400_000, 8, 10, 5, 5
_STUDY = {"points": 100_000_000, "clusters": 10, "dims": _DIMS, "ranks": 100, "iterations": 20}


@dataclass
class MethodsFound:
    """What the bench came to."""

    rows: list[Row] = field(default_factory=list)
    curves: list[MethodCurve] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    loads: list[ServerLoad] = field(default_factory=list)
    bounds: list[BoundCurve] = field(default_factory=list)


def bench_methods(
    slow_rank: int, factor: float, clocks: int = CLOCKS, blocks: int = 2, say: Callable[[str], None] = lambda text: None
) -> MethodsFound:
    """All parts, one after the other. `slow_rank`: of the second straggler study; the first draws one at every step."""
    findings = MethodsFound()
    say(f"server traffic and stragglers: {WORKERS} workers, {SERVERS} server")
    with Ranks(WORKERS + SERVERS, sink=lambda rank, stream, line: None) as ranks:
        rows, large, small = traffic_rows(ranks)
        loads, notes = hotspots(large, COMPUTE_S)
        findings.rows, findings.loads, findings.notes = rows, loads, notes
        _stragglers(ranks, findings, slow_rank, factor, clocks, blocks, small.times(SERVERS))
        _bounds(ranks, findings, factor)
    say("K-means on MapReduce")
    _clusters(findings)
    say("compressed and local updates beside torch's hooks")
    _hooks(findings)
    return findings


def parse_slow(text: str) -> tuple[int, float]:
    """`rank=3,factor=4`: which worker is always slow, and how much slower a slow one is."""
    from tilemesh.core.errors import UsageError

    try:
        settings = dict(part.split("=") for part in text.split(","))
        rank, factor = int(settings.pop("rank", WORKERS - 1)), float(settings.pop("factor", 4.0))
    except ValueError:
        raise UsageError(f"--slow {text}: expected rank=NUMBER,factor=NUMBER, such as rank=3,factor=4") from None
    if settings or not 0 <= rank < WORKERS or not 1 <= factor <= 100:
        raise UsageError(f"--slow {text}: expected rank from 0 to {WORKERS - 1} and factor from 1 to 100")
    return rank, factor


def _bounds(ranks: Ranks, findings: MethodsFound, factor: float) -> None:
    """Ho et al.'s bound beside the measured difference, and a staleness bound that is too large to converge."""
    call = "tilemesh.bench.methods.bounds:bounded_runs"
    taken = ranks.call(call, _BOUNDS, True, WORKERS, _BOUND_CLOCKS, factor, timeout_s=120)
    for number, bound in enumerate(_BOUNDS):
        losses = [rank[number]["losses"] for rank in taken if rank[number]]
        findings.rows.append(
            make_row(
                "excess loss",
                {"bound": bound, "workers": WORKERS, "pushes": WORKERS * _BOUND_CLOCKS, **ranks_case(len(taken))},
                exactly(excess(losses)), unit="nats", limit=Estimate(excess_limit(bound, WORKERS, _BOUND_CLOCKS)),
                predicted=Estimate(None, "the theorem gives a bound, which stands as the limit"), no_peers="none",
            )
        )  # fmt: skip
    taken = ranks.call(call, _WIDE_BOUNDS, False, WORKERS, _BOUND_CLOCKS, factor, timeout_s=120)
    for number, bound in enumerate(_WIDE_BOUNDS):
        losses = [rank[number]["losses"] for rank in taken if rank[number]]
        findings.bounds.append(BoundCurve(bound, [sum(step) / len(step) for step in zip(*losses, strict=True)]))
    ended = ", ".join(f"s = {curve.bound}: {curve.losses[-1] / curve.losses[0]:.1e}" for curve in findings.bounds)
    findings.notes.append(
        f"A quadratic whose workers keep what they read for s steps, loss after {_BOUND_CLOCKS} steps beside the first "
        f"one: {ended}. At this rate bounds below {CONVERGES_BELOW:.1f} converge by arithmetic"
    )


def _stragglers(
    ranks: Ranks, findings: MethodsFound, slow: int, factor: float, steps: int, blocks: int, times: ServerTimes
) -> None:
    # A rank that is drawn anew uses a bound up now and then; one that is always slow does so at once: a third of the
    # steps shows it.
    for words, kind, clocks in (
        (f"a random rank, {factor:g}x", {"rank": None, "factor": factor}, steps),
        (f"rank {slow}, {factor:g}x", {"rank": slow, "factor": factor}, max(_LEAST_CLOCKS, steps // 3)),
    ):
        durations = durations_of(kind, WORKERS, COMPUTE_S)
        predicted = {name: _simulated(method, clocks, durations, times) for name, method in METHODS.items()}
        ideal = {name: _simulated(method, clocks, durations, ServerTimes()) for name, method in METHODS.items()}
        cases = [
            {"bound": None, "period": 1, **method, "slow": kind} for _ in range(blocks) for method in METHODS.values()
        ]
        taken = ranks.call(
            "tilemesh.bench.methods.ranks:straggler_runs", cases, WORKERS, SERVERS, clocks, COMPUTE_S, timeout_s=300
        )
        rates: dict[str, list[float]] = {name: [] for name in METHODS}
        for number, _ in enumerate(cases):
            name = list(METHODS)[number % len(METHODS)]
            seen = [rank[number] for rank in taken]
            rates[name].append(throughput(seen))
            if number >= len(cases) - len(METHODS):
                findings.curves.append(_curve(name, words, seen))
        synchronous = Sample.of(rates["synchronous"])
        case: dict[str, CaseValue] = {
            "slow": words, "steps": clocks, "workers": WORKERS, "servers": SERVERS, **ranks_case(len(taken)),
        }  # fmt: skip
        for name in METHODS:
            findings.rows.append(
                make_row(
                    "straggler", {"method": name, **case}, Sample.of(rates[name]), unit="steps/s",
                    predicted=Estimate(predicted[name].throughput), limit=Estimate(ideal[name].throughput),
                    peers={} if name == "synchronous" else {"synchronous": synchronous},
                    no_peers="it is what the others are held against",
                )
            )  # fmt: skip
    many = durations_of({"rank": 17, "factor": factor}, 100, 1.0)
    apart = simulate_server(100, 40, many, math.inf).throughput / simulate_synchronous(100, 40, many).throughput
    findings.notes.append(
        f"Simulated for 100 workers of which one is {factor:g} times slower: asynchronous {apart:.2f} times the "
        "synchronous throughput"
    )


def _simulated(
    method: dict[str, Any], clocks: int, durations: Callable[[int, int], float], times: ServerTimes
) -> SimulatedRun:
    if method["method"] == "server":
        bound = math.inf if method["bound"] is None else method["bound"]
        return simulate_server(WORKERS, clocks, durations, bound, times)
    return simulate_synchronous(WORKERS, clocks, durations, times.push_s, method["period"])


def throughput(seen: Sequence[dict[str, Any]]) -> float:
    """Steps per second of all workers until the first of them is through, as the simulator counts them."""
    workers = [rank for rank in seen if "steps" in rank]
    began, ended = min(rank["began"] for rank in workers), min(rank["steps"][-1] for rank in workers)
    steps = sum(step <= ended for rank in workers for step in rank["steps"])
    return float(steps / (ended - began))


def _curve(name: str, words: str, seen: Sequence[dict[str, Any]]) -> MethodCurve:
    workers, servers = [rank for rank in seen if "steps" in rank], [rank for rank in seen if "events" in rank]
    began = min(rank["began"] for rank in workers)
    ended = min(rank["steps"][-1] for rank in workers)
    busy = [sum(min(end, ended) - start for start, end in rank["spans"] if start < ended) for rank in workers]
    losses = [(at - began, loss) for at, loss in workers[0]["losses"]]
    server_figures: dict[str, Any] = {}
    if servers:
        server_figures = {
            "staleness": [tuple(pair) for pair in servers[0]["figures"]["staleness"]],
            "lead": max(rank["lead"] for rank in servers),
            "replay_difference": replay_difference(servers, WORKERS),
        }
    return MethodCurve(name, words, losses, [part / (ended - began) for part in busy], **server_figures)


def _clusters(findings: MethodsFound) -> None:
    """K-means on 1 rank and on as many as there are cores; then the study of 100 million points on 100 ranks."""
    cores = available_cores()
    case: dict[str, CaseValue] = {"points": _POINTS, "clusters": _CLUSTERS, "dims": _DIMS, "iterations": _ITERATIONS}
    with Ranks(cores, sink=lambda rank, stream, line: None, transport="auto") as ranks:
        call = "tilemesh.bench.methods.ranks:clustering"
        taken = ranks.call(call, _POINTS, _DIMS, _CLUSTERS, _ITERATIONS, _TURNS, timeout_s=120)[0]
    single, together, summed = map(Sample.of, taken)
    rate = _ITERATIONS * _POINTS * _CLUSTERS * _DIMS / single.median
    if cores > 1:
        predicted = k_means_speedup(
            _POINTS, _CLUSTERS, _DIMS, cores, _ITERATIONS, rate, summed.median / _ITERATIONS
        )[1]  # fmt: skip
        findings.rows.append(
            make_row(
                "K-means", {**case, **ranks_case(cores)}, together, predicted=Estimate(predicted),
                limit=Estimate(single.median / cores), peers={"one rank": single},
            )
        )  # fmt: skip
    reduce_s = _simulated_sum_s(_STUDY["ranks"], summed.median / _ITERATIONS)
    alone_s, together_s, ratio = k_means_speedup(**_STUDY, rate=rate, reduce_s=reduce_s)
    findings.notes.append(
        f"K-means of {_STUDY['points']:,} points of {_DIMS} numbers, k = {_STUDY['clusters']}, "
        f"{_STUDY['iterations']} iterations, from this machine's rate of one rank: {alone_s:.4g} s on one processor, "
        f"{together_s:.4g} s on {_STUDY['ranks']} ({1e6 * reduce_s:.3g} µs of each iteration for the simulated sum), "
        f"T_seq / T_par = {ratio:.1f}"
    )


def _simulated_sum_s(ranks: int, pair_s: float) -> float:
    """The sum of an iteration over so many ranks: recursive doubling on wires on which two ranks take `pair_s`."""
    nbytes = 8 * (_CLUSTERS * _DIMS + _CLUSTERS + 1)
    wires = Flat(ranks, Wire(pair_s, math.inf))
    return simulate(build("all_reduce", "recursive_doubling", ranks), nbytes, wires, Memory(math.inf, math.inf)).seconds


def _hooks(findings: MethodsFound) -> None:
    with Ranks(2, transport="torch", sink=lambda rank, stream, line: None) as ranks:
        steps = ranks.call("tilemesh.bench.methods.hooks:hook_steps", repeats=6, seconds=8.0, timeout_s=180)[0]
    samples = {name: Sample(**sample) for name, sample in steps["samples"].items()}
    case: dict[str, CaseValue] = {"parameters": steps["parameters"], "transport": "torch", **ranks_case(2)}
    peers = {"powersgd": "torch PowerSGD", "local": "torch PostLocalSGD", "uncompressed": "torch DDP"}
    for name in ("uncompressed", "powersgd", "local", "top-k", "random-k", "int8", "one-bit"):
        peer = peers.get(name)
        findings.rows.append(
            make_row(
                "step", {"method": name, **case}, samples[name],
                predicted=Estimate(None, "computing of this size was not calibrated"),
                limit=Estimate(None, "none is known on shared cores"),
                peers={} if peer is None else {peer: samples[peer]}, no_peers="torch has no such hook",
            )
        )  # fmt: skip
        if name in steps["bytes"]:
            counted, computed = steps["bytes"][name]
            findings.rows.append(
                make_row(
                    "bytes sent per step", {"method": name, "algorithm": "ring", **case}, exactly(counted), unit="B",
                    predicted=Estimate(computed), peers={"uncompressed": exactly(steps["whole_bytes"])},
                    limit=Estimate(None, "what a gradient can be compressed to is not known"),
                )
            )  # fmt: skip
