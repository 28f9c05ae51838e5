"""Many recipes on one model: rows beside the plain model and other libraries, and what the page draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilemesh.bench.compress.measure import PLAIN, Judged, clocks_of, histogram, judge, layer_errors, rows_of
from tilemesh.bench.compress.peers import peer_model, why_not
from tilemesh.bench.compress.predict import Expected
from tilemesh.compress.calibrate import mean_loss
from tilemesh.compress.quantize import Moved
from tilemesh.compress.recipe import read_recipe
from tilemesh.compress.shrink import shrink
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.toml import toml_value
from tilemesh.core.units import format_change
from tilemesh.measure.row import CaseValue, Row, write_rows
from tilemesh.model.kinds import projections
from tilemesh.model.transformer import Transformer
from tilemesh.runs import folder as folders
from tilemesh.runs.journal import Journal
from tilemesh.runs.kind import COMPRESS
from tilemesh.runs.metrics import STARTED
from tilemesh.runs.names import ROWS

DEFAULT = (
    "int8", "int4-g64", "int4-g64-clip", "int4-g64-awq", "int4-g64-gptq", "int3-g64", "int3-g64-gptq", "int3-g64-mixed",
    "nf4-g64", "fp8", "fixed16", "int8-a8", "mlp-25", "2:4", "rank-50",
)  # fmt: skip


@dataclass
class CompressFindings:
    """Rows, and points for the page."""

    rows: list[Row] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Recipes without rows, and why."""


def bench_recipes(
    model: Transformer,
    recipes: Sequence[str],
    text: tuple[Tensor, Tensor, Tensor],
    case: Mapping[str, CaseValue],
    peers: Sequence[str],
    seconds: float,
    say: Callable[[str], None],
    dtype: torch.dtype = torch.float32,
    keep: Callable[[Sequence[Row]], None] = lambda rows: None,
    findings: CompressFindings | None = None,
) -> CompressFindings:
    """Every recipe is predicted, made, judged on the same held-out text, and timed in turns with the plain model.

    Where the model lies, all is computed; `dtype` is what is timed. `keep` is given the rows so far after each recipe.
    One that fails is said, and the others go on. `findings`: what to fill in, for whoever still wants it when this is
    ended early.
    """
    place = next(model.parameters()).device
    text = (text[0].to(place), text[1].to(place), text[2].to(place))
    train, tokens, targets = text
    findings = CompressFindings() if findings is None else findings
    clocks = clocks_of(model, tokens, dtype)
    for name in recipes:
        try:
            moved: dict[str, Moved] = {}
            small = shrink(model, read_recipe(name), train, say, moved)
            guess = clocks.expected(small)
            judged = judge({PLAIN: model, "small": small}, tokens, targets, seconds, dtype)
            losses, why = _peer_losses(peers, model, name, text)
            rows = rows_of(name, case, guess, judged["small"], judged[PLAIN], losses, why)
            point = point_of(name, guess, judged, losses, model, small, moved)
        except (UsageError, RuntimeError) as error:  # a kernel that does not fit, or memory that ran out
            findings.failed[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
            say(f"{name} failed and has no rows: {findings.failed[name]}")
            continue
        findings.rows += rows
        findings.points.append(point)
        keep(findings.rows)
        say(f"{name}: loss {judged['small'].loss:.4f} ({format_change(judged['small'].loss - judged[PLAIN].loss)})")
    return findings


def _peer_losses(
    peers: Sequence[str], model: Transformer, name: str, text: tuple[Tensor, Tensor, Tensor]
) -> tuple[dict[str, float], dict[str, str]]:
    losses: dict[str, float] = {}
    why: dict[str, str] = {}
    for peer in peers:
        reason = why_not(peer, read_recipe(name))
        if not reason:
            try:
                losses[peer] = mean_loss(peer_model(peer, model, read_recipe(name), text[0][:, :-1]), *text[1:])
                continue
            except RunError as error:
                reason = str(error)
        why[peer] = reason
    return losses, why


def point_of(
    name: str,
    guess: Expected,
    judged: Mapping[str, Judged],
    losses: Mapping[str, float],
    before: Transformer,
    after: Transformer,
    moved: Mapping[str, Moved] | None = None,
) -> dict[str, Any]:
    """What the page draws of one recipe; histograms are of the first layer's first matrix of the MLP."""
    small, plain = judged["small"], judged[PLAIN]
    shown = next(matrix for matrix, _ in projections(before) if matrix.endswith("fc_in"))
    has_shape = shown in dict(projections(after))
    return {
        "recipe": name, "loss": small.loss, "plain_loss": plain.loss, "bytes": small.nbytes, "plain_bytes":
        plain.nbytes, "decode_s": small.decode.median, "plain_decode_s": plain.decode.median, "predicted_decode_s":
        guess.decode.after(plain.decode.median), "forward_s": small.forward.median, "plain_forward_s":
        plain.forward.median, "predicted_forward_s": guess.forward.after(plain.forward.median), "peers": dict(losses),
        "errors": layer_errors(before, after, moved), "matrix": shown, "before": histogram(before, shown), "after":
        histogram(after, shown) if has_shape else None,
    }  # fmt: skip


def begin_compress_run(path: str | None, settings: Mapping[str, Any]) -> Path:
    """A run's folder with nothing measured yet; refused where there is a run already."""
    lines = [f"{name} = {toml_value(value)}" for name, value in settings.items() if value is not None]
    run = folders.new_run(COMPRESS, "\n".join(["[compress]", *lines, ""]), path, name="compress")
    folders.write_environment(run)
    Journal(run).add(STARTED, 0)
    return run


def keep_compress_run(run: Path, settings: Mapping[str, Any], findings: CompressFindings) -> None:
    """What there is so far, which `tilemesh report` makes a page of; a run that ends early leaves that."""
    write_rows(findings.rows, run / ROWS)
    done = len(findings.points) + len(findings.failed)
    summary = {"model": settings["model"], "points": findings.points, "interrupted": done < len(settings["recipes"])}
    Journal(run).summarize(COMPRESS, summary)
