"""Where a rank begins: at the newest sound checkpoint, with the weights of a Hugging Face folder, or at step 1.

The one idea: a checkpoint is used whole or not at all. Manifest and files are compared with their digests by all ranks
together before anything is read; one that is not what was written is named and the one before is tried. Where none is
left, the run stops: beginning again at step 1 is for its user to decide.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tilemesh.core.errors import RunError
from tilemesh.core.shard import Shard
from tilemesh.model.adapter import adapter_parameters
from tilemesh.model.config import ModelConfig, check_written_model
from tilemesh.model.kinds import unpacked
from tilemesh.model.work.weights import count_parameters
from tilemesh.parallel.agree import tell
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.shard import take
from tilemesh.runs.manifest import BEST_KEPT, MODEL, WEIGHT, DamagedError, Manifest, checkpoints, damage
from tilemesh.runs.names import CHECKPOINTS, CONFIG, DAMAGED
from tilemesh.runs.reader import Reader
from tilemesh.train.check import nothing_whole
from tilemesh.train.source import order_settings

if TYPE_CHECKING:
    from tilemesh.comm.runtime.communicator import Communicator
    from tilemesh.train.loop import Loop

Say = Callable[[str], None]


CRITIC = "critic"
"""A model that is trained beside another, and begins with the same weights."""


def begin(loop: Loop, init: str | Path | None, resume: bool, say: Say) -> None:
    """Take up what there is to go on from."""
    comm = loop.mesh.comm
    if loop.config.lora.base is not None and loop.config.lora.rank:
        _load_base(loop, loop.config.lora.base, say)
        init = None
    checkpoint = sound_checkpoint(loop.folder, comm, say) if resume else None
    if checkpoint is not None:
        restore(loop, Reader(checkpoint))
        loop.is_resumed = True
        if comm.rank == 0:
            say(f"going on from step {loop.progress.step} ({checkpoint})")
    elif init is not None:
        _load_hugging_face(loop, Path(init))
        if comm.rank == 0:
            say(f"weights from {init}")
    elif resume and comm.rank == 0:
        say("no checkpoint yet: beginning at step 1")


def restore(loop: Loop, reader: Reader) -> None:
    """Weights, moments, position and loss scale of a checkpoint, whatever layout wrote it."""
    values, step = reader.manifest.values, reader.manifest.step
    manifest = reader.manifest
    check_written_model(manifest.written_by.get(MODEL), manifest.step, loop.config.model, loop.folder / CONFIG)
    more = {name for name in reader.names if name.startswith(f"{WEIGHT}:")}
    more -= {f"{WEIGHT}:{name}" for name in loop.laid.names}
    if more:
        raise RunError(f"{reader.folder} has {min(more)}, and this model has not: it is another model's checkpoint")
    read, shards, gradients = partial(recalled, reader), loop.optimizer.shards, loop.laid.gradients
    tensors = {}
    for name, shard in ((name, shards[name]) for name in loop.optimizer.stepped):
        tensors[WEIGHT, name] = reader.local(f"{WEIGHT}:{name}", shard)
        for kind in loop.optimizer.kinds[name] if values["optimizer_steps"] else ():
            state = read(f"{kind}:{name}", shard, by_replica=gradients.states_differ)
            tensors[kind, name] = reader.local(f"{kind}:{name}", shard) if state is None else state
    loop.optimizer.load(int(values["optimizer_steps"]), tensors)
    loop.optimizer.server_steps = [int(steps) for steps in values.get("server_steps", ())]
    gradients.updated()
    gradients.recall(read)
    gradients.go_on(step)
    loop.stepper.scale.load(values["scale"])
    loop.progress.step, loop.progress.position = step, int(values["position"])
    loop.stepper.source.go_on(step, int(values["position"]))
    loop.progress.load_best(values.get("best"))
    best = values.get(BEST_KEPT) or loop.progress.best_step  # which may have failed to be written
    is_there = any(each == best for each, _ in checkpoints(loop.folder / CHECKPOINTS))
    loop.writer.best = best if loop.config.checkpoint.keep_best and is_there else None
    if values.get("loss") is not None:
        loop.progress.loss = float(values["loss"])
    loop.writer.last = step
    if loop.stepper.before is not None:
        loop.stepper.before(step)  # what a recipe left out in the last step, a sample leaves out
    _say_what_differs(loop, values)


def recalled(reader: Reader, name: str, shard: Shard, *, by_replica: bool = False) -> Any:
    """This rank's part of a tensor, where a checkpoint has one that fits. Where each replica had its own, that of this
    replica; of other replicas than there are now, or where all are to have the same, their mean."""
    stored = reader.shape(name)
    if stored == shard.whole:
        return reader.local(name, shard)
    if stored is None or stored[1:] != shard.whole:
        return None
    own = shard.by_replica()
    return reader.local(name, own)[0] if by_replica and stored == own.whole else take(shard, reader.whole(name).mean(0))


def _say_what_differs(loop: Loop, values: Mapping[str, Any]) -> None:
    """A run that goes on with other text, or with other sequences of it, is told so."""
    if values.get("data") != loop.fingerprint and loop.mesh.comm.rank == 0:
        loop.writer.say(
            "THE DATA IS NOT WHAT THIS RUN BEGAN WITH (the text has changed, or this is another Python): going on with "
            "what is there, but not bit for bit"
        )
    before = values.get("order", {})  # an older version kept none
    now = order_settings(loop.config)
    changed = [f"{key} was {before[key]} and is {now[key]}" for key in now if before.get(key, now[key]) != now[key]]
    if changed and loop.mesh.comm.rank == 0:
        loop.writer.say(f"THE DATA IS CUT OR ORDERED ANEW: {'; '.join(changed)}: other sequences follow than before")


def sound_checkpoint(run: Path, comm: Communicator, say: Say) -> Path | None:
    """The newest checkpoint of a run that is what was written, on all ranks alike; None where there never was one.

    Those that are not are named. Once a sound one is found they are set aside; where there is none, all stay as they
    are and the run ends here.
    """
    folder = run / CHECKPOINTS
    names = json.loads(tell(comm, json.dumps([path.name for _, path in checkpoints(folder)])))
    broken: list[str] = []
    for number, name in enumerate(names):
        path: Path = folder / name
        before = f"; the one before is tried, {names[number + 1]}" if number + 1 < len(names) else ""
        problems = _problems(path, comm)
        for problem in problems:
            say(f"DAMAGED CHECKPOINT: {problem}{before}")
        if not comm.all_reduce(np.array([len(problems)], np.int64))[0]:
            if comm.rank == 0:  # out of the way, and kept for whoever wants to know what happened to it
                for other in broken:
                    with contextlib.suppress(OSError):
                        os.rename(folder / other, folder / f"{DAMAGED}{other}")
            return path
        broken.append(name)
    broken += json.loads(tell(comm, json.dumps(sorted(path.name for path in folder.glob(f"{DAMAGED}*")))))
    if broken:
        raise nothing_whole(run, broken)
    return None


def _problems(path: Path, comm: Communicator) -> list[str]:
    """What is wrong with a checkpoint, as far as it is this rank's to find: each looks at its share of the files."""
    try:
        manifest = Manifest.read(path)
        check_numbers(manifest.values)
    except DamagedError as error:
        return [str(error)]
    except ValueError as error:
        return [f"{path}: {error}"]
    return list(damage(path, manifest.files[comm.rank :: comm.size]))


def check_numbers(values: Mapping[str, Any]) -> None:
    """Refuse, with a ValueError, numbers of a checkpoint from which training cannot go on."""
    of_servers = values.get("server_steps", [])
    counts = [values.get("position"), values.get("optimizer_steps")]
    counts += of_servers if isinstance(of_servers, list) else [None]
    scale = values.get("scale")
    numbers = [scale.get("scale"), scale.get("good")] if isinstance(scale, dict) else [None]
    if values.get("loss") is not None:
        numbers.append(values["loss"])
    are_counts = all(isinstance(value, int) and value >= 0 for value in counts)
    if not are_counts or not all(isinstance(value, int | float) for value in numbers):
        raise ValueError("expected position, optimizer_steps and scale as numbers among its values")


@torch.no_grad()
def load_stored(laid: Laid, folder: Path) -> None:
    """This rank's part of the weights of a Hugging Face folder, compressed ones as they are."""
    from tilemesh.model import huggingface

    weights = laid.weights()
    for name, tensor in huggingface.read_parameters(folder, as_stored=True):
        if name in weights:  # another stage's otherwise
            parameter, shard = weights[name]
            if tensor.shape != shard.whole:  # codes that share bytes in files, and none where ranks cut them
                tensor = unpacked(laid.module.get_submodule(name.rpartition(".")[0]), tensor, shard.whole[1])
            parameter.copy_(take(shard, tensor))


def _load_base(loop: Loop, folder: Path, say: Say) -> None:
    """The frozen weights below the adapters; they are in no checkpoint."""
    load_stored(loop.laid, folder)
    if loop.mesh.comm.rank == 0:
        lora = loop.config.lora
        trained, frozen = adapter_parameters(loop.config.model, lora), count_parameters(loop.config.model).total
        say(f"adapters of rank {lora.rank} on the weights of {folder}: {trained:,} of {frozen + trained:,} are trained")


def _copies(name: str, model: ModelConfig) -> Iterator[str]:
    """Parameters of experts that begin as one of an MLP, where the model has experts in its place."""
    parts = re.fullmatch(r"(layers\.(\d+)\.mlp\.)(fc_.*)", name)
    if parts and int(parts[2]) in model.expert_layers:
        yield from (f"{parts[1]}experts.{number}.{parts[3]}" for number in range(model.experts))


def _load_hugging_face(loop: Loop, folder: Path) -> None:
    from tilemesh.model import huggingface  # late: it needs safetensors, which a run that begins afresh does not

    shards = loop.optimizer.shards
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in huggingface.read_parameters(folder):
        owners = (name, f"{CRITIC}.{name}", *_copies(name, loop.config.model))
        weights |= {own: take(shards[own], tensor) for own in owners if own in shards}
    loop.optimizer.load_weights(loop.optimizer.stepped | weights)  # what is trained beside the model begins as it is
    loop.laid.gradients.updated()
