"""Where a layout first differs from one process: a step of both, looked at layer by layer.

Each rank holds its own activations against its own slice of the whole process's, so that ranks which disagree with one
another are seen as well. Forward is searched in its order, and when all of it agrees, backward in its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilemesh.core.plan import ParallelPlan
from tilemesh.core.sequence import zigzag
from tilemesh.core.shard import share
from tilemesh.model.config import ModelConfig
from tilemesh.model.loss import IGNORED
from tilemesh.model.transformer import ResidualStream, Transformer, added
from tilemesh.parallel.gate import alone
from tilemesh.parallel.gate.cases import NORM_BOUND, TOKENS, Case, microbatches
from tilemesh.parallel.gate.cause import gradient_cause, norm_cause, order_cause, order_words
from tilemesh.parallel.gradients import read
from tilemesh.parallel.laid import Laid, StepPiece
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.pipeline import Pipeline

# Looser than the gate's bounds, because these are single tensors: what a bug does is far above, rounding far below.
AGREES = "one step agrees in every layer and parameter: what differs comes with the update, or in later steps"
_INPUT = "the input of "
_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.1, "bf16-master": 0.1}


def find(case: Case, config: ModelConfig, mesh: Mesh, laid: Laid, device: str) -> str:
    """The first layer and parameter that differ, in words, and on rank 0 what the difference looks like (a collective
    call). `config`: what our model was made from."""
    tolerance = _TOLERANCE[case.precision]
    whole = alone.whole_model(config, case.precision, case.weights, device)
    seen, _ = _record(laid.module, lambda: _step(case, mesh, laid, device))
    if case.by_papers:
        wanted, wanted_loss = _papers_step(case, whole, device)
    else:
        wanted, wanted_loss = _record(whole, lambda: _whole_step(whole, device, case.packed))
    off = []
    for site, whole_batch in wanted.items():  # all sites of the model: a stage of a pipeline has seen some of them
        slices = _slices(case, mesh, laid, site, whole_batch)
        off.append(max((_off(a, b) for a, b in zip(seen.get(site, ()), slices, strict=False)), default=0.0))
    forward = _first(mesh, list(wanted), off, tolerance)
    if forward is not None:
        slices = _slices(case, mesh, laid, forward, wanted[forward])
        code = float(order_cause(seen.get(forward, ()), list(slices), tolerance))
        forward += order_words(int(mesh.comm.all_reduce(np.array([code]), "max")[0]))
    done = laid.gradients.finish(divide=case.precision != "bf16-master")
    [(loss, norm)] = read([done])
    gradients = laid.gather_gradients()
    if gradients is not None and done.divisor is not None:
        gradients = {name: value.double() / float(done.divisor) for name, value in gradients.items()}
    wanted_gradients = dict(_gradients_of(whole))
    names = list(wanted_gradients)
    off = [0.0] * len(names)
    if gradients is not None:
        whole_norm = alone_norm(whole)
        off = [float((gradients[n].double() - g.double()).norm()) / whole_norm for n, g in wanted_gradients.items()]
    if forward is not None:
        parameter = _first(mesh, names, off, tolerance)
        return f"forward differs first at {forward}; first parameter whose gradient differs: {parameter}"
    if abs(loss - wanted_loss) > tolerance * abs(wanted_loss):
        parameter = _first(mesh, names[::-1], off[::-1], tolerance)
        return f"every layer's output agrees and the loss differs: loss; first parameter in backward: {parameter}"
    parameter = _first(mesh, names[::-1], off[::-1], tolerance)
    if parameter is None:
        wanted_norm = alone_norm(whole)
        if abs(norm - wanted_norm) > tolerance * wanted_norm:
            cause = norm_cause(norm, wanted_gradients, tolerance, case.scale)
            return f"every gradient agrees and their norm differs, {norm:.6g} for {wanted_norm:.6g}: {cause}"
        own = norm if gradients is None else alone.whole_norm(gradients)
        if abs(norm - own) > NORM_BOUND * own:
            return f"every gradient agrees and the norm is not theirs, {norm:.8g} for {own:.8g}"
        return AGREES
    layer, cause = parameter.rpartition(".")[0], ""
    if gradients is not None and not case.by_papers:
        right = wanted_gradients[parameter]
        cause = gradient_cause(
            case.layout, whole, parameter, gradients[parameter].cpu(), right, tolerance, case.scale, case.packed
        )
    return f"forward agrees; backward differs first at layer {layer}, parameter {parameter}{cause}"


def step_pieces(layout: ParallelPlan, replica: int, tokens_BT: Tensor, targets_BT: Tensor) -> list[StepPiece]:
    """A replica's microbatches of a step."""
    turns = microbatches(layout, replica)
    return [StepPiece(tokens_BT[row : row + rows], targets_BT[row : row + rows], row) for row, rows in turns]


def _whole_step(model: Transformer, device: str, packed: bool) -> float:
    tokens_BT, targets_BT = (x.to(device) for x in alone.batch(model.config, 0, packed))
    run = partial(model, tokens_BT, dropout_seed=alone.dropout_seed(0), marked=packed)
    total, count = alone.step_loss(model, targets_BT, run)
    mean = total / count
    mean.backward()  # type: ignore[no-untyped-call]
    return mean.item()


def _papers_step(case: Case, holder: Transformer, device: str) -> tuple[dict[str, list[Tensor]], float]:
    """A step as the papers have it; its gradients are left with the parameters of `holder`, which computes nothing."""
    tokens_BT, targets_BT = (x.to(device) for x in alone.batch(case.config, 0))
    total, sites = alone.papers_loss(case.config, dict(holder.named_parameters()), tokens_BT, targets_BT)
    mean = total / (targets_BT != IGNORED).sum()
    mean.backward()  # type: ignore[no-untyped-call]
    return {site: [value.detach()] for site, value in sites.items()}, mean.item()


def _step(case: Case, mesh: Mesh, laid: Laid, device: str) -> float:
    tokens_BT, targets_BT = (x.to(device) for x in alone.batch(case.config, 0, case.packed))
    pieces = step_pieces(case.layout, mesh.dp.index, tokens_BT, targets_BT)
    laid.passes(pieces, dropout_seed=alone.dropout_seed(0), scale=case.scale)
    return 0.0


def _record(model: nn.Module, step: Callable[[], float]) -> tuple[dict[str, list[Tensor]], float]:
    """What goes through each layer during a step, in forward's order; a list, for one entry a microbatch."""
    seen: dict[str, list[Tensor]] = {}
    hooks = []
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in ("q_norm", "k_norm"):  # of this rank's heads
            continue
        if kind.endswith("norm"):
            hooks.append(module.register_forward_pre_hook(_keep_input(seen, f"{_INPUT}{name}"), prepend=True))
        is_block = kind in ("token_embedding", "attention", "mlp")
        if kind.endswith("norm") or is_block or (kind.isdigit() and ".experts." not in name):
            hooks.append(module.register_forward_hook(_keep_output(seen, name)))
    try:
        return seen, step()
    finally:
        for hook in hooks:
            hook.remove()


def _is_again() -> bool:
    """Whether this pass is part of a backward pass: one that was made before and is computed again."""
    return torch._C._current_graph_task_id() != -1


def _keep_input(seen: dict[str, list[Tensor]], site: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if _is_again():
            return
        seen.setdefault(site, []).append(added(ResidualStream(*args)).detach())

    return hook


def _keep_output(seen: dict[str, list[Tensor]], site: str) -> Any:
    def hook(module: nn.Module, args: object, output: Tensor | ResidualStream | tuple[Tensor, Tensor]) -> None:
        if _is_again():
            return
        if isinstance(output, ResidualStream):
            output = added(output)
        elif isinstance(output, tuple):  # of a norm: the result, then what was normalised
            output = output[0]
        seen.setdefault(site, []).append(output.detach())

    return hook


def _slices(case: Case, mesh: Mesh, laid: Laid, site: str, wanted: list[Tensor]) -> Iterator[Tensor]:
    """Of the whole batch's activations, what this rank should have seen: its rows, with sequence shards its tokens.

    In a pipeline of two directions a rank sees every second microbatch of a chunk.
    """
    tokens = [at for run in zigzag(TOKENS, mesh.cp.size, mesh.cp.index) for at in range(run.begin, run.end)]
    if laid.plan.sequence_parallel:
        first, count = share(len(tokens), mesh.tp.size, mesh.tp.index)
        tokens = tokens[first : first + count]
    for turn, (row, rows) in enumerate(microbatches(case.layout, mesh.dp.index)):
        if not isinstance(laid, Pipeline) or laid.takes(site.removeprefix(_INPUT), turn):
            yield wanted[0][row : row + rows, tokens]


def _off(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    size = float(b.double().norm())
    return float((a.double() - b.double()).norm()) / size if size else float((a != b).any())


def _first(mesh: Mesh, names: list[str], off: list[float], tolerance: float) -> str | None:
    """The first name whose difference is above the tolerance on any rank; NaN is above everything."""
    mine = np.array([value if value == value else np.inf for value in off], np.float64)
    worst = mesh.comm.all_reduce(mine, "max")
    return next((f"{name}" for name, value in zip(names, worst, strict=True) if value > tolerance), None)


def _gradients_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # codes and scales of compressed matrices are not trained
            assert parameter.grad is not None
            yield name, parameter.grad.cpu()


def alone_norm(model: nn.Module) -> float:
    return alone.whole_norm(dict(_gradients_of(model)))
