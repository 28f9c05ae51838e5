"""What could be saved of a step: one ranking of its parts, from which the terminal, the summary and the page all speak.

A saving is the part of a step that would go if its cause did, an upper bound; the advice names what was measured and
what acts on it, never what a change would bring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from tilemesh.core.units import format_bytes, format_seconds

TYPED: ContextVar[Sequence[str]] = ContextVar("typed words", default=())
"""The words after `tilemesh` of the command that runs here."""
LEAST = 0.005
"""Of a step: below this there is nothing to speak of."""
_WORTH_IT = 0.1  # of a step: where the limit is not known, waiting beyond this is named before compute


def step_shares(step_s: float, exchange_s: float, data_s: float, idle_s: float) -> dict[str, float]:
    """The parts of a step of `step_s` seconds, as fractions that add up to 1; what is in none of the others is
    compute."""
    if step_s <= 0:
        return {"compute": 1.0, "exchange": 0.0, "data": 0.0, "idle": 0.0}
    parts = {"exchange": exchange_s, "data": data_s, "idle": idle_s}
    fractions = {kind: max(0.0, seconds) / step_s for kind, seconds in parts.items()}
    total = sum(fractions.values())
    if total > 1:
        fractions = {kind: fraction / total for kind, fraction in fractions.items()}
    return {"compute": max(0.0, 1 - sum(fractions.values())), **fractions}


def savings(shares: Mapping[str, float], of_limit: float | None) -> dict[str, float]:
    """Fractions of a step by kind, largest first. `of_limit`: the step the machine allows over the step it took."""
    possible = {kind: shares.get(kind, 0.0) for kind in ("exchange", "idle", "data")}
    if of_limit is not None and "compute" in shares:
        possible["compute"] = shares["compute"] - of_limit
    kept = {kind: value for kind, value in possible.items() if value >= LEAST}
    return dict(sorted(kept.items(), key=lambda item: -item[1]))


def improvement(
    shares: Mapping[str, float],
    exchanges: Mapping[str, float],
    step_bytes: Mapping[str, Mapping[str, float]],
    *,
    ranks: int,
    cores: int,
    of_limit: float | None = None,
) -> str:
    """What acts on the largest saving. `exchanges`: seconds by "axis operation"; `step_bytes`: a step's, by axis."""
    possible = savings(shares, of_limit)
    largest = next(iter(possible), "compute")
    if of_limit is None and possible.get(largest, 0.0) < _WORTH_IT:
        largest = "compute"
    elif not possible:
        return "nothing measured leaves more than half a percent of a step to save"
    crowd = f"{ranks} ranks share {cores} cores, so" if ranks > cores else ""
    share = f"{shares[largest]:.0%}".replace("%", " %")
    if largest == "exchange":
        also = f" ({crowd} every exchange is also work)" if crowd else ""
        return f"exchanges take {share} of a step{_most(exchanges, step_bytes)}{also}"
    if largest == "data":
        return f"waiting for data takes {share} of a step: prepare shards once with `tilemesh data prepare`"
    if largest == "idle":
        also = f" ({crowd} each waits its turn)" if crowd else ""
        return f"waiting for the slowest rank takes {share} of a step: the ranks are not equally fast{also}"
    least = "" if of_limit is None else f", and at the calibrated peak would take {of_limit:.0%}".replace("%", " %")
    also = f" ({crowd} each computes in its turn)" if crowd else ""
    return f"compute takes {share} of a step{least}: larger matrices, a lower precision or a fused kernel{also}"


def _most(exchanges: Mapping[str, float], step_bytes: Mapping[str, Mapping[str, float]]) -> str:
    """Which exchange takes most, and what makes it less."""
    if not exchanges:
        return ""
    axis, _, operation = max(exchanges, key=lambda name: exchanges[name]).partition(" ")
    nbytes = step_bytes.get(axis, {}).get(operation, 0)
    size = f", {format_bytes(nbytes)} per step and rank" if nbytes else ""
    advice = {
        "tp": "fewer ranks along tp (more along dp) send less",
        "dp": "more accumulation exchanges less often",
        "server": "more servers (method.servers) share the bytes, more accumulation exchanges less often",
    }.get(axis, "a larger batch a step meets less often")
    return f", most of it {operation} over {axis}{size}: {advice}"


@dataclass(frozen=True)
class NextCommand:
    """What to try after a command or a run, without the program's name, and what that is predicted to bring: empty
    where no cost model says."""

    words: str
    gain: str = ""

    @classmethod
    def faster(cls, words: str, now_s: float, then_s: float, what: str = "step") -> NextCommand:
        """With the times that are predicted now and then."""
        gain = f"{format_seconds(then_s)} per {what} instead of {format_seconds(now_s)}"
        return cls(words, f"{gain}, {now_s / then_s:.2f} times as fast")
