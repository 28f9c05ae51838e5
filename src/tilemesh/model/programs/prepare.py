"""Which program computes what, chosen once when a job starts.

The one idea: `choose` asks every program for every layer and class of rows, and takes the fastest that applies; `bind`
makes functions of that. Both are separate from running: a forward pass of a model that serves or trains calls what it
was given (`Prepared`), and never asks again. Without `prepare`, `model(tokens)` is the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemesh.core.cost import Cost
from tilemesh.core.hardware import CPU, H100, Device, device_for
from tilemesh.kernels.rates import LAUNCH_S, SUSTAINED_FLOPS, SUSTAINED_MEMORY
from tilemesh.model.invariant import make_invariant
from tilemesh.model.programs import (
    definition,
    ends,
    few_tokens,
    fused_mlp,
    grouped_experts,
    joined,
    one_token,
    products,
    rows_on_cpu,
)
from tilemesh.model.programs.definition import norm_passes
from tilemesh.model.programs.group import LayerGroups, layer_groups
from tilemesh.model.programs.program import (
    ALL_ROWS,
    CUT_OTHERWISE,
    JUDGED_ROWS,
    LayerProgram,
    Part,
    ProgramSeat,
    RowClass,
    Use,
    row_class,
)
from tilemesh.model.transformer import Layer, LayerCall, Pass, ResidualStream, Transformer

PROGRAMS: tuple[LayerProgram, ...] = (
    definition.ATTENTION, definition.MLP, products.ATTENTION, products.MLP, one_token.GATE, one_token.NORMS,
    few_tokens.FEW, rows_on_cpu.IN_C, rows_on_cpu.STEP,
    joined.JOINED, fused_mlp.FUSED_MLP, grouped_experts.GROUPED_EXPERTS, ends.EMBEDDING,
    ends.PROJECTION, ends.LOSS,
)  # fmt: skip
"""All there are. A new one is a file and a place in this list."""


class LayerChoice(NamedTuple):
    """Of one layer and class of rows."""

    programs: tuple[LayerProgram, ...]
    """One for all of the layer, or one for each block."""
    seconds: float
    """As predicted."""
    refused: Mapping[str, str]
    """Others by name, and why they were not taken."""


Choices = Mapping[RowClass, Sequence[LayerChoice]]
"""Of every layer."""


@dataclass(frozen=True)
class Prepared:
    """A model and how it is computed."""

    model: Transformer
    use: Use
    device: torch.device
    embed: Callable[[Tensor, Pass], Tensor]
    layers: tuple[LayerCall, ...]
    """Of passes with many rows, one by one."""
    through: Mapping[RowClass, Callable[[Tensor, Pass], Tensor]]
    """All layers, and the norm after the last."""
    project: Callable[[Tensor], Tensor]
    loss_sum: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None
    """Of what the output projection takes, and targets; None: from logits."""
    groups: tuple[LayerGroups, ...]
    choices: Choices
    ends: Mapping[str, str]
    """Programs before and after the layers, and why not; "" where it is taken."""

    def enter(self, tokens_BT: Tensor, x_BTD: Tensor | None, now: Pass) -> Tensor:
        """As `Transformer.enter`."""
        if x_BTD is None and self.model.part.embedding:
            return self.embed(tokens_BT, now)
        return self.model.enter(tokens_BT, x_BTD, now)

    def last(self, x_BTD: Tensor, now: Pass) -> Tensor:
        """From what enters the first layer to what the output projection takes."""
        return self.through[row_class(x_BTD.shape[0] * x_BTD.shape[1])](x_BTD, now)

    def __call__(self, tokens_BT: Tensor, **options: Any) -> Tensor:
        """Logits, as the model's own `forward` gives."""
        now = self.model.prepare(tokens_BT, **options)
        return self.project(self.last(self.enter(tokens_BT, None, now), now))


def prepare(
    model: Transformer, use: Use, device: torch.device | str = "cpu", programs: Sequence[LayerProgram] = PROGRAMS
) -> Prepared:
    """Choose programs for every layer and class of rows, and bind them."""
    device = torch.device(device)
    if use.invariant:
        make_invariant(model, device, use)
    layers = [layer for layer in model.layers if isinstance(layer, Layer)]
    apart = LayerGroups() if use.trains else LayerGroups(None, None, CUT_OTHERWISE, CUT_OTHERWISE)
    one_row = use.single_rows and not use.invariant
    groups = tuple(apart if use.trains else layer_groups(layer, one_row) for layer in layers)
    seats = [ProgramSeat(model, layer, group, use, device) for layer, group in zip(layers, groups, strict=True)]
    classes: tuple[RowClass, ...] = ("more",) if use.trains else ALL_ROWS
    choices: Choices = {rows: choose(seats, rows, programs, _hardware(device)) for rows in classes}
    calls = tuple(_bind(seat, choice) for seat, choice in zip(seats, choices["more"], strict=True))
    through: dict[RowClass, Callable[[Tensor, Pass], Tensor]] = {"more": partial(_through, model, calls)}
    through |= {rows: _bind_all(model, seats, choices[rows]) for rows in classes if rows != "more"}
    at_ends = ProgramSeat(model, None, LayerGroups(), use, device)
    ends = [program for program in programs if program.part in ("embedding", "projection", "loss")]
    taken = {program.part: program.bind(at_ends) for program in ends if not program.why_not(at_ends)}
    return Prepared(
        model=model,
        use=use,
        device=device,
        embed=taken.get("embedding", model.embed),
        layers=calls,
        through={rows: through.get(rows, through["more"]) for rows in ALL_ROWS},
        project=taken.get("projection", model.project),
        loss_sum=taken.get("loss"),
        groups=groups,
        choices=choices,
        ends={program.name: program.why_not(at_ends) for program in ends},
    )


def choose(
    seats: Sequence[ProgramSeat], rows: RowClass, programs: Sequence[LayerProgram], hardware: Device
) -> Sequence[LayerChoice]:
    """The fastest way to compute each layer: one program for all layers, one for a layer, or one for each block."""
    apart = [_choose_layer(seat, rows, programs, hardware) for seat in seats]
    for program in programs:
        if program.part == "layers" and seats and all(program.name not in choice.refused for choice in apart):
            costs = [program.cost(seat, JUDGED_ROWS[rows]) for seat in seats]
            together = [
                LayerChoice((program,), predict(cost, hardware), choice.refused)
                for cost, choice in zip(costs, apart, strict=True)
            ]
            if sum(choice.seconds for choice in together) < sum(choice.seconds for choice in apart):
                apart = together
    return apart


def _choose_layer(seat: ProgramSeat, rows: RowClass, programs: Sequence[LayerProgram], hardware: Device) -> LayerChoice:
    refused: dict[str, str] = {}
    found: dict[Part, list[tuple[float, LayerProgram]]] = {"attention": [], "mlp": [], "layer": []}
    for program in programs:
        if program.part not in (*found, "layers"):
            continue
        reason = (
            program.why_not(seat) if rows in program.rows else f"it is for passes of {' or '.join(program.rows)} tokens"
        )
        if reason:
            refused[program.name] = reason
        elif program.part != "layers":
            found[program.part].append((predict(program.cost(seat, JUDGED_ROWS[rows]), hardware), program))
    (attention, mlp, *layer) = (min(of_part, key=lambda pair: pair[0]) for of_part in found.values() if of_part)
    norms_s = predict(norm_passes(seat, JUDGED_ROWS[rows]), hardware)
    chosen = LayerChoice((attention[1], mlp[1]), attention[0] + mlp[0] + norms_s, refused)
    if layer and layer[0][0] < chosen.seconds:
        chosen = LayerChoice((layer[0][1],), layer[0][0], refused)
    for seconds, program in (pair for of_part in found.values() for pair in of_part):
        if program not in chosen.programs and program not in (definition.ATTENTION, definition.MLP):
            refused[program.name] = f"predicted {seconds * 1e6:.1f} µs, which others do faster"
    return chosen


def predict(cost: Cost, hardware: Device) -> float:
    """Seconds of passes over memory and products, and of starting each."""
    moved_s = cost.bytes_moved / (SUSTAINED_MEMORY * hardware.memory_bytes_per_s)
    peak = hardware.peak_flops_per_s.get(cost.dtype, hardware.peak_flops_per_s["fp32"])
    started_s = LAUNCH_S if hardware.kind == "gpu" else hardware.launch_s
    return max(moved_s, cost.flops / (SUSTAINED_FLOPS * peak)) + cost.launches * started_s


def _hardware(device: torch.device) -> Device:
    if device.type != "cuda":
        return CPU
    return device_for(torch.cuda.get_device_name(device)) or H100


def predicted_for(device: torch.device) -> str:
    """Whose figures predictions are made of."""
    hardware = _hardware(device)
    return f"{hardware.name} (datasheet)" if hardware.kind == "gpu" else "a plain CPU (two channels of memory)"


def _bind(seat: ProgramSeat, choice: LayerChoice) -> LayerCall:
    if len(choice.programs) == 1:
        call: LayerCall = choice.programs[0].bind(seat)
        return call
    attention, mlp = (program.bind(seat) for program in choice.programs)
    is_defined = choice.programs == (definition.ATTENTION, definition.MLP)
    return seat.here if is_defined else partial(seat.here.compose, attention, mlp)


def _bind_all(
    model: Transformer, seats: Sequence[ProgramSeat], choices: Sequence[LayerChoice]
) -> Callable[[Tensor, Pass], Tensor]:
    program = choices[0].programs[0] if choices else definition.ATTENTION
    if program.part == "layers":
        return program.bind_all(seats)
    calls = tuple(_bind(seat, choice) for seat, choice in zip(seats, choices, strict=True))
    return partial(_through, model, calls)


def _through(model: Transformer, layers: tuple[LayerCall, ...], x_BTD: Tensor, now: Pass) -> Tensor:
    stream = ResidualStream(x_BTD)
    for layer in layers:
        stream = layer(stream, now)
    return model.normalize(stream)
