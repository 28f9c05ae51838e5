"""What is asked of the fused matmul, as a plain value: D = act(A @ B + C).

A `Problem` holds everything a choice of kernel may depend on and nothing else (no tensor, no pointer), so
plans, costs, the tuner and the cache can be written and tested without torch.

M, N, K are sizes as in A (M,K), B (K,N), D (M,N). Strides are in elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilemesh.kernels.launch.steps import INT32_LIMIT

C_KINDS = ("none", "full", "row", "column")  # row: (N,), the usual bias; column: (M,1)
LAYOUTS = ("nn", "nt", "tn", "tt")
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

TMA_ALIGNMENT_BYTES = 16  # of a descriptor's base address and of every stride but the last
LIBRARY_GROUP_BYTES = 16  # what the vendor's fast kernels load at once, and want N and K to be made of


@dataclass(frozen=True)
class Matrix:
    """How a matrix lies in memory: its sizes, its two strides and whether its address is 16-byte aligned."""

    rows: int
    columns: int
    row_stride: int
    column_stride: int
    aligned: bool = True

    @property
    def transposed(self) -> bool:
        """Whether the first dim is the contiguous one (a column-major matrix)."""
        return self.row_stride == 1 and self.column_stride != 1

    def tma(self, element_bytes: int) -> bool:
        """Whether a TMA descriptor can describe it: one unit stride, the other and the address 16-byte aligned."""
        if self.rows == 0 or self.columns == 0 or not self.aligned:
            return False
        leading = self.column_stride if self.transposed else self.row_stride
        contiguous = self.row_stride if self.transposed else self.column_stride
        span = self.rows if self.transposed else self.columns
        in_order = leading >= span and contiguous == 1
        return in_order and leading * element_bytes % TMA_ALIGNMENT_BYTES == 0

    @property
    def reach(self) -> int:
        """One past the largest element offset that indexing it can produce."""
        if self.rows == 0 or self.columns == 0:
            return 0
        return (self.rows - 1) * abs(self.row_stride) + (self.columns - 1) * abs(self.column_stride) + 1


@dataclass(frozen=True)
class Problem:
    """One fused matmul. `keep` asks for the value before the activation too, which some gradients need.

    `slope`: instead, D = (A @ B) act'(C) with a C of D's shape, for gradients; `pingpong` alone computes it.
    """

    a: Matrix
    b: Matrix
    c: Matrix | None
    d: Matrix
    c_kind: str
    dtype: str
    activation: str
    precision: str = "tf32"  # of a float32 product: "tf32" or "ieee"; other dtypes ignore it
    keep: bool = False
    slope: bool = False

    @property
    def m(self) -> int:
        return self.d.rows

    @property
    def n(self) -> int:
        return self.d.columns

    @property
    def k(self) -> int:
        return self.a.columns

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def library_group(self) -> int:
        """Elements of which N and K are to be multiples for the vendor's fast kernels."""
        return LIBRARY_GROUP_BYTES // self.element_bytes

    @property
    def slow_operands(self) -> list[str]:
        """Operands that the library reads slowly as they are. A K that has to be filled up with zeros is so in both."""
        group, size = self.library_group, self.element_bytes
        deep = self.k % group > 0
        slow = {
            "a": deep or not self.a.tma(size),
            "b": deep or self.n % group > 0 or not self.b.tma(size),
        }
        return [name for name, is_slow in slow.items() if is_slow]

    @property
    def epilogue_in_library(self) -> bool:
        """Whether cuBLASLt adds the bias and applies the activation itself (its gelu is the tanh form)."""
        fits = self.c_kind == "row" and self.activation in ("relu", "gelu_tanh") and not self.keep
        plain = self.d.column_stride == 1 and (self.c is None or self.c.column_stride == 1)
        return fits and plain and self.element_bytes == 2

    @property
    def wide(self) -> bool:
        """Whether an element offset can pass 2**31, so that index math must be 64-bit."""
        matrices = [self.a, self.b, self.d] + ([self.c] if self.c else [])
        return any(matrix.reach >= INT32_LIMIT for matrix in matrices)

    @property
    def layout(self) -> str:
        """What of the strides matters to speed, as a word for cache keys: `nn`, `nt`, `tn`, `tt` (+`u` unaligned).

        `s` is a matrix without a unit stride. C and D are named only where they do not lie as `dense` ones would:
        `nn-ct` has a transposed C, `nn-dp` a D whose rows are cut from longer ones that TMA cannot write.
        """
        size = self.element_bytes
        turned = "".join(_turn(matrix) for matrix in (self.a, self.b))
        for name, matrix in (("c", self.c), ("d", self.d)):
            word = "n" if matrix is None else self._place(matrix)
            turned += "" if word == "n" else f"-{name}{word}"
        return turned + ("" if self.a.tma(size) and self.b.tma(size) else "u")

    def _place(self, matrix: Matrix) -> str:
        """How C or D lies: n as a dense one, t transposed, s scattered, p padded or unaligned where n is not."""
        if 1 in (matrix.rows, matrix.columns):
            return "n" if matrix.reach <= max(matrix.rows, matrix.columns) else "s"
        word, size = _turn(matrix), self.element_bytes
        plain = matrix.tma(size) or not contiguous(matrix.rows, matrix.columns).tma(size)
        return word if plain or word != "n" else "p"

    @property
    def key(self) -> str:
        """The name under which a tuned configuration is stored, e.g. `2048x2048x2048 float16 nn full relu`."""
        dtype = self.dtype + ("-ieee" if self.dtype == "float32" and self.precision == "ieee" else "")
        return (
            f"{self.m}x{self.n}x{self.k} {dtype} {self.layout} {self.c_kind} {self.activation}{'-slope' * self.slope}"
        )


def _turn(matrix: Matrix) -> str:
    return "t" if matrix.transposed else "s" if matrix.column_stride != 1 and matrix.columns > 1 else "n"


def contiguous(rows: int, columns: int) -> Matrix:
    return Matrix(rows, columns, max(columns, 1), 1)


def dense(
    m: int,
    n: int,
    k: int,
    *,
    dtype: str = "float16",
    c_kind: str = "full",
    activation: str = "relu",
    keep: bool = False,
    layout: str = "nn",
) -> Problem:
    """The problem of contiguous matrices: what benchmarks, the tuner and predictions speak of.

    layout: of A, then of B, n as written and t transposed; `nt` is a linear layer's, whose weight is (N, K). A float32
    product is in the precision that torch has where nobody set it.
    """
    c = {"full": contiguous(m, n), "row": Matrix(1, n, 0, 1), "column": Matrix(m, 1, 1, 0), "none": None}[c_kind]
    a = contiguous(m, k) if layout[0] == "n" else Matrix(m, k, 1, max(m, 1))
    b = contiguous(k, n) if layout[1] == "n" else Matrix(k, n, 1, max(k, 1))
    precision = "ieee" if dtype == "float32" else "tf32"
    return Problem(a, b, c, contiguous(m, n), c_kind, dtype, activation, precision, keep)
