"""What every operator asks of the tensors it is given: checks with clear errors, autocast, and who is watching.

Every refusal happens before anything is launched, and says what was given, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_tracing, _len_torch_dispatch_stack
from torch.autograd import forward_ad

from tilemesh.core.errors import Argument, UsageError
from tilemesh.core.ranges import shown

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensors(given: Mapping[str, Tensor | None]) -> None:
    """Tensors, and ones whose elements lie at strides; None stands for an optional one that was left out."""
    for name, tensor in given.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise UsageError(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor; torch.as_tensor makes one")
        if tensor.is_nested:
            raise UsageError(f"{name} is a nested tensor: expected one of one size; .to_padded_tensor(0.0) makes one")
        if tensor.layout is not torch.strided:
            raise UsageError(f"{name} has layout {tensor.layout}: expected a strided tensor; .to_dense() makes one")


def check_alike(given: Mapping[str, Tensor], dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """One dtype, of those the operator takes, and one device."""
    check_dtype(given, dtypes)
    check_device(given)


def check_dtype(given: Mapping[str, Tensor], dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """One dtype, of those the operator takes."""
    first = next(iter(given.values()))
    if first.dtype not in dtypes or any(tensor.dtype != first.dtype for tensor in given.values()):
        given_dtypes = ", ".join(f"{name} {dtype_name(tensor.dtype)}" for name, tensor in given.items())
        known = ", ".join(dtype_name(dtype) for dtype in dtypes)
        raise UsageError(f"dtypes {given_dtypes}: expected one dtype for all, of {known}; cast with .to()")


def check_device(given: Mapping[str, Tensor]) -> None:
    """One device."""
    first = next(iter(given.values()))
    if any(tensor.device != first.device for tensor in given.values()):
        given_devices = ", ".join(f"{name} on {tensor.device}" for name, tensor in given.items())
        raise UsageError(f"tensors on different devices: {given_devices}; move them with .to()")


_DEVICE = Argument("device")


def read_device(name: torch.device | str) -> torch.device:
    """A device by its name: a CPU or a GPU that is there."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UsageError(_DEVICE, f" is {shown(name)}: expected cpu, cuda or cuda:NUMBER") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(_DEVICE, f" is {shown(name)}: expected cpu, cuda or cuda:NUMBER")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(_DEVICE, f" is {shown(name)}: torch sees {torch.cuda.device_count()} GPUs here; use cpu")
    return device


def flat(tensor: Tensor) -> Tensor:
    """All elements side by side in one dimension: a view of a contiguous tensor, a copy of any other.

    `reshape(-1)` does not suit a kernel that steps by one: what it makes of x[::2] and x.expand(…) has other strides.
    """
    return tensor.contiguous().view(-1)


def for_tma(matrix: Tensor) -> Tensor:
    """Rows that follow each other and begin at an address that is a multiple of 16: the matrix, or a copy of it.

    `contiguous` does not suit: it leaves the address as it is, and the stride of a single row.
    """
    if matrix.data_ptr() % 16 == 0 and matrix.stride() == (matrix.shape[1], 1):
        return matrix
    return torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device).copy_(matrix)


def is_plain(tensor: Tensor) -> bool:
    """A real tensor: no subclass (fake tensors are one), no lazy negation, and with memory."""
    return type(tensor) in PLAIN_TYPES and not tensor.is_neg() and not tensor.is_meta


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether a function transform (torch.func) or a forward-mode derivative looks on: both know plain torch only."""
    if _inside_transform():
        return True
    if forward_ad._current_level < 0:
        return False
    given = (tensor for tensor in tensors if isinstance(tensor, Tensor))
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given)


def _inside_transform() -> bool:
    return _are_functorch_transforms_active()


# While it traces, torch.compile takes the answer as a constant, which its own guard on transforms keeps true, and
# records no call in the graph. `torch.compiler.assume_constant_result` does this too, but imports the whole compiler.
_inside_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_traced() -> bool:
    """Whether operators are being recorded instead of run: torch.compile, torch.jit.trace, a dispatch mode.

    A kernel that is launched directly would be missing from what they record.
    """
    return torch.compiler.is_compiling() or torch._C._is_tracing() or bool(torch._C._len_torch_dispatch_stack())


def is_watched() -> bool:
    """Whether torch records operators or transforms functions while this runs, if only perhaps.

    The quick question of a call that is to be repeated; `is_traced` and `is_transformed` know more.
    """
    return (
        _len_torch_dispatch_stack() > 0
        or _are_functorch_transforms_active()
        or _is_tracing()
        or forward_ad._current_level >= 0
    )


def autocasts(tensor: Tensor) -> bool:
    """Whether autocast is on for the tensor's device; a meta tensor's has none."""
    # Naming a device takes a microsecond.
    return not tensor.is_meta and torch.is_autocast_enabled("cuda" if tensor.is_cuda else tensor.device.type)


def autocast(tensor: Tensor) -> Tensor:
    """As torch casts a matmul's inputs: floating point ones, float64 excepted, to the autocast dtype."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))
