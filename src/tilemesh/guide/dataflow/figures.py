"""Drawings of chapter 15: operators that fusion by hand would need, and where a CNN's time goes."""

from __future__ import annotations

from tilemesh.core.scene import Scene, files_of
from tilemesh.core.units import format_seconds
from tilemesh.guide.dataflow.work import cnn_graph, shares
from tilemesh.report.draw import Line, PlotAxis
from tilemesh.report.picture import curves


def figures() -> dict[str, str]:
    return files_of(explosion, cnn)


def explosion() -> str:
    """Fused operators by hand: every chain of so many kinds is one more."""
    most, lines = 10_000.0, []
    for colour, kind in enumerate((5, 10, 20)):
        points = [(length, sum(kind**each for each in range(1, length + 1))) for length in range(1, 6)]
        lines.append(Line(f"{kind} kinds", [point for point in points if point[1] <= most], colour, dots=True))
    x, y = PlotAxis(0.8, 5.2, "operators in a row, at most"), PlotAxis(0, most, "operators to write")
    return curves("FusedABC: an operator for every chain; a generator needs a row for each kind", x, y, *lines)


def cnn() -> str:
    """Where the predicted time of a small CNN goes on an H100, by batch."""
    scene = Scene(860, 330, "Six convolutions with batch norm and ReLU on an H100: where the predicted time goes")
    rows = [(batch, is_folded) for batch in (1, 64, 1024) for is_folded in (False, True)]
    for row, (batch, is_folded) in enumerate(rows):
        share, y = shares(cnn_graph(batch, is_folded)), 54 + row * 40
        scene.text(150, y + 18, f"batch {batch}{', folded' if is_folded else ''}", align="end")
        left = 160.0
        for colour, part in ((3, share.launches), (0, share.memory), (1, share.convolutions)):
            width = 480 * part / share.seconds
            scene.box(left, y, width, 26, f"{part / share.seconds:.0%}" if width > 30 else "", colour=colour, size=11)
            left += width
        scene.text(
            left + 8,
            y + 18,
            f"{format_seconds(share.seconds)}, arithmetic {share.flops_s / share.seconds:.1%}",
            size=11,
        )
    scene.note(160, 312, "violet: launches; blue: elementwise operators, which wait for memory; orange: convolutions")
    return scene.svg()
