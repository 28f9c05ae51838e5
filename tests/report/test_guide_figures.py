"""Every drawing of the guide, opened in a browser: legible, nothing cut off, light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilemesh.guide.draw import every_figure

# Words that stick out of their drawing, stand on other words, are smaller than 8 px (numbers in the cells of a grid),
# or are hard to tell from the ground (WCAG counts 4.5).
LOOK = """
[...document.querySelectorAll("svg")].flatMap(svg => {
  const frame = svg.getBoundingClientRect(), name = svg.closest("figure").id;
  const light = text => {
    const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = text.match(/[\\d.]+/g).map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = light(getComputedStyle(svg.querySelector(".bg")).fill);
  const words = [...svg.querySelectorAll("text")].filter(one => one.textContent.trim());
  const places = words.map(one => [one, one.getBoundingClientRect()]);
  return places.flatMap(([one, a], i) => {
    const said = name + ": " + one.textContent.slice(0, 50), found = [];
    if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1 || a.bottom > frame.bottom + 1)
      found.push(said + " sticks out");
    const l = light(getComputedStyle(one).fill), contrast = (Math.max(l, ground) + .05) / (Math.min(l, ground) + .05);
    if (contrast < 4.5) found.push(said + " has contrast " + contrast.toFixed(1));
    if (parseFloat(getComputedStyle(one).fontSize) < 8) found.push(said + " is small");
    for (const [other, b] of places.slice(i + 1)) {
      const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (width > 3 && height > 4) found.push(said + " | " + other.textContent.slice(0, 50));
    }
    return found;
  });
})
"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_drawing_is_legible(browser: Any, tmp_path: Path, dark: bool) -> None:
    drawn = every_figure()
    shown = "".join(f'<figure id="{name}" style="width:900px">{text}</figure>' for name, text in drawn.items())
    page = tmp_path / "figures.html"
    page.write_text(f'<!doctype html><meta charset="utf-8"><title>figures</title>{shown}', encoding="utf-8")
    with browser.open(f"file://{page}", width=1000, dark=dark) as opened:
        assert opened.value("document.querySelectorAll('svg').length") == len(drawn) > 30
        assert opened.value(LOOK) == []
        assert opened.complaints() == []
        ground = opened.value("getComputedStyle(document.querySelector('.bg')).fill")
        assert (ground == "rgb(255, 255, 255)") is not dark
