"""The differential gate of the operators: every one of `tm.kernels` against plain torch and against float64.

A case is an operator, a dtype, a kind of special values and its options. Each implementation makes five calls of it,
one after the other, with other values, strides, patterns of gradients and modes, as a process that goes on would: what
one call leaves behind must not decide for the next. Then derivatives of derivatives, and indices that are out of range.

    python tests/cpu/operator_gate.py [-n PROCESSES] [--device cuda] [--only NAME]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from differential import KINDS, disagreement, planted
from operator_cases import SUBJECTS, Draw, Subject
from torch import Tensor
from torch.autograd import forward_ad

from tilemesh.core.errors import UsageError
from tilemesh.kernels.context import Context, use


@dataclass(frozen=True)
class Call:
    """How the tensors lie, which of them need a gradient ("first", "last", "all" or "none"), and in which mode."""

    layout: str
    needs: str
    mode: str = "grad"


SEQUENCES = (
    (Call("plain", "first"), Call("plain", "all"), Call("turned", "last"), Call("plain", "all", "no_grad"),
     Call("plain", "all", "autocast")),
    (Call("plain", "none", "inference"), Call("plain", "all"), Call("plain", "last"), Call("stepped", "all"),
     Call("plain", "all")),
    (Call("turned", "all", "no_grad"), Call("turned", "all"), Call("turned", "first"),
     Call("shifted", "all", "inference"), Call("shifted", "all", "autocast")),
)  # fmt: skip


def laid(x: Tensor, layout: str) -> Tensor:
    """The same values with other strides, or at an address that is no multiple of 16 bytes."""
    if layout == "turned" and x.dim() > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "stepped" and x.dim():
        return torch.stack((x, x), -1).flatten(-2)[..., ::2]
    if layout == "shifted" and x.dim():
        return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)
    return x


@contextlib.contextmanager
def in_mode(mode: str, device: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if mode == "no_grad":
            stack.enter_context(torch.no_grad())
        elif mode == "inference":
            stack.enter_context(torch.inference_mode())
        elif mode == "autocast":
            stack.enter_context(torch.autocast(device, torch.bfloat16))
        yield


def results(
    function: Any, given: Sequence[Any], needing: Sequence[int], mode: str, device: str, seed: int
) -> list[Any]:
    """What a call returns and, where gradients are needed, those of random gradients upstream."""
    leaves = [x.detach().requires_grad_(at in needing) if isinstance(x, Tensor) and x.is_floating_point() else x
              for at, x in enumerate(given)]  # fmt: skip
    with in_mode(mode, device):
        made = function(*leaves)
    made = list(made) if isinstance(made, tuple) else [made]
    wanted = [leaves[at] for at in needing]
    if mode in ("no_grad", "inference") or not wanted:
        assert not any(x.requires_grad for x in made), "a result requires a gradient where none was asked for"
        return made
    draw = Draw(torch.float64, device, seed)
    pairs = [(x, draw.normal(*x.shape).to(x.dtype)) for x in made]
    outputs, upstream = zip(*[pair for pair in pairs if pair[0].requires_grad], strict=True)
    grads = torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)
    filled = [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, wanted, strict=True)]
    return [*(x.detach() for x in made), *filled]


def doubled(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def check_call(
    subject: Subject,
    implementation: str,
    dtype: torch.dtype,
    kind: str,
    options: Any,
    call: Call,
    device: str,
    seed: int,
) -> str | None:
    """One call: what is wrong with it, if anything."""
    mode = call.mode if call.mode != "autocast" or dtype is torch.float32 else "grad"
    given: list[Any] = list(subject.make(Draw(dtype, device, seed)))
    for at in subject.values:  # bfloat16 has too few digits for an offset: nothing of the values would be left
        given[at] = planted(given[at], "plain" if (kind, mode) == ("offset", "autocast") else kind)
    lies = [
        x if at in subject.fixed or not isinstance(x, Tensor) else laid(x, call.layout) for at, x in enumerate(given)
    ]
    moved = subject.moved
    needing = {"first": moved[:1], "last": moved[-1:], "all": moved, "none": ()}[call.needs]
    own = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}

    def ours(*leaves: Any) -> Any:
        return subject.run(*leaves, **own, **subject.same, implementation=implementation)

    def plain(*leaves: Any) -> Any:
        return (subject.eager or subject.plain)(*leaves, **own)

    try:
        found = results(ours, lies, needing, mode, device, seed)
    except Exception as fault:
        return f"{type(fault).__name__}: {str(fault).splitlines()[0] if str(fault) else ''}"
    eager = results(plain, given, needing, mode, device, seed)
    exact = results(lambda *leaves: subject.plain(*leaves, **own), [doubled(x) for x in given], needing,
                    "grad" if mode == "autocast" else mode, device, seed)  # fmt: skip
    for at, (mine, theirs, true) in enumerate(zip(found, eager, exact, strict=True)):
        wrong = disagreement(mine, theirs, true, signs=subject.signs, roundings=subject.roundings)
        if wrong is not None:
            count = len(found) - (len(needing) if len(found) > len(needing) else 0)
            return f"{f'result {at}' if at < count else f'gradient {at - count}'} {wrong}"
    return None


def check_case(name: str, dtype: torch.dtype, kind: str, at: int, device: str) -> list[str]:
    """Five calls by each implementation."""
    subject, wrong = SUBJECTS[name], []
    sequence = SEQUENCES[(KINDS.index(kind) + at) % len(SEQUENCES)]
    for implementation in implementations(device):
        with use(Context()):
            for number, call in enumerate(sequence):
                seed = 100 * KINDS.index(kind) + 10 * at + number
                fault = check_call(subject, implementation, dtype, kind, subject.options[at], call, device, seed)
                if fault is not None:
                    case = f"{name} {str(dtype)[6:]} {kind} {dict(subject.options[at])} {implementation}"
                    wrong.append(f"{case}, call {number + 1} ({call.layout}, {call.needs}, {call.mode}): {fault}")
    return wrong


def implementations(device: str) -> tuple[str, str]:
    return ("auto", "interpret") if device == "cpu" else ("auto", "triton")


def check_derivatives(name: str, device: str) -> list[str]:
    """Forward-mode derivatives, and derivatives of derivatives, in float64."""
    subject, wrong = SUBJECTS[name], []
    draw = Draw(subject.dtypes[-1], device, 1)
    given, options = list(subject.make(draw)), subject.options[-1]
    inputs = tuple(given[at] for at in subject.moved)
    tangents = tuple(draw.normal(*x.shape).to(x.dtype) for x in inputs)

    def placed(moved: Sequence[Tensor]) -> list[Any]:
        return [moved[subject.moved.index(at)] if at in subject.moved else x for at, x in enumerate(given)]

    def first(made: Any) -> Tensor:
        return made[0] if isinstance(made, tuple) else made

    def twice(function: Any) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        grads = torch.autograd.grad(first(function(*leaves)).double().square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in grads), leaves)

    def duals(function: Any) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            made = function(*(forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)))
            return tuple(forward_ad.unpack_dual(first(made)))

    def exact(*moved: Tensor) -> Any:
        return subject.plain(*[doubled(x) for x in placed(moved)], **options)

    def plain(*moved: Tensor) -> Any:
        return subject.plain(*placed(moved), **options)

    kinds = {
        "torch.func.jvp": lambda function: torch.func.jvp(lambda *moved: first(function(*moved)), inputs, tangents),
        "forward_ad": duals,
        "double backward": twice,
    }
    for implementation, (kind, derive) in itertools.product(implementations(device), kinds.items()):

        def ours(*moved: Tensor, implementation: str = implementation) -> Any:
            return subject.run(*placed(moved), **options, **subject.same, implementation=implementation)

        try:
            made = zip(derive(ours), derive(plain), derive(exact), strict=True)
            faults = [fault for parts in made if (fault := disagreement(*parts)) is not None]
        except Exception as error:
            faults = [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
        wrong += [f"{name} {implementation}, {kind}: {fault}" for fault in faults]
    return wrong


BAD_INDICES = {"cross_entropy": (1, (-1, 40)), "linear_cross_entropy": (2, (-1, 40)), "embedding": (0, (-1, 11))}
"""Where an operator's indices are, and two that are out of range."""


def check_indices(name: str, device: str) -> list[str]:
    """On a CPU they are refused at every call; on a GPU they make NaN and nothing else."""
    subject, (place, bad), wrong = SUBJECTS[name], BAD_INDICES[name], []
    for implementation, dtype in itertools.product(implementations(device), (torch.int64, torch.int32)):
        with use(Context()):
            for number, index in enumerate((None, bad[0], None, bad[1], bad[0])):
                given = list(subject.make(Draw(torch.float32, device, number)))
                given[place] = given[place].to(dtype)
                if index is not None:
                    given[place].view(-1)[2] = index
                try:
                    made = subject.run(*given, implementation=implementation)
                    fault = None if bool(made.isnan().any()) == (index is not None) and device != "cpu" else "passes"
                    fault = None if index is None and bool(made.isfinite().all()) else fault
                except UsageError as error:
                    fault = None if index is not None and str(index) in str(error) else str(error)
                if fault is not None:
                    wrong.append(f"{name} {implementation}, call {number + 1} with index {index} of {dtype}: {fault}")
    return wrong


Task = tuple[Any, ...]


def tasks(only: str = "") -> list[Task]:
    """All there is to check: the function and its arguments before the device."""
    made: list[Task] = []
    for name, subject in SUBJECTS.items():
        for dtype, (number, kind) in itertools.product(subject.dtypes, enumerate(KINDS)):
            # Nothing is more exact than float64: beside an offset, and where squares overflow, torch's is as far off.
            skips = (*subject.skips, "float64 offset", "float64 largest")
            if kind not in skips and f"{str(dtype)[6:]} {kind}" not in skips:
                every = range(len(subject.options)) if dtype is torch.float32 else [number % len(subject.options)]
                made += [(check_case, name, dtype, kind, at) for at in every]
        made += [(check_derivatives, name)] if subject.moved else []
        made += [(check_indices, name)] if name in BAD_INDICES else []
    return [task for task in made if only in task[1]]


def run_task(task: Task, device: str = "cpu") -> list[str]:
    torch.set_num_threads(1)
    function, *given = task
    faults: list[str] = function(*given, device)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description="Every operator against plain torch and float64.")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", metavar="NAME", help="operators whose name has this in it")
    options = parser.parse_args()
    work, faults = tasks(options.only), 0
    run = functools.partial(run_task, device=options.device)
    with ProcessPoolExecutor(options.n, multiprocessing.get_context("spawn")) as pool:
        for made in pool.map(run, work, chunksize=4) if options.n > 1 else map(run, work):
            faults += len(made)
            print(*made, sep="\n", end="\n" * bool(made), flush=True)
    print(f"{len(work)} cases on {options.device}: {faults} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
