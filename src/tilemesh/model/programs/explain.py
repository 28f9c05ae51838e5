"""Which programs were chosen, in words: what `--explain` prints."""

from __future__ import annotations

from collections import Counter

from tilemesh.core.units import format_seconds
from tilemesh.model.programs.prepare import Prepared, predicted_for
from tilemesh.model.programs.program import JUDGED_ROWS, RowClass

_ROWS: dict[RowClass, str] = {"1": "1 token", "2-64": "2 to 64 tokens", "more": "more tokens"}


def explain(programs: Prepared) -> list[str]:
    """Lines: for each class of rows what computes how many layers and in what time, then what does not, and why."""
    lines = [f"programs of {len(programs.layers)} layers, predicted for {predicted_for(programs.device)}"]
    for rows, choices in programs.choices.items():
        word = "a microbatch" if programs.use.trains else _ROWS[rows]
        counted: Counter[tuple[str, float]] = Counter()
        for choice in choices:
            names = dict.fromkeys(program.name for program in choice.programs)
            counted[" + ".join(names), choice.seconds] += 1
        for (names_text, seconds), count in counted.items():
            predicted = f"{format_seconds(seconds)} each for {JUDGED_ROWS[rows]} forward"
            lines.append(f"  {word}: {names_text}: {count} {'layer' if count == 1 else 'layers'}, {predicted}")
        why: dict[str, Counter[str]] = {}
        for choice in choices:
            for name, reason in choice.refused.items():
                why.setdefault(name, Counter())[reason] += 1
        for name, reasons in why.items():
            words = "; ".join(
                reason if count == len(choices) else f"{reason} ({count} of {len(choices)} layers)"
                for reason, count in reasons.items()
            )
            lines.append(f"    not {name}: {words}")
    if programs.use.trains:
        config = programs.model.config
        if config.score_cap or config.score_sink:
            cause = "scores are soft-capped" if config.score_cap else "heads have sinks"
            lines.append(f"  not kernels of attention: {cause}, by torch's operators one by one")
        for name, reason in programs.ends.items():
            lines.append(f"  {f'not {name}: {reason}' if reason else name}")
    return lines
