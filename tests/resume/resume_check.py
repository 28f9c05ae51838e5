"""One case: a run that nobody stopped, the same run stopped and resumed, and what differs between them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from resume_cases import STEPS, Case, config_of, furnish

from tilemesh.comm import run_threads
from tilemesh.core.context import membership
from tilemesh.launch.job import launch
from tilemesh.runs.folder import new_run
from tilemesh.runs.journal import Journal
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.metrics import STEP, latest
from tilemesh.runs.names import SAMPLE
from tilemesh.runs.reader import open_checkpoint
from tilemesh.train.config import TrainConfig, of_run
from tilemesh.train.load import load
from tilemesh.train.rank import main as rank_main
from tilemesh.train.rank import train_here

KILLED_AT = 6
ASYNCHRONOUS = ("ssp", "asp")
"""Methods whose order of updates is each run's own: they are compared with the replay of what they did."""


class KilledError(Exception):
    """What ends ranks that are threads."""


def why_skipped(case: Case) -> str:
    """What is not installed here; nothing where the case can run."""
    needed = {
        "mpi4py": case["transport"] == "mpi",
        "safetensors": case["lora"] == "lora" or case["teacher"] == "taught",
    }
    return next((f"no {name} here" for name, is_needed in needed.items() if is_needed and not find_spec(name)), "")


def why_wrong(case: Case, place: Path) -> str:
    """What differs between the two runs, in a line; nothing where they are equal. Makes both in `place`."""
    config, stop = config_of(case, furnish(place, case)), case["stop"]
    folder = place / "stopped"
    stops = [int(step) for step in stop.split("-")] if stop[0].isdigit() else []
    try:
        if case["method"] not in ASYNCHRONOUS:
            train(config, place / "whole", case["transport"])
        if stop == "killed":
            train(config, folder, case["transport"], killed=True)
        for number, step in enumerate(stops):
            train(config, folder, case["transport"], stop_after=step, resume=number > 0)
        if stop == "ended":
            train(config, folder, case["transport"])
        if load(resume=folder) != config:
            return "the configuration that it is resumed with is another"
        train(config, folder, case["transport"], resume=True)
        if case["method"] in ASYNCHRONOUS:
            from resume_replay import replayed

            return difference(weights(folder), replayed(config, folder))
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    return _unlike(place / "whole", folder)


def train(
    config: TrainConfig,
    folder: Path,
    transport: str,
    *,
    stop_after: int | None = None,
    resume: bool = False,
    killed: bool = False,
) -> None:
    """Train on ranks that are threads of this process, or processes."""
    if not resume:
        new_run(TRAIN, config.to_toml(), folder)
    if transport == "threads":
        _train_threads(config, folder, stop_after, resume, killed)
        return
    options = ["--resume", "yes" if resume else "no"]
    options += [] if stop_after is None else ["--stop-after", str(stop_after)]
    lines: list[str] = []
    outcome = launch(
        [__file__, str(folder), *options, *(["--killed", str(KILLED_AT)] if killed else [])],
        ranks=config.ranks,
        transport=transport,
        sink=lambda rank, stream, line: lines.append(str(line)),
    )
    if (outcome.failure is not None) != killed:
        raise RuntimeError(f"{outcome.sentence(config.ranks)} {' '.join(lines[-3:])}")


def _train_threads(config: TrainConfig, folder: Path, stop_after: int | None, resume: bool, killed: bool) -> None:
    def main(comm: Any) -> None:
        def emit(event: Mapping[str, Any]) -> None:
            if killed and event["kind"] == STEP and event["step"] >= KILLED_AT:
                raise KilledError

        train_here(config, folder, comm, resume=resume, stop_after=stop_after, emit=emit)

    with contextlib.suppress(KilledError):
        run_threads(config.ranks, main)
        if killed:
            raise RuntimeError("the run was to be killed and came to its end")


def _unlike(whole: Path, stopped: Path) -> str:
    """How a run that was stopped differs from the one that was not; nothing where it does not."""
    reader, other = open_checkpoint(whole), open_checkpoint(stopped)
    if reader.manifest.step != STEPS or other.manifest.step != STEPS:
        return f"it ended with step {other.manifest.step} and the whole run with {reader.manifest.step}"
    tensors = ({name: each.whole(name) for name in each.names} for each in (reader, other))
    lines = [
        {line["step"]: (line["loss"], line["norm"], line["rate"]) for line in latest(run) if line["kind"] == STEP}
        for run in (whole, stopped)
    ]
    told = next((f"step {step} was told as {lines[1].get(step)}, not {line}" for step, line in lines[0].items()
                 if lines[1].get(step) != line), "")  # fmt: skip
    texts = [(run / SAMPLE).read_text() for run in (whole, stopped)]
    return difference(*tensors) or told or ("" if texts[0] == texts[1] else "it wrote another sample")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    reader = open_checkpoint(folder)
    return {name: reader.whole(name) for name in reader.names if name.startswith("weight:")}


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str:
    """The first tensor that is not the same bit for bit, and how many are not."""
    if one.keys() != other.keys():
        return f"other tensors: {sorted(one.keys() ^ other.keys())[:3]}"
    wrong = [name for name in sorted(one) if not torch.equal(one[name], other[name])]
    if not wrong:
        return ""
    most = float((one[wrong[0]].double() - other[wrong[0]].double()).abs().max())
    return f"{len(wrong)} of {len(one)} tensors differ, {wrong[0]} by {most:.3g}"


def _rank(argv: list[str]) -> int:
    """A rank as the launcher starts it. `--killed STEP`: the last one that trains kills itself when it has made it."""
    if "--killed" in argv:
        at = argv.index("--killed")
        step, argv = int(argv[at + 1]), argv[:at] + argv[at + 2 :]
        member, config, add = membership(), of_run(argv[0]), Journal.add
        assert member is not None
        last = 0 if config.servers else config.ranks - 1  # other workers beside servers write no journal

        def add_and_die(self: Journal, kind: str, number: int, **values: Any) -> None:
            add(self, kind, number, **values)
            if kind == STEP and number >= step and member.rank == last:
                os.kill(os.getpid(), signal.SIGKILL)

        Journal.add = add_and_die  # type: ignore[method-assign]
    return rank_main(argv)


if __name__ == "__main__":
    sys.exit(_rank(sys.argv[1:]))
