"""Numbers of few bits as data: names, bytes, bit layouts. No torch."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.kernels.lowbit.formats import FORMATS, LAYOUTS, NF4, Scheme, parse_scheme

SCHEMES = ("int8", "int4-g128", "int3-g64", "int2-g32-affine", "int8-tensor", "fp8", "fp8-e5m2-g64", "nf4-g64",
           "fixed16", "int4-g32-2level", "int4-g32-affine-2level")  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_is_its_name(name):
    assert parse_scheme(name).name == name


def test_bytes_of_a_matrix_are_counted():
    assert Scheme("int8").nbytes(16, 64) == 16 * 64 + 16 * 4
    assert parse_scheme("int4-g32").nbytes(16, 64) == 16 * 32 + 16 * 2 * 4
    assert parse_scheme("int3-g32").nbytes(16, 64) == 16 * 24 + 16 * 2 * 4
    assert parse_scheme("int4-g32-affine").nbytes(16, 64) == 16 * 32 + 16 * 2 * 5
    assert parse_scheme("int4-g32-2level").nbytes(16, 64) == 16 * 32 + 16 * (2 + 4)
    assert parse_scheme("int8-tensor").nbytes(16, 64) == 16 * 64 + 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int5", "unknown number format 'int5'"),
        ("int4-q32", "unknown part of the scheme 'int4-q32' 'q32'"),
        ("fp8-affine", "fp8 has no zero point"),
        ("int4-g0", "group is 0"),
        ("int4-2level", "set granularity to group"),
        ("fixed16-g32-2level", "powers of two"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(text, words):
    with pytest.raises(UsageError, match=words) as caught:
        parse_scheme(text)
    assert "\n" not in str(caught.value)


def test_a_group_that_does_not_divide_names_groups_that_do():
    with pytest.raises(UsageError, match="groups of 128 do not divide 192 inputs: set a divisor, such as 64, 32, 16"):
        parse_scheme("int4-g128").groups(192)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_the_fields_of_a_float_give_its_value(value):
    assert LAYOUTS["fp32"].value(struct.unpack("<I", struct.pack("<f", value))[0]) == value


@given(st.floats(width=16, allow_nan=False, allow_infinity=False))
def test_the_fields_of_a_half_give_its_value(value):
    (code,) = struct.unpack("<H", struct.pack("<e", value))
    assert LAYOUTS["fp16"].value(code) == value


def test_layouts_have_the_bits_and_largest_numbers_that_they_should():
    assert {name: layout.bits for name, layout in LAYOUTS.items()} == {
        "fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "fp8-e5m2": 8,
    }  # fmt: skip
    assert LAYOUTS["fp8"].value(0b0_1111_110) == FORMATS["fp8"].high  # the code above it is NaN
    assert LAYOUTS["fp8-e5m2"].value(0b0_11110_11) == FORMATS["fp8-e5m2"].high
    assert LAYOUTS["bf16"].value(0x4300 + 5) == 133.0  # what the kernels of 4 bits rely on
    assert LAYOUTS["fp16"].value(0x6400 + 15) == 1039.0


def test_nf4_has_sixteen_rising_values_and_zero():
    assert len(NF4) == 16
    assert list(NF4) == sorted(NF4)
    assert 0.0 in NF4
    assert math.isclose(max(NF4), 1)
