"""Steps that are launched and not waited for: tokens stay on the device until somebody reads them.

The one idea: where a step needs the tokens of the one before, it takes them from memory of the device, so the host can
plan and launch it while the one before still runs. Steps in which every request decodes are the same kernels on the
same memory for each number of rows: they are captured as a CUDA graph per number of rows (rounded up to one of a few)
and replayed; what differs is written into tensors that stay. Without CUDA the same code calls what it would capture.

N: rows, one per request that samples; R: sequences; M: pages of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tilemesh.core.errors import RunError
from tilemesh.model.sampling import keyed_uniform
from tilemesh.serve.attention import PagedKeyValues
from tilemesh.serve.batch import Batch, PageLayout, TileSet, TileSizes, make_batch, token_span
from tilemesh.serve.request import Sampling
from tilemesh.serve.sampling import DrawKind, RowDraws, TokenDraw, draw_on_device, kind_of
from tilemesh.serve.scheduler import UNKNOWN, Scheduled, ServeLimits, StepPlan

_INTS = ("known", "source", "position", "place", "count", "top_k")
_FLOATS = ("temperature", "top_p", "min_p", "uniform")
_NO_ROW = (0, -1, 0, -1, 0)
"""The first five numbers of a row of padding."""


class Replayed(Protocol):
    def replay(self) -> None: ...


class ServeGraphs(Protocol):
    """What captures a step: `measure.gpu.CudaGraphs`, or `PlainCalls`."""

    def warm(self, body: Callable[[], object]) -> None: ...

    def capture(self, body: Callable[[], object]) -> Replayed: ...


class PlainCalls:
    """In place of CUDA graphs: calls what would be replayed."""

    def warm(self, body: Callable[[], object]) -> None:
        body()

    def capture(self, body: Callable[[], object]) -> Replayed:
        return _Called(body)


@dataclass(frozen=True)
class _Called:
    body: Callable[[], object]

    def replay(self) -> None:
        self.body()


class DrawnTokens:
    """The tokens of a launched step, on their way to the host."""

    def __init__(self, names: Sequence[str], tokens_N: Tensor, staged: Tensor | None) -> None:
        self.names = tuple(names)
        self._event: Any = None
        self._tokens = tokens_N
        if staged is not None:
            self._tokens = staged[: len(tokens_N)]
            self._tokens.copy_(tokens_N, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> dict[str, int]:
        """By the requests' names; waits for the step. -1: its logits were NaN or infinite."""
        if self._event is not None:
            self._event.synchronize()
        return dict(zip(self.names, self._tokens.tolist(), strict=True))


class _Staging:
    """Host memory that a step's numbers are written into; pinned where they are then copied to a GPU.

    A row mostly has the pages and the sampling that it had when it was last written: they are written if they differ.
    """

    def __init__(self, rows: int, columns: int, pinned: bool) -> None:
        self.ints = torch.zeros(len(_INTS), rows, dtype=torch.int64, pin_memory=pinned)
        self.floats = torch.zeros(len(_FLOATS), rows, dtype=torch.float64, pin_memory=pinned)
        self.tables = torch.zeros(rows, columns, dtype=torch.int32, pin_memory=pinned)
        self.drawn = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        # The same memory, as numpy has it: a list is written there in a tenth of the time.
        self._ints, self._floats, self._tables = self.ints.numpy(), self.floats.numpy(), self.tables.numpy()
        self._pages: list[tuple[int, ...]] = [()] * rows
        self._samplings: list[Sampling | None] = [None] * rows
        self.kinds = [DrawKind.GREEDY] * rows

    def write(self, numbers: Sequence[Sequence[int]], rows: int) -> None:
        """The numbers of the first rows, of which the last ones are padding."""
        count = len(numbers[0])
        for index, (values, none) in enumerate(zip(numbers, _NO_ROW, strict=True)):
            self._ints[index, :count] = values
            self._ints[index, count:rows] = none

    def write_pages(self, row: int, pages: tuple[int, ...]) -> None:
        if self._pages[row] is not pages:
            self._pages[row] = pages
            self._tables[row, : len(pages)] = pages

    def write_sampling(self, row: int, drawing: TokenDraw, vocabulary: int) -> None:
        sampling = drawing.sampling
        if self._samplings[row] is not sampling:
            self._samplings[row], self.kinds[row] = sampling, kind_of(sampling, vocabulary)
            self._ints[-1, row] = sampling.top_k
            self._floats[:3, row] = sampling.temperature, sampling.top_p, sampling.min_p
        if sampling.temperature > 0:
            self._floats[3, row] = keyed_uniform(drawing.seed, drawing.answer, drawing.number)


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
        self._forward, self._cache, self._limits, self._vocabulary = forward, cache, limits, vocabulary
        self._tile_sizes, self._graphs, self._say = tile_sizes, graphs, say
        rows, columns = limits.running, limits.pages_for(limits.context)
        device = cache.device
        self._on_gpu = device.type == "cuda"
        self._staging = [_Staging(rows, columns, self._on_gpu) for _ in range(2)]  # one is read while one is written
        self._turn = 0
        with torch.inference_mode():
            self._ints = torch.zeros(len(_INTS), rows, dtype=torch.int64, device=device)
            self._floats = torch.zeros(len(_FLOATS), rows, dtype=torch.float64, device=device)
            self._tables = torch.zeros(rows, columns, dtype=torch.int32, device=device)
            self._drawn = torch.zeros(rows, dtype=torch.int64, device=device)
            self._numbers = torch.arange(rows, device=device)
        self._rows: dict[str, int] = {}  # where the last step left each request's token
        self._captured: dict[tuple[int, DrawKind], Replayed] = {}
        self._failed = False

    @torch.inference_mode()
    def launch(self, plan: StepPlan, drawings: Sequence[TokenDraw]) -> DrawnTokens:
        """Begin a step; `drawings` are those of its entries that sample, in their order."""
        self._turn = 1 - self._turn
        if not self._failed and all(entry.count == 1 and entry.samples for entry in plan.entries):
            return self._decode(plan.entries, drawings)
        return self._mixed(plan.entries, drawings)

    @torch.inference_mode()
    def prepare(self, rows: int, kind: DrawKind = DrawKind.GREEDY) -> None:
        """Capture the step of so many rows before anybody waits for it."""
        if not self._failed:
            self._fill((), (), self._bucket(rows))
            self._replay(self._bucket(rows), kind)

    def prepare_all(self) -> None:
        """Capture the steps of all numbers of rows, with tokens drawn in the two usual ways."""
        for rows in sorted({self._bucket(rows) for rows in range(1, self._limits.running + 1)}):
            for kind in (DrawKind.GREEDY, DrawKind.SAMPLED):
                self.prepare(rows, kind)

    # ---- every request decodes ---------------------------------------------------------------------------------

    def _decode(self, entries: Sequence[Scheduled], drawings: Sequence[TokenDraw]) -> DrawnTokens:
        rows = self._bucket(len(entries))
        staging = self._fill(entries, drawings, rows)
        self._replay(rows, max(staging.kinds[: len(entries)]))
        return self._left(entries, staging)

    def _fill(self, entries: Sequence[Scheduled], drawings: Sequence[TokenDraw], rows: int) -> _Staging:
        """Write the rows of a step and copy them to the device, in order with its steps."""
        staging, page_tokens = self._staging[self._turn], self._limits.page_tokens
        known: list[int] = []
        source: list[int] = []
        place: list[int] = []
        for row, (entry, drawing) in enumerate(zip(entries, drawings, strict=True)):
            request, at, pages = entry.request, entry.start, entry.pages
            last = request.tokens[at]
            known.append(last)
            source.append(self._rows[request.name] if last == UNKNOWN else -1)
            place.append(pages[at // page_tokens] * page_tokens + at % page_tokens)
            staging.write_pages(row, pages)
            staging.write_sampling(row, drawing, self._vocabulary)
        position = [entry.start for entry in entries]
        staging.write((known, source, position, place, [1] * len(entries)), rows)
        self._ints.copy_(staging.ints, non_blocking=True)
        self._floats.copy_(staging.floats, non_blocking=True)
        self._tables[:rows].copy_(staging.tables[:rows], non_blocking=True)
        return staging

    def _replay(self, rows: int, kind: DrawKind) -> None:
        def body() -> None:
            self._body(rows, kind)

        captured = self._captured.get((rows, kind))
        if captured is None and not self._failed:
            # Compiles kernels, and takes memory that stays. The tokens that it reads are put back: it is called again.
            before = self._drawn.clone()
            self._graphs.warm(body)
            self._drawn.copy_(before)
            try:
                captured = self._captured[rows, kind] = self._graphs.capture(body)
            except RunError as error:
                self._failed = True
                self._say(f"decoding {error}; steps are launched kernel by kernel")
        if captured is None:
            body()
        else:
            captured.replay()

    def _body(self, rows: int, kind: DrawKind) -> None:
        """A whole step of decoding, from `_ints`, `_floats` and `_tables` to `_drawn`."""
        known, source, position, place, count, top_k = self._ints[:, :rows]
        temperature, top_p, min_p, uniform = self._floats[:, :rows]
        # A row of which the last token was none (-1) is thrown away; it must not read outside of the table.
        tokens = torch.where(source >= 0, self._drawn[source.clamp(min=0)], known).clamp(min=0)
        number = self._numbers[:rows]
        tiles = torch.stack((number, number, count, position), 1).to(torch.int32)
        split = self._tile_sizes.split(rows, self._limits.context)
        layout = TileSet(0, rows, tiles, self._tile_sizes.decode, split, self._limits.context)
        batch = Batch(tokens[None], position[None], place, (), None, (), PageLayout(self._tables[:rows], (layout,)))
        logits_NV = self._forward(batch)
        self._drawn[:rows] = draw_on_device(logits_NV, RowDraws(temperature, uniform, top_k, top_p, min_p), kind)

    def _bucket(self, rows: int) -> int:
        """The number of rows that a step is captured for: powers of two, and from 16 on multiples of 16."""
        wanted = 1 << (rows - 1).bit_length() if rows <= 16 else -(-rows // 16) * 16
        return min(wanted, self._limits.running)

    # ---- prompts beside --------------------------------------------------------------------------------------

    def _mixed(self, entries: Sequence[Scheduled], drawings: Sequence[TokenDraw]) -> DrawnTokens:
        device = self._cache.device
        spans = [token_span(entry, all_logits=False) for entry in entries]
        batch = make_batch(spans, self._limits.page_tokens, device, tile_sizes=self._tile_sizes, even=True)
        unknown: list[tuple[int, int]] = []
        end = 0
        for piece in batch.pieces:
            end += piece.end - piece.begin
            if piece.tokens[-1] == UNKNOWN:
                unknown.append((end - 1, self._rows[piece.entry.request.name]))
        if unknown:
            at, source = torch.tensor(unknown).t().to(device, non_blocking=True)
            batch.tokens_1T[0, at] = self._drawn[source].clamp(min=0)
        by_name = {
            entry.request.name: drawing
            for entry, drawing in zip([entry for entry in entries if entry.samples], drawings, strict=True)
        }
        sampling = [piece.entry for piece in batch.pieces if piece.entry.samples]
        ordered = [by_name[entry.request.name] for entry in sampling]
        if sampling:  # of as many rows as a step that decodes has; the others draw again what the first does
            rows = self._bucket(len(sampling))
            ordered += ordered[:1] * (rows - len(ordered))
            assert batch.wanted is not None
            spare = batch.wanted[:1].expand(rows - len(batch.wanted))
            batch = replace(batch, wanted=torch.cat((batch.wanted, spare)))
        logits_NV = self._forward(batch)
        if sampling:
            floats = torch.tensor(_floats_of(ordered), dtype=torch.float64).t().to(device, non_blocking=True)
            top_k_N = torch.tensor([drawing.sampling.top_k for drawing in ordered]).to(device, non_blocking=True)
            temperature, top_p, min_p, uniform = floats
            draws = RowDraws(temperature, uniform, top_k_N, top_p, min_p)
            kind = max(kind_of(drawing.sampling, self._vocabulary) for drawing in drawings)
            self._drawn[: len(ordered)] = draw_on_device(logits_NV, draws, kind)
        return self._left(sampling, self._staging[self._turn])

    def _left(self, entries: Sequence[Scheduled], staging: _Staging) -> DrawnTokens:
        """What a step leaves: the tokens of these entries, in their order."""
        names = [entry.request.name for entry in entries]
        self._rows = {name: row for row, name in enumerate(names)}
        tokens_N = self._drawn[: len(names)]
        return (
            DrawnTokens(names, tokens_N, staging.drawn) if self._on_gpu else DrawnTokens(names, tokens_N.clone(), None)
        )


def _floats_of(drawings: Sequence[TokenDraw]) -> list[tuple[float, ...]]:
    made: list[tuple[float, ...]] = []
    for drawing in drawings:
        sampling, uniform = drawing.sampling, 0.0
        if sampling.temperature > 0:
            uniform = keyed_uniform(drawing.seed, drawing.answer, drawing.number)
        made.append((sampling.temperature, sampling.top_p, sampling.min_p, uniform))
    return made
