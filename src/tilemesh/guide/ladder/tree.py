"""The tree of a kernel's text: expressions, statements, functions. `parse.py` makes it, `closures.py` compiles it."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Number:
    value: int | float


@dataclass(frozen=True)
class Identifier:
    """A variable, or one of CUDA's own: `threadIdx.x` is one identifier."""

    name: str


@dataclass(frozen=True)
class Component:
    """`value.x` of a float4."""

    value: "Expression"
    index: int


@dataclass(frozen=True)
class Subscript:
    base: "Expression"
    index: "Expression"


@dataclass(frozen=True)
class Application:
    function: str
    arguments: tuple["Expression", ...]


@dataclass(frozen=True)
class Prefix:
    sign: str  # "-", "!", "~" or "&"
    value: "Expression"


@dataclass(frozen=True)
class Infix:
    sign: str
    left: "Expression"
    right: "Expression"


@dataclass(frozen=True)
class Ternary:
    condition: "Expression"
    yes: "Expression"
    no: "Expression"


@dataclass(frozen=True)
class Reinterpreted:
    """`reinterpret_cast<type*>(pointer)`."""

    type: str
    pointer: "Expression"


Expression: TypeAlias = (
    Number | Identifier | Component | Subscript | Application | Prefix | Infix | Ternary | Reinterpreted
)


@dataclass(frozen=True)
class Declaration:
    type: str
    name: str
    lengths: tuple[Expression, ...]
    value: Expression | None
    zeroed: bool  # `= {}`: every element is zero
    shared: bool
    dynamic: bool  # `extern __shared__`: the launch says how long it is
    line: int


@dataclass(frozen=True)
class Assignment:
    target: Expression
    sign: str
    value: Expression
    line: int


@dataclass(frozen=True)
class Evaluation:
    value: Expression
    line: int


@dataclass(frozen=True)
class ForLoop:
    first: "Statement"
    condition: Expression
    step: "Statement"
    body: "Sequence"
    line: int


@dataclass(frozen=True)
class Branch:
    condition: Expression
    yes: "Sequence"
    no: "Sequence"
    line: int


@dataclass(frozen=True)
class Return:
    value: Expression | None
    line: int


Statement: TypeAlias = Declaration | Assignment | Evaluation | ForLoop | Branch | Return
Sequence: TypeAlias = tuple[Statement, ...]


@dataclass(frozen=True)
class Parameter:
    type: str
    name: str
    pointer: bool


@dataclass(frozen=True)
class CudaFunction:
    name: str
    type: str
    parameters: tuple[Parameter, ...]
    body: Sequence


@dataclass(frozen=True)
class CudaText:
    constants: tuple[Declaration, ...]
    functions: dict[str, CudaFunction]
