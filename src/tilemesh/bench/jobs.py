"""The benchmarks that `tilemesh bench all` runs, as values: commands with what they need, the most valuable first.

A job is a few commands of `tilemesh`; each is given `--json` and, where it compiles for long, `--turn`. `{out}` in a
command is a folder of the job's own. Seconds are those on the machine that the job is for: one H200 with 16 cores, or
two cores.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tilemesh.core.cores import available_cores
from tilemesh.measure.machine import usable_gpus

NEEDS: Mapping[str, tuple[Callable[[], bool], str]] = {
    "gpu": (lambda: bool(usable_gpus()), "torch sees no GPU here"),
    "mpi": (lambda: importlib.util.find_spec("mpi4py") is not None, "mpi4py is not installed"),
    "transformers": (lambda: importlib.util.find_spec("transformers") is not None, "transformers is not installed"),
    "8 cores": (lambda: available_cores() >= 8, "it is for 8 cores or more"),
}
"""By name: whether this machine has it, and what to say where it has not."""


@dataclass(frozen=True)
class BenchJob:
    """Commands, one after the other. A job that was cut goes on with the command it was cut in."""

    name: str
    seconds: float
    """About how long; of jobs that compile, without the compiling."""
    commands: tuple[str, ...]
    needs: tuple[str, ...] = ()
    compiles: bool = False
    """Gets ready beside others, and is timed alone."""
    caches: Literal["kept", "empty", "uncalibrated"] = "kept"
    """`empty`: nothing was compiled before; `uncalibrated`: nor is this machine calibrated, until the job does it."""
    cores: int | None = None
    """Of the machine's, where rows are of so many."""

    def why_not(self) -> str:
        """What this machine lacks."""
        return "; ".join(why for need in self.needs for has, why in [NEEDS[need]] if not has())


def _gpu(name: str, seconds: float, *commands: str, needs: tuple[str, ...] = (), **more: Any) -> BenchJob:
    return BenchJob(name, seconds, commands, ("gpu", *needs), **more)


def _cpu(name: str, seconds: float, *commands: str, **more: Any) -> BenchJob:
    return BenchJob(name, seconds, commands, **more)


def _timed(operators: str, shapes: str, peers: str = "all", times: str = "kernel,call", **settings: str) -> str:
    words = "".join(f" --set {name}={value}" for name, value in settings.items())
    return f"bench kernel {operators} --shapes {shapes} --peers {peers} --times {times}{words} --repeats 8"


def _both(operators: str, shapes: str, peers: str = "all", **settings: str) -> tuple[str, str]:
    """Forward, and with the backward pass."""
    forward = _timed(operators, shapes, peers, "kernel", **settings)
    return forward, _timed(operators, shapes, peers, "kernel", passes="both", **settings)


_NORMED, _SIZES = "32768x768,16384x4096,8192x8192", "16384x1024,32x64"
_ROWS = "softmax rms_norm layer_norm add_rms_norm add_layer_norm cross_entropy swiglu geglu"
# Every target of docs/kernels/LOG.md has its row here. Calls come first, and alone: the host is what they time.
_KERNELS: Mapping[str, tuple[str, ...]] = {
    "calls": (
        _timed(f"{_ROWS} scale_shift", _SIZES, "eager", "call"),
        _timed("rotary", "8x2048x32x64,1x64x4x64", "eager", "call"),
        _timed("attention", "1x64x4x1x64", "eager", "call"),
        _timed("mlp", "32x64x128", "eager", "call"),
        _timed("linear_cross_entropy", "32x64x1000", "eager", "call"),
    ),
    "calls_both": (_timed(_ROWS, _SIZES, "eager", "call", passes="both"),),
    "layer_norm": _both("layer_norm", _NORMED),
    "rms_norm": _both("rms_norm", _NORMED),
    "softmax": (_timed("softmax", "16384x1024,8192x8192,4096x32768,512x262144", times="kernel"),),
    "loss": (_timed("cross_entropy", "8192x50304,8192x128256", passes="both"),),
    "attention": _both("attention", "4x4096x8x4x128,2x8192x8x4x128,1x16384x8x4x128", "cuDNN"),
    "attention_64": _both("attention", "8x2048x16x1x64,4x4096x16x1x64,1x16384x16x1x64", "cuDNN"),
    "window": _both("attention", "4x4096x8x4x128", "flex_attention", mask="window"),
    "packed": _both("attention", "4x4096x8x4x128", "flex_attention", mask="packed"),
    "linear_loss": (_timed("linear_cross_entropy", "8192x768x50304", passes="both"),),
    "adamw": (_timed("adamw", "148x838656,16x65536"),),
    "mlp": (_timed("mlp", "32768x768x3072", times="kernel", passes="both"),),
    "linear_loss_wide": (_timed("linear_cross_entropy", "8192x4096x128256", passes="both"),),
    "gated": _both("swiglu geglu", "16384x5632"),
    "elements": (*_both("rotary", "8x2048x32x128"), _timed("scale_shift", "16384x1024", times="kernel")),
    "adds": (*_both("add_rms_norm", "16384x4096"), *_both("add_layer_norm", "32768x768")),
    "embedding": (_timed("embedding", "32768x768x50304", times="kernel", passes="both"),),
    "few_bits": (
        _timed("lowbit_linear", "1x8192x8192,16x8192x8192,64x8192x8192,1x28672x4096,1x4096x14336", times="kernel"),
        *(_timed("scaled_matmul", "16x8192x8192,1024x8192x8192", code=code) for code in ("fp8", "int8")),
    ),
    "untuned": ("bench kernel matmul --drawn 60 --peers eager,addmm,compile --repeats 11",),
}

_TRAIN, _STEPS = "bench train {} --mesh dp=1 --peers {}", " --blocks 6 --steps 8"
_MOVED = " --blocks 5 --steps 1 --set plan.precision=bf16-master,train.compile=false,train.graph=false,{}"
_NINE_B = "model.layers=40,model.width=4096,model.heads=32,model.kv_heads=8,model.mlp_width=14336"
_SERVED = "bench serve {} --device cuda --dtype bf16 --predict machine --blocks {} "
_LOAD = "--requests 256 --prompt 100-1024 --output 100-1024 --running 256 --step-tokens 4096"
_COMPRESSED = "bench compress {} --device cuda --dtype bf16 --peers none --seconds 2 --recipes {}"
_GRAPH = "bench graph {} --device cuda --dtype bfloat16 --repeats 15 --size {} --peers {} --seconds {}"
_MODELS = ("mixtral", "t5", "gpt2", "llama", "bert", "mistral", "qwen2", "gemma2", "opt", "gpt-neox", "vit", "resnet")
_HUGGING_FACE = ("transformers",)
_BESIDE: dict[str, Any] = {"compiles": True, "caches": "empty"}
_GPU_JOBS = (
    _gpu("train_gpt2", 110, _TRAIN.format("gpt2-124m", "compile") + _STEPS),
    *(
        _gpu(f"kernel_{name}", 6.0 * len(words), *words, compiles=not name.startswith("calls"))
        for name, words in _KERNELS.items()
    ),
    *(
        _gpu(f"decode_{model}", 60, _SERVED.format(model, 0) + "--steps 1,64 --profile {out}/profile")
        for model in ("tinyllama-1.1b", "llama-3-8b")
    ),
    *(
        _gpu(f"graph_{model}", 15, _GRAPH.format(model, model, "compile,eager,recorded", 3), **_BESIDE)
        for model in ("gpt2-blocks", "llama-blocks")
    ),
    _gpu("train_tinyllama", 130, _TRAIN.format("tinyllama-1.1b", "compile") + _STEPS),
    _gpu("load_llama-3-8b", 60, _SERVED.format("llama-3-8b", 1) + _LOAD),
    _gpu("online_tinyllama", 45, _SERVED.format("tinyllama-1.1b", 0)
         + "--requests 100 --prompt 100-512 --output 64-128 --rates 25,60,100"),
    _gpu("features_gpu", 60, _SERVED.format("tinyllama-1.1b", 0) + "--features prefix,start"),
    _gpu("compress_decode", 60, _COMPRESSED.format("llama-3-8b", "int4-g128")),
    _gpu("compress_pruned", 60, _COMPRESSED.format(
        "tinyllama-1.1b", "mlp-25,mlp-50,heads-50,layers-25,layers-50,unstructured-50"
    )),
    *(
        _gpu(f"steps_{model}_{batch}", 60, _TRAIN.format(model, "eager") + f"{_STEPS} --set train.batch={batch},"
             f"plan.microbatch={batch},model.dropout=0 --profile {{out}}/profile")
        for model, batch in (("gpt2-124m", 8), ("gpt2-124m", 32), ("tinyllama-1.1b", 4), ("tinyllama-1.1b", 8))
    ),
    # With one variant at a time: both have their weights and activations on the GPU.
    _gpu("offload", 120, *(
        _TRAIN.format("tinyllama-1.1b", "eager") + _MOVED.format(f"train.batch={batch},plan.microbatch=8")
        + f" --also plan.offload={what}"
        for batch, what in ((8, "optimizer"), (16, "activations"), (16, "weights"), (16, "activations+weights"))
    )),
    _gpu("offload_9b", 100, _TRAIN.format("tinyllama-1.1b", "eager") + _MOVED.format(
        f"train.batch=4,plan.microbatch=4,plan.offload=optimizer,{_NINE_B}"
    )),
    _gpu("serve_peers", 80, _SERVED.format("tinyllama-1.1b", 1) + "--requests 128 --prompt 128 --output 128 "
         "--running 128 --step-tokens 2048 --peers transformers-static,transformers-continuous", needs=_HUGGING_FACE),
    *(
        _gpu(f"graph_{model}", 6, _GRAPH.format(model, "small", "eager,launched", 1.5), needs=_HUGGING_FACE, **_BESIDE)
        for model in _MODELS
    ),
    _gpu("studies_gpu", 40, "bench graph --study host --device cuda --seconds 2"),
    *(_gpu(f"guide_{chapter}", 40, f"guide {chapter}") for chapter in "56734"),
    *(_gpu(f"matmul_{dtype}", 120, f"bench kernel matmul --repeats 15 --dtype {dtype}", compiles=True)
      for dtype in ("float16", "bfloat16")),
)  # fmt: skip

LAYOUTS: Mapping[str, tuple[str, str]] = {
    "one": ("dp=1", "plan.microbatch=16"),
    "one-acc": ("dp=1", "plan.microbatch=4"),
    "dp2": ("dp=2", "plan.microbatch=8"),
    "dp2-acc": ("dp=2", "plan.microbatch=2"),
    "tp2": ("tp=2", "plan.microbatch=16"),
    "tp2-seq": ("tp=2", "plan.microbatch=16,plan.sequence_parallel=true"),
    "dp4": ("dp=4", "plan.microbatch=4"),
    "dp2tp2": ("dp=2,tp=2", "plan.microbatch=8"),
    "tp4": ("tp=4", "plan.microbatch=16"),
    "pp2": ("pp=2", "plan.microbatch=4,plan.accumulation=4"),
    "pp2-zbv": ("pp=2", "plan.microbatch=4,plan.accumulation=4,plan.schedule=zb-v"),
    "dp2pp2": ("dp=2,pp=2", "plan.microbatch=2,plan.accumulation=4"),
    "dp2-zero1": ("dp=2", "plan.microbatch=8,plan.zero=1"),
    "dp4-zero3": ("dp=4", "plan.microbatch=4,plan.zero=3"),
    "cp2": ("cp=2", "plan.microbatch=16"),
    "cp4": ("cp=4", "plan.microbatch=16"),
    "ep2": ("dp=2,ep=2", "plan.microbatch=8,model.experts=4"),
    "ep2-even": ("dp=2,ep=2", "plan.microbatch=8,model.experts=4,train.force_balance=true"),
    "ep4": ("dp=4,ep=4", "plan.microbatch=4,model.experts=4"),
}
"""Of the tiny preset on a CPU: mesh and settings. Each is predicted before it runs, and then all are graded."""
_BARE = "train.steps=18,checkpoint.every=0,evaluate.every=0,sample.tokens=0"
_RUNS = [f"train --out {{out}}/{name} --mesh {mesh} --set {sets},{_BARE}" for name, (mesh, sets) in LAYOUTS.items()]
_PLACEMENTS = {"colocated": "--mesh dp=2"} | {
    kind: f"--placement {kind}" for kind in ("split", "one-step-off", "asynchronous")
}
_ANSWERED = (
    "align.prompts=24,align.answers=16,align.running=384,align.max_tokens=16,train.steps=18,checkpoint.every=0,"
    "evaluate.every=0"
)
"""Of a model that has seen next to nothing, nearly all answers are as long as they may be, as predictions take them."""
_BEGUN = f"train --out {{out}}/start --mesh dp=1 --set train.steps=2,{_BARE.partition(',')[2]}"
_ALIGNED = [f"align {{out}}/start --task sort --out {{out}}/{name} {flags} --set {_ANSWERED}"
            for name, flags in _PLACEMENTS.items()]  # fmt: skip
_FIT = "bench collective --fit --quick --transport mpi --ranks {}"
_COLLECTIVE = "bench collective {} --quick --ranks {} "
_AUTO = [
    _COLLECTIVE.format("all_reduce all_gather reduce_scatter all_to_all", ranks)
    + "--transport mpi --algorithms native --sizes 8B,1KiB,8KiB,32KiB,128KiB,256KiB,1MiB,8MiB,64MiB"
    for ranks in (2, 4)
]
"""`auto` beside the library's own, called by us and without us."""
_EXCHANGE = "bench exchange --ranks 4 --transport {} --model medium --rows 2 --tokens 64 --repeats 12 --bucket-bytes {}"
_CPU_JOBS = (
    _cpu("train_cpu", 100, "bench train --mesh dp=2 --peers eager,ddp --blocks 4 --steps 2"),
    _cpu("exchange", 120, *(_EXCHANGE.format(by, size) for by in ("mpi", "torch") for size in (1 << 20, 8 << 20)),
         needs=("mpi", "8 cores")),
    _cpu("auto_unfitted", 60, *_AUTO, needs=("mpi",), caches="uncalibrated"),
    _cpu("auto_fitted", 150, _FIT.format("2,4"), *_AUTO, needs=("mpi",), caches="uncalibrated"),
    _cpu(
        "collectives", 240, _FIT.format(8),
        _COLLECTIVE.format("", 8) + "--transport mpi --sizes 4B,512B,1KiB,8KiB,32KiB,256KiB,1MiB,8MiB,64MiB "
        "--algorithms native,flat,flat_one,flat_slices,direct,direct_slices",
        _COLLECTIVE.format("all_reduce", 8) + "--transport gloo --algorithms none --sizes 4B,1KiB,32KiB,1MiB,64MiB",
        needs=("mpi", "8 cores"),
    ),
    _cpu("serve_cpu", 40, "bench serve llama-27m --requests 16 --prompt 16-128 --output 32 --blocks 3", cores=2),
    _cpu("features", 200, "bench serve llama-27m --blocks 0 --features all", cores=2),
    _cpu("pipelines", 80, "bench pipeline --ranks 2,4"),
    _cpu("sends", 60, "bench pipeline 1f1b --sends 1MiB,8MiB --ranks 4", needs=("8 cores",)),
    _cpu("layouts", 300, _FIT.format("2,4"), *_RUNS, "plan grade " + " ".join(f"{{out}}/{name}" for name in LAYOUTS),
         needs=("mpi",), cores=2),
    _cpu("placements", 200, _BEGUN, *_ALIGNED, "plan grade " + " ".join(f"{{out}}/{name}" for name in _PLACEMENTS),
         needs=("mpi",), cores=2),
    _cpu("resident", 120, *(
        f"bench train --mesh {mesh} --set {sets} --peers eager --malloc kept,mapped,one-arena --blocks 3"
        for mesh, sets in (LAYOUTS[name] for name in ("dp2", "tp4", "one"))
    )),
    _cpu("studies", 120, "bench graph --study symbolic,host,trees --seconds 2"),
    _cpu("blocks", 900, "bench graph --study blocks --seconds 4", cores=2),
    _cpu("methods", 90, "bench methods --html {out}/page.html"),
    _cpu("gate", 300, *(f"verify --ranks 8 --transport {by}" for by in ("mpi", "torch")), needs=("8 cores",)),
)  # fmt: skip
JOBS: Mapping[str, BenchJob] = {
    job.name: job for job in (_cpu("calibrate", 60, "calibrate --if-missing --quick"), *_GPU_JOBS, *_CPU_JOBS)
}
