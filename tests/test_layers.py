"""The house's rules: imports only go down, and the light parts stay light."""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

import pytest

import tilemesh

ROOT = Path(tilemesh.__file__).parent

# Which parts of tilemesh a folder may import, as dotted prefixes; its own folder is always allowed.
MAY_IMPORT = {
    "core": [],
    "measure": ["core"],
    "launch": ["core"],
    "runs": ["core", "measure"],
    "data": ["core"],
    "kernels": ["core", "measure"],
    "comm": ["core", "measure"],
    "graph": ["core", "measure", "kernels"],
    "model": ["core", "kernels"],
    # Of kernels only */cost.py: see below.
    "plan": ["core", "runs", "model.config", "model.work", "kernels", "comm.schedules", "graph.ir"],
    "parallel": ["core", "measure", "kernels", "comm", "graph", "model", "plan.place"],
    "methods": ["core", "measure", "kernels", "comm", "model", "parallel"],
    "compress": ["core", "measure", "runs", "data", "kernels", "model"],
    "train": [
        *("core", "measure", "launch", "runs", "data", "kernels", "comm", "model", "parallel", "compress", "methods"),
        *("plan", "graph"),
    ],
    # Never train.
    "serve": ["core", "measure", "launch", "runs", "data", "kernels", "comm", "model", "parallel", "compress", "plan"],
    "align": [
        *("core", "measure", "launch", "runs", "data", "kernels", "comm", "model", "parallel", "compress", "methods"),
        *("plan", "train", "serve"),
    ],
    "report": ["core", "measure", "runs", "plan", "comm.schedules"],
    "bench": [
        "core",
        "measure",
        "launch",
        "runs",
        "data",
        "kernels",
        "comm",
        "model",
        "parallel",
        "compress",
        "methods",
        "plan",
        "train",
        "serve",
        "align",
        "graph",
    ],
    "cli": [""],
    "guide": [""],
}
# Folders inside a folder that may use less than it.
STRICTER = {
    "comm.schedules": ["core"],
    "model.work": ["core", "model.config", "kernels"],  # of kernels only */cost.py
    "kernels.launch": ["core", "measure", "kernels.context"],  # never an operator
    "kernels.problems": ["core"],  # every operator's cost.py needs it, which the planner reads
    "kernels.operator_bench": ["core", "kernels.accuracy", "kernels.problems", "kernels.rates"],  # never an operator
    "kernels.tuning": ["core", "measure", "kernels.launch"],
    "align.formulas": ["core"],
}
# The most lines that a room may have: raised only in the commit that adds a named capability. `make size` prints them.
MOST_LINES = {
    "core": 8_817,
    "measure": 3_028,
    "launch": 2_161,
    "runs": 2_180,
    "data": 2_673,
    "kernels": 22_108,
    "comm": 11_361,
    "graph": 8_619,
    "model": 11_352,
    "plan": 9_225,
    "parallel": 10_647,
    "methods": 1_974,
    "compress": 1_834,
    "train": 9_139,
    "serve": 10_175,
    "align": 4_606,
    "report": 6_365,
    "bench": 9_220,
    "cli": 6_946,
    "guide": 17_228,
}
SOURCE_SUFFIXES = (".py", ".c", ".cpp", ".h", ".cu", ".cuh", ".js", ".css")
THIRD_PARTY_FREE = ("core", "comm.schedules", "model.work", "plan")


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    gc.disable()  # it would look at all nodes of all files again and again, which takes twice as long as reading them
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Full names of what a file imports, wherever in the file it does; each file is read once."""
    names = set()
    for node in statements(tree_of(path).body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    if "tilemesh" in names:  # the package loads its parts when they are named
        attributes = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute))
        names |= {f"tilemesh.{node.attr}" for node in attributes if ast.unparse(node.value) == "tilemesh"}
    return frozenset(names)


def statements(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """With those inside of them: expressions, which are most of a tree, import nothing."""
    for node in nodes:
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, block, ()))


def within(name: str, prefix: str) -> bool:
    return prefix == "" or name == prefix or name.startswith(prefix + ".")


def violations(name: str, imported: Set[str]) -> list[str]:
    """What a module with this dotted name imports and should not."""
    folder = name.split(".")[0]
    if "." not in name and folder not in MAY_IMPORT:
        return []  # tilemesh/__init__.py and __main__.py
    allowed, own = MAY_IMPORT[folder], folder
    for inner, less in STRICTER.items():
        if within(name, inner):
            allowed, own = less, inner
    bad = []
    for full in sorted(imported):
        if not within(full, "tilemesh"):
            continue
        target = full.removeprefix("tilemesh").lstrip(".")
        if "." not in target and target not in MAY_IMPORT:
            continue  # the package itself: its version, its file
        if not any(within(target, prefix) for prefix in [own, *allowed]):
            bad.append(full)
        if own in ("plan", "model.work") and within(target, "kernels") and ".cost" not in target:
            bad.append(full)
    return bad


def test_imports_only_go_down() -> None:
    wrong = {dotted(path): violations(dotted(path), imports(path)) for path in modules()}
    assert len(wrong) > 300
    assert {name: imported for name, imported in wrong.items() if imported} == {}


def test_the_lowest_floors_use_the_standard_library_alone() -> None:
    inside = sys.stdlib_module_names | {"tilemesh", "__future__"}
    low = [path for path in modules() if any(within(dotted(path), folder) for folder in THIRD_PARTY_FREE)]
    outside = {dotted(path): {name.split(".")[0] for name in imports(path)} - inside for path in low}
    assert {name: imported for name, imported in outside.items() if imported} == {}


def test_of_runs_and_data_only_one_file_loads_torch() -> None:
    own = [path for path in modules() if dotted(path).split(".")[0] in ("runs", "data")]
    assert {dotted(path) for path in own if any(within(name, "torch") for name in imports(path))} == {"runs.tensors"}


def test_the_page_on_the_architecture_says_what_is_so() -> None:
    """Its table has every folder with what that may import, and the files that it names exist."""
    page = (ROOT.parents[1] / "docs" / "ARCHITECTURE.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)/` \|.*\| (.+) \|$", page, re.MULTILINE))
    assert rows.keys() == MAY_IMPORT.keys()
    for folder, words in rows.items():
        listed = set(re.findall(r"\w+", words.partition(";")[0])) & MAY_IMPORT.keys()
        if "everything" not in words and folder != "serve":
            assert listed == {name.split(".")[0] for name in MAY_IMPORT[folder]}, folder
    files = {path.relative_to(ROOT.parents[1]).as_posix() for path in ROOT.parents[1].glob("[a-z]*/**/*.py")}
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    assert {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)} == set()


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("core.plan", "tilemesh.measure.row"),
        ("measure.row", "tilemesh.launch.job"),
        ("runs.folder", "tilemesh.train.config"),
        ("runs.checkpoint", "tilemesh.parallel.shard"),
        ("data.corpus", "tilemesh.train.config"),
        ("kernels.matmul.op", "tilemesh.comm.minimal"),
        ("comm.schedules.ring", "tilemesh.measure.row"),
        ("kernels.launch.program", "tilemesh.kernels.matmul.kernel"),
        ("kernels.tuning.search", "tilemesh.kernels.matmul.config"),
        ("kernels.operator_bench", "tilemesh.kernels.softmax.reference"),
        ("kernels.softmax.reference", "tilemesh.bench.kernel.measure"),
        ("plan.search", "tilemesh.kernels.matmul.op"),
        ("plan.search", "tilemesh.model.transformer"),
        ("report.page", "tilemesh.train.loop"),
        ("serve.engine", "tilemesh.train.loop"),
        ("align.formulas.losses", "tilemesh.train.source"),
        ("train.loop", "tilemesh.align.source"),
    ],
)
def test_an_import_that_goes_up_is_seen(name: str, imported: str) -> None:
    assert violations(name, {imported}) == [imported]


def test_a_part_reached_through_the_package_is_seen(tmp_path: Path) -> None:
    (tmp_path / "sly.py").write_text("import tilemesh\ntilemesh.launch.job\n")
    assert violations("core.sly", imports(tmp_path / "sly.py")) == ["tilemesh.launch"]


COMMANDS = [f"tilemesh.{dotted(path)}" for path in sorted((ROOT / "cli" / "commands").rglob("*.py"))]
LIGHT = (
    "tilemesh",
    "tilemesh.cli.main",
    "tilemesh.launch.job",
    "tilemesh.core.config",
    "tilemesh.comm",
    "tilemesh.comm.schedules.book",
    "tilemesh.plan.choose",
    "tilemesh.kernels",
    "tilemesh.kernels.registry",
    "tilemesh.kernels.context",
    "tilemesh.kernels.scale_shift.cost",
    "tilemesh.model.config",
    "tilemesh.model.work.operations",
    "tilemesh.model.families.book",
    "tilemesh.data.config",
    "tilemesh.runs.contents",
    "tilemesh.runs.journal",
    "tilemesh.serve",
    "tilemesh.serve.protocol",
    "tilemesh.serve.scheduler",
    "tilemesh.serve.speculate",
    "tilemesh.train.config",
    "tilemesh.train.job",
    "tilemesh.graph.ir",
    "tilemesh.graph.derive",
    "tilemesh.graph.rewrite",
    "tilemesh.graph.memory",
    "tilemesh.methods.rules",
    "tilemesh.methods.simulate",
    "tilemesh.methods.record",
    *COMMANDS,
    "tilemesh.report.run_page",
    "tilemesh.report.plan_page",
)
HEAVY = {"torch", "mpi4py", "triton", "numpy"}
# One after the other in one process: what loads something heavy does so in any order, and no modules import in circles.
LOADING = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, *sorted(set(sys.modules)))
"""


def test_light_imports_load_neither_torch_nor_mpi() -> None:
    """What is in memory after the import of each; a name in the answer is the first that loaded it, or came after."""
    done = subprocess.run([sys.executable, "-c", LOADING, *LIGHT], capture_output=True, text=True, check=True)
    loaded = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines()}
    assert all(name in loaded[name] for name in LIGHT)
    assert {name: names & HEAVY for name, names in loaded.items() if names & HEAVY} == {}


def test_import_tilemesh_loads_itself_alone() -> None:
    """The promise is 0.1 s; a test cannot hold a clock to that, but it can hold what is loaded."""
    code = "import sys; before = set(sys.modules); import tilemesh; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name for name in done.stdout.split() if name.split(".")[0] not in sys.stdlib_module_names} == {"tilemesh"}


# Budgets --------------------------------------------------------------------------------------------------------------


def room_lines() -> Counter[str]:
    """Lines of source in each folder of the package."""
    counted: Counter[str] = Counter()
    for path in ROOT.glob("*/**/*"):
        if path.suffix in SOURCE_SUFFIXES:
            counted[path.relative_to(ROOT).parts[0]] += len(path.read_text().splitlines())
    return counted


def test_every_room_keeps_to_its_budget() -> None:
    lines = room_lines()
    assert lines.keys() == MOST_LINES.keys() == MAY_IMPORT.keys()
    over = {
        room: f"{count} lines, {MOST_LINES[room]} allowed" for room, count in lines.items() if count > MOST_LINES[room]
    }
    assert over == {}, "write less, or raise the budget in the commit that adds a named capability"


# Circles --------------------------------------------------------------------------------------------------------------


def graph(root: Path) -> dict[str, set[str]]:
    """Which modules of a package each of its modules imports, anywhere in the file, `if TYPE_CHECKING:` included."""
    paths = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("*.py")}
    names = {path: name.removesuffix(".__init__") for path, name in paths.items()}
    known = set(names.values())
    edges: dict[str, set[str]] = {}
    for path, name in names.items():
        within_package = {full.removeprefix("tilemesh.") for full in imports(path) if within(full, "tilemesh")}
        # `from package.module import thing` is an import of package.module, unless the thing is a module itself.
        targets = {full if full in known else full.rpartition(".")[0] for full in within_package}
        edges[name] = (targets & known) - {name}
    return edges


def circles(edges: dict[str, set[str]]) -> list[frozenset[str]]:
    """Groups of modules each of which imports all others of its group, directly or through them."""
    while leaves := {name for name, targets in edges.items() if not targets & edges.keys()}:
        edges = {name: targets for name, targets in edges.items() if name not in leaves}  # they are in no circle
    edges = {name: targets & edges.keys() for name, targets in edges.items()}

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        ahead = [start]
        while ahead:
            for target in edges[ahead.pop()] - found:
                found.add(target)
                ahead.append(target)
        return found

    reach = {name: reached(name) for name in edges}
    return sorted(
        {frozenset(other for other in reach[name] if name in reach[other]) for name in edges if name in reach[name]},
        key=sorted,
    )


def test_no_two_files_import_each_other() -> None:
    assert [sorted(circle) for circle in circles(graph(ROOT))] == []


def test_circles_of_any_length_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from tilemesh.b import thing\n")
    (tmp_path / "b.py").write_text("def late() -> None:\n    import tilemesh.c\n")
    (tmp_path / "c.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tilemesh import a\nimport tilemesh.d\n"
    )
    (tmp_path / "d.py").write_text("import sys\n")
    assert circles(graph(tmp_path)) == [frozenset("abc")]


def outside_stores(tree: ast.AST, names: Set[str]) -> list[str]:
    """Assignments to attributes of these names of anything but `self`."""
    stores = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return [ast.unparse(node) for node in stores if node.attr in names and ast.unparse(node.value) != "self"]


def test_how_a_module_of_the_model_computes_is_set_by_itself() -> None:
    """By its constructor or a method, never by an assignment from outside."""
    trees = [ast.parse((ROOT / "model" / f"{name}.py").read_text()) for name in ("linear", "norm", "embedding")]
    stores = (
        n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    )
    names = {node.attr for node in stores} - {"weight", "bias", "offset", "data"}  # parameters, which may be tied
    assert {"kind", "place", "in_features", "implementation", "wide"} <= names
    rooms = ("model", "parallel", "train", "serve", "compress", "methods")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert {str(path): found for path in files if (found := outside_stores(tree_of(path), names))} == {}
    assert outside_stores(ast.parse("norm.wide = self.wide = True\nlayer.in_features //= 2"), names) == [
        "norm.wide",
        "layer.in_features",
    ]


def test_a_class_has_its_name_to_itself() -> None:
    """One name means one thing: two classes of the same name make a reader look up which one is meant."""
    homes: dict[str, list[str]] = {}
    for path in modules():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(dotted(path))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


# State ----------------------------------------------------------------------------------------------------------------


MUTATING = {"append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert", "remove", "discard"}


def kept_by_the_process(tree: ast.Module) -> set[str]:
    """Names of a module that outlive a call: containers that functions fill, caches of functions, `global` names."""
    held = {
        target.id
        for node in tree.body
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
        if isinstance(target, ast.Name)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            words = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
            found |= {node.name} if words & {"functools.cache", "functools.lru_cache", "cache", "lru_cache"} else set()
        elif isinstance(node, ast.Global):
            found |= set(node.names)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found |= {node.value.id} & held if isinstance(node.value, ast.Name) else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING:
            found |= {node.func.value.id} & held if isinstance(node.func.value, ast.Name) else set()
    return found


def test_kernels_keep_nothing_in_modules_but_their_context_and_values_of_functions() -> None:
    """What one call can change for another is in `kernels.context`, where it can be replaced."""
    folder = ROOT / "kernels"
    found = {f"{dotted(path)}:{name}" for path in folder.rglob("*.py") for name in kept_by_the_process(tree_of(path))}
    assert found == {
        "kernels.context:current",  # the context itself
        "kernels.registry:_operators",  # filled by `register`
        "kernels.registry:_join_packages",  # what other packages offer, looked for once
        # Functions of constants, each computed once: a kernel of its source, a GPU's properties.
        "kernels.launch.program:KERNELS",
        "kernels.launch.program:_function",
        "kernels.launch.interpret:_interpreted",
        "kernels.launch.interpret:_language",
        "kernels.launch.interpret:_converts_scalars",
        "kernels.launch.gpu:gpu_of",
        "kernels.matmul.learnt:shipped",  # a file of the package, read once
        "kernels.lowbit.cpu:library",  # C functions, compiled once
        "kernels.paged_attention.cpu:library",  # the same
        "kernels.few_linear.cpu:library",
        "kernels.decode_layers.cpu:library",
        "kernels.lowbit.codes:_table",  # a format's numbers, on a device
        "kernels.launch.driver:compiled",  # a CUDA function of its source and constants
        "kernels.matmul.choose:even",  # a tile of a product's sizes
    }


def test_what_a_module_keeps_is_found() -> None:
    code = """
import functools
A, table, made, names = 1, {}, [], ["a"]
table: dict = {}
made = []
@functools.lru_cache(maxsize=4)
def cached(): return names[0]
def fill(x):
    global count
    table[x] = 1
    made.append(x)
    local = {}
    local[x] = 2
"""
    assert kept_by_the_process(ast.parse(code)) == {"cached", "count", "table", "made"}
