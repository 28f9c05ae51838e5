"""Folders of compressed models: config.json says how each matrix is kept, a safetensors file has codes and scales.

The one idea: two layouts, one reader. Where Hugging Face's compressed-tensors has a form for every matrix (whole
numbers of 2, 3, 4 and 8 bits and fp8, in matrices that are one Linear there), names and bits are theirs, one group for
each way in which matrices are kept; everything else is kept by our names under `quantization_config.quant_method`
"tilemesh", in a file that other readers do not find. What is not compressed lies there as `huggingface.py` writes it.

Their form (compressed-tensors 0.20): M.weight (int8 or float8_e4m3fn) or M.weight_packed (int32 words, the first code
in the lowest bits, plus 2^(bits-1)), M.weight_shape, M.weight_scale, M.weight_zero_point (with packed codes packed too,
along the outputs), M.input_scale. Ours: M.codes, M.scales, M.zeros, M.input_scale, M.left, M.right, M.bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.lowbit.codes import pack, unpack
from tilemesh.kernels.lowbit.formats import Scheme, parse_scheme
from tilemesh.model.families.book import FAMILIES, QUANTIZERS, entries, family_of
from tilemesh.model.kinds import CODES, INPUT_SCALE, SCALES, ZEROS, Factored, FewBits, projections, put_kinds
from tilemesh.model.linear import Linear, MatrixKind, as_kind
from tilemesh.model.transformer import Transformer

THEIRS, OURS = QUANTIZERS
_PACKED, _WHOLE, _FLOAT, _SEVERAL = "pack-quantized", "int-quantized", "float-quantized", "mixed-precision"
_FORMS = {"int2": _PACKED, "int3": _PACKED, "int4": _PACKED, "int8": _WHOLE, "fp8": _FLOAT}
_PACKED_CODES, _PACKED_SHAPE = "weight_packed", "weight_shape"


def compressed_kinds(model: Transformer) -> dict[str, MatrixKind]:
    """Of every compressed matrix by our name, as it lies in a file."""
    kinds: dict[str, MatrixKind] = {}
    for name, layer in projections(model):
        if isinstance(layer.kind, FewBits):
            kinds[name] = FewBits(layer.kind.scheme, layer.kind.inputs, layer.kind.static)
        elif isinstance(layer.kind, Factored):
            kinds[name] = layer.kind
    return kinds


def _to_json(kind: MatrixKind) -> dict[str, Any]:
    if isinstance(kind, Factored):
        return {"rank": kind.rank}
    assert isinstance(kind, FewBits)
    words = {"scheme": kind.scheme.name, "inputs": kind.inputs and kind.inputs.name, "static": kind.static}
    return {key: value for key, value in words.items() if value}


def _from_json(scheme: str = "", inputs: str = "", static: bool = False, rank: int = 0) -> MatrixKind:
    """The way back."""
    return Factored(rank) if rank else FewBits(parse_scheme(scheme), parse_scheme(inputs) if inputs else None, static)


def _piece_names(layer: Linear) -> list[str]:
    return [piece.name for piece in layer.kind.pieces(layer.out_features, layer.in_features)]


# ---- writing ---------------------------------------------------------------------------------------------------


def compressed_tensors(model: Transformer) -> tuple[dict[str, Any], dict[str, Tensor], set[str]]:
    """What config.json says, the tensors of compressed matrices, and which of our parameters these stand for."""
    kinds, layers = compressed_kinds(model), dict(projections(model))
    covered = {f"{name}.weight" for name in kinds}
    theirs = _their_names(model)
    few_bits = {name: kind for name, kind in kinds.items() if isinstance(kind, FewBits) and _has_their_form(kind)}
    tensors: dict[str, Tensor] = {}
    if kinds and set(kinds) <= theirs.keys() & few_bits.keys():
        for name in kinds:
            tensors |= _in_their_form(theirs[name], layers[name])
        return _their_config(few_bits, theirs, model), tensors, covered
    for name in kinds:
        for piece in _piece_names(layers[name]):
            tensors[f"{name}.{piece}"] = layers[name].get_parameter(piece).detach().contiguous()
    matrices = {name: _to_json(kind) for name, kind in kinds.items()}
    return {"quant_method": OURS, "version": 1, "matrices": matrices}, tensors, covered


def _their_names(model: Transformer) -> dict[str, str]:
    """Of our matrices that are one plain Linear on their side."""
    names = {}
    for entry in entries(model.config):
        if (
            len(entry.ours) == 1
            and not entry.transposed
            and not entry.heads
            and not entry.rows
            and entry.ours[0].endswith(".weight")
        ):
            names[entry.ours[0].removesuffix(".weight")] = entry.theirs.removesuffix(".weight")
    return names


def _has_their_form(kind: FewBits) -> bool:
    scheme = kind.scheme
    if scheme.format not in _FORMS or scheme.levels != 1 or (not scheme.symmetric and scheme.granularity == "tensor"):
        return False
    if scheme.format == "fp8" and scheme.granularity == "group":
        return False
    return kind.inputs is None or kind.inputs.name == ("fp8" if scheme.format == "fp8" else "int8")


def _their_config(kinds: Mapping[str, FewBits], theirs: Mapping[str, str], model: Transformer) -> dict[str, Any]:
    """One group for each kind of matrix."""
    targets = {kind: sorted(theirs[name] for name in kinds if kinds[name] == kind) for kind in kinds.values()}
    forms = {_FORMS[kind.scheme.format] for kind in targets}
    head = FAMILIES[family_of(model.config)].head.removesuffix(".weight")
    ignored = [] if any(head in names for names in targets.values()) else [head]
    return {
        "quant_method": THEIRS, "format": forms.pop() if len(forms) == 1 else _SEVERAL,
        "config_groups": {f"group_{number}": _their_group(*each) for number, each in enumerate(targets.items())},
        "quantization_status": "compressed", "ignore": ignored, "kv_cache_scheme": None,
        "global_compression_ratio": None, "version": "0.20.0",
    }  # fmt: skip


def _their_group(kind: FewBits, targets: list[str]) -> dict[str, Any]:
    scheme = kind.scheme
    weights = {
        "num_bits": scheme.bits, "type": "float" if scheme.format == "fp8" else "int", "symmetric": scheme.symmetric,
        "strategy": scheme.granularity, "group_size": scheme.group or None, "dynamic": False, "actorder": None,
    }  # fmt: skip
    inputs = None
    if kind.inputs is not None:
        inputs = {
            "num_bits": 8, "type": "float" if kind.inputs.format == "fp8" else "int", "symmetric": True,
            "strategy": "tensor" if kind.static else "token", "dynamic": not kind.static,
        }  # fmt: skip
    return {
        "targets": targets, "weights": weights, "input_activations": inputs, "output_activations": None,
        "format": _FORMS[scheme.format],
    }  # fmt: skip


def _their_pieces(layer: Linear) -> dict[str, str]:
    """What a layer's pieces are called there."""
    assert isinstance(layer.kind, FewBits)
    codes = _PACKED_CODES if _FORMS[layer.kind.scheme.format] == _PACKED else "weight"
    names = {CODES: codes, SCALES: "weight_scale", ZEROS: "weight_zero_point", INPUT_SCALE: "input_scale"}
    return {piece: names[piece] for piece in _piece_names(layer)}


def _in_their_form(name: str, layer: Linear) -> dict[str, Tensor]:
    kind = layer.kind
    assert isinstance(kind, FewBits)
    scheme, their = kind.scheme, _their_pieces(layer)
    pieces = {piece: layer.get_parameter(piece).detach() for piece in their} | {CODES: kind.codes(layer)}
    if scheme.granularity == "tensor":
        pieces[SCALES] = pieces[SCALES][0]
    if scheme.format == "fp8":
        pieces[CODES] = pieces[CODES].view(torch.float8_e4m3fn)
    elif their[CODES] == _PACKED_CODES:
        pieces[CODES] = _words(pieces[CODES], scheme)
        if ZEROS in pieces:  # packed along the outputs
            pieces[ZEROS] = _words(pieces[ZEROS].t(), scheme).t()
    if INPUT_SCALE in pieces:
        pieces[INPUT_SCALE] = pieces[INPUT_SCALE].reshape(1)
    tensors = {f"{name}.{their[piece]}": value.contiguous() for piece, value in pieces.items()}
    if their[CODES] == _PACKED_CODES:
        tensors[f"{name}.{_PACKED_SHAPE}"] = torch.tensor((layer.out_features, layer.in_features))
    return tensors


def _words(codes: Tensor, scheme: Scheme) -> Tensor:
    """int32 words of packed codes."""
    packed = pack(codes, scheme.number)
    return nn.functional.pad(packed, (0, -packed.shape[1] % 4)).contiguous().view(torch.int32)


def _from_words(words: Tensor, scheme: Scheme, inputs: int) -> Tensor:
    packed = words.flatten().view(len(words), -1).view(torch.uint8)[:, : scheme.row_bytes(inputs)]
    return unpack(packed.contiguous(), scheme.number, inputs)


# ---- reading ---------------------------------------------------------------------------------------------------


class CompressedFolder:
    """What a folder's config.json says of its compressed matrices, and how they are read."""

    def __init__(self, model: Transformer, settings: Mapping[str, Any], source: str) -> None:
        """`model`: on the meta device, plain; its projections become what the folder has."""
        self.model, self.source = model, source
        self.is_theirs = settings.get("quant_method") == THEIRS
        self.names = _their_names(model)
        self.kinds = self._of_theirs(settings) if self.is_theirs else self._of_ours(settings)
        put_kinds(model, self.kinds)

    def _of_ours(self, settings: Mapping[str, Any]) -> dict[str, MatrixKind]:
        matrices = settings.get("matrices")
        known = {name for name, module in self.model.named_modules() if isinstance(module, nn.Linear)}
        kinds = {}
        if not isinstance(matrices, Mapping):
            raise UsageError(f"{self.source}: quantization_config has no matrices: expected what tilemesh writes")
        for name, each in matrices.items():
            if name not in known:
                raise unknown(f"matrix in {self.source}", name, sorted(known)[:3], near=known)
            try:
                kinds[name] = _from_json(**each)
            except TypeError:
                raise UsageError(f"{self.source}: {name} is kept as {each!r}: expected scheme, or rank") from None
        return kinds

    def _of_theirs(self, settings: Mapping[str, Any]) -> dict[str, MatrixKind]:
        groups = settings.get("config_groups")
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            raise UsageError(f"{self.source}: quantization_config has no config_groups: expected compressed-tensors'")
        kinds: dict[str, MatrixKind] = {}
        for group in groups.values():
            kind = self._kind(group, group.get("format") or settings.get("format"))
            kinds |= dict.fromkeys(self._targeted(group, set(settings.get("ignore") or ())), kind)
        return kinds

    def _kind(self, group: Mapping[str, Any], form: object) -> MatrixKind:
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        format_name = "fp8" if weights.get("type") == "float" else f"int{weights.get('num_bits')}"
        strategy, symmetric = weights.get("strategy"), bool(weights.get("symmetric", True))
        is_known = _FORMS.get(format_name) == form and strategy in ("tensor", "channel", "group")
        if not is_known or weights.get("actorder") or (strategy == "tensor" and not symmetric):
            raise UsageError(
                f"{self.source}: weights of {format_name} per {strategy}, {form}"
                + (", reordered" * bool(weights.get("actorder")))
                + f": only {', '.join(_FORMS)} per tensor, channel or group can be read, those of few bits {_PACKED}"
            )
        size = weights.get("group_size") if strategy == "group" else 0
        scheme = Scheme(format_name, strategy, int(size or 0), symmetric)  # type: ignore[arg-type]  # known from above
        rounded = Scheme("fp8" if inputs.get("type") == "float" else "int8") if inputs else None
        return FewBits(scheme, rounded, bool(inputs) and not inputs.get("dynamic", True))

    def _targeted(self, group: Mapping[str, Any], ignored: Set[str]) -> list[str]:
        """Our names of a group's matrices."""
        targets = set(group.get("targets") or ())
        return [
            ours
            for ours, theirs in self.names.items()
            if ("Linear" in targets or theirs in targets) and theirs not in ignored
            and not ours.endswith("embedding") and isinstance(self.model.get_submodule(ours), nn.Linear)
        ]  # fmt: skip

    def covers(self, parameter: str) -> bool:
        """Whether a parameter of ours is read from here, and not as a plain weight."""
        module, _, last = parameter.rpartition(".")
        return module in self.kinds and last == "weight"

    def tensors(self) -> Iterator[str]:
        """Names of the tensors in the folder's files that are read here."""
        for name, layer in self._layers():
            if not self.is_theirs:
                yield from (f"{name}.{piece}" for piece in _piece_names(layer))
                continue
            their = _their_pieces(layer)
            yield from (f"{self.names[name]}.{part}" for part in their.values())
            if their[CODES] == _PACKED_CODES:
                yield f"{self.names[name]}.{_PACKED_SHAPE}"

    def _layers(self) -> Iterator[tuple[str, Linear]]:
        return ((name, layer) for name, layer in projections(self.model) if name in self.kinds)

    @torch.no_grad()
    def fill(self, read: Mapping[str, Tensor]) -> None:
        """Put the tensors, by the names of `tensors`, into the model's modules, which have memory."""
        for name, value in self.pieces(read):
            target = self.model.get_parameter(name)
            if target.shape != value.shape:
                raise UsageError(
                    f"{self.source}: {name} has shape {tuple(value.shape)}, expected {tuple(target.shape)}"
                )
            target.copy_(value)

    def pieces(self, read: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The matrices as they are stored, piece by piece, by our names."""
        for name, layer in self._layers():
            yield from ((f"{name}.{piece}", value) for piece, value in self._read_pieces(name, layer, read).items())

    def _read_pieces(self, name: str, layer: Linear, read: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self.is_theirs:
            return {piece: read[f"{name}.{piece}"] for piece in _piece_names(layer)}
        assert isinstance(layer.kind, FewBits)
        scheme = layer.kind.scheme
        pieces = {piece: read[f"{self.names[name]}.{part}"] for piece, part in _their_pieces(layer).items()}
        pieces[SCALES] = pieces[SCALES].float().reshape(scheme.scales(layer.out_features, layer.in_features))
        if scheme.format == "fp8":
            pieces[CODES] = pieces[CODES].view(torch.uint8)
        elif _FORMS[scheme.format] == _PACKED:
            pieces[CODES] = pack(_from_words(pieces[CODES], scheme, layer.in_features), scheme.number)
            if ZEROS in pieces:
                pieces[ZEROS] = _from_words(pieces[ZEROS].t(), scheme, layer.out_features).t().contiguous()
        if INPUT_SCALE in pieces:
            pieces[INPUT_SCALE] = pieces[INPUT_SCALE].float().reshape(1, 1)
        return pieces

    def decoded(self, read: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The weights that the matrices mean, by our names: for training to begin with."""
        for name, layer in self._layers():
            filled = as_kind(layer, layer.kind, **self._read_pieces(name, layer, read)).float()
            kind = filled.kind
            weight = kind.decoded(filled, dtype) if isinstance(kind, FewBits) else kind.dense(filled)
            yield f"{name}.weight", weight.detach().to(dtype)
