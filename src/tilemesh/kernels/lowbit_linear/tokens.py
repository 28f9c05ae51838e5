"""The CUDA kernels of `int4.cu` and, for one token, `int4_token.cu`: which form serves how many tokens and outputs,
compiled by NVRTC when first asked for.

Triton chooses where numbers lie in registers, and moves codes through shared memory into the order that tensor cores
want; these kernels choose an order in which they need not move. They take groups of 128 inputs or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.gpu import device_index, gpu_of, launches_early
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, Step

_FOLDER = Path(__file__).parent
_CHUNK, _FEW_WARPS = 128, 8  # as in the source
MOST = 16
"""Tokens that a block takes at a time; with more, codes are unpacked again."""
_WARPS, _SHARED = 16, 48 << 10
"""Of a block for one token: the most warps whose loads fit into registers, and shared memory that needs no asking."""
_TURNS = 8
"""Of a warp, for one token: with fewer, fewer warps share the inputs."""
_LONG = 4096
"""Inputs up to which four warps have room for them beside the codes."""
_NARROW = 4096
"""Outputs up to which blocks have fewer of them, so that all multiprocessors work."""


@dataclass(frozen=True)
class TokenForm:
    """Constants of one compiled kernel: 16 outputs and 8 tokens each, loads ahead, blocks of a multiprocessor."""

    strips: int
    tiles: int
    depth: int
    blocks: int

    def grid(self, tokens: int, outputs: int) -> tuple[int, int]:
        return -(-outputs // (16 * self.strips)), -(-tokens // (8 * self.tiles))


@dataclass(frozen=True)
class OneTokenForm:
    """Constants of one compiled kernel for one token: warps of a block, how many share 16 outputs, loads ahead, blocks
    of a multiprocessor."""

    warps: int
    ways: int
    depth: int = 6
    blocks: int = 1

    @property
    def outputs(self) -> int:
        return 16 * self.warps // self.ways

    def grid(self, tokens: int, outputs: int) -> tuple[int, int]:
        return -(-outputs // self.outputs), 1

    def shared_bytes(self, inputs: int) -> int:
        return 2 * inputs + 4 * (inputs // _CHUNK) + 68 * self.warps


def one_token_form(outputs: int, inputs: int, multiprocessors: int, settled: bool = False) -> OneTokenForm | None:
    """A block for each multiprocessor, where that is enough: its part of the outputs, 16 to a warp or to several. Where
    it is not, several small ones, so that some multiply while another one begins. settled: see `product`."""
    strips = -(-outputs // (16 * multiprocessors))
    if strips > _WARPS:
        warps = 4 if inputs <= _LONG else 8  # so that a row of activations fits into the registers
        form = OneTokenForm(warps, 1, blocks=16 // warps)
    else:
        ways = 1 << ((_WARPS // strips).bit_length() - 1)
        # Where warps have few turns, all their codes are on their way before the kernel ahead has ended: what is left
        # is to put activations in place, and half as many blocks do that half as often.
        are_few = settled and ways > 1 and inputs // _CHUNK < _TURNS * ways
        if are_few and outputs // (32 * strips) >= 0.45 * multiprocessors:
            strips, ways = 2 * strips, ways // 2
        form = OneTokenForm(strips * ways, ways)
    return form if form.outputs <= outputs and form.shared_bytes(inputs) < _SHARED else None


def form_of(
    tokens: int, outputs: int, inputs: int, multiprocessors: int, settled: bool = False
) -> TokenForm | OneTokenForm:
    """By the numbers of tokens and outputs; docs/compress/LOG.md has what was measured."""
    one = one_token_form(outputs, inputs, multiprocessors, settled) if tokens == 1 else None
    if one is not None:
        return one
    if tokens <= 8:
        return TokenForm(1, 1, 4, 2) if outputs <= _NARROW else TokenForm(2, 1, 2, 2)
    return TokenForm(2, 2, 3, 1) if outputs <= _NARROW else TokenForm(4, 2, 2, 1)


def serves(x: Tensor, scales: Tensor, code: str) -> bool:
    """Whether there is such a kernel for these activations."""
    if x.device.type != "cuda" or code != "int4" or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    inputs = x.shape[-1]
    fits = inputs % _CHUNK == 0 and inputs // scales.shape[1] % _CHUNK == 0 and scales.numel() < 2**31
    return fits and torch.cuda.get_device_capability(x.device)[0] >= 8 and hasattr(torch.cuda, "_compile_kernel")


def takes_one(x: Tensor, codes: Tensor, scales: Tensor, code: str) -> bool:
    """Whether there is a kernel for x as a single token, which can have a norm before and a gate after the product."""
    if not serves(x, scales, code):
        return False
    return one_token_form(len(codes), x.shape[-1], gpu_of(device_index(x.device)).multiprocessors) is not None


def _source(file: str) -> str:
    return "\n".join((_FOLDER / name).read_text() for name in ("int4_common.cu", file))


def plan(
    places: Mapping[str, Place], *, form: TokenForm | OneTokenForm, gated: bool, settled: bool, early: bool, eps: float
) -> LaunchPlan:
    """With a branch, activations are the RMSNorm of x + branch, times the gains, and that sum is written to `total`."""
    x, scales, outputs = places["x"], places["scales"], places["w"].shape[0]
    tokens, inputs = x.shape
    constants = {
        **asdict(form), "per_group": inputs // scales.shape[1] // _CHUNK, "half": int(x.dtype == "float16"),
        "zeros": int("zeros" in places), "early": (2 if settled else 1) if early else 0,
    }  # fmt: skip
    named = ["w", "scales", "zeros" if "zeros" in places else "scales", "x"]
    numbers: list[Argument] = [outputs, inputs, 0 if scales.shape[0] == 1 else scales.shape[1]]
    if isinstance(form, OneTokenForm):
        file, entry, warps, shared = "int4_token.cu", "int4_token", form.warps, form.shared_bytes(inputs)
        normed = "branch" in places
        constants |= {"pieces": -(-inputs // (256 * warps)), "normed": int(normed), "gated": int(gated)}
        named += ["branch", "gains", "y", "total"] if normed else ["x", "x", "y", "y"]
        numbers.append(eps)
    else:
        file, entry, warps, shared = "int4.cu", "int4_tokens", _FEW_WARPS, 0
        named.append("y")
        numbers.insert(0, tokens)
    arguments = {str(at): value for at, value in enumerate((*map(Pointer, named), *numbers))}
    step = Step(
        f"{__name__}:{entry}", form.grid(tokens, outputs), arguments, constants, warps=warps, early=early,
        source=_source(file), shared_bytes=shared,
    )  # fmt: skip
    return LaunchPlan((step,))


def product(
    launch: Any, given: Mapping[str, Tensor], *, gated: bool = False, settled: bool = False, eps: float = 0.0
) -> None:
    """y (M, N) = x (M, K) W^T, all of it contiguous. A gate or a norm are for a single token and a `OneTokenForm`.

    given: x, w, scales, zeros or not, y; with a norm before the product also branch, gains, total. gated: the first
    half of the outputs are gates of the second. settled: codes and scales are not results of the kernel launched just
    before, which this one is launched before the end of where the GPU can do that.
    """
    x = given["x"]
    form = form_of(len(x), len(given["w"]), x.shape[1], gpu_of(device_index(x.device)).multiprocessors, settled)
    aligned = {name: _aligned(given[name]) for name in ("x", "branch", "gains") if name in given}
    options = {"form": form, "gated": gated, "settled": settled, "early": launches_early(x.device), "eps": eps}
    launch(plan, {**given, **aligned}, written=("y", "total")[: 1 + ("total" in given)], **options)


def _aligned(x: Tensor) -> Tensor:
    """Threads load 16 bytes at once."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
