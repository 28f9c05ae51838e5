"""Drawings of chapter 1."""

from __future__ import annotations

from tilemesh.core.scene import Scene, files_of
from tilemesh.guide.ranks.exercises import groups_of

DP, TP = 2, 4


def figures() -> dict[str, str]:
    return files_of(processes, mesh)


def processes(ranks: int = 4) -> str:
    """One program, started several times: each process has memory of its own."""
    scene = Scene(860, 252, f"One program, {ranks} processes: {ranks} ranks of one world")
    scene.box(330, 36, 200, 34, "your program (one file)", colour=6, pale=True)
    for rank in range(ranks):
        x = 30 + rank * 205
        scene.arrow(430, 70, x + 90, 104, colour=6)
        scene.box(x, 106, 180, 84, colour=rank)
        scene.text(x + 90, 126, f"rank {rank} of {ranks}", bold=True, align="mid")
        scene.text(x + 90, 146, f"comm.rank = {rank}", align="mid")
        scene.text(x + 90, 163, f"comm.size = {ranks}", align="mid")
        scene.text(x + 90, 180, "memory of its own", align="mid", quiet=True)
        if rank:
            scene.arrow(x - 95, 214, x + 70, 214, colour=6)
            scene.arrow(x + 70, 214, x - 95, 214, colour=6)
    scene.text(430, 240, "messages: the only way from one memory to another", align="mid", quiet=True)
    return scene.svg()


def mesh(dp: int = DP, tp: int = TP) -> str:
    """A mesh with its rows and columns, and the two groups of one rank."""
    chosen = 6
    row, column = groups_of(chosen, dp, tp)
    scene = Scene(860, 270, f"{dp * tp} ranks as a mesh of dp = {dp} by tp = {tp}; the two groups of rank {chosen}")
    for rank in range(dp * tp):
        x, y = 130 + rank % tp * 150, 62 + rank // tp * 80
        colour = 0 if rank == chosen else 2 if rank in row else 3 if rank in column else 6
        scene.box(x, y, 120, 52, f"rank {rank}\ndp {rank // tp}, tp {rank % tp}", colour=colour, pale=colour == 6)
    scene.text(118, 92, "copy 0", align="end", quiet=True)
    scene.text(118, 172, "copy 1", align="end", quiet=True)
    for place in range(tp):
        scene.text(190 + place * 150, 52, f"part {place} of the model", align="mid", quiet=True, size=11)
    scene.text(
        130, 232, f"row {row}: the tensor-parallel group. Together one copy of the model; exchanges activations."
    )
    scene.text(130, 252, f"column {column}: the data-parallel group. Same part, other data; averages gradients.")
    return scene.svg()
