"""One program for all sizes, found from programs for a few made-up ones.

Kernels and plans need sizes that are known. So a piece whose sizes change is compiled for four combinations of made-up
sizes, primes that occur nowhere else in it, but its kernels are only written. Where the four texts differ in numbers
alone and each of these is one formula of the sizes (a factor times a product of sizes, plus a number), the formulas
take their places, in C too, and the kernels are compiled once. Anything else is refused, and gets a program per size.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from tilemesh.graph import kernel_c
from tilemesh.graph.emit import Emitted
from tilemesh.graph.generated import RegionCall
from tilemesh.graph.kernel_plan import plan_kernel
from tilemesh.graph.lower import NotServedError
from tilemesh.graph.opaque import LayCall, laid, overlap

Sizes = tuple[int, ...]
INSTANCES = 4  # two decide a formula, the others check it
MOST_DEGREE = 3  # of a product of sizes
_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+(?:e[-+]?\d+)?)?f?)(?![\w.])")


class SymbolReader:
    """The sizes of a piece that change, by the names that torch gives them, and where a call's inputs show them."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
        self.places: dict[Any, tuple[int, int | None]] = {}
        self.guards: list[Any] = []  # what torch took to be so of the sizes as it traced
        for place, value in enumerate(self.values):
            numbers = [(None, value)] if not isinstance(value, torch.Tensor) else list(enumerate(value.shape))
            for dim, number in numbers:
                if isinstance(number, torch.SymInt) and number.node.expr.is_symbol:
                    self.places.setdefault(number.node.expr, (place, dim))
                    self.guards = [guard.expr for guard in number.node.shape_env.guards]
        used = {symbol for value in self.values for number in _numbers(value) for symbol in _symbols(number)}
        if not self.places or used - self.places.keys():
            raise NotServedError("sizes that no input shows")
        # What a formula is found from are four sizes: half of T, rounded down, is one of these and not of others.
        for node in module.graph.nodes:
            for value in tree_leaves(node.meta.get("val")):
                if not all(map(_is_polynomial, _numbers(value))):
                    raise NotServedError(f"a size that is no sum of products: {node}")

    def read(self, inputs: Sequence[Any]) -> Sizes:
        return tuple(inputs[place] if dim is None else inputs[place].shape[dim] for place, dim in self.places.values())

    def instances(self, first: Sizes) -> Iterator[list[Sizes]]:
        """Made-up sizes around those of the first call, above them and, where a table ends there, below."""
        known = {number for value in self.values for number in _numbers(value) if isinstance(number, int)}
        count = INSTANCES * len(first)
        top = max(*first, 7)
        for candidates in (itertools.count(top + 1), range(min(top, 1 << 20), 10, -1)):
            primes = list(itertools.islice((n for n in candidates if n not in known and _is_prime(n)), count))
            made_up = [tuple(primes[place::INSTANCES]) for place in range(INSTANCES)]
            if len(primes) == count and all(map(self._keeps_guards, made_up)):
                yield made_up

    def _keeps_guards(self, sizes: Sizes) -> bool:
        """Whether the traced piece is one for these sizes: a slice may be cut off at others."""
        at = dict(zip(self.places, sizes, strict=True))
        return all(bool(guard.subs(at)) for guard in self.guards if guard.free_symbols <= at.keys())

    def inputs_at(self, sizes: Sizes) -> list[Any]:
        """Inputs of these sizes, tensors without data."""
        at = dict(zip(self.places, sizes, strict=True))

        def number(value: Any) -> int:
            return int(value.node.expr.subs(at)) if isinstance(value, torch.SymInt) else value

        with FakeTensorMode(allow_non_fake_inputs=True):
            return [
                torch.empty_strided(
                    [number(size) for size in value.shape], [number(step) for step in value.stride()],
                    dtype=value.dtype, device=value.device,
                )
                if isinstance(value, torch.Tensor) else number(value)
                for value in self.values
            ]  # fmt: skip


def _numbers(value: Any) -> list[Any]:
    return [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]


def _symbols(number: Any) -> set[Any]:
    return set(number.node.expr.free_symbols) if isinstance(number, torch.SymInt) else set()


def _is_polynomial(number: Any) -> bool:
    """Of the sizes that change."""
    if not isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    expression = number.node.expr
    if type(expression).__name__ == "ToFloat":
        [expression] = expression.args
    return bool(expression.is_polynomial(*expression.free_symbols))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, math.isqrt(number) + 1))


def formula(values: Sequence[int], sizes: Sequence[Sizes]) -> str:
    """The text of a number that is `values[k]` at the sizes `sizes[k]`."""
    if len(set(values)) == 1:
        return str(values[0])
    names = [f"n{place}" for place in range(len(sizes[0]))]
    for powers in sorted(itertools.product(range(MOST_DEGREE + 1), repeat=len(names)), key=sum):
        if not 1 <= sum(powers) <= MOST_DEGREE:
            continue
        bases = [math.prod(size**power for size, power in zip(each, powers, strict=True)) for each in sizes]
        factor = Fraction(values[1] - values[0], bases[1] - bases[0]) if bases[1] != bases[0] else Fraction(0)
        offset = values[0] - factor * bases[0]
        fits = all(factor * base + offset == value for base, value in zip(bases, values, strict=True))
        if factor and fits and factor.denominator == 1:
            product = "*".join(name for name, power in zip(names, powers, strict=True) for _ in range(power))
            return f"({product}*{factor}{f'+{offset}' if offset else ''})".replace("*1)", ")").replace("*1+", "+")
    raise NotServedError(f"a number that is {list(values)} at the sizes {list(sizes)}")


def joined_text(texts: Sequence[str], sizes: Sequence[Sizes], real: str = "{0}") -> str:
    """One text for all sizes. real: how the language makes a real number of a whole one."""
    parts = [_NUMBER.split(text) for text in texts]
    if len({tuple(each[::2]) for each in parts}) != 1:
        raise NotServedError("programs for two sizes differ in more than numbers")
    joined = []
    for place, words in enumerate(zip(*parts, strict=True)):
        if place % 2 == 0 or len(set(words)) == 1:
            joined.append(words[0])
            continue
        values = [float(word.rstrip("f")) for word in words]
        if any(value != int(value) for value in values):
            raise NotServedError(f"a number that is {', '.join(words)} at different sizes")
        text = formula([int(value) for value in values], sizes)
        joined.append(
            text if words[0].isdigit() else real.format(text, "float" if words[0].endswith("f") else "double")
        )
    return "".join(joined)


class _Sized:
    """What a program names, for all sizes: shapes and strides are formulas, computed once for each combination."""

    def __init__(self, of_sizes: str, count: int) -> None:
        arguments = ", ".join(f"n{place}" for place in range(count))
        self.layout: Callable[..., Any] = functools.lru_cache(4096)(eval(f"lambda {arguments}: {of_sizes}"))
        self.count = count


class SizedLay(_Sized):
    """A `lay` node."""

    def __call__(self, *given: Any) -> Any:
        return laid(given[-1], self.layout(*given[: self.count]))


class SizedRegion(_Sized):
    """A region: one kernel of C for all sizes."""

    def __init__(self, of_sizes: str, count: int, call: RegionCall, kernel: Any) -> None:
        super().__init__(of_sizes, count)
        self.kernel, self.order, self.back = kernel, call.order, call.back
        self.whole = call.whole if call.order else []
        self.dtypes = [dtype for _, dtype in call.shapes]

    def __call__(self, *given: Any) -> list[torch.Tensor]:
        sizes, tensors = given[: self.count], given[self.count :]
        shapes, strides = self.layout(*sizes)
        if self.order:
            tensors = tuple(
                tensor.permute(self.order) if whole else tensor
                for tensor, whole in zip(tensors, self.whole, strict=True)
            )
        tensors = tuple(
            tensor if tensor.stride() == steps else laid(tensor, steps)
            for tensor, steps in zip(tensors, strides, strict=True)
        )
        outputs = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, self.dtypes, strict=True)]
        self.kernel(*[each.data_ptr() for each in (*tensors, *outputs)], *sizes)
        return [output.permute(self.back) for output in outputs] if self.order else outputs


def generalised(programs: Sequence[Emitted], sizes: Sequence[Sizes]) -> Callable[..., tuple[Any, ...]]:
    """A function of a program's inputs and the sizes, from the programs for these sizes."""
    count = len(sizes[0])
    names = ", ".join(f"n{place}" for place in range(count))
    text = joined_text([program.source for program in programs], sizes, "float({0})")
    text = re.sub(r"\b([rs]\d+)\(", rf"\1({names}, ", text.replace("program(inputs)", f"program(inputs, {names})"))
    spaces = [program.function.__globals__ for program in programs]
    space = dict(spaces[0])
    regions: dict[str, Sequence[RegionCall]] = {}
    for name, value in spaces[0].items():
        others = [each.get(name) for each in spaces]
        if isinstance(value, RegionCall):
            regions[name] = others  # type: ignore[assignment]
        elif isinstance(value, LayCall):
            space[name] = SizedLay(joined_text([str(each.strides) for each in others], sizes), count)  # type: ignore[union-attr]
        elif name not in ("__builtins__", "program") and not all(_same(value, each) for each in others):
            raise NotServedError(f"{value} is not the same at every size")
    space |= _kernels(regions, sizes)
    exec(compile(text, "<sized graph>", "exec"), space)
    function: Callable[..., tuple[Any, ...]] = space["program"]
    return function


def _kernels(regions: Mapping[str, Sequence[RegionCall]], sizes: Sequence[Sizes]) -> dict[str, SizedRegion]:
    """Each region's calls at all sizes as one, their kernels in one library."""
    count = len(sizes[0])
    arguments = ", ".join(f"int64_t n{place}" for place in range(count))
    texts, layouts = {}, {}
    for name, calls in regions.items():
        if len({call.order for call in calls}) != 1:
            raise NotServedError("results lie in memory in another order at another size")
        if any(_shares(call) for call in calls):  # one that came without sharing could not be laid so
            raise NotServedError("an operand whose elements share memory")
        written = [_written(call) for call in calls]
        text = joined_text(written, sizes, "({1}){0}")
        texts[name] = text.replace("@", f"sized_{name}", 1).replace(") {", f", {arguments}) {{", 1)
        layouts[name] = joined_text([str(([shape for shape, _ in call.shapes], call.strides)) for call in calls], sizes)
    if not texts:
        return {}
    library = kernel_c.load_library("\n".join(texts.values()))
    return {
        name: SizedRegion(
            layouts[name], count, calls[0],
            kernel_c.kernel_function(
                library, f"sized_{name}", len(calls[0].body.inputs) + len(calls[0].body.outputs), count
            ),
        )
        for name, calls in regions.items()
    }  # fmt: skip


def _shares(call: RegionCall) -> bool:
    """Whether elements of an operand share memory: repeated by a stride of 0, or overlapping."""
    assert call.strides is not None
    operands = zip(call.body.inputs, call.strides, strict=True)
    return any(overlap(node.shape, steps) for node, steps in operands)


def _written(call: RegionCall) -> str:
    assert call.strides is not None
    plan = plan_kernel(call.body, call.node["space"], call.node["columns"], call.strides)
    return kernel_c.CWriter(plan).write()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, functools.partial):
        return isinstance(other, functools.partial) and (one.func, one.args) == (other.func, other.args)
    return one is other or bool(one == other) or (one != one and other != other)
