"""Queries, keys and values out of one product: turned by the tokens' angles, keys and values written to their pages.

The one idea: what lies between the product and attention is one pass over the product. In plain torch it is a dozen
launches, each of which a step that decodes a few tokens has to wait for.

Keys and values of 8 bits get a scale for each token and head, from the largest magnitude of that head's numbers.

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
from tilemesh.kernels.paged_attention.codes import code_scheme, put_pages
from tilemesh.kernels.rotary.kernel import turned

_HEADS = 8  # of a program, at most


@triton.jit
def codes_of(value, scale, FLOAT8: tl.constexpr):
    """Numbers of some heads as codes of 8 bits under the heads' scales (heads, 1), ties to the even one."""
    value = tl.div_rn(value.to(tl.float32), scale)  # the quotient itself, as codes.py has it
    if FLOAT8:
        code = float8_bits(value)
    else:
        code = tl.minimum(tl.maximum(nearest_whole(value), -128.0), 127.0).to(tl.int8)
    return code


@triton.jit
def nearest_whole(value):
    """What adding 1.5 x 2^23 leaves of a float32."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def float8_bits(value):
    """The bits of an e4m3: a float32's exponent and first three places, rounded, less the difference of the biases;
    below 2^-6 whole multiples of 2^-9."""
    size = tl.minimum(tl.abs(value), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 120 * 8
    code = tl.where(size < 0.015625, nearest_whole(size * 512.0).to(tl.int32), code)
    return (code + tl.where(value < 0, 128, 0)).to(tl.uint8)


@triton.jit
def turn_and_store(
    x, cos, sin, places, q, keys, values, key_scales, value_scales, H, K, W, x_s, x_t, c_t, s_t,
    PARTS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, ROTARY: tl.constexpr, WIDE: tl.constexpr,
    FLOAT8: tl.constexpr, HALF_RANGE: tl.constexpr, EARLY: tl.constexpr,
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
        turned_a, turned_b = turned(a, b, c, s)
    is_query = inside & (heads < H)
    to_q = q + (token.to(tl.int64) * H + heads) * (2 * W) + pairs
    tl.store(to_q, turned_a.to(q.dtype.element_ty), mask=is_query)
    tl.store(to_q + W, turned_b.to(q.dtype.element_ty), mask=is_query)
    place = tl.load(places + token)
    holds_keys = (heads >= H) & (heads < H + K) & (place >= 0)
    is_key = inside & holds_keys
    key_at = place * K + heads - H
    to_keys = keys + key_at * (2 * W) + pairs
    holds_values = (heads >= H + K) & (heads < H + 2 * K) & (place >= 0)
    is_value = inside & holds_values
    value_at = place * K + heads - H - K
    to_values = values + value_at * (2 * W) + pairs
    if key_scales is not None:
        most = tl.maximum(tl.max(tl.abs(turned_a), 1), tl.max(tl.abs(turned_b), 1)).to(tl.float32)
        scale = tl.maximum(most / HALF_RANGE, 1.1754943508222875e-38)[:, None]
        tl.store(key_scales + key_at, scale, mask=holds_keys)
        turned_a, turned_b = codes_of(turned_a, scale, FLOAT8), codes_of(turned_b, scale, FLOAT8)
        most = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1)).to(tl.float32)
        scale = tl.maximum(most / HALF_RANGE, 1.1754943508222875e-38)[:, None]
        tl.store(value_scales + value_at, scale, mask=holds_values)
        a, b = codes_of(a, scale, FLOAT8), codes_of(b, scale, FLOAT8)
    tl.store(to_keys, turned_a.to(keys.dtype.element_ty), mask=is_key)
    tl.store(to_keys + W, turned_b.to(keys.dtype.element_ty), mask=is_key)
    tl.store(to_values, a.to(values.dtype.element_ty), mask=is_value)
    tl.store(to_values + W, b.to(values.dtype.element_ty), mask=is_value)


def plan(places: Mapping[str, Place], *, kv_heads: int, rotary: bool, early: bool = False) -> LaunchPlan:
    x, q = places["x"], places["q"]
    tokens, heads, width = q.shape
    held = min(_HEADS, triton.next_power_of_2(heads + 2 * kv_heads))
    arguments: dict[str, Argument] = {"key_scales": None, "value_scales": None}
    arguments |= {name: Pointer(name) for name in places}
    code = code_scheme(places["keys"].dtype)
    arguments |= {"H": heads, "K": kv_heads, "W": width // 2, "x_s": x.strides[0], "x_t": x.strides[1]}
    arguments |= {"c_t": places["cos"].strides[0], "s_t": places["sin"].strides[0]}
    constants = {
        "PARTS": x.shape[0], "HEADS": held, "HALF": triton.next_power_of_2(width // 2), "ROTARY": rotary,
        "WIDE": x.dtype == "float64", "FLOAT8": code.format == "fp8", "HALF_RANGE": code.number.half_range,
        "EARLY": early,
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
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Write the keys and values of new tokens to their places and return their queries (T, H, E), both turned.

    qkv_STF: (S, T, (H + 2K) E), queries, keys and values of each token side by side, in S parts that are added up here.
    rotary: cosines and sines (T, E/2), or None to turn nothing. places_T: int64, which of the P x N places of `keys`
    and `values` (P, N, K, E, contiguous) a token takes; below 0: none. scales: of keys and of values, (P, N, K)
    float32 each, where these are codes: int8, or the bits of an fp8 as uint8. dtype: of the queries, then.
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
        return _by_torch(qkv_STF, rotary, places_T, keys, values, heads, scales, dtype)
    wanted = keys.dtype if scales is None else dtype or qkv_STF.dtype
    q_THE = torch.empty((qkv_STF.shape[1], heads, width), dtype=wanted, device=keys.device)
    if qkv_STF.stride(2) != 1:
        qkv_STF = qkv_STF.contiguous()
    cos, sin = (qkv_STF[0], qkv_STF[0]) if rotary is None else rotary
    given = {"x": qkv_STF, "cos": cos, "sin": sin, "places": places_T, "q": q_THE, "keys": keys, "values": values}
    written = ["q", "keys", "values"]
    if scales is not None:
        given |= {"key_scales": scales[0], "value_scales": scales[1]}
        written += ["key_scales", "value_scales"]
    launch = call.interpreted if how == "interpret" else call.compiled
    options = {"kv_heads": kv_heads, "rotary": rotary is not None, "early": launches_early(qkv_STF.device)}
    launch(plan, given, written=written, **options)
    return q_THE


def _by_torch(
    qkv_STF: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    places_T: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    scales: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype | None,
) -> Tensor:
    kv_heads, width = keys.shape[2:]
    qkv_TF = qkv_STF[0] if len(qkv_STF) == 1 else qkv_STF.sum(0)
    wanted = keys.dtype if scales is None else dtype or qkv_STF.dtype
    q_THE, k_TKE, v_TKE = qkv_TF.to(wanted).view(len(qkv_TF), -1, width).split((heads, kv_heads, kv_heads), 1)
    if rotary is not None:
        q_THE, k_TKE = (_turned(x, *rotary) for x in (q_THE, k_TKE))
    real_T = places_T >= 0
    put_pages(keys, None if scales is None else scales[0], places_T[real_T], k_TKE[real_T])
    put_pages(values, None if scales is None else scales[1], places_T[real_T], v_TKE[real_T])
    return q_THE.contiguous()


def _turned(x_THE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = accumulator(x_THE.dtype)
    a, b = x_THE.to(wide).chunk(2, -1)
    c, s = cos.to(wide)[:, None], sin.to(wide)[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x_THE.dtype)
