"""From (problem, configuration) to what is launched: kernels, grids, arguments and buffers, as plain values.

A plan is made here, then compiled and launched, or interpreted, by code that knows nothing of tiles (kernels/launch/).
Nothing here needs torch or a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilemesh.kernels.launch.steps import (
    INT32_LIMIT,
    Argument,
    Buffer,
    Descriptor,
    LaunchPlan,
    Pointer,
    Step,
    blocks,
)
from tilemesh.kernels.matmul.config import Config
from tilemesh.kernels.matmul.copies import aligned_copies
from tilemesh.kernels.matmul.problem import Matrix, Problem

TILES = "tilemesh.kernels.matmul.kernel"
PASSES = "tilemesh.kernels.matmul.passes"
PINGPONG = "tilemesh.kernels.matmul.pingpong"

PASS_ROWS, PASS_COLUMNS = 4, 512  # of the memory-bound passes: 16 bytes a thread and more rows than a warp is wide
REDUCE_ELEMENTS = 1024  # of a tile that one program of the second split-K kernel finishes


def tiles_plan(problem: Problem, config: Config, multiprocessors: int, *, interpreted: bool = False) -> LaunchPlan:
    """The launches of one tile kernel. Interpreted, products are taken in float32 and nothing is launched early."""
    steps: list[Step] = []
    buffers: dict[str, Buffer] = {}
    if config.uses_tma:
        size = problem.element_bytes
        operands = {"a": ("a", problem.a), "b": ("b", problem.b)}
        unread = [name for name, (_, matrix) in operands.items() if name in config.copy or not matrix.tma(size)]
        operands |= aligned_copies(problem, unread, steps, buffers)
        steps += _tma_steps(problem, config, multiprocessors, operands, buffers, interpreted)
    else:
        steps += _pointer_steps(problem, config, buffers, interpreted)
    return LaunchPlan(_chained(steps) if config.chained and not interpreted else tuple(steps), buffers)


def _chained(steps: list[Step]) -> tuple[Step, ...]:
    """Each step lets the next be launched while it runs, and waits for the one before it.

    The first is launched plainly: early, it is 0.6 µs faster behind our own kernel but as much slower behind another's.
    """
    if len(steps) == 1:
        return tuple(steps)
    early = {"EARLY": True}
    return tuple(replace(step, constants={**step.constants, **early}, early=n > 0) for n, step in enumerate(steps))


def epilogue_plan(problem: Problem, product: Matrix) -> LaunchPlan:
    """The library path's second half: D = act(product + C), where `product` may be D's own memory."""
    size = problem.element_bytes
    moved = [product, problem.d] + ([problem.c] if problem.c is not None and problem.c_kind == "full" else [])
    # One layout serves all accesses: made for wide rows, it would put the unaligned ones eight elements apart.
    alike = len({matrix.tma(size) for matrix in moved}) == 1
    grid = (blocks(problem.m, PASS_ROWS) * blocks(problem.n, PASS_COLUMNS), 1)
    arguments: dict[str, Argument] = {"product": Pointer("product"), **_c_d_z(problem), "M": problem.m, "N": problem.n}
    arguments |= {"p_m": product.row_stride, "p_n": product.column_stride}
    constants = {"ROWS": PASS_ROWS, "COLUMNS": PASS_COLUMNS, "C_KIND": problem.c_kind}
    constants |= {"ACTIVATION": problem.activation, "KEEP": problem.keep}
    wide = problem.wide or product.reach >= INT32_LIMIT
    return LaunchPlan((Step(f"{PASSES}:epilogue_pass", grid, arguments, constants, wide=wide, hints=alike),))


def gradient_plan(grad: Matrix, saved: Matrix, out: Matrix, c_kind: str, activation: str) -> LaunchPlan:
    """out = grad * act'(saved); a row or column C's gradient is left as partial sums in the pointer `sums`."""
    rows, columns = out.rows, out.columns
    tall = 32 if c_kind == "row" else PASS_ROWS  # fewer partial rows to add afterwards
    wide = 64 if c_kind == "row" else PASS_COLUMNS
    grid = (blocks(rows, tall) * blocks(columns, wide), 1)
    arguments: dict[str, Argument] = {
        "grad": Pointer("grad"), "saved": Pointer("saved"), "out": Pointer("out"),
        "sums": Pointer("sums") if c_kind in ("row", "column") else None, "M": rows, "N": columns,
        "g_m": grad.row_stride, "g_n": grad.column_stride, "s_m": saved.row_stride, "s_n": saved.column_stride,
        "o_m": out.row_stride, "o_n": out.column_stride,
    }  # fmt: skip
    kind = c_kind if c_kind in ("row", "column") else "none"
    constants = {"ROWS": tall, "COLUMNS": wide, "C_KIND": kind, "ACTIVATION": activation}
    far = any(matrix.reach >= INT32_LIMIT for matrix in (grad, saved, out))
    return LaunchPlan((Step(f"{PASSES}:gradient_pass", grid, arguments, constants, wide=far),))


def gradient_sums_shape(rows: int, columns: int, c_kind: str) -> tuple[int, int]:
    """The partial sums `gradient_plan` leaves: (how many, length of each)."""
    if c_kind == "row":
        return blocks(rows, 32), columns
    return blocks(columns, PASS_COLUMNS), rows


def _pointer_steps(problem: Problem, config: Config, buffers: dict[str, Buffer], interpreted: bool) -> list[Step]:
    tiles = blocks(problem.m, config.block_m) * blocks(problem.n, config.block_n)
    split = config.split_k if config.kind == "split" else 1
    arguments: dict[str, Argument] = {"a": Pointer("a"), "b": Pointer("b"), **_c_d_z(problem)}
    arguments |= {"work": None, "M": problem.m, "N": problem.n, "K": problem.k}
    arguments |= {"a_m": problem.a.row_stride, "a_k": problem.a.column_stride}
    arguments |= {"b_k": problem.b.row_stride, "b_n": problem.b.column_stride}
    constants = _tile_constants(problem, config, interpreted)
    constants |= {"SPLIT": split, "EVEN_K": problem.k % config.block_k == 0, "EARLY": False}
    steps = []
    if split > 1:
        buffers["work"] = Buffer(tiles * split * config.block_m * config.block_n, "float32")
        arguments |= {"work": Pointer("work"), "c": None, "z": None, "c_m": 0, "c_n": 0}
        constants |= {"C_KIND": "none", "C_FIRST": False, "KEEP": False}
        steps.append(_reduce_step(problem, config, 0, tiles))
    tile_step = Step(
        f"{TILES}:pointer_tiles", (tiles, split), arguments, constants, config.warps, config.stages, problem.wide
    )
    return [tile_step, *steps]


def _tma_steps(
    problem: Problem,
    config: Config,
    multiprocessors: int,
    operands: Mapping[str, tuple[str, Matrix]],
    buffers: dict[str, Buffer],
    interpreted: bool,
) -> list[Step]:
    tiles = blocks(problem.m, config.block_m) * blocks(problem.n, config.block_n)
    size = problem.element_bytes
    through = config.tma_epilogue and config.kind != "split"
    c_tma = through and problem.c_kind == "full" and not (config.c_first or config.c_early) and _plain(problem.c, size)
    d_tma = through and _plain(problem.d, size)
    part = (config.block_m, config.block_n // config.subtile)
    arguments: dict[str, Argument] = {
        "a_desc": _operand(*operands["a"], config.block_m, config.block_k),
        "b_desc": _operand(*operands["b"], config.block_k, config.block_n),
        "c_desc": _operand("c", problem.c, *part) if c_tma and problem.c else None,
        "d_desc": _operand("d", problem.d, *part) if d_tma else None,
        **_c_d_z(problem),
        "M": problem.m, "N": problem.n, "K": problem.k,
    }  # fmt: skip
    constants = _tile_constants(problem, config, interpreted)
    constants |= {"A_TURNED": operands["a"][1].transposed, "B_TURNED": operands["b"][1].transposed}
    constants |= {
        "C_TMA": c_tma,
        "D_TMA": d_tma,
        "PREFETCH": config.prefetch and _prefetches(problem, config) and not interpreted,
    }
    rest = tiles % multiprocessors if config.tail and tiles > multiprocessors else 0
    constants["EARLY"] = False
    single = {"SPLIT": 1, "FOLLOWS": False, "C_EARLY": config.c_early and problem.c_kind != "none"}
    whole = Step(f"{TILES}:tma_tiles", (tiles - rest, 1), arguments | {"work": None, "tile0": 0}, constants | single,
                 config.warps, config.stages, problem.wide, varying=_varying(problem, config))  # fmt: skip
    if config.kind == "split":
        return _cut(whole, problem, config, 0, tiles, buffers, False)
    if config.kind == "pingpong":
        return [_pingpong_step(whole, problem, config, tiles, multiprocessors)]
    main = whole
    if config.kind == "persistent":
        programs = min(tiles - rest, multiprocessors * config.per_sm)
        loop = {"FLATTEN": config.flatten, "SPECIALIZE": config.specialize}
        walked = arguments | {"tiles": tiles - rest}
        main = replace(
            whole, kernel=f"{TILES}:persistent_tiles", grid=(programs, 1), arguments=walked, constants=constants | loop
        )
    follows = config.chained and not interpreted
    return [main] + (_cut(whole, problem, config, tiles - rest, rest, buffers, follows) if rest else [])


def _pingpong_step(whole: Step, problem: Problem, config: Config, tiles: int, multiprocessors: int) -> Step:
    """C and D move by TMA, a group's tile at once; `whole` has everything else."""
    part = (config.block_m // 2 if config.paired else config.block_m, config.block_n)
    c_tma = problem.c_kind == "full"
    arguments: dict[str, Argument] = {
        name: whole.arguments[name] for name in ("a_desc", "b_desc", "c", "M", "N", "K", "c_m", "c_n")
    }
    arguments |= {
        "c_desc": _operand("c", problem.c, *part) if c_tma and problem.c else None,
        "d_desc": _operand("d", problem.d, *part),
        "z_desc": _operand("z", problem.d, *part) if problem.keep else None,
        "tiles": tiles,
        "c_at": _asked_at(problem, blocks(problem.k, config.block_k)),
    }
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP", "A_TURNED", "B_TURNED", "C_KIND", "ACTIVATION", "KEEP", "EARLY")
    constants = {name: whole.constants[name] for name in names}
    constants |= {"STAGES": config.stages, "PAIRED": config.paired, "C_TMA": c_tma, "SLOPE": problem.slope}
    grid, varying = (min(tiles, multiprocessors), 1), (*whole.varying, "c_at")
    return replace(
        whole, kernel=f"{PINGPONG}:pingpong_tiles", grid=grid, arguments=arguments, constants=constants, varying=varying
    )


def _asked_at(problem: Problem, steps: int) -> int:
    """The step of K after which the loading warp asks for C: halfway, since what is multiplied first comes first.

    A derivative takes the group long to apply. The loading warp would wait for the tile that is still in C's place, and
    the other group for its operands behind that: there it asks for all of a tile's operands first.
    """
    return steps - 1 if problem.slope else steps // 2


def _cut(
    whole: Step,
    problem: Problem,
    config: Config,
    tile0: int,
    tiles: int,
    buffers: dict[str, Buffer],
    follows: bool,
) -> list[Step]:
    """Tiles tile0.. cut along K over `split_k` programs each, and the pass that sums and finishes them.

    After a main kernel (tile0 > 0) the cut tiles depend on nothing it writes, so they start on multiprocessors it
    leaves idle; they only end after it, so that whatever follows in the stream still comes after both.
    """
    buffers["work"] = Buffer(tiles * config.split_k * config.block_m * config.block_n, "float32")
    unused: dict[str, Argument] = {"c_desc": None, "d_desc": None, "c": None, "z": None, "c_m": 0, "c_n": 0}
    arguments = dict(whole.arguments) | unused | {"work": Pointer("work"), "tile0": tile0}
    off = {"PREFETCH": False, "C_TMA": False, "D_TMA": False, "C_KIND": "none", "C_FIRST": False, "KEEP": False}
    off |= {"C_EARLY": False, "FOLLOWS": follows, "SPLIT": config.split_k}
    constants = dict(whole.constants) | off
    first = replace(whole, grid=(tiles, config.split_k), arguments=arguments, constants=constants)
    return [first, _reduce_step(problem, config, tile0, tiles)]


def _prefetches(problem: Problem, config: Config) -> bool:
    c = problem.c
    if config.block_n < 64:
        return False  # a tile's row of C is less than the line that one prefetch asks for
    return problem.c_kind == "full" and problem.element_bytes == 2 and c is not None and c.column_stride == 1


def _reduce_step(problem: Problem, config: Config, tile0: int, tiles: int) -> Step:
    # Where many parts are added up, by more programs that each add up fewer elements.
    rows = max(1, min(config.block_m, REDUCE_ELEMENTS // config.block_n // max(1, config.split_k // 16)))
    arguments: dict[str, Argument] = {"work": Pointer("work"), **_c_d_z(problem)}
    arguments |= {"M": problem.m, "N": problem.n, "tile0": tile0}
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "GROUP": config.group, "SPLIT": config.split_k,
        "ROWS": rows, "C_KIND": problem.c_kind, "ACTIVATION": problem.activation, "KEEP": problem.keep,
        "EARLY": False,
    }  # fmt: skip
    return Step(
        f"{PASSES}:reduce_tiles", (tiles, config.block_m // rows), arguments, constants, 4, 1, problem.wide,
        varying=_varying(problem, config),
    )  # fmt: skip


def _varying(problem: Problem, config: Config) -> tuple[str, ...]:
    """M and what counts its tiles, where no access runs along M: there, knowing what divides it widens nothing.

    A batch whose length changes then finds one kernel for every length. Masked pointers may run along M, and C loaded
    early compiles to other code: those keep the hint, and have a kernel for each power of two that divides M.
    """
    along = config.c_early or problem.c_kind == "column" or not config.uses_tma
    turned = any(matrix is not None and matrix.column_stride != 1 for matrix in (problem.c, problem.d))
    return () if along or turned else ("M", "tiles", "tile0")


def _tile_constants(problem: Problem, config: Config, interpreted: bool) -> dict[str, object]:
    return {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP": config.group,
        "PARTS": config.subtile, "C_KIND": problem.c_kind, "C_FIRST": config.c_first and problem.c_kind != "none",
        "ACTIVATION": problem.activation, "KEEP": problem.keep, "PRECISION": problem.precision,
        "UPCAST": interpreted and problem.dtype != "float32",
    }  # fmt: skip


def _c_d_z(problem: Problem) -> dict[str, Argument]:
    c = problem.c
    return {
        "c": Pointer("c") if c else None, "d": Pointer("d"), "z": Pointer("z") if problem.keep else None,
        "c_m": c.row_stride if c else 0, "c_n": c.column_stride if c else 0,
        "d_m": problem.d.row_stride, "d_n": problem.d.column_stride,
    }  # fmt: skip


def _operand(name: str, matrix: Matrix, rows: int, columns: int) -> Descriptor:
    """The descriptor of a matrix; a transposed one is described as it lies, and turned after the load."""
    if matrix.transposed:
        return Descriptor(name, (matrix.columns, matrix.rows), (matrix.column_stride, 1), (columns, rows))
    return Descriptor(name, (matrix.rows, matrix.columns), (matrix.row_stride, 1), (rows, columns))


def _plain(matrix: Matrix | None, element_bytes: int) -> bool:
    return matrix is not None and not matrix.transposed and matrix.tma(element_bytes)
