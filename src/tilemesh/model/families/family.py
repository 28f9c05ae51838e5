"""What is special about one family of models as Hugging Face writes them: a value, and readers that families share.

A family says what its keys in config.json mean, what its tensors are called, and what it can express. Everything that
is the same for all families (`book.py`) is written once, over that value. No torch here, and no weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.ranges import shown
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.weights import Weight, embedding_weights, head_weights, layer_weights

ANY: tuple[Any, ...] = ()
"""In `Family.may`: every value."""
_NULL_IS_0 = ("kv_heads", "head_width", "mlp_width", "score_cap", "logit_cap")
"""Our fields that follow from others, or are not there, where a file says null."""


@dataclass(frozen=True)
class Entry:
    """One tensor of theirs: our parameters one below the other, then transposed or not.

    `heads` above 0: not one below the other, but the rows of the first head of each, then of the second, and so on.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    heads: int = 0
    stack: int = 0
    """Above 0: so many such tensors, one for each expert, under one more dim of theirs."""
    rows: tuple[int, ...] = ()
    """Of one parameter, its rows in their order; empty: as they are."""


@dataclass(frozen=True)
class Family:
    """One kind of model on their side, by config.json's `model_type`."""

    architecture: str
    prefix: str
    """Of every name but the output projection's; a model saved without its head has none."""
    sizes: Mapping[str, str]
    """Our field: their key."""
    may: Mapping[str, tuple[Any, ...]]
    """Our field: the values that the family can express, or `ANY`. What is not named must have its default."""
    keys: Mapping[str, tuple[str, Any]]
    """Our field: their key, and its value where a file leaves it out; read and written as it stands."""
    outside: Mapping[str, str]
    """Their module: ours, before and after the layers, in the order of computation."""
    layer: str
    """The name of a layer, with {} for its number."""
    modules: Mapping[str, tuple[str, ...]]
    """Their module: ours, in a layer, in the order of computation; several of ours may be one matrix of theirs. With {}
    for an expert's number; in ours alone: those of all experts are one tensor, in which rows of several alternate."""
    read: Callable[[Mapping[str, Any], str], dict[str, Any]]
    """Our fields that take more than a key, from the content of a config.json; its path is for refusals."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The way back."""
    head: str = "lm_head.weight"
    transposed: tuple[str, ...] = ()
    """Modules whose matrix has the inputs first."""
    by_heads: tuple[str, ...] = ()
    """Modules whose rows are ordered by heads: query, key and value of the first, then of the second."""
    orders: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]] = lambda config: {}
    """Modules whose rows have another order than ours: as `Entry.rows`."""
    renamed: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    """Tensors that are called otherwise than their module and what it is of it."""
    expects: dict[str, Any] = field(default_factory=dict)
    """Their key: the only value that our model computes. Absent is as good."""
    leftovers: str = ""
    """Tensors that old versions wrote and nobody reads (a pattern): causal masks, rotary frequencies."""

    def fields(self, settings: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Our fields beside the sizes: what the family always is, what its keys say, and what takes more than a key."""
        always = {name: values[0] for name, values in self.may.items() if len(values) == 1}
        said = {ours: settings.get(theirs, absent) for ours, (theirs, absent) in self.keys.items()}
        said = {ours: value or 0 if ours in _NULL_IS_0 else value for ours, value in said.items()}
        return {**always, **said, **self.read(settings, source)}

    def entries(self, config: ModelConfig) -> Iterator[Entry]:
        """Every tensor of a model but a tied output projection, in the order of computation."""
        known = {weight.name: weight for weight in (*embedding_weights(config), *head_weights(config))}
        outside = [(theirs, ours) for theirs, ours in self.outside.items() if ours in known]
        last = outside.pop()
        for theirs, ours in outside:
            yield from self._parts(config, theirs, "", (known[ours],))
        modules = list(self._modules(config.experts))
        for index in range(config.layers):
            inside = {weight.name: weight for weight in layer_weights(config.of_layer(index))}
            for theirs, names, stack in modules:
                weights = tuple(inside[name] for name in names if name in inside)
                if weights:  # a layer has experts or an MLP
                    yield from self._parts(config, theirs, f"layers.{index}.", weights, self.layer.format(index), stack)
        yield from self._parts(config, last[0], "", (known[last[1]],))
        if not config.tied:
            yield Entry(self.head, ("output.weight",))

    def _modules(self, experts: int) -> Iterator[tuple[str, tuple[str, ...], int]]:
        """Those of a layer with so many experts: theirs, ours, and how many are stacked."""
        for theirs, names in self.modules.items():
            each = [tuple(name.format(expert) for name in names) for expert in range(experts)]
            if "{}" in theirs:
                yield from ((theirs.format(expert), ours, 0) for expert, ours in enumerate(each))
            elif "{}" in names[0]:
                yield theirs, tuple(name for ours in each for name in ours), experts
            else:
                yield theirs, names, 0

    def _parts(
        self, config: ModelConfig, theirs: str, ours: str, weights: tuple[Weight, ...], layer: str = "", stack: int = 0
    ) -> Iterator[Entry]:
        """The weight of a module of theirs, and its bias where it has one."""
        heads = config.heads if theirs in self.by_heads else 0
        heads = config.mlp_width if len(weights) > stack > 0 else heads
        rows = self.orders(config).get(theirs, ())
        is_offset = config.norm_offset and weights[0].words == "norm"
        for part in ("weight", "bias") if weights[0].bias else ("weight",):
            names = tuple(f"{ours}{weight.name}.{'offset' if is_offset else part}" for weight in weights)
            transposed = part == "weight" and theirs in self.transposed
            name = self.renamed(config).get(f"{theirs}.{part}", f"{theirs}.{part}")
            yield Entry(f"{self.prefix}{layer}{name}", names, transposed, heads, stack, rows)


# ---- readers that families share ---------------------------------------------------------------------------------


def one_of(settings: Mapping[str, Any], key: str, known: Mapping[str, str], default: str, source: str) -> str:
    """What a word of theirs is called here."""
    value = settings.get(key, default)
    if not isinstance(value, str) or value not in known:
        raise unknown(f"{key} in {source}", value, known)
    return known[value]


def one_dropout(settings: Mapping[str, Any], embedding: str, residual: str, default: float, source: str) -> Any:
    """The dropout after the embedding and after the blocks, which have to agree."""
    dropout, first = settings.get(residual, default), settings.get(embedding, default)
    if first != dropout:
        raise UsageError(f"{source}: {embedding} is {first} and {residual} {dropout}: set one value")
    return dropout


LAYER_TYPES = ("full_attention", "sliding_attention")
_TRAINED = "original_max_position_embeddings"
SCALINGS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"rotary_factor": "factor"},
    "llama3": {
        "rotary_factor": "factor", "rotary_low": "low_freq_factor", "rotary_high": "high_freq_factor",
        "rotary_trained": _TRAINED,
    },
    "yarn": {
        "rotary_factor": "factor", "rotary_low": "beta_slow", "rotary_high": "beta_fast", "rotary_trained": _TRAINED,
        "rotary_gain": "attention_factor", "rotary_rounded": "truncate",
    },
}  # fmt: skip
"""Their rope_type, which is our rotary_scaling but for default: our fields, and their keys, that it is made of."""


def read_rotary(
    settings: Mapping[str, Any], source: str, base: float = 10_000.0, scalings: tuple[str, ...] = tuple(SCALINGS)
) -> dict[str, Any]:
    """Rotary settings. transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters with both; a file may
    have all three, which then have to agree: versions of transformers differ in which of them they follow."""
    ways = {key: settings[key] for key in ("rope_scaling", "rope_parameters") if settings.get(key)}
    read = [_read_rotary(rotary, settings, f"{source}: {key}", base, scalings) for key, rotary in ways.items()]
    if len(read) > 1 and read[0] != read[1]:
        raise UsageError(f"{source}: rope_scaling and rope_parameters say different things: leave one away")
    return read[0] if read else {"rotary_base": settings.get("rope_theta", base)}


def _read_rotary(
    rotary: Any, settings: Mapping[str, Any], where: str, base: float, scalings: tuple[str, ...]
) -> dict[str, Any]:
    """One of the two ways to write them down."""
    if not isinstance(rotary, Mapping):
        raise UsageError(f"{where} is {shown(rotary)}: expected an object")
    if inner := [key for key, value in rotary.items() if isinstance(value, Mapping) or key in LAYER_TYPES]:
        raise UsageError(f"{where} has {inner[0]}: expected one object for all layers of this family")
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind not in scalings:
        raise UsageError(f"{where}: positions scaled by {shown(kind)}: only {', '.join(scalings)} can be computed")
    trained = rotary.get(_TRAINED)
    if kind in ("llama3", "yarn") and settings.get(_TRAINED, trained) != trained:
        raise UsageError(
            f"{where}: {_TRAINED} is {shown(trained)} here and {settings[_TRAINED]} outside: leave one away"
        )
    fields: dict[str, Any] = {"rotary_base": rotary.get("rope_theta", settings.get("rope_theta", base))}
    if "partial_rotary_factor" in rotary:
        fields["rotary_fraction"] = rotary["partial_rotary_factor"]
    if kind != "default":
        fields["rotary_scaling"] = kind
    if kind == "yarn":
        rotary = _completed_yarn(rotary, settings, where)
    return fields | {ours: rotary.get(theirs) for ours, theirs in SCALINGS[kind].items()}


def _completed_yarn(rotary: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """With what transformers takes for keys that are left out; two `mscale` are another way to say attention_factor."""
    usual = {"beta_slow": 1.0, "beta_fast": 32.0, _TRAINED: settings.get("max_position_embeddings")}
    completed = {"truncate": True, **rotary, **{key: value for key, value in usual.items() if not rotary.get(key)}}
    numbers: list[Any] = [rotary.get(key) for key in ("factor", "mscale", "mscale_all_dim")]
    if rotary.get("attention_factor") is None:
        completed["attention_factor"] = 0.0
        if numbers[1] and numbers[2]:
            if not all(isinstance(number, int | float) for number in numbers):
                raise UsageError(f"{where}: factor, mscale and mscale_all_dim: expected numbers")
            log = math.log(max(numbers[0], 1.0)) / 10
            completed["attention_factor"] = (1 + numbers[1] * log) / (1 + numbers[2] * log)
    return completed


def rotary_parameters(config: ModelConfig) -> dict[str, Any]:
    """What transformers 5 calls rope_parameters."""
    kind = "default" if config.rotary_scaling == "none" else config.rotary_scaling
    scaled = {theirs: getattr(config, ours) for ours, theirs in SCALINGS[kind].items()}
    if not config.rotary_gain:  # left out it means the same to them
        scaled.pop("attention_factor", None)
    if config.rotary_rounded:
        scaled.pop("truncate", None)
    return {"rope_type": kind, "rope_theta": config.rotary_base, **scaled}


def write_rotary(config: ModelConfig) -> dict[str, Any]:
    """Rotary settings as transformers 4 and 5 read them."""
    rotary = rotary_parameters(config)
    scaling = None if config.rotary_scaling == "none" else {k: v for k, v in rotary.items() if k != "rope_theta"}
    return {"rope_theta": config.rotary_base, "rope_parameters": rotary, "rope_scaling": scaling}


def read_window(settings: Mapping[str, Any], layers: int, full: list[int], source: str) -> dict[str, Any]:
    """The sliding window, and which layers have none: by layer_types, or those that older files mean."""
    window, types = settings.get("sliding_window"), settings.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or any(kind not in LAYER_TYPES for kind in types):
            known = " and ".join(LAYER_TYPES)
            raise UsageError(f"{source}: layer_types is {shown(types)}: expected {layers} of {known}")
        full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    if window is None or len(full) == layers:
        return {}
    if window == 0:
        raise UsageError(f"{source}: sliding_window is 0, so that no token sees any: expected null, or at least 1")
    return {"window": window, "full_layers": tuple(full)}


def layer_types(config: ModelConfig) -> list[str]:
    """What kind of attention each layer has, in their words."""
    windows = [config.window_of(index) for index in range(config.layers)]
    return ["sliding_attention" if window else "full_attention" for window in windows]
