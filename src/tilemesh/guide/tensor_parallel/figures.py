"""Drawings of chapter 6: matrices with the parts of two devices in two colours."""

from __future__ import annotations

from tilemesh.core.scene import LaneBlock, Scene, files_of, lanes

DEVICES = (0, 1)  # colours


def figures() -> dict[str, str]:
    return files_of(three_cuts, pair, sequence, in_time)


def _matrix(scene: Scene, x: float, y: float, width: float, height: float, name: str, cut: str) -> None:
    """A matrix, its halves coloured by device; `cut`: rows, columns, whole (both have it) or sum (both have a part)."""
    if cut == "rows":
        for place, colour in enumerate(DEVICES):
            scene.box(x, y + place * height / 2, width, height / 2, colour=colour)
    elif cut == "columns":
        for place, colour in enumerate(DEVICES):
            scene.box(x + place * width / 2, y, width / 2, height, colour=colour)
    else:
        scene.box(x, y, width, height, colour=6, pale=cut == "whole")
    scene.text(x + width / 2, y - 6, name, align="mid", bold=True)
    words = {"whole": "both", "sum": "0 + 1"}.get(cut, "")
    if words:
        scene.text(x + width / 2, y + height / 2 + 4, words, align="mid", size=11, quiet=True)


def three_cuts() -> str:
    """x·A·B cut by rows and in Megatron's way."""
    scene = Scene(860, 330, "Two products on two devices: blue is device 0, brown is device 1")
    rows = (
        (
            "by rows",
            ("rows", "whole", "rows", "whole", "rows"),
            "forward sends nothing; backward sums the gradients of A and B (chapter 5)",
        ),
        (
            "Megatron's way",
            ("whole", "columns", "columns", "rows", "sum"),
            "forward ends with one sum; backward with another; A and B stay cut",
        ),
    )
    names = ("x", "A", "h = relu(x·A)", "B", "z = h·B")
    sizes = ((90, 80), (100, 60), (100, 80), (60, 80), (90, 80))
    for row, (name, cuts, words) in enumerate(rows):
        y, x = 70 + row * 140, 130.0
        scene.text(16, y + 44, name, bold=True)
        for index, (matrix, cut) in enumerate(zip(names, cuts, strict=True)):
            width, height = sizes[index]
            _matrix(scene, x, y, width, height, matrix, cut)
            x += width
            sign = ("·", "=", "·", "=", "")[index]
            scene.text(x + 18, y + 44, sign, size=20, align="mid")
            x += 36
        scene.note(130, y + 100, words)
    return scene.svg()


def in_time() -> str:
    """The third way: one matrix per device, four microbatches one after the other."""
    blocks = [
        LaneBlock(
            device, microbatch + device, microbatch + device + 1, f"{'AB'[device]} · {microbatch}", DEVICES[device]
        )
        for device in range(2)
        for microbatch in range(4)
    ]
    title = "The third way, in time: device 0 has A, device 1 has B; microbatches 0 to 3 (chapter 7)"
    note = "sends one activation per microbatch from 0 to 1"
    return lanes(title, ["device 0", "device 1"], blocks, unit="products", note=note)


def pair() -> str:
    """Forward and backward of a pair, with the two places where ranks meet."""
    scene = Scene(860, 300, "Column, then row: where the ranks meet, forward and backward")
    rows = {
        "forward": ("x\nwhole", "x·A_i\nno sum", "relu", "h_i·B_i\npart of a sum", "all_reduce", "z\nwhole"),
        "backward": ("dx\nwhole", "all_reduce", "da_i·A_iᵀ\npart of a sum", "relu'", "dz·B_iᵀ\nno sum", "dz\nwhole"),
    }
    for row, (name, boxes) in enumerate(rows.items()):
        y = 60 + row * 110
        scene.text(16, y + 32, name, bold=True)
        for place, words in enumerate(boxes):
            x = 100 + place * 126
            colour = 6 if "whole" in words else 2 if "reduce" in words else 1 if "part" in words else 0
            scene.box(x, y, 108, 54, words, colour=colour, pale=colour == 6)
            if place:
                ends = (x - 16, x - 2) if row == 0 else (x - 2, x - 16)
                scene.arrow(ends[0], y + 27, ends[1], y + 27, colour=6)
    scene.text(
        100,
        272,
        "The column half is silent forward and sums backward; the row half sums forward and is silent backward.",
        quiet=True,
    )
    scene.text(100, 290, "Weight gradients stay where they are: xᵀ·da_i and h_iᵀ·dz need no other rank.", quiet=True)
    return scene.svg()


def sequence() -> str:
    """Collectives of a pair with sequence parallelism."""
    scene = Scene(
        860, 230, "With sequence parallelism: an all_reduce becomes two halves, and tokens stay cut in between"
    )
    rows = (
        (
            "forward",
            (("all_gather x", 2), ("x·A_i, relu", 0), ("h_i·B_i", 0), ("reduce_scatter z", 2)),
            "2 halves: as one all_reduce",
        ),
        (
            "backward",
            (
                ("all_gather dz", 2),
                ("dz·B_iᵀ", 0),
                ("all_gather x again", 1),
                ("xᵀ·da_i, da_i·A_iᵀ", 0),
                ("reduce_scatter dx", 2),
            ),
            "3 halves",
        ),
    )
    for row, (name, boxes, words) in enumerate(rows):
        y, x = 56 + row * 76, 100.0
        scene.text(16, y + 26, name, bold=True)
        for text, colour in boxes:
            width = 28 + 6.6 * len(text)
            scene.box(x, y, width, 42, text, colour=colour)
            x += width + 8
        scene.text(846, y + 60, words, align="end", bold=True, size=11)
    words = "Norms, dropout and what is kept for backward are 1/n per rank; the price is gathering x a second time."
    scene.note(100, 218, words)
    return scene.svg()
