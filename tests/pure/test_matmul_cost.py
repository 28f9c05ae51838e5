"""FLOPs, bytes and the cost model: counted by hand, and ordered as physics orders them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilemesh.core.hardware import DEVICES
from tilemesh.kernels.matmul.config import Config, default, space
from tilemesh.kernels.matmul.cost import cost, device_or_nearest, predict_s, rates_of
from tilemesh.kernels.matmul.problem import dense

RATES = rates_of(DEVICES["h200"], "float16")


def test_counts_by_hand():
    work = cost(dense(2, 3, 5))
    assert work.flops == 2 * 2 * 3 * 5
    assert work.bytes_read == 2 * (2 * 5 + 5 * 3 + 2 * 3)
    assert work.bytes_written == 2 * 2 * 3
    assert work.dtype == "fp16"


@pytest.mark.parametrize(("c_kind", "elements"), [("none", 0), ("row", 3), ("column", 2), ("full", 6)])
def test_c_is_read_as_often_as_it_is_large(c_kind, elements):
    assert cost(dense(2, 3, 5, c_kind=c_kind)).bytes_read == 2 * (10 + 15 + elements)


def test_keeping_the_sum_writes_twice_and_tf32_is_its_own_peak():
    assert cost(dense(4, 4, 4, keep=True)).bytes_written == 2 * cost(dense(4, 4, 4)).bytes_written
    single = dense(4, 4, 4, dtype="float32")
    assert cost(replace(single, precision="tf32")).dtype == "tf32"
    assert cost(single).dtype == "fp32", "what torch does unless it is told otherwise"


@pytest.mark.parametrize("shape", [(512, 512, 512), (4096, 4096, 4096), (64, 4096, 4096), (2049, 2047, 2051)])
def test_predictions_are_above_the_limit_and_grow_with_the_work(shape):
    m, n, k = shape
    for config in space(dense(*shape))[::7]:
        limit = max(2 * m * n * k / 989.4e12, cost(dense(*shape)).bytes_moved / 4.8e12)
        assert predict_s(dense(*shape), config, RATES) > limit
        assert predict_s(dense(m, n, 2 * k), config, RATES) > predict_s(dense(*shape), config, RATES)


def test_the_model_knows_what_each_kind_is_for():
    skinny, large = dense(64, 1024, 65536), dense(8192, 8192, 8192)
    assert predict_s(skinny, Config("split", 64, 64, 64, split_k=8), RATES) < predict_s(
        skinny, Config("tma", 64, 64, 64), RATES
    )
    assert predict_s(large, default("persistent", large), RATES) < predict_s(large, Config("tma", 64, 64, 64), RATES)
    assert predict_s(large, Config("library"), RATES) < predict_s(large, Config("torch"), RATES)


def test_cutting_the_tail_pays_where_the_last_wave_is_nearly_empty():
    problem = dense(128 * 133, 256, 8192)  # 133 tiles on 132 multiprocessors
    plain = Config("persistent", 128, 256, 64, 8, 3)
    cut = Config("persistent", 128, 256, 64, 8, 3, tail=True, split_k=8)
    assert predict_s(problem, cut, RATES) < 0.8 * predict_s(problem, plain, RATES)


def test_an_unknown_gpu_is_ranked_by_an_h100():
    assert device_or_nearest("NVIDIA H200").name == "h200"
    assert device_or_nearest("Unheard-of GPU").name == "h100"
