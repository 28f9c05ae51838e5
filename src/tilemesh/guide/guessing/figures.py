"""Drawings of chapter 11."""

from __future__ import annotations

from tilemesh.core.scene import Scene
from tilemesh.guide.guessing.work import speedup
from tilemesh.report.draw import Line, PlotAxis
from tilemesh.report.picture import curves


def figures() -> dict[str, str]:
    return {"pass.svg": one_pass(), "common.svg": common(), "gain.svg": gain()}


def one_pass() -> str:
    """Four guesses, of which two stay."""
    scene = Scene(860, 190, "One pass over four guesses: three tokens come out")
    words = (("sat", 1), ("on", 1), ("a", 3), ("mat", 6))
    scene.box(24, 60, 120, 36, "the cat", colour=6)
    scene.text(84, 50, "known", align="mid", quiet=True, size=11)
    for place, (word, colour) in enumerate(words):
        x = 170 + place * 110
        scene.box(x, 60, 96, 36, word, colour=colour, pale=place > 2)
        verdict = ("stays", "stays", "does not stay", "dropped")[place]
        scene.text(x + 48, 50, verdict, align="mid", quiet=True, size=11)
    scene.arrow(438, 98, 438, 130, colour=6)
    scene.box(390, 132, 96, 36, "the", colour=2)
    scene.text(500, 154, "drawn from what the draft gave too little", quiet=True, size=11)
    scene.text(640, 82, "large model: one pass for all", quiet=True, size=11)
    return scene.svg()


def common() -> str:
    """What two distributions have in common, and what is lacking."""
    scene = Scene(860, 260, "A guess stays for the part that both have in common")
    q, p = (0.4, 0.25, 0.15, 0.12, 0.08), (0.15, 0.35, 0.3, 0.1, 0.1)
    for token, (large, small) in enumerate(zip(q, p, strict=True)):
        x, base, scale = 60 + token * 110, 220, 400
        both = min(large, small)
        scene.box(x, base - both * scale, 70, both * scale, "", colour=1)
        if large > small:
            scene.box(x, base - large * scale, 70, (large - small) * scale, "", colour=2)
        else:
            scene.box(x, base - small * scale, 70, (small - large) * scale, "", colour=6, pale=True)
        scene.text(x + 35, 240, f"token {token}", align="mid", size=11)
    for place, (words, colour, pale) in enumerate(
        (
            ("stays: min(p, q)", 1, False),
            ("replacements: max(0, q - p)", 2, False),
            ("rejected: max(0, p - q)", 6, True),
        )
    ):
        scene.box(630, 70 + place * 34, 22, 22, "", colour=colour, pale=pale)
        scene.text(660, 86 + place * 34, words, size=11)
    return scene.svg()


def gain() -> str:
    """Speedup over the number of guesses."""
    counts = [0, 1, 2, 3, 4, 6, 8, 12, 16]
    lines = [
        Line(
            f"{rate:.0%} stay, a guess costs {cost:g}", [(g, speedup(rate, g, cost)) for g in counts], colour, dots=True
        )
        for colour, (rate, cost) in enumerate(((0.9, 0.02), (0.8, 0.1), (0.6, 0.1), (0.4, 0.2)))
    ]
    x = PlotAxis(0, 16.5, "guesses per pass")
    y = PlotAxis(0, 7, "speedup", lambda value: f"{value:g}×")
    return curves("Speedup over the number of guesses", x, y, *lines)
