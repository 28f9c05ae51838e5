"""Make `.venv` hold what this checkout needs, and do nothing when it already does.

`make train` and `make test` run this first. It needs only Python and its standard library: no package, no
activated environment. The environment counts as good when a stamp, written last of all, matches what is
wanted now; anything else (a killed install, a moved folder, another Python) is rebuilt rather than guessed at.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

MINIMUM = (3, 11)
STAMP = "tilemesh-setup.json"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # where PyTorch itself publishes its CPU builds
GET_PIP = "https://bootstrap.pypa.io/get-pip.py"  # pip's own installer, for a Python that has none
SHOWN = re.compile(r"^(Downloading|Processing|Installing|Successfully installed)\b")

# Run by the environment's own Python: each package's RECORD lists its files, relative to where packages lie.
LOOK = """
import csv, glob, os, sys, sysconfig
os.chdir(sysconfig.get_path("purelib"))
records = glob.glob("*.dist-info/RECORD")
paths = (row[0] for record in records for row in csv.reader(open(record, encoding="utf-8")) if row)
sys.exit(not records or not all(os.path.exists(path) for path in paths if not path.endswith(".pyc")))
"""


# The locks by what they are for; each holds those before it. `make train` installs neither test nor lint tools, an
# image (docker/) also what serves.
PURPOSES = ("train", "serve", "all")


class SetupError(Exception):
    """One line for the user."""


def main(argv):
    parser = argparse.ArgumentParser(description="Make .venv hold what this checkout needs.")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parents[1], help=argparse.SUPPRESS)
    parser.add_argument("--purpose", choices=PURPOSES, default="all", help="which of locks/ to install")
    asked = parser.parse_args(argv)
    folder = asked.folder.resolve()
    if sys.version_info < MINIMUM:
        return run_with_newer_python(argv)
    try:
        with locked(folder / ".setup.lock"):
            set_up(folder, asked.purpose)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next `make` starts the set-up anew", file=sys.stderr)
        return 130
    return 0


def run_with_newer_python(argv):
    """`python3` is too old: another one may stand beside it."""
    for minor in range(20, MINIMUM[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found:
            return subprocess.run([found, __file__, *argv], check=False).returncode
    have = ".".join(map(str, sys.version_info[:3]))
    print(
        f"setup: Python {have} is too old; tilemesh needs 3.11 or newer: make PYTHON=/path/to/python3", file=sys.stderr
    )
    return 1


def set_up(folder, purpose):
    venv = folder / ".venv"
    flavour = torch_flavour(os.environ)
    found = read_stamp(venv)
    # What was installed for another command stays: an environment only ever grows until it is built anew.
    held = "train" if found is None else found.get("purpose", "all")
    wanted = {**fingerprint(folder, flavour), "purpose": max(purpose, held, key=PURPOSES.index)}
    whole = found is not None and packages(venv) >= set(found.pop("packages", ["unknown"])) and is_whole(venv)
    if whole and found == wanted:
        return
    began = time.monotonic()
    # Only what the project asks for has changed: the environment itself is good, so pip brings it up to date.
    kept = (
        found is not None
        and is_whole(venv)
        and all(found.get(key) == wanted[key] for key in ("place", "python", "torch"))
    )
    (venv / STAMP).unlink(missing_ok=True)
    if kept:
        say("up to date with the changed requirements …")
    else:
        wanted["purpose"] = purpose
        if venv.exists():
            say("the environment in .venv is incomplete, moved or of another Python: building it anew")
            shutil.rmtree(venv)
        say(f"[1/3] a Python {sys.version_info[0]}.{sys.version_info[1]} environment in .venv")
        make_environment(venv)
        say(f"[2/3] torch, {flavour.upper()} build")
        install_torch(venv, folder, flavour)
        say("[3/3] tilemesh and the rest")
    install_locked(venv, folder, wanted["purpose"])
    pip(venv, "install", "--no-deps", "--no-build-isolation", "-e", str(folder), shown="this checkout")
    write_stamp(venv, {**wanted, "packages": sorted(packages(venv))})
    say(f"done in {time.monotonic() - began:.0f} s")


# What is wanted, what is there ------------------------------------------------------------------------


def torch_flavour(environ):
    """`cpu` or `cuda`: TORCH decides, else whether this machine has an NVIDIA GPU."""
    asked = environ.get("TORCH", "").strip().lower()
    if asked in ("cpu", "cuda"):
        return asked
    if asked:
        raise SetupError(f"TORCH={environ['TORCH']}: expected TORCH=cpu or TORCH=cuda")
    return "cuda" if has_nvidia_gpu() else "cpu"


def has_nvidia_gpu():
    if shutil.which("nvidia-smi"):
        try:
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
            return listed.returncode == 0 and "GPU" in listed.stdout
        except (OSError, subprocess.TimeoutExpired):
            return False
    return Path("/proc/driver/nvidia/gpus").is_dir() and any(Path("/proc/driver/nvidia/gpus").iterdir())


def fingerprint(folder, flavour):
    """Everything that, when it changes, makes the present environment the wrong one."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", *(f"locks/{lock}.txt" for lock in (*PURPOSES, "cuda"))):
        digest.update((folder / name).read_bytes())
    digest.update(Path(__file__).read_bytes())
    return {
        "place": str(folder),
        "python": f"{sys.version} {sys.base_prefix}",
        "torch": flavour,
        "asked": digest.hexdigest(),
    }


def read_stamp(venv):
    try:
        return json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return None


def write_stamp(venv, wanted):
    temporary = venv / (STAMP + ".new")
    temporary.write_text(json.dumps(wanted, indent=1))
    temporary.replace(venv / STAMP)


def packages(venv):
    """Names of the packages installed there."""
    return {folder.name.split("-")[0] for folder in venv.glob("lib/python*/site-packages/*.dist-info")}


def is_whole(venv):
    """Whether its Python starts and every file that pip has installed is there."""
    try:
        return (
            subprocess.run(
                [venv / "bin" / "python", "-c", LOOK], capture_output=True, timeout=60, check=False
            ).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


# Making it --------------------------------------------------------------------------------------------


def make_environment(venv):
    made = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        return
    # Debian ships Python without ensurepip: make the environment bare and bring pip in another way.
    shutil.rmtree(venv, ignore_errors=True)
    bare = subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(venv)], capture_output=True, text=True, check=False
    )
    if bare.returncode != 0:
        raise SetupError(f"{sys.executable} -m venv failed: {last_line(bare.stderr or bare.stdout)}")
    tried = []
    ways = (pip_from_this_python, pip_from_system_wheel, pip_from_index, pip_from_distribution, pip_from_installer)
    for way in ways:
        try:
            if way(venv):
                return
        except (OSError, subprocess.SubprocessError) as error:
            tried.append(f"{way.__name__}: {last_line(str(error))}")
    raise SetupError(
        f"{sys.executable} has no pip and none could be fetched ({'; '.join(tried) or 'no source found'}): "
        "install it (Debian: python3-venv), or make PYTHON=/path/to/another/python3"
    )


def pip_from_this_python(venv):
    command = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install", "-q", "pip"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def pip_from_system_wheel(venv):
    return any(install_pip_wheel(venv, wheel) for wheel in Path("/usr/share/python-wheels").glob("pip-*.whl"))


def pip_from_index(venv):
    """From the package index the user has set for pip, read as pip would read it."""
    index = os.environ.get("PIP_INDEX_URL")
    if not index:
        return False
    page_url = index.rstrip("/") + "/pip/"
    with urllib.request.urlopen(page_url, timeout=30) as answer:
        links = re.findall(r'href="([^"]*/?pip-([\d.]+)-py3-none-any\.whl[^"]*)"', answer.read().decode())
    if not links:
        return False
    newest = max(links, key=lambda link: tuple(int(part) for part in link[1].split(".") if part))
    with tempfile.TemporaryDirectory() as scratch:
        wheel = Path(scratch, f"pip-{newest[1]}-py3-none-any.whl")
        with urllib.request.urlopen(urllib.parse.urljoin(page_url, newest[0]), timeout=60) as answer:
            wheel.write_bytes(answer.read())
        return install_pip_wheel(venv, wheel)


def pip_from_distribution(venv):
    """Debian keeps pip's wheel in a package: fetch it from the machine's own mirror, and unpack without installing."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return False
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)  # apt fetches as a user of its own
        fetch = ["apt-get", "download", "-qq", "python3-pip-whl"]
        fetched = subprocess.run(fetch, cwd=scratch, capture_output=True, check=False)
        if fetched.returncode != 0 and os.getuid() == 0:  # a machine on which nobody has read the lists yet
            subprocess.run(["apt-get", "update", "-qq"], capture_output=True, check=False)
            fetched = subprocess.run(fetch, cwd=scratch, capture_output=True, check=False)
        for package in Path(scratch).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(package), scratch], capture_output=True, check=True)
        return any(install_pip_wheel(venv, wheel) for wheel in Path(scratch).rglob("pip-*.whl"))


def pip_from_installer(venv):
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch, "get-pip.py")
        with urllib.request.urlopen(GET_PIP, timeout=30) as answer:
            script.write_bytes(answer.read())
        command = [str(venv / "bin" / "python"), str(script), "-q"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def install_pip_wheel(venv, wheel):
    """A wheel of pip can run itself and install itself."""
    command = [str(venv / "bin" / "python"), f"{wheel}/pip", "install", "-q", "--no-index", str(wheel)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def install_locked(venv, folder, name):
    """The distributions of a lock, each of them a file whose hash is in it."""
    lock = folder / "locks" / f"{name}.txt"
    pip(venv, "install", "--no-deps", "--require-hashes", "-r", str(lock), shown=f"the packages of locks/{name}.txt")


def install_torch(venv, folder, flavour):
    pinned = re.search(r"^torch==([\w.]+)", (folder / "locks" / "cuda.txt").read_text(), re.M)
    if pinned is None:
        raise SetupError(
            "locks/cuda.txt does not hold torch: expected a line such as torch==2.13.0; `make lock` makes it"
        )
    if flavour == "cuda" or sys.platform == "darwin":  # CUDA's libraries in it are for Linux alone
        install_locked(venv, folder, "cuda")
        return
    # The label +cpu is found only where a CPU build is: asking for it can never bring CUDA packages in. Every index has
    # its own file of it, so it goes by its version.
    cpu = f"torch=={pinned[1]}+cpu"
    try:
        pip(venv, "install", "--no-deps", cpu, shown=cpu)
    except SetupError:
        say("      pip's index has no CPU build of it: asking PyTorch's own")
        pip(venv, "install", "--no-deps", "--index-url", TORCH_CPU_INDEX, cpu, shown=cpu)


def pip(venv, *arguments, shown):
    """Run pip, showing what it is at; everything it says goes to .venv/setup.log."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    said = []
    with open(venv / "setup.log", "a") as log:
        log.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        try:
            for line in process.stdout:
                log.write(line)
                said.append(line.strip())
                if SHOWN.match(line.strip()):
                    say(f"      {line.strip()[:100]}")
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
    if code != 0:
        what = missing_package(said) or shown
        why = last_line("\n".join(said))
        raise SetupError(f"could not get {what}: {why} (is there a network? all pip said: {venv}/setup.log)")


def missing_package(said):
    """The requirement pip could not satisfy, if that is why it failed."""
    for line in reversed(said):
        match = re.search(r"No matching distribution found for (\S+)", line)
        if match:
            return match[1]
    return None


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: ")


class locked:  # noqa: N801  (a context manager that reads as a word)
    """One set-up at a time in a folder: `make train` and `make test` may be started together."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        self.file = open(self.path, "w")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another set-up is running in this folder: waiting for it")
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_):
        self.file.close()


def say(text):
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
