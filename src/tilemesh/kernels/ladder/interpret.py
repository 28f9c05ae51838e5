"""Runs CUDA text on the CPU, all threads of a grid at once, and counts what it reads and writes.

Every variable holds one value if all threads agree (loop counters, mostly) or an array with one value for each thread.
A branch that threads take differently runs both ways, each with a mask, as a warp does. The text is compiled once to
Python closures.

Not modelled: overflow of `int`. Refused: division of negative integers, `return` from the middle of a kernel.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tilemesh.core.errors import UsageError
from tilemesh.kernels.ladder import parse as tree
from tilemesh.kernels.ladder import warp_ops
from tilemesh.kernels.ladder.memory import WARP, Accesses, Array, GlobalArray, Lanes, Observer, SharedArray

_NUMPY = {"int": np.int64, "unsigned": np.uint32, "float": np.float32, "bool": np.bool_, "half_bits": np.uint16}
_FOUR = {"float4": np.float32, "uint4": np.uint32}
_BYTES = {"int": 4, "unsigned": 4, "float": 4, "half_bits": 2, "float4": 16, "uint4": 16}


@dataclass
class RegisterArray:
    """An array that each thread keeps in registers: (lengths..., lanes), or (lengths..., 4, lanes) of float4."""

    data: Array
    four: bool

    @property
    def whole(self) -> bool:
        """Is this one element?"""
        return self.data.ndim == (2 if self.four else 1)


@dataclass(frozen=True)
class CudaPointer:
    """A place in memory: an element index for each thread; `lengths` are the dims still to be subscripted."""

    memory: GlobalArray | SharedArray
    at: Any
    lengths: tuple[int, ...]
    width: int = 1  # elements of the memory that one access moves

    def index(self, index: Any) -> "CudaPointer":
        stride = int(np.prod(self.lengths[1:], dtype=np.int64)) * self.width
        return CudaPointer(self.memory, self.at + index * stride, self.lengths[1:], self.width)

    def places(self, lanes: int) -> Array:
        return np.broadcast_to(np.asarray(self.at, np.int64), (lanes,))


@dataclass
class Counted:
    """What one launch did: traffic by array, and how many of the lanes of issued warps took part."""

    reads: dict[str, Accesses]
    writes: dict[str, Accesses]
    shared: tuple[str, ...]
    issued_lanes: int  # 32 for each warp and statement
    active_lanes: int
    barriers: int

    def total(self, shared: bool) -> Accesses:
        """All reads of shared or of global memory."""
        return sum((traffic for name, traffic in self.reads.items() if (name in self.shared) == shared), Accesses())

    def stored(self, shared: bool) -> Accesses:
        return sum((traffic for name, traffic in self.writes.items() if (name in self.shared) == shared), Accesses())

    @property
    def lanes_used(self) -> float:
        return self.active_lanes / self.issued_lanes


@dataclass
class _Threads:
    """The threads of a launch while it runs."""

    lanes: Lanes
    dynamic: int  # elements of `extern __shared__`
    slots: list[Any] = field(default_factory=list)
    shared: dict[str, SharedArray] = field(default_factory=dict)
    open_copies: list[tuple[Any, ...]] = field(default_factory=list)
    groups: list[list[tuple[Any, ...]]] = field(default_factory=list)
    issued: int = 0
    active: int = 0
    barriers: int = 0

    def __post_init__(self) -> None:
        self.every = self.lanes.active()
        self.count = self.lanes.count
        self.single = self.lanes.threads == self.lanes.blocks == 1
        self.narrow(self.every)

    def narrow(self, mask: Array) -> None:
        self.mask = mask
        self.full = mask is self.every
        self.mask_lanes = int(mask.sum())
        self.mask_warps = int(mask.reshape(-1, WARP).any(1).sum())

    def issue(self) -> None:
        self.issued += self.mask_warps * WARP
        self.active += self.mask_lanes

    def within(self, chosen: Array, run: Callable[["_Threads"], Any]) -> Any:
        """Runs with the threads for which `chosen` is true; nothing if there are none."""
        before = self.mask
        narrowed = before & chosen
        if not narrowed.any():
            return None
        self.narrow(narrowed)
        found = run(self)
        self.narrow(before)
        return found


Value: TypeAlias = Any
Run: TypeAlias = Callable[[_Threads], Value]


def launch(
    text: str,
    kernel: str,
    grid: tuple[int, int],
    block: tuple[int, int],
    arguments: Mapping[str, Any],
    dynamic: int = 0,
    observer: Observer | None = None,
) -> Counted:
    """Runs `kernel` of the text. Arguments: numpy arrays (written in place) for pointers, ints and floats.

    dynamic: elements of `extern __shared__`. observer: told of every access to global memory.
    """
    program = tree.parse(text)
    if kernel not in program.functions:
        raise UsageError(f"kernel {kernel}: the text has {', '.join(program.functions)}")
    if block[0] * block[1] > 1024:
        raise UsageError(f"block {block}: a block has at most 1,024 threads")
    lanes = Lanes(grid, block)
    state = _Threads(lanes, dynamic)
    compiler = _Compiler(program, lanes)
    function = program.functions[kernel]
    arrays: dict[str, GlobalArray] = {}
    given = []
    for parameter in function.parameters:
        if parameter.name not in arguments:
            raise UsageError(f"kernel {kernel} wants an argument {parameter.name}")
        value = arguments[parameter.name]
        if parameter.pointer:
            arrays[parameter.name] = GlobalArray(parameter.name, value.reshape(-1), lanes, observer=observer)
            value = CudaPointer(arrays[parameter.name], 0, (1,))
        given.append(value)
    with np.errstate(over="ignore", invalid="ignore"):
        compiler.function(function)(state, given)
    if state.open_copies or state.groups:
        raise UsageError(f"kernel {kernel} ends with copies under way that nothing waited for")
    everything: list[GlobalArray | SharedArray] = [*arrays.values(), *state.shared.values()]
    return Counted(
        {array.name: array.read for array in everything},
        {array.name: array.written for array in everything},
        tuple(state.shared),
        state.issued,
        state.active,
        state.barriers,
    )


def convert(kind: str, value: Value) -> Value:
    """A value as a variable of this type holds it."""
    if kind in _FOUR:
        return value
    if isinstance(value, np.ndarray):
        return value.astype(_NUMPY[kind], copy=False)
    if kind == "float":
        return np.float32(value)
    return bool(value) if kind == "bool" else int(value)


def load(state: _Threads, place: Value) -> Value:
    """The value at a place; a value is its own."""
    if isinstance(place, RegisterArray):
        return place.data if place.whole else place
    if not isinstance(place, CudaPointer) or place.lengths:
        return place
    if state.single and place.width == 1 and not isinstance(place.at, np.ndarray):
        return place.memory.load_one(place.at)
    found = place.memory.load(place.places(state.count), state.mask, place.width)
    return _joined(found, place)


def _joined(found: Array, place: CudaPointer) -> Array:
    """Two 16-bit elements that were read as one unsigned."""
    if place.width == 2 and found.dtype == np.uint16:
        return found[0].astype(np.uint32) | (found[1].astype(np.uint32) << np.uint32(16))
    return found


def store(state: _Threads, place: Value, value: Value) -> None:
    if isinstance(place, RegisterArray):
        if state.full:
            place.data[...] = value
        else:
            place.data[..., state.mask] = np.broadcast_to(value, place.data.shape)[..., state.mask]
        return
    if state.single and place.width == 1 and not isinstance(place.at, np.ndarray):
        place.memory.store_one(place.at, value[0] if isinstance(value, np.ndarray) else value)
        return
    if place.width == 2 and place.memory.data.dtype == np.uint16:
        value = np.stack([value & np.uint32(0xFFFF), value >> np.uint32(16)])
    place.memory.store(place.places(state.count), np.asarray(value), state.mask, place.width)


def _divide(left: Value, right: Value) -> Value:
    if _whole(left) and _whole(right):
        if np.any(np.less(left, 0)) or np.any(np.less(right, 0)):
            raise UsageError("division of a negative integer: the interpreter does not know which way to round")
        return left // right
    return left / right


def _remainder(left: Value, right: Value) -> Value:
    if np.any(np.less(left, 0)) or np.any(np.less(right, 0)):
        raise UsageError("remainder of a negative integer: the interpreter does not know its sign")
    return left % right


def _whole(value: Value) -> bool:
    return bool(np.issubdtype(value.dtype, np.integer)) if hasattr(value, "dtype") else isinstance(value, int)


_INFIX: dict[str, Callable[[Value, Value], Value]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divide, "%": _remainder,
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_PLAIN: dict[str, Callable[..., Value]] = {"min": np.minimum, "max": np.maximum, "sqrtf": np.sqrt, "fabsf": np.abs}


class _Compiler:
    """Makes closures of a tree. Scopes map names to slots, so that a name of an inner block hides an outer one."""

    def __init__(self, program: tree.CudaText, lanes: Lanes) -> None:
        self.program, self.lanes = program, lanes
        self.scopes: list[dict[str, int]] = [{}]
        self.types: list[str] = []
        thread, block = lanes.thread_of(), lanes.block_of()
        self.special = {
            "threadIdx.x": thread % lanes.block[0], "threadIdx.y": thread // lanes.block[0],
            "blockIdx.x": block % lanes.grid[0], "blockIdx.y": block // lanes.grid[0],
            "blockDim.x": lanes.block[0], "blockDim.y": lanes.block[1],
            "gridDim.x": lanes.grid[0], "gridDim.y": lanes.grid[1],
        }  # fmt: skip
        self.constants: dict[str, Value] = {}
        probe = _Threads(lanes, 0)
        for constant in program.constants:
            assert constant.value is not None
            self.constants[constant.name] = convert(constant.type, self.value(constant.value)(probe))

    # Functions and statements

    def function(self, function: tree.CudaFunction) -> Callable[[_Threads, list[Value]], Value]:
        scopes, types = self.scopes, self.types
        self.scopes, self.types = [{}], []
        parameters = [(self.slot(parameter.name, parameter.type), parameter) for parameter in function.parameters]
        last = function.body[-1] if function.body else None
        body = function.body[:-1] if isinstance(last, tree.Return) else function.body
        run = self.sequence(body, nested=False)
        result = self.value(last.value) if isinstance(last, tree.Return) and last.value is not None else None
        size = len(self.types)
        self.scopes, self.types = scopes, types

        def call(state: _Threads, given: list[Value]) -> Value:
            outer = state.slots
            state.slots = [None] * size
            for (slot, parameter), value in zip(parameters, given, strict=True):
                state.slots[slot] = value if parameter.pointer else convert(parameter.type, value)
            run(state)
            found = None if result is None else result(state)
            state.slots = outer
            return found

        return call

    def slot(self, name: str, kind: str) -> int:
        self.types.append(kind)
        self.scopes[-1][name] = len(self.types) - 1
        return len(self.types) - 1

    def find(self, name: str) -> int | None:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def sequence(self, body: tree.Sequence, nested: bool = True) -> Run:
        if nested:
            self.scopes.append({})
        runs = [self.statement(statement) for statement in body]
        if nested:
            self.scopes.pop()

        def run(state: _Threads) -> None:
            for step in runs:
                step(state)

        return run

    def statement(self, node: tree.Statement) -> Run:
        match node:
            case tree.Declaration():
                return self.declaration(node)
            case tree.Assignment():
                return self.assignment(node)
            case tree.Evaluation():
                return _issued(self.value(node.value))
            case tree.ForLoop():
                return self.loop(node)
            case tree.Branch():
                return self.branch(node)
        raise UsageError(
            f"CUDA text, line {node.line}: `return` is understood as the last statement of a function only"
        )

    def declaration(self, node: tree.Declaration) -> Run:
        lengths = tuple(int(self.value(length)(_Threads(self.lanes, 0))) for length in node.lengths)
        if node.shared:
            return self.shared(node, lengths)
        first = None if node.value is None else self.value(node.value)
        slot = self.slot(node.name, node.type)
        kind, four = node.type, node.type in _FOUR
        dtype = _FOUR[kind] if four else _NUMPY[kind]
        copied = four or isinstance(node.value, tree.Subscript)
        if lengths or (four and first is None):
            shape = (*lengths, 4, self.lanes.count) if four else (*lengths, self.lanes.count)
            # Poisoned, so that a sum that was never set to zero does not look right.
            empty = 0 if node.zeroed else (np.nan if dtype is np.float32 else 0)

            def array(state: _Threads) -> None:
                data: Array = np.full(shape, empty, dtype)
                state.slots[slot] = RegisterArray(data, four) if lengths else data

            return array

        def scalar(state: _Threads) -> None:
            state.issue()
            value = convert(kind, 0 if first is None else first(state))
            state.slots[slot] = value.copy() if copied and isinstance(value, np.ndarray) else value

        return scalar

    def shared(self, node: tree.Declaration, lengths: tuple[int, ...]) -> Run:
        slot, name = self.slot(node.name, node.type), node.name
        dtype = _NUMPY[node.type]

        def declare(state: _Threads) -> None:
            shape = (state.dynamic,) if node.dynamic else lengths
            if name not in state.shared:
                poison = np.nan if dtype is np.float32 else np.iinfo(dtype).max
                data: Array = np.full((state.lanes.blocks, int(np.prod(shape))), poison, dtype)
                state.shared[name] = SharedArray(name, shape, data, state.lanes)
            state.slots[slot] = CudaPointer(state.shared[name], 0, shape)

        return declare

    def assignment(self, node: tree.Assignment) -> Run:
        value = self.value(node.value)
        combine = None if node.sign == "=" else _INFIX[node.sign[:-1]]
        if isinstance(node.target, tree.Identifier):
            slot = self.find(node.target.name)
            if slot is None:
                raise UsageError(f"CUDA text, line {node.line}: {node.target.name} is not declared")
            kind = self.types[slot]
            copied = isinstance(node.value, tree.Subscript)

            def assign(state: _Threads) -> None:
                state.issue()
                new, old = value(state), state.slots[slot]
                new = convert(kind, new if combine is None else combine(old, new))
                if not state.full:
                    new = np.where(state.mask, new, old)
                state.slots[slot] = new.copy() if copied and isinstance(new, np.ndarray) else new

            return assign
        place = self.component(node.target) if isinstance(node.target, tree.Component) else self.place(node.target)

        def put(state: _Threads) -> None:
            state.issue()
            new = value(state)
            target = place(state)
            if combine is not None:
                new = combine(load(state, target), new)
            store(state, target, new)

        return put

    def component(self, node: tree.Component) -> Run:
        """`value.x` of a float4 in registers, as a place."""
        whole, index = self.place(node.value), node.index

        def part(state: _Threads) -> Value:
            found = whole(state)
            data = found.data if isinstance(found, RegisterArray) else found
            return RegisterArray(data[index], four=False)

        return part

    def loop(self, node: tree.ForLoop) -> Run:
        self.scopes.append({})
        first, condition, step = self.statement(node.first), self.value(node.condition), self.statement(node.step)
        body = self.sequence(node.body)
        self.scopes.pop()

        def turn(state: _Threads) -> None:
            body(state)
            step(state)

        def run(state: _Threads) -> None:
            first(state)
            before = state.mask
            while True:
                going = condition(state)
                if isinstance(going, np.ndarray):
                    narrowed = state.mask & going
                    if not narrowed.any():
                        break
                    if not np.array_equal(narrowed, state.mask):
                        state.narrow(narrowed)
                elif not going:
                    break
                turn(state)
            if state.mask is not before:
                state.narrow(before)

        return run

    def branch(self, node: tree.Branch) -> Run:
        condition, yes, no = self.value(node.condition), self.sequence(node.yes), self.sequence(node.no)

        def run(state: _Threads) -> None:
            state.issue()
            chosen = condition(state)
            if not isinstance(chosen, np.ndarray):
                (yes if chosen else no)(state)
                return
            state.within(chosen, yes)
            state.within(~chosen, no)

        return run

    # Expressions

    def value(self, node: tree.Expression) -> Run:
        match node:
            case tree.Number(value):
                return lambda state: value
            case tree.Identifier(name):
                return self.identifier(name)
            case tree.Subscript():
                place = self.place(node)
                return lambda state: load(state, place(state))
            case tree.Component():
                part = self.component(node)
                return lambda state: part(state).data
            case tree.Prefix(sign, inner):
                return self.prefix(sign, inner)
            case tree.Infix(sign, left, right):
                return self.infix(sign, self.value(left), self.value(right))
            case tree.Ternary(condition, yes, no):
                return _choice(self.value(condition), self.value(yes), self.value(no))
            case tree.Application(name, arguments):
                return self.application(name, [self.value(argument) for argument in arguments])
        raise UsageError(f"{type(node).__name__} is a place, not a value: subscript it")

    def identifier(self, name: str) -> Run:
        slot = self.find(name)
        if slot is not None:
            return lambda state: state.slots[slot]
        known = {**self.special, **self.constants}
        if name not in known:
            raise UsageError(f"{name} is not declared")
        value = known[name]
        return lambda state: value

    def place(self, node: tree.Expression) -> Run:
        """Where a subscripted expression lies; nothing is read."""
        if isinstance(node, tree.Identifier):
            return self.identifier(node.name)
        if isinstance(node, tree.Reinterpreted):
            pointer, kind = self.reference(node.pointer), node.type
            return lambda state: _reinterpret(pointer(state), kind)
        if not isinstance(node, tree.Subscript):
            raise UsageError(f"{type(node).__name__} cannot be subscripted or assigned to")
        base, index = self.place(node.base), self.value(node.index)

        def run(state: _Threads) -> Value:
            found, at = base(state), index(state)
            if isinstance(found, CudaPointer):
                return found.index(at)
            if isinstance(at, np.ndarray):
                raise UsageError(
                    "an array in registers is indexed by a value that differs between threads: "
                    "a compiler would move it to local memory"
                )
            return RegisterArray(found.data[at], found.four)

        return run

    def reference(self, node: tree.Expression) -> Run:
        return self.place(node.value if isinstance(node, tree.Prefix) and node.sign == "&" else node)

    def prefix(self, sign: str, node: tree.Expression) -> Run:
        if sign == "&":
            return self.address(node)
        value = self.value(node)
        if sign == "-":
            return lambda state: -value(state)
        if sign == "~":
            return lambda state: ~value(state)

        def negated(state: _Threads) -> Value:
            found = value(state)
            return ~found if isinstance(found, np.ndarray) else not found

        return negated

    def address(self, node: tree.Expression) -> Run:
        """`&x[i]`: of an array in registers, what follows from i on."""
        place = self.place(node)
        if not isinstance(node, tree.Subscript):
            return place
        base, index = self.place(node.base), self.value(node.index)

        def run(state: _Threads) -> Value:
            found = base(state)
            if isinstance(found, RegisterArray):
                return RegisterArray(found.data[index(state) :], found.four)
            return found.index(index(state))

        return run

    def infix(self, sign: str, left: Run, right: Run) -> Run:
        if sign in ("&&", "||"):
            return _both(left, right) if sign == "&&" else _either(left, right)
        combine = _INFIX[sign]
        return lambda state: combine(left(state), right(state))

    def application(self, name: str, arguments: list[Run]) -> Run:
        if name in self.program.functions:
            function = self.function(self.program.functions[name])
            return lambda state: function(state, [argument(state) for argument in arguments])
        if name in warp_ops.PURE or name in _PLAIN:
            plain = warp_ops.PURE.get(name) or _PLAIN[name]
            return lambda state: plain(*(argument(state) for argument in arguments))
        if name not in _COLLECTIVE:
            raise UsageError(f"function {name} is not known to the ladder's interpreter")
        together = _COLLECTIVE[name]
        return lambda state: together(state, *(argument(state) for argument in arguments))


def _issued(run: Run) -> Run:
    def step(state: _Threads) -> None:
        state.issue()
        run(state)

    return step


def _choice(condition: Run, yes: Run, no: Run) -> Run:
    def run(state: _Threads) -> Value:
        chosen = condition(state)
        if not isinstance(chosen, np.ndarray):
            return (yes if chosen else no)(state)
        first, second = state.within(chosen, yes), state.within(~chosen, no)
        return second if first is None else first if second is None else np.where(chosen, first, second)

    return run


def _both(left: Run, right: Run) -> Run:
    def run(state: _Threads) -> Value:
        first = left(state)
        if not isinstance(first, np.ndarray):
            return right(state) if first else False
        second = state.within(first, right)  # C++ does not look at the right side where the left is false
        return np.zeros_like(first) if second is None else first & second

    return run


def _either(left: Run, right: Run) -> Run:
    def run(state: _Threads) -> Value:
        first = left(state)
        if not isinstance(first, np.ndarray):
            return True if first else right(state)
        second = state.within(~first, right)
        return first if second is None else first | second

    return run


def _reinterpret(pointer: CudaPointer, kind: str) -> CudaPointer:
    width = _BYTES[kind] // pointer.memory.data.itemsize
    return CudaPointer(pointer.memory, pointer.at, (1,), max(1, width))


def _synchronise(state: _Threads) -> None:
    if not state.full:
        raise UsageError("__syncthreads() in a branch that some threads do not take: the block would wait for ever")
    state.barriers += 1
    for array in state.shared.values():
        array.barrier()


def _copy_async(state: _Threads, target: CudaPointer, source: CudaPointer) -> None:
    width = 16 // source.memory.data.itemsize
    values = source.memory.load(source.places(state.count), state.mask, width)
    at = target.places(state.count)
    assert isinstance(target.memory, SharedArray)
    target.memory.count_store(at, state.mask, width)
    target.memory.writing(at, state.mask, width)
    state.open_copies.append((target.memory, at, values, state.mask, width))


def _commit_copies(state: _Threads) -> None:
    state.groups.append(state.open_copies)
    state.open_copies = []


def _wait_copies(state: _Threads, left: int) -> None:
    finished = max(0, len(state.groups) - left)
    done, state.groups = state.groups[:finished], state.groups[finished:]
    for group in done:
        for memory, at, values, mask, width in group:
            memory.writing(at, mask, width)
            memory.place(at, values, mask, width)


def _load_matrices(state: _Threads, registers: RegisterArray, row: CudaPointer, turned: bool = False) -> None:
    assert isinstance(row.memory, SharedArray)
    warp_ops.load_matrices(registers, row.memory, row.places(state.count), state.mask, turned=turned)


_COLLECTIVE: dict[str, Callable[..., None]] = {
    "__syncthreads": _synchronise,
    "copy_async": _copy_async,
    "commit_copies": _commit_copies,
    "wait_copies": _wait_copies,
    "load_matrices": _load_matrices,
    "load_matrices_turned": lambda state, registers, row: _load_matrices(state, registers, row, turned=True),
}
