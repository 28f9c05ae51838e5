"""Queries, keys and values out of one product: turned by the tokens' angles, keys and values written to their pages.

The one idea: what lies between the product and attention is one pass over the product. In plain torch it is a dozen
launches, each of which a step that decodes a few tokens has to wait for.

S: parts of a sum; T: tokens; H: query heads; K: key and value heads; E: head width.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.early import take_turn
from tilemesh.kernels.launch import call
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.gpu import launches_early
from tilemesh.kernels.launch.implementation import implementation_of
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, Step, blocks

_HEADS = 8  # of a program, at most


@triton.jit
def turn_and_store(
    x, cos, sin, places, q, keys, values, H, K, W, x_s, x_t, c_t, s_t,
    PARTS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, ROTARY: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One token and up to HEADS of its H + 2K heads, of W pairs each. Reads x once and writes as much."""
    if EARLY:
        take_turn()
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    token = tl.program_id(0)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pairs = tl.arange(0, HALF)[None, :]
    inside = (heads < H + 2 * K) & (pairs < W)
    source = x + token.to(tl.int64) * x_t + heads * (2 * W) + pairs
    a = tl.zeros((HEADS, HALF), kind)
    b = tl.zeros((HEADS, HALF), kind)
    for _ in tl.static_range(PARTS):
        a += tl.load(source, mask=inside, other=0.0).to(kind)
        b += tl.load(source + W, mask=inside, other=0.0).to(kind)
        source += x_s
    turned_a, turned_b = a, b
    if ROTARY:
        c = tl.load(cos + token * c_t + pairs, mask=pairs < W, other=0.0).to(kind)
        s = tl.load(sin + token * s_t + pairs, mask=pairs < W, other=0.0).to(kind)
        turned_a, turned_b = a * c - b * s, b * c + a * s
    is_query = inside & (heads < H)
    to_q = q + (token.to(tl.int64) * H + heads) * (2 * W) + pairs
    tl.store(to_q, turned_a.to(q.dtype.element_ty), mask=is_query)
    tl.store(to_q + W, turned_b.to(q.dtype.element_ty), mask=is_query)
    place = tl.load(places + token)
    is_key = inside & (heads >= H) & (heads < H + K) & (place >= 0)
    to_keys = keys + (place * K + heads - H) * (2 * W) + pairs
    tl.store(to_keys, turned_a.to(keys.dtype.element_ty), mask=is_key)
    tl.store(to_keys + W, turned_b.to(keys.dtype.element_ty), mask=is_key)
    is_value = inside & (heads >= H + K) & (place >= 0)
    to_values = values + (place * K + heads - H - K) * (2 * W) + pairs
    tl.store(to_values, a.to(values.dtype.element_ty), mask=is_value)
    tl.store(to_values + W, b.to(values.dtype.element_ty), mask=is_value)


def plan(places: Mapping[str, Place], *, kv_heads: int, rotary: bool, early: bool = False) -> LaunchPlan:
    x, q = places["x"], places["q"]
    tokens, heads, width = q.shape
    held = min(_HEADS, triton.next_power_of_2(heads + 2 * kv_heads))
    arguments: dict[str, Argument] = {name: Pointer(name) for name in places}
    arguments |= {"H": heads, "K": kv_heads, "W": width // 2, "x_s": x.strides[0], "x_t": x.strides[1]}
    arguments |= {"c_t": places["cos"].strides[0], "s_t": places["sin"].strides[0]}
    constants = {
        "PARTS": x.shape[0], "HEADS": held, "HALF": triton.next_power_of_2(width // 2), "ROTARY": rotary,
        "WIDE": x.dtype == "float64", "EARLY": early,
    }  # fmt: skip
    grid = (tokens, blocks(heads + 2 * kv_heads, held))
    wide = any(place.wide for place in places.values())
    step = Step(f"{__name__}:turn_and_store", grid, arguments, constants, warps=2, wide=wide, early=early)
    return LaunchPlan((step,))


def store_pages(
    qkv_STF: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    places_T: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
    implementation: str = "auto",
) -> Tensor:
    """Write the keys and values of new tokens to their places and return their queries (T, H, E), both turned.

    qkv_STF: (S, T, (H + 2K) E), queries, keys and values of each token side by side, in S parts that are added up here.
    rotary: cosines and sines (T, E/2), or None to turn nothing. places_T: int64, which of the P x N places of `keys`
    and `values` (P, N, K, E, contiguous) a token takes; below 0: none.
    """
    kv_heads, width = keys.shape[2:]
    if qkv_STF.dim() != 3 or qkv_STF.shape[2] != (heads + 2 * kv_heads) * width or width % 2:
        raise UsageError(
            f"qkv has shape {tuple(qkv_STF.shape)} and keys {tuple(keys.shape)}: expected (S, T, (H + 2K) E) for "
            f"{heads} query heads, and an even width of a head"
        )
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise UsageError("keys and values: expected contiguous pools of pages")
    how = implementation_of(implementation, (qkv_STF,))
    if how == "torch":
        return _by_torch(qkv_STF, rotary, places_T, keys, values, heads)
    q_THE = torch.empty((qkv_STF.shape[1], heads, width), dtype=keys.dtype, device=keys.device)
    if qkv_STF.stride(2) != 1:
        qkv_STF = qkv_STF.contiguous()
    cos, sin = (qkv_STF[0], qkv_STF[0]) if rotary is None else rotary
    given = {"x": qkv_STF, "cos": cos, "sin": sin, "places": places_T, "q": q_THE, "keys": keys, "values": values}
    launch = call.interpreted if how == "interpret" else call.compiled
    options = {"kv_heads": kv_heads, "rotary": rotary is not None, "early": launches_early(qkv_STF.device)}
    launch(plan, given, written=("q", "keys", "values"), **options)
    return q_THE


def _by_torch(
    qkv_STF: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    places_T: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
) -> Tensor:
    kv_heads, width = keys.shape[2:]
    qkv_TF = qkv_STF[0] if len(qkv_STF) == 1 else qkv_STF.sum(0)
    q_THE, k_TKE, v_TKE = qkv_TF.to(keys.dtype).view(len(qkv_TF), -1, width).split((heads, kv_heads, kv_heads), 1)
    if rotary is not None:
        q_THE, k_TKE = (_turned(x, *rotary) for x in (q_THE, k_TKE))
    real_T = places_T >= 0
    keys.view(-1, kv_heads, width)[places_T[real_T]] = k_TKE[real_T]
    values.view(-1, kv_heads, width)[places_T[real_T]] = v_TKE[real_T]
    return q_THE.contiguous()


def _turned(x_THE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = accumulator(x_THE.dtype)
    a, b = x_THE.to(wide).chunk(2, -1)
    c, s = cos.to(wide)[:, None], sin.to(wide)[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x_THE.dtype)
