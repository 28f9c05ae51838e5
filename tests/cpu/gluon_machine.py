"""Gluon kernels' own source, run on the CPU: Triton's interpreter does not know Gluon, so this does.

Each group of warps is a thread; shared memory, barriers (by their phases, as the hardware counts them), TMA and the
tensor core are small stand-ins. A product reads its operands when it is waited for, and cannot be used before; a store
reads its tile when it is waited for: a stage given back too early, or a tile overwritten before its store, changes the
result. A lost arrival shows as a hang, which ends in an error. What this cannot see is what compiling does.
"""

from __future__ import annotations

import threading
import types

import numpy as np
import torch

PATIENCE_S = 20.0
HALF = types.SimpleNamespace(dtype=np.dtype(np.float16), primitive_bitwidth=16)  # numpy's to numpy, Triton's to kernels


class Tile(np.ndarray):
    """A tensor in registers, or a number: numpy with Triton's `.to`."""

    def __new__(cls, values):
        return np.asarray(values).view(cls)

    def to(self, dtype):
        return Tile(self.astype(dtype))


def wrapped(function):
    return lambda *given: Tile(function(*given))


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

    def slice(self, start, length, dim):
        assert dim == 0
        return Memory(self.values[start : start + length])

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


class Global:
    """A tensor map: loads outside the tensor are zero, stores there are dropped."""

    def __init__(self, values, block):
        self.values, self.block, self.dtype, self.layout = values, tuple(block), HALF, None
        self.block_type = types.SimpleNamespace(shape=list(block))

    def part(self, where):
        return self.values[tuple(slice(int(at), int(at) + size) for at, size in zip(where, self.block, strict=True))]

    def load(self, where):
        tile, part = np.zeros(self.block, np.float16), self.part(where)
        tile[tuple(slice(size) for size in part.shape)] = part
        return tile

    def store(self, where, tile):
        part = self.part(where)
        part[:] = tile[tuple(slice(size) for size in part.shape)]


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


def instruction(assembly, constraints, values, **kind):
    """The instructions of one operand that kernels ask for by name."""
    (x,) = values
    return Tile({"ex2": np.exp2, "rcp": np.reciprocal}[assembly.split(".")[0]](np.asarray(x, np.float32)))


class Machine:
    """The names that kernels' source uses, standing for one program of a grid: all functions of these modules."""

    def __init__(self, number, programs, *modules):
        self.shared, self.flying = threading.Condition(), threading.local()
        self.failures: list[BaseException] = []
        plain = types.SimpleNamespace
        shared_by_both = {
            "minimum": wrapped(np.minimum), "maximum": wrapped(np.maximum), "where": wrapped(np.where),
            "exp": wrapped(np.exp), "load": self.load, "constexpr": object,
            "erf": lambda x: Tile(torch.erf(torch.from_numpy(np.asarray(x))).numpy()),
        }  # fmt: skip
        layouts = ("NVMMADistributed", "Slice", "DotOperand", "Blocked", "SwizzledShared")
        gl = plain(
            **shared_by_both, **{f"{name}Layout": lambda *given: None for name in layouts},
            program_id=lambda axis: Tile(number), num_programs=lambda axis: programs, static_range=range,
            int64=np.int64, int32=np.int32, float32=np.float32,
            arange=lambda low, high, layout: Tile(np.arange(low, high)),
            full=lambda shape, value, dtype, layout: Tile(np.full(shape, value, dtype)),
            max=wrapped(np.max), sum=wrapped(np.sum), exp2=wrapped(np.exp2), log2=wrapped(np.log2),
            expand_dims=wrapped(np.expand_dims), convert_layout=lambda x, layout: x, store=self.store,
            inline_asm_elementwise=instruction,
            allocate_shared_memory=self.allocate, warp_specialize=self.specialize,
        )  # fmt: skip
        mbarrier = plain(
            wait=lambda barrier, parity: barrier.wait(parity), init=self.init, MBarrierLayout=lambda: None,
            expect=lambda barrier, size: barrier.change(1, size),
            arrive=lambda barrier, count=1, pred=True: barrier.change(count) if pred else None,
        )  # fmt: skip
        tma = plain(
            async_copy_global_to_shared=self.fetch, async_copy_shared_to_global=self.put, store_wait=self.stored
        )
        self.names = {
            "gl": gl, "tl": plain(**shared_by_both), "mbarrier": mbarrier, "tma": tma, "range": self.numbers,
            "fence_async_shared": lambda: None, "thread_barrier": lambda: None,
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.multiplied,
        }  # fmt: skip
        for module in modules:
            for name, value in vars(module).items():
                if hasattr(value, "fn"):
                    self.names.setdefault(
                        name, types.FunctionType(value.fn.__code__, self.names, name, value.fn.__defaults__)
                    )
                elif name.isupper() and hasattr(value, "value"):
                    self.names.setdefault(name, value.value)

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
        barrier.change(due=-int(np.prod(source.block)) * 2)

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
