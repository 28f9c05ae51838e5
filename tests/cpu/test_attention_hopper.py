"""The warp-specialised attention kernels' own source, run on the CPU by gluon_machine.py."""

from __future__ import annotations

import itertools

import gluon_machine
import pytest
import torch
from gluon_machine import Address, Barrier, Global, Machine
from triton.backends.compiler import GPUTarget

from tilemesh.kernels.attention import kernel, plan, reference
from tilemesh.kernels.launch import program
from tilemesh.kernels.launch.call import place_of
from tilemesh.kernels.launch.steps import Descriptor, FitError, Pointer

hopper = pytest.importorskip("tilemesh.kernels.attention.hopper")
hopper_back = pytest.importorskip("tilemesh.kernels.attention.hopper_back")

H200 = plan.Target(multiprocessors=132)
PROGRAMS = 3  # multiprocessors of the pretended GPU: few, so that a program has several tiles


def emulate(make, tensors, mask):
    """Every program of a plan's one launch, one after the other."""
    places = {name: place_of(tensor) for name, tensor in tensors.items()}
    (step,) = make(places, mask=mask, target=plan.Target(multiprocessors=PROGRAMS)).steps
    values = {}
    for name, argument in step.arguments.items():
        if isinstance(argument, Descriptor):
            values[name] = Global(tensors[argument.of].numpy(), argument.block)
        elif isinstance(argument, Pointer):
            values[name] = Address(tensors[argument.of].view(-1).numpy())
        else:
            values[name] = argument
    assert step.kernel.startswith(hopper.__name__)
    for number in range(step.grid[0]):
        Machine(number, PROGRAMS, kernel, hopper, hopper_back).run(step.function, values | dict(step.constants))


def heads(count, tokens, width, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, tokens, count, width, generator=generator).half().transpose(1, 2)


def bounds(starts):
    """What kernel.sequence_bounds makes of them."""
    pieces = itertools.pairwise(starts)
    ends = [(begin, end) for begin, end in pieces for _ in range(end - begin)]
    return {
        name: torch.tensor([pair[at] for pair in ends], dtype=torch.int32) for at, name in enumerate(("first", "last"))
    }


CASES = {
    "causal": (150, 150, 64, {"causal": True}),
    "causal, more keys": (70, 300, 64, {"causal": True}),
    "full": (70, 190, 64, {}),
    "window": (270, 270, 64, {"causal": True, "window": 40}),
    "both sides": (130, 130, 128, {"window": 30}),
    "packed": (200, 200, 64, {"causal": True, "starts": [0, 5, 140, 200], "sinks": [0.5, 3.0]}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_source_computes_what_torch_does(case):
    queries, keys, width, options = CASES[case]
    starts = options.get("starts")
    q, grad = heads(2, queries, width, 0), heads(2, queries, width, 3)
    k, v = (heads(1, keys, width, seed) for seed in (1, 2))
    mask = plan.Mask(options.get("causal", False), options.get("window", 0), width**-0.5)
    packed = bounds(starts) if starts else {}
    sinks = {"sinks": torch.tensor(options["sinks"])} if "sinks" in options else {}
    y, kept = torch.full((1, 2, queries, width), float("nan")).half(), torch.full((1, 2, queries), float("nan"))
    emulate(plan.forward_plan, {"q": q, "k": k, "v": v, "y": y, "kept": kept, **packed, **sinks}, mask)
    given = {**options, **({"starts": torch.tensor(starts)} if starts else {}), **sinks}
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    true = reference.exact(*exact, **given)
    assert ((y.double() - true).norm() / true.norm()).item() < 1e-3

    delta = (y.float() * grad.float()).sum(-1)
    found = {name: torch.full(x.shape, float("nan")).half() for name, x in (("dq", q), ("dk", k), ("dv", v))}
    both = {"q": q, "k": k, "v": v, "grad": grad, "kept": kept, "delta": delta, **packed}
    emulate(plan.keys_back_plan, {**both, "dk": found["dk"], "dv": found["dv"]}, mask)
    emulate(plan.queries_back_plan, {**both, "dq": found["dq"]}, mask)
    gradients = torch.autograd.grad(true, exact, grad.double())
    for mine, wanted in zip(found.values(), gradients, strict=True):
        assert ((mine.double() - wanted).norm() / wanted.norm()).item() < 2e-3


def test_queries_that_see_none_of_the_keys_end():
    """As where a block of keys visits queries of other documents: nobody waits for keys that nobody loads."""
    q, grad, k, v = (heads(1, tokens, 64, seed) for seed, tokens in enumerate((140, 140, 256, 256)))
    none, mask = torch.full((140,), 128, dtype=torch.int32), plan.Mask(False, 0, 0.125)
    y, dq = (torch.full(q.shape, float("nan")).half() for _ in range(2))
    kept, delta = torch.zeros(1, 1, 140), torch.ones(1, 1, 140)
    given = {"q": q, "k": k, "v": v, "first": none, "last": none}
    emulate(plan.forward_plan, {**given, "y": y, "kept": kept}, mask)
    assert (kept == -float("inf")).all()
    emulate(plan.queries_back_plan, {**given, "grad": grad, "kept": delta, "delta": delta, "dq": dq}, mask)
    assert not dq.any()


def test_sequences_that_do_not_ascend_end():
    """Lengths given as `starts`, say, which nobody looks at on a GPU: results are wrong, but there are some."""
    q, k = heads(1, 200, 64, 0), heads(1, 200, 64, 1)
    token, mask = torch.arange(200, dtype=torch.int32), plan.Mask(False, 0, 0.125)
    first = torch.where((token >= 128) & (token < 160), 128, 0).int()
    last = torch.where(token < 64, 200, 130).int().maximum(token + 1)
    given = {"q": q, "k": k, "v": k, "first": first, "last": last}
    made = {name: torch.empty(q.shape).half() for name in ("y", "dk", "dv", "dq")}
    kept, delta = torch.zeros(1, 1, 200), torch.ones(1, 1, 200)
    emulate(plan.forward_plan, {**given, "y": made["y"], "kept": kept}, mask)
    both = {**given, "grad": q, "kept": kept, "delta": delta}
    emulate(plan.keys_back_plan, {**both, "dk": made["dk"], "dv": made["dv"]}, mask)
    emulate(plan.queries_back_plan, {**both, "dq": made["dq"]}, mask)


def test_the_stand_in_notices_a_lost_arrival():
    q = heads(1, 300, 64, 0)
    tensors = {"q": q, "k": q, "v": q, "y": torch.zeros(q.shape).half(), "kept": torch.zeros(1, 1, 300)}
    change = Barrier.change

    def lost(self, arrivals=0, due=0):
        change(self, arrivals if due or self.phase < 1 else 0, due)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Barrier, "change", lost)
        patch.setattr(gluon_machine, "PATIENCE_S", 0.3)
        with pytest.raises(RuntimeError, match="would hang"):
            emulate(plan.forward_plan, tensors, plan.Mask(True, 0, 0.1))


def places_on_gpu(width=128, dtype="bfloat16", step=1):
    def tile(count):
        strides = (512 * count * width * step, width * step, count * width * step, step)
        return plan.Place((2, count, 512, width), strides, dtype, aligned=True)

    vector = plan.Place((2, 4, 512), (2048, 512, 1), "float32", aligned=True)
    return {"q": tile(4), "k": tile(2), "v": tile(2), "y": tile(4), "kept": vector}


def test_what_the_kernels_do_not_take_goes_to_the_portable_ones():
    mask = plan.Mask(True, 0, 0.1)
    assert plan.on_hopper(places_on_gpu(), mask)
    assert not plan.on_hopper(places_on_gpu(step=2), mask)
    assert not plan.on_hopper(places_on_gpu(width=96), mask)
    assert not plan.on_hopper(places_on_gpu(dtype="float32"), mask)
    assert not plan.on_hopper(places_on_gpu(), plan.Mask(True, 0, -0.1))
    (step,) = plan.forward_plan(places_on_gpu(96), mask=mask, target=H200).steps
    assert step.kernel.endswith(":attend")


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_what_does_not_fit_is_tried_in_a_smaller_way(refused):
    tried = []

    def launch(make, given, written, target):
        tried.append(target)
        if len(tried) <= refused:
            raise FitError("shared memory 163840, this GPU has 101376")

    ways = [H200, plan.Target(), plan.Target(small=True)]
    if refused == len(ways):
        with pytest.raises(FitError):
            plan._launch(launch, plan.forward_plan, {}, (), {"target": H200})
    else:
        plan._launch(launch, plan.forward_plan, {}, (), {"target": H200})
    assert tried == ways[: refused + 1]


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128])
def test_they_compile_for_an_h200(width):
    mask, forward = plan.Mask(True, 0, 0.1), places_on_gpu(width)
    q, k, vector = (forward[name] for name in ("q", "k", "kept"))
    back = {"q": q, "k": k, "v": k, "grad": q, "kept": vector, "delta": vector}
    plans = [
        (plan.forward_plan, forward),
        (plan.keys_back_plan, {**back, "dk": k, "dv": k}),
        (plan.queries_back_plan, {**back, "dq": q}),
    ]
    for make, places in plans:
        (step,) = make(places, mask=mask, target=H200).steps
        operands = {name: program.Operand(place.dtype) for name, place in places.items()}
        assert program.compile_step(step, operands, GPUTarget("cuda", 90, 32)).asm["cubin"]
