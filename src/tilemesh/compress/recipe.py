"""A recipe is data: which matrices, into which numbers, by which method; activations, pruning, rank.

It is read from TOML, whose keys are the fields below, or from a name such as int4-g128-gptq. Nothing here needs torch:
a training configuration holds a recipe, and the command line reads one before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from tilemesh.core import config
from tilemesh.core.errors import UsageError, nearest, unknown
from tilemesh.core.ranges import Range
from tilemesh.kernels.lowbit.formats import FORMATS, Scheme, parse_scheme

Method = Literal["nearest", "clip", "gptq", "awq"]
Structure = Literal["none", "unstructured", "2:4", "heads", "mlp", "layers"]
METHODS: tuple[Method, ...] = ("nearest", "clip", "gptq", "awq")
_STRUCTURES = ("unstructured", "2:4", "heads", "mlp", "layers")
LEFT_ALONE = "none"
_FRACTION = Range(0, 1, below=True)
_WORDS = ("tensor", "g128", "affine", "2level", *METHODS, "a8", "static", "smooth", "bias", "mixed")
"""After a format, in a recipe's name."""


@dataclass(frozen=True)
class WeightsRecipe:
    """Numbers of few bits in place of weights."""

    scheme: str = ""
    """Number format and granularity, such as int8, int4-g128, fp8, nf4-g64, int4-g32-affine, int4-g32-2level, fixed16;
    empty: weights stay as they are."""
    method: Method = "nearest"
    """nearest: round to nearest under scales from the largest magnitude; clip: under scales that make the squared error
    smallest; gptq: column by column, errors made good by the columns after; awq: inputs with large activations are
    scaled up first."""
    layers: tuple[str, ...] = ("layers.*",)
    """Patterns of the matrices' names; all of the layers, by default, and not the output projection, which "output"
    names (where it is not an embedding's). Activations on their way into that stay as they are."""
    rules: tuple[str, ...] = ()
    """Other schemes for some of them, each PATTERN=SCHEME, such as ["*.fc_out=int8", "layers.0.*=none"]; the first that
    matches counts."""
    bits: float = 0.0
    """Mixed bits: so many bytes in all as this many bits per weight would take, given to the matrices that need them,
    by measured sensitivity; 0: every matrix as the scheme says."""
    choices: tuple[str, ...] = ()
    """For mixed bits: the schemes to choose from; empty: the scheme's format in 8, 4, 3 and 2 bits."""
    correct_bias: bool = False
    """Whether biases take up the mean error of their matrix on the calibration text."""


@dataclass(frozen=True)
class ActivationsRecipe:
    """Activations in few bits on their way into quantised matrices."""

    scheme: str = ""
    """int8 or fp8, one scale per token; empty: activations stay as they are."""
    static: bool = False
    """Whether all tokens share one scale per matrix, found on the calibration text."""
    smooth: float = 0.0
    """SmoothQuant: how much of the range of activations is moved into the weights before, from 0 to 1; 0.5 is usual."""


@dataclass(frozen=True)
class PruneRecipe:
    """Fewer weights."""

    structure: Structure = "none"
    """unstructured: single weights become 0; 2:4: two of every four; heads, mlp, layers: whole heads, channels of the
    MLP or layers are taken out, and the model is smaller."""
    amount: float = 0.5
    """The share that goes."""
    score: Literal["magnitude", "first-order"] = "magnitude"
    """What goes first: the smallest weights, or those whose product with the loss's gradient is smallest."""
    begin: float = 0.0
    """While training: after this share of the steps pruning begins, with nothing pruned."""
    end: float = 0.7
    """While training: from this share of the steps on, `amount` is pruned; in between it rises, fast at first."""


@dataclass(frozen=True)
class RankRecipe:
    """Matrices as products of two thin ones."""

    keep: float = 0.0
    """The share of a matrix's numbers that its two factors have together; 0: matrices stay whole."""
    aware: bool = True
    """Whether the error is made small for the activations of the calibration text, or for all inputs alike."""


@dataclass(frozen=True)
class Recipe:
    """How a model is made smaller."""

    weights: WeightsRecipe = field(default_factory=WeightsRecipe)
    activations: ActivationsRecipe = field(default_factory=ActivationsRecipe)
    prune: PruneRecipe = field(default_factory=PruneRecipe)
    rank: RankRecipe = field(default_factory=RankRecipe)

    def __post_init__(self) -> None:
        weights = self.weights
        ruled = [text for _, text in self.rules() if text != LEFT_ALONE]
        for key, texts in (("scheme", [weights.scheme]), ("choices", weights.choices), ("rules", ruled)):
            for text in filter(None, texts):
                try:
                    _check_words("scheme", text)
                    parse_scheme(text)
                except UsageError as error:
                    raise UsageError(f"recipe.weights.{key}: {error}") from None
        if weights.choices and not weights.bits:
            raise UsageError(
                "recipe.weights.choices without weights.bits: they are what mixed bits choose from; set bits, such as 4"
            )
        if not weights.layers:
            raise UsageError('recipe.weights.layers is empty: name some matrices, as ["layers.*"]')
        if not weights.scheme and (weights.rules or weights.bits or weights.method != "nearest"):
            raise UsageError(
                "recipe.weights has a method, rules or bits and no scheme: set weights.scheme, as int4-g128"
            )
        if self.activations.scheme not in ("", "int8", "fp8"):
            raise unknown("recipe.activations.scheme", self.activations.scheme, ("int8", "fp8"))
        if self.activations.scheme and not weights.scheme:
            raise UsageError(
                "recipe.activations without weights.scheme: activations are quantised for quantised matrices"
            )
        if self.activations.static and not self.activations.scheme:
            raise UsageError(
                "recipe.activations.static without activations.scheme: it says how activations are rounded; set the "
                "scheme to int8 or fp8 (the word a8 in a name), or leave static out"
            )
        if self.activations.smooth and weights.method == "awq":
            raise UsageError(
                "recipe.activations.smooth with weights.method awq: each scales the inputs of the same matrices; "
                "choose one"
            )
        numbers = {
            "activations.smooth": (self.activations.smooth, Range(0, 1)), "prune.amount": (self.prune.amount,
            _FRACTION), "prune.begin": (self.prune.begin, Range(0, 1)), "prune.end": (self.prune.end, Range(0, 1)),
            "rank.keep": (self.rank.keep, Range(0, 1)), "weights.bits": (weights.bits, Range(0, 16)),
        }  # fmt: skip
        for name, (value, allowed) in numbers.items():
            allowed.check(f"recipe.{name}", value)
        if self.rank.keep and weights.scheme:
            raise UsageError("a recipe with rank.keep and weights.scheme: thin factors are not quantised; choose one")
        if self.rank.keep and self.prune.structure in ("unstructured", "2:4"):
            raise UsageError(
                f"a recipe with rank.keep and prune.structure {self.prune.structure}: a product of thin factors has no "
                "zeros where weights had them; choose one"
            )
        if self.prune.begin > self.prune.end:
            raise UsageError(f"recipe.prune.begin is {self.prune.begin}: expected at most prune.end, {self.prune.end}")

    def rules(self) -> list[tuple[str, str]]:
        """(pattern, scheme) pairs."""
        pairs = []
        for rule in self.weights.rules:
            pattern, equals, scheme = rule.rpartition("=")
            if not equals or not pattern or not scheme:
                raise UsageError(f"recipe.weights.rules: '{rule}': write PATTERN=SCHEME, such as *.fc_out=int8")
            pairs.append((pattern, scheme))
        return pairs

    def inputs_of(self, name: str) -> Scheme | None:
        """By which scheme the activations that enter a quantised matrix are rounded, in training as afterwards."""
        return Scheme(self.activations.scheme) if self.activations.scheme and name.startswith("layers.") else None

    @property
    def is_empty(self) -> bool:
        """Whether a model stays what it is."""
        return not self.weights.scheme and self.prune.structure == "none" and not self.rank.keep

    @property
    def needs_text(self) -> bool:
        """Whether it looks at activations or gradients."""
        weights = self.weights
        by_data = weights.method != "nearest" or weights.bits or weights.correct_bias
        acts = self.activations.static or self.activations.smooth
        first = self.prune.structure != "none" and self.prune.score == "first-order"
        return bool(by_data or acts or first or (self.rank.keep and self.rank.aware))

    def to_toml(self) -> str:
        return config.dump_toml(self)


def chosen_schemes(recipe: Recipe, shapes: dict[str, tuple[int, int]]) -> dict[str, Scheme]:
    """The scheme of every matrix that is quantised, by name. A pattern that matches none is a mistake.

    shapes: (outputs, inputs) of every matrix of the model that could be.
    """
    weights = recipe.weights
    if not weights.scheme:
        return {}
    for pattern in (*weights.layers, *(pattern for pattern, _ in recipe.rules())):
        if not any(fnmatchcase(name, pattern) for name in shapes):
            raise _matches_nothing(pattern, shapes)
    schemes: dict[str, Scheme] = {}
    for name, shape in shapes.items():
        if not any(fnmatchcase(name, pattern) for pattern in weights.layers):
            continue
        text = next((text for pattern, text in recipe.rules() if fnmatchcase(name, pattern)), weights.scheme)
        if text != LEFT_ALONE:
            schemes[name] = parse_scheme(text)
            try:
                schemes[name].groups(shape[1])
            except UsageError as error:
                raise UsageError(f"{name}: {error}") from None
    if not schemes:
        raise UsageError("the recipe leaves every matrix alone: its rules say none for all that its layers match")
    return schemes


def check_blocks(recipe: Recipe, shapes: dict[str, tuple[int, int]]) -> None:
    """Refuse 2:4 sparsity of matrices whose inputs are not divided by four."""
    for name, (_, inputs) in shapes.items():
        if recipe.prune.structure == "2:4" and name.startswith("layers.") and inputs % 4:
            raise UsageError(f"{name}: 2:4 sparsity of {inputs} inputs: expected a multiple of 4")


def _matches_nothing(pattern: str, shapes: dict[str, tuple[int, int]]) -> UsageError:
    if pattern == "output" and shapes:
        return UsageError(
            "the recipe names output, and this model has no output projection of its own: it shares the embedding's "
            "table, which is not compressed; leave output out"
        )
    close = nearest(pattern, shapes)
    some = ", ".join(list(shapes)[:2])
    hint = f"did you mean '{close}'? " if close else ""
    return UsageError(
        f"the recipe's '{pattern}' matches no matrix of this model: {hint}there are {some}, …; embeddings and norms "
        "stay as they are"
    )


# ---- reading ---------------------------------------------------------------------------------------------------

NAMES: tuple[str, ...] = (
    "int8", "int4-g128", "int4-g64-gptq", "int4-g64-awq", "int4-g64-clip", "int3-g64-gptq", "int2-g32-gptq", "nf4-g64",
    "fp8", "fixed16", "int8-a8", "int8-a8-smooth", "int8-a8-static", "int4-g64-mixed", "2:4", "unstructured-50",
    "heads-50", "mlp-25", "layers-25", "rank-50",
)  # fmt: skip
"""Some of the names that are recipes, for whoever asks what there is."""


def read_recipe(given: str | Path | Recipe) -> Recipe:
    """A recipe from a TOML file, or from its name."""
    if isinstance(given, Recipe):
        return given
    text = str(given)
    if is_file_text(text):
        return config.from_dict(Recipe, config.parse_toml(text, "compress.recipe"), "compress.recipe")
    if text.endswith(".toml") or Path(text).is_file():
        return config.from_dict(Recipe, config.read_toml(text, "recipe"), text)
    return _named(text)


def is_file_text(text: str) -> bool:
    """Whether this is a file's content, as a training configuration keeps it."""
    return "[" in text and "\n" in text


def _named(text: str) -> Recipe:
    for structure in _STRUCTURES:
        if text == structure or text.startswith(f"{structure}-"):
            if structure == "2:4" and text != structure:
                raise UsageError(f"recipe '{text}': 2:4 takes two of every four weights and no percentage; give 2:4")
            return Recipe(prune=PruneRecipe(structure=structure, amount=_percent(text, structure, 50)))  # type: ignore[arg-type]
    if text == "rank" or text.startswith("rank-"):
        return Recipe(rank=RankRecipe(keep=_percent(text, "rank", 50)))
    _check_words("recipe", text)
    scheme: list[str] = []
    weights: dict[str, Any] = {}
    activations: dict[str, Any] = {}
    for word in text.split("-"):
        if word in METHODS:
            weights["method"] = word
        elif word == "mixed":
            weights["bits"] = -1.0
        elif word in ("a8", "smooth", "static", "bias"):
            activations |= _activation_words(word, text)
            weights |= {"correct_bias": True} if word == "bias" else {}
        else:
            scheme.append(word)
    if not scheme:
        more = "-a8" * (text == "smooth")
        raise UsageError(f"recipe '{text}' names no number format: write such as int4-g128-{text}{more}")
    if ("smooth" in text.split("-") or "static" in text.split("-")) and "scheme" not in activations:
        raise UsageError(f"recipe '{text}' has smooth or static, which are of activations, and no a8: write {text}-a8")
    try:
        named_scheme = parse_scheme("-".join(scheme))
    except UsageError as error:
        strange = [word for word in scheme[1:] if scheme[0] in FORMATS and not _is_part_of_scheme(word)]
        why = unknown("word", strange[0], _WORDS) if strange else error
        raise UsageError(
            f"recipe '{text}' is neither a TOML file nor a name: {why}; names are such as {', '.join(NAMES[:6])}"
        ) from None
    weights["scheme"] = named_scheme.name
    if "bits" in weights:  # as many bytes as the scheme takes in all matrices alike
        weights["bits"] = float(named_scheme.bits)
    return config.from_dict(Recipe, {"weights": weights, "activations": activations})


def _is_granularity(word: str) -> bool:
    return word == "tensor" or (word[:1] == "g" and word[1:].isdecimal())


def _is_part_of_scheme(word: str) -> bool:
    return _is_granularity(word) or word in ("affine", "2level", "e5m2")


def _check_words(what: str, text: str) -> None:
    """Refuse a name that says one thing twice: the last would count, and the first be forgotten."""
    said: dict[str, str] = {}
    for word in filter(None, text.split("-")):
        kind = "method" if word in METHODS else "granularity" if _is_granularity(word) else word
        if said.get(kind) == word:
            raise UsageError(f"{what} '{text}' has the word '{word}' twice: name it once")
        if kind in said:
            raise UsageError(f"{what} '{text}' names {said[kind]} and {word}, and has one {kind}: keep one of them")
        said[kind] = word


def _activation_words(word: str, text: str) -> dict[str, Any]:
    if word == "a8":
        return {"scheme": "fp8" if text.startswith("fp8") else "int8"}
    return {"smooth": 0.5} if word == "smooth" else {"static": True} if word == "static" else {}


def _percent(text: str, prefix: str, default: int) -> float:
    percent = str(default) if text == prefix else text[len(prefix) + 1 :]
    if not percent.isdecimal() or not 0 < int(percent) < 100:
        raise UsageError(
            f"recipe '{text}': expected a percentage from 1 to 99 after {prefix}-, such as {prefix}-{default}"
        )
    return int(percent) / 100


def default_choices(scheme: Scheme) -> Sequence[Scheme]:
    """What mixed bits choose from: the same granularity in 8, 4, 3 and 2 bits."""
    if scheme.number.kind != "int":
        raise UsageError(f"mixed bits of {scheme.name}: name the schemes to choose from in weights.choices")
    names = [name for name in ("int8", "int4", "int3", "int2") if name in FORMATS]
    return [parse_scheme(scheme.name.replace(scheme.format, name, 1)) for name in names]
