"""A step's plan done by a model: pages copied, one pass over the step's tokens, logits where they are wanted.

The model is `model/transformer.py`, the same modules that training uses; only its cache is one of pages.
In invariant mode that model computes a token's bits from its own sequence alone (`model/invariant.py`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.kernels.launch.gpu import launches_early
from tilemesh.kernels.row_linear.cost import GATES
from tilemesh.kernels.row_linear.reference import row_linear
from tilemesh.model.experts import Experts
from tilemesh.model.kinds import Adapted, FewBits, note_silent, projections
from tilemesh.model.linear import DENSE, DenseMatrix
from tilemesh.model.norm import ResidualNorm
from tilemesh.model.packed import FEW_ROWS, Packed, forget_packed, multiplies_few, pack_products, packed_bytes, packs
from tilemesh.model.programs.explain import explain
from tilemesh.model.programs.group import group_layers
from tilemesh.model.programs.prepare import prepare
from tilemesh.model.programs.program import Use
from tilemesh.model.rotary import RotaryTable
from tilemesh.model.transformer import ResidualStream, Transformer
from tilemesh.serve.attention import PagedKeyValues
from tilemesh.serve.batch import AttentionGroup, Batch, TokenSpan, make_batch, token_span
from tilemesh.serve.device_steps import DeviceSteps, DrawnTokens, ServeGraphs
from tilemesh.serve.memory import GivenBack, free_cpu_bytes
from tilemesh.serve.request import ServeRequest
from tilemesh.serve.sampling import RowDraws, draw_on_device
from tilemesh.serve.scheduler import ServeLimits, StepPlan
from tilemesh.serve.staging import RowColumns

POOLINGS = ("mean", "last")
_PACKED_SHARE = 0.25
"""Of a CPU's free memory: what weights in a second layout may take."""


class RequestLogits(NamedTuple):
    """Logits after some tokens of one request, which stand one after the other."""

    first: int
    """Position of the first token whose logits these are."""
    step_NV: Tensor
    """All logits of the step, or of one pass of it."""
    begin: int
    rows: int
    """Which of them are this request's."""

    @property
    def logits_NV(self) -> Tensor:
        return self.step_NV[self.begin : self.begin + self.rows]


def logits_by_request(spans: Iterable[TokenSpan], step_NV: Tensor) -> dict[str, RequestLogits]:
    """Of those of these spans whose logits are wanted, which stand one after the other."""
    by_name, begin = dict[str, RequestLogits](), 0
    for span in spans:
        if span.wanted:
            by_name[span.entry.request.name] = RequestLogits(span.wanted.start, step_NV, begin, len(span.wanted))
            begin += len(span.wanted)
    return by_name


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.device


class Runner:
    def __init__(
        self,
        model: Transformer,
        limits: ServeLimits,
        device: torch.device | str = "cpu",
        invariant: bool = False,
        implementation: str = "auto",
        graphs: ServeGraphs | None = None,
        say: Callable[[str], None] = lambda text: None,
        packed: bool | None = None,
    ) -> None:
        """`implementation`: of the kernels of attention, see `PagedKeyValues`. `graphs`: what captures steps that are
        launched ahead; without, every step is waited for. `say` hears where capturing fails. `packed`: whether a CPU's
        products have weights of their own layout; None: where this CPU has such products and there is memory."""
        self.model = model
        self._say = say
        self.limits = limits
        self.device = torch.device(device)
        self.invariant = invariant
        self.cache = PagedKeyValues(
            limits.pages, limits.page_tokens, limits.context, self.device, limits.swap_pages, invariant,
            implementation, limits.kv_cache, limits.local_pages,
        )  # fmt: skip
        config = model.config
        itemsize = next(model.parameters()).element_size()
        self._like = next(model.parameters())
        kinds = (layer.kind for _, layer in projections(model))
        self._adapter_rows = next((kind.rows for kind in kinds if isinstance(kind, Adapted)), None)
        self._tile_sizes = self.cache.tile_sizes(config.heads, config.kv_heads, config.head_width, itemsize)
        self.programs = prepare(model, self._use(), self.device)
        self._given_back: GivenBack | None = None  # the weights' memory
        self._rotary = RotaryTable.of(config, next(model.parameters()))
        self._choose_kinds(packed)
        self.ahead: DeviceSteps | None = None
        """Launches steps without waiting for their tokens, where that can be done."""
        # How many rows each expert has is known when the router has run: where the host asks, steps are waited for.
        waits = any(isinstance(module, Experts) and module.waits_for_loads for module in model.modules())
        if graphs is not None and self._tile_sizes is not None and not waits:
            self.ahead = DeviceSteps(self._pass, self.cache, limits, config.vocabulary, self._tile_sizes, graphs, say)

    def _use(self) -> Use:
        return Use(
            side_by_side=self.cache.joins(next(self.model.parameters()).dtype),
            single_rows=self.device.type == "cuda" and self._has_row_kernel(),
            launches_early=launches_early(self.device),
            invariant=self.invariant,
        )

    def _choose_kinds(self, packed: bool | None) -> None:
        """Matrices as a CPU's products want them, or with a GPU's kernels for one token; and a GPU's norms."""
        if self.invariant:
            return  # they are chosen already
        if self.device.type == "cpu" and (self._can_pack() if packed is None else packed):
            pack_products(self.model, self.programs.groups)
        elif not self.cache.by_kernel and multiplies_few(self._like.dtype):
            pack_products(self.model, self.programs.groups, lambda weight, parts: FEW_ROWS)
        if self.device.type == "cuda":
            for module in self.model.modules():
                if isinstance(module, ResidualNorm):
                    module.compute_by("auto")
            for _, layer in projections(self.model):
                if layer.kind == DENSE:
                    layer.become(DenseMatrix(self.programs.use.single_rows))
                elif isinstance(layer.kind, FewBits):
                    layer.become(replace(layer.kind, settled=True))

    def _can_pack(self) -> bool:
        # On x86-64 such products are quicker as well, but whole steps were not (docs/serve/LOG.md).
        on_arm = platform.machine() in ("aarch64", "arm64")
        if not on_arm or not packs(next(self.model.parameters()).dtype):
            return False
        return packed_bytes(self.model) <= _PACKED_SHARE * free_cpu_bytes()

    def _has_row_kernel(self) -> bool:
        """Whether the products of a single token can be our kernel's: tried once, before anybody waits for it."""
        x = torch.ones(1, 64, dtype=next(self.model.parameters()).dtype, device=self.device)
        try:
            for gate in GATES:
                row_linear(x, torch.ones(16, 64, dtype=x.dtype, device=x.device), gate=gate)
        except Exception as error:
            self._say(f"one row times a matrix is left to torch: {type(error).__name__}: {error}")
            return False
        return True

    def explain(self) -> list[str]:
        """Which programs compute the model, in lines."""
        is_packed = any(isinstance(layer.kind, Packed) for _, layer in projections(self.model))
        steps = "a step is captured as one graph for each size" if self.ahead is not None else "steps are not captured"
        layout = "in the layout of this CPU's products" if is_packed else "as they are stored"
        return [*explain(self.programs), f"  weights are read {layout}; {steps}"]

    @torch.inference_mode()
    def write_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Other values in the memory that computes already, cast on their way: what captured steps read, and what
        projections of a group share, stays where it is. A tensor that is that very memory is not copied."""
        parameters = dict(self.model.named_parameters())
        if self._given_back is not None:
            self._given_back.take(values=False)
            self._given_back = None
        self._wait()  # for whoever computed them, on whatever stream
        for name, tensor in tensors:
            into, part = parameters[name], self._part(name, tensor)
            if _memory_of(part) != _memory_of(into):
                into.copy_(part)
        self._wait()  # or their owner might change them meanwhile
        forget_packed(self.model, self.programs.groups)
        note_silent((*self.model.modules(), *group_layers(self.programs.groups)))

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        """What this process computes with of a whole parameter."""
        return tensor

    def sleep(self, level: int) -> None:
        """Give the memory of pages back; at level 2 that of weights too, which move to the host from a GPU and are lost
        on a CPU until `write_weights`."""
        self._wait()
        if self.ahead is not None:
            self.ahead.forget()
        self.cache.sleep()
        if level == 2 and self._given_back is None:
            self._given_back = GivenBack(self.model.parameters(), keep=self.device.type == "cuda")
            forget_packed(self.model, self.programs.groups)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take all of it again."""
        if self._given_back is not None:
            self._given_back.take()
            self._given_back = None
        self.cache.wake()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, wants_all: Callable[[ServeRequest], bool] = lambda request: False
    ) -> Mapping[str, RequestLogits]:
        """Logits by the requests' names: those that something is drawn from, or of all tokens where so wanted."""
        self.copy_pages(plan)
        return self.compute([token_span(entry, wants_all(entry.request)) for entry in plan.entries])

    def copy_pages(self, plan: StepPlan) -> None:
        self.cache.copy_out(plan.swapped_out)
        self.cache.copy_in(plan.swapped_in)

    @torch.inference_mode()
    def compute(self, spans: Sequence[TokenSpan]) -> Mapping[str, RequestLogits]:
        """Keys and values of these tokens into their pages; the logits that are wanted, by the requests' names."""
        if not spans:
            return {}
        padded = not self.cache.joins(self._like.dtype)
        batch = make_batch(spans, self.limits.page_tokens, self.device, self._tile_sizes, padded)
        return logits_by_request(batch.pieces, self._pass(batch))

    @property
    def decode_rows(self) -> Callable[[RowColumns], DrawnTokens] | None:
        """Takes a step of rows that decode, whose tokens are known, at once; None where attention is no C function."""
        in_c = not self.cache.by_kernel and self.cache.joins(self._like.dtype)
        return self._decode_rows if in_c else None

    @torch.inference_mode()
    def _decode_rows(self, columns: RowColumns) -> DrawnTokens:
        assert columns.known is not None
        numbers = torch.from_numpy(np.stack((columns.known, columns.position, columns.place)))
        pages, rows = torch.from_numpy(columns.tables.astype(np.int64)), len(columns.position)
        group = AttentionGroup(0, rows, 1, pages, int(columns.position.max()) + 1, None, False)
        logits_NV = self._pass(Batch(numbers[:1], numbers[1:2], numbers[2], (group,), None, ()))
        temperature, top_k, top_p, min_p, uniform = torch.from_numpy(np.ascontiguousarray(columns.floats))
        draws = RowDraws(temperature, uniform, top_k.to(torch.int64), top_p, min_p)
        tokens_N, scores_2N = draw_on_device(logits_NV, draws, columns.kind, columns.scored)
        return DrawnTokens((), [tokens_N] if scores_2N is None else [tokens_N, scores_2N], None)

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int], pooling: str, adapter: int = 0) -> list[float]:
        """What the last norm gives for these tokens, one vector of length 1: their mean, or that of the last."""
        if self._adapter_rows is not None:
            self._adapter_rows.choose([adapter] * len(tokens), self._like)
        tokens_1T = torch.tensor([list(tokens)], device=self.device)
        now = self.model.prepare(tokens_1T)
        stream = ResidualStream(self.model.enter(tokens_1T, None, now))
        for layer in self.model.layers:
            stream = layer(stream, now)
        x_TD = self.model.normalize(stream)[0].float()
        vector: list[float] = functional.normalize(x_TD[-1] if pooling == "last" else x_TD.mean(0), dim=0).tolist()
        return vector

    def _pass(self, batch: Batch) -> Tensor:
        """Logits of the wanted tokens. Those of the others are never computed."""
        if self._adapter_rows is not None:
            self._adapter_rows.choose(batch.adapters, self._like)
        now = self.model.prepare(batch.tokens_1T, cache=self.cache.prepare(batch), table=self._rotary)
        x_TD = self.programs.last(self.programs.enter(batch.tokens_1T, None, now), now)[0]
        return self._project(x_TD if batch.wanted is None else x_TD[batch.wanted])

    def _project(self, x_TD: Tensor) -> Tensor:
        return self.programs.project(x_TD)
