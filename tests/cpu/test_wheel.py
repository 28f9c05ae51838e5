"""The package as it is released: what a wheel holds, and that it runs in an environment where the source is not."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import tilemesh

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_one_version_everywhere() -> None:
    assert re.search(rf"^## {re.escape(tilemesh.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert f"\nversion: {tilemesh.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_extra_is_in_the_table_of_extras() -> None:
    table = (ROOT / "docs/start.md").read_text()
    known = set(PROJECT["project"]["optional-dependencies"]) - {"lock"}  # versions of what `make` installs
    assert {name for name in known if f"`{name}`" not in table} == set()
    (joined,) = PROJECT["project"]["optional-dependencies"]["all"]
    assert set(re.findall(r"\w+", joined.partition("[")[2])) == known - {"all", "dev", "docs", "notebook"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    program = f"import hatchling.build, os; os.chdir({str(ROOT)!r}); hatchling.build.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=100)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    source = ROOT / "src"
    here = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == here
    assert wheel.name.startswith(f"tilemesh-{tilemesh.__version__}-py3-none-any")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_runs_where_the_source_is_not(wheel: Path, tmp_path: Path) -> None:
    """Installed in a fresh environment, which takes only its dependencies from here."""
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=True)
    python = str(fresh / "bin/python")
    environment = {"PATH": f"{fresh / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path)}

    def run(*words: str) -> str:
        ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
        assert ran.returncode == 0, f"{words}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    site = next(Path(path) for path in (fresh / "lib").glob("python*/site-packages"))
    # Behind the fresh environment's own; the .pth of an editable install is not read from there.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = run(python, "-c", "import tilemesh; print(tilemesh.__file__)").strip()
    assert Path(where).is_relative_to(fresh)
    assert run("tilemesh", "--version").split()[-1] == tilemesh.__version__
    assert "llama-3-8b" in run("tilemesh", "plan", "llama-3-8b", "--cluster", "8xh100")
    small = "model.layers=1,model.width=16,model.heads=2,model.kv_heads=1,model.mlp_width=32,model.context=32"
    settings = f"{small},train.context=0,train.batch=4,train.steps=3,sample.tokens=4,train.device=cpu"
    run("tilemesh", "train", "--mesh", "dp=1", "--out", "run", "--set", settings)
    assert (tmp_path / "run/report.html").stat().st_size > 10_000  # its style and script are in the wheel
    assert run("tilemesh", "generate", "run", "--prompt", "def ", "--tokens", "4")
    run("tilemesh", "export", "run", "folder")
    run("tilemesh", "verify", "--ranks", "2", "--models", "gpt", "--no-pairs")
