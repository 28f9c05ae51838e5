"""Attention over pages: the interpreted kernels against float64, what a token's bits depend on, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.program import Operand, compile_step
from tilemesh.kernels.paged_attention import cpu, kernel, store
from tilemesh.kernels.paged_attention.codes import CODES, put_pages, take_pages
from tilemesh.kernels.paged_attention.reference import BENCH, error_bound, exact, paged_attention
from tilemesh.kernels.paged_attention.store import store_pages

PAGE = 8
SEQUENCES = ((0, 5), (70, 1), (64, 4), (129, 2))
"""Tokens that each sequence has, and new ones: a prompt, decoding, a chunk at the edge of a block, one over three."""


def tiles_of(sequences: Sequence[tuple[int, int]], tile: int) -> Tensor:
    made, first = [(0, 0, 0, 0)], 0  # one of padding
    for row, (before, new) in enumerate(sequences):
        made += [(row, first + begin, min(tile, new - begin), before + begin) for begin in range(0, new, tile)]
        first += new
    return torch.tensor(made, dtype=torch.int32)


def make(
    sequences: Sequence[tuple[int, int]], kv_heads: int, group: int, width: int, dtype: torch.dtype, tile: int
) -> tuple[Tensor, ...]:
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    lengths = [-(-(before + new) // PAGE) for before, new in sequences]
    pages = list(range(sum(lengths) + 2))
    draw.shuffle(pages)
    keys, values = (torch.randn(len(pages), PAGE, kv_heads, width, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(sum(new for _, new in sequences), kv_heads * group, width, generator=generator).to(dtype)
    tables = torch.zeros(len(sequences), max(lengths), dtype=torch.int32)
    for row, count in enumerate(lengths):
        tables[row, :count] = torch.tensor([pages.pop() for _ in range(count)])
    return q, keys, values, tables, tiles_of(sequences, tile)


@pytest.mark.parametrize(
    ("dtype", "window", "split", "tile", "width", "cap"),
    [
        (torch.float64, 0, 64, 4, 16, 0.0),
        (torch.float64, 0, 0, 16, 16, 0.7),
        (torch.float32, 0, 0, 16, 20, 0.0),
        (torch.float32, 9, 0, 12, 20, 0.0),
        (torch.float32, 37, 64, 2, 16, 2.0),
        (torch.float16, 66, 0, 8, 64, 0.0),
        (torch.bfloat16, 0, 128, 3, 128, 1.0),
    ],
)
def test_the_kernels_are_within_their_bound(
    dtype: torch.dtype, window: int, split: int, tile: int, width: int, cap: float
) -> None:
    given = make(SEQUENCES, 2, 2, width, dtype, tile)
    options: dict[str, Any] = {"tile": tile, "split": split, "longest": 131, "window": window, "cap": cap}
    plain, options["sinks"] = exact(*given, **options), torch.tensor([-1.0, 4.0, 0.5, 2.0]).to(dtype)
    if tile in (2, 8, 16):
        options["sinks"] = None
    want, bound = exact(*given, **options), error_bound(*given, **options)
    assert options["sinks"] is None or excess(plain, want, bound) is not None
    for implementation in ("interpret", "torch"):
        found = paged_attention(*given, **options, implementation=implementation)
        assert excess(found, want, bound) is None
    # The bound sees a fault: another token's result, and scores without their cap.
    assert excess(found.roll(1, 0), want, bound) is not None
    assert not cap or excess(exact(*given, **{**options, "cap": 0.0}), want, bound) is not None


@pytest.mark.parametrize(
    ("code", "dtype", "split", "width"),
    [("int8", torch.float32, 64, 16), ("fp8", torch.float32, 0, 20), ("int8", torch.bfloat16, 0, 64)],
)
def test_keys_and_values_in_8_bits_are_what_their_codes_mean(
    code: str, dtype: torch.dtype, split: int, width: int
) -> None:
    tile = 4 if split else 16
    q, keys, values, tables, tiles = make(SEQUENCES, 2, 2, width, dtype, tile)
    coded, scales = [], []
    for pool in (keys, values):
        pages, page, kv_heads, _ = pool.shape
        held = torch.zeros(pool.shape, dtype=CODES[code])
        scale = torch.zeros(pages, page, kv_heads)
        put_pages(held, scale, torch.arange(pages * page), pool.view(-1, kv_heads, width))
        coded.append(held)
        scales.append(scale)
        # Half a step of a whole number, or an eighth of half of a number with three bits after the point.
        most = pool.float().abs().amax(-1, keepdim=True)
        half = 0.501 * most / 127.5 if code == "int8" else torch.maximum(pool.float().abs() / 15.9, most / 448 / 1000)
        off = take_pages(held, scale, torch.arange(pages), torch.float32) - pool.float()
        assert (off.abs() <= half).all()
    given = (q, *coded, tables, tiles, *scales)
    options = {"tile": tile, "split": split, "longest": 131}
    want, bound = exact(*given, **options), error_bound(*given, **options)
    for implementation in ("interpret", "torch"):
        found = paged_attention(*given, **options, implementation=implementation)
        assert excess(found, want, bound) is None
    with pytest.raises(UsageError, match="expected int8 or uint8"):
        paged_attention(q, *coded, tables, tiles, scales[0], None, **options)


@pytest.mark.parametrize(
    ("kv_heads", "group", "width", "window", "cap"),
    [(2, 1, 16, 0, 0.0), (1, 3, 20, 0, 0.0), (3, 2, 64, 37, 0.0), (2, 2, 33, 5, 0.8), (1, 1, 1, 0, 0.0)],
)
@pytest.mark.parametrize("threads", [1, 8])
def test_a_cpus_own_function_for_decoding_is_within_the_bound(
    kv_heads: int, group: int, width: int, window: int, cap: float, threads: int
) -> None:
    """With more threads than sequences heads are shared out too, and a token's bits are the same."""
    if cpu.library() is None:
        pytest.skip("no C compiler here")
    sequences = tuple((before, 1) for before in (0, 1, 2, 6, 7, 8, 63, 130))
    q, keys, values, tables, tiles = make(sequences, kv_heads, group, width, torch.float32, 1)
    assert cpu.serves_pages(torch.stack((keys, values)))
    sinks = None if width % 16 else torch.linspace(-1, 4, q.shape[1])
    options = {"longest": 131, "window": window, "cap": cap, "sinks": sinks}
    given = (q, keys, values, tables, tiles)
    positions = torch.tensor([before for before, _ in sequences])
    was = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = cpu.attend_decoding(q, keys, values, tables.long(), positions, 131, window, cap, sinks)
    finally:
        torch.set_num_threads(was)
    assert excess(found, exact(*given, **options), error_bound(*given, **options)) is None
    alone = cpu.attend_decoding(q[3:4], keys, values, tables[3:4].long(), positions[3:4], 7, window, cap, sinks)
    assert torch.equal(alone[0], found[3])


@pytest.mark.parametrize(
    ("kv_heads", "group", "width", "window", "cap"),
    [(2, 1, 16, 0, 0.0), (1, 3, 20, 0, 0.0), (3, 2, 64, 37, 0.0), (2, 2, 33, 5, 0.8), (1, 1, 1, 0, 0.0)],
)
@pytest.mark.parametrize(("tokens", "befores"), [(5, (0, 1, 130)), (70, (0, 3)), (33, (7,))])
def test_a_cpus_own_function_for_chunks_is_within_the_bound(
    kv_heads: int, group: int, width: int, window: int, cap: float, tokens: int, befores: tuple[int, ...]
) -> None:
    if cpu.library() is None:
        pytest.skip("no C compiler here")
    q, *rest = make(tuple((before, tokens) for before in befores), kv_heads, group, width, torch.float32, 1)
    keys, values, tables, _ = rest
    positions = torch.tensor([list(range(before, before + tokens)) for before in befores])
    sinks = None if width % 16 else torch.linspace(-1, 4, q.shape[1])
    limits = (window, cap, sinks)
    found = cpu.attend_chunks(q.view(-1, tokens, *q.shape[1:]), keys, values, tables.long(), positions, *limits)
    options = {"longest": 140, "window": window, "cap": cap, "sinks": sinks}
    want, bound = exact(q, *rest, **options), error_bound(q, *rest, **options)
    assert excess(found.flatten(0, 1), want, bound) is None
    assert excess(found.flatten(0, 1).flip(0), want, bound) is not None or width == 1
    alone = cpu.attend_chunks(
        q.view(-1, tokens, *q.shape[1:])[:1], keys, values, tables[:1].long(), positions[:1], *limits
    )
    assert torch.equal(alone[0], found[0])


@pytest.mark.parametrize("split", [0, 64])
def test_scores_that_are_all_minus_infinity_make_nan(split: int) -> None:
    """As in torch: a token sees its own key at least, so that no weight at all is no empty sum."""
    q, keys, *rest = make(SEQUENCES, 2, 2, 16, torch.float32, 4)
    q[5, 1, 3] = -torch.inf
    options = {"tile": 4, "split": split, "longest": 131, "implementation": "interpret"}
    lost = paged_attention(q, keys.abs(), *rest, **options).isnan()
    assert lost[5, 1].all()
    assert lost.sum() == 16


def test_a_tokens_bits_follow_from_its_own_sequence() -> None:
    """Whatever else is in the call, however the sequence is cut into calls, and however many parts run at once."""
    sequences, tile, split = ((70, 3), (128, 2)), 2, 64
    q, keys, values, tables, tiles = make(sequences, 1, 4, 16, torch.float32, tile)
    call: dict[str, Any] = {"tile": tile, "split": split, "implementation": "interpret"}
    together = paged_attention(q, keys, values, tables, tiles, longest=130, **call)
    for token, (row, position) in enumerate(((0, 70), (0, 71), (0, 72), (1, 128), (1, 129))):
        alone = torch.tensor([[0, 0, 1, position]], dtype=torch.int32)
        one = paged_attention(q[token : token + 1], keys, values, tables[row : row + 1], alone, longest=2048, **call)
        assert torch.equal(one[0], together[token])


def test_even_bits_do_not_follow_from_tiles_or_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of several tokens and of one, of which a program has a part, or all parts and adds them up by itself."""
    sequences = ((70, 3), (128, 2), (0, 5))
    q, keys, values, tables, tiles = make(sequences, 1, 4, 16, torch.float32, 3)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    call: dict[str, Any] = {"split": 64, "even": True, "implementation": "interpret"}
    found = []
    for full, tile in ((1, 3), (1000, 3), (1, 1), (1000, 1)):
        monkeypatch.setattr(kernel, "_FULL", full)
        options = {"tile": tile, "longest": 131 + full}  # a call of its own each, which is planned anew
        found.append(
            paged_attention(q, keys, values, tables, tiles_of(sequences, tile), sinks=sinks, **options, **call)
        )
    assert all(torch.equal(found[0], other) for other in found[1:])
    torch.testing.assert_close(found[0], paged_attention(q, keys, values, tables, tiles, sinks=sinks, tile=3))
    with pytest.raises(UsageError, match="even, and tile is 9, split 64: expected parts, and tiles of at most 8"):
        paged_attention(q, keys, values, tables, tiles, sinks=sinks, tile=9, **call)


def placed(dtype: str, *shape: int) -> Place:
    return Place(shape, torch.empty(shape, device="meta").stride(), dtype, aligned=True)


def bfloat16(*shape: int) -> Place:
    return placed("bfloat16", *shape)


POOL = bfloat16(4000, 16, 8, 128)


@pytest.mark.parametrize(("tile", "split", "even"), [(4, 256, False), (1, 1024, True), (1, 8192, True)])
def test_the_kernels_compile_for_an_h200(tile: int, split: int, even: bool) -> None:
    places = {"q": bfloat16(64, 32, 128), "keys": POOL, "values": POOL, "tables": placed("int32", 64, 512)}
    places |= {"tiles": placed("int32", 64, 4), "y": places["q"], "sinks": bfloat16(32)}
    planned = kernel.plan(places, tile=tile, split=split, longest=8192, window=4096, cap=50.0, even=even)
    operands = {name: Operand(one.dtype) for name, one in (places | planned.buffers).items()}
    for step in planned.steps:
        assert compile_step(step, operands, GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.parametrize("width", [16, pytest.param(128, marks=pytest.mark.slow)])  # of 128, 20 s for the compiler
def test_the_kernel_that_stores_compiles_for_an_h200(width: int) -> None:
    table, pool = placed("float32", 64, width // 2), bfloat16(4000, 16, 8, width)
    stored = {"x": bfloat16(64, 48 * width), "cos": table, "sin": table, "places": placed("int64", 64)}
    stored |= {"q": bfloat16(64, 32, width), "keys": pool, "values": pool}
    for step in store.plan(stored, kv_heads=8, rotary=True).steps:
        assert compile_step(step, {name: Operand(one.dtype) for name, one in stored.items()}, GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize("split", [0, 256])
def test_pages_are_looked_up_before_the_kernel_ahead_has_ended(split: int) -> None:
    """Only where they are settled; queries, which that kernel makes, and keys, of which it writes some, come after."""

    def place(dtype: str, *shape: int) -> Place:
        return Place(shape, torch.empty(shape, device="meta").stride(), dtype, aligned=True)

    pool, q = place("bfloat16", 4000, 16, 4, 64), place("bfloat16", 64, 32, 64)
    places = {"q": q, "keys": pool, "values": pool, "tables": place("int32", 64, 128), "tiles": place("int32", 64, 4)}
    places["y"] = q
    loads = {}
    for settled in (True, False):
        planned = kernel.plan(places, tile=1, split=split, longest=2048, window=0, early=True, settled=settled)
        operands = {name: Operand(one.dtype) for name, one in (places | planned.buffers).items()}
        ptx = compile_step(planned.steps[0], operands, GPUTarget("cuda", 90, 32)).asm["ptx"]
        before, after = ptx.split("griddepcontrol.wait")
        loads[settled] = before.count("ld.global")
        assert "cp.async.cg" not in before  # keys and values
        assert after.count("ld.global") > 0
        assert "griddepcontrol.launch_dependents" in after
    assert loads[False] == 0
    assert loads[True] >= 5  # four numbers of the tile, and the pages of the first block


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_the_kernels_of_8_bits_compile_for_an_h200(dtype: str) -> None:
    def place(dtype: str, *shape: int) -> Place:
        return Place(shape, torch.empty(shape, device="meta").stride(), dtype, aligned=True)

    pool, scale, q = place(dtype, 4000, 16, 8, 128), place("float32", 4000, 16, 8), place("bfloat16", 64, 32, 128)
    coded = {"keys": pool, "values": pool, "key_scales": scale, "value_scales": scale}
    places = {"q": q, **coded, "tables": place("int32", 64, 512), "tiles": place("int32", 64, 4), "y": q}
    planned = kernel.plan(places, tile=1, split=256, longest=8192, window=0)
    operands = {name: Operand(one.dtype) for name, one in (places | planned.buffers).items()}
    assert compile_step(planned.steps[0], operands, GPUTarget("cuda", 90, 32)).asm["ptx"]
    table = place("float32", 64, 64)
    stored = {"x": place("bfloat16", 1, 64, 48 * 128), "cos": table, "sin": table, "places": place("int64", 64)}
    stored |= {"q": q, **coded}
    for step in store.plan(stored, kv_heads=8, rotary=True).steps:
        assert compile_step(step, {name: Operand(one.dtype) for name, one in stored.items()}, GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("turned", "parts"), [(False, 1), (True, 1), (True, 3)])
def test_keys_and_values_are_stored_where_they_belong(dtype: torch.dtype, turned: bool, parts: int) -> None:
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randint(-9, 10, (parts, 5, (4 + 2 + 2) * 6), generator=generator).to(dtype) / 4  # sums are exact
    angle = torch.rand(5, 3, generator=generator) * 6
    rotary = (angle.cos(), angle.sin()) if turned else None
    places = torch.tensor([3, 0, -1, 17, 9])
    made = {}
    for implementation in ("torch", "interpret"):
        keys, values = (torch.full((5, 4, 2, 6), 7.0, dtype=dtype) for _ in range(2))
        q = store_pages(qkv, rotary, places, keys, values, heads=4, implementation=implementation)
        made[implementation] = (q, keys, values)
        assert int((keys != 7).flatten(2).any(-1).sum()) == 4  # nothing but the four places
        torch.testing.assert_close(values.view(20, 2, 6)[17], qkv.sum(0)[3].view(8, 6)[6:])
    torch.testing.assert_close(made["interpret"], made["torch"])


@pytest.mark.parametrize("code", ["int8", "fp8"])
def test_both_ways_store_the_same_codes(code: str) -> None:
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(1, 5, (4 + 2 + 2) * 6, generator=generator)
    places, made = torch.tensor([3, 0, -1, 17, 9]), {}
    for implementation in ("torch", "interpret"):
        keys, values = (torch.zeros((5, 4, 2, 6), dtype=CODES[code]) for _ in range(2))
        scales = (torch.zeros(5, 4, 2), torch.zeros(5, 4, 2))
        q = store_pages(qkv, None, places, keys, values, heads=4, scales=scales, implementation=implementation)
        held = zip((keys, values), scales, strict=True)
        made[implementation] = (q, *scales, *(take_pages(*pool, torch.arange(5), torch.float32) for pool in held))
        assert int((scales[0] > 0).any(-1).sum()) == 4
    torch.testing.assert_close(made["interpret"], made["torch"], rtol=1e-6, atol=0)


def test_what_cannot_be_is_refused() -> None:
    q, keys, values, tables, tiles = make(((0, 1),), 2, 2, 16, torch.float32, 1)
    with pytest.raises(UsageError, match="multiple of 64"):
        paged_attention(q, keys, values, tables, tiles, split=65)
    with pytest.raises(UsageError, match="expected int32 tables"):
        paged_attention(q, keys, values, tables.long(), tiles)
    with pytest.raises(UsageError, match="multiple of the key heads"):
        paged_attention(q[:, :3], keys, values, tables, tiles)
    with pytest.raises(UsageError, match="at most 128 rows"):
        paged_attention(q, keys, values, tables, tiles, tile=65)
    with pytest.raises(UsageError, match="expected \\(S, T, \\(H \\+ 2K\\) E\\)"):
        store_pages(q.flatten(1)[None], None, torch.zeros(1, dtype=torch.int64), keys, values, heads=4)


def test_a_benchmark_has_room_for_the_parts_of_any_sequence() -> None:
    for keys in (1000, 20_000):
        problem = BENCH.form.problem(f"1x{keys}x1x1x16", {})
        assert BENCH._options(problem)["longest"] == keys
