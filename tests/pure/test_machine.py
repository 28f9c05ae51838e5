"""The machine's identity, versions, commit and command: stable, and never somebody else's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tilemesh.core.cores import available_cores
from tilemesh.measure import machine
from tilemesh.measure.row import Row

GIB = 2**30


def describe(**changes: object) -> machine.Machine:
    fields = {"cpu": "Neoverse-N1", "granted": 2, "usable": 2, "memory": int(23.5 * GIB), "gpus": ()}
    return machine.describe(**(fields | changes))  # type: ignore[arg-type]


def test_the_id_is_made_of_what_decides_speed() -> None:
    base = describe()
    assert base.id.startswith("neoverse-n1-2c-24g-")
    assert describe().id == base.id
    assert describe(memory=int(23.4 * GIB)).id == base.id  # kernels report a little less, not always the same
    assert describe(usable=1).id == base.id  # a pinned rank is on the same machine
    different = [
        describe(cpu="Neoverse-V2"),
        describe(granted=4),
        describe(memory=31 * GIB),
        describe(gpus=("NVIDIA H200",)),
    ]
    assert len({base.id, *(one.id for one in different)}) == 5


def test_words_for_people() -> None:
    assert describe(usable=1).words == "Neoverse-N1, 1 core, 23.5 GiB, no GPU"
    eight = describe(gpus=("NVIDIA H200",) * 8)
    assert eight.words.endswith("8x NVIDIA H200")
    assert eight.id.startswith("h200-")


def test_this_machine_is_the_same_each_time_and_cores_are_what_we_may_use() -> None:
    here = machine.this_machine()
    machine.this_machine.cache_clear()
    assert machine.this_machine() == here
    assert here.cores == available_cores() >= 1
    assert here.memory_bytes > 2**20
    assert machine.granted_cores() >= here.cores


@pytest.mark.parametrize(("gib", "rounded"), [(0.4, 0.5), (1.0, 1), (1.4, 1.5), (7.7, 8), (23.5, 24), (125.6, 128)])
def test_memory_is_rounded_up(gib: float, rounded: float) -> None:
    assert machine.round_up_gib(int(gib * GIB)) == rounded


def test_a_bound_on_memory_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1048576\n")
    assert machine.memory_bytes(tmp_path) == 1048576
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_bytes(tmp_path) > 1048576


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS asks sysctl")
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("model name\t: Intel(R)  Xeon(R) CPU @ 2.2GHz\nflags\t: a: b\n", "Intel(R) Xeon(R) CPU @ 2.2GHz"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "Neoverse-N1"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xfff\n", "aarch64 CPU 0x41/0xfff"),
        ("BogoMIPS : 1\n", "aarch64 CPU"),
    ],
)
def test_the_processors_name(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert machine.cpu_name(tmp_path / "cpuinfo", "aarch64") == name
    assert machine.cpu_name(tmp_path / "absent", "riscv64") == "riscv64 CPU"


def test_versions_say_what_is_there() -> None:
    found = machine.versions()
    assert found["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert {"tilemesh", "numpy"} <= set(found)
    assert "" not in found.values()


def git(folder: Path, *words: str) -> str:
    line = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false", *words]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    package = tmp_path / "src" / "tilemesh"
    package.mkdir(parents=True)
    (package / "a.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    machine.commit.cache_clear()
    return tmp_path


def test_the_commit_of_a_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = checkout / "src" / "tilemesh"
    head = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as a hook would set it
    assert machine.commit(package) == head
    (checkout / "results.jsonl").write_text("{}")  # a bench writes beside the code: what ran is still the commit
    machine.commit.cache_clear()
    assert machine.commit(package) == head
    (package / "a.py").write_text("changed")
    machine.commit.cache_clear()
    assert machine.commit(package) == f"{head}-dirty"


def test_a_repository_around_an_installed_package_is_not_ours(checkout: Path) -> None:
    installed = checkout / "venv" / "site-packages" / "tilemesh"
    installed.mkdir(parents=True)
    assert machine.commit(installed) is None


def test_no_repository_or_no_commit_is_none(tmp_path: Path) -> None:
    package = tmp_path / "src" / "tilemesh"
    package.mkdir(parents=True)
    machine.commit.cache_clear()
    assert machine.commit(package) is None
    git(tmp_path, "init", "-q")
    machine.commit.cache_clear()
    assert machine.commit(package) is None


@pytest.mark.parametrize(
    ("argv", "original", "line"),
    [
        (
            ["/e/bin/tilemesh", "bench", "a b"],
            ["/e/bin/python", "/e/bin/tilemesh", "bench", "a b"],
            "tilemesh bench 'a b'",
        ),
        (["/x/main.py", "-m"], ["python3", "-m", "tilemesh", "-m"], "python -m tilemesh -m"),
        (["bench.py", "-m", "2"], ["python3", "bench.py", "-m", "2"], "python bench.py -m 2"),
        (["/far/away/bench.py"], ["python3", "/far/away/bench.py"], "python bench.py"),
        (["-c", "x"], ["python3", "-c", "print(1)", "x"], "python -c 'print(1)' x"),
        ([""], ["python3"], "python"),
    ],
)
def test_the_command_that_reproduces_it(argv: list[str], original: list[str], line: str) -> None:
    assert machine.command(argv, original) == line


def test_a_stamp_completes_a_row() -> None:
    missing = {"measured": "not run", "limit": "none", "peers": "none"}
    row = Row(name="x", case={}, unit="s", predicted=1.0, measured=None, limit=None, missing=missing, **machine.stamp())
    assert row.machine == machine.this_machine().id


def test_these_modules_load_without_torch() -> None:
    modules = ["sample", "row", "table", "timing", "ranks", "machine", "trace", "figure"]
    code = (
        f"import sys\nfor name in {modules}: __import__('tilemesh.measure.' + name)\n"
        "import tilemesh.cli.commands.calibrate\n"
        "assert not {'torch', 'mpi4py', 'numpy'} & set(sys.modules), 'loaded'"
    )
    source = str(Path(machine.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, "ABC"),
        ("", ""),
        ("1", "B"),
        ("2,0", "CA"),
        ("0,7,1", "A"),
        ("-1", ""),
        ("GPU-5f3e", "A"),
        (" 0 , 1", "AB"),
    ],
)
def test_hidden_gpus_are_not_usable(listed: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_names", lambda: ("A", "B", "C"))
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert "".join(machine.usable_gpus()) == expected
