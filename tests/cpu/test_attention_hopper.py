"""The warp-specialised attention kernels' own source, run on the CPU: Triton's interpreter does not know Gluon.

As in test_matmul_pingpong.py, each group of warps is a thread, and shared memory, barriers, TMA and the tensor core are
small stand-ins. A product reads its operands when it is waited for, and cannot be used before: a stage given back too
early, or a sum read while it is computed, changes the result or fails. A lost arrival shows as a hang, which ends in an
error. What this cannot see is what compiling does.
"""

from __future__ import annotations

import itertools
import threading
import types

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget

from tilemesh.kernels.attention import kernel, plan, reference
from tilemesh.kernels.launch import program
from tilemesh.kernels.launch.call import place_of
from tilemesh.kernels.launch.steps import Descriptor, FitError, Pointer

hopper = pytest.importorskip("tilemesh.kernels.attention.hopper")
hopper_back = pytest.importorskip("tilemesh.kernels.attention.hopper_back")

PATIENCE_S = 20.0
H200 = plan.Target(multiprocessors=132)
PROGRAMS = 3  # multiprocessors of the pretended GPU: few, so that a program has several tiles


class Tile(np.ndarray):
    """A tensor in registers, or a number: numpy with Triton's `.to`."""

    def __new__(cls, values):
        return np.asarray(values).view(cls)

    def to(self, dtype):
        return Tile(self.astype(dtype))


class Memory:
    """Shared memory, by views."""

    def __init__(self, values):
        self.values, self.dtype = values, values.dtype

    def index(self, at):
        return Memory(self.values[int(at)])

    def reshape(self, shape):
        return Memory(self.values.reshape(shape))

    def permute(self, order):
        return Memory(self.values.transpose(order))

    def load(self, layout):
        return Tile(self.values.copy())

    def store(self, value):
        self.values[:] = value


class Address:
    """A pointer that indices are added to."""

    def __init__(self, array, at=0):
        self.array, self.at = array, at

    def __add__(self, more):
        return Address(self.array, self.at + more)


class Product:
    """A product that was asked for: no number yet."""

    def __init__(self, left, right, total):
        self.left, self.right, self.total, self.value = left, right, total, None

    def finish(self):
        left, right = (
            np.asarray(x.values if isinstance(x, Memory) else x).astype(np.float32) for x in (self.left, self.right)
        )
        before = self.total.value if isinstance(self.total, Product) else self.total
        self.value = Tile(before + left @ right)


class Barrier:
    """An mbarrier: a phase ends when its arrivals and its bytes are all in."""

    def __init__(self, shared):
        self.shared, self.phase, self.count, self.arrived, self.due = shared, 0, 0, 0, 0

    def change(self, arrivals=0, due=0):
        with self.shared:
            self.arrived += arrivals
            self.due += due
            assert self.arrived <= self.count, "more arrivals than the barrier waits for"
            if self.arrived == self.count and self.due == 0:
                self.phase, self.arrived = self.phase + 1, 0
                self.shared.notify_all()

    def wait(self, parity):
        with self.shared:
            if not self.shared.wait_for(lambda: self.phase & 1 != int(parity), PATIENCE_S):
                raise RuntimeError("nobody arrived: the kernel would hang")


class Barriers(list):
    def index(self, at):
        return self[int(at)]


class Global:
    """A tensor map over (B, H, T, E): loads outside the tensor are zero, stores there are dropped."""

    def __init__(self, values, block):
        self.values, self.block, self.dtype, self.layout = values, block, np.float16, None

    def part(self, where):
        batch, head, row, _ = (int(at) for at in where)
        return self.values[batch, head, row : row + self.block[2]]

    def load(self, where):
        tile, part = np.zeros(self.block, np.float16), self.part(where)
        tile[0, 0, : part.shape[0]] = part
        return tile

    def store(self, where, tile):
        part = self.part(where)
        part[:] = tile[0, 0, : part.shape[0]]


def wrapped(function):
    return lambda *given: Tile(function(*given))


class Machine:
    """The names the kernels' source uses, standing for one program of a grid."""

    def __init__(self, number):
        self.shared, self.flying = threading.Condition(), threading.local()
        self.failures: list[BaseException] = []
        plain = types.SimpleNamespace
        tl = plain(minimum=wrapped(np.minimum), maximum=wrapped(np.maximum), load=self.load, constexpr=object)
        gl = plain(
            program_id=lambda axis: Tile(number), num_programs=lambda axis: PROGRAMS, static_range=range,
            int64=np.int64, float32=np.float32, constexpr=object,
            arange=lambda low, high, layout: Tile(np.arange(low, high)),
            full=lambda shape, value, dtype, layout: Tile(np.full(shape, value, dtype)), maximum=tl.maximum,
            max=wrapped(np.max), sum=wrapped(np.sum), exp2=wrapped(np.exp2), log2=wrapped(np.log2),
            where=wrapped(np.where), expand_dims=wrapped(np.expand_dims), convert_layout=lambda x, layout: x,
            load=self.load, store=self.store, thread_barrier=lambda: None, allocate_shared_memory=self.allocate,
            warp_specialize=self.specialize, NVMMADistributedLayout=lambda *given: None,
            SliceLayout=lambda *given: None, DotOperandLayout=lambda *given: None, BlockedLayout=lambda *given: None,
            SwizzledSharedLayout=lambda *given: None,
        )  # fmt: skip
        mbarrier = plain(
            wait=lambda barrier, parity: barrier.wait(parity), init=self.init, MBarrierLayout=lambda: None,
            expect=lambda barrier, size: barrier.change(1, size),
            arrive=lambda barrier, count=1: barrier.change(count),
        )  # fmt: skip
        tma = plain(
            async_copy_global_to_shared=self.fetch, async_copy_shared_to_global=self.put, store_wait=self.stored
        )
        constants = {name: getattr(hopper, name).value for name in ("PAIR", "ROWS", "NOTHING")}
        registers = {name: 0 for name in vars(hopper) if name.endswith("_REGISTERS")}
        self.names = {
            "gl": gl, "tl": tl, "mbarrier": mbarrier, "tma": tma, "fence_async_shared": lambda: None,
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.multiplied, "range": self.numbers,
            **constants, **registers,
        }  # fmt: skip
        for module in (kernel, hopper, hopper_back):
            for name, function in vars(module).items():
                if hasattr(function, "fn") and name not in self.names:
                    source = function.fn
                    made = types.FunctionType(source.__code__, self.names, name, source.__defaults__)
                    self.names[name] = made

    def run(self, name, arguments):
        self.names[name](**arguments)
        if self.failures:
            raise self.failures[0]

    def numbers(self, *bounds):
        return (Tile(number) for number in range(*(int(bound) for bound in bounds)))

    def allocate(self, dtype, shape, layout):
        if dtype is np.int64:
            return Barriers(Barrier(self.shared) for _ in range(shape[0]))
        return Memory(np.full(shape, np.nan, dtype))

    def init(self, barrier, count):
        barrier.count = count

    def specialize(self, partitions, warps, registers):
        assert len(warps) == len(registers) == len(partitions) - 1

        def work(function, given):
            try:
                with np.errstate(all="ignore"):
                    function(*given)
            except BaseException as error:
                self.failures.append(error)

        threads = [threading.Thread(target=work, args=partition, daemon=True) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE_S)

    def fetch(self, source, where, barrier, target):
        target.store(source.load(where))
        barrier.change(due=-source.block[2] * source.block[3] * 2)

    def put(self, target, where, source):
        """Read later, when it is waited for: what is written over it meanwhile would be stored."""
        self._mine("stores").append((target, where, source))

    def stored(self, pending):
        stores = self._mine("stores")
        while len(stores) > pending:
            target, where, source = stores.pop(0)
            target.store(where, source.values)

    def _mine(self, what):
        return self.flying.__dict__.setdefault(what, [])

    def multiply(self, left, right, total, use_acc=True, is_async=False):
        assert is_async
        made = Product(left, right, total if use_acc else np.float32(0))
        self._mine("products").append(made)
        return made

    def multiplied(self, pending, deps):
        products = self._mine("products")
        while len(products) > pending:
            products.pop(0).finish()
        found = tuple(x.value if isinstance(x, Product) and x.value is not None else x for x in deps)
        return found if len(found) > 1 else found[0]

    def load(self, pointer, mask=True, other=0):
        return Tile(np.where(mask, pointer.array[np.where(mask, pointer.at, 0)], other).astype(pointer.array.dtype))

    def store(self, pointer, value, mask):
        pointer.array[np.asarray(pointer.at)[np.asarray(mask)]] = np.asarray(value)[np.asarray(mask)]


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
        Machine(number).run(step.function, values | dict(step.constants))


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
    "packed": (200, 200, 64, {"causal": True, "starts": [0, 5, 140, 200]}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_source_computes_what_torch_does(case):
    queries, keys, width, options = CASES[case]
    starts = options.get("starts")
    q, grad = heads(2, queries, width, 0), heads(2, queries, width, 3)
    k, v = (heads(1, keys, width, seed) for seed in (1, 2))
    mask = plan.Mask(options.get("causal", False), options.get("window", 0), width**-0.5)
    packed = bounds(starts) if starts else {}
    y, kept = torch.full((1, 2, queries, width), float("nan")).half(), torch.full((1, 2, queries), float("nan"))
    emulate(plan.forward_plan, {"q": q, "k": k, "v": v, "y": y, "kept": kept, **packed}, mask)
    given = {**options, **({"starts": torch.tensor(starts)} if starts else {})}
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


def test_the_stand_in_notices_a_lost_arrival():
    q = heads(1, 300, 64, 0)
    tensors = {"q": q, "k": q, "v": q, "y": torch.zeros(q.shape).half(), "kept": torch.zeros(1, 1, 300)}
    change = Barrier.change

    def lost(self, arrivals=0, due=0):
        change(self, arrivals if due or self.phase < 1 else 0, due)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Barrier, "change", lost)
        patch.setattr(f"{__name__}.PATIENCE_S", 0.3)
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
