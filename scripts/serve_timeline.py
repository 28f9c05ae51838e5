"""Draws docs/serve/timeline.svg: three requests through the real scheduler, with step times predicted for an H200.

python scripts/serve_timeline.py docs/serve/timeline.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from tilemesh.core.hardware import parse_cluster
from tilemesh.model.config import preset
from tilemesh.plan.serving_clock import StepClock
from tilemesh.serve.history import ServeHistory
from tilemesh.serve.scheduler import ServeLimits
from tilemesh.serve.simulate import fresh_requests, predicted, simulate

LEFT, WIDTH, ROW, TOP = 90, 860, 54, 40
PROMPT, DECODE, WAIT = "#c2571a", "#2b62c4", "#b9bec7"
MS = 1_000_000


def history() -> ServeHistory:
    """A comes first; B while A decodes; C's long prompt is cut into chunks, so A and B go on."""
    clock = StepClock(preset("llama-3-8b"), parse_cluster("1xh200"))
    requests = fresh_requests([0, 40 * MS, 70 * MS], [400, 300, 1400], [24, 20, 8])
    return simulate(ServeLimits(pages=1000, context=8192), requests, predicted(clock))


def draw(found: ServeHistory) -> str:
    end = max(step.ended_ns for step in found.steps)

    def across(ns: int) -> float:
        return LEFT + WIDTH * ns / end

    names = list(found.requests)
    height = TOP + ROW * (len(names) + 1) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" '
        'font-family="system-ui, sans-serif" font-size="13" role="img" '
        'aria-label="Three requests over time: waiting, prompt in chunks, decoding">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row, name in enumerate(names):
        record, y = found.requests[name], TOP + row * ROW
        parts.append(f'<text x="8" y="{y + 22}">request {"ABC"[row]}</text>')
        first = next(step for step in found.steps if any(part.name == name for part in step.parts))
        parts.append(_box(across(record.asked_ns), across(first.began_ns), y, WAIT, "waits for the step to end"))
        for step in found.steps:
            for part in step.parts:
                if part.name == name:
                    prompt = part.count > 1 or not part.samples
                    words = (
                        f"step {step.number}: {part.count} tokens of the prompt"
                        if prompt
                        else f"step {step.number}: a token"
                    )
                    x0, x1 = across(step.began_ns), across(step.ended_ns)
                    parts.append(_box(x0, x1, y, PROMPT if prompt else DECODE, words))
        x = across(record.token_ns[0])
        parts.append(f'<path d="M{x:.1f} {y - 6} v44" stroke="black"/>')
        ms = (record.first_token_s or 0) * 1e3
        parts.append(f'<text x="{x + 3:.1f}" y="{y - 4}" font-size="11">first token {ms:.0f} ms</text>')
    y = TOP + ROW * len(names)
    parts.append(f'<text x="8" y="{y + 22}">steps</text>')
    for step in found.steps:
        x0, x1 = across(step.began_ns), across(step.ended_ns)
        words = f"step {step.number}: {step.prefill_tokens} prompt and {step.decode_tokens} decode tokens"
        parts.append(_box(x0, x1, y, "white", words, "#555"))
    for ms in range(0, int(end / MS) + 1, 50):
        parts.append(f'<text x="{across(ms * MS):.1f}" y="{y + 62}" text-anchor="middle" font-size="11">{ms} ms</text>')
    for number, (colour, words) in enumerate(
        ((PROMPT, "tokens of the prompt"), (DECODE, "one token"), (WAIT, "waits"))
    ):
        x = LEFT + number * 190
        parts.append(
            f'<rect x="{x}" y="8" width="14" height="14" fill="{colour}"/><text x="{x + 20}" y="20">{words}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(x0: float, x1: float, y: float, colour: str, words: str, stroke: str = "white") -> str:
    width = max(0.5, x1 - x0)
    return (
        f'<rect x="{x0:.1f}" y="{y + 4}" width="{width:.1f}" height="26" fill="{colour}" stroke="{stroke}" '
        f'stroke-width="0.6"><title>{words}</title></rect>'
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(history()))
