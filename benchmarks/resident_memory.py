"""Where the resident memory of training ranks goes on a CPU, and what glibc's settings do to it (Linux, GPUs hidden):

    python benchmarks/resident_memory.py FOLDER [--seconds 56] [--cores 8-15]

Layouts of the tiny preset run side by side on two cores each, with one setting changed at a time. Of some of them a
thread inside each rank notes the fullest moment: resident memory by kind, what malloc has given out and what it keeps,
and the largest mappings. Rows go to FOLDER/resident_memory.jsonl as they come. `kept`: freed memory stays in the heap;
`mapped`: every tensor of 128 KiB or more is a mapping of its own, which goes back when it is freed; `malloc`: torch's
aligned allocations are made by malloc instead of posix_memalign (an interposed library, where there is a C compiler).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
STEPS = 14
LAYOUTS = {
    "one": ("dp=1", "plan.microbatch=16"),
    "dp2": ("dp=2", "plan.microbatch=8"),
    "tp2": ("tp=2", "plan.microbatch=16"),
    "dp2tp2": ("dp=2,tp=2", "plan.microbatch=8"),
    "tp4": ("tp=4", "plan.microbatch=16"),
    "pp2": ("pp=2", "plan.microbatch=4,plan.accumulation=4"),
    "pp2-zbv": ("pp=2", "plan.microbatch=4,plan.accumulation=4,plan.schedule=zb-v"),
    "dp2pp2": ("dp=2,pp=2", "plan.microbatch=2,plan.accumulation=4"),
    "dp2-zero1": ("dp=2", "plan.microbatch=8,plan.zero=1"),
    "dp4-zero3": ("dp=4", "plan.microbatch=4,plan.zero=3"),
}
MAPPED = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}
KEPT = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824"}
ARENA = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
NO_POOLS = {"MKL_DISABLE_FAST_MM": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}

# Mangled names of c10::alloc_cpu and c10::free_cpu, which every tensor of torch on a CPU goes through.
ALIGNED_BY_MALLOC = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
void *_ZN3c109alloc_cpuEm(size_t size) {
    if (!size) return 0;
    char *block = malloc(size + 80);
    if (!block) return 0;
    uintptr_t aligned = ((uintptr_t)block + 16 + 63) & ~(uintptr_t)63;
    ((void **)aligned)[-1] = block;
    return (void *)aligned;
}
void _ZN3c108free_cpuEPv(void *data) { if (data) free(((void **)data)[-1]); }
"""

# Runs inside every rank: Python imports it when it starts.
WATCH = r"""
import atexit, os, sys, threading
def used(folder):
    import json, resource
    usage = resource.getrusage(resource.RUSAGE_SELF)
    told = {"page_faults": usage.ru_minflt, "user_s": usage.ru_utime, "system_s": usage.ru_stime}
    with open(os.path.join(folder, f"{os.getpid()}.used"), "w") as file:
        json.dump(told, file)
def watch(folder):
    import ctypes, json, time
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in names]
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Info
    most = mapped_at = 0
    mappings = []
    while True:
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file if line.startswith(("VmRSS", "Rss")))
        now = {name: int(text.split()[0]) / 1024 for name, text in lines.items()}
        if now["VmRSS"] > most + 1:
            most, info = now["VmRSS"], libc.mallinfo2()
            if most > mapped_at + 8:
                mapped_at, mappings = most, []
                with open("/proc/self/smaps") as file:
                    name = ""
                    for line in file:
                        words = line.split()
                        if "-" in words[0] and not words[0].endswith(":"):
                            name = words[5] if len(words) > 5 else "anonymous"
                        elif words[0] == "Rss:":
                            mappings.append([int(words[1]) / 1024, name])
                        elif words[0] == "AnonHugePages:" and int(words[1]):
                            mappings[-1][1] += f" (huge pages {int(words[1]) // 1024} MiB)"
                mappings = sorted(mappings, reverse=True)[:10]
            heap = {"heap": info.arena, "given_out": info.uordblks, "free": info.fordblks, "mapped": info.hblkhd}
            told = {**now, **{name: size / 2**20 for name, size in heap.items()}, "mappings_at": mapped_at,
                    "mappings": mappings}
            path = os.path.join(folder, f"{os.getpid()}.json")
            with open(path + ".new", "w") as file:
                json.dump(told, file)
            os.replace(path + ".new", path)
        time.sleep(0.015)
folder = os.environ.get("RESIDENT_MEMORY")
if folder and ("tilemesh.launch.rank" in sys.orig_argv or "dp=1" in sys.orig_argv):
    atexit.register(used, folder)
    if "RESIDENT_MEMORY_WATCH" in os.environ:
        threading.Thread(target=watch, args=(folder,), daemon=True).start()
"""

NORM = """
import resource, torch
from tilemesh.measure.calibrate_layer import _norm
torch.set_num_threads(1)
began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
outcome = _norm(1, 1.0)
print("norm", outcome.measured, "page faults", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - began)
"""


@dataclass(frozen=True)
class Case:
    name: str
    layout: str
    environ: dict[str, str]
    watched: bool = False
    transport: str = "auto"
    huge_pages: bool = True


def cases(preload: str | None) -> list[Case]:
    """What names the cause first, then what a setting is worth, then the other layouts."""
    first = [Case("dp2, watched", "dp2", {}, True), Case("tp4, watched", "tp4", {}, True)]
    first.append(Case("dp2 mapped, watched", "dp2", MAPPED, True))
    if preload:
        first.append(Case("dp2 malloc, watched", "dp2", {"LD_PRELOAD": preload}, True))
        first.append(Case("tp4 malloc", "tp4", {"LD_PRELOAD": preload}))
    first += [Case("norm", "", {}), Case("norm kept", "", KEPT)]
    first += [
        Case("dp2", "dp2", {}),
        Case("dp2 kept", "dp2", KEPT),
        Case("one", "one", {}),
        Case("one kept", "one", KEPT),
    ]
    first += [
        Case("dp2 without huge pages", "dp2", {}, huge_pages=False),
        Case("dp2 without pools of MKL and oneDNN", "dp2", NO_POOLS),
        Case("dp2 over gloo", "dp2", {}, transport="torch"),
        Case("dp2 with one arena", "dp2", ARENA),
    ]
    others = [name for name in LAYOUTS if name != "dp2"]
    first += [Case(f"{name} mapped", name, MAPPED) for name in ("tp4", "one", "pp2")]
    first += [Case(f"{name} kept", name, KEPT) for name in ("tp4", "pp2")]
    return first + [Case(f"{name} mapped", name, MAPPED) for name in others if name not in ("tp4", "one", "pp2")]


def without_huge_pages() -> None:
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE, which children inherit


def run(case: Case, cores: list[int], work: Path, ends: float) -> dict[str, object]:
    folder = work / case.name.replace(" ", "-").replace(",", "")
    folder.mkdir()
    environ = {**os.environ, **case.environ, "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(work / "cache")}
    environ |= {"PYTHONPATH": f"{work}/watch:{SOURCE}", "RESIDENT_MEMORY": str(folder)}
    if case.watched:
        environ["RESIDENT_MEMORY_WATCH"] = "1"
    if case.layout:
        mesh, sets = LAYOUTS[case.layout]
        shared = f"train.steps={STEPS},checkpoint.every=0,evaluate.every=0,sample.tokens=0"
        command = [sys.executable, "-m", "tilemesh", "train", "--out", str(folder / "run"), "--mesh", mesh]
        command += ["--set", f"{sets},{shared}", "--transport", case.transport]
    else:
        command = [sys.executable, "-c", NORM]

    def before() -> None:
        os.sched_setaffinity(0, cores)
        if not case.huge_pages:
            without_huge_pages()

    began = time.monotonic()
    row: dict[str, object] = {"case": case.name, "environ": case.environ, "transport": case.transport}
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=max(1.0, ends - began), preexec_fn=before
        )
    except subprocess.TimeoutExpired:
        return row | {"error": "cut off"}
    row["seconds"] = round(time.monotonic() - began, 1)
    if done.returncode:
        return row | {"error": (done.stderr or done.stdout)[-500:]}
    if not case.layout:
        return row | {"printed": done.stdout.strip()}
    summary = json.loads((folder / "run" / "summary.json").read_text())
    grown = [
        round((peak - base) / 2**20, 1)
        for peak, base in zip(summary["peak_memory_bytes"], summary["memory_baseline_bytes"], strict=True)
    ]
    said = [line for line in done.stdout.splitlines() if line.startswith("step  ") and "loss" in line]
    steps = {key: round(1e3 * summary["step_time_s"][key], 1) for key in ("median", "p20", "p80")}
    row |= {"grown_mib": grown, "step_ms": steps, "backend": summary["backend"], "told": [said[0], said[-1]]}
    row["used"] = [json.loads(path.read_text()) for path in folder.glob("*.used")]
    if case.watched:
        told = [json.loads(path.read_text()) for path in folder.glob("*.json")]
        row["fullest"] = max(told, key=lambda one: one["VmRSS"]) if told else "not watched"
    return row


def shown(row: dict[str, object]) -> str:
    if "error" in row or "printed" in row:
        return f"{row['case']}: {row.get('error', row.get('printed'))}"
    text = (
        f"{row['case']}: grown {row['grown_mib']} MiB, step {row['step_ms']} ms, {row['backend']}, {row['seconds']} s"
    )
    text += f"\n  {row['used']}"
    fullest = row.get("fullest")
    if isinstance(fullest, dict):
        numbers = {key: round(value) for key, value in fullest.items() if isinstance(value, float)}
        text += f"\n  {numbers}\n" + "\n".join(f"  {size:7.1f} {name}" for size, name in fullest["mappings"])
    return text


def interposed(work: Path) -> str | None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    (work / "malloc.c").write_text(ALIGNED_BY_MALLOC)
    made = subprocess.run([compiler, "-O2", "-shared", "-fPIC", work / "malloc.c", "-o", work / "malloc.so"])
    return None if made.returncode else str(work / "malloc.so")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=56)
    parser.add_argument("--cores", default="8-15", help="first-last; those that there are")
    parser.add_argument("--only", default="", help="cases whose name begins so, for a rehearsal")
    asked = parser.parse_args()
    ends = time.monotonic() + asked.seconds
    asked.folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp())
    (work / "watch").mkdir()
    (work / "watch" / "sitecustomize.py").write_text(WATCH)
    first, last = map(int, asked.cores.split("-"))
    mine = sorted(os.sched_getaffinity(0))
    cores = [core for core in mine if first <= core <= last] or mine
    lanes = [cores[place : place + 2] for place in range(0, len(cores) - 1, 2)] or [cores]
    preload = interposed(work)
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    print(platform.machine(), platform.platform(), platform.libc_ver(), "lanes", lanes, "compiler", bool(preload))
    print("huge pages:", huge.read_text().strip() if huge.exists() else "unknown", flush=True)
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases(preload):
        if case.name.startswith(asked.only):
            waiting.put(case)
    lock = threading.Lock()

    def lane(cores: list[int]) -> None:
        while time.monotonic() < ends - 6:
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                return
            row = run(case, cores, work, ends)
            with lock:
                print(shown(row), flush=True)
                with (asked.folder / "resident_memory.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")

    threads = [threading.Thread(target=lane, args=(cores,)) for cores in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
