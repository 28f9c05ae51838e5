"""Rows that begin at any element, moved 16 bytes at a time.

A row of 50257 16-bit elements begins at any even address, so that the compiler loads and stores one element per
instruction. Seen from the 16-byte boundary before its beginning, lane i of a row is its element i - shift: lanes come
in groups of GROUP elements that lie between two boundaries. A group is loaded if any of its elements is the row's, and
the others are replaced: they are a neighbour's, or behind the tensor's end, but never beyond a boundary and so never on
another page. It is stored at once where all of it is the row's; at a row's two ends, element by element.

GROUP is 1 where none of this is needed, or where rows of the tensors do not begin alike: a lane is then a column.
"""

# mypy: disable-error-code="no-untyped-def"

import math

import triton
import triton.language as tl

from tilemesh.core.cost import short_dtype
from tilemesh.kernels.launch.call import Place

LOG2_E = tl.constexpr(1.4426950408889634)  # multiplied in after the difference: before it, great logits overflow
NOTHING = tl.constexpr(-3.4028234663852886e38)
NOTHING_WIDE = tl.constexpr(-1.7976931348623157e308)
"""Where a running maximum begins: the least number of float32 and float64, so that no difference is inf - inf."""
LONGEST_PERIOD = 8  # of rows that begin alike: 16 bytes of the narrowest dtype
_FEWEST_GROUPS = 8  # of a row: a shorter one has most of its elements at its ends


def group_of(*rows: Place) -> int:
    """GROUP of kernels that read and write rows of these tensors, (rows, columns) of one width, lane by lane."""
    first = rows[0]
    group = 16 // short_dtype(first.dtype)[1]
    columns, stride = first.shape[1], first.strides[0]
    is_alike = all(
        place.aligned and (place.dtype, place.strides[1], place.strides[0] % group) == (first.dtype, 1, stride % group)
        for place in rows
    )
    half = group // 2  # rows at multiples of 8 bytes have loads of 8 bytes by themselves
    is_needed = columns % half or stride % half
    return group if is_alike and is_needed and columns >= _FEWEST_GROUPS * group else 1


def tile_group(*rows: Place) -> int:
    """The same where one tile holds a row: 1 where the lanes before its beginning would make the tile twice as wide."""
    group, columns = group_of(*rows), rows[0].shape[1]
    return group if triton.next_power_of_2(columns + group - 1) == triton.next_power_of_2(columns) else 1


def period_of(rows: Place, group: int) -> int:
    """How many rows it takes until one begins like the first again, seen from boundaries of `group` elements."""
    return group // math.gcd(rows.strides[0], group)


@triton.jit
def columns_of(start, lane, GROUP: tl.constexpr):
    """Columns of lanes in the row whose first element is `start`."""
    return lane if GROUP == 1 else lane - start % GROUP


@triton.jit
def is_inside(start, lane, end, GROUP: tl.constexpr):
    """Which lanes are columns [0, end) of that row. Written without `columns_of`: one difference less per element."""
    if GROUP == 1:
        inside = lane < end
    else:
        inside = (lane >= start % GROUP) & (lane < end + start % GROUP)
    return inside


@triton.jit
def load_lanes(
    tensor, start, lane, end, step, is_row, other, GROUP: tl.constexpr, ENDS: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Columns [0, end) of the row at `start`, and `other` in all other lanes and where there is no such row.

    step: between elements, 1 unless GROUP is. ENDS: whether a lane may be outside of the row. AGAIN: it is the last of
    two times that these are read, and the L2 cache need not keep them.
    """
    at = tensor + start + lane * step if GROUP == 1 else tensor + start // GROUP * GROUP + lane
    policy: tl.constexpr = "evict_first" if AGAIN else ""
    if not ENDS:
        value = tl.load(at, mask=is_row, other=other, eviction_policy=policy)
    elif GROUP == 1:
        value = tl.load(at, mask=(lane < end) & is_row, other=other, eviction_policy=policy)
    else:
        is_loaded = (lane // GROUP * GROUP < end + start % GROUP) & is_row
        value = tl.load(at, mask=is_loaded, other=other, eviction_policy=policy)
        if value.dtype == tl.bfloat16:  # of which the interpreter makes no constant
            value = value.to(tl.float32)
        value = tl.where(is_inside(start, lane, end, GROUP), value, other)
    return value


@triton.jit
def store_lanes(tensor, start, lane, end, is_row, value, GROUP: tl.constexpr, ENDS: tl.constexpr):
    """The opposite: what the lanes of columns [0, end) hold becomes the row at `start`, whose elements lie together."""
    at = tensor + start + lane if GROUP == 1 else tensor + start // GROUP * GROUP + lane
    value = value.to(tensor.dtype.element_ty)
    if not ENDS:
        tl.store(at, value, mask=is_row)
    elif GROUP == 1:
        tl.store(at, value, mask=(lane < end) & is_row)
    else:
        shift = start % GROUP
        first = lane // GROUP * GROUP
        is_full = (first >= shift) & (first + GROUP <= end + shift)
        tl.store(at, value, mask=is_full & is_row)
        tl.store(at, value, mask=is_inside(start, lane, end, GROUP) & (is_full == 0) & is_row)


@triton.jit
def scaled(value, is_counted, factor, UNSEEN: tl.constexpr):
    """value * factor, and -inf where nothing counts: what was loaded there becomes that, unless factor is 0."""
    value = value * factor
    if UNSEEN == 0.0:
        value = tl.where(is_counted, value, float("-inf"))
    return value


@triton.jit
def add_exponentials(
    x, start, first, end, x_n, factor, pivot, largest, total, plain, UNSEEN: tl.constexpr, SMOOTHS: tl.constexpr,
    ENDS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """With a block of columns from `first` on: each lane's largest element, its sum of exponentials and its sum above
    `pivot`.

    A lane has several columns side by side, which one thread loads at once: its sum is rescaled once for all of them,
    and not by one more exponential for each.
    """
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    each: tl.constexpr = COLUMNS // LANES
    lane = first + tl.arange(0, LANES)[:, None] * each + tl.arange(0, each)[None, :]
    value = load_lanes(x, start, lane, end, x_n, end > 0, UNSEEN, GROUP, ENDS, False).to(kind)
    value = scaled(value, is_inside(start, lane, end, GROUP), factor, UNSEEN)
    if SMOOTHS:
        above = value - pivot
        if ENDS:
            above = tl.where(is_inside(start, lane, end, GROUP), above, 0.0)
        plain += tl.sum(above, 1)
    larger = tl.maximum(largest, tl.max(value, 1))
    powers = tl.sum(tl.exp2((value - larger[:, None]) * LOG2_E), 1)
    return larger, total * tl.exp2((largest - larger) * LOG2_E) + powers, plain


@triton.jit
def row_sums(
    x, start, end, x_n, factor, pivot, UNSEEN: tl.constexpr, SMOOTHS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of columns [0, end) of a row, times `factor`: the largest, sum(exp(row - largest)), and with SMOOTHS
    sum(row - pivot).

    The two are never added up: log(sum(exp(row))) has the rounding of what all elements share. Blocks between the first
    and the last have no end of the row, and no mask.
    """
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    lanes: tl.constexpr = COLUMNS // 8 if COLUMNS >= 8 else 1
    largest = tl.full((lanes,), NOTHING_WIDE if WIDE else NOTHING, kind)
    total = tl.zeros((lanes,), kind)
    plain = tl.zeros((lanes,), kind)
    whole = end // COLUMNS * COLUMNS
    largest, total, plain = add_exponentials(
        x, start, 0, end, x_n, factor, pivot, largest, total, plain, UNSEEN, SMOOTHS, True, COLUMNS, lanes, GROUP, WIDE
    )
    for first in tl.range(COLUMNS, whole, COLUMNS, num_stages=1):
        largest, total, plain = add_exponentials(
            x, start, first, end, x_n, factor, pivot, largest, total, plain,
            UNSEEN, SMOOTHS, False, COLUMNS, lanes, GROUP, WIDE,
        )  # fmt: skip
    for first in tl.range(tl.maximum(whole, COLUMNS), end + GROUP - 1, COLUMNS, num_stages=1):
        largest, total, plain = add_exponentials(
            x, start, first, end, x_n, factor, pivot, largest, total, plain,
            UNSEEN, SMOOTHS, True, COLUMNS, lanes, GROUP, WIDE,
        )  # fmt: skip
    top = tl.max(largest, 0)
    return top, tl.sum(total * tl.exp2((largest - top) * LOG2_E), 0), tl.sum(plain, 0)
