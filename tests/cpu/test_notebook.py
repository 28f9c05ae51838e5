"""Plans, runs, rows and placements in a notebook: the example runs, and each value shows its page."""

from __future__ import annotations

import ast
import html
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tilemesh

ROOT = Path(__file__).parents[2]
SHELL = """
import sys, types
shown = {}
class Formatter:
    def for_type_by_name(self, module, name, show):
        shown[module, name] = show
shell = types.SimpleNamespace(display_formatter=types.SimpleNamespace(formatters={"text/html": Formatter()}))
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
"""
"""What of Jupyter tilemesh speaks to."""


def test_types_that_are_shown_exist() -> None:
    for module, name in tilemesh.SHOWN:
        assert hasattr(importlib.import_module(module), name)


def test_importing_in_a_notebook_loads_nothing_more() -> None:
    program = f"{SHELL}\nimport tilemesh\nassert len(shown) == 4\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_example_runs_and_each_value_shows_its_page(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples/plan_and_run.ipynb").read_text())["cells"]
    parts = [SHELL, "pages = {}"]
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        body = ast.parse(source).body
        is_value = isinstance(body[-1], ast.Expr) and isinstance(body[-1].value, ast.Name)
        name = source.strip().splitlines()[-1]
        # As a notebook does with the value of a cell's last line.
        shows = f"\nkind = type({name})\npages[kind.__name__] = shown[kind.__module__, kind.__name__]({name})"
        parts.append(source + (shows if is_value else ""))
    program = "\n".join([*parts, "import json", "open('pages.json', 'w').write(json.dumps(pages))"])
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110
    )
    assert ran.returncode == 0, ran.stderr
    pages = json.loads((tmp_path / "pages.json").read_text())
    assert pages.keys() == {"SearchResult", "Result", "Row", "PlacedModule"}
    words_of = {"SearchResult": "Why the first", "Result": "loss", "Row": "step time", "PlacedModule": "tp:S(0)"}
    for name, words in words_of.items():
        assert pages[name].startswith("<iframe srcdoc=")
        inside = html.unescape(pages[name].partition('srcdoc="')[2].partition('" style=')[0])
        assert words in inside.replace("\u00a0", " "), name
        assert 'name="color-scheme" content="light dark"' in inside


def test_only_values_with_a_page_are_shown() -> None:
    from tilemesh.report.notebook import show

    with pytest.raises(AttributeError):
        show(3)
