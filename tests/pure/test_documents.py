"""Documents are true: links lead somewhere, commands exist with their options, references are what they describe."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import typer

from tilemesh.cli.main import make_app, redirected
from tilemesh.cli.reference import reference_page

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHELL = ("", "bash", "sh", "console")


class DocumentCommand(NamedTuple):
    document: Path
    line: str
    words: list[str]


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_links_lead_somewhere(document: Path) -> None:
    text = _FENCE.sub("", document.read_text())
    for link in _LINK.findall(text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        path = (document.parent / target) if target else document
        assert path.exists(), f"{link}: no such file"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path.read_text()), f"{link}: no such heading on a code host"
            assert anchor in site_anchors(path.read_text()), f"{link}: no such heading on the site"


def headings(text: str) -> list[str]:
    found = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    return [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in found]


def anchors(text: str) -> set[str]:
    """The anchors of headings, as code hosts make them: every blank a dash, letters of all alphabets."""
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings(text)}


def site_anchors(text: str) -> set[str]:
    """As mkdocs makes them: plain letters only, and one dash where there are several."""
    plain = (unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode() for heading in headings(text))
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in plain}


def test_anchors_of_a_code_host_and_of_the_site_differ() -> None:
    text = "# The α of `this` - machine\n"
    assert anchors(text) == {"the-α-of-this---machine"}
    assert site_anchors(text) == {"the-of-this-machine"}


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")], ids=ids)
def test_no_link_of_the_site_leads_out_of_it(document: Path) -> None:
    """Files outside of docs/ are no part of the site: there `scripts/docs_links.py` names their path instead."""
    hook = runpy.run_path(str(ROOT / "scripts" / "docs_links.py"))["on_page_markdown"]
    docs = ROOT / "docs"
    page = SimpleNamespace(file=SimpleNamespace(src_uri=document.relative_to(docs).as_posix()))
    shown = _FENCE.sub("", hook(document.read_text(), page, {"docs_dir": str(docs)}, None))
    for link in _LINK.findall(shown):
        if not re.match(r"[a-z]+:|#", link):
            target = (document.parent / link.partition("#")[0]).resolve()
            assert target.is_relative_to(docs), f"{link}: leads out of the site"
            assert target.is_file(), f"{link}: the site has no page for a folder"


def test_counts_of_matrix_products_are_those_of_their_rows() -> None:
    """How many shapes are at 0.98 and at 0.95 of the best peer: every page says what the committed rows say."""
    results, pages = ROOT / "benchmarks" / "results", ROOT / "docs" / "kernels"
    readme, log = (pages / "README.md").read_text(), (pages / "LOG.md").read_text()

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (results / name).read_text().splitlines()]

    ratios = {row["problem"]: row["ratio"] for row in rows("matmul_untuned_h200.jsonl") if row["clock"] == "kernel"}

    def counts() -> tuple[int, int]:
        return sum(ratio >= 0.98 for ratio in ratios.values()), sum(ratio >= 0.95 for ratio in ratios.values())

    good, fair = counts()
    assert f"| kernel time | {good} of {len(ratios)} | {fair} |" in readme
    assert f"| {good} of {len(ratios)} at 0.98; **{fair} at 0.95**" in log
    for row in rows("matmul_untuned_autotune_h200.jsonl"):
        if row["clock"] == "kernel":
            ratios[row["problem"]] = min(ratios[row["problem"]], row["ratio"])
    good, fair = counts()
    assert f"| kernel time, with max-autotune on eight | {good} of {len(ratios)} | {fair} |" in readme
    assert f"with max-autotune on eight of them **{good}** and **{fair}**" in log
    for dtype in ("float16", "bfloat16"):
        tuned = [row for row in rows(f"matmul_rows_h200_{dtype}.jsonl") if row["case"]["time"] == "kernel"]
        best = [min(ratio for peer, ratio in row["speedup"].items() if peer != "a @ b alone") for row in tuned]
        count = f"{sum(ratio >= 0.98 for ratio in best)} of {len(best)}"
        assert f"in {count} shapes" in readme
        assert f"(at least 0.98), kernel time | **{count}**" in log


GRAPH_LOG, GRAPH_README = ((ROOT / "docs/graph" / name).read_text() for name in ("LOG.md", "README.md"))
COUNTS = ("none", "one", "two", "three", "four", "five")
GRAPH_MODELS = {
    "gpt2-blocks": "GPT-2 blocks", "llama-blocks": "Llama blocks", "gpt2": "GPT-2", "llama": "Llama", "bert": "BERT",
    "mistral": "Mistral", "qwen2": "Qwen2", "gemma2": "Gemma2", "gpt-neox": "GPT-NeoX", "opt": "OPT", "vit": "ViT",
    "resnet": "ResNet", "t5": "T5",
}  # fmt: skip


def _graph_rows(file: str, name: str) -> list[dict[str, Any]]:
    lines = (ROOT / "benchmarks/results" / file).read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["name"] == name]


GRAPH_STUDIES, GRAPH_CPU, GRAPH_H200 = (
    "graph_studies_neoverse_n1_2c.jsonl",
    "graph_models_neoverse_n1_2c.jsonl",
    "graph_h200.jsonl",
)


def test_in_how_many_programs_greedy_rewriting_is_stuck() -> None:
    rows = _graph_rows(GRAPH_STUDIES, "graph search")
    ahead = [row["speedup"]["greedy"] for row in rows if row["speedup"]["greedy"] >= 1.1]
    assert f"stuck in {COUNTS[len(ahead)]} of the {COUNTS[len(rows)]} programs" in " ".join(GRAPH_README.split())
    for gain in ahead:
        assert f"{gain:.2f}x" in GRAPH_LOG or f"{gain:.1f}x" in GRAPH_LOG


def test_what_computing_layers_again_costs() -> None:
    (row,) = (row for row in _graph_rows(GRAPH_STUDIES, "graph memory step") if row["case"]["way"] == "layers again")
    assert f"{row['speedup']['kept']:.2f}x the speed" in GRAPH_LOG


def test_a_step_of_gpt2_on_a_cpu() -> None:
    (roof,) = (row for row in _graph_rows(GRAPH_CPU, "graph roof") if row["case"]["model"] == "gpt2")
    (step,) = (row for row in _graph_rows(GRAPH_CPU, "graph step") if row["case"]["model"] == "gpt2")
    before, after = roof["case"]["bytes before"] / 2**30, roof["case"]["bytes"] / 2**20
    assert f"| bytes they move | {before:.2f} GiB | {after:.0f} MiB |" in GRAPH_LOG
    eager, ours = step["peers"]["eager"]["median"], step["measured"]["median"]
    assert f"| {eager:.2f} s | {ours:.2f} s, {step['speedup']['eager']:.2f}x |" in GRAPH_LOG


@pytest.mark.parametrize("file", [GRAPH_STUDIES, GRAPH_CPU])
def test_rows_of_code_that_was_not_committed_are_named(file: str) -> None:
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results" / file).read_text().splitlines()]
    changed = {row["commit"][:8] for row in rows if row["commit"].endswith("-dirty")}
    assert all(commit in GRAPH_LOG for commit in changed)


def test_memory_on_an_h200_beside_its_prediction() -> None:
    rows = _graph_rows(GRAPH_H200, "graph values")
    lines = GRAPH_LOG.splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("| GPT-2 blocks | Llama blocks |"))
    names, shares = ([cell.strip() for cell in lines[place].strip("|").split("|")] for place in (head, head + 2))
    said = {name: share.split()[0] for name, share in zip(names, shares, strict=True)}
    assert said == {
        GRAPH_MODELS[row["case"]["model"]]: f"{row['measured']['median'] / row['predicted']:.2f}" for row in rows
    }


def test_every_document_is_in_the_site() -> None:
    listed = set(re.findall(r": ([\w/\-.]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == there, "mkdocs.yml: nav names what is not there, or leaves documents out"


@pytest.mark.parametrize(
    ("row", "part"),
    [("do something", "How to"), ("look something up", "Reference"), ("know how it works", "How it works")],
)
def test_documents_are_sorted_alike_in_the_table_and_on_the_site(row: str, part: str) -> None:
    (line,) = re.findall(rf"^\| \*\*{row}\*\* \|(.*)$", (ROOT / "docs/README.md").read_text(), re.MULTILINE)
    linked = {link.partition("#")[0] for link in _LINK.findall(line)} - {"LOG.md"}  # the site has a part for logs
    (nav,) = re.findall(rf"^  - {part}:\n((?:      .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    listed = set(re.findall(r": ([\w/\-.]+\.md)$", nav, re.MULTILINE))
    assert linked
    assert linked <= listed, f"mkdocs.yml has them elsewhere: {sorted(linked - listed)}"


def test_the_reference_of_commands_is_what_the_commands_are() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert page == reference_page(), "run `python -m tilemesh.cli.reference > docs/commands.md`"
    without = [line for line in page.splitlines() if line.startswith("| `") and line.split("|")[2].strip() == ""]
    assert without == [], "an option or argument without a word of help"


def commands() -> Iterator[DocumentCommand]:
    """Every `tilemesh …` line in a fenced block for a shell."""
    for document in DOCUMENTS:
        for kind, block in _FENCE.findall(document.read_text()):
            if kind.split(" ")[0].strip() not in _SHELL:
                continue
            for line in block.replace("\\\n", " ").splitlines():
                found = re.match(r"(?:\$ )?(?:\.venv/bin/|python -m )?(tilemesh [^#|>]*)", line.strip())
                if found and "…" not in found[1]:
                    yield DocumentCommand(document, line, shlex.split(re.sub(r"[\[\]]", "", found[1]))[1:])


COMMANDS = list(commands())


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 40


@pytest.mark.parametrize("command", COMMANDS, ids=[f"{ids(c.document)}: {c.line.strip()[:60]}" for c in COMMANDS])
def test_commands_exist_with_their_options(command: DocumentCommand) -> None:
    """By what the command line itself knows, without running anything."""
    words = redirected(command.words)
    parser: Any = typer.main.get_command(make_app(words))
    while hasattr(parser, "commands"):
        if not words or words[0].startswith("-"):
            return  # `tilemesh --install-completion`, or the name alone
        assert words[0] in parser.commands, f"no command {words[0]}"
        parser, words = parser.commands[words[0]], words[1:]
    known = {name for parameter in parser.params for name in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help",
        "--debug",
    }
    before = words[: words.index("--")] if "--" in words else words
    for word in before:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"no option {word}"


def test_every_promise_of_the_security_page_names_a_test_that_is_there() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) >= 13
    for row in rows:
        held = row.rstrip(" |").rpartition("|")[2]
        tests = re.findall(r"`(test_\w+\.py|…)::(test_\w+)`", held)
        assert tests or "tests/" in held, row
        file = ""
        for name, function in tests:
            file = name if name != "…" else file
            (path,) = (ROOT / "tests").rglob(file)
            assert f"def {function}(" in path.read_text(), f"{file} has no {function}"
