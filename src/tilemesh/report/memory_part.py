"""The part of a run's page about memory: what was predicted and what each rank held at most, by the same kinds.

A run measures what it can tell apart (`memory_bytes` in its summary); the planner tells more apart. What a run cannot
(logits and cast weights go through autograd's hands like any activation) is joined before the two are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilemesh.core.units import format_bytes
from tilemesh.report.bars import Bar, BarPart, bars
from tilemesh.report.draw import PageTable, figure
from tilemesh.report.html import Child, Html, el
from tilemesh.report.rows import error_cell
from tilemesh.report.run import Run
from tilemesh.report.run_parts import absent
from tilemesh.runs.values import number, numbers, section

KINDS = {"weights": 0, "gradients": 1, "optimizer": 2, "activations": 3, "other": 6}
COLOURS = {**KINDS, "logits": 5, "working": 4, "reserved": 6}
JOINED = {"logits": "activations", "reserved": "other", "working": "other"}
"""Kinds of the planner's that are measured as part of another. Under autocast its working memory is cast weights, which
autograd keeps."""
_UNTOLD = ("measured, not told apart", 7)

BytesByKind = dict[str, float]


def memory(run: Run, expected: Mapping[str, float]) -> Html:
    """The prediction, then a bar a rank; beneath, kind by kind, how far off the prediction was."""
    peaks, bases = numbers(run.summary, "peak_memory_bytes"), numbers(run.summary, "memory_baseline_bytes")
    if not peaks:
        return absent("memory", "the run has no summary with peak_memory_bytes")
    bases += [0.0] * (len(peaks) - len(bases))
    by_rank = [_held(run, rank, peak - base) for rank, (peak, base) in enumerate(zip(peaks, bases, strict=False))]
    guess = joined(expected, by_rank[0], run.plan.get("precision"))
    kinds = [*KINDS] if any(by_rank) else []
    items = [Bar("predicted", _parts(guess), format_bytes(sum(guess.values())))] if guess else []
    for rank, (peak, base, kept) in enumerate(zip(peaks, bases, by_rank, strict=False)):
        grown = max(0.0, peak - base)
        parts = _parts(kept) or [BarPart(grown, _UNTOLD[1], f"{_UNTOLD[0]}: {format_bytes(grown)}")]
        items.append(Bar(f"rank {rank}", parts, format_bytes(grown)))
    shown = [kind for kind in (kinds or guess) if kind in guess or any(kind in kept for kept in by_rank)]
    legend = [(kind, COLOURS.get(kind, 7)) for kind in shown] + ([] if any(by_rank) else [_UNTOLD])
    words = "What a rank took at most"
    words += (
        f", without the {format_bytes(max(bases))} its process took before there was a model." if any(bases) else "."
    )
    words += "" if guess else " There is no prediction by kind for this run."
    return figure(
        "Memory per rank", words, bars(items, kinds=legend), _table(run, guess, by_rank, peaks, bases), wide=True
    )


def _held(run: Run, rank: int, grown: float) -> BytesByKind:
    """What the run says this rank held, by kind; empty where it does not say."""
    by_kind: BytesByKind = {}
    for kind, sizes in section(run.summary, "memory_bytes").items():
        size = number(sizes[rank] if isinstance(sizes, list) and rank < len(sizes) else sizes, 0.0)
        known = kind if kind in KINDS else "other"
        if 0 < size < 1e100:
            by_kind[known] = by_kind.get(known, 0.0) + size
    if by_kind and "other" not in by_kind and grown > sum(by_kind.values()):
        by_kind["other"] = grown - sum(by_kind.values())
    return by_kind


def joined(expected: Mapping[str, float], measured: Mapping[str, float], precision: object) -> BytesByKind:
    """The prediction in the kinds that were measured; as it is where nothing was."""
    sizes = dict(expected)
    later = sizes.pop("later", 0.0)
    if not measured:
        return _less(sizes, later, ("gradients",))
    sums: BytesByKind = {}
    for kind, size in sizes.items():
        known = "activations" if kind == "working" and precision in ("bf16", "fp16") else JOINED.get(kind, kind)
        known = known if known in measured else "other"  # compiled code does not tell its activations
        sums[known] = sums.get(known, 0.0) + size
    # A run counts its gradients whole: those not there yet at the fullest moment are missing from the rest of it.
    sums = _less(sums, later, ("other", "activations", "gradients"))
    return {kind: sums[kind] for kind in KINDS if kind in sums}


def _less(sizes: BytesByKind, nbytes: float, kinds: Sequence[str]) -> BytesByKind:
    """So many bytes taken off these kinds, the first of them first."""
    left = dict(sizes)
    for kind in kinds:
        taken = min(nbytes, left.get(kind, 0.0))
        if taken:
            left[kind], nbytes = left[kind] - taken, nbytes - taken
    return left


def _parts(sizes: Mapping[str, float]) -> list[BarPart]:
    return [
        BarPart(size, COLOURS.get(kind, 7), f"{kind}: {format_bytes(size)}", f"{kind} {format_bytes(size)}")
        for kind, size in sizes.items()
    ]


def _table(
    run: Run, guess: BytesByKind, by_rank: Sequence[BytesByKind], peaks: Sequence[float], bases: Sequence[float]
) -> PageTable:
    if not any(by_rank):
        rows: list[list[Child]] = [[f"predicted {kind}", format_bytes(size)] for kind, size in guess.items()]
        rows += [[f"rank {rank}, peak", format_bytes(peak)] for rank, peak in enumerate(peaks)]
        rows += [[f"rank {rank}, before the model", format_bytes(base)] for rank, base in enumerate(bases) if base]
        return PageTable(["what", "bytes"], rows)
    kinds = [kind for kind in KINDS if kind in guess or any(kind in kept for kept in by_rank)]
    most = {kind: max(kept.get(kind, 0.0) for kept in by_rank) for kind in kinds}
    most_grown = max(peak - base for peak, base in zip(peaks, bases, strict=False))
    rows = []
    if guess:
        rows.append(["predicted", *(_bytes(guess.get(kind)) for kind in kinds), format_bytes(sum(guess.values())), ""])
        rows.append(
            [
                "error, of the largest",
                *(_error(guess.get(kind), most[kind]) for kind in kinds),
                _error(sum(guess.values()), most_grown),
                "",
            ]
        )
    for rank, (kept, peak, base) in enumerate(zip(by_rank, peaks, bases, strict=False)):
        cells = [*(_bytes(kept.get(kind)) for kind in kinds), format_bytes(peak - base), format_bytes(base)]
        rows.append([f"rank {rank}", *cells])
    how = str(run.summary.get("memory_how") or "")
    note = f"How it was measured: {how}." if how else ""
    if guess:
        note += " The planner's logits are under activations; its reserved and working memory are under other."
    return PageTable(["rank", *kinds, "in all", "before the model"], rows, note=note)


def _bytes(size: float | None) -> str:
    return "–" if size is None else format_bytes(size)


def _error(guess: float | None, measured: float) -> Child:
    return el("td", "–") if guess is None or measured <= 0 else error_cell(guess / measured - 1)
