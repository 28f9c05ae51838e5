"""Drawings of chapter 13: sizes and lengths come from the code that the chapter runs."""

from __future__ import annotations

from tilemesh.core.scene import Scene, files_of
from tilemesh.guide.four_models.work import ROLES, trained_lengths
from tilemesh.report.draw import Line, PlotAxis
from tilemesh.report.picture import curves


def figures() -> dict[str, str]:
    return files_of(dance, held, lengths)


def dance() -> str:
    """Who gives what to whom in a step."""
    scene = Scene(860, 250, "A step of PPO: who gives what to whom")
    boxes = {"actor": (60, 100, 0), "reward": (330, 50, 2), "critic": (330, 110, 1), "reference": (330, 170, 3)}
    for name, (x, y, colour) in boxes.items():
        scene.box(x, y, 130, 40, name, colour=colour)
    for y in (70, 130, 190):
        scene.arrow(192, 120, 328, y, colour=6)
    scene.text(215, 88, "answers", quiet=True, size=11)
    scene.box(600, 100, 170, 60, "advantages, ratios, KL", colour=6)
    for y, words, at in ((70, "scores", 86), (130, "values", 124), (190, "log-probabilities", 184)):
        scene.arrow(462, y, 598, 130, colour=6)
        scene.text(536 if y != 130 else 480, at, words, quiet=True, size=11)
    scene.line(125, 100, 125, 40)
    scene.line(125, 40, 685, 40)
    scene.arrow(685, 40, 685, 98, colour=6)
    scene.text(560, 54, "old log-probabilities", quiet=True, size=11)
    scene.line(685, 162, 685, 228)
    scene.line(125, 228, 685, 228)
    scene.arrow(125, 228, 125, 142, colour=6)
    scene.text(405, 222, "trains actor and critic; everything else was computed before the first update", size=11,
               align="mid", quiet=True)  # fmt: skip
    return scene.svg()


def held() -> str:
    """Bytes per parameter of each, with and without."""
    scene = Scene(860, 268, "Bytes per parameter")
    rows = (
        ("PPO, four models", ("actor", "critic", "reward", "reference")),
        ("PPO, a verifier", ("actor", "critic", "reference")),
        ("GRPO, a verifier", ("actor", "reference")),
        ("GRPO, a verifier, no KL", ("actor",)),
        ("GRPO, a verifier, LoRA", ("reference",)),
    )
    colours = {"actor": 0, "critic": 1, "reward": 2, "reference": 3}
    for place, (words, roles) in enumerate(rows):
        x, y = 230.0, 44 + place * 38
        scene.text(216, y + 20, words, align="end")
        for role in roles:
            width = ROLES[role].state_bytes * 15
            scene.box(x, y, width - 2, 30, role if width > 60 else role[:3], colour=colours[role], size=10)
            x += width
        total = sum(ROLES[role].state_bytes for role in roles)
        adapters = ", and a few million numbers of adapters: base and reference are one" if total == 2 else ""
        scene.text(x + 8, y + 20, f"{total}{adapters}", quiet=True)
    return scene.svg()


def lengths() -> str:
    """Mean lengths of right and wrong answers over updates."""
    curve = trained_lengths()[:120]
    lines = [
        Line(words, [(step, pair[which]) for step, pair in enumerate(curve)], colour)
        for colour, (words, which) in enumerate((("right answers", 0), ("wrong answers", 1)))
    ]
    lines.append(Line("both, one weight for every token", [(0, 10.0), (119, 10.0)], 2))
    x, y = PlotAxis(0, 120, "updates"), PlotAxis(0, max(pair[1] for pair in curve) * 1.05, "tokens")
    return curves("The length trap: each answer's gradient divided by its length", x, y, *lines)
