"""Fresh weights: a parameter's values follow from the seed and its own name alone."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from tilemesh.core.errors import UsageError
from tilemesh.model.adapter import A, B
from tilemesh.model.config import ModelConfig

INIT_STD = 0.02  # Radford et al. 2019, and the published Llama configurations


@torch.no_grad()
def initialize(model: nn.Module, seed: int, prefix: str = "", layers: int | None = None) -> None:
    """Write fresh weights: N(0, 0.02), what ends on the residual stream by 1/sqrt(2 x layers) less, biases 0, norms 1.

    Each parameter is drawn in float32 on the CPU from the seed and its own name, so that its values depend neither on
    device and dtype nor on which other parameters exist. A part of a model is told its `prefix` and the depth.
    """
    config = getattr(model, "config", None)
    depth = config.layers if isinstance(config, ModelConfig) else layers
    if depth is None:
        raise UsageError("initialize of a part of a model: give layers=, the depth its outputs are scaled by")
    wanted = {f"{prefix}{name}": parameter for name, parameter in model.named_parameters()}
    for name, drawn in drawn_ahead({name: parameter.shape for name, parameter in wanted.items()}, seed, depth):
        wanted[name].copy_(drawn)


def drawn_ahead(shapes: Mapping[str, tuple[int, ...]], seed: int, layers: int) -> Iterator[tuple[str, Tensor]]:
    """What `draw` gives for each of these names, in their order, by as many threads as torch has: a generator draws its
    numbers one after the other, and billions of them take minutes. Never more than two per thread are held.

    Their memory is this thread's: on arm64 torch's allocator (mimalloc) keeps what another thread had taken and this
    one gives back, so a process held every weight twice.
    """
    threads = torch.get_num_threads()
    waiting: deque[tuple[str, Future[Tensor]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for name, shape in shapes.items():
            if len(waiting) >= 2 * threads:
                first, drawn = waiting.popleft()
                yield first, drawn.result()
            empty = torch.empty(shape, dtype=torch.float32, device="cpu")
            waiting.append((name, pool.submit(draw, name, shape, seed, layers, empty)))
        for first, drawn in waiting:
            yield first, drawn.result()


def draw(name: str, shape: tuple[int, ...], seed: int, layers: int, out: Tensor | None = None) -> Tensor:
    """Fresh weights of the parameter with this full name, as `initialize` writes them: float32 on the CPU. `out`: where
    they are written; a GPU's generator draws others there."""
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device="cpu")
    module, _, piece = name.rpartition(".")
    kind = module.rpartition(".")[2]
    if piece == B:  # adapters change nothing yet
        return out.zero_()
    if kind.endswith(("norm", "sinks", "shift")) or name.endswith("bias"):
        return out.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    std = INIT_STD / (2 * layers) ** 0.5 if kind in ("fc_o", "fc_out") else INIT_STD
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator(out.device).manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
    if piece != A:
        return out.normal_(0, std, generator=generator)
    # As nn.Linear's weights spread: the standard deviation of U(-1/sqrt(in), 1/sqrt(in)).
    drawn = out.normal_(0, INIT_STD, generator=generator)
    return drawn.div_(drawn.std() * math.sqrt(3 * shape[1]))


GROUPED = (("fc_q", "fc_k", "fc_v"), ("fc_gate", "fc_in"))
"""Projections of the same activations, by their names in a block."""


def give_memory(model: nn.Module, device: torch.device | str, *, together: bool = False) -> None:
    """As `to_empty`, which makes torch import sympy: half a second, on every rank.

    `together`: what projections of the same activations hold under one name are rows of one storage, where these are
    alike. For models that are read to compute forward, by one product for each group (`model/programs/group.py`).
    """
    groups = _groups(model) if together else []
    grouped = {id(holder) for group in groups for holder in group}
    for holders in (*groups, *([holder] for holder in model.modules() if id(holder) not in grouped)):
        for name in [name for name, held in holders[0]._parameters.items() if held is not None]:
            parts = [holder.get_parameter(name) for holder in holders]
            for holder, part, empty in zip(holders, parts, _empty_like(parts, device), strict=True):
                holder.register_parameter(name, nn.Parameter(empty, requires_grad=part.requires_grad))


def grouped_parameters(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Those that lie in one storage where a model's memory is given `together`."""
    for holders in _groups(model):
        names = [name for name, held in holders[0]._parameters.items() if held is not None]
        yield from ([holder.get_parameter(name) for holder in holders] for name in names)


def _empty_like(parts: list[nn.Parameter], device: torch.device | str) -> Sequence[Tensor]:
    """Memory for these, several of them under one another."""
    first = parts[0]
    if len(parts) == 1:
        return [torch.empty(first.shape, dtype=first.dtype, device=device)]
    rows = [len(part) for part in parts]
    return torch.split(torch.empty((sum(rows), *first.shape[1:]), dtype=first.dtype, device=device), rows)


def _groups(model: nn.Module) -> list[list[nn.Module]]:
    """Projections whose parameters can lie under one another: those of a group that have alike ones."""
    found = []
    for block in model.modules():
        children = dict(block.named_children())
        for names in GROUPED:
            holders = [children[name] for name in names if name in children]
            pieces = [list(holder.named_parameters(recurse=False)) for holder in holders]
            alike = {tuple((name, part.dtype, part.shape[1:]) for name, part in each) for each in pieces}
            has_rows = all(part.dim() > 0 for each in pieces for _, part in each)
            if len(holders) == len(names) and len(alike) == 1 and has_rows:
                found.append(holders)
    return found
