"""The part of a run's page about its routers: which experts training picked, layer by layer, and how sure they were."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tilemesh.core.scene import Scene
from tilemesh.report.draw import PageTable, figure
from tilemesh.report.html import Child, el, join, pair
from tilemesh.report.run import Run
from tilemesh.report.run_parts import StepFigure, step_figure
from tilemesh.runs.values import number, numbers, section

MOST_LAYERS = 24
"""That are drawn: of more, evenly chosen ones."""
MOST_EXPERTS = 4096
_LEFT, _TOP, _WIDE, _LANE, _BAR = 76, 36, 640, 34, 26
BUSIEST = StepFigure(
    "busiest_expert", "Busiest expert", "The most that an expert of any layer was picked, over the mean of its layer.",
    "times the mean", "{:.3g}".format, 1, dots=True,
)  # fmt: skip


class LayerLoad(NamedTuple):
    """Of one layer with experts: picks of each, over the mean; the entropy of its router, over the highest; the part of
    its picks that was dropped."""

    number: int
    """Of the layer in the model, where it says which of its layers are dense."""
    load: Sequence[float]
    entropy: float
    dropped: float = 0.0

    @property
    def idle(self) -> int:
        return sum(value == 0 for value in self.load)


def routing(run: Run) -> Child:
    """None for a run whose steps say nothing of experts."""
    routed_steps = [step for step in run.steps if isinstance(step.get("expert_load"), list) and step["expert_load"]]
    layers = loads_of(routed_steps[-1], run.summary.get("model")) if routed_steps else []
    if not layers:
        return None
    step, forced = int(routed_steps[-1]["step"]), run.summary.get("force_balance") is True
    drops = any(layer.dropped for layer in layers)
    words = (
        f"Picks of each expert in training up to step {step:,}, since routers were last looked at, by layer; dashed: "
        f"an even load. {'Picks beyond model.expert_capacity were dropped.' if drops else 'No token was dropped.'}"
    )
    if len(layers) > MOST_LAYERS:
        words += f" {MOST_LAYERS} of {len(layers)} layers are drawn."
    if forced:
        words += " Tokens went to experts in turn (train.force_balance): this is not what routers would choose."
    rows: list[list[Child]] = [
        [
            str(layer.number), f"{max(layer.load):.3g}", f"{min(layer.load):.3g}", str(layer.idle),
            f"{100 * layer.dropped:.3g} %", f"{layer.entropy:.3g}",
        ]
        for layer in layers
    ]  # fmt: skip
    head = [
        "layer with experts", "busiest, times the mean", "least", "idle experts", "dropped", "entropy, of the highest"
    ]  # fmt: skip
    source = base64.b64encode(drawing(layers).encode()).decode()
    shown = el("img", src=f"data:image/svg+xml;base64,{source}", alt=f"Load of experts by layer at step {step}")
    return join(
        figure("Load of experts", words, shown, PageTable(head, rows), wide=True), pair(step_figure(run, BUSIEST))
    )


def loads_of(step: Mapping[str, Any], model: Any = None) -> list[LayerLoad]:
    """What a step's line says; nothing where it cannot be meant. `model`: its configuration, of a run's summary."""
    entropies, drops, layers = numbers(step, "router_entropy"), numbers(step, "dropped_picks"), []
    dense = numbers(section({"model": model}, "model"), "dense_layers")
    places = [place for place in range(len(step["expert_load"]) + len(dense)) if place not in dense]
    for place, values in enumerate(step["expert_load"]):
        load = [number(value) for value in values] if isinstance(values, list) else []
        if not load or len(load) > MOST_EXPERTS or not all(0 <= value < math.inf for value in load):
            return []
        entropy = entropies[place] if place < len(entropies) else math.nan
        dropped = drops[place] if place < len(drops) and 0 <= drops[place] <= 1 else 0.0
        layers.append(LayerLoad(places[place], load, entropy, dropped))
    return layers


def drawing(layers: Sequence[LayerLoad]) -> str:
    """A lane for each layer, a bar for each expert."""
    every = -(-len(layers) // MOST_LAYERS)
    chosen = layers[::every]
    top = max(1.5, *(max(layer.load) for layer in chosen))
    scene = Scene(_LEFT + _WIDE + 224, _TOP + len(chosen) * _LANE + 8, "Load of experts by layer")
    for lane, layer in enumerate(chosen):
        floor, wide = _TOP + lane * _LANE + _BAR, _WIDE / len(layer.load)
        scene.text(_LEFT - 8, floor - 8, f"layer {layer.number}", align="end")
        for expert, value in enumerate(layer.load):
            high, tip = _BAR * value / top, f"layer {layer.number}, expert {expert}: {value:.3g} times the mean"
            at = round(_LEFT + expert * wide, 2), round(floor - high, 2)
            scene.box(*at, round(0.86 * wide, 2), round(high, 2), colour=1 if value > 2 else 0, tip=tip)
        even = floor - _BAR / top
        scene.line(_LEFT, even, _LEFT + _WIDE, even, dashed=True)
        idle = f", {layer.idle} idle" if layer.idle else ""
        dropped = f", {100 * layer.dropped:.2g} % dropped" if layer.dropped else ""
        words = f"{max(layer.load):.2f} × the mean{idle}{dropped}, entropy {layer.entropy:.2f}"
        scene.text(_LEFT + _WIDE + 8, floor - 8, words, size=11, quiet=True)
    return scene.svg()
