"""The warp-specialised kernel's own source, run on the CPU: Triton's interpreter does not know Gluon, so this does.

Each partition is a thread; shared memory, barriers (by their phases, as the hardware counts them), TMA and the tensor
core are small stand-ins. The tensor core reads its operands when it is waited for, not when it is asked: a stage given
back too early, or a tile overwritten before its store, changes the result. A lost arrival shows as a hang, which ends
in an error. What this cannot see is what compiling does; one case of each kind is compiled for an H200 as well.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget

import tilemesh as tm
from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.launch import program
from tilemesh.kernels.launch.steps import Descriptor, FitError, Pointer
from tilemesh.kernels.matmul import kernel, reference
from tilemesh.kernels.matmul.config import Config, check, refusal
from tilemesh.kernels.matmul.plan import tiles_plan
from tilemesh.kernels.matmul.problem import Matrix, dense
from tilemesh.kernels.matmul.tuning import compile_ahead

pingpong = pytest.importorskip("tilemesh.kernels.matmul.pingpong")

PATIENCE_S = 20.0


class Memory:
    """Shared memory, by views."""

    def __init__(self, values):
        self.values = values

    def index(self, at):
        return Memory(self.values[at])

    def permute(self, order):
        return Memory(self.values.transpose(order))

    def slice(self, start, length, dim):
        assert dim == 0
        return Memory(self.values[start : start + length])

    def load(self, layout):
        return Tile(self.values.copy())

    def store(self, value):
        self.values[:] = value


class Tile(np.ndarray):
    """A tensor in registers: numpy with Triton's `.to`."""

    def __new__(cls, values):
        return np.asarray(values).view(cls)

    def to(self, dtype):
        return self.astype(dtype)


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
            if not self.shared.wait_for(lambda: self.phase & 1 != parity, PATIENCE_S):
                raise RuntimeError("nobody arrived: the kernel would hang")


class Barriers(list):
    def index(self, at):
        return self[at]


class Global:
    """A tensor map: loads outside the matrix are zero, stores there are dropped."""

    def __init__(self, values, block):
        self.values, self.block = values, block
        self.dtype = types.SimpleNamespace(primitive_bitwidth=16)
        self.block_type = types.SimpleNamespace(shape=list(block))
        self.layout = None

    def load(self, row, column):
        tile = np.zeros(self.block, self.values.dtype)
        part = self.values[row : row + self.block[0], column : column + self.block[1]]
        tile[: part.shape[0], : part.shape[1]] = part
        return tile

    def store(self, row, column, tile):
        part = self.values[row : row + self.block[0], column : column + self.block[1]]
        part[:] = tile[: part.shape[0], : part.shape[1]]


class Machine:
    """The names the kernel's source uses, standing for one program of a grid."""

    def __init__(self, program, programs):
        self.shared = threading.Condition()
        self.failures: list[BaseException] = []
        self.flying = threading.local()
        plain = types.SimpleNamespace
        self.gl = plain(
            program_id=lambda axis: program, num_programs=lambda axis: programs, static_range=range, int64="i64",
            minimum=min, float32=np.float32, int32=np.int32, arange=lambda low, high, layout: np.arange(low, high),
            full=lambda shape, value, dtype, layout: Tile(np.full(shape, value, dtype)),
            expand_dims=lambda x, axis: Tile(np.expand_dims(x, axis)), load=self.load, constexpr=object,
            NVMMADistributedLayout=lambda *given: None, SliceLayout=lambda *given: None,
            allocate_shared_memory=self.allocate, warp_specialize=self.specialize,
        )  # fmt: skip
        self.mbarrier = plain(
            wait=lambda barrier, parity: barrier.wait(parity), init=self.init, MBarrierLayout=lambda: None,
            expect=lambda barrier, size: barrier.change(1, size),
            arrive=lambda barrier, count=1, pred=True: barrier.change(count) if pred else None,
        )  # fmt: skip
        self.tma = plain(
            async_copy_global_to_shared=self.fetch, async_copy_shared_to_global=self.put, store_wait=self.stored
        )
        tl = plain(
            minimum=min,
            where=lambda *given: Tile(np.where(*given)),
            exp=np.exp,
            erf=lambda x: Tile(torch.erf(torch.from_numpy(np.asarray(x))).numpy()),
        )
        self.names = {
            "gl": self.gl, "mbarrier": self.mbarrier, "tma": self.tma, "tl": tl, "fence_async_shared": lambda: None,
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.multiplied, "range": range,
            "GROUPS": 2, "GROUP_REGISTERS": 232, "LOADER_REGISTERS": 40,
        }  # fmt: skip
        for source, name in [
            (kernel, "locate"), (kernel, "activate"), (pingpong, "load_tiles"), (pingpong, "compute_tiles"),
            (pingpong, "pingpong_tiles"),
        ]:  # fmt: skip
            function = getattr(source, name).fn
            self.names[name] = types.FunctionType(function.__code__, self.names, name, function.__defaults__)

    def run(self, **arguments):
        self.names["pingpong_tiles"](**arguments)
        if self.failures:
            raise self.failures[0]

    def allocate(self, dtype, shape, layout):
        if dtype == "i64":
            return Barriers(Barrier(self.shared) for _ in range(shape[0]))
        return Memory(np.full(shape, np.nan, np.float16))

    def init(self, barrier, count):
        barrier.count = count

    def specialize(self, partitions, warps, registers):
        assert len(warps) == len(registers) == len(partitions) - 1

        def work(function, given):
            try:
                function(*given)
            except BaseException as error:
                self.failures.append(error)

        threads = [threading.Thread(target=work, args=partition, daemon=True) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE_S)

    def fetch(self, source, where, barrier, target):
        target.store(source.load(*where))
        barrier.change(due=-source.block[0] * source.block[1] * 2)

    def put(self, target, where, source):
        """Read later, when it is waited for: what is written over it meanwhile would be stored."""
        self._stores().append((target, where, source))

    def stored(self, pending):
        stores = self._stores()
        while len(stores) > pending:
            target, where, source = stores.pop(0)
            target.store(*where, source.values)

    def _stores(self):
        self.flying.__dict__.setdefault("stores", [])
        return self.flying.stores

    def multiply(self, a, b, total, use_acc, is_async):
        self.flying.__dict__.setdefault("products", []).append((a, b))
        if not use_acc:
            self.flying.total = np.zeros_like(total)
        return total

    def multiplied(self, pending, deps):
        products = self.flying.products
        while len(products) > pending:
            a, b = products.pop(0)
            self.flying.total = self.flying.total + a.values.astype(np.float32) @ b.values.astype(np.float32)
        return Tile(self.flying.total)

    def load(self, pointer, mask, other):
        array, at = pointer
        return Tile(np.where(mask, array[np.where(mask, at, 0)], np.float16(other)))


class Address:
    """A pointer that indices are added to."""

    def __init__(self, array):
        self.array = array

    def __add__(self, at):
        return self.array, at


def emulate(problem, config, tensors, programs=3):
    """Every program of the plan's one launch, one after the other."""
    (step,) = tiles_plan(problem, config, programs).steps
    kinds = {"d_desc": np.float16}
    values = {}
    for name, argument in step.arguments.items():
        if isinstance(argument, Descriptor):
            flat = tensors[argument.of]
            lies = np.lib.stride_tricks.as_strided(flat, argument.shape, [2 * stride for stride in argument.strides])
            values[name] = Global(lies, argument.block)
        elif isinstance(argument, Pointer):
            values[name] = Address(tensors[argument.of].reshape(-1))
        else:
            values[name] = argument
    for name in kinds:
        values[name].dtype = np.float16
    for index in range(step.grid[0]):
        Machine(index, step.grid[0]).run(**values, **step.constants)


def given(problem, seed=0):
    """Tensors that lie as the problem says, and the same as torch's."""
    generator = np.random.default_rng(seed)
    arrays, views = {}, {}
    for name, matrix in (("a", problem.a), ("b", problem.b), ("c", problem.c), ("d", problem.d), ("z", problem.d)):
        if matrix is not None:
            arrays[name] = (generator.standard_normal(matrix.reach) * 0.5).astype(np.float16)
            view = torch.from_numpy(arrays[name]).as_strided(
                (matrix.rows, matrix.columns), (matrix.row_stride, matrix.column_stride)
            )
            views[name] = view
    return arrays, views


CASES = [
    (Config("pingpong", 64, 64, 32, 4, 3), (200, 136, 96), "full", "relu", "nn", False),
    (Config("pingpong", 64, 64, 32, 4, 2), (640, 64, 40), "full", "gelu", "nt", True),
    (Config("pingpong", 64, 128, 64, 4, 5), (72, 1000, 600), "row", "silu", "tn", False),
    (Config("pingpong", 64, 64, 64, 4, 4, group=2), (130, 520, 64), "column", "gelu_tanh", "tt", True),
    (Config("pingpong", 128, 64, 32, 4, 3, paired=True), (400, 136, 96), "full", "relu", "nn", False),
    (Config("pingpong", 128, 64, 32, 4, 2, paired=True), (200, 200, 200), "none", "squared_relu", "tt", True),
    (Config("pingpong", 128, 128, 64, 4, 3, paired=True), (136, 264, 72), "row", "none", "nt", False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].label} {case[2]}")
def test_the_kernels_source_computes_what_torch_does(case):
    config, (m, n, k), c_kind, activation, layout, keep = case
    if "t" in (layout[0],) and m % 8:
        m += 8 - m % 8
    problem = dense(m, n, k, c_kind=c_kind, activation=activation, layout=layout, keep=keep)
    check(config, problem)
    arrays, views = given(problem)
    arrays["d"][:] = np.nan
    arrays["z"][:] = np.nan
    emulate(problem, config, arrays)
    c = views.get("c")
    exact = reference.exact(views["a"], views["b"], c, activation)
    bound = reference.error_bound(views["a"], views["b"], c, activation)
    assert (wrong := excess(views["d"], exact, bound)) is None, wrong
    if keep:
        before = reference.exact(views["a"], views["b"], c, "none")
        bound = reference.error_bound(views["a"], views["b"], c, "none")
        assert (wrong := excess(views["z"], before, bound)) is None, wrong


def test_the_stand_in_notices_a_stage_given_back_too_early():
    """The test's own test: with an arrival lost, or one too many, the emulation fails instead of passing."""
    problem = dense(200, 136, 512)
    arrays, _ = given(problem)
    plain = Barrier.change

    def lost(self, arrivals=0, due=0):
        plain(self, arrivals if due or self.phase < 1 else 0, due)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Barrier, "change", lost)
        patch.setattr(f"{__name__}.PATIENCE_S", 0.3)
        with pytest.raises(RuntimeError, match="would hang"):
            emulate(problem, CASES[0][0], arrays)


@pytest.mark.parametrize(("c_kind", "keep", "layout"), [("full", False, "nn"), ("row", True, "nt")])
def test_it_compiles_for_an_h200(c_kind, keep, layout):
    config = Config("pingpong", 256, 128, 64, 4, 3, paired=True) if keep else Config("pingpong", 128, 128, 64, 4, 5)
    assert compile_ahead(dense(512, 512, 512, c_kind=c_kind, keep=keep, layout=layout), config, 132, 90) is None


def test_a_triton_that_does_not_take_it_leaves_auto_its_other_kernels(monkeypatch):
    def fails(*given, **more):
        raise TypeError("arrive() takes 1 argument")

    problem, config = dense(520, 520, 520), Config("pingpong", 64, 128, 64, 4, 3)
    (step,) = tiles_plan(problem, config, 132).steps
    operands = {name: program.Operand("float16") for name in "abcd"}
    monkeypatch.setattr(program.triton, "compile", fails)
    with pytest.raises(FitError, match="arrive"):  # which `auto` answers with the library
        program.compile_step(step, operands, GPUTarget("cuda", 90, 32))


def test_what_it_cannot_do_is_said():
    config = Config("pingpong", 128, 128, 64, 4, 5)
    turned = dense(256, 256, 256)
    turned = type(turned)(**{**vars(turned), "d": Matrix(256, 256, 1, 256)})
    refused = [
        (config, dense(256, 255, 256)), (config, dense(256, 256, 256, dtype="float32")), (config, turned),
        (Config("pingpong", 128, 128, 64, 8, 5), dense(256, 256, 256)),
        (Config("pingpong", 512, 64, 64, 4, 2, paired=True), dense(256, 256, 256)),
        (Config("pingpong", 128, 128, 64, 4, 5, prefetch=True), dense(256, 256, 256)),
        (Config("pingpong", 128, 128, 64, 4, 6), dense(256, 256, 256)),
        (Config("pingpong", 128, 128, 64, 4, 1), dense(256, 256, 256)),
        (Config("tma", 128, 128, 64, 4, 3, paired=True), dense(256, 256, 256)),
    ]  # fmt: skip
    assert all(refusal(*pair) for pair in refused)
    a = torch.ones(16, 16, dtype=torch.float16)
    with pytest.raises(UsageError, match="interpreter"):
        tm.kernels.fused_matmul(a, a, implementation="interpret", config=config)


def test_compiling_works_in_a_process_that_interpreted_first():
    """The interpreter patches Triton's language: what it leaves patched must not reach the compiler."""
    code = """
import torch, tilemesh as tm
from tilemesh.kernels.matmul.problem import dense
from tilemesh.kernels.matmul.tuning import compile_ahead
tm.kernels.fused_matmul(torch.ones(4, 4), torch.ones(4, 4), activation="gelu", implementation="interpret")
for config in (tm.kernels.Config("pointer", 16, 32, 32, 1, 2), tm.kernels.Config("pingpong", 128, 128, 64, 4, 5)):
    assert compile_ahead(dense(64, 64, 64), config, 132, 90) is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)
