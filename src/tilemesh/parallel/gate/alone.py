"""The gate's oracle: one process training the whole model in plain torch, and the same once more in another order.

Nothing in here knows of meshes, shards or communicators. The second order is what a fair bound is made of where
arithmetic rounds: every product that a layout cuts into `parts` is summed from as many parts, the batch is taken in
`pieces`, both backwards. What that changes is rounding and nothing else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.comm.schedules.collectives import cut
from tilemesh.core.plan import Precision
from tilemesh.kernels.lowbit.codes import quantize
from tilemesh.kernels.lowbit.formats import parse_scheme
from tilemesh.model.config import ModelConfig
from tilemesh.model.dropout import DropoutPlace, fold_seed
from tilemesh.model.eight_bits import EightBits
from tilemesh.model.experts import EXCESS_SIZE, Router
from tilemesh.model.kinds import Adapted, Masked, Rounded, few_bits, projections, put
from tilemesh.model.linear import ACTIVATIONS, Linear, as_kind
from tilemesh.model.loss import IGNORED, loss_sum
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.gate import papers
from tilemesh.parallel.gate.cases import MAX_NORM, ROWS, STEPS, TOKENS
from tilemesh.parallel.gate.rules import PaperRule

SEED = 11
_DOCUMENTS = 0.3  # of tokens that begin one, where several are packed into a sequence


@dataclass(frozen=True)
class GateTrace:
    """What training came to: each step's loss and mean gradient before clipping, and the weights at the end."""

    losses: list[float]
    norms: list[float]
    """As they were reported."""
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def weights_dtype(precision: Precision) -> torch.dtype:
    return {"fp64": torch.float64, "bf16-master": torch.bfloat16}.get(precision, torch.float32)


def start(config: ModelConfig, precision: Precision) -> dict[str, Tensor]:
    """Weights to begin with. Nothing is left at 0 or 1: a bias added twice must show."""
    state = Transformer(config, seed=SEED, dtype=weights_dtype(precision)).state_dict()
    for name, value in state.items():
        digest = hashlib.sha256(name.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))
        value += 0.1 * torch.empty(value.shape, dtype=torch.float32).normal_(generator=generator)
        if name.endswith("router.weight"):
            busy = len(value) // 2  # of the experts, which take most tokens
            value[:busy] *= 8
            # Of two pairs one each is above 0 for every token, so where there are two the last expert is never picked.
            # Not by as much as the other is below: sigmoids of s and -s add up to 1, and all such groups would tie.
            value[1:busy:2] = -2 * value[0 : busy // 2 * 2 : 2]
            value[-1] *= 1e-3
        if name.endswith(("router.bias", "router.shift.weight")):
            value[-1] = -2  # nor here
    return state


def batch(config: ModelConfig, step: int, packed: bool = False) -> tuple[Tensor, Tensor]:
    """A step's tokens and targets; some targets count for nothing, more of them in some rows than in others. `packed`:
    some tokens begin a document, marked as `Transformer.prepare` has it."""
    generator = torch.Generator().manual_seed(step + 1)
    shape = (ROWS, TOKENS)
    tokens_BT = torch.randint(0, config.vocabulary, shape, generator=generator)
    targets_BT = torch.randint(0, config.vocabulary, shape, generator=generator)
    ignored_BT = torch.rand(shape, generator=generator) * ROWS < torch.arange(ROWS)[:, None]
    begins_BT = torch.rand(shape, generator=generator) < (_DOCUMENTS if packed else 0)
    return torch.where(begins_BT, -1 - tokens_BT, tokens_BT), targets_BT.masked_fill(ignored_BT, IGNORED)


def dropout_seed(step: int) -> int:
    return fold_seed(SEED, step)


def whole_model(config: ModelConfig, precision: Precision, weights: str, device: str) -> Transformer:
    """In one process, with its matrices compressed where the case says so."""
    model = Transformer(config, device=device, dtype=weights_dtype(precision))
    model.load_state_dict(start(config, precision))
    if weights:
        compress_all(model, weights)
    return model


def compress_all(model: nn.Module, words: str) -> None:
    """Give every projection of the layers a kind by its words, in place: a scheme's name rounds to nearest, "rounded"
    and a scheme in every pass, "masked" takes two of every four weights for 0; "adapters" before any of them, or alone,
    adds adapters."""
    below, dtype = words.removeprefix("adapters").strip(), next(model.parameters()).dtype
    for name, layer in list(projections(model)):
        if name == "output":
            continue
        if below == "masked":
            layer = as_kind(layer, Masked(block=(2, 4), sparsity=0.5))
        elif below.startswith("by fp8 "):
            layer = as_kind(layer, EightBits(by=below.removeprefix("by fp8 ")))  # type: ignore[arg-type]
        elif below.startswith("rounded "):
            layer = as_kind(layer, Rounded(scheme=parse_scheme(below.removeprefix("rounded "))))
        elif below:
            scheme = parse_scheme(below)
            layer = few_bits(layer, scheme, quantize(layer.weight, scheme))
        if below != words:
            layer = _adapted(name, layer, dtype)
        put(model, name, layer)


def _adapted(name: str, layer: Linear, dtype: torch.dtype) -> Linear:
    layer.requires_grad_(False)
    kind, sizes = Adapted(layer.kind, 2, 1.5), (layer.out_features, layer.in_features)
    values = {}
    for piece in kind.pieces(*sizes)[-2:]:
        drawn = torch.linspace(-0.2, 0.3, torch.Size(piece.shape).numel(), dtype=torch.float64).sin().view(piece.shape)
        values[piece.name] = (drawn * (1 + len(name) % 3) / 8).to(next(layer.parameters()).device, dtype)
    return as_kind(layer, kind, **values)


def train(
    config: ModelConfig,
    precision: Precision,
    weights: str = "",
    optimizer: str = "",
    by_papers: bool = False,
    packed: bool = False,
    *,
    parts: int = 1,
    pieces: int = 1,
    device: str = "cpu",
) -> GateTrace:
    """Train the whole model; with `parts` or `pieces` above 1, in another order of summation.

    `optimizer`: by the rule of this name; `by_papers`: passes are those of `papers.py`, and only the weights are ours.
    """
    model = whole_model(config, precision, weights, device)
    if parts > 1:
        _cut_products(model, parts)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    wide = torch.promote_types(weights_dtype(precision), torch.float32)
    masters = {name: parameter.detach().to(wide) for name, parameter in trained.items()}  # in full: the same memory
    rule = PaperRule(optimizer)
    losses, norms, gradients = [], [], []
    for step in range(STEPS):
        if by_papers:
            total, count = _by_papers(config, trained, step, device)
        else:
            total, count = _accumulate(model, precision, step, pieces, device, packed)
        means = {name: p.grad.to(wide) / count for name, p in trained.items() if p.grad is not None}
        losses.append(total / count)
        norms.append(whole_norm(means))
        clip = min(1.0, MAX_NORM / (norms[-1] + 1e-6))
        rule.step(masters, {name: mean * clip for name, mean in means.items()})
        gradients.append(means)
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(masters[name])
        model.zero_grad()
    return GateTrace(losses, norms, gradients, {name: p.detach().clone() for name, p in trained.items()})


def whole_norm(values: Mapping[str, Tensor]) -> float:
    """Of all values together, in float64."""
    return math.sqrt(sum(float(value.double().square().sum()) for value in values.values()))


def _by_papers(config: ModelConfig, weights: Mapping[str, Tensor], step: int, device: str) -> tuple[float, int]:
    tokens_BT, targets_BT = (x.to(device) for x in batch(config, step))
    count = int((targets_BT != IGNORED).sum())
    total, sites = papers_loss(config, weights, tokens_BT, targets_BT)
    total.backward()  # type: ignore[no-untyped-call]
    for name in (name for name in sites if f"{name}.bias" in weights and "router" in name):
        bias_X = weights[f"{name}.bias"]
        bias_X.grad = EXCESS_SIZE * papers.excess(config, sites[name].detach(), bias_X.detach(), targets_BT != IGNORED)
    return total.item(), count


def papers_loss(
    config: ModelConfig, weights: Mapping[str, Tensor], tokens_BT: Tensor, targets_BT: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Summed over the targets that count, and what was computed on the way."""
    sites: dict[str, Tensor] = {}
    mean = papers.mean_loss(papers.logits(config, weights, tokens_BT, sites), targets_BT, IGNORED)
    routed = [
        papers.router_loss(config, sites[name], targets_BT, IGNORED, weights.get(f"{name}.bias"))
        for name in sites
        if "router" in name
    ]
    return mean * (targets_BT != IGNORED).sum() + sum(routed), sites


def step_loss(model: Transformer, targets_BT: Tensor, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """The summed loss of the logits that `run` gives, with those of the routers that it passes, and how many count."""
    entered: list[tuple[Tensor, Router]] = []
    routers, counted_BT = [module for module in model.modules() if isinstance(module, Router)], targets_BT != IGNORED
    hooks = [
        hook
        for router in routers
        for hook in (
            router.register_forward_pre_hook(lambda module, args: (*args[:3], counted_BT.flatten())),
            router.register_forward_hook(lambda module, args, routing: entered.append((args[0], module))),
        )
    ]
    total, count = loss_sum(run(), targets_BT)
    for hook in hooks:
        hook.remove()
    for x_ND, router in entered:
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        scores_NX = x_ND.to(wide) @ router.weight.to(wide).T
        scores_NX = scores_NX if router.shift is None else scores_NX + router.shift.weight.to(wide)
        scores_BTX = scores_NX.view(*targets_BT.shape, -1)
        total = total + papers.router_loss(model.config, scores_BTX, targets_BT, IGNORED, router.bias)
    return total, count


def _accumulate(
    model: Transformer, precision: Precision, step: int, pieces: int, device: str, packed: bool
) -> tuple[float, int]:
    tokens_BT, targets_BT = (x.to(device) for x in batch(model.config, step, packed))
    total, count, row = 0.0, 0, ROWS
    for rows in reversed(cut(ROWS, pieces)):
        row -= rows
        here = slice(row, row + rows)
        options = {"dropout_seed": dropout_seed(step), "place": DropoutPlace(row=row), "marked": packed}
        run = torch.autocast(device, torch.bfloat16, enabled=precision == "bf16")(model)
        loss, counted = step_loss(model, targets_BT[here], partial(run, tokens_BT[here], **options))
        loss.backward()  # type: ignore[no-untyped-call]
        total, count = total + loss.item(), count + int(counted)
    return total, count


def _cut_products(model: Transformer, parts: int) -> None:
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if isinstance(module, Linear):
            forward = _by_input if kind in ("fc_o", "fc_out") else _by_output
            module.forward = partial(forward, module, parts)  # type: ignore[method-assign]


def _by_input(module: Linear, parts: int, x: Tensor) -> Tensor:
    """The product summed from partial ones over the input's features, the last ones first."""
    pieces = zip(x.tensor_split(parts, -1), module.weight.tensor_split(parts, 1), strict=True)
    products = [functional.linear(features, weight) for features, weight in pieces]
    y = products[-1]
    for product in reversed(products[:-1]):
        y = y + product
    return y if module.bias is None else y + module.bias.to(y.dtype)


def _by_output(module: Linear, parts: int, x: Tensor) -> Tensor:
    """Output features in parts: the same values, and gradients of x that are summed from as many."""
    biases = [None] * parts if module.bias is None else module.bias.tensor_split(parts)
    slices = []
    for weight, bias in zip(module.weight.tensor_split(parts), biases, strict=True):
        slices.append(functional.linear(x, weight, bias))
    return ACTIVATIONS[module.activation](torch.cat(slices, -1))
