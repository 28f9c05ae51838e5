"""Drawings of chapter 9."""

from __future__ import annotations

from tilemesh.core.scene import Scene
from tilemesh.guide.kv_cache.work import lengths, waste_in_pages
from tilemesh.report.draw import Line, PlotAxis
from tilemesh.report.picture import curves


def figures() -> dict[str, str]:
    return {"pieces.svg": pieces(), "tables.svg": tables(), "empty.svg": empty()}


def pieces() -> str:
    """The same three requests in one piece each, and in pages."""
    scene = Scene(860, 232, "Three requests of 5, 11 and 2 pages in 48 pages of memory")
    size, wanted = 16, (5, 11, 2)
    scene.text(24, 58, "in one piece: 16 pages for each, whatever it will need")
    for request, used in enumerate(wanted):
        for page in range(16):
            x = 24 + (request * 16 + page) * (size + 1)
            scene.box(x, 68, size, 30, "", colour=request if page < used else 6, pale=page >= used)
    scene.text(24, 118, "30 of 48 pages are taken and empty; a fourth request must wait", quiet=True, size=11)
    scene.text(24, 152, "in pages: each takes the next free one when it needs it")
    order = [0, 1, 1, 2, 0, 1, 1, 0, 1, 2, 1, 1, 0, 1, 1, 0, 1, 1]
    for page in range(48):
        x = 24 + page * (size + 1)
        taken = page < len(order)
        scene.box(x, 162, size, 30, "", colour=order[page] if taken else 6, pale=not taken)
    scene.text(24, 212, "30 pages are free for others; a block table says whose page is where", quiet=True, size=11)
    return scene.svg()


def tables() -> str:
    """Two block tables that share pages, and a copy on write."""
    scene = Scene(860, 230, "Two requests with the same beginning share full pages")
    columns = [300 + number * 110 for number in range(5)]
    texts = ("The sky is", "blue because", "of light", "of water", "")
    for number, (x, text) in enumerate(zip(columns, texts, strict=True)):
        shared = number < 2
        scene.box(x, 104, 100, 40, text, colour=2 if shared else number - 2 if number < 4 else 6, pale=number == 4)
        users = "2 users" if shared else "1 user" if number < 4 else "free"
        scene.text(x + 50, 92, f"page {number}", align="mid", size=11)
        scene.text(x + 50, 160, users, align="mid", quiet=True, size=11)
    for y, name, colour, pages in ((48, "request A", 0, "0, 1, 2"), (188, "request B", 1, "0, 1, 3")):
        scene.box(24, y - 16, 96, 32, name, colour=colour)
        scene.text(134, y + 4, f"table: {pages}")
    scene.arrow(240, 54, 296, 112, colour=6)
    scene.arrow(240, 182, 296, 136, colour=6)
    scene.text(300, 198, "who writes into a page with two users takes a copy of it first", quiet=True, size=11)
    return scene.svg()


def empty() -> str:
    """What stays empty over the size of a page."""
    tokens = lengths(1000)
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    line = Line("empty, of what is taken", [(size, waste_in_pages(tokens, size)) for size in sizes], 0, dots=True)
    x = PlotAxis(0, 264, "tokens per page")
    y = PlotAxis(0, 1, "empty", lambda value: f"{value:.0%}")
    return curves("Memory that stays empty, for a thousand chats of 4 to some hundred tokens", x, y, line)
