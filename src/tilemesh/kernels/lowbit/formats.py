"""Numbers of few bits, as data: which values a code can mean, how codes are grouped under a scale, and the bytes of it.

The one idea: a quantised matrix is codes, scales and zero points, and `Scheme` says everything about them that is not a
tensor. No torch here: recipes, cost models and documents read this file. `codes.py` does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tilemesh.core.errors import UsageError, unknown

Kind = Literal["int", "float", "table", "fixed"]
Granularity = Literal["tensor", "channel", "group"]
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "channel", "group")
SCALE_BYTES = 4
SECOND_LEVEL = 255
"""With two levels of scales a group's own is one of 1 to 255 parts of its row's."""

# The 16 values of nf4: quantiles of a normal distribution, scaled to [-1, 1] and with 0 among them (Dettmers et al.
# 2023, "QLoRA", appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class NumberFormat:
    """What the codes of a format mean, before they are scaled.

    int: whole numbers from `low` to `high`. float: a floating-point number of few bits, at most `high`. table: one of
    `table`. fixed: whole numbers under a scale that is a power of two, so that scaling is a shift.
    """

    name: str
    kind: Kind
    bits: int
    low: float
    high: float
    table: tuple[float, ...] = ()

    @property
    def half_range(self) -> float:
        """What the largest magnitude is scaled to; of whole numbers half of all steps, as torchao and
        compressed-tensors have it, so that no value is off by more than half a step."""
        return (self.high - self.low) / 2 if self.kind == "int" else self.high

    @property
    def offset(self) -> int:
        """What is added to whole numbers so that they are stored without a sign."""
        return 1 << (self.bits - 1)


def _whole(bits: int) -> NumberFormat:
    return NumberFormat(f"int{bits}", "int", bits, -(1 << (bits - 1)), (1 << (bits - 1)) - 1)


FORMATS: Mapping[str, NumberFormat] = {
    **{f"int{bits}": _whole(bits) for bits in (8, 4, 3, 2)},
    "fp8": NumberFormat("fp8", "float", 8, -448.0, 448.0),  # e4m3 without infinities
    "fp8-e5m2": NumberFormat("fp8-e5m2", "float", 8, -57344.0, 57344.0),
    "nf4": NumberFormat("nf4", "table", 4, -1.0, 1.0, NF4),
    "fixed16": NumberFormat("fixed16", "fixed", 16, -32768.0, 32767.0),
}


@dataclass(frozen=True)
class Scheme:
    """How a matrix is quantised: into which numbers, and how many of them share a scale."""

    format: str = "int8"
    granularity: Granularity = "channel"
    group: int = 0
    """Inputs that share a scale, for the granularity group."""
    symmetric: bool = True
    """Whether zero is the middle code; else a zero point is stored with each scale (whole numbers only)."""
    levels: int = 1
    """2: a group's scale is itself one of 255 parts of its row's scale, and takes one byte."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise unknown("number format", self.format, FORMATS)
        if self.granularity not in GRANULARITIES:
            raise unknown("granularity", self.granularity, GRANULARITIES)
        if self.granularity == "group" and self.group < 1:
            raise UsageError(f"group is {self.group}: with granularity group, expected how many inputs share a scale")
        if self.granularity != "group" and (self.group or self.levels == 2):
            raise UsageError(
                f"granularity {self.granularity} with group {self.group} and levels {self.levels}: set granularity "
                "to group"
            )
        if self.levels not in (1, 2):
            raise UsageError(f"levels is {self.levels}: expected 1, or 2 for scales of groups under a row's scale")
        if not self.symmetric and self.number.kind != "int":
            raise UsageError(f"{self.format} has no zero point: set symmetric to true, or the format to int8 or int4")
        if self.levels == 2 and self.number.kind == "fixed":
            raise UsageError("fixed16 with two levels of scales: its scales are powers of two; set levels to 1")

    @property
    def number(self) -> NumberFormat:
        return FORMATS[self.format]

    @property
    def bits(self) -> int:
        return self.number.bits

    @property
    def name(self) -> str:
        """As `parse` reads it: int4-g128, int8, int4-g32-affine-2level."""
        where = {"tensor": "-tensor", "channel": "", "group": f"-g{self.group}"}[self.granularity]
        return self.format + where + ("" if self.symmetric else "-affine") + ("-2level" if self.levels == 2 else "")

    def groups(self, inputs: int) -> int:
        """Scales of a row."""
        if self.granularity != "group":
            return 1
        if inputs % self.group:
            fits = [size for size in (256, 128, 64, 32, 16, 8) if inputs % size == 0]
            words = f"such as {', '.join(map(str, fits[:3]))}" if fits else "or granularity channel"
            raise UsageError(f"groups of {self.group} do not divide {inputs} inputs: set a divisor, {words}")
        return inputs // self.group

    def scales(self, outputs: int, inputs: int) -> tuple[int, int]:
        """The shape of the scales."""
        return (1 if self.granularity == "tensor" else outputs, self.groups(inputs))

    def row_bytes(self, inputs: int) -> int:
        """Bytes of a row's codes, packed."""
        return -(-inputs * self.bits // 8)

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a matrix: codes, scales and zero points."""
        rows, groups = self.scales(outputs, inputs)
        each = SCALE_BYTES if self.levels == 1 else 1
        scales = rows * groups * (each + (0 if self.symmetric else 1)) + (rows * SCALE_BYTES if self.levels == 2 else 0)
        return outputs * self.row_bytes(inputs) + scales


def parse_scheme(text: str) -> Scheme:
    """A scheme from its name."""
    known = sorted(FORMATS, key=len, reverse=True)
    format_name = next((name for name in known if text == name or text.startswith(name + "-")), None)
    if format_name is None:
        raise unknown("number format", text.partition("-")[0], FORMATS)
    made: dict[str, object] = {"format": format_name}
    for word in text[len(format_name) + 1 :].split("-") if len(text) > len(format_name) else []:
        if word == "tensor":
            made["granularity"] = "tensor"
        elif word[:1] == "g" and word[1:].isdecimal() and len(word) < 8:
            made |= {"granularity": "group", "group": int(word[1:])}
        elif word == "affine":
            made["symmetric"] = False
        elif word == "2level":
            made["levels"] = 2
        else:
            raise unknown(f"part of the scheme '{text}'", word, ("tensor", "g128", "affine", "2level"))
    return Scheme(**made)  # type: ignore[arg-type]


# ---- bit layouts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FloatLayout:
    """Fields of a floating-point number: one sign, then exponent and fraction bits."""

    name: str
    exponent: int
    fraction: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.fraction

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    def value(self, code: int) -> float:
        """What a code means, where it is neither infinite nor NaN: (-1)^sign x 1.fraction x 2^(exponent - bias)."""
        sign = -1.0 if code >> (self.bits - 1) & 1 else 1.0
        exponent = code >> self.fraction & ((1 << self.exponent) - 1)
        fraction = (code & ((1 << self.fraction) - 1)) / (1 << self.fraction)
        if exponent == 0:  # subnormal: no leading one
            return sign * fraction * 2.0 ** (1 - self.bias)
        return sign * (1 + fraction) * 2.0 ** (exponent - self.bias)


LAYOUTS: Mapping[str, FloatLayout] = {
    "fp32": FloatLayout("fp32", 8, 23), "fp16": FloatLayout("fp16", 5, 10), "bf16": FloatLayout("bf16", 8, 7),
    "fp8": FloatLayout("fp8", 4, 3), "fp8-e5m2": FloatLayout("fp8-e5m2", 5, 2),
}  # fmt: skip
