"""What the page of a kind of run consists of, as a value: a header, and a list of sections.

`kinds.py` says which kind has which page. A section is a function of the run that gives markup, or None where this
run has nothing to show there; the page then leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tilemesh.core.advice import NextCommand
from tilemesh.measure.row import Row
from tilemesh.report.compare import Difference, general_differences
from tilemesh.report.html import Child, Fact, Html
from tilemesh.report.run import Run


@dataclass(frozen=True)
class Beside:
    """What is shown with a run and is not in its folder: made from its configuration by whoever may."""

    rows: Sequence[Row] = ()
    why_no_rows: str = ""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Bytes per rank that the planner expects, by kind."""
    mfu_words: str = ""
    """How the rows' MFU is counted."""
    next: NextCommand | None = None
    """What to try after it, the last words of its page."""


@dataclass(frozen=True)
class PageSection:
    """A part of a page. `name` is what a link to it says."""

    name: str
    title: str
    body: Callable[[Run, Beside], Child]


@dataclass(frozen=True)
class PairSection:
    """A part of the page of two runs, which are called by `names` there."""

    title: str
    body: Callable[[Run, Run, tuple[str, str]], Child]


@dataclass(frozen=True)
class Verdict:
    """The sentence at the top of a page, and what can be done."""

    sentence: str
    is_bad: bool = False
    advice: str = ""


@dataclass(frozen=True)
class KindPage:
    """The page of a kind of run, and of two such runs side by side."""

    about: Callable[[Run], str]
    """The line below the name."""
    verdict: Callable[[Run, Beside], Verdict]
    facts: Callable[[Run, Beside], Sequence[Fact]]
    sections: Sequence[PageSection]
    differences: Callable[[Run, Sequence[Row], Run, Sequence[Row]], Sequence[Difference]] = general_differences
    """Figures that both runs have, from the runs and their rows."""
    pairs: Sequence[PairSection] = ()
    together: Callable[[Sequence[Run]], Html] | None = None
    """Three or more runs on one page; None: their last figures, and the curves of their steps."""
    expects: Mapping[str, str] = field(default_factory=dict)
    """Files that every run of this kind has, with what they are needed for: the page says which are not there."""
