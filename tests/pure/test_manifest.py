"""The Kubernetes page's manifest: its numbers and names agree with one another and with what tilemesh is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tilemesh.core.axes import ORDER

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "kubernetes.md"


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def test_pods_ranks_and_mesh_agree(manifest: dict[str, Any]) -> None:
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    script = container["command"][-1]
    nodes, each = (int(re.search(rf"--{name} (\d+)", script)[1]) for name in ("nnodes", "nproc-per-node"))  # type: ignore[index]
    sizes = dict(part.split("=") for part in re.search(r"--mesh (\S+?)\"", script)[1].split(","))  # type: ignore[index]
    assert spec["parallelism"] == spec["completions"] == nodes
    assert container["resources"]["limits"]["nvidia.com/gpu"] == each
    assert set(sizes) <= set(ORDER)
    ranks = 1
    for size in sizes.values():
        ranks *= int(size)
    assert ranks == nodes * each


def test_the_first_pod_has_the_name_at_which_ranks_meet(manifest: dict[str, Any]) -> None:
    (job,) = manifest["spec"]["replicatedJobs"]
    name, script = (
        manifest["metadata"]["name"],
        job["template"]["spec"]["template"]["spec"]["containers"][0]["command"][-1],
    )
    assert f"--master-addr {name}-{job['name']}-0-0.{name} " in script  # JobSet: set, job, replica, pod; then the set


def test_volumes_are_those_that_are_mounted(manifest: dict[str, Any]) -> None:
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert any(mount["mountPath"] == "/dev/shm" for mount in pod["containers"][0]["volumeMounts"])
