"""What a user would serve with instead, each in a process of its own: libraries of others bring threads of their own,
and some end a process that has torch in it.

A peer is opened once (outside the timed part), then answers loads, all requests at once, greedily and with the wanted
number of tokens; it times itself. Loads and answers cross as lines of JSON. One that is not installed says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilemesh.bench.serve.load import LoadRequest
from tilemesh.core.cores import available_cores
from tilemesh.model import huggingface
from tilemesh.model.transformer import Transformer

PEERS: Mapping[str, tuple[str, ...]] = {
    "transformers-static": ("transformers",),
    "transformers-continuous": ("transformers",),
    "openvino-genai": ("openvino_genai", "gguf"),
    "ctranslate2": ("ctranslate2", "transformers"),
    "llama.cpp": ("llama_cpp", "gguf"),
}
"""By name: the packages that it needs. None of them is a dependency of ours."""
_OPEN_S, _RUN_S = 120.0, 300.0


def write_folder(model: Transformer, folder: Path) -> Path:
    """The model as every peer reads it: weights, configuration, and a tokenizer whose tokens are t0, t1, ..."""
    huggingface.save(model, folder)
    tokens = {f"t{number}": number for number in range(model.config.vocabulary)}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "t0"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    special_tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "t0",
        "eos_token": "t1",
        "bos_token": "t2",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(special_tokens))
    return folder


class PeerProcess:
    """One peer. `why` says why there is none; use it with `with`, or call `close`."""

    def __init__(self, name: str, folder: Path, dtype: str, device: str) -> None:
        self.name = name
        self.version = ""
        missing = [package for package in PEERS[name] if importlib.util.find_spec(package) is None]
        self.why = f"{', '.join(missing)} not installed" if missing else ""
        self._process: subprocess.Popen[str] | None = None
        if self.why:
            return
        command = [sys.executable, "-m", "tilemesh.bench.serve.peer_process", name, str(folder), dtype, device]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(available_cores()), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        if device == "cpu":  # transformers' continuous batching takes a GPU that it sees, whatever the model is on
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip
        opened = self._answer(_OPEN_S)
        self.version = str(opened.get("version", ""))

    def run(self, load: Sequence[LoadRequest], limit_s: float = _RUN_S) -> float | None:
        """Seconds for all answers; None where it failed, and `why` then says so."""
        if self._process is None or self.why:
            return None
        assert self._process.stdin is not None
        try:
            body = json.dumps([{"prompt": request.prompt, "output": request.output} for request in load])
            self._process.stdin.write(body + "\n")
            self._process.stdin.flush()
        except OSError:
            self.why = f"its process ended with code {self._process.poll()}"
            return None
        seconds = self._answer(limit_s).get("seconds")
        return float(seconds) if seconds is not None else None

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            code = self._process.poll()
            self.why = f"no answer within {limit_s:.0f} s" if not ready else f"its process ended (code {code})"
            self._process.kill()  # else it goes on computing while others are timed
            return {}
        answer = json.loads(line)
        self.why = str(answer.get("why", ""))
        return dict(answer)
