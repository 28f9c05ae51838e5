"""The page of one run: a header and the sections that its kind has (`kinds.py`)."""

from __future__ import annotations

from tilemesh.core.advice import NextCommand
from tilemesh.report.html import Html, coded, el, fact_list, join, page, tied
from tilemesh.report.kind_page import Beside, KindPage, Verdict
from tilemesh.report.kinds import page_of
from tilemesh.report.run import RUNNING, Run
from tilemesh.report.run_parts import cannot_show, disturbed, missing_words


def render(run: Run, beside: Beside, *, live: str | None = None, kind_page: KindPage | None = None) -> str:
    """The whole page. `live`: the folder's version, when the page follows it; `kind_page`: another than its kind's."""
    kind_page = kind_page or page_of(run.kind)
    bodies = [(section, section.body(run, beside)) for section in kind_page.sections]
    shown = [(section, body) for section, body in bodies if body is not None]
    followed = "run: this page refreshes by itself" if run.state == RUNNING else "folder"
    header = el(
        "header",
        el("h1", run.name),
        el("p", kind_page.about(run), class_="quiet"),
        _verdict(kind_page.verdict(run, beside)),
        el("p", f"Following the {followed}.", class_="quiet", id="state") if live is not None else None,
        fact_list(kind_page.facts(run, beside)),
        disturbed(run),
        cannot_show(missing_words(run, kind_page.expects)),
        el("nav", *(el("a", section.name, href=f"#{section.name}") for section, _ in shown), aria_label="sections"),
    )
    sections = [el("section", el("h2", section.title, id=section.name), body) for section, body in shown]
    return page(f"{run.name}: tilemesh", join(header, *sections, _next(beside.next)), live=live)


def _next(command: NextCommand | None) -> Html | None:
    if command is None:
        return None
    gain = f" Predicted: {command.gain}." if command.gain else ""
    return el("p", el("b", "What to try next: "), el("code", f"tilemesh {command.words}"), gain, id="next")


def _verdict(verdict: Verdict) -> Html:
    return join(
        el("p", coded(tied(verdict.sentence)), class_="verdict bad" if verdict.is_bad else "verdict"),
        el("p", el("b", "What can be done: "), coded(tied(verdict.advice))) if verdict.advice else None,
    )
