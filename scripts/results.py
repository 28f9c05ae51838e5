"""Write docs/results.md from committed rows: `python scripts/results.py`.

A claim is a sentence of a document whose figures are computed from rows of `benchmarks/results/`:
`benchmarks/claims.py` lists them. The page has every claim with its rows (predicted, measured, limit, peer,
machine, commit, date), then a table for each part. A test makes the page again and
looks for each claim in its document.
"""

from __future__ import annotations

import functools
import json
import re
import runpy
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from tilemesh.measure.table import format_value

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DATES, PAGE = ROOT / "benchmarks/results", ROOT / "benchmarks/dates.json", ROOT / "docs/results.md"


@dataclass(frozen=True)
class Line:
    """One line of a file of rows."""

    file: str
    number: int
    body: dict[str, Any]

    @property
    def measured(self) -> float:
        return float(self.body["measured"]["median"])

    @property
    def rate(self) -> bool:
        return bool(self.body["unit"].endswith("/s"))

    @property
    def of_limit(self) -> float:
        return self.measured / self.body["limit"] if self.rate else self.body["limit"] / self.measured

    def times(self, peer: str) -> float:
        """How many times as fast as this peer."""
        other = self.body["peers"][peer]["median"]
        return float(self.measured / other if self.rate else other / self.measured)

    @property
    def slower_than_predicted(self) -> float:
        """Measured time over predicted time, less one: +0.1 took a tenth longer."""
        predicted = self.body["predicted"]
        return float(predicted / self.measured - 1 if self.rate else self.measured / predicted - 1)


@dataclass(frozen=True)
class Figure:
    """What a claim says in one place, and the lines it was computed from."""

    text: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Claim:
    """A sentence of a document; each `{}` is a figure."""

    document: str
    sentence: str
    figures: tuple[Figure, ...]

    @property
    def text(self) -> str:
        return self.sentence.format(*(figure.text for figure in self.figures))

    @property
    def lines(self) -> list[Line]:
        return list({(line.file, line.number): line for figure in self.figures for line in figure.lines}.values())


@functools.cache
def lines_of(file: str) -> tuple[Line, ...]:
    text = (RESULTS / file).read_text().splitlines()
    return tuple(Line(file, number, json.loads(line)) for number, line in enumerate(text, 1) if line.strip())


def select(file: str, **wanted: Any) -> list[Line]:
    """Lines whose keys, or keys of the case, are as wanted; None: not there."""

    def fits(line: Line) -> bool:
        known = {**line.body, **(line.body.get("case") or {})}
        return all(known.get(key) == value for key, value in wanted.items())

    return [line for line in lines_of(file) if fits(line)]


def one(file: str, **wanted: Any) -> Line:
    found = select(file, **wanted)
    if len(found) != 1:
        raise ValueError(f"{file}: {len(found)} rows are {wanted}, a claim needs one")
    return found[0]


def figure(form: str, value: Callable[..., float], *lines: Line) -> Figure:
    return Figure(form.format(value(*lines)), lines)


# --- the page ---


def dates() -> dict[str, str]:
    return json.loads(DATES.read_text()) if DATES.exists() else {}


def commit_of(line: Line) -> str:
    """A row's commit without `-dirty`, or its file where it names none."""
    commit = re.match(r"[0-9a-f]{7,40}", line.body.get("commit") or "")
    return commit[0][:8] if commit else line.file


def origin(line: Line, when: dict[str, str]) -> str:
    """`1b586a7` 2026-11-16; where the history has no such commit, the date on which the rows were committed."""
    commit = commit_of(line)
    if commit == line.file:
        return f"no commit; rows of {when[line.file]}"
    if not when[commit]:
        return f"`{commit}`, not in the history; rows of {when[line.file]}"
    return f"`{commit}`{' (changed)' if 'dirty' in line.body['commit'] else ''} {when[commit]}"


def machine(line: Line) -> str:
    stated = line.body.get("machine") or ("NVIDIA H200" if "h200" in line.file else line.file.partition(".")[0])
    return str(stated).partition("-c22ed5d2")[0]


def _shown(line: Line, value: float | None) -> str:
    return "" if value is None else format_value(value, line.body["unit"])


def _rows(lines: Sequence[Line], when: dict[str, str]) -> tuple[str, str, str, str, str, str, str]:
    """predicted, measured, limit, peers, machine, commit and date, rows."""
    first = lines[0]
    places = ", ".join(
        f"`{file}` {'lines ' if len(numbers) > 1 else 'line '}{_ranges(numbers)}" for file, numbers in _by_file(lines)
    )
    who = "; ".join(dict.fromkeys(map(machine, lines)))
    commits = ", ".join(dict.fromkeys(origin(line, when) for line in lines))
    if len(lines) > 1 or "measured" not in first.body or "unit" not in first.body:
        return "", f"{len(lines)} rows" if len(lines) > 1 else "", "", "", who, commits, places
    body = first.body
    peers = "; ".join(f"{name} {_shown(first, sample['median'])}" for name, sample in body["peers"].items())
    values = (_shown(first, body[key]) for key in ("predicted", "limit"))
    predicted, limit = values
    return predicted, _shown(first, first.measured), limit, peers, who, commits, places


def _by_file(lines: Iterable[Line]) -> Iterable[tuple[str, list[int]]]:
    files: dict[str, list[int]] = {}
    for line in lines:
        files.setdefault(line.file, []).append(line.number)
    return ((file, sorted(numbers)) for file, numbers in files.items())


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in parts)


INTRODUCTION = " ".join(
    (
        "Made by `python scripts/results.py` from the rows in `benchmarks/results/`; a test makes it again.",
        "*Commit* is that of the code that was measured, *changed* that files of it were not committed;",
        "the date is the commit's, or of a row without one that of its file.",
        "*Limit* is what the calibrated hardware allows.",
        "Where a claim has several rows, their figures are in the tables below or in the named lines.",
    )
)
HEAD = "| {} | predicted | measured | limit | beside | machine | commit, date |{}\n|---|---|---|---|---|---|---|{}"


def page(claims: Sequence[Claim], tables: Sequence[tuple[str, str, list[Line]]], when: dict[str, str]) -> str:
    out = [
        "# Results",
        INTRODUCTION,
        "## Claims of the documents",
    ]  # fmt: skip
    for document in dict.fromkeys(claim.document for claim in claims):
        link = document.removeprefix("docs/") if document.startswith("docs/") else None
        out.append(f"### {document}" if link is None else f"### {document.removeprefix('docs/').removesuffix('.md')}")
        if link:
            out.append(f"[{document}]({link})")
        table = [HEAD.format("claim", " rows |", "---|")]
        for claim in claims:
            if claim.document == document:
                cells = _rows(claim.lines, when)
                table.append("| " + " | ".join([_plain(claim.text), *cells]) + " |")
        out.append("\n".join(table))
    for part, words, lines in tables:
        out.append(f"## {part}")
        out.append(words)
        table = [HEAD.format("what", "", "")]
        for line in lines:
            cells = _rows([line], when)[:-1]
            table.append("| " + " | ".join([_case(line), *cells]) + " |")
        out.append("\n".join(table))
    return "\n\n".join(out) + "\n"


def _plain(text: str) -> str:
    """A sentence as one cell: links and bars of the table it stands in taken off."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(text.split())).strip().strip("|").replace("|", "·").strip()


def _case(line: Line) -> str:
    skip = (
        "precision",
        "cores",
        "compiled",
        "prediction",
        "auto",
        "c",
        "time",
        "config",
        "running",
        "prompt",
        "output",
    )
    case = {key: value for key, value in line.body["case"].items() if key not in skip and value not in (1, "", None)}
    return f"{line.body['name']} " + ", ".join(
        str(value) if isinstance(value, str) else f"{key} {value}" for key, value in case.items()
    )


def refresh_dates(lines: Iterable[Line]) -> None:
    """Dates of commits and of files of rows that are not known yet, from git."""

    def from_git(*arguments: str) -> str:
        command = ["git", "log", "--format=%as", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip().rpartition("\n")[2]

    known = dates()
    for line in lines:
        if line.file not in known:
            known[line.file] = from_git("--diff-filter=A", "--", f"benchmarks/results/{line.file}")
        if commit_of(line) not in known:
            known[commit_of(line)] = from_git("-1", commit_of(line))
    DATES.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")


# --- the picture of the README ---

WORDS = {
    "one": "1 rank", "one-acc": "1 rank, 4 microbatches", "dp2": "dp 2", "dp2-acc": "dp 2, 4 microbatches",
    "tp2": "tp 2", "tp2-seq": "tp 2, sequence parallel", "dp4": "dp 4", "dp2tp2": "dp 2 × tp 2", "tp4": "tp 4",
    "pp2": "pp 2, 1F1B", "pp2-zbv": "pp 2, ZB-V", "dp2pp2": "dp 2 × pp 2", "dp2-zero1": "dp 2, ZeRO-1",
    "dp4-zero3": "dp 4, ZeRO-3",
}  # fmt: skip
STYLE = """text{font:13px system-ui,sans-serif;fill:#1d2733}.dim{fill:#5b6875}.measured{fill:#0f766e}
.choice{fill:#c2410c}.predicted{stroke:#1d2733;stroke-width:2.5}.grid{stroke:#d5dbe1}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9aa7b4}.measured{fill:#2dd4bf}
.choice{fill:#fb923c}.predicted{stroke:#fff}.grid{stroke:#38424c}}"""


def picture(grades: Sequence[Line]) -> str:
    """Steps of layouts, measured as bars and predicted as ticks, in the order of the prediction."""

    def step(line: Line, key: str) -> float:
        return next(float(figure[key]) for figure in line.body["figures"] if figure["name"] == "step time") * 1e3

    ordered = sorted(grades, key=lambda line: step(line, "predicted"))
    left, scale, row, top = 190, 0.95, 24, 46
    height = top + row * len(ordered) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img">'
        f"<title>Predicted and measured steps of {len(ordered)} layouts</title><style>{STYLE}</style>",
        f'<rect class="measured" x="{left}" y="12" width="22" height="10"/><text x="{left + 28}" y="22">measured</text>'
        f'<path class="predicted" d="M{left + 110} 8v18"/><text x="{left + 118}" y="22">predicted before the run</text>'
        f'<text class="dim" x="{left + 290}" y="22">milliseconds per step, two cores</text>',
    ]
    for at in range(0, 501, 100):
        x = left + at * scale
        parts.append(f'<path class="grid" d="M{x:g} {top - 8}V{height - 22}"/>')
        parts.append(f'<text class="dim" x="{x:g}" y="{height - 6}" text-anchor="middle">{at}</text>')
    for place, line in enumerate(ordered):
        y = top + row * place
        predicted, measured = step(line, "predicted"), step(line, "measured")
        name = ("choice: ", "runner-up: ", *[""] * len(ordered))[place] + WORDS[line.body["run"]]
        kind = "choice" if place < 2 else "measured"
        tick = left + predicted * scale
        parts.append(
            f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{name}</text>'
            f'<rect class="{kind}" x="{left}" y="{y}" width="{measured * scale:.1f}" height="15" rx="2"/>'
            f'<path class="predicted" d="M{tick:.1f} {y - 3}v21"/>'
            f'<text class="dim" x="{left + max(predicted, measured) * scale + 8:.1f}" y="{y + 12}">'
            f"{measured:.0f} ({predicted / measured - 1:+.0%})</text>".replace("-0%", "0%")
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def load() -> tuple[list[Claim], list[tuple[str, str, list[Line]]]]:
    parts = (Claim, Figure, Line, figure, geometric_mean, lines_of, median, one, select)
    names = {value.__name__: value for value in parts}
    told = runpy.run_path(str(ROOT / "benchmarks/claims.py"), init_globals=names)
    return told["CLAIMS"], told["TABLES"]


GRADED = "plan_grades_quiet_neoverse_n1_2c.jsonl"


def main() -> None:
    claims, tables = load()
    refresh_dates(
        [line for claim in claims for line in claim.lines] + [line for _, _, lines in tables for line in lines]
    )
    PAGE.write_text(page(claims, tables, dates()))
    (ROOT / "docs/pictures/loop.svg").write_text(picture(select(GRADED, name="grade")))
    print(f"docs/results.md: {len(claims)} claims, {sum(len(lines) for _, _, lines in tables)} rows in tables")


if __name__ == "__main__":
    main()
