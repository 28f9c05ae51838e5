"""A laid model: this rank's part, what it holds of the whole, and how to train, read and write it. See `apply.lay`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.shard import Shard, share
from tilemesh.model.cache import KeyValueCache
from tilemesh.model.documents import unmarked
from tilemesh.model.dropout import ORIGIN, DropoutPlace
from tilemesh.model.experts import Choices
from tilemesh.model.loss import IGNORED, HeadOutput, loss_sum
from tilemesh.model.programs.prepare import Prepared, prepare
from tilemesh.model.programs.program import TRAINING, Use
from tilemesh.model.transformer import LayerCall, Pass, ResidualStream, Transformer, added, settled
from tilemesh.parallel.again import call_again
from tilemesh.parallel.agree import tell
from tilemesh.parallel.context import ContextCache, stretch_of
from tilemesh.parallel.experts import ExpertElsewhere
from tilemesh.parallel.gradients import Gradients, loss_shard
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import Held, take, trained
from tilemesh.parallel.tensor import Passage, Seams, vocabulary_loss
from tilemesh.parallel.whole import FreshWeights, gather_parts, handed_around

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StepPiece(NamedTuple):
    """A microbatch as a step is given it."""

    tokens: Tensor
    targets: Tensor
    row: int
    """Where its first row stands in the step's whole batch."""


class HeadLesson(Protocol):
    """What a teacher says of the tokens of a pass."""

    def loss(self, text_loss: Tensor, ours: HeadOutput, targets_BT: Tensor, seams: Seams) -> Tensor:
        """A student's, summed as the text's is. `seams`: how ranks share what the head gives."""


Teaching = Callable[[Tensor, int], HeadLesson]
"""Of the last so many of these tokens."""


@dataclasses.dataclass(frozen=True)
class CompiledRegions:
    """Parts of a model that are compiled each for itself, to be called instead of its own."""

    layers: Sequence[Callable[..., Any]]
    head: Callable[..., tuple[Tensor, Tensor]]


class Laid:
    """`module`: the local model; `shards`: what each of its parameters is of the whole; `gradients`: their exchange.

    `names`: of all parameters of the model, wherever they lie, where this rank has a part of them alone. `use`: what
    programs are chosen for. `elsewhere`: experts of the layers here that other replicas hold.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        plan: ParallelPlan,
        shards: Mapping[str, Shard],
        seams: Seams,
        gradients: Gradients,
        names: Iterable[str] = (),
        use: Use = TRAINING,
        elsewhere: Mapping[str, ExpertElsewhere] = MappingProxyType({}),
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.plan = plan
        self.shards = shards
        self.held = trained(module, shards)
        """The parameters that are trained, by name, each with its shard."""
        self.seams = seams
        self.enter_head = Passage(seams, "enter")
        """Where the head is the table of tokens: into its product."""
        self.gradients = gradients
        self.names = tuple(names) or tuple(shards)
        self.use, self.elsewhere = use, elsewhere
        self.own_tokens: Callable[[Tensor], Tensor] | None = None
        """Of a model that is given all tokens beside one whose ranks share them: what it picks of its predictions."""
        self._programs = prepare(module, use, _device(module)) if isinstance(module, Transformer) else None
        own = plan.on_stage(mesh.pp.index)
        layers = 1
        if isinstance(module, Transformer):  # on one stage all chunks pass one after the other
            layers = module.config.layers if mesh.pp.size == 1 else len(module.layers)
        self.recompute_every = own.stretch(layers)
        """Layers in a stretch whose activations are computed again in backward; 0: all are kept."""
        self.keeps_by_operator = own.recompute == "operators"
        """Whether of each layer only some operators' results are kept: see `parallel/again.py`."""

    @property
    def meets_in_passes(self) -> bool:
        """Whether replicas exchange something in every pass, weights (ZeRO-3) or tokens (ep): all must make as many."""
        return self.plan.zero == 3 or self.plan.ep > 1

    def stand_by(self) -> None:
        """What a replica without a batch does while others make a forward pass: exchange with them what they do."""
        if self.plan.ep > 1:  # a pass of its own, of which nothing counts
            device = next(self.module.parameters()).device
            shares = 2 * self.mesh.cp.size * self.mesh.tp.size  # a rank of cp takes two pieces, which tp may cut
            tokens_BT = torch.full((1, shares), -1 if self.use.marked else 0, device=device)
            with torch.no_grad():
                self.loss(tokens_BT, torch.zeros_like(tokens_BT))

    @property
    def loss_copies(self) -> int:
        """How many ranks have the same part of a loss: a sum over all ranks of the mesh counts it so many times."""
        return loss_shard(self.mesh).alike

    @property
    def model(self) -> Transformer:
        """The local model, or the part of it that lies here."""
        if not isinstance(self.module, Transformer):
            raise UsageError(
                f"loss and logits of a {type(self.module).__name__}: call laid.module and give your own loss, summed, "
                "to laid.gradients.backward"
            )
        return self.module

    @property
    def programs(self) -> Prepared:
        """How the local model is computed: see `model/programs/`."""
        assert self._programs is not None
        return self._programs

    @property
    def has_head(self) -> bool:
        """Whether the model, or this part of it, ends in logits."""
        return self.model.part.head

    @property
    def stream_dtype(self) -> torch.dtype:
        """Of activations between parts of a model: that of the weights, which is as wide as any of them."""
        return next(self.module.parameters()).dtype

    def empty_stream(self, tokens_BT: Tensor) -> Tensor:
        """A buffer for the activations of these tokens between two parts of a model; with sequence parallelism, of this
        rank's."""
        rows, tokens = tokens_BT.shape
        if self.seams.context is not None:
            tokens = self.seams.context.count(tokens)
        if self.seams.sequence:
            _, tokens = share(tokens, self.mesh.tp.size, self.mesh.tp.index)
        shape = (rows, tokens, self.model.config.width)
        return torch.empty(shape, dtype=self.stream_dtype, device=tokens_BT.device)

    # Forward ------------------------------------------------------------------------------------------------------

    def passes(
        self, pieces: Sequence[StepPiece], *, dropout_seed: int | Tensor | None = None, scale: float = 1
    ) -> None:
        """Forward and backward passes of all microbatches of a step; then `gradients.finish`."""
        for turn, (tokens_BT, targets_BT, row) in enumerate(pieces):
            place = DropoutPlace(row=row)
            total, count = self.loss(tokens_BT, targets_BT, dropout_seed=dropout_seed, place=place)
            self.gradients.backward(total, count, last=turn == len(pieces) - 1, scale=scale)

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        *,
        regions: CompiledRegions | None = None,
        lesson: HeadLesson | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Summed loss of this replica's rows and how many targets counted; the same on all ranks of tp. Ranks of cp are
        given the same and count their own tokens.

        `regions`: layers and head to be called instead of the model's own. `lesson`: what a teacher says of the tokens,
        whose student this is. `options`: as `stream` takes them.
        """
        layers = None if regions is None else regions.layers
        stream = self.stream(tokens_BT, layers, targets_BT=targets_BT, **options)
        if self.seams.context is not None:
            targets_BT = self.seams.context.own(targets_BT)
        total, count = (self.head_loss if regions is None else regions.head)(stream, targets_BT, lesson)
        return total if stream.router_loss is None else total + stream.router_loss, count

    def head_loss(
        self, stream: ResidualStream, targets_BT: Tensor, lesson: HeadLesson | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss from what the last layer gave: norm, projection, cross-entropy."""
        model, is_whole = self.model, self.mesh.tp.size == 1
        with self.autocast():
            if lesson is None and self.programs.loss_sum is not None:
                return self.programs.loss_sum(self._to_project(stream), targets_BT)
            ours = self.head(stream)
        if is_whole:
            total, count = loss_sum(ours.logits_BTV, targets_BT)
        else:
            vocabulary, kernels = model.config.vocabulary, model.kernels.loss
            total, count = vocabulary_loss(ours.logits_BTV, targets_BT, self.seams, vocabulary, kernels)
        return total if lesson is None else lesson.loss(total, ours, targets_BT, self.seams), count

    def predictions(
        self, tokens_BT: Tensor, last: int, layers: Sequence[Callable[..., Any]] | None = None
    ) -> HeadOutput:
        """What the head gives for the last so many tokens, without gradients. `layers`: as in `CompiledRegions`."""
        with torch.no_grad(), self.autocast():
            x_BTD, branch_BTD, _ = self.stream(tokens_BT, layers)
            branch_BTD = None if branch_BTD is None else branch_BTD[:, -last:]
            stream = ResidualStream(x_BTD[:, -last:], branch_BTD)
            return self.head(stream if self.own_tokens is None else ResidualStream(self.own_tokens(added(stream))))

    def logits(self, tokens_BT: Tensor, *, cache: KeyValueCache | None = None, x_BTD: Tensor | None = None) -> Tensor:
        """Whole logits on every rank, nothing dropped. A cache, for generation, holds the heads of its own rank.

        `x_BTD`: for the last part of a model; a part without the head gives activations.
        """
        model = self.model
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), self.autocast(), self.seams.whole_tokens():
                stream = self.stream(tokens_BT, x_BTD=x_BTD, cache=cache)
                if not model.part.head:
                    return added(stream)
                logits_BTV = self.head(stream).logits_BTV
        finally:
            model.train(was_training)
        if self.mesh.tp.size == 1:
            return logits_BTV
        return self.seams.join_features(logits_BTV, model.config.vocabulary)

    def activations(
        self, tokens_BT: Tensor, *, regions: CompiledRegions | None = None, **options: Any
    ) -> ResidualStream:
        """What a part of a model without the head gives to the part after it, nothing left to add; with sequence
        parallelism, of this rank's tokens. As `loss` otherwise: all parts are given the same tokens, which say how many
        there are and where."""
        return settled(self.stream(tokens_BT, None if regions is None else regions.layers, **options))

    def autocast(self) -> AbstractContextManager[object]:
        """What the plan's precision asks for around a forward pass."""
        dtype = AUTOCAST.get(self.plan.precision)
        device = next(self.module.parameters()).device.type
        return nullcontext() if dtype is None else torch.autocast(device, dtype)

    def stream(
        self,
        tokens_BT: Tensor,
        layers: Sequence[Callable[..., Any]] | None = None,
        *,
        x_BTD: Tensor | None = None,
        dropout_seed: int | Tensor | None = None,
        place: DropoutPlace = ORIGIN,
        cache: KeyValueCache | None = None,
        targets_BT: Tensor | None = None,
        choices: Choices | None = None,
    ) -> ResidualStream:
        """What the last layer here gives. `layers`: to be called instead of the model's own.

        `x_BTD`: for a part of a model without the embedding, what `activations` of the part before it gave. `place`:
        where the rows stand in the step's whole batch. What is dropped follows from it and the seed alone. `cache`:
        what the tokens attend through, where they are a slice of their sequences, or generated. `targets_BT`: in
        training routers have losses of the tokens whose targets count. `choices`: of experts, kept for a pass that is
        made again, or of the one that it repeats.
        """
        with self.autocast():
            context, marked, config = self.seams.context, self.use.marked, self.model.config
            self.seams.sequence_tokens = tokens_BT.shape[1]
            if context is not None:
                if cache is None:  # else it is of a slice, and knows
                    cache = ContextCache(context, tokens_BT, marked, self.model.kernels.attention)
                place = context.placed(place, tokens_BT.shape[1], tokens_BT.device)
                tokens_BT = context.own(unmarked(tokens_BT) if marked else tokens_BT)
                targets_BT = None if targets_BT is None else context.own(targets_BT)
            options: dict[str, Any] = {"dropout_seed": dropout_seed, "place": place, "marked": marked}
            is_balanced = config.balance_loss or config.router_z_loss or config.router_bias is True
            if targets_BT is not None and self.model.training and is_balanced:
                counted_BT = targets_BT != IGNORED
                options["counted_BT"] = self.seams.own_tokens(counted_BT) if self.plan.routes_apart else counted_BT
            repeats = self.recompute_every > 0 or self.keeps_by_operator
            options["choices"] = {} if choices is None and repeats and torch.is_grad_enabled() else choices
            now = entering = self.model.prepare(tokens_BT, cache=cache, **options)
            if self.seams.sequence:
                self.seams.tokens = tokens_BT.shape[1]
                before, count = share(self.seams.tokens, self.mesh.tp.size, self.mesh.tp.index)
                # Positions inside attention are those of all tokens, outside those of this rank's stretch.
                now = entering = dataclasses.replace(now, place=place.stretch(before, count))
                if cache is not None:
                    entering = dataclasses.replace(now, cache=stretch_of(cache, before, count))
            stream = ResidualStream(self.programs.enter(tokens_BT, x_BTD, entering))
            calls = self.layer_calls(self.seams.tokens) if layers is None else layers
            return self._through_layers(calls, stream, now)

    def head(self, stream: ResidualStream, rows_N: Tensor | None = None) -> HeadOutput:
        """What the head gives, inside `autocast`. `rows_N`: for these tokens alone, counted over the flattened batch,
        as one row of them; where ranks cut sequences, all that they have are normalized."""
        x_BTD = self._to_project(stream)
        picks_late = self.seams.sequence
        if rows_N is not None and not picks_late:
            x_BTD = x_BTD.flatten(0, 1)[None, rows_N]
        is_tied = self.model.output is None  # there is no module to enter at
        entered_BTD = self.enter_head(x_BTD) if is_tied and self.mesh.tp.size > 1 else x_BTD
        logits_BTV = self.programs.project(entered_BTD)
        if rows_N is not None and picks_late:
            logits_BTV = logits_BTV.flatten(0, 1)[None, rows_N]
        return HeadOutput(x_BTD, logits_BTV)

    def _to_project(self, stream: ResidualStream) -> Tensor:
        """What the output projection is given."""
        if not self.model.part.head:
            raise UsageError("a part of a model without its head has no logits: call activations, and give them on")
        return self.model.normalize(stream)

    def layer_calls(self, tokens: int | None = None) -> list[LayerCall]:
        """The layers here as they are called: where operators' results are kept, with what computes the rest again.

        `tokens`: `Seams.tokens` of the pass that calls them; a compiler knows it from its trace.
        """
        layers = list(self.programs.layers)
        if not self.keeps_by_operator:
            return layers
        if self.seams.sequence and tokens is not None:
            layers = [partial(self._call_with, tokens, layer) for layer in layers]
        return [partial(call_again, layer, moves="activations" in self.plan.offloads) for layer in layers]

    def _call_with(self, tokens: int, layer: LayerCall, stream: ResidualStream, now: Pass) -> ResidualStream:
        """A layer that may be computed again when passes of other lengths have been made since."""
        self.seams.tokens = tokens
        return layer(stream, now)

    def compiled_regions(self) -> CompiledRegions:
        """Every layer compiled for itself, and what follows the last one.

        Layers are the same code over other weights, which are its inputs: one is compiled, and the others find it. The
        first one differs, since nothing is to be added before its norm.
        """
        layers: list[Any] = [torch.compile(layer) for layer in self.layer_calls()]
        head: Any = torch.compile(self.head_loss)
        return CompiledRegions(layers, head)

    def _through_layers(
        self, layers: Sequence[Callable[..., Any]], stream: ResidualStream, now: Pass
    ) -> ResidualStream:
        every, tokens = self.recompute_every, self.seams.tokens
        if every < 1 or not torch.is_grad_enabled():
            for layer in layers:
                stream = layer(stream, now)
            return stream

        def stretch(x_BTD: Tensor, router_loss: Tensor | None, start: int) -> ResidualStream:
            stream, self.seams.tokens = ResidualStream(x_BTD, None, router_loss), tokens  # others may have passed since
            for layer in layers[start : start + every]:
                stream = layer(stream, now)
            return settled(stream)

        for start in range(0, len(layers), every):
            x_BTD, loss = added(stream), stream.router_loss
            # Dropout has no state to keep: a mask is a function of where an element stands.
            stream = checkpoint(stretch, x_BTD, loss, start, use_reentrant=False, preserve_rng_state=False)
        return stream

    # The whole ----------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Held]:
        """What this rank keeps of every parameter between steps: its shard, or under ZeRO-3 its rows of it."""
        return {name: Held(parameter, self.shards[name]) for name, parameter in self.module.named_parameters()}

    def gather_gradients(self) -> dict[str, Tensor] | None:
        """Whole gradients as `gather` gives weights, after `gradients.finish`, whoever holds which rows of them."""
        held = {name: mine for name, mine in self.gradients.stepped.items() if mine.tensor.grad is not None}
        values = {name: mine.tensor.grad for name, mine in held.items() if mine.tensor.grad is not None}
        return self.gather(values, {name: mine.shard for name, mine in held.items()})

    def gather(
        self, values: Mapping[str, Tensor] | None = None, shards: Mapping[str, Shard] | None = None
    ) -> dict[str, Tensor] | None:
        """Whole tensors by name on rank 0 of the mesh, in CPU memory; None on the others. A collective call.

        `values`: of local shapes, by parameter name (gradients, an optimiser's moments); None: the weights. `shards`:
        how they are cut, where that is not as the weights are.
        """
        gathered = self._gather(values, shards)
        stages = self.mesh.pp.comm
        if gathered is not None and stages.size > 1:
            of_stages = (handed_around(stages, gathered, stage) for stage in range(stages.size))
            gathered = {name: tensor for pairs in of_stages for name, tensor in pairs if stages.rank == 0}
        if gathered is None or stages.rank:
            return None
        return {name: gathered[name] for name in self.names if name in gathered}

    def _gather(
        self, values: Mapping[str, Tensor] | None, shards: Mapping[str, Shard] | None
    ) -> dict[str, Tensor] | None:
        """What the ranks of this rank's stage hold together."""
        weights = self.weights()
        tensors = {name: mine.tensor for name, mine in weights.items()} if values is None else dict(values)
        cut_as = shards or (self.shards if values is not None else {name: mine.shard for name, mine in weights.items()})
        for name in tensors:
            if name not in cut_as:
                raise UsageError(f"{name} is no parameter of this model: give values by parameter name")
        parts = [(cut_as[name], tensors[name].detach()) for name in cut_as if name in tensors]
        common = [part for part in parts if part[0].every == 1]
        # Along the axes that cut nothing, the first rank has all that the others have.
        cutting = {cut.axis for mine, _ in parts for cut in mine.cuts}
        wholes = self._gather_along(cutting, common)
        if len(common) < len(parts):
            experts = {mine.name: (mine, local) for mine, local in parts if mine.every > 1}
            for name, (twin, at) in self.elsewhere.items():
                if twin in experts:
                    mine = dataclasses.replace(experts[twin][0], name=name, at=at)
                    experts[name] = (mine, experts[twin][1].new_empty(mine.shape))
            apart = {name for name, _ in self.plan.expert_spread}
            spread = self._gather_along(cutting | apart, [experts[name] for name in self.names if name in experts])
            wholes = None if wholes is None or spread is None else wholes | spread
        return wholes

    def _gather_along(self, cutting: set[str], parts: Sequence[tuple[Shard, Tensor]]) -> dict[str, Tensor] | None:
        """Whole tensors from the ranks along these axes, on the first of each stage."""
        group = self.mesh.group(*cutting)
        if any(axis.index for name, axis in self.mesh.axes.items() if name not in (*cutting, "pp")):
            return None
        wholes = gather_parts(parts, group, self.mesh.members(*cutting))
        return {mine.name: wholes[mine.name] for mine, _ in parts} if group.rank == 0 else None

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor] | None, root: int | None = None) -> None:
        """Take this rank's parts of whole tensors: the inverse of `gather`.

        `state`: on every rank, where only what is needed is looked at; or with `root` on that rank of the mesh alone
        (a collective call: what is wrong with its state, every rank raises).
        """
        comm = self.mesh.comm
        if root is None:
            problem = self._problem(state, self.shards)
        else:
            if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < comm.size:
                raise UsageError(f"root is {root!r}: expected a rank from 0 to {comm.size - 1}")
            problem = tell(comm, self._problem(state, self.names, shapes=True) if comm.rank == root else "", root)
        if problem:
            raise UsageError(problem)
        weights = self.weights()
        if root is not None:
            tensors = handed_around(comm, state, root)
        else:
            assert state is not None
            tensors = ((name, state[name]) for name in weights)
        for name, tensor in tensors:
            if name in weights:
                parameter, mine = weights[name]
                parameter.copy_(take(mine, tensor))

    def _problem(self, state: Mapping[str, Tensor] | None, needed: Iterable[str], shapes: bool = False) -> str:
        """What is wrong with a whole state, in words; nothing where it fits. `shapes`: look at each tensor as well."""
        if state is None:
            return "load without a state: give one on every rank, or name the rank that has it with root="
        present = set(state)  # asking a lazy mapping whether it has a name would read the tensor
        for name in present - set(self.names):
            return str(unknown("parameter", name, list(self.shards)[:4], near=self.shards))
        for name in needed:
            if name not in present:
                return f"the state lacks {name}: expected {', '.join(list(self.shards)[:3])}, …"
        for name, mine in self.shards.items() if shapes else ():
            if tuple(state[name].shape) != mine.whole:
                return f"{name}: the whole array has shape {tuple(state[name].shape)}, expected {mine.whole}"
        return ""

    def initialize(self, seed: int) -> None:
        """Fresh weights, those that `model.fresh.initialize` gives the whole; one whole parameter at a time."""
        self.load(FreshWeights(self.shards, seed, self.model.config.layers))


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters(), torch.empty(0)).device
