"""Metrics for tools that people already use, beside the run's own: TensorBoard's events and Weights & Biases.

The one idea: both get the same few numbers per step under the same names, from rank 0 alone, and neither may end a run:
what a tool cannot take is said once, and training goes on. The run's own metrics.jsonl stays the one that is read back.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tilemesh.core.errors import UsageError
from tilemesh.train.config import LogConfig

NAMES: Mapping[str, str] = {
    "loss": "train/loss",
    "norm": "train/gradient_norm",
    "rate": "train/learning_rate",
    "held_out": "held_out/loss",
    "bits_per_byte": "held_out/bits_per_byte",
    "tokens_per_s": "speed/tokens_per_s",
    "seconds": "speed/step_s",
    "memory_bytes": "memory/peak_bytes",
}
"""A figure of metrics.jsonl, and what the tools know it by."""

TENSORBOARD_FOLDER = "tensorboard"


class Logger(Protocol):
    def add(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_loggers(config: LogConfig) -> None:
    """Refuse a tool whose package is not installed, before anything runs."""
    wanted = {"tensorboard": config.tensorboard, "wandb": config.wandb != "off"}
    for package, is_wanted in wanted.items():
        if is_wanted and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"log.{package} is on and the package `{package}` is not installed: pip install {package} (or "
                f"'tilemesh[log]'), or leave log.{package} out"
            )
    if not config.wandb_project.strip():
        raise UsageError("log.wandb_project is empty: expected the name of a project")


class Loggers:
    """All tools that are asked for; one that fails is said and left out from then on."""

    def __init__(
        self, config: LogConfig, folder: Path, about: Mapping[str, Any], say: Callable[[str], None], on: bool = True
    ) -> None:
        """`about`: the run's configuration, which Weights & Biases shows beside the curves."""
        self.say = say
        self.open: dict[str, Logger] = {}
        makers: dict[str, Callable[[], Logger]] = {}
        if on and config.tensorboard:
            makers["tensorboard"] = lambda: TensorBoard(folder / TENSORBOARD_FOLDER)
        if on and config.wandb != "off":
            makers["wandb"] = lambda: WeightsAndBiases(config, folder, about)
        for name, make in makers.items():
            logger = self._try(name, make)
            if logger is not None:
                self.open[name] = logger

    def add(self, step: int, line: Mapping[str, Any]) -> None:
        """One step's figures, as metrics.jsonl has them."""
        if not self.open:
            return
        values = {
            name: float(value)
            for key, name in NAMES.items()
            if isinstance(value := line.get(key), (int, float)) and math.isfinite(value)
        }
        for tool, logger in list(self.open.items()):
            self._try(tool, lambda logger=logger: logger.add(step, values))  # type: ignore[misc]

    def close(self) -> None:
        for tool, logger in list(self.open.items()):
            self._try(tool, logger.close)

    def _try(self, tool: str, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except Exception as error:  # of a tool that the run does not depend on
            self.open.pop(tool, None)
            self.say(f"LOG.{tool.upper()} FAILED: {type(error).__name__}: {error}; the run goes on without it")
            return None


class TensorBoard:
    """Scalars as event files, by TensorBoard's own writer: torch's would import all of `torch.utils.tensorboard`."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, offline unless told otherwise; a resumed run goes on under the same id."""

    def __init__(self, config: LogConfig, folder: Path, about: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=config.wandb_project, mode=config.wandb, dir=str(folder), name=folder.name, id=_run_id(folder),
            resume="allow", config=dict(about), settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _run_id(folder: Path) -> str:
    """The same for every start of a run: its folder's name, in the letters that Weights & Biases takes."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in folder.resolve().name)[:64]
