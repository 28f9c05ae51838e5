"""Drawings of chapter 5."""

from __future__ import annotations

from tilemesh.core.scene import Scene, files_of
from tilemesh.guide.data_parallel.work import kept_bytes

BILLION = 1_000_000_000


def figures() -> dict[str, str]:
    return files_of(equation, data_parallel, mlp, zero, zero_steps)


def equation() -> str:
    """θ' = f(θ, ∇L(θ, D)), and which of its symbols each method cuts."""
    scene = Scene(860, 300, "One training step, and what each method cuts")
    x = 60.0
    for words, colour, width in (
        ("θ'", 0, 60), ("=", -1, 30), ("f", 1, 50), ("(", -1, 16), ("θ", 0, 60), (",", -1, 16), ("∇L", 2, 80),
        ("(", -1, 16), ("θ", 0, 60), (",", -1, 16), ("D", 3, 60), (") )", -1, 30),
    ):  # fmt: skip
        if colour < 0:
            scene.text(x + width / 2, 84, words, size=22, align="mid")
        else:
            scene.box(x, 54, width, 46, words, colour=colour, size=20)
        x += width + 6
    scene.note(640, 68, "θ weights · D data")
    scene.note(640, 84, "∇L gradient of the loss")
    scene.note(640, 100, "f the optimizer's update")
    rows = (
        (3, "data parallelism (this chapter)", "cuts D: every rank has all of θ; gradients are added up"),
        (1, "ZeRO stages 1 and 2", "also cut what f keeps (moments), and the gradients"),
        (0, "ZeRO stage 3, FSDP", "also cut θ: gathered when needed"),
        (2, "tensor parallelism (chapter 6)", "cuts θ and the products inside ∇L"),
        (2, "pipelines (chapter 7)", "cut θ and ∇L by layers: different ranks work at different times"),
    )
    for place, (colour, name, words) in enumerate(rows):
        y = 122 + place * 34
        scene.box(60, y, 250, 26, name, colour=colour)
        scene.text(324, y + 17, words)
    return scene.svg()


def data_parallel(ranks: int = 4) -> str:
    """The flow of one step."""
    scene = Scene(860, 290, f"Data parallelism on {ranks} ranks: the same weights, other samples")
    for rank in range(ranks):
        x = 40 + rank * 200
        scene.box(x, 44, 170, 30, f"samples {rank}/{ranks}", colour=3)
        scene.arrow(x + 85, 76, x + 85, 96, colour=6)
        scene.box(x, 98, 170, 44, "all weights θ\nforward, backward", colour=0)
        scene.arrow(x + 85, 144, x + 85, 164, colour=6)
        scene.arrow(x + 85, 206, x + 85, 226, colour=6)
        scene.box(x, 228, 170, 34, "θ' = f(θ, gradient)", colour=0)
    scene.box(40, 166, 770, 38, "all_reduce: every rank gets the sum of all ranks' gradients", colour=2)
    scene.text(
        40,
        282,
        "All ranks make the same update from the same sum, so their weights stay equal without being sent.",
        quiet=True,
    )
    return scene.svg()


def mlp() -> str:
    """The MLP's five products, and which sum over samples."""
    scene = Scene(860, 300, "A two-layer MLP: five matrix products; samples (rows) are cut over two ranks")
    for x, y, words, colour, kind in (
        (30, 60, "h = relu(x · W1)", 0, "type 1: no communication"),
        (310, 60, "z = h · W2", 0, "type 1: no communication"),
        (590, 60, "loss", 6, ""),
        (590, 180, "dz", 6, ""),
        (310, 150, "dh = dz · W2ᵀ", 0, "type 1: no communication"),
        (310, 226, "dW2 = hᵀ · dz", 1, "type 2: all_reduce"),
        (30, 180, "dW1 = xᵀ · da", 1, "type 2: all_reduce"),
    ):
        scene.box(x, y, 220 if kind else 100, 40, words, colour=colour)
        if kind:
            scene.text(x + 110, y + 56, kind, size=11, quiet=True, align="mid")
    scene.arrow(252, 80, 306, 80, colour=6)
    scene.arrow(532, 80, 586, 80, colour=6)
    scene.arrow(640, 102, 640, 176, colour=6)
    scene.arrow(586, 192, 534, 174, colour=6)
    scene.arrow(586, 208, 534, 240, colour=6)
    scene.arrow(306, 176, 254, 194, colour=6)
    scene.text(700, 84, "forward →", quiet=True)
    scene.text(700, 204, "← backward", quiet=True)
    return scene.svg()


def zero(ranks: int = 64, parameters: int = 7_500_000_000) -> str:
    """Bytes per GPU of 7.5 billion parameters by stage, counted on arrays 62,500 times smaller."""
    scale = 62_500
    counted = [kept_bytes(stage, ranks, parameters // scale // ranks * ranks) for stage in range(4)]
    scene = Scene(860, 230, f"What one of {ranks} GPUs keeps of a model of 7.5 billion parameters, in GB")
    most = counted[0].total
    for stage, kept in enumerate(counted):
        y, x = 48 + stage * 38, 130.0
        scene.text(120, y + 19, ("nothing cut", "stage 1", "stage 2", "stage 3")[stage], align="end")
        for colour, part in ((0, kept.weights), (2, kept.gradients), (1, kept.optimizer)):
            width = 600 * part / most
            scene.box(x, y, width, 28, colour=colour)
            x += width
        scene.text(x + 8, y + 19, f"{kept.total * scale / BILLION:.3g}")
    for place, (colour, words) in enumerate(
        ((0, "weights, 2 bytes"), (2, "gradients, 2"), (1, "optimizer states, 12"))
    ):
        scene.box(130 + place * 190, 204, 14, 14, colour=colour)
        scene.note(150 + place * 190, 215, words)
    return scene.svg()


def zero_steps() -> str:
    """What is sent when, by stage."""
    scene = Scene(
        860, 250, "One step by stage: what is computed, and what is sent (in units of the weights, times (n-1)/n)"
    )
    forward, backward, update = ("forward", 0), ("backward", 0), ("update a part", 1)
    gather, scatter = ("all_gather: 1", 2), ("reduce_scatter: 1", 2)
    stages = (
        ("stage 0", (forward, backward, ("all_reduce gradients: 2", 2), ("update all", 1)), "2"),
        ("stages 1, 2", (forward, backward, scatter, update, gather), "2"),
        ("stage 3", (gather, forward, gather, backward, scatter, update), "3"),
    )
    for row, (name, boxes, total) in enumerate(stages):
        y = 52 + row * 62
        scene.text(86, y + 24, name, align="end")
        x = 96
        for words, colour in boxes:
            width = 30 + 6.3 * len(words)
            scene.box(x, y, width, 38, words, colour=colour, size=11)
            x += int(width) + 5
        scene.text(846, y + 24, f"sent: {total}", align="end", bold=True)
    words = "Stages 1 and 2 send what an all_reduce sends, with the update in the middle; stage 3 half as much again."
    scene.note(96, 242, words)
    return scene.svg()
