"""From the IR back to torch: straight Python code that calls torch once per node, with constants written as numbers.

`program` gives the function and its source. A sum of a product and a vector becomes `addmm`; numbers stand in the code
instead of tensors; every value is deleted after its last use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from tilemesh.core.errors import UsageError
from tilemesh.graph.by_torch import constant, dtype_of, evaluate_torch, torch_function
from tilemesh.graph.calls import layer_with_workspace
from tilemesh.graph.evaluate import check_shapes
from tilemesh.graph.generated import RegionCall, prepare, run_without_data, way_for
from tilemesh.graph.ir import Graph, Node, users
from tilemesh.graph.kernel_call import KernelCall, embedding_gradient, kernel_of
from tilemesh.graph.memory import scheduled
from tilemesh.graph.opaque import InputSlot, Laid, LayCall, Strides, call_of, traced_strides, with_lays
from tilemesh.graph.ops import COMPARISONS, FLOATS, primitive
from tilemesh.graph.rewrite import number_of
from tilemesh.kernels.launch.compile_ahead import AheadCompilers
from tilemesh.kernels.launch.tensors import read_device

Exchange: TypeAlias = Callable[[Node, bool], Callable[[Any], Any]]
"""Of a node that ranks compute together, its function; or, if it is only begun, one of whose result `wait()` is it."""
Order: TypeAlias = Callable[[Graph], Sequence[Node]]
# Operators whose code may have a number in the place of one operand.
_BESIDE_NUMBERS = ("add", "subtract", "multiply", "divide", "power", "compare", "maximum", "minimum")


class Emitted:
    """A graph as a function of torch tensors. `source` is its code; `regions` run by generated kernels.

    inputs: tensors, real or fake, with the strides that calls will have; without them, rows one after the other.
    results: the strides that outputs shall have; None: any. `graph` is what runs: with a `lay` node where a value has
    other strides than its reader needs. Where `inputs` are known, that is decided here; otherwise in each call.
    `strides` are those that outputs then have. kernels: whether they are compiled, so that it can run.
    """

    def __init__(
        self, graph: Graph, device: torch.device, inputs: Sequence[Any] | None = None, way: str | None = None,
        ahead: AheadCompilers | None = None, results: Sequence[Strides | None] | None = None,
        exchange: Exchange | None = None, kernels: bool = True, order: Order | None = None,
    ) -> None:  # fmt: skip
        self.exchange, self.kernels, self.order = exchange, kernels, order
        self.device, self.way = device, way or way_for(device)
        self.strides: list[Strides | None] | None = None
        self._made: dict[Node, Any] = {}
        lays = self._write(graph, results)
        self.regions = [value for value in self._made.values() if isinstance(value, RegionCall)]
        if self.regions or inputs is not None:
            given = examples(graph, device) if inputs is None else inputs
            outputs = run_without_data(self.function, given)
            if inputs is not None:
                self.strides = [traced_strides(value) for value in outputs]
        if inputs is not None and not all(call.copied for call in lays):
            self._write(graph, results, {lays[call] for call in lays if call.copied})
        if self.regions and kernels:
            if self.way is None:
                raise UsageError(f"a graph with regions on {device}, where nothing compiles kernels")
            prepare(self.regions, device, self.way, ahead)
        if ahead is not None and ahead.open:
            calls = [value for value in self._made.values() if isinstance(value, KernelCall)]
            ahead.meanwhile({(call.use, call.laid): call.made for call in calls if call.laid})

    def _write(
        self, graph: Graph, results: Sequence[Strides | None] | None, needed: Collection[Laid] | None = None
    ) -> dict[LayCall, Laid]:
        """The code, with these `lay` nodes or all; what each of them is for."""
        self.graph, origins, lays = with_lays(graph, results, needed)
        writer = _SourceWriter(self.graph, self.device, self.way, self._made, origins, self.exchange, self._order)
        with unset_fake_temporarily():  # torch compiles under fake tensors; constants are real ones
            self.source = writer.write()
        namespace: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan, **writer.values}
        exec(compile(self.source, "<graph>", "exec"), namespace)
        self.function: Callable[[list[Any]], tuple[Any, ...]] = namespace["program"]
        return {call: lays[node] for node, call in writer.lays.items() if node in lays}

    def _order(self, graph: Graph) -> Sequence[Node]:
        return self.order(graph) if self.order else scheduled(graph) if self.kernels else graph.nodes()

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        check_shapes(self.graph, [tensor.shape for tensor in tensors])  # refuses what does not fit
        return self.function(list(tensors))


def program(
    graph: Graph, device: torch.device | str = "cpu", inputs: Sequence[Any] | None = None, way: str | None = None,
    ahead: AheadCompilers | None = None, results: Sequence[Strides | None] | None = None,
    exchange: Exchange | None = None, kernels: bool = True, order: Order | None = None,
) -> Emitted:  # fmt: skip
    """A graph as a function. way: how regions are computed; ahead: processes that compile Triton kernels; results: the
    strides that outputs shall have; exchange: of nodes that ranks compute together, begun where they stand in `order`
    and waited for where they are first read."""
    return Emitted(graph, read_device(device), inputs, way, ahead, results, exchange, kernels, order)


def examples(graph: Graph, device: torch.device) -> list[Any]:
    """Inputs of a graph without data."""
    with FakeTensorMode(allow_non_fake_inputs=True):  # constants of a program are real
        return [torch.empty(node.shape, dtype=dtype_of(node.dtype), device=device) for node in graph.inputs]


class _SourceWriter:
    def __init__(
        self, graph: Graph, device: torch.device, way: str | None, made: dict[Node, Any], origins: dict[Node, Node],
        exchange: Exchange | None, order: Order,
    ) -> None:  # fmt: skip
        self.exchange = exchange
        self.graph, self.device, self.way = graph, device, way
        self.made, self.origins = made, origins  # constants and regions, made once for a node of the given graph
        self.lays: dict[Node, LayCall] = {}
        self.order = order(graph)
        self.begun: set[Node] = set()
        """Exchanges after which something else comes before their first reader, until they are waited for."""
        # Which values live is known when it runs: then every operator asks.
        self.steered = any(primitive(node.op).kind == "control" for node in self.order)
        self.readers = users(self.order)
        self.names: dict[Node, str] = {}
        self.values: dict[str, Any] = {}  # what the code names: operators, constants

    def write(self) -> str:
        skipped = self._merged()
        numbers = {node for node in self.order if self._only_number(node)}
        for place, node in enumerate(self.graph.inputs):
            self.names[node] = f"a{place}"
        lines = []
        given = "".join(f"{self.names[node]}, " for node in self.graph.inputs)
        if given:
            lines.append(f"{given.rstrip()} = inputs")
        lines.append("inputs.clear()")
        written = [
            node for node in self.order if node not in self.names and node not in skipped and node not in numbers
        ]
        reads = {node: self._reads(node, skipped) for node in written}
        last = {value: node for node in written for value in reads[node]}
        if self.exchange:
            exchanges = [pair for pair in pairwise(written) if primitive(pair[0].op).kind == "exchange"]
            self.begun = {node for node, following in exchanges if node not in reads[following]}
        for place, node in enumerate(written):
            lines += [wait for value in reads[node] for wait in self._wait(value)]
            self.names[node] = f"v{place}"
            lines.append(f"{self.names[node]} = {self._expression(node)}")
            done = [
                value for value in dict.fromkeys(reads[node]) if last[value] is node and value not in self.graph.outputs
            ]
            dead = [self.names[value] for value in done if value in self.names]
            if dead:
                lines.append(f"del {', '.join(dead)}")
        lines += [wait for node in self.graph.outputs for wait in self._wait(node)]
        outputs = "".join(f"{self._name(node)}, " for node in self.graph.outputs)
        return "def program(inputs):\n" + "".join(f"    {line}\n" for line in lines) + f"    return ({outputs})\n"

    def _wait(self, node: Node) -> list[str]:
        if node not in self.begun:
            return []
        self.begun.remove(node)
        return [f"{self.names[node]} = {self.names[node]}.wait()"]

    def _only_number(self, node: Node) -> bool:
        """A repeated number that every reader can have as a number in the code."""
        if self.steered or number_of(node) is None or node in self.graph.outputs:
            return False
        return all(
            self._takes_number(reader, node) or (reader.op in ("broadcast", "reshape") and self._only_number(reader))
            for reader in self.readers[node]
        )

    def _takes_number(self, reader: Node, node: Node) -> bool:
        if reader.op in _BESIDE_NUMBERS:
            other = [value for value in reader.inputs if value is not node]
            return len(other) == 1 and number_of(other[0]) is None and node.dtype in (*FLOATS, "int64")
        return False

    def _merged(self) -> set[Node]:
        """Products, and vectors as rows, that are written as part of the sum that alone reads them."""
        sums = [node for node in self.order if self._is_addmm(node)]
        vectors = {node.inputs[1] for node in sums if len(self.readers[node.inputs[1]]) == 1}
        cut = {node.inputs[0] for node in self.order if self._selected(node)}
        return {node.inputs[0] for node in sums} | (vectors - {*self.graph.outputs}) | cut

    def _selected(self, node: Node) -> str:
        """The call of a reshape that drops the one dim of which the slice before it keeps a single place; or none."""
        part = node.inputs[0] if node.op == "reshape" else node
        if self.steered or part.op != "slice" or len(self.readers[part]) > 1 or part in self.graph.outputs:
            return ""
        pairs = zip(part.shape, part.inputs[0].shape, strict=True)
        cut = [dim for dim, (size, before) in enumerate(pairs) if size != before]
        if len(cut) != 1 or part.shape[cut[0]] != 1 or node.shape != part.shape[: cut[0]] + part.shape[cut[0] + 1 :]:
            return ""
        return f".select({cut[0]}, {part['start'][cut[0]]})"

    def _is_addmm(self, node: Node) -> bool:
        if self.steered or node.op != "add" or len(node.shape) != 2:
            return False
        product, vector = node.inputs
        once = len(self.readers[product]) == 1 and product not in self.graph.outputs
        return product.op == "dot" and once and vector.op == "broadcast" and vector["dims"] == (1,)

    def _reads(self, node: Node, skipped: set[Node]) -> list[Node]:
        return [read for value in node.inputs for read in (value.inputs if value in skipped else [value])]

    def _name(self, node: Node) -> str:
        if node in self.names:
            return self.names[node]
        number = number_of(node)
        assert number is not None
        return repr(float(number)) if node.dtype in FLOATS else repr(int(number))

    def _held(self, value: Any, kind: str) -> str:
        name = f"{kind}{len(self.values)}"
        self.values[name] = value
        return name

    def _expression(self, node: Node) -> str:
        if self._is_addmm(node):
            product, vector = node.inputs  # cuBLAS adds a vector as it writes; a matrix is copied first
            given = (vector.inputs[0], *product.inputs) if vector not in self.names else (vector, *product.inputs)
            return f"torch.addmm({', '.join(self._name(value) for value in given)})"
        if self.steered:
            function = self._held(partial(_evaluated, node, self.device), "f")
            return f"{function}({', '.join(self._name(value) for value in node.inputs)})"
        if self._selected(node):
            return self._name(node.inputs[0].inputs[0]) + self._selected(node)
        names = [self._name(value) for value in node.inputs] if node.op != "opaque" else []
        row = primitive(node.op)
        if row.code:
            sign = COMPARISONS[node["kind"]] if node.op == "compare" else ""
            return row.code.format(x=names[0], y=names[1], sign=sign)
        if node.op in ("maximum", "minimum") and any(self._number(value) for value in node.inputs):
            return self._clamped(node)
        if node.op in _TEXT:
            return _TEXT[node.op](node, *names)
        if row.torch:
            name = "mm" if node.op == "dot" and len(node.shape) == 2 else row.torch
            return f"torch.{name}({', '.join(names)})"
        if node.op == "item":
            return f"{names[0]}[{node['index']}]"
        if node.op == "opaque":
            return self._opaque(node)
        if node.op == "constant":
            return self._held(self._once(node, lambda: constant(node, self.device)), "c")
        if node.op == "iota":
            return self._held(self._once(node, lambda: evaluate_torch(node, [], self.device)), "c")
        if node.op == "region":
            return f"{self._held(self._once(node, lambda: self._region(node)), 'r')}({', '.join(names)})"
        if node.op == "lay":
            self.lays[node] = LayCall(node["strides"])
            return f"{self._held(self.lays[node], 's')}({names[0]})"
        if self.exchange and row.kind == "exchange":
            return f"{self._held(self.exchange(node, node in self.begun), 'f')}({names[0]})"
        call = torch_function(node)
        return f"{self._held(call, 'f')}({', '.join(names)})"

    def _once(self, node: Node, make: Callable[[], Any]) -> Any:
        origin = self.origins[node]
        if origin not in self.made:
            self.made[origin] = make()
        return self.made[origin]

    def _region(self, node: Node) -> RegionCall | KernelCall:
        if kernel_of(node) is None:
            return RegionCall(node, self.device)
        return KernelCall(node, self.way if self.way in ("triton", "interpret") else "torch")

    def _number(self, node: Node) -> bool:
        return node not in self.names

    def _clamped(self, node: Node) -> str:
        value, number = sorted(node.inputs, key=self._number)
        bound = self._name(number)
        if node.op == "maximum" and bound == "0.0":
            return f"torch.relu({self._name(value)})"
        return f"torch.clamp_{'min' if node.op == 'maximum' else 'max'}({self._name(value)}, {bound})"

    def _opaque(self, node: Node) -> str:
        target = call_of(node["target"])
        if target is torch.ops.aten.embedding_dense_backward.default and self.device.type == "cuda":
            target = embedding_gradient
        if target is torch.ops.aten.mkldnn_rnn_layer.default and node["args"][-1] is True:
            target = layer_with_workspace
        words = [self._argument(value, node) for value in node["args"]]
        words += [f"{name}={self._argument(value, node)}" for name, value in node["kwargs"]]
        return f"{self._held(target, 'f')}({', '.join(words)})"

    def _argument(self, value: Any, node: Node) -> str:
        if isinstance(value, InputSlot):
            return self._name(node.inputs[value.index])
        if isinstance(value, tuple):
            return f"[{', '.join(self._argument(item, node) for item in value)}]"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        return self._held(value, "k")


def _slice_text(node: Node, x: str) -> str:
    """Cuts of neighbours as views of one dim after the other, which torch makes faster than it reads an index."""
    cuts = zip(node["start"], node["stop"], node["step"], node.inputs[0].shape, strict=True)
    text = x
    for dim, (start, stop, step, size) in enumerate(cuts):
        if step != 1:
            text += f"[{'slice(None), ' * dim}{start}:{stop}:{step}]"
        elif (start, stop) != (0, size):
            text += f".narrow({dim}, {start}, {stop - start})"
    return text


def _broadcast_text(node: Node, x: str) -> str:
    shape, dims = node.shape, node["dims"]
    if list(dims) != sorted(dims):
        x += f".permute({[dims.index(dim) for dim in sorted(dims)]})"
    first = min(dims, default=len(shape))  # torch puts dims before it as it repeats
    for dim in range(first, len(shape)):
        x += f".unsqueeze({dim - first})" if dim not in dims else ""
    return f"{x}.expand({list(shape)})"


def _transpose_text(node: Node, x: str) -> str:
    moved = [dim for dim, place in enumerate(node["order"]) if dim != place]
    return f"{x}.transpose({moved[0]}, {moved[1]})" if len(moved) == 2 else f"{x}.permute({list(node['order'])})"


def _take_text(node: Node, table: str, index: str) -> str:
    """Rows of a table. An index counts from 0: indexing would take a negative one from the end."""
    if len(node.inputs[1].shape) == 1:
        return f"{table}.index_select(0, {index})"
    return f"{table}.index_select(0, {index}.reshape(-1)).reshape({list(node.shape)})"


_MOST_POOLED = 64


def _sum_text(node: Node, x: str) -> str:
    sizes = node.inputs[0].shape
    is_windows = node["dims"] == (3, 5) and len(sizes) == 6 and node.dtype in FLOATS
    # Of a picture's windows, as when enlarging. A pooling adds one number after the other, and nothing of no picture.
    if is_windows and all(sizes) and sizes[3] * sizes[5] <= _MOST_POOLED:
        batch, channels, height, taps, width, beside = sizes
        whole = f"{x}.reshape({batch}, {channels}, {height * taps}, {width * beside})"
        return f"torch._C._nn.avg_pool2d({whole}, ({taps}, {beside}), divisor_override=1)"
    return f"torch.sum({x}, {list(node['dims'])})" + ("" if node.dtype in FLOATS else f".to({dtype_of(node.dtype)})")


# Operators whose call is written out: what a function of `by_torch` reads from a node, it reads in every call.
_TEXT: dict[str, Callable[..., str]] = {
    "reshape": lambda node, x: f"{x}.reshape({list(node.shape)})",
    "transpose": _transpose_text,
    "concat": lambda node, *xs: f"torch.cat([{', '.join(xs)}], {node['dim']})",
    "cast": lambda node, x: f"{x}.to({dtype_of(node.dtype)})",
    "amax": lambda node, x: f"torch.amax({x}, {list(node['dims'])})",
    "sum": _sum_text,
    "slice": _slice_text,
    "broadcast": _broadcast_text,
    "take": _take_text,
}


def _evaluated(node: Node, device: torch.device, *inputs: Any) -> Any:
    return evaluate_torch(node, inputs, device)
