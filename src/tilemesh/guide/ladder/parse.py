"""Reads the part of CUDA C++ that the ladder's kernels are written in, and makes a tree of it.

The language: functions, `for`, `if`, declarations of numbers and arrays (`__shared__` too), assignments, subscripts,
calls, and `reinterpret_cast<T*>(...)`. Whatever else C++ has is refused with the line in which it stands.
"""

import re
from dataclasses import dataclass

from tilemesh.core.errors import UsageError
from tilemesh.guide.ladder import tree

TYPES = ("int", "unsigned", "float", "bool", "float4", "uint4", "half_bits", "void")
QUALIFIERS = ("const", "constexpr", "__restrict__", "static", "__forceinline__")
_TOKEN = re.compile(
    r"(?P<skip>\s+|//[^\n]*|/\*.*?\*/|\#pragma[^\n]*)"
    r"|(?P<float>\d+\.\d*(?:e-?\d+)?f?|\d+e-?\d+f?)|(?P<int>0x[0-9a-fA-F]+u?|\d+u?)|(?P<name>[A-Za-z_]\w*)|(?P<text>\"[^\"]*\")"
    r"|(?P<sign>\+\+|--|<<=|>>=|[-+*/%&|^]=|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^<>=!?:;,.(){}\[\]~])",
    re.DOTALL,
)
# Each line binds more tightly than the one before.
BINARY = (
    *(("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!=")),
    *(("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%")),
)
ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


def parse(text: str) -> tree.CudaText:
    """The tree of a kernel's text. Raises UsageError with the line where it leaves the language."""
    return _CudaParser(_tokens(text)).module()


def _tokens(text: str) -> list[_Token]:
    tokens, at, line = [], 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise UsageError(
                f"CUDA text, line {line}: {text[at : at + 12]!r} is not in the language of the ladder's interpreter"
            )
        kind = str(match.lastgroup)
        if kind != "skip":
            tokens.append(_Token(kind, match.group(), line))
        line += match.group().count("\n")
        at = match.end()
    return [*tokens, _Token("end", "the end of the text", line)]


class _CudaParser:
    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens, self.at = tokens, 0

    # Tokens

    @property
    def next(self) -> _Token:
        return self.tokens[self.at]

    def sees(self, *texts: str) -> bool:
        return self.next.text in texts and self.next.kind != "text"

    def take(self, *texts: str) -> _Token:
        token = self.next
        if texts and not self.sees(*texts):
            raise UsageError(f"CUDA text, line {token.line}: expected {' or '.join(texts)}, found {token.text}")
        self.at += 1
        return token

    def took(self, *texts: str) -> bool:
        if self.sees(*texts):
            self.at += 1
            return True
        return False

    def name(self) -> str:
        if self.next.kind != "name":
            raise UsageError(f"CUDA text, line {self.next.line}: expected a name, found {self.next.text}")
        return self.take().text

    def type(self) -> str:
        while self.took(*QUALIFIERS):
            pass
        name = self.take(*TYPES).text
        while self.took(*QUALIFIERS):
            pass
        return name

    # The text, functions, statements

    def module(self) -> tree.CudaText:
        constants: list[tree.Declaration] = []
        functions: dict[str, tree.CudaFunction] = {}
        while self.next.kind != "end":
            if self.sees("constexpr"):
                constants.extend(self.declarations())
            else:
                function = self.function()
                functions[function.name] = function
        return tree.CudaText(tuple(constants), functions)

    def function(self) -> tree.CudaFunction:
        while self.sees("extern", "__global__", "__device__") or self.next.kind == "text":
            self.take()
        kind = self.type()
        if self.took("__launch_bounds__"):
            self.take("(")
            while not self.took(")"):
                self.take()
        name = self.name()
        parameters = []
        self.take("(")
        while not self.took(")"):
            parameter_type = self.type()
            pointer = self.took("*")
            while self.took(*QUALIFIERS):
                pass
            parameters.append(tree.Parameter(parameter_type, self.name(), pointer))
            self.took(",")
        return tree.CudaFunction(name, kind, tuple(parameters), self.block())

    def block(self) -> tree.Sequence:
        """Statements in braces, or one without."""
        if not self.took("{"):
            return self.statement()
        body: list[tree.Statement] = []
        while not self.took("}"):
            body.extend(self.statement())
        return tuple(body)

    def statement(self) -> tree.Sequence:
        line = self.next.line
        if self.sees("{"):
            return (tree.Branch(tree.Number(1), self.block(), (), line),)  # for its scope
        if self.took("for"):
            self.take("(")
            first = self.declarations() if self.declares() else (self.simple(),)
            if len(first) == 1 and isinstance(first[0], tree.Assignment):
                self.take(";")
            condition = self.expression()
            self.take(";")
            step = self.simple()
            self.take(")")
            if len(first) != 1:
                raise UsageError(f"CUDA text, line {line}: one variable in a `for`")
            return (tree.ForLoop(first[0], condition, step, self.block(), line),)
        if self.took("if"):
            self.take("(")
            condition = self.expression()
            self.take(")")
            yes = self.block()
            return (tree.Branch(condition, yes, self.block() if self.took("else") else (), line),)
        if self.took("return"):
            value = None if self.sees(";") else self.expression()
            self.take(";")
            return (tree.Return(value, line),)
        if self.declares():
            return self.declarations()
        simple = self.simple()
        self.take(";")
        return (simple,)

    def declares(self) -> bool:
        return self.sees(*TYPES, *QUALIFIERS, "__shared__", "extern")

    def declarations(self) -> tuple[tree.Declaration, ...]:
        line = self.next.line
        dynamic = self.took("extern")
        shared = self.took("__shared__")
        if self.took("__align__"):
            self.take("(")
            self.take()
            self.take(")")
        kind = self.type()
        declared = []
        while True:
            name, lengths = self.name(), []
            while self.took("["):
                lengths.append(tree.Number(0) if self.sees("]") else self.expression())
                self.take("]")
            value, zeroed = None, False
            if self.took("="):
                if self.took("{"):
                    self.take("}")
                    zeroed = True
                else:
                    value = self.expression()
            declared.append(tree.Declaration(kind, name, tuple(lengths), value, zeroed, shared, dynamic, line))
            if not self.took(","):
                break
        self.take(";")
        return tuple(declared)

    def simple(self) -> tree.Statement:
        """An assignment, `++x`, or a call."""
        line = self.next.line
        if self.took("++"):
            return tree.Assignment(self.unary(), "+=", tree.Number(1), line)
        value = self.expression()
        if self.took("++"):
            return tree.Assignment(value, "+=", tree.Number(1), line)
        if self.sees(*ASSIGNMENTS):
            sign = self.take().text
            return tree.Assignment(value, sign, self.expression(), line)
        return tree.Evaluation(value, line)

    # Expressions

    def expression(self) -> tree.Expression:
        condition = self.binary(0)
        if not self.took("?"):
            return condition
        yes = self.expression()
        self.take(":")
        return tree.Ternary(condition, yes, self.expression())

    def binary(self, level: int) -> tree.Expression:
        if level == len(BINARY):
            return self.unary()
        left = self.binary(level + 1)
        while self.sees(*BINARY[level]):
            sign = self.take().text
            left = tree.Infix(sign, left, self.binary(level + 1))
        return left

    def unary(self) -> tree.Expression:
        if self.sees("-", "!", "~", "&"):
            return tree.Prefix(self.take().text, self.unary())
        return self.postfix()

    def postfix(self) -> tree.Expression:
        value = self.primary()
        while True:
            if self.took("["):
                value = tree.Subscript(value, self.expression())
                self.take("]")
            elif self.took("."):
                member = self.name()
                if isinstance(value, tree.Identifier) and value.name in (
                    "threadIdx",
                    "blockIdx",
                    "blockDim",
                    "gridDim",
                ):
                    value = tree.Identifier(f"{value.name}.{member}")
                elif member in "xyzw":
                    value = tree.Component(value, "xyzw".index(member))
                else:
                    raise UsageError(f"CUDA text, line {self.next.line}: member {member} is not x, y, z or w")
            else:
                return value

    def primary(self) -> tree.Expression:
        token = self.take()
        if token.kind == "int":
            return tree.Number(int(token.text.rstrip("u"), 0))
        if token.kind == "float":
            return tree.Number(float(token.text.rstrip("f")))
        if token.text == "(":
            value = self.expression()
            self.take(")")
            return value
        if token.text == "reinterpret_cast":
            self.take("<")
            kind = self.type()
            self.take("*")
            self.take(">")
            self.take("(")
            pointer = self.expression()
            self.take(")")
            return tree.Reinterpreted(kind, pointer)
        if token.kind != "name":
            raise UsageError(f"CUDA text, line {token.line}: expected a value, found {token.text}")
        if not self.took("("):
            return tree.Identifier(token.text)
        arguments = []
        while not self.took(")"):
            arguments.append(self.expression())
            self.took(",")
        return tree.Application(token.text, tuple(arguments))
