"""Layers whose matrices are cut over the ranks of tp, with autograd.

The one idea: a cut layer is an ordinary one between two *seams*. Where activations enter a region of column-split
layers every rank has them whole, so the gradient that comes back is the sum of the ranks'; where they leave a
row-split layer every rank has a partial result, so the value is the sum and the gradient passes. With sequence
parallelism what lies outside the regions is cut along the tokens: entering joins the tokens (backward: scatter-sum),
leaving is a scatter-sum (backward: join). Twice the calls, the same bytes, and 1/tp of the memory outside.
Under autocast, what is only joined travels in the dtype that the products are computed in, half the bytes and the same
values; sums of gradients stay as wide as the gradients.

B: rows; T: tokens; N: B x T; D: width; V: this rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.utils._pytree import tree_map

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.comm.schedules.collectives import cut
from tilemesh.core.errors import UsageError
from tilemesh.core.shard import share
from tilemesh.core.tensor_placement import Crossing, P, Pair, R, S, exchange_of
from tilemesh.kernels.cross_entropy.part import part_sums, write_part_gradient
from tilemesh.model.deferral import product_dtype
from tilemesh.model.embedding import Embedding
from tilemesh.model.experts import RoutedOutput
from tilemesh.model.kernels import TORCH
from tilemesh.model.loss import IGNORED, check_targets
from tilemesh.parallel.context import ContextAxis
from tilemesh.parallel.traced import named, traced


def _crossings(sequence: bool) -> Mapping[str, Crossing]:
    stream = (S(1), S(1)) if sequence else (R, R)
    ends: dict[str, tuple[Pair, Pair]] = {
        "enter": (stream, (R, P)),  # a region: all ranks have the same, whole input, and each goes on by itself
        "leave": ((P, R), stream),  # out of a row-split layer: partial results become one
        "join": ((S(-1), S(-1)), (R, R)),  # slices of the last dim, put together
        "add": ((P, R), (R, R)),  # parts of a sum, added up
        "share": ((P, R), (R, P)),  # the same, where each rank goes on with the sum by itself
        "once": ((R, P), (R, R)),  # what all computed alike inside a region, where gradients are parts of a sum
    }
    return {name: Crossing("tp", *pairs) for name, pairs in ends.items()}


CROSSINGS = {sequence: _crossings(sequence) for sequence in (False, True)}
"""What each place between cut and whole layers does: the one table, which is run and which `gate/types.py` reads; by
whether activations outside the regions are cut along the tokens."""


@dataclass(frozen=True)
class Passage:
    """A place where activations cross: what layers and hooks call, and what a checker reads."""

    seams: Seams
    name: str
    """Of a row of `CROSSINGS`."""
    total: int | None = None
    """The length over all ranks of the dim that is cut on the way in; None: tokens of the pass."""
    instead: Crossing | None = None
    """Done instead of that row."""

    @property
    def crossing(self) -> Crossing:
        return self.instead or CROSSINGS[self.seams.sequence][self.name]

    def __call__(self, x: Tensor) -> Tensor:
        return self.seams.through(x, self)


@dataclass
class Seams:
    """How activations pass between cut and whole layers; one for all layers of a laid model."""

    comm: Communicator
    sequence: bool = False
    """Whether activations outside the regions are cut along the tokens (dim 1)."""
    tokens: int = 0
    """Tokens of this pass, over all ranks: what a cut sequence adds up to. Set by whoever starts the pass."""
    sequence_tokens: int = 0
    """The same before ranks of `context` share them."""
    algorithm: str = "auto"
    context: ContextAxis | None = None
    """The ranks that share each sequence before those of tp share its tokens once more."""

    def __post_init__(self) -> None:
        self.name = named(self)

    @property
    def place(self) -> tuple[int, int]:
        return self.comm.rank, self.comm.size

    def through(self, x: Tensor, passage: Passage) -> Tensor:
        """Pass a tensor on as a place says, and its gradient back."""
        crossing = passage.crossing
        (value, back_at_last), (passed, back) = crossing.before, crossing.after
        is_cut = value.kind == "S"
        dim = next((mark.dim for mark in (value, passed, back_at_last) if isinstance(mark.dim, int)), 0)
        total = x.shape[dim] if x.ndim else 0  # sums of losses have no dim to cut
        if is_cut:
            total = self.tokens if passage.total is None else passage.total
        # A region begins with products, which autocast computes in this dtype: rounding before or after is the same.
        narrow = product_dtype(x) if passage.name == "enter" and is_cut else x.dtype
        one_way, other_way = exchange_of(value, passed), exchange_of(back, back_at_last)
        if is_compiling():
            return traced(x, self.name, one_way, other_way, dim, total, narrow)

        def there(x: Tensor) -> Tensor:
            return self.move(x.to(narrow), one_way, dim, total).to(x.dtype)

        return exchanged(x, there, lambda grad: self.move(grad, other_way, dim, total), passage.name)

    def move(self, x: Tensor, exchange: str, dim: int, total: int) -> Tensor:
        """As `exchange_of` names it, along a dim of which all ranks have `total` together; or the largest of all."""
        y: Tensor
        match exchange:
            case "all_reduce":
                y = self.reduced(x, "sum")
            case "reduce_scatter":
                y = self.comm.reduce_scatter(x, axis=dim, algorithm=self.algorithm)
            case "all_gather":
                y = self.comm.all_gather(x, axis=dim, counts=cut(total, self.comm.size), algorithm=self.algorithm)
            case "slice":
                y = x.narrow(dim, *share(total, self.comm.size, self.comm.rank)).contiguous()
            case "divide":
                y = x / self.comm.size
            case "":
                y = x.view_as(x)
            case "max":
                y = self.reduced(x, "max")
            case other:
                raise UsageError(f"{other} of activations: no layer here needs it")
        return y

    def join_features(self, y: Tensor, total: int) -> Tensor:
        """The ranks' slices of the last dim, put together."""
        return Passage(self, "join", total=total)(y)

    def add(self, x: Tensor) -> Tensor:
        """The ranks' parts of a sum, added up: the gradient passes."""
        return x if self.comm.size == 1 else Passage(self, "add")(x)

    def largest(self, x: Tensor) -> Tensor:
        """Of each element, the largest of all ranks; without a gradient."""
        return x.detach() if self.comm.size == 1 else self.sum(x.detach(), "max")

    def own_tokens(self, x_BT: Tensor) -> Tensor:
        """Of something that all ranks have of every token (dim 1), what belongs to the activations here."""
        first, count = share(x_BT.shape[1], self.comm.size, self.comm.rank) if self.sequence else (0, x_BT.shape[1])
        return x_BT[:, first : first + count]

    def add_tokens(self, total: Tensor) -> Tensor:
        """A sum over the tokens that this rank has activations of, as a sum over all tokens."""
        return self.add(total) if self.sequence else total

    def loss(self, function: type[_VocabularyLoss | _PartLoss], *inputs: Any) -> Tensor:
        """Of logits that ranks share, by one of two functions: what they promise to hold, a compiler would not keep."""
        total: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
        return total

    @contextmanager
    def whole_tokens(self) -> Iterator[None]:
        """Inside `with`, activations are cut nowhere: one new token cannot be."""
        before = self.sequence, self.context
        self.sequence, self.context = False, None
        try:
            yield
        finally:
            self.sequence, self.context = before

    def stay_out_of_graphs(self) -> None:
        """Under torch.compile: exchanges of layers are operators of their graphs, a loss's are called as they are."""
        apart: Any = torch.compiler.disable
        self.loss = apart(self.loss)  # type: ignore[method-assign]
        if self.context is not None:
            self.context.stay_out_of_graphs()

    def sum(self, x: Tensor, op: str = "sum") -> Tensor:
        if is_compiling():  # without a gradient
            return traced(x.detach(), self.name, "all_reduce" if op == "sum" else op, "", 0, 0, x.dtype)
        return self.reduced(x, op)

    def reduced(self, x: Tensor, op: str) -> Tensor:
        """Now, never traced: `is_compiling` is also true while another thread of the process compiles."""
        y: Tensor = self.comm.all_reduce(x, op, algorithm=self.algorithm)
        return y


class _TwoWayExchange(torch.autograd.Function):
    """A value exchanged by one function, its gradient by the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor], passage: str
    ) -> Tensor:
        ctx.back, ctx.passage = back, passage
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad), None, None, None


def exchanged(
    x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor], passage: str = ""
) -> Tensor:
    """`there` of a value; `back` is what its gradient goes through. `passage`: what its node is known by."""
    function: Any = _TwoWayExchange  # torch's stubs leave `apply` untyped
    y: Tensor = function.apply(x, there, back, passage)
    return y


# Layers -----------------------------------------------------------------------------------------------------------
# Each is made from the whole module's own, so that options (dtype, activation, epsilon) carry over; weights are cut and
# put in by `apply.py`. A column-split layer stays the module it was, fused activation and all, with fewer rows.


@dataclass(frozen=True)
class EntryHook:
    """Before a module: its first argument enters a region here, so its column-split layers need not see to it."""

    enter: Passage

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args or not isinstance(args[0], Tensor):
            given = f"; its first is a {type(args[0]).__name__}, expected a tensor" if args else ""
            raise UsageError(
                f"{type(module).__name__} begins a region: give its input as the first argument, unnamed{given}"
            )
        return (self.enter(args[0]), *args[1:])


@dataclass(frozen=True)
class ExitHook:
    """After a module: what ranks' modules give is added up; a router's loss goes through `losses`, one by one."""

    leave: Passage | None
    losses: tuple[Passage, ...] = ()

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], output: Tensor | RoutedOutput
    ) -> Tensor | RoutedOutput:
        leave = self.leave or (lambda y: y)
        if isinstance(output, Tensor):
            return leave(output)
        loss = output.loss
        for passage in self.losses:
            loss = passage(loss)
        return RoutedOutput(leave(output.y_BTD), loss)


def enter_at(module: nn.Module, seams: Seams) -> None:
    """The module's first argument enters a region here."""
    module.register_forward_pre_hook(EntryHook(Passage(seams, "enter")))


def enter_others_at(module: nn.Module, seams: Seams) -> None:
    """So does all else it is given that requires gradients, such as what queries attend to, also in tuples, lists and
    dicts."""
    enter = Passage(seams, "enter")

    def entered(x: Any) -> Any:
        return enter(x) if isinstance(x, Tensor) and x.requires_grad else x

    def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return (*args[:1], *tree_map(entered, args[1:])), tree_map(entered, named)

    module.register_forward_pre_hook(hook, with_kwargs=True)


def leave_at(module: nn.Module, seams: Seams) -> None:
    """What the ranks' modules give is added up where they end; the losses of routers all of them have alike."""
    module.register_forward_hook(ExitHook(Passage(seams, "leave"), (Passage(seams, "once"),)))


def join_at(module: nn.Module, seams: Seams, total: int) -> None:
    """The slices of a column-split layer's output are joined where it ends; those of a convolution are channels."""
    dim = -3 if isinstance(module, nn.Conv2d) else -1

    def hook(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        return seams.join_features(y.movedim(dim, -1).contiguous(), total).movedim(-1, dim)

    module.register_forward_hook(hook)


class RowConv2d(nn.Conv2d):
    """Cut by the input channels: each rank convolves its own; partial outputs are summed, then the bias is added."""

    def __init__(self, like: nn.Conv2d, seams: Seams) -> None:
        settings: dict[str, Any] = {
            name: getattr(like, name) for name in ("stride", "padding", "dilation", "padding_mode")
        }
        has_bias, size = like.bias is not None, like.kernel_size
        super().__init__(like.in_channels, like.out_channels, size, bias=has_bias, device="meta", **settings)  # type: ignore[arg-type]
        self.leave = Passage(seams, "leave")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if input.shape[-3] != self.weight.shape[1]:
            raise UsageError(
                f"a row-split convolution of {self.in_channels} channels got {input.shape[-3]}: this rank's part takes "
                f"{self.weight.shape[1]}; it follows layers whose output is split ('column'), not whole"
            )
        y = self.leave(self._conv_forward(input, self.weight, None))
        return y if self.bias is None else y + self.bias.to(y.dtype)[:, None, None]


class VocabularyEmbedding(Embedding):
    """A table cut by its rows: a token's row comes from the one rank that has it, the others add zeros."""

    def __init__(self, like: nn.Embedding, seams: Seams, first: int) -> None:
        """`first`: the first row that is this rank's."""
        super().__init__(like.num_embeddings, like.embedding_dim, like.padding_idx, device="meta")
        self.leave, self.first = Passage(seams, "leave"), first

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if input.device.type == "cpu" and input.numel() and not 0 <= input.min() <= input.max() < self.num_embeddings:
            # Whole, torch would say so; cut, every rank would take such a token for another's.
            raise UsageError(
                f"tokens from {int(input.min())} to {int(input.max())}: the vocabulary is {self.num_embeddings}"
            )
        rows = self.weight.shape[0]
        local = input - self.first
        elsewhere = (local < 0) | (local >= rows)
        padding = -1 if self.padding_idx is None else self.padding_idx - self.first
        x = functional.embedding(local.masked_fill(elsewhere, 0), self.weight, padding if 0 <= padding < rows else None)
        return self.leave(x.masked_fill(elsewhere.unsqueeze(-1), 0))


def vocabulary_loss(
    logits_BTV: Tensor, targets_BT: Tensor, seams: Seams, vocabulary: int, kernels: str = TORCH
) -> tuple[Tensor, Tensor]:
    """As `model.loss.loss_sum`, from logits of which every rank has its part of the vocabulary.

    The logits are never joined: a token costs the ranks its maximum, its sum of exponentials and its target's logit.
    Sums are at least float32. `kernels`: "torch", or the implementation of tilemesh's operator, which writes the
    gradient over the logits and holds nothing else of their size.
    """
    check_targets(logits_BTV, targets_BT)
    targets_N = targets_BT.flatten().long()
    first, count = share(vocabulary, seams.comm.size, seams.comm.rank)
    if logits_BTV.shape[-1] != count:
        raise UsageError(f"logits of {logits_BTV.shape[-1]} tokens: this rank's part of {vocabulary} is {count}")
    counted = (targets_N != IGNORED).sum()
    inputs = (logits_BTV.flatten(0, -2), targets_N, seams, first)
    if implementation_in_training(kernels, logits_BTV) == TORCH:
        return seams.loss(_VocabularyLoss, *inputs), counted
    return seams.loss(_PartLoss, *inputs, vocabulary, kernels), counted


def implementation_in_training(kernels: str, logits: Tensor) -> str:
    """`torch` also where tilemesh's operator would compute by torch: the function above keeps less on the way."""
    return TORCH if kernels == TORCH or (kernels == "auto" and not logits.is_cuda) else kernels


class _PartLoss(torch.autograd.Function):
    """By tilemesh's kernels. Holds the logits themselves from forward to backward, which turns them into the gradient.

    What ranks exchange is as in `_VocabularyLoss`.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, seams: Seams, first: int, vocabulary: int, kernels: str
    ) -> Tensor:
        options: dict[str, Any] = {"ignore_index": IGNORED, "implementation": kernels}
        mine_N, total_N, own_N = part_sums(logits_NV, targets_N, first, vocabulary, **options)
        top_N = seams.sum(mine_N, "max")
        here_N = (targets_N >= first) & (targets_N < first + logits_NV.shape[1])
        own_N = own_N - torch.where(here_N, top_N, 0.0)
        sum_N, target_N = seams.sum(torch.stack((total_N * (mine_N - top_N).exp(), own_N))).unbind()
        ctx.save_for_backward(logits_NV, targets_N, top_N, sum_N)
        ctx.first, ctx.options = first, options
        return (sum_N.log() - target_N).masked_fill(targets_N == IGNORED, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, targets_N, top_N, sum_N = ctx.saved_tensors
        # A second backward through the same graph is refused by autograd, which sees the change.
        torch.autograd.graph.increment_version(logits_NV)
        over_NV = logits_NV.detach()
        write_part_gradient(over_NV, targets_N, ctx.first, top_N, sum_N, grad.to(sum_N.dtype), **ctx.options)
        return over_NV, None, None, None, None, None


class _VocabularyLoss(torch.autograd.Function):
    """Holds one array the size of this rank's logits from forward to backward; backward turns it into the gradient."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, seams: Seams, first: int) -> Tensor:
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        work_NV = logits_NV.to(wide, copy=True)
        top_N = seams.sum(work_NV.amax(-1), "max")
        work_NV.sub_(top_N[:, None])
        here_N = (targets_N >= first) & (targets_N < first + work_NV.shape[1])
        index_N = (targets_N - first).masked_fill(~here_N, 0)
        own_N = work_NV.gather(-1, index_N[:, None])[:, 0].masked_fill(~here_N, 0)
        work_NV.exp_()
        sum_N, target_N = seams.sum(torch.stack((work_NV.sum(-1), own_N))).unbind()
        counts_N = targets_N != IGNORED
        ctx.save_for_backward(work_NV, sum_N, index_N, here_N, counts_N)
        ctx.dtype = logits_NV.dtype
        return (sum_N.log() - target_N).masked_fill(~counts_N, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        work_NV, sum_N, index_N, here_N, counts_N = ctx.saved_tensors
        grad_N = grad * counts_N
        # In place: a second backward through the same graph is refused by autograd, which sees the change.
        work_NV.mul_((grad_N / sum_N)[:, None])
        work_NV.scatter_add_(1, index_N[:, None], -(grad_N * here_N)[:, None])
        return work_NV.to(ctx.dtype), None, None, None
