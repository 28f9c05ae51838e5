"""From `tilemesh serve` of a large model on a GPU to its first token, graphs captured and kernels compiled on the way.

    python benchmarks/serve_start_h200.py make FOLDER [SHAPE]     # random weights, bfloat16, as a Hugging Face folder
    python benchmarks/serve_start_h200.py time FOLDER             # kernels are compiled anew; the page cache is dropped

The weights are read from the disk if the page cache could be dropped, which only root may do; the line says which.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import torch

from tilemesh.bench.serve.models import random_served
from tilemesh.bench.serve.peers import write_folder
from tilemesh.model.config import preset


def make(folder: Path, shape: str = "llama-3-8b") -> None:
    served = random_served(shape, preset(shape), torch.bfloat16, "cuda")
    write_folder(served.model, folder)
    os.sync()
    print(f"{folder}: {sum(one.stat().st_size for one in folder.iterdir()) / 1e9:.1f} GB")


def dropped_caches() -> bool:
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        return False
    return True


def time_start(folder: Path) -> None:
    dropped = dropped_caches()
    with tempfile.TemporaryDirectory() as kernels:
        command = [sys.executable, "-m", "tilemesh", "serve", str(folder), "--device", "cuda", "--port", "0"]
        begun = time.perf_counter()
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"TRITON_CACHE_DIR": kernels}
        )
        assert process.stderr is not None
        said: list[str] = []
        port = None
        for line in process.stderr:
            said.append(line)
            if found := re.search(r":(\d+)/v1", line):
                port = int(found[1])
                break
        if port is None:
            sys.exit(f"it did not start: {''.join(said)[-2000:]}")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        listening = time.perf_counter() - begun
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", body, timeout=120) as reply:
            reply.read()
        first = time.perf_counter() - begun
        process.terminate()
        process.wait()
    row = {"name": "serve, start", "listening_s": listening, "first_token_s": first, "cold_disk": dropped}
    print(json.dumps({**row, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))


if __name__ == "__main__":
    {"make": make, "time": time_start}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
