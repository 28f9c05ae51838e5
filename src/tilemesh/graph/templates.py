"""Patterns that the kernels of `tilemesh.kernels` compute: products with an activation, norms, softmax, the loss.

A template is a small program and the call of an operator of the kernels' registry:

    maximum(z := add(dot(a, b), c), 0.0)  =  fused_matmul(a, b, c, activation=relu, keep=z)

The left side is matched through reshapes, broadcasts of vectors and casts between 16-bit and 32-bit floats: kernels
compute in float32 and round once. What matches stays a *region* (`regions.py`) that also names its kernel, so costs,
memory plans and a run without that kernel need to know nothing of it. `keep=z` names what the kernel can also return.

Products are looked for in the whole graph, since no generated kernel holds one. Norms, softmax and the loss are looked
for among finished regions: only where a region is nothing but the pattern, the hand-written kernel takes its place; a
generated one that also computes the operators around it reads less.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.graph.ir import Graph, Node, make, ordered, rebuilt, users
from tilemesh.graph.ops import REDUCTIONS
from tilemesh.graph.regions import fusible, trailing
from tilemesh.graph.rewrite import Match, Pattern, matches, number_of, parsed

ASIDE = -1
NARROW = ("bfloat16", "float16", "float32")  # a kernel computes all of them in float32


@dataclass(frozen=True)
class KernelTemplate:
    """A pattern and the kernel that computes it: operands by name, settings, and what else it returns."""

    name: str
    left: Pattern
    kernel: str
    operands: tuple[str, ...]
    settings: tuple[tuple[str, Any], ...]  # a value, or the name of a number that the pattern binds
    keeps: tuple[str, ...]


@dataclass(frozen=True)
class KernelUse:
    """Which kernel computes a region: its name, settings, the place of each operand and of each result.

    results: for each output of the region which result of the kernel it is; ASIDE: computed beside it, by torch.
    """

    kernel: str
    settings: tuple[tuple[str, Any], ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    columns: int  # of the kernel's first operand


def template(name: str, text: str) -> KernelTemplate:
    """A template from its text `pattern = kernel(operands, setting=value, keep=names)`."""
    left, equal, right = text.partition(" = ")
    if not equal:
        raise UsageError(f"template {name}: {text!r} has no ' = '; write pattern = kernel(...)")
    call = ast.parse(right.strip(), mode="eval").body
    pattern = parsed(left, name)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or not isinstance(pattern, Pattern):
        raise UsageError(f"template {name}: {right.strip()!r} is no call of a kernel")
    operands = tuple(ast.unparse(argument) for argument in call.args)
    settings: list[tuple[str, Any]] = []
    keeps: tuple[str, ...] = ()
    for keyword in call.keywords:
        assert keyword.arg is not None
        if keyword.arg == "keep":
            values = keyword.value.elts if isinstance(keyword.value, ast.Tuple) else [keyword.value]
            keeps = tuple(ast.unparse(value) for value in values)
        else:
            settings.append((keyword.arg, keyword.value if isinstance(keyword.value, ast.Name) else _literal(keyword)))
    return KernelTemplate(name, pattern, call.func.id, operands, tuple(settings), keeps)


def _literal(keyword: ast.keyword) -> Any:
    return ast.literal_eval(keyword.value)


_SUM = "z := add(p := dot(a, b), c)"
_ALONE = "z := dot(a, b)"
_GELU = "multiply(multiply({z}, 0.5), add(erf(multiply(z, 0.7071067811865476)), 1.0))"
_TANH = (
    "multiply(multiply({z}, 0.5), add(tanh(multiply(add(z, multiply(multiply(multiply(z, z), z), 0.044715)),"
    " 0.7978845608028654)), 1.0))"
)
PRODUCTS = tuple(
    template(
        f"product, {activation}{words}",
        f"{text.format(z=z)} = fused_matmul({given}, activation={activation!r}, keep=z)",
    )
    for z, given, words in ((_SUM, "a, b, c", ""), (_ALONE, "a, b", " without bias"))
    for activation, text in (
        ("gelu", _GELU),
        ("gelu_tanh", _TANH),
        ("relu", "maximum({z}, 0.0)"),
        ("silu", "multiply({z}, sigmoid(z))"),
    )
)
_CENTRED = "q := subtract(x, m := divide(sum(x, dims=d), n))"
_ROOT = "divide(1.0, sqrt(add(divide(sum(multiply({value}, {again}), dims=e), n), eps)))"
_LAYER = f"multiply({_CENTRED}, r := {_ROOT.format(value='q', again='q')})"
_RMS = f"multiply(x, r := {_ROOT.format(value='x', again='x')})"
_SHIFTED = "q := subtract(x, amax(x, dims=d))"
ROWS = (
    template("layer norm", f"add(multiply({_LAYER}, w), b) = layer_norm(x, w, b, eps=eps, keep=(r, m))"),
    template("layer norm without weights", f"{_LAYER} = layer_norm(x, eps=eps, keep=(r, m))"),
    template("RMS norm", f"multiply({_RMS}, w) = rms_norm(x, w, eps=eps, keep=r)"),
    template("RMS norm without weights", f"{_RMS} = rms_norm(x, eps=eps, keep=r)"),
    template("softmax", f"divide(p := exp({_SHIFTED}), sum(p, dims=e)) = softmax(x)"),
    template(
        "loss",
        "where(k, 0.0, negate(subtract(subtract(sum(where(compare(i, t, kind='equal'), x, 0.0), dims=f), m := amax(x, "
        "dims=d)), log(sum(exp(subtract(x, m)), dims=e))))) = cross_entropy(x, t, ignore_index=k, reduction='none')",
    ),
)


def with_products(graph: Graph, dtypes: Sequence[str]) -> Graph:
    """The graph in which products of these dtypes and the activations that follow them are one kernel each."""
    order = graph.nodes()
    readers = users(order)
    made: dict[Node, Node] = {}
    for root in order:
        if root.dtype not in dtypes or not prod(root.shape) > 0 or _feeds_elementwise(root, readers, graph):
            continue
        for each in PRODUCTS:
            match = next(matches(each.left, root, Match(root), seen), None)
            if match is not None:
                made |= _product(graph, readers, each, match, root)
                break
    return _replaced(graph, made)


def _feeds_elementwise(root: Node, readers: dict[Node, list[Node]], graph: Graph) -> bool:
    """Whether a generated kernel reads this value anyway, which may then compute it as well."""
    waiting = list(readers[root])
    while waiting:
        reader = waiting.pop()
        if fusible(reader):
            return True
        if reader.op in ("reshape", "transpose", "broadcast"):
            waiting += readers[reader]
    return False


def _product(
    graph: Graph, readers: dict[Node, list[Node]], each: KernelTemplate, match: Match, root: Node
) -> dict[Node, Node]:
    """What the root, and the sum before its activation where others read it, become; nothing where it does not fit."""
    total = match.nodes["z"]
    product = match.nodes.get("p", total)
    leaves = list(product.inputs)
    if len(product.shape) != 2 or {value.dtype for value in (product, total, root)} != {product.dtype}:
        return {}
    if prod(root.shape) != prod(product.shape):  # it was repeated on the way
        return {}
    if total is not product:
        added = _added(total, product)
        if added is None:
            return {}
        leaves.append(added)
    if len(set(leaves)) != len(leaves):
        return {}
    inside = _between(root, leaves)
    read_outside = [
        node
        for node in inside
        if node is not root and (node in graph.outputs or any(reader not in inside for reader in readers[node]))
    ]
    if any(_view_of(node) is not total for node in read_outside):
        return {}
    outputs = (root, total) if read_outside else (root,)
    body = _body(leaves, outputs)
    use = KernelUse(each.kernel, each.settings, tuple(range(len(leaves))), tuple(range(len(outputs))), 0)
    region = make("region", *leaves, body=body, space=prod(root.shape), columns=0, kernel=use)
    return {
        node: make("item", region, index=place, shape=node.shape, dtype=node.dtype)
        for place, node in enumerate(outputs)
    }


def _added(total: Node, product: Node) -> Node | None:
    """What is added to a product: a vector along its last dim, or a matrix of its shape; None for all else."""
    others = [value for value in total.inputs if _view_of(value) is not product]
    if len(others) != 1 or others[0].dtype != product.dtype:
        return None
    (other,) = others
    if other.op == "broadcast":
        vector = other.inputs[0]
        return vector if other["dims"] == (len(other.shape) - 1,) and vector.shape == product.shape[-1:] else None
    return other if other.shape == product.shape else None


def _view_of(node: Node) -> Node:
    while node.op == "reshape":
        node = node.inputs[0]
    return node


def _between(root: Node, leaves: Sequence[Node]) -> set[Node]:
    """The nodes from a root down to its leaves, without them and without numbers."""
    return set(
        ordered([root], lambda node: [each for each in node.inputs if each not in leaves and number_of(each) is None])
    )


def _body(leaves: Sequence[Node], outputs: Sequence[Node]) -> Graph:
    """The program between leaves and outputs, with inputs of its own."""
    inner: dict[Node, Node] = {
        leaf: make("input", name=f"i{place}", shape=leaf.shape, dtype=leaf.dtype) for place, leaf in enumerate(leaves)
    }
    given = tuple(inner.values())
    for node in ordered(outputs, lambda node: () if node in inner else node.inputs):
        inner[node] = inner.get(node) or rebuilt(node, [inner[value] for value in node.inputs])
    return Graph(given, tuple(inner[node] for node in outputs))


def _replaced(graph: Graph, made: dict[Node, Node]) -> Graph:
    """The graph with items of regions in the place of these nodes."""
    new: dict[Node, Node] = {}

    def reads(node: Node) -> Sequence[Node]:
        return made[node].inputs[0].inputs if node in made else node.inputs

    for node in ordered(graph.outputs, reads):
        inputs = [new[value] for value in reads(node)]
        item = made.get(node)
        new[node] = rebuilt(node, inputs) if item is None else rebuilt(item, [rebuilt(item.inputs[0], inputs)])
    return Graph(graph.inputs, tuple(new[node] for node in graph.outputs))


def with_rows(graph: Graph) -> Graph:
    """The graph in which a region that is a norm, a softmax or a loss and nothing else names its kernel."""

    def change(node: Node, inputs: Sequence[Node]) -> Node:
        use = _row_kernel(node) if node.op == "region" and "kernel" not in dict(node.attributes) else None
        if use is None:
            return rebuilt(node, inputs)
        return make("region", *inputs, line=node.line, kernel=use, **dict(node.attributes))

    return graph.replace(change)


def _row_kernel(region: Node) -> KernelUse | None:
    """The kernel that computes a region whole, or None."""
    body, columns = region["body"], region["columns"]
    reductions = [node for node in body.nodes() if node.op in REDUCTIONS]
    if not columns or any(trailing(node) != columns for node in reductions):
        return None
    for each in ROWS:
        for root in body.outputs:
            match = next(matches(each.left, root, Match(root), seen), None)
            if match is not None:
                use = _row_use(region, each, match, root)
                if use is not None:
                    return use
    return None


def _row_use(region: Node, each: KernelTemplate, match: Match, root: Node) -> KernelUse | None:
    body, columns, space = region["body"], region["columns"], region["space"]
    named = match.nodes
    x = named["x"]
    counts = {"x": space, "w": columns, "b": columns, "t": space // columns}
    for name, count in counts.items():
        if name in named and (named[name] not in body.inputs or prod(named[name].shape) != count):
            return None
    vectors = [node for node in body.nodes() if node.op == "broadcast" and prod(node.inputs[0].shape) == columns]
    if any(node["dims"] != tuple(range(len(node.shape)))[-len(node["dims"]) :] for node in vectors):
        return None
    if "i" in named and named["i"].op != "iota":
        return None
    if "n" in named and number_of(named["n"]) != columns:
        return None
    results = [0 if node is root else _kept(node, each, named, body) for node in body.outputs]
    if None in results or root.dtype != (x.dtype if "t" not in named else "float32"):
        return None
    settings = {}
    for name, value in each.settings:
        if isinstance(value, ast.Name):
            value = _ignored(region, named) if value.id == "k" else number_of(named[value.id])
        settings[name] = value
    if None in settings.values():
        return None
    operands = tuple(body.inputs.index(named[name]) for name in each.operands)
    read = {named[name] for name in (*each.operands, "k") if name in named}
    if not set(body.inputs) <= read:
        return None
    places = tuple(place for place in results if place is not None)
    return KernelUse(each.kernel, tuple(settings.items()), operands, places, columns)


def _ignored(region: Node, named: dict[str, Node]) -> int | None:
    """The target that a loss leaves out, where rows are left out by comparing their targets with one number."""
    body = region["body"]
    inside, targets = named["k"], region.inputs[body.inputs.index(named["t"])]
    skipped = region.inputs[body.inputs.index(inside)] if inside in body.inputs else inside
    given = {node: node for node in region.inputs}
    if skipped.op == "item" and skipped.inputs[0].op == "region":
        maker = skipped.inputs[0]
        given |= dict(zip(maker["body"].inputs, maker.inputs, strict=True))
        skipped = maker["body"].outputs[skipped["index"]]
    elif inside not in body.inputs:
        given |= dict(zip(body.inputs, region.inputs, strict=True))
    if skipped.op != "compare" or skipped["kind"] != "equal" or given.get(seen(skipped.inputs[0])) is not targets:
        return None
    number = number_of(skipped.inputs[1])
    return int(number) if number is not None else None


def _kept(node: Node, each: KernelTemplate, named: dict[str, Node], body: Graph) -> int | None:
    """Which further result of the kernel a value is; ASIDE where the kernel's rows are not read for it."""
    if named["x"] not in Graph(body.inputs, (node,)).nodes():
        return ASIDE
    for place, name in enumerate(each.keeps):
        if seen(node) is named.get(name) and node.dtype == named[name].dtype:
            return place + 1
    return None


def seen(node: Node) -> Node:
    """A value without what changes only its shape, its repetition, or its width among 16 and 32 bits."""
    while True:
        narrow = node.op == "cast" and node.dtype in NARROW and node.inputs[0].dtype in NARROW
        if not narrow and node.op not in ("reshape", "broadcast"):
            return node
        node = node.inputs[0]
