"""A planned layout under load: one replica's scheduler, simulated with the times that the planner predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilemesh.plan.serving import PAGE_TOKENS, ServeDemand, ServeLayout
from tilemesh.serve.figures import LoadFigures, ServeGoal, load_figures
from tilemesh.serve.history import RequestRecord
from tilemesh.serve.scheduler import ServeLimits
from tilemesh.serve.simulate import fresh_requests, poisson_arrivals, simulate_with

LOADS = (0.25, 0.5, 0.8, 1.0)
"""Of what the chosen layout serves at most."""
_FEWEST = 250
"""Requests that a load is judged by, at least: as many as are inside at once, where these are more."""
_UNCOUNTED_SHARE = 0.3
"""Of these, those that come before and are not counted: near its limit an engine takes long to have its usual queue."""


@dataclass(frozen=True)
class SimulatedLoad:
    """One replica under a share of the rate."""

    rate: float
    """Of all replicas together."""
    share: float
    """Of what they can serve."""
    figures: LoadFigures
    little: float
    """Rate x time inside: what the requests inside must come to in a steady state."""


def load_shares(best: ServeLayout, rate: float) -> list[float]:
    """Loads to simulate: some shares of what the layout serves, and the rate asked for where it serves that."""
    wanted = rate / best.most_requests_per_s
    return sorted({*LOADS, *([float(f"{wanted:.4g}")] if wanted < 1.2 else [])})


def simulate_share(
    best: ServeLayout, demand: ServeDemand, step_tokens: int, share: float, goal: ServeGoal
) -> SimulatedLoad:
    state = best.largest
    rate = share * state.requests_per_s  # of one replica
    # Those inside at once when the engine has filled; until then, and when no more come, tokens are too quick.
    inside = min(state.batch, math.ceil(rate * (state.first_token_s + demand.output * state.step_s)))
    measured, after = max(_FEWEST, inside), inside // 2
    before = max(3 * inside // 2, round(_UNCOUNTED_SHARE * measured))
    count = before + measured + after
    # No more pages than such a batch can use: of a small model on a large device there are millions.
    used = state.batch * (-(-(demand.prompt + demand.output) // PAGE_TOKENS) + 1)
    limits = ServeLimits(
        pages=min(best.pages, used),
        context=best.clock.model.context,
        page_tokens=PAGE_TOKENS,
        step_tokens=step_tokens,
        chunk_tokens=step_tokens,
        running=state.batch,
        waiting=1 << 20,
        share_prefixes=False,
    )
    drawn = poisson_arrivals(rate, count)
    # Hundreds of drawn gaps are 5 % longer or shorter than the rate says: those that count are made to fit it.
    exactly = measured / rate * 1e9 / (drawn[before + measured - 1] - drawn[before - 1])
    arrivals = [round(at_ns * exactly) for at_ns in drawn]
    requests = fresh_requests(arrivals, [demand.prompt] * count, [demand.output] * count)
    history = simulate_with(best.clock, limits, requests)
    everyone = list(history.requests.values())
    records = everyone[before : before + measured]
    whole = sum(record.whole_s or 0.0 for record in records) / len(records)
    figures = _between(load_figures(records, goal), everyone, records[0].asked_ns, records[-1].asked_ns)
    return SimulatedLoad(rate * best.replicas, share, figures, rate * whole)


def _between(figures: LoadFigures, everyone: Sequence[RequestRecord], begin_ns: int, end_ns: int) -> LoadFigures:
    """With rates, and with the requests inside, of all that went on between two moments."""
    seconds = (end_ns - begin_ns) * 1e-9
    spans = ((max(begin_ns, record.asked_ns), min(end_ns, record.token_ns[-1])) for record in everyone)
    tokens = sum(begin_ns < at_ns <= end_ns for record in everyone for at_ns in record.token_ns)
    ended = sum(begin_ns < record.token_ns[-1] <= end_ns for record in everyone)
    return replace(
        figures,
        seconds=seconds,
        output_tokens=tokens,
        tokens_per_s=tokens / seconds,
        requests_per_s=ended / seconds,
        inside=sum(max(0, end - begin) for begin, end in spans) * 1e-9 / seconds,
    )
