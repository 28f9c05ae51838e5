"""What a load came to: time to first token, time between tokens, throughput, and how many kept what was promised.

Computed from requests' records alone, so that an engine, the simulator and a client of some other server give figures
that mean the same. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from tilemesh.core.errors import UsageError
from tilemesh.serve.history import RequestRecord
from tilemesh.serve.request import FinishReason


@dataclass(frozen=True)
class ServeGoal:
    """What a request is promised (a service level objective); infinite: nothing."""

    first_token_s: float = math.inf
    between_tokens_s: float = math.inf
    """On average over a request's tokens."""

    @classmethod
    def parse(cls, text: str | None) -> ServeGoal:
        """From "ttft=1.0,itl=0.1", in seconds."""
        names = {"ttft": "first_token_s", "itl": "between_tokens_s"}
        goals: dict[str, float] = {}
        for piece in text.split(",") if text else ():
            name, _, value = piece.partition("=")
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if name.strip() not in names or not number > 0:
                raise UsageError(f"'{piece.strip()}' is no goal: expected ttft=SECONDS and itl=SECONDS, above 0")
            goals[names[name.strip()]] = number
        return cls(**goals)

    def is_met(self, record: RequestRecord) -> bool:
        first = record.first_token_s
        if first is None or first > self.first_token_s or record.finish is FinishReason.ERROR:
            return False
        gaps = len(record.token_ns) - 1
        return gaps < 1 or (record.token_ns[-1] - record.token_ns[0]) * 1e-9 / gaps <= self.between_tokens_s


@dataclass(frozen=True)
class LoadFigures:
    """Of one load. Times in seconds."""

    requests: int
    output_tokens: int
    seconds: float
    """From the first request to the last token."""
    tokens_per_s: float
    requests_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    whole_p50: float
    inside: float
    """Requests under way, on average over time."""
    goodput: float
    """Share of the requests that got what was promised."""

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def load_figures(records: Iterable[RequestRecord], goal: ServeGoal | None = None) -> LoadFigures:
    """Over all that got a token; requests that were refused or failed count as broken promises."""
    given = list(records)
    answered = [record for record in given if record.token_ns]
    if not answered:
        raise UsageError("no request was answered: there is nothing to compute figures of")
    first, last = min(r.asked_ns for r in answered), max(r.token_ns[-1] for r in answered)
    seconds = max(1e-9, (last - first) * 1e-9)
    tokens = sum(len(record.token_ns) for record in answered)
    ttft = sorted(record.first_token_s or 0.0 for record in answered)
    gaps = sorted(gap for record in answered for gap in record.gaps_s)
    whole = sorted(record.whole_s or 0.0 for record in answered)
    wanted = goal or ServeGoal()
    return LoadFigures(
        requests=len(given),
        output_tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        requests_per_s=len(answered) / seconds,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        itl_p50=quantile(gaps, 0.5),
        itl_p99=quantile(gaps, 0.99),
        whole_p50=quantile(whole, 0.5),
        inside=sum(whole) / seconds,
        goodput=sum(map(wanted.is_met, answered)) / len(given),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in order, between two of them in a line; 0 of none."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
