"""Datasheet figures are consistent with each other, and cluster strings mean what DESIGN says."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import (
    A100,
    B200,
    DEVICES,
    DTYPE_BYTES,
    H100,
    H200,
    LINKS,
    T4,
    Cluster,
    Device,
    device_for,
    find_device,
    make_node,
    parse_cluster,
)

GPUS = [device for device in DEVICES.values() if device.kind == "gpu"]


@pytest.mark.parametrize("device", GPUS, ids=lambda d: d.name)
def test_peaks_are_dense_and_ordered(device: Device) -> None:
    """A sparse figure that slipped in would break the ratios that dense tensor cores have."""
    peak = device.peak_flops_per_s
    assert set(peak) <= set(DTYPE_BYTES)
    assert peak["fp64"] <= peak["fp32"] < peak["fp16"]
    if "bf16" in peak:
        assert peak["bf16"] == peak["fp16"]
        assert peak["fp16"] / peak["tf32"] == pytest.approx(2, rel=0.03)
    if "fp8" in peak:
        assert peak["fp8"] / peak["fp16"] == pytest.approx(2, rel=0.001)


@pytest.mark.parametrize("device", GPUS, ids=lambda d: d.name)
def test_memory_and_shared_memory_are_plausible(device: Device) -> None:
    assert 0.9 < device.usable_bytes / device.memory_bytes < 1
    # 1 KiB of shared memory per block is kept by the system from capability 8.0 on.
    reserved = 1024 if device.capability >= (8, 0) else 0
    assert device.shared_bytes_per_sm - device.shared_bytes_per_block == reserved
    assert device.registers_per_sm == 65536


@pytest.mark.parametrize(
    ("name", "bus_bits", "bits_per_pin_s", "l2_mib"),
    [
        *[("t4", 256, 10e9, 4), ("a10", 384, 12.5e9, 6), ("a100-80", 5120, 3.186e9, 40), ("h100", 5120, 5.24e9, 50)],
        *[("h200", 6144, 6.25e9, 60), ("b200", 7680, 7.992e9, 126.5)],
    ],
)
def test_memory_is_as_wide_and_fast_as_its_chips(
    name: str, bus_bits: int, bits_per_pin_s: float, l2_mib: float
) -> None:
    """Bandwidth is the bus times what a pin carries, as the white papers have both."""
    device = DEVICES[name]
    assert device.memory_bytes_per_s == pytest.approx(bus_bits / 8 * bits_per_pin_s, rel=0.01)
    assert device.l2_bytes == int(l2_mib * 2**20)


def test_known_figures() -> None:
    assert A100.peak("bf16") == 312e12
    assert A100.memory_bytes_per_s == 2.039e12
    assert H100.peak("bf16") == pytest.approx(1979e12 / 2, rel=1e-3)  # the datasheet's is with sparsity
    assert (H200.memory_bytes_per_s, H200.sm_count, H200.capability) == (4.8e12, 132, (9, 0))
    assert H200.peak_flops_per_s == H100.peak_flops_per_s
    assert B200.peak("fp8") == 4.5e15


def test_links_are_per_direction() -> None:
    both_ways = {"nvlink3": 600e9, "nvlink4": 900e9, "nvlink5": 1800e9}
    assert {name: 2 * LINKS[name].bytes_per_s for name in both_ways} == both_ways
    assert LINKS["ndr"].bytes_per_s == 50e9
    assert LINKS["ethernet100"].bytes_per_s == 12.5e9
    assert LINKS["pcie5"].bytes_per_s == pytest.approx(63.0e9, rel=1e-3)
    assert all(0 < link.latency_s < 1e-4 for link in LINKS.values())


def test_a_missing_dtype_is_refused_by_name() -> None:
    with pytest.raises(UsageError) as caught:
        T4.peak("bf16")
    assert str(caught.value) == "t4 has no matmul peak for dtype 'bf16': known are fp64, fp32, fp16"


def test_devices_can_be_dictionary_keys() -> None:
    assert len({*DEVICES.values(), dataclasses.replace(H100)}) == len(DEVICES)


@pytest.mark.parametrize(("text", "expected"), [("a100", A100), ("A100-80GB", A100), (" H100 ", H100), ("t4", T4)])
def test_find_device(text: str, expected: Device) -> None:
    assert find_device(text) is expected


@pytest.mark.parametrize(
    ("text", "nodes", "count", "device"),
    [
        ("64xh100", 8, 8, "h100"),
        ("4x8xa100", 4, 8, "a100-80"),
        ("1xh200", 1, 1, "h200"),
        ("8xH100", 1, 8, "h100"),
        ("3xa100-80", 1, 3, "a100-80"),
        ("2x4xT4", 2, 4, "t4"),
        ("35x8xa100", 35, 8, "a100-80"),
        ("280xa100", 35, 8, "a100-80"),
        ("2x16xb200", 2, 16, "b200"),
        ("2xcpu", 1, 2, "cpu"),
    ],
)
def test_parse_cluster(text: str, nodes: int, count: int, device: str) -> None:
    cluster = parse_cluster(text)
    assert (len(cluster.nodes), cluster.node.count, cluster.device.name) == (nodes, count, device)
    assert cluster.world == nodes * count
    assert parse_cluster(cluster.name) == cluster


@settings(deadline=None)
@given(nodes=st.integers(1, 600), count=st.integers(1, 16), device=st.sampled_from(sorted(DEVICES)))
def test_a_cluster_string_with_nodes_round_trips(nodes: int, count: int, device: str) -> None:
    text = f"{nodes}x{count}x{device}"
    assert parse_cluster(text).name == text


@pytest.mark.parametrize(
    ("text", "intra", "inter", "per_device"),
    [
        ("16xa100", "nvlink3", "hdr", 25e9),
        ("16xh100", "nvlink4", "ndr", 50e9),
        ("2x4xh200", "nvlink4", "ndr", 50e9),  # fewer GPUs, fewer adapters
        ("16xb200", "nvlink5", "ndr", 50e9),
        ("16xt4", "pcie3", "ethernet100", 12.5e9 / 8),  # one port for the whole node
        ("2x4xa10", "pcie4", "ethernet100", 12.5e9 / 4),
    ],
)
def test_default_links(text: str, intra: str, inter: str, per_device: float) -> None:
    node = parse_cluster(text).node
    assert (node.intra.name, node.inter.name) == (intra, inter)
    assert node.inter_bytes_per_s_per_device == per_device


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "12xh100",
            "cluster '12xh100' does not fill nodes of 8: write 8xh100 or 16xh100, or say the nodes, 2x6xh100",
        ),
        (
            "13xa100",
            "cluster '13xa100' does not fill nodes of 8: write 8xa100 or 16xa100, or say the nodes, 13x1xa100",
        ),
        ("h100", "cluster 'h100' is not understood: write 64xh100 (64 GPUs) or 4x8xa100 (4 nodes of 8)"),
        ("", "cluster '' is not understood: write 64xh100 (64 GPUs) or 4x8xa100 (4 nodes of 8)"),
        ("2x3x4xh100", "cluster '2x3x4xh100' is not understood: write 64xh100 (64 GPUs) or 4x8xa100 (4 nodes of 8)"),
        ("0xh100", "cluster '0xh100' has no devices: write at least 1xh100"),
        ("2x0xh100", "cluster '2x0xh100' has no devices: write at least 1xh100"),
        ("8xh101", "unknown device 'h101': did you mean 'h100'? known are t4, a10, a100-80, h100, h200, b200, cpu"),
    ],
)
def test_parse_cluster_refuses(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_cluster(text)
    assert str(caught.value) == message


def test_a_cluster_is_uniform_and_not_empty() -> None:
    with pytest.raises(UsageError) as caught:
        Cluster((make_node(H100, 8), make_node(H100, 4)))
    assert str(caught.value) == "the nodes of a cluster must be alike: same device, count and links"
    with pytest.raises(UsageError) as caught:
        Cluster(())
    assert str(caught.value) == "a cluster needs at least one node"


@pytest.mark.parametrize(
    ("driver_name", "expected"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("Tesla T4", "t4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA B200", "b200"),
        # Near names of other hardware: no figure rather than a wrong one.
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("", None),
    ],
)
def test_device_for(driver_name: str, expected: str | None) -> None:
    found = device_for(driver_name)
    assert (found.name if found else None) == expected
