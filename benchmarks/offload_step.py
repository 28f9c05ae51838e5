"""Steps of a model with something of it in the host's memory, beside what the planner says they cost.

    python benchmarks/offload_step.py tinyllama-1.1b --batch 8 --offload optimizer --compare    # both ways
    python benchmarks/offload_step.py tinyllama-1.1b --set model.layers=40,model.width=4096 --offload optimizer
    python benchmarks/offload_step.py tinyllama-1.1b --set train.kernels=tilemesh --offload optimizer --compare

Predicted before the model exists, from this machine's calibration and its link to the host, which is measured first
where the calibration lacks it. A step is forward, backward, clipping and the update, not compiled, by the code of
`tilemesh train`, on random tokens. The slow-down is a step's time over that of the same step without moving: with
`--compare` that step is run too; otherwise it is the passes as measured in the same steps and the update's arithmetic,
timed on states that are already on the device. `--compare` also says how far losses are apart with and without moving,
and those of two runs without. torch's attention adds up its gradient in an order that changes from run to run; with
`train.kernels=tilemesh` no kernel does, so there both must be 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from tilemesh.comm.connection import connect
from tilemesh.core import calibration
from tilemesh.core.config import to_dict
from tilemesh.core.units import format_bytes
from tilemesh.measure.calibrate import calibrate_further
from tilemesh.measure.calibrate_link import link_figures
from tilemesh.measure.machine import stamp, this_machine, usable_gpus
from tilemesh.model.work.weights import count_parameters
from tilemesh.parallel.laid import Laid, StepPiece
from tilemesh.parallel.mesh import Mesh
from tilemesh.train.config import TrainConfig
from tilemesh.train.load import load
from tilemesh.train.offload import HostOptimizer
from tilemesh.train.optimizer import Optimizer
from tilemesh.train.predict import predict_run
from tilemesh.train.rank import choose_device, lay_model, make_optimizer

WARM_STEPS = 2
RATE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a preset of `tilemesh train`")
    parser.add_argument(
        "--set", action="append", default=[], help="model.layers=40, as `tilemesh train --set` takes it"
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--precision", default="bf16-master")
    parser.add_argument("--offload", default="optimizer")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compare", action="store_true", help="the same steps without moving, twice: losses too")
    parser.add_argument("--out", help="a file for the rows, one JSON object per line")
    given = parser.parse_args()
    if torch.cuda.is_available():
        measure_link()
    moved, still = configured(given, given.offload), configured(given, "")
    gpus = usable_gpus()
    predicted = {name: predict_run(config, gpus) for name, config in (("moved", moved), ("still", still))}
    say_prediction(moved, predicted)
    found = run(moved, given.steps)
    if given.compare:
        without = run(still, given.steps)
        found["still_step_s"] = without["step_s"]
        found["still_peak_bytes"] = without["peak_bytes"]
        again = run(still, given.steps)
        found["losses_differ"] = apart(found["losses"], without["losses"])
        found["still_losses_differ"] = apart(again["losses"], without["losses"])
        print(
            f"losses with and without moving differ by at most {found['losses_differ']:.3g}, those of two runs without "
            f"by {found['still_losses_differ']:.3g} (0: the same bits)"
        )
    else:
        found["still_step_s"] = found["passes_s"] + found["arithmetic_s"]
    report(moved, predicted, found, given.out)


def apart(losses: list[float], others: list[float]) -> float:
    return max(abs(loss - other) for loss, other in zip(losses, others, strict=True))


def measure_link() -> None:
    """Add the link to the host to this machine's stored calibration, if that lacks it."""
    known = calibration.find(this_machine().id)
    if known is None or known.gpu is None:
        raise SystemExit("this GPU has no calibration: run `tilemesh calibrate --quick` first")
    if not known.gpu.host_link_bytes_per_s:
        known = calibrate_further(known, link_figures()).calibration
        known.save()
    assert known.gpu is not None
    words = ", ".join(f"{way} {rate / 1e9:.1f}" for way, rate in known.gpu.host_link_bytes_per_s.items())
    print(f"link to the host, GB/s: {words}", flush=True)


def configured(given: argparse.Namespace, offload: str) -> TrainConfig:
    sets = [
        f"train.batch={given.batch * given.accumulation},train.context={given.context},model.context={given.context}",
        f"plan.microbatch={given.batch},plan.precision={given.precision},train.compile=false,train.graph=false",
        f"plan.offload={offload},model.dropout=0",
        *given.set,
    ]
    return load(given.model, mesh="dp=1", sets=sets, gpus=len(usable_gpus()))


def say_prediction(config: TrainConfig, predicted: dict[str, Any]) -> None:
    total = count_parameters(config.model).total
    print(
        f"{total / 1e9:.3f} B parameters, {format_bytes(16 * total)} of weights, gradients and states in bf16-master, "
        f"{format_bytes(12 * total)} of them optimizer states; {config.plan.describe()}"
    )
    for name, figures in predicted.items():
        if "missing" in figures:
            raise SystemExit(figures["missing"])
        memory, step_s = format_bytes(figures["memory_bytes"]), figures["step_time_s"]
        print(f"predicted, {name}: {step_s:.3f} s per step, {memory} on the device", flush=True)


def run(config: TrainConfig, steps: int) -> dict[str, Any]:
    """Medians of some steps, and the memory they took."""
    comm = connect()
    device = choose_device(config, comm)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    laid = lay_model(config, Mesh(comm), device)
    sync(device)
    print(f"weights drawn after {time.perf_counter() - began:.1f} s", flush=True)
    optimizer = make_optimizer(config, laid, config.optimizer_kernels_on(device.type))
    sync(device)
    print(f"optimizer made after {time.perf_counter() - began:.1f} s", flush=True)
    times = [one_step(config, laid, optimizer, device, number) for number in range(WARM_STEPS + steps)]
    losses = [float(loss) for _, _, loss in times]
    print(f"steps done after {time.perf_counter() - began:.1f} s; losses {' '.join(f'{loss:.4f}' for loss in losses)}")
    timed = times[WARM_STEPS:]
    found = {
        "passes_s": statistics.median(passes for passes, _, _ in timed),
        "update_s": statistics.median(update for _, update, _ in timed),
        "step_s": statistics.median(passes + update for passes, update, _ in timed),
        "arithmetic_s": arithmetic_s(optimizer, device),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else 0,
        "host_bytes": optimizer.link.memory.nbytes if isinstance(optimizer, HostOptimizer) else 0,
        "losses": losses,
    }
    laid.gradients.close()
    comm.close()
    del laid, optimizer
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
    return found


def one_step(
    config: TrainConfig, laid: Laid, optimizer: Optimizer, device: torch.device, number: int
) -> tuple[float, float, Any]:
    """Seconds of passes and clipping, and of the update; the loss."""
    generator = torch.Generator().manual_seed(number)
    shape = (config.plan.microbatch, config.context + 1)
    pieces = []
    for turn in range(config.plan.accumulation):
        rows = torch.randint(config.model.vocabulary, shape, generator=generator).to(device)
        pieces.append(StepPiece(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), turn * config.plan.microbatch))
    sync(device)
    began = time.perf_counter()
    laid.passes(pieces)
    done = laid.gradients.finish(config.optimizer.clip or None, divide=not optimizer.divides)
    sync(device)
    passed = time.perf_counter()
    optimizer.step(RATE, done.divisor)
    laid.gradients.updated()
    laid.gradients.clear()
    sync(device)
    return passed - began, time.perf_counter() - passed, done.loss


def arithmetic_s(optimizer: Optimizer, device: torch.device) -> float:
    """Of an update with all states on the device: timed on a part of them, whose numbers are read many times as often
    as any cache holds. The weights are not used any more."""
    if not isinstance(optimizer, HostOptimizer):
        return 0.0
    part = max(optimizer.parts, key=lambda one: sum(value.numel() for value in one.parameters.values()))
    for value in part.parameters.values():
        value.grad = torch.zeros_like(value)
    with optimizer.here(part):
        part.step(0.0, torch.ones((), device=device) if part.divides else None)
        sync(device)
        began = time.perf_counter()
        for _ in range(5):
            part.step(0.0, torch.ones((), device=device) if part.divides else None)
        sync(device)
        spent = (time.perf_counter() - began) / 5
    own = sum(value.numel() for value in part.parameters.values())
    return spent * sum(value.numel() for value in optimizer.parameters.values()) / own


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(config: TrainConfig, predicted: dict[str, Any], found: dict[str, Any], out: str | None) -> None:
    foreseen = predicted["moved"]["step_time_s"] / predicted["still"]["step_time_s"]
    slower = found["step_s"] / found["still_step_s"]
    print(
        f"measured: passes {found['passes_s']:.3f} s, update {found['update_s']:.3f} s (its arithmetic "
        f"{found['arithmetic_s']:.3f} s), {format_bytes(found['peak_bytes'])} on the device, "
        f"{format_bytes(found['host_bytes'])} on the host"
    )
    print(f"step: predicted {predicted['moved']['step_time_s']:.3f} s, measured {found['step_s']:.3f} s")
    print(
        f"without moving: predicted {predicted['still']['step_time_s']:.3f} s, measured {found['still_step_s']:.3f} s"
    )
    print(f"slow-down: predicted {foreseen:.3f}, measured {slower:.3f} ({foreseen / slower - 1:+.1%})", flush=True)
    if out is not None:
        row = {
            "name": "offload", "model": to_dict(config.model), "plan": config.plan.to_dict(),
            "context": config.context, "predicted": {
                "step_s": predicted["moved"]["step_time_s"], "still_step_s": predicted["still"]["step_time_s"],
                "slow_down": foreseen, "peak_bytes": predicted["moved"]["memory_bytes"],
            },
            "measured": {**found, "slow_down": slower}, **stamp(),
        }  # fmt: skip
        with Path(out).open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
