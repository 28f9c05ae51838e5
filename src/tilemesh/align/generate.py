"""Answers by the engine on the very weights that train.

The one idea: every replica's first rank has an engine over whole weights. Where that rank's part is whole and of the
engine's dtype, the engine's parameters are the training ones' memory and an update copies nothing; else they are put
together, adapters merged, and written. Every token says which weights drew it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from safetensors.numpy import load as from_bytes
from safetensors.numpy import save as to_bytes
from torch import Tensor, nn

from tilemesh.align.formulas.rollout import Rollout
from tilemesh.core.errors import RunError
from tilemesh.model.fresh import give_memory
from tilemesh.model.kinds import Adapted, projections
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.whole import handed_around
from tilemesh.serve.answers import Completion
from tilemesh.serve.config import EngineConfig
from tilemesh.serve.engine import Engine
from tilemesh.serve.load import ServedModel
from tilemesh.serve.request import Sampling


class EngineSeat:
    """A rank with an engine, or a place for one."""

    _engine: Engine | None = None
    _sleeps = False

    def answer(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[Completion]:
        """Answers in the order of the prompts, on a rank that has an engine; elsewhere none."""
        if self._engine is None or not prompts:
            return []
        if self._engine.asleep:
            self._engine.wake()
        completions = list(self._engine.generate(prompts, list(samplings)))
        if self._sleeps:
            self._engine.sleep(1)
        return completions

    def _write(self, weights: Mapping[str, Tensor], version: int) -> None:
        assert self._engine is not None
        self._engine.update_weights(weights, version, running="recompute")
        if self._engine.version != version:
            raise RunError(f"the engine has weights of version {self._engine.version}: expected {version}")

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


class RolloutEngine(EngineSeat):
    """An engine whose weights come from ranks that train."""

    def __init__(self, served: ServedModel, dtype: torch.dtype, engine: EngineConfig, device: torch.device) -> None:
        model = Transformer(served.model.config, device="meta", dtype=dtype)
        give_memory(model, device, together=True)
        model.eval().requires_grad_(False)
        engine = dataclasses.replace(engine, device=device.type)
        self._engine = Engine(dataclasses.replace(served, model=model, origin=None), engine)

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        self._write(weights, version)


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
    ) -> None:
        """`served`: what tokens mean, and what ends an answer; its model has no memory. `sleeps`: whether the engine
        gives the memory of pages back after each batch of answers; by default on a GPU."""
        self.laid, mesh = laid, laid.mesh
        self.is_here = mesh.tp.index == 0 and not is_elsewhere
        self._is_local = mesh.tp.size == 1  # all that the engine needs lies on this rank
        self.device = next(laid.module.parameters()).device
        self._sleeps = self.device.type == "cuda" if sleeps is None else sleeps
        config = laid.model.config
        self.names = [name for name, _ in Transformer(config, device="meta").named_parameters()]
        if not self.is_here:
            return
        model = Transformer(config, device="meta", dtype=dtype)
        weights = dict(self._local_weights()) if self._is_local else {}
        is_shared = self._is_local and all(tensor.dtype == dtype for tensor in weights.values()) and not self._adapted
        if is_shared:
            _share(model, weights)
        else:
            give_memory(model, self.device, together=True)
        model.eval().requires_grad_(False)
        engine = dataclasses.replace(engine, device=self.device.type)
        self._engine = Engine(dataclasses.replace(served, model=model, origin=None), engine)

    @property
    def _adapted(self) -> bool:
        return any(isinstance(layer.kind, Adapted) for _, layer in projections(self.laid.model))

    def update(self, version: int) -> None:
        """Compute with the training weights of now, which are this version (a collective call)."""
        if self._engine is not None and self._engine.version == version and self._is_local:
            return
        weights = dict(self._local_weights() if self._is_local else self._gathered())
        if self._engine is None or self._engine.version == version:
            return
        self._write(weights, version)

    def whole_weights(self) -> dict[str, Tensor] | None:
        """On the first rank of the mesh all weights, adapters merged (a collective call)."""
        if not self._is_local:
            return self._joined()
        return dict(self._local_weights()) if self.laid.mesh.comm.rank == 0 else None

    def _local_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights of this rank's own model, adapters merged."""
        merged = {
            f"{name}.weight": layer for name, layer in projections(self.laid.model) if isinstance(layer.kind, Adapted)
        }
        own = dict(self.laid.model.named_parameters())
        with torch.no_grad():
            for name in self.names:
                yield name, merged[name].kind.dense(merged[name]) if name in merged else own[name].detach()

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights, put together of what ranks hold (a collective call)."""
        yield from handed_around(self.laid.mesh.comm, self._joined(), 0)

    def _joined(self) -> dict[str, Tensor] | None:
        gathered = self.laid.gather()
        scales = {
            name: layer.kind.scale for name, layer in projections(self.laid.model) if isinstance(layer.kind, Adapted)
        }
        if gathered is not None:
            for name, scale in scales.items():
                low, high = gathered[f"{name}.lora_a"], gathered[f"{name}.lora_b"]
                gathered[f"{name}.weight"] = gathered[f"{name}.weight"] + scale * (high @ low)
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
