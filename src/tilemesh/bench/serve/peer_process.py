"""The process of one peer: opens the library, then answers the loads that come as lines of JSON (`peers.py`)."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

from tilemesh.core.cores import available_cores
from tilemesh.core.errors import RunError

LONG_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_CACHE_BYTES = 8 * 2**30
AskedRequest = Mapping[str, Any]
"""{"prompt": tokens, "output": how many}"""


class ServePeer(Protocol):
    def generate(self, load: Sequence[AskedRequest]) -> None:
        """Answer all, or raise."""
        ...


def _most(load: Sequence[AskedRequest]) -> int:
    return max(int(request["output"]) for request in load)


def _alike(load: Sequence[AskedRequest]) -> int:
    """The tokens of every answer, for a call that takes one number for all: others would compute more than was asked,
    and be counted as slower."""
    most, least = _most(load), min(int(request["output"]) for request in load)
    if least < most:
        raise RunError(f"a call gives all answers one length, and these have {least}-{most}: give --output one number")
    return most


class TransformersStatic:
    """`generate` over a padded batch of all requests; those that want less wait for the longest."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        torch, transformers = import_module("torch"), import_module("transformers")
        self.device = device
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, LONG_NAMES[dtype])
        ).to(device)
        self.model.eval()

    def generate(self, load: Sequence[AskedRequest]) -> None:
        torch = import_module("torch")
        longest, most = max(len(request["prompt"]) for request in load), _most(load)
        ids = torch.zeros(len(load), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(load):
            ids[row, longest - len(request["prompt"]) :] = torch.tensor(request["prompt"])
            mask[row, longest - len(request["prompt"]) :] = 1
        with torch.inference_mode():
            tokens = self.model.generate(
                ids.to(self.device), attention_mask=mask.to(self.device), do_sample=False, min_new_tokens=most,
                max_new_tokens=most, pad_token_id=0, use_cache=True,
            )  # fmt: skip
        if tokens.shape[1] != longest + most:
            raise RunError(f"transformers gave {tokens.shape[1] - longest} tokens of {most}")


class TransformersContinuous:
    """`generate_batch`: transformers' own continuous batching over paged attention."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        torch, self.transformers = import_module("torch"), import_module("transformers")
        wanted = getattr(torch, LONG_NAMES[dtype])
        self.model = self.transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=wanted, attn_implementation="paged|sdpa"
        )
        self.model = self.model.to(device).eval()
        self._cache = {} if device != "cpu" else self._bounded_cache()

    def _bounded_cache(self) -> dict[str, Any]:
        """On a CPU it would take more than half of the machine's memory, whatever else there is, and be killed."""
        config = getattr(self.transformers, "ContinuousBatchingConfig", None)
        if config is None:
            return {}
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"continuous_batching_config": config(max_memory_percent=min(0.6, _CACHE_BYTES / total))}

    def generate(self, load: Sequence[AskedRequest]) -> None:
        most = _alike(load)
        config = self.transformers.GenerationConfig(
            max_new_tokens=most, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
        )
        prompts = [list(request["prompt"]) for request in load]
        answers = self.model.generate_batch(inputs=prompts, generation_config=config, **self._cache)
        tokens = sum(min(len(answer.generated_tokens), most) for answer in answers.values())
        wanted = most * len(load)
        if tokens < wanted:
            raise RunError(f"transformers' continuous batching gave {tokens} tokens of {wanted}")


class OpenVino:
    """openvino-genai, from a GGUF file of the same weights in 16 bits: its continuous batching, or its pipeline over
    one padded batch where its paged attention does not know the CPU."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        if device != "cpu":
            raise RunError("openvino-genai runs on CPUs here")
        openvino, self._genai = import_module("openvino"), import_module("openvino_genai")
        self._tensor = openvino.Tensor
        hint = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}[dtype]
        options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": hint, "KV_CACHE_PRECISION": hint}
        options["INFERENCE_NUM_THREADS"] = available_cores()
        source = self._converted(folder)
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 512
        scheduler.dynamic_split_fuse = True
        try:
            self.pipeline: Any = self._genai.ContinuousBatchingPipeline(str(source), scheduler, "CPU", options)
            self.how = "continuous batching"
        except RuntimeError as error:
            if "PagedAttention" not in str(error):
                raise
            self.pipeline = self._genai.LLMPipeline(str(source), "CPU", ATTENTION_BACKEND="SDPA", **options)
            self.how = "one padded batch"

    def _converted(self, folder: Path) -> Path:
        """A folder of the model as openvino has it, without a tokenizer: those of a GGUF file do not compile, and none
        is needed, because prompts are tokens."""
        from tilemesh.bench.serve.gguf_file import write_gguf

        target = folder / "openvino"
        if target.exists():
            return target
        gguf = folder / "gguf"
        gguf.mkdir()
        write_gguf(folder, gguf / "model.gguf")
        with contextlib.suppress(RuntimeError):  # of the tokenizer; the model has been written by then
            self._genai.LLMPipeline(str(gguf / "model.gguf"), "CPU", enable_save_ov_model=True)
        if not (gguf / "openvino_model.xml").exists():
            raise RunError("openvino-genai wrote no model of the GGUF file")
        target.mkdir()
        for name in ("openvino_model.xml", "openvino_model.bin"):
            (gguf / name).rename(target / name)
        shutil.copy(folder / "config.json", target)
        return target

    def generate(self, load: Sequence[AskedRequest]) -> None:
        if self.how == "continuous batching":
            prompts = [self._ids([request["prompt"]]) for request in load]
            batches = self.pipeline.generate(prompts, [self._asked(request["output"]) for request in load])
            answers = [answer.m_generation_ids[0] for answer in batches]
        else:
            longest = max(len(request["prompt"]) for request in load)
            ids = [[0] * (longest - len(request["prompt"])) + list(request["prompt"]) for request in load]
            mask = [[0] * (longest - len(request["prompt"])) + [1] * len(request["prompt"]) for request in load]
            batch = self._genai.TokenizedInputs(self._ids(ids), self._ids(mask))
            answers = self.pipeline.generate(batch, self._asked(_most(load))).tokens
        tokens = sum(map(len, answers))
        wanted = sum(request["output"] for request in load)
        if tokens < wanted:
            raise RunError(f"openvino-genai gave {tokens} tokens of {wanted}")

    def _ids(self, rows: Sequence[Sequence[int]]) -> Any:
        return self._tensor(import_module("numpy").array(rows, dtype="int64"))

    def _asked(self, tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        config.set_eos_token_id(1)
        return config


def convert(folder: str, target: str, dtype: str) -> None:
    """A Hugging Face folder as ctranslate2 wants it."""
    ctranslate2 = import_module("ctranslate2")
    ctranslate2.converters.TransformersConverter(folder).convert(target, quantization=LONG_NAMES[dtype], force=True)


class CTranslate2:
    """ctranslate2's Generator, converted from the same folder."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        ctranslate2 = import_module("ctranslate2")
        target = folder / f"ctranslate2-{dtype}"
        if not target.exists():
            # In a process of its own: a process that has torch in it may stand still in ctranslate2.
            line = [
                sys.executable,
                "-m",
                "tilemesh.bench.serve.peer_process",
                "--convert",
                str(folder),
                str(target),
                dtype,
            ]
            done = subprocess.run(line, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RunError(f"cannot be converted: {done.stderr.strip().splitlines()[-1:]}")
        self.generator = ctranslate2.Generator(
            str(target), device=device, compute_type=LONG_NAMES[dtype], intra_threads=available_cores(), inter_threads=1
        )

    def generate(self, load: Sequence[AskedRequest]) -> None:
        most = _alike(load)
        answers = self.generator.generate_batch(
            [[f"t{token}" for token in request['prompt']] for request in load], min_length=most, max_length=most,
            include_prompt_in_result=False, end_token="t1", sampling_topk=1, max_batch_size=0,
        )  # fmt: skip
        tokens = sum(len(answer.sequences_ids[0]) for answer in answers)
        if tokens < most * len(load):
            raise RunError(f"ctranslate2 gave {tokens} tokens of {most * len(load)}")


class LlamaCpp:
    """llama.cpp: requests are sequences of one context, and each step decodes a token of every one that has begun and
    as many tokens of prompts as fit beside them."""

    STEP_TOKENS = 512

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        if device != "cpu":
            raise RunError("llama.cpp runs on CPUs here")
        from tilemesh.bench.serve.gguf_file import write_gguf

        self._cpp, path = import_module("llama_cpp"), folder / f"llama-{dtype}.gguf"
        self._quiet = self._cpp.llama_log_callback(lambda *_: None)
        self._cpp.llama_log_set(self._quiet, None)
        self._cpp.llama_backend_init()
        if not path.exists():
            write_gguf(folder, path, single=dtype == "fp32")
        options = self._cpp.llama_model_default_params()
        self._model = self._cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise RunError("llama.cpp does not read the GGUF file")
        self._vocabulary = self._cpp.llama_vocab_n_tokens(self._cpp.llama_model_get_vocab(self._model))
        self._kept = 0 if dtype == "fp32" else 1  # GGML_TYPE_F32, GGML_TYPE_F16: of keys and values
        self._context, self._room = None, (0, 0)
        self._batch = self._cpp.llama_batch_init(self.STEP_TOKENS, 0, 1)

    def generate(self, load: Sequence[AskedRequest]) -> None:
        numpy = import_module("numpy")
        self._make_room(len(load), max(len(request["prompt"]) + int(request["output"]) for request in load))
        waiting = [(number, list(request["prompt"])) for number, request in enumerate(load)]
        left = [int(request["output"]) for request in load]
        places, following = [0] * len(load), dict[int, int]()
        while waiting or following:
            entries = [(number, token, True) for number, token in following.items()]
            while waiting and len(entries) < self.STEP_TOKENS:
                number, prompt = waiting[0]
                some = prompt[: self.STEP_TOKENS - len(entries)]
                del prompt[: len(some)]
                entries += [(number, token, False) for token in some]
                if not prompt:
                    entries[-1] = (number, some[-1], True)
                    waiting.pop(0)
            for at, (number, token, drawn) in enumerate(entries):
                self._batch.token[at], self._batch.pos[at], self._batch.logits[at] = token, places[number], drawn
                self._batch.n_seq_id[at], self._batch.seq_id[at][0] = 1, number
                places[number] += 1
            self._batch.n_tokens = len(entries)
            if self._cpp.llama_decode(self._context, self._batch):
                raise RunError("llama.cpp could not decode a step")
            for at, (number, _, drawn) in enumerate(entries):
                if drawn:
                    logits = self._cpp.llama_get_logits_ith(self._context, at)
                    following[number] = int(numpy.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())
                    left[number] -= 1
                    if not left[number]:
                        del following[number]

    def _make_room(self, sequences: int, longest: int) -> None:
        """An empty context that is large enough; one that is kept."""
        if sequences > self._room[0] or longest > self._room[1]:
            if self._context:
                self._cpp.llama_free(self._context)
            self._room = (max(sequences, self._room[0]), -(-max(longest, self._room[1]) // 256) * 256)
            options = self._cpp.llama_context_default_params()
            options.n_seq_max, options.n_ctx = self._room[0], self._room[0] * self._room[1]
            options.n_batch = options.n_ubatch = self.STEP_TOKENS
            options.n_threads = options.n_threads_batch = available_cores()
            options.type_k = options.type_v = self._kept
            self._context = self._cpp.llama_init_from_model(self._model, options)
            if not self._context:
                raise RunError("llama.cpp made no context")
        self._cpp.llama_memory_clear(self._cpp.llama_get_memory(self._context), True)


_MAKERS: Mapping[str, Callable[[Path, str, str], ServePeer]] = {
    "transformers-static": TransformersStatic,
    "transformers-continuous": TransformersContinuous,
    "openvino-genai": OpenVino,
    "ctranslate2": CTranslate2,
    "llama.cpp": LlamaCpp,
}
_PACKAGES = {"openvino-genai": "openvino-genai", "ctranslate2": "ctranslate2", "llama.cpp": "llama-cpp-python"}


def main(name: str, folder: str, dtype: str, device: str) -> None:
    """Open the peer, say so; then answer a load per line of standard input until that ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        peer = _MAKERS[name](Path(folder), dtype, device)
    except Exception as error:  # whatever a library of others raises: the row says so
        _say(out, {"why": _words(error)})
        return
    version = importlib.metadata.version(_PACKAGES.get(name, "transformers"))
    how = getattr(peer, "how", "")  # of a peer that has several ways
    _say(out, {"version": f"{version} ({how})" if how else version})
    for line in sys.stdin:
        load = json.loads(line)
        began = time.perf_counter()
        try:
            peer.generate(load)
            _say(out, {"seconds": time.perf_counter() - began})
        except Exception as error:
            _say(out, {"why": _words(error)})


def _say(out: TextIO, what: Mapping[str, Any]) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


def _words(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {'; '.join(lines) or 'no reason given'}"[:300]


if __name__ == "__main__":
    if sys.argv[1] == "--convert":
        convert(sys.argv[2], sys.argv[3], sys.argv[4])
    else:
        main(*sys.argv[1:5])
