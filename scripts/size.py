"""Print the lines of each room beside its budget, and the change since the last release: `make size`.

The budgets stand in tests/test_layers.py, which holds every room to its own.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    layers = runpy.run_path(str(ROOT / "tests" / "test_layers.py"))
    budgets, now = layers["MOST_LINES"], layers["room_lines"]()
    release = git("describe", "--tags", "--abbrev=0").strip()
    before = lines_at(release, layers["SOURCE_SUFFIXES"]) if release else None
    print(
        f"{'room':<10} {'lines':>7} {'budget':>7} {'left':>6} {f'since {release}' if release else 'no release yet':>16}"
    )
    for room in sorted(now, key=lambda room: -now[room]):
        print_row(room, now[room], budgets.get(room, 0), None if before is None else before[room])
    print_row("together", sum(now.values()), sum(budgets.values()), before and sum(before.values()))
    return int(any(count > budgets.get(room, 0) for room, count in now.items()))


def print_row(room: str, lines: int, budget: int, before: int | None) -> None:
    change = "" if before is None else f"{lines - before:+,}"
    print(f"{room:<10} {lines:>7,} {budget:>7,} {budget - lines:>6,} {change:>16}")


def lines_at(revision: str, suffixes: tuple[str, ...]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for line in git("grep", "-c", "", revision, "--", "src/tilemesh").splitlines():
        _, path, count = line.split(":")
        if Path(path).suffix in suffixes and len(Path(path).parts) > 3:
            counted[Path(path).parts[2]] += int(count)
    return counted


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    sys.exit(main())
