"""Filters of a convolutional network pruned: fewer weights in whole filters, so that every layer becomes a smaller one.

    python examples/filter_pruning.py

A small network learns 8 × 8 digits. The filters of both convolutions with the least sum of magnitudes are taken out,
with the channels of the next layer that read them: the result is an ordinary network of smaller arrays. Beside it as
many single weights are set to 0, which leaves the arrays and the operations as they are. Then both learn a little more.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tilemesh.data.digits import load_digits

DIGITS = load_digits()
IMAGES, LABELS = torch.tensor(DIGITS.images).float()[:, None], torch.tensor(DIGITS.labels)
HELD_OUT = torch.tensor(DIGITS.is_held_out)
PLACES = 4  # numbers of a channel behind the last pooling


def network(first: int = 16, second: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(PLACES * second, 10),
    )  # fmt: skip


def learn(model: nn.Module, steps: int, masks: dict[str, Tensor] | None = None) -> float:
    """The share of held-out digits that it reads after so many steps. `masks`: weights that stay 0."""
    draw, optimizer = torch.Generator().manual_seed(0), torch.optim.AdamW(model.parameters(), lr=5e-3)
    own = (~HELD_OUT).nonzero().squeeze(1)
    for _ in range(steps):
        rows = own[torch.randint(len(own), (128,), generator=draw)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(IMAGES[rows]), LABELS[rows]).backward()
        optimizer.step()
        with torch.no_grad():
            for name, mask in (masks or {}).items():
                model.get_parameter(name).mul_(mask)
    with torch.no_grad():
        return float((model(IMAGES[HELD_OUT]).argmax(1) == LABELS[HELD_OUT]).float().mean())


def pruned(model: nn.Sequential, keep: float) -> nn.Sequential:
    """The network without its weakest filters, and without the channels that read them."""
    kept = []
    for place in (0, 3):
        strength = model[place].weight.abs().sum((1, 2, 3))
        kept.append(strength.topk(round(keep * len(strength))).indices.sort().values)
    smaller = network(len(kept[0]), len(kept[1]))
    with torch.no_grad():
        for place, outs, ins in ((0, kept[0], None), (3, kept[1], kept[0])):
            weight = model[place].weight[outs]
            smaller[place].weight.copy_(weight if ins is None else weight[:, ins])
            smaller[place].bias.copy_(model[place].bias[outs])
        smaller[7].weight.copy_(model[7].weight.view(10, -1, PLACES)[:, kept[1]].flatten(1))
        smaller[7].bias.copy_(model[7].bias)
    return smaller


def operations(model: nn.Sequential) -> int:
    """Multiplications and additions for one picture: each weight of a convolution at each of its places."""
    places = {0: 64, 3: 16, 7: 1}
    return sum(2 * many * model[place].weight.numel() for place, many in places.items())


def main(keep: float = 0.5) -> dict[str, tuple[float, int, int]]:
    """Of each network: the share that it reads, the numbers it holds, the operations for a picture."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = network()
    found = {"whole": (learn(model, 150), model)}
    smaller = pruned(model, keep)
    found["filters taken out"] = (learn(smaller, 0), smaller)
    again = copy.deepcopy(smaller)
    found["and trained again"] = (learn(again, 60), again)
    share = sum(p.numel() for p in smaller.parameters()) / sum(p.numel() for p in model.parameters())
    sparse, masks = copy.deepcopy(model), {}
    for name, parameter in sparse.named_parameters():
        if parameter.dim() > 1:
            least = parameter.detach().abs().flatten().kthvalue(max(1, round((1 - share) * parameter.numel()))).values
            masks[name] = (parameter.detach().abs() > least).float()
    found["single weights, again"] = (learn(sparse, 60, masks), sparse)
    rows = {}
    for name, (right, each) in found.items():
        rows[name] = right, sum(p.numel() for p in each.parameters()), operations(each)
        print(f"{name:>22}: {right:6.1%} read, {rows[name][1]:>6,} numbers, {rows[name][2]:>8,} operations per picture")
    return rows


if __name__ == "__main__":
    main()
