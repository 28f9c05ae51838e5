"""Steps that are launched and not waited for: tokens stay on the device until somebody reads them.

The one idea: where a step needs the tokens of the one before, it takes them from memory of the device, so the host can
plan and launch it while the one before still runs. Steps are the same kernels on the same memory for each number of
rows that decode, and for each number of tokens where prompts are computed (both rounded up to one of a few): they are
captured as a CUDA graph each and replayed; what differs is written into tensors that stay (staging.py). Without CUDA
the same code calls what it would capture.

N: rows, one per request that samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from tilemesh.core.errors import RunError
from tilemesh.serve.attention import PagedKeyValues
from tilemesh.serve.batch import Batch, PageLayout, TileSet, TileSizes
from tilemesh.serve.sampling import DrawKind, RowDraws, TokenDraw, draw_on_device
from tilemesh.serve.scheduler import Scheduled, ServeLimits, StepPlan
from tilemesh.serve.staging import RowColumns, Staging, StepMemory, StepSizes, rounded_tokens


class StepShape(NamedTuple):
    """What a captured step is made for."""

    of: Literal["rows", "tokens"]
    """Whether every request decodes, or prompts are computed beside."""
    size: int
    kind: DrawKind
    scored: bool = False
    """Whether log-probabilities of the drawn tokens are wanted."""


class Replayed(Protocol):
    def replay(self) -> None: ...


class ServeGraphs(Protocol):
    """What captures a step: `measure.gpu.CudaGraphs`, or `PlainCalls`."""

    def warm(self, body: Callable[[], object]) -> None: ...

    def capture(self, body: Callable[[], object]) -> Replayed: ...

    def forget(self) -> None: ...


class PlainCalls:
    """In place of CUDA graphs: calls what would be replayed."""

    def warm(self, body: Callable[[], object]) -> None:
        body()

    def capture(self, body: Callable[[], object]) -> Replayed:
        return _Called(body)

    def forget(self) -> None:
        pass


@dataclass(frozen=True)
class _Called:
    body: Callable[[], object]

    def replay(self) -> None:
        self.body()


class DrawnTokens:
    """The tokens of a launched step, on their way to the host, and their log-probabilities where they are wanted."""

    def __init__(self, names: Sequence[str], drawn: Sequence[Tensor], staged: Sequence[Tensor] | None) -> None:
        """`names`: whose they are, where anybody asks by name. `drawn`: tokens (N), or tokens and scores (2, N).
        `staged`: pinned memory of the host for each, on a GPU."""
        self.names = tuple(names)
        self._event: Any = None
        self._drawn = list(drawn)
        if staged is not None:
            self._drawn = [into[..., : len(drawn[0])] for into in staged[: len(drawn)]]
            for into, part in zip(self._drawn, drawn, strict=True):
                into.copy_(part, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> dict[str, int]:
        """By the requests' names; waits for the step. -1: its logits were NaN or infinite."""
        return dict(zip(self.names, self.rows()[0].tolist(), strict=True))

    def scores(self) -> dict[str, tuple[float, float]]:
        """Log-probabilities of what was read: the model's own, and as sampled; empty where nobody wants any."""
        if len(self._drawn) < 2:
            return {}
        return dict(zip(self.names, zip(*self._drawn[1].tolist(), strict=True), strict=True))

    def rows(self) -> list[NDArray[Any]]:
        """Tokens (N), and scores (2, N) where they are wanted; waits for the step, and is good until the next."""
        if self._event is not None:
            self._event.synchronize()
        return [part.numpy() for part in self._drawn]


class DeviceSteps:
    """Launches the steps of a model over pages. `forward(batch)` gives the logits of a batch's wanted tokens."""

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        cache: PagedKeyValues,
        limits: ServeLimits,
        vocabulary: int,
        tile_sizes: TileSizes,
        graphs: ServeGraphs,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._forward, self._limits, self._tile_sizes = forward, limits, tile_sizes
        self._graphs, self._say = graphs, say
        self._sizes = StepSizes(limits, tile_sizes.prompt)
        self._on_gpu = cache.device.type == "cuda"
        self._vocabulary = vocabulary
        self._turn = 0
        with torch.inference_mode():
            self._memory = StepMemory(self._sizes, cache.device)
        self._rows: dict[str, int] = {}  # where the last step left each request's token
        self._warm: set[StepShape] = set()
        self._captured: dict[StepShape, Replayed] = {}
        self._failed = False

    @functools.cached_property
    def _staging(self) -> list[Staging]:
        """One is read by the device while the other is written."""
        return [Staging(self._sizes, self._vocabulary, self._on_gpu) for _ in range(2)]

    @torch.inference_mode()
    def rehearse(self) -> None:
        """All that steps of all sizes do on the device, in the order of `prepare_all`."""
        for kind in (DrawKind.GREEDY, DrawKind.SAMPLED):
            for tokens in reversed(self._sizes.all_tokens()):
                self._prompting(tokens, kind)
            for rows in self._all_rows():
                self._decoding(rows, kind)

    def _all_rows(self) -> list[int]:
        return sorted({self._sizes.rows(rows) for rows in range(1, self._limits.running + 1)})

    @torch.inference_mode()
    def launch(self, plan: StepPlan, drawings: Sequence[TokenDraw]) -> DrawnTokens:
        """Begin a step; `drawings` are those of its entries that sample, in their order."""
        self._turn = 1 - self._turn
        scored = any(drawing.sampling.logprobs is not None for drawing in drawings)
        if all(entry.count == 1 and entry.samples for entry in plan.entries):
            return self._decode(plan.entries, drawings, scored)
        return self._mixed(plan.entries, drawings, scored)

    @torch.inference_mode()
    def launch_rows(self, columns: RowColumns) -> DrawnTokens:
        """Begin a step of rows that decode, all of which were in the last."""
        self._turn = 1 - self._turn
        count, kind, scored = len(columns.source), columns.kind, columns.scored
        rows = self._sizes.rows(count)
        self._staging[self._turn].write_columns(columns, rows)
        self._copy(rows, rows, 0, kind)
        self._run(StepShape("rows", rows, kind, scored), partial(self._decoding, rows, kind, scored))
        return self._left((), count, scored)

    @torch.inference_mode()
    def prepare(self, rows: int, kind: DrawKind = DrawKind.GREEDY) -> None:
        """Capture the step in which so many rows decode before anybody waits for it."""
        rows = self._sizes.rows(rows)
        self._staging[self._turn].write_decoding((), (), {}, rows)
        self._copy(rows, rows, 0, kind)
        self._capture(StepShape("rows", rows, kind), partial(self._decoding, rows, kind))

    @torch.inference_mode()
    def prepare_prompts(self, tokens: int, kind: DrawKind = DrawKind.GREEDY) -> None:
        """The same for a step of so many tokens with prompts."""
        tokens = rounded_tokens(tokens)
        self._staging[self._turn].write_prompts((), (), {}, tokens)
        self._copy(tokens, 0, self._sizes.tiles(tokens), kind)
        self._capture(StepShape("tokens", tokens, kind), partial(self._prompting, tokens, kind))

    def prepare_all(self) -> None:
        """Capture steps of all sizes, with tokens drawn in the two usual ways."""
        for kind in (DrawKind.GREEDY, DrawKind.SAMPLED):
            for tokens in reversed(self._sizes.all_tokens()):  # the largest first: the others fit into its memory
                self.prepare_prompts(tokens, kind)
            for rows in self._all_rows():
                self.prepare(rows, kind)

    def forget(self) -> None:
        """Drop what was captured: the memory that it reads is given back."""
        self._warm.clear()
        self._captured.clear()
        self._graphs.forget()

    def _capture(self, shape: StepShape, body: Callable[[], None]) -> None:
        for _ in range(2):
            if shape not in self._captured and not self._failed:
                self._run(shape, body)

    def _run(self, shape: StepShape, body: Callable[[], None]) -> None:
        """The first time in a way that compiles kernels and takes memory that stays; captured the second time."""
        captured = self._captured.get(shape)
        if captured is None and shape not in self._warm and not self._failed:
            self._warm.add(shape)
            self._graphs.warm(body)
            return
        if captured is None and not self._failed:
            try:
                captured = self._captured[shape] = self._graphs.capture(body)
            except RunError as error:
                self._failed = True
                self._say(f"a step {error}; steps are launched kernel by kernel")
        if captured is None:
            body()
        else:
            captured.replay()

    def _copy(self, tokens: int, rows: int, tiles: int, kind: DrawKind) -> None:
        """The step's numbers to the device, in order with its steps: of so many tokens, sequences and tiles."""
        host, memory, drawn = self._staging[self._turn].host, self._memory, self._sizes.drawn(tokens)
        if tiles:
            pairs = [(memory.of_tokens(tokens), host.of_tokens(tokens))]
        else:
            pairs = [(memory.of_rows(rows), host.of_rows(rows))]
        pairs.append((memory.tables[:rows], host.tables[:rows]))
        if kind is not DrawKind.GREEDY:
            pairs.append((memory.floats, host.floats))
        if tiles:
            pairs += [(memory.tiles[:tiles], host.tiles[:tiles]), (memory.wanted[:drawn], host.wanted[:drawn])]
        for to, written in pairs:
            to.copy_(written, non_blocking=True)

    # ---- every request decodes ---------------------------------------------------------------------------------

    def _decode(self, entries: Sequence[Scheduled], drawings: Sequence[TokenDraw], scored: bool) -> DrawnTokens:
        rows = self._sizes.rows(len(entries))
        kind = self._staging[self._turn].write_decoding(entries, drawings, self._rows, rows)
        self._copy(rows, rows, 0, kind)
        self._run(StepShape("rows", rows, kind, scored), partial(self._decoding, rows, kind, scored))
        return self._left([entry.request.name for entry in entries], len(entries), scored)

    def _decoding(self, rows: int, kind: DrawKind, scored: bool = False) -> None:
        """A whole step of decoding, from numbers in the device's memory to drawn tokens there."""
        tokens, position, place = self._tokens_of(rows)
        tiles, tables = self._memory.tiles_of_rows(rows), self._memory.tables[:rows]
        split = self._tile_sizes.split(rows, self._limits.context)
        layout = TileSet(0, rows, tiles, self._tile_sizes.decode, split, self._limits.context)
        batch = Batch(tokens[None], position[None], place, (), None, (), PageLayout(tables, (layout,)))
        self._draw(self._forward(batch), kind, scored)

    def _tokens_of(self, count: int) -> tuple[Tensor, ...]:
        _, source, position, place = self._memory.of_tokens(count)
        # A token that the last step could not draw (-1) is thrown away; it must not read outside of the table.
        tokens = self._memory.numbers[source].clamp(min=0)
        return tokens, position, place

    def _draw(self, logits_NV: Tensor, kind: DrawKind, scored: bool) -> None:
        rows = len(logits_NV)
        temperature, top_k, top_p, min_p, uniform = self._memory.floats[:, :rows]
        if kind is DrawKind.FILTERED:
            top_k = top_k.to(torch.int64)
        draws = RowDraws(temperature, uniform, top_k, top_p, min_p)
        tokens_N, scores_2N = draw_on_device(logits_NV, draws, kind, scored, self._tile_sizes.even)
        self._memory.drawn[:rows] = tokens_N
        if scores_2N is not None:
            self._memory.scores[:, :rows] = scores_2N

    # ---- prompts beside --------------------------------------------------------------------------------------

    def _mixed(self, entries: Sequence[Scheduled], drawings: Sequence[TokenDraw], scored: bool) -> DrawnTokens:
        by_name = {
            entry.request.name: drawing
            for entry, drawing in zip([entry for entry in entries if entry.samples], drawings, strict=True)
        }
        ordered = sorted(entries, key=lambda entry: (entry.count, entry.start))
        sampling = [entry for entry in ordered if entry.samples]
        tokens = rounded_tokens(sum(entry.count for entry in entries))
        in_order = [by_name[entry.request.name] for entry in sampling]
        kind = self._staging[self._turn].write_prompts(ordered, in_order, self._rows, tokens)
        self._copy(tokens, len(ordered), self._sizes.tiles(tokens), kind)
        self._run(StepShape("tokens", tokens, kind, scored), partial(self._prompting, tokens, kind, scored))
        return self._left([entry.request.name for entry in sampling], len(sampling), scored)

    def _prompting(self, tokens: int, kind: DrawKind, scored: bool = False) -> None:
        """A whole step with prompts. Tokens that decode are tiles of prompts as well: one kernel attends to all."""
        made, position, place = self._tokens_of(tokens)
        memory, rows = self._memory, self._sizes.drawn(tokens)
        tiles = memory.tiles[: self._sizes.tiles(tokens)]
        layout = TileSet(0, tokens, tiles, self._tile_sizes.prompt, self._tile_sizes.prompt_split, self._limits.context)
        pages = PageLayout(memory.tables, (layout,))
        batch = Batch(made[None], position[None], place, (), memory.wanted[:rows], (), pages)
        self._draw(self._forward(batch), kind, scored)

    def _left(self, names: Sequence[str], count: int, scored: bool) -> DrawnTokens:
        """What a step leaves: so many rows, of these requests where their names are known."""
        self._rows = {name: row for row, name in enumerate(names)}
        drawn = [self._memory.drawn[:count]]
        if scored:
            drawn.append(self._memory.scores[:, :count])
        if not self._on_gpu:
            return DrawnTokens(names, [part.clone() for part in drawn], None)
        host = self._staging[self._turn].host
        return DrawnTokens(names, drawn, (host.drawn, host.scores))
