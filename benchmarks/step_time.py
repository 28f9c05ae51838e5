"""Training steps of a preset in one process, beside what the planner says of them: step time and peak memory.

    python benchmarks/step_time.py h200 --out rows.jsonl [--profile]    # four cases, compiled, two to three minutes
    python benchmarks/step_time.py gpt2-124m --batch 32 8 --set dropout=0 --compile --out rows.jsonl [--profile]
    python benchmarks/step_time.py tiny --batch 8 --precision fp32 --threads 1 --device cpu

The prediction is computed and printed before the model exists, from this machine's calibration (`tilemesh calibrate`;
where it is committed, `python benchmarks/known_calibration.py`). With `--compile` the model is made of what `tilemesh
train` compiles. A step is forward, loss, backward, clipping and AdamW on fresh random tokens, by the code of `tilemesh
train` on one GPU alone, there replayed as a CUDA graph (but for `--no-graph`). On a GPU the peak is
`max_memory_allocated`; on a CPU the growth of the peak resident set since before the model was made. `--profile` adds
the time of GPU kernels, or CPU operators, by kind.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilemesh.bench.train.rank import kernels
from tilemesh.comm.connection import connect
from tilemesh.core.config import load, to_dict
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import Cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.measure.machine import stamp, this_machine
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.kernels import PLAIN, STANDARD
from tilemesh.model.loss import loss_sum
from tilemesh.model.programs.prepare import prepare
from tilemesh.model.programs.program import TRAINING
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.weights import count_parameters
from tilemesh.parallel.gradients import GradientStep, LocalGradients, Parts
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import trained
from tilemesh.plan.local import local_machine
from tilemesh.plan.prediction import prediction_figures
from tilemesh.plan.step import predict
from tilemesh.train.config import OptimizerConfig
from tilemesh.train.graph import StepGraph
from tilemesh.train.optimizer import Optimizer, stored_dtype
from tilemesh.train.plain import gpu_use

STEPS = 8  # of a block
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
H200_CASES = (("gpt2-124m", 8), ("gpt2-124m", 32), ("tinyllama-1.1b", 4), ("tinyllama-1.1b", 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a preset, or h200 for the four cases of docs/plan/README.md")
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--context", type=int)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--set", action="append", default=[], help="fields of the model: dropout=0")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-graph", action="store_true", help="launch a GPU's steps kernel by kernel")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--out")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    cases = [(given.model, batch) for batch in given.batch]
    if given.model == "h200":
        cases = list(H200_CASES)
        given.compile, given.set, given.blocks = True, [*given.set, "dropout=0"], min(given.blocks, 6)
    rows = []
    for given.model, batch in cases:
        found = measure(given, batch)
        rows.append(found)
        text = json.dumps(found | dict(stamp()))
        print(text, flush=True)
        if given.out:
            with Path(given.out).open("a", encoding="utf-8") as out:
                out.write(text + "\n")
        forget()
    print_errors(rows)


def forget() -> None:
    """Give back what a case took, so that the next one's peak is its own."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def print_errors(rows: list[dict[str, Any]]) -> None:
    """Predicted beside measured, a line a case."""
    print(f"{'case':24} {'step, ms: predicted, measured':>32} {'error':>8} {'peak, GiB':>18} {'error':>8}  host")
    for row in rows:
        said, step, error = row["predicted"], row["step_time_s"], row["error"]
        print(
            f"{row['model'] + ' x ' + str(row['batch']):24} "
            f"{said['step_time_s'] * 1e3:16.1f} {step['median'] * 1e3:15.1f} {error['step_time_s']:+8.1%} "
            f"{row['predicted_bytes'] / 2**30:9.2f} {row['peak_bytes'] / 2**30:8.2f} {error['peak_bytes']:+8.1%}  "
            + ("waits for it" if said["times"]["host_s"] else "keeps up")
        )


def measure(given: argparse.Namespace, batch: int) -> dict[str, Any]:
    start = to_dict(preset(given.model))
    model_config = load(ModelConfig, preset="start", presets={"start": start}, sets=given.set)
    context = given.context or model_config.context
    plan = ParallelPlan(microbatch=batch, precision=given.precision)
    code = "compiled" if given.compile else "eager"
    ranks = 1 if given.device == "cuda" or not given.threads else max(1, (os.cpu_count() or 1) // given.threads)
    try:
        here = local_machine("1xlocal" if given.device == "cuda" else f"{ranks}xlocal-cpu", this_machine())
    except UsageError as error:
        raise SystemExit(f"{error}; where it is committed: python benchmarks/known_calibration.py") from None
    alone = Cluster((replace(here.cluster.node, count=1),))
    predicted = predict(
        model_config, alone, plan, context=context, rates=here.rates, code=code, graph=not given.no_graph
    )
    print(
        f"predicted {given.model} batch {batch}: {predicted.step_time_s * 1e3:.2f} ms, "
        f"{predicted.memory.total_bytes / 2**20:.0f} MiB less {predicted.memory.reserved_bytes / 2**20:.0f} reserved",
        flush=True,
    )
    # On a CPU the process also grows by what torch loads with its first step.
    said_bytes = predicted.memory.seen_bytes("gpu" if given.device == "cuda" else "cpu")
    base = peak_bytes(given.device) if given.device == "cpu" else 0
    step, model, is_replayed = make_step(given, model_config, batch, context)
    for _ in range(5):
        step()
    times = [block(step, given.device) for _ in range(given.blocks)]
    times.sort()
    cut = len(times) // 5
    measured = {"median": statistics.median(times), "p20": times[cut], "p80": times[-1 - cut], "n": len(times)}
    found: dict[str, Any] = {
        "model": given.model, "set": given.set, "batch": batch, "context": context, "precision": given.precision,
        "device": given.device, "threads": torch.get_num_threads(), "code": code,
        "graph": is_replayed(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameters_predicted": count_parameters(model_config).total,
        "step_time_s": measured, "tokens_per_s": batch * context / measured["median"],
        "peak_bytes": peak_bytes(given.device) - base, "predicted_bytes": said_bytes,
        "predicted": prediction_figures(predicted),
        "error": {
            "step_time_s": predicted.step_time_s / measured["median"] - 1,
            "peak_bytes": said_bytes / max(1, peak_bytes(given.device) - base) - 1,
        },
    }  # fmt: skip
    if given.profile:
        found["kinds"] = profile(step, given.device)
    return found


def block(step: Any, device: str) -> float:
    """Seconds a step, over a block of steps that nothing waits for in between."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / STEPS


def make_step(
    given: argparse.Namespace, config: ModelConfig, batch: int, context: int
) -> tuple[Any, Transformer, Callable[[], bool]]:
    """A step to call again and again, the model, and whether steps have become a CUDA graph."""
    device = torch.device(given.device)
    torch.manual_seed(0)
    kernels = PLAIN if given.compile else STANDARD
    model = Transformer(config, device=device, dtype=stored_dtype(given.precision), kernels=kernels)
    suited = given.compile or (given.device == "cuda" and given.precision != "fp64")
    programs = prepare(model, gpu_use(compiled=given.compile) if suited else TRAINING, device)
    held = trained(model)
    gradients = LocalGradients(Parts(held, Mesh(connect("alone"))), batch * context)
    optimizer = Optimizer(OptimizerConfig(), held, given.precision)
    batches = torch.randint(config.vocabulary, (8, batch, context + 1), device=device)
    autocast = AUTOCAST.get(given.precision)

    def whole(tokens: torch.Tensor, seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        logits = programs(tokens[:, :-1], dropout_seed=seed)
        return loss_sum(logits, tokens[:, 1:])

    run = torch.compile(whole) if given.compile else whole
    tokens = batches[0].clone()
    seed = torch.zeros((), dtype=torch.int64, device=device) if config.dropout else None
    rate = torch.tensor(1e-4, dtype=torch.float32, device=device)
    count = 0

    def body() -> GradientStep:
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            total, targets = run(tokens, seed)
        gradients.backward(total, targets)
        done = gradients.finish(1.0, divide=not optimizer.divides)
        optimizer.move(rate, done.divisor)
        gradients.clear()
        return done

    replays = device.type == "cuda" and given.precision != "fp16" and not given.no_graph
    launch = StepGraph(body, optimizer.capturing) if replays else body

    def step() -> None:
        nonlocal count
        tokens.copy_(batches[count % 8])
        if seed is not None:
            seed.fill_(count)
        launch()
        count += 1

    return step, model, lambda: isinstance(launch, StepGraph) and launch.captured is not None


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def profile(step: Any, device: str) -> dict[str, Any]:
    """Seconds a step, and the longest kernels or operators: microseconds, calls, name."""
    found = kernels(step, torch.device(device))
    return {
        "total_s": sum(seconds for seconds, _, _ in found),
        "longest": [[round(seconds * 1e6), calls, name[:110]] for seconds, calls, name in found[:60]],
    }


if __name__ == "__main__":
    main()
