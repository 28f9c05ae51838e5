"""Answers by the engine on the very weights that train.

The one idea: every replica has an engine on its first rank, cut over the replica's ranks as the model that trains is:
each has the engine's weights of its own part. Where these are of the engine's dtype and have no adapters, they are the
training ones' memory and an update copies nothing; else they are merged and written. Every token says which weights
drew it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load as from_bytes
from safetensors.numpy import save as to_bytes
from torch import Tensor, nn

from tilemesh.align.formulas.rollout import Rollout
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import RunError
from tilemesh.measure.timing import without_collection
from tilemesh.model.fresh import give_memory
from tilemesh.model.kinds import Adapted, projections
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.apply import lay_beside
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.whole import reshard
from tilemesh.serve.answers import Completion
from tilemesh.serve.config import EngineConfig
from tilemesh.serve.engine import Engine
from tilemesh.serve.load import ServedModel, WeightSource
from tilemesh.serve.rank import LaidRunner, LeadingRunner, follow_steps, following_runner
from tilemesh.serve.request import Sampling
from tilemesh.serve.runner import Runner

_COMPARED = 4096
"""Numbers of a parameter that are compared after an update."""


class EngineSeat:
    """A rank with an engine, or a place for one."""

    engine: Engine | None = None
    _sleeps = False

    def answer(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[Completion]:
        """Answers in the order of the prompts, on a rank that has an engine; elsewhere none."""
        if self.engine is None or not prompts:
            return []
        if self.engine.asleep:
            self.engine.wake()
        with without_collection():  # a step makes thousands of short-lived objects, and the collector looks at them all
            completions = list(self.engine.generate(prompts, list(samplings)))
        if self._sleeps:
            self.engine.sleep(1)
        return completions

    def _write(self, weights: Iterator[tuple[str, Tensor]], version: int, name: str, trained: Tensor | None) -> None:
        """Weights of the very model that the engine was made for: nobody looks again whether they fit it. What it then
        has is compared with one that trains: differences of weights that lie closer than rounding are found here."""
        assert self.engine is not None
        self.engine.write_weights(WeightSource({}, weights), version, "recompute")
        if self.engine.version != version:
            raise RunError(f"the engine has weights of version {self.engine.version}: expected {version}")
        if pages := self.engine.status.pages_idle:
            raise RunError(f"the engine still finds {pages} pages that weights before version {version} computed: they "
                           "are stale pages")  # fmt: skip
        if trained is not None:
            own = self.engine.served.model.get_parameter(name).flatten()[:_COMPARED]
            if not torch.allclose(trained.flatten()[:_COMPARED].to(own), own, rtol=0, atol=0, equal_nan=True):
                raise RunError(f"{name} of the engine is not that of version {version}: it computes with other weights "
                               "(none came after a sleep, or into memory that it does not read)")  # fmt: skip

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


class RolloutEngine(EngineSeat):
    """An engine whose weights come from ranks that train."""

    def __init__(self, served: ServedModel, dtype: torch.dtype, engine: EngineConfig, device: torch.device) -> None:
        model = Transformer(served.model.config, device="meta", dtype=dtype)
        give_memory(model, device, together=True)
        model.eval().requires_grad_(False)
        self.device, engine = device, dataclasses.replace(engine, device=device.type)
        self.engine = Engine(dataclasses.replace(served, model=model, origin=None), engine)

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        name = list(weights)[version % len(weights)]
        self._write(iter(weights.items()), version, name, weights[name])


class Generator(EngineSeat):
    """An engine beside a laid model; or, without one, what sends the laid model's weights to engines elsewhere."""

    def __init__(
        self,
        laid: Laid,
        served: ServedModel,
        dtype: torch.dtype,
        engine: EngineConfig,
        sleeps: bool | None = None,
        is_elsewhere: bool = False,
        ranks: int | None = None,
    ) -> None:
        """`served`: what tokens mean, and what ends an answer; its model has no memory. `sleeps`: whether the engine
        gives the memory of pages back after each batch of answers; by default on a GPU. `ranks`: of an engine, a
        divisor of tp; None: all of it. A collective call along tp."""
        self.laid, self.device = laid, next(laid.module.parameters()).device
        self._sleeps = self.device.type == "cuda" if sleeps is None else sleeps
        self._version = 0
        self._runner: LaidRunner | None = None
        """Where ranks share the engine: what computes this rank's part."""
        config = laid.model.config
        self.names = [name for name, _ in Transformer(config, device="meta").named_parameters()]
        # To look for a model's parameters takes as long as the rest of an update.
        self._own = dict(laid.model.named_parameters())
        self._adapted = {
            name: (layer, layer.kind) for name, layer in projections(laid.model) if isinstance(layer.kind, Adapted)
        }
        self.place = laid.mesh.dp.index, laid.mesh.dp.size
        """Which of how many engines is this rank's."""
        self._gathers: tuple[Communicator, Sequence[int]] | None = None
        """Ranks that have together what an engine's rank needs, where that is more than one of them has."""
        if is_elsewhere:
            return
        meta, mesh = torch.device("meta"), self._engine_mesh(ranks or laid.mesh.tp.size)
        part = lay_beside(Transformer(config, device=meta, dtype=dtype), laid, meta, mesh)
        self._wanted = part.shards
        weights = {} if self._gathers else dict(self.local_weights())
        is_shared = bool(weights) and not self._adapted and all(each.dtype == dtype for each in weights.values())
        if is_shared:
            _share(part.model, weights)
        else:
            give_memory(part.model, self.device, together=True)
        # Parts of matrices do not lie together as groups of products would lay them: they stay where they are stepped.
        part.model.eval().requires_grad_(is_shared and mesh.tp.size > 1)
        if mesh.tp.index:
            self._runner = following_runner(part, self.device, engine.invariant, engine.packed)
            return

        def make_runner(*arguments: Any) -> Runner:
            self._runner = LeadingRunner(part, *arguments) if mesh.tp.size > 1 else None
            return self._runner or Runner(*arguments)

        engine = dataclasses.replace(engine, device=self.device.type)
        served = dataclasses.replace(served, model=part.model, origin=None)
        self.engine = Engine(served, engine, make_runner=make_runner)

    def _engine_mesh(self, ranks: int) -> Mesh:
        """Of an engine of fewer ranks than tp has: consecutive ones have together what one of an engine needs, which is
        the fewest bytes that can be moved (HybridFlow's; Sheng et al. 2025, arXiv 2409.19256)."""
        tp, dp = self.laid.mesh.tp, self.laid.mesh.dp
        if ranks == tp.size:
            return self.laid.mesh
        each = tp.size // ranks
        first = tp.index // each * each
        gathers, engine = tp.comm.split(tp.index // each), tp.comm.split(tp.index % each)
        assert gathers is not None
        assert engine is not None
        self._gathers = gathers, self.laid.mesh.members("tp")[first : first + each]
        self.place = dp.index * each + tp.index % each, dp.size * each
        return Mesh(engine, tp=ranks)

    def wait(self) -> None:
        """Until a GPU has done what it was given: the last update."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def update(self, version: int) -> None:
        """Compute with the training weights of now, which are this version."""
        if self._version == version:
            return
        self._version = version
        if self.engine is not None:
            name = self.names[version % len(self.names)]
            is_own = self._gathers is None and name.removesuffix(".weight") not in self._adapted
            self._write(self.engine_weights(), version, name, self._own[name].detach() if is_own else None)
        elif self._runner is not None:
            self._runner.write_weights(self.engine_weights())

    @contextlib.contextmanager
    def together(self) -> Iterator[bool]:
        """Inside, whether this rank is to ask its engine; when that one is done, the replica's others are as well (a
        collective call along tp)."""
        if self.engine is None and self._runner is not None:
            follow_steps(self._runner)
        yield self.engine is not None
        if isinstance(self._runner, LeadingRunner):
            self._runner.release()

    def whole_weights(self) -> dict[str, Tensor] | None:
        """On the first rank of the mesh all weights, adapters merged (a collective call)."""
        if self.laid.mesh.tp.size > 1:
            return self._joined()
        return dict(self.local_weights()) if self.laid.mesh.comm.rank == 0 else None

    def engine_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of this rank's part of the engine (a collective call where that is more than its own)."""
        if self._gathers is None:
            return self.local_weights()
        parts = ((self.laid.shards[name], tensor) for name, tensor in self.local_weights())
        return reshard(parts, self._wanted, *self._gathers)

    def local_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of this rank's own part, adapters merged."""
        with torch.no_grad():
            for name in self.names:
                if adapted := self._adapted.get(name.removesuffix(".weight")):
                    layer, kind = adapted
                    yield name, kind.dense(layer)
                else:
                    yield name, self._own[name].detach()

    def _joined(self) -> dict[str, Tensor] | None:
        """Whole weights, put together of what ranks hold."""
        gathered = self.laid.gather()
        if gathered is not None:
            for name, (_, kind) in self._adapted.items():
                low, high = gathered[f"{name}.lora_a"], gathered[f"{name}.lora_b"]
                gathered[f"{name}.weight"] = gathered[f"{name}.weight"] + kind.scale * (high @ low)
            gathered = {name: gathered[name] for name in self.names}
        return gathered


def _share(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    """Make a model of these tensors, whose memory stays theirs."""
    for name, tensor in weights.items():
        module, _, last = name.rpartition(".")
        model.get_submodule(module).register_parameter(last, nn.Parameter(tensor, requires_grad=False))


# Arrays between ranks, and on disk ------------------------------------------------------------------------------------


def packed_bytes(rollout: Rollout, arrays: Mapping[str, np.ndarray], notes: object = None) -> bytes:
    """A rollout and arrays beside it as safetensors."""
    fields = {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)}
    fields.pop("finish")
    words = json.dumps({"finish": list(rollout.finish), "notes": notes}).encode()
    every = {f"rollout.{name}": value for name, value in fields.items()} | {
        f"beside.{name}": np.asarray(value) for name, value in arrays.items()
    }
    every["words"] = np.frombuffer(words, np.uint8)
    raw: bytes = to_bytes({name: np.ascontiguousarray(value) for name, value in every.items()})
    return raw


def unpacked_bytes(raw: bytes) -> tuple[Rollout, dict[str, np.ndarray], object]:
    """The inverse of `packed_bytes`."""
    every = from_bytes(raw)
    words = json.loads(bytes(every.pop("words")))
    fields = {name.partition(".")[2]: value for name, value in every.items() if name.startswith("rollout.")}
    beside = {name.partition(".")[2]: value for name, value in every.items() if name.startswith("beside.")}
    return Rollout(**fields, finish=tuple(words["finish"])), beside, words["notes"]
