"""Weights in a folder of torch's distributed checkpoints, with Hugging Face's names of tensors: read and written.

Whatever mesh wrote it, a tensor is read whole. Its index is a pickle, so it is opened by a reader that makes the
classes of such an index and nothing else; torch itself reads tensors with `weights_only`.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tilemesh.core.errors import UsageError

INDEX = ".metadata"
_KNOWN = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
}  # fmt: skip
_WRAPPER = "model."
"""Where a script saved `{"model": model.state_dict(), ...}`."""


class _IndexUnpickler(pickle.Unpickler):
    """Makes what an index is made of."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and name in ("PosixPath", "PurePosixPath"):
            return PurePosixPath
        if (module, name) in _KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no part of an index")


class _IndexReader(FileSystemReader):
    """Reads the index once."""

    metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.metadata is None:
            with open(Path(self.path) / INDEX, "rb") as file:
                self.metadata = _IndexUnpickler(file).load()
            self.metadata.storage_meta = self.metadata.storage_meta or StorageMeta()
        return self.metadata


class DistributedCheckpoint:
    """The tensors of such a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _IndexReader(folder)
        try:
            entries = self._reader.read_metadata().state_dict_metadata
        except (OSError, pickle.UnpicklingError, AttributeError, EOFError, ValueError, TypeError) as error:
            raise UsageError(f"{folder / INDEX} is no index of a distributed checkpoint: {error}") from None
        tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        is_wrapped = any(name.startswith(_WRAPPER + _WRAPPER) for name in tensors)
        self._wrapper = _WRAPPER if is_wrapped else ""
        self._tensors = {
            name.removeprefix(self._wrapper): entry
            for name, entry in tensors.items()
            if name.startswith(self._wrapper) and not name.startswith("optim")
        }

    def headers(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        for name, entry in self._tensors.items():
            yield name, tuple(entry.size), entry.properties.dtype

    def get_tensor(self, name: str) -> Tensor:
        entry = self._tensors[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            with warnings.catch_warnings(action="ignore"):  # that there is one process
                load({self._wrapper + name: tensor}, storage_reader=self._reader, no_dist=True)
        except (CheckpointException, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            parts = self._reader.read_metadata().storage_data.items()
            files = sorted({part.relative_path for index, part in parts if index.fqn == self._wrapper + name})
            causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
            why = " ".join(str([*causes, error][0]).strip().splitlines()[:1])
            raise UsageError(
                f"{self.folder / ' or '.join(files)} is missing or not whole: {name} cannot be read ({why}); copy the "
                "checkpoint again"
            ) from None
        return tensor


def save_distributed(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write them as one process would."""
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        save(dict(tensors), checkpoint_id=folder, no_dist=True)
