"""Weights in Hugging Face's layouts: a folder of safetensors and a config.json, read and written.

The one idea: names, shapes and dtypes are checked in the headers of the files before a weight is read, and what is
expected follows from the family's list of tensors (`families.entries`). Nothing pickled is ever opened.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import ensure_folder, read_json_object, replacing, write_text
from tilemesh.model.config import ModelConfig
from tilemesh.model.families.book import (
    CONFIG,
    DISTRIBUTED_INDEX,
    FAMILIES,
    MXFP4,
    QUANTIZATION,
    entries,
    family_of,
    read_config,
    to_json,
)
from tilemesh.model.families.carried import copy_carried, special_ids
from tilemesh.model.families.deepseek import SELECTING
from tilemesh.model.families.family import Entry
from tilemesh.model.fresh import give_memory
from tilemesh.model.linear import MatrixKind
from tilemesh.model.lowbit_files import OURS, CompressedFolder, compressed_tensors
from tilemesh.model.mxfp4 import BLOCKS, SCALES, CodedMatrices
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.weights import parameter_shapes

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OWN_WEIGHTS = "tilemesh.safetensors"
"""Where matrices are kept in a form of ours: transformers, which knows no quant_method of ours and would begin with
random ones, finds no weights under this name and refuses the folder."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LISTED = 20  # lines of a refusal; a folder of another model would fill the screen


def load(
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    foresee: Callable[[Transformer], None] = lambda model: None,
) -> Transformer:
    """The model in a Hugging Face folder, in the dtype of its files unless another is asked for.

    `foresee` is given it before its weights are read, on the meta device."""
    config = read_config(folder)
    with ExitStack() as files:
        # The dtype does not matter for what is looked for, and is known only when the headers have been read.
        compressed = _compressed(Path(folder), Transformer(config, device="meta"))
        stored = _checked(Path(folder), config, files, compressed)
        if dtype is None:
            dtype = _only_dtype(Path(folder), stored, compressed)
        model = Transformer(config, device="meta", dtype=dtype)
        compressed = _compressed(Path(folder), model)
        foresee(model)
        give_memory(model, "cpu" if device is None else device, together=True)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in _parameters(config, stored, compressed):
                parameters[name].copy_(tensor)
        if compressed is not None:
            compressed.fill({name: stored[name].read() for name in compressed.tensors()})
    return model


def save(model: Transformer, folder: str | Path, like: str | Path | None = None) -> None:
    """Write config.json and model.safetensors such that `transformers` and `load` read the same model; a model that
    was compressed in a form of ours goes to tilemesh.safetensors, which `load` alone reads.

    `like`: the Hugging Face folder that the model came from; its tokenizer and special tokens are carried along.
    """
    more: dict[str, Any] = {} if like is None else special_ids(like)
    told, tensors, covered = compressed_tensors(model)
    if covered:
        more[QUANTIZATION] = told
    if like is not None:
        copy_carried(like, folder)
    save_parameters(model.config, dict(model.named_parameters()), folder, more, tensors, covered)


def stored_kinds(folder: str | Path) -> dict[str, MatrixKind]:
    """The kinds of the matrices that a folder has compressed, by our names."""
    compressed = _compressed(Path(folder), Transformer(read_config(folder), device="meta"))
    return {} if compressed is None else compressed.kinds


def read_parameters(folder: str | Path, *, as_stored: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Our name and tensor, one after the other in the files' dtype: for a rank that keeps only a part of each.

    `as_stored`: of compressed matrices their pieces, for a model of `stored_kinds`; otherwise the weights they mean.
    """
    with ExitStack() as files:
        config = read_config(folder)
        compressed = _compressed(Path(folder), Transformer(config, device="meta"))
        stored = _checked(Path(folder), config, files, compressed)
        yield from _parameters(config, stored, compressed)
        if compressed is not None:
            read = {name: stored[name].read() for name in compressed.tensors()}
            if as_stored:
                yield from compressed.pieces(read)
            else:
                yield from compressed.decoded(read, _only_dtype(Path(folder), stored, compressed))


def save_parameters(
    config: ModelConfig,
    parameters: Mapping[str, Tensor],
    folder: str | Path,
    special_tokens: Mapping[str, Any] | None = None,
    compressed: Mapping[str, Tensor] | None = None,
    covered: Collection[str] = (),
    *,
    distributed: bool = False,
) -> None:
    """`save` for a model that lies elsewhere, as a mapping from our names to whole tensors. config.json, without which
    a folder is no model's, comes last: what lies beside it is written before.

    `special_tokens`: what config.json says of them, such as eos_token_id. `compressed`: tensors of compressed matrices,
    which stand for the parameters `covered`. `distributed`: weights as a distributed checkpoint of torch.
    """
    tensors = dict(compressed or {})
    for entry in entries(config):
        if covered and set(entry.ours) <= set(covered):
            continue
        if set(entry.ours) & set(covered):  # several of ours in one of theirs, and some of them compressed
            tensors |= {name: parameters[name].detach().contiguous() for name in entry.ours if name not in covered}
            continue
        whole = _joined(entry, [parameters[name].detach() for name in entry.ours])
        tensors[entry.theirs] = (whole.mT if entry.transposed else whole).contiguous()
        if whole.device.type == "meta":
            raise UsageError(f"{entry.ours[0]} is on the meta device and has no values: initialise or load the model")
    folder = Path(folder)
    ensure_folder(folder)
    dtype = str(parameters["token_embedding.weight"].dtype).removeprefix("torch.")
    more = dict(special_tokens or {})
    text = json.dumps(to_json(config, dtype) | more, indent=2, sort_keys=True) + "\n"
    own = more.get(QUANTIZATION, {}).get("quant_method") == OURS
    weights, other = (OWN_WEIGHTS, WEIGHTS) if own else (WEIGHTS, OWN_WEIGHTS)
    if distributed:
        from tilemesh.model.dcp_files import save_distributed

        save_distributed(tensors, folder)
        write_text(text, folder / CONFIG)
        return
    with replacing(folder / CONFIG) as config_part, replacing(folder / weights) as weights_part:
        try:
            save_file(tensors, weights_part, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, mostly
            raise RunError(f"{folder / weights} cannot be written: {error}") from None
        config_part.write_text(text, encoding="utf-8")
        for name in (CONFIG, other):  # of a model that was written here before
            (folder / name).unlink(missing_ok=True)


# ---- files -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """One tensor in a file: its header, and the open file to read it from."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor


def _compressed(folder: Path, model: Transformer) -> CompressedFolder | None:
    """What is compressed in a folder; the model, which has no memory yet, gets modules of that kind."""
    told = read_json_object(folder / CONFIG).get(QUANTIZATION)
    if told is None or (isinstance(told, Mapping) and told.get("quant_method") == MXFP4):
        return None
    if not isinstance(told, Mapping):
        raise UsageError(f"{folder / CONFIG}: {QUANTIZATION} is {told!r}: expected an object")
    return CompressedFolder(model, told, str(folder / CONFIG))


def _parameters(
    config: ModelConfig, stored: Mapping[str, Stored], compressed: CompressedFolder | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Plain ones."""
    shapes = parameter_shapes(config)
    for entry in entries(config):
        if compressed is not None and any(compressed.covers(name) for name in entry.ours):
            for name in entry.ours:
                if not compressed.covers(name):
                    yield name, stored[name].read()
            continue
        tensor = stored[entry.theirs].read()
        parts = _separated(entry, tensor.mT if entry.transposed else tensor, [shapes[name][0] for name in entry.ours])
        yield from zip(entry.ours, parts, strict=True)


def _joined(entry: Entry, ours: Sequence[Tensor]) -> Tensor:
    """Our parameters as one tensor of theirs, before it is transposed."""
    if entry.stack:
        each, one = len(ours) // entry.stack, dataclasses.replace(entry, stack=0)
        return torch.stack([_joined(one, ours[at : at + each]) for at in range(0, len(ours), each)])
    if len(ours) == 1:
        return ours[0][list(entry.rows)] if entry.rows else ours[0]
    if not entry.heads:
        return torch.cat(list(ours))
    by_head = [part.reshape(entry.heads, -1, *part.shape[1:]) for part in ours]
    return torch.cat(by_head, dim=1).flatten(0, 1)


def _separated(entry: Entry, whole: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
    """The way back: our parameters, of so many rows each."""
    if entry.stack:
        each, one = rows[: len(rows) // entry.stack], dataclasses.replace(entry, stack=0)
        return [part for expert in whole for part in _separated(one, expert, each)]
    if entry.rows:
        return [torch.empty_like(whole).index_copy_(0, torch.tensor(entry.rows, device=whole.device), whole)]
    if not entry.heads:
        return torch.split(whole, list(rows))
    by_head = whole.reshape(entry.heads, -1, *whole.shape[1:])
    parts = torch.split(by_head, [count // entry.heads for count in rows], dim=1)
    return [part.flatten(0, 1) for part in parts]


def _expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Their names and shapes."""
    shapes, expected = parameter_shapes(config), {}
    for entry in entries(config):
        rows = sum(shapes[name][0] for name in entry.ours)
        shape = (rows // (entry.stack or 1), *shapes[entry.ours[0]][1:])
        shape = shape[::-1] if entry.transposed else shape
        expected[entry.theirs] = (entry.stack, *shape) if entry.stack else shape
    return expected


def _checked(
    folder: Path, config: ModelConfig, files: ExitStack, compressed: CompressedFolder | None = None
) -> dict[str, Stored]:
    """Every expected tensor by its full name, or one error with a line for each that is not as expected."""
    family, expected = FAMILIES[family_of(config)], _expected(config)
    coded: set[str] = set()
    if compressed is not None:
        coded, shapes = set(compressed.tensors()), parameter_shapes(config)
        for entry in entries(config):
            if any(compressed.covers(name) for name in entry.ours):
                del expected[entry.theirs]
                expected |= {name: shapes[name] for name in entry.ours if not compressed.covers(name)}
    head, table = family.head, next(iter(expected))
    # A tied output may be written out as well; it then has to be the embedding.
    known = expected | {head: expected[table]} if config.tied else expected
    stored: dict[str, Stored] = {}
    lines = []
    for opened_file in _decoding(_opened(folder, files)):
        name = opened_file.name
        if re.fullmatch(family.leftovers, name.removeprefix(family.prefix)):
            continue
        if name in coded:
            stored[name] = opened_file
            continue
        full = name if name in known else family.prefix + name
        if full not in known or full in stored:
            lines.append(f"unexpected: {name}, shape {opened_file.shape}")
        elif opened_file.shape != known[full]:
            lines.append(f"mis-shaped: {name}, shape {opened_file.shape}, expected {known[full]}")
        elif opened_file.dtype not in _DTYPES:
            lines.append(f"not floating point: {name}, {opened_file.dtype}, expected one of {', '.join(_DTYPES)}")
        stored.setdefault(full, opened_file)
    if not stored.keys() & expected.keys():
        raise UsageError(
            f"{folder}: no tensor has the name that Hugging Face gives those of this {CONFIG}, such as {table}; "
            f"there is {lines[0].removeprefix('unexpected: ') if lines else 'none'}: write it with those names, or "
            f"its own {CONFIG}"
        )
    lines += [f"missing: {name}, expected shape {shape}" for name, shape in expected.items() if name not in stored]
    lines += [f"missing: {name}, which {CONFIG} says is there" for name in sorted(coded) if name not in stored]
    if not lines and config.tied and head in stored and not torch.equal(stored[head].read(), stored[table].read()):
        lines.append(f"{head} differs from {table}, and config.json says that they are tied")
    if lines:
        more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
        raise UsageError("\n  ".join([f"{folder}: tensors do not fit config.json", *lines[:_LISTED], *more]))
    return stored


def _opened(folder: Path, files: ExitStack) -> list[Stored]:
    """The headers of all tensors in a folder's files."""
    if (folder / DISTRIBUTED_INDEX).exists():
        from tilemesh.model.dcp_files import DistributedCheckpoint

        checkpoint = DistributedCheckpoint(folder)
        names = {dtype: name for name, dtype in _DTYPES.items()}
        return [
            Stored(checkpoint, name, shape, names.get(dtype, str(dtype))) for name, shape, dtype in checkpoint.headers()
        ]
    opened_files = []
    for path in _files(folder):
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118  (not a dict)
                header = file.get_slice(name)
                opened_files.append(Stored(file, name, tuple(header.get_shape()), header.get_dtype()))
        except FileNotFoundError:
            raise UsageError(f"{path} does not exist, and {INDEX} names it: the folder is not complete") from None
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path} is not a whole safetensors file: {error}") from None
    return opened_files


def _decoding(opened: Sequence[Stored]) -> list[Stored]:
    """With two tensors that are one in four bits as that one."""
    known = {each.name: each for each in opened}
    for name in [name.removesuffix(BLOCKS) for name in known if name.endswith(BLOCKS)]:
        blocks, scales = known[name + BLOCKS], known.get(name + SCALES)
        is_coded = scales is not None and blocks.dtype == scales.dtype == "U8"
        if scales is not None and is_coded and len(blocks.shape) == 4 and blocks.shape == (*scales.shape, 16):
            experts, rows, groups, _ = blocks.shape
            coded = Stored(CodedMatrices(blocks.file, scales.file), name, (experts, 32 * groups, rows), "BF16")
            known = {key: each for key, each in known.items() if each not in (blocks, scales)} | {name: coded}
    return list(known.values())


def _files(folder: Path) -> list[Path]:
    for name in (WEIGHTS, OWN_WEIGHTS):
        if (folder / name).exists():
            return [folder / name]
    try:
        names = sorted(set(read_json_object(folder / INDEX)["weight_map"].values()))
    except FileNotFoundError:
        pickled = [path.name for path in sorted(folder.glob("*.bin"))]
        hint = f"; {pickled[0]} is pickled and never opened: save the model again with safetensors" if pickled else ""
        raise UsageError(f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder / INDEX} is not an index of safetensors files: {error!r}") from None
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise UsageError(f"{folder / INDEX} names {outside[0]!r}: expected files of this folder")
    return [folder / name for name in names]


def _only_dtype(folder: Path, stored: Mapping[str, Stored], compressed: CompressedFolder | None) -> torch.dtype:
    """Of plain weights; the bias that a router selects by is in float32 beside narrow ones."""
    coded = set() if compressed is None else set(compressed.tensors())
    plain = (name for name in stored if name not in coded and not name.endswith(SELECTING))
    dtypes = sorted({stored[name].dtype for name in plain})
    if len(dtypes) > 1:
        raise UsageError(f"{folder} holds tensors of {' and '.join(dtypes)}: say which to compute in with dtype=")
    return _DTYPES[dtypes[0]]
