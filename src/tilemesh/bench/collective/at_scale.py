"""Collectives on machines that are not there: simulated seconds over sizes, and where the quickest one changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from tilemesh.comm.schedules.book import algorithms, build
from tilemesh.comm.schedules.simulate import Memory, crossovers, simulate
from tilemesh.comm.schedules.topology import Flat, Ring, Topology, TwoLevel, Wire
from tilemesh.core.errors import UsageError
from tilemesh.core.units import format_bytes, format_rate, format_seconds
from tilemesh.measure.table import PIPE_WIDTH

TOPOLOGIES = ("flat", "ring", "two-level")
AT_SCALE = ("ring", "tree", "hierarchical")  # what is simulated unless named

# NVLink inside nodes of eight, InfiniBand between them: latency, and bytes per second in each direction.
NVLINK, INFINIBAND = Wire(1e-6, 450e9), Wire(3e-6, 50e9)
NODE = 8
_SIZE = 12  # columns of the sizes, at the left
GPU = Memory(reduce_bytes_per_s=1e12, copy_bytes_per_s=1.5e12, sync_s=2e-6)


def simulated(
    collective: str, topology: str, ranks: int, sizes: Sequence[int], node_size: int, names: Sequence[str] = ()
) -> list[str]:
    """Lines of a table: seconds by size of each algorithm that serves the collective, and who overtakes whom."""
    known = [name for name in names or AT_SCALE if name in algorithms(collective)]
    if not known:
        wanted, served = ",".join(names or AT_SCALE), ", ".join(algorithms(collective))
        raise UsageError(f"none of {wanted} serves {collective}: expected some of {served}")
    machine = topology_of(topology, ranks, node_size)
    schedules = {name: build(collective, name, ranks, node_size=node_size) for name in known}
    times = {
        name: [(size, simulate(schedule, size, machine, GPU).seconds) for size in sizes]
        for name, schedule in schedules.items()
    }
    quickest = [min(known, key=lambda name: times[name][at][1]) for at in range(len(sizes))]
    columns = {name: [format_seconds(seconds) for _, seconds in points] for name, points in times.items()}
    lines = [f"{collective}, {ranks} ranks, {topology}: seconds as simulated"]
    lines += _tables([format_bytes(size) for size in sizes], columns, quickest)
    for pair in combinations(known, 2):
        for last, first, first_name, other in crossovers({name: times[name] for name in pair}):
            lines.append(
                f"  {first_name} is overtaken by {other} between {format_bytes(last)} and {format_bytes(first)}"
            )
    return lines


def _tables(sizes: Sequence[str], columns: Mapping[str, Sequence[str]], quickest: Sequence[str]) -> list[str]:
    """A line per size and a column per algorithm; columns that do not fit beside the others go into a table below."""
    last = 3 + max(len(name) for name in ("quickest", *quickest))
    tables: list[list[str]] = [[]]
    room = PIPE_WIDTH - _SIZE - last
    for name in columns:
        if tables[-1] and room < _width(name):
            tables.append([])
            room = PIPE_WIDTH - _SIZE - last
        tables[-1].append(name)
        room -= _width(name)
    lines = []
    for names in tables:
        lines.append("size".rjust(_SIZE) + "".join(name.rjust(_width(name)) for name in names) + "   quickest")
        for at, size in enumerate(sizes):
            cells = "".join(columns[name][at].rjust(_width(name)) for name in names)
            lines.append(f"{size:>{_SIZE}}{cells}   {quickest[at]}")
    return lines


def _width(name: str) -> int:
    return max(14, len(name) + 2)


def assumptions(topology: str, node_size: int) -> str:
    """What a simulation takes the machine to be: latency (α), bytes per second on a link (β) and in memory (γ). A
    NO-BREAK SPACE joins each symbol, its number and the unit."""

    def joined(words: str) -> str:
        return words.replace(" ", "\N{NO-BREAK SPACE}")

    def rate(bytes_per_s: float) -> str:
        return format_rate(bytes_per_s, "B/s")

    def wire(words: str, link: Wire) -> str:
        alpha, beta = joined(f"α {format_seconds(link.latency_s)}"), joined(f"β {rate(link.bytes_per_s)}")
        return f"{words} {alpha}, {beta}"

    wires = [wire("each message", INFINIBAND)]
    if topology == "two-level":
        wires = [wire(f"inside nodes of {node_size}", NVLINK), wire("between nodes", INFINIBAND)]
    memory = [
        joined(f"γ {rate(GPU.reduce_bytes_per_s)} reduced"),
        joined(f"{rate(GPU.copy_bytes_per_s)} copied"),
        joined(f"{format_seconds(GPU.sync_s)} per barrier"),
    ]
    return f"assumed, not measured: {'; '.join(wires)}; {', '.join(memory)}"


def topology_of(name: str, ranks: int, node_size: int = NODE) -> Topology:
    if name == "flat":
        return Flat(ranks, INFINIBAND)
    if name == "ring":
        return Ring(ranks, INFINIBAND)
    return TwoLevel(ranks, node_size, NVLINK, INFINIBAND)
