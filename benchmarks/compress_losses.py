"""Held-out losses of recipes on a trained run, beside other libraries, and nothing timed: for choices of calibration
text that run side by side on one GPU.

    PYTHONPATH=src python benchmarks/compress_losses.py RUN --recipes A,B,... [--seed N] [--peers torchao]
        [--device cuda] [--sequences 512] [--calibrate 64] [--name NAME] --json FILE

Rows are written after each recipe, so that a part that is cut off keeps what it has.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from tilemesh.bench.compress.peers import PEERS, peer_model, why_not
from tilemesh.bench.compress.text import open_source
from tilemesh.compress.calibrate import mean_loss
from tilemesh.compress.recipe import read_recipe
from tilemesh.compress.shrink import shrink
from tilemesh.core.errors import RunError, UsageError
from tilemesh.measure.machine import stamp
from tilemesh.measure.row import CaseValue, Row, write_rows
from tilemesh.measure.sample import Sample


def _once(value: float) -> Sample:
    return Sample(value, value, value, 1)


def _say(text: str) -> None:
    print(text, flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--recipes", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--calibrate", type=int, default=64)
    parser.add_argument("--name", help="of the model, in the rows; by default its folder's")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    peers = [name for name in asked.peers.split(",") if name in PEERS]
    with open_source(asked.run, None, None, _say) as source:
        model = source.model.to(asked.device)
        drawn = source.text(asked.calibrate, asked.sequences, asked.seed)
        train, tokens, targets = (part.to(asked.device) for part in drawn)
        plain = mean_loss(model, tokens, targets)
        _say(f"{asked.name or source.name}: plain {plain:.4f}, seed {asked.seed}")
        rows: list[Row] = []
        for name in asked.recipes.split(","):
            began, recipe = time.perf_counter(), read_recipe(name)
            try:
                loss = mean_loss(shrink(model, recipe, train, _say), tokens, targets)
            except (UsageError, RuntimeError) as error:
                _say(f"{name} failed: {error}")
                continue
            losses, missing = {"plain": plain}, {}
            for peer in peers:
                missing[peer] = why_not(peer, recipe)
                if not missing[peer]:
                    try:
                        losses[peer] = mean_loss(peer_model(peer, model, recipe, train[:, :-1]), tokens, targets)
                        del missing[peer]
                    except (RunError, RuntimeError) as error:
                        missing[peer] = str(error)
            case: dict[str, CaseValue] = {
                "model": asked.name or source.name, "sequences": len(tokens), "calibrated": asked.calibrate,
                "seed": asked.seed, "recipe": name, "change": round(loss - plain, 5),
            }  # fmt: skip
            row = Row(
                name="held-out loss", case=case, unit="nats", predicted=None, measured=_once(loss), limit=None,
                peers={peer: _once(value) for peer, value in losses.items()},
                missing={
                    "predicted": "a compressed model's loss is measured",
                    "limit": "the plain model's loss is no bound: a smaller model can be better", **missing,
                }, **stamp(),
            )  # fmt: skip
            rows.append(row)
            write_rows(rows, asked.json)
            others = "".join(f", {peer} {value - plain:+.4f}" for peer, value in losses.items() if peer != "plain")
            why = "".join(f", {peer}: {text}" for peer, text in missing.items())
            took = time.perf_counter() - began
            _say(f"seed {asked.seed} {name}: {loss:.4f} ({loss - plain:+.4f}{others}{why}) in {took:.1f} s")


if __name__ == "__main__":
    main()
