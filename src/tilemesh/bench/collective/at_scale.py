"""Collectives on machines that are not there: simulated seconds over sizes, and where the quickest one changes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from tilemesh.comm.schedules.book import algorithms, build
from tilemesh.comm.schedules.simulate import Memory, crossovers, simulate
from tilemesh.comm.schedules.topology import Flat, Ring, Topology, TwoLevel, Wire
from tilemesh.core.errors import UsageError
from tilemesh.core.units import format_bytes, format_rate, format_seconds

TOPOLOGIES = ("flat", "ring", "two-level")
AT_SCALE = ("ring", "tree", "hierarchical")  # what is simulated unless named

# NVLink inside nodes of eight, InfiniBand between them: latency, and bytes per second in each direction.
NVLINK, INFINIBAND = Wire(1e-6, 450e9), Wire(3e-6, 50e9)
NODE = 8
GPU = Memory(reduce_bytes_per_s=1e12, copy_bytes_per_s=1.5e12, sync_s=2e-6)


def simulated(
    collective: str, topology: str, ranks: int, sizes: Sequence[int], node_size: int, names: Sequence[str] = ()
) -> list[str]:
    """Lines of a table: seconds by size of each algorithm that serves the collective, and who overtakes whom."""
    known = [name for name in names or AT_SCALE if name in algorithms(collective)]
    if not known:
        asked, served = ",".join(names or AT_SCALE), ", ".join(algorithms(collective))
        raise UsageError(f"none of {asked} serves {collective}: expected some of {served}")
    machine = topology_of(topology, ranks, node_size)
    schedules = {name: build(collective, name, ranks, node_size=node_size) for name in known}
    times = {
        name: [(size, simulate(schedule, size, machine, GPU).seconds) for size in sizes]
        for name, schedule in schedules.items()
    }
    lines = [
        f"{collective}, {ranks} ranks, {topology}: seconds as simulated",
        "  " + "size".rjust(10) + "".join(name.rjust(14) for name in known) + "   quickest",
    ]
    for at, size in enumerate(sizes):
        here = {name: times[name][at][1] for name in known}
        cells = "".join(format_seconds(here[name]).rjust(14) for name in known)
        lines.append(f"  {format_bytes(size):>10}{cells}   {min(here, key=lambda name: here[name])}")
    for pair in combinations(known, 2):
        for last, first, first_name, other in crossovers({name: times[name] for name in pair}):
            lines.append(
                f"  {first_name} is overtaken by {other} between {format_bytes(last)} and {format_bytes(first)}"
            )
    return lines


def assumptions(topology: str, node_size: int) -> str:
    """What a simulation takes the machine to be: latency (α), bytes per second on a link (β) and in memory (γ)."""

    def wire(words: str, link: Wire) -> str:
        return f"{words} α {format_seconds(link.latency_s)}, β {format_rate(link.bytes_per_s, 'B/s')}"

    wires = [wire("each message", INFINIBAND)]
    if topology == "two-level":
        wires = [wire(f"inside nodes of {node_size}", NVLINK), wire("between nodes", INFINIBAND)]
    return (
        f"assumed, not measured: {'; '.join(wires)}; γ {format_rate(GPU.reduce_bytes_per_s, 'B/s')} reduced, "
        f"{format_rate(GPU.copy_bytes_per_s, 'B/s')} copied, {format_seconds(GPU.sync_s)} a barrier"
    )


def topology_of(name: str, ranks: int, node_size: int = NODE) -> Topology:
    if name == "flat":
        return Flat(ranks, INFINIBAND)
    if name == "ring":
        return Ring(ranks, INFINIBAND)
    return TwoLevel(ranks, node_size, NVLINK, INFINIBAND)
