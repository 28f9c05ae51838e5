"""Serving a model on a cluster: what fits, how fast it is, which tensor parallelism and batch to take, and why.

The one idea: in a steady state d requests decode at a time, and for each that ends another begins. So a step has d
decoding tokens and d x prompt / output tokens of prompts, as far as its budget goes, and its time follows from the work
(`serving_clock.py`). Requests per second are then d / (output x step time); the batch that a rate needs is the one for
which that is the rate, which is Little's law: requests inside = rate x time inside. What queues do is simulated, in
`serve/simulate.py`, and a test holds what is said here to what the scheduler does when it is never idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilemesh.core.calibration import Rates
from tilemesh.core.errors import RunError, UsageError, unknown
from tilemesh.core.hardware import DTYPE_BYTES, Cluster
from tilemesh.core.ranges import Range
from tilemesh.core.units import format_bytes
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.decoding import SequencePart, key_value_bytes, weight_bytes
from tilemesh.model.work.weights import why_not_ep, why_not_tp
from tilemesh.plan import constants
from tilemesh.plan.serving_clock import StepClock

PAGE_TOKENS = 16
MOST_BATCH = 4096
LOAD = 0.8
"""Of what a layout can serve, how much a plan asks of it: queues grow without bound towards 1."""


_DEMAND = Range(0, 1e9, above=True)


@dataclass(frozen=True)
class ServeDemand:
    """What is asked: requests per second in all, and the tokens of one."""

    rate: float
    prompt: int
    output: int
    between_tokens_s: float = float("inf")
    """The longest time per output token that is wanted."""

    def __post_init__(self) -> None:
        for name in ("rate", "prompt", "output"):
            _DEMAND.check(f"--{name}", getattr(self, name))


@dataclass(frozen=True)
class SteadyState:
    """So many requests inside at a time, on one replica."""

    batch: int
    step_s: float
    """Also the time per output token."""
    tokens_per_s: float
    requests_per_s: float
    first_token_s: float
    """Of a request that need not wait for others: its prompt in chunks, beside those that decode."""
    limit_s: float
    """The least time of the step."""


@dataclass(frozen=True)
class ServeLayout:
    """tp ranks to a replica, as many replicas as the cluster has room for, of which `ep` share out the experts."""

    tp: int
    ep: int
    replicas: int
    weight_bytes: int
    """On one device."""
    token_bytes: int
    """Keys and values of one token, on one device."""
    pages: int
    """Of `PAGE_TOKENS`, in what is left of the memory."""
    fits: int
    """Requests of the demanded length whose pages there are."""
    largest: SteadyState
    """At the largest batch that fits and keeps the wanted time per token."""
    needed: SteadyState | None
    """At the smallest batch that serves this replica's share of the rate in the wanted time; None: no batch does."""
    clock: StepClock

    @property
    def words(self) -> str:
        return f"tp {self.tp}" + f", ep {self.ep}" * (self.ep > 1)

    @property
    def running(self) -> int:
        """The batch to allow: what the rate needs at the planned load, or all that fits."""
        return self.largest.batch if self.needed is None else self.needed.batch

    @property
    def most_requests_per_s(self) -> float:
        """Of all replicas, at the largest batch."""
        return self.largest.requests_per_s * self.replicas

    @property
    def tokens_per_s(self) -> float:
        """Of all replicas, at the largest batch."""
        return self.largest.tokens_per_s * self.replicas


def serve_layouts(
    model: ModelConfig,
    cluster: Cluster,
    demand: ServeDemand,
    dtype: str = "bf16",
    rates: Rates | None = None,
    headroom: float = constants.HEADROOM,
    step_tokens: int = 512,
) -> tuple[list[ServeLayout], list[str]]:
    """All that fit, best first, and why the others do not."""
    if dtype not in DTYPE_BYTES:
        raise unknown("dtype", dtype, DTYPE_BYTES)
    if demand.prompt + demand.output > model.context + 1:
        raise UsageError(
            f"a prompt of {demand.prompt} and an output of {demand.output} tokens: the context is {model.context}; "
            "set --prompt or --output lower"
        )
    layouts: list[ServeLayout] = []
    refused: list[str] = []
    count = cluster.node.count  # an engine's ranks, and those that hold experts together, are of one machine
    for tp in (tp for tp in range(1, count + 1) if count % tp == 0):
        spreads = [
            ep for ep in range(1, count // tp + 1) if ep == 1 or (count // tp % ep == 0 and is_spread(model, ep))
        ]
        if reason := why_not_tp(model, tp):
            refused.append(reason)
            continue
        for ep in spreads:
            layout = _layout(model, cluster, demand, dtype, rates, headroom, tp, ep, step_tokens)
            if isinstance(layout, str):
                refused.append(layout)
            else:
                layouts.append(layout)
    if not layouts:
        raise RunError(f"nothing fits: {'; '.join(refused)}")
    return sorted(layouts, key=lambda layout: _order(layout, demand)), refused


def _order(layout: ServeLayout, demand: ServeDemand) -> tuple[object, ...]:
    """Those that serve the rate first; of these the quickest tokens for the same devices, else the most tokens."""
    if layout.needed is not None:
        return False, layout.needed.step_s, layout.tp, layout.ep
    is_late = layout.largest.step_s > demand.between_tokens_s
    return True, is_late, layout.largest.step_s if is_late else -layout.tokens_per_s, layout.tp, layout.ep


def is_spread(model: ModelConfig, ep: int) -> bool:
    """Whether so many replicas can share out a model's experts."""
    return model.experts > 0 and why_not_ep(model, ep) is None


def _layout(
    model: ModelConfig, cluster: Cluster, demand: ServeDemand, dtype: str, rates: Rates | None, headroom: float,
    tp: int, ep: int, step_tokens: int,
) -> ServeLayout | str:  # fmt: skip
    size, device = DTYPE_BYTES[dtype], cluster.device
    weights, each = weight_bytes(model, size, tp, ep), key_value_bytes(model, size, tp)
    room = device.usable_bytes * (1 - headroom) - constants.RESERVED_BYTES[device.kind] - weights
    room -= step_tokens * (2 * model.mlp_width + 8 * model.width) * size  # a chunk's activations
    pages = int(room // (each * PAGE_TOKENS)) if room > 0 else 0
    fits = min(MOST_BATCH, pages // -(-(demand.prompt + demand.output) // PAGE_TOKENS))
    if fits < 1:
        lacking = format_bytes(weights + each * (demand.prompt + demand.output))
        has = format_bytes(device.usable_bytes)
        return (
            f"tp {tp}{f', ep {ep}' * (ep > 1)}: weights and one request take {lacking} on each device, which has {has}"
        )
    clock = StepClock(model, cluster, dtype, tp, rates, ep)
    replicas = cluster.world // tp
    share = demand.rate / replicas
    batches = _batches(min(fits, step_tokens))  # a step has a token of each, or the scheduler refuses the batch
    states = [steady_state(clock, demand, batch, step_tokens) for batch in batches]
    kept = [state for state in states if state.step_s <= demand.between_tokens_s]
    needed = next((state for state in kept if LOAD * state.requests_per_s >= share), None)
    return ServeLayout(tp, ep, replicas, weights, each, pages, fits, (kept or states[:1])[-1], needed, clock)


def _batches(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and the most."""
    return sorted({size for power in range(13) for size in (1 << power, 3 << power) if size < most} | {most})


def steady_state(clock: StepClock, demand: ServeDemand, batch: int, step_tokens: int = 512) -> SteadyState:
    """So many requests inside, with as many of their tokens in a step as it has room for.

    For each request that ends another's prompt has been computed, so of d that decode a step has d x prompt / output
    tokens of prompts, in chunks, each of which takes one of the requests' places. The step's budget holds both.
    """
    per_decoding = demand.prompt / demand.output
    decoding = min(batch / (1 + per_decoding / min(step_tokens, demand.prompt)), step_tokens / (1 + per_decoding))
    arriving = decoding * per_decoding
    tokens = [SequencePart(1, demand.prompt + demand.output // 2, 1)] * max(1, round(decoding))
    size = min(demand.prompt, max(1, step_tokens - len(tokens)))
    chunk = SequencePart(size, max(size, demand.prompt // 2), 1)
    # Chunks come whole: on average a step has this many, so some steps have one more than the others.
    whole, share = divmod(arriving / size, 1)
    fewer, more = (clock([*tokens, *[chunk] * (int(whole) + extra)]) for extra in (0, 1))
    step_s = fewer + (more - fewer) * share
    least = clock.limit(tokens) + clock.limit([SequencePart(size, demand.prompt, 1)]) * arriving / size
    return SteadyState(
        batch=batch,
        step_s=step_s,
        tokens_per_s=decoding / step_s,
        requests_per_s=decoding / step_s / demand.output,
        first_token_s=-(-demand.prompt // size) * clock([*tokens, chunk]),
        limit_s=min(least, step_s),
    )


# ---- in words --------------------------------------------------------------------------------------------------


def serving_reasons(layouts: Sequence[ServeLayout], refused: Sequence[str], demand: ServeDemand) -> list[str]:
    """Why the first of these."""
    best = layouts[0]
    lines = []
    capacity = best.most_requests_per_s
    if best.largest.step_s > demand.between_tokens_s:
        lines.append(
            f"No layout serves a token every {demand.between_tokens_s * 1e3:g} ms: this one takes "
            f"{best.largest.step_s * 1e3:.3g} ms with one request alone"
        )
    elif best.needed is None:
        lines.append(
            f"No layout serves {demand.rate:g} requests/s: this one comes to {capacity:.2f}/s at a batch of "
            f"{best.largest.batch} per replica; it needs {demand.rate / (LOAD * capacity):.1f} times the devices"
        )
    else:
        lines.append(
            f"A batch of {best.needed.batch} per replica serves {demand.rate:g} requests/s at {LOAD:.0%} load; "
            f"{best.largest.batch} would serve {capacity:.2f}/s"
        )
    step = best.clock.seconds([SequencePart(1, demand.prompt + demand.output // 2, 1)] * best.running)
    shares = {"weights and other operations": step.dense, "attention over the keys": step.attention}
    shares |= {"exchanges between ranks": step.exchange, "launches": step.launches, "the host": step.host}
    name, part = max(shares.items(), key=lambda item: item[1])
    lines.append(
        f"A decode step of {best.running} takes {step.total * 1e3:.2f} ms, {part / step.total:.0%} of it for {name}"
    )
    for other in layouts[1:]:
        now, then = (best.needed or best.largest), (other.needed or other.largest)
        slower = "serves less" if other.needed is None and best.needed is not None else "is slower per token"
        lines.append(
            f"{other.words} {slower}: {then.step_s * 1e3:.2f} ms per token beside {now.step_s * 1e3:.2f} ms, and "
            f"{other.most_requests_per_s:.2f} requests/s at most beside {capacity:.2f}"
        )
    return [*lines, *refused]


def cost_per_million(price_per_hour: float, devices: int, tokens_per_s: float) -> float:
    """Of a million output tokens, where a device costs so much an hour."""
    return price_per_hour * devices / 3600 / tokens_per_s * 1e6


def joules_per_token(watts: float, devices: int, tokens_per_s: float) -> float:
    return watts * devices / tokens_per_s
