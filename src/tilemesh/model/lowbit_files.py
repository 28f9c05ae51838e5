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

import dataclasses
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.lowbit.codes import decode, pack, unpack
from tilemesh.kernels.lowbit.formats import Scheme, parse_scheme
from tilemesh.model.families.book import FAMILIES, QUANTIZERS, entries, family_of
from tilemesh.model.kinds import INPUT_SCALE, ZEROS, Factored, FewBits, projections, put_kinds
from tilemesh.model.linear import Linear, MatrixKind
from tilemesh.model.transformer import Transformer

THEIRS, OURS = QUANTIZERS
_PACKED, _WHOLE, _FLOAT, _SEVERAL = "pack-quantized", "int-quantized", "float-quantized", "mixed-precision"
_FORMS = {"int2": _PACKED, "int3": _PACKED, "int4": _PACKED, "int8": _WHOLE, "fp8": _FLOAT}
_PARTS = ("codes", "scales", "zeros", INPUT_SCALE, "left", "right")


@dataclasses.dataclass(frozen=True)
class KeptMatrix:
    """How one matrix is kept: a scheme, with the activations' scheme, or a rank."""

    scheme: str = ""
    inputs: str = ""
    static: bool = False
    rank: int = 0

    @property
    def kind(self) -> MatrixKind:
        if self.rank:
            return Factored(self.rank)
        inputs = parse_scheme(self.inputs) if self.inputs else None
        return FewBits(parse_scheme(self.scheme), inputs, self.static)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in dataclasses.asdict(self).items() if value}


def describe(model: Transformer) -> dict[str, KeptMatrix]:
    """Every compressed matrix by our name."""
    described = {}
    for name, layer in projections(model):
        kind = layer.kind
        if isinstance(kind, FewBits):
            described[name] = KeptMatrix(kind.scheme.name, "" if kind.inputs is None else kind.inputs.name, kind.static)
        elif isinstance(kind, Factored):
            described[name] = KeptMatrix(rank=kind.rank)
    return described


# ---- writing ---------------------------------------------------------------------------------------------------


def compressed_tensors(model: Transformer) -> tuple[dict[str, Any], dict[str, Tensor], set[str]]:
    """What config.json says, the tensors of compressed matrices, and which of our parameters these stand for."""
    kept = describe(model)
    covered = {f"{name}.weight" for name in kept}
    theirs = _their_names(model)
    tensors: dict[str, Tensor] = {}
    if kept and set(kept) <= theirs.keys() and all(map(_has_their_form, kept.values())):
        for name in kept:
            tensors |= _in_their_form(theirs[name], model.get_submodule(name))  # type: ignore[arg-type]
        return _their_config(kept, theirs, model), tensors, covered
    for name in kept:
        module = model.get_submodule(name)
        for part in _PARTS:
            value = module._parameters.get(part)
            if value is not None:
                tensors[f"{name}.{part}"] = value.detach().contiguous()
    matrices = {name: told.to_json() for name, told in kept.items()}
    return {"quant_method": OURS, "version": 1, "matrices": matrices}, tensors, covered


def _their_names(model: Transformer) -> dict[str, str]:
    """Of our matrices that are one plain Linear on their side."""
    names = {}
    for entry in entries(model.config):
        if len(entry.ours) == 1 and not entry.transposed and not entry.heads and entry.ours[0].endswith(".weight"):
            names[entry.ours[0].removesuffix(".weight")] = entry.theirs.removesuffix(".weight")
    return names


def _has_their_form(told: KeptMatrix) -> bool:
    if not told.scheme:
        return False
    scheme = parse_scheme(told.scheme)
    if scheme.format not in _FORMS or scheme.levels != 1 or (not scheme.symmetric and scheme.granularity == "tensor"):
        return False
    if scheme.format == "fp8":
        return scheme.granularity != "group" and told.inputs in ("", "fp8")
    return told.inputs in ("", "int8")


def _their_config(kept: Mapping[str, KeptMatrix], theirs: Mapping[str, str], model: Transformer) -> dict[str, Any]:
    """One group for each way in which matrices are kept."""
    ways = list(dict.fromkeys(kept.values()))
    targets = {way: sorted(theirs[name] for name in kept if kept[name] == way) for way in ways}
    forms = {_FORMS[parse_scheme(way.scheme).format] for way in ways}
    head = FAMILIES[family_of(model.config)].head.removesuffix(".weight")
    ignored = [] if any(head in names for names in targets.values()) else [head]
    return {
        "quant_method": THEIRS, "format": forms.pop() if len(forms) == 1 else _SEVERAL,
        "config_groups": {f"group_{number}": _their_group(way, targets[way]) for number, way in enumerate(ways)},
        "quantization_status": "compressed", "ignore": ignored, "kv_cache_scheme": None,
        "global_compression_ratio": None, "version": "0.20.0",
    }  # fmt: skip


def _their_group(told: KeptMatrix, targets: list[str]) -> dict[str, Any]:
    scheme = parse_scheme(told.scheme)
    weights = {
        "num_bits": scheme.bits, "type": "float" if scheme.format == "fp8" else "int", "symmetric": scheme.symmetric,
        "strategy": scheme.granularity, "group_size": scheme.group or None, "dynamic": False, "actorder": None,
    }  # fmt: skip
    inputs = None
    if told.inputs:
        inputs = {
            "num_bits": 8, "type": "float" if told.inputs == "fp8" else "int", "symmetric": True,
            "strategy": "tensor" if told.static else "token", "dynamic": not told.static,
        }  # fmt: skip
    return {
        "targets": targets, "weights": weights, "input_activations": inputs, "output_activations": None,
        "format": _FORMS[scheme.format],
    }  # fmt: skip


def _in_their_form(name: str, module: Linear) -> dict[str, Tensor]:
    kind = module.kind
    assert isinstance(kind, FewBits)
    scheme, codes, zeros = kind.scheme, kind.codes(module), module._parameters.get(ZEROS)
    scales = module.scales.detach()
    made = {f"{name}.weight_scale": scales[0] if scheme.granularity == "tensor" else scales.contiguous()}
    if scheme.format == "fp8":
        made[f"{name}.weight"] = codes.view(torch.float8_e4m3fn).contiguous()
    elif scheme.format == "int8":
        made[f"{name}.weight"] = codes.contiguous()
        if zeros is not None:
            made[f"{name}.weight_zero_point"] = zeros.detach().contiguous()
    else:
        made[f"{name}.weight_packed"] = _words(codes, scheme)
        made[f"{name}.weight_shape"] = torch.tensor(codes.shape)
        if zeros is not None:  # packed along the outputs
            made[f"{name}.weight_zero_point"] = _words(zeros.detach().t(), scheme).t().contiguous()
    if kind.static:
        made[f"{name}.input_scale"] = module.input_scale.detach().reshape(1)
    return made


def _words(codes: Tensor, scheme: Scheme) -> Tensor:
    """int32 words of packed codes."""
    packed = pack(codes, scheme.number)
    return nn.functional.pad(packed, (0, -packed.shape[1] % 4)).contiguous().view(torch.int32)


def _from_words(words: Tensor, scheme: Scheme, inputs: int) -> Tensor:
    packed = words.contiguous().view(torch.uint8)[:, : scheme.row_bytes(inputs)]
    return unpack(packed.contiguous(), scheme.number, inputs)


# ---- reading ---------------------------------------------------------------------------------------------------


class CompressedFolder:
    """What a folder's config.json says of its compressed matrices, and how they are read."""

    def __init__(self, model: Transformer, told: Mapping[str, Any], source: str) -> None:
        """`model`: on the meta device, plain; its projections become what the folder has."""
        self.model, self.source = model, source
        self.is_theirs = told.get("quant_method") == THEIRS
        self.names = _their_names(model)
        self.kept = self._of_theirs(told) if self.is_theirs else self._of_ours(told)
        put_kinds(model, {name: kept.kind for name, kept in self.kept.items()})

    def _of_ours(self, told: Mapping[str, Any]) -> dict[str, KeptMatrix]:
        matrices = told.get("matrices")
        known = {name for name, module in self.model.named_modules() if isinstance(module, nn.Linear)}
        weights = {}
        if not isinstance(matrices, Mapping):
            raise UsageError(f"{self.source}: quantization_config has no matrices: expected what tilemesh writes")
        for name, each in matrices.items():
            if name not in known:
                raise unknown(f"matrix in {self.source}", name, sorted(known)[:3], near=known)
            try:
                weights[name] = KeptMatrix(**each)
            except TypeError:
                raise UsageError(f"{self.source}: {name} is kept as {each!r}: expected scheme, or rank") from None
        return weights

    def _of_theirs(self, told: Mapping[str, Any]) -> dict[str, KeptMatrix]:
        groups = told.get("config_groups")
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            raise UsageError(f"{self.source}: quantization_config has no config_groups: expected compressed-tensors'")
        kept: dict[str, KeptMatrix] = {}
        for group in groups.values():
            way = self._way(group, group.get("format") or told.get("format"))
            kept |= dict.fromkeys(self._targeted(group, set(told.get("ignore") or ())), way)
        return kept

    def _way(self, group: Mapping[str, Any], form: object) -> KeptMatrix:
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
        given = "fp8" if inputs.get("type") == "float" else "int8" if inputs else ""
        return KeptMatrix(scheme.name, given, bool(inputs) and not inputs.get("dynamic", True))

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
        return module in self.kept and last == "weight"

    def tensors(self) -> Iterator[str]:
        """Names of the tensors in the folder's files that are read here."""
        for name, kept in self.kept.items():
            module = self.model.get_submodule(name)
            if not self.is_theirs:
                yield from (f"{name}.{part}" for part in _PARTS if module._parameters.get(part) is not None)
                continue
            base, scheme = self.names[name], parse_scheme(kept.scheme)
            yield f"{base}.weight_scale"
            if _FORMS[scheme.format] == _PACKED:
                yield from (f"{base}.weight_packed", f"{base}.weight_shape")
            else:
                yield f"{base}.weight"
            if not scheme.symmetric:
                yield f"{base}.weight_zero_point"
            if kept.static:
                yield f"{base}.input_scale"

    @torch.no_grad()
    def fill(self, read: Mapping[str, Tensor]) -> None:
        """Put the tensors, by the names of `tensors`, into the model's modules, which have memory."""
        for name in self.kept:
            module = self.model.get_submodule(name)
            for part, value in self._parts(name, read).items():
                target = module._parameters[part]
                assert target is not None
                if target.shape != value.shape:
                    raise UsageError(
                        f"{self.source}: {name}.{part} has shape {tuple(value.shape)}, expected {tuple(target.shape)}"
                    )
                target.copy_(value)

    def _parts(self, name: str, read: Mapping[str, Tensor]) -> dict[str, Tensor]:
        module = self.model.get_submodule(name)
        if not self.is_theirs:
            return {part: read[f"{name}.{part}"] for part in _PARTS if module._parameters.get(part) is not None}
        assert isinstance(module, Linear)
        kind = module.kind
        assert isinstance(kind, FewBits)
        base, scheme, shape = self.names[name], kind.scheme, (module.out_features, module.in_features)
        made = {"scales": read[f"{base}.weight_scale"].float().reshape(scheme.scales(*shape))}
        if _FORMS[scheme.format] == _PACKED:
            codes = _from_words(read[f"{base}.weight_packed"], scheme, shape[1])
            made["codes"] = pack(codes, scheme.number)
        else:
            raw = read[f"{base}.weight"]
            made["codes"] = raw.view(torch.uint8) if scheme.format == "fp8" else raw
        if not scheme.symmetric:
            zeros = read[f"{base}.weight_zero_point"]
            made["zeros"] = zeros if scheme.bits == 8 else _from_words(zeros.t(), scheme, shape[0]).t().contiguous()
        if kind.static:
            made[INPUT_SCALE] = read[f"{base}.input_scale"].float().reshape(1, 1)
        return made

    def pieces(self, read: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The matrices as they are stored, piece by piece, by our names."""
        for name in self.kept:
            yield from ((f"{name}.{part}", value) for part, value in self._parts(name, read).items())

    def decoded(self, read: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The weights that the matrices mean, by our names: for training to begin with."""
        for name in self.kept:
            module, parts = self.model.get_submodule(name), self._parts(name, read)
            assert isinstance(module, Linear)
            if isinstance(module.kind, FewBits):
                scheme = module.kind.scheme
                codes = unpack(parts["codes"], scheme.number, module.in_features)
                yield f"{name}.weight", decode(codes, scheme, parts["scales"], parts.get("zeros"), dtype)
            else:
                yield f"{name}.weight", (parts["left"].float() @ parts["right"].float()).to(dtype)
