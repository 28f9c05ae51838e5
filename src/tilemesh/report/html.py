"""HTML that cannot forget to escape: an element's children are escaped unless they are elements themselves.

`page` wraps a body into one file that needs nothing else: style and script stand in it, and its own policy forbids the
browser to load or send anything, or to run a script that is not this one.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from tilemesh.core.scene import PALETTE

VOID = ("br", "hr", "img", "input", "meta", "wbr")


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = Html | str | int | float | None


def escape(text: object) -> str:
    """Text for a page; characters that could turn the reading order or hide are shown as what they are."""
    shown = "".join(f"\\u{ord(letter):04x}" if _is_hidden(letter) else letter for letter in str(text))
    return html.escape(shown, quote=True)


def tied(text: str) -> str:
    """Words for a page in which a number and its percent sign stay on one line."""
    return text.replace(" %", "\u00a0%")


def el(element: str, /, *children: Child, **attributes: Any) -> Html:
    """An element. `class_` loses its underscore, other names turn theirs to dashes; None and False are left out."""
    words = [element]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = key.rstrip("_").replace("_", "-")
        words.append(shown if value is True else f'{shown}="{escape(value)}"')
    inside = join(*children)
    return Html(f"<{' '.join(words)}>" + ("" if element in VOID else f"{inside}</{element}>"))


def join(*children: Child) -> Html:
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children if child is not None))


def coded(text: str) -> Html:
    """Words for a page in which what stands between two backticks is set as code; a backtick alone stays one."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return join(text)
    return join(*(el("code", piece) if place % 2 else piece for place, piece in enumerate(pieces)))


def data(value: Any, **attributes: Any) -> Html:
    """Numbers for the script. `<` is written so that no text can end the element; NaN and infinity become null."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Html(el("script", type="application/json", **attributes).removesuffix("</script>") + text + "</script>")


def headed(heading: str, *parts: Child) -> Html | None:
    """A part of a page below its heading; None where it has nothing to show."""
    shown = [part for part in parts if part is not None]
    return join(el("h2", heading), *shown) if shown else None


@dataclass(frozen=True)
class Fact:
    """A figure at the top of a page, with a few words beneath it."""

    name: str
    value: str
    remark: str = ""


def fact_list(facts: Iterable[Fact]) -> Html:
    items = (el("div", el("dt", fact.name), el("dd", fact.value, el("small", fact.remark))) for fact in facts)
    return el("dl", *items, class_="facts")


def pair(*figures: Child) -> Html | None:
    """Figures beside each other where there is room; None where there are none."""
    shown = [figure for figure in figures if figure is not None]
    return el("div", *shown, class_="pair") if shown else None


def article(title: str, tool: str, verdict: str | None, *parts: Child) -> str:
    """A page of headed parts, its verdict in one sentence first; `tool`: whose page it is."""
    sentence = None if verdict is None else el("p", tied(verdict), class_="verdict")
    return page(f"{title}: {tool}", join(el("h1", title), sentence, *parts))


@functools.cache
def asset(name: str) -> str:
    return (resources.files("tilemesh.report") / "assets" / name).read_text(encoding="utf-8").strip()


def _colours() -> str:
    """The palette as variables, light and dark, and a class of each use of a colour that is a number."""
    light, dark = (";".join(f"--{name}:{pair[which]}" for name, pair in PALETTE.items()) for which in (0, 1))
    uses = ".sN{stroke:var(--cN)}.fN{fill:var(--cN)}.kN{--k:var(--cN)}.bN{background:var(--cN);color:var(--tN)}"
    numbered = "".join(uses.replace("N", str(number)) for number in range(8))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{numbered}"


def page(title: str, body: Html, *, live: str | None = None) -> str:
    """The whole file. `live`: a run in progress, in this version; its page may ask the server it came from alone."""
    script = asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        f"connect-src {chr(39)}{'none' if live is None else 'self'}{chr(39)}; base-uri 'none'; form-action 'none'"
    )
    head = join(
        el("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        Html('<link rel="icon" href="data:,">'),
        el("title", title),
        Html(f"<style>{_colours()}{asset('page.css')}</style>"),
    )
    main = el("main", body, data_live=live, id="main")
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{main}\n<script>{script}</script></body></html>\n'
    )


def _is_hidden(letter: str) -> bool:
    """Controls, and the marks that reverse or hide text around them; half a surrogate cannot be written at all."""
    code = ord(letter)
    is_control = (code < 32 and letter not in "\n\t") or 127 <= code < 160
    return is_control or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069 or 0xD800 <= code <= 0xDFFF
