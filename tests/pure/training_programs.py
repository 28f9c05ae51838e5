"""Training steps as graphs, by our own derivatives: what choosers are asked to place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilemesh.graph import build as b
from tilemesh.graph.derive import gradient
from tilemesh.graph.ir import Graph, Node

Training = tuple[Graph, dict[Node, Node]]


def training(loss: Node, inputs: Sequence[Node], weights: Sequence[Node], state: str = "float32") -> Training:
    """Loss, gradients and Adam's update; which output replaces which input."""
    carried: dict[Node, Node] = {}
    states: list[Node] = []
    for w, g in zip(weights, gradient(loss, weights), strict=True):
        m, v = (b.argument(f"{w['name']}.{name}", w.shape, state) for name in "mv")
        g = b.cast(g, state)
        m_new = b.add(b.multiply(m, 0.9), b.multiply(g, 0.1))
        v_new = b.add(b.multiply(v, 0.999), b.multiply(b.multiply(g, g), 0.001))
        step = b.multiply(b.divide(m_new, b.add(b.sqrt(v_new), 1e-8)), 1e-3)
        carried |= {b.subtract(w, b.cast(step, w.dtype)): w, m_new: m, v_new: v}
        states += [m, v]
    return Graph((*inputs, *weights, *states), (loss, *carried)), carried


def linear(x: Node, w: Node) -> Node:
    """A weight as torch keeps it: [out, in]."""
    return b.dot(x, b.transpose(w))


def rms_norm(x: Node, w: Node) -> Node:
    return b.multiply(b.divide(x, b.sqrt(b.add(b.mean(b.multiply(x, x), [-1], keep=True), 1e-5))), w)


def rotated(x: Node, cos: Node, sin: Node) -> Node:
    width: Any = x.shape[-1]
    left, right = b.part(x, -1, 0, width // 2), b.part(x, -1, width // 2, width)
    return b.add(b.multiply(x, cos), b.multiply(b.concat([b.negate(right), left], -1), sin))


def transformer(
    layers: int, batch: int, tokens: int, width: int, hidden: int, heads: int, *, kv_heads: int = 0,
    vocabulary: int = 0, norms: bool = False, dtype: str = "bfloat16", state: str = "float32",
) -> Training:  # fmt: skip
    """With a vocabulary and norms Llama's; without, blocks of attention and an MLP between plain arrays."""
    weights: list[Node] = []
    size, kv_heads = width // heads, kv_heads or heads

    def weight(name: str, *shape: int) -> Node:
        weights.append(b.argument(name, shape, dtype))
        return weights[-1]

    def norm(x: Node, name: str) -> Node:
        return rms_norm(x, weight(name, width)) if norms else x

    def by_head(x: Node, many: int) -> Node:
        return b.transpose(b.reshape(x, [batch, tokens, many, size]), [0, 2, 1, 3])

    inputs = [b.argument("x", [batch * tokens, width], dtype)]
    x = inputs[0]
    if vocabulary:
        inputs = [b.argument("tokens", [batch, tokens], "int64"), b.argument("targets", [batch * tokens], "int64")]
        inputs += [b.argument(name, [tokens, size], dtype) for name in ("cos", "sin")]
        x = b.reshape(b.take(weight("embedding", vocabulary, width), inputs[0]), [batch * tokens, width])
    for layer in range(layers):
        name = f"layers.{layer}."
        normed = norm(x, f"{name}norm1")
        q = by_head(linear(normed, weight(f"{name}wq", width, width)), heads)
        k = by_head(linear(normed, weight(f"{name}wk", kv_heads * size, width)), kv_heads)
        v = by_head(linear(normed, weight(f"{name}wv", kv_heads * size, width)), kv_heads)
        if vocabulary:
            q, k = (rotated(each, inputs[2], inputs[3]) for each in (q, k))
        if kv_heads != heads:
            many = (batch, kv_heads, heads // kv_heads, tokens, size)
            k, v = (
                b.reshape(b.expand(b.reshape(each, (batch, kv_heads, 1, tokens, size)), many), q.shape)
                for each in (k, v)
            )
        mixed = b.dot(b.softmax(b.multiply(b.dot(q, b.transpose(k)), size**-0.5)), v)
        flat = b.reshape(b.transpose(mixed, [0, 2, 1, 3]), [batch * tokens, width])
        x = b.add(x, linear(flat, weight(f"{name}wo", width, width)))
        normed = norm(x, f"{name}norm2")
        inner = b.silu(linear(normed, weight(f"{name}w1", hidden, width)))
        if norms:
            inner = b.multiply(inner, linear(normed, weight(f"{name}w3", hidden, width)))
        x = b.add(x, linear(inner, weight(f"{name}w2", width, hidden)))
    if vocabulary:
        logits = linear(norm(x, "norm"), weight("head", vocabulary, width))
        return training(b.cross_entropy(b.cast(logits, "float32"), inputs[1]), inputs, weights, state)
    return training(b.mean(b.multiply(x, x)), inputs, weights, state)
