"""The set-up: skipped when up to date, rebuilt when broken, and clear about what it could not get.

The script runs for real, with pip and virtual environments, on a project small enough for seconds: its "torch" is a
wheel made here. The last test does the same with this project and the real torch. Each install takes seconds, so most
are `make test-setup`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pip
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "setup.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load_script()


def make_wheel(folder: Path, name: str, version: str, requires: str = "") -> str:
    """The smallest wheel pip accepts: one module, its metadata, its record. Returns its line of a lock."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{name}.py": f"version = '{version}'\n", f"{info}/METADATA": metadata, f"{info}/WHEEL": tags}
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    folder.mkdir(exist_ok=True)
    wheel_path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel_path, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel_path.read_bytes()).hexdigest()}\n"


# A build backend of a few lines, inside the project itself: nothing has to be downloaded to build it.
BACKEND = """
import base64, zipfile
from pathlib import Path

def get_requires_for_build_editable(settings=None):
    return []

def build_editable(directory, settings=None, metadata=None):
    name, info = "tilemesh-1.0-py3-none-any.whl", "tilemesh-1.0.dist-info"
    files = {
        "tilemesh.pth": str(Path(__file__).parent / "src"),
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: tilemesh\\nVersion: 1.0\\nProvides-Extra: dev\\n"
        "Provides-Extra: mpi\\nRequires-Dist: torch\\nRequires-Dist: typer; extra == 'dev'\\n"
        "Requires-Dist: pytest; extra == 'dev'\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(Path(directory, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src" / "tilemesh").mkdir(parents=True)
    (folder / "src" / "tilemesh" / "__init__.py").touch()
    (folder / "scripts").mkdir()
    shutil.copy(SCRIPT, folder / "scripts")
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n[project]\nname = "tilemesh"\n'
        'version = "1.0"\n'
    )
    wheels, locks = tmp_path / "wheels", folder / "locks"
    locks.mkdir()
    make_wheel(wheels, "torch", "9.1.0+cpu")
    (locks / "cuda.txt").write_text(make_wheel(tmp_path / "cuda", "torch", "9.1.0"))
    (locks / "train.txt").write_text(make_wheel(wheels, "typer", "1.0"))
    (locks / "serve.txt").write_text((locks / "train.txt").read_text() + make_wheel(wheels, "uvicorn", "1.0"))
    (locks / "all.txt").write_text((locks / "serve.txt").read_text() + make_wheel(wheels, "pytest", "1.0"))
    return folder


def environment(project: Path, **more: str) -> dict[str, str]:
    """pip with our wheels and no network; a HOME of its own, as on a fresh machine."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") and name != "TORCH"}
    home = project.parent / "home"
    home.mkdir(exist_ok=True)
    quiet = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project.parent / "wheels"), "PIP_CONFIG_FILE": os.devnull}
    return clean | quiet | {"HOME": str(home)} | more


def run(project: Path, **more: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(project / "scripts" / "setup.py")]
    return subprocess.run(line, env=environment(project, **more), capture_output=True, text=True, check=False)


# The script with an environment whose pip is this Python's: to install it into one of its own takes 4 s of a core.
WITH_THIS_PIP = """
import importlib.util, subprocess, sys
spec = importlib.util.spec_from_file_location("setup_script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
def make_environment(venv):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    [packages] = venv.glob("lib/python*/site-packages")
    (packages / "pip.pth").write_text(sys.argv[2])
script.make_environment = make_environment
sys.exit(script.main([]))
"""


def start_with_this_pip(project: Path) -> subprocess.Popen[str]:
    folder = project.parent / "pip"
    folder.mkdir(exist_ok=True)
    if not (folder / "pip").exists():
        (folder / "pip").symlink_to(Path(pip.__file__).parent)
    line = [sys.executable, "-c", WITH_THIS_PIP, str(project / "scripts" / "setup.py"), str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, env=environment(project), text=True, **pipes)


def torch_version(project: Path) -> str:
    line = [project / ".venv" / "bin" / "python", "-c", "import tilemesh, torch; print(torch.version)"]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()


def test_training_installs_no_tools_of_the_tests_and_an_environment_only_grows(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def make_environment(venv: Path) -> None:
        venv.mkdir()

    monkeypatch.setattr(setup, "make_environment", make_environment)
    monkeypatch.setattr(setup, "install_torch", lambda *arguments: None)
    monkeypatch.setattr(setup, "is_whole", lambda venv: True)
    monkeypatch.setattr(setup, "pip", lambda venv, *words, shown: None)
    monkeypatch.setattr(setup, "install_locked", lambda venv, folder, name: asked.append(name))
    monkeypatch.setenv("TORCH", "cpu")
    for purpose in ("train", "train", "serve", "train", "all", "serve", "all"):
        assert setup.main(["--folder", str(project), "--purpose", purpose]) == 0
    assert asked == ["train", "serve", "all"]


@pytest.mark.slow
def test_the_life_of_an_environment(project: Path) -> None:
    """Installed; up to date; requirements changed; damaged; moved. One test, because each install takes seconds."""
    first = run(project)
    assert first.returncode == 0, first.stderr
    assert "[2/3] torch, CPU build" in first.stdout
    assert torch_version(project) == "9.1.0+cpu"

    again = run(project)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")

    (project / ".venv" / "kept").touch()
    (project / "pyproject.toml").write_text((project / "pyproject.toml").read_text() + "# changed\n")
    changed = run(project)
    assert changed.returncode == 0, changed.stderr
    assert "[1/3]" not in changed.stdout
    assert (project / ".venv" / "kept").exists()

    for hurt in ("bin/python", "lib/python*/site-packages/typer.py"):
        [path] = (project / ".venv").glob(hurt)
        path.unlink()
        damaged = run(project)
        assert damaged.returncode == 0, damaged.stderr
        assert "building it anew" in damaged.stdout
        assert torch_version(project) == "9.1.0+cpu"

    moved = project.with_name("moved somewhere else")
    project.rename(moved)
    after = run(moved)
    assert after.returncode == 0, after.stderr
    assert "building it anew" in after.stdout
    assert torch_version(moved) == "9.1.0+cpu"


@pytest.mark.slow
def test_a_killed_install_is_set_up_anew(project: Path) -> None:
    """Killed at many moments, the last of them after torch: each time the next run must end well."""
    line = [sys.executable, str(project / "scripts" / "setup.py")]
    for marker in ("[1/3]", "[2/3]", "[3/3]"):
        process = subprocess.Popen(
            line, env=environment(project), stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        for text in process.stdout:
            if marker in text:
                break
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert not (project / ".venv" / setup.STAMP).exists()
    done = run(project)
    assert done.returncode == 0, done.stderr
    assert "building it anew" in done.stdout
    assert torch_version(project) == "9.1.0+cpu"


def test_two_set_ups_at_once_take_turns(project: Path) -> None:
    both = [start_with_this_pip(project) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("[1/3]" in text for text in said) == 1
    again = run(project)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", ""), "up to date"


def test_what_pip_could_not_get_is_named(tmp_path: Path) -> None:
    """Real pip, of the Python that runs this test."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with pytest.raises(setup.SetupError, match=r"^could not get no-such-widget: No matching distribution found for no"):
        setup.pip(tmp_path, "install", "--no-index", "no-such-widget", shown="a widget")
    assert "no-such-widget" in (tmp_path / "setup.log").read_text()


@pytest.mark.slow
def test_what_could_not_be_had_is_named(project: Path) -> None:
    (project.parent / "wheels" / "typer-1.0-py3-none-any.whl").unlink()
    done = run(project)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("setup: could not get typer")
    assert "Traceback" not in line


@pytest.mark.slow
def test_the_cpu_build_is_asked_of_pytorchs_own_index_where_pips_has_none(project: Path) -> None:
    """An index with the CUDA build alone: that build is not taken."""
    (project.parent / "wheels" / "torch-9.1.0+cpu-py3-none-any.whl").unlink()
    shutil.copy(project.parent / "cuda" / "torch-9.1.0-py3-none-any.whl", project.parent / "wheels")
    done = run(project)
    assert done.returncode == 1
    assert "asking PyTorch's own" in done.stdout
    assert "could not get torch==9.1.0+cpu" in done.stderr
    assert setup.TORCH_CPU_INDEX in (project / ".venv" / "setup.log").read_text()


def test_a_wheel_that_is_not_the_locked_one_is_refused(project: Path) -> None:
    make_wheel(project.parent / "wheels", "typer", "1.0", requires="Summary: another\n")
    process = start_with_this_pip(project)
    [line] = process.communicate()[1].splitlines()
    assert process.returncode == 1
    assert line.startswith("setup: could not get the packages of locks/all.txt: ")
    assert "HASHES" in line
    assert not (project / ".venv" / setup.STAMP).exists()


def test_the_locks_hold_what_the_project_asks_for() -> None:
    """Every requirement of an extra, direct ones by a version that fits; after a change `make lock` makes them anew."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    base = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    chosen = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    with_torch = locked_versions("cuda")
    for name, wanted in {
        "train": [*base, *extras["hf"], *extras["mpi"]],
        "serve": [*base, *extras["hf"], *extras["mpi"], *extras["serve"]],
        "all": [*base, *(need for extra in ("dev", "hf", "mpi", "serve") for need in extras[extra])],
        "docs": extras["docs"],
        "lock": extras["lock"],
    }.items():
        versions = locked_versions(name) | with_torch
        for need in map(Requirement, [*wanted, *(line for line in chosen if name == "all" and line[:1] != "#")]):
            assert canonicalize_name(need.name) in versions, f"locks/{name}.txt lacks {need.name}: run `make lock`"
            [version] = versions[canonicalize_name(need.name)]
            assert need.specifier.contains(version), f"locks/{name}.txt has {need.name} {version}: run `make lock`"


@pytest.mark.parametrize("flavour", ["cpu", "cuda"])
def test_an_image_is_set_up_from_the_locks(flavour: str) -> None:
    text = (ROOT / "docker" / f"{flavour}.Dockerfile").read_text(encoding="utf-8")
    assert f"TORCH={flavour} python /src/scripts/setup.py --purpose serve\n" in text
    assert "pip install" not in text
    assert locked_versions("train").items() <= locked_versions("serve").items() <= locked_versions("all").items()


def locked_versions(name: str) -> dict[str, list[str]]:
    """The versions in a lock, all of them with hashes; no address of an index is in it."""
    text = (ROOT / "locks" / f"{name}.txt").read_text(encoding="utf-8")
    assert "://" not in text
    versions: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?=\w)", text.partition("\n")[2]):
        found = re.match(r"([\w-]+)==([\w.]+)", entry)
        assert found, entry
        assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry)) == entry.count("\n    --hash") > 0, entry
        versions.setdefault(canonicalize_name(found[1]), []).append(found[2])
    return versions


def test_torch_is_one_of_two_builds(project: Path) -> None:
    wrong = run(project, TORCH="gpu")
    assert (wrong.returncode, wrong.stderr) == (1, "setup: TORCH=gpu: expected TORCH=cpu or TORCH=cuda\n")


@pytest.mark.slow
def test_torch_says_which_build(project: Path) -> None:
    shutil.copy(project.parent / "cuda" / "torch-9.1.0-py3-none-any.whl", project.parent / "wheels")
    (project.parent / "wheels" / "torch-9.1.0+cpu-py3-none-any.whl").unlink()
    assert run(project, TORCH="cuda").returncode == 0
    assert torch_version(project) == "9.1.0"


def test_without_a_word_the_gpu_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, flavour in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(setup, "has_nvidia_gpu", lambda gpu=gpu: gpu)
        assert setup.torch_flavour({}) == flavour
        assert setup.torch_flavour({"TORCH": "CPU"}) == "cpu"


@pytest.mark.slow
def test_a_python_without_ensurepip_gets_pip_another_way(project: Path, tmp_path: Path) -> None:
    """As on Debian: `venv` is there, `ensurepip` is not. A module of that name which fails stands in for it."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "ensurepip.py").write_text("raise ImportError('not here')\n")
    make_pip_wheel(Path(pip.__file__).parent, project.parent / "wheels")
    done = run(project, PYTHONPATH=str(hidden))
    assert done.returncode == 0, done.stderr
    assert torch_version(project) == "9.1.0+cpu"


def make_pip_wheel(package: Path, folder: Path) -> None:
    """The installed pip as a wheel again: what an index would hand out."""
    info = "pip-99.0.dist-info"
    with zipfile.ZipFile(folder / "pip-99.0-py3-none-any.whl", "w") as wheel:
        names = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        for path in names:
            wheel.write(path, path.relative_to(package.parent))
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: pip\nVersion: 99.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        rows = [str(path.relative_to(package.parent)) for path in names] + [
            f"{info}/{x}" for x in ("METADATA", "WHEEL", "RECORD")
        ]
        wheel.writestr(f"{info}/RECORD", "".join(f"{row},,\n" for row in rows))


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_thing_moved_then_killed_half_way(tmp_path: Path) -> None:
    """This checkout's own environment in another place, then `make setup` killed while torch installs, then again."""
    clone = tmp_path / "moved"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    # The same files under a second name are as good as moved: set-up takes a folder away, it changes nothing in it.
    shutil.copytree(ROOT / ".venv", clone / ".venv", symlinks=True, copy_function=link_or_copy)
    environ = {name: value for name, value in os.environ.items() if name != "TORCH"} | {"TORCH": "cpu"}
    process = subprocess.Popen(
        ["make", "setup"], cwd=clone, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    said = []
    for text in process.stdout:
        said.append(text)
        if "Installing collected packages: torch" in text:
            break
    assert any("building it anew" in text for text in said), said
    time.sleep(2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (clone / ".venv" / setup.STAMP).exists()
    subprocess.run(["make", "setup"], cwd=clone, env=environ, check=True)
    assert subprocess.run([clone / ".venv" / "bin" / "tilemesh", "doctor"], check=False).returncode == 0
    assert (ROOT / ".venv" / setup.STAMP).exists()


def test_no_target_of_make_replaces_the_editable_install() -> None:
    """`pip install .` would put a copy of the package in place of this checkout, and later edits would do nothing; what
    is installed is locked."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    installs = [line.split() for line in lines if "pip install" in line]
    assert installs
    assert all({"--no-deps", "--require-hashes", "-r"} <= {*words} for words in installs)
