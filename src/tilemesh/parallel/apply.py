"""Laying a model on a mesh: from a whole `nn.Module` and a plan to this rank's part of it, in one readable order.

The one idea: how a model is split is a short map from name patterns to kinds of split. Ours is `transformer_splits`;
a user's own module comes with a map of the same kind, and nothing else differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import nn

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.axes import BATCH, ORDER, place_among
from tilemesh.core.conflicts import PLAN_CONFLICTS, refuse
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.sequence import ranks_sharing_heads
from tilemesh.core.shard import Shard, share
from tilemesh.core.step.program import step_program
from tilemesh.model.config import ModelConfig
from tilemesh.model.experts import Experts, Router
from tilemesh.model.kernels import TORCH
from tilemesh.model.kinds import group_sizes, kinds_of, open_codes, put_kinds
from tilemesh.model.linear import DENSE, LearnedVector, Linear, as_kind
from tilemesh.model.norm import ResidualNorm
from tilemesh.model.part import ModelPart, cut_parts, whole_part
from tilemesh.model.programs.program import TRAINING, Use
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.weights import SLICED, Weight, why_not, why_not_groups
from tilemesh.parallel.agree import agree
from tilemesh.parallel.buckets import BUCKET_BYTES, Bucketed
from tilemesh.parallel.context import ContextAxis, SequenceCounts
from tilemesh.parallel.experts import EXPERT, ExpertElsewhere, RunCounts, share_experts
from tilemesh.parallel.gradients import Gradients, LocalGradients, Naive, Parts, Way
from tilemesh.parallel.laid import AUTOCAST, Laid
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.pipeline import Pipeline, StageModule, holder_groups, holders_of
from tilemesh.parallel.region_end import require_end_at
from tilemesh.parallel.shard import (
    ColumnSplit,
    Held,
    Region,
    RowSplit,
    Split,
    VocabularySplit,
    Whole,
    require_no_hooks,
    shard,
    split_of,
    take,
    trained,
)
from tilemesh.parallel.tensor import (
    ExitHook,
    Passage,
    RowConv2d,
    Seams,
    VocabularyEmbedding,
    enter_at,
    enter_others_at,
    join_at,
    leave_at,
)
from tilemesh.parallel.whole import handed_around
from tilemesh.parallel.zero import Zero
from tilemesh.parallel.zero3 import ZeroWeights, give_memory_back

Splits = Mapping[str, str | Split]


def lay(
    model: nn.Module,
    mesh: Mesh,
    plan: ParallelPlan,
    splits: Splits | None = None,
    *,
    device: torch.device | str = "cpu",
    algorithm: str = "auto",
    gradients: str | Way = "bucketed",
    bucket_bytes: int = BUCKET_BYTES,
    tokens: int | None = None,
    use: Use = TRAINING,
) -> Laid:
    """This rank's part of the model, ready to train. A collective call; the model given becomes the local one, of rank
    0's weights and buffers.

    `splits`: for a module that is not our Transformer, patterns of module names (as in a shell, `layers.*.mlp`) and how
    each is split: "column", "row", "vocabulary", "region", "whole" or a value of `shard.py`; the last match counts, and
    what matches nothing is whole on every rank. `device`: where a model without memory (on the meta device) gets its
    part; its weights are NaN until `load` or `initialize`. `algorithm`: of every exchange, as a communicator takes it.
    `gradients`: "bucketed" in pieces of about `bucket_bytes`, "naive", or "local" for one process, whose steps have
    `tokens` targets each (see `gradients.py`); or what makes another implementation. `use`: what programs our
    Transformer is computed by are chosen for, and whether its tokens say where documents begin.
    """
    kinds = splits
    if isinstance(model, Transformer) and splits is None:
        kinds = dict(transformer_splits(model.config, model.part, plan.routes_apart))
        for name, child in model.named_children():
            if isinstance(child, Transformer):  # trained beside it
                kinds |= {f"{name}.{pattern}": kind for pattern, kind in transformer_splits(child.config).items()}
    if kinds is None:
        raise UsageError(f"a {type(model).__name__} and no splits: give a map from name patterns to kinds of split")
    _agree(model, mesh, plan, kinds)
    _require_fit(model, mesh, plan)
    _take_first(model, mesh.comm)
    context = None
    if plan.cp > 1:
        kv_heads = max(1, model.config.kv_heads // plan.tp) if isinstance(model, Transformer) else 1
        together = ranks_sharing_heads(plan.cp_exchange, plan.cp, kv_heads)
        context = ContextAxis(mesh.cp.comm, plan.cp_exchange, algorithm, together)
    seams = Seams(mesh.tp.comm, plan.sequence_parallel, algorithm=algorithm, context=context)
    if isinstance(model, Transformer):
        use = planned_use(use, plan, model.config.layers)

    def exchange(held: Mapping[str, Held], **stages: Any) -> Gradients:
        if not held:
            raise UsageError(f"a {type(model).__name__} without a parameter that requires gradients: nothing to train")
        parts = Parts(held, mesh, algorithm, **stages, compares=splits is not None)
        return _gradients(gradients, parts, plan, bucket_bytes, tokens)

    if plan.has_chunks:
        assert isinstance(model, Transformer)
        return _lay_stages(model, mesh, plan, seams, torch.device(device), exchange, use)
    names = [name for name, _ in model.named_parameters()]
    elsewhere = share_experts(model, mesh, plan, algorithm)
    shards = _cut(model, kinds, mesh, plan, seams, torch.device(device))
    exchanged = exchange(trained(model, shards))
    return Laid(model, mesh, plan, shards, seams, exchanged, names, use, elsewhere)


def lay_beside(model: Transformer, laid: Laid, device: torch.device | None = None, mesh: Mesh | None = None) -> Laid:
    """A model that is never trained, such as a teacher, beside one that is: over tp alone, and tokens are not cut.

    A collective call along tp; ranks may each decide whether they need it. The model is on the meta device: its part
    here, on `device` or where the other's is, is NaN until `load`. `mesh`: over whose tp, if not the other's.
    """
    mesh = mesh or laid.mesh
    plan = ParallelPlan(tp=mesh.tp.size, precision=laid.plan.precision)
    seams = Seams(mesh.tp.comm, algorithm=laid.seams.algorithm)
    device = device or next(laid.module.parameters()).device
    shards = _cut(model, transformer_splits(model.config, model.part), mesh, plan, seams, device)
    model.eval().requires_grad_(False)
    use = dataclasses.replace(TRAINING, marked=laid.use.marked, tp=plan.tp)
    beside = Laid(model, mesh, plan, shards, seams, laid.gradients, use=use)
    beside.own_tokens = None if laid.seams.context is None else laid.seams.context.own
    return beside


def _cut(
    model: nn.Module, kinds: Splits, mesh: Mesh, plan: ParallelPlan, seams: Seams, device: torch.device
) -> dict[str, Shard]:
    """Make a module this rank's part of it; what its parameters are of the whole."""
    splits = _matched(model, kinds)
    if mesh.tp.size > 1:
        for name, split in splits.items():
            _require_nothing_lost(name, model.get_submodule(name), split)
            if isinstance(split, Region):
                _require_whole_heads(name, model.get_submodule(name), split, splits, mesh.tp.size)
        for module in model.modules():
            if isinstance(module, Linear):
                open_codes(module)  # a part of a matrix need not begin with a byte
    shards = _shards(model, splits, mesh, plan)
    # What takes memory from single parameters, and gives it back, wants each to have its own.
    _cut_parameters(model, shards, device, together=plan.zero < 3 and "weights" not in plan.offloads)
    if mesh.tp.size > 1:
        _cut_modules(model, splits, seams)
        for name, split in splits.items():
            if isinstance(split, Region) and not isinstance(model, Transformer):
                require_end_at(name, model.get_submodule(name), model, shards)
    # Ranks of tp route the same tokens, inside a region, or are among those that share each sequence.
    cut = plan.tp if plan.routes_apart else 1
    counts = None
    if plan.cp * cut > 1:
        comm = mesh.group(*(("tp", "cp") if cut > 1 else ("cp",)))
        counts = SequenceCounts(comm, seams.algorithm)
    for module in model.modules():
        if isinstance(module, Router):
            module.copies = plan.tp // cut
            module.over_sequences = counts
        elif isinstance(module, Experts):
            module.ordered_counts = RunCounts(counts, seams, plan.cp, cut) if counts else None
            if plan.routes_apart:  # each rank of tp has the losses of its own tokens
                module.register_forward_hook(ExitHook(None, (Passage(seams, "add"),)))
    return shards


def _lay_stages(
    model: Transformer,
    mesh: Mesh,
    plan: ParallelPlan,
    seams: Seams,
    device: torch.device,
    exchange: Callable[..., Gradients],
    use: Use,
) -> Pipeline:
    """The chunks that lie on this rank's stage, each made anew, with the weights of `model` if it has some."""
    config, like = model.config, dict(model.named_parameters())
    has_memory = not any(parameter.is_meta for parameter in like.values())
    step = step_program(plan, config.layers, experts=config.expert_layers)
    placement, parts = step.program.placement, cut_parts(config, [len(layers) for layers in step.layers])
    # A kernel that multiplies and activates at once has no half of its backward to put off.
    kernels = dataclasses.replace(model.kernels, projections=TORCH) if step.is_split else model.kernels
    chunks: dict[int, Transformer] = {}
    shards: dict[str, Shard] = {}
    chunk_of: dict[str, int] = {}
    elsewhere: dict[str, ExpertElsewhere] = {}
    for number in placement.held[mesh.pp.index]:
        dtype = next(iter(like.values())).dtype
        chunk = Transformer(config, device="meta", dtype=dtype, kernels=kernels, part=parts[number])
        put_kinds(chunk, kinds_of(model))
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(like[name].requires_grad)
        where = next(iter(like.values())).device if has_memory else device
        elsewhere |= share_experts(chunk, mesh, plan, seams.algorithm)
        cut = _cut(chunk, transformer_splits(config, parts[number], plan.routes_apart), mesh, plan, seams, where)
        for name, mine in cut.items():
            holders = holders_of(name, number, placement, config) if mesh.pp.size > 1 else ()
            shards[name] = dataclasses.replace(mine, holders=holders)
            chunk_of.setdefault(name, number)
        if plan.zero == 3 and not has_memory:
            give_memory_back(list(chunk.parameters()))
        chunks[number] = chunk
    first, last = chunks.get(0), chunks.get(placement.chunks - 1)
    if config.tied and first is not None and last is not None:  # one table for both: its gradients add up by themselves
        assert first.token_embedding is not None
        assert last.token_embedding is not None
        last.token_embedding.weight = first.token_embedding.weight
    stage = StageModule(chunks)
    parts_of_exchange: dict[str, Any] = {
        "frozen": trained(stage, shards, False),
        "chunks": chunk_of,
        "reads": {number: tuple(name for name, _ in chunk.named_parameters()) for number, chunk in chunks.items()},
        "holders": holder_groups(mesh, placement, config),
    }
    exchanged = exchange(trained(stage, shards), **parts_of_exchange)
    laid = Pipeline(chunks, mesh, plan, step, shards, seams, exchanged, names=like, use=use, elsewhere=elsewhere)
    if has_memory:
        laid.load(model.state_dict())
    laid.module.train(model.training)
    return laid


def planned_use(use: Use, plan: ParallelPlan, layers: int) -> Use:
    """With what a plan says of a model of so many layers: who shares them, and what lies between two passes."""
    use = dataclasses.replace(use, tp=plan.tp, casts=use.casts or plan.precision in AUTOCAST)
    if not plan.has_chunks:
        return use
    is_split = step_program(plan, layers).is_split
    return dataclasses.replace(use, puts_off=is_split, updates_meanwhile=plan.is_asynchronous)


def _gradients(way: str | Way, parts: Parts, plan: ParallelPlan, bucket_bytes: int, tokens: int | None) -> Gradients:
    if callable(way):
        return way(parts)
    if plan.zero:
        if way != "bucketed":
            raise UsageError(f"{way} gradients with ZeRO-{plan.zero}: it exchanges them in buckets; use 'bucketed'")
        if plan.zero == 3:
            return ZeroWeights(parts, plan.zero_group, bucket_bytes)
        return Zero(parts, plan.zero, plan.zero_group, bucket_bytes)
    if way == "bucketed":
        return Bucketed(parts, bucket_bytes)
    if way == "naive":
        return Naive(parts)
    if way == "local":
        if tokens is None:
            raise UsageError("local gradients without tokens: say how many targets a step has")
        return LocalGradients(parts, tokens)
    raise unknown("gradients", way, ("bucketed", "naive", "local"))


def transformer_splits(config: ModelConfig, part: ModelPart | None = None, whole_experts: bool = False) -> Splits:
    """How our Transformer, or a part of it, is split: heads and the MLP's hidden features over tp, tables by the
    vocabulary. `whole_experts`: those that a router picks are not, and lie outside of the regions."""
    part = whole_part(config) if part is None else part
    splits: dict[str, str | Split] = {}
    if part.layers:
        splits = {"layers.*.attention": Region()}
        for layer in part.layers:
            has_experts = config.of_layer(layer).experts > 0
            if not (has_experts and whole_experts):
                splits[f"layers.{layer}.mlp"] = Region(sums=has_experts)
            elif config.shared_width:
                splits[f"layers.{layer}.mlp.shared"] = Region(sums=True)
    for weight in part.weights(config):
        if weight.split != "whole" and not (whole_experts and ".mlp.experts." in weight.name):
            name = re.sub(r"^layers\.\d+\.", "layers.*.", weight.name)
            splits[re.sub(r"\.experts\.\d+\.", ".experts.*.", name)] = _split(weight)
    return splits


def _split(weight: Weight) -> Split:
    if weight.split == "column":
        return ColumnSplit(units=weight.units or None, repeats=weight.repeats)
    if weight.split == "row":
        return RowSplit(sums=not re.search(r"\.mlp\.(experts|shared)\.", weight.name))
    return split_of(weight.split)


def _agree(model: nn.Module, mesh: Mesh, plan: ParallelPlan, kinds: Splits) -> None:
    """All ranks must have been given the same: plan, configuration, splits, and shapes and dtypes of tensors."""
    values = {f"plan.{key}": value for key, value in plan.to_dict().items()}
    if isinstance(model, Transformer):
        values |= {f"model.{key}": value for key, value in dataclasses.asdict(model.config).items()}
    values |= {f"split.{pattern}": str(split_of(kind)) for pattern, kind in kinds.items()}
    values |= {
        f"parameter.{name}": f"{list(tensor.shape)} {tensor.dtype}{' without memory' if tensor.is_meta else ''}"
        for name, tensor in _tensors(model).items()
    }
    agree(mesh.comm, values)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def _take_first(model: nn.Module, comm: Communicator) -> None:
    """Where ranks have other numbers than rank 0, as modules without a seed do, all take its (a collective call)."""
    tensors = {name: tensor for name, tensor in _tensors(model).items() if not tensor.is_meta}
    if comm.size == 1 or not tensors:
        return
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(_sums_of_bits(tensor).cpu().numpy().data)
    rows = comm.all_gather(np.frombuffer(digest.digest(), np.uint8).reshape(1, -1))
    if (rows != rows[0]).any():
        for name, value in handed_around(comm, tensors, root=0):
            if comm.rank:
                tensors[name].copy_(value)


def _sums_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of 64 stretches of a tensor's memory as whole numbers, and the bytes behind them: what tells the weights of
    ranks apart at the speed of the memory, where a digest of all would take minutes of a large model."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    words = flat.numel() // 512
    sums = flat[: 512 * words].view(torch.int64).view(64, words).sum(1)
    return torch.cat([sums, flat[512 * words :].long()])


def _require_fit(model: nn.Module, mesh: Mesh, plan: ParallelPlan) -> None:
    """The plan is one that exists for this model, that can be run, and that the mesh was made for."""
    sizes = {name: size for name, size in mesh.shape if size > 1}
    wanted = {name: size for name, size in plan.axes.items() if size > 1}
    for name, size in {**wanted, **sizes}.items():
        if name not in ORDER:
            raise UsageError(f"{name} is {size}: a model is laid over {', '.join(ORDER)}; set {name} to 1")
    if sizes != wanted:
        shown = " × ".join(f"{name}={size}" for name, size in plan.axes.items())
        raise UsageError(f"the plan is {shown} and the mesh {mesh}: make the mesh by Mesh(comm, **plan.axes)")
    refuse(PLAN_CONFLICTS, plan)
    if isinstance(model, Transformer):
        for name, why in SLICED.items() if plan.slices > 1 else ():
            if value := getattr(model.config, name):
                raise UsageError(f"slices is {plan.slices} and {name} {value}: {why}; set one")
        reason = why_not(model.config, plan) or why_not_groups(model.config, plan, group_sizes(kinds_of(model)))
        if reason:
            raise UsageError(reason)
    elif plan.pp > 1:
        raise UsageError(
            f"pp of a {type(model).__name__}: only tilemesh's Transformer can be cut into stages; set pp=1"
        )
    elif plan.zero == 3:
        raise UsageError(
            f"ZeRO-3 of a {type(model).__name__}: it gathers layer by layer, tilemesh's Transformer; set zero=2"
        )
    elif plan.has_chunks:
        raise UsageError(
            f"offload {plan.offload} of a {type(model).__name__}: it moves layer by layer, tilemesh's Transformer; set "
            "offload=optimizer, or leave it out"
        )
    elif plan.sequence_parallel or plan.cp > 1:
        setting = "sequence_parallel" if plan.sequence_parallel else "cp"
        raise UsageError(f"{setting} of a {type(model).__name__}: only tilemesh's Transformer can be cut so")
    elif plan.dp > 1:
        _require_no_batch_norms(model)


def _require_no_batch_norms(model: nn.Module) -> None:
    for name, module in model.named_modules():
        of_batch = isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        if of_batch and module.training:
            raise UsageError(
                f"{name or 'the module'} is a {type(module).__name__} in training: each replica would take the mean "
                "and variance of its own rows; use tilemesh.parallel.place, which takes those of all, or another norm"
            )


def _matched(model: nn.Module, kinds: Splits) -> dict[str, Split]:
    """The split of every module that has one. A pattern that matches nothing is a mistake."""
    names = [name for name, _ in model.named_modules() if name]
    splits: dict[str, Split] = {}
    for pattern, kind in kinds.items():
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise unknown("module", pattern, names[:20], near=names)
        for name in hits:
            splits[name] = split_of(kind)
    for name, split in splits.items():
        _require_module(name, model.get_submodule(name), split)
    return splits


def _require_module(name: str, module: nn.Module, split: Split) -> None:
    fits = {
        ColumnSplit: (nn.Linear, nn.Conv2d, ResidualNorm, LearnedVector),
        RowSplit: (nn.Linear, nn.Conv2d),
        VocabularySplit: (nn.Linear, nn.Embedding),
    }
    wanted = fits.get(type(split), (nn.Module,))
    if not isinstance(module, wanted):
        words = " or ".join(f"nn.{kind.__name__}" for kind in wanted if kind not in (ResidualNorm, LearnedVector))
        raise UsageError(f"{name} is a {type(module).__name__}: a {type(split).__name__} takes an {words}")
    if isinstance(module, nn.Conv2d) and isinstance(split, (ColumnSplit, RowSplit)) and module.groups > 1:
        raise UsageError(
            f"{name} has {module.groups} groups: of a grouped convolution each output sees some inputs only, and which "
            "ones a rank has would decide what it computes; leave it whole"
        )


def _require_nothing_lost(name: str, module: nn.Module, split: Split) -> None:
    """A torch layer that one of ours takes the place of computes what the plain layer does, and nothing more."""
    replaced = {RowSplit: (nn.Linear, nn.Conv2d), VocabularySplit: (nn.Embedding,)}.get(type(split), ())
    plain = next((kind for kind in replaced if isinstance(module, kind)), None)
    if plain is None or isinstance(module, Linear):
        return
    settings = [key for key in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, key, None)]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if getattr(module.forward, "__func__", None) is not plain.forward:
        settings.append("a forward of its own")
    if any(getattr(module, kind) for kind in hooks):
        settings.append("hooks")
    if settings:
        raise UsageError(
            f"{name}, a {type(module).__name__}, has {' and '.join(settings)}, which a {type(split).__name__} would "
            f"drop: make it a plain nn.{plain.__name__} and do the rest in the module around it, or leave it whole"
        )


def _require_whole_heads(name: str, module: nn.Module, split: Region, splits: Mapping[str, Split], ranks: int) -> None:
    """A rank has whole heads of a region, or one of fewer heads than ranks, which its column layers repeat."""
    repeats = any(
        isinstance(inner, ColumnSplit) and inner.repeats and below.startswith(f"{name}.")
        for below, inner in splits.items()
    )
    for attribute in split.divides:
        count = getattr(module, attribute)
        if count % ranks and (ranks % count or not repeats):
            raise UsageError(
                f"{name}.{attribute} is {count} and tp {ranks}: a rank would compute parts of heads; set a tp that "
                f"divides {count}, or where {count} divides tp cut their layers by "
                f"ColumnSplit(units={count}, repeats=True)"
            )


def _shards(model: nn.Module, splits: Mapping[str, Split], mesh: Mesh, plan: ParallelPlan) -> dict[str, Shard]:
    shards, sequence = {}, plan.sequence_parallel
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        split = splits.get(module, Whole())
        owner = model.get_submodule(module)
        is_shared = False  # a piece that all ranks have of a matrix that is cut: each multiplies it with its own part
        if isinstance(owner, Linear) and not isinstance(split, (Region, Whole)) and last != "bias":
            is_shared = _by(split) not in owner.piece(last).cut
        kept = Whole() if is_shared else split
        mine = shard(name, parameter.shape, kept, mesh.shape, mesh.comm.rank)
        # A whole parameter sees one rank's part of the activations where these are cut: along the tokens outside the
        # regions, by features inside. A row-split layer's bias is added where the region has ended, or in parts.
        is_inside = is_shared or (_is_inside(name, splits) and not (isinstance(split, RowSplit) and split.sums))
        is_partial = bool(mine.partial) or (not mine.cuts and (sequence or is_inside))
        shards[name] = dataclasses.replace(mine, partial=(*BATCH, "tp") if is_partial else BATCH)
        if plan.ep > 1 and EXPERT.fullmatch(name):
            at = place_among(mesh.comm.rank, plan.expert_spread, mesh.shape)
            shards[name] = dataclasses.replace(shards[name], spread=plan.expert_spread, at=at)
    _require_tied_alike(model, splits, mesh, shards)
    return shards


def _require_tied_alike(model: nn.Module, splits: Mapping[str, Split], mesh: Mesh, shards: Mapping[str, Shard]) -> None:
    """A parameter that several modules share is one tensor: all of them must cut it alike."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first[id(parameter)]
        split = splits.get(name.rpartition(".")[0], Whole())
        if name == owner:
            continue
        other = shard(name, parameter.shape, split, mesh.shape, mesh.comm.rank)
        if other.boxes != shards[owner].boxes:
            before = splits.get(owner.rpartition(".")[0], Whole())
            raise UsageError(
                f"{name} is {owner}, one tensor, and they are split differently ({split} and {before}): split both "
                "alike, such as 'vocabulary' for the table and VocabularySplit(joins=True) for the output"
            )


def _is_inside(name: str, splits: Mapping[str, Split]) -> bool:
    """Whether a module or parameter of this name lies in a region."""
    parts = name.split(".")
    return any(isinstance(splits.get(".".join(parts[:end])), Region) for end in range(1, len(parts)))


@torch.no_grad()
def _cut_parameters(model: nn.Module, shards: Mapping[str, Shard], device: torch.device, together: bool) -> None:
    """Each parameter is replaced by this rank's part of it. One that several modules share stays shared. `together`:
    new memory of experts' matrices of one kind lies side by side (`model/programs/grouped_experts.py`)."""
    local: dict[int, nn.Parameter] = {}
    stacks = _expert_stacks(model) if together else {}
    memory: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            unset = torch.nan if parameter.is_floating_point() else 0
            others = stacks.get(name, [])
            if others and name == others[0]:
                shape = (len(others), *shards[name].shape)
                views = torch.full(shape, unset, dtype=parameter.dtype, device=device).unbind()
                memory |= dict(zip(others, views, strict=True))
            mine = memory.pop(name, None)
            if mine is None:
                mine = torch.full(shards[name].shape, unset, dtype=parameter.dtype, device=device)
        elif shards[name].cuts:
            mine = take(shards[name], parameter.detach()).clone(memory_format=torch.contiguous_format)
        else:
            continue
        require_no_hooks(name, parameter)
        local[id(parameter)] = nn.Parameter(mine, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, before in list(module._parameters.items()):
            if before is not None and id(before) in local:
                setattr(module, name, local[id(before)])


def _expert_stacks(model: nn.Module) -> dict[str, list[str]]:
    """Parameters of experts by name: those of all experts of the layer that have the same place in them."""
    stacks: dict[tuple[str, str], list[str]] = {}
    for name, _ in model.named_parameters():
        if parts := EXPERT.fullmatch(name):
            stacks.setdefault((parts[1], parts[3]), []).append(name)
    return {name: names for names in stacks.values() for name in names}


def _cut_modules(model: nn.Module, splits: Mapping[str, Split], seams: Seams) -> None:
    """Seams where regions begin and end; modules are told of their new sizes."""
    for norm in model.modules():
        if isinstance(norm, ResidualNorm):  # what enters a region sends back gradients that ranks sum: not in 16 bits
            norm.widen()
    for name, split in splits.items():
        module: Any = model.get_submodule(name)
        if isinstance(split, Region):
            for attribute in split.divides:
                setattr(module, attribute, max(1, getattr(module, attribute) // seams.comm.size))
            enter_at(module, seams)
            if not isinstance(model, Transformer):
                enter_others_at(module, seams)
            if split.sums:
                leave_at(module, seams)
        elif isinstance(split, VocabularySplit) and isinstance(module, nn.Embedding):
            first, _ = share(module.num_embeddings, seams.comm.size, seams.comm.rank)
            _replace(model, name, VocabularyEmbedding(module, seams, first))
        elif isinstance(split, RowSplit) and isinstance(module, nn.Conv2d):
            _replace(model, name, RowConv2d(module, seams))
        elif isinstance(split, RowSplit) and isinstance(module, nn.Linear):
            layer = module if isinstance(module, Linear) else as_kind(module, DENSE)
            if layer is not module:
                _replace(model, name, layer)
            _place(name, layer, split, seams)
        elif isinstance(module, LearnedVector):
            continue  # has this rank's numbers, and nothing else to know
        elif isinstance(module, ResidualNorm):
            module.spread(Passage(seams, "share"), seams.comm.size)
        elif isinstance(split, (ColumnSplit, VocabularySplit)):
            outputs = module.out_channels if isinstance(module, nn.Conv2d) else module.out_features
            if isinstance(module, Linear):
                _place(name, module, split, seams)
            else:
                setattr(module, "out_channels" if isinstance(module, nn.Conv2d) else "out_features", len(module.weight))
            if not _is_inside(name, splits):
                enter_at(module, seams)
            if split.joins:
                join_at(module, seams, outputs)


def _by(split: Split) -> str:
    return "row" if isinstance(split, RowSplit) else "column"


def _place(name: str, layer: Linear, split: Split, seams: Seams) -> None:
    """Tell a layer of its new sizes and of the other ranks. Its pieces are this rank's already."""
    by, ranks, inputs, outputs = _by(split), seams.comm.size, layer.in_features, layer.out_features
    if by == "row":
        inputs //= ranks
    elif isinstance(split, VocabularySplit):
        outputs = share(outputs, ranks, seams.comm.rank)[1]
    else:
        assert isinstance(split, ColumnSplit)
        outputs = max(1, (split.units or ranks) // ranks) * (outputs // (split.units or ranks))
    why_not = layer.kind.why_not(by, inputs if by == "row" else outputs)
    if why_not:
        raise UsageError(f"{name}: {why_not}")
    agree = (lambda most: seams.sum(most.contiguous(), "max")) if layer.kind.agrees(by) else None
    sums = isinstance(split, RowSplit) and split.sums
    leave = Passage(seams, "leave") if sums else None
    sharers = ranks if isinstance(split, RowSplit) and not sums else 1
    layer.stand(dataclasses.replace(layer.place, leave=leave, agree=agree, sharers=sharers), inputs, outputs)


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module in another's place; it takes over the other's parameters."""
    parent, _, last = name.rpartition(".")
    old = model.get_submodule(name)
    for parameter, value in old._parameters.items():
        new.register_parameter(parameter, value)
    setattr(model.get_submodule(parent), last, new)
