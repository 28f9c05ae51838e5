"""A small model's folder, and a server process of it: for the tests that speak to one."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilemesh.model import huggingface
from tilemesh.model.config import ModelConfig
from tilemesh.model.transformer import Transformer

CONFIG = ModelConfig(
    layers=2, width=32, heads=4, kv_heads=2, vocabulary=258, context=96, norm="rmsnorm", positions="rotary",
    activation="swiglu", biases=False, tied=False,
)  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RUNNING, WAITING = 4, 8


def make_folder(path: Path, **config: int) -> Path:
    """A Hugging Face folder with random weights, a tokenizer of bytes and a chat template."""
    import tokenizers

    model = Transformer(replace(CONFIG, **config), seed=2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
        assert model.output is not None
        model.output.weight[128:] = 0  # mostly ASCII, so that texts can be read
    huggingface.save(model, path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.save(str(path / "tokenizer.json"))
    described = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    return path


class Serving:
    """A server process, and where it listens."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.folder, self.more = folder, more
        self._start(port=0)

    def _start(self, port: int) -> None:
        words = ["serve", str(self.folder), "--port", str(port), "--running", str(RUNNING), "--waiting", str(WAITING)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tilemesh", *words, *self.more], stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
                self.port = int(found[1])
                break
        else:
            raise AssertionError("".join(said))

    def kill(self) -> None:
        """As a machine that runs out of memory does it."""
        self.process.kill()
        self.process.wait(30)

    def start_again(self) -> None:
        """On the same port."""
        self._start(self.port)

    @property
    def client(self) -> Any:
        import openai

        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60)

    def send(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            return response.status, response.read(), dict(response.headers)
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        _, content, _ = self.send("GET", "/metrics")
        (line,) = (line for line in content.decode().splitlines() if line.startswith(name + " "))
        return float(line.split()[1])

    def wait_for(self, name: str, value: float) -> None:
        end = time.monotonic() + 30
        while (found := self.metric(name)) != value:
            assert time.monotonic() < end, f"{name} is {found}, and never became {value}"
            time.sleep(0.02)

    def wait_until_idle(self) -> None:
        self.wait_for("tilemesh_running_requests", 0)
        self.wait_for('tilemesh_pages{state="used"}', 0)
        self.wait_for("tilemesh_waiting_requests", 0)
