"""Copies of A and B with rows that start on a cache line, for TMA and for the library, which is slow without.

Both are copied by one launch. Rows of an odd length start anywhere, so single elements would be all that can be read at
once; instead whole aligned 64-bit words are read and shifted into place (`passes.copy_words`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilemesh.kernels.launch.steps import INT32_LIMIT, Argument, Buffer, Pointer, Step, blocks
from tilemesh.kernels.matmul.problem import Matrix, Problem

COPY_PASS = "tilemesh.kernels.matmul.passes:copy_pass"

ALIGNMENT_BYTES = 128  # of a copied row: a cache line, so that no tile's row straddles one more than it must
WORD_BYTES = 8
WORD_ROWS, WORD_COLUMNS = 8, 128  # words a program moves: 64 bytes a thread, in runs of a kilobyte
PLAIN_ROWS, PLAIN_COLUMNS = 4, 1024  # elements a program moves where rows start aligned already

# The kernel's names for the first and the second matrix: source and target, sizes, sizes of the target, strides.
_NAMES = (
    ("source", "target", "M", "N", "P", "Q", "s_m", "s_n", "t_m"),
    ("source_2", "target_2", "M_2", "N_2", "P_2", "Q_2", "u_m", "u_n", "v_m"),
)


def aligned_copies(
    problem: Problem,
    names: Sequence[str],
    steps: list[Step],
    buffers: dict[str, Buffer],
    sides: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, tuple[str, Matrix]]:
    """Where the operands `names` lie once the step that is added here has run, by buffer and layout.

    sides: rows and columns of a copy that is to be larger than its matrix; what lies beyond the matrix is zero.
    """
    if not names:
        return {}
    size = problem.element_bytes
    near = all(getattr(problem, name).tma(size) for name in names)
    rows, columns = (PLAIN_ROWS, PLAIN_COLUMNS) if near else (WORD_ROWS, WORD_COLUMNS * WORD_BYTES // size)
    arguments: dict[str, Argument] = dict.fromkeys(name for both in _NAMES for name in both)
    words, counts, copies, wide = [], [], {}, problem.wide
    for name, called in zip(names, _NAMES, strict=False):
        matrix: Matrix = getattr(problem, name)
        turned = abs(matrix.row_stride) < abs(matrix.column_stride)  # along the nearer stride: coalesced reads
        lies = _turned(matrix) if turned else matrix
        tall, long = (sides or {}).get(name, (matrix.rows, matrix.columns))
        tall, long = (long, tall) if turned else (tall, long)
        leading = blocks(long, ALIGNMENT_BYTES // size) * (ALIGNMENT_BYTES // size)
        copy = f"{name}_copy"
        buffers[copy] = Buffer(tall * leading, problem.dtype)
        numbers = (lies.rows, lies.columns, tall, long, lies.row_stride, lies.column_stride, leading)
        arguments |= dict(zip(called, (Pointer(name), Pointer(copy), *numbers), strict=True))
        words.append(not near and lies.column_stride == 1 and lies.aligned and size < WORD_BYTES)
        counts.append(blocks(tall, rows) * blocks(long, columns))
        wide = wide or tall * leading >= INT32_LIMIT  # the copy's rows are longer than what it copies
        held = (matrix.rows, matrix.columns) if sides is None else sides.get(name, (matrix.rows, matrix.columns))
        copies[name] = copy, Matrix(*held, *((1, leading) if turned else (leading, 1)))
    constants = {
        "ROWS": rows, "COLUMNS": columns, "BITS": 8 * size, "WORDS": words[0], "WORDS_2": words[-1],
        "BOTH": len(names) == 2, "EARLY": False,
    }  # fmt: skip
    arguments["blocks"] = counts[0]
    # Wide stores would put unaligned reads several words apart from thread to thread; without, they are neighbours.
    steps.append(Step(COPY_PASS, (sum(counts), 1), arguments, constants, wide=wide, hints=near))
    return copies


def _turned(matrix: Matrix) -> Matrix:
    return Matrix(matrix.columns, matrix.rows, matrix.column_stride, matrix.row_stride, matrix.aligned)
