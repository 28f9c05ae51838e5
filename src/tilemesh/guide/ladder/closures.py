"""Makes Python closures of a kernel's tree: each takes the running threads and does one statement or finds one value.

Compiling once and running often keeps the interpreter quick: names are slots by then, and constants are numbers.
"""

from collections.abc import Callable

import numpy as np

from tilemesh.core.errors import UsageError
from tilemesh.guide.ladder import tree, warp_ops
from tilemesh.guide.ladder.memory import Array, Lanes, SharedArray
from tilemesh.guide.ladder.threads import (
    COLLECTIVE,
    FOURS,
    INFIX,
    NUMPY_TYPES,
    PLAIN,
    CudaPointer,
    CudaThreads,
    RegisterArray,
    Run,
    Value,
    convert,
    load,
    reinterpret,
    store,
)


class KernelCompiler:
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
        probe = CudaThreads(lanes, 0)
        for constant in program.constants:
            assert constant.value is not None
            self.constants[constant.name] = convert(constant.type, self.value(constant.value)(probe))

    # Functions and statements

    def function(self, function: tree.CudaFunction) -> Callable[[CudaThreads, list[Value]], Value]:
        scopes, types = self.scopes, self.types
        self.scopes, self.types = [{}], []
        parameters = [(self.slot(parameter.name, parameter.type), parameter) for parameter in function.parameters]
        last = function.body[-1] if function.body else None
        body = function.body[:-1] if isinstance(last, tree.Return) else function.body
        run = self.sequence(body, nested=False)
        result = self.value(last.value) if isinstance(last, tree.Return) and last.value is not None else None
        size = len(self.types)
        self.scopes, self.types = scopes, types

        def call(state: CudaThreads, arguments: list[Value]) -> Value:
            outer = state.slots
            state.slots = [None] * size
            for (slot, parameter), value in zip(parameters, arguments, strict=True):
                state.slots[slot] = value if parameter.pointer else convert(parameter.type, value)
            run(state)
            returned = None if result is None else result(state)
            state.slots = outer
            return returned

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

        def run(state: CudaThreads) -> None:
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
        lengths = tuple(int(self.value(length)(CudaThreads(self.lanes, 0))) for length in node.lengths)
        if node.shared:
            return self.shared(node, lengths)
        first = None if node.value is None else self.value(node.value)
        slot = self.slot(node.name, node.type)
        kind, four = node.type, node.type in FOURS
        dtype = FOURS[kind] if four else NUMPY_TYPES[kind]
        copied = four or isinstance(node.value, tree.Subscript)
        if lengths or (four and first is None):
            shape = (*lengths, 4, self.lanes.count) if four else (*lengths, self.lanes.count)
            # Poisoned, so that a sum that was never set to zero does not look right.
            empty = 0 if node.zeroed else (np.nan if dtype is np.float32 else 0)

            def array(state: CudaThreads) -> None:
                data: Array = np.full(shape, empty, dtype)
                state.slots[slot] = RegisterArray(data, four) if lengths else data

            return array

        def scalar(state: CudaThreads) -> None:
            state.issue()
            value = convert(kind, 0 if first is None else first(state))
            state.slots[slot] = value.copy() if copied and isinstance(value, np.ndarray) else value

        return scalar

    def shared(self, node: tree.Declaration, lengths: tuple[int, ...]) -> Run:
        slot, name = self.slot(node.name, node.type), node.name
        dtype = NUMPY_TYPES[node.type]

        def declare(state: CudaThreads) -> None:
            shape = (state.dynamic,) if node.dynamic else lengths
            if name not in state.shared:
                poison = np.nan if dtype is np.float32 else np.iinfo(dtype).max
                data: Array = np.full((state.lanes.blocks, int(np.prod(shape))), poison, dtype)
                state.shared[name] = SharedArray(name, shape, data, state.lanes)
            state.slots[slot] = CudaPointer(state.shared[name], 0, shape)

        return declare

    def assignment(self, node: tree.Assignment) -> Run:
        value = self.value(node.value)
        combine = None if node.sign == "=" else INFIX[node.sign[:-1]]
        if isinstance(node.target, tree.Identifier):
            slot = self.find(node.target.name)
            if slot is None:
                raise UsageError(f"CUDA text, line {node.line}: {node.target.name} is not declared")
            kind = self.types[slot]
            copied = isinstance(node.value, tree.Subscript)

            def assign(state: CudaThreads) -> None:
                state.issue()
                new, old = value(state), state.slots[slot]
                new = convert(kind, new if combine is None else combine(old, new))
                if not state.full:
                    new = np.where(state.mask, new, old)
                state.slots[slot] = new.copy() if copied and isinstance(new, np.ndarray) else new

            return assign
        place = self.component(node.target) if isinstance(node.target, tree.Component) else self.place(node.target)

        def put(state: CudaThreads) -> None:
            state.issue()
            new = value(state)
            target = place(state)
            if combine is not None:
                new = combine(load(state, target), new)
            store(state, target, new)

        return put

    def component(self, node: tree.Component) -> Run:
        """`value.x` of a float4 in registers, as a place."""
        vector_place, index = self.place(node.value), node.index

        def part(state: CudaThreads) -> Value:
            vector = vector_place(state)
            data = vector.data if isinstance(vector, RegisterArray) else vector
            return RegisterArray(data[index], four=False)

        return part

    def loop(self, node: tree.ForLoop) -> Run:
        self.scopes.append({})
        first, condition, step = self.statement(node.first), self.value(node.condition), self.statement(node.step)
        body = self.sequence(node.body)
        self.scopes.pop()

        def turn(state: CudaThreads) -> None:
            body(state)
            step(state)

        def run(state: CudaThreads) -> None:
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

        def run(state: CudaThreads) -> None:
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
            return lambda state: reinterpret(pointer(state), kind)
        if not isinstance(node, tree.Subscript):
            raise UsageError(f"{type(node).__name__} cannot be subscripted or assigned to")
        base, index = self.place(node.base), self.value(node.index)

        def run(state: CudaThreads) -> Value:
            base_value, at = base(state), index(state)
            if isinstance(base_value, CudaPointer):
                return base_value.index(at)
            if isinstance(at, np.ndarray):
                raise UsageError(
                    "an array in registers is indexed by a value that differs between threads: "
                    "a compiler would move it to local memory"
                )
            return RegisterArray(base_value.data[at], base_value.four)

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

        def negated(state: CudaThreads) -> Value:
            number = value(state)
            return ~number if isinstance(number, np.ndarray) else not number

        return negated

    def address(self, node: tree.Expression) -> Run:
        """`&x[i]`: of an array in registers, what follows from i on."""
        place = self.place(node)
        if not isinstance(node, tree.Subscript):
            return place
        base, index = self.place(node.base), self.value(node.index)

        def run(state: CudaThreads) -> Value:
            base_value = base(state)
            if isinstance(base_value, RegisterArray):
                return RegisterArray(base_value.data[index(state) :], base_value.four)
            return base_value.index(index(state))

        return run

    def infix(self, sign: str, left: Run, right: Run) -> Run:
        if sign in ("&&", "||"):
            return _both(left, right) if sign == "&&" else _either(left, right)
        combine = INFIX[sign]
        return lambda state: combine(left(state), right(state))

    def application(self, name: str, arguments: list[Run]) -> Run:
        if name in self.program.functions:
            function = self.function(self.program.functions[name])
            return lambda state: function(state, [argument(state) for argument in arguments])
        if name in warp_ops.PURE or name in PLAIN:
            plain = warp_ops.PURE.get(name) or PLAIN[name]
            return lambda state: plain(*(argument(state) for argument in arguments))
        if name not in COLLECTIVE:
            raise UsageError(f"function {name} is not known to the ladder's interpreter")
        together = COLLECTIVE[name]
        return lambda state: together(state, *(argument(state) for argument in arguments))


def _issued(run: Run) -> Run:
    def step(state: CudaThreads) -> None:
        state.issue()
        run(state)

    return step


def _choice(condition: Run, yes: Run, no: Run) -> Run:
    def run(state: CudaThreads) -> Value:
        chosen = condition(state)
        if not isinstance(chosen, np.ndarray):
            return (yes if chosen else no)(state)
        first, second = state.within(chosen, yes), state.within(~chosen, no)
        return second if first is None else first if second is None else np.where(chosen, first, second)

    return run


def _both(left: Run, right: Run) -> Run:
    def run(state: CudaThreads) -> Value:
        first = left(state)
        if not isinstance(first, np.ndarray):
            return right(state) if first else False
        second = state.within(first, right)  # C++ does not look at the right side where the left is false
        return np.zeros_like(first) if second is None else first & second

    return run


def _either(left: Run, right: Run) -> Run:
    def run(state: CudaThreads) -> Value:
        first = left(state)
        if not isinstance(first, np.ndarray):
            return True if first else right(state)
        second = state.within(~first, right)
        return first if second is None else first | second

    return run
